//! Files through a real broker: what a root and its patterns allow, and what
//! a tree that somebody else arranged does not give away.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::path::Path;

use forge_protocol::abi::CallCode;
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::{Broker, Worker};

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

/// A broker with roots `docs` (Markdown, for reading) and `out` (for writing
/// too) in this folder.
fn broker(folder: &Path) -> Broker {
    for name in ["docs", "out", "private"] {
        std::fs::create_dir(folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("docs/a.md"), "alpha").unwrap();
    std::fs::write(folder.join("docs/a.key"), "secret").unwrap();
    std::fs::write(folder.join("docs/bytes.md"), [0xFF, 0xFE]).unwrap();
    std::fs::write(folder.join("private/key.md"), "secret").unwrap();
    Broker::with_forge_toml(&format!(
        "[builtins.fs]\nroots = [\
         {{ name = 'docs', path = {:?}, patterns = ['**/*.md'] }}, \
         {{ name = 'out', path = {:?}, write = true, file_bytes_max = 1000 }}]",
        folder.join("docs"),
        folder.join("out"),
    ))
}

fn read(worker: &mut Worker, path: &str) -> Result<Value, Value> {
    call(worker, "fs.read", &json!({ "path": path }))
}

fn call(worker: &mut Worker, tool: &str, arguments: &Value) -> Result<Value, Value> {
    match worker.call(tool, arguments) {
        (None, said) => Ok(said),
        (Some(CallCode::ToolFailed), why) => Err(why["code"].clone()),
        (Some(code), why) => panic!("{code:?}: {why}"),
    }
}

#[test]
fn a_program_reads_lists_and_writes_files_below_its_roots() {
    let folder = tempfile::tempdir().unwrap();
    let mut broker = broker(folder.path());
    let mut worker = broker.run(&["fs.read", "fs.list", "fs.write"], limits());
    assert_eq!(read(&mut worker, "docs/a.md"), Ok(json!({ "text": "alpha" })));
    assert_eq!(read(&mut worker, "docs/bytes.md"), Ok(json!({ "base64": "//4=" })));
    let listed = call(&mut worker, "fs.list", &json!({ "path": "docs" })).unwrap();
    let expected = json!({ "entries": [
        { "name": "a.md", "kind": "file", "bytes": 5 },
        { "name": "bytes.md", "kind": "file", "bytes": 2 },
    ], "truncated": false });
    assert_eq!(listed, expected);

    let new = json!({ "path": "out/x", "text": "one", "mode": "if_absent" });
    assert_eq!(call(&mut worker, "fs.write", &new), Ok(json!({ "bytes": 3 })));
    assert_eq!(call(&mut worker, "fs.write", &new), Err(json!("exists")));
    let over = json!({ "path": "out/x", "base64": "//4=", "mode": "overwrite" });
    assert_eq!(call(&mut worker, "fs.write", &over), Ok(json!({ "bytes": 2 })));
    assert_eq!(std::fs::read(folder.path().join("out/x")).unwrap(), [0xFF, 0xFE]);
    assert_eq!(std::fs::read_dir(folder.path().join("out")).unwrap().count(), 1);
}

#[test]
fn no_path_leads_out_of_a_root() {
    let folder = tempfile::tempdir().unwrap();
    let mut broker = broker(folder.path());
    let link = |to: &str, at: &str| {
        std::os::unix::fs::symlink(to, folder.path().join(at)).unwrap();
    };
    link("../private", "docs/folder");
    link("../private/key.md", "docs/link.md");
    link("/proc/self", "docs/proc");
    std::fs::hard_link(folder.path().join("private/key.md"), folder.path().join("docs/hard.md"))
        .unwrap();
    let mut worker = broker.run(&["fs.read", "fs.write"], limits());
    for (path, code) in [
        ("docs/../private/key.md", "bad_request"),
        ("docs//private/key.md", "bad_request"),
        ("docs/./a.md", "bad_request"),
        ("docs/a.md/", "bad_request"),
        ("docs/folder/key.md", "not_allowed"),
        ("docs/link.md", "not_allowed"),
        ("docs/hard.md", "not_allowed"),
        ("docs/proc/environ.md", "not_allowed"),
        ("docs/a.key", "not_allowed"),
        ("docs", "not_allowed"),
        ("docs/none.md", "not_found"),
        ("private/key.md", "not_found"),
        ("/etc/passwd", "not_found"),
    ] {
        assert_eq!(read(&mut worker, path), Err(json!(code)), "{path}");
    }
    let into_docs = json!({ "path": "docs/new.md", "text": "x", "mode": "if_absent" });
    assert_eq!(call(&mut worker, "fs.write", &into_docs), Err(json!("not_allowed")));
    assert!(!folder.path().join("docs/new.md").exists());
}

#[test]
fn a_file_over_its_roots_limit_is_neither_read_nor_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut broker = broker(folder.path());
    std::fs::write(folder.path().join("out/large"), "x".repeat(1001)).unwrap();
    let mut worker = broker.run(&["fs.read", "fs.write"], limits());
    assert_eq!(read(&mut worker, "out/large"), Err(json!("too_large")));
    let large = json!({ "path": "out/new", "text": "x".repeat(1001), "mode": "overwrite" });
    assert_eq!(call(&mut worker, "fs.write", &large), Err(json!("too_large")));
    assert!(!folder.path().join("out/new").exists());
}

#[test]
fn without_a_root_to_write_to_there_is_no_tool_that_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut broker = Broker::with_forge_toml(&format!(
        "[builtins.fs]\nroots = [{{ name = 'docs', path = {:?} }}]",
        folder.path()
    ));
    let names: Vec<String> =
        broker.tools().iter().map(|tool| tool.name.as_str().to_owned()).collect();
    assert_eq!(names, ["crypto.hash", "fs.list", "fs.read"]);
    // Where on the host a root is, is nobody's business but the operator's.
    let told = format!("{:?}", broker.tools());
    assert!(!told.contains(folder.path().to_str().unwrap()), "{told}");
}
