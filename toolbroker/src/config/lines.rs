//! The line of a field, for whoever looks for it: a file is parsed into values
//! that do not say where they stood, so it is read once more when one is wrong.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::node::path_of;

/// The line, from 1, of the field with this way; of the innermost table or list
/// that is there, where it is missing. `None` where not even that is found.
pub(super) fn line_of(file: &Path, field: &str) -> Option<u32> {
    // What is no file may not be there a second time.
    let text = file.is_file().then(|| super::read(file).ok()).flatten()?;
    let start = match DeTable::parse(&text) {
        Ok(document) => in_toml(document.into_inner(), field),
        Err(_) => {
            let at = text.len() - text.trim_start_matches('\u{feff}').len();
            Json { text: text.as_bytes(), at }.find(field)
        }
    }?;
    let ends = text.as_bytes().get(..start)?.iter().filter(|byte| **byte == b'\n').count();
    u32::try_from(ends + 1).ok()
}

/// What is left of a way behind this key, if the way begins with it.
fn behind<'w>(way: &'w str, key: &str) -> Option<&'w str> {
    let rest = way.strip_prefix(&path_of(key))?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

fn in_toml(document: DeTable<'_>, field: &str) -> Option<usize> {
    let root = DeValue::Table(document);
    let (mut value, mut way, mut found) = (&root, field, None);
    loop {
        let next = match value {
            // A key may have dots, so the longest that fits is meant.
            DeValue::Table(table) => table
                .iter()
                .filter_map(|(key, value)| {
                    Some((key.span().start, value.get_ref(), behind(way, key.get_ref())?))
                })
                .min_by_key(|(.., rest)| rest.len()),
            DeValue::Array(items) => {
                let item = items
                    .iter()
                    .enumerate()
                    .find_map(|(position, item)| Some((item, behind(way, &position.to_string())?)));
                item.map(|(item, rest)| (item.span().start, item.get_ref(), rest))
            }
            _ => None,
        };
        let Some((start, inner, rest)) = next else { return found };
        (found, value, way) = (Some(start), inner, rest);
    }
}

/// A place in a text that is JSON.
struct Json<'a> {
    text: &'a [u8],
    at: usize,
}

impl Json<'_> {
    /// Where the innermost part of a way stands in the value that begins here.
    fn find(&mut self, way: &str) -> Option<usize> {
        let mut best: Option<(usize, usize, &str)> = None;
        self.members(|key, start, value| {
            if let Some(rest) = behind(way, key)
                && best.is_none_or(|(.., other)| rest.len() < other.len())
            {
                best = Some((start, value, rest));
            }
        })?;
        let (start, value, rest) = best?;
        Some(Json { text: self.text, at: value }.find(rest).unwrap_or(start))
    }

    /// Goes over the object or list that begins here, and tells each member's key
    /// or position, where it stands and where its value does. `None` if it is none
    /// of these, or no JSON.
    fn members(&mut self, mut tell: impl FnMut(&str, usize, usize)) -> Option<()> {
        self.blanks();
        let is_object = match self.next()? {
            b'{' => true,
            b'[' => false,
            _ => return None,
        };
        for position in 0.. {
            self.blanks();
            if matches!(self.peek()?, b'}' | b']') {
                self.at += 1;
                break;
            }
            if self.peek()? == b',' {
                self.at += 1;
                self.blanks();
            }
            let start = self.at;
            let mut key = position.to_string();
            if is_object {
                self.skip()?;
                key = serde_json::from_slice(&self.text[start..self.at]).ok()?;
                self.blanks();
                (self.next()? == b':').then_some(())?;
                self.blanks();
            }
            tell(&key, start, self.at);
            self.skip()?;
        }
        Some(())
    }

    /// Goes behind the value that begins here.
    fn skip(&mut self) -> Option<()> {
        match self.peek()? {
            b'{' | b'[' => self.members(|_, _, _| {}),
            b'"' => {
                self.at += 1;
                loop {
                    match self.next()? {
                        b'"' => return Some(()),
                        b'\\' => self.at += 1,
                        _ => {}
                    }
                }
            }
            _ => {
                let is_end = |byte: &u8| b",]} \t\r\n".contains(byte);
                let rest = &self.text[self.at..];
                self.at += rest.iter().position(is_end).unwrap_or(rest.len());
                Some(())
            }
        }
    }

    fn blanks(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, fields: &[(&str, Option<u32>)]) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, text).unwrap();
        for (field, line) in fields {
            assert_eq!(line_of(&file, field), *line, "{field}");
        }
    }

    #[test]
    fn a_field_is_found_and_what_is_missing_where_it_would_be() {
        let json = "{\"a\\\"b\": 1,\n \"mcpServers\": {\n  \"x\": {\"command\": \"c\",\n\
                    \"args\": [ \"[\\\\\",\n 7\n],\n\"env\": {}},\n\"x.y\": {\n\"url\":\n 7}}}";
        lines(
            json,
            &[
                ("a\\\"b", Some(1)),
                ("mcpServers", Some(2)),
                ("mcpServers.x", Some(3)),
                ("mcpServers.x.url", Some(3)),
                ("mcpServers.x.args", Some(4)),
                ("mcpServers.x.args.1", Some(5)),
                ("mcpServers.x.env.K", Some(7)),
                ("mcpServers.x.y.url", Some(9)),
                ("other", None),
                ("", None),
            ],
        );
        let toml = "[servers.x]\ncommand = 'c'\nargs = [\n 'a',\n 7]\n\n[servers.'x.y']\nurl = 7\n\
                    [[many]]\na = 1\n[[many]]\nb = 1\n";
        lines(
            toml,
            &[
                ("servers.x.args.1", Some(5)),
                ("servers.x.env", Some(1)),
                ("servers.x.y.url", Some(8)),
                ("many.1.b", Some(12)),
                ("other", None),
            ],
        );
    }

    #[test]
    fn what_is_no_json_has_no_line_and_is_not_read_for_ever() {
        for text in
            ["", "{", "[", "{\"a\"", "{\"a\":", "[1", "\"a", "{\"a\":\"\\", "]", "7", "[,", "{,"]
        {
            lines(text, &[("a", None), ("0.0", None)]);
        }
    }
}
