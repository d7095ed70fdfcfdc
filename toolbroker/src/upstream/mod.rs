//! The servers that tools come from: processes that speak MCP on their
//! standard streams, MCP servers over HTTP, HTTP interfaces with an OpenAPI
//! document, and callers that host tools themselves. A server is started (or
//! asked) when first needed, kept warm, listed again when it says so or its list
//! is old, tried again after it failed, and stopped.
//!
//! | module | what it holds |
//! |---|---|
//! | [`source`] | what tools come from, as the operator says it |
//! | [`mcp`] | a session of MCP: tools and calls |
//! | [`listing`] | a list of tools, and which of them can be offered |
//! | [`stdio`] | a process and its standard streams |
//! | [`lines`] | the messages on them |
//! | [`received`] | messages of MCP, as its library is to read them |
//! | [`unread`] | large answers, to be read when there is a turn for it |
//! | [`unusable`] | answers of which nothing is made |
//! | [`http`] | the way to a server over HTTP |
//! | [`streamable`] | MCP on it |
//! | [`events`] | how much a stream of events has |
//! | [`oauth`] | access tokens for it |
//! | [`openapi`] | operations of an HTTP interface, sent and answered |
//! | [`declined`] | what a server asks of us: nothing is carried out |
//! | [`places`] | how many calls a principal may have at one server |
//! | [`breaker`] | when a server that failed is tried again |
//! | [`hosted`] | tools that a caller hosts itself |
//! | [`scrubs`] | a server's credentials, removed from what it says |
//!
//! A server is a stranger. What it says is bounded, cut and scrubbed of its
//! credentials before anybody reads it, and it gets no other server's.
//!
//! # Two eras of MCP
//! Servers from 2026-07-28 on answer `server/discover` and keep no session;
//! older ones want `initialize`. The client asks `server/discover` first and
//! falls back when the server refuses it. Some old servers neither answer nor
//! refuse, or answer with what is no message of MCP: then, or after some seconds, the
//! refusal is written for them. Which era a server is of is remembered for its next start.

mod breaker;
mod declined;
mod events;
pub mod hosted;
pub(crate) mod http;
mod lines;
mod listing;
mod mcp;
pub(crate) mod oauth;
mod openapi;
mod places;
mod received;
pub(crate) mod scrubs;
mod silence;
mod source;
mod sse;
mod stdio;
mod streamable;
mod unread;
mod unusable;

pub(crate) use self::breaker::{Admission, Breaker};
pub use self::source::{ServerConfig, Source};
pub use self::unread::Unread;
pub use self::unusable::Unusable;
pub(crate) use self::unusable::{VALUES_MAX, has_few_values};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use forge_protocol::name::ToolName;
use rmcp::model::{JsonObject, ProtocolVersion};
use rmcp::service::{ClientInitializeError, RunningService};
use rmcp::transport::Transport;
use rmcp::{ClientCacheConfig, ClientLifecycleMode, ClientServiceExt as _, RoleClient};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use self::declined::Declined;
use self::hosted::Hosted;
use self::mcp::{Handler, Line, Session, start_error};
use self::openapi::Api;
use self::places::Places;
use self::scrubs::Scrubs;
use crate::definition::Tool;
use crate::locks::lock;
use crate::secret::Scrubber;
use crate::stranger::{self, Program};

/// From a server's start to its list of tools.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How long one that did not start is listened to for why.
const LAST_WORDS_TIME_MAX: Duration = Duration::from_secs(1);
/// A server that stood this long is started again at once.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);

/// A server's error text that is handed on, in bytes.
pub const ERROR_TEXT_BYTES_MAX: usize = 4 * 1024;

/// Why a server cannot be asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The program cannot be started.
    #[error("{command:?} cannot be started: {reason}")]
    Spawn {
        /// The program.
        command: String,
        /// Why not.
        reason: String,
    },
    /// It is there, and did not become a usable MCP server.
    #[error("it did not start as an MCP server: {reason}")]
    Start {
        /// Why not, with its last words.
        reason: String,
    },
    /// It failed shortly before and is left alone for a moment.
    #[error("it failed {failures} times in a row and is tried again in {wait_ms} ms: {reason}")]
    BackOff {
        /// How often.
        failures: u32,
        /// Until the next try.
        wait_ms: u128,
        /// The last failure.
        reason: String,
    },
    /// It is not up yet, and whoever asked waits no longer.
    #[error(
        "it was not up yet when the time of the run was nearly over: give the run more time; \
         where the toolbroker stays, as a service's does, a later run finds it up"
    )]
    Starting,
    /// The broker is shutting down.
    #[error("the broker is shutting down")]
    Stopped,
}

/// A server that cannot be asked, as programs are told of it: paths and its last words
/// are the operator's to read.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "the tool server {server:?} cannot be used now{}; the operator's log says why",
    again_in(*wait_ms)
)]
pub struct Away {
    /// The server.
    pub server: String,
    /// Until it is tried again, in milliseconds, if that is known.
    pub wait_ms: Option<u128>,
}

impl Away {
    /// What is told of `why`.
    pub(crate) fn of(server: impl Into<String>, why: &UpstreamError) -> Self {
        let wait_ms = match why {
            UpstreamError::BackOff { wait_ms, .. } => Some(*wait_ms),
            UpstreamError::Spawn { .. }
            | UpstreamError::Start { .. }
            | UpstreamError::Starting
            | UpstreamError::Stopped => None,
        };
        Self { server: server.into(), wait_ms }
    }
}

fn again_in(wait_ms: Option<u128>) -> String {
    wait_ms.map(|ms| format!(", and is tried again in {ms} ms")).unwrap_or_default()
}

/// How a dispatched call ended. Nothing is scrubbed yet: the chain does that
/// once it held the result against its schema ([`crate::call`]).
#[derive(Debug)]
pub enum CallEnd {
    /// The tool answered: its structured result.
    Answered(Value),
    /// The same, whose member of this name, if it has one, is bytes in base64: what they
    /// spell in it, the scrubber does not find.
    Bytes(Value, &'static str),
    /// The tool answered with content blocks and nothing structured.
    Content(Value),
    /// The tool answered, and nothing can be made of that.
    Unusable(Unusable),
    /// The tool failed: its error as a JSON object.
    Failed(Value),
    /// The tool surely did nothing.
    Undone {
        /// Why, as a program can tell it.
        why: Undone,
        /// The same for people.
        message: String,
    },
    /// The server was lost before it answered.
    Lost,
    /// A request was sent that may have done something, and this came instead of an answer.
    Unanswered(String),
}

/// An end of a call that may be yet to be read.
#[derive(Debug)]
pub enum Answer {
    /// It is read.
    End(CallEnd),
    /// It is large, and is not.
    Unread(Unread),
}

impl From<CallEnd> for Answer {
    fn from(end: CallEnd) -> Self {
        Self::End(end)
    }
}

impl Answer {
    /// The end, read now if it was not.
    pub(crate) fn read(self) -> CallEnd {
        match self {
            Self::End(end) => end,
            Self::Unread(unread) => unread.read(),
        }
    }
}

/// How a call ended, and what takes out of that what is looked for in its server's words
/// alone.
#[derive(Debug)]
pub struct Said {
    /// How it ended.
    pub answer: Answer,
    /// For the tokens that the server issued itself, if it did.
    pub own: Option<Scrubber>,
}

impl From<CallEnd> for Said {
    fn from(end: CallEnd) -> Self {
        Self { answer: end.into(), own: None }
    }
}

/// Why a tool surely did nothing. These words are the broker's own: no tool's error has
/// one of them for its name, since a program may try again what was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undone {
    /// No connection to its server could be made.
    Unreachable,
    /// Its server failed, and is left alone for a while.
    Unavailable,
    /// There is no access token, or it came too late.
    Unauthorized,
    /// Its server's process takes nothing.
    Busy,
    /// It is no longer among its server's.
    NoSuchTool,
    /// The caller that hosts it is gone.
    Gone,
    /// Its server refused the request.
    Refused,
    /// Its server's session ended, and no other has the same tool.
    SessionLost,
}

impl Undone {
    const ALL: [Self; 8] = [
        Self::Unreachable,
        Self::Unavailable,
        Self::Unauthorized,
        Self::Busy,
        Self::NoSuchTool,
        Self::Gone,
        Self::Refused,
        Self::SessionLost,
    ];

    /// As a program is told it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "Unreachable",
            Self::Unavailable => "Unavailable",
            Self::Unauthorized => "Unauthorized",
            Self::Busy => "Busy",
            Self::NoSuchTool => "NoSuchTool",
            Self::Gone => "Gone",
            Self::Refused => "Refused",
            Self::SessionLost => "SessionLost",
        }
    }

    /// Whether a name is one of these.
    pub(crate) fn is_name(name: &str) -> bool {
        Self::ALL.iter().any(|it| it.name() == name)
    }
}

impl CallEnd {
    /// The tool surely did nothing.
    pub(crate) fn undone(why: Undone, message: &str) -> Self {
        Self::Undone { why, message: crate::cut(message, ERROR_TEXT_BYTES_MAX) }
    }

    /// A failure with a name of its own.
    pub(crate) fn failed(name: &str, message: &str) -> Self {
        let message = crate::cut(message, ERROR_TEXT_BYTES_MAX);
        Self::Failed(json!({ "name": name, "message": message }))
    }
}

/// One of the places for calls to a server, until it is dropped.
pub type Place = OwnedSemaphorePermit;

/// One configured server.
#[derive(Debug)]
pub struct Upstream {
    name: String,
    source: Source,
    /// Where the server is talked with: what it says is parsed there, however
    /// much it is, and holds up no other run's calls.
    home: Handle,
    scrubs: Arc<Scrubs>,
    breaker: Arc<Breaker>,
    places: Arc<Places>,
    slot: Mutex<Slot>,
    /// Whether the server is known to want `initialize`.
    legacy: AtomicBool,
}

#[derive(Debug, Default)]
struct Slot {
    connection: Option<Arc<Connection>>,
    starting: Option<Starting>,
    stopped: bool,
}

/// What becomes of asking a server up.
type Outcome = Result<Arc<Connection>, UpstreamError>;

/// A start under way, or a list that is read again. It is nobody's: it goes on
/// when whoever asked for it leaves.
#[derive(Debug)]
struct Starting {
    outcome: watch::Receiver<Option<Outcome>>,
    task: JoinHandle<()>,
}

/// A source of tools that can be called now.
#[derive(Debug)]
pub enum Connection {
    /// A session with an MCP server.
    Mcp(Box<Session>),
    /// An HTTP interface with an OpenAPI document.
    Api(Api),
    /// A caller that hosts tools itself.
    Hosted(Hosted),
}

impl Connection {
    /// Its tools, by name.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        match self {
            Self::Mcp(session) => session.tools(),
            Self::Api(api) => api.tools(),
            Self::Hosted(hosted) => hosted.tools(),
        }
    }

    /// One of its tools.
    #[must_use]
    pub fn tool(&self, name: &ToolName) -> Option<Arc<Tool>> {
        let tools = self.tools();
        let found = tools.binary_search_by(|tool| tool.name().cmp(name)).ok()?;
        tools.get(found).cloned()
    }

    /// With what is to be taken out of its words alone, as far as that is known now.
    pub(crate) fn said(&self, answer: Answer) -> Said {
        let own = match self {
            Self::Mcp(session) => session.scrubs().own(),
            Self::Api(api) => api.scrubs().own(),
            Self::Hosted(_) => None,
        };
        Said { answer, own }
    }

    /// Whether arguments that fit the tool's schema can be sent to it at all.
    ///
    /// # Errors
    /// Says which of them cannot.
    pub fn can_send(&self, tool: &Tool, arguments: &JsonObject) -> Result<(), String> {
        match self {
            Self::Api(api) => api.can_send(tool, arguments),
            // Any JSON object is the arguments of a call.
            Self::Mcp(_) | Self::Hosted(_) => Ok(()),
        }
    }

    /// Waits until a call of this principal, with so many bytes of arguments, can be
    /// sent. The place is held as long as the call goes on. A caller that hosts tools has
    /// no calls but its own, and no places.
    pub async fn place(&self, of: &Arc<str>, bytes: usize) -> Option<Place> {
        match self {
            Self::Mcp(session) => session.places().place(of, bytes).await,
            Self::Api(api) => api.places().place(of, bytes).await,
            Self::Hosted(_) => None,
        }
    }

    /// Calls a tool and waits for its end, however long. Dropping the future
    /// tells the other side that nobody waits any more, as far as it can be
    /// told. An idempotency key goes along where there is a place for it: a
    /// server that knows it carries the same call out once, however often it
    /// is sent. None is sent after `until`, the end of its run, because a token or a
    /// new session took its time.
    pub async fn call(
        &self,
        tool: &Tool,
        arguments: JsonObject,
        idempotency_key: Option<String>,
        until: Instant,
    ) -> Answer {
        match self {
            Self::Mcp(session) => session.call(tool, arguments, idempotency_key, until).await,
            Self::Api(api) => api.call(tool, &arguments, until).await,
            Self::Hosted(hosted) => hosted.call(tool, arguments).await,
        }
    }

    /// Reads one of its resources, of so many bytes at most: its `contents`, as they came.
    /// Dropping the future tells the server that nobody waits any more. None is
    /// asked for after `until`, the end of its run.
    pub async fn read_resource(&self, uri: &str, bytes_max: usize, until: Instant) -> Answer {
        match self {
            Self::Mcp(session) => session.read_resource(uri, bytes_max, until).await,
            Self::Api(_) | Self::Hosted(_) => {
                CallEnd::failed("NoResources", "only MCP servers have resources").into()
            }
        }
    }
}

impl Upstream {
    /// A server that is not started yet, to be talked with on the event loop
    /// `home`. What it says of itself passes `scrubs`.
    #[must_use]
    pub fn new(name: String, config: ServerConfig, scrubs: Arc<Scrubs>, home: Handle) -> Self {
        Self {
            name,
            source: config.source,
            home,
            scrubs,
            breaker: Breaker::new(),
            places: Arc::default(),
            slot: Mutex::default(),
            legacy: AtomicBool::new(false),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server, up, with a current list of tools. Starts it if need be;
    /// whoever asks while it is started shares what becomes of that.
    ///
    /// # Errors
    /// [`UpstreamError`].
    pub async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>, UpstreamError> {
        let mut has_waited = false;
        loop {
            let mut outcome = {
                let mut slot = self.slot();
                if slot.stopped {
                    return Err(UpstreamError::Stopped);
                }
                match &slot.starting {
                    // One that is over and still there panicked.
                    Some(starting) if !starting.task.is_finished() => {
                        // Nobody waits for one that is only tried out.
                        self.breaker.check()?;
                        starting.outcome.clone()
                    }
                    _ => match slot.connection.clone() {
                        Some(connection) if self.is_current(&connection)? => return Ok(connection),
                        stale => self.begin(&mut slot, stale)?,
                    },
                }
            };
            let outcome = match outcome.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(outcome)) => outcome.clone(),
                _ if self.slot().stopped => Err(UpstreamError::Stopped),
                _ => {
                    let reason = "the broker failed, which is a bug".into();
                    Err(UpstreamError::Start { reason })
                }
            };
            let connection = outcome?;
            // What was under way already may have read the list of tools before
            // the server said that it changed. What comes next began later than
            // whoever asks here, and is new enough for it.
            if has_waited || self.is_current(&connection)? {
                return Ok(connection);
            }
            has_waited = true;
        }
    }

    /// The same for somebody to whom it is of no use after `until`. A start goes on.
    ///
    /// # Errors
    /// [`UpstreamError`].
    pub async fn connection_by(
        self: &Arc<Self>,
        until: Option<Instant>,
    ) -> Result<Arc<Connection>, UpstreamError> {
        match until {
            None => self.connection().await,
            Some(until) => {
                timeout_at(until, self.connection()).await.unwrap_or(Err(UpstreamError::Starting))
            }
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        lock(&self.slot)
    }

    /// Whether a connection can be used as it is.
    ///
    /// # Errors
    /// [`UpstreamError::BackOff`], of an HTTP interface that nobody asks now.
    fn is_current(&self, connection: &Connection) -> Result<bool, UpstreamError> {
        match connection {
            Connection::Mcp(session) => Ok(!session.is_closed() && !session.is_stale()),
            Connection::Api(_) | Connection::Hosted(_) => self.breaker.check().map(|()| true),
        }
    }

    /// Has the server brought up where it is talked with.
    ///
    /// # Errors
    /// [`UpstreamError::BackOff`] if it is not to be started now.
    fn begin(
        self: &Arc<Self>,
        slot: &mut Slot,
        stale: Option<Arc<Connection>>,
    ) -> Result<watch::Receiver<Option<Outcome>>, UpstreamError> {
        let admission = match &stale {
            None => Some(self.breaker.enter()?),
            Some(_) => None,
        };
        let (told, outcome) = watch::channel(None);
        let upstream = Arc::clone(self);
        let task = self.home.spawn(async move {
            let outcome = upstream.bring_up(stale, admission).await;
            {
                let mut slot = upstream.slot();
                slot.connection = outcome.as_ref().ok().cloned();
                // Whoever asks from here on does not share this.
                slot.starting = None;
            }
            told.send_replace(Some(outcome));
        });
        slot.starting = Some(Starting { outcome: outcome.clone(), task });
        Ok(outcome)
    }

    async fn bring_up(
        self: &Arc<Self>,
        stale: Option<Arc<Connection>>,
        admission: Option<Admission>,
    ) -> Outcome {
        if let Some(connection) = stale
            && self.made_current(&connection).await
        {
            return Ok(connection);
        }
        let admission = match admission {
            Some(admission) => admission,
            None => self.breaker.enter()?,
        };
        match self.start().await {
            Ok(connection) => {
                admission.stands();
                Ok(Arc::new(connection))
            }
            Err(error) => {
                tracing::warn!(server = self.name, error = ?error.to_string(), "no tool server");
                admission.failed(error.to_string());
                Err(error)
            }
        }
    }

    /// Reads a connection's list of tools again: whether it can be used then.
    async fn made_current(&self, connection: &Connection) -> bool {
        let Connection::Mcp(session) = connection else { return true };
        let reason = if session.is_closed() {
            session.end_of("it ended").await
        } else {
            let asked = Instant::now();
            match session.list().await {
                Ok(()) => return true,
                Err(reason) if session.is_stuck(asked) => {
                    format!("{reason}, and it says nothing else: it is stuck")
                }
                // It was never said to be another, and the next try is not far.
                Err(reason) if session.keeps_its_list() => {
                    tracing::warn!(server = self.name, ?reason, "its old list of tools counts on");
                    return true;
                }
                Err(reason) => reason,
            }
        };
        // A call that was lost with it has said so already, and told the breaker.
        if !session.lose() {
            tracing::warn!(server = self.name, reason = ?reason, "tool server lost");
            if session.since.elapsed() >= HEALTHY_AFTER {
                self.breaker.answered();
            }
            self.breaker.failed(reason);
        }
        false
    }

    async fn start(self: &Arc<Self>) -> Result<Connection, UpstreamError> {
        let began = Instant::now();
        let until = began + START_TIME_MAX;
        let session = match &self.source {
            Source::OpenApi(plan) => {
                let (breaker, places) = (Arc::clone(&self.breaker), Arc::clone(&self.places));
                return Api::new(plan, &self.scrubs, breaker, places)
                    .map(Connection::Api)
                    .map_err(|reason| UpstreamError::Start { reason });
            }
            Source::Stdio(config) => self.start_program(config, until).await?,
            Source::Http(endpoint) => {
                let client = http::Client::new(endpoint, &self.scrubs, true)
                    .map_err(|reason| UpstreamError::Start { reason })?;
                let http = streamable::Mcp::new(client);
                match self.handshake(http.transport(endpoint), until).await {
                    Ok(service) => Session::new(self, service, Line::Http(http)),
                    Err(failed) => {
                        // Whichever it was asked for, the next start begins anew.
                        self.legacy.store(false, Ordering::Release);
                        return Err(self.refusal(failed.reason));
                    }
                }
            }
        };
        let listed = timeout_at(until, session.list()).await;
        if let Err(reason) = listed.unwrap_or_else(|_| Err(not_in_time())) {
            return Err(match session.process() {
                Some(process) => self.not_started(process, &reason).await,
                None => self.refusal(reason),
            });
        }
        let version = session.version();
        // The server's word, like any other.
        let shown = version.as_ref().map(|it| crate::cut(&self.scrubs.text(it.as_str()), 64));
        if let Some(version) = &version {
            self.legacy.store(version.has_initialize(), Ordering::Release);
            if !ProtocolVersion::KNOWN_VERSIONS.contains(version) {
                tracing::warn!(
                    server = self.name,
                    version = ?shown,
                    "of this version nothing is known"
                );
            }
        }
        tracing::info!(
            server = self.name,
            version = ?shown,
            tools = session.tools().len(),
            took_ms = began.elapsed().as_millis() as u64,
            "tool server is up"
        );
        Ok(Connection::Mcp(Box::new(session)))
    }

    /// Starts a program and has the first exchange with it. One that ends over a first
    /// request that is not `initialize`, as some libraries of the older protocol do, is
    /// started once more, to be asked that.
    async fn start_program(
        self: &Arc<Self>,
        config: &Program,
        until: Instant,
    ) -> Result<Session, UpstreamError> {
        let mut is_second = false;
        loop {
            let spawned = stdio::spawn(&self.name, config, &self.scrubs);
            let spawned = timeout_at(until, spawned).await;
            let (transport, process) = spawned.map_err(|_| UpstreamError::Start {
                reason: "the files that it is to be given do not answer in time".to_owned(),
            })??;
            let Unstarted { reason, hung_up } = match self.handshake(transport, until).await {
                Ok(service) => return Ok(Session::new(self, service, Line::Process(process))),
                Err(failed) => failed,
            };
            if hung_up && !is_second && !self.legacy.swap(true, Ordering::AcqRel) {
                is_second = true;
                continue;
            }
            if is_second {
                // That was not it.
                self.legacy.store(false, Ordering::Release);
            }
            return Err(self.not_started(&process, &reason).await);
        }
    }

    /// The first exchange with a server, in the words of its era.
    async fn handshake(
        &self,
        transport: impl Transport<RoleClient> + 'static,
        until: Instant,
    ) -> Result<RunningService<RoleClient, Handler>, Unstarted> {
        let lifecycle = if self.legacy.load(Ordering::Acquire) {
            ClientLifecycleMode::Initialize
        } else {
            ClientLifecycleMode::Auto {
                preferred_versions: vec![ProtocolVersion::V_2026_07_28],
                legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
            }
        };
        let handler = Handler::default();
        let transport = Declined::new(transport, handler.heard());
        let served = handler.serve_with_lifecycle(transport, lifecycle);
        match timeout_at(until, served).await {
            Ok(Ok(service)) => {
                // On unless it is refused: whatever a server said would be kept, and
                // said again in its place once it does not answer.
                service.set_response_cache_config(ClientCacheConfig::disabled()).await;
                Ok(service)
            }
            Ok(Err(error)) => {
                let hung_up = matches!(error, ClientInitializeError::ConnectionClosed(_));
                Err(Unstarted { reason: start_error(&error), hung_up })
            }
            Err(_) => Err(Unstarted { reason: not_in_time(), hung_up: false }),
        }
    }

    fn refusal(&self, reason: String) -> UpstreamError {
        let reason = self.scrubs.text(&reason);
        UpstreamError::Start { reason: crate::cut(&reason, ERROR_TEXT_BYTES_MAX) }
    }

    /// An error with the server's last words, which say more than ours, and with
    /// what it was probably missing.
    async fn not_started(&self, process: &stdio::Process, reason: &str) -> UpstreamError {
        let mut reason = process.end_of(reason, LAST_WORDS_TIME_MAX).await;
        let unseen = match &self.source {
            Source::Stdio(config) => {
                let asked = config.clone();
                crate::beside(move || stranger::unseen(&asked)).await
            }
            Source::Http(_) | Source::OpenApi(_) => None,
        };
        if let Some(path) = unseen {
            let path = path.display();
            reason = format!(
                "{reason}; its arguments name {path}, which it may not read: put it, or its \
                 folder, under `read`"
            );
        }
        self.refusal(reason)
    }

    /// Stops the server, whatever it does, and starts it no more.
    pub async fn stop(&self) {
        let starting = {
            let mut slot = self.slot();
            slot.stopped = true;
            slot.starting.take()
        };
        if let Some(Starting { task, .. }) = starting {
            task.abort();
            // Dropped with its process, or over by now.
            let _ = task.await;
        }
        let connection = self.slot().connection.take();
        if let Some(Connection::Mcp(session)) = connection.as_deref() {
            session.stop().await;
        }
    }
}

/// A first exchange that came to nothing.
struct Unstarted {
    reason: String,
    /// The server closed its end and gave no answer.
    hung_up: bool,
}

/// Said of a server that does not start in its time.
fn not_in_time() -> String {
    format!("no answer within {} s", START_TIME_MAX.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_a_program() -> Arc<Upstream> {
        let source = Source::Stdio(Program {
            command: "/nonexistent/server".into(),
            args: Vec::new(),
            cwd: None,
            env: Default::default(),
            jail: Default::default(),
        });
        let config = ServerConfig { source, scrub: Vec::new() };
        Arc::new(Upstream::new("x".into(), config, Scrubs::new(Vec::new()), Handle::current()))
    }

    /// Puts a start under way that ends with what is sent.
    fn starting(upstream: &Upstream) -> watch::Sender<Option<Outcome>> {
        let (told, outcome) = watch::channel(None);
        let task = tokio::spawn(std::future::pending());
        upstream.slot().starting = Some(Starting { outcome, task });
        told
    }

    /// Somebody who waits for a start that is under way.
    async fn waiting(upstream: &Arc<Upstream>) -> JoinHandle<Outcome> {
        let upstream = Arc::clone(upstream);
        let waits = tokio::spawn(async move { upstream.connection().await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        waits
    }

    #[tokio::test]
    async fn whoever_asks_while_a_server_is_started_shares_what_becomes_of_that() {
        let upstream = without_a_program();
        let told = starting(&upstream);
        let waits = waiting(&upstream).await;
        assert!(!waits.is_finished());
        let error = UpstreamError::Start { reason: "of the one start".into() };
        told.send_replace(Some(Err(error)));
        let shared = waits.await.unwrap().unwrap_err().to_string();
        assert!(shared.contains("of the one start"), "{shared}");
        // Who asks after it tries again.
        upstream.slot().starting.take().unwrap().task.abort();
        assert!(matches!(upstream.connection().await, Err(UpstreamError::Spawn { .. })));
    }

    #[tokio::test]
    async fn nobody_waits_for_a_server_that_is_only_tried_out() {
        let upstream = without_a_program();
        upstream.breaker.failed("once".into());
        upstream.breaker.failed("twice".into());
        tokio::time::sleep(Duration::from_millis(250)).await;
        let _tried = upstream.breaker.enter().unwrap();
        let _told = starting(&upstream);
        assert!(matches!(upstream.connection().await, Err(UpstreamError::BackOff { .. })));
    }

    #[tokio::test]
    async fn the_end_ends_a_start_and_whoever_waits_for_it() {
        let upstream = without_a_program();
        let told = starting(&upstream);
        let waits = waiting(&upstream).await;
        upstream.stop().await;
        drop(told);
        assert!(matches!(waits.await.unwrap(), Err(UpstreamError::Stopped)));
        assert!(matches!(upstream.connection().await, Err(UpstreamError::Stopped)));
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let upstream = without_a_program();
        let error = upstream.connection().await.unwrap_err().to_string();
        assert!(error.contains("/nonexistent/server") && error.contains("not there"), "{error}");
        assert!(matches!(upstream.connection().await, Err(UpstreamError::Spawn { .. })));
        assert!(matches!(upstream.connection().await, Err(UpstreamError::BackOff { .. })));
    }
}
