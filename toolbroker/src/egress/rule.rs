//! Where a tool may go: the operator's rules, and URLs held against them.
//!
//! A URL is read by the URL standard's parser, which the rest of the web
//! uses too: a name in any alphabet comes out in the form of DNS, an IPv4
//! address in octal, decimal or hex as the address it is, dot segments are
//! resolved. What comes out is what is matched, and what is sent. What the
//! parser would silently repair (a tab, a backslash, credentials before the
//! host) is refused, because whoever reads the URL next may repair it
//! otherwise.
//!
//! A grant's constraints were held against the text that the program gave. So
//! that they hold of the request as well, that text has to be what is sent
//! ([`is_as_sent`]); a redirect's is held against them as it comes out.

use std::fmt;

use hyper::header::{self, HeaderName, HeaderValue};
use url::{Host, Url};

use super::address::AddressRange;
use crate::secret::Secret;
use crate::uri::{percent_decoded, segment_name};

/// The longest URL, in bytes.
pub const URL_BYTES_MAX: usize = 8 * 1024;
/// How often a path may be percent-encoded over itself before it is taken
/// for a trick.
const ENCODINGS_MAX: usize = 3;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// `GET`
    Get,
    /// `HEAD`
    Head,
    /// `POST`
    Post,
    /// `PUT`
    Put,
    /// `PATCH`
    Patch,
    /// `DELETE`
    Delete,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Get, Self::Head, Self::Post, Self::Put, Self::Patch, Self::Delete];

    /// The method of this name, in capitals as the standard has it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.as_str() == text)
    }

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }

    /// Whether it may change something (RFC 9110, 9.2.1).
    #[must_use]
    pub fn changes(self) -> bool {
        !matches!(self, Self::Get | Self::Head)
    }
}

impl From<Method> for hyper::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::Get => Self::GET,
            Method::Head => Self::HEAD,
            Method::Post => Self::POST,
            Method::Put => Self::PUT,
            Method::Patch => Self::PATCH,
            Method::Delete => Self::DELETE,
        }
    }
}

/// With or without TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `https`
    Https,
    /// `http`
    Http,
}

impl Scheme {
    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }

    /// The port of a URL that names none.
    #[must_use]
    pub fn port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }

    /// The scheme of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Https, Self::Http].into_iter().find(|scheme| scheme.as_str() == text)
    }
}

/// A header that the operator has sent with every request under a rule.
#[derive(Clone, Debug)]
pub struct OperatorHeader {
    /// Its name.
    pub name: HeaderName,
    /// What stands before the value, as `Bearer `.
    pub prefix: String,
    /// The value.
    pub value: Secret,
    /// Whether the value is a credential, to be removed from what comes back.
    pub is_credential: bool,
}

impl OperatorHeader {
    /// The header's value, marked as sensitive. `None` if no header can
    /// carry it.
    #[must_use]
    pub fn whole(&self) -> Option<HeaderValue> {
        let mut value =
            HeaderValue::from_str(&format!("{}{}", self.prefix, self.value.expose())).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// One place that a tool may go to, and how.
#[derive(Clone, Debug)]
pub struct Rule {
    /// With or without TLS.
    pub scheme: Scheme,
    /// The host, exactly.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The methods; never empty.
    pub methods: Vec<Method>,
    /// What the path begins with; begins with a slash itself.
    pub path_prefix: String,
    /// The addresses that the host may have. Empty: every public one.
    pub addresses: Vec<AddressRange>,
    /// What is sent with each request.
    pub headers: Vec<OperatorHeader>,
    /// Headers that a program may set, beside those it always may.
    pub request_headers: Vec<HeaderName>,
    /// Headers that a program sees, beside those it always does.
    pub response_headers: Vec<HeaderName>,
}

impl Rule {
    fn allows(&self, method: Method, url: &Url) -> bool {
        url.scheme() == self.scheme.as_str()
            && url.host().is_some_and(|host| host.to_owned() == self.host)
            && url.port_or_known_default() == Some(self.port)
            && self.methods.contains(&method)
            && is_below(url.path(), &self.path_prefix)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let methods: Vec<&str> = self.methods.iter().map(|method| method.as_str()).collect();
        write!(f, "{} {}://{}", methods.join("/"), self.scheme.as_str(), self.host)?;
        if self.port != self.scheme.port() {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "{}", self.path_prefix)
    }
}

/// Why a URL leads nowhere.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Refused {
    /// It is no URL, or one that readers would not agree on.
    #[error("this URL is not accepted: {0}")]
    Unreadable(String),
    /// No rule names it.
    #[error("no rule of the operator allows {method} to {place}")]
    NotAllowed {
        /// The method.
        method: &'static str,
        /// Scheme, host, port and path, without the query.
        place: String,
    },
    /// A redirect from `https` to `http`.
    #[error("the server redirects from https to http")]
    Downgrade,
    /// A redirect of what may change something to another origin.
    #[error(
        "{place} is of another scheme, host or port, and no server sends this {method} on to \
         another: ask for it there, if that is meant"
    )]
    OtherOrigin {
        /// The method.
        method: &'static str,
        /// Scheme, host, port and path, without the query.
        place: String,
    },
}

/// A place that a rule allows. Only [`admit`] makes one, and a request is
/// sent to nothing else.
#[derive(Clone, Debug)]
pub struct Destination<'a> {
    rule: &'a Rule,
    url: Url,
    method: Method,
}

impl<'a> Destination<'a> {
    /// The rule that allows it.
    #[must_use]
    pub fn rule(&self) -> &'a Rule {
        self.rule
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// What is asked for there.
    #[must_use]
    pub fn method(&self) -> Method {
        self.method
    }
}

/// Holds a URL against rules; the first that allows it counts. `from` is the
/// place that redirects here, whose URL a relative one is read against: what may
/// change something it may send on within its own origin alone, or one server
/// would steer at another what goes there with that one's credential.
///
/// # Errors
/// [`Refused`].
pub fn admit<'a>(
    rules: &'a [Rule],
    method: Method,
    url: &str,
    from: Option<&Destination<'_>>,
) -> Result<Destination<'a>, Refused> {
    let text = url;
    let url = read(text, from.map(Destination::url)).map_err(Refused::Unreadable)?;
    if from.is_none() && !is_as_sent(text, &url) {
        let why = format!("it would be sent as {}, so write it as that", place_of(&url));
        return Err(Refused::Unreadable(why));
    }
    if from.is_some_and(|from| from.url.scheme() == "https") && url.scheme() == "http" {
        return Err(Refused::Downgrade);
    }
    if method.changes() && from.is_some_and(|from| from.url.origin() != url.origin()) {
        return Err(Refused::OtherOrigin { method: method.as_str(), place: place_of(&url) });
    }
    match rules.iter().find(|rule| rule.allows(method, &url)) {
        Some(rule) => Ok(Destination { rule, url, method }),
        None => Err(Refused::NotAllowed { method: method.as_str(), place: place_of(&url) }),
    }
}

/// A URL as it is told: without its query. Its path may be a server's word and
/// hold a credential, which is taken out later and has to be whole then.
pub(super) fn place_of(url: &Url) -> String {
    url[..url::Position::AfterPath].to_owned()
}

fn read(text: &str, base: Option<&Url>) -> Result<Url, String> {
    if text.len() > URL_BYTES_MAX {
        return Err(format!("it has more than {URL_BYTES_MAX} bytes"));
    }
    let repaired = std::cell::Cell::new(None);
    let note = |violation: url::SyntaxViolation| repaired.set(Some(violation));
    let mut url = Url::options()
        .base_url(base)
        .syntax_violation_callback(Some(&note))
        .parse(text)
        .map_err(|error| error.to_string())?;
    if let Some(violation) = repaired.get() {
        return Err(violation.description().to_owned());
    }
    if Scheme::parse(url.scheme()).is_none() {
        return Err("its scheme is neither https nor http".to_owned());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("it has credentials before the host".to_owned());
    }
    if !is_plain_path(url.path()) {
        return Err("its path hides a slash, a dot segment or a control character".to_owned());
    }
    // Never sent.
    url.set_fragment(None);
    Ok(url)
}

/// Whether an absolute URL is what is written: all of it is sent, and none of it
/// means another place than it seems to. The letters' case in scheme and host, the
/// scheme's own port, the slash of an empty path and whether a character is
/// percent-encoded make no difference to anybody.
fn is_as_sent(text: &str, url: &Url) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else { return false };
    let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or_default();
    let is_host = authority.eq_ignore_ascii_case(host) && url.port().is_none()
        || authority.eq_ignore_ascii_case(&format!("{host}:{port}"));
    let slash = if rest.starts_with('/') { "" } else { "/" };
    let rest = format!("{slash}{rest}");
    // To encode keeps what is decoded; to drop a dot segment or a fragment makes it
    // shorter.
    scheme.eq_ignore_ascii_case(url.scheme())
        && is_host
        && percent_decoded(rest.as_bytes())
            == percent_decoded(url[url::Position::BeforePath..].as_bytes())
}

/// Whether `path` is `prefix` or lies below it: a prefix counts in whole
/// segments.
#[must_use]
pub fn is_below(path: &str, prefix: &str) -> bool {
    match path.strip_prefix(prefix) {
        Some(rest) => prefix.ends_with('/') || rest.is_empty() || rest.starts_with('/'),
        None => false,
    }
}

/// Whether a path means the same to a server that percent-decodes it once,
/// twice or not at all: no encoding in it hides a slash, a backslash, a dot
/// segment or a control character.
#[must_use]
pub fn is_plain_path(path: &str) -> bool {
    let mut path = path.as_bytes().to_vec();
    for _ in 0..=ENCODINGS_MAX {
        let has_trick = path.iter().any(|byte| *byte == b'\\' || byte.is_ascii_control())
            || path.split(|byte| *byte == b'/').any(is_dot_segment);
        if has_trick {
            return false;
        }
        let decoded = percent_decoded(&path);
        if decoded == path {
            return true;
        }
        let slashes = |path: &[u8]| path.iter().filter(|byte| **byte == b'/').count();
        if slashes(&decoded) != slashes(&path) {
            return false;
        }
        path = decoded;
    }
    false
}

fn is_dot_segment(segment: &[u8]) -> bool {
    matches!(segment_name(segment), b"." | b"..")
}

/// Headers that a program may always set.
const REQUEST_HEADERS: [HeaderName; 8] = [
    header::ACCEPT,
    header::ACCEPT_LANGUAGE,
    header::CONTENT_TYPE,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_UNMODIFIED_SINCE,
    header::RANGE,
];

/// Headers that a program always sees.
const RESPONSE_HEADERS: [&str; 19] = [
    "accept-ranges",
    "allow",
    "cache-control",
    "content-disposition",
    "content-language",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "link",
    "location",
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
];

/// Headers that say where a message goes, where it ends or what it really
/// asks for: ours to write, and neither a program's nor the configuration's.
const FRAMING_HEADERS: [&str; 17] = [
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
];

/// Headers that carry credentials: the operator's to send.
const CREDENTIAL_HEADERS: [&str; 3] = ["authorization", "cookie", "proxy-authorization"];

/// Whether the operator may have this header sent.
#[must_use]
pub fn operator_may_send(name: &HeaderName) -> bool {
    !FRAMING_HEADERS.contains(&name.as_str())
}

/// Whether the operator may leave this header to programs.
#[must_use]
pub fn program_might_send(name: &HeaderName) -> bool {
    operator_may_send(name) && !CREDENTIAL_HEADERS.contains(&name.as_str())
}

/// Whether the operator may let programs see this header: a server's cookies
/// and what frames its message are nobody's.
#[must_use]
pub fn program_might_see(name: &HeaderName) -> bool {
    !FRAMING_HEADERS.contains(&name.as_str()) && !name.as_str().starts_with("set-cookie")
}

impl Rule {
    /// Whether a program may set this header here. One that the operator
    /// sets is the operator's.
    #[must_use]
    pub fn program_may_send(&self, name: &HeaderName) -> bool {
        (REQUEST_HEADERS.contains(name) || self.request_headers.contains(name))
            && !self.headers.iter().any(|header| header.name == name)
    }

    /// Whether a program sees this header of an answer.
    #[must_use]
    pub fn program_sees(&self, name: &HeaderName) -> bool {
        RESPONSE_HEADERS.contains(&name.as_str()) || self.response_headers.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(place: &str, methods: &[Method]) -> Rule {
        let url = Url::parse(place).unwrap();
        Rule {
            scheme: Scheme::parse(url.scheme()).unwrap(),
            host: url.host().unwrap().to_owned(),
            port: url.port_or_known_default().unwrap(),
            methods: methods.to_vec(),
            path_prefix: url.path().to_owned(),
            addresses: Vec::new(),
            headers: Vec::new(),
            request_headers: Vec::new(),
            response_headers: Vec::new(),
        }
    }

    fn api() -> [Rule; 1] {
        [rule("https://api.example.com/v1/", &[Method::Get])]
    }

    fn is_admitted(rules: &[Rule], url: &str) -> bool {
        admit(rules, Method::Get, url, None).is_ok()
    }

    #[test]
    fn only_scheme_host_port_method_and_path_together_are_admitted() {
        for url in [
            "https://api.example.com/v1/",
            "https://api.example.com/v1/items?q=../..",
            "https://api.example.com/v1/?q=it's%20Zürich",
            "HTTPS://API.example.COM:443/v1/a%20b",
            "https://api.example.com/v1/100%25",
        ] {
            assert!(is_admitted(&api(), url), "{url}");
        }
        for url in [
            "http://api.example.com/v1/",
            "http://api.example.com:443/v1/",
            "https://api.example.com:8443/v1/",
            "https://api.example.com/v1",
            "https://api.example.com/v10/",
            "https://api.example.com/",
            "https://api.example.com.evil.example/v1/",
            "https://evil.example/api.example.com/v1/",
            "https://api.example.com./v1/",
            "https://sub.api.example.com/v1/",
            "ftp://api.example.com/v1/",
            "file:///v1/",
            "//api.example.com/v1/",
            "/v1/",
            "",
        ] {
            assert!(!is_admitted(&api(), url), "{url}");
        }
        assert!(admit(&api(), Method::Post, "https://api.example.com/v1/", None).is_err());
    }

    #[test]
    fn path_traversal_out_of_the_prefix_is_refused_however_it_is_encoded() {
        for path in [
            "/v1/../admin",
            "/v1/%2e%2e/admin",
            "/v1/.%2E/admin",
            "/v1/..%2fadmin",
            "/v1/..%5cadmin",
            "/v1/%252e%252e/admin",
            "/v1/%25252e%25252e/admin",
            "/v1/%2525252525252e/admin",
            "/v1/..;/admin",
            "/v1/..;a=b/admin",
            "/v1/%2e%2e;/admin",
            "/v1/..%20/admin",
            "/v1/%20../admin",
            "/v1/.%2520/admin",
            "/v1/..%3Fa/admin",
            "/v1/..%23/admin",
            "/v1/a%2fb",
            "/v1/a%252fb",
            "/v1/a%5Cb",
            "/v1/a%00b",
            "/v1/a%0d%0ab",
            "/v1/..\\admin",
        ] {
            assert!(!is_admitted(&api(), &format!("https://api.example.com{path}")), "{path}");
        }
    }

    #[test]
    fn a_url_that_readers_would_not_agree_on_is_refused() {
        for url in [
            "https://api.example.com@evil.example/v1/",
            "https://user:pw@api.example.com/v1/",
            "https://@api.example.com/v1/",
            "https://evil.example\\@api.example.com/v1/",
            "https:\\\\api.example.com\\v1\\",
            "https:/api.example.com/v1/",
            "https:api.example.com/v1/",
            "https:///api.example.com/v1/",
            " https://api.example.com/v1/",
            "https://api.example.com/v1/\n",
            "ht\ttps://api.example.com/v1/",
            "https://api.exam\nple.com/v1/",
            "https://api.example.com/v1/ x",
        ] {
            assert!(!is_admitted(&api(), url), "{url:?}");
        }
        let long = format!("https://api.example.com/v1/{}", "a".repeat(URL_BYTES_MAX));
        assert!(!is_admitted(&api(), &long));
    }

    #[test]
    fn a_url_that_is_not_written_as_it_is_sent_is_refused() {
        let rules = [
            rule("https://api.example.com/", &[Method::Get]),
            rule("http://127.0.0.1/", &[Method::Get]),
            rule("http://[::1]/", &[Method::Get]),
            rule("https://xn--bcher-kva.example/", &[Method::Get]),
        ];
        for url in [
            "https://api.example.com",
            "https://api.example.com?a=b",
            "https://api.example.com:443",
            "https://api.example.com/v1/a..b/...?../..",
            "http://127.0.0.1:80/",
            "http://[::1]/",
            "https://XN--bcher-KVA.example/",
        ] {
            assert!(is_admitted(&rules, url), "{url}");
        }
        for (url, sent) in [
            ("https://api.example.com/v1/../priv", "https://api.example.com/priv"),
            ("https://api.example.com/v1/%2e%2e/priv", "https://api.example.com/priv"),
            ("https://api.example.com/v1/.%2E/priv", "https://api.example.com/priv"),
            ("https://api.example.com/v1/./priv", "https://api.example.com/v1/priv"),
            ("https://api.example.com/v1/%2e/priv", "https://api.example.com/v1/priv"),
            ("https://api.example.com/v1/..", "https://api.example.com/"),
            ("https://api.example.com/v1/..?a", "https://api.example.com/"),
            ("https://api.example.com/priv#.json", "https://api.example.com/priv"),
            ("https://api.example.com/priv#", "https://api.example.com/priv"),
            ("https://api.example.com:/", "https://api.example.com/"),
            ("https://api.example.com:0443/", "https://api.example.com/"),
            ("https://ap%69.example.com/", "https://api.example.com/"),
            // Full-width letters, another full stop and a soft hyphen.
            ("https://ａｐｉ.example.com/", "https://api.example.com/"),
            ("https://api。example.com/", "https://api.example.com/"),
            ("https://a\u{ad}pi.example.com/", "https://api.example.com/"),
            ("https://bücher.example/", "https://xn--bcher-kva.example/"),
            ("http://2130706433/", "http://127.0.0.1/"),
            ("http://0x7f000001/", "http://127.0.0.1/"),
            ("http://017700000001/", "http://127.0.0.1/"),
            ("http://127.1/", "http://127.0.0.1/"),
            ("http://0x7f.0.1/", "http://127.0.0.1/"),
            ("http://127.0.0.1./", "http://127.0.0.1/"),
            ("http://[0:0::1]/", "http://[::1]/"),
        ] {
            let refused = admit(&rules, Method::Get, url, None).unwrap_err();
            assert!(matches!(refused, Refused::Unreadable(_)), "{url}: {refused}");
            assert!(refused.to_string().contains(&format!("as {sent},")), "{url}: {refused}");
        }
    }

    #[test]
    fn where_a_redirect_leads_is_what_the_standard_makes_of_it() {
        let rules = [
            rule("http://127.0.0.1/", &[Method::Get]),
            rule("http://xn--bcher-kva.example/", &[Method::Get]),
        ];
        let from = admit(&rules, Method::Get, "http://127.0.0.1/a/b", None).unwrap();
        let to = |location: &str| admit(&rules, Method::Get, location, Some(&from));
        for host in ["2130706433", "0x7f000001", "017700000001", "127.1", "0x7f.0.1"] {
            let url = format!("http://{host}/a/../c#d");
            assert_eq!(to(&url).unwrap().url().as_str(), "http://127.0.0.1/c", "{host}");
        }
        let named = to("http://BÜCHER.example/").unwrap();
        assert_eq!(named.url().as_str(), "http://xn--bcher-kva.example/");
        // Another address, and another name, however alike they look.
        for url in ["http://[::ffff:127.0.0.1]/", "http://127.0.0.2/", "http://bücher.еxample/"] {
            assert!(matches!(to(url), Err(Refused::NotAllowed { .. })), "{url}");
        }
    }

    #[test]
    fn a_prefix_without_a_slash_at_its_end_counts_in_whole_segments() {
        let rules = [rule("https://h.example/v1", &[Method::Get])];
        assert!(is_admitted(&rules, "https://h.example/v1"));
        assert!(is_admitted(&rules, "https://h.example/v1/a"));
        assert!(!is_admitted(&rules, "https://h.example/v10"));
    }

    #[test]
    fn a_redirect_is_read_against_where_it_comes_from_and_never_leaves_tls() {
        let rules = [
            rule("https://api.example.com/v1/", &[Method::Get]),
            rule("http://api.example.com/", &[Method::Get]),
        ];
        let from = admit(&rules, Method::Get, "https://api.example.com/v1/a/b", None).unwrap();
        let to = |location| admit(&rules, Method::Get, location, Some(&from));
        assert_eq!(to("../c").unwrap().url().as_str(), "https://api.example.com/v1/c");
        assert_eq!(
            to("//api.example.com/v1/").unwrap().url().as_str(),
            "https://api.example.com/v1/"
        );
        assert!(matches!(to("/admin"), Err(Refused::NotAllowed { .. })));
        assert_eq!(to("http://api.example.com/").unwrap_err(), Refused::Downgrade);
    }

    #[test]
    fn what_changes_something_is_redirected_within_its_origin_and_what_looks_anywhere() {
        let rules = [
            rule("https://a.example/", &Method::ALL),
            rule("https://a.example:8443/", &Method::ALL),
            rule("https://b.example/", &Method::ALL),
        ];
        let from = admit(&rules, Method::Post, "https://a.example/x", None).unwrap();
        let to = |method, location| admit(&rules, method, location, Some(&from)).map(drop);
        for method in Method::ALL {
            assert_eq!(to(method, "https://a.example:443/y"), Ok(()));
            for other in ["https://b.example/y", "https://a.example:8443/y"] {
                assert_eq!(to(method, other).is_err(), method.changes(), "{method:?} {other}");
            }
        }
        let upwards = [rule("http://a.example/", &Method::ALL), rules[0].clone()];
        let from = admit(&upwards, Method::Put, "http://a.example/x", None).unwrap();
        let to = admit(&upwards, Method::Put, "https://a.example/x", Some(&from));
        assert!(matches!(to, Err(Refused::OtherOrigin { .. })), "{to:?}");
    }

    #[test]
    fn no_rule_gives_a_program_headers_that_frame_route_or_authenticate() {
        let rule = rule("https://h.example/", &[Method::Get]);
        for name in FRAMING_HEADERS.iter().chain(&CREDENTIAL_HEADERS) {
            let name = HeaderName::from_static(name);
            assert!(!rule.program_may_send(&name) && !program_might_send(&name), "{name}");
        }
        for name in ["set-cookie", "set-cookie2", "transfer-encoding"] {
            let name = HeaderName::from_static(name);
            assert!(!rule.program_sees(&name) && !program_might_see(&name), "{name}");
        }
    }

    #[test]
    fn a_header_that_the_operator_sends_is_no_programs_to_set() {
        let mut rule = rule("https://h.example/", &[Method::Get]);
        let [key, other] = ["x-api-key", "x-other"].map(HeaderName::from_static);
        rule.request_headers = vec![key.clone(), other.clone()];
        assert!(rule.program_may_send(&key));
        rule.headers = [header::ACCEPT, key.clone()]
            .map(|name| OperatorHeader {
                name,
                prefix: String::new(),
                value: Secret::new("hunter2-hunter2".into()).unwrap(),
                is_credential: true,
            })
            .to_vec();
        assert!(!rule.program_may_send(&key) && !rule.program_may_send(&header::ACCEPT));
        assert!(rule.program_may_send(&other) && rule.program_may_send(&header::RANGE));
    }
}
