//! What a request must be before anything else is looked at: meant for this
//! door, and not a web page's doing.
//!
//! A page that a browser shows can have it send requests to any address, this
//! host's too. A browser names the host that the page believes it speaks to
//! and, wherever it matters, the page's origin. So a host that is a name has
//! to be a name of this door: nobody can rebind one. And an origin, if there
//! is one, has to be this door's. No answer permits another origin anything
//! (no CORS).

use std::net::IpAddr;

use hyper::Uri;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::uri::Authority;

/// Headers that may come only once: given two, a proxy might go by another than we do.
const SINGLE: &[&str] =
    &["content-type", "last-event-id", "mcp-protocol-version", "mcp-session-id"];

/// What a request is refused with.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is not said once for whom it is meant.
    Malformed(&'static str),
    /// It is meant for another host.
    Misdirected,
    /// A page sent it that may not.
    Foreign,
}

/// Checks for whom a request is meant and which page sent it, if one did. Which names
/// are this door's beside `localhost`, and which origins beside a host's own, the door says.
pub(crate) fn check(
    uri: &Uri,
    headers: &HeaderMap,
    names: &[String],
    is_known: impl Fn(&HeaderValue, &Authority) -> bool,
) -> Result<(), Refused> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (host, None) = (hosts.next(), hosts.next()) else {
        return Err(Refused::Malformed("send one Host header"));
    };
    let host = host.ok_or(Refused::Malformed("send a Host header"))?;
    let host: Authority = Authority::try_from(host.as_bytes())
        .map_err(|_| Refused::Malformed("the Host header is not HOST or HOST:PORT"))?;
    for name in SINGLE {
        if headers.get_all(*name).iter().count() > 1 {
            return Err(Refused::Malformed(
                "a header came twice that says one thing: Content-Type, Last-Event-ID, \
                 Mcp-Protocol-Version or Mcp-Session-Id",
            ));
        }
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    if !codings.all(|coding| coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")) {
        return Err(Refused::Malformed("of Transfer-Encoding, chunked alone is understood"));
    }
    for host in [Some(&host), uri.authority()].into_iter().flatten() {
        if host.as_str().contains('@') || !is_ours(host, names) {
            return Err(Refused::Misdirected);
        }
    }
    // A browser sends one.
    let mut origins = headers.get_all(header::ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => {}
        (Some(origin), None) if is_known(origin, &host) => {}
        _ => return Err(Refused::Foreign),
    }
    match headers.get("sec-fetch-site").map(|site| site.as_bytes()) {
        None | Some(b"none" | b"same-origin") => Ok(()),
        Some(_) => Err(Refused::Foreign),
    }
}

/// Whether a host is this door's: an address, which is not looked up by anybody and cannot
/// be rebound, `localhost`, or one of these names, each with a port or with any.
fn is_ours(host: &Authority, names: &[String]) -> bool {
    let bare = |host: &str| host.trim_matches(['[', ']']).to_ascii_lowercase();
    let its = bare(host.host());
    let is_it = |name: &String| {
        let (name, port) = match Authority::try_from(name.trim()) {
            Ok(it) => (bare(it.host()), it.port_u16()),
            Err(_) => (bare(name.trim()), None),
        };
        name == its && (port.is_none() || port == host.port_u16())
    };
    its == "localhost" || its.parse::<IpAddr>().is_ok() || names.iter().any(is_it)
}

/// Whether a body is sent as it is.
pub(crate) fn is_plain(headers: &HeaderMap) -> bool {
    let is_none = |coding: &[u8]| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity");
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    codings.all(|coding| is_none(coding.as_bytes().trim_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(uri: &str, headers: &[(&str, &str)]) -> Option<Refused> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap());
        }
        let is_known = |origin: &HeaderValue, _: &Authority| origin == "http://localhost";
        check(&uri.parse().unwrap(), &map, &[], is_known).err()
    }

    #[test]
    fn a_request_says_once_for_whom_it_is_meant() {
        let host = ("host", "localhost:1");
        assert_eq!(checked("/", &[host]), None);
        assert_eq!(checked("http://localhost/", &[host]), None);
        for headers in [&[][..], &[("host", "")], &[("host", "a b")], &[host, ("host", "x")]] {
            assert!(matches!(checked("/", headers), Some(Refused::Malformed(_))), "{headers:?}");
        }
        for other in ["evil.example", "a@localhost"] {
            assert_eq!(checked("/", &[("host", other)]), Some(Refused::Misdirected), "{other}");
        }
        assert_eq!(checked("http://evil.example/", &[host]), Some(Refused::Misdirected));
    }

    #[test]
    fn a_request_is_not_to_be_read_in_two_ways() {
        let host = ("host", "localhost");
        let (json, chunked) =
            (("content-type", "application/json"), ("transfer-encoding", "Chunked"));
        assert_eq!(checked("/", &[host, json, chunked]), None);
        for more in [
            &[json, ("content-type", "text/plain")][..],
            &[("mcp-session-id", "a"), ("mcp-session-id", "a")],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "gzip"), chunked],
        ] {
            let headers: Vec<_> = [host].iter().chain(more).copied().collect();
            assert!(matches!(checked("/", &headers), Some(Refused::Malformed(_))), "{more:?}");
        }
    }

    #[test]
    fn a_page_of_another_origin_is_refused() {
        let host = ("host", "localhost");
        let own = ("origin", "http://localhost");
        assert_eq!(checked("/", &[host, own]), None);
        assert_eq!(checked("/", &[host, ("sec-fetch-site", "same-origin")]), None);
        for headers in [
            &[host, ("origin", "http://evil.example")][..],
            &[host, own, own],
            &[host, ("sec-fetch-site", "cross-site")],
            &[host, own, ("sec-fetch-site", "same-site")],
        ] {
            assert_eq!(checked("/", headers), Some(Refused::Foreign), "{headers:?}");
        }
    }

    #[test]
    fn its_hosts_are_addresses_and_names_that_are_listed() {
        let hosts = ["forge.example".to_owned(), "other.example:8443".to_owned()];
        let is = |host: &str| is_ours(&host.parse().unwrap(), &hosts);
        for ours in ["LOCALHOST:1", "127.0.0.2:80", "192.0.2.7", "[::1]:80", "Forge.example:9"] {
            assert!(is(ours), "{ours}");
        }
        assert!(is("other.example:8443") && !is("other.example:80") && !is("other.example"));
        assert!(!is("evil.example") && !is("127.0.0.1.evil.example"));
    }

    #[test]
    fn a_body_that_is_encoded_is_not_plain() {
        let with = |codings: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for coding in codings {
                headers.append(header::CONTENT_ENCODING, HeaderValue::from_static(coding));
            }
            is_plain(&headers)
        };
        assert!(with(&[]) && with(&[""]) && with(&[" Identity ", "identity"]));
        assert!(!with(&["gzip"]) && !with(&["identity", "br"]) && !with(&["identity, gzip"]));
    }
}
