//! A run in this process.

use std::fs::File;
use std::io::Write as _;
use std::process::ExitCode;

use forge_protocol::broker::{Authority, FoundTool};
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Tier;
use forge_vmm::broker::Broker;
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Attendance, RunResult, Supervisor, SupervisorOptions};

use super::finished::Finished;
use super::{failed, found};
use crate::cli::args::RunArgs;
use crate::cli::config::{self, GrantKey};
use crate::cli::interrupt::Interruptible;
use crate::cli::{CliError, progress};

/// Carries a run out.
pub(super) fn run(
    args: &RunArgs,
    mut order: Order,
    tier: Tier,
    trust: TrustKeys,
) -> Result<ExitCode, CliError> {
    let trace_at = args
        .trace
        .as_deref()
        .map(|path| File::create(path).map(|file| (path, file)).map_err(failed(path)));
    let trace_at = trace_at.transpose()?;
    let (broker, retrieved) = broker(args, &mut order.authority)?;
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
    let interruptible = Interruptible::new()?;
    let cancel = Some(interruptible.cancel());
    let result = supervisor.run_for(&order, &Attendance { cancel, ..Attendance::default() });
    drop(interruptible);
    result.report.log(&order.principal);
    // What is left to do comes after the result is printed.
    let RunResult { report, artifacts, trace, upkeep: _upkeep } = result;
    let traced = match trace_at {
        Some((path, mut file)) => {
            file.write_all(trace.to_json().to_string().as_bytes()).map_err(failed(path))
        }
        None => Ok(()),
    };
    let code = Finished::here(&report, artifacts)?.show(args, &order.program, &retrieved, traced);
    // The broker stops its servers after the user has the result.
    drop(supervisor);
    code
}

/// The broker of a run that may call something, and the tools that were found for its
/// intent and are granted.
fn broker(
    args: &RunArgs,
    authority: &mut Authority,
) -> Result<(Option<Broker>, Vec<FoundTool>), CliError> {
    let start = |key| config::start_broker(&args.broker, key);
    match (&*authority, &args.intent) {
        (Authority::Tools(_), Some(intent)) => {
            let broker = start(GrantKey::Passing)?;
            progress("searching tools");
            let found = config::search(&broker, &args.asker.principal, intent, args.k)?;
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
