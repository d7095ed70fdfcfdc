//! Which origins are this door's, and what is said to whom ([`web::guard`]).

use axum::http::{HeaderMap, StatusCode, Uri};

use super::problem::Problem;
use crate::web;
use crate::web::guard::Refused;

/// Checks the host and the origin of a request against the door's names.
pub(crate) fn check(uri: &Uri, headers: &HeaderMap, names: &[String]) -> Result<(), Problem> {
    let checked = web::guard::check(uri, headers, names, |origin, host| {
        let origin = Uri::try_from(origin.as_bytes());
        // With its port: a page of another port is another's.
        origin.is_ok_and(|it| it.scheme().is_some() && it.authority() == Some(host))
    });
    checked.map_err(|refused| match refused {
        Refused::Malformed(what) => Problem::new(StatusCode::BAD_REQUEST, "bad_request", what),
        Refused::Misdirected => {
            let detail = "this door does not go by that name; [http] hosts lists its names";
            Problem::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", detail)
        }
        Refused::Foreign => Problem::forbidden(
            "a page of another origin may not use this door: there is no CORS here",
        ),
    })
}

#[cfg(test)]
mod tests {
    use axum::http::header;

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
