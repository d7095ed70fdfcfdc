//! The toolbroker's process. A supervisor starts it with one end of a socket
//! pair, the control link; it serves that link until it closes, lets
//! dispatched calls finish, stops its tool servers and exits.
//!
//! It distrusts its command line as far as it can be checked. Deliberately
//! absent is a socket of its own to listen on.

use std::error::Error as _;
use std::fs::DirBuilder;
use std::io::{ErrorKind, Write as _};
use std::os::fd::RawFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use forge_protocol::RunId;
use forge_toolbroker::broker::{Broker, ServeError};
use forge_toolbroker::config::{Config, ConfigError, faults};
use forge_toolbroker::grant::{Issuer, RootKeyError};
use forge_toolbroker::journal::store::RECORDS_MAX;
use forge_toolbroker::journal::{JournalError, Place, read};
use forge_toolbroker::review::{ReviewError, Reviews};
use forge_toolbroker::state::{self, StateError};
use forge_toolbroker::{link, process, stranger};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Threads that talk with tool servers.
const SERVER_THREADS: usize = 2;
/// Threads that a broker takes at least: these, the journal's, and one on each side for
/// what blocks.
const THREADS_MIN: usize = SERVER_THREADS + 3;
/// How long a thread for what blocks is kept that has nothing to do: for good. A host may
/// have no other to give by the time it is needed.
const KEPT_TIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long what blocks a thread may take on when all else has ended.
const LAST_WORK_TIME_MAX: Duration = Duration::from_secs(1);

/// The command line as it is written.
#[derive(Parser)]
#[command(
    name = "forge-toolbroker",
    version,
    about = "Holds credentials and carries tool calls out",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct LowArgs {
    /// Number of the inherited descriptor that is the control link.
    #[arg(long, value_name = "N", required = true)]
    control_fd: Option<RawFd>,
    /// Tool servers in the `mcpServers` form other programs use.
    #[arg(long, value_name = "FILE")]
    mcp_config: Option<PathBuf>,
    /// The project's own configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder for the grant root key and for the reviews of tools. Without it,
    /// both end with this process.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Do not use the folder's grant root key: grants end with this process.
    #[arg(long, requires = "state")]
    passing_grants: bool,
    /// Folder for the journal of calls.
    /// [default: journal below --state, or below forge-vmm in $XDG_STATE_HOME
    /// or ~/.local/state]
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What there is to do beside being a broker.
#[derive(Subcommand)]
enum Command {
    /// Reads the journal of calls, while brokers write it
    Journal {
        #[command(subcommand)]
        command: JournalCommand,
    },
    /// Says everything that is wrong with a configuration, as a JSON list of
    /// `file`, `field` and `problem`; starts nothing
    Check {
        /// Tool servers in the `mcpServers` form other programs use
        #[arg(long, value_name = "FILE")]
        mcp_config: Option<PathBuf>,
        /// The project's own configuration
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
enum JournalCommand {
    /// Lists calls and what became of them
    List {
        /// The journal's folder
        #[arg(long, value_name = "DIR")]
        journal: PathBuf,
        /// Only this run's, by its id in hex
        #[arg(long, value_name = "ID")]
        run: Option<RunId>,
        /// At most so many, the newest
        #[arg(long, value_name = "N", default_value = "1000")]
        last: usize,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// The command line checked, and everything it names opened.
struct HiArgs {
    control: UnixStream,
    config: Config,
    issuer: Issuer,
    reviews: Reviews,
    journal: Place,
}

/// Why the broker does not start, or ended badly.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("--control-fd: {0}")]
    Control(std::io::Error),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    State(#[from] StateError),
    #[error("{0}")]
    RootKey(#[from] RootKeyError),
    #[error("{0}")]
    Reviews(#[from] ReviewError),
    #[error("{0}")]
    Settle(#[from] stranger::SettleError),
    #[error("{0}")]
    Serve(#[from] ServeError),
    #[error("{0}")]
    Journal(#[from] JournalError),
    #[error("standard output: {0}")]
    Output(std::io::Error),
    #[error("this host: {0}")]
    Host(std::io::Error),
    #[error(
        "this host starts no {THREADS_MIN} threads for it: {0}; see `pids.max` of its control \
         group, and `ulimit -u` of its user"
    )]
    Threads(std::io::Error),
}

impl Error {
    /// As the supervisor's own: 1 for standard output, 2 for configuration, 5
    /// for the host, 70 for what should not happen.
    fn exit_code(&self) -> u8 {
        match self {
            _ if self.is_full_disk() => 5,
            Self::Control(_)
            | Self::Config(_)
            | Self::State(_)
            | Self::RootKey(_)
            | Self::Reviews(_)
            | Self::Settle(_)
            | Self::Journal(_) => 2,
            Self::Output(_) => 1,
            Self::Host(_) | Self::Threads(_) => 5,
            Self::Serve(_) => 70,
        }
    }

    /// Whether room on a disk is all that was missing.
    fn is_full_disk(&self) -> bool {
        let causes = std::iter::successors(self.source(), |&cause| cause.source());
        let mut errors = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
        errors.any(|it| matches!(it.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded))
    }
}

impl HiArgs {
    /// Needs the event loop: the control link is attached to it.
    fn check(args: LowArgs) -> Result<Self, Error> {
        let number = args.control_fd.ok_or_else(|| Error::Control(ErrorKind::NotFound.into()))?;
        let control = process::adopt(number).and_then(link::stream_of).map_err(Error::Control)?;
        let lookup = |name: &str| std::env::var(name).ok();
        let mut config = Config::load(args.mcp_config.as_deref(), args.config.as_deref(), &lookup)?;
        let check_state = || args.state.as_deref().map_or(Ok(()), state::check);
        check_state()?;
        let issuer = match &args.state {
            Some(state) if !args.passing_grants => Issuer::open(state)?,
            _ => Issuer::ephemeral(),
        };
        let reviews = Reviews::open(config.review, args.state.as_deref())?;
        let mut files = config.credential_files();
        files.append(&mut config.signing_keys);
        files.extend([&args.mcp_config, &args.config].into_iter().flatten().cloned());
        let journal = journal(args.journal, args.state.clone(), &lookup);
        let is_in_state = |folder: &Path| args.state.iter().any(|it| folder.starts_with(it));
        if let Place::Folder(folder) = &journal
            && !is_in_state(folder)
        {
            // What is not there cannot be hidden. If it cannot be made, the first record says so.
            let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
            files.push(folder.clone());
        }
        let uids = config.server_uids.clone().unwrap_or(stranger::UIDS);
        stranger::settle(config.programs(), &uids, args.state.as_deref(), &files)?;
        // Somebody may have been quicker to make it.
        check_state()?;
        Ok(Self { control, config, issuer, reviews, journal })
    }
}

/// Where the journal is. Calls are journalled even where nothing else lasts.
fn journal(
    journal: Option<PathBuf>,
    state: Option<PathBuf>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Place {
    let absolute = |variable| lookup(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = journal
        .or_else(|| state.map(|state| state.join("journal")))
        .or_else(|| absolute("XDG_STATE_HOME").map(|base| base.join("forge-vmm/journal")))
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state/forge-vmm/journal")));
    folder.map_or_else(
        || Place::Nowhere("there is no HOME to keep the journal in: give --state".into()),
        Place::Folder,
    )
}

fn main() -> ExitCode {
    if let Some(launched) = stranger::if_asked() {
        return launched;
    }
    let hardened = process::harden();
    let log = forge_log::stderr();
    tracing_subscriber::fmt()
        .with_env_filter(log_filter())
        .with_writer(move || log)
        .with_ansi(false)
        // It says that a line cannot be written where that cannot be written either,
        // which panics: a full disk would end whichever call logs.
        .log_internal_errors(false)
        .finish()
        // The MCP library logs whole messages, before credentials are scrubbed
        // from them: never, whatever is asked for.
        .with(filter_fn(|event| !event.target().starts_with("rmcp")))
        .init();
    let outcome = hardened.map_err(Error::Host).and_then(|()| {
        let args = LowArgs::parse();
        match args.command {
            Some(Command::Journal { command }) => return list_journal(command),
            Some(Command::Check { mcp_config, config }) => {
                return check(mcp_config.as_deref(), config.as_deref());
            }
            None => {}
        }
        process::try_threads(THREADS_MIN).map_err(Error::Threads)?;
        // Links have one thread: an answer that needs nobody else crosses to
        // no other, which costs more than the answer itself. Servers have
        // threads of their own, so that what they say holds up no link.
        let servers = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(SERVER_THREADS)
            .thread_name("servers")
            .thread_keep_alive(KEPT_TIME)
            .enable_all()
            .build()
            .map_err(Error::Host)?;
        let links = tokio::runtime::Builder::new_current_thread()
            .thread_keep_alive(KEPT_TIME)
            .enable_all()
            .build()
            .map_err(Error::Host)?;
        // The first of each, which is there from now on: long work that finds no thread to be
        // had waits for one of these, where without any it would be a panic.
        servers.spawn_blocking(|| ());
        links.spawn_blocking(|| ());
        let ended = links.block_on(run(args, servers.handle()));
        // A file that is being written is written. A name that is still looked
        // up has its thread for as long as libc likes.
        servers.shutdown_timeout(LAST_WORK_TIME_MAX);
        links.shutdown_timeout(LAST_WORK_TIME_MAX);
        ended
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "forge-toolbroker: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn list_journal(
    JournalCommand::List { journal, run, last, json }: JournalCommand,
) -> Result<(), Error> {
    let is_of_one_run = run.is_some();
    let (calls, mut left_out) = read::calls(&journal, run, last)?;
    if is_of_one_run && calls.is_empty() && left_out.is_empty() {
        let _ = writeln!(
            std::io::stderr(),
            "forge-toolbroker: no call of this run is recorded here: it made none, it ran with \
             another state folder, or its records left to make room (a file keeps {RECORDS_MAX})"
        );
    }
    let mut out = std::io::stdout().lock();
    let written = if json {
        let written = serde_json::to_writer_pretty(&mut out, &calls).map_err(Into::into);
        written.and_then(|()| writeln!(out))
    } else {
        read::print(&calls, &mut out)
    };
    match written.and_then(|()| out.flush()) {
        // Whoever reads us has read enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written.map_err(Error::Output)?,
    }
    // What was shown is not all: the command ends with that.
    let Some(last) = left_out.pop() else { return Ok(()) };
    for error in left_out {
        let _ = writeln!(std::io::stderr(), "forge-toolbroker: left out: {error}");
    }
    Err(last.into())
}

/// Prints what is wrong. That something is, is no error of this command.
fn check(mcp_config: Option<&Path>, config: Option<&Path>) -> Result<(), Error> {
    let faults = faults(mcp_config, config, &|name| std::env::var(name).ok());
    let told: Vec<_> = faults
        .iter()
        .map(|fault| {
            serde_json::json!({
                "file": fault.file(),
                "line": fault.line(),
                "field": fault.field(),
                "problem": fault.problem(),
            })
        })
        .collect();
    let mut out = std::io::stdout().lock();
    let written = serde_json::to_writer(&mut out, &told).map_err(Into::into);
    written.and_then(|()| writeln!(out)).map_err(Error::Output)
}

/// Whoever reads the supervisor's standard error from a pipe waits for the end of
/// all who have it, and calls that are waited for still are of no run any more.
fn leave_standard_error() {
    // Where it cannot be left, it is kept: nothing else depends on it.
    if forge_log::stderr().leave()
        && let Ok(null) = std::fs::File::options().write(true).open("/dev/null")
    {
        let _ = rustix::stdio::dup2_stderr(&null);
    }
}

/// What `FORGE_LOG` asks for, `warn` by default, and where it asks for nothing that there
/// is, as the supervisor has said.
fn log_filter() -> EnvFilter {
    let is_good = |text: &String| forge_log::no_level(text).is_none();
    let asked = std::env::var("FORGE_LOG").ok().filter(is_good);
    let asked = asked.and_then(|text| EnvFilter::try_new(text).ok());
    asked.unwrap_or_else(|| EnvFilter::new("warn"))
}

async fn run(args: LowArgs, servers: &Handle) -> Result<(), Error> {
    let mut terminated = signal(SignalKind::terminate()).map_err(Error::Host)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(Error::Host)?;
    let HiArgs { control, config, issuer, reviews, journal } = HiArgs::check(args)?;
    let broker = Arc::new(Broker::new(config, issuer, reviews, journal, servers));
    let served = tokio::select! {
        served = broker.serve(control) => served,
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
    };
    if served.is_ok() {
        leave_standard_error();
    }
    broker.shut_down().await;
    Ok(served?)
}
