//! Names by which a door is reached, origins of pages that may ask it, and names of
//! principals: one that no request can have is a mistake of whoever wrote it, and is told
//! here. Nobody else would say so before a client is refused.

use std::net::IpAddr;

use forge_protocol::limits::PRINCIPAL_BYTES_MAX;
use forge_protocol::name::is_principal;

/// Whether a name may be written with a port, which is then the only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    Allowed,
    Refused,
}

/// Why no `Host` header has this name, and what to write; `None` if one can.
pub(crate) fn misnamed(text: &str, port: Port) -> Option<&'static str> {
    let (name, its_port) = parts(text);
    if text.contains("://") {
        return Some("has a scheme: write the name alone, as forge.example");
    }
    if text.contains('/') {
        return Some("has a path: write the name alone, as forge.example");
    }
    if text.contains('*') {
        return Some("has a *, and nothing stands for several names here: list each");
    }
    match its_port {
        Some(_) if port == Port::Refused => {
            return Some("has a port: leave it out, a name is good at every port");
        }
        Some(number) if number.parse::<u16>().is_err() => {
            return Some("has a port that is no number from 0 to 65535");
        }
        _ => {}
    }
    let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let is_name = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let why = "is no host's name, which has letters, digits, dots and -: write forge.example, or \
               xn--… for what has other letters";
    (!is_address && !is_name).then_some(why)
}

/// Why no browser sends this as an origin, and what to write; `None` if one can.
pub(crate) fn no_origin(text: &str) -> Option<&'static str> {
    // What a page without an origin sends.
    if text == "null" {
        return None;
    }
    let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| !scheme.is_empty())
    else {
        return Some("has no scheme: write it as a browser sends it, https://app.example");
    };
    if rest.trim_end_matches('/').contains('/') {
        return Some("has a path: write it as a browser sends it, https://app.example");
    }
    let host = rest.trim_end_matches('/');
    let host = host.strip_suffix(":*").unwrap_or(host);
    if host.contains('*') {
        return Some("has a *, which stands for any port alone, as in https://app.example:*");
    }
    let is_scheme =
        scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    if !is_scheme || misnamed(host, Port::Allowed).is_some() {
        return Some("is no origin: write it as a browser sends it, https://app.example");
    }
    None
}

/// Why no principal is called this; `None` if one can be.
pub(crate) fn no_principal(name: &str) -> Option<String> {
    (!is_principal(name)).then(|| {
        format!("a principal's name has 1 to {PRINCIPAL_BYTES_MAX} bytes and no control characters")
    })
}

/// A name and its port. The colons of an address in brackets are its own.
fn parts(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
        _ => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_host_header_can_have_is_told_from_one_that_it_can() {
        for good in ["forge.example", "Forge", "localhost", "192.0.2.7", "::1", "[::1]", "a_b.c"] {
            assert_eq!(misnamed(good, Port::Refused), None, "{good}");
        }
        for good in ["forge.example:8443", "[::1]:80", "forge.example"] {
            assert_eq!(misnamed(good, Port::Allowed), None, "{good}");
        }
        for (bad, why) in [
            ("https://x", "a scheme"),
            ("x/y", "a path"),
            ("*.x", "a *"),
            ("x:80", "a port"),
            ("[::1]:80", "a port"),
            ("", "no host's name"),
            ("a b", "no host's name"),
            ("u@x", "no host's name"),
            ("bücher.example", "xn--"),
        ] {
            let told = misnamed(bad, Port::Refused).unwrap_or_default();
            assert!(told.contains(why), "{bad}: {told}");
        }
        assert!(misnamed("x:99999", Port::Allowed).is_some());
    }

    #[test]
    fn an_origin_that_no_browser_sends_is_told_from_one_that_it_does() {
        for good in ["https://app.example:443", "http://x", "http://[::1]:*", "null", "app://x/"] {
            assert_eq!(no_origin(good), None, "{good}");
        }
        for (bad, why) in [
            ("app.example", "no scheme"),
            ("://x", "no scheme"),
            ("https://*.example", "any port alone"),
            ("*", "no scheme"),
            ("https://", "no origin"),
            ("https://a b", "no origin"),
            ("https://x:x", "no origin"),
            ("https://x/y", "a path"),
        ] {
            let told = no_origin(bad).unwrap_or_default();
            assert!(told.contains(why), "{bad}: {told}");
        }
    }
}
