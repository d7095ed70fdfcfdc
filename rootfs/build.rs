//! Builds the guest, always in the same way: profile `guest`, a target
//! directory of its own, none of the outer build's flags or wrappers, and no
//! path of this machine in the result. Clippy, fuzzers and profiles of the
//! host never change what runs in the VM, and two clean builds are the same
//! bytes.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use sha2::{Digest, Sha256};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What the guest is made of; anything else leaves it as it is.
const SOURCES: [&str; 8] = [
    "Cargo.toml",
    "Cargo.lock",
    "protocol/Cargo.toml",
    "protocol/src",
    "guest-kernel",
    "guest-init/Cargo.toml",
    "guest-init/src",
    "rootfs/build.rs",
];

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), Box<dyn Error>> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let workspace = manifest.parent().ok_or("rootfs is not in a workspace")?;
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", workspace.join(source).display());
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let elf = build_guest(workspace, &guest_target_dir(&out)?)?;
    let bytes = fs::read(&elf)?;

    let image = out.join("guest.elf");
    fs::write(&image, &bytes)?;
    let mut digest = String::new();
    for byte in Sha256::digest(&bytes) {
        write!(digest, "{byte:02x}")?;
    }
    println!("cargo::rustc-env=FORGE_GUEST_ELF={}", image.display());
    println!("cargo::rustc-env=FORGE_GUEST_SHA256={digest}");
    Ok(())
}

/// Beside the outer build's profile folders, so that they all share one guest
/// build: `target/debug/build/forge-rootfs-…/out` → `target/forge-guest`.
fn guest_target_dir(out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let build = out.ancestors().find(|path| path.file_name().is_some_and(|name| name == "build"));
    let target = build.and_then(Path::parent).and_then(Path::parent);
    Ok(target.ok_or("OUT_DIR is not below a target directory")?.join("forge-guest"))
}

fn build_guest(workspace: &Path, target_dir: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let link_script = workspace.join("guest-kernel/link.ld");
    let cargo_home = env::var("CARGO_HOME")
        .or_else(|_| env::var("HOME").map(|home| format!("{home}/.cargo")))
        .unwrap_or_default();
    let mut flags: Vec<String> = [
        // Ring 3 of an empty address space: fixed addresses, nothing to
        // relocate, no unwinding.
        "-Crelocation-model=static",
        "-Cforce-unwind-tables=no",
        // Detecting a vector backend costs CPUID exits, assuming one breaks on
        // hosts that lack it, and guests have no AVX. SHA-256, which hashes
        // whole programs, does ask: its instructions need no AVX.
        "--cfg=curve25519_dalek_backend=\"serial\"",
        "--cfg=sha2_512_backend=\"soft\"",
        "-Clink-arg=-nostartfiles",
        "-Clink-arg=-nostdlib",
        "-Clink-arg=-static",
        "-Clink-arg=-no-pie",
        "-Clink-arg=-Wl,--gc-sections,--build-id=none,-z,norelro",
        // The precompiled core names them; panic=abort never calls them.
        "-Clink-arg=-Wl,--defsym=rust_eh_personality=0,--defsym=_Unwind_Resume=0",
    ]
    .map(String::from)
    .to_vec();
    flags.push(format!("-Clink-arg=-Wl,-T,{}", link_script.display()));
    flags.push(format!("--remap-path-prefix={}=/forge", workspace.display()));
    if !cargo_home.is_empty() {
        flags.push(format!("--remap-path-prefix={cargo_home}=/cargo"));
    }

    let mut cargo = Command::new(env::var("CARGO")?);
    // What the outer build set for itself stays outside; what says where
    // cargo and rustc are stays.
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
    cargo
        .current_dir(workspace)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_INCREMENTAL", "0")
        .args(["build", "--locked", "--package", "forge-guest-init", "--bin", "forge-guest"])
        .args(["--no-default-features", "--features", "guest", "--profile", "guest"])
        // Named, so that the flags above reach the guest and not its build
        // scripts.
        .args(["--target", TARGET, "--target-dir"])
        .arg(target_dir);
    let output = cargo.output()?;
    if !output.status.success() {
        return Err(format!(
            "the guest did not build:\n{}",
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    Ok(target_dir.join(TARGET).join("guest").join("forge-guest"))
}
