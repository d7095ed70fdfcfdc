//! Runs: submitted, waited for or followed, asked for, cancelled.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use forge_client::{Run, RunMessage};
use forge_protocol::ending::{Refusal, RunEnd};
use forge_protocol::service::{Finish, Order, RunEvent};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::access::Bearer;
use super::events::{End, Ended, Events, Happened, Next, happened};
use super::key::Keyed;
use super::order::{self, Asked, RUN_BYTES_MAX};
use super::problem::Problem;
use super::tenant::{Kept, Tenant, Under};
use super::{Caller, Door, Feed, Named, answer_json, read_body};
use crate::web::is_set;

/// After how long a silent stream of events says that it is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(15);
/// Events of one stream that may wait to be sent.
const UNSENT_MAX: usize = 16;

/// `POST /v1/runs`
pub(crate) async fn submit(
    State(door): State<Arc<Door>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let (body, room) = read_body(&caller.tenant, &parts.headers, body, RUN_BYTES_MAX).await?;
    let Asked { order, wait } = order::read(&parts.headers, body, &caller.tenant.name).await?;
    match Keyed::read(&parts.headers, &order)? {
        Some(keyed) => once(door, caller, keyed, order, room, wait).await,
        None if wait => waited(&door, &caller, order, room).await,
        None => taken(&*begun(&door, &caller, order, room).await?),
    }
}

/// Answers with the run that is under this key, which begins now if there is none. It is
/// not its client's leaving that cancels it: who lost the answer asks again.
async fn once(
    door: Arc<Door>,
    caller: Caller,
    keyed: Keyed,
    order: Order,
    room: OwnedSemaphorePermit,
    wait: bool,
) -> Result<Response, Problem> {
    let kept = match caller.tenant.under(keyed)? {
        Under::Run(kept) => kept,
        Under::Nothing(claim) => {
            let caller = caller.clone();
            // Whoever leaves while it begins does not know whether it has.
            let beginning = tokio::spawn(async move {
                let kept = begun(&door, &caller, order, room).await?;
                claim.bind(&kept);
                Ok::<_, Problem>(kept)
            });
            beginning.await.map_err(|_| Problem::lost())??
        }
    };
    if !wait {
        return taken(&kept);
    }
    let mut changes = kept.events.subscribe();
    while kept.events.ended().is_none() && changes.changed().await.is_ok() {}
    took_no_place(&kept).map_or_else(|| standing(&kept), Err)
}

/// Answers with the report. Dropped before, the run is cancelled: that is
/// what becomes of this when the client goes away.
async fn waited(
    door: &Door,
    caller: &Caller,
    order: Order,
    room: OwnedSemaphorePermit,
) -> Result<Response, Problem> {
    let number = caller.tenant.number()?;
    let mut run = door.client.submit_holding(&order, number).await?;
    drop((order, room));
    while let Some(message) = run.next().await {
        if let RunMessage::Finished(finish) = message {
            let events = Events::default();
            let kept = over(&caller.tenant, events, finish)?;
            return took_no_place(&kept).map_or_else(|| standing(&kept), Err);
        }
    }
    Err(Problem::lost())
}

/// A run that nobody waits for, as soon as it is admitted or over.
async fn begun(
    door: &Door,
    caller: &Caller,
    order: Order,
    room: OwnedSemaphorePermit,
) -> Result<Arc<Kept>, Problem> {
    let (slot, number) = (caller.tenant.run()?, caller.tenant.number()?);
    let order = Order { events: true, ..order };
    let mut run = door.client.submit_holding(&order, number).await?;
    drop(room);
    let events = Events::default();
    let id = loop {
        match run.next().await.ok_or_else(Problem::lost)? {
            RunMessage::Event(event) => {
                events.push(happened(&event));
                if let RunEvent::Admitted { run_id } = event {
                    break run_id.to_string();
                }
            }
            RunMessage::Callback(_) => {}
            RunMessage::Finished(finish) => {
                let kept = over(&caller.tenant, events, finish)?;
                return took_no_place(&kept).map_or(Ok(kept), Err);
            }
        }
    };
    let canceller = Some(run.canceller());
    let kept = Arc::new(Kept { id, canceller, events });
    caller.tenant.keep(Arc::clone(&kept));
    let follower = Follower {
        run,
        kept: Arc::clone(&kept),
        tenant: Arc::clone(&caller.tenant),
        bearer: caller.bearer.clone(),
        _slot: slot,
    };
    tokio::spawn(follower.follow());
    Ok(kept)
}

/// A run that nobody waits for.
struct Follower {
    run: Run,
    kept: Arc<Kept>,
    tenant: Arc<Tenant>,
    bearer: Bearer,
    _slot: OwnedSemaphorePermit,
}

impl Follower {
    /// Keeps what happens in it until it is over. It is cancelled with the token
    /// that asked for it: its end comes all the same.
    async fn follow(mut self) {
        let mut end = None;
        let mut revoked = pin!(self.bearer.revoked());
        let mut is_cancelled = false;
        loop {
            let message = tokio::select! {
                message = self.run.next() => message,
                () = &mut revoked, if !is_cancelled => {
                    is_cancelled = true;
                    self.run.cancel().await;
                    continue;
                }
            };
            match message {
                Some(RunMessage::Event(event)) => self.kept.events.push(happened(&event)),
                // It hosts no tools.
                Some(RunMessage::Callback(_)) => {}
                Some(RunMessage::Finished(finish)) => end = End::of(finish),
                None => break,
            }
        }
        self::end(&self.tenant, &self.kept, end);
    }
}

/// Takes note of how a kept run ended, or that this will not be known.
pub(crate) fn end(tenant: &Tenant, kept: &Kept, end: Option<End>) {
    match end {
        Some(end) => kept.events.end(end),
        None => kept.events.lose(),
    }
    tenant.ended(kept, Instant::now());
}

/// Keeps a run that is over already, if it took place: what was refused, however
/// often, must not push out the ends of runs.
pub(crate) fn over(tenant: &Tenant, events: Events, finish: Finish) -> Result<Arc<Kept>, Problem> {
    let end = End::of(finish).ok_or_else(Problem::lost)?;
    let (id, took_place) = (end.head.run_id.clone(), refusal(&end).is_none());
    events.end(end);
    let kept = Arc::new(Kept { id, canceller: None, events });
    if took_place {
        tenant.keep(Arc::clone(&kept));
        tenant.ended(&kept, Instant::now());
    }
    Ok(kept)
}

/// Why a run that was over at once did not take place: it had no room or no host. `None`
/// if it did.
pub(crate) fn took_no_place(kept: &Kept) -> Option<Problem> {
    match kept.events.ended() {
        Some(Ended::Reported(end)) => refused(&end),
        _ => None,
    }
}

/// To one that was taken: how it stands, and where that is told from now on.
fn taken(kept: &Kept) -> Result<Response, Problem> {
    let status = match kept.events.ended() {
        None => "running".to_owned(),
        Some(Ended::Reported(end)) => end.head.status.clone(),
        Some(Ended::Lost) => return Err(Problem::lost()),
    };
    Ok(running_or_ended(StatusCode::ACCEPTED, kept, &status))
}

/// How a run stands: its report, once it has one.
fn standing(kept: &Kept) -> Result<Response, Problem> {
    let end = match kept.events.ended() {
        None => return Ok(running_or_ended(StatusCode::OK, kept, "running")),
        Some(Ended::Reported(end)) => end,
        Some(Ended::Lost) => return Err(Problem::lost()),
    };
    let json = HeaderValue::from_static("application/json");
    let mut response = ([(header::CONTENT_TYPE, json)], end.report.clone()).into_response();
    response.headers_mut().extend(place(header::CONTENT_LOCATION, kept));
    Ok(response)
}

fn running_or_ended(code: StatusCode, kept: &Kept, status: &str) -> Response {
    let mut response = answer_json(code, &json!({ "run_id": kept.id, "status": status }));
    response.headers_mut().extend(place(header::LOCATION, kept));
    response
}

/// Where a run is.
fn place(name: header::HeaderName, kept: &Kept) -> Option<(header::HeaderName, HeaderValue)> {
    HeaderValue::try_from(format!("/v1/runs/{}", kept.id)).ok().map(|value| (name, value))
}

/// The status of a run that did not take place, if it did not. One that has
/// made calls did, whatever its host refused after that.
fn refusal(end: &End) -> Option<StatusCode> {
    if !end.head.tool_calls.is_empty() {
        return None;
    }
    match RunEnd::of_kind(&end.head.kind)? {
        RunEnd::Refused(Refusal::Overloaded | Refusal::TooManyRuns) => {
            Some(StatusCode::TOO_MANY_REQUESTS)
        }
        RunEnd::Refused(Refusal::Draining | Refusal::BrokerAway | Refusal::ServerAway)
        | RunEnd::Unavailable(_) => Some(StatusCode::SERVICE_UNAVAILABLE),
        _ => None,
    }
}

/// Why it did not.
fn refused(end: &End) -> Option<Problem> {
    let status = refusal(end)?;
    let problem = Problem::new(status, &end.head.kind, end.head.reason.clone());
    Some(problem.with_report(end))
}

/// `GET /v1/runs`
pub(crate) async fn list(caller: Caller) -> Response {
    let described = |(kept, key): (Arc<Kept>, Option<String>)| {
        let status = match kept.events.ended() {
            None => "running".to_owned(),
            Some(Ended::Reported(end)) => end.head.status.clone(),
            Some(Ended::Lost) => "lost".to_owned(),
        };
        let mut run = json!({ "run_id": kept.id, "status": status });
        if let Some(key) = key {
            run["idempotency_key"] = key.into();
        }
        run
    };
    let runs: Vec<_> = caller.tenant.all().into_iter().map(described).collect();
    answer_json(StatusCode::OK, &json!({ "runs": runs }))
}

/// `GET /v1/runs/{id}`
pub(crate) async fn state(caller: Caller, Named(id): Named<String>) -> Result<Response, Problem> {
    standing(&*caller.tenant.find(&id)?)
}

/// `DELETE /v1/runs/{id}`
pub(crate) async fn cancel(caller: Caller, Named(id): Named<String>) -> Result<Response, Problem> {
    let kept = caller.tenant.find(&id)?;
    if kept.events.ended().is_none()
        && let Some(canceller) = &kept.canceller
    {
        canceller.cancel().await;
        return taken(&kept);
    }
    standing(&kept)
}

/// `GET /v1/runs/{id}/artifacts/{n}`
pub(crate) async fn artifact(
    caller: Caller,
    Named((id, number)): Named<(String, String)>,
) -> Result<Response, Problem> {
    let kept = caller.tenant.find(&id)?;
    let missing = |what: &str| Problem::not_found(what);
    let ended = kept.events.ended().ok_or_else(|| missing("the run is not over"))?;
    let Ended::Reported(end) = ended else { return Err(Problem::lost()) };
    let missing_artifact = || missing("the run left no such artifact");
    let plain = number.parse::<usize>().ok().filter(|it| it.to_string() == number);
    let number = plain.ok_or_else(missing_artifact)?;
    let artifact = end.artifacts.get(number).ok_or_else(missing_artifact)?;
    let headers = [
        (header::CONTENT_TYPE, media_type(&artifact.media_type)),
        (header::CONTENT_DISPOSITION, HeaderValue::try_from(saved_as(&artifact.file_name)).ok()),
        (
            header::CONTENT_SECURITY_POLICY,
            Some(HeaderValue::from_static("sandbox; default-src 'none'")),
        ),
    ];
    let mut response = artifact.content.clone().into_response();
    for (name, value) in headers {
        if let Some(value) = value {
            response.headers_mut().insert(name, value);
        }
    }
    Ok(response)
}

/// Has a browser save it under this name (RFC 6266): twice, where it is not of ASCII.
fn saved_as(file_name: &str) -> String {
    let ascii: String = file_name.chars().map(|c| if c.is_ascii() { c } else { '_' }).collect();
    let mut said = format!("attachment; filename=\"{ascii}\"");
    if !file_name.is_ascii() {
        said.push_str("; filename*=UTF-8''");
        for byte in file_name.bytes() {
            match byte {
                b'.' | b'_' | b'-' => said.push(byte.into()),
                _ if byte.is_ascii_alphanumeric() => said.push(byte.into()),
                _ => said.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    said
}

/// A program's media type if it is a plain one, else that of bytes.
fn media_type(said: &str) -> Option<HeaderValue> {
    let is_plain = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || ".+-".contains(c))
    };
    let plain = said.split_once('/').is_some_and(|(kind, sub)| is_plain(kind) && is_plain(sub));
    HeaderValue::from_str(if plain { said } else { "application/octet-stream" }).ok()
}

/// `GET /v1/runs/{id}/events`
pub(crate) async fn events(
    State(door): State<Arc<Door>>,
    caller: Caller,
    Named(id): Named<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let kept = caller.tenant.find(&id)?;
    // An `EventSource` has no id yet, or one that was taken back.
    let last = match headers.get("last-event-id") {
        None => 0,
        Some(value) if value.is_empty() => 0,
        Some(value) => value.to_str().ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
            Problem::bad_request("Last-Event-ID is the id of an event of this run: a number")
        })?,
    };
    if let Next::End(number, _) = kept.events.after(last)
        && last == number
    {
        // It has the end already. By anything else an `EventSource` would come back
        // for it again and again.
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let (sender, receiver) = mpsc::channel(UNSENT_MAX);
    tokio::spawn(stream(kept, last, sender, door, caller.bearer.clone()));
    // The second for nginx, which holds an answer back until it is whole.
    let head = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((head, Body::from_stream(Feed(receiver))).into_response())
}

/// Sends a run's events until its end, or until nobody takes them or may.
async fn stream(
    kept: Arc<Kept>,
    mut last: u64,
    sender: mpsc::Sender<Bytes>,
    door: Arc<Door>,
    bearer: Bearer,
) {
    let mut changed = kept.events.subscribe();
    let mut closing = door.closing.subscribe();
    let mut closes_at = None;
    loop {
        match kept.events.after(last) {
            Next::Events { missed, first, events } => {
                if missed > 0 {
                    let missed =
                        Happened { name: "missed", data: json!({ "events": missed }).to_string() };
                    if sender.send(line(first - 1, &missed)).await.is_err() {
                        return;
                    }
                }
                last = first - 1;
                for event in events {
                    last += 1;
                    if sender.send(line(last, &event)).await.is_err() {
                        return;
                    }
                }
            }
            Next::End(number, Ended::Reported(end)) => {
                for piece in last_line(number, &end) {
                    if sender.send(piece).await.is_err() {
                        return;
                    }
                }
                return;
            }
            Next::End(_, Ended::Lost) => return,
            Next::Wait => {
                let sent = tokio::select! {
                    _ = changed.changed() => Ok(()),
                    () = tokio::time::sleep(ALIVE_EVERY) => {
                        sender.send(Bytes::from_static(b": alive\n\n")).await
                    }
                    () = sender.closed() => return,
                    () = bearer.revoked() => return,
                    () = is_set(&mut closing), if closes_at.is_none() => {
                        closes_at = Some(tokio::time::Instant::now() + LAST_WORD_TIME_MAX);
                        Ok(())
                    }
                    () = at(closes_at) => return,
                };
                if sent.is_err() {
                    return;
                }
            }
        }
    }
}

/// How long a door that closes waits for the end of a run: its service tells it with its
/// own end, and the report is nowhere else.
const LAST_WORD_TIME_MAX: Duration = Duration::from_secs(4);

/// That this moment has come, if there is one.
async fn at(moment: Option<tokio::time::Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// One event as it is sent. Its data is JSON, which has no line breaks.
fn line(number: u64, event: &Happened) -> Bytes {
    let Happened { name, data } = event;
    format!("id: {number}\nevent: {name}\ndata: {data}\n\n").into()
}

/// The last event, around the report as it is kept: that may be large, and its
/// followers many.
fn last_line(number: u64, end: &End) -> [Bytes; 3] {
    let head = format!("id: {number}\nevent: finished\ndata: ");
    [head.into(), end.report.clone(), Bytes::from_static(b"\n\n")]
}

#[cfg(test)]
mod tests {
    use forge_protocol::run::Artifact;

    use super::*;
    use crate::http::tenant::Tenants;

    #[test]
    fn an_artifacts_type_cannot_leave_its_header() {
        for (said, expected) in [
            ("text/csv", "text/csv"),
            ("text/html; charset=utf-7", "application/octet-stream"),
            ("text", "application/octet-stream"),
            ("a/b\r\nX: y", "application/octet-stream"),
            ("", "application/octet-stream"),
        ] {
            assert_eq!(media_type(said).unwrap(), expected, "{said:?}");
        }
    }

    fn finish(status: &str, kind: &str) -> Finish {
        let report = json!({ "run_id": "1", "status": status, "kind": kind, "reason": "why" });
        Finish { report: report.to_string().into(), artifacts: Vec::new() }
    }

    #[test]
    fn a_run_that_did_not_take_place_is_a_problem_and_any_other_end_is_none() {
        for end in RunEnd::all() {
            let expected = match end.kind() {
                "overloaded" | "too_many_runs" => Some(429),
                "draining" | "broker_away" | "server_away" | "kvm" | "host" => Some(503),
                _ => None,
            };
            let finish = finish(end.status().as_str(), end.kind());
            let problem = refused(&End::of(finish).unwrap());
            assert_eq!(problem.map(|it| it.body().status()), expected, "{end:?}");
        }
    }

    fn left(contents: &[&'static [u8]]) -> Finish {
        let artifact = |content: &&[u8]| Artifact {
            name: "x".into(),
            media_type: "text/csv".into(),
            content: content.to_vec(),
        };
        Finish { artifacts: contents.iter().map(artifact).collect(), ..finish("ok", "") }
    }

    #[test]
    fn who_takes_a_report_takes_what_is_kept() {
        let end = End::of(finish("ok", "")).unwrap();
        let [head, report, tail] = last_line(4, &end);
        assert_eq!((&*head, &*tail), (&b"id: 4\nevent: finished\ndata: "[..], &b"\n\n"[..]));
        assert_eq!(report.as_ptr(), end.report.as_ptr());
    }

    #[tokio::test]
    async fn who_takes_an_artifact_takes_what_is_kept_and_keeps_nothing_beside_it() {
        let tenant = Tenants::default().named("a".into());
        let finish = left(&[b"1,2", b"3,4"]);
        let kept_at = finish.artifacts[1].content.as_ptr();
        let kept = over(&tenant, Events::default(), finish).unwrap();
        let ask = |number: &str| {
            let permit = Arc::new(tenant.request().unwrap());
            let bearer = Bearer::anybodys("a");
            let caller = Caller { tenant: Arc::clone(&tenant), permit, bearer };
            artifact(caller, Named((kept.id.clone(), number.to_owned())))
        };
        assert!(ask("2").await.is_err());
        let response = ask("1").await.unwrap();
        let Some(Ended::Reported(end)) = kept.events.ended() else { panic!("it is over") };
        let whole = Arc::downgrade(&end);
        drop((kept, tenant, end));
        assert!(whole.upgrade().is_none(), "the whole end waits for one artifact's reader");
        let content = axum::body::to_bytes(response.into_body(), 3).await.unwrap();
        assert_eq!((&*content, content.as_ptr()), (&b"3,4"[..], kept_at));
    }

    #[test]
    fn who_is_refused_is_told_to_come_again_when_the_report_says() {
        for (said, seconds) in [
            (json!(null), "1"),
            (json!(0), "1"),
            (json!(1), "1"),
            (json!(1001), "2"),
            (json!(10_000), "10"),
        ] {
            let mut finish = finish("refused", "too_many_runs");
            let mut report: serde_json::Value = serde_json::from_slice(&finish.report).unwrap();
            report["retry_after_ms"] = said;
            finish.report = report.to_string().into();
            let answer = refused(&End::of(finish).unwrap()).unwrap().into_response();
            assert_eq!(answer.headers()[header::RETRY_AFTER], seconds);
        }
        let none = refused(&End::of(finish("refused", "draining")).unwrap()).unwrap();
        assert_eq!(none.into_response().headers()[header::RETRY_AFTER], "1");
    }

    #[test]
    fn a_key_whose_run_had_no_host_after_all_is_free_and_another_is_not() {
        let tenant = Tenants::default().named("a".into());
        let keyed = |order: u8| Keyed { key: "k".into(), order_sha256: [order; 32] };
        let begins = |status: &str, kind: &str| {
            let Ok(Under::Nothing(claim)) = tenant.under(keyed(1)) else {
                panic!("the key is free");
            };
            assert_eq!(tenant.under(keyed(1)).unwrap_err().body().kind(), "in_progress");
            let (id, events) = (status.to_owned(), Events::default());
            let kept = Arc::new(Kept { id, canceller: None, events });
            tenant.keep(Arc::clone(&kept));
            claim.bind(&kept);
            assert!(matches!(tenant.under(keyed(1)), Ok(Under::Run(run)) if run.id == status));
            end(&tenant, &kept, End::of(finish(status, kind)));
        };
        begins("unavailable", "kvm");
        drop(tenant.under(keyed(1)).unwrap());
        begins("ok", "");
        assert!(matches!(tenant.under(keyed(1)), Ok(Under::Run(run)) if run.id == "ok"));
        assert_eq!(tenant.under(keyed(2)).unwrap_err().body().kind(), "key_reused");
        let listed: Vec<_> = tenant.all().into_iter().map(|(kept, _)| kept.id.clone()).collect();
        assert_eq!(listed, ["ok", "unavailable"]);
    }

    #[test]
    fn a_run_that_did_not_take_place_is_kept_for_nobody() {
        for (status, kind, answered) in [
            ("refused", "too_many_runs", None),
            ("unavailable", "kvm", None),
            ("trap", "x", Some(200)),
        ] {
            let tenant = Tenants::default().named("a".into());
            let over = over(&tenant, Events::default(), finish(status, kind)).unwrap();
            let found = tenant.find(&over.id).ok();
            assert_eq!(found.is_some(), answered.is_some(), "{status}");
            let answer = took_no_place(&over).map_or_else(|| standing(&over), Err);
            assert_eq!(answer.ok().map(|it| it.status().as_u16()), answered, "{status}");
        }
    }

    #[test]
    fn a_run_that_has_called_took_place_whatever_it_was_refused_after_that() {
        let ends = |calls: serde_json::Value| {
            let mut finish = finish("refused", "broker_away");
            let mut report: serde_json::Value = serde_json::from_slice(&finish.report).unwrap();
            report["tool_calls"] = calls;
            finish.report = report.to_string().into();
            let tenant = Tenants::default().named("a".into());
            let over = over(&tenant, Events::default(), finish).unwrap();
            (took_no_place(&over).is_none(), tenant.find(&over.id).is_ok())
        };
        assert_eq!(ends(json!([])), (false, false));
        assert_eq!(ends(json!([{ "id": 0 }])), (true, true));
    }

    #[tokio::test]
    async fn an_artifact_has_one_number() {
        let tenant = Tenants::default().named("a".into());
        let kept = over(&tenant, Events::default(), left(&[b"1", b"2"])).unwrap();
        for (number, is_one) in [("1", true), ("01", false), ("+1", false), ("-1", false)] {
            let permit = Arc::new(tenant.request().unwrap());
            let bearer = Bearer::anybodys("a");
            let caller = Caller { tenant: Arc::clone(&tenant), permit, bearer };
            let asked = artifact(caller, Named((kept.id.clone(), number.to_owned()))).await;
            assert_eq!(asked.is_ok(), is_one, "{number}");
        }
    }
}
