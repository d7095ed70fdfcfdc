//! A JSON body.

use reqwest::header::HeaderValue;
use serde_json::{Map, Value};

use super::Refusal;
use super::media::{any_of, json_of};
use super::schema::Resolver;

/// A JSON body.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) required: bool,
    pub(super) kind: HeaderValue,
}

impl Body {
    /// Reads a body, with its schema. `None` if it is no JSON and can be left
    /// out.
    pub(super) fn read<'a>(
        given: &'a Map<String, Value>,
        resolver: &mut Resolver<'a>,
    ) -> Result<Option<(Self, Value)>, Refusal> {
        let required = given.get("required") == Some(&Value::Bool(true));
        let content = given.get("content").and_then(Value::as_object);
        let content = content.ok_or(Refusal::Malformed("`requestBody`"))?;
        let mut read = |media: &'a Value| match media.get("schema") {
            Some(schema) => resolver.schema(schema),
            None => Ok(Value::Object(Map::new())),
        };
        let json = match (json_of(content), any_of(content)) {
            // A range is what a server takes, and no type that a body could have.
            (Some((kind, media)), _) if kind.contains('*') => {
                Some(("application/json", read(media)?))
            }
            (Some((kind, media)), _) => Some((kind, read(media)?)),
            // Texts and bytes are sent as they are where anything is taken.
            (None, Some(media)) => {
                Some(("application/json", read(media)?)).filter(|(_, schema)| !is_text(schema))
            }
            (None, None) => None,
        };
        let Some((kind, schema)) = json else {
            let why = "its body is not JSON".to_owned();
            return if required { Err(Refusal::Unsupported(why)) } else { Ok(None) };
        };
        let kind = HeaderValue::from_str(kind).map_err(|_| Refusal::Malformed("`requestBody`"))?;
        Ok(Some((Self { required, kind }, schema)))
    }
}

/// Whether a schema is of a text, or of bytes that are said to be one.
fn is_text(schema: &Value) -> bool {
    match &schema["type"] {
        Value::Array(types) => types.iter().any(|it| it == "string"),
        kind => kind == "string",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_several_kinds_of_json_a_body_is_the_plain_one() {
        let of = |kinds: &[&str]| {
            let content: Map<String, Value> =
                kinds.iter().map(|kind| ((*kind).to_owned(), json!({}))).collect();
            let given = json!({"content": content});
            let document = json!({});
            let mut resolver = Resolver::new(&document, false);
            let (body, _) = Body::read(given.as_object().unwrap(), &mut resolver).unwrap()?;
            Some(body.kind.to_str().unwrap().to_owned())
        };
        let plain = Some("application/json".to_owned());
        assert_eq!(of(&["application/*+json", "application/json", "text/json"]), plain);
        assert_eq!(of(&["application/*+json", "text/xml"]), plain);
        let patches = ["application/json-patch+json", "application/merge-patch+json"];
        assert_eq!(of(&patches).as_deref(), Some(patches[1]));
        assert_eq!(of(&patches[..1]).as_deref(), Some(patches[0]));
        assert_eq!(of(&["application/hal+json", "text/xml"]).unwrap(), "application/hal+json");
        assert_eq!(of(&["text/xml"]), None);
        assert_eq!(of(&["*/*"]), plain);
        assert_eq!(of(&["application/*", "text/xml"]), plain);
        assert_eq!(of(&["application/hal+json", "*/*"]).unwrap(), "application/hal+json");
    }

    #[test]
    fn where_anything_is_taken_a_text_is_no_json() {
        let of = |schema: Value| {
            let given = json!({"content": {"*/*": {"schema": schema}}});
            let document = json!({});
            let mut resolver = Resolver::new(&document, false);
            Body::read(given.as_object().unwrap(), &mut resolver).unwrap().is_some()
        };
        assert!(of(json!({"type": "object"})) && of(json!({})) && of(json!({"type": "array"})));
        assert!(!of(json!({"type": "string", "format": "binary"})));
        assert!(!of(json!({"type": ["string", "null"]})));
    }
}
