//! Meaning: a text's vector is the weighted sum of its tokens' rows in a table
//! of int8, which `train/` makes and `data/table.bin` holds.
//!
//! Vectors that leave here are int8 with one scale, so that comparing two is
//! integer arithmetic: the same on every CPU, whatever instructions it has.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::text;

/// Numbers in a vector.
pub(crate) const DIMENSIONS: usize = 256;

const MAGIC: &[u8; 8] = b"forgetb1";
const HEAD_BYTES: usize = 16;

static BYTES: &[u8] = include_bytes!("../data/table.bin");

/// The table that is shipped.
pub(crate) static TABLE: LazyLock<Table> = LazyLock::new(|| Table::parse(BYTES));

/// Rows by token.
pub(crate) struct Table {
    /// Word pieces: those that begin a word, and `##` those that go on.
    tokens: HashMap<&'static [u8], u32>,
    scales: Vec<f32>,
    /// In two's complement.
    rows: &'static [[u8; DIMENSIONS]],
}

impl Table {
    /// # Panics
    /// On a table that `train/` did not make: the one that is compiled in is
    /// read by every test.
    fn parse(bytes: &'static [u8]) -> Self {
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
        };
        assert!(&bytes[..8] == MAGIC && number(12) == DIMENSIONS, "no table of this kind");
        let count = number(8);
        let (scales, rest) = bytes[HEAD_BYTES..].split_at(4 * count);
        let (rows, words) = rest.split_at(DIMENSIONS * count);
        let scales = scales
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect::<Vec<_>>();
        let rows = rows.as_chunks().0;
        let tokens = words
            .split(|byte| *byte == b'\n')
            .take(count)
            .zip(0..)
            .collect::<HashMap<&[u8], u32>>();
        assert!(tokens.len() == count, "a table has each token once");
        Self { tokens, scales, rows }
    }

    /// The pieces of one lower-case word: the longest that fits, again and
    /// again. A word that cannot be put together from pieces has none.
    fn pieces(&self, word: &str, mut each: impl FnMut(u32)) {
        const PIECES_MAX: usize = 24;
        let mut found = [0; PIECES_MAX];
        let mut count = 0;
        let mut piece = [0u8; 2 + PIECE_BYTES_MAX];
        piece[..2].copy_from_slice(b"##");
        let bytes = word.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            let longest = (bytes.len() - start).min(PIECE_BYTES_MAX);
            let fits = (1..=longest).rev().find_map(|length| {
                let token = &bytes[start..start + length];
                let token = if start == 0 {
                    token
                } else {
                    piece[2..2 + length].copy_from_slice(token);
                    &piece[..2 + length]
                };
                self.tokens.get(token).map(|row| (*row, length))
            });
            let Some((row, length)) = fits else { return };
            if count == PIECES_MAX {
                return;
            }
            found[count] = row;
            count += 1;
            start += length;
        }
        found[..count].iter().for_each(|row| each(*row));
    }

    /// Whether it has a word (in lower case) as a whole.
    pub(crate) fn has(&self, word: &str) -> bool {
        self.tokens.contains_key(word.as_bytes())
    }

    /// How much one word moves a text's vector: the length of its own.
    pub(crate) fn weight(&self, word: &str) -> f32 {
        let mut sum = [0.0; DIMENSIONS];
        self.pieces(word, |row| self.add(&mut sum, row, 1.0));
        norm(&sum)
    }

    fn add(&self, sum: &mut [f32; DIMENSIONS], row: u32, weight: f32) {
        let Some(values) = self.rows.get(row as usize) else { return };
        let weight = weight * self.scales[row as usize];
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += weight * f32::from(value.cast_signed());
        }
    }

    /// The vector of several texts with a weight each, of length 1 (or 0, if
    /// nothing in them is known).
    pub(crate) fn embed(&self, texts: &[(&str, f32)]) -> Vector {
        let mut rows: Vec<(u32, f32)> = Vec::new();
        for (text, weight) in texts {
            text::words(text, |word| self.pieces(word, |row| rows.push((row, *weight))));
        }
        // Sorted, so that equal texts have equal sums to the last bit.
        rows.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut sum = [0.0; DIMENSIONS];
        for same in rows.chunk_by(|a, b| a.0 == b.0) {
            let count: f32 = same.iter().map(|(_, weight)| weight).sum();
            // 1 + ln tf, and a straight line below one.
            let weight = if count > 1.0 { 1.0 + count.ln() } else { count };
            self.add(&mut sum, same[0].0, weight);
        }
        Vector::unit(sum)
    }
}

/// The longest token of the table is shorter.
const PIECE_BYTES_MAX: usize = 24;

fn norm(values: &[f32; DIMENSIONS]) -> f32 {
    values.iter().map(|value| value * value).sum::<f32>().sqrt()
}

/// A direction, before it is cut down to int8.
#[derive(Clone)]
pub(crate) struct Vector([f32; DIMENSIONS]);

impl Vector {
    fn unit(mut values: [f32; DIMENSIONS]) -> Self {
        let norm = norm(&values);
        if norm > 0.0 {
            values.iter_mut().for_each(|value| *value /= norm);
        }
        Self(values)
    }

    /// The direction between two.
    pub(crate) fn between(&self, other: &Self) -> Self {
        let mut sum = self.0;
        sum.iter_mut().zip(other.0).for_each(|(a, b)| *a += b);
        Self::unit(sum)
    }

    /// In int8.
    pub(crate) fn quantised(&self) -> Quantised {
        let largest = self.0.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        if largest == 0.0 {
            return Quantised { values: [0; DIMENSIONS], scale: 0.0 };
        }
        let scale = largest / 127.0;
        Quantised { values: self.0.map(|value| (value / scale).round() as i8), scale }
    }
}

/// A vector in int8, with the value of one step.
#[derive(Clone)]
pub(crate) struct Quantised {
    pub(crate) values: [i8; DIMENSIONS],
    pub(crate) scale: f32,
}

impl Quantised {
    /// One bit for each number: whether it is positive.
    pub(crate) fn signs(&self) -> Signs {
        let mut signs = [0; DIMENSIONS / 64];
        for (at, value) in self.values.iter().enumerate() {
            signs[at / 64] |= u64::from(*value > 0) << (at % 64);
        }
        signs
    }
}

/// The signs of a vector's numbers.
pub(crate) type Signs = [u64; DIMENSIONS / 64];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel;

    fn cosine(a: &str, b: &str) -> f32 {
        let (a, b) = (TABLE.embed(&[(a, 1.0)]).quantised(), TABLE.embed(&[(b, 1.0)]).quantised());
        kernel::dot(&a.values, &b.values) as f32 * a.scale * b.scale
    }

    #[test]
    fn what_means_the_same_is_nearer_than_what_does_not() {
        let near = cosine("book a flight to Paris", "airline ticket reservation");
        let far = cosine("book a flight to Paris", "square root of a matrix");
        assert!(near > far + 0.2, "{near} {far}");
    }

    #[test]
    fn a_text_is_nearest_to_itself_and_order_is_no_matter() {
        assert!(cosine("weather forecast", "weather forecast") > 0.99);
        assert!(cosine("weather forecast", "forecast, weather!") > 0.99);
    }

    #[test]
    fn nothing_known_has_no_direction() {
        for text in ["", "\0\u{7}", "日本語", "   "] {
            assert_eq!(TABLE.embed(&[(text, 1.0)]).quantised().scale, 0.0, "{text:?}");
        }
    }

    #[test]
    fn every_token_of_the_table_fits_the_piece_buffer() {
        let longest = TABLE.tokens.keys().map(|token| token.len()).max();
        assert!(longest.is_some_and(|longest| longest <= PIECE_BYTES_MAX), "{longest:?}");
        assert!(TABLE.rows.len() > 20_000);
    }
}
