//! Builds the guest, always in the same way (`forge_nested_build`), and notes
//! its digest.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forge_nested_build::Executable;
use sha2::{Digest, Sha256};

/// What the guest is made of.
const SOURCES: [&str; 9] = [
    "Cargo.toml",
    "Cargo.lock",
    "protocol/Cargo.toml",
    "protocol/src",
    "guest-kernel",
    "guest-init/Cargo.toml",
    "guest-init/src",
    "rootfs/build.rs",
    "rootfs/nested-build",
];

const FLAGS: [&str; 9] = [
    // Ring 3 of an empty address space: fixed addresses, nothing to relocate,
    // no unwinding.
    "-Crelocation-model=static",
    "-Cforce-unwind-tables=no",
    // Detecting a vector backend costs CPUID exits, assuming one breaks on
    // hosts that lack it, and guests have no AVX. The hash functions do ask, once
    // (`learn_the_cpu`): the instructions for SHA-256 need no AVX, and
    // sha2 0.11.1 has no way to keep SHA-512 alone from asking.
    "--cfg=curve25519_dalek_backend=\"serial\"",
    "-Clink-arg=-nostartfiles",
    "-Clink-arg=-nostdlib",
    "-Clink-arg=-static",
    "-Clink-arg=-no-pie",
    "-Clink-arg=-Wl,--gc-sections,--build-id=none,-z,norelro",
    // The precompiled core names them; panic=abort never calls them.
    "-Clink-arg=-Wl,--defsym=rust_eh_personality=0,--defsym=_Unwind_Resume=0",
];

fn main() -> ExitCode {
    forge_nested_build::script(build)
}

fn build() -> Result<(), Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let workspace = manifest.parent().ok_or("rootfs is not in a workspace")?;
    let bytes = fs::read(build_guest(workspace)?)?;

    let image = PathBuf::from(env::var("OUT_DIR")?).join("guest.elf");
    fs::write(&image, &bytes)?;
    let mut digest = String::new();
    for byte in Sha256::digest(&bytes) {
        write!(digest, "{byte:02x}")?;
    }
    println!("cargo::rustc-env=FORGE_GUEST_ELF={}", image.display());
    println!("cargo::rustc-env=FORGE_GUEST_SHA256={digest}");
    Ok(())
}

fn build_guest(workspace: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let script = workspace.join("guest-kernel/link.ld");
    let script = format!("-Clink-arg=-Wl,-T,{}", script.display());
    let guest = Executable {
        package: "forge-guest-init",
        name: "forge-guest",
        profile: "guest",
        features: &["guest"],
        flags: &[&FLAGS[..], &[&script]].concat(),
        sources: &SOURCES,
    };
    guest.build(workspace)
}
