//! Where the time of one run went: spans over the processes it went through,
//! in the trace event format that Perfetto and Chrome open.

use forge_protocol::worker::{Moments, Timing};
pub use forge_worker::clock::now_ns;
use serde_json::{Value, json};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// In the supervisor.
    pub supervised: Supervised,
    /// In the worker and its guest.
    pub timing: Timing,
}

const SUPERVISOR: u32 = 1;
const WORKER: u32 = 2;
const GUEST: u32 = 3;

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

    /// The same in the trace event format.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let names = [(SUPERVISOR, "supervisor"), (WORKER, "worker"), (GUEST, "guest")];
        let mut events: Vec<Value> = names
            .iter()
            .map(|(pid, name)| {
                json!({"ph": "M", "name": "process_name", "pid": pid, "tid": 1,
                       "args": {"name": name}})
            })
            .collect();
        for (pid, name, from, to) in self.spans() {
            // Microseconds, with the nanoseconds behind the point.
            let us = |ns: u64| ns as f64 / 1000.0;
            events.push(json!({"ph": "X", "cat": "run", "name": name, "pid": pid, "tid": 1,
                               "ts": us(from), "dur": us(to - from)}));
        }
        json!({"displayTimeUnit": "ns", "traceEvents": events})
    }
}

#[cfg(test)]
mod tests {
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
        let spans = Trace { supervised, timing }.spans();
        assert!(spans.contains(&(GUEST, "the program", 700, 750)));
        assert!(
            spans.iter().all(|(pid, _, from, to)| *pid != WORKER || (*from, *to) >= (500, 600))
        );
        let json = Trace { supervised, timing }.to_json();
        assert_eq!(json["traceEvents"].as_array().map(Vec::len), Some(3 + spans.len()));
    }

    #[test]
    fn a_worker_cannot_claim_a_time_that_is_no_time() {
        let at = Moments { begun: u64::MAX, ..Moments::default() };
        let timing = Timing { load_ns: u64::MAX, run_ns: u64::MAX, at, ..Timing::default() };
        let spans = Trace { supervised: Supervised::default(), timing }.spans();
        assert!(spans.contains(&(GUEST, "the program", u64::MAX, u64::MAX)));
    }
}
