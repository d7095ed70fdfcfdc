//! How the arguments of a call become a request, and nothing more than they
//! should.
//!
//! An argument is a value and never structure. In a path and a query every
//! byte but the unreserved ones is percent-encoded, so that `/`, `?`, `#` and
//! `..` stay inside their parameter; a path segment that would still be `.`
//! or `..`, or nothing, is refused, since whoever reads the address would
//! climb with it, and so are values that share a segment and could be parted otherwise
//! than they were put together. In a header only what a header can carry is taken. Whoever
//! reads a list parts it where it is joined, percent-encoded or not, so no item
//! has that character; and a member of an object whose members stand in the
//! query by themselves has the name of no other parameter. When the
//! address is put together it is parsed once more and must be byte for byte
//! what was meant: the same scheme, host, port and base path, the path and
//! query as written.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use reqwest::{Method, RequestBuilder, Url};
use rmcp::model::JsonObject;
use serde_json::{Map, Number, Value};

use super::Refusal;
use super::schema::Resolver;
use crate::config::{Endpoint, is_own_header};
use crate::constraint::without_case;
use crate::egress::rule::percent_decoded;
use crate::egress::says_length;
use crate::secret::Secret;
use crate::upstream::oauth::percent;

/// One address, in bytes.
const URL_BYTES_MAX: usize = 16 * 1024;
/// One header, in bytes.
const HEADER_BYTES_MAX: usize = 8 * 1024;

/// Where a parameter goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Path,
    Query,
    Header,
}

impl Place {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Query => "query",
            Self::Header => "header",
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
            // These three are not parameters, says the standard; and what the
            // operator sets is not for a program to say.
            let ignored = ["accept", "content-type", "authorization"];
            let folded = folded_header(name);
            let set = endpoint.headers.iter().any(|(it, _)| folded_header(it.as_str()) == folded);
            if set || ignored.contains(&&*folded) {
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
                let (_, json) = json_of(content)
                    .ok_or_else(|| unsupported("is written otherwise than JSON"))?;
                (json.get("schema"), true)
            }
        };
        let explode = flag("explode");
        let style = match (place, text("style")) {
            _ if is_json => Style::Json,
            (Place::Path | Place::Header, None | Some("simple")) => Style::Joined(','),
            (Place::Query, None | Some("form")) if explode != Some(false) => Style::Exploded,
            (Place::Query, None | Some("form")) => Style::Joined(','),
            (Place::Query, Some("spaceDelimited")) if explode != Some(true) => Style::Joined(' '),
            (Place::Query, Some("pipeDelimited")) if explode != Some(true) => Style::Joined('|'),
            (Place::Query, Some("spaceDelimited" | "pipeDelimited")) => Style::Exploded,
            (Place::Query, Some("deepObject")) => Style::DeepObject,
            _ => return Err(unsupported("has a style that is not written here")),
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
        Ok(Read::Argument(Self { name, key, place, required, style, may_be_list }, schema))
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
    fn joined(&self, value: &Value, write: impl Fn(&str) -> String) -> Result<String, String> {
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
                    (Place::Query, ' ') => "%20".to_owned(),
                    (Place::Query, '|') => "%7C".to_owned(),
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

    /// The names under which members of a value of its stand in the query, as
    /// servers tell them apart.
    fn own_names(&self, value: &Value) -> Vec<String> {
        let members = value.as_object().into_iter().flat_map(Map::keys);
        match (self.place, self.style) {
            (Place::Query, Style::Exploded) => members.map(|key| folded(key)).collect(),
            (Place::Query, Style::DeepObject) => {
                members.map(|key| format!("{}[{}]", folded(&self.name), folded(key))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Its pairs in the query.
    fn pairs(&self, value: &Value, out: &mut Vec<String>) -> Result<(), String> {
        let mut pair = |name: &str, value: &Value| {
            out.push(format!("{name}={}", percent(&self.scalar(value)?)));
            Ok(())
        };
        let name = percent(&self.name);
        match (self.style, value) {
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
            (Style::Exploded, Value::Object(members)) => {
                members.iter().try_for_each(|(key, it)| pair(&percent(key), it))
            }
            (Style::DeepObject, Value::Object(members)) => members
                .iter()
                .try_for_each(|(key, it)| pair(&format!("{name}%5B{}%5D", percent(key)), it)),
            (Style::DeepObject, _) => Err(format!("{:?}: expected an object", self.key)),
            (Style::Exploded, value) => pair(&name, value),
            (Style::Joined(_) | Style::Json, value) => {
                out.push(format!("{name}={}", self.joined(value, percent)?));
                Ok(())
            }
        }
    }
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

/// A name as the most careless server reads it: letters' case does not count, nor
/// white space before it, and a point or a blank is an underscore.
fn folded(name: &str) -> String {
    name.trim().chars().flat_map(without_case).collect::<String>().replace(['.', ' '], "_")
}

/// A header's name as CGI and its heirs read it: neither case nor which of `-` and `_`
/// it is counts.
fn folded_header(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

/// Whether a name in the query, folded, is one that the operator sets, or a part of
/// one.
fn is_set(query: &[(String, Secret)], name: &str) -> bool {
    query.iter().any(|(it, _)| is_one_of(&[folded(it)], name))
}

/// Whether a name in the query is one of these, or a part of one. All are folded.
fn is_one_of(names: &[String], name: &str) -> bool {
    let head = |name: &str| name.split('[').next().unwrap_or_default().to_owned();
    names.iter().any(|it| head(it) == head(name))
}

/// The folded names in a query; parts end at `&` and, for some servers, `;`. `None` if a
/// part has no name.
fn names_of(query: &str) -> Option<Vec<String>> {
    let name = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default().replace('+', " ");
        let name = folded(&String::from_utf8_lossy(&percent_decoded(name.as_bytes())));
        (!name.is_empty()).then_some(name)
    };
    query.split(['&', ';']).map(name).collect()
}

/// A media type without its parameters, in small letters.
fn essence(kind: &str) -> String {
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Whether a media type is JSON.
pub(super) fn is_json(kind: &str) -> bool {
    let essence = essence(kind);
    essence == "application/json" || essence.ends_with("+json")
}

/// The JSON media type to use: plain JSON first, then other `+json`, then JSON Patch (its
/// value has another shape), then a range.
fn json_of(content: &Map<String, Value>) -> Option<(&str, &Value)> {
    let rank = |kind: &str| match essence(kind).as_str() {
        "application/json" => 0,
        "application/json-patch+json" => 2,
        other if other.contains('*') => 3,
        _ => 1,
    };
    let json = content.iter().filter(|(kind, _)| is_json(kind));
    json.min_by_key(|(kind, _)| rank(kind)).map(|(kind, media)| (kind.as_str(), media))
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

/// A JSON body.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) required: bool,
    kind: HeaderValue,
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

/// A path with its parameters, and the query that documents write behind it where one
/// address has several operations (`/messages?beta=true`).
#[derive(Debug)]
pub(super) struct Path {
    shown: String,
    pieces: Vec<Piece>,
    /// As it stands; empty if there is none.
    query: String,
    /// What is set there, as the most careless server reads it.
    set: Vec<String>,
    /// Where pieces from a parameter to a parameter share a segment.
    shared: Vec<Range<usize>>,
}

#[derive(Debug)]
enum Piece {
    /// As it stands.
    Literal(String),
    /// The parameter at this place in the list.
    Parameter(usize),
}

impl Path {
    pub(super) fn parse(text: &str, parameters: &[Parameter]) -> Result<Self, Refusal> {
        let refused = || Refusal::Unsupported("its path is not one that can be asked for".into());
        let is_plain = |c: char| c.is_ascii_graphic() && !"?#\\{}".contains(c);
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let set = match text.contains('?') {
            true => names_of(query).ok_or_else(refused)?,
            false => Vec::new(),
        };
        let mut pieces = Vec::new();
        let mut used = Vec::new();
        let mut rest = path;
        while let Some(open) = rest.find('{') {
            let (literal, inner) = rest.split_at(open);
            let (name, after) = inner[1..].split_once('}').ok_or_else(refused)?;
            let place = |it: &Parameter| it.place == Place::Path && it.name == name;
            let at = parameters.iter().position(place).ok_or_else(|| {
                let why = format!("its path has {{{name}}}, which is no parameter of it");
                Refusal::Unsupported(crate::cut(&why, 256))
            })?;
            pieces.push(Piece::Literal(literal.to_owned()));
            pieces.push(Piece::Parameter(at));
            used.push(at);
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        let plain = pieces.iter().all(|piece| match piece {
            Piece::Literal(text) => text.chars().all(is_plain),
            Piece::Parameter(_) => true,
        });
        let all = parameters
            .iter()
            .enumerate()
            .all(|(at, parameter)| parameter.place != Place::Path || used.contains(&at));
        if !plain
            || !query.chars().all(is_plain)
            || !text.starts_with('/')
            || text.starts_with("//")
        {
            return Err(refused());
        }
        let is_said =
            |it: &&Parameter| it.place == Place::Query && is_one_of(&set, &folded(&it.name));
        if let Some(said) = parameters.iter().find(is_said) {
            let why = format!("its path says already what its parameter {:?} is", said.name);
            return Err(Refusal::Unsupported(crate::cut(&why, 256)));
        }
        if !all {
            let why = "a path parameter of it is not in its path";
            return Err(Refusal::Unsupported(why.into()));
        }
        let shared = shared(&pieces);
        if let Some(it) =
            shared.iter().find(|it| separators(&pieces[(*it).clone()]).any(str::is_empty))
        {
            let names = pieces[it.clone()].iter().filter_map(|piece| match piece {
                Piece::Parameter(at) => Some(format!("{{{}}}", parameters.get(*at)?.name)),
                Piece::Literal(_) => None,
            });
            let names = names.collect::<Vec<_>>().join(" and ");
            let why = format!(
                "its path has nothing between {names} somewhere: nobody can tell where one ends"
            );
            return Err(Refusal::Unsupported(crate::cut(&why, 256)));
        }
        Ok(Self { shown: text.to_owned(), pieces, query: query.to_owned(), set, shared })
    }

    /// The path with these values.
    fn fill(&self, value: impl Fn(usize) -> Result<String, String>) -> Result<String, String> {
        let texts = self.texts(value)?;
        for shared in &self.shared {
            let separators: Vec<&str> = separators(&self.pieces[shared.clone()]).collect();
            if !is_read_in_one_way(&texts[shared.clone()].concat(), &separators) {
                return Err(format!(
                    "parameters that share a segment of the path are parted by {separators:?} there: \
                     with these values they could be parted otherwise; none may have that in it"
                ));
            }
        }
        unclimbing(&texts)
    }

    /// The texts of its pieces.
    fn texts(
        &self,
        value: impl Fn(usize) -> Result<String, String>,
    ) -> Result<Vec<String>, String> {
        let text = |piece: &Piece| match piece {
            Piece::Literal(text) => Ok(text.clone()),
            Piece::Parameter(at) => value(*at),
        };
        self.pieces.iter().map(text).collect()
    }
}

/// The path of these texts, unless whoever reads it would climb with it.
fn unclimbing(texts: &[String]) -> Result<String, String> {
    let path = texts.concat();
    // As an address is read: `%2e` is a dot there too.
    let climbs = path.split('/').any(|segment| {
        let segment = segment.to_ascii_lowercase().replace("%2e", ".");
        segment == "." || segment == ".."
    });
    if climbs {
        return Err("a segment of the path would be `.` or `..`".into());
    }
    Ok(path)
}

/// Where pieces of a path, from a parameter to a parameter, share a segment.
fn shared(pieces: &[Piece]) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for (at, around) in pieces.windows(3).enumerate() {
        let [Piece::Parameter(_), Piece::Literal(between), Piece::Parameter(_)] = around else {
            continue;
        };
        match all.last_mut() {
            _ if between.contains('/') => {}
            Some(last) if last.end == at + 1 => last.end = at + 3,
            _ => all.push(at..at + 3),
        }
    }
    all
}

/// What stands as it is among these pieces.
fn separators(pieces: &[Piece]) -> impl Iterator<Item = &str> {
    pieces.iter().filter_map(|piece| match piece {
        Piece::Literal(text) => Some(text.as_str()),
        Piece::Parameter(_) => None,
    })
}

/// Whether values with these separators between them, as they stand in a path, can be
/// parted in one way only. Servers match what is decoded, some without regard to case, and
/// take what they find first or last: `a..` before `...` and `b` would be `a` and `..b`.
fn is_read_in_one_way(text: &str, separators: &[&str]) -> bool {
    let plain = |text: &str| percent_decoded(text.as_bytes()).to_ascii_lowercase();
    let text = plain(text);
    // In how many ways what is before a place can be read, up to the separator so far.
    // More than two are two.
    let mut ways = vec![1_u8; text.len() + 1];
    for separator in separators {
        let separator = plain(separator);
        let mut next = vec![0_u8; text.len() + 1];
        for end in separator.len()..=text.len() {
            let start = end - separator.len();
            let here = if text[start..end] == separator { ways[start] } else { 0 };
            let before = if end > 0 { next[end - 1] } else { 0 };
            next[end] = (before + here).min(2);
        }
        ways = next;
    }
    ways.last() == Some(&1)
}

/// What a call of one operation sends.
#[derive(Debug)]
pub(super) struct Request {
    method: Method,
    base: Url,
    path: Path,
    parameters: Vec<Parameter>,
    body: Option<Body>,
    /// What it asks for.
    accept: HeaderValue,
    /// The operator's part of the query.
    keys: Vec<(String, Secret)>,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, crate::cut(&self.path.shown, 256))
    }
}

impl Request {
    pub(super) fn new(
        method: Method,
        endpoint: &Endpoint,
        path: Path,
        parameters: Vec<Parameter>,
        body: Option<Body>,
        accept: HeaderValue,
    ) -> Result<Self, Refusal> {
        let (base, keys) = (endpoint.url.clone(), endpoint.query.clone());
        let request = Self { method, base, path, parameters, body, accept, keys };
        if let Some(name) = request.path.set.iter().find(|name| is_set(&request.keys, name)) {
            let why = format!("its path says what the operator sets: {:?}", crate::cut(name, 128));
            return Err(Refusal::Unsupported(why));
        }
        // What is wrong with the path itself shows with any argument.
        let tried = request.path.texts(|_| Ok("x".into())).and_then(|it| unclimbing(&it));
        let tried = tried.and_then(|path| request.address(&path, &request.path.query));
        tried.map(|_| ()).map_err(|why| Refusal::Unsupported(format!("its path: {why}")))?;
        Ok(request)
    }

    /// The request for these arguments, which fit the tool's schema.
    ///
    /// # Errors
    /// Says which argument cannot be sent.
    pub(super) fn build(
        &self,
        http: &reqwest::Client,
        arguments: &JsonObject,
    ) -> Result<RequestBuilder, String> {
        let path = self.path.fill(|at| {
            let Some(parameter) = self.parameters.get(at) else { return Ok(String::new()) };
            let value = arguments.get(&parameter.key).unwrap_or(&Value::Null);
            let text = parameter.joined(value, percent)?;
            if text.is_empty() {
                return Err(format!("{:?}: a part of the path cannot be empty", parameter.key));
            }
            Ok(text)
        })?;
        let mut query = Vec::new();
        if !self.path.query.is_empty() {
            query.push(self.path.query.clone());
        }
        let mut headers = Vec::new();
        for parameter in &self.parameters {
            let Some(value) = arguments.get(&parameter.key).filter(|value| !value.is_null()) else {
                continue;
            };
            match parameter.place {
                Place::Path => {}
                Place::Query => {
                    self.check_names(parameter, value, arguments)?;
                    parameter.pairs(value, &mut query)?;
                }
                Place::Header => headers.push(header(parameter, value)?),
            }
        }
        let keys = self.keys.iter();
        query
            .extend(keys.map(|(name, key)| format!("{}={}", percent(name), percent(key.expose()))));
        let address = self.address(&path, &query.join("&"))?;
        let request = http.request(self.method.clone(), address);
        let mut request = request.header(ACCEPT, self.accept.clone());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let (Some(body), Some(value)) = (&self.body, arguments.get("body")) {
            request = request.header(CONTENT_TYPE, body.kind.clone()).body(value.to_string());
        } else if says_length(&self.method) {
            request = request.header(CONTENT_LENGTH, 0);
        }
        Ok(request)
    }

    /// Refuses a member that would stand in the query under the name of another
    /// parameter, given or not, or of another member: a server takes one of the two,
    /// and what the schema and a grant say of that was held against the other.
    fn check_names(
        &self,
        parameter: &Parameter,
        value: &Value,
        arguments: &JsonObject,
    ) -> Result<(), String> {
        let names = parameter.own_names(value);
        let mut own = BTreeSet::new();
        if let Some(twice) = names.iter().find(|name| !own.insert(*name)) {
            return Err(format!(
                "{:?}: two of its members would be read as one, {twice:?}: leave one out",
                parameter.key
            ));
        }
        for key in names {
            if is_set(&self.keys, &key) {
                let why = "would be read as what the operator sets";
                return Err(format!("{:?}: its member {key:?} {why}", parameter.key));
            }
            if is_one_of(&self.path.set, &key) {
                let why = "would be read as what the path says";
                return Err(format!("{:?}: its member {key:?} {why}", parameter.key));
            }
            let taken = |other: &Parameter| {
                let name = folded(&other.name);
                let value = arguments.get(&other.key).unwrap_or(&Value::Null);
                let is_its = name == key || name.split('[').next() == Some(&key);
                other.place == Place::Query && is_its || other.own_names(value).contains(&key)
            };
            let mut others = self.parameters.iter().filter(|it| it.key != parameter.key);
            if let Some(other) = others.find(|it| taken(it)) {
                return Err(format!(
                    "{:?}: its member {key:?} would be read as a part of {:?}",
                    parameter.key, other.key
                ));
            }
        }
        Ok(())
    }

    /// The address, or a refusal if it is any other than meant.
    fn address(&self, path: &str, query: &str) -> Result<Url, String> {
        let path = format!("{}{path}", self.base.path().trim_end_matches('/'));
        let origin = self.base.origin().ascii_serialization();
        let question = if query.is_empty() { "" } else { "?" };
        let text = format!("{origin}{path}{question}{query}");
        if text.len() > URL_BYTES_MAX {
            return Err(format!("the address would have more than {URL_BYTES_MAX} bytes"));
        }
        let url = Url::parse(&text).map_err(|_| "the address would be none".to_owned())?;
        let same = url.origin() == self.base.origin()
            && url.path() == path
            && url.query().unwrap_or_default() == query
            && url.fragment().is_none()
            && url.username().is_empty()
            && url.password().is_none();
        if same { Ok(url) } else { Err("the address would be another than meant".to_owned()) }
    }
}

fn header(parameter: &Parameter, value: &Value) -> Result<(HeaderName, HeaderValue), String> {
    let text = parameter.joined(value, str::to_owned)?;
    let refused = || format!("{:?}: no header can carry this", parameter.key);
    let printable = text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if !printable || text.len() > HEADER_BYTES_MAX {
        return Err(refused());
    }
    let name = HeaderName::from_bytes(parameter.name.as_bytes()).map_err(|_| refused())?;
    Ok((name, HeaderValue::from_str(&text).map_err(|_| refused())?))
}

#[cfg(test)]
mod tests {
    use super::super::{Plan, tests_endpoint};
    use super::*;
    use serde_json::json;

    /// The request of the one operation at `path` with these parameters.
    fn build(
        path: &str,
        parameters: &Value,
        arguments: &Value,
    ) -> Result<reqwest::Request, String> {
        let document = json!({"openapi": "3.1.0", "paths": {path: {"post": {
            "parameters": parameters,
            "requestBody": {"content": {"application/json": {}}},
        }}}});
        let include = [format!("POST {path}")];
        let plan = Plan::of("shop", &document, Some(&include), tests_endpoint()).unwrap();
        let arguments = arguments.as_object().unwrap();
        let http = crate::upstream::http::plain_client(Default::default()).unwrap();
        plan.operations[0].request.build(&http, arguments).map(|it| it.build().unwrap())
    }

    fn in_path(name: &str) -> Value {
        json!([{"name": name, "in": "path", "required": true, "schema": {}}])
    }

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

    #[test]
    fn a_key_reaches_the_query_as_it_is_whatever_is_in_it() {
        let key = "a&b#c%41 \u{fc}=+;?/'\"";
        let mut endpoint = tests_endpoint();
        endpoint.query.push(("a key&".into(), Secret::new(key.into()).unwrap()));
        let parameters = json!([{"name": "q", "in": "query", "schema": {"type": "string"}}]);
        let document = json!({"openapi": "3.1.0", "paths": {"/a": {"get": {
            "operationId": "a", "parameters": parameters}}}});
        let plan = Plan::of("shop", &document, None, endpoint).unwrap();
        let http = crate::upstream::http::plain_client(Default::default()).unwrap();
        for arguments in [json!({}), json!({"q": "x&a key&=mine#"})] {
            let arguments = arguments.as_object().unwrap();
            let request = plan.operations[0].request.build(&http, arguments).unwrap();
            let url = request.build().unwrap().url().clone();
            let pairs: Vec<_> = url.query_pairs().into_owned().collect();
            assert_eq!(pairs.len(), 1 + arguments.len(), "{url}");
            assert_eq!(pairs.last(), Some(&("a key&".to_owned(), key.to_owned())), "{url}");
        }
    }

    #[test]
    fn a_path_argument_stays_inside_its_segment() {
        let of = |value: &str| {
            let request = build("/parts/{id}/x", &in_path("id"), &json!({"id": value}));
            request.map(|it| it.url().as_str().to_owned())
        };
        let base = "https://api.example/v1/parts";
        assert_eq!(of("a/../../b").unwrap(), format!("{base}/a%2F..%2F..%2Fb/x"));
        assert_eq!(of("a?b#c").unwrap(), format!("{base}/a%3Fb%23c/x"));
        assert_eq!(of("@evil.example:80").unwrap(), format!("{base}/%40evil.example%3A80/x"));
        assert_eq!(of("%2e%2e").unwrap(), format!("{base}/%252e%252e/x"));
        assert_eq!(of("a\\b\r\nX: y").unwrap(), format!("{base}/a%5Cb%0D%0AX%3A%20y/x"));
        assert_eq!(of("...").unwrap(), format!("{base}/.../x"));
        for climbing in [".", "..", ""] {
            assert!(of(climbing).is_err(), "{climbing:?}");
        }
    }

    #[test]
    fn dots_around_an_argument_do_not_make_it_climb() {
        let refused = build("/a/.{id}/x", &in_path("id"), &json!({"id": "."})).unwrap_err();
        assert!(refused.contains(".."), "{refused}");
        build("/a/.{id}/x", &in_path("id"), &json!({"id": "b"})).unwrap();
    }

    #[test]
    fn arguments_that_share_a_segment_are_parted_where_they_were_joined() {
        let of = |path: &str, a: &str, b: &str| {
            let parameter = |name: &str| json!({"name": name, "in": "path", "schema": {}});
            let parameters = json!([parameter("a"), parameter("b")]);
            let request = build(path, &parameters, &json!({"a": a, "b": b}));
            request.map(|it| it.url().path().strip_prefix("/v1").unwrap().to_owned())
        };
        for (path, a, b, expected) in [
            ("/x-{a}-{b}.json", "bob", "x.json", "/x-bob-x.json.json"),
            ("/{a}...{b}", "v1.0", "v2.0", "/v1.0...v2.0"),
            ("/{a}/-/{b}", "a-b", "c/-/d", "/a-b/-/c%2F-%2Fd"),
            ("/{a}x{b}", "1", "2", "/1x2"),
        ] {
            assert_eq!(of(path, a, b).as_deref(), Ok(expected));
        }
        for (path, a, b) in [
            ("/{a}-{b}", "bob", "admin-x"),
            ("/{a}-{b}", "bob-admin", "x"),
            ("/{a}...{b}", "main", "secret...x"),
            ("/{a}...{b}", "main..", "x"),
            ("/{a}...{b}", "main", ".x"),
            ("/{a}:{b}", "main", "a:b"),
            ("/{a}%2D{b}", "main", "a-b"),
            ("/{a}x{b}", "1", "2X3"),
            ("/{a}--{b}", "a-", "b"),
        ] {
            let refused = of(path, a, b).unwrap_err();
            assert!(refused.contains("parted otherwise"), "{path} {a} {b}: {refused}");
        }
    }

    #[test]
    fn several_arguments_of_a_segment_are_looked_at_together() {
        let parse = |text: &str| {
            let parameter = |name: &str| Parameter {
                name: name.into(),
                key: name.into(),
                place: Place::Path,
                required: true,
                style: Style::Joined(','),
                may_be_list: false,
            };
            Path::parse(text, &["a", "b", "c"].map(parameter))
        };
        let fill =
            |text: &str, values: [&str; 3]| parse(text).unwrap().fill(|at| Ok(values[at].into()));
        assert_eq!(fill("/{a}-{b}--{c}", ["1", "2", "3"]).unwrap(), "/1-2--3");
        assert_eq!(fill("/{a}-{b}/{c}", ["1", "2", "3-4"]).unwrap(), "/1-2/3-4");
        for values in [["1-2", "3", "4"], ["1", "2-3", "4"], ["1", "2", "3-4"]] {
            assert!(fill("/{a}-{b}-{c}", values).is_err(), "{values:?}");
        }
        let refused = parse("/{a}-{b}{c}").unwrap_err().to_string();
        assert!(refused.contains("{a} and {b} and {c}"), "{refused}");
        assert!(parse("/{a}/{b}{c}").is_err());
        assert!(parse("/{a}/{b}/{c}").is_ok());
    }

    #[test]
    fn no_argument_changes_the_host() {
        let all = json!([
            {"name": "p", "in": "path", "required": true, "schema": {}},
            {"name": "q", "in": "query", "schema": {}},
            {"name": "X-H", "in": "header", "schema": {}},
        ]);
        for evil in
            ["//evil.example/", "https://evil.example/", "@evil.example", "\\\\evil", "..;/x"]
        {
            let arguments = json!({"p": evil, "q": evil, "X-H": evil, "body": evil});
            let request = build("/{p}", &all, &arguments).unwrap();
            assert_eq!(request.url().host_str(), Some("api.example"));
            assert_eq!(request.url().path_segments().unwrap().count(), 2, "{}", request.url());
            assert_eq!(request.url().query_pairs().count(), 1);
        }
    }

    #[test]
    fn a_query_is_written_as_its_style_says_and_holds_nothing_else() {
        let of = |extra: Value, value: Value| {
            let mut parameter = json!({"name": "q", "in": "query", "schema": {}});
            parameter.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let request = build("/a", &json!([parameter]), &json!({"q": value}));
            request.map(|it| it.url().query().unwrap_or_default().to_owned())
        };
        let list = json!(["a&b=c", 2]);
        assert_eq!(of(json!({}), list.clone()).unwrap(), "q=a%26b%3Dc&q=2");
        assert_eq!(of(json!({"explode": false}), list.clone()).unwrap(), "q=a%26b%3Dc,2");
        assert_eq!(of(json!({"style": "pipeDelimited"}), list.clone()).unwrap(), "q=a%26b%3Dc%7C2");
        assert_eq!(of(json!({"style": "spaceDelimited"}), list).unwrap(), "q=a%26b%3Dc%202");
        let object = json!({"a&": "x", "b": true});
        assert_eq!(
            of(json!({"style": "deepObject"}), object.clone()).unwrap(),
            "q%5Ba%26%5D=x&q%5Bb%5D=true"
        );
        assert_eq!(of(json!({}), object.clone()).unwrap(), "a%26=x&b=true");
        let json = json!({"content": {"application/json": {}}, "schema": null});
        assert_eq!(of(json, json!({"a]": "x"})).unwrap(), "q=%7B%22a%5D%22%3A%22x%22%7D");
        for extra in [json!({}), json!({"style": "deepObject"})] {
            assert!(of(extra, json!({"a][b": "x"})).unwrap_err().contains("bracket"));
        }
        assert_eq!(of(json!({}), Value::Null).unwrap(), "");
        assert!(of(json!({}), json!([["nested"]])).is_err());
        assert!(of(json!({"explode": false}), object).is_err());
    }

    #[test]
    fn an_integer_is_written_as_one_however_its_program_wrote_it() {
        let parameters = json!([
            {"name": "id", "in": "path", "required": true, "schema": {"type": "integer"}},
            {"name": "q", "in": "query", "schema": {"type": "array", "items": {"type": "number"}}},
            {"name": "X-N", "in": "header", "schema": {"type": "integer"}},
        ]);
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        for (number, expected) in [
            ("1.0", "1"),
            ("1e2", "100"),
            ("-0", "0"),
            ("-0.0", "0"),
            ("-3.0", "-3"),
            ("9007199254740991.0", "9007199254740991"),
            ("18446744073709551615", "18446744073709551615"),
            ("9007199254740992.0", "9007199254740992.0"),
            ("0.5", "0.5"),
        ] {
            let arguments = json!({"id": read(number), "q": [read(number)], "X-N": read(number)});
            let request = build("/{id}", &parameters, &arguments).unwrap();
            assert_eq!(request.url().path(), format!("/v1/{expected}"), "{number}");
            assert_eq!(request.url().query(), Some(&*format!("q={expected}")), "{number}");
            assert_eq!(request.headers()["X-N"], expected, "{number}");
        }
    }

    #[test]
    fn no_argument_says_what_another_parameter_is() {
        let parameters = json!([
            {"name": "limit", "in": "query", "schema": {}},
            {"name": "sort[by]", "in": "query", "schema": {}},
            {"name": "sort", "in": "query", "style": "deepObject", "schema": {}},
            {"name": "sorting", "in": "query", "style": "deepObject", "schema": {}},
            {"name": "max_price", "in": "query", "schema": {}},
            {"name": "filter", "in": "query", "schema": {}},
            {"name": "more", "in": "query", "schema": {}},
            {"name": "id", "in": "path", "required": true, "schema": {}},
        ]);
        let of = |mut arguments: Value| {
            arguments["id"] = 1.into();
            let request = build("/a/{id}", &parameters, &arguments);
            request.map(|it| it.url().query().unwrap_or_default().to_owned())
        };
        // Its own name is its own, and what is no parameter of the query is free.
        let free = json!({"limit": 5, "filter": {"filter": 1, "id": 2, "other": 3}});
        assert_eq!(of(free).unwrap(), "limit=5&filter=1&id=2&other=3");
        for arguments in [
            json!({"limit": 5, "filter": {"limit": 100}}),
            json!({"filter": {"limit": 100}}),
            json!({"limit": 5, "filter": {"LIMIT": 100}}),
            json!({"limit": 5, "filter": {" limit": 100}}),
            json!({"max_price": 5, "filter": {"max.price": 100}}),
            json!({"sort[by]": "a", "sorting": {"x": 1}, "sort": {"by": "b"}}),
            json!({"filter": {"sort": 100}}),
            json!({"filter": {"x": 1}, "more": {"x": 2}}),
        ] {
            let refused = of(arguments.clone()).unwrap_err();
            assert!(refused.contains("would be read as a part of"), "{arguments}: {refused}");
        }
        assert!(of(json!({"limit": 5, "filter": {"limit[]": 100}})).is_err());
        assert!(of(json!({"limit": 5, "filter": {"limit\u{0}x": 100}})).is_err());
    }

    #[test]
    fn no_two_members_of_an_argument_are_one_to_a_server() {
        for (style, free) in
            [("form", "limit=5&offset=2"), ("deepObject", "f%5Blimit%5D=5&f%5Boffset%5D=2")]
        {
            let parameters = json!([{"name": "f", "in": "query", "style": style, "schema": {}}]);
            let of = |members: Value| {
                let request = build("/a", &parameters, &json!({"f": members}));
                request.map(|it| it.url().query().unwrap_or_default().to_owned())
            };
            assert_eq!(of(json!({"limit": 5, "offset": 2})).unwrap(), free);
            for members in [
                json!({"limit": 5, "Limit": 100}),
                json!({"limit": 5, " limit": 100}),
                json!({"size": 5, "\u{17f}ize": 100}),
                json!({"max_items": 5, "max.items": 100}),
                json!({"max_items": 5, "max items": 100}),
            ] {
                let refused = of(members.clone()).unwrap_err();
                assert!(refused.contains("would be read as one"), "{members}: {refused}");
            }
        }
    }

    #[test]
    fn no_argument_says_what_a_parameter_is_that_is_left_out() {
        let object = json!({"type": "object"});
        let parameters = json!([
            {"name": "gone", "in": "query", "explode": false, "schema": object},
            {"name": "filter", "in": "query", "schema": object},
        ]);
        build("/a", &parameters, &json!({"filter": {"other": 1}})).unwrap();
        let refused = build("/a", &parameters, &json!({"filter": {"gone": 1}})).unwrap_err();
        assert!(refused.contains("would be read as a part of"), "{refused}");
    }

    #[test]
    fn a_query_in_a_path_is_sent_as_it_stands_and_no_argument_says_it_too() {
        let parameters = json!([
            {"name": "id", "in": "path", "required": true, "schema": {}},
            {"name": "q", "in": "query", "schema": {}},
            {"name": "filter", "in": "query", "schema": {"type": "object"}},
        ]);
        let of = |path: &str, arguments: Value| {
            let request = build(path, &parameters, &arguments)?;
            Ok::<_, String>(
                request.url().as_str().strip_prefix("https://api.example/v1").unwrap().to_owned(),
            )
        };
        let path = "/a/{id}?beta=true&max.items=5";
        let said = of(path, json!({"id": "x?y", "q": "z&beta=false"})).unwrap();
        assert_eq!(said, "/a/x%3Fy?beta=true&max.items=5&q=z%26beta%3Dfalse");
        assert_eq!(of(path, json!({"id": 1})).unwrap(), "/a/1?beta=true&max.items=5");
        for member in ["beta", "Beta", "max_items", "max.items"] {
            let refused = of(path, json!({"id": 1, "filter": {member: 1}})).unwrap_err();
            assert!(refused.contains("what the path says"), "{member}: {refused}");
        }
        assert_eq!(of("/a/{id}?flag", json!({"id": 1})).unwrap(), "/a/1?flag");
    }

    #[test]
    fn a_query_in_a_path_that_is_not_fixed_or_says_anothers_costs_the_operation() {
        let of = |path: &str, endpoint: Endpoint| {
            let document = json!({"openapi": "3.1.0", "paths": {path: {"get": {"parameters": [
                {"name": "q", "in": "query", "schema": {}},
            ]}}}});
            Plan::of("shop", &document, Some(&[format!("GET {path}")]), endpoint).map(drop)
        };
        of("/a?b=1", tests_endpoint()).unwrap();
        for path in [
            "/a?",
            "/a?b={q}",
            "/a?=1",
            "/a?b=1&",
            "/a?b=1#c",
            "/a?b='",
            "/a?q=1",
            "/a?%51[]=1",
            "/a?b=1;q=2",
        ] {
            assert!(of(path, tests_endpoint()).is_err(), "{path}");
        }
        let mut endpoint = tests_endpoint();
        endpoint.query.push(("B".into(), Secret::new("hunter2".into()).unwrap()));
        assert!(of("/a?b=1", endpoint).is_err());
    }

    #[test]
    fn an_item_of_a_list_is_one_item() {
        let of = |place: &str, extra: Value, list: Value| {
            let mut parameter = json!({"name": "ids", "in": place, "required": true, "schema": {}});
            parameter.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let path = if place == "path" { "/a/{ids}" } else { "/a" };
            build(path, &json!([parameter]), &json!({"ids": list}))
        };
        let joined = [
            ("header", json!({}), ','),
            ("path", json!({}), ','),
            ("query", json!({"explode": false}), ','),
            ("query", json!({"style": "pipeDelimited"}), '|'),
            ("query", json!({"style": "spaceDelimited"}), ' '),
        ];
        for (place, extra, between) in joined {
            of(place, extra.clone(), json!(["1", "2"])).unwrap();
            let refused = of(place, extra, json!([format!("1{between}2")])).unwrap_err();
            assert!(refused.contains("an item of this list"), "{place}: {refused}");
        }
        // Nor is a text a list, where one is expected or may be.
        assert!(of("header", json!({}), json!("1,2")).unwrap_err().contains("as a list"));
        let text = json!({"schema": {"type": "string"}});
        assert_eq!(of("header", text, json!("a, b")).unwrap().headers()["ids"], "a, b");
        // Each under its name: nothing parts them.
        of("query", json!({}), json!(["1,2", "3|4"])).unwrap();
    }

    #[test]
    fn a_header_argument_cannot_begin_another_header() {
        let parameters = json!([{"name": "X-H", "in": "header", "schema": {}}]);
        let of = |value: &str| build("/a", &parameters, &json!({"X-H": value}));
        assert_eq!(of("plain text").unwrap().headers()["x-h"], "plain text");
        for evil in ["a\r\nAuthorization: x", "a\nb", "a\rb", "a\0b", "é"] {
            let refused = of(evil).unwrap_err();
            assert!(refused.contains("X-H") && !refused.contains("Authorization"), "{refused}");
        }
        assert!(of(&"x".repeat(HEADER_BYTES_MAX + 1)).is_err());
    }

    #[test]
    fn a_text_with_a_comma_is_sent_where_it_can_be_no_list() {
        let text = json!({"type": "string"});
        for (schema, sent) in [
            (json!({"anyOf": [text, {"type": "null"}]}), true),
            (json!({"allOf": [{"enum": ["de, en", "de"]}], "default": "de"}), true),
            (json!({"oneOf": [text, {"type": "array"}]}), false),
            (json!({"anyOf": [text, {}]}), false),
            (json!({"minLength": 1}), false),
        ] {
            let parameters = json!([{"name": "X-H", "in": "header", "schema": schema}]);
            let request = build("/a", &parameters, &json!({"X-H": "de, en"}));
            assert_eq!(request.is_ok(), sent, "{schema}: {request:?}");
        }
    }

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

    #[test]
    fn headers_of_the_operator_and_of_the_protocol_are_no_arguments() {
        let mut endpoint = tests_endpoint();
        let secret = crate::secret::Secret::new("hunter2".into()).unwrap();
        endpoint.headers.push((HeaderName::from_static("x-api-key"), secret));
        let names = [
            "X-API-Key",
            "X_Api_Key",
            "Authorization",
            "Accept",
            "Host",
            "Cookie",
            "Content-Length",
            "content_length",
            "Content_Type",
            "X-Free",
        ];
        let parameters: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "in": "header", "schema": {}})).collect();
        let document =
            json!({"openapi": "3.0.0", "paths": {"/a": {"get": {"parameters": parameters}}}});
        let plan = Plan::of("shop", &document, None, endpoint).unwrap();
        let schema: Value =
            serde_json::from_str(&plan.operations[0].tool.spec().input_schema).unwrap();
        let left: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(left, ["X-Free"]);
    }

    #[test]
    fn an_address_without_end_is_refused() {
        let long = "x".repeat(URL_BYTES_MAX);
        assert!(build("/{id}", &in_path("id"), &json!({"id": long})).is_err());
    }
}
