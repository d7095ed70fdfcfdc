//! `[service]` and `[principals.<name>]` of `forge.toml`: how much a service
//! takes, and who may speak for whom. The doors read the same principals.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forge_protocol::hex::unhex_array;
use forge_protocol::limits::RunLimits;
use forge_vmm::service::options::{BOUND_MAX, Bounds, Principal, Principals};
use forge_vmm::service::{ServiceOptions, VsockAddress};
use serde::Deserialize;
use serde::de::IgnoredAny;
use sha2::{Digest as _, Sha256};
use toml::Value;

use super::fault::{Fault, tables};
use super::{no_principal, read_config, read_text, socket};
use crate::cli::CliError;

/// Waits and drains beyond this are a mistake.
const WAIT_MS_MAX: u64 = 24 * 60 * 60 * 1000;
/// VMADDR_CID_ANY and VMADDR_PORT_ANY (vsock(7)).
const VSOCK_ANY: u32 = u32::MAX;

/// The table as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowService {
    /// Where it listens, relative to the file.
    socket: Option<PathBuf>,
    /// Who may connect: the socket's mode, octal.
    mode: Option<String>,
    /// Runs that may be carried out at the same time.
    runs_max: Option<usize>,
    /// Runs that wait for their turn.
    queue_max: Option<usize>,
    /// How long they wait.
    queue_wait_ms: Option<u64>,
    /// Runs of one principal, running and waiting together.
    principal_runs_max: Option<usize>,
    /// How long runs may still take when the service is to end.
    drain_ms: Option<u64>,
    /// That idle CPUs are asked to be ready while runs come.
    pm_qos: Option<bool>,
    /// That it listens on AF_VSOCK too.
    vsock: Option<LowVsock>,
}

/// Where, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LowVsock {
    /// The port.
    port: u32,
    /// This host's CID, if not all that it has.
    cid: Option<u32>,
}

/// One principal as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowPrincipal {
    /// The broker's own to read.
    #[serde(rename = "roles")]
    _roles: Option<IgnoredAny>,
    /// Users of this host that may speak for it.
    #[serde(default)]
    uids: Vec<u32>,
    /// Machines that may speak for it over AF_VSOCK.
    #[serde(default)]
    cids: Vec<u32>,
    /// Bearer tokens that speak for it, as their SHA-256 in hex.
    #[serde(default)]
    token_sha256: Vec<String>,
    /// Its runs, running and waiting together.
    runs_max: Option<usize>,
    /// The key that a door signs its programs with, relative to the file.
    sign_with: Option<PathBuf>,
}

/// What a configuration says of a service.
#[derive(Debug)]
pub(crate) struct ServiceConfig {
    /// Where it listens.
    pub(crate) socket: Option<PathBuf>,
    /// The socket's mode.
    pub(crate) mode: u32,
    /// Where it listens on AF_VSOCK, if anywhere.
    pub(crate) vsock: Option<VsockAddress>,
    /// All other settings of the service.
    pub(crate) options: ServiceOptions,
}

/// What a configuration says of a service, or what is good without one.
pub(crate) fn service(config: Option<&Path>) -> Result<ServiceConfig, CliError> {
    let (low, principals, path) = match config {
        Some(path) => {
            let low = read_config(path)?;
            (low.service, low.principals, path)
        }
        None => (LowService::default(), BTreeMap::new(), Path::new("")),
    };
    let mut faults = Vec::new();
    let resolved = resolve(low, principals, path.parent().unwrap_or(Path::new("")), &mut faults);
    match faults.into_iter().next() {
        Some(fault) => Err(fault.of(path)),
        None => Ok(resolved),
    }
}

/// What only a start reads, by the names of its tables and fields.
pub(crate) type AtStart = BTreeMap<String, Value>;

/// What of a configuration only a start reads, by the names of its tables and fields: what
/// is the toolbroker's but for roles, the pool's and the socket's. Of files that it names
/// (credentials, OpenAPI documents), and of `--mcp-config`, which state they are in.
pub(crate) fn read_at_start(
    config: Option<&Path>,
    mcp_config: Option<&Path>,
) -> Result<AtStart, CliError> {
    let mut found = AtStart::new();
    if let Some(file) = mcp_config {
        found.insert("--mcp-config".into(), state_of(file));
    }
    let Some(path) = config else { return Ok(found) };
    let all = tables(&read_text(path)?).map_err(|fault| fault.of(path))?;
    for (name, value) in all {
        let fields: &[&str] = match name.as_str() {
            // `[mcp]` is another command's.
            "trust" | "roles" | "principals" | "mcp" => continue,
            "service" => &["socket", "mode", "vsock"],
            "http" => &["listen", "user"],
            _ => {
                states_of(&name, &value, &mut found);
                found.insert(name, value);
                continue;
            }
        };
        let of = |field: &&str| Some((format!("{name}.{field}"), value.get(*field)?.clone()));
        found.extend(fields.iter().filter_map(of));
    }
    Ok(found)
}

/// The states of the files that are named in a table, by where they are. They are the
/// toolbroker's, whose paths count from the working directory.
fn states_of(name: &str, value: &Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::Table(fields) => {
            for (field, value) in fields {
                let name = format!("{name}.{field}");
                match (field.as_str(), value) {
                    ("file" | "openapi" | "age" | "identity" | "ca_file", Value::String(file)) => {
                        found.insert(name, state_of(Path::new(file)));
                    }
                    _ => states_of(&name, value, found),
                }
            }
        }
        Value::Array(values) => {
            for (at, value) in values.iter().enumerate() {
                states_of(&format!("{name}.{at}"), value, found);
            }
        }
        _ => {}
    }
}

/// Another where another file is there, or something else in it. What is in it, nobody
/// but the toolbroker reads.
fn state_of(file: &Path) -> Value {
    let state = file.metadata().map(|it| {
        format!("{} {} {} {} {}", it.dev(), it.ino(), it.len(), it.mtime(), it.mtime_nsec())
    });
    Value::String(state.unwrap_or_else(|error| error.kind().to_string()))
}

/// What a configuration says of roles, as [`Request::LoadRoles`] has it.
///
/// [`Request::LoadRoles`]: forge_protocol::broker::Request::LoadRoles
pub(crate) fn roles(config: &Path) -> Result<String, CliError> {
    let all = tables(&read_text(config)?).map_err(|fault| fault.of(config))?;
    let mut told: BTreeMap<&str, Value> = BTreeMap::new();
    if let Some(roles) = all.get("roles") {
        told.insert("roles", roles.clone());
    }
    if let Some(Value::Table(named)) = all.get("principals") {
        let of = |principal: &Value| {
            let roles = principal.get("roles").cloned();
            Value::Table(roles.into_iter().map(|roles| ("roles".into(), roles)).collect())
        };
        let named = named.iter().map(|(name, principal)| (name.clone(), of(principal)));
        told.insert("principals", Value::Table(named.collect()));
    }
    serde_json::to_string(&told).map_err(|error| CliError::Host(error.into()))
}

/// Checks both tables. Where one has a fault, what comes back is of no use.
pub(super) fn resolve(
    low: LowService,
    principals: BTreeMap<String, LowPrincipal>,
    folder: &Path,
    faults: &mut Vec<Fault>,
) -> ServiceConfig {
    let usual = ServiceOptions::usual(RunLimits::operator_maxima().memory_bytes);
    let within = |field: &str, value: Option<usize>, these: RangeInclusive<usize>| {
        let wrong = value.is_some_and(|value| !these.contains(&value));
        wrong.then(|| Fault::at(field, format!("must be {} to {}", these.start(), these.end())))
    };
    let bounded = |field: &str, value: Option<usize>, least: usize, faults: &mut Vec<Fault>| {
        faults.extend(within(field, value, least..=BOUND_MAX));
        value
    };
    // Those that run and those that wait together.
    let both = |field: &str, value: Option<usize>, faults: &mut Vec<Fault>| {
        faults.extend(within(field, value, 1..=2 * BOUND_MAX));
        value
    };
    let time = |field: &str, value: Option<u64>, usual: Duration, faults: &mut Vec<Fault>| {
        if value.is_some_and(|ms| ms > WAIT_MS_MAX) {
            faults.push(Fault::at(field, "must be at most a day"));
        }
        value.map_or(usual, Duration::from_millis)
    };
    let bounds = Bounds::of_host(
        RunLimits::operator_maxima().memory_bytes,
        bounded("service.runs_max", low.runs_max, 1, faults),
        bounded("service.queue_max", low.queue_max, 0, faults),
        both("service.principal_runs_max", low.principal_runs_max, faults),
        time("service.queue_wait_ms", low.queue_wait_ms, usual.bounds.queue_wait, faults),
    );
    let drain = time("service.drain_ms", low.drain_ms, usual.drain, faults);
    let mode = socket::mode("service.mode", low.mode.as_deref()).unwrap_or_else(|fault| {
        faults.push(fault);
        socket::OWN
    });
    let socket = low.socket.map(|it| socket::path("service.socket", folder.join(it)));
    let socket = socket.transpose().unwrap_or_else(|fault| {
        faults.push(fault);
        None
    });
    let vsock = low.vsock.map(|LowVsock { port, cid }| {
        if [0, VSOCK_ANY].contains(&port) {
            faults.push(Fault::at("service.vsock.port", "must be 1 to 4294967294"));
        }
        // The hypervisor's is nobody's.
        if cid == Some(0) || cid == Some(VSOCK_ANY) {
            let why = "must be 1 (this host's processes alone), 2 (as a host) or this machine's \
                       own; leave it out to listen at all of them";
            faults.push(Fault::at("service.vsock.cid", why));
        }
        VsockAddress { cid, port }
    });
    let principals = principals
        .into_iter()
        .map(|(name, low)| {
            if let Some(why) = no_principal(&name) {
                faults.push(Fault::at("principals", format!("{name:?}: {why}")));
            }
            let field = |key: &str| format!("principals.{name}.{key}");
            let runs_max = both(&field("runs_max"), low.runs_max, faults);
            let digests = low.token_sha256.iter().map(|text| unhex_array(text));
            let token_sha256 = digests.collect::<Option<Vec<_>>>().unwrap_or_else(|| {
                let why = "each must be a SHA-256 in 64 hex digits";
                faults.push(Fault::at(field("token_sha256"), why));
                Vec::new()
            });
            if token_sha256.contains(&Sha256::digest([]).into()) {
                let why = "that is the digest of nothing: the variable with the token was empty";
                faults.push(Fault::at(field("token_sha256"), why));
            }
            if let Some(why) = low.cids.iter().find_map(|cid| no_client(*cid)) {
                faults.push(Fault::at(field("cids"), why));
            }
            let sign_with = low.sign_with.map(|key| folder.join(key));
            (name, Principal { uids: low.uids, cids: low.cids, token_sha256, runs_max, sign_with })
        })
        .collect();
    let pm_qos = low.pm_qos.unwrap_or(usual.pm_qos);
    let options = ServiceOptions { bounds, drain, pm_qos, principals: Principals(principals) };
    if let Err(why) = options.principals.check() {
        faults.push(Fault::at("principals", why));
    }
    ServiceConfig { socket, mode, vsock, options }
}

/// Why this CID can speak for nobody, if it cannot.
fn no_client(cid: u32) -> Option<&'static str> {
    match cid {
        2 => Some("2 is the host, and thereby any process of it: name the CIDs of machines"),
        0 | VSOCK_ANY => Some("0 and 4294967295 are no machine's CID: those begin at 3"),
        // 1 is any process of this host, where it asks for that.
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_named_and_changed_is_found_by_where_it_is_named() {
        let folder = std::env::temp_dir().join(format!("forge-named-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let text = "[servers.a]\nopenapi = 'HERE/a.json'\nca_file = 'HERE/ca.pem'\n\
                    credentials = { B = { file = 'HERE/b' } }\n\
                    [service]\nruns_max = 3\n[pool]\nready = 2";
        let text = text.replace("HERE", folder.to_str().unwrap());
        std::fs::write(at("forge.toml"), text).unwrap();
        std::fs::write(at("mcp.json"), "{}").unwrap();
        std::fs::write(at("a.json"), "{}").unwrap();
        let read = || read_at_start(Some(&at("forge.toml")), Some(&at("mcp.json"))).unwrap();
        let mut before = read();
        assert_eq!(before, read());
        for (file, name) in [
            ("b", "servers.a.credentials.B.file"),
            ("a.json", "servers.a.openapi"),
            ("ca.pem", "servers.a.ca_file"),
            ("mcp.json", "--mcp-config"),
        ] {
            std::fs::write(at(file), "{ }").unwrap();
            let now = read();
            let changed: Vec<_> =
                now.iter().filter(|(name, now)| before.get(*name) != Some(now)).collect();
            assert!(changed.len() == 1 && changed[0].0 == name, "{file}: {changed:?}");
            before = now;
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    fn read(text: &str) -> Result<ServiceConfig, String> {
        let folder = std::env::temp_dir().join(format!("forge-config-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let number = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let path = folder.join(format!("{}.toml", number.as_nanos()));
        std::fs::write(&path, text).unwrap();
        let read = service(Some(&path)).map_err(|error| error.to_string());
        std::fs::remove_file(path).unwrap();
        let _ = std::fs::remove_dir(folder);
        read
    }

    #[test]
    fn the_tables_are_read_and_paths_are_the_files() {
        let hex = "ab".repeat(32);
        let config = read(&format!(
            "[service]\nsocket = 'socket'\nmode = '0660'\nruns_max = 3\nqueue_wait_ms = 5\n\
             [principals.ci]\nroles = []\nuids = [1001]\ntoken_sha256 = ['{hex}']\nruns_max = 2\n\
             sign_with = 'ci.pem'\n"
        ))
        .unwrap();
        assert!(config.socket.unwrap().is_absolute());
        assert_eq!((config.mode, config.options.bounds.runs_max), (0o660, 3));
        assert_eq!(config.options.bounds.queue_wait, Duration::from_millis(5));
        let principals = &config.options.principals;
        assert_eq!(principals.of_uid(1001), ["ci"]);
        assert_eq!(principals.of_token(&[0xab; 32]), Some("ci"));
        assert!(principals.0["ci"].sign_with.as_ref().unwrap().is_absolute());
    }

    #[test]
    fn machines_speak_over_vsock_at_all_cids_of_the_host_or_one() {
        let config =
            read("[service.vsock]\nport = 5000\n[principals.ci]\ncids = [3, 1]\n").unwrap();
        assert_eq!(config.vsock, Some(VsockAddress { cid: None, port: 5000 }));
        let principals = &config.options.principals;
        assert_eq!(principals.of_cid(3), Some("ci"));
        assert_eq!((principals.of_cid(4), principals.of_uid(3)), (None, Vec::new()));
        let config = read("[service.vsock]\nport = 5000\ncid = 1\n").unwrap();
        assert_eq!(config.vsock, Some(VsockAddress { cid: Some(1), port: 5000 }));
        assert_eq!(read("").unwrap().vsock, None);
    }

    #[test]
    fn a_user_of_two_principals_speaks_for_both_and_names_which() {
        let text = "[principals.a]\nuids = [1001]\n[principals.b]\nuids = [1001, 1002]\n";
        let principals = read(text).unwrap().options.principals;
        // Each order names its principal, so none has to be guessed.
        assert_eq!(principals.of_uid(1001), ["a", "b"]);
        assert_eq!(principals.of_uid(1002), ["b"]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_field() {
        let hex = "ab".repeat(32);
        for (text, expected) in [
            ("[service]\nrun_max = 3", "run_max"),
            ("[service]\nruns_max = 0", "service.runs_max: must be 1"),
            ("[service]\nmode = '0777'", "service.mode"),
            (&format!("[service]\nsocket = '/{}'", "a".repeat(107)), "service.socket: its path"),
            ("[service]\ndrain_ms = 99999999999", "service.drain_ms"),
            ("[principals.ci]\nuid = [1]", "uid"),
            ("[service.vsock]\nport = 5000\ncids = [3]", "service.vsock.cids: unknown field"),
            ("[service.vsock]\ncid = 3", "port"),
            ("[service.vsock]\nport = 4294967295", "service.vsock.port: must be 1"),
            ("[service.vsock]\nport = 5000\ncid = 0", "service.vsock.cid: must be 1"),
            ("[principals.ci]\ncids = [3, 2]", "principals.ci.cids: 2 is the host"),
            ("[principals.ci]\ncids = [0]", "principals.ci.cids: 0 and"),
            ("[principals.ci]\ncids = [4294967295]", "principals.ci.cids: 0 and"),
            ("[principals.ci]\ncids = [-1]", "cids"),
            (
                "[principals.a]\ncids = [3]\n[principals.b]\ncids = [4, 3]",
                "principals: a and b have the same CID",
            ),
            ("[principals.ci]\ntoken_sha256 = ['hunter2']", "principals.ci.token_sha256"),
            ("[principals.ci]\nruns_max = 0", "principals.ci.runs_max"),
            ("[service]\nprincipal_runs_max = 8193", "must be 1 to 8192"),
            ("[principals.\"\"]\nuids = [1]", "principals: \"\": a principal's name has 1"),
            (
                &format!(
                    "[principals.a]\ntoken_sha256 = ['{hex}']\n\
                     [principals.b]\ntoken_sha256 = ['{hex}']"
                ),
                "principals: a and b have the same token",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("abab"), "{error}");
        }
    }
}
