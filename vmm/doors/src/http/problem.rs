//! What is answered instead of what was asked for: `application/problem+json`
//! (RFC 9457) with a stable `kind`, which is a report's where there is one.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forge_client::ClientError;
use forge_protocol::broker::RefusalKind;
use forge_protocol::ending::RunEnd;
use forge_protocol::limits::REASON_BYTES_MAX;
use serde::Serialize;
use serde_json::value::RawValue;

use super::events::End;
use crate::web::token::Unauthenticated;

/// After how many seconds one who was refused for lack of room may try again,
/// where nobody said more.
const RETRY_AFTER_S: u64 = 1;

/// Why there is no other answer.
#[derive(Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    kind: String,
    detail: String,
    report: Option<Box<RawValue>>,
    retry_after_s: u64,
    /// Of one who is not known.
    challenge: Option<HeaderValue>,
}

/// As it is sent.
#[derive(Serialize)]
pub(crate) struct Body<'a> {
    title: &'static str,
    status: u16,
    kind: &'a str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<&'a RawValue>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, kind: &str, detail: impl Into<String>) -> Self {
        let (kind, detail) = (kind.into(), cut(detail.into()));
        let retry_after_s = RETRY_AFTER_S;
        Self { status, kind, detail, report: None, retry_after_s, challenge: None }
    }

    /// Nobody knows who asks.
    pub(crate) fn unauthenticated(why: Unauthenticated) -> Self {
        let problem = Self::new(StatusCode::UNAUTHORIZED, "unauthenticated", why.what());
        Self { challenge: Some(why.challenge()), ..problem }
    }

    /// The request is not what it has to be.
    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_request", detail)
    }

    pub(crate) fn too_large(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
    }

    pub(crate) fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    pub(crate) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", detail)
    }

    /// The caller has as much under way as it may.
    pub(crate) fn overloaded(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", detail)
    }

    /// The service went away, and nothing had been asked of it.
    pub(crate) fn gone() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "the service went away")
    }

    /// The service went away with a run. It says nothing of coming again: who did would
    /// have done twice what the run did.
    pub(crate) fn lost() -> Self {
        let detail = "the service went away: whether the run had begun is not known, and the \
                      journal has what it called";
        Self::new(StatusCode::BAD_GATEWAY, "service_lost", detail)
    }

    /// With the report of a run that did not take place, and when it says to
    /// come again.
    pub(crate) fn with_report(self, end: &End) -> Self {
        let said = end.head.retry_after_ms.map(|ms| ms.div_ceil(1000));
        let retry_after_s = said.unwrap_or_default().max(RETRY_AFTER_S);
        Self { report: Some(end.raw_report()), retry_after_s, ..self }
    }

    /// As JSON.
    pub(crate) fn body(&self) -> Body<'_> {
        Body {
            title: self.status.canonical_reason().unwrap_or_default(),
            status: self.status.as_u16(),
            kind: &self.kind,
            detail: &self.detail,
            report: self.report.as_deref(),
        }
    }
}

#[cfg(test)]
impl<'a> Body<'a> {
    pub(crate) fn status(&self) -> u16 {
        self.status
    }

    pub(crate) fn kind(&self) -> &'a str {
        self.kind
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&self.body()).unwrap_or_default();
        let kind = HeaderValue::from_static("application/problem+json");
        let mut response = (self.status, [(header::CONTENT_TYPE, kind)], body).into_response();
        let headers = response.headers_mut();
        if let Some(challenge) = self.challenge {
            headers.insert(header::WWW_AUTHENTICATE, challenge);
        }
        match self.status {
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::CONFLICT => {
                headers.insert(header::RETRY_AFTER, self.retry_after_s.into());
            }
            // RFC 9110, 15.5.22: what to upgrade to; and 7.8: as an option of this
            // connection.
            StatusCode::UPGRADE_REQUIRED => {
                headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
                headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
                // RFC 6455, 4.2.2: the versions that are understood.
                headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
            }
            _ => {}
        }
        response
    }
}

/// What a client sent may be repeated in what is said of it, at any length.
fn cut(mut text: String) -> String {
    if text.len() > REASON_BYTES_MAX {
        text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
        text.push('…');
    }
    text
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Self {
        let ClientError::Refused { kind, message } = error else { return Self::gone() };
        let status = match kind {
            RefusalKind::NoSuchTool | RefusalKind::BadRequest => StatusCode::UNPROCESSABLE_ENTITY,
            RefusalKind::BadGrant | RefusalKind::Forbidden | RefusalKind::NotReviewed => {
                StatusCode::FORBIDDEN
            }
            RefusalKind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            RefusalKind::Away | RefusalKind::ServerAway => StatusCode::SERVICE_UNAVAILABLE,
            // Of runs alone, whose results say it.
            RefusalKind::OutOfTime => StatusCode::GATEWAY_TIMEOUT,
            RefusalKind::Internal | RefusalKind::Journal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, RunEnd::from(kind).kind(), message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_toolbroker_that_is_away_is_no_lack_of_room() {
        let of = |kind| Problem::from(ClientError::Refused { kind, message: String::new() });
        let away = of(RefusalKind::Away);
        assert_eq!((away.body().status(), away.body().kind()), (503, "broker_away"));
        assert_eq!(of(RefusalKind::Overloaded).body().status(), 429);
    }

    #[test]
    fn nobody_is_told_to_repeat_a_run_that_was_lost() {
        let lost = Problem::lost().into_response();
        assert_eq!(lost.status(), StatusCode::BAD_GATEWAY);
        assert!(!lost.headers().contains_key(header::RETRY_AFTER));
        let gone = Problem::gone().into_response();
        assert!(gone.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn a_problem_repeats_no_more_than_a_reason_may_have() {
        let detail = Problem::bad_request("é".repeat(REASON_BYTES_MAX)).detail;
        assert!(detail.len() < REASON_BYTES_MAX + 4 && detail.ends_with("é…"), "{}", detail.len());
        assert_eq!(Problem::bad_request("short").detail, "short");
    }
}
