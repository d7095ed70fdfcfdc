//! Bytes as people read them.

use alloc::string::{String, ToString as _};
use alloc::vec::Vec;

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

/// The bytes that hex digits stand for, of either case; `None` for what is no whole number
/// of bytes, or has anything but digits.
#[must_use]
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = text.as_bytes().as_chunks();
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

/// The same of a text that stands for this many bytes.
#[must_use]
pub fn unhex_array<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    unhex(text)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn every_byte_has_two_digits_in_its_place() {
        for length in [0, 1, 31, 32, 33, 64, 256] {
            let bytes: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
            let digit_by_digit: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex(&bytes), digit_by_digit);
            assert_eq!(unhex(&digit_by_digit.to_uppercase()), Some(bytes));
        }
    }

    #[test]
    fn only_pairs_of_digits_are_hex() {
        for bad in ["0", "+0", "-1", " 1", "0x", "1_", "g0", "0١", "é", "00 00"] {
            assert_eq!(unhex(bad), None, "{bad:?}");
        }
        assert_eq!(unhex_array("0aFF"), Some([10, 255]));
        assert_eq!((unhex_array::<1>("0aff"), unhex_array::<3>("0aff")), (None, None));
    }
}
