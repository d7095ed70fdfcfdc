//! The HTTP door: the service for whoever speaks HTTP/1.1.
//!
//! The door is a client of the service over one connection, which it is
//! given, and ends with it. It listens at a socket that it is given too. What
//! a request may do is what its principal may: the door adds no right, and the
//! principal is the token's ([`Access`]). It distrusts everybody who connects,
//! web pages that a browser shows on this host, and what programs and tools
//! leave. Deliberately absent are TLS (a proxy's), CORS, cookies, HTTP/2,
//! compression, and any state that outlives the process.
//!
//! ```text
//!   connection ─▶ guard ─▶ access ─▶ handler ─▶ forge-client ─▶ service
//!      (web)      host,     token     bounded
//!   bounds        origin              body
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `guard` | hosts and origins |
//! | `access` | tokens and principals |
//! | `order` | bodies that ask for a run |
//! | `key` | keys of clients, under which a run is asked for once |
//! | `runs`, `broker`, `health`, `socket` | what is answered |
//! | `tenant`, `events` | what is kept of runs, for each principal |
//! | `problem` | refusals |

mod access;
mod broker;
mod events;
mod guard;
mod health;
mod key;
mod order;
mod problem;
mod runs;
mod socket;
mod tenant;

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use forge_client::{Client, ClientError};
use forge_protocol::limits;
use futures_core::Stream;
use hyper_util::service::TowerToHyperService;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

pub use access::{Access, Principal};

use access::Bearer;
use problem::Problem;
use tenant::{Tenant, Tenants};

use crate::web::listen::After;
use crate::web::token::Unauthenticated;
use crate::web::{self, Held, Listener, Readiness, TokenHash, places};

/// How long a body may take to arrive.
const BODY_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a service that closed the door's connection may take to say that it ends.
const ENDING_TIME_MAX: Duration = Duration::from_secs(1);
/// How often what was kept for long enough is forgotten.
const SWEEP_EVERY: Duration = Duration::from_secs(30);
/// Questions of those who operate the service that are with it at a time; more
/// wait.
const OPERATORS_QUESTIONS_MAX: usize = 8;
/// The same of all principals: all else that it takes of one connection.
const QUESTIONS_MAX: usize = limits::QUESTIONS_MAX - OPERATORS_QUESTIONS_MAX;

/// The OpenAPI document of this door.
pub const DOCUMENT: &str = include_str!("openapi.json");

/// What an operator decides. May change while the door is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Whom requests speak for.
    pub access: Access,
    /// The host names that the door goes by, beside `localhost`.
    pub hosts: Vec<String>,
    /// The token that opens `/metrics`, where principals have tokens.
    pub metrics_token: Option<TokenHash>,
}

/// What all requests share.
#[derive(Debug)]
struct Door {
    client: Client,
    options: watch::Receiver<Options>,
    tenants: Tenants,
    questions: Arc<Semaphore>,
    operators_questions: Arc<Semaphore>,
    counters: health::Counters,
    readiness: Readiness,
    /// Whether the door is being closed.
    closing: watch::Sender<bool>,
}

impl Door {
    fn new(client: Client, options: watch::Receiver<Options>) -> Self {
        Self {
            client,
            options,
            tenants: Tenants::default(),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            operators_questions: Arc::new(Semaphore::new(OPERATORS_QUESTIONS_MAX)),
            counters: health::Counters::default(),
            readiness: Readiness::default(),
            closing: watch::Sender::new(false),
        }
    }
}

macro_rules! routes {
    ($($method:ident $path:literal => $handler:path;)*) => {
        /// Every method and path there is.
        #[cfg(test)]
        const ROUTES: &[(&str, &str)] = &[$((stringify!($method), $path)),*];

        fn routes() -> Router<Arc<Door>> {
            Router::new()$(.route($path, axum::routing::$method($handler)))*
        }
    };
}

routes! {
    post "/v1/runs" => runs::submit;
    get "/v1/runs" => runs::list;
    get "/v1/runs/{id}" => runs::state;
    delete "/v1/runs/{id}" => runs::cancel;
    get "/v1/runs/{id}/events" => runs::events;
    get "/v1/runs/{id}/artifacts/{n}" => runs::artifact;
    get "/v1/runs/ws" => socket::open;
    get "/v1/tools" => broker::list;
    post "/v1/tools/search" => broker::search;
    post "/v1/grants" => broker::issue;
    post "/v1/grants/attenuate" => broker::attenuate;
    post "/v1/grants/inspect" => broker::inspect;
    get "/metrics" => health::metrics;
    get "/healthz" => health::live;
    get "/readyz" => health::ready;
    get "/openapi.json" => health::document;
}

/// Serves until the service is gone or nobody holds the other end of
/// `options` any more.
///
/// # Errors
/// [`ClientError`] if what is at the other end of `service` is no service.
pub async fn serve(
    listener: Listener,
    service: UnixStream,
    options: watch::Receiver<Options>,
) -> Result<(), ClientError> {
    let mut changes = options.clone();
    let unwanted = async { while changes.changed().await.is_ok() {} };
    tokio::pin!(unwanted);
    let client = tokio::select! {
        client = Client::over(service) => client?,
        // A service that is about to end accepts nobody any more.
        () = &mut unwanted => return Ok(()),
    };
    let door = Arc::new(Door::new(client.clone(), options));
    tokio::spawn(sweep(Arc::downgrade(&door)));
    let service = TowerToHyperService::new(router(Arc::clone(&door)));
    let connections = Arc::clone(&door.counters.connections);
    let end = async {
        tokio::select! {
            () = client.closed() => {}
            () = &mut unwanted => return After::Closed,
        }
        // It ends, mostly, and says so soon; who connects meanwhile is told that it is gone.
        match tokio::time::timeout(ENDING_TIME_MAX, unwanted).await {
            Ok(()) => After::Closed,
            Err(_) => After::Kept,
        }
    };
    let close = || {
        door.closing.send_replace(true);
    };
    web::listen::serve(listener, service, connections, end, close).await;
    Ok(())
}

fn router(door: Arc<Door>) -> Router {
    routes()
        .fallback(|| async { Problem::not_found("there is nothing here: see /openapi.json") })
        .method_not_allowed_fallback(|| async {
            let detail = "this path has other methods: see /openapi.json";
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method", detail)
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&door), guarded))
        .with_state(door)
}

/// Around every request: host and origin before, safe headers after. Its place
/// among those under way is given back when its answer is sent. One whose token is
/// revoked before it is answered ends as if its client had left.
async fn guarded(State(door): State<Arc<Door>>, mut request: Request, next: Next) -> Response {
    let place = Place::default();
    request.extensions_mut().insert(place.clone());
    let checked = match is_health_check(&request) {
        true => Ok(()),
        false => guard::check(request.uri(), request.headers(), &door.options.borrow().hosts),
    };
    let is_refused = checked.is_err();
    let mut response = match checked {
        Ok(()) => tokio::select! {
            response = next.run(request) => response,
            problem = place.revoked(&door) => problem.into_response(),
        },
        Err(problem) => problem.into_response(),
    };
    if let Some(caller) = place.0.get() {
        response = response.map(|body| Body::new(Held::new(body, caller.clone())));
    }
    door.counters.answered(response.status());
    match response.status() {
        StatusCode::UNAUTHORIZED => door.counters.refused("unauthenticated"),
        StatusCode::MISDIRECTED_REQUEST if is_refused => door.counters.refused("misdirected"),
        StatusCode::FORBIDDEN if is_refused => door.counters.refused("foreign"),
        _ => {}
    }
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Whether a load balancer asks whether the door answers, in HTTP/1.0, which has no `Host`.
/// No browser speaks that.
fn is_health_check(request: &Request) -> bool {
    request.version() == Version::HTTP_10
        && matches!(request.uri().path(), "/healthz" | "/readyz")
        && !request.headers().contains_key(header::HOST)
}

/// Who asks, and its place among the requests under way.
#[derive(Clone)]
struct Caller {
    tenant: Arc<Tenant>,
    permit: Arc<OwnedSemaphorePermit>,
    bearer: Bearer,
}

/// Where a request's caller is once that is known.
#[derive(Clone, Default)]
struct Place(Arc<OnceLock<Caller>>);

impl Place {
    /// Waits until its caller may ask no more: what that is told.
    async fn revoked(&self, door: &Door) -> Problem {
        let mut options = door.options.clone();
        while options.changed().await.is_ok() {
            if self.0.get().is_some_and(|caller| !caller.bearer.speaks_still()) {
                return Problem::unauthenticated(Unauthenticated::Invalid(
                    "this token speaks for the principal no more; a run that it asked for is \
                     cancelled",
                ));
            }
        }
        // Without anybody who could change them, the door closes.
        std::future::pending().await
    }
}

impl FromRequestParts<Arc<Door>> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(
        parts: &mut Parts,
        door: &Arc<Door>,
    ) -> Result<Self, Self::Rejection> {
        let principal = door.options.borrow().access.principal(&parts.headers)?;
        let bearer = Bearer::new(principal.clone(), &parts.headers, door.options.clone());
        places::stay(&parts.extensions, &principal);
        let tenant = door.tenants.named(principal);
        let permit = Arc::new(tenant.request()?);
        let caller = Self { tenant, permit, bearer };
        if let Some(place) = parts.extensions.get::<Place>() {
            let _ = place.0.set(caller.clone());
        }
        Ok(caller)
    }
}

/// What a path names, which may be no text at all.
struct Named<T>(T);

impl<T, S> FromRequestParts<S> for Named<T>
where
    T: DeserializeOwned + Send,
    S: Send + Sync,
{
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Self::Rejection> {
        let Path(named) = Path::from_request_parts(parts, state)
            .await
            .map_err(|_| Problem::not_found("there is nothing of such a name"))?;
        Ok(Self(named))
    }
}

/// Reads a body of at most so many bytes. Its room among the principal's
/// bodies is given back with it: there is room for all of it before it is read where
/// its length is said, else for each piece as it comes.
async fn read_body(
    tenant: &Tenant,
    headers: &HeaderMap,
    body: Body,
    limit: usize,
) -> Result<(Vec<u8>, OwnedSemaphorePermit), Problem> {
    let too_large = || Problem::too_large(format!("a body here has at most {limit} bytes"));
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let length: Option<usize> = length.and_then(|text| text.parse().ok());
    if length.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut room = tenant.body(length.unwrap_or(0))?;
    let mut bytes = Vec::with_capacity(length.unwrap_or(0));
    let reading = async {
        let mut stream = body.into_data_stream();
        while let Some(piece) =
            std::future::poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await
        {
            let piece = piece.map_err(|_| {
                Problem::new(StatusCode::BAD_REQUEST, "bad_request", "the body breaks off")
            })?;
            let wanted = bytes.len() + piece.len();
            if wanted > limit {
                return Err(too_large());
            }
            tenant.grow_body(&mut room, wanted)?;
            bytes.extend_from_slice(&piece);
        }
        Ok(())
    };
    match tokio::time::timeout(BODY_TIME_MAX, reading).await {
        Ok(read) => read?,
        Err(_) => {
            let detail = format!("the body took more than {} s", BODY_TIME_MAX.as_secs());
            return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "timeout", detail));
        }
    }
    Ok((bytes, room))
}

fn answer_json(status: StatusCode, body: &impl Serialize) -> Response {
    let kind = HeaderValue::from_static("application/json");
    let body = serde_json::to_vec(body).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, kind)], body).into_response()
}

/// A body that another task makes.
struct Feed(mpsc::Receiver<Bytes>);

impl Stream for Feed {
    type Item = Result<Bytes, std::convert::Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|piece| piece.map(Ok))
    }
}

/// Forgets, for as long as there is a door.
async fn sweep(door: std::sync::Weak<Door>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(door) = door.upgrade() else { return };
        door.tenants.sweep(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::future::poll_fn;

    use forge_protocol::RunId;
    use forge_protocol::frame::Kind;
    use forge_protocol::service::{Event, RunEvent};
    use hyper::service::Service as _;
    use serde_json::Value;

    use super::*;
    use crate::mock;

    /// A door for everybody, and its service.
    pub(super) async fn door() -> (mock::Service, Door) {
        let (service, socket) = mock::Service::new().await;
        let access = Access::Anybody("a".into());
        let options = Options { access, hosts: Vec::new(), metrics_token: None };
        let client = Client::over(socket).await.unwrap();
        (service, Door::new(client, watch::channel(options).1))
    }

    #[tokio::test]
    async fn a_request_is_under_way_until_its_answer_is_sent() {
        let (_service, door) = door().await;
        let door = TowerToHyperService::new(router(Arc::new(door)));
        let ask = || {
            let request = Request::get("/v1/runs/00").header(header::HOST, "localhost");
            door.call(request.body(Body::empty()).unwrap())
        };
        let mut unsent = Vec::new();
        loop {
            let answer = ask().await.unwrap();
            if answer.status() == StatusCode::TOO_MANY_REQUESTS {
                break;
            }
            assert_eq!(answer.status(), StatusCode::NOT_FOUND);
            unsent.push(answer);
            assert!(unsent.len() < 1024, "an answer that nobody takes has no place");
        }
        unsent.pop();
        assert_eq!(ask().await.unwrap().status(), StatusCode::NOT_FOUND);
    }

    #[tokio::test]
    async fn a_body_that_does_not_say_its_length_takes_room_as_it_comes() {
        let tenant = Tenants::default().named("a".into());
        let read = async |pieces: usize| {
            let (sender, receiver) = mpsc::channel(pieces);
            for _ in 0..pieces {
                sender.send(Bytes::from(vec![b' '; 1000])).await.unwrap();
            }
            drop(sender);
            let body = Body::from_stream(Feed(receiver));
            read_body(&tenant, &HeaderMap::new(), body, order::RUN_BYTES_MAX).await
        };
        // Many at a time, which would not fit if each had what it may have.
        let mut held = Vec::new();
        for pieces in 1..64 {
            let (bytes, room) = read(pieces).await.unwrap();
            assert_eq!(bytes.len(), pieces * 1000);
            assert_eq!(room.num_permits(), bytes.len().div_ceil(1024));
            held.push(room);
        }
        held.extend(std::iter::from_fn(|| tenant.body(1024).ok()));
        assert_eq!(read(1).await.unwrap_err().body().status(), 429);
    }

    #[tokio::test]
    async fn a_door_that_its_service_does_not_take_ends_when_it_is_to() {
        // One that is about to end accepts nobody: no hello comes.
        let (service, _deaf) = UnixStream::pair().unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let access = Access::Tokens(Vec::new());
        let options = Options { access, hosts: Vec::new(), metrics_token: None };
        let (wanted, options) = watch::channel(options);
        drop(wanted);
        let served = serve(Listener::Tcp(listener), service, options);
        let ended = tokio::time::timeout(Duration::from_secs(20), served).await;
        ended.expect("it waits for its service").unwrap();
    }

    #[tokio::test]
    async fn what_a_token_asked_for_ends_when_it_is_revoked() {
        let (mut service, socket) = mock::Service::new().await;
        let tokens = vec![TokenHash::of(b"one"), TokenHash::of(b"other")];
        let access = Access::Tokens(vec![Principal { name: "a".into(), tokens }]);
        let options = Options { access, hosts: Vec::new(), metrics_token: None };
        let (decided, options) = watch::channel(options);
        let client = Client::over(socket).await.unwrap();
        let door = TowerToHyperService::new(router(Arc::new(Door::new(client, options))));
        let ask = |token: &str, method: &str, path: &str, body: &'static str| {
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header(header::HOST, "localhost")
                .header(header::AUTHORIZATION, format!("Bearer {token}"))
                .header(header::CONTENT_TYPE, "application/json");
            door.call(request.body(Body::from(body)).unwrap())
        };
        // One run that nobody waits for, and who follows it.
        let begun = tokio::spawn(ask("one", "POST", "/v1/runs", r#"{"program":"","wait":false}"#));
        service.hear(Kind::Submit).await;
        let what = RunEvent::Admitted { run_id: RunId([7; 16]) };
        service.say(Kind::Event, &Event { number: 1, what }).await;
        let begun = begun.await.unwrap().unwrap();
        assert_eq!(begun.status(), StatusCode::ACCEPTED);
        let path = begun.headers()[header::LOCATION].to_str().unwrap().to_owned();
        let followed = ask("one", "GET", &format!("{path}/events"), "").await.unwrap();
        let mut events = followed.into_body().into_data_stream();
        let mut next = async || poll_fn(|context| Pin::new(&mut events).poll_next(context)).await;
        assert!(next().await.is_some(), "it was admitted");
        // And one that is waited for by each token.
        let waits = |token| tokio::spawn(ask(token, "POST", "/v1/runs", r#"{"program":""}"#));
        let (one, other) = (waits("one"), waits("other"));
        service.hear(Kind::Submit).await;
        service.hear(Kind::Submit).await;
        decided.send_modify(|options| {
            let tokens = vec![TokenHash::of(b"other")];
            options.access = Access::Tokens(vec![Principal { name: "a".into(), tokens }]);
        });
        let ends = async {
            assert_eq!(one.await.unwrap().unwrap().status(), StatusCode::UNAUTHORIZED);
            service.hear(Kind::Cancel).await;
            service.hear(Kind::Cancel).await;
            assert!(next().await.is_none(), "its stream goes on");
        };
        tokio::time::timeout(Duration::from_secs(30), ends).await.expect("something goes on");
        assert!(!other.is_finished());
        // The run is its principal's, and so is its end.
        assert_eq!(ask("other", "GET", &path, "").await.unwrap().status(), StatusCode::OK);
    }

    #[test]
    fn the_document_has_every_route_and_no_other() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let paths = document["paths"].as_object().unwrap();
        let documented: BTreeSet<(String, String)> = paths
            .iter()
            .flat_map(|(path, item)| {
                let methods = item.as_object().unwrap().keys();
                methods.filter(|key| *key != "parameters").map(|key| (key.clone(), path.clone()))
            })
            .collect();
        let routed: BTreeSet<(String, String)> =
            ROUTES.iter().map(|(method, path)| ((*method).into(), (*path).into())).collect();
        assert_eq!(documented, routed);
    }

    #[test]
    fn the_documents_limits_are_the_ones_a_run_can_ask_for() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        // The command line takes them by the same names.
        assert_eq!(order::LIMITS, limits::RunLimits::NAMES);
        let limits = document["components"]["schemas"]["Limits"]["properties"].as_object().unwrap();
        let documented: BTreeSet<&str> = limits.keys().map(String::as_str).collect();
        assert_eq!(documented, order::LIMITS.iter().copied().collect());
    }

    #[test]
    fn every_reference_of_the_document_leads_somewhere() {
        fn check(value: &Value, document: &Value) {
            match value {
                Value::Object(object) => {
                    if let Some(Value::String(reference)) = object.get("$ref") {
                        let place = reference.strip_prefix('#').unwrap();
                        assert!(document.pointer(place).is_some(), "{reference}");
                    }
                    object.values().for_each(|value| check(value, document));
                }
                Value::Array(values) => values.iter().for_each(|value| check(value, document)),
                _ => {}
            }
        }
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        check(&document, &document);
    }
}
