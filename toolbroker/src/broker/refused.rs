//! Why a supervisor's request is refused, and as what.

use forge_protocol::broker::RefusalKind;
use forge_protocol::limits::{FOUND_TOOLS_MAX, OverLimit};
use forge_protocol::name::ToolName;

use crate::config::ConfigError;
use crate::constraint::WrittenError;
use crate::grant::GrantError;
use crate::hosting::HostingError;
use crate::journal::Unwritable;
use crate::registry::LookupError;
use crate::review::{Blocked, ReviewError};
use crate::upstream::UpstreamError;

/// A refusal of a supervisor's request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("{0}")]
    Lookup(#[from] LookupError),
    #[error("{0}")]
    Grant(#[from] GrantError),
    #[error(
        "the definition of {tool} changed since this grant was issued: look at it with `forge-vmm \
         tools review` and issue a new grant"
    )]
    DefinitionChanged { tool: ToolName },
    #[error(
        "there is no tool {tool} for the principal {principal:?}: none of its roles names one \
         (forge.toml, [principals] and [roles])"
    )]
    Forbidden { principal: String, tool: ToolName },
    #[error("{0}")]
    NotReviewed(#[from] Blocked),
    #[error("{0}")]
    Reviews(#[from] ReviewError),
    #[error("{0}")]
    Constraint(#[from] WrittenError),
    #[error("there is a constraint on {tool}, which is not among the tools to be granted")]
    ConstraintOnOther { tool: ToolName },
    #[error(
        "the constraint {constraint:?} is on {place:?}, which is none of the arguments of {tool}: \
         `forge-vmm tools list --json` has its schema"
    )]
    ConstraintOnNothing { tool: ToolName, constraint: String, place: String },
    #[error(
        "the definition of {tool} is another by now than the one to be approved: look at it again \
         with `forge-vmm tools review`"
    )]
    ChangedMeanwhile { tool: ToolName },
    #[error("no link came with the request: pass one end of a socket pair with its first byte")]
    NoHostLink,
    #[error("{0}")]
    Hosting(#[from] HostingError),
    #[error("no run link came with the request: pass one end of a socket pair with its first byte")]
    NoRunLink,
    #[error("the descriptor that came as the link cannot be one: {0}")]
    BadLink(std::io::Error),
    #[error("the toolbroker has no descriptor left: raise its limit on open files")]
    NoDescriptorLeft,
    #[error("{0}")]
    OverLimit(OverLimit),
    #[error("the intent is empty: say in a sentence or two what is to be done")]
    NoIntent,
    #[error("a search for no tools finds none: ask for 1 to {FOUND_TOOLS_MAX}")]
    NoHits,
    #[error("no run of this id is open: it ended or never began; the journal has what it called")]
    NotOpen,
    #[error("the broker is shutting down")]
    Closing,
    #[error("{0}")]
    Roles(#[from] ConfigError),
    #[error("{0}")]
    Journal(#[from] Unwritable),
}

impl Refused {
    /// As what.
    pub(super) fn kind(&self) -> RefusalKind {
        match self {
            Self::Lookup(LookupError::Unavailable { source: UpstreamError::Starting, .. }) => {
                RefusalKind::OutOfTime
            }
            Self::Lookup(LookupError::Unavailable { .. } | LookupError::Away(_)) => {
                RefusalKind::ServerAway
            }
            Self::Lookup(_) => RefusalKind::NoSuchTool,
            Self::Grant(error) => match error {
                GrantError::Principal
                | GrantError::TooManyTools { .. }
                | GrantError::TooManyConstraints { .. }
                | GrantError::Session
                | GrantError::NotInGrant { .. }
                | GrantError::NothingToNarrow
                | GrantError::BoundAlready
                | GrantError::Validity { .. } => RefusalKind::BadRequest,
                GrantError::TooLarge { .. }
                | GrantError::Forged(_)
                | GrantError::Malformed(_)
                | GrantError::Expired { .. }
                | GrantError::NothingLeft(_)
                | GrantError::Shape(_)
                | GrantError::TooCostly(_)
                | GrantError::Constraint { .. }
                | GrantError::Stray { .. }
                | GrantError::Sealed
                | GrantError::OtherSession { .. }
                | GrantError::OtherPrincipal { .. } => RefusalKind::BadGrant,
                GrantError::Issue(_) => RefusalKind::Internal,
            },
            Self::DefinitionChanged { .. } => RefusalKind::BadGrant,
            Self::Forbidden { .. } => RefusalKind::Forbidden,
            Self::NotReviewed(_) | Self::ChangedMeanwhile { .. } => RefusalKind::NotReviewed,
            Self::NoRunLink
            | Self::NoHostLink
            | Self::Hosting(_)
            | Self::BadLink(_)
            | Self::Constraint(_)
            | Self::ConstraintOnOther { .. }
            | Self::ConstraintOnNothing { .. }
            | Self::OverLimit(_)
            | Self::NoIntent
            | Self::NoHits
            | Self::Roles(_)
            | Self::NotOpen => RefusalKind::BadRequest,
            Self::Reviews(_) | Self::Closing => RefusalKind::Internal,
            Self::Journal(_) => RefusalKind::Journal,
            Self::NoDescriptorLeft => RefusalKind::Overloaded,
        }
    }
}
