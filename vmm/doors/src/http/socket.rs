//! `/v1/runs/ws`: runs over a WebSocket, with tools that the client hosts.
//!
//! Every message is a JSON object with one field, which says what it is. The
//! client numbers its runs; a number is free again when its `finished` came, or a
//! `problem` that is `over`. Closing the socket cancels its runs.
//!
//! ```text
//!   client                                    door
//!   {"submit": {"number": 1, "run": …}}  ───▶
//!        ◀───  {"event": {"number": 1, "event": "log", "data": …}}
//!        ◀───  {"callback": {"number": 1, "callback": 0, "tool": …, "arguments": …}}
//!   {"settle": {"number": 1, "callback": 0, "result": …}}  ───▶
//!   {"cancel": {"number": 1}}  ───▶                            perhaps
//!        ◀───  {"finished": {"number": 1, "report": …}}
//! ```
//!
//! The door takes from the service whatever comes, at once, so that one client
//! that reads slowly holds up nobody else: what waits for it is bounded. Of events,
//! which a program makes as it likes, it misses those that there is no room for, and
//! is told how many. One that lets all else grow further is cut off.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Extension, State};
use axum::http::header::{CONTENT_LENGTH, SEC_WEBSOCKET_KEY, TRANSFER_ENCODING};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forge_client::{Canceller, Run, RunMessage};
use forge_protocol::json;
use forge_protocol::limits::RESPONSE_BYTES_MAX;
use forge_protocol::service::{Callback, Finish, RunEvent};
use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Number, json};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::access::Bearer;
use super::events::{End, Events, Happened, happened};
use super::order::{self, HostedBody, MESSAGE_BYTES_MAX, RunBody, bounded, present};
use super::problem::{self, Problem};
use super::runs;
use super::tenant::{Kept, Tenant};
use super::{Caller, Door};
use crate::object::Object;
use crate::web::is_set;
use crate::web::places::Standing;

/// Runs of one socket at the same time.
const RUNS_MAX: usize = 16;
/// Events of one run that may wait for a client to take them: as many as are kept
/// for whoever follows one by server-sent events.
const EVENTS_UNSENT_MAX: usize = 4096;
/// How long a client may take for one message. Nothing else is looked at
/// meanwhile.
const SEND_TIME_MAX: Duration = Duration::from_secs(60);
/// How long what is known of runs may still be told when the door closes.
const REST_TIME_MAX: Duration = Duration::from_secs(3);
/// How often a silent client is asked whether it is there; one of which nothing
/// came for twice that long is not.
const PING_EVERY: Duration = Duration::from_secs(30);

/// What a client says.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum FromClient {
    Submit(Object<Box<Submit>>),
    Settle(Object<Settle>),
    Cancel(Object<Cancel>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Submit {
    #[serde(deserialize_with = "number")]
    number: u32,
    run: Object<RunBody>,
    #[serde(default)]
    hosted: Option<Object<HostedBody>>,
    #[serde(default)]
    events: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settle {
    #[serde(deserialize_with = "number")]
    number: u32,
    #[serde(deserialize_with = "callback")]
    callback: u32,
    #[serde(default, deserialize_with = "present")]
    result: Option<Box<RawValue>>,
    #[serde(default)]
    error: Option<Box<RawValue>>,
}

/// A tool's own error.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolError {
    name: String,
    message: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cancel {
    #[serde(deserialize_with = "number")]
    number: u32,
}

fn number<'de, D: Deserializer<'de>>(field: D) -> Result<u32, D::Error> {
    in_range("number", field)
}

fn callback<'de, D: Deserializer<'de>>(field: D) -> Result<u32, D::Error> {
    in_range("callback", field)
}

/// A number that a client counts by. What is none is said of its field.
fn in_range<'de, D: Deserializer<'de>>(name: &str, field: D) -> Result<u32, D::Error> {
    u32::deserialize(field).map_err(|error| {
        D::Error::custom(format!("{name} is an integer from 0 to {}: {error}", u32::MAX))
    })
}

/// What the door says.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum ToClient<'a> {
    Event {
        number: u32,
        event: &'static str,
        data: &'a RawValue,
    },
    Callback {
        number: u32,
        callback: u32,
        tool: &'a str,
        arguments: &'a RawValue,
    },
    Finished {
        number: u32,
        report: &'a RawValue,
    },
    /// `over` says whether the number is free now. That is as the client wrote it,
    /// though it is out of range.
    Problem {
        number: Option<Number>,
        over: bool,
        problem: problem::Body<'a>,
    },
}

/// The goodbye to who sent what cannot be read (RFC 6455, 7.4.1).
fn unreadable(error: axum::Error) -> (u16, &'static str) {
    match error.into_inner().downcast_ref() {
        Some(tungstenite::Error::Capacity(_)) => (1009, "a message has at most 17 MiB"),
        Some(tungstenite::Error::Utf8(_)) => (1007, "a text is no UTF-8"),
        _ => (1002, "this is no frame that is taken here"),
    }
}

impl ToClient<'_> {
    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

fn complaint(number: Option<Number>, over: bool, problem: &Problem) -> String {
    ToClient::Problem { number, over, problem: problem.body() }.text()
}

/// What a run's task has for the socket.
struct Said {
    /// Told before it: how many events there was no room for.
    missed: Option<String>,
    text: String,
    /// The run that is over with this.
    over: Option<u32>,
}

impl Said {
    fn bytes(&self) -> usize {
        self.missed.as_ref().map_or(0, String::len) + self.text.len()
    }
}

/// The same, with its room among what waits for the principal's clients.
struct Unsent {
    said: Said,
    _room: OwnedSemaphorePermit,
    /// An event's place among those of its run.
    _place: Option<OwnedSemaphorePermit>,
}

/// `GET /v1/runs/ws`
pub(crate) async fn open(
    State(door): State<Arc<Door>>,
    caller: Caller,
    Extension(standing): Extension<Arc<Standing>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Problem> {
    let upgrade = upgrade.map_err(|error| {
        let detail = format!("open a WebSocket (RFC 6455, version 13) here: {error}");
        let status = match error {
            // It did ask for one.
            WebSocketUpgradeRejection::WebSocketKeyHeaderMissing(_) => StatusCode::BAD_REQUEST,
            _ => StatusCode::UPGRADE_REQUIRED,
        };
        Problem::new(status, "bad_request", detail)
    })?;
    check_handshake(&headers)?;
    let upgrade = upgrade.max_message_size(MESSAGE_BYTES_MAX).max_frame_size(MESSAGE_BYTES_MAX);
    let Caller { tenant, permit, bearer } = caller;
    let permits = (permit, tenant.socket()?);
    standing.outlast();
    Ok(upgrade.on_upgrade(move |socket| async move {
        let (sender, said) = mpsc::unbounded_channel();
        let (runs, stuck) = (HashMap::new(), Arc::new(Notify::new()));
        let talk = Talk { door, tenant, bearer, sender, runs, stuck, standing, _permits: permits };
        talk.converse(socket, said).await;
    }))
}

/// What RFC 6455 (4.2.1) asks of a request beside what was looked at: a key of 16 bytes,
/// and no body, which whoever is in between could take for frames.
fn check_handshake(headers: &HeaderMap) -> Result<(), Problem> {
    let key = headers.get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
    let is_key = BASE64_STANDARD.decode(key).is_ok_and(|key| key.len() == 16);
    let has_body = headers.contains_key(TRANSFER_ENCODING)
        || headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0");
    let why = match (is_key, has_body) {
        (true, false) => return Ok(()),
        (false, _) => "`Sec-WebSocket-Key` is 16 bytes as base64",
        (true, true) => "a request for a WebSocket has no body",
    };
    Err(Problem::bad_request(format!("open a WebSocket (RFC 6455, version 13) here: {why}")))
}

/// One socket.
struct Talk {
    door: Arc<Door>,
    tenant: Arc<Tenant>,
    bearer: Bearer,
    /// What waits in it is bounded by its room.
    sender: mpsc::UnboundedSender<Unsent>,
    runs: HashMap<u32, Canceller>,
    /// Told when the client takes so little that a run was given up.
    stuck: Arc<Notify>,
    /// Its place among connections, and what has come on it.
    standing: Arc<Standing>,
    /// Its places among requests under way and sockets.
    _permits: (Arc<OwnedSemaphorePermit>, OwnedSemaphorePermit),
}

impl Talk {
    async fn converse(mut self, mut socket: WebSocket, mut said: mpsc::UnboundedReceiver<Unsent>) {
        let mut closing = self.door.closing.subscribe();
        let bearer = self.bearer.clone();
        let mut revoked = pin!(bearer.revoked());
        let mut ping = tokio::time::interval(PING_EVERY);
        let mut heard = tokio::time::Instant::now();
        let mut heard_bytes = self.standing.heard_bytes();
        let mut is_closed = false;
        let goodbye = loop {
            let message = tokio::select! {
                message = socket.recv() => match message {
                    Some(Ok(message)) => message,
                    Some(Err(error)) => break Some(unreadable(error)),
                    None => break None,
                },
                Some(Unsent { said, .. }) = said.recv() => {
                    if !self.say(&mut socket, said).await {
                        break None;
                    }
                    continue;
                }
                _ = ping.tick() => {
                    // A client that is at a long message cannot say anything else.
                    let so_far = self.standing.heard_bytes();
                    if std::mem::replace(&mut heard_bytes, so_far) != so_far {
                        heard = tokio::time::Instant::now();
                    }
                    if heard.elapsed() > 2 * PING_EVERY
                        || !send(&mut socket, Message::Ping(Default::default())).await
                    {
                        break None;
                    }
                    continue;
                }
                () = self.stuck.notified() => {
                    break Some((1008, "too much waits to be taken by this principal's clients"));
                }
                () = is_set(&mut closing) => {
                    let _ = timeout(REST_TIME_MAX, self.rest(&mut socket, &mut said)).await;
                    break Some((1001, "the door closes"));
                }
                () = &mut revoked => {
                    break Some((1008, "this token speaks for the principal no more"));
                }
            };
            (heard, heard_bytes) = (tokio::time::Instant::now(), self.standing.heard_bytes());
            let answered = match message {
                Message::Text(text) => self.hear(text.as_str()).await,
                Message::Close(_) => {
                    is_closed = true;
                    break None;
                }
                Message::Ping(_) | Message::Pong(_) => continue,
                Message::Binary(_) => break Some((1003, "messages are text")),
            };
            if let Err((number, problem)) = answered {
                let run = number.as_ref().and_then(Number::as_u64);
                let run = run.and_then(|number| u32::try_from(number).ok());
                let over = run.is_none_or(|number| !self.runs.contains_key(&number));
                let text = complaint(number, over, &problem);
                if !send(&mut socket, Message::Text(text.into())).await {
                    break None;
                }
            }
        };
        // Its tasks see that nobody listens, and cancel their runs.
        drop(said);
        if is_closed {
            // The answer to that (RFC 6455, 5.5.1) is sent by reading on.
            let _ = timeout(SEND_TIME_MAX, socket.recv()).await;
        }
        if let Some((code, reason)) = goodbye {
            let frame = CloseFrame { code, reason: reason.into() };
            send(&mut socket, Message::Close(Some(frame))).await;
        }
    }

    /// Tells one thing of a run. Whether the client took it.
    async fn say(&mut self, socket: &mut WebSocket, said: Said) -> bool {
        let Said { missed, text, over } = said;
        if let Some(number) = over {
            self.runs.remove(&number);
        }
        for text in missed.into_iter().chain([text]) {
            if !send(socket, Message::Text(text.into())).await {
                return false;
            }
        }
        true
    }

    /// Tells what is known of its runs, until all are over or nobody listens.
    async fn rest(&mut self, socket: &mut WebSocket, said: &mut mpsc::UnboundedReceiver<Unsent>) {
        while !self.runs.is_empty()
            && let Some(Unsent { said, .. }) = said.recv().await
            && self.say(socket, said).await
        {}
    }

    /// Does what the client says.
    async fn hear(&mut self, text: &str) -> Result<(), (Option<Number>, Problem)> {
        let said = order::json("the message", text.as_bytes());
        let no_message = |problem| (number_of(text), if is_one(text) { problem } else { none() });
        match said.map_err(no_message)? {
            FromClient::Submit(Object(submit)) => {
                let number = submit.number;
                self.submit(*submit).await.map_err(|problem| (Some(number.into()), problem))
            }
            FromClient::Settle(Object(settle)) => {
                let number = settle.number;
                self.settle(settle).await.map_err(|problem| (Some(number.into()), problem))
            }
            FromClient::Cancel(Object(Cancel { number })) => {
                // One that is not there has ended meanwhile.
                if let Some(canceller) = self.runs.get(&number) {
                    canceller.cancel().await;
                }
                Ok(())
            }
        }
    }

    async fn submit(&mut self, submit: Submit) -> Result<(), Problem> {
        let Submit { number, run: Object(run), hosted, events } = submit;
        let hosted = hosted.map(|Object(hosted)| hosted);
        if self.runs.contains_key(&number) {
            return Err(Problem::bad_request("this number is another run's, which is not over"));
        }
        if self.runs.len() >= RUNS_MAX {
            return Err(Problem::overloaded(format!(
                "{RUNS_MAX} runs of this socket are under way"
            )));
        }
        if run.says_wait() {
            return Err(Problem::bad_request("wait says nothing here: leave it out"));
        }
        let mut order = run.asked(&self.tenant.name, hosted)?.order;
        order.events = events;
        let (slot, number_held) = (self.tenant.run()?, self.tenant.number()?);
        let run = self.door.client.submit_holding(&order, number_held).await?;
        self.runs.insert(number, run.canceller());
        let carried = Carried {
            number,
            run,
            tenant: Arc::clone(&self.tenant),
            sender: self.sender.clone(),
            stuck: Arc::clone(&self.stuck),
            places: Arc::new(Semaphore::new(EVENTS_UNSENT_MAX)),
            missed: 0,
            kept: None,
            _slot: slot,
        };
        tokio::spawn(carried.carry());
        Ok(())
    }

    async fn settle(&self, settle: Settle) -> Result<(), Problem> {
        let Settle { number, callback, result, error } = settle;
        let result = match (result, error) {
            (Some(result), None) => Ok(String::from(Box::<str>::from(result)).into_bytes()),
            (None, Some(error)) => Err(tool_error(&error)?),
            _ => return Err(Problem::bad_request("settle with a result or an error")),
        };
        let bytes = result.as_ref().map_or_else(Vec::len, Vec::len);
        bounded("a callback's answer", bytes, RESPONSE_BYTES_MAX as usize)?;
        // The answer of a run that has ended meanwhile is nobody's.
        if let Some(canceller) = self.runs.get(&number) {
            canceller.settle(callback, result).await?;
        }
        Ok(())
    }
}

/// A tool's own error, read as answers are: half a character in it costs itself.
fn tool_error(error: &RawValue) -> Result<Vec<u8>, Problem> {
    let read = json::from_slice_mended::<Object<ToolError>>(error.get().as_bytes());
    let Object(error) =
        read.map_err(|error| Problem::bad_request(format!("the message: error: {error}")))?;
    Ok(serde_json::to_vec(&error).unwrap_or_default())
}

/// Whether this is an object with one field, or no JSON at all. Of anything else its
/// reader can only say that it expected another value.
fn is_one(text: &str) -> bool {
    match serde_json::from_str::<HashMap<String, IgnoredAny>>(text) {
        Ok(fields) => fields.len() == 1,
        Err(error) => error.classify() != serde_json::error::Category::Data,
    }
}

fn none() -> Problem {
    Problem::bad_request("the message: it is an object with one of submit, settle, cancel")
}

/// The client's number in what is no message of it: an integer that it can be told
/// again as it is, in range or not.
fn number_of(text: &str) -> Option<Number> {
    #[derive(Deserialize)]
    struct Numbered {
        number: Number,
    }
    let said: HashMap<String, Numbered> = serde_json::from_str(text).ok()?;
    // Of several nobody knows which is meant.
    let Ok([Numbered { number }]) = <[_; 1]>::try_from(said.into_values().collect::<Vec<_>>())
    else {
        return None;
    };
    (number.is_i64() || number.is_u64()).then_some(number)
}

/// Whether the client takes it, in the time there is for one message.
async fn send(socket: &mut WebSocket, message: Message) -> bool {
    timeout(SEND_TIME_MAX, socket.send(message)).await.is_ok_and(|sent| sent.is_ok())
}

/// One run of a socket.
struct Carried {
    number: u32,
    run: Run,
    tenant: Arc<Tenant>,
    sender: mpsc::UnboundedSender<Unsent>,
    stuck: Arc<Notify>,
    /// For events that wait.
    places: Arc<Semaphore>,
    /// Events that there was no room for since the last that there was.
    missed: u64,
    /// Where it is found by its id, from the moment that its client may know that.
    kept: Option<Arc<Kept>>,
    _slot: OwnedSemaphorePermit,
}

impl Carried {
    /// Passes on what the service says. The run is cancelled when the client is gone
    /// or takes nothing: its end comes all the same, and is kept for who asks.
    async fn carry(mut self) {
        let mut is_cancelled = false;
        loop {
            let message = tokio::select! {
                message = self.run.next() => message,
                () = self.sender.closed(), if !is_cancelled => {
                    is_cancelled = true;
                    self.run.cancel().await;
                    continue;
                }
            };
            let said = match message {
                None => self.over(None),
                Some(RunMessage::Event(event)) => {
                    self.happened(&event);
                    continue;
                }
                Some(RunMessage::Callback(callback)) => self.callback(&callback),
                Some(RunMessage::Finished(finish)) => self.over(Some(finish)),
            };
            let said = Said { missed: self.missed(), ..said };
            let is_over = said.over.is_some();
            match self.tenant.unsent(said.bytes()) {
                // One that is gone is seen with the next turn.
                Some(room) => {
                    let _ = self.sender.send(Unsent { said, _room: room, _place: None });
                    self.missed = 0;
                }
                // The socket ends of it.
                None => self.stuck.notify_one(),
            }
            if is_over {
                return;
            }
        }
    }

    /// Tells an event, and keeps it for who asks for the run.
    fn happened(&mut self, event: &RunEvent) {
        if let RunEvent::Admitted { run_id } = event {
            let (id, canceller) = (run_id.to_string(), Some(self.run.canceller()));
            let kept = Arc::new(Kept { id, canceller, events: Events::default() });
            self.tenant.keep(Arc::clone(&kept));
            self.kept = Some(kept);
        }
        let event = happened(event);
        if !self.tell(&event) {
            self.missed += 1;
        }
        if let Some(kept) = &self.kept {
            kept.events.push(event);
        }
    }

    /// Keeps its end, or that there is none to be known.
    fn over(&self, finish: Option<Finish>) -> Said {
        match (&self.kept, finish) {
            (Some(kept), finish) => {
                runs::end(&self.tenant, kept, finish.and_then(End::of));
                self.finished(Ok(Arc::clone(kept)))
            }
            (None, Some(finish)) => {
                self.finished(runs::over(&self.tenant, Events::default(), finish))
            }
            (None, None) => self.finished(Err(Problem::lost())),
        }
    }

    /// Tells an event, if there is room for it.
    fn tell(&mut self, event: &Happened) -> bool {
        let said = Said { missed: self.missed(), text: self.event(event), over: None };
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else { return false };
        let Some(room) = self.tenant.unsent_event(said.bytes()) else { return false };
        let _ = self.sender.send(Unsent { said, _room: room, _place: Some(place) });
        self.missed = 0;
        true
    }

    /// What its client is told of events that it missed.
    fn missed(&self) -> Option<String> {
        let data = || json!({ "events": self.missed }).to_string();
        (self.missed > 0).then(|| self.event(&Happened { name: "missed", data: data() }))
    }

    fn event(&self, event: &Happened) -> String {
        let data = raw(event.data.as_bytes());
        ToClient::Event { number: self.number, event: event.name, data }.text()
    }

    fn callback(&self, callback: &Callback) -> Said {
        let Callback { callback: id, tool, arguments, .. } = callback;
        let arguments = raw(arguments);
        let message = ToClient::Callback {
            number: self.number,
            callback: *id,
            tool: tool.as_str(),
            arguments,
        };
        Said { missed: None, text: message.text(), over: None }
    }

    fn finished(&self, over: Result<Arc<Kept>, Problem>) -> Said {
        let number = self.number;
        let text = match over.map(|kept| kept.events.ended()) {
            Ok(Some(super::events::Ended::Reported(end))) => {
                ToClient::Finished { number, report: raw(&end.report) }.text()
            }
            Ok(_) => complaint(Some(number.into()), true, &Problem::lost()),
            Err(problem) => complaint(Some(number.into()), true, &problem),
        };
        Said { missed: None, text, over: Some(number) }
    }
}

/// JSON that the service sent, to be put into a message as it is.
fn raw(json: &[u8]) -> &RawValue {
    serde_json::from_slice(json).unwrap_or(RawValue::NULL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_said_of_the_number_that_it_came_under() {
        let number = |text: &str| number_of(text).map(|number| number.to_string());
        let submitted = number(r#"{"submit": {"number": 3, "run": {"program": 1}}}"#);
        assert_eq!(submitted.as_deref(), Some("3"));
        assert_eq!(number(r#"{"settled": {"number": 0}}"#).as_deref(), Some("0"));
        for text in [
            r#"{"submit": {"number": "1"}}"#,
            r#"{"submit": {}}"#,
            r#"{"cancel": {"number": 3}, "submit": {"number": 4}}"#,
            "{}",
            "[]",
            "{",
        ] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn half_a_character_in_a_tools_error_costs_itself() {
        let said = r#"{"settle": {"number": 1, "callback": 0,
            "error": {"name": "Error", "message": "cut \ud83d"}}}"#;
        let Ok(FromClient::Settle(Object(settle))) = order::json("the message", said.as_bytes())
        else {
            panic!("it cannot be read");
        };
        let error = tool_error(&settle.error.unwrap()).unwrap();
        assert_eq!(error, "{\"name\":\"Error\",\"message\":\"cut \u{FFFD}\"}".as_bytes());
        for none in ["{}", "7", r#"{"name": "x", "message": 7}"#] {
            assert!(tool_error(serde_json::from_str(none).unwrap()).is_err(), "{none}");
        }
    }

    #[test]
    fn what_is_no_message_is_told_what_one_is() {
        for text in ["{}", "[]", "1", "null", r#"{"cancel": {"number": 1}, "settle": 2}"#] {
            assert!(!is_one(text), "{text}");
        }
        // Of these it is told what is wrong with them.
        for text in [r#"{"cancel": []}"#, r#"{"cancels": {}}"#, "{", "", "nothing"] {
            assert!(is_one(text), "{text}");
        }
    }

    #[test]
    fn a_number_out_of_range_is_told_as_it_is_with_the_field_and_its_range() {
        let told = |number: &str, message: &str| {
            let message = message.replace("NUMBER", number);
            let problem = order::json::<FromClient>("the message", message.as_bytes());
            let said = complaint(number_of(&message), true, &problem.err().unwrap());
            assert!(said.contains("is an integer from 0 to 4294967295"), "{said}");
            said
        };
        for message in [
            r#"{"submit": {"number": NUMBER, "run": {"program": ""}}}"#,
            r#"{"settle": {"number": NUMBER, "callback": 0, "result": 1}}"#,
            r#"{"cancel": {"number": NUMBER}}"#,
        ] {
            for number in ["4294967296", "18446744073709551615", "-1", "-9223372036854775808"] {
                let said = told(number, message);
                assert!(said.contains(&format!(r#""number":{number},"over""#)), "{said}");
                assert!(said.contains("number is an integer"), "{said}");
            }
            // There is no telling what it was.
            for number in ["18446744073709551616", "1.5"] {
                let said = told(number, message);
                assert!(said.contains(r#""number":null"#), "{said}");
            }
        }
        let said = told("4294967296", r#"{"settle": {"number": 1, "callback": NUMBER}}"#);
        assert!(said.contains(r#""number":1,"#) && said.contains("callback is"), "{said}");
    }

    #[tokio::test]
    async fn a_program_that_says_much_has_no_client_cut_off_which_is_told_what_it_missed() {
        let (mut service, door) = crate::http::tests::door().await;
        let body: RunBody = serde_json::from_str(r#"{"program": ""}"#).unwrap();
        let order = body.asked("a", None).unwrap().order;
        let tenant = door.tenants.named("a".into());
        let (sender, mut said) = mpsc::unbounded_channel();
        let stuck = Arc::new(Notify::new());
        let carried = Carried {
            number: 1,
            run: door.client.submit(&order).await.unwrap(),
            tenant: Arc::clone(&tenant),
            sender,
            stuck: Arc::clone(&stuck),
            places: Arc::new(Semaphore::new(EVENTS_UNSENT_MAX)),
            missed: 0,
            kept: None,
            _slot: tenant.run().unwrap(),
        };
        let carried = tokio::spawn(carried.carry());
        let more = 50;
        for _ in 0..EVENTS_UNSENT_MAX + more {
            let log = forge_protocol::run::Log { level: 1, text: "x".into() };
            let what = forge_protocol::service::RunEvent::Log(log);
            let event = forge_protocol::service::Event { number: 1, what };
            service.say(forge_protocol::frame::Kind::Event, &event).await;
        }
        let report = br#"{"run_id":"1","status":"ok","kind":"","reason":""}"#.to_vec();
        let finished =
            forge_protocol::service::Finished { number: 1, report, artifacts: Vec::new() };
        service.say(forge_protocol::frame::Kind::Finished, &finished).await;
        carried.await.unwrap();
        let mut heard = Vec::new();
        while let Some(Unsent { said: Said { missed, text, .. }, .. }) = said.recv().await {
            heard.extend(missed);
            heard.push(text);
        }
        assert_eq!(heard.len(), EVENTS_UNSENT_MAX + 2);
        let missed =
            format!(r#"{{"event":{{"number":1,"event":"missed","data":{{"events":{more}}}}}}}"#);
        assert_eq!(heard[EVENTS_UNSENT_MAX], missed);
        assert!(heard[EVENTS_UNSENT_MAX + 1].starts_with(r#"{"finished":"#));
        let is_stuck = tokio::time::timeout(Duration::ZERO, stuck.notified()).await;
        assert!(is_stuck.is_err(), "its client would be cut off");
    }

    #[test]
    fn a_callback_may_be_settled_with_null() {
        let settle = |text: &str| serde_json::from_str::<Settle>(text).unwrap().result;
        let null = settle(r#"{"number": 1, "callback": 0, "result": null}"#).unwrap();
        assert_eq!(null.get(), "null");
        assert!(settle(r#"{"number": 1, "callback": 0}"#).is_none());
    }
}
