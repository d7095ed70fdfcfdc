//! The warehouse and its token. (These tests also make `cargo test` build the
//! program where others look for it.)

#![allow(clippy::unwrap_used, missing_docs)]

use std::process::Stdio;

use rmcp::ServiceExt as _;
use rmcp::model::{CallToolRequestParams, CallToolResult};
use rmcp::transport::TokioChildProcess;
use serde_json::json;
use tokio::process::Command;

fn server(token: Option<&str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inventory-server"));
    command.env_remove("INVENTORY_TOKEN");
    if let Some(token) = token {
        command.env("INVENTORY_TOKEN", token);
    }
    command
}

async fn stock(token: &str) -> CallToolResult {
    let server = TokioChildProcess::new(server(Some(token))).unwrap();
    let client = ().serve(server).await.unwrap();
    let arguments = json!({"part_id": "P-1001"}).as_object().unwrap().clone();
    let call = CallToolRequestParams::new("get_stock").with_arguments(arguments);
    let answer = client.call_tool(call).await.unwrap();
    client.cancel().await.unwrap();
    answer
}

#[tokio::test]
async fn it_does_not_start_without_a_token_and_says_what_to_do() {
    let output = server(None).stdin(Stdio::null()).output().await.unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("INVENTORY_TOKEN is not set"));
}

#[tokio::test]
async fn the_right_token_opens_the_warehouse() {
    let answer = stock("demo-inventory-token").await;
    assert_ne!(answer.is_error, Some(true));
    assert_eq!(answer.structured_content.unwrap()["available"], 480);
}

#[tokio::test]
async fn a_wrong_token_gets_an_error_and_no_stock() {
    let answer = stock("wrong").await;
    assert_eq!(answer.is_error, Some(true));
    assert!(answer.structured_content.is_none());
}
