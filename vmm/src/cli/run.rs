//! `forge-vmm run`.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forge_protocol::broker::{Authority, BlockedTool, FoundTool};
use forge_protocol::ending::{Ending, RejectKind, UNGRANTED, WALL_MS};
use forge_protocol::limits::{FOUND_TOOLS_MAX, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::run::Artifact;
use forge_protocol::service::Order;
use forge_protocol::signature::{CORE_HEADER, SignedParts, TrustKeys};
use forge_protocol::worker::Tier;
use forge_vmm::admission::{Shape, shown, shown_whole};
use forge_vmm::broker::Broker;
use forge_vmm::keys;
use forge_vmm::pool::PoolOptions;
use forge_vmm::report::{RetrievedReport, RunReport, Status};
use forge_vmm::supervisor::{Attendance, RunResult, Supervisor, SupervisorOptions};

use super::args::RunArgs;
use super::config::{self, Found, GrantKey};
use super::interrupt::Interruptible;
use super::{CliError, Exit, complain, out, print_json, program, progress, serve};

/// The isolation in the report of a run that a service was not asked for.
const UNKNOWN: &str = "unknown";

/// Runs a program.
pub(crate) fn run(args: RunArgs) -> Result<ExitCode, CliError> {
    if args.prepare && args.service.is_none() {
        // What conflicts with a flag that is given, clap does not ask for.
        return Err(CliError::Usage("--prepare is for --service: one run prepares nothing".into()));
    }
    let limits = limits(&args);
    config::check_named(&args.broker)?;
    let input = config::json_argument("--input", &args.input)?;
    // Of a service's runs it is the service's to tell.
    let own_tier = match args.service {
        Some(_) => None,
        None => Some(config::tier(args.isolation, args.broker.config.as_deref())?),
    };
    let (program, trust) = match program_and_trust(&args) {
        // What is no module cannot be signed either.
        Err(CliError::Program(why)) if args.json => {
            let report = unsigned(own_tier, why);
            return Ok(ended(Status::Rejected, [print_json(&report)]));
        }
        read => read?,
    };
    let mut authority = config::authority(args.allow.clone(), args.grant.as_deref())?;
    // Where they cannot be, nothing has happened yet.
    if let Some(folder) = &args.artifacts {
        fs::create_dir_all(folder).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => failed(folder)(io::ErrorKind::NotADirectory.into()),
            _ => failed(folder)(error),
        })?;
    }
    let Some(tier) = own_tier else {
        let (principal, session) = (args.broker.principal.clone(), args.session.clone());
        let order = Order {
            program,
            input,
            principal,
            session,
            authority,
            limits,
            prepare: args.prepare,
            events: false,
            hosted: None,
        };
        return serve::submit(&args, order);
    };
    let key = match authority {
        Authority::Grant(_) => GrantKey::Kept,
        Authority::Tools(_) => GrantKey::Passing,
    };
    let trace_at = args
        .trace
        .as_deref()
        .map(|path| File::create(path).map(|file| (path, file)).map_err(failed(path)));
    let trace_at = trace_at.transpose()?;
    let mut retrieved = Vec::new();
    // A program that may call nothing needs no broker.
    let broker = match (&authority, &args.intent) {
        (Authority::Tools(_), Some(intent)) => {
            let broker = config::start_broker(&args.broker, key)?;
            retrieved = retrieve(&broker, &args, intent)?;
            let names = retrieved.iter().map(|tool| tool.spec.name.clone());
            authority = Authority::Tools(names.collect());
            Some(broker)
        }
        (Authority::Tools(tools), None) if tools.is_empty() => None,
        (Authority::Tools(tools), None) => {
            config::check_servers(&args.broker, tools)?;
            Some(config::start_broker(&args.broker, key)?)
        }
        (Authority::Grant(_), _) => Some(config::start_broker(&args.broker, key)?),
    };
    let options = SupervisorOptions {
        trust,
        maxima: config::maxima(args.broker.config.as_deref())?,
        pool: PoolOptions {
            tier,
            group: config::vm_group(args.broker.config.as_deref())?,
            ..PoolOptions::default()
        },
    };
    let supervisor = Supervisor::new(options, broker).map_err(CliError::Host)?;
    progress("running");
    let order = Order {
        program,
        input,
        principal: args.broker.principal.clone(),
        session: args.session.clone(),
        authority,
        limits,
        prepare: false,
        events: false,
        hosted: None,
    };
    let interruptible = Interruptible::new()?;
    let cancel = Some(interruptible.cancel());
    let result = supervisor.run_for(&order, &Attendance { cancel, ..Attendance::default() });
    drop(interruptible);
    result.report.log(&order.principal);
    // What is left to do comes after the result is printed.
    let RunResult { mut report, artifacts, trace, upkeep: _upkeep } = result;
    report.reason = in_words_of(&args, &order.program, report.kind, report.reason);
    report.retrieved = retrieved.iter().map(retrieved_report).collect();
    let mut kept = Ok(());
    if let Some((path, mut file)) = trace_at {
        kept = file.write_all(trace.to_json().to_string().as_bytes()).map_err(failed(path));
    }
    let written = keep_artifacts(args.artifacts.as_deref(), args.json, &artifacts, |at, path| {
        if let Some(entry) = report.artifacts.get_mut(at) {
            entry.path = Some(path);
        }
    });
    kept = kept.and(written);
    let printed = if args.json { print_json(&report) } else { print(&report) };
    let code = ended(report.status, [printed, kept]);
    // The broker stops its servers after the user has the result.
    drop(supervisor);
    Ok(code)
}

/// The report of a program that cannot be signed, and is sent to nobody: a service is
/// not asked what it would have been carried out in, which is not known then.
fn unsigned(own_tier: Option<Tier>, why: String) -> RunReport {
    let tier = own_tier.unwrap_or(Tier::Vm);
    let refused = RunResult::unstarted(tier, Status::Rejected, "invalid", why);
    let isolation = own_tier.map_or(UNKNOWN, Tier::as_str);
    RunReport { isolation, ..refused.report }
}

/// The options of `run` by the names that what they bound has in a report: of a limit
/// that something is over, and of one that the run reached. Any fuel may be asked for.
const LIMITS: [(&str, &str); 7] = [
    ("memory_bytes", "--memory"),
    ("initial memory", "--memory"),
    (WALL_MS, "--timeout"),
    ("input_bytes", "--input"),
    ("fuel", "--fuel"),
    ("deadline", "--timeout"),
    ("memory", "--memory"),
];

/// Why a run was refused, with the option or the file of this command line that it
/// is about: who refused knows neither.
pub(super) fn in_words_of(args: &RunArgs, program: &[u8], kind: &str, reason: String) -> String {
    let option = |name: &str| LIMITS.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
    let subject = match (kind, &args.grant) {
        ("too_large", _) if reason.starts_with(BR_TABLE) => {
            return by_its_authors_bytes(args, program).unwrap_or(reason);
        }
        ("too_large", _) => match reason.split_once(" is ") {
            Some((name, value)) => {
                let value = value.split(',').next().and_then(|value| value.parse().ok());
                let RunLimits { memory_bytes, program_bytes, .. } = RunLimits::operator_maxima();
                let most = match name {
                    "initial memory" => Some(memory_bytes),
                    "program_bytes" => Some(program_bytes.into()),
                    _ => None,
                };
                if let Some(most) = most.filter(|most| value > Some(*most)) {
                    // No option helps.
                    return format!("{reason}, and no run may have more than {most}");
                }
                match (args.limit.iter().any(|(said, n)| said == name && Some(*n) == value), value)
                {
                    (true, _) => Some("--limit".to_owned()),
                    (false, Some(value)) if name == "program_bytes" => {
                        let program = args.program.display();
                        return format!(
                            "{program}: {reason}: `--limit {name}={value}` lets it, and without \
                             what is there for debuggers it is smaller"
                        );
                    }
                    (false, _) => option(name),
                }
            }
            None => None,
        },
        ("fuel" | "deadline" | "memory", _) => option(kind),
        ("output", _) => Some("--limit output_bytes".to_owned()),
        ("artifacts", _) => Some("--limit".to_owned()),
        ("signature", _) => Some(args.program.display().to_string()),
        ("invalid", _) => return by_its_authors_bytes(args, program).unwrap_or(reason),
        ("grant", Some(file)) => Some(file.display().to_string()),
        ("import", None) if args.intent.is_none() && reason.contains(UNGRANTED) => {
            let wanted = Shape::read(program).map(|shape| ungranted(&shape, &args.allow));
            return match wanted.as_deref() {
                Ok([]) | Err(_) => reason,
                Ok(wanted) => format!("{reason}: {}", cure(wanted)),
            };
        }
        _ => None,
    };
    match subject {
        Some(subject) => format!("{subject}: {reason}"),
        None => reason,
    }
}

/// Why a program is invalid, by the bytes that its author has: a guest counts the
/// signature that this command gave it, and what it had to spell otherwise.
fn by_its_authors_bytes(args: &RunArgs, program: &[u8]) -> Option<String> {
    let module = match args.sign_with {
        Some(_) => [&CORE_HEADER, SignedParts::scan(program).ok()?.covered()].concat(),
        None => program.to_vec(),
    };
    match forge_guest_init::check(&limits(args), &module) {
        Err(Ending::Rejected { kind: RejectKind::Invalid | RejectKind::TooLarge, detail }) => {
            Some(shown_whole(&detail))
        }
        _ => None,
    }
}

/// How a reason begins that has a place in the module, though its kind is of sizes.
const BR_TABLE: &str = "the br_table at byte";

/// The tools that a program imports and nobody allowed it, each once.
fn ungranted(shape: &Shape, allow: &[ToolName]) -> Vec<ToolName> {
    let mut wanted: Vec<ToolName> = Vec::new();
    for tool in shape.tools().filter(|tool| !allow.contains(tool)) {
        if !wanted.contains(tool) {
            wanted.push(tool.clone());
        }
    }
    wanted
}

/// So many options are written out.
const CURES_SHOWN: usize = 16;

/// What grants these tools.
pub(super) fn cure(tools: &[ToolName]) -> String {
    let allow = |tool: &ToolName| Some(format!("--allow {}", tool.shell_word()?));
    let options: Option<Vec<_>> = tools.iter().take(CURES_SHOWN).map(allow).collect();
    let options = options.map_or_else(|| "--allow NAME".into(), |options| options.join(" "));
    format!("`{options}` {}", if tools.len() == 1 { "grants it" } else { "grants them" })
}

/// How the command ends after a run: as the run did, unless that went well and
/// something of what it left could not be written.
pub(super) fn ended(
    status: Status,
    written: impl IntoIterator<Item = Result<(), CliError>>,
) -> ExitCode {
    let mut code = ExitCode::from(status.exit_code());
    for error in written.into_iter().filter_map(Result::err) {
        complain(&error);
        if status == Status::Ok {
            code = Exit::Failed.into();
        }
    }
    code
}

fn failed(path: &Path) -> impl Fn(io::Error) -> CliError {
    move |source| CliError::File { path: path.display().to_string(), source }
}

/// Finds the tools that the run is to be granted.
fn retrieve(broker: &Broker, args: &RunArgs, intent: &str) -> Result<Vec<FoundTool>, CliError> {
    progress("searching tools");
    Ok(told(args, config::search(broker, &args.broker.principal, intent, args.k)?))
}

/// Says what was found and is granted, and what could not be searched. Nobody named
/// these tools, so whoever starts the run learns here which they are.
pub(crate) fn told(args: &RunArgs, found: Found) -> Vec<FoundTool> {
    let Found { tools, blocked, unavailable } = found;
    if tools.is_empty() && unavailable.is_empty() {
        complain(&config::nothing_found(&args.broker.principal));
    }
    for (server, reason) in &unavailable {
        complain(&format!("server {server} was not searched: {}", shown_whole(reason)));
    }
    if let Some(blocked) = not_searched(&blocked) {
        complain(&blocked);
    }
    // The report has them.
    if !tools.is_empty() && !args.json {
        let names: Vec<_> = tools.iter().map(|tool| shown_whole(tool.spec.name.as_str())).collect();
        complain(&format!("granted by --intent: {}", names.join(", ")));
    }
    tools
}

/// So many blocked tools are named.
const BLOCKED_SHOWN: usize = 8;

/// What no search finds: tools whose definitions nobody approved.
pub(crate) fn not_searched(blocked: &[BlockedTool]) -> Option<String> {
    let shown = blocked.iter().take(BLOCKED_SHOWN);
    let names: Vec<_> = shown
        .map(|BlockedTool { name, standing }| {
            format!("{} ({})", shown_whole(name.as_str()), standing.as_str())
        })
        .collect();
    if names.is_empty() {
        return None;
    }
    let more = match blocked.len() - names.len() {
        0 => String::new(),
        // There may be others that were not told.
        more if blocked.len() >= FOUND_TOOLS_MAX as usize => format!(" and at least {more} more"),
        more => format!(" and {more} more"),
    };
    let names = names.join(", ");
    Some(format!(
        "blocked and therefore not searched: {names}{more}; review them with `forge-vmm tools \
         review`"
    ))
}

pub(crate) fn retrieved_report(found: &FoundTool) -> RetrievedReport {
    let FoundTool { spec, score_millionths } = found;
    RetrievedReport { tool: spec.name.to_string(), score_millionths: *score_millionths }
}

fn limits(args: &RunArgs) -> RunLimits {
    let mut default = RunLimits::default();
    for (name, value) in &args.limit {
        // They were looked at when they were read.
        let _ = default.set(name, *value);
    }
    RunLimits {
        fuel: args.fuel.unwrap_or(default.fuel),
        memory_bytes: args.memory.unwrap_or(default.memory_bytes),
        wall_ms: args
            .timeout
            .map_or(default.wall_ms, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        ..default
    }
}

fn program_and_trust(args: &RunArgs) -> Result<(Vec<u8>, TrustKeys), CliError> {
    let mut paths = args.trust.clone();
    paths.extend(config::trust_keys(args.broker.config.as_deref())?);
    let trust = keys::read_trust(&paths)?;
    let Some(path) = &args.sign_with else {
        // A service trusts whom it trusts.
        if trust.as_slice().is_empty() && args.service.is_none() {
            return Err(CliError::Usage(
                "no key is trusted, so no program can run: --trust signer.pub \
                 (or --sign-with signer.pem, for development)"
                    .into(),
            ));
        }
        return Ok((super::read_file(&args.program)?, trust));
    };
    let signer = keys::read_signer(path)?;
    let signed = program::sign_file(&signer, &args.program)?;
    let all = trust.as_slice().iter().copied().chain([signer.trust_key()]);
    let trust = TrustKeys::new(all).map_err(|error| CliError::Usage(error.to_string()))?;
    Ok((signed, trust))
}

fn print(report: &RunReport) -> Result<(), CliError> {
    Shown {
        output: decoded_output(report),
        logs: report.log.iter().map(|log| (log.level.into(), log.text.as_str())).collect(),
        log_dropped: report.log_dropped,
        calls: report.tool_calls.iter().map(|call| (call.tool.as_str(), call.status)).collect(),
        status: report.status,
        reason: &report.reason,
    }
    .print()
}

/// So many failed calls of a run are shown one by one.
const CALLS_SHOWN: usize = 8;

/// What a person is shown of a report.
pub(super) struct Shown<'a> {
    pub(super) output: Vec<u8>,
    /// Level and text of each record.
    pub(super) logs: Vec<(u64, &'a str)>,
    pub(super) log_dropped: u64,
    /// Tool and status of each call.
    pub(super) calls: Vec<(&'a str, &'a str)>,
    pub(super) status: Status,
    pub(super) reason: &'a str,
}

impl Shown<'_> {
    /// The output to standard output; what the program logged, and how it ended,
    /// if badly, to standard error.
    ///
    /// # Errors
    /// If standard output takes no more.
    pub(super) fn print(self) -> Result<(), CliError> {
        let Self { output, logs, log_dropped, calls, status, reason } = self;
        let mut out = out();
        let written = out.write_all(&output).and_then(|()| out.flush());
        for (level, text) in logs {
            let levels = ["error", "warn", "info", "debug", "trace"];
            let level = usize::try_from(level).ok().and_then(|level| levels.get(level));
            let (level, text) = (level.unwrap_or(&"log"), shown_whole(text));
            let _ = writeln!(io::stderr(), "[{level}] {text}");
        }
        if log_dropped > 0 {
            complain(&format!("the run's log was full: {log_dropped} more records were dropped"));
        }
        if status != Status::Ok {
            // A program need not say which of its calls came to nothing.
            let mut failed = calls.iter().filter(|(_, status)| *status != "ok");
            for (tool, status) in failed.by_ref().take(CALLS_SHOWN) {
                complain(&format!("call of {}: {status}", shown_whole(tool)));
            }
            match failed.count() {
                0 => {}
                more => complain(&format!("{more} more calls failed: --json has all")),
            }
            complain(&format!("{}: {reason}", status.as_str()));
        }
        Ok(written?)
    }
}

fn decoded_output(report: &RunReport) -> Vec<u8> {
    use base64::Engine as _;
    use forge_vmm::report::OutputEncoding;
    match report.output_encoding {
        OutputEncoding::Utf8 => report.output.clone().into_bytes(),
        OutputEncoding::Base64 => {
            base64::engine::general_purpose::STANDARD.decode(&report.output).unwrap_or_default()
        }
    }
}

/// Writes artifacts as new files, if a folder is named for them. Their names are the
/// program's, so they are made into plain file names first; nothing is ever
/// overwritten. `at` hears where each went, by its number.
pub(super) fn keep_artifacts(
    folder: Option<&Path>,
    json: bool,
    artifacts: &[Artifact],
    mut at: impl FnMut(usize, String),
) -> Result<(), CliError> {
    let Some(folder) = folder else {
        if !artifacts.is_empty() && !json {
            let count = artifacts.len();
            complain(&format!("artifacts not kept: {count}; --artifacts DIR keeps them"));
        }
        return Ok(());
    };
    for (number, artifact) in artifacts.iter().enumerate() {
        let (path, mut file) = new_file(folder, &artifact.file_name())?;
        file.write_all(&artifact.content).map_err(failed(&path))?;
        progress(&format!("artifact {} → {}", shown(&artifact.name), path.display()));
        at(number, path.display().to_string());
    }
    Ok(())
}

/// A file of the first name of its kind that is not taken.
fn new_file(folder: &Path, name: &str) -> Result<(PathBuf, File), CliError> {
    let mut path = folder.join(name);
    let mut number = 2u64;
    loop {
        match File::create_new(&path) {
            // Another run may have taken it just now.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                path = folder.join(format!("{number}-{name}"));
                number += 1;
            }
            Err(error) => return Err(failed(&path)(error)),
            Ok(file) => return Ok((path, file)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_name_that_are_made_at_once_are_each_a_file_of_their_own() {
        let folder = std::env::temp_dir().join(format!("forge-new-file-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let make = || (0..64).map(|_| new_file(&folder, "a").unwrap().0).collect::<Vec<_>>();
        let mut made = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        made.sort();
        made.dedup();
        assert_eq!(made.len(), 4 * 64);
        fs::remove_dir_all(&folder).unwrap();
    }
}
