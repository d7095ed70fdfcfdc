//! `forge-vmm mcp`: the MCP door, and a service behind it unless one is named.
//!
//! Over stdio, standard output carries the protocol and nothing else, and when
//! the client closes standard input everything ends that was started here.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;

use forge_doors::mcp::http::{self, HttpOptions};
use forge_doors::mcp::link::ServiceLink;
use forge_doors::mcp::{Door, Principal, stdio};
use forge_doors::web::{Listener, TokenHash};
use forge_protocol::signature::{SignerKey, TrustKeys};
use forge_vmm::keys;
use forge_vmm::pool::PoolOptions;
use forge_vmm::service;
use forge_vmm::service::options::Principals;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::args::McpArgs;
use super::config::{self, GrantKey, McpConfig};
use super::{CliError, Exit, complain, end_broker, say};

/// VMs that stand ready, and how many at most.
const READY: usize = 1;
const READY_MAX: usize = 4;

/// Whom the door is for.
enum Clients {
    /// The one that started this process, and where what it was granted is kept: some
    /// clients start one for each call.
    Stdio(Principal, Option<PathBuf>),
    /// Those who know a token, by the SHA-256 of their tokens.
    Http {
        address: SocketAddr,
        principals: Vec<(Vec<[u8; 32]>, Principal)>,
        hosts: Vec<String>,
        origins: Vec<String>,
    },
}

/// Serves MCP until the client leaves or a signal comes.
pub(crate) fn mcp(args: McpArgs) -> Result<ExitCode, CliError> {
    let clients = Clients::of(&args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(CliError::Host)?;
    let is_kept = matches!(clients, Clients::Http { .. });
    let (served, own) = match &args.service {
        Some(socket) => (runtime.block_on(serve_at(socket, clients)), None),
        None => {
            let (own, connection) = OwnService::start(&args, &clients)?;
            (runtime.block_on(serve_over(connection, clients)), Some(own))
        }
    };
    // Closes the connection to the service. A read of standard input may wait
    // for ever, and is not waited for.
    runtime.shutdown_background();
    if let Some(own) = own {
        own.end(is_kept);
    }
    served.map(|()| Exit::Ok.into())
}

impl Clients {
    fn of(args: &McpArgs) -> Result<Self, CliError> {
        let config = args.broker.config.as_deref();
        let McpConfig { principal, accept_unsigned, hosts, origins } = config::mcp(config)?;
        let Principals(known) = config::service(config)?.options.principals;
        // A service that stands already trusts no key that is made here.
        let fresh = match args.service {
            Some(_) => None,
            None => {
                let secret = keys::random().map_err(CliError::Host)?;
                Some(Arc::new(SignerKey::from_secret(&secret)))
            }
        };
        let signer = |key: Option<&Path>| match key {
            _ if accept_unsigned == Some(false) => Ok(None),
            Some(path) => Ok::<_, CliError>(Some(Arc::new(keys::read_signer(path)?))),
            None => Ok(fresh.clone()),
        };
        let Some(address) = args.listen else {
            let name = principal.unwrap_or_else(|| args.asker.principal.clone());
            let configured = known.get(&name).and_then(|known| known.sign_with.as_deref());
            let signer = signer(args.sign_with.as_deref().or(configured))?;
            let grants = config::named_grants(args.broker.state.as_deref());
            return Ok(Self::Stdio(Principal { name, signer }, grants));
        };
        let mut principals = Vec::new();
        for (name, known) in known {
            if known.token_sha256.is_empty() {
                continue;
            }
            let signer = signer(known.sign_with.as_deref())?;
            principals.push((known.token_sha256, Principal { name, signer }));
        }
        if principals.is_empty() {
            return Err(CliError::Usage(
                "nobody is known who may come: --listen needs a --config with a [principals.<name>] that has a token_sha256".into(),
            ));
        }
        Ok(Self::Http { address, principals, hosts, origins })
    }

    /// The keys that programs are signed with here.
    fn signers(&self) -> Vec<Arc<SignerKey>> {
        match self {
            Self::Stdio(principal, _) => principal.signer.iter().cloned().collect(),
            Self::Http { principals, .. } => {
                principals.iter().filter_map(|(_, principal)| principal.signer.clone()).collect()
            }
        }
    }
}

async fn serve_at(socket: &Path, clients: Clients) -> Result<(), CliError> {
    let at = |error| CliError::File {
        path: socket.display().to_string(),
        source: io::Error::other(error),
    };
    serve(ServiceLink::at(socket.to_owned()).await.map_err(at)?, clients).await
}

async fn serve_over(connection: UnixStream, clients: Clients) -> Result<(), CliError> {
    connection.set_nonblocking(true).map_err(CliError::Host)?;
    let connection = tokio::net::UnixStream::from_std(connection).map_err(CliError::Host)?;
    let link = ServiceLink::over(connection).await;
    serve(link.map_err(|error| CliError::Host(io::Error::other(error)))?, clients).await
}

async fn serve(link: ServiceLink, clients: Clients) -> Result<(), CliError> {
    let link = Arc::new(link);
    let signalled = signalled().map_err(CliError::Host)?;
    match clients {
        Clients::Stdio(principal, grants) => {
            let door = Door::new(link, principal, grants).map_err(CliError::Host)?;
            let closing = door.clone();
            tokio::spawn(async move {
                signalled.await;
                closing.close();
            });
            let served = stdio::serve(door, tokio::io::stdin(), tokio::io::stdout()).await;
            served.map_err(CliError::Output)
        }
        Clients::Http { address, principals, hosts, origins } => {
            let doors: io::Result<Vec<_>> = principals
                .into_iter()
                .map(|(tokens, principal)| {
                    let tokens = tokens.into_iter().map(TokenHash::from).collect();
                    Ok((tokens, Door::new(Arc::clone(&link), principal, None)?))
                })
                .collect();
            let doors = doors.map_err(CliError::Host)?;
            let at = |source| CliError::File { path: address.to_string(), source };
            let listener = tokio::net::TcpListener::bind(address).await.map_err(at)?;
            let address = listener.local_addr().map_err(at)?;
            tokio::spawn(outlast(signal(SignalKind::hangup()).map_err(CliError::Host)?));
            say(&format_args!("serving MCP at http://{address}/mcp"));
            let options = HttpOptions { doors, hosts, origins };
            http::serve(Listener::Tcp(listener), options, signalled).await;
            Ok(())
        }
    }
}

/// Is there when the process is to end.
fn signalled() -> io::Result<impl Future<Output = ()> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Takes note of SIGHUP, and no more: it would end every session. Over stdio it
/// ends the process, whose only client's terminal is gone.
async fn outlast(mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        tracing::warn!("SIGHUP is ignored: what is configured is read at the start alone");
    }
}

/// A supervisor and a broker of this process's own, for one connection.
struct OwnService {
    supervisor: Arc<Supervisor>,
    serving: JoinHandle<()>,
}

impl OwnService {
    fn start(args: &McpArgs, clients: &Clients) -> Result<(Self, UnixStream), CliError> {
        let config = args.broker.config.as_deref();
        let mut paths = args.trust.clone();
        paths.extend(config::trust_keys(config)?);
        let given = keys::read_trust(&paths)?;
        let mut all = given.as_slice().to_vec();
        for key in clients.signers().iter().map(|signer| signer.trust_key()) {
            if !all.contains(&key) {
                all.push(key);
            }
        }
        if all.is_empty() {
            return Err(CliError::Usage(
                "mcp.accept_unsigned is false and no key is trusted, so no program can run: \
                 --trust signer.pub, or trust.keys"
                    .into(),
            ));
        }
        let trust = TrustKeys::new(all).map_err(|error| CliError::Usage(error.to_string()))?;
        let pool = PoolOptions {
            tier: config::tier(None, config)?,
            ready_min: READY,
            ready_max: READY_MAX,
            group: config::vm_group(config)?,
            ..PoolOptions::default()
        };
        // Grants live as long as their handles.
        let key = match clients {
            Clients::Stdio(..) => GrantKey::Lasting,
            Clients::Http { .. } => GrantKey::Passing,
        };
        let broker = config::start_broker(&args.broker, key)?;
        let options = SupervisorOptions { trust, maxima: config::maxima(config)?, pool };
        let supervisor = Arc::new(Supervisor::new(options, Some(broker)).map_err(CliError::Host)?);
        let (ours, theirs) = UnixStream::pair().map_err(CliError::Host)?;
        let serving = {
            let supervisor = Arc::clone(&supervisor);
            let options = config::service(config)?.options;
            let serve = move || {
                if let Err(error) = service::serve_connection(theirs, &supervisor, options) {
                    complain(&format!("the service of this door: {error}"));
                }
            };
            let thread = std::thread::Builder::new().name("service".into());
            thread.spawn(serve).map_err(CliError::Host)?
        };
        Ok((Self { supervisor, serving }, ours))
    }

    /// Waits until its runs are over, which are cancelled when the connection
    /// closes, and ends broker, servers, zygote and workers. The broker is waited for if
    /// this `is_kept` by a manager: whoever starts a door on stdio waits for its end.
    fn end(self, is_kept: bool) {
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // Another one ends this process at once: nobody heeds it any more.
            // SAFETY: a plain system call.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        let _ = self.serving.join();
        if is_kept {
            end_broker(&self.supervisor);
        }
    }
}
