//! The programs that these tests start beside `forge-vmm`.

#![allow(dead_code, reason = "each test binary uses its own part")]

#[path = "built.rs"]
mod built;

use std::path::Path;
use std::sync::Once;

/// The program under test.
pub const FORGE: &str = env!("CARGO_BIN_EXE_forge-vmm");

/// Of other packages, and in the same folder.
const OTHERS: [&str; 2] = ["forge-toolbroker", "forge-test-server"];

/// The folder that has them all, built if need be.
pub fn folder() -> &'static Path {
    folder_with(&OTHERS)
}

/// The same with these, always the same ones in one test binary.
pub fn folder_with(others: &[&str]) -> &'static Path {
    static BUILT: Once = Once::new();
    let folder = Path::new(FORGE).parent().unwrap();
    BUILT.call_once(|| built::built(folder, others));
    folder
}

/// The configuration of the inventory of the examples.
pub fn inventory() -> serde_json::Value {
    let programs = folder_with(&["forge-toolbroker", "inventory-server"]);
    serde_json::json!({"mcpServers": {"inventory": {
        "command": programs.join("inventory-server"),
        "env": {"INVENTORY_TOKEN": "demo-inventory-token"},
    }}})
}
