//! A hostile tool server of ours, and what its place keeps from it. Each
//! attempt is made twice: by the server in the place that the broker made for
//! it, where it fails, and by the same code without a broker, where it
//! succeeds.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::{Broker, CANARY, PATIENCE, Worker, server_processes, test_server};

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `forge.toml` with two hostile servers, `own` and `other`, and more fields
/// for each.
fn configured(folder: &Path, own: &str, other: &str) -> PathBuf {
    let server = test_server().display().to_string();
    let text = format!(
        "[servers.own]\ncommand = {server:?}\nargs = [\"--hostile\", \"--log\", \"/tmp/own\"]\n\
         {own}\n[servers.own.credentials]\nTEST_TOKEN = {{ from_env = \"CANARY\" }}\n\
         [servers.other]\ncommand = {server:?}\nargs = [\"--hostile\"]\n{other}\n"
    );
    let file = folder.join("forge.toml");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    file
}

fn start(own: &str, other: &str, args: &[&str]) -> (Broker, Worker) {
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), own, other).display().to_string();
    let mut all = vec!["--config".to_owned(), config];
    all.extend(args.iter().map(|word| (*word).to_owned()));
    let mut broker = Broker::spawn(folder, &all);
    broker.say_hello();
    let worker = broker.run(&["own.attack", "other.attack", "own.echo", "other.echo"], limits());
    (broker, worker)
}

fn reversed(needle: &str) -> String {
    needle.chars().rev().collect()
}

/// Whether a server got what it was after, and why not.
fn attacked(
    worker: &mut Worker,
    server: &str,
    kind: &str,
    target: &str,
    needle: &str,
) -> (bool, String) {
    let request = json!({"kind": kind, "target": target, "needle": reversed(needle)});
    let (code, said) = worker.call(&format!("{server}.attack"), &request);
    assert_eq!(code, None, "{said}");
    (said["got"].as_bool().unwrap(), said["error"].as_str().unwrap_or_default().to_owned())
}

/// The same attempt by a process of this user's, in no place at all.
fn outside(kind: &str, target: &str, needle: &str) -> bool {
    let told = Command::new(test_server())
        .args(["--attack", kind, target, needle])
        .stderr(Stdio::null())
        .output()
        .unwrap();
    told.stdout.starts_with(b"true")
}

/// A process with a needle in its memory and environment.
struct Victim(Child);

impl Victim {
    fn with(needle: &str) -> Self {
        let mut child =
            Command::new("sleep").arg("600").env("NEEDLE", needle).spawn().expect("sleep");
        // The environment is there once it is another program.
        let until = Instant::now() + PATIENCE;
        let path = format!("/proc/{}/cmdline", child.id());
        while !std::fs::read(&path).unwrap_or_default().starts_with(b"sleep") {
            if Instant::now() >= until {
                let _ = child.kill();
                panic!("sleep does not start");
            }
            std::thread::yield_now();
        }
        Self(child)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends what an attack left behind, however its test ends.
struct LeftBehind(String);

impl Drop for LeftBehind {
    fn drop(&mut self) {
        for pid in processes_with(&self.0).into_iter().filter_map(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Whether any process has this in its command line.
fn processes_with(marker: &str) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(marker)
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Yama lets no process trace one that is not its child, but root's.
fn tracing_is_restricted() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    !is_root() && scope.is_ok_and(|scope| scope.trim() != "0")
}

#[test]
fn a_server_cannot_read_the_brokers_memory() {
    let (broker, mut worker) = start("", "", &[]);
    let target = broker.child.id().to_string();
    let victim = Victim::with(CANARY);
    let plain = victim.0.id().to_string();
    for kind in ["memory", "process_vm_readv", "ptrace", "environment", "signal"] {
        let (got, error) = attacked(&mut worker, "other", kind, &target, CANARY);
        assert!(!got && !error.is_empty(), "{kind}: {error}");
        if tracing_is_restricted() && kind != "environment" {
            eprintln!("SKIPPED: Yama keeps the other half of {kind} away");
        } else {
            assert!(outside(kind, &plain, CANARY), "{kind} cannot succeed at all");
        }
    }
}

#[test]
fn a_server_cannot_read_a_siblings_environment() {
    let (broker, mut worker) = start("", "", &[]);
    let mut seen = 0;
    for sibling in server_processes(broker.child.id()) {
        let sibling = sibling.to_string();
        if !outside("environment", &sibling, CANARY) {
            continue;
        }
        seen += 1;
        let (got, error) = attacked(&mut worker, "other", "environment", &sibling, CANARY);
        assert!(!got, "{error}");
    }
    assert_eq!(seen, 1, "one server has it, and from outside it can be seen");
    assert!(!attacked(&mut worker, "other", "neighbours", "", CANARY).0);
    assert!(attacked(&mut worker, "own", "neighbours", "", CANARY).0, "its own first process");
    assert!(outside("neighbours", "", CANARY));
}

#[test]
fn a_server_cannot_read_a_siblings_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes");
    std::fs::write(&file, "the-siblings-notes").unwrap();
    let file = file.display().to_string();
    let (_broker, mut worker) = start(&format!("write = [{:?}]", folder.path()), "", &[]);
    let (got, error) = attacked(&mut worker, "other", "file", &file, "siblings");
    assert!(!got && !error.is_empty(), "{error}");
    let (got, error) = attacked(&mut worker, "own", "file", &file, "siblings");
    assert!(got, "granted, it reads them: {error}");
    let (got, error) = attacked(&mut worker, "own", "write", &file, "changed");
    assert!(got, "and writes: {error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "changed");
    assert!(outside("file", &file, "changed"));
}

#[test]
fn a_server_cannot_write_what_it_may_only_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes");
    std::fs::write(&file, "as it was").unwrap();
    let path = file.display().to_string();
    let (_broker, mut worker) = start(&format!("read = [{:?}]", folder.path()), "", &[]);
    assert!(attacked(&mut worker, "own", "file", &path, "as it was").0);
    for target in [path.as_str(), "/usr/forge-test", "/etc/forge-test", "/forge-test"] {
        let (got, error) = attacked(&mut worker, "own", "write", target, "x");
        assert!(!got && !error.is_empty(), "{target}");
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "as it was");
    assert!(outside("write", &path, "x"));
}

#[test]
fn a_server_cannot_read_the_brokers_own_files_even_in_a_folder_it_was_given() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, CANARY).unwrap();
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
    let hook = folder.path().join("hook");
    std::fs::write(&hook, CANARY.repeat(2)).unwrap();
    std::fs::set_permissions(&hook, PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::write(folder.path().join("beside"), CANARY).unwrap();
    std::fs::write(folder.path().join("alice.pem"), CANARY).unwrap();
    let (at, server) = (folder.path().to_owned(), test_server());
    let text = format!(
        "[servers.other]\ncommand = {server:?}\nargs = [\"--hostile\"]\nwrite = [{at:?}]\n\
         [servers.own]\ncommand = {server:?}\nargs = [\"--hostile\"]\n\
         [servers.own.credentials]\nTEST_TOKEN = {{ file = {token:?} }}\n\
         [builtins.crypto.keys.hook]\nalgorithm = \"hmac-sha256\"\n\
         secret = {{ file = {hook:?} }}\n\
         [principals.alice]\nsign_with = \"alice.pem\"\n"
    );
    let config = at.join("forge.toml");
    std::fs::write(&config, text).unwrap();
    let state = at.join("state");
    let args = ["--config", config.to_str().unwrap(), "--state", state.to_str().unwrap()];
    let mut broker = Broker::spawn(folder, &args.map(str::to_owned));
    broker.say_hello();
    let mut worker = broker.run(&["other.attack"], limits());
    let of = |name: &str| at.join(name).display().to_string();
    assert!(attacked(&mut worker, "other", "file", &of("beside"), CANARY).0, "it was given");
    let own =
        [("token", CANARY), ("hook", CANARY), ("alice.pem", CANARY), ("forge.toml", "servers")];
    for (name, needle) in own {
        assert!(!attacked(&mut worker, "other", "file", &of(name), needle).0, "{name}");
        assert!(outside("file", &of(name), needle), "{name}");
    }
    let key = std::fs::read_dir(&state).unwrap().flatten().find(|it| it.path().is_file()).unwrap();
    let key = key.path().display().to_string();
    assert!(!attacked(&mut worker, "other", "file", &key, "KEY").0);
    assert!(outside("file", &key, "KEY"));
}

#[test]
fn a_server_cannot_outlive_its_broker() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("heartbeat");
    std::fs::write(&marker, "").unwrap();
    let path = marker.display().to_string();
    let _left = LeftBehind(path.clone());
    let server = test_server();
    let config = json!({"mcpServers": {"own": {
        "command": server, "args": ["--hostile", "--log", path],
    }}});
    let mut broker = Broker::with_config(&config);
    let mut worker = broker.run(&["own.attack"], limits());
    assert!(attacked(&mut worker, "own", "outlive", &path, "").0);
    let beats = || std::fs::read_to_string(&marker).unwrap().matches('.').count();
    wait_until("it was left behind", || beats() > 3);
    assert!(processes_with(&path).len() > 1);
    // As suddenly as can be: nobody is there to clean up.
    broker.child.kill().unwrap();
    broker.child.wait().unwrap();
    wait_until("something outlived the broker", || processes_with(&path).is_empty());

    // Without a place of its own it stays.
    assert!(outside("outlive", &path, ""));
    let before = beats();
    wait_until("it did not outlive its starter", || beats() > before + 3);
    assert!(!processes_with(&path).is_empty());
}

#[test]
fn a_server_that_is_stopped_takes_along_what_it_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("heartbeat");
    std::fs::write(&marker, "").unwrap();
    let path = marker.display().to_string();
    let _left = LeftBehind(path.clone());
    let config = json!({"mcpServers": {"own": {
        "command": test_server(), "args": ["--hostile", "--log", path],
    }}});
    let mut broker = Broker::with_config(&config);
    let mut worker = broker.run(&["own.attack"], limits());
    assert!(attacked(&mut worker, "own", "outlive", &path, "").0);
    wait_until("it was left behind", || std::fs::read(&marker).unwrap().contains(&b'.'));
    drop(worker);
    let (status, _) = broker.finish();
    assert!(status.success());
    wait_until("something outlived the server", || processes_with(&path).is_empty());
}

#[test]
fn a_server_without_a_network_reaches_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (_broker, mut worker) = start("network = false", "", &[]);
    let (got, error) = attacked(&mut worker, "own", "connect", &address, "");
    assert!(!got && !error.is_empty());
    let (got, error) = attacked(&mut worker, "other", "connect", &address, "");
    assert!(got, "with one it does: {error}");
}

#[test]
fn a_server_without_a_network_reaches_no_program_through_a_socket_in_a_folder_it_was_given() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().canonicalize().unwrap().join(name).display().to_string();
    let (stream, datagrams) = (at("stream"), at("datagrams"));
    let _stream = UnixListener::bind(&stream).unwrap();
    let _datagrams = UnixDatagram::bind(&datagrams).unwrap();
    let given = format!("read = [{:?}]", at("."));
    let (_broker, mut worker) = start(&format!("network = false\n{given}"), &given, &[]);
    for (kind, target) in [("socket", &stream), ("datagram", &datagrams)] {
        let (got, error) = attacked(&mut worker, "own", kind, target, "");
        assert!(!got && error.contains("not permitted"), "{kind}: {error}");
        let (got, error) = attacked(&mut worker, "other", kind, target, "");
        assert!(got, "{kind}: with one it does: {error}");
    }
}

#[test]
fn each_server_has_a_user_namespaces_and_limits_of_its_own() {
    let (broker, _worker) = start("limits = { open_files = 77 }", "", &[]);
    let servers = server_processes(broker.child.id());
    assert_eq!(servers.len(), 2);
    let of = |pid: u32, what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap();
    let line = |text: &str, start: &str| {
        let line = text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
        line[start.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut users = Vec::new();
    for pid in &servers {
        let status = of(*pid, "status");
        assert_eq!(line(&status, "NoNewPrivs:"), ["1"]);
        assert_eq!(line(&status, "Seccomp:"), ["2"]);
        assert_eq!(line(&status, "CapEff:"), ["0000000000000000"]);
        assert_eq!(line(&status, "CapPrm:"), ["0000000000000000"]);
        for kind in ["pid", "mnt", "ipc", "uts"] {
            let namespace =
                |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
            assert_ne!(namespace(*pid), namespace(std::process::id()), "{kind}");
            let other = servers.iter().find(|other| *other != pid).unwrap();
            assert_ne!(namespace(*pid), namespace(*other), "{kind}");
        }
        assert_eq!(line(&of(*pid, "limits"), "Max core file size")[..2], ["0", "0"]);
        users.push(line(&status, "Uid:")[0].parse::<u32>().unwrap());
        if is_root() {
            assert_eq!(line(&status, "Groups:"), Vec::<String>::new());
        }
    }
    let files: Vec<Vec<String>> =
        servers.iter().map(|pid| line(&of(*pid, "limits"), "Max open files")).collect();
    assert!(files.iter().any(|most| most[..2] == ["77", "77"]), "{files:?}");
    if is_root() {
        assert_ne!(users[0], users[1]);
        assert!(users.iter().all(|user| forge_toolbroker::stranger::UIDS.contains(user)));
    } else {
        eprintln!("SKIPPED: only root can give servers users of their own");
    }
}

#[test]
fn a_servers_user_has_a_name_beside_the_hosts() {
    if !is_root() {
        eprintln!("SKIPPED: only root can give servers users of their own");
        return;
    }
    let (_broker, mut worker) = start("env = { LOGNAME = \"mine\" }", "", &[]);
    let uid = forge_toolbroker::stranger::UIDS.start + 1;
    for (file, named) in [
        ("/etc/passwd", format!("\nstranger:x:{uid}:{uid}:")),
        ("/etc/group", format!("\nstranger:x:{uid}:\n")),
    ] {
        for needle in [&named, "root:x:0:"] {
            let (got, error) = attacked(&mut worker, "own", "file", file, needle);
            assert!(got, "{file}: {error}");
        }
        let (got, error) = attacked(&mut worker, "own", "write", file, "x");
        assert!(!got && !error.is_empty(), "{file}");
        assert!(!outside("file", file, &named), "the host's is as it was");
    }
    assert!(!attacked(&mut worker, "own", "file", "/.text", "").0);
    for (needle, is_there) in
        [("USER=stranger\0", true), ("LOGNAME=mine\0", true), ("LOGNAME=s", false)]
    {
        let (got, error) = attacked(&mut worker, "own", "file", "/proc/self/environ", needle);
        assert_eq!(got, is_there, "{needle}: {error}");
    }
}

#[test]
fn a_server_has_no_capability_where_root_cannot_give_it_a_user() {
    use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
    if !is_root() {
        eprintln!("SKIPPED: whoever is not root has no capability to give up");
        return;
    }
    // Of this thread, and of what it starts.
    for lost in [CapabilitySet::SETUID, CapabilitySet::SETGID] {
        if let Err(error) = remove_capability_from_bounding_set(lost) {
            eprintln!("SKIPPED: this root cannot give up a capability: {error}");
            return;
        }
    }
    let (broker, mut worker) = start("", "", &[]);
    // To root no mode says no: what is not everybody's is not there.
    assert!(outside("file", "/etc/shadow", "root:"));
    assert!(!attacked(&mut worker, "own", "file", "/etc/shadow", "root:").0);
    assert!(attacked(&mut worker, "own", "file", "/etc/passwd", "root:").0);
    let servers = server_processes(broker.child.id());
    assert_eq!(servers.len(), 2);
    for pid in servers {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let lines: Vec<&str> = status.lines().filter(|line| line.starts_with("Cap")).collect();
        assert_eq!(lines.len(), 5);
        assert!(lines.iter().all(|line| line.ends_with("\t0000000000000000")), "{lines:?}");
        assert!(status.contains("\nUid:\t0\t0\t0\t0\n"), "{status}");
    }
}

#[test]
fn a_server_keeps_its_home_and_sees_no_other() {
    let state = tempfile::tempdir().unwrap();
    let home = std::env::var("HOME").unwrap();
    let file = format!("{home}/forge-test-home");
    let args = ["--state", state.path().to_str().unwrap()];
    for round in 0..2 {
        let (broker, mut worker) = start("", "", &args);
        let (kept, _) = attacked(&mut worker, "own", "file", &file, "kept");
        assert_eq!(kept, round == 1);
        let (got, error) = attacked(&mut worker, "own", "write", &file, "kept");
        assert!(got, "{error}");
        assert!(!attacked(&mut worker, "other", "file", &file, "kept").0);
        drop(worker);
        assert!(broker.finish().0.success());
    }
    assert!(!Path::new(&file).exists(), "the operator's home is another");
    let kept = state.path().join("homes/own/forge-test-home");
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "kept");
}

#[test]
fn a_link_that_a_server_left_in_its_home_makes_nothing_outside_at_its_next_start() {
    let home = std::env::var("HOME").unwrap();
    let granted = tempfile::tempdir_in(&home).unwrap();
    let out = tempfile::tempdir().unwrap();
    std::fs::create_dir(granted.path().join("bin")).unwrap();
    let file = granted.path().join("bin/srv");
    std::fs::write(&file, "as granted").unwrap();
    let name = granted.path().file_name().unwrap();
    for (planted, target) in [("", "folder"), ("bin", ""), ("bin/srv", "nologin")] {
        let state = tempfile::tempdir().unwrap();
        let kept = state.path().join("homes/own").join(name);
        let at = if planted.is_empty() { kept } else { kept.join(planted) };
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(out.path().join(target), &at).unwrap();
        let args = ["--state", state.path().to_str().unwrap()];
        let (broker, mut worker) = start(&format!("read = [{file:?}]"), "", &args);
        let path = file.display().to_string();
        let (got, error) = attacked(&mut worker, "own", "file", &path, "as granted");
        assert!(got, "{planted:?}: {error}");
        drop(worker);
        assert!(broker.finish().0.success());
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "{planted:?}");
    }
}

/// Why each server that does not start does not.
fn unavailable(broker: &mut Broker) -> Vec<(String, String)> {
    let principal = "alice".to_owned();
    match broker.ask(&forge_protocol::broker::Request::ListTools { principal }) {
        forge_protocol::broker::Reply::Tools { unavailable, .. } => {
            unavailable.into_iter().map(|(server, why)| (server.to_string(), why)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_the_broker_hides_stays_hidden_where_a_server_moved_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().canonicalize().unwrap();
    std::fs::create_dir(at.join("keys")).unwrap();
    std::fs::write(at.join("keys/hook"), CANARY.repeat(2)).unwrap();
    std::fs::set_permissions(at.join("keys/hook"), PermissionsExt::from_mode(0o600)).unwrap();
    let (server, hook) = (test_server(), at.join("keys/hook"));
    let text = format!(
        "[servers.other]\ncommand = {server:?}\nargs = [\"--hostile\"]\nwrite = [{at:?}]\n\
         [builtins.crypto.keys.hook]\nalgorithm = \"hmac-sha256\"\n\
         secret = {{ file = {hook:?} }}\n"
    );
    let config = at.join("forge.toml");
    std::fs::write(&config, text).unwrap();
    let mut broker = Broker::spawn(folder, &["--config".into(), config.display().to_string()]);
    broker.say_hello();
    // As a server may that is given the folder, with what it sees as a mount in there.
    std::fs::rename(at.join("keys"), at.join("moved")).unwrap();
    std::fs::create_dir(at.join("keys")).unwrap();
    std::fs::write(at.join("keys/hook"), "another").unwrap();
    let mut worker = broker.run(&["other.attack"], limits());
    let moved = at.join("moved/hook").display().to_string();
    let (got, error) = attacked(&mut worker, "other", "file", &moved, CANARY);
    assert!(!got, "{error}");
    assert!(outside("file", &moved, CANARY));
}

#[test]
fn a_link_that_one_server_put_on_the_way_to_anothers_folder_leads_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().canonicalize().unwrap();
    for made in ["app/d/keys", "secret/keys"] {
        std::fs::create_dir_all(at.join(made)).unwrap();
    }
    let (app, keys) = (at.join("app"), at.join("app/d/keys"));
    let own = format!("write = [{app:?}]");
    let other = format!("write = [{keys:?}]");
    let config = configured(folder.path(), &own, &other).display().to_string();
    let mut broker = Broker::spawn(folder, &["--config".to_owned(), config]);
    broker.say_hello();
    std::fs::rename(at.join("app/d"), at.join("app/was")).unwrap();
    std::os::unix::fs::symlink(at.join("secret"), at.join("app/d")).unwrap();
    let why = unavailable(&mut broker);
    assert_eq!(why.len(), 1, "{why:?}");
    assert!(why[0].0 == "other" && why[0].1.contains("a link that a server can change"), "{why:?}");
}

#[test]
fn a_program_that_a_server_replaced_brings_it_nothing_at_its_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().canonicalize().unwrap();
    for made in ["app/dist", "other/bin", "other/lib"] {
        std::fs::create_dir_all(at.join(made)).unwrap();
    }
    let secret = at.join("other/secret").display().to_string();
    std::fs::write(&secret, "of-the-operator").unwrap();
    let (program, python) = (at.join("app/dist/run"), at.join("other/bin/python"));
    for copy in [&program, &python] {
        std::fs::copy(test_server(), copy).unwrap();
    }
    let config = json!({"mcpServers": {"own": {
        "command": program, "args": ["--hostile"], "cwd": at.join("app"),
    }}});
    let mut broker = Broker::with_config(&config);
    let mut worker = broker.run(&["own.attack"], limits());
    assert!(!attacked(&mut worker, "own", "file", &secret, "operator").0);
    assert!(outside("file", &secret, "operator"));
    drop(worker);
    assert!(broker.finish().0.success());
    for planted in ["script", "link"] {
        let _ = std::fs::rename(at.join("app/dist"), at.join("app").join(planted));
        std::fs::create_dir(at.join("app/dist")).unwrap();
        if planted == "link" {
            std::os::unix::fs::symlink(&python, &program).unwrap();
        } else {
            std::fs::write(&program, format!("#!{} --hostile\n", python.display())).unwrap();
            std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let mut broker = Broker::with_config(&config);
        let why = unavailable(&mut broker);
        assert_eq!(why.len(), 1, "{planted}: it was given {}", python.display());
        assert!(why[0].1.contains("which its program needs"), "{planted}: {why:?}");
    }
}

#[test]
fn what_is_granted_and_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), "read = [\"/nonexistent/folder\"]", "");
    let mut broker = Broker::spawn(folder, &["--config".into(), config.display().to_string()]);
    broker.say_hello();
    let principal = "alice".to_owned();
    match broker.ask(&forge_protocol::broker::Request::ListTools { principal }) {
        forge_protocol::broker::Reply::Tools { unavailable, .. } => {
            assert_eq!(unavailable.len(), 1);
            assert!(unavailable[0].1.contains("/nonexistent/folder"), "{unavailable:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_argument_that_the_server_may_not_read_is_named_when_it_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().canonicalize().unwrap().join("server.sh");
    std::fs::write(&script, "exit 0\n").unwrap();
    let file = folder.path().join("forge.toml");
    let text = format!("[servers.own]\ncommand = \"sh\"\nargs = [{script:?}]\n");
    std::fs::write(&file, text).unwrap();
    let mut broker = Broker::spawn(folder, &["--config".into(), file.display().to_string()]);
    broker.say_hello();
    match broker.ask(&forge_protocol::broker::Request::ListTools { principal: "alice".into() }) {
        forge_protocol::broker::Reply::Tools { unavailable, .. } => {
            let why = &unavailable[0].1;
            let named = format!("its arguments name {}", script.display());
            assert!(why.contains(&named) && why.contains("`read`"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn fewer_users_than_servers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), "", "");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("[broker]\nserver_uids = \"200000-200000\"\n{text}")).unwrap();
    let mut broker = Broker::spawn(folder, &["--config".into(), config.display().to_string()]);
    assert_eq!(support::wait(&mut broker.child).code(), Some(2));
    let (_, log) = broker.finish();
    assert!(log.contains("broker.server_uids"), "{log}");
}

#[test]
fn configured_users_are_the_ones_that_servers_get() {
    if !is_root() {
        eprintln!("SKIPPED: only root can give servers users of their own");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), "", "");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("[broker]\nserver_uids = \"200000-200009\"\n{text}")).unwrap();
    let mut broker = Broker::spawn(folder, &["--config".into(), config.display().to_string()]);
    broker.say_hello();
    let _worker = broker.run(&["own.echo", "other.echo"], limits());
    let mut users: Vec<Value> = server_processes(broker.child.id())
        .into_iter()
        .map(|pid| {
            use std::os::unix::fs::MetadataExt as _;
            json!(std::fs::metadata(format!("/proc/{pid}")).unwrap().uid())
        })
        .collect();
    users.sort_by_key(|user| user.as_u64());
    assert_eq!(users, [json!(200_000), json!(200_001)]);
}
