//! How a holder narrows a grant: a block more.
//!
//! Whoever holds a grant appends blocks to it, offline: neither the root key
//! nor a broker is needed, since each block is signed with a key that the one
//! before it carries. So every byte of a later block is a stranger's. What it
//! may hold is said in `grant::shape`.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use biscuit_auth::builder::{self, BlockBuilder, Term};
use biscuit_auth::format::schema;
use biscuit_auth::{UnverifiedBiscuit, error};
use forge_protocol::limits::{CONSTRAINTS_MAX, GRANT_BYTES_MAX};
use forge_protocol::name::ToolName;
use prost::Message as _;

use super::chain::fact;
use super::shape::{Symbols, check_shape, undecodable};
use super::terms::{VALID_S_MAX, check_session};
use super::{GrantError, check_clock};
use crate::constraint::Constraint;

/// What a later block is to take away.
#[derive(Clone, Debug, Default)]
pub struct Narrowing {
    /// The only tools to be left; none named leaves all.
    pub tools: Vec<ToolName>,
    /// Further constraints on the arguments of calls.
    pub constraints: Vec<(ToolName, Constraint)>,
    /// How long it is still good for, in seconds from now.
    pub valid_s: Option<u64>,
    /// The most calls of one run.
    pub calls_max: Option<u32>,
    /// The most that one run's calls may cost together, in budget units.
    pub cost_max: Option<u32>,
    /// The one session it is good in.
    pub session: Option<String>,
}

/// Appends a block to a grant. The grant's signatures are not verified here,
/// for want of the key: a forged grant stays one.
///
/// # Errors
/// [`GrantError`], if this is no grant, or names what it does not grant.
pub fn attenuate(
    token: &[u8],
    narrowing: &Narrowing,
    now: SystemTime,
) -> Result<Vec<u8>, GrantError> {
    if token.len() > GRANT_BYTES_MAX as usize {
        return Err(GrantError::TooLarge { got: token.len() });
    }
    let granted = granted_names(token)?;
    let constrained = narrowing.constraints.iter().map(|(tool, _)| tool);
    if let Some(tool) =
        narrowing.tools.iter().chain(constrained).find(|tool| !granted.contains(tool.as_str()))
    {
        return Err(GrantError::NotInGrant { tool: tool.clone() });
    }
    if narrowing.constraints.len() > CONSTRAINTS_MAX {
        return Err(GrantError::TooManyConstraints { got: narrowing.constraints.len() });
    }

    let block = block(narrowing, now)?;
    let foreign = |error: error::Token| GrantError::Forged(crate::cut(&error.to_string(), 512));
    let failed = |error: error::Token| match error {
        error::Token::AppendOnSealed | error::Token::AlreadySealed => GrantError::Sealed,
        error => GrantError::Issue(error.to_string()),
    };
    let grant = UnverifiedBiscuit::from(token).map_err(foreign)?;
    let bytes = grant.append(block).and_then(|grant| grant.to_vec()).map_err(failed)?;
    if bytes.len() > GRANT_BYTES_MAX as usize {
        return Err(GrantError::TooLarge { got: bytes.len() });
    }
    // A block too many, or too much in all of them, is said now and not when
    // the grant is presented.
    check_shape(&bytes)?;
    if narrowing.session.is_some() && is_of_several_sessions(&bytes)? {
        return Err(GrantError::BoundAlready);
    }
    Ok(bytes)
}

fn block(narrowing: &Narrowing, now: SystemTime) -> Result<BlockBuilder, GrantError> {
    let Narrowing { tools, constraints, valid_s, calls_max, cost_max, session } = narrowing;
    let failed = |error: error::Token| GrantError::Issue(error.to_string());
    check_clock(now)?;
    let mut facts = Vec::new();
    for (tool, constraint) in constraints {
        let terms = [builder::string(tool.as_str()), builder::string(constraint.text())];
        facts.push(fact("constraint", terms));
    }
    if let Some(got) = *valid_s {
        if got == 0 || got > VALID_S_MAX {
            return Err(GrantError::Validity { got });
        }
        facts.push(fact("expires", [builder::date(&(now + Duration::from_secs(got)))]));
    }
    for (name, most) in [("calls_max", calls_max), ("cost_max", cost_max)] {
        facts.extend(most.map(|most| fact(name, [builder::int(most.into())])));
    }
    if let Some(session) = session {
        check_session(session)?;
        facts.push(fact("session", [builder::string(session)]));
    }
    if facts.is_empty() && tools.is_empty() {
        return Err(GrantError::NothingToNarrow);
    }
    let mut block = BlockBuilder::new();
    for fact in facts {
        block = block.fact(fact).map_err(failed)?;
    }
    if !tools.is_empty() {
        let tools: BTreeSet<Term> =
            tools.iter().map(|tool| builder::string(tool.as_str())).collect();
        let params = HashMap::from([("tools".to_owned(), Term::Set(tools))]);
        let check = "check if call($tool), {tools}.contains($tool)";
        block = block.code_with_params(check, params, HashMap::new()).map_err(failed)?;
    }
    Ok(block)
}

/// The tools that a token's first block names, unverified.
fn granted_names(token: &[u8]) -> Result<BTreeSet<String>, GrantError> {
    use schema::term::Content;
    let token = schema::Biscuit::decode(token).map_err(undecodable)?;
    let block = schema::Block::decode(token.authority.block.as_slice()).map_err(undecodable)?;
    let symbols = Symbols(block.symbols);
    let names = block.facts.iter().filter_map(|fact| {
        let predicate = &fact.predicate;
        match predicate.terms.first()?.content {
            Some(Content::String(name)) if symbols.get(predicate.name)? == "tool" => {
                symbols.get(name).map(str::to_owned)
            }
            _ => None,
        }
    });
    Ok(names.collect())
}

/// Whether a token is bound to more than one session, unverified: nobody could
/// present it. A text has one symbol in all blocks of a token.
fn is_of_several_sessions(token: &[u8]) -> Result<bool, GrantError> {
    use schema::term::Content;
    let token = schema::Biscuit::decode(token).map_err(undecodable)?;
    let mut symbols = Symbols::default();
    let mut sessions = BTreeSet::new();
    for signed in std::iter::once(&token.authority).chain(&token.blocks) {
        let block = schema::Block::decode(signed.block.as_slice()).map_err(undecodable)?;
        symbols.0.extend(block.symbols);
        for predicate in block.facts.iter().map(|fact| &fact.predicate) {
            if symbols.get(predicate.name) == Some("session")
                && let Some(Content::String(text)) =
                    predicate.terms.first().and_then(|term| term.content.as_ref())
            {
                sessions.insert(*text);
            }
        }
    }
    Ok(sessions.len() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant::shape::BLOCKS_MAX;
    use crate::grant::tests::{attenuated, now};
    use crate::grant::{Issuer, Terms};
    use biscuit_auth::builder::{Binary, Check, CheckKind, Expression, Op, Predicate, Rule, Unary};
    use forge_protocol::broker::{GrantClaims, GrantedTool};
    use forge_protocol::limits::{GRANTED_TOOLS_MAX, TOOL_NAME_BYTES_MAX};
    use proptest::prelude::*;
    use std::time::Instant;

    const TOOLS: [&str; 4] = ["shop.find", "shop.buy", "mail.send", "crypto.hash"];

    fn name(text: &str) -> ToolName {
        ToolName::parse(text).unwrap()
    }

    fn issued(issuer: &Issuer) -> Vec<u8> {
        let tools = TOOLS.map(|tool| GrantedTool {
            name: name(tool),
            definition_sha256: [7; 32],
            constraints: vec!["/n<=100".into()],
        });
        let terms = Terms {
            principal: "alice".into(),
            tools: tools.to_vec(),
            valid_s: 1_000,
            calls_max: Some(50),
            cost_max: None,
            session: None,
        };
        issuer.issue(&terms, now()).unwrap()
    }

    fn claims(issuer: &Issuer, token: &[u8]) -> Result<GrantClaims, GrantError> {
        issuer.verify(token, now()).map(|grant| grant.claims().clone())
    }

    /// Whether a budget is no larger than before; none is the largest.
    fn no_more(after: Option<u32>, before: Option<u32>) -> bool {
        after.unwrap_or(u32::MAX) <= before.unwrap_or(u32::MAX)
    }

    /// That `after` allows nothing that `before` does not.
    fn check_narrower(after: &GrantClaims, before: &GrantClaims) {
        assert_eq!(after.principal, before.principal);
        assert!(after.expires_unix_s <= before.expires_unix_s, "it ends later");
        assert!(no_more(after.calls_max, before.calls_max), "more calls");
        assert!(no_more(after.cost_max, before.cost_max), "more cost");
        if before.session.is_some() {
            assert_eq!(after.session, before.session);
        }
        for tool in &after.tools {
            let former = before.tools.iter().find(|former| former.name == tool.name);
            let former = former.unwrap_or_else(|| panic!("{} came from nowhere", tool.name));
            assert_eq!(tool.definition_sha256, former.definition_sha256);
            for constraint in &former.constraints {
                assert!(tool.constraints.contains(constraint), "{constraint} is gone");
            }
        }
    }

    fn a_tool() -> impl Strategy<Value = String> {
        prop_oneof![
            4 => prop::sample::select(TOOLS.to_vec()).prop_map(str::to_owned),
            1 => Just("shop.admin".to_owned()),
        ]
    }

    fn a_constraint() -> impl Strategy<Value = String> {
        ("[a-c]", prop::sample::select(vec!["<=", ">=", "=", "^=", "=~"]), 0..200_u32)
            .prop_map(|(member, sign, number)| format!("/{member}{sign}{number}"))
    }

    /// What the command line would append.
    fn a_narrowing() -> impl Strategy<Value = Narrowing> {
        (
            prop::collection::vec(a_tool(), 0..3),
            prop::collection::vec((a_tool(), a_constraint()), 0..3),
            prop::option::of(0..3_000_u64),
            prop::option::of(0..100_u32),
            prop::option::of(0..100_u32),
            prop::option::weighted(0.2, "s[12]"),
        )
            .prop_map(|(tools, constraints, valid_s, calls_max, cost_max, session)| {
                Narrowing {
                    tools: tools.iter().map(|tool| name(tool)).collect(),
                    constraints: constraints
                        .iter()
                        .map(|(tool, text)| (name(tool), Constraint::parse(text).unwrap()))
                        .collect(),
                    valid_s,
                    calls_max,
                    cost_max,
                    session,
                }
            })
    }

    /// What anybody with a Biscuit library would append.
    fn a_source() -> impl Strategy<Value = String> {
        let statement = prop_oneof![
            (-5..5_000_i64).prop_map(|n| format!("calls_max({n});")),
            (-5..5_000_i64).prop_map(|n| format!("cost_max({n});")),
            (0..3_000_u64).prop_map(|s| {
                let date = humantime(1_800_000_000 + s);
                format!("expires({date});")
            }),
            "s[12]".prop_map(|s| format!("session(\"{s}\");")),
            (a_tool(), a_constraint()).prop_map(|(t, c)| format!("constraint(\"{t}\", \"{c}\");")),
            a_tool().prop_map(|t| format!("tool(\"{t}\", hex:{});", "09".repeat(32))),
            Just("principal(\"mallory\");".to_owned()),
            a_tool().prop_map(|t| format!("check if call($t), $t != \"{t}\";")),
            a_tool().prop_map(|t| format!("check if call(\"{t}\") or call(\"shop.buy\");")),
            a_tool().prop_map(|t| format!("reject if call(\"{t}\");")),
            Just("check if tool($name, $digest);".to_owned()),
            Just("check if true;".to_owned()),
            Just("call(\"shop.admin\");".to_owned()),
            Just("tool($t, $d) <- call($t), principal($d);".to_owned()),
        ];
        prop::collection::vec(statement, 1..4).prop_map(|all| all.concat())
    }

    /// A date as Datalog writes it, within the hour after `now`.
    fn humantime(unix_s: u64) -> String {
        let seconds = unix_s - 1_800_000_000;
        format!("2027-01-15T08:{:02}:{:02}Z", seconds / 60, seconds % 60)
    }

    #[derive(Clone, Debug)]
    enum Step {
        Ours(Narrowing),
        Theirs(String),
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_sequence_of_blocks_widens_a_grant(steps in prop::collection::vec(
            prop_oneof![
                a_narrowing().prop_map(Step::Ours),
                a_source().prop_map(Step::Theirs),
            ],
            1..6,
        )) {
            let issuer = Issuer::ephemeral();
            let mut token = issued(&issuer);
            let mut before = claims(&issuer, &token).unwrap();
            for step in steps {
                let narrower = match &step {
                    Step::Ours(narrowing) => attenuate(&token, narrowing, now()),
                    Step::Theirs(source) => Ok(attenuated(&issuer, &token, source)),
                };
                // What is refused widens nothing, and is left out.
                let Ok(narrower) = narrower else { continue };
                let Ok(after) = claims(&issuer, &narrower) else { continue };
                check_narrower(&after, &before);
                (token, before) = (narrower, after);
            }
        }
    }

    #[test]
    fn a_damaged_token_is_refused_and_never_a_panic() {
        let issuer = Issuer::ephemeral();
        let narrowing = Narrowing { calls_max: Some(1), ..Narrowing::default() };
        let token = attenuate(&issued(&issuer), &narrowing, now()).unwrap();
        for position in (0..token.len()).step_by(5) {
            for flip in [1, 0xFF] {
                let mut damaged = token.clone();
                damaged[position] ^= flip;
                // Nobody verified it: what narrows it may, and it stays damaged.
                let narrower = attenuate(&damaged, &narrowing, now());
                for token in std::iter::once(damaged).chain(narrower.ok()) {
                    assert!(claims(&issuer, &token).is_err(), "byte {position}");
                }
            }
        }
    }

    #[test]
    fn a_narrowed_grant_says_what_it_was_narrowed_to() {
        let issuer = Issuer::ephemeral();
        let narrowing = Narrowing {
            tools: vec![name("shop.buy"), name("shop.find")],
            constraints: vec![(name("shop.buy"), Constraint::parse("/n>=2").unwrap())],
            valid_s: Some(10),
            calls_max: Some(3),
            cost_max: Some(7),
            session: Some("admin".into()),
        };
        let token = attenuate(&issued(&issuer), &narrowing, now()).unwrap();
        let claims = claims(&issuer, &token).unwrap();
        let names: Vec<&str> = claims.tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["shop.buy", "shop.find"]);
        assert_eq!(claims.tools[0].constraints, ["/n<=100", "/n>=2"]);
        assert_eq!(claims.tools[1].constraints, ["/n<=100"]);
        assert_eq!(claims.expires_unix_s, 1_800_000_010);
        assert_eq!((claims.calls_max, claims.cost_max), (Some(3), Some(7)));
        assert_eq!(claims.session.as_deref(), Some("admin"));
    }

    #[test]
    fn a_narrowing_that_does_not_do_what_it_says_is_refused() {
        let issuer = Issuer::ephemeral();
        let token = issued(&issuer);
        let refused = |narrowing| attenuate(&token, &narrowing, now()).unwrap_err();
        let nothing = refused(Narrowing::default());
        assert!(matches!(nothing, GrantError::NothingToNarrow), "{nothing}");
        let other = refused(Narrowing { tools: vec![name("shop.fnd")], ..Narrowing::default() });
        assert!(matches!(other, GrantError::NotInGrant { .. }), "{other}");
        let constraint = Constraint::parse("/n=1").unwrap();
        let constraints = vec![(name("shop.fnd"), constraint)];
        let other = refused(Narrowing { constraints, ..Narrowing::default() });
        assert!(matches!(other, GrantError::NotInGrant { .. }), "{other}");
        let bound = Narrowing { session: Some("s-1".into()), ..Narrowing::default() };
        let token_of_one = attenuate(&token, &bound, now()).unwrap();
        assert!(attenuate(&token_of_one, &bound, now()).is_ok(), "it is the same");
        let other = Narrowing { session: Some("s-2".into()), ..Narrowing::default() };
        let refused = attenuate(&token_of_one, &other, now()).unwrap_err();
        assert!(matches!(refused, GrantError::BoundAlready), "{refused}");
        let forged = attenuate(b"no token", &Narrowing::default(), now()).unwrap_err();
        assert!(matches!(forged, GrantError::Forged(_)), "{forged}");
    }

    #[test]
    fn a_sealed_grant_is_good_and_cannot_be_narrowed() {
        let issuer = Issuer::ephemeral();
        let sealed = UnverifiedBiscuit::from(issued(&issuer)).unwrap().seal().unwrap();
        let sealed = sealed.to_vec().unwrap();
        claims(&issuer, &sealed).unwrap();
        let narrowing = Narrowing { calls_max: Some(1), ..Narrowing::default() };
        let refused = attenuate(&sealed, &narrowing, now()).unwrap_err();
        assert!(matches!(refused, GrantError::Sealed), "{refused}");
    }

    #[test]
    fn what_does_not_fit_is_said_when_it_is_appended() {
        let issuer = Issuer::ephemeral();
        let mut token = issued(&issuer);
        for _ in 0..BLOCKS_MAX {
            let narrowing = Narrowing { calls_max: Some(1), ..Narrowing::default() };
            token = attenuate(&token, &narrowing, now()).unwrap();
        }
        claims(&issuer, &token).unwrap();
        let narrowing = Narrowing { calls_max: Some(1), ..Narrowing::default() };
        let refused = attenuate(&token, &narrowing, now()).unwrap_err();
        assert!(matches!(refused, GrantError::Shape(_)), "{refused}");
        let told = refused.to_string();
        assert!(
            told.contains(&format!("at most {BLOCKS_MAX}")) && told.contains("issuer"),
            "{told}"
        );
    }

    /// The token with a block of these checks, which no source can say.
    fn checked(token: &[u8], bodies: Vec<Vec<Predicate>>, ops: Vec<Op>) -> Vec<u8> {
        let expressions = if ops.is_empty() { Vec::new() } else { vec![Expression { ops }] };
        let query = |body: Vec<Predicate>| {
            let head = Predicate::new("query".to_owned(), Vec::<Term>::new());
            Rule::new(head, body, expressions.clone(), Vec::new())
        };
        let queries = bodies.into_iter().map(query).collect();
        let check = Check { queries, kind: CheckKind::One };
        let block = BlockBuilder::new().check(check).unwrap();
        UnverifiedBiscuit::from(token).unwrap().append(block).unwrap().to_vec().unwrap()
    }

    /// A value, and as many of `op` to itself.
    fn chain(value: &Term, op: &Binary, count: usize) -> Vec<Op> {
        let mut ops = vec![Op::Value(value.clone())];
        for _ in 0..count {
            ops.extend([Op::Value(value.clone()), Op::Binary(op.clone())]);
        }
        ops
    }

    fn refused(issuer: &Issuer, token: &[u8]) -> GrantError {
        let began = Instant::now();
        let refused = claims(issuer, token).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        refused
    }

    #[test]
    fn a_check_that_puts_texts_together_is_refused_at_once() {
        let issuer = Issuer::ephemeral();
        let token = issued(&issuer);
        // Each sum would stay in memory: 30 KB, 60 KB, … 60 MB, together 60 GB.
        for (text_bytes, why) in [(30_000, "longer than any"), (200, "has an operation that no")] {
            let mut ops = chain(&builder::string(&"a".repeat(text_bytes)), &Binary::Add, 2_000);
            ops.extend([Op::Value(builder::string("")), Op::Binary(Binary::NotEqual)]);
            let token = checked(&token, vec![Vec::new()], ops);
            assert!(token.len() <= GRANT_BYTES_MAX as usize, "{}", token.len());
            let refused = refused(&issuer, &token);
            assert!(refused.to_string().contains(why), "{refused}");
        }
    }

    #[test]
    fn a_check_with_too_many_operations_or_values_is_refused_at_once() {
        let issuer = Issuer::ephemeral();
        let token = issued(&issuer);
        let parens = |value: Term, count: usize| {
            let mut ops = vec![Op::Value(value)];
            ops.extend(vec![Op::Unary(Unary::Parens); count]);
            ops
        };
        let name = |n: usize| builder::string(&format!("{n:0>200}"));
        let many = Term::Array(vec![name(0); 5_000]);
        for ops in [
            chain(&builder::boolean(true), &Binary::Or, 1_000),
            parens(builder::boolean(true), 10_000),
            parens(Term::Set((0..200).map(name).collect()), 500),
            parens(many, 5),
        ] {
            let token = checked(&token, vec![Vec::new()], ops);
            let refused = refused(&issuer, &token);
            assert!(refused.to_string().contains("too many operations or values"), "{refused}");
        }
    }

    #[test]
    fn what_the_command_line_writes_in_every_block_has_room() {
        let issuer = Issuer::ephemeral();
        let names: Vec<ToolName> =
            (0..GRANTED_TOOLS_MAX).map(|n| name(&format!("shop.tool_{n}"))).collect();
        let tool = |name: &ToolName| GrantedTool {
            name: name.clone(),
            definition_sha256: [7; 32],
            constraints: Vec::new(),
        };
        let terms = Terms {
            principal: "alice".into(),
            tools: names.iter().map(tool).collect(),
            valid_s: 1_000,
            calls_max: None,
            cost_max: None,
            session: None,
        };
        let mut token = issuer.issue(&terms, now()).unwrap();
        let narrowing = Narrowing { tools: names, ..Narrowing::default() };
        for _ in 0..BLOCKS_MAX {
            token = attenuate(&token, &narrowing, now()).unwrap();
        }
    }

    #[test]
    fn a_check_asks_only_for_what_the_broker_states_and_has_bounded_values() {
        let issuer = Issuer::ephemeral();
        let token = issued(&issuer);
        let long = "a".repeat(TOOL_NAME_BYTES_MAX + 1);
        for (source, why) in [
            ("check if tool($n, $d), $n != \"x\";", "over what is not stated"),
            ("check if principal($p);", "over what is not stated"),
            ("check if call($t, $u);", "over what is not stated"),
            (&format!("check if call($t), $t != \"{long}\";"), "longer than any tool's name"),
            (&format!("check if call(\"{long}\");"), "longer than any tool's name"),
            (&format!("check if call(${long});"), "longer than any tool's name"),
            ("check if hex:00 == hex:00;", "has a value in a check"),
            ("check if {\"a\": 1} == {\"a\": 1};", "has a value in a check"),
            ("check if 1 + 1 == 2;", "has an operation"),
            ("check if call($t), $t.length() < 9;", "has an operation"),
            ("check if call($t), $t.type() == \"string\";", "has an operation"),
            ("check if [1].get(0) == 1;", "has an operation"),
            ("check if {1}.union({2}).contains(1);", "has an operation"),
            ("check if call($t), $t == \"a\" || $t == \"b\";", "write `or`"),
            ("reject if call(\"a.b\") or call(\"shop.buy\");", "several of one each"),
        ] {
            let refused = refused(&issuer, &attenuated(&issuer, &token, source));
            assert!(refused.to_string().contains(why), "{source}: {refused}");
        }
        let nothing = checked(&token, Vec::new(), Vec::new());
        assert!(matches!(refused(&issuer, &nothing), GrantError::NothingLeft(_)));
        for source in [
            "check if call($t), ($t == \"shop.buy\"), !$t.ends_with(\"nd\");",
            "check if call($t), {\"shop.buy\"}.contains($t), $t.starts_with(\"shop.\");",
            "check if call($t), [\"shop.buy\"].contains($t), $t !== \"x\";",
            "reject if call(\"mail.send\");",
            "check if time($t), $t >= 2020-01-01T00:00:00Z; check if call(\"shop.buy\");",
        ] {
            let claims = claims(&issuer, &attenuated(&issuer, &token, source));
            let claims = claims.unwrap_or_else(|refused| panic!("{source}: {refused}"));
            let names: Vec<&str> = claims.tools.iter().map(|tool| tool.name.as_str()).collect();
            assert!(names.contains(&"shop.buy") && names.len() < TOOLS.len(), "{source} {names:?}");
        }
    }

    #[test]
    fn a_date_beyond_all_calendars_is_refused() {
        let issuer = Issuer::ephemeral();
        let fact = fact("expires", [Term::Date(u64::MAX)]);
        let block = BlockBuilder::new().fact(fact).unwrap();
        let grant = UnverifiedBiscuit::from(issued(&issuer)).unwrap();
        let token = grant.append(block).unwrap().to_vec().unwrap();
        let refused = claims(&issuer, &token).unwrap_err();
        assert!(matches!(refused, GrantError::Shape(_)), "{refused}");
    }

    #[test]
    fn a_narrowing_that_no_grant_can_say_is_refused() {
        let token = issued(&Issuer::ephemeral());
        let refused = |narrowing: Narrowing| attenuate(&token, &narrowing, now()).unwrap_err();
        for valid_s in [0, VALID_S_MAX + 1, u64::MAX] {
            let refused = refused(Narrowing { valid_s: Some(valid_s), ..Narrowing::default() });
            assert!(matches!(refused, GrantError::Validity { .. }), "{refused}");
        }
        let longest = Narrowing { valid_s: Some(VALID_S_MAX), ..Narrowing::default() };
        attenuate(&token, &longest, now()).unwrap();
        for session in ["", "a\nb"] {
            let session = Some(session.to_owned());
            let refused = refused(Narrowing { session, ..Narrowing::default() });
            assert!(matches!(refused, GrantError::Session), "{refused}");
        }
        let constraint = (name("shop.find"), Constraint::parse("/n<=5").unwrap());
        let constraints = vec![constraint; CONSTRAINTS_MAX + 1];
        let many = refused(Narrowing { constraints, ..Narrowing::default() });
        assert!(matches!(many, GrantError::TooManyConstraints { got: 65 }), "{many}");
    }

    #[test]
    fn a_token_that_is_too_large_or_becomes_so_is_not_narrowed() {
        let narrowing = Narrowing { calls_max: Some(1), ..Narrowing::default() };
        let long = attenuate(&vec![0; GRANT_BYTES_MAX as usize + 1], &narrowing, now());
        assert!(matches!(long, Err(GrantError::TooLarge { .. })), "{long:?}");

        let issuer = Issuer::ephemeral();
        let issue = |name_bytes: usize| {
            let tool = |n: usize| GrantedTool {
                name: name(&format!("shop.{n:0>name_bytes$}")),
                definition_sha256: [7; 32],
                constraints: Vec::new(),
            };
            let terms = Terms {
                principal: "alice".into(),
                tools: (0..GRANTED_TOOLS_MAX).map(tool).collect(),
                valid_s: 1_000,
                calls_max: None,
                cost_max: None,
                session: None,
            };
            issuer.issue(&terms, now()).ok()
        };
        // As long as they may be: a byte more in each name is too much.
        let token = (1..250).rev().find_map(issue).unwrap();
        claims(&issuer, &token).unwrap();
        let tool = name(&claims(&issuer, &token).unwrap().tools[0].name.to_string());
        let text = format!("/n^={}", "a".repeat(500));
        let constraints = vec![(tool, Constraint::parse(&text).unwrap())];
        let refused = attenuate(&token, &Narrowing { constraints, ..Narrowing::default() }, now());
        assert!(matches!(refused, Err(GrantError::TooLarge { .. })), "{refused:?}");
    }

    #[test]
    fn checks_that_ask_nothing_count_and_a_check_that_would_be_printed_whole_is_refused() {
        let issuer = Issuer::ephemeral();
        let token = issued(&issuer);
        let mut block = BlockBuilder::new();
        for _ in 0..65 {
            let check = Check { queries: Vec::new(), kind: CheckKind::One };
            block = block.check(check).unwrap();
        }
        let append = |block: BlockBuilder| {
            UnverifiedBiscuit::from(&token).unwrap().append(block).unwrap().to_vec().unwrap()
        };
        let many = refused(&issuer, &append(block));
        assert!(many.to_string().contains("too many facts or checks"), "{many}");

        let head = Predicate::new("query".to_owned(), vec![builder::string("a")]);
        let call = Predicate::new("call".to_owned(), vec![builder::string("shop.buy")]);
        let queries = vec![Rule::new(head, vec![call], Vec::new(), Vec::new())];
        let check = Check { queries, kind: CheckKind::One };
        let told = refused(&issuer, &append(BlockBuilder::new().check(check).unwrap()));
        assert!(told.to_string().contains("over what is not stated"), "{told}");
    }
}
