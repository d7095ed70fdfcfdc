//! Whether the service behind a door takes runs.

use std::time::Duration;

use forge_protocol::service::Reply;
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long the service may take to say how it stands.
const STATUS_TIME_MAX: Duration = Duration::from_secs(2);
/// How long what it said is good for: anybody may ask, and many may.
const STATUS_TIME: Duration = Duration::from_millis(200);

/// As it said last.
#[derive(Debug, Default)]
pub(crate) struct Readiness(Mutex<Option<(Instant, bool)>>);

/// What a door reads of a service's status.
#[derive(Deserialize)]
struct Status {
    state: String,
}

impl Readiness {
    /// Whether it does now, by what `ask` answers for its status.
    pub(crate) async fn is_ready<E>(&self, ask: impl Future<Output = Result<Reply, E>>) -> bool {
        let mut last = self.0.lock().await;
        if let Some((at, ready)) = *last
            && at.elapsed() < STATUS_TIME
        {
            return ready;
        }
        let ready = match tokio::time::timeout(STATUS_TIME_MAX, ask).await {
            Ok(Ok(Reply::Status(json))) => {
                serde_json::from_str(&json).is_ok_and(|status: Status| status.state == "serving")
            }
            _ => false,
        };
        *last = Some((Instant::now(), ready));
        ready
    }
}
