//! The signed right to call certain tools: a Biscuit token.
//!
//! # What is in it
//! The authority block, signed with the broker's root key, holds facts:
//!
//! ```text
//! principal("alice");
//! tool("inventory.find_parts", hex:…);   one for each tool, with its digest
//! expires(2026-11-21T12:00:00Z);
//! calls_max(20);                         if the grant has a budget
//! check if time($now), expires($end), $now < $end;
//! ```
//!
//! Whoever holds a token may append blocks, offline. A later block can hold
//! checks over what the broker states while it verifies (`time($now)`, and
//! `call($tool)` for each granted tool in turn) and lower `calls_max`; it
//! cannot add to the set of tools, since only the authority block's facts are
//! read. What is left after all checks is the granted set.
//!
//! # What a later block may cost
//! Distrusted is every byte of a token, later blocks above all. The library's
//! bounds on facts, rounds and time are looked at only between rounds: one
//! rule, or one check, that joins facts with each other runs for hours inside
//! a single round. So the shape of later blocks is bounded before anything is
//! evaluated ([`check_shape`]): no rules, one predicate in each query, few
//! queries, and no operation that costs more than its own length. What is left
//! is linear. A condition over two facts is written as two checks.
//!
//! Deliberately absent are argument constraints and revocation.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use biscuit_auth::builder::{self, Algorithm, AuthorizerBuilder, Fact};
use biscuit_auth::format::schema;
use biscuit_auth::{AuthorizerLimits, Biscuit, KeyPair, PublicKey, error};
use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::limits::{GRANT_BYTES_MAX, GRANTED_TOOLS_MAX};
use forge_protocol::name::ToolName;
use prost::Message as _;

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
/// Blocks that may be appended to one token.
const BLOCKS_MAX: usize = 16;
/// Facts and queries in all appended blocks together, each.
const APPENDED_MAX: usize = 64;
/// The longest a grant may be good for: ten years.
const VALID_S_MAX: u64 = 10 * 365 * 24 * 60 * 60;
/// A principal's name, in bytes.
const PRINCIPAL_BYTES_MAX: usize = 256;

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
         (is --state the folder it was issued with?): {0}"
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
    #[error("a block appended to the grant {0}; write several checks of one predicate each")]
    Shape(&'static str),
    /// Verification took more than its bounds.
    #[error("verifying the grant passes the bounds on facts and rules: {0}")]
    TooCostly(String),
    /// Another principal's grant.
    #[error("the grant is {owner:?}'s and {presenter:?} presents it: each principal needs its own")]
    OtherPrincipal {
        /// Whose it is.
        owner: String,
        /// Who came with it.
        presenter: String,
    },
    /// The token library failed while issuing.
    #[error("the grant cannot be made: {0}")]
    Issue(String),
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
}

impl Terms {
    /// What a grant on these terms would say, for a run that is held to them
    /// without a token: nobody but the broker would ever read it.
    ///
    /// # Errors
    /// [`GrantError`], if the terms cannot be met.
    pub fn claims(self, now: SystemTime) -> Result<GrantClaims, GrantError> {
        self.check()?;
        let Self { principal, tools, valid_s, calls_max } = self;
        let end = now + Duration::from_secs(valid_s);
        let expires_unix_s = end.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Ok(GrantClaims { principal, tools, expires_unix_s, calls_max })
    }

    fn check(&self) -> Result<(), GrantError> {
        check_principal(&self.principal)?;
        if self.tools.len() > GRANTED_TOOLS_MAX {
            return Err(GrantError::TooManyTools { got: self.tools.len() });
        }
        if self.valid_s == 0 || self.valid_s > VALID_S_MAX {
            return Err(GrantError::Validity { got: self.valid_s });
        }
        Ok(())
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
        }
        if let Some(calls) = terms.calls_max {
            token = token.fact(fact("calls_max", [builder::int(calls.into())])).map_err(failed)?;
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
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<GrantClaims, GrantError> {
        self.chain(token)?.claims(now)
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
    pub fn claims(&self, now: SystemTime) -> Result<GrantClaims, GrantError> {
        let Self(token) = self;
        // What the authority block says. A query sees that block's facts
        // alone, unless it is one over all blocks.
        let mut world = authorizer(token, now, None)?;
        let principals: Vec<(String,)> =
            world.query("found($p) <- principal($p)").map_err(engine)?;
        let ends: Vec<(SystemTime,)> = world.query("found($t) <- expires($t)").map_err(engine)?;
        let tools: Vec<(String, Vec<u8>)> =
            world.query("found($n, $d) <- tool($n, $d)").map_err(engine)?;
        // Over all blocks: the smallest counts, so that a later one can only
        // lower it.
        let budgets: Vec<(i64,)> = world.query_all("found($n) <- calls_max($n)").map_err(engine)?;

        let [(principal,)] = principals.as_slice() else {
            return Err(GrantError::Malformed("it names not exactly one principal"));
        };
        check_principal(principal)?;
        let [(end,)] = ends.as_slice() else {
            return Err(GrantError::Malformed("it has not exactly one end"));
        };
        if let Ok(over) = now.duration_since(*end) {
            return Err(GrantError::Expired { ago_s: over.as_secs() });
        }
        if tools.len() > GRANTED_TOOLS_MAX {
            return Err(GrantError::TooManyTools { got: tools.len() });
        }

        // Each of its tools, asked for by itself, so that a later block's
        // checks can tell them apart.
        let mut granted = Vec::new();
        let mut taken_away = None;
        for (name, digest) in &tools {
            let name = ToolName::parse(name)
                .map_err(|_| GrantError::Malformed("it grants what is no tool name"))?;
            let definition_sha256 = digest
                .as_slice()
                .try_into()
                .map_err(|_| GrantError::Malformed("it pins what is no SHA-256"))?;
            match authorizer(token, now, Some(&name))?.authorize() {
                Ok(_) => granted.push(GrantedTool { name, definition_sha256 }),
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
            expires_unix_s: end.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            calls_max: budgets
                .into_iter()
                .map(|(calls,)| u32::try_from(calls.max(0)).unwrap_or(u32::MAX))
                .min(),
        })
    }
}

/// That `presenter` comes with a grant of its own.
///
/// # Errors
/// [`GrantError::OtherPrincipal`].
pub fn check_presenter(claims: &GrantClaims, presenter: &str) -> Result<(), GrantError> {
    if claims.principal == presenter {
        return Ok(());
    }
    let (owner, presenter) = (claims.principal.clone(), presenter.to_owned());
    Err(GrantError::OtherPrincipal { owner, presenter })
}

fn fact<const N: usize>(name: &str, terms: [builder::Term; N]) -> Fact {
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

/// Refuses appended blocks whose evaluation is not linear in their size. The
/// token's signatures are checked before this.
fn check_shape(token: &[u8]) -> Result<(), GrantError> {
    let undecodable = |error: prost::DecodeError| GrantError::Forged(error.to_string());
    let token = schema::Biscuit::decode(token).map_err(undecodable)?;
    if token.blocks.len() > BLOCKS_MAX {
        return Err(GrantError::Shape("is one too many"));
    }
    let (mut facts, mut queries) = (0, 0);
    for block in &token.blocks {
        let block = schema::Block::decode(block.block.as_slice()).map_err(undecodable)?;
        if !block.rules.is_empty() {
            return Err(GrantError::Shape("has a rule"));
        }
        facts += block.facts.len();
        for query in block.checks.iter().flat_map(|check| &check.queries) {
            queries += 1;
            if query.body.len() > 1 {
                return Err(GrantError::Shape("has a check that joins predicates"));
            }
            for op in query.expressions.iter().flat_map(|expression| &expression.ops) {
                check_op(op)?;
            }
        }
    }
    if facts > APPENDED_MAX || queries > APPENDED_MAX {
        return Err(GrantError::Shape("has too many facts or checks"));
    }
    Ok(())
}

/// Closures nest loops; a regular expression is compiled anew for every fact.
fn check_op(op: &schema::Op) -> Result<(), GrantError> {
    use schema::op::Content;
    use schema::op_binary::Kind;
    match &op.content {
        Some(Content::Closure(_)) => Err(GrantError::Shape("has a closure")),
        Some(Content::Binary(binary)) if binary.kind == Kind::Regex as i32 => {
            Err(GrantError::Shape("has a regular expression"))
        }
        Some(Content::Value(_) | Content::Unary(_) | Content::Binary(_)) | None => Ok(()),
    }
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

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn tool(name: &str) -> GrantedTool {
        GrantedTool { name: ToolName::parse(name).unwrap(), definition_sha256: [7; 32] }
    }

    fn terms() -> Terms {
        Terms {
            principal: "alice".into(),
            tools: vec![tool("shop.find"), tool("shop.buy")],
            valid_s: 60,
            calls_max: Some(20),
        }
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
        let claims = issuer.verify(&token, now()).unwrap();
        assert_eq!(claims.principal, "alice");
        assert_eq!(claims.tools, [tool("shop.buy"), tool("shop.find")]);
        assert_eq!(claims.expires_unix_s, 1_800_000_060);
        assert_eq!(claims.calls_max, Some(20));
    }

    #[test]
    fn a_grant_ends_on_time() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        issuer.verify(&token, now() + Duration::from_secs(59)).unwrap();
        let over = issuer.verify(&token, now() + Duration::from_secs(60)).unwrap_err();
        assert!(matches!(over, GrantError::Expired { ago_s: 0 }), "{over}");
    }

    #[test]
    fn forged_and_damaged_grants_are_refused() {
        let issuer = Issuer::ephemeral();
        let foreign = Issuer::ephemeral().issue(&terms(), now()).unwrap();
        assert!(matches!(issuer.verify(&foreign, now()), Err(GrantError::Forged(_))));
        let token = issuer.issue(&terms(), now()).unwrap();
        for position in (0..token.len()).step_by(7) {
            let mut damaged = token.clone();
            damaged[position] ^= 1;
            assert!(issuer.verify(&damaged, now()).is_err(), "byte {position}");
        }
        assert!(issuer.verify(&[], now()).is_err());
        assert!(issuer.verify(&vec![0; GRANT_BYTES_MAX as usize + 1], now()).is_err());
    }

    #[test]
    fn another_principals_grant_is_refused() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let claims = issuer.verify(&token, now()).unwrap();
        check_presenter(&claims, "alice").unwrap();
        let refused = check_presenter(&claims, "mallory").unwrap_err();
        assert!(matches!(refused, GrantError::OtherPrincipal { .. }), "{refused}");
    }

    #[test]
    fn a_later_block_narrows_tools_time_and_budget() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let fewer = attenuated(
            &issuer,
            &token,
            r#"check if call($t), ["shop.find"].contains($t); calls_max(3);"#,
        );
        let claims = issuer.verify(&fewer, now()).unwrap();
        assert_eq!(names(&claims), ["shop.find"]);
        assert_eq!(claims.calls_max, Some(3));

        let shorter = attenuated(&issuer, &token, "check if time($t), $t < 2027-01-15T08:00:30Z;");
        issuer.verify(&shorter, now()).unwrap();
        let later = issuer.verify(&shorter, now() + Duration::from_secs(31)).unwrap_err();
        assert!(matches!(later, GrantError::NothingLeft(_)), "{later}");
    }

    #[test]
    fn a_later_block_widens_nothing() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let digest = "07".repeat(32);
        let wider = attenuated(
            &issuer,
            &token,
            &format!(
                r#"tool("shop.admin", hex:{digest});
                   principal("mallory");
                   expires(2099-01-01T00:00:00Z);
                   calls_max(1000000);
                   time(2020-01-01T00:00:00Z);"#
            ),
        );
        let claims = issuer.verify(&wider, now()).unwrap();
        assert_eq!(names(&claims), ["shop.buy", "shop.find"]);
        assert_eq!(claims.principal, "alice");
        assert_eq!(claims.expires_unix_s, 1_800_000_060);
        assert_eq!(claims.calls_max, Some(20));
        let over = issuer.verify(&wider, now() + Duration::from_secs(61)).unwrap_err();
        assert!(matches!(over, GrantError::Expired { .. }), "{over}");
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
            let refused = issuer.verify(&attenuated(&issuer, &token, &bomb), now()).unwrap_err();
            assert!(matches!(refused, GrantError::Shape(_)), "{refused}");
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
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
        assert_eq!(issuer.verify(&token, now()).unwrap().tools.len(), 256);
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
