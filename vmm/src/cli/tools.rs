//! `forge-vmm tools`.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Authority, BlockedTool, Callable, FoundTool, ListedTool as Tool, OpenRun, Reply, Request,
    ReviewedTool, Standing, ToolSpec, ToolWord,
};
use forge_protocol::codec;
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::hex::hex;
use forge_protocol::json::first_deeper;
use forge_protocol::limits::{REQUEST_BYTES_MAX, REQUEST_DEPTH_MAX, RunLimits};
use forge_protocol::name::RESERVED_SERVERS;
use forge_protocol::text::visible;
use forge_vmm::broker::{Broker, BrokerError};
use forge_vmm::keys;
use forge_vmm::link::Patience;
use serde::Serialize;

use super::args::{
    ToolsApproveArgs, ToolsArgs, ToolsCallArgs, ToolsCommand, ToolsListArgs, ToolsReviewArgs,
    ToolsSearchArgs,
};
use super::config::{self, Found, GrantKey};
use super::{CliError, Exit, complain, out, print_json, progress};

/// How long the broker may take to say that a call's time is over.
const LAST_WORD_TIME_MAX: Duration = Duration::from_secs(5);

/// Lists tools, finds some, reviews their definitions, or calls one.
pub(crate) fn tools(args: ToolsArgs) -> Result<ExitCode, CliError> {
    match args.command {
        ToolsCommand::List(args) => list(&args),
        ToolsCommand::Search(args) => search(&args),
        ToolsCommand::Call(args) => call(args),
        ToolsCommand::Review(args) => review(&args),
        ToolsCommand::Approve(args) => approve(&args),
    }
}

#[derive(Serialize)]
struct Listing {
    tools: Vec<ListedTool>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct Described {
    name: String,
    description: String,
    input_schema: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<serde_json::Value>,
    definition_sha256: String,
}

#[derive(Serialize)]
struct ListedTool {
    #[serde(flatten)]
    tool: Described,
    standing: &'static str,
    #[serde(flatten)]
    word: Word,
}

/// What the operator says of a tool, and what its server says.
#[derive(Serialize)]
struct Word {
    effect: &'static str,
    cost: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<serde_json::Value>,
}

#[derive(Serialize)]
struct Reviews {
    tools: Vec<Reviewed>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct Reviewed {
    name: String,
    standing: &'static str,
    definition_sha256: String,
    #[serde(flatten)]
    word: Word,
    difference: String,
}

#[derive(Serialize)]
struct Unavailable {
    server: String,
    reason: String,
}

fn list(args: &ToolsListArgs) -> Result<ExitCode, CliError> {
    let broker = config::start_broker(&args.broker, GrantKey::Idle)?;
    progress("asking the tool servers");
    let request = Request::ListTools { principal: args.asker.principal.clone() };
    let (tools, unavailable) = config::ask(&broker, &request, |reply| match reply {
        Reply::Tools { tools, unavailable } => Ok((tools, unavailable)),
        other => Err(other),
    })?;
    if args.json {
        print_json(&Listing {
            tools: tools.iter().map(listed).collect(),
            unavailable: unavailable.iter().map(gone).collect(),
        })?;
    } else {
        let mut out = out();
        for tool in &tools {
            let first = tool.spec.description.trim_start().lines().next().unwrap_or_default();
            let blocked = match tool.standing {
                Standing::Approved => String::new(),
                other => format!("[blocked: {}] ", other.as_str()),
            };
            let name = visible(tool.spec.name.as_str());
            writeln!(out, "{name}  {blocked}{}", visible(first))?;
        }
    }
    if tools.is_empty() && unavailable.is_empty() {
        // Some tools are built in, so it is not that there are none.
        complain(&format!(
            "there is no tool for the principal {:?}: none of its roles names one that is there \
             (forge.toml, [principals] and [roles]); --principal says who asks",
            args.asker.principal,
        ));
    }
    Ok(said(&unavailable).into())
}

#[derive(Serialize)]
struct FoundTools {
    tools: Vec<FoundEntry>,
    blocked: Vec<BlockedEntry>,
    unavailable: Vec<Unavailable>,
}

#[derive(Serialize)]
struct FoundEntry {
    score: f64,
    #[serde(flatten)]
    tool: Described,
}

#[derive(Serialize)]
struct BlockedEntry {
    name: String,
    standing: &'static str,
}

fn search(args: &ToolsSearchArgs) -> Result<ExitCode, CliError> {
    let broker = config::start_broker(&args.broker, GrantKey::Idle)?;
    progress("asking the tool servers");
    let Found { tools, blocked, unavailable } =
        config::search(&broker, &args.asker.principal, &args.intent, args.k, Patience::default())?;
    let score = |tool: &FoundTool| f64::from(tool.score_millionths) / 1e6;
    if args.json {
        let entry = |tool: &BlockedTool| BlockedEntry {
            name: tool.name.to_string(),
            standing: tool.standing.as_str(),
        };
        print_json(&FoundTools {
            tools: tools
                .iter()
                .map(|tool| FoundEntry { score: score(tool), tool: described(&tool.spec) })
                .collect(),
            blocked: blocked.iter().map(entry).collect(),
            unavailable: unavailable.iter().map(gone).collect(),
        })?;
    } else {
        let mut out = out();
        for tool in &tools {
            let ToolSpec { name, description, input_schema, .. } = &tool.spec;
            writeln!(out, "{:.3}  {}", score(tool), visible(name.as_str()))?;
            for line in description.lines() {
                writeln!(out, "       {}", visible(line))?;
            }
            writeln!(out, "       arguments: {}", visible(input_schema))?;
        }
    }
    if let Some(blocked) = super::run::found::not_searched(&blocked) {
        complain(&blocked);
    }
    if tools.is_empty() && unavailable.is_empty() {
        complain(&config::nothing_found(&args.asker.principal));
    }
    Ok(said(&unavailable).into())
}

/// Says which servers could not be asked.
fn said(unavailable: &[(String, String)]) -> Exit {
    for (server, reason) in unavailable {
        complain(&format!("server {server}: {}", visible(reason)));
    }
    if unavailable.is_empty() { Exit::Ok } else { Exit::Failed }
}

fn gone((server, reason): &(String, String)) -> Unavailable {
    Unavailable { server: server.clone(), reason: reason.clone() }
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or(serde_json::Value::Null)
}

fn word(word: &ToolWord) -> Word {
    let annotations = word.advice.as_deref().map(json);
    Word { effect: word.effect.as_str(), cost: word.cost, annotations }
}

fn listed(tool: &Tool) -> ListedTool {
    let Tool { spec, word: said, standing } = tool;
    ListedTool { tool: described(spec), standing: standing.as_str(), word: word(said) }
}

fn described(tool: &ToolSpec) -> Described {
    Described {
        name: tool.name.to_string(),
        description: tool.description.clone(),
        input_schema: json(&tool.input_schema),
        output_schema: tool.output_schema.as_deref().map(json),
        definition_sha256: hex(&tool.definition_sha256),
    }
}

/// Digits of a digest that are shown: nobody makes another definition with the same.
const DIGEST_SHOWN: usize = 32;

/// All tools beside their approved definitions, and what could not be asked.
type Review = (Vec<ReviewedTool>, Vec<(String, String)>);

fn ask_reviews(broker: &Broker) -> Result<Review, CliError> {
    progress("asking the tool servers");
    config::ask(broker, &Request::ReviewTools, |reply| match reply {
        Reply::Reviews { tools, unavailable } => Ok((tools, unavailable)),
        other => Err(other),
    })
}

fn review(args: &ToolsReviewArgs) -> Result<ExitCode, CliError> {
    let broker = config::start_broker(&args.broker, GrantKey::Idle)?;
    let (tools, unavailable) = ask_reviews(&broker)?;
    if args.json {
        let reviewed = |tool: &ReviewedTool| Reviewed {
            name: tool.name.to_string(),
            standing: tool.standing.as_str(),
            definition_sha256: hex(&tool.definition_sha256),
            word: word(&tool.word),
            difference: tool.difference.clone(),
        };
        print_json(&Reviews {
            tools: tools.iter().map(reviewed).collect(),
            unavailable: unavailable.iter().map(gone).collect(),
        })?;
    } else {
        for tool in &tools {
            show_review(tool, true)?;
        }
    }
    Ok(said(&unavailable).into())
}

fn show_review(tool: &ReviewedTool, waits: bool) -> Result<(), CliError> {
    let mut out = out();
    let (standing, name) = (word_of(tool), visible(tool.name.as_str()));
    let ToolWord { effect, cost, advice } = &tool.word;
    writeln!(out, "{standing:<8}  {name}  effect {}, cost {cost}", effect.as_str())?;
    for line in tool.difference.split_terminator('\n') {
        writeln!(out, "    {}", visible(line))?;
    }
    if let (Some(advice), false) = (advice, tool.difference.is_empty()) {
        writeln!(out, "    its server says, unproven: {}", visible(advice))?;
    }
    if waits
        && tool.standing != Standing::Approved
        && let Some(word) = tool.name.shell_word()
    {
        let digest = &hex(&tool.definition_sha256)[..DIGEST_SHOWN];
        writeln!(out, "    approve this: forge-vmm tools approve {word}@{digest}")?;
    }
    Ok(())
}

/// How a definition stands, for a person. Nobody need have approved one that is
/// pinned: with `[review] mode = "first_use"` it is so from its first use on.
fn word_of(tool: &ReviewedTool) -> &'static str {
    match tool.standing {
        Standing::Approved if RESERVED_SERVERS.contains(&tool.name.server()) => "built-in",
        Standing::Approved => "pinned",
        other => other.as_str(),
    }
}

/// Approves what it shows: the definitions go by their digests from the one
/// question to the other.
fn approve(args: &ToolsApproveArgs) -> Result<ExitCode, CliError> {
    config::check_servers(&args.broker, args.tools.iter().map(|it| &it.name))?;
    let broker = config::start_broker(&args.broker, GrantKey::Passing)?;
    let (mut tools, unavailable) = ask_reviews(&broker)?;
    if !args.all {
        let names = || args.tools.iter().map(|it| &it.name);
        if let Some(none) = names().find(|name| tools.iter().all(|it| it.name != **name)) {
            said(&unavailable);
            let why = match unavailable.iter().any(|(server, _)| server == none.server()) {
                true => ": the tools of its server cannot be told",
                false => "",
            };
            return Err(CliError::Usage(format!("there is no tool {none} to approve{why}")));
        }
        tools.retain(|tool| names().any(|name| *name == tool.name));
    }
    for tool in &tools {
        let digest = hex(&tool.definition_sha256);
        let asked = args.tools.iter().filter(|it| it.name == tool.name);
        if asked.filter_map(|it| it.digest.as_ref()).any(|it| !digest.starts_with(it)) {
            let name = tool.name.as_str();
            return Err(CliError::Usage(format!(
                "{} is another by now: look at it again with `forge-vmm tools review`; nothing \
                 was approved",
                visible(name)
            )));
        }
    }
    tools.retain(|tool| tool.standing != Standing::Approved);
    let pins = tools.iter().map(|tool| (tool.name.clone(), tool.definition_sha256)).collect();
    let approved =
        config::ask(&broker, &Request::ApproveTools { tools: pins }, |reply| match reply {
            Reply::Approved { tools } => Ok(tools),
            other => Err(other),
        })?;
    for tool in &tools {
        show_review(tool, false)?;
    }
    if tools.is_empty() {
        complain(&"nothing had to be approved: all of these definitions are");
    }
    writeln!(out(), "{approved} approved")?;
    Ok(if args.all { said(&unavailable) } else { Exit::Ok }.into())
}

/// Calls a tool the way a run would: opened at the broker, under a grant for
/// this one tool.
fn call(args: ToolsCallArgs) -> Result<ExitCode, CliError> {
    let request = config::json_argument("the arguments", &args.arguments)?;
    if request.len() > REQUEST_BYTES_MAX as usize {
        return Err(CliError::Usage(format!(
            "the arguments have {} bytes, and a tool call has at most {REQUEST_BYTES_MAX}",
            request.len()
        )));
    }
    check_depth(&request)?;
    let maxima = config::maxima(args.broker.config.as_deref())?;
    let most = Duration::from_millis(maxima.wall_ms);
    let timeout = args.timeout.unwrap_or(most);
    if timeout > most {
        let most = humantime::format_duration(most);
        return Err(CliError::Usage(format!(
            "--timeout: a call may take at most {most}: [limits] wall_ms in forge.toml can say more"
        )));
    }
    let broker = config::start_broker(&args.broker, GrantKey::Passing)?;
    let run_id = keys::random()
        .map(RunId)
        .map_err(|source| CliError::File { path: "/dev/urandom".into(), source })?;
    let limits = RunLimits { wall_ms: timeout.as_millis() as u64, ..maxima };
    let (_, mut link) = broker.open_run(OpenRun {
        run_id,
        principal: args.asker.principal,
        session: None,
        program_sha256: [0; 32],
        authority: Authority::Tools(vec![args.tool.clone()]),
        callable: Callable::Any,
        limits,
    })?;
    progress("calling");
    let call = Call { id: 0, waits: true, tool: args.tool, request };
    let settled = exchange(&mut link, &call, timeout + LAST_WORD_TIME_MAX);
    let settled = settled.map_err(|error| CliError::Broker(BrokerError::Lost(error)))?;
    // As with a run: first the journal, then the result.
    broker.sync()?;
    let mut out = out();
    out.write_all(&settled.body)?;
    if !settled.body.is_empty() {
        writeln!(out)?;
    }
    out.flush()?;
    match settled.code {
        None => Ok(Exit::Ok.into()),
        Some(code) => {
            complain(&format!("the call settled as {} ({})", code.as_str(), code as i32));
            Ok(exit_of(code).into())
        }
    }
}

/// How the command ends whose call settled as this: a call that was not made is a request
/// that was refused.
fn exit_of(code: CallCode) -> Exit {
    match code {
        CallCode::Denied
        | CallCode::NoSuchTool
        | CallCode::BadRequest
        | CallCode::RequestTooLarge
        | CallCode::BudgetSpent => Exit::Rejected,
        CallCode::NotRecorded => Exit::Unavailable,
        CallCode::DeadlinePassed => Exit::Limit,
        CallCode::ToolFailed
        | CallCode::OutcomeUnknown
        | CallCode::ResponseTooLarge
        | CallCode::BadResponse => Exit::Failed,
    }
}

/// Refuses arguments that are nested too deep for a tool, which the toolbroker does as
/// well and cannot say where.
fn check_depth(arguments: &[u8]) -> Result<(), CliError> {
    match first_deeper(arguments, REQUEST_DEPTH_MAX) {
        Some(at) => Err(CliError::Usage(format!(
            "the arguments, byte {}: lists and objects are nested more than {REQUEST_DEPTH_MAX} \
             deep here, and a tool call has no more: make them flatter",
            at + 1
        ))),
        None => Ok(()),
    }
}

fn exchange(link: &mut UnixStream, call: &Call, patience: Duration) -> io::Result<Settled> {
    link.set_read_timeout(Some(patience))?;
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
