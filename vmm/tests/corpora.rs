//! The fuzz corpora, on stable: every kept input still does what its name
//! says, and every corpus holds one that is accepted.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../fuzz/src/lib.rs"]
mod fuzz;

use std::fs;
use std::path::{Path, PathBuf};

use fuzz::{Outcome, TARGETS, Target};

fn corpus(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target.name)
}

fn file_name(outcome: Outcome, name: &str) -> String {
    format!("{outcome:?}-{name}").to_lowercase()
}

#[test]
fn every_corpus_holds_an_accepted_input_and_each_input_does_what_its_name_says() {
    for target in &TARGETS {
        let mut accepted = 0;
        for file in fs::read_dir(corpus(target)).unwrap() {
            let path = file.unwrap().path();
            let outcome = (target.check)(&fs::read(&path).unwrap());
            let name = path.file_name().unwrap().to_str().unwrap();
            let says = format!("{outcome:?}-").to_lowercase();
            assert!(name.starts_with(&says), "{} was {outcome:?}", path.display());
            accepted += u32::from(outcome == Outcome::Accepted);
        }
        assert!(accepted > 0, "{}: nothing in its corpus is accepted", target.name);
    }
}

#[test]
fn the_corpora_hold_todays_seeds() {
    for target in &TARGETS {
        for seed in (target.seeds)() {
            let path = corpus(target).join(file_name(seed.outcome, seed.name));
            assert!(
                fs::read(&path).is_ok_and(|bytes| bytes == seed.bytes),
                "{} is not what the code makes today; if that is meant, write it with \
                 `cargo test -p forge-vmm --test corpora -- --ignored`",
                path.display(),
            );
        }
    }
}

#[test]
#[ignore = "writes the seeds into fuzz/corpus"]
fn write_the_seeds() {
    for target in &TARGETS {
        fs::create_dir_all(corpus(target)).unwrap();
        for seed in (target.seeds)() {
            fs::write(corpus(target).join(file_name(seed.outcome, seed.name)), seed.bytes).unwrap();
        }
    }
}
