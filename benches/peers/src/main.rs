//! forge-vmm and others, measured in one run, in turn, round by round; and
//! beside each figure what was done for it. See README.md.

#![forbid(unsafe_code)]

mod facts;
mod hyperlight;
mod memory;
mod wasmtime;

use std::ops::ControlFlow;
use std::process::ExitCode;

use forge_vmm::bench::{self, Entry, Results};

use facts::Facts;

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

struct Args {
    runs: usize,
    json: bool,
}

const USAGE: &str = "usage: benches/peers/run [--runs N] [--json]";

fn args() -> Result<Args, String> {
    let mut args = Args { runs: 100, json: false };
    let mut given = std::env::args().skip(1);
    while let Some(flag) = given.next() {
        match flag.as_str() {
            "--json" => args.json = true,
            "--runs" => {
                let runs = given.next().and_then(|runs| runs.parse().ok()).filter(|runs| *runs > 0);
                args.runs = runs.ok_or("--runs wants a number above 0")?;
            }
            other => return Err(format!("{other:?} is not known\n{USAGE}")),
        }
    }
    Ok(args)
}

fn main() -> ExitCode {
    match args().and_then(|args| measure(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peers: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Everything of ours but what has no counterpart elsewhere, and the peers.
fn entries() -> Vec<Entry> {
    let ours = bench::entries().into_iter().filter(|entry| entry.group != "exec");
    ours.chain(hyperlight::ENTRIES.iter().copied())
        .chain(wasmtime::ENTRIES.iter().copied())
        .collect()
}

fn measure(args: &Args) -> Result<(), String> {
    let entries = entries();
    let mut told = 0;
    let results = bench::run(&entries, args.runs, |progress| {
        let tenth = progress.done * 10 / progress.of.max(1);
        if tenth > told {
            told = tenth;
            eprintln!("{} %", tenth * 10);
        }
        ControlFlow::Continue(())
    });
    let results = results.ok_or("broken off")?;
    if args.json {
        print_json(&results)?;
    } else {
        print(&entries, &results);
    }
    let failed: Vec<_> =
        results.failed.iter().map(|it| format!("{}: {}", it.name, it.error)).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\npeers: ")) }
}

/// The bench's own JSON, and to each result what was done for it.
fn print_json(results: &Results) -> Result<(), String> {
    let mut json = serde_json::to_value(results).map_err(said)?;
    let outcomes = json.get_mut("results").and_then(serde_json::Value::as_array_mut);
    for outcome in outcomes.into_iter().flatten() {
        let name = outcome["name"].as_str().unwrap_or_default();
        outcome["facts"] = serde_json::to_value(facts::of(name)).map_err(said)?;
    }
    println!("{}", serde_json::to_string_pretty(&json).map_err(said)?);
    Ok(())
}

fn print(entries: &[Entry], results: &Results) {
    println!(
        "{}; commit {} ({}); disturbed {:.1} %\n",
        results.host,
        results.commit,
        results.profile,
        results.disturbed * 100.0
    );
    println!(
        "{:<26} {:>7} {:>4} {:>9} {:>9} {:>9}  {}",
        "case",
        "unit",
        "n",
        "p50",
        "p90",
        "p99",
        Facts::HEADINGS.join("  ")
    );
    for result in &results.results {
        let facts = facts::of(&result.name);
        let cells = Facts::HEADINGS.iter().zip(facts.map_or([None; 6], |facts| facts.cells()));
        let cells: Vec<String> = cells
            .map(|(heading, cell)| {
                let width = heading.chars().count();
                let text = cell.map_or("-", |yes| if yes { "yes" } else { "no" });
                format!("{text:<width$}")
            })
            .collect();
        println!(
            "{:<26} {:>7} {:>4} {:>9.1} {:>9.1} {:>9}  {}",
            result.name,
            result.unit,
            result.n,
            result.p50,
            result.p90,
            result.p99.map_or_else(|| "-".into(), |p99| format!("{p99:.1}")),
            cells.join("  ")
        );
    }
    println!();
    for entry in entries {
        println!("{:<26} {}", entry.name, entry.about);
    }
    for result in &results.results {
        if let Some(note) = &result.note {
            println!("{:<26} {note}", result.name);
        }
    }
}
