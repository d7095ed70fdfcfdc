//! The steps of a call, each made from the one before and from nothing else,
//! so that none can be left out and none can come too early.
//!
//! ```text
//!  Identified ─▶ Granted ─▶ Pinned ─▶ Checked ─▶ Intended ─▶ Dispatched ─▶ Fitting ─▶ Redacted
//!      └────────────┴──────────┴─────────┴─── Refused            │            │
//!                                                                └── recorded ┘
//! ```
//!
//! Whatever a step refuses it gives back as [`Refused`], whose only way on is
//! into the journal.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::abi::CallCode;
use forge_protocol::guest::{Call, Settled};
use forge_protocol::json::{self, first_deeper};
use forge_protocol::limits::REQUEST_DEPTH_MAX;
use rmcp::model::JsonObject;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout_at};

use super::failure::{self, CallFailure, tool_error};
use super::run::Run;
use crate::builtin::InPlace;
use crate::constraint::first_changed;
use crate::definition::{Effect, Tool};
use crate::journal::{CallFacts, Event, Journal, Record};
use crate::metrics::Metrics;
use crate::registry::Carrier;
use crate::review::Reviews;
use crate::schema::cost::values_of;
use crate::secret::{Scrubbed, Scrubber};
use crate::telemetry::{CallSpan, CalledTool, Span, Spans, Steps};
use crate::upstream::{Answer, CallEnd, Place, Said, Unusable, VALUES_MAX};

/// How long a dispatched call is followed after its run's deadline. Whoever
/// has not answered by then is told that nobody waits, and the outcome stays
/// unknown.
const AFTERMATH_MAX: Duration = Duration::from_secs(5);
/// The digest of a larger request is taken with its other checks, away from
/// the links' thread; it is not taken for a record of its refusal.
pub(super) const IN_PLACE_BYTES_MAX: usize = 32 * 1024;

/// Where calls are recorded.
#[derive(Clone, Debug)]
pub(super) struct Books {
    pub(super) journal: Journal,
    pub(super) metrics: Arc<Metrics>,
    pub(super) spans: Option<Spans>,
}

/// What is known of a call from the first step to the last.
#[derive(Debug)]
struct Facts {
    run: Arc<Run>,
    call: CallFacts,
    began: Instant,
    /// What it passed, and when.
    steps: Steps,
}

impl Facts {
    fn refused(self, failure: CallFailure) -> Refused {
        Refused(Box::new(Refusal { facts: self, failure }))
    }

    /// It passed every check.
    fn authorised(&mut self, books: &Books) {
        let took = self.began.elapsed();
        books.metrics.authorised(took);
        self.steps.authorised = Some(took);
    }

    fn event(&self, event: Event) -> Record {
        Record::now(self.run.id(), Arc::clone(self.run.principal()), event)
    }
}

/// The connection said whose run it is: a call of that run.
#[derive(Debug)]
pub(super) struct Identified {
    facts: Facts,
    request: Vec<u8>,
}

impl Identified {
    pub(super) fn new(run: &Arc<Run>, call: Call, books: &Books) -> Self {
        let Call { id, tool, request, waits: _ } = call;
        if run.mark_called() {
            let opened = Event::Opened { program_sha256: run.program_sha256() };
            books.journal.append(Record::now(run.id(), Arc::clone(run.principal()), opened));
        }
        let call = CallFacts {
            call: id,
            held_by_caller: run.hosts(&tool),
            tool,
            definition_sha256: None,
            effect: None,
            arguments_sha256: None,
        };
        let (run, began) = (Arc::clone(run), Instant::now());
        let facts = Facts { run, call, began, steps: Steps::default() };
        Self { facts, request }
    }

    /// The grant names the tool; and the request is of a size that is worth
    /// looking at, which is asked as soon as it can be: what is refused by
    /// its size alone is never parsed, and no server is started for it.
    pub(super) fn granted(self) -> Result<Granted, Refused> {
        let Self { mut facts, request } = self;
        if request.len() <= IN_PLACE_BYTES_MAX {
            facts.call.arguments_sha256 = Some(Sha256::digest(&request).into());
        }
        let Some(definition_sha256) = facts.run.pin(&facts.call.tool) else {
            let tool = facts.call.tool.clone();
            return Err(facts.refused(CallFailure::NotGranted { tool }));
        };
        facts.call.definition_sha256 = Some(definition_sha256);
        let limit = facts.run.limits().request_bytes;
        if request.len() > limit as usize {
            let got = request.len();
            return Err(facts.refused(CallFailure::RequestTooLarge { got, limit }));
        }
        Ok(Granted { facts, request, definition_sha256 })
    }
}

/// The grant allows the tool.
#[derive(Debug)]
pub(super) struct Granted {
    facts: Facts,
    request: Vec<u8>,
    definition_sha256: [u8; 32],
}

impl Granted {
    pub(super) fn run(&self) -> &Arc<Run> {
        &self.facts.run
    }

    pub(super) fn tool(&self) -> &forge_protocol::name::ToolName {
        &self.facts.call.tool
    }

    /// Its number in the run.
    pub(super) fn call(&self) -> u32 {
        self.facts.call.call
    }

    /// When it arrived.
    pub(super) fn began(&self) -> Instant {
        self.facts.began
    }

    /// Whether its checks are so little work that others can wait for them.
    pub(super) fn is_small(&self, tool: &Tool) -> bool {
        self.request.len() <= IN_PLACE_BYTES_MAX && tool.checks_soon(self.request.len())
    }

    pub(super) fn refused(self, failure: CallFailure) -> Refused {
        self.facts.refused(failure)
    }

    /// The tool's definition is the one that was granted, and approved still, if its
    /// server is the operator's.
    pub(super) fn pinned(
        self,
        tool: Arc<Tool>,
        effect: Effect,
        cost: u32,
        reviews: &Reviews,
    ) -> Result<Pinned, Refused> {
        let Self { mut facts, request, definition_sha256 } = self;
        facts.call.effect = Some(effect);
        if tool.sha256() != definition_sha256 {
            let tool = tool.name().clone();
            return Err(facts.refused(CallFailure::DefinitionChanged { tool }));
        }
        if !facts.call.held_by_caller
            && let Err(why) = reviews.check_call(&tool)
        {
            return Err(facts.refused(CallFailure::NotReviewed(why)));
        }
        Ok(Pinned { facts, request, tool, effect, cost })
    }
}

/// The tool is the one that was granted.
#[derive(Debug)]
pub(super) struct Pinned {
    facts: Facts,
    request: Vec<u8>,
    tool: Arc<Tool>,
    effect: Effect,
    cost: u32,
}

impl Pinned {
    /// There is a place for it at whoever carries it out.
    pub(super) async fn placed(self, carrier: &Carrier) -> Result<(Self, Option<Place>), Refused> {
        let run = &self.facts.run;
        match run.in_time(carrier.place(run.principal(), self.request.len())).await {
            Some(place) => Ok((self, place)),
            None => Err(self.facts.refused(CallFailure::DeadlinePassed)),
        }
    }

    /// Waits for a turn to read its request, as long as its run has time.
    pub(super) async fn turn<T>(
        self,
        turns: impl AsyncFnOnce(&Arc<str>) -> T,
    ) -> Result<(Self, T), Refused> {
        let run = &self.facts.run;
        match run.in_time(turns(run.principal())).await {
            Some(turn) => Ok((self, turn)),
            None => Err(self.facts.refused(CallFailure::DeadlinePassed)),
        }
    }

    /// The arguments fit, can be sent to `carrier`, which is none where the broker itself
    /// carries the call out in this thread, and the run can afford it.
    pub(super) fn checked(self, carrier: Option<&Carrier>) -> Result<Checked, Refused> {
        let Self { mut facts, request, tool, effect, cost } = self;
        if facts.call.arguments_sha256.is_none() {
            facts.call.arguments_sha256 = Some(Sha256::digest(&request).into());
        }
        match check(&facts.run, &tool, carrier, cost, &request) {
            Ok(arguments) => Ok(Checked { facts, tool, effect, arguments }),
            Err(failure) => Err(facts.refused(failure)),
        }
    }
}

fn check(
    run: &Run,
    tool: &Tool,
    carrier: Option<&Carrier>,
    cost: u32,
    request: &[u8],
) -> Result<JsonObject, CallFailure> {
    let arguments = Value::Object(parse(request)?);
    tool.check(&arguments).map_err(CallFailure::BadArguments)?;
    let outside = |violation| CallFailure::OutsideGrant { tool: tool.name().clone(), violation };
    run.grant().check(tool.name(), &arguments, &tool.spec().input_schema).map_err(outside)?;
    let Value::Object(arguments) = arguments else {
        return Err(CallFailure::NotAnObject { why: "it is another JSON value".into() });
    };
    if let Some(carrier) = carrier {
        let unsendable = |why| CallFailure::Unsendable { why };
        carrier.can_send(tool, &arguments).map_err(unsendable)?;
    }
    in_time(run)?;
    // What is refused above costs no budget. What passes here is dispatched, unless
    // the journal says no.
    run.spend(cost)?;
    Ok(arguments)
}

/// Whether anybody still waits for what would be sent now. The time of a run that was
/// cancelled or cut off is over.
fn in_time(run: &Run) -> Result<(), CallFailure> {
    let is_over = run.is_cancelled() || run.is_cut_off() || Instant::now() >= run.deadline();
    if is_over { Err(CallFailure::DeadlinePassed) } else { Ok(()) }
}

/// When a dispatched call of the run is given up.
fn heard_until(run: &Run) -> Instant {
    run.deadline() + AFTERMATH_MAX
}

/// What is parsed here is what is checked and what is sent, so that a server
/// that reads JSON otherwise never sees other arguments than were checked.
fn parse(request: &[u8]) -> Result<JsonObject, CallFailure> {
    let too_deep = || {
        let why = format!("it is nested more than {REQUEST_DEPTH_MAX} deep: make it flatter");
        CallFailure::NotAnObject { why }
    };
    // Half a character costs itself, as in results: what is mended is checked and sent.
    let read = json::from_slice::<Value>(request);
    let is_text = || std::str::from_utf8(request).is_ok();
    let mended = (read.is_err() && is_text()).then(|| json::mended(request)).flatten();
    let (read, request) = match &mended {
        Some(mended) => (json::from_slice::<Value>(mended.as_bytes()), mended.as_bytes()),
        None => (read, request),
    };
    match read {
        Ok(_) if first_deeper(request, REQUEST_DEPTH_MAX).is_some() => Err(too_deep()),
        Ok(Value::Object(arguments)) => match first_changed(request) {
            None => Ok(arguments),
            Some(at) => Err(CallFailure::InexactNumber { at }),
        },
        Ok(_) => Err(CallFailure::NotAnObject { why: "it is another JSON value".into() }),
        // In the library's words it is a recursion limit, which tells a program nothing.
        Err(error) if error.to_string().starts_with("recursion limit") => Err(too_deep()),
        Err(error) => Err(CallFailure::NotAnObject { why: error.to_string() }),
    }
}

/// Everything that is asked of a call was asked.
#[derive(Debug)]
pub(super) struct Checked {
    facts: Facts,
    tool: Arc<Tool>,
    effect: Effect,
    arguments: JsonObject,
}

impl Checked {
    /// What the operator says it does.
    pub(super) fn effect(&self) -> Effect {
        self.effect
    }

    /// The journal has the intent: on the disk if the call changes something.
    pub(super) async fn intended(self, books: &Books) -> Result<Intended, Refused> {
        let Self { mut facts, tool, effect, arguments } = self;
        facts.authorised(books);
        let asked = Instant::now();
        let intent = facts.event(Event::Intent(facts.call.clone()));
        if books.journal.intend(intent, effect == Effect::Write).await.is_err() {
            return Err(facts.refused(CallFailure::NotRecorded));
        }
        books.metrics.intended(asked.elapsed());
        facts.steps.intended = Some(facts.began.elapsed());
        // The disk may have taken its time.
        match in_time(&facts.run) {
            Ok(()) => Ok(Intended { facts, tool, effect, arguments }),
            Err(failure) => Err(facts.refused(failure)),
        }
    }

    /// The same for a call without any effect, where the journal is known to
    /// be ready: nobody needs to be waited for.
    pub(super) fn intended_at_once(self, books: &Books) -> Intended {
        let Self { mut facts, tool, effect, arguments } = self;
        facts.authorised(books);
        books.journal.append(facts.event(Event::Intent(facts.call.clone())));
        facts.steps.intended = Some(facts.began.elapsed());
        Intended { facts, tool, effect, arguments }
    }
}

/// The journal knows of the call.
#[derive(Debug)]
pub(super) struct Intended {
    facts: Facts,
    tool: Arc<Tool>,
    effect: Effect,
    arguments: JsonObject,
}

impl Intended {
    /// Sends the call to whoever carries it out, with the credential held for
    /// it there, and waits for its end.
    pub(super) async fn dispatched(self, carrier: &Carrier) -> Dispatched {
        let Self { facts, tool, effect, arguments } = self;
        let key =
            (effect == Effect::Write).then(|| format!("{}-{}", facts.run.id(), facts.call.call));
        let sent = Instant::now();
        let calling = async {
            match carrier {
                Carrier::Server(connection) => {
                    let until = facts.run.deadline();
                    connection.said(connection.call(&tool, arguments, key, until).await)
                }
                Carrier::Builtin(builtin) => builtin.carry_out(facts.run.caller(), arguments).await,
            }
        };
        // Whoever carries it out is told that nobody waits, where it can be.
        // Nothing is sent for one that is cancelled already.
        let said = tokio::select! {
            biased;
            () = facts.run.cancelled() => CallEnd::Lost.into(),
            called = timeout_at(heard_until(&facts.run), calling) => {
                called.unwrap_or_else(|_| CallEnd::Lost.into())
            }
        };
        Dispatched::ended(facts, tool, sent, said)
    }

    /// Carries a tool of the broker's own out, in this thread.
    pub(super) fn carried_out(self, work: &InPlace) -> Dispatched {
        let Self { facts, tool, effect: _, arguments } = self;
        let sent = Instant::now();
        let end = work.carry_out(facts.run.caller(), &arguments);
        Dispatched::ended(facts, tool, sent, end.into())
    }
}

/// The call went out, and this is what came back, as it came.
#[derive(Debug)]
pub(super) struct Dispatched {
    facts: Facts,
    tool: Arc<Tool>,
    /// From its dispatch until it was there.
    took: Duration,
    answer: Answer,
    /// What takes out what only its server's words are searched for.
    own: Option<Scrubber>,
}

impl Dispatched {
    /// It is there now: what it waits for from here on is not its tool.
    fn ended(mut facts: Facts, tool: Arc<Tool>, sent: Instant, said: Said) -> Self {
        facts.steps.answered = Some(facts.began.elapsed());
        let Said { answer, own } = said;
        Self { facts, tool, took: sent.elapsed(), answer, own }
    }

    /// Whether what came back is so soon looked through that others can wait
    /// for it.
    pub(super) fn is_small(&self) -> bool {
        let Answer::End(end) = &self.answer else { return false };
        match end {
            CallEnd::Answered(response) | CallEnd::Bytes(response, _) => {
                self.tool.checks_result_soon(response) && is_short(response)
            }
            CallEnd::Content(said) | CallEnd::Failed(said) => is_short(said),
            CallEnd::Unusable(_)
            | CallEnd::Undone { .. }
            | CallEnd::Lost
            | CallEnd::Unanswered(_) => true,
        }
    }

    /// Waits for a turn to look through what came back. When its run is over,
    /// nobody waits for that any more: there is no turn then, and it ends as
    /// one whose answer never came.
    pub(super) async fn turn<T>(&mut self, turns: impl AsyncFnOnce(&Arc<str>) -> T) -> Option<T> {
        let run = &self.facts.run;
        let turn = tokio::select! {
            biased;
            // A turn that is free is taken: the tool did answer.
            turn = timeout_at(heard_until(run), turns(run.principal())) => turn.ok(),
            () = run.cancelled() => None,
        };
        if turn.is_none() {
            self.answer = CallEnd::Lost.into();
        }
        turn
    }

    /// Holds a result against the tool's own output schema.
    pub(super) fn fitting(self, books: &Books) -> Fitting {
        let Self { facts, tool, took, answer, own } = self;
        books.metrics.dispatched(took);
        let end = answer.read();
        let encoded = match end {
            CallEnd::Bytes(_, name) => Some(name),
            _ => None,
        };
        let end = match end {
            // To look through it would take many times its own memory.
            CallEnd::Answered(said)
            | CallEnd::Bytes(said, _)
            | CallEnd::Content(said)
            | CallEnd::Failed(said)
                if values_of(&said) > VALUES_MAX =>
            {
                Ok(CallEnd::Unusable(Unusable::TooMany))
            }
            CallEnd::Answered(response) | CallEnd::Bytes(response, _) => {
                match tool.check_result(&response) {
                    Ok(()) => Ok(CallEnd::Answered(response)),
                    Err(_) => Err(Misfit::Result(response)),
                }
            }
            CallEnd::Content(_) if tool.spec().output_schema.is_some() => Err(Misfit::NoResult),
            CallEnd::Failed(error) => Ok(CallEnd::Failed(tool_error(error))),
            other => Ok(other),
        };
        Fitting { facts, tool, end, encoded, own }
    }
}

/// The result fits, or it is known how it does not. Credentials may still be
/// in it.
#[derive(Debug)]
pub(super) struct Fitting {
    facts: Facts,
    tool: Arc<Tool>,
    end: Result<CallEnd, Misfit>,
    /// Under which name it has bytes in base64.
    encoded: Option<&'static str>,
    own: Option<Scrubber>,
}

/// How a result is none that could be passed on.
#[derive(Debug)]
enum Misfit {
    /// There is none to hold against it.
    NoResult,
    /// This one does not fit.
    Result(Value),
}

impl Fitting {
    /// Takes credentials out, of reasons too: all known ones, of whichever
    /// server, its own, and whatever looks like one. `None` where the broker itself
    /// answers, which has none to tell.
    pub(super) fn redacted(self, scrubber: Option<&Scrubber>) -> Redacted {
        let Self { facts, tool, end, encoded, own } = self;
        let both = scrubber.zip(own).map(|(all, own)| all.and(&own));
        let scrubber = both.as_ref().or(scrubber);
        let removed = Cell::new(0_u32);
        let redact = |mut value: Value| match scrubber {
            Some(scrubber) => {
                let bytes = encoded.and_then(|name| value.get_mut(name));
                let of_bytes = bytes.map_or(0, |bytes| clear(bytes, scrubber));
                let Scrubbed { left, removed: of_this } = scrubber.json_counted(value);
                removed.set(removed.get().saturating_add(of_bytes).saturating_add(of_this));
                left
            }
            None => value,
        };
        let outcome = match end {
            Ok(
                CallEnd::Answered(response)
                | CallEnd::Bytes(response, _)
                | CallEnd::Content(response),
            ) => of_size(&facts.run, redact(response).to_string().into_bytes()),
            Ok(CallEnd::Failed(error)) => Err(CallFailure::ToolFailed { error: redact(error) }),
            Ok(CallEnd::Lost) => Err(CallFailure::Lost),
            Ok(CallEnd::Unanswered(why)) => {
                let why = redact(why.into()).as_str().unwrap_or_default().to_owned();
                Err(CallFailure::Unanswered { why })
            }
            Ok(CallEnd::Undone { why, message }) => {
                Err(CallFailure::ToolFailed { error: redact(failure::undone(why, &message)) })
            }
            Err(Misfit::NoResult) => {
                let violations = vec!["the result: there is none beside its text".to_owned()];
                Err(CallFailure::BadResponse { violations })
            }
            Ok(CallEnd::Unusable(why)) => Err(CallFailure::Unusable(why)),
            // What is said of it quotes it and is cut: so it is said of what is
            // left, or a part of a credential would be left where it is cut.
            Err(Misfit::Result(response)) => {
                let fits_now = || vec!["the result: it fits without what was removed".to_owned()];
                let violations = tool
                    .check_result(&redact(response))
                    .map_or_else(|violations| violations.texts, |()| fits_now());
                Err(CallFailure::BadResponse { violations })
            }
        };
        let removed = removed.get();
        if removed > 0 {
            tracing::warn!(
                run = %facts.run.id(),
                call = facts.call.call,
                tool = ?facts.call.tool.as_str(),
                removed,
                "a tool's result carried credentials, which were removed"
            );
        }
        Redacted { facts, outcome, redacted: removed > 0 }
    }
}

/// Takes credentials out of bytes in base64. How many there were. In the base64 itself
/// few of their spellings would be found, and a mark would cost all the rest.
fn clear(encoded: &mut Value, scrubber: &Scrubber) -> u32 {
    let Value::String(encoded) = encoded else { return 0 };
    let Ok(bytes) = STANDARD.decode(&*encoded) else { return 0 };
    let Scrubbed { left, removed } = scrubber.bytes_counted(bytes);
    if removed > 0 {
        *encoded = STANDARD.encode(left);
    }
    removed
}

/// Whether credentials are soon looked for in all its text.
fn is_short(value: &Value) -> bool {
    fn rest(value: &Value, left: usize) -> Option<usize> {
        let left = left.checked_sub(1)?;
        match value {
            Value::String(text) => left.checked_sub(text.len()),
            Value::Array(items) => items.iter().try_fold(left, |left, item| rest(item, left)),
            Value::Object(fields) => fields
                .iter()
                .try_fold(left, |left, (key, value)| rest(value, left.checked_sub(key.len())?)),
            Value::Null | Value::Bool(_) | Value::Number(_) => Some(left),
        }
    }
    rest(value, IN_PLACE_BYTES_MAX).is_some()
}

fn of_size(run: &Run, body: Vec<u8>) -> Result<Vec<u8>, CallFailure> {
    let limit = run.limits().response_bytes;
    if body.len() > limit as usize {
        return Err(CallFailure::ResponseTooLarge { got: body.len(), limit });
    }
    Ok(body)
}

/// What the program may see.
#[derive(Debug)]
pub(super) struct Redacted {
    facts: Facts,
    outcome: Result<Vec<u8>, CallFailure>,
    /// Whether there was a credential in it.
    redacted: bool,
}

impl Redacted {
    /// Records the end, and gives it back as the answer.
    pub(super) fn recorded(self, books: &Books) -> Settled {
        let Self { facts, outcome, redacted } = self;
        let settled = Settled { redacted, ..settle(&facts, outcome) };
        let outcome = Event::Outcome {
            call: settled.id,
            code: settled.code,
            took_us: settled.duration_ns / 1_000,
            response_bytes: settled.body.len() as u64,
            redacted: settled.redacted,
        };
        let outcome = facts.event(outcome);
        tell(&facts, &settled, outcome.at_us, books);
        books.journal.append(outcome);
        // At `info`: what a program does must not choose how much is logged
        // by default.
        tracing::info!(
            run = %facts.run.id(),
            call = settled.id,
            tool = ?facts.call.tool.as_str(),
            effect = facts.call.effect.map(Effect::as_str),
            code = settled.code.map_or("ok", CallCode::as_str),
            late = Instant::now() > facts.run.deadline(),
            took_us = settled.duration_ns / 1_000,
            "dispatched call ended"
        );
        settled
    }
}

/// A call that was refused: its server saw not one byte of it.
#[derive(Debug)]
pub(super) struct Refused(Box<Refusal>);

#[derive(Debug)]
struct Refusal {
    facts: Facts,
    failure: CallFailure,
}

impl Refused {
    /// Records the refusal, and gives it back as the answer.
    pub(super) async fn recorded(self, books: &Books) -> Settled {
        let (record, settled) = self.end(books);
        books.journal.refuse(record).await;
        settled
    }

    /// The same where the journal is known to be ready.
    pub(super) fn recorded_at_once(self, books: &Books) -> Settled {
        let (record, settled) = self.end(books);
        books.journal.append(record);
        settled
    }

    fn end(self, books: &Books) -> (Record, Settled) {
        let Refusal { facts, failure } = *self.0;
        tracing::info!(
            run = %facts.run.id(),
            call = facts.call.call,
            tool = ?facts.call.tool.as_str(),
            code = failure.code().as_str(),
            why = ?failure.logged(),
            "call refused"
        );
        let code = failure.code();
        let settled = settle(&facts, Err(failure));
        let refusal = facts.event(Event::Refusal { call: facts.call.clone(), code });
        tell(&facts, &settled, refusal.at_us, books);
        (refusal, settled)
    }
}

/// How a call settled, as its program sees it.
fn settle(facts: &Facts, outcome: Result<Vec<u8>, CallFailure>) -> Settled {
    let bytes_max = facts.run.limits().response_bytes as usize;
    let (code, body) = match outcome {
        Ok(response) => (None, response),
        Err(failure) => (Some(failure.code()), failure.body(bytes_max)),
    };
    let duration_ns = u64::try_from(facts.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Settled { id: facts.call.call, code, duration_ns, body, redacted: false }
}

/// Counts a call that settled, and tells the collector. A tool that the grant
/// does not name is a name of the program's choice, and told to neither; nor is
/// one that the caller hosts, whose name is the caller's.
fn tell(facts: &Facts, settled: &Settled, at_us: u64, books: &Books) {
    let CallFacts { tool, effect, definition_sha256, .. } = &facts.call;
    let tool = match facts.call.held_by_caller {
        _ if definition_sha256.is_none() => None,
        true => Some(CalledTool::Hosted),
        false => Some(CalledTool::Named(tool.clone())),
    };
    let took = Duration::from_nanos(settled.duration_ns);
    let server = tool.as_ref().map_or("", CalledTool::server);
    books.metrics.settled(server, *effect, settled.code, took);
    if settled.redacted {
        books.metrics.redacted();
    }
    if let Some(spans) = &books.spans {
        spans.tell(Span::Call(CallSpan {
            run: facts.run.id(),
            call: settled.id,
            tool,
            effect: *effect,
            code: settled.code,
            redacted: settled.redacted,
            ended_unix_ns: at_us.saturating_mul(1_000),
            took,
            steps: facts.steps,
        }));
    }
}

/// What a program is told whose time was over while its call was out. The
/// call's own end is recorded when it comes.
pub(super) fn unheard(run: &Run, call: u32, began: Instant, failure: &CallFailure) -> Settled {
    let body = failure.body(run.limits().response_bytes as usize);
    let duration_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Settled { id: call, code: Some(failure.code()), duration_ns, body, redacted: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Listed;
    use crate::grant::Grant;
    use crate::grant::tests::claims_of_nothing;
    use crate::journal::Place;
    use forge_protocol::RunId;
    use forge_protocol::broker::{Callable, GrantClaims, GrantedTool};
    use forge_protocol::limits::RunLimits;

    fn answered(response: Value) -> Dispatched {
        ended(CallEnd::Answered(response))
    }

    /// A run of alice's.
    fn run() -> Run {
        let grant = Arc::new(Grant::new(claims_of_nothing()).unwrap());
        Run::new(RunId([0; 16]), [0; 32], Callable::Any, grant, RunLimits::default())
    }

    /// A tool whose results are numbers, if it says so.
    fn tool(says: bool) -> Arc<Tool> {
        let schema = serde_json::json!({ "type": "integer" });
        let listed = Listed {
            name: "find".into(),
            description: None,
            input_schema: JsonObject::new(),
            output_schema: says.then(|| schema.as_object().unwrap().clone()),
        };
        Arc::new(Tool::new("shop", listed).unwrap())
    }

    /// A call of this run that came just now, and its tool.
    fn facts_of(run: Run) -> (Facts, Arc<Tool>) {
        let tool = tool(false);
        let call = CallFacts {
            call: 0,
            held_by_caller: false,
            tool: tool.name().clone(),
            definition_sha256: None,
            effect: None,
            arguments_sha256: None,
        };
        let (run, began) = (Arc::new(run), Instant::now());
        (Facts { run, call, began, steps: Steps::default() }, tool)
    }

    /// A call of alice's that ended just now.
    fn ended(end: CallEnd) -> Dispatched {
        let (facts, tool) = facts_of(run());
        let began = facts.began;
        Dispatched::ended(facts, tool, began, end.into())
    }

    fn books(folder: &std::path::Path) -> Books {
        let metrics = Arc::new(Metrics::default());
        let journal = Journal::new(Place::Folder(folder.into()), Arc::clone(&metrics));
        Books { journal, metrics, spans: None }
    }

    #[test]
    fn bytes_in_base64_lose_credentials_however_they_are_spelled_and_stay_base64() {
        let folder = tempfile::tempdir().unwrap();
        let books = books(folder.path());
        let key = "s3cr3t-Value-of-the-Key-042";
        let secret = crate::secret::Secret::new(key.to_owned()).unwrap();
        let scrubber = Scrubber::new([secret]);
        let each = |write: fn(u8) -> String| key.bytes().map(write).collect::<String>();
        let redacted = |bytes: &[u8]| {
            let answer = serde_json::json!({ "bytes": STANDARD.encode(bytes) });
            let fitting = ended(CallEnd::Bytes(answer, "bytes")).fitting(&books);
            let Redacted { outcome, redacted, .. } = fitting.redacted(Some(&scrubber));
            let said: Value = serde_json::from_slice(&outcome.unwrap()).unwrap();
            (STANDARD.decode(said["bytes"].as_str().unwrap()).unwrap(), redacted)
        };
        for told in [
            key.to_owned(),
            each(|byte| format!("{byte:02x}")),
            each(|byte| format!("%{byte:02x}")),
            each(|byte| format!("\\u{byte:04x}")),
            STANDARD.encode(key),
            format!("{}\n{}", &key[..9], &key[9..]),
            format!("ghp_{}", "A1b2".repeat(9)),
            "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQ==\n-----END PRIVATE KEY-----".to_owned(),
        ] {
            let (left, is_redacted) = redacted(&[b"\x89\0", told.as_bytes(), b"\0\xff"].concat());
            assert_eq!(left, b"\x89\0[credential removed]\0\xff", "{told}");
            assert!(is_redacted, "{told}");
        }
        let image = b"\x89PNG\r\n\x1a\n\0\0";
        assert_eq!(redacted(image), (image.to_vec(), false));
    }

    #[test]
    fn what_a_result_waits_for_here_is_not_its_tools_time() {
        let dispatched = answered(Value::Null);
        let answered = dispatched.facts.began.elapsed();
        std::thread::sleep(Duration::from_millis(5));
        let folder = tempfile::tempdir().unwrap();
        let books = books(folder.path());
        let fitting = dispatched.fitting(&books);
        assert!(fitting.facts.steps.answered.unwrap() <= answered);
        let text = books.metrics.text();
        let sum =
            text.lines().find_map(|line| line.strip_prefix("forge_call_dispatch_seconds_sum "));
        assert!(sum.unwrap().parse::<f64>().unwrap() <= answered.as_secs_f64(), "{text}");
    }

    #[tokio::test]
    async fn a_result_whose_run_is_over_waits_for_no_turn() {
        let mut result = answered(Value::String("a".repeat(100_000)));
        assert!(!result.is_small());
        let run = Arc::clone(&result.facts.run);
        let waits = result.turn(async |_: &Arc<str>| std::future::pending::<()>().await);
        let cancels = async { run.cancel() };
        let (turn, ()) =
            tokio::time::timeout(Duration::from_secs(10), async { tokio::join!(waits, cancels) })
                .await
                .unwrap();
        assert_eq!(turn, None);
        assert!(matches!(result.answer, Answer::End(CallEnd::Lost)) && result.is_small());
    }

    #[tokio::test]
    async fn a_call_whose_run_is_over_by_the_time_it_is_journalled_is_not_dispatched() {
        let ends: [fn(Run) -> Run; 4] = [
            |run| run,
            Run::out_of_time,
            |run| {
                run.cancel();
                run
            },
            |run| {
                run.cut_off();
                run
            },
        ];
        for (at, ends) in ends.into_iter().enumerate() {
            for effect in [Effect::Read, Effect::Write] {
                let folder = tempfile::tempdir().unwrap();
                let books = books(folder.path());
                let (facts, tool) = facts_of(ends(run()));
                let checked = Checked { facts, tool, effect, arguments: JsonObject::new() };
                let recorded: &[&str] = match (at, checked.intended(&books).await) {
                    (0, Ok(_)) => &["intent"],
                    (1.., Err(refused)) => {
                        let settled = refused.recorded(&books).await;
                        assert_eq!(settled.code, Some(CallCode::DeadlinePassed), "{at}");
                        &["intent", "refusal"]
                    }
                    (_, other) => panic!("{at}: {other:?}"),
                };
                books.journal.sync().await.unwrap();
                assert_eq!(kinds(folder.path()), recorded, "{at}");
            }
        }
    }

    /// What the journal in this folder has, by kind.
    fn kinds(folder: &std::path::Path) -> Vec<String> {
        let file = rusqlite::Connection::open(folder.join("journal-00.sqlite")).unwrap();
        let mut kinds = file.prepare("SELECT kind FROM records ORDER BY seq").unwrap();
        let kinds = kinds.query_map([], |row| row.get(0)).unwrap();
        kinds.collect::<Result<_, _>>().unwrap()
    }

    /// A run of alice's that may call the tool within these limits and this budget.
    fn granted(limits: RunLimits, cost_max: u32) -> Arc<Run> {
        let tool = tool(false);
        let tool = GrantedTool {
            name: tool.name().clone(),
            definition_sha256: tool.sha256(),
            constraints: Vec::new(),
        };
        let (tools, cost_max) = (vec![tool], Some(cost_max));
        let claims = GrantClaims { tools, cost_max, ..claims_of_nothing() };
        let grant = Arc::new(Grant::new(claims).unwrap());
        Arc::new(Run::new(RunId([0; 16]), [0; 32], Callable::Any, grant, limits))
    }

    /// Both definitions of the tool are seen, the first of which is approved by it.
    fn reviews() -> Reviews {
        let reviews = Reviews::open(crate::review::Mode::FirstUse, None).unwrap();
        reviews.see(&[tool(false), tool(true)]).unwrap();
        reviews
    }

    /// Takes a call of so many bytes as far as its grant.
    fn asks(run: &Arc<Run>, bytes: usize, books: &Books) -> Result<Granted, Refused> {
        let request = format!("{:bytes$}", "{}").into_bytes();
        let call = Call { id: 0, waits: true, tool: tool(false).name().clone(), request };
        Identified::new(run, call, books).granted()
    }

    #[test]
    fn a_request_may_be_as_large_as_the_limit_and_its_digest_is_taken_where_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let books = books(folder.path());
        let most = IN_PLACE_BYTES_MAX + 2;
        let limits = RunLimits { request_bytes: most as u32, ..RunLimits::default() };
        let run = granted(limits, 100);
        for bytes in [2, IN_PLACE_BYTES_MAX, IN_PLACE_BYTES_MAX + 1, most] {
            let digest = Some(Sha256::digest(format!("{:bytes$}", "{}")).into());
            let granted = asks(&run, bytes, &books).unwrap();
            let at_once = granted.facts.call.arguments_sha256;
            assert_eq!(at_once, digest.filter(|_| bytes <= IN_PLACE_BYTES_MAX), "{bytes}");
            let pinned = granted.pinned(tool(false), Effect::Read, 1, &reviews()).unwrap();
            let checked = pinned.checked(None).unwrap();
            assert_eq!(checked.facts.call.arguments_sha256, digest, "{bytes}");
        }
        let Refused(refusal) = asks(&run, most + 1, &books).unwrap_err();
        assert!(matches!(refusal.failure, CallFailure::RequestTooLarge { .. }));
        assert_eq!(refusal.facts.call.arguments_sha256, None);
    }

    #[test]
    fn a_call_takes_its_cost_and_one_that_is_refused_takes_none() {
        let folder = tempfile::tempdir().unwrap();
        let books = books(folder.path());
        let run = granted(RunLimits::default(), 10);
        let check = |tool, cost| {
            let granted = asks(&run, 2, &books)?;
            granted.pinned(tool, Effect::Read, cost, &reviews())?.checked(None).map(drop)
        };
        let failure = |refused: Result<(), Refused>| refused.unwrap_err().0.failure;
        check(tool(false), 4).unwrap();
        let changed = failure(check(tool(true), 4));
        assert!(matches!(changed, CallFailure::DefinitionChanged { .. }));
        assert!(matches!(failure(check(tool(false), 7)), CallFailure::BudgetSpent(_)));
        check(tool(false), 6).unwrap();
        assert!(matches!(failure(check(tool(false), 1)), CallFailure::BudgetSpent(_)));

        let late = granted(RunLimits::default(), 10);
        late.cut_off();
        let granted = asks(&late, 2, &books).unwrap();
        let pinned = granted.pinned(tool(false), Effect::Read, 4, &reviews()).unwrap();
        assert!(matches!(failure(pinned.checked(None).map(drop)), CallFailure::DeadlinePassed));
        late.spend(10).unwrap();
    }

    #[test]
    fn arguments_may_be_nested_as_deep_as_the_limit_says() {
        let deep = |levels: usize| {
            let (open, close) = ("[".repeat(levels - 1), "]".repeat(levels - 1));
            parse(format!("{{\"a\":{open}{close}}}").as_bytes()).map(drop)
        };
        deep(REQUEST_DEPTH_MAX).unwrap();
        let refused = deep(REQUEST_DEPTH_MAX + 1).unwrap_err();
        assert!(refused.to_string().contains("deep"), "{refused}");
    }

    #[test]
    fn a_result_that_is_none_for_its_tool_is_not_passed_on_nor_what_it_quotes() {
        let folder = tempfile::tempdir().unwrap();
        let books = books(folder.path());
        let key = "s3cr3t-Value-of-the-Key-042";
        let scrubber = Scrubber::new([crate::secret::Secret::new(key.to_owned()).unwrap()]);
        let outcome = |says: bool, end: CallEnd| {
            let dispatched = Dispatched { tool: tool(says), ..ended(end) };
            let Redacted { outcome, redacted, .. } =
                dispatched.fitting(&books).redacted(Some(&scrubber));
            (outcome, redacted)
        };
        let text = |text: &str| Value::String(text.into());
        assert!(matches!(outcome(true, CallEnd::Answered(7.into())), (Ok(_), false)));
        assert!(matches!(outcome(false, CallEnd::Content(text("x"))), (Ok(_), false)));
        let (content, _) = outcome(true, CallEnd::Content(text("x")));
        assert!(matches!(content, Err(CallFailure::BadResponse { .. })), "{content:?}");
        let (misfit, redacted) = outcome(true, CallEnd::Answered(text(key)));
        let Err(CallFailure::BadResponse { violations }) = misfit else { panic!("{misfit:?}") };
        assert!(redacted && !violations.concat().contains(key), "{violations:?}");
        let many = Value::Array(vec![Value::Null; VALUES_MAX as usize + 1]);
        for end in [CallEnd::Answered(many.clone()), CallEnd::Failed(many)] {
            let (unusable, _) = outcome(false, end);
            assert!(matches!(unusable, Err(CallFailure::Unusable(Unusable::TooMany))));
        }
    }

    #[test]
    fn a_response_may_be_as_large_as_the_limit() {
        let limits = RunLimits { response_bytes: 10, ..RunLimits::default() };
        let run = granted(limits, 1);
        assert_eq!(of_size(&run, vec![b'1'; 10]).unwrap().len(), 10);
        let over = of_size(&run, vec![b'1'; 11]);
        assert!(matches!(over, Err(CallFailure::ResponseTooLarge { got: 11, limit: 10 })));
    }

    #[test]
    fn a_request_that_is_no_json_object_is_a_bad_request() {
        for request in ["", "[]", "7", "{", "{}{}", "{\"a\":\u{1}}", &"[".repeat(100_000)] {
            let refused = parse(request.as_bytes()).unwrap_err();
            assert_eq!(refused.code(), CallCode::BadRequest, "{refused}");
        }
        assert!(parse(&[b'{', 0xFF, b'}']).is_err());
        parse(b"{\"a\": 1}").unwrap();
        // What a program cut in the middle of a character.
        let mended = parse(br#"{"a": "cut \ud83d", "b": 1e2}"#).unwrap();
        assert_eq!(mended["a"], "cut \u{fffd}");
        let refused = parse(br#"{"a": "cut \ud83d", "b": 0.10000000000000000001}"#).unwrap_err();
        assert!(matches!(refused, CallFailure::InexactNumber { .. }), "{refused}");
        assert!(parse(b"{\"a\": \"\xff\"}").is_err(), "what is no text is not changed");
    }
}
