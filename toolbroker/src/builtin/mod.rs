//! Tools of the broker's own. They stand in the registry beside the tools of
//! configured servers and are called through the same chain: identity from
//! the connection, grant, size, pinned definition, schema, budget, time.
//!
//! | tool | effect | what it does | listed |
//! |---|---|---|---|
//! | `crypto.hash` | none | SHA-256 or SHA-512 of a text or of bytes | always |
//! | `crypto.hmac` | none | signs with one of the operator's keys | with a key to sign with |
//! | `crypto.verify` | none | checks a signature with one of them | with a key to verify with |
//! | `http.fetch` | read, write | one request to a place that is allowed | with a rule |
//! | `fs.read`, `fs.list` | read | files below a configured folder | with a root |
//! | `fs.write` | write | the same | with a root to write to |
//! | `stash.get`, `stash.list` | read | notes of one session | if configured |
//! | `stash.put`, `stash.delete` | write | the same | if configured |
//! | `resource.read` | read | a resource of a tool server | with a source |
//!
//! A built-in belongs to a server whose name is reserved
//! ([`RESERVED_SERVERS`](forge_protocol::name::RESERVED_SERVERS)), so that no
//! configuration can put another tool in its place. What the operator did not
//! configure is not listed, and so can be neither granted nor called. What a
//! definition says of its configuration (roots, hosts, keys, by name) is part
//! of the definition, so that a grant pins that too.
//!
//! Distrusted are its arguments, schema or no schema. Deliberately absent is
//! any way past the chain.

mod crypto;
pub mod fs;
mod http;
pub mod keys;
pub mod resource;
pub mod stash;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::RunId;
use forge_protocol::name::ToolName;
use rmcp::model::JsonObject;
use serde_json::{Value, json};

use self::stash::Stash;
use crate::definition::{Effect, Listed, Tool};
use crate::egress;
use crate::grant::Grant;
use crate::secret::Secret;
use crate::upstream::{CallEnd, Said, Upstream};

/// The built-in tools that need configuration.
#[derive(Debug, Default)]
pub struct BuiltinsConfig {
    /// Where `http.fetch` may go.
    pub http: Option<egress::Policy>,
    /// What `fs.*` may look into.
    pub fs: Vec<fs::Root>,
    /// Keys for `crypto.hmac` and `crypto.verify`, by name.
    pub keys: BTreeMap<String, keys::Key>,
    /// What `stash.*` may hold.
    pub stash: Option<stash::Terms>,
    /// What `resource.read` may read.
    pub resource: Option<resource::Sources>,
}

impl BuiltinsConfig {
    /// The files that credentials of built-in tools came from.
    #[must_use]
    pub fn credential_files(&self) -> Vec<PathBuf> {
        let sent = self.http.iter().flat_map(egress::Policy::credentials).flat_map(Secret::files);
        sent.chain(self.keys.values().flat_map(|key| &key.files)).cloned().collect()
    }
}

/// Who calls, as the broker knows it from the connection and the grant.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Whose run it is.
    pub principal: Arc<str>,
    /// Which run.
    pub run: RunId,
    /// Which session of the principal's, if the run belongs to one.
    pub session: Option<Arc<str>>,
    /// When the run's time is over.
    pub deadline: tokio::time::Instant,
    /// What the run may call, for a tool that goes where its arguments did not say.
    pub grant: Arc<Grant>,
}

impl Caller {
    /// Waits for a turn, as long as the run lasts: what nobody waits for any more
    /// is not begun.
    async fn turn<T>(&self, turn: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::time::timeout_at(self.deadline, turn).await.map_err(|_| {
            Failure::new("busy", "the run was over before others made room: nothing was begun")
        })
    }
}

/// One built-in tool.
#[derive(Clone, Debug)]
pub struct Builtin {
    tool: Arc<Tool>,
    effect: Effect,
    work: Work,
}

/// How a built-in is carried out.
#[derive(Clone, Debug)]
pub enum Work {
    /// Microseconds, without IO, in one go. Which thread does it is its
    /// caller's to say: the link's own, where there is no effect and nothing
    /// else to wait for.
    InPlace(InPlace),
    /// With IO, on the event loop of the servers.
    Waits(Waits),
}

/// A call under way. Dropping it gives the call up as far as that goes.
pub type Pending = Pin<Box<dyn Future<Output = Said> + Send>>;

/// What is done in one go. The arguments fit the tool's schema.
#[derive(Clone)]
pub struct InPlace(Arc<AtOnce>);

/// What is waited for. The arguments fit the tool's schema.
#[derive(Clone)]
pub struct Waits(Arc<InTime>);

type AtOnce = dyn Fn(&Caller, &JsonObject) -> Result<Value, Failure> + Send + Sync;
type InTime = dyn Fn(&Caller, JsonObject) -> Pending + Send + Sync;

/// Why a built-in failed, for the program.
#[derive(Debug)]
struct Failure {
    /// A word to branch on.
    code: &'static str,
    /// What happened.
    message: String,
}

impl Failure {
    fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    fn bad_request(message: impl Into<String>) -> Self {
        Self::new("bad_request", message)
    }
}

impl From<Failure> for CallEnd {
    fn from(failure: Failure) -> Self {
        Self::Failed(json!({ "error": failure.message, "code": failure.code }))
    }
}

impl From<Failure> for Said {
    fn from(failure: Failure) -> Self {
        CallEnd::from(failure).into()
    }
}

impl From<Result<Value, Failure>> for CallEnd {
    fn from(outcome: Result<Value, Failure>) -> Self {
        outcome.map_or_else(Self::from, Self::Answered)
    }
}

impl InPlace {
    /// Carries it out.
    #[must_use]
    pub fn carry_out(&self, caller: &Caller, arguments: &JsonObject) -> CallEnd {
        (self.0)(caller, arguments).into()
    }
}

impl fmt::Debug for InPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InPlace(…)")
    }
}

impl fmt::Debug for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waits(…)")
    }
}

impl Work {
    fn in_place(
        work: impl Fn(&Caller, &JsonObject) -> Result<Value, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self::InPlace(InPlace(Arc::new(work)))
    }

    fn waits<F: Future<Output: Into<Said>> + Send + 'static>(
        work: impl Fn(&Caller, JsonObject) -> F + Send + Sync + 'static,
    ) -> Self {
        Self::Waits(Waits(Arc::new(move |caller, arguments| {
            let ends = work(caller, arguments);
            Box::pin(async { ends.await.into() })
        })))
    }
}

/// A built-in as its module writes it down.
struct Plan {
    server: &'static str,
    name: &'static str,
    description: String,
    effect: Effect,
    input_schema: Value,
    output_schema: Value,
    work: Work,
}

impl Builtin {
    /// Its definition.
    #[must_use]
    pub fn tool(&self) -> &Arc<Tool> {
        &self.tool
    }

    /// What it does to the world.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// How it is carried out.
    #[must_use]
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Carries it out, whichever way, with arguments that fit its schema. To
    /// be polled on the event loop of the servers.
    #[must_use]
    pub fn carry_out(&self, caller: &Caller, arguments: JsonObject) -> Pending {
        match &self.work {
            Work::InPlace(work) => {
                let end = work.carry_out(caller, &arguments);
                Box::pin(std::future::ready(end.into()))
            }
            Work::Waits(work) => (work.0)(caller, arguments),
        }
    }
}

/// All built-ins, by name.
#[derive(Debug)]
pub struct Builtins {
    all: Vec<Builtin>,
    stash: Option<Arc<Stash>>,
}

impl Builtins {
    /// Compiles the definitions of what is configured. `servers` are the tool
    /// servers, whose resources `resource.read` reads.
    #[must_use]
    pub fn new(mut config: BuiltinsConfig, servers: &BTreeMap<String, Arc<Upstream>>) -> Self {
        let stash = config.stash.take();
        let stash = stash.map(|terms| Arc::new(Stash::new(terms, Box::new(Instant::now))));
        let plans = plans(config, servers).into_iter().chain(stash.iter().flat_map(stash::plans));
        let mut all: Vec<Builtin> = plans.filter_map(compiled).collect();
        all.sort_by(|a, b| a.tool.name().cmp(b.tool.name()));
        Self { all, stash }
    }

    /// A run is over: what only it could see is forgotten.
    pub(crate) fn forget_run(&self, caller: &Caller) {
        if let Some(stash) = &self.stash {
            stash.forget_run(caller);
        }
    }

    /// The built-in of this name.
    #[must_use]
    pub fn get(&self, name: &ToolName) -> Option<&Builtin> {
        let found = self.all.binary_search_by(|builtin| builtin.tool.name().cmp(name)).ok()?;
        self.all.get(found)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Builtin> {
        self.all.iter()
    }
}

fn plans(config: BuiltinsConfig, servers: &BTreeMap<String, Arc<Upstream>>) -> Vec<Plan> {
    let BuiltinsConfig { http, fs, keys, stash: _, resource } = config;
    let mut plans = vec![crypto::hash()];
    plans.extend(keys::plans(keys));
    plans.extend(http.and_then(http::fetch));
    plans.extend(fs::plans(fs));
    plans.extend(resource.map(|sources| resource::read(sources, servers)));
    plans
}

fn compiled(plan: Plan) -> Option<Builtin> {
    let (Value::Object(input_schema), Value::Object(output_schema)) =
        (plan.input_schema, plan.output_schema)
    else {
        tracing::error!(tool = plan.name, "bug: a built-in's schema is no object");
        return None;
    };
    let listed = Listed {
        name: plan.name.to_owned(),
        description: Some(plan.description),
        input_schema,
        output_schema: Some(output_schema),
    };
    match Tool::new(plan.server, listed) {
        Ok(tool) => Some(Builtin { tool: Arc::new(tool), effect: plan.effect, work: plan.work }),
        Err(error) => {
            tracing::error!(
                tool = plan.name,
                server = plan.server,
                %error,
                "a built-in is not offered: configure less of it"
            );
            None
        }
    }
}

/// A text among arguments.
fn text<'a>(arguments: &'a JsonObject, name: &str) -> Option<&'a str> {
    arguments.get(name).and_then(Value::as_str)
}

/// The bytes that an argument `text` or `base64` gives.
fn bytes_of(arguments: &JsonObject) -> Result<Cow<'_, [u8]>, Failure> {
    match (text(arguments, "text"), text(arguments, "base64")) {
        (Some(text), None) => Ok(text.as_bytes().into()),
        (None, Some(encoded)) => STANDARD
            .decode(encoded)
            .map(Cow::Owned)
            .map_err(|error| Failure::bad_request(format!("base64: {error}"))),
        _ => Err(Failure::bad_request("give either text or base64")),
    }
}

/// Bytes for a program: as text under this name if they are, or else in
/// base64 under that.
fn named_bytes(bytes: Vec<u8>, as_text: &str, as_base64: &str) -> (String, Value) {
    match String::from_utf8(bytes) {
        Ok(text) => (as_text.to_owned(), text.into()),
        Err(error) => {
            let encoded = STANDARD.encode(error.as_bytes());
            (as_base64.to_owned(), encoded.into())
        }
    }
}

/// The schema of `text` or `base64`, one of them needed, beside `more`.
fn with_bytes(what: &str, mut more: JsonObject, required: &[&str]) -> Value {
    more.insert(
        "text".into(),
        json!({
            "type": "string", "description": format!("{what}, as text in UTF-8."),
        }),
    );
    more.insert(
        "base64".into(),
        json!({
            "type": "string",
            "contentEncoding": "base64",
            "description": format!("{what}, in base64 with its padding (RFC 4648, 4)."),
        }),
    );
    json!({
        "type": "object",
        "properties": more,
        "required": required,
        "oneOf": [{ "required": ["text"] }, { "required": ["base64"] }],
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::name::RESERVED_SERVERS;

    #[test]
    fn without_configuration_there_is_nothing_but_crypto_hash() {
        let builtins = Builtins::new(BuiltinsConfig::default(), &BTreeMap::new());
        let names: Vec<&str> =
            builtins.iter().map(|builtin| builtin.tool().name().as_str()).collect();
        assert_eq!(names, ["crypto.hash"]);
    }

    #[test]
    fn with_everything_configured_all_compile_under_reserved_names_with_their_effects() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forge.toml");
        let text = format!(
            r#"
            [servers.docs]
            command = "x"
            [builtins.http]
            allow = [{{ host = "api.example.com" }}]
            [builtins.fs]
            roots = [{{ name = "docs", path = {:?}, write = true }}]
            [builtins.stash]
            [builtins.crypto.keys.hook]
            algorithm = "hmac-sha256"
            secret = {{ from_env = "KEY" }}
            uses = ["sign", "verify"]
            [builtins.resource]
            allow = [{{ server = "docs", uri_prefix = "docs://" }}]
            "#,
            folder.path()
        );
        std::fs::write(&file, text).unwrap();
        let environment = |_: &str| Some("0123456789abcdef".to_owned());
        let config = crate::config::Config::load(None, Some(&file), &environment).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let registry = crate::registry::Registry::new(config, runtime.handle());
        let expected = [
            ("crypto.hash", Effect::None),
            ("crypto.hmac", Effect::None),
            ("crypto.verify", Effect::None),
            ("fs.list", Effect::Read),
            ("fs.read", Effect::Read),
            ("fs.write", Effect::Write),
            ("http.fetch", Effect::Read),
            ("resource.read", Effect::Read),
            ("stash.delete", Effect::Write),
            ("stash.get", Effect::Read),
            ("stash.list", Effect::Read),
            ("stash.put", Effect::Write),
        ];
        for (name, effect) in expected {
            let name = ToolName::parse(name).unwrap();
            let builtin = registry.builtin(&name).unwrap();
            assert_eq!((builtin.tool().name(), builtin.effect()), (&name, effect));
            assert!(RESERVED_SERVERS.contains(&name.server()));
        }
    }
}
