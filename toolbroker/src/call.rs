//! The chain that every tool call passes.
//!
//! ```text
//!  the connection says which run
//!    → the grant allows the tool          denied
//!    → the request is of a size           request too large
//!    → the tool is there                  no such tool
//!    → its definition is the granted one  denied
//!    → the arguments fit its schema       bad request
//!    → the budget is not spent            budget spent
//!    → there is time                      deadline passed
//!  ═══ dispatched: it may have happened from here on ═══
//!    → an answer came in time             outcome unknown
//!    → credentials are taken out of it
//!    → the tool did not fail              tool failed
//!    → the response is of a size          response too large
//!    → the response
//! ```
//!
//! A call that is refused above the line costs its server not one byte. One
//! that passed the line is followed to its end and recorded, whether anybody
//! still waits or not. A built-in tool passes the same chain; where it is
//! carried out in place ([`Dispatcher::at_once`]) there is nothing to follow.
//!  Distrusted are the worker (whatever it sends is within
//! its run or nothing) and the server. Deliberately absent, with their places
//! in the order: argument constraints (after the schema), approval and the
//! durable journal (before dispatch), the output schema and data-flow labels
//! (after it).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::GrantClaims;
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::{CALLS_MAX, REQUEST_BYTES_MAX, RESPONSE_BYTES_MAX, RunLimits};
use forge_protocol::name::ToolName;
use rmcp::model::JsonObject;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use crate::builtin::Builtin;
use crate::definition::{Effect, Tool};
use crate::registry::{Carrier, Found, LookupError, Registry};
use crate::secret::{Scrubbed, Scrubber};
use crate::upstream::{CallEnd, ERROR_TEXT_BYTES_MAX};

/// The run's own deadline is its worker's to keep, whose clock started a
/// little later. This much behind it, the broker gives up by itself.
const DEADLINE_LEAD: Duration = Duration::from_millis(500);
/// How long a dispatched call is followed after its run's deadline. Whoever
/// has not answered by then is told that nobody waits, and the outcome stays
/// unknown.
const AFTERMATH_MAX: Duration = Duration::from_secs(5);
/// A larger request to a built-in is carried out on a thread of its own: to
/// parse, check and hash this much takes some 100 us at most, and the runs
/// beside it wait no longer.
const IN_PLACE_BYTES_MAX: usize = 32 * 1024;
/// The longest wall clock reckoned with, so that no sum of times overflows.
const WALL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// One run: what it may call, and what it has used. Known by the connection
/// it was opened for.
#[derive(Debug)]
pub struct Run {
    id: RunId,
    granted: HashMap<ToolName, [u8; 32]>,
    limits: RunLimits,
    calls_max: u32,
    calls_spent: AtomicU32,
    deadline: Instant,
}

impl Run {
    /// A run under a verified grant, whose wall clock starts now.
    #[must_use]
    pub fn new(id: RunId, claims: &GrantClaims, limits: RunLimits) -> Self {
        let granted =
            claims.tools.iter().map(|tool| (tool.name.clone(), tool.definition_sha256)).collect();
        let calls_max = limits.calls.min(claims.calls_max.unwrap_or(u32::MAX)).min(CALLS_MAX);
        // Whoever asks for more than the protocol can carry gets that.
        let limits = RunLimits {
            request_bytes: limits.request_bytes.min(REQUEST_BYTES_MAX),
            response_bytes: limits.response_bytes.min(RESPONSE_BYTES_MAX),
            ..limits
        };
        let wall = Duration::from_millis(limits.wall_ms).min(WALL_MAX);
        let deadline = Instant::now() + wall + DEADLINE_LEAD;
        Self { id, granted, limits, calls_max, calls_spent: AtomicU32::new(0), deadline }
    }

    /// Which run it is, for records.
    #[must_use]
    pub fn id(&self) -> RunId {
        self.id
    }

    /// What it may use.
    #[must_use]
    pub fn limits(&self) -> &RunLimits {
        &self.limits
    }

    /// Takes one call from the budget.
    fn spend(&self) -> Result<(), CallFailure> {
        let limit = self.calls_max;
        self.calls_spent
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |spent| {
                (spent < limit).then_some(spent + 1)
            })
            .map(|_| ())
            .map_err(|_| CallFailure::BudgetSpent { limit })
    }
}

/// Why a call gave no response.
#[derive(Debug, thiserror::Error)]
pub enum CallFailure {
    /// The grant does not name the tool.
    #[error("this run's grant does not allow {tool}")]
    NotGranted {
        /// The tool.
        tool: ToolName,
    },
    /// The server describes the tool otherwise than when it was granted.
    #[error("the definition of {tool} changed since it was granted")]
    DefinitionChanged {
        /// The tool.
        tool: ToolName,
    },
    /// The request is over the run's limit.
    #[error("the request has {got} bytes, the limit is {limit}")]
    RequestTooLarge {
        /// Its size.
        got: usize,
        /// The limit.
        limit: u32,
    },
    /// The tool is not there, or its server cannot be asked.
    #[error("{0}")]
    NoSuchTool(LookupError),
    /// The request is no JSON object.
    #[error("the request is not a JSON object: {why}")]
    NotAnObject {
        /// What it is.
        why: String,
    },
    /// The request is not what the schema asks.
    #[error("the arguments do not fit the tool's schema: {}", violations.join("; "))]
    BadArguments {
        /// The violations, with their places.
        violations: Vec<String>,
    },
    /// The calls are used up.
    #[error("the budget of {limit} calls is spent")]
    BudgetSpent {
        /// The budget.
        limit: u32,
    },
    /// The deadline passed before dispatch.
    #[error("the run's time was over before the call")]
    DeadlinePassed,
    /// The deadline passed after dispatch.
    #[error("the run's time was over before the tool answered; it may have done its work")]
    DeadlineAfterDispatch,
    /// The server was lost after dispatch.
    #[error("the tool server was lost before it answered; it may have done its work")]
    Lost,
    /// The tool failed.
    #[error("the tool failed")]
    ToolFailed {
        /// Its error, a JSON object, scrubbed.
        error: Value,
        /// Whether there was a credential in it.
        redacted: bool,
    },
    /// The response is over the run's limit.
    #[error("the response has {got} bytes, the limit is {limit}")]
    ResponseTooLarge {
        /// Its size.
        got: usize,
        /// The limit.
        limit: u32,
    },
}

impl CallFailure {
    /// What the program sees.
    #[must_use]
    pub fn code(&self) -> CallCode {
        match self {
            Self::NotGranted { .. } | Self::DefinitionChanged { .. } => CallCode::Denied,
            Self::NoSuchTool(_) => CallCode::NoSuchTool,
            Self::NotAnObject { .. } | Self::BadArguments { .. } => CallCode::BadRequest,
            Self::RequestTooLarge { .. } => CallCode::RequestTooLarge,
            Self::ToolFailed { .. } => CallCode::ToolFailed,
            Self::BudgetSpent { .. } => CallCode::BudgetSpent,
            Self::DeadlinePassed => CallCode::DeadlinePassed,
            Self::DeadlineAfterDispatch | Self::Lost => CallCode::OutcomeUnknown,
            Self::ResponseTooLarge { .. } => CallCode::ResponseTooLarge,
        }
    }

    /// The reason as the program can read it: a JSON object with `error`,
    /// within `bytes_max`; empty if not even a cut reason fits.
    #[must_use]
    pub fn body(&self, bytes_max: usize) -> Vec<u8> {
        let whole = match self {
            Self::ToolFailed { error, .. } => error.clone(),
            Self::BadArguments { violations } => {
                json!({ "error": self.to_string(), "violations": violations })
            }
            other => json!({ "error": other.to_string() }),
        };
        let body = whole.to_string().into_bytes();
        if body.len() <= bytes_max {
            return body;
        }
        let text = whole.get("error").and_then(Value::as_str).unwrap_or_default();
        // Escapes may double a text; a sixth of the room always suffices.
        for text_bytes in [ERROR_TEXT_BYTES_MAX, bytes_max / 2, bytes_max / 7] {
            let body = json!({ "error": crate::cut(text, text_bytes) }).to_string().into_bytes();
            if body.len() <= bytes_max {
                return body;
            }
        }
        Vec::new()
    }
}

/// Carries calls out.
#[derive(Clone, Debug)]
pub struct Dispatcher {
    registry: Arc<Registry>,
    /// Where servers are talked with.
    home: Handle,
    /// Everything past the line, to be waited for at the end.
    dispatched: TaskTracker,
}

impl Dispatcher {
    /// A dispatcher to the servers of `registry`, which are talked with on
    /// the event loop `home`.
    #[must_use]
    pub fn new(registry: Arc<Registry>, home: Handle) -> Self {
        Self { registry, home, dispatched: TaskTracker::new() }
    }

    /// Waits until every dispatched call is recorded. None may be started
    /// after that.
    pub async fn drain(&self) {
        self.dispatched.close();
        self.dispatched.wait().await;
    }

    /// Settles a call for which nobody needs to be asked or waited for: one
    /// that the first checks refuse, and one of a built-in tool with a small
    /// request. `None` for any other, which is for [`Dispatcher::carry_out`].
    #[must_use]
    pub fn at_once(&self, run: &Run, call: &Call) -> Option<Settled> {
        let began = Instant::now();
        let granted_sha256 = match first_checks(run, call) {
            Ok(granted_sha256) => granted_sha256,
            Err(failure) => return Some(settled(run, call.id, &call.tool, Err(failure), began)),
        };
        if call.request.len() > IN_PLACE_BYTES_MAX {
            return None;
        }
        let builtin = self.registry.builtin(&call.tool)?;
        let outcome =
            carry_out_builtin(run, builtin, granted_sha256, call.id, &call.request, began);
        Some(settled(run, call.id, &call.tool, outcome.map(unredacted), began))
    }

    /// Carries one call out and says how it settled. Dropping the future
    /// before dispatch undoes the call; after it, the call goes on unheard.
    pub async fn carry_out(&self, run: &Arc<Run>, call: Call) -> Settled {
        let began = Instant::now();
        let (id, tool) = (call.id, call.tool.clone());
        let outcome = self.pass_the_chain(run, call, began).await;
        settled(run, id, &tool, outcome, began)
    }

    async fn pass_the_chain(
        &self,
        run: &Arc<Run>,
        call: Call,
        began: Instant,
    ) -> Result<Response, CallFailure> {
        let granted_sha256 = first_checks(run, &call)?;
        let Call { id, tool, request, waits: _ } = call;
        let Found { tool, carrier } = timeout_at(run.deadline, self.registry.find(&tool))
            .await
            .map_err(|_| CallFailure::DeadlinePassed)?
            .map_err(CallFailure::NoSuchTool)?;
        let (deliver, delivered) = oneshot::channel();
        let owner = Arc::clone(run);
        let scrubber = self.registry.scrubber().clone();
        let effect = match &carrier {
            Carrier::Builtin(builtin) => Some(builtin.effect()),
            Carrier::Server(_) => None,
        };
        match carrier {
            Carrier::Builtin(builtin) => {
                // Long work for a thread that nobody else waits for.
                self.dispatched.spawn_blocking(move || {
                    let outcome =
                        carry_out_builtin(&owner, &builtin, granted_sha256, id, &request, began);
                    let _ = deliver.send(outcome.map(unredacted));
                });
            }
            Carrier::Server(connection) => {
                let arguments = if request.len() > IN_PLACE_BYTES_MAX {
                    // Long work here too.
                    let (run, tool) = (Arc::clone(run), Arc::clone(&tool));
                    let checks = move || last_checks(&run, &tool, granted_sha256, &request);
                    match tokio::task::spawn_blocking(checks).await {
                        Ok(arguments) => arguments?,
                        // Only a panic of ours ends it without an outcome.
                        Err(error) => std::panic::resume_unwind(error.into_panic()),
                    }
                } else {
                    last_checks(run, &tool, granted_sha256, &request)?
                };
                let called = async move {
                    let until = owner.deadline + AFTERMATH_MAX;
                    let called = timeout_at(until, connection.call(&tool, arguments)).await;
                    let called = called.unwrap_or(CallEnd::Lost);
                    let Scrubbed { left, removed } = redacted(&scrubber, called);
                    if removed > 0 {
                        tracing::warn!(
                            run = %owner.id,
                            call = id,
                            tool = ?tool.name().as_str(),
                            removed,
                            "a tool's result carried credentials, which were removed"
                        );
                    }
                    let outcome = settle(&owner, left, removed > 0);
                    record_end(&owner, id, tool.name(), &outcome, began);
                    // Nobody waits any more if the deadline came first.
                    let _ = deliver.send(outcome);
                };
                self.dispatched.spawn_on(called, &self.home);
            }
        }
        match timeout_at(run.deadline, delivered).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(CallFailure::Lost),
            // What has no effect is as good as not done.
            Err(_) if effect == Some(Effect::None) => Err(CallFailure::DeadlinePassed),
            Err(_) => Err(CallFailure::DeadlineAfterDispatch),
        }
    }
}

/// What a call is refused for before anybody knows whether its tool is there.
fn first_checks(run: &Run, call: &Call) -> Result<[u8; 32], CallFailure> {
    let granted_sha256 = granted(run, &call.tool)?;
    size_of_request(run, &call.request)?;
    Ok(granted_sha256)
}

/// The rest of the chain down to the line: the arguments of a call that may
/// be dispatched.
fn last_checks(
    run: &Run,
    tool: &Tool,
    granted_sha256: [u8; 32],
    request: &[u8],
) -> Result<JsonObject, CallFailure> {
    if tool.sha256() != granted_sha256 {
        return Err(CallFailure::DefinitionChanged { tool: tool.name().clone() });
    }
    let arguments = Value::Object(parse(request)?);
    tool.check(&arguments).map_err(|violations| CallFailure::BadArguments { violations })?;
    run.spend()?;
    if Instant::now() >= run.deadline {
        return Err(CallFailure::DeadlinePassed);
    }
    match arguments {
        Value::Object(arguments) => Ok(arguments),
        _ => Err(CallFailure::NotAnObject { why: "it is another JSON value".into() }),
    }
}

/// The chain from the pinned definition on, for a tool of the broker's own.
fn carry_out_builtin(
    run: &Run,
    builtin: &Builtin,
    granted_sha256: [u8; 32],
    id: u32,
    request: &[u8],
    began: Instant,
) -> Result<Vec<u8>, CallFailure> {
    let arguments = last_checks(run, builtin.tool(), granted_sha256, request)?;
    let outcome = settle(run, builtin.carry_out(&arguments), false);
    record_end(run, id, builtin.tool().name(), &outcome, began);
    outcome.map(|response| response.body)
}

/// A response without a credential in it; and whether there was one.
#[derive(Debug)]
struct Response {
    body: Vec<u8>,
    redacted: bool,
}

/// What the broker itself says has none in it.
fn unredacted(body: Vec<u8>) -> Response {
    Response { body, redacted: false }
}

/// The redaction step: all known credentials, of whichever server, and
/// whatever looks like one.
fn redacted(scrubber: &Scrubber, end: CallEnd) -> Scrubbed<CallEnd> {
    match end {
        CallEnd::Answered(response) => {
            let Scrubbed { left, removed } = scrubber.json_counted(response);
            Scrubbed { left: CallEnd::Answered(left), removed }
        }
        CallEnd::Failed(error) => {
            let Scrubbed { left, removed } = scrubber.json_counted(error);
            Scrubbed { left: CallEnd::Failed(left), removed }
        }
        CallEnd::Lost => Scrubbed { left: CallEnd::Lost, removed: 0 },
    }
}

/// How a call settled, with a record if it gave no response.
fn settled(
    run: &Run,
    id: u32,
    tool: &ToolName,
    outcome: Result<Response, CallFailure>,
    began: Instant,
) -> Settled {
    let (code, body, redacted) = match outcome {
        Ok(response) => (None, response.body, response.redacted),
        Err(failure) => {
            record(run.id, id, tool, &failure, began);
            let redacted = matches!(failure, CallFailure::ToolFailed { redacted: true, .. });
            (Some(failure.code()), failure.body(run.limits.response_bytes as usize), redacted)
        }
    };
    let duration_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Settled { id, code, duration_ns, body, redacted }
}

fn granted(run: &Run, tool: &ToolName) -> Result<[u8; 32], CallFailure> {
    run.granted.get(tool).copied().ok_or_else(|| CallFailure::NotGranted { tool: tool.clone() })
}

/// Before the request is looked at: what is refused by its size alone is not
/// parsed.
fn size_of_request(run: &Run, request: &[u8]) -> Result<(), CallFailure> {
    let limit = run.limits.request_bytes;
    if request.len() > limit as usize {
        return Err(CallFailure::RequestTooLarge { got: request.len(), limit });
    }
    Ok(())
}

/// What is parsed here is what is checked and what is sent, so that a server
/// that reads JSON otherwise never sees other arguments than were checked.
fn parse(request: &[u8]) -> Result<JsonObject, CallFailure> {
    match serde_json::from_slice(request) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(_) => Err(CallFailure::NotAnObject { why: "it is another JSON value".into() }),
        Err(error) => Err(CallFailure::NotAnObject { why: error.to_string() }),
    }
}

fn settle(run: &Run, end: CallEnd, redacted: bool) -> Result<Response, CallFailure> {
    match end {
        CallEnd::Answered(response) => {
            let body = response.to_string().into_bytes();
            let limit = run.limits.response_bytes;
            if body.len() > limit as usize {
                return Err(CallFailure::ResponseTooLarge { got: body.len(), limit });
            }
            Ok(Response { body, redacted })
        }
        CallEnd::Failed(error) => Err(CallFailure::ToolFailed { error, redacted }),
        CallEnd::Lost => Err(CallFailure::Lost),
    }
}

/// One record for each call that gave the program no response. At `info`:
/// what a program does must not choose how much is logged by default.
fn record(run: RunId, call: u32, tool: &ToolName, failure: &CallFailure, began: Instant) {
    tracing::info!(
        %run,
        call,
        tool = ?tool.as_str(),
        code = failure.code().as_str(),
        why = ?failure.to_string(),
        took_us = began.elapsed().as_micros() as u64,
        "call refused or failed"
    );
}

/// One record for each dispatched call, with its true end. The journal takes
/// this place.
fn record_end(
    run: &Run,
    call: u32,
    tool: &ToolName,
    outcome: &Result<Response, CallFailure>,
    began: Instant,
) {
    tracing::info!(
        run = %run.id,
        call,
        tool = ?tool.as_str(),
        code = outcome.as_ref().err().map_or("ok", |failure| failure.code().as_str()),
        late = Instant::now() > run.deadline,
        took_us = began.elapsed().as_micros() as u64,
        "dispatched call ended"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use forge_protocol::broker::GrantedTool;

    fn run(limits: RunLimits, calls_max: Option<u32>) -> Run {
        let tool =
            GrantedTool { name: ToolName::parse("shop.find").unwrap(), definition_sha256: [1; 32] };
        let claims = GrantClaims {
            principal: "alice".into(),
            tools: vec![tool],
            expires_unix_s: 0,
            calls_max,
        };
        Run::new(RunId([0; 16]), &claims, limits)
    }

    #[test]
    fn the_budget_is_the_smaller_of_run_and_grant() {
        for (calls, calls_max, expected) in [(5, None, 5), (5, Some(2), 2), (2, Some(5), 2)] {
            let run = run(RunLimits { calls, ..RunLimits::default() }, calls_max);
            for _ in 0..expected {
                run.spend().unwrap();
            }
            let spent = run.spend().unwrap_err();
            assert!(matches!(spent, CallFailure::BudgetSpent { limit } if limit == expected));
        }
    }

    #[test]
    fn a_built_in_whose_definition_is_not_the_granted_one_is_denied() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let registry = Arc::new(Registry::new(Config::default(), runtime.handle()));
        let name = ToolName::parse("crypto.hash").unwrap();
        let present = registry.builtin(&name).unwrap().tool().sha256();
        let dispatcher = Dispatcher::new(registry, runtime.handle().clone());
        for (definition_sha256, code) in [(present, None), ([1; 32], Some(CallCode::Denied))] {
            let claims = GrantClaims {
                principal: "alice".into(),
                tools: vec![GrantedTool { name: name.clone(), definition_sha256 }],
                expires_unix_s: 0,
                calls_max: None,
            };
            let run = Run::new(RunId([0; 16]), &claims, RunLimits::default());
            let request = br#"{"algorithm": "sha256", "text": "abc"}"#.to_vec();
            let call = Call { id: 0, waits: true, tool: name.clone(), request };
            assert_eq!(dispatcher.at_once(&run, &call).unwrap().code, code);
        }
    }

    #[test]
    fn a_request_that_is_no_json_object_is_a_bad_request() {
        for request in ["", "[]", "7", "{", "{}{}", "{\"a\":\u{1}}", &"[".repeat(100_000)] {
            let refused = parse(request.as_bytes()).unwrap_err();
            assert_eq!(refused.code(), CallCode::BadRequest, "{refused}");
        }
        assert!(parse(&[b'{', 0xFF, b'}']).is_err());
        parse(b"{\"a\": 1}").unwrap();
    }

    #[test]
    fn a_reason_always_fits_its_bound_and_stays_json() {
        let failure = CallFailure::ToolFailed {
            error: json!({ "error": "\u{1}\"é".repeat(9_999) }),
            redacted: false,
        };
        for bytes_max in (0..64).chain([100, 1_000, 10_000, 1_000_000]) {
            let body = failure.body(bytes_max);
            assert!(body.len() <= bytes_max, "{} of {bytes_max}", body.len());
            if !body.is_empty() {
                let body: Value = serde_json::from_slice(&body).unwrap();
                assert!(body["error"].is_string());
            }
        }
        assert!(!failure.body(100).is_empty());
    }

    #[test]
    fn limits_beyond_the_protocol_are_lowered_to_it() {
        let asked = RunLimits {
            response_bytes: u32::MAX,
            request_bytes: u32::MAX,
            wall_ms: u64::MAX,
            ..RunLimits::default()
        };
        let run = run(asked, None);
        assert_eq!(run.limits().response_bytes, RESPONSE_BYTES_MAX);
        assert_eq!(run.limits().request_bytes, REQUEST_BYTES_MAX);
    }
}
