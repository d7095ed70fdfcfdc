//! `search_tools`.

use std::time::Instant;

use forge_client::ClientError;
use forge_protocol::broker::{FoundTool, GrantRequest, ToolSpec};
use forge_protocol::limits::{FOUND_TOOLS_MAX, INTENT_BYTES_MAX};
use forge_protocol::service::{Question, Reply};
use rmcp::RoleServer;
use rmcp::model::CallToolResult;
use rmcp::service::RequestContext;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use serde_json::value::RawValue;

use super::result::{self, failed};
use super::{Door, handles, teach};

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
    let Reply::Found { tools, unavailable } = door.ask(question).await? else {
        return Err(SearchError::Answer);
    };
    let mut grant = None;
    if !tools.is_empty() {
        let request = GrantRequest {
            principal,
            tools: tools.iter().map(|found| found.spec.name.clone()).collect(),
            constraints: Vec::new(),
            valid_s: handles::VALID.as_secs(),
            calls_max: None,
            cost_max: None,
            session: Some(door.0.session.clone()),
        };
        let Reply::Grant(token) = door.ask(Question::IssueGrant(request)).await? else {
            return Err(SearchError::Answer);
        };
        grant = Some(door.handles().insert(token, Instant::now())?);
    }
    let tools: Result<Vec<_>, _> = tools.into_iter().map(shown).collect();
    let unavailable = unavailable.into_iter();
    Ok(Found {
        tools: tools?,
        expires_in_s: grant.is_some().then_some(handles::VALID.as_secs()),
        grant,
        unavailable: unavailable.map(|(server, reason)| Unavailable { server, reason }).collect(),
    })
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
