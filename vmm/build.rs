//! Notes which commit is built, for the bench to say beside its figures.

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
}
