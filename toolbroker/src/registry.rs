//! All tools, of servers and built in, and the way from a tool's name to the
//! tool.
//!
//! Descriptions come from strangers and are handed on as data. Deliberately
//! absent are retrieval, which is [`crate::retrieval`]'s, and the review of
//! changed definitions, which is [`crate::review`]'s.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use forge_protocol::broker::ToolWord;
use forge_protocol::name::{RESERVED_SERVERS, ToolName};
use rmcp::model::JsonObject;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::beside;
use crate::builtin::{Builtin, Builtins, Caller, InPlace, Work};
use crate::config::{COST_DEFAULT, Config, Word};
use crate::definition::{Effect, Tool};
use crate::egress;
use crate::locks::lock;
use crate::policy::Policy;
use crate::secret::Scrubber;
use crate::upstream::scrubs::Scrubs;
use crate::upstream::{Away, Connection, Place, Upstream, UpstreamError};

/// The built-in tools, and the tool servers by name.
#[derive(Debug)]
pub struct Registry {
    builtins: Builtins,
    servers: BTreeMap<String, Arc<Upstream>>,
    /// What the operator says of tools.
    words: BTreeMap<ToolName, Word>,
    /// Those of them that no server has, and that this was said of.
    told: Mutex<BTreeSet<ToolName>>,
    scrubs: Arc<Scrubs>,
}

/// A tool that stands ready.
#[derive(Debug)]
pub struct Found {
    /// The tool, as it is described now.
    pub tool: Arc<Tool>,
    /// Who carries it out.
    pub carrier: Carrier,
    /// What a call does to the world, by the operator's word.
    pub effect: Effect,
    /// What a call costs, in budget units.
    pub cost: u32,
}

/// Who carries a tool out.
#[derive(Debug)]
pub enum Carrier {
    /// The broker itself.
    Builtin(Builtin),
    /// A tool server that is up, or the caller itself.
    Server(Arc<Connection>),
}

impl Carrier {
    /// Whether arguments that fit the tool's schema can be sent to whoever carries it out.
    ///
    /// # Errors
    /// Says which of them cannot.
    pub(crate) fn can_send(&self, tool: &Tool, arguments: &JsonObject) -> Result<(), String> {
        match self {
            Self::Builtin(_) => Ok(()),
            Self::Server(connection) => connection.can_send(tool, arguments),
        }
    }

    /// Waits until a call of this principal, with so many bytes of arguments, can be
    /// sent to whoever carries it out.
    pub(crate) async fn place(&self, of: &Arc<str>, bytes: usize) -> Option<Place> {
        match self {
            Self::Builtin(_) => None,
            Self::Server(connection) => connection.place(of, bytes).await,
        }
    }

    /// What it does in the calling thread, if it is one that does.
    pub(crate) fn in_place(&self) -> Option<InPlace> {
        match self {
            Self::Builtin(builtin) => match builtin.work() {
                Work::InPlace(work) => Some(work.clone()),
                Work::Waits(_) => None,
            },
            Self::Server(_) => None,
        }
    }
}

/// Why a tool cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// No server of this name is configured.
    #[error("no tool server {server:?} is configured{}", did_you_mean(closest))]
    NoServer {
        /// The name.
        server: String,
        /// The closest name there is.
        closest: Option<String>,
    },
    /// The server has no such tool.
    #[error("there is no tool {tool:?}{}", did_you_mean(closest))]
    NoTool {
        /// The name.
        tool: String,
        /// The closest name there is.
        closest: Option<String>,
    },
    /// The server cannot be asked.
    #[error("the tool server {server:?} cannot be used: {source}")]
    Unavailable {
        /// The server.
        server: String,
        /// Why not.
        source: UpstreamError,
    },
    /// The same as programs are told it.
    #[error(transparent)]
    Away(#[from] Away),
}

impl LookupError {
    /// The same without the name of anything that this principal may not see: a
    /// suggestion tells that it exists.
    #[must_use]
    pub fn told_to(mut self, principal: &str, policy: &Policy) -> Self {
        match &mut self {
            Self::NoServer { closest, .. } => {
                closest.take_if(|server| !policy.sees_server(principal, server));
            }
            Self::NoTool { closest, .. } => {
                let sees = |name: &str| {
                    ToolName::parse(name).is_ok_and(|name| policy.visible(principal, &name))
                };
                closest.take_if(|tool| !sees(tool));
            }
            Self::Unavailable { .. } | Self::Away(_) => {}
        }
        self
    }

    /// The same for a program, which has the tools of its grant and no others,
    /// and is a stranger to their servers.
    #[must_use]
    pub fn told_to_a_program(self) -> Self {
        match self {
            Self::NoServer { server, .. } => Self::NoServer { server, closest: None },
            Self::NoTool { tool, .. } => Self::NoTool { tool, closest: None },
            Self::Unavailable { server, source } => Away::of(server, &source).into(),
            Self::Away(_) => self,
        }
    }
}

fn did_you_mean(closest: &Option<String>) -> String {
    closest.as_ref().map(|name| format!(": did you mean {name:?}?")).unwrap_or_default()
}

/// As much of a name as is looked at for another that is like it, in bytes.
const LIKENESS_BYTES_MAX: usize = 64;

fn unavailable(name: &ToolName, source: UpstreamError) -> LookupError {
    LookupError::Unavailable { server: name.server().to_owned(), source }
}

/// That a server has no such tool, and which one was perhaps meant. It may have thousands,
/// and the thread that asks is everybody's.
async fn no_such_tool(connection: &Connection, name: &ToolName) -> LookupError {
    let (tool, tools) = (name.to_string(), connection.tools());
    let wanted = tool.clone();
    let closest =
        beside(move || closest(&wanted, tools.iter().map(|tool| tool.name().as_str()))).await;
    LookupError::NoTool { tool, closest }
}

/// The candidate most like `name`, if any is like it at all. What it takes grows with the
/// product of both lengths, so of none more is looked at than names mostly have.
fn closest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    fn looked_at(name: &str) -> &str {
        &name[..name.floor_char_boundary(LIKENESS_BYTES_MAX)]
    }
    candidates
        // One of another length by that much is not like it.
        .filter(|candidate| candidate.len() <= 2 * name.len() && name.len() <= 2 * candidate.len())
        .map(|candidate| {
            let (a, b) = (looked_at(name), looked_at(candidate));
            (strsim::normalized_damerau_levenshtein(a, b), candidate)
        })
        .filter(|(likeness, _)| *likeness >= 0.5)
        .max_by(|(a, one), (b, other)| {
            // Of those that begin alike, the one that is about as long.
            let differs = |candidate: &str| candidate.len().abs_diff(name.len());
            a.total_cmp(b).then(differs(other).cmp(&differs(one)))
        })
        .map(|(_, candidate)| candidate.to_owned())
}

impl Registry {
    /// The servers of a configuration, none of them started, to be talked
    /// with on the event loop `home`.
    #[must_use]
    pub fn new(config: Config, home: &Handle) -> Self {
        // Of all servers, for each: one that has come by another's credential
        // does not tell it either.
        let secrets = config.servers.values().flat_map(|server| server.scrub.iter().cloned());
        // And those that the broker itself sends somewhere.
        let sent = config.builtins.http.iter().flat_map(egress::Policy::credentials).cloned();
        let scrubs = Scrubs::new(secrets.chain(sent).collect());
        let servers: BTreeMap<String, Arc<Upstream>> = config
            .servers
            .into_iter()
            .map(|(name, server)| {
                let scrubs = scrubs.of_another();
                let upstream = Upstream::new(name.clone(), server, scrubs, home.clone());
                (name, Arc::new(upstream))
            })
            .collect();
        Self {
            builtins: Builtins::new(config.builtins, &servers),
            servers,
            words: config.words,
            told: Mutex::default(),
            scrubs,
        }
    }

    /// Whether a server of this name is configured.
    #[must_use]
    pub fn has_server(&self, name: &str) -> bool {
        self.servers.contains_key(name)
    }

    /// What a call of this tool does to the world: a built-in knows its own
    /// effect; of any other it is what the operator says, and `write` until
    /// then.
    #[must_use]
    pub fn effect(&self, name: &ToolName) -> Effect {
        let said = || self.words.get(name).and_then(|word| word.effect);
        self.builtin(name).map_or_else(|| said().unwrap_or(Effect::Write), Builtin::effect)
    }

    /// What a call of this tool costs, in budget units.
    #[must_use]
    pub fn cost(&self, name: &ToolName) -> u32 {
        self.words.get(name).and_then(|word| word.cost).unwrap_or(COST_DEFAULT)
    }

    /// What is said of a tool, for a list.
    #[must_use]
    pub fn word(&self, tool: &Tool) -> ToolWord {
        ToolWord {
            effect: self.effect(tool.name()),
            cost: self.cost(tool.name()),
            advice: tool.advice().map(str::to_owned),
        }
    }

    /// What takes credentials out of results, as far as they are known now.
    #[must_use]
    pub fn scrubber(&self) -> Scrubber {
        self.scrubs.scrubber()
    }

    /// The built-in tool of this name.
    #[must_use]
    pub fn builtin(&self, name: &ToolName) -> Option<&Builtin> {
        self.builtins.get(name)
    }

    /// A run is over: what built-in tools kept for it alone is forgotten.
    pub(crate) fn forget_run(&self, caller: &Caller) {
        self.builtins.forget_run(caller);
    }

    /// All tools of these servers and the built-in ones, by name, and the
    /// servers that cannot be asked. Those that are not up are started, all at
    /// the same time; the others are left alone.
    pub async fn list(
        &self,
        of: impl Fn(&str) -> bool,
    ) -> (Vec<Arc<Tool>>, Vec<(String, UpstreamError)>) {
        let mut asked = JoinSet::new();
        for upstream in self.servers.values().filter(|upstream| of(upstream.name())) {
            let upstream = Arc::clone(upstream);
            asked.spawn(async move {
                let connection = upstream.connection().await;
                (upstream.name().to_owned(), connection)
            });
        }
        let mut tools: Vec<Arc<Tool>> =
            self.builtins.iter().map(|builtin| Arc::clone(builtin.tool())).collect();
        let mut unavailable = Vec::new();
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok((server, Ok(connection))) => {
                    let its = connection.tools();
                    self.warn_of_words(&server, &its);
                    tools.extend(its.iter().cloned());
                }
                Ok((server, Err(error))) => unavailable.push((server, error)),
                Err(error) => tracing::error!(%error, "bug: a listing task failed"),
            }
        }
        tools.sort_by(|a, b| a.name().cmp(b.name()));
        unavailable.sort_by(|(a, _), (b, _)| a.cmp(b));
        (tools, unavailable)
    }

    /// Says once what the operator said of tools that a server does not have: a name that is
    /// misspelt, or is another by now, is a tool that costs what any does.
    fn warn_of_words(&self, server: &str, tools: &[Arc<Tool>]) {
        let has = |name: &ToolName| tools.iter().any(|tool| tool.name() == name);
        for name in self.words.keys().filter(|name| name.server() == server && !has(name)) {
            let mut told = lock(&self.told);
            if told.insert(name.clone()) {
                let closest = closest(name.as_str(), tools.iter().map(|tool| tool.name().as_str()));
                tracing::warn!(tool = %name, ?closest, "[tools] names what its server does not have");
            }
        }
    }

    /// One tool, as its server describes it now, or as the caller whose tools
    /// are `hosted` does. Starts the server if it is not up.
    ///
    /// # Errors
    /// [`LookupError`].
    pub async fn find(
        &self,
        name: &ToolName,
        hosted: Option<&Arc<Connection>>,
    ) -> Result<Found, LookupError> {
        // Configured servers come first: a caller takes no other's place.
        if !self.servers.contains_key(name.server())
            && let Some(hosted) = hosted
            && let Some(tool) = hosted.tool(name)
        {
            let carrier = Carrier::Server(Arc::clone(hosted));
            return Ok(Found { tool, carrier, effect: self.effect(name), cost: self.cost(name) });
        }
        if let Some(builtin) = self.builtin(name) {
            let tool = Arc::clone(builtin.tool());
            let carrier = Carrier::Builtin(builtin.clone());
            return Ok(Found { tool, carrier, effect: self.effect(name), cost: self.cost(name) });
        }
        let upstream = self.servers.get(name.server()).ok_or_else(|| self.no_server(name))?;
        let connection = upstream.connection().await.map_err(|source| unavailable(name, source))?;
        // Who calls is a program, and told no more.
        let none = || LookupError::NoTool { tool: name.to_string(), closest: None };
        let tool = connection.tool(name).ok_or_else(none)?;
        let carrier = Carrier::Server(connection);
        Ok(Found { tool, carrier, effect: self.effect(name), cost: self.cost(name) })
    }

    /// Why there is no server for this name.
    fn no_server(&self, name: &ToolName) -> LookupError {
        let builtins = || self.builtins.iter().map(|builtin| builtin.tool().name());
        if RESERVED_SERVERS.contains(&name.server()) {
            return LookupError::NoTool {
                tool: name.to_string(),
                closest: closest(name.as_str(), builtins().map(ToolName::as_str)),
            };
        }
        let servers = self.servers.keys().map(String::as_str);
        LookupError::NoServer {
            server: name.server().to_owned(),
            closest: closest(name.server(), servers.chain(builtins().map(ToolName::server))),
        }
    }

    /// Several tools; servers that are not up are started at the same time, and
    /// waited for until then.
    ///
    /// # Errors
    /// [`LookupError`], for the first name that cannot be had.
    pub async fn find_all(
        &self,
        names: impl IntoIterator<Item = ToolName>,
        until: Option<Instant>,
    ) -> Result<Vec<Arc<Tool>>, LookupError> {
        let names: Vec<ToolName> = names.into_iter().collect();
        let mut servers: Vec<&str> = names
            .iter()
            .filter(|name| self.builtin(name).is_none())
            .map(ToolName::server)
            .collect();
        servers.sort_unstable();
        servers.dedup();
        let mut connections = BTreeMap::new();
        match servers.as_slice() {
            [] => {}
            // Alone, it needs no task of its own.
            [server] => {
                if let Some(upstream) = self.servers.get(*server) {
                    connections.insert((*server).to_owned(), upstream.connection_by(until).await);
                }
            }
            several => {
                let mut starting = JoinSet::new();
                for upstream in several.iter().filter_map(|server| self.servers.get(*server)) {
                    let upstream = Arc::clone(upstream);
                    starting.spawn(async move {
                        let connection = upstream.connection_by(until).await;
                        (upstream.name().to_owned(), connection)
                    });
                }
                while let Some(started) = starting.join_next().await {
                    match started {
                        Ok((server, connection)) => connections.insert(server, connection),
                        // Only a panic of ours ends a start without an answer.
                        Err(error) => std::panic::resume_unwind(error.into_panic()),
                    };
                }
            }
        }
        let mut tools = Vec::with_capacity(names.len());
        for name in &names {
            tools.push(match (self.builtin(name), connections.get(name.server())) {
                (Some(builtin), _) => Arc::clone(builtin.tool()),
                (None, Some(Ok(connection))) => match connection.tool(name) {
                    Some(tool) => tool,
                    None => return Err(no_such_tool(connection, name).await),
                },
                (None, Some(Err(error))) => return Err(unavailable(name, error.clone())),
                (None, None) => return Err(self.no_server(name)),
            });
        }
        Ok(tools)
    }

    /// Stops all servers, at the same time.
    pub async fn stop(&self) {
        let mut stopping = JoinSet::new();
        for upstream in self.servers.values() {
            let upstream = Arc::clone(upstream);
            stopping.spawn(async move { upstream.stop().await });
        }
        while stopping.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_name_is_offered_and_a_far_one_is_not() {
        let names = ["shop.find_parts", "shop.get_stock"];
        assert_eq!(closest("shop.find_part", names.into_iter()), Some("shop.find_parts".into()));
        assert_eq!(closest("zzz", names.into_iter()), None);
        // However long: their beginnings are looked at.
        let (long, other) = ("a".repeat(200), format!("{}b", "a".repeat(200)));
        assert_eq!(closest(&long, [other.as_str()].into_iter()), Some(other.clone()));
        assert_eq!(closest(&long, names.into_iter()), None);
    }

    #[test]
    fn what_a_principal_may_not_see_is_not_suggested_to_it() {
        let pattern = crate::policy::Pattern::parse("shop.get_*").unwrap();
        let policy = Policy::of([("alice".to_owned(), vec![pattern])].into());
        let tool = |closest: &str| LookupError::NoTool {
            tool: "shop.get_x".into(),
            closest: Some(closest.into()),
        };
        let server = |closest: &str| LookupError::NoServer {
            server: "shops".into(),
            closest: Some(closest.into()),
        };
        for (error, shown) in [
            (tool("shop.get_stock"), true),
            (tool("shop.delete_customer"), false),
            (server("shop"), true),
            (server("hops"), false),
        ] {
            let told = error.told_to("alice", &policy);
            assert_eq!(told.to_string().contains("did you mean"), shown, "{told}");
            assert!(!told.told_to_a_program().to_string().contains("did you mean"));
        }
    }

    #[test]
    fn a_program_hears_when_a_server_is_tried_again_and_not_why_it_failed() {
        let reason = "it said: no /home/op/key";
        let (command, reason) = ("/opt/shop".to_owned(), reason.to_owned());
        for (source, again) in [
            (UpstreamError::Spawn { command, reason: reason.clone() }, false),
            (UpstreamError::Start { reason: reason.clone() }, false),
            (UpstreamError::BackOff { failures: 2, wait_ms: 500, reason }, true),
            (UpstreamError::Stopped, false),
        ] {
            let why = source.to_string();
            let error = LookupError::Unavailable { server: "shop".into(), source };
            assert!(error.to_string().contains(&why), "{error}");
            let told = error.told_to_a_program().to_string();
            assert!(told.starts_with("the tool server \"shop\" cannot be used now"), "{told}");
            assert!(!told.contains(&why) && !told.contains('/'), "{told}");
            assert_eq!(told.contains("in 500 ms"), again, "{told}");
        }
    }

    #[tokio::test]
    async fn an_unknown_server_is_refused_by_name() {
        let registry = Registry::new(Config::default(), &Handle::current());
        let refused =
            registry.find(&ToolName::parse("shop.find").unwrap(), None).await.unwrap_err();
        assert!(refused.to_string().contains("\"shop\""), "{refused}");
    }

    #[tokio::test]
    async fn an_unknown_tool_of_a_reserved_server_is_refused_with_the_closest_built_in() {
        let registry = Registry::new(Config::default(), &Handle::current());
        let refused =
            registry.find(&ToolName::parse("crypto.hsh").unwrap(), None).await.unwrap_err();
        assert!(matches!(refused, LookupError::NoTool { .. }), "{refused}");
        assert!(refused.to_string().contains("\"crypto.hash\""), "{refused}");
    }
}
