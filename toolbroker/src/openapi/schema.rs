//! The schemas of a document as one schema for each argument: JSON Schema
//! 2020-12 without references.
//!
//! Local references are put in place; remote, dangling and cyclic ones are
//! refused, and so is whatever grows beyond bounds. What 3.0 says in its own
//! way (`nullable`, a boolean `exclusiveMinimum`) is said in JSON Schema's; the
//! boolean in 3.1 too. What only describes the other way (of arguments
//! `readOnly` properties, of answers `writeOnly` ones) or the document
//! (`example`, `xml`, …) is left out.

use serde_json::{Map, Value};

use super::Refusal;
use crate::schema::read::say_exclusive_bounds;

/// Schemas and lists of one operation.
const NODES_MAX: usize = 20_000;
/// Those of all operations together.
const NODES_TOTAL_MAX: usize = 500_000;
/// How deep they lie in each other.
const DEPTH_MAX: usize = 64;
/// References after each other that lead to no schema.
const HOPS_MAX: usize = 16;
/// Schemas among which one is looked for that all of a `oneOf` inherit from.
const BASES_MAX: usize = 32;

/// Keywords whose value maps names to schemas.
const MAPS: [&str; 3] = ["properties", "patternProperties", "dependentSchemas"];
/// Keywords whose value is a schema.
const SINGLE: [&str; 12] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
];
/// Keywords whose value is a list of schemas.
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords that say nothing about a value.
const DROPPED: [&str; 10] = [
    "$schema",
    "$comment",
    "$defs",
    "definitions",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "xml",
    "readOnly",
];
/// Keywords by which a reference would mean something else.
const REFUSED: [&str; 6] =
    ["$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"];

/// Resolves the references of one document.
pub(super) struct Resolver<'a> {
    document: &'a Value,
    is_3_0: bool,
    nodes_left: usize,
    total_left: usize,
    /// What marks a property that does not go this way.
    other_way: &'static str,
    /// The references that are being followed.
    trail: Vec<&'a str>,
}

impl<'a> Resolver<'a> {
    /// Of arguments.
    pub(super) fn new(document: &'a Value, is_3_0: bool) -> Self {
        let (nodes_left, total_left, other_way) = (NODES_MAX, NODES_TOTAL_MAX, "readOnly");
        Self { document, is_3_0, nodes_left, total_left, other_way, trail: Vec::new() }
    }

    /// Of answers.
    pub(super) fn of_answers(document: &'a Value, is_3_0: bool) -> Self {
        Self { other_way: "writeOnly", ..Self::new(document, is_3_0) }
    }

    /// An object of the document, or the one that it refers to.
    pub(super) fn object(&self, value: &'a Value) -> Result<&'a Map<String, Value>, Refusal> {
        let mut value = value;
        for _ in 0..HOPS_MAX {
            let object = value.as_object().ok_or(Refusal::Malformed("a part of it"))?;
            match object.get("$ref").and_then(Value::as_str) {
                None => return Ok(object),
                Some(reference) => value = self.look_up(reference)?,
            }
        }
        Err(Refusal::TooLarge)
    }

    /// The schema of one argument or answer, on its own.
    pub(super) fn schema(&mut self, schema: &'a Value) -> Result<Value, Refusal> {
        self.nodes_left = NODES_MAX;
        self.trail.clear();
        self.inline(schema, 0)
    }

    fn look_up(&self, reference: &str) -> Result<&'a Value, Refusal> {
        let shown = || crate::cut(reference, 256);
        let pointer = reference.strip_prefix('#').ok_or_else(|| Refusal::Remote(shown()))?;
        // In a URI fragment, a pointer is percent-encoded (RFC 6901, 6).
        let pointer = unpercent(pointer).ok_or_else(|| Refusal::Dangling(shown()))?;
        self.document
            .pointer(&pointer)
            .filter(|_| !pointer.is_empty())
            .ok_or_else(|| Refusal::Dangling(shown()))
    }

    fn inline(&mut self, schema: &'a Value, depth: usize) -> Result<Value, Refusal> {
        if depth > DEPTH_MAX || self.nodes_left == 0 {
            return Err(Refusal::TooLarge);
        }
        if self.total_left == 0 {
            return Err(Refusal::Spent);
        }
        self.nodes_left -= 1;
        self.total_left -= 1;
        let object = match schema {
            Value::Bool(all) => return Ok(Value::Bool(*all)),
            Value::Object(object) => object,
            _ => return Err(Refusal::Malformed("a schema")),
        };
        let Some(reference) = object.get("$ref") else {
            return self.keywords(object, depth);
        };
        let reference = reference.as_str().ok_or(Refusal::Malformed("a reference"))?;
        if self.trail.contains(&reference) {
            return Err(Refusal::Cycle(crate::cut(reference, 256)));
        }
        let target = self.look_up(reference)?;
        self.trail.push(reference);
        let target = self.inline(target, depth + 1)?;
        self.trail.pop();
        // In 3.0 a reference stands alone, whatever is beside it.
        if self.is_3_0 || object.len() == 1 {
            return Ok(target);
        }
        let mut beside = match self.keywords(object, depth)? {
            Value::Object(beside) => beside,
            _ => return Err(Refusal::Malformed("a schema")),
        };
        if beside.keys().all(|key| key == "description" || key == "title") {
            if let Value::Object(mut target) = target {
                target.extend(beside);
                return Ok(Value::Object(target));
            }
            return Ok(target);
        }
        match beside.entry("allOf").or_insert_with(|| Value::Array(Vec::new())) {
            Value::Array(all) => all.push(target),
            _ => return Err(Refusal::Malformed("a schema")),
        }
        Ok(Value::Object(beside))
    }

    /// The keywords of a schema, without its reference.
    fn keywords(&mut self, object: &'a Map<String, Value>, depth: usize) -> Result<Value, Refusal> {
        let mut out = Map::new();
        for (key, value) in object {
            let word = key.as_str();
            if REFUSED.contains(&word) {
                return Err(Refusal::Unsupported(format!("a schema of it uses {word}")));
            }
            if word == "$ref" || DROPPED.contains(&word) || word.starts_with("x-") {
                continue;
            }
            let value = if MAPS.contains(&word) {
                let map = value.as_object().ok_or(Refusal::Malformed("a schema"))?;
                let mut schemas = Map::new();
                for (name, schema) in map {
                    if word != "properties" || !self.goes_the_other_way(schema) {
                        schemas.insert(name.clone(), self.inline(schema, depth + 1)?);
                    }
                }
                Value::Object(schemas)
            } else if SINGLE.contains(&word) && !value.is_array() {
                self.inline(value, depth + 1)?
            } else if LISTS.contains(&word) || SINGLE.contains(&word) {
                let list = value.as_array().ok_or(Refusal::Malformed("a schema"))?;
                let mut schemas = Vec::with_capacity(list.len());
                for schema in list {
                    schemas.push(self.inline(schema, depth + 1)?);
                }
                Value::Array(schemas)
            } else {
                value.clone()
            };
            let is_told_apart = word == "oneOf" && self.is_told_apart(object);
            out.insert(if is_told_apart { "anyOf".to_owned() } else { key.clone() }, value);
        }
        if let Some(properties) = object.get("properties").and_then(Value::as_object)
            && let Some(Value::Array(required)) = out.get_mut("required")
        {
            required.retain(|name| {
                let property = name.as_str().and_then(|name| properties.get(name));
                !property.is_some_and(|schema| self.goes_the_other_way(schema))
            });
        }
        if self.is_3_0 {
            say_null(&mut out);
        }
        say_exclusive_bounds(&mut out);
        Ok(Value::Object(out))
    }

    /// Whether a member of the value says which of the schemas under its `oneOf` is meant:
    /// by a `discriminator` here, or by one of the same member that each of them has or
    /// inherits. That is no keyword of JSON Schema, and without it a value may well fit
    /// several.
    fn is_told_apart(&self, object: &'a Map<String, Value>) -> bool {
        let branches = object.get("oneOf").and_then(Value::as_array);
        let mut told = branches.into_iter().flatten().map(|branch| self.told_by(branch));
        let inherited = match told.next() {
            Some(Some(first)) => told.all(|other| other == Some(first)),
            _ => false,
        };
        !object.contains_key("anyOf") && (inherited || object.contains_key("discriminator"))
    }

    /// The member that tells what a value of this schema is.
    fn told_by(&self, schema: &'a Value) -> Option<&'a str> {
        let mut bases = vec![schema];
        for _ in 0..BASES_MAX {
            let Ok(object) = self.object(bases.pop()?) else { continue };
            if let Some(told) = object.get("discriminator") {
                return told.get("propertyName")?.as_str();
            }
            bases.extend(object.get("allOf").and_then(Value::as_array).into_iter().flatten());
        }
        None
    }

    /// Whether only the server sets it, or only whoever asks.
    fn goes_the_other_way(&self, schema: &'a Value) -> bool {
        let marked = |it: &Map<String, Value>| it.get(self.other_way) == Some(&Value::Bool(true));
        schema.as_object().is_some_and(marked) || self.object(schema).is_ok_and(marked)
    }
}

/// How 3.0 says that a value may be null. Beside schemas put together it is written by
/// many who mean that of the whole, since a reference has nothing beside itself there.
fn say_null(schema: &mut Map<String, Value>) {
    if schema.remove("nullable") == Some(Value::Bool(true)) {
        if ["allOf", "anyOf", "oneOf"].iter().any(|word| schema.contains_key(*word)) {
            let mut whole = std::mem::take(schema);
            for word in ["title", "description", "default", "deprecated"] {
                schema.extend(whole.remove_entry(word));
            }
            let null = Map::from_iter([("type".to_owned(), Value::from("null"))]);
            schema.insert("anyOf".into(), [whole, null].map(Value::Object).to_vec().into());
            return;
        }
        if let Some(name @ Value::String(_)) = schema.get("type").cloned() {
            schema.insert("type".into(), Value::Array(vec![name, "null".into()]));
        }
        if let Some(Value::Array(values)) = schema.get_mut("enum")
            && !values.contains(&Value::Null)
        {
            values.push(Value::Null);
        }
    }
}

/// Text whose percent-encoded bytes are put in place; `None` if it is none.
fn unpercent(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            if !digits.iter().all(u8::is_ascii_hexdigit) {
                return None;
            }
            let digits = std::str::from_utf8(&digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn inline(document: &Value, is_3_0: bool) -> Result<Value, Refusal> {
        Resolver::new(document, is_3_0).schema(&document["s"])
    }

    #[test]
    fn what_3_0_says_in_its_own_way_is_said_in_json_schemas() {
        let document = json!({"s": {"type": "object", "properties": {
            "a": {"type": "string", "nullable": true, "enum": ["x"], "example": "x"},
            "b": {"type": "integer", "minimum": 1, "exclusiveMinimum": true, "maximum": 9,
                  "exclusiveMaximum": false},
        }}});
        let expected = json!({"type": "object", "properties": {
            "a": {"type": ["string", "null"], "enum": ["x", null]},
            "b": {"type": "integer", "exclusiveMinimum": 1, "maximum": 9},
        }});
        assert_eq!(inline(&document, true).unwrap(), expected);
        let as_3_1 = inline(&document, false).unwrap();
        assert_eq!(as_3_1["properties"]["b"], expected["properties"]["b"]);
    }

    #[test]
    fn what_3_0_puts_together_and_calls_nullable_may_be_null() {
        let document = json!({
            "s": {"properties": {
                "a": {"nullable": true, "description": "A.", "allOf": [{"$ref": "#/d"}]},
                "b": {"nullable": false, "oneOf": [{"$ref": "#/d"}]},
            }},
            "d": {"type": "object", "properties": {"x": {"type": "string"}}},
        });
        let d = &document["d"];
        let expected = json!({"properties": {
            "a": {"description": "A.", "anyOf": [{"allOf": [d]}, {"type": "null"}]},
            "b": {"oneOf": [d]},
        }});
        assert_eq!(inline(&document, true).unwrap(), expected);
        let in_3_1 = inline(&document, false).unwrap();
        assert_eq!(in_3_1["properties"]["a"]["anyOf"], Value::Null);
    }

    #[test]
    fn what_a_discriminator_tells_apart_may_fit_several() {
        let branches = json!([{"$ref": "#/a"}, {"$ref": "#/b"}]);
        let of = |schema: Value, base: Value| {
            let document = json!({"s": schema, "base": base,
                "a": {"allOf": [{"$ref": "#/base"}, {"required": ["x"]}]},
                "b": {"allOf": [{"allOf": [{"$ref": "#/base"}]}]}});
            let schema = inline(&document, false).unwrap();
            schema.as_object().unwrap().keys().cloned().collect::<Vec<_>>()
        };
        let told = json!({"propertyName": "kind"});
        let base = json!({"discriminator": told, "properties": {"kind": {}}});
        assert_eq!(of(json!({"oneOf": branches, "discriminator": told}), json!({})), ["anyOf"]);
        assert_eq!(of(json!({"oneOf": branches}), base.clone()), ["anyOf"]);
        assert_eq!(of(json!({"oneOf": branches}), json!({})), ["oneOf"]);
        let another = json!({"discriminator": {"propertyName": "type"}});
        let unrelated = json!([{"$ref": "#/a"}, another]);
        assert_eq!(of(json!({"oneOf": unrelated}), base.clone()), ["oneOf"]);
        let both = json!({"oneOf": branches, "anyOf": [{}], "discriminator": told});
        assert_eq!(of(both, base.clone()), ["oneOf", "anyOf"]);
        let one_is_none = json!({"oneOf": [{"$ref": "#/a"}, {"type": "null"}]});
        assert_eq!(of(one_is_none, base), ["oneOf"]);
    }

    #[test]
    fn a_reference_in_data_or_in_a_propertys_name_is_none() {
        let document = json!({"s": {
            "properties": {"$ref": {"type": "string"}, "enum": {"type": "string"}},
            "enum": [{"$ref": "https://evil.example"}], "default": {"$ref": "#/x"},
        }});
        assert_eq!(inline(&document, false).unwrap(), document["s"]);
    }

    #[test]
    fn a_reference_is_put_in_place_with_what_stands_beside_it() {
        let document = json!({
            "s": {"properties": {"a": {"$ref": "#/d/x~1y%20z", "minLength": 2},
                                 "b": {"$ref": "#/d/x~1y%20z", "description": "B."}}},
            "d": {"x/y z": {"type": "string", "description": "X."}},
        });
        let expected = json!({"properties": {
            "a": {"minLength": 2, "allOf": [{"type": "string", "description": "X."}]},
            "b": {"type": "string", "description": "B."},
        }});
        assert_eq!(inline(&document, false).unwrap(), expected);
        let alone = inline(&document, true).unwrap();
        assert_eq!(alone["properties"]["a"], document["d"]["x/y z"]);
    }

    #[test]
    fn the_same_schema_twice_beside_each_other_is_no_cycle() {
        let document =
            json!({"s": {"items": {"$ref": "#/d"}, "contains": {"$ref": "#/d"}}, "d": {}});
        inline(&document, false).unwrap();
        let document = json!({"s": {"items": {"$ref": "#/s"}}});
        assert!(matches!(inline(&document, false), Err(Refusal::Cycle(_))));
        let document = json!({"s": {"$ref": "#"}});
        assert!(matches!(inline(&document, false), Err(Refusal::Dangling(_))));
    }
}
