//! Answers of which nothing is made: they have more values than the broker keeps
//! in memory, or cannot be read. Their calls end all the same.
//!
//! A value that takes two bytes of JSON takes a hundred in memory, on its way
//! from text to what a program is told. A message is bounded in bytes, and so
//! it has to be in values: counted here, before anything is made of it.
//! Deliberately absent is any understanding of JSON beyond its strings and the
//! members of a message, since whatever is no JSON is refused by the next reader.
//!
//! To the MCP library such an answer is an error of the request that it was for:
//! one that this module makes ([`Unusable::answer`]) and knows again
//! ([`Unusable::of`]). That a result is none is seen behind the library.

use rmcp::RoleClient;
use rmcp::model::{ErrorCode, ErrorData, JsonRpcMessage, RequestId};
use rmcp::service::RxJsonRpcMessage;

/// Values of one message, and of one result. The largest response a run may
/// have has room for no more than a few times as many.
pub(crate) const VALUES_MAX: u64 = 512 * 1024;

/// One message of a server, in bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Of the codes that JSON-RPC leaves to implementations.
const UNUSABLE: ErrorCode = ErrorCode(-32_077);

/// Why nothing is made of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// There is none.
    #[error("with nothing")]
    Nothing,
    /// It has too many values.
    #[error("with more than {VALUES_MAX} values")]
    TooMany,
    /// It has too many bytes.
    #[error("with more than {} MiB", MESSAGE_BYTES_MAX >> 20)]
    TooLong,
    /// It is not JSON: NaN, half a message, a thousand levels.
    #[error("with no JSON that can be read")]
    NoJson,
    /// It is JSON and no answer of MCP.
    #[error("with no message of MCP")]
    NoMessage,
    /// It is compressed, or encoded otherwise.
    #[error("in an encoding that was not asked for")]
    Encoded,
    /// It says that it answers something else.
    #[error("with the answer to another request")]
    Another,
    /// It is an answer of MCP, and no tool's.
    #[error("with no tool result")]
    NoResult,
    /// It is a tool's, and this one of its blocks, counted from 0, is none.
    #[error("with no tool result: content[{0}] is no block of MCP")]
    NoBlock(usize),
    /// It is an answer of MCP, and no resource's.
    #[error("with no resource")]
    NoResource,
}

impl Unusable {
    const ALL: [Self; 9] = [
        Self::Nothing,
        Self::TooMany,
        Self::TooLong,
        Self::NoJson,
        Self::NoMessage,
        Self::Encoded,
        Self::Another,
        Self::NoResult,
        Self::NoResource,
    ];

    /// What the MCP library is given in the place of the answer to `asked`.
    pub(super) fn answer(self, asked: RequestId) -> RxJsonRpcMessage<RoleClient> {
        let error = ErrorData::new(UNUSABLE, self.to_string(), None);
        JsonRpcMessage::error(error, Some(asked))
    }

    /// Which of these an error is. A server that says so by itself has as little
    /// of an answer.
    pub(super) fn of(error: &ErrorData) -> Option<Self> {
        let says = |it: &Self| error.code == UNUSABLE && error.message == it.to_string();
        Self::ALL.into_iter().find(says)
    }

    /// Why this is no message.
    pub(super) fn unread(error: &serde_json::Error) -> Self {
        if error.is_data() { Self::NoMessage } else { Self::NoJson }
    }
}

/// Whether an id in an answer is that of what was asked. Some servers give back a
/// number as a text.
pub(super) fn is_same(id: &RequestId, asked: &RequestId) -> bool {
    match (id, asked) {
        (RequestId::String(id), RequestId::Number(asked)) => id.parse() == Ok(*asked),
        (id, asked) => id == asked,
    }
}

/// What is seen of a message while it comes.
#[derive(Debug, Default)]
pub(super) struct Scan {
    values: u64,
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// The last string among the message's own members, cut.
    name: Vec<u8>,
    /// Its member `id`, as it is written, cut.
    id: Vec<u8>,
    in_id: bool,
    /// Its first byte that is no white space and no byte order mark.
    first: Option<u8>,
    /// Whether it has a `jsonrpc`, as every message should, or a `result`.
    is_message: bool,
    has_method: bool,
}

/// What is kept of a member's name: longer than those that are looked for.
const NAME_BYTES_MAX: usize = 8;
/// What is kept of an id. Ours are numbers.
const ID_BYTES_MAX: usize = 64;

impl Scan {
    /// Sees more of it.
    pub(super) fn see(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.take(*byte));
    }

    /// Whether it has more values than are kept.
    pub(super) fn has_too_many(&self) -> bool {
        self.values > VALUES_MAX
    }

    /// Which request it answers, as far as that is legible. A line of a log may have an
    /// `id` too, or a message within it.
    pub(super) fn answers(&self) -> Option<RequestId> {
        let is_answer = self.first == Some(b'{') && self.is_message && !self.has_method;
        if is_answer { serde_json::from_slice(&self.id).ok() } else { None }
    }

    /// Whether it asks or tells something, by the name of a method.
    pub(super) fn has_method(&self) -> bool {
        self.has_method
    }

    fn take(&mut self, byte: u8) {
        if self.in_id && !self.in_string && self.depth == 1 && matches!(byte, b',' | b'}') {
            self.in_id = false;
        }
        if self.in_id && self.id.len() < ID_BYTES_MAX {
            self.id.push(byte);
        }
        if self.first.is_none() && !byte.is_ascii_whitespace() && !b"\xef\xbb\xbf".contains(&byte) {
            self.first = Some(byte);
        }
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => {
                self.in_string = !self.in_string;
                if self.in_string && self.depth == 1 {
                    self.name.clear();
                }
            }
            _ if self.in_string => {
                let is_kept = self.depth == 1 && self.name.len() < NAME_BYTES_MAX;
                self.name.extend(is_kept.then_some(byte));
            }
            b':' => {
                self.values += 1;
                if self.depth == 1 && self.name == b"id" {
                    self.id.clear();
                    self.in_id = true;
                }
                if self.depth == 1 {
                    match self.name.as_slice() {
                        b"jsonrpc" | b"result" => self.is_message = true,
                        b"method" => self.has_method = true,
                        _ => {}
                    }
                }
            }
            b',' => self.values += 1,
            b'[' | b'{' => {
                self.values += 1;
                self.depth = self.depth.saturating_add(1);
            }
            b']' | b'}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
    }
}

/// Whether a text of JSON has no more values than [`VALUES_MAX`].
pub(crate) fn has_few_values(json: &[u8]) -> bool {
    let mut scan = Scan::default();
    json.iter().all(|byte| {
        scan.take(*byte);
        !scan.has_too_many()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> Scan {
        let mut whole = Scan::default();
        whole.see(text.as_bytes());
        // In pieces as in one.
        let mut pieces = Scan::default();
        text.bytes().for_each(|byte| pieces.see(&[byte]));
        assert_eq!(format!("{whole:?}"), format!("{pieces:?}"));
        whole
    }

    #[test]
    fn values_are_counted_and_not_in_strings() {
        let half = "0,".repeat(VALUES_MAX as usize / 2 + 1);
        let passes = |text: &str| {
            let passes = has_few_values(text.as_bytes());
            assert_eq!(passes, !scan(text).has_too_many());
            passes
        };
        assert!(passes(&half) && !passes(&half.repeat(2)));
        assert!(passes(&format!("\"{}\"", half.repeat(3))));
        assert!(passes(&format!("\"a\\\"{}\"", half.repeat(3))));
        assert!(!passes(&format!("\"a\\\\\"{}", half.repeat(3))));
        assert!(!passes(&format!("{half}\n{half}")), "a line ends nothing here");
    }

    #[test]
    fn an_answers_id_is_legible_wherever_it_stands_and_whatever_else_is_wrong() {
        let number = Some(RequestId::Number(7));
        for text in [
            r#"{"jsonrpc":"2.0","id":7,"result":{"x":NaN}}"#,
            r#"{"result":{"id":1,"y":[{"id":2}],"z":"\"id\":3"},"jsonrpc":"2.0","id":7}"#,
            r#"{"result":"\ud800","id" : 7 ,"jsonrpc":0}"#,
            "\u{feff} {\"jsonrpc\":\"2.0\",\"id\":7,\"error\":{\"code\":1e400}}",
            r#"{"jsonrpc":"2.0","id":7,"result":{"#,
            r#"{"jsonrpc":"2.0","id":7}"#,
            r#"{"id":7,"result":{}}"#,
        ] {
            assert_eq!(scan(text).answers(), number, "{text}");
        }
        assert_eq!(
            scan(r#"{"jsonrpc":"2.0","id":"a,}b","result":NaN}"#).answers(),
            Some(RequestId::String("a,}b".into()))
        );
        for text in [
            r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","method":"x","params":{}}"#,
            r#"[{"jsonrpc":"2.0","id":7,"result":{}}]"#,
            r#"{"jsonrpc":"2.0","id":null,"error":{}}"#,
            r#"{"jsonrpc":"id","result":7}"#,
            // Lines of logs.
            r#"{"level":"error","id":7,"error":"no such row"}"#,
            r#"[debug] sending {"jsonrpc":"2.0","id":7,"result":{}}"#,
            "\"id\": 7,",
            "",
        ] {
            assert_eq!(scan(text).answers(), None, "{text}");
        }
    }

    #[test]
    fn an_unusable_answer_is_known_again() {
        for why in Unusable::ALL {
            let JsonRpcMessage::Error(error) = why.answer(RequestId::Number(1)) else {
                panic!("{why:?}");
            };
            assert_eq!(Unusable::of(&error.error), Some(why));
        }
        let other = ErrorData::new(ErrorCode::INTERNAL_ERROR, Unusable::NoJson.to_string(), None);
        assert_eq!(Unusable::of(&other), None);
    }
}
