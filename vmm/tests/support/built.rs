//! Programs of other packages of this workspace, as tests need them: beside
//! the test's own, and not older than what they are made from.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

/// Makes sure that `folder`, where cargo puts this workspace's programs, has
/// these packages' up to date. A build of the whole workspace has made them
/// already; asking cargo again, for some packages alone, would resolve other
/// features and build their dependencies a second time.
pub fn built(folder: &Path, packages: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let newest = newest(root);
    let is_stale = |package: &&&str| modified(&folder.join(package)) <= newest;
    let stale = || packages.iter().filter(is_stale).collect::<Vec<_>>();
    if stale().is_empty() {
        return;
    }
    // Of the processes that find this, the first builds. Another that did so as well would
    // put the programs there anew while tests of the first start them.
    let lock = fs::File::create(folder.join(".tests-lock")).unwrap();
    lock.lock().unwrap();
    let stale = stale();
    if stale.is_empty() {
        return;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let mut build = Command::new(cargo);
    build
        .args(["build", "--quiet"])
        .args(stale.iter().flat_map(|package| ["-p", package]))
        .current_dir(root)
        .env("CARGO_TARGET_DIR", folder.parent().unwrap());
    if folder.ends_with("release") {
        build.arg("--release");
    }
    match build.status() {
        Ok(status) => assert!(status.success(), "{stale:?} do not build"),
        // A machine without cargo: they were brought along.
        Err(_) => {
            for package in stale {
                assert!(folder.join(package).is_file(), "{package} is missing, and so is cargo");
            }
            return;
        }
    }
    for package in stale {
        // Cargo leaves the time of what was up to date as it is. Not opened to be written:
        // nobody could start it meanwhile, nor this be done while it runs.
        let program = fs::File::open(folder.join(package));
        let _ = program.and_then(|program| program.set_modified(SystemTime::now()));
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|metadata| metadata.modified()).ok()
}

/// When anything that programs are made from was changed last.
fn newest(root: &Path) -> Option<SystemTime> {
    const SOURCES: [&str; 9] = [
        "Cargo.toml",
        "Cargo.lock",
        "protocol",
        "guest-kernel",
        "guest-init",
        "rootfs",
        "vmm",
        "toolbroker",
        "examples",
    ];
    let mut newest = None;
    let mut unseen: Vec<_> = SOURCES.iter().map(|name| root.join(name)).collect();
    while let Some(path) = unseen.pop() {
        let Ok(kind) = path.symlink_metadata() else { continue };
        if !kind.is_dir() {
            newest = newest.max(modified(&path));
            continue;
        }
        let name = path.file_name().unwrap_or_default();
        // Tests, their data and what foreign tools install is in no program.
        if ["tests", "benches", "programs", "node_modules"].iter().any(|n| name == *n) {
            continue;
        }
        let Ok(entries) = fs::read_dir(&path) else { continue };
        unseen.extend(entries.flatten().map(|entry| entry.path()));
    }
    newest
}
