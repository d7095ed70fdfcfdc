//! A service from its start to its end: the socket, the service manager, what is
//! configured, signals, and what it leaves behind.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;
#[path = "support/serving.rs"]
mod serving;

use std::fs;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use executables::FORGE;
use forge_protocol::broker::{Authority, GrantRequest};
use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::service::{Finished, Order, Query, Question, Reply, Submit};
use processes::{Process, child_named, descendants_of, is_busy, is_gone, wait_for};
use serving::{
    ECHO, Service, broker_pid, desk, endless, hashes, kill, leaving_client, lines, patience,
    report, run, runtime, signal, signal_to, standing, stands, status, stranger, submit,
    test_server, three_in_flight,
};
use support::{eventually, forge_module, signed};

fn main() -> ExitCode {
    support::main(
        claims![
            a_service_manager_passes_the_socket_and_is_told,
            a_configuration_may_be_loaded_again_before_the_service_listens,
            a_host_that_can_make_no_vm_is_no_service,
            a_pool_leaves_descriptors_to_runs_and_clients,
            what_is_configured_is_loaded_again,
            a_reload_names_what_it_does_not_load,
            a_role_that_is_taken_away_is_lost_to_all_that_begins_after_the_reload,
            a_reload_that_a_toolbroker_does_not_hear_keeps_nobody_waiting_and_holds_once_it_does,
            a_log_that_takes_nothing_ends_no_service_and_no_thread_of_it,
            a_pipe_that_nobody_reads_keeps_no_service_from_its_start_or_its_end,
            what_is_in_the_jail_goes_first_where_memory_is_short,
            a_drained_service_finishes_what_runs_and_takes_nothing_new,
            a_signal_drains_and_a_second_ends_at_once,
            a_service_ends_after_its_broker_has_followed_what_it_dispatched,
            an_interrupt_at_the_terminal_lets_calls_go_on_while_it_drains,
            a_zygote_that_says_nothing_is_told_of_and_its_runs_may_come_again,
            a_zygote_that_was_stopped_ends_with_its_service,
            the_service_is_gone_with_all_it_started_however_it_ends,
        ],
        claims![
            the_socket_is_the_operators_and_no_second_service_takes_it,
            a_stale_socket_is_replaced_and_anything_else_is_not,
            an_order_that_was_read_when_a_drain_began_is_answered,
        ],
    )
}

// Its start

fn a_service_manager_passes_the_socket_and_is_told() {
    use std::os::unix::net::UnixDatagram;
    let desk = desk();
    let listener = UnixListener::bind(desk.socket()).unwrap();
    let manager = UnixDatagram::bind(desk.path("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hears = || {
        let mut words = [0; 256];
        let bytes = manager.recv(&mut words).unwrap();
        String::from_utf8_lossy(&words[..bytes]).into_owned()
    };
    // Its descriptor 3, and variables that name its process.
    let script = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" serve --trust signer.pub --state state \
                  --ready 0 --ready-max 0";
    let serves = |passed: RawFd| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script, FORGE]).current_dir(desk.folder()).stdin(Stdio::null());
        command.env("NOTIFY_SOCKET", desk.path("notify"));
        let pass = move || {
            // SAFETY: plain system calls on a descriptor that is open.
            let done = unsafe {
                if passed == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(passed, 3) }
            };
            if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: one plain system call between fork and exec.
        unsafe { command.pre_exec(pass) };
        command
    };
    let child = serves(listener.as_raw_fd()).spawn().unwrap();
    let mut service = Service { child, socket: desk.socket() };
    drop(listener);
    assert_eq!(hears(), "READY=1");
    service.serves();
    signal(&service, libc::SIGHUP);
    let reloading = hears();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(hears(), "READY=1");
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let _run = client.submit(&endless()).await.unwrap();
        stands(&client, "it runs", |status| status["runs"]["running"] == 1).await;
        signal(&service, libc::SIGTERM);
        // 30 s to drain, and what its end takes.
        assert_eq!(hears(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=72000000");
        // What it reads while it ends makes it no service that is ready.
        signal(&service, libc::SIGHUP);
        signal(&service, libc::SIGTERM);
        assert!(service.child.wait().unwrap().success());
    });
    manager.set_nonblocking(true).unwrap();
    assert!(manager.recv(&mut [0; 256]).is_err(), "it was told more");
    assert!(desk.socket().exists(), "the socket is the manager's");

    // One for messages serves nobody.
    // SAFETY: a plain system call, whose descriptor is nobody else's.
    let packets = unsafe {
        OwnedFd::from_raw_fd(libc::socket(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
        ))
    };
    let family = libc::AF_UNIX as libc::sa_family_t;
    // SAFETY: a plain system call on an open descriptor, with the family alone, for which
    // the kernel finds an address (unix(7), Autobind).
    let bound = unsafe {
        libc::bind(packets.as_raw_fd(), (&raw const family).cast(), size_of_val(&family) as u32)
    };
    // SAFETY: a plain system call on an open descriptor.
    assert_eq!((bound, unsafe { libc::listen(packets.as_raw_fd(), 1) }), (0, 0));
    let served = serves(packets.as_raw_fd()).output().unwrap();
    let said = String::from_utf8_lossy(&served.stderr);
    assert!(served.status.code() == Some(2) && said.contains("for streams"), "{said}");
}

fn a_configuration_may_be_loaded_again_before_the_service_listens() {
    let desk = desk();
    let child = desk.serves(&[]).spawn().unwrap();
    let id = child.id() as i32;
    eventually("it has begun", || !Process::children_of(id).is_empty());
    signal_to(id, libc::SIGHUP);
    Service::listening(child, desk.socket()).serves();
}

fn a_host_that_can_make_no_vm_is_no_service() {
    let desk = desk();
    let mut serves = desk.serves(&[]);
    let no_room = || {
        let none = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
        // SAFETY: a plain system call on a limit that is whole.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &none) };
        Ok(())
    };
    // What workers are has to be written to memory first.
    // SAFETY: the closure makes one system call between fork and exec.
    let output = unsafe { serves.pre_exec(no_room) }.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    assert!(stderr.contains("the zygote cannot be started"), "{stderr}");
    assert!(!desk.socket().exists());
}

fn a_pool_leaves_descriptors_to_runs_and_clients() {
    let desk = desk();
    let mut serves = desk.serves(&["--ready", "100", "--ready-max", "100"]);
    let few = || {
        let few = libc::rlimit { rlim_cur: 96, rlim_max: 96 };
        // SAFETY: a plain system call on a limit that is whole.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &few) };
        Ok(())
    };
    // SAFETY: the closure makes one system call between fork and exec.
    let child = unsafe { serves.pre_exec(few) }.spawn().unwrap();
    let service = Service::listening(child, desk.socket());
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        stands(&client, "as many as fit stand", |status| status["pool"]["standing"] == 24).await;
    });
    service.serves();
}

fn the_socket_is_the_operators_and_no_second_service_takes_it() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let socket = fs::symlink_metadata(desk.socket()).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o7777, 0o600);
    let second = desk.serves(&["--ready", "0"]).output().unwrap();
    // What another moment may mend: a unit tries again.
    assert_eq!(second.status.code(), Some(5), "{second:?}");
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("socket") && said.contains("in use"), "{said}");
    // The first goes on at the same socket.
    drop(service.client());
}

fn a_stale_socket_is_replaced_and_anything_else_is_not() {
    let desk = desk();
    drop(UnixListener::bind(desk.socket()).unwrap());
    assert!(UnixStream::connect(desk.socket()).is_err(), "nobody listens there");
    let mut service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    assert_eq!(fs::metadata(desk.socket()).unwrap().permissions().mode() & 0o777, 0o600);
    // One that is killed leaves one too.
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    assert!(desk.socket().exists());
    drop(desk.serve(&["--ready", "0", "--ready-max", "0"]));

    fs::remove_file(desk.socket()).unwrap();
    fs::write(desk.socket(), "somebody's notes").unwrap();
    let refused = desk.serves(&["--ready", "0"]).output().unwrap();
    assert!(!refused.status.success());
    assert_eq!(fs::read(desk.socket()).unwrap(), b"somebody's notes");
}

// While it serves

fn what_is_configured_is_loaded_again() {
    let desk = desk();
    fs::write(desk.path("forge.toml"), "[service]\nruns_max = 3").unwrap();
    let other = forge_protocol::signature::SignerKey::from_secret(&[9; 32]);
    fs::write(desk.path("other.pub"), other.trust_key().to_pem()).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    let wat = wat::parse_str(forge_module(r#"(memory (export "memory") 1)"#, ECHO)).unwrap();
    let order = Order { program: other.sign(&wat).unwrap(), ..submit(ECHO, "[1]") };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&endless()).await.unwrap();
        stands(&client, "one runs", |status| status["runs"]["running"] == 1).await;
        let refused = report(&client.run(&order).await.unwrap());
        assert_eq!(refused["kind"], "signature");
        let wrong = "[service]\nruns_max = 0";
        fs::write(desk.path("forge.toml"), wrong).unwrap();
        signal(&service, libc::SIGHUP);
        let good = "[service]\nruns_max = 7\n[trust]\nkeys = ['other.pub']";
        fs::write(desk.path("forge.toml"), good).unwrap();
        signal(&service, libc::SIGHUP);
        stands(&client, "it is loaded", |status| status["bounds"]["runs_max"] == 7).await;
        assert_eq!(report(&client.run(&order).await.unwrap())["output"], "[1]");
        // What ran goes on.
        assert_eq!(status(&client).await["runs"]["running"], 1);
        run.canceller().cancel().await;
        assert_eq!(report(&run.finish().await.unwrap())["status"], "cancelled");
    });
}

fn a_reload_names_what_it_does_not_load() {
    let desk = desk();
    let roles = |of_bob: &str| format!("[roles.clerk]\ntools = ['crypto.hash']\n{of_bob}");
    let bob = "[principals.bob]\nroles = ['clerk']\nuids = [61001]\n";
    fs::write(desk.path("forge.toml"), roles(bob)).unwrap();
    let log = fs::File::create(desk.path("log")).unwrap();
    let child = desk.serves(&["--config", "forge.toml"]).stderr(log).spawn().unwrap();
    let service = Service::listening(child, desk.socket());
    let said = || fs::read_to_string(desk.path("log")).unwrap();
    let load = |text: String| {
        fs::write(desk.path("forge.toml"), text).unwrap();
        signal(&service, libc::SIGHUP);
    };
    let http = "[http]\nlisten = '127.0.0.1:0'\nprincipal = 'bob'\n[mcp]\nprincipal = 'bob'\n";
    load(format!("{}{http}", roles("[service]\nmode = '0666'\n[pool]\nready = 1\n")));
    eventually("what needs a restart is told", || {
        ["\"pool\"", "service.mode", "http.listen"].iter().all(|name| said().contains(name))
    });
    assert!(!said().contains("roles") && !said().contains("mcp"), "{}", said());
    // What is loaded is not told.
    fs::write(desk.path("log"), "").unwrap();
    load(format!("{}[service]\nruns_max = 7\n", roles(&bob.replace("61001", "61002"))));
    eventually("it is loaded", || standing(&mut service.client())["bounds"]["runs_max"] == 7);
    assert!(!said().contains("restart"), "{}", said());
    // What another command reads, and may read alone, is no reason.
    let of_mcp = "[service]\nruns_max = 8\n[mcp]\nhosts = ['a b']\nprincipal = 'bob'\n";
    load(roles(&format!("{of_mcp}{bob}sign_with = 'none.pem'\n")));
    eventually("it is loaded", || standing(&mut service.client())["bounds"]["runs_max"] == 8);
    // What is wrong with another's part, who reads it when it starts again, is wrong now.
    load(roles("[service]\nruns_max = 9\n[servers.z]\ncomand = 'x'\n"));
    eventually("it is refused", || said().contains("servers.z"));
    assert!(said().contains("forge.toml:6: "), "{}", said());
    assert_eq!(standing(&mut service.client())["bounds"]["runs_max"], 8);
}

/// A configuration in which `local` has this role, `clerk` or `guest`.
fn of_role(of_local: &str, runs_max: u32) -> String {
    let roles = "[roles.clerk]\ntools = ['crypto.hash']\n[roles.guest]\ntools = []\n";
    let local = format!("[principals.local]\nroles = ['{of_local}']\n");
    format!("{roles}{local}[service]\nruns_max = {runs_max}\n")
}

/// A service by that file, whose log is in another.
fn serves_logged(desk: &desk::Desk) -> Service {
    let log = fs::File::create(desk.path("log")).unwrap();
    let child = desk.serves(&["--config", "forge.toml"]).stderr(log).spawn().unwrap();
    Service::listening(child, desk.socket())
}

fn a_role_that_is_taken_away_is_lost_to_all_that_begins_after_the_reload() {
    let desk = desk();
    let configured = |of_local: &str, runs_max: u32| {
        fs::write(desk.path("forge.toml"), of_role(of_local, runs_max)).unwrap();
    };
    configured("clerk", 3);
    let service = serves_logged(&desk);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let kind = async |order: &Order| report(&client.run(order).await.unwrap())["kind"].clone();
        let issue = Question::IssueGrant(GrantRequest {
            principal: "local".into(),
            tools: vec![ToolName::parse("crypto.hash").unwrap()],
            constraints: Vec::new(),
            valid_s: 600,
            calls_max: None,
            cost_max: None,
            session: None,
        });
        let Reply::Grant(token) = client.ask(issue.clone()).await.unwrap() else { panic!() };
        let granted = Order { authority: Authority::Grant(token), ..hashes() };
        assert_eq!((kind(&hashes()).await, kind(&granted).await), ("".into(), "".into()));
        let loaded = async |of_local, runs_max| {
            configured(of_local, runs_max);
            signal(&service, libc::SIGHUP);
            stands(&client, "it is loaded", |it| it["bounds"]["runs_max"] == runs_max).await;
        };
        loaded("guest", 4).await;
        let forbidden = ("forbidden".into(), "forbidden".into());
        assert_eq!((kind(&hashes()).await, kind(&granted).await), forbidden);
        assert!(client.ask(issue).await.is_err());
        // What is wrong changes nothing.
        configured("nobody", 5);
        signal(&service, libc::SIGHUP);
        eventually("it is told", || {
            fs::read_to_string(desk.path("log")).unwrap().contains("no role has this name")
        });
        assert_eq!(status(&client).await["bounds"]["runs_max"], 4);
        assert_eq!(kind(&hashes()).await, "forbidden");
        loaded("clerk", 6).await;
        assert_eq!((kind(&hashes()).await, kind(&granted).await), ("".into(), "".into()));
    });
}

fn a_reload_that_a_toolbroker_does_not_hear_keeps_nobody_waiting_and_holds_once_it_does() {
    let desk = desk();
    let configured = |of_local: &str, runs_max: u32| {
        fs::write(desk.path("forge.toml"), of_role(of_local, runs_max)).unwrap();
    };
    configured("clerk", 3);
    let service = serves_logged(&desk);
    let mut client = service.client();
    assert_eq!(run(&mut client, &hashes())["kind"], "");
    let broker = broker_pid(&standing(&mut client)).unwrap();
    let stop = |with| {
        // SAFETY: a plain system call; the process is this test's service's own.
        assert_eq!(unsafe { libc::kill(broker, with) }, 0);
    };
    stop(libc::SIGSTOP);
    let says_nothing = || {
        fs::read_to_string(desk.path("log")).unwrap().matches("the toolbroker says nothing").count()
    };
    // While it waits for the toolbroker it answers and runs. A host that is slow for as
    // long as that is looked at once more.
    let goes_on = (4..8).any(|runs_max| {
        configured("guest", runs_max);
        let before = says_nothing();
        signal(&service, libc::SIGHUP);
        let answers = standing(&mut client)["bounds"]["runs_max"] == runs_max - 1;
        assert_eq!(run(&mut client, &submit(ECHO, "[1]"))["output"], "[1]");
        let goes_on = answers && says_nothing() == before;
        eventually("it is loaded", || standing(&mut client)["bounds"]["runs_max"] == runs_max);
        assert_eq!(says_nothing(), before + 1);
        goes_on
    });
    assert!(goes_on, "nobody was answered until the reload was over");
    stop(libc::SIGCONT);
    assert_eq!(run(&mut client, &hashes())["kind"], "forbidden");
}

fn a_log_that_takes_nothing_ends_no_service_and_no_thread_of_it() {
    let desk = desk();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut serves = desk.serves(&[]);
    let child = serves.env("FORGE_LOG", "info").stderr(full).spawn().unwrap();
    let service = Service::listening(child, desk.socket());
    service.serves();
    // What each of these says, at least, is said by another thread.
    fs::write(desk.path("signer.pub"), "no key").unwrap();
    signal(&service, libc::SIGHUP);
    let broker = broker_pid(&standing(&mut service.client()));
    Process::children_of(service.child.id() as i32).iter().for_each(|it| kill(it.pid));
    eventually("another broker is there, and another zygote", || {
        let standing = standing(&mut service.client());
        let is_back = broker_pid(&standing).is_some_and(|pid| Some(pid) != broker);
        is_back && standing["pool"]["standing"].as_u64().is_some_and(|standing| standing > 0)
    });
    service.serves();
    let report = run(&mut service.client(), &hashes());
    assert_eq!(report["status"], "ok", "{report:#}");
}

fn a_pipe_that_nobody_reads_keeps_no_service_from_its_start_or_its_end() {
    let desk = desk();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: a plain system call on an open descriptor.
    let room = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_GETPIPE_SZ) };
    (&writer).write_all(&vec![b'x'; room as usize]).unwrap();
    let child = desk.serves(&[]).stderr(writer).spawn().unwrap();
    let mut service = Service::listening(child, desk.socket());
    service.serves();
    signal(&service, libc::SIGTERM);
    let ended = wait_for("its end", || service.child.try_wait().unwrap());
    assert!(ended.success());
    drop(reader);
}

fn what_is_in_the_jail_goes_first_where_memory_is_short() {
    let desk = desk();
    let service = desk.serve(&["--ready", "1"]);
    let id = service.child.id();
    let of = |pid| fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    eventually("a worker stands ready", || !service.workers().is_empty());
    for worker in service.workers() {
        assert_eq!(of(worker), "1000\n");
    }
    assert_eq!(of(id as i32), of(std::process::id() as i32));
    let broker = child_named(id, FORGE.replace("forge-vmm", "forge-toolbroker").as_str());
    assert_eq!(of(broker.unwrap() as i32), of(id as i32));
}

// Its end

fn a_drained_service_finishes_what_runs_and_takes_nothing_new() {
    let desk = desk();
    let mut service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&endless()).await.unwrap();
        stands(&client, "it runs", |status| status["runs"]["running"] == 1).await;
        assert_eq!(client.ask(Question::Drain).await.unwrap(), Reply::Draining);
        let refused = report(&client.run(&submit(ECHO, "1")).await.unwrap());
        assert_eq!((&refused["status"], &refused["kind"]), (&"refused".into(), &"draining".into()));
        assert_eq!(status(&client).await["state"], "draining");
        assert!(service.child.try_wait().unwrap().is_none(), "a run goes on");
        run.canceller().cancel().await;
        assert_eq!(report(&run.finish().await.unwrap())["status"], "cancelled");
    });
    assert!(service.child.wait().unwrap().success());
    assert!(!desk.socket().exists());
}

fn an_order_that_was_read_when_a_drain_began_is_answered() {
    let desk = desk();
    // A few in one write: the service reads them at once, and each has a thread.
    let mut said = Vec::new();
    frame::write_message(Kind::Hello, &Hello::ours(Role::Client), &mut said);
    frame::write_message(Kind::Query, &Query { number: 0, question: Question::Drain }, &mut said);
    let order = Order { program: Vec::new(), ..submit(ECHO, "1") };
    for number in 1..=4 {
        frame::write_message(Kind::Submit, &Submit { number, order: order.clone() }, &mut said);
    }
    // Whether the service ends before another thread has begun is a matter of luck.
    for round in 0..40 {
        let mut service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
        let mut link = stranger(&service);
        link.send(&said, patience()).unwrap();
        let mut answered = Vec::new();
        while let Ok(frame) = link.receive(|_| true, patience()) {
            if frame.kind == Kind::Finished {
                answered.push(codec::decode::<Finished>(&frame.payload).unwrap().number);
            }
        }
        answered.sort_unstable();
        assert_eq!(answered, [1, 2, 3, 4], "round {round}");
        assert!(service.child.wait().unwrap().success());
    }
}

fn a_signal_drains_and_a_second_ends_at_once() {
    let desk = desk();
    for twice in [false, true] {
        let drain_ms = if twice { 3_600_000 } else { 50 };
        fs::write(desk.path("forge.toml"), format!("[service]\ndrain_ms = {drain_ms}")).unwrap();
        let mut service =
            desk.serve(&["--config", "forge.toml", "--ready", "0", "--ready-max", "0"]);
        runtime().block_on(async {
            let client = forge_client::Client::connect(&service.socket).await.unwrap();
            let run = client.submit(&endless()).await.unwrap();
            stands(&client, "it runs", |status| status["runs"]["running"] == 1).await;
            // While a first VM is made, nothing else ends the run.
            eventually("its guest runs", || service.workers().into_iter().any(is_busy));
            signal(&service, libc::SIGTERM);
            if twice {
                stands(&client, "it drains", |status| status["state"] == "draining").await;
                let refused = report(&client.run(&submit(ECHO, "1")).await.unwrap());
                assert_eq!(refused["kind"], "draining");
                assert!(refused.get("retry_after_ms").is_none(), "{refused:#}");
                let pid = service.child.id() as i32;
                eventually("it does nothing but wait for the run", || !is_busy(pid));
                signal(&service, libc::SIGTERM);
                // Whoever is still there to tell its end says so.
                if let Ok(told) = run.finish().await {
                    assert_eq!(report(&told)["status"], "cancelled");
                }
            } else {
                // Its time is over, and it is told so.
                let report = report(&run.finish().await.unwrap());
                assert_eq!(report["status"], "cancelled");
                assert!(report["reason"].as_str().unwrap().contains("service ended"), "{report:#}");
            }
        });
        assert!(service.child.wait().unwrap().success());
        assert!(!desk.socket().exists());
    }
}

/// What is left when a service ends, its manager kills.
fn a_service_ends_after_its_broker_has_followed_what_it_dispatched() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let mut service = desk.serve(&["--config", "forge.toml"]);
    let wat = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "test.slow{\"ms\":1500}")"#,
        "(drop (call $call_async (i32.const 0) (i32.const 9) (i32.const 9) (i32.const 11)))
         (i32.const 0)",
    );
    let slow = Authority::Tools(vec!["test.slow".parse().unwrap()]);
    let order = Order { program: signed(&wat), authority: slow, ..endless() };
    let report = run(&mut service.client(), &order);
    assert_eq!(report["tool_calls"][0]["status"], "unsettled", "{report:#}");
    eventually("it is dispatched", || lines(&log, "slow") == 1);
    signal(&service, libc::SIGTERM);
    eventually("nobody is let in any more", || UnixStream::connect(&service.socket).is_err());
    assert!(service.child.try_wait().unwrap().is_none(), "it has ended before its broker");
    let ended = wait_for("its end", || service.child.try_wait().unwrap());
    assert!(ended.success());
    assert_eq!(lines(&log, "slow ended"), 1);
}

/// A terminal's interrupt comes to every process of the foreground's group.
fn an_interrupt_at_the_terminal_lets_calls_go_on_while_it_drains() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), format!("[service]\ndrain_ms = 3600000\n{toml}")).unwrap();
    let mut command = desk.serves(&["--config", "forge.toml"]);
    // Whoever started this test may ignore it.
    let heeds = || {
        // SAFETY: one plain system call.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: the closure makes one system call between fork and exec.
    unsafe { command.process_group(0).pre_exec(heeds) };
    let mut service = Service::listening(command.spawn().unwrap(), desk.socket());
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&three_in_flight()).await.unwrap();
        eventually("three calls are in flight", || lines(&log, "never") == 3);
        let before = status(&client).await["broker"].clone();
        // SAFETY: a plain system call; the group is a child's of ours.
        assert_eq!(unsafe { libc::kill(-(service.child.id() as i32), libc::SIGINT) }, 0);
        stands(&client, "it drains", |status| status["state"] == "draining").await;
        let after = status(&client).await;
        assert_eq!((&after["broker"], &after["runs"]["running"]), (&before, &1.into()));
        // Who ends the run is its client, and the broker is there to say so.
        run.canceller().cancel().await;
        let report = report(&run.finish().await.unwrap());
        assert_eq!(report["status"], "cancelled", "{report:#}");
        eventually("its tools hear of it", || lines(&log, "never cancelled") == 3);
    });
    assert!(service.child.wait().unwrap().success());
}

fn a_zygote_that_says_nothing_is_told_of_and_its_runs_may_come_again() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    service.serves();
    let zygote = child_named(service.child.id(), "forge-vmm-zygote").unwrap() as i32;
    signal_to(zygote, libc::SIGSTOP);
    let mut client = service.client();
    let ends = || {
        let limits = RunLimits { wall_ms: 300, ..RunLimits::default() };
        let report = run(&mut service.client(), &Order { limits, ..submit(ECHO, "1") });
        format!("{}/{}", report["status"].as_str().unwrap(), report["kind"].as_str().unwrap())
    };
    // It may be that this run had too little time.
    assert_eq!(ends(), "limit/deadline");
    eventually("the service says so", || standing(&mut client)["state"] == "recovering");
    assert!(standing(&mut client)["pool"]["silent_s"].as_u64() >= Some(5));
    assert_eq!(ends(), "unavailable/kvm");
    signal_to(zygote, libc::SIGCONT);
    eventually("it answers, with nobody there", || standing(&mut client)["state"] == "serving");
    service.serves();
}

fn a_zygote_that_was_stopped_ends_with_its_service() {
    let desk = desk();
    let mut service = desk.serve(&[]);
    let zygote = child_named(service.child.id(), "forge-vmm-zygote").unwrap() as i32;
    let _client = leaving_client(&service, &endless());
    let mut other = service.client();
    eventually("it runs", || standing(&mut other)["runs"]["running"] == 1);
    signal_to(zygote, libc::SIGSTOP);
    signal(&service, libc::SIGTERM);
    // Two at once may come as one.
    eventually("it drains", || standing(&mut other)["state"] == "draining");
    signal(&service, libc::SIGTERM);
    assert!(service.child.wait().unwrap().success());
    eventually("its zygote is gone", || is_gone(zygote));
}

fn the_service_is_gone_with_all_it_started_however_it_ends() {
    let desk = desk();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        // Its runs are not waited for.
        fs::write(desk.path("forge.toml"), "[service]\ndrain_ms = 0").unwrap();
        let mut service = desk.serve(&["--ready", "2", "--config", "forge.toml"]);
        service.serves();
        let client = leaving_client(&service, &endless());
        let mut all = Vec::new();
        // Two that wait, one that runs, their zygote, the toolbroker; one that
        // served before may leave at any moment.
        eventually("workers wait, and one runs", || {
            let runs = service.workers().into_iter().any(is_busy);
            all = descendants_of(service.child.id() as i32);
            runs && all.len() >= 5
        });
        // SAFETY: a plain system call; the process is a child of ours.
        assert_eq!(unsafe { libc::kill(service.child.id() as i32, signal) }, 0);
        let status = service.child.wait().unwrap();
        for pid in all {
            eventually("all it started is gone", || is_gone(pid));
        }
        // Nobody can clean up who is killed.
        let killed = signal == libc::SIGKILL;
        assert_eq!((status.success(), desk.socket().exists()), (!killed, killed), "{status}");
        drop(client);
    }
}
