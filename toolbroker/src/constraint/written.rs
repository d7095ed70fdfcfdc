//! The text of a constraint, read.

use std::cmp::Ordering;

use forge_protocol::limits::CONSTRAINT_BYTES_MAX;
use forge_protocol::name::{NameError, ToolName};
use regex::RegexBuilder;

use super::decimal::Decimal;
use super::decimal::first_inexact;
use super::{Constraint, PATTERN_BYTES_MAX, PATTERN_NEST_MAX, Test};

/// Why a text is no constraint, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}, character {at}: {what}")]
pub struct WrittenError {
    /// The text, cut.
    text: String,
    /// The character, from 1.
    pub at: usize,
    /// What is wrong there.
    pub what: Wrong,
}

/// What is wrong at a place of a constraint's text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// It has no tool.
    #[error("a tool and a colon come first, as in shop.order:/quantity<=5")]
    NoTool,
    /// The tool's name is none.
    #[error("{0}")]
    Name(NameError),
    /// It is longer than any.
    #[error("a constraint has at most {CONSTRAINT_BYTES_MAX} bytes")]
    TooLong,
    /// It does not begin with a pointer.
    #[error("a place in the arguments begins with `/`")]
    NoSlash,
    /// An escape is none.
    #[error("`~` in a name is written ~0, `/` is ~1, and %XX is a byte in hex")]
    Escape,
    /// A control character.
    #[error("a control character cannot stand here")]
    Control,
    /// There is no test.
    #[error("a test comes here: =, ^=, =~, <=, >=, < or >")]
    NoTest,
    /// The value is no JSON.
    #[error("a JSON value comes here; a text has double quotes around it")]
    NoJson,
    /// The value is no number.
    #[error("a number comes here, such as 5 or 2.50, of at most 38 digits")]
    NoNumber,
    /// The prefix is empty.
    #[error("a text comes here for the value to begin with")]
    Empty,
    /// The pattern is none, or too large.
    #[error("a regular expression comes here: {0}")]
    Pattern(String),
}

/// Reads `tool:constraint`.
///
/// # Errors
/// [`WrittenError`].
pub fn parse_where(text: &str) -> Result<(ToolName, Constraint), WrittenError> {
    // A tool's own name may hold a colon; one with a constraint behind it
    // ends the name.
    let colon = text
        .match_indices(':')
        .map(|(at, _)| at)
        .find(|at| text[at + 1..].starts_with(['/', '=', '<', '>', '^']))
        .or_else(|| text.find(':'));
    let Some(colon) = colon else { return Err(error(text, 0, Wrong::NoTool)) };
    let tool = ToolName::parse(&text[..colon]).map_err(|why| error(text, 0, Wrong::Name(why)))?;
    let skipped = text[..=colon].chars().count();
    let constraint = parse(&text[colon + 1..]).map_err(|wrong| WrittenError {
        text: crate::cut(text, 256),
        at: wrong.at + skipped,
        what: wrong.what,
    })?;
    Ok((tool, constraint))
}

/// Reads a constraint.
pub(super) fn parse(text: &str) -> Result<Constraint, WrittenError> {
    if text.len() > CONSTRAINT_BYTES_MAX {
        return Err(error(text, CONSTRAINT_BYTES_MAX, Wrong::TooLong));
    }
    if let Some((at, _)) = text.char_indices().find(|(_, char)| char.is_control()) {
        return Err(error(text, at, Wrong::Control));
    }
    let end = text.find(['=', '<', '>', '^']).unwrap_or(text.len());
    let place = pointer(text, end)?;
    let rest = &text[end..];
    // Longer tests first: each of them begins as a shorter one.
    let (sign, value) = ["=~", "^=", "<=", ">=", "=", "<", ">"]
        .into_iter()
        .find_map(|sign| Some((sign, rest.strip_prefix(sign)?)))
        .ok_or_else(|| error(text, end, Wrong::NoTest))?;
    let at = end + sign.len();
    let range = |inside| match Decimal::parse(value) {
        Some(bound) => Ok(Test::Range(bound, inside)),
        None => Err(error(text, at, Wrong::NoNumber)),
    };
    let test = match sign {
        "=~" => pattern(value).map_err(|why| error(text, at, Wrong::Pattern(why)))?,
        "^=" if value.is_empty() => return Err(error(text, at, Wrong::Empty)),
        "^=" => Test::Prefix(value.to_owned()),
        "<=" => range(&[Ordering::Less, Ordering::Equal])?,
        ">=" => range(&[Ordering::Greater, Ordering::Equal])?,
        "<" => range(&[Ordering::Less])?,
        ">" => range(&[Ordering::Greater])?,
        _ => equals(value).map_err(|(skip, wrong)| error(text, at + skip, wrong))?,
    };
    Ok(Constraint { text: text.to_owned(), place, test })
}

/// The tokens of the pointer that ends at `end`.
fn pointer(text: &str, end: usize) -> Result<Vec<String>, WrittenError> {
    let whole = &text[..end];
    if whole.is_empty() {
        // The arguments as a whole.
        return Ok(Vec::new());
    }
    if !whole.starts_with('/') {
        return Err(error(text, 0, Wrong::NoSlash));
    }
    let mut at = 0;
    let mut tokens = Vec::new();
    for token in whole[1..].split('/') {
        at += 1;
        let plain = unescaped(token).map_err(|skip| error(text, at + skip, Wrong::Escape))?;
        tokens.push(plain);
        at += token.len();
    }
    Ok(tokens)
}

/// A token of a pointer without its escapes: first those of URLs, then those
/// of pointers (RFC 6901, section 6). Otherwise the place of one that is none.
fn unescaped(token: &str) -> Result<String, usize> {
    let bytes = token.as_bytes();
    let hex = |at: usize| {
        let digit = char::from(*bytes.get(at)?).to_digit(16)?;
        u8::try_from(digit).ok()
    };
    // Each byte with the place it came from.
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            let (Some(high), Some(low)) = (hex(at + 1), hex(at + 2)) else { return Err(at) };
            decoded.push((high << 4 | low, at));
            at += 3;
        } else {
            decoded.push((bytes[at], at));
            at += 1;
        }
    }
    let mut plain = Vec::with_capacity(decoded.len());
    let mut rest = decoded.iter();
    while let Some((byte, at)) = rest.next() {
        plain.push(match (byte, *byte == b'~') {
            (_, true) => match rest.next() {
                Some((b'0', _)) => b'~',
                Some((b'1', _)) => b'/',
                _ => return Err(*at),
            },
            (byte, false) => *byte,
        });
    }
    String::from_utf8(plain).map_err(|_| 0)
}

fn equals(value: &str) -> Result<Test, (usize, Wrong)> {
    let begins = value.len() - value.trim_start().len();
    let trimmed = value.trim();
    if trimmed.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        let number = Decimal::parse(trimmed).ok_or((begins, Wrong::NoNumber))?;
        return Ok(Test::EqualsNumber(number));
    }
    // Within a list or an object numbers are compared as arguments are held.
    if let Some(at) = first_inexact(trimmed.as_bytes()) {
        return Err((begins + at, Wrong::NoNumber));
    }
    serde_json::from_str(trimmed).map(Test::Equals).map_err(|wrong| {
        // A text without line breaks: the column is a place in bytes, from 1.
        let column = begins + wrong.column().saturating_sub(1);
        (column.min(value.len()), Wrong::NoJson)
    })
}

fn pattern(value: &str) -> Result<Test, String> {
    if value.is_empty() {
        return Err("there is none".into());
    }
    let compile = |pattern: &str| {
        RegexBuilder::new(pattern)
            .size_limit(PATTERN_BYTES_MAX)
            .dfa_size_limit(PATTERN_BYTES_MAX)
            .nest_limit(PATTERN_NEST_MAX)
            .build()
            .map_err(|why| match why {
                regex::Error::CompiledTooBig(_) => "it is too large when compiled".to_owned(),
                // The last line says what; those before it draw it.
                why => {
                    let why = why.to_string();
                    let last = why.lines().last().unwrap_or_default();
                    crate::cut(last.trim_start_matches("error: "), 200)
                }
            })
    };
    // By itself first: `a)|(b` is none, and would be one between brackets.
    compile(value)?;
    compile(&format!(r"\A(?:{value})\z")).map(Test::Pattern)
}

/// Something is wrong at this byte of the text.
fn error(text: &str, byte: usize, what: Wrong) -> WrittenError {
    let byte = text.floor_char_boundary(byte);
    WrittenError { text: crate::cut(text, 256), at: text[..byte].chars().count() + 1, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_points_at_the_character() {
        for (text, at) in [
            ("", 1),
            ("shop.order", 1),
            ("order:/a=1", 1),
            ("shop.order:", 12),
            ("shop.order:quantity=1", 12),
            ("shop.order:/quantity", 21),
            ("shop.order:/quantity<=five", 23),
            ("shop.order:/quantity<=", 23),
            ("shop.order:/quantity=01", 22),
            ("shop.order:/größe=klein", 19),
            ("shop.order:/a=\"b", 16),
            ("shop.order:/a=[1,]", 18),
            ("shop.order:/a=[1, 9007199254740993.0]", 19),
            ("shop.order:/a={\"p\":0.30000000000000001}", 20),
            ("shop.order:/a~2b=1", 14),
            ("shop.order:/x/a%4=1", 16),
            ("shop.order:/a^b=1", 14),
            ("shop.order:/a^=", 16),
            ("shop.order:/a=~", 16),
            ("shop.order:/a=~(", 16),
            ("shop.order:/a=~a)|(b", 16),
            ("shop.order:/a\n=1", 14),
        ] {
            let refused = parse_where(text).unwrap_err();
            assert_eq!(refused.at, at, "{text}: {refused}");
        }
    }

    #[test]
    fn a_colon_in_a_tools_name_does_not_end_it() {
        let (tool, constraint) = parse_where("shop.v1:order:/a:b=1").unwrap();
        assert_eq!(tool.as_str(), "shop.v1:order");
        assert_eq!(constraint.text(), "/a:b=1");
    }

    #[test]
    fn a_pattern_that_would_be_too_large_is_refused() {
        for pattern in ["(a{100}){100}", r"(\pL{50}){50}", &"(".repeat(100)] {
            assert!(parse(&format!("/a=~{pattern}")).is_err(), "{pattern}");
        }
        parse(r"/a=~\w+@[a-z]{1,20}\.[a-z]{2,6}").unwrap();
        parse("/a=~[A-Z]{2}-[0-9]{1,6}").unwrap();
        assert!(parse(&format!("/{}=1", "a".repeat(CONSTRAINT_BYTES_MAX - 2))).is_err());
        parse(&format!("/{}=1", "a".repeat(CONSTRAINT_BYTES_MAX - 3))).unwrap();
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig {
            cases: 512,
            failure_persistence: None,
            ..proptest::prelude::ProptestConfig::default()
        })]

        #[test]
        fn any_text_is_a_constraint_or_an_error_within_it(
            text in r#"(a\.b:)?(/[a%~0-3é=]{0,4}){0,3}(=|=~|\^=|<=|>)?[\PC]{0,12}"#,
            arguments in proptest::collection::hash_map("[a%~0-3é=]{0,3}", "[0-9a./\\\\%2e]{0,9}", 0..4),
        ) {
            let arguments = serde_json::json!(arguments);
            match parse_where(&text) {
                Ok((_, constraint)) => {
                    let mut constraints = crate::constraint::Constraints::none();
                    constraints.push(constraint);
                    let _ = constraints.check(&arguments, "{}");
                }
                Err(error) => {
                    assert!((1..=text.chars().count() + 1).contains(&error.at), "{error}");
                }
            }
        }
    }

    #[test]
    fn a_constraint_reads_back_as_it_was_written() {
        for text in ["/a=1", "/a=~x", "/a^=x=y<z", "/a%3Db<=1e5", "=1"] {
            assert_eq!(parse(text).unwrap().text(), text);
        }
    }
}
