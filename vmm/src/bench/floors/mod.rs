//! What the parts of a run take by themselves on this host, by the plainest means.

mod bare;
mod forked;
mod hops;
mod load;
mod process;

use std::fs::File;
use std::io::Write as _;
use std::time::Instant;

use super::fixture::Folder;
use super::{Case, Entry, Figure, Measure, said};

pub(super) const ENTRIES: &[Entry] = &[
    floor("floor_kvm", "bare KVM: create a VM, one slot, one vCPU, one exit", bare::kvm),
    floor("floor_kvm_destroy", "bare KVM: destroy that VM", bare::kvm_destroy),
    floor("floor_exit", "one bare VM exit by MMIO, and back", bare::exit),
    floor(
        "floor_reset",
        "a bare vCPU put back: KVM_RUN that returns at once, x87 and SSE; and a scan for changed \
         pages",
        bare::reset,
    ),
    floor("floor_socket", "64 bytes to another process over a unix socket, and back", hops::socket),
    floor("floor_fsync", "append a page to a file where the journal is, and sync it", fsync),
    floor("floor_fork", "fork a process that ends at once, and wait for it", forked::fork),
    floor("floor_jail", "what a forked worker puts on for itself of the jail", forked::jail),
    Entry {
        group: "cold",
        ..floor(
            "floor_forked",
            "fork a process that makes a bare VM of a guest's size, has one exit, puts on the jail \
             and says so",
            forked::forked,
        )
    },
    Entry {
        group: "cold",
        ..floor(
            "floor_cold",
            "floor_forked, and in that process the program's signature checked by tables of its \
             key, the program parsed, compiled and instantiated",
            forked::cold,
        )
    },
    Entry {
        group: "warm",
        ..floor(
            "floor_hops",
            "64 bytes from process to process to a third, one bare VM exit there, and back the \
             same way",
            hops::hops,
        )
    },
    Entry {
        group: "warm",
        ..floor(
            "floor_warm",
            "floor_hops, and on the way the program's signature checked by tables of its key in the \
             second process and the third, the program parsed, compiled and instantiated in the third",
            hops::warm,
        )
    },
    Entry {
        group: "doors",
        ..floor(
            "floor_door",
            "what a process in between that only passes on adds to 64 bytes to another, one bare VM \
             exit there, and back",
            hops::door,
        )
    },
    floor("floor_verify", "check the program's signature on the host", load::verify),
    floor(
        "floor_parse",
        "parse, compile and instantiate the program with wasmi alone, on the host",
        load::parse,
    ),
    Entry {
        name: "floor_throughput",
        group: "throughput",
        about: "bare workers' whole lives: floor_forked to the end of its process, by two processes \
                for each core",
        ratio_of: None,
        measure: Measure::Figure { unit: "runs/s/core", repetitions: 5, make: forked::throughput },
    },
];

const fn floor(name: &'static str, about: &'static str, make: Make) -> Entry {
    Entry { name, group: "floors", about, ratio_of: None, measure: Measure::Sampled(make) }
}

type Make = fn() -> Result<Box<dyn Case>, String>;

/// What one commit appends to a write-ahead log of SQLite at least: a page
/// and its head (<https://www.sqlite.org/fileformat2.html>, 4.1).
const FRAME_BYTES: usize = 24 + 4096;

struct FsyncFloor {
    file: File,
    _folder: Folder,
}

fn fsync() -> Result<Box<dyn Case>, String> {
    let folder = Folder::new()?;
    let file = File::create(folder.path().join("log")).map_err(said)?;
    Ok(Box::new(FsyncFloor { file, _folder: folder }))
}

impl Case for FsyncFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.file.write_all(&[7; FRAME_BYTES]).map_err(said)?;
        self.file.sync_data().map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}
