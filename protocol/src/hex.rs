//! Bytes as people read them.

use alloc::string::{String, ToString as _};

/// Bytes as hex, in lower case.
///
/// Every report of a run has three of these, so they are not written digit by
/// digit.
#[derive(Clone, Copy, Debug)]
pub struct Hex<'a>(pub &'a [u8]);

const DIGITS: &[u8; 16] = b"0123456789abcdef";
/// Bytes written at once.
const PIECE_BYTES: usize = 32;

impl core::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for piece in self.0.chunks(PIECE_BYTES) {
            let mut text = [0; 2 * PIECE_BYTES];
            for (digits, byte) in text.chunks_exact_mut(2).zip(piece) {
                digits[0] = DIGITS[usize::from(byte >> 4)];
                digits[1] = DIGITS[usize::from(byte & 15)];
            }
            // Nothing but digits is in it.
            f.write_str(core::str::from_utf8(&text[..2 * piece.len()]).unwrap_or_default())?;
        }
        Ok(())
    }
}

/// Bytes as a text of hex.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    Hex(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::vec::Vec;

    #[test]
    fn every_byte_has_two_digits_in_its_place() {
        for length in [0, 1, 31, 32, 33, 64, 256] {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let digit_by_digit: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex(&bytes), digit_by_digit);
        }
    }
}
