//! The supervisor's side of the control link to the toolbroker.
//!
//! The broker is a process of its own, started here with one end of a socket
//! pair as its descriptor 0. Nobody else can reach it. For each run the
//! supervisor makes a further pair and passes one end over the control link;
//! the other end goes to the run's worker, and that connection is the run's
//! identity at the broker.
//!
//! What goes over the link, and how many share it, is [`control`]'s.
//! Deliberately absent is starting a lost broker again, which is
//! [`crate::keeper`]'s.

mod control;

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::broker::{
    BrokenLink, GrantClaims, HostedTools, OpenRun, RefusalKind, Reply, Request,
};
use forge_protocol::handshake::HandshakeError;
use forge_protocol::run::CallRecord;

use self::control::{Control, Silence};
use crate::link::Patience;
use crate::locks::lock;
use crate::user::User;
use crate::{memory, shortage};

/// The broker's executable, looked for beside this one.
const EXECUTABLE: &str = "forge-toolbroker";
/// The broker's exit code for a configuration it cannot use.
const EXIT_CONFIGURATION: i32 = 2;
/// And for a host that gives it too little.
const EXIT_SHORT: i32 = 5;
/// How long one request may take. Starting tool servers is part of it.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);
/// How long one may take that starts nothing and waits for no disk.
const WORD_TIME_MAX: Duration = Duration::from_secs(5);
/// How long the end of an idle broker is waited for.
const CLOSE_TIME_MAX: Duration = Duration::from_millis(200);
/// How long a broker that closes its link before it has said a word may take to end. What
/// it ends with says why it cannot serve.
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Why the broker gave no answer, or no good one.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// Its executable is not there.
    #[error("{0} is missing: install it beside forge-vmm (cargo build builds both)")]
    Missing(PathBuf),
    /// It did not start.
    #[error("the toolbroker cannot be started: {0}")]
    Start(io::Error),
    /// It did not start as another user.
    #[error(
        "the toolbroker cannot be started as uid {uid}: {source} (may that user run {}?)",
        executable.display()
    )]
    StartAs {
        /// The user that it was to run as.
        uid: u32,
        /// The broker's executable.
        executable: PathBuf,
        /// Why it did not start.
        source: io::Error,
    },
    /// There is no socket for a run's calls.
    #[error("no connection to the toolbroker can be made: {0}")]
    NoLink(io::Error),
    /// It refuses its configuration, and has said why on standard error.
    #[error("the toolbroker refuses its configuration: it said why on standard error")]
    Configuration,
    /// This host gives it too little to start, and it has said what on standard error.
    #[error("this host gives the toolbroker too little to start: it said what on standard error")]
    Short,
    /// The control link broke. The broker says why on its standard error.
    #[error("the toolbroker is gone ({0})")]
    Lost(io::Error),
    /// The control link broke before all of the request was sent, so that no
    /// broker has looked at it.
    #[error("the toolbroker was gone before this could be asked ({0})")]
    Unsent(String),
    /// The answer took too long. The link goes on.
    #[error("the toolbroker gave no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
    /// The same, of somebody who could not wait even that long.
    #[error("the time of the run was over while the toolbroker was asked")]
    OutOfTime {
        /// Whether it was asked, and comes to it when it can.
        asked: bool,
    },
    /// Another release answers.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// What it said is not what a broker says.
    #[error("the toolbroker broke the protocol: {0}")]
    Protocol(String),
    /// It was lost, and there is no other yet.
    #[error("there is no toolbroker now: it is started again, ask in {retry_after_ms} ms")]
    Away {
        /// Why not, for the operator: it may name files of this host.
        reason: String,
        /// When the next is started, in milliseconds from now.
        retry_after_ms: u64,
    },
    /// Whoever asked wants no answer any more.
    #[error("cancelled while the toolbroker was asked")]
    Cancelled,
    /// It refused the request.
    #[error("{message}")]
    Refused {
        /// The kind of refusal.
        kind: RefusalKind,
        /// What happened and what to do.
        message: String,
    },
}

impl BrokerError {
    /// Whether the control link is of no further use.
    pub(crate) fn ends_the_link(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Unsent(_) | Self::Protocol(_))
    }

    /// Whether the broker did not answer what it answers at once, however much it
    /// has to do: it was stopped, or hangs.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Self::NoAnswer(time) if *time <= WORD_TIME_MAX)
    }
}

/// How to start a broker.
#[derive(Clone, Debug, Default)]
pub struct BrokerOptions {
    /// `mcpServers` JSON.
    pub mcp_config: Option<PathBuf>,
    /// `forge.toml`.
    pub config: Option<PathBuf>,
    /// Where the broker keeps its grant key and its reviews of tools. Without
    /// it, both live as long as the broker.
    pub state: Option<PathBuf>,
    /// Grants live as long as the broker, whatever key is kept there.
    pub passing_grants: bool,
    /// The folder of its journal, if it is not the one below `state`; without
    /// either, the one below its user's own state folder.
    pub journal: Option<PathBuf>,
    /// Its executable, if it is not beside this one.
    pub executable: Option<PathBuf>,
    /// Whom it runs as, if not as this process's user: with this user's own
    /// group, no other group, and its home.
    pub user: Option<User>,
}

/// A broker and the control link to it.
#[derive(Debug)]
pub struct Broker {
    id: u32,
    options: BrokerOptions,
    child: Mutex<Child>,
    control: Control,
    /// Why its journal takes no records, as far as it was asked.
    unrecorded: Mutex<Option<String>>,
}

impl Broker {
    /// Starts a broker.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn start(options: &BrokerOptions) -> Result<Self, BrokerError> {
        let executable = match &options.executable {
            Some(path) => path.clone(),
            None => Self::executable().map_err(BrokerError::Start)?,
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
            ("--journal", &options.journal),
        ] {
            if let Some(path) = path {
                arguments.extend([flag.into(), path.into()]);
            }
        }
        if options.passing_grants && options.state.is_some() {
            arguments.push("--passing-grants".into());
        }
        let mut command = Command::new(&executable);
        command
            .args(arguments)
            .envs(memory::environment())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            // A terminal's interrupt is the supervisor's, which drains first.
            .process_group(0);
        if let Some(user) = &options.user {
            user.becomes(&mut command);
        }
        let child =
            shortage::outlast(|| command.spawn()).map_err(|source| match &options.user {
                Some(user) => BrokerError::StartAs { uid: user.uid(), executable, source },
                None => BrokerError::Start(source),
            })?;
        // Its end of the pair is the child's alone from here on.
        drop(command);
        let broker = Self {
            id: child.id(),
            options: options.clone(),
            child: Mutex::new(child),
            control: Control::new(ours),
            unrecorded: Mutex::default(),
        };
        let patience = Patience::until(Instant::now() + REQUEST_TIME_MAX);
        let greeted = broker.control.greet(patience);
        match greeted.and_then(|it| it.ok_or(BrokerError::NoAnswer(REQUEST_TIME_MAX))) {
            Ok(()) => Ok(broker),
            Err(error) => {
                let status = match error {
                    BrokerError::Lost(_) => broker.ended_within(END_TIME_MAX).ok().flatten(),
                    _ => None,
                };
                // It carried nothing out yet, and nobody will wait for it.
                let mut child = lock(&broker.child);
                let _ = child.kill();
                let _ = child.wait();
                drop(child);
                Err(match status.and_then(|it| it.code()) {
                    Some(EXIT_CONFIGURATION) => BrokerError::Configuration,
                    Some(EXIT_SHORT) => BrokerError::Short,
                    _ => error,
                })
            }
        }
    }

    /// The broker's executable, beside this one.
    ///
    /// # Errors
    /// If this process cannot find its own.
    pub fn executable() -> io::Result<PathBuf> {
        let this = std::env::current_exe()?;
        Ok(this.parent().unwrap_or(Path::new("/")).join(EXECUTABLE))
    }

    /// The broker's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How it was started.
    pub(crate) fn options(&self) -> &BrokerOptions {
        &self.options
    }

    /// The control link, for who watches whether it hangs up.
    pub(crate) fn link(&self) -> io::Result<UnixStream> {
        self.control.watched()
    }

    /// Closes the control link: nobody asks it any more.
    pub(crate) fn close(&self) {
        self.control.close();
    }

    /// Whether its process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(lock(&self.child).try_wait(), Ok(None))
    }

    /// How its process ended, for a reader, where it has or is about to: its link
    /// closes a little before.
    pub(crate) fn how_it_ended(&self) -> String {
        match self.ended_within(CLOSE_TIME_MAX) {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "it runs yet, but closed its link".into(),
            Err(error) => format!("the kernel does not say: {error}"),
        }
    }

    /// How its process, which closed its link, ended; `None` where it goes on.
    fn ended_within(&self, time: Duration) -> io::Result<Option<ExitStatus>> {
        let until = Instant::now() + time;
        let mut child = lock(&self.child);
        loop {
            match child.try_wait()? {
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                status => return Ok(status),
            }
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// [`BrokerError`]; a refusal is one.
    pub fn ask(&self, request: &Request) -> Result<Reply, BrokerError> {
        self.ask_for(request, Patience::default())
    }

    /// The same for somebody whose patience may end before.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn ask_for(&self, request: &Request, patience: Patience<'_>) -> Result<Reply, BrokerError> {
        self.exchange(request.clone(), None, REQUEST_TIME_MAX, patience)
    }

    /// Opens a run: gives back what its grant says and the connection that
    /// is the run's identity.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn open_run(&self, run: OpenRun) -> Result<(GrantClaims, UnixStream), BrokerError> {
        self.open_run_for(run, None, Patience::default())
    }

    /// The same, with tools that a caller hosts if there are any, for somebody
    /// whose patience ends. The run may be opened all the same then, and ends
    /// with its connection.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn open_run_for(
        &self,
        run: OpenRun,
        host: Option<u64>,
        patience: Patience<'_>,
    ) -> Result<(GrantClaims, UnixStream), BrokerError> {
        let request = match host {
            None => Request::OpenRun(run),
            Some(host) => Request::OpenHostedRun { run, host },
        };
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::NoLink)?;
        match self.exchange(request, Some(theirs), REQUEST_TIME_MAX, patience)? {
            Reply::Opened(claims) => Ok((claims, ours)),
            other => Err(BrokerError::Protocol(format!("{other:?} for an opened run"))),
        }
    }

    /// Registers tools that a caller hosts for one run: gives back what the run
    /// is opened with, and the connection on which its calls come.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn host(
        &self,
        tools: HostedTools,
        patience: Patience<'_>,
    ) -> Result<(u64, UnixStream), BrokerError> {
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::NoLink)?;
        match self.exchange(Request::Host(tools), Some(theirs), REQUEST_TIME_MAX, patience)? {
            Reply::Hosting { host } => Ok((host, ours)),
            other => Err(BrokerError::Protocol(format!("{other:?} for hosted tools"))),
        }
    }

    /// Has the broker put on the disk whatever it journalled by now.
    ///
    /// # Errors
    /// [`BrokerError`]; the journal may not be there.
    pub fn sync(&self) -> Result<(), BrokerError> {
        self.sync_for(Patience::default())
    }

    /// The same for somebody whose patience may end before.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn sync_for(&self, patience: Patience<'_>) -> Result<(), BrokerError> {
        match self.recorded(Request::Sync, patience)? {
            Reply::Synced => {
                *lock(&self.unrecorded) = None;
                Ok(())
            }
            other => Err(BrokerError::Protocol(format!("{other:?} for a journal on the disk"))),
        }
    }

    /// Says that a run has reported whose link is still open, and whether its program went
    /// to its end. What its calls did is durable then, and its result may leave; unless its
    /// worker broke the link.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub(crate) fn end_run(
        &self,
        run_id: RunId,
        is_whole: bool,
        patience: Patience<'_>,
    ) -> Result<Option<BrokenLink>, BrokerError> {
        match self.recorded(Request::EndRun { run_id, is_whole }, patience)? {
            Reply::RunEnded { broken } => {
                if broken.is_none() {
                    *lock(&self.unrecorded) = None;
                }
                Ok(broken)
            }
            other => Err(BrokerError::Protocol(format!("{other:?} for a run that ended"))),
        }
    }

    /// Asks what is answered when the journal is on the disk, and remembers if it is not.
    fn recorded(&self, request: Request, patience: Patience<'_>) -> Result<Reply, BrokerError> {
        let answer = self.exchange(request, None, REQUEST_TIME_MAX, patience);
        if let Err(BrokerError::Refused { kind: RefusalKind::Journal, message }) = &answer {
            *lock(&self.unrecorded) = Some(message.clone());
        }
        answer
    }

    /// Why its journal takes no records, if it took none when it was last asked.
    pub(crate) fn unrecorded(&self) -> Option<String> {
        lock(&self.unrecorded).clone()
    }

    /// Says that nobody wants a run any more whose link is still open: what it
    /// has dispatched is waited for no longer, and its tools are told. Gives
    /// back its calls until then.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn cancel_run(&self, run_id: RunId) -> Result<Vec<CallRecord>, BrokerError> {
        let request = Request::CancelRun { run_id };
        match self.exchange(request, None, WORD_TIME_MAX, Patience::default())? {
            Reply::Cancelled { calls } => Ok(calls),
            other => Err(BrokerError::Protocol(format!("{other:?} for a cancelled run"))),
        }
    }

    /// What the broker counts, in Prometheus' text exposition format.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn metrics(&self, patience: Patience<'_>) -> Result<String, BrokerError> {
        match self.exchange(Request::Metrics, None, WORD_TIME_MAX, patience)? {
            Reply::Metrics(text) => Ok(text),
            other => Err(BrokerError::Protocol(format!("{other:?} for metrics"))),
        }
    }

    /// Asks, and waits for the answer for at most so long, and no longer than
    /// whoever asks has patience.
    fn exchange(
        &self,
        request: Request,
        rider: Option<UnixStream>,
        most: Duration,
        asking: Patience<'_>,
    ) -> Result<Reply, BrokerError> {
        let patience = asking.no_later_than(Instant::now() + most);
        let silent = |error| match error {
            Silence::Cancelled => BrokerError::Cancelled,
            Silence::Over if asking.is_over() => BrokerError::OutOfTime { asked: true },
            Silence::Unasked if asking.is_over() => BrokerError::OutOfTime { asked: false },
            Silence::Over | Silence::Unasked => BrokerError::NoAnswer(most),
            Silence::Broken(error) => error,
        };
        match self.control.ask(request, rider, patience).map_err(silent)? {
            Reply::Refused { kind, message } => Err(BrokerError::Refused { kind, message }),
            reply => Ok(reply),
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // The end of the control link tells the broker to finish and leave.
        // It may still follow calls that it dispatched, and it is right to:
        // it is not waited for beyond a moment, and never ended.
        self.close();
        let _ = self.ended_within(CLOSE_TIME_MAX);
    }
}
