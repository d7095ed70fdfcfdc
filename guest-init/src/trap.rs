//! wasmi's errors as the protocol's endings.
//!
//! wasmi 2.0 tells which trap it was and nothing about where: its frames are
//! private and it keeps no names. So an ending has the kind, and for host
//! functions the reason, but not the wasm function.

use alloc::string::{String, ToString};
use core::fmt;

use forge_protocol::ending::{Ending, LimitKind, RejectKind, TrapKind};
use forge_protocol::limits::{REASON_BYTES_MAX, RunLimits};
use wasmi::errors::{ErrorKind, InstantiationError, MemoryError, TableError};
use wasmi::{Error, TrapCode};

use crate::link::ServeError;
use crate::place;

/// Why a host function ends the program. It travels through wasmi as a host
/// error.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The program broke the ABI's contract.
    Trap { kind: TrapKind, detail: String },
    /// It used what it may.
    Limit { kind: LimitKind, limit: u64 },
    /// The link failed; there is no one left to tell.
    Serve(ServeError),
}

impl Stop {
    pub(crate) fn misuse(detail: impl Into<String>) -> Self {
        Self::Trap { kind: TrapKind::Misuse, detail: detail.into() }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trap { detail, .. } => f.write_str(detail),
            Self::Limit { kind, limit } => write!(f, "the {} limit is {limit}", kind.as_str()),
            Self::Serve(error) => write!(f, "{error}"),
        }
    }
}

impl wasmi::errors::HostError for Stop {}

impl From<ServeError> for Stop {
    fn from(error: ServeError) -> Self {
        Self::Serve(error)
    }
}

/// The ending for an error that wasmi returned while the program was
/// instantiated or ran.
///
/// # Errors
/// The link failed under a host function.
pub(crate) fn ending(error: Error, limits: &RunLimits) -> Result<Ending, ServeError> {
    if let Some(code) = error.i32_exit_status() {
        return Ok(Ending::Returned(code));
    }
    if let Some(code) = error.as_trap_code() {
        return Ok(trapped(code, limits));
    }
    match error.kind() {
        ErrorKind::Instantiation(error) => return Ok(not_instantiated(error, limits)),
        ErrorKind::Host(_) => {}
        other => return Ok(trap(TrapKind::Other, other.to_string())),
    }
    match error.downcast::<Stop>() {
        Some(Stop::Trap { kind, detail }) => Ok(trap(kind, detail)),
        Some(Stop::Limit { kind, limit }) => Ok(Ending::Limit { kind, limit }),
        Some(Stop::Serve(error)) => Err(error),
        None => Ok(trap(TrapKind::Other, "a host function failed")),
    }
}

fn trapped(code: TrapCode, limits: &RunLimits) -> Ending {
    let (kind, detail) = match code {
        TrapCode::OutOfFuel => {
            return Ending::Limit { kind: LimitKind::Fuel, limit: limits.fuel };
        }
        TrapCode::UnreachableCodeReached => (TrapKind::Unreachable, "unreachable was executed"),
        TrapCode::MemoryOutOfBounds => (
            TrapKind::MemoryOutOfBounds,
            "an access beyond the end of linear memory or of a data segment",
        ),
        TrapCode::TableOutOfBounds => (
            TrapKind::TableOutOfBounds,
            "an access beyond the end of a table or of an element segment",
        ),
        TrapCode::IndirectCallToNull => {
            (TrapKind::IndirectCallToNull, "an indirect call to an entry that is null")
        }
        TrapCode::IntegerDivisionByZero => (TrapKind::DivisionByZero, "an integer divided by zero"),
        TrapCode::IntegerOverflow => (
            TrapKind::IntegerOverflow,
            "an integer division overflowed, or a float is out of the range of the integer that it \
             is converted to",
        ),
        TrapCode::BadConversionToInteger => {
            (TrapKind::BadConversion, "NaN was converted to an integer")
        }
        TrapCode::StackOverflow => (
            TrapKind::StackOverflow,
            "calls nest too deep (limit `recursion`), or the value stack is full (`stack_bytes`)",
        ),
        TrapCode::BadSignature => {
            (TrapKind::BadSignature, "an indirect call by another type than the function has")
        }
        // See `engine`, of which alone this comes.
        TrapCode::GrowthOperationLimited => (
            TrapKind::Other,
            "a table.grow took more fuel than was left of a slice, and the interpreter cannot go on \
             from there: grow by less at once",
        ),
        TrapCode::OutOfSystemMemory => (
            TrapKind::Other,
            "the environment has no memory left for the program's stack or tables",
        ),
    };
    trap(kind, detail)
}

fn not_instantiated(error: &InstantiationError, limits: &RunLimits) -> Ending {
    match error {
        InstantiationError::FailedToInstantiateMemory(
            MemoryError::ResourceLimiterDeniedAllocation | MemoryError::OutOfSystemMemory,
        )
        | InstantiationError::FailedToInstantiateTable(
            TableError::ResourceLimiterDeniedAllocation | TableError::OutOfSystemMemory,
        ) => Ending::Limit { kind: LimitKind::Memory, limit: limits.memory_bytes },
        InstantiationError::ElementSegmentDoesNotFit { .. } => {
            trap(TrapKind::TableOutOfBounds, "an element segment does not fit its table")
        }
        other => rejected(RejectKind::Invalid, other.to_string()),
    }
}

/// The ending for an error that wasmi returned while it compiled the module.
/// Names the function of this module that it is in.
pub(crate) fn not_compiled(error: &Error, module: &[u8]) -> Ending {
    let said = error.to_string();
    let is_wide_table = said.contains("br_table size is out of bounds");
    let text = told(said, module);
    match error.kind() {
        // The only error of this kind that depends on our configuration alone;
        // wasmi keeps the type private.
        ErrorKind::Translation(_) if text.contains("disallows start functions") => rejected(
            RejectKind::StartSection,
            "the module has a start section; export forge_run instead",
        ),
        // A local takes two, whatever its type.
        ErrorKind::Translation(_) if text.contains("more registers") => rejected(
            RejectKind::TooLarge,
            alloc::format!(
                "{text}: twice its locals, parameters among them, and the most operands at once \
                 are over {}",
                u16::MAX,
            ),
        ),
        // Valid, and a bound of the parser's.
        _ if is_wide_table => {
            rejected(RejectKind::TooLarge, alloc::format!("{text}: the most targets are 131072"))
        }
        // What is translated is valid: what fails there is too much for its instructions.
        ErrorKind::Translation(_)
        | ErrorKind::UserLimits(_)
        | ErrorKind::ImplementationLimits(_) => rejected(RejectKind::TooLarge, text),
        _ => rejected(RejectKind::Invalid, text),
    }
}

/// What is wrong with a module, with the function that it is in and, where the module uses
/// what is not there, what to build it without.
pub(crate) fn told(said: String, module: &[u8]) -> String {
    let lacking = lacking(&said);
    let mut text = place::told(said, module);
    if let Some(lacking) = lacking {
        text.push_str(": ");
        text.push_str(lacking);
    }
    text
}

/// What of WebAssembly is not there, by the words of the parser that refuses it. It speaks
/// of switches, which a program's author has none of.
fn lacking(said: &str) -> Option<&'static str> {
    const LACKING: [(&[&str], &str); 6] = [
        (&["SIMD"], "SIMD is not there, build the program without it"),
        (
            &["threads", "shared memor"],
            "threads are not there, build the program without them (clang: no -pthread and no \
             -matomics; asc: no --sharedMemory)",
        ),
        (
            &["exceptions"],
            "exceptions are not there, build the program without them (clang: -fno-exceptions, \
             and no setjmp)",
        ),
        (&["memory64"], "64-bit memories are not there, build the program for wasm32"),
        (
            &["(0x7e) for external kind", "(0x7f) for external kind"],
            "compact imports are not there, build the program without them (wasm-opt: no -all, \
             or --disable-compact-imports)",
        ),
        (
            &["not enabled", "must be enabled", "without the "],
            "this proposal is not there, build the program without it",
        ),
    ];
    let uses = |(words, _): &&(&[&str], &str)| words.iter().any(|word| said.contains(word));
    LACKING.iter().find(uses).map(|(_, told)| *told)
}

pub(crate) fn trap(kind: TrapKind, detail: impl Into<String>) -> Ending {
    Ending::Trap { kind, detail: cut(detail.into()) }
}

pub(crate) fn rejected(kind: RejectKind, detail: impl Into<String>) -> Ending {
    Ending::Rejected { kind, detail: cut(detail.into()) }
}

/// Text that explains an ending, cut to what a message holds.
fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(REASON_BYTES_MAX));
    text
}
