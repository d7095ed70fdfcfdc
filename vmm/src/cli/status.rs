//! What a service that stands is asked: `forge-vmm status`, `top`'s look, `drain`.

use std::fmt;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::service::{Question, Reply};
use serde_json::Value;

use super::args::{DrainArgs, StatusArgs};
use super::{CliError, Exit, out, print_json, top};

/// Says how a service stands.
pub(crate) fn status(args: &StatusArgs) -> Result<ExitCode, CliError> {
    let status = standing(&mut connect(&args.service)?, &args.service)?;
    if args.json {
        print_json(&status)?;
    } else {
        out().write_all(top::frame(&args.service, &status, None).as_bytes())?;
    }
    Ok(Exit::Ok.into())
}

/// Has a service take no more runs.
pub(crate) fn drain(args: &DrainArgs) -> Result<ExitCode, CliError> {
    let asked = connect(&args.service)?.ask(Question::Drain);
    asked.map_err(|error| undone(args.service.display(), error))?;
    Ok(Exit::Ok.into())
}

/// A connection to the service at this socket.
pub(super) fn connect(socket: &Path) -> Result<Client, CliError> {
    Client::connect(socket).map_err(|error| undone(socket.display(), error))
}

/// How it stands, as it says.
pub(super) fn standing(client: &mut Client, socket: &Path) -> Result<Value, CliError> {
    let strange = |what| CliError::Protocol { path: socket.display().to_string(), what };
    let reply = client.ask(Question::Status);
    match reply.map_err(|error| undone(socket.display(), error))? {
        Reply::Status(text) => serde_json::from_str(&text)
            .map_err(|error| strange(format!("how the service stands is no JSON: {error}"))),
        _ => Err(strange("the service answers something else than it was asked".into())),
    }
}

/// Why a service did not do what it was asked.
pub(super) fn undone(place: impl fmt::Display, error: ClientError) -> CliError {
    match error {
        ClientError::Refused { kind, message } => CliError::Refused { kind, message },
        lost @ ClientError::Lost(_) => CliError::Lost(format!("{place}: {lost}")),
        gone => CliError::File { path: place.to_string(), source: io::Error::other(gone) },
    }
}
