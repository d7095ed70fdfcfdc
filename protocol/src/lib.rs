//! What the two sides of a forge-vmm boundary agree on: frames, sessions,
//! signatures, names and limits.
//!
//! This room distrusts every byte it is handed: it comes from a guest, a
//! worker, a program's author or a file. Deliberately absent are IO, clocks,
//! randomness and `unsafe`, so that the guest, the host, the tests and the
//! fuzzers all drive the very same state machines.
//!
//! | module | what it holds |
//! |---|---|
//! | [`limits`] | every bound, in one place, with their relations asserted |
//! | [`frame`] | the fixed-size header around every message |
//! | [`codec`] | the one place that knows how a message becomes bytes |
//! | [`hex`] | bytes as people read them |
//! | [`handshake`] | which versions of the protocol can talk |
//! | [`name`] | tool names that have been checked |
//! | [`abi`] | the imports a program may declare, and the codes it gets back |
//! | [`ending`] | every way a run can end |
//! | [`signature`] | who wrote a program |
//! | [`run`] | what is said of a run on every link |
//! | [`tally`] | what a run leaves, counted against its limits |
//! | [`text`] | text from outside, where it is shown |
//! | [`guest`] | the link between a guest and its worker, both sides |
//! | [`broker`] | the link between a supervisor or worker and the toolbroker |
//! | [`worker`] | the link between the supervisor and a worker |
//! | [`service`] | the link between a client and the service |
//! | [`parts`] | what a run left, in parts on that link |
//! | [`platform`] | the machine a guest finds itself in |
//! | [`exposition`] | figures, as Prometheus reads them |
//! | `json` | JSON from outside; a feature, for the host |

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

extern crate alloc;

pub mod abi;
pub mod broker;
pub mod codec;
pub mod ending;
pub mod exposition;
pub mod frame;
pub mod guest;
pub mod handshake;
pub mod hex;
#[cfg(feature = "json")]
pub mod json;
pub mod limits;
pub mod name;
pub mod parts;
pub mod platform;
pub mod run;
pub mod service;
pub mod signature;
pub mod tally;
pub mod text;
pub mod worker;

pub use run::RunId;
