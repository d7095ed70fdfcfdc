//! The HTTP door as a process: `[http]` of `forge.toml`, the child that
//! `serve` starts for it, and that child's own side.
//!
//! The child is this executable again. Over its descriptor 0 it is sent the
//! socket to listen at, its one connection to the service, and what the
//! operator decided, a line of JSON; a further line replaces that. It ends
//! with either. It can open no file, reach no address, raise no privilege, and
//! may be another user. Where it ends before the service does, it is started
//! again at the same socket.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::num::NonZero;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forge_doors::http::{self, Access, Options, Principal};
use forge_doors::web::{self, TokenHash};
use forge_vmm::jail::{Limits, landlock, privileges};
use forge_vmm::service::SocketFile;
use forge_vmm::service::options::Principals;
use forge_vmm::shortage;
use forge_vmm::user::User;
use serde::Deserialize;
use tokio::sync::watch;
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::config::{self, Fault, LowUser, ServiceConfig, socket};
use super::{CliError, complain};

/// The hidden command that makes this executable a door.
pub(crate) const COMMAND: &str = "door";

/// How long a door may take to end: what it takes to close, and a little.
const END_TIME_MAX: Duration = Duration::from_secs(8);
/// How long a process may be there that has closed its end of descriptor 0:
/// the kernel closes it when the process ends, and little before it is gone.
const HUNG_UP_TIME_MAX: Duration = Duration::from_secs(1);
/// A door that lasted shorter than this is not started again at once; nor is one
/// that its service hung up on, as that is mostly about to end.
const LASTING: Duration = Duration::from_secs(1);
/// CPUs of the host for each thread of a door. It waits for others, most of
/// its time; of two threads on two CPUs each request wakes one for nothing.
const CPUS_PER_THREAD: usize = 4;
/// What a door may have open: a connection each, and a few.
const OPEN_FILES: u64 = 4096;

/// `[http]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LowHttp {
    /// `address:port`, or the path of a unix socket.
    listen: String,
    /// Who may connect to that: the socket's mode, octal.
    mode: Option<String>,
    /// Whose requests are without tokens.
    principal: Option<String>,
    /// The door's names.
    #[serde(default)]
    hosts: Vec<String>,
    /// The token that opens `/metrics`.
    metrics_token_sha256: Option<TokenHash>,
    /// Whom the door runs as.
    user: Option<LowUser>,
}

/// Where a door is to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Address(SocketAddr),
    /// With the mode of the socket's file.
    Path(PathBuf, u32),
}

/// A door that is configured.
#[derive(Debug)]
pub(crate) struct DoorConfig {
    place: Place,
    user: Option<User>,
    options: Options,
}

/// The HTTP door that a configuration asks for. There may be nobody who can use it, which is
/// how the last token is taken back from a service, and keeps none from its start.
pub(crate) fn configured(
    config: Option<&Path>,
    principals: &Principals,
) -> Result<Option<DoorConfig>, CliError> {
    let Some(path) = config else { return Ok(None) };
    let all = config::tables(&config::read_text(path)?).map_err(|fault| fault.of(path))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    asked_for(&all, folder, principals).map_err(|fault| fault.of(path))
}

fn asked_for(
    all: &toml::Table,
    folder: &Path,
    principals: &Principals,
) -> Result<Option<DoorConfig>, Fault> {
    if !all.contains_key("http") {
        return Ok(None);
    }
    config::table::<LowHttp>(all, "http")?.resolve(folder, principals).map(Some)
}

/// Everything that is wrong with `[http]`; and, if that `is_wrong`, that nobody could use
/// it, and that it is where this `[service]` is.
pub(crate) fn faults(
    all: &toml::Table,
    folder: &Path,
    service: &ServiceConfig,
    is_wrong: bool,
) -> Vec<Fault> {
    let Some(table) = all.get("http") else { return Vec::new() };
    let (mut faults, rest) = config::sifted::<LowHttp>("http", table);
    match rest.map(|low| low.resolve(folder, &service.options.principals)) {
        Some(Err(fault)) => faults.push(fault),
        Some(Ok(door)) if is_wrong => {
            let is_there = service.socket.as_deref().is_some_and(|at| door.is_at(at));
            faults.extend(is_there.then(|| Fault::at("http.listen", AT_THE_SERVICES)));
            faults.extend(door.useless());
        }
        _ => {}
    }
    faults
}

/// Why a door cannot be there.
pub(crate) const AT_THE_SERVICES: &str =
    "the service's own socket, [service] socket or --socket, is there: give another";

/// A file by its folder, however that is written.
fn settled(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(folder.canonicalize().ok()?.join(path.file_name()?))
}

impl DoorConfig {
    /// Whether it is to listen at this path.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let Place::Path(own, _) = &self.place else { return false };
        own == path || settled(own).is_some_and(|own| settled(path) == Some(own))
    }

    /// That nobody could use it, if that is so.
    fn useless(&self) -> Option<Fault> {
        let why = "nobody could use it: give principals a token_sha256, or, for everybody on this \
                   host, say http.principal";
        is_nobodys(&self.options).then(|| Fault::at("http", why))
    }
}

/// Whether a door with these options is closed to everybody.
fn is_nobodys(options: &Options) -> bool {
    matches!(&options.access, Access::Tokens(of) if of.is_empty())
}

impl LowHttp {
    fn resolve(self, folder: &Path, principals: &Principals) -> Result<DoorConfig, Fault> {
        let http = self;
        for (at, host) in http.hosts.iter().enumerate() {
            if let Some(why) = config::misnamed(host, config::Port::Refused) {
                return Err(Fault::at(format!("http.hosts.{at}"), why));
            }
        }
        if http.listen.contains("://") {
            let why = "it has a scheme: give ADDRESS:PORT, or the path of a socket with a / in it";
            return Err(Fault::at("http.listen", why));
        }
        let place = if http.listen.contains('/') {
            let path = socket::path("http.listen", folder.join(&http.listen))?;
            Place::Path(path, socket::mode("http.mode", http.mode.as_deref())?)
        } else if http.mode.is_some() {
            let why = "is of a unix socket: leave it out, or listen at one";
            return Err(Fault::at("http.mode", why));
        } else {
            let address = http.listen.parse().map_err(|_| {
                let why = "give ADDRESS:PORT, or the path of a socket with a / in it";
                Fault::at("http.listen", why)
            })?;
            Place::Address(address)
        };
        let principals: Vec<Principal> = principals
            .0
            .iter()
            .filter(|(_, principal)| !principal.token_sha256.is_empty())
            .map(|(name, principal)| Principal {
                name: name.clone(),
                tokens: principal.token_sha256.iter().copied().map(TokenHash::from).collect(),
            })
            .collect();
        if let Some(theirs) = &http.metrics_token_sha256
            && let Some(same) = principals.iter().find(|it| it.tokens.contains(theirs))
        {
            let why = format!("it is a token of {}'s: metrics speak of everybody", same.name);
            return Err(Fault::at("http.metrics_token_sha256", why));
        }
        let access = match http.principal {
            None => Access::Tokens(principals),
            Some(_) if !principals.is_empty() => {
                let why = "leave it out: principals have tokens, and a request without one is \
                           nobody's";
                return Err(Fault::at("http.principal", why));
            }
            Some(name) => match config::no_principal(&name) {
                Some(why) => return Err(Fault::at("http.principal", why)),
                None => Access::Anybody(name),
            },
        };
        if let (Access::Anybody(_), Place::Address(address)) = (&access, &place)
            && !address.ip().is_loopback()
        {
            let why = "without tokens the door listens on loopback alone: give principals a \
                       token_sha256";
            return Err(Fault::at("http.listen", why));
        }
        let user = http.user.map(|user| user.resolve()).transpose();
        let user = user.map_err(|error| Fault::at("http.user", error.to_string()))?;
        let options =
            Options { access, hosts: http.hosts, metrics_token: http.metrics_token_sha256 };
        Ok(DoorConfig { place, user, options })
    }
}

/// A socket to listen at. One with a path is removed with it.
#[derive(Debug)]
enum Listener {
    Tcp(TcpListener),
    Unix(SocketFile, UnixListener),
}

impl Listener {
    fn bind(place: &Place) -> io::Result<Self> {
        match place {
            Place::Address(address) => TcpListener::bind(address).map(Self::Tcp),
            Place::Path(path, mode) => {
                let (listener, file) = SocketFile::bind(path, *mode)?;
                Ok(Self::Unix(file, listener))
            }
        }
    }

    /// The kind of it as the child is told, and its descriptor.
    fn rider(&self) -> (u8, BorrowedFd<'_>) {
        match self {
            Self::Tcp(listener) => (b't', listener.as_fd()),
            Self::Unix(_, listener) => (b'u', listener.as_fd()),
        }
    }

    /// Whether this may be decided here. What was configured was held against
    /// the place beside it, which may be another by now.
    fn admits(&self, options: &Options) -> Result<(), CliError> {
        let is_of_this_host = match self {
            Self::Tcp(listener) => {
                listener.local_addr().is_ok_and(|address| address.ip().is_loopback())
            }
            Self::Unix(..) => true,
        };
        if is_of_this_host || matches!(options.access, Access::Tokens(_)) {
            return Ok(());
        }
        Err(CliError::Usage(format!(
            "[http] without tokens: the door listens at {} until the service is started again",
            self.place(),
        )))
    }

    fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => format!("http://{address}"),
                Err(error) => error.to_string(),
            },
            Self::Unix(file, _) => file.path().display().to_string(),
        }
    }
}

/// A door that is open as long as this lives.
#[derive(Debug)]
pub(crate) struct Door {
    shared: Arc<Shared>,
    place: String,
    keeper: Option<JoinHandle<()>>,
    ended: mpsc::Receiver<()>,
}

/// Where a service listens: its socket itself, which somebody may remove or
/// replace at its path while it listens on.
#[derive(Debug)]
struct ServiceAt {
    socket: File,
    path: PathBuf,
}

impl ServiceAt {
    /// The socket that is at this path now.
    fn of(path: &Path) -> io::Result<Self> {
        let socket = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
        Ok(Self { socket, path: path.to_owned() })
    }

    fn connect(&self) -> io::Result<UnixStream> {
        // The kernel follows this link to the socket, under whatever name or none.
        let socket = format!("/proc/self/fd/{}", self.socket.as_raw_fd());
        UnixStream::connect(socket).map_err(|error| {
            let what = format!("no connection to {}: {error}", self.path.display());
            io::Error::new(error.kind(), what)
        })
    }
}

/// What the keeper of a door and its owner share.
#[derive(Debug)]
struct Shared {
    listener: Listener,
    user: Option<User>,
    options: Mutex<Options>,
    service: ServiceAt,
    ending: AtomicBool,
    /// The process that is the door now, and our end of its descriptor 0.
    now: Mutex<Option<(Child, UnixStream)>>,
}

impl Shared {
    fn now(&self) -> MutexGuard<'_, Option<(Child, UnixStream)>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn options(&self) -> MutexGuard<'_, Options> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process and hands it what it needs.
    fn open(&self, options: &Options) -> io::Result<(Child, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg(COMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null());
        if let Some(level) = std::env::var_os("FORGE_LOG") {
            command.env("FORGE_LOG", level);
        }
        if let Some(user) = &self.user {
            user.becomes(&mut command);
        }
        let mut child = command.spawn()?;
        drop(command);
        let hand = || -> io::Result<()> {
            let (kind, listener) = self.listener.rider();
            let service = self.service.connect()?;
            for (word, descriptor) in [(kind, listener), (b's', service.as_fd())] {
                ours.send_with_fd(&[word][..], descriptor.as_raw_fd())
                    .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
            }
            (&ours).write_all(&line(options)?)
        };
        match hand() {
            Ok(()) => Ok((child, ours)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Waits a while, unless it is to end: who says so unparks this thread.
    fn rest(&self) {
        let until = Instant::now() + LASTING;
        while !self.ending.load(Ordering::Acquire)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            std::thread::park_timeout(left);
        }
    }

    /// Keeps a door open until it is to end.
    fn keep(&self, first: UnixStream) {
        let mut control = first;
        let mut since = Instant::now();
        loop {
            // It says nothing: this waits for its end.
            let _ = io::copy(&mut control, &mut io::sink());
            // Whoever tells it something, or ends it, is not kept by its end.
            let taken = self.now().take();
            let status = taken.map(|(child, _)| end_of(child));
            let hung_up = matches!(&status, Some(Ok(status)) if status.success());
            if hung_up || since.elapsed() < LASTING {
                self.rest();
            }
            if self.ending.load(Ordering::Acquire) {
                return;
            }
            if let Some(status) = status {
                let how = status.map_or_else(|error| error.to_string(), |it| it.to_string());
                tracing::warn!(how, "the HTTP door ended, and is opened again");
            }
            since = Instant::now();
            // Held until it stands where whoever changes them looks for it.
            let options = self.options();
            let opened = self.open(&options);
            match opened.and_then(|(child, ours)| Ok((child, ours.try_clone()?, ours))) {
                Ok((child, ours, for_reading)) => {
                    let mut now = self.now();
                    *now = Some((child, ours));
                    // Whoever ends it looks there after it has said so.
                    if self.ending.load(Ordering::Acquire)
                        && let Some((_, control)) = &*now
                    {
                        let _ = control.shutdown(std::net::Shutdown::Write);
                    }
                    control = for_reading;
                }
                Err(error) => tracing::error!(%error, "the HTTP door cannot be opened"),
            }
        }
    }
}

impl Door {
    /// Opens a door to the service that listens at this path, or is about to
    /// serve there.
    pub(crate) fn open(config: DoorConfig, service: &Path) -> Result<Self, CliError> {
        let DoorConfig { place, user, options } = config;
        if is_nobodys(&options) {
            complain(&"nobody can use the HTTP door: no principal has a token");
        }
        let failed = |source| {
            let path = match &place {
                Place::Address(address) => format!("http.listen: {address}"),
                Place::Path(path, _) => format!("http.listen: {}", path.display()),
            };
            CliError::File { path, source }
        };
        let listener = Listener::bind(&place).map_err(failed)?;
        let place = listener.place();
        let unopened = |source| CliError::File { path: "the HTTP door".into(), source };
        let shared = Arc::new(Shared {
            listener,
            user,
            options: Mutex::new(options),
            service: ServiceAt::of(service)
                .map_err(|source| CliError::File { path: service.display().to_string(), source })?,
            ending: AtomicBool::new(false),
            now: Mutex::default(),
        });
        let opened = shortage::outlast(|| shared.open(&shared.options()));
        let (child, ours) = opened.map_err(unopened)?;
        let for_reading = ours.try_clone().map_err(unopened)?;
        *shared.now() = Some((child, ours));
        let (end, ended) = mpsc::channel();
        let kept = Arc::clone(&shared);
        let keeper = std::thread::Builder::new().name("http-door".into()).spawn(move || {
            kept.keep(for_reading);
            let _ = end.send(());
        });
        let keeper = Some(keeper.map_err(unopened)?);
        Ok(Self { shared, place, keeper, ended })
    }

    /// What decides who may use it.
    pub(crate) fn deciding(&self) -> Deciding {
        Deciding(Arc::clone(&self.shared))
    }

    /// Where it listens, for a reader.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }
}

/// What decides who may use a door, from any thread.
#[derive(Debug)]
pub(crate) struct Deciding(Arc<Shared>);

impl Deciding {
    /// What has the operator decide this from then on. Where the door listens,
    /// and as whom, stays. Without a configuration it knows nobody: what opened
    /// it before may have been taken back with it.
    ///
    /// # Errors
    /// [`CliError::Usage`]: it would be open to everybody where it listens.
    pub(crate) fn reload(
        &self,
        config: Option<DoorConfig>,
    ) -> Result<impl FnOnce() + Send + '_, CliError> {
        let nobodys =
            Options { access: Access::Tokens(Vec::new()), hosts: Vec::new(), metrics_token: None };
        let (new, why) = match config {
            Some(config) => (config.options, "no principal has a token"),
            None => (nobodys, "there is no [http] any more"),
        };
        self.0.listener.admits(&new)?;
        if is_nobodys(&new) && !is_nobodys(&self.0.options()) {
            tracing::warn!(why, "nobody can use the HTTP door any more");
        }
        Ok(|| self.tell(new))
    }

    /// Has it go by these from now on.
    fn tell(&self, new: Options) {
        let mut options = self.0.options();
        *options = new;
        // One that is started from here on takes them from there.
        if let (Some((_, control)), Ok(line)) = (&*self.0.now(), line(&options))
            && let Err(error) = { control }.write_all(&line)
        {
            tracing::warn!(%error, "the HTTP door is not told of its new options");
        }
    }
}

impl Drop for Door {
    /// Closes it: answers that are known still go out.
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        if let Some(keeper) = &self.keeper {
            keeper.thread().unpark();
        }
        if let Some((_, control)) = &*self.shared.now() {
            let _ = control.shutdown(std::net::Shutdown::Write);
        }
        if self.ended.recv_timeout(END_TIME_MAX).is_err() {
            complain(&"the HTTP door does not end, and is killed");
            if let Some((child, _)) = &mut *self.shared.now() {
                let _ = child.kill();
            }
        }
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// Waits for a door that has hung up, and ends one that stays all the same.
fn end_of(mut child: Child) -> io::Result<ExitStatus> {
    let until = Instant::now() + HUNG_UP_TIME_MAX;
    while Instant::now() < until {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill()?;
    child.wait()
}

/// Options as they are sent.
fn line(options: &Options) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(options)?;
    line.push(b'\n');
    Ok(line)
}

/// The child's whole life.
pub(crate) fn main() -> io::Result<()> {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: ignoring a signal needs no handler. They go to the whole
        // group; the door ends with its service, whose last answers it gives.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (kind, listener) = receive(&control)?;
    let (_, service) = receive(&control)?;
    let service = UnixStream::from(service);
    let limits = Limits { open_files: OPEN_FILES, processes: u64::MAX, file_bytes: u64::MAX };
    limits.apply().map_err(io::Error::other)?;
    privileges::drop_all().map_err(io::Error::other)?;
    // Everything it needs is open.
    landlock::restrict(None).map_err(io::Error::other)?;
    let mut lines = BufReader::new(control.try_clone()?).lines();
    let first = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    let (options, watched) = watch::channel(serde_json::from_str(&first)?);
    std::thread::Builder::new().name("options".into()).spawn(move || {
        for line in lines {
            let Ok(line) = line else { return };
            match serde_json::from_str(&line) {
                Ok(changed) => {
                    options.send_replace(changed);
                }
                Err(error) => tracing::error!(%error, "options that are none"),
            }
        }
        // Dropping the sender closes the door.
    })?;
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cpus.div_ceil(CPUS_PER_THREAD))
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let listener = match kind {
            b't' => {
                let listener = TcpListener::from(listener);
                listener.set_nonblocking(true)?;
                web::Listener::Tcp(tokio::net::TcpListener::from_std(listener)?)
            }
            _ => {
                let listener = UnixListener::from(listener);
                listener.set_nonblocking(true)?;
                web::Listener::Unix(tokio::net::UnixListener::from_std(listener)?)
            }
        };
        service.set_nonblocking(true)?;
        let service = tokio::net::UnixStream::from_std(service)?;
        http::serve(listener, service, watched).await.map_err(io::Error::other)
    });
    runtime.shutdown_background();
    // The supervisor sees the end by this connection's.
    let _ = control.flush();
    served
}

/// One byte and the descriptor that rides along.
fn receive(control: &UnixStream) -> io::Result<(u8, OwnedFd)> {
    let mut byte = [0];
    let received = control.recv_with_fd(&mut byte);
    match received.map_err(|error| io::Error::from_raw_os_error(error.errno()))? {
        (1, Some(file)) => Ok((byte[0], file.into())),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no descriptor came")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn resolved(text: &str) -> Result<Option<DoorConfig>, String> {
        with(text, &Principals::default())
    }

    fn with(text: &str, principals: &Principals) -> Result<Option<DoorConfig>, String> {
        let door = |all| asked_for(&all, Path::new("/etc/forge"), principals);
        config::tables(text).and_then(door).map_err(|fault| fault.to_string())
    }

    #[test]
    fn without_a_table_there_is_no_door() {
        assert!(resolved("").unwrap().is_none());
    }

    #[test]
    fn a_door_without_tokens_is_this_hosts_alone_and_has_to_be_asked_for() {
        for (text, said) in [
            ("[http]\nlisten = '0.0.0.0:80'\nprincipal = 'local'", "loopback alone"),
            ("[http]\nlisten = '[::]:80'\nprincipal = 'local'", "loopback alone"),
        ] {
            let refused = resolved(text).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
        for listen in ["127.0.0.1:0", "[::1]:0", "./http.sock"] {
            let text = format!("[http]\nlisten = '{listen}'\nprincipal = 'local'");
            let access = resolved(&text).unwrap().unwrap().options.access;
            assert_eq!(access, Access::Anybody("local".into()));
        }
        // It is closed to everybody, which is no use and no danger.
        let closed = resolved("[http]\nlisten = '127.0.0.1:0'").unwrap().unwrap();
        assert_eq!(closed.options.access, Access::Tokens(Vec::new()));
        assert!(closed.useless().unwrap().to_string().contains("nobody could use it"));
    }

    #[test]
    fn tokens_leave_nobody_without_one() {
        use forge_vmm::service::options::Principal as Configured;
        let named = |name: &str, token_sha256: Vec<[u8; 32]>| {
            (name.to_owned(), Configured { token_sha256, ..Configured::default() })
        };
        let principals = [
            named("alice", vec![[1; 32]]),
            named("bob", vec![[2; 32], [3; 32]]),
            named("c", vec![]),
        ];
        let principals = Principals(principals.into());
        let config = with("[http]\nlisten = '0.0.0.0:80'", &principals).unwrap().unwrap();
        let Access::Tokens(known) = config.options.access else { panic!("no tokens") };
        let names: Vec<_> = known.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["alice", "bob"]);
        let text = "[http]\nlisten = '127.0.0.1:80'\nprincipal = 'local'";
        let refused = with(text, &principals).unwrap_err();
        assert!(refused.contains("http.principal"), "{refused}");
        // Nor is one token two things.
        let metrics = |hex: &str| {
            let token = hex.repeat(32);
            let text = format!("[http]\nlisten = '0.0.0.0:80'\nmetrics_token_sha256 = '{token}'");
            with(&text, &principals)
        };
        assert!(metrics("04").is_ok());
        let refused = metrics("03").unwrap_err();
        assert!(refused.contains("metrics_token_sha256: it is a token of bob's"), "{refused}");
    }

    #[test]
    fn what_is_wrong_is_named_and_its_value_is_not_shown() {
        for (text, said) in [
            ("[http]", "listen"),
            ("[http]\nlisten = 'hunter2'\nprincipal = 'a'", "http.listen"),
            (
                "[http]\nlisten = 'http://hunter2:80'\nprincipal = 'a'",
                "http.listen: it has a scheme",
            ),
            ("[http]\nlisten = '127.0.0.1:0'\nprinciple = 'a'", "unknown field"),
            ("[http]\nlisten = '127.0.0.1:0'\nmetrics_token_sha256 = 'hunter2'", "64 hex digits"),
        ] {
            let refused = resolved(text).unwrap_err();
            assert!(refused.contains(said), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }

    #[test]
    fn a_door_that_the_world_reaches_is_not_opened_to_everybody_while_it_stands() {
        let options = |access| Options { access, hosts: Vec::new(), metrics_token: None };
        let admits = |ip: [u8; 4], access| {
            let place = Place::Address(SocketAddr::from((ip, 0)));
            Listener::bind(&place).unwrap().admits(&options(access)).is_ok()
        };
        let everywhere = [0, 0, 0, 0];
        assert!(admits(everywhere, Access::Tokens(Vec::new())));
        assert!(!admits(everywhere, Access::Anybody("local".into())));
        assert!(admits([127, 0, 0, 1], Access::Anybody("local".into())));
    }

    #[test]
    fn a_door_that_hangs_up_and_stays_keeps_nobody_waiting_and_is_ended() {
        let path = std::env::temp_dir().join(format!("forge-door-{}", std::process::id()));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let for_reading = ours.try_clone().unwrap();
        let stays = Command::new("sleep").arg("60").spawn().unwrap();
        let options =
            Options { access: Access::Tokens(Vec::new()), hosts: Vec::new(), metrics_token: None };
        let shared = Shared {
            listener: Listener::bind(&Place::Path(path.clone(), socket::OWN)).unwrap(),
            user: None,
            options: Mutex::new(options),
            service: ServiceAt::of(&path).unwrap(),
            ending: AtomicBool::new(true),
            now: Mutex::new(Some((stays, ours))),
        };
        // It would be there for twice as long.
        let until = Instant::now() + Duration::from_secs(30);
        drop(theirs);
        std::thread::scope(|scope| {
            scope.spawn(|| shared.keep(for_reading));
            while shared.now().is_some() {
                std::thread::yield_now();
            }
            assert!(Instant::now() < until, "its end was waited for");
        });
        assert!(Instant::now() < until, "it was not ended");
    }

    #[test]
    fn who_may_connect_to_a_door_at_a_path_is_the_operators_to_say() {
        let place = |listen: &str, mode: &str| {
            let text = format!("[http]\nlisten = '{listen}'\nprincipal = 'a'\nmode = '{mode}'");
            resolved(&text).map(|config| config.unwrap().place)
        };
        assert_eq!(place("/s", "0660"), Ok(Place::Path("/s".into(), 0o660)));
        for (listen, mode, said) in [
            ("/s", "0777", "http.mode: must be"),
            ("127.0.0.1:0", "0660", "http.mode: is of a unix socket"),
            (&format!("/{}", "a".repeat(107)), "0660", "http.listen: its path has 108 bytes"),
        ] {
            let refused = place(listen, mode).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_path_is_relative_to_the_file_that_names_it() {
        let config = resolved("[http]\nlisten = './http.sock'\nprincipal = 'a'").unwrap().unwrap();
        assert_eq!(config.place, Place::Path("/etc/forge/./http.sock".into(), 0o600));
    }
}
