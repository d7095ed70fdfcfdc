//! Which versions of the protocol can talk to each other.
//!
//! Both sides of the guest link and of the broker's control link open with
//! [`Hello`]: who they are and the range of versions they speak. (A run link
//! is opened over a control link that has agreed, and a supervisor
//! carries the executable of its workers.) The highest version in both ranges is spoken. If
//! there is none, the side that sees it answers [`Refusal`] and both name the
//! two ranges in their error. The layout of these two messages never changes.

use crate::codec::{Decode, Encode};

/// The version of the protocol this code speaks.
pub const VERSION: u16 = 3;

/// Who is speaking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Role {
    /// guest-init inside a VM.
    Guest,
    /// The host's side of the guest link.
    Host,
    /// A supervisor, on the control link to the broker.
    Supervisor,
    /// The toolbroker.
    Broker,
    /// A client of the service.
    Client,
}

impl core::fmt::Display for Role {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Guest => "the guest",
            Self::Host => "the host",
            Self::Supervisor => "the supervisor",
            Self::Broker => "the toolbroker",
            Self::Client => "the client",
        })
    }
}

/// The first message of each side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Hello {
    /// Always [`Hello::MAGIC`].
    pub magic: [u8; 4],
    /// Who is speaking.
    pub role: Role,
    /// The lowest version the speaker knows.
    pub version_min: u16,
    /// The highest version the speaker knows.
    pub version_max: u16,
}

/// The answer to a [`Hello`] without a common version: the refuser's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Refusal(pub Hello);

/// Two sides that cannot talk, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The first bytes are no [`Hello`] of this protocol.
    NotForge,
    /// The peer is not who should be at the other end of this link.
    WrongRole {
        /// Who it says it is.
        got: Role,
        /// Who should be there.
        expected: Role,
    },
    /// No version is spoken by both.
    VersionMismatch {
        /// The peer.
        theirs: Hello,
        /// This side.
        ours: Hello,
    },
}

impl core::fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NotForge => write!(f, "the peer does not speak the forge protocol"),
            Self::WrongRole { got, expected } => {
                write!(f, "{got} answered where {expected} was expected")
            }
            Self::VersionMismatch { theirs, ours } => write!(
                f,
                "{} speaks forge protocol {} to {}, {} speaks {} to {}: \
                 use parts of one release",
                theirs.role,
                theirs.version_min,
                theirs.version_max,
                ours.role,
                ours.version_min,
                ours.version_max,
            ),
        }
    }
}

impl core::error::Error for HandshakeError {}

impl Hello {
    /// "FRGE", so that a stranger on the link is seen at once.
    pub const MAGIC: [u8; 4] = *b"FRGE";

    /// This code's own greeting.
    #[must_use]
    pub const fn ours(role: Role) -> Self {
        Self { magic: Self::MAGIC, role, version_min: VERSION, version_max: VERSION }
    }

    /// The version both speak.
    ///
    /// # Errors
    /// [`HandshakeError`], naming both sides.
    pub fn agree(self, theirs: Self, expected: Role) -> Result<u16, HandshakeError> {
        if theirs.magic != Self::MAGIC {
            return Err(HandshakeError::NotForge);
        }
        if theirs.role != expected {
            return Err(HandshakeError::WrongRole { got: theirs.role, expected });
        }
        let version = self.version_max.min(theirs.version_max);
        if version < self.version_min || version < theirs.version_min {
            return Err(HandshakeError::VersionMismatch { theirs, ours: self });
        }
        Ok(version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn the_highest_common_version_is_spoken() {
        let ours = Hello { version_min: 1, version_max: 4, ..Hello::ours(Role::Host) };
        let theirs = Hello { version_min: 2, version_max: 3, ..Hello::ours(Role::Guest) };
        assert_eq!(ours.agree(theirs, Role::Guest), Ok(3));
        assert_eq!(theirs.agree(ours, Role::Host), Ok(3));
    }

    #[test]
    fn a_mismatch_names_both_sides_and_both_ranges() {
        let theirs = Hello { version_min: 7, version_max: 9, ..Hello::ours(Role::Guest) };
        let said = Hello::ours(Role::Host).agree(theirs, Role::Guest).unwrap_err().to_string();
        assert!(said.contains("the guest speaks forge protocol 7 to 9"), "{said}");
        assert!(said.contains("the host speaks 3 to 3"), "{said}");
    }

    #[test]
    fn a_stranger_and_a_wrong_role_are_refused() {
        let stranger = Hello { magic: *b"HTTP", ..Hello::ours(Role::Guest) };
        let ours = Hello::ours(Role::Host);
        assert_eq!(ours.agree(stranger, Role::Guest), Err(HandshakeError::NotForge));
        assert_eq!(
            ours.agree(Hello::ours(Role::Broker), Role::Guest),
            Err(HandshakeError::WrongRole { got: Role::Broker, expected: Role::Guest })
        );
    }
}
