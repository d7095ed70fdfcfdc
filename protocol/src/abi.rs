//! The imports a program may declare and the codes it gets back: forge ABI
//! v1. `docs/abi.md` is its text; this table is what admission on the host
//! and the linker in the guest both check a module against.

use crate::codec::{Decode, Encode};
use crate::name::{NameError, ToolName};

/// A WebAssembly value type, as far as the ABI needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// `i32`
    I32,
    /// `i64`
    I64,
}

/// The type of an imported function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Its parameters.
    pub params: &'static [Value],
    /// Its result, if any.
    pub result: Option<Value>,
}

impl core::fmt::Display for Signature {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let name = |value: &Value| match value {
            Value::I32 => "i32",
            Value::I64 => "i64",
        };
        f.write_str("(func")?;
        if !self.params.is_empty() {
            f.write_str(" (param")?;
            for value in self.params {
                write!(f, " {}", name(value))?;
            }
            f.write_str(")")?;
        }
        if let Some(value) = &self.result {
            write!(f, " (result {})", name(value))?;
        }
        f.write_str(")")
    }
}

/// The module name of tool imports.
pub const TOOL_MODULE: &str = "tool";
/// The module name of the environment's own functions.
pub const FORGE_MODULE: &str = "forge";
/// The module name of WASI preview 1.
pub const WASI_MODULE: &str = "wasi_snapshot_preview1";

/// The type of every tool import: request pointer and length, then response
/// length or a [`CallCode`].
pub const TOOL_SIGNATURE: Signature =
    Signature { params: &[Value::I32, Value::I32], result: Some(Value::I32) };

macro_rules! functions {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal
        ($($param:ident),*) $(-> $result:ident)?;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $type {
            /// Every function, for tables and tests.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its import name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Its type.
            #[must_use]
            pub const fn signature(self) -> Signature {
                match self {
                    $(Self::$variant => Signature {
                        params: &[$(Value::$param),*],
                        result: functions!(@result $($result)?),
                    },)*
                }
            }

            /// The function with this import name.
            #[must_use]
            pub fn by_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|function| function.name() == name)
            }
        }
    };
    (@result) => { None };
    (@result $result:ident) => { Some(Value::$result) };
}

functions! {
    /// The functions of module [`FORGE_MODULE`].
    Forge {
        /// Copies from the held response; returns the bytes copied.
        RespRead = "resp_read"(I32, I32, I32) -> I32;
        /// The length of the held response or error.
        RespLen = "resp_len"() -> I32;
        /// The length of the run's input.
        InputLen = "input_len"() -> I32;
        /// Copies from the run's input; returns the bytes copied.
        InputRead = "input_read"(I32, I32, I32) -> I32;
        /// Appends to the run's output.
        Output = "output"(I32, I32) -> I32;
        /// Leaves a named output with a media type.
        Artifact = "artifact"(I32, I32, I32, I32, I32, I32) -> I32;
        /// Writes one log record.
        Log = "log"(I32, I32, I32);
        /// Virtual time, in nanoseconds since the Unix epoch.
        NowNs = "now_ns"() -> I64;
        /// Fills memory from the run's seeded generator.
        Random = "random"(I32, I32);
        /// Calls a tool by name and waits for it.
        Call = "call"(I32, I32, I32, I32) -> I32;
        /// Starts a call; returns its handle.
        CallAsync = "call_async"(I32, I32, I32, I32) -> I32;
        /// Waits for one started call.
        Wait = "wait"(I32) -> I32;
        /// Waits for whichever started call settles first; returns its handle.
        WaitAny = "wait_any"() -> I32;
    }
}

functions! {
    /// The functions of module [`WASI_MODULE`], all of them. Those for files,
    /// sockets and signals are there to be linked, and refuse.
    Wasi {
        /// No arguments.
        ArgsGet = "args_get"(I32, I32) -> I32;
        /// No arguments.
        ArgsSizesGet = "args_sizes_get"(I32, I32) -> I32;
        /// No environment.
        EnvironGet = "environ_get"(I32, I32) -> I32;
        /// No environment.
        EnvironSizesGet = "environ_sizes_get"(I32, I32) -> I32;
        /// Virtual time.
        ClockTimeGet = "clock_time_get"(I32, I64, I32) -> I32;
        /// What virtual time is counted in.
        ClockResGet = "clock_res_get"(I32, I32) -> I32;
        /// The run's seeded generator.
        RandomGet = "random_get"(I32, I32) -> I32;
        /// 1 is the output, 2 the log.
        FdWrite = "fd_write"(I32, I32, I32, I32) -> I32;
        /// 0 is the input.
        FdRead = "fd_read"(I32, I32, I32, I32) -> I32;
        /// 0, 1 and 2 are character devices.
        FdFdstatGet = "fd_fdstat_get"(I32, I32) -> I32;
        /// 0, 1 and 2 take any.
        FdFdstatSetFlags = "fd_fdstat_set_flags"(I32, I32) -> I32;
        /// ENOTSUP.
        FdFdstatSetRights = "fd_fdstat_set_rights"(I32, I64, I64) -> I32;
        /// 0, 1 and 2 are character devices.
        FdFilestatGet = "fd_filestat_get"(I32, I32) -> I32;
        /// EINVAL.
        FdFilestatSetSize = "fd_filestat_set_size"(I32, I64) -> I32;
        /// EINVAL.
        FdFilestatSetTimes = "fd_filestat_set_times"(I32, I64, I64, I32) -> I32;
        /// 0, 1 and 2 are gone then.
        FdClose = "fd_close"(I32) -> I32;
        /// Nothing: what is written is written.
        FdSync = "fd_sync"(I32) -> I32;
        /// Nothing: what is written is written.
        FdDatasync = "fd_datasync"(I32) -> I32;
        /// ESPIPE.
        FdSeek = "fd_seek"(I32, I64, I32, I32) -> I32;
        /// ESPIPE.
        FdTell = "fd_tell"(I32, I32) -> I32;
        /// ESPIPE.
        FdPread = "fd_pread"(I32, I32, I32, I64, I32) -> I32;
        /// ESPIPE.
        FdPwrite = "fd_pwrite"(I32, I32, I32, I64, I32) -> I32;
        /// ESPIPE.
        FdAdvise = "fd_advise"(I32, I64, I64, I32) -> I32;
        /// ESPIPE.
        FdAllocate = "fd_allocate"(I32, I64, I64) -> I32;
        /// ENOTDIR.
        FdReaddir = "fd_readdir"(I32, I32, I32, I64, I32) -> I32;
        /// ENOTSUP.
        FdRenumber = "fd_renumber"(I32, I32) -> I32;
        /// EBADF.
        FdPrestatGet = "fd_prestat_get"(I32, I32) -> I32;
        /// EBADF.
        FdPrestatDirName = "fd_prestat_dir_name"(I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathOpen = "path_open"(I32, I32, I32, I32, I32, I64, I64, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathCreateDirectory = "path_create_directory"(I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathFilestatGet = "path_filestat_get"(I32, I32, I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathFilestatSetTimes =
            "path_filestat_set_times"(I32, I32, I32, I32, I64, I64, I32) -> I32;
        /// ENOTCAPABLE.
        PathLink = "path_link"(I32, I32, I32, I32, I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathReadlink = "path_readlink"(I32, I32, I32, I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathRemoveDirectory = "path_remove_directory"(I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathRename = "path_rename"(I32, I32, I32, I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathSymlink = "path_symlink"(I32, I32, I32, I32, I32) -> I32;
        /// ENOTCAPABLE.
        PathUnlinkFile = "path_unlink_file"(I32, I32, I32) -> I32;
        /// ENOTSOCK.
        SockAccept = "sock_accept"(I32, I32, I32) -> I32;
        /// ENOTSOCK.
        SockRecv = "sock_recv"(I32, I32, I32, I32, I32, I32) -> I32;
        /// ENOTSOCK.
        SockSend = "sock_send"(I32, I32, I32, I32, I32) -> I32;
        /// ENOTSOCK.
        SockShutdown = "sock_shutdown"(I32, I32) -> I32;
        /// Sleeps, in virtual time, if nothing it asks for is there.
        PollOneoff = "poll_oneoff"(I32, I32, I32, I32) -> I32;
        /// Nothing.
        SchedYield = "sched_yield"() -> I32;
        /// ENOTSUP.
        ProcRaise = "proc_raise"(I32) -> I32;
        /// Ends the run with this code.
        ProcExit = "proc_exit"(I32);
    }
}

/// One import, recognised by its two names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Import {
    /// A tool; whether it may be called is the grant's to say.
    Tool(ToolName),
    /// A function of the environment.
    Forge(Forge),
    /// A function of WASI.
    Wasi(Wasi),
}

/// Why an import is refused by its names alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportError {
    /// No import module has this name.
    UnknownModule,
    /// Module [`FORGE_MODULE`] has no function of this name.
    NotInAbi,
    /// WASI preview 1 has no function of this name.
    NotInWasi,
    /// A tool import whose name is none.
    BadToolName(NameError),
}

impl core::fmt::Display for ImportError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::UnknownModule => {
                write!(f, "programs import from `tool`, `forge` and `{WASI_MODULE}` only")
            }
            Self::NotInAbi => write!(f, "there is no such function in forge ABI v1"),
            Self::NotInWasi => write!(f, "there is no such function in WASI preview 1"),
            Self::BadToolName(why) => write!(f, "{why}"),
        }
    }
}

impl core::error::Error for ImportError {}

impl Import {
    /// Recognises an import by its module and function name.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn recognise(module: &str, function: &str) -> Result<Self, ImportError> {
        match module {
            TOOL_MODULE => {
                ToolName::parse(function).map(Self::Tool).map_err(ImportError::BadToolName)
            }
            FORGE_MODULE => Forge::by_name(function).map(Self::Forge).ok_or(ImportError::NotInAbi),
            WASI_MODULE => Wasi::by_name(function).map(Self::Wasi).ok_or(ImportError::NotInWasi),
            _ => Err(ImportError::UnknownModule),
        }
    }

    /// The type it must have.
    #[must_use]
    pub const fn signature(&self) -> Signature {
        match self {
            Self::Tool(_) => TOOL_SIGNATURE,
            Self::Forge(function) => function.signature(),
            Self::Wasi(function) => function.signature(),
        }
    }
}

/// How a tool call settled, if it gave no response. The number is what the
/// program sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
#[repr(i32)]
pub enum CallCode {
    /// Not in the grant, or a policy or approver said no. It did not happen.
    Denied = -1,
    /// There is no such tool. It did not happen.
    NoSuchTool = -2,
    /// The request is not what the tool's schema asks. It did not happen; the
    /// body says why.
    BadRequest = -3,
    /// The request is over the limit. It did not happen.
    RequestTooLarge = -4,
    /// The tool failed. It happened; the body is its error, redacted.
    ToolFailed = -5,
    /// The budget is spent. It did not happen.
    BudgetSpent = -6,
    /// The deadline passed before the call. It did not happen.
    DeadlinePassed = -7,
    /// The deadline passed, or the tool was lost, after dispatch. It may have
    /// happened.
    OutcomeUnknown = -8,
    /// The response is over the limit. It happened.
    ResponseTooLarge = -9,
    /// The broker cannot record the call. It did not happen.
    NotRecorded = -10,
    /// The response is not what the tool's own schema promises. It happened.
    BadResponse = -11,
}

impl CallCode {
    /// Every code, for tables and tests.
    pub const ALL: [Self; 11] = [
        Self::Denied,
        Self::NoSuchTool,
        Self::BadRequest,
        Self::RequestTooLarge,
        Self::ToolFailed,
        Self::BudgetSpent,
        Self::DeadlinePassed,
        Self::OutcomeUnknown,
        Self::ResponseTooLarge,
        Self::NotRecorded,
        Self::BadResponse,
    ];

    /// Its stable name in reports.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::NoSuchTool => "no_such_tool",
            Self::BadRequest => "bad_request",
            Self::RequestTooLarge => "request_too_large",
            Self::ToolFailed => "tool_failed",
            Self::BudgetSpent => "budget_spent",
            Self::DeadlinePassed => "deadline_passed",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::ResponseTooLarge => "response_too_large",
            Self::NotRecorded => "not_recorded",
            Self::BadResponse => "bad_response",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn imports_are_recognised_by_both_names() {
        let tool = Import::recognise("tool", "github.issues.list").unwrap();
        assert_eq!(tool, Import::Tool(ToolName::parse("github.issues.list").unwrap()));
        assert_eq!(tool.signature().to_string(), "(func (param i32 i32) (result i32))");
        assert_eq!(Import::recognise("forge", "now_ns"), Ok(Import::Forge(Forge::NowNs)));
        assert_eq!(
            Import::recognise("wasi_snapshot_preview1", "fd_write"),
            Ok(Import::Wasi(Wasi::FdWrite))
        );
    }

    #[test]
    fn unknown_imports_are_refused() {
        assert_eq!(Import::recognise("env", "abort"), Err(ImportError::UnknownModule));
        assert_eq!(Import::recognise("forge", "system"), Err(ImportError::NotInAbi));
        assert_eq!(
            Import::recognise("wasi_snapshot_preview1", "sock_open"),
            Err(ImportError::NotInWasi)
        );
        assert_eq!(
            Import::recognise("tool", "nodot"),
            Err(ImportError::BadToolName(NameError::NoServer))
        );
    }

    #[test]
    fn call_codes_are_the_documented_numbers() {
        for (position, code) in CallCode::ALL.into_iter().enumerate() {
            assert_eq!(code as i32, -(position as i32 + 1), "{}", code.as_str());
        }
    }
}
