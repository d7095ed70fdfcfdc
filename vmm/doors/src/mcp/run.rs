//! `run_program`.

use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_client::{ClientError, Run, RunMessage};
use forge_protocol::broker::Authority;
use forge_protocol::ending::{Denial, RunEnd, UNGRANTED, WALL_MS};
use forge_protocol::limits::{INPUT_BYTES_MAX, RunLimits};
use forge_protocol::run::Artifact;
use forge_protocol::service::{Finish, Order, RunEvent};
use rmcp::model::{
    CallToolResult, ContentBlock, ProgressNotificationParam, ProgressToken, ResourceContents,
};
use rmcp::service::RequestContext;
use rmcp::{Peer, RoleServer};
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};
use tokio::sync::mpsc;

use super::program::{self, Language, ProgramError};
use super::result::{self, failed};
use super::{Door, one_line, teach};
use crate::object::Object;

/// Progress messages that wait for a client to read; more are left out.
const PROGRESS_MAX: usize = 64;
/// How long progress may still be sent when the run is over.
const PROGRESS_TIME_MAX: Duration = Duration::from_millis(500);
/// A progress message of a program's or a tool's words, in characters.
const PROGRESS_CHARS_MAX: usize = 200;
/// Artifacts of one run that ride along, in bytes; others are named.
const ARTIFACT_BYTES_MAX: usize = 256 * 1024;
/// The name of one that does not, in characters.
const ARTIFACT_NAME_CHARS_MAX: usize = 100;
/// A result, in bytes as JSON. Clients bound what they take of a stream at once, at
/// 1 MiB say, which has to do for the rest of the message too.
pub(super) const RESULT_BYTES_MAX: usize = 1_000_000;
/// What names of artifacts that are left out may take of it.
const NAMES_BYTES_MAX: usize = 64 * 1024;
/// An output that a result has twice, in bytes as JSON: whole in its text, and in the
/// report.
const OUTPUT_BYTES_TWICE_MAX: usize = 256 * 1024;
/// What the text has of a larger one, in bytes.
const OUTPUT_BYTES_SHOWN: usize = 4 * 1024;
/// What it has of calls and of the log, in bytes as JSON.
const TOLD_BYTES_MAX: usize = 64 * 1024;
/// Said of an output that was cut.
const OUTPUT_CUT: &str = "a result has at most 1,000,000 bytes as JSON here. The HTTP door's POST \
                          /v1/runs gives the whole, or have the program write less";
/// A member of a report that says so, in bytes as JSON, or a little more.
const OUTPUT_CUT_BYTES: usize = OUTPUT_CUT.len() + 20;
/// Characters of base64 that are read together.
const BASE64_GROUP: usize = 4;
/// How long the end of a cancelled run is waited for.
const CANCEL_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Arguments {
    program: String,
    language: Option<Language>,
    /// `null` is one as well.
    #[serde(default = "no_input")]
    input: Value,
    grant: Option<String>,
    limits: Option<Object<Limits>>,
}

fn no_input() -> Value {
    Value::Object(serde_json::Map::new())
}

/// What of [`RunLimits`] a model may ask for, as it writes that.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    timeout_ms: Option<Number>,
    fuel: Option<Number>,
    memory_bytes: Option<Number>,
    calls: Option<Number>,
}

/// The limits of a run that asks for some.
#[derive(Default, Deserialize)]
#[serde(try_from = "Asked")]
struct Limits(RunLimits);

impl TryFrom<Asked> for Limits {
    type Error = String;

    fn try_from(asked: Asked) -> Result<Self, String> {
        let Asked { timeout_ms, fuel, memory_bytes, calls } = asked;
        let usual = RunLimits::default();
        let limit = |name, number, least, usual: u64| {
            Ok::<_, String>(result::integer(name, number, least)?.unwrap_or(usual))
        };
        // What is too much, admission says.
        Ok(Self(RunLimits {
            wall_ms: limit("timeout_ms", timeout_ms, 1, usual.wall_ms)?,
            fuel: limit("fuel", fuel, 1, usual.fuel)?,
            memory_bytes: limit("memory_bytes", memory_bytes, 0, usual.memory_bytes)?,
            calls: u32::try_from(limit("calls", calls, 0, usual.calls.into())?).unwrap_or(u32::MAX),
            ..usual
        }))
    }
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("the input has {0} bytes as JSON, the limit is {INPUT_BYTES_MAX}")]
    Input(usize),
    #[error("assembling the program failed in a way that it should not")]
    Assembler,
    #[error("the grant {0:?} is not known here or is over: search_tools gives another")]
    Grant(String),
    #[error("too many programs run already: wait for one to end")]
    Busy,
    #[error(transparent)]
    Service(#[from] ClientError),
    #[error("the service went away with the run; its calls may have happened")]
    Lost,
    #[error("the service's report cannot be read: {0}")]
    Report(serde_json::Error),
    #[error("the run was cancelled")]
    Cancelled,
}

/// Runs a program and reports.
pub(super) async fn run(
    door: &Door,
    arguments: Arguments,
    context: RequestContext<RoleServer>,
) -> CallToolResult {
    let is_granted = arguments.grant.is_some();
    match carried_out(door, arguments, context).await {
        Ok((Finish { report, artifacts }, before)) => {
            match serde_json::from_slice::<Value>(&report) {
                Ok(mut report) => {
                    in_words_of_a_model(&mut report, is_granted);
                    by_its_authors_bytes(&mut report, before);
                    told_of(report, artifacts)
                }
                Err(error) => failed(&RunError::Report(error)),
            }
        }
        Err(error) => failed(&error),
    }
}

/// The result of a run: what a model reads first, the report, and artifacts as far as
/// there is room for them.
fn told_of(mut report: Value, artifacts: Vec<Artifact>) -> CallToolResult {
    let mut said = text(&report, true);
    let room = |said: &str| (RESULT_BYTES_MAX - NAMES_BYTES_MAX).saturating_sub(json_bytes(said));
    if cut(&mut report, room(&said)) {
        said = text(&report, false);
    }
    let room = room(&said).saturating_sub(json_bytes(&report));
    let ok = report["status"] == "ok";
    let mut result = result::structured(&report, Some(said), !ok);
    result.content.extend(shown(&report, artifacts, room));
    result
}

/// What it takes as JSON, in bytes.
pub(super) fn json_bytes(value: &(impl Serialize + ?Sized)) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // What cannot be written is sent to nobody.
    let _ = serde_json::to_writer(&mut count, value);
    count.0
}

/// As much of the beginning of a text as takes so many bytes as JSON.
fn beginning(text: &str, bytes: usize) -> &str {
    let mut left = bytes;
    let end = text.char_indices().find(|(_, c)| {
        let takes = match c {
            '"' | '\\' | '\u{8}' | '\t' | '\n' | '\u{c}' | '\r' => 2,
            '\0'..='\u{1f}' => 6,
            _ => c.len_utf8(),
        };
        let fits = left.checked_sub(takes);
        left = fits.unwrap_or_default();
        fits.is_none()
    });
    end.map_or(text, |(end, _)| &text[..end])
}

/// Has a report take so many bytes as JSON: of its output, then of its log and its
/// calls, the ends are left out. Says whether something was.
fn cut(report: &mut Value, room: usize) -> bool {
    let over = |report: &Value| json_bytes(report).saturating_sub(room);
    let much = over(report);
    if much == 0 {
        return false;
    }
    let is_base64 = report["output_encoding"] == "base64";
    if let Some(Value::String(output)) = report.get_mut("output")
        && !output.is_empty()
    {
        let left = json_bytes(output).saturating_sub(much + OUTPUT_CUT_BYTES + 2);
        let mut end = beginning(output, left).len();
        if is_base64 {
            end -= end % BASE64_GROUP;
        }
        output.truncate(end);
        report["output_cut"] = OUTPUT_CUT.into();
    }
    for field in ["log", "tool_calls"] {
        let mut much = over(report);
        if let Some(Value::Array(entries)) = report.get_mut(field) {
            while much > 0
                && let Some(entry) = entries.pop()
            {
                much = much.saturating_sub(json_bytes(&entry) + 1);
            }
        }
    }
    true
}

/// Says why a run was refused by the arguments that it is about: who refused it knows
/// none of them.
fn in_words_of_a_model(report: &mut Value, is_granted: bool) {
    let Some(reason) = report["reason"].as_str().filter(|reason| !reason.is_empty()) else {
        return;
    };
    let end = RunEnd::of_kind(report["kind"].as_str().unwrap_or_default());
    let mut calls = report["tool_calls"].as_array().into_iter().flatten();
    let is_ungranted = reason.contains(UNGRANTED) || calls.any(|call| call["status"] == "denied");
    let said = match reason.strip_prefix(WALL_MS) {
        Some(rest) if rest.starts_with(' ') => format!("timeout_ms{rest}"),
        _ if ["initial memory is ", "memory_bytes is "].iter().any(|it| reason.starts_with(it)) => {
            format!("limits.memory_bytes: {reason}")
        }
        // It was good when this door had it: a tool of it is another, its toolbroker is, or
        // it is over.
        _ if end == Some(RunEnd::Denied(Denial::Grant)) && is_granted => {
            let changed = reason.split_once(": ").map(|(what, _)| what);
            let what = changed.filter(|what| what.starts_with("the definition of "));
            let what = what.unwrap_or("the grant is not good any more");
            format!("{what}: {} gives another", teach::SEARCH)
        }
        // It was there when it was found, and nobody asked for it by its name.
        _ if end == Some(RunEnd::Denied(Denial::NoSuchTool)) && is_granted => {
            let what = reason.split_once(": did you mean").map_or(reason, |(what, _)| what);
            format!("{what} any more, which the grant names: {} gives another", teach::SEARCH)
        }
        _ if is_ungranted && !is_granted => format!(
            "{reason} (`grant` is not among the arguments: {} gives one, for the tools it finds)",
            teach::SEARCH
        ),
        _ if reason.contains(UNGRANTED) => format!(
            "{reason} (a grant is for the tools of one search: one whose `intent` has all steps \
             gives a grant for all)"
        ),
        _ => return,
    };
    report["reason"] = said.into();
}

/// Tells places in a module as its author has it, before whose bytes a signature of so
/// many stands since.
fn by_its_authors_bytes(report: &mut Value, before: usize) {
    const AT: &str = "(at offset 0x";
    let Some((what, rest)) = report["reason"].as_str().and_then(|it| it.split_once(AT)) else {
        return;
    };
    let digits = rest.split(')').next().unwrap_or_default();
    let place = usize::from_str_radix(digits, 16).ok().and_then(|it| it.checked_sub(before));
    if let Some(place) = place {
        report["reason"] = format!("{what}{AT}{place:x}{}", &rest[digits.len()..]).into();
    }
}

/// How a run ends, and how many bytes a signature put before its program's own.
async fn carried_out(
    door: &Door,
    arguments: Arguments,
    context: RequestContext<RoleServer>,
) -> Result<(Finish, usize), RunError> {
    // Held until the run is over, not until somebody has stopped waiting.
    let _running = door.0.runs.try_acquire().map_err(|_| RunError::Busy)?;
    let Arguments { program, language, input, grant, limits } = arguments;
    let language = language.unwrap_or_default();
    let Object(Limits(limits)) = limits.unwrap_or_default();
    // The values are gone before the run begins: they take many times their text.
    let text = input.to_string().into_bytes();
    drop(input);
    let input = text;
    // What came within the bound of a message may be larger written again.
    if input.len() > INPUT_BYTES_MAX as usize {
        return Err(RunError::Input(input.len()));
    }
    let (authority, session) = match grant {
        None => (Authority::Tools(Vec::new()), door.0.session.clone()),
        Some(name) => match door.handles().grant(&name, Instant::now()) {
            Some(grant) => (Authority::Grant(grant.token), grant.session),
            None => return Err(RunError::Grant(one_line(&name, 40))),
        },
    };
    let module = tokio::task::spawn_blocking(move || program::module(&program, language));
    let module = module.await.map_err(|_| RunError::Assembler)??;
    let (program, before) = program::signed(module, door.0.principal.signer.as_deref())?;
    let progress_token = context.meta.get_progress_token();
    let order = Order {
        program,
        input,
        principal: door.0.principal.name.clone(),
        session: Some(session),
        authority,
        limits,
        prepare: false,
        events: progress_token.is_some(),
        hosted: None,
    };
    if context.ct.is_cancelled() || door.0.closing.is_cancelled() {
        return Err(RunError::Cancelled);
    }
    let run = door.0.service.submit(&order).await?;
    drop(order);
    let progress = progress_token.map(|token| Progress::start(token, context.peer.clone()));
    let given_up = async {
        tokio::select! {
            () = context.ct.cancelled() => {}
            () = door.0.closing.cancelled() => {}
        }
    };
    Ok((attended(run, progress, given_up).await?, before))
}

/// Tells of a run until its end, or cancels it when it is given up.
async fn attended(
    mut run: Run,
    mut progress: Option<Progress>,
    given_up: impl Future<Output = ()>,
) -> Result<Finish, RunError> {
    let mut given_up = pin!(given_up);
    let finish = loop {
        let message = tokio::select! {
            message = run.next() => message,
            () = &mut given_up => break None,
        };
        match message {
            Some(RunMessage::Event(event)) => {
                if let Some(progress) = &mut progress {
                    progress.tell(&event);
                }
            }
            Some(RunMessage::Finished(finish)) => break Some(finish),
            // It hosts no tools.
            Some(RunMessage::Callback(_)) => {}
            None => return Err(RunError::Lost),
        }
    };
    match finish {
        Some(finish) => {
            if let Some(progress) = progress {
                progress.end().await;
            }
            Ok(finish)
        }
        None => {
            // Nobody is told of it any more. What the service says of the run is
            // taken meanwhile: what it says to all others comes behind that.
            if let Some(progress) = progress {
                progress.task.abort();
            }
            run.cancel().await;
            let ended = tokio::time::timeout(CANCEL_TIME_MAX, run.finish()).await;
            ended.map_err(|_| RunError::Cancelled)?.map_err(RunError::Service)
        }
    }
}

/// What a model reads first: the output, and how the run ended if it did not
/// end well. The report has the rest.
fn text(report: &Value, is_whole: bool) -> String {
    let word = |field: &str| report[field].as_str().unwrap_or_default();
    let mut output = match word("output_encoding") {
        "base64" => format!("(base64) {}", word("output")),
        _ => word("output").to_owned(),
    };
    if json_bytes(&output) > OUTPUT_BYTES_TWICE_MAX {
        output.truncate(output.floor_char_boundary(OUTPUT_BYTES_SHOWN));
        let more = if is_whole { "has the whole" } else { "has more, and is cut itself" };
        output.push_str(&format!("…\n(this is its beginning: structuredContent.output {more})"));
    }
    if report["status"] == "ok" {
        return output;
    }
    let mut text = match word("kind") {
        "" => word("status").to_owned(),
        kind => format!("{} ({kind})", word("status")),
    };
    text.push_str(&format!(": {}", word("reason")));
    if let Some(ms) = report["retry_after_ms"].as_u64() {
        text.push_str(&format!("; try again in {} s", ms.div_ceil(1000)));
    }
    text.push('\n');
    let calls = report["tool_calls"].as_array().into_iter().flatten();
    for call in calls.filter(|call| call["status"] != "ok") {
        let (tool, status) = (&call["tool"], &call["status"]);
        let (tool, status) = (tool.as_str().unwrap_or_default(), status.as_str());
        text.push_str(&format!("call of {tool}: {}\n", status.unwrap_or_default()));
    }
    for log in report["log"].as_array().into_iter().flatten() {
        text.push_str(&format!("log: {}\n", log["text"].as_str().unwrap_or_default()));
    }
    if let Some(dropped @ 1..) = report["log_dropped"].as_u64() {
        text.push_str(&format!("log: full, {dropped} more dropped\n"));
    }
    let told = beginning(&text, TOLD_BYTES_MAX).len();
    if told < text.len() {
        text.truncate(told);
        text.push_str("…\n");
    }
    if !output.is_empty() {
        text.push_str(&format!("output:\n{output}"));
    }
    text
}

/// The first artifacts, as far as there is room for them, and in words which
/// there is none for.
fn shown(report: &Value, artifacts: Vec<Artifact>, mut result_room: usize) -> Vec<ContentBlock> {
    let run = report["run_id"].as_str().unwrap_or_default().to_owned();
    let mut room = ARTIFACT_BYTES_MAX;
    let (mut blocks, mut left_out) = (Vec::new(), Vec::new());
    for (number, artifact) in artifacts.into_iter().enumerate() {
        let bytes = artifact.content.len();
        let name = one_line(&artifact.name, ARTIFACT_NAME_CHARS_MAX);
        let name = format!("{name} ({bytes} bytes)");
        let Some(left) = room.checked_sub(bytes) else {
            left_out.push(name);
            continue;
        };
        // The name is the program's: the report has it, the address does not.
        let uri = format!("forge://runs/{run}/artifacts/{number}");
        let contents = match String::from_utf8(artifact.content) {
            Ok(text) => ResourceContents::text(text, uri),
            Err(error) => ResourceContents::blob(STANDARD.encode(error.as_bytes()), uri),
        };
        let block = ContentBlock::resource(contents.with_mime_type(artifact.media_type));
        let Some(result_left) = result_room.checked_sub(json_bytes(&block) + 1) else {
            left_out.push(name);
            continue;
        };
        (room, result_room) = (left, result_left);
        blocks.push(block);
    }
    if !left_out.is_empty() {
        let names = left_out.join(", ");
        blocks.push(ContentBlock::text(format!(
            "artifacts that are not here, since those of a run have {ARTIFACT_BYTES_MAX} bytes \
             together here, and with all else {RESULT_BYTES_MAX} as JSON: {}",
            beginning(&names, NAMES_BYTES_MAX - 1024),
        )));
    }
    blocks
}

/// Tells a client how a run goes on. A client that reads nothing misses
/// messages, and holds up nobody.
struct Progress {
    messages: mpsc::Sender<String>,
    task: tokio::task::JoinHandle<()>,
    /// Tools of calls that are not settled.
    calls: HashMap<u32, String>,
}

impl Progress {
    fn start(token: ProgressToken, peer: Peer<RoleServer>) -> Self {
        let (messages, mut waiting) = mpsc::channel::<String>(PROGRESS_MAX);
        let _ = messages.try_send("submitted".into());
        let task = tokio::spawn(async move {
            let mut count = 0.0;
            while let Some(message) = waiting.recv().await {
                count += 1.0;
                let said = ProgressNotificationParam::new(token.clone(), count);
                if peer.notify_progress(said.with_message(message)).await.is_err() {
                    return;
                }
            }
        });
        Self { messages, task, calls: HashMap::new() }
    }

    fn tell(&mut self, event: &RunEvent) {
        if let Some(message) = told(event, &mut self.calls) {
            let _ = self.messages.try_send(message);
        }
    }

    /// What is said comes before the result.
    async fn end(self) {
        let Self { messages, mut task, .. } = self;
        drop(messages);
        if tokio::time::timeout(PROGRESS_TIME_MAX, &mut task).await.is_err() {
            task.abort();
        }
    }
}

/// An event in words, if it is any progress.
fn told(event: &RunEvent, calls: &mut HashMap<u32, String>) -> Option<String> {
    Some(match event {
        RunEvent::Admitted { run_id } => format!("run {run_id} begins"),
        RunEvent::Log(log) => one_line(&log.text, PROGRESS_CHARS_MAX),
        RunEvent::Called { call, tool } => {
            let tool = one_line(tool.as_str(), PROGRESS_CHARS_MAX);
            calls.insert(*call, tool.clone());
            format!("calls {tool}")
        }
        RunEvent::Settled { call, code, .. } => {
            let tool = calls.remove(call).unwrap_or_default();
            match code {
                None => format!("{tool} answered"),
                Some(code) => format!("{tool}: {}", code.as_str()),
            }
        }
        RunEvent::Output(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_client::Client;
    use forge_protocol::frame::{self, Kind};
    use forge_protocol::handshake::{Hello, Role};
    use forge_protocol::run::Log;
    use forge_protocol::service::Finished;
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    /// A service that ends its one run when it is cancelled: with the last frame
    /// that comes.
    async fn serves(mut socket: UnixStream) {
        let mut said = Vec::new();
        frame::write_message(Kind::Hello, &Hello::ours(Role::Supervisor), &mut said);
        socket.write_all(&said).await.unwrap();
        let (mut heard, mut cancel) = (Vec::new(), Vec::new());
        let cancelled = forge_protocol::service::Cancel { number: 1 };
        frame::write_message(Kind::Cancel, &cancelled, &mut cancel);
        while !heard.ends_with(&cancel) {
            assert!(socket.read_buf(&mut heard).await.unwrap() > 0);
        }
        let end = Finished { number: 1, report: b"{}".to_vec(), artifacts: Vec::new() };
        said.clear();
        frame::write_message(Kind::Finished, &end, &mut said);
        socket.write_all(&said).await.unwrap();
    }

    #[test]
    fn an_integer_may_be_written_as_a_double_and_what_is_optional_as_null() {
        let read = |more: Value| {
            let arguments = json!({"program": "", "limits": more, "language": null});
            serde_json::from_value::<Arguments>(arguments)
        };
        let limits = |more| read(more).unwrap().limits.unwrap_or_default().0.0;
        let given = limits(json!({"timeout_ms": 2.0, "fuel": u64::MAX, "calls": null}));
        assert_eq!((given.wall_ms, given.fuel), (2, u64::MAX));
        assert_eq!(given.calls, RunLimits::default().calls);
        assert_eq!(limits(Value::Null).wall_ms, RunLimits::default().wall_ms);
        for wrong in [1.5, 0.0, -1.0, 1e300] {
            let error = read(json!({"fuel": 1, "timeout_ms": wrong})).err().unwrap().to_string();
            assert!(error.contains("timeout_ms") && error.contains("from 1 on"), "{error}");
        }
        assert!(read(json!({"calls": -1})).err().unwrap().to_string().contains("`calls` is -1"));
        assert_eq!(limits(json!({"calls": 1_u64 << 40})).calls, u32::MAX);
    }

    #[test]
    fn a_place_is_told_by_the_bytes_that_the_author_has() {
        let told = |reason: &str| {
            let mut report = json!({ "reason": reason });
            by_its_authors_bytes(&mut report, 0x77);
            report["reason"].as_str().unwrap().to_owned()
        };
        let (signed, own) =
            ("i32 (at offset 0xdf) in function 1", "i32 (at offset 0x68) in function 1");
        assert_eq!(told(signed), own);
        for other in ["", "no place", "x (at offset 0x8)", "(at offset 0xzz)"] {
            assert_eq!(told(other), other);
        }
    }

    #[test]
    fn a_run_that_is_refused_is_told_of_by_its_arguments() {
        let told = |mut report: Value, is_granted| {
            in_words_of_a_model(&mut report, is_granted);
            report["reason"].as_str().map(str::to_owned)
        };
        let long = json!({"reason": "wall_ms is 99999, the limit is 30000"});
        assert_eq!(told(long, false).unwrap(), "timeout_ms is 99999, the limit is 30000");
        let import = json!({"reason": "import tool.a.b: the grant does not name this tool"});
        let call =
            json!({"reason": "it returned 7", "tool_calls": [{"tool": "a.b", "status": "denied"}]});
        for report in [import, call] {
            assert!(told(report.clone(), false).unwrap().contains("search_tools gives one"));
            // It has a grant, and this is outside of it.
            let said = told(report, true).unwrap();
            assert_eq!(said.contains("all steps"), said.contains("does not name"), "{said}");
        }
        let memory = json!({"reason": "initial memory is 9, the limit is 8"});
        assert!(told(memory, false).unwrap().starts_with("limits.memory_bytes: initial memory"));
        let grant = json!({"reason": "this is no grant of this broker", "kind": "grant"});
        assert!(told(grant, true).unwrap().contains("search_tools gives another"));
        let changed = "the definition of a.b changed since this grant was issued: look at it";
        let changed = told(json!({"reason": changed, "kind": "grant"}), true).unwrap();
        assert!(changed.starts_with("the definition of a.b changed"), "{changed}");
        assert!(changed.ends_with("issued: search_tools gives another"), "{changed}");
        let gone = "there is no tool \"a.b\": did you mean \"a.c\"?";
        let gone = told(json!({"reason": gone, "kind": "no_such_tool"}), true).unwrap();
        assert!(gone.starts_with("there is no tool \"a.b\" any more, which"), "{gone}");
        let other = json!({"reason": "it returned 7", "tool_calls": []});
        assert_eq!(told(other.clone(), false).unwrap(), "it returned 7");
        assert_eq!(told(json!({"reason": ""}), false).unwrap(), "");
    }

    #[tokio::test]
    async fn a_cancelled_run_waits_for_no_client_that_takes_no_progress() {
        let order = Order {
            program: Vec::new(),
            input: Vec::new(),
            principal: "a".into(),
            session: None,
            authority: Authority::Tools(Vec::new()),
            limits: RunLimits::default(),
            prepare: false,
            events: true,
            hosted: None,
        };
        let mut took = Duration::MAX;
        // A busy host may take its time, but not always.
        for _ in 0..5 {
            let (ours, service) = UnixStream::pair().unwrap();
            tokio::spawn(serves(service));
            let run = Client::over(ours).await.unwrap().submit(&order).await.unwrap();
            let task = tokio::spawn(std::future::pending());
            let progress = Progress { messages: mpsc::channel(1).0, task, calls: HashMap::new() };
            let began = Instant::now();
            let end = attended(run, Some(progress), async {}).await.unwrap();
            assert_eq!(end.report, b"{}");
            took = took.min(began.elapsed());
        }
        assert!(took < PROGRESS_TIME_MAX, "{took:?}");
    }

    #[test]
    fn null_is_an_input_and_an_array_is_no_object() {
        let arguments = |mut arguments: Value| {
            arguments["program"] = "".into();
            serde_json::from_value::<Arguments>(arguments)
        };
        assert_eq!(arguments(json!({ "input": null })).unwrap().input, Value::Null);
        assert_eq!(arguments(json!({})).unwrap().input, json!({}));
        let some = arguments(json!({ "limits": { "calls": 1 } })).unwrap();
        assert_eq!(some.limits.unwrap().0.0.calls, 1);
        assert!(arguments(json!({ "limits": [1] })).is_err());
    }

    #[test]
    fn a_model_reads_the_output_and_what_went_wrong() {
        let mut report = json!({
            "status": "ok", "kind": "", "reason": "", "output": "42", "output_encoding": "utf8",
            "log": [{"level": 1, "text": "odd"}],
            "tool_calls": [{"tool": "a.b", "status": "ok"}, {"tool": "a.c", "status": "denied"}],
        });
        assert_eq!(text(&report, true), "42");
        report["status"] = "trap".into();
        report["kind"] = "unreachable".into();
        report["reason"] = "it reached unreachable".into();
        let said = "trap (unreachable): it reached unreachable\ncall of a.c: denied\nlog: \
                    odd\noutput:\n42";
        assert_eq!(text(&report, true), said);
        assert!(text(&json!(null), true).len() < 10);
    }

    #[test]
    fn calls_and_logs_are_told_in_one_line_each() {
        let tool = forge_protocol::name::ToolName::parse("a.b").unwrap();
        let log = Log { level: 1, text: format!("x\n\u{202e}{}", "y".repeat(1000)) };
        let denied = Some(forge_protocol::abi::CallCode::Denied);
        let called = |call| RunEvent::Called { call, tool: tool.clone() };
        let settled = |call, code| RunEvent::Settled { call, code, duration_ns: 1 };
        let mut calls = HashMap::new();
        let events = [called(0), called(1), settled(1, None), settled(0, denied)];
        let words: Vec<_> = events.iter().filter_map(|it| told(it, &mut calls)).collect();
        assert_eq!(words, ["calls a.b", "calls a.b", "a.b answered", "a.b: denied"]);
        assert!(calls.is_empty());
        let said = told(&RunEvent::Log(log), &mut calls).unwrap();
        assert!(said.starts_with("x  yyy") && said.chars().count() == PROGRESS_CHARS_MAX + 1);
        assert_eq!(told(&RunEvent::Output(b"x".to_vec()), &mut calls), None);
    }

    #[test]
    fn artifacts_ride_along_as_far_as_there_is_room() {
        let artifact = |content: Vec<u8>| Artifact {
            name: "../x".into(),
            media_type: "text/csv".into(),
            content,
        };
        let artifacts = vec![
            artifact(vec![0xff]),
            artifact(vec![b'a'; ARTIFACT_BYTES_MAX]),
            artifact(b"b".to_vec()),
        ];
        let blocks = shown(&json!({"run_id": "7"}), artifacts, RESULT_BYTES_MAX);
        let blocks = serde_json::to_value(blocks).unwrap();
        assert_eq!(blocks.as_array().unwrap().len(), 3);
        assert_eq!(blocks[0]["resource"]["blob"], "/w==");
        assert_eq!(blocks[1]["resource"]["text"], "b");
        assert_eq!(blocks[1]["resource"]["uri"], "forge://runs/7/artifacts/2");
        let said = blocks[2]["text"].as_str().unwrap();
        assert!(said.ends_with("as JSON: ../x (262144 bytes)"), "{said}");
    }

    #[test]
    fn a_large_output_is_there_once() {
        let report = |output: String| json!({"status": "ok", "output": output});
        let whole = "é".repeat(OUTPUT_BYTES_TWICE_MAX / 2);
        assert_eq!(text(&report(whole[2..].to_owned()), true), whole[2..]);
        let said = text(&report(format!("a{whole}")), true);
        assert!(said.len() < OUTPUT_BYTES_SHOWN + 100 && said.starts_with("aéé"), "{said}");
        assert!(said.ends_with("structuredContent.output has the whole)"), "{said}");
    }

    #[test]
    fn a_result_fits_what_clients_take_at_once_whatever_a_run_leaves() {
        let artifacts = || {
            let content = vec![b'"'; ARTIFACT_BYTES_MAX / 2];
            let artifact = |_| Artifact {
                name: "x".repeat(500),
                media_type: "a/b".into(),
                content: content.clone(),
            };
            (0..200).map(artifact).collect::<Vec<_>>()
        };
        let quotes = |bytes: usize| "\"".repeat(bytes);
        let log = json!({"level": 1, "text": quotes(1000)});
        let call = json!({"id": 1, "tool": "a.b", "status": "denied", "duration_us": 1});
        for (output, logs, calls) in [
            ("é".repeat(100_000), 0, 0),
            (quotes(100_000), 10, 0),
            (quotes(900_000), 10, 0),
            ("\0".repeat(2_000_000), 1000, 10_000),
            (String::new(), 1000, 10_000),
        ] {
            for status in ["ok", "trap"] {
                let report = json!({
                    "run_id": "7", "status": status, "kind": "", "reason": "", "output": output,
                    "log": vec![log.clone(); logs], "tool_calls": vec![call.clone(); calls],
                });
                let result = told_of(report, artifacts());
                let bytes = json_bytes(&result);
                assert!(bytes <= RESULT_BYTES_MAX + 1024, "{status} {}: {bytes}", output.len());
                let report = result.structured_content.unwrap();
                let is_whole = report["output"] == output;
                assert_eq!(is_whole, output.len() <= 200_000, "{}", output.len());
                if !is_whole {
                    let shown = report["output"].as_str().unwrap();
                    assert!(output.starts_with(shown) && report["output_cut"] == OUTPUT_CUT);
                    assert!(bytes > RESULT_BYTES_MAX / 2, "{bytes}");
                }
            }
        }
        for left in 0..8 {
            let output = "QUJD".repeat(RESULT_BYTES_MAX / 4 + left);
            let report = json!({ "status": "ok", "output": output, "output_encoding": "base64" });
            let report = told_of(report, Vec::new()).structured_content.unwrap();
            let shown = report["output"].as_str().unwrap();
            assert!(shown.len() > RESULT_BYTES_MAX / 2 && shown.len().is_multiple_of(BASE64_GROUP));
        }
        assert_eq!(beginning("é\"x\u{1}y", 11), "é\"x\u{1}");
        assert_eq!(beginning("ab", 2), "ab");
    }
}
