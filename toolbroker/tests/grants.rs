//! Grants, roles, the operator's word on tools and the review of their
//! definitions, over the real broker process and a real tool server.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Authority, Callable, Effect, GrantClaims, GrantRequest, ListedTool, Narrowing, RefusalKind,
    Reply, Request, ReviewedTool, Standing,
};
use forge_protocol::limits::{CALLS_IN_FLIGHT_MAX, CALLS_MAX, RunLimits};
use serde_json::{Value, json};
use support::{Broker, Worker, grant_request, name, run_request, test_server};

fn limits() -> RunLimits {
    RunLimits { wall_ms: 20_000, ..RunLimits::default() }
}

/// A folder with a state folder in it, in which brokers are started one after
/// another.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A broker with the test server and this `forge.toml`.
    fn broker(&self, toml: &str, server_args: &[&str]) -> Broker {
        let config = self.path("forge.toml");
        std::fs::write(&config, toml).unwrap();
        let log = self.path("calls");
        // A server may write what its command line names, if it is there.
        let opened = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        opened.set_permissions(Permissions::from_mode(0o666)).unwrap();
        let mut args: Vec<&str> = vec!["--log", log.to_str().unwrap()];
        args.extend(server_args);
        let servers = json!({"mcpServers": {"test": {"command": test_server(), "args": args}}});
        let state = self.path("state");
        let flags = ["--config", config.to_str().unwrap(), "--state", state.to_str().unwrap()];
        Broker::start_in(tempfile::tempdir().unwrap(), &servers, &flags)
    }

    /// What reached the test server.
    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn token(broker: &mut Broker, request: GrantRequest) -> Vec<u8> {
    match broker.ask(&Request::IssueGrant(request)) {
        Reply::Grant(token) => token,
        other => panic!("{other:?}"),
    }
}

fn refusal(reply: Reply) -> (RefusalKind, String) {
    match reply {
        Reply::Refused { kind, message } => (kind, message),
        other => panic!("not refused: {other:?}"),
    }
}

fn open(
    broker: &mut Broker,
    principal: &str,
    session: Option<&str>,
    token: &[u8],
) -> Result<(Worker, GrantClaims), (RefusalKind, String)> {
    let mut request = run_request(principal, Authority::Grant(token.to_vec()), limits());
    request.session = session.map(str::to_owned);
    broker.open(request)
}

fn list(broker: &mut Broker, principal: &str) -> Vec<ListedTool> {
    match broker.ask(&Request::ListTools { principal: principal.into() }) {
        Reply::Tools { tools, .. } => tools,
        other => panic!("{other:?}"),
    }
}

fn names(tools: &[ListedTool]) -> Vec<&str> {
    tools.iter().map(|tool| tool.spec.name.as_str()).collect()
}

fn reviews(broker: &mut Broker) -> Vec<ReviewedTool> {
    match broker.ask(&Request::ReviewTools) {
        Reply::Reviews { tools, .. } => tools,
        other => panic!("{other:?}"),
    }
}

fn approve(broker: &mut Broker, tools: &[&str]) {
    let reviews = reviews(broker);
    let chosen = reviews.iter().filter(|tool| tools.contains(&tool.name.as_str()));
    let tools = chosen.map(|tool| (tool.name.clone(), tool.definition_sha256)).collect();
    let reply = broker.ask(&Request::ApproveTools { tools });
    assert!(matches!(reply, Reply::Approved { .. }), "{reply:?}");
}

#[test]
fn a_call_outside_its_constraint_is_denied_and_costs_the_server_nothing() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let constraints = ["test.slow:/ms<=5", "test.echo:/text^=docs/", "test.echo:/text=~[a-z/.]+"];
    let token = token(
        &mut broker,
        GrantRequest {
            constraints: constraints.map(str::to_owned).to_vec(),
            ..grant_request(&["test.echo", "test.slow"])
        },
    );
    let (mut worker, claims) = open(&mut broker, "alice", None, &token).unwrap();
    assert_eq!(claims.tools[1].constraints, ["/ms<=5"]);
    for (tool, arguments, constraint) in [
        ("test.slow", json!({"ms": 6}), "/ms<=5"),
        ("test.echo", json!({"text": "other/a"}), "/text^=docs/"),
        ("test.echo", json!({"text": "docs/../etc"}), "/text^=docs/"),
        ("test.echo", json!({"text": "docs/A"}), "/text=~[a-z/.]+"),
    ] {
        let (code, why) = worker.call(tool, &arguments);
        assert_eq!(code, Some(CallCode::Denied), "{arguments}: {why}");
        assert_eq!(why["constraint"], constraint, "{arguments}: {why}");
    }
    // The schema comes first: its violations are a bad request.
    assert_eq!(worker.call("test.slow", &json!({"ms": "5"})).0, Some(CallCode::BadRequest));
    assert_eq!(desk.calls(), Vec::<String>::new());
    assert_eq!(worker.call("test.slow", &json!({"ms": 5})).0, None);
    assert_eq!(worker.call("test.echo", &json!({"text": "docs/a"})).0, None);
    assert_eq!(desk.calls(), ["slow", "slow ended", "echo"]);
}

#[test]
fn a_constraint_that_cannot_be_read_points_at_the_character_and_issues_nothing() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let mut ask = |constraint: &str| {
        let constraints = vec![constraint.to_owned()];
        let request = GrantRequest { constraints, ..grant_request(&["test.slow"]) };
        refusal(broker.ask(&Request::IssueGrant(request)))
    };
    let (kind, message) = ask("test.slow:/ms<=five");
    assert_eq!(kind, RefusalKind::BadRequest);
    assert!(message.contains("character 16: a number"), "{message}");
    let (kind, message) = ask("test.echo:/text=1");
    assert_eq!(kind, RefusalKind::BadRequest);
    assert!(message.contains("test.echo"), "{message}");
}

#[test]
fn a_grant_is_good_for_its_principal_and_in_its_session_alone() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let request = GrantRequest { session: Some("s-1".into()), ..grant_request(&["test.echo"]) };
    let token = token(&mut broker, request);
    open(&mut broker, "alice", Some("s-1"), &token).unwrap();
    for (principal, session) in
        [("mallory", Some("s-1")), ("alice", None), ("alice", Some("s-2")), ("alice", Some(""))]
    {
        let (kind, why) = open(&mut broker, principal, session, &token).err().unwrap();
        assert_eq!(kind, RefusalKind::BadGrant, "{principal} {session:?}: {why}");
    }
}

#[test]
fn a_run_may_have_as_many_calls_as_the_protocol_has_room_for_and_no_more() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let token = token(&mut broker, grant_request(&["test.echo"]));
    let mut open = |calls: u32, calls_in_flight: u32| {
        let limits = RunLimits { calls, calls_in_flight, ..limits() };
        broker.open(run_request("alice", Authority::Grant(token.clone()), limits)).map(drop)
    };
    open(CALLS_MAX, CALLS_IN_FLIGHT_MAX).unwrap();
    for (calls, calls_in_flight, what) in [
        (CALLS_MAX + 1, 1, "calls"),
        (u32::MAX, 1, "calls"),
        (1, CALLS_IN_FLIGHT_MAX + 1, "calls_in_flight"),
    ] {
        let (kind, why) = open(calls, calls_in_flight).unwrap_err();
        assert_eq!(kind, RefusalKind::BadRequest, "{why}");
        assert!(why.contains(what), "{why}");
    }
}

#[test]
fn a_broker_without_key_or_state_narrows_a_grant_and_the_one_with_both_holds_runs_to_it() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let whole = token(&mut broker, grant_request(&["test.echo", "test.slow"]));
    let narrowing = Narrowing {
        token: whole.clone(),
        tools: vec![name("test.echo")],
        constraints: vec!["test.echo:/text^=a".into()],
        calls_max: Some(1),
        ..Narrowing::default()
    };
    let mut stranger = Broker::unconfigured();
    let narrow = match stranger.ask(&Request::AttenuateGrant(narrowing)) {
        Reply::Grant(token) => token,
        other => panic!("{other:?}"),
    };
    let (mut worker, claims) = open(&mut broker, "alice", None, &narrow).unwrap();
    assert_eq!(claims.tools.len(), 1);
    assert_eq!(worker.call("test.slow", &json!({"ms": 0})).0, Some(CallCode::Denied));
    assert_eq!(worker.call("test.echo", &json!({"text": "b"})).0, Some(CallCode::Denied));
    assert_eq!(worker.call("test.echo", &json!({"text": "a"})).0, None);
    assert_eq!(worker.call("test.echo", &json!({"text": "a"})).0, Some(CallCode::BudgetSpent));
    // The whole one is as good as before.
    let (mut worker, _) = open(&mut broker, "alice", None, &whole).unwrap();
    assert_eq!(worker.call("test.echo", &json!({"text": "b"})).0, None);
}

#[test]
fn calls_take_their_cost_from_the_grants_budget() {
    let desk = Desk::new();
    let toml = "[tools.'test.slow']\neffect = 'read'\ncost = 4\n[tools.'crypto.hash']\ncost = 0";
    let mut broker = desk.broker(toml, &[]);
    let request = GrantRequest {
        cost_max: Some(6),
        ..grant_request(&["test.echo", "test.slow", "crypto.hash"])
    };
    let token = token(&mut broker, request);
    let (mut worker, _) = open(&mut broker, "alice", None, &token).unwrap();
    let hash = json!({"algorithm": "sha256", "text": "x"});
    assert_eq!(worker.call("test.slow", &json!({"ms": 0})).0, None);
    let (code, why) = worker.call("test.slow", &json!({"ms": 0}));
    assert_eq!(code, Some(CallCode::BudgetSpent));
    assert!(why["error"].as_str().unwrap().contains("2 of the budget of 6"), "{why}");
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None, "one unit unless said");
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, Some(CallCode::BudgetSpent));
    assert_eq!(worker.call("crypto.hash", &hash).0, None, "costs nothing");
    assert_eq!(desk.calls(), ["slow", "slow ended", "echo", "echo"]);
}

#[test]
fn no_grant_is_issued_with_a_constraint_on_an_argument_that_its_tool_does_not_have() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let mut ask = |constraint: &str| {
        let constraints = vec![constraint.to_owned()];
        let request = GrantRequest { constraints, ..grant_request(&["test.slow"]) };
        broker.ask(&Request::IssueGrant(request))
    };
    let (kind, why) = refusal(ask("test.slow:/milliseconds<=5"));
    assert_eq!(kind, RefusalKind::BadRequest);
    assert!(why.contains("\"milliseconds\", which is none of the arguments of test.slow"), "{why}");
    assert!(matches!(ask("test.slow:/ms<=5"), Reply::Grant(_)));
}

#[test]
fn the_operators_word_is_shown_and_write_is_the_effect_until_it_is_given() {
    let desk = Desk::new();
    let mut broker = desk.broker("[tools.'test.slow']\neffect = 'read'\ncost = 4", &[]);
    let tools = list(&mut broker, "alice");
    let word = |tool: &str| {
        let found = tools.iter().find(|it| it.spec.name.as_str() == tool).unwrap();
        (found.word.effect, found.word.cost)
    };
    assert_eq!(word("test.slow"), (Effect::Read, 4));
    assert_eq!(word("test.echo"), (Effect::Write, 1));
    assert_eq!(word("crypto.hash"), (Effect::None, 1));
}

#[test]
fn a_principals_roles_bound_what_it_sees_is_granted_and_may_present() {
    let toml = |tools: &str| {
        format!("[roles.clerk]\ntools = [{tools}]\n[principals.alice]\nroles = ['clerk']")
    };
    let desk = Desk::new();
    let mut broker = desk.broker(&toml("'test.e*', 'crypto.hash'"), &[]);
    assert_eq!(names(&list(&mut broker, "alice")), ["crypto.hash", "test.echo", "test.echo_env"]);
    assert_eq!(names(&list(&mut broker, "mallory")), Vec::<&str>::new());

    // One that is there and one that is not look the same from outside.
    let mut texts = Vec::new();
    for tool in ["test.slow", "test.nosuch"] {
        let (kind, why) = refusal(broker.ask(&Request::IssueGrant(grant_request(&[tool]))));
        assert_eq!(kind, RefusalKind::Forbidden, "{why}");
        texts.push(why.replace(tool, "it"));
        let authority = Authority::Tools(vec![name(tool)]);
        let (kind, _) = broker.open(run_request("alice", authority, limits())).err().unwrap();
        assert_eq!(kind, RefusalKind::Forbidden);
    }
    assert_eq!(texts[0], texts[1]);
    let authority = Authority::Tools(vec![name("test.echo")]);
    let (kind, _) = broker.open(run_request("mallory", authority, limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::Forbidden);

    let token = token(&mut broker, grant_request(&["test.echo"]));
    open(&mut broker, "alice", None, &token).unwrap();
    drop(broker);
    // The role lost the tool since the grant was issued.
    let mut broker = desk.broker(&toml("'crypto.hash'"), &[]);
    let (kind, _) = open(&mut broker, "alice", None, &token).err().unwrap();
    assert_eq!(kind, RefusalKind::Forbidden);
}

#[test]
fn a_server_that_a_principal_may_not_see_is_not_started_for_it() {
    let desk = Desk::new();
    let starts = desk.path("starts");
    std::fs::write(&starts, "").unwrap();
    std::fs::set_permissions(&starts, Permissions::from_mode(0o666)).unwrap();
    let other = ["-c", "echo >>$0; exit 1", starts.to_str().unwrap()];
    let servers = json!({"mcpServers": {
        "test": {"command": test_server()},
        "other": {"command": "/bin/sh", "args": other},
    }});
    let (config, state) = (desk.path("forge.toml"), desk.path("state"));
    let roles = "[roles.clerk]\ntools = ['test.echo']\n[principals.alice]\nroles = ['clerk']";
    std::fs::write(&config, roles).unwrap();
    let flags = ["--config", config.to_str().unwrap(), "--state", state.to_str().unwrap()];
    let mut broker = Broker::start_in(tempfile::tempdir().unwrap(), &servers, &flags);
    assert_eq!(names(&list(&mut broker, "alice")), ["test.echo"]);
    assert_eq!(std::fs::read_to_string(&starts).unwrap(), "");
    // The operator reviews all there are.
    reviews(&mut broker);
    assert!(std::fs::read_to_string(&starts).unwrap().starts_with('\n'));
}

fn standing(tools: &[ListedTool], tool: &str) -> Standing {
    tools.iter().find(|it| it.spec.name.as_str() == tool).unwrap().standing
}

#[test]
fn a_changed_definition_blocks_its_tool_until_it_is_approved_again() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    assert_eq!(standing(&list(&mut broker, "alice"), "test.echo"), Standing::Approved);
    drop(broker);

    let mut broker = desk.broker("", &["--changed"]);
    let tools = list(&mut broker, "alice");
    assert_eq!(standing(&tools, "test.echo"), Standing::Changed);
    assert_eq!(standing(&tools, "test.slow"), Standing::Approved);
    let (kind, why) = refusal(broker.ask(&Request::IssueGrant(grant_request(&["test.echo"]))));
    assert_eq!(kind, RefusalKind::NotReviewed);
    assert!(why.contains("forge-vmm tools approve test.echo"), "{why}");
    let authority = || Authority::Tools(vec![name("test.echo")]);
    let (kind, _) = broker.open(run_request("alice", authority(), limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::NotReviewed);

    let all = reviews(&mut broker);
    let changed: Vec<_> = all.iter().filter(|it| it.standing == Standing::Changed).collect();
    let [changed] = changed.as_slice() else { panic!("{all:?}") };
    assert_eq!(changed.name.as_str(), "test.echo");
    let difference = &changed.difference;
    assert!(difference.contains("+ Says it back, and tells everybody."), "{difference}");
    assert!(difference.lines().any(|line| line.starts_with("- Says it back.")), "{difference}");

    // What was looked at is what is approved, and nothing else.
    let tools = vec![(name("test.echo"), [1; 32])];
    let (kind, _) = refusal(broker.ask(&Request::ApproveTools { tools }));
    assert_eq!(kind, RefusalKind::NotReviewed);
    approve(&mut broker, &["test.echo"]);
    let (mut worker, _) = broker.open(run_request("alice", authority(), limits())).unwrap();
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
}

#[test]
fn a_definition_that_comes_back_is_blocked_as_any_other_is_until_it_is_approved_again() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let of_the_first = token(&mut broker, grant_request(&["test.echo"]));
    drop(broker);

    let mut broker = desk.broker("", &["--changed"]);
    approve(&mut broker, &["test.echo"]);
    let of_the_second = token(&mut broker, grant_request(&["test.echo"]));
    let kind =
        |opened: Result<(Worker, GrantClaims), (RefusalKind, String)>| opened.err().unwrap().0;
    assert_eq!(kind(open(&mut broker, "alice", None, &of_the_first)), RefusalKind::BadGrant);
    drop(broker);

    // It is what the first grant pins by now, and not what was approved last.
    let mut broker = desk.broker("", &[]);
    assert_eq!(standing(&list(&mut broker, "alice"), "test.echo"), Standing::Changed);
    assert_eq!(kind(open(&mut broker, "alice", None, &of_the_first)), RefusalKind::NotReviewed);
    assert_eq!(kind(open(&mut broker, "alice", None, &of_the_second)), RefusalKind::BadGrant);
    let authority = Authority::Tools(vec![name("test.echo")]);
    let opened = broker.open(run_request("alice", authority, limits()));
    assert_eq!(kind(opened), RefusalKind::NotReviewed);
    let (refused, _) = refusal(broker.ask(&Request::IssueGrant(grant_request(&["test.echo"]))));
    assert_eq!(refused, RefusalKind::NotReviewed);

    approve(&mut broker, &["test.echo"]);
    let (mut worker, _) = open(&mut broker, "alice", None, &of_the_first).unwrap();
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(kind(open(&mut broker, "alice", None, &of_the_second)), RefusalKind::BadGrant);
}

#[test]
fn a_tool_of_a_grant_that_a_program_cannot_call_keeps_it_from_no_run() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let both = grant_request(&["test.echo", "test.note"]);
    let token = token(&mut broker, both);
    let of = |tool: &str| {
        let mut request = run_request("alice", Authority::Grant(token.clone()), limits());
        request.callable = Callable::These(vec![name(tool)]);
        request
    };
    // After what it cannot call nobody was asked, and a worker that calls it all the same
    // is held to that, whatever its grant says.
    let (mut worker, _) = broker.open(of("test.note")).unwrap();
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, Some(CallCode::Denied));
    drop((worker, broker));

    let mut broker = desk.broker("", &["--changed"]);
    let (kind, why) = open(&mut broker, "alice", None, &token).err().unwrap();
    assert!(kind == RefusalKind::BadGrant && why.contains("test.echo changed"), "{why}");
    assert_eq!(broker.open(of("test.echo")).err().unwrap().0, RefusalKind::BadGrant);
    let (mut worker, claims) = broker.open(of("test.note")).unwrap();
    assert_eq!(claims.tools.len(), 2);
    assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
    assert_eq!(desk.calls(), ["note x"]);
}

#[test]
fn a_definition_that_changes_under_a_run_is_refused_at_the_call_with_the_way_out() {
    let desk = Desk::new();
    let mut broker = desk.broker("", &[]);
    let mut worker = broker.run(&["test.echo", "test.change"], limits());
    assert_eq!(worker.call("test.change", &json!({})).0, None);
    // The list is read again beside everything else.
    let mut tries = 0;
    let why: Value = loop {
        match worker.call("test.echo", &json!({"text": "x"})) {
            (Some(CallCode::Denied), why) => break why,
            (code, _) => assert_eq!(code, None),
        }
        tries += 1;
        assert!(tries < 1_000, "the change never showed");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert!(why["error"].as_str().unwrap().contains("forge-vmm tools review"), "{why}");
    assert_eq!(standing(&list(&mut broker, "alice"), "test.echo"), Standing::Changed);
}

#[test]
fn a_run_calls_no_tool_of_which_another_definition_was_approved_meanwhile() {
    let desk = Desk::new();
    let mut broker = desk.broker("[review]\nmode = 'required'", &[]);
    approve(&mut broker, &["test.echo", "test.note"]);
    let mut worker = broker.run(&["test.echo", "test.note", "crypto.hash"], limits());
    let mut call = |tool: &str| worker.call(tool, &json!({"text": "x"}));
    assert_eq!(call("test.echo").0, None);
    // By a broker of the same operator, whose server is a newer one.
    approve(&mut desk.broker("", &["--changed"]), &["test.echo"]);
    let (code, why) = call("test.echo");
    assert_eq!(code, Some(CallCode::Denied));
    let why = why["error"].as_str().unwrap();
    assert!(why.contains("another than the one approved") && why.contains("tools review"), "{why}");
    assert_eq!(call("test.note").0, None);

    // What is taken back is not approved any more.
    let reviews = desk.path("state/reviews.json");
    std::fs::remove_file(&reviews).unwrap();
    let (code, why) = call("test.note");
    assert_eq!(code, Some(CallCode::Denied));
    assert!(why["error"].as_str().unwrap().contains("not approved yet"), "{why}");
    std::fs::write(&reviews, "?").unwrap();
    let (code, why) = call("test.note");
    assert_eq!(code, Some(CallCode::Denied));
    assert!(why["error"].as_str().unwrap().contains("the operator's log says why"), "{why}");
    let hashed = worker.call("crypto.hash", &json!({"text": "x", "algorithm": "sha256"}));
    assert_eq!(hashed.0, None, "the broker's own");
    assert_eq!(desk.calls(), ["echo", "note x"], "each once");
}

#[test]
fn where_review_is_required_nothing_is_granted_before_it_is_approved() {
    let desk = Desk::new();
    let mut broker = desk.broker("[review]\nmode = 'required'", &[]);
    let tools = list(&mut broker, "alice");
    assert_eq!(standing(&tools, "test.echo"), Standing::New);
    assert_eq!(standing(&tools, "crypto.hash"), Standing::Approved, "the broker's own");
    let (kind, _) = refusal(broker.ask(&Request::IssueGrant(grant_request(&["test.echo"]))));
    assert_eq!(kind, RefusalKind::NotReviewed);
    approve(&mut broker, &["test.echo"]);
    let token = token(&mut broker, grant_request(&["test.echo"]));
    open(&mut broker, "alice", None, &token).unwrap();
    assert!(private(&desk.path("state/reviews.json")));
}

fn private(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    file.metadata().unwrap().permissions().mode() & 0o077 == 0
}
