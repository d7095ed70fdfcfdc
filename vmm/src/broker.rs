//! The supervisor's side of the control link to the toolbroker.
//!
//! The broker is a process of its own, started here with one end of a socket
//! pair as its descriptor 0. Nobody else can reach it. For each run the
//! supervisor makes a further pair and passes one end over the control link;
//! the other end goes to the run's worker, and that connection is the run's
//! identity at the broker.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forge_protocol::broker::{GrantClaims, OpenRun, RefusalKind, Reply, Request};
use forge_protocol::codec::{self, BorrowDecode};
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::handshake::{HandshakeError, Hello, Refusal, Role};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// The broker's executable, looked for beside this one.
const EXECUTABLE: &str = "forge-toolbroker";
/// The broker's exit code for a configuration it cannot use.
const EXIT_CONFIGURATION: i32 = 2;
/// How long one request may take. Starting tool servers is part of it.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the end of an idle broker is waited for.
const CLOSE_TIME_MAX: Duration = Duration::from_millis(200);

/// Why the broker gave no answer, or no good one.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Its executable is not there.
    #[error("{0} is missing: install it beside forge-vmm (cargo build builds both)")]
    Missing(PathBuf),
    /// It did not start.
    #[error("the toolbroker cannot be started: {0}")]
    Start(io::Error),
    /// It refuses its configuration, and has said why on standard error.
    #[error("the toolbroker refuses its configuration; its message is above")]
    Configuration,
    /// The control link broke. The broker says why on its standard error.
    #[error("the toolbroker is gone ({0}); its message is above")]
    Lost(io::Error),
    /// Another release answers.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// What it said is not what a broker says.
    #[error("the toolbroker broke the protocol: {0}")]
    Protocol(String),
    /// It refused the request.
    #[error("{message}")]
    Refused {
        /// Why.
        kind: RefusalKind,
        /// What happened and what to do.
        message: String,
    },
}

/// How to start a broker.
#[derive(Clone, Debug, Default)]
pub struct BrokerOptions {
    /// `mcpServers` JSON.
    pub mcp_config: Option<PathBuf>,
    /// `forge.toml`.
    pub config: Option<PathBuf>,
    /// Where the broker keeps its grant key. Without it, grants live as long
    /// as the broker.
    pub state: Option<PathBuf>,
    /// Its executable, if it is not beside this one.
    pub executable: Option<PathBuf>,
}

/// A broker and the control link to it.
#[derive(Debug)]
pub struct Broker {
    child: Child,
    control: UnixStream,
}

impl Broker {
    /// Starts a broker.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn start(options: &BrokerOptions) -> Result<Self, BrokerError> {
        let executable = match &options.executable {
            Some(path) => path.clone(),
            None => beside_this_executable().map_err(BrokerError::Start)?,
        };
        if !executable.is_file() {
            return Err(BrokerError::Missing(executable));
        }
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::Start)?;
        let mut arguments: Vec<OsString> = vec!["--control-fd".into(), "0".into()];
        for (flag, path) in [
            ("--mcp-config", &options.mcp_config),
            ("--config", &options.config),
            ("--state", &options.state),
        ] {
            if let Some(path) = path {
                arguments.extend([flag.into(), path.into()]);
            }
        }
        let child = Command::new(&executable)
            .args(arguments)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(BrokerError::Start)?;
        let mut broker = Self { child, control: ours };
        match broker.greet() {
            Ok(()) => Ok(broker),
            Err(BrokerError::Lost(error)) => match broker.child.wait() {
                Ok(status) if status.code() == Some(EXIT_CONFIGURATION) => {
                    Err(BrokerError::Configuration)
                }
                _ => Err(BrokerError::Lost(error)),
            },
            Err(error) => Err(error),
        }
    }

    /// The broker's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn greet(&mut self) -> Result<(), BrokerError> {
        let ours = Hello::ours(Role::Supervisor);
        let mut bytes = Vec::new();
        frame::write_message(Kind::Hello, &ours, &mut bytes);
        self.control.write_all(&bytes).map_err(BrokerError::Lost)?;
        let (kind, payload) = self.read_frame()?;
        match kind {
            Kind::Hello => {
                ours.agree(decode(&payload)?, Role::Broker)?;
                Ok(())
            }
            Kind::Refuse => {
                let Refusal(theirs) = decode(&payload)?;
                Err(HandshakeError::VersionMismatch { theirs, ours }.into())
            }
            kind => Err(BrokerError::Protocol(format!("a {kind:?} frame for a greeting"))),
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// [`BrokerError`]; a refusal is one.
    pub fn ask(&mut self, request: &Request) -> Result<Reply, BrokerError> {
        let mut bytes = Vec::new();
        frame::write_message(Kind::Request, request, &mut bytes);
        self.control.write_all(&bytes).map_err(BrokerError::Lost)?;
        self.read_reply()
    }

    /// Opens a run: gives back what its grant says and the connection that
    /// is the run's identity.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn open_run(&mut self, run: OpenRun) -> Result<(GrantClaims, UnixStream), BrokerError> {
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::Start)?;
        let mut bytes = Vec::new();
        frame::write_message(Kind::Request, &Request::OpenRun(run), &mut bytes);
        let sent = self
            .control
            .send_with_fd(&bytes[..], theirs.as_raw_fd())
            .map_err(|error| BrokerError::Lost(io::Error::from_raw_os_error(error.errno())))?;
        self.control.write_all(&bytes[sent..]).map_err(BrokerError::Lost)?;
        drop(theirs);
        match self.read_reply()? {
            Reply::Opened(claims) => Ok((claims, ours)),
            other => Err(BrokerError::Protocol(format!("{other:?} for an opened run"))),
        }
    }

    fn read_reply(&mut self) -> Result<Reply, BrokerError> {
        let (kind, payload) = self.read_frame()?;
        if kind != Kind::Reply {
            return Err(BrokerError::Protocol(format!("a {kind:?} frame for a reply")));
        }
        match decode(&payload)? {
            Reply::Refused { kind, message } => Err(BrokerError::Refused { kind, message }),
            reply => Ok(reply),
        }
    }

    fn read_frame(&mut self) -> Result<(Kind, Vec<u8>), BrokerError> {
        let until = Instant::now() + REQUEST_TIME_MAX;
        let mut header = [0; HEADER_BYTES];
        self.read_exact(&mut header, until)?;
        let header =
            Header::from_bytes(header).map_err(|e| BrokerError::Protocol(e.to_string()))?;
        let mut payload = vec![0; header.payload_bytes as usize];
        self.read_exact(&mut payload, until)?;
        Ok((header.kind, payload))
    }

    fn read_exact(&mut self, buffer: &mut [u8], until: Instant) -> Result<(), BrokerError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(BrokerError::Lost(io::ErrorKind::TimedOut.into()));
            }
            self.control.set_read_timeout(Some(left)).map_err(BrokerError::Lost)?;
            match self.control.read(&mut buffer[filled..]) {
                Ok(0) => return Err(BrokerError::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => filled += bytes,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                    _ => return Err(BrokerError::Lost(error)),
                },
            }
        }
        Ok(())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // The end of the control link tells the broker to finish and leave.
        // It may still follow calls that it dispatched, and it is right to:
        // it is not waited for beyond a moment, and never ended.
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let until = Instant::now() + CLOSE_TIME_MAX;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn decode<T: for<'a> BorrowDecode<'a, ()>>(payload: &[u8]) -> Result<T, BrokerError> {
    codec::decode(payload).map_err(|error| BrokerError::Protocol(error.to_string()))
}

fn beside_this_executable() -> io::Result<PathBuf> {
    let this = std::env::current_exe()?;
    Ok(this.parent().unwrap_or(Path::new("/")).join(EXECUTABLE))
}
