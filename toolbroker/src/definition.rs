//! One tool as its server describes it: the digest a grant pins, and the
//! schema its arguments are held against.
//!
//! A description is untrusted text and a schema untrusted JSON. What cannot
//! be checked is not offered: a name that is none, a schema that does not
//! compile, refers to anything outside itself, or costs too much
//! ([`crate::schema::cost`]).
//!
//! # The digest
//! SHA-256 over `forge tool definition v1`, a zero byte, and the canonical
//! JSON of an object with the members `name` (`<server>.<tool>`),
//! `description`, `inputSchema` and `outputSchema`; a member the server does
//! not give is left out. Canonical means: UTF-8; no white space; members
//! sorted by the bytes of their names, at every depth; strings escaped only
//! where JSON demands it (`\"`, `\\`, `\b`, `\f`, `\n`, `\r`, `\t`, `\u00xx`
//! in lower-case hex for other control characters); integers in decimal,
//! other numbers in the shortest form that reads back the same.

pub use forge_protocol::broker::Effect;
use forge_protocol::broker::ToolSpec;
use forge_protocol::name::{NameError, ToolName};
use jsonschema::{Draft, PatternOptions, Validator};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::schema::cost::{Cost, Plan, compiled_places_bytes_max};
use crate::schema::pattern_cost::{
    PATTERN_BYTES_MAX, compiled_bytes_max, patterns, translation_bytes_max,
};
use crate::schema::pattern_read::read_as_javascript;
use crate::schema::read::{Of, as_meant};
pub use crate::schema::violation::Violations;

/// Tools of one server.
pub(crate) const TOOLS_MAX: usize = 2_000;
/// One tool's description and schemas together, in bytes of canonical JSON.
const DEFINITION_BYTES_MAX: usize = 256 * 1024;
/// A server's own annotations of one tool, in bytes; more is cut.
const ADVICE_BYTES_MAX: usize = 1024;
/// Why a schema does not compile, in bytes; more is cut.
const REASON_BYTES_MAX: usize = 512;
/// What one compiled schema may take without its patterns, in bytes: of 30,000
/// parts, or fewer with long names above them.
const SCHEMA_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How often a pattern of a schema may step back on one string.
const PATTERN_BACKTRACK_MAX: usize = 100_000;
/// What one engine of a compiled pattern may take, in bytes: what
/// `^.{0,1000}$` takes.
const PATTERN_ENGINE_BYTES_MAX: usize = 1408 * 1024;
/// A pattern counts with the first of these that is enough for each of its
/// engines.
const PATTERN_ENGINE_BYTES: [usize; 4] =
    [4 * 1024, 32 * 1024, 256 * 1024, PATTERN_ENGINE_BYTES_MAX];
/// Members of one schema's data that are called as patterns are and are none.
/// Each is tried in every size.
const NONES_MAX: usize = 16;

/// A tool that can be granted and called.
#[derive(Debug)]
pub struct Tool {
    spec: ToolSpec,
    advice: Option<String>,
    arguments: Schema,
    result: Option<Schema>,
}

/// A schema that was compiled, and what it may cost.
#[derive(Debug)]
struct Schema {
    validator: Validator,
    cost: Cost,
    /// The same as it is written, where less is asked: what fits that is good, whatever a
    /// reference makes of the other.
    as_written: Option<Box<Self>>,
}

/// Room for what is compiled of all tools that one stranger offers, patterns and
/// schemas, so that what they take together is bounded and not each alone.
#[derive(Debug)]
pub struct CompiledRoom {
    bytes: usize,
    /// What may still be compiled to see what it takes, whatever comes of it.
    tried_bytes: usize,
}

/// How often its room a stranger's patterns may take, one after the other, to see
/// what each takes.
const TRIES: usize = 8;

impl CompiledRoom {
    /// Room of so many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let tried_bytes = bytes.saturating_mul(TRIES).max(PATTERN_BYTES_MAX);
        Self { bytes, tried_bytes }
    }

    /// Takes what one try takes.
    fn try_bytes(&mut self, bytes: usize) -> Result<(), String> {
        let left = self.tried_bytes.checked_sub(bytes);
        self.tried_bytes = left
            .ok_or("it takes too much to look at its patterns and those of the tools beside it")?;
        Ok(())
    }
}

/// Why a tool that a server lists is not offered.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// Its name cannot be a tool name.
    #[error("its name cannot be used: {0}")]
    Name(NameError),
    /// Its definition is too large.
    #[error("its definition has {got} bytes, the limit is {DEFINITION_BYTES_MAX}")]
    TooLarge {
        /// Its size in canonical JSON.
        got: usize,
    },
    /// Its input schema is no JSON Schema, or refers to something outside.
    #[error("its inputSchema does not compile: {0}")]
    Schema(String),
    /// Its output schema is none, likewise.
    #[error("its outputSchema does not compile: {0}")]
    OutputSchema(String),
}

/// A tool as it stands in a server's answer to `tools/list`.
#[derive(Debug)]
pub struct Listed {
    /// The tool's own name.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// The schema of its arguments.
    pub input_schema: Map<String, Value>,
    /// The schema of its structured result.
    pub output_schema: Option<Map<String, Value>>,
}

impl Tool {
    /// Checks what `server` lists.
    ///
    /// # Errors
    /// [`DefinitionError`]: this tool cannot be offered.
    pub fn new(server: &str, listed: Listed) -> Result<Self, DefinitionError> {
        Self::within(&mut CompiledRoom::new(usize::MAX), server, listed)
    }

    /// The same of one of many tools, whose patterns take from this room.
    ///
    /// # Errors
    /// [`DefinitionError`]: this tool cannot be offered.
    pub fn within(
        room: &mut CompiledRoom,
        server: &str,
        listed: Listed,
    ) -> Result<Self, DefinitionError> {
        let output_schema = listed.output_schema.clone().map(Value::Object);
        let mut tool = Self::made(room, server, listed, Of::FilledIn)?;
        let result =
            output_schema.as_ref().map(|it| Schema::compile(it, Of::Whole, room)).transpose();
        tool.result = result.map_err(DefinitionError::OutputSchema)?;
        Ok(tool)
    }

    /// The same of one whose requests are written here, so that nobody fills in what is
    /// left out, and whose results are held against nothing: its output schema is told,
    /// and no promise.
    ///
    /// # Errors
    /// [`DefinitionError`]: this tool cannot be offered.
    pub fn unheld(
        room: &mut CompiledRoom,
        server: &str,
        listed: Listed,
    ) -> Result<Self, DefinitionError> {
        Self::made(room, server, listed, Of::Whole)
    }

    fn made(
        room: &mut CompiledRoom,
        server: &str,
        listed: Listed,
        arguments: Of,
    ) -> Result<Self, DefinitionError> {
        let name =
            ToolName::parse(&format!("{server}.{}", listed.name)).map_err(DefinitionError::Name)?;
        let input_schema = Value::Object(listed.input_schema);
        let output_schema = listed.output_schema.map(Value::Object);

        let mut members = Map::new();
        members.insert("name".into(), name.as_str().into());
        if let Some(description) = &listed.description {
            members.insert("description".into(), description.as_str().into());
        }
        members.insert("inputSchema".into(), input_schema.clone());
        if let Some(schema) = &output_schema {
            members.insert("outputSchema".into(), schema.clone());
        }
        let canonical = canonical_json(&Value::Object(members));
        if canonical.len() > DEFINITION_BYTES_MAX {
            return Err(DefinitionError::TooLarge { got: canonical.len() });
        }
        let definition_sha256 = Sha256::new()
            .chain_update(b"forge tool definition v1\0")
            .chain_update(canonical.as_bytes())
            .finalize()
            .into();

        let arguments = Schema::compile(&input_schema, arguments, room);
        let arguments = arguments.map_err(DefinitionError::Schema)?;
        let spec = ToolSpec {
            name,
            description: listed.description.unwrap_or_default(),
            input_schema: canonical_json(&input_schema),
            output_schema: output_schema.as_ref().map(canonical_json),
            definition_sha256,
        };
        Ok(Self { spec, advice: None, arguments, result: None })
    }

    /// The same with what its server says of its effects (JSON), for a person
    /// to read. No part of the definition: nothing goes by it.
    #[must_use]
    pub fn with_advice(mut self, advice: Option<&str>) -> Self {
        self.advice = advice.map(|text| crate::cut(text, ADVICE_BYTES_MAX));
        self
    }

    /// What its server says of its effects: untrusted, and never believed.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &ToolName {
        &self.spec.name
    }

    /// The digest a grant pins.
    #[must_use]
    pub fn sha256(&self) -> [u8; 32] {
        self.spec.definition_sha256
    }

    /// Its description, for a list.
    #[must_use]
    pub fn spec(&self) -> &ToolSpec {
        &self.spec
    }

    /// Whether a request of so many bytes is so soon held against the input
    /// schema that others can wait for it.
    #[must_use]
    pub fn checks_soon(&self, request_bytes: usize) -> bool {
        self.arguments.cost.is_small(request_bytes)
    }

    /// Holds arguments against the input schema.
    ///
    /// # Errors
    /// The violations, each with the place where it is.
    pub fn check(&self, arguments: &Value) -> Result<(), Violations> {
        self.arguments.check(arguments, "the arguments")
    }

    /// As [`Tool::checks_soon`], of a structured result and the output schema.
    #[must_use]
    pub fn checks_result_soon(&self, result: &Value) -> bool {
        self.result.as_ref().is_none_or(|schema| schema.cost.is_small_for(result))
    }

    /// Holds a structured result against the output schema, if there is one.
    ///
    /// # Errors
    /// As [`Tool::check`]; the violations quote the result.
    pub fn check_result(&self, result: &Value) -> Result<(), Violations> {
        self.result.as_ref().map_or(Ok(()), |schema| schema.check(result, "the result"))
    }
}

impl Schema {
    /// Compiles a schema that may refer to nothing outside itself, as it is meant. Draft
    /// 2020-12 holds where `$schema` names no other.
    fn compile(schema: &Value, of: Of, room: &mut CompiledRoom) -> Result<Self, String> {
        let meant = as_meant(schema, of);
        let as_written = (of == Of::FilledIn && refers(schema))
            .then(|| as_meant(schema, Of::Whole))
            .filter(|as_written| *as_written != meant);
        let mut compiled = Self::compiled(meant, room)?;
        // Without room for it what may be left out counts alone.
        compiled.as_written = as_written.and_then(|it| Self::compiled(it, room).ok()).map(Box::new);
        Ok(compiled)
    }

    fn compiled(meant: Value, room: &mut CompiledRoom) -> Result<Self, String> {
        let schema = &read_as_javascript(&meant).unwrap_or(meant);
        let cost = Cost::of(schema)?;
        let (mut bytes, mut nones) = (0_usize, Vec::new());
        for pattern in patterns(schema) {
            match Self::bytes_of(pattern, room)? {
                Some(taken) => bytes = bytes.saturating_add(taken),
                // Perhaps data with such a member, and never compiled. If not,
                // compiling the schema says so.
                None => nones.push(pattern),
            }
            if nones.len() > NONES_MAX {
                return Err(of_pattern(nones[0], "it is none, or too large"));
            }
            if bytes > room.bytes {
                let mut why =
                    "its patterns have no room beside those of the other tools".to_owned();
                if let Some(none) = nones.first() {
                    why.push_str("; and of ");
                    why.push_str(&of_pattern(none, "it is none, or too large"));
                }
                return Err(why);
            }
        }
        let places = compiled_places_bytes_max(schema);
        if places > SCHEMA_BYTES_MAX {
            let limit = SCHEMA_BYTES_MAX / (1024 * 1024);
            return Err(format!(
                "it would take more than {limit} MiB compiled: it has too many parts, or long names \
                 with much below them"
            ));
        }
        let bytes = bytes.saturating_add(places);
        let left = room.bytes.checked_sub(bytes);
        let left = left.ok_or("compiled it has no room beside the other tools")?;
        let validator = Self::validator(schema, PATTERN_ENGINE_BYTES_MAX)?;
        room.bytes = left;
        Ok(Self { validator, cost, as_written: None })
    }

    /// What a pattern takes, with engines of the least size that is enough for
    /// each of its own; `None` if it is no pattern or none is enough. It is
    /// compiled by itself: what one needs says nothing of the others.
    fn bytes_of(pattern: &str, room: &mut CompiledRoom) -> Result<Option<usize>, String> {
        for engine_bytes in PATTERN_ENGINE_BYTES {
            let bytes = compiled_bytes_max(pattern, engine_bytes)
                .map_err(|why| of_pattern(pattern, why))?;
            if bytes > PATTERN_BYTES_MAX {
                let why = "it is none, or has too many parts for their size";
                return Err(of_pattern(pattern, why));
            }
            room.try_bytes(bytes.saturating_add(translation_bytes_max(pattern)))?;
            if Self::validator(&json!({ "pattern": pattern }), engine_bytes).is_ok() {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    fn validator(schema: &Value, engine_bytes: usize) -> Result<Validator, String> {
        let names_a_draft = schema.get("$schema").is_some();
        let mut options = jsonschema::options().offline().with_pattern_options(
            PatternOptions::fancy_regex()
                .backtrack_limit(PATTERN_BACKTRACK_MAX)
                .size_limit(engine_bytes),
        );
        if !names_a_draft {
            options = options.with_draft(Draft::Draft202012);
        }
        options.build(schema).map_err(|why| crate::cut(&why.to_string(), REASON_BYTES_MAX))
    }

    /// Holds a value, called `whole`, against the schema, on a stack that is
    /// large enough for both.
    fn check(&self, value: &Value, whole: &str) -> Result<(), Violations> {
        let Some(Plan { stack_bytes, names_places }) = self.cost.plan(value) else {
            let too_large = format!("{whole}: too large to be held against the tool's schema");
            return Err(Violations::whole(too_large));
        };
        let validate = || self.validate(value, whole, names_places);
        let Some(stack_bytes) = stack_bytes else { return validate() };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(stack_bytes);
            match thread.spawn_scoped(scope, validate).map(|thread| thread.join()) {
                Ok(Ok(checked)) => checked,
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(_) => {
                    let none = format!("{whole}: no thread to hold it against the schema");
                    Err(Violations::whole(none))
                }
            }
        })
    }

    fn validate(&self, value: &Value, whole: &str, names_places: bool) -> Result<(), Violations> {
        let as_written = || self.as_written.as_ref().is_some_and(|it| it.validator.is_valid(value));
        if self.validator.is_valid(value) || as_written() {
            return Ok(());
        }
        if !names_places {
            return Err(Violations::whole(format!(
                "{whole}: not what the schema asks; to say where would take too much work"
            )));
        }
        Err(Violations::of(self.validator.iter_errors(value), whole))
    }
}

/// Whether there may be references in a schema, which lead where less may be asked.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Array(items) => items.iter().any(refers),
        Value::Object(members) => members.iter().any(|(key, member)| {
            matches!(key.as_str(), "$ref" | "$dynamicRef" | "$recursiveRef") || refers(member)
        }),
        _ => false,
    }
}

/// What is wrong with a pattern.
fn of_pattern(pattern: &str, why: &str) -> String {
    format!("its pattern {:?}: {why}", crate::cut(pattern, 128))
}

/// JSON in the one form that the digest is taken over; see the file's head.
fn canonical_json(value: &Value) -> String {
    fn write(value: &Value, out: &mut String) {
        match value {
            Value::Array(items) => {
                out.push('[');
                for (position, item) in items.iter().enumerate() {
                    if position > 0 {
                        out.push(',');
                    }
                    write(item, out);
                }
                out.push(']');
            }
            Value::Object(members) => {
                // Sorted here, whatever the map's own order is.
                let mut sorted: Vec<(&String, &Value)> = members.iter().collect();
                sorted.sort_by(|(a, _), (b, _)| a.as_bytes().cmp(b.as_bytes()));
                out.push('{');
                for (position, (key, member)) in sorted.into_iter().enumerate() {
                    if position > 0 {
                        out.push(',');
                    }
                    out.push_str(&Value::String(key.clone()).to_string());
                    out.push(':');
                    write(member, out);
                }
                out.push('}');
            }
            scalar => out.push_str(&scalar.to_string()),
        }
    }
    let mut out = String::new();
    write(value, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(schema: Value) -> Listed {
        let Value::Object(input_schema) = schema else { unreachable!("test schemas are objects") };
        Listed {
            name: "find".into(),
            description: Some("Finds.".into()),
            input_schema,
            output_schema: None,
        }
    }

    fn tool(schema: Value) -> Tool {
        Tool::new("shop", listed(schema)).unwrap()
    }

    #[test]
    fn the_digest_is_that_of_the_documented_form() {
        let tool = tool(json!({"type": "object", "properties": {"b": {}, "a": {"minimum": 1.5}}}));
        let form = concat!(
            "forge tool definition v1\0",
            r#"{"description":"Finds.","inputSchema":{"properties":{"a":{"minimum":1.5},"b":{}},"#,
            r#""type":"object"},"name":"shop.find"}"#
        );
        let expected: [u8; 32] = Sha256::digest(form.as_bytes()).into();
        assert_eq!(tool.sha256(), expected);
    }

    #[test]
    fn every_part_of_a_definition_changes_its_digest() {
        let base = || listed(json!({"type": "object"}));
        let digest = |server: &str, listed| Tool::new(server, listed).unwrap().sha256();
        let mut seen = vec![digest("shop", base()), digest("shop2", base())];
        seen.push(digest("shop", Listed { name: "find2".into(), ..base() }));
        seen.push(digest("shop", Listed { description: None, ..base() }));
        seen.push(digest("shop", Listed { description: Some("Finds!".into()), ..base() }));
        seen.push(digest("shop", Listed { output_schema: Some(Map::new()), ..base() }));
        seen.push(digest("shop", listed(json!({"type": "object", "title": ""}))));
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn violations_name_their_place() {
        let tool = tool(json!({
            "type": "object",
            "properties": {"max": {"type": "integer", "minimum": 1}},
            "required": ["query"],
            "additionalProperties": false,
        }));
        assert!(tool.check(&json!({"query": 1, "max": 1})).is_err());
        let violations = tool.check(&json!({"max": 0, "more": true})).unwrap_err().texts.join("\n");
        assert!(violations.contains("/max"), "{violations}");
        assert!(violations.contains("query"), "{violations}");
        assert!(violations.contains("more"), "{violations}");
    }

    #[test]
    fn a_violation_whose_place_is_too_dear_to_find_says_so() {
        let tool = tool(json!({
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^b$"}},
        }));
        let violations =
            tool.check(&json!({"a": "a".repeat(65_000)})).unwrap_err().texts.join("\n");
        assert!(violations.contains("too much work"), "{violations}");
    }

    #[test]
    fn draft_2020_12_holds_where_no_other_is_named() {
        // `prefixItems` means something from 2020-12 on only.
        let schema = json!({"properties": {"x": {"prefixItems": [{"type": "string"}]}}});
        assert!(tool(schema.clone()).check(&json!({"x": [1]})).is_err());
        let mut older = schema;
        older["$schema"] = json!("http://json-schema.org/draft-07/schema#");
        assert!(tool(older).check(&json!({"x": [1]})).is_ok());
    }

    #[test]
    fn schemas_that_refer_outside_or_are_none_are_refused() {
        for schema in [
            json!({"$ref": "https://example.com/schema.json"}),
            json!({"properties": {"x": {"$ref": "file:///etc/passwd"}}}),
            json!({"type": "no such type"}),
            json!({"properties": {"x": {"pattern": "("}}}),
        ] {
            let refused = Tool::new("shop", listed(schema.clone())).unwrap_err();
            assert!(matches!(refused, DefinitionError::Schema(_)), "{schema}: {refused}");
        }
    }

    #[test]
    fn a_pattern_that_explodes_is_a_violation_soon() {
        let tool = tool(json!({"properties": {"x": {"pattern": "^(?=(a+)+$)(a+)+$"}}}));
        let started = std::time::Instant::now();
        let text = format!("{}b", "a".repeat(40));
        assert!(tool.check(&json!({"x": text})).is_err());
        assert!(started.elapsed() < std::time::Duration::from_secs(30));
    }

    #[test]
    fn large_patterns_of_one_list_take_from_one_room_and_small_ones_hardly_any() {
        let large = || listed(json!({"properties": {"x": {"pattern": "^.{1,255}$"}}}));
        let small = || listed(json!({"properties": {"x": {"pattern": "^[a-z0-9-]{1,8}$"}}}));
        let mut room = CompiledRoom::new(2 * 1024 * 1024);
        let mut offer = |listed| Tool::within(&mut room, "shop", listed);
        offer(large()).unwrap();
        for _ in 0..50 {
            offer(small()).unwrap();
        }
        let refused = offer(large()).unwrap_err().to_string();
        assert!(refused.contains("no room beside"), "{refused}");
        offer(small()).unwrap();
    }

    #[test]
    fn attack_21_a_schema_of_long_names_with_much_below_them_is_refused() {
        let leaf = json!({"type": "string"});
        let named = |names: usize, leaf: &Value| -> Value {
            (0..names).map(|at| (format!("a{at}"), leaf.clone())).collect::<Map<_, _>>().into()
        };
        let under = |length: usize, names: usize| {
            let below = json!({"type": "object", "properties": named(names, &leaf)});
            listed(json!({"properties": {"P".repeat(length): below}}))
        };
        let refused = Tool::new("shop", under(100_000, 4_000)).unwrap_err().to_string();
        assert!(refused.contains("MiB compiled"), "{refused}");
        // Neither by itself is much.
        Tool::new("shop", under(100_000, 10)).unwrap();
        Tool::new("shop", under(10, 4_000)).unwrap();
        // Nor are they many times.
        let mut room = CompiledRoom::new(32 * 1024 * 1024);
        let offered = (0..100).filter(|_| {
            let mut schema = leaf.clone();
            for _ in 0..50 {
                schema = json!({"properties": {"x".repeat(70): schema}});
            }
            Tool::within(&mut room, "shop", listed(schema)).is_ok()
        });
        assert!((20..80).contains(&offered.count()));
    }

    #[test]
    fn attack_21_a_pattern_of_many_lookaheads_is_refused_before_it_is_compiled() {
        let many: String = (0..700).map(|at| format!("(?=.{{0,900}}a{at})")).collect();
        let schema = json!({"properties": {"x": {"pattern": format!("^{many}")}}});
        let started = std::time::Instant::now();
        let refused = Tool::new("shop", listed(schema)).unwrap_err().to_string();
        assert!(refused.contains("too many parts"), "{refused}");
        assert!(started.elapsed() < std::time::Duration::from_secs(10));
        let kept: String = (1..700).map(|at| format!(".{{1,{at}}}+")).collect();
        let refused = Tool::new("shop", listed(json!({"pattern": kept}))).unwrap_err().to_string();
        assert!(refused.contains("too many parts"), "{refused}");
        let few = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[^\da-zA-Z]).{8,64}$";
        let tool = tool(json!({"properties": {"x": {"pattern": few}}}));
        assert!(tool.check(&json!({"x": "aB3-aB3-"})).is_ok());
        assert!(tool.check(&json!({"x": "ab3-ab3-"})).is_err());
    }

    #[test]
    fn attack_21_a_pattern_without_any_bound_is_refused_before_it_is_compiled() {
        let refers = |group| format!("({})", format!("\\{group}").repeat(8));
        let refers: String = (1..16).map(refers).collect();
        for (pattern, why) in [
            (format!("(?i)(){refers}"), "refers to its groups"),
            (r"(?=x)(a\g<1>\g<1>\g<1>|b)".to_owned(), "calls a group"),
            ("(?<=(?:.{0,1000}){0,1000})x".to_owned(), "lookbehind"),
            (r"\s".repeat(10_000), "escapes"),
        ] {
            let schema = json!({"properties": {"x": {"pattern": pattern}}});
            let refused = Tool::new("shop", listed(schema)).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn one_pattern_takes_its_room_once_however_many_refer_to_it() {
        let mut named = Map::new();
        named.insert("a".into(), json!({"pattern": "^.{1,500}$"}));
        let refers = json!({"anyOf": vec![json!({"$ref": "#/$defs/a"}); 32], "format": "email"});
        let schema = json!({"$defs": named, "properties": {"x": refers}});
        let mut room = CompiledRoom::new(PATTERN_ENGINE_BYTES_MAX + 64 * 1024);
        Tool::within(&mut room, "shop", listed(schema)).unwrap();
    }

    #[test]
    fn an_invalid_pattern_among_many_is_told_as_invalid() {
        let mut named: Map<String, Value> = (0..20)
            .map(|at| (format!("a{at}"), json!({"pattern": format!("^.{{{at},99}}$")})))
            .collect();
        named.insert("b".into(), json!({"pattern": "^(a"}));
        let schema = json!({"properties": named});
        for bytes in [usize::MAX, 4 * 1024] {
            let mut room = CompiledRoom::new(bytes);
            let refused = Tool::within(&mut room, "shop", listed(schema.clone()));
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("^(a"), "{refused}");
        }
    }

    #[test]
    fn attack_21_patterns_that_are_none_are_not_looked_at_without_end() {
        let mut room = CompiledRoom::new(1024 * 1024);
        let mut offer = |at: usize| {
            let none = json!({"pattern": format!("^(?:a{{9999}}){{{at}}}")});
            Tool::within(&mut room, "shop", listed(json!({"properties": {"x": none}})))
        };
        let refused: Vec<String> =
            (1000..1020).map(|at| offer(at).unwrap_err().to_string()).collect();
        assert!(refused[0].contains("9999"), "{refused:?}");
        assert!(refused[19].contains("takes too much"), "{refused:?}");
        // Each is small, and long to translate.
        let mut room = CompiledRoom::new(1024 * 1024);
        let properties: Map<String, Value> = (0..100)
            .map(|at| (format!("a{at}"), json!({"pattern": format!("{}{at}", r"\s".repeat(280))})))
            .collect();
        let refused = Tool::within(&mut room, "shop", listed(json!({"properties": properties})));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("takes too much"), "{refused}");
    }

    #[test]
    fn arguments_that_fit_a_schema_as_it_is_written_are_taken_wherever_its_references_lead() {
        let of_one = |name: &str| {
            json!({"type": "object", "required": [name],
                   "properties": {name: {"type": "string", "default": "x"}}})
        };
        let (a, b) = (json!({"$ref": "#/$defs/a"}), json!({"$ref": "#/$defs/b"}));
        let takes = |held: &Value, x: &Value| {
            let definitions = json!({"a": of_one("city"), "b": of_one("zip")});
            let schema = json!({"type": "object", "$defs": definitions, "required": ["x"],
                                "properties": {"x": held, "y": a}});
            tool(schema).check(&json!({"x": x})).is_ok()
        };
        let (city, zip) = (json!({"city": "Bonn"}), json!({"zip": "1"}));
        let (both, countries) =
            (json!({"city": "a", "zip": "b"}), json!({"required": ["country"]}));
        for (held, good, bad) in [
            (json!({"oneOf": [a, b]}), &city, &both),
            (json!({"oneOf": [{"allOf": [a]}, {"allOf": [b]}]}), &zip, &both),
            (json!({"not": a}), &zip, &city),
            (json!({"if": a, "then": countries}), &zip, &city),
            (json!({"contains": a, "maxContains": 1}), &json!([city, zip]), &json!([city, city])),
        ] {
            assert!(takes(&held, good), "{held}");
            assert!(!takes(&held, bad), "{held}");
        }
        // What has a default may be left out behind a reference as elsewhere.
        assert!(takes(&a, &json!({})) && !takes(&a, &json!({"city": 7})));
        // It takes no room twice where nothing refers to anything, or nothing may be left out.
        for schema in [
            json!({"properties": {"x": of_one("city")}}),
            json!({"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"default": 1}}}),
        ] {
            assert!(tool(schema).arguments.as_written.is_none());
        }
    }

    #[test]
    fn data_that_looks_like_a_pattern_is_none() {
        let x = json!({"type": "object", "default": {"pattern": "*.rs"}});
        tool(json!({"properties": {"x": x}}));
    }

    /// A tool whose schema has these definitions, and takes an `x` that is
    /// held against the first.
    fn referring(definitions: Vec<Value>) -> Result<Tool, DefinitionError> {
        let named = definitions.into_iter().enumerate();
        let named: Map<String, Value> = named.map(|(at, it)| (format!("a{at}"), it)).collect();
        let x = json!({"$ref": "#/$defs/a0"});
        Tool::new("shop", listed(json!({"$defs": named, "properties": {"x": x}})))
    }

    fn next(at: usize) -> Value {
        json!({ "$ref": format!("#/$defs/a{}", at + 1) })
    }

    #[test]
    fn attack_21_references_thousands_of_levels_deep_do_not_overflow_the_stack() {
        for levels in [10, 200, 300, 1_000, 4_000] {
            let mut chain: Vec<Value> =
                (0..levels).map(|at| json!({"allOf": [next(at)]})).collect();
            chain.push(json!({"type": "string"}));
            match referring(chain) {
                Ok(tool) => {
                    assert!(tool.check(&json!({"x": 1})).is_err(), "{levels}");
                    assert!(tool.check(&json!({"x": "a"})).is_ok(), "{levels}");
                }
                Err(refused) => {
                    assert!(levels > 300, "{levels}: {refused}");
                    assert!(matches!(refused, DefinitionError::Schema(_)), "{refused}");
                }
            }
        }
    }

    #[test]
    fn attack_21_a_schema_that_refers_to_itself_takes_a_deep_value_without_overflowing() {
        // Long ways from each level of the value to the next.
        let mut cycle: Vec<Value> = (0..60).map(|at| json!({"allOf": [next(at)]})).collect();
        cycle.push(json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}}));
        let tool = referring(cycle).unwrap();
        let deep = |end: Value| (0..120).fold(end, |inner, _| json!({ "x": inner }));
        assert!(tool.check(&deep(json!({}))).is_ok());
        assert!(tool.check(&deep(json!(1))).is_err());
    }

    #[test]
    fn attack_21_references_that_multiply_are_refused_or_soon_done() {
        // At the same value.
        let twice = |at| json!({"anyOf": [next(at), next(at)]});
        let mut tower: Vec<Value> = (0..40).map(twice).collect();
        tower.push(json!({"type": "string"}));
        assert!(matches!(referring(tower.clone()), Err(DefinitionError::Schema(_))));
        // In a cycle, where the validator remembers what it has seen, and at
        // each level of the value once more.
        *tower.last_mut().unwrap() = json!({"properties": {"x": {"$ref": "#/$defs/a0"}}});
        let deep = |end: Value| (0..100).fold(end, |inner, _| json!({ "x": inner }));
        let names = |at: usize| json!({"properties": {"x": {"$ref": format!("#/$defs/a{at}")}}});
        let wide = vec![json!({"type": "object", "anyOf": [names(0), names(0), names(0)]})];
        for schema in [tower, wide] {
            // A refusal would do as well.
            let Ok(tool) = referring(schema) else { continue };
            let _ = tool.check(&deep(json!({})));
            let _ = tool.check(&deep(json!(1)));
        }
    }

    #[test]
    fn attack_23_a_result_too_large_for_its_schema_is_a_violation_at_once() {
        let all: Vec<Value> = (0..9_000).map(|it| json!({"minimum": -it})).collect();
        let Value::Object(output) = json!({"items": {"allOf": all}}) else { unreachable!() };
        let tool =
            Tool::new("shop", Listed { output_schema: Some(output), ..listed(json!({})) }).unwrap();
        tool.check_result(&json!([1, 2, 3])).unwrap();
        let many: Vec<u32> = (0..1_000_000).collect();
        let violations = tool.check_result(&json!(many)).unwrap_err();
        assert!(violations.texts[0].contains("too large"), "{violations:?}");
    }

    #[test]
    fn names_that_are_none_are_refused() {
        let bad = Listed { name: "a\nb".into(), ..listed(json!({})) };
        assert!(matches!(Tool::new("shop", bad), Err(DefinitionError::Name(_))));
    }
}
