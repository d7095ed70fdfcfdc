//! How a credential may be spelled in what a server says.
//!
//! There are two ways to meet an encoding. One that spells each byte by itself
//! (percent, JSON and HTML escapes) is undone in the text, in whatever mixture:
//! [`Plain`]. One that spells the value as a whole (hex, base64) is done to
//! the value: [`spellings`]. White space is left out of what is undone, so
//! that a value broken into lines is one all the same.
//!
//! A value may look escaped itself (`p%40ssword`, `CORP\reader`). What undoes the
//! escapes of a text undoes the value's own as well, so that such a value is also
//! looked for without them, and a text is undone as much further ([`undone`]).
//! Its end may be half an escape that what stands behind it makes whole, and its
//! beginning the other half of one (`%4` and `1`): what is left of it then is looked
//! for as well, where there is such an escape beside it ([`torn`]).
//!
//! # Base64 at any place
//! Base64 spells three bytes in four characters, so a value that stands
//! somewhere in a longer text is spelled in one of three ways, by where it
//! begins. In each there are characters at both ends that depend on what
//! stands beside the value; those between are the value's alone, and they are
//! what is looked for.
//!
//! Deliberately absent is anything that takes a key, a compression or a
//! decision to hide: a server that wants to tell its own credential can.

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use zeroize::Zeroizing;

use super::SECRET_BYTES_MIN;

/// A longer value is looked for in UTF-8 alone: each encoding more takes as much memory.
const WIDE_BYTES_MAX: usize = 256;
/// A shorter spelling than this would meet innocent text.
const SPELLING_BYTES_MIN: usize = 10;
/// How often an escape may itself be escaped.
pub(super) const ESCAPES_DEEP_MAX: usize = 3;
/// The longest entity, with its `&` and `;`.
const ENTITY_BYTES_MAX: usize = 10;
/// `\u0041`.
const UNIT_BYTES: usize = 6;
/// No escape is longer, and no half of one: two of JSON's, for one character.
const ESCAPE_BYTES_MAX: usize = 12;
/// Entities with a name.
const ENTITIES: [(&str, char); 5] =
    [("amp", '&'), ("lt", '<'), ("gt", '>'), ("quot", '"'), ("apos", '\'')];

/// What to look for where `value` must not be. The value itself is the first.
pub(super) fn spellings(value: &str) -> Vec<Zeroizing<Vec<u8>>> {
    let mut all = vec![Zeroizing::new(value.as_bytes().to_vec())];
    let mut add = |spelling: Zeroizing<Vec<u8>>| {
        if spelling.len() >= SPELLING_BYTES_MIN && !all.contains(&spelling) {
            all.push(spelling);
        }
    };
    for bytes in encoded(value) {
        let hex = Zeroizing::new(crate::hex(&bytes));
        add(Zeroizing::new(hex.to_ascii_uppercase().into_bytes()));
        add(Zeroizing::new(hex.as_bytes().to_vec()));
        for before in 0..3 {
            let bits = before * 8..(before + bytes.len()) * 8;
            let mut shifted = Zeroizing::new(vec![0; before]);
            shifted.extend_from_slice(&bytes);
            // Characters of six bits that are the value's alone.
            let own = bits.start.div_ceil(6)..bits.end / 6;
            for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
                let spelled = Zeroizing::new(engine.encode(&*shifted));
                add(Zeroizing::new(spelled.as_bytes()[own.clone()].to_vec()));
            }
        }
        add(bytes);
    }
    all
}

/// Its bytes in the encodings that texts have: UTF-8, UTF-16 in both orders, and, where
/// it can be written so and is another, Latin-1.
fn encoded(value: &str) -> Vec<Zeroizing<Vec<u8>>> {
    let wide = |bytes_of: fn(u16) -> [u8; 2]| value.encode_utf16().flat_map(bytes_of).collect();
    let latin: Option<Vec<u8>> = value.chars().map(|it| u8::try_from(u32::from(it)).ok()).collect();
    let mut all = vec![value.as_bytes().to_vec()];
    if value.len() <= WIDE_BYTES_MAX {
        all.extend([wide(u16::to_le_bytes), wide(u16::to_be_bytes)]);
    }
    all.extend(latin.filter(|_| !value.is_ascii()));
    all.into_iter().map(Zeroizing::new).collect()
}

/// A value as it comes out of escapes that stand for a character and name it by one
/// byte, as Python's `ascii` and JavaScript write it (`\xe4`): without white space, the
/// first 256 characters as a byte each. `None` if it is the value.
pub(super) fn narrow(value: &str) -> Option<Zeroizing<Vec<u8>>> {
    let is_one = |it: &char| ('\u{80}'..='\u{ff}').contains(it);
    value.chars().any(|it| is_one(&it)).then(|| {
        let mut bytes = Zeroizing::new(Vec::with_capacity(value.len()));
        for character in value.chars().filter(|it| !it.is_ascii_whitespace()) {
            match u8::try_from(u32::from(character)) {
                Ok(byte) => bytes.push(byte),
                Err(_) => bytes.extend(Escaped::of(character).iter()),
            }
        }
        bytes
    })
}

/// What a value comes to where it stands in a text that is undone: the value
/// without what looks like an escape in it, and how often it was undone for that.
pub(super) fn undone(value: &str) -> (Zeroizing<Vec<u8>>, usize) {
    let (mut last, mut deep) = (Zeroizing::default(), 0);
    Plain::each(value.as_bytes(), ESCAPES_DEEP_MAX, |plain| {
        deep += 1;
        last = plain.bytes.clone();
    });
    (last, deep)
}

/// What is left of a value without what may belong to an escape that only its
/// neighbours make whole.
pub(super) struct Torn {
    pub(super) left: Zeroizing<Vec<u8>>,
    /// At which of its ends something is missing.
    pub(super) ends: Ends,
}

/// Ends of a value.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    first: bool,
    last: bool,
}

/// All that may be left of a value in a text that is undone.
pub(super) fn torn(value: &str) -> Vec<Torn> {
    let squeezed = value.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let mut forms = vec![Zeroizing::new(squeezed)];
    Plain::each(value.as_bytes(), ESCAPES_DEEP_MAX, |plain| forms.push(plain.bytes.clone()));
    forms.dedup();
    let mut all = Vec::new();
    for form in &forms {
        let length = form.len();
        let last =
            (length.saturating_sub(ESCAPE_BYTES_MAX)..length).filter(|at| begins(&form[*at..]));
        let last: Vec<usize> = last.chain([length]).collect();
        let first = (1..=length.min(ESCAPE_BYTES_MAX)).filter(|at| ends(&form[..*at]));
        for start in std::iter::once(0).chain(first) {
            for end in &last {
                let ends = Ends { first: start > 0, last: *end < length };
                if (ends.first || ends.last) && end.saturating_sub(start) >= SECRET_BYTES_MIN {
                    all.push(Torn { left: Zeroizing::new(form[start..*end].to_vec()), ends });
                }
            }
        }
    }
    all
}

/// Whether more bytes may make this an escape.
fn begins(part: &[u8]) -> bool {
    let hex = |digits: &[u8], fewer_than| {
        digits.len() < fewer_than && digits.iter().all(u8::is_ascii_hexdigit)
    };
    match part {
        [b'%', digits @ ..] | [b'\\', b'x', digits @ ..] => hex(digits, 2),
        [b'\\', b'u', digits @ ..] if digits.len() < 4 => hex(digits, 4),
        [b'\\', b'u', _, _, _, _, low @ ..] => {
            let is_high = |unit: u16| (0xD800..0xDC00).contains(&unit);
            unit(part).is_some_and(is_high)
                && match low {
                    [] | [b'\\'] => true,
                    [b'\\', b'u', digits @ ..] => hex(digits, 4),
                    _ => false,
                }
        }
        [b'\\'] => true,
        [b'&', b'#', b'x' | b'X', digits @ ..] => hex(digits, ENTITY_BYTES_MAX - 3),
        [b'&', b'#', digits @ ..] => hex(digits, ENTITY_BYTES_MAX - 2),
        [b'&', name @ ..] => ENTITIES.iter().any(|(known, _)| known.as_bytes().starts_with(name)),
        _ => false,
    }
}

/// Whether bytes before this may make it an escape.
fn ends(part: &[u8]) -> bool {
    let digits = |part: &[u8]| part.iter().all(u8::is_ascii_hexdigit);
    match part {
        [b'n' | b'r' | b't' | b'"' | b'\'' | b'/' | b'\\'] => true,
        [b'x', rest @ ..] if rest.len() == 2 && digits(rest) => true,
        [b'u', rest @ ..] if rest.len() == 4 && digits(rest) => true,
        [name @ .., b';'] if part.len() < ENTITY_BYTES_MAX => {
            let number = name.strip_prefix(b"#").unwrap_or(name);
            digits(number.strip_prefix(b"x").or(number.strip_prefix(b"X")).unwrap_or(number))
                || ENTITIES.iter().any(|(known, _)| known.as_bytes().ends_with(name))
        }
        // The second half of a character, with more or less of the first.
        [high @ .., b'\\', b'u', a, b, c, d] if digits(&[*a, *b, *c, *d]) => {
            let named = high.strip_prefix(b"u").filter(|it| it.len() == 4).unwrap_or(high);
            named.len() <= 4 && digits(named)
        }
        part => part.len() <= 4 && digits(part),
    }
}

/// A text with its escapes undone and without white space, and where each of
/// its bytes came from.
#[derive(Debug, Default)]
pub(super) struct Plain {
    pub(super) bytes: Zeroizing<Vec<u8>>,
    /// In order; of nearly all texts few.
    runs: Vec<Run>,
    /// How long it was.
    length: usize,
}

/// Bytes that came from one place: each from one of its own, one after the other, or
/// all from the same escape, which is longer than one. Of texts of at most 4 GiB, so
/// that a server that escapes all it says takes little memory with it.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Which byte is the first.
    at: u32,
    /// Where what it came from begins, and how long that is.
    start: u32,
    length: u32,
}

impl Run {
    /// Where the byte with this number came from.
    fn origin(self, at: usize) -> Range<usize> {
        let (start, length) = (self.start as usize, self.length as usize);
        match length {
            1 => {
                let start = start + (at - self.at as usize);
                start..start + 1
            }
            _ => start..start + length,
        }
    }
}

impl Plain {
    /// Undoes what escapes there are, and what is escaped then, at most so often.
    /// Meets the text after each time: an escape that began in a value may have
    /// ended in what stands beside it.
    pub(super) fn each(text: &[u8], deep: usize, mut meet: impl FnMut(&Self)) {
        let mut plain = Self::pass(text, text.len(), |at| at..at + 1);
        meet(&plain);
        for _ in 1..deep {
            if !plain.bytes.iter().any(|byte| matches!(byte, b'%' | b'\\' | b'&')) {
                break;
            }
            let next = Self::pass(&plain.bytes, text.len(), plain.origins());
            if next.bytes.len() == plain.bytes.len() {
                break;
            }
            plain = next;
            meet(&plain);
        }
    }

    fn pass(text: &[u8], length: usize, mut came_from: impl FnMut(usize) -> Range<usize>) -> Self {
        let mut plain = Self {
            bytes: Zeroizing::new(Vec::with_capacity(text.len())),
            runs: Vec::new(),
            length,
        };
        let mut at = 0;
        while at < text.len() {
            let (bytes, length) = unescaped(&text[at..]);
            let from = came_from(at).start..came_from(at + length - 1).end;
            for byte in bytes.iter().filter(|byte| !byte.is_ascii_whitespace()) {
                plain.push(*byte, from.clone());
            }
            at += length;
        }
        plain
    }

    /// The next byte, which came from there.
    fn push(&mut self, byte: u8, from: Range<usize>) {
        let at = self.bytes.len();
        self.bytes.push(byte);
        let goes_on = self.runs.last().is_some_and(|run| run.origin(at) == from);
        if !goes_on {
            let [at, start, length] =
                [at, from.start, from.len()].map(|it| u32::try_from(it).unwrap_or(u32::MAX));
            self.runs.push(Run { at, start, length });
        }
    }

    /// Where the byte with this number came from, if there is one.
    fn from(&self, at: usize) -> Option<Range<usize>> {
        let next = self.runs.partition_point(|run| run.at as usize <= at);
        let run = self.runs.get(next.checked_sub(1)?)?;
        (at < self.bytes.len()).then(|| run.origin(at))
    }

    /// The same for somebody who asks in order.
    fn origins(&self) -> impl FnMut(usize) -> Range<usize> {
        let mut runs = self.runs.iter().peekable();
        let mut run = Run { at: 0, start: 0, length: 1 };
        move |at| {
            while let Some(next) = runs.next_if(|next| next.at as usize <= at) {
                run = *next;
            }
            run.origin(at)
        }
    }

    /// Where in the text a part of this came from.
    pub(super) fn origin(&self, part: Range<usize>) -> Range<usize> {
        match (self.from(part.start), part.end.checked_sub(1).and_then(|it| self.from(it))) {
            (Some(first), Some(last)) => first.start..last.end,
            _ => 0..0,
        }
    }

    /// As [`Plain::origin`], with the escapes at these ends of it. `None` if there is
    /// none at one of them: nothing is missing there.
    pub(super) fn torn_origin(&self, part: Range<usize>, ends: Ends) -> Option<Range<usize>> {
        let mut origin = self.origin(part.clone());
        if ends.first {
            let before = part.start.checked_sub(1).and_then(|at| self.from(at));
            let before = before.unwrap_or(0..0);
            // What came to white space lies between.
            let gap = before.end..origin.start;
            let escape = if gap.is_empty() { before } else { gap };
            origin.start = (escape.len() > 1).then_some(escape.start)?;
        }
        if ends.last {
            let behind = self.from(part.end).unwrap_or(self.length..self.length);
            let gap = origin.end..behind.start;
            let escape = if gap.is_empty() { behind } else { gap };
            origin.end = (escape.len() > 1).then_some(escape.end)?;
        }
        Some(origin)
    }
}

/// The first character of a text, or what an escape there stands for; and how
/// long it is.
fn unescaped(text: &[u8]) -> (Escaped, usize) {
    let number = |digits: &[u8], radix: u32| -> Option<u32> {
        let digits = std::str::from_utf8(digits).ok()?;
        let is_plain = digits.bytes().all(|digit| digit.is_ascii_alphanumeric());
        is_plain.then(|| u32::from_str_radix(digits, radix).ok())?
    };
    let byte = |value: u32| u8::try_from(value).ok().map(Escaped::byte);
    let found = match text {
        [b'%', high, low, ..] => number(&[*high, *low], 16).and_then(byte).map(|it| (it, 3)),
        [b'\\', b'x', high, low, ..] => number(&[*high, *low], 16).and_then(byte).map(|it| (it, 4)),
        [b'\\', b'u', ..] => unit(text).and_then(|first| match char::from_u32(first.into()) {
            Some(character) => Some((Escaped::of(character), UNIT_BYTES)),
            // JSON has a character beyond 16 bits as two halves.
            None => {
                let halves = [first, unit(&text[UNIT_BYTES..])?];
                let character = char::decode_utf16(halves).next()?.ok()?;
                Some((Escaped::of(character), 2 * UNIT_BYTES))
            }
        }),
        // An escaped line end is white space, as a line end is.
        [b'\\', b'n' | b'r' | b't', ..] => Some((Escaped::of(' '), 2)),
        [b'\\', escaped @ (b'"' | b'\'' | b'/' | b'\\'), ..] => Some((Escaped::byte(*escaped), 2)),
        [b'&', ..] => entity(text),
        _ => None,
    };
    found.unwrap_or((Escaped::byte(text[0]), 1))
}

/// The unit of UTF-16 that a text begins with as an escape (`\u0041`).
fn unit(text: &[u8]) -> Option<u16> {
    let digits = text.strip_prefix(b"\\u")?.first_chunk::<4>()?;
    let digits = std::str::from_utf8(digits).ok().filter(|it| !it.starts_with('+'))?;
    u16::from_str_radix(digits, 16).ok()
}

fn entity(text: &[u8]) -> Option<(Escaped, usize)> {
    let end = text.iter().take(ENTITY_BYTES_MAX).position(|byte| *byte == b';')?;
    let name = std::str::from_utf8(&text[1..end]).ok()?;
    let known = ENTITIES.iter().find(|(known, _)| *known == name);
    let found = match known {
        Some((_, character)) => *character,
        None => {
            let number = name.strip_prefix('#')?;
            let number = match number.strip_prefix(['x', 'X']) {
                Some(hex) => u32::from_str_radix(hex, 16),
                None => number.parse(),
            };
            char::from_u32(number.ok()?)?
        }
    };
    Some((Escaped::of(found), end + 1))
}

/// At most one character.
struct Escaped {
    bytes: [u8; 4],
    length: usize,
}

impl Escaped {
    fn byte(byte: u8) -> Self {
        Self { bytes: [byte, 0, 0, 0], length: 1 }
    }

    fn of(character: char) -> Self {
        let mut bytes = [0; 4];
        let length = character.encode_utf8(&mut bytes).len();
        Self { bytes, length }
    }

    fn iter(&self) -> std::slice::Iter<'_, u8> {
        self.bytes[..self.length].iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Plain {
        let mut last = Plain::default();
        Plain::each(text.as_bytes(), ESCAPES_DEEP_MAX, |plain| {
            let (bytes, runs) = (plain.bytes.clone(), plain.runs.clone());
            last = Plain { bytes, runs, length: plain.length };
        });
        last
    }

    #[test]
    fn escapes_of_every_kind_are_undone_and_known_by_their_place() {
        let cases: [(&str, &str); 11] = [
            ("a b\n c", "abc"),
            ("%41%62c", "Abc"),
            ("\\u0041\\x42\\/\\\"", "AB/\""),
            ("&amp;&#65;&#x42;&quot;", "&AB\""),
            ("%2541", "A"),
            ("x\\ud83d\\ude00\\u00e4\\uffff", "x\u{1f600}\u{e4}\u{ffff}"),
            ("\\ud83d\\u0041\\ude00\\u+041\\ud83d", "\\ud83dA\\ude00\\u+041\\ud83d"),
            ("100% & more \\ %zz &no;", "100%&more\\%zz&no;"),
            ("%+1", "%+1"),
            ("\\", "\\"),
            ("&", "&"),
        ];
        for (text, expected) in cases {
            let plain = plain(text);
            assert_eq!(String::from_utf8_lossy(&plain.bytes), expected, "{text}");
        }
        let plain = plain("xx %2541 y");
        assert_eq!(*plain.bytes, b"xxAy");
        assert_eq!(plain.origin(2..3), 3..8);
        assert_eq!(plain.origin(0..0), 0..0);
    }

    #[test]
    fn a_value_is_undone_as_deep_as_it_looks_escaped() {
        let undone = |value: &str| {
            let (bytes, deep) = undone(value);
            (String::from_utf8(bytes.to_vec()).unwrap(), deep)
        };
        assert_eq!(undone("plain/value=="), ("plain/value==".into(), 1));
        assert_eq!(undone("p%40ss"), ("p@ss".into(), 1));
        assert_eq!(undone("CORP\\reader"), ("CORPeader".into(), 1));
        assert_eq!(undone("p%2540ss"), ("p@ss".into(), 2));
    }

    #[test]
    fn base64_of_a_longer_text_has_the_values_own_characters_wherever_it_begins() {
        let places = (0..9).flat_map(|before| (0..3).map(move |after| (before, after)));
        for value in ["s3cr3t?>~value-of-some-length", "s3cr3t?>"] {
            let all = spellings(value);
            for (before, after) in places.clone() {
                let text = format!("{}{value}{}", "x".repeat(before), "y".repeat(after));
                for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
                    let spelled = engine.encode(&text);
                    let met = |it: &Zeroizing<Vec<u8>>| {
                        spelled.as_bytes().windows(it.len()).any(|window| *window == **it)
                    };
                    assert!(all.iter().any(met), "{value} {before} {after}");
                }
            }
        }
    }

    #[test]
    fn short_values_are_looked_for_as_they_are_and_not_in_spellings_that_anything_meets() {
        assert_eq!(spellings("ab").len(), 1);
        assert!(spellings("abcdefgh").len() > 1);
    }

    #[test]
    fn a_value_is_spelled_in_each_encoding_that_texts_have() {
        let value = "p\u{e4}ssw\u{f6}rd-1";
        let all = spellings(value);
        let latin: Vec<u8> = value.chars().map(|it| it as u8).collect();
        let wide = |bytes_of: fn(u16) -> [u8; 2]| value.encode_utf16().flat_map(bytes_of).collect();
        let encoded: [Vec<u8>; 4] =
            [value.as_bytes().to_vec(), latin, wide(u16::to_le_bytes), wide(u16::to_be_bytes)];
        for bytes in encoded {
            let hex = crate::hex(&bytes);
            for spelled in [bytes, hex.to_ascii_uppercase().into_bytes(), hex.into_bytes()] {
                assert!(all.iter().any(|it| **it == spelled), "{spelled:?}");
            }
        }

        let is_wide = |length: usize| {
            let value = "a1".repeat(length)[..length].to_owned();
            let wide: Vec<u8> = value.encode_utf16().flat_map(u16::to_le_bytes).collect();
            spellings(&value).iter().any(|it| **it == wide)
        };
        assert_eq!([WIDE_BYTES_MAX, WIDE_BYTES_MAX + 1].map(is_wide), [true, false]);
    }
}
