//! `forge-vmm probe`.

use std::io::{self, Write as _};
use std::process::ExitCode;

use forge_vmm::probe::{Jail, Probe, Standing};

use super::args::ProbeArgs;
use super::{CliError, Exit, out, print_json, progress};

/// Says what this host can do.
pub(crate) fn probe(args: &ProbeArgs) -> Result<ExitCode, CliError> {
    progress("booting a guest");
    let probe = Probe::run();
    if args.json {
        print_json(&probe)?;
    } else {
        print(&probe)?;
    }
    Ok(if probe.vm.booted && probe.jail.on.is_some() { Exit::Ok } else { Exit::Unavailable }.into())
}

fn print_jail(out: &mut impl io::Write, jail: &Jail) -> io::Result<()> {
    let Some(on) = &jail.on else {
        let reason = jail.reason.as_deref().unwrap_or_default();
        return writeln!(out, "jail    NO WORKER STARTS HERE: {reason}");
    };
    let user = match on.identity {
        Some(id) => format!("user {id}"),
        None => "this user".into(),
    };
    let landlock = match on.landlock_abi {
        Some(abi) => format!("Landlock {abi}"),
        None => "no Landlock".into(),
    };
    writeln!(
        out,
        "jail    workers are {user} to the host, in namespaces of their own with an empty root, \
         {landlock}, system-call filters",
    )?;
    for weak in &jail.weaknesses {
        writeln!(out, "weaker  {:<21} {}", weak.word, weak.text)?;
    }
    Ok(())
}

fn print(probe: &Probe) -> io::Result<()> {
    let mut out = out();
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
    print_jail(&mut out, &probe.jail)?;
    match (&probe.vm.boot_us, &probe.vm.reason) {
        (Some(us), _) if probe.jail.on.is_none() => {
            writeln!(out, "vm      a guest booted in {us} us, and no run can: no worker starts")?;
        }
        (Some(us), _) => writeln!(out, "vm      a guest booted in {us} us: isolation `vm` works")?,
        (None, Some(reason)) => writeln!(out, "vm      NO GUEST BOOTS HERE: {reason}")?,
        (None, None) => writeln!(out, "vm      no guest boots here")?,
    }
    match (&probe.process.ready_us, &probe.process.reason) {
        (Some(us), _) => writeln!(
            out,
            "process a worker stood ready in {us} us: isolation `process` works, on request, \
             and is weaker than `vm`"
        ),
        (None, reason) => {
            let reason = reason.as_deref().unwrap_or_default();
            writeln!(out, "process NO WORKER STARTS HERE: {reason}")
        }
    }
}
