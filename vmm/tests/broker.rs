//! The supervisor's side of the control link, against the real toolbroker: many
//! threads at once, and a broker that runs as another user.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/executables.rs"]
mod executables;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use executables::FORGE;
use forge_protocol::RunId;
use forge_protocol::broker::{
    Authority, Callable, GrantRequest, OpenRun, RefusalKind, Reply, Request,
};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_vmm::broker::{Broker, BrokerError, BrokerOptions};
use forge_vmm::user::{User, UserError};
use libtest_mimic::{Arguments, Trial};

/// A user without an account.
const STRANGER: u32 = 64_123;

fn main() -> ExitCode {
    let anyone: [(&str, fn()); 5] = [
        ("every_thread_gets_its_own_answer", every_thread_gets_its_own_answer),
        ("a_slow_listing_holds_up_no_run", a_slow_listing_holds_up_no_run),
        ("a_lost_broker_is_told_to_all_who_wait", a_lost_broker_is_told_to_all_who_wait),
        ("built_ins_need_no_configuration", built_ins_need_no_configuration),
        ("a_principal_without_tools_is_told_why", a_principal_without_tools_is_told_why),
    ];
    let root: [(&str, fn()); 4] = [
        (
            "a_broker_runs_as_another_user_without_groups",
            a_broker_runs_as_another_user_without_groups,
        ),
        ("forge_toml_names_the_brokers_user", forge_toml_names_the_brokers_user),
        (
            "a_broker_user_that_can_keep_no_journal_is_told_so_before_anything_runs",
            a_broker_user_that_can_keep_no_journal_is_told_so_before_anything_runs,
        ),
        ("a_broker_user_that_cannot_be_is_refused", a_broker_user_that_cannot_be_is_refused),
    ];
    let arguments = Arguments::from_args();
    // SAFETY: takes nothing and cannot fail.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root && !arguments.list {
        eprintln!("SKIPPED: {} tests of the broker's user need root", root.len());
    }
    let trial = |(name, test): &(&'static str, fn()), ignored| {
        let test = *test;
        Trial::test(*name, move || {
            test();
            Ok(())
        })
        .with_ignored_flag(ignored)
    };
    let anyone = anyone.iter().map(|test| trial(test, false));
    let root = root.iter().map(|test| trial(test, !is_root));
    libtest_mimic::run(&arguments, anyone.chain(root).collect()).exit_code()
}

/// A folder that everybody can enter, gone after the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("forge-broker-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Both programs, where any user may run them.
    fn install(&self) -> PathBuf {
        for program in [Path::new(FORGE), &executables::folder().join("forge-toolbroker")] {
            let copy = self.0.join(program.file_name().unwrap());
            fs::copy(program, &copy).unwrap();
            fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        }
        self.0.join("forge-vmm")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The journal of whoever runs the tests is left alone.
fn state() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("broker-state")
}

fn start(mcp_config: Option<PathBuf>) -> Broker {
    let executable = Some(executables::folder().join("forge-toolbroker"));
    let journal = Some(state().join("journal"));
    let options = BrokerOptions { mcp_config, executable, journal, ..BrokerOptions::default() };
    Broker::start(&options).unwrap()
}

fn hash() -> Vec<ToolName> {
    vec![ToolName::parse("crypto.hash").unwrap()]
}

fn open(principal: &str) -> OpenRun {
    OpenRun {
        run_id: RunId([0xAB; 16]),
        principal: principal.into(),
        session: None,
        program_sha256: [0; 32],
        authority: Authority::Tools(hash()),
        callable: Callable::Any,
        limits: RunLimits::default(),
    }
}

fn every_thread_gets_its_own_answer() {
    let broker = start(None);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let broker = &broker;
            scope.spawn(move || {
                for round in 0..50 {
                    // Who asks is in the answer.
                    let principal = format!("thread {thread}, round {round}");
                    let (claims, _link) = broker.open_run(open(&principal)).unwrap();
                    assert_eq!(claims.principal, principal);
                    let valid_s = 60 + thread * 1_000 + round;
                    let tools = hash();
                    let request = GrantRequest {
                        principal,
                        tools,
                        constraints: Vec::new(),
                        valid_s,
                        calls_max: Some(round as u32),
                        cost_max: None,
                        session: None,
                    };
                    let Reply::Grant(token) = broker.ask(&Request::IssueGrant(request)).unwrap()
                    else {
                        panic!("no grant")
                    };
                    match broker.ask(&Request::InspectGrant { token }).unwrap() {
                        Reply::Claims(claims) => assert_eq!(claims.calls_max, Some(round as u32)),
                        other => panic!("{other:?}"),
                    }
                    let unknown = Request::InspectGrant { token: vec![1] };
                    match broker.ask(&unknown) {
                        Err(BrokerError::Refused { kind, .. }) => {
                            assert_eq!(kind, RefusalKind::BadGrant);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            });
        }
    });
}

/// An `mcp.json` with a server that says nothing for so many seconds.
fn silent_server(folder: &Folder, seconds: u32) -> PathBuf {
    let silent = format!(r#"{{"command": "sleep", "args": ["{seconds}"]}}"#);
    folder.write("mcp.json", &format!(r#"{{"mcpServers": {{"silent": {silent}}}}}"#))
}

fn a_slow_listing_holds_up_no_run() {
    let folder = Folder::new();
    let broker = start(Some(silent_server(&folder, 12)));
    let asked = AtomicBool::new(false);
    let listed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            asked.store(true, Ordering::Release);
            let list = Request::ListTools { principal: "alice".into() };
            match broker.ask(&list).unwrap() {
                Reply::Tools { tools, unavailable } => {
                    assert_eq!(tools.len(), 1);
                    assert_eq!(unavailable[0].0, "silent");
                }
                other => panic!("{other:?}"),
            }
            listed.store(true, Ordering::Release);
        });
        while !asked.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
        for _ in 0..20 {
            broker.open_run(open("alice")).unwrap();
        }
        assert!(!listed.load(Ordering::Acquire), "the runs waited for the listing");
    });
    assert!(listed.load(Ordering::Acquire));
}

fn a_lost_broker_is_told_to_all_who_wait() {
    let folder = Folder::new();
    let broker = start(Some(silent_server(&folder, 60)));
    let waiting = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                waiting.fetch_add(1, Ordering::AcqRel);
                let list = Request::ListTools { principal: "alice".into() };
                let lost = broker.ask(&list).unwrap_err();
                // One that was kept from asking until then has asked nobody.
                assert!(matches!(lost, BrokerError::Lost(_) | BrokerError::Unsent(_)), "{lost}");
            });
        }
        while waiting.load(Ordering::Acquire) < 4 {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
        // SAFETY: the process is this test's own.
        unsafe { libc::kill(broker.id() as i32, libc::SIGKILL) };
    });
    assert!(matches!(broker.open_run(open("alice")), Err(BrokerError::Unsent(_))));
}

fn text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn built_ins_need_no_configuration() {
    executables::folder();
    let state = Folder::new();
    let forge = |arguments: &[&str]| {
        text(&Command::new(FORGE).args(arguments).env("FORGE_STATE", &state.0).output().unwrap())
    };
    let (code, listed, said) = forge(&["tools", "list"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(listed.contains("crypto.hash"), "{listed}");
    let request = r#"{"algorithm": "sha256", "text": "abc"}"#;
    let (code, answer, said) = forge(&["tools", "call", "crypto.hash", request]);
    assert_eq!(code, Some(0), "{said}");
    assert!(answer.contains("ba7816bf8f01cfea414140de5dae2223"), "{answer}");
    let (code, _, said) = forge(&["tools", "call", "crypto.hsh", "{}"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("did you mean \"crypto.hash\""), "{said}");
}

fn a_principal_without_tools_is_told_why() {
    executables::folder();
    let folder = Folder::new();
    folder.write("forge.toml", "[roles.clerk]\ntools = ['*']\n[principals.ann]\nroles = ['clerk']");
    let forge = |arguments: &[&str]| {
        let mut command = Command::new(FORGE);
        command.args(arguments).current_dir(&folder.0).env("FORGE_STATE", folder.0.join("state"));
        text(&command.output().unwrap())
    };
    let list = ["tools", "list", "--config", "forge.toml"];
    let (code, listed, said) = forge(&list);
    assert_eq!((code, &listed[..]), (Some(0), ""), "{said}");
    assert!(said.contains("for the principal \"local\": none of its roles"), "{said}");
    let (code, listed, said) = forge(&[&list[..], &["--principal", "ann"]].concat());
    assert_eq!((code, &said[..]), (Some(0), ""));
    assert!(listed.contains("crypto.hash"), "{listed}");
    let search = ["tools", "search", "--config", "forge.toml", "hash a text"];
    let (code, found, said) = forge(&search);
    assert_eq!((code, &found[..]), (Some(0), ""), "{said}");
    assert!(said.contains("no tool fits this intent for the principal \"local\""), "{said}");
}

fn ids(status: &str, line: &str) -> Vec<u32> {
    let line = status.lines().find_map(|it| it.strip_prefix(line)).unwrap();
    line.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn a_broker_runs_as_another_user_without_groups() {
    let folder = Folder::new();
    folder.install();
    let user = User::numbered(STRANGER).unwrap();
    assert_eq!(user.uid(), STRANGER);
    let options = BrokerOptions {
        executable: Some(folder.0.join("forge-toolbroker")),
        user: Some(user),
        ..BrokerOptions::default()
    };
    let broker = Broker::start(&options).unwrap();
    broker.open_run(open("alice")).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", broker.id())).unwrap();
    assert_eq!(ids(&status, "Uid:"), [STRANGER; 4]);
    assert_eq!(ids(&status, "Gid:"), [STRANGER; 4]);
    assert_eq!(ids(&status, "Groups:"), Vec::<u32>::new());
    assert_eq!(
        status.lines().find(|it| it.starts_with("CapEff:")).unwrap(),
        "CapEff:\t0000000000000000"
    );
    let environment = fs::read(format!("/proc/{}/environ", broker.id())).unwrap();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    assert!(environment.split('\0').any(|it| it == "HOME=/"), "{environment:?}");

    // One that it may not run is told as such.
    fs::set_permissions(folder.0.join("forge-toolbroker"), fs::Permissions::from_mode(0o700))
        .unwrap();
    let refused = Broker::start(&options).unwrap_err();
    assert!(matches!(refused, BrokerError::StartAs { uid: STRANGER, .. }), "{refused}");
}

fn forge_toml_names_the_brokers_user() {
    let folder = Folder::new();
    let forge = folder.install();
    let config = folder.0.join("forge.toml");
    let list = |toml: &str, uid: u32| {
        folder.write("forge.toml", toml);
        let mut command = Command::new(&forge);
        // A state of whoever runs the tests would be no other user's to read.
        command.env_remove("FORGE_STATE");
        text(&command.args(["tools", "list", "--config"]).arg(&config).uid(uid).output().unwrap())
    };
    // Whom it runs as is seen from a server it starts: one that writes its
    // user down where all may write.
    let seen = folder.write("seen", "");
    fs::set_permissions(&seen, fs::Permissions::from_mode(0o666)).unwrap();
    let servers = format!(
        "[servers.who]\ncommand = \"/bin/sh\"\nargs = [\"-c\", \"id -u > {0}\"]\n\
         write = [\"{0}\"]\n",
        seen.display()
    );
    for user in [STRANGER.to_string(), "\"nobody\"".to_owned()] {
        let (_, listed, said) = list(&format!("[broker]\nuser = {user}\n{servers}"), 0);
        assert!(listed.contains("crypto.hash"), "{said}");
        let uid: u32 = fs::read_to_string(&seen).unwrap().trim().parse().unwrap();
        let expected =
            if user.starts_with('"') { User::named("nobody").unwrap().uid() } else { STRANGER };
        assert_eq!(uid, expected);
        assert_ne!(uid, 0);
    }

    for (toml, uid, words) in [
        ("[broker]\nuser = \"no-such-user\"", 0, "there is no user \"no-such-user\""),
        ("[broker]\nuser = 0", 0, "must not be root"),
        ("[broker]\nuser = \"root\"", 0, "must not be root"),
        ("[broker]\nuser = true", 0, "a user is a name or a number"),
        ("[broker]\nusr = 7", 0, "usr"),
        ("[broker]\nuser = 64124", STRANGER, "only root can start a process"),
    ] {
        let (code, _, said) = list(toml, uid);
        assert_eq!(code, Some(2), "{toml}: {said}");
        assert!(said.contains(words) && said.contains("forge.toml"), "{toml}: {said}");
    }
}

fn a_broker_user_that_can_keep_no_journal_is_told_so_before_anything_runs() {
    let folder = Folder::new();
    let forge = folder.install();
    // Its home is `/`, which is root's.
    let config = folder.write("forge.toml", &format!("[broker]\nuser = {STRANGER}\n"));
    let call = |more: &[&str]| {
        let mut command = Command::new(&forge);
        command.env_remove("FORGE_STATE").env_remove("XDG_STATE_HOME");
        command.args(["tools", "call", "--config"]).arg(&config).args(more);
        text(
            &command
                .args(["crypto.hash", r#"{"algorithm": "sha256", "text": "x"}"#])
                .output()
                .unwrap(),
        )
    };
    let roots = folder.0.join("roots");
    fs::create_dir(&roots).unwrap();
    fs::set_permissions(&roots, fs::Permissions::from_mode(0o755)).unwrap();
    // A root that anybody may write, as that of a rescue system, has room for it.
    let is_roots = fs::metadata("/").unwrap().permissions().mode() & 0o022 == 0;
    let without = is_roots.then_some(&[][..]);
    for more in without.into_iter().chain([&["--state", roots.to_str().unwrap()][..]]) {
        let (code, _, said) = call(more);
        assert_eq!(code, Some(2), "{more:?}: {said}");
        assert!(said.contains("give --state a folder that this user owns"), "{said}");
    }
    let own = folder.0.join("own");
    fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(STRANGER), Some(STRANGER)).unwrap();
    let (code, _, said) = call(&["--state", own.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
}

fn a_broker_user_that_cannot_be_is_refused() {
    assert!(matches!(User::named("no-such-user"), Err(UserError::Unknown(_))));
    assert!(matches!(User::named("a\0b"), Err(UserError::Unknown(_))));
    for uid in [0, u32::MAX] {
        assert!(matches!(User::numbered(uid), Err(UserError::Root)));
    }
}
