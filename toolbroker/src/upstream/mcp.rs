//! A connection to an MCP server, whatever carries it: its tools, listed and
//! listed again, and its calls.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use forge_protocol::name::ToolName;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, ClientConfig, Implementation,
    JsonObject, PaginatedRequestParams,
};
use rmcp::service::{ClientInitializeError, NotificationContext, RunningService, ServiceError};
use rmcp::{ClientHandler, RoleClient};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::stdio::Process;
use super::{CallEnd, ERROR_TEXT_BYTES_MAX};
use crate::definition::{Listed, Tool};
use crate::secret::Scrubber;

/// How long a listing may take once the server is up.
const LIST_TIME_MAX: Duration = Duration::from_secs(10);

/// Tools one server may list.
const TOOLS_MAX: usize = 2_000;
/// Pages its list may have.
const PAGES_MAX: usize = 200;

/// A server that is up.
#[derive(Debug)]
pub struct Connection {
    server: String,
    service: RunningService<RoleClient, Handler>,
    pub(super) process: Process,
    scrubber: Scrubber,
    tools: StdMutex<Arc<Vec<Arc<Tool>>>>,
    /// How many changes the server had announced when its tools were listed.
    listed_at_change: AtomicU64,
    /// Set before a caller hears that its call was lost, so that its next one
    /// is not sent the same way.
    lost: AtomicBool,
    pub(super) since: Instant,
}

impl Connection {
    /// A connection that is up and has listed nothing yet.
    pub(super) fn new(
        server: String,
        service: RunningService<RoleClient, Handler>,
        process: Process,
        scrubber: Scrubber,
    ) -> Self {
        Self {
            server,
            service,
            process,
            scrubber,
            tools: StdMutex::default(),
            listed_at_change: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            since: Instant::now(),
        }
    }

    /// Whether no call can be sent any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lost.load(Ordering::Acquire)
            || self.service.is_closed()
            || self.service.is_transport_closed()
            || self.process.has_exited()
    }

    /// Its tools.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&self.tools.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One of its tools.
    #[must_use]
    pub fn tool(&self, name: &ToolName) -> Option<Arc<Tool>> {
        self.tools().iter().find(|tool| tool.name() == name).cloned()
    }

    /// Whether the server said that its tools changed since they were listed.
    pub(super) fn is_stale(&self) -> bool {
        let announced = self.service.service().changes.load(Ordering::Acquire);
        announced != self.listed_at_change.load(Ordering::Acquire)
    }

    /// Asks for the list of tools, page by page, and takes it over.
    pub(super) async fn list(&self) -> Result<(), String> {
        let announced = self.service.service().changes.load(Ordering::Acquire);
        let mut listed = Vec::new();
        let pages = async {
            let mut cursor = None;
            for _ in 0..PAGES_MAX {
                let params = PaginatedRequestParams::default().with_cursor(cursor);
                let page = self.service.list_tools(Some(params)).await.map_err(|error| {
                    let error = self.scrubber.text(&error.to_string());
                    format!("tools/list failed: {}", crate::cut(&error, ERROR_TEXT_BYTES_MAX))
                })?;
                listed.extend(page.tools);
                if listed.len() > TOOLS_MAX {
                    return Err(format!("it lists more than {TOOLS_MAX} tools"));
                }
                cursor = page.next_cursor;
                if cursor.is_none() {
                    return Ok(());
                }
            }
            Err(format!("its list of tools has more than {PAGES_MAX} pages"))
        };
        timeout(LIST_TIME_MAX, pages).await.unwrap_or_else(|_| {
            Err(format!("tools/list took more than {} s", LIST_TIME_MAX.as_secs()))
        })?;

        let mut tools: Vec<Arc<Tool>> = Vec::with_capacity(listed.len());
        for tool in listed {
            let name = tool.name.into_owned();
            let listed = Listed {
                name: name.clone(),
                description: tool.description.map(|text| self.scrubber.text(&text)),
                input_schema: self.clean(tool.input_schema),
                output_schema: tool.output_schema.map(|schema| self.clean(schema)),
            };
            match Tool::new(&self.server, listed) {
                Ok(tool) if tools.iter().any(|other| other.name() == tool.name()) => {
                    tracing::warn!(server = self.server, tool = ?name, "tool listed twice");
                }
                Ok(tool) => tools.push(Arc::new(tool)),
                Err(error) => {
                    let (tool, error) = (crate::cut(&name, 256), error.to_string());
                    tracing::warn!(server = self.server, ?tool, ?error, "tool left out");
                }
            }
        }
        tools.sort_by(|a, b| a.name().cmp(b.name()));
        *self.tools.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(tools);
        self.listed_at_change.store(announced, Ordering::Release);
        Ok(())
    }

    fn clean(&self, schema: Arc<JsonObject>) -> JsonObject {
        let clean = |(key, value)| (key, self.scrubber.json(value));
        Arc::unwrap_or_clone(schema).into_iter().map(clean).collect()
    }

    /// Calls a tool and waits for its end, however long. Dropping the future
    /// tells the server that nobody waits any more.
    pub async fn call(&self, tool: &Tool, arguments: JsonObject) -> CallEnd {
        let params =
            CallToolRequestParams::new(tool.name().tool().to_owned()).with_arguments(arguments);
        let failed = |text: &str| CallEnd::Failed(json!({ "error": text }));
        match self.service.call_tool_once(params).await {
            Ok(CallToolResponse::Complete(result)) => {
                let is_error = result.is_error == Some(true);
                let content = serde_json::to_value(&result.content).unwrap_or(Value::Null);
                if is_error {
                    let text: Vec<&str> = result
                        .content
                        .iter()
                        .filter_map(|block| block.as_text().map(|text| text.text.as_str()))
                        .collect();
                    let mut error = json!({ "error": text.join("\n"), "content": content });
                    if let Some(structured) = result.structured_content {
                        error["structuredContent"] = structured;
                    }
                    return CallEnd::Failed(self.scrubber.json(error));
                }
                let response = result.structured_content.unwrap_or(content);
                CallEnd::Answered(self.scrubber.json(response))
            }
            Ok(CallToolResponse::InputRequired(_)) => {
                failed("the tool asks its user for input, and a run has none")
            }
            Ok(CallToolResponse::Task(_)) => failed("the tool answers with a task: not supported"),
            Ok(_) => failed("the tool answers in a way this broker does not know"),
            Err(ServiceError::McpError(error)) => CallEnd::Failed(self.scrubber.json(json!({
                "error": error.message,
                "code": error.code.0,
                "data": error.data,
            }))),
            Err(ServiceError::UnexpectedResponse) => failed("the answer is no tool result"),
            // The request may or may not have reached the server.
            Err(_) => {
                self.lost.store(true, Ordering::Release);
                CallEnd::Lost
            }
        }
    }

    pub(super) async fn stop(&self) {
        self.service.cancellation_token().cancel();
        self.process.stop().await;
    }
}

/// What went wrong at the start, without the debug output of whole messages.
pub(super) fn start_error(error: &ClientInitializeError) -> String {
    match error {
        ClientInitializeError::ConnectionClosed(_) => "it closed its standard output".into(),
        ClientInitializeError::TransportError { .. } => "it closed its standard input".into(),
        ClientInitializeError::JsonRpcError(error) => {
            format!("it refused: {} ({})", error.message, error.code.0)
        }
        other => crate::cut(&other.to_string(), ERROR_TEXT_BYTES_MAX),
    }
}

/// The client's side of MCP: declines whatever a server asks.
#[derive(Debug, Default)]
pub(super) struct Handler {
    /// How often the server announced that its tools changed.
    changes: AtomicU64,
}

impl ClientHandler for Handler {
    fn get_info(&self) -> ClientConfig {
        let own = Implementation::new("forge-toolbroker", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), own)
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}
