//! Many runs through one supervisor leave nothing behind: memory, descriptors,
//! threads and processes of the supervisor, its zygote and its workers stay as
//! they are from a tenth of the runs on.
//!
//! `FORGE_SOAK_RUNS` says how many (500; 100,000 by explicit command). Of a
//! fresh VM for each there are a tenth as many.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/processes.rs"]
mod processes;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use forge_protocol::broker::Authority;
use forge_protocol::ending::RunEnd;
use forge_protocol::limits::RunLimits;
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Reuse;
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};
use processes::Process;
use support::{forge_module, signed, signer};

fn main() -> ExitCode {
    // One test: two at a time would count each other's processes.
    support::main(claims![runs_leave_nothing_behind], claims![])
}

fn runs() -> usize {
    std::env::var("FORGE_SOAK_RUNS").map_or(500, |runs| runs.parse().unwrap())
}

/// What there is of everything.
#[derive(Clone, Copy, Debug)]
struct Stock {
    descriptors: usize,
    threads: u64,
    children: usize,
    anonymous_kib: u64,
    zygote_descriptors: usize,
    zygote_anonymous_kib: u64,
    workers: usize,
    workers_descriptors: usize,
    workers_anonymous_kib: u64,
}

impl Stock {
    /// Waits until the workers that are to be there are, and no others: a VM's
    /// end takes a moment.
    fn take(supervisor: &Supervisor, workers: usize) -> Self {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let me = Process::of(std::process::id() as i32).unwrap();
            let zygote = Process::of(supervisor.pool().zygote().unwrap()).unwrap();
            let children = Process::children_of(me.pid);
            let theirs = Process::children_of(zygote.pid);
            let zombies = children.iter().chain(&theirs).any(|it| it.zombie);
            // One that is still being made holds what it has yet to close.
            if theirs.len() == workers && !zombies && supervisor.pool().is_full() {
                return Self {
                    descriptors: me.descriptors(),
                    threads: me.threads,
                    children: children.len(),
                    anonymous_kib: me.anonymous_kib,
                    zygote_descriptors: zygote.descriptors(),
                    zygote_anonymous_kib: zygote.anonymous_kib,
                    workers: theirs.len(),
                    workers_descriptors: theirs.iter().map(Process::descriptors).sum(),
                    workers_anonymous_kib: theirs.iter().map(|it| it.anonymous_kib).sum(),
                };
            }
            assert!(Instant::now() < until, "{workers} workers, but {theirs:#?} of {children:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Memory may come and go by some pages.
    fn assert_flat(&self, before: &Self, workers_stay: bool) {
        let counts = |it: &Self| {
            (
                it.descriptors,
                it.threads,
                it.children,
                it.zygote_descriptors,
                it.workers,
                it.workers_descriptors,
            )
        };
        assert_eq!(counts(self), counts(before), "{self:#?} was {before:#?}");
        let mut memory = vec![
            ("supervisor", self.anonymous_kib, before.anonymous_kib),
            ("zygote", self.zygote_anonymous_kib, before.zygote_anonymous_kib),
        ];
        if workers_stay {
            memory.push(("workers", self.workers_anonymous_kib, before.workers_anonymous_kib));
        }
        for (who, now, then) in memory {
            assert!(now <= then + 1024, "{who}: {now} KiB, was {then}: {self:#?}");
        }
    }
}

fn runs_leave_nothing_behind() {
    // Its one VM in this mode waits between runs.
    soak(Reuse::Reset { prove_one_in: 20 }, runs(), 2);
    soak(Reuse::Fresh, runs() / 10, 1);
}

fn soak(reuse: Reuse, runs: usize, workers: usize) {
    let options = SupervisorOptions {
        trust: TrustKeys::new([signer().trust_key()]).unwrap(),
        maxima: limits(),
        pool: PoolOptions { ready_min: 1, ready_max: 1, reuse, ..PoolOptions::default() },
    };
    let supervisor = Supervisor::new(options, None).unwrap();
    // A little of everything: output, a log record, an artifact, memory.
    let program = signed(&forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "text/plain")"#,
        r#"(drop (call $output (i32.const 0) (i32.const 1000)))
           (call $log (i32.const 2) (i32.const 0) (i32.const 10))
           (drop (memory.grow (i32.const 3)))
           (memory.fill (i32.const 65536) (i32.const 7) (i32.const 131072))
           (i32.const 0)"#,
    ));
    let request = Order {
        program,
        input: b"{}".to_vec(),
        principal: "soak".into(),
        session: None,
        authority: Authority::Tools(Vec::new()),
        limits: limits(),
        prepare: false,
        events: false,
        hosted: None,
    };
    let began = Instant::now();
    let mut early = None;
    for done in 1..=runs {
        let report = supervisor.run(&request).report;
        assert_eq!(report.end, RunEnd::Ok, "run {done}: {report:#?}");
        if done % (runs / 10).max(1) == 0 {
            let stock = Stock::take(&supervisor, workers);
            match &early {
                None => early = Some(stock),
                Some(early) => stock.assert_flat(early, reuse != Reuse::Fresh),
            }
            eprintln!("{done} runs, {reuse:?}: {stock:?}");
        }
    }
    eprintln!("{runs} runs, {reuse:?}, in {:?}", began.elapsed());
}

/// An emulated CPU takes its time.
fn limits() -> RunLimits {
    RunLimits { wall_ms: 30_000, ..RunLimits::default() }
}
