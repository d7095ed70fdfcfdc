//! The office as a client sees it. (These tests also make `cargo test` build
//! the program where others look for it.)

#![allow(clippy::unwrap_used, missing_docs)]

use std::process::Stdio;

use rmcp::ServiceExt as _;
use rmcp::transport::TokioChildProcess;
use serde_json::Value;
use tokio::process::Command;

fn server(department: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_office-server"));
    command.arg(department);
    command
}

#[tokio::test]
async fn every_department_offers_the_tools_that_its_file_names() {
    let office: Value = serde_json::from_str(include_str!("../src/office.json")).unwrap();
    for (department, said) in office.as_object().unwrap() {
        let said = said["tools"].as_array().unwrap();
        let mut said: Vec<_> = said.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
        said.sort_unstable();
        let client = ().serve(TokioChildProcess::new(server(department)).unwrap()).await.unwrap();
        let tools = client.list_all_tools().await.unwrap();
        client.cancel().await.unwrap();
        let mut offered: Vec<_> = tools.iter().map(|tool| &*tool.name).collect();
        offered.sort_unstable();
        assert_eq!(offered, said, "{department}");
    }
}

#[tokio::test]
async fn a_department_that_there_is_not_is_refused_with_those_there_are() {
    let output = server("cellar").stdin(Stdio::null()).output().await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("billing"));
}
