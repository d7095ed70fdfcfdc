//! Very many VMs wait in a tool call at a time, each in a worker of its own,
//! and every one of them finishes with its own answer.
//!
//! `FORGE_DENSITY` says how many (100; 2,000 by explicit command, which takes
//! 3 descriptors each). What a waiting VM costs is printed; `forge-vmm bench`
//! measures it.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::ending::Ending;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Fate;
use forge_vmm::bench::memory::{available_kib, wait_until_given_back};
use forge_vmm::link::{Link, Patience};
use forge_vmm::machine::deadline_in;
use forge_vmm::pool::worker::{Run, Worker};
use forge_vmm::pool::{Pool, PoolOptions};
use support::{forge_module, job, signed, signer};

fn main() -> ExitCode {
    support::main(claims![many_vms_wait_in_a_tool_call_at_once], claims![])
}

fn density() -> usize {
    std::env::var("FORGE_DENSITY").map_or(100, |count| count.parse().unwrap())
}

/// As many descriptors as this process may have.
fn raise_open_files(needed: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a writable, then a readable record.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    assert!(limit.rlim_cur >= needed, "ulimit -n {needed} is needed, it is {}", limit.rlim_cur);
}

fn many_vms_wait_in_a_tool_call_at_once() {
    let count = density();
    raise_open_files(3 * count as u64 + 64);
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let pool = Pool::new(&trust, PoolOptions::default()).unwrap();
    let mut job = job(
        signed(&forge_module(
            r#"(import "tool" "test.echo" (func $ask (param i32 i32) (result i32)))
               (memory (export "memory") 1) (data (i32.const 0) "{}")"#,
            "(drop (call $ask (i32.const 0) (i32.const 2)))
             (drop (call $output (i32.const 64)
                (call $resp_read (i32.const 64) (i32.const 0) (i32.const 1000))))
             (i32.const 0)",
        )),
        RunLimits::default(),
    );
    let time = Duration::from_secs(600);
    job.deadline = deadline_in(time);
    job.brokered = true;
    job.start.granted = vec![ToolName::parse("test.echo").unwrap()];
    let patience = Patience::until(Instant::now() + time);

    let mut waiting: Vec<(Worker, Link, Call)> = Vec::with_capacity(count);
    wait_until_given_back().unwrap();
    let mut before = 0.0;
    for _ in 0..count {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut worker = pool.make(false).unwrap();
        worker.begin(Run::Whole(&job), Some(&theirs), patience).unwrap();
        drop(theirs);
        let mut broker = Link::new(ours);
        let frame = broker.receive(|kind| kind == Kind::Call, patience).unwrap();
        let call: Call = codec::decode(&frame.payload).unwrap();
        assert_eq!(call.tool.as_str(), "test.echo");
        waiting.push((worker, broker, call));
        if waiting.len() == 1 {
            // The first makes what all have in common.
            before = available_kib().unwrap();
        }
    }
    let kib = before - available_kib().unwrap();
    for (number, (worker, broker, call)) in waiting.iter_mut().enumerate().rev() {
        // Each has an answer of its own.
        let body = format!("{{\"number\":{number}}}").into_bytes();
        let settled = Settled { id: call.id, code: None, duration_ns: 1, body, redacted: false };
        let mut bytes = Vec::new();
        frame::write_message(Kind::Settled, &settled, &mut bytes);
        broker.send(&bytes, patience).unwrap();
        let report = worker.finish(patience).unwrap_or_else(|lost| panic!("{number}: {lost:?}"));
        let Fate::Ended(ended) = &report.fate else { panic!("{number}: {:?}", report.fate) };
        assert_eq!(ended.ending, Ending::Returned(0), "{number}");
        assert_eq!(report.output, settled.body, "{number}");
    }
    assert_eq!(waiting.len(), count);
    eprintln!(
        "{count} VMs waited at once and finished; {:.0} KiB of each beyond the first",
        kib / (count as f64 - 1.0).max(1.0)
    );
}
