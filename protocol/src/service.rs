//! The link between a client and the service: after both said `Hello`, one
//! [`Submit`] and one [`Finished`] in turn, any number of times. Closing the
//! connection cancels the run that it waits for.

use alloc::string::String;
use alloc::vec::Vec;

use crate::broker::Authority;
use crate::codec::{Decode, Encode};
use crate::guest::Artifact;
use crate::limits::RunLimits;

/// A run, as a client asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Submit {
    /// The signed program.
    pub program: Vec<u8>,
    /// Its input, JSON.
    pub input: Vec<u8>,
    /// Whose run it is.
    pub principal: String,
    /// The caller's session that it belongs to.
    pub session: Option<String>,
    /// What it may call.
    pub authority: Authority,
    /// What it may use.
    pub limits: RunLimits,
    /// Have VMs kept that have this program loaded already.
    pub prepare: bool,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Finished {
    /// The report, JSON: the object that `run --json` prints.
    pub report: Vec<u8>,
    /// The artifacts, in the order of the report's list.
    pub artifacts: Vec<Artifact>,
}
