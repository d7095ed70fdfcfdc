//! What a package installs beside the command: completions and manual pages,
//! both from the flags themselves.

use std::io::Write as _;
use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::args::{Args, CompletionsArgs, ManArgs};
use super::{CliError, Exit, out};

/// The command's name.
const NAME: &str = "forge-vmm";

/// Prints a shell's completions.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<ExitCode, CliError> {
    // Into memory first: the library does not expect a reader that leaves.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), NAME, &mut script);
    let script = match args.shell {
        Shell::Bash => of_one_name(&String::from_utf8_lossy(&script)),
        _ => String::from_utf8_lossy(&script).into_owned(),
    };
    out().write_all(script.as_bytes())?;
    Ok(Exit::Ok.into())
}

/// clap_complete 4.6 spells a command's name with a hyphen in two ways in bash's
/// script: where it notes which subcommand it has come to, and where it completes
/// that one's words.
fn of_one_name(script: &str) -> String {
    script.replace("forge__subcmd__vmm", "forge__vmm")
}

/// Writes a page for each command.
pub(crate) fn man(args: &ManArgs) -> Result<ExitCode, CliError> {
    clap_mangen::generate_to(Args::command(), &args.folder)
        .map_err(|source| CliError::File { path: args.folder.display().to_string(), source })?;
    Ok(Exit::Ok.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_completes_the_words_of_every_subcommand_that_it_comes_to() {
        let mut script = Vec::new();
        clap_complete::generate(Shell::Bash, &mut Args::command(), NAME, &mut script);
        let script = of_one_name(&String::from_utf8_lossy(&script));
        let noted: Vec<_> = script
            .lines()
            .filter_map(|line| line.trim().strip_prefix("cmd=\"")?.strip_suffix('"'))
            .filter(|name| !name.is_empty())
            .collect();
        assert!(noted.len() > 20, "{noted:?}");
        for name in noted {
            let case = format!("{name})");
            assert!(script.lines().any(|line| line.trim() == case), "{name}");
        }
    }
}
