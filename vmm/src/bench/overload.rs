//! One tenant offers ten times what a service takes, and another is served:
//! how long its runs take then, over how long they take alone.
//!
//! Both run the program that computes, on as many runs at once as there are
//! cores. Whoever is refused comes again when it was told to. Everything that
//! comes back is checked: admitted runs by their output, refused ones by their
//! kind.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forge_client::blocking::Client;
use forge_protocol::ending::{Refusal, RunEnd};
use forge_protocol::service::Order;
use serde_json::Value;

use super::cases::RESET;
use super::fixture::{self, Served};
use super::program::{self, Program};
use super::{Entry, Figure, Measure, said, stats};
use crate::locks::lock;
use crate::pool::PoolOptions;

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "overload_p50",
        group: "overload",
        about: "a tenant's runs while another offers ten times what the service takes, over the \
                same alone: medians",
        ratio_of: None,
        measure: Measure::Figure { unit: "x", repetitions: 3, make: p50 },
    },
    Entry {
        name: "overload_p99",
        group: "overload",
        about: "the same: 99 of 100",
        ratio_of: None,
        measure: Measure::Figure { unit: "x", repetitions: 3, make: p99 },
    },
];

/// What each run computes: some milliseconds.
const ROUNDS: u32 = 100_000;
/// How many times what there is room for is offered.
const TIMES: usize = 10;
/// Runs of the second tenant in each half of a repetition.
const RUNS: usize = 100;
/// Places in the queue for each run at once.
const QUEUE_RUNS: usize = 3;

struct Overload {
    served: Served,
    /// What there is room for.
    places: usize,
    percent: usize,
    note: String,
}

fn p50() -> Result<Box<dyn Figure>, String> {
    Overload::make(50)
}

fn p99() -> Result<Box<dyn Figure>, String> {
    Overload::make(99)
}

/// What became of the flood.
#[derive(Default)]
struct Flood {
    over: AtomicBool,
    admitted: AtomicU64,
    refused_us: Mutex<Vec<f64>>,
}

impl Overload {
    fn make(percent: usize) -> Result<Box<dyn Figure>, String> {
        let cores = std::thread::available_parallelism().map_err(said)?.get();
        let places = cores + QUEUE_RUNS * cores;
        let config = format!(
            "[service]\nruns_max = {cores}\nqueue_max = {}\nqueue_wait_ms = 60000\n\
             principal_runs_max = {}\n",
            QUEUE_RUNS * cores,
            places - 1
        );
        let pool = PoolOptions { ready_min: cores, ready_max: places, ..RESET };
        let served = Served::start_with(&Program::compute_for(ROUNDS)?, pool, &config)?;
        Ok(Box::new(Self { served, places, percent, note: String::new() }))
    }

    /// Microseconds of each of the second tenant's runs, which all succeed.
    fn second(&self) -> Result<Vec<f64>, String> {
        let mut program = Program::compute_for(ROUNDS)?;
        let mut client = self.served.client().map_err(said)?;
        let mut took = Vec::with_capacity(RUNS);
        for _ in 0..RUNS {
            let (time, end) = offer(&mut client, &mut program, "second")?;
            match end {
                End::Admitted => took.push(time.as_secs_f64() * 1e6),
                End::Refused { refusal, .. } => {
                    return Err(format!("its run was refused: {}", refusal.as_str()));
                }
            }
        }
        Ok(stats::sorted(&took))
    }

    /// One client of the tenant that floods.
    fn flood(&self, flood: &Flood) -> Result<(), String> {
        let mut program = Program::compute_for(ROUNDS)?;
        let mut client = self.served.client().map_err(said)?;
        while !flood.over.load(Ordering::Relaxed) {
            let (time, end) = offer(&mut client, &mut program, "flood")?;
            match end {
                End::Admitted => {
                    flood.admitted.fetch_add(1, Ordering::Relaxed);
                }
                End::Refused { again, .. } => {
                    let us = time.as_secs_f64() * 1e6;
                    lock(&flood.refused_us).push(us);
                    std::thread::sleep(again);
                }
            }
        }
        Ok(())
    }
}

/// How a run ended that was offered.
enum End {
    Admitted,
    Refused { refusal: Refusal, again: Duration },
}

/// Offers one run, and holds what comes back against what may.
fn offer(
    client: &mut Client,
    program: &mut Program,
    principal: &str,
) -> Result<(Duration, End), String> {
    let order = fixture::submission(program, false);
    let order = Order { principal: principal.to_owned(), ..order };
    let started = Instant::now();
    let finish = client.run(&order).map_err(said)?;
    let took = started.elapsed();
    let report: Value = serde_json::from_slice(&finish.report).map_err(said)?;
    let wrong = || format!("a run under overload ended as none may: {report}");
    match report["status"].as_str() {
        Some("ok") if report["output"] == program::computed_in(&order.input, ROUNDS).as_str() => {
            Ok((took, End::Admitted))
        }
        Some("refused") => {
            let end = RunEnd::of_kind(report["kind"].as_str().unwrap_or_default());
            let again = report["retry_after_ms"].as_u64().filter(|it| *it > 0);
            let (Some(RunEnd::Refused(refusal)), Some(again)) = (end, again) else {
                return Err(wrong());
            };
            if !matches!(refusal, Refusal::TooManyRuns | Refusal::Overloaded) {
                return Err(wrong());
            }
            Ok((took, End::Refused { refusal, again: Duration::from_millis(again) }))
        }
        _ => Err(wrong()),
    }
}

impl Figure for Overload {
    fn measure(&mut self) -> Result<f64, String> {
        let alone = self.second()?;
        let flood = Flood::default();
        let mut memory = (0, 0);
        let beside = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..TIMES * self.places)
                .map(|_| {
                    scope.spawn(|| {
                        let flooded = self.flood(&flood);
                        // One that cannot go on has all end.
                        flood.over.fetch_or(flooded.is_err(), Ordering::Relaxed);
                        flooded
                    })
                })
                .collect();
            // Every client has been admitted or refused once.
            let has_begun = || {
                let refused = lock(&flood.refused_us).len();
                refused + flood.admitted.load(Ordering::Relaxed) as usize >= clients.len()
            };
            while !has_begun() && !flood.over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            memory.0 = resident_kib(self.served.process())?;
            let beside = self.second();
            memory.1 = resident_kib(self.served.process())?;
            flood.over.store(true, Ordering::Relaxed);
            for client in clients {
                client.join().map_err(|_| "a client panicked")??;
            }
            beside
        })?;
        let refused = flood.refused_us.into_inner().unwrap_or_else(PoisonError::into_inner);
        let refused = stats::sorted(&refused);
        let ms = |sorted: &[f64], percent| stats::percentile(sorted, percent) / 1000.0;
        self.note = format!(
            "alone {:.1} ms (p99 {:.1}), beside {} clients {:.1} ms (p99 {:.1}); of them {} runs \
             admitted and {} refused, in {:.2} ms (p99 {:.2}); service {} KiB, {} KiB after",
            ms(&alone, 50),
            ms(&alone, 99),
            TIMES * self.places,
            ms(&beside, 50),
            ms(&beside, 99),
            flood.admitted.load(Ordering::Relaxed),
            refused.len(),
            ms(&refused, 50),
            ms(&refused, 99),
            memory.0,
            memory.1,
        );
        Ok(stats::percentile(&beside, self.percent) / stats::percentile(&alone, self.percent))
    }

    fn note(&self) -> Option<String> {
        Some(self.note.clone())
    }
}

/// What of a process's own memory is in RAM, in KiB.
fn resident_kib(pid: i32) -> Result<u64, String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(said)?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse().ok());
    kib.ok_or_else(|| format!("the kernel does not say what {pid} uses"))
}
