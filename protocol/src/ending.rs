//! Every way a run can end.
//!
//! An [`Ending`] is what guest-init reports of a program. [`RunEnd`] is what a run is
//! reported as: the same, and the ways a guest cannot report itself, say its own crash,
//! the deadline, or a run that was refused.

use alloc::string::String;

use crate::broker::RefusalKind;
use crate::codec::{Decode, Encode};

/// An enum whose variants have stable names in reports, and all of them.
macro_rules! words {
    ($(#[$about:meta])* $enum:ident {
        $($(#[$doc:meta])* $variant:ident = $word:literal,)*
    }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $enum {
            $($(#[$doc])* $variant,)*
        }

        impl $enum {
            /// Every variant.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its stable name in reports.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }
    };
}

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
        /// The kind of trap.
        kind: TrapKind,
        /// What the interpreter says about it.
        detail: String,
    },
    /// A limit ended the program.
    Limit {
        /// The kind of limit.
        kind: LimitKind,
        /// The limit's value.
        limit: u64,
    },
    /// The guest's own checks refused the program.
    Rejected {
        /// The kind of check that failed.
        kind: RejectKind,
        /// What was found.
        detail: String,
    },
}

words! {
    /// The traps of WebAssembly, and those the environment adds.
    #[derive(Encode, Decode)]
    TrapKind {
        /// `unreachable` was executed.
        Unreachable = "unreachable",
        /// Linear memory was accessed out of its bounds.
        MemoryOutOfBounds = "memory_out_of_bounds",
        /// A table was accessed out of its bounds.
        TableOutOfBounds = "table_out_of_bounds",
        /// `call_indirect` to a null entry.
        IndirectCallToNull = "indirect_call_to_null",
        /// `call_indirect` with another type than the function has.
        BadSignature = "bad_signature",
        /// Integer division by zero.
        DivisionByZero = "division_by_zero",
        /// Integer overflow.
        IntegerOverflow = "integer_overflow",
        /// A float that no integer represents was converted.
        BadConversion = "bad_conversion",
        /// Calls nest too deep or the value stack is full.
        StackOverflow = "stack_overflow",
        /// A pointer or length handed to the environment is outside memory.
        BadPointer = "bad_pointer",
        /// The environment was used against its contract, say `wait` for a handle
        /// that is none.
        Misuse = "misuse",
        /// A trap the interpreter has no code for.
        Other = "other",
    }
}

words! {
    /// The limits that end a program from inside the guest.
    #[derive(Encode, Decode)]
    LimitKind {
        /// Fuel ran out.
        Fuel = "fuel",
        /// Output passed its bound.
        Output = "output",
        /// Too many artifacts, or one too large.
        Artifacts = "artifacts",
        /// The program needs more memory to start than it may have.
        Memory = "memory",
    }
}

words! {
    /// The checks a program passes before it runs.
    #[derive(Encode, Decode)]
    RejectKind {
        /// The signature is missing, malformed, broken or from no trusted key.
        Signature = "signature",
        /// The module is not valid WebAssembly.
        Invalid = "invalid",
        /// An import is unknown, of a wrong type or not granted.
        Import = "import",
        /// An export the ABI asks for is missing or of a wrong type.
        Export = "export",
        /// The module has a start section.
        StartSection = "start_section",
        /// The module is larger or more complex than allowed.
        TooLarge = "too_large",
    }
}

words! {
    /// How a run ended, in one word.
    Status {
        /// The program returned 0.
        Ok = "ok",
        /// The program returned something else.
        Failed = "failed",
        /// The program trapped.
        Trap = "trap",
        /// The program or what was asked for it was refused before it ran.
        Rejected = "rejected",
        /// A limit ended it.
        Limit = "limit",
        /// It waits for an approval.
        Paused = "paused",
        /// Somebody cancelled it.
        Cancelled = "cancelled",
        /// There was no room for it.
        Refused = "refused",
        /// This host cannot run it.
        Unavailable = "unavailable",
        /// The guest, the worker or the broker failed: not the program's fault.
        Internal = "internal",
    }
}

impl Status {
    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|status| status.as_str() == name)
    }

    /// The process exit code of `forge-vmm run`.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed | Self::Trap => 1,
            Self::Rejected => 3,
            Self::Limit => 4,
            Self::Unavailable => 5,
            Self::Paused => 6,
            Self::Cancelled | Self::Refused => 7,
            Self::Internal => 70,
        }
    }
}

words! {
    /// Why what was asked for a run is not allowed, whatever its program is.
    Denial {
        /// The grant is forged, expired, another's, or for a tool that changed since.
        Grant = "grant",
        /// The principal's roles do not name the tool, or the client does not speak for
        /// the principal.
        Forbidden = "forbidden",
        /// The tool's definition is not approved.
        NotReviewed = "not_reviewed",
        /// No server has a tool of that name.
        NoSuchTool = "no_such_tool",
        /// What was asked is malformed.
        BadRequest = "bad_request",
    }
}

words! {
    /// What there was no room for, now.
    Refusal {
        /// A place to run or to wait.
        Overloaded = "overloaded",
        /// Another run of the principal's.
        TooManyRuns = "too_many_runs",
        /// Any run: the service takes no more.
        Draining = "draining",
        /// A run that calls tools: the toolbroker is not there again yet.
        BrokerAway = "broker_away",
        /// A run that calls this server's tools: it cannot be asked.
        ServerAway = "server_away",
    }
}

words! {
    /// What this host lacks.
    Lack {
        /// Virtual machines.
        Kvm = "kvm",
        /// Processes, descriptors or memory for a worker, or something else that each has.
        Host = "host",
    }
}

words! {
    /// What of ours failed.
    Fault {
        /// The guest faulted or panicked.
        GuestCrash = "guest_crash",
        /// The guest or its worker broke the protocol or the device's rules.
        GuestMisbehaved = "guest_misbehaved",
        /// The VM stopped without telling why.
        VmStopped = "vm_stopped",
        /// The broker was lost under the run, or broke its protocol.
        BrokerLost = "broker_lost",
        /// The broker failed or gave no answer before the run began.
        Broker = "broker",
        /// What the run's calls did is not known to be on the disk.
        Journal = "journal",
        /// The worker ended without a report.
        WorkerLost = "worker_lost",
        /// The worker made a system call that its jail forbids.
        WorkerBroke = "worker_broke",
        /// A reset left something behind.
        NotReset = "not_reset",
        /// Anything else: our own bug.
        Internal = "internal",
    }
}

/// How a run ended: what its report calls `status` and `kind`.
///
/// A kind's name is one status's alone, so either may be had from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunEnd {
    /// The program returned 0.
    Ok,
    /// The program returned something else.
    Returned,
    /// The program trapped.
    Trap(TrapKind),
    /// The program was refused before it ran, or a limit that was asked for.
    Rejected(RejectKind),
    /// What was asked for it is not allowed.
    Denied(Denial),
    /// The program reached a limit of its own.
    Limit(LimitKind),
    /// The wall clock ran out.
    Deadline,
    /// Somebody cancelled it.
    Cancelled,
    /// There was no room for it.
    Refused(Refusal),
    /// This host cannot run it.
    Unavailable(Lack),
    /// It failed, and not by its program's fault.
    Internal(Fault),
}

impl RunEnd {
    /// Every way in which a run can end.
    pub fn all() -> impl Iterator<Item = Self> {
        fn of<T: Copy>(all: &'static [T], end: fn(T) -> RunEnd) -> impl Iterator<Item = RunEnd> {
            all.iter().copied().map(end)
        }
        [Self::Ok, Self::Returned, Self::Deadline, Self::Cancelled]
            .into_iter()
            .chain(of(TrapKind::ALL, Self::Trap))
            .chain(of(RejectKind::ALL, Self::Rejected))
            .chain(of(Denial::ALL, Self::Denied))
            .chain(of(LimitKind::ALL, Self::Limit))
            .chain(of(Refusal::ALL, Self::Refused))
            .chain(of(Lack::ALL, Self::Unavailable))
            .chain(of(Fault::ALL, Self::Internal))
    }

    /// The one whose kind has this name.
    #[must_use]
    pub fn of_kind(name: &str) -> Option<Self> {
        Self::all().find(|end| end.kind() == name)
    }

    /// How it ended, in one word.
    #[must_use]
    pub const fn status(self) -> Status {
        match self {
            Self::Ok => Status::Ok,
            Self::Returned => Status::Failed,
            Self::Trap(_) => Status::Trap,
            Self::Rejected(_) | Self::Denied(_) => Status::Rejected,
            Self::Limit(_) | Self::Deadline => Status::Limit,
            Self::Cancelled => Status::Cancelled,
            Self::Refused(_) => Status::Refused,
            Self::Unavailable(_) => Status::Unavailable,
            Self::Internal(_) => Status::Internal,
        }
    }

    /// The stable name of why, within the status. Empty for [`Self::Ok`].
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Ok => "",
            Self::Returned => "returned",
            Self::Trap(kind) => kind.as_str(),
            Self::Rejected(kind) => kind.as_str(),
            Self::Denied(denial) => denial.as_str(),
            Self::Limit(kind) => kind.as_str(),
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::Refused(refusal) => refusal.as_str(),
            Self::Unavailable(lack) => lack.as_str(),
            Self::Internal(fault) => fault.as_str(),
        }
    }
}

/// How a run ends that the broker refuses.
impl From<RefusalKind> for RunEnd {
    fn from(kind: RefusalKind) -> Self {
        match kind {
            RefusalKind::NoSuchTool => Self::Denied(Denial::NoSuchTool),
            RefusalKind::BadGrant => Self::Denied(Denial::Grant),
            RefusalKind::BadRequest => Self::Denied(Denial::BadRequest),
            RefusalKind::Forbidden => Self::Denied(Denial::Forbidden),
            RefusalKind::NotReviewed => Self::Denied(Denial::NotReviewed),
            RefusalKind::Internal => Self::Internal(Fault::Broker),
            RefusalKind::Journal => Self::Internal(Fault::Journal),
            RefusalKind::Overloaded => Self::Refused(Refusal::Overloaded),
            RefusalKind::Away => Self::Refused(Refusal::BrokerAway),
            RefusalKind::OutOfTime => Self::Deadline,
            RefusalKind::ServerAway => Self::Refused(Refusal::ServerAway),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use super::*;

    /// The rows of the table of docs/ending.md: status, kinds, exit code.
    fn documented() -> BTreeMap<&'static str, (&'static str, u8)> {
        let rows = include_str!("../../docs/ending.md").lines().filter(|it| it.starts_with("| `"));
        let mut kinds = BTreeMap::new();
        for row in rows {
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            let [_, status, names, _, exit, _] = cells[..] else { panic!("{row}") };
            for name in names.split(", ") {
                let kind = if name == "(empty)" { "" } else { name.trim_matches('`') };
                let told = (status.trim_matches('`'), exit.parse().unwrap());
                assert!(kinds.insert(kind, told).is_none_or(|it| it == told), "{kind}");
            }
        }
        kinds
    }

    #[test]
    fn exit_codes_are_the_documented_ones() {
        let told = |end: RunEnd| (end.kind(), (end.status().as_str(), end.status().exit_code()));
        assert_eq!(RunEnd::all().map(told).collect::<BTreeMap<_, _>>(), documented());
    }

    #[test]
    fn no_two_ends_have_one_kind() {
        for end in RunEnd::all() {
            assert_eq!(RunEnd::of_kind(end.kind()), Some(end));
        }
        assert_eq!(RunEnd::of_kind("queue_full"), None);
    }
}
