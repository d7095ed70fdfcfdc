//! Tools that a caller hosts itself, through the real dispatcher: they pass
//! the same chain as any other.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Callable, GrantClaims, GrantedTool};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_toolbroker::call::{Dispatcher, Run, Taken};
use forge_toolbroker::config::Config;
use forge_toolbroker::definition::{Listed, Tool};
use forge_toolbroker::grant::Grant;
use forge_toolbroker::journal::{Journal, Place};
use forge_toolbroker::metrics::Metrics;
use forge_toolbroker::registry::Registry;
use forge_toolbroker::review::{Mode, Reviews};
use forge_toolbroker::upstream::hosted::{Callback, HostError, Hosted};
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Receiver;

fn listed(name: &str) -> Listed {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}},
                        "required": ["n"], "additionalProperties": false});
    Listed {
        name: name.into(),
        description: Some("Twice as much.".into()),
        input_schema: schema.as_object().unwrap().clone(),
        output_schema: None,
    }
}

/// A run that may call `app.twice`.
fn alone(id: u8) -> Run {
    let tool = Tool::new("app", listed("twice")).unwrap();
    let granted = GrantedTool {
        name: tool.name().clone(),
        definition_sha256: tool.sha256(),
        constraints: Vec::new(),
    };
    granting(id, vec![granted])
}

fn granting(id: u8, tools: Vec<GrantedTool>) -> Run {
    let claims = GrantClaims {
        principal: "alice".into(),
        tools,
        expires_unix_s: 0,
        calls_max: None,
        cost_max: None,
        session: None,
    };
    let grant = Arc::new(Grant::new(claims).unwrap());
    Run::new(RunId([id; 16]), [0; 32], Callable::Any, grant, RunLimits::default())
}

/// One whose caller hosts it and `app.other`.
fn run() -> (Arc<Run>, Receiver<Callback>) {
    let (hosted, callbacks) = Hosted::new("app", vec![listed("twice"), listed("other")]).unwrap();
    (Arc::new(alone(1).hosting(hosted)), callbacks)
}

async fn call(run: &Arc<Run>, tool: &str, request: Value) -> (Option<CallCode>, Value) {
    counted(run, tool, request, &Arc::default()).await
}

async fn counted(
    run: &Arc<Run>,
    tool: &str,
    request: Value,
    metrics: &Arc<Metrics>,
) -> (Option<CallCode>, Value) {
    let home = Handle::current();
    let registry = Arc::new(Registry::new(Config::default(), &home));
    // What a run's caller holds is not the operator's to review.
    let reviews = Arc::new(Reviews::open(Mode::Required, None).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::new(Place::Folder(folder.path().into()), Arc::clone(metrics));
    let dispatcher = Dispatcher::new(registry, reviews, journal, Arc::clone(metrics), home);
    let tool = ToolName::parse(tool).unwrap();
    let call = Call { id: 0, waits: true, tool, request: request.to_string().into_bytes() };
    let Settled { code, body, .. } = match dispatcher.take(run, call) {
        Taken::Settled(settled) => settled,
        Taken::Pending(call) => dispatcher.carry_out(call).await,
    };
    (code, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

#[tokio::test]
async fn a_caller_is_called_back_with_arguments_that_passed_the_chain() {
    let (run, mut callbacks) = run();
    let host = tokio::spawn(async move {
        let mut served = 0;
        while let Some(Callback { tool, arguments, answer }) = callbacks.recv().await {
            assert_eq!(tool.as_str(), "app.twice");
            served += 1;
            let n = arguments["n"].as_i64().unwrap();
            let outcome = match n {
                13 => Err(r#"{"name": "Unlucky"}"#.to_owned()),
                7 => Ok(format!("[{}0]", "0,".repeat(1 << 20))),
                n => Ok((2 * n).to_string()),
            };
            let _ = answer.send(outcome.map(String::into_bytes).map_err(String::into_bytes));
        }
        served
    });
    assert_eq!(call(&run, "app.twice", json!({"n": 21})).await, (None, json!(42)));
    let (code, error) = call(&run, "app.twice", json!({"n": 13})).await;
    assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("Unlucky")));
    let (code, why) = call(&run, "app.twice", json!({"n": 7})).await;
    assert_eq!(code, Some(CallCode::BadResponse));
    assert!(why["error"].as_str().unwrap().contains("values"), "{why}");
    for (tool, request, expected) in [
        ("app.twice", json!({"n": "x"}), CallCode::BadRequest),
        ("app.other", json!({"n": 1}), CallCode::Denied),
        ("app.none", json!({"n": 1}), CallCode::Denied),
    ] {
        assert_eq!(call(&run, tool, request).await.0, Some(expected), "{tool}");
    }
    drop(run);
    assert_eq!(host.await.unwrap(), 3, "what is refused is not called back");
}

#[tokio::test]
async fn a_caller_that_leaves_in_the_middle_leaves_the_outcome_unknown() {
    let (run, mut callbacks) = run();
    let host = tokio::spawn(async move { drop(callbacks.recv().await) });
    let (code, _) = call(&run, "app.twice", json!({"n": 1})).await;
    assert_eq!(code, Some(CallCode::OutcomeUnknown));
    host.await.unwrap();
    let (code, error) = call(&run, "app.twice", json!({"n": 1})).await;
    assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("Gone")));
}

#[tokio::test]
async fn no_name_that_a_caller_gives_its_tools_is_a_label() {
    let metrics = Arc::default();
    for (at, server) in ["mine", "yours"].into_iter().enumerate() {
        let (hosted, mut callbacks) = Hosted::new(server, vec![listed("twice")]).unwrap();
        let tools = hosted.tools();
        let granted = tools.iter().map(|tool| GrantedTool {
            name: tool.name().clone(),
            definition_sha256: tool.sha256(),
            constraints: Vec::new(),
        });
        let run = granting(7, granted.collect()).hosting(hosted);
        let host = async {
            let Callback { answer, .. } = callbacks.recv().await.unwrap();
            let _ = answer.send(Ok(b"2".to_vec()));
        };
        let (run, tool) = (Arc::new(run), format!("{server}.twice"));
        let calling = counted(&run, &tool, json!({"n": 1}), &metrics);
        assert_eq!(tokio::join!(calling, host).0, (None, json!(2)));
        let text = metrics.text();
        let counted = format!(r#"{{server="(hosted)",effect="write",end="ok"}} {}"#, at + 1);
        assert!(text.contains(&counted) && !text.contains(server), "{text}");
    }
}

#[tokio::test]
async fn another_runs_caller_is_not_called_back() {
    let (run, callbacks) = run();
    drop((run, callbacks));
    let alone = Arc::new(alone(2));
    assert_eq!(call(&alone, "app.twice", json!({"n": 1})).await.0, Some(CallCode::NoSuchTool));
}

#[test]
fn a_caller_takes_no_reserved_name_and_hosts_no_tool_twice() {
    assert!(matches!(Hosted::new("fs", Vec::new()), Err(HostError::Server { .. })));
    assert!(matches!(Hosted::new("A b", Vec::new()), Err(HostError::Server { .. })));
    let twice = vec![listed("same"), listed("same")];
    assert!(matches!(Hosted::new("app", twice), Err(HostError::Twice { .. })));
    let bad =
        Listed { input_schema: json!({"type": 7}).as_object().unwrap().clone(), ..listed("x") };
    assert!(matches!(Hosted::new("app", vec![bad]), Err(HostError::Tool { .. })));
}

#[test]
fn what_a_caller_hosts_is_bounded_before_anything_is_compiled_and_in_all() {
    let with = |at: usize, pattern: &str| {
        let schema = json!({"properties": {"x": {"pattern": pattern}}});
        Listed { input_schema: schema.as_object().unwrap().clone(), ..listed(&format!("t{at}")) }
    };
    let host =
        |count, pattern| Hosted::new("app", (0..count).map(|at| with(at, pattern)).collect());
    assert!(matches!(host(257, "("), Err(HostError::TooMany { got: 257 })));
    host(256, "^[a-z]{1,8}$").unwrap();
    let refused = host(64, "^.{1,255}$").unwrap_err().to_string();
    assert!(refused.contains("no room beside"), "{refused}");
}
