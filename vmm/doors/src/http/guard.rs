//! What a request must be before anything else is looked at: meant for this
//! door, and not a web page's doing.
//!
//! A page that a browser shows can have it send requests to any address, this
//! host's too. A browser names the host that the page believes it speaks to
//! and, wherever it matters, the page's origin. So a host that is a name has
//! to be a name of this door: nobody can rebind one. An address in its place
//! is not looked up by anybody, and cannot be rebound. And an origin, if there
//! is one, has to be this door's. No answer permits another origin anything
//! (no CORS).

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, header};

use super::problem::Problem;

/// Checks the host and the origin of a request against the door's names.
pub(crate) fn check(uri: &Uri, headers: &HeaderMap, names: &[String]) -> Result<(), Problem> {
    let bad = |what| Problem::new(StatusCode::BAD_REQUEST, "bad_request", what);
    let mut hosts = headers.get_all(header::HOST).iter();
    let (host, None) = (hosts.next(), hosts.next()) else {
        return Err(bad("send one Host header"));
    };
    let host = host.ok_or_else(|| bad("send a Host header"))?;
    let host: Authority = Authority::try_from(host.as_bytes())
        .map_err(|_| bad("the Host header is not HOST or HOST:PORT"))?;
    for host in [Some(&host), uri.authority()].into_iter().flatten() {
        if !is_ours(host, names) {
            let detail = "this door does not go by that name; [http] hosts lists its names";
            return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", detail));
        }
    }
    let foreign = || {
        Problem::forbidden("a page of another origin may not use this door: there is no CORS here")
    };
    for origin in headers.get_all(header::ORIGIN) {
        let origin = Uri::try_from(origin.as_bytes()).map_err(|_| foreign())?;
        // With its port: a page of another port is another's.
        if origin.scheme().is_none() || origin.authority() != Some(&host) {
            return Err(foreign());
        }
    }
    match headers.get("sec-fetch-site").map(|site| site.as_bytes()) {
        None | Some(b"none" | b"same-origin") => Ok(()),
        Some(_) => Err(foreign()),
    }
}

fn is_ours(authority: &Authority, names: &[String]) -> bool {
    if authority.as_str().contains('@') {
        return false;
    }
    let host = authority.host();
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_name = |name: &str| host.eq_ignore_ascii_case(name);
    address.parse::<IpAddr>().is_ok()
        || is_name("localhost")
        || names.iter().any(|name| is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(uri: &str, headers: &[(&str, &str)]) -> Option<u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap());
        }
        let names = ["forge.example".into()];
        check(&uri.parse().unwrap(), &map, &names).err().map(|it| it.body().status())
    }

    #[test]
    fn only_names_of_the_door_and_addresses_are_its_hosts() {
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1",
            "[::1]:80",
            "192.0.2.7:8080",
            "forge.example",
            "Forge.Example:443",
        ] {
            assert_eq!(checked("/", &[("host", host)]), None, "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "a@localhost"]
        {
            assert_eq!(checked("/", &[("host", host)]), Some(421), "{host}");
        }
        assert_eq!(checked("http://evil.example/", &[("host", "localhost")]), Some(421));
        for headers in
            [&[][..], &[("host", "")], &[("host", "a b")], &[("host", "localhost"), ("host", "x")]]
        {
            assert_eq!(checked("/", headers), Some(400), "{headers:?}");
        }
    }

    #[test]
    fn a_page_of_another_origin_is_refused() {
        let host = ("host", "localhost:8080");
        assert_eq!(checked("/", &[host, ("origin", "http://localhost:8080")]), None);
        assert_eq!(checked("/", &[host, ("sec-fetch-site", "same-origin")]), None);
        for origin in
            ["null", "http://evil.example", "http://localhost:8081", "http://localhost", "", "x:"]
        {
            assert_eq!(checked("/", &[host, ("origin", origin)]), Some(403), "{origin}");
        }
        for site in ["cross-site", "same-site"] {
            assert_eq!(checked("/", &[host, ("sec-fetch-site", site)]), Some(403), "{site}");
        }
    }
}
