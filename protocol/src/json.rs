//! JSON from outside, read as it is.
//!
//! serde_json's feature `raw_value` gives one object another meaning: whatever has
//! the member [`RAW`] becomes the JSON that is in that member's text, read anew,
//! without the bounds that the whole was held to. The MCP door needs the feature,
//! and one crate of a build turns it on for all, so an object with this member is
//! no JSON where what a client or a tool server sent is read into values. What
//! goes on as the text that came needs none of this.

use alloc::format;

use serde::de::{Deserialize, Visitor};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess};
use serde_json::Error;

/// serde_json's name for it.
const RAW: &str = "$serde_json::private::RawValue";

/// As [`serde_json::from_slice`].
///
/// # Errors
/// The same, and as [`check`].
pub fn from_slice<T: DeserializeOwned>(json: &[u8]) -> Result<T, Error> {
    check(json)?;
    serde_json::from_slice(json)
}

/// Whether no object has the member [`RAW`]. What else may be wrong is for who
/// reads it.
///
/// # Errors
/// One of data, if an object has it.
pub fn check(json: &[u8]) -> Result<(), Error> {
    if may_have(json) && serde_json::from_slice::<Plain>(json).is_err_and(|error| error.is_data()) {
        return Err(Error::custom(format!("no object may have a member {RAW:?}")));
    }
    Ok(())
}

/// The first byte of a text of JSON where lists and objects are nested deeper than
/// this. What no JSON is has some answer.
#[must_use]
pub fn first_deeper(json: &[u8], levels: usize) -> Option<usize> {
    let (mut at, mut depth, mut in_string) = (0, 0_usize, false);
    while let Some(byte) = json.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string && depth == levels => return Some(at),
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Whether the name may be there. Spelled otherwise, some of it is escaped by
/// number; and what is no UTF-8 is no JSON.
fn may_have(json: &[u8]) -> bool {
    core::str::from_utf8(json).is_ok_and(|text| text.contains("\\u") || text.contains(RAW))
}

/// Any value without such an object. The rest of what is wrong with it is for who
/// reads it.
struct Plain;

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Plain {
    type Value = Self;

    fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self, A::Error> {
        while let Some(Name { is_raw }) = members.next_key()? {
            if is_raw {
                members.next_value::<IgnoredAny>()?;
                return Err(A::Error::custom(""));
            }
            members.next_value::<Self>()?;
        }
        Ok(self)
    }
}

/// A member's name.
struct Name {
    is_raw: bool,
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Compared;

        impl Visitor<'_> for Compared {
            type Value = Name;

            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                Ok(Name { is_raw: name == RAW })
            }
        }

        deserializer.deserialize_str(Compared)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;

    use serde_json::Value;

    use super::*;

    #[test]
    fn no_text_in_json_is_read_as_json_whatever_its_name() {
        for json in [
            r#"{"$serde_json::private::RawValue":"[1]"}"#,
            r#"{"$serde_json::private::RawValue":"x"}"#,
            r#"[{"a":{"$serde_json::private::RawValue":"9007199254740993.0"}}]"#,
            r#"{"\u0024serde_json::private::RawValue":"[1]"}"#,
            r#"{"a":[{"$serde_json::private::Raw\u0056alue":"[1]"}]}"#,
            r#"{"b":1,"$serde_json::private::RawValue":"[1]"}"#,
        ] {
            let error = from_slice::<Value>(json.as_bytes()).unwrap_err();
            assert!(error.is_data() && error.to_string().contains("RawValue"), "{json}: {error}");
        }
    }

    #[test]
    fn everything_else_is_read_as_by_others() {
        for json in [
            "null",
            "true",
            r#"{"a":[1,-2,1.5,"\u00e9",{}],"$serde_json::private":{"RawValue":"[1]"}}"#,
            r#"["$serde_json::private::RawValue"]"#,
            r#"{"a":"\u0024serde_json::private::RawValue"}"#,
        ] {
            let read: Value = from_slice(json.as_bytes()).unwrap();
            assert_eq!(read, serde_json::from_str::<Value>(json).unwrap(), "{json}");
        }
        for json in ["", "{", r#"{"\ud800":1}"#, r#"{"a":"\u00"#] {
            let error = from_slice::<Value>(json.as_bytes()).unwrap_err();
            assert_eq!(
                error.to_string(),
                serde_json::from_str::<Value>(json).unwrap_err().to_string()
            );
        }
    }

    #[test]
    fn what_is_nested_deeper_is_found_where_it_begins_and_no_bracket_in_a_text_counts() {
        for (json, levels, expected) in [
            ("[[],{\"a\":[1]}]", 2, Some(9)),
            ("[[],{\"a\":[1]}]", 3, None),
            ("[\"[[{\\\"[\", []]", 2, None),
            ("[\"\\\\\", [[]]]", 2, Some(8)),
            ("{}", 0, Some(0)),
            ("]]][[", 1, Some(4)),
            ("\"\\", 0, None),
        ] {
            assert_eq!(first_deeper(json.as_bytes(), levels), expected, "{json}");
        }
    }
}
