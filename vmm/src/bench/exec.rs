//! Execution in the guest beside execution by the same library on the host:
//! what the VM costs a program while it computes.
//!
//! Both sides are `forge_guest_init::serve` with the same signed program, the
//! same limits and so the same engine, fuel and slices; on the host its stream
//! is memory. Only the time between the program's first instruction and its
//! end counts. What differs beside the VM is the build: the guest is always
//! built with the profile `guest` (fat LTO, one codegen unit), the host's side
//! with that of this executable, and `release` makes it some 5 % slower. So
//! the fair figure is
//!
//! ```text
//! cargo run --profile guest -p forge-vmm -- bench exec
//! ```
//!
//! and the note beside the figure says which build it was.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Instant;

use forge_guest_init::{LinkLost, Stream};
use forge_protocol::guest::{Ended, HostEvent, HostSession};
use forge_protocol::worker::{Fate, Job};

use super::program::{self, Program};
use super::{Entry, Figure, Measure, stats};
use crate::worker;

pub(super) const ENTRIES: &[Entry] = &[Entry {
    name: "exec_ratio",
    group: "exec",
    about: "a program that computes: time in the guest over time with wasmi on the host",
    ratio_of: None,
    measure: Measure::Figure { unit: "x", repetitions: 40, make: exec_ratio },
}];

struct ExecRatio {
    program: Program,
    guest_ms: Vec<f64>,
    host_ms: Vec<f64>,
}

fn exec_ratio() -> Result<Box<dyn Figure>, String> {
    Ok(Box::new(ExecRatio {
        program: Program::compute()?,
        guest_ms: Vec::new(),
        host_ms: Vec::new(),
    }))
}

impl Figure for ExecRatio {
    fn measure(&mut self) -> Result<f64, String> {
        let job = self.program.next_job();
        let expected = program::computed(&job.input);
        // In turn first and second, so that neither side always comes after
        // the other.
        let (guest, host) = if self.guest_ms.len().is_multiple_of(2) {
            let guest = in_guest(&job, &self.program, &expected)?;
            (guest, on_host(&job, &self.program, &expected)?)
        } else {
            let host = on_host(&job, &self.program, &expected)?;
            (in_guest(&job, &self.program, &expected)?, host)
        };
        self.guest_ms.push(guest);
        self.host_ms.push(host);
        Ok(guest / host)
    }

    fn note(&self) -> Option<String> {
        let (guest, host) = (stats::median(&self.guest_ms), stats::median(&self.host_ms));
        let profile = env!("FORGE_PROFILE");
        Some(format!("medians: guest {guest:.2} ms, host {host:.2} ms, host built as {profile}"))
    }
}

/// Milliseconds of execution in a guest.
fn in_guest(job: &Job, program: &Program, expected: &str) -> Result<f64, String> {
    let report = worker::serve(job, &program.trust, None);
    program::check_answer(&report.fate, &report.output, expected)?;
    Ok(report.timing.run_ns as f64 / 1e6)
}

/// Milliseconds of execution by the guest's library in this process.
fn on_host(job: &Job, program: &Program, expected: &str) -> Result<f64, String> {
    let run = Rc::new(RefCell::new(HostRun {
        session: HostSession::new(),
        order: Some(job.clone()),
        output: Vec::new(),
        ended: None,
    }));
    forge_guest_init::serve(Loopback(run.clone()), &program.trust, nanoseconds)
        .map_err(|error| error.to_string())?;
    let mut run = run.borrow_mut();
    let ended = run.ended.take().ok_or("the run on the host has no end")?;
    let ns = ended.run_ticks;
    program::check_answer(&Fate::Ended(ended), &run.output, expected)?;
    Ok(ns as f64 / 1e6)
}

/// The clock that the library is given here, in nanoseconds.
fn nanoseconds() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

struct HostRun {
    session: HostSession,
    order: Option<Job>,
    output: Vec<u8>,
    ended: Option<Ended>,
}

/// The host's end of the link, in the same thread.
struct Loopback(Rc<RefCell<HostRun>>);

impl Stream for Loopback {
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkLost> {
        let run = &mut *self.0.borrow_mut();
        run.session.receive(bytes).map_err(|_| LinkLost)?;
        while let Some(event) = run.session.poll_event() {
            match event {
                HostEvent::Output(bytes) => run.output.extend(bytes),
                HostEvent::Ended(ended) => run.ended = Some(ended),
                // The benched programs do none of these.
                HostEvent::Call(_) | HostEvent::Log(_) | HostEvent::Artifact(_) => {
                    return Err(LinkLost);
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), LinkLost> {
        let run = &mut *self.0.borrow_mut();
        // It waits once: for its order.
        let job = run.order.take().ok_or(LinkLost)?;
        run.session.load(&job.load, &job.program).map_err(|_| LinkLost)?;
        run.session.start(&job.start, &job.input).map_err(|_| LinkLost)?;
        take(&std::mem::take(run.session.transmit()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_computing_program_answers_what_the_host_computes() {
        let mut program = Program::compute().unwrap();
        for _ in 0..2 {
            let job = program.next_job();
            on_host(&job, &program, &program::computed(&job.input)).unwrap();
        }
    }

    #[test]
    fn a_wrong_answer_fails_the_bench() {
        let mut program = Program::compute().unwrap();
        let error = on_host(&program.next_job(), &program, "00000000").unwrap_err();
        assert!(error.contains("not \"00000000\""), "{error}");
    }
}
