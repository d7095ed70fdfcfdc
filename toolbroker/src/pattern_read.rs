//! Patterns of a schema, as JavaScript reads them.
//!
//! JSON Schema's patterns are ECMA 262's, and most are written for it as it is without
//! the flag `u`: there a class may be empty, a `-` beside a class escape is itself
//! (`[\w-.]`), and `\0` is a NUL. The validator's engines take none of that; it is
//! written for them here as they do. All else is left as it is.

use serde_json::{Map, Value};

/// Members of a schema that are data, whatever is in them.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// The same schema with its patterns so written; `None` if nothing in it differs.
pub(crate) fn read_as_javascript(schema: &Value) -> Option<Value> {
    match schema {
        Value::Array(items) => {
            let read: Vec<_> = items.iter().map(read_as_javascript).collect();
            read.iter().any(Option::is_some).then(|| {
                let items = read.into_iter().zip(items);
                items.map(|(read, as_it_was)| read.unwrap_or_else(|| as_it_was.clone())).collect()
            })
        }
        Value::Object(members) => {
            let mut is_other = false;
            let mut all = Map::new();
            for (key, member) in members {
                let read = match (key.as_str(), member) {
                    ("pattern", Value::String(text)) => rewritten(text).map(Value::String),
                    ("patternProperties", Value::Object(by_pattern)) => {
                        by_written_pattern(by_pattern)
                    }
                    (key, _) if DATA.contains(&key) => None,
                    _ => read_as_javascript(member),
                };
                is_other |= read.is_some();
                all.insert(key.clone(), read.unwrap_or_else(|| member.clone()));
            }
            is_other.then_some(Value::Object(all))
        }
        _ => None,
    }
}

/// The same of schemas by pattern. Two that come to one pattern stay as they are.
fn by_written_pattern(by_pattern: &Map<String, Value>) -> Option<Value> {
    let mut is_other = false;
    let mut all = Map::new();
    for (pattern, schema) in by_pattern {
        let (written, read) = (rewritten(pattern), read_as_javascript(schema));
        is_other |= written.is_some() || read.is_some();
        let written = written.unwrap_or_else(|| pattern.clone());
        all.insert(written, read.unwrap_or_else(|| schema.clone()));
    }
    (is_other && all.len() == by_pattern.len()).then_some(Value::Object(all))
}

/// A pattern as the engines take it; `None` if it is that already.
fn rewritten(pattern: &str) -> Option<String> {
    let mut out = String::with_capacity(pattern.len() + 8);
    let mut rest = pattern;
    let mut in_class = false;
    // Whether what was read last of a class stands for more than one character.
    let mut after_set = false;
    while let Some(next) = rest.chars().next() {
        let mut length = next.len_utf8();
        let escaped = rest[length..].chars().next().filter(|_| next == '\\');
        let was_set = std::mem::take(&mut after_set);
        match (next, escaped) {
            ('\\', Some('0')) if !rest[2..].starts_with(|it: char| it.is_ascii_digit()) => {
                length = 2;
                out.push_str(r"\x00");
            }
            ('\\', Some(escaped)) => {
                length += escaped.len_utf8();
                out.push_str(&rest[..length]);
                after_set = in_class && is_set(escaped);
            }
            ('[', _) if !in_class => {
                let empty = [("[^]", r"[\s\S]"), ("[]", r"[^\s\S]")];
                if let Some((read, written)) = empty.iter().find(|it| rest.starts_with(it.0)) {
                    length = read.len();
                    out.push_str(written);
                } else {
                    in_class = true;
                    out.push('[');
                }
            }
            (']', _) if in_class => {
                in_class = false;
                out.push(']');
            }
            ('-', _) if in_class => {
                // At an end it is itself to everybody.
                let behind = &rest[1..];
                let is_last = behind.starts_with(']');
                let set_follows =
                    behind.strip_prefix('\\').is_some_and(|it| it.starts_with(is_set));
                out.push_str(if (was_set && !is_last) || set_follows { r"\-" } else { "-" });
            }
            (other, _) => out.push(other),
        }
        rest = &rest[length..];
    }
    (out != pattern).then_some(out)
}

/// Whether `\` and this stand for any of several characters.
fn is_set(escaped: char) -> bool {
    matches!(escaped, 'd' | 'D' | 's' | 'S' | 'w' | 'W')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_javascript_takes_is_written_as_the_engines_take_it() {
        for (pattern, written) in [
            (r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$", r"^[\w\-\.]+@([\w-]+\.)+[\w-]{2,4}$"),
            (r"^[\w-.]+$", r"^[\w\-.]+$"),
            (r"[a-\d]", r"[a\-\d]"),
            ("^[^]*$", r"^[\s\S]*$"),
            ("a[]b", r"a[^\s\S]b"),
            (r"a\0b", r"a\x00b"),
            (r"[\0-\x1f]", r"[\x00-\x1f]"),
        ] {
            assert_eq!(rewritten(pattern).as_deref(), Some(written), "{pattern}");
        }
        for pattern in [
            "",
            "^[a-z0-9-]+$",
            r"[\]-a]",
            r"\[^]",
            r"[^-]",
            r"[-\w]",
            r"[\w-]",
            r"\\0",
            r"\00",
            "a\\",
            "[é-ü]",
            r"[a\-\d]",
            "[",
            "a-b",
        ] {
            let expected = if pattern == r"[-\w]" { Some(r"[\-\w]") } else { None };
            assert_eq!(rewritten(pattern).as_deref(), expected, "{pattern}");
        }
    }

    #[test]
    fn patterns_alone_are_rewritten_and_no_data() {
        let schema = json!({
            "properties": {"a": {"pattern": r"[\w-.]"}, "b": {"const": {"pattern": "[^]"}}},
            "patternProperties": {"[^]": {"items": [{"pattern": r"\0"}]}},
        });
        let expected = json!({
            "properties": {"a": {"pattern": r"[\w\-.]"}, "b": {"const": {"pattern": "[^]"}}},
            "patternProperties": {r"[\s\S]": {"items": [{"pattern": r"\x00"}]}},
        });
        assert_eq!(read_as_javascript(&schema), Some(expected.clone()));
        assert_eq!(read_as_javascript(&expected), None);
        let twice = json!({"patternProperties": {"[^]": {}, r"[\s\S]": {"type": "string"}}});
        assert_eq!(read_as_javascript(&twice), None);
    }
}
