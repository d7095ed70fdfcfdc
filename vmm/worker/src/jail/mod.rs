//! The jail around a worker: what is left to a process that a guest took over.
//!
//! It distrusts the worker, and the host's file system. The zygote goes
//! through these once, and every worker forked from it is born inside; only
//! a worker's [`worker`] part is put on by each for itself.
//!
//! ```text
//!  supervisor ── spawn ──▶ zygote: own user, pid, net, mount, ipc, uts namespaces
//!                            │ tree        an empty root, read-only
//!                            │ privileges  no capability, no way to one
//!                            │ landlock    no file, no TCP, no foreign signal
//!                            │ seccomp     the zygote's calls, no others
//!                            └─ fork ──▶ worker: its own Landlock domain,
//!                                        limits and filter
//! ```
//!
//! Deliberately absent: a path that is created or followed (a planted link
//! has nowhere to be planted), a helper with the set-uid bit, a network, and
//! any way out again.
//!
//! | module | what it holds |
//! |---|---|
//! | [`namespaces`] | starting a process in namespaces of its own |
//! | [`tree`] | the empty root |
//! | [`privileges`] | capabilities and resource limits |
//! | [`landlock`] | the ruleset that grants nothing |
//! | [`seccomp`] | the system-call filters, and a report of what they stop |
//! | [`rules`] | their tables: each call with its reason |
//! | `bpf` | a table as a program for the kernel |
//! | [`slot`] | the only slot of memory that a worker can still give its VM |
//! | [`worker`] | what each worker puts on for itself |
//! | [`cgroup`] | memory, processes and CPU time, by cgroup v2 |
//! | [`hardening`] | what is on, and what is weaker on this host |
//! | [`descriptors`] | what a process holds open |

mod bpf;
pub mod cgroup;
pub mod descriptors;
pub mod hardening;
pub mod landlock;
pub mod namespaces;
pub mod privileges;
pub mod rules;
pub mod seccomp;
pub mod slot;
pub mod tree;
pub mod worker;

pub use cgroup::{Group, GroupLimits};
pub use hardening::{Hardening, Weakness};
pub use namespaces::{Identity, Namespaces, Place, SpawnError, Spawned, kill, spawn};
pub use privileges::{AddressSpace, Limits};
pub use rules::Role;
pub use seccomp::Filter;
pub use slot::SealedSlot;
pub use tree::Tree;
pub use worker::{WorkerJail, WorkerJailError};
