//! A session with an MCP server, whatever carries it: its tools, listed and
//! listed again, and its calls.
//!
//! A list counts until the server says that it changed: with a notification
//! (on a server's own accord, or for a subscription, which the protocol of
//! 2026-07-28 wants), or by the time it gave the list to live. Not every server
//! says so, and one that gave no time is asked again after a while.
//!
//! The result of a call passes the library unread ([`received`](super::received)).

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError, Weak};
use std::time::Duration;

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CancelledNotificationParam, ClientCapabilities,
    ClientConfig, ClientRequest, ErrorCode, Implementation, JsonObject, ListToolsRequest,
    PaginatedRequestParams, ProtocolVersion, ReadResourceRequest, ReadResourceRequestParams,
    RequestId, RequestMetaObject, ServerResult, SubscriptionFilter,
};
use rmcp::service::{ClientInitializeError, PeerRequestOptions, RunningService, ServiceError};
use rmcp::{ClientHandler, Peer, RoleClient};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::breaker::Breaker;
use super::declined::Heard;
use super::http::SendError;
use super::listing::{LIST_LIFE, LeftOut, Listing, Offer};
use super::received::{self, Came};
use super::scrubs::Scrubs;
use super::silence::Unanswered;
use super::stdio::Process;
use super::streamable::{self, ExchangeError, Fault, Mcp, Until};
use super::{
    Answer, Away, CallEnd, Connection, ERROR_TEXT_BYTES_MAX, Places, Undone, Unread, Unusable,
    Upstream,
};
use crate::definition::Tool;
use crate::locks::lock;

/// How long a listing may take once the server is up.
const LIST_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a call that was lost waits to know how its server ended.
const END_TIME_MAX: Duration = Duration::from_millis(200);
/// After this, a subscription that ended is asked for again.
const RESUBSCRIBE_AFTER: Duration = Duration::from_secs(30);

/// Where a call's idempotency key stands in its `_meta`. MCP has no name of its
/// own for it.
const IDEMPOTENCY_KEY: &str = "forge-vmm/idempotency-key";

/// What carries a session.
#[derive(Debug)]
pub(super) enum Line {
    /// The streams of a process.
    Process(Process),
    /// HTTP.
    Http(Mcp),
}

/// A server that is up.
#[derive(Debug)]
pub struct Session {
    server: String,
    service: RunningService<RoleClient, Handler>,
    line: Line,
    scrubs: Arc<Scrubs>,
    breaker: Arc<Breaker>,
    places: Arc<Places>,
    /// Who can start it again.
    upstream: Weak<Upstream>,
    tools: StdMutex<Arc<Vec<Arc<Tool>>>>,
    /// What was last said of the tools that are not among them.
    left_out: StdMutex<Vec<LeftOut>>,
    /// The statuses of refusals that the operator was told of.
    refused: StdMutex<BTreeSet<u16>>,
    /// How many changes the server had announced when its tools were listed.
    listed_at_change: AtomicU64,
    /// Set before a caller hears that its call was lost, so that its next one
    /// is not sent the same way.
    lost: AtomicBool,
    pub(super) since: Instant,
    /// When the list of tools is too old.
    list_until: StdMutex<Instant>,
    subscription: StdMutex<Option<AbortHandle>>,
    unanswered: Unanswered,
}

/// How one attempt at a call ended.
enum Attempt {
    Ended(Answer),
    /// The server knows the session no more, and did nothing.
    SessionGone,
}

impl Attempt {
    /// The end of the last attempt, which `session` was asked for.
    fn or_gone(self, session: &Session) -> Answer {
        match self {
            Self::Ended(end) => end,
            Self::SessionGone => {
                session.lose();
                gone("the server ends each session as soon as it began").into()
            }
        }
    }
}

/// The end of what was not carried out, since there is no session for it.
fn gone(why: &str) -> CallEnd {
    CallEnd::undone(Undone::SessionLost, why)
}

impl Session {
    /// A session that is up and has listed nothing yet.
    pub(super) fn new(
        upstream: &Arc<Upstream>,
        service: RunningService<RoleClient, Handler>,
        line: Line,
    ) -> Self {
        Self {
            server: upstream.name.clone(),
            service,
            line,
            scrubs: Arc::clone(&upstream.scrubs),
            breaker: Arc::clone(&upstream.breaker),
            places: Arc::clone(&upstream.places),
            upstream: Arc::downgrade(upstream),
            tools: StdMutex::default(),
            left_out: StdMutex::default(),
            refused: StdMutex::default(),
            listed_at_change: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            since: Instant::now(),
            list_until: StdMutex::new(Instant::now()),
            subscription: StdMutex::default(),
            unanswered: Unanswered::default(),
        }
    }

    /// What it says passes these.
    pub(super) fn scrubs(&self) -> &Scrubs {
        &self.scrubs
    }

    /// The version of the protocol that is spoken.
    pub(super) fn version(&self) -> Option<ProtocolVersion> {
        self.service.peer_info().map(|info| info.protocol_version.clone())
    }

    /// Whether it says that it has tools. Some that have say nothing.
    fn offers_tools(&self) -> bool {
        self.service.peer_info().is_some_and(|info| info.capabilities.tools.is_some())
    }

    /// The process it is carried by, if it is.
    pub(super) fn process(&self) -> Option<&Process> {
        match &self.line {
            Line::Process(process) => Some(process),
            Line::Http(_) => None,
        }
    }

    /// What is known of its end, behind `what`.
    pub(super) async fn end_of(&self, what: &str) -> String {
        match self.process() {
            Some(process) => process.end_of(what, END_TIME_MAX).await,
            None => what.to_owned(),
        }
    }

    /// Takes note that the session is over. Whether somebody did before.
    pub(super) fn lose(&self) -> bool {
        self.lost.swap(true, Ordering::AcqRel)
    }

    /// Whether no call can be sent any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lost.load(Ordering::Acquire)
            || self.service.is_closed()
            || self.service.is_transport_closed()
            || self.heard().is_over()
            || matches!(&self.line, Line::Process(process) if process.has_exited())
    }

    /// Its tools.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&lock(&self.tools))
    }

    fn heard(&self) -> &Heard {
        &self.service.service().heard
    }

    /// What comes of a request, no later than the server's end. Left to
    /// itself a request may wait for ever: one that is put into the library's
    /// queue while that is taken away (tokio's issue 7714), and any while the
    /// library waits to say its last to a server that takes nothing.
    async fn answered<T>(
        &self,
        request: impl Future<Output = Result<T, ServiceError>>,
    ) -> Result<T, ServiceError> {
        tokio::select! {
            // An answer that came before the end counts.
            biased;
            answer = request => answer,
            () = self.heard().over() => Err(ServiceError::TransportClosed),
        }
    }

    /// Sends a request; its result, as it came. Dropping the future tells the
    /// server that nobody waits any more.
    async fn asked(&self, request: ClientRequest) -> Result<ServerResult, ServiceError> {
        let _question = self.unanswered.ask(self.last_heard());
        self.answered(async {
            let options = PeerRequestOptions::no_options();
            let handle = self.service.send_cancellable_request(request, options).await?;
            let peer = self.service.peer().clone();
            let mut waiting = Waiting { peer, asked: Some(handle.id.clone()) };
            let answer = handle.await_response().await;
            waiting.asked = None;
            answer
        })
        .await
    }

    /// Whether its tools may have changed since they were listed.
    pub(super) fn is_stale(&self) -> bool {
        let until = *lock(&self.list_until);
        self.has_announced() || Instant::now() >= until
    }

    /// Whether its program is stuck, which left its list unanswered that was asked for
    /// then. A server over HTTP may be another one by the next request.
    pub(super) fn is_stuck(&self, list_asked: Instant) -> bool {
        self.process().is_some()
            && self.unanswered.is_stuck(list_asked, self.last_heard(), Instant::now())
    }

    fn last_heard(&self) -> Instant {
        self.heard().last().unwrap_or(self.since)
    }

    /// Whether it said that its tools changed since they were listed.
    fn has_announced(&self) -> bool {
        self.heard().changes() != self.listed_at_change.load(Ordering::Acquire)
    }

    /// Lets a list that is too old, and could not be read again, count a little
    /// longer. Whether it does: not one of which the server said that it changed,
    /// and none of a session that is over.
    pub(super) fn keeps_its_list(&self) -> bool {
        if self.is_closed() || self.has_announced() {
            return false;
        }
        self.list_lives(LIST_LIFE);
        true
    }

    fn list_lives(&self, life: Duration) {
        *lock(&self.list_until) = Instant::now() + life;
    }

    /// Asks a server of the newer protocol to say when its tools change, if
    /// it does that and was not asked.
    fn subscribe(&self) {
        let Some(info) = self.service.peer_info() else { return };
        let tells = info.capabilities.tools.as_ref().and_then(|tools| tools.list_changed);
        if info.protocol_version.has_initialize() || tells != Some(true) {
            return;
        }
        let mut subscription = lock(&self.subscription);
        if subscription.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (peer, heard) = (self.service.peer().clone(), self.service.service().heard());
        *subscription = Some(tokio::spawn(follow_changes(peer, heard)).abort_handle());
    }

    /// Asks for the list of tools, page by page, and takes it over.
    pub(super) async fn list(&self) -> Result<(), String> {
        self.subscribe();
        let announced = self.heard().changes();
        let mut listing = Listing::default();
        let pages = async {
            let mut cursor = None;
            loop {
                cursor = self.page(cursor, &mut listing).await?;
                if cursor.is_none() {
                    return Ok(());
                }
            }
        };
        timeout(LIST_TIME_MAX, pages).await.unwrap_or_else(|_| {
            Err(format!("tools/list took more than {} s", LIST_TIME_MAX.as_secs()))
        })?;

        let (server, scrubs) = (self.server.clone(), Arc::clone(&self.scrubs));
        // Long work, if the server wants it to be.
        let Offer { tools, left_out, life } =
            crate::beside(move || listing.offer(&server, &scrubs)).await;
        *lock(&self.tools) = Arc::new(tools);
        self.warn_of(left_out);
        self.listed_at_change.store(announced, Ordering::Release);
        self.list_lives(life);
        Ok(())
    }

    /// Asks for one page of its list, and takes it over. Where the next begins, if there
    /// is one.
    async fn page(
        &self,
        cursor: Option<String>,
        listing: &mut Listing,
    ) -> Result<Option<String>, String> {
        let failed = |error: &ServiceError| {
            let error = self.scrubs.text(&service_error(error));
            format!("tools/list failed: {}", crate::cut(&error, ERROR_TEXT_BYTES_MAX))
        };
        let params = PaginatedRequestParams::default().with_cursor(cursor);
        let request = ListToolsRequest::with_param(params);
        match self.asked(ClientRequest::ListToolsRequest(request)).await {
            Ok(ServerResult::ListToolsResult(page)) => listing.add(page),
            Ok(ServerResult::CustomResult(page)) => listing
                .add_each(page, &self.scrubs)
                .unwrap_or_else(|| Err(failed(&ServiceError::UnexpectedResponse))),
            Ok(_) => Err(failed(&ServiceError::UnexpectedResponse)),
            // It says that it has none.
            Err(ServiceError::McpError(error))
                if error.code == ErrorCode::METHOD_NOT_FOUND && !self.offers_tools() =>
            {
                Ok(None)
            }
            Err(error) => {
                // It has forgotten the session, and with it whatever was listed.
                if let ServiceError::TransportSend(error) = &error
                    && let Some(Fault::SessionExpired) = error.error.downcast_ref()
                {
                    self.lose();
                }
                Err(failed(&error))
            }
        }
    }

    /// Says which tools are left out, where that is news: a list is read again and
    /// again.
    fn warn_of(&self, left_out: Vec<LeftOut>) {
        let mut last = lock(&self.left_out);
        if *last != left_out {
            for LeftOut { tool, why } in &left_out {
                tracing::warn!(server = self.server, ?tool, ?why, "tool left out");
            }
            *last = left_out;
        }
    }

    /// For calls of its tools.
    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    /// Calls a tool and waits for its end, however long. Dropping the future
    /// tells the server that nobody waits any more. A server that forgot the
    /// session, and so did nothing, is asked once more in a new one, if the
    /// tool is still the same there and `until` is not over.
    pub(super) async fn call(
        &self,
        tool: &Tool,
        arguments: JsonObject,
        idempotency_key: Option<String>,
        until: Instant,
    ) -> Answer {
        let mut params =
            CallToolRequestParams::new(tool.name().tool().to_owned()).with_arguments(arguments);
        if let Some(key) = idempotency_key {
            let mut meta = RequestMetaObject::new();
            meta.insert(IDEMPOTENCY_KEY.to_owned(), key.into());
            params.meta = Some(meta);
        }
        if let Attempt::Ended(end) = self.attempt(tool, params.clone(), until).await {
            return end;
        }
        let connection = match self.next(until).await {
            Ok(connection) => connection,
            Err(end) => return end.into(),
        };
        let now = connection.tool(tool.name());
        if now.is_none_or(|now| now.sha256() != tool.sha256()) {
            return gone("the session ended, and in the next one this is another tool").into();
        }
        match &*connection {
            Connection::Mcp(session) => session.attempt(tool, params, until).await.or_gone(session),
            Connection::Api(_) | Connection::Hosted(_) => gone("the session ended").into(),
        }
    }

    /// The server in a new session, this one being known there no more. None that
    /// is of use only after `until`.
    async fn next(&self, until: Instant) -> Result<Arc<Connection>, CallEnd> {
        self.lose();
        let upstream = self.upstream.upgrade().ok_or_else(|| gone("the session ended"))?;
        // A box, since this may in principle come back here.
        let connection = Box::pin(upstream.connection()).await.map_err(|source| {
            let away = Away::of(&*self.server, &source);
            gone(&format!("the session ended, and no other began: {away}"))
        })?;
        // The other may have taken its time, and what it does last may still be
        // waited for.
        if Instant::now() >= until {
            return Err(gone("the session ended, and the run's time with it"));
        }
        Ok(connection)
    }

    async fn attempt(&self, tool: &Tool, params: CallToolRequestParams, until: Instant) -> Attempt {
        let outcome = self.call_once(tool, params, until).await;
        self.ended(outcome).await
    }

    /// What a request came to, whatever was asked: one that was refused was not
    /// carried out, and of one that was lost nothing is known.
    async fn ended(&self, outcome: Result<Answer, ServiceError>) -> Attempt {
        let fault = match outcome {
            Ok(answer) => {
                self.breaker.answered();
                return Attempt::Ended(answer);
            }
            Err(ServiceError::TransportSend(error)) => {
                if let Some(end) = busy(&*error.error) {
                    return Attempt::Ended(end.into());
                }
                error.error.downcast::<Fault>().ok()
            }
            Err(_) => None,
        };
        let Some(fault) = fault else {
            // The request may or may not have reached the server.
            let reason = self.end_of("it was lost before it answered").await;
            return Attempt::Ended(self.failed(reason).into());
        };
        let why = self.scrubs.text(&streamable::fault_text(&fault));
        let end = match (&*fault, streamable::status_of(&fault)) {
            (Fault::SessionExpired, _) => return Attempt::SessionGone,
            (_, Some(status @ 300..=499)) => {
                let told = self.scrubs.text(&streamable::refusal_text(&fault, status));
                // Once: how often a program is refused is its own choice.
                if told != why && self.is_first(status) {
                    tracing::warn!(server = self.server, reason = ?why, "refused by a tool server");
                }
                CallEnd::undone(Undone::Refused, &told)
            }
            (Fault::Client(ExchangeError::Send(error)), _) if let Some(end) = error.unsent() => {
                // Whose run was over says nothing of the session.
                if !matches!(error, SendError::Late) {
                    let _ = self.failed(why);
                }
                end
            }
            // What a server does that answers otherwise is not known.
            _ => self.failed(why),
        };
        Attempt::Ended(end.into())
    }

    /// Whether this session was never refused with this status before.
    fn is_first(&self, status: u16) -> bool {
        lock(&self.refused).insert(status)
    }

    /// Takes note of a failure of the server, once for each session. `reason` is
    /// scrubbed.
    fn failed(&self, reason: String) -> CallEnd {
        if !self.lose() {
            let reason = crate::cut(&reason, ERROR_TEXT_BYTES_MAX);
            tracing::warn!(server = self.server, ?reason, "tool server lost");
            self.breaker.failed(reason);
        }
        CallEnd::Lost
    }

    async fn call_once(
        &self,
        tool: &Tool,
        params: CallToolRequestParams,
        until: Instant,
    ) -> Result<Answer, ServiceError> {
        let failed = |text: &str| CallEnd::Failed(json!({ "error": text }));
        let mut request = CallToolRequest::new(params);
        request.extensions.insert(Until(until));
        let request = ClientRequest::CallToolRequest(request);
        let promised = tool.spec().output_schema.is_some();
        let end = match self.asked(request).await {
            Ok(ServerResult::CustomResult(said)) => match received::as_it_came(said) {
                Some(Came::Text(text)) => return Ok(Unread::Result { text, promised }.answer()),
                Some(Came::Read(result)) => read(Some(result), promised),
                None => CallEnd::Unusable(Unusable::NoResult),
            },
            Ok(ServerResult::InputRequiredResult(_)) => {
                failed("the tool asks its user for input, and a run has none")
            }
            Ok(ServerResult::CreateTaskResult(_)) => {
                failed("the tool answers with a task: not supported")
            }
            Ok(_) => CallEnd::Unusable(Unusable::NoResult),
            Err(error) => answered_error(error)?,
        };
        Ok(end.into())
    }

    /// Reads one of its resources, of so many bytes at most. A server that
    /// forgot the session is asked once more in a new one, as for a call.
    pub(super) async fn read_resource(
        &self,
        uri: &str,
        bytes_max: usize,
        until: Instant,
    ) -> Answer {
        let read = self.read_once(uri, bytes_max, until).await;
        if let Attempt::Ended(answer) = self.ended(read).await {
            return answer;
        }
        let connection = match self.next(until).await {
            Ok(connection) => connection,
            Err(end) => return end.into(),
        };
        match &*connection {
            Connection::Mcp(session) => {
                let read = session.read_once(uri, bytes_max, until).await;
                session.ended(read).await.or_gone(session)
            }
            Connection::Api(_) | Connection::Hosted(_) => gone("the session ended").into(),
        }
    }

    /// Sent as it is: what the library offers for this answers from a cache.
    async fn read_once(
        &self,
        uri: &str,
        bytes_max: usize,
        until: Instant,
    ) -> Result<Answer, ServiceError> {
        let mut request = ReadResourceRequest::new(ReadResourceRequestParams::new(uri));
        request.extensions.insert(Until(until));
        let end = match self.asked(ClientRequest::ReadResourceRequest(request)).await {
            Ok(ServerResult::CustomResult(said)) => match received::as_it_came(said) {
                Some(Came::Text(text)) => {
                    return Ok(Unread::Resource { text, bytes_max }.answer());
                }
                came => contents(came.and_then(Came::read), bytes_max),
            },
            Ok(ServerResult::InputRequiredResult(_)) => {
                let text = "the resource asks its reader for input, and a run has none";
                CallEnd::Failed(json!({ "error": text }))
            }
            Ok(_) => CallEnd::Unusable(Unusable::NoResource),
            Err(error) => answered_error(error)?,
        };
        Ok(end.into())
    }

    pub(super) async fn stop(&self) {
        self.service.cancellation_token().cancel();
        match &self.line {
            Line::Process(process) => process.stop().await,
            Line::Http(http) => http.ended().await,
        }
    }
}

/// What is in a resource (`ReadResourceResult`), if there are no more than so many bytes in it.
pub(super) fn contents(result: Option<Value>, bytes_max: usize) -> CallEnd {
    let contents = result.and_then(|mut it| it.get_mut("contents").map(Value::take));
    let Some(contents) =
        contents.filter(|it| it.as_array().is_some_and(|all| all.iter().all(is_content)))
    else {
        return CallEnd::Unusable(Unusable::NoResource);
    };
    let parts = contents.as_array().into_iter().flatten();
    let texts = parts.flat_map(|part| [&part["text"], &part["blob"]]).filter_map(Value::as_str);
    let bytes: usize = texts.map(str::len).sum();
    if bytes > bytes_max {
        let message = format!("the resource has {bytes} bytes, the limit is {bytes_max}");
        return CallEnd::Failed(json!({ "error": message, "code": "too_large" }));
    }
    CallEnd::Answered(json!({ "contents": contents }))
}

/// Whether it is what a resource has in one place: it says where, and has a text or
/// bytes in base64.
fn is_content(content: &Value) -> bool {
    content["uri"].is_string() && (content["text"].is_string() || content["blob"].is_string())
}

/// The end of a request that was answered with an error. Any other is handed back.
fn answered_error(error: ServiceError) -> Result<CallEnd, ServiceError> {
    match error {
        ServiceError::McpError(error) => Ok(match Unusable::of(&error) {
            Some(why) => CallEnd::Unusable(why),
            None => CallEnd::Failed(json!({
                "error": error.message,
                "code": error.code.0,
                "data": error.data,
            })),
        }),
        error => Err(error),
    }
}

/// The end of a call to a process that takes nothing: not a byte of it was written.
fn busy(error: &(dyn std::error::Error + Send + Sync + 'static)) -> Option<CallEnd> {
    let full = error.downcast_ref::<io::Error>()?;
    let is_full = full.kind() == io::ErrorKind::WouldBlock;
    is_full.then(|| CallEnd::undone(Undone::Busy, &full.to_string()))
}

/// A request that somebody waits for. Dropped with its id, the server is told
/// that nobody does any more.
struct Waiting {
    peer: Peer<RoleClient>,
    asked: Option<RequestId>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Without a runtime there is no session either.
        let (Some(asked), Ok(runtime)) = (self.asked.take(), Handle::try_current()) else { return };
        let peer = self.peer.clone();
        let why = Some("nobody waits for it any more".to_owned());
        runtime.spawn(async move {
            // Where it cannot be told, the server is gone.
            let _ = peer.notify_cancelled(CancelledNotificationParam::new(Some(asked), why)).await;
        });
    }
}

/// How a call ended, by its result, which is none where that is no JSON.
pub(super) fn read(result: Option<Value>, promised: bool) -> CallEnd {
    let Some(result) = result else { return CallEnd::Unusable(Unusable::NoJson) };
    end_of(result, promised).unwrap_or_else(CallEnd::Unusable)
}

/// How a call ended, by its result. `promised` says that the tool has a schema for
/// what is structured, which may be `null` then. Whatever is a block goes on as it
/// came.
fn end_of(mut result: Value, promised: bool) -> Result<CallEnd, Unusable> {
    let content = match result.get_mut("content").map(Value::take) {
        None => Vec::new(),
        Some(Value::Array(blocks)) => blocks,
        Some(_) => return Err(Unusable::NoResult),
    };
    if let Some(at) = content.iter().position(|block| !is_block(block)) {
        return Err(Unusable::NoBlock(at));
    }
    let structured = result.get_mut("structuredContent").map(Value::take);
    let structured = structured.filter(|it| promised || !it.is_null());
    match &result["isError"] {
        Value::Null | Value::Bool(false) => {
            Ok(structured.map_or_else(|| CallEnd::Content(content.into()), CallEnd::Answered))
        }
        Value::Bool(true) => {
            let texts: Vec<&str> = content.iter().filter_map(text_of).collect();
            let said = Some(texts.join("\n")).filter(|said| !said.trim().is_empty());
            let said = said.unwrap_or_else(|| "the tool failed, and does not say why".into());
            let mut error = json!({ "error": said, "content": content });
            if let Some(structured) = structured {
                error["structuredContent"] = structured;
            }
            Ok(CallEnd::Failed(error))
        }
        _ => Err(Unusable::NoResult),
    }
}

/// Whether it is a block of content: it has a type, and a text where that is one.
fn is_block(block: &Value) -> bool {
    block["type"].as_str().is_some_and(|kind| kind != "text" || block["text"].is_string())
}

/// The text of a block of text.
fn text_of(block: &Value) -> Option<&str> {
    if block["type"] == "text" { block["text"].as_str() } else { None }
}

impl Drop for Session {
    fn drop(&mut self) {
        let subscription = self.subscription.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = subscription {
            task.abort();
        }
    }
}

/// Has a server announce changes, which are counted where they come in. The
/// end of the subscription counts as one: what changes after it would be
/// announced to nobody.
async fn follow_changes(peer: Peer<RoleClient>, heard: Arc<Heard>) {
    let filter = SubscriptionFilter::builder().tools_list_changed().build();
    if let Ok(mut subscription) = peer.listen(filter).await {
        while let Ok(Some(_)) = subscription.next().await {}
    }
    tokio::time::sleep(RESUBSCRIBE_AFTER).await;
    heard.changed();
}

/// What went wrong, without the debug output of whole messages.
fn service_error(error: &ServiceError) -> String {
    match error {
        ServiceError::TransportSend(error) => match error.error.downcast_ref::<Fault>() {
            Some(fault) => streamable::fault_text(fault),
            None => "it takes no messages any more".into(),
        },
        ServiceError::TransportClosed => "the connection closed before the answer".into(),
        other => other.to_string(),
    }
}

/// What went wrong at the start, without the debug output of whole messages.
pub(super) fn start_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::ConnectionClosed(_) => "it hung up before it answered".into(),
        ClientInitializeError::TransportError { error, .. } => {
            match error.error.downcast_ref::<Fault>() {
                Some(fault) => streamable::fault_text(fault),
                None => "it closed its standard input".into(),
            }
        }
        ClientInitializeError::JsonRpcError(error) => {
            format!("it refused: {} ({})", error.message, error.code.0)
        }
        // The older protocol is the last that was tried.
        ClientInitializeError::LegacyFallbackFailed { fallback, .. } => start_error(fallback),
        ClientInitializeError::ExpectedInitResponse(_)
        | ClientInitializeError::ExpectedInitResult(_) => {
            "it answers the first request with what is no answer to it".into()
        }
        // Cut once it is scrubbed: what is cut through is not known as a
        // credential.
        other => other.to_string(),
    }
}

/// The client's side of MCP: declines whatever a server asks.
#[derive(Debug, Default)]
pub(super) struct Handler {
    heard: Arc<Heard>,
}

impl Handler {
    /// Where is noted what the server says.
    pub(super) fn heard(&self) -> Arc<Heard> {
        Arc::clone(&self.heard)
    }
}

impl ClientHandler for Handler {
    fn get_info(&self) -> ClientConfig {
        let own = Implementation::new("forge-toolbroker", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), own)
    }
}
