//! A tool server that is a child process: its start, its standard streams and
//! its end.
//!
//! It gets a minimal environment with its own credentials and no descriptor of
//! ours; its process group dies with its connection; what it writes is bounded,
//! cut and scrubbed. Its user, its namespaces and its limits are
//! [`crate::stranger`]'s.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{ClientRequest, ErrorCode, ErrorData, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt as _, Interest};
use tokio::process::{Child, ChildStdout};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::UpstreamError;
use super::lines::Lines;
use super::scrubs::Scrubs;
use crate::config::StdioConfig;
use crate::secret::SECRET_BYTES_MAX;
use crate::stranger;

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
/// Its last lines, told when the server does not start.
const STDERR_LINES_KEPT: usize = 5;

/// Starts the server `name`, with its streams and its process.
///
/// # Errors
/// [`UpstreamError::Spawn`].
pub(super) fn spawn(
    name: &str,
    config: &StdioConfig,
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
    let mut command = stranger::command(config).map_err(unstartable)?;
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
    Ok((StdioTransport { inner, discover: Discover::Settled }, process))
}

/// A server's standard streams, with the answer to `server/discover` written
/// for servers that give none.
pub(super) struct StdioTransport {
    inner: Lines<ChildStdout>,
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

/// Which request a message from the server answers.
pub(super) fn answers(message: &RxJsonRpcMessage<RoleClient>) -> Option<&RequestId> {
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
                            self.inner.forget(&id);
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

    async fn came(&self) {
        // An error means that the runtime ends, and its tasks with it.
        let _ = self.0.readable().await;
    }
}

/// A server's process, and with it its process group.
#[derive(Debug)]
pub(super) struct Process {
    group: Pid,
    exited: watch::Receiver<bool>,
    /// Whether its standard error came to its end.
    silent: watch::Receiver<bool>,
    last_words: Arc<StdMutex<VecDeque<String>>>,
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
        let last_words = Arc::default();
        let (fall_silent, silent) = watch::channel(false);
        if let Some(stderr) = child.stderr.take() {
            let log = StderrLog {
                server: server.to_owned(),
                scrubs: Arc::clone(scrubs),
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
            end.came().await;
            // Whatever it left behind in its group goes too, and nobody else: until
            // it is reaped, its number is no other group's.
            let _ = kill_process_group(group, Signal::KILL);
            let _ = exit.send(true);
            let status = child.wait().await;
            tracing::debug!(server, ?status, "tool server ended");
        });
        Ok(Self { group, exited, silent, last_words })
    }

    pub(super) fn has_exited(&self) -> bool {
        *self.exited.borrow()
    }

    async fn exited(&self) {
        // An error means that the watching task is gone, and with it the child.
        let _ = self.exited.clone().wait_for(|exited| *exited).await;
    }

    /// Its last lines. Its standard error ends a moment after its standard
    /// output, unless it lives on: that moment is waited for.
    pub(super) async fn last_words(&self) -> Vec<String> {
        let mut silent = self.silent.clone();
        let _ = timeout(STOP_TIME_MAX, silent.wait_for(|silent| *silent)).await;
        self.last_words.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn signal(&self, signal: Signal) {
        // Held until it is sent: that it exited is said before it is reaped, and
        // cannot be said meanwhile.
        let exited = self.exited.borrow();
        if !*exited {
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
    scrubs: Arc<Scrubs>,
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
                } else if line.len() < STDERR_LINE_BYTES_READ {
                    line.push(*byte);
                }
            }
        }
        if !line.is_empty() {
            self.line(&line);
        }
    }

    fn line(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = self.scrubs.scrubber().beginning(&line, STDERR_LINE_BYTES_MAX);
        // Escaped here once, so that it is safe wherever it is shown.
        let line = escaped(line.trim_end());
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
    use super::*;
    use crate::secret::Secret;

    fn secret(text: &str) -> Secret {
        Secret::new(text.to_owned()).unwrap()
    }

    fn log(scrubs: Arc<Scrubs>) -> StderrLog {
        StderrLog { server: "x".into(), scrubs, last_words: Arc::default(), logged_bytes: 0 }
    }

    fn kept(last_words: &StdMutex<VecDeque<String>>) -> Vec<String> {
        last_words.lock().unwrap().iter().cloned().collect()
    }

    #[test]
    fn a_token_fetched_after_the_start_leaves_standard_error_too() {
        let scrubs = Scrubs::new(Vec::new());
        let mut log = log(Arc::clone(&scrubs));
        log.line(b"before token-1");
        scrubs.learn("a", &secret("token-1"));
        log.line(b"after token-1");
        assert_eq!(kept(&log.last_words), ["before token-1", "after [credential removed]"]);
    }

    #[tokio::test]
    async fn no_part_of_a_credential_is_left_where_a_line_of_standard_error_is_cut() {
        // Taken out, it leaves room for what stands at the bound.
        let long = "a-long-one".repeat(200);
        let log = log(Scrubs::new(vec![secret(&long), secret("hunter2-hunter2")]));
        let last_words = Arc::clone(&log.last_words);
        let before = STDERR_LINE_BYTES_MAX - long.len() - 10;
        let line = format!("{long}{}hunter2-hunter2{}", "a".repeat(before), "b".repeat(100_000));
        log.follow(line.as_bytes()).await;
        let removed = "[credential removed]";
        assert_eq!(kept(&last_words), [format!("{removed}{}{removed}", "a".repeat(before))]);
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
        let log = log(Scrubs::new(vec![secret("hunter2")]));
        let last_words = Arc::clone(&log.last_words);
        let mut flood = vec![b'a'; 100_000];
        flood.extend_from_slice(
            b"\n\x1b[31mred hunter2\nit's the \xe2\x9a\xa0\xef\xb8\x8f \"last\"",
        );
        log.follow(flood.as_slice()).await;
        let kept = kept(&last_words);
        assert_eq!(kept.len(), 3);
        assert!(kept[0].len() <= 256);
        assert_eq!(kept[1], "\\u{1b}[31mred [credential removed]");
        assert_eq!(kept[2], "it's the \u{26a0}\u{fe0f} \"last\"");
    }
}
