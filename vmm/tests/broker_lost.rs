//! A toolbroker that is lost: what becomes of runs, what is asked again, and
//! how it comes back.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/frail_broker.rs"]
mod frail_broker;
#[path = "support/processes.rs"]
mod processes;
#[path = "support/serving.rs"]
mod serving;

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_client::ClientError;
use forge_protocol::RunId;
use forge_protocol::broker::{
    Authority, Callable, HostedTool, HostedTools, OpenRun, RefusalKind, Reply as BrokerReply,
    Request,
};
use forge_protocol::limits::RunLimits;
use forge_protocol::service::{Order, Question, Reply};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Tier;
use forge_vmm::broker::{Broker, BrokerError};
use forge_vmm::cancel::Cancel;
use forge_vmm::keeper::Keeper;
use forge_vmm::link::Patience;
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};
use frail_broker::{Brokers, LENGTH, Life};
use processes::{Process, is_gone, wait_for};
use serde_json::Value;
use serving::{
    ECHO, Service, broker_pid, desk, endless, hashes, kill, lines, report, runtime, signal_to,
    stands, status, submit, test_server, three_in_flight,
};
use support::{eventually, signer};

fn main() -> ExitCode {
    frail_broker::be_one();
    support::main(
        claims![
            a_lost_broker_comes_back_and_runs_that_were_calling_say_so,
            a_broker_that_cannot_come_back_is_said_and_comes_back_when_it_can,
            a_journal_that_takes_nothing_is_said_until_it_does,
            a_broker_that_stands_still_costs_a_run_its_time_and_no_more,
        ],
        claims![
            a_broker_that_takes_nothing_is_asked_for_as_long_as_somebody_waits,
            a_large_request_to_a_broker_that_stands_still_holds_up_nobody,
            a_broker_whose_answer_nobody_took_still_takes_a_large_request,
            a_broker_that_says_nothing_is_told_of_until_it_answers,
            a_request_that_cost_a_broker_its_life_is_not_given_to_the_next,
            a_broker_that_talks_nonsense_is_replaced_and_its_successor_not_asked,
            a_request_that_no_broker_has_seen_is_given_to_the_next,
            what_a_worker_reports_that_broke_its_link_is_not_told,
            that_a_run_called_nothing_is_not_its_workers_word_alone,
        ],
    )
}

fn keeper(brokers: &Brokers) -> Keeper {
    Keeper::of(Broker::start(&brokers.options()).unwrap()).unwrap()
}

/// What is not on the disk holds a result back, whatever the worker says of calls: one
/// that was taken over may have called all that its run was granted.
fn that_a_run_called_nothing_is_not_its_workers_word_alone() {
    let brokers = Brokers::with("keeps-nothing", &[Life::KeepsNothing]);
    let supervisor = supervisor(&brokers);
    let report = supervisor.run(&submit(ECHO, "[7]")).report;
    assert_eq!((report.end.status().as_str(), brokers.asked()), ("ok", 0), "{report:#?}");
    // The same program, which calls nothing either.
    let order = Order { authority: hashes().authority, ..submit(ECHO, "[7]") };
    let report = supervisor.run(&order).report;
    assert_eq!(
        (report.end.status().as_str(), report.end.kind()),
        ("internal", "journal"),
        "{report:#?}"
    );
    assert_eq!((report.output.as_str(), brokers.asked()), ("", 2));
}

/// Of a worker that sent what none of ours does, the broker's word stands and its own
/// does not.
fn what_a_worker_reports_that_broke_its_link_is_not_told() {
    let brokers = Brokers::with("finds-links-broken", &[Life::FindsLinksBroken]);
    let supervisor = supervisor(&brokers);
    let order = Order { authority: hashes().authority, ..submit(ECHO, "[7]") };
    let report = supervisor.run(&order).report;
    let told = (report.end.status().as_str(), report.end.kind(), report.output.as_str());
    assert_eq!(told, ("internal", "guest_misbehaved", ""), "{report:#?}");
    assert!(report.reason.contains("call 5 where 1 is next"), "{}", report.reason);
    let calls: Vec<_> = report.tool_calls.iter().map(|call| (&*call.tool, call.status)).collect();
    assert_eq!(calls, [("test.echo", "unsettled")]);
    // Opened, ended, and that call is on the disk.
    assert_eq!(brokers.asked(), 3);
}

fn supervisor(brokers: &Brokers) -> Supervisor {
    let options = SupervisorOptions {
        trust: TrustKeys::new([signer().trust_key()]).unwrap(),
        maxima: RunLimits::operator_maxima(),
        pool: PoolOptions { tier: Tier::Process, ..PoolOptions::default() },
    };
    let broker = Broker::start(&brokers.options()).unwrap();
    Supervisor::new(options, Some(broker)).unwrap()
}

/// Asks, again as long as there is no broker: on a slow host the next takes
/// longer than anybody waits.
fn ask(keeper: &Keeper) -> Result<(String, Arc<Broker>), BrokerError> {
    let mut answer = None;
    eventually("there is a broker", || {
        answer =
            Some(keeper.with(Patience::default(), |broker| broker.metrics(Patience::default())));
        !matches!(answer, Some(Err(BrokerError::Away { .. })))
    });
    answer.unwrap()
}

/// The request is answered with an error by the first, and by nobody else; the
/// second serves.
fn is_not_asked_again(brokers: &Brokers) -> BrokerError {
    let keeper = keeper(brokers);
    let error = ask(&keeper).unwrap_err();
    wait_for("a successor", || keeper.standing().pid.filter(|_| keeper.standing().restarts == 1));
    assert_eq!(brokers.asked(), 1, "{error}");
    assert_eq!(ask(&keeper).unwrap().0, "here");
    assert_eq!((brokers.asked(), keeper.standing().restarts), (2, 1));
    error
}

fn a_request_that_cost_a_broker_its_life_is_not_given_to_the_next() {
    let brokers = Brokers::with("dies", &[Life::Dies, Life::Answers]);
    let error = is_not_asked_again(&brokers);
    assert!(matches!(error, BrokerError::Lost(_)), "{error}");
}

fn a_broker_that_talks_nonsense_is_replaced_and_its_successor_not_asked() {
    let brokers = Brokers::with("nonsense", &[Life::TalksNonsense, Life::Answers]);
    let error = is_not_asked_again(&brokers);
    assert!(matches!(error, BrokerError::Protocol(_)), "{error}");
}

fn a_request_that_no_broker_has_seen_is_given_to_the_next() {
    let brokers = Brokers::with("deaf", &[Life::IsDeaf, Life::Answers]);
    let keeper = keeper(&brokers);
    assert_eq!(ask(&keeper).unwrap().0, "here");
    assert_eq!((brokers.asked(), keeper.standing().restarts), (1, 1));
}

fn a_broker_that_takes_nothing_is_asked_for_as_long_as_somebody_waits() {
    let brokers = Brokers::with("asleep", &[Life::Sleeps]);
    let broker = Broker::start(&brokers.options()).unwrap();
    let run = OpenRun {
        run_id: RunId([1; 16]),
        principal: "local".into(),
        session: None,
        program_sha256: [0; 32],
        authority: Authority::Grant(vec![0; 32 * 1024]),
        callable: Callable::Any,
        limits: RunLimits::default(),
    };
    // More than its socket takes; none of them has the link broken.
    for _ in 0..64 {
        let patience = Patience::until(Instant::now() + Duration::from_millis(10));
        let error = broker.open_run_for(run.clone(), None, patience).unwrap_err();
        assert!(matches!(error, BrokerError::OutOfTime { .. }), "{error}");
    }
    let cancel = Cancel::new().unwrap();
    cancel.raise();
    let patience = Patience { until: None, cancel: Some(&cancel) };
    let error = broker.open_run_for(run, None, patience).unwrap_err();
    assert!(matches!(error, BrokerError::Cancelled), "{error}");
    let error = broker.metrics(patience).unwrap_err();
    assert!(matches!(error, BrokerError::Cancelled), "{error}");
}

/// A process that stands still until this is dropped.
struct Stopped(i32);

impl Stopped {
    fn stop(pid: i32) -> Self {
        signal_to(pid, libc::SIGSTOP);
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal_to(self.0, libc::SIGCONT);
    }
}

fn a_broker_that_says_nothing_is_told_of_until_it_answers() {
    let brokers = Brokers::with("silent", &[Life::Answers, Life::Answers]);
    let keeper = keeper(&brokers);
    let pid = keeper.standing().pid.unwrap();
    let stopped = Stopped::stop(pid as i32);
    // Who has no time says nothing of the broker.
    let soon = Patience::until(Instant::now() + Duration::from_millis(50));
    let late = keeper.with(soon, |broker| broker.metrics(soon)).unwrap_err();
    assert!(matches!(late, BrokerError::OutOfTime { .. }), "{late}");
    assert_eq!(keeper.standing().reason, None);
    let silence = ask(&keeper).unwrap_err();
    assert!(matches!(silence, BrokerError::NoAnswer(_)), "{silence}");
    let standing = keeper.standing();
    assert_eq!((standing.pid, standing.restarts), (Some(pid), 0), "what it called goes on");
    let reason = standing.reason.unwrap();
    assert!(reason.contains(&format!("`kill -KILL {pid}`")), "{reason}");
    drop(stopped);
    ask(&keeper).unwrap();
    assert_eq!(keeper.standing().reason, None);
    // As an operator is told to do.
    signal_to(pid as i32, libc::SIGSTOP);
    signal_to(pid as i32, libc::SIGKILL);
    wait_for("a successor", || keeper.standing().pid.filter(|_| keeper.standing().restarts == 1));
    assert_eq!(keeper.standing().reason, None);
}

fn a_large_request_to_a_broker_that_stands_still_holds_up_nobody() {
    let brokers = Brokers::with("stopped", &[Life::Answers]);
    let broker = Broker::start(&brokers.options()).unwrap();
    let tool = HostedTool {
        name: "tool".into(),
        description: "x".repeat(900 * 1024),
        input_schema: "{}".into(),
        output_schema: None,
    };
    let tools = || HostedTools { server: "own".into(), tools: vec![tool.clone()] };
    let search = Request::SearchTools { principal: "a".into(), intent: "any".into(), k: 1 };
    let is_over =
        |error: BrokerError| assert!(matches!(error, BrokerError::OutOfTime { .. }), "{error}");
    let soon = || Patience::until(Instant::now() + Duration::from_millis(50));
    let stopped = Stopped::stop(broker.id() as i32);
    // It takes the first, which is not answered; what nobody waits for is withdrawn.
    is_over(broker.ask_for(&search, soon()).unwrap_err());
    // A part of the second, and none of those behind it.
    is_over(broker.host(tools(), soon()).unwrap_err());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| is_over(broker.host(tools(), soon()).unwrap_err()));
            scope.spawn(|| is_over(broker.ask_for(&search, soon()).unwrap_err()));
        }
    });
    drop(stopped);
    // The part is made whole before what comes next.
    assert_eq!(broker.ask(&Request::Metrics).unwrap(), BrokerReply::Metrics("here".into()));
    // The search, that it is withdrawn, a large one, and the last.
    assert_eq!(brokers.asked(), 4);
}

fn a_broker_whose_answer_nobody_took_still_takes_a_large_request() {
    let brokers = Brokers::with("at-length", &[Life::AnswersAtLength]);
    let broker = Broker::start(&brokers.options()).unwrap();
    let over = Patience::until(Instant::now());
    assert!(matches!(broker.ask_for(&Request::Metrics, over), Err(BrokerError::OutOfTime { .. })));
    // It waits until its answer is taken, and reads nothing before.
    eventually("it answers", || brokers.asked() == 1);
    let intent = "x".repeat(LENGTH);
    let large = Request::SearchTools { principal: "a".into(), intent, k: 1 };
    match broker.ask(&large).unwrap() {
        BrokerReply::Metrics(text) => assert_eq!(text.len(), LENGTH),
        other => panic!("{other:?}"),
    }
}

// A service's

fn a_lost_broker_comes_back_and_runs_that_were_calling_say_so() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let mut serves = desk.serves(&["--config", "forge.toml"]);
    serves.stderr(fs::File::create(desk.path("said")).unwrap());
    let service = Service::listening(serves.spawn().unwrap(), desk.socket());
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&three_in_flight()).await.unwrap();
        eventually("three calls are in flight", || lines(&log, "never") == 3);
        // One that calls nothing.
        let other = client.submit(&endless()).await.unwrap();
        stands(&client, "both run", |status| status["runs"]["running"] == 2).await;
        let broker = broker_pid(&status(&client).await).unwrap();
        let servers: Vec<i32> = Process::children_of(broker).iter().map(|it| it.pid).collect();
        assert!(!servers.is_empty());
        kill(broker);
        let lost = report(&run.finish().await.unwrap());
        assert_eq!((&lost["status"], &lost["kind"]), (&"internal".into(), &"broker_lost".into()));
        let calls = lost["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 3, "{lost:#}");
        assert!(calls.iter().all(|call| call["status"] == "unsettled"), "{lost:#}");
        // Whoever comes meanwhile waits for the next. On a slow host it takes
        // longer than anybody waits.
        let until = Instant::now() + Duration::from_secs(60);
        let mut next = report(&client.run(&hashes()).await.unwrap());
        while next["kind"] == "broker_away" && Instant::now() < until {
            next = report(&client.run(&hashes()).await.unwrap());
        }
        assert_eq!(next["status"], "ok", "{next:#}");
        let standing = status(&client).await;
        assert_eq!(
            (&standing["state"], &standing["broker"]["restarts"]),
            (&"serving".into(), &1.into())
        );
        assert_ne!(broker_pid(&standing), Some(broker));
        let said = fs::read_to_string(desk.path("said")).unwrap();
        let lost = said.lines().find(|line| line.contains("the toolbroker is lost")).unwrap();
        let which = format!("pid={broker} how=\"signal: 9 (SIGKILL)\"");
        assert!(lost.contains(&which), "{lost}");
        assert_eq!(standing["runs"]["running"], 1, "the other goes on: {standing:#}");
        other.canceller().cancel().await;
        assert_eq!(report(&other.finish().await.unwrap())["status"], "cancelled");
        for server in servers {
            eventually("its tool server is gone with it", || is_gone(server));
        }
        let Reply::Metrics(text) = client.ask(Question::Metrics).await.unwrap() else { panic!() };
        assert!(text.contains("\nforge_broker_up 1\n"), "{text}");
        assert!(text.contains("\nforge_broker_restarts_total 1\n"), "{text}");
    });
    let listed = desk.forge(&["journal", "list", "--state", "state", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let states: Vec<_> = listed.as_array().unwrap().iter().map(|call| &call["state"]).collect();
    assert_eq!(states, ["unknown", "unknown", "unknown", "ended"], "{listed:#}");
}

fn a_broker_that_stands_still_costs_a_run_its_time_and_no_more() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    let in_half_a_second = |mut order: Order| {
        order.limits.wall_ms = 500;
        order
    };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        // The journal stands.
        assert_eq!(report(&client.run(&hashes()).await.unwrap())["status"], "ok");
        let calling = Order {
            limits: RunLimits { wall_ms: 8_000, ..RunLimits::default() },
            ..three_in_flight()
        };
        let calling = client.submit(&calling).await.unwrap();
        eventually("three calls are in flight", || lines(&log, "never") == 3);
        let broker = broker_pid(&status(&client).await).unwrap();
        signal_to(broker, libc::SIGSTOP);
        // Who calls nothing does not notice.
        assert_eq!(report(&client.run(&submit(ECHO, "1")).await.unwrap())["status"], "ok");
        for order in [hashes(), three_in_flight()] {
            let late = report(&client.run(&in_half_a_second(order)).await.unwrap());
            assert_eq!((&late["status"], &late["kind"]), (&"limit".into(), &"deadline".into()));
        }
        let Reply::Metrics(text) = client.ask(Question::Metrics).await.unwrap() else { panic!() };
        assert!(text.contains("\nforge_broker_up 0\n"), "{text}");
        let said = status(&client).await["broker"]["reason"].as_str().map(str::to_owned);
        let said = said.unwrap_or_default();
        assert!(said.contains(&format!("`kill -CONT {broker}` if it was stopped")), "{said}");
        signal_to(broker, libc::SIGCONT);
        // What it had called comes to the disk first.
        let held = report(&calling.finish().await.unwrap());
        assert_eq!((&held["status"], &held["kind"]), (&"limit".into(), &"deadline".into()));
        let next = report(&client.run(&hashes()).await.unwrap());
        assert_eq!(next["status"], "ok", "{next:#}");
        let standing = status(&client).await;
        assert_eq!(standing["broker"]["restarts"], 0, "{standing:#}");
        assert_eq!(broker_pid(&standing), Some(broker));
    });
}

fn a_journal_that_takes_nothing_is_said_until_it_does() {
    let desk = desk();
    let service = desk.serve(&[]);
    let (there, away) = (desk.path("state/journal"), desk.path("state/journal.away"));
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        assert_eq!(report(&client.run(&hashes()).await.unwrap())["status"], "ok");
        assert_eq!(status(&client).await["state"], "serving");
        fs::rename(&there, &away).unwrap();
        eventually("no call is recorded", || {
            let run =
                forge_client::blocking::Client::connect(&service.socket).unwrap().run(&hashes());
            report(&run.unwrap())["status"] != "ok"
        });
        let standing = status(&client).await;
        let reason = standing["broker"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("journal cannot be written"), "{standing:#}");
        assert_eq!(standing["state"], "recovering");
        fs::rename(&away, &there).unwrap();
        // Without a run that would find it out.
        stands(&client, "it takes records again", |status| status["state"] == "serving").await;
        assert_eq!(status(&client).await["broker"]["reason"], Value::Null);
        assert_eq!(report(&client.run(&hashes()).await.unwrap())["status"], "ok");
    });
}

fn a_broker_that_cannot_come_back_is_said_and_comes_back_when_it_can() {
    let desk = desk();
    fs::write(desk.path("forge.toml"), "").unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        assert_eq!(report(&client.run(&hashes()).await.unwrap())["status"], "ok");
        fs::write(desk.path("forge.toml"), "[servers.none]\nnonsense = 1").unwrap();
        kill(broker_pid(&status(&client).await).unwrap());
        stands(&client, "it is said", |status| {
            status["state"] == "recovering"
                && status["broker"]["reason"]
                    .as_str()
                    .is_some_and(|it| it.contains("configuration"))
        })
        .await;
        let refused = report(&client.run(&hashes()).await.unwrap());
        assert_eq!(
            (&refused["status"], &refused["kind"]),
            (&"refused".into(), &"broker_away".into())
        );
        assert!(refused["retry_after_ms"].as_u64().unwrap() >= 1, "{refused:#}");
        let question = Question::ListTools { principal: "local".into() };
        let refused = client.ask(question.clone()).await.unwrap_err();
        assert!(matches!(refused, ClientError::Refused { kind: RefusalKind::Away, .. }));
        // Runs that call nothing need none.
        assert_eq!(report(&client.run(&submit(ECHO, "[7]")).await.unwrap())["output"], "[7]");
        fs::write(desk.path("forge.toml"), "").unwrap();
        stands(&client, "it is there again", |status| status["state"] == "serving").await;
        assert_eq!(report(&client.run(&hashes()).await.unwrap())["status"], "ok");
        client.ask(question).await.unwrap();
    });
}
