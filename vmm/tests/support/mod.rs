//! What the VM tests share: programs, keys, jobs, and a runner that counts
//! them as ignored, loudly, where there is no KVM.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{Load, Settled, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::signature::{SignerKey, TrustKeys};
use forge_protocol::worker::{Job, Report};
use forge_vmm::link::{Link, Patience};
use forge_vmm::machine::{Hypervisor, deadline_in};
use libtest_mimic::{Arguments, Trial};

/// A test, by its claim.
pub type Test = (&'static str, fn());

/// Waits for what must come about.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "it never came about that {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Names a list of test functions.
#[macro_export]
macro_rules! claims {
    ($($test:ident),* $(,)?) => { &[$((stringify!($test), $test as fn())),*] };
}

/// Runs the tests, those of `vm` only where `/dev/kvm` opens.
pub fn main(vm: &[Test], elsewhere: &[Test]) -> ExitCode {
    main_where("VM", Hypervisor::open().err().map(|why| why.to_string()), vm, elsewhere)
}

/// Runs the tests, those that need something only where it is not `missing`.
pub fn main_where(
    need: &str,
    missing: Option<String>,
    needing: &[Test],
    elsewhere: &[Test],
) -> ExitCode {
    let arguments = Arguments::from_args();
    if let Some(why) = &missing
        && !arguments.list
    {
        eprintln!("SKIPPED: {} {need} tests: {why}", needing.len());
    }
    let trial = |(name, test): &Test| {
        let test = *test;
        Trial::test(*name, move || {
            test();
            Ok(())
        })
    };
    let needing = needing.iter().map(|test| trial(test).with_ignored_flag(missing.is_some()));
    let elsewhere = elsewhere.iter().map(trial);
    libtest_mimic::run(&arguments, needing.chain(elsewhere).collect()).exit_code()
}

/// The key all test programs are signed with.
pub fn signer() -> SignerKey {
    SignerKey::from_secret(&[7; 32])
}

/// Assembles and signs.
pub fn signed(wat: &str) -> Vec<u8> {
    signer().sign(&wat::parse_str(wat).unwrap()).unwrap()
}

/// A module with the whole of `forge` imported as `$name`, one page of
/// memory, and this body for `forge_run`, which must leave an i32.
pub fn forge_module(more: &str, body: &str) -> String {
    use forge_protocol::abi::{Forge, Value};
    let mut imports = String::new();
    for function in Forge::ALL {
        let name = function.name();
        let signature = function.signature();
        let word = |value: &Value| match value {
            Value::I32 => "i32",
            Value::I64 => "i64",
        };
        let params: Vec<_> = signature.params.iter().map(word).collect();
        let result =
            signature.result.as_ref().map(|r| format!("(result {})", word(r))).unwrap_or_default();
        imports.push_str(&format!(
            "(import \"forge\" \"{name}\" (func ${name} (param {}) {result}))\n",
            params.join(" "),
        ));
    }
    format!(
        "(module {imports}
            {more}
            (func (export \"forge_run\") (result i32) {body}))"
    )
}

/// Writes `hello`.
pub const HELLO: &str = r#"(module
    (import "forge" "output" (func $output (param i32 i32) (result i32)))
    (memory (export "memory") 1) (data (i32.const 0) "hello")
    (func (export "forge_run") (result i32)
        (drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)))"#;

/// Calls one tool with a fixed request and writes its response.
pub fn calls(tool: &str, request: &str) -> String {
    forge_module(
        &format!(
            "(import \"tool\" \"{tool}\" (func $call_tool (param i32 i32) (result i32)))
             (memory (export \"memory\") 2) (data (i32.const 0) {request:?})"
        ),
        &format!(
            "(local $n i32)
             (local.set $n (call $call_tool (i32.const 0) (i32.const {})))
             (if (i32.lt_s (local.get $n) (i32.const 0)) (then (return (local.get $n))))
             (drop (call $output (i32.const 4096)
                (call $resp_read (i32.const 4096) (i32.const 0) (i32.const 100000))))
             (i32.const 0)",
            request.len()
        ),
    )
    // An import cannot follow a definition, and forge_module puts ours first.
}

/// Asks the inventory for the stock of `P-1001`, and `app.price` with what it
/// says; outputs what that says.
pub fn joins() -> Vec<u8> {
    signed(&forge_module(
        r#"(import "tool" "inventory.get_stock" (func $stock (param i32 i32) (result i32)))
           (import "tool" "app.price" (func $price (param i32 i32) (result i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "{\"part_id\":\"P-1001\"}")"#,
        r#"(local $bytes i32)
           (local.set $bytes (call $resp_read (i32.const 1000) (i32.const 0)
               (call $stock (i32.const 0) (i32.const 20))))
           (local.set $bytes (call $price (i32.const 1000) (local.get $bytes)))
           (drop (call $output (i32.const 1000)
               (call $resp_read (i32.const 1000) (i32.const 0) (local.get $bytes))))
           (i32.const 0)"#,
    ))
}

/// Answers so many calls over a run's link, as the toolbroker would, each with so many
/// bytes.
///
/// # Errors
/// The worker is gone.
pub fn answer(link: UnixStream, calls: u32, bytes: usize) -> io::Result<()> {
    let mut link = Link::new(link);
    let patience = Patience::default();
    for id in 0..calls {
        link.receive(|kind| kind == Kind::Call, patience)?;
        let body = vec![b'1'; bytes];
        let settled = Settled { id, code: None, duration_ns: 1, body, redacted: false };
        let mut message = Vec::new();
        frame::write_message(Kind::Settled, &settled, &mut message);
        link.send(&message, patience)?;
    }
    Ok(())
}

/// A job without tools.
pub fn job(program: Vec<u8>, limits: RunLimits) -> Job {
    Job {
        load: Load { limits, announce: false },
        start: Start {
            run_id: RunId([1; 16]),
            seed: [2; 32],
            start_unix_ns: 1_000,
            granted: Vec::new(),
        },
        program,
        input: b"{}".to_vec(),
        // On an emulated CPU everything takes longer; the tests of deadlines
        // say their own.
        deadline: deadline_in(Duration::from_secs(60)),
        brokered: false,
    }
}

/// Runs a job without a broker in a VM of its own, in this process.
pub fn serve(job: &Job) -> Report {
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    forge_vmm::worker::serve(job, &trust, None)
}

/// Runs a program without tools in a VM of its own, in this process.
pub fn run(wat: &str, limits: RunLimits) -> Report {
    serve(&job(signed(wat), limits))
}

/// Runs a program that imports a tool nobody is there to answer for.
pub fn run_granted(wat: &str, tool: &str) -> Report {
    let mut job = job(signed(wat), RunLimits::default());
    job.start.granted = vec![ToolName::parse(tool).unwrap()];
    serve(&job)
}
