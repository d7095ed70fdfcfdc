//! What is measured of us: one entry and one small struct each.

use std::time::Instant;

use super::program::Program;
use super::{Case, Entry, Formula, Measure};
use crate::{admission, worker};

pub(super) const ENTRIES: &[Entry] = &[Entry {
    name: "boot",
    group: "boot",
    about: "nothing prepared: program in hand → admission, VM, guest, result",
    ratio_of: Some(Formula::sum(&[(1.0, "floor_kvm")])),
    measure: Measure::Sampled(boot),
}];

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
        let admitted = admission::admit(&job.program, &self.0.trust, &job.load.limits)
            .map_err(|violation| violation.message)?;
        let report = worker::serve(&job, &self.0.trust, None);
        let ns = started.elapsed().as_nanos() as u64;
        drop(admitted);
        Program::check(&job, &report)?;
        Ok(ns)
    }
}
