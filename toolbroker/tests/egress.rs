//! Attacks on the guard before outgoing requests, each with a server on
//! loopback that would notice, and a resolver that the attack chooses. The
//! last ones go through a real broker process.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, GrantRequest, Reply, Request as Ask};
use forge_protocol::limits::RunLimits;
use forge_toolbroker::constraint::Violation;
use forge_toolbroker::egress::address::AddressRange;
use forge_toolbroker::egress::rule::{Method, OperatorHeader, Rule, Scheme};
use forge_toolbroker::egress::{Client, Fetched, Policy, Request, Resolver, Resolving, Response};
use forge_toolbroker::secret::Secret;
use serde_json::json;
use support::secure::Identity;
use support::{Broker, CANARY};
use url::Host;

// A server that writes down what it hears

struct Server {
    port: u16,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Answers each request with what `answer` makes of its head, byte for
    /// byte, and closes.
    fn new(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::serving(move |mut stream, head| {
            let _ = stream.write_all(&answer(head));
        })
    }

    fn serving(serve: impl Fn(TcpStream, &str) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard_here = Arc::clone(&heard);
        let serve = Arc::new(serve);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (heard, serve) = (Arc::clone(&heard_here), Arc::clone(&serve));
                std::thread::spawn(move || {
                    let request = read_request(&stream);
                    heard.lock().unwrap().push(request.clone());
                    serve(stream, &request);
                });
            }
        });
        Self { port, heard }
    }

    fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }
}

/// Head and body of a request, as text.
fn read_request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut text = String::new();
    while reader.read_line(&mut text).is_ok_and(|bytes| bytes > 2) {}
    let length = text
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    let _ = reader.read_exact(&mut body);
    text + &String::from_utf8_lossy(&body)
}

fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut all =
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{headers}\r\n").into_bytes();
    all.extend_from_slice(body);
    all
}

fn ok(body: &[u8]) -> Vec<u8> {
    answer("200 OK", "content-type: text/plain\r\n", body)
}

// A client of the test's choice

/// Answers by the number of the question.
#[derive(Debug)]
struct Names {
    answers: Vec<Vec<IpAddr>>,
    asked: AtomicUsize,
}

impl Names {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let parse = |text: &&str| text.parse().unwrap();
        let answers = answers.iter().map(|all| all.iter().map(parse).collect()).collect();
        Arc::new(Self { answers, asked: AtomicUsize::new(0) })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Acquire)
    }
}

impl Resolver for Names {
    fn resolve<'a>(&'a self, _: &'a str) -> Resolving<'a> {
        let number = self.asked.fetch_add(1, Ordering::AcqRel);
        let answer = self.answers[number.min(self.answers.len() - 1)].clone();
        Box::pin(async move { Ok(answer) })
    }
}

/// A rule for `host` over plain HTTP that allows loopback.
fn rule(host: &str, port: u16) -> Rule {
    Rule {
        scheme: Scheme::Http,
        host: Host::parse(host).unwrap(),
        port,
        methods: Method::ALL.to_vec(),
        path_prefix: "/".into(),
        addresses: vec![AddressRange::parse("127.0.0.1/32").unwrap()],
        headers: Vec::new(),
        request_headers: Vec::new(),
        response_headers: Vec::new(),
    }
}

fn credential(name: &'static str, value: &str) -> OperatorHeader {
    OperatorHeader {
        name: hyper::header::HeaderName::from_static(name),
        prefix: "Bearer ".into(),
        value: Secret::new(value.into()).unwrap(),
        is_credential: true,
    }
}

fn policy(rules: Vec<Rule>) -> Policy {
    Policy {
        rules,
        response_bytes_max: 10_000,
        time_max: Duration::from_secs(60),
        tls: forge_toolbroker::egress::tls(vec![identity().certificate.clone()]).unwrap(),
    }
}

fn client(rules: Vec<Rule>, names: &Arc<Names>) -> Client {
    Client::new(policy(rules), Arc::clone(names) as Arc<dyn Resolver>)
}

fn local(port: u16) -> Client {
    client(vec![rule("127.0.0.1", port)], &Names::new(&[&[]]))
}

/// A grant without constraints.
fn anywhere(_: Method, _: &url::Url) -> Result<(), Violation> {
    Ok(())
}

async fn request(client: &Client, method: Method, url: String) -> Fetched {
    client
        .room()
        .await
        .unwrap()
        .fetch(Request { method, url, headers: Vec::new(), body: Vec::new() }, anywhere)
        .await
}

async fn get(client: &Client, url: String) -> Result<Response, &'static str> {
    match request(client, Method::Get, url).await {
        Fetched::Response(response) => Ok(response),
        Fetched::Failed(error) | Fetched::Lost(error) => Err(error.code()),
    }
}

async fn refusal(client: &Client, url: String) -> &'static str {
    get(client, url).await.unwrap_err()
}

// Addresses

#[tokio::test]
async fn a_name_that_resolves_to_loopback_private_metadata_or_the_like_is_refused() {
    let server = Server::new(|_| ok(b"inside"));
    for address in [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "100.100.100.200",
        "0.0.0.0",
        "255.255.255.255",
        "::1",
        "::ffff:127.0.0.1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "fd00:ec2::254",
        "fe80::1",
    ] {
        let mut rule = rule("api.example.com", server.port);
        rule.addresses.clear();
        let client = client(vec![rule], &Names::new(&[&[address]]));
        let url = format!("http://api.example.com:{}/", server.port);
        assert_eq!(refusal(&client, url).await, "address_not_allowed", "{address}");
    }
    assert!(server.heard().is_empty());
}

#[tokio::test]
async fn one_forbidden_address_among_good_ones_refuses_the_name() {
    let server = Server::new(|_| ok(b"inside"));
    for addresses in [["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"]] {
        let names = Names::new(&[&addresses]);
        let client = client(vec![rule("api.example.com", server.port)], &names);
        let url = format!("http://api.example.com:{}/", server.port);
        assert_eq!(refusal(&client, url).await, "address_not_allowed");
    }
    assert!(server.heard().is_empty());
}

#[tokio::test]
async fn an_address_written_in_the_url_is_checked_like_a_resolved_one() {
    let server = Server::new(|_| ok(b"inside"));
    let mut open = rule("127.0.0.1", server.port);
    open.addresses.clear();
    let client = client(vec![open], &Names::new(&[&[]]));
    let at = |host: &str| format!("http://{host}:{}/", server.port);
    assert_eq!(refusal(&client, at("127.0.0.1")).await, "address_not_allowed");
    for host in ["2130706433", "0x7f000001", "0177.0.0.1", "127.1"] {
        assert_eq!(refusal(&client, at(host)).await, "not_allowed", "{host}");
    }
    assert!(server.heard().is_empty());
}

#[tokio::test]
async fn dns_rebinding_finds_no_second_resolution() {
    let server = Server::new(|_| ok(b"public"));
    // Checked is the first answer. Whoever asked again would be led away.
    let names = Names::new(&[&["127.0.0.1"], &["127.0.0.2"]]);
    let client = client(vec![rule("api.example.com", server.port)], &names);
    let url = format!("http://api.example.com:{}/x", server.port);
    let got = get(&client, url.clone()).await.unwrap();
    assert_eq!((got.body.as_slice(), names.asked()), (b"public".as_slice(), 1));
    assert!(server.heard()[0].contains(&format!("host: api.example.com:{}\r\n", server.port)));
    // The next request asks again, and is checked again.
    assert_eq!(refusal(&client, url).await, "address_not_allowed");
    assert_eq!((names.asked(), server.heard().len()), (2, 1));
}

#[tokio::test]
async fn a_name_without_addresses_or_with_too_many_is_unresolved() {
    let many = vec!["127.0.0.1"; 65];
    for addresses in [&[][..], &many] {
        let client = client(vec![rule("api.example.com", 1)], &Names::new(&[addresses]));
        let url = "http://api.example.com:1/".to_owned();
        assert_eq!(refusal(&client, url).await, "unresolved");
    }
}

// Redirects

#[tokio::test]
async fn a_redirect_to_a_place_that_no_rule_allows_is_not_followed() {
    let inside = Server::new(|_| ok(b"inside"));
    for location in [
        format!("http://127.0.0.1:{}/", inside.port),
        format!("//127.0.0.1:{}/", inside.port),
        "http://169.254.169.254/latest/meta-data/".into(),
        "http://[::1]/".into(),
        "file:///etc/passwd".into(),
        "gopher://127.0.0.1/".into(),
        "/admin".into(),
        "/v1/..%2fadmin".into(),
    ] {
        let to = location.clone();
        let outside =
            Server::new(move |_| answer("302 Found", &format!("location: {to}\r\n"), b""));
        let mut only = rule("127.0.0.1", outside.port);
        only.path_prefix = "/v1/".into();
        let client = client(vec![only], &Names::new(&[&[]]));
        let url = format!("http://127.0.0.1:{}/v1/", outside.port);
        assert_eq!(refusal(&client, url).await, "not_allowed", "{location}");
        assert_eq!(outside.heard().len(), 1, "{location}");
    }
    assert!(inside.heard().is_empty());
}

#[tokio::test]
async fn each_hop_is_resolved_and_its_addresses_are_checked() {
    let server = Server::new(|head| match head.contains("GET /second") {
        true => ok(b"inside"),
        false => answer("302 Found", "location: /second\r\n", b""),
    });
    // The same name, allowed the first time, has moved inside for the second.
    let names = Names::new(&[&["127.0.0.1"], &["127.0.0.9"]]);
    let client = client(vec![rule("api.example.com", server.port)], &names);
    let url = format!("http://api.example.com:{}/first", server.port);
    assert_eq!(refusal(&client, url).await, "address_not_allowed");
    assert_eq!((names.asked(), server.heard().len()), (2, 1));
}

#[tokio::test]
async fn a_redirect_loop_ends() {
    let server = Server::new(|_| answer("302 Found", "location: /again\r\n", b""));
    let url = format!("http://127.0.0.1:{}/", server.port);
    assert_eq!(refusal(&local(server.port), url).await, "too_many_redirects");
    assert_eq!(server.heard().len(), 6);
}

#[tokio::test]
async fn credentials_and_a_programs_headers_do_not_cross_to_another_origin() {
    let other = Server::new(|_| ok(b"other"));
    let to = format!("location: http://127.0.0.1:{}/\r\n", other.port);
    let first = Server::new(move |_| answer("307 Temporary Redirect", &to, b""));
    let mut with = rule("127.0.0.1", first.port);
    with.headers = vec![credential("authorization", "hunter2-token")];
    with.request_headers = vec![hyper::header::HeaderName::from_static("x-mine")];
    let client = client(vec![with, rule("127.0.0.1", other.port)], &Names::new(&[&[]]));
    let url = format!("http://127.0.0.1:{}/", first.port);
    let headers = vec![("X-Mine".into(), "m".into()), ("Accept".into(), "a/b".into())];
    let asked = Request { method: Method::Get, url, headers, body: Vec::new() };
    let Fetched::Response(response) = client.room().await.unwrap().fetch(asked, anywhere).await
    else {
        panic!("no response")
    };
    assert_eq!(response.body, b"other");
    let (first, other) = (first.heard()[0].clone(), other.heard()[0].clone());
    assert!(first.contains("authorization: Bearer hunter2-token") && first.contains("x-mine: m"));
    assert!(!other.contains("hunter2") && !other.contains("x-mine"), "{other}");
    assert!(other.contains("accept: a/b"), "{other}");
}

#[tokio::test]
async fn a_post_that_is_redirected_by_303_becomes_a_get_without_its_body() {
    let server = Server::new(|head| match head.starts_with("POST") {
        true => answer("303 See Other", "location: /seen\r\n", b""),
        false => ok(b"seen"),
    });
    let url = format!("http://127.0.0.1:{}/", server.port);
    let headers = vec![("content-type".into(), "text/plain".into())];
    let asked = Request { method: Method::Post, url, headers, body: b"sent".to_vec() };
    let Fetched::Response(response) =
        local(server.port).room().await.unwrap().fetch(asked, anywhere).await
    else {
        panic!()
    };
    assert_eq!(response.body, b"seen");
    let heard = server.heard();
    assert!(heard[0].ends_with("sent") && heard[1].starts_with("GET /seen"), "{heard:?}");
    assert!(!heard[1].contains("sent") && !heard[1].contains("content-type"), "{heard:?}");
}

#[tokio::test]
async fn a_look_at_the_head_alone_stays_one_where_it_is_redirected() {
    for status in ["301 Moved Permanently", "303 See Other", "307 Temporary Redirect"] {
        let server = Server::new(move |head| match head.contains(" /seen ") {
            true => ok(b""),
            false => answer(status, "location: /seen\r\n", b""),
        });
        let url = format!("http://127.0.0.1:{}/", server.port);
        let seen = request(&local(server.port), Method::Head, url).await;
        assert!(matches!(seen, Fetched::Response(_)), "{status}: {seen:?}");
        assert!(server.heard()[1].starts_with("HEAD /seen"), "{status}");
    }
}

#[tokio::test]
async fn a_redirect_to_two_places_leads_to_neither() {
    let server = Server::new(|head| match head.starts_with("GET / ") {
        true => answer("302 Found", "location: /one\r\nlocation: /two\r\n", b""),
        false => ok(b"seen"),
    });
    let url = format!("http://127.0.0.1:{}/", server.port);
    assert_eq!(refusal(&local(server.port), url).await, "bad_answer");
    assert_eq!(server.heard().len(), 1);
}

#[tokio::test]
async fn a_look_with_a_body_is_not_sent() {
    let server = Server::new(|_| ok(b"seen"));
    let client = local(server.port);
    for method in [Method::Get, Method::Head] {
        let url = format!("http://127.0.0.1:{}/", server.port);
        let asked = Request { method, url, headers: Vec::new(), body: b"sent".to_vec() };
        let refused = client.room().await.unwrap().fetch(asked, anywhere).await;
        assert!(
            matches!(&refused, Fetched::Failed(error) if error.code() == "bad_request"),
            "{refused:?}"
        );
    }
    assert!(server.heard().is_empty());
}

/// What becomes of a POST that is answered with a redirect, as it is told.
async fn redirected(status: &'static str, location: &'static str) -> String {
    let server = Server::new(move |_| answer(status, &format!("location: {location}\r\n"), b""));
    let mut only = rule("127.0.0.1", server.port);
    only.path_prefix = "/v1/".into();
    let client = client(vec![only], &Names::new(&[&[]]));
    let url = format!("http://127.0.0.1:{}/v1/", server.port);
    let Fetched::Failed(error) = request(&client, Method::Post, url.clone()).await else {
        panic!("{location}")
    };
    assert_eq!(error.code(), "redirect_failed", "{error}");
    // A look has done nothing.
    assert_ne!(refusal(&client, url).await, "redirect_failed");
    error.to_string()
}

#[tokio::test]
async fn a_post_whose_redirect_to_look_leads_nowhere_is_told_as_done() {
    for (status, location) in
        [("303 See Other", "/admin"), ("302 Found", "/v1/"), ("301 Moved Permanently", "/\u{e9}")]
    {
        let told = redirected(status, location).await;
        let done = format!("answered POST with {}, so what it did stands", &status[..3]);
        assert!(told.contains(&done), "{told}");
    }
}

#[tokio::test]
async fn a_post_that_is_not_sent_on_is_told_as_that() {
    for (status, location) in [
        ("307 Temporary Redirect", "http://10.0.0.1/"),
        ("308 Permanent Redirect", "/admin"),
        ("308 Permanent Redirect", "/v1/"),
    ] {
        let told = redirected(status, location).await;
        let asks = format!(
            "answered POST with {}, which asks for the same request elsewhere, and it was not \
             sent there",
            &status[..3]
        );
        assert!(told.contains(&asks) && !told.contains("stands"), "{told}");
    }
}

#[tokio::test]
async fn what_changes_something_is_not_steered_at_another_server() {
    let other = Server::new(|_| ok(b"done"));
    for (status, method) in [
        ("307 Temporary Redirect", Method::Post),
        ("308 Permanent Redirect", Method::Delete),
        ("301 Moved Permanently", Method::Put),
        ("302 Found", Method::Patch),
    ] {
        let to = format!("location: http://127.0.0.1:{}/x?secret=1\r\n", other.port);
        let first = Server::new(move |_| answer(status, &to, b""));
        let mut theirs = rule("127.0.0.1", other.port);
        theirs.headers = vec![credential("authorization", "hunter2-token")];
        let client = client(vec![rule("127.0.0.1", first.port), theirs], &Names::new(&[&[]]));
        let url = format!("http://127.0.0.1:{}/", first.port);
        let Fetched::Failed(error) = request(&client, method, url).await else {
            panic!("{status}")
        };
        assert_eq!(error.code(), "redirect_failed", "{error}");
        let told = error.to_string();
        let place = format!("http://127.0.0.1:{}/x is of another scheme", other.port);
        assert!(told.contains("was not sent there") && told.contains(&place), "{told}");
        assert!(!told.contains("secret"), "{told}");
    }
    assert!(other.heard().is_empty(), "{:?}", other.heard());
}

#[tokio::test]
async fn a_look_that_fails_leaves_nothing_open_of_the_post_before_it() {
    // Cut off, and never answered.
    for waits in [Duration::ZERO, Duration::from_secs(5)] {
        let server = Server::new(move |head| {
            if head.starts_with("POST") {
                return answer("303 See Other", "location: /seen\r\n", b"");
            }
            std::thread::sleep(waits);
            Vec::new()
        });
        let mut policy = policy(vec![rule("127.0.0.1", server.port)]);
        policy.time_max = Duration::from_secs(2);
        let client = Client::new(policy, Names::new(&[&[]]));
        let url = format!("http://127.0.0.1:{}/", server.port);
        let looked = request(&client, Method::Post, url).await;
        let Fetched::Failed(error) = looked else { panic!("{looked:?}") };
        assert_eq!(error.code(), "redirect_failed", "{error}");
        assert!(error.to_string().contains("what it did stands"), "{error}");
    }
}

#[tokio::test]
async fn a_post_that_was_sent_on_and_not_answered_is_lost() {
    let server = Server::new(|head| match head.starts_with("POST /seen") {
        true => Vec::new(),
        false => answer("307 Temporary Redirect", "location: /seen\r\n", b""),
    });
    let url = format!("http://127.0.0.1:{}/", server.port);
    let sent = request(&local(server.port), Method::Post, url).await;
    let Fetched::Lost(error) = sent else { panic!("{sent:?}") };
    assert_eq!(error.code(), "broken", "{error}");
}

// What a program may set, and what it sees

#[tokio::test]
async fn no_header_of_a_program_frames_routes_or_authenticates() {
    let server = Server::new(|_| ok(b""));
    for name in [
        "Host",
        "Connection",
        "Transfer-Encoding",
        "Content-Length",
        "Authorization",
        "Cookie",
        "Upgrade",
        "X-HTTP-Method-Override",
        "Accept-Encoding",
        "X-Other",
    ] {
        let url = format!("http://127.0.0.1:{}/", server.port);
        let headers = vec![(name.to_owned(), "x".to_owned())];
        let asked = Request { method: Method::Get, url, headers, body: Vec::new() };
        let Fetched::Failed(error) =
            local(server.port).room().await.unwrap().fetch(asked, anywhere).await
        else {
            panic!()
        };
        assert_eq!(error.code(), "header_not_allowed", "{name}");
    }
    assert!(server.heard().is_empty());
}

#[tokio::test]
async fn cookies_and_headers_that_are_not_listed_stay_with_the_broker() {
    let server = Server::new(|_| {
        answer(
            "200 OK",
            "set-cookie: a=b\r\nx-internal: y\r\netag: \"z\"\r\nlink: a\r\nlink: b\r\n",
            b"",
        )
    });
    let url = format!("http://127.0.0.1:{}/", server.port);
    let client = local(server.port);
    let response = get(&client, url.clone()).await.unwrap();
    let expected =
        [("etag".to_owned(), "\"z\"".to_owned()), ("link".to_owned(), "a, b".to_owned())];
    assert_eq!(response.headers, expected);
    get(&client, url).await.unwrap();
    assert!(!server.heard()[1].to_ascii_lowercase().contains("cookie"));
}

/// Says in two chunks what it was sent, `before` and after it this.
fn echo_in_chunks(before: &'static [u8]) -> Server {
    Server::new(move |head| {
        let token = head.split("Bearer ").nth(1).unwrap().lines().next().unwrap();
        let (first, second) = token.split_at(4);
        let chunk =
            |bytes: &[u8]| [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
        let first = chunk(&[before, first.as_bytes()].concat());
        let head =
            format!("HTTP/1.1 200 OK\r\netag: {token}\r\ntransfer-encoding: chunked\r\n\r\n");
        [head.as_bytes(), &first, &chunk(second.as_bytes()), b"0\r\n\r\n"].concat()
    })
}

#[test]
fn a_credential_that_comes_back_is_removed_also_across_chunks() {
    let server = echo_in_chunks(b"it is ");
    let mut broker = Broker::with_forge_toml(&with_canary(server.port));
    let mut worker = broker.run(&["http.fetch"], limits());
    let url = format!("http://127.0.0.1:{}/", server.port);
    let (code, said) = worker.call("http.fetch", &json!({"method": "GET", "url": url}));
    assert_eq!((code, &said["body"]), (None, &json!("it is [credential removed]")));
    assert_eq!(said["headers"], json!({"etag": "[credential removed]"}));
}

// Answers

#[tokio::test]
async fn an_answer_over_the_limit_is_refused_announced_or_not_and_without_end() {
    let endless = Server::serving(|mut stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        // Until the client has enough of it.
        while stream.write_all(&[b'x'; 4096]).is_ok() {}
    });
    let announced =
        Server::new(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 1073741824\r\n\r\n".to_vec());
    let just_over = Server::new(|_| ok(&[b'x'; 10_001]));
    for port in [endless.port, announced.port, just_over.port] {
        let url = format!("http://127.0.0.1:{port}/");
        assert_eq!(refusal(&local(port), url).await, "too_large");
    }
    let fits = Server::new(|_| ok(&[b'x'; 10_000]));
    let response = get(&local(fits.port), format!("http://127.0.0.1:{}/", fits.port)).await;
    assert_eq!(response.unwrap().body.len(), 10_000);
}

#[tokio::test]
async fn a_server_that_dribbles_its_answer_is_given_up_and_nothing_of_it_kept() {
    let server = Server::serving(|mut stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n");
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let mut short = policy(vec![rule("127.0.0.1", server.port)]);
    short.time_max = Duration::from_millis(200);
    let client = Client::new(short, Names::new(&[&[]]));
    let url = format!("http://127.0.0.1:{}/", server.port);
    assert_eq!(refusal(&client, url).await, "too_late");
}

#[tokio::test]
async fn a_request_that_waits_for_the_turns_of_others_is_not_late() {
    let server = Server::new(|_| {
        std::thread::sleep(Duration::from_secs(3));
        ok(b"slow")
    });
    let mut slow = policy(vec![rule("127.0.0.1", server.port)]);
    slow.time_max = Duration::from_secs(10);
    let client = Arc::new(Client::new(slow, Names::new(&[&[]])));
    let mut all = tokio::task::JoinSet::new();
    // Four times as many as have a turn at once.
    for _ in 0..256 {
        let (client, url) = (Arc::clone(&client), format!("http://127.0.0.1:{}/", server.port));
        all.spawn(async move { get(&client, url).await.map(|response| response.status) });
    }
    for status in all.join_all().await {
        assert_eq!(status, Ok(200));
    }
}

#[tokio::test]
async fn a_compressed_answer_that_nobody_asked_for_is_refused() {
    for header in
        ["content-encoding: gzip", "content-encoding: br", "transfer-encoding: gzip, chunked"]
    {
        let head = format!("HTTP/1.1 200 OK\r\n{header}\r\n\r\n0\r\n\r\n");
        let server = Server::new(move |_| head.clone().into_bytes());
        let url = format!("http://127.0.0.1:{}/", server.port);
        assert_eq!(refusal(&local(server.port), url).await, "bad_answer", "{header}");
        assert!(server.heard()[0].contains("accept-encoding: identity"));
    }
}

#[tokio::test]
async fn what_is_not_http_or_has_too_much_of_a_head_is_no_answer() {
    let many = "a: b\r\n".repeat(200);
    let long = format!("a: {}\r\n", "b".repeat(40_000));
    for head in [
        "SSH-2.0-x\r\n",
        &format!("HTTP/1.1 200 OK\r\n{many}\r\n"),
        &format!("HTTP/1.1 200 OK\r\n{long}\r\n"),
        "HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",
        "",
    ] {
        let bytes = head.as_bytes().to_vec();
        let server = Server::new(move |_| bytes.clone());
        let url = format!("http://127.0.0.1:{}/", server.port);
        let code = refusal(&local(server.port), url).await;
        assert!(matches!(code, "bad_answer" | "broken"), "{head:.40}: {code}");
    }
}

#[tokio::test]
async fn a_write_that_got_no_answer_is_lost_and_a_look_is_only_failed() {
    let server = Server::new(|_| Vec::new());
    let url = format!("http://127.0.0.1:{}/", server.port);
    let client = local(server.port);
    let written = request(&client, Method::Post, url.clone()).await;
    assert!(matches!(written, Fetched::Lost(_)), "{written:?}");
    let read = request(&client, Method::Get, url).await;
    assert!(matches!(read, Fetched::Failed(_)), "{read:?}");
    // An answer that cannot be used says as little of what was done.
    let odd = Server::new(|_| answer("200 OK", "content-encoding: gzip\r\n", b"?"));
    let url = format!("http://127.0.0.1:{}/", odd.port);
    let written = request(&local(odd.port), Method::Post, url).await;
    assert!(matches!(written, Fetched::Lost(_)), "{written:?}");
    assert!(odd.heard()[0].contains("content-length: 0"), "{:?}", odd.heard());
    // What never left is not lost.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let unsent = request(&local(free), Method::Post, format!("http://127.0.0.1:{free}/")).await;
    assert!(matches!(unsent, Fetched::Failed(_)), "{unsent:?}");
}

// TLS

/// One identity for all of these tests.
fn identity() -> &'static Identity {
    static MADE: std::sync::OnceLock<Identity> = std::sync::OnceLock::new();
    MADE.get_or_init(|| Identity::of("api.example.com"))
}

fn tls_server() -> (u16, Arc<Mutex<Vec<String>>>) {
    identity().serve(|_| ok(b"secure"))
}

#[tokio::test]
async fn tls_and_host_carry_the_name_and_the_certificate_has_to() {
    let (port, heard) = tls_server();
    let secure = |host: &str| Rule { scheme: Scheme::Https, ..rule(host, port) };
    let names = Names::new(&[&["127.0.0.1"]]);
    let client = client(vec![secure("api.example.com"), secure("other.example.com")], &names);
    let response = get(&client, format!("https://api.example.com:{port}/a")).await.unwrap();
    assert_eq!(response.body, b"secure");
    let said = heard.lock().unwrap()[0].clone();
    assert!(said.starts_with("api.example.com GET /a HTTP/1.1"), "{said}");
    assert!(said.contains(&format!("host: api.example.com:{port}")), "{said}");
    let url = format!("https://other.example.com:{port}/");
    assert_eq!(refusal(&client, url).await, "not_trusted");
    assert_eq!(heard.lock().unwrap().len(), 1, "no request went to whom nobody could trust");
}

#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    let (port, heard) = tls_server();
    let secure = Rule { scheme: Scheme::Https, ..rule("api.example.com", port) };
    let strict =
        Policy { tls: forge_toolbroker::egress::tls(Vec::new()).unwrap(), ..policy(vec![secure]) };
    let client = Client::new(strict, Names::new(&[&["127.0.0.1"]]));
    let url = format!("https://api.example.com:{port}/");
    assert_eq!(refusal(&client, url).await, "not_trusted");
    assert!(heard.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_certificate_that_names_a_credential_is_told_without_it() {
    let value = "hunter2-token.example.com";
    let theirs = Identity::of(value);
    let (port, _) = theirs.serve(|_| ok(b"secure"));
    let mut secure = Rule { scheme: Scheme::Https, ..rule("api.example.com", port) };
    secure.headers = vec![credential("authorization", value)];
    let tls = forge_toolbroker::egress::tls(vec![theirs.certificate.clone()]).unwrap();
    let client = Client::new(Policy { tls, ..policy(vec![secure]) }, Names::new(&[&["127.0.0.1"]]));
    let url = format!("https://api.example.com:{port}/");
    let Fetched::Failed(error) = request(&client, Method::Get, url).await else { panic!() };
    let told = error.to_string();
    assert!(told.contains("[credential removed]") && !told.contains("hunter2"), "{told}");
}

// Through a real broker

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

/// A rule for a server here, which is sent the canary.
fn with_canary(port: u16) -> String {
    format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {port}, \
         methods = ['GET', 'POST'], addresses = ['127.0.0.1'], \
         headers = {{ Authorization = {{ prefix = 'Bearer ', from_env = 'CANARY' }} }} }}]"
    )
}

#[test]
fn no_part_of_a_credential_is_left_where_a_redirect_that_is_not_followed_is_told() {
    let server = Server::new(|head| {
        let before = head.split(' ').nth(1).unwrap().trim_start_matches('/').parse().unwrap();
        let to = format!("location: http://127.0.0.1:1/{}{CANARY}\r\n", "a".repeat(before));
        answer("307 Temporary Redirect", &to, b"")
    });
    let mut broker = Broker::with_forge_toml(&with_canary(server.port));
    let limits = RunLimits { calls: 200, ..limits() };
    let mut worker = broker.run(&["http.fetch"], limits);
    for before in (450..520).chain([4_000]) {
        for method in ["GET", "POST"] {
            let url = format!("http://127.0.0.1:{}/{before}", server.port);
            let (code, why) = worker.call("http.fetch", &json!({"method": method, "url": url}));
            let told = why["error"].as_str().unwrap();
            assert_eq!(code, Some(CallCode::ToolFailed), "{told}");
            assert!(told.contains("/aa") && told.contains("[credential removed]"), "{told}");
            assert!(!told.contains(&CANARY[..4]), "{before}: {told}");
        }
    }
}

#[test]
fn a_redirect_leads_nowhere_where_the_grants_constraints_do_not() {
    let server = Server::new(|head| match head.split(' ').nth(1).unwrap() {
        "/public/in" => answer("302 Found", "location: seen\r\n", b""),
        "/public/out" => answer("302 Found", "location: /admin/users?key=k\r\n", b""),
        "/public/later" => answer("307 Temporary Redirect", "location: out\r\n", b""),
        "/public/done" => answer("303 See Other", "location: seen\r\n", b""),
        path => ok(path.as_bytes()),
    });
    let mut broker = Broker::with_forge_toml(&with_canary(server.port));
    let at = |path: &str| format!("http://127.0.0.1:{}{path}", server.port);
    let mut narrowed = |constraints: &[String]| {
        let request = GrantRequest {
            constraints: constraints.iter().map(|it| format!("http.fetch:{it}")).collect(),
            ..support::grant_request(&["http.fetch"])
        };
        let Reply::Grant(token) = broker.ask(&Ask::IssueGrant(request)) else { panic!("no grant") };
        let run = support::run_request("alice", Authority::Grant(token), limits());
        broker.open(run).unwrap().0
    };
    let public = format!("/url^={}", at("/public/"));
    let mut worker = narrowed(std::slice::from_ref(&public));
    let (code, said) =
        worker.call("http.fetch", &json!({"method": "GET", "url": at("/public/in")}));
    assert_eq!((code, &said["body"]), (None, &json!("/public/seen")), "{said}");
    for path in ["/public/out", "/public/later"] {
        let (code, why) = worker.call("http.fetch", &json!({"method": "GET", "url": at(path)}));
        assert_eq!((code, &why["code"]), (Some(CallCode::ToolFailed), &json!("not_allowed")));
        let told = why["error"].as_str().unwrap();
        let place = format!("leads to {}, where this run's grant does not", at("/admin/users"));
        assert!(told.contains(&place) && told.contains(&public), "{told}");
        assert!(!told.contains("key=k"), "{told}");
    }
    // A redirect that changes the method is held against what is said of that.
    let mut worker = narrowed(&["/method=\"POST\"".to_owned()]);
    let (code, why) =
        worker.call("http.fetch", &json!({"method": "POST", "url": at("/public/done")}));
    assert_eq!((code, &why["code"]), (Some(CallCode::ToolFailed), &json!("redirect_failed")));
    assert!(why["error"].as_str().unwrap().contains("what it did stands"), "{why}");
    let heard = server.heard();
    let paths: Vec<&str> = heard.iter().map(|head| head.split(' ').nth(1).unwrap()).collect();
    let expected = [
        "/public/in",
        "/public/seen",
        "/public/out",
        "/public/later",
        "/public/out",
        "/public/done",
    ];
    assert_eq!(paths, expected);
}

#[test]
fn no_spelling_of_a_url_leads_out_of_the_grants_constraints() {
    let server = Server::new(|head| ok(head.split(' ').nth(1).unwrap().as_bytes()));
    let mut broker = Broker::with_forge_toml(&with_canary(server.port));
    let origin = format!("http://127.0.0.1:{}", server.port);
    let request = GrantRequest {
        constraints: vec![format!("http.fetch:/url=~{origin}/public/.*")],
        ..support::grant_request(&["http.fetch"])
    };
    let Reply::Grant(token) = broker.ask(&Ask::IssueGrant(request)) else { panic!("no grant") };
    let run = support::run_request("alice", Authority::Grant(token), limits());
    let mut worker = broker.open(run).unwrap().0;
    for rest in ["../private", "%2e%2e/private", ".%2E/private", "..?a", "x#y", "a/./b"] {
        let url = format!("{origin}/public/{rest}");
        let (code, why) = worker.call("http.fetch", &json!({"method": "GET", "url": url}));
        let expected = (Some(CallCode::ToolFailed), &json!("not_allowed"));
        assert_eq!((code, &why["code"]), expected, "{rest}: {why}");
    }
    assert_eq!(server.heard(), Vec::<String>::new());
    let url = format!("{origin}/public/a?../b");
    let (code, said) = worker.call("http.fetch", &json!({"method": "GET", "url": url}));
    assert_eq!((code, &said["body"]), (None, &json!("/public/a?../b")), "{said}");
}

#[test]
fn a_program_fetches_what_a_rule_allows_with_a_credential_it_never_sees() {
    let server = Server::new(|head| {
        let token = head.split("Bearer ").nth(1).unwrap_or_default().lines().next().unwrap();
        ok(format!("you are {token}").as_bytes())
    });
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {}, \
         path_prefix = '/v1/', addresses = ['127.0.0.1'], \
         headers = {{ Authorization = {{ prefix = 'Bearer ', from_env = 'CANARY' }} }} }}]",
        server.port
    ));
    let mut worker = broker.run(&["http.fetch"], limits());
    let url = |path: &str| format!("http://127.0.0.1:{}{path}", server.port);
    let (code, said) = worker.call("http.fetch", &json!({"method": "GET", "url": url("/v1/a")}));
    assert_eq!(code, None, "{said}");
    assert_eq!(said["status"], 200);
    assert_eq!(said["body"], "you are [credential removed]");
    assert!(server.heard()[0].contains(CANARY));
    for (path, method, expected) in [
        ("/admin", "GET", CallCode::ToolFailed),
        ("/v1/..%2fadmin", "GET", CallCode::ToolFailed),
        ("/v1/a", "POST", CallCode::BadRequest),
    ] {
        let (code, why) = worker.call("http.fetch", &json!({"method": method, "url": url(path)}));
        assert_eq!(code, Some(expected), "{path} {why}");
    }
    assert_eq!(server.heard().len(), 1);
    drop(worker);
    let (status, log) = broker.finish();
    assert!(status.success() && !log.contains(CANARY));
}

#[test]
fn attack_20_what_a_rule_sends_is_removed_however_it_comes_back_and_the_call_is_flagged() {
    let hex: String = CANARY.bytes().map(|byte| format!("{byte:02x}")).collect();
    let base64 = base64::engine::general_purpose::STANDARD.encode(format!("user:{CANARY}"));
    let percent: String = CANARY.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let answers = [CANARY.to_owned(), hex.clone(), base64.clone(), percent.clone()];
    let token = format!("ghp_{}", "A1b2".repeat(9));
    let server = Server::new(move |head| {
        let at = head.split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
        let said = answers.get(at.parse::<usize>().unwrap_or(9)).cloned().unwrap_or_default();
        match at.as_str() {
            "header" => answer("200 OK", &format!("ETag: \"{CANARY}\"\r\n"), b"x"),
            "bytes" => ok(&[b"\xff\xfe", CANARY.as_bytes(), b"\xff"].concat()),
            "token" => ok(&[b"\xff\xfe", token.as_bytes(), b"\xff"].concat()),
            "clean" => ok(b"nothing"),
            _ => ok(said.as_bytes()),
        }
    });
    let test = support::test_server();
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {}, \
         addresses = ['127.0.0.1'], \
         headers = {{ Authorization = {{ prefix = 'Bearer ', from_env = 'CANARY' }} }} }}]\n\
         [servers.other]\ncommand = {test:?}",
        server.port
    ));
    let mut worker = broker.run(&["http.fetch", "other.echo"], limits());
    for (at, redacted) in [
        ("0", true),
        ("1", true),
        ("2", true),
        ("3", true),
        ("header", true),
        ("bytes", true),
        ("token", true),
        ("clean", false),
    ] {
        let url = format!("http://127.0.0.1:{}/{at}", server.port);
        worker.send("http.fetch", json!({"method": "GET", "url": url}).to_string().as_bytes());
        let settled = worker.settled();
        let said = String::from_utf8(settled.body).unwrap();
        assert_eq!((settled.code, settled.redacted), (None, redacted), "{at}: {said}");
        for spelled in [CANARY, &hex, &base64[8..30], &percent] {
            assert!(!said.contains(spelled), "{at}: {said}");
        }
    }
    // A server that has come by it does not tell it either.
    let (_, said) = worker.call("other.echo", &json!({ "text": hex }));
    assert_eq!(said["text"], "[credential removed]");
}

#[test]
fn localhost_is_refused_by_the_systems_resolver_too_unless_its_address_is_allowed() {
    let server = Server::new(|_| ok(b"inside"));
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = 'localhost', port = {} }}]",
        server.port
    ));
    let mut worker = broker.run(&["http.fetch"], limits());
    let url = format!("http://localhost:{}/", server.port);
    let (code, why) = worker.call("http.fetch", &json!({"method": "GET", "url": url}));
    assert_eq!(code, Some(CallCode::ToolFailed), "{why}");
    assert_eq!(why["code"], "address_not_allowed");
    assert!(server.heard().is_empty());
}

#[test]
fn a_proxy_in_the_environment_is_not_used() {
    let proxy = Server::new(|_| ok(b"proxied"));
    let server = Server::new(|_| ok(b"direct"));
    let text = format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {}, \
         addresses = ['127.0.0.1'] }}]",
        server.port
    );
    let at = format!("http://127.0.0.1:{}", proxy.port);
    let environment = [("http_proxy", at.as_str()), ("HTTP_PROXY", &at), ("ALL_PROXY", &at)];
    let mut broker = Broker::with_forge_toml_and(&text, &environment);
    let mut worker = broker.run(&["http.fetch"], limits());
    let url = format!("http://127.0.0.1:{}/", server.port);
    let (code, said) = worker.call("http.fetch", &json!({"method": "GET", "url": url}));
    assert_eq!((code, said["body"].as_str()), (None, Some("direct")));
    assert!(proxy.heard().is_empty());
}

#[test]
fn a_post_that_is_not_answered_in_time_is_told_so_and_its_outcome_is_unknown() {
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let server = Server::serving(move |_, _| {
        let _ = gate.lock().unwrap().recv_timeout(support::PATIENCE);
    });
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.http]\ntimeout_ms = 300\nallow = [{{ scheme = 'http', host = '127.0.0.1', \
         port = {}, methods = ['POST'], addresses = ['127.0.0.1'] }}]",
        server.port
    ));
    let mut worker = broker.run(&["http.fetch"], limits());
    let url = format!("http://127.0.0.1:{}/", server.port);
    let (code, told) = worker.call("http.fetch", &json!({"method": "POST", "url": url}));
    assert_eq!(code, Some(CallCode::OutcomeUnknown));
    let error = told["error"].as_str().unwrap();
    assert!(error.contains("within 300 ms") && error.contains("may have done"), "{error}");
    release.send(()).unwrap();
}

#[test]
fn a_call_that_waits_holds_up_no_other_and_ends_with_its_run() {
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let server = Server::serving(move |mut stream, _| {
        let _ = gate.lock().unwrap().recv_timeout(support::PATIENCE);
        let _ = stream.write_all(&ok(b"late"));
    });
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {}, \
         addresses = ['127.0.0.1'] }}]",
        server.port
    ));
    let mut worker = broker.run(&["http.fetch", "crypto.hash"], limits());
    let asked = json!({"method": "GET", "url": format!("http://127.0.0.1:{}/", server.port)});
    let waiting = worker.send("http.fetch", asked.to_string().as_bytes());
    let hash = json!({"algorithm": "sha256", "text": "abc"}).to_string();
    let quick = worker.send("crypto.hash", hash.as_bytes());
    assert_eq!(worker.settled().id, quick);
    release.send(()).unwrap();
    let settled = worker.settled();
    assert_eq!((settled.id, settled.code), (waiting, None));

    let short = RunLimits { wall_ms: 2_000, ..limits() };
    let mut worker = broker.run(&["http.fetch"], short);
    let (code, _) = worker.call("http.fetch", &asked);
    assert_eq!(code, Some(CallCode::OutcomeUnknown));
    release.send(()).unwrap();
}
