//! `forge-vmm grant`.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use forge_protocol::broker::{Authority, GrantClaims, GrantRequest, Reply, Request};
use forge_vmm::report::hex;
use serde::Serialize;

use super::args::{GrantArgs, GrantCommand, GrantInspectArgs, GrantIssueArgs};
use super::config::{self, GrantKey};
use super::{CliError, Exit, print_json};

/// Issues a grant, or looks into one.
pub(crate) fn grant(args: GrantArgs) -> Result<ExitCode, CliError> {
    match args.command {
        GrantCommand::Issue(args) => issue(args),
        GrantCommand::Inspect(args) => inspect(&args),
    }
}

fn issue(args: GrantIssueArgs) -> Result<ExitCode, CliError> {
    config::check_servers(&args.broker, &args.allow)?;
    let broker = config::start_broker(&args.broker, GrantKey::Lasting)?;
    let request = Request::IssueGrant(GrantRequest {
        principal: args.broker.principal,
        tools: args.allow,
        valid_s: args.valid.as_secs(),
        calls_max: args.calls,
    });
    let token = config::ask(&broker, &request, |reply| match reply {
        Reply::Grant(token) => Ok(token),
        other => Err(other),
    })?;
    // Whoever holds a grant may use it as its principal.
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&args.output)
        .and_then(|mut file| file.write_all(&token))
        .map_err(|source| CliError::File { path: args.output.display().to_string(), source })?;
    writeln!(io::stdout().lock(), "{}  {} bytes", args.output.display(), token.len())?;
    Ok(Exit::Ok.into())
}

#[derive(Serialize)]
struct Claims {
    principal: String,
    expires: String,
    calls_max: Option<u32>,
    tools: Vec<ClaimedTool>,
}

#[derive(Serialize)]
struct ClaimedTool {
    name: String,
    definition_sha256: String,
}

fn inspect(args: &GrantInspectArgs) -> Result<ExitCode, CliError> {
    let authority = config::authority(Vec::new(), Some(&args.grant))?;
    let Authority::Grant(token) = authority else {
        return Err(CliError::Usage("this is no grant".into()));
    };
    let broker = config::start_broker(&args.broker, GrantKey::Lasting)?;
    let claims = config::ask(&broker, &Request::InspectGrant { token }, |reply| match reply {
        Reply::Claims(claims) => Ok(claims),
        other => Err(other),
    })?;
    let claims = shown(&claims);
    if args.json {
        print_json(&claims)?;
    } else {
        let mut out = io::stdout().lock();
        writeln!(out, "principal  {}", claims.principal)?;
        writeln!(out, "expires    {}", claims.expires)?;
        if let Some(calls) = claims.calls_max {
            writeln!(out, "calls      {calls} at most in one run")?;
        }
        for tool in &claims.tools {
            writeln!(out, "tool       {}  {}", tool.name, tool.definition_sha256)?;
        }
    }
    Ok(Exit::Ok.into())
}

fn shown(claims: &GrantClaims) -> Claims {
    let expires = UNIX_EPOCH + Duration::from_secs(claims.expires_unix_s.min(253_402_300_799));
    Claims {
        principal: claims.principal.clone(),
        expires: humantime::format_rfc3339_seconds(expires).to_string(),
        calls_max: claims.calls_max,
        tools: claims
            .tools
            .iter()
            .map(|tool| ClaimedTool {
                name: tool.name.to_string(),
                definition_sha256: hex(&tool.definition_sha256),
            })
            .collect(),
    }
}
