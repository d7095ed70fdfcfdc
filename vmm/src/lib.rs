//! The supervisor: admits a program, makes a virtual machine for it alone,
//! and reports what became of it.
//!
//! It distrusts programs, guests, grants and clients; of the broker it trusts
//! what a grant says. Deliberately absent are credentials: they live in the
//! toolbroker, another process, and nothing here could hold one.
//!
//! ```text
//!  cli, service
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
pub mod pool;
pub mod probe;
pub mod report;
pub mod service;
pub mod shortage;
pub mod supervisor;
pub mod trace;

pub use forge_worker::{cancel, jail, link, machine, process, sealed, vsock, worker, zygote};
