//! What a grant is to say.

use std::time::{Duration, SystemTime};

use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::limits::{CONSTRAINTS_MAX, GRANTED_TOOLS_MAX};
use forge_protocol::name::{is_principal, is_session};

use super::GrantError;
use super::shape::unix_s;

/// The longest a grant may be good for: ten years.
pub(crate) const VALID_S_MAX: u64 = 10 * 365 * 24 * 60 * 60;

/// What a grant is to say.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Whose it is.
    pub principal: String,
    /// The tools it allows, with the digests of their definitions.
    pub tools: Vec<GrantedTool>,
    /// How long it is good for, in seconds.
    pub valid_s: u64,
    /// The most calls of one run.
    pub calls_max: Option<u32>,
    /// The most that one run's calls may cost together, in budget units.
    pub cost_max: Option<u32>,
    /// The one session it is good in.
    pub session: Option<String>,
}

impl Terms {
    /// What a grant on these terms would say, for a run that is held to them
    /// without a token: nobody but the broker would ever read it.
    ///
    /// # Errors
    /// [`GrantError`], if the terms cannot be met.
    pub fn claims(self, now: SystemTime) -> Result<GrantClaims, GrantError> {
        self.check()?;
        let Self { principal, tools, valid_s, calls_max, cost_max, session } = self;
        let expires_unix_s = unix_s(now + Duration::from_secs(valid_s));
        Ok(GrantClaims { principal, tools, expires_unix_s, calls_max, cost_max, session })
    }

    pub(super) fn check(&self) -> Result<(), GrantError> {
        check_principal(&self.principal)?;
        if self.tools.len() > GRANTED_TOOLS_MAX {
            return Err(GrantError::TooManyTools { got: self.tools.len() });
        }
        if self.valid_s == 0 || self.valid_s > VALID_S_MAX {
            return Err(GrantError::Validity { got: self.valid_s });
        }
        let constraints = self.tools.iter().map(|tool| tool.constraints.len()).sum();
        if constraints > CONSTRAINTS_MAX {
            return Err(GrantError::TooManyConstraints { got: constraints });
        }
        self.session.as_deref().map_or(Ok(()), check_session)
    }
}

/// That a session's name can be one.
pub(super) fn check_session(session: &str) -> Result<(), GrantError> {
    is_session(session).then_some(()).ok_or(GrantError::Session)
}

/// That a principal's name can be one.
pub(super) fn check_principal(principal: &str) -> Result<(), GrantError> {
    is_principal(principal).then_some(()).ok_or(GrantError::Principal)
}
