//! What is measured of us: one entry and one small struct each. Tool calls are
//! in [`toolcall`].

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::broker::Authority;
use forge_protocol::ending::RunEnd;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::service::Order;
use forge_protocol::worker::{Job, Reuse, Tier};

use super::fixture::{self, PRINCIPAL, Served};
use super::memory::{available_kib, wait_until_given_back};
use super::program::Program;
use super::quiet::wait_for_quiet;
use super::{Case, Entry, Figure, Formula, Measure, said, toolcall};
use crate::admission::KNOWN_MAX;
use crate::link::{Link, Patience};
use crate::machine::{self, Hypervisor, Image, PageMap, Watchdog};
use crate::pool::worker::{Run, Worker};
use crate::pool::{Pool, PoolOptions};
use crate::supervisor::Supervisor;
use crate::worker::{self, Guest, Standing};
use forge_client::blocking::Client;

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "boot",
        group: "boot",
        about: "nothing prepared: program in hand → admission, VM, guest, result",
        ratio_of: Some(Formula::sum(&[(1.0, "floor_kvm")])),
        measure: Measure::Sampled(boot),
    },
    Entry {
        name: "cold",
        group: "cold",
        about: "a zygote stands, nothing is pooled: a program that was admitted before → fork, VM, \
                jail, result",
        ratio_of: Some(Formula::sum(&[
            (1.0, "floor_kvm"),
            (1.0, "floor_fork"),
            (1.0, "floor_jail"),
        ])),
        measure: Measure::Sampled(cold),
    },
    Entry {
        name: "warm",
        group: "warm",
        about: "a fresh pooled VM, by a client of another process, of a program that is new to \
                both: submit → result",
        ratio_of: Some(WARM),
        measure: Measure::Sampled(warm),
    },
    Entry {
        name: "warm_prepared",
        group: "warm",
        about: "the same with the program prepared",
        ratio_of: Some(WARM_PREPARED),
        measure: Measure::Sampled(warm_prepared),
    },
    Entry {
        name: "warm_reset",
        group: "warm",
        about: "a pooled VM that was reset, by a client of another process, of a program that is \
                new to both: submit → result",
        ratio_of: Some(WARM),
        measure: Measure::Sampled(warm_reset),
    },
    Entry {
        name: "warm_reset_prepared",
        group: "warm",
        about: "the same with the program prepared",
        ratio_of: Some(WARM_PREPARED),
        measure: Measure::Sampled(warm_reset_prepared),
    },
    Entry {
        name: "reset",
        group: "reset",
        about: "put a VM back to its first state after a run",
        ratio_of: Some(Formula::sum(&[(1.0, "floor_reset")])),
        measure: Measure::Sampled(reset),
    },
    Entry {
        name: "throughput_reset",
        group: "throughput",
        about: "signed runs of one program in VMs that are reset, by clients of another process",
        ratio_of: None,
        measure: Measure::Figure { unit: "runs/s/core", repetitions: 5, make: throughput_reset },
    },
    Entry {
        name: "throughput_reset_prepared",
        group: "throughput",
        about: "the same with the program prepared",
        ratio_of: None,
        measure: Measure::Figure {
            unit: "runs/s/core",
            repetitions: 5,
            make: throughput_reset_prepared,
        },
    },
    Entry {
        name: "throughput_fresh",
        group: "throughput",
        about: "signed runs of one program in VMs that serve one each, by clients of another \
                process",
        ratio_of: Some(Formula::rate(&[
            (1.0, "floor_kvm"),
            (1.0, "floor_kvm_destroy"),
            (1.0, "floor_fork"),
        ])),
        measure: Measure::Figure { unit: "runs/s/core", repetitions: 5, make: throughput_fresh },
    },
    Entry {
        name: "density",
        group: "density",
        about: "memory of a VM that waits in a tool call, worker process and kernel included",
        ratio_of: None,
        measure: Measure::Figure { unit: "KiB/VM", repetitions: 3, make: density },
    },
];

/// Two hops, the signature checked on both sides, the program parsed, one
/// exit.
const WARM: Formula = Formula::sum(&[
    (2.0, "floor_socket"),
    (2.0, "floor_verify"),
    (1.0, "floor_parse"),
    (1.0, "floor_exit"),
]);
/// Two hops and one exit: both sides know the program.
const WARM_PREPARED: Formula = Formula::sum(&[(2.0, "floor_socket"), (1.0, "floor_exit")]);

pub(super) fn request(job: Job, authority: Authority) -> Order {
    Order {
        program: job.program,
        input: job.input,
        principal: PRINCIPAL.into(),
        session: None,
        authority,
        limits: job.load.limits,
        prepare: false,
        events: false,
        hosted: None,
    }
}

/// Waits until a supervisor in this process has nothing under way in others.
pub(super) fn quiet(supervisor: &Supervisor) {
    if let Some(zygote) = supervisor.pool().zygote() {
        wait_for_quiet(zygote);
    }
}

struct Boot(Program);

/// `boot`: no pool, no snapshot; `/dev/kvm` is opened, the VM made, the guest
/// booted and the program verified on the host and in the guest.
fn boot() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(Boot(Program::new()?)))
}

impl Case for Boot {
    fn sample(&mut self) -> Result<u64, String> {
        let job = self.0.next_job();
        let started = Instant::now();
        crate::admission::admit(&job.program, &self.0.trust, &job.load.limits)
            .map_err(|violation| violation.message)?;
        let served = worker::serve_and_keep(&job, &self.0.trust, None);
        let ns = started.elapsed().as_nanos() as u64;
        let (report, _guest) = served.map_err(|failure| failure.message)?;
        Program::check(&job, &report)?;
        Ok(ns)
    }
}

struct Cold {
    supervisor: Supervisor,
    program: Program,
}

fn cold() -> Result<Box<dyn Case>, String> {
    let program = Program::new()?;
    let supervisor = fixture::supervisor(&program, PoolOptions::default(), None)?;
    Ok(Box::new(Cold { supervisor, program }))
}

impl Case for Cold {
    fn sample(&mut self) -> Result<u64, String> {
        let job = self.program.next_job();
        let expected = super::program::answer(&job.input);
        let request = request(job, Authority::Tools(Vec::new()));
        let started = Instant::now();
        let result = self.supervisor.run(&request);
        let ns = started.elapsed().as_nanos() as u64;
        let report = result.report;
        if report.end != RunEnd::Ok || report.output != expected {
            return Err(format!("the benched run did not answer {expected:?}: {}", report.reason));
        }
        quiet(&self.supervisor);
        Ok(ns)
    }
}

/// Pooled VMs that serve one run each.
const FRESH: PoolOptions =
    PoolOptions { tier: Tier::Vm, ready_min: 2, ready_max: 8, reuse: Reuse::Fresh, group: None };
/// Pooled VMs that are reset; that it is right is the tests' to show.
pub(super) const RESET: PoolOptions = PoolOptions {
    tier: Tier::Vm,
    ready_min: 2,
    ready_max: 8,
    reuse: Reuse::Reset { prove_one_in: 0 },
    group: None,
};

struct Warm {
    client: Client,
    served: Served,
    program: Program,
    prepare: bool,
}

impl Warm {
    fn make(pool: PoolOptions, prepare: bool) -> Result<Box<dyn Case>, String> {
        let program = match prepare {
            true => Program::new()?,
            // Admission has forgotten each by the time it comes again.
            false => Program::under_names(2 * KNOWN_MAX as u8)?,
        };
        let served = Served::start(&program, pool)?;
        let client = served.client().map_err(said)?;
        Ok(Box::new(Self { client, served, program, prepare }))
    }
}

fn warm() -> Result<Box<dyn Case>, String> {
    Warm::make(FRESH, false)
}

fn warm_prepared() -> Result<Box<dyn Case>, String> {
    Warm::make(FRESH, true)
}

fn warm_reset() -> Result<Box<dyn Case>, String> {
    Warm::make(RESET, false)
}

fn warm_reset_prepared() -> Result<Box<dyn Case>, String> {
    Warm::make(RESET, true)
}

impl Case for Warm {
    fn sample(&mut self) -> Result<u64, String> {
        let submit = fixture::submission(&mut self.program, self.prepare);
        let took = fixture::timed_run(&mut self.client, &submit)?;
        // The pool makes what was taken, or puts it back.
        wait_for_quiet(self.served.process());
        Ok(took.as_nanos() as u64)
    }
}

struct Reset {
    // Before what it runs on.
    guest: Guest,
    standing: Standing,
    pages: PageMap,
    watchdog: Watchdog,
    program: Program,
}

fn reset() -> Result<Box<dyn Case>, String> {
    let failed = |failure: forge_protocol::worker::VmFailure| failure.message;
    let program = Program::new()?;
    let hypervisor = Hypervisor::open().map_err(said)?;
    let image = Image::built_in().map_err(said)?;
    let (watchdog, pages) = (Watchdog::new().map_err(said)?, PageMap::open().map_err(said)?);
    let ram_bytes = machine::ram_bytes(&RunLimits::default());
    let base = Guest::boot(&hypervisor, image, &program.trust, ram_bytes, &watchdog)
        .and_then(|guest| guest.into_base(&hypervisor, &pages))
        .map_err(failed)?;
    let mut guest = Guest::from_base(&hypervisor, &base, &watchdog).map_err(failed)?;
    let standing = guest.mark(&pages).map_err(failed)?;
    Ok(Box::new(Reset { guest, standing, pages, watchdog, program }))
}

impl Case for Reset {
    fn sample(&mut self) -> Result<u64, String> {
        let job = self.program.next_job();
        let report = self.guest.run(&job, None, &self.watchdog);
        Program::check(&job, &report)?;
        let started = Instant::now();
        self.guest.reset(&self.standing, &self.pages).map_err(|failure| failure.message)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

/// How long one repetition of a throughput is.
pub(super) const THROUGHPUT_TIME: Duration = Duration::from_secs(2);

struct Throughput {
    served: Served,
    prepare: bool,
}

impl Throughput {
    fn make(pool: PoolOptions, prepare: bool) -> Result<Box<dyn Figure>, String> {
        let pool = PoolOptions { ready_min: 4, ready_max: 16, ..pool };
        Ok(Box::new(Self { served: Served::start(&Program::new()?, pool)?, prepare }))
    }
}

fn throughput_reset() -> Result<Box<dyn Figure>, String> {
    Throughput::make(RESET, false)
}

fn throughput_reset_prepared() -> Result<Box<dyn Figure>, String> {
    Throughput::make(RESET, true)
}

fn throughput_fresh() -> Result<Box<dyn Figure>, String> {
    Throughput::make(FRESH, false)
}

impl Figure for Throughput {
    fn measure(&mut self) -> Result<f64, String> {
        let cores = std::thread::available_parallelism().map_err(said)?.get();
        let (over, runs) = (AtomicBool::new(false), AtomicU64::new(0));
        let client = || -> Result<(), String> {
            let mut program = Program::new()?;
            let mut client = self.served.client().map_err(said)?;
            while !over.load(Ordering::Relaxed) {
                let submit = fixture::submission(&mut program, self.prepare);
                fixture::timed_run(&mut client, &submit)?;
                runs.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let mut seconds = 0.0;
        std::thread::scope(|scope| {
            // Two for each core, so that none is idle while one waits.
            let clients: Vec<_> = (0..2 * cores).map(|_| scope.spawn(client)).collect();
            // What is measured is the service once it runs.
            std::thread::sleep(THROUGHPUT_TIME / 10);
            let (started, before) = (Instant::now(), runs.load(Ordering::Relaxed));
            std::thread::sleep(THROUGHPUT_TIME);
            seconds = started.elapsed().as_secs_f64();
            let after = runs.load(Ordering::Relaxed);
            over.store(true, Ordering::Relaxed);
            for client in clients {
                client.join().map_err(|_| "a client panicked")??;
            }
            Ok((after - before) as f64 / seconds / cores as f64)
        })
    }
}

/// VMs that wait at a time.
const WAITING: usize = 500;

struct Density {
    pool: Pool,
    program: Program,
}

fn density() -> Result<Box<dyn Figure>, String> {
    let program = toolcall::hashing()?;
    let pool = Pool::new(&program.trust, PoolOptions::default()).map_err(said)?;
    Ok(Box::new(Density { pool, program }))
}

impl Figure for Density {
    fn measure(&mut self) -> Result<f64, String> {
        measure_waiting(&self.pool, &mut self.program, WAITING)
    }
}

/// Has so many VMs wait in a tool call at a time, takes the memory that is
/// available, and has each of them finish. KiB of a VM.
///
/// # Errors
/// If one of them does not do as it should.
fn measure_waiting(pool: &Pool, program: &mut Program, count: usize) -> Result<f64, String> {
    let tool = ToolName::parse("crypto.hash").map_err(said)?;
    let patience = Patience::until(Instant::now() + Duration::from_secs(120));
    let mut waiting: Vec<(Worker, Link, Call)> = Vec::with_capacity(count);
    wait_until_given_back()?;
    // The first makes what all have in common.
    let mut before = 0.0;
    for index in 0..=count {
        if index == 1 {
            before = available_kib()?;
        }
        let mut job = program.next_job();
        job.input = b"1".to_vec();
        job.brokered = true;
        job.deadline = machine::deadline_in(Duration::from_secs(120));
        job.start.granted = vec![tool.clone()];
        let (ours, theirs) = UnixStream::pair().map_err(said)?;
        // As VMs are that a service has standing ready.
        let mut worker = pool.make(true).map_err(|failure| failure.message)?;
        worker
            .begin(Run::Whole(&job), Some(&theirs), patience)
            .map_err(|unbegun| forge_protocol::worker::VmFailure::from(unbegun).message)?;
        drop(theirs);
        let mut broker = Link::new(ours);
        let frame = broker.receive(|kind| kind == Kind::Call, patience).map_err(said)?;
        let call = forge_protocol::codec::decode(&frame.payload).map_err(said)?;
        waiting.push((worker, broker, call));
    }
    let kib = (before - available_kib()?) / count as f64;
    for (worker, broker, call) in &mut waiting {
        let settled = Settled {
            id: call.id,
            code: None,
            duration_ns: 1,
            body: b"{\"hex\":\"00\"}".to_vec(),
            redacted: false,
        };
        let mut bytes = Vec::new();
        frame::write_message(Kind::Settled, &settled, &mut bytes);
        broker.send(&bytes, patience).map_err(said)?;
        let report = worker.finish(patience).map_err(|lost| format!("{lost:?}"))?;
        if report.output != settled.body {
            return Err(format!("a VM that waited did not finish: {:?}", report.fate));
        }
    }
    Ok(kib)
}
