//! A run in this process.

use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

use forge_protocol::broker::{Authority, FoundTool};
use forge_protocol::ending::RunEnd;
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Tier;
use forge_vmm::broker::Broker;
use forge_vmm::cancel::Cancel;
use forge_vmm::link::Patience;
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Attendance, RunResult, Supervisor, SupervisorOptions};

use super::finished::Finished;
use super::{failed, found};
use crate::cli::args::RunArgs;
use crate::cli::config::{self, GrantKey};
use crate::cli::interrupt::Interruptible;
use crate::cli::replace::{Readers, replace};
use crate::cli::{CliError, progress};

/// Carries a run out.
pub(super) fn run(
    args: &RunArgs,
    mut order: Order,
    tier: Tier,
    trust: TrustKeys,
) -> Result<ExitCode, CliError> {
    args.trace.as_deref().map_or(Ok(()), |path| check_trace(path, &args.program))?;
    let interruptible = Interruptible::new()?;
    let cancel = interruptible.cancel();
    let (broker, retrieved) = match broker(args, &mut order.authority, cancel) {
        // Whatever it says of that.
        Err(_) if cancel.is_raised() => {
            let reason = "the run was cancelled before it began";
            let RunResult { report, artifacts, .. } =
                RunResult::unstarted(tier, RunEnd::Cancelled, reason);
            report.log(&order.principal);
            return Finished::here(&report, artifacts)?.show(args, &order.program, &[], Ok(()));
        }
        started => started?,
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
    let attendance = Attendance { cancel: Some(cancel), ..Attendance::default() };
    let result = supervisor.run_for(&order, &attendance);
    drop(interruptible);
    result.report.log(&order.principal);
    // What is left to do comes after the result is printed.
    let RunResult { report, artifacts, trace, upkeep: _upkeep } = result;
    let traced = args.trace.as_deref().map_or(Ok(()), |path| {
        let trace = trace.to_json().to_string();
        replace(path, trace.as_bytes(), Readers::AsBefore).map_err(failed(path))
    });
    let code = Finished::here(&report, artifacts)?.show(args, &order.program, &retrieved, traced);
    // The broker stops its servers after the user has the result.
    drop(supervisor);
    code
}

/// Whether a trace can be written there, before anything has happened. What is there
/// stays until there is one.
fn check_trace(path: &Path, program: &Path) -> Result<(), CliError> {
    let is_same =
        |path: &Path| Some(fs::canonicalize(path).ok()? == fs::canonicalize(program).ok()?);
    if is_same(path) == Some(true) {
        let text = format!("--trace {}: this is the program", path.display());
        return Err(CliError::Usage(text));
    }
    if fs::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        // A pipe, whose reader would take this for all of it; or a terminal.
        return Ok(());
    }
    let is_there = fs::symlink_metadata(path).is_ok();
    File::options().append(true).create(true).open(path).map_err(failed(path))?;
    // It was for the question alone.
    if is_there { Ok(()) } else { fs::remove_file(path).map_err(failed(path)) }
}

/// The broker of a run that may call something, and the tools that were found for its
/// intent and are granted.
fn broker(
    args: &RunArgs,
    authority: &mut Authority,
    cancel: &Cancel,
) -> Result<(Option<Broker>, Vec<FoundTool>), CliError> {
    let start = |key| config::start_broker(&args.broker, key);
    match (&*authority, &args.intent) {
        (Authority::Tools(_), Some(intent)) => {
            let broker = start(GrantKey::Passing)?;
            progress("searching tools");
            let patience = Patience { until: None, cancel: Some(cancel) };
            let asker = &args.asker.principal;
            let found = config::search(&broker, asker, intent, args.k, patience)?;
            let retrieved = found::told(args, found);
            *authority = found::granted(&retrieved);
            Ok((Some(broker), retrieved))
        }
        (Authority::Tools(tools), None) if tools.is_empty() => Ok((None, Vec::new())),
        (Authority::Tools(tools), None) => {
            config::check_servers(&args.broker, tools)?;
            Ok((Some(start(GrantKey::Passing)?), Vec::new()))
        }
        (Authority::Grant(_), _) => Ok((Some(start(GrantKey::Kept)?), Vec::new())),
    }
}
