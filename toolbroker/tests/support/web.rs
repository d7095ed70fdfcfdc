//! HTTP servers of the tests, on loopback, each on a thread of its own: one
//! that speaks MCP in either era and can be told to misbehave, and whatever a
//! test makes of axum.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::PATIENCE;

/// A running server; it ends when dropped.
pub struct Web {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Web {
    pub fn serve(router: Router) -> Self {
        Self::serve_at("127.0.0.1:0".parse().unwrap(), router)
    }

    pub fn serve_at(address: SocketAddr, router: Router) -> Self {
        let (tell, told) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind(address).await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                tokio::select! {
                    served = async { axum::serve(listener, router).await } => served.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        let address = told.recv().unwrap();
        Self { address, stop: Some(stop), thread: Some(thread) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A body that is sent as it comes.
pub struct Flow(mpsc::Receiver<Result<Bytes, std::io::Error>>);

impl futures_core::Stream for Flow {
    type Item = Result<Bytes, std::io::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

/// What fills a [`Flow`].
pub type Hand = mpsc::Sender<Result<Bytes, std::io::Error>>;

/// A body and the hand that fills it.
pub fn flow() -> (Hand, Body) {
    let (sender, receiver) = mpsc::channel(4);
    (sender, Body::from_stream(Flow(receiver)))
}

/// A body that never ends.
pub fn endless(piece: &'static str) -> Body {
    let (sender, body) = flow();
    let pieces = Bytes::from(piece.repeat(64 * 1024 / piece.len()));
    tokio::spawn(async move { while sender.send(Ok(pieces.clone())).await.is_ok() {} });
    body
}

/// A body that says something and then breaks off with its connection.
pub fn broken(piece: String) -> Body {
    let (sender, body) = flow();
    tokio::spawn(async move {
        let _ = sender.send(Ok(piece.into())).await;
        // What was said is on its way before the connection is gone.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let _ = sender.send(Err(std::io::Error::other("gone"))).await;
    });
    body
}

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The tool that is called, if one is.
    pub fn tool(&self) -> Option<&str> {
        self.body["params"]["name"].as_str()
    }
}

/// Which MCP the server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Era {
    /// `initialize`, with a session.
    Session,
    /// `initialize`, without.
    NoSession,
    /// `server/discover`.
    Modern,
}

/// An MCP server over HTTP.
#[derive(Clone)]
pub struct Mcp(Arc<Mutex<Inner>>);

pub struct Inner {
    pub era: Era,
    pub seen: Vec<Seen>,
    /// Tools beside the usual.
    pub tools: Vec<Value>,
    /// What `Authorization` must be, if it must.
    pub token: Option<String>,
    /// Whether it says of a session that it does not know what MCP's own libraries have
    /// servers say, and not 404.
    pub forgets_by_400: bool,
    /// Whether each page of the list promises another.
    pub endless_list: bool,
    /// Whether it has resources alone, says so, and knows nothing of tools.
    pub has_no_tools: bool,
    /// The status and kind that `server/discover` is answered with by a server of the
    /// older protocol, if it does not refuse it; and whether it answers at all.
    pub on_discover: Option<Option<(u16, &'static str)>>,
    /// Statuses that the next calls are answered with.
    pub refuse: Vec<u16>,
    /// What the next reads of resources are answered with: a status, and the
    /// result if it is 200.
    pub resources: Vec<(u16, Value)>,
    /// Where redirects lead.
    pub elsewhere: String,
    sessions: BTreeSet<String>,
    next_session: u32,
    /// Whoever listens for changes.
    listeners: Vec<(Option<Value>, Hand)>,
    /// Results for streams that broke off, by the event they were at.
    resumable: BTreeMap<String, Value>,
}

impl Mcp {
    pub fn new(era: Era) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            era,
            seen: Vec::new(),
            tools: Vec::new(),
            token: None,
            forgets_by_400: false,
            endless_list: false,
            has_no_tools: false,
            on_discover: None,
            refuse: Vec::new(),
            resources: Vec::new(),
            elsewhere: String::new(),
            sessions: BTreeSet::new(),
            next_session: 0,
            listeners: Vec::new(),
            resumable: BTreeMap::new(),
        })))
    }

    pub fn get(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn router(&self) -> Router {
        Router::new().route("/mcp", any(handle)).with_state(self.clone())
    }

    pub fn serve(&self) -> Web {
        Web::serve(self.router())
    }

    /// How often a tool was called.
    pub fn calls(&self, tool: &str) -> usize {
        let is_call =
            |seen: &&Seen| seen.body["method"] == "tools/call" && seen.tool() == Some(tool);
        self.get().seen.iter().filter(is_call).count()
    }

    /// Waits until something is so.
    pub fn wait_until(&self, what: &str, is_so: impl Fn(&Inner) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so(&self.get()) {
            assert!(Instant::now() < until, "never: {what}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    pub fn has_listener(&self) {
        self.wait_until("somebody listens", |inner| !inner.listeners.is_empty());
    }

    /// Forgets every session.
    pub fn forget_sessions(&self) {
        self.get().sessions.clear();
    }

    /// Tells all listeners that the tools changed.
    pub fn announce(&self) {
        let listeners = self.get().listeners.clone();
        for (subscription, listener) in listeners {
            let mut message =
                json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
            if let Some(id) = subscription {
                message["params"] =
                    json!({"_meta": {"io.modelcontextprotocol/subscriptionId": id}});
            }
            let _ = listener.blocking_send(Ok(event(&message).into()));
        }
    }
}

/// A tool that takes anything.
pub fn tool(name: &str, description: &str) -> Value {
    json!({"name": name, "description": description, "inputSchema": {"type": "object"}})
}

fn event(message: &Value) -> String {
    format!("data: {message}\n\n")
}

fn stream(body: Body) -> Response {
    ([("content-type", "text/event-stream")], body).into_response()
}

fn json_body(body: Body) -> Response {
    ([("content-type", "application/json")], body).into_response()
}

fn reply(id: &Value, result: Value) -> Response {
    axum::Json(json!({"jsonrpc": "2.0", "id": id, "result": result})).into_response()
}

fn failure(status: StatusCode, id: &Value, code: i32, message: &str) -> Response {
    let body = json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}});
    (status, axum::Json(body)).into_response()
}

async fn handle(
    State(mcp): State<Mcp>,
    method: Method,
    uri: axum::http::Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let seen = Seen { method: method.clone(), path: uri.to_string(), headers, body: body.clone() };
    mcp.get().seen.push(seen.clone());
    if let Some(token) = &mcp.get().token
        && seen.header("authorization") != Some(token)
    {
        return (StatusCode::UNAUTHORIZED, [("www-authenticate", "Bearer")]).into_response();
    }
    let era = mcp.get().era;
    let session = seen.header("mcp-session-id").unwrap_or_default().to_owned();
    let rpc = body["method"].as_str().unwrap_or_default().to_owned();
    let id = body["id"].clone();
    if era == Era::Session
        && !matches!(rpc.as_str(), "initialize" | "server/discover")
        && !mcp.get().sessions.contains(&session)
    {
        if mcp.get().forgets_by_400 {
            let message = "Bad Request: No valid session ID provided";
            return failure(StatusCode::BAD_REQUEST, &Value::Null, -32_000, message);
        }
        let status =
            if session.is_empty() { StatusCode::BAD_REQUEST } else { StatusCode::NOT_FOUND };
        return status.into_response();
    }
    match method {
        Method::GET => {
            if let Some(at) = seen.header("last-event-id") {
                let Some(result) = mcp.get().resumable.remove(at) else {
                    return StatusCode::NOT_FOUND.into_response();
                };
                return stream(event(&result).into());
            }
            if era != Era::Session {
                return StatusCode::METHOD_NOT_ALLOWED.into_response();
            }
            let (sender, body) = flow();
            mcp.get().listeners.push((None, sender));
            return stream(body);
        }
        Method::DELETE => {
            mcp.get().sessions.remove(&session);
            return StatusCode::NO_CONTENT.into_response();
        }
        _ => {}
    }
    let has_no_tools = mcp.get().has_no_tools;
    let capabilities = match has_no_tools {
        true => json!({"resources": {}}),
        false => json!({"tools": {"listChanged": true}}),
    };
    let on_discover = mcp.get().on_discover;
    match rpc.as_str() {
        "server/discover" if era == Era::Modern => reply(
            &id,
            json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
                   "capabilities": capabilities, "ttlMs": 0, "cacheScope": "private"}),
        ),
        "server/discover" if let Some(said) = on_discover => match said {
            Some((status, kind)) => {
                let status = StatusCode::from_u16(status).unwrap();
                // Some streams have no end.
                let body = match kind {
                    "text/event-stream; silent" => {
                        let (sender, body) = flow();
                        mcp.get().listeners.push((None, sender));
                        body
                    }
                    "application/json; agrees" => return reply(&id, json!({})),
                    "text/event-stream; agrees" => {
                        let said = json!({"jsonrpc": "2.0", "id": id, "result": {}});
                        Body::from(event(&said))
                    }
                    _ => Body::from("<p>What?</p>"),
                };
                (status, [("content-type", kind)], body).into_response()
            }
            None => std::future::pending().await,
        },
        "server/discover" => failure(StatusCode::BAD_REQUEST, &id, -32601, "no such method"),
        "initialize" if era == Era::Modern => {
            failure(StatusCode::BAD_REQUEST, &id, -32601, "no such method")
        }
        "initialize" => {
            let result = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities,
                                "serverInfo": {"name": "test", "version": "1"}});
            let mut response = reply(&id, result);
            if era == Era::Session {
                let mut inner = mcp.get();
                inner.next_session += 1;
                let session = format!("session-{}", inner.next_session);
                response.headers_mut().insert("mcp-session-id", session.parse().unwrap());
                inner.sessions.insert(session);
            }
            response
        }
        "subscriptions/listen" if era == Era::Modern => {
            let (sender, body) = flow();
            let acknowledged = json!({"jsonrpc": "2.0",
                "method": "notifications/subscriptions/acknowledged",
                "params": {"_meta": {"io.modelcontextprotocol/subscriptionId": id},
                           "notifications": {"toolsListChanged": true}}});
            sender.send(Ok(event(&acknowledged).into())).await.unwrap();
            mcp.get().listeners.push((Some(id), sender));
            stream(body)
        }
        "tools/list" if has_no_tools => failure(StatusCode::OK, &id, -32601, "no such method"),
        "tools/list" => {
            let inner = mcp.get();
            let mut tools = vec![
                tool("echo", "Says it back."),
                tool("echo_sse", "Says it back, as a stream."),
                tool("resume", "Breaks off and goes on."),
                tool("hang", "Never answers."),
                tool("die", "Breaks off."),
                tool("die_sse", "Breaks off, as a stream."),
                tool("endless", "Never ends."),
                tool("endless_sse", "Never ends, as a stream."),
                tool("odd_sse", "Answers among lines that the standard has ignored."),
                tool("many", "Says very much."),
                tool("asks_sse", "Asks very much, as a stream, and answers."),
                tool("garbled", "Says what is no JSON."),
                tool("garbled_sse", "Says what is no JSON, as a stream."),
                tool("puzzled_sse", "Cannot tell what it was asked, as a stream."),
                tool("texted", "Gives numbers back as texts."),
                tool("nobodys", "Answers somebody else."),
                tool("puzzled", "Cannot tell what it was asked."),
                tool("accepted", "Takes it and answers nothing."),
                tool("silent", "Has nothing to say."),
                tool("many_sse", "Says very much, as a stream."),
                tool("redirect", "Sends elsewhere."),
                tool("refuse", "Refuses."),
                tool("fail", "Fails by itself."),
            ];
            tools.extend(inner.tools.iter().cloned());
            let mut result = json!({"tools": tools});
            if inner.endless_list {
                result = json!({"tools": [], "nextCursor": format!("{}", inner.seen.len())});
            }
            if era == Era::Modern {
                result["resultType"] = "complete".into();
                result["ttlMs"] = 0.into();
                result["cacheScope"] = "private".into();
            }
            reply(&id, result)
        }
        "tools/call" => call(&mcp, era, &id, &seen).await,
        "resources/read" => {
            let mut inner = mcp.get();
            // What is no resource.
            let mut answer = (200, json!({"contents": "none"}));
            if !inner.resources.is_empty() {
                answer = inner.resources.remove(0);
            }
            match answer {
                (200, result) => reply(&id, result),
                (status, _) => StatusCode::from_u16(status).unwrap().into_response(),
            }
        }
        // What is no request: a notification, or an answer.
        _ if id.is_null() || rpc.is_empty() => StatusCode::ACCEPTED.into_response(),
        _ => failure(StatusCode::OK, &id, -32601, "no such method"),
    }
}

async fn call(mcp: &Mcp, era: Era, id: &Value, seen: &Seen) -> Response {
    let refuse = {
        let mut inner = mcp.get();
        if inner.refuse.is_empty() { None } else { Some(inner.refuse.remove(0)) }
    };
    if let Some(status) = refuse {
        return StatusCode::from_u16(status).unwrap().into_response();
    }
    let text = |text: String| {
        let mut result = json!({"content": [{"type": "text", "text": text}]});
        if era == Era::Modern {
            result["resultType"] = "complete".into();
        }
        result
    };
    let arguments = &seen.body["params"]["arguments"];
    let all: Vec<String> =
        seen.headers.values().map(|value| value.to_str().unwrap().to_owned()).collect();
    // Everything it was told, credentials too.
    let said = text(format!("{arguments} {}", all.join(" ")));
    let message = json!({"jsonrpc": "2.0", "id": id, "result": said});
    match seen.tool().unwrap_or_default() {
        "echo_sse" => stream(event(&message).into()),
        "resume" => {
            mcp.get().resumable.insert("7".into(), message);
            stream(broken("id: 7\nretry: 1\ndata:\n\n".into()))
        }
        "hang" => std::future::pending().await,
        "die" => json_body(broken("{\"jsonrpc\"".into())),
        "die_sse" => stream(broken(": hello\n\n".into())),
        "endless" => json_body(endless("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[")),
        "endless_sse" => stream(endless("data: x\n")),
        "odd_sse" => {
            let said = json!({"jsonrpc": "2.0", "id": id, "result": said});
            let lines = "event\nretry: abc\nid: 1\nid: 2\nno field\nfoo: bar\n";
            stream(format!("{lines}data: {said}\nretry:\n\nevent\n\n").into())
        }
        "many" => json_body(many(id).into()),
        "garbled" => json_body(format!(r#"{{"jsonrpc":"2.0","id":{id},"result":NaN}}"#).into()),
        "garbled_sse" => {
            let said = format!(r#"{{"jsonrpc":"2.0","id":{id},"result":NaN}}"#);
            stream(format!("data: {said}\n\n").into())
        }
        "puzzled_sse" => {
            let error = json!({"code": -32600, "message": "pardon?"});
            stream(event(&json!({"jsonrpc": "2.0", "id": "server-error", "error": error})).into())
        }
        "texted" => reply(&id.to_string().into(), said),
        "nobodys" => reply(&json!(4711), said),
        "puzzled" => failure(StatusCode::BAD_REQUEST, &json!("server-error"), -32600, "pardon?"),
        "accepted" => StatusCode::ACCEPTED.into_response(),
        "silent" => StatusCode::NO_CONTENT.into_response(),
        "asks_sse" => {
            let asked = |number| json!({"jsonrpc": "2.0", "id": number, "method": "ping"});
            let asked: String = (0..1_000).map(|number| event(&asked(number))).collect();
            stream((asked + &event(&message)).into())
        }
        "many_sse" => stream(format!("data: {}\n\n", many(id)).into()),
        "redirect" => {
            let elsewhere = mcp.get().elsewhere.clone();
            (StatusCode::TEMPORARY_REDIRECT, [("location", elsewhere)]).into_response()
        }
        "refuse" => failure(StatusCode::BAD_REQUEST, id, -32602, "not like this"),
        "fail" => reply(id, json!({"content": [], "isError": true, "resultType": "complete"})),
        _ => reply(id, said),
    }
}

/// An answer of some million values.
fn many(id: &Value) -> String {
    let values = "[],".repeat(3_000_000);
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[],"structuredContent":{{"x":[{values}0]}}}}}}"#
    )
}
