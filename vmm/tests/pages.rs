//! Which pages of RAM a guest touches, on its way to "waiting for a program"
//! and in a run, and how many exits that takes: the two things that a start
//! costs. With `FORGE_PRINT_PAGES` set it prints them too.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;

use forge_protocol::ending::Ending;
use forge_protocol::limits::RunLimits;
use forge_protocol::platform::{BOOT_INFO, BootInfo, DATA, PAGE_BYTES, RAM_START};
use forge_protocol::signature::{SignerKey, TrustKeys};
use forge_protocol::worker::{Fate, Report};
use forge_vmm::bench::program::Program;
use forge_vmm::machine::{self, Exit, Hypervisor, Image, Machine, PageMap, Watchdog};
use forge_vmm::worker::{Board, Guest};
use support::{job, signed, signer};
use vm_memory::{
    Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

fn main() -> ExitCode {
    // With large pages one touch would be 512.
    // SAFETY: a plain system call without pointers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    support::main(
        claims![
            a_guest_boots_in_one_exit,
            what_a_guest_and_a_small_run_write_lies_together,
            what_a_small_run_of_a_bases_guest_touches_was_put_in_place,
            a_large_linear_memory_touches_what_the_program_does,
            memory_that_was_used_before_is_zero_to_a_program,
            a_guest_touches_what_it_is_told_to_once_it_has_greeted,
        ],
        claims![],
    )
}

/// The pages of RAM that have memory behind them, as distances from DATA in
/// pages.
fn touched(memory: &GuestMemoryMmap) -> BTreeSet<i64> {
    let region = memory.find_region(GuestAddress(RAM_START)).unwrap();
    let pages = region.len() / PAGE_BYTES;
    let mut entries = vec![0u8; pages as usize * 8];
    let first = region.as_ptr() as u64 / PAGE_BYTES;
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, first * 8).unwrap();
    let data = ((DATA - RAM_START) / PAGE_BYTES) as i64;
    entries
        .chunks_exact(8)
        .map(|entry| u64::from_le_bytes(entry.try_into().unwrap()))
        .zip(-data..)
        // Present, or swapped out.
        .filter(|(entry, _)| entry >> 62 != 0)
        .map(|(_, page)| page)
        .collect()
}

/// Start and length of each stretch.
fn spans(pages: &BTreeSet<i64>) -> String {
    let pages: Vec<i64> = pages.iter().copied().collect();
    let spans = pages.chunk_by(|a, b| a + 1 == *b);
    spans.map(|span| format!(" {}+{}", span[0], span.len())).collect()
}

struct Bench {
    hypervisor: Hypervisor,
    image: &'static Image,
    watchdog: Watchdog,
}

impl Bench {
    fn new() -> Self {
        Self {
            hypervisor: Hypervisor::open().unwrap(),
            image: Image::built_in().unwrap(),
            watchdog: Watchdog::new().unwrap(),
        }
    }

    fn boot(&self, trust: &TrustKeys) -> Guest {
        let archive = forge_rootfs::boot_archive(trust);
        let ram_bytes = machine::ram_bytes(&RunLimits::default());
        let machine = Machine::new(&self.hypervisor, self.image, &archive, ram_bytes).unwrap();
        Guest::boot_in(machine, &self.watchdog).unwrap()
    }
}

fn test_trust() -> TrustKeys {
    TrustKeys::new([signer().trust_key()]).unwrap()
}

fn a_guest_boots_in_one_exit() {
    let bench = Bench::new();
    let archive = forge_rootfs::boot_archive(&test_trust());
    let ram_bytes = machine::ram_bytes(&RunLimits::default());
    let mut machine = Machine::new(&bench.hypervisor, bench.image, &archive, ram_bytes).unwrap();
    let stop = bench.watchdog.stop();
    let mut board = Board::new(machine.memory().clone(), stop.clone());
    assert_eq!(machine.run(&mut board, stop), Exit::Bus);
    // Its greeting.
    assert_eq!(machine.exits(), 1);
}

/// What a guest has touched that waits, and what a small run touches beside.
fn small_run(trust: impl FnOnce(TrustKeys) -> TrustKeys) -> (BTreeSet<i64>, BTreeSet<i64>, Report) {
    let bench = Bench::new();
    let mut program = Program::new().unwrap();
    let mut guest = bench.boot(&trust(program.trust.clone()));
    let booted = touched(guest.memory());
    let job = program.next_job();
    let report = guest.run(&job, None, &bench.watchdog);
    Program::check(&job, &report).unwrap();
    let run = touched(guest.memory()).difference(&booted).copied().collect();
    (booted, run, report)
}

/// How trust keys come to a guest.
struct Way {
    name: &'static str,
    trust: fn(TrustKeys) -> TrustKeys,
    /// How many pages from DATA on it has touched once it waits.
    booted: RangeInclusive<usize>,
}

/// To a guest that boots for one run, and to two that will be bases. The base
/// point's table and one key's take 10 KB, each further one 5.
const WAYS: [Way; 3] = [
    Way { name: "keys", trust: |keys| keys, booted: 1..=6 },
    Way { name: "tables", trust: TrustKeys::with_tables, booted: 8..=10 },
    Way {
        name: "four tables",
        trust: |keys| {
            let more = (1..=3).map(|number| SignerKey::from_secret(&[number; 32]).trust_key());
            TrustKeys::new(keys.as_slice().iter().copied().chain(more)).unwrap().with_tables()
        },
        booted: 11..=14,
    },
];

fn within(pages: &BTreeSet<i64>, range: Range<i64>) -> usize {
    pages.range(range).count()
}

fn what_a_guest_and_a_small_run_write_lies_together() {
    for Way { name, trust, booted: expected } in WAYS {
        let (booted, run, report) = small_run(trust);
        let (booted_spans, run_spans) = (spans(&booted), spans(&run));
        assert_eq!(report.vm_exits, 1);
        // Below DATA: page tables, descriptors, boot info, archive; the VMM's.
        assert!(within(&run, i64::MIN..0) == 0, "{name}: a run reaches below DATA:{run_spans}");
        let from_data = within(&booted, 0..i64::MAX);
        assert!(expected.contains(&from_data), "{name}: booting touched{booted_spans}");
        // The stack, the queues, data, what is received, and small blocks: what
        // is put in place before a run, seven pages behind what is there already.
        let in_place = booted.last().unwrap() + 1 + 7;
        assert!(within(&run, 0..in_place) <= 14, "{name}: a small run touched{run_spans}");
        assert!(within(&run, in_place..LARGE) == 0, "{name}: a small run touched{run_spans}");
        // The linear memory.
        let linear = within(&run, LARGE..i64::MAX);
        assert!(linear <= LINEAR_PAGES, "{name}: a small run touched{run_spans}");
    }
}

fn what_a_small_run_of_a_bases_guest_touches_was_put_in_place() {
    let bench = Bench::new();
    for Way { name, trust, .. } in WAYS {
        let mut program = Program::new().unwrap();
        let booted = bench.boot(&trust(program.trust.clone()));
        let base = booted.into_base(&bench.hypervisor, &PageMap::open().unwrap()).unwrap();
        let mut guest = Guest::from_base(&bench.hypervisor, &base, &bench.watchdog).unwrap();
        let before = touched(guest.memory());
        let job = program.next_job();
        Program::check(&job, &guest.run(&job, None, &bench.watchdog)).unwrap();
        let more: BTreeSet<i64> = touched(guest.memory()).difference(&before).copied().collect();
        assert!(within(&more, 0..LARGE) == 0, "{name}: a small run touched{}", spans(&more));
    }
}

/// Large blocks lie behind this page.
const LARGE: i64 = 32;
/// What a program with one page of linear memory touches of it and around it.
const LINEAR_PAGES: usize = 5;

fn ends_with(report: &Report, code: i32) {
    match &report.fate {
        Fate::Ended(ended) => assert_eq!(ended.ending, Ending::Returned(code)),
        other => panic!("the run did not end by itself: {other:?}"),
    }
}

fn a_large_linear_memory_touches_what_the_program_does() {
    let bench = Bench::new();
    // 64 pages of 64 KiB, of which it writes one byte in the middle.
    let program = signed(
        r#"(module (memory (export "memory") 64)
            (func (export "forge_run") (result i32)
                (i32.store8 (i32.const 0x200000) (i32.const 7))
                (i32.load8_u (i32.const 0x200000))))"#,
    );
    let mut guest = bench.boot(&test_trust());
    let before = touched(guest.memory());
    let report = guest.run(&job(program, RunLimits::default()), None, &bench.watchdog);
    ends_with(&report, 7);
    let more: BTreeSet<i64> = touched(guest.memory()).difference(&before).copied().collect();
    // Its first and its last page, and the one it wrote to.
    assert!(within(&more, LARGE..i64::MAX) <= LINEAR_PAGES, "{}", spans(&more));
    assert!(more.len() < 20, "{}", spans(&more));
}

/// A program of this many bytes more that looks for a byte in its memory that
/// is not zero, and returns the first one's place or -1.
fn looks_for_bytes(more: usize) -> Vec<u8> {
    let ballast = "a".repeat(more);
    signed(&format!(
        r#"(module (memory (export "memory") 40)
            (data $never "{ballast}")
            (func (export "forge_run") (result i32) (local $at i32)
                (loop $next
                    (if (i64.ne (i64.load (local.get $at)) (i64.const 0))
                        (then (return (local.get $at))))
                    (local.set $at (i32.add (local.get $at) (i32.const 8)))
                    (br_if $next (i32.lt_u (local.get $at) (i32.const 0x280000))))
                (i32.const -1)))"#
    ))
}

fn memory_that_was_used_before_is_zero_to_a_program() {
    let bench = Bench::new();
    // Larger and larger programs leave more and more of the heap behind them.
    for more in [0, 40_000, 300_000, 1_500_000] {
        let mut guest = bench.boot(&test_trust());
        let job = job(looks_for_bytes(more), RunLimits::default());
        ends_with(&guest.run(&job, None, &bench.watchdog), -1);
    }
}

fn a_guest_touches_what_it_is_told_to_once_it_has_greeted() {
    let bench = Bench::new();
    let program = signed(
        r#"(module (memory (export "memory") 1)
            (func (export "forge_run") (result i32) (i32.const 0)))"#,
    );
    let mut guest = bench.boot(&test_trust());
    let memory = guest.memory().clone();
    let mut info = [0; BootInfo::BYTES];
    memory.read_slice(&mut info, GuestAddress(BOOT_INFO)).unwrap();
    let info = BootInfo::from_bytes(&info).unwrap();
    assert_eq!(info.touch_bytes, 0);
    let told = BootInfo { touch_bytes: 300 * PAGE_BYTES, ..info };
    memory.write_slice(&told.to_bytes(), GuestAddress(BOOT_INFO)).unwrap();
    let before = touched(&memory);
    assert!(within(&before, 0..300) < 16, "{}", spans(&before));
    let report = guest.run(&job(program, RunLimits::default()), None, &bench.watchdog);
    assert!(
        matches!(&report.fate, Fate::Ended(ended) if ended.ending == Ending::Returned(0)),
        "what was touched was changed: {:?}",
        report.fate
    );
    let after = touched(&memory);
    assert_eq!(within(&after, 0..300), 300, "{}", spans(&after));
    assert_eq!(within(&after, 300..i64::MAX), 0, "{}", spans(&after));
    if std::env::var_os("FORGE_PRINT_PAGES").is_some() {
        for Way { name, trust, .. } in WAYS {
            let (booted, run, report) = small_run(trust);
            eprintln!("{name}: booted: {} pages:{}", booted.len(), spans(&booted));
            eprintln!("a small run: {} more:{}", run.len(), spans(&run));
            eprintln!("its exits: {}", report.vm_exits);
        }
    }
}
