//! `forge-vmm serve`.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::broker::Request;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Reuse, Tier, VmFailure};
use forge_vmm::broker::BrokerError;
use forge_vmm::cancel::Cancel;
use forge_vmm::jail::privileges;
use forge_vmm::keys;
use forge_vmm::link::Patience;
use forge_vmm::machine::Hypervisor;
use forge_vmm::pool::PoolOptions;
use forge_vmm::service::{Reloaded, Server, VsockListener, server, systemd};
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};

use super::args::ServeArgs;
use super::config::{self, AtStart, GrantKey, NO_RESET, ServiceConfig};
use super::door::{self, Deciding, Door};
use super::{CliError, Exit, complain, end_broker, say};

/// How long a zygote may take to stand before there is a service. It takes some
/// milliseconds; this is for hosts that emulate everything.
const STAND_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the toolbroker may take to hear of other roles: it has only to read them.
const ROLES_TIME_MAX: Duration = Duration::from_secs(5);

/// What a VM that stands ready takes: its worker and the socket to that.
const DESCRIPTORS_OF_A_VM: u64 = 2;

/// Serves until it is ended.
pub(crate) fn serve(args: ServeArgs) -> Result<ExitCode, CliError> {
    let unusable = |source| CliError::File { path: "the passed socket".into(), source };
    // Before anything is started that could inherit it.
    let passed = systemd::passed_listener().map_err(unusable)?;
    let trust = trust_keys(&args)?;
    // A run takes four, a client one.
    let descriptors = privileges::raise_descriptors();
    if let Err(error) = &descriptors {
        complain(&format!("descriptors stay as few as they are: {error}"));
    }
    let config = args.broker.config.as_deref();
    let ServiceConfig { socket, mode, vsock, options } = config::service(config)?;
    let (passed, path) = match passed {
        Some(_) if args.socket.is_some() => {
            return Err(CliError::Usage(
                "--socket: a socket was passed to listen at; leave one of the two out".into(),
            ));
        }
        Some((listener, path)) => (Some(listener), path),
        None => (None, args.socket.clone().or(socket).unwrap_or_default()),
    };
    if path.as_os_str().is_empty() {
        return Err(CliError::Usage(
            "there is no socket to listen at: --socket, or [service] socket in forge.toml".into(),
        ));
    }
    let at_start = config::read_at_start(config, args.broker.mcp_config.as_deref())?;
    let http = door::configured(config, &options.principals)?;
    if http.as_ref().is_some_and(|door| door.is_at(&path)) {
        return Err(CliError::Usage(format!("http.listen: {}", door::AT_THE_SERVICES)));
    }
    let pool = pool(&args, descriptors.ok())?;
    let tier = pool.tier;
    // From here on there is something for it to end.
    server::await_reload().map_err(CliError::Host)?;
    let broker = config::start_broker(&args.broker, GrantKey::Lasting)?;
    let supervisor_options = SupervisorOptions { trust, maxima: config::maxima(config)?, pool };
    let supervisor =
        Arc::new(Supervisor::new(supervisor_options, Some(broker)).map_err(CliError::Host)?);
    // A host that can make no VM is no service. What it lacks is said here, and not to
    // each client.
    let patience = Patience::until(Instant::now() + STAND_TIME_MAX);
    let no_vm = |failure: VmFailure| CliError::Host(io::Error::other(failure.message));
    supervisor.pool().stand_by_to_serve(patience).map_err(no_vm)?;
    let failed = |source| CliError::File { path: path.display().to_string(), source };
    let server = match passed {
        Some(listener) => Server::passed(listener),
        None => Server::bind(&path, mode),
    };
    let mut server = server.map_err(failed)?;
    if let Some(at) = vsock {
        let failed = |source| CliError::File { path: at.to_string(), source };
        server = server.and_vsock(VsockListener::bind(at).map_err(failed)?);
        if at.cid.is_none() && !VsockListener::has_machines() {
            complain(
                &"[service.vsock]: no machine of this host can connect: modprobe vhost_vsock, or \
                  vsock_loopback for the host itself",
            );
        }
    }
    server.heed_signals().map_err(failed)?;
    let door = http.map(|config| Door::open(config, &path)).transpose()?;
    if let Some(door) = &door {
        say(&format_args!("HTTP at {}", door.place()));
    }
    if tier == Tier::Process {
        say(&"programs run in jailed processes of this host and not in VMs");
    }
    say(&format_args!("serving at {}", path.display()));
    if let Some(at) = vsock {
        say(&format_args!("serving at {at} too"));
    }
    let (deciding, of_start) = (door.as_ref().map(Door::deciding), &at_start);
    let load = |ends: &Cancel| {
        let loaded = reloaded(&args, &supervisor, deciding.as_ref(), of_start, ends);
        loaded.map_err(|error| error.to_string())
    };
    server.serve(&supervisor, options, load).map_err(failed)?;
    // Whoever comes now is for the next service.
    drop((door, server));
    end_broker(&supervisor);
    Ok(Exit::Ok.into())
}

/// What VMs a service keeps, where it may have so many descriptors.
fn pool(args: &ServeArgs, descriptors: Option<u64>) -> Result<PoolOptions, CliError> {
    let config = args.broker.config.as_deref();
    let ready = config::pool(&args.pool, config)?;
    let ready = match descriptors {
        Some(most) => within(ready, most),
        None => ready,
    };
    let tier = config::tier(None, config)?;
    let ready = match (tier, ready.reuse) {
        (Tier::Process, Reuse::Reset { .. }) if config::wants_processes(config)? => {
            return Err(CliError::Usage(format!("--reuse reset, or [pool] reuse: {NO_RESET}")));
        }
        // `auto` takes what there is.
        (Tier::Process, Reuse::Reset { .. }) => {
            complain(&format!("--reuse reset, or [pool] reuse, is passed over: {NO_RESET}"));
            config::Pool { reuse: Reuse::Fresh, ..ready }
        }
        _ => ready,
    };
    if tier == Tier::Vm && ready.ready_max > 0 {
        // Or the pool would try for ever.
        let missing = |error| CliError::Host(io::Error::other(VmFailure::from(error).message));
        Hypervisor::open().map_err(missing)?;
    }
    let config::Pool { ready_min, ready_max, reuse } = ready;
    Ok(PoolOptions { tier, ready_min, ready_max, group: config::vm_group(config)?, reuse })
}

/// What a service goes by from now on, as its files say it, and what is to be done once
/// it does. The toolbroker goes by them already, or does so before it answers anything
/// more: where anything fails, nothing changes.
fn reloaded<'a>(
    args: &ServeArgs,
    supervisor: &Supervisor,
    door: Option<&'a Deciding>,
    at_start: &'a AtStart,
    ends: &Cancel,
) -> Result<(Reloaded, impl FnOnce() + Send + use<'a>), CliError> {
    let (config, mcp_config) = (args.broker.config.as_deref(), args.broker.mcp_config.as_deref());
    config::is_good(config, mcp_config, ends)?;
    let options = config::service(config)?.options;
    let http = door::configured(config, &options.principals)?;
    let trust = trust_keys(args)?;
    let now = config::read_at_start(config, mcp_config)?;
    let tell = door.map(|door| door.reload(http)).transpose()?;
    config.map_or(Ok(()), |config| load_roles(supervisor, config, ends))?;
    let then = move || {
        if let Some(tell) = tell {
            tell();
        }
        let others = at_start.keys().chain(now.keys().filter(|it| !at_start.contains_key(*it)));
        for name in others.filter(|name| at_start.get(*name) != now.get(*name)) {
            tracing::warn!(name, "this changed and holds after a restart of the service");
        }
    };
    Ok((Reloaded { trust, options }, then))
}

/// As many VMs as leave half of so many descriptors to runs and clients.
fn within(pool: config::Pool, descriptors: u64) -> config::Pool {
    let most = usize::try_from(descriptors / 2 / DESCRIPTORS_OF_A_VM).unwrap_or(usize::MAX);
    if pool.ready_max > most {
        complain(&format!(
            "of the {} VMs that [pool] or the command line has stand ready, {most} do: the service \
             may have {descriptors} descriptors, and leaves half of them to runs and clients. \
             Raise its limit on open files",
            pool.ready_max,
        ));
    }
    let (ready_min, ready_max) = (pool.ready_min.min(most), pool.ready_max.min(most));
    config::Pool { ready_min, ready_max, ..pool }
}

/// Has the toolbroker take the roles that this file says. One that is away reads it
/// when it starts, and one that was asked and says nothing takes them before whatever is
/// asked later.
fn load_roles(supervisor: &Supervisor, config: &Path, ends: &Cancel) -> Result<(), CliError> {
    let (file, tables) = (config.display().to_string(), config::roles(config)?);
    let until = Some(Instant::now() + ROLES_TIME_MAX);
    let patience = Patience { until, cancel: Some(ends) };
    match supervisor.ask(&Request::LoadRoles { file, tables }, patience) {
        Ok(_) | Err(BrokerError::Away { .. }) => Ok(()),
        Err(BrokerError::OutOfTime { asked: true }) => {
            tracing::warn!("the toolbroker says nothing: it goes by the new roles once it does");
            Ok(())
        }
        Err(BrokerError::Refused { kind, message }) => Err(CliError::Refused { kind, message }),
        Err(error) => Err(CliError::Host(io::Error::other(error))),
    }
}

/// The keys that programs are trusted by.
fn trust_keys(args: &ServeArgs) -> Result<TrustKeys, CliError> {
    let mut paths = args.trust.clone();
    paths.extend(config::trust_keys(args.broker.config.as_deref())?);
    let trust = keys::read_trust(&paths)?;
    if trust.as_slice().is_empty() {
        return Err(CliError::Usage(
            "no key is trusted, so no program can run: --trust signer.pub".into(),
        ));
    }
    Ok(trust)
}
