//! Patterns of a schema, as JavaScript reads them.
//!
//! JSON Schema's patterns are ECMA 262's, and most are written for it as it is without
//! the flag `u`: there a class may be empty, a `-` beside a class escape is itself
//! (`[\w-.]`), a `{` that begins no count is itself (`^{.*}$`), `\0` is a NUL, and `[\b]` a
//! backspace. The validator's engines take none of that; it is written for them here as
//! they do. Nor do they mean the same by `.`, which matches no end of a line, and by `\b`
//! and `\B`, whose words are ASCII's. All else is left as it is.

use serde_json::{Map, Value};

/// Members of a schema that are data, whatever is in them.
pub(crate) const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// Members of a schema whose members are schemas, whatever they are called.
pub(crate) const OF_SCHEMAS: [&str; 4] = ["properties", "$defs", "definitions", "dependentSchemas"];

/// The same schema with its patterns so written; `None` if nothing in it differs.
pub(crate) fn read_as_javascript(schema: &Value) -> Option<Value> {
    match schema {
        Value::Array(items) => {
            let read: Vec<_> = items.iter().map(read_as_javascript).collect();
            let items = || read.iter().zip(items);
            read.iter()
                .any(Option::is_some)
                .then(|| items().map(|(read, was)| read.as_ref().unwrap_or(was).clone()).collect())
        }
        Value::Object(members) => with_members(members, |key, member| match (key, member) {
            ("pattern", Value::String(text)) => rewritten(text).map(Value::String),
            ("patternProperties", Value::Object(by_pattern)) => by_written_pattern(by_pattern),
            (key, Value::Object(schemas)) if OF_SCHEMAS.contains(&key) => {
                with_members(schemas, |_, schema| read_as_javascript(schema))
            }
            (key, _) if DATA.contains(&key) => None,
            _ => read_as_javascript(member),
        }),
        _ => None,
    }
}

/// An object with these of its members read; `None` if none differs.
fn with_members(
    members: &Map<String, Value>,
    read: impl Fn(&str, &Value) -> Option<Value>,
) -> Option<Value> {
    let others: Vec<_> =
        members.iter().filter_map(|(key, member)| Some((key, read(key, member)?))).collect();
    if others.is_empty() {
        return None;
    }
    let mut all = members.clone();
    all.extend(others.into_iter().map(|(key, member)| (key.clone(), member)));
    Some(Value::Object(all))
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

/// Where in a class the next character stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Outside of any.
    Text,
    /// Where a range may begin, or end.
    Class,
    /// Behind what stands for several characters, or ended what began with a `-` that
    /// is itself: a `-` here is itself.
    Set,
    /// Behind a `-` that is itself.
    Dash,
}

/// `.`: the characters themselves, since an escape is dear to translate.
pub(super) const DOT: &str = "[^\n\r\u{2028}\u{2029}]";
/// `\b`. The engine has one of Unicode's words alone.
pub(super) const BOUNDARY: &str =
    "(?:(?<=[A-Za-z0-9_])(?![A-Za-z0-9_])|(?<![A-Za-z0-9_])(?=[A-Za-z0-9_]))";
/// `\B`.
pub(super) const NO_BOUNDARY: &str =
    "(?:(?<=[A-Za-z0-9_])(?=[A-Za-z0-9_])|(?<![A-Za-z0-9_])(?![A-Za-z0-9_]))";

/// `\b` before a character of a word, and behind one: the engine, whose steps are counted,
/// takes fewer than with the whole.
pub(super) const BEGINNING: &str = "(?<![A-Za-z0-9_])";
pub(super) const END: &str = "(?![A-Za-z0-9_])";

fn is_of_a_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

/// Whether a pattern begins with one character of a word, which is there.
fn begins_a_word(pattern: &str) -> bool {
    let mut characters = pattern.chars();
    characters.next().is_some_and(is_of_a_word)
        && !characters.next().is_some_and(|it| matches!(it, '?' | '*' | '{' | '|'))
}

/// Whether a pattern ends with one character of a word, which stands for itself.
fn ends_a_word(pattern: &str) -> bool {
    let mut characters = pattern.chars().rev();
    characters.next().is_some_and(is_of_a_word)
        && characters.next().is_some_and(|it| is_of_a_word(it) || it == ' ')
        && !pattern.contains('\\')
}

/// A longer pattern keeps its `.` and `\b`, in bytes: each takes many times its room while
/// it is compiled.
const REWRITTEN_BYTES_MAX: usize = 16 * 1024;

/// What stands in a class for `\` and this.
fn set(escaped: char) -> &'static str {
    match escaped {
        'd' => "0-9",
        'D' => "\0-/:-\u{10ffff}",
        'w' => "A-Za-z0-9_",
        'W' => "\0-/:-@\\[-\\^`{-\u{10ffff}",
        's' => {
            "\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
        }
        _ => {
            "\0-\u{8}\u{e}-\u{1f}!-\u{9f}\u{a1}-\u{167f}\u{1681}-\u{1fff}\u{200b}-\u{2027}\u{202a}-\u{202e}\
             \u{2030}-\u{205e}\u{2060}-\u{2fff}\u{3001}-\u{fefe}\u{ff00}-\u{10ffff}"
        }
    }
}

/// Whether a group says how what is in it is to be read. JavaScript has few of these:
/// whoever wrote one may mean another language's `.` and `\b`.
fn has_flags(pattern: &str) -> bool {
    pattern.match_indices("(?").any(|(at, opens)| {
        let behind = &pattern[at + opens.len()..];
        let after = behind.trim_start_matches(|it: char| "imsuxRU-".contains(it));
        after.len() < behind.len() && after.starts_with([':', ')'])
    })
}

/// Whether it is no plain regular expression once it is written: it looks around, or
/// refers to a group. In these the validator leaves `\d`, `\s` and `\w` to its engine,
/// which has Unicode's.
fn is_beyond_plain(pattern: &str) -> bool {
    let looks = ["(?=", "(?!", "(?<=", "(?<!", r"\b", r"\B"];
    let refers = |it: &str| it.starts_with(|it: char| ('1'..='9').contains(&it));
    looks.iter().any(|it| pattern.contains(it)) || pattern.split('\\').skip(1).any(refers)
}

/// A pattern as the engines take it; `None` if it is that already.
fn rewritten(pattern: &str) -> Option<String> {
    let is_javascripts = pattern.len() <= REWRITTEN_BYTES_MAX && !has_flags(pattern);
    let writes_sets = is_javascripts && is_beyond_plain(pattern);
    let mut out = String::with_capacity(pattern.len() + 8);
    let mut rest = pattern;
    let mut at = At::Text;
    while let Some(next) = rest.chars().next() {
        let mut length = next.len_utf8();
        let escaped = rest[length..].chars().next().filter(|_| next == '\\');
        let after = if at == At::Dash { At::Set } else { At::Class };
        match (next, escaped) {
            ('\\', Some('0')) if !rest[2..].starts_with(|it: char| it.is_ascii_digit()) => {
                length = 2;
                out.push_str(r"\x00");
                at = if at == At::Text { at } else { after };
            }
            ('\\', Some('b')) if at != At::Text => {
                length = 2;
                out.push_str(r"\x08");
                at = after;
            }
            ('\\', Some(boundary @ ('b' | 'B'))) if at == At::Text && is_javascripts => {
                length = 2;
                out.push_str(match boundary {
                    'B' => NO_BOUNDARY,
                    _ if begins_a_word(&rest[2..]) => BEGINNING,
                    _ if ends_a_word(&pattern[..pattern.len() - rest.len()]) => END,
                    _ => BOUNDARY,
                });
            }
            ('\\', Some(escaped)) if writes_sets && is_set(escaped) => {
                length = 2;
                match at {
                    At::Text => {
                        out.push('[');
                        out.push_str(set(escaped));
                        out.push(']');
                    }
                    _ => {
                        out.push_str(set(escaped));
                        at = At::Set;
                    }
                }
            }
            ('.', _) if at == At::Text && is_javascripts => out.push_str(DOT),
            ('\\', Some(escaped)) => {
                length += escaped.len_utf8();
                // `\p{L}`, which is meant whatever flag there is.
                if matches!(escaped, 'p' | 'P' | 'u' | 'x') && rest[length..].starts_with('{') {
                    let mut name = rest[length..].bytes().take(PROPERTY_BYTES_MAX);
                    length += name.position(|byte| byte == b'}').map_or(0, |end| end + 1);
                }
                out.push_str(&rest[..length]);
                at = match at {
                    At::Text => at,
                    _ if is_set(escaped) => At::Set,
                    _ => after,
                };
            }
            ('{', _) if at == At::Text && !is_count(rest) => out.push_str(r"\{"),
            ('[', _) if at == At::Text => {
                let empty = [("[^]", r"[\s\S]"), ("[]", r"[^\s\S]")];
                match empty.iter().find(|it| rest.starts_with(it.0)) {
                    Some((read, written)) if !closes(&rest[read.len()..]) => {
                        length = read.len();
                        out.push_str(written);
                    }
                    // In other languages a `]` that comes first is itself, and whoever
                    // closes the class once more means that.
                    Some((read, _)) => {
                        length = read.len();
                        out.push_str(read);
                        at = At::Class;
                    }
                    None => {
                        length = if rest.starts_with("[^") { 2 } else { 1 };
                        out.push_str(&rest[..length]);
                        at = At::Class;
                    }
                }
            }
            (']', _) if at != At::Text => {
                out.push(']');
                at = At::Text;
            }
            ('-', _) if at != At::Text => {
                // At an end it is itself to everybody.
                let is_last = rest[1..].starts_with(']');
                let set_follows =
                    rest[1..].strip_prefix('\\').is_some_and(|it| it.starts_with(is_set));
                let is_itself = (at == At::Set && !is_last) || set_follows;
                out.push_str(if is_itself { r"\-" } else { "-" });
                at = if is_itself { At::Dash } else { At::Class };
            }
            (other, _) => {
                out.push(other);
                at = if at == At::Text { at } else { after };
            }
        }
        rest = &rest[length..];
    }
    (out != pattern).then_some(out)
}

/// Whether this begins with how often something is repeated: `{2}`, `{2,}` or `{2,5}`.
/// Nothing is looked at behind that, since each `{` of a pattern is asked.
fn is_count(rest: &str) -> bool {
    let without_number = |text: &str| text.trim_start_matches(|it: char| it.is_ascii_digit()).len();
    let least = &rest[1..];
    let behind = &least[least.len() - without_number(least)..];
    let behind = match behind.strip_prefix(',') {
        Some(most) => &most[most.len() - without_number(most)..],
        None => behind,
    };
    least.starts_with(|it: char| it.is_ascii_digit()) && behind.starts_with('}')
}

/// The longest name of a property of characters, in bytes, with its braces.
const PROPERTY_BYTES_MAX: usize = 64;

/// Whether a class that is open is closed before another is opened.
fn closes(rest: &str) -> bool {
    let mut characters = rest.chars();
    while let Some(next) = characters.next() {
        match next {
            '\\' => drop(characters.next()),
            ']' => return true,
            '[' => return false,
            _ => {}
        }
    }
    false
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
            (r"[\d-a-z]", r"[\d\-a\-z]"),
            (r"[\d-a]b-c[a-z]", r"[\d\-a]b-c[a-z]"),
            (r"[]x[a]", r"[^\s\S]x[a]"),
            (r"[\b]", r"[\x08]"),
            ("^{[a]*}$", r"^\{[a]*}$"),
            ("^{{[^{]*}}x{2}{,3}$", r"^\{\{[^{]*}}x{2}\{,3}$"),
            ("x{", r"x\{"),
        ] {
            assert_eq!(rewritten(pattern).as_deref(), Some(written), "{pattern}");
        }
        for pattern in [
            "",
            "^[^]]+$",
            r"[]\w]",
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
            r"a{2}b{2,}c{2,5}\{",
            r"(?i)a.\b",
            r"(?s:.)\w\.[.]",
            r"\p{L}+[{\p{N}]\u{41}\x{41}",
        ] {
            let expected = if pattern == r"[-\w]" { Some(r"[\-\w]") } else { None };
            assert_eq!(rewritten(pattern).as_deref(), expected, "{pattern}");
        }
    }

    #[test]
    fn a_dot_a_boundary_and_a_set_beside_it_mean_what_javascript_means_by_them() {
        let taken = |pattern: &str, text: &str| {
            let written = rewritten(pattern).unwrap_or_else(|| pattern.to_owned());
            let validator = jsonschema::options()
                .with_pattern_options(jsonschema::PatternOptions::fancy_regex())
                .build(&json!({ "pattern": written }));
            validator.unwrap().is_valid(&json!(text))
        };
        for (pattern, takes, does_not) in [
            (r"\bAPI\b", "调用API接口", "xAPI"),
            (r"API\b", "xAPI", "APIs"),
            (r"^\bx?-\b", "x-a", "-a"),
            (r"^ \bx*$", " x", " "),
            (r"a\d\b", "a1", "a1x"),
            (r"^[a]b\b", "ab", "abc"),
            (r"^[^.]+\b$", "ab", "日本"),
            (r"^日\B本$", "日本", "日a"),
            (r"a\Bb", "ab", "a b"),
            (r"^\b\w+\b$", "a1_", "é"),
            (r"^(?=.)\d$", "5", "٥"),
            (r"^\b[\W]$", "", "a"),
            (r"^(?=.)[\W\d]$", "é", "a"),
            (r"^(?=.)[\W]$", "^", "_"),
            (r"^(?!x)[^\W]$", "_", "["),
            (r"^(?!x)\s$", "\u{feff}", "\u{85}"),
            (r"^(?!x)[\S]$", "\u{85}", "\u{2003}"),
            (r"^(?!x)[\D]$", "٥", "5"),
            (r"^(?!x)[\w-.]+$", "a-.", "a/"),
            ("^.$", "\u{85}", "\r"),
            ("^a.b$", "a\u{b}b", "a\u{2028}b"),
            (r"^(?s:.)$", "\n", ""),
        ] {
            assert!(takes.is_empty() || taken(pattern, takes), "{pattern}: {takes:?}");
            assert!(!taken(pattern, does_not), "{pattern}: {does_not:?}");
        }
    }

    /// Each look ahead is short: of 256 KiB a whole one for each brace would be minutes.
    #[test]
    fn a_pattern_of_braces_is_read_once() {
        for (part, written) in [("{", r"\{"), ("{1", r"\{1"), (r"\p{", r"\p{"), ("{1,", r"\{1,")] {
            let count = (256 << 10) / part.len();
            let read = rewritten(&part.repeat(count));
            let expected = written.repeat(count);
            let is_other = part != written && part != r"\p{";
            match part {
                r"\p{" => assert!(read.is_some_and(|it| it.len() == expected.len() + count)),
                _ => assert!(is_other && read.as_deref() == Some(&expected), "{part}"),
            }
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
        // A property may be called like a word that has data.
        let named = json!({"properties": {"default": {"pattern": "[^]"}}});
        let read = read_as_javascript(&named).unwrap();
        assert_eq!(read["properties"]["default"]["pattern"], r"[\s\S]");
        let twice = json!({"patternProperties": {"[^]": {}, r"[\s\S]": {"type": "string"}}});
        assert_eq!(read_as_javascript(&twice), None);
    }
}
