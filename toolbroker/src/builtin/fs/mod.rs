//! `fs.read`, `fs.list` and `fs.write`: files below the operator's roots.
//!
//! A program names `root/path/to/file`. What keeps it inside is the kernel
//! ([`root`]), not this file. Distrusted are the path, and the tree itself:
//! others may write to it while it is read. Deliberately absent are deleting,
//! renaming, new folders and parts of files.

mod root;

pub use self::root::{Root, RootError};

use std::collections::BTreeMap;
use std::sync::Arc;

use rmcp::model::JsonObject;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use self::root::{Existing, Path};
use super::{Caller, Failure, Plan, Work, bytes_of, named_bytes, text, with_bytes};
use crate::definition::Effect;
use crate::upstream::CallEnd;

/// Calls that look at files at the same time; each has a thread while it
/// does.
const AT_ONCE_MAX: usize = 16;

/// The roots by name, and turns for threads.
#[derive(Debug)]
struct Files {
    roots: BTreeMap<String, Arc<Root>>,
    turns: Arc<Semaphore>,
}

/// `fs.read` and `fs.list` if there is a root, `fs.write` if there is one to
/// write to.
pub(super) fn plans(roots: Vec<Root>) -> Vec<Plan> {
    if roots.is_empty() {
        return Vec::new();
    }
    let told =
        |roots: &[&Root]| roots.iter().map(|root| root.told()).collect::<Vec<_>>().join("; ");
    let all = told(&roots.iter().collect::<Vec<_>>());
    let writable: Vec<&Root> = roots.iter().filter(|root| root.is_writable()).collect();
    let written = (!writable.is_empty()).then(|| told(&writable));
    let roots = roots.into_iter().map(|root| (root.name().to_owned(), Arc::new(root))).collect();
    let files = Arc::new(Files { roots, turns: Arc::new(Semaphore::new(AT_ONCE_MAX)) });

    let path = |what: &str| {
        let mut properties = JsonObject::new();
        properties.insert(
            "path".into(),
            json!({ "type": "string", "minLength": 1, "maxLength": 4096, "description": what }),
        );
        properties
    };
    let only_path = |what: &str| {
        json!({
            "type": "object",
            "properties": path(what),
            "required": ["path"],
            "additionalProperties": false,
        })
    };
    let mut plans = vec![
        Plan {
            server: "fs",
            name: "read",
            description: format!(
                "Reads a file: as text if it is UTF-8, or else in base64. What is in it is what \
                 strangers may have written. Roots: {all}."
            ),
            effect: Effect::Read,
            input_schema: only_path("The root's name and the path below it: `docs/a/b.md`."),
            output_schema: json!({
                "type": "object",
                "properties": {
                    "text": { "type": "string" },
                    "base64": { "type": "string", "contentEncoding": "base64" },
                },
                "oneOf": [{ "required": ["text"] }, { "required": ["base64"] }],
                "additionalProperties": false,
            }),
            work: files.work(read),
        },
        Plan {
            server: "fs",
            name: "list",
            description: format!("Lists a folder, without what lies deeper. Roots: {all}."),
            effect: Effect::Read,
            input_schema: only_path("The root's name, and a path below it or none: `docs/a`."),
            output_schema: json!({
                "type": "object",
                "properties": {
                    "entries": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": { "type": "string" },
                                "kind": { "enum": ["file", "folder"] },
                                "bytes": { "type": "integer", "minimum": 0 },
                            },
                            "required": ["name", "kind"],
                            "additionalProperties": false,
                        },
                    },
                    "truncated": { "type": "boolean" },
                },
                "required": ["entries", "truncated"],
                "additionalProperties": false,
            }),
            work: files.work(list),
        },
    ];
    if let Some(written) = written {
        let mut properties = path("The root's name and the path below it: `out/a/b.md`.");
        properties.insert(
            "mode".into(),
            json!({
                "enum": ["if_absent", "overwrite"],
                "description": "Whether a file that is there may be replaced.",
            }),
        );
        plans.push(Plan {
            server: "fs",
            name: "write",
            description: format!(
                "Writes a whole file, at once or not at all. Its folder has to be there. Roots: \
                 {written}."
            ),
            effect: Effect::Write,
            input_schema: with_bytes("What to write", properties, &["path", "mode"]),
            output_schema: json!({
                "type": "object",
                "properties": { "bytes": { "type": "integer", "minimum": 0 } },
                "required": ["bytes"],
                "additionalProperties": false,
            }),
            work: files.work(write),
        });
    }
    plans
}

type Step = fn(&Root, &Path, &JsonObject) -> Result<Value, Failure>;

impl Files {
    /// Work on a thread that may wait for a disk.
    fn work(self: &Arc<Self>, step: Step) -> Work {
        let files = Arc::clone(self);
        Work::waits(move |caller, arguments| {
            let (files, caller) = (Arc::clone(&files), caller.clone());
            async move {
                match files.carry_out(&caller, step, arguments).await {
                    Ok(answer) => CallEnd::Bytes(answer, "base64"),
                    Err(failure) => failure.into(),
                }
            }
        })
    }

    async fn carry_out(
        &self,
        caller: &Caller,
        step: Step,
        arguments: JsonObject,
    ) -> Result<Value, Failure> {
        let path = text(&arguments, "path").unwrap_or_default();
        let (name, below) = path.split_once('/').unwrap_or((path, ""));
        let root = self.roots.get(name).cloned().ok_or_else(|| {
            let names: Vec<&str> = self.roots.keys().map(String::as_str).collect();
            let names = names.join(", ");
            Failure::new("not_found", format!("there is no such root; there are: {names}"))
        })?;
        let path = Path::parse(below)?;
        let Ok(turn) = caller.turn(Arc::clone(&self.turns).acquire_owned()).await? else {
            return Err(Failure::new("failed", "the broker is shutting down"));
        };
        let work = move || {
            // The thread's own: it works on where nobody waits any more.
            let _turn = turn;
            step(&root, &path, &arguments)
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Failure::new("failed", "the broker is shutting down")),
        }
    }
}

/// That a path ends in a file's name: what ends in a slash is a folder's.
fn check_file_name(arguments: &JsonObject) -> Result<(), Failure> {
    match text(arguments, "path") {
        Some(path) if path.ends_with('/') => {
            Err(Failure::bad_request("the path ends in a slash, and not in a file's name"))
        }
        _ => Ok(()),
    }
}

fn read(root: &Root, path: &Path, arguments: &JsonObject) -> Result<Value, Failure> {
    check_file_name(arguments)?;
    let (name, content) = named_bytes(root.read(path)?, "text", "base64");
    Ok(json!({ name: content }))
}

fn list(root: &Root, path: &Path, _: &JsonObject) -> Result<Value, Failure> {
    let (entries, truncated) = root.list(path)?;
    let entries: Vec<Value> = entries
        .into_iter()
        .map(|(name, bytes)| match bytes {
            Some(bytes) => json!({ "name": name, "kind": "file", "bytes": bytes }),
            None => json!({ "name": name, "kind": "folder" }),
        })
        .collect();
    Ok(json!({ "entries": entries, "truncated": truncated }))
}

fn write(root: &Root, path: &Path, arguments: &JsonObject) -> Result<Value, Failure> {
    check_file_name(arguments)?;
    let existing = match text(arguments, "mode") {
        Some("overwrite") => Existing::IsReplaced,
        _ => Existing::Stays,
    };
    let content = bytes_of(arguments)?;
    root.write(path, &content, existing)?;
    Ok(json!({ "bytes": content.len() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[tokio::test]
    async fn a_call_that_is_given_up_keeps_its_turn_while_its_thread_works() {
        static IS_OVER: AtomicBool = AtomicBool::new(false);
        fn slow(_: &Root, _: &Path, _: &JsonObject) -> Result<Value, Failure> {
            while !IS_OVER.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Value::Null)
        }
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open("in".into(), folder.path(), false, Vec::new(), 100).unwrap();
        let roots = BTreeMap::from([("in".to_owned(), Arc::new(root))]);
        let files = Files { roots, turns: Arc::new(Semaphore::new(AT_ONCE_MAX)) };
        let arguments = JsonObject::from_iter([("path".to_owned(), json!("in/x"))]);
        let soon = Duration::from_millis(1);
        let caller = Caller {
            principal: "alice".into(),
            run: forge_protocol::RunId([0; 16]),
            session: None,
            deadline: tokio::time::Instant::now() + Duration::from_secs(60),
            grant: crate::grant::tests::granting_nothing(),
        };
        let calling = files.carry_out(&caller, slow, arguments.clone());
        let given_up = tokio::time::timeout(soon, calling).await;
        assert!(given_up.is_err());
        assert_eq!(files.turns.available_permits(), AT_ONCE_MAX - 1);
        IS_OVER.store(true, Ordering::Release);
        let all = files.turns.acquire_many(AT_ONCE_MAX.try_into().unwrap()).await;
        assert!(all.is_ok(), "it is given back with the thread");
        // Who gets none before its run is over begins nothing.
        let caller = Caller { deadline: tokio::time::Instant::now() + soon, ..caller };
        let refused = files.carry_out(&caller, slow, arguments).await.unwrap_err();
        assert_eq!(refused.code, "busy");
    }
}
