//! hyperlight-host 0.16, with a guest that answers at once. A lower bound: no
//! program is checked, parsed or run in it.

use std::sync::Arc;
use std::time::Instant;

use forge_vmm::bench::memory::{available_kib, wait_until_given_back};
use forge_vmm::bench::{Case, Entry, Figure, Measure, stats};
use hyperlight_host::func::Registerable as _;
use hyperlight_host::sandbox::snapshot::Snapshot;
use hyperlight_host::{GuestBinary, HostFunctions, MultiUseSandbox, UninitializedSandbox};

use crate::{memory, said};

pub const ENTRIES: &[Entry] = &[
    entry("hyperlight_cold", "new sandbox, evolve, first call", cold),
    entry("hyperlight_from_snapshot", "new sandbox from a snapshot, first call", from_snapshot),
    entry("hyperlight_restore", "restore the snapshot after a call", restore),
    entry("hyperlight_restore_call", "restore the snapshot, one call", restore_call),
    entry("hyperlight_call", "one call of a warm sandbox", call),
    entry("hyperlight_call_host", "the same with one host call inside", call_host),
    Entry {
        name: "hyperlight_memory",
        group: "peers",
        about: "memory of one more sandbox from a shared snapshot",
        ratio_of: None,
        measure: Measure::Figure { unit: "KiB/VM", repetitions: 3, make: density },
    },
];

type Make = fn() -> Result<Box<dyn Case>, String>;

const fn entry(name: &'static str, about: &'static str, make: Make) -> Entry {
    Entry { name, group: "peers", about, ratio_of: None, measure: Measure::Sampled(make) }
}

/// The guest that answers at once, and the one that calls the host first.
static AT_ONCE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-0"));
static CALLS_HOST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-1"));

fn null() -> Result<i32, hyperlight_host::HyperlightError> {
    Ok(7)
}

fn sandbox(guest: &'static [u8]) -> Result<MultiUseSandbox, String> {
    let mut sandbox = UninitializedSandbox::new(GuestBinary::Buffer(guest), None).map_err(said)?;
    sandbox.register("Null", null).map_err(said)?;
    sandbox.evolve().map_err(said)
}

fn answer(sandbox: &mut MultiUseSandbox) -> Result<(), String> {
    match sandbox.call::<i32>("Answer", ()).map_err(said)? {
        42 => Ok(()),
        other => Err(format!("the guest answered {other}")),
    }
}

fn snapshot() -> Result<Arc<Snapshot>, String> {
    let mut sandbox = sandbox(AT_ONCE)?;
    answer(&mut sandbox)?;
    sandbox.snapshot().map_err(said)
}

fn host_functions() -> Result<HostFunctions, String> {
    let mut functions = HostFunctions::default();
    functions.register_host_function("Null", null).map_err(said)?;
    Ok(functions)
}

struct Cold;

fn cold() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(Cold))
}

impl Case for Cold {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        let mut sandbox = sandbox(AT_ONCE)?;
        answer(&mut sandbox)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

struct FromSnapshot(Arc<Snapshot>);

fn from_snapshot() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(FromSnapshot(snapshot()?)))
}

fn one_more(snapshot: &Arc<Snapshot>) -> Result<MultiUseSandbox, String> {
    let mut sandbox =
        MultiUseSandbox::from_snapshot(snapshot.clone(), host_functions()?, None).map_err(said)?;
    answer(&mut sandbox)?;
    Ok(sandbox)
}

impl Case for FromSnapshot {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        let _sandbox = one_more(&self.0)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

struct Restore(MultiUseSandbox, Arc<Snapshot>);

fn restore_call() -> Result<Box<dyn Case>, String> {
    let mut sandbox = sandbox(AT_ONCE)?;
    answer(&mut sandbox)?;
    let snapshot = sandbox.snapshot().map_err(said)?;
    Ok(Box::new(Restore(sandbox, snapshot)))
}

impl Case for Restore {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.0.restore(self.1.clone()).map_err(said)?;
        answer(&mut self.0)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

struct RestoreAlone(Restore);

fn restore() -> Result<Box<dyn Case>, String> {
    let mut sandbox = sandbox(AT_ONCE)?;
    answer(&mut sandbox)?;
    let snapshot = sandbox.snapshot().map_err(said)?;
    Ok(Box::new(RestoreAlone(Restore(sandbox, snapshot))))
}

impl Case for RestoreAlone {
    fn sample(&mut self) -> Result<u64, String> {
        let Restore(sandbox, snapshot) = &mut self.0;
        answer(sandbox)?;
        let snapshot = snapshot.clone();
        let started = Instant::now();
        sandbox.restore(snapshot).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

struct Call(MultiUseSandbox);

fn call() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(Call(sandbox(AT_ONCE)?)))
}

fn call_host() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(Call(sandbox(CALLS_HOST)?)))
}

impl Case for Call {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        answer(&mut self.0)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

/// Sandboxes that are alive at the same time.
const ALIVE: usize = 400;

struct Density {
    snapshot: Arc<Snapshot>,
    available_kib: Vec<f64>,
}

fn density() -> Result<Box<dyn Figure>, String> {
    Ok(Box::new(Density { snapshot: snapshot()?, available_kib: Vec::new() }))
}

impl Figure for Density {
    fn measure(&mut self) -> Result<f64, String> {
        wait_until_given_back()?;
        let mut alive = vec![one_more(&self.snapshot)?];
        let (own, available) = (memory::own_kib()?, available_kib()?);
        for _ in 0..ALIVE {
            alive.push(one_more(&self.snapshot)?);
        }
        let own = memory::own_kib()? - own;
        let fell = available - available_kib()?;
        self.available_kib.push(fell / ALIVE as f64);
        Ok(own / ALIVE as f64)
    }

    fn note(&self) -> Option<String> {
        let kib = stats::median(&self.available_kib);
        Some(format!(
            "PSS of this process; what is available fell by {kib:.0} KiB each, kernel included"
        ))
    }
}
