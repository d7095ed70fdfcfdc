//! What must hold for any bytes, one module for each parser of untrusted
//! bytes: the fuzz targets run these checks, and so does `forge-vmm`'s
//! test `corpora`, on stable, over the inputs kept in `fuzz/corpus`.
//!
//! A check panics where a promise is broken. It distrusts the parser and the
//! bytes alike. Deliberately absent are IO and randomness, so that an input
//! that fails once fails always.

pub mod boot_archive;
pub mod codec;
pub mod frame;
pub mod guest_session;
pub mod host_session;
pub mod signature;
pub mod vsock_device;

/// What became of an input. A corpus without an accepted one would never get
/// past the first check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was taken to its end.
    Accepted,
    /// It was refused, or ended early.
    Refused,
}

impl Outcome {
    /// `Accepted` if `accepted`.
    fn of(accepted: bool) -> Self {
        if accepted { Self::Accepted } else { Self::Refused }
    }
}

/// An input to start from. Its file is named after its outcome.
#[derive(Debug)]
pub struct Seed {
    /// What should become of it.
    pub outcome: Outcome,
    /// What is in it.
    pub name: &'static str,
    /// The input.
    pub bytes: Vec<u8>,
}

/// An input that is accepted.
fn accepted(name: &'static str, bytes: Vec<u8>) -> Seed {
    Seed { outcome: Outcome::Accepted, name, bytes }
}

/// An input that is refused.
fn refused(name: &'static str, bytes: Vec<u8>) -> Seed {
    Seed { outcome: Outcome::Refused, name, bytes }
}

/// One fuzz target.
#[derive(Debug)]
pub struct Target {
    /// Its name, and that of its corpus.
    pub name: &'static str,
    /// Runs one input.
    pub check: fn(&[u8]) -> Outcome,
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Seed>,
}

/// Every target.
pub const TARGETS: [Target; 7] = [
    Target { name: "boot_archive", check: boot_archive::check, seeds: boot_archive::seeds },
    Target { name: "codec", check: codec::check, seeds: codec::seeds },
    Target { name: "frame", check: frame::check, seeds: frame::seeds },
    Target { name: "guest_session", check: guest_session::check, seeds: guest_session::seeds },
    Target { name: "host_session", check: host_session::check, seeds: host_session::seeds },
    Target { name: "signature", check: signature::check, seeds: signature::seeds },
    Target { name: "vsock_device", check: vsock_device::check, seeds: vsock_device::seeds },
];

/// Takes one of the harness's own choices from the front of an input.
fn choice(data: &mut &[u8]) -> u8 {
    let Some((choice, rest)) = data.split_first() else { return 0 };
    *data = rest;
    *choice
}

/// Takes from the front of an input how the rest is to be cut: a count below
/// 16, and as many lengths.
fn cuts<'a>(data: &mut &'a [u8]) -> &'a [u8] {
    let count = usize::from(choice(data) % 16);
    let (cuts, rest) = data.split_at(count.min(data.len()));
    *data = rest;
    cuts
}

/// Cuts `stream` into pieces, their lengths taken from `lengths` in rotation;
/// into one piece if there are none.
fn pieces<'a>(mut stream: &'a [u8], lengths: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut lengths = lengths.iter().cycle();
    core::iter::from_fn(move || {
        let length = lengths.next().map_or(stream.len(), |length| usize::from(*length).max(1));
        let (piece, rest) = stream.split_at_checked(length).unwrap_or((stream, &[]));
        stream = rest;
        (!piece.is_empty()).then_some(piece)
    })
}
