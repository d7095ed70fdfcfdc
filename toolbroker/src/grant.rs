//! The signed right to call certain tools: a Biscuit token.
//!
//! # What is in it
//! The authority block, signed with the broker's root key, holds facts:
//!
//! ```text
//! principal("alice");
//! tool("inventory.find_parts", hex:…);         one for each tool, with its digest
//! constraint("shop.order", "/quantity<=5");    what is asked of arguments
//! expires(2026-11-21T12:00:00Z);
//! calls_max(20);                               if the grant has budgets
//! cost_max(100);
//! session("s-17");                             if it is bound to a session
//! check if time($now), expires($end), $now < $end;
//! ```
//!
//! Whoever holds a token may append blocks, offline (see
//! [`attenuation`](crate::attenuation)). The tools are the authority block's alone, each
//! asked for once: what is left after all checks is the granted set. Budgets,
//! end, session and constraints are read over all blocks, and each further
//! fact can only make them narrower.
//!
//! Constraints are texts to the token, read into [`Constraints`] when it is
//! verified and held against each call outside Datalog, whose integers have
//! 64 bits and whose limits are not those of one call.
//!
//! Distrusted is every byte of a token, later blocks above all; what bounds
//! their cost is said in [`attenuation`](crate::attenuation). Deliberately
//! absent is revocation.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use biscuit_auth::builder::{self, Algorithm, AuthorizerBuilder, Fact};
use biscuit_auth::{AuthorizerLimits, Biscuit, KeyPair, PublicKey, error};
use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::limits::{
    CONSTRAINTS_MAX, GRANT_BYTES_MAX, GRANTED_TOOLS_MAX, PRINCIPAL_BYTES_MAX, SESSION_BYTES_MAX,
    TOOL_NAME_BYTES_MAX,
};
use forge_protocol::name::ToolName;

use crate::attenuation::{APPENDED_MAX, check_shape, unix_s};
use crate::constraint::{Constraint, Constraints, Violation, WrittenError};
use crate::secret::{SecretError, read_private};

/// The file in the state folder that holds the root key.
const ROOT_KEY_FILE: &str = "grant-root.pem";

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
/// The longest a grant may be good for: ten years.
pub(crate) const VALID_S_MAX: u64 = 10 * 365 * 24 * 60 * 60;

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

/// Why the root key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootKeyError {
    /// The key file cannot be read, or others may read it.
    #[error("the grant root key: {0}")]
    File(#[from] SecretError),
    /// The key file holds no key.
    #[error("the grant root key: {} holds no Ed25519 key in PKCS#8 PEM", file.display())]
    NotAKey {
        /// The file.
        file: PathBuf,
    },
    /// A new key cannot be written.
    #[error("the grant root key cannot be written to {}: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

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

    fn check(&self) -> Result<(), GrantError> {
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

/// Issues and verifies grants with one root key.
pub struct Issuer {
    root: KeyPair,
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Issuer({})", self.public_key().print())
    }
}

impl Issuer {
    /// An issuer whose key lives as long as the process: no other process
    /// can verify its grants.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self { root: KeyPair::new_with_algorithm(Algorithm::Ed25519) }
    }

    /// An issuer with the key in `state`, which is made if it is missing.
    ///
    /// # Errors
    /// [`RootKeyError`], naming the file.
    pub fn open(state: &Path) -> Result<Self, RootKeyError> {
        let file = state.join(ROOT_KEY_FILE);
        match read_private(&file) {
            Ok(pem) => Self::from_pem(&pem, &file),
            Err(SecretError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                let fresh = Self::ephemeral();
                if fresh
                    .save(state, &file)
                    .map_err(|source| RootKeyError::Write { file: file.clone(), source })?
                {
                    return Ok(fresh);
                }
                // Another broker was first: its key is the key.
                Self::from_pem(&read_private(&file)?, &file)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn from_pem(pem: &str, file: &Path) -> Result<Self, RootKeyError> {
        KeyPair::from_private_key_pem_with_algorithm(pem, Algorithm::Ed25519)
            .map(|root| Self { root })
            .map_err(|_| RootKeyError::NotAKey { file: file.to_owned() })
    }

    /// Writes the key beside `file` and links it there, so that `file` is
    /// there whole or not at all. `false` if it was there already.
    fn save(&self, state: &Path, file: &Path) -> io::Result<bool> {
        if !state.exists() {
            fs::create_dir_all(state)?;
            fs::set_permissions(state, Permissions::from_mode(0o700))?;
        }
        let pem = self.root.to_private_key_pem().map_err(io::Error::other)?;
        // Named for the key, which nobody else has.
        let own = crate::hex(&self.public_key().to_bytes()[..8]);
        let draft = state.join(format!(".{ROOT_KEY_FILE}.{own}"));
        let written = (|| {
            let mut opened =
                File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
            opened.write_all(pem.as_bytes())?;
            opened.sync_all()?;
            match fs::hard_link(&draft, file) {
                Ok(()) => {
                    File::open(state)?.sync_all()?;
                    Ok(true)
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            }
        })();
        let _ = fs::remove_file(&draft);
        written
    }

    /// The key that verifies this issuer's grants.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        self.root.public()
    }

    /// Signs a grant on `terms`, good from `now` on.
    ///
    /// # Errors
    /// [`GrantError`], if the terms cannot be met.
    pub fn issue(&self, terms: &Terms, now: SystemTime) -> Result<Vec<u8>, GrantError> {
        terms.check()?;
        let failed = |error: error::Token| GrantError::Issue(error.to_string());
        let expires = now + Duration::from_secs(terms.valid_s);
        let mut token = Biscuit::builder()
            .fact(fact("principal", [builder::string(&terms.principal)]))
            .and_then(|token| token.fact(fact("expires", [builder::date(&expires)])))
            .and_then(|token| token.check("check if time($now), expires($end), $now < $end"))
            .map_err(failed)?;
        for tool in &terms.tools {
            let digest = builder::bytes(&tool.definition_sha256);
            token = token
                .fact(fact("tool", [builder::string(tool.name.as_str()), digest]))
                .map_err(failed)?;
            for constraint in &tool.constraints {
                let terms = [builder::string(tool.name.as_str()), builder::string(constraint)];
                token = token.fact(fact("constraint", terms)).map_err(failed)?;
            }
        }
        for (name, most) in [("calls_max", terms.calls_max), ("cost_max", terms.cost_max)] {
            if let Some(most) = most {
                token = token.fact(fact(name, [builder::int(most.into())])).map_err(failed)?;
            }
        }
        if let Some(session) = &terms.session {
            token = token.fact(fact("session", [builder::string(session)])).map_err(failed)?;
        }
        let bytes = token.build(&self.root).and_then(|token| token.to_vec()).map_err(failed)?;
        if bytes.len() > GRANT_BYTES_MAX as usize {
            return Err(GrantError::TooLarge { got: bytes.len() });
        }
        Ok(bytes)
    }

    /// Verifies a token and says what it allows at `now`.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Grant, GrantError> {
        self.chain(token)?.grant(now)
    }

    /// Verifies a token's chain of signatures, and that its blocks have a
    /// shape whose evaluation is bounded.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn chain(&self, token: &[u8]) -> Result<Chain, GrantError> {
        if token.len() > GRANT_BYTES_MAX as usize {
            return Err(GrantError::TooLarge { got: token.len() });
        }
        let parsed = Biscuit::from(token, self.public_key())
            .map_err(|error| GrantError::Forged(error.to_string()))?;
        check_shape(token)?;
        Ok(Chain(parsed))
    }
}

/// A token whose chain of signatures is good and whose shape is bounded. It
/// says nothing about what the token allows, or until when.
#[derive(Debug)]
pub struct Chain(Biscuit);

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
        let Some(end) = all_ends.iter().map(|(end,)| end).min() else {
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
        if let Ok(over) = now.duration_since(*end) {
            return Err(GrantError::Expired { ago_s: over.as_secs() });
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

        // Each of its tools, asked for by itself, so that a later block's
        // checks can tell them apart.
        let began = Instant::now();
        let mut granted = Vec::new();
        let mut taken_away = None;
        for (name, digest) in &tools {
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
        Ok(GrantClaims {
            principal: principal.clone(),
            tools: granted,
            expires_unix_s: unix_s(*end),
            calls_max: smallest(calls),
            cost_max: smallest(costs),
            session,
        })
    }
}

/// The smallest of a budget's facts.
fn smallest(facts: Vec<(i64,)>) -> Option<u32> {
    facts.into_iter().map(|(most,)| u32::try_from(most.max(0)).unwrap_or(u32::MAX)).min()
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

pub(crate) fn fact<const N: usize>(name: &str, terms: [builder::Term; N]) -> Fact {
    Fact::new(name.to_owned(), terms)
}

/// The world in which a token is looked at: what the broker states, the
/// bounds, and the one policy.
fn authorizer(
    token: &Biscuit,
    now: SystemTime,
    tool: Option<&ToolName>,
) -> Result<biscuit_auth::Authorizer, GrantError> {
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

fn engine(error: error::Token) -> GrantError {
    match error {
        error::Token::RunLimit(limit) => GrantError::TooCostly(limit.to_string()),
        other => GrantError::Forged(crate::cut(&other.to_string(), 512)),
    }
}

/// That a session's name can be one.
pub(crate) fn check_session(session: &str) -> Result<(), GrantError> {
    if session.is_empty()
        || session.len() > SESSION_BYTES_MAX
        || session.chars().any(char::is_control)
    {
        return Err(GrantError::Session);
    }
    Ok(())
}

fn check_principal(principal: &str) -> Result<(), GrantError> {
    if principal.is_empty()
        || principal.len() > PRINCIPAL_BYTES_MAX
        || principal.chars().any(char::is_control)
    {
        return Err(GrantError::Principal);
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use biscuit_auth::builder::BlockBuilder;
    use std::time::UNIX_EPOCH;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn tool(name: &str) -> GrantedTool {
        GrantedTool {
            name: ToolName::parse(name).unwrap(),
            definition_sha256: [7; 32],
            constraints: Vec::new(),
        }
    }

    /// Claims of alice's that grant nothing, to begin others from.
    pub(crate) fn claims_of_nothing() -> GrantClaims {
        GrantClaims {
            principal: "alice".into(),
            tools: Vec::new(),
            expires_unix_s: 0,
            calls_max: None,
            cost_max: None,
            session: None,
        }
    }

    /// A grant of alice's that grants nothing.
    pub(crate) fn granting_nothing() -> std::sync::Arc<Grant> {
        std::sync::Arc::new(Grant::new(claims_of_nothing()).unwrap())
    }

    fn terms() -> Terms {
        Terms {
            principal: "alice".into(),
            tools: vec![tool("shop.find"), tool("shop.buy")],
            valid_s: 60,
            calls_max: Some(20),
            cost_max: Some(50),
            session: None,
        }
    }

    fn verify(issuer: &Issuer, token: &[u8], now: SystemTime) -> Result<GrantClaims, GrantError> {
        issuer.verify(token, now).map(|grant| grant.claims().clone())
    }

    fn names(claims: &GrantClaims) -> Vec<&str> {
        claims.tools.iter().map(|tool| tool.name.as_str()).collect()
    }

    /// The token with a block of this source appended, as its holder would.
    pub(crate) fn attenuated(issuer: &Issuer, token: &[u8], source: &str) -> Vec<u8> {
        let block = BlockBuilder::new().code(source).unwrap();
        Biscuit::from(token, issuer.public_key()).unwrap().append(block).unwrap().to_vec().unwrap()
    }

    #[test]
    fn a_grant_says_what_it_was_issued_for() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let claims = verify(&issuer, &token, now()).unwrap();
        assert_eq!(claims.principal, "alice");
        assert_eq!(claims.tools, [tool("shop.buy"), tool("shop.find")]);
        assert_eq!(claims.expires_unix_s, 1_800_000_060);
        assert_eq!(claims.calls_max, Some(20));
    }

    #[test]
    fn a_grant_ends_on_time() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        verify(&issuer, &token, now() + Duration::from_secs(59)).unwrap();
        let over = verify(&issuer, &token, now() + Duration::from_secs(60)).unwrap_err();
        assert!(matches!(over, GrantError::Expired { ago_s: 0 }), "{over}");
    }

    #[test]
    fn forged_and_damaged_grants_are_refused() {
        let issuer = Issuer::ephemeral();
        let foreign = Issuer::ephemeral().issue(&terms(), now()).unwrap();
        assert!(matches!(verify(&issuer, &foreign, now()), Err(GrantError::Forged(_))));
        let token = issuer.issue(&terms(), now()).unwrap();
        for position in (0..token.len()).step_by(7) {
            let mut damaged = token.clone();
            damaged[position] ^= 1;
            assert!(verify(&issuer, &damaged, now()).is_err(), "byte {position}");
        }
        assert!(verify(&issuer, &[], now()).is_err());
        assert!(verify(&issuer, &vec![0; GRANT_BYTES_MAX as usize + 1], now()).is_err());
    }

    #[test]
    fn another_principals_grant_is_refused() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let claims = verify(&issuer, &token, now()).unwrap();
        check_presenter(&claims, "alice", None).unwrap();
        let refused = check_presenter(&claims, "mallory", None).unwrap_err();
        assert!(matches!(refused, GrantError::OtherPrincipal { .. }), "{refused}");
    }

    #[test]
    fn a_later_block_narrows_tools_time_and_budget() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let fewer = attenuated(
            &issuer,
            &token,
            r#"check if call($t), ["shop.find"].contains($t); calls_max(3); cost_max(9);"#,
        );
        let claims = verify(&issuer, &fewer, now()).unwrap();
        assert_eq!(names(&claims), ["shop.find"]);
        assert_eq!(claims.calls_max, Some(3));
        assert_eq!(claims.cost_max, Some(9));

        let shorter = attenuated(&issuer, &token, "check if time($t), $t < 2027-01-15T08:00:30Z;");
        verify(&issuer, &shorter, now()).unwrap();
        let later = verify(&issuer, &shorter, now() + Duration::from_secs(31)).unwrap_err();
        assert!(matches!(later, GrantError::NothingLeft(_)), "{later}");
    }

    #[test]
    fn a_later_block_widens_nothing() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let wider = attenuated(
            &issuer,
            &token,
            "expires(2099-01-01T00:00:00Z); calls_max(1000000); cost_max(1000000);",
        );
        let claims = verify(&issuer, &wider, now()).unwrap();
        assert_eq!(names(&claims), ["shop.buy", "shop.find"]);
        assert_eq!(claims.expires_unix_s, 1_800_000_060);
        assert_eq!(claims.calls_max, Some(20));
        assert_eq!(claims.cost_max, Some(50));
        let over = verify(&issuer, &wider, now() + Duration::from_secs(61)).unwrap_err();
        assert!(matches!(over, GrantError::Expired { .. }), "{over}");
    }

    #[test]
    fn a_fact_that_narrows_nothing_spoils_the_grant() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let digest = "07".repeat(32);
        for fact in [
            &format!(r#"tool("shop.admin", hex:{digest});"#),
            r#"principal("mallory");"#,
            "time(2020-01-01T00:00:00Z);",
            // Misspelt, or of another type: their writer believes that they
            // take something away.
            "call_max(1);",
            r#"calls_max("1");"#,
            r#"constraint("/quantity<=5");"#,
            r#"constraint("shop.find", 5);"#,
            "session(17);",
        ] {
            let refused = verify(&issuer, &attenuated(&issuer, &token, fact), now()).unwrap_err();
            assert!(matches!(refused, GrantError::Shape(_)), "{fact} {refused}");
        }
        let fact = r#"constraint("shop.find", "/quantity!5");"#;
        let refused = verify(&issuer, &attenuated(&issuer, &token, fact), now()).unwrap_err();
        assert!(matches!(refused, GrantError::Constraint { .. }), "{refused}");
    }

    #[test]
    fn a_constraint_on_a_tool_that_the_first_block_does_not_name_spoils_the_grant() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        for tool in ["shop.byu", "shop.BUY", "", "no name"] {
            let stray = format!("constraint(\"{tool}\", \"/quantity<=5\");");
            let refused = verify(&issuer, &attenuated(&issuer, &token, &stray), now()).unwrap_err();
            assert!(matches!(&refused, GrantError::Stray { tool: it } if it == tool), "{refused}");
        }
        // One that a block took away is not misspelt.
        let without = "check if call($t), $t != \"shop.buy\";";
        let fewer = attenuated(&issuer, &token, without);
        let fewer = attenuated(&issuer, &fewer, "constraint(\"shop.buy\", \"/quantity<=5\");");
        assert_eq!(names(&verify(&issuer, &fewer, now()).unwrap()), ["shop.find"]);
    }

    #[test]
    fn constraints_of_all_blocks_hold_together() {
        let issuer = Issuer::ephemeral();
        let mut terms = terms();
        terms.tools[0].constraints.push("/quantity<=5".into());
        let token = issuer.issue(&terms, now()).unwrap();
        let narrower = attenuated(&issuer, &token, r#"constraint("shop.find", "/quantity>=2");"#);
        let find = ToolName::parse("shop.find").unwrap();
        for (token, quantity, inside) in [
            (&token, 1, true),
            (&token, 6, false),
            (&narrower, 1, false),
            (&narrower, 2, true),
            (&narrower, 6, false),
        ] {
            let grant = issuer.verify(token, now()).unwrap();
            let checked = grant.check(&find, &serde_json::json!({ "quantity": quantity }), "{}");
            assert_eq!(checked.is_ok(), inside, "{quantity}");
        }
    }

    #[test]
    fn a_grant_of_one_session_is_good_in_no_other() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let bound = attenuated(&issuer, &token, r#"session("s-1");"#);
        let of_both = attenuated(&issuer, &bound, r#"session("s-2");"#);
        let claims = verify(&issuer, &token, now()).unwrap();
        check_presenter(&claims, "alice", Some("any")).unwrap();
        let claims = verify(&issuer, &bound, now()).unwrap();
        check_presenter(&claims, "alice", Some("s-1")).unwrap();
        for other in [None, Some("s-2")] {
            let refused = check_presenter(&claims, "alice", other).unwrap_err();
            assert!(matches!(refused, GrantError::OtherSession { .. }), "{refused}");
        }
        let refused = verify(&issuer, &of_both, now()).unwrap_err();
        assert!(matches!(refused, GrantError::Malformed(_)), "{refused}");
    }

    #[test]
    fn a_block_whose_cost_is_not_bounded_is_refused_at_once() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        // Few facts, joined with themselves: hours inside one round.
        let facts: String = (0..60).map(|n| format!("f({n});")).collect();
        let many: String = (0..65).map(|n| format!("f({n});")).collect();
        let checks = "check if time($t); ".repeat(65);
        for bomb in [
            format!("{facts} g($a, $b, $c, $d, $e) <- f($a), f($b), f($c), f($d), f($e);"),
            format!("{facts} check if f($a), f($b), f($c), f($d), f($e), $a + $b == 1000;"),
            format!("{facts} reject if f($a), f($b), f($c), f($d), f($e), $a + $b == 1000;"),
            "check if [1, 2].any($x -> [1, 2].all($y -> $y > $x));".to_owned(),
            r#"check if call($t), $t.matches("(a{100}){100}");"#.to_owned(),
            many,
            checks,
        ] {
            let began = std::time::Instant::now();
            let refused = verify(&issuer, &attenuated(&issuer, &token, &bomb), now()).unwrap_err();
            assert!(matches!(refused, GrantError::Shape(_)), "{refused}");
            assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        }
    }

    #[test]
    fn terms_that_cannot_be_met_are_refused() {
        let issuer = Issuer::ephemeral();
        let refused = |terms: Terms| issuer.issue(&terms, now()).unwrap_err();
        assert!(matches!(
            refused(Terms { principal: String::new(), ..terms() }),
            GrantError::Principal
        ));
        assert!(matches!(refused(Terms { valid_s: 0, ..terms() }), GrantError::Validity { .. }));
        assert!(matches!(
            refused(Terms { valid_s: u64::MAX, ..terms() }),
            GrantError::Validity { .. }
        ));
        let tools = (0..257).map(|n| tool(&format!("shop.t{n}"))).collect();
        assert!(matches!(
            refused(Terms { tools, ..terms() }),
            GrantError::TooManyTools { got: 257 }
        ));
        let tools = (0..256).map(|n| tool(&format!("shop.{n:0>240}"))).collect();
        assert!(matches!(refused(Terms { tools, ..terms() }), GrantError::TooLarge { .. }));
    }

    #[test]
    fn the_largest_grant_verifies() {
        let issuer = Issuer::ephemeral();
        let tools: Vec<_> = (0..256).map(|n| tool(&format!("shop.tool_{n:0>100}"))).collect();
        let token = issuer.issue(&Terms { tools, ..terms() }, now()).unwrap();
        assert_eq!(verify(&issuer, &token, now()).unwrap().tools.len(), 256);
    }

    #[test]
    fn the_root_key_outlives_the_process_and_stays_private() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let token = Issuer::open(&state).unwrap().issue(&terms(), now()).unwrap();
        Issuer::open(&state).unwrap().verify(&token, now()).unwrap();

        let file = state.join(ROOT_KEY_FILE);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "no draft is left");
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        let refused = Issuer::open(&state).unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "no key").unwrap();
        assert!(matches!(Issuer::open(&state), Err(RootKeyError::NotAKey { .. })));
    }

    #[test]
    fn brokers_that_start_together_agree_on_one_root_key() {
        let folder = tempfile::tempdir().unwrap();
        let keys: Vec<String> = std::thread::scope(|scope| {
            let open = || Issuer::open(folder.path()).unwrap().public_key().print();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    }
}
