//! What is said of a run on every link: its name, what it says and leaves, and
//! which tools it called.
//!
//! A guest says it first, and a worker, the supervisor and the service say it
//! again. So it is of no link, and knows none of them.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::abi::CallCode;
use crate::codec::{Decode, Encode};
use crate::hex::{Hex, unhex_array};
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

/// A text that is no run's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRunId;

impl core::fmt::Display for NoRunId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("a run id has 32 hex digits")
    }
}

impl core::error::Error for NoRunId {}

impl core::str::FromStr for RunId {
    type Err = NoRunId;

    fn from_str(text: &str) -> Result<Self, NoRunId> {
        unhex_array(text).map(Self).ok_or(NoRunId)
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
    /// A plain file name for its untrusted one: letters and digits of any script,
    /// `.`, `_` and `-`, without a dot or a dash in front, of at most [`FILE_NAME_BYTES_MAX`]
    /// bytes. What is cut is not its extension. Two may have the same.
    #[must_use]
    pub fn file_name(&self) -> String {
        let fits = |c: char| c.is_alphanumeric() || "._-".contains(c);
        let plain: String = self.name.chars().map(|c| if fits(c) { c } else { '_' }).collect();
        let plain = match plain.trim_start_matches(['.', '-']) {
            "" => "artifact",
            trimmed => trimmed,
        };
        let (stem, extension) = match plain.rfind('.') {
            Some(dot) if plain.len() - dot <= EXTENSION_BYTES_MAX => plain.split_at(dot),
            _ => (plain, ""),
        };
        let room = FILE_NAME_BYTES_MAX - extension.len();
        let stem = &stem[..stem.floor_char_boundary(room)];
        format!("{stem}{extension}")
    }
}

/// Bytes of an artifact's file name: a folder takes 255, and who writes there may
/// number names that are the same.
pub const FILE_NAME_BYTES_MAX: usize = 200;
/// Bytes of what is taken for an extension, with its dot.
const EXTENSION_BYTES_MAX: usize = 16;

/// One tool call, as it is reported.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CallRecord {
    /// Its number in the order of calling.
    pub id: u32,
    /// Which tool.
    pub tool: ToolName,
    /// When it was made, in nanoseconds of the host's monotonic clock; 0 where who tells
    /// of it does not know.
    pub begun_ns: u64,
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

    #[test]
    fn an_artifacts_name_keeps_its_letters_and_its_extension() {
        let file_name = |name: &str| {
            let (media_type, content) = (String::new(), Vec::new());
            Artifact { name: name.into(), media_type, content }.file_name()
        };
        assert_eq!(file_name("\u{dc}bersicht Q3.csv"), "\u{dc}bersicht_Q3.csv");
        assert_eq!(file_name("\u{5831}\u{544a}.csv"), "\u{5831}\u{544a}.csv");
        // No other direction, and no slash that looks like one.
        assert_eq!(file_name("a\u{202e}b\u{2215}c"), "a_b_c");
        let cut = file_name(&format!("{}.csv", "\u{544a}".repeat(200)));
        assert_eq!(cut, format!("{}.csv", "\u{544a}".repeat(65)));
        let cut = file_name(&format!("a.{}", "b".repeat(300)));
        assert_eq!(cut.len(), FILE_NAME_BYTES_MAX);
    }
}
