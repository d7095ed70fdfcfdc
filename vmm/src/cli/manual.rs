//! What a package installs beside the command: completions and manual pages,
//! both from the flags themselves.

use std::fs;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

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
    let mut all = Args::command().disable_help_subcommand(true);
    all.build();
    for (file, page) in pages(&all) {
        let path = args.folder.join(file);
        fs::write(&path, page)
            .map_err(|source| CliError::File { path: path.display().to_string(), source })?;
    }
    Ok(Exit::Ok.into())
}

/// The pages of a command and of all below it, each with its file's name.
fn pages(command: &Command) -> Vec<(String, String)> {
    let below = command.get_subcommands().filter(|it| !it.is_hide_set());
    let mut all: Vec<_> = below.flat_map(pages).collect();
    let page = Man::new(command.clone());
    let mut text = Vec::new();
    // Into memory, which takes it all.
    let _ = page.render(&mut text);
    all.push((page.get_filename(), titled(&String::from_utf8_lossy(&text))));
    all
}

/// A page with a title line of its own (man(7)): clap_mangen 0.3 leaves out a date that it
/// has not, so that what comes behind is taken for one, and names a subcommand as the
/// source of its page.
fn titled(page: &str) -> String {
    let titled = page.lines().map(|line| match line.strip_prefix(".TH ") {
        Some(title) => {
            let name = title.split(' ').next().unwrap_or_default();
            format!(".TH {name} 1 \"\" \"{NAME} {}\"\n", env!("CARGO_PKG_VERSION"))
        }
        None => format!("{line}\n"),
    });
    titled.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_whose_it_is_and_what_variables_its_command_reads() {
        let mut all = Args::command().disable_help_subcommand(true);
        all.build();
        let pages = std::collections::BTreeMap::from_iter(pages(&all));
        let version = env!("CARGO_PKG_VERSION");
        for name in ["forge-vmm", "forge-vmm-grant-issue"] {
            let title = format!(".TH {name} 1 \"\" \"forge-vmm {version}\"");
            let page = &pages[&format!("{name}.1")];
            assert!(page.lines().any(|line| line == title), "{page}");
        }
        assert!(pages["forge-vmm-grant-issue.1"].contains("FORGE_STATE"));
        assert!(!pages.contains_key("forge-vmm-help.1"));
    }

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
