//! From text to terms: identifiers taken apart, stop words dropped, stems.
//!
//! Any text is fine. What is neither letter nor digit separates, so control
//! characters and markup vanish; a word is cut at [`WORD_CHARS_MAX`].

use rust_stemmers::{Algorithm, Stemmer};

/// A longer word is no word of any language: only its beginning counts.
const WORD_CHARS_MAX: usize = 40;

/// Words that say how something is asked for, never what. Sorted.
const STOP_WORDS: &[&str] = &[
    "a", "about", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by",
    "can", "could", "did", "do", "does", "for", "from", "had", "has", "have", "he", "help", "her",
    "his", "how", "i", "if", "in", "into", "is", "it", "its", "just", "like", "ll", "m", "me",
    "my", "need", "of", "on", "or", "our", "please", "re", "s", "she", "should", "so", "some", "t",
    "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those",
    "to", "us", "ve", "want", "was", "we", "were", "what", "when", "where", "which", "who", "will",
    "with", "would", "you", "your",
];

/// The words of a text in lower case, identifiers taken apart: `getStock2` is
/// `get`, `stock`, `2`.
pub(crate) fn words(text: &str, mut each: impl FnMut(&str)) {
    let mut word = String::new();
    let mut chars = 0;
    let mut before = Shape::Other;
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let shape = Shape::of(c);
        let begins = match (before, shape) {
            (_, Shape::Other) | (Shape::Other, _) => true,
            // `getStock`; and `HTTPServer` is `http`, `server`.
            (Shape::Lower, Shape::Upper) => true,
            (Shape::Upper, Shape::Upper) => {
                rest.peek().is_some_and(|next| Shape::of(*next) == Shape::Lower)
            }
            (Shape::Digit, after) => after != Shape::Digit,
            (_, Shape::Digit) => true,
            (_, Shape::Lower) => false,
        };
        if begins && !word.is_empty() {
            each(&word);
            word.clear();
            chars = 0;
        }
        if shape != Shape::Other && chars < WORD_CHARS_MAX {
            word.extend(c.to_lowercase());
            chars += 1;
        }
        before = shape;
    }
    if !word.is_empty() {
        each(&word);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Lower,
    Upper,
    Digit,
    Other,
}

impl Shape {
    fn of(c: char) -> Self {
        match c {
            'a'..='z' => Self::Lower,
            'A'..='Z' => Self::Upper,
            '0'..='9' => Self::Digit,
            c if c.is_ascii() => Self::Other,
            c if c.is_uppercase() => Self::Upper,
            c if c.is_alphanumeric() => Self::Lower,
            _ => Self::Other,
        }
    }
}

/// Whether a word (in lower case) carries nothing.
pub(crate) fn is_stop_word(word: &str) -> bool {
    STOP_WORDS.binary_search(&word).is_ok()
}

/// The stem of a word in lower case.
pub(crate) fn stem(word: &str) -> String {
    Stemmer::create(Algorithm::English).stem(word).into_owned()
}

/// The sentences of a request: at most `most`, the last has the rest.
pub(crate) fn sentences(text: &str, most: usize) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    let bytes = text.as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        let ends = match byte {
            b'\n' => true,
            // `3.5` and `e.g.x` are no ends.
            b'.' | b'!' | b'?' | b';' => bytes.get(at + 1).is_none_or(u8::is_ascii_whitespace),
            _ => false,
        };
        if ends && found.len() + 1 < most {
            push(&mut found, &text[start..=at]);
            start = at + 1;
        }
    }
    push(&mut found, &text[start..]);
    found
}

fn push<'a>(found: &mut Vec<&'a str>, sentence: &'a str) {
    if sentence.chars().any(char::is_alphanumeric) {
        found.push(sentence.trim());
    }
}

/// `text`, cut at a character boundary to `bytes_max` bytes.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        words(text, |word| found.push(word.to_owned()));
        found
    }

    #[test]
    fn identifiers_are_taken_apart_as_a_reader_would() {
        for (text, expected) in [
            ("getStock", "get stock"),
            ("HTTPServer", "http server"),
            ("find_parts.v2", "find parts v 2"),
            ("GET /v1/users", "get v 1 users"),
            ("OAuth2Token", "o auth 2 token"),
            ("Größe", "größe"),
            ("a\0b\u{1b}[31m", "a b 31 m"),
            ("", ""),
        ] {
            assert_eq!(words_of(text).join(" "), expected, "{text:?}");
        }
    }

    #[test]
    fn a_word_without_end_is_cut() {
        assert_eq!(words_of(&"x".repeat(100_000)), ["x".repeat(WORD_CHARS_MAX)]);
    }

    #[test]
    fn stop_words_are_sorted_so_that_each_is_found() {
        assert!(STOP_WORDS.is_sorted());
        assert!(STOP_WORDS.iter().all(|word| is_stop_word(word)));
        assert!(!is_stop_word("invoice"));
    }

    #[test]
    fn a_request_falls_into_its_sentences_and_a_number_stays_whole() {
        assert_eq!(
            sentences("Book a room for 3.5 hours. Then tell Ann! And?", 8),
            ["Book a room for 3.5 hours.", "Then tell Ann!", "And?"]
        );
        assert_eq!(sentences("a. b. c.", 2), ["a.", "b. c."]);
        assert!(sentences(" ... ", 8).is_empty());
    }
}
