//! What is wrong with a table of `forge.toml`: the field and why, never a
//! value, which may be a credential in the wrong place.

use std::fmt;
use std::path::Path;

use forge_document::{Lines, Syntax, place};
use serde::de::DeserializeOwned;
use toml::Table;

use crate::cli::CliError;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Fault {
    /// The field, as a path with dots; `None` for a whole file.
    pub(crate) field: Option<String>,
    /// What is wrong with it, and what to do.
    pub(crate) problem: String,
    /// The line, where the file could not be read behind it.
    #[serde(skip)]
    pub(super) line: Option<u32>,
}

impl Fault {
    pub(crate) fn at(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: Some(field.into()), problem: problem.into(), line: None }
    }

    /// Whether it is one of this table's.
    pub(crate) fn is_within(&self, table: &str) -> bool {
        let field = self.field.as_deref().unwrap_or_default();
        field.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// As the error of a command that goes by this file.
    pub(crate) fn of(self, file: &Path) -> CliError {
        // The file was read already; what is none cannot be read twice.
        let text = file.is_file().then(|| std::fs::read_to_string(file).ok()).flatten();
        let text = text.unwrap_or_default();
        let line = line_of(&self, &Lines::of(&text));
        CliError::Usage(format!("{}: {self}", place(file, line)))
    }
}

/// The line of a fault, from 1: its own, or its field's.
pub(crate) fn line_of(fault: &Fault, lines: &Lines<'_>) -> Option<u32> {
    fault.line.or_else(|| lines.of_field(fault.field.as_deref()?))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "{field}: {}", self.problem),
            None => f.write_str(&self.problem),
        }
    }
}

/// A file's tables.
///
/// # Errors
/// Where it is no TOML, without the line's text.
pub(crate) fn tables(text: &str) -> Result<Table, Fault> {
    forge_document::tables(text).map_err(|Syntax { line, problem }| Fault {
        field: None,
        problem: problem.into(),
        line: Some(line),
    })
}

/// Refuses what is no table. A reader of declared fields would take a list for
/// one, and its items for the fields.
fn is_table(name: &str, value: &toml::Value) -> Result<(), Fault> {
    let found = match value {
        toml::Value::Table(_) => return Ok(()),
        toml::Value::Array(_) => "a list: [[…]] begins one, and […] a table",
        other => other.type_str(),
    };
    Err(Fault::at(name, format!("expected a table, found {found}")))
}

/// One table, if it is there, read as it is declared; else its default.
///
/// # Errors
/// The first that is wrong in it.
pub(crate) fn table<T: DeserializeOwned + Default>(all: &Table, name: &str) -> Result<T, Fault> {
    let Some(value) = all.get(name) else { return Ok(T::default()) };
    is_table(name, value)?;
    value.clone().try_into().map_err(|error| fault_of(name, error))
}

/// Everything that is wrong with a table by its declaration, and what the rest
/// of it says, if it can be read without that. Each key is read alone, then the
/// good ones together.
pub(crate) fn sifted<T: DeserializeOwned>(
    name: &str,
    table: &toml::Value,
) -> (Vec<Fault>, Option<T>) {
    let read = |value: toml::Value| value.try_into::<T>().map_err(|error| fault_of(name, error));
    let Some(fields) = table.as_table() else {
        return (is_table(name, table).err().into_iter().collect(), None);
    };
    let (mut faults, mut good) = (Vec::new(), Table::new());
    for (key, value) in fields {
        let alone = Table::from_iter([(key.clone(), value.clone())]);
        match read(alone.into()) {
            Err(fault) if fault.problem != MISSING => faults.push(fault),
            _ => {
                good.insert(key.clone(), value.clone());
            }
        }
    }
    let rest = read(good.into());
    // A field that is there and wrong is not missing.
    if let Err(fault) = &rest
        && !faults.iter().any(|told| told.field == fault.field)
    {
        faults.push(fault.clone());
    }
    (faults, rest.ok())
}

const MISSING: &str = "this field is missing";

/// The names that a reader of declared fields expected. What was there instead
/// comes before them, and may hold anything.
fn known(message: &str) -> String {
    let expected = message.rsplit_once(", expected ").map_or("", |(_, expected)| expected);
    let mut names: Vec<_> = expected.split('`').skip(1).step_by(2).collect();
    // A field that belongs to one of several forms is named for each.
    let mut named = std::collections::HashSet::new();
    names.retain(|name| named.insert(*name));
    names.join(", ")
}

/// What a reader expected, in the words of whoever writes the file.
fn in_words(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number from 0 on",
        "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "a table",
        other => other,
    }
}

/// What a reader of declared fields said, without the value it may quote.
fn fault_of(table: &str, mut error: toml::de::Error) -> Fault {
    error.set_input(None);
    let shown = error.to_string();
    let way = shown.rsplit_once("\nin `").and_then(|(_, way)| way.trim_end().strip_suffix('`'));
    let within = way.map_or_else(|| table.to_owned(), |way| format!("{table}.{way}"));
    let message = error.message();
    let quoted = |message: &str| message.split('`').nth(1).unwrap_or_default().to_owned();
    if message.starts_with("unknown field") {
        let problem = format!("unknown field; known here are {}", known(message));
        return Fault::at(format!("{within}.{}", quoted(message)), problem);
    }
    if message.starts_with("missing field") {
        return Fault::at(format!("{within}.{}", quoted(message)), MISSING);
    }
    if message.starts_with("unknown variant") {
        return Fault::at(within, format!("must be one of {}", known(message)));
    }
    for beginning in ["invalid type: ", "invalid value: "] {
        if let Some((found, expected)) =
            message.strip_prefix(beginning).and_then(|rest| rest.rsplit_once(", expected "))
        {
            let kind = match found.split(['`', '"']).next().unwrap_or_default().trim() {
                "map" => "table",
                "integer" if found.contains("`-") => "a negative one",
                "integer" if beginning == "invalid value: " => "a larger one",
                "sequence" => "list",
                kind => kind,
            };
            let expected = in_words(expected);
            return Fault::at(within, format!("expected {expected}, found {kind}"));
        }
    }
    Fault::at(within, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[test]
    fn what_was_expected_is_told_and_no_part_of_what_was_there() {
        let message = "unknown variant `a`b`secret`, expected one of `this`, `that`";
        assert_eq!(known(message), "this, that");
        assert_eq!(known("unknown field `a`, expected `this`"), "this");
        assert_eq!(
            known("unknown field `a`, expected one of `this`, `that`, `this`"),
            "this, that"
        );
        assert_eq!(known("unknown field `a`, there are no fields"), "");
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "read and not looked at")]
    struct Sample {
        needed: String,
        #[serde(default)]
        number: u16,
        #[serde(default)]
        list: Vec<u16>,
        #[serde(default)]
        within: Within,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    #[allow(dead_code, reason = "read and not looked at")]
    struct Within {
        flag: bool,
        word: Word,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        #[default]
        This,
        That,
    }

    fn told(text: &str) -> Vec<String> {
        let value = toml::Value::Table(tables(text).unwrap());
        sifted::<Sample>("t", &value).0.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_fault_of_a_table_is_told_without_its_value() {
        assert_eq!(told("needed = 'x'\nnumber = 7\nwithin.flag = true"), [""; 0]);
        assert_eq!(
            told("number = 'hunter2'\nzzz = 'hunter2'\nwithin.flag = 'hunter2'"),
            [
                "t.number: expected a whole number from 0 to 65535, found string",
                "t.within.flag: expected a boolean, found string",
                "t.zzz: unknown field; known here are needed, number, list, within",
                "t.needed: this field is missing",
            ]
        );
        assert_eq!(
            told("needed = 7\nwithin.word = 'hunter2'"),
            [
                "t.needed: expected a string, found integer",
                "t.within.word: must be one of this, that"
            ]
        );
        let list = "t.list: expected a list, found string";
        assert_eq!(told("needed = 'x'\nlist = 'hunter2'"), [list]);
        let found =
            |what| format!("t.number: expected a whole number from 0 to 65535, found {what}");
        assert_eq!(told("needed = 'x'\nnumber = 70000"), [found("a larger one")]);
        assert_eq!(told("needed = 'x'\nnumber = -70000"), [found("a negative one")]);
    }
}
