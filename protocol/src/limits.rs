//! Every bound of the system, and why they fit together.
//!
//! Two kinds live here. The `*_MAX` constants are absolute: no configuration
//! passes them, and decoders allocate by them. [`RunLimits`] is what one run
//! gets, by default or on request, within an operator's maxima.

use crate::codec::{Decode, Encode};
use crate::ending::WALL_MS;

const KIB: u32 = 1024;
const MIB: u32 = 1024 * KIB;

/// A signed program, in bytes.
pub const PROGRAM_BYTES_MAX: u32 = 8 * MIB;
/// A run's JSON input, in bytes.
pub const INPUT_BYTES_MAX: u32 = 4 * MIB;
/// One tool call's arguments, in bytes.
pub const REQUEST_BYTES_MAX: u32 = MIB;
/// How deep lists and objects are nested in one tool call's arguments. A server is
/// sent them two levels deeper, and many read JSON to 127.
pub const REQUEST_DEPTH_MAX: usize = 125;
/// One tool call's response, in bytes.
pub const RESPONSE_BYTES_MAX: u32 = 4 * MIB;
/// What a run may write to its output, in bytes.
pub const OUTPUT_BYTES_MAX: u32 = 4 * MIB;
/// How many artifacts a run may leave.
pub const ARTIFACTS_MAX: u32 = 64;
/// One artifact, in bytes.
pub const ARTIFACT_BYTES_MAX: u32 = 4 * MIB;
/// What a client is sent of an artifact at once, in bytes.
pub const PART_BYTES_MAX: u32 = 64 * KIB;
/// An artifact's name or its media type, in bytes.
pub const ARTIFACT_NAME_BYTES_MAX: u32 = 256;
/// All of a run's log records together, in bytes, each with its overhead.
pub const LOG_BYTES_MAX: u32 = MIB;
/// One log record, in bytes; a longer one is cut.
pub const LOG_RECORD_BYTES_MAX: u32 = 4 * KIB;
/// The least important level of a log record: trace.
pub const LOG_LEVEL_MAX: u8 = 4;
/// What each log record costs beside its text, in bytes of the log's bound, so
/// that empty records are not free.
pub const LOG_RECORD_OVERHEAD_BYTES: u32 = 16;
/// Tool calls in one run.
pub const CALLS_MAX: u32 = 10_000;
/// Tool calls of one run that may be unanswered at the same time.
pub const CALLS_IN_FLIGHT_MAX: u32 = 64;
/// Tools in one grant. Retrieval gives 3 to 5; a session may join a few.
pub const GRANTED_TOOLS_MAX: usize = 256;
/// A tool's whole name, server part and dot included, in bytes.
pub const TOOL_NAME_BYTES_MAX: usize = 256;
/// Linear memory of one program, in bytes.
pub const MEMORY_BYTES_MAX: u64 = 1024 * MIB as u64;
/// Bytes of one message that are not one of the payloads above: names, codes
/// and counters around a request or a response.
pub const MESSAGE_OVERHEAD_BYTES: u32 = 4 * KIB;
/// A grant token, in bytes.
pub const GRANT_BYTES_MAX: u32 = 64 * KIB;
/// Argument constraints in one request for a grant, and in one grant beyond
/// those of its first block.
pub const CONSTRAINTS_MAX: usize = 64;
/// One argument constraint as it is written, without its tool, in bytes.
pub const CONSTRAINT_BYTES_MAX: usize = 512;
/// All constraints of one request, each with its tool, in bytes.
pub const CONSTRAINTS_BYTES_MAX: u32 =
    (CONSTRAINTS_MAX * (CONSTRAINT_BYTES_MAX + TOOL_NAME_BYTES_MAX + 8)) as u32;
/// The name of a caller's session, in bytes.
pub const SESSION_BYTES_MAX: usize = 128;
/// A principal's name, in bytes.
pub const PRINCIPAL_BYTES_MAX: usize = 256;
/// Tool descriptions as the broker lists them, in bytes of one answer.
pub const TOOL_LIST_BYTES_MAX: u32 = 32 * MIB;
/// Definitions of the tools that a client hosts for one run, in bytes.
pub const HOSTED_TOOLS_BYTES_MAX: u32 = MIB;
/// Runs and questions that a client may have under way on one connection.
pub const NUMBERS_MAX: usize = 1024;
/// How many of these may be questions. One more is refused.
pub const QUESTIONS_MAX: usize = 64;
/// An intent that tools are searched for, in bytes.
pub const INTENT_BYTES_MAX: u32 = 4 * KIB;
/// Tools that one search finds at most.
pub const FOUND_TOOLS_MAX: u32 = 64;
/// Keys a supervisor or a guest trusts at most. With
/// [`SIGNATURES_MAX`] it bounds the verifications one program can cost.
pub const TRUST_KEYS_MAX: usize = 16;
/// Signatures one program may carry.
pub const SIGNATURES_MAX: usize = 4;
/// Sections of one module; the scanner stops there.
pub const SECTIONS_MAX: usize = 10_000;
/// A panic message kept in a crash record, in bytes.
pub const PANIC_MESSAGE_BYTES_MAX: usize = 1024;
/// Text that explains an ending, in bytes; a longer one is cut.
pub const REASON_BYTES_MAX: usize = 2048;

// A response must fit one frame, and a frame's length must fit its header.
const _: () = assert!(RESPONSE_BYTES_MAX < u32::MAX - MESSAGE_OVERHEAD_BYTES);
// A call's name rides beside its request.
const _: () = assert!(TOOL_NAME_BYTES_MAX < MESSAGE_OVERHEAD_BYTES as usize);
// An artifact's name and type ride beside its bytes.
const _: () = assert!(2 * ARTIFACT_NAME_BYTES_MAX < MESSAGE_OVERHEAD_BYTES);
// One log record rides in one frame.
const _: () = assert!(LOG_RECORD_BYTES_MAX + LOG_RECORD_OVERHEAD_BYTES <= LOG_BYTES_MAX);
const _: () = assert!(CALLS_IN_FLIGHT_MAX <= CALLS_MAX);
const _: () = assert!(QUESTIONS_MAX < NUMBERS_MAX);
// What was found can be granted.
const _: () = assert!(FOUND_TOOLS_MAX as usize <= GRANTED_TOOLS_MAX);

/// What one run may use.
///
/// [`RunLimits::default`] is what a run gets unasked; an operator's maxima are
/// another value of the same type, see [`RunLimits::operator_maxima`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RunLimits {
    /// Fuel, in wasmi's own count.
    pub fuel: u64,
    /// Linear memory, in bytes.
    pub memory_bytes: u64,
    /// Wall clock from admission to result, in milliseconds.
    pub wall_ms: u64,
    /// The program, in bytes.
    pub program_bytes: u32,
    /// The run's input, in bytes.
    pub input_bytes: u32,
    /// One tool call's arguments, in bytes.
    pub request_bytes: u32,
    /// One tool call's response, in bytes.
    pub response_bytes: u32,
    /// The run's output, in bytes.
    pub output_bytes: u32,
    /// How many artifacts the run may leave.
    pub artifacts: u32,
    /// One artifact, in bytes.
    pub artifact_bytes: u32,
    /// All log records together, in bytes, each with its overhead.
    pub log_bytes: u32,
    /// How many tool calls the run may make.
    pub calls: u32,
    /// Tool calls unanswered at the same time.
    pub calls_in_flight: u32,
    /// How deep wasm calls may be nested.
    pub recursion: u32,
    /// The interpreter's value stack, in bytes.
    pub stack_bytes: u32,
}

impl Default for RunLimits {
    fn default() -> Self {
        Self {
            // A second or two of computing: `wall_ms` bounds a run that waits. wasmi charges
            // a block of code as a whole, so compiled C takes up to ten for an instruction.
            fuel: 5_000_000_000,
            memory_bytes: 16 * u64::from(MIB),
            wall_ms: 5_000,
            program_bytes: 2 * MIB,
            input_bytes: MIB,
            request_bytes: 256 * KIB,
            response_bytes: MIB,
            output_bytes: MIB,
            artifacts: 16,
            artifact_bytes: MIB,
            log_bytes: 64 * KIB,
            calls: 100,
            calls_in_flight: 8,
            recursion: 10_000,
            stack_bytes: MIB,
        }
    }
}

/// A limit that was asked for, or reached, and what was allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// The limit's name, as in [`RunLimits`].
    pub what: &'static str,
    /// What was asked for.
    pub got: u64,
    /// What is allowed.
    pub limit: u64,
}

impl core::fmt::Display for OverLimit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { what, got, limit } = self;
        write!(f, "{what} is {got}, the limit is {limit}")
    }
}

impl core::error::Error for OverLimit {}

/// Holds what is had of something to its limit.
pub(crate) fn within(what: &'static str, got: u64, limit: u64) -> Result<(), OverLimit> {
    if got > limit { Err(OverLimit { what, got, limit }) } else { Ok(()) }
}

impl RunLimits {
    /// What a run may ask for where the operator says nothing else.
    #[must_use]
    pub fn operator_maxima() -> Self {
        Self {
            fuel: u64::MAX,
            memory_bytes: 64 * u64::from(MIB),
            wall_ms: 30_000,
            program_bytes: PROGRAM_BYTES_MAX,
            input_bytes: INPUT_BYTES_MAX,
            request_bytes: REQUEST_BYTES_MAX,
            response_bytes: RESPONSE_BYTES_MAX,
            output_bytes: OUTPUT_BYTES_MAX,
            artifacts: ARTIFACTS_MAX,
            artifact_bytes: ARTIFACT_BYTES_MAX,
            log_bytes: LOG_BYTES_MAX,
            calls: CALLS_MAX,
            calls_in_flight: CALLS_IN_FLIGHT_MAX,
            recursion: 100_000,
            stack_bytes: 64 * MIB,
        }
    }

    /// Checks that `self` asks for nothing `maxima` does not allow.
    ///
    /// # Errors
    /// The first limit that is asked for beyond its maximum.
    pub fn within(&self, maxima: &Self) -> Result<(), OverLimit> {
        let pairs: [(&'static str, u64, u64); 15] = [
            ("fuel", self.fuel, maxima.fuel),
            ("memory_bytes", self.memory_bytes, maxima.memory_bytes),
            (WALL_MS, self.wall_ms, maxima.wall_ms),
            ("program_bytes", self.program_bytes.into(), maxima.program_bytes.into()),
            ("input_bytes", self.input_bytes.into(), maxima.input_bytes.into()),
            ("request_bytes", self.request_bytes.into(), maxima.request_bytes.into()),
            ("response_bytes", self.response_bytes.into(), maxima.response_bytes.into()),
            ("output_bytes", self.output_bytes.into(), maxima.output_bytes.into()),
            ("artifacts", self.artifacts.into(), maxima.artifacts.into()),
            ("artifact_bytes", self.artifact_bytes.into(), maxima.artifact_bytes.into()),
            ("log_bytes", self.log_bytes.into(), maxima.log_bytes.into()),
            ("calls", self.calls.into(), maxima.calls.into()),
            ("calls_in_flight", self.calls_in_flight.into(), maxima.calls_in_flight.into()),
            ("recursion", self.recursion.into(), maxima.recursion.into()),
            ("stack_bytes", self.stack_bytes.into(), maxima.stack_bytes.into()),
        ];
        pairs.into_iter().try_for_each(|(what, got, limit)| within(what, got, limit))
    }
}

/// Makes the limits known by the names of their fields.
macro_rules! named {
    ($($name:ident),* $(,)?) => {
        impl RunLimits {
            /// The names of all limits, which are those of their fields.
            pub const NAMES: &[&'static str] = &[$(stringify!($name)),*];

            /// Sets the limit of this name. Whether it is: not where there is none of
            /// this name, or where its number is too large to be one.
            #[must_use]
            pub fn set(&mut self, name: &str, value: u64) -> bool {
                $(if name == stringify!($name) {
                    return value.try_into().map(|value| self.$name = value).is_ok();
                })*
                false
            }
        }
    };
}

named! {
    fuel, memory_bytes, wall_ms, program_bytes, input_bytes, request_bytes, response_bytes,
    output_bytes, artifacts, artifact_bytes, log_bytes, calls, calls_in_flight, recursion,
    stack_bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_within_the_operators_maxima() {
        RunLimits::default().within(&RunLimits::operator_maxima()).unwrap();
    }

    #[test]
    fn every_limit_is_set_by_its_name() {
        for name in RunLimits::NAMES {
            let mut limits = RunLimits::operator_maxima();
            assert!(limits.set(name, 1), "{name}");
            // One limit that is asked for beyond its maximum is told by its name.
            let over = RunLimits::operator_maxima().within(&limits).unwrap_err();
            assert_eq!((over.what, over.limit), (*name, 1));
        }
        let mut limits = RunLimits::default();
        assert!(!limits.set("recursions", 1) && !limits.set("calls", 1 << 32));
        assert_eq!(limits, RunLimits::default());
    }

    #[test]
    fn the_first_limit_asked_beyond_its_maximum_is_named_with_both_figures() {
        let asked = RunLimits { response_bytes: 9, ..RunLimits::default() };
        let maxima = RunLimits { response_bytes: 8, ..RunLimits::operator_maxima() };
        let over = asked.within(&maxima).unwrap_err();
        assert_eq!(over, OverLimit { what: "response_bytes", got: 9, limit: 8 });
    }
}
