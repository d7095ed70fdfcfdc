//! `forge-vmm bench`.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use forge_vmm::bench::{self, ENTRIES, Results};

use super::args::BenchArgs;
use super::{CliError, Exit, complain, print_json};

/// Measures.
pub(crate) fn bench(args: &BenchArgs) -> Result<ExitCode, CliError> {
    let names: Vec<&str> = match args.case.as_str() {
        "all" => ENTRIES.iter().map(|entry| entry.name).collect(),
        name if ENTRIES.iter().any(|entry| entry.name == name) => vec![name],
        name => {
            let known: Vec<&str> = ENTRIES.iter().map(|entry| entry.name).collect();
            return Err(CliError::Usage(format!(
                "there is no case {name:?}; there are all, {}",
                known.join(", ")
            )));
        }
    };
    let watched = io::stderr().is_terminal();
    let progress = |round: usize| {
        if watched {
            let _ = write!(io::stderr(), "\r… {round} of {} rounds", args.runs);
        }
    };
    let results = bench::run(&names, args.runs, progress);
    if watched {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
    match results {
        Ok(results) if args.json => print_json(&results)?,
        Ok(results) => print(&results)?,
        Err(error) => {
            complain(&error);
            return Ok(Exit::Unavailable.into());
        }
    }
    Ok(Exit::Ok.into())
}

fn print(results: &Results) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let host = &results.host;
    writeln!(
        out,
        "{}, {} threads, Linux {}, {}; commit {}; in us",
        host.cpu, host.threads, host.kernel, host.kvm, results.commit
    )?;
    writeln!(
        out,
        "{:<18} {:>5} {:>9} {:>9} {:>9} {:>9}  ratio",
        "case", "n", "p50", "p90", "p99", "max"
    )?;
    for result in &results.results {
        write!(
            out,
            "{:<18} {:>5} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            result.name, result.n, result.p50, result.p90, result.p99, result.max
        )?;
        match (result.ratio, result.ratio_of) {
            (Some(ratio), Some(floor)) => writeln!(out, "  {ratio:.2} x {floor}")?,
            _ => writeln!(out)?,
        }
    }
    Ok(())
}
