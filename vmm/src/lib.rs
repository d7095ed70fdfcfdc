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
