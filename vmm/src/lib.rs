//! The supervisor: admits a program, makes a virtual machine for it alone,
//! and reports what became of it.
//!
//! It distrusts programs, guests, grants and clients; of the broker it trusts
//! what a grant says. Deliberately absent are credentials: they live in the
//! toolbroker, another process, and nothing here could hold one.
//!
//! ```text
//!  service (and the command's own runs)
//!           ▼
//!        supervisor ─▶ admission     signature, declarations, limits
//!              │ ─────▶ broker        opens the run, says what is granted
//!              ▼
//!            pool                     VMs that stand ready
//!              ▼
//!           worker ───▶ machine       KVM, memory, one vCPU
//!              │ ─────▶ vsock         the one device
//!              │ or ──▶ process       the guest's program, without a VM
//!              ▼
//!           report                    one object, the same at every door
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`service`] | runs for clients: who may run, connections, questions |
//! | [`supervisor`] | one run from its order to its report |
//! | [`admission`] | what a program declares and who signed it, checked |
//! | [`broker`] | the toolbroker's process and the links to it |
//! | [`keeper`] | a broker that was lost is started anew |
//! | [`pool`] | workers that stand ready, made, given a run, put back or ended |
//! | [`isolation`] | which tier programs run in |
//! | [`report`] | what is told of a run |
//! | [`trace`] | where its time went |
//! | [`keys`] | key files, and randomness |
//! | [`probe`] | what this host can do |
//! | [`cpu_latency`] | CPUs that are kept from deep sleep while runs come |
//! | [`user`] | users of this host that processes run as |
//! | [`shortage`] | what gives way where memory is short |
//! | [`memory`] | memory that is free goes back to the host |
//! | [`bench`] | what a run costs beside its floors |
//!
//! Words that are used throughout. What becomes of a run on its way:
//!
//! - *order*: what a client asks for: a program, its input, its limits, what it may call.
//! - *job*: an order that was admitted, with the tools that are granted, as a worker gets it.
//! - [`pool::worker::Run`]: what a worker is handed: the job, or what it still needs of it if
//!   it has the program loaded.
//! - `Report`: what the worker says became of the run.
//! - [`report::RunReport`]: what is told of it at every door, once the broker has what it
//!   called on the disk.
//! - [`supervisor::RunResult`]: that report, and the artifacts.
//!
//! And beside that:
//!
//! - *principal*: on whose behalf a run is made; grants name it. The same one is called a
//!   *tenant* where it is about what is kept apart from others': VMs, places and bounds.
//! - *worker*: the process that carries a run out, with a VM in it or, in the tier `process`,
//!   without. Workers are forked from the *zygote*, a process that is in the jail already.
//! - *to stand ready*: a worker does when its VM has booted and waits for a program. The pool
//!   keeps such workers on *shelves*, by what they can be used for.
//!
//! Why a run may get no report, and what is done then, is a list in [`pool`].
//!
//! From the worker on it is the crate `forge-worker`, of which a worker's process is built;
//! `pool` carries that executable, and the rooms that both have in common are found here too.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod admission;
pub mod bench;
pub mod broker;
pub mod cpu_latency;
#[cfg(test)]
mod crowd;
pub mod isolation;
pub mod keeper;
pub mod keys;
mod locks;
pub mod memory;
pub mod pool;
pub mod probe;
pub mod report;
pub mod service;
pub mod shortage;
pub mod supervisor;
pub mod trace;
pub mod user;

pub use forge_worker::{cancel, jail, link, machine, process, sealed, vsock, worker, zygote};
