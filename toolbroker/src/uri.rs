//! How text stands in a URI (RFC 3986), and how servers read it there.

/// How often a value may be percent-encoded over itself before it is taken for
/// a trick.
const ENCODINGS_MAX: usize = 3;

/// Text in which every byte that is not unreserved (RFC 3986, 2.3) is
/// percent-encoded: fit for a path segment, a query and a form.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push_str(&crate::hex(&[byte]).to_ascii_uppercase());
        }
    }
    out
}

/// What a percent-encoded text stands for (RFC 3986, 2.1). What is no such
/// encoding stays.
pub(crate) fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let digit = |at: usize| text.get(at).and_then(|byte| char::from(*byte).to_digit(16));
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    decoded
}

/// A segment of a path as some server might read it: it ends before `?`, `#` and, where
/// parameters are cut off, `;`, and spaces around it are dropped.
pub(crate) fn segment_name(segment: &[u8]) -> &[u8] {
    let ends = |byte: &u8| matches!(byte, b'?' | b'#' | b';');
    segment[..segment.iter().position(ends).unwrap_or(segment.len())].trim_ascii()
}

/// Whether a segment of `text` is `..` to anybody who might resolve it. Segments
/// are parted by `/` and `\`, and read as [`segment_name`] says. Parsers of URLs drop
/// tabs and line ends wherever they stand. All of it may be percent-encoded, several
/// times over.
pub(crate) fn climbs(text: &str) -> bool {
    is_read_so(text, |segments| segments.contains(&&b".."[..]))
}

/// Whether `text` has no segment but `.` and empty ones, to anybody likewise.
pub(crate) fn leads_nowhere(text: &str) -> bool {
    is_read_so(text, |segments| segments.iter().all(|it| matches!(*it, b"" | b".")))
}

/// Whether the segments of `text` are so to somebody who decodes it often enough; what
/// can be decoded too often is a trick.
fn is_read_so(text: &str, is_so: impl Fn(&[&[u8]]) -> bool) -> bool {
    let mut text = text.as_bytes().to_vec();
    for _ in 0..=ENCODINGS_MAX {
        text.retain(|byte| !byte.is_ascii_control());
        let segments = text.split(|byte| matches!(byte, b'/' | b'\\'));
        if is_so(&segments.map(segment_name).collect::<Vec<_>>()) {
            return true;
        }
        let decoded = percent_decoded(&text);
        if decoded.len() == text.len() {
            return false;
        }
        text = decoded;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_lets_nothing_climb() {
        for text in [
            "..",
            "a/..",
            "../a",
            "a/../b",
            "a\\..\\b",
            "a/%2e%2E/b",
            "a%2F..%5cb",
            "a/.%2e",
            "a/.\t./b",
            "a/.\n./b",
            "a/.\r\n./b",
            "a/\0../b",
            "a/.%0a./b",
            "a/..?x",
            "a/..#x",
            "a/..%3fx",
            "a/.. ",
            "a/ .. /b",
            "a/..%20",
            "a/..;/b",
            "a/..;c=d/b",
            "a/%252e%252e/b",
            "a/%25252e%25252e/b",
            "a/%2525252525252e",
            "a/%252e%252e%255cb",
        ] {
            assert!(climbs(text), "{text:?}");
        }
        for text in [
            "",
            "a",
            ".",
            "...",
            "a..b",
            "..a/b",
            "a/...",
            "a/.b/c.",
            "%2",
            "a%2",
            "v1.2..3",
            "docs/...",
            "docs/./a",
            "docs/..gitignore",
            "docs/a;b/c?d=1..2#e",
            "100%25 of a/b",
            "a b%20c%2520d",
            "two lines\nand more\t...",
            "Really?.. Yes; .. no",
        ] {
            assert!(!climbs(text), "{text:?}");
        }
    }

    #[test]
    fn everything_but_unreserved_characters_is_encoded() {
        assert_eq!(percent_encoded("aZ9-._~"), "aZ9-._~");
        assert_eq!(
            percent_encoded("a/b?c#d%e f+g&h=é\r\n"),
            "a%2Fb%3Fc%23d%25e%20f%2Bg%26h%3D%C3%A9%0D%0A"
        );
    }

    #[test]
    fn a_text_of_dots_and_nothing_leads_nowhere_however_it_is_written() {
        for text in
            ["", ".", "./.", "/", "%2e", "%252e", " ", "\t", "%0a", ".;a=b", "#a", "?", "\\."]
        {
            assert!(leads_nowhere(text), "{text:?}");
        }
        for text in ["a", "..", "./a", "...", "%2e%2e", "%61"] {
            assert!(!leads_nowhere(text), "{text:?}");
        }
    }
}
