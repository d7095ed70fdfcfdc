//! The program's random numbers: a stream of bytes that its seed fixes.
//!
//! ```text
//! block(i) = SHA-256("forge-random-1\0" ‖ seed[32] ‖ i as u64, little endian)
//! stream   = block(0) ‖ block(1) ‖ block(2) ‖ …
//! ```
//!
//! Every request takes the next bytes of the stream, across block ends, so
//! the bytes a program sees depend on the seed and on how many it took before,
//! never on how it divided its requests. The 55 bytes hashed for a block are
//! the most that SHA-256 takes in one compression.
//!
//! Whoever knows the seed knows every byte, and the host draws it: programs must
//! not make long-lived secrets from it.

use sha2::{Digest, Sha256};

const DOMAIN: &[u8; 15] = b"forge-random-1\0";
const BLOCK_BYTES: usize = 32;

/// The generator of one run.
#[derive(Clone)]
pub struct Random {
    seed: [u8; 32],
    next_block: u64,
    block: [u8; BLOCK_BYTES],
    /// How much of `block` has been taken.
    used: usize,
}

impl Random {
    /// A generator at the start of its stream.
    #[must_use]
    pub fn new(seed: [u8; 32]) -> Self {
        Self { seed, next_block: 0, block: [0; BLOCK_BYTES], used: BLOCK_BYTES }
    }

    /// Fills `out` with the next bytes of the stream.
    pub fn fill(&mut self, mut out: &mut [u8]) {
        while !out.is_empty() {
            if self.used == BLOCK_BYTES {
                let hash = Sha256::new_with_prefix(DOMAIN)
                    .chain_update(self.seed)
                    .chain_update(self.next_block.to_le_bytes());
                self.block = hash.finalize().into();
                // 2^64 blocks outlast any run.
                self.next_block = self.next_block.wrapping_add(1);
                self.used = 0;
            }
            let count = out.len().min(BLOCK_BYTES - self.used);
            let (now, later) = out.split_at_mut(count);
            now.copy_from_slice(&self.block[self.used..self.used + count]);
            self.used += count;
            out = later;
        }
    }
}

impl core::fmt::Debug for Random {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Random(block {})", self.next_block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn the_stream_is_the_documented_one() {
        let mut out = [0; 64];
        Random::new([7; 32]).fill(&mut out);
        for (block, index) in out.chunks(32).zip(0u64..) {
            let mut text = b"forge-random-1\0".to_vec();
            text.extend_from_slice(&[7; 32]);
            text.extend_from_slice(&index.to_le_bytes());
            assert_eq!(text.len(), 55);
            assert_eq!(block, &Sha256::digest(&text)[..]);
        }
    }

    #[test]
    fn how_requests_are_divided_changes_nothing() {
        let mut whole = vec![0; 200];
        Random::new([1; 32]).fill(&mut whole);
        let mut generator = Random::new([1; 32]);
        let mut pieces = vec![0; 200];
        for piece in pieces.chunks_mut(7) {
            generator.fill(piece);
        }
        assert_eq!(whole, pieces);
        let mut other = vec![0; 200];
        Random::new([2; 32]).fill(&mut other);
        assert_ne!(whole, other);
    }
}
