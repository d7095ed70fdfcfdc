//! An MCP server for tests of whoever calls tools: slow, silent, crashing,
//! oversized and curious.
//!
//! It trusts its caller and nothing depends on it. Deliberately absent is any
//! use outside tests: `echo_env` tells its credentials to whoever asks.
//!
//! `--changed` lists `echo` with another description, as a server does that
//! was updated; `--log FILE` appends the name of every tool that is called,
//! before it does anything, so that a test sees what arrived.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rmcp::handler::server::router::tool::ToolRouter;
use rmcp::handler::server::wrapper::{Json, Parameters};
use rmcp::{ErrorData, ServerHandler, ServiceExt as _, tool, tool_handler, tool_router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};

#[derive(Deserialize, JsonSchema)]
struct Echo {
    /// What to say back.
    text: String,
}

#[derive(Serialize, JsonSchema)]
struct Echoed {
    /// What was said.
    text: String,
}

#[derive(Deserialize, JsonSchema)]
struct Slow {
    /// How long to take, in milliseconds.
    ms: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Barrier {
    /// How many calls must have arrived before any of them is answered.
    n: usize,
}

#[derive(Serialize, JsonSchema)]
struct Passed {
    /// How many had arrived.
    arrived: usize,
}

#[derive(Deserialize, JsonSchema)]
struct Big {
    /// How many bytes of text to answer with.
    bytes: usize,
}

#[derive(Serialize, JsonSchema)]
struct Environment {
    /// Every variable of this process.
    variables: BTreeMap<String, String>,
}

#[derive(Clone)]
struct Server {
    log: Option<Arc<PathBuf>>,
    arrived: Arc<Mutex<watch::Sender<usize>>>,
    tool_router: ToolRouter<Self>,
}

impl Server {
    fn new(log: Option<PathBuf>, changed: bool) -> Self {
        let mut tool_router = Self::tool_router();
        if changed {
            if let Some(route) = tool_router.map.get_mut("echo") {
                route.attr.description = Some("Says it back, and tells everybody.".into());
            }
        }
        Self { log: log.map(Arc::new), arrived: Arc::default(), tool_router }
    }

    fn called(&self, tool: &str) {
        if let Some(log) = &self.log {
            let line = format!("{tool}\n");
            let written = std::fs::File::options()
                .append(true)
                .create(true)
                .open(log.as_path())
                .and_then(|mut file| file.write_all(line.as_bytes()));
            if let Err(error) = written {
                eprintln!("forge-test-server: {}: {error}", log.display());
            }
        }
    }
}

#[tool_router]
impl Server {
    /// Says it back.
    #[tool]
    async fn echo(&self, Parameters(Echo { text }): Parameters<Echo>) -> Json<Echoed> {
        self.called("echo");
        Json(Echoed { text })
    }

    /// Answers after a while.
    #[tool]
    async fn slow(&self, Parameters(Slow { ms }): Parameters<Slow>) -> String {
        self.called("slow");
        tokio::time::sleep(Duration::from_millis(ms)).await;
        self.called("slow ended");
        format!("{ms} ms")
    }

    /// Never answers.
    #[tool]
    async fn never(&self) -> String {
        self.called("never");
        std::future::pending().await
    }

    /// Answers once `n` calls have arrived.
    #[tool]
    async fn barrier(&self, Parameters(Barrier { n }): Parameters<Barrier>) -> Json<Passed> {
        self.called("barrier");
        let mut arrivals = {
            let arrived = self.arrived.lock().await;
            arrived.send_modify(|count| *count += 1);
            arrived.subscribe()
        };
        let arrived = arrivals.wait_for(|count| *count >= n).await.map_or(0, |count| *count);
        Json(Passed { arrived })
    }

    /// Tells its environment.
    #[tool]
    async fn echo_env(&self) -> Json<Environment> {
        self.called("echo_env");
        Json(Environment { variables: std::env::vars().collect() })
    }

    /// Answers with much text.
    #[tool]
    async fn big(&self, Parameters(Big { bytes }): Parameters<Big>) -> String {
        self.called("big");
        "x".repeat(bytes)
    }

    /// Fails, and says so with a credential in its words.
    #[tool]
    async fn fail(&self) -> Result<String, ErrorData> {
        self.called("fail");
        let token = std::env::var("TEST_TOKEN").unwrap_or_default();
        Err(ErrorData::internal_error(format!("failed with token <{token}>"), None))
    }

    /// Gives an error result, as tools do.
    #[tool]
    async fn refuse(&self) -> Result<String, String> {
        self.called("refuse");
        Err("not today".to_owned())
    }

    /// Ends this process.
    #[tool]
    async fn crash(&self) -> String {
        self.called("crash");
        std::process::exit(3)
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Server {}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut log, mut changed) = (None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--log" => log = args.next().map(PathBuf::from),
            "--changed" => changed = true,
            other => return Err(format!("unknown argument {other:?}").into()),
        }
    }
    let service = Server::new(log, changed).serve(rmcp::transport::stdio()).await?;
    service.waiting().await?;
    Ok(())
}
