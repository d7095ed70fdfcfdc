//! What this host gives a tool server's surroundings, found out by making
//! some: before the first server, and before the next where the host was short of
//! what that takes.
//!
//! The best that works is used for all servers, and each thing that is weaker
//! than it could be is told in words. Deliberately absent is reading settings
//! to guess from: containers, security modules and kernels differ in too many.

use std::io;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;
use rustix::process::WaitOptions;
use serde::{Deserialize, Serialize};

use super::launch::{self, EXIT_SHORT, Order, PROBE, code_of};
use super::tree::Tree;
use super::{Limits, Namespaces, sys};
use crate::locks::lock;

/// The user that servers are tried out as.
const PROBE_UID: u32 = super::UIDS.start;
/// The version of Landlock that scopes signals (Linux 6.12).
const LANDLOCK_WANTED: i32 = 6;

/// What servers get here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host {
    pub(super) namespaces: Namespaces,
    pub(super) procfs: bool,
    /// Whether each can have a user of its own.
    pub(super) own_uid: bool,
    pub(super) landlock: i32,
    /// Why the best was not to be had.
    pub(super) refused: Option<String>,
}

impl Host {
    /// This host. Says once what is weaker.
    ///
    /// # Errors
    /// Why it could not be found out: the next server asks again.
    pub(super) fn get() -> Result<&'static Self, String> {
        static HOST: OnceLock<Host> = OnceLock::new();
        static ASKING: Mutex<()> = Mutex::new(());
        let _asking = lock(&ASKING);
        if let Some(host) = HOST.get() {
            return Ok(host);
        }
        let host = ask()?;
        for weaker in host.weaknesses() {
            tracing::warn!(weaker, refused = host.refused, "tool servers are less confined");
        }
        Ok(HOST.get_or_init(|| host))
    }

    /// What is weaker than it could be, in words.
    fn weaknesses(&self) -> Vec<&'static str> {
        let mut weaker = Vec::new();
        if !self.own_uid {
            weaker.push(match rustix::process::geteuid().is_root() {
                true => "they run as root, without a capability: this root may not change users",
                false => {
                    "they run as the broker's own user, since only root can give them users of \
                     their own"
                }
            });
        }
        match (self.namespaces, self.procfs) {
            (Namespaces::Shared, _) => weaker.push(
                "the host gives no namespaces: they see its processes, a process that they leave \
                 behind outlives the broker, and Landlock alone keeps files from them",
            ),
            (_, false) => weaker.push("a container hides part of /proc, so they have none"),
            _ => {}
        }
        match self.landlock {
            0 if self.namespaces == Namespaces::Shared => {
                weaker.push(
                    "the kernel has no Landlock: they see all files that their user may read",
                );
            }
            0 => weaker.push("the kernel has no Landlock"),
            version if version < LANDLOCK_WANTED => weaker.push(
                "Landlock is older than Linux 6.12: signals and abstract sockets are not scoped",
            ),
            _ => {}
        }
        weaker
    }
}

/// Has a launcher try it.
fn ask() -> Result<Host, String> {
    let told = Command::new(super::LAUNCHER)
        .arg(PROBE)
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("the launcher cannot be started: {error}"))?;
    if told.status.code() == Some(EXIT_SHORT.into()) {
        let short = String::from_utf8_lossy(&told.stdout);
        return Err(format!("the host is short of what a tool server takes: {}", short.trim()));
    }
    serde_json::from_slice(&told.stdout)
        .map_err(|_| format!("the launcher could not try the host out ({})", told.status))
}

/// Why something did not work here.
#[derive(Debug, PartialEq)]
enum Why {
    /// The host refuses it.
    Refused(String),
    /// It is short of what that takes, which says nothing of what it allows.
    Short(String),
}

impl Why {
    fn of(error: &io::Error) -> Self {
        match launch::is_shortage(error) {
            true => Self::Short(error.to_string()),
            false => Self::Refused(error.to_string()),
        }
    }
}

/// The launcher's side: tries one kind after the other, from the strongest on,
/// each in a process of its own, and tells the first that works. Where the host is
/// short of anything it tells that: what is weaker would be found to be the best.
pub(super) fn try_out() -> ExitCode {
    match best() {
        Ok(host) => {
            println!("{}", serde_json::to_string(&host).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Err(Why::Short(why)) => {
            println!("{why}");
            EXIT_SHORT.into()
        }
        Err(Why::Refused(_)) => ExitCode::FAILURE,
    }
}

fn best() -> Result<Host, Why> {
    let root = rustix::process::geteuid().is_root();
    let mut refused = None;
    for own_uid in [true, false] {
        for namespaces in [Namespaces::Privileged, Namespaces::User, Namespaces::Shared] {
            if !root && (own_uid || namespaces == Namespaces::Privileged) {
                continue;
            }
            for procfs in [true, false] {
                match works(namespaces, procfs, own_uid) {
                    Ok(()) => {
                        let landlock = in_child(|| {
                            let _ = rustix::thread::set_no_new_privs(true);
                            launch::landlock_version().try_into().unwrap_or(u8::MAX)
                        })?;
                        let landlock = landlock.into();
                        return Ok(Host { namespaces, procfs, own_uid, landlock, refused });
                    }
                    Err(short @ Why::Short(_)) => return Err(short),
                    Err(Why::Refused(why)) => refused = refused.or(Some(why)),
                }
            }
        }
    }
    Err(Why::Refused(refused.unwrap_or_default()))
}

fn works(namespaces: Namespaces, procfs: bool, own_uid: bool) -> Result<(), Why> {
    let order = |broker| Order {
        broker,
        namespaces,
        procfs,
        uid: own_uid.then_some(PROBE_UID),
        tree: Tree { home: "/home".into(), ..Tree::default() },
        network: true,
        limits: Limits::default(),
        cwd: "/".into(),
        cwd_needed: true,
        program: Default::default(),
    };
    let (told, tell) = rustix::pipe::pipe().map_err(|error| Why::of(&error.into()))?;
    let parent = rustix::process::getpid().as_raw_nonzero().get();
    let code = in_child(|| {
        let order = order(parent);
        let outcome = match namespaces {
            Namespaces::Shared => launch::shared(&order).map(|()| 0),
            _ => {
                launch::start(&order, &mut |_| Ok(0)).map(|child| {
                    match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
                        Ok(Some((_, status))) => code_of(status),
                        _ => 1,
                    }
                })
            }
        };
        outcome.unwrap_or_else(|failure| {
            let _ = rustix::io::write(&tell, failure.to_string().as_bytes());
            if failure.is_shortage() { EXIT_SHORT } else { 1 }
        })
    })?;
    drop(tell);
    if code == 0 {
        return Ok(());
    }
    let mut why = vec![0; 512];
    let got = rustix::io::read(&told, &mut why).unwrap_or(0);
    why.truncate(got);
    let why = match why.is_empty() {
        true => "a new root or /proc cannot be made".to_owned(),
        false => String::from_utf8_lossy(&why).into_owned(),
    };
    Err(if code == EXIT_SHORT { Why::Short(why) } else { Why::Refused(why) })
}

/// Does something in a child; its code.
fn in_child(work: impl FnOnce() -> u8) -> Result<u8, Why> {
    let Some(child) = sys::fork().map_err(|error| Why::of(&error))? else {
        std::process::exit(work().into())
    };
    loop {
        match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
            Err(Errno::INTR) => {}
            Ok(Some((_, status))) => return Ok(code_of(status)),
            Ok(None) => return Err(Why::Refused("a child did not end".to_owned())),
            Err(error) => return Err(Why::of(&error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_layer_is_told_and_a_whole_host_says_nothing() {
        let whole = Host {
            namespaces: Namespaces::Privileged,
            procfs: true,
            own_uid: true,
            landlock: 7,
            refused: None,
        };
        assert_eq!(whole.weaknesses(), Vec::<&str>::new());
        let count = |host: Host| host.weaknesses().len();
        assert_eq!(count(Host { own_uid: false, ..whole.clone() }), 1);
        assert_eq!(count(Host { procfs: false, ..whole.clone() }), 1);
        assert_eq!(count(Host { landlock: 4, ..whole.clone() }), 1);
        assert_eq!(count(Host { landlock: 0, ..whole.clone() }), 1);
        let bare = Host { namespaces: Namespaces::Shared, landlock: 0, ..whole };
        assert!(bare.weaknesses()[1].contains("all files"), "{:?}", bare.weaknesses());
    }
}
