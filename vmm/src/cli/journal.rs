//! `forge-vmm journal`. The journal is the broker's, and so is its format:
//! the broker's executable reads it, and this one says where it is.

use std::io::{self, Write as _};
use std::process::{Command, ExitCode, Output, Stdio};

use forge_vmm::broker::{Broker, BrokerError};

use super::args::{JournalArgs, JournalCommand, JournalListArgs};
use super::{CliError, Exit, complain, config};

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
    let listing = command.stderr(Stdio::piped()).spawn().map_err(BrokerError::Start)?;
    let Output { status, stderr, .. } = listing.wait_with_output().map_err(BrokerError::Start)?;
    // Whoever called this command knows no other.
    let said = String::from_utf8_lossy(&stderr);
    match said.strip_prefix("forge-toolbroker: ") {
        Some(said) => complain(&said.trim_end()),
        None => {
            let _ = io::stderr().write_all(said.as_bytes());
        }
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(Exit::Internal.into(), ExitCode::from))
}
