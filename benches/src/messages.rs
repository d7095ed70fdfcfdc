//! Messages through the codec, and a call through both sessions.

use std::hint::black_box;

use forge_protocol::RunId;
use forge_protocol::codec::{self, BorrowDecode, Encode};
use forge_protocol::ending::Ending;
use forge_protocol::frame::{self, Assembler, Kind};
use forge_protocol::guest::{
    Call, Ended, GuestSession, HostEvent, HostSession, Load, Settled, Start,
};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, CallRecord, CallSettled, Log};
use forge_protocol::worker::{Fate, Job, Report, Timing};
use forge_vmm::bench::program::Program;

use crate::{Entry, Path, said, step};

pub(crate) const ENTRIES: &[Entry] = &[
    Entry { name: "codec/encode a call", make: || Ok(encode(Kind::Call, call()?)) },
    Entry { name: "codec/decode a call", make: || Ok(decode(Kind::Call, &call()?)) },
    Entry { name: "codec/encode a job", make: || Ok(encode(Kind::Job, job()?)) },
    Entry { name: "codec/decode a job", make: || Ok(decode(Kind::Job, &job()?)) },
    Entry { name: "codec/encode a report", make: || Ok(encode(Kind::Report, report()?)) },
    Entry { name: "codec/decode a report", make: || Ok(decode(Kind::Report, &report()?)) },
    Entry { name: "session/a call and its answer", make: call_and_answer },
];

fn tool() -> Result<ToolName, String> {
    ToolName::parse("inventory.find_parts").map_err(said)
}

fn call() -> Result<Call, String> {
    let request = br#"{"query":"bolt","max":5}"#.repeat(5);
    Ok(Call { id: 7, waits: true, tool: tool()?, request })
}

fn job() -> Result<Job, String> {
    Ok(Program::new()?.next_job())
}

/// Of a run with ten calls, a page of output and some log.
fn report() -> Result<Report, String> {
    let settled = Some(CallSettled { code: None, duration_ns: 250_000, redacted: false });
    let tool = tool()?;
    Ok(Report {
        fate: Fate::Ended(Ended {
            ending: Ending::Returned(0),
            fuel_used: 182_953,
            memory_peak_bytes: 65_536,
            logs_dropped: 0,
            load_ticks: 2_000_000,
            run_ticks: 3_000_000,
        }),
        output: vec![b'x'; 4096],
        artifacts: vec![Artifact {
            name: "restock.csv".into(),
            media_type: "text/csv".into(),
            content: vec![b','; 512],
        }],
        logs: (0..5).map(|level| Log { level, text: "a line of log".repeat(4) }).collect(),
        calls: (0..10)
            .map(|id| CallRecord { id, tool: tool.clone(), begun_ns: 1, settled })
            .collect(),
        vm_exits: 14,
        timing: Timing::default(),
    })
}

fn encode<T: Encode + 'static>(kind: Kind, message: T) -> Box<dyn Path> {
    let mut out = Vec::new();
    step(move || {
        out.clear();
        frame::write_message(kind, black_box(&message), &mut out);
        black_box(&out);
        Ok(())
    })
}

fn decode<T>(kind: Kind, message: &T) -> Box<dyn Path>
where
    T: Encode + for<'a> BorrowDecode<'a, ()> + 'static,
{
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    step(move || {
        let mut input = black_box(&bytes[..]);
        let awaits = |kind: Kind| Some(kind.payload_bytes_max());
        let frame = Assembler::default().next(&mut input, awaits).map_err(said)?;
        let frame = frame.ok_or("a frame is not whole")?;
        black_box(codec::decode::<T>(&frame.payload).map_err(said)?);
        Ok(())
    })
}

/// A call from the guest's session to the host's, and the answer back.
fn call_and_answer() -> Result<Box<dyn Path>, String> {
    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    let limits = RunLimits { calls: u32::MAX, ..RunLimits::default() };
    let load = Load { limits, announce: false };
    let start =
        Start { run_id: RunId([0; 16]), seed: [0; 32], start_unix_ns: 0, granted: Vec::new() };
    host.receive(&std::mem::take(guest.transmit())).map_err(said)?;
    host.load(&load, b"program").map_err(said)?;
    host.start(&start, b"{}").map_err(said)?;
    guest.receive(&std::mem::take(host.transmit())).map_err(said)?;
    while guest.poll_event().is_some() {}

    let Call { tool, request, .. } = call()?;
    let body = vec![b'x'; 200];
    Ok(step(move || {
        let id = guest.call(&tool, &request, true).map_err(said)?;
        host.receive(guest.transmit()).map_err(said)?;
        guest.transmit().clear();
        let Some(HostEvent::Call(_)) = host.poll_event() else {
            return Err("the call did not arrive".into());
        };
        let settled =
            Settled { id, code: None, duration_ns: 1, body: body.clone(), redacted: false };
        host.settle(&settled).map_err(said)?;
        guest.receive(host.transmit()).map_err(said)?;
        host.transmit().clear();
        guest.poll_event().map(drop).ok_or_else(|| "the answer did not arrive".into())
    }))
}
