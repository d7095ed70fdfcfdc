//! `forge-vmm journal`. The journal is the broker's, and so is its format:
//! the broker's executable reads it, and this one says where it is.

use std::process::{Command, ExitCode};

use forge_vmm::broker::{Broker, BrokerError};

use super::args::{JournalArgs, JournalCommand, JournalListArgs};
use super::{CliError, Exit, config};

/// Reads the journal.
pub(crate) fn journal(args: &JournalArgs) -> Result<ExitCode, CliError> {
    match &args.command {
        JournalCommand::List(args) => list(args),
    }
}

fn list(args: &JournalListArgs) -> Result<ExitCode, CliError> {
    let broker = Broker::executable().map_err(BrokerError::Start)?;
    if !broker.is_file() {
        return Err(BrokerError::Missing(broker).into());
    }
    let mut command = Command::new(broker);
    command.args(["journal", "list", "--journal"]).arg(config::journal(args.state.as_deref())?);
    if let Some(run) = &args.run {
        command.args(["--run", run]);
    }
    if let Some(last) = args.last {
        command.args(["--last", &last.to_string()]);
    }
    if args.json {
        command.arg("--json");
    }
    let status = command.status().map_err(BrokerError::Start)?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(Exit::Internal.into(), ExitCode::from))
}
