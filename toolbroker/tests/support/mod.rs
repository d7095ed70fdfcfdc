//! A supervisor and its workers as the tests play them: the real broker
//! process on a real socket pair, with blocking reads and a time limit.

#![allow(dead_code)]

#[path = "../../../vmm/tests/support/built.rs"]
mod built;
pub mod secure;
pub mod web;

use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Answer, Ask, Authority, Callable, GrantClaims, GrantRequest, OpenRun, RefusalKind, Reply,
    Request, ToolSpec,
};
use forge_protocol::codec::{Encode, decode};
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use rustix::io::FdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

/// Nothing here takes longer unless something is broken.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The credential that must be seen nowhere.
pub const CANARY: &str = "canary-7f3a9c51-credential";

/// The broker process and its control link.
pub struct Broker {
    pub control: UnixStream,
    pub child: Child,
    /// Everything it wrote to standard error, once it ended.
    log: PathBuf,
    folder: Arc<tempfile::TempDir>,
}

/// What a test server of a broker wrote down. Outlives the broker.
pub struct TestServer {
    pub log: PathBuf,
    _folder: Arc<tempfile::TempDir>,
}

/// One run link, seen by the worker.
pub struct Worker {
    pub link: UnixStream,
    next_call: u32,
}

/// The test server's binary.
pub fn test_server() -> PathBuf {
    workspace_binary("forge-test-server")
}

/// The example server's binary.
pub fn inventory_server() -> PathBuf {
    workspace_binary("inventory-server")
}

fn workspace_binary(package: &str) -> PathBuf {
    static BUILT: Once = Once::new();
    let folder = Path::new(env!("CARGO_BIN_EXE_forge-toolbroker")).parent().unwrap();
    BUILT.call_once(|| built::built(folder, &["forge-test-server", "inventory-server"]));
    folder.join(package)
}

impl Broker {
    /// The most memory that its process ever had, in MiB.
    pub fn peak_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() / 1024
    }

    /// A broker with one test server `test` that holds the canary.
    pub fn with_test_server() -> (Self, TestServer) {
        Self::with_server_args(&[])
    }

    pub fn with_server_args(args: &[&str]) -> (Self, TestServer) {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("calls");
        // What a command line names, its server may write: if it is there.
        std::fs::write(&log, "").unwrap();
        let mut all: Vec<&str> = vec!["--log", log.to_str().unwrap()];
        all.extend(args);
        let config = json!({"mcpServers": {"test": {
            "command": test_server(), "args": all, "env": {"TEST_TOKEN": "${CANARY}"},
        }}});
        let broker = Self::start_in(folder, &config, &[]);
        let folder = Arc::clone(&broker.folder);
        (broker, TestServer { log, _folder: folder })
    }

    /// A broker with this `mcp.json`.
    pub fn with_config(config: &Value) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), config, &[])
    }

    pub fn start_in(folder: tempfile::TempDir, config: &Value, args: &[&str]) -> Self {
        let file = folder.path().join("mcp.json");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut all = vec!["--mcp-config", file.to_str().unwrap()];
        all.extend(args);
        let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
        let mut broker = Self::spawn(folder, &all);
        broker.say_hello();
        broker
    }

    /// A broker without any configuration file.
    pub fn unconfigured() -> Self {
        let mut broker = Self::spawn(tempfile::tempdir().unwrap(), &[]);
        broker.say_hello();
        broker
    }

    /// A broker with this `forge.toml`.
    pub fn with_forge_toml(text: &str) -> Self {
        Self::with_forge_toml_and(text, &[])
    }

    /// The same, with more in its environment.
    pub fn with_forge_toml_and(text: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forge.toml");
        std::fs::write(&file, text).unwrap();
        let args = ["--config".to_owned(), file.to_str().unwrap().to_owned()];
        let mut broker = Self::spawn_with(folder, &args, "trace", environment);
        broker.say_hello();
        broker
    }

    /// The process, before anybody said `Hello`.
    pub fn spawn(folder: tempfile::TempDir, args: &[String]) -> Self {
        Self::spawn_logging(folder, args, "trace")
    }

    /// As [`Broker::spawn`], logging at this level.
    pub fn spawn_logging(folder: tempfile::TempDir, args: &[String], level: &str) -> Self {
        Self::spawn_with(folder, args, level, &[])
    }

    fn spawn_with(
        folder: tempfile::TempDir,
        args: &[String],
        level: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let (control, theirs) = UnixStream::pair().unwrap();
        control.set_read_timeout(Some(PATIENCE)).unwrap();
        // Inherited by the broker alone: the flag is cleared here and the
        // descriptor closed as soon as the process is there. Others that are
        // started meanwhile must not get it, so starting takes turns.
        static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        rustix::io::fcntl_setfd(&theirs, FdFlags::empty()).unwrap();
        let log = folder.path().join("broker.log");
        // No test writes into the journal of whoever runs it.
        let names_one = args.iter().any(|arg| arg == "--journal");
        let journal = (!names_one).then(|| ["--journal".into(), folder.path().join("journal")]);
        let child = Command::new(env!("CARGO_BIN_EXE_forge-toolbroker"))
            .args(["--control-fd", &theirs.as_raw_fd().to_string()])
            .args(journal.iter().flatten())
            .args(args)
            .env("FORGE_LOG", level)
            .env("CANARY", CANARY)
            .env("INVENTORY_TOKEN", "demo-inventory-token")
            .env("NOT_FOR_SERVERS", "broker-only-value")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        drop(theirs);
        drop(turn);
        Self { control, child, log, folder: Arc::new(folder) }
    }

    pub fn say_hello(&mut self) {
        send(&mut self.control, Kind::Hello, &Hello::ours(Role::Supervisor));
        let (kind, payload) = receive(&mut self.control).expect("the broker's hello");
        assert_eq!(kind, Kind::Hello);
        let theirs: Hello = decode(&payload).unwrap();
        Hello::ours(Role::Supervisor).agree(theirs, Role::Broker).unwrap();
    }

    pub fn ask(&mut self, request: &Request) -> Reply {
        self.send(request, 7);
        self.reply()
    }

    /// Sends a request of this number and does not wait.
    pub fn send(&mut self, request: &Request, id: u64) {
        send(&mut self.control, Kind::Request, &Ask { id, request: request.clone() });
    }

    /// The reply to the one request that was asked.
    pub fn reply(&mut self) -> Reply {
        let Answer { id, reply } = self.answer();
        assert_eq!(id, 7);
        reply
    }

    /// The next answer.
    pub fn answer(&mut self) -> Answer {
        let (kind, payload) = receive(&mut self.control).expect("a reply");
        assert_eq!(kind, Kind::Reply);
        decode(&payload).unwrap()
    }

    pub fn tools(&mut self) -> Vec<ToolSpec> {
        match self.ask(&Request::ListTools { principal: "alice".into() }) {
            Reply::Tools { tools, unavailable } => {
                assert_eq!(unavailable, []);
                tools.into_iter().map(|tool| tool.spec).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    /// Opens a run; one end of a socket pair rides with the first byte.
    pub fn open(
        &mut self,
        request: OpenRun,
    ) -> Result<(Worker, GrantClaims), (RefusalKind, String)> {
        let (link, theirs) = UnixStream::pair().unwrap();
        link.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut frames = Vec::new();
        let ask = Ask { id: 7, request: Request::OpenRun(request) };
        frame::write_message(Kind::Request, &ask, &mut frames);
        send_with(&self.control, &frames, theirs.into());
        match self.reply() {
            Reply::Opened(claims) => Ok((Worker { link, next_call: 0 }, claims)),
            Reply::Refused { kind, message } => Err((kind, message)),
            other => panic!("{other:?}"),
        }
    }

    /// Opens a run of `alice`'s for these tools.
    pub fn run(&mut self, tools: &[&str], limits: RunLimits) -> Worker {
        let tools = tools.iter().map(|tool| name(tool)).collect();
        self.open(run_request("alice", Authority::Tools(tools), limits)).unwrap().0
    }

    /// The end of its log.
    fn last_said(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(100)..].join("\n")
    }

    /// Closes the control link and waits for the process to end.
    pub fn finish(mut self) -> (ExitStatus, String) {
        self.control.shutdown(std::net::Shutdown::Both).unwrap();
        let status = wait(&mut self.child);
        (status, std::fs::read_to_string(&self.log).unwrap())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        let until = Instant::now() + Duration::from_secs(10);
        let ended = loop {
            if !matches!(self.child.try_wait(), Ok(None)) {
                break true;
            }
            if Instant::now() >= until {
                break false;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        if !ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("what the broker said:\n{}", self.last_said());
        }
    }
}

impl TestServer {
    /// The tools that were called, in order of arrival.
    pub fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits until this line is in the log.
    pub fn wait_for(&self, line: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.calls().iter().any(|call| call == line) {
            assert!(Instant::now() < until, "{line:?} never came, only {:?}", self.calls());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Worker {
    /// Sends a call; returns its number.
    pub fn send(&mut self, tool: &str, request: &[u8]) -> u32 {
        let id = self.next_call;
        self.next_call += 1;
        let call = Call { id, waits: true, tool: name(tool), request: request.to_vec() };
        send(&mut self.link, Kind::Call, &call);
        id
    }

    /// The next answer.
    pub fn settled(&mut self) -> Settled {
        let (kind, payload) = receive(&mut self.link).expect("an answer");
        assert_eq!(kind, Kind::Settled);
        decode(&payload).unwrap()
    }

    /// Calls and waits.
    pub fn call(&mut self, tool: &str, request: &Value) -> (Option<CallCode>, Value) {
        let id = self.send(tool, request.to_string().as_bytes());
        let settled = self.settled();
        assert_eq!(settled.id, id);
        assert!(settled.duration_ns > 0);
        (settled.code, serde_json::from_slice(&settled.body).unwrap_or(Value::Null))
    }

    /// Whether the broker closed the link.
    pub fn is_closed(&mut self) -> bool {
        receive(&mut self.link).is_none()
    }
}

/// The processes that a broker's launchers started servers as, and all that
/// these started: not the launchers.
pub fn server_processes(broker: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut parents = vec![broker];
    while let Some(parent) = parents.pop() {
        let tasks = std::fs::read_dir(format!("/proc/{parent}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(task.path().join("children"));
            for child in children.unwrap_or_default().split_whitespace() {
                let Ok(child) = child.parse() else { continue };
                parents.push(child);
                let line = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
                if !line.windows(15).any(|window| window == b"--launch-server") {
                    found.push(child);
                }
            }
        }
    }
    found
}

pub fn name(tool: &str) -> ToolName {
    ToolName::parse(tool).unwrap()
}

/// A request for a grant of `alice`'s for these tools and nothing else.
pub fn grant_request(tools: &[&str]) -> GrantRequest {
    GrantRequest {
        principal: "alice".into(),
        tools: tools.iter().map(|tool| name(tool)).collect(),
        constraints: Vec::new(),
        valid_s: 600,
        calls_max: None,
        cost_max: None,
        session: None,
    }
}

pub fn run_request(principal: &str, authority: Authority, limits: RunLimits) -> OpenRun {
    OpenRun {
        run_id: RunId([0xAB; 16]),
        principal: principal.into(),
        session: None,
        program_sha256: [0; 32],
        authority,
        callable: Callable::Any,
        limits,
    }
}

pub fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < until, "the broker does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn send<T: Encode>(link: &mut UnixStream, kind: Kind, message: &T) {
    let mut frames = Vec::new();
    frame::write_message(kind, message, &mut frames);
    link.write_all(&frames).unwrap();
}

/// Sends bytes with a descriptor on the first of them.
pub fn send_with(link: &UnixStream, bytes: &[u8], descriptor: OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let riders = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&riders)));
    let sent = rustix::net::sendmsg(link, &[IoSlice::new(bytes)], &mut control, SendFlags::empty())
        .unwrap();
    let mut link = link;
    link.write_all(&bytes[sent..]).unwrap();
}

/// The next frame; `None` if the peer closed, in whatever way.
pub fn receive(link: &mut UnixStream) -> Option<(Kind, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    match link.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            panic!("nothing came within {PATIENCE:?}")
        }
        Err(_) => return None,
    }
    let Header { kind, payload_bytes } = Header::from_bytes(header).unwrap();
    let mut payload = vec![0; payload_bytes as usize];
    link.read_exact(&mut payload).unwrap();
    Some((kind, payload))
}
