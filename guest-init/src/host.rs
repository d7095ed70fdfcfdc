//! What a running program has beside its memory: the link, its input, its
//! budgets, its calls, its clock and its random numbers.
//!
//! Everything the program hands over has been copied or bounds-checked by
//! `abi` before it gets here. This module keeps the run's limits; the host
//! keeps them a second time.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use forge_protocol::abi::CallCode;
use forge_protocol::ending::LimitKind;
use forge_protocol::guest::{Settled, Start};
use forge_protocol::limits::{
    ARTIFACT_NAME_BYTES_MAX, LOG_LEVEL_MAX, LOG_RECORD_BYTES_MAX, LOG_RECORD_OVERHEAD_BYTES,
    RunLimits,
};
use forge_protocol::name::ToolName;
use wasmi::Memory;

use crate::clock::Clock;
use crate::engine::Caps;
use crate::link::{Link, Stream};
use crate::random::Random;
use crate::trap::Stop;

/// The level that lines written to WASI's standard error get: info.
const STDERR_LEVEL: u8 = 2;

/// The state behind a program's imports.
pub(crate) struct Host<S> {
    pub(crate) link: Link<S>,
    pub(crate) limits: RunLimits,
    pub(crate) caps: Caps,
    /// Fuel the run has and wasmi was not given yet.
    pub(crate) fuel_reserve: u64,
    /// The exported memory, once the module is instantiated.
    pub(crate) memory: Option<Memory>,
    pub(crate) input: Vec<u8>,
    /// How much of the input `fd_read` has given.
    pub(crate) input_given: usize,
    /// Which of WASI's descriptors 0, 1 and 2 the program has closed.
    pub(crate) closed: [bool; 3],
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    /// The body of the call that was collected last.
    pub(crate) held: Vec<u8>,
    calls_made: u32,
    /// Calls the program has started and not collected, by handle.
    open: BTreeMap<u32, Open>,
    /// Handles of open calls that have settled, first settled first.
    settled: VecDeque<u32>,
    output_bytes: u32,
    artifacts: u32,
    log_bytes: u32,
    logs_dropped: u64,
    /// The line that standard error stands in.
    stderr: Vec<u8>,
    /// What the host knows of it.
    told: Told,
}

/// What the host knows of the line that standard error stands in, for a run that it ends
/// before the line does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// That there is none.
    Nothing,
    /// As far as it was once.
    Before,
    /// As far as it is.
    All,
}

/// A call that has not been collected.
struct Open {
    started_ns: u64,
    answer: Option<Settled>,
}

impl<S: Stream> Host<S> {
    /// The state of a program that has no run yet.
    pub(crate) fn new(link: Link<S>, limits: RunLimits) -> Self {
        Self {
            link,
            caps: Caps::new(&limits),
            fuel_reserve: 0,
            limits,
            memory: None,
            input: Vec::new(),
            input_given: 0,
            closed: [false; 3],
            clock: Clock::new(0),
            random: Random::new([0; 32]),
            held: Vec::new(),
            calls_made: 0,
            open: BTreeMap::new(),
            settled: VecDeque::new(),
            output_bytes: 0,
            artifacts: 0,
            log_bytes: 0,
            logs_dropped: 0,
            stderr: Vec::new(),
            told: Told::Nothing,
        }
    }

    /// Takes in what the program's run brings. To be called before the
    /// program is.
    pub(crate) fn begin(&mut self, start: &Start, input: Vec<u8>) {
        self.input = input;
        self.clock = Clock::new(start.start_unix_ns);
        self.random = Random::new(start.seed);
    }

    /// Calls a tool and waits for it; gives what the program gets to see.
    pub(crate) fn call(&mut self, tool: &ToolName, request: &[u8]) -> Result<i32, Stop> {
        if let Err(code) = self.may_call(request) {
            return Ok(self.refuse(code));
        }
        self.tell_unfinished()?;
        let id = self.link.blocking_call(tool, request)?;
        self.opened(id);
        self.collect(id)
    }

    /// Starts a call; gives its handle, or what it is refused with.
    pub(crate) fn call_async(&mut self, tool: &ToolName, request: &[u8]) -> Result<i32, Stop> {
        if let Err(code) = self.may_call(request) {
            return Ok(code as i32);
        }
        let id = self.link.start_call(tool, request)?;
        self.opened(id);
        // Calls count from 0 to a bound far below 2^31.
        Ok(id as i32)
    }

    /// Waits for a started call and takes its answer.
    pub(crate) fn wait(&mut self, handle: i32) -> Result<i32, Stop> {
        match u32::try_from(handle) {
            Ok(id) if self.open.contains_key(&id) => self.collect(id),
            _ => Err(Stop::misuse(alloc::format!("wait for {handle}, which is no open call"))),
        }
    }

    /// Waits until a started call has settled; gives the handle of the one
    /// that settled first among those that no `wait` has taken.
    pub(crate) fn wait_any(&mut self) -> Result<i32, Stop> {
        if self.open.is_empty() {
            return Err(Stop::misuse("wait_any with no open call"));
        }
        loop {
            if let Some(id) = self.settled.front() {
                return Ok(*id as i32);
            }
            self.receive()?;
        }
    }

    /// A call that is refused before it left has no body.
    pub(crate) fn refuse(&mut self, code: CallCode) -> i32 {
        self.held.clear();
        code as i32
    }

    fn may_call(&self, request: &[u8]) -> Result<(), CallCode> {
        if request.len() > self.limits.request_bytes as usize {
            return Err(CallCode::RequestTooLarge);
        }
        // Calls that settled and were not collected count as in flight: their
        // bodies take room here.
        if self.calls_made >= self.limits.calls
            || self.open.len() >= self.limits.calls_in_flight as usize
        {
            return Err(CallCode::BudgetSpent);
        }
        Ok(())
    }

    fn opened(&mut self, id: u32) {
        self.calls_made += 1;
        self.open.insert(id, Open { started_ns: self.clock.now_ns(), answer: None });
    }

    /// Waits until call `id` has settled, and takes its answer.
    fn collect(&mut self, id: u32) -> Result<i32, Stop> {
        while self.open.get(&id).is_some_and(|open| open.answer.is_none()) {
            self.receive()?;
        }
        self.settled.retain(|settled| *settled != id);
        let Some(Open { started_ns, answer: Some(answer) }) = self.open.remove(&id) else {
            return Err(Stop::misuse("a call that is not open"));
        };
        self.clock.observe(started_ns, answer.duration_ns);
        self.held = answer.body;
        Ok(match answer.code {
            Some(code) => code as i32,
            // The protocol bounds a body far below 2^31.
            None => self.held.len() as i32,
        })
    }

    fn receive(&mut self) -> Result<(), Stop> {
        self.tell_unfinished()?;
        let answer = self.link.receive_settled()?;
        // The session has checked that the call was in flight.
        if let Some(open) = self.open.get_mut(&answer.id) {
            self.settled.push_back(answer.id);
            open.answer = Some(answer);
        }
        Ok(())
    }

    /// Appends to the run's output.
    pub(crate) fn output(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let limit = self.limits.output_bytes;
        match u32::try_from(bytes.len()).ok().and_then(|more| self.output_bytes.checked_add(more)) {
            Some(total) if total <= limit => {
                self.output_bytes = total;
                Ok(self.link.output(bytes)?)
            }
            _ => Err(Stop::Limit { kind: LimitKind::Output, limit: limit.into() }),
        }
    }

    /// Leaves an artifact.
    pub(crate) fn artifact(
        &mut self,
        name: &[u8],
        media_type: &[u8],
        content: &[u8],
    ) -> Result<(), Stop> {
        let name = short_text("an artifact's name", name)?;
        let media_type = short_text("an artifact's media type", media_type)?;
        if self.artifacts >= self.limits.artifacts {
            let limit = self.limits.artifacts.into();
            return Err(Stop::Limit { kind: LimitKind::Artifacts, limit });
        }
        if content.len() > self.limits.artifact_bytes as usize {
            let limit = self.limits.artifact_bytes.into();
            return Err(Stop::Limit { kind: LimitKind::Artifacts, limit });
        }
        self.artifacts += 1;
        Ok(self.link.artifact(name, media_type, content)?)
    }

    /// Writes a log record, cut to its bound, or drops it if the log is full.
    pub(crate) fn log(&mut self, level: i32, bytes: &[u8]) -> Result<(), Stop> {
        let record_bytes_max = LOG_RECORD_BYTES_MAX as usize;
        let is_cut = bytes.len() > record_bytes_max;
        let mut bytes = &bytes[..bytes.len().min(record_bytes_max)];
        let room = self.limits.log_bytes.saturating_sub(self.log_bytes);
        // Of what is cut within a character, less than three bytes are lost, and
        // nothing that is replaced becomes shorter: that is not looked at.
        const CUT_BYTES_MAX: u32 = 3;
        if LOG_RECORD_OVERHEAD_BYTES + bytes.len() as u32 > room.saturating_add(CUT_BYTES_MAX) {
            self.logs_dropped += 1;
            return Ok(());
        }
        if is_cut
            && let Err(error) = core::str::from_utf8(bytes)
            && error.error_len().is_none()
        {
            // Cut within a character.
            bytes = &bytes[..error.valid_up_to()];
        }
        let text = String::from_utf8_lossy(bytes);
        // Replacing what is no UTF-8 may have made it longer.
        let text = &text[..text.floor_char_boundary(record_bytes_max)];
        let cost = LOG_RECORD_OVERHEAD_BYTES + text.len() as u32;
        if cost > room {
            self.logs_dropped += 1;
            return Ok(());
        }
        self.log_bytes += cost;
        Ok(self.link.log(level.clamp(0, LOG_LEVEL_MAX.into()) as u8, text)?)
    }

    /// Appends to standard error, whose lines are log records.
    pub(crate) fn stderr(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        if self.limits.log_bytes.saturating_sub(self.log_bytes) < LOG_RECORD_OVERHEAD_BYTES {
            // Not even an empty record fits: of lines, how many they are.
            let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
            self.logs_dropped += lines as u64;
            let rest = bytes.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
            if lines > 0 {
                self.stderr.clear();
                self.untell()?;
            }
            let room = (LOG_RECORD_BYTES_MAX as usize).saturating_sub(self.stderr.len());
            self.stderr.extend_from_slice(&rest[..rest.len().min(room)]);
            return Ok(());
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, is_whole) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            // What passes the bound of a record would be cut off anyway.
            let room = (LOG_RECORD_BYTES_MAX as usize).saturating_sub(self.stderr.len());
            self.stderr.extend_from_slice(&text[..text.len().min(room)]);
            if self.told == Told::All {
                self.told = Told::Before;
            }
            if is_whole {
                self.end_stderr_line()?;
            }
        }
        Ok(())
    }

    /// Writes what standard error holds as a record of its own.
    fn end_stderr_line(&mut self) -> Result<(), Stop> {
        self.untell()?;
        let mut line = core::mem::take(&mut self.stderr);
        self.log(STDERR_LEVEL.into(), &line)?;
        line.clear();
        self.stderr = line;
        Ok(())
    }

    /// Whether the host does not know all of the line that standard error stands in.
    fn is_untold(&self) -> bool {
        !self.stderr.is_empty() && self.told != Told::All
    }

    /// Tells it, if it does not.
    fn tell_unfinished(&mut self) -> Result<(), Stop> {
        if self.is_untold() {
            let text = String::from_utf8_lossy(&self.stderr);
            self.link.unfinished(STDERR_LEVEL, &text)?;
            self.told = Told::All;
        }
        Ok(())
    }

    /// Takes back what the host knows of a line that is over.
    fn untell(&mut self) -> Result<(), Stop> {
        if self.told != Told::Nothing {
            self.link.unfinished(STDERR_LEVEL, "")?;
            self.told = Told::Nothing;
        }
        Ok(())
    }

    /// See [`Stream::may_go_on`]; asked at the end of each slice. Sends what has waited for
    /// long, an unfinished line of standard error with it.
    pub(crate) fn may_go_on(&mut self) -> Result<(), Stop> {
        self.link.may_go_on()?;
        if self.link.is_due(self.is_untold()) {
            self.tell_unfinished()?;
            self.link.send()?;
        }
        Ok(())
    }

    /// Ends the program's side: the last line of standard error need not end
    /// in a newline.
    pub(crate) fn finish(&mut self) -> Result<(), Stop> {
        if self.stderr.is_empty() { Ok(()) } else { self.end_stderr_line() }
    }

    /// Log records that did not fit.
    pub(crate) fn logs_dropped(&self) -> u64 {
        self.logs_dropped
    }
}

/// A name the program gives, which must be short UTF-8.
fn short_text<'a>(what: &str, bytes: &'a [u8]) -> Result<&'a str, Stop> {
    if bytes.len() > ARTIFACT_NAME_BYTES_MAX as usize {
        return Err(Stop::misuse(alloc::format!(
            "{what} has {} bytes, the limit is {ARTIFACT_NAME_BYTES_MAX}",
            bytes.len(),
        )));
    }
    core::str::from_utf8(bytes).map_err(|_| Stop::misuse(alloc::format!("{what} is not UTF-8")))
}
