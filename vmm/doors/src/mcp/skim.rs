//! The id of a request that is too long to be read, found as it goes by.
//!
//! Its client waits for an answer, and one without an id answers nobody. What goes
//! by may be anything: no more of it is kept than an id has. That it is JSON is not
//! checked, so who sends what looks like a request is answered as if it were one.

use forge_protocol::json;
use rmcp::model::RequestId;

/// A key or an id as it is written, in bytes. Longer ones are none that are looked for.
const WORD_BYTES_MAX: usize = 1024;

/// What has gone by of one message.
#[derive(Default)]
pub(super) struct Skim {
    depth: usize,
    /// In a text, and whether the next byte of it stands for itself.
    text: Option<Escape>,
    /// What is there of the key or the value that begins at depth 1.
    word: Vec<u8>,
    /// That is a value, of the key `id`, `method` or another.
    of: Option<Key>,
    ids: Vec<Vec<u8>>,
    is_request: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Escape {
    No,
    Yes,
}

#[derive(Clone, Copy, PartialEq)]
enum Key {
    Id,
    Method,
    Other,
}

impl Skim {
    pub(super) fn pass(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.step(*byte));
    }

    fn step(&mut self, byte: u8) {
        let is_top = self.depth == 1;
        if let Some(escape) = self.text {
            self.text = match (escape, byte) {
                (Escape::No, b'"') => None,
                (Escape::No, b'\\') => Some(Escape::Yes),
                _ => Some(Escape::No),
            };
            return self.keep(is_top, byte);
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                if is_top {
                    self.value();
                }
                self.depth = self.depth.saturating_sub(1);
            }
            b':' if is_top => {
                self.of = Some(match &*self.word {
                    br#""id""# => Key::Id,
                    br#""method""# => Key::Method,
                    _ => Key::Other,
                });
                self.word.clear();
            }
            b',' if is_top => self.value(),
            b' ' | b'\t' | b'\r' | b'\n' => {}
            _ => {
                if byte == b'"' {
                    self.text = Some(Escape::No);
                }
                self.keep(is_top, byte);
            }
        }
    }

    fn keep(&mut self, is_top: bool, byte: u8) {
        if is_top && self.word.len() <= WORD_BYTES_MAX {
            self.word.push(byte);
        }
    }

    /// A member of the object has ended.
    fn value(&mut self) {
        let word = std::mem::take(&mut self.word);
        match self.of.take() {
            Some(Key::Id) if self.ids.len() < 2 => self.ids.push(word),
            Some(Key::Method) => self.is_request = true,
            _ => {}
        }
    }

    /// The id, if a request with one went by.
    pub(super) fn id(self) -> Option<RequestId> {
        match &self.ids[..] {
            [id] if self.is_request && id.len() <= WORD_BYTES_MAX => json::from_slice(id).ok(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(line: &str) -> Option<RequestId> {
        let mut at_once = Skim::default();
        at_once.pass(line.as_bytes());
        let mut by_and_by = Skim::default();
        line.as_bytes().chunks(1).for_each(|byte| by_and_by.pass(byte));
        let id = at_once.id();
        assert_eq!(by_and_by.id(), id, "{line}");
        id
    }

    #[test]
    fn the_id_of_a_request_is_found_wherever_it_stands() {
        let text = RequestId::String("a\",}".into());
        for (line, expected) in [
            (r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#, Some(RequestId::Number(7))),
            (
                r#" { "method" : "x" , "params" : {"id": 1} , "id" : -8 } "#,
                Some(RequestId::Number(-8)),
            ),
            (r#"{"params":["{\"id\":1,", {"a":"\\"}],"method":"x","id":"a\",}"}"#, Some(text)),
            // Notifications, answers, batches, and what is no id.
            (r#"{"method":"x","params":{"id":1}}"#, None),
            (r#"{"id":1,"result":{"method":2}}"#, None),
            (r#"[{"id":1,"method":"x"}]"#, None),
            (r#"{"id":1,"id":2,"method":"x"}"#, None),
            (r#"{"id":[1],"method":"x"}"#, None),
            (r#"{"id":{"a":1},"method":"x"}"#, None),
            (r#"{"id":"open,"method":"x"}"#, None),
            ("]]}}:,\"", None),
        ] {
            assert_eq!(id(line), expected, "{line}");
        }
    }

    #[test]
    fn no_more_is_kept_than_an_id_has() {
        let mut skim = Skim::default();
        skim.pass(br#"{"method":"x","id":""#);
        for _ in 0..1000 {
            skim.pass(&[b'7'; 1000]);
            assert!(skim.word.len() <= WORD_BYTES_MAX + 1);
        }
        skim.pass(br#""}"#);
        assert_eq!(skim.id(), None);
    }
}
