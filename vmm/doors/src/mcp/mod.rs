//! The MCP door: code mode with hardware isolation for any MCP client.
//!
//! It offers two tools. `search_tools` finds the few tools of the broker that
//! fit what is to be done, and gives a handle of a grant for exactly these;
//! `run_program` runs a program in a virtual machine of its own, under that
//! grant. So a model reads two tools and not two hundred, and what it reads of
//! results is what its program leaves of them.
//!
//! Clients are strangers: every size, count and time that they choose has a
//! bound, and none of them sees a grant token. Deliberately absent are
//! approvals, sampling and whatever else a server may ask of a client.
//!
//! | module | what it holds |
//! |---|---|
//! | [`stdio`] | JSON-RPC in lines, for the client that started the process |
//! | [`http`] | streamable HTTP, for principals with tokens |
//! | [`link`] | the service behind the door |
//! | `handler` | what MCP asks a server |
//! | `search`, `run` | the two tools |
//! | `result` | what both answer with |
//! | `handles` | grants, by short names, and those that outlive a door |
//! | `skim` | the id of a message that is too long |
//! | `sessions`, `kept` | sessions over HTTP, and what was said in them |
//! | `program` | a program as a model writes it, made into a signed module |
//! | `teach` | what a model is told |

pub mod http;
pub mod link;
pub mod stdio;

mod handler;
mod handles;
mod kept;
mod program;
mod result;
mod run;
mod search;
mod sessions;
mod skim;
mod teach;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use forge_client::ClientError;
use forge_protocol::json;
use forge_protocol::service::{Question, Reply};
use forge_protocol::signature::SignerKey;
use forge_protocol::text::is_plain;
use rmcp::ErrorData;
use rmcp::model::{RequestId, ServerJsonRpcMessage};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::locks::lock;
use crate::object::Object;
use handles::Handles;
use link::ServiceLink;

/// A message of a client, in bytes: a program of almost 3 MiB as base64.
pub const MESSAGE_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Requests of one client that may be unanswered, and what they may have
/// together, in bytes. As JSON values they take many times that.
pub const REQUESTS_MAX: usize = 64;
/// Questions of a principal that are with the service at a time: a quarter of
/// what it takes of one connection. More wait.
const QUESTIONS_MAX: usize = 16;
/// Requests of one client that may be unanswered, together, in bytes.
pub const REQUEST_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX;

/// Whose programs a door runs.
#[derive(Debug)]
pub struct Principal {
    /// The name that grants, roles and the journal know it by.
    pub name: String,
    /// The key that its unsigned programs are signed with. Without one, only
    /// signed programs are taken.
    pub signer: Option<Arc<SignerKey>>,
}

/// The door of one principal. Clones are the same door.
#[derive(Clone, Debug)]
pub struct Door(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    service: Arc<ServiceLink>,
    principal: Principal,
    /// The session of every grant that this door finds: a token is good in no other.
    session: String,
    handles: Mutex<Handles>,
    /// Places for questions that are not answered. All doors of a service share
    /// one connection to it.
    questions: Arc<Semaphore>,
    /// Runs that are not over, those included that nobody waits for any more.
    runs: Semaphore,
    closing: CancellationToken,
}

impl Door {
    /// A door of a principal's to this service. Grants that it has found are good at the
    /// principal's next door too if both are given this folder, which is there and its
    /// user's alone to write.
    ///
    /// # Errors
    /// If the host gives no random bytes.
    pub fn new(
        service: Arc<ServiceLink>,
        principal: Principal,
        grants: Option<PathBuf>,
    ) -> std::io::Result<Self> {
        let handles = grants.map(|folder| Handles::lasting(folder, &principal.name));
        Ok(Self(Arc::new(Inner {
            service,
            principal,
            session: format!("mcp-{}", handles::random_name()?),
            handles: Mutex::new(handles.unwrap_or_default()),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            runs: Semaphore::new(REQUESTS_MAX),
            closing: CancellationToken::new(),
        })))
    }

    /// Cancels what runs, and takes nothing more.
    pub fn close(&self) {
        self.0.closing.cancel();
    }

    /// Asks the service, once there is a place for it. Dropped before, the
    /// question is cancelled.
    async fn ask(&self, question: Question) -> Result<Reply, ClientError> {
        let place = Arc::clone(&self.0.questions).acquire_owned().await;
        self.0.service.ask(question, place).await
    }

    fn handles(&self) -> MutexGuard<'_, Handles> {
        lock(&self.0.handles)
    }
}

/// What a message has, as it is written there.
#[derive(Deserialize)]
struct Members {
    #[serde(default, deserialize_with = "written")]
    jsonrpc: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "written")]
    id: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "written")]
    method: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "written")]
    params: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "written")]
    result: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "written")]
    error: Option<Box<RawValue>>,
}

/// A member that is there, though it is `null`.
fn written<'de, D: Deserializer<'de>>(member: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::deserialize(member).map(Some)
}

impl Members {
    /// What of them is not as a message has it.
    fn wrong(&self) -> Option<&'static str> {
        fn is<T: DeserializeOwned>(member: &RawValue) -> bool {
            json::from_slice::<T>(member.get().as_bytes()).is_ok()
        }
        let Self { jsonrpc, id, method, params, result, error } = self;
        let is_answer = result.is_some() || error.is_some();
        if jsonrpc.as_ref().is_none_or(|it| it.get() != "\"2.0\"") {
            Some("`jsonrpc` is \"2.0\"")
        } else if id.as_ref().is_some_and(|it| !is::<RequestId>(it)) {
            Some("`id` is a text or an integer; what asks for no answer has none")
        } else if method.is_none() && !is_answer {
            Some("`method` is missing")
        } else if method.as_ref().is_some_and(|it| !is::<String>(it)) {
            Some("`method` is a text")
        } else if params.as_ref().is_some_and(|it| !it.get().starts_with('{')) {
            Some("`params` is an object")
        } else {
            None
        }
    }
}

/// Whether bytes that are no message of MCP are a notification, to which nothing is said
/// (JSON-RPC 2.0, 4.1): they have a method, and no id.
fn asks_for_nothing(bytes: &[u8]) -> bool {
    let members = serde_json::from_slice::<Object<Members>>(bytes);
    members.is_ok_and(|Object(it)| {
        it.id.is_none() && it.method.is_some_and(|method| method.get().starts_with('"'))
    })
}

/// What is said to bytes that are no message of MCP.
fn no_message(bytes: &[u8], error: &serde_json::Error) -> ServerJsonRpcMessage {
    // What is in them is passed over, however deep it is nested.
    let members = serde_json::from_slice::<Object<Members>>(bytes).ok().map(|Object(it)| it);
    let is_json = error.is_data() || members.is_some();
    let id =
        members.as_ref().and_then(|it| json::from_slice(it.id.as_ref()?.get().as_bytes()).ok());
    let what = match (bytes.trim_ascii_start().first(), json::check(bytes)) {
        _ if !is_json => {
            let error = ErrorData::parse_error(format!("this is no JSON: {error}"), None);
            return ServerJsonRpcMessage::error(error, None);
        }
        (Some(b'['), _) => "batches are not taken: send each message by itself".into(),
        // serde_json says it as if it were no JSON.
        _ if !error.is_data() => format!("this cannot be read: {error}"),
        (_, Err(error)) => format!("this is no message of MCP: {error}"),
        _ => match members.as_ref().and_then(Members::wrong) {
            Some(wrong) => format!("this is no message of MCP: {wrong}"),
            None => "this is no message of MCP".into(),
        },
    };
    let error = ErrorData::invalid_request(what, None);
    ServerJsonRpcMessage::error(error, id)
}

/// Text of a program or a tool as one short line, with a blank for each character that
/// does something else than be seen ([`is_plain`]).
fn one_line(text: &str, chars_max: usize) -> String {
    let mut before = ' ';
    let shown = |c: char| {
        let is_plain = is_plain(before, c);
        before = c;
        if is_plain { c } else { ' ' }
    };
    let mut line: String = text.chars().take(chars_max).map(shown).collect();
    if text.chars().nth(chars_max).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::mock;

    #[test]
    fn one_line_has_nothing_that_is_not_seen() {
        let hidden = "a\nb\u{61c}c\u{2028}d\u{200b}e\u{e0041}f";
        assert_eq!(one_line(hidden, 99), "a b c d e f");
        assert_eq!(
            one_line("⚠\u{fe0f} \u{645}\u{6cc}\u{200c}\u{62e}", 99),
            "⚠\u{fe0f} \u{645}\u{6cc}\u{200c}\u{62e}"
        );
        assert_eq!(one_line("abcd", 3), "abc…");
    }

    #[test]
    fn a_batch_is_told_that_it_is_one() {
        let told = |text: &str| {
            let error = serde_json::from_str::<Object<serde_json::Value>>(text).unwrap_err();
            serde_json::to_string(&no_message(text.as_bytes(), &error)).unwrap()
        };
        assert!(told(r#" [{"id": 1}]"#).contains("send each message by itself"));
        assert!(told("7").contains("no message of MCP"));
    }

    #[test]
    fn what_is_no_message_is_told_which_member_is_wrong() {
        for (text, member) in [
            (r#"{"id": 1, "method": "ping"}"#, "`jsonrpc`"),
            (r#"{"jsonrpc": "1.0", "id": 1, "method": "ping"}"#, "`jsonrpc`"),
            (r#"{"jsonrpc": "2.0", "id": null, "method": "ping"}"#, "`id`"),
            (r#"{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}"#, "`id`"),
            (r#"{"jsonrpc": "2.0", "id": 1}"#, "`method` is missing"),
            (r#"{"jsonrpc": "2.0", "id": 1, "method": 5}"#, "`method`"),
            (r#"{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}"#, "`params`"),
        ] {
            let error = json::from_slice::<rmcp::model::ClientJsonRpcMessage>(text.as_bytes());
            let error = error.expect_err(text);
            let told = serde_json::to_value(no_message(text.as_bytes(), &error)).unwrap();
            let message = told["error"]["message"].as_str().unwrap();
            assert!(message.contains(&format!("no message of MCP: {member}")), "{text}: {told}");
        }
    }

    #[test]
    fn what_is_nested_too_deep_is_refused_by_its_id() {
        let told = |depth: usize, end: &str| {
            let (open, close) = ("[".repeat(depth), "]".repeat(depth));
            let text = format!(r#"{{"params":{{"x":{open}{close}}},"id":"deep"{end}"#);
            let error = serde_json::from_str::<serde_json::Value>(&text).unwrap_err();
            serde_json::to_value(no_message(text.as_bytes(), &error)).unwrap()
        };
        for depth in [200, 1_000_000] {
            let told = told(depth, "}");
            assert_eq!((&told["id"], &told["error"]["code"]), (&"deep".into(), &(-32600).into()));
            assert!(told["error"]["message"].as_str().unwrap().contains("recursion"), "{told}");
        }
        // What is no JSON has no id.
        let told = told(200, "");
        assert_eq!((&told["id"], &told["error"]["code"]), (&().into(), &(-32700).into()));
    }

    #[tokio::test]
    async fn who_leaves_gives_its_places_back_when_the_service_has_answered() {
        let (mut service, socket) = mock::Service::new().await;
        let link = Arc::new(ServiceLink::over(socket).await.unwrap());
        let door = || {
            let principal = Principal { name: "a".into(), signer: None };
            Door::new(Arc::clone(&link), principal, None).unwrap()
        };
        let leave = async |door: &Door| {
            let asking = door.ask(Question::ListTools { principal: "a".into() });
            // Sent if it is its turn, and cancelled.
            tokio::time::timeout(Duration::ZERO, asking).await.unwrap_err();
        };
        let doors: Vec<_> = (0..4).map(|_| door()).collect();
        for door in &doors {
            for _ in 0..=QUESTIONS_MAX {
                leave(door).await;
            }
            assert_eq!(door.0.questions.available_permits(), 0);
        }
        let other = door();
        leave(&other).await;
        assert_eq!(other.0.questions.available_permits(), QUESTIONS_MAX, "it was not sent");
        service.answer(1, Reply::Draining).await;
        let place = doors[0].0.questions.acquire();
        drop(tokio::time::timeout(Duration::from_secs(30), place).await.unwrap());
        leave(&other).await;
        assert_eq!(other.0.questions.available_permits(), QUESTIONS_MAX - 1, "it was its turn");
    }
}
