//! JSON from outside, read as it is.
//!
//! serde_json's feature `raw_value` gives one object another meaning: whatever has
//! the member [`RAW`] becomes the JSON that is in that member's text, read anew,
//! without the bounds that the whole was held to. The MCP door and the toolbroker need the
//! feature, and one crate of a build turns it on for all, so an object with this member is
//! no JSON where what a client or a tool server sent is read into values. What
//! goes on as the text that came needs none of this.
//!
//! Half a character is no Unicode, and many a writer of JSON sends it all the same:
//! whoever cuts a text in JavaScript. In an answer it costs itself and not the whole
//! ([`from_slice_mended`]). In what a program asks it is an error, since what is asked
//! is never changed.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;

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

/// As [`from_slice`], of text that is [`mended`] if it has to be.
///
/// # Errors
/// The same.
pub fn from_slice_mended<T: DeserializeOwned>(json: &[u8]) -> Result<T, Error> {
    from_slice(json).or_else(|error| match mended(json) {
        Some(text) => from_slice(text.as_bytes()),
        None => Err(error),
    })
}

/// As [`from_slice_mended`], of what its sender wrote itself: half a character is mended,
/// and a byte that is no UTF-8 is an error, since it may be a program's.
///
/// # Errors
/// The same.
pub fn from_text_mended<T: DeserializeOwned>(json: &[u8]) -> Result<T, Error> {
    match core::str::from_utf8(json) {
        Ok(_) => from_slice_mended(json),
        Err(_) => from_slice(json),
    }
}

/// The same text with U+FFFD in the place of each half of a surrogate pair and of
/// each byte that is no UTF-8; `None` if there is none of them. Where strings and
/// values begin and end is as it was.
#[must_use]
pub fn mended(json: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(json);
    let mut out = String::new();
    let (mut kept, mut at) = (0, 0);
    while let Some(found) = text[at..].find('\\') {
        at += found;
        let next = match escape(&text[at..]) {
            // What follows is escaped, and begins nothing.
            None => at + 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
            Some(0xD800..=0xDBFF)
                if matches!(escape(&text[at + ESCAPE_BYTES..]), Some(0xDC00..=0xDFFF)) =>
            {
                at + 2 * ESCAPE_BYTES
            }
            Some(0xD800..=0xDFFF) => {
                out.push_str(&text[kept..at]);
                out.push('\u{FFFD}');
                kept = at + ESCAPE_BYTES;
                kept
            }
            Some(_) => at + ESCAPE_BYTES,
        };
        at = next;
    }
    match text {
        Cow::Borrowed(_) if kept == 0 => None,
        text => {
            out.push_str(&text[kept..]);
            Some(out)
        }
    }
}

/// An escape by number, in bytes.
const ESCAPE_BYTES: usize = 6;

/// The number that a text begins with an escape of.
fn escape(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..ESCAPE_BYTES - 2)?;
    let is_number = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_number { u16::from_str_radix(digits, 16).ok() } else { None }
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
/// this. For what is no JSON the answer means nothing.
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

    #[test]
    fn half_a_character_costs_itself_and_nothing_else() {
        for (json, read) in [
            (&br#"{"a":"cut \ud83d","b":1}"#[..], r#"{"a":"cut \ufffd","b":1}"#),
            (
                br#"["\uDE00","\ud83d\ud83d\ude00","\ud83dA"]"#,
                r#"["\ufffd","\ufffd\ud83d\ude00","\ufffdA"]"#,
            ),
            (br#"["\ude00\ud83d"]"#, r#"["\ufffd\ufffd"]"#),
            (br#"["\\ud83d","\\\ud83d","\"\ud83d\\"]"#, r#"["\\ud83d","\\\ufffd","\"\ufffd\\"]"#),
            (br#"["\ud83d\n","\ud83d\\ude00"]"#, r#"["\ufffd\n","\ufffd\\ude00"]"#),
            (
                b"[\"\xff\",\"\xe2\x82\",\"\xed\xa0\xbd\",\"\\ud83d\"]",
                r#"["\ufffd","\ufffd","\ufffd\ufffd\ufffd","\ufffd"]"#,
            ),
        ] {
            assert!(from_slice::<Value>(json).is_err(), "{read}");
            let expected: Value = serde_json::from_str(read).unwrap();
            assert_eq!(from_slice_mended::<Value>(json).unwrap(), expected);
        }
    }

    #[test]
    fn a_byte_that_is_no_utf_8_is_mended_for_nobody_who_wrote_it() {
        let half = br#""cut \ud83d""#;
        assert_eq!(from_text_mended::<Value>(half).unwrap(), Value::from("cut \u{FFFD}"));
        assert!(from_text_mended::<Value>(b"\"(data \xff)\"").is_err());
        assert!(from_slice_mended::<Value>(b"\"(data \xff)\"").is_ok());
    }

    #[test]
    fn what_is_no_json_is_none_however_it_is_mended() {
        for json in [
            &br#"{"a":"\ud83d""#[..],
            br#""\ud83"#,
            br#""\ud83x""#,
            br#""\u+123""#,
            br#""\ud83d\"#,
            br#"\ud83d"#,
            b"\"\\\xff\"",
            b"\xff",
            br#"{"$serde_json::private::RawValue":"\ud83d"}"#,
        ] {
            assert!(from_slice_mended::<Value>(json).is_err(), "{}", String::from_utf8_lossy(json));
        }
        for json in [&br#"{"a":"\\ud83d \ud83d\ude00 \u00e9"}"#[..], br#""\ud83"#, b"", b"\\"] {
            assert_eq!(mended(json), None);
        }
    }
}
