//! Who is at the other end of a connection, as the kernel says.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

use super::options::Principals;

/// Who is at the other end, and whom it may speak for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// This process's own user, or root: for anybody.
    Operator,
    /// A user that speaks for these and nobody else.
    Speaker { uid: u32, principals: Vec<String> },
}

impl Peer {
    /// Whoever connected; `None` for a user that speaks for nobody.
    ///
    /// # Errors
    /// What the kernel said.
    pub(super) fn of(socket: &UnixStream, principals: &Principals) -> io::Result<Option<Self>> {
        let uid = uid_of(socket)?;
        // SAFETY: takes nothing and cannot fail.
        if [0, unsafe { libc::geteuid() }].contains(&uid) {
            return Ok(Some(Self::Operator));
        }
        let principals = principals.of_uid(uid);
        Ok((!principals.is_empty()).then_some(Self::Speaker { uid, principals }))
    }

    /// Whether it may speak for this principal.
    pub(super) fn speaks_for(&self, principal: &str) -> bool {
        match self {
            Self::Operator => true,
            Self::Speaker { principals, .. } => principals.iter().any(|name| name == principal),
        }
    }

    pub(super) fn is_operator(&self) -> bool {
        *self == Self::Operator
    }

    /// Its user, unless it is the operator.
    pub(super) fn uid(&self) -> Option<u32> {
        match self {
            Self::Operator => None,
            Self::Speaker { uid, .. } => Some(*uid),
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
        let own = Peer::of(&a, &Principals::default()).unwrap().unwrap();
        assert!(own.is_operator() && own.speaks_for("anybody"));
        let ci = Principal { uids: vec![1001], ..Principal::default() };
        let principals = Principals([("ci".to_owned(), ci)].into());
        assert_eq!(principals.of_uid(1001), ["ci"]);
        assert!(principals.of_uid(1002).is_empty());
        let ci = Peer::Speaker { uid: 1001, principals: principals.of_uid(1001) };
        assert!(ci.speaks_for("ci") && !ci.speaks_for("local") && !ci.is_operator());
    }
}
