//! One tool server: a child process that speaks MCP on its standard streams.
//! It is started when first needed, kept warm, listed again when it says so,
//! started again after it died, and stopped.
//!
//! The server is a stranger. It gets a minimal environment with its own
//! credentials and no descriptor of ours; its process group dies with its
//! connection; what it says is bounded, cut and scrubbed of its credentials
//! before anybody reads it. Deliberately absent are a user of its own,
//! namespaces and resource limits.
//!
//! # Two eras of MCP
//! Servers from 2026-07-28 on answer `server/discover`; older ones want
//! `initialize`. The client asks `server/discover` first and falls back when
//! the server refuses it. Some old servers neither answer nor refuse: after
//! some seconds the refusal is written for them.

mod mcp;
mod stdio;

pub use self::mcp::Connection;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rmcp::model::ProtocolVersion;
use rmcp::{ClientLifecycleMode, ClientServiceExt as _};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use self::mcp::{Handler, start_error};
use self::stdio::Process;
use crate::config::ServerConfig;
use crate::secret::Scrubber;

/// From a server's start to its list of tools.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// A server that stood this long is started again at once.
const HEALTHY_AFTER: Duration = Duration::from_secs(10);
/// The longest wait between two starts.
const BACK_OFF_MAX: Duration = Duration::from_secs(30);

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
    /// The tool answered: its result, scrubbed.
    Answered(Value),
    /// The tool failed: its error as a JSON object, scrubbed.
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

impl Upstream {
    /// A server that is not started yet, to be talked with on the event loop
    /// `home`.
    #[must_use]
    pub fn new(name: String, config: ServerConfig, home: Handle) -> Self {
        let scrubber = Scrubber::new(config.scrub.iter().cloned());
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
        let (transport, process) = stdio::spawn(&self.name, &self.config, &self.scrubber)?;
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
        let connection =
            Connection::new(self.name.clone(), service, process, self.scrubber.clone());
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
        let mut reason = self.scrubber.text(reason);
        let last_words = process.last_words().await;
        if !last_words.is_empty() {
            reason = format!("{reason}; it said: {}", last_words.join(" / "));
        }
        UpstreamError::Start { reason: crate::cut(&reason, ERROR_TEXT_BYTES_MAX) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() {
        assert_eq!(back_off(1), Duration::ZERO);
        assert_eq!(back_off(2), Duration::from_millis(200));
        assert_eq!(back_off(3), Duration::from_millis(400));
        assert_eq!(back_off(200), BACK_OFF_MAX);
    }

    #[tokio::test]
    async fn a_program_that_is_not_there_is_named() {
        let config = ServerConfig {
            command: "/nonexistent/server".into(),
            args: Vec::new(),
            cwd: None,
            env: Default::default(),
            scrub: Vec::new(),
        };
        let upstream = Arc::new(Upstream::new("x".into(), config, Handle::current()));
        let error = upstream.connection().await.unwrap_err().to_string();
        assert!(error.contains("/nonexistent/server") && error.contains("not there"), "{error}");
        assert!(matches!(upstream.connection().await, Err(UpstreamError::Spawn { .. })));
        assert!(matches!(upstream.connection().await, Err(UpstreamError::BackOff { .. })));
    }
}
