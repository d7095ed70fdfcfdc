//! What several commands resolve from their flags: the broker, trust keys,
//! JSON arguments, and the supervisor's own tables of `forge.toml`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`check`] | what `config init` prints and `config check` finds |
//! | [`fault`] | what is wrong with a table, without its values |
//! | [`names`] | names and origins that no request can have |
//! | [`pool`] | the VMs that stand ready |
//! | [`service`] | how much a service takes, and who may speak for whom |

pub(crate) mod check;
mod fault;
mod limits;
mod names;
mod pool;
mod service;
pub(crate) mod socket;

pub(crate) use check::is_good;
pub(crate) use fault::{Fault, sifted, table, tables};
pub(crate) use limits::maxima;
pub(crate) use names::{Port, misnamed, no_principal};
pub(crate) use pool::{Pool, pool};
pub(crate) use service::{AtStart, ServiceConfig, read_at_start, roles, service};

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_document::{line_after, place};
use forge_protocol::broker::{Authority, BlockedTool, FoundTool, Reply, Request};
use forge_protocol::limits::GRANT_BYTES_MAX;
use forge_protocol::name::{RESERVED_SERVERS, ToolName};
use forge_protocol::worker::Tier;
use forge_vmm::broker::{Broker, BrokerError, BrokerOptions};
use forge_vmm::isolation::{Isolation, Resolved};
use forge_vmm::jail::GroupLimits;
use forge_vmm::link::Patience;
use forge_vmm::user::{User, UserError};
use serde::Deserialize;

use super::args::BrokerArgs;
use super::{CliError, complain, progress, read_all, read_file};

/// The supervisor's tables of `forge.toml`. The broker reads its own from the
/// same file and refuses a table that neither knows.
#[derive(Debug, Default)]
struct LowConfig {
    trust: LowTrust,
    broker: LowBroker,
    vm: LowVm,
    service: service::LowService,
    principals: BTreeMap<String, service::LowPrincipal>,
    pool: pool::LowPool,
    limits: limits::LowLimits,
    mcp: McpConfig,
}

impl LowConfig {
    /// # Errors
    /// The first that is wrong in a table of the supervisor's.
    fn of(all: &toml::Table) -> Result<Self, Fault> {
        Ok(Self {
            trust: table(all, "trust")?,
            broker: table(all, "broker")?,
            vm: table(all, "vm")?,
            service: table(all, "service")?,
            principals: principals(all)?,
            pool: table(all, "pool")?,
            limits: table(all, "limits")?,
            mcp: table(all, "mcp")?,
        })
    }
}

/// Each principal by itself, so that an error has its name.
fn principals(all: &toml::Table) -> Result<BTreeMap<String, service::LowPrincipal>, Fault> {
    let Some(value) = all.get("principals") else { return Ok(BTreeMap::new()) };
    let Some(named) = value.as_table() else {
        return Err(Fault::at("principals", "expected a table"));
    };
    let read = |name: &String| {
        let found: service::LowPrincipal = table(named, name).map_err(|fault| Fault {
            field: fault.field.map(|field| format!("principals.{field}")),
            ..fault
        })?;
        Ok((name.clone(), found))
    };
    named.keys().map(read).collect()
}

/// What `forge-vmm mcp` goes by.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct McpConfig {
    /// Whose programs come over stdio, whatever the command line says.
    pub(crate) principal: Option<String>,
    /// Whether programs that come unsigned are signed here at all.
    pub(crate) accept_unsigned: Option<bool>,
    /// Host names by which clients reach it, beside `localhost`.
    #[serde(default)]
    pub(crate) hosts: Vec<String>,
    /// Origins of browser pages that may ask, beside those on loopback.
    #[serde(default)]
    pub(crate) origins: Vec<String>,
}

impl McpConfig {
    /// Names and origins that no request can have.
    fn faults(&self) -> Vec<Fault> {
        let hosts = self.hosts.iter().map(|host| misnamed(host, Port::Allowed));
        let origins = self.origins.iter().map(|origin| names::no_origin(origin));
        let of = |list: &'static str, (at, why): (usize, Option<&str>)| {
            why.map(|why| Fault::at(format!("mcp.{list}.{at}"), why))
        };
        let hosts = hosts.enumerate().filter_map(|entry| of("hosts", entry));
        let principal = self.principal.as_deref().and_then(no_principal);
        let principal = principal.map(|why| Fault::at("mcp.principal", why)).into_iter();
        principal
            .chain(hosts)
            .chain(origins.enumerate().filter_map(|entry| of("origins", entry)))
            .collect()
    }
}

/// No zygote lives in less than 1 MiB, and no host has 1 PiB.
const GROUP_MEMORY_BYTES: RangeInclusive<u64> = 1 << 20..=1 << 50;
/// The zygote is one; Linux has no more numbers than these.
const GROUP_PROCESSES: RangeInclusive<u64> = 1..=4_194_304;
/// The kernel takes no less than 1 ms of each tenth of a second, and has no more
/// than 8192 CPUs.
const GROUP_CPU_THOUSANDTHS: RangeInclusive<u64> = 10..=8_192_000;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LowVm {
    /// What programs run in.
    isolation: Option<Isolation>,
    /// What all VMs together may use; needs cgroup v2.
    group: Option<GroupLimits>,
}

impl LowVm {
    /// Limits that the kernel refuses, or under which there is not even a zygote: told
    /// before the first run finds out.
    fn faults(&self) -> Vec<Fault> {
        let group = self.group.unwrap_or_default();
        [
            ("memory_bytes", group.memory_bytes, GROUP_MEMORY_BYTES),
            ("processes", group.processes, GROUP_PROCESSES),
            ("cpu_thousandths", group.cpu_thousandths, GROUP_CPU_THOUSANDTHS),
        ]
        .into_iter()
        .filter(|(_, value, bounds)| value.is_some_and(|value| !bounds.contains(&value)))
        .map(|(key, _, bounds)| {
            let (least, most) = bounds.into_inner();
            Fault::at(format!("vm.group.{key}"), format!("must be from {least} to {most}"))
        })
        .collect()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LowTrust {
    /// Public keys that programs are trusted by, relative to the file.
    #[serde(default)]
    keys: Vec<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LowBroker {
    /// Whom the toolbroker runs as.
    user: Option<LowUser>,
    /// The broker's own to read.
    #[serde(rename = "server_uids")]
    _server_uids: Option<serde::de::IgnoredAny>,
}

/// `"name"` or a number.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a user is a name or a number")]
pub(crate) enum LowUser {
    Number(u32),
    Name(String),
}

impl LowUser {
    /// The user of this host that is meant.
    pub(crate) fn resolve(self) -> Result<User, UserError> {
        match self {
            Self::Number(uid) => User::numbered(uid),
            Self::Name(name) => User::named(&name),
        }
    }
}

fn read_config(path: &Path) -> Result<LowConfig, CliError> {
    let all = tables(&read_text(path)?).map_err(|fault| fault.of(path))?;
    LowConfig::of(&all).map_err(|fault| fault.of(path))
}

/// A configuration file's text.
pub(crate) fn read_text(path: &Path) -> Result<String, CliError> {
    check_rereadable(path)?;
    String::from_utf8(read_file(path)?).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let place = place(path, Some(line_after(before)));
        CliError::Usage(format!("{place}: this is no UTF-8 text: save the file as UTF-8"))
    })
}

/// That a configuration is no pipe: whoever goes by a part of one reads it by itself, the
/// toolbroker in a process of its own.
fn check_rereadable(path: &Path) -> Result<(), CliError> {
    // What is not there is told by who reads it.
    let is_pipe = path.metadata().is_ok_and(|it| it.file_type().is_fifo());
    if is_pipe {
        let path = path.display();
        return Err(CliError::Usage(format!(
            "{path}: this is a pipe, and a configuration is read more than once: give a file"
        )));
    }
    Ok(())
}

/// The trust keys that a configuration names, as paths.
pub(crate) fn trust_keys(config: Option<&Path>) -> Result<Vec<PathBuf>, CliError> {
    let Some(path) = config else { return Ok(Vec::new()) };
    let low = read_config(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    Ok(low.trust.keys.into_iter().map(|key| folder.join(key)).collect())
}

/// What all VMs together may use, if a configuration says so.
pub(crate) fn vm_group(config: Option<&Path>) -> Result<Option<GroupLimits>, CliError> {
    let Some(path) = config else { return Ok(None) };
    let vm = read_config(path)?.vm;
    match vm.faults().into_iter().next() {
        Some(fault) => Err(fault.of(path)),
        None => Ok(vm.group),
    }
}

/// What programs run in: as the command line says, else as a configuration
/// does, else VMs. What `auto` comes to is said here.
pub(crate) fn tier(asked: Option<Isolation>, config: Option<&Path>) -> Result<Tier, CliError> {
    let configured = config.map_or(Ok(None), |path| read_config(path).map(|it| it.vm.isolation))?;
    let isolation = asked.or(configured).unwrap_or_default();
    let Resolved { tier, instead } = isolation.resolve();
    match instead {
        None if isolation == Isolation::Auto => complain(&"isolation auto: programs run in VMs"),
        None => {}
        Some(why) => complain(&format!(
            "isolation auto: programs run in jailed processes and not in VMs: {why}"
        )),
    }
    Ok(tier)
}

/// Why nothing is put back without VMs.
pub(crate) const NO_RESET: &str =
    "in isolation `process` each run has a process of its own, and none is put back";

/// Whether a configuration asks for processes and takes nothing else.
pub(crate) fn wants_processes(config: Option<&Path>) -> Result<bool, CliError> {
    let Some(path) = config else { return Ok(false) };
    Ok(read_config(path)?.vm.isolation == Some(Isolation::Process))
}

/// What a configuration says of `forge-vmm mcp`.
pub(crate) fn mcp(config: Option<&Path>) -> Result<McpConfig, CliError> {
    let Some(path) = config else { return Ok(McpConfig::default()) };
    let mcp = read_config(path)?.mcp;
    match mcp.faults().into_iter().next() {
        Some(fault) => Err(fault.of(path)),
        None => Ok(mcp),
    }
}

/// The user that a configuration names for the toolbroker.
fn broker_user(config: Option<&Path>) -> Result<Option<User>, CliError> {
    let Some(path) = config else { return Ok(None) };
    let user = read_config(path)?.broker.user.map(LowUser::resolve).transpose();
    user.map_err(|error| Fault::at("broker.user", error.to_string()).of(path))
}

/// Whether a command needs the broker's lasting grant key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GrantKey {
    /// It signs grants that outlive the broker, and is made where there is none.
    Lasting,
    /// It verifies grants that outlived theirs: where nothing was kept, none was
    /// issued.
    Kept,
    /// The grants it needs live as long as the broker.
    Passing,
    /// Nothing is called, so nothing has to be kept.
    Idle,
}

/// Refuses a `--mcp-config` that is not there, for a command that may not need
/// a broker to read it.
pub(crate) fn check_named(args: &BrokerArgs) -> Result<(), CliError> {
    let Some(path) = &args.mcp_config else { return Ok(()) };
    // Its content is the broker's.
    let found = std::fs::metadata(path);
    found.map(|_| ()).map_err(|source| CliError::File { path: path.display().to_string(), source })
}

/// Starts the broker that the flags describe.
pub(crate) fn start_broker(args: &BrokerArgs, key: GrantKey) -> Result<Broker, CliError> {
    args.mcp_config.as_deref().map_or(Ok(()), check_rereadable)?;
    // Calls are journalled however long grants last.
    let journal = args.state.as_ref().map(|state| state.join(JOURNAL));
    let user = broker_user(args.config.as_deref())?;
    let state = match (key, &args.state) {
        (_, Some(path)) => Some(path.clone()),
        // A broker with a user of its own cannot use this user's folder.
        (_, None) if let Some(user) = &user => {
            let own = state_of(user);
            (matches!(key, GrantKey::Lasting | GrantKey::Kept) || user.may_write(&own))
                .then_some(own)
        }
        (GrantKey::Lasting | GrantKey::Kept, None) => Some(default_state()?),
        // Without a journal no call has a result, however it went.
        (GrantKey::Passing, None) => Some(default_state()?),
        // Reviews of tools are kept there too. A host may have none at all: then
        // each broker sees its tools for the first time.
        (GrantKey::Idle, None) => default_state().ok(),
    };
    if let (GrantKey::Kept, Some(state)) = (key, &state)
        && state.try_exists().is_ok_and(|is_there| !is_there)
    {
        let state = state.display();
        return Err(CliError::Usage(format!(
            "no grant was issued with the state folder {state}, which is not there: --state is \
             the one that `grant issue` or `serve` was given"
        )));
    }
    if let (Some(user), GrantKey::Passing | GrantKey::Lasting) = (&user, key) {
        check_journalled(user, journal.as_deref())?;
    }
    let is_needed = matches!(key, GrantKey::Passing | GrantKey::Lasting) || args.state.is_some();
    if let (Some(folder), None, true) = (&state, &user, is_needed) {
        make_state(folder)?;
    }
    progress("starting the toolbroker");
    Ok(Broker::start(&BrokerOptions {
        mcp_config: args.mcp_config.clone(),
        config: args.config.clone(),
        state,
        passing_grants: matches!(key, GrantKey::Passing | GrantKey::Idle),
        journal,
        executable: None,
        user,
    })?)
}

/// Makes the state folder. A broker makes it when it first writes there, and then
/// calls have been made already.
fn make_state(folder: &Path) -> Result<(), CliError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|source| CliError::File {
        path: format!("the state folder {}", folder.display()),
        source: match source.kind() {
            ErrorKind::AlreadyExists => ErrorKind::NotADirectory.into(),
            _ => source,
        },
    })
}

/// Refuses a user of the broker's own that cannot keep a journal, before anything runs:
/// without one no call has a result.
fn check_journalled(user: &User, journal: Option<&Path>) -> Result<(), CliError> {
    let folder = journal.map_or_else(|| state_of(user).join(JOURNAL), Path::to_owned);
    if user.may_write(&folder) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "the toolbroker's user, uid {}, cannot write its journal in {}: give --state a folder that \
         this user owns",
        user.uid(),
        folder.display(),
    )))
}

/// Where state is kept by a user of the broker's own. The variable is the broker's as
/// well.
fn state_of(user: &User) -> PathBuf {
    let base = absolute("XDG_STATE_HOME").unwrap_or_else(|| user.home().join(".local/state"));
    base.join("forge-vmm")
}

/// A folder that a variable names. A relative one is to be ignored (XDG base
/// directories), as the broker does.
fn absolute(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The folder of the journal below a state folder.
const JOURNAL: &str = "journal";

/// Where brokers that were started with this `--state` keep their journal.
pub(crate) fn journal(state: Option<&Path>) -> Result<PathBuf, CliError> {
    Ok(state.map_or_else(default_state, |state| Ok(state.to_owned()))?.join(JOURNAL))
}

fn default_state() -> Result<PathBuf, CliError> {
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|base| base.join("forge-vmm"))
        .ok_or_else(|| {
            let what = "there is no HOME to keep the grant key, reviews and the journal in";
            CliError::Usage(format!("{what}: give --state"))
        })
}

/// The folder in which an MCP door may keep the grants that it has named, which is made
/// now, while it is known whose it is: what lies there says what a principal may do. None
/// where it, or the state folder around it, is not this user's alone to write.
pub(crate) fn named_grants(state: Option<&Path>) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let state = state.map_or_else(default_state, |state| Ok(state.to_owned())).ok()?;
    let folder = state.join("handles");
    let is_own = |folder: &Path| {
        // SAFETY: takes nothing and cannot fail.
        let own = unsafe { libc::geteuid() };
        let found = std::fs::symlink_metadata(folder);
        found.is_ok_and(|it| it.is_dir() && it.uid() == own && it.mode() & 0o022 == 0)
    };
    make_state(&state).ok()?;
    let state = state.canonicalize().ok()?;
    if !is_own(&state) {
        return None;
    }
    make_state(&folder).ok()?;
    is_own(&folder).then_some(folder)
}

/// Refuses tools of servers where no flag names a server. Built-in tools need
/// none.
pub(crate) fn check_servers<'a>(
    args: &BrokerArgs,
    tools: impl IntoIterator<Item = &'a ToolName>,
) -> Result<(), CliError> {
    if args.mcp_config.is_some() || args.config.is_some() {
        return Ok(());
    }
    let foreign = tools.into_iter().find(|tool| !RESERVED_SERVERS.contains(&tool.server()));
    foreign.map_or(Ok(()), |tool| {
        Err(CliError::Usage(format!(
            "{tool} needs its tool server: --mcp-config or --config (built-in tools need none)"
        )))
    })
}

/// Resolves `--allow` and `--grant`.
pub(crate) fn authority(allow: Vec<ToolName>, grant: Option<&Path>) -> Result<Authority, CliError> {
    let Some(path) = grant else { return Ok(Authority::Tools(allow)) };
    Ok(Authority::Grant(read_grant(path)?))
}

/// A grant from its file, also as the HTTP door gives it, in base64: no grant is text.
pub(crate) fn read_grant(path: &Path) -> Result<Vec<u8>, CliError> {
    let token = read_file(path)?;
    let token =
        STANDARD.decode(token.trim_ascii()).ok().filter(|it| !it.is_empty()).unwrap_or(token);
    if token.len() > GRANT_BYTES_MAX as usize {
        return Err(CliError::Usage(format!(
            "{}: {} bytes are no grant, which has at most {GRANT_BYTES_MAX}",
            path.display(),
            token.len(),
        )));
    }
    Ok(token)
}

/// Resolves a JSON argument: the text itself, @FILE, or - for standard input.
pub(crate) fn json_argument(flag: &str, text: &str) -> Result<Vec<u8>, CliError> {
    let mut bytes = match text {
        "-" => read_all(std::io::stdin().lock(), "standard input".into())?,
        _ => match text.strip_prefix('@') {
            Some("") => {
                return Err(CliError::Usage(format!("{flag}: a file's name follows the @")));
            }
            Some(path) => read_file(Path::new(path))?,
            None => text.as_bytes().to_vec(),
        },
    };
    // The mark that some editors begin a file with is no part of it.
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    let no_json =
        |why: &dyn std::fmt::Display| CliError::Usage(format!("{flag}: this is not JSON: {why}"));
    // What is skipped is not looked at as text.
    let text = std::str::from_utf8(&bytes).map_err(|error| no_json(&error))?;
    serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| no_json(&error))?;
    Ok(bytes)
}

/// In UTF-8.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a search gives.
pub(crate) struct Found {
    /// The tools that fit the intent, the best first.
    pub(crate) tools: Vec<FoundTool>,
    /// Those that no search finds.
    pub(crate) blocked: Vec<BlockedTool>,
    /// Servers that could not be asked, with the reasons.
    pub(crate) unavailable: Vec<(String, String)>,
}

/// What is said where a search found nothing at all.
pub(crate) fn nothing_found(principal: &str) -> String {
    format!(
        "no tool fits this intent for the principal {principal:?}: `forge-vmm tools list` shows \
         what it may see"
    )
}

/// Has the broker search tools.
pub(crate) fn search(
    broker: &Broker,
    principal: &str,
    intent: &str,
    k: u32,
    patience: Patience<'_>,
) -> Result<Found, CliError> {
    let request = Request::SearchTools { principal: principal.into(), intent: intent.into(), k };
    taken(broker.ask_for(&request, patience)?, |reply| match reply {
        Reply::Found { tools, blocked, unavailable } => Ok(Found { tools, blocked, unavailable }),
        other => Err(other),
    })
}

/// Asks a broker and takes the one answer that fits.
pub(crate) fn ask<T>(
    broker: &Broker,
    request: &Request,
    take: impl FnOnce(Reply) -> Result<T, Reply>,
) -> Result<T, CliError> {
    taken(broker.ask(request)?, take)
}

fn taken<T>(reply: Reply, take: impl FnOnce(Reply) -> Result<T, Reply>) -> Result<T, CliError> {
    take(reply).map_err(|other| {
        CliError::Broker(BrokerError::Protocol(format!("{other:?} does not answer this")))
    })
}
