//! Calls of the operations of an HTTP interface, and what becomes of their answers.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::limits::RESPONSE_BYTES_MAX;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, LOCATION};
use rmcp::model::JsonObject;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::http::{BodyError, Client, SendError, body_within, retry_after};
use super::scrubs::Scrubs;
use super::{
    Admission, Answer, Away, Breaker, CallEnd, ERROR_TEXT_BYTES_MAX, Places, Undone, Unread,
    Unusable, has_few_values,
};
use crate::definition::Tool;
use crate::openapi::{Kind, Operation, Plan, Request};

/// What some servers begin JSON with.
const BOM: &[u8] = b"\xEF\xBB\xBF";
/// What is read of an answer that is an error, in bytes.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;

/// An HTTP interface whose operations can be called.
#[derive(Debug)]
pub struct Api {
    operations: Vec<Arc<Operation>>,
    tools: Arc<Vec<Arc<Tool>>>,
    client: Client,
    scrubs: Arc<Scrubs>,
    breaker: Arc<Breaker>,
    places: Arc<Places>,
}

impl Api {
    pub(super) fn new(
        plan: &Plan,
        scrubs: &Arc<Scrubs>,
        breaker: Arc<Breaker>,
        places: Arc<Places>,
    ) -> Result<Self, String> {
        let operations = plan.operations.clone();
        let tools = operations.iter().map(|it| Arc::clone(&it.tool)).collect();
        let client = Client::new(&plan.endpoint, scrubs, false)?;
        let scrubs = Arc::clone(scrubs);
        Ok(Self { operations, tools: Arc::new(tools), client, scrubs, breaker, places })
    }

    /// Its tools, by name.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&self.tools)
    }

    /// What it says passes these.
    pub(super) fn scrubs(&self) -> &Scrubs {
        &self.scrubs
    }

    /// For calls of its operations.
    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    fn operation(&self, tool: &Tool) -> Option<&Operation> {
        let found = self.operations.binary_search_by(|it| it.tool.name().cmp(tool.name()));
        self.operations.get(found.ok()?).map(|it| &**it)
    }

    /// Whether there is a request for these arguments, which fit the tool's schema.
    ///
    /// # Errors
    /// Says which of them cannot be sent.
    pub(crate) fn can_send(&self, tool: &Tool, arguments: &JsonObject) -> Result<(), String> {
        match self.operation(tool) {
            Some(operation) => operation.request.head(arguments).map(drop),
            // Its call says so.
            None => Ok(()),
        }
    }

    /// Calls an operation. An answer that is no success is the tool's own
    /// error; one that does not come at all leaves the outcome unknown, unless
    /// the request was surely not sent. None is after `until`.
    pub(crate) async fn call(&self, tool: &Tool, arguments: &JsonObject, until: Instant) -> Answer {
        let Some(operation) = self.operation(tool) else {
            return CallEnd::undone(Undone::NoSuchTool, "the interface has no such operation")
                .into();
        };
        let request = match operation.request.build(self.client.http(), arguments) {
            Ok(request) => request,
            // `can_send` has said so before.
            Err(why) => return CallEnd::failed("BadArgument", &why).into(),
        };
        let admission = match self.breaker.enter() {
            Ok(admission) => admission,
            Err(source) => {
                let away = Away::of(tool.name().server(), &source);
                return CallEnd::undone(Undone::Unavailable, &away.to_string()).into();
            }
        };
        let response = match self.client.send(request, Some(until)).await {
            Ok(response) => response,
            Err(error) => {
                let why = self.scrubs.text(&error.to_string());
                let Some(end) = error.unsent() else {
                    return self.lost(tool, admission, why).into();
                };
                let reason = crate::cut(&why, ERROR_TEXT_BYTES_MAX);
                tracing::warn!(server = tool.name().server(), ?reason, "nothing was sent");
                // Whose run was over says nothing of the interface.
                match error {
                    SendError::Late => admission.stands(),
                    _ => self.failed(tool, admission, reason),
                }
                return end.into();
            }
        };
        let head = Head::of(&response);
        let limit = match head.status.is_success() {
            true => RESPONSE_BYTES_MAX as usize,
            false => ERROR_BODY_BYTES_MAX,
        };
        let body = body_within(response, limit).await;
        match (&body, head.status) {
            // Whoever stands before the server says that it is not there.
            (
                _,
                status @ (StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT),
            ) => self.failed(tool, admission, format!("it answers {status}")),
            (Err(BodyError::Broken(why)), _) => {
                return self.lost(tool, admission, self.scrubs.text(why)).into();
            }
            _ => admission.answered(),
        }
        head.with(body, &operation.request)
    }

    /// Takes note of a call that may have been carried out. Who has to find out reads
    /// here why. `why` is scrubbed.
    fn lost(&self, tool: &Tool, admission: Admission, why: String) -> CallEnd {
        let reason = crate::cut(&why, ERROR_TEXT_BYTES_MAX);
        tracing::warn!(tool = %tool.name(), ?reason, "call lost");
        self.failed(tool, admission, reason);
        CallEnd::Lost
    }

    /// Takes note of a failure. When from then on nobody asks it for a while, the
    /// operator hears why, and programs do not. `why` is scrubbed.
    fn failed(&self, tool: &Tool, admission: Admission, why: String) {
        let reason = crate::cut(&why, ERROR_TEXT_BYTES_MAX);
        if admission.failed(reason.clone()) {
            tracing::warn!(server = tool.name().server(), ?reason, "interface left alone");
        }
    }
}

/// What an answer says before its body.
struct Head {
    status: StatusCode,
    kind: Kind,
    /// Its body is compressed, which was not asked for.
    is_encoded: bool,
    /// Where what was made or asked for is, of an answer that speaks of that.
    location: Option<String>,
    /// When to come again, of one that is no success.
    retry_after: Option<String>,
}

impl Head {
    fn of(response: &reqwest::Response) -> Self {
        let (status, headers) = (response.status(), response.headers());
        let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let tells = is_made(status) || status.is_redirection();
        let location = headers.get(LOCATION).filter(|_| tells);
        Self {
            status,
            kind: Kind::of(kind.unwrap_or_default()),
            is_encoded: is_encoded(headers),
            location: location.map(|it| String::from_utf8_lossy(it.as_bytes()).into_owned()),
            retry_after: retry_after(response).filter(|_| !status.is_success()),
        }
    }

    /// How a call of this request ended, with what came of the body.
    fn with(self, body: Result<Vec<u8>, BodyError>, request: &Request) -> Answer {
        let Self { status, kind, is_encoded, location, retry_after } = self;
        let end = match body {
            Ok(body) if status.is_success() && is_encoded && !body.is_empty() => {
                CallEnd::Unusable(Unusable::Encoded)
            }
            // Where what was made can be found, if that is all that is said.
            Ok(body) if body.is_empty() && is_made(status) && location.is_some() => {
                CallEnd::Answered(json!({ "location": location }))
            }
            Ok(body) if status.is_success() => return answer(body, kind),
            Err(BodyError::TooLarge { limit }) if status.is_success() => CallEnd::Failed(json!({
                "name": "AnswerTooLarge",
                "message": format!(
                    "{request} answered {status} with more than {limit} bytes: what it did stands, \
                     its answer is dropped",
                ),
                "code": status.as_u16(),
            })),
            other => {
                let said = match other {
                    Ok(body) if is_encoded && !body.is_empty() => {
                        Err("it is compressed, which was not asked for".to_owned())
                    }
                    said => said.map_err(|why| why.to_string()),
                };
                let mut error = error(request, status, said, kind == Kind::Json);
                if let Some(when) = retry_after {
                    error["retryAfter"] = when.into();
                }
                if let Some(location) = location {
                    error["location"] = location.into();
                }
                CallEnd::Failed(error)
            }
        };
        end.into()
    }
}

/// Whether something was made, or is to be.
fn is_made(status: StatusCode) -> bool {
    matches!(status, StatusCode::CREATED | StatusCode::ACCEPTED)
}

/// A successful answer: JSON as it is, text as a string, nothing as null, and what is
/// neither, an image for example, in base64.
fn answer(body: Vec<u8>, kind: Kind) -> Answer {
    if body.is_empty() {
        return CallEnd::Answered(Value::Null).into();
    }
    if kind != Kind::Json {
        // Text in another encoding loses what is no UTF-8. None has a zero.
        let is_text =
            std::str::from_utf8(&body).is_ok() || kind == Kind::Text && !body.contains(&0);
        let end = match is_text {
            true => CallEnd::Answered(text(&body)),
            false => CallEnd::Bytes(json!({"base64": STANDARD.encode(body)}), "base64"),
        };
        return end.into();
    }
    if !has_few_values(&body) {
        return CallEnd::Unusable(Unusable::TooMany).into();
    }
    Unread::Json(body).answer()
}

/// An answer that is JSON, as it says.
pub(super) fn read(body: &[u8]) -> CallEnd {
    let body = body.strip_prefix(BOM).unwrap_or(body);
    forge_protocol::json::from_slice_mended(body)
        .map_or(CallEnd::Unusable(Unusable::NoJson), CallEnd::Answered)
}

fn text(body: &[u8]) -> Value {
    String::from_utf8_lossy(body).into_owned().into()
}

/// Whether an answer is compressed, which none was asked to be.
fn is_encoded(headers: &HeaderMap) -> bool {
    let compressions = ["gzip", "x-gzip", "deflate", "compress", "br", "zstd"];
    let values = headers.get_all(CONTENT_ENCODING).iter();
    values.flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).any(|coding| {
        let coding = coding.trim_ascii();
        compressions.iter().any(|known| coding.eq_ignore_ascii_case(known.as_bytes()))
    })
}

/// An answer that is no success, as the tool's own error. `said` is its body, or why that
/// is not here.
fn error(
    request: &Request,
    status: StatusCode,
    said: Result<Vec<u8>, String>,
    is_json: bool,
) -> Value {
    let (name, hint) = if status.is_redirection() {
        ("Redirect", "; no redirect is followed")
    } else {
        ("HttpError", "")
    };
    let is_json = is_json && !status.is_redirection();
    // Whole, since what is cut through is not known as a credential.
    let data = said.and_then(|body| match body.strip_prefix(BOM).unwrap_or(&body) {
        b"" => Ok(None),
        body if is_json && !has_few_values(body) => Err("it has too many values".to_owned()),
        body if is_json => {
            Ok(Some(forge_protocol::json::from_slice_mended(body).unwrap_or_else(|_| text(body))))
        }
        body => Ok(Some(text(body))),
    });
    let dropped = match &data {
        Ok(_) => String::new(),
        Err(why) => format!("; what it said is dropped: {why}"),
    };
    let mut error = json!({
        "name": name,
        "message": format!("{request} answered {status}{hint}{dropped}"),
        "code": status.as_u16(),
    });
    if let Ok(Some(data)) = data {
        error["data"] = data;
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tests_endpoint;

    #[test]
    fn an_answer_that_is_no_text_loses_nothing() {
        let bytes = |body: &[u8], kind| match answer(body.to_vec(), Kind::of(kind)).read() {
            CallEnd::Bytes(bytes, "base64") => bytes,
            other => panic!("{kind}: {other:?}"),
        };
        let image = b"\x89PNG\r\n\x1a\n\0\0";
        for kind in ["image/png", "text/plain; charset=utf-8", ""] {
            assert_eq!(bytes(image, kind), json!({"base64": "iVBORw0KGgoAAA=="}));
        }
        // No zero is in every image.
        for kind in
            ["image/gif; charset=binary", "application/octet-stream; name=\"a\"", "audio/x; q", ""]
        {
            assert_eq!(bytes(b"p\xe4ss", kind), json!({"base64": "cORzcw=="}));
        }
        let latin = ["text/csv", "application/x; Charset=latin1", "application/atom+xml"];
        for kind in latin.into_iter().chain(["application/xml"]) {
            assert_eq!(answered(b"p\xe4ss", kind), json!("p\u{fffd}ss"), "{kind}");
        }
        for kind in ["text/plain", "image/svg", ""] {
            assert_eq!(answered("p\u{e4}ss\0".as_bytes(), kind), json!("p\u{e4}ss\0"));
        }
    }

    fn answered(body: &[u8], kind: &str) -> Value {
        match answer(body.to_vec(), Kind::of(kind)).read() {
            CallEnd::Answered(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn half_a_character_costs_itself_and_not_its_answer() {
        let expected = json!({"text": "cut \u{fffd}"});
        let json = "application/json; charset=utf-8";
        assert_eq!(answered(br#"{"text":"cut \ud83d"}"#, json), expected);
        assert_eq!(answered(b"{\"text\":\"cut \xf0\x9f\"}", json), expected);
    }

    #[tokio::test]
    async fn a_program_hears_of_an_interface_that_is_left_alone_and_not_why() {
        let paths = json!({"/a": {"get": {"operationId": "a"}}});
        let document = json!({"openapi": "3.1.0", "info": {}, "paths": paths});
        let plan = Plan::of("shop", document.clone(), None, tests_endpoint()).unwrap();
        let breaker = Breaker::new();
        let api = Api::new(&plan, &Scrubs::new(Vec::new()), Arc::clone(&breaker), Arc::default())
            .unwrap();
        breaker.failed("at 10.1.2.3".into());
        breaker.failed("at 10.1.2.3".into());
        let tool = &api.tools()[0];
        let until = Instant::now() + std::time::Duration::from_secs(1);
        let CallEnd::Undone { why, message } =
            api.call(tool, &JsonObject::new(), until).await.read()
        else {
            panic!("it was asked");
        };
        assert_eq!(why, Undone::Unavailable);
        assert!(message.contains("is tried again in") && message.contains("log"), "{message}");
        assert!(!message.contains("10.1.2.3"), "{message}");
    }
}
