//! Spans of runs and calls, for a collector that the operator names.
//!
//! ```text
//!  a call ends ──▶ Spans::tell ──▶ queue, bounded ──▶ one task ──▶ POST /v1/traces
//!                      └─ full: dropped and counted      └─ refused: dropped and counted
//! ```
//!
//! What a span may hold is its type: a run's id, a tool that the grant names,
//! effect, code, times. There is no place in it for arguments, results or
//! reasons, so none can come to a collector, whatever is logged; and what was
//! refused for not being granted is told without its tool, whose name the
//! program chose, as callers choose those of the tools that they host.
//!
//! A collector is a stranger that may be slow, gone or wrong. Telling a span
//! never waits: what does not fit into the queue is dropped and counted.
//! Deliberately absent are sampling, headers (a collector beside the broker
//! adds what another one asks for) and a copy on the disk: the journal is the
//! record, and a trace is a picture of it.
//!
//! | module | what it holds |
//! |---|---|
//! | `otlp` | spans as OTLP writes them, in JSON |
//! | `export` | the task that sends them |

mod export;
mod otlp;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::name::ToolName;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::definition::Effect;
use crate::journal::Close;
use crate::locks::lock;
use crate::metrics::Metrics;
use crate::upstream::http::plain_client;

/// Spans that wait to be sent, at most.
pub const QUEUE_SPANS_MAX: usize = 2_048;
/// How long the end of a broker may take for what still waits.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(2);

/// What a collector is told of.
#[derive(Clone, Debug)]
pub enum Span {
    /// A run's link was closed. Told of runs that made a call.
    Run(RunSpan),
    /// A call settled.
    Call(CallSpan),
}

/// A run, from its opening to the end of its link.
#[derive(Clone, Debug)]
pub struct RunSpan {
    /// Which; it is the id of the trace as well.
    pub run: RunId,
    /// When it ended, in nanoseconds since the Unix epoch.
    pub ended_unix_ns: u64,
    /// How long it was open.
    pub took: Duration,
    /// How its link ended.
    pub how: Close,
}

/// A call, from its arrival to its end.
#[derive(Clone, Debug)]
pub struct CallSpan {
    /// Its run.
    pub run: RunId,
    /// Its number in the run.
    pub call: u32,
    /// The tool; `None` if the grant names none of that name.
    pub tool: Option<CalledTool>,
    /// What the operator says it does; `None` if it was refused before that
    /// was looked up.
    pub effect: Option<Effect>,
    /// `None` for a response.
    pub code: Option<CallCode>,
    /// Whether a credential was taken out of its result.
    pub redacted: bool,
    /// When it ended, in nanoseconds since the Unix epoch.
    pub ended_unix_ns: u64,
    /// How long it took.
    pub took: Duration,
    /// What it passed.
    pub steps: Steps,
}

/// A tool as it is told and counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CalledTool {
    /// One of the configuration's.
    Named(ToolName),
    /// One that the caller hosts. Its name is the caller's, of which there would be
    /// as many as callers please.
    Hosted,
}

impl CalledTool {
    /// What stands for every server and tool of callers. No server has such a name.
    const HOSTED: &str = "(hosted)";

    /// Its name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Named(tool) => tool.as_str(),
            Self::Hosted => Self::HOSTED,
        }
    }

    /// Its server's.
    #[must_use]
    pub fn server(&self) -> &str {
        match self {
            Self::Named(tool) => tool.server(),
            Self::Hosted => Self::HOSTED,
        }
    }
}

/// The steps of a call that it came to, each since its arrival.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps {
    /// It passed every check.
    pub authorised: Option<Duration>,
    /// The journal took its intent.
    pub intended: Option<Duration>,
    /// Its tool answered.
    pub answered: Option<Duration>,
}

/// Where spans are told. Clones lead to the same collector.
#[derive(Clone, Debug)]
pub struct Spans {
    queue: mpsc::Sender<Span>,
    metrics: Arc<Metrics>,
    exporter: Arc<Exporter>,
}

#[derive(Debug)]
struct Exporter {
    closing: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Spans {
    /// Sends spans to `collector`, the whole address that they are posted to,
    /// from the event loop `home`.
    ///
    /// # Errors
    /// Says what is wrong with the host's certificates.
    pub fn start(collector: Url, metrics: Arc<Metrics>, home: &Handle) -> Result<Self, String> {
        let client = plain_client(reqwest::header::HeaderMap::new(), &[])?;
        let (queue, spans) = mpsc::channel(QUEUE_SPANS_MAX);
        let closing = CancellationToken::new();
        let export =
            export::Export::new(spans, client, collector, Arc::clone(&metrics), closing.clone());
        let task = Mutex::new(Some(home.spawn(export.run())));
        Ok(Self { queue, metrics, exporter: Arc::new(Exporter { closing, task }) })
    }

    /// Tells a span. Never waits.
    pub fn tell(&self, span: Span) {
        if self.queue.try_send(span).is_err() {
            self.metrics.spans_dropped(1);
        }
    }

    /// Sends what still waits, for a moment, and ends. What is told after
    /// that is dropped.
    pub async fn close(&self) {
        self.exporter.closing.cancel();
        let task = lock(&self.exporter.task).take();
        let Some(mut task) = task else { return };
        match timeout(CLOSE_TIME_MAX, &mut task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "bug: the exporter of spans panicked"),
            Err(_) => {
                task.abort();
                tracing::warn!("the collector did not take the last spans in time");
            }
        }
    }
}
