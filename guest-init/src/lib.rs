//! The guest's one program, as a library: it receives a program, verifies who
//! wrote it, loads it, and then receives a run of it, refuses what the grant
//! does not name, and meters and runs it with wasmi.
//!
//! This room distrusts the program, and takes nothing from the host on trust
//! that could make it panic. Deliberately absent are secrets, a clock, a
//! source of randomness, files, sockets and `unsafe`: time is virtual, random
//! numbers come from the run's seed, and whatever leaves does so through the
//! one [`Stream`] that the caller brings.
//!
//! ```text
//!  Stream ─▶ link ─▶ run ─▶ shape ─▶ admission ─▶ engine ─▶ abi ─▶ link
//!            frames  order  counts   imports      wasmi     host functions
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`link`] | the protocol session over a [`Stream`]; when bytes are sent |
//! | `run` | one program and its run, from its arrival to its [`Ended`](forge_protocol::guest::Ended) |
//! | [`shape`] | how large and complex a module may be, checked before wasmi |
//! | `operators` | a function's operators, of which the next two need to know little |
//! | `respelled` | code that wasmi translates wrongly, spelled otherwise |
//! | `untranslatable` | code that wasmi translates wrongly, refused |
//! | `place` | which function an error is in |
//! | `admission` | imports and exports against the ABI, tools against the grant |
//! | [`engine`] | how wasmi is configured |
//! | `host` | what a running program has: budgets, calls, input, memory |
//! | `abi` | the functions of `tool`, `forge` and WASI |
//! | [`random`] | the seeded generator |
//! | [`clock`] | virtual time |
//! | `trap` | wasmi's errors as the protocol's endings |

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

extern crate alloc;

mod abi;
mod admission;
pub mod clock;
pub mod engine;
mod host;
pub mod link;
mod operators;
mod place;
pub mod random;
mod respelled;
mod run;
pub mod shape;
mod trap;
mod untranslatable;

pub use link::{LinkLost, ServeError, Stream};

use forge_protocol::ending::Ending;
use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;

/// Greets, receives one program and its run over `stream`, carries it out and
/// sends its end.
///
/// `trust` holds the keys programs are trusted by. `ticks` is a monotonic
/// counter of any unit (the time-stamp counter in a guest); it is read
/// five times and goes nowhere but into the two figures of `Ended`.
///
/// However the program ends, also if it is refused, that is `Ok`: its end has
/// been sent. When this returns, there is nothing left to do on the link.
///
/// # Errors
/// [`ServeError`]: the run could not be received or its end not be told.
pub fn serve<S: Stream + 'static>(
    stream: S,
    trust: &TrustKeys,
    ticks: fn() -> u64,
) -> Result<(), ServeError> {
    run::serve(stream, trust, ticks)
}

/// Whether a guest with these limits would take this module, were it signed
/// and its tools granted. For its author, who need not have signed it yet: no
/// guest calls this.
///
/// # Errors
/// [`Ending::Rejected`], as the run would end.
pub fn check(limits: &RunLimits, module: &[u8]) -> Result<(), Ending> {
    run::check(limits, module)
}
