//! One parameter: how the document has it written, and how a value becomes that.

use std::collections::BTreeSet;

use reqwest::header::HeaderName;
use serde_json::{Map, Number, Value};

use super::Refusal;
use super::form::InForm;
use super::media::json_of;
use super::name::{folded, folded_header, is_set};
use super::schema::Resolver;
use crate::endpoint::{Endpoint, is_own_header};
use crate::uri::percent_encoded;

/// Where a parameter goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Path,
    Query,
    Header,
    /// A body that is a form.
    Form,
}

impl Place {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Query => "query",
            Self::Header => "header",
            Self::Form => "form",
        }
    }
}

/// How a value is written.
#[derive(Clone, Copy, Debug)]
enum Style {
    /// Parts with this between them.
    Joined(char),
    /// Each part under the parameter's name.
    Exploded,
    /// Each member under `name[member]`.
    DeepObject,
    /// As JSON.
    Json,
}

impl Style {
    /// That of what is written as pairs of name and value.
    fn in_pairs(style: Option<&str>, explode: Option<bool>) -> Option<Self> {
        match (style, explode) {
            (None | Some("form"), Some(false)) => Some(Self::Joined(',')),
            (None | Some("form"), _) => Some(Self::Exploded),
            (Some("spaceDelimited" | "pipeDelimited"), Some(true)) => Some(Self::Exploded),
            (Some("spaceDelimited"), _) => Some(Self::Joined(' ')),
            (Some("pipeDelimited"), _) => Some(Self::Joined('|')),
            (Some("deepObject"), _) => Some(Self::DeepObject),
            _ => None,
        }
    }
}

/// One parameter.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: String,
    /// Its name among the arguments.
    pub(super) key: String,
    pub(super) place: Place,
    pub(super) required: bool,
    style: Style,
    /// Whether its value may be a list, as far as its schema says at first sight.
    may_be_list: bool,
    /// The members of an object that its schema names, as servers tell them apart.
    members: BTreeSet<String>,
}

/// What becomes of a parameter that the document names.
pub(super) enum Read {
    /// An argument, with its schema.
    Argument(Parameter, Value),
    /// It is set by the operator or the protocol, and no argument says it.
    Set,
    /// It can be left out, and is. Says why.
    LeftOut(String),
}

impl Parameter {
    /// One as a path has it.
    #[cfg(test)]
    pub(super) fn in_path(name: &str) -> Self {
        let (key, style) = (name.to_owned(), Style::Joined(','));
        let name = name.to_owned();
        let members = BTreeSet::new();
        Self { name, key, place: Place::Path, required: true, style, may_be_list: false, members }
    }

    /// Reads a parameter.
    pub(super) fn read<'a>(
        given: &'a Map<String, Value>,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
    ) -> Result<Read, Refusal> {
        let text = |key: &str| given.get(key).and_then(Value::as_str);
        let flag = |key: &str| given.get(key).and_then(Value::as_bool);
        let name = text("name").ok_or(Refusal::Malformed("a parameter"))?;
        let shown = crate::cut(name, 128);
        let required = flag("required") == Some(true);
        let why = |what: &str| format!("its parameter {shown:?} {what}");
        let unsupported = |what: &str| Refusal::Unsupported(why(what));
        let unsent = |what: &str| match required {
            true => Err(unsupported(what)),
            false => Ok(Read::LeftOut(why(what))),
        };
        let place = match text("in") {
            Some("path") => Place::Path,
            Some("query") => Place::Query,
            Some("header") => Place::Header,
            Some("cookie") => return unsent("is a cookie, and none is sent"),
            _ => return Err(Refusal::Malformed("a parameter")),
        };
        if place == Place::Header {
            // The first three are not parameters, says the standard, and the next are on
            // every request; what the operator sets is not for a program to say.
            let ignored = ["accept", "content-type", "authorization"];
            let sent = ["accept-encoding", "content-length", "host"];
            let folded = folded_header(name);
            let set = endpoint.headers.iter().any(|(it, _)| folded_header(it.as_str()) == folded);
            if set || ignored.contains(&&*folded) || sent.contains(&&*folded) {
                return Ok(Read::Set);
            }
            let is_name = HeaderName::from_bytes(name.as_bytes()).is_ok();
            if !is_name || is_own_header(&folded) || folded == "cookie" {
                return unsent("is a header that no argument may set");
            }
        }
        if place == Place::Query && is_set(&endpoint.query, &folded(name)) {
            return Ok(Read::Set);
        }
        let (schema, is_json) = match given.get("content").and_then(Value::as_object) {
            None => (given.get("schema"), false),
            Some(content) => {
                let Some((_, json)) = json_of(content) else {
                    return unsent("is written otherwise than JSON");
                };
                (json.get("schema"), true)
            }
        };
        let explode = flag("explode");
        let style = match (place, text("style")) {
            _ if is_json => Style::Json,
            (Place::Path | Place::Header, None | Some("simple")) => Style::Joined(','),
            (Place::Query, style) if let Some(style) = Style::in_pairs(style, explode) => style,
            _ => return unsent("has a style that is not written here"),
        };
        let mut schema = match schema {
            Some(schema) => resolver.schema(schema)?,
            None => Value::Object(Map::new()),
        };
        if let (Some(text), Value::Object(schema)) = (text("description"), &mut schema) {
            schema.entry("description").or_insert_with(|| text.into());
        }
        let may_be_list = may_be(&schema, &["array"]);
        let (name, key) = (name.to_owned(), name.to_owned());
        let required = required || place == Place::Path;
        let members = schema.get("properties").and_then(Value::as_object);
        let members = members.into_iter().flat_map(Map::keys).map(|it| folded(it)).collect();
        let parameter = Self { name, key, place, required, style, may_be_list, members };
        Ok(Read::Argument(parameter, schema))
    }

    /// A member of a form. `None` if it cannot be written.
    pub(super) fn in_form(
        name: &str,
        required: bool,
        style: InForm<'_>,
        schema: &Value,
    ) -> Option<Self> {
        let style = match style {
            InForm::Json => Style::Json,
            InForm::Styled(style, explode) => Style::in_pairs(style, explode)?,
        };
        let may_be_list = may_be(schema, &["array"]);
        // Members of an object that is written out would stand among the form's own.
        let is_own = may_be_list || may_be(schema, &SCALARS) || !matches!(style, Style::Exploded);
        // Servers read structure out of brackets.
        let is_plain = !name.contains(|c: char| c == '[' || c == ']' || c.is_control());
        let (name, key, place) = (name.to_owned(), name.to_owned(), Place::Form);
        let members = BTreeSet::new();
        let field = Self { name, key, place, required, style, may_be_list, members };
        (is_own && is_plain && field.unwritable(schema).is_none()).then_some(field)
    }

    /// Why it is no argument: what its schema asks for has no form in its style.
    pub(super) fn unwritable(&self, schema: &Value) -> Option<String> {
        let list = may_be(schema, &["array"])
            && schema.get("items").is_none_or(|items| may_be(items, &SCALARS));
        let object = may_be(schema, &["object"]) && has_flat_members(schema);
        let can = match self.style {
            Style::Json => true,
            Style::Joined(_) => list || may_be(schema, &SCALARS),
            Style::Exploded => list || object || may_be(schema, &SCALARS),
            Style::DeepObject => object,
        };
        let (name, written) = (crate::cut(&self.name, 128), self.written());
        (!can).then(|| format!("its parameter {name:?} cannot be written as {written}"))
    }

    /// The value as one text, with `write` for each part of it.
    pub(super) fn joined(
        &self,
        value: &Value,
        write: impl Fn(&str) -> String,
    ) -> Result<String, String> {
        match (self.style, value) {
            (Style::Json, value) => Ok(write(&value.to_string())),
            (Style::Joined(between), Value::Array(items)) => {
                let parts = items.iter().map(|item| match self.scalar(item)? {
                    it if it.contains(between) => Err(format!(
                        "{:?}: an item of this list cannot have {between:?} in it",
                        self.key
                    )),
                    it => Ok(write(&it)),
                });
                let parts: Result<Vec<String>, String> = parts.collect();
                // A comma parts path segments and headers as it stands.
                let between = match (self.place, between) {
                    (Place::Query | Place::Form, ' ') => "%20".to_owned(),
                    (Place::Query | Place::Form, '|') => "%7C".to_owned(),
                    (_, between) => between.to_string(),
                };
                Ok(parts?.join(&between))
            }
            (Style::Joined(between), Value::String(text))
                if self.may_be_list && text.contains(between) =>
            {
                Err(format!("{:?}: this would be read as a list: give one", self.key))
            }
            (_, value) => Ok(write(&self.scalar(value)?)),
        }
    }

    fn scalar(&self, value: &Value) -> Result<String, String> {
        match value {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(plain(number)),
            Value::Bool(flag) => Ok(flag.to_string()),
            Value::Null | Value::Array(_) | Value::Object(_) => {
                Err(format!("{:?}: this cannot be written as {}", self.key, self.written()))
            }
        }
    }

    fn written(&self) -> String {
        format!("a part of the {}", self.place.as_str())
    }

    /// The names under which members of a value of its stand in the query or a form, as
    /// servers tell them apart.
    pub(super) fn own_names(&self, value: &Value) -> Vec<String> {
        let members = value.as_object().into_iter().flat_map(Map::keys);
        match (self.place, self.style) {
            (Place::Query, Style::Exploded) => members.map(|key| folded(key)).collect(),
            (Place::Query | Place::Form, Style::DeepObject) => {
                members.map(|key| format!("{}[{}]", folded(&self.name), folded(key))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether this name of a member of its is the caller's choice: it stands in the query
    /// by itself, and the document does not have it.
    pub(super) fn is_free(&self, name: &str) -> bool {
        let stands_alone = (self.place, self.style);
        matches!(stands_alone, (Place::Query, Style::Exploded)) && !self.members.contains(name)
    }

    /// Its pairs in the query, or in a form.
    pub(super) fn pairs(&self, value: &Value, out: &mut Vec<String>) -> Result<(), String> {
        let mut pair = |name: &str, value: &Value| {
            out.push(format!("{name}={}", percent_encoded(&self.scalar(value)?)));
            Ok(())
        };
        let name = percent_encoded(&self.name);
        match (self.style, value) {
            (Style::Exploded, Value::Object(_)) if self.place == Place::Form => {
                Err(format!("{:?}: this cannot be written as {}", self.key, self.written()))
            }
            (Style::Exploded, Value::Array(items)) => {
                items.iter().try_for_each(|it| pair(&name, it))
            }
            // Servers read structure out of brackets, wherever they stand in a name, and
            // some end a name at a control character.
            (Style::Exploded | Style::DeepObject, Value::Object(members))
                if let Some(key) = members
                    .keys()
                    .find(|key| key.contains(|c: char| c == '[' || c == ']' || c.is_control())) =>
            {
                let what = "a bracket or a control character";
                Err(format!("{:?}: the name {key:?} cannot have {what}", self.key))
            }
            (Style::Exploded | Style::DeepObject, Value::Object(members))
                if let Some((key, _)) = members.iter().find(|(_, it)| !is_scalar(it)) =>
            {
                let place = self.place.as_str();
                let what = "a list, an object or null, which cannot be written in the";
                Err(format!("{:?}: its member {key:?} is {what} {place}: leave it out", self.key))
            }
            (Style::Exploded, Value::Object(members)) => {
                members.iter().try_for_each(|(key, it)| pair(&percent_encoded(key), it))
            }
            (Style::DeepObject, Value::Object(members)) => {
                members.iter().try_for_each(|(key, it)| {
                    pair(&format!("{name}%5B{}%5D", percent_encoded(key)), it)
                })
            }
            (Style::DeepObject, _) => Err(format!("{:?}: expected an object", self.key)),
            (Style::Exploded, value) => pair(&name, value),
            (Style::Joined(_) | Style::Json, value) => {
                out.push(format!("{name}={}", self.joined(value, percent_encoded)?));
                Ok(())
            }
        }
    }
}

fn is_scalar(value: &Value) -> bool {
    matches!(value, Value::String(_) | Value::Number(_) | Value::Bool(_))
}

/// A number as a server reads it that wants an integer. To JSON Schema `1.0` and `1e2`
/// are integers too; beyond 2^53 a double is no longer one of its own.
fn plain(number: &Number) -> String {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    match number.as_f64() {
        Some(double) if number.is_f64() && double.fract() == 0.0 && double.abs() < EXACT_MAX => {
            (double as i64).to_string()
        }
        _ => number.to_string(),
    }
}

/// Types of values that are one text.
const SCALARS: [&str; 4] = ["string", "number", "integer", "boolean"];

/// Whether a value of this schema may be of one of these types. What is not seen
/// to be none may be one; but who describes members and no type means an object.
fn may_be(schema: &Value, types: &[&str]) -> bool {
    let Some(schema) = schema.as_object() else { return *schema != Value::Bool(false) };
    let is_one = |it: &Value| it.as_str().is_some_and(|it| types.contains(&it));
    let here = match schema.get("type") {
        Some(Value::Array(some)) => some.iter().any(is_one),
        Some(only) => is_one(only),
        None => types.contains(&"object") || !schema.contains_key("properties"),
    };
    let listed = |word| schema.get(word).and_then(Value::as_array);
    let values = schema.get("const").map(std::slice::from_ref);
    let schema_may = |it: &Value| may_be(it, types);
    here && listed("allOf").is_none_or(|all| all.iter().all(schema_may))
        && listed("anyOf").is_none_or(|some| some.iter().any(schema_may))
        && listed("oneOf").is_none_or(|some| some.iter().any(schema_may))
        && values
            .or(listed("enum").map(Vec::as_slice))
            .is_none_or(|it| it.iter().any(|value| types.contains(&type_of(value))))
}

/// Whether each member that an object of this schema must have may be one text.
fn has_flat_members(schema: &Value) -> bool {
    fn gather<'s>(schema: &'s Value, required: &mut Vec<&'s str>, members: &mut Members<'s>) {
        let named = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        required.extend(named.filter_map(Value::as_str));
        let listed = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        members.extend(listed.map(|(name, schema)| (name.as_str(), schema)));
        let all = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
        all.for_each(|schema| gather(schema, required, members));
    }
    type Members<'s> = Vec<(&'s str, &'s Value)>;
    let (mut required, mut members) = (Vec::new(), Members::new());
    gather(schema, &mut required, &mut members);
    let required: BTreeSet<&str> = required.into_iter().collect();
    let is_flat =
        |(name, schema): &(&str, &Value)| !required.contains(name) || may_be(schema, &SCALARS);
    let is_one = |word| {
        let some = schema.get(word).and_then(Value::as_array);
        some.is_none_or(|some| {
            some.iter().any(|it| may_be(it, &["object"]) && has_flat_members(it))
        })
    };
    members.iter().all(is_flat) && is_one("anyOf") && is_one("oneOf")
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_of_very_many_members_is_looked_at_in_no_time() {
        let names: Vec<String> = (0..100_000).map(|at| format!("member-{at:06}")).collect();
        let members: Map<String, Value> =
            names.iter().map(|name| (name.clone(), json!({}))).collect();
        let schema = json!({"type": "object", "properties": members, "required": names});
        let began = std::time::Instant::now();
        assert!(has_flat_members(&schema));
        // Each name held against each would take minutes.
        assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
    }
}
