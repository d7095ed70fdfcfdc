//! What the host's procfs says of processes.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;

/// A process, as its `status` has it.
#[derive(Clone, Debug)]
pub struct Process {
    pub pid: i32,
    pub zombie: bool,
    pub parent: i32,
    pub threads: u64,
    /// Memory that it shares with nobody.
    pub anonymous_kib: u64,
}

impl Process {
    /// `None` if it is gone.
    pub fn of(pid: i32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.split_whitespace().next()?.to_owned())
        };
        let number = |name| field(name).and_then(|word| word.parse().ok()).unwrap_or(0);
        Some(Self {
            pid,

            zombie: field("State:")? == "Z",
            parent: number("PPid:") as i32,
            threads: number("Threads:"),
            anonymous_kib: number("RssAnon:"),
        })
    }

    pub fn all() -> Vec<Self> {
        let entries = fs::read_dir("/proc").unwrap();
        entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter_map(Self::of)
            .collect()
    }

    pub fn children_of(parent: i32) -> Vec<Self> {
        Self::all().into_iter().filter(|it| it.parent == parent).collect()
    }

    /// How many descriptors it has open, or as far as this user may know.
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }
}
