//! One tool server: a child process that speaks MCP on its standard streams.
//! It is started when first needed, kept warm, listed again when it says so,
//! started again after it died, and stopped.
//!
//! The server is a stranger, started in a place of its own
//! ([`crate::stranger`]) with no descriptor of ours; what it started dies with
//! its connection; what it says is bounded, cut and scrubbed of credentials
//! before anybody reads it. A call's result is scrubbed by the chain
//! ([`crate::call`]), which says so.
//!
//! # Two eras of MCP
//! Servers from 2026-07-28 on answer `server/discover`; older ones want
//! `initialize`. The client asks `server/discover` first and falls back when
//! the server refuses it. Some old servers neither answer nor refuse: after
//! [`DISCOVER_TIME_MAX`] the refusal is written for them.

use std::collections::VecDeque;
use std::io;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use forge_protocol::name::ToolName;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ClientConfig, ClientRequest,
    ErrorCode, ErrorData, Implementation, JsonObject, JsonRpcMessage, PaginatedRequestParams,
    ProtocolVersion, RequestId,
};
use rmcp::service::{
    ClientInitializeError, NotificationContext, RunningService, RxJsonRpcMessage, ServiceError,
    TxJsonRpcMessage,
};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::{ClientHandler, ClientLifecycleMode, ClientServiceExt as _, RoleClient};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::ServerConfig;
use crate::definition::{Listed, Tool};
use crate::secret::Scrubber;
use crate::stranger;

/// From a server's start to its list of tools.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How long an answer to `server/discover` may take. Some seconds, since a
/// server in a slow language is silent while it starts.
const DISCOVER_TIME_MAX: Duration = Duration::from_secs(4);
/// How long a listing may take once the server is up.
const LIST_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a server may take to end by itself, and again after SIGTERM.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);
/// A server that stood this long is started again at once.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// The longest wait between two starts.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);

/// Tools one server may list.
const TOOLS_MAX: usize = 2_000;
/// Pages its list may have.
const PAGES_MAX: usize = 200;
/// One message from a server, in bytes; a longer one is dropped.
const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// One line of a server's standard error that is kept, in bytes.
const STDERR_LINE_BYTES_MAX: usize = 2 * 1024;
/// All of it that is logged in one process's life, in bytes.
const STDERR_BYTES_MAX: usize = 1024 * 1024;
/// Its last lines, told when the server does not start.
const STDERR_LINES_KEPT: usize = 5;
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
    /// It started, and did not become a usable MCP server.
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
    /// The broker is shutting down.
    #[error("the broker is shutting down")]
    Stopped,
}

/// How a dispatched call ended.
#[derive(Debug)]
pub enum CallEnd {
    /// The tool answered: its result, as it said it.
    Answered(Value),
    /// The tool failed: its error as a JSON object, as it said it.
    Failed(Value),
    /// The server was lost before it answered.
    Lost,
}

/// One configured server.
#[derive(Debug)]
pub struct Upstream {
    name: String,
    config: ServerConfig,
    /// Where the server is talked with: what it says is parsed there, however
    /// much it is, and holds up no other run's calls.
    home: Handle,
    scrubber: Scrubber,
    slot: Mutex<Slot>,
    /// Whether the server is known to want `initialize`.
    legacy: AtomicBool,
}

#[derive(Debug)]
struct Slot {
    connection: Option<Arc<Connection>>,
    failures: u32,
    retry_at: Instant,
    reason: String,
    stopped: bool,
}

/// A server that is up.
#[derive(Debug)]
pub struct Connection {
    server: String,
    service: RunningService<RoleClient, Handler>,
    process: Process,
    scrubber: Scrubber,
    tools: StdMutex<Arc<Vec<Arc<Tool>>>>,
    /// How many changes the server had announced when its tools were listed.
    listed_at_change: AtomicU64,
    /// Set before a caller hears that its call was lost, so that its next one
    /// is not sent the same way.
    lost: AtomicBool,
    since: Instant,
}

impl Upstream {
    /// A server that is not started yet, to be talked with on the event loop
    /// `home`. What it says of itself passes `scrubber`.
    #[must_use]
    pub fn new(name: String, config: ServerConfig, scrubber: Scrubber, home: Handle) -> Self {
        let slot = Slot {
            connection: None,
            failures: 0,
            retry_at: Instant::now(),
            reason: String::new(),
            stopped: false,
        };
        let legacy = AtomicBool::new(false);
        Self { name, config, home, scrubber, slot: Mutex::new(slot), legacy }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server, up, with a current list of tools. Starts it if need be.
    ///
    /// # Errors
    /// [`UpstreamError`].
    pub async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>, UpstreamError> {
        let mut slot = self.slot.lock().await;
        if slot.stopped {
            return Err(UpstreamError::Stopped);
        }
        if let Some(connection) = slot.connection.clone() {
            let failure = if connection.is_closed() {
                Some("it ended".to_owned())
            } else if connection.is_stale() {
                let listing = Arc::clone(&connection);
                self.at_home(async move { listing.list().await }).await.err()
            } else {
                None
            };
            match failure {
                None => return Ok(connection),
                Some(reason) => {
                    tracing::warn!(server = self.name, reason = ?reason, "tool server lost");
                    if connection.since.elapsed() >= HEALTHY_AFTER {
                        slot.failures = 0;
                    }
                    slot.connection = None;
                    slot.failed(reason);
                }
            }
        }
        let now = Instant::now();
        if now < slot.retry_at {
            return Err(UpstreamError::BackOff {
                failures: slot.failures,
                wait_ms: (slot.retry_at - now).as_millis(),
                reason: slot.reason.clone(),
            });
        }
        let starting = Arc::clone(self);
        match self.at_home(async move { starting.start().await }).await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                slot.connection = Some(Arc::clone(&connection));
                Ok(connection)
            }
            Err(error) => {
                tracing::warn!(server = self.name, error = ?error.to_string(), "no tool server");
                slot.failed(error.to_string());
                Err(error)
            }
        }
    }

    /// Does something where the server is talked with. Dropping the future
    /// ends it.
    async fn at_home<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let mut tasks = JoinSet::new();
        tasks.spawn_on(work, &self.home);
        match tasks.join_next().await {
            Some(Ok(done)) => done,
            // Only a panic of ours, or the end of the process, ends it
            // without an outcome.
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            _ => std::future::pending().await,
        }
    }

    async fn start(&self) -> Result<Connection, UpstreamError> {
        let (transport, process) = self.spawn()?;
        let lifecycle = if self.legacy.load(Ordering::Acquire) {
            ClientLifecycleMode::Initialize
        } else {
            ClientLifecycleMode::Auto {
                preferred_versions: vec![ProtocolVersion::V_2026_07_28],
                legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
            }
        };
        let began = Instant::now();
        let served =
            timeout(START_TIME_MAX, Handler::default().serve_with_lifecycle(transport, lifecycle))
                .await;
        let service = match served {
            Ok(Ok(service)) => service,
            Ok(Err(error)) => return Err(self.not_started(&process, &start_error(&error)).await),
            Err(_) => {
                let reason = format!("no answer within {} s", START_TIME_MAX.as_secs());
                return Err(self.not_started(&process, &reason).await);
            }
        };
        let version = service.peer_info().map(|info| info.protocol_version.clone());
        if let Some(version) = &version {
            self.legacy.store(version.has_initialize(), Ordering::Release);
        }
        let connection = Connection {
            server: self.name.clone(),
            service,
            process,
            scrubber: self.scrubber.clone(),
            tools: StdMutex::default(),
            listed_at_change: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            since: Instant::now(),
        };
        if let Err(reason) = connection.list().await {
            return Err(self.not_started(&connection.process, &reason).await);
        }
        tracing::info!(
            server = self.name,
            version = ?version.map(|version| version.to_string()),
            tools = connection.tools().len(),
            took_ms = began.elapsed().as_millis() as u64,
            "tool server is up"
        );
        Ok(connection)
    }

    /// An error with the server's last words, which say more than ours.
    async fn not_started(&self, process: &Process, reason: &str) -> UpstreamError {
        // Its standard error ends a moment after its standard output, unless
        // it lives on.
        let _ = timeout(STOP_TIME_MAX, process.silent()).await;
        let mut reason = self.scrubber.text(reason);
        let last_words = process.last_words();
        if !last_words.is_empty() {
            reason = format!("{reason}; it said: {}", last_words.join(" / "));
        }
        UpstreamError::Start { reason: crate::cut(&reason, ERROR_TEXT_BYTES_MAX) }
    }

    fn spawn(&self) -> Result<(StdioTransport, Process), UpstreamError> {
        let failed = |reason: String| UpstreamError::Spawn {
            command: self.config.command.display().to_string(),
            reason,
        };
        let unstartable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => failed(
                "it is not there (looked up in PATH; a relative path counts from the working \
                 directory)"
                    .into(),
            ),
            _ => failed(error.to_string()),
        };
        let mut command = stranger::command(&self.config).map_err(unstartable)?;
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(unstartable)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("its standard streams are not ours".into()));
        };
        let process = Process::watch(&self.name, child, &self.scrubber)
            .ok_or_else(|| failed("it ended at once".into()))?;
        Ok((StdioTransport::new(stdout, stdin), process))
    }

    /// Stops the server, whatever it does, and starts it no more.
    pub async fn stop(&self) {
        let connection = {
            let mut slot = self.slot.lock().await;
            slot.stopped = true;
            slot.connection.take()
        };
        if let Some(connection) = connection {
            connection.stop().await;
        }
    }
}

impl Slot {
    /// Remembers a failure and when to try again: at once after the first,
    /// then after 200 ms, doubling.
    fn failed(&mut self, reason: String) {
        self.failures = self.failures.saturating_add(1);
        self.reason = reason;
        self.retry_at = Instant::now() + back_off(self.failures);
    }
}

fn back_off(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        more => Duration::from_millis(100)
            .saturating_mul(2u32.saturating_pow(more - 1))
            .min(BACK_OFF_MAX),
    }
}

impl Connection {
    /// Whether no call can be sent any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lost.load(Ordering::Acquire)
            || self.service.is_closed()
            || self.service.is_transport_closed()
            || self.process.has_exited()
    }

    /// Its tools.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&self.tools.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One of its tools.
    #[must_use]
    pub fn tool(&self, name: &ToolName) -> Option<Arc<Tool>> {
        self.tools().iter().find(|tool| tool.name() == name).cloned()
    }

    /// Whether the server said that its tools changed since they were listed.
    fn is_stale(&self) -> bool {
        let announced = self.service.service().changes.load(Ordering::Acquire);
        announced != self.listed_at_change.load(Ordering::Acquire)
    }

    /// Asks for the list of tools, page by page, and takes it over.
    async fn list(&self) -> Result<(), String> {
        let announced = self.service.service().changes.load(Ordering::Acquire);
        let mut listed = Vec::new();
        let pages = async {
            let mut cursor = None;
            for _ in 0..PAGES_MAX {
                let params = PaginatedRequestParams::default().with_cursor(cursor);
                let page = self.service.list_tools(Some(params)).await.map_err(|error| {
                    let error = self.scrubber.text(&error.to_string());
                    format!("tools/list failed: {}", crate::cut(&error, ERROR_TEXT_BYTES_MAX))
                })?;
                listed.extend(page.tools);
                if listed.len() > TOOLS_MAX {
                    return Err(format!("it lists more than {TOOLS_MAX} tools"));
                }
                cursor = page.next_cursor;
                if cursor.is_none() {
                    return Ok(());
                }
            }
            Err(format!("its list of tools has more than {PAGES_MAX} pages"))
        };
        timeout(LIST_TIME_MAX, pages).await.unwrap_or_else(|_| {
            Err(format!("tools/list took more than {} s", LIST_TIME_MAX.as_secs()))
        })?;

        let mut tools: Vec<Arc<Tool>> = Vec::with_capacity(listed.len());
        for tool in listed {
            let name = tool.name.into_owned();
            let listed = Listed {
                name: name.clone(),
                description: tool.description.map(|text| self.scrubber.text(&text)),
                input_schema: self.clean(tool.input_schema),
                output_schema: tool.output_schema.map(|schema| self.clean(schema)),
            };
            match Tool::new(&self.server, listed) {
                Ok(tool) if tools.iter().any(|other| other.name() == tool.name()) => {
                    tracing::warn!(server = self.server, tool = ?name, "tool listed twice");
                }
                Ok(tool) => tools.push(Arc::new(tool)),
                Err(error) => {
                    let (tool, error) = (crate::cut(&name, 256), error.to_string());
                    tracing::warn!(server = self.server, ?tool, ?error, "tool left out");
                }
            }
        }
        tools.sort_by(|a, b| a.name().cmp(b.name()));
        *self.tools.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tools);
        self.listed_at_change.store(announced, Ordering::Release);
        Ok(())
    }

    fn clean(&self, schema: Arc<JsonObject>) -> JsonObject {
        let clean = |(key, value)| (key, self.scrubber.json(value));
        Arc::unwrap_or_clone(schema).into_iter().map(clean).collect()
    }

    /// Calls a tool and waits for its end, however long. Dropping the future
    /// tells the server that nobody waits any more.
    pub async fn call(&self, tool: &Tool, arguments: JsonObject) -> CallEnd {
        let params =
            CallToolRequestParams::new(tool.name().tool().to_owned()).with_arguments(arguments);
        let failed = |text: &str| CallEnd::Failed(json!({ "error": text }));
        match self.service.call_tool_once(params).await {
            Ok(CallToolResponse::Complete(result)) => {
                let is_error = result.is_error == Some(true);
                let content = serde_json::to_value(&result.content).unwrap_or(Value::Null);
                if is_error {
                    let text: Vec<&str> = result
                        .content
                        .iter()
                        .filter_map(|block| block.as_text().map(|text| text.text.as_str()))
                        .collect();
                    let mut error = json!({ "error": text.join("\n"), "content": content });
                    if let Some(structured) = result.structured_content {
                        error["structuredContent"] = structured;
                    }
                    return CallEnd::Failed(error);
                }
                let response = result.structured_content.unwrap_or(content);
                CallEnd::Answered(response)
            }
            Ok(CallToolResponse::InputRequired(_)) => {
                failed("the tool asks its user for input, and a run has none")
            }
            Ok(CallToolResponse::Task(_)) => failed("the tool answers with a task: not supported"),
            Ok(_) => failed("the tool answers in a way this broker does not know"),
            Err(ServiceError::McpError(error)) => CallEnd::Failed(json!({
                "error": error.message,
                "code": error.code.0,
                "data": error.data,
            })),
            Err(ServiceError::UnexpectedResponse) => failed("the answer is no tool result"),
            // The request may or may not have reached the server.
            Err(_) => {
                self.lost.store(true, Ordering::Release);
                CallEnd::Lost
            }
        }
    }

    async fn stop(&self) {
        self.service.cancellation_token().cancel();
        self.process.stop().await;
    }
}

/// What went wrong at the start, without the debug output of whole messages.
fn start_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::ConnectionClosed(_) => "it closed its standard output".into(),
        ClientInitializeError::TransportError { .. } => "it closed its standard input".into(),
        ClientInitializeError::JsonRpcError(error) => {
            format!("it refused: {} ({})", error.message, error.code.0)
        }
        other => crate::cut(&other.to_string(), ERROR_TEXT_BYTES_MAX),
    }
}

/// The client's side of MCP: declines whatever a server asks.
#[derive(Debug, Default)]
struct Handler {
    /// How often the server announced that its tools changed.
    changes: AtomicU64,
}

impl ClientHandler for Handler {
    fn get_info(&self) -> ClientConfig {
        let own = Implementation::new("forge-toolbroker", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), own)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

/// A server's standard streams, with the answer to `server/discover` written
/// for servers that give none.
struct StdioTransport {
    inner: AsyncRwTransport<RoleClient, ChildStdout, ChildStdin>,
    discover: Discover,
}

enum Discover {
    /// Not asked, or answered.
    Settled,
    /// Asked, and to be answered by then.
    Asked { id: RequestId, until: Instant },
    /// Answered for the server; its own answer would come too late.
    GivenUp { id: RequestId },
}

impl StdioTransport {
    fn new(stdout: ChildStdout, stdin: ChildStdin) -> Self {
        let inner = AsyncRwTransport::new(stdout, stdin).with_max_line_length(MESSAGE_BYTES_MAX);
        Self { inner, discover: Discover::Settled }
    }
}

/// Which request a message from the server answers.
fn answers(message: &RxJsonRpcMessage<RoleClient>) -> Option<&RequestId> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

impl Transport<RoleClient> for StdioTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), io::Error>> + Send + 'static {
        if let JsonRpcMessage::Request(request) = &message
            && matches!(request.request, ClientRequest::DiscoverRequest(_))
        {
            let until = Instant::now() + DISCOVER_TIME_MAX;
            self.discover = Discover::Asked { id: request.id.clone(), until };
        }
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let message = match &self.discover {
                Discover::Asked { id, until } => {
                    tokio::select! {
                        message = self.inner.receive() => message?,
                        () = sleep_until(*until) => {
                            let id = id.clone();
                            self.discover = Discover::GivenUp { id: id.clone() };
                            let silent = "no answer: taken for a server of the older protocol";
                            let error =
                                ErrorData::new(ErrorCode::METHOD_NOT_FOUND, silent, None);
                            return Some(JsonRpcMessage::error(error, Some(id)));
                        }
                    }
                }
                _ => self.inner.receive().await?,
            };
            match &self.discover {
                Discover::GivenUp { id } if answers(&message) == Some(id) => {
                    self.discover = Discover::Settled;
                }
                Discover::Asked { id, .. } if answers(&message) == Some(id) => {
                    self.discover = Discover::Settled;
                    return Some(message);
                }
                _ => return Some(message),
            }
        }
    }

    fn close(&mut self) -> impl Future<Output = Result<(), io::Error>> + Send {
        self.inner.close()
    }
}

/// A server's process, and with it its process group.
#[derive(Debug)]
struct Process {
    group: Pid,
    exited: watch::Receiver<bool>,
    /// Whether its standard error came to its end.
    silent: watch::Receiver<bool>,
    last_words: Arc<StdMutex<VecDeque<String>>>,
}

impl Process {
    /// Watches over a child that leads its own process group. `None` if it
    /// was reaped already.
    fn watch(server: &str, mut child: Child, scrubber: &Scrubber) -> Option<Self> {
        let group = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?))?;
        let last_words = Arc::default();
        let (fall_silent, silent) = watch::channel(false);
        if let Some(stderr) = child.stderr.take() {
            let log = StderrLog {
                server: server.to_owned(),
                scrubber: scrubber.clone(),
                last_words: Arc::clone(&last_words),
                logged_bytes: 0,
            };
            tokio::spawn(async move {
                log.follow(stderr).await;
                let _ = fall_silent.send(true);
            });
        }
        let (exit, exited) = watch::channel(false);
        let server = server.to_owned();
        tokio::spawn(async move {
            let status = child.wait().await;
            tracing::debug!(server, ?status, "tool server ended");
            // Whatever it left behind in its group goes too. While members
            // live, the kernel gives the group's number to nobody else.
            let _ = kill_process_group(group, Signal::KILL);
            let _ = exit.send(true);
        });
        Some(Self { group, exited, silent, last_words })
    }

    fn has_exited(&self) -> bool {
        *self.exited.borrow()
    }

    async fn exited(&self) {
        // An error means that the watching task is gone, and with it the child.
        let _ = self.exited.clone().wait_for(|exited| *exited).await;
    }

    async fn silent(&self) {
        let _ = self.silent.clone().wait_for(|silent| *silent).await;
    }

    fn last_words(&self) -> Vec<String> {
        self.last_words.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn signal(&self, signal: Signal) {
        if !self.has_exited() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    /// Waits for the end of a server whose standard input is closed; helps it
    /// along with SIGTERM, then SIGKILL.
    async fn stop(&self) {
        for signal in [Signal::TERM, Signal::KILL] {
            if timeout(STOP_TIME_MAX, self.exited()).await.is_ok() {
                return;
            }
            self.signal(signal);
        }
        let _ = timeout(STOP_TIME_MAX, self.exited()).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Follows a server's standard error, line by line, within bounds.
struct StderrLog {
    server: String,
    scrubber: Scrubber,
    last_words: Arc<StdMutex<VecDeque<String>>>,
    logged_bytes: usize,
}

impl StderrLog {
    async fn follow(mut self, mut stderr: impl AsyncRead + Unpin) {
        let mut buffer = [0; 4096];
        let mut line = Vec::new();
        loop {
            let got = match stderr.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(got) => got,
            };
            for byte in &buffer[..got] {
                if *byte == b'\n' {
                    self.line(&std::mem::take(&mut line));
                } else if line.len() < STDERR_LINE_BYTES_MAX {
                    line.push(*byte);
                }
            }
        }
        if !line.is_empty() {
            self.line(&line);
        }
    }

    fn line(&mut self, line: &[u8]) {
        let line = self.scrubber.text(&String::from_utf8_lossy(line));
        // Escaped here once, so that it is safe wherever it is shown.
        let line = line.trim_end().escape_debug().to_string();
        if self.logged_bytes <= STDERR_BYTES_MAX {
            self.logged_bytes += line.len().max(1);
            if self.logged_bytes > STDERR_BYTES_MAX {
                tracing::debug!(server = self.server, "its standard error is logged no more");
            } else {
                tracing::debug!(server = self.server, line, "tool server says");
            }
        }
        let mut kept = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == STDERR_LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(crate::cut(&line, 256));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    #[test]
    fn the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() {
        assert_eq!(back_off(1), Duration::ZERO);
        assert_eq!(back_off(2), Duration::from_millis(200));
        assert_eq!(back_off(3), Duration::from_millis(400));
        assert_eq!(back_off(200), BACK_OFF_MAX);
    }

    #[tokio::test]
    async fn a_flood_on_standard_error_is_bounded_escaped_and_scrubbed() {
        let last_words = Arc::default();
        let log = StderrLog {
            server: "x".into(),
            scrubber: Scrubber::new([Secret::new("hunter2".into()).unwrap()]),
            last_words: Arc::clone(&last_words),
            logged_bytes: 0,
        };
        let mut flood = vec![b'a'; 100_000];
        flood.extend_from_slice(b"\n\x1b[31mred hunter2\nlast");
        log.follow(flood.as_slice()).await;
        let kept: Vec<String> = last_words.lock().unwrap().iter().cloned().collect();
        assert_eq!(kept.len(), 3);
        assert!(kept[0].len() <= 256);
        assert_eq!(kept[1], "\\u{1b}[31mred [credential removed]");
        assert_eq!(kept[2], "last");
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let config = ServerConfig {
            command: "/nonexistent/server".into(),
            args: Vec::new(),
            cwd: None,
            env: Default::default(),
            scrub: Vec::new(),
            jail: Default::default(),
        };
        let upstream =
            Arc::new(Upstream::new("x".into(), config, Scrubber::default(), Handle::current()));
        let error = upstream.connection().await.unwrap_err().to_string();
        assert!(error.contains("/nonexistent/server") && error.contains("not there"), "{error}");
        assert!(matches!(upstream.connection().await, Err(UpstreamError::Spawn { .. })));
        assert!(matches!(upstream.connection().await, Err(UpstreamError::BackOff { .. })));
    }
}
