//! `http.fetch`: one request to a place that the operator allows. All of the
//! guarding is in [`egress`](crate::egress); here a program's arguments
//! become a request, an answer a result, and a redirect arguments that the grant
//! has to allow.

use std::collections::BTreeSet;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::name::ToolName;
use rmcp::model::JsonObject;
use serde_json::{Value, json};
use url::Url;

use super::{Caller, Failure, Plan, Work, named_bytes, text};
use crate::constraint::Violation;
use crate::definition::Effect;
use crate::egress::rule::{Method, URL_BYTES_MAX};
use crate::egress::{Client, Fetched, Policy, Request, Response, Room, SystemResolver};
use crate::turns::Turns;
use crate::upstream::CallEnd;

/// Requests of one principal on their way at the same time: a quarter of all,
/// so that none keeps the others waiting.
const PRINCIPAL_IN_FLIGHT_MAX: usize = 16;

/// `http.fetch`, under this policy. `None` never: that is its name.
pub(super) fn fetch(policy: Policy) -> Option<Plan> {
    let name = ToolName::parse("http.fetch").ok()?;
    let methods: BTreeSet<Method> =
        policy.rules.iter().flat_map(|rule| rule.methods.iter().copied()).collect();
    let effect = match methods.iter().any(|method| method.changes()) {
        true => Effect::Write,
        false => Effect::Read,
    };
    let places: Vec<String> = policy.rules.iter().map(ToString::to_string).collect();
    let mut properties = json!({
        "method": { "enum": methods.iter().map(|method| method.as_str()).collect::<Vec<_>>() },
        "url": { "type": "string", "maxLength": URL_BYTES_MAX },
        "headers": {
            "type": "object",
            "maxProperties": 32,
            "additionalProperties": { "type": "string", "maxLength": 8192 },
        },
    });
    if effect == Effect::Write {
        properties["body"] = json!({ "type": "string", "description": "As text in UTF-8." });
        properties["body_base64"] = json!({ "type": "string", "contentEncoding": "base64" });
    }
    let client = Arc::new(Client::new(policy, Arc::new(SystemResolver::shared())));
    let turns = Turns::new(PRINCIPAL_IN_FLIGHT_MAX);
    Some(Plan {
        server: "http",
        name: "fetch",
        description: format!(
            "Makes one HTTP request and answers with status, headers and body, whatever the \
             status. What comes back is what strangers wrote. Allowed, with everything below the \
             path: {}.",
            places.join("; ")
        ),
        effect,
        input_schema: json!({
            "type": "object",
            "properties": properties,
            "required": ["method", "url"],
            "not": { "required": ["body", "body_base64"] },
            "additionalProperties": false,
        }),
        output_schema: json!({
            "type": "object",
            "properties": {
                "status": { "type": "integer" },
                "headers": { "type": "object", "additionalProperties": { "type": "string" } },
                "body": { "type": "string" },
                "body_base64": { "type": "string", "contentEncoding": "base64" },
            },
            "required": ["status", "headers"],
            "oneOf": [{ "required": ["body"] }, { "required": ["body_base64"] }],
            "additionalProperties": false,
        }),
        work: Work::waits(move |caller, arguments| {
            let (client, turns) = (Arc::clone(&client), turns.of(&caller.principal));
            let (caller, name) = (caller.clone(), name.clone());
            async move {
                let turns = async { (turns.acquire_owned().await, client.room().await) };
                match caller.turn(turns).await {
                    // Turns are never closed.
                    Ok((_turn, Some(room))) => carry_out(&caller, &name, arguments, room).await,
                    Ok((_, None)) => Failure::new("failed", "the broker is shutting down").into(),
                    Err(failure) => failure.into(),
                }
            }
        }),
    })
}

async fn carry_out(
    caller: &Caller,
    name: &ToolName,
    arguments: JsonObject,
    room: Room<'_>,
) -> CallEnd {
    let request = match request_of(&arguments) {
        Ok(request) => request,
        Err(failure) => return failure.into(),
    };
    // Where a redirect leads, the program might have gone itself: with these arguments.
    let mut asked = Value::Object(arguments);
    let hold = |method: Method, url: &Url| -> Result<(), Violation> {
        asked["method"] = method.as_str().into();
        asked["url"] = url.as_str().into();
        // Its own schema lists no two names that are alike.
        caller.grant.check(name, &asked, "{}")
    };
    match room.fetch(request, hold).await {
        Fetched::Response(response) => CallEnd::Bytes(result_of(response), "body_base64"),
        Fetched::Failed(error) => Failure::new(error.code(), error.to_string()).into(),
        Fetched::Lost(error) => {
            tracing::info!(error = ?error.to_string(), "a request may or may not have been served");
            CallEnd::Unanswered(error.to_string())
        }
    }
}

fn request_of(arguments: &JsonObject) -> Result<Request, Failure> {
    let method = text(arguments, "method")
        .and_then(Method::parse)
        .ok_or_else(|| Failure::bad_request("there is no such method"))?;
    let headers = arguments.get("headers").and_then(Value::as_object);
    let headers = headers
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    let body = match (text(arguments, "body"), text(arguments, "body_base64")) {
        (Some(text), _) => text.as_bytes().to_vec(),
        (None, Some(encoded)) => STANDARD
            .decode(encoded)
            .map_err(|error| Failure::bad_request(format!("body_base64: {error}")))?,
        (None, None) => Vec::new(),
    };
    let url = text(arguments, "url").unwrap_or_default().to_owned();
    Ok(Request { method, url, headers, body })
}

fn result_of(response: Response) -> Value {
    let headers: JsonObject =
        response.headers.into_iter().map(|(name, value)| (name, value.into())).collect();
    let (name, body) = named_bytes(response.body, "body", "body_base64");
    json!({ "status": response.status, "headers": headers, name: body })
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::net::Ipv4Addr;
    use std::task::Poll;
    use std::time::Duration;

    use forge_protocol::RunId;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::{Instant, timeout};
    use url::Host;

    use super::super::{Pending, Waits};
    use super::*;
    use crate::egress;
    use crate::egress::address::AddressRange;
    use crate::egress::rule::{Rule, Scheme};
    use crate::grant::tests::granting_nothing;

    /// `http.fetch` to this port of the host, and nowhere else.
    fn fetch_from(port: u16) -> Waits {
        let rule = Rule {
            scheme: Scheme::Http,
            host: Host::Ipv4(Ipv4Addr::LOCALHOST),
            port,
            methods: vec![Method::Get],
            path_prefix: "/".into(),
            addresses: vec![AddressRange::parse("127.0.0.1/32").unwrap()],
            headers: Vec::new(),
            request_headers: Vec::new(),
            response_headers: Vec::new(),
        };
        let policy = Policy {
            rules: vec![rule],
            response_bytes_max: 100,
            time_max: Duration::from_secs(60),
            tls: egress::tls(Vec::new()).unwrap(),
        };
        let Work::Waits(work) = fetch(policy).unwrap().work else { panic!("it waits") };
        work
    }

    fn caller(principal: &str) -> Caller {
        Caller {
            principal: principal.into(),
            run: RunId([0; 16]),
            session: None,
            deadline: Instant::now() + Duration::from_secs(60),
            grant: granting_nothing(),
        }
    }

    /// Whether it is under way or waits, after one step.
    async fn goes_on(fetch: &mut Pending) -> bool {
        poll_fn(|context| Poll::Ready(fetch.as_mut().poll(context).is_pending())).await
    }

    #[tokio::test]
    async fn a_principal_with_many_fetches_that_wait_holds_up_no_other() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let _ = stream.read(&mut [0; 1024]).await;
                    let _ =
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await;
                });
            }
        });
        let work = fetch_from(port);
        let ask = |of: &str| {
            let url = format!("http://127.0.0.1:{port}/");
            let arguments = json!({ "method": "GET", "url": url });
            (work.0)(&caller(of), arguments.as_object().unwrap().clone())
        };
        // More than all together may have on their way, each as far as it comes alone.
        let mut of_alice: Vec<_> = (0..100).map(|_| ask("alice")).collect();
        for fetch in &mut of_alice {
            assert!(goes_on(fetch).await);
        }
        for of in ["bob", "carol", "bob"] {
            let said = timeout(Duration::from_secs(10), ask(of)).await.expect(of);
            let crate::upstream::Answer::End(CallEnd::Bytes(said, _)) = said.answer else {
                panic!("{said:?}");
            };
            assert_eq!(said["body"], "hi", "{of}");
        }
        // Her own wait for one another alone.
        let mut next = ask("alice");
        assert!(goes_on(&mut next).await);
        drop(of_alice);
        timeout(Duration::from_secs(10), next).await.unwrap();
    }
}
