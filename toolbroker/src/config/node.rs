//! A configuration as a tree whose every node knows the way to it.

use std::ops::RangeInclusive;
use std::path::Path;

use forge_document::shown;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{ConfigError, Problem};
use crate::secret::Secret;

/// What lists may have, so that definitions stay of a size.
pub(super) const ITEMS_MAX: usize = 64;

/// A value and the way to it, so that every error can say where it is.
pub(super) struct Node<'a> {
    file: &'a Path,
    at: String,
    value: &'a Value,
}

impl<'a> Node<'a> {
    /// The whole of a file.
    pub(super) fn root(file: &'a Path, value: &'a Value) -> Self {
        Self { file, at: String::new(), value }
    }

    pub(super) fn wrong(&self, problem: Problem) -> ConfigError {
        let field = if self.at.is_empty() { "the file".to_owned() } else { self.at.clone() };
        ConfigError::of(self.file, field, problem)
    }

    pub(super) fn wrong_at(&self, key: &str, problem: Problem) -> ConfigError {
        ConfigError::of(self.file, self.path_to(key), problem)
    }

    /// The value is not what it has to be, which this says.
    pub(super) fn unfit(&self, why: impl Into<String>) -> ConfigError {
        self.wrong(Problem::Value(why.into()))
    }

    /// Refuses every field but these.
    pub(super) fn only(&self, known: &[&str]) -> Result<(), ConfigError> {
        self.only_and(known, &[])
    }

    /// The same, and nothing is said of those that are ignored.
    pub(super) fn only_and(&self, known: &[&str], ignored: &[&str]) -> Result<(), ConfigError> {
        let is_known = |key: &str| known.contains(&key) || ignored.contains(&key);
        match self.object()?.keys().find(|key| !is_known(key)) {
            Some(key) => Err(self.wrong_at(key, Problem::Unknown { known: known.join(", ") })),
            None => Ok(()),
        }
    }

    fn path_to(&self, key: &str) -> String {
        let key = shown(key);
        if self.at.is_empty() { key } else { format!("{}.{key}", self.at) }
    }

    pub(super) fn child(&self, key: &str, value: Option<&'a Value>) -> Option<Node<'a>> {
        value.map(|value| Node { file: self.file, at: self.path_to(key), value })
    }

    pub(super) fn field(&self, key: &str) -> Option<Node<'a>> {
        self.child(key, self.value.get(key))
    }

    pub(super) fn needed(&self, key: &str) -> Result<Node<'a>, ConfigError> {
        self.field(key).ok_or_else(|| self.wrong_at(key, Problem::Missing))
    }

    pub(super) fn of_type<T>(
        &self,
        expected: &'static str,
        got: Option<T>,
    ) -> Result<T, ConfigError> {
        got.ok_or_else(|| {
            let found = match self.value {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::String(_) => "a string",
                Value::Array(_) => "a list",
                Value::Object(_) => "a table",
            };
            self.wrong(Problem::Type { expected, found })
        })
    }

    pub(super) fn object(&self) -> Result<&'a Map<String, Value>, ConfigError> {
        self.of_type("a table", self.value.as_object())
    }

    pub(super) fn text(&self) -> Result<&'a str, ConfigError> {
        self.of_type("a string", self.value.as_str())
    }

    pub(super) fn is_text(&self) -> bool {
        self.value.is_string()
    }

    pub(super) fn bool(&self) -> Result<bool, ConfigError> {
        self.of_type("a boolean", self.value.as_bool())
    }

    /// A whole number from 0 on.
    pub(super) fn whole(&self) -> Result<u32, ConfigError> {
        let whole = self.value.as_u64().and_then(|number| u32::try_from(number).ok());
        self.of_type("a whole number from 0 to 4294967295", whole)
    }

    /// A larger one.
    pub(super) fn number(&self) -> Result<u64, ConfigError> {
        self.of_type("a whole number, not negative", self.value.as_u64())
    }

    /// The number under `key`, in a range, or a default.
    pub(super) fn number_in(
        &self,
        key: &str,
        range: RangeInclusive<u64>,
        default: u64,
    ) -> Result<u64, ConfigError> {
        let Some(node) = self.field(key) else { return Ok(default) };
        let number = node.number()?;
        if !range.contains(&number) {
            let (first, last) = (range.start(), range.end());
            return Err(node.unfit(format!("must be from {first} to {last}")));
        }
        Ok(number)
    }

    /// A value that is held as a secret.
    pub(super) fn secret(&self, value: String) -> Result<Secret, ConfigError> {
        Secret::new(value).map_err(|error| self.wrong(Problem::Secret(error)))
    }

    /// More items than there may be.
    pub(super) fn too_many(&self) -> ConfigError {
        self.unfit(format!("more than {ITEMS_MAX}: give fewer"))
    }

    /// A list of at least one and not too many.
    pub(super) fn some_items(&self) -> Result<Vec<Node<'a>>, ConfigError> {
        let items = self.items()?;
        match items.len() {
            0 => Err(self.unfit("is empty: give at least one, or leave the table out")),
            1..=ITEMS_MAX => Ok(items),
            _ => Err(self.too_many()),
        }
    }

    pub(super) fn items(&self) -> Result<Vec<Node<'a>>, ConfigError> {
        let items = self.of_type("a list", self.value.as_array())?;
        Ok(items
            .iter()
            .enumerate()
            .map(|(position, value)| Node {
                file: self.file,
                at: self.path_to(&position.to_string()),
                value,
            })
            .collect())
    }

    pub(super) fn children(&self) -> Result<Vec<(&'a str, Node<'a>)>, ConfigError> {
        let object = self.object()?;
        Ok(object
            .iter()
            .map(|(key, value)| {
                (key.as_str(), Node { file: self.file, at: self.path_to(key), value })
            })
            .collect())
    }
}

/// What serde_json has to say about syntax, without quoting the text.
pub(super) fn syntax_of(error: &serde_json::Error) -> String {
    match error.classify() {
        serde_json::error::Category::Eof => "the JSON ends too early".into(),
        // `Strict` makes no other data errors than a doubled key.
        serde_json::error::Category::Data => "a key stands twice in one object".into(),
        _ if error.to_string().starts_with("recursion limit") => {
            format!("lists and objects are nested more than 127 deep at column {}", error.column())
        }
        _ => format!("this is not JSON at column {}", error.column()),
    }
}

/// JSON in which no object has a key twice: with doubled keys, two readers
/// of one file see two configurations.
pub(super) struct Strict(pub(super) Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Value;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("JSON without doubled keys")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(Strict(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(Value::Array(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
                let mut object = Map::new();
                while let Some((key, Strict(value))) = members.next_entry::<String, Strict>()? {
                    if object.insert(key, value).is_some() {
                        return Err(serde::de::Error::custom("doubled key"));
                    }
                }
                Ok(Value::Object(object))
            }
        }
        deserializer.deserialize_any(Reader).map(Strict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_that_is_nested_too_deeply_is_told_as_that_and_not_as_no_json() {
        let told = |text: &str| match serde_json::from_str::<Strict>(text) {
            Ok(_) => "good".to_owned(),
            Err(error) => syntax_of(&error),
        };
        let nested = |deep: usize| "[".repeat(deep) + &"]".repeat(deep);
        assert_eq!(told(&nested(127)), "good");
        assert_eq!(
            told(&nested(128)),
            "lists and objects are nested more than 127 deep at column 128"
        );
        assert_eq!(told("{ hunter2 }"), "this is not JSON at column 3");
    }
}
