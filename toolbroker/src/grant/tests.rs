use std::time::{Duration, SystemTime, UNIX_EPOCH};

use biscuit_auth::Biscuit;
use biscuit_auth::builder::BlockBuilder;
use forge_protocol::broker::{GrantClaims, GrantedTool};
use forge_protocol::limits::GRANT_BYTES_MAX;
use forge_protocol::name::ToolName;

use super::terms::VALID_S_MAX;
use super::*;

pub(super) fn now() -> SystemTime {
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

pub(super) fn terms() -> Terms {
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
    let long = verify(&issuer, &vec![0; GRANT_BYTES_MAX as usize + 1], now());
    assert!(matches!(long, Err(GrantError::TooLarge { .. })), "{long:?}");
}

#[test]
fn another_principals_grant_is_refused() {
    let issuer = Issuer::ephemeral();
    let token = issuer.issue(&terms(), now()).unwrap();
    let claims = verify(&issuer, &token, now()).unwrap();
    check_presenter(&claims, "alice", None).unwrap();
    for other in ["mallory", "Alice", "alice ", ""] {
        let refused = check_presenter(&claims, other, None).unwrap_err();
        assert!(matches!(refused, GrantError::OtherPrincipal { .. }), "{refused}");
    }
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
    let of_none = attenuated(&issuer, &token, r#"session("");"#);
    let refused = verify(&issuer, &of_none, now()).unwrap_err();
    assert!(matches!(refused, GrantError::Session), "{refused}");
}

#[test]
fn a_budget_below_nothing_is_nothing_and_one_beyond_all_numbers_takes_nothing_away() {
    let issuer = Issuer::ephemeral();
    let token = issuer.issue(&terms(), now()).unwrap();
    for (source, calls_max, cost_max) in [
        ("calls_max(-1);", 0, 50),
        ("cost_max(-9223372036854775808);", 20, 0),
        ("calls_max(4294967296); cost_max(9223372036854775807);", 20, 50),
    ] {
        let claims = verify(&issuer, &attenuated(&issuer, &token, source), now()).unwrap();
        assert_eq!((claims.calls_max, claims.cost_max), (Some(calls_max), Some(cost_max)));
    }
}

#[test]
fn a_block_whose_cost_is_not_bounded_is_refused_at_once() {
    let issuer = Issuer::ephemeral();
    let token = issuer.issue(&terms(), now()).unwrap();
    // Few facts, joined with themselves: hours inside one round.
    let facts: String = (0..60).map(|n| format!("f({n});")).collect();
    let many: String = (0..65).map(|n| format!("calls_max({n});")).collect();
    let checks = "check if time($t); ".repeat(65);
    let queries = format!("check if time($t){};", " or time($t)".repeat(64));
    for bomb in [
        format!("{facts} g($a, $b, $c, $d, $e) <- f($a), f($b), f($c), f($d), f($e);"),
        format!("{facts} check if f($a), f($b), f($c), f($d), f($e), $a + $b == 1000;"),
        format!("{facts} reject if f($a), f($b), f($c), f($d), f($e), $a + $b == 1000;"),
        "check if [1, 2].any($x -> [1, 2].all($y -> $y > $x));".to_owned(),
        r#"check if call($t), $t.matches("(a{100}){100}");"#.to_owned(),
        "check if time($a), time($b);".to_owned(),
        many,
        checks,
        queries,
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
    assert!(matches!(refused(Terms { valid_s: u64::MAX, ..terms() }), GrantError::Validity { .. }));
    let over = Terms { valid_s: VALID_S_MAX + 1, ..terms() };
    assert!(matches!(over.clone().claims(now()), Err(GrantError::Validity { .. })));
    assert!(matches!(refused(over), GrantError::Validity { .. }));
    issuer.issue(&Terms { valid_s: VALID_S_MAX, ..terms() }, now()).unwrap();
    let session = Some(String::new());
    assert!(matches!(refused(Terms { session, ..terms() }), GrantError::Session));
    let mut constrained = terms();
    constrained.tools[0].constraints = vec!["/n<=5".into(); 60];
    constrained.tools[1].constraints = vec!["/n<=5".into(); 4];
    issuer.issue(&constrained, now()).unwrap();
    constrained.tools[1].constraints.push("/n<=5".into());
    assert!(matches!(refused(constrained), GrantError::TooManyConstraints { got: 65 }));
    let tools = (0..257).map(|n| tool(&format!("shop.t{n}"))).collect();
    assert!(matches!(refused(Terms { tools, ..terms() }), GrantError::TooManyTools { got: 257 }));
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
fn a_block_with_a_rule_and_nothing_else_that_is_wrong_is_refused_at_once() {
    let issuer = Issuer::ephemeral();
    let token = issuer.issue(&terms(), now()).unwrap();
    // To join so many facts with themselves takes minutes.
    let facts: String = (100..160).map(|number| format!("calls_max({number});")).collect();
    let joins = "g($a, $b, $c, $d) <- calls_max($a), calls_max($b), calls_max($c), \
                 calls_max($d), $a + $b == 1;";
    for source in ["g($t) <- call($t);".to_owned(), format!("{facts} {joins}")] {
        let said = verify(&issuer, &attenuated(&issuer, &token, &source), now());
        assert!(matches!(said, Err(GrantError::Shape(_))), "{source}");
    }
}

#[test]
fn a_third_partys_block_is_refused() {
    let issuer = Issuer::ephemeral();
    let token = issuer.issue(&terms(), now()).unwrap();
    let biscuit = Biscuit::from(&token, issuer.public_key()).unwrap();
    let key = biscuit_auth::KeyPair::new();
    let block = BlockBuilder::new().code("check if call(\"shop.find\")").unwrap();
    let request = biscuit.third_party_request().unwrap();
    let block = request.create_block(&key.private(), block).unwrap();
    let theirs = biscuit.append_third_party(key.public(), block).unwrap().to_vec().unwrap();
    let said = verify(&issuer, &theirs, now());
    assert!(matches!(&said, Err(GrantError::Shape("is a third party's"))), "{said:?}");
}
