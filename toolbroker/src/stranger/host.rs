//! What this host gives a tool server's surroundings, found out by making
//! some: once, before the first server.
//!
//! The best that works is used for all servers, and each thing that is weaker
//! than it could be is told in words. Deliberately absent is reading settings
//! to guess from: containers, security modules and kernels differ in too many.

use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;

use rustix::process::WaitOptions;
use serde::{Deserialize, Serialize};

use super::launch::{self, Order, PROBE, code_of};
use super::tree::Tree;
use super::{Limits, Namespaces, sys};

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
    pub(super) fn get() -> Result<&'static Self, String> {
        static HOST: OnceLock<Result<Host, String>> = OnceLock::new();
        let host = HOST.get_or_init(|| {
            let host = ask()?;
            for weaker in host.weaknesses() {
                tracing::warn!(weaker, refused = host.refused, "tool servers are less confined");
            }
            Ok(host)
        });
        host.as_ref().map_err(Clone::clone)
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
    serde_json::from_slice(&told.stdout)
        .map_err(|_| format!("the launcher could not try the host out ({})", told.status))
}

/// The launcher's side: tries one kind after the other, from the strongest on,
/// each in a process of its own, and tells the first that works.
pub(super) fn try_out() -> ExitCode {
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
                        });
                        let host = Host {
                            namespaces,
                            procfs,
                            own_uid,
                            landlock: landlock.unwrap_or(0).into(),
                            refused,
                        };
                        println!("{}", serde_json::to_string(&host).unwrap_or_default());
                        return ExitCode::SUCCESS;
                    }
                    Err(why) => refused = refused.or(Some(why)),
                }
            }
        }
    }
    ExitCode::FAILURE
}

fn works(namespaces: Namespaces, procfs: bool, own_uid: bool) -> Result<(), String> {
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
    let (told, tell) = rustix::pipe::pipe().map_err(|error| error.to_string())?;
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
            1
        })
    });
    drop(tell);
    if code == Ok(0) {
        return Ok(());
    }
    let mut why = vec![0; 512];
    let got = rustix::io::read(&told, &mut why).unwrap_or(0);
    why.truncate(got);
    Err(match why.is_empty() {
        true => "a new root or /proc cannot be made".to_owned(),
        false => String::from_utf8_lossy(&why).into_owned(),
    })
}

/// Does something in a child; its code.
fn in_child(work: impl FnOnce() -> u8) -> Result<u8, ()> {
    match sys::fork() {
        Ok(None) => std::process::exit(work().into()),
        Ok(Some(child)) => match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
            Ok(Some((_, status))) => Ok(code_of(status)),
            _ => Err(()),
        },
        Err(_) => Err(()),
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
