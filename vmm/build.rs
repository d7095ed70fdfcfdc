//! Builds the executable that workers are forked from, always in the same way
//! (`forge_nested_build`), to be embedded; and notes which commit is built and
//! with which profile, for the bench to say beside its figures.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use forge_nested_build::Executable;

/// A fork has few mappings to copy then, and no library to find again.
const STATIC: &str = "-Ctarget-feature=+crt-static";

/// Zygote and workers, where the C library can be linked into them.
const WORKER: Executable<'_> = Executable {
    package: "forge-worker",
    name: "forge-worker",
    profile: "worker",
    features: &[],
    flags: &[
        STATIC,
        // Each segment starts at a large page, and so can have large pages of
        // its own (`zygote/text.rs`). A linker that knows only the first leaves
        // small pages at the segments' ends.
        "-Clink-arg=-Wl,-z,max-page-size=2097152",
        "-Clink-arg=-Wl,-z,separate-loadable-segments",
        "-Clink-arg=-Wl,--build-id=none",
    ],
    sources: &[
        "Cargo.toml",
        "Cargo.lock",
        "protocol/Cargo.toml",
        "protocol/src",
        "guest-kernel",
        "guest-init/Cargo.toml",
        "guest-init/src",
        "rootfs/Cargo.toml",
        "rootfs/build.rs",
        "rootfs/nested-build",
        "rootfs/src",
        "vmm/build.rs",
        "vmm/worker/Cargo.toml",
        "vmm/worker/src",
    ],
};

fn main() -> ExitCode {
    forge_nested_build::script(build)
}

fn build() -> Result<(), Box<dyn Error>> {
    note_commit_and_profile();
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let workspace = manifest.parent().ok_or("vmm is not in a workspace")?;
    let dynamic: Vec<&str> = WORKER.flags.iter().copied().filter(|it| *it != STATIC).collect();
    let is_static = has_libc_archive();
    println!("cargo::rustc-env=FORGE_WORKER_STATIC={is_static}");
    let worker = if is_static {
        WORKER
    } else {
        println!(
            "cargo::warning=the C compiler finds no libc.a (Fedora: glibc-static), so workers load \
             libc.so: a cold run takes some 50 us more"
        );
        Executable { flags: &dynamic, ..WORKER }
    };
    // A copy: the next outer build with another toolchain builds it anew.
    let embedded = PathBuf::from(env::var("OUT_DIR")?).join("forge-worker");
    std::fs::copy(worker.build(workspace)?, &embedded)?;
    println!("cargo::rustc-env=FORGE_WORKER_ELF={}", embedded.display());
    Ok(())
}

/// Whether the C library is there as an archive. Distributions that have it in
/// a package of its own do not install it with a compiler.
fn has_libc_archive() -> bool {
    // `cc` says the bare name of what it does not find.
    let said = Command::new("cc").arg("-print-file-name=libc.a").output();
    said.is_ok_and(|said| Path::new(String::from_utf8_lossy(&said.stdout).trim()).is_absolute())
}

fn note_commit_and_profile() {
    println!("cargo::rerun-if-changed=../.git/HEAD");
    println!("cargo::rerun-if-changed=../.git/logs/HEAD");
    let commit = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    let commit = commit.as_deref().map_or("unknown", str::trim);
    println!("cargo::rustc-env=FORGE_COMMIT={commit}");

    // `target/<profile>/build/forge-vmm-…/out`; cargo tells the name in no
    // other way.
    let out = env::var_os("OUT_DIR").map(PathBuf::from);
    let profile = out.as_deref().and_then(|out| out.ancestors().nth(3)).and_then(Path::file_name);
    let profile = profile.map_or_else(|| "unknown".into(), |name| name.to_string_lossy());
    println!("cargo::rustc-env=FORGE_PROFILE={profile}");
}
