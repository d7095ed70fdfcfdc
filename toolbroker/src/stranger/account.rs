//! Who a server's own user is to those who look it up: `ssh`, `git` and the
//! runtimes of most languages fail for a number without a name.
//!
//! The host's accounts stay as they are; a server sees one more. Deliberately
//! absent is any other source of names than the two files.

use std::path::Path;

/// What a server's user is called where the host has no name for it.
pub(super) const NAME: &str = "stranger";

/// The host's accounts and groups.
const FILES: [&str; 2] = ["/etc/passwd", "/etc/group"];

/// The files, relative to the root, in which a user and a group of this id are to
/// be named, with what is to be in them.
pub(super) fn files(id: u32, home: &Path) -> Vec<(&'static Path, Vec<u8>)> {
    let home = home.to_str().filter(|home| !home.contains([':', '\n'])).unwrap_or("/");
    let lines =
        [format!("{NAME}:x:{id}:{id}:tool server:{home}:/bin/sh"), format!("{NAME}:x:{id}:")];
    let mut files = Vec::new();
    for (file, line) in FILES.iter().zip(lines) {
        let Ok(host) = std::fs::read(file) else { continue };
        if let Some(text) = with(host, id, &line) {
            files.push((Path::new(file.trim_start_matches('/')), text));
        }
    }
    files
}

/// What the host calls a user, or else [`NAME`].
pub(super) fn name(uid: u32) -> String {
    let host = std::fs::read(FILES[0]).unwrap_or_default();
    let name = named(&host, uid).map(|name| String::from_utf8_lossy(name).into_owned());
    name.unwrap_or_else(|| NAME.to_owned())
}

/// The host's lines and one more, if none of them has that id.
fn with(mut host: Vec<u8>, id: u32, line: &str) -> Option<Vec<u8>> {
    if named(&host, id).is_some() {
        return None;
    }
    if host.last().is_some_and(|last| *last != b'\n') {
        host.push(b'\n');
    }
    host.extend(line.bytes());
    host.push(b'\n');
    Some(host)
}

/// The name in the line that has an id.
fn named(host: &[u8], id: u32) -> Option<&[u8]> {
    let id = id.to_string();
    host.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let name = fields.next()?;
        (fields.nth(1)? == id.as_bytes()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_a_name_gets_one_and_everybody_else_keeps_theirs() {
        let host = b"root:x:0:0::/root:/bin/sh\n700:x:7:70::/:\nlast:x:9:9::/:/bin/sh";
        let text = with(host.to_vec(), 70, "x:x:70:70::/:").unwrap();
        assert_eq!(text, [&host[..], b"\nx:x:70:70::/:\n"].concat());
        assert_eq!(with(host.to_vec(), 9, "x:x:9:9::/:"), None);
        assert_eq!(named(host, 7), Some(&b"700"[..]));
        assert_eq!(with(Vec::new(), 7, "x:x:7:"), Some(b"x:x:7:\n".to_vec()));
    }
}
