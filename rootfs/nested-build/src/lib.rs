//! Builds an executable of this workspace within a build, for a build script
//! that embeds it: with a profile, flags and a target folder of its own, none
//! of the outer build's flags or wrappers, and no path of this machine in the
//! result. Clippy, fuzzers and profiles of the host never change what comes
//! out, and two clean builds are the same bytes.
//!
//! Deliberately absent: anything that only one of its users needs. How an
//! executable is linked its own build script says.

#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What is built for; named, so that flags reach the executable and not its
/// build scripts.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The folder of the outermost build, below which nested ones have theirs. An
/// executable that embeds another finds the one that is there.
const TARGET_DIR: &str = "FORGE_NESTED_TARGET_DIR";

/// An executable to be built.
#[derive(Clone, Debug)]
pub struct Executable<'a> {
    /// The package's name.
    pub package: &'a str,
    /// The executable's name, and that of its target folder.
    pub name: &'a str,
    /// The profile, of the workspace's `Cargo.toml`.
    pub profile: &'a str,
    /// Features that are turned on, in place of the default ones.
    pub features: &'a [&'a str],
    /// What rustc is given.
    pub flags: &'a [&'a str],
    /// Files and folders of the workspace that it is made of; anything else
    /// leaves it as it is.
    pub sources: &'a [&'a str],
}

impl Executable<'_> {
    /// Builds it, for the build script of the package in this folder of the
    /// workspace; gives back where it is.
    ///
    /// # Errors
    /// What cargo said.
    pub fn build(&self, workspace: &Path) -> Result<PathBuf, Box<dyn Error>> {
        for source in self.sources {
            println!("cargo::rerun-if-changed={}", workspace.join(source).display());
        }
        let above = target_dir()?;
        let target_dir = above.join(self.name);
        let mut cargo = Command::new(env::var("CARGO")?);
        forget_outer_build(&mut cargo);
        let features = self.features.join(",");
        cargo
            .current_dir(workspace)
            .env(TARGET_DIR, &above)
            .env("CARGO_ENCODED_RUSTFLAGS", self.rustflags(workspace))
            .env("CARGO_INCREMENTAL", "0")
            .args(["build", "--locked", "--package", self.package, "--bin", self.name])
            .args(["--no-default-features", "--features", &features, "--profile", self.profile])
            .args(["--target", TARGET, "--target-dir"])
            .arg(&target_dir);
        let output = cargo.output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} did not build:\n{said}", self.name).into());
        }
        Ok(target_dir.join(TARGET).join(self.profile).join(self.name))
    }

    fn rustflags(&self, workspace: &Path) -> String {
        let mut flags: Vec<String> = self.flags.iter().map(|&flag| flag.into()).collect();
        flags.push(format!("--remap-path-prefix={}=/forge", workspace.display()));
        let cargo_home = env::var("CARGO_HOME")
            .or_else(|_| env::var("HOME").map(|home| format!("{home}/.cargo")))
            .unwrap_or_default();
        if !cargo_home.is_empty() {
            flags.push(format!("--remap-path-prefix={cargo_home}=/cargo"));
        }
        flags.join("\u{1f}")
    }
}

/// A build script's whole `main`: what failed is told as it is, with the lines
/// that cargo wrote.
pub fn script(build: impl FnOnce() -> Result<(), Box<dyn Error>>) -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Beside the outer build's profile folders, so that they all share what is
/// built here: `target/debug/build/PACKAGE-…/out` → `target`.
fn target_dir() -> Result<PathBuf, Box<dyn Error>> {
    if let Some(outer) = env::var_os(TARGET_DIR) {
        return Ok(outer.into());
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let build = out.ancestors().find(|path| path.file_name().is_some_and(|name| name == "build"));
    let target = build.and_then(Path::parent).and_then(Path::parent);
    Ok(target.ok_or("OUT_DIR is not below a target directory")?.to_owned())
}

/// What the outer build set for itself stays outside; what says where cargo
/// and rustc are stays.
fn forget_outer_build(cargo: &mut Command) {
    for (name, _) in env::vars() {
        let kept = ["CARGO", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_TERM_COLOR"];
        let outer = ["CARGO", "RUST", "DEP_", "LLVM_PROFILE", "CC_", "CFLAGS"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        let toolchain = name.starts_with("CARGO_REGISTR") || name.starts_with("CARGO_HTTP");
        let rustup = name.starts_with("RUSTUP_");
        if outer && !kept.contains(&name.as_str()) && !toolchain && !rustup {
            cargo.env_remove(name);
        }
    }
    for name in ["TARGET", "HOST", "OUT_DIR", "OPT_LEVEL", "PROFILE", "DEBUG", "NUM_JOBS"] {
        cargo.env_remove(name);
    }
}
