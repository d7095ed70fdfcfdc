//! The journal: what was called, by whom, and what became of it, on the disk
//! before it matters.
//!
//! ```text
//!  calls ──append──▶ pending ──one commit for many──▶ SQLite, WAL
//!    │                           (the writer thread)        │
//!    └────────── waits only where it must ◀───durable───────┘
//! ```
//!
//! - The intent of a call whose effect is `write` is on the disk before the
//!   call is dispatched ([`Journal::intend`] waits for the commit).
//! - Everything else goes by group commit, at most [`GATHER`](writer) later,
//!   and is on the disk before the run's result leaves: a supervisor asks for
//!   that ([`Journal::sync`]) after a run that made calls.
//! - A broker that dies between intent and outcome leaves an intent without
//!   an end. Whoever opens the journal next closes it as unknown.
//! - No journal, no call: what cannot be recorded is refused.
//!
//! A journal is one file, and one broker at a time writes it: see [`slot`].
//! This room distrusts the disk (full, gone, slow) and a file that another
//! release wrote. Deliberately absent are the arguments and the results
//! themselves: they may hold what no file should, and a digest is enough to
//! say later that these were the arguments.
//!
//! | module | what it holds |
//! |---|---|
//! | [`record`] | the records |
//! | [`slot`] | which file is whose |
//! | [`store`] | the file: its tables, recovery, commits |
//! | [`writer`] | the thread that owns the file, and the way to it |
//! | [`read`] | what a reader makes of the files, while brokers write |

pub mod read;
pub mod record;
pub mod slot;
pub mod store;
pub mod writer;

pub use self::record::{CallFacts, Close, Event, Record};
pub use self::store::JournalError;
pub use self::writer::{Journal, Place, Unwritable};
