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
    static BUILT: Once = Once::new();
    let folder = Path::new(FORGE).parent().unwrap();
    BUILT.call_once(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
        let mut build = Command::new(cargo);
        build
            .args(["build", "--quiet"])
            .args(OTHERS.map(|package| ["-p", package]).as_flattened())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("CARGO_TARGET_DIR", folder.parent().unwrap());
        if folder.ends_with("release") {
            build.arg("--release");
        }
        match build.status() {
            Ok(status) => assert!(status.success(), "{OTHERS:?} do not build"),
            // A machine without cargo: they were brought along.
            Err(_) => {
                for name in OTHERS {
                    assert!(folder.join(name).is_file(), "{name} is missing, and so is cargo");
                }
            }
        }
    });
    folder
}
