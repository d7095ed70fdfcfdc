//! The supervisor's side of the control link to the toolbroker.
//!
//! The broker is a process of its own, started here with one end of a socket
//! pair as its descriptor 0. Nobody else can reach it. For each run the
//! supervisor makes a further pair and passes one end over the control link;
//! the other end goes to the run's worker, and that connection is the run's
//! identity at the broker.
//!
//! Many threads may ask at once. Requests carry numbers, and whoever waits
//! for an answer while nobody reads the link reads it for all: an answer is
//! left for the thread whose number it has. So a slow answer (servers have to
//! start) holds up nobody else, and there is no thread that only reads.
//! Deliberately absent is starting a lost broker again, which is
//! [`crate::keeper`]'s.

use std::collections::HashMap;
use std::ffi::{CString, OsString};
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::broker::{Answer, Ask, GrantClaims, OpenRun, RefusalKind, Reply, Request};
use forge_protocol::codec::{self, BorrowDecode};
use forge_protocol::frame::{self, Assembler, Frame, Kind};
use forge_protocol::handshake::{HandshakeError, Hello, Refusal, Role};
use forge_protocol::service::HostedTools;
use forge_protocol::worker::CallRecord;

use crate::link::{self, Patience};

/// The broker's executable, looked for beside this one.
const EXECUTABLE: &str = "forge-toolbroker";
/// The broker's exit code for a configuration it cannot use.
const EXIT_CONFIGURATION: i32 = 2;
/// How long one request may take. Starting tool servers is part of it.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(60);
/// How long one may take that starts nothing and waits for no disk.
const WORD_TIME_MAX: Duration = Duration::from_secs(5);
/// How often somebody looks whether an answer is still wanted while another
/// thread reads the link.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long whoever waits for room reads before it tries again to write.
const READ_TIME_MAX: Duration = Duration::from_millis(1);
/// How long the end of an idle broker is waited for.
const CLOSE_TIME_MAX: Duration = Duration::from_millis(200);
/// What is read from the link at once, in bytes.
const READ_BYTES: usize = 16 * 1024;

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
        /// The user.
        uid: u32,
        /// The broker's executable.
        executable: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It refuses its configuration, and has said why on standard error.
    #[error("the toolbroker refuses its configuration; its message is above")]
    Configuration,
    /// The control link broke. The broker says why on its standard error.
    #[error("the toolbroker is gone ({0}); its message is above")]
    Lost(io::Error),
    /// The control link broke before all of the request was sent, so that no
    /// broker has looked at it.
    #[error("the toolbroker is gone and has not seen the request ({0}); its message is above")]
    Unsent(String),
    /// The answer took too long. The link goes on.
    #[error("the toolbroker gave no answer within {} s", .0.as_secs())]
    NoAnswer(Duration),
    /// The same, of somebody who could not wait even that long.
    #[error("the time of the run was over while the toolbroker was asked")]
    OutOfTime,
    /// Another release answers.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// What it said is not what a broker says.
    #[error("the toolbroker broke the protocol: {0}")]
    Protocol(String),
    /// It was lost, and there is no other yet.
    #[error("there is no toolbroker now")]
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
        /// Why.
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
}

/// Why the broker cannot run as the user that is asked for.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// There is no such user.
    #[error("there is no user {0:?} on this host: make one, or give a number")]
    Unknown(String),
    /// The supervisor may not change users.
    #[error("only root can start the toolbroker as another user, and this is uid {own}")]
    NotRoot {
        /// The supervisor's effective user.
        own: u32,
    },
    /// The broker is to run as root.
    #[error("the toolbroker's user must not be root: leave the key out to run it as yourself")]
    Root,
    /// The host does not say.
    #[error("this host's users cannot be looked up: {0}")]
    Host(io::Error),
}

/// The user a broker runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerUser {
    uid: u32,
    gid: u32,
    name: Option<String>,
    home: PathBuf,
}

impl BrokerUser {
    /// The user of this name.
    ///
    /// # Errors
    /// [`UserError`]; only root may run the broker as another user.
    pub fn named(name: &str) -> Result<Self, UserError> {
        may_change()?;
        let unknown = || UserError::Unknown(name.to_owned());
        let c_name = CString::new(name).map_err(|_| unknown())?;
        // SAFETY: the name is a C string, and the rest is `account`'s own.
        let account = account(|record, buffer, bytes, found| unsafe {
            libc::getpwnam_r(c_name.as_ptr(), record, buffer, bytes, found)
        })?;
        account.ok_or_else(unknown)?.not_root()
    }

    /// The user of this number, which needs no account: without one, its
    /// group has the same number and its home is `/`.
    ///
    /// # Errors
    /// [`UserError`]; only root may run the broker as another user.
    pub fn numbered(uid: u32) -> Result<Self, UserError> {
        may_change()?;
        // SAFETY: all pointers are `account`'s own.
        let account = account(|record, buffer, bytes, found| unsafe {
            libc::getpwuid_r(uid, record, buffer, bytes, found)
        })?;
        account.unwrap_or(Self { uid, gid: uid, name: None, home: "/".into() }).not_root()
    }

    /// Its number.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Has a command run as this user: with its own group, no other group, and
    /// its home.
    pub fn becomes(&self, command: &mut Command) {
        // Where a root process sets a user, the library drops all
        // supplementary groups first.
        command.gid(self.gid).uid(self.uid).env("HOME", &self.home);
        for variable in ["USER", "LOGNAME"] {
            match &self.name {
                Some(name) => command.env(variable, name),
                None => command.env_remove(variable),
            };
        }
    }

    fn not_root(self) -> Result<Self, UserError> {
        // -1 means "leave it" to the kernel.
        if [self.uid, self.gid].iter().any(|id| [0, u32::MAX].contains(id)) {
            return Err(UserError::Root);
        }
        Ok(self)
    }
}

fn may_change() -> Result<(), UserError> {
    // SAFETY: takes nothing and cannot fail.
    match unsafe { libc::geteuid() } {
        0 => Ok(()),
        own => Err(UserError::NotRoot { own }),
    }
}

/// Looks an account up with one of the C library's calls, which get their
/// memory from here.
fn account(
    mut call: impl FnMut(
        *mut libc::passwd,
        *mut libc::c_char,
        libc::size_t,
        *mut *mut libc::passwd,
    ) -> libc::c_int,
) -> Result<Option<BrokerUser>, UserError> {
    use std::ffi::{CStr, OsStr};
    use std::os::unix::ffi::OsStrExt as _;
    let mut buffer: Vec<libc::c_char> = vec![0; 4096];
    loop {
        let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut found = std::ptr::null_mut();
        match call(record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found) {
            0 if found.is_null() => return Ok(None),
            0 => {
                // SAFETY: the call succeeded and found somebody, so the record
                // is written, and its texts are C strings in `buffer`, which
                // lives on while they are copied.
                let (record, name, home) = unsafe {
                    let record = record.assume_init();
                    (record, CStr::from_ptr(record.pw_name), CStr::from_ptr(record.pw_dir))
                };
                return Ok(Some(BrokerUser {
                    uid: record.pw_uid,
                    gid: record.pw_gid,
                    name: name.to_str().ok().map(str::to_owned),
                    home: OsStr::from_bytes(home.to_bytes()).into(),
                }));
            }
            libc::ERANGE if buffer.len() < 1024 * 1024 => buffer.resize(2 * buffer.len(), 0),
            libc::EINTR => {}
            error => return Err(UserError::Host(io::Error::from_raw_os_error(error))),
        }
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
    pub user: Option<BrokerUser>,
}

/// A broker and the control link to it.
#[derive(Debug)]
pub struct Broker {
    id: u32,
    options: BrokerOptions,
    child: Mutex<Child>,
    control: UnixStream,
    outgoing: Mutex<Outgoing>,
    answers: Mutex<Answers>,
    /// Told when an answer came, the link broke, or its reader left.
    changed: Condvar,
    reader: Mutex<Reader>,
}

/// What came and was not taken yet.
#[derive(Debug, Default)]
struct Answers {
    /// By number; `None` while it is waited for.
    waited: HashMap<u64, Option<Reply>>,
    /// Whether a thread reads the link.
    reading: bool,
    /// Why no more answers come.
    broken: Option<Broken>,
}

/// How a link broke, for each of those who wait.
#[derive(Clone, Debug)]
enum Broken {
    Lost(io::ErrorKind, String),
    Protocol(String),
}

impl From<Broken> for BrokerError {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Lost(kind, text) => Self::Lost(io::Error::new(kind, text)),
            Broken::Protocol(what) => Self::Protocol(what),
        }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Lost(_, why) | Self::Protocol(why)) = self;
        f.write_str(why)
    }
}

impl Broken {
    fn lost(error: &io::Error) -> Self {
        Self::Lost(error.kind(), error.to_string())
    }
}

/// What goes out on the link, one request after the other.
#[derive(Debug, Default)]
struct Outgoing {
    /// The number of the next request.
    next: u64,
    /// What the socket has not taken yet of the one before, whoever waits for
    /// its answer, if anybody does.
    rest: Vec<u8>,
}

/// Why there is no answer.
enum Silence {
    /// Whoever asked wants none any more.
    Cancelled,
    /// It did not come in time.
    Over,
    /// It cannot come.
    Broken(BrokerError),
}

impl From<BrokerError> for Silence {
    fn from(error: BrokerError) -> Self {
        Self::Broken(error)
    }
}

/// Frames off the link. A frame that is not whole yet stays for whoever reads
/// next.
#[derive(Debug)]
struct Reader {
    assembler: Assembler,
    buffer: Box<[u8]>,
    unread: std::ops::Range<usize>,
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
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            // A terminal's interrupt is the supervisor's, which drains first.
            .process_group(0);
        if let Some(user) = &options.user {
            user.becomes(&mut command);
        }
        let child = command.spawn().map_err(|source| match &options.user {
            Some(user) => BrokerError::StartAs { uid: user.uid, executable, source },
            None => BrokerError::Start(source),
        })?;
        // Its end of the pair is the child's alone from here on.
        drop(command);
        let broker = Self {
            id: child.id(),
            options: options.clone(),
            child: Mutex::new(child),
            control: ours,
            outgoing: Mutex::default(),
            answers: Mutex::default(),
            changed: Condvar::new(),
            reader: Mutex::new(Reader {
                assembler: Assembler::default(),
                buffer: vec![0; READ_BYTES].into_boxed_slice(),
                unread: 0..0,
            }),
        };
        match broker.greet() {
            Ok(()) => Ok(broker),
            Err(BrokerError::Lost(error)) => match lock(&broker.child).wait() {
                Ok(status) if status.code() == Some(EXIT_CONFIGURATION) => {
                    Err(BrokerError::Configuration)
                }
                _ => Err(BrokerError::Lost(error)),
            },
            Err(error) => {
                // It carried nothing out yet, and nobody will wait for it.
                let mut child = lock(&broker.child);
                let _ = child.kill();
                let _ = child.wait();
                drop(child);
                Err(error)
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
        self.control.try_clone()
    }

    /// Closes the control link: nobody asks it any more.
    pub(crate) fn close(&self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
    }

    /// Whether its process has ended.
    pub(crate) fn has_ended(&self) -> bool {
        !matches!(lock(&self.child).try_wait(), Ok(None))
    }

    fn greet(&self) -> Result<(), BrokerError> {
        let ours = Hello::ours(Role::Supervisor);
        let mut bytes = Vec::new();
        frame::write_message(Kind::Hello, &ours, &mut bytes);
        (&self.control).write_all(&bytes).map_err(BrokerError::Lost)?;
        let until = Instant::now() + REQUEST_TIME_MAX;
        let greeting = lock(&self.reader).next(&self.control, Patience::until(until))?;
        match greeting.ok_or(BrokerError::NoAnswer(REQUEST_TIME_MAX))? {
            Frame { kind: Kind::Hello, payload } => {
                ours.agree(decode(&payload)?, Role::Broker)?;
                Ok(())
            }
            Frame { kind: Kind::Refuse, payload } => {
                let Refusal(theirs) = decode(&payload)?;
                Err(HandshakeError::VersionMismatch { theirs, ours }.into())
            }
            Frame { kind, .. } => {
                Err(BrokerError::Protocol(format!("a {kind:?} frame for a greeting")))
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
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::Start)?;
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
        let (ours, theirs) = UnixStream::pair().map_err(BrokerError::Start)?;
        match self.exchange(Request::Host(tools), Some(theirs), REQUEST_TIME_MAX, patience)? {
            Reply::Hosting { host } => Ok((host, ours)),
            other => Err(BrokerError::Protocol(format!("{other:?} for hosted tools"))),
        }
    }

    /// Has the broker put on the disk whatever it journalled by now. What a
    /// run's calls did is durable then, and its result may leave.
    ///
    /// # Errors
    /// [`BrokerError`]; the journal may not be there.
    pub fn sync(&self) -> Result<(), BrokerError> {
        match self.exchange(Request::Sync, None, REQUEST_TIME_MAX, Patience::default())? {
            Reply::Synced => Ok(()),
            other => Err(BrokerError::Protocol(format!("{other:?} for a journal on the disk"))),
        }
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
    pub fn metrics(&self) -> Result<String, BrokerError> {
        match self.exchange(Request::Metrics, None, WORD_TIME_MAX, Patience::default())? {
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
        let latest = Instant::now() + most;
        let until = Some(asking.until.map_or(latest, |until| until.min(latest)));
        let patience = Patience { until, ..asking };
        let silent = |error| match error {
            Silence::Cancelled => BrokerError::Cancelled,
            Silence::Over if asking.is_over() => BrokerError::OutOfTime,
            Silence::Over => BrokerError::NoAnswer(most),
            Silence::Broken(error) => error,
        };
        let can_be_withdrawn = request.can_be_withdrawn();
        let id = self.begin(request, rider, patience).map_err(silent)?;
        let reply = self.flush(patience).and_then(|()| self.wait_for(id, patience));
        if let Err(silence) = &reply {
            lock(&self.answers).waited.remove(&id);
            if can_be_withdrawn && !matches!(silence, Silence::Broken(_)) {
                self.withdraw(id).map_err(|error| silent(error.into()))?;
            }
        }
        match reply.map_err(silent)? {
            Reply::Refused { kind, message } => Err(BrokerError::Refused { kind, message }),
            reply => Ok(reply),
        }
    }

    /// Tells the broker that nobody waits for an answer any more: now, or with
    /// what goes out next. It stays small: nothing but this is added to a rest.
    fn withdraw(&self, question: u64) -> Result<(), BrokerError> {
        let mut outgoing = lock(&self.outgoing);
        let withdraw = Ask { id: outgoing.next, request: Request::Withdraw { question } };
        outgoing.next += 1;
        frame::write_message(Kind::Request, &withdraw, &mut outgoing.rest);
        self.push(&mut outgoing).map(|_| ())
    }

    /// Begins to send a request as soon as the link takes any of it; gives back
    /// the number of its answer. Nobody waits with the lock held: a request may
    /// be as large as its client likes, and the broker slow.
    ///
    /// # Errors
    /// `Unsent` if the broker cannot have seen it; that it is too large; else
    /// only that nobody waits any longer.
    fn begin(
        &self,
        request: Request,
        rider: Option<UnixStream>,
        patience: Patience<'_>,
    ) -> Result<u64, Silence> {
        let mut ask = Ask { id: 0, request };
        loop {
            if let Some(id) = self.try_begin(&mut ask, rider.as_ref())? {
                return Ok(id);
            }
            self.wait_for_room(patience)?;
        }
    }

    /// Waits until all that was begun is in the broker's socket. A frame that
    /// is not whole is never decoded; what is missing of one that nobody waits
    /// for goes out before the next.
    fn flush(&self, patience: Patience<'_>) -> Result<(), Silence> {
        while !self.push(&mut lock(&self.outgoing))? {
            self.wait_for_room(patience)?;
        }
        Ok(())
    }

    /// Puts as much of a request into the broker's socket as it takes, and
    /// keeps the rest; gives back the number of its answer, or `None` if it
    /// takes nothing now.
    fn try_begin(&self, ask: &mut Ask, rider: Option<&UnixStream>) -> Result<Option<u64>, Silence> {
        let mut outgoing = lock(&self.outgoing);
        if !self.push(&mut outgoing)? {
            return Ok(None);
        }
        let id = outgoing.next;
        ask.id = id;
        let mut bytes = Vec::new();
        // What is asked may be a client's words, of any length.
        frame::try_write_message(Kind::Request, &*ask, &mut bytes).map_err(|error| {
            BrokerError::Refused {
                kind: RefusalKind::BadRequest,
                message: format!("this is too much for one request: {error}"),
            }
        })?;
        {
            let mut answers = lock(&self.answers);
            if let Some(broken) = &answers.broken {
                return Err(BrokerError::Unsent(broken.to_string()).into());
            }
            answers.waited.insert(id, None);
        }
        match self.put(&bytes, rider.map(AsFd::as_fd))? {
            0 => {
                lock(&self.answers).waited.remove(&id);
                Ok(None)
            }
            put => {
                outgoing.next += 1;
                outgoing.rest = bytes.split_off(put);
                Ok(Some(id))
            }
        }
    }

    /// Puts out what is left of the request that was sent last: whether all of
    /// it is.
    fn push(&self, outgoing: &mut Outgoing) -> Result<bool, BrokerError> {
        while !outgoing.rest.is_empty() {
            match self.put(&outgoing.rest, None)? {
                0 => return Ok(false),
                put => drop(outgoing.rest.drain(..put)),
            }
        }
        Ok(true)
    }

    /// Puts into the broker's socket what it takes now: how many bytes.
    fn put(&self, bytes: &[u8], rider: Option<BorrowedFd<'_>>) -> Result<usize, BrokerError> {
        loop {
            match link::send_now(self.control.as_raw_fd(), bytes, rider) {
                Ok(put) => return Ok(put),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(0),
                    _ => {
                        // A request may have gone out in part: the link is of no use.
                        self.end(Broken::lost(&error));
                        return Err(BrokerError::Unsent(error.to_string()));
                    }
                },
            }
        }
    }

    /// Waits until the broker's socket may take something. Reads meanwhile, as
    /// long as nobody else does: the broker may wait for room as well, and then
    /// reads nothing before its answers are taken.
    fn wait_for_room(&self, patience: Patience<'_>) -> Result<(), Silence> {
        let wait = |events, patience| {
            link::wait(self.control.as_raw_fd(), events, patience).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::TimedOut => Silence::Over,
                    io::ErrorKind::ConnectionAborted => Silence::Cancelled,
                    _ => BrokerError::Unsent(error.to_string()).into(),
                }
            })
        };
        let mut answers = lock(&self.answers);
        if answers.reading {
            drop(answers);
            // Whoever reads may leave.
            let look = Instant::now() + LOOK_EVERY;
            let until = Some(patience.until.map_or(look, |until| until.min(look)));
            return match wait(libc::POLLOUT, Patience { until, ..patience }) {
                Err(Silence::Over) if !patience.is_over() => Ok(()),
                waited => waited,
            };
        }
        answers.reading = true;
        drop(answers);
        // One that was read along with another comes first.
        let here = self.read_answer(Patience::until(Instant::now()));
        let (waited, read) = match here {
            Ok(None) => match wait(libc::POLLIN | libc::POLLOUT, patience) {
                // There may be nothing to read.
                Ok(()) => {
                    let soon = Patience::until(Instant::now() + READ_TIME_MAX);
                    (Ok(()), self.read_answer(soon))
                }
                silence => (silence, Ok(None)),
            },
            here => (Ok(()), here),
        };
        self.deliver(&mut lock(&self.answers), read);
        waited
    }

    /// Waits for one answer, and reads the link for all while nobody else
    /// does.
    fn wait_for(&self, id: u64, patience: Patience<'_>) -> Result<Reply, Silence> {
        let mut answers = lock(&self.answers);
        loop {
            if let Some(reply) = answers.waited.get_mut(&id).and_then(Option::take) {
                answers.waited.remove(&id);
                return Ok(reply);
            }
            if let Some(broken) = &answers.broken {
                return Err(BrokerError::from(broken.clone()).into());
            }
            if patience.is_cancelled() {
                return Err(Silence::Cancelled);
            }
            if patience.is_over() {
                return Err(Silence::Over);
            }
            if answers.reading {
                // Who waits for a word of another thread's cannot look at the
                // cancel handle meanwhile, and so does now and then.
                let waited = self.changed.wait_timeout(answers, LOOK_EVERY);
                answers = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            answers.reading = true;
            drop(answers);
            let read = self.read_answer(patience);
            answers = lock(&self.answers);
            self.deliver(&mut answers, read);
        }
    }

    /// What was read is whoever's it is, and the next may read.
    fn deliver(&self, answers: &mut Answers, read: Result<Option<Answer>, Broken>) {
        answers.reading = false;
        match read {
            // One that nobody waits for any more is dropped here.
            Ok(Some(Answer { id, reply })) => {
                if let Some(place) = answers.waited.get_mut(&id) {
                    *place = Some(reply);
                }
            }
            Ok(None) => {}
            Err(broken) => {
                answers.broken = Some(broken);
                self.close();
            }
        }
        self.changed.notify_all();
    }

    /// The next answer on the link; `None` if nobody waits for it any longer.
    fn read_answer(&self, patience: Patience<'_>) -> Result<Option<Answer>, Broken> {
        let broken = |error| match error {
            BrokerError::Lost(error) => Broken::lost(&error),
            other => Broken::Protocol(match other {
                BrokerError::Protocol(what) => what,
                other => other.to_string(),
            }),
        };
        match lock(&self.reader).next(&self.control, patience).map_err(broken)? {
            None => Ok(None),
            Some(Frame { kind: Kind::Reply, payload }) => {
                decode(&payload).map(Some).map_err(broken)
            }
            Some(Frame { kind, .. }) => {
                Err(Broken::Protocol(format!("a {kind:?} frame for a reply")))
            }
        }
    }

    fn end(&self, broken: Broken) {
        lock(&self.answers).broken.get_or_insert(broken);
        self.close();
        self.changed.notify_all();
    }
}

impl Reader {
    /// The next frame; `None` if nobody waits any longer before it is whole.
    fn next(
        &mut self,
        mut link: &UnixStream,
        patience: Patience<'_>,
    ) -> Result<Option<Frame>, BrokerError> {
        loop {
            let mut input = &self.buffer[self.unread.clone()];
            let awaits = |kind: Kind| Some(kind.payload_bytes_max());
            let frame = self.assembler.next(&mut input, awaits);
            self.unread.start = self.unread.end - input.len();
            if let Some(frame) = frame.map_err(|e| BrokerError::Protocol(e.to_string()))? {
                return Ok(Some(frame));
            }
            match link::wait(link.as_raw_fd(), libc::POLLIN, patience) {
                Ok(()) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::TimedOut | io::ErrorKind::ConnectionAborted => return Ok(None),
                    _ => return Err(BrokerError::Lost(error)),
                },
            }
            match link.read(&mut self.buffer) {
                Ok(0) => return Err(BrokerError::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => self.unread = 0..bytes,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                    _ => return Err(BrokerError::Lost(error)),
                },
            }
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // The end of the control link tells the broker to finish and leave.
        // It may still follow calls that it dispatched, and it is right to:
        // it is not waited for beyond a moment, and never ended.
        self.close();
        let until = Instant::now() + CLOSE_TIME_MAX;
        let mut child = lock(&self.child);
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// What the locks guard is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn decode<T: for<'a> BorrowDecode<'a, ()>>(payload: &[u8]) -> Result<T, BrokerError> {
    codec::decode(payload).map_err(|error| BrokerError::Protocol(error.to_string()))
}
