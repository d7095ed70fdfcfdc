//! The toolbroker's process. A supervisor starts it with one end of a socket
//! pair, the control link; it serves that link until it closes, lets
//! dispatched calls finish, stops its tool servers and exits.
//!
//! It distrusts its command line as far as it can be checked. Deliberately
//! absent is a socket of its own to listen on.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use forge_toolbroker::broker::{Broker, ServeError};
use forge_toolbroker::config::{Config, ConfigError};
use forge_toolbroker::grant::{Issuer, RootKeyError};
use forge_toolbroker::{link, process, stranger};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Threads that talk with tool servers.
const SERVER_THREADS: usize = 2;

/// The command line as it is written.
#[derive(Parser)]
#[command(
    name = "forge-toolbroker",
    version,
    about = "Holds credentials and carries tool calls out"
)]
struct LowArgs {
    /// Number of the inherited descriptor that is the control link.
    #[arg(long, value_name = "N")]
    control_fd: RawFd,
    /// Tool servers in the `mcpServers` form other programs use.
    #[arg(long, value_name = "FILE")]
    mcp_config: Option<PathBuf>,
    /// The project's own configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder for the grant root key. Without it, grants end with this process.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// The command line checked, and everything it names opened.
struct HiArgs {
    control: UnixStream,
    config: Config,
    issuer: Issuer,
}

/// Why the broker does not start, or ended badly.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("--control-fd: {0}")]
    Control(std::io::Error),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    RootKey(#[from] RootKeyError),
    #[error("{0}")]
    Settle(#[from] stranger::SettleError),
    #[error("{0}")]
    Serve(#[from] ServeError),
    #[error("this host: {0}")]
    Host(std::io::Error),
}

impl Error {
    /// As the supervisor's own: 2 for configuration, 5 for the host, 70 for
    /// what should not happen.
    fn exit_code(&self) -> u8 {
        match self {
            Self::Control(_) | Self::Config(_) | Self::RootKey(_) | Self::Settle(_) => 2,
            Self::Host(_) => 5,
            Self::Serve(_) => 70,
        }
    }
}

impl HiArgs {
    /// Needs the event loop: the control link is attached to it.
    fn check(args: LowArgs) -> Result<Self, Error> {
        let control =
            process::adopt(args.control_fd).and_then(link::stream_of).map_err(Error::Control)?;
        let lookup = |name: &str| std::env::var(name).ok();
        let mut config = Config::load(args.mcp_config.as_deref(), args.config.as_deref(), &lookup)?;
        let issuer = match &args.state {
            Some(state) => Issuer::open(state)?,
            None => Issuer::ephemeral(),
        };
        let files: Vec<&Path> =
            [&args.mcp_config, &args.config].into_iter().flatten().map(PathBuf::as_path).collect();
        let uids = config.server_uids.clone();
        stranger::settle(&mut config.servers, &uids, args.state.as_deref(), &files)?;
        Ok(Self { control, config, issuer })
    }
}

fn main() -> ExitCode {
    if let Some(launched) = stranger::if_asked() {
        return launched;
    }
    let hardened = process::harden();
    tracing_subscriber::fmt()
        .with_env_filter(log_filter())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let outcome = hardened.map_err(Error::Host).and_then(|()| {
        let args = LowArgs::parse();
        // Links have one thread: an answer that needs nobody else crosses to
        // no other, which costs more than the answer itself. Servers have
        // threads of their own, so that what they say holds up no link.
        let servers = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(SERVER_THREADS)
            .thread_name("servers")
            .enable_all()
            .build()
            .map_err(Error::Host)?;
        let links = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(Error::Host)?;
        links.block_on(run(args, servers.handle()))
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forge-toolbroker: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// What `FORGE_LOG` asks for, `warn` by default.
fn log_filter() -> EnvFilter {
    let mut filter =
        EnvFilter::try_from_env("FORGE_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    // The MCP library logs whole messages, before credentials are scrubbed
    // from them: never, whatever is asked for.
    if let Ok(silence) = "rmcp=off".parse() {
        filter = filter.add_directive(silence);
    }
    filter
}

async fn run(args: LowArgs, servers: &Handle) -> Result<(), Error> {
    let mut terminated = signal(SignalKind::terminate()).map_err(Error::Host)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(Error::Host)?;
    let HiArgs { control, config, issuer } = HiArgs::check(args)?;
    let broker = Arc::new(Broker::new(config, issuer, servers));
    let served = tokio::select! {
        served = broker.serve(control) => served,
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
    };
    broker.shut_down().await;
    Ok(served?)
}
