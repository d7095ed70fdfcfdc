//! The removal of credentials from text and JSON.
//!
//! A value is found as it is, in each of its spellings ([`super::spelling`]),
//! and where it is split: over the items of a list, over the strings of an
//! object, over lines. One automaton looks for all values in all spellings at
//! once, so the time is linear in the text, whatever it is. After the known
//! values come [`super::patterns`].
//!
//! The texts of one result are laid out one after the other, in the order in
//! which they stand, and once more those of the same field of list items
//! (`content[0].text`, `content[1].text`): a value that begins in one and ends
//! in the next is found there.
//!
//! Distrusted is all that a server says. What this does not find is told in
//! `docs/credentials.md`; deliberately absent is any attempt at what a server
//! does on purpose.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use serde_json::Value;

use super::kin::kin;
use super::spelling::{ESCAPES_DEEP_MAX, Ends, Plain, narrow, spellings, torn, undone};
use super::{REDACTED, SECRET_BYTES_MIN, Secret, patterns};

/// Objects and lists within each other that are followed. Deeper JSON is not
/// parsed to begin with.
const DEPTH_MAX: usize = 256;

/// What is looked for, in all spellings together, from which on the automaton is the
/// kind that takes less memory: of a value of 60,000 bytes some 30 MiB instead of 320,
/// a tenth of the time to build it, and up to twice the time to look through a text.
const SMALL_AUTOMATON_BYTES: usize = 32 * 1024;

/// Removes credentials from text and JSON.
#[derive(Clone, Default)]
pub struct Scrubber {
    known: Known,
}

/// The values that are looked for.
#[derive(Clone)]
enum Known {
    /// With an automaton for each set that came by itself.
    These(Vec<Arc<Sought>>),
    /// Nobody can look for them: any text may be one.
    Unsearchable,
}

impl Default for Known {
    fn default() -> Self {
        Self::These(Vec::new())
    }
}

/// What they are looked for with.
struct Sought {
    /// Of values that are whole, and behind them of torn ones.
    spellings: AhoCorasick,
    whole: usize,
    torn: Vec<Ends>,
    /// How often a text is undone: as deep as is promised, and as the values
    /// themselves look escaped.
    deep: usize,
}

impl std::fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scrubber(…)")
    }
}

/// What is left, and whether something is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed<T> {
    /// What is left.
    pub left: T,
    /// How many credentials were removed.
    pub removed: u32,
}

impl Scrubber {
    /// A scrubber for these values, and for everything that looks like one.
    #[must_use]
    pub fn new(secrets: impl IntoIterator<Item = Secret>) -> Self {
        patterns::prepare();
        let mut secrets: Vec<Secret> = secrets.into_iter().collect();
        secrets.extend(secrets.iter().flat_map(kin).collect::<Vec<_>>());
        let mut all: Vec<_> =
            secrets.iter().flat_map(|secret| spellings(secret.expose())).collect();
        // Where values hold white space, what is looked for without it.
        let squeezed: Vec<_> = secrets
            .iter()
            .filter(|secret| secret.expose().contains(|it: char| it.is_ascii_whitespace()))
            .map(|secret| secret.expose().split_ascii_whitespace().collect::<String>())
            .filter(|text| !text.is_empty())
            .map(|text| zeroize::Zeroizing::new(text.into_bytes()))
            .collect();
        all.extend(squeezed);
        let narrow = secrets.iter().filter_map(|secret| narrow(secret.expose()));
        all.extend(narrow.filter(|it| it.len() >= SECRET_BYTES_MIN));
        let mut deep = ESCAPES_DEEP_MAX;
        for secret in &secrets {
            let (plain, own) = undone(secret.expose());
            let as_it_is = secret.expose().bytes().filter(|it| !it.is_ascii_whitespace());
            // A shorter one would meet innocent text.
            if !as_it_is.eq(plain.iter().copied()) && plain.len() >= SECRET_BYTES_MIN {
                deep = deep.max(ESCAPES_DEEP_MAX + own);
                all.push(plain);
            }
        }
        if all.is_empty() {
            return Self::default();
        }
        let whole = all.len();
        let mut ends = Vec::new();
        for torn in secrets.iter().flat_map(|secret| torn(secret.expose())) {
            all.push(torn.left);
            ends.push(torn.ends);
        }
        let bytes: usize = all.iter().map(|it| it.len()).sum();
        let small = (bytes > SMALL_AUTOMATON_BYTES).then_some(AhoCorasickKind::ContiguousNFA);
        let built = AhoCorasick::builder().match_kind(MatchKind::Standard).kind(small).build(&all);
        match built {
            Ok(spellings) => {
                let sought = Sought { spellings, whole, torn: ends, deep };
                Self { known: Known::These(vec![Arc::new(sought)]) }
            }
            Err(error) => {
                // 64 KiB each, and as many as an operator writes down.
                tracing::error!(
                    %error,
                    "credentials too many or too long to look for: all text is removed instead"
                );
                Self { known: Known::Unsearchable }
            }
        }
    }

    /// Replaces every credential in `text` by [`REDACTED`].
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        self.text_counted(text).left
    }

    /// One that looks for what either does. Nothing is built anew.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let known = match (&self.known, &other.known) {
            (Known::These(these), Known::These(others)) => {
                Known::These(these.iter().chain(others).cloned().collect())
            }
            _ => Known::Unsearchable,
        };
        Self { known }
    }

    /// The first `bytes_max` bytes of `text`, or all of it, as [`Scrubber::text`]
    /// would leave them: a credential is looked for in what stands behind them too,
    /// and none is left in part.
    #[must_use]
    pub fn beginning(&self, text: &str, bytes_max: usize) -> String {
        let end = text.floor_char_boundary(bytes_max);
        let mut found = self.find(text.as_bytes());
        found.retain(|part| part.start < end);
        if let Some(last) = found.last_mut() {
            last.end = last.end.min(end);
        }
        replaced(&text[..end], &found)
    }

    /// As [`Scrubber::text`], and says whether there was one.
    #[must_use]
    pub fn text_counted(&self, text: &str) -> Scrubbed<String> {
        let found = self.find(text.as_bytes());
        let removed = count(&found);
        Scrubbed { left: replaced(text, &found), removed }
    }

    /// As [`Scrubber::text_counted`], of bytes that may be no text. It comes before they
    /// are encoded for a program: nothing is found in base64 but what is in it as it is,
    /// and a mark in there would cost all the rest.
    #[must_use]
    pub fn bytes_counted(&self, bytes: Vec<u8>) -> Scrubbed<Vec<u8>> {
        let found = self.find(&bytes);
        let removed = count(&found);
        if found.is_empty() {
            return Scrubbed { left: bytes, removed };
        }
        let mut left = Vec::with_capacity(bytes.len());
        let mut at = 0;
        for part in found {
            left.extend_from_slice(&bytes[at..part.start]);
            left.extend_from_slice(REDACTED.as_bytes());
            at = part.end;
        }
        left.extend_from_slice(&bytes[at..]);
        Scrubbed { left, removed }
    }

    /// Replaces every credential in the strings and keys of `value`, and
    /// numbers that spell one out.
    #[must_use]
    pub fn json(&self, value: Value) -> Value {
        self.json_counted(value).left
    }

    /// As [`Scrubber::json`], and says whether there was one.
    #[must_use]
    pub fn json_counted(&self, value: Value) -> Scrubbed<Value> {
        let in_rows = matches!(&self.known, Known::These(these) if !these.is_empty());
        let mut texts = Texts { in_rows, ..Texts::default() };
        texts.collect(&value, 0, 0);
        let mut found: Vec<Vec<Range<usize>>> =
            texts.all.iter().map(|text| self.find(text.as_bytes())).collect();
        let mut removed: u32 = found.iter().map(|found| count(found)).sum();
        if in_rows {
            // Split ones: only where there is more than one text to be split
            // over, and only what was not found in one alone.
            let rows = texts.by_field.values().chain(std::iter::once(&texts.values));
            for row in rows.filter(|row| row.len() > 1) {
                removed = removed.saturating_add(self.find_split(row, &texts.all, &mut found));
            }
        }
        if found.iter().all(Vec::is_empty) {
            return Scrubbed { left: value, removed: 0 };
        }
        let mut next = found.iter();
        let left = rebuilt(value, &mut next, 0);
        Scrubbed { left, removed }
    }

    /// Where there is a credential in one text: parts that do not touch, in
    /// order.
    fn find(&self, text: &[u8]) -> Vec<Range<usize>> {
        let mut found = self.find_known(text);
        found.extend(patterns::find(text));
        joined(found)
    }

    fn find_known(&self, text: &[u8]) -> Vec<Range<usize>> {
        let known = match &self.known {
            Known::These(known) => known,
            Known::Unsearchable if !text.is_empty() => {
                return std::iter::once(0..text.len()).collect();
            }
            Known::Unsearchable => return Vec::new(),
        };
        let Some(deep) = known.iter().map(|it| it.deep).max() else { return Vec::new() };
        // With the ends of a torn one, which is nothing by itself.
        let matches = |text: &[u8], meet: &mut dyn FnMut(Range<usize>, Option<Ends>)| {
            for known in known {
                for found in known.spellings.find_overlapping_iter(text) {
                    let torn = found.pattern().as_usize().checked_sub(known.whole);
                    meet(found.range(), torn.map(|torn| known.torn[torn]));
                }
            }
        };
        let mut all = Vec::new();
        matches(text, &mut |found, torn| {
            if torn.is_none() {
                add(&mut all, found);
            }
        });
        // Most texts have nothing to undo.
        if text.iter().any(|it| matches!(it, b'%' | b'\\' | b'&') || it.is_ascii_whitespace()) {
            Plain::each(text, deep, |plain| {
                matches(&plain.bytes, &mut |found, torn| {
                    let origin = match torn {
                        None => Some(plain.origin(found)),
                        Some(ends) => plain.torn_origin(found, ends),
                    };
                    if let Some(origin) = origin {
                        add(&mut all, origin);
                    }
                });
            });
        }
        joined(all)
    }

    /// Marks what is split over several texts, laid out one after the other.
    /// How many there were.
    fn find_split(&self, row: &[usize], all: &[String], found: &mut [Vec<Range<usize>>]) -> u32 {
        let mut laid_out = Vec::new();
        let mut starts = Vec::with_capacity(row.len());
        for text in row {
            starts.push(laid_out.len());
            laid_out.extend_from_slice(all[*text].as_bytes());
        }
        let mut removed = 0;
        // By text.
        let mut more: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
        for part in self.find_known(&laid_out) {
            // Which texts it reaches into.
            let first = starts.partition_point(|start| *start <= part.start) - 1;
            let mut is_new = false;
            for (position, start) in starts.iter().enumerate().skip(first) {
                if *start >= part.end {
                    break;
                }
                let text = row[position];
                let own = part.start.max(*start) - start..(part.end - start).min(all[text].len());
                let before = found[text].partition_point(|it| it.start <= own.start);
                let covered = before > 0 && own.end <= found[text][before - 1].end;
                if own.is_empty() || covered {
                    continue;
                }
                is_new = true;
                more.entry(text).or_default().push(own);
            }
            removed += u32::from(is_new);
        }
        for (text, mut more) in more {
            more.append(&mut found[text]);
            found[text] = joined(more);
        }
        removed
    }
}

/// Adds a part, joined to the last one where they touch: an attacker chooses
/// how many there are, and must not choose how much memory they take.
fn add(all: &mut Vec<Range<usize>>, part: Range<usize>) {
    match all.last_mut() {
        Some(last) if part.start <= last.end && last.start <= part.end => {
            last.start = last.start.min(part.start);
            last.end = last.end.max(part.end);
        }
        _ => all.push(part),
    }
}

/// The same parts, in order, those that touch made one.
fn joined(mut parts: Vec<Range<usize>>) -> Vec<Range<usize>> {
    parts.sort_by_key(|part| (part.start, part.end));
    let mut all = Vec::with_capacity(parts.len());
    for part in parts {
        add(&mut all, part);
    }
    all
}

fn count(found: &[Range<usize>]) -> u32 {
    u32::try_from(found.len()).unwrap_or(u32::MAX)
}

/// A text with these parts replaced. Parts widen to whole characters.
fn replaced(text: &str, found: &[Range<usize>]) -> String {
    if found.is_empty() {
        return text.to_owned();
    }
    let mut left = String::with_capacity(text.len());
    let mut at = 0;
    for part in found {
        let start = text.floor_char_boundary(part.start).max(at);
        left.push_str(&text[at..start]);
        left.push_str(REDACTED);
        at = text.ceil_char_boundary(part.end).max(start);
    }
    left.push_str(&text[at..]);
    left
}

/// All texts of a value, keys and numbers too, in one order: that of
/// [`rebuilt`].
#[derive(Default)]
struct Texts {
    all: Vec<String>,
    /// Whether anything is looked for that can be split over them.
    in_rows: bool,
    /// Strings, in their order.
    values: Vec<usize>,
    /// Those of the same field, whichever item of a list it is in. The field
    /// is the hash of its path: a server chooses how long paths are, and how
    /// many.
    by_field: BTreeMap<u64, Vec<usize>>,
}

impl Texts {
    fn collect(&mut self, value: &Value, field: u64, depth: usize) {
        if depth > DEPTH_MAX {
            return;
        }
        match value {
            Value::String(text) => {
                if self.in_rows {
                    self.values.push(self.all.len());
                    self.by_field.entry(field).or_default().push(self.all.len());
                }
                self.all.push(text.clone());
            }
            Value::Number(number) => self.all.push(number.to_string()),
            Value::Array(items) => {
                let field = within(field, None);
                for item in items {
                    self.collect(item, field, depth + 1);
                }
            }
            Value::Object(fields) => {
                for (key, value) in fields {
                    self.all.push(key.clone());
                    self.collect(value, within(field, Some(key)), depth + 1);
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }
}

/// The field of this key within another, or of a list's items. Two that
/// collide are looked at together, no more.
fn within(field: u64, key: Option<&str>) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    (field, key).hash(&mut hasher);
    hasher.finish()
}

fn rebuilt<'a>(
    value: Value,
    found: &mut impl Iterator<Item = &'a Vec<Range<usize>>>,
    depth: usize,
) -> Value {
    const NOTHING: &Vec<Range<usize>> = &Vec::new();
    if depth > DEPTH_MAX {
        return Value::String(REDACTED.to_owned());
    }
    match value {
        Value::String(text) => {
            let found = found.next().unwrap_or(NOTHING);
            Value::String(if found.is_empty() { text } else { replaced(&text, found) })
        }
        Value::Number(number) => match found.next().unwrap_or(NOTHING).is_empty() {
            true => Value::Number(number),
            false => Value::String(REDACTED.to_owned()),
        },
        Value::Array(items) => {
            items.into_iter().map(|item| rebuilt(item, found, depth + 1)).collect()
        }
        Value::Object(fields) => fields
            .into_iter()
            .map(|(key, value)| {
                let found_in_key = found.next().unwrap_or(NOTHING);
                let key = if found_in_key.is_empty() { key } else { replaced(&key, found_in_key) };
                (key, rebuilt(value, found, depth + 1))
            })
            .collect(),
        Value::Null | Value::Bool(_) => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use serde_json::json;

    const VALUE: &str = "s3cr3t/Value+with=7 \"odd\" bytes";

    fn scrubber(values: &[&str]) -> Scrubber {
        Scrubber::new(values.iter().map(|value| Secret::new((*value).to_owned()).unwrap()))
    }

    fn percent(text: &str, all: bool) -> String {
        let plain = |it: u8| !all && it.is_ascii_alphanumeric();
        text.bytes()
            .map(|it| if plain(it) { char::from(it).to_string() } else { format!("%{it:02x}") })
            .collect()
    }

    #[test]
    fn a_known_value_is_found_in_every_spelling() {
        let escaped = json!(VALUE).to_string();
        let unicode: String = VALUE.bytes().map(|it| format!("\\u{it:04X}")).collect();
        let lines: Vec<String> = STANDARD
            .encode(VALUE)
            .as_bytes()
            .chunks(8)
            .map(|it| String::from_utf8_lossy(it).into())
            .collect();
        let spelled = [
            VALUE.to_owned(),
            STANDARD.encode(VALUE),
            STANDARD.encode(format!("x{VALUE}y")),
            STANDARD.encode(format!("xy{VALUE}")),
            URL_SAFE_NO_PAD.encode(format!("user:{VALUE}")),
            lines.join("\r\n"),
            crate::hex(VALUE.as_bytes()),
            crate::hex(VALUE.as_bytes()).to_uppercase(),
            percent(VALUE, true),
            percent(VALUE, false),
            percent(VALUE, false)
                .to_uppercase()
                .replace("S3CR3T", "s3cr3t")
                .replace("VALUE", "Value")
                .replace("WITH", "with")
                .replace("ODD", "odd")
                .replace("BYTES", "bytes"),
            percent(&percent(VALUE, true), true),
            percent(&STANDARD.encode(VALUE), false),
            escaped[1..escaped.len() - 1].to_owned(),
            unicode,
            VALUE.replace('"', "&quot;").replace('+', "&#43;"),
        ];
        let scrubber = scrubber(&[VALUE]);
        for text in spelled {
            let said = json!({ "said": format!("before {text} after") });
            let Scrubbed { left, removed } = scrubber.json_counted(said);
            assert_eq!(removed, 1, "{text}: {left}");
            let left = left["said"].as_str().unwrap();
            assert!(left.starts_with("before ") && left.ends_with(" after"), "{text}: {left}");
            // What base64 shares with its neighbours may stay: a byte each.
            assert!(left.len() < "before  after".len() + REDACTED.len() + 20, "{text}: {left}");
        }
    }

    /// Ways to escape a text, each of which escapes what it escapes itself.
    const ESCAPES: [fn(&str) -> String; 6] = [
        |text| percent(text, true),
        |text| percent(text, false),
        |text| {
            let escaped = json!(text).to_string();
            escaped[1..escaped.len() - 1].replace('/', "\\/")
        },
        |text| text.chars().map(|it| format!("\\u{:04x}", u32::from(it))).collect(),
        |text| text.replace('&', "&amp;").replace('<', "&lt;").replace('/', "&#x2F;"),
        |text| text.chars().map(String::from).collect::<Vec<_>>().join("\r\n"),
    ];

    #[test]
    fn a_value_that_looks_escaped_itself_is_found_in_every_mixture_of_escapes() {
        for value in [
            "postgres://app:p%40ss-w0rd@db/x",
            "CORP\\reader:S3cretpw",
            "a&amp;b%2526c\\u0041\\\\d/e",
            "line one%0a\\\nline two&#65;",
        ] {
            let scrubber = scrubber(&[value]);
            let mut spelled = vec![value.to_owned()];
            let mut last = spelled.clone();
            for _ in 0..3 {
                last = last.iter().flat_map(|it| ESCAPES.map(|escape| escape(it))).collect();
                spelled.extend(last.iter().cloned());
            }
            for text in spelled {
                let left = scrubber.text(&format!("before {text} after"));
                assert_eq!(left, format!("before {REDACTED} after"), "{value} as {text}");
            }
        }
    }

    #[test]
    fn a_value_that_ends_like_an_escape_is_found_whatever_stands_behind_it() {
        for (value, text) in [
            ("a/half-escape\\", r#"{"it":"a\/half-escape\\"}"#),
            ("a/half-escape%4", "a%2Fhalf-escape%2541"),
            // Escaped by somebody who leaves the value's own half alone.
            ("a/half-escape%4", "a&#x2F;half-escape%41 and more"),
            ("a/half-escape%", "a&#x2F;half-escape%0a"),
            ("a/half-escape\\u00", "a%2Fhalf-escape\\u0041"),
            ("a/half-escape\\u00", "a\\/half-escape\\u000a!"),
            ("a/half-escape\\", "a\\/half-escape\\tb"),
            ("a/half-escape\\ud83d\\ude", "a\\/half-escape\\ud83d\\ude00"),
            ("3d\\ude00/half-escape", "\\ud83d\\ude00&#x2F;half-escape"),
            ("a/half-escape&#6", "a\\/half-escape&#65;"),
            ("a/half-escape&am", "a\\/half-escape&amp;"),
            ("1/half-escape&am", "%41&#x2F;half-escape&amp;"),
            ("0041/half-escape", "\\u0041&#x2F;half-escape"),
            ("n/half-escape", "C:\\n&#x2F;half-escape"),
            ("a/half-escape&#x4", "a\\/half-escape&#x41;"),
            ("x41/half-escape", "\\x41&#x2F;half-escape"),
            ("u0041/half-escape", "\\u0041&#x2F;half-escape"),
            ("mp;/half-escape", "&amp;&#x2F;half-escape"),
        ] {
            let left = scrubber(&[value]).text(text);
            assert!(left.contains(REDACTED) && !left.contains("half"), "{left}");
        }
    }

    #[test]
    fn a_value_beyond_ascii_is_found_in_escapes_of_its_characters_and_of_its_bytes() {
        for (value, text) in [
            ("p\u{e4}ssw\u{f6}rd", "p\\xe4ssw\\xf6rd"),
            ("p\u{e4}ssw\u{f6}rd", "p\\xc3\\xa4ssw\\xC3\\xB6rd"),
            ("p\u{e4}ssw\u{f6}rd", "p%E4ssw%F6rd"),
            ("p\u{e4}ssw\u{f6}rd", "p&#228;ssw&#xF6;rd"),
            ("p\u{e4}ss \u{20ac}ord", "p\\xe4ss \\u20acord"),
            ("p\u{e4}ssw\u{f6}rd", "p\\\\xe4ssw\\\\xf6rd"),
            // As Python's `json.dumps` has it.
            ("p\u{e4}ss-\u{1f600}-word", "p\\u00e4ss-\\ud83d\\ude00-word"),
            ("p\u{e4}ss-\u{1f600}-word", "p\\\\u00E4ss-\\\\uD83D\\\\uDE00-word"),
        ] {
            let left = scrubber(&[value]).text(&format!("before {text} after"));
            assert_eq!(left, format!("before {REDACTED} after"), "{text}");
        }
    }

    #[test]
    fn a_value_with_blanks_is_found_as_a_form_spells_it() {
        let scrubber = scrubber(&["a pass phrase & more"]);
        for text in [
            "/find?key=a+pass+phrase+%26+more&x=1",
            "a+pass+phrase+&+more",
            "a%2Bpass%2Bphrase%2B%2526%2Bmore",
        ] {
            let left = scrubber.text(text);
            assert!(left.contains(REDACTED) && !left.contains("pass"), "{left}");
        }
    }

    #[test]
    fn what_is_left_of_a_value_is_none_where_nothing_is_torn_from_it() {
        let scrubber = scrubber(&["1/half-escape%4"]);
        for innocent in ["half-escape 100%", "a /half-escape&amp;", "x/half-escape %41"] {
            assert_eq!(scrubber.text(innocent), innocent);
        }
        let short = self::scrubber(&["abcdef%4"]).text("abcdef\\x41 b");
        assert_eq!(short, "abcdef\\x41 b", "what is left is too short to be told from words");
    }

    #[test]
    fn a_value_is_found_where_one_escape_is_all_that_is_odd_about_a_text() {
        let scrubber = scrubber(&["secret-value"]);
        for text in ["secret&#45;value", "secret%2dvalue", "secret\\x2dvalue", "secret-\nvalue"] {
            assert_eq!(scrubber.text(text), REDACTED, "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_lose_all_values_at_once() {
        let scrubber = scrubber(&["abcdefghij", "ghijklmnop", "removed]"]);
        let Scrubbed { left, removed } = scrubber.bytes_counted(b"\xFFabcdefghijklmnop\xFF".into());
        assert_eq!((left, removed), (b"\xFF[credential removed]\xFF".into(), 1));
        let escaped = b"\xFFabc%64efghij".to_vec();
        assert_eq!(scrubber.bytes_counted(escaped).left, b"\xFF[credential removed]");
        let innocent = b"\xFFabcdefghi".to_vec();
        let kept = Scrubbed { left: innocent.clone(), removed: 0 };
        assert_eq!(scrubber.bytes_counted(innocent), kept);
    }

    #[test]
    fn bytes_that_are_no_text_lose_what_has_the_shape_of_a_credential() {
        let token = b"ghp_A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8".as_slice();
        let key = b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQ==\n-----END PRIVATE KEY-----";
        for credential in [token, key] {
            let bytes = [b"\x89PNG\0\xFF", credential, b"\0\xFF"].concat();
            let Scrubbed { left, removed } = Scrubber::default().bytes_counted(bytes);
            assert_eq!((left, removed), (b"\x89PNG\0\xFF[credential removed]\0\xFF".into(), 1));
        }
    }

    #[test]
    fn a_value_that_is_short_without_its_escapes_is_found_as_it_is_and_leaves_words_alone() {
        let scrubber = scrubber(&["%74%6f%6b%65%6e"]);
        assert_eq!(scrubber.text("a token"), "a token");
        assert_eq!(scrubber.text("a %74%6f%6b%65%6e"), format!("a {REDACTED}"));
        let just_long_enough = self::scrubber(&["%61bcdefgh"]);
        assert_eq!(just_long_enough.text("an abcdefgh"), format!("an {REDACTED}"));
    }

    #[test]
    fn a_value_split_over_parts_is_found_whatever_stands_between() {
        let scrubber = scrubber(&[VALUE]);
        let spelled = [VALUE.to_owned(), STANDARD.encode(VALUE), crate::hex(VALUE.as_bytes())];
        for text in &spelled {
            for at in 1..text.len() {
                let (first, second) = text.split_at(at);
                let parts = json!([
                    {"type": "text", "text": format!("a {first}")},
                    {"type": "text", "text": format!("{second} b")},
                ]);
                let Scrubbed { left, removed } = scrubber.json_counted(parts);
                assert!(removed >= 1, "{text} at {at}: {left}");
                let whole = left[0]["text"].as_str().unwrap().to_owned()
                    + left[1]["text"].as_str().unwrap();
                assert!(!scrubber.find_known(whole.as_bytes()).len() > 0, "{whole}");
                assert!(!whole.contains(first) || at < 3, "{whole}");
            }
        }
        let bytes: Vec<String> = VALUE.chars().map(String::from).collect();
        assert!(scrubber.json_counted(json!(bytes)).removed >= 1);
        let fields = json!({"a": VALUE[..9], "b": VALUE[9..]});
        assert!(scrubber.json_counted(fields).removed >= 1);
    }

    #[test]
    fn known_values_leave_strings_keys_and_numbers() {
        let scrubber = scrubber(&["s3cr3t", "s3cr3t-long", "12345"]);
        let dirty = json!({
            "a s3cr3t key": ["x s3cr3t-long y", {"n": 12345, "m": 123}],
            "clean": "s3cr",
        });
        assert_eq!(
            scrubber.json(dirty),
            json!({
                format!("a {REDACTED} key"): [format!("x {REDACTED} y"), {"n": REDACTED, "m": 123}],
                "clean": "s3cr",
            })
        );
    }

    #[test]
    fn a_value_that_is_whole_in_one_text_counts_once_however_many_there_are() {
        let said = json!(["x", VALUE, "y"]);
        let Scrubbed { left, removed } = scrubber(&[VALUE]).json_counted(said);
        assert_eq!((left, removed), (json!(["x", REDACTED, "y"]), 1));
    }

    #[test]
    fn what_stands_behind_something_too_deep_to_be_followed_is_looked_through() {
        for lists in [DEPTH_MAX - 1, DEPTH_MAX, DEPTH_MAX + 50] {
            let deep = |text: &str| (0..lists).fold(json!(text), |inner, _| json!([inner]));
            let left = scrubber(&[VALUE]).json(json!([deep("clean"), VALUE]));
            assert_eq!(left[1], REDACTED, "{lists}");
            let left = scrubber(&[VALUE]).json(json!([VALUE, deep(VALUE)])).to_string();
            assert_eq!(left.matches(REDACTED).count(), 2, "{lists}");
        }
    }

    #[test]
    fn values_that_overlap_leave_nothing_of_either() {
        let scrubber = scrubber(&["abcdefghij", "ghijklmnop"]);
        assert_eq!(scrubber.text("x abcdefghijklmnop y"), format!("x {REDACTED} y"));
    }

    #[test]
    fn a_clean_result_is_the_same_byte_for_byte() {
        let clean = json!({
            "hash": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "text": "50% off \\ & more; caf\u{e9} %C3%A9",
            "n": [1, 2.5, true, null],
        });
        for scrubber in [scrubber(&[VALUE]), Scrubber::default()] {
            let Scrubbed { left, removed } = scrubber.json_counted(clean.clone());
            assert_eq!((left.to_string(), removed), (clean.to_string(), 0));
        }
    }

    #[test]
    fn where_nothing_can_be_looked_for_no_text_is_left() {
        let scrubber = Scrubber { known: Known::Unsearchable };
        assert_eq!(scrubber.text(VALUE), REDACTED);
        assert_eq!(scrubber.text(""), "");
        let said = json!({"said": [VALUE, 12345, true, null, ""]});
        assert_eq!(
            scrubber.json_counted(said),
            Scrubbed { left: json!({REDACTED: [REDACTED, REDACTED, true, null, ""]}), removed: 3 }
        );
    }

    #[test]
    fn what_nobody_can_look_for_stays_so_beside_what_can_be_looked_for() {
        let none = Scrubber { known: Known::Unsearchable };
        let some = scrubber(&[VALUE]);
        assert_eq!([none.and(&some), some.and(&none)].map(|it| it.text("a")), [REDACTED; 2]);
    }

    #[test]
    fn a_texts_beginning_has_no_part_of_a_value_that_goes_on_behind_it() {
        let scrubber = scrubber(&["secret-value"]);
        let text = "\u{e9}secret-value secret-value!";
        for end in 0..=2 * text.len() {
            let left = scrubber.beginning(text, end);
            assert!(!left.contains("se"), "{end}: {left}");
            assert!(scrubber.text(text).starts_with(&left), "{end}: {left}");
        }
        assert_eq!(scrubber.beginning(text, 15), format!("\u{e9}{REDACTED} "));
        assert_eq!(scrubber.beginning(text, usize::MAX), scrubber.text(text));
    }

    #[test]
    fn a_part_of_a_character_takes_the_character_with_it() {
        let scrubber = scrubber(&["secret-value"]);
        let text = "\u{e9}secret-value\u{e9}";
        assert_eq!(scrubber.text(text), format!("\u{e9}{REDACTED}\u{e9}"));
        // Two of one character.
        assert_eq!(replaced("ab\u{1f600}c", &[0..3, 4..6]), format!("{REDACTED}{REDACTED}c"));
    }

    #[test]
    fn a_text_made_of_nothing_but_matches_takes_no_more_memory_than_it_is_long() {
        let scrubber = scrubber(&["aaaaaaaa", "aaaaaaaaaaaaaaaa"]);
        let found = scrubber.find_known("a".repeat(1 << 20).as_bytes());
        assert_eq!(found.as_slice(), std::slice::from_ref(&(0..1 << 20)));
    }
}
