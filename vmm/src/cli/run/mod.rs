//! `forge-vmm run`: what the command line asks for is made one order, which is carried
//! out in this process or by a service, and what comes of it is shown in the same way.

mod artifacts;
mod finished;
pub(super) mod found;
mod here;
pub(super) mod reason;
mod service;

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use forge_protocol::ending::{RejectKind, RunEnd, Status};
use forge_protocol::limits::RunLimits;
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Tier;
use forge_vmm::keys;
use forge_vmm::report::RunReport;
use forge_vmm::supervisor::RunResult;

use super::args::RunArgs;
use super::place::Place;
use super::{CliError, config, print_json, program, read_file};

/// The isolation in the report of a run that a service was not asked for.
const UNKNOWN: &str = "unknown";

/// Who carries a run out.
enum By<'a> {
    /// A service, whose isolation it is the service's to tell.
    Service(&'a Place),
    /// This process, in this isolation.
    This(Tier),
}

/// Runs a program.
pub(crate) fn run(args: RunArgs) -> Result<ExitCode, CliError> {
    if args.prepare && args.service.is_none() {
        // What conflicts with a flag that is given, clap does not ask for.
        return Err(CliError::Usage("--prepare is for --service: one run prepares nothing".into()));
    }
    let limits = limits(&args)?;
    config::check_named(&args.broker)?;
    let input = config::json_argument("--input", &args.input)?;
    let by = match &args.service {
        Some(place) => By::Service(place),
        None => By::This(config::tier(args.isolation, args.broker.config.as_deref())?),
    };
    let (program, trust) = match program_and_trust(&args) {
        // What is no module cannot be signed either.
        Err(CliError::Program(why)) if args.json => {
            let report = unsigned(&by, why);
            return Ok(finished::ended(Status::Rejected, [print_json(&report)]));
        }
        read => read?,
    };
    let authority = config::authority(args.allow.clone(), args.grant.as_deref())?;
    // Where they cannot be, nothing has happened yet.
    if let Some(folder) = &args.artifacts {
        fs::create_dir_all(folder).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => failed(folder)(io::ErrorKind::NotADirectory.into()),
            _ => failed(folder)(error),
        })?;
    }
    let order = Order {
        program,
        input,
        principal: args.asker.principal.clone(),
        session: args.session.clone(),
        authority,
        limits,
        prepare: args.prepare,
        events: false,
        hosted: None,
    };
    match by {
        By::Service(place) => service::run(&args, order, place),
        By::This(tier) => here::run(&args, order, tier, trust),
    }
}

/// The report of a program that cannot be signed, and is sent to nobody: a service is
/// not asked what it would have been carried out in, which is not known then.
fn unsigned(by: &By<'_>, why: String) -> RunReport {
    let (tier, isolation) = match by {
        By::Service(_) => (Tier::Vm, UNKNOWN),
        By::This(tier) => (*tier, tier.as_str()),
    };
    let refused = RunResult::unstarted(tier, RunEnd::Rejected(RejectKind::Invalid), why);
    RunReport { isolation, ..refused.report }
}

/// The limits that are asked for. One that is said twice would be the one that its
/// speaker does not mean.
fn limits(args: &RunArgs) -> Result<RunLimits, CliError> {
    let wall_ms = args.timeout.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let own = [
        ("--fuel", "fuel", args.fuel),
        ("--memory", "memory_bytes", args.memory),
        ("--timeout", "wall_ms", wall_ms),
    ];
    let own = own.into_iter().filter_map(|(flag, name, value)| Some((flag, name, value?)));
    let named = args.limit.iter().map(|(name, value)| ("--limit", &**name, *value));
    let mut limits = RunLimits::default();
    let mut said: Vec<(&str, &str)> = Vec::new();
    for (flag, name, value) in own.chain(named) {
        if let Some((before, _)) = said.iter().find(|(_, it)| *it == name) {
            return Err(CliError::Usage(format!("{flag}: {name} is said by {before} already")));
        }
        said.push((flag, name));
        // They were looked at when they were read.
        let _ = limits.set(name, value);
    }
    Ok(limits)
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
        return Ok((read_file(&args.program)?, trust));
    };
    let signer = keys::read_signer(path)?;
    let signed = program::sign_file(&signer, &args.program)?;
    let all = trust.as_slice().iter().copied().chain([signer.trust_key()]);
    let trust = TrustKeys::new(all).map_err(|error| CliError::Usage(error.to_string()))?;
    Ok((signed, trust))
}

fn failed(path: &Path) -> impl Fn(io::Error) -> CliError {
    move |source| CliError::File { path: path.display().to_string(), source }
}
