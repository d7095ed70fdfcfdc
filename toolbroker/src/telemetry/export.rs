//! The task that sends spans: many at once, one request at a time.
//!
//! What cannot be delivered is tried again as the specification says
//! (<https://opentelemetry.io/docs/specs/otlp/>, "Failures": 429, 502, 503
//! and 504, and where there was no answer at all), a few times, while the
//! queue fills; then it is dropped and counted.

use std::sync::Arc;
use std::time::Duration;

use forge_log::Seldom;
use reqwest::Client;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::otlp::Rejected;
use super::{Span, otlp};
use crate::metrics::Metrics;
use crate::upstream::http::{body_within, explain};

/// Spans of one request.
const BATCH_SPANS_MAX: usize = 512;
/// How long a first span waits for company.
const GATHER: Duration = Duration::from_secs(1);
/// How long one request may take.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// How often the same spans are sent, at most.
const TRIES_MAX: u32 = 4;
/// The wait before the second try; each further one is twice as long.
const RETRY_AFTER_FIRST: Duration = Duration::from_secs(1);
/// The longest wait that a collector may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// An answer longer than this is not read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

pub(super) struct Export {
    spans: mpsc::Receiver<Span>,
    client: Client,
    collector: Url,
    metrics: Arc<Metrics>,
    closing: CancellationToken,
}

/// Why a collector did not take spans.
struct Refused {
    why: String,
    /// When it is worth another try, if it is: at once or after a time of the
    /// collector's choice.
    again: Option<Option<Duration>>,
}

impl Export {
    pub(super) fn new(
        spans: mpsc::Receiver<Span>,
        client: Client,
        collector: Url,
        metrics: Arc<Metrics>,
        closing: CancellationToken,
    ) -> Self {
        Self { spans, client, collector, metrics, closing }
    }

    /// Sends until nobody can tell anything any more, or it is to close: then
    /// what waits is sent, and that is all.
    pub(super) async fn run(mut self) {
        let mut batch = Vec::new();
        loop {
            self.gather(&mut batch).await;
            if batch.is_empty() {
                return;
            }
            self.deliver(&batch).await;
            batch.clear();
        }
    }

    /// Waits for a first span, and a moment for more. None at the end.
    async fn gather(&mut self, batch: &mut Vec<Span>) {
        let mut until = None;
        while batch.len() < BATCH_SPANS_MAX {
            let room = BATCH_SPANS_MAX - batch.len();
            let moment = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.closing.cancelled(), if !self.spans.is_closed() => self.spans.close(),
                received = self.spans.recv_many(batch, room) => {
                    if received == 0 {
                        return;
                    }
                    until = until.or(Some(Instant::now() + GATHER));
                }
                () = moment => return,
            }
        }
    }

    async fn deliver(&self, batch: &[Span]) {
        static TOLD: Seldom = Seldom::each_second();
        let body = otlp::request(batch);
        let mut wait = RETRY_AFTER_FIRST;
        for tried in 1.. {
            let Refused { why, again } = match self.post(body.clone()).await {
                Ok(Rejected { spans, why }) => {
                    let rejected = spans.min(batch.len() as u64);
                    if let Some(why) = why.filter(|_| TOLD.is_due()) {
                        tracing::warn!(rejected, why, "the collector took spans in part");
                    }
                    self.metrics.spans_exported(batch.len() as u64 - rejected);
                    self.metrics.spans_dropped(rejected);
                    return;
                }
                Err(refused) => refused,
            };
            match again {
                Some(asked) if tried < TRIES_MAX && !self.closing.is_cancelled() => {
                    tokio::select! {
                        () = sleep(asked.unwrap_or(wait).min(RETRY_AFTER_MAX)) => {}
                        () = self.closing.cancelled() => {}
                    }
                    wait *= 2;
                }
                _ => {
                    self.metrics.spans_dropped(batch.len() as u64);
                    tracing::warn!(
                        spans = batch.len(),
                        why,
                        "the collector did not take spans: see [telemetry] in forge.toml"
                    );
                    return;
                }
            }
        }
    }

    /// Sends once: what of these the collector says it rejected.
    async fn post(&self, body: String) -> Result<Rejected, Refused> {
        let request = self
            .client
            .post(self.collector.clone())
            .header(CONTENT_TYPE, "application/json")
            .timeout(REQUEST_TIME_MAX)
            .body(body);
        let response = request.send().await.map_err(|error| Refused {
            why: crate::cut(&explain(&error), 256),
            again: Some(None),
        })?;
        let status = response.status();
        if status.is_success() {
            // Whatever is wrong with the answer, the spans are there.
            let answer = body_within(response, ANSWER_BYTES_MAX).await.unwrap_or_default();
            return Ok(otlp::rejected(&answer));
        }
        let asked = response.headers().get(RETRY_AFTER).and_then(|after| {
            // A date is the other form of it; nobody needs to be that exact.
            Some(Duration::from_secs(after.to_str().ok()?.parse().ok()?))
        });
        let is_worth_it = matches!(status.as_u16(), 429 | 502 | 503 | 504);
        Err(Refused { why: format!("it answered {status}"), again: is_worth_it.then_some(asked) })
    }
}
