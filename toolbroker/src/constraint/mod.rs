//! What a grant asks of a call's arguments.
//!
//! # How a constraint is written
//! One text, the same on the command line, in a token and in an answer:
//!
//! ```text
//! constraint = pointer test
//! pointer    = the place in the arguments: a JSON pointer (RFC 6901) in the
//!              form that section 6 gives it for URLs, where %XX stands for a
//!              byte; `=`, `<`, `>`, `^` and `%` in a name are written so
//! test       = "="  JSON value     is this value
//!            | "^=" text           is a string that begins with this
//!            | "=~" expression     is a string that this matches as a whole
//!            | "<=" JSON number    is a number, and at most this; so "<",
//!            | ">=" JSON number    ">" and ">="
//! where      = tool ":" constraint
//! ```
//!
//! # What holds
//! A constraint holds over a value that is there. A place that is missing, or
//! holds a value of another type, is outside: whoever wrote the constraint
//! thought of a value. Constraints are held against the arguments after they
//! were parsed, which are the ones that the server gets, byte for byte.
//!
//! - Nothing beside a value may be taken for it. Servers find members without regard to
//!   case, or by one of two names (`maxItems`, `max_items`), and take the last one or the
//!   first: a member whose name is the constrained one's to such a server ([`folded`]),
//!   or that of an object on the way to it, is refused unless the tool's schema lists it.
//! - Numbers are compared as they are written, exactly; a string of digits
//!   is no number.
//! - Equality is that of JSON: members in any order, items in theirs, numbers
//!   by value.
//! - A prefix is a prefix of text. Nothing is normalised; a value with a `..`
//!   segment is refused under a prefix, however it is hidden from whom it is
//!   resolved by ([`climbs`]), since that leaves the place that the prefix
//!   names. A prefix of a folder ends with its `/`, or it fits its neighbours
//!   too.
//! - A pattern is of the `regex` crate: time linear in the value, whose
//!   length is bounded all the same. `\d` is any digit of Unicode; `[0-9]` is
//!   ten.
//!
//! Distrusted are the text of a constraint, which any holder of a grant may
//! append, and the arguments. Deliberately absent are `or` and `not`: more
//! constraints can only mean less.

mod decimal;
mod written;

use std::cmp::Ordering;
use std::fmt;

use regex::Regex;
use serde_json::{Map, Value};

use self::decimal::Decimal;

pub(crate) use self::decimal::first_changed;
pub use self::written::{WrittenError, parse_where};
use crate::uri::climbs;

/// The longest string a pattern is matched against, in bytes. With
/// [`PATTERN_BYTES_MAX`] it bounds the time of one match.
const MATCHED_BYTES_MAX: usize = 4 * 1024;
/// A compiled pattern, in bytes; and what its lazy automaton may take beside
/// it.
const PATTERN_BYTES_MAX: usize = 96 * 1024;
/// Nesting of a pattern.
const PATTERN_NEST_MAX: u32 = 32;

/// Words of a schema by which a value may have members that `properties` does not list.
const MEMBERS_BESIDE: [&str; 14] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "additionalProperties",
    "allOf",
    "anyOf",
    "dependencies",
    "dependentSchemas",
    "if",
    "items",
    "oneOf",
    "patternProperties",
    "prefixItems",
    "unevaluatedProperties",
];

/// Those of them that take effect beside `additionalProperties: false`, and do not take
/// its place as a reference does in drafts before 2019-09.
const COMPOSED: [&str; 7] =
    ["allOf", "anyOf", "dependencies", "dependentSchemas", "if", "oneOf", "unevaluatedProperties"];

/// One constraint: a place in the arguments and what is asked of the value
/// there.
#[derive(Clone, Debug)]
pub struct Constraint {
    text: String,
    /// The pointer's tokens, decoded.
    place: Vec<String>,
    test: Test,
}

#[derive(Clone, Debug)]
enum Test {
    /// Compared as [`same`] does.
    Equals(Value),
    /// A number, as exactly as it is written.
    EqualsNumber(Decimal),
    Prefix(String),
    /// Anchored at both ends.
    Pattern(Regex),
    /// The orderings of the value to the number that are inside.
    Range(Decimal, &'static [Ordering]),
}

/// All constraints on one tool's arguments.
#[derive(Clone, Debug, Default)]
pub struct Constraints(Vec<Constraint>);

/// A call whose arguments are outside a constraint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grant asks for {constraint}, and the value there {why}{}", named(.twin.as_deref()))]
pub struct Violation {
    /// The constraint, as it is written.
    pub constraint: String,
    /// What is wrong with the value.
    pub why: Outside,
    /// The member of the arguments that is wrong, for [`Outside::Twin`].
    pub twin: Option<String>,
}

fn named(twin: Option<&str>) -> String {
    twin.map(|name| format!(": leave {name:?} out")).unwrap_or_default()
}

/// What is wrong with a value. It never quotes the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outside {
    /// There is none.
    Missing,
    /// It is of another type.
    NoNumber,
    /// It is of another type.
    NoString,
    /// Its digits cannot be compared exactly.
    NotExact,
    /// It is too long to be matched.
    TooLong,
    /// It has a segment `..`, or is encoded so often that it may hide one.
    Climbs,
    /// It is another value.
    Other,
    /// There is a member that may be taken for it, or for an object that it is in.
    Twin,
}

impl fmt::Display for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("is missing"),
            Self::NoNumber => f.write_str("is no number"),
            Self::NoString => f.write_str("is no string"),
            Self::NotExact => f.write_str("has more digits than can be compared"),
            Self::TooLong => write!(f, "has more than {MATCHED_BYTES_MAX} bytes"),
            Self::Climbs => f.write_str("has a `..` segment, or may hide one"),
            Self::Other => f.write_str("is another"),
            Self::Twin => f.write_str("is not the only one that a server may take for it"),
        }
    }
}

impl Constraint {
    /// Reads a constraint; see the module's head.
    ///
    /// # Errors
    /// [`WrittenError`], with the place of what is wrong.
    pub fn parse(text: &str) -> Result<Self, WrittenError> {
        written::parse(text)
    }

    /// As it is written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What it keeps in memory at most, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let compiled = match self.test {
            Test::Pattern(_) => 2 * PATTERN_BYTES_MAX,
            _ => 0,
        };
        compiled + 4 * self.text.len() + size_of::<Self>()
    }

    /// The first name on the way to its place that is none of a schema's: where arguments
    /// fit the schema all the same, what they have there is nothing that a server looks
    /// at. `None` too where the schema leaves open what is there.
    #[must_use]
    pub fn unknown_to(&self, schema: &Value) -> Option<&str> {
        let mut schema = schema;
        for token in &self.place {
            let words = schema.as_object()?;
            let is_open = |word: &str| words.get(word).is_some_and(|it| *it != Value::Bool(false));
            // What schemas beside say can then add no member.
            let is_closed = words.get("additionalProperties") == Some(&Value::Bool(false));
            let is_beside = |word: &str| !(is_closed && COMPOSED.contains(&word));
            if MEMBERS_BESIDE.iter().any(|word| is_beside(word) && is_open(word)) {
                return None;
            }
            match words.get("properties")?.as_object()?.get(token) {
                Some(member) => schema = member,
                None => return Some(token),
            }
        }
        None
    }

    fn check(&self, arguments: &Value) -> Result<(), Outside> {
        let value = self.find(arguments).ok_or(Outside::Missing)?;
        let inside = match &self.test {
            Test::Equals(expected) => same(expected, value),
            Test::EqualsNumber(expected) => number(value)? == *expected,
            Test::Prefix(prefix) => {
                let text = value.as_str().ok_or(Outside::NoString)?;
                if climbs(text) {
                    return Err(Outside::Climbs);
                }
                text.starts_with(prefix.as_str())
            }
            Test::Pattern(pattern) => {
                let text = value.as_str().ok_or(Outside::NoString)?;
                if text.len() > MATCHED_BYTES_MAX {
                    return Err(Outside::TooLong);
                }
                pattern.is_match(text)
            }
            Test::Range(bound, inside) => inside.contains(&number(value)?.cmp(bound)),
        };
        if inside { Ok(()) } else { Err(Outside::Other) }
    }

    /// The first member that a server may take for one on the way to its place, and that
    /// is none of the tool's own.
    fn twin<'a>(&self, arguments: &'a Value, schema: &str) -> Option<&'a str> {
        let mut value = arguments;
        for (depth, token) in self.place.iter().enumerate() {
            value = match value {
                Value::Object(members) => {
                    let is_twin = |name: &&String| *name != token && is_same_name(name, token);
                    let mut twins = members.keys().filter(is_twin).peekable();
                    if twins.peek().is_some() {
                        // Read for a call that is odd, and for no other.
                        let schema = serde_json::from_str(schema).unwrap_or_default();
                        let own = properties_at(&schema, &self.place[..depth]);
                        let is_free = |name: &&String| own.is_none_or(|it| !it.contains_key(*name));
                        if let Some(twin) = twins.find(is_free) {
                            return Some(twin);
                        }
                    }
                    members.get(token)?
                }
                Value::Array(items) => items.get(index(token)?)?,
                _ => return None,
            };
        }
        None
    }

    fn find<'a>(&self, arguments: &'a Value) -> Option<&'a Value> {
        self.place.iter().try_fold(arguments, |value, token| match value {
            Value::Object(members) => members.get(token),
            Value::Array(items) => items.get(index(token)?),
            _ => None,
        })
    }
}

impl Constraints {
    /// No constraint.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds one: what holds from now on holds less often.
    pub fn push(&mut self, constraint: Constraint) {
        self.0.push(constraint);
    }

    /// What they keep in memory at most, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.iter().map(Constraint::bytes).sum()
    }

    /// Holds a call's arguments against all of them. `schema` is the tool's, as JSON.
    ///
    /// # Errors
    /// [`Violation`], for the first that does not hold.
    pub fn check(&self, arguments: &Value, schema: &str) -> Result<(), Violation> {
        for constraint in &self.0 {
            let outside =
                |why, twin| Err(Violation { constraint: constraint.text.clone(), why, twin });
            if let Err(why) = constraint.check(arguments) {
                return outside(why, None);
            }
            if let Some(twin) = constraint.twin(arguments, schema) {
                return outside(Outside::Twin, Some(crate::cut(twin, 128)));
            }
        }
        Ok(())
    }
}

/// An array's index, in the one form that RFC 6901 gives it.
fn index(token: &str) -> Option<usize> {
    let plain = token.bytes().all(|byte| byte.is_ascii_digit());
    if !plain || (token.len() > 1 && token.starts_with('0')) {
        return None;
    }
    token.parse().ok()
}

/// The members that a schema lists for the value at a place, if it does.
fn properties_at<'s>(schema: &'s Value, place: &[String]) -> Option<&'s Map<String, Value>> {
    let step = |schema: &'s Value, token: &String| {
        schema.get("properties").and_then(|it| it.get(token)).or_else(|| {
            let is_index = index(token).is_some();
            schema.get("items").filter(|_| is_index)
        })
    };
    place.iter().try_fold(schema, step)?.get("properties")?.as_object()
}

/// Whether some server takes two names for one.
fn is_same_name(a: &str, b: &str) -> bool {
    folded(a).eq(folded(b)) || folded_whole(a).eq(folded_whole(b))
}

/// A member's name as the most careless server reads it: without regard to case, to what
/// parts words, to what is not seen, or to what stands behind a zero.
pub(crate) fn folded(name: &str) -> impl Iterator<Item = char> {
    folded_whole(name.split('\0').next().unwrap_or_default())
}

/// The same by one to whom a zero is as little as any other that is not seen.
fn folded_whole(name: &str) -> impl Iterator<Item = char> {
    let parts_words =
        |it: &char| it.is_whitespace() || it.is_control() || matches!(it, '_' | '-' | '.');
    let told = name.chars().filter(move |it| !parts_words(it));
    told.flat_map(without_case).filter(|it| !is_unseen(*it))
}

/// Whether nothing is seen of it: what Unicode has for `Default_Ignorable_Code_Point`; and
/// the dot above, which is what is left of the Turkish capital of `i` (U+0130) beside an
/// `i`, and to Java is that.
fn is_unseen(character: char) -> bool {
    matches!(
        character,
        '\u{ad}' | '\u{307}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}'
            | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    )
}

/// A character without regard to case. There and back, since some letters have a capital
/// and are that of none: the long s (U+017F), the Kelvin sign (U+212A). Whatever Unicode's
/// case folding, and so Go's `EqualFold`, takes for one comes out as one here.
fn without_case(character: char) -> impl Iterator<Item = char> {
    character.to_lowercase().flat_map(char::to_uppercase).flat_map(char::to_lowercase)
}

/// The value's number, exactly as it goes to the server.
fn number(value: &Value) -> Result<Decimal, Outside> {
    let Value::Number(number) = value else { return Err(Outside::NoNumber) };
    Decimal::parse(&number.to_string()).ok_or(Outside::NotExact)
}

/// Equality of JSON values, numbers by value.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(_), Value::Number(_)) => {
            matches!((number(a), number(b)), (Ok(a), Ok(b)) if a == b)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn outside(text: &str, arguments: &Value) -> Option<Outside> {
        Constraint::parse(text).unwrap().check(arguments).err()
    }

    #[test]
    fn a_place_is_unknown_where_a_schema_lists_others_and_leaves_nothing_open() {
        let item = json!({"type": "object", "properties": {"sku": {}}});
        let mut schema = json!({"type": "object", "properties": {
            "quantity": {"type": "integer"}, "item": item, "items": {"items": item},
        }, "additionalProperties": false});
        let unknown = |schema: &Value, text: &str| {
            Constraint::parse(text).unwrap().unknown_to(schema).map(str::to_owned)
        };
        for (text, expected) in [
            ("/qty<=5", Some("qty")),
            ("/item/sk^=a", Some("sk")),
            ("/Quantity<=5", Some("Quantity")),
            ("/quantity<=5", None),
            ("/quantity/0=1", None),
            ("/item/sku^=a", None),
            ("/items/0/sk^=a", None),
            ("={}", None),
        ] {
            assert_eq!(unknown(&schema, text).as_deref(), expected, "{text}");
        }
        for (word, value) in [
            ("additionalProperties", json!(true)),
            ("patternProperties", json!({"^q": {}})),
            ("$ref", json!("#/$defs/x")),
            ("$recursiveRef", json!("#")),
        ] {
            let mut open = schema.clone();
            open[word] = value;
            assert_eq!(unknown(&open, "/qty<=5"), None, "{word}");
        }
        let closed = schema.clone();
        schema.as_object_mut().unwrap().remove("additionalProperties");
        assert_eq!(unknown(&schema, "/qty<=5").as_deref(), Some("qty"));
        for (word, value) in [
            ("oneOf", json!([{"required": ["item"]}, {"required": ["quantity"]}])),
            ("allOf", json!([{"properties": {"qty": {}}}])),
            ("dependencies", json!({"item": {"properties": {"qty": {}}}})),
        ] {
            let (mut closed, mut open) = (closed.clone(), schema.clone());
            (closed[word], open[word]) = (value.clone(), value);
            assert_eq!(unknown(&closed, "/qty<=5").as_deref(), Some("qty"), "{word}");
            assert_eq!(unknown(&open, "/qty<=5"), None, "{word}");
        }
        for schema in [json!({}), json!(true), json!({"type": "object"})] {
            assert_eq!(unknown(&schema, "/qty<=5"), None, "{schema}");
        }
    }

    #[test]
    fn each_test_holds_where_it_should_and_nowhere_else() {
        use Outside::{Climbs, Missing, NoNumber, NoString, Other};
        let arguments = json!({
            "quantity": 5, "price": 0.3, "item": "bolt", "path": "docs/a/b",
            "ratio": 1.0, "tags": ["x", {"n": 1}], "a/b": {"m~n": true}, "a=b": null,
            "up": "docs/../etc", "big": 9007199254740993_u64, "digits": "5",
        });
        for (text, expected) in [
            ("/quantity=5", None),
            ("/quantity=5.0", None),
            ("/quantity=6", Some(Other)),
            ("/quantity=\"5\"", Some(Other)),
            ("/digits=5", Some(NoNumber)),
            ("/digits<=5", Some(NoNumber)),
            ("/item=\"bolt\"", None),
            ("/item=\"nut\"", Some(Other)),
            ("/tags=[\"x\", {\"n\": 1.0}]", None),
            ("/tags=[{\"n\": 1}, \"x\"]", Some(Other)),
            ("/tags/1=  {\"n\":1}", None),
            ("/tags/1/n>=1", None),
            ("/tags/01/n>=1", Some(Missing)),
            ("/tags/+1/n>=1", Some(Missing)),
            ("/tags/-/n>=1", Some(Missing)),
            ("/tags/2=1", Some(Missing)),
            ("/a~1b/m~0n=true", None),
            ("/a%3Db=null", None),
            ("/quantity<=5", None),
            ("/quantity<5", Some(Other)),
            ("/quantity>=5", None),
            ("/quantity>5", Some(Other)),
            ("/quantity>-1e3", None),
            ("/price<=0.3", None),
            ("/price<=0.29999999999999999", Some(Other)),
            ("/big<=9007199254740992", Some(Other)),
            ("/item<=5", Some(NoNumber)),
            ("/none<=5", Some(Missing)),
            ("/none=null", Some(Missing)),
            ("/item/x=1", Some(Missing)),
            ("/path^=docs/", None),
            ("/path^=doc/", Some(Other)),
            ("/up^=docs/", Some(Climbs)),
            ("/quantity^=5", Some(NoString)),
            ("/item=~[a-z]+", None),
            ("/item=~bol", Some(Other)),
            ("/item=~nut|bolt", None),
            ("/item=~x|ol", Some(Other)),
            ("/quantity=~5", Some(NoString)),
        ] {
            assert_eq!(outside(text, &arguments), expected, "{text}");
        }
        assert_eq!(outside("={\"a\": 1}", &json!({"a": 1})), None);
        assert_eq!(outside("={\"a\": 1}", &json!({"a": 1, "b": 2})), Some(Other));
        assert_eq!(outside("={\"a\": 1}", &json!({"b": 1})), Some(Other));
        assert_eq!(outside("={\"b\": 2, \"a\": 1}", &json!({"a": 1, "b": 2.0})), None);
    }

    #[test]
    fn all_constraints_of_a_tool_hold_together() {
        let mut constraints = Constraints::none();
        let check = |constraints: &Constraints, arguments| constraints.check(&arguments, "{}");
        check(&constraints, json!({})).unwrap();
        constraints.push(Constraint::parse("/n>=1").unwrap());
        constraints.push(Constraint::parse("/n<=5").unwrap());
        check(&constraints, json!({"n": 3})).unwrap();
        let violation = check(&constraints, json!({"n": 6})).unwrap_err();
        assert_eq!(violation.constraint, "/n<=5");
        assert!(!violation.to_string().contains('6'), "{violation}");
    }

    #[test]
    fn no_member_that_a_server_may_take_for_the_constrained_one_stands_beside_it() {
        let listed = json!({"properties": {"order": {"properties": {"maxItems": {}, "MaxItems": {},
            "lines": {"items": {"properties": {"sku": {}, "SKU": {}}}}}}, "ORDER": {}}});
        let check = |text: &str, arguments: &Value, schema: &Value| {
            let mut constraints = Constraints::none();
            constraints.push(Constraint::parse(text).unwrap());
            constraints.check(arguments, &schema.to_string()).map_err(|it| (it.why, it.twin))
        };
        for (text, arguments, twin) in [
            ("/status=1", json!({"status": 1, "Status": 2}), "Status"),
            ("/status=1", json!({"status": 1, "\u{17f}tatus": 2}), "\u{17f}tatus"),
            ("/kind=1", json!({"kind": 1, "\u{212a}ind": 2}), "\u{212a}ind"),
            ("/stra%C3%9Fe=1", json!({"stra\u{df}e": 1, "STRA\u{1e9e}E": 2}), "STRA\u{1e9e}E"),
            ("/maxItems=1", json!({"maxItems": 1, "max_items": 2}), "max_items"),
            ("/maxItems=1", json!({"maxItems": 1, "max.items": 2}), "max.items"),
            ("/maxItems=1", json!({"maxItems": 1, " Max-Items": 2}), " Max-Items"),
            ("/maxItems=1", json!({"maxItems": 1, "maxItems\0x": 2}), "maxItems\0x"),
            ("/maxItems=1", json!({"maxItems": 1, "max\0Items": 2}), "max\0Items"),
            ("/maxItems=1", json!({"maxItems": 1, "max\u{1}Items": 2}), "max\u{1}Items"),
            ("/a/b=1", json!({"a": {"b": 1}, "A": {"b": 2}}), "A"),
            ("/a/0/b=1", json!({"a": [{"b": 1, "B": 2}]}), "B"),
            ("/order/lines/0/sku=1", json!({"order": {"lines": [{"sku": 1, "Sku": 2}]}}), "Sku"),
            // One of a list's items may have it; what is no item is another.
            (
                "/order/lines/x/sku=1",
                json!({"order": {"lines": {"x": {"sku": 1, "SKU": 2}}}}),
                "SKU",
            ),
            ("/order/maxItems=1", json!({"order": {"maxItems": 1, "maxitems": 2}}), "maxitems"),
            ("/order/maxItems=1", json!({"order": {"maxItems": 1}, "Order": 2}), "Order"),
        ] {
            let refused = check(text, &arguments, &listed).unwrap_err();
            assert_eq!(refused, (Outside::Twin, Some(twin.to_owned())), "{text} {arguments}");
        }
        for (text, arguments) in [
            ("/status=1", json!({"status": 1, "statuses": 2, "stat": 3, "": 4})),
            // Elsewhere, it is another.
            ("/status=1", json!({"status": 1, "more": {"Status": 2}})),
            ("/order/maxItems=1", json!({"order": {"maxItems": 1, "MaxItems": 2}, "ORDER": 3})),
            ("/order/lines/0/sku=1", json!({"order": {"lines": [{"sku": 1, "SKU": 2}]}})),
            ("={\"a\":1}", json!({"a": 1})),
        ] {
            assert_eq!(check(text, &arguments, &listed), Ok(()), "{text} {arguments}");
        }
        let mut constraints = Constraints::none();
        constraints.push(Constraint::parse("/a<=5").unwrap());
        let refused = constraints.check(&json!({"a": 5, "A": 100}), "{}").unwrap_err().to_string();
        assert!(refused.contains("/a<=5") && refused.contains(r#"leave "A" out"#), "{refused}");
    }

    #[test]
    fn a_long_string_is_refused_and_not_matched() {
        let long = json!({"s": "a".repeat(MATCHED_BYTES_MAX + 1)});
        assert_eq!(outside("/s=~a*", &long), Some(Outside::TooLong));
        let fits = json!({"s": "a".repeat(MATCHED_BYTES_MAX)});
        assert_eq!(outside("/s=~a*", &fits), None);
    }

    #[test]
    fn a_list_that_is_longer_or_shorter_than_the_constraints_is_outside() {
        for (constraint, tags) in [
            ("/tags=[]", json!(["x"])),
            ("/tags=[\"x\"]", json!(["x", "y"])),
            ("/tags=[\"x\",\"y\"]", json!(["x"])),
            ("/tags=[\"x\"]", json!([])),
        ] {
            let arguments = json!({ "tags": tags });
            assert_eq!(outside(constraint, &arguments), Some(Outside::Other), "{constraint}");
        }
    }

    #[test]
    fn a_member_that_differs_by_a_character_that_is_not_seen_is_a_twin() {
        for unseen in [
            '\u{ad}'..='\u{ad}',
            '\u{307}'..='\u{307}',
            '\u{34f}'..='\u{34f}',
            '\u{61c}'..='\u{61c}',
            '\u{115f}'..='\u{1160}',
            '\u{17b4}'..='\u{17b5}',
            '\u{180b}'..='\u{180f}',
            '\u{200b}'..='\u{200f}',
            '\u{202a}'..='\u{202e}',
            '\u{2060}'..='\u{206f}',
            '\u{3164}'..='\u{3164}',
            '\u{fe00}'..='\u{fe0f}',
            '\u{feff}'..='\u{feff}',
            '\u{ffa0}'..='\u{ffa0}',
            '\u{fff0}'..='\u{fff8}',
            '\u{1bca0}'..='\u{1bca3}',
            '\u{1d173}'..='\u{1d17a}',
            '\u{e0000}'..='\u{e0fff}',
        ]
        .into_iter()
        .flatten()
        {
            let mut constraints = Constraints::none();
            constraints.push(Constraint::parse("/amount<=5").unwrap());
            let twin = format!("amo{unseen}unt");
            let arguments = json!({ "amount": 1, twin: 100 });
            assert!(constraints.check(&arguments, "{}").is_err(), "{unseen:?}");
        }
    }
}
