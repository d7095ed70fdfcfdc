//! A schema as whoever wrote it meant it.
//!
//! Most schemas of tools are made by libraries, and some of these write what no draft
//! has and everybody understands: `null` for a keyword that says nothing (a list that is
//! nil in Go), a name twice under `required`, the tuples and bounds of older drafts, a
//! remark of a type that remarks have not. Such a tool is offered all the same. All else is
//! left as it is.
//!
//! Of arguments less is asked than is written, as what has a default may be left out
//! ([`Of::FilledIn`]). Through a reference that can make more hold of a `oneOf` or a `not`
//! than may, so whoever holds arguments against that takes those as well that fit what is
//! written ([`Of::Whole`]).

use serde_json::{Map, Value};

use super::pattern_read::{DATA, OF_SCHEMAS};

/// Whether something is filled in by whoever gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// Arguments for a server that has the schema: what has a default may be left out, also
    /// where it stands under `required`. Libraries whose schemas tell what the tool works
    /// with (zod's) list it there.
    FilledIn,
    /// A result, or arguments that nobody fills in.
    Whole,
}

/// The schema as it is meant.
pub(crate) fn as_meant(schema: &Value, of: Of) -> Value {
    let mut meant = schema.clone();
    let draft = schema.get("$schema").and_then(Value::as_str);
    let has = Has {
        prefix_items: draft.is_none_or(|it| it.contains("2020-12")),
        boolean_bounds: draft.is_some_and(|it| it.contains("draft-03") || it.contains("draft-04")),
    };
    mend(&mut meant, has, of);
    meant
}

/// What a schema's draft has.
#[derive(Clone, Copy)]
struct Has {
    prefix_items: bool,
    /// `true` and `false` for `exclusiveMinimum`.
    boolean_bounds: bool,
}

fn mend(schema: &mut Value, has: Has, of: Of) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|it| mend(it, has, of)),
        Value::Object(members) => {
            members.retain(|key, said| {
                let is_said = !said.is_null() || key != "enum" && DATA.contains(&key.as_str());
                is_said && !is_no_remark(key, said)
            });
            mend_required(members, of);
            if !has.boolean_bounds {
                say_exclusive_bounds(members);
            }
            if has.prefix_items {
                say_tuples(members);
            }
            if of == Of::FilledIn {
                say_any(members, has);
            }
            for (key, member) in members {
                match (key.as_str(), member) {
                    (key, _) if DATA.contains(&key) || key == "dependentRequired" => {}
                    // Of the older drafts, which have lists of names in it too.
                    ("dependencies", Value::Object(named)) => {
                        let schemas = named.values_mut().filter(|it| it.is_object());
                        schemas.for_each(|it| mend(it, has, of));
                    }
                    (key, Value::Object(named))
                        if OF_SCHEMAS.contains(&key) || key == "patternProperties" =>
                    {
                        named.values_mut().for_each(|it| mend(it, has, of));
                    }
                    // What holds where less is asked would say no, or something else; what
                    // is any of several is none of them here any more.
                    ("not" | "if" | "contains" | "oneOf", member) => {
                        mend(member, has, Of::Whole);
                    }
                    (_, member) => mend(member, has, of),
                }
            }
        }
        _ => {}
    }
}

/// Where less is asked of one of several than was, more than one may hold.
fn say_any(schema: &mut Map<String, Value>, has: Has) {
    let Some(several) = schema.get("oneOf") else { return };
    let (mut filled_in, mut whole) = (several.clone(), several.clone());
    mend(&mut filled_in, has, Of::FilledIn);
    mend(&mut whole, has, Of::Whole);
    if filled_in == whole || schema.contains_key("anyOf") {
        schema.insert("oneOf".into(), whole);
    } else {
        schema.remove("oneOf");
        schema.insert("anyOf".into(), filled_in);
    }
}

/// Whether a keyword that nothing is held against is not of its type. It says nothing
/// then, and the drafts' own schemas refuse it. An object may be a schema of that name, in
/// a place that no draft knows and a reference leads to.
fn is_no_remark(keyword: &str, said: &Value) -> bool {
    match keyword {
        _ if said.is_object() => false,
        "title" | "description" | "$comment" | "format" | "contentEncoding"
        | "contentMediaType" => !said.is_string(),
        "deprecated" | "readOnly" | "writeOnly" => !said.is_boolean(),
        "examples" => !said.is_array(),
        _ => false,
    }
}

fn mend_required(schema: &mut Map<String, Value>, of: Of) {
    let Some(Value::Array(listed)) = schema.get("required") else { return };
    let properties = schema.get("properties");
    let has_default = |name: &Value| {
        let property = name.as_str().and_then(|name| properties?.get(name));
        property.is_some_and(|property| property.get("default").is_some())
    };
    let mut required: Vec<Value> = Vec::with_capacity(listed.len());
    for name in listed {
        let is_filled_in = of == Of::FilledIn && has_default(name);
        if !is_filled_in && !required.contains(name) {
            required.push(name.clone());
        }
    }
    schema.insert("required".into(), required.into());
}

/// How older drafts, and OpenAPI 3.0, say that a bound is exclusive. JSON Schema has
/// another meaning for no boolean.
pub(crate) fn say_exclusive_bounds(schema: &mut Map<String, Value>) {
    for (exclusive, bound) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        match schema.get(exclusive) {
            Some(Value::Bool(true)) => {
                schema.remove(exclusive);
                if let Some(value) = schema.remove(bound) {
                    schema.insert(exclusive.into(), value);
                }
            }
            Some(Value::Bool(false)) => {
                schema.remove(exclusive);
            }
            _ => {}
        }
    }
}

/// How older drafts have a schema for each place of a list.
fn say_tuples(schema: &mut Map<String, Value>) {
    if !matches!(schema.get("items"), Some(Value::Array(_))) || schema.contains_key("prefixItems") {
        return;
    }
    if let Some(places) = schema.remove("items") {
        schema.insert("prefixItems".into(), places);
    }
    if let Some(rest) = schema.remove("additionalItems") {
        schema.insert("items".into(), rest);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of_arguments(schema: Value) -> Value {
        as_meant(&schema, Of::FilledIn)
    }

    #[test]
    fn what_no_draft_has_and_everybody_understands_is_read_as_that() {
        for (written, meant) in [
            (json!({"required": null, "properties": null, "enum": null}), json!({})),
            (json!({"required": ["a", "b", "a"]}), json!({"required": ["a", "b"]})),
            (
                json!({"properties": {"n": {"minimum": 0, "exclusiveMinimum": true}}}),
                json!({"properties": {"n": {"exclusiveMinimum": 0}}}),
            ),
            (
                json!({"items": [{"type": "string"}, {"items": null}], "additionalItems": false}),
                json!({"prefixItems": [{"type": "string"}, {}], "items": false}),
            ),
            (
                json!({"$schema": "http://json-schema.org/draft-07/schema#",
                       "items": {"maximum": 9, "exclusiveMaximum": true, "exclusiveMinimum": false}}),
                json!({"$schema": "http://json-schema.org/draft-07/schema#",
                       "items": {"exclusiveMaximum": 9}}),
            ),
            (
                json!({"title": 5, "properties": {"examples": {"examples": "x", "format": 5,
                    "deprecated": "use b", "readOnly": "true", "writeOnly": 1, "$comment": ["c"],
                    "description": ["d"], "contentEncoding": 1, "contentMediaType": []}}}),
                json!({"properties": {"examples": {}}}),
            ),
        ] {
            assert_eq!(of_arguments(written.clone()), meant, "{written}");
        }
    }

    #[test]
    fn what_has_a_default_may_be_left_out_of_arguments_and_not_of_a_result() {
        let one = json!({"required": ["a", "b"],
            "properties": {"a": {"default": null}, "b": {"type": "string"}}});
        let schema = json!({ "anyOf": [one] });
        assert_eq!(of_arguments(schema.clone())["anyOf"][0]["required"], json!(["b"]));
        assert_eq!(as_meant(&schema, Of::Whole), schema);
        // Where less is asked, one of several is any of them.
        let several = of_arguments(json!({ "oneOf": [one, {"type": "null"}] }));
        assert_eq!(several["anyOf"][0]["required"], json!(["b"]));
        for schema in [
            json!({ "not": one }),
            json!({ "if": one, "then": false }),
            json!({ "items": { "contains": one } }),
            json!({ "oneOf": [one], "anyOf": [true] }),
            json!({ "oneOf": [{"required": ["a"], "properties": {"a": {}}}] }),
        ] {
            assert_eq!(of_arguments(schema.clone()), schema);
        }
    }

    #[test]
    fn data_names_and_older_drafts_are_left_as_they_are() {
        for schema in [
            json!({"const": null, "default": {"required": null}, "enum": [null, {"items": null}]}),
            json!({"properties": {"required": {"type": "null"}, "items": {"enum": [1]}}}),
            json!({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}, {}]}),
            json!({"$schema": "http://json-schema.org/draft-04/schema#",
                   "minimum": 0, "exclusiveMinimum": true}),
            json!({"title": "t", "deprecated": true, "examples": [5], "format": "email"}),
            json!({"const": {"title": 5}, "properties": {"title": {}, "deprecated": false}}),
            json!({"components": {"title": {"type": "string"}}}),
            json!({"required": "a"}),
            json!({"dependentRequired": {"items": ["a"], "required": ["b"]}}),
            json!({"dependencies": {"items": ["a"]}}),
            json!(true),
        ] {
            assert_eq!(of_arguments(schema.clone()), schema);
        }
    }
}
