//! Tool servers are strangers: each is started by a launcher that first makes
//! it a place of its own.
//!
//! A server gets a user of its own where the broker is root, and its own pid,
//! mount, ipc and uts namespaces; a tree of files that holds the system's, its
//! program's and what the operator grants; limits, Landlock and the filter on
//! system calls; and an environment of the basic variables and its own
//! credentials. It ends with its broker, with all it started.
//!
//! Distrusted are the servers, all of them, and each other. What the host does
//! not give is told once and loudly ([`host`]). Deliberately absent are
//! cgroups, and a list of allowed system calls: servers are programs of any
//! kind. `docs/tool-servers.md` is for operators, and
//! `docs/decisions/0031-strangers.md` says why it is like this.

mod account;
mod host;
mod launch;
mod program;
mod reach;
#[allow(unsafe_code)]
mod sys;
mod tree;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use serde::{Deserialize, Serialize};
use tokio::process::Command;

pub use self::launch::if_asked;

use self::host::Host;
use self::launch::{LAUNCH, Order};
use self::reach::{Kept, Seen};
use self::tree::Tree;
use self::view::View;
use crate::secret::Secret;
use crate::state::is_trusted;

/// This program, whatever has become of its file since it started.
const LAUNCHER: &str = "/proc/self/exe";

/// The users that servers get where root starts them and nothing else is
/// configured: a part of the range in which the jail's own user is, which no
/// distribution allocates and in which nobody owns anything.
pub const UIDS: Range<u32> = 0x7F01_0000..0x7F02_0000;

/// What a server's environment has from the broker's own.
const BASIC_ENVIRONMENT: [&str; 9] =
    ["PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME"];
/// A home for a broker without one.
const HOME: &str = "/home/stranger";

/// Where a server lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Namespaces {
    /// In new ones that root made.
    Privileged,
    /// In new ones below a user namespace of its own.
    User,
    /// In the broker's.
    Shared,
}

/// A program that is a tool server: how it is started.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program: a name to be looked up in `PATH`, or a path.
    pub command: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Where it runs; the broker's own working directory if not given.
    pub cwd: Option<PathBuf>,
    /// Environment variables beside the basic ones. All are held as secrets,
    /// since an `mcp.json` keeps credentials among them.
    pub env: BTreeMap<String, Secret>,
    /// Where it lives.
    pub jail: Jail,
}

/// What the operator says of one server's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jail {
    /// What it may read besides the system's files and its own.
    pub read: Vec<PathBuf>,
    /// What it may read and write.
    pub write: Vec<PathBuf>,
    /// Whether it may also have what its command line names: so where the
    /// configuration has no place to say it.
    pub named: bool,
    /// Whether it may reach a network.
    pub network: bool,
    /// What it gets at most.
    pub limits: Limits,
    /// Settled by [`settle`].
    pub(crate) place: Place,
}

impl Default for Jail {
    fn default() -> Self {
        Self {
            read: Vec::new(),
            write: Vec::new(),
            named: false,
            network: true,
            limits: Limits::default(),
            place: Place::default(),
        }
    }
}

/// What does not depend on one server alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    uid: u32,
    home: Option<PathBuf>,
    hidden: Vec<Kept>,
    /// Where all servers may write, this one too.
    writers: Arc<Vec<Writer>>,
}

/// Where a server may write, as its configuration says it: what that means is asked at
/// each start, since other servers may make and change it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Writer {
    folders: Vec<PathBuf>,
    /// Words of a command line, and where it is said.
    named: Option<(Vec<String>, PathBuf)>,
}

impl Writer {
    fn of(server: &Program) -> io::Result<Self> {
        let Jail { write, named, place, .. } = &server.jail;
        let here = here(server)?;
        let cwd = (*named && server.cwd.is_some()).then(|| here.clone());
        let folders = write.iter().cloned().chain(cwd).chain(place.home.clone()).collect();
        Ok(Self { folders, named: named.then(|| (server.args.clone(), here)) })
    }

    fn is_distrusted_by(&self, view: &mut View) {
        view.distrust(self.folders.iter().map(PathBuf::as_path));
        if let Some((words, here)) = &self.named {
            view.distrust_named(words, here);
        }
    }
}

/// What a server gets at most. Bounds for one that has gone wild, not a diet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Addresses of one process, in MiB, if they are limited. Runtimes reserve much more
    /// than they use, a browser a TiB and more for each of its own.
    pub memory_mib: Option<u64>,
    /// Descriptors of one process.
    pub open_files: u64,
    /// Processes and threads of the server's user.
    pub processes: u64,
    /// One file that it writes, in MiB.
    pub file_mib: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory_mib: None, open_files: 4096, processes: 512, file_mib: 1024 }
    }
}

/// Why there are no places for these servers.
#[derive(Debug, thiserror::Error)]
pub enum SettleError {
    /// There are more servers than users.
    #[error("{servers} tool servers, and {uids} users in `broker.server_uids`: name more")]
    FewUids {
        /// Servers.
        servers: usize,
        /// Users.
        uids: usize,
    },
    /// A server's home cannot be made.
    #[error("cannot make the tool servers' folder {}: {source}", folder.display())]
    Home {
        /// Which.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Gives each server its user and its home, and hides from all of them what
/// is the broker's: its `state`, and the `files` that its configuration and all
/// credentials came from. A home is kept in the `state` where there
/// is one, and new at each start where there is none.
///
/// # Errors
/// [`SettleError`].
pub fn settle(
    mut servers: Vec<(&String, &mut Program)>,
    uids: &Range<u32>,
    state: Option<&Path>,
    files: &[PathBuf],
) -> Result<(), SettleError> {
    let own = files.iter().map(PathBuf::as_path).chain(state);
    let mut hidden: Vec<PathBuf> = own.filter_map(|path| path.canonicalize().ok()).collect();
    hidden.sort();
    hidden.dedup();
    let hidden: Vec<Kept> = hidden.into_iter().filter_map(Kept::at).collect();
    if servers.len() > uids.len() {
        return Err(SettleError::FewUids { servers: servers.len(), uids: uids.len() });
    }
    for ((name, server), uid) in servers.iter_mut().zip(uids.clone()) {
        let home = state.map(|state| state.join("homes").join(name));
        if let Some(folder) = &home {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .and_then(|()| check_home(folder, uid))
                .map_err(|source| SettleError::Home { folder: folder.clone(), source })?;
        }
        let home = home.and_then(|home| home.canonicalize().ok());
        server.jail.place = Place { uid, home, hidden: hidden.clone(), writers: Arc::default() };
    }
    // Where nobody knows where relative paths count from, no server starts.
    let writers = servers.iter().filter_map(|(_, server)| Writer::of(server).ok());
    let writers = Arc::new(writers.collect::<Vec<_>>());
    for (_, server) in &mut servers {
        server.jail.place.writers = Arc::clone(&writers);
    }
    Ok(())
}

/// That the home of the server that is this user, and the folder of all homes, are what
/// was made here: a server is as good as root in what it is shown as its home. What mode
/// its own home has is its own to say, and so is whose it is on a host that shows it no
/// other way.
fn check_home(home: &Path, uid: u32) -> io::Result<()> {
    let homes = home.parent().unwrap_or(home).symlink_metadata()?;
    if !homes.is_dir() || !is_trusted(homes.uid()) || homes.mode() & 0o022 != 0 {
        let why = "the folder around it is a link, or others own it or may write it";
        return Err(io::Error::other(why));
    }
    let home = home.symlink_metadata()?;
    if !home.is_dir() || !(is_trusted(home.uid()) || home.uid() == uid) {
        return Err(io::Error::other("it is a link, or another user's: move it away"));
    }
    Ok(())
}

/// The command that starts a server in its place. Its standard streams, its
/// process group and its end are the caller's to see to.
///
/// # Errors
/// Why it cannot be started; `NotFound` if the program is not there.
pub fn command(server: &Program) -> io::Result<Command> {
    let program = program::find(&server.command)?;
    let host = Host::get().map_err(io::Error::other)?;
    if !server.jail.network && host.namespaces == Namespaces::Shared {
        return Err(io::Error::other(
            "it is to have no network, and this host gives no namespaces: remove `network = \
             false`, or allow namespaces",
        ));
    }
    let order = order(server, &program, host)?;
    let order = serde_json::to_string(&order).map_err(io::Error::other)?;
    let mut command = Command::new(LAUNCHER);
    command.arg(LAUNCH).arg(order).args(&server.args).env_clear();
    for name in BASIC_ENVIRONMENT {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    if host.namespaces != Namespaces::Shared {
        command.env("TMPDIR", "/tmp");
    } else if let Some(home) = &server.jail.place.home {
        // The only folder that is its own.
        command.env("HOME", home).env("TMPDIR", home);
    }
    if host.own_uid {
        let user = account::name(server.jail.place.uid);
        command.env("USER", &user).env("LOGNAME", user);
    }
    for (name, value) in &server.env {
        command.env(name, value.expose());
    }
    Ok(command)
}

/// What a server is told of that it will not find.
#[derive(Debug, Default)]
pub struct Lacking {
    /// The variables of its environment that name a file or a folder of the host's
    /// which it is not given. Their names alone: a value may be a credential.
    pub variables: Vec<String>,
    /// The places in its command line, from 1, of what it is to make where it may not.
    pub arguments: Vec<usize>,
}

/// What is lacking, before the server is started.
#[must_use]
pub fn lacking(server: &Program) -> Lacking {
    let (Ok(program), Ok(here)) = (program::find(&server.command), here(server)) else {
        return Lacking::default();
    };
    let home = own_home();
    let home = home.as_deref();
    let Ok(view) = view(server, &program, &here, home) else { return Lacking::default() };
    let variables = server.env.iter().filter(|(_, value)| view.lacks(value.expose(), home));
    let words = server.args.iter().zip(1..).filter(|(word, _)| view.lacks_new(word, &here, home));
    Lacking {
        variables: variables.map(|(name, _)| name.clone()).collect(),
        arguments: words.map(|(_, at)| at).collect(),
    }
}

/// The first file that its command line names and that it may not read: what a
/// server that did not start was probably missing.
#[must_use]
pub fn unseen(server: &Program) -> Option<PathBuf> {
    let (program, here) = (program::find(&server.command).ok()?, here(server).ok()?);
    let view = view(server, &program, &here, own_home().as_deref()).ok()?;
    server.args.iter().find_map(|word| view.missing(word, &here))
}

/// The broker's own home.
fn own_home() -> Option<PathBuf> {
    std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute())
}

/// Where the server runs.
fn here(server: &Program) -> io::Result<PathBuf> {
    match &server.cwd {
        Some(cwd) => std::path::absolute(cwd),
        None => std::env::current_dir(),
    }
}

/// What the server sees of the host's files.
fn view(server: &Program, program: &Path, here: &Path, home: Option<&Path>) -> io::Result<View> {
    static SYSTEM: LazyLock<View> = LazyLock::new(View::of_system);
    let Jail { read, write, named, place, .. } = &server.jail;
    let mut view = SYSTEM.clone();
    // Before anything is resolved.
    Writer::of(server)?.is_distrusted_by(&mut view);
    for writer in place.writers.iter() {
        writer.is_distrusted_by(&mut view);
    }
    // A folder before what is in it, which may be named by a link there.
    let mut write: Vec<&PathBuf> = write.iter().collect();
    write.sort_by_key(|path| path.canonicalize().ok());
    for path in write {
        granted(path, view.add_write(path))?;
    }
    if server.cwd.is_some() {
        let added = if *named { view.add_write(here) } else { view.add_read(here) };
        granted(here, added)?;
    }
    for path in read {
        granted(path, view.add_read(path))?;
    }
    view.add_program(program, home)?;
    if *named {
        for word in &server.args {
            view.add_named(word, here, home);
        }
    }
    Ok(view)
}

fn granted<T>(path: &Path, outcome: io::Result<T>) -> io::Result<T> {
    outcome.map_err(|error| {
        io::Error::other(format!("it cannot be given {}: {error}", path.display()))
    })
}

fn order(server: &Program, program: &Path, host: &Host) -> io::Result<Order> {
    let Jail { network, limits, place, .. } = &server.jail;
    let (here, own_home) = (here(server)?, own_home());
    let view = view(server, program, &here, own_home.as_deref())?;
    let home = own_home.as_deref();
    let home = home.filter(|home| View::may_be_granted(home)).unwrap_or(Path::new(HOME));
    let mut links = view.links.clone();
    // A home that is a link is one in there, too.
    let home = view::resolve(home, &mut links).unwrap_or_else(|_| home.to_owned());
    let seen = |paths: &BTreeSet<PathBuf>| -> io::Result<Vec<Seen>> {
        paths.iter().map(|path| granted(path, view.seen(path))).collect()
    };
    let private = match host.namespaces {
        // There is no tree of its own to hide it in.
        Namespaces::Shared => Vec::new(),
        _ if host.own_uid || !rustix::process::geteuid().is_root() => Vec::new(),
        _ => view::private_settings(),
    };
    let given = |path: &Path| view.read.iter().chain(&view.write).any(|it| path.starts_with(it));
    let private = private.iter().filter(|path| !given(path)).filter_map(|it| Seen::at(it).ok());
    let tree = Tree {
        system: seen(&view.system)?,
        read: seen(&view.read)?,
        write: seen(&view.write)?,
        links,
        // Its own home is in the broker's state.
        hidden: place.hidden.iter().flat_map(Kept::now).chain(private).collect(),
        home,
        home_from: place.home.as_ref().map(|home| granted(home, Seen::at(home))).transpose()?,
    };
    let broker = rustix::process::getpid().as_raw_nonzero().get();
    Ok(Order {
        broker,
        namespaces: host.namespaces,
        procfs: host.procfs,
        uid: host.own_uid.then_some(place.uid),
        tree,
        network: *network,
        limits: *limits,
        cwd: here,
        cwd_needed: server.cwd.is_some(),
        program: program.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_home_that_is_a_link_or_another_users_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (homes, victim) = (folder.path().join("homes"), folder.path().join("victim"));
        let home = homes.join("shop");
        fs::create_dir_all(&home).unwrap();
        fs::create_dir_all(victim.join("shop")).unwrap();
        check_home(&home, 64_123).unwrap();
        fs::remove_dir(&home).unwrap();
        symlink(&victim, &home).unwrap();
        assert!(check_home(&home, 64_123).is_err(), "a link in its place");
        fs::remove_file(&home).unwrap();
        fs::remove_dir(&homes).unwrap();
        symlink(&victim, &homes).unwrap();
        assert!(check_home(&home, 64_123).is_err(), "a link in the place of all homes");
        let theirs = victim.join("shop");
        let stranger = rustix::fs::Uid::from_raw(64_123);
        if rustix::fs::chown(&theirs, Some(stranger), None).is_err() {
            eprintln!("SKIPPED in part: only root gives files away");
            return;
        }
        check_home(&theirs, 64_123).unwrap();
        assert!(check_home(&theirs, 64_124).is_err(), "another server's");
    }
}
