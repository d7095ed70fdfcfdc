//! What a package installs beside the command: completions and manual pages,
//! both from the flags themselves.

use std::io::Write as _;
use std::process::ExitCode;

use clap::CommandFactory as _;

use super::args::{Args, CompletionsArgs, ManArgs};
use super::{CliError, Exit, out};

/// Prints a shell's completions.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode, CliError> {
    // Into memory first: the library does not expect a reader that leaves.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "forge-vmm", &mut script);
    out().write_all(&script)?;
    Ok(Exit::Ok.into())
}

/// Writes a page for each command.
pub(crate) fn man(args: &ManArgs) -> Result<ExitCode, CliError> {
    clap_mangen::generate_to(Args::command(), &args.folder)
        .map_err(|source| CliError::File { path: args.folder.display().to_string(), source })?;
    Ok(Exit::Ok.into())
}
