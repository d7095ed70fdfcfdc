//! Configuration files as text: what is wrong with their syntax, and on which lines
//! their fields stand. What the fields mean is for who reads them: supervisor and
//! toolbroker read one file, each its own tables of it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::value::RawValue;
use toml::de::{DeTable, DeValue};

/// How much of a key is shown, in bytes.
const KEY_BYTES_SHOWN: usize = 128;

/// A file that cannot be read, and why: never a value of it, which may be a
/// credential in the wrong place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Syntax {
    /// The line, from 1.
    pub line: u32,
    /// What is wrong there, and what to do.
    pub problem: &'static str,
}

/// A file's tables.
///
/// # Errors
/// Where it is no TOML.
pub fn tables(text: &str) -> Result<toml::Table, Syntax> {
    text.parse().map_err(|error: toml::de::Error| {
        let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
        let problem = if is_json(text) { JSON_FOR_TOML } else { no_toml(error.message()) };
        Syntax { line: line_after(before.as_bytes()), problem }
    })
}

const JSON_FOR_TOML: &str =
    "this is JSON and not TOML: a file of mcpServers goes with --mcp-config";

/// Whether a file begins as JSON's do that are read here, and no TOML.
fn is_json(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
}

/// What a parser of TOML said, where it is one of the usual mistakes: in words of
/// our own, since it may quote the line.
fn no_toml(message: &str) -> &'static str {
    let known = USUAL_MISTAKES.iter().find(|(beginning, _)| message.starts_with(beginning));
    known.map_or("this is not TOML here", |(_, words)| words)
}

/// How what a parser says of the usual mistakes begins, and our words for it.
const USUAL_MISTAKES: [(&str, &str); 11] = [
    ("duplicate key", "this key or table stands twice: keep one"),
    (
        "string values must be quoted",
        "this is not TOML here: a text has quotes around it, and so has a number with a unit",
    ),
    ("unclosed table", "this is not TOML here: close the bracket"),
    ("unclosed array", "this is not TOML here: close the bracket"),
    ("unclosed inline table", "this is not TOML here: close the brace"),
    ("invalid basic string", "this is not TOML here: close the quotes on the same line"),
    ("extra `=`", "this is not TOML here: there is one `=` too many"),
    ("missing value", "this is not TOML here: no value follows the `=`"),
    ("key with no value", "this is not TOML here: `=` and a value follow a key"),
    ("missing comma", "this is not TOML here: a comma is missing"),
    ("unexpected leading zero", "this is not TOML here: a number begins with no 0"),
];

/// The number of the line that begins or goes on behind this, from 1.
#[must_use]
pub fn line_after(before: &[u8]) -> u32 {
    let ends = before.iter().filter(|byte| **byte == b'\n').count();
    u32::try_from(ends).map_or(u32::MAX, |ends| ends.saturating_add(1))
}

/// A line of a file, as editors and compilers write it; the file alone, where no
/// line is known.
#[must_use]
pub fn place(file: &Path, line: Option<u32>) -> impl fmt::Display {
    struct Place<'a>(&'a Path, Option<u32>);
    impl fmt::Display for Place<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let Self(file, line) = self;
            write!(f, "{}", file.display())?;
            line.map_or(Ok(()), |line| write!(f, ":{line}"))
        }
    }
    Place(file, line)
}

/// A key as it is shown in the way to a field. It is the file's text: it may hold
/// anything.
#[must_use]
pub fn shown(key: &str) -> String {
    let mut shown = key.escape_debug().to_string();
    if shown.len() > KEY_BYTES_SHOWN {
        shown.truncate(shown.floor_char_boundary(KEY_BYTES_SHOWN - '…'.len_utf8()));
        shown.push('…');
    }
    shown
}

/// Where the fields of a file stand. Files are read into values that do not say
/// so: it is parsed once more when one is wrong.
#[derive(Debug)]
pub struct Lines<'a> {
    text: &'a str,
    /// `None` of what has no fields.
    root: Option<Root<'a>>,
}

#[derive(Debug)]
enum Root<'a> {
    Toml(DeValue<'a>),
    Json(&'a RawValue),
}

impl<'a> Lines<'a> {
    /// Those of a file of JSON, if it begins with a brace, which no TOML does; else
    /// of TOML.
    #[must_use]
    pub fn of(text: &'a str) -> Self {
        let root = if is_json(text) {
            // Some editors begin a file with a mark of its encoding.
            serde_json::from_str(text.trim_start_matches('\u{feff}')).ok().map(Root::Json)
        } else {
            DeTable::parse(text).ok().map(|table| Root::Toml(DeValue::Table(table.into_inner())))
        };
        Self { text, root }
    }

    /// The line, from 1, of the field with this way, whose keys and positions have
    /// dots between them; of the innermost table or list that is there, where the
    /// field is missing. `None` where not even that is found.
    #[must_use]
    pub fn of_field(&self, field: &str) -> Option<u32> {
        let mut value = match self.root.as_ref()? {
            Root::Toml(root) => Value::Toml(root),
            Root::Json(root) => Value::Json(root),
        };
        let (mut way, mut found) = (field, None);
        loop {
            let members = value.members(self.text).into_iter();
            let fitting = members.filter_map(|it| Some((behind(way, &it.key)?, it)));
            // A key may have dots, so the longest that fits is meant.
            let Some((rest, member)) = fitting.min_by_key(|(rest, _)| rest.len()) else { break };
            (way, value, found) = (rest, member.value, Some(member.start));
        }
        self.text.as_bytes().get(..found?).map(line_after)
    }
}

/// What is left of a way behind this key, if the way begins with it.
fn behind<'w>(way: &'w str, key: &str) -> Option<&'w str> {
    let rest = way.strip_prefix(&shown(key)).or_else(|| way.strip_prefix(key))?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

enum Value<'v> {
    Toml(&'v DeValue<'v>),
    Json(&'v RawValue),
}

/// One of a table or list.
struct Member<'v> {
    /// Its key, or its position from 0.
    key: String,
    /// A byte of the file on the line where it begins.
    start: usize,
    value: Value<'v>,
}

impl<'v> Value<'v> {
    fn members(self, text: &str) -> Vec<Member<'v>> {
        match self {
            Self::Toml(DeValue::Table(table)) => table
                .iter()
                .map(|(key, value)| Member {
                    key: key.get_ref().clone().into_owned(),
                    start: key.span().start,
                    value: Value::Toml(value.get_ref()),
                })
                .collect(),
            Self::Toml(DeValue::Array(items)) => items
                .iter()
                .enumerate()
                .map(|(position, item)| Member {
                    key: position.to_string(),
                    start: item.span().start,
                    value: Value::Toml(item.get_ref()),
                })
                .collect(),
            Self::Toml(_) => Vec::new(),
            Self::Json(value) => members_of(value, text),
        }
    }
}

/// Those of a value of JSON, which is a part of this text.
fn members_of<'v>(value: &'v RawValue, text: &str) -> Vec<Member<'v>> {
    let start = |value: &RawValue| value.get().as_ptr().addr() - text.as_ptr().addr();
    if let Ok(fields) = serde_json::from_str::<BTreeMap<String, &RawValue>>(value.get()) {
        // A key ends on the line on which it begins, before the colon.
        let key_end =
            |value| text[..start(value)].trim_end().trim_end_matches(':').trim_end().len();
        let member = |(key, value): (String, &'v RawValue)| Member {
            key,
            start: key_end(value),
            value: Value::Json(value),
        };
        return fields.into_iter().map(member).collect();
    }
    let items = serde_json::from_str::<Vec<&RawValue>>(value.get()).unwrap_or_default();
    let member = |(position, item): (usize, &'v RawValue)| Member {
        key: position.to_string(),
        start: start(item),
        value: Value::Json(item),
    };
    items.into_iter().enumerate().map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_toml_is_told_by_its_line_alone() {
        let error = tables("a = 1\nb = hunter2").expect_err("a text without quotes");
        assert_eq!(error.line, 2);
        assert!(!error.problem.contains("hunter2"), "{error:?}");
    }

    fn lines(text: &str, fields: &[(&str, Option<u32>)]) {
        let lines = Lines::of(text);
        for (field, line) in fields {
            assert_eq!(lines.of_field(field), *line, "{field} in {text}");
        }
    }

    #[test]
    fn a_field_is_found_and_what_is_missing_where_it_would_be() {
        let json = "{\"a\\\"b\": 1,\n \"mcpServers\": {\n  \"x\": {\"command\": \"c\",\n\
                    \"args\": [ \"[\\\\\",\n 7\n],\n\"env\": {}},\n\"x.y\": {\n\"url\"\n:\n 7}}}";
        for text in [json.to_owned(), format!("\u{feff}{json}")] {
            lines(
                &text,
                &[
                    ("a\\\"b", Some(1)),
                    ("mcpServers", Some(2)),
                    ("mcpServers.x", Some(3)),
                    ("mcpServers.x.url", Some(3)),
                    ("mcpServers.x.args", Some(4)),
                    ("mcpServers.x.args.1", Some(5)),
                    ("mcpServers.x.env.K", Some(7)),
                    ("mcpServers.x.y.url", Some(9)),
                    ("other", None),
                    ("", None),
                ],
            );
        }
        let toml = "[servers.x]\ncommand = 'c'\nargs = [\n 'a',\n 7]\n\n[servers.'x.y']\nurl = 7\n\
                    [[many]]\na = 1\n[[many]]\nb = 1\n\"c\\u0007d\" = 2\n";
        lines(
            toml,
            &[
                ("servers.x.args.1", Some(5)),
                ("servers.x.env", Some(1)),
                ("servers.x.y.url", Some(8)),
                ("many.1.b", Some(12)),
                ("many.1.c\\u{7}d", Some(13)),
                ("many.1.c\u{7}d", Some(13)),
                ("other", None),
                ("", None),
            ],
        );
    }

    #[test]
    fn what_is_neither_has_no_lines() {
        for text in ["", "{", "[", "{\"a\"", "{\"a\":", "[1", "\"a", "{\"a\":\"\\", "]", "7", "{,"]
        {
            lines(text, &[("a", None), ("0.0", None)]);
        }
        let deep = "{\"a\":".repeat(100_000);
        lines(&deep, &[("a", None)]);
        let closed = format!("{deep}7{}", "}".repeat(100_000));
        lines(&closed, &[("a.a", Some(1))]);
    }

    #[test]
    fn a_long_key_is_cut_and_found_by_what_is_left_of_it() {
        let key = "é".repeat(200);
        let cut = shown(&key);
        assert!(cut.len() <= KEY_BYTES_SHOWN && cut.ends_with("é…"), "{cut}");
        lines(&format!("\n'{key}' = {{ a = 1 }}"), &[(&format!("{cut}.a"), Some(2))]);
    }
}
