//! How many instructions a step of each path takes, counted by valgrind: a
//! figure that no neighbour on the machine changes, and by which a change of
//! one percent shows.
//!
//! `cargo bench -p forge-benches --bench instructions`. It starts itself under
//! `valgrind --tool=callgrind` for each path; without valgrind it says that it
//! was skipped. Counts belong to one compiler and one kind of CPU (valgrind
//! offers the program no AVX-512): compare those of one machine.
//!
//! The crates made for this want a runner of exactly their own version to be
//! installed first. This wants valgrind.

use std::io;
use std::process::{Command, ExitCode};

use forge_benches::{Entry, Path, entries};

/// The argument that has one path gone, to be counted.
const COUNTED: &str = "--counted";
/// Steps before the count begins, so that buffers have grown and pages are
/// there.
const WARM_UP: usize = 20;
const STEPS: usize = 100;

/// What callgrind counts: it collects while this function runs, found by its
/// name.
#[inline(never)]
fn forge_counted_steps(path: &mut dyn Path) -> Result<(), String> {
    (0..STEPS).try_for_each(|_| path.step())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let chosen = |name: &String| entries().into_iter().find(|entry| entry.name == *name);
    let done = match &arguments[..] {
        [_, flag, name] if flag == COUNTED => match chosen(name) {
            Some(entry) => go(entry),
            None => Err(format!("there is no path {name:?}")),
        },
        // What `cargo test` passes to a bench without a harness.
        [_, rest @ ..] if rest.iter().any(|argument| argument == "--test") => {
            entries().into_iter().try_for_each(go)
        }
        _ => count_all(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn go(entry: Entry) -> Result<(), String> {
    let named = |error| format!("{}: {error}", entry.name);
    let mut path = (entry.make)().map_err(named)?;
    (0..WARM_UP).try_for_each(|_| path.step()).map_err(named)?;
    forge_counted_steps(&mut *path).map_err(named)
}

fn count_all() -> Result<(), String> {
    match Command::new("valgrind").arg("--version").output() {
        Ok(version) => print!("{}", String::from_utf8_lossy(&version.stdout)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("SKIPPED: valgrind is not installed");
            return Ok(());
        }
        Err(error) => return Err(format!("valgrind: {error}")),
    }
    println!("{:>14}  path", "instructions");
    for entry in entries() {
        println!("{:>14.0}  {}", count(entry.name)?, entry.name);
    }
    Ok(())
}

/// Instructions of one step.
fn count(name: &str) -> Result<f64, String> {
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg("--toggle-collect=*forge_counted_steps*")
        .arg(this)
        .args([COUNTED, name])
        .output()
        .map_err(|error| format!("valgrind: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    // "==4711== Collected : 123456"
    let collected = said
        .lines()
        .find_map(|line| line.split_once("Collected : ")?.1.trim().parse::<f64>().ok())
        .filter(|collected| output.status.success() && *collected > 0.0)
        .ok_or_else(|| format!("{name}: valgrind counted nothing:\n{said}"))?;
    Ok(collected / STEPS as f64)
}
