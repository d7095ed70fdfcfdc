//! How a message becomes bytes. Nothing outside this module names the codec.
//!
//! bincode 2.0.1, standard configuration, with a limit on every decode and
//! left-over bytes refused. It is unmaintained (RUSTSEC-2025-0141), so the
//! choice is kept behind two functions: see `docs/decisions/0004-codec.md`.
//!
//! bincode accepts integers encoded longer than need be. Whatever is signed is
//! therefore signed as exact bytes, never as a re-encoding.

use alloc::vec::Vec;

pub use bincode::{BorrowDecode, Decode, Encode};

/// What a type needs that checks itself while it is decoded.
pub(crate) mod by_hand {
    use alloc::vec::Vec;

    use bincode::Decode;
    pub(crate) use bincode::de::{BorrowDecoder, Decoder};
    pub(crate) use bincode::enc::Encoder;
    pub(crate) use bincode::error::{DecodeError, EncodeError};
    pub(crate) use bincode::impl_borrow_decode;

    /// A list that has so many items at most. An item of a few bytes on the wire may be
    /// some blocks of memory, so that to count them later is too late.
    pub(crate) fn list<T: Decode<D::Context>, D: Decoder>(
        decoder: &mut D,
        items_max: usize,
    ) -> Result<Vec<T>, DecodeError> {
        let items = u64::decode(decoder)?;
        let items = usize::try_from(items).ok().filter(|items| *items <= items_max);
        let items = items.ok_or(DecodeError::Other("a list of more than there can be"))?;
        decoder.claim_container_read::<T>(items)?;
        let mut list = Vec::with_capacity(items);
        for _ in 0..items {
            decoder.unclaim_bytes_read(size_of::<T>());
            list.push(T::decode(decoder)?);
        }
        Ok(list)
    }
}

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
/// How much more memory than bytes a message may claim for its containers: an
/// element of one byte on the wire is a struct of some words in memory.
const CLAIM_FACTOR: usize = 64;
/// And how many bytes of memory more than its length it may at most. What is long is
/// output, artifacts, programs, which take in memory what they take on the wire; all
/// the records that a run, or a list of tools, may have beside take less than this.
const CLAIM_MORE_BYTES: usize = 16 * MIB;
/// What a message may claim is rounded up to one of these, since bincode takes its
/// limit as a type; more than the last it may not.
const CLAIM_BYTES: [usize; 7] = [64 * KIB, MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB, 512 * MIB];

/// Why bytes are not the message they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecError {
    /// The bytes do not decode: truncated, an unknown variant, a bad string.
    Malformed,
    /// The message decoded, and `bytes` more followed it.
    Leftover {
        /// How many bytes were left.
        bytes: usize,
    },
}

impl core::fmt::Display for CodecError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Malformed => write!(f, "the bytes do not decode"),
            Self::Leftover { bytes } => write!(f, "{bytes} bytes are left after the message"),
        }
    }
}

impl core::error::Error for CodecError {}

/// How much room more than it needs a message is given at a time, at most, in
/// bytes. By doubling alone the largest reports would take twice their size of
/// a worker's bounded address space.
const ROOM_BYTES_MAX: usize = 1024 * 1024;

/// Appends `message` to `out`.
pub fn encode_into<T: Encode>(message: &T, out: &mut Vec<u8>) {
    struct Appender<'a>(&'a mut Vec<u8>);
    impl bincode::enc::write::Writer for Appender<'_> {
        fn write(&mut self, bytes: &[u8]) -> Result<(), bincode::error::EncodeError> {
            let Self(out) = self;
            if out.capacity() - out.len() < bytes.len() {
                out.reserve_exact(bytes.len().max(out.len().min(ROOM_BYTES_MAX)));
            }
            out.extend_from_slice(bytes);
            Ok(())
        }
    }
    // Encoding into memory fails only for types we do not have (a RefCell
    // that is borrowed, a poisoned lock), so there is no error to hand on.
    let written = bincode::encode_into_writer(message, Appender(out), bincode::config::standard());
    debug_assert!(written.is_ok());
}

/// Decodes exactly one message that fills `bytes`.
///
/// # Errors
/// [`CodecError::Malformed`] or [`CodecError::Leftover`]. What is allocated on
/// the way is bounded by the length of `bytes`, whatever they claim: by 64 KiB or
/// 1,024 times as much, and by four times as much and 64 MiB.
pub fn decode<'a, T: BorrowDecode<'a, ()>>(bytes: &'a [u8]) -> Result<T, CodecError> {
    match claim(bytes.len()) {
        0 => decode_within::<T, { CLAIM_BYTES[0] }>(bytes),
        1 => decode_within::<T, { CLAIM_BYTES[1] }>(bytes),
        2 => decode_within::<T, { CLAIM_BYTES[2] }>(bytes),
        3 => decode_within::<T, { CLAIM_BYTES[3] }>(bytes),
        4 => decode_within::<T, { CLAIM_BYTES[4] }>(bytes),
        5 => decode_within::<T, { CLAIM_BYTES[5] }>(bytes),
        _ => decode_within::<T, { CLAIM_BYTES[6] }>(bytes),
    }
}

/// Which of [`CLAIM_BYTES`] a message of so many bytes may claim.
fn claim(bytes: usize) -> usize {
    let needed = bytes.saturating_mul(CLAIM_FACTOR).min(bytes.saturating_add(CLAIM_MORE_BYTES));
    CLAIM_BYTES.iter().position(|step| needed <= *step).unwrap_or(CLAIM_BYTES.len() - 1)
}

fn decode_within<'a, T: BorrowDecode<'a, ()>, const CLAIM_BYTES_MAX: usize>(
    bytes: &'a [u8],
) -> Result<T, CodecError> {
    let config = bincode::config::standard().with_limit::<CLAIM_BYTES_MAX>();
    match bincode::borrow_decode_from_slice::<T, _>(bytes, config) {
        Ok((message, used)) if used == bytes.len() => Ok(message),
        Ok((_, used)) => Err(CodecError::Leftover { bytes: bytes.len() - used }),
        Err(_) => Err(CodecError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{string::String, vec};

    #[test]
    fn left_over_bytes_are_refused() {
        let mut bytes = Vec::new();
        encode_into(&7u32, &mut bytes);
        bytes.push(0);
        assert_eq!(decode::<u32>(&bytes), Err(CodecError::Leftover { bytes: 1 }));
    }

    #[test]
    fn a_length_bomb_is_refused_without_the_allocation_it_asks_for() {
        // A vector that claims 2^40 elements, in nine bytes.
        let mut bytes = vec![253u8];
        bytes.extend_from_slice(&(1u64 << 40).to_le_bytes());
        assert_eq!(decode::<Vec<u64>>(&bytes), Err(CodecError::Malformed));
    }

    #[test]
    fn what_a_message_claims_is_bounded_by_its_length() {
        for bytes in [1, KIB, 16 * KIB + 1, 256 * KIB, 256 * KIB + 1, 300_000, MIB + 1, 256 * MIB] {
            let claimed = CLAIM_BYTES[claim(bytes)];
            assert!(claimed >= (CLAIM_FACTOR * bytes).min(bytes + CLAIM_MORE_BYTES), "{bytes}");
            assert!(claimed <= (64 * KIB).max(1024 * bytes), "{bytes}");
            assert!(claimed <= 4 * bytes + 64 * MIB, "{bytes}");
        }
        // All of these are there, and would take 2 MiB from a thousand bytes.
        let large = vec![None::<[u64; 256]>; 1_000];
        let mut bytes = Vec::new();
        encode_into(&large, &mut bytes);
        assert!(bytes.len() < 1_010);
        assert_eq!(decode::<Vec<Option<[u64; 256]>>>(&bytes), Err(CodecError::Malformed));
        bytes.clear();
        encode_into(&vec![7u8; 200 << 20], &mut bytes);
        assert_eq!(decode::<Vec<u8>>(&bytes).map(|vector| vector.len()), Ok(200 << 20));
    }

    #[test]
    fn borrowed_text_points_into_the_input() {
        let mut bytes = Vec::new();
        encode_into(&String::from("inventory.find"), &mut bytes);
        let text: &str = decode(&bytes).unwrap();
        assert!(bytes.as_ptr_range().contains(&text.as_ptr()));
    }
}
