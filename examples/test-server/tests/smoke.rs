//! The test server speaks MCP. (This test also makes `cargo test` build the
//! program where the broker's tests look for it.)

#![allow(clippy::unwrap_used, missing_docs)]

use rmcp::ServiceExt as _;
use rmcp::model::CallToolRequestParams;
use rmcp::transport::TokioChildProcess;
use tokio::process::Command;

#[tokio::test]
async fn every_page_of_tools_is_listed_and_echo_echoes() {
    let server = Command::new(env!("CARGO_BIN_EXE_forge-test-server"));
    let client = ().serve(TokioChildProcess::new(server).unwrap()).await.unwrap();
    assert_eq!(client.list_all_tools().await.unwrap().len(), 13);
    let mut arguments = serde_json::Map::new();
    arguments.insert("text".into(), "hello".into());
    let call = CallToolRequestParams::new("echo").with_arguments(arguments);
    let answer = client.call_tool(call).await.unwrap();
    assert_eq!(answer.structured_content.unwrap()["text"], "hello");
    client.cancel().await.unwrap();
}
