//! How the door and its service stand, for those who operate them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use forge_log::Seldom;
use forge_protocol::exposition::Exposition;
use forge_protocol::service::{Question, Reply};

use super::access::{self, Access};
use super::problem::Problem;
use super::{Door, answer_json};
use crate::web::places::{self, Connections};

/// Why requests are refused at the door, whatever they ask for.
const REASONS: [&str; 3] = ["unauthenticated", "misdirected", "foreign"];

/// What the door counts.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Answers by the first digit of their status.
    answers: [AtomicU64; 5],
    refusals: [AtomicU64; REASONS.len()],
    pub(crate) connections: Arc<Connections>,
}

impl Counters {
    pub(crate) fn answered(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        self.answers[class - 1].fetch_add(1, Ordering::Relaxed);
    }

    /// Of what is answered so, that it was refused at the door.
    pub(crate) fn refused(&self, reason: &str) {
        static SAID: Seldom = Seldom::each_second();
        let Some(at) = REASONS.iter().position(|it| *it == reason) else { return };
        self.refusals[at].fetch_add(1, Ordering::Relaxed);
        if SAID.is_due_for(reason) {
            tracing::warn!(reason, "a request was refused");
        }
    }

    fn told_to(&self, told: &mut Exposition) {
        const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
        let mut answers = told.counter("forge_http_answers_total", "Answers of the HTTP door.");
        for (class, count) in CLASSES.iter().zip(&self.answers) {
            answers.of(&[("status", class)], count.load(Ordering::Relaxed));
        }
        let help = "Requests that were refused at the door.";
        let mut refusals = told.counter("forge_http_refusals_total", help);
        for (reason, count) in REASONS.iter().zip(&self.refusals) {
            refusals.of(&[("reason", reason)], count.load(Ordering::Relaxed));
        }
        let Connections { open, refused } = &*self.connections;
        told.gauge("forge_http_connections", "Open connections.").is(open.load(Ordering::Relaxed));
        let help = "Connections that there was no room for, or no more.";
        told.counter("forge_http_connections_refused_total", help)
            .is(refused.load(Ordering::Relaxed));
    }
}

/// `GET /healthz`: the door answers.
pub(crate) async fn live() -> Response {
    answer_json(StatusCode::OK, &serde_json::json!({ "status": "live" }))
}

/// `GET /readyz`: so does the service, and it takes runs.
pub(crate) async fn ready(State(door): State<Arc<Door>>) -> Result<Response, Problem> {
    let ready = door.readiness.is_ready(door.client.ask(Question::Status)).await;
    if ready {
        return Ok(answer_json(StatusCode::OK, &serde_json::json!({ "status": "ready" })));
    }
    let detail = "the service takes no runs now";
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", detail))
}

/// `GET /metrics`. They speak of every principal, so no principal's token
/// opens them where there are tokens.
pub(crate) async fn metrics(
    State(door): State<Arc<Door>>,
    of_request: Extensions,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    {
        let options = door.options.borrow();
        match (&options.metrics_token, &options.access) {
            (Some(token), _) => access::carries(&headers, token)?,
            (None, Access::Anybody(_)) => {}
            (None, Access::Tokens(_)) => {
                let detail = "no token is configured for this: [http] metrics_token_sha256";
                return Err(Problem::forbidden(detail));
            }
        }
    }
    places::stay(&of_request, "");
    // In turn: who scrapes often takes nobody's place for a question. How the
    // service stands is asked by one at a time, and is no question there.
    let turn = Arc::clone(&door.operators_questions).acquire_owned().await;
    let asked = door.client.ask_holding(Question::Metrics, turn).await?;
    let Reply::Metrics(text) = asked else { return Err(Problem::gone()) };
    let mut told = Exposition::behind(text);
    door.counters.told_to(&mut told);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], told.into_text()).into_response())
}

/// `GET /openapi.json`
pub(crate) async fn document() -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, kind)], super::DOCUMENT).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::OPERATORS_QUESTIONS_MAX;
    use super::super::tests::door;
    use super::*;

    #[tokio::test]
    async fn scrapes_wait_for_their_turn_and_take_no_principals_place() {
        let (mut service, door) = door().await;
        let door = Arc::new(door);
        let scrape = || metrics(State(Arc::clone(&door)), Extensions::new(), HeaderMap::new());
        // Each is sent, if it is its turn, and cancelled.
        for _ in 0..2 * OPERATORS_QUESTIONS_MAX {
            assert!(tokio::time::timeout(Duration::ZERO, scrape()).await.is_err());
        }
        assert_eq!(door.operators_questions.available_permits(), 0);
        assert_eq!(door.questions.available_permits(), super::super::QUESTIONS_MAX);
        service.answer(1, Reply::Draining).await;
        let turn = door.operators_questions.acquire();
        drop(tokio::time::timeout(Duration::from_secs(30), turn).await.unwrap());
        assert!(tokio::time::timeout(Duration::ZERO, scrape()).await.is_err());
        assert_eq!(door.operators_questions.available_permits(), 0, "it was its turn");
    }
}
