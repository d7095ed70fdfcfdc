//! `forge-vmm bench`.

use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicI32, Ordering};

use forge_vmm::bench::compare::{self, Moved};
use forge_vmm::bench::{self, HostInfo, Progress, Results, plot};
use forge_vmm::jail::privileges;
use serde::Serialize;

use super::args::BenchArgs;
use super::{CliError, Exit, complain, out, print_json, read_file};

/// What `--json` prints: the results, and what moved if that was asked.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    results: &'a Results,
    #[serde(skip_serializing_if = "Option::is_none")]
    compared_with: Option<Old<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<&'a [Moved]>,
}

/// Where and of what the other figures are.
#[derive(Serialize)]
struct Old<'a> {
    host: &'a HostInfo,
    commit: &'a str,
    profile: &'a str,
    disturbed: f64,
}

impl<'a> Old<'a> {
    fn of(Results { host, commit, profile, disturbed, .. }: &'a Results) -> Self {
        Self { host, commit, profile, disturbed: *disturbed }
    }
}

/// Measures.
pub(crate) fn bench(args: &BenchArgs) -> Result<ExitCode, CliError> {
    if args.data.is_some() || args.what == RETRIEVAL {
        return retrieval(args);
    }
    let entries = bench::select(&args.what).ok_or_else(|| unknown(&args.what))?;
    // What cannot be read or written is said before minutes of measuring.
    let old = args.compare.as_deref().map(read_results).transpose()?;
    if let Some(folder) = &args.plot {
        fs::create_dir_all(folder).map_err(|source| file_error(folder, source))?;
    }
    heed_signals();
    // Hundreds of VMs are there at once, with two each. Where that is too many, it says so.
    let _ = privileges::raise_descriptors();
    let mut bar = Bar::new();
    let results = bench::run(&entries, args.runs, |progress| {
        bar.show(progress);
        match BROKEN_OFF_BY.load(Ordering::Relaxed) {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    });
    bar.clear();
    let Some(results) = results else {
        // What was measured in is gone now. The rest is what the signal does.
        // SAFETY: a plain system call.
        unsafe { libc::raise(BROKEN_OFF_BY.load(Ordering::Relaxed)) };
        return Ok(Exit::Failed.into());
    };
    for failure in &results.failed {
        complain(&format_args!("{}: {}", failure.name, failure.error));
    }
    let exit = if results.failed.is_empty() { Exit::Ok } else { Exit::Unavailable };
    if results.results.is_empty() && !args.json {
        return Ok(exit.into());
    }
    let moved = old.as_ref().map(|old| compare::compare(old, &results));
    if args.json {
        let compared_with = old.as_ref().map(Old::of);
        print_json(&Printed { results: &results, compared_with, compared: moved.as_deref() })?;
    } else {
        print(&results)?;
        if let (Some(old), Some(moved)) = (&old, &moved) {
            print_moved(old, &results, moved)?;
        }
    }
    if let Some(folder) = &args.plot
        && !results.results.is_empty()
    {
        draw(&results, folder)?;
    }
    Ok(exit.into())
}

/// The signal that the bench was broken off by.
static BROKEN_OFF_BY: AtomicI32 = AtomicI32::new(0);

extern "C" fn break_off(signal: libc::c_int) {
    BROKEN_OFF_BY.store(signal, Ordering::Relaxed);
}

/// Has the first SIGINT, SIGTERM or SIGHUP end the bench between two samples, so that
/// folders and processes that it measures in go with it. A second ends it at
/// once.
fn heed_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: all zero is a valid sigaction, to be written to.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `now` is writable, and nothing is set.
        unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) };
        // As under nohup.
        if now.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        // SAFETY: all zero is a valid sigaction, with an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = break_off as extern "C" fn(_) as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_RESETHAND;
        // SAFETY: the action is whole, and its handler stores a number.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// The one thing that is measured over data of the caller's.
const RETRIEVAL: &str = "retrieval";

fn retrieval(args: &BenchArgs) -> Result<ExitCode, CliError> {
    let Some(folder) = args.data.as_deref().filter(|_| args.what == RETRIEVAL) else {
        return Err(CliError::Usage(format!(
            "bench {RETRIEVAL} and --data DIR belong together: DIR has a folder for each set, with \
             tools.jsonl and queries.jsonl in it (the repository's examples/retrieval is one)"
        )));
    };
    if args.plot.is_some() || args.compare.is_some() {
        return Err(CliError::Usage(format!(
            "bench {RETRIEVAL} knows neither --plot nor --compare"
        )));
    }
    let sets = bench::retrieval::read(folder).map_err(CliError::Usage)?;
    let mut bar = Bar::new();
    let results = bench::retrieval::run(&sets, |progress| bar.show(progress));
    bar.clear();
    if args.json {
        print_json(&Printed { results: &results, compared_with: None, compared: None })?;
    } else {
        print(&results)?;
    }
    Ok(Exit::Ok.into())
}

fn unknown(what: &str) -> CliError {
    let all = bench::entries();
    let mut groups: Vec<&str> = Vec::new();
    for entry in &all {
        if !groups.contains(&entry.group) {
            groups.push(entry.group);
        }
    }
    let names: Vec<&str> = all.iter().map(|entry| entry.name).collect();
    CliError::Usage(format!(
        "there is nothing to measure called {what:?}; there are all, the groups {}, and each of {}",
        groups.join(", "),
        names.join(", ")
    ))
}

fn read_results(path: &Path) -> Result<Results, CliError> {
    compare::parse(&read_file(path)?)
        .map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))
}

fn file_error(path: &Path, source: io::Error) -> CliError {
    CliError::File { path: path.display().to_string(), source }
}

fn draw(results: &Results, folder: &Path) -> Result<(), CliError> {
    let Some(svg) = plot::latency(results) else {
        complain(&"nothing was sampled, so there is no picture");
        return Ok(());
    };
    let path = folder.join("latency.svg");
    fs::write(&path, svg).map_err(|source| file_error(&path, source))?;
    let _ = writeln!(io::stderr(), "forge-vmm: drawn: {}", path.display());
    Ok(())
}

/// A bar on standard error, for a person who watches.
struct Bar {
    watched: bool,
    columns: usize,
    /// The line that is on the terminal now.
    shown: String,
}

const BAR_CHARS: usize = 30;

impl Bar {
    fn new() -> Self {
        let watched = io::stderr().is_terminal();
        Self { watched, columns: columns(), shown: String::new() }
    }

    fn show(&mut self, Progress { what, done, of }: Progress) {
        let percent = done * 100 / of.max(1);
        let full = done * BAR_CHARS / of.max(1);
        let line = format!(
            "{}{} {percent:>3} %  {what}",
            "█".repeat(full),
            "░".repeat(BAR_CHARS.saturating_sub(full))
        );
        // One that wraps is not written over.
        let line: String = line.chars().take(self.columns.saturating_sub(1)).collect();
        // A terminal that is written to between samples costs the samples.
        if self.watched && line != self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K{line}");
            self.shown = line;
        }
    }

    fn clear(&self) {
        if self.watched {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// How wide the terminal at standard error is, as far as it says.
fn columns() -> usize {
    // SAFETY: numbers, all of which may be 0.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: `size` is writable, and what the request asks for.
    let asked = unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if asked == 0 && size.ws_col > 0 { usize::from(size.ws_col) } else { 80 }
}

/// The host and what was measured: the line above each table.
fn headline(results: &Results) -> String {
    let Results { host, commit, profile, disturbed, cpu_latency_us, .. } = results;
    let idle = match cpu_latency_us {
        Some(us) => format!("idle CPUs ready within {us} us"),
        None => "idle CPUs sleep".into(),
    };
    format!("{host}; commit {commit} ({profile}); {idle}; disturbed {:.1} %", disturbed * 100.0)
}

fn print(results: &Results) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", headline(results))?;
    let names = results.results.iter().map(|result| result.name.len());
    let width = names.max().unwrap_or_default().max(24);
    writeln!(
        out,
        "{:<width$} {:>11} {:>5} {:>9} {:>9} {:>9} {:>9} {:>7}  ratio",
        "case", "unit", "n", "p50", "p90", "p99", "max", "p99/p50"
    )?;
    for result in &results.results {
        write!(
            out,
            "{:<width$} {:>11} {:>5} {:>9} {:>9} {:>9} {:>9} {:>7}",
            result.name,
            result.unit,
            result.n,
            figure(result.p50),
            figure(result.p90),
            result.p99.map_or_else(|| "-".into(), figure),
            figure(result.max),
            result.tail().map_or_else(|| "-".into(), |tail| format!("{tail:.2}")),
        )?;
        match (result.ratio, &result.ratio_of) {
            (Some(ratio), Some(floors)) => writeln!(out, "  {ratio:.2} x ({floors})")?,
            _ => writeln!(out)?,
        }
        if let Some(note) = &result.note {
            writeln!(out, "    {note}")?;
        }
    }
    Ok(())
}

fn print_moved(old: &Results, new: &Results, moved: &[Moved]) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "\nold: {}\nnew: {}", headline(old), headline(new))?;
    if old.host != new.host {
        writeln!(out, "The hosts differ: only ratios to floors mean anything.")?;
    }
    if old.profile != new.profile {
        writeln!(out, "The builds differ: {} then, {} now.", old.profile, new.profile)?;
    }
    writeln!(
        out,
        "{:<24} {:>11} {:>9} {:>9} {:>9} {:>9} {:>8}  verdict",
        "case", "unit", "old", "new", "old ratio", "new ratio", "change"
    )?;
    let ratio =
        |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
    for moved in moved {
        writeln!(
            out,
            "{:<24} {:>11} {:>9} {:>9} {:>9} {:>9} {:>8}  {}",
            moved.name,
            moved.unit,
            figure(moved.old),
            figure(moved.new),
            ratio(moved.old_ratio),
            ratio(moved.new_ratio),
            change(moved.change),
            moved.verdict,
        )?;
    }
    let missing = |results: &Results, name: &str| !results.results.iter().any(|r| r.name == name);
    for (what, of, beside) in [("new", new, old), ("only in the old file", old, new)] {
        let names: Vec<&str> = of
            .results
            .iter()
            .map(|result| result.name.as_str())
            .filter(|name| missing(beside, name))
            .collect();
        if !names.is_empty() {
            writeln!(out, "{what}: {}", names.join(", "))?;
        }
    }
    Ok(())
}

/// By how much. From nothing it is by no part of that.
fn change(change: f64) -> String {
    if change.is_finite() { format!("{:+.1} %", (change - 1.0) * 100.0) } else { "-".into() }
}

/// A figure with about four digits.
fn figure(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.1}"),
        value if value >= 10.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}
