//! The programs that these tests start beside `forge-vmm`.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;
use std::process::Command;
use std::sync::Once;

/// The program under test.
pub const FORGE: &str = env!("CARGO_BIN_EXE_forge-vmm");

/// Of other packages, and in the same folder.
const OTHERS: [&str; 2] = ["forge-toolbroker", "forge-test-server"];

/// The folder that has them all, built if cargo is at hand to build them.
pub fn folder() -> &'static Path {
    folder_with(&OTHERS)
}

/// The same with these, always the same ones in one test binary.
pub fn folder_with(others: &[&str]) -> &'static Path {
    static BUILT: Once = Once::new();
    let folder = Path::new(FORGE).parent().unwrap();
    BUILT.call_once(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
        let mut build = Command::new(cargo);
        build
            .args(["build", "--quiet"])
            .args(others.iter().flat_map(|package| ["-p", package]))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("CARGO_TARGET_DIR", folder.parent().unwrap());
        if folder.ends_with("release") {
            build.arg("--release");
        }
        match build.status() {
            Ok(status) => assert!(status.success(), "{others:?} do not build"),
            // A machine without cargo: they were brought along.
            Err(_) => {
                for name in others {
                    assert!(folder.join(name).is_file(), "{name} is missing, and so is cargo");
                }
            }
        }
    });
    folder
}
