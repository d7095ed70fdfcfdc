//! One request and what comes back, hop by hop.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, crypto};
use rustls_platform_verifier::Verifier;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use url::{Host, Position, Url};

use super::address;
use super::resolve::Resolver;
use super::rule::{Destination, Method, Refused, Rule, Scheme, admit, place_of};
use crate::constraint::Violation;
use crate::locks::lock;
use crate::secret::{Scrubber, Secret};

/// Redirects that are followed for one request.
pub const REDIRECTS_MAX: usize = 5;
/// From the first packet to a connection that stands.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// Addresses of one name that are looked at; a name with more is refused.
const ADDRESSES_MAX: usize = 64;
/// Header fields of one answer.
const HEADERS_MAX: usize = 100;
/// The head of one answer, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// What is read ahead of one answer, in bytes.
const AHEAD_BYTES_MAX: usize = 64 * 1024;
/// Headers that a program may set on one request.
pub(super) const PROGRAM_HEADERS_MAX: usize = 32;
/// Requests on their way at the same time.
const IN_FLIGHT_MAX: usize = 64;

/// What the operator allows.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Where to, in order.
    pub rules: Vec<Rule>,
    /// An answer's body, in bytes.
    pub response_bytes_max: usize,
    /// From the request to the last byte of its answer, redirects included.
    pub time_max: Duration,
    /// Whom to believe that it is who it says.
    pub tls: Arc<ClientConfig>,
}

impl Policy {
    /// The credentials that its rules send.
    pub fn credentials(&self) -> impl Iterator<Item = &Secret> {
        let headers = self.rules.iter().flat_map(|rule| &rule.headers);
        headers.filter(|header| header.is_credential).map(|header| &header.value)
    }
}

/// A TLS configuration that believes this host's certificate store and
/// `more` roots.
///
/// # Errors
/// If the store cannot be used.
pub fn tls(more: Vec<CertificateDer<'static>>) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(crypto::ring::default_provider());
    let verifier = Verifier::new_with_extra_roots(more, Arc::clone(&provider))?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        // What it replaces is the bundled list of roots; certificates are
        // verified all the same.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A request as a program asks for it.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub method: Method,
    /// Where.
    pub url: String,
    /// With which headers.
    pub headers: Vec<(String, String)>,
    /// With which body; none for `GET` and `HEAD`.
    pub body: Vec<u8>,
}

/// An answer. Credentials may be in it: to take them out is for whoever tells it, as of
/// every result.
#[derive(Debug)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// The headers that the rule shows, by name; a repeated one is joined.
    pub headers: Vec<(String, String)>,
    /// The body, whole.
    pub body: Vec<u8>,
}

/// How a request ended.
#[derive(Debug)]
pub enum Fetched {
    /// The server answered, whatever the status.
    Response(Response),
    /// There is no answer.
    Failed(FetchError),
    /// A request that may change something was sent, and no answer came.
    Lost(FetchError),
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL, or one that a redirect led to, is not allowed.
    #[error("{0}")]
    Refused(#[from] Refused),
    /// A redirect leads where the call would not be allowed.
    #[error("the redirect leads to {place}, where this run's grant does not: {violation}")]
    OutsideGrant {
        /// Scheme, host, port and path, without the query.
        place: String,
        /// The constraint that does not hold there.
        violation: Violation,
    },
    /// The host has an address that is not allowed.
    #[error("the address of {host} is {what}: this rule does not allow it")]
    Address {
        /// The host.
        host: String,
        /// What kind of address.
        what: &'static str,
    },
    /// A header may not be set.
    #[error("the header {name:?} may not be set here")]
    Header {
        /// The header.
        name: String,
    },
    /// A body where none belongs, or too many headers.
    #[error("{0}")]
    Request(&'static str),
    /// The name has no address.
    #[error("{host} cannot be resolved")]
    Unresolved {
        /// The name.
        host: String,
    },
    /// No connection could be made.
    #[error("{host} cannot be reached: {why}")]
    Unreachable {
        /// The host.
        host: String,
        /// Why not.
        why: String,
    },
    /// The server did not show that it is who it should be.
    #[error("{host} cannot be trusted: {why}")]
    Tls {
        /// The host.
        host: String,
        /// Why not.
        why: String,
    },
    /// Too much time passed.
    #[error("no whole answer within {} ms", .0.as_millis())]
    TooLate(Duration),
    /// The answer is too large.
    #[error("the answer has more than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// Redirects without end.
    #[error("more than {REDIRECTS_MAX} redirects")]
    Redirects,
    /// A request that may change something was answered with a redirect to
    /// look elsewhere, and no answer came of that.
    #[error("{answered}, so what it did stands; the redirect led to no answer: {error}")]
    Redirected {
        /// Which request, and with what.
        answered: String,
        /// What became of the redirect.
        error: Box<FetchError>,
    },
    /// A request that may change something was answered with a redirect to
    /// send it elsewhere, and it was not sent there.
    #[error(
        "{answered}, which asks for the same request elsewhere, and it was not sent there: {error}"
    )]
    NotSentOn {
        /// Which request, and with what.
        answered: String,
        /// Why not.
        error: Box<FetchError>,
    },
    /// The server did not speak HTTP as it was asked to.
    #[error("the answer cannot be used: {0}")]
    Answer(String),
    /// The connection broke.
    #[error("the connection to {host} broke before a whole answer came")]
    Broken {
        /// The host.
        host: String,
    },
}

impl FetchError {
    /// A word for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(_) | Self::OutsideGrant { .. } => "not_allowed",
            Self::Address { .. } => "address_not_allowed",
            Self::Header { .. } => "header_not_allowed",
            Self::Request(_) => "bad_request",
            Self::Unresolved { .. } => "unresolved",
            Self::Unreachable { .. } => "unreachable",
            Self::Tls { .. } => "not_trusted",
            Self::TooLate(_) => "too_late",
            Self::TooLarge { .. } => "too_large",
            Self::Redirects => "too_many_redirects",
            Self::Redirected { .. } | Self::NotSentOn { .. } => "redirect_failed",
            Self::Answer(_) => "bad_answer",
            Self::Broken { .. } => "broken",
        }
    }

    /// Whether it leaves open what a request did that was sent.
    fn leaves_open(&self) -> bool {
        match self {
            Self::TooLate(_) | Self::Broken { .. } | Self::Answer(_) => true,
            Self::Refused(_)
            | Self::OutsideGrant { .. }
            | Self::Address { .. }
            | Self::Header { .. }
            | Self::Request(_)
            | Self::Unresolved { .. }
            | Self::Unreachable { .. }
            | Self::Tls { .. }
            | Self::TooLarge { .. }
            | Self::Redirects
            // It was answered.
            | Self::Redirected { .. }
            | Self::NotSentOn { .. } => false,
        }
    }
}

/// How far a request has come, to be asked also when its time was up.
#[derive(Debug, Default)]
struct Progress(Mutex<Stage>);

#[derive(Debug, Default)]
enum Stage {
    /// Nothing was sent that may change the world.
    #[default]
    Harmless,
    /// Such a request is on its way, or was answered for good.
    Sent,
    /// Such a request was answered with a redirect.
    Redirected {
        /// Which one, and with what.
        answered: String,
        /// Whether the redirect asks to send it again, so that it has done
        /// nothing.
        asks_again: bool,
    },
}

impl Progress {
    fn is_now(&self, stage: Stage) {
        *lock(&self.0) = stage;
    }

    /// How a request ends that came so far and has no answer.
    fn failed(self, error: FetchError) -> Fetched {
        match self.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Stage::Sent if error.leaves_open() => Fetched::Lost(error),
            Stage::Harmless | Stage::Sent => Fetched::Failed(error),
            Stage::Redirected { answered, asks_again } => {
                let error = Box::new(error);
                Fetched::Failed(match asks_again {
                    true => FetchError::NotSentOn { answered, error },
                    false => FetchError::Redirected { answered, error },
                })
            }
        }
    }
}

/// Makes requests, as far as its policy goes.
#[derive(Debug)]
pub struct Client {
    policy: Policy,
    resolver: Arc<dyn Resolver>,
    /// For what it sends itself.
    scrubber: Scrubber,
    room: Semaphore,
}

/// Room for one request.
#[derive(Debug)]
pub struct Room<'a> {
    client: &'a Client,
    _turn: SemaphorePermit<'a>,
}

impl Room<'_> {
    /// Makes the request. Each place that a redirect leads to has to `hold` as well:
    /// the first one did before its caller came here. Its time begins with its turn:
    /// whoever waits for others is not late. Dropping the future closes its connection.
    pub async fn fetch(
        self,
        request: Request,
        hold: impl FnMut(Method, &Url) -> Result<(), Violation> + Send,
    ) -> Fetched {
        let progress = Progress::default();
        let time_max = self.client.policy.time_max;
        match timeout(time_max, self.client.follow(request, hold, &progress)).await {
            Ok(Ok(response)) => Fetched::Response(response),
            Ok(Err(error)) => progress.failed(error),
            Err(_) => progress.failed(FetchError::TooLate(time_max)),
        }
    }
}

impl Client {
    /// A client under a policy.
    #[must_use]
    pub fn new(policy: Policy, resolver: Arc<dyn Resolver>) -> Self {
        let scrubber = Scrubber::new(policy.credentials().cloned());
        let room = Semaphore::new(IN_FLIGHT_MAX);
        Self { policy, resolver, scrubber, room }
    }

    /// What it may do.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Waits for room for one request. `None` once the broker is shutting down.
    pub async fn room(&self) -> Option<Room<'_>> {
        let turn = self.room.acquire().await.ok()?;
        Some(Room { client: self, _turn: turn })
    }

    /// Sends a request, and where its answers redirect it.
    async fn follow(
        &self,
        request: Request,
        mut hold: impl FnMut(Method, &Url) -> Result<(), Violation> + Send,
        progress: &Progress,
    ) -> Result<Response, FetchError> {
        let Request { method, url, headers, body } = request;
        if !method.changes() && !body.is_empty() {
            return Err(FetchError::Request("GET and HEAD have no body"));
        }
        let mut destination = admit(&self.policy.rules, method, &url, None)?;
        let mut headers = program_headers(&headers)?;
        let mut body = Bytes::from(body);
        for _ in 0..=REDIRECTS_MAX {
            if let Some(name) =
                headers.keys().find(|name| !destination.rule().program_may_send(name))
            {
                return Err(FetchError::Header { name: name.to_string() });
            }
            let request = message(&destination, &headers, body.clone())?;
            let method = destination.method();
            let exchange = self.exchange(&destination, request, progress).await?;
            let Some(location) = exchange.redirects_to() else {
                return self.collect(&destination, exchange).await;
            };
            // 303 always asks for a look; browsers made the same of 301 and
            // 302 after a POST (RFC 9110, 15.4).
            let next_method = match (exchange.status(), method) {
                (_, Method::Head) => Method::Head,
                (303, _) | (301 | 302, Method::Post) => Method::Get,
                _ => method,
            };
            if method.changes() {
                let (host, status) = (&destination.rule().host, exchange.status());
                let answered = format!("{host} answered {} with {status}", method.as_str());
                let asks_again = next_method == method;
                progress.is_now(Stage::Redirected { answered, asks_again });
            }
            let location = location?;
            if next_method != method {
                body = Bytes::new();
                headers.remove(header::CONTENT_TYPE);
            }
            let next = admit(&self.policy.rules, next_method, &location, Some(&destination))?;
            hold(next_method, next.url()).map_err(|violation| FetchError::OutsideGrant {
                place: place_of(next.url()),
                violation,
            })?;
            if next.url().origin() != destination.url().origin() {
                // What the program said to one server is not for another.
                // The operator's headers are each rule's own anyway.
                let kept = [header::ACCEPT, header::ACCEPT_LANGUAGE, header::CONTENT_TYPE];
                headers = kept
                    .into_iter()
                    .filter_map(|name| headers.remove(&name).map(|value| (name, value)))
                    .collect();
            }
            tracing::debug!(to = ?next.url().host_str(), "redirect followed");
            destination = next;
        }
        Err(FetchError::Redirects)
    }

    async fn exchange(
        &self,
        destination: &Destination<'_>,
        request: hyper::Request<Full<Bytes>>,
        progress: &Progress,
    ) -> Result<Exchange, FetchError> {
        let stream = self.connect(destination).await?;
        match destination.rule().scheme {
            Scheme::Http => Exchange::begin(stream, destination, request, progress).await,
            Scheme::Https => {
                let stream = self.secure(destination, stream).await?;
                Exchange::begin(stream, destination, request, progress).await
            }
        }
    }

    /// Connects to an address that was checked. The name is resolved once:
    /// a name server that would answer otherwise now is not asked.
    async fn connect(&self, destination: &Destination<'_>) -> Result<TcpStream, FetchError> {
        let rule = destination.rule();
        let addresses = self.addresses(destination).await?;
        for address in &addresses {
            check_address(rule, *address).inspect_err(|error| {
                tracing::warn!(%address, error = ?error.to_string(), "egress refused");
            })?;
        }
        let mut why = "no address".to_owned();
        for address in addresses {
            let to = SocketAddr::new(address, rule.port);
            match timeout(CONNECT_TIME_MAX, TcpStream::connect(to)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => why = error.kind().to_string(),
                Err(_) => why = io::ErrorKind::TimedOut.to_string(),
            }
        }
        Err(FetchError::Unreachable { host: rule.host.to_string(), why })
    }

    async fn addresses(&self, destination: &Destination<'_>) -> Result<Vec<IpAddr>, FetchError> {
        match &destination.rule().host {
            Host::Ipv4(address) => Ok(vec![(*address).into()]),
            Host::Ipv6(address) => Ok(vec![(*address).into()]),
            Host::Domain(host) => match self.resolver.resolve(host).await {
                Ok(addresses) if (1..=ADDRESSES_MAX).contains(&addresses.len()) => Ok(addresses),
                Ok(_) | Err(_) => Err(FetchError::Unresolved { host: host.clone() }),
            },
        }
    }

    async fn secure(
        &self,
        destination: &Destination<'_>,
        stream: TcpStream,
    ) -> Result<tokio_rustls::client::TlsStream<TcpStream>, FetchError> {
        let host = &destination.rule().host;
        let distrusted = |why: String| FetchError::Tls { host: host.to_string(), why };
        let name = match host {
            Host::Domain(name) => ServerName::try_from(name.clone())
                .map_err(|_| distrusted("its name can have no certificate".to_owned()))?,
            Host::Ipv4(address) => ServerName::from(IpAddr::from(*address)),
            Host::Ipv6(address) => ServerName::from(IpAddr::from(*address)),
        };
        TlsConnector::from(Arc::clone(&self.policy.tls))
            .connect(name, stream)
            .await
            // It may quote the server's certificate: cut once it is scrubbed.
            .map_err(|error| self.scrubber.text(&error.to_string()))
            .map_err(|why| distrusted(crate::cut(&why, 256)))
    }

    /// The rest of an answer that is the last.
    async fn collect(
        &self,
        destination: &Destination<'_>,
        exchange: Exchange,
    ) -> Result<Response, FetchError> {
        let limit = self.policy.response_bytes_max;
        let Exchange { response, connection: _connection, host } = exchange;
        let (head, mut incoming) = response.into_parts();
        // A HEAD's length is that of what it does not carry.
        let announced = incoming.size_hint().lower();
        if announced > limit as u64 {
            return Err(FetchError::TooLarge { limit });
        }
        let mut body = Vec::new();
        while let Some(frame) = incoming.frame().await {
            let frame = frame.map_err(|_| FetchError::Broken { host: host.clone() })?;
            if let Some(data) = frame.data_ref() {
                if body.len() + data.len() > limit {
                    return Err(FetchError::TooLarge { limit });
                }
                body.extend_from_slice(data);
            }
        }
        let mut headers: Vec<(String, String)> = Vec::new();
        for name in head.headers.keys().filter(|name| destination.rule().program_sees(name)) {
            let values: Vec<_> = head
                .headers
                .get_all(name)
                .iter()
                .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
                .collect();
            headers.push((name.to_string(), values.join(", ")));
        }
        headers.sort();
        Ok(Response { status: head.status.as_u16(), headers, body })
    }
}

fn check_address(rule: &Rule, address: IpAddr) -> Result<(), FetchError> {
    let what = if rule.addresses.is_empty() {
        address::special(address)
    } else if rule.addresses.iter().any(|range| range.contains(address)) {
        None
    } else {
        Some("outside the ranges that are configured for it")
    };
    match what {
        None => Ok(()),
        Some(what) => Err(FetchError::Address { host: rule.host.to_string(), what }),
    }
}

/// What a program wants to set, as headers.
fn program_headers(asked: &[(String, String)]) -> Result<HeaderMap, FetchError> {
    if asked.len() > PROGRAM_HEADERS_MAX {
        return Err(FetchError::Request("there are too many headers"));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in asked {
        let refused = || FetchError::Header { name: crate::cut(name, 128) };
        let key = HeaderName::from_bytes(name.as_bytes()).map_err(|_| refused())?;
        let value = HeaderValue::from_str(value).map_err(|_| refused())?;
        // The same name twice, in other letters.
        if headers.insert(key, value).is_some() {
            return Err(refused());
        }
    }
    Ok(headers)
}

/// Whether a request of this method says how long its body is even if there is
/// none (RFC 9110, section 8.6): some servers answer 411 otherwise, and the HTTP
/// library says nothing of its own.
pub(crate) fn says_length(method: &hyper::Method) -> bool {
    [hyper::Method::POST, hyper::Method::PUT, hyper::Method::PATCH].contains(method)
}

/// The request for one hop: the program's headers, the rule's, and ours.
fn message(
    destination: &Destination<'_>,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<hyper::Request<Full<Bytes>>, FetchError> {
    let url = destination.url();
    let unusable = |_| Refused::Unreadable("HTTP cannot carry its path or query".to_owned());
    let target = &url[Position::BeforePath..Position::AfterQuery];
    let target: hyper::Uri = target.parse().map_err(unusable)?;
    let host = &url[Position::BeforeHost..Position::AfterPort];
    let host = HeaderValue::from_str(host)
        .map_err(|_| Refused::Unreadable("HTTP cannot carry its host".to_owned()))?;
    let mut request = hyper::Request::new(Full::new(body));
    *request.method_mut() = destination.method().into();
    *request.uri_mut() = target;
    let is_empty = request.body().is_end_stream() && says_length(request.method());
    let all = request.headers_mut();
    all.insert(header::HOST, host);
    if is_empty {
        all.insert(header::CONTENT_LENGTH, 0.into());
    }
    let own = concat!("forge-toolbroker/", env!("CARGO_PKG_VERSION"));
    all.insert(header::USER_AGENT, HeaderValue::from_static(own));
    all.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    all.insert(header::CONNECTION, HeaderValue::from_static("close"));
    for (name, value) in headers {
        all.insert(name.clone(), value.clone());
    }
    for header in &destination.rule().headers {
        let value = header.whole().ok_or(FetchError::Request("a configured header is unusable"))?;
        all.insert(header.name.clone(), value);
    }
    Ok(request)
}

/// A request that was sent, and the head of its answer.
struct Exchange {
    response: hyper::Response<Incoming>,
    /// Ends with the exchange.
    connection: AbortOnDropHandle<()>,
    host: String,
}

impl Exchange {
    async fn begin<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
        stream: S,
        destination: &Destination<'_>,
        request: hyper::Request<Full<Bytes>>,
        progress: &Progress,
    ) -> Result<Self, FetchError> {
        let host = destination.rule().host.to_string();
        let broken = |_| FetchError::Broken { host: host.clone() };
        let (mut sender, connection) = http1::Builder::new()
            .max_headers(HEADERS_MAX)
            .max_header_size(HEAD_BYTES_MAX)
            .max_buf_size(AHEAD_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = ?error.to_string(), "an HTTP connection ended badly");
            }
        }));
        if destination.method().changes() {
            progress.is_now(Stage::Sent);
        }
        let response = sender.send_request(request).await.map_err(|error| {
            if error.is_parse() {
                FetchError::Answer("it is not HTTP/1.1".to_owned())
            } else {
                FetchError::Broken { host: host.clone() }
            }
        })?;
        let exchange = Self { response, connection, host };
        exchange.check()?;
        Ok(exchange)
    }

    fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// A body in a form that nobody asked for cannot be searched for
    /// credentials, and unpacking it has no bound that the server respects.
    fn check(&self) -> Result<(), FetchError> {
        let only = |name: HeaderName, expected: &str| {
            let mut values = self.response.headers().get_all(name).iter();
            values.all(|value| value.as_bytes().eq_ignore_ascii_case(expected.as_bytes()))
        };
        let wrong = |what: &str| Err(FetchError::Answer(what.to_owned()));
        if !only(header::CONTENT_ENCODING, "identity") {
            return wrong("its body is encoded, and nobody asked for that");
        }
        if !only(header::TRANSFER_ENCODING, "chunked") {
            return wrong("its body comes in a transfer encoding other than chunked");
        }
        if self.response.status().is_informational() {
            return wrong("it changes the protocol, and nobody asked for that");
        }
        Ok(())
    }

    /// Where a redirect leads.
    fn redirects_to(&self) -> Option<Result<String, FetchError>> {
        if !matches!(self.status(), 301 | 302 | 303 | 307 | 308) {
            return None;
        }
        let mut locations = self.response.headers().get_all(header::LOCATION).iter();
        let location = locations.next()?;
        let wrong = || FetchError::Answer("its redirect leads to several places or none".into());
        if locations.next().is_some() {
            return Some(Err(wrong()));
        }
        Some(location.to_str().map(str::to_owned).map_err(|_| wrong()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_injection_and_doubled_headers_are_refused() {
        for (name, value) in [
            ("accept\r\nhost", "x"),
            ("accept: x", "x"),
            ("", "x"),
            ("accept", "x\r\nhost: evil"),
            ("accept", "x\ny"),
            ("accept", "\0"),
        ] {
            assert!(program_headers(&[(name.into(), value.into())]).is_err(), "{name:?} {value:?}");
        }
        let twice = [("Accept".into(), "a".into()), ("accept".into(), "b".into())];
        assert!(program_headers(&twice).is_err());
        let many = vec![("accept".to_owned(), String::new()); PROGRAM_HEADERS_MAX + 1];
        assert!(program_headers(&many).is_err());
    }

    #[test]
    fn a_program_may_set_so_many_headers_and_no_more() {
        let asked = |count: usize| {
            let all: Vec<_> = (0..count).map(|it| (format!("a-{it}"), String::new())).collect();
            program_headers(&all).map(|all| all.len())
        };
        assert_eq!(asked(PROGRAM_HEADERS_MAX).unwrap(), PROGRAM_HEADERS_MAX);
        let many = asked(PROGRAM_HEADERS_MAX + 1);
        assert!(matches!(many, Err(FetchError::Request(_))), "{many:?}");
    }

    #[test]
    fn a_rule_without_ranges_allows_what_is_public_and_one_with_ranges_them_alone() {
        let mut rule = Rule {
            scheme: Scheme::Https,
            host: Host::Domain("api.example.com".into()),
            port: 443,
            methods: vec![Method::Get],
            path_prefix: "/".into(),
            addresses: Vec::new(),
            headers: Vec::new(),
            request_headers: Vec::new(),
            response_headers: Vec::new(),
        };
        let [public, inside] = [IpAddr::from([1, 1, 1, 1]), IpAddr::from([10, 1, 0, 1])];
        let allows = |rule: &Rule| [public, inside].map(|it| check_address(rule, it).is_ok());
        assert_eq!(allows(&rule), [true, false]);
        rule.addresses = vec![address::AddressRange::parse("10.1.0.0/16").unwrap()];
        assert_eq!(allows(&rule), [false, true]);
    }
}
