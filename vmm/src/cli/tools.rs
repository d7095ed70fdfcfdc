//! `forge-vmm tools`.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::broker::{Authority, FoundTool, OpenRun, Reply, Request, ToolSpec};
use forge_protocol::codec;
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::RunLimits;
use forge_vmm::admission::shown_whole;
use forge_vmm::broker::BrokerError;
use forge_vmm::keys;
use forge_vmm::report::hex;
use serde::Serialize;

use super::args::{ToolsArgs, ToolsCallArgs, ToolsCommand, ToolsListArgs, ToolsSearchArgs};
use super::config::{self, GrantKey};
use super::{CliError, Exit, complain, print_json, progress};

/// How long a call from the command line may take.
const CALL_TIME_MAX: Duration = Duration::from_secs(30);

/// Lists tools, finds some, or calls one.
pub(crate) fn tools(args: ToolsArgs) -> Result<ExitCode, CliError> {
    match args.command {
        ToolsCommand::List(args) => list(&args),
        ToolsCommand::Search(args) => search(&args),
        ToolsCommand::Call(args) => call(args),
    }
}

#[derive(Serialize)]
struct Listing {
    tools: Vec<ListedTool>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct ListedTool {
    name: String,
    description: String,
    input_schema: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<serde_json::Value>,
    definition_sha256: String,
}

#[derive(Serialize)]
struct Unavailable {
    server: String,
    reason: String,
}

fn list(args: &ToolsListArgs) -> Result<ExitCode, CliError> {
    let broker = config::start_broker(&args.broker, GrantKey::Passing)?;
    progress("asking the tool servers");
    let request = Request::ListTools { principal: args.broker.principal.clone() };
    let (tools, unavailable) = config::ask(&broker, &request, |reply| match reply {
        Reply::Tools { tools, unavailable } => Ok((tools, unavailable)),
        other => Err(other),
    })?;
    if args.json {
        print_json(&Listing {
            tools: tools.iter().map(listed).collect(),
            unavailable: unavailable_entries(&unavailable),
        })?;
    } else {
        let mut out = io::stdout().lock();
        for tool in &tools {
            let first = tool.description.lines().next().unwrap_or_default();
            writeln!(out, "{}  {}", shown_whole(tool.name.as_str()), shown_whole(first))?;
        }
    }
    for (server, reason) in &unavailable {
        complain(&format!("server {server}: {}", shown_whole(reason)));
    }
    Ok(if unavailable.is_empty() { Exit::Ok } else { Exit::Failed }.into())
}

#[derive(Serialize)]
struct Found {
    tools: Vec<FoundEntry>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct FoundEntry {
    score: f64,
    #[serde(flatten)]
    tool: ListedTool,
}

fn search(args: &ToolsSearchArgs) -> Result<ExitCode, CliError> {
    let broker = config::start_broker(&args.broker, GrantKey::Passing)?;
    progress("asking the tool servers");
    let (tools, unavailable) =
        config::search(&broker, &args.broker.principal, &args.intent, args.k)?;
    let score = |tool: &FoundTool| f64::from(tool.score_millionths) / 1e6;
    if args.json {
        print_json(&Found {
            tools: tools
                .iter()
                .map(|tool| FoundEntry { score: score(tool), tool: listed(&tool.spec) })
                .collect(),
            unavailable: unavailable_entries(&unavailable),
        })?;
    } else {
        let mut out = io::stdout().lock();
        for tool in &tools {
            let ToolSpec { name, description, input_schema, .. } = &tool.spec;
            writeln!(out, "{:.3}  {}", score(tool), shown_whole(name.as_str()))?;
            for line in description.lines() {
                writeln!(out, "       {}", shown_whole(line))?;
            }
            writeln!(out, "       arguments: {}", shown_whole(input_schema))?;
        }
    }
    for (server, reason) in &unavailable {
        complain(&format!("server {server}: {}", shown_whole(reason)));
    }
    Ok(if unavailable.is_empty() { Exit::Ok } else { Exit::Failed }.into())
}

fn unavailable_entries(unavailable: &[(String, String)]) -> Vec<Unavailable> {
    unavailable
        .iter()
        .map(|(server, reason)| Unavailable { server: server.clone(), reason: reason.clone() })
        .collect()
}

fn listed(tool: &ToolSpec) -> ListedTool {
    let json = |text: &str| serde_json::from_str(text).unwrap_or(serde_json::Value::Null);
    ListedTool {
        name: tool.name.to_string(),
        description: tool.description.clone(),
        input_schema: json(&tool.input_schema),
        output_schema: tool.output_schema.as_deref().map(json),
        definition_sha256: hex(&tool.definition_sha256),
    }
}

/// Calls a tool the way a run would: opened at the broker, under a grant for
/// this one tool.
fn call(args: ToolsCallArgs) -> Result<ExitCode, CliError> {
    let request = config::json_argument("the arguments", &args.arguments)?;
    let broker = config::start_broker(&args.broker, GrantKey::Passing)?;
    let run_id = keys::random()
        .map(RunId)
        .map_err(|source| CliError::File { path: "/dev/urandom".into(), source })?;
    let limits =
        RunLimits { wall_ms: CALL_TIME_MAX.as_millis() as u64, ..RunLimits::operator_maxima() };
    let (_, mut link) = broker.open_run(OpenRun {
        run_id,
        principal: args.broker.principal,
        program_sha256: [0; 32],
        authority: Authority::Tools(vec![args.tool.clone()]),
        limits,
    })?;
    progress("calling");
    let call = Call { id: 0, waits: true, tool: args.tool, request };
    let settled = exchange(&mut link, &call).map_err(|e| CliError::Broker(BrokerError::Lost(e)))?;
    let mut out = io::stdout().lock();
    out.write_all(&settled.body)?;
    if !settled.body.is_empty() {
        writeln!(out)?;
    }
    out.flush()?;
    match settled.code {
        None => Ok(Exit::Ok.into()),
        Some(code) => {
            complain(&format!("the call settled as {} ({})", code.as_str(), code as i32));
            Ok(Exit::Failed.into())
        }
    }
}

fn exchange(link: &mut UnixStream, call: &Call) -> io::Result<Settled> {
    link.set_read_timeout(Some(CALL_TIME_MAX + Duration::from_secs(5)))?;
    let mut bytes = Vec::new();
    frame::write_message(Kind::Call, call, &mut bytes);
    link.write_all(&bytes)?;
    let invalid = |error: &dyn std::fmt::Display| {
        io::Error::new(io::ErrorKind::InvalidData, error.to_string())
    };
    let mut header = [0; HEADER_BYTES];
    link.read_exact(&mut header)?;
    let header = Header::from_bytes(header).map_err(|error| invalid(&error))?;
    let mut payload = vec![0; header.payload_bytes as usize];
    link.read_exact(&mut payload)?;
    match header.kind {
        Kind::Settled => codec::decode(&payload).map_err(|error| invalid(&error)),
        kind => Err(invalid(&format!("a {kind:?} frame for an answer"))),
    }
}
