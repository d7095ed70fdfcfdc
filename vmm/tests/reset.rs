//! What a guest that starts from a base is, and what a reset puts back: after
//! runs of every kind the whole of memory and vCPU is compared, and the
//! comparison itself is shown to see what it should.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::platform::{
    CODE, CONTROL_MMIO, LARGE_PAGE_BYTES, PAGE_BYTES, PAGE_TABLES, RAM_AT_START_BYTES, RAM_START,
    control,
};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Prepare, PreparedJob, Report, VmFailure, VmFailureKind};
use forge_vmm::jail::SealedSlot;
use forge_vmm::machine::snapshot::{BASE_FILE_BYTES, RESET_PAGES_MAX};
use forge_vmm::machine::{
    self, Base, Bus, Death, Exit, Hypervisor, Image, Machine, PageMap, Watchdog, deadline_in,
    vcpu::Go,
};
use forge_vmm::worker::{Guest, GuestBase};
use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs};
use kvm_ioctls::Kvm;
use support::{forge_module, job, serve, signed, signer};
use vm_memory::{
    Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _, MmapRegion,
};

fn main() -> ExitCode {
    support::main(
        claims![
            a_guest_from_a_base_answers_as_one_that_booted,
            whatever_ran_a_reset_is_proven_and_the_next_run_is_as_in_a_fresh_vm,
            pages_beyond_the_bases_file_are_every_vms_and_are_put_back,
            a_guest_whose_page_tables_allow_it_still_cannot_write_its_code,
            all_of_ram_is_there_once_it_was_asked_for_and_for_guests_of_that_base,
            a_prepared_guest_is_put_back_to_where_its_program_is_loaded,
            a_byte_that_changed_behind_the_resets_back_is_found_wherever_it_is,
            a_run_that_stopped_halfway_left_registers_that_the_proof_sees,
            a_rounding_mode_that_a_run_left_is_found_and_put_back,
            not_even_in_ring_0_can_a_guest_write_an_msr_that_no_reset_puts_back,
            no_byte_of_a_run_is_in_ram_after_the_reset,
            a_run_that_changed_too_much_is_refused_a_reset,
            guests_of_one_base_do_not_see_each_others_writes,
            the_bases_file_cannot_be_written,
            guests_of_one_base_given_one_job_are_equal,
            two_bases_of_the_same_keys_are_equal,
        ],
        claims![],
    )
}

// Guests

/// Held while a base is made, so that who lists descriptors sees whole ones.
static MAKING: Mutex<()> = Mutex::new(());

fn limits() -> RunLimits {
    // Little RAM, so that all of it can be searched; time for a CPU that is
    // emulated.
    let (memory_bytes, program_bytes, wall_ms) = (8 << 20, 64 << 10, 60_000);
    RunLimits { memory_bytes, program_bytes, wall_ms, ..RunLimits::default() }
}

fn make_base() -> GuestBase {
    make_base_with(b"")
}

/// A page of RAM behind the file that a base keeps its beginning in.
const BEYOND: GuestAddress = GuestAddress(RAM_START + BASE_FILE_BYTES as u64 + 5 * 4096);

/// A base whose guest had written there.
fn make_base_with(beyond: &[u8]) -> GuestBase {
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let hypervisor = Hypervisor::open().unwrap();
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let watchdog = Watchdog::new().unwrap();
    let ram_bytes = machine::ram_bytes(&limits());
    let image = Image::built_in().unwrap();
    let guest = Guest::boot(&hypervisor, image, &trust, ram_bytes, &watchdog).unwrap();
    guest.memory().write_slice(beyond, BEYOND).unwrap();
    guest.into_base(&hypervisor, &PageMap::open().unwrap()).unwrap()
}

fn base() -> &'static GuestBase {
    static BASE: OnceLock<Arc<GuestBase>> = OnceLock::new();
    BASE.get_or_init(|| Arc::new(make_base()))
}

/// A guest, and what it takes to run and reset it.
struct Vm {
    guest: Guest,
    pages: PageMap,
    watchdog: Watchdog,
}

/// A run whose time starts now, whenever it was put together.
fn starting_now(job: &Job) -> Job {
    let time = Duration::from_millis(job.load.limits.wall_ms);
    Job { deadline: deadline_in(time), ..job.clone() }
}

impl Vm {
    fn of(base: &GuestBase) -> Self {
        let watchdog = Watchdog::new().unwrap();
        let guest = Guest::from_base(&Hypervisor::open().unwrap(), base, &watchdog).unwrap();
        Self { guest, pages: PageMap::open().unwrap(), watchdog }
    }

    fn new() -> Self {
        Self::of(base())
    }

    fn run(&mut self, job: &Job) -> Report {
        self.guest.run(&starting_now(job), None, &self.watchdog)
    }

    fn prove(&mut self, to: &forge_vmm::worker::Standing) -> Result<(), VmFailure> {
        self.guest.prove_reset(to, &self.pages)
    }

    fn reset(&mut self, to: &forge_vmm::worker::Standing) -> Result<usize, VmFailure> {
        self.guest.reset(to, &self.pages).map(|done| done.pages)
    }

    /// Where in RAM these bytes are. Memory that nobody has touched is not
    /// read: where the kernel has no scan of the page map, that counts as
    /// changing it.
    fn find(&self, bytes: &[u8]) -> Option<u64> {
        const PAGE: usize = 4096;
        let memory = self.guest.memory();
        memory.iter().find_map(|region| {
            let start = memory.get_host_address(region.start_addr()).unwrap();
            let length = region.len() as usize;
            let mut present = vec![0u8; length / PAGE];
            // SAFETY: the region is mapped, and there is a byte for each page.
            assert_eq!(unsafe { libc::mincore(start.cast(), length, present.as_mut_ptr()) }, 0);
            present[..BASE_FILE_BYTES / PAGE].fill(1);
            let mut at = 0;
            while at < present.len() {
                let run = present[at..].iter().take_while(|page| **page & 1 != 0).count();
                // SAFETY: the region is mapped for its whole length, and the
                // guest does not run.
                let found = unsafe {
                    let from = start.add(at * PAGE);
                    libc::memmem(from.cast(), run * PAGE, bytes.as_ptr().cast(), bytes.len())
                };
                if !found.is_null() {
                    return Some(region.start_addr().0 + (found as u64 - start as u64));
                }
                at += run.max(1);
            }
            None
        })
    }

    /// All of RAM.
    fn ram(&self) -> Vec<u8> {
        let mut bytes = vec![0; base().ram_bytes()];
        self.guest.memory().read_slice(&mut bytes, GuestAddress(RAM_START)).unwrap();
        bytes
    }
}

/// What of a report does not depend on the clock.
fn essence(report: &Report) -> String {
    let fate = match &report.fate {
        Fate::Ended(ended) => {
            format!("{:?} {} {}", ended.ending, ended.fuel_used, ended.memory_peak_bytes)
        }
        other => format!("{other:?}"),
    };
    let calls: Vec<_> = report
        .calls
        .iter()
        .map(|call| (call.id, &call.tool, call.settled.map(|settled| settled.code)))
        .collect();
    let Report { output, artifacts, logs, vm_exits, .. } = report;
    format!("{fate} {output:?} {artifacts:?} {logs:?} {calls:?} {vm_exits}")
}

// Programs

const PAGE: &str = r#"(memory (export "memory") 1) (data (i32.const 0) "hello, text/plain")"#;
const ENDLESS: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32)
        (local f64)
        (loop $more
            (local.set 0 (f64.add (local.get 0) (f64.const 1.5)))
            (br $more))
        (unreachable)))"#;

/// Runs that have little in common, by name; all of them can be reset.
fn mixture() -> Vec<(&'static str, Job)> {
    let plain = |wat: &str| job(signed(wat), limits());
    let mut calling = plain(
        r#"(module
            (import "tool" "test.echo" (func $call (param i32 i32) (result i32)))
            (memory (export "memory") 1) (data (i32.const 0) "{}")
            (func (export "forge_run") (result i32) (call $call (i32.const 0) (i32.const 2))))"#,
    );
    calling.start.granted = vec![ToolName::parse("test.echo").unwrap()];
    let mut ungranted = calling.clone();
    ungranted.start.granted.clear();
    let mut out_of_fuel = plain(ENDLESS);
    out_of_fuel.load.limits.fuel = 500_000;
    let mut untrusted = plain(ENDLESS);
    *untrusted.program.last_mut().unwrap() ^= 1;
    let mut too_late = plain(ENDLESS);
    too_late.load.limits.fuel = u64::MAX;
    too_late.load.limits.wall_ms = 200;
    let mut large_input = plain(&forge_module(
        r#"(memory (export "memory") 4)"#,
        "(drop (call $output (i32.const 0)
            (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
         (i32.const 0)",
    ));
    large_input.input = vec![b'7'; 200_000];
    vec![
        (
            "output",
            plain(&forge_module(
                PAGE,
                "(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)",
            )),
        ),
        (
            "compute",
            plain(
                r#"(module (memory (export "memory") 1)
                (func $fib (param i32) (result i32)
                    (if (result i32) (i32.lt_u (local.get 0) (i32.const 2))
                        (then (local.get 0))
                        (else (i32.add
                            (call $fib (i32.sub (local.get 0) (i32.const 1)))
                            (call $fib (i32.sub (local.get 0) (i32.const 2)))))))
                (func (export "forge_run") (result i32) (call $fib (i32.const 18))))"#,
            ),
        ),
        (
            "memory",
            plain(
                r#"(module (memory (export "memory") 28)
                (func (export "forge_run") (result i32)
                    (memory.fill (i32.const 0) (i32.const 0xab) (i32.const 1835008))
                    (i32.load (i32.const 1835004))))"#,
            ),
        ),
        (
            "growth",
            plain(
                r#"(module (memory (export "memory") 1)
                (func (export "forge_run") (result i32)
                    (i32.store (i32.const 65532) (i32.const 9))
                    (drop (memory.grow (i32.const 5)))
                    (i32.store (i32.const 393212) (i32.const 9))
                    (memory.size)))"#,
            ),
        ),
        (
            "memory for which all of RAM is needed",
            job(
                signed(
                    r#"(module (memory (export "memory") 200)
                    (func (export "forge_run") (result i32)
                        (i32.store (i32.const 13107196) (i32.const 9))
                        (i32.load (i32.const 13107196))))"#,
                ),
                RunLimits { memory_bytes: 16 << 20, ..limits() },
            ),
        ),
        (
            "floats",
            plain(
                r#"(module (memory (export "memory") 1)
                (func (export "forge_run") (result i32)
                    (i32.trunc_sat_f64_s
                        (f64.mul (f64.sqrt (f64.const 2)) (f64.const 1000000)))))"#,
            ),
        ),
        (
            "trap",
            plain(
                r#"(module (memory (export "memory") 1)
                (func (export "forge_run") (result i32)
                    (i32.div_s (i32.const 1) (i32.const 0))))"#,
            ),
        ),
        (
            "deep recursion",
            plain(
                r#"(module (memory (export "memory") 1)
                (func $f (param i64) (result i64) (call $f (local.get 0)) (i64.const 1) (i64.add))
                (func (export "forge_run") (result i32)
                    (i32.wrap_i64 (call $f (i64.const 1)))))"#,
            ),
        ),
        ("fuel", out_of_fuel),
        (
            "logs and artifacts",
            plain(&forge_module(
                PAGE,
                "(call $log (i32.const 2) (i32.const 0) (i32.const 5))
                 (drop (call $artifact (i32.const 0) (i32.const 5) (i32.const 7) (i32.const 10)
                    (i32.const 0) (i32.const 3)))
                 (i32.const 3)",
            )),
        ),
        (
            "random and time",
            plain(&forge_module(
                PAGE,
                "(call $random (i32.const 0) (i32.const 64))
                 (i64.store (i32.const 64) (call $now_ns))
                 (drop (call $output (i32.const 0) (i32.const 72)))
                 (i32.const 0)",
            )),
        ),
        ("large input and output", large_input),
        ("a tool call without a broker", calling),
        ("a tool that is not granted", ungranted),
        ("an untrusted program", untrusted),
        ("a misuse", plain(&forge_module(PAGE, "(call $wait_any)"))),
        ("the deadline", too_late),
    ]
}

// The base

fn a_guest_from_a_base_answers_as_one_that_booted() {
    for (name, job) in mixture() {
        assert_eq!(essence(&Vm::new().run(&job)), essence(&serve(&starting_now(&job))), "{name}");
    }
}

fn guests_of_one_base_do_not_see_each_others_writes() {
    let (one, other) = (Vm::new(), Vm::new());
    let (before, marker) = (other.ram(), b"written by one guest");
    for offset in [0x4000, BASE_FILE_BYTES as u64 - 64, BASE_FILE_BYTES as u64 + 64] {
        one.guest.memory().write_slice(marker, GuestAddress(RAM_START + offset)).unwrap();
        assert_eq!(one.find(marker), Some(RAM_START + offset));
        assert_eq!(other.find(marker), None, "at {offset:#x}");
        assert_eq!(Vm::new().find(marker), None, "at {offset:#x}, of a later guest");
        one.guest.memory().write_slice(&[0; 20], GuestAddress(RAM_START + offset)).unwrap();
    }
    assert!(before == other.ram());
}

fn the_bases_file_cannot_be_written() {
    base();
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut seen = 0;
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        if !fs::read_link(&path).is_ok_and(|to| to.to_string_lossy().contains("forge-base")) {
            continue;
        }
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let refused = file.write_all_at(b"x", 0).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        assert_eq!(file.set_len(0).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(file.set_len(1 << 30).unwrap_err().kind(), ErrorKind::PermissionDenied);
        seen += 1;
    }
    assert!(seen > 0, "no descriptor of a base was found");
}

fn guests_of_one_base_given_one_job_are_equal() {
    for (name, mut job) in mixture() {
        assert_eq!(essence(&Vm::new().run(&job)), essence(&Vm::new().run(&job)), "{name}");
        if name == "random and time" {
            let first = Vm::new().run(&job).output;
            job.start.seed = [3; 32];
            assert_ne!(first[..64], Vm::new().run(&job).output[..64]);
        }
    }
}

fn two_bases_of_the_same_keys_are_equal() {
    let second = make_base();
    let (mut one, mut other) = (Vm::new(), Vm::of(&second));
    let (first, second) = (one.ram(), other.ram());
    assert!(first.iter().any(|byte| *byte != 0));
    let differs = first.iter().zip(&second).position(|(one, other)| one != other);
    assert_eq!(differs.map(|at| RAM_START + at as u64), None);
    // The vCPU too: each is as the other was marked.
    let standing = one.guest.mark(&one.pages).unwrap();
    other.prove(&standing).unwrap();
}

// Reset

fn pages_beyond_the_bases_file_are_every_vms_and_are_put_back() {
    let base = make_base_with(b"the base's");
    // The first has its memory from the base, the second maps its own.
    for _ in 0..2 {
        let mut vm = Vm::of(&base);
        let read = |vm: &Vm| {
            let mut bytes = [0; 10];
            vm.guest.memory().read_slice(&mut bytes, BEYOND).unwrap();
            bytes
        };
        assert_eq!(&read(&vm), b"the base's");
        let to = vm.guest.mark(&vm.pages).unwrap();
        vm.guest.memory().write_slice(b"the run's!", BEYOND).unwrap();
        assert_eq!(vm.prove(&to).unwrap_err().kind, VmFailureKind::NotReset);
        vm.guest.reset(&to, &vm.pages).unwrap();
        assert_eq!(&read(&vm), b"the base's");
        vm.prove(&to).unwrap();
    }
}

/// Breaks at every access and notes where the last one was.
struct Last(u64);

impl Bus for Last {
    fn read(&mut self, address: u64, _: &mut [u8]) -> Go {
        self.0 = address;
        Go::Break(())
    }

    fn write(&mut self, address: u64, _: &[u8]) -> Go {
        self.0 = address;
        Go::Break(())
    }
}

fn all_of_ram_is_there_once_it_was_asked_for_and_for_guests_of_that_base() {
    const RAM_BYTES: usize = 20 << 20;
    let later = RAM_START + RAM_AT_START_BYTES;
    // mov dword [address], 7, one after the other; the last two for ever
    let store = |address: u64| {
        [&[0xc7, 0x04, 0x25][..], &(address as u32).to_le_bytes(), &[7, 0, 0, 0]].concat()
    };
    let stores = [later, CONTROL_MMIO + control::ALL_RAM, CONTROL_MMIO, later, CONTROL_MMIO];
    let code = [stores.map(store).concat(), vec![0xeb, 0xe8]].concat();
    let hypervisor = Hypervisor::open().unwrap();
    let (watchdog, pages) = (Watchdog::new().unwrap(), PageMap::open().unwrap());
    let _armed = watchdog.arm(deadline_in(Duration::from_secs(60)));
    let image = Image::with_entry_code(&code).unwrap();
    let mut machine = Machine::new(&hypervisor, &image, &[], RAM_BYTES).unwrap();
    let run = |machine: &mut Machine| {
        let mut last = Last(0);
        assert_eq!(machine.run(&mut last, watchdog.stop()), Exit::Bus);
        last.0
    };
    // Before it has asked, nothing is there.
    assert_eq!(run(&mut machine), later);
    assert_eq!(run(&mut machine), CONTROL_MMIO);
    let base = Arc::new(Base::capture(machine, &hypervisor, &pages).unwrap());
    let mut first = Machine::from_base(&hypervisor, &base).unwrap();
    // It needs no slot, and still leaves no place for the description of one.
    first.seal_slots().unwrap();
    // SAFETY: of nothing, and given to no VM.
    assert!(unsafe { SealedSlot::new(Default::default()) }.is_err());
    // Where the booted guest's RAM lay, right behind the base's code, the second's
    // would lie; elsewhere it has a slot more.
    let _taken = [(); 16].map(|()| MmapRegion::<()>::new(RAM_BYTES).unwrap());
    let second = Machine::from_base(&hypervisor, &base).unwrap();
    for mut machine in [first, second] {
        let to = machine.checkpoint(&pages).unwrap();
        for _ in 0..2 {
            // The store before it reached RAM.
            assert_eq!(run(&mut machine), CONTROL_MMIO);
            let mut word = [0; 4];
            machine.memory().read_slice(&mut word, GuestAddress(later)).unwrap();
            assert_eq!(word, [7, 0, 0, 0]);
            machine.reset(&to, &pages).unwrap();
            assert_eq!(machine.differences(&to, &pages).unwrap(), Vec::<String>::new());
        }
    }
}

fn a_guest_whose_page_tables_allow_it_still_cannot_write_its_code() {
    const RAM_BYTES: usize = 16 << 20;
    let target = CODE + 0x1000;
    // mov [CONTROL_MMIO], eax; mov [target], eax; jmp to itself
    let store = |address: u64| [&[0x89, 0x04, 0x25][..], &(address as u32).to_le_bytes()].concat();
    let code = [store(CONTROL_MMIO), store(target), vec![0xeb, 0xfe]].concat();
    let hypervisor = Hypervisor::open().unwrap();
    let (watchdog, pages) = (Watchdog::new().unwrap(), PageMap::open().unwrap());
    let _armed = watchdog.arm(deadline_in(Duration::from_secs(60)));
    let image = Image::with_entry_code(&code).unwrap();
    let mut machine = Machine::new(&hypervisor, &image, &[], RAM_BYTES).unwrap();
    assert_eq!(machine.run(&mut Last(0), watchdog.stop()), Exit::Bus);
    let base = Arc::new(Base::capture(machine, &hypervisor, &pages).unwrap());
    // The first has its code in the slot of its RAM, the second in its own.
    let run = || {
        let mut machine = Machine::from_base(&hypervisor, &base).unwrap();
        // The entry of the directory that maps the code: writable.
        let entry = GuestAddress(PAGE_TABLES + 2 * PAGE_BYTES + CODE / LARGE_PAGE_BYTES * 8);
        let mapped: u64 = machine.memory().read_obj(entry).unwrap();
        machine.memory().write_obj(mapped | 2, entry).unwrap();
        let mut last = Last(0);
        (machine.run(&mut last, watchdog.stop()), last.0)
    };
    assert_eq!(run(), (Exit::Died(Death::Host { errno: libc::EFAULT }), 0));
    // Where the booted guest's RAM lay the second's would follow the base's code,
    // and be one slot with it: that place is taken, and others of its size.
    let taken = [(); 16].map(|()| MmapRegion::<()>::new(RAM_BYTES).unwrap());
    assert_eq!(run(), (Exit::Bus, target));
    drop(taken);
}

fn whatever_ran_a_reset_is_proven_and_the_next_run_is_as_in_a_fresh_vm() {
    let mixture = mixture();
    let expected: Vec<_> = mixture.iter().map(|(_, job)| essence(&Vm::new().run(job))).collect();
    // One VM for all of it.
    let mut vm = Vm::new();
    let to = vm.guest.mark(&vm.pages).unwrap();
    let mut runs = 0;
    // Each program follows each kind of other at some distance.
    for step in [1, 3, 5, 7] {
        for index in 0..mixture.len() {
            let index = index * step % mixture.len();
            let (name, job) = &mixture[index];
            assert_eq!(essence(&vm.run(job)), expected[index], "{name}, run {runs}");
            let unproven = vm.prove(&to).unwrap_err();
            assert!(unproven.message.contains("memory at"), "{name}: {}", unproven.message);
            assert!(vm.reset(&to).unwrap() > 0);
            vm.prove(&to).unwrap_or_else(|failure| panic!("after {name}: {}", failure.message));
            runs += 1;
        }
    }
    assert_eq!(runs, 4 * mixture.len());
}

fn a_prepared_guest_is_put_back_to_where_its_program_is_loaded() {
    let job = job(
        signed(&forge_module(
            r#"(memory (export "memory") 1) (global $runs (mut i32) (i32.const 0))"#,
            "(global.set $runs (i32.add (global.get $runs) (i32.const 1)))
             (i32.store (i32.const 60000) (i32.add (i32.load (i32.const 60000)) (i32.const 1)))
             (drop (call $output (i32.const 0)
                (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
             (i32.add (global.get $runs) (i32.load (i32.const 60000)))",
        )),
        limits(),
    );
    let mut vm = Vm::new();
    let order = Prepare { load: job.load.clone(), program: job.program.clone() };
    vm.guest.prepare(&order, &vm.watchdog).unwrap();
    let to = vm.guest.mark(&vm.pages).unwrap();
    vm.prove(&to).unwrap();
    for input in ["1", "[2, 3]", "\"a longer text\""] {
        let whole = Job { input: input.into(), ..job.clone() };
        let Job { start, input, deadline, brokered, .. } = whole.clone();
        let prepared = PreparedJob { start, input, deadline, brokered };
        let report = vm.guest.run_prepared(&prepared, None, &vm.watchdog);
        assert_eq!(report.output, whole.input);
        let Fate::Ended(ended) = &report.fate else { panic!("{:?}", report.fate) };
        let fresh = Vm::new().run(&whole);
        let Fate::Ended(expected) = &fresh.fate else { panic!("{:?}", fresh.fate) };
        assert_eq!(
            (&ended.ending, ended.fuel_used, ended.memory_peak_bytes),
            (&expected.ending, expected.fuel_used, expected.memory_peak_bytes)
        );
        vm.reset(&to).unwrap();
        vm.prove(&to).unwrap();
    }
}

fn a_byte_that_changed_behind_the_resets_back_is_found_wherever_it_is() {
    let mut vm = Vm::new();
    let to = vm.guest.mark(&vm.pages).unwrap();
    vm.run(&mixture()[0].1);
    vm.reset(&to).unwrap();
    vm.prove(&to).unwrap();
    let ram_bytes = base().ram_bytes() as u64;
    let places = [
        ("the first page", 0x123),
        ("the window", BASE_FILE_BYTES as u64 / 2),
        ("the window's last byte", BASE_FILE_BYTES as u64 - 1),
        ("right behind it", BASE_FILE_BYTES as u64),
        ("a page no run touched", BASE_FILE_BYTES as u64 + (ram_bytes / 2)),
        ("the last byte of RAM", ram_bytes - 1),
    ];
    for (name, offset) in places {
        let at = GuestAddress(RAM_START + offset);
        let was: u8 = vm.guest.memory().read_obj(at).unwrap();
        vm.guest.memory().write_obj(was ^ 0x40, at).unwrap();
        let failure = vm.prove(&to).unwrap_err();
        assert_eq!(failure.kind, VmFailureKind::NotReset);
        let said = format!("memory at {:#x}: {:#04x}, not {was:#04x}", at.0, was ^ 0x40);
        assert!(failure.message.contains(&said), "{name}: {}", failure.message);
        // And a reset puts it back, as what a run might have written.
        vm.reset(&to).unwrap();
        vm.prove(&to).unwrap_or_else(|failure| panic!("{name}: {}", failure.message));
    }
}

fn a_run_that_stopped_halfway_left_registers_that_the_proof_sees() {
    let (_, job) = mixture().pop().unwrap();
    let mut vm = Vm::new();
    let to = vm.guest.mark(&vm.pages).unwrap();
    assert_eq!(vm.run(&job).fate, Fate::Deadline);
    let failure = vm.prove(&to).unwrap_err();
    for part in ["registers: ", "x87 and SSE: ", "memory at "] {
        assert!(failure.message.contains(part), "{part}: {}", failure.message);
    }
    vm.reset(&to).unwrap();
    vm.prove(&to).unwrap();
}

fn a_rounding_mode_that_a_run_left_is_found_and_put_back() {
    const MXCSR: usize = 24 / 4;
    const XSTATE_BV: usize = 512 / 4;
    const ROUND_UP: u32 = 0x4000;
    let mut guest = Vm::new();
    let to = guest.guest.mark(&guest.pages).unwrap();
    let [vm, vcpu] = guest.guest.descriptors().map(|fd| {
        // SAFETY: duplicates a descriptor of the guest's.
        unsafe { libc::dup(fd) }
    });
    // SAFETY: it is a VM's, and nobody else's.
    let vm = unsafe { Kvm::new().unwrap().create_vmfd_from_rawfd(vm) }.unwrap();
    // SAFETY: it is its vCPU's, and nobody else's.
    let vcpu = unsafe { vm.create_vcpu_from_rawfd(vcpu) }.unwrap();
    let mut area = vcpu.get_xsave().unwrap();
    area.region[MXCSR] ^= ROUND_UP;
    area.region[XSTATE_BV] |= 0b11;
    // SAFETY: as much as KVM wrote, which is all that it reads.
    unsafe { vcpu.set_xsave(&area) }.unwrap();
    let failure = guest.prove(&to).unwrap_err();
    assert!(failure.message.contains("x87 and SSE: MXCSR "), "{}", failure.message);
    guest.reset(&to).unwrap();
    guest.prove(&to).unwrap();
    assert_eq!(vcpu.get_xsave().unwrap().region[MXCSR], area.region[MXCSR] ^ ROUND_UP);
}

fn not_even_in_ring_0_can_a_guest_write_an_msr_that_no_reset_puts_back() {
    const LSTAR: u32 = 0xc000_0082;
    const CODE: &[u8] = &[
        0x66, 0xb9, 0x82, 0x00, 0x00, 0xc0, // mov ecx, LSTAR
        0x66, 0xb8, 0x34, 0x12, 0x00, 0x00, // mov eax, 0x1234
        0x66, 0x31, 0xd2, // xor edx, edx
        0x0f, 0x30, // wrmsr
        0xf4, // hlt
    ];
    for (marked, exit, lstar) in [(false, "Hlt", 0x1234), (true, "Shutdown", 0)] {
        let mut guest = Vm::new();
        if marked {
            guest.guest.mark(&guest.pages).unwrap();
        }
        let at = RAM_START + RAM_AT_START_BYTES - PAGE_BYTES;
        guest.guest.memory().write_slice(CODE, GuestAddress(at)).unwrap();
        // The guest has no ring 0 to speak of. A second vCPU of its VM has all
        // rights: it stands in real mode, as a CPU does that was switched on.
        let [vm, _] = guest.guest.descriptors();
        // SAFETY: duplicates a descriptor of the guest's.
        let vm = unsafe { libc::dup(vm) };
        // SAFETY: it is a VM's, and nobody else's.
        let vm = unsafe { Kvm::new().unwrap().create_vmfd_from_rawfd(vm) }.unwrap();
        let mut vcpu = vm.create_vcpu(1).unwrap();
        let mut segments = vcpu.get_sregs().unwrap();
        segments.cs.base = at;
        // No room for a vector: a fault is its end.
        segments.idt.limit = 0;
        vcpu.set_sregs(&segments).unwrap();
        vcpu.set_regs(&kvm_regs { rip: 0, rflags: 2, ..Default::default() }).unwrap();
        assert_eq!(format!("{:?}", vcpu.run().unwrap()), exit);
        let entry = kvm_msr_entry { index: LSTAR, ..Default::default() };
        let mut msrs = Msrs::from_entries(&[entry]).unwrap();
        assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
        assert_eq!(msrs.as_slice()[0].data, lstar, "marked: {marked}");
    }
}

fn no_byte_of_a_run_is_in_ram_after_the_reset() {
    let marker = b"secret-5d1f0c77ab93e248";
    // Copies its input all over its memory, and prints it, logs it, grows.
    let mut job = job(
        signed(&forge_module(
            r#"(memory (export "memory") 4) (data (i32.const 0) "secret-of-the-program-9931")"#,
            "(local i32)
             (loop $more
                (drop (call $input_read (i32.add (local.get 0) (i32.const 64)) (i32.const 0)
                    (call $input_len)))
                (local.set 0 (i32.add (local.get 0) (i32.const 4096)))
                (br_if $more (i32.lt_u (local.get 0) (i32.const 200000))))
             (drop (memory.grow (i32.const 4)))
             (call $log (i32.const 2) (i32.const 65) (call $input_len))
             (drop (call $output (i32.const 64) (call $input_len)))
             (i32.const 0)",
        )),
        limits(),
    );
    job.input = [b"\"", &marker[..], b"\""].concat();
    let mut vm = Vm::new();
    let to = vm.guest.mark(&vm.pages).unwrap();
    let seed = [0xd3, 0x5e, 0xed, 0x17, 0x9a, 0x42, 0x6f, 0x81];
    job.start.seed[..8].copy_from_slice(&seed);
    for needle in [&marker[..], b"secret-of-the-program-9931"] {
        assert_eq!(vm.find(needle), None);
        let report = vm.run(&job);
        assert!(report.output.starts_with(&job.input), "{report:?}");
        assert!(vm.find(needle).is_some(), "the run had it, and the search finds it");
        vm.reset(&to).unwrap();
        assert_eq!(vm.find(needle), None);
        assert_eq!(vm.find(&seed), None);
    }
}

fn a_run_that_changed_too_much_is_refused_a_reset() {
    let mut vm = Vm::new();
    let to = vm.guest.mark(&vm.pages).unwrap();
    let report = vm.run(&job(
        signed(
            r#"(module (memory (export "memory") 80)
                (func (export "forge_run") (result i32)
                    (memory.fill (i32.const 0) (i32.const 1) (i32.const 5242880))
                    (i32.const 0)))"#,
        ),
        limits(),
    ));
    assert!(matches!(report.fate, Fate::Ended(_)), "{report:?}");
    let refused = vm.reset(&to).unwrap_err();
    assert_eq!(refused.kind, VmFailureKind::TooChanged);
    let said = format!("a reset puts back at most {RESET_PAGES_MAX}");
    assert!(refused.message.contains(&said), "{}", refused.message);
    let pages: usize = refused.message.split(' ').next().unwrap().parse().unwrap();
    assert!(pages >= 80 * 16, "{}", refused.message);
}
