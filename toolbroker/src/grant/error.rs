//! Why a grant is not issued, not accepted or not narrowed.

use biscuit_auth::error;
use forge_protocol::limits::{
    CONSTRAINTS_MAX, GRANT_BYTES_MAX, GRANTED_TOOLS_MAX, PRINCIPAL_BYTES_MAX, SESSION_BYTES_MAX,
};
use forge_protocol::name::ToolName;

use super::terms::VALID_S_MAX;
use crate::constraint::WrittenError;

/// Why a grant is not issued or not accepted.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The principal's name cannot be used.
    #[error("a principal's name has 1 to {PRINCIPAL_BYTES_MAX} bytes and no control characters")]
    Principal,
    /// Too many tools for one grant.
    #[error("{got} tools are too many for one grant, the limit is {GRANTED_TOOLS_MAX}")]
    TooManyTools {
        /// How many.
        got: usize,
    },
    /// The validity is zero or beyond any use.
    #[error("a grant is good for 1 to {VALID_S_MAX} seconds, not for {got}")]
    Validity {
        /// The validity asked for, in seconds.
        got: u64,
    },
    /// The token is too large.
    #[error("the token has {got} bytes, the limit is {GRANT_BYTES_MAX}: grant fewer tools")]
    TooLarge {
        /// Its size.
        got: usize,
    },
    /// The token is not one this broker's root key signed, or was changed.
    #[error(
        "this is no grant of this broker: it is damaged, forged, or signed with another root key \
         (was it issued here, and with this --state folder?): {0}"
    )]
    Forged(String),
    /// The token is signed, and does not say what a grant says.
    #[error("the grant is signed but malformed: {0}")]
    Malformed(&'static str),
    /// The grant's time is over.
    #[error("the grant expired {ago_s} s ago: issue a new one")]
    Expired {
        /// Since when, in seconds.
        ago_s: u64,
    },
    /// A later block takes everything away.
    #[error("a block appended to the grant leaves no tool allowed: {0}")]
    NothingLeft(String),
    /// A later block has a shape whose cost is not bounded.
    #[error("a block appended to the grant {0}")]
    Shape(&'static str),
    /// Verification took more than its bounds.
    #[error("verifying the grant passes the bounds on facts, rules and time: {0}")]
    TooCostly(String),
    /// Another principal's grant.
    #[error("the grant is {owner:?}'s and {presenter:?} presents it: each principal needs its own")]
    OtherPrincipal {
        /// Whose it is.
        owner: String,
        /// Who came with it.
        presenter: String,
    },
    /// A session's name cannot be used.
    #[error("a session's name has 1 to {SESSION_BYTES_MAX} bytes and no control characters")]
    Session,
    /// Another session's grant.
    #[error(
        "the grant is good in one session only, and not in {}: present it in the session it was \
         issued for, or issue another",
        shown_session(presented)
    )]
    OtherSession {
        /// The session it was presented in.
        presented: Option<String>,
    },
    /// A constraint in the token cannot be read.
    #[error("the grant has a constraint on {tool} that cannot be read: {why}")]
    Constraint {
        /// The tool.
        tool: ToolName,
        /// What is wrong with it.
        why: WrittenError,
    },
    /// A constraint in the token is on a tool that its first block does not name.
    #[error("a constraint of the grant is on {tool:?}, a tool that it was never issued for")]
    Stray {
        /// The tool, as it is written.
        tool: String,
    },
    /// Too many constraints.
    #[error("{got} constraints are too many at once, the limit is {CONSTRAINTS_MAX}")]
    TooManyConstraints {
        /// How many.
        got: usize,
    },
    /// A constraint, or a tool to be left, is on a tool that is not granted.
    #[error("the grant does not name {tool}: there is nothing about it to narrow")]
    NotInGrant {
        /// The tool.
        tool: ToolName,
    },
    /// A narrowing to a session of a grant that is another's.
    #[error("the grant is bound to another session already, and would be good in neither")]
    BoundAlready,
    /// A narrowing of a grant that takes no block more.
    #[error(
        "the grant is sealed, so that nobody can narrow it: ask its issuer for one that is not"
    )]
    Sealed,
    /// A narrowing that takes nothing away.
    #[error("nothing is said that would narrow the grant")]
    NothingToNarrow,
    /// The token library failed while issuing.
    #[error("the grant cannot be made: {0}")]
    Issue(String),
}

fn shown_session(session: &Option<String>) -> String {
    session.as_ref().map_or_else(|| "a run without one".to_owned(), |name| format!("{name:?}"))
}

/// What the token library says of a token that is evaluated.
pub(super) fn engine(error: error::Token) -> GrantError {
    match error {
        error::Token::RunLimit(limit) => GrantError::TooCostly(limit.to_string()),
        other => GrantError::Forged(crate::cut(&other.to_string(), 512)),
    }
}
