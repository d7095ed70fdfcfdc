//! `forge-vmm grant`.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use forge_protocol::broker::{GrantClaims, GrantRequest, Narrowing, RefusalKind, Reply, Request};
use forge_protocol::hex::hex;
use forge_protocol::text::visible;
use forge_vmm::broker::{Broker, BrokerError, BrokerOptions};
use serde::Serialize;

use super::args::{
    BrokerArgs, GrantArgs, GrantAttenuateArgs, GrantCommand, GrantInspectArgs, GrantIssueArgs,
    GrantTerms,
};
use super::config::{self, GrantKey};
use super::replace::{Readers, put};
use super::{CliError, Exit, out, print_json};

/// Issues a grant, narrows it, or looks into it.
pub(crate) fn grant(args: GrantArgs) -> Result<ExitCode, CliError> {
    match args.command {
        GrantCommand::Issue(args) => issue(args),
        GrantCommand::Attenuate(args) => attenuate(args),
        GrantCommand::Inspect(args) => inspect(&args),
    }
}

fn issue(args: GrantIssueArgs) -> Result<ExitCode, CliError> {
    config::check_servers(&args.broker, &args.allow)?;
    let broker = config::start_broker(&args.broker, GrantKey::Lasting)?;
    let GrantTerms { constraints, calls, cost, session } = args.terms;
    let request = Request::IssueGrant(GrantRequest {
        principal: args.asker.principal,
        tools: args.allow,
        constraints,
        valid_s: args.valid.as_secs(),
        calls_max: calls,
        cost_max: cost,
        session,
    });
    write(&broker, &request, &args.output)
}

/// Narrows a grant. The one that knows tokens is the broker's executable: one
/// is started for this alone, with no configuration, no credential, no state
/// and no server.
fn attenuate(args: GrantAttenuateArgs) -> Result<ExitCode, CliError> {
    let token = config::read_grant(&args.grant)?;
    let GrantTerms { constraints, calls, cost, session } = args.terms;
    let request = Request::AttenuateGrant(Narrowing {
        token,
        tools: args.allow,
        constraints,
        valid_s: args.valid.map(|valid| valid.as_secs()),
        calls_max: calls,
        cost_max: cost,
        session,
    });
    write(&Broker::start(&BrokerOptions::default())?, &request, &args.output)
        .map_err(in_file(&args.grant))
}

/// Names the file of a grant that is refused: the broker knows none.
fn in_file(grant: &Path) -> impl Fn(CliError) -> CliError {
    move |error| match error {
        CliError::Broker(BrokerError::Refused { kind: kind @ RefusalKind::BadGrant, message }) => {
            let message = format!("{}: {message}", grant.display());
            CliError::Broker(BrokerError::Refused { kind, message })
        }
        other => other,
    }
}

/// Asks for a grant and writes it to a file.
fn write(broker: &Broker, request: &Request, output: &Path) -> Result<ExitCode, CliError> {
    let token = config::ask(broker, request, |reply| match reply {
        Reply::Grant(token) => Ok(token),
        other => Err(other),
    })
    .map_err(|error| match error {
        // It has what the command line says and nothing else.
        CliError::Broker(BrokerError::Refused { kind: RefusalKind::BadRequest, message }) => {
            CliError::Usage(message)
        }
        other => other,
    })?;
    // Whoever holds a grant may use it as its principal.
    put(output, &token, Readers::Owner, format_args!("{} bytes", token.len()))?;
    Ok(Exit::Ok.into())
}

#[derive(Serialize)]
struct Claims {
    principal: String,
    session: Option<String>,
    expires: String,
    calls_max: Option<u32>,
    cost_max: Option<u32>,
    tools: Vec<ClaimedTool>,
}

#[derive(Serialize)]
struct ClaimedTool {
    name: String,
    definition_sha256: String,
    constraints: Vec<String>,
}

/// What the grant in a file says.
///
/// # Errors
/// Among others, that it is not good: [`RefusalKind::BadGrant`], with the file's name.
pub(super) fn claims(broker: &BrokerArgs, grant: &Path) -> Result<GrantClaims, CliError> {
    let token = config::read_grant(grant)?;
    let broker = config::start_broker(broker, GrantKey::Kept)?;
    config::ask(&broker, &Request::InspectGrant { token }, |reply| match reply {
        Reply::Claims(claims) => Ok(claims),
        other => Err(other),
    })
    .map_err(in_file(grant))
}

fn inspect(args: &GrantInspectArgs) -> Result<ExitCode, CliError> {
    let claims = shown(&claims(&args.broker, &args.grant)?);
    if args.json {
        print_json(&claims)?;
    } else {
        let mut out = out();
        writeln!(out, "principal  {}", visible(&claims.principal))?;
        if let Some(session) = &claims.session {
            writeln!(out, "session    {}", visible(session))?;
        }
        writeln!(out, "expires    {}", claims.expires)?;
        if let Some(calls) = claims.calls_max {
            writeln!(out, "calls      {calls} at most in one run")?;
        }
        if let Some(cost) = claims.cost_max {
            writeln!(out, "cost       {cost} units at most in one run")?;
        }
        for tool in &claims.tools {
            writeln!(out, "tool       {}  {}", visible(&tool.name), tool.definition_sha256)?;
            for constraint in &tool.constraints {
                writeln!(out, "  where    {}", visible(constraint))?;
            }
        }
    }
    Ok(Exit::Ok.into())
}

fn shown(claims: &GrantClaims) -> Claims {
    let expires = UNIX_EPOCH + Duration::from_secs(claims.expires_unix_s.min(253_402_300_799));
    Claims {
        principal: claims.principal.clone(),
        expires: humantime::format_rfc3339_seconds(expires).to_string(),
        session: claims.session.clone(),
        calls_max: claims.calls_max,
        cost_max: claims.cost_max,
        tools: claims
            .tools
            .iter()
            .map(|tool| ClaimedTool {
                name: tool.name.to_string(),
                definition_sha256: hex(&tool.definition_sha256),
                constraints: tool.constraints.clone(),
            })
            .collect(),
    }
}
