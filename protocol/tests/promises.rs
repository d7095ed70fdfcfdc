//! `docs/SPECIFICATION.md` names the test that guards each promise: all of
//! them exist.

#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The names of all functions in the Rust sources below `folder`.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", "node_modules", ".git"].contains(&name.as_str()) {
                functions(&path, found);
            }
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).unwrap();
            for line in text.lines() {
                if let Some((_, rest)) = line.split_once("fn ")
                    && let Some((function, _)) = rest.split_once('(')
                {
                    found.insert(function.to_owned());
                }
            }
        }
    }
}

/// What stands in backquotes in the last column of the tables.
fn named(document: &str) -> Vec<&str> {
    let rows = document.lines().filter(|line| line.starts_with("| ") && line.ends_with(" |"));
    rows.filter_map(|row| row.trim_end_matches(" |").rsplit_once(" | "))
        .flat_map(|(_, guards)| guards.split('`').skip(1).step_by(2))
        .collect()
}

#[test]
fn every_promise_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let document = fs::read_to_string(root.join("docs/SPECIFICATION.md")).unwrap();
    let mut existing = BTreeSet::new();
    functions(&root, &mut existing);
    let names = named(&document);
    assert!(names.len() > 50, "the tables are no longer read");
    let missing: Vec<_> = names
        .into_iter()
        .filter(|name| match name.contains(['/', '=']) {
            true => !name.contains('=') && !root.join(name).exists(),
            false => !existing.contains(*name),
        })
        .collect();
    assert!(missing.is_empty(), "docs/SPECIFICATION.md names what is not there: {missing:#?}");
}
