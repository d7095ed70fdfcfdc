//! What may be granted: the definitions that a grant pins, the constraints it is written
//! with, and later narrowings.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use forge_protocol::broker::{GrantRequest, GrantedTool, Narrowing};
use forge_protocol::limits::{CONSTRAINTS_MAX, GRANTED_TOOLS_MAX, OverLimit};
use forge_protocol::name::ToolName;
use tokio::time::Instant;

use super::{Broker, Refused};
use crate::beside;
use crate::constraint::{Constraint, parse_where};
use crate::definition::Tool;
use crate::grant::attenuation::{self, attenuate};
use crate::grant::{Grant, GrantError, Terms};
use crate::upstream::hosted::Hosted;

impl Broker {
    pub(super) async fn issue(&self, request: GrantRequest) -> Result<Vec<u8>, Refused> {
        let GrantRequest { principal, tools, constraints, valid_s, calls_max, cost_max, session } =
            request;
        let constraints = match constraints.is_empty() {
            true => Vec::new(),
            false => beside(move || read_constraints(&constraints)).await?,
        };
        let tools = self.grantable(&principal, tools, None).await?;
        let tools = match constraints.is_empty() {
            true => pinned(&tools),
            false => beside(move || constrained(&tools, constraints)).await?,
        };
        let terms = Terms { principal, tools, valid_s, calls_max, cost_max, session };
        Ok(self.grants.issuer().issue(&terms, SystemTime::now())?)
    }

    /// Each named tool once, with the digest of its present definition; its server is
    /// waited for until then.
    pub(super) async fn pin(
        &self,
        principal: &str,
        names: Vec<ToolName>,
        until: Option<Instant>,
    ) -> Result<Vec<GrantedTool>, Refused> {
        Ok(pinned(&self.grantable(principal, names, until).await?))
    }

    /// Each named tool once; its server is waited for until then.
    async fn grantable(
        &self,
        principal: &str,
        names: Vec<ToolName>,
        until: Option<Instant>,
    ) -> Result<Vec<Arc<Tool>>, Refused> {
        let names: BTreeSet<ToolName> = names.into_iter().collect();
        self.check_visible(principal, names.iter())?;
        let tools = self.registry.find_all(names, until).await;
        let tools = tools.map_err(|error| error.told_to(principal, &self.policy()))?;
        self.check_reviewed(&tools).await?;
        Ok(tools)
    }
}

/// A run's grant, and the tools that its caller hosts.
pub(super) fn with_hosted(grant: &Grant, hosted: &Hosted) -> Result<Grant, Refused> {
    let mut claims = grant.claims().clone();
    claims.tools.extend(pinned(&hosted.tools()));
    let (got, limit) = (claims.tools.len() as u64, GRANTED_TOOLS_MAX as u64);
    if got > limit {
        return Err(Refused::OverLimit(OverLimit { what: "tools", got, limit }));
    }
    Ok(Grant::new(claims)?)
}

pub(super) fn pinned(tools: &[Arc<Tool>]) -> Vec<GrantedTool> {
    let pin = |tool: &Arc<Tool>| GrantedTool {
        name: tool.name().clone(),
        definition_sha256: tool.sha256(),
        constraints: Vec::new(),
    };
    tools.iter().map(pin).collect()
}

/// Tools with these constraints, each of which has to be on one of them and on a place
/// that there may be among its arguments: a name misspelt would leave the right one free.
pub(super) fn constrained(
    tools: &[Arc<Tool>],
    constraints: Vec<(ToolName, Constraint)>,
) -> Result<Vec<GrantedTool>, Refused> {
    let mut granted = pinned(tools);
    for (tool, constraint) in constraints {
        let Some(at) = tools.iter().position(|it| *it.name() == tool) else {
            return Err(Refused::ConstraintOnOther { tool });
        };
        let schema = serde_json::from_str(&tools[at].spec().input_schema).unwrap_or_default();
        let constraint_text = constraint.text().to_owned();
        if let Some(place) = constraint.unknown_to(&schema) {
            let (place, constraint) = (crate::cut(place, 128), constraint_text);
            return Err(Refused::ConstraintOnNothing { tool, constraint, place });
        }
        granted[at].constraints.push(constraint_text);
    }
    Ok(granted)
}

/// The constraints of a request, each with its tool.
fn read_constraints(texts: &[String]) -> Result<Vec<(ToolName, Constraint)>, Refused> {
    if texts.len() > CONSTRAINTS_MAX {
        return Err(GrantError::TooManyConstraints { got: texts.len() }.into());
    }
    Ok(texts.iter().map(|text| parse_where(text)).collect::<Result<_, _>>()?)
}

pub(super) fn narrowed(narrowing: Narrowing) -> Result<Vec<u8>, Refused> {
    let Narrowing { token, tools, constraints, valid_s, calls_max, cost_max, session } = narrowing;
    let constraints = read_constraints(&constraints)?;
    let narrowing =
        attenuation::Narrowing { tools, constraints, valid_s, calls_max, cost_max, session };
    Ok(attenuate(&token, &narrowing, SystemTime::now())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Listed;
    use crate::grant::tests::claims_of_nothing;

    #[test]
    fn a_runs_grant_and_what_its_caller_hosts_are_together_no_more_than_one_grant_holds() {
        let hosted = |count: usize| {
            let listed = (0..count).map(|number| Listed {
                name: format!("t{number}"),
                description: None,
                input_schema: serde_json::Map::new(),
                output_schema: None,
            });
            Hosted::new("app", listed.collect()).unwrap().0
        };
        let name = ToolName::parse("shop.find").unwrap();
        let mut claims = claims_of_nothing();
        let constraints = Vec::new();
        claims.tools.push(GrantedTool { name, definition_sha256: [7; 32], constraints });
        let grant = Grant::new(claims).unwrap();
        let all = with_hosted(&grant, &hosted(GRANTED_TOOLS_MAX - 1)).unwrap();
        assert_eq!(all.claims().tools.len(), GRANTED_TOOLS_MAX);
        let refused = with_hosted(&grant, &hosted(GRANTED_TOOLS_MAX));
        assert!(matches!(refused, Err(Refused::OverLimit(_))), "{refused:?}");
    }
}
