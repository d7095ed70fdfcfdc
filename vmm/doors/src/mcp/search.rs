//! `search_tools`.

use std::time::Instant;

use forge_client::ClientError;
use forge_protocol::broker::{BlockedTool, FoundTool, GrantRequest, ToolSpec};
use forge_protocol::limits::{FOUND_TOOLS_MAX, INTENT_BYTES_MAX};
use forge_protocol::service::{Question, Reply};
use rmcp::RoleServer;
use rmcp::model::CallToolResult;
use rmcp::service::RequestContext;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use serde_json::value::RawValue;

use super::handles::{self, Grant};
use super::result::{self, failed};
use super::run::{RESULT_BYTES_MAX, json_bytes};
use super::{Door, teach};

/// What an answer has beside the tools, in bytes.
const OTHER_BYTES_MAX: usize = 100_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    intent: String,
    k: Option<Number>,
}

#[derive(Serialize)]
struct Found {
    tools: Vec<Shown>,
    #[serde(skip_serializing_if = "Option::is_none")]
    grant: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<usize>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    blocked: Vec<String>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct Shown {
    name: String,
    description: String,
    input_schema: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<Box<RawValue>>,
    import: String,
}

#[derive(Serialize)]
struct Unavailable {
    server: String,
    reason: String,
}

/// So many blocked tools a model is told of.
const BLOCKED_MAX: usize = 8;
/// Bytes of a name that is one.
const PLAIN_NAME_BYTES_MAX: usize = 64;

/// The first of these tools. What nobody has reviewed says nothing to a model: a name
/// that could be a sentence is passed over.
fn named(blocked: &[BlockedTool]) -> Vec<String> {
    let is_plain = |name: &&str| {
        name.len() <= PLAIN_NAME_BYTES_MAX
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let names = blocked.iter().map(|tool| tool.name.as_str()).filter(is_plain);
    names.take(BLOCKED_MAX).map(str::to_owned).collect()
}

/// Why nothing was found.
#[derive(Debug, thiserror::Error)]
enum SearchError {
    #[error("`intent` has {0} bytes, the limit is {INTENT_BYTES_MAX}")]
    Intent(usize),
    #[error("`k` is {0}, it must be 1 to {FOUND_TOOLS_MAX}")]
    Hits(u64),
    #[error("{0}")]
    Integer(String),
    #[error(transparent)]
    Service(#[from] ClientError),
    #[error("the service gave another answer than was asked for")]
    Answer,
    #[error("the search was cancelled")]
    Cancelled,
    #[error("{0}")]
    Host(#[from] std::io::Error),
    #[error("a tool's definition is no JSON: {0}")]
    Definition(#[from] serde_json::Error),
}

/// Searches, and has a grant issued for what was found, until whoever asked is
/// gone.
pub(super) async fn search(
    door: &Door,
    arguments: Arguments,
    context: RequestContext<RoleServer>,
) -> CallToolResult {
    let found = tokio::select! {
        found = find(door, arguments) => found,
        () = context.ct.cancelled() => Err(SearchError::Cancelled),
        () = door.0.closing.cancelled() => Err(SearchError::Cancelled),
    };
    match found {
        Ok(found) => result::structured(&found, None, false),
        Err(error) => failed(&error),
    }
}

async fn find(door: &Door, Arguments { intent, k }: Arguments) -> Result<Found, SearchError> {
    if intent.len() > INTENT_BYTES_MAX as usize {
        return Err(SearchError::Intent(intent.len()));
    }
    let k = result::integer("k", k, 0).map_err(SearchError::Integer)?;
    let k = k.unwrap_or(teach::HITS.into());
    let k = u32::try_from(k)
        .ok()
        .filter(|k| (1..=FOUND_TOOLS_MAX).contains(k))
        .ok_or(SearchError::Hits(k))?;
    let principal = door.0.principal.name.clone();
    let question = Question::SearchTools { principal: principal.clone(), intent, k };
    let Reply::Found { tools, blocked, unavailable } = door.ask(question).await? else {
        return Err(SearchError::Answer);
    };
    let mut names: Vec<_> = tools.iter().map(|found| found.spec.name.clone()).collect();
    let tools: Result<Vec<_>, _> = tools.into_iter().map(shown).collect();
    let (tools, left_out) = within(tools?, RESULT_BYTES_MAX - OTHER_BYTES_MAX);
    names.truncate(tools.len());
    let mut grant = None;
    if !tools.is_empty() {
        let request = GrantRequest {
            principal,
            tools: names,
            constraints: Vec::new(),
            valid_s: handles::VALID.as_secs(),
            calls_max: None,
            cost_max: None,
            session: Some(door.0.session.clone()),
        };
        let Reply::Grant(token) = door.ask(Question::IssueGrant(request)).await? else {
            return Err(SearchError::Answer);
        };
        let found = Grant { token, session: door.0.session.clone() };
        grant = Some(door.handles().insert(found, Instant::now())?);
    }
    let unavailable = unavailable.into_iter();
    Ok(Found {
        tools,
        left_out: (left_out > 0).then_some(left_out),
        expires_in_s: grant.is_some().then_some(handles::VALID.as_secs()),
        grant,
        blocked: named(&blocked),
        unavailable: unavailable.map(|(server, reason)| Unavailable { server, reason }).collect(),
    })
}

/// The first tools, as far as an answer has room for them, which has each as text and as
/// it is; what comes back from a tool is left out before a tool is. Says how many tools
/// were.
fn within(mut tools: Vec<Shown>, room: usize) -> (Vec<Shown>, usize) {
    let bytes = |tool: &Shown| {
        let text = serde_json::to_string(tool).unwrap_or_default();
        text.len() + json_bytes(&text)
    };
    if tools.iter().map(bytes).sum::<usize>() > room {
        tools.iter_mut().for_each(|tool| tool.output_schema = None);
    }
    let mut left = room;
    let fits = tools.iter().map_while(|tool| {
        left = left.checked_sub(bytes(tool))?;
        Some(())
    });
    let (found, kept) = (tools.len(), fits.count());
    tools.truncate(kept);
    (tools, found - kept)
}

fn shown(FoundTool { spec, .. }: FoundTool) -> Result<Shown, serde_json::Error> {
    let ToolSpec { name, description, input_schema, output_schema, .. } = spec;
    Ok(Shown {
        import: import(name.as_str()),
        name: name.to_string(),
        description,
        input_schema: RawValue::from_string(input_schema)?,
        output_schema: output_schema.map(RawValue::from_string).transpose()?,
    })
}

/// The import that calls a tool, in WebAssembly text.
fn import(tool: &str) -> String {
    // In text, a string may hold any character but these two and controls,
    // which a tool's name has none of.
    let name = tool.replace('\\', "\\\\").replace('"', "\\\"");
    format!("(import \"tool\" \"{name}\" (func (param i32 i32) (result i32)))")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_is_good_text_whatever_the_tool_is_called() {
        for name in ["a.b", "a.we\"ird", "a.back\\slash", "a.ümlaut x"] {
            let module = wat::parse_str(format!("(module {})", import(name))).unwrap();
            let found = module.windows(name.len()).any(|bytes| bytes == name.as_bytes());
            assert!(found, "{name}");
        }
    }
}
