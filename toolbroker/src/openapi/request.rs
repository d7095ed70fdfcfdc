//! How the arguments of a call become a request, and nothing more than they
//! should.
//!
//! An argument is a value and never structure. In a path and a query every
//! byte but the unreserved ones is percent-encoded, so that `/`, `?` and `#`
//! stay inside their parameter; a path segment that would be `.`
//! or `..` to a server that decodes it, or nothing, is refused, since whoever reads the
//! address would climb with it, and so are values that share a segment and could be parted otherwise
//! than they were put together. In a header only what a header can carry is taken. Whoever
//! reads a list parts it where it is joined, percent-encoded or not, so no item
//! has that character; and a member of an object whose members stand in the
//! query by themselves has the name of no other parameter. When the
//! address is put together it is parsed once more and must be byte for byte
//! what was meant: the same scheme, host, port and base path, the path and
//! query as written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use reqwest::{Method, RequestBuilder, Url};
use rmcp::model::JsonObject;
use serde_json::Value;

use super::Refusal;
use super::body::Body;
use super::name::{folded, is_one_of, is_set};
use super::parameter::{Parameter, Place};
use super::template::{Path, unclimbing};
use crate::egress::says_length;
use crate::endpoint::Endpoint;
use crate::secret::Secret;
use crate::uri::percent_encoded;

/// One address, in bytes.
const URL_BYTES_MAX: usize = 16 * 1024;
/// One header, in bytes.
const HEADER_BYTES_MAX: usize = 8 * 1024;

/// What a call of one operation sends.
#[derive(Debug)]
pub(crate) struct Request {
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

/// What the arguments make of a request, but for a body that is JSON.
#[derive(Debug)]
pub(crate) struct Head {
    address: Url,
    headers: Vec<(HeaderName, HeaderValue)>,
    /// A body that is a form.
    form: Option<String>,
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
        // Many servers take a value from either.
        let form = request.body.as_ref().and_then(|body| body.form.as_ref());
        let in_query = |name: &String| {
            let mut query = request.parameters.iter().filter(|it| it.place == Place::Query);
            is_one_of(&request.path.set, name) || query.any(|it| folded(&it.name) == *name)
        };
        if let Some(name) = form.and_then(|form| form.names().find(in_query)) {
            let name = crate::cut(&name, 128);
            let why = format!("its form says what its query does: {name:?}");
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
    /// As [`Request::head`].
    pub(crate) fn build(
        &self,
        http: &reqwest::Client,
        arguments: &JsonObject,
    ) -> Result<RequestBuilder, String> {
        let Head { address, headers, form } = self.head(arguments)?;
        let request = http.request(self.method.clone(), address);
        let mut request = request.header(ACCEPT, self.accept.clone());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let mut is_empty = true;
        if let (Some(body), Some(value)) = (&self.body, arguments.get("body")) {
            let text = form.unwrap_or_else(|| value.to_string());
            is_empty = text.is_empty();
            request = request.header(CONTENT_TYPE, body.kind.clone()).body(text);
        }
        // Some servers answer 411 else.
        if is_empty && says_length(&self.method) {
            request = request.header(CONTENT_LENGTH, 0);
        }
        Ok(request)
    }

    /// What stands before the body, and a form. Any JSON that fits the schema can be sent.
    ///
    /// # Errors
    /// Says which argument cannot be sent.
    pub(crate) fn head(&self, arguments: &JsonObject) -> Result<Head, String> {
        let path = self.path.fill(|at| {
            let Some(parameter) = self.parameters.get(at) else { return Ok(String::new()) };
            let value = arguments.get(&parameter.key).unwrap_or(&Value::Null);
            let text = parameter.joined(value, percent_encoded)?;
            if text.is_empty() {
                return Err(format!("{:?}: a part of the path cannot be empty", parameter.key));
            }
            Ok(text)
        })?;
        let mut query = Vec::new();
        if !self.path.query.is_empty() {
            query.push(self.path.query.clone());
        }
        let names = self.names(arguments)?;
        let mut headers = Vec::new();
        for (at, parameter) in self.parameters.iter().enumerate() {
            let Some(value) = arguments.get(&parameter.key).filter(|value| !value.is_null()) else {
                continue;
            };
            match parameter.place {
                Place::Path | Place::Form => {}
                Place::Query => {
                    self.check_names(at, &names)?;
                    parameter.pairs(value, &mut query)?;
                }
                Place::Header => headers.push(header(parameter, value)?),
            }
        }
        let keys = self.keys.iter();
        query.extend(keys.map(|(name, key)| {
            format!("{}={}", percent_encoded(name), percent_encoded(key.expose()))
        }));
        let address = self.address(&path, &query.join("&"))?;
        let form = match (&self.body, arguments.get("body")) {
            (Some(Body { form: Some(form), .. }), Some(value)) => Some(form.write(value)?),
            _ => None,
        };
        Ok(Head { address, headers, form })
    }

    /// Refuses a member that would stand in the query under the name of another
    /// parameter, given or not, of another member, or of one of the body, unless the
    /// document has both: a server takes one of the two, and what the schema and a grant
    /// say of that was held against the other.
    fn check_names(&self, at: usize, names: &Names) -> Result<(), String> {
        let parameter = &self.parameters[at];
        let refused = |key: &str, why: &str| {
            Err(format!("{:?}: its member {key:?} would be read as {why}", parameter.key))
        };
        let mut own = BTreeSet::new();
        for key in &names.own[at] {
            if !own.insert(key) {
                return Err(format!(
                    "{:?}: two of its members would be read as one, {key:?}: leave one out",
                    parameter.key
                ));
            }
            if is_set(&self.keys, key) {
                return refused(key, "what the operator sets");
            }
            if is_one_of(&self.path.set, key) {
                return refused(key, "what the path says");
            }
            if parameter.is_free(key) && names.in_body.contains(head_of(key)) {
                return refused(key, "a part of the body");
            }
            let others = [names.listed.get(key), names.flat.get(&flat(key))];
            let mut others = others.into_iter().flatten().flatten();
            if let Some(other) = others.find(|other| **other != at) {
                return refused(key, &format!("a part of {:?}", self.parameters[*other].key));
            }
        }
        Ok(())
    }

    /// The names in the query that these arguments make.
    fn names(&self, arguments: &JsonObject) -> Result<Names, String> {
        let mut names = Names::default();
        let mut bytes = 0;
        let mut has_free = false;
        for (at, parameter) in self.parameters.iter().enumerate() {
            let value = arguments.get(&parameter.key).unwrap_or(&Value::Null);
            let own = parameter.own_names(value);
            bytes += own.iter().map(|key| key.len() + 1).sum::<usize>();
            if bytes > URL_BYTES_MAX {
                return Err(format!("the address would have more than {URL_BYTES_MAX} bytes"));
            }
            if parameter.place == Place::Query {
                let name = folded(&parameter.name);
                names.listed.entry(head_of(&name).to_owned()).or_default().push(at);
                names.listed.entry(name).or_default().push(at);
            }
            for key in &own {
                names.flat.entry(flat(key)).or_default().push(at);
                has_free |= parameter.is_free(key);
            }
            names.own.push(own);
        }
        if let Some(body) = self.body.as_ref().filter(|_| has_free) {
            let in_body = body.names(arguments.get("body"));
            names.in_body = in_body.iter().map(|name| head_of(name).to_owned()).collect();
        }
        Ok(names)
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

/// Names in the query, as servers tell them apart, and which parameters have them.
#[derive(Debug, Default)]
struct Names {
    /// Those of each parameter's members, in the order of parameters.
    own: Vec<Vec<String>>,
    /// The parameters' own, and what stands before a bracket in them.
    listed: BTreeMap<String, Vec<usize>>,
    /// Those of all members, without brackets.
    flat: BTreeMap<String, Vec<usize>>,
    /// What the body says, where a member may be called like anything.
    in_body: BTreeSet<String>,
}

/// What stands before a bracket.
fn head_of(name: &str) -> &str {
    name.split('[').next().unwrap_or_default()
}

/// Some servers take `a.b` for `a[b]`.
fn flat(name: &str) -> String {
    name.replace(['[', ']'], "")
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
        let plan = Plan::of("shop", document.clone(), Some(&include), tests_endpoint()).unwrap();
        let arguments = arguments.as_object().unwrap();
        let http = crate::upstream::http::plain_client(Default::default(), &[]).unwrap();
        plan.operations[0].request.build(&http, arguments).map(|it| it.build().unwrap())
    }

    fn in_path(name: &str) -> Value {
        json!([{"name": name, "in": "path", "required": true, "schema": {}}])
    }

    #[test]
    fn a_key_reaches_the_query_as_it_is_whatever_is_in_it() {
        let key = "a&b#c%41 \u{fc}=+;?/'\"";
        let mut endpoint = tests_endpoint();
        endpoint.query.push(("a key&".into(), Secret::new(key.into()).unwrap()));
        let parameters = json!([{"name": "q", "in": "query", "schema": {"type": "string"}}]);
        let document = json!({"openapi": "3.1.0", "paths": {"/a": {"get": {
            "operationId": "a", "parameters": parameters}}}});
        let plan = Plan::of("shop", document.clone(), None, endpoint).unwrap();
        let http = crate::upstream::http::plain_client(Default::default(), &[]).unwrap();
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
        assert_eq!(of("a/b..c/..d").unwrap(), format!("{base}/a%2Fb..c%2F..d/x"));
        assert_eq!(of("a?b#c").unwrap(), format!("{base}/a%3Fb%23c/x"));
        assert_eq!(of("@evil.example:80").unwrap(), format!("{base}/%40evil.example%3A80/x"));
        assert_eq!(of("%2ea").unwrap(), format!("{base}/%252ea/x"));
        assert_eq!(of("a\\b\r\nX: y").unwrap(), format!("{base}/a%5Cb%0D%0AX%3A%20y/x"));
        assert_eq!(of("...").unwrap(), format!("{base}/.../x"));
        for climbing in [
            ".",
            "..",
            "",
            "../admin",
            "a/../../b",
            r"..\admin",
            "%2e%2e",
            "%252e%252e/b",
            "a/..;x",
        ] {
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
    fn no_argument_changes_the_host() {
        let all = json!([
            {"name": "p", "in": "path", "required": true, "schema": {}},
            {"name": "q", "in": "query", "schema": {}},
            {"name": "X-H", "in": "header", "schema": {}},
        ]);
        for evil in
            ["//evil.example/", "https://evil.example/", "@evil.example", "\\\\evil", "...;/x"]
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
            json!({"max_price": 5, "filter": {"maxPrice": 100}}),
            json!({"max_price": 5, "filter": {"max-price": 100}}),
            json!({"sorting": {"x": 1}, "filter": {"sorting.x": 2}}),
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
    fn no_argument_says_what_the_body_says() {
        let parameters = json!([{"name": "filter", "in": "query", "schema": {"type": "object"}}]);
        let amount = json!({"schema": {"properties": {"amount": {"type": "integer"}}}});
        for kind in ["application/json", "application/x-www-form-urlencoded"] {
            let document = json!({"openapi": "3.1.0", "paths": {"/pay": {"post": {
                "parameters": parameters, "requestBody": {"content": {kind: amount}}}}}});
            let plan = Plan::of("shop", document.clone(), None, tests_endpoint()).unwrap();
            let head =
                |arguments: Value| plan.operations[0].request.head(arguments.as_object().unwrap());
            head(json!({"body": {"amount": 5}, "filter": {"other": 1}})).unwrap();
            for name in ["amount", "Amount", "amount[]"] {
                let refused = head(json!({"body": {"amount": 5}, "filter": {name: 1_000_000}}));
                let refused = refused.unwrap_err();
                assert!(refused.contains("a part of the body"), "{kind}: {refused}");
            }
        }
    }

    #[test]
    fn what_the_document_has_in_both_is_said_in_both() {
        let in_query = |more: Value| {
            let mut parameter = json!({"name": "page", "in": "query", "schema": {
                "type": "object", "properties": {"size": {}, "limit": {}}}});
            parameter.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!([parameter])
        };
        for (more, page) in
            [(json!({"style": "deepObject"}), json!({"size": 5})), (json!({}), json!({"limit": 5}))]
        {
            let arguments = json!({"page": page, "body": {"page": 1, "limit": 7}});
            build("/a", &in_query(more), &arguments).unwrap();
        }
    }

    #[test]
    fn many_members_are_as_soon_refused_as_few() {
        let parameters = json!([{"name": "filter", "in": "query", "schema": {"type": "object"}}]);
        let many = |count: usize| -> Value {
            (0..count).map(|at| (format!("m{at}"), Value::from(1))).collect::<JsonObject>().into()
        };
        let arguments = json!({"filter": many(60_000), "body": many(60_000)});
        let refused = build("/a", &parameters, &arguments).unwrap_err();
        assert!(refused.contains("16384"), "{refused}");
        let arguments = json!({"filter": many(1_500), "body": {"other": many(60_000)}});
        build("/a", &parameters, &arguments).unwrap();
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
            Plan::of("shop", document.clone(), Some(&[format!("GET {path}")]), endpoint).map(drop)
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
        let plan = Plan::of("shop", document.clone(), None, endpoint).unwrap();
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
