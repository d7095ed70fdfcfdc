//! Who is at the other end of a connection, as the kernel says.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

use super::options::Principals;

/// Connections of one user or machine that is not the operator.
const CONNECTIONS_OF_ONE_MAX: usize = 64;
/// Connections of all strangers.
const CONNECTIONS_OF_STRANGERS_MAX: usize = 16;

/// Who is at the other end, and whom it may speak for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// This process's own user, or root: for anybody. Never a machine.
    Operator,
    /// Speaks for these and nobody else.
    Speaker { who: Who, principals: Vec<String> },
    /// Speaks for nobody: it hears so once, and no more.
    Stranger,
}

/// Whose connections are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Who {
    /// A user of this host.
    User(u32),
    /// A virtual machine, or whoever else has this CID.
    Machine(u32),
    /// All who speak for nobody.
    Strangers,
}

impl Who {
    pub(super) fn connections_max(self) -> usize {
        match self {
            Self::User(_) | Self::Machine(_) => CONNECTIONS_OF_ONE_MAX,
            Self::Strangers => CONNECTIONS_OF_STRANGERS_MAX,
        }
    }
}

impl Peer {
    /// Whoever connected by a unix socket.
    ///
    /// # Errors
    /// What the kernel said.
    pub(super) fn of_user(socket: &UnixStream, principals: &Principals) -> io::Result<Self> {
        let uid = uid_of(socket)?;
        // SAFETY: takes nothing and cannot fail.
        if [0, unsafe { libc::geteuid() }].contains(&uid) {
            return Ok(Self::Operator);
        }
        let principals = principals.of_uid(uid);
        if principals.is_empty() {
            return Ok(Self::Stranger);
        }
        Ok(Self::Speaker { who: Who::User(uid), principals })
    }

    /// The machine with this CID, on the kernel's word.
    pub(super) fn of_machine(cid: u32, principals: &Principals) -> Self {
        match principals.of_cid(cid) {
            Some(name) => {
                Self::Speaker { who: Who::Machine(cid), principals: vec![name.to_owned()] }
            }
            None => Self::Stranger,
        }
    }

    /// Whether it may speak for this principal.
    pub(super) fn speaks_for(&self, principal: &str) -> bool {
        match self {
            Self::Operator => true,
            Self::Speaker { principals, .. } => principals.iter().any(|name| name == principal),
            Self::Stranger => false,
        }
    }

    /// Whether it may speak for anybody.
    pub(super) fn speaks(&self) -> bool {
        *self != Self::Stranger
    }

    /// Whether all that it speaks for is its own by these, too.
    pub(super) fn speaks_still(&self, now: &Principals) -> bool {
        match self {
            Self::Operator | Self::Stranger => true,
            Self::Speaker { who: Who::User(uid), principals } => {
                let now = now.of_uid(*uid);
                principals.iter().all(|name| now.contains(name))
            }
            Self::Speaker { who: Who::Machine(cid), principals } => {
                let now = now.of_cid(*cid);
                principals.iter().all(|name| now == Some(name))
            }
            Self::Speaker { who: Who::Strangers, .. } => false,
        }
    }

    pub(super) fn is_operator(&self) -> bool {
        *self == Self::Operator
    }

    /// With whom its connections are counted, unless it is the operator.
    pub(super) fn who(&self) -> Option<Who> {
        match self {
            Self::Operator => None,
            Self::Speaker { who, .. } => Some(*who),
            Self::Stranger => Some(Who::Strangers),
        }
    }
}

/// The user that connected, as of then (`SO_PEERCRED`, unix(7)).
fn uid_of(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most so many bytes there.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            peer.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the whole of it is written.
    Ok(unsafe { peer.assume_init() }.uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::options::Principal;

    #[test]
    fn a_user_speaks_for_its_principals_alone_and_the_operator_for_all() {
        let (a, _b) = UnixStream::pair().unwrap();
        let own = Peer::of_user(&a, &Principals::default()).unwrap();
        assert!(own.is_operator() && own.speaks_for("anybody"));
        let ci = Principal { uids: vec![1001], ..Principal::default() };
        let principals = Principals([("ci".to_owned(), ci)].into());
        assert_eq!(principals.of_uid(1001), ["ci"]);
        assert!(principals.of_uid(1002).is_empty());
        let ci = Peer::Speaker { who: Who::User(1001), principals: principals.of_uid(1001) };
        assert!(ci.speaks_for("ci") && !ci.speaks_for("local") && !ci.is_operator());
        assert!(ci.speaks_still(&principals) && !ci.speaks_still(&Principals::default()));
        assert!(own.speaks_still(&Principals::default()));
    }

    #[test]
    fn a_machine_speaks_for_its_principal_alone_and_is_never_the_operator() {
        let named = |cids| Principal { cids, uids: vec![5], ..Principal::default() };
        let principals = Principals(
            [("ci".to_owned(), named(vec![3, 4])), ("qa".into(), named(vec![1]))].into(),
        );
        for (cid, own, other) in [(3, "ci", "qa"), (4, "ci", "qa"), (1, "qa", "ci")] {
            let peer = Peer::of_machine(cid, &principals);
            assert!(peer.speaks_for(own) && !peer.speaks_for(other) && !peer.is_operator());
            assert_eq!(peer.who(), Some(Who::Machine(cid)));
            assert!(peer.speaks_still(&principals));
            assert!(!peer.speaks_still(&Principals::default()));
        }
        // A CID is no user, and neither the host's nor an unknown one is anybody.
        for cid in [0, 2, 5, 1001, u32::MAX] {
            let peer = Peer::of_machine(cid, &principals);
            assert_eq!(peer, Peer::Stranger);
            assert!(!peer.speaks() && !peer.speaks_for("ci") && !peer.is_operator());
        }
    }
}
