//! Where a server over HTTP is, and what may be sent to it.

use std::net::Ipv4Addr;

use reqwest::Url;
use reqwest::header::HeaderName;
use rustls::pki_types::CertificateDer;

use crate::secret::Secret;

/// Headers that belong to the protocol and not to a configuration.
const OWN_HEADERS: [&str; 17] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "last-event-id",
    "mcp-method",
    "mcp-name",
    "mcp-protocol-version",
    "mcp-session-id",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Where a server over HTTP is, and what it is told with each request.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its address, without `query`.
    pub url: Url,
    /// Headers. All are held as secrets.
    pub headers: Vec<(HeaderName, Secret)>,
    /// Credentials that go into the query of each request, by their parameter.
    pub query: Vec<(String, Secret)>,
    /// Where access tokens come from.
    pub oauth: Option<OAuthConfig>,
    /// Whom to trust beside the host's own store, here and where tokens come from.
    pub roots: Vec<CertificateDer<'static>>,
}

/// A machine's own account at an authorization server.
#[derive(Clone, Debug)]
pub struct OAuthConfig {
    /// The client's name.
    pub client_id: String,
    /// Its secret.
    pub client_secret: Secret,
    /// What it asks for.
    pub scopes: Vec<String>,
    /// The interface that they are for, where the authorization server wants it so
    /// (`audience`).
    pub audience: Option<String>,
    /// The same as RFC 8707 has it (`resource`).
    pub resource: Resource,
    /// How the secret is sent. Where nothing is said, as the authorization server's
    /// metadata has it, and else as [`ClientAuth::Basic`].
    pub client_auth: Option<ClientAuth>,
    /// Where tokens are handed out.
    pub token_url: Option<Url>,
    /// Who hands them out, to be asked where.
    pub issuer: Option<Url>,
}

/// What an authorization server is told that tokens are for (RFC 8707).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resource {
    /// The server's own address, if it speaks MCP, which asks for that.
    #[default]
    Own,
    /// This.
    Named(String),
    /// Nothing: some authorization servers refuse it.
    Untold,
}

/// How a client says who it is (RFC 6749, 2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// In the header `Authorization`: `client_secret_basic`.
    Basic,
    /// In the form: `client_secret_post`.
    Post,
}

/// Whether a credential may travel to this address: over TLS, or over plain
/// HTTP where no network is.
#[must_use]
pub fn is_safe_url(url: &Url) -> bool {
    url.scheme() == "https" || url.scheme() == "http" && is_loopback(url)
}

/// Whether a header, in small letters, is set by the broker itself.
#[must_use]
pub fn is_own_header(name: &str) -> bool {
    OWN_HEADERS.contains(&name)
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    host == "localhost"
        || host == "[::1]"
        || host.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}
