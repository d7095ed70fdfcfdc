//! `forge-vmm config`: a `forge.toml` with everything there is to say, and
//! everything that is wrong with one.
//!
//! The toolbroker's executable checks what is the toolbroker's, as the user
//! that it would run as: only that one can read its credentials. Nothing else
//! is started.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use forge_document::{Lines, place};
use forge_vmm::broker::{Broker, BrokerError};
use forge_vmm::cancel::Cancel;
use forge_vmm::isolation::Isolation;
use forge_vmm::keys;
use forge_vmm::link::{Patience, wait};
use serde::{Deserialize, Serialize};

use super::fault::{Fault, line_of, sifted, tables};
use super::{
    LowBroker, LowTrust, LowUser, LowVm, McpConfig, NO_RESET, limits, pool, read_text, service,
};
use crate::cli::args::{ConfigArgs, ConfigCheckArgs, ConfigCommand};
use crate::cli::{CliError, Exit, door, out, print_json};

/// What `config init` prints. A setting follows its `#` at once, a sentence
/// after a blank: without the `#` before settings, the file is checked as good
/// by `vmm/tests/config.rs`, which finds every key there.
const COMMENTED: &str = include_str!("commented.toml");

/// How long the toolbroker may take to check its part: a service that reloads waits for
/// it, and a file may be a pipe that nobody writes to.
const CHECK_TIME_MAX: Duration = Duration::from_secs(10);

/// A fault, the file it is in, and the line, if that is found.
#[derive(Debug, Serialize, Deserialize)]
struct Told {
    file: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
    #[serde(flatten)]
    fault: Fault,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", place(&self.file, self.line), self.fault)
    }
}

/// Prints a configuration, or what is wrong with one.
pub(crate) fn config(args: &ConfigArgs) -> Result<ExitCode, CliError> {
    match &args.command {
        ConfigCommand::Init => {
            out().write_all(COMMENTED.as_bytes())?;
            Ok(Exit::Ok.into())
        }
        ConfigCommand::Check(args) => check(args),
    }
}

fn check(args: &ConfigCheckArgs) -> Result<ExitCode, CliError> {
    let file = match (&args.config, &args.mcp_config) {
        (Some(file), _) => file.as_path(),
        (None, None) => Path::new("forge.toml"),
        // All of that is the toolbroker's.
        (None, Some(file)) => {
            return tell(args, file, &brokers(None, Some(file), None, Of::Everybody)?);
        }
    };
    let read = read_text(file);
    if args.json
        && let Err(CliError::File { source, .. }) = &read
    {
        let fault = Fault { field: None, problem: source.to_string(), line: None };
        return tell(args, file, &[told(file, None, fault)]);
    }
    let text = read.map_err(|error| match error {
        CliError::File { source, .. }
            if args.config.is_none() && source.kind() == io::ErrorKind::NotFound =>
        {
            CliError::Usage(
                "there is no forge.toml in this folder: --config names another, and `forge-vmm \
                 config init` prints one to begin with"
                    .into(),
            )
        }
        other => other,
    })?;
    tell(args, file, &faults(file, &text, args.mcp_config.as_deref(), Of::Everybody)?)
}

/// Whose reading of a file is checked.
#[derive(Clone, Copy)]
enum Of<'a> {
    /// The reading of every command.
    Everybody,
    /// A service's and its toolbroker's, until this is raised.
    AService(&'a Cancel),
}

impl<'a> Of<'a> {
    fn is_everybody(self) -> bool {
        matches!(self, Self::Everybody)
    }

    fn patience(self) -> Patience<'a> {
        let until = Some(Instant::now() + CHECK_TIME_MAX);
        match self {
            Self::Everybody => Patience { until, cancel: None },
            Self::AService(ends) => Patience { until, cancel: Some(ends) },
        }
    }
}

/// Whether a service could be started with these files: a reload that reads a part of it
/// is refused over the rest too, or the next toolbroker would find it.
///
/// # Errors
/// [`CliError::Usage`] with the first thing that is wrong.
pub(crate) fn is_good(
    config: Option<&Path>,
    mcp_config: Option<&Path>,
    ends: &Cancel,
) -> Result<(), CliError> {
    let of = Of::AService(ends);
    let faults = match config {
        Some(file) => faults(file, &read_text(file)?, mcp_config, of)?,
        None if mcp_config.is_some() => brokers(None, mcp_config, None, of)?,
        None => Vec::new(),
    };
    match faults.as_slice() {
        [] => Ok(()),
        [first, rest @ ..] => {
            let more = match rest.len() {
                0 => String::new(),
                more => format!(" (and {more} more: `forge-vmm config check` tells them)"),
            };
            Err(CliError::Usage(format!("{first}{more}")))
        }
    }
}

/// All that is wrong with a file that says this.
fn faults(
    file: &Path,
    text: &str,
    mcp_config: Option<&Path>,
    of: Of<'_>,
) -> Result<Vec<Told>, CliError> {
    let mut faults: Vec<Told> = match tables(text) {
        Ok(all) => {
            let lines = Lines::of(text);
            let (ours, user) = supervisors(&all, file.parent().unwrap_or(Path::new("")), of);
            let theirs = brokers(Some(file), mcp_config, user, of)?;
            let mut known = BTreeSet::new();
            let ours = ours.into_iter().map(|fault| told(file, line_of(&fault, &lines), fault));
            // What both read, both complain of: the toolbroker says it better.
            let all = theirs.into_iter().chain(ours);
            all.filter(|told| {
                told.fault.field.is_none()
                    || known.insert((told.file.clone(), told.fault.field.clone()))
            })
            .collect()
        }
        Err(fault) => vec![told(file, fault.line, fault)],
    };
    // As whoever mends the file goes through it.
    faults.sort_by_key(|told| (told.file != file, told.line));
    Ok(faults)
}

fn told(file: &Path, line: Option<u32>, fault: Fault) -> Told {
    Told { file: file.to_owned(), line, fault }
}

/// Prints what is wrong, or that this file is good.
fn tell(args: &ConfigCheckArgs, file: &Path, faults: &[Told]) -> Result<ExitCode, CliError> {
    let is_good = faults.is_empty();
    if args.json {
        print_json(&faults)?;
    } else {
        let mut out = out();
        for fault in faults {
            writeln!(out, "{fault}")?;
        }
        if is_good {
            writeln!(out, "{}: good", file.display())?;
        }
    }
    Ok(if is_good { Exit::Ok } else { Exit::Usage }.into())
}

/// What is wrong with the supervisor's own tables, and the toolbroker's user.
fn supervisors(
    all: &toml::Table,
    folder: &Path,
    of: Of<'_>,
) -> (Vec<Fault>, Option<forge_vmm::user::User>) {
    let mut faults = Vec::new();
    // What is good in a table; the rest is noted.
    fn read<T: serde::de::DeserializeOwned + Default>(
        all: &toml::Table,
        name: &str,
        faults: &mut Vec<Fault>,
    ) -> T {
        let Some(value) = all.get(name) else { return T::default() };
        let (found, rest) = sifted(name, value);
        faults.extend(found);
        rest.unwrap_or_default()
    }
    let trust: LowTrust = read(all, "trust", &mut faults);
    for (position, key) in trust.keys.iter().enumerate() {
        if let Err(error) = keys::read_trust(&[folder.join(key)]) {
            faults.push(Fault::at(format!("trust.keys.{position}"), error.to_string()));
        }
    }
    let broker: LowBroker = read(all, "broker", &mut faults);
    let user = broker.user.map(LowUser::resolve).transpose().unwrap_or_else(|error| {
        faults.push(Fault::at("broker.user", error.to_string()));
        None
    });
    let vm: LowVm = read(all, "vm", &mut faults);
    faults.extend(vm.faults());
    let pool: pool::LowPool = read(all, "pool", &mut faults);
    faults.extend(pool.faults());
    // A service may have been told otherwise on its command line.
    if of.is_everybody() && vm.isolation == Some(Isolation::Process) && pool.resets() {
        faults.push(Fault::at("pool.reuse", NO_RESET));
    }
    let limits: limits::LowLimits = read(all, "limits", &mut faults);
    faults.extend(limits.faults());
    let mcp: McpConfig = read(all, "mcp", &mut faults);
    // It and the keys that programs are signed with are `forge-vmm mcp`'s, which may be
    // another user's.
    if of.is_everybody() {
        faults.extend(mcp.faults());
    }
    let low: service::LowService = read(all, "service", &mut faults);
    let mut principals = std::collections::BTreeMap::new();
    match all.get("principals").map(toml::Value::as_table) {
        Some(Some(named)) => {
            for (name, value) in named {
                let field = format!("principals.{name}");
                let (found, rest) = sifted::<service::LowPrincipal>(&field, value);
                faults.extend(found);
                principals.extend(rest.map(|principal| (name.clone(), principal)));
            }
        }
        Some(None) => faults.push(Fault::at("principals", "expected a table")),
        None => {}
    }
    let service = service::resolve(low, principals, folder, &mut faults);
    let principals = &service.options.principals;
    for (name, principal) in &principals.0 {
        if of.is_everybody()
            && let Some(key) = &principal.sign_with
            && let Err(error) = keys::read_signer(key)
        {
            faults.push(Fault::at(format!("principals.{name}.sign_with"), error.to_string()));
        }
    }
    // Whether anybody could use the door is not known of principals that cannot be
    // read.
    let unread = faults.iter().any(|fault| fault.is_within("principals"));
    let door = door::faults(all, folder, &service, of.is_everybody()).into_iter();
    faults.extend(door.filter(|fault| !(unread && fault.field.as_deref() == Some("http"))));
    (faults, user)
}

/// What the toolbroker finds.
fn brokers(
    config: Option<&Path>,
    mcp_config: Option<&Path>,
    user: Option<forge_vmm::user::User>,
    of: Of<'_>,
) -> Result<Vec<Told>, CliError> {
    let broker = Broker::executable().map_err(BrokerError::Start)?;
    if !broker.is_file() {
        return Err(BrokerError::Missing(broker).into());
    }
    let mut command = Command::new(&broker);
    command.arg("check");
    for (flag, file) in [("--config", config), ("--mcp-config", mcp_config)] {
        if let Some(file) = file {
            command.arg(flag).arg(file);
        }
    }
    let uid = user.as_ref().map(forge_vmm::user::User::uid);
    if let Some(user) = user {
        user.becomes(&mut command);
    }
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = started.map_err(|source| match uid {
        Some(uid) => BrokerError::StartAs { uid, executable: broker.clone(), source },
        None => BrokerError::Start(source),
    })?;
    let said =
        child.stdout.take().map_or_else(|| Ok(Vec::new()), |said| all_in_time(said, of.patience()));
    if said.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(BrokerError::Start)?;
    let said =
        said.map_err(|source| CliError::File { path: "what the toolbroker finds".into(), source })?;
    if !status.success() {
        return Err(BrokerError::Configuration.into());
    }
    let unreadable = |error: serde_json::Error| BrokerError::Protocol(error.to_string());
    Ok(serde_json::from_slice(&said).map_err(unreadable)?)
}

/// All that is said there, as long as patience lasts.
fn all_in_time(mut from: ChildStdout, patience: Patience<'_>) -> io::Result<Vec<u8>> {
    let (mut said, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        wait(from.as_raw_fd(), libc::POLLIN, patience).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => io::Error::other(format!(
                "nothing within {} s: a file that the configuration names has no end, perhaps",
                CHECK_TIME_MAX.as_secs()
            )),
            _ => error,
        })?;
        match from.read(&mut buffer) {
            Ok(0) => return Ok(said),
            Ok(bytes) => said.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
