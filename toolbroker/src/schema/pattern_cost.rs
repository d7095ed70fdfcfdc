//! What the patterns of a schema may take once they are compiled, known before
//! they are.
//!
//! The validator compiles each text once, however many places refer to it, and
//! takes a bound on its size. That is a bound on each *engine*, though, of
//! which a pattern with lookarounds has one for every part that is looked for
//! without stepping back. Three things have no bound there at all. A group
//! that is called as a subroutine (`\g<1>`) stands in place of each call, and a
//! lookbehind may be of any length that varies: ECMA 262 does not know the
//! first, and most engines do not know the second; neither is taken. And the
//! group that a backreference refers to stands in its place while a prefix is
//! looked for, with all backreferences of its own: so there are few of them.
//!
//! Before any of that the validator translates the text to its engines' own
//! language: one escape at a time, and reads all of it again for each. So their
//! number is bounded, by how long the text is.
//!
//! All of it looks at the text alone and errs on the safe side.

use std::collections::BTreeSet;

use serde_json::Value;

use super::pattern_read::{BEGINNING, BOUNDARY, DOT, END, NO_BOUNDARY};

/// What one pattern may take while it is compiled, all its engines together.
/// One engine of the largest size has always its room.
pub(crate) const PATTERN_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What a byte of a pattern with several engines takes beside them, at most:
/// two instructions.
const BYTES_OF_EACH: usize = 256;

/// What an escape is translated to, at most, in bytes.
const TRANSLATED_BYTES_MAX: usize = 200;
/// What is read in all while a text is translated, in bytes.
const TRANSLATION_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Backreferences of one pattern. However they are spread over groups that
/// refer to each other, they stand for some 100,000 (e to the power of 32/e).
const BACKREFERENCES_MAX: usize = 32;

/// All that a schema may have for patterns, each once. Data that looks like
/// one counts too: a reference may lead there.
pub(crate) fn patterns(schema: &Value) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![schema];
    while let Some(value) = waiting.pop() {
        match value {
            Value::Array(items) => waiting.extend(items),
            Value::Object(members) => {
                for (key, member) in members {
                    match (key.as_str(), member) {
                        ("pattern", Value::String(text)) => {
                            found.insert(text.as_str());
                        }
                        ("patternProperties", Value::Object(by_pattern)) => {
                            found.extend(by_pattern.keys().map(String::as_str));
                        }
                        _ => {}
                    }
                    waiting.push(member);
                }
            }
            _ => {}
        }
    }
    found
}

/// What a pattern takes at most whose engines have at most `engine_bytes`
/// each.
///
/// # Errors
/// Why that has no bound.
pub(crate) fn compiled_bytes_max(text: &str, engine_bytes: usize) -> Result<usize, &'static str> {
    if translation_bytes_max(text) > TRANSLATION_BYTES_MAX {
        return Err("it has too many escapes");
    }
    if has_one_engine(text) {
        return Ok(engine_bytes);
    }
    if text.contains(r"\g") || text.contains("?P>") {
        return Err("it calls a group");
    }
    if has_varying_lookbehind(text) {
        return Err("it has a lookbehind that is not plainly of one length");
    }
    if backreferences_max(text) > BACKREFERENCES_MAX {
        return Err("it refers to its groups too often");
    }
    // Of these each part is a single class, which is a table and no engine.
    let others = [(DOT, "."), (BOUNDARY, r"\b"), (NO_BOUNDARY, r"\B"), (BEGINNING, ""), (END, "")]
        .iter()
        .fold(text.to_owned(), |text, (written, meant)| text.replace(written, meant));
    let engines = engines_max(&others).saturating_mul(engine_bytes);
    Ok(engines.saturating_add(text.len().saturating_mul(BYTES_OF_EACH)))
}

/// What is read in all, at most, while the text is translated: each time it is
/// compiled.
pub(crate) fn translation_bytes_max(text: &str) -> usize {
    let escapes = text.matches('\\').count();
    let translated = text.len().saturating_add(escapes.saturating_mul(TRANSLATED_BYTES_MAX));
    escapes.saturating_mul(translated)
}

/// Whether nothing in it is beyond a regular expression: it has groups of the
/// plain kinds alone, escapes that mean one character, and no quantifier that
/// keeps what it took (`a++`).
fn has_one_engine(text: &str) -> bool {
    if text.as_bytes().windows(2).any(|two| b"*+?}".contains(&two[0]) && two[1] == b'+') {
        return false;
    }
    let mut rest = text;
    while let Some(at) = rest.find(['\\', '(']) {
        let (opens, after) = (rest.as_bytes()[at] == b'(', &rest[at + 1..]);
        let next = after.chars().next();
        rest = match next {
            Some('?') if opens => {
                let plain = after.starts_with("?:")
                    || after.strip_prefix("?<").is_some_and(|name| !name.starts_with(['=', '!']));
                if !plain {
                    return false;
                }
                after
            }
            Some('*') if opens => return false,
            _ if opens => after,
            Some(escaped) if is_one_character(escaped) => &after[escaped.len_utf8()..],
            _ => return false,
        };
    }
    true
}

/// Whether `\` and this mean exactly one character.
fn is_one_character(escaped: char) -> bool {
    matches!(escaped, 'd' | 'D' | 's' | 'S' | 'w' | 'W' | 'n' | 'r' | 't' | 'f' | 'v')
        || escaped.is_ascii_punctuation() && !matches!(escaped, '<' | '>')
}

/// How many engines a pattern is made of at most: two for every sequence, at
/// its beginning and its end, and a sequence is the whole, a group or one of
/// several alternatives; one for every class, escape and quantifier that keeps
/// what it took, whatever stands before its `+`; and one that seeks.
fn engines_max(text: &str) -> usize {
    let count = |bytes: &[u8]| text.bytes().filter(|byte| bytes.contains(byte)).count();
    2 + 2 * count(b"(|") + count(b"[\\+") + 1
}

fn backreferences_max(text: &str) -> usize {
    let refers = |next: &str| next.starts_with(|it: char| it.is_ascii_digit() || it == 'k');
    text.split('\\').skip(1).filter(|next| refers(next)).count() + text.matches("?P=").count()
}

/// Whether a lookbehind may match texts of different lengths. One that is not
/// written in the simplest way counts.
fn has_varying_lookbehind(text: &str) -> bool {
    let bodies = ["?<=", "?<!"].into_iter().flat_map(|opens| text.match_indices(opens));
    let mut bodies = bodies.map(|(at, opens)| &text[at + opens.len()..]).peekable();
    // Where white space means nothing, a comment may hide where it ends.
    bodies.peek().is_some() && (may_ignore_space(text) || bodies.any(|body| !is_fixed(body)))
}

/// Whether a group of flags sets `x`.
fn may_ignore_space(text: &str) -> bool {
    text.match_indices("(?").any(|(at, opens)| {
        let flags = text[at + opens.len()..].bytes();
        flags.take_while(|it| it.is_ascii_alphabetic() || *it == b'-').any(|it| it == b'x')
    })
}

/// Whether all up to the group's end are alternatives of single characters,
/// each as often as it says.
fn is_fixed(body: &str) -> bool {
    let mut characters = body.chars();
    while let Some(character) = characters.next() {
        let fixed = match character {
            ')' => return true,
            '\\' => characters.next().is_some_and(is_one_character),
            '[' => is_class(&mut characters),
            '{' => is_count(&mut characters),
            other => !matches!(other, '(' | '}' | '*' | '+' | '?'),
        };
        if !fixed {
            return false;
        }
    }
    false
}

/// Whether this is the rest of `{n}`.
fn is_count(characters: &mut std::str::Chars<'_>) -> bool {
    characters.find(|it| !it.is_ascii_digit()) == Some('}')
}

/// Whether this is the rest of a class without classes in it.
fn is_class(characters: &mut std::str::Chars<'_>) -> bool {
    let mut is_first = true;
    while let Some(character) = characters.next() {
        let plain = match character {
            // The first one may be meant as itself.
            ']' => return !is_first,
            '^' => true,
            '\\' => characters.next().is_some_and(is_one_character),
            other => other != '[',
        };
        if !plain {
            return false;
        }
        is_first &= character == '^';
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pattern_is_found_once_wherever_it_is() {
        let schema = json!({
            "$defs": {"a": {"pattern": "^a+"}, "b": {"default": {"pattern": "^b+"}}},
            "patternProperties": {"^c+": {"anyOf": [{"pattern": "^a+"}]}},
            "properties": {"pattern": {"type": "string"}},
        });
        let found: Vec<&str> = patterns(&schema).into_iter().collect();
        assert_eq!(found, ["^a+", "^b+", "^c+"]);
    }

    #[test]
    fn a_plain_pattern_takes_what_its_one_engine_takes() {
        for text in [
            "^.{1,255}$",
            r"^\(?\d{3}\)?-\d{4}$",
            r"^(?:a|b)+(c|(?<year>\d{4}))$",
            r"^[\w.+-]+@[\w-]+\.[\w.]+$",
            r"C:\\g.*",
        ] {
            assert_eq!(compiled_bytes_max(text, 1024), Ok(1024), "{text}");
        }
        for text in [
            r"\bfoo\b",
            "a(?=b)",
            "(?i)a",
            r"(a)\1",
            "(?>a)",
            r"(*FAIL)a",
            "a\\",
            "a++",
            "a*+",
            "a?+",
            "a{2}+",
        ] {
            assert!(compiled_bytes_max(text, 1024).unwrap() > 1024, "{text}");
        }
    }

    #[test]
    fn every_lookahead_counts() {
        const MIB: usize = 1024 * 1024;
        let bytes = |count| compiled_bytes_max(&"(?=.{0,900}a)".repeat(count), MIB).unwrap();
        assert!(bytes(1_000) > 1_000 * MIB);
        assert!(bytes(4) < PATTERN_BYTES_MAX);
        let kept: String = (0..1_000).map(|at| format!(".{{1,{at}}}+")).collect();
        assert!(compiled_bytes_max(&kept, MIB).unwrap() > 1_000 * MIB);
    }

    #[test]
    fn what_no_size_bounds_is_not_taken() {
        for text in [
            r"(?=x)(a\g<1>\g<1>\g<1>)",
            r"(?=x)(?<a>(?P>a)|b)",
            "(?<=.{0,1000})x",
            "(?<=(?:a{1,1000}){1,1000})x",
            "(?<!a|b+)x",
            "(?<=[)]a+)x",
            r"(?<=\R)x",
            "(?x)( ?<=a #)\n.{0,1000}{0,1000})",
            "(?<=[]a]b+)x",
            "(?<=a",
            "(?<=a{2,3})b",
            "(?<=a{2}?)b",
            &format!("(a){}", r"\1".repeat(33)),
            &format!("(?<a>b){}", r"\k<a>".repeat(33)),
            &format!("(?<a>b){}", "(?P=a)".repeat(33)),
            &r"\s".repeat(300),
        ] {
            assert!(compiled_bytes_max(text, 1024).is_err(), "{text}");
        }
        for text in
            ["(?<!-)$", "(?<=a|bb)x", r"(?<![^\s\]])x", r"(?<!\()x", r"(?<=\d{2}:)x", r"(a)\1\1"]
        {
            assert!(compiled_bytes_max(text, 1024).is_ok(), "{text}");
        }
    }
}
