//! A JSON body.

use reqwest::header::HeaderValue;
use serde_json::{Map, Value};

use super::Refusal;
use super::media::json_of;
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
        let Some((kind, media)) = json_of(content) else {
            let why = "its body is not JSON".to_owned();
            return if required { Err(Refusal::Unsupported(why)) } else { Ok(None) };
        };
        // A range is what a server takes, and no type that a body could have.
        let kind = if kind.contains('*') { "application/json" } else { kind };
        let kind = HeaderValue::from_str(kind).map_err(|_| Refusal::Malformed("`requestBody`"))?;
        let schema = match media.get("schema") {
            Some(schema) => resolver.schema(schema)?,
            None => Value::Object(Map::new()),
        };
        Ok(Some((Self { required, kind }, schema)))
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
    }
}
