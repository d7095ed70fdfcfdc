//! A body that is a form (`application/x-www-form-urlencoded`): an object whose members
//! are written as parameters of a query are.
//!
//! What a member is written as, `encoding` says, and where it says nothing, the style
//! `form`. An object is written as its members under `name[member]` alone, where the document
//! says `deepObject`: written out among the form's own, they could be taken for them. For
//! lists of objects, and objects in objects, the standard has no form; interfaces that take
//! them have each their own.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::media::{essence, is_json};
use super::name::{folded, is_set};
use super::parameter::Parameter;
use crate::secret::Secret;

/// The members of a form.
#[derive(Debug)]
pub(super) struct Form(Vec<Parameter>);

/// What is offered of a form.
pub(super) struct Offered {
    pub(super) form: Form,
    /// With the members alone that can be given.
    pub(super) schema: Value,
    /// The others.
    pub(super) left_out: Vec<String>,
}

/// The form among what a body may be.
pub(super) fn form_of(content: &Map<String, Value>) -> Option<&Value> {
    let is_form = |kind: &str| essence(kind) == "application/x-www-form-urlencoded";
    content.iter().find(|(kind, _)| is_form(kind)).map(|(_, media)| media)
}

impl Form {
    /// Reads a form, whose schema has no references any more. What the operator sets in
    /// the `query` is no member: many servers take either. `None` if it is none that
    /// can be written: no object with members of its own, or one that has to have a member
    /// that cannot be.
    pub(super) fn read(
        media: &Value,
        schema: Value,
        query: &[(String, Secret)],
    ) -> Option<Offered> {
        let mut schema = unwrapped(schema);
        let object = schema.as_object_mut()?;
        let composed = ["allOf", "anyOf", "oneOf", "if", "not", "patternProperties"];
        if composed.iter().any(|word| object.contains_key(*word)) {
            return None;
        }
        let is_open =
            object.get("additionalProperties").is_some_and(|it| *it != Value::Bool(false));
        let is_the_operators = |name: &str| is_set(query, &folded(name));
        let required: BTreeSet<String> =
            required(object).filter(|name| !is_the_operators(name)).map(str::to_owned).collect();
        let Some(Value::Object(members)) = object.get_mut("properties") else { return None };
        if members.is_empty() && is_open {
            return None;
        }
        members.retain(|name, _| !is_the_operators(name));
        let mut fields = Vec::new();
        let mut left_out = Vec::new();
        members.retain(|name, schema| {
            let said = media.get("encoding").and_then(|it| it.get(name));
            let text = |key: &str| said.and_then(|it| it.get(key)?.as_str());
            let explode = said.and_then(|it| it.get("explode")?.as_bool());
            let style = match text("style") {
                None if text("contentType").is_some_and(is_json) => InForm::Json,
                style => InForm::Styled(style, explode),
            };
            let field = Parameter::in_form(name, required.contains(name), style, schema);
            let can = field.is_some();
            fields.extend(field);
            if !can {
                left_out.push(name.clone());
            }
            can
        });
        if !required.iter().all(|name| members.contains_key(name)) {
            return None;
        }
        object.insert("type".into(), "object".into());
        object.insert("additionalProperties".into(), false.into());
        if object.contains_key("required") {
            object.insert("required".into(), required.into_iter().collect());
        }
        Some(Offered { form: Self(fields), schema, left_out })
    }

    /// Whether there is nothing to be given.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names of its members, as servers tell them apart.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|field| folded(&field.name))
    }

    /// The form as it is sent.
    ///
    /// # Errors
    /// Says which member cannot be.
    pub(super) fn write(&self, value: &Value) -> Result<String, String> {
        let mut pairs = Vec::new();
        // Some servers take `a.b` for `a[b]`.
        let mut taken: BTreeSet<String> = self.names().collect();
        for field in &self.0 {
            let value = value.get(&field.name).unwrap_or(&Value::Null);
            let before = pairs.len();
            if !value.is_null() {
                for name in field.own_names(value) {
                    if !taken.insert(name.replace(['[', ']'], "")) {
                        let why = "would be read as another: leave one out";
                        return Err(format!("{:?}: its member {name:?} {why}", field.name));
                    }
                }
                field.pairs(value, &mut pairs)?;
            }
            if field.required && pairs.len() == before {
                return Err(format!("{:?}: this has to be given, and is nothing", field.name));
            }
        }
        Ok(pairs.join("&"))
    }
}

/// How a member of a form is written.
pub(super) enum InForm<'a> {
    /// As JSON.
    Json,
    /// In this style, exploded or not.
    Styled(Option<&'a str>, Option<bool>),
}

/// A schema that is all of one other is that.
fn unwrapped(mut schema: Value) -> Value {
    while let Some(Value::Array(all)) = schema.get_mut("allOf")
        && all.len() == 1
        && let Some(only) = all.pop()
    {
        let beside = schema.as_object().is_some_and(|it| {
            it.keys().any(|word| !matches!(word.as_str(), "allOf" | "title" | "description"))
        });
        if beside {
            schema["allOf"] = Value::Array(vec![only]);
            return schema;
        }
        schema = only;
    }
    schema
}

/// Members that an object of this schema must have.
pub(super) fn required(schema: &Map<String, Value>) -> impl Iterator<Item = &str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn offered(schema: Value, encoding: Value) -> Option<Offered> {
        let key = |name: &str| (name.to_owned(), Secret::new("a key of mine".into()).unwrap());
        Form::read(&json!({"encoding": encoding}), schema, &[key("api_key"), key("acct[id]")])
    }

    #[test]
    fn a_form_is_written_as_its_members_are_and_no_value_is_structure() {
        let schema = json!({"type": "object", "properties": {
            "amount": {"type": "integer"}, "note": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "ids": {"type": "array", "items": {"type": "integer"}},
            "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
            "view": {"type": "object", "properties": {"blocks": {"type": "array"}}},
        }});
        let encoding = json!({
            "ids": {"explode": false},
            "metadata": {"style": "deepObject", "explode": true},
            "view": {"contentType": "application/json"},
        });
        let Offered { form, schema, left_out } = offered(schema, encoding).unwrap();
        assert_eq!((left_out, &schema["additionalProperties"]), (vec![], &json!(false)));
        let value = json!({
            "amount": 5.0, "note": "a&b=c +%\u{e9}", "tags": ["x", "y,z"], "ids": [1, 2],
            "metadata": {"a b": "1"}, "view": {"blocks": [1]},
        });
        let mut pairs: Vec<_> = form.write(&value).unwrap().split('&').map(str::to_owned).collect();
        pairs.sort();
        assert_eq!(
            pairs,
            [
                "amount=5",
                "ids=1,2",
                "metadata%5Ba%20b%5D=1",
                "note=a%26b%3Dc%20%2B%25%C3%A9",
                "tags=x",
                "tags=y%2Cz",
                "view=%7B%22blocks%22%3A%5B1%5D%7D",
            ]
        );
        assert_eq!(form.write(&json!({"note": null})).unwrap(), "");
        let refused = form.write(&json!({"metadata": {"a][b": "1"}})).unwrap_err();
        assert!(refused.contains("bracket"), "{refused}");
        let refused = form.write(&json!({"tags": [{"a": 1}]})).unwrap_err();
        assert!(refused.contains("a part of the form"), "{refused}");
    }

    #[test]
    fn what_has_no_form_is_left_out_unless_it_has_to_be_given() {
        let schema = |required: Value| {
            json!({"properties": {
                "name": {"type": "string"},
                "items": {"type": "array", "items": {"type": "object"}},
                "plain": {"type": "object", "properties": {"name": {"type": "string"}}},
                "name[first]": {"type": "string"},
            }, "required": required})
        };
        let encoding = json!({"items": {"style": "deepObject", "explode": true}});
        let Offered { schema: shown, left_out, .. } =
            offered(schema(json!(["name"])), encoding.clone()).unwrap();
        assert_eq!(left_out, ["items", "plain", "name[first]"]);
        assert_eq!(shown["properties"], json!({"name": {"type": "string"}}));
        assert!(offered(schema(json!(["items"])), encoding).is_none());
        assert!(offered(json!({"type": "object"}), json!({})).is_none());
        let either = json!({"properties": {}, "anyOf": [{"required": ["a"]}]});
        assert!(offered(either, json!({})).is_none());
        let nothing = offered(json!({"properties": {}}), json!({})).unwrap();
        assert!(nothing.form.is_empty());
        let open = json!({"properties": {}, "additionalProperties": {"type": "string"}});
        assert!(offered(open, json!({})).is_none());
        let all = json!({"description": "It.", "allOf": [{"properties": {"a": {}}}]});
        assert!(!offered(all, json!({})).unwrap().form.is_empty());
    }

    #[test]
    fn no_member_says_what_the_operator_sets_or_what_another_says() {
        let text = json!({"type": "string"});
        let schema = json!({"properties": {
            "apiKey": text, "api_key": text, "acct": text, "name": text,
            "meta": {"type": "object"}, "metaName": text, "tags": {"type": "array"},
        }, "required": ["api_key", "tags"]});
        let encoding = json!({"meta": {"style": "deepObject", "explode": true}});
        let Offered { form, schema, left_out } = offered(schema, encoding).unwrap();
        assert_eq!((&schema["required"], left_out), (&json!(["tags"]), vec![]));
        let names: Vec<_> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(names, ["name", "meta", "metaName", "tags"]);
        for meta in [json!({"a.b": "1", "a_b": "2"}), json!({"name": "1"})] {
            let refused = form.write(&json!({"meta": meta, "tags": ["x"]})).unwrap_err();
            assert!(refused.contains("would be read as another"), "{refused}");
        }
        for value in [json!({}), json!({"tags": []}), json!({"tags": null})] {
            let refused = form.write(&value).unwrap_err();
            assert!(refused.contains("\"tags\": this has to be given"), "{refused}");
        }
        assert_eq!(
            form.write(&json!({"meta": {"a": "1"}, "tags": ["x"]})).unwrap(),
            "meta%5Ba%5D=1&tags=x"
        );
    }
}
