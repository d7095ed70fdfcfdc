//! The payload of any message, read by [`codec::decode`].
//!
//! ```text
//! input = type (u8, the place in the table below)  payload
//! ```

use core::fmt::Debug;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Answer, Ask, Authority, BlockedTool, BrokenLink, Callable, Effect, FoundTool, GrantClaims,
    GrantRequest, GrantedTool, HostedTool, HostedTools, ListedTool, Narrowing, OpenRun,
    RefusalKind, Reply, Request, ReviewedTool, Standing, ToolSpec, ToolWord,
};
use forge_protocol::codec::{self, BorrowDecode, CodecError, Encode};
use forge_protocol::ending::{Ending, LimitKind, RejectKind, TrapKind};
use forge_protocol::guest::{Call, Ended, Load, Settled, Start};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, CallRecord, CallSettled, Log};
use forge_protocol::service;
use forge_protocol::worker::{
    Deadline, Fate, Fork, Job, Prepare, PreparedJob, Report, Reuse, Tier, Timing, VmFailure,
    VmFailureKind, ZygoteSetup,
};

use super::{Outcome, Seed, accepted, choice, refused};

/// What decodes is one message and no more, and survives being sent on.
pub fn check(mut data: &[u8]) -> Outcome {
    let types: [fn(&[u8]) -> Outcome; 26] = [
        survives::<Hello>,
        survives::<Refusal>,
        survives::<Start>,
        survives::<Call>,
        survives::<Settled>,
        survives::<Log>,
        survives::<Artifact>,
        survives::<Ended>,
        survives::<Ask>,
        survives::<Answer>,
        survives::<Job>,
        survives::<Report>,
        survives::<Load>,
        survives::<service::Submit>,
        survives::<service::Event>,
        survives::<service::Finished>,
        survives::<service::Cancel>,
        survives::<service::Callback>,
        survives::<service::CallbackSettled>,
        survives::<service::Query>,
        survives::<service::Answered>,
        survives::<Prepare>,
        survives::<PreparedJob>,
        survives::<ZygoteSetup>,
        survives::<Fork>,
        survives::<service::Part>,
    ];
    let survives = types[usize::from(choice(&mut data)) % types.len()];
    survives(data)
}

fn ask(request: Request) -> Ask {
    Ask { id: 300, request }
}

fn answer(reply: Reply) -> Answer {
    Answer { id: 300, reply }
}

fn survives<T>(payload: &[u8]) -> Outcome
where
    T: Encode + for<'a> BorrowDecode<'a, ()> + PartialEq + Debug,
{
    let Ok(message) = codec::decode::<T>(payload) else { return Outcome::Refused };
    let mut again = Vec::new();
    codec::encode_into(&message, &mut again);
    assert!(again.len() <= payload.len(), "a message grew by being sent on");
    assert_eq!(codec::decode::<T>(&again).as_ref(), Ok(&message), "a message changed");
    again.push(0);
    assert_eq!(codec::decode::<T>(&again), Err(CodecError::Leftover { bytes: 1 }));
    Outcome::Accepted
}

fn input(place: u8, message: &impl Encode) -> Vec<u8> {
    let mut bytes = vec![place];
    codec::encode_into(message, &mut bytes);
    bytes
}

/// What clients and a service tell each other, which any user of the host may send.
fn of_clients(tool: &ToolName) -> Vec<Seed> {
    let order = service::Order {
        program: b"\0asm".to_vec(),
        input: b"{}".to_vec(),
        principal: "operator".into(),
        session: Some("s".into()),
        authority: Authority::Tools(vec![tool.clone()]),
        limits: RunLimits::default(),
        prepare: true,
        events: true,
        hosted: Some(HostedTools {
            server: "app".into(),
            tools: vec![HostedTool {
                name: "greet".into(),
                description: "greets".into(),
                input_schema: "{}".into(),
                output_schema: Some("{}".into()),
            }],
        }),
    };
    let event = |what| service::Event { number: 300, what };
    let query = |question| service::Query { number: 300, question };
    let answered = |reply| service::Answered { number: 300, reply };
    let settled = |result| service::CallbackSettled { number: 300, callback: 1, result };
    let left = service::Left { name: "a.txt".into(), media_type: "text/plain".into(), bytes: 1 };
    let finished = service::Finished { number: 300, report: b"{}".to_vec(), artifacts: vec![left] };
    let part = service::Part { number: 300, artifact: 0, content: b"x".to_vec() };
    let called = service::RunEvent::Called { call: 1, tool: tool.clone() };
    let ended = service::RunEvent::Settled {
        call: 1,
        code: Some(CallCode::OutcomeUnknown),
        duration_ns: 9,
    };
    let callback = service::Callback {
        number: 300,
        callback: 1,
        tool: tool.clone(),
        arguments: b"{}".to_vec(),
    };
    let search = service::Question::SearchTools {
        principal: "operator".into(),
        intent: "find a part".into(),
        k: 5,
    };
    let refused =
        service::Reply::Refused { kind: RefusalKind::Overloaded, message: "later".into() };
    vec![
        accepted("submit", input(13, &service::Submit { number: 300, order })),
        accepted("event-called", input(14, &event(called))),
        accepted("event-settled", input(14, &event(ended))),
        accepted("event-output", input(14, &event(service::RunEvent::Output(b"x".to_vec())))),
        accepted("finished", input(15, &finished)),
        accepted("part", input(25, &part)),
        accepted("cancel", input(16, &service::Cancel { number: u64::MAX })),
        accepted("callback", input(17, &callback)),
        accepted("callback-result", input(18, &settled(Ok(b"{}".to_vec())))),
        accepted("callback-error", input(18, &settled(Err(b"{}".to_vec())))),
        accepted("query-search", input(19, &query(search))),
        accepted("query-status", input(19, &query(service::Question::Status))),
        accepted("answered-grant", input(20, &answered(service::Reply::Grant(vec![1, 2])))),
        accepted("answered-refused", input(20, &answered(refused))),
    ]
}

/// Messages of every type, with every field in use.
pub fn seeds() -> Vec<Seed> {
    let hello = Hello::ours(Role::Guest);
    let tool = ToolName::parse("inventory.find").expect("a good name");
    let load = Load { limits: RunLimits::default(), announce: true };
    let start = Start {
        run_id: RunId([3; 16]),
        seed: [1; 32],
        start_unix_ns: 1_700_000_000_000_000_000,
        granted: vec![tool.clone()],
    };
    let call = Call { id: 0, waits: true, tool: tool.clone(), request: b"{\"q\":1}".to_vec() };
    let settled = Settled {
        id: 0,
        code: Some(CallCode::ToolFailed),
        duration_ns: 9,
        body: b"\"no\"".to_vec(),
        redacted: true,
    };
    let log = Log { level: 2, text: "said".into() };
    let artifact =
        Artifact { name: "a.txt".into(), media_type: "text/plain".into(), content: b"x".to_vec() };
    let ended = |ending| Ended {
        ending,
        fuel_used: 1,
        memory_peak_bytes: 65_536,
        logs_dropped: 0,
        load_ticks: 3,
        run_ticks: 4,
    };
    let claims = GrantClaims {
        principal: "operator".into(),
        tools: vec![GrantedTool {
            name: tool.clone(),
            definition_sha256: [5; 32],
            constraints: vec!["/q<=5".into()],
        }],
        expires_unix_s: 1_800_000_000,
        calls_max: Some(10),
        cost_max: Some(20),
        session: Some("s".into()),
    };
    let open = |authority| {
        Request::OpenRun(OpenRun {
            run_id: RunId([3; 16]),
            principal: "operator".into(),
            session: Some("s".into()),
            program_sha256: [6; 32],
            authority,
            callable: Callable::These(vec![tool.clone()]),
            limits: RunLimits::default(),
        })
    };
    let grant = GrantRequest {
        principal: "operator".into(),
        tools: vec![tool.clone()],
        constraints: vec!["inventory.find:/q<=5".into()],
        valid_s: 60,
        calls_max: None,
        cost_max: Some(20),
        session: Some("s".into()),
    };
    let narrowing = Narrowing {
        token: vec![1, 2],
        tools: vec![tool.clone()],
        constraints: vec!["inventory.find:/q<=5".into()],
        valid_s: Some(60),
        calls_max: Some(1),
        cost_max: Some(2),
        session: Some("s".into()),
    };
    let word =
        ToolWord { effect: Effect::Read, cost: 1, advice: Some("{\"readOnlyHint\":true}".into()) };
    let reviewed = ReviewedTool {
        name: tool.clone(),
        definition_sha256: [5; 32],
        standing: Standing::Changed,
        word: word.clone(),
        difference: "- finds\n+ finds more".into(),
    };
    let reviews = Reply::Reviews { tools: vec![reviewed], unavailable: Vec::new() };
    let spec = ToolSpec {
        name: tool.clone(),
        description: "finds".into(),
        input_schema: "{}".into(),
        output_schema: Some("{}".into()),
        definition_sha256: [5; 32],
    };
    let found = Reply::Found {
        tools: vec![FoundTool { spec: spec.clone(), score_millionths: 900_000 }],
        blocked: vec![BlockedTool { name: tool.clone(), standing: Standing::Changed }],
        unavailable: Vec::new(),
    };
    let listed = ListedTool { spec, word, standing: Standing::Approved };
    let tools =
        Reply::Tools { tools: vec![listed], unavailable: vec![("mail".into(), "gone".into())] };
    let job = Job {
        load: load.clone(),
        start: start.clone(),
        program: b"\0asm".to_vec(),
        input: b"{}".to_vec(),
        deadline: Deadline { monotonic_ns: 5_000_000_000 },
        brokered: true,
    };
    let record = CallRecord {
        id: 0,
        tool: tool.clone(),
        begun_ns: 5,
        settled: Some(CallSettled { code: None, duration_ns: 7, redacted: true }),
    };
    let broken =
        BrokenLink { reason: "call 5 where 1 is next".into(), calls: vec![record.clone()] };
    let report = |fate| Report {
        fate,
        output: b"out".to_vec(),
        artifacts: vec![artifact.clone()],
        logs: vec![log.clone()],
        calls: vec![record.clone()],
        vm_exits: 4,
        timing: Timing { vm_ns: 1, boot_ns: 2, load_ns: 3, run_ns: 4, ..Timing::default() },
    };
    let failure = VmFailure::new(VmFailureKind::Crash, "page fault");
    let trap = Ending::Trap { kind: TrapKind::Unreachable, detail: "unreachable".into() };
    let rejected = Ending::Rejected { kind: RejectKind::Import, detail: "tool a.b".into() };
    let prepared = PreparedJob {
        start: start.clone(),
        input: b"{}".to_vec(),
        deadline: Deadline { monotonic_ns: 5_000_000_000 },
        brokered: true,
    };
    let setup = ZygoteSetup { tier: Tier::Process, trust: vec![[7; 32]] };
    let reuse = Reuse::Reset { prove_one_in: 16 };
    let fork = Fork { ram_bytes: 64 << 20, touch_bytes: 4096, reuse };
    let mut seeds = of_clients(&tool);
    seeds.extend([
        accepted("prepare", input(21, &Prepare { load: load.clone(), program: vec![0] })),
        accepted("prepared-job", input(22, &prepared)),
        accepted("zygote-setup", input(23, &setup)),
        accepted("fork", input(24, &fork)),
        accepted("hello", input(0, &hello)),
        accepted("refusal", input(1, &Refusal(hello))),
        accepted("load", input(12, &load)),
        accepted("start", input(2, &start)),
        accepted("call", input(3, &call)),
        accepted("settled", input(4, &settled)),
        accepted("log", input(5, &log)),
        accepted("artifact", input(6, &artifact)),
        accepted("ended-returned", input(7, &ended(Ending::Returned(-1)))),
        accepted("ended-trap", input(7, &ended(trap))),
        accepted(
            "ended-limit",
            input(7, &ended(Ending::Limit { kind: LimitKind::Fuel, limit: 9 })),
        ),
        accepted("ended-rejected", input(7, &ended(rejected))),
        accepted(
            "request-list",
            input(8, &ask(Request::ListTools { principal: "operator".into() })),
        ),
        accepted("request-grant", input(8, &ask(Request::IssueGrant(grant)))),
        accepted(
            "request-search",
            input(
                8,
                &ask(Request::SearchTools {
                    principal: "operator".into(),
                    intent: "find a part".into(),
                    k: 5,
                }),
            ),
        ),
        accepted(
            "request-roles",
            input(
                8,
                &ask(Request::LoadRoles {
                    file: "forge.toml".into(),
                    tables: r#"{"roles":{"clerk":{"tools":["*"]}},"principals":{}}"#.into(),
                }),
            ),
        ),
        accepted("request-inspect", input(8, &ask(Request::InspectGrant { token: vec![1, 2] }))),
        accepted("request-attenuate", input(8, &ask(Request::AttenuateGrant(narrowing)))),
        accepted("request-review", input(8, &ask(Request::ReviewTools))),
        accepted(
            "request-approve",
            input(8, &ask(Request::ApproveTools { tools: vec![(tool.clone(), [5; 32])] })),
        ),
        accepted("reply-reviews", input(9, &answer(reviews))),
        accepted(
            "request-end-run",
            input(8, &ask(Request::EndRun { run_id: RunId([7; 16]), is_whole: true })),
        ),
        accepted("reply-run-ended", input(9, &answer(Reply::RunEnded { broken: Some(broken) }))),
        accepted("reply-approved", input(9, &answer(Reply::Approved { tools: 1 }))),
        accepted("request-open-tools", input(8, &ask(open(Authority::Tools(vec![tool.clone()]))))),
        accepted("request-open-grant", input(8, &ask(open(Authority::Grant(vec![1, 2]))))),
        accepted("reply-tools", input(9, &answer(tools))),
        accepted("reply-found", input(9, &answer(found))),
        accepted("reply-grant", input(9, &answer(Reply::Grant(vec![1, 2])))),
        accepted("reply-claims", input(9, &answer(Reply::Claims(claims.clone())))),
        accepted("reply-opened", input(9, &answer(Reply::Opened(claims)))),
        accepted(
            "reply-refused",
            input(
                9,
                &answer(Reply::Refused { kind: RefusalKind::BadGrant, message: "expired".into() }),
            ),
        ),
        accepted("job", input(10, &job)),
        accepted("report-ended", input(11, &report(Fate::Ended(ended(Ending::Returned(0)))))),
        accepted("report-deadline", input(11, &report(Fate::Deadline))),
        accepted("report-vm", input(11, &report(Fate::Vm(failure)))),
        // A vector that claims 2^40 bytes.
        refused("length-bomb", vec![4, 0, 0, 0, 253, 0, 0, 0, 0, 0, 1, 0, 0]),
        refused("bad-tool-name", vec![3, 0, 1, 3, b'A', b'.', b'b', 0]),
    ]);
    seeds
}
