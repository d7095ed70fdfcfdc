//! Tool names that have been checked, and which texts are names of principals and
//! sessions.
//!
//! `<server>.<tool>`: the server part is `[a-z0-9_-]+` and ends at the first
//! dot; the rest is the tool's own name as its server gave it, dots included.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use core::fmt;

use crate::codec::by_hand::{BorrowDecoder, DecodeError, Decoder, EncodeError, Encoder};
use crate::codec::{BorrowDecode, Decode, Encode};
use crate::limits::{PRINCIPAL_BYTES_MAX, SESSION_BYTES_MAX, TOOL_NAME_BYTES_MAX};

/// Servers that are the broker's own; no configuration may use these names.
pub const RESERVED_SERVERS: [&str; 6] = ["http", "fs", "crypto", "stash", "resource", "forge"];

/// A well-formed tool name. It says nothing about whether the tool exists or
/// may be called.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ToolName {
    text: String,
    server_bytes: usize,
}

/// Why a text is no tool name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// No dot parts server and tool.
    NoServer,
    /// The server part is empty or has a character outside `[a-z0-9_-]`.
    BadServer,
    /// The tool part is empty or has a control character.
    BadTool,
    /// Longer than [`TOOL_NAME_BYTES_MAX`].
    TooLong {
        /// Its length in bytes.
        got: usize,
    },
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoServer => write!(f, "a tool name is <server>.<tool>, this has no dot"),
            Self::BadServer => write!(f, "the part before the first dot must be [a-z0-9_-]+"),
            Self::BadTool => {
                write!(f, "the part after the first dot is empty or has a control character")
            }
            Self::TooLong { got } => {
                write!(f, "the name has {got} bytes, the limit is {TOOL_NAME_BYTES_MAX}")
            }
        }
    }
}

impl core::error::Error for NameError {}

/// Whether `text` can be the server part of a tool name.
#[must_use]
pub fn is_server_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
}

/// Whether `text` can be the name of a principal.
#[must_use]
pub fn is_principal(text: &str) -> bool {
    is_shown_text(text, PRINCIPAL_BYTES_MAX)
}

/// Whether `text` can be the name of a session.
#[must_use]
pub fn is_session(text: &str) -> bool {
    is_shown_text(text, SESSION_BYTES_MAX)
}

fn is_shown_text(text: &str, bytes_max: usize) -> bool {
    (1..=bytes_max).contains(&text.len()) && !text.contains(char::is_control)
}

impl ToolName {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.len() > TOOL_NAME_BYTES_MAX {
            return Err(NameError::TooLong { got: text.len() });
        }
        let (server, tool) = text.split_once('.').ok_or(NameError::NoServer)?;
        if !is_server_name(server) {
            return Err(NameError::BadServer);
        }
        if tool.is_empty() || tool.chars().any(char::is_control) {
            return Err(NameError::BadTool);
        }
        Ok(Self { text: text.into(), server_bytes: server.len() })
    }

    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The part before the first dot.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.text[..self.server_bytes]
    }

    /// The tool's own name, as its server knows it.
    #[must_use]
    pub fn tool(&self) -> &str {
        &self.text[self.server_bytes + 1..]
    }

    /// The name as one word of a POSIX shell, to be shown in a command that may be
    /// pasted: a server or a program chose it, and neither may choose what the shell
    /// does. None for one that cannot be shown as it is.
    #[must_use]
    pub fn shell_word(&self) -> Option<Cow<'_, str>> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let is_shown = |c: char| c.is_alphanumeric() || c.is_ascii_graphic() || c == ' ';
        if self.text.chars().all(is_plain) {
            Some(Cow::Borrowed(&self.text))
        } else if self.text.chars().all(is_shown) {
            Some(Cow::Owned(format!("'{}'", self.text.replace('\'', r"'\''"))))
        } else {
            None
        }
    }
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ToolName({:?})", self.text)
    }
}

impl core::str::FromStr for ToolName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

impl Encode for ToolName {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.text.as_str().encode(encoder)
    }
}

impl<Context> Decode<Context> for ToolName {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let text = String::decode(decoder)?;
        Self::parse(&text).map_err(|_| DecodeError::Other("not a tool name"))
    }
}

impl<'de, Context> BorrowDecode<'de, Context> for ToolName {
    fn borrow_decode<D: BorrowDecoder<'de, Context = Context>>(
        decoder: &mut D,
    ) -> Result<Self, DecodeError> {
        let text = <&str>::borrow_decode(decoder)?;
        Self::parse(text).map_err(|_| DecodeError::Other("not a tool name"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use alloc::vec::Vec;

    #[test]
    fn the_first_dot_parts_server_and_tool() {
        let name = ToolName::parse("github.issues.list").unwrap();
        assert_eq!((name.server(), name.tool()), ("github", "issues.list"));
    }

    #[test]
    fn no_name_is_more_than_a_word_to_a_shell() {
        let word = |text: &str| {
            ToolName::parse(text).unwrap().shell_word().map(alloc::borrow::Cow::into_owned)
        };
        assert_eq!(word("git-hub.issues_2.list").unwrap(), "git-hub.issues_2.list");
        assert_eq!(word("a.x; touch y #").unwrap(), "'a.x; touch y #'");
        assert_eq!(word("a.$(id) --b").unwrap(), "'a.$(id) --b'");
        assert_eq!(word("a.it's `b`").unwrap(), r"'a.it'\''s `b`'");
        assert_eq!(word("a.\u{f6}l").unwrap(), "'a.\u{f6}l'");
        // Turns round what is written behind it.
        assert_eq!(word("a.\u{202e}b"), None);
    }

    #[test]
    fn look_alikes_are_not_names() {
        for (text, why) in [
            ("github", NameError::NoServer),
            (".x", NameError::BadServer),
            ("GitHub.x", NameError::BadServer),
            ("gith\u{443}b.x", NameError::BadServer),
            ("github.", NameError::BadTool),
            ("github.x\0", NameError::BadTool),
            ("github.x\n", NameError::BadTool),
        ] {
            assert_eq!(ToolName::parse(text), Err(why), "{text:?}");
        }
        let long = alloc::format!("a.{}", "b".repeat(TOOL_NAME_BYTES_MAX));
        assert!(matches!(ToolName::parse(&long), Err(NameError::TooLong { .. })));
    }

    #[test]
    fn a_bad_name_does_not_decode() {
        let mut bytes = Vec::new();
        codec::encode_into(&"Bad.name", &mut bytes);
        assert!(codec::decode::<ToolName>(&bytes).is_err());
        bytes.clear();
        codec::encode_into(&ToolName::parse("good.name").unwrap(), &mut bytes);
        assert_eq!(codec::decode::<ToolName>(&bytes).unwrap().as_str(), "good.name");
    }
}
