//! What a body is: JSON, or a form.

use reqwest::header::HeaderValue;
use serde_json::{Map, Value};

use super::Refusal;
use super::form::{Form, Offered, form_of, required};
use super::media::{any_of, json_of};
use super::name::folded;
use super::schema::Resolver;
use crate::endpoint::Endpoint;

/// A body.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) required: bool,
    pub(super) kind: HeaderValue,
    /// How it is written, if not as JSON.
    pub(super) form: Option<Form>,
}

/// What becomes of a body that the document has.
pub(super) enum Read {
    /// An argument, with its schema, and what of it cannot be given.
    Argument(Body, Value, Vec<String>),
    /// There is nothing to be given.
    Nothing,
    /// It can be left out, and is.
    LeftOut,
}

impl Body {
    /// The names of its members, as servers tell them apart: those that are given, and
    /// all that a form has.
    pub(super) fn names(&self, value: Option<&Value>) -> Vec<String> {
        let given = value.and_then(Value::as_object).into_iter().flat_map(Map::keys);
        let of_form = self.form.iter().flat_map(Form::names);
        given.map(|name| folded(name)).chain(of_form).collect()
    }

    /// Reads a body, with its schema.
    pub(super) fn read<'a>(
        given: &'a Map<String, Value>,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
    ) -> Result<Read, Refusal> {
        let is_required = given.get("required") == Some(&Value::Bool(true));
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
        if let Some((kind, schema)) = json {
            let kind = HeaderValue::from_str(kind);
            let kind = kind.map_err(|_| Refusal::Malformed("`requestBody`"))?;
            let body = Self { required: is_required, kind, form: None };
            return Ok(Read::Argument(body, schema, Vec::new()));
        }
        let form = match form_of(content) {
            Some(media) => Form::read(media, read(media)?, &endpoint.query),
            None => None,
        };
        if let Some(Offered { form, schema, left_out }) = form {
            if form.is_empty() && left_out.is_empty() {
                return Ok(Read::Nothing);
            }
            if !form.is_empty() {
                let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
                // To say so is optional, and often forgotten.
                let required = is_required || is_needed(&schema);
                let body = Self { required, kind, form: Some(form) };
                return Ok(Read::Argument(body, schema, left_out));
            }
        }
        // An operation without what it cannot do without does something else.
        let mut schemas = content.values().filter_map(|media| media.get("schema"));
        let is_one = |it: &'a Value| resolver.schema(it).map_or(true, |it| is_needed(&it));
        match is_required || schemas.any(is_one) {
            true => Err(Refusal::Unsupported("its body is neither JSON nor a plain form".into())),
            false => Ok(Read::LeftOut),
        }
    }
}

/// Whether there are members that a value must have.
fn is_needed(schema: &Value) -> bool {
    let Some(object) = schema.as_object() else { return false };
    let listed = |word| object.get(word).and_then(Value::as_array).filter(|it| !it.is_empty());
    required(object).next().is_some()
        || listed("allOf").is_some_and(|all| all.iter().any(is_needed))
        || listed("anyOf").is_some_and(|some| some.iter().all(is_needed))
        || listed("oneOf").is_some_and(|some| some.iter().all(is_needed))
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
    use super::super::tests_endpoint;
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
            match Body::read(given.as_object().unwrap(), &tests_endpoint(), &mut resolver).unwrap()
            {
                Read::Argument(body, ..) => Some(body.kind.to_str().unwrap().to_owned()),
                _ => None,
            }
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
            let read =
                Body::read(given.as_object().unwrap(), &tests_endpoint(), &mut resolver).unwrap();
            matches!(read, Read::Argument(..))
        };
        assert!(of(json!({"type": "object"})) && of(json!({})) && of(json!({"type": "array"})));
        assert!(!of(json!({"type": "string", "format": "binary"})));
        assert!(!of(json!({"type": ["string", "null"]})));
    }

    #[test]
    fn a_body_without_which_an_operation_does_something_else_is_not_left_out() {
        let of = |kind: &str, schema: Value| {
            let given = json!({"content": {kind: {"schema": schema}}});
            let document = json!({"components": {"schemas": {"It": {"required": ["file"]}}}});
            let mut resolver = Resolver::new(&document, false);
            match Body::read(given.as_object().unwrap(), &tests_endpoint(), &mut resolver) {
                Ok(Read::Argument(body, ..)) if body.required => "required",
                Ok(Read::Argument(..)) => "argument",
                Ok(Read::Nothing) => "nothing",
                Ok(Read::LeftOut) => "left out",
                Err(_) => "refused",
            }
        };
        let (parts, form) = ("multipart/form-data", "application/x-www-form-urlencoded");
        assert_eq!(of(parts, json!({"properties": {"file": {}}})), "left out");
        assert_eq!(of(parts, json!({"required": ["file"]})), "refused");
        assert_eq!(of(parts, json!({"$ref": "#/components/schemas/It"})), "refused");
        let reference = json!({"$ref": "#/components/schemas/It"});
        assert_eq!(of(parts, json!({"allOf": [{}, reference]})), "refused");
        assert_eq!(of(parts, json!({"oneOf": [{"required": ["a"]}, reference]})), "refused");
        assert_eq!(of(parts, json!({"oneOf": [{}, reference]})), "left out");
        assert_eq!(of(parts, json!({"$ref": "#/nowhere"})), "refused");
        let text = json!({"type": "string"});
        assert_eq!(of(form, json!({"properties": {"a": text}})), "argument");
        assert_eq!(of(form, json!({"properties": {"a": text}, "required": ["a"]})), "required");
        assert_eq!(of(form, json!({"properties": {}})), "nothing");
        let list = json!({"type": "array", "items": {"type": "object"}});
        assert_eq!(of(form, json!({"properties": {"a": list}, "required": ["a"]})), "refused");
        assert_eq!(of(form, json!({"properties": {"a": list}})), "left out");
    }
}
