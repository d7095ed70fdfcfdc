//! A tool server that is a child process: its start, its standard streams and
//! its end.
//!
//! It gets a minimal environment with its own credentials and no descriptor of
//! ours; its process group dies with its connection; what it writes is bounded,
//! cut and scrubbed. Its user, its namespaces and its limits are
//! [`crate::stranger`]'s.

use std::collections::VecDeque;
use std::fmt::{self, Display, Formatter};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::Stdio;
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{
    ClientNotification, ClientRequest, DiscoverResult, ErrorCode, ErrorData, InitializeResult,
    JsonRpcMessage, ProtocolVersion, RequestId, ServerResult,
};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt as _, Interest};
use tokio::process::{Child, ChildStdout};
use tokio::sync::watch;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep_until, timeout};

use super::UpstreamError;
use super::lines::Lines;
use super::received::{answers, is_of_another_request};
use super::scrubs::Scrubs;
use crate::locks::lock;
use crate::secret::SECRET_BYTES_MAX;
use crate::stranger::{self, Program};

/// How long an answer to `server/discover` may take. Some seconds, since a
/// server in a slow language is silent while it starts.
const DISCOVER_TIME_MAX: Duration = Duration::from_secs(4);
/// How long a server may take to end by itself, and again after SIGTERM.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);

/// One line of a server's standard error that is shown, in bytes.
const STDERR_LINE_BYTES_MAX: usize = 2 * 1024;
/// What is read of it: a credential that begins in what is shown is looked for
/// whole, or its beginning would not be known as one.
const STDERR_LINE_BYTES_READ: usize = STDERR_LINE_BYTES_MAX + SECRET_BYTES_MAX as usize;
/// All of it that is logged in one process's life, in bytes.
const STDERR_BYTES_MAX: usize = 1024 * 1024;
/// Its last lines, told when the server does not start, and how much of one, in bytes.
const STDERR_LINES_KEPT: usize = 5;
const LAST_WORD_BYTES_MAX: usize = 256;

/// Starts the server `name`, with its streams and its process.
///
/// # Errors
/// [`UpstreamError::Spawn`].
pub(super) async fn spawn(
    name: &str,
    config: &Program,
    scrubs: &Arc<Scrubs>,
) -> Result<(StdioTransport, Process), UpstreamError> {
    let failed = |reason: String| UpstreamError::Spawn {
        command: config.command.display().to_string(),
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
    // Of files that it asks for, any may lie where nobody answers.
    let asked = config.clone();
    let look = move || Ok((stranger::command(&asked)?, stranger::lacking(&asked)));
    let (mut command, lacking) = crate::beside(look).await.map_err(unstartable)?;
    for argument in lacking.arguments {
        tracing::warn!(
            server = name,
            argument,
            "this argument names what is not there, in a folder that the server is not given: it \
             cannot make it. Make it first, or put the folder under `write` in forge.toml"
        );
    }
    for variable in lacking.variables {
        tracing::warn!(
            server = name,
            variable,
            "this variable names a file or folder that the server is not given: put that under \
             `write` or `read` in forge.toml, or the server finds another or none there"
        );
    }
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
    let process = Process::watch(name, child, scrubs)
        .map_err(|error| failed(format!("it cannot be watched: {error}")))?;
    let inner = Lines::new(name, stdout, stdin);
    Ok((StdioTransport::new(inner, DISCOVER_TIME_MAX), process))
}

/// A server's standard streams, with the answer to `server/discover` written
/// for servers that give none, and that to `initialize` for those that gave theirs
/// late.
pub(super) struct StdioTransport<R = ChildStdout> {
    inner: Lines<R>,
    discover: Discover,
    discover_time: Duration,
}

impl<R> StdioTransport<R> {
    fn new(inner: Lines<R>, discover_time: Duration) -> Self {
        Self { inner, discover: Discover::Settled, discover_time }
    }
}

enum Discover {
    /// Not asked, or answered.
    Settled,
    /// Asked, and to be answered by then.
    Asked { id: RequestId, until: Instant },
    /// Answered for the server, which is then asked in the older protocol's words.
    GivenUp(Box<Late>),
    /// It answered late, and speaks the newer protocol all the same.
    Newer,
}

/// What a server says that was silent for too long. One of the newer protocol
/// that only took its time to start reads both questions at once: it answers the
/// first, and refuses the second.
struct Late {
    discover: RequestId,
    initialize: Option<RequestId>,
    /// Its answer to the first: `None` within if that is of no use.
    said: Option<Option<DiscoverResult>>,
    /// Its refusal of the second.
    refused: Option<RxJsonRpcMessage<RoleClient>>,
}

/// What becomes of a message.
enum Heard {
    /// It waits for another, or is nobody's.
    Kept,
    Passes(RxJsonRpcMessage<RoleClient>),
    /// The first exchange is over with it.
    Ends(RxJsonRpcMessage<RoleClient>, Discover),
}

impl Late {
    fn new(discover: RequestId) -> Self {
        Self { discover, initialize: None, said: None, refused: None }
    }

    fn hears(&mut self, message: RxJsonRpcMessage<RoleClient>) -> Heard {
        match answers(&message) {
            Some(id) if *id == self.discover => self.said = Some(newer(message)),
            Some(id) if self.initialize.as_ref() == Some(id) => match &message {
                // One that has said already that it speaks the newer protocol may
                // not know this method at all.
                JsonRpcMessage::Error(error)
                    if error.error.code == ErrorCode::UNSUPPORTED_PROTOCOL_VERSION
                        || matches!(self.said, Some(Some(_))) =>
                {
                    self.refused = Some(message);
                }
                _ => return Heard::Ends(message, Discover::Settled),
            },
            _ => return Heard::Passes(message),
        }
        if self.said.is_none() {
            return Heard::Kept;
        }
        let Some(refused) = self.refused.take() else { return Heard::Kept };
        match (self.said.take().flatten(), self.initialize.take()) {
            (Some(said), Some(id)) => {
                let result = ServerResult::InitializeResult(initialized(said));
                Heard::Ends(JsonRpcMessage::response(result, id), Discover::Newer)
            }
            _ => Heard::Ends(refused, Discover::Settled),
        }
    }
}

/// What an answer to `server/discover` says, if it is that of a server of the
/// newer protocol.
fn newer(message: RxJsonRpcMessage<RoleClient>) -> Option<DiscoverResult> {
    match message {
        JsonRpcMessage::Response(response) => match response.result {
            ServerResult::DiscoverResult(said)
                if said.supported_versions.contains(&ProtocolVersion::V_2026_07_28) =>
            {
                Some(said)
            }
            _ => None,
        },
        _ => None,
    }
}

/// The same as an answer to `initialize`, by whose version the library knows that
/// the newer protocol is spoken.
fn initialized(said: DiscoverResult) -> InitializeResult {
    let server = said.server_info();
    let mut result = InitializeResult::new(said.capabilities)
        .with_protocol_version(ProtocolVersion::V_2026_07_28);
    if let Some(server) = server {
        result = result.with_server_info(server);
    }
    result.instructions = said.instructions;
    result
}

impl<R: AsyncRead + Unpin + Send> Transport<RoleClient> for StdioTransport<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), io::Error>> + Send + 'static {
        let mut is_sent = true;
        match &message {
            JsonRpcMessage::Request(request) => match (&request.request, &mut self.discover) {
                (ClientRequest::DiscoverRequest(_), discover) => {
                    let until = Instant::now() + self.discover_time;
                    *discover = Discover::Asked { id: request.id.clone(), until };
                }
                (ClientRequest::InitializeRequest(_), Discover::GivenUp(late)) => {
                    late.initialize = Some(request.id.clone());
                }
                _ => {}
            },
            JsonRpcMessage::Notification(said) => {
                // Which the newer protocol does not have.
                let ends =
                    matches!(said.notification, ClientNotification::InitializedNotification(_));
                is_sent = !(ends && matches!(self.discover, Discover::Newer));
            }
            _ => {}
        }
        let sent = is_sent.then(|| self.inner.send(message));
        async move {
            match sent {
                Some(sent) => sent.await,
                None => Ok(()),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            let message = match &self.discover {
                Discover::Asked { id, until } => {
                    tokio::select! {
                        message = self.inner.receive() => message?,
                        () = sleep_until(*until) => {
                            let id = id.clone();
                            self.discover = Discover::GivenUp(Box::new(Late::new(id.clone())));
                            self.inner.give_up(&id);
                            let silent = "no answer: taken for a server of the older protocol";
                            let error =
                                ErrorData::new(ErrorCode::METHOD_NOT_FOUND, silent, None);
                            return Some(JsonRpcMessage::error(error, Some(id)));
                        }
                    }
                }
                _ => self.inner.receive().await?,
            };
            match &mut self.discover {
                Discover::GivenUp(late) => match late.hears(message) {
                    Heard::Kept => {}
                    Heard::Passes(message) => return Some(message),
                    Heard::Ends(message, next) => {
                        self.discover = next;
                        return Some(message);
                    }
                },
                Discover::Asked { id, .. } if answers(&message) == Some(id) => {
                    let id = id.clone();
                    self.discover = Discover::Settled;
                    if !is_of_another_request(&message) {
                        return Some(message);
                    }
                    // Some answer whatever they are asked.
                    let what = "its answer is none to what was asked: taken for a server of the \
                                older protocol";
                    let error = ErrorData::new(ErrorCode::METHOD_NOT_FOUND, what, None);
                    return Some(JsonRpcMessage::error(error, Some(id)));
                }
                _ => return Some(message),
            }
        }
    }

    fn close(&mut self) -> impl Future<Output = Result<(), io::Error>> + Send {
        self.inner.close()
    }
}

/// The end of a process, known before anybody reaps it.
struct End(AsyncFd<OwnedFd>);

impl End {
    /// Of a child that was not reaped.
    #[expect(
        deprecated,
        reason = "what replaces it is unsafe, for types that may change their descriptor \
                  while it is watched; an OwnedFd cannot"
    )]
    fn of(child: Pid) -> io::Result<Self> {
        let child = pidfd_open(child, PidfdFlags::empty())?;
        Ok(Self(AsyncFd::with_interest(child, Interest::READABLE)?))
    }

    async fn came(&self) -> Ending {
        // An error means that the runtime ends, and its tasks with it.
        let _ = self.0.readable().await;
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = waitid(WaitId::PidFd(self.0.get_ref().as_fd()), look).ok().flatten();
        match status.map(|it| (it.exit_status(), it.terminating_signal())) {
            Some((Some(status), _)) => Ending::Exited(status),
            Some((_, Some(signal))) => Ending::Killed(signal),
            _ => Ending::Unknown,
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Exited(i32),
    Killed(i32),
    Unknown,
}

impl Display for Ending {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            // As shells tell it, and what stands between us and a server.
            Self::Exited(status @ 129..=192) => {
                write!(f, "it exited with status {status}, as by signal {}", status - 128)
            }
            Self::Exited(status) => write!(f, "it exited with status {status}"),
            Self::Killed(signal) => write!(f, "signal {signal} ended it"),
            Self::Unknown => f.write_str("it ended"),
        }
    }
}

/// A server's process, and with it its process group.
#[derive(Debug)]
pub(super) struct Process {
    group: Pid,
    /// How, once it has.
    ended: watch::Receiver<Option<Ending>>,
    /// Whether its standard error came to its end.
    silent: watch::Receiver<bool>,
    last_words: Arc<LastWords>,
}

/// The last lines of a server's standard error, as they came.
#[derive(Debug)]
struct LastWords {
    scrubs: Arc<Scrubs>,
    lines: StdMutex<VecDeque<Vec<u8>>>,
}

impl LastWords {
    fn of(scrubs: &Arc<Scrubs>) -> Arc<Self> {
        Arc::new(Self { scrubs: Arc::clone(scrubs), lines: StdMutex::default() })
    }

    fn add(&self, mut line: Vec<u8>) {
        line.shrink_to_fit();
        let mut kept = lock(&self.lines);
        if kept.len() == STDERR_LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(line);
    }

    /// As they may be told.
    fn told(&self) -> Vec<String> {
        let kept = lock(&self.lines);
        kept.iter().map(|line| crate::cut(&self.shown(line), LAST_WORD_BYTES_MAX)).collect()
    }

    /// A line without credentials, and escaped once, so that it is safe wherever it is shown.
    fn shown(&self, line: &[u8]) -> String {
        let line = String::from_utf8_lossy(line);
        let line = self.scrubs.scrubber().beginning(&line, STDERR_LINE_BYTES_MAX);
        escaped(line.trim_end())
    }
}

impl Process {
    /// Watches over a child that leads its own process group.
    ///
    /// # Errors
    /// If it was reaped already, or there are no descriptors left.
    fn watch(server: &str, mut child: Child, scrubs: &Arc<Scrubs>) -> io::Result<Self> {
        let id = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
        let group = id.ok_or(io::ErrorKind::NotFound)?;
        let end = End::of(group)?;
        let last_words = LastWords::of(scrubs);
        let (fall_silent, silent) = watch::channel(false);
        if let Some(stderr) = child.stderr.take() {
            let log = StderrLog {
                server: server.to_owned(),
                last_words: Arc::clone(&last_words),
                logged_bytes: 0,
            };
            tokio::spawn(async move {
                log.follow(stderr).await;
                let _ = fall_silent.send(true);
            });
        }
        let (end_it, ended) = watch::channel(None);
        let server = server.to_owned();
        tokio::spawn(async move {
            let ending = end.came().await;
            // Whatever it left behind in its group goes too, and nobody else: until
            // it is reaped, its number is no other group's.
            let _ = kill_process_group(group, Signal::KILL);
            let _ = end_it.send(Some(ending));
            let status = child.wait().await;
            tracing::debug!(server, ?status, "tool server ended");
        });
        Ok(Self { group, ended, silent, last_words })
    }

    pub(super) fn has_exited(&self) -> bool {
        self.ended.borrow().is_some()
    }

    async fn exited(&self) {
        // An error means that the watching task is gone, and with it the child.
        let _ = self.ended.clone().wait_for(Option::is_some).await;
    }

    /// What is known of its end, behind `what`: how it came, and its last lines. Both are
    /// told a moment after its standard output ends, unless it lives on: that moment is
    /// waited for, and no longer than `most`.
    pub(super) async fn end_of(&self, what: &str, most: Duration) -> String {
        let mut silent = self.silent.clone();
        let _ = timeout(most, async {
            let _ = silent.wait_for(|silent| *silent).await;
            self.exited().await;
        })
        .await;
        let mut told = what.to_owned();
        if let Some(ending) = *self.ended.borrow() {
            told = format!("{told}; {ending}");
        }
        let lines = self.last_words.told();
        if !lines.is_empty() {
            told = format!("{told}; it said: {}", lines.join(" / "));
        }
        told
    }

    fn signal(&self, signal: Signal) {
        // Held until it is sent: that it exited is said before it is reaped, and
        // cannot be said meanwhile.
        let ended = self.ended.borrow();
        if ended.is_none() {
            let _ = kill_process_group(self.group, signal);
        }
    }

    /// Waits for the end of a server whose standard input is closed; helps it
    /// along with SIGTERM, then SIGKILL.
    pub(super) async fn stop(&self) {
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
    last_words: Arc<LastWords>,
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
                    self.line(std::mem::take(&mut line));
                    // Many come with one read, and each is to count.
                    consume_budget().await;
                } else if line.len() < STDERR_LINE_BYTES_READ {
                    line.push(*byte);
                }
            }
        }
        if !line.is_empty() {
            self.line(line);
        }
    }

    fn line(&mut self, line: Vec<u8>) {
        if self.logged_bytes <= STDERR_BYTES_MAX && tracing::enabled!(tracing::Level::DEBUG) {
            let line = self.last_words.shown(&line);
            self.logged_bytes += line.len().max(1);
            if self.logged_bytes > STDERR_BYTES_MAX {
                tracing::debug!(server = self.server, "its standard error is logged no more");
            } else {
                tracing::debug!(server = self.server, line, "tool server says");
            }
        }
        self.last_words.add(line);
    }
}

/// Text that no terminal takes for a command. Quotes are none.
fn escaped(text: &str) -> String {
    let (mut escaped, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['\'', '"']) {
        escaped.extend(rest[..at].escape_debug());
        escaped.push_str(&rest[at..=at]);
        rest = &rest[at + 1..];
    }
    escaped.extend(rest.escape_debug());
    escaped
}

#[cfg(test)]
mod tests {
    use super::super::scrubs::IssuedBy;
    use super::*;
    use crate::secret::Secret;

    /// What a server says that reads two questions before it answers the first.
    async fn handshake(first: &str, second: &str) -> (Option<ProtocolVersion>, Vec<String>) {
        use rmcp::{ClientLifecycleMode, ClientServiceExt as _};
        use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, duplex};
        let (stdin, asked) = duplex(64 * 1024);
        let (mut says, stdout) = duplex(64 * 1024);
        let said = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":0,{first}}}\n{{\"jsonrpc\":\"2.0\",\"id\":1,{second}}}\n"
        );
        let server = tokio::spawn(async move {
            let mut asked = BufReader::new(asked).lines();
            let mut methods = Vec::new();
            while let Ok(Some(line)) = asked.next_line().await {
                let line: serde_json::Value = serde_json::from_str(&line).unwrap();
                methods.push(line["method"].as_str().unwrap_or_default().to_owned());
                match methods.len() {
                    2 => says.write_all(said.as_bytes()).await.unwrap(),
                    // Its standard output ends with this.
                    3 => break,
                    _ => {}
                }
            }
            methods
        });
        let transport = StdioTransport::new(Lines::new("x", stdout, stdin), Duration::ZERO);
        let lifecycle = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::LATEST_WITH_INITIALIZE),
        };
        let version = match ().serve_with_lifecycle(transport, lifecycle).await {
            Ok(client) => {
                let version = client.peer_info().map(|info| info.protocol_version.clone());
                let _ = client.list_tools(None).await;
                version
            }
            Err(_) => None,
        };
        (version, server.await.unwrap())
    }

    #[tokio::test]
    async fn a_slow_server_is_spoken_to_in_the_protocol_that_it_answers_with() {
        let newer = r#""result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"ttlMs":0,"cacheScope":"private"}"#;
        let unknown = r#""error":{"code":-32601,"message":"no such method"}"#;
        let refused = r#""error":{"code":-32022,"message":"only 2026-07-28"}"#;
        let older = r#""result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"x","version":"1"}}"#;
        let asked = |third: &str| {
            ["server/discover", "initialize", third].iter().map(|it| (*it).to_owned()).collect()
        };
        assert_eq!(
            handshake(newer, refused).await,
            (Some(ProtocolVersion::V_2026_07_28), asked("tools/list"))
        );
        for first in [newer, unknown] {
            assert_eq!(
                handshake(first, older).await,
                (Some(ProtocolVersion::V_2025_06_18), asked("notifications/initialized"))
            );
        }
        assert_eq!(handshake(unknown, refused).await.0, None);
    }

    #[test]
    fn a_late_answer_counts_whichever_comes_first() {
        let message =
            |text: &str| serde_json::from_str::<RxJsonRpcMessage<RoleClient>>(text).unwrap();
        let said = r#"{"jsonrpc":"2.0","id":0,"result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{},"ttlMs":0,"cacheScope":"private"}}"#;
        let refused = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32022,"message":"?"}}"#;
        for order in [[said, refused], [refused, said]] {
            let mut late = Late::new(RequestId::Number(0));
            late.initialize = Some(RequestId::Number(1));
            assert!(matches!(late.hears(message(order[0])), Heard::Kept));
            let Heard::Ends(JsonRpcMessage::Response(answer), Discover::Newer) =
                late.hears(message(order[1]))
            else {
                panic!("{order:?}");
            };
            assert_eq!(answer.id, RequestId::Number(1));
        }
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.to_owned()).unwrap()
    }

    fn log(scrubs: &Arc<Scrubs>) -> StderrLog {
        StderrLog { server: "x".into(), last_words: LastWords::of(scrubs), logged_bytes: 0 }
    }

    #[tokio::test]
    async fn a_token_fetched_after_the_start_leaves_standard_error_too() {
        let scrubs = Scrubs::new(Vec::new());
        let mut log = log(&scrubs);
        log.line(b"says token-1".into());
        assert_eq!(log.last_words.told(), ["says token-1"]);
        scrubs.learn("a", &secret("token-1"), IssuedBy::Named).await;
        assert_eq!(log.last_words.told(), ["says [credential removed]"]);
    }

    #[tokio::test]
    async fn no_part_of_a_credential_is_left_where_a_line_of_standard_error_is_cut() {
        let log = log(&Scrubs::new(vec![secret("a-frequent-one"), secret("hunter2-hunter2")]));
        let last_words = Arc::clone(&log.last_words);
        // Taken out, they leave room for what stands at the bound.
        let many = "a-frequent-one".repeat(140);
        let before = STDERR_LINE_BYTES_MAX - many.len() - 10;
        let line = format!("{many}{}hunter2-hunter2{}", "a".repeat(before), "b".repeat(100_000));
        log.follow(line.as_bytes()).await;
        let removed = "[credential removed]";
        assert_eq!(last_words.told(), [format!("{removed}{}{removed}", "a".repeat(before))]);
    }

    #[tokio::test]
    async fn a_flood_on_standard_error_leaves_the_thread_to_others() {
        let others = tokio::spawn(async {});
        log(&Scrubs::new(Vec::new())).follow(b"\n".repeat(1_000).as_slice()).await;
        assert!(others.is_finished(), "nobody else had a turn");
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_known_while_its_number_is_still_its_own() {
        for seconds in ["0", "0.2"] {
            let mut command = tokio::process::Command::new("sleep");
            let mut child = command.arg(seconds).process_group(0).spawn().unwrap();
            let id = child.id().unwrap();
            End::of(Pid::from_raw(id.cast_signed()).unwrap()).unwrap().came().await;
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
            assert!(stat.contains(") Z "), "{stat}");
            assert!(child.wait().await.unwrap().success());
        }
    }

    #[tokio::test]
    async fn a_flood_on_standard_error_is_bounded_escaped_and_scrubbed() {
        let log = log(&Scrubs::new(vec![secret("hunter2")]));
        let last_words = Arc::clone(&log.last_words);
        let mut flood = vec![b'a'; 100_000];
        flood.extend_from_slice(
            b"\n\x1b[31mred hunter2\nit's the \xe2\x9a\xa0\xef\xb8\x8f \"last\"",
        );
        log.follow(flood.as_slice()).await;
        let kept = last_words.told();
        assert_eq!(kept.len(), 3);
        assert!(kept[0].len() <= 256);
        assert_eq!(kept[1], "\\u{1b}[31mred [credential removed]");
        assert_eq!(kept[2], "it's the \u{26a0}\u{fe0f} \"last\"");
    }
}
