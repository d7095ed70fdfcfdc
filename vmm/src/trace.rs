//! Where the time of one run went: spans over the processes it went through,
//! in the trace event format that Perfetto and Chrome open.

use forge_protocol::run::CallRecord;
use forge_protocol::worker::{Moments, Timing};
pub use forge_worker::clock::now_ns;
use serde_json::{Value, json};

use crate::report::call_status;

/// When what happened in the supervisor, as [`now_ns`]; 0 for what did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Supervised {
    /// The request was there.
    pub started: u64,
    /// The program was admitted.
    pub admitted: u64,
    /// The run was open at the broker, and its imports were granted.
    pub opened: u64,
    /// There was a worker for it.
    pub taken: u64,
    /// It was handed over.
    pub handed: u64,
    /// The report was there.
    pub reported: u64,
}

/// The way of one run through supervisor, worker and guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// When the run passed each point in the supervisor.
    pub supervised: Supervised,
    /// Times in the worker and its guest.
    pub timing: Timing,
    /// Its tool calls, in the worker's words.
    pub calls: Vec<CallRecord>,
}

const SUPERVISOR: u32 = 1;
const WORKER: u32 = 2;
const GUEST: u32 = 3;
const CALLS: u32 = 4;

/// One tool call: what of the trace's lanes it is drawn in, and from when to when.
#[derive(Debug, PartialEq, Eq)]
struct CallSpan<'a> {
    call: &'a CallRecord,
    lane: usize,
    from: u64,
    to: u64,
}

impl Trace {
    /// The spans, by process: their names, and from when to when. A worker
    /// that stood ready before the request has some that lie before it.
    #[must_use]
    pub fn spans(&self) -> Vec<(u32, &'static str, u64, u64)> {
        let Supervised { started, admitted, opened, taken, handed, reported } = self.supervised;
        let Timing { load_ns, run_ns, at, .. } = self.timing;
        let Moments { forked, made, jailed, ready, arrived, begun, ended } = at;
        // Claims of a worker, all of them.
        let first = begun.saturating_add(load_ns);
        let spans = [
            (SUPERVISOR, "admission: size, signature, declarations", started, admitted),
            (SUPERVISOR, "broker: open the run, grant", admitted, opened),
            (SUPERVISOR, "pool: take or make a worker", opened, taken),
            (SUPERVISOR, "hand over the run", taken, handed),
            (SUPERVISOR, "await the report", handed, reported),
            (WORKER, "make the VM from the base", forked, made),
            (WORKER, "touch memory, mark where to reset to", made, ready),
            (WORKER, "close itself in", ready, jailed),
            (WORKER, "take the run in", arrived, begun),
            (WORKER, "KVM_RUN", begun, ended),
            (GUEST, "verify, parse, instantiate", begun, first),
            (GUEST, "the program", first, first.saturating_add(run_ns)),
        ];
        spans.into_iter().filter(|(_, _, from, to)| *from != 0 && to >= from).collect()
    }

    /// The calls, each in a lane that is free when it begins: the format nests what
    /// overlaps in one. A call that never settled lasts to the end.
    fn calls(&self) -> Vec<CallSpan<'_>> {
        let mut calls: Vec<_> = self.calls.iter().filter(|call| call.begun_ns != 0).collect();
        calls.sort_by_key(|call| (call.begun_ns, call.id));
        // From when each lane is free.
        let mut lanes: Vec<u64> = Vec::new();
        let mut spans = Vec::with_capacity(calls.len());
        for call in calls {
            let from = call.begun_ns;
            let to = match call.settled {
                Some(settled) => from.saturating_add(settled.duration_ns),
                None => self.timing.at.ended.max(from),
            };
            let lane = lanes.iter().position(|free| *free <= from).unwrap_or(lanes.len());
            match lanes.get_mut(lane) {
                Some(free) => *free = to,
                None => lanes.push(to),
            }
            spans.push(CallSpan { call, lane, from, to });
        }
        spans
    }

    /// The same in the trace event format.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let names = [
            (SUPERVISOR, "supervisor"),
            (WORKER, "worker"),
            (GUEST, "guest"),
            (CALLS, "tool calls"),
        ];
        let mut events: Vec<Value> = names
            .iter()
            .map(|(pid, name)| {
                json!({"ph": "M", "name": "process_name", "pid": pid, "tid": 1,
                       "args": {"name": name}})
            })
            .collect();
        // Microseconds, with the nanoseconds behind the point.
        let us = |ns: u64| ns as f64 / 1000.0;
        for (pid, name, from, to) in self.spans() {
            events.push(json!({"ph": "X", "cat": "run", "name": name, "pid": pid, "tid": 1,
                               "ts": us(from), "dur": us(to - from)}));
        }
        for CallSpan { call, lane, from, to } in self.calls() {
            events.push(json!({"ph": "X", "cat": "call", "name": call.tool.as_str(), "pid": CALLS,
                               "tid": lane + 1, "ts": us(from), "dur": us(to - from),
                               "args": {"id": call.id, "status": call_status(call)}}));
        }
        json!({"displayTimeUnit": "ns", "traceEvents": events})
    }
}

#[cfg(test)]
mod tests {
    use forge_protocol::run::CallSettled;

    use super::*;

    #[test]
    fn every_span_lies_where_its_moments_say() {
        let at = Moments { arrived: 500, begun: 600, ended: 900, ..Moments::default() };
        let timing = Timing { load_ns: 100, run_ns: 50, at, ..Timing::default() };
        let supervised = Supervised {
            started: 100,
            admitted: 200,
            opened: 300,
            taken: 350,
            handed: 400,
            reported: 1000,
        };
        let spans = Trace { supervised, timing, calls: Vec::new() }.spans();
        assert!(spans.contains(&(GUEST, "the program", 700, 750)));
        assert!(
            spans.iter().all(|(pid, _, from, to)| *pid != WORKER || (*from, *to) >= (500, 600))
        );
        let json = Trace { supervised, timing, calls: Vec::new() }.to_json();
        assert_eq!(json["traceEvents"].as_array().map(Vec::len), Some(4 + spans.len()));
    }

    #[test]
    fn calls_that_overlap_lie_in_lanes_of_their_own() {
        let call = |id, begun_ns, duration_ns: Option<u64>| CallRecord {
            id,
            tool: "crm.find".parse().unwrap(),
            begun_ns,
            settled: duration_ns.map(|duration_ns| CallSettled {
                code: None,
                duration_ns,
                redacted: false,
            }),
        };
        // In the order of settling; the last is of who does not know when.
        let calls = vec![
            call(1, 150, Some(20)),
            call(0, 100, Some(100)),
            call(2, 180, Some(u64::MAX)),
            call(3, 250, None),
            call(4, 0, Some(9)),
        ];
        let timing =
            Timing { at: Moments { ended: 300, ..Moments::default() }, ..Timing::default() };
        let trace = Trace { timing, calls, ..Trace::default() };
        let drawn: Vec<_> =
            trace.calls().iter().map(|it| (it.call.id, it.lane, it.from, it.to)).collect();
        let expected =
            [(0, 0, 100, 200), (1, 1, 150, 170), (2, 1, 180, u64::MAX), (3, 0, 250, 300)];
        assert_eq!(drawn, expected);
        let json = trace.to_json();
        let last = json["traceEvents"].as_array().unwrap().last().unwrap();
        assert_eq!(
            (&last["name"], &last["args"]["status"]),
            (&json!("crm.find"), &json!("unsettled"))
        );
        assert_eq!((&last["tid"], &last["dur"]), (&json!(1), &json!(0.05)));
    }

    #[test]
    fn a_worker_cannot_claim_a_time_that_is_no_time() {
        let at = Moments { begun: u64::MAX, ..Moments::default() };
        let timing = Timing { load_ns: u64::MAX, run_ns: u64::MAX, at, ..Timing::default() };
        let spans = Trace { timing, ..Trace::default() }.spans();
        assert!(spans.contains(&(GUEST, "the program", u64::MAX, u64::MAX)));
    }
}
