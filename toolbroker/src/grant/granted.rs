//! What a verified grant allows: which tools, with which arguments, to whom.

use std::collections::HashMap;

use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::name::ToolName;

use super::GrantError;
use crate::constraint::{Constraint, Constraints, Violation};

/// What a grant says, ready to hold calls against: every constraint of it was
/// read.
#[derive(Debug)]
pub struct Grant {
    claims: GrantClaims,
    tools: HashMap<ToolName, Granted>,
}

#[derive(Debug)]
struct Granted {
    definition_sha256: [u8; 32],
    constraints: Constraints,
}

impl Grant {
    /// Reads the constraints of what was verified, or is the operator's word.
    ///
    /// # Errors
    /// [`GrantError::Constraint`].
    pub fn new(claims: GrantClaims) -> Result<Self, GrantError> {
        let mut tools = HashMap::with_capacity(claims.tools.len());
        for GrantedTool { name, definition_sha256, constraints: texts } in &claims.tools {
            let mut constraints = Constraints::none();
            for text in texts {
                let read = Constraint::parse(text)
                    .map_err(|why| GrantError::Constraint { tool: name.clone(), why })?;
                constraints.push(read);
            }
            let granted = Granted { definition_sha256: *definition_sha256, constraints };
            tools.insert(name.clone(), granted);
        }
        Ok(Self { claims, tools })
    }

    /// What it says.
    #[must_use]
    pub fn claims(&self) -> &GrantClaims {
        &self.claims
    }

    /// The digest of the definition that a tool was granted with; `None` if
    /// it was not granted.
    #[must_use]
    pub fn pin(&self, tool: &ToolName) -> Option<[u8; 32]> {
        self.tools.get(tool).map(|granted| granted.definition_sha256)
    }

    /// Holds the arguments of a call of `tool` against its constraints. `schema` is that of
    /// its arguments, as JSON.
    ///
    /// # Errors
    /// [`Violation`], for the first that does not hold.
    pub fn check(
        &self,
        tool: &ToolName,
        arguments: &serde_json::Value,
        schema: &str,
    ) -> Result<(), Violation> {
        self.tools.get(tool).map_or(Ok(()), |granted| granted.constraints.check(arguments, schema))
    }

    /// What it keeps in memory beside its claims, at most, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tools.values().map(|granted| granted.constraints.bytes()).sum()
    }
}

/// That `presenter` comes with a grant of its own, in the session it is good
/// in.
///
/// # Errors
/// [`GrantError::OtherPrincipal`], [`GrantError::OtherSession`].
pub fn check_presenter(
    claims: &GrantClaims,
    presenter: &str,
    session: Option<&str>,
) -> Result<(), GrantError> {
    if claims.principal != presenter {
        let (owner, presenter) = (claims.principal.clone(), presenter.to_owned());
        return Err(GrantError::OtherPrincipal { owner, presenter });
    }
    if claims.session.is_some() && claims.session.as_deref() != session {
        return Err(GrantError::OtherSession { presented: session.map(str::to_owned) });
    }
    Ok(())
}
