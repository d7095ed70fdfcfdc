//! A token that is evaluated: what all its blocks together leave.

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime};

use biscuit_auth::builder::{self, AuthorizerBuilder, Fact};
use biscuit_auth::{AuthorizerLimits, Biscuit, error};
use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::limits::{CONSTRAINTS_MAX, GRANTED_TOOLS_MAX, TOOL_NAME_BYTES_MAX};
use forge_protocol::name::ToolName;

use super::error::engine;
use super::shape::{APPENDED_MAX, unix_s};
use super::terms::{check_principal, check_session};
use super::{Grant, GrantError, check_clock};

/// Facts of one verification: the authority block's, and what later blocks
/// add.
const FACTS_MAX: u64 = 2 * GRANTED_TOOLS_MAX as u64 + 512;
/// Rounds of rule application in one verification.
const ITERATIONS_MAX: u64 = 100;
/// Time for one pass of verification. The bounds above are the real ones;
/// this one only ends what slipped between them, and is generous so that a
/// loaded machine refuses no good grant.
const VERIFY_TIME_MAX: Duration = Duration::from_secs(2);
/// The same for all passes together: there is one for each granted tool.
const VERIFY_ALL_TIME_MAX: Duration = Duration::from_secs(10);

/// A token whose chain of signatures is good and whose shape is bounded. It
/// says nothing about what the token allows, or until when.
#[derive(Debug)]
pub struct Chain(pub(super) Biscuit);

impl Chain {
    /// Whether the one thing about the token that depends on the time is the
    /// end that its authority block states.
    #[must_use]
    pub fn ends_only(&self) -> bool {
        let Self(token) = self;
        let speaks_of_time = |block: usize, allowed: usize| {
            // As source, since a block's own form names predicates by number.
            // A text that happens to hold these letters errs to the safe side.
            let source = token.print_block_source(block);
            source.map_or(true, |source| source.matches("time(").count() > allowed)
        };
        !speaks_of_time(0, 1) && !(1..token.block_count()).any(|block| speaks_of_time(block, 0))
    }

    /// What the token allows at `now`.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn grant(&self, now: SystemTime) -> Result<Grant, GrantError> {
        Grant::new(self.claims(now)?)
    }

    fn claims(&self, now: SystemTime) -> Result<GrantClaims, GrantError> {
        let Self(token) = self;
        let Stated { principal, session, end, tools, constraints, calls_max, cost_max } =
            Stated::by(token, now)?;
        if let Ok(over) = now.duration_since(end) {
            return Err(GrantError::Expired { ago_s: over.as_secs() });
        }
        let tools = left(token, now, &tools, &constraints)?;
        let expires_unix_s = unix_s(end);
        Ok(GrantClaims { principal, tools, expires_unix_s, calls_max, cost_max, session })
    }
}

/// What the blocks of a token state, whether or not their checks hold.
#[derive(Debug)]
struct Stated {
    principal: String,
    session: Option<String>,
    end: SystemTime,
    /// Each by its name, with the digest of its definition.
    tools: Vec<(String, Vec<u8>)>,
    /// Each by the name of its tool, in order.
    constraints: Vec<(String, String)>,
    calls_max: Option<u32>,
    cost_max: Option<u32>,
}

impl Stated {
    fn by(token: &Biscuit, now: SystemTime) -> Result<Self, GrantError> {
        // What the authority block says. A query sees that block's facts
        // alone, unless it is one over all blocks.
        let mut world = authorizer(token, now, None)?;
        let principals: Vec<(String,)> =
            world.query("found($p) <- principal($p)").map_err(engine)?;
        let ends: Vec<(SystemTime,)> = world.query("found($t) <- expires($t)").map_err(engine)?;
        let tools: Vec<(String, Vec<u8>)> =
            world.query("found($n, $d) <- tool($n, $d)").map_err(engine)?;
        // Over all blocks, so that a later one can only take away: of budgets
        // and ends the smallest counts, and every constraint.
        let calls: Vec<(i64,)> = world.query_all("found($n) <- calls_max($n)").map_err(engine)?;
        let costs: Vec<(i64,)> = world.query_all("found($n) <- cost_max($n)").map_err(engine)?;
        let all_ends: Vec<(SystemTime,)> =
            world.query_all("found($t) <- expires($t)").map_err(engine)?;
        let sessions: Vec<(String,)> =
            world.query_all("found($s) <- session($s)").map_err(engine)?;
        let mut constraints: Vec<(String, String)> =
            world.query_all("found($n, $c) <- constraint($n, $c)").map_err(engine)?;
        constraints.sort_unstable();

        let [(principal,)] = principals.as_slice() else {
            return Err(GrantError::Malformed("it names not exactly one principal"));
        };
        check_principal(principal)?;
        if ends.len() != 1 {
            return Err(GrantError::Malformed("it has not exactly one end"));
        }
        let Some(end) = all_ends.iter().map(|(end,)| *end).min() else {
            return Err(GrantError::Malformed("it has no end"));
        };
        let session = match sessions.as_slice() {
            [] => None,
            [(session,)] => Some(session.clone()),
            _ => return Err(GrantError::Malformed("it is bound to several sessions at once")),
        };
        if let Some(session) = &session {
            check_session(session)?;
        }
        if constraints.len() > CONSTRAINTS_MAX + APPENDED_MAX {
            return Err(GrantError::TooManyConstraints { got: constraints.len() });
        }
        if tools.len() > GRANTED_TOOLS_MAX {
            return Err(GrantError::TooManyTools { got: tools.len() });
        }
        // A tool misspelt: who wrote the constraint believes that it holds. One that
        // some block takes away is still the first block's.
        let names: HashSet<&str> = tools.iter().map(|(name, _)| name.as_str()).collect();
        if let Some((stray, _)) = constraints.iter().find(|(it, _)| !names.contains(it.as_str())) {
            return Err(GrantError::Stray { tool: crate::cut(stray, TOOL_NAME_BYTES_MAX) });
        }
        let (calls_max, cost_max) = (smallest(calls), smallest(costs));
        let principal = principal.clone();
        Ok(Self { principal, session, end, tools, constraints, calls_max, cost_max })
    }
}

/// Which of a token's tools its later blocks leave, by name. Each is asked for by itself,
/// so that a later block's checks can tell them apart.
fn left(
    token: &Biscuit,
    now: SystemTime,
    tools: &[(String, Vec<u8>)],
    constraints: &[(String, String)],
) -> Result<Vec<GrantedTool>, GrantError> {
    let began = Instant::now();
    let mut granted = Vec::new();
    let mut taken_away = None;
    for (name, digest) in tools {
        let name = ToolName::parse(name)
            .map_err(|_| GrantError::Malformed("it grants what is no tool name"))?;
        let definition_sha256 = digest
            .as_slice()
            .try_into()
            .map_err(|_| GrantError::Malformed("it pins what is no SHA-256"))?;
        if began.elapsed() > VERIFY_ALL_TIME_MAX {
            return Err(GrantError::TooCostly("its tools take too long together".to_owned()));
        }
        match authorizer(token, now, Some(&name))?.authorize() {
            Ok(_) => {
                let of_it = constraints.iter().filter(|(tool, _)| tool == name.as_str());
                let constraints = of_it.map(|(_, text)| text.clone()).collect();
                granted.push(GrantedTool { name, definition_sha256, constraints });
            }
            Err(error::Token::FailedLogic(why)) => taken_away = Some(why.to_string()),
            Err(other) => return Err(engine(other)),
        }
    }
    if let (true, Some(why)) = (granted.is_empty(), taken_away) {
        return Err(GrantError::NothingLeft(crate::cut(&why, 512)));
    }
    granted.sort_by(|a, b| a.name.cmp(&b.name));
    if granted.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(GrantError::Malformed("it grants one tool twice"));
    }
    Ok(granted)
}

/// The smallest of a budget's facts.
fn smallest(facts: Vec<(i64,)>) -> Option<u32> {
    facts.into_iter().map(|(most,)| u32::try_from(most.max(0)).unwrap_or(u32::MAX)).min()
}

/// A fact of a token or of the world it is looked at in.
pub(super) fn fact<const N: usize>(name: &str, terms: [builder::Term; N]) -> Fact {
    Fact::new(name.to_owned(), terms)
}

/// The world in which a token is looked at: what the broker states, the
/// bounds, and the one policy.
fn authorizer(
    token: &Biscuit,
    now: SystemTime,
    tool: Option<&ToolName>,
) -> Result<biscuit_auth::Authorizer, GrantError> {
    check_clock(now)?;
    let mut world = AuthorizerBuilder::new()
        .set_limits(AuthorizerLimits {
            max_facts: FACTS_MAX,
            max_iterations: ITERATIONS_MAX,
            max_time: VERIFY_TIME_MAX,
        })
        .fact(fact("time", [builder::date(&now)]))
        .map_err(engine)?;
    if let Some(tool) = tool {
        world = world
            .fact(fact("call", [builder::string(tool.as_str())]))
            .and_then(|world| world.policy("allow if call($name), tool($name, $digest)"))
            .map_err(engine)?;
    }
    world.build(token).map_err(engine)
}
