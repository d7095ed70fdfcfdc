//! The command line: raw flags into one struct, resolved into a checked one,
//! and only that reaches the rest.
//!
//! Standard output carries results and nothing else; everything said to a
//! person goes to standard error.

mod args;
mod bench;
mod config;
mod door;
mod grant;
mod interrupt;
mod journal;
mod manual;
mod mcp;
mod place;
mod probe;
mod program;
mod replace;
mod run;
mod serve;
mod status;
mod tools;
mod top;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use forge_protocol::broker::RefusalKind;
use forge_protocol::text::visible;
use forge_vmm::broker::BrokerError;
use forge_vmm::keys::KeyFileError;
use forge_vmm::service::server;
use forge_vmm::supervisor::Supervisor;

use args::{Args, Command};

/// How the process ends, beside a run's own [`forge_vmm::report::Status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Ok = 0,
    Failed = 1,
    Usage = 2,
    Rejected = 3,
    Limit = 4,
    Unavailable = 5,
    Refused = 7,
    Internal = 70,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command did not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The command line or a file it names does not fit.
    #[error("{0}")]
    Usage(String),
    /// A key file.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// The broker.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// A file.
    #[error("{path}: {source}")]
    File { path: String, source: io::Error },
    /// A program that cannot be used.
    #[error("{0}")]
    Program(String),
    /// A service said no.
    #[error("{message}")]
    Refused { kind: RefusalKind, message: String },
    /// A service went away with a run.
    #[error("{0}")]
    Lost(String),
    /// A service answered what none of this version does.
    #[error("{path}: {what}")]
    Protocol { path: String, what: String },
    /// This host refuses what it should give: threads, sockets, randomness.
    #[error("this host: {0}")]
    Host(io::Error),
    /// Standard output is gone.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

impl CliError {
    fn exit(&self) -> Exit {
        match self {
            Self::File { source, .. } | Self::Key(KeyFileError::Io { source, .. })
                if is_of_the_moment(source) =>
            {
                Exit::Unavailable
            }
            Self::Usage(_) | Self::Key(_) | Self::File { .. } => Exit::Usage,
            Self::Program(_) => Exit::Rejected,
            Self::Broker(error) => match error {
                BrokerError::Configuration => Exit::Usage,
                BrokerError::Refused { kind, .. } => of_refusal(*kind),
                BrokerError::OutOfTime { .. } => Exit::Limit,
                BrokerError::Missing(_)
                | BrokerError::Short
                | BrokerError::Start(_)
                | BrokerError::StartAs { .. }
                | BrokerError::NoLink(_) => Exit::Unavailable,
                BrokerError::Lost(_)
                | BrokerError::Unsent(_)
                | BrokerError::NoAnswer(_)
                | BrokerError::Handshake(_)
                | BrokerError::Protocol(_)
                | BrokerError::Away { .. }
                | BrokerError::Cancelled => Exit::Internal,
            },
            Self::Refused { kind, .. } => of_refusal(*kind),
            Self::Lost(_) | Self::Protocol { .. } => Exit::Internal,
            Self::Host(_) => Exit::Unavailable,
            Self::Output(_) => Exit::Failed,
        }
    }
}

/// Whether the same command may do better later: the address is taken or not there, the
/// disk is full, or the host has no more of what files take. A unit
/// that is started anew on failure is not on a usage error.
fn is_of_the_moment(error: &io::Error) -> bool {
    use io::ErrorKind::{
        AddrInUse, AddrNotAvailable, OutOfMemory, QuotaExceeded, ResourceBusy, StorageFull,
    };
    matches!(
        error.kind(),
        AddrInUse | AddrNotAvailable | OutOfMemory | QuotaExceeded | ResourceBusy | StorageFull
    ) || matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// As a run ends that is refused so, whoever refused it.
fn of_refusal(kind: RefusalKind) -> Exit {
    match kind {
        RefusalKind::NoSuchTool
        | RefusalKind::BadGrant
        | RefusalKind::BadRequest
        | RefusalKind::Forbidden
        | RefusalKind::NotReviewed => Exit::Rejected,
        RefusalKind::Overloaded | RefusalKind::Away | RefusalKind::ServerAway => Exit::Refused,
        RefusalKind::OutOfTime => Exit::Limit,
        RefusalKind::Internal | RefusalKind::Journal => Exit::Internal,
    }
}

/// The variable that says what is logged.
const LOG: &str = "FORGE_LOG";
/// The variable that names the state folder.
const STATE: &str = "FORGE_STATE";

/// Signals as this command and what it starts reckon with them, whoever started it.
fn signals_as_expected() {
    // Where a file may grow no further (RLIMIT_FSIZE), a write says so and nobody is
    // ended: not the service by its log. Zygotes start with all signals as they were.
    // SAFETY: ignoring a signal needs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // Some ignore it, and so do their children then: how a process ended is known to
    // nobody.
    // SAFETY: neither does its default.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    // Who reads signals from a descriptor blocks them, and what it starts could not be
    // ended.
    // SAFETY: all zero is an empty set.
    let none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is readable, and nobody asks for the old one.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// The whole command.
pub(crate) fn main() -> ExitCode {
    signals_as_expected();
    forge_vmm::memory::goes_back();
    // Where the kernel does not know it, what is started has what everybody's children had.
    let _ = forge_vmm::jail::privileges::keep_descriptors();
    if std::env::args_os().nth(1).is_some_and(|first| first == door::COMMAND) {
        return be_door();
    }
    if std::env::var_os(STATE).is_some_and(|folder| folder.is_empty()) {
        // Empty is as good as unset, as of other variables that name folders.
        // SAFETY: this is the only thread yet.
        unsafe { std::env::remove_var(STATE) };
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(mut error) => {
            if error.use_stderr() && std::env::var_os(STATE).is_some() {
                // What a variable says would stand in the usage as if it had to be given.
                // SAFETY: this is the only thread yet.
                unsafe { std::env::remove_var(STATE) };
                error = Args::try_parse().err().unwrap_or(error);
            }
            let exit = match error.print() {
                _ if error.use_stderr() => Exit::Usage,
                Err(printed) if printed.kind() != io::ErrorKind::BrokenPipe => Exit::Failed,
                _ => Exit::Ok,
            };
            return exit.into();
        }
    };
    start_logging();
    let done = match args.command {
        Command::Run(args) => run::run(*args),
        Command::Serve(args) => serve::serve(*args),
        Command::Mcp(args) => mcp::mcp(*args),
        Command::Keygen(args) => program::keygen(&args),
        Command::Sign(args) => program::sign(&args),
        Command::Inspect(args) => program::inspect(&args),
        Command::Check(args) => program::check(args),
        Command::Tools(args) => tools::tools(args),
        Command::Grant(args) => grant::grant(args),
        Command::Journal(args) => journal::journal(&args),
        Command::Status(args) => status::status(&args),
        Command::Top(args) => top::top(&args),
        Command::Drain(args) => status::drain(&args),
        Command::Config(args) => config::check::config(&args),
        Command::Probe(args) => probe::probe(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
    };
    match done {
        Ok(code) => code,
        // Whoever watches us has seen enough.
        Err(CliError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            Exit::Ok.into()
        }
        Err(error) => {
            complain(&error);
            error.exit().into()
        }
    }
}

fn be_door() -> ExitCode {
    start_logging();
    match door::main() {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            complain(&format!("the HTTP door, which is the service's to start: {error}"));
            Exit::Internal.into()
        }
    }
}

fn start_logging() {
    use tracing_subscriber::EnvFilter;
    let text = std::env::var_os(LOG).unwrap_or_default();
    let no_level = text.to_str().and_then(forge_log::no_level);
    let asked = EnvFilter::try_from_env(LOG);
    let why = match (&asked, no_level) {
        (_, Some(word)) => {
            Some(format!("{word:?} is none of off, error, warn, info, debug, trace"))
        }
        (Err(error), None) if !text.is_empty() => Some(error.to_string()),
        _ => None,
    };
    if let Some(why) = &why {
        complain(&format!("{LOG}: {why}: the log has warnings and errors, as without it"));
    }
    let asked = asked.ok().filter(|_| why.is_none());
    let mut filter = asked.unwrap_or_else(|| EnvFilter::new("warn"));
    // The MCP library shows whole messages, programs and results among them.
    if let Ok(silence) = "rmcp=off".parse() {
        filter = filter.add_directive(silence);
    }
    let log = forge_log::stderr();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || log)
        // It says that a line cannot be written where that cannot be written either,
        // which panics: a full disk would end whichever thread logs.
        .log_internal_errors(false)
        .init();
}

/// Says what went wrong. Much of that quotes others: tool servers, programs, files.
pub(crate) fn complain(what: &dyn std::fmt::Display) {
    let what = what.to_string();
    let lines: Vec<String> = what.split('\n').map(visible).collect();
    say(&lines.join("\n"));
}

/// Says something on standard error. As a line of the log: where nobody reads that, a
/// service starts and ends all the same.
pub(crate) fn say(what: &dyn std::fmt::Display) {
    let line = format!("forge-vmm: {what}\n");
    let mut log = forge_log::stderr();
    let _ = log.write_all(line.as_bytes());
}

/// How long the end of a service's broker is waited for: it follows a call until 5 s past
/// its run's deadline, and a manager was told how long a service may take to end.
const BROKER_TIME_MAX: Duration = Duration::from_secs(25);

/// Ends the broker of a service that ends. A manager would kill it with this process, and
/// what its calls did would be unknown.
pub(crate) fn end_broker(supervisor: &Supervisor) {
    if !supervisor.end_broker(BROKER_TIME_MAX, || !server::is_to_end_at_once()) {
        tracing::warn!("the toolbroker is not at its end: it goes on alone, if it may");
    }
}

/// Says what is being done, to a person who watches.
pub(crate) fn progress(what: &str) {
    use io::IsTerminal as _;
    if io::stderr().is_terminal() {
        let _ = writeln!(io::stderr(), "… {what}");
    }
}

/// Standard output. Whoever reads it may have read enough: what is left is for
/// nobody then, and a command ends as it would have.
pub(crate) struct Out(io::StdoutLock<'static>);

/// Takes standard output, to write a result to it.
pub(crate) fn out() -> Out {
    Out(io::stdout().lock())
}

impl io::Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}

/// Writes one JSON object to standard output.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let mut out = out();
    serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    Ok(())
}

/// More than anything has that the command line names, in bytes: what is too
/// large within it is refused by whoever knows what it is.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Reads a file that the command line names.
pub(crate) fn read_file(path: &std::path::Path) -> Result<Vec<u8>, CliError> {
    let name = path.display().to_string();
    match std::fs::File::open(path) {
        Ok(file) => read_all(file, name),
        Err(source) => Err(CliError::File { path: name, source }),
    }
}

/// Reads to the end what has one.
pub(crate) fn read_all(from: impl io::Read, name: String) -> Result<Vec<u8>, CliError> {
    use io::Read as _;
    let mut bytes = Vec::new();
    match from.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes) {
        Ok(read) if read as u64 <= FILE_BYTES_MAX => Ok(bytes),
        Ok(_) => Err(CliError::Usage(format!(
            "{name}: this has more than {} MiB, and nothing that is read here has",
            FILE_BYTES_MAX >> 20
        ))),
        Err(source) => Err(CliError::File { path: name, source }),
    }
}
