//! The jailed process around one virtual machine, and all that is in it.
//!
//! It is a crate of its own so that it can be an executable of its own: static
//! and small, with nothing in it of doors, configuration or tools. A worker is
//! a fork of it, and what a fork has to copy and to find again is this process
//! and no other; what a guest that broke out would find is no more than that.
//!
//! It distrusts the guest, and trusts its supervisor, which links the same
//! library for what the two have in common: the jail that one starts and the
//! other is in, and the link between them.
//!
//! ```text
//!  supervisor ── spawn ──▶ zygote ── fork ──▶ worker ──▶ machine    KVM, memory, one vCPU
//!       │                                       │ ─────▶ vsock      the one device
//!       │                                       │ or ──▶ process    the guest's program, without a VM
//!       └──────────────── link ─────────────────┘
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`zygote`] | the process that workers are forked from |
//! | [`worker`] | a worker's life, and a guest's |
//! | [`machine`] | the virtual machine |
//! | [`vsock`] | its device |
//! | [`process`] | the tier without a VM |
//! | [`jail`] | what is around them |
//! | [`link`] | messages over a socket, and [`cancel`] for who waits for them |
//! | [`sealed`] | files in memory that nobody can change |
//! | [`clock`] | what moments are told by |

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cancel;
pub mod clock;
pub mod jail;
pub mod link;
pub mod machine;
pub mod process;
pub mod sealed;
pub mod vsock;
pub mod worker;
pub mod zygote;
