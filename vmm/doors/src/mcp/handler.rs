//! What MCP asks a server.

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CustomRequest, CustomResult,
    ErrorCode, GetPromptRequestParams, GetPromptResponse, Implementation, InitializeRequestParams,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams,
    ReadResourceResponse, ServerCapabilities, ServerConfig, SubscribeRequestParams, Tool,
    UnsubscribeRequestParams,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::result::failed;
use super::{Door, one_line, run, search, teach};

impl ServerHandler for Door {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        let ours = Implementation::new("forge-vmm", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(capabilities)
            .with_server_info(ours)
            .with_instructions(teach::INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        page: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        first(page)?;
        Ok(ListToolsResult::with_all_items(teach::tools().to_vec()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        teach::tools().iter().find(|tool| tool.name == name).cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        let result = match &*request.name {
            teach::SEARCH => match read(arguments) {
                Ok(arguments) => search::search(self, arguments, context).await,
                Err(result) => *result,
            },
            teach::RUN => match read(arguments) {
                Ok(arguments) => run::run(self, arguments, context).await,
                Err(result) => *result,
            },
            _ => {
                let what =
                    format!("there is no such tool: only {} and {}", teach::SEARCH, teach::RUN);
                return Err(ErrorData::invalid_params(what, None));
            }
        };
        Ok(result.into())
    }

    async fn list_resources(
        &self,
        page: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        first(page)?;
        Ok(ListResourcesResult::with_all_items(teach::resources()))
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(unreadable(&request).unwrap_or_else(|| no_method(&request.method)))
    }

    // Of capabilities that are absent: rmcp would answer with the name alone. To
    // `prompts/list` and `completion/complete` it answers with nothing, which the
    // conformance suite asks of every server.

    #[allow(deprecated, reason = "clients of the older protocol ask")]
    async fn set_level(
        &self,
        _: rmcp::model::SetLevelRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Err(no_method("logging/setLevel"))
    }

    async fn get_prompt(
        &self,
        _: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        Err(no_method("prompts/get"))
    }

    async fn subscribe(
        &self,
        _: SubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Err(no_method("resources/subscribe"))
    }

    async fn unsubscribe(
        &self,
        _: UnsubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Err(no_method("resources/unsubscribe"))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match teach::resource(&request.uri) {
            Some(read) => Ok(read.into()),
            None => Err(ErrorData::resource_not_found("there is no such resource", None)),
        }
    }
}

/// Refuses any page but the first: each list has one.
fn first(page: Option<PaginatedRequestParams>) -> Result<(), ErrorData> {
    match page.and_then(|page| page.cursor) {
        None => Ok(()),
        Some(_) => {
            let what = "there is no such cursor: what is listed without one is all there is";
            Err(ErrorData::invalid_params(what, None))
        }
    }
}

/// A method's name in a refusal, in characters.
const METHOD_CHARS_MAX: usize = 100;

fn no_method(name: &str) -> ErrorData {
    let what = format!("there is no method {:?}", one_line(name, METHOD_CHARS_MAX));
    ErrorData::new(ErrorCode::METHOD_NOT_FOUND, what, None)
}

/// rmcp takes a request whose params it cannot read for one of a method that it
/// does not know. What is wrong with them, if it is a method that is known here.
pub(super) fn unreadable(request: &CustomRequest) -> Option<ErrorData> {
    fn read<T: DeserializeOwned>(params: &Value) -> Result<(), serde_json::Error> {
        T::deserialize(params).map(drop)
    }
    let params = request.params.clone().unwrap_or_default();
    let read = match &*request.method {
        "initialize" => read::<InitializeRequestParams>(&params),
        "tools/call" => read::<CallToolRequestParams>(&params),
        "resources/read" => read::<ReadResourceRequestParams>(&params),
        "tools/list" | "resources/list" => read::<Option<PaginatedRequestParams>>(&params),
        _ => return None,
    };
    let why = read.err().map_or_else(String::new, |error| format!(": {error}"));
    let what = format!("the params of {} cannot be read{why}", request.method);
    Some(ErrorData::invalid_params(what, None))
}

/// A model can mend its arguments if it is told, so what is wrong with them is
/// a result and no error of the protocol.
fn read<T: DeserializeOwned>(arguments: Value) -> Result<T, Box<CallToolResult>> {
    let unfit = |error| Box::new(failed(&format!("arguments: {error}")));
    serde_json::from_value(arguments).map_err(unfit)
}
