//! The operations of a document that are tools.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use reqwest::Method;
use reqwest::header::COOKIE;
use rmcp::model::JsonObject;
use serde_json::{Map, Value, json};

use super::body::{self, Body};
use super::parameter::{Parameter, Read};
use super::request::Request;
use super::response::{Answers, Told};
use super::schema::Resolver;
use super::template::Path as Template;
use super::{ApiError, Refusal};
use crate::definition::{CompiledRoom, DefinitionError, Listed, TOOLS_MAX, Tool};
use crate::endpoint::Endpoint;

/// A larger document is a wrong file.
const DOCUMENT_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Parameters of an operation, and of a path. Each is held against all others.
const PARAMETERS_MAX: usize = 1_000;
/// An operation's description, in bytes.
const DESCRIPTION_BYTES_MAX: usize = 8 * 1024;
/// What is said of members that cannot be given, in bytes.
const LEFT_OUT_BYTES_MAX: usize = 1024;

/// The fields of a path item that are operations.
const METHODS: [(&str, Method); 8] = [
    ("get", Method::GET),
    ("put", Method::PUT),
    ("post", Method::POST),
    ("delete", Method::DELETE),
    ("options", Method::OPTIONS),
    ("head", Method::HEAD),
    ("patch", Method::PATCH),
    ("trace", Method::TRACE),
];

/// The operations of a document that are tools.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) endpoint: Endpoint,
    pub(crate) operations: Vec<Arc<Operation>>,
}

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) tool: Arc<Tool>,
    pub(crate) request: Request,
}

impl Plan {
    /// Reads a document. Of its operations those in `include` are taken, each
    /// by operationId or as `GET /path`, or all.
    ///
    /// # Errors
    /// [`ApiError`].
    pub fn read(
        server: &str,
        file: &Path,
        include: Option<&[String]>,
        endpoint: Endpoint,
    ) -> Result<Self, ApiError> {
        let unreadable = |source| ApiError::Read { file: file.to_owned(), source };
        let mut text = String::new();
        File::open(file)
            .and_then(|opened| opened.take(DOCUMENT_BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(unreadable)?;
        if text.len() as u64 > DOCUMENT_BYTES_MAX {
            let why = format!("it has more than {DOCUMENT_BYTES_MAX} bytes");
            return Err(unreadable(std::io::Error::other(why)));
        }
        let document = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| ApiError::NotJson { file: file.to_owned(), line: error.line() })?;
        Self::of(server, document, include, endpoint)
    }

    /// As [`Plan::read`], of a document that was read.
    ///
    /// # Errors
    /// [`ApiError`].
    pub fn of(
        server: &str,
        mut document: Value,
        include: Option<&[String]>,
        endpoint: Endpoint,
    ) -> Result<Self, ApiError> {
        if endpoint.url.query().is_some() {
            return Err(ApiError::BaseQuery);
        }
        // A tool is the same whatever order the document has: its definition is approved.
        document.sort_all_objects();
        let document = &document;
        let version = document.get("openapi").and_then(Value::as_str).unwrap_or_default();
        let is_3_0 = version.starts_with("3.0");
        if !is_3_0 && !version.starts_with("3.1") {
            let said = document.get("openapi").or_else(|| document.get("swagger"));
            let version = said.and_then(Value::as_str).map(|it| crate::cut(it, 32));
            return Err(ApiError::Version { version });
        }
        let mut resolver = Resolver::new(document, is_3_0);
        let mut listed = listed(server, document, &resolver);
        if let Some(include) = include {
            let missing = include.iter().find(|name| !listed.iter().any(|it| it.is(name)));
            if let Some(name) = missing {
                return Err(ApiError::NoOperation { name: crate::cut(name, 128) });
            }
            listed.retain(|it| include.iter().any(|name| it.is(name)));
        }
        if listed.len() > TOOLS_MAX {
            return Err(ApiError::TooMany { got: listed.len() });
        }
        let mut told = Told::new(document, is_3_0);
        let mut operations: BTreeMap<String, Arc<Operation>> = BTreeMap::new();
        let mut keys: BTreeMap<Key<'_>, usize> = BTreeMap::new();
        for it in listed {
            let made = it.compile(server, &endpoint, &mut resolver, &mut told);
            let made = made.and_then(|made| match operations.contains_key(&it.name()) {
                false => Ok(made),
                true => Err(Refusal::Twice),
            });
            match made {
                Ok(made) => {
                    operations.insert(it.name(), Arc::new(made));
                    if let Some(key) = it.missing_key(document, &endpoint, &resolver) {
                        *keys.entry(key).or_default() += 1;
                    }
                }
                Err(Refusal::Spent) => return Err(ApiError::TooLarge),
                Err(why) if include.is_some() => {
                    return Err(ApiError::Operation { operation: it.shown(), why });
                }
                Err(why) => {
                    let (operation, why) = (it.shown(), why.to_string());
                    tracing::warn!(server, ?operation, ?why, "operation left out");
                }
            }
        }
        if operations.is_empty() {
            return Err(ApiError::Empty);
        }
        for ((place, key), operations) in keys {
            let key = crate::cut(key, 128);
            let put = match place {
                "cookie" => "as the header `Cookie`, with a `prefix` of its name and `=`",
                _ => "under `credentials`, by its name",
            };
            tracing::warn!(server, place, ?key, operations, "operations want a key: put it {put}");
        }
        let mut operations: Vec<Arc<Operation>> = operations.into_values().collect();
        operations.sort_by(|a, b| a.tool.name().cmp(b.tool.name()));
        Ok(Self { endpoint, operations })
    }
}

/// A key that operations want: where, and its name there.
type Key<'a> = (&'static str, &'a str);

/// An operation as it stands in the document.
struct Entry<'a> {
    path: &'a str,
    method: Method,
    item: &'a Map<String, Value>,
    operation: &'a Map<String, Value>,
}

/// All operations, in the order of the document's paths.
fn listed<'a>(server: &str, document: &'a Value, resolver: &Resolver<'a>) -> Vec<Entry<'a>> {
    let mut listed = Vec::new();
    let paths = document.get("paths").and_then(Value::as_object);
    for (path, item) in paths.into_iter().flatten() {
        let Some(own) = item.as_object() else { continue };
        // What operations beside a reference mean, the standard does not say.
        let is_reference =
            own.contains_key("$ref") && METHODS.iter().all(|(key, _)| !own.contains_key(*key));
        let item = match is_reference.then(|| resolver.object(item)) {
            None => own,
            Some(Ok(item)) => item,
            Some(Err(why)) => {
                let (path, why) = (crate::cut(path, 256), why.to_string());
                tracing::warn!(server, ?path, ?why, "path left out");
                continue;
            }
        };
        for (key, method) in METHODS {
            if let Some(operation) = item.get(key).and_then(Value::as_object) {
                listed.push(Entry { path, method, item, operation });
            }
        }
    }
    listed
}

impl<'a> Entry<'a> {
    fn text(&self, key: &str) -> Option<&str> {
        self.operation.get(key).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    /// Method and path.
    fn shown(&self) -> String {
        crate::cut(&format!("{} {}", self.method, self.path), 256)
    }

    fn is(&self, name: &str) -> bool {
        self.text("operationId") == Some(name)
            || name.split_once(' ').is_some_and(|(method, path)| {
                method.eq_ignore_ascii_case(self.method.as_str()) && path == self.path
            })
    }

    /// The tool's own name.
    fn name(&self) -> String {
        if let Some(id) = self.text("operationId") {
            return id.to_owned();
        }
        let mut name = self.method.as_str().to_ascii_lowercase();
        for word in self.path.split(|c: char| !c.is_ascii_alphanumeric()) {
            if !word.is_empty() {
                name.push('_');
                name.push_str(word);
            }
        }
        name
    }

    /// What it is for, and, as advice to whoever decides on its effect, what
    /// its method says.
    fn description(&self) -> String {
        let mut description = String::new();
        for key in ["summary", "description"] {
            if let Some(text) = self.text(key) {
                description.push_str(text.trim());
                description.push_str("\n\n");
            }
        }
        let mut description = crate::cut(&description, DESCRIPTION_BYTES_MAX);
        description.push_str(&self.shown());
        if matches!(self.method, Method::GET | Method::HEAD) {
            description.push_str(" (by its method, it only reads)");
        }
        description
    }

    /// A key in the query or in a cookie that it cannot be called without, as the
    /// document says, and that the operator gave none for.
    fn missing_key(
        &self,
        document: &'a Value,
        endpoint: &Endpoint,
        resolver: &Resolver<'a>,
    ) -> Option<Key<'a>> {
        let schemes = document.get("components")?.get("securitySchemes")?;
        let key = |scheme: &str| {
            let scheme = resolver.object(schemes.get(scheme)?).ok()?;
            let text = |key: &str| scheme.get(key).and_then(Value::as_str);
            let name = text("name").filter(|_| text("type") == Some("apiKey"))?;
            match text("in")? {
                "query" if endpoint.query.iter().all(|(it, _)| it != name) => Some(("query", name)),
                "cookie" if endpoint.headers.iter().all(|(it, _)| it != COOKIE) => {
                    Some(("cookie", name))
                }
                _ => None,
            }
        };
        let ways = self.operation.get("security").or_else(|| document.get("security"))?;
        let mut found = None;
        for way in ways.as_array()? {
            // One without is enough.
            found = Some(way.as_object()?.keys().find_map(|scheme| key(scheme))?);
        }
        found
    }

    /// Says that a part of it is not among its arguments.
    fn warn_of(&self, server: &str, why: &str) {
        let operation = self.shown();
        tracing::warn!(server, ?operation, ?why, "left out of an operation");
    }

    fn compile(
        &self,
        server: &str,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
        told: &mut Told<'a>,
    ) -> Result<Operation, Refusal> {
        if self.item.contains_key("$ref") {
            let why = "its path has a `$ref` beside operations, and the standard does not say what that means";
            return Err(Refusal::Unsupported(why.into()));
        }
        if [self.operation, self.item].iter().any(|level| level.contains_key("servers")) {
            self.warn_of(server, "its own `servers`: it is asked at `base_url` as all others are");
        }
        let (mut parameters, schemas) = self.parameters(server, endpoint, resolver)?;
        let (body, unsaid) = self.body(server, endpoint, resolver)?;
        name_apart(&mut parameters);
        let (body, of_body) = body.unzip();
        let of_body = body.as_ref().zip(of_body);
        let input_schema = self.input_schema(server, &parameters, schemas, of_body)?;
        let answers = Answers::of(self.operation, resolver);
        let tool = self.tool(server, &unsaid, input_schema, told.schema(&answers))?;
        let path = Template::parse(self.path, &parameters)?;
        let (method, accept) = (self.method.clone(), answers.accept());
        let request = Request::new(method, endpoint, path, parameters, body, accept)?;
        Ok(Operation { tool: Arc::new(tool), request })
    }

    /// Its parameters as they are written, an operation's own in the place of its
    /// path's.
    fn given(&self, resolver: &Resolver<'a>) -> Result<Vec<&'a Map<String, Value>>, Refusal> {
        let mut given = Vec::new();
        let mut known = BTreeSet::new();
        for level in [self.operation, self.item] {
            let Some(list) = level.get("parameters") else { continue };
            let list = list.as_array().ok_or(Refusal::Malformed("`parameters`"))?;
            if list.len() > PARAMETERS_MAX {
                let why = format!("it has too many parameters, more than {PARAMETERS_MAX}");
                return Err(Refusal::Unsupported(why));
            }
            for parameter in list {
                let parameter = resolver.object(parameter)?;
                let text = |key| parameter.get(key).and_then(Value::as_str).unwrap_or_default();
                let id = match text("in") {
                    "header" => (text("name").to_ascii_lowercase(), "header"),
                    place => (text("name").to_owned(), place),
                };
                if known.insert(id) {
                    given.push(parameter);
                }
            }
        }
        Ok(given)
    }

    /// Those that are arguments, and their schemas.
    fn parameters(
        &self,
        server: &str,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
    ) -> Result<(Vec<Parameter>, Vec<Value>), Refusal> {
        let (mut parameters, mut schemas) = (Vec::new(), Vec::new());
        for parameter in self.given(resolver)? {
            match Parameter::read(parameter, endpoint, resolver)? {
                Read::Argument(parameter, schema) => {
                    parameters.push(parameter);
                    schemas.push(schema);
                }
                Read::LeftOut(why) => self.warn_of(server, &why),
                Read::Set => {}
            }
        }
        Ok((parameters, schemas))
    }

    /// Its body and the schema of that, if there is one that can be given, and what
    /// whoever reads the description reads of what cannot be.
    fn body(
        &self,
        server: &str,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
    ) -> Result<(Option<(Body, Value)>, String), Refusal> {
        let Some(body) = self.operation.get("requestBody") else {
            return Ok((None, String::new()));
        };
        Ok(match Body::read(resolver.object(body)?, endpoint, resolver)? {
            body::Read::Argument(body, schema, left_out) => {
                let mut unsaid = String::new();
                if !left_out.is_empty() {
                    let names = crate::cut(&left_out.join(", "), LEFT_OUT_BYTES_MAX);
                    self.warn_of(server, &format!("members of its form: {names}"));
                    unsaid = format!("\n\nOf its body these cannot be given here: {names}.");
                }
                (Some((body, schema)), unsaid)
            }
            body::Read::Nothing => (None, String::new()),
            body::Read::LeftOut => {
                self.warn_of(server, "its body is neither JSON nor a plain form");
                (None, "\n\nIts body cannot be given here.".to_owned())
            }
        })
    }

    /// The schema of its arguments, by the keys that they have.
    fn input_schema(
        &self,
        server: &str,
        parameters: &[Parameter],
        schemas: Vec<Value>,
        body: Option<(&Body, Value)>,
    ) -> Result<JsonObject, Refusal> {
        let mut properties = Map::new();
        let mut required = Vec::new();
        let mut left_out = Vec::new();
        for (parameter, schema) in parameters.iter().zip(schemas) {
            match parameter.unwritable(&schema) {
                Some(why) if parameter.required => return Err(Refusal::Unsupported(why)),
                Some(why) => {
                    self.warn_of(server, &why);
                    left_out.push(&parameter.key);
                }
                None => {}
            }
            if properties.insert(parameter.key.clone(), schema).is_some() {
                let why = format!("two arguments would be called {:?}", parameter.key);
                return Err(Refusal::Unsupported(crate::cut(&why, 256)));
            }
            if parameter.required {
                required.push(Value::String(parameter.key.clone()));
            }
        }
        // What nobody can give keeps its name all the same: no other argument has it.
        properties.retain(|key, _| !left_out.contains(&key));
        if let Some((body, schema)) = body {
            properties.insert("body".into(), schema);
            if body.required {
                required.push("body".into());
            }
        }
        let input_schema = json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        });
        match input_schema {
            Value::Object(input_schema) => Ok(input_schema),
            _ => Err(Refusal::Malformed("its schema")),
        }
    }

    /// The tool itself, without the schema of its answers where there is no room
    /// for both.
    fn tool(
        &self,
        server: &str,
        unsaid: &str,
        input_schema: JsonObject,
        answers: Option<JsonObject>,
    ) -> Result<Tool, Refusal> {
        let made = |output_schema| {
            let (name, description) = (self.name(), Some(self.description() + unsaid));
            let input_schema = input_schema.clone();
            let listed = Listed { name, description, input_schema, output_schema };
            Tool::unheld(&mut CompiledRoom::new(usize::MAX), server, listed)
        };
        let made = match made(answers) {
            Err(DefinitionError::TooLarge { .. }) => made(None),
            made => made,
        };
        made.map_err(Refusal::Definition)
    }
}

/// A name that stands in several places gets its place in front.
fn name_apart(parameters: &mut [Parameter]) {
    let names: Vec<String> = parameters.iter().map(|it| it.name.clone()).collect();
    for parameter in parameters {
        let twice = names.iter().filter(|name| **name == parameter.name).count() > 1;
        if twice || parameter.name == "body" {
            parameter.key = format!("{}_{}", parameter.place.as_str(), parameter.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests_endpoint as endpoint;
    use super::*;

    fn plan(document: &Value, include: &[&str]) -> Result<Plan, ApiError> {
        let include: Vec<String> = include.iter().map(|&name| name.to_owned()).collect();
        let include = (!include.is_empty()).then_some(include.as_slice());
        Plan::of("shop", document.clone(), include, endpoint())
    }

    fn document(paths: Value) -> Value {
        json!({"openapi": "3.1.0", "info": {}, "paths": paths, "components": {"schemas": {
            "Part": {"type": "object", "properties": {"id": {"type": "integer", "readOnly": true},
                     "name": {"type": "string"}}, "required": ["id", "name"]},
            "Tree": {"type": "object", "properties": {"up": {"$ref": "#/components/schemas/Tree"}}},
        }}})
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.operations.iter().map(|it| it.tool.name().as_str()).collect()
    }

    fn schema(plan: &Plan, at: usize) -> Value {
        serde_json::from_str(&plan.operations[at].tool.spec().input_schema).unwrap()
    }

    #[test]
    fn each_operation_is_a_tool_named_and_described_by_the_document() {
        let document = document(json!({
            "/parts/{id}": {
                "parameters": [{"name": "id", "in": "path", "required": true,
                                "schema": {"type": "integer"}}],
                "get": {"operationId": "getPart", "summary": "One part.", "parameters": [
                    {"name": "id", "in": "query", "schema": {"type": "string"}}]},
                "put": {"requestBody": {"required": true, "content": {"application/json": {
                    "schema": {"$ref": "#/components/schemas/Part"}}}}},
            },
        }));
        let plan = plan(&document, &[]).unwrap();
        assert_eq!(names(&plan), ["shop.getPart", "shop.put_parts_id"]);
        let get = schema(&plan, 0);
        assert_eq!(get["required"], json!(["path_id"]));
        assert_eq!(get["properties"]["query_id"]["type"], "string");
        assert_eq!(get["additionalProperties"], false);
        let description = &plan.operations[0].tool.spec().description;
        assert!(description.starts_with("One part.\n\nGET /parts/{id}"), "{description}");
        assert!(description.contains("only reads"), "{description}");
        assert!(!plan.operations[1].tool.spec().description.contains("only reads"));
        let body = &schema(&plan, 1)["properties"]["body"];
        assert_eq!(body["required"], json!(["name"]), "what only the server sets is not asked for");
        assert!(body["properties"].get("id").is_none());
    }

    #[test]
    fn a_document_in_another_order_has_the_same_tools() {
        // With two kinds of JSON to choose from, an operation under a name twice, and
        // members that are only told of in the description.
        let read = |text: &str| {
            let read = plan(&serde_json::from_str(text).unwrap(), &[]).unwrap();
            read.operations.iter().map(|it| it.tool.sha256()).collect::<Vec<_>>()
        };
        let one = r#"{"openapi": "3.1.0", "paths": {
            "/a": {"post": {"operationId": "a", "requestBody": {"content": {
                "application/vnd.a+json": {"schema": {"title": "a"}},
                "application/vnd.b+json": {"schema": {"title": "b"}}}}}},
            "/b": {"post": {"operationId": "a"}},
            "/f": {"post": {"operationId": "f", "requestBody": {"content": {
                "application/x-www-form-urlencoded": {"schema": {"properties": {
                    "p": {"items": {"type": "object"}}, "q": {"items": {"type": "object"}},
                    "r": {"type": "string"}}}}}}}}}}"#;
        let other = r#"{"paths": {
            "/f": {"post": {"requestBody": {"content": {
                "application/x-www-form-urlencoded": {"schema": {"properties": {
                    "r": {"type": "string"}, "q": {"items": {"type": "object"}},
                    "p": {"items": {"type": "object"}}}}}}}, "operationId": "f"}},
            "/b": {"post": {"operationId": "a"}},
            "/a": {"post": {"requestBody": {"content": {
                "application/vnd.b+json": {"schema": {"title": "b"}},
                "application/vnd.a+json": {"schema": {"title": "a"}}}}, "operationId": "a"}}},
            "openapi": "3.1.0"}"#;
        assert_eq!(read(one).len(), 2);
        assert_eq!(read(one), read(other));
    }

    #[test]
    fn include_chooses_by_id_and_by_method_and_path_and_refuses_what_is_not_there() {
        let document = document(json!({
            "/a": {"get": {"operationId": "a"}, "post": {}}, "/b": {"get": {"operationId": "b"}},
        }));
        assert_eq!(names(&plan(&document, &["a", "POST /a"]).unwrap()), ["shop.a", "shop.post_a"]);
        let refused = plan(&document, &["a", "c"]).unwrap_err();
        assert!(matches!(&refused, ApiError::NoOperation { name } if name == "c"), "{refused}");
        assert_eq!(refused.field(), "include");
    }

    #[test]
    fn references_that_are_remote_dangling_or_cyclic_are_refused_with_the_reason() {
        let with = |reference: &str| {
            document(json!({"/a": {"post": {"operationId": "a", "requestBody": {"content": {
                "application/json": {"schema": {"$ref": reference}}}}}}}))
        };
        for (reference, expected) in [
            ("https://evil.example/s.json", "not in this document"),
            ("other.json#/a", "not in this document"),
            ("#/components/schemas/None", "not there"),
            ("#/components/schemas/Tree", "refers to itself"),
        ] {
            let refused = plan(&with(reference), &["a"]).unwrap_err().to_string();
            assert!(refused.contains("POST /a") && refused.contains(expected), "{refused}");
            // Not asked for by name, it is left out, and nothing is left.
            assert!(matches!(plan(&with(reference), &[]), Err(ApiError::Empty)));
        }
    }

    #[test]
    fn what_cannot_be_carried_out_as_described_is_refused() {
        let parameter = |parameter: Value| {
            document(json!({"/a/{x}": {"get": {"operationId": "a", "parameters": [
                {"name": "x", "in": "path", "required": true, "schema": {}}, parameter]}}}))
        };
        let cases = [
            (
                parameter(json!({"name": "c", "in": "cookie", "required": true, "schema": {}})),
                "cookie",
            ),
            (
                parameter(
                    json!({"name": "Upgrade", "in": "header", "required": true, "schema": {}}),
                ),
                "Upgrade",
            ),
            (
                parameter(json!({"name": "a b", "in": "header", "required": true, "schema": {}})),
                "header",
            ),
            (parameter(json!({"name": "y", "in": "path", "required": true, "schema": {}})), "path"),
            (
                parameter(json!({"name": "q", "in": "query", "required": true,
                                 "style": "odd", "schema": {}})),
                "style",
            ),
            (parameter(json!({"$ref": "#/components/parameters/None"})), "not there"),
            (document(json!({"/a/{x}": {"get": {"operationId": "a"}}})), "{x}"),
            (document(json!({"/a?x=1#b": {"get": {"operationId": "a"}}})), "path"),
            (document(json!({"/../a": {"get": {"operationId": "a"}}})), "path"),
            (document(json!({"//evil.example/a": {"get": {"operationId": "a"}}})), "path"),
            (
                document(
                    json!({"/a": {"post": {"operationId": "a", "requestBody": {"required": true,
                "content": {"multipart/form-data": {"schema": {}}}}}}}),
                ),
                "JSON",
            ),
            (
                document(
                    json!({"/a": {"post": {"operationId": "a", "requestBody": {"required": true,
                "content": {"application/json": {"schema": {"$dynamicRef": "#x"}}}}}}}),
                ),
                "$dynamicRef",
            ),
        ];
        for (document, expected) in cases {
            let refused = plan(&document, &["a"]).unwrap_err().to_string();
            assert!(refused.contains(expected), "{expected}: {refused}");
        }
    }

    #[test]
    fn a_header_that_is_on_every_request_costs_no_operation() {
        for name in ["Host", "Content-Length", "accept-encoding", "Accept"] {
            let given = json!({"name": name, "in": "header", "required": true, "schema": {}});
            let paths = json!({"/a": {"get": {"operationId": "a", "parameters": [given]}}});
            let plan = plan(&document(paths), &["a"]).unwrap();
            let schema = &plan.operations[0].tool.spec().input_schema;
            assert!(!schema.to_lowercase().contains(&name.to_lowercase()), "{schema}");
        }
    }

    #[test]
    fn a_parameter_that_no_argument_can_be_written_as_is_not_listed() {
        let object = json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let given = |name: &str, place: &str, extra: Value| {
            let mut parameter = json!({"name": name, "in": place, "schema": object});
            parameter.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            parameter
        };
        let of = |parameters: &[Value]| {
            plan(
                &document(json!({"/a": {"get": {"operationId": "a", "parameters": parameters}}})),
                &["a"],
            )
        };
        let list = json!({"schema": {"type": "array", "items": object}});
        let nullable = json!({"explode": false, "schema": {"type": ["object", "null"]}});
        let cannot = [
            given("joined", "query", json!({"explode": false})),
            given("piped", "query", json!({"style": "pipeDelimited"})),
            given("untyped", "header", json!({"schema": {"properties": {}}})),
            given("either", "header", json!({"schema": {"anyOf": [object, {"enum": [{}]}]}})),
            given("X-H", "header", json!({})),
            given("list", "query", list),
            given("nullable", "query", nullable),
            given(
                "no_object",
                "query",
                json!({"style": "deepObject", "schema": {"type": "string"}}),
            ),
        ];
        let can = [
            given("deep", "query", json!({"style": "deepObject"})),
            given("exploded", "query", json!({})),
            given("free", "query", json!({"explode": false, "schema": {}})),
            given(
                "json",
                "query",
                json!({"schema": null, "content": {"application/json": {"schema": object}}}),
            ),
            given("some", "header", json!({"schema": {"oneOf": [object, {"type": "string"}]}})),
        ];
        let plan = of(&[cannot.as_slice(), can.as_slice()].concat()).unwrap();
        let schema = schema(&plan, 0);
        let listed: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(listed, ["deep", "exploded", "free", "json", "some"]);
        for mut parameter in cannot {
            parameter["required"] = true.into();
            let refused = of(std::slice::from_ref(&parameter)).unwrap_err().to_string();
            let name = parameter["name"].as_str().unwrap();
            assert!(refused.contains(name) && refused.contains("cannot be written"), "{refused}");
        }
    }

    #[test]
    fn an_object_that_must_have_what_no_query_can_hold_is_not_listed() {
        let inner = json!({"type": "object"});
        let object = |required: Value| {
            json!({"type": "object", "properties": {"a": {"type": "string"}, "in": inner,
                   "list": {"type": "array"}}, "required": required})
        };
        let both = json!({"allOf": [{"properties": {"in": inner}}, {"required": ["in"]}]});
        let cannot = [
            object(json!(["in"])),
            object(json!(["a", "list"])),
            json!({"type": "object", "allOf": [both]}),
            json!({"type": "object", "oneOf": [object(json!(["in"])), object(json!(["list"]))]}),
        ];
        let can = [
            object(json!(["a"])),
            object(json!([])),
            json!({"anyOf": [object(json!(["in"])), object(json!(["a"]))]}),
        ];
        for style in ["form", "deepObject"] {
            let of = |schema: &Value, required: bool| {
                let parameter = json!({"name": "p", "in": "query", "style": style,
                                       "explode": true, "required": required, "schema": schema});
                let get = json!({"operationId": "a", "parameters": [parameter]});
                plan(&document(json!({"/a": {"get": get}})), &["a"])
            };
            for schema in &cannot {
                let plan = of(schema, false).unwrap();
                assert_eq!(self::schema(&plan, 0)["properties"], json!({}), "{style} {schema}");
                let refused = of(schema, true).unwrap_err().to_string();
                assert!(refused.contains("cannot be written"), "{refused}");
            }
            for schema in &can {
                assert!(self::schema(&of(schema, true).unwrap(), 0)["properties"]["p"].is_object());
            }
        }
    }

    #[test]
    fn an_optional_parameter_that_is_not_written_here_leaves_the_operation() {
        let content = json!({"application/xml": {"schema": {}}});
        let parameters = json!([
            {"name": "odd", "in": "query", "style": "odd", "schema": {}},
            {"name": "xml", "in": "query", "content": content},
            {"name": "plain", "in": "query", "schema": {}}
        ]);
        let get = json!({"operationId": "a", "parameters": parameters});
        let plan = plan(&document(json!({"/a": {"get": get}})), &["a"]).unwrap();
        let properties = &schema(&plan, 0)["properties"];
        assert_eq!(properties.as_object().unwrap().keys().collect::<Vec<_>>(), ["plain"]);
    }

    #[test]
    fn an_operation_of_very_many_parameters_is_not_listed() {
        let of = |count: usize| {
            let parameters: Vec<Value> = (0..count)
                .map(|at| json!({"name": format!("p{at}"), "in": "query", "schema": {}}))
                .collect();
            let get = json!({"operationId": "a", "parameters": parameters});
            plan(&document(json!({"/a": {"get": get}})), &["a"]).map(|it| it.operations.len())
        };
        assert_eq!(of(PARAMETERS_MAX).unwrap(), 1);
        let refused = of(PARAMETERS_MAX + 1).unwrap_err().to_string();
        assert!(refused.contains("too many parameters"), "{refused}");
    }

    #[test]
    fn a_path_that_is_a_reference_is_what_it_refers_to() {
        let mut document = document(json!({
            "/a": {"$ref": "#/components/pathItems/A"},
            "/b": {"$ref": "elsewhere.json#/b"},
            "/c": {"$ref": "#/components/pathItems/A", "get": {"operationId": "c"}},
        }));
        document["components"]["pathItems"] = json!({"A": {"get": {"operationId": "a"}}});
        assert_eq!(names(&plan(&document, &[]).unwrap()), ["shop.a"]);
    }

    #[test]
    fn a_header_has_one_name_in_whatever_letters() {
        let header = |name: &str| json!({"name": name, "in": "header", "schema": {}});
        let document = document(json!({"/a": {
            "parameters": [header("X-Trace"), header("X-More")],
            "get": {"operationId": "a", "parameters": [header("x-trace")]}}}));
        let schema = schema(&plan(&document, &["a"]).unwrap(), 0);
        let listed: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(listed, ["X-More", "x-trace"]);
    }

    #[test]
    fn a_tool_tells_the_schema_of_its_answer_and_is_held_to_nothing() {
        let part = json!({"$ref": "#/components/schemas/Part"});
        let document = document(json!({"/a": {"get": {"operationId": "a", "responses": {
            "200": {"content": {"application/json": {"schema": part}}}}}}}));
        let plan = plan(&document, &["a"]).unwrap();
        let tool = &plan.operations[0].tool;
        let told: Value =
            serde_json::from_str(tool.spec().output_schema.as_ref().unwrap()).unwrap();
        assert_eq!(told["required"], json!(["id", "name"]), "what the server sets it answers with");
        for other in [json!({"name": 7}), json!([]), Value::Null, json!("an error page")] {
            assert_eq!(tool.check_result(&other), Ok(()));
        }
    }

    #[test]
    fn an_answers_schema_takes_no_room_from_its_tool() {
        // Nearly all that a definition may have.
        let input = json!({"description": "x".repeat(255 * 1024)});
        let told = json!({"description": "x".repeat(8 * 1024)});
        let json = |schema: &Value| json!({"application/json": {"schema": schema}});
        let document = document(json!({"/a": {"post": {
            "operationId": "a",
            "requestBody": {"content": json(&input)},
            "responses": {"200": {"content": json(&told)}}}}}));
        let plan = plan(&document, &["a"]).unwrap();
        assert_eq!(plan.operations[0].tool.spec().output_schema, None);
    }

    #[test]
    fn a_key_is_wanted_where_no_way_goes_without_and_none_is_given() {
        let mut document = document(json!({}));
        let scheme = |place: &str| json!({"type": "apiKey", "in": place, "name": "api_key"});
        document["components"]["securitySchemes"] = json!({"query": scheme("query"), "header": scheme("header"), "cookie": scheme("cookie")});
        document["security"] = json!([{"query": []}]);
        let resolver = Resolver::new(&document, false);
        let (item, path) = (Map::new(), "/a");
        let secret = || crate::secret::Secret::new("a-credential".into()).unwrap();
        let mut given = endpoint();
        given.query.push(("api_key".into(), secret()));
        given.headers.push((COOKIE, secret()));
        for (security, wanted) in [
            (None, Some(("query", "api_key"))),
            (Some(json!([{"header": [], "query": []}])), Some(("query", "api_key"))),
            (Some(json!([{"cookie": []}])), Some(("cookie", "api_key"))),
            (Some(json!([{"header": []}, {"query": []}])), None),
            (Some(json!([{}, {"query": []}])), None),
            (Some(json!([])), None),
            (Some(json!([{"unknown": []}])), None),
            (Some(json!("query")), None),
        ] {
            let mut operation = Map::new();
            operation.extend(security.map(|it| ("security".to_owned(), it)));
            let operation: &'static Map<String, Value> = Box::leak(Box::new(operation));
            let entry = Entry { path, method: Method::GET, item: &item, operation };
            let missing = |given: &Endpoint| entry.missing_key(&document, given, &resolver);
            assert_eq!(missing(&endpoint()), wanted, "{operation:?}");
            assert_eq!(missing(&given), None, "{operation:?}");
        }
    }

    #[test]
    fn a_schema_that_grows_without_end_is_refused_and_takes_no_memory() {
        // Each level refers to the one below ten times: 10^12 nodes.
        let mut schemas = Map::new();
        schemas.insert("L0".into(), json!({"type": "string"}));
        for level in 1..=12 {
            let below = json!({"$ref": format!("#/components/schemas/L{}", level - 1)});
            schemas.insert(format!("L{level}"), json!({"allOf": vec![below; 10]}));
        }
        let mut document = document(json!({"/a": {"post": {"operationId": "a", "requestBody": {
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/L12"}}}}}}}));
        document["components"]["schemas"] = Value::Object(schemas);
        let refused = plan(&document, &["a"]).unwrap_err();
        assert!(matches!(refused, ApiError::Operation { why: Refusal::TooLarge, .. }), "{refused}");
        let mut deep = json!({"type": "string"});
        for _ in 0..100 {
            deep = json!({"items": deep});
        }
        document["components"]["schemas"] = json!({"L12": deep});
        assert!(matches!(plan(&document, &["a"]), Err(ApiError::Operation { .. })));
    }

    #[test]
    fn documents_that_are_none_are_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let file = folder.path().join("api");
            std::fs::write(&file, text).unwrap();
            Plan::read("shop", &file, None, endpoint()).unwrap_err().to_string()
        };
        assert!(read("openapi: 3.0.0\npaths: {}\n").contains("YAML"));
        assert!(read(r#"{"swagger": "2.0"}"#).contains("Swagger"));
        assert!(read(r#"{"openapi": "4.0.0"}"#).contains("3.0 or 3.1"));
        assert!(read(r#"{"openapi": "3.0.3", "paths": []}"#).contains("no operation"));
        // As some editors begin a file.
        assert!(read("\u{feff}{\"openapi\": \"4.0.0\"}").contains("3.0 or 3.1"));
        let missing = Plan::read("shop", Path::new("/nonexistent/x.json"), None, endpoint());
        assert!(missing.unwrap_err().to_string().contains("/nonexistent/x.json"));
    }

    #[test]
    fn too_many_operations_are_refused_until_some_are_chosen() {
        let paths: Map<String, Value> =
            (0..=TOOLS_MAX).map(|at| (format!("/p{at}"), json!({"get": {}}))).collect();
        let document = document(Value::Object(paths));
        assert!(matches!(plan(&document, &[]), Err(ApiError::TooMany { got: 2_001 })));
        assert_eq!(names(&plan(&document, &["GET /p7"]).unwrap()), ["shop.get_p7"]);
    }

    #[test]
    fn two_operations_of_one_name_are_not_one_tool() {
        let document = document(json!({
            "/a": {"get": {"operationId": "same"}}, "/b": {"get": {"operationId": "same"}},
        }));
        assert!(matches!(
            plan(&document, &["same"]),
            Err(ApiError::Operation { why: Refusal::Twice, .. })
        ));
    }
}
