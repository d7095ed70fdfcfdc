//! How a value does not fit a schema, in words that its writer can mend it by.
//!
//! Where a value may be one of several things, what is wrong with it is what keeps it
//! from the one it is closest to: libraries write each argument that may be left out,
//! and each union, that way. A value that is quoted is cut, so that it leaves room for
//! what is wrong with it.

use std::io;

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind as Kind;

/// Violations named in one refusal.
const VIOLATIONS_MAX: usize = 5;
/// One of them, in bytes; more is cut.
const VIOLATION_BYTES_MAX: usize = 512;
/// What one quotes of the value, in bytes; more is cut.
const QUOTED_BYTES_MAX: usize = 96;
/// The place in the schema of one of them, in bytes; more is cut.
const PLACE_BYTES_MAX: usize = 128;

/// How a value does not fit a schema: at most five violations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violations {
    /// What is wrong, and where in the value. They quote the value.
    pub texts: Vec<String>,
    /// The places in the schema that do not hold, as JSON pointers; none where to
    /// look for them would be too much work. Nothing of the value is in them, not
    /// even the name of a member, which whoever wrote the value may have chosen.
    pub places: Vec<String>,
}

impl Violations {
    /// The value as a whole.
    pub(crate) fn whole(text: String) -> Self {
        Self { texts: vec![text], places: Vec::new() }
    }

    /// What a validator found wrong with a value that is called `whole`.
    pub(crate) fn of<'a>(found: impl Iterator<Item = ValidationError<'a>>, whole: &str) -> Self {
        let mut violations = Self { texts: Vec::new(), places: Vec::new() };
        for violation in found {
            violations.add(&violation, whole);
            if violations.texts.len() == VIOLATIONS_MAX {
                break;
            }
        }
        violations
    }

    fn add(&mut self, violation: &ValidationError<'_>, whole: &str) {
        if self.texts.len() == VIOLATIONS_MAX {
            return;
        }
        match closest(violation) {
            Some(of_one) => of_one.iter().for_each(|deeper| self.add(deeper, whole)),
            None => {
                let place = violation.instance_path().to_string();
                let place = if place.is_empty() { whole } else { &place };
                let text = format!("{place}: {}", told(violation));
                self.texts.push(crate::cut(&text, VIOLATION_BYTES_MAX));
                let in_schema = violation.schema_path().as_str();
                self.places.push(crate::cut(in_schema, PLACE_BYTES_MAX));
            }
        }
    }
}

/// What is wrong, without its place. Of a value that is none of several things, what tells
/// it from each.
fn told(violation: &ValidationError<'_>) -> String {
    let mut all: Vec<String> = Vec::new();
    for of_one in choices(violation) {
        let telling = of_one.iter().find(|deeper| tells_apart(violation, deeper));
        let Some(telling) = telling.or(of_one.first()) else { continue };
        let text = match below(violation, telling) {
            "" => told(telling),
            below => format!("{below}: {}", told(telling)),
        };
        if !all.contains(&text) {
            all.push(text);
        }
    }
    if !all.is_empty() {
        return all.join("; or ");
    }
    let mut value = Beginning(Vec::new());
    match serde_json::to_writer(&mut value, &**violation.instance()) {
        Ok(()) => violation.to_string(),
        Err(_) => {
            let value = String::from_utf8_lossy(&value.0);
            violation.masked_with(crate::cut(&value, QUOTED_BYTES_MAX)).to_string()
        }
    }
}

/// As much of a value as is quoted, and a little to see that there is more. What is longer
/// is not written.
struct Beginning(Vec<u8>);

impl io::Write for Beginning {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = 2 * QUOTED_BYTES_MAX - self.0.len();
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        match self.0.len() <= QUOTED_BYTES_MAX {
            true => Ok(bytes.len()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is wrong with a value for each of the things that it might be.
fn choices<'e>(violation: &'e ValidationError<'_>) -> &'e [Vec<ValidationError<'static>>] {
    match violation.kind() {
        Kind::AnyOf { context } | Kind::OneOfNotValid { context } => context,
        _ => &[],
    }
}

/// The same for the one that it was meant to be: of those whose kind it is, the one that
/// it lacks least of.
fn closest<'e>(violation: &'e ValidationError<'_>) -> Option<&'e [ValidationError<'static>]> {
    let meant = choices(violation)
        .iter()
        .filter(|of_one| !of_one.iter().any(|deeper| tells_apart(violation, deeper)));
    meant.min_by_key(|of_one| of_one.len()).map(Vec::as_slice).filter(|it| !it.is_empty())
}

/// Whether the value is of another kind, by its own type or by the member that tells those
/// of a union apart (`{"kind": "circle"}`).
fn tells_apart(violation: &ValidationError<'_>, deeper: &ValidationError<'_>) -> bool {
    let below = below(violation, deeper);
    match deeper.kind() {
        Kind::Type { .. } => below.is_empty(),
        Kind::Constant { .. } | Kind::Enum { .. } => below.matches('/').count() <= 1,
        _ => false,
    }
}

/// Where below a violation another is.
fn below<'e>(violation: &ValidationError<'_>, deeper: &'e ValidationError<'_>) -> &'e str {
    let (here, there) = (violation.instance_path().as_str(), deeper.instance_path().as_str());
    there.strip_prefix(here).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn texts(schema: &Value, value: &Value) -> Vec<String> {
        let validator = jsonschema::draft202012::new(schema).unwrap();
        Violations::of(validator.iter_errors(value), "the arguments").texts
    }

    #[test]
    fn what_is_wrong_below_a_choice_is_told_with_its_place() {
        let address = json!({"type": "object", "required": ["street"], "properties": {
            "street": {"type": "string"}, "zip": {"type": "string"}}});
        let schema = json!({"properties": {"addr": {"anyOf": [address, {"type": "null"}]}}});
        assert_eq!(
            texts(&schema, &json!({"addr": {"street": "s", "zip": 12345}})),
            [r#"/addr/zip: 12345 is not of type "string""#]
        );
        assert_eq!(
            texts(&schema, &json!({"addr": 7})),
            [r#"/addr: 7 is not of type "object"; or 7 is not of type "null""#]
        );
    }

    #[test]
    fn of_a_union_the_member_counts_that_the_value_says_it_is() {
        let member = |kind: &str, needs: &[&str]| {
            json!({"type": "object", "required": needs,
                   "properties": {"kind": {"const": kind}, "r": {"type": "number"}}})
        };
        for word in ["oneOf", "anyOf"] {
            let shape = json!({ word: [member("square", &[]), member("circle", &["r", "x"])] });
            let schema = json!({"properties": {"all": {"items": shape}}});
            assert_eq!(
                texts(&schema, &json!({"all": [{"kind": "square"}, {"kind": "circle", "r": 1}]})),
                [r#"/all/1: "x" is a required property"#]
            );
            let none = texts(&schema, &json!({"all": [{"kind": "line"}]}));
            assert_eq!(
                none,
                [r#"/all/0: /kind: "square" was expected; or /kind: "circle" was expected"#]
            );
        }
    }

    #[test]
    fn a_long_value_leaves_room_for_what_is_wrong_with_it() {
        let schema = json!({"properties": {"s": {"maxLength": 10}}});
        let told = texts(&schema, &json!({"s": "y".repeat(10_000)}));
        assert!(told[0].starts_with("/s: \"yyy"), "{told:?}");
        assert!(told[0].ends_with("is longer than 10 characters"), "{told:?}");
    }

    #[test]
    fn there_are_at_most_so_many_however_they_are_nested() {
        let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
        let schema = json!({"anyOf": [{"required": names}, {"type": "null"}],
            "allOf": [{"required": ["q"]}]});
        assert_eq!(texts(&schema, &json!({})).len(), VIOLATIONS_MAX);
    }
}
