//! What is said of a run on every link: its name, what it says and leaves, and
//! which tools it called.
//!
//! A guest says it first, and a worker, the supervisor and the service say it
//! again. So it is of no link, and knows none of them.

use alloc::string::String;
use alloc::vec::Vec;

use crate::abi::CallCode;
use crate::codec::{Decode, Encode};
use crate::hex::Hex;
use crate::limits::{LOG_LEVEL_MAX, LOG_RECORD_BYTES_MAX, OverLimit, within};
use crate::name::ToolName;

/// Identifies one run: 16 bytes drawn by the supervisor, printed as hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct RunId(pub [u8; 16]);

impl core::fmt::Display for RunId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        Hex(&self.0).fmt(f)
    }
}

impl core::fmt::Debug for RunId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "RunId({self})")
    }
}

/// One log record.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Log {
    /// As the program gave it: 0 error, 1 warn, 2 info, 3 debug, 4 trace.
    pub level: u8,
    /// The text, untrusted.
    pub text: String,
}

impl Log {
    /// Holds it to its own bounds, whatever came before it.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn check(&self) -> Result<(), OverLimit> {
        within("log_record_bytes", self.text.len() as u64, LOG_RECORD_BYTES_MAX.into())?;
        within("log_level", self.level.into(), LOG_LEVEL_MAX.into())
    }
}

/// One artifact.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Artifact {
    /// Its name, untrusted: no path until somebody made it one.
    pub name: String,
    /// Its media type.
    pub media_type: String,
    /// Its content.
    pub content: Vec<u8>,
}

impl Artifact {
    /// A plain file name for its untrusted one: of at most 100 letters, digits,
    /// `.`, `_` and `-`, without a dot in front. Two may have the same.
    #[must_use]
    pub fn file_name(&self) -> String {
        let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let plain: String =
            self.name.chars().map(|c| if fits(c) { c } else { '_' }).take(100).collect();
        match plain.trim_start_matches('.') {
            "" => "artifact".into(),
            trimmed => trimmed.into(),
        }
    }
}

/// One tool call, as it is reported.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CallRecord {
    /// Its number in the order of calling.
    pub id: u32,
    /// Which tool.
    pub tool: ToolName,
    /// How it settled; `None` while it had not.
    pub settled: Option<CallSettled>,
}

/// How a call settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CallSettled {
    /// `None` for a response.
    pub code: Option<CallCode>,
    /// How long it took, in nanoseconds.
    pub duration_ns: u64,
    /// Whether the broker removed credentials from what the tool said.
    pub redacted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_artifacts_name_cannot_leave_its_folder_or_its_header() {
        for (name, expected) in [
            ("report.csv", "report.csv"),
            ("../../etc/passwd", "_.._etc_passwd"),
            ("/abs", "_abs"),
            ("..", "artifact"),
            ("", "artifact"),
            ("a\0b", "a_b"),
            ("a\"; filename=\"b.html", "a___filename__b.html"),
            ("a\r\nSet-Cookie: x", "a__Set-Cookie__x"),
        ] {
            let artifact =
                Artifact { name: name.into(), media_type: String::new(), content: Vec::new() };
            assert_eq!(artifact.file_name(), expected, "{name:?}");
        }
    }
}
