//! What the host's procfs says of processes.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::time::{Duration, Instant};

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

/// Whether it has ended.
pub fn is_gone(pid: i32) -> bool {
    Process::of(pid).is_none_or(|it| it.zombie)
}

/// Whether it does something: its CPU time goes on.
pub fn is_busy(pid: i32) -> bool {
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<i64> =
            stat.rsplit(')').next()?.split(' ').filter_map(|it| it.parse().ok()).collect();
        // User and system time, counted without the letter of the state.
        Some(fields.get(10)? + fields.get(11)?)
    };
    let before = ticks();
    std::thread::sleep(Duration::from_millis(60));
    before.is_some() && ticks() > before
}

/// Everything that a process has started, and what that has. Who has ended and
/// was not looked at yet is none of them, as [`is_gone`] says.
pub fn descendants_of(pid: i32) -> Vec<i32> {
    let mut all = Process::all();
    all.retain(|it| !it.zombie);
    let mut found = vec![pid];
    let mut at = 0;
    while at < found.len() {
        let parent = found[at];
        found.extend(all.iter().filter(|it| it.parent == parent).map(|it| it.pid));
        at += 1;
    }
    found.split_off(1)
}

/// The workers among them, by the name that each gives itself.
pub fn workers_below(pid: i32) -> Vec<i32> {
    let name = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let mut found = descendants_of(pid);
    found.retain(|pid| name(*pid).trim() == "forge-worker");
    found
}

/// The one child of a process, whichever of its threads started it, whose
/// name starts like this.
pub fn child_named(parent: u32, name: &str) -> Option<u32> {
    let children: String = fs::read_dir(format!("/proc/{parent}/task"))
        .ok()?
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok())
        .collect();
    children.split_whitespace().filter_map(|id| id.parse().ok()).find(|id: &u32| {
        fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|line| line.starts_with(name.as_bytes()))
    })
}

/// The first worker of a supervisor: a child of its zygote.
pub fn worker_of(supervisor: u32) -> Option<u32> {
    child_named(child_named(supervisor, "forge-vmm-zygote")?, "forge-vmm-zygote")
}

/// Everything that is in a process's memory, guest RAM included. Pages that
/// were never touched are left out: there are many, and nothing is in them.
pub fn memory_of(process: u32) -> Vec<u8> {
    use std::os::unix::fs::FileExt as _;
    const PAGE: usize = 4096;
    /// Present or swapped (proc_pid_pagemap(5)).
    const THERE: u64 = 0b11 << 62;
    let file = |name| fs::File::open(format!("/proc/{process}/{name}")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let (memory, pagemap) = (file("mem"), file("pagemap"));
    let mut all = Vec::new();
    for line in maps.lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        if !rest.starts_with('r') {
            continue;
        }
        let (start, end) = range.split_once('-').unwrap();
        let address = |hex| usize::from_str_radix(hex, 16).unwrap();
        let (first, pages) = (address(start), (address(end) - address(start)) / PAGE);
        let mut entries = vec![0; pages * 8];
        let _ = pagemap.read_at(&mut entries, (first / PAGE * 8) as u64);
        for (number, entry) in entries.chunks_exact(8).enumerate() {
            if u64::from_le_bytes(entry.try_into().unwrap()) & THERE != 0 {
                let mut page = [0; PAGE];
                // What the kernel keeps to itself does not read.
                if memory.read_at(&mut page, (first + number * PAGE) as u64).is_ok() {
                    all.extend_from_slice(&page);
                }
            }
        }
    }
    all
}

pub fn contains(haystack: &[u8], needle: &str) -> bool {
    let needle = needle.as_bytes();
    haystack
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == needle[0])
        .any(|(at, _)| haystack[at..].starts_with(needle))
}

/// Looks until there is something.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}
