//! The link between a guest and its worker: messages, and a session for each
//! side. Neither has IO; bytes go in with `receive` and come out of
//! `transmit`.
//!
//! ```text
//!            guest                                host
//!   Greeting ──────────── Hello ────────────▶ Greeting
//!   Waiting  ◀─────────── Hello ───────────── Ready
//!   Loading  ◀─────── Load, Program ───────── Loading
//!   Loaded   ──── Loaded, if asked for ─────▶ Loaded
//!   Feeding  ◀─────── Start, Input ────────── Running
//!   Running  ──── Call ─────────────────────▶          any number,
//!            ◀─── Settled ───────────────────          several in flight
//!            ──── Output, Log, Artifact ────▶
//!   Ended    ──── Ended ────────────────────▶ Ended
//! ```
//!
//! A program is delivered in two steps. `Load` and `Program` hold nothing of a
//! run, so a guest that has said `Loaded` stands at "prepared program" and can
//! be kept or copied for any run of that program. Where `Load` asks for no
//! announcement, `Start` and `Input` may follow at once. A program that cannot
//! be loaded ends the session by `Ended`, in the place of `Loaded` or later.
//!
//! A guest serves one run: after `Ended` it is destroyed, or put back to the
//! moment it sent `Hello` or `Loaded`.

mod error;
mod guest_session;
mod host_session;
mod message;
#[cfg(test)]
mod pair;

pub use error::{Misbehaviour, SessionError};
pub use guest_session::{GuestEvent, GuestSession, LoadOrder, RunOrder};
pub use host_session::{HostEvent, HostSession};
pub use message::{Call, Ended, Load, Settled, Start};
