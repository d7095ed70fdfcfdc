//! `forge-vmm serve`, and `run` where a service carries the run out.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use base64::Engine as _;
use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::limits::RunLimits;
use forge_protocol::service::{Finish, Order};
use forge_protocol::worker::Reuse;
use forge_vmm::keys;
use forge_vmm::pool::PoolOptions;
use forge_vmm::report::Status;
use forge_vmm::service::Server;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};

use super::args::{ReuseArg, RunArgs, ServeArgs};
use super::config::{self, GrantKey};
use super::door::{self, Door};
use super::{CliError, Exit, print_json};

/// Serves until it is ended.
pub(crate) fn serve(args: ServeArgs) -> Result<ExitCode, CliError> {
    let mut paths = args.trust.clone();
    paths.extend(config::trust_keys(args.broker.config.as_deref())?);
    let trust = keys::read_trust(&paths)?;
    if trust.as_slice().is_empty() {
        return Err(CliError::Usage(
            "no key is trusted, so no program can run: --trust signer.pub".into(),
        ));
    }
    let http = door::configured(args.broker.config.as_deref())?;
    let broker = config::start_broker(&args.broker, GrantKey::Lasting)?;
    let pool = PoolOptions {
        ready_min: args.ready,
        ready_max: args.ready_max.max(args.ready),
        group: config::vm_group(args.broker.config.as_deref())?,
        reuse: match args.reuse {
            ReuseArg::Fresh => Reuse::Fresh,
            ReuseArg::Reset => Reuse::Reset { prove_one_in: args.prove_one_in },
        },
    };
    let options =
        SupervisorOptions { trust, maxima: RunLimits::operator_maxima(), pool, worker: None };
    let supervisor = Arc::new(Supervisor::new(options, Some(broker))?);
    let at = |source| CliError::File { path: args.socket.display().to_string(), source };
    let server = Server::bind(&args.socket).map_err(at)?;
    server.end_by_signals().map_err(at)?;
    let door = http.map(|config| Door::open(config, &args.socket)).transpose()?;
    if let Some(door) = &door {
        let _ = writeln!(io::stderr(), "forge-vmm: HTTP at {}", door.place());
    }
    let _ = writeln!(io::stderr(), "forge-vmm: serving at {}", args.socket.display());
    server.serve(&supervisor).map_err(at)?;
    Ok(Exit::Ok.into())
}

/// Has a service carry out a run.
pub(crate) fn submit(args: &RunArgs, order: &Order) -> Result<ExitCode, CliError> {
    let Some(socket) = &args.service else {
        return Err(CliError::Usage("--service says where".into()));
    };
    let at = |source| CliError::File { path: socket.display().to_string(), source };
    let gone = |error: ClientError| at(io::Error::other(error));
    let Finish { report, .. } =
        Client::connect(socket).and_then(|mut client| client.run(order)).map_err(gone)?;
    let unreadable = |error: serde_json::Error| at(error.into());
    let report: serde_json::Value = serde_json::from_slice(&report).map_err(unreadable)?;
    let status: Status = serde_json::from_value(report["status"].clone()).map_err(unreadable)?;
    if args.json {
        print_json(&report)?;
    } else {
        let text = report["output"].as_str().unwrap_or_default();
        let output = match report["output_encoding"].as_str() {
            Some("base64") => {
                base64::engine::general_purpose::STANDARD.decode(text).unwrap_or_default()
            }
            _ => text.into(),
        };
        let logs = report["log"].as_array().into_iter().flatten();
        let logs = logs.map(|log| {
            (log["level"].as_u64().unwrap_or(u64::MAX), log["text"].as_str().unwrap_or_default())
        });
        let reason = report["reason"].as_str().unwrap_or_default();
        super::run::show(&output, logs, status, reason)?;
    }
    Ok(ExitCode::from(status.exit_code()))
}
