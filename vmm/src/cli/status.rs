//! `forge-vmm probe`.

use std::io::{self, Write as _};
use std::process::ExitCode;

use forge_vmm::probe::{Probe, Standing};

use super::args::ProbeArgs;
use super::{CliError, Exit, print_json, progress};

/// Says what this host can do.
pub(crate) fn probe(args: &ProbeArgs) -> Result<ExitCode, CliError> {
    progress("booting a guest");
    let probe = Probe::run();
    if args.json {
        print_json(&probe)?;
    } else {
        print(&probe)?;
    }
    Ok(if probe.vm.booted { Exit::Ok } else { Exit::Unavailable }.into())
}

fn print(probe: &Probe) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for finding in &probe.findings {
        let mark = match finding.standing {
            Standing::Ok => "ok     ",
            Standing::Advice => "advice ",
            Standing::Missing => "MISSING",
        };
        writeln!(out, "{mark} {:<12} {}", finding.name, finding.found)?;
        if finding.standing != Standing::Ok {
            writeln!(out, "        {:<12}   costs: {}", "", finding.cost)?;
            writeln!(out, "        {:<12}   fix:   {}", "", finding.fix)?;
        }
    }
    writeln!(out, "guest   {}", probe.guest_sha256)?;
    match (&probe.vm.boot_us, &probe.vm.reason) {
        (Some(us), _) => writeln!(out, "vm      a guest booted in {us} us: isolation `vm` works"),
        (None, Some(reason)) => writeln!(out, "vm      NO GUEST BOOTS HERE: {reason}"),
        (None, None) => writeln!(out, "vm      no guest boots here"),
    }
}
