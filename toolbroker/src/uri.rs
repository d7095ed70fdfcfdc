//! How text stands in a URI (RFC 3986), and how servers read it there.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_but_unreserved_characters_is_encoded() {
        assert_eq!(percent_encoded("aZ9-._~"), "aZ9-._~");
        assert_eq!(
            percent_encoded("a/b?c#d%e f+g&h=é\r\n"),
            "a%2Fb%3Fc%23d%25e%20f%2Bg%26h%3D%C3%A9%0D%0A"
        );
    }
}
