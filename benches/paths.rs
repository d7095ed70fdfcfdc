//! Criterion benches of the paths that every run or every call takes on the
//! host, without a VM. What a whole run costs is `forge-vmm bench`'s to say.
//!
//! `cargo bench -p forge-benches`; `-- --test` runs each once.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forge_protocol::frame::{self, Assembler, Kind};
use forge_protocol::guest::{Call, GuestSession, HostEvent, HostSession, Load, Settled, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::{RunId, codec};
use forge_vmm::admission;
use forge_vmm::bench::program::Program;
use forge_vmm::vsock::connection::{Header, op};
use forge_vmm::vsock::{ConnectionId, Muxer};

fn call() -> Call {
    Call {
        id: 7,
        waits: true,
        tool: ToolName::parse("inventory.find_parts").unwrap_or_else(|_| unreachable!()),
        request: br#"{"query":"bolt","max":5}"#.repeat(5),
    }
}

fn frames(c: &mut Criterion) {
    let call = call();
    let mut bytes = Vec::new();
    frame::write_message(Kind::Call, &call, &mut bytes);
    let mut group = c.benchmark_group("frame");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    let mut out = Vec::with_capacity(bytes.len());
    group.bench_function("encode a call", |b| {
        b.iter(|| {
            out.clear();
            frame::write_message(Kind::Call, black_box(&call), &mut out);
        });
    });
    group.bench_function("assemble and decode a call", |b| {
        b.iter(|| {
            let mut input = black_box(&bytes[..]);
            let awaits = |kind: Kind| Some(kind.payload_bytes_max());
            let frame = Assembler::default().next(&mut input, awaits);
            frame.ok().flatten().and_then(|frame| codec::decode::<Call>(&frame.payload).ok())
        });
    });
    group.finish();
}

fn programs(c: &mut Criterion) {
    let Ok(program) = Program::new() else { unreachable!("the benched program assembles") };
    let limits = RunLimits::default();
    let mut group = c.benchmark_group("program");
    group.throughput(Throughput::Bytes(program.signed.len() as u64));
    group.bench_function("verify", |b| {
        b.iter(|| program.trust.verify(black_box(&program.signed)).is_ok());
    });
    group.bench_function("admit", |b| {
        b.iter(|| admission::admit(black_box(&program.signed), &program.trust, &limits).is_ok());
    });
    group.finish();
}

/// A guest and a host session in the middle of a run.
fn running() -> (GuestSession, HostSession) {
    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    let limits = RunLimits { calls: u32::MAX, ..RunLimits::default() };
    let load = Load { limits, announce: false };
    let start =
        Start { run_id: RunId([0; 16]), seed: [0; 32], start_unix_ns: 0, granted: Vec::new() };
    let greeted = host.receive(&std::mem::take(guest.transmit()));
    let started = host.load(&load, b"program").and_then(|()| host.start(&start, b"{}"));
    let received = guest.receive(&std::mem::take(host.transmit()));
    assert!(greeted.is_ok() && started.is_ok() && received.is_ok());
    while guest.poll_event().is_some() {}
    (guest, host)
}

fn sessions(c: &mut Criterion) {
    let Call { tool, request, .. } = call();
    let body = vec![b'x'; 200];
    c.bench_function("session/a call and its answer", |b| {
        let (mut guest, mut host) = running();
        b.iter(|| {
            let Ok(id) = guest.call(&tool, &request, true) else { return false };
            let taken = host.receive(guest.transmit()).is_ok();
            guest.transmit().clear();
            let called = matches!(host.poll_event(), Some(HostEvent::Call(_)));
            let settled = Settled { id, code: None, duration_ns: 1, body: body.clone() };
            let answered = host.settle(&settled).is_ok() && guest.receive(host.transmit()).is_ok();
            host.transmit().clear();
            assert!(taken && called && answered && guest.poll_event().is_some());
            true
        });
    });
}

fn packets(c: &mut Criterion) {
    let id = ConnectionId { host_port: 1024, guest_port: 1 };
    let header =
        |operation, forwarded| Header { operation, flags: 0, buffer_bytes: 64 * 1024, forwarded };
    let payload = vec![0; 200];
    c.bench_function("vsock/a packet each way", |b| {
        let mut muxer = Muxer::listening_on([1024]);
        muxer.handle(id, header(op::REQUEST, 0), &[]);
        muxer.poll(0, |_, _| {});
        let mut sent = 0u32;
        b.iter(|| {
            muxer.handle(id, header(op::RW, sent), &payload);
            while muxer.poll_event().is_some() {}
            let Some(connection) = muxer.connection(id) else { return false };
            connection.take_incoming();
            connection.send(&payload);
            muxer.poll(16 * 1024, |_, outgoing| {
                sent = sent.wrapping_add(outgoing.payload.len() as u32);
            })
        });
    });
}

criterion_group!(paths, frames, programs, sessions, packets);
criterion_main!(paths);
