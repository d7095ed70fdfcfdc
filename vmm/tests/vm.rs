//! What a VM does, from its first instruction to its death, in this process.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::fmt::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forge_protocol::abi::CallCode;
use forge_protocol::ending::{Ending, LimitKind, RejectKind, TrapKind};
use forge_protocol::guest::Ended;
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::platform::{DATA, DESCRIPTORS, STACK, STACK_TOP, TrapFrame};
use forge_protocol::signature::{SignerKey, TrustKeys};
use forge_protocol::worker::{Fate, Report, VmFailure, VmFailureKind};
use forge_vmm::machine::deadline_in;
use forge_vmm::machine::{
    self, Bus, Death, Exit, Hypervisor, Image, Machine, Watchdog, vcpu::panicked,
};
use forge_vmm::worker::{Board, BrokerLink, Guest, Verdict};
use support::{answer, forge_module, job, run, run_granted, serve, signed, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            a_program_runs_and_its_output_comes_back,
            a_run_without_tool_calls_takes_one_exit,
            a_run_that_needs_all_of_ram_asks_for_it_by_one_exit,
            megabytes_go_both_ways,
            artifacts_and_logs_come_back,
            an_endless_loop_ends_by_fuel,
            an_endless_loop_with_huge_fuel_ends_by_the_deadline,
            growing_past_the_memory_limit_fails_in_the_program_and_costs_the_host_nothing,
            a_program_may_use_all_the_memory_it_may_have,
            a_program_may_leave_as_many_answers_untaken_as_it_may_have_calls_in_flight,
            deep_recursion_is_a_trap_and_no_crash,
            the_largest_programs_compile_within_the_guests_memory,
            branches_that_carry_very_many_values_are_refused_before_they_fill_the_memory,
            the_guest_refuses_an_untrusted_program_again,
            the_guest_refuses_an_import_that_is_not_granted_again,
            a_call_without_a_broker_is_denied,
            a_call_to_nothing_in_flight_is_a_trap,
            faults_leave_a_crash_record,
            a_stack_that_runs_over_faults_at_its_guard,
            privileged_instructions_are_refused,
            system_calls_and_software_interrupts_lead_nowhere,
            a_panic_leaves_its_message,
            a_guest_that_spins_is_stopped,
            a_guest_that_writes_every_register_harms_nobody,
            a_guest_that_runs_away_from_its_session_is_caught,
            two_runs_of_one_seed_are_the_same,
            webassemblys_own_tests_hold_in_the_guest,
        ],
        claims![],
    )
}

fn ended(report: &Report) -> &Ended {
    match &report.fate {
        Fate::Ended(ended) => ended,
        other => panic!("the run did not end by itself: {other:?}"),
    }
}

fn ending(report: &Report) -> &Ending {
    &ended(report).ending
}

// Programs

fn a_program_runs_and_its_output_comes_back() {
    let report = run(
        &forge_module(
            r#"(memory (export "memory") 1) (data (i32.const 0) "hello")"#,
            "(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)",
        ),
        RunLimits::default(),
    );
    assert_eq!(ending(&report), &Ending::Returned(0));
    assert_eq!(report.output, b"hello");
    assert!(ended(&report).fuel_used > 0);
    assert_eq!(ended(&report).memory_peak_bytes, 65_536);
}

fn a_run_without_tool_calls_takes_one_exit() {
    let report = run(
        &forge_module(
            r#"(memory (export "memory") 1)"#,
            "(drop (call $output (i32.const 0) (i32.const 3000)))
             (call $log (i32.const 2) (i32.const 0) (i32.const 10))
             (i32.const 0)",
        ),
        RunLimits::default(),
    );
    assert_eq!(ending(&report), &Ending::Returned(0));
    assert_eq!(report.vm_exits, 1);
}

fn a_run_that_needs_all_of_ram_asks_for_it_by_one_exit() {
    // More than there is at the start, written from end to end.
    let wat = r#"(module (memory (export "memory") 256)
        (func (export "forge_run") (result i32)
            (memory.fill (i32.const 0) (i32.const 7) (i32.const 16777216))
            (i32.load8_u (i32.const 16777215))))"#;
    let report = run(wat, RunLimits::default());
    assert_eq!(ending(&report), &Ending::Returned(7));
    assert_eq!(report.vm_exits, 2, "one for the memory, one for the end");
}

fn megabytes_go_both_ways() {
    // Reads the whole input and writes it back: more than any window or
    // queue holds at a time.
    let wat = forge_module(
        r#"(memory (export "memory") 20)"#,
        "(drop (call $output
            (i32.const 0)
            (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
         (i32.const 0)",
    );
    let mut job = job(signed(&wat), RunLimits::default());
    let mut text = String::from("\"");
    while text.len() < 1_000_000 {
        write!(text, "{} ", text.len()).unwrap();
    }
    text.push('"');
    job.input = text.into_bytes();
    let report = serve(&job);
    assert_eq!(ending(&report), &Ending::Returned(0));
    assert!(report.output == job.input, "the bytes came back as they were sent");
}

fn artifacts_and_logs_come_back() {
    let report = run(
        &forge_module(
            r#"(memory (export "memory") 1) (data (i32.const 0) "a.csvtext/csv1,2")"#,
            "(drop (call $artifact (i32.const 0) (i32.const 5) (i32.const 5) (i32.const 8)
                (i32.const 13) (i32.const 3)))
             (call $log (i32.const 1) (i32.const 0) (i32.const 5))
             (i32.const 7)",
        ),
        RunLimits::default(),
    );
    assert_eq!(ending(&report), &Ending::Returned(7));
    assert_eq!(report.artifacts[0].name, "a.csv");
    assert_eq!(report.artifacts[0].media_type, "text/csv");
    assert_eq!(report.artifacts[0].content, b"1,2");
    assert_eq!((report.logs[0].level, report.logs[0].text.as_str()), (1, "a.csv"));
}

// Limits

const ENDLESS: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32) (loop (br 0)) (unreachable)))"#;

fn an_endless_loop_ends_by_fuel() {
    let limits = RunLimits { fuel: 1_000_000, ..RunLimits::default() };
    let report = run(ENDLESS, limits);
    let limit = Ending::Limit { kind: LimitKind::Fuel, limit: 1_000_000 };
    assert_eq!(ending(&report), &limit);
}

fn an_endless_loop_with_huge_fuel_ends_by_the_deadline() {
    let limits = RunLimits { fuel: u64::MAX, ..RunLimits::default() };
    let mut job = job(signed(ENDLESS), limits);
    // Long enough to boot on an emulated CPU.
    let deadline = Duration::from_millis(if is_emulated() { 8_000 } else { 300 });
    job.deadline = deadline_in(deadline);
    let started = Instant::now();
    let report = serve(&job);
    assert_eq!(report.fate, Fate::Deadline);
    let late = started.elapsed().saturating_sub(deadline);
    assert!(late < Duration::from_secs(30), "it ended {late:?} after its deadline");
}

fn is_emulated() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|info| info.contains("QEMU TCG"))
}

/// Resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn growing_past_the_memory_limit_fails_in_the_program_and_costs_the_host_nothing() {
    let wat = r#"(module (memory (export "memory") 1)
        (func (export "forge_run") (result i32)
            (memory.grow (i32.const 60000))))"#;
    let before = resident_bytes();
    let report = run(wat, RunLimits::default());
    assert_eq!(ending(&report), &Ending::Returned(-1));
    assert_eq!(ended(&report).memory_peak_bytes, 65_536);
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 16 << 20, "asking for 4 GiB made the host {grown} bytes larger");
}

fn a_program_may_use_all_the_memory_it_may_have() {
    // Grows page by page, the worst way, and touches the end of each.
    let wat = r#"(module (memory (export "memory") 1)
        (func (export "forge_run") (result i32)
            (loop $more
                (i32.store8 (i32.sub (i32.mul (memory.size) (i32.const 65536)) (i32.const 1))
                    (i32.const 7))
                (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))
            (memory.size)))"#;
    let limits = RunLimits::default();
    let pages = limits.memory_bytes / 65_536;
    let report = run(wat, limits.clone());
    assert_eq!(ending(&report), &Ending::Returned(pages as i32));
    assert_eq!(ended(&report).memory_peak_bytes, limits.memory_bytes);
}

fn a_program_may_leave_as_many_answers_untaken_as_it_may_have_calls_in_flight() {
    const CALLS: u32 = 64;
    const ANSWER_BYTES: usize = 4 << 20;
    // The one that is waited for settles last, behind all others' answers.
    let body = format!(
        r#"(local $last i32) (local $left i32)
           (local.set $left (i32.const {CALLS}))
           (loop $more
               (local.set $last
                   (call $call_async (i32.const 0) (i32.const 9) (i32.const 9) (i32.const 2)))
               (br_if $more (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
           (i32.ne (call $wait (local.get $last)) (i32.const {ANSWER_BYTES}))"#
    );
    let fields = r#"(import "tool" "test.echo" (func (param i32 i32) (result i32)))
        (memory (export "memory") 1) (data (i32.const 0) "test.echo{}")"#;
    let limits = RunLimits {
        calls_in_flight: CALLS,
        response_bytes: ANSWER_BYTES as u32,
        ..RunLimits::default()
    };
    let mut job = job(signed(&forge_module(fields, &body)), limits);
    job.start.granted = vec![ToolName::parse("test.echo").unwrap()];
    job.brokered = true;
    // A quarter of a gigabyte, also on an emulated CPU.
    job.deadline = deadline_in(Duration::from_secs(300));
    let (broker, theirs) = UnixStream::pair().unwrap();
    let answers = std::thread::spawn(move || answer(broker, CALLS, ANSWER_BYTES));
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let report = forge_vmm::worker::serve(&job, &trust, Some(BrokerLink::new(theirs)));
    assert_eq!(*ending(&report), Ending::Returned(0));
    answers.join().unwrap().unwrap();
}

fn deep_recursion_is_a_trap_and_no_crash() {
    let wat = r#"(module (memory (export "memory") 1)
        (func $f (param i64 i64 i64) (result i64)
            (i64.add (i64.const 1)
                (call $f (local.get 0) (local.get 1) (local.get 2))))
        (func (export "forge_run") (result i32)
            (i32.wrap_i64 (call $f (i64.const 1) (i64.const 2) (i64.const 3)))))"#;
    for recursion in [1_000, 100_000] {
        let report = run(wat, RunLimits { recursion, ..RunLimits::default() });
        let Ending::Trap { kind: TrapKind::StackOverflow, .. } = ending(&report) else {
            panic!("{:?}", ending(&report));
        };
    }
}

/// A module of about `bytes`: so many functions of `body`. `$hundred` has as many
/// results.
fn large_module(body: &str, bytes: usize, functions: usize) -> Vec<u8> {
    let (results, values) = (" i32".repeat(100), "i32.const 0 ".repeat(100));
    let hundred = format!("(func $hundred (result{results}) {values})");
    let bytes_of =
        |body| wat::parse_str(format!("(module (func (param i32) {body}) {hundred})")).unwrap();
    let one = bytes_of(body).len() - bytes_of("").len();
    let per_function = (bytes / functions).max(one);
    let body = format!("{body} ").repeat(per_function / one);
    let functions = format!("(func (param i32) {body})").repeat(bytes / per_function);
    wat::parse_str(format!(
        "(module (memory (export \"memory\") 1) {functions} {hundred}
            (func (export \"forge_run\") (result i32) (i32.const 0)))"
    ))
    .unwrap()
}

fn the_largest_programs_compile_within_the_guests_memory() {
    // Each is small in the module and larger in the interpreter.
    let conditions = format!("call $hundred {}", "if else end ".repeat(100));
    let bodies = [
        ("(drop (i64.const -1))", 15_000),
        ("(block (block (br_table 0 1 0 (local.get 0))))", 15_000),
        ("(call 0 (local.get 0))", 15_000),
        (&*conditions, 20),
    ];
    let usual = RunLimits::default();
    // As large as they can be, beside as little as there can be.
    let large = RunLimits {
        program_bytes: RunLimits::operator_maxima().program_bytes,
        memory_bytes: 65_536,
        calls_in_flight: 1,
        ..RunLimits::default()
    };
    let all = bodies.map(|it| (it, &usual)).into_iter().chain([(bodies[3], &large)]);
    for ((body, functions), limits) in all.take(if is_emulated() { 1 } else { 5 }) {
        let bytes = limits.program_bytes as usize;
        let module = large_module(body, bytes * 95 / 100, functions);
        assert!(module.len() > bytes / 2, "{body}: {}", module.len());
        let program = signer().sign(&module).unwrap();
        if program.len() > bytes {
            continue;
        }
        let report = serve(&job(program, limits.clone()));
        assert_eq!(ending(&report), &Ending::Returned(0), "{body}, {bytes}");
    }
}

/// 50 functions whose branches carry 128 values each, so many of them in each.
fn branching_module(branches: usize) -> Vec<u8> {
    let (types, values) = (" i64".repeat(128), "(i64.const 0)".repeat(128));
    let branches = "(br_if 0 (local.get 0))".repeat(branches);
    let function =
        format!("(func (param i32) (result{types}) (block (result{types}) {values} {branches}))");
    wat::parse_str(format!(
        "(module (memory (export \"memory\") 1) {}
            (func (export \"forge_run\") (result i32) (i32.const 0)))",
        function.repeat(50)
    ))
    .unwrap()
}

/// Each of them is some KiB in the interpreter, and four bytes in the module.
fn branches_that_carry_very_many_values_are_refused_before_they_fill_the_memory() {
    let compiled = |branches| {
        let program = signer().sign(&branching_module(branches)).unwrap();
        let report = serve(&job(program, RunLimits::default()));
        ending(&report).clone()
    };
    assert_eq!(compiled(31), Ending::Returned(0));
    let Ending::Rejected { kind: RejectKind::TooLarge, detail } = compiled(800) else { panic!() };
    assert!(detail.contains("carried by branches"), "{detail}");
}

// What admission refuses, the guest refuses too

fn the_guest_refuses_an_untrusted_program_again() {
    let stranger = SignerKey::from_secret(&[8; 32]).sign(&wat::parse_str(ENDLESS).unwrap());
    let mut flipped = signed(ENDLESS);
    let last = flipped.len() - 1;
    flipped[last] ^= 1;
    for program in [wat::parse_str(ENDLESS).unwrap(), stranger.unwrap(), flipped] {
        let report = serve(&job(program, RunLimits::default()));
        let Ending::Rejected { kind: RejectKind::Signature, .. } = ending(&report) else {
            panic!("{:?}", ending(&report));
        };
        assert_eq!(ended(&report).fuel_used, 0);
    }
}

const CALLS: &str = r#"(module
    (import "tool" "test.echo" (func $call (param i32 i32) (result i32)))
    (memory (export "memory") 1) (data (i32.const 0) "{}")
    (func (export "forge_run") (result i32) (call $call (i32.const 0) (i32.const 2))))"#;

fn the_guest_refuses_an_import_that_is_not_granted_again() {
    let report = run(CALLS, RunLimits::default());
    let Ending::Rejected { kind: RejectKind::Import, detail } = ending(&report) else {
        panic!("{:?}", ending(&report));
    };
    assert!(detail.contains("test.echo"), "{detail}");
}

fn a_call_without_a_broker_is_denied() {
    let report = run_granted(CALLS, "test.echo");
    assert_eq!(ending(&report), &Ending::Returned(CallCode::Denied as i32));
    assert_eq!(report.calls.len(), 1);
    assert_eq!(report.vm_exits, 2, "one for the call and its answer, one for the end");
}

fn a_call_to_nothing_in_flight_is_a_trap() {
    let report = run(
        &forge_module(r#"(memory (export "memory") 1)"#, "(call $wait_any)"),
        RunLimits::default(),
    );
    let Ending::Trap { kind: TrapKind::Misuse, .. } = ending(&report) else {
        panic!("{:?}", ending(&report));
    };
}

// Death

/// A bus without devices.
struct Nothing;

impl Bus for Nothing {
    fn read(&mut self, _: u64, _: &mut [u8]) -> machine::vcpu::Go {
        machine::vcpu::Go::Break(())
    }
    fn write(&mut self, _: u64, _: &[u8]) -> machine::vcpu::Go {
        machine::vcpu::Go::Break(())
    }
}

const RAM: usize = 32 << 20;

fn machine_with(code: &[u8]) -> Machine {
    Machine::new(&Hypervisor::open().unwrap(), &Image::with_entry_code(code).unwrap(), &[], RAM)
        .unwrap()
}

fn death_of(code: &[u8]) -> Death {
    let watchdog = Watchdog::new().unwrap();
    let _armed = watchdog.arm(deadline_in(Duration::from_secs(20)));
    match machine_with(code).run(&mut Nothing, watchdog.stop()) {
        Exit::Died(death) => death,
        other => panic!("{code:02x?} did not kill the guest: {other:?}"),
    }
}

fn frame_of(code: &[u8]) -> TrapFrame {
    match death_of(code) {
        Death::Trap { frame } => frame,
        other => panic!("{code:02x?} left no trap frame: {other}"),
    }
}

fn at(opcode: &[u8], address: u64) -> Vec<u8> {
    [opcode, &(address as u32).to_le_bytes()].concat()
}

const READ: &[u8] = &[0x48, 0x8b, 0x04, 0x25]; // mov rax, [address]
const WRITE: &[u8] = &[0x48, 0x89, 0x04, 0x25]; // mov [address], rax

fn faults_leave_a_crash_record() {
    let entry = Image::built_in().unwrap().entry();
    let jump_to_data = [at(&[0xb8], DATA), vec![0xff, 0xe0]].concat(); // mov eax, …; jmp rax
    /// Name, code, vector, error code, cr2.
    type Case = (&'static str, Vec<u8>, u64, u64, Option<u64>);
    let cases: [Case; 6] = [
        ("invalid opcode", vec![0x0f, 0x0b], 6, 0, None),
        ("division by zero", vec![0x31, 0xc9, 0xf7, 0xf1], 0, 0, None),
        ("null read", at(READ, 0), 14, 0b00100, Some(0)),
        ("write to code", at(WRITE, entry), 14, 0b00111, Some(entry)),
        ("data executed", jump_to_data, 14, 0b10101, Some(DATA)),
        ("ring 0's page read", at(READ, DESCRIPTORS), 14, 0b00101, Some(DESCRIPTORS)),
    ];
    for (name, code, vector, error_code, cr2) in cases {
        let frame = frame_of(&code);
        assert_eq!((frame.vector, frame.error_code), (vector, error_code), "{name}: {frame:x?}");
        assert_eq!(frame.cs & 3, 3, "{name}: it happened in ring 3");
        if let Some(cr2) = cr2 {
            assert_eq!(frame.cr2, cr2, "{name}: {frame:x?}");
        }
        if name != "data executed" {
            assert!((entry..entry + 16).contains(&frame.rip), "{name}: {frame:x?}");
        }
    }
}

fn a_stack_that_runs_over_faults_at_its_guard() {
    let code = [at(&[0xbc], STACK_TOP), vec![0x50, 0xeb, 0xfd]].concat(); // mov esp; push; jmp
    let frame = frame_of(&code);
    assert_eq!(frame.vector, 14);
    assert_eq!(frame.cr2, STACK - 8);
}

fn privileged_instructions_are_refused() {
    let cases: [(&str, &[u8], u64); 6] = [
        ("hlt", &[0xf4], 13),
        ("cli", &[0xfa], 13),
        ("in", &[0xec], 13),
        ("out", &[0xee], 13),
        ("mov cr3", &[0x0f, 0x22, 0xd8], 13),
        ("wrmsr", &[0x0f, 0x30], 13),
    ];
    for (name, code, vector) in cases {
        assert_eq!(frame_of(code).vector, vector, "{name}");
    }
}

fn system_calls_and_software_interrupts_lead_nowhere() {
    // Hardware refuses them where they stand. kvm-pvm lets `syscall` enter
    // ring 0 at address 0, where nothing is mapped, and `int3` through its
    // gate. Either way the trap stub is all they reach.
    for code in [&[0x0f, 0x05][..], &[0xcc], &[0xcd, 0x80], &[0x0f, 0x34]] {
        let frame = frame_of(code);
        let refused = matches!(frame.vector, 6 | 13) && frame.cs & 3 == 3;
        let fetched_nothing = frame.vector == 14 && frame.rip == 0 && frame.cr2 == 0;
        let breakpoint = frame.vector == 3 && code == [0xcc];
        assert!(refused || fetched_nothing || breakpoint, "{code:02x?}: {frame:x?}");
    }
}

fn a_panic_leaves_its_message() {
    // A boot archive whose trust key is none.
    let mut builder = forge_protocol::platform::archive::Builder::default();
    builder.add("trust/0", b"short");
    let image = Image::built_in().unwrap();
    let mut machine =
        Machine::new(&Hypervisor::open().unwrap(), image, &builder.finish(), RAM).unwrap();
    let watchdog = Watchdog::new().unwrap();
    let mut board = Board::new(machine.memory().clone(), watchdog.stop().clone());
    let _armed = watchdog.arm(deadline_in(Duration::from_secs(20)));
    assert_eq!(machine.run(&mut board, watchdog.stop()), Exit::Bus);
    let Some(Verdict::Panicked { message_bytes }) = board.take_verdict() else {
        panic!("no panic");
    };
    let Death::Panic { message } = panicked(machine.memory(), message_bytes) else { panic!() };
    assert!(message.contains("trust/0 in the boot archive is no trust key"), "{message}");
    assert!(message.contains("guest-init/src/main.rs"), "{message}");
}

fn a_guest_that_spins_is_stopped() {
    let mut machine = machine_with(&[0xeb, 0xfe]); // jmp $
    let watchdog = Watchdog::new().unwrap();
    let started = Instant::now();
    let _armed = watchdog.arm(deadline_in(Duration::from_millis(200)));
    assert_eq!(machine.run(&mut Nothing, watchdog.stop()), Exit::Stopped);
    assert!(started.elapsed() < Duration::from_secs(30));
}

/// Writes a changing value to each device register in turn, for ever.
const REGISTER_STORM: &[u8] = &[
    0x31, 0xc9, // xor ecx, ecx
    0x69, 0xc1, 0xb1, 0x79, 0x37, 0x9e, // imul eax, ecx, 0x9e3779b1
    0xc1, 0xe8, 0x1c, // shr eax, 28
    0x89, 0xca, // mov edx, ecx
    0x81, 0xe2, 0xfc, 0x01, 0x00, 0x00, // and edx, 0x1fc
    0x89, 0x82, 0x00, 0x10, 0x00, 0x00, // mov [rdx + VSOCK_MMIO], eax
    0x8b, 0x82, 0x00, 0x10, 0x00, 0x00, // mov eax, [rdx + VSOCK_MMIO]
    0xff, 0xc1, // inc ecx
    0xeb, 0xdd, // jmp to the imul
];

fn a_guest_that_writes_every_register_harms_nobody() {
    let mut machine = machine_with(REGISTER_STORM);
    let watchdog = Watchdog::new().unwrap();
    let mut board = Board::new(machine.memory().clone(), watchdog.stop().clone());
    // A busy host may give it no turn in the first of them.
    let until = Instant::now() + Duration::from_secs(60);
    while machine.exits() <= 100 {
        assert!(Instant::now() < until, "it got to the device {} times", machine.exits());
        let _armed = watchdog.arm(deadline_in(Duration::from_millis(500)));
        assert_eq!(machine.run(&mut board, watchdog.stop()), Exit::Stopped);
    }
}

fn a_guest_that_runs_away_from_its_session_is_caught() {
    // Left without a word: the EXIT register, a wait for nothing, a place
    // where nothing is.
    for (code, expected) in [
        (at(WRITE, 0x2008), "left without ending its run"),
        (at(WRITE, 0x2000), "waits for something that nobody will send"),
        (at(WRITE, 0x2ff8), "a write to nothing at 0x2ff8"),
    ] {
        let mut code = code;
        code[0] = 0x90; // 32-bit store: nop instead of the 64-bit prefix
        let watchdog = Watchdog::new().unwrap();
        let image = Image::with_entry_code(&code).unwrap();
        let hypervisor = Hypervisor::open().unwrap();
        let booted = Guest::boot(&hypervisor, &image, &TrustKeys::default(), RAM, &watchdog);
        let Err(VmFailure { kind: VmFailureKind::Misbehaved, message }) = booted else {
            panic!("{expected}: {booted:?}");
        };
        assert!(message.contains(expected), "{message}");
    }
}

// Determinism, conformance

fn two_runs_of_one_seed_are_the_same() {
    let wat = forge_module(
        r#"(memory (export "memory") 1)"#,
        "(call $random (i32.const 0) (i32.const 64))
         (i64.store (i32.const 64) (call $now_ns))
         (drop (call $output (i32.const 0) (i32.const 72)))
         (i32.const 0)",
    );
    let mut job = job(signed(&wat), RunLimits::default());
    let first = serve(&job);
    let second = serve(&job);
    assert_eq!(first.output.len(), 72);
    assert_eq!(first.output, second.output);
    assert_eq!(ended(&first).fuel_used, ended(&second).fuel_used);
    assert_eq!(first.output[64..], 1_000u64.to_le_bytes());
    job.start.seed = [3; 32];
    let other = serve(&job);
    assert_ne!(first.output[..64], other.output[..64]);
}

fn webassemblys_own_tests_hold_in_the_guest() {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-init/tests/fixtures/wast-sample");
    let index = std::fs::read_to_string(folder.join("index.txt")).unwrap();
    // Some of them grow to 16 MiB and more.
    let limits = RunLimits { memory_bytes: 32 << 20, ..RunLimits::default() };
    let mut seen = 0;
    let mut wrong = String::new();
    for line in index.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (file, expected) = line.split_once(' ').unwrap();
        let module = std::fs::read(folder.join(file)).unwrap();
        let program = signer().sign(&module).unwrap();
        let report = serve(&job(program, limits.clone()));
        let got = match &report.fate {
            Fate::Ended(Ended { ending: Ending::Returned(code), .. }) => format!("returned {code}"),
            Fate::Ended(Ended { ending: Ending::Trap { kind, .. }, .. }) => {
                format!("trap {}", kind.as_str())
            }
            other => format!("{other:?}"),
        };
        if got != expected {
            writeln!(wrong, "{file}: {got}, not {expected}").unwrap();
        }
        seen += 1;
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(seen > 100, "only {seen} programs in the sample");
}
