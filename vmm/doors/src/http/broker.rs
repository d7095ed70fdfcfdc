//! Tools and grants: questions that the service passes on to the broker.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::broker::{GrantClaims, GrantRequest, Narrowing, ToolSpec};
use forge_protocol::hex::hex;
use forge_protocol::limits::{
    CONSTRAINT_BYTES_MAX, CONSTRAINTS_MAX, FOUND_TOOLS_MAX, GRANT_BYTES_MAX, INTENT_BYTES_MAX,
    TOOL_NAME_BYTES_MAX,
};
use forge_protocol::name::ToolName;
use forge_protocol::service::{Question, Reply};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::order::{
    Tools, base64, bounded, check_principal, check_session, media_type, tools, unsupported,
};
use super::problem::Problem;
use super::{Caller, Door, answer_json, order, read_body};
use crate::integer;

/// A body of these questions, in bytes: a grant and constraints at most.
const BODY_BYTES_MAX: usize = 512 * 1024;
/// Tools that a search finds where nothing else is asked.
const FOUND_TOOLS: u32 = 5;
/// The last second that can be written as RFC 3339.
const LAST_UNIX_S: u64 = 253_402_300_799;

async fn read<T: DeserializeOwned>(caller: &Caller, request: Request) -> Result<T, Problem> {
    let (parts, body) = request.into_parts();
    if media_type(&parts.headers) != "application/json" {
        return Err(unsupported("application/json"));
    }
    let (body, _room) = read_body(&caller.tenant, &parts.headers, body, BODY_BYTES_MAX).await?;
    order::object("the body", &body)
}

/// Asks once there is a place among everybody's questions: in turn, so that
/// none who asks again and again is before others each time. Dropped before, as
/// it is when the caller leaves, the question is cancelled. The service has no
/// room for another until it has answered that too, and the place is held so long;
/// the tenant with it, which is forgotten only when none of its places is taken.
async fn ask(door: &Door, caller: &Caller, question: Question) -> Result<Reply, Problem> {
    let place = caller.tenant.question()?;
    let turn = Arc::clone(&door.questions).acquire_owned().await;
    let tenant = Arc::clone(&caller.tenant);
    Ok(door.client.ask_holding(question, (place, turn, tenant)).await?)
}

fn strange(_: Reply) -> Problem {
    let detail = "the service answered something else than it was asked";
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", detail)
}

/// `GET /v1/tools`
pub(crate) async fn list(
    State(door): State<Arc<Door>>,
    caller: Caller,
) -> Result<Response, Problem> {
    let question = Question::ListTools { principal: caller.tenant.name.clone() };
    match ask(&door, &caller, question).await? {
        Reply::Tools { tools, unavailable } => {
            let tools = tools.iter().map(|tool| {
                let mut shown = described(&tool.spec);
                shown["standing"] = tool.standing.as_str().into();
                shown["effect"] = tool.word.effect.as_str().into();
                shown["cost"] = tool.word.cost.into();
                if let Some(advice) = &tool.word.advice {
                    shown["annotations"] = parsed(advice);
                }
                shown
            });
            Ok(answer_json(StatusCode::OK, &listing(tools.collect(), &unavailable)))
        }
        other => Err(strange(other)),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Search {
    intent: String,
    #[serde(default, deserialize_with = "integer::optional")]
    k: Option<u32>,
    #[serde(default)]
    principal: Option<String>,
}

/// `POST /v1/tools/search`
pub(crate) async fn search(
    State(door): State<Arc<Door>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let Search { intent, k, principal } = read(&caller, request).await?;
    check_principal(&caller.tenant.name, principal.as_deref())?;
    bounded("intent", intent.len(), INTENT_BYTES_MAX as usize)?;
    let k = k.unwrap_or(FOUND_TOOLS);
    if !(1..=FOUND_TOOLS_MAX).contains(&k) {
        return Err(Problem::bad_request(format!("k is 1 to {FOUND_TOOLS_MAX}")));
    }
    let principal = caller.tenant.name.clone();
    match ask(&door, &caller, Question::SearchTools { principal, intent, k }).await? {
        Reply::Found { tools, blocked, unavailable } => {
            let tools = tools.iter().map(|tool| {
                let mut shown = described(&tool.spec);
                shown["score"] = (f64::from(tool.score_millionths) / 1e6).into();
                shown
            });
            let mut found = listing(tools.collect(), &unavailable);
            let blocked = blocked.iter().map(
                |tool| json!({ "name": tool.name.as_str(), "standing": tool.standing.as_str() }),
            );
            found["blocked"] = blocked.collect();
            Ok(answer_json(StatusCode::OK, &found))
        }
        other => Err(strange(other)),
    }
}

fn listing(tools: Vec<Value>, unavailable: &[(String, String)]) -> Value {
    let gone = |(server, reason): &(String, String)| json!({ "server": server, "reason": reason });
    json!({ "tools": tools, "unavailable": unavailable.iter().map(gone).collect::<Vec<_>>() })
}

/// JSON that a server wrote; null if it is none.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(Value::Null)
}

fn described(tool: &ToolSpec) -> Value {
    let mut shown = json!({
        "name": tool.name.as_str(),
        "description": tool.description,
        "input_schema": parsed(&tool.input_schema),
        "definition_sha256": hex(&tool.definition_sha256),
    });
    if let Some(schema) = &tool.output_schema {
        shown["output_schema"] = parsed(schema);
    }
    shown
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Issue {
    tools: Tools<String>,
    #[serde(default, deserialize_with = "order::or_default")]
    constraints: Vec<String>,
    #[serde(deserialize_with = "integer::needed")]
    valid_s: u64,
    #[serde(default, deserialize_with = "integer::optional")]
    calls_max: Option<u32>,
    #[serde(default, deserialize_with = "integer::optional")]
    cost_max: Option<u32>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default)]
    principal: Option<String>,
}

/// `POST /v1/grants`
pub(crate) async fn issue(
    State(door): State<Arc<Door>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let asked: Issue = read(&caller, request).await?;
    check_principal(&caller.tenant.name, asked.principal.as_deref())?;
    check_session(asked.session.as_deref())?;
    check_constraints(&asked.constraints)?;
    let question = Question::IssueGrant(GrantRequest {
        principal: caller.tenant.name.clone(),
        tools: some_tools(&asked.tools.0)?,
        constraints: asked.constraints,
        valid_s: asked.valid_s,
        calls_max: asked.calls_max,
        cost_max: asked.cost_max,
        session: asked.session,
    });
    granted(ask(&door, &caller, question).await?, StatusCode::CREATED)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attenuate {
    grant: String,
    #[serde(default, deserialize_with = "order::present")]
    tools: Option<Tools<String>>,
    #[serde(default, deserialize_with = "order::or_default")]
    constraints: Vec<String>,
    #[serde(default, deserialize_with = "integer::optional")]
    valid_s: Option<u64>,
    #[serde(default, deserialize_with = "integer::optional")]
    calls_max: Option<u32>,
    #[serde(default, deserialize_with = "integer::optional")]
    cost_max: Option<u32>,
    #[serde(default)]
    session: Option<String>,
}

/// `POST /v1/grants/attenuate`
pub(crate) async fn attenuate(
    State(door): State<Arc<Door>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let asked: Attenuate = read(&caller, request).await?;
    check_session(asked.session.as_deref())?;
    check_constraints(&asked.constraints)?;
    let question = Question::AttenuateGrant(Narrowing {
        token: base64("grant", &asked.grant, GRANT_BYTES_MAX)?,
        // No names leave all, which an empty list would not be meant to.
        tools: asked.tools.map_or_else(|| Ok(Vec::new()), |names| some_tools(&names.0))?,
        constraints: asked.constraints,
        valid_s: asked.valid_s,
        calls_max: asked.calls_max,
        cost_max: asked.cost_max,
        session: asked.session,
    });
    granted(ask(&door, &caller, question).await?, StatusCode::CREATED)
}

/// Reads names of tools, of which there is at least one.
fn some_tools(names: &[String]) -> Result<Vec<ToolName>, Problem> {
    if names.is_empty() {
        return Err(Problem::bad_request("tools: a grant is for one tool at least"));
    }
    tools(names)
}

fn check_constraints(constraints: &[String]) -> Result<(), Problem> {
    if constraints.len() > CONSTRAINTS_MAX {
        let count = constraints.len();
        return Err(Problem::bad_request(format!(
            "{count} constraints, {CONSTRAINTS_MAX} at most"
        )));
    }
    let longest = constraints.iter().map(String::len).max().unwrap_or(0);
    bounded("a constraint", longest, TOOL_NAME_BYTES_MAX + 1 + CONSTRAINT_BYTES_MAX)
}

fn granted(reply: Reply, status: StatusCode) -> Result<Response, Problem> {
    match reply {
        Reply::Grant(token) => Ok(answer_json(status, &json!({ "grant": STANDARD.encode(token) }))),
        other => Err(strange(other)),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inspect {
    grant: String,
}

/// `POST /v1/grants/inspect`
pub(crate) async fn inspect(
    State(door): State<Arc<Door>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let Inspect { grant } = read(&caller, request).await?;
    let token = base64("grant", &grant, GRANT_BYTES_MAX)?;
    match ask(&door, &caller, Question::InspectGrant { token }).await? {
        Reply::Claims(claims) if claims.principal == caller.tenant.name => {
            Ok(answer_json(StatusCode::OK, &shown(&claims)))
        }
        Reply::Claims(_) => {
            let detail = "the grant is another principal's";
            Err(Problem::new(StatusCode::FORBIDDEN, "grant", detail))
        }
        other => Err(strange(other)),
    }
}

fn shown(claims: &GrantClaims) -> Value {
    let expires = UNIX_EPOCH + Duration::from_secs(claims.expires_unix_s.min(LAST_UNIX_S));
    let tools = claims.tools.iter().map(|tool| {
        json!({
            "name": tool.name.as_str(),
            "definition_sha256": hex(&tool.definition_sha256),
            "constraints": tool.constraints,
        })
    });
    json!({
        "principal": claims.principal,
        "session": claims.session,
        "expires": humantime::format_rfc3339_seconds(expires).to_string(),
        "calls_max": claims.calls_max,
        "cost_max": claims.cost_max,
        "tools": tools.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::QUESTIONS_MAX;
    use super::super::access::Bearer;
    use super::super::tests::door;
    use super::*;

    #[tokio::test]
    async fn a_caller_who_leaves_gives_its_turn_back_when_the_service_has_answered() {
        let (mut service, door) = door().await;
        let leave = async |principal: &str| {
            let tenant = door.tenants.named(principal.into());
            let permit = Arc::new(tenant.request().unwrap());
            let bearer = Bearer::anybodys(principal);
            let caller = Caller { tenant, permit, bearer };
            let asking = ask(&door, &caller, Question::ListTools { principal: "a".into() });
            // Sent if it is its turn, and cancelled.
            tokio::time::timeout(Duration::ZERO, asking).await
        };
        // The last has to wait for its turn, and leaves nothing behind.
        for number in 0..=QUESTIONS_MAX {
            assert!(leave(&(number / 16).to_string()).await.is_err());
        }
        assert_eq!(door.questions.available_permits(), 0);
        door.tenants.sweep(std::time::Instant::now());
        let problem = leave("0").await.unwrap().unwrap_err();
        assert_eq!(problem.body().status(), 429, "each has its own bound");
        service.answer(1, Reply::Draining).await;
        let turn = door.questions.acquire();
        let turn = tokio::time::timeout(Duration::from_secs(30), turn).await.unwrap();
        drop(turn);
        assert!(leave("0").await.is_err(), "its place is free too");
        assert_eq!(door.questions.available_permits(), 0);
    }
}
