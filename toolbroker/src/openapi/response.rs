//! What a document says of an operation's answers: how they may be written, and
//! the schema of those that are JSON.
//!
//! Interfaces keep to neither well. So what is asked for is preferred and not
//! demanded, and the schema is told to whoever looks for tools, and nothing is
//! held against it: an answer that was refused after the work was done would
//! help nobody. A schema that cannot be told is left out, and costs its tool
//! nothing.

use reqwest::header::HeaderValue;
use rmcp::model::JsonObject;
use serde_json::{Map, Value};

use super::media::{essence, is_json};
use super::schema::Resolver;

/// One schema, in bytes of JSON: people and models read it in lists of tools.
const SCHEMA_BYTES_MAX: usize = 16 * 1024;
/// Those of a whole document, which share a list with all other tools.
const SCHEMAS_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Media types that are asked for.
const KINDS_MAX: usize = 8;
/// One of them, in bytes.
const KIND_BYTES_MAX: usize = 128;

/// The media types of an operation's successful answers, each with what the
/// document says of it.
pub(super) struct Answers<'a>(Vec<(&'a str, &'a Value)>);

impl<'a> Answers<'a> {
    pub(super) fn of(operation: &'a Map<String, Value>, resolver: &Resolver<'a>) -> Self {
        let responses = operation.get("responses").and_then(Value::as_object);
        let successes = responses.into_iter().flatten().filter(|(code, _)| code.starts_with('2'));
        let contents = successes.filter_map(|(_, response)| {
            resolver.object(response).ok()?.get("content")?.as_object()
        });
        Self(contents.flatten().map(|(kind, media)| (kind.as_str(), media)).collect())
    }

    /// What is asked for: JSON if there is some, or else what there is; anything
    /// else rather than nothing, since errors are seldom described.
    pub(super) fn accept(&self) -> HeaderValue {
        let is_plain = |c: char| c == ' ' || c.is_ascii_graphic() && !matches!(c, ',' | '*');
        let plain = |kind: &&str| kind.len() <= KIND_BYTES_MAX && kind.chars().all(is_plain);
        let named = || self.0.iter().map(|(kind, _)| *kind).filter(plain);
        let mut kinds: Vec<&str> = named().filter(|kind| is_json(kind)).collect();
        if kinds.is_empty() {
            kinds = named().collect();
        }
        if kinds.is_empty() {
            kinds.push("application/json");
        }
        kinds.sort_unstable();
        kinds.dedup();
        kinds.truncate(KINDS_MAX);
        HeaderValue::from_str(&format!("{}, */*;q=0.5", kinds.join(", ")))
            .unwrap_or(HeaderValue::from_static("application/json, */*;q=0.5"))
    }

    /// The schema of all that is JSON, as it stands in the document; of all that may be, if
    /// it names no kind, as Spring's do.
    fn schema(&self) -> Option<&'a Value> {
        let json = self.0.iter().filter(|(kind, _)| is_json(kind) || essence(kind) == "*/*");
        let mut schemas = json.map(|(_, media)| media.get("schema"));
        let first = schemas.next()?;
        if schemas.all(|other| other == first) { first } else { None }
    }
}

/// The schemas of a document's answers, as they are told.
pub(super) struct Told<'a> {
    /// Of its own: what answers take is taken from no argument.
    resolver: Resolver<'a>,
    bytes_left: usize,
}

impl<'a> Told<'a> {
    pub(super) fn new(document: &'a Value, is_3_0: bool) -> Self {
        let resolver = Resolver::of_answers(document, is_3_0);
        Self { resolver, bytes_left: SCHEMAS_BYTES_MAX }
    }

    /// The schema of these answers, if there is one that can be told.
    pub(super) fn schema(&mut self, answers: &Answers<'a>) -> Option<JsonObject> {
        let schema = self.resolver.schema(answers.schema()?).ok()?;
        let bytes = schema.to_string().len();
        if bytes > SCHEMA_BYTES_MAX {
            return None;
        }
        self.bytes_left = self.bytes_left.checked_sub(bytes)?;
        match schema {
            Value::Object(schema) => Some(schema),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn told(responses: Value) -> (String, Option<Value>) {
        let document = json!({
            "o": {"responses": responses},
            "r": {"content": {"application/json": {"schema": {"$ref": "#/s"}}}},
            "s": {"type": "object", "properties": {
                "id": {"type": "integer", "readOnly": true},
                "password": {"type": "string", "writeOnly": true}}},
            "tree": {"items": {"$ref": "#/tree"}},
            "long": {"description": "x".repeat(SCHEMA_BYTES_MAX)},
        });
        let resolver = Resolver::new(&document, false);
        let answers = Answers::of(document["o"].as_object().unwrap(), &resolver);
        let accept = answers.accept().to_str().unwrap().to_owned();
        (accept, Told::new(&document, false).schema(&answers).map(Value::Object))
    }

    #[test]
    fn what_is_asked_for_is_what_the_operation_answers_and_json_first() {
        let of = |kinds: &[&str]| {
            let kinds = kinds.iter().map(|kind| ((*kind).to_owned(), json!({}))).collect();
            told(json!({"200": {"content": Value::Object(kinds)}})).0
        };
        let json = "application/json, */*;q=0.5";
        assert_eq!(told(json!(null)).0, json);
        assert_eq!(told(json!({"200": {"$ref": "#/r"}})).0, json);
        assert_eq!(told(json!({"404": {"content": {"text/html": {}}}})).0, json);
        assert_eq!(of(&["application/xml", "application/json"]), json);
        assert_eq!(of(&["application/hal+json", "text/html"]), "application/hal+json, */*;q=0.5");
        assert_eq!(of(&["text/plain", "text/csv"]), "text/csv, text/plain, */*;q=0.5");
        for none in ["*/*", "a,b", "x\r\ny", "\u{e9}"] {
            assert_eq!(of(&[none]), json, "{none:?}");
        }
    }

    #[test]
    fn the_schema_of_an_answer_is_told_where_there_is_one_for_all() {
        let json = |schema: Value| json!({"content": {"application/json": {"schema": schema}}});
        let object = json!({"type": "object", "properties": {"id": {"type": "integer"}}});
        let of = |responses: Value| told(responses).1;
        assert_eq!(of(json!({"200": {"$ref": "#/r"}})), Some(object.clone()));
        let same = json!({"201": {"$ref": "#/r"}, "204": {}, "400": json(json!({"title": "e"}))});
        assert_eq!(of(same), Some(object));
        assert_eq!(of(json!({"200": {"$ref": "#/r"}, "202": json(json!({}))})), None);
        for left_out in ["#/tree", "#/none", "#/long", "https://evil.example/"] {
            assert_eq!(of(json!({"200": json(json!({"$ref": left_out}))})), None, "{left_out}");
        }
        assert_eq!(of(json!({"200": json(json!(true))})), None);
        assert_eq!(of(json!({"200": {"content": {"text/html": {"schema": {}}}}})), None);
    }
}
