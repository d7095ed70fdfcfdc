//! Every way a program's execution can end, as guest-init reports it.
//!
//! The supervisor adds the ways a guest cannot report itself: its own crash,
//! the deadline, a cancelled run.

use alloc::string::String;

use crate::codec::{Decode, Encode};

/// Why an import of a tool is refused that is not granted: behind the import's name.
pub const UNGRANTED: &str = "the grant does not name this tool";

/// The limit on a run's time, as refusals name it.
pub const WALL_MS: &str = "wall_ms";

/// How the program's execution ended.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Ending {
    /// `forge_run` returned, or `proc_exit` was called, with this code. 0 is
    /// success.
    Returned(i32),
    /// The program trapped.
    Trap {
        /// Which trap.
        kind: TrapKind,
        /// What the interpreter says about it.
        detail: String,
    },
    /// A limit ended the program.
    Limit {
        /// Which limit.
        kind: LimitKind,
        /// Its value.
        limit: u64,
    },
    /// The guest's own checks refused the program.
    Rejected {
        /// Which check.
        kind: RejectKind,
        /// What was found.
        detail: String,
    },
}

/// The traps of WebAssembly, and those the environment adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum TrapKind {
    /// `unreachable` was executed.
    Unreachable,
    /// Linear memory was accessed out of its bounds.
    MemoryOutOfBounds,
    /// A table was accessed out of its bounds.
    TableOutOfBounds,
    /// `call_indirect` to a null entry.
    IndirectCallToNull,
    /// `call_indirect` with another type than the function has.
    BadSignature,
    /// Integer division by zero.
    DivisionByZero,
    /// Integer overflow.
    IntegerOverflow,
    /// A float that no integer represents was converted.
    BadConversion,
    /// Calls nest too deep or the value stack is full.
    StackOverflow,
    /// A pointer or length handed to the environment is outside memory.
    BadPointer,
    /// The environment was used against its contract, say `wait` for a handle
    /// that is none.
    Misuse,
    /// A trap the interpreter has no code for.
    Other,
}

impl TrapKind {
    /// Its stable name in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::MemoryOutOfBounds => "memory_out_of_bounds",
            Self::TableOutOfBounds => "table_out_of_bounds",
            Self::IndirectCallToNull => "indirect_call_to_null",
            Self::BadSignature => "bad_signature",
            Self::DivisionByZero => "division_by_zero",
            Self::IntegerOverflow => "integer_overflow",
            Self::BadConversion => "bad_conversion",
            Self::StackOverflow => "stack_overflow",
            Self::BadPointer => "bad_pointer",
            Self::Misuse => "misuse",
            Self::Other => "other",
        }
    }
}

/// The limits that end a program from inside the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum LimitKind {
    /// Fuel ran out.
    Fuel,
    /// Output passed its bound.
    Output,
    /// Too many artifacts, or one too large.
    Artifacts,
    /// The program needs more memory to start than it may have.
    Memory,
}

impl LimitKind {
    /// Its stable name in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fuel => "fuel",
            Self::Output => "output",
            Self::Artifacts => "artifacts",
            Self::Memory => "memory",
        }
    }
}

/// The checks a program passes before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum RejectKind {
    /// The signature is missing, malformed, broken or from no trusted key.
    Signature,
    /// The module is not valid WebAssembly.
    Invalid,
    /// An import is unknown, of a wrong type or not granted.
    Import,
    /// An export the ABI asks for is missing or of a wrong type.
    Export,
    /// The module has a start section.
    StartSection,
    /// The module is larger or more complex than allowed.
    TooLarge,
}

impl RejectKind {
    /// Its stable name in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Signature => "signature",
            Self::Invalid => "invalid",
            Self::Import => "import",
            Self::Export => "export",
            Self::StartSection => "start_section",
            Self::TooLarge => "too_large",
        }
    }
}
