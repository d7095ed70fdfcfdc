//! A run that a service carries out.

use std::os::fd::AsFd as _;
use std::process::ExitCode;

use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::broker::FoundTool;
use forge_protocol::service::{Finish, Order, Question, Reply};

use super::finished::Finished;
use super::found;
use crate::cli::args::RunArgs;
use crate::cli::config::Found;
use crate::cli::interrupt::Interruptible;
use crate::cli::place::Place;
use crate::cli::status::undone;
use crate::cli::{CliError, progress};

/// Has a service carry out a run, and first find the tools for it where it has
/// an intent.
pub(super) fn run(args: &RunArgs, mut order: Order, place: &Place) -> Result<ExitCode, CliError> {
    let undone = |error| undone(place, error);
    let mut client = place.connect().map_err(undone)?;
    let mut retrieved = Vec::new();
    if let Some(intent) = &args.intent {
        progress("searching tools");
        retrieved = retrieve(&mut client, args, intent).map_err(undone)?;
        order.authority = found::granted(&retrieved);
    }
    let interruptible = Interruptible::new()?;
    let cancelled = Some(interruptible.cancel().as_fd());
    let finish = client.run_until(&order, cancelled, |_| ());
    drop(interruptible);
    let Finish { report, artifacts, .. } = finish.map_err(undone)?;
    let unreadable =
        |error: serde_json::Error| CliError::File { path: place.to_string(), source: error.into() };
    let finished = Finished::read(&report, artifacts).map_err(unreadable)?;
    finished.show(args, &order.program, &retrieved, Ok(()))
}

fn retrieve(
    client: &mut Client,
    args: &RunArgs,
    intent: &str,
) -> Result<Vec<FoundTool>, ClientError> {
    let (principal, intent) = (args.asker.principal.clone(), intent.to_owned());
    let question = Question::SearchTools { principal, intent, k: args.k };
    let Reply::Found { tools, blocked, unavailable } = client.ask(question)? else {
        return Err(ClientError::Protocol("a search is answered by something else".into()));
    };
    Ok(found::told(args, Found { tools, blocked, unavailable }))
}
