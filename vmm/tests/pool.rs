//! The pool over real workers: what it does when it is empty, when processes
//! are killed, for whom a VM may run again, and what it is to have a program
//! prepared.
//!
//! One test is the checking mode: every reset of a mixture of runs is proven
//! against the whole of memory and vCPU. It says so when it ran;
//! `FORGE_PROVEN_RUNS` says over how many runs (200).

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, HostedTool, HostedTools};
use forge_protocol::ending::{Ending, RejectKind, RunEnd};
use forge_protocol::limits::{OUTPUT_BYTES_MAX, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::service::{Order, RunEvent};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Prepare, PreparedJob, Report, Reuse, VmFailureKind};
use forge_vmm::admission::{Admission, Admitted};
use forge_vmm::broker::{Broker, BrokerOptions};
use forge_vmm::cancel::Cancel;
use forge_vmm::link::Patience;
use forge_vmm::machine::deadline_in;
use forge_vmm::pool::worker::Run;
use forge_vmm::pool::{Done, Pool, PoolOptions, Task, Vm};
use forge_vmm::supervisor::{Attendance, Supervisor, SupervisorOptions};
use processes::{Process, contains, is_gone, memory_of};
use support::{eventually, forge_module, job, signed, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            an_empty_pool_is_a_cold_start_and_no_error,
            time_lost_before_a_worker_has_the_run_is_the_runs,
            nobody_waits_longer_than_it_can_for_a_zygote_that_stands_still,
            a_killed_zygote_is_replaced_and_runs_go_on,
            workers_killed_while_they_stand_ready_cost_no_run,
            a_worker_killed_in_its_run_costs_that_run_alone,
            a_run_whose_order_died_unread_calls_over_another_link,
            a_vm_that_is_reset_serves_one_tenant,
            a_vm_is_put_back_soon_after_its_run_though_nothing_follows,
            an_order_of_any_kind_ends_a_workers_rest,
            a_cancelled_run_is_given_no_worker,
            a_deadline_in_the_middle_of_an_event_is_a_deadline,
            a_vm_that_is_fresh_serves_one_run,
            a_vm_is_destroyed_when_its_result_has_been_told,
            a_prepared_program_answers_as_an_unprepared_one,
            a_prepared_vm_is_for_its_tenant_program_and_limits_alone,
            a_prepared_run_is_held_against_its_own_grant,
            a_program_that_cannot_be_prepared_reports_its_proper_ending,
            the_pool_grows_after_cold_starts_up_to_its_maximum,
            a_dropped_pool_leaves_no_process,
            in_the_checking_mode_every_reset_of_a_mixture_is_proven,
        ],
        claims![],
    )
}

// Pools

const RESET: Reuse = Reuse::Reset { prove_one_in: 1 };

fn trust() -> TrustKeys {
    TrustKeys::new([signer().trust_key()]).unwrap()
}

fn pool(ready_min: usize, ready_max: usize, reuse: Reuse) -> Pool {
    let options = PoolOptions { ready_min, ready_max, reuse, ..PoolOptions::default() };
    Pool::new(&trust(), options).unwrap()
}

fn fill(pool: &Pool) {
    eventually("the pool is full", || pool.is_full());
}

fn workers(pool: &Pool) -> Vec<Process> {
    let zygote = pool.zygote().unwrap();
    Process::children_of(zygote).into_iter().filter(|it| !it.zombie).collect()
}

fn kill(pid: i32) {
    // SAFETY: a plain system call; the process is one of a pool of ours.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    eventually("a killed process is gone", || is_gone(pid));
}

/// Whether more than a word was sent to this worker that it has not read: its order.
fn is_owed_bytes(worker: i32) -> bool {
    // SAFETY: plain system calls; what they open is closed again.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, worker, 0) as i32;
        let socket = libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0) as i32;
        assert!(process >= 0 && socket >= 0, "{}", std::io::Error::last_os_error());
        let mut bytes = 0;
        assert_eq!(libc::ioctl(socket, libc::FIONREAD, &raw mut bytes), 0);
        libc::close(socket);
        libc::close(process);
        bytes > 64
    }
}

fn admit(job: &Job) -> Arc<Admitted> {
    Admission::new(trust()).admit(&job.program, &job.load.limits).unwrap()
}

fn try_run(pool: &Pool, tenant: &str, job: &Job, prepared: bool) -> Result<Done, Fate> {
    // Its time starts now, whenever the job was put together.
    let time = Duration::from_millis(job.load.limits.wall_ms);
    let job = &Job { deadline: deadline_in(time), ..job.clone() };
    let admitted = prepared.then(|| admit(job));
    let task = Task { tenant, job, broker: None, prepared: admitted.as_deref(), tell: None };
    let patience = Patience::until(Instant::now() + Duration::from_secs(120));
    pool.carry_out(&task, patience).map_err(|unserved| unserved.told().0)
}

fn run(pool: &Pool, tenant: &str, job: &Job) -> Done {
    try_run(pool, tenant, job, false).unwrap()
}

fn run_prepared(pool: &Pool, tenant: &str, job: &Job) -> Done {
    try_run(pool, tenant, job, true).unwrap()
}

/// What of a report does not depend on the clock.
fn essence(report: &Report) -> String {
    let fate = match &report.fate {
        Fate::Ended(ended) => {
            format!("{:?} {} {}", ended.ending, ended.fuel_used, ended.memory_peak_bytes)
        }
        other => format!("{other:?}"),
    };
    let Report { output, artifacts, logs, .. } = report;
    format!("{fate} {output:?} {artifacts:?} {logs:?}")
}

fn ending(report: &Report) -> &Ending {
    match &report.fate {
        Fate::Ended(ended) => &ended.ending,
        other => panic!("the run did not end by itself: {other:?}"),
    }
}

// Programs

fn plain(wat: &str) -> Job {
    job(signed(wat), RunLimits { wall_ms: 60_000, ..RunLimits::default() })
}

/// Writes its input back.
fn echo() -> Job {
    plain(&forge_module(
        r#"(memory (export "memory") 2)"#,
        "(drop (call $output (i32.const 0)
            (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
         (i32.const 0)",
    ))
}

const ENDLESS: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32) (loop (br 0)) (unreachable)))"#;

/// Runs until its deadline.
fn endless(time: Duration) -> Job {
    let wall_ms = time.as_millis() as u64;
    job(signed(ENDLESS), RunLimits { fuel: u64::MAX, wall_ms, ..RunLimits::default() })
}

/// Imports a tool; the answer is the call's code.
fn calling() -> Job {
    let mut job = plain(
        r#"(module
            (import "tool" "test.echo" (func $call (param i32 i32) (result i32)))
            (memory (export "memory") 1) (data (i32.const 0) "{}")
            (func (export "forge_run") (result i32) (call $call (i32.const 0) (i32.const 2))))"#,
    );
    job.start.granted = vec![ToolName::parse("test.echo").unwrap()];
    job
}

fn mixture() -> Vec<(&'static str, Job)> {
    let mut out_of_fuel = plain(ENDLESS);
    out_of_fuel.load.limits.fuel = 300_000;
    vec![
        ("echo", echo()),
        ("fuel", out_of_fuel),
        (
            "memory",
            plain(
                r#"(module (memory (export "memory") 24)
                (func (export "forge_run") (result i32)
                    (memory.fill (i32.const 0) (i32.const 0xcd) (i32.const 1572864))
                    (i32.load (i32.const 70000))))"#,
            ),
        ),
        (
            "trap",
            plain(
                r#"(module (memory (export "memory") 1)
                (func (export "forge_run") (result i32) (i32.load (i32.const 65536))))"#,
            ),
        ),
        ("call", calling()),
        (
            "random, log, artifact",
            plain(&forge_module(
                r#"(memory (export "memory") 1) (data (i32.const 0) "name text/plain")"#,
                "(call $log (i32.const 1) (i32.const 0) (i32.const 4))
                 (drop (call $artifact (i32.const 0) (i32.const 4) (i32.const 5) (i32.const 10)
                    (i32.const 0) (i32.const 9)))
                 (call $random (i32.const 64) (i32.const 64))
                 (drop (call $output (i32.const 0) (i32.const 128)))
                 (i32.const 5)",
            )),
        ),
        ("deadline", endless(Duration::from_millis(30))),
    ]
}

// Emptiness, growth

fn an_empty_pool_is_a_cold_start_and_no_error() {
    // One that keeps nothing, and one that is asked before it is filled.
    for (ready_min, ready_max) in [(0, 0), (0, 2), (1, 1)] {
        let pool = pool(ready_min, ready_max, Reuse::Fresh);
        for _ in 0..3 {
            let done = run(&pool, "somebody", &echo());
            assert_eq!((done.report.output.as_slice(), done.vm), (&b"{}"[..], Vm::Fresh));
        }
    }
}

fn time_lost_before_a_worker_has_the_run_is_the_runs() {
    let pool = pool(0, 0, Reuse::Fresh);
    pool.stand_by(Patience::default()).unwrap();
    let job = Job { deadline: deadline_in(Duration::ZERO), ..echo() };
    let task = Task { tenant: "somebody", job: &job, broker: None, prepared: None, tell: None };
    // A worker is made, and says that there is no time left.
    let done = pool.carry_out(&task, Patience::default()).unwrap();
    assert_eq!(done.report.fate, Fate::Deadline);
    assert_eq!(done.report.output, b"");
    // None is made for a run that nobody waits for any more.
    let patience = Patience::until(Instant::now());
    assert_eq!(pool.carry_out(&task, patience).unwrap_err(), Fate::Deadline.into());
}

fn nobody_waits_longer_than_it_can_for_a_zygote_that_stands_still() {
    let pool = pool(0, 0, Reuse::Fresh);
    try_run(&pool, "somebody", &echo(), false).unwrap();
    let zygote = pool.zygote().unwrap();
    // SAFETY: a plain system call; the process is the pool's.
    let signal = |signal| assert_eq!(unsafe { libc::kill(zygote, signal) }, 0);
    signal(libc::SIGSTOP);
    let (job, cancel) = (echo(), Cancel::new().unwrap());
    let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None };
    std::thread::scope(|scope| {
        let (pool, task, cancel) = (&pool, &task, &cancel);
        let late = |patience| move || pool.carry_out(task, patience).unwrap_err().told().0;
        let soon = || Patience::until(Instant::now() + Duration::from_millis(200));
        // One of them has asked it for a worker, the others wait for their turn.
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(late(soon()))).collect();
        for run in runs {
            assert_eq!(run.join().unwrap(), Fate::Deadline);
        }
        // The answer is still owed.
        let runs: Vec<_> = (0..2)
            .map(|_| scope.spawn(late(Patience { until: None, cancel: Some(cancel) })))
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        cancel.raise();
        for run in runs {
            match run.join().unwrap() {
                Fate::Vm(failure) => assert_eq!(failure.kind, VmFailureKind::Cancelled),
                other => panic!("{other:?}"),
            }
        }
    });
    signal(libc::SIGCONT);
    try_run(&pool, "somebody", &echo(), false).unwrap();
    assert_eq!(pool.zygote().unwrap(), zygote, "it was slow, not lost");
    eventually("the worker that nobody waited for is gone", || workers(&pool).is_empty());
}

fn the_pool_grows_after_cold_starts_up_to_its_maximum() {
    let pool = pool(1, 3, Reuse::Fresh);
    fill(&pool);
    assert_eq!(workers(&pool).len(), 1);
    // More at a time than stand ready, again and again.
    eventually("the pool has grown", || {
        std::thread::scope(|scope| {
            for _ in 0..5 {
                scope.spawn(|| run(&pool, "somebody", &endless(Duration::from_millis(50))));
            }
        });
        fill(&pool);
        // Those that ran take a moment to end, far less than a pool takes to
        // let go what nobody misses.
        eventually("no more stand ready than may", || workers(&pool).len() <= 3);
        workers(&pool).len() == 3
    });
    fill(&pool);
    assert_eq!(workers(&pool).len(), 3);
}

// Death

fn a_killed_zygote_is_replaced_and_runs_go_on() {
    for reuse in [Reuse::Fresh, RESET] {
        // More of its workers go with it than a run tries.
        let pool = pool(5, 5, reuse);
        fill(&pool);
        run(&pool, "somebody", &echo());
        fill(&pool);
        let zygote = pool.zygote().unwrap();
        let theirs = workers(&pool);
        kill(zygote);
        for worker in theirs {
            eventually("its workers went with it", || is_gone(worker.pid));
        }
        for _ in 0..10 {
            let done = run(&pool, "somebody", &echo());
            assert_eq!(done.report.output, b"{}");
        }
        assert_ne!(pool.zygote().unwrap(), zygote);
    }
}

fn workers_killed_while_they_stand_ready_cost_no_run() {
    for prepared in [false, true] {
        let pool = pool(5, 5, Reuse::Fresh);
        try_run(&pool, "somebody", &echo(), prepared).unwrap();
        fill(&pool);
        let zygote = pool.zygote().unwrap();
        // The one that ran takes a moment to end.
        let ready = if prepared { 10 } else { 5 };
        eventually("just those are there that wait", || workers(&pool).len() == ready);
        let theirs = workers(&pool);
        for worker in theirs {
            kill(worker.pid);
        }
        for _ in 0..10 {
            let done = try_run(&pool, "somebody", &echo(), prepared).unwrap();
            assert_eq!(done.report.output, b"{}");
        }
        assert_eq!(pool.zygote().unwrap(), zygote, "it was no worker");
    }
}

fn a_worker_killed_in_its_run_costs_that_run_alone() {
    let pool = pool(0, 0, Reuse::Fresh);
    run(&pool, "somebody", &echo());
    eventually("its worker is gone", || workers(&pool).is_empty());
    std::thread::scope(|scope| {
        let lost = scope.spawn(|| try_run(&pool, "one", &endless(Duration::from_secs(60)), false));
        eventually("a worker is there", || !workers(&pool).is_empty());
        // It may not have begun yet. Then another takes its place, and is
        // killed in its turn.
        eventually("the run is lost", || {
            for worker in workers(&pool) {
                // SAFETY: a plain system call; it may have ended already.
                unsafe { libc::kill(worker.pid, libc::SIGKILL) };
            }
            lost.is_finished()
        });
        let failure = lost.join().unwrap().unwrap_err();
        let Fate::Vm(failure) = failure else { panic!("{failure:?}") };
        // Where it had not read its job yet, the socket is reset.
        assert_eq!(failure.kind, VmFailureKind::WorkerLost, "{failure:?}");
    });
    assert_eq!(run(&pool, "other", &echo()).report.output, b"{}");
}

fn a_dropped_pool_leaves_no_process() {
    let pool = pool(3, 3, RESET);
    run(&pool, "somebody", &echo());
    fill(&pool);
    let zygote = pool.zygote().unwrap();
    let theirs = workers(&pool);
    assert!(theirs.len() >= 3);
    drop(pool);
    assert!(is_gone(zygote));
    for worker in theirs {
        eventually("its workers are gone", || is_gone(worker.pid));
    }
}

// Whose a VM is

/// Nobody knows what a worker does that has served a run, and has the next one's link.
fn a_run_whose_order_died_unread_calls_over_another_link() {
    let executable = Some(executables::folder().join("forge-toolbroker"));
    let journal = Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("pool-journal"));
    let broker = Broker::start(&BrokerOptions { executable, journal, ..BrokerOptions::default() });
    let options = SupervisorOptions {
        trust: trust(),
        maxima: RunLimits::operator_maxima(),
        pool: PoolOptions { ready_max: 1, reuse: RESET, ..PoolOptions::default() },
    };
    let supervisor = Supervisor::new(options, Some(broker.unwrap())).unwrap();
    let program = signed(
        r#"(module
            (import "tool" "crypto.hash" (func $call (param i32 i32) (result i32)))
            (memory (export "memory") 1)
            (data (i32.const 0) "{\"algorithm\":\"sha256\",\"text\":\"abc\"}")
            (func (export "forge_run") (result i32)
                (i32.lt_s (call $call (i32.const 0) (i32.const 35)) (i32.const 1))))"#,
    );
    let order = Order {
        program,
        input: b"{}".to_vec(),
        principal: "a".into(),
        session: None,
        authority: Authority::Tools(vec![ToolName::parse("crypto.hash").unwrap()]),
        limits: RunLimits { wall_ms: 30_000, ..RunLimits::default() },
        prepare: false,
        events: true,
        // It is not called, and offered once more with the link.
        hosted: Some(HostedTools {
            server: "app".into(),
            tools: vec![HostedTool {
                name: "twice".into(),
                description: "Twice a number.".into(),
                input_schema: r#"{"type":"object"}"#.into(),
                output_schema: None,
            }],
        }),
    };
    let hosts = Mutex::new(Vec::new());
    let host = |calls| hosts.lock().unwrap().push(calls);
    let runs = |tell: &(dyn Fn(RunEvent) + Sync)| {
        let attendance = Attendance { tell: Some(tell), host: Some(&host), cancel: None };
        let report = supervisor.run_for(&order, &attendance).report;
        assert_eq!((report.end, report.tool_calls.len()), (RunEnd::Ok, 1), "{report:?}");
        report.vm
    };
    let opened = || {
        let text = supervisor.metrics(Patience::default()).unwrap();
        text.lines().find_map(|line| line.strip_prefix("forge_runs_total ")?.parse().ok())
    };
    let pool = supervisor.pool();
    assert_eq!(runs(&|_| ()), "fresh");
    fill(&pool);
    assert_eq!(runs(&|_| ()), "reset");
    fill(&pool);
    assert_eq!(opened(), Some(2));
    let standing = workers(&pool);
    for worker in &standing {
        // SAFETY: a plain system call; the process is the pool's.
        assert_eq!(unsafe { libc::kill(worker.pid, libc::SIGSTOP) }, 0);
    }
    let admitted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            runs(&|event| {
                let is_admitted = matches!(event, RunEvent::Admitted { .. });
                admitted.fetch_add(is_admitted.into(), Ordering::SeqCst);
            })
        });
        let mut served = None;
        eventually("one has its order", || {
            served = standing.iter().find(|worker| is_owed_bytes(worker.pid));
            served.is_some()
        });
        kill(served.unwrap().pid);
        assert_eq!(run.join().unwrap(), "fresh");
    });
    assert_eq!(admitted.into_inner(), 1, "to whoever is told it is one run");
    assert_eq!(opened(), Some(4));
    assert_eq!(hosts.into_inner().unwrap().len(), 4);
}

fn a_vm_that_is_reset_serves_one_tenant() {
    let pool = pool(1, 8, RESET);
    let vm = |tenant| run(&pool, tenant, &echo()).vm;
    assert_eq!(vm("a"), Vm::Fresh);
    assert_eq!(vm("a"), Vm::Reset);
    assert_eq!(vm("b"), Vm::Fresh);
    assert_eq!(vm("a"), Vm::Reset);
    assert_eq!(vm("b"), Vm::Reset);
    // Names that one might take for another's.
    for tenant in ["A", "a ", "", "ab"] {
        assert_eq!(vm(tenant), Vm::Fresh, "{tenant:?}");
    }
    // The same through a supervisor, in the report's word.
    let options = SupervisorOptions {
        trust: trust(),
        maxima: RunLimits { wall_ms: 60_000, ..RunLimits::default() },
        pool: PoolOptions { ready_min: 1, ready_max: 4, reuse: RESET, ..PoolOptions::default() },
    };
    let supervisor = Supervisor::new(options, None).unwrap();
    for (tenant, word) in [("a", "fresh"), ("a", "reset"), ("b", "fresh"), ("a", "reset")] {
        let request = Order {
            program: echo().program,
            input: b"1".to_vec(),
            principal: tenant.into(),
            session: None,
            authority: Authority::Tools(Vec::new()),
            limits: RunLimits { wall_ms: 60_000, ..RunLimits::default() },
            prepare: false,
            events: false,
            hosted: None,
        };
        let report = supervisor.run(&request).report;
        assert_eq!((report.end, report.vm), (RunEnd::Ok, word), "{tenant}: {report:?}");
    }
}

fn a_vm_is_put_back_soon_after_its_run_though_nothing_follows() {
    // What the program leaves is in neither its bytes nor its input.
    const LEFT: &str = "left by a run...";
    const MASK: u64 = 0x1122_3344_5566_7788;
    let masked =
        |at: usize| u64::from_le_bytes(LEFT.as_bytes()[at..at + 8].try_into().unwrap()) ^ MASK;
    let store = |at: usize| {
        let value = format!("(i64.xor (i64.const {:#x}) (i64.const {MASK:#x}))", masked(at));
        format!("(i64.store (i32.const {}) {value})", 4096 + at)
    };
    let leaves = format!("{} {} (i32.const 0)", store(0), store(8));
    let leaves = plain(&forge_module(r#"(memory (export "memory") 1)"#, &leaves));
    let is_there = |pool: &Pool| {
        workers(pool).iter().any(|worker| contains(&memory_of(worker.pid as u32), LEFT))
    };

    let unreset = pool(0, 0, Reuse::Fresh);
    let mut worker = unreset.make(false).unwrap();
    worker.carry_out(Run::Whole(&leaves), None, Patience::default()).unwrap();
    assert!(is_there(&unreset), "the search finds nothing");

    let resetting = pool(0, 1, RESET);
    run(&resetting, "a", &leaves);
    fill(&resetting);
    eventually("nothing of the run is left", || !is_there(&resetting));
    assert_eq!(run(&resetting, "a", &echo()).vm, Vm::Reset);
}

fn a_cancelled_run_is_given_no_worker() {
    let pool = pool(1, 1, RESET);
    fill(&pool);
    let before: Vec<i32> = workers(&pool).iter().map(|it| it.pid).collect();
    let (job, cancel) = (echo(), Cancel::new().unwrap());
    cancel.raise();
    let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None };
    let patience = Patience { until: None, cancel: Some(&cancel) };
    match pool.carry_out(&task, patience).unwrap_err().told().0 {
        Fate::Vm(failure) => assert_eq!(failure.kind, VmFailureKind::Cancelled),
        other => panic!("{other:?}"),
    }
    let after: Vec<i32> = workers(&pool).iter().map(|it| it.pid).collect();
    assert_eq!(after, before);
}

/// More is told than the link takes, and whoever is told takes longer than the
/// run may.
fn a_deadline_in_the_middle_of_an_event_is_a_deadline() {
    let pool = pool(1, 1, Reuse::Fresh);
    fill(&pool);
    let outputs = "(drop (call $output (i32.const 0) (i32.const 1000000)))".repeat(3);
    let module = forge_module(
        r#"(memory (export "memory") 16)"#,
        &format!("{outputs} (loop (br 0)) (i32.const 0)"),
    );
    let limits = RunLimits {
        wall_ms: 3_000,
        fuel: u64::MAX,
        output_bytes: OUTPUT_BYTES_MAX,
        ..RunLimits::default()
    };
    let job = job(signed(&module), limits);
    let job = Job { deadline: deadline_in(Duration::from_secs(3)), ..job };
    let heard = AtomicUsize::new(0);
    let tell = |what| {
        if let RunEvent::Output(bytes) = what {
            assert!(bytes.iter().all(|byte| *byte == 0), "nothing else is told as output");
            heard.fetch_add(bytes.len(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_secs(4));
        }
    };
    let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: Some(&tell) };
    let patience = Patience::until(Instant::now() + Duration::from_secs(20));
    let report = pool.carry_out(&task, patience).unwrap().report;
    assert_eq!(report.fate, Fate::Deadline);
    assert!(heard.into_inner() > 0);
}

fn an_order_of_any_kind_ends_a_workers_rest() {
    let pool = pool(1, 4, RESET);
    for round in 0..20u8 {
        let mut job = echo();
        job.input = vec![b'0' + round];
        // Its worker rests when this comes back.
        assert_eq!(run(&pool, "a", &job).report.output, job.input);
        let heard = Mutex::new(Vec::new());
        let tell = |what| heard.lock().unwrap().push(what);
        let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: Some(&tell) };
        let told = pool.carry_out(&task, Patience::default()).unwrap();
        assert_eq!((told.report.output, told.vm), (job.input.clone(), Vm::Reset));
        let heard = heard.into_inner().unwrap();
        assert!(heard.iter().any(|it| matches!(it, RunEvent::Output(_))), "{heard:?}");
        assert_eq!(run_prepared(&pool, "a", &job).report.output, job.input);
        assert_eq!(run_prepared(&pool, "a", &job).vm, Vm::Reset);
    }
}

fn a_vm_that_is_fresh_serves_one_run() {
    let pool = pool(1, 2, Reuse::Fresh);
    for prepared in [false, true] {
        for _ in 0..5 {
            assert_eq!(try_run(&pool, "a", &echo(), prepared).unwrap().vm, Vm::Fresh);
        }
    }
}

// Prepared programs

/// Destroying it takes longer than a run, and whoever waits for the result
/// would wait beside that.
fn a_vm_is_destroyed_when_its_result_has_been_told() {
    let pool = pool(0, 0, Reuse::Fresh);
    let done = run(&pool, "a", &echo());
    let worker = workers(&pool).pop().expect("its worker is there").pid;
    std::thread::sleep(Duration::from_millis(200));
    assert!(!is_gone(worker), "it ended by itself");
    drop(done);
    eventually("the worker is gone", || is_gone(worker));
    // Nor does it outlive its pool.
    let done = run(&pool, "a", &echo());
    let worker = workers(&pool).pop().expect("its worker is there").pid;
    drop(pool);
    eventually("the worker is gone with the pool", || is_gone(worker));
    drop(done);
}

fn a_prepared_program_answers_as_an_unprepared_one() {
    for reuse in [Reuse::Fresh, RESET] {
        let plain = pool(1, 1, Reuse::Fresh);
        let pool = pool(1, 16, reuse);
        for round in 0..3u8 {
            for (name, mut job) in mixture() {
                job.input = format!("[\"{name}\", {round}]").into();
                job.start.seed = [round; 32];
                let expected = essence(&run(&plain, "a", &job).report);
                let done = run_prepared(&pool, "a", &job);
                assert_eq!(essence(&done.report), expected, "{name}, round {round}, {reuse:?}");
                let again = reuse != Reuse::Fresh && round > 0;
                assert_eq!(done.vm, if again { Vm::Reset } else { Vm::Fresh }, "{name}");
            }
        }
    }
    // By a worker's own hand, so that it is certain what was prepared.
    let pool = pool(0, 0, Reuse::Fresh);
    let Job { load, start, program, deadline, .. } = echo();
    let mut worker = pool.make(false).unwrap();
    worker.prepare(&Prepare { load, program }, Patience::default()).unwrap();
    let job = PreparedJob { start, input: b"[1]".to_vec(), deadline, brokered: false };
    let report = worker.carry_out(Run::Prepared(&job), None, Patience::default()).unwrap();
    assert_eq!(report.output, b"[1]");
}

fn a_prepared_vm_is_for_its_tenant_program_and_limits_alone() {
    let pool = pool(1, 16, RESET);
    let job = echo();
    let vm = |tenant, job: &Job| run_prepared(&pool, tenant, job).vm;
    assert_eq!(vm("a", &job), Vm::Fresh);
    assert_eq!(vm("a", &job), Vm::Reset);
    // Another tenant.
    assert_eq!(vm("b", &job), Vm::Fresh);
    // Other limits, though of the same RAM.
    let mut frugal = job.clone();
    frugal.load.limits.fuel -= 1;
    assert_eq!(vm("a", &frugal), Vm::Fresh);
    // Another program.
    assert_eq!(vm("a", &mixture()[3].1), Vm::Fresh);
    // The same bytes by another signer's key.
    let other = forge_protocol::signature::SignerKey::from_secret(&[9; 32]);
    let mut known = (*admit(&job)).clone();
    known.signer = other.trust_key();
    let task = Task { tenant: "a", job: &job, broker: None, prepared: Some(&known), tell: None };
    assert_eq!(pool.carry_out(&task, Patience::default()).unwrap().vm, Vm::Fresh);
    // No preparation.
    assert_eq!(run(&pool, "a", &job).vm, Vm::Fresh);
    // And the first is still there.
    assert_eq!(vm("a", &job), Vm::Reset);
    assert_eq!(vm("b", &job), Vm::Reset);
}

fn a_prepared_run_is_held_against_its_own_grant() {
    for reuse in [Reuse::Fresh, RESET] {
        let pool = pool(1, 4, reuse);
        let granted = calling();
        let mut ungranted = granted.clone();
        ungranted.start.granted.clear();
        for _ in 0..2 {
            let report = run_prepared(&pool, "a", &granted).report;
            assert_eq!(ending(&report), &Ending::Returned(CallCode::Denied as i32));
            fill(&pool);
            let report = run_prepared(&pool, "a", &ungranted).report;
            let Ending::Rejected { kind: RejectKind::Import, detail } = ending(&report) else {
                panic!("{report:?}");
            };
            assert!(detail.contains("test.echo"), "{detail}");
            assert!(report.calls.is_empty());
            fill(&pool);
        }
    }
}

fn a_program_that_cannot_be_prepared_reports_its_proper_ending() {
    let broken = [
        (
            "data outside of memory",
            r#"(module (memory (export "memory") 1) (data (i32.const 70000) "x")
                (func (export "forge_run") (result i32) (i32.const 0)))"#,
        ),
        (
            "elements outside of their table",
            r#"(module (memory (export "memory") 1) (table 1 funcref)
                (func $f (export "forge_run") (result i32) (i32.const 0))
                (elem (i32.const 7) $f))"#,
        ),
        (
            "too much memory",
            r#"(module (memory (export "memory") 2000)
                (func (export "forge_run") (result i32) (i32.const 0)))"#,
        ),
        (
            "an import that nobody has",
            r#"(module (import "env" "abort" (func)) (memory (export "memory") 1)
                (func (export "forge_run") (result i32) (i32.const 0)))"#,
        ),
    ];
    for reuse in [Reuse::Fresh, RESET] {
        let plain = pool(1, 1, Reuse::Fresh);
        let pool = pool(1, 4, reuse);
        for (name, wat) in broken {
            let job = self::plain(wat);
            let expected = run(&plain, "a", &job).report;
            assert!(!matches!(ending(&expected), Ending::Returned(_)), "{name}: {expected:?}");
            for _ in 0..2 {
                let report = run_prepared(&pool, "a", &job).report;
                assert_eq!(essence(&report), essence(&expected), "{name}");
            }
            // Nobody goes on trying.
            fill(&pool);
        }
        assert_eq!(run_prepared(&pool, "a", &echo()).report.output, b"{}");
    }
}

// The checking mode

fn in_the_checking_mode_every_reset_of_a_mixture_is_proven() {
    let runs: usize = std::env::var("FORGE_PROVEN_RUNS").map_or(200, |runs| runs.parse().unwrap());
    let mixture = mixture();
    let plain = pool(1, 1, Reuse::Fresh);
    let expected: Vec<_> =
        mixture.iter().map(|(_, job)| essence(&run(&plain, "a", job).report)).collect();
    drop(plain);
    let pool = pool(1, 16, RESET);
    let mut proven = 0;
    for done in 0..runs {
        // Each program after each other one; every third run is prepared.
        let index = (done + done / mixture.len() * 3) % mixture.len();
        let (name, job) = &mixture[index];
        let Done { report, vm, .. } = try_run(&pool, "a", job, done % 3 == 0).unwrap();
        assert_eq!(essence(&report), expected[index], "{name}, run {done}");
        // A worker whose reset is not proven ends, and the next run in its
        // place is in a fresh VM.
        proven += usize::from(vm == Vm::Reset);
    }
    // One VM without a program, and one for each that was prepared.
    let vms = 1 + mixture.len();
    assert!(proven >= runs - vms, "{proven} of {runs} runs were in a VM whose reset was proven");
    eprintln!("CHECKING MODE: {runs} runs of {vms} VMs, every reset proven ({proven} seen so)");
}
