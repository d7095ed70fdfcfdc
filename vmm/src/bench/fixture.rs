//! What cases are measured in: a supervisor in this process, or a service in
//! another with this process as its client.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use forge_protocol::broker::Authority;
use forge_protocol::limits::RunLimits;
use forge_protocol::service::Order;
use forge_protocol::worker::Reuse;

use super::program::{self, Program};
use super::said;
use crate::broker::{Broker, BrokerOptions};
use crate::pool::PoolOptions;
use crate::supervisor::{Supervisor, SupervisorOptions};
use forge_client::ClientError;
use forge_client::blocking::Client;

/// How long a service may take to listen.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// Whose runs the benched ones are.
pub(super) const PRINCIPAL: &str = "bench";

/// `forge-vmm`: this executable, or for a bench that only links the library
/// the one that the environment names.
pub(super) fn executable() -> PathBuf {
    std::env::var_os("FORGE_VMM").map_or_else(|| "/proc/self/exe".into(), PathBuf::from)
}

/// A folder of its own that goes with it.
pub(super) struct Folder(PathBuf);

/// On a disk, as a service's journal is: many hosts have /tmp in memory.
const ON_DISK: &str = "/var/tmp";

impl Folder {
    pub(super) fn new() -> Result<Self, String> {
        let name = crate::keys::random::<8>().map_err(said)?;
        let name = format!("forge-bench-{}", forge_protocol::hex::hex(&name));
        let create = |below: &Path| {
            let path = below.join(&name);
            std::fs::DirBuilder::new().mode(0o700).create(&path).map(|()| Self(path))
        };
        let usual = std::env::temp_dir();
        match std::env::var_os("TMPDIR") {
            Some(_) => create(&usual),
            None => create(Path::new(ON_DISK)).or_else(|_| create(&usual)),
        }
        .map_err(said)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A supervisor in this process.
pub(super) fn supervisor(
    program: &Program,
    pool: PoolOptions,
    broker: Option<Broker>,
) -> Result<Supervisor, String> {
    let options = SupervisorOptions {
        trust: program.trust.clone(),
        maxima: RunLimits::operator_maxima(),
        pool,
    };
    Supervisor::new(options, broker).map_err(said)
}

/// A broker with nothing but its built-in tools, notes among them, and the
/// folder of its journal, which has to outlive it.
pub(super) fn broker() -> Result<(Broker, Folder), String> {
    let beside = match std::env::var_os("FORGE_VMM") {
        Some(path) => Path::new(&path).parent().map(|folder| folder.join("forge-toolbroker")),
        None => None,
    };
    let folder = Folder::new()?;
    let config = folder.0.join("forge.toml");
    std::fs::write(&config, "[builtins.stash]\n").map_err(said)?;
    let options = BrokerOptions {
        executable: beside,
        config: Some(config),
        journal: Some(folder.0.join("journal")),
        ..BrokerOptions::default()
    };
    Ok((Broker::start(&options).map_err(said)?, folder))
}

/// A service in a process of its own.
pub(super) struct Served {
    child: Child,
    socket: PathBuf,
    /// What it says; read for the place of its HTTP door alone.
    said: BufReader<ChildStderr>,
    _folder: Folder,
}

impl Served {
    /// Starts one that trusts the program's signer.
    pub(super) fn start(program: &Program, pool: PoolOptions) -> Result<Self, String> {
        Self::start_with(program, pool, "")
    }

    /// The same with this in its `forge.toml`.
    pub(super) fn start_with(
        program: &Program,
        pool: PoolOptions,
        config: &str,
    ) -> Result<Self, String> {
        let folder = Folder::new()?;
        let (socket, key) = (folder.0.join("socket"), folder.0.join("signer.pub"));
        let signer = program.trust.as_slice().first().ok_or("the program has no signer")?;
        std::fs::write(&key, signer.to_pem()).map_err(said)?;
        let mut command = Command::new(executable());
        command.arg("serve").arg("--socket").arg(&socket).arg("--trust").arg(&key);
        command.arg("--state").arg(folder.0.join("state"));
        if !config.is_empty() {
            let path = folder.0.join("forge.toml");
            std::fs::write(&path, config).map_err(said)?;
            command.arg("--config").arg(path);
        }
        command.args(["--ready", &pool.ready_min.to_string()]);
        command.args(["--ready-max", &pool.ready_max.to_string()]);
        if let Reuse::Reset { prove_one_in } = pool.reuse {
            command.args(["--reuse", "reset", "--prove-one-in", &prove_one_in.to_string()]);
        }
        // SAFETY: between fork and exec, a call that only this process hears of.
        // Whoever ends the bench has it drain and end: the thread that starts it is
        // there as long as the bench is.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        // It has little to say, and a pipe takes that.
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(said)?;
        let stderr = child.stderr.take().ok_or("a process has no standard error")?;
        let said = BufReader::new(stderr);
        let mut served = Self { child, socket, said, _folder: folder };
        let until = Instant::now() + START_TIME_MAX;
        while Client::connect(&served.socket).is_err() {
            if let Ok(Some(status)) = served.child.try_wait() {
                let mut all = String::new();
                let _ = served.said.read_to_string(&mut all);
                let last = all.lines().last().unwrap_or("it said nothing");
                return Err(format!("the service ended: {status}: {last}"));
            }
            if Instant::now() > until {
                return Err("the service does not listen".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(served)
    }

    /// Its process id.
    pub(super) fn process(&self) -> i32 {
        self.child.id() as i32
    }

    /// Where it listens.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The address of its HTTP door, if it has one.
    pub(super) fn http(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.said.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            if let Some((_, place)) = line.trim().split_once("HTTP at ") {
                return Some(place.to_owned());
            }
            if line.contains("serving at") {
                return None;
            }
            line.clear();
        }
        None
    }

    /// Connects to it.
    pub(super) fn client(&self) -> Result<Client, ClientError> {
        Client::connect(&self.socket)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next run of the usual program.
pub(super) fn submission(program: &mut Program, prepare: bool) -> Order {
    let job = program.next_job();
    Order {
        program: job.program,
        input: job.input,
        principal: PRINCIPAL.into(),
        session: None,
        authority: Authority::Tools(Vec::new()),
        limits: job.load.limits,
        prepare,
        events: false,
        hosted: None,
    }
}

/// Carries out one run at a service and checks its answer; how long it took.
pub(super) fn timed_run(client: &mut Client, order: &Order) -> Result<Duration, String> {
    let started = Instant::now();
    let finished = client.run(order).map_err(said)?;
    let took = started.elapsed();
    let report: serde_json::Value = serde_json::from_slice(&finished.report).map_err(said)?;
    let expected = program::answer(&order.input);
    if report["status"] != "ok" || report["output"] != expected.as_str() {
        return Err(format!("the benched run did not answer {expected:?}: {report}"));
    }
    Ok(took)
}
