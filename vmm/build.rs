//! Notes which commit is built and with which profile, for the bench to say
//! beside its figures; and has the executable linked so that its code has
//! large pages of its own (`worker/code.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
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
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    let profile = out.as_deref().and_then(|out| out.ancestors().nth(3)).and_then(Path::file_name);
    let profile = profile.map_or_else(|| "unknown".into(), |name| name.to_string_lossy());
    println!("cargo::rustc-env=FORGE_PROFILE={profile}");

    // Each segment of the executable starts at a large page. A linker that
    // knows only the first leaves small pages at the code's ends.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,max-page-size=2097152");
    println!("cargo::rustc-link-arg-bins=-Wl,-z,separate-loadable-segments");
}
