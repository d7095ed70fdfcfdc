//! The host's side of a guest's session, whatever the guest is in: it takes
//! what the guest says, carries its calls to the broker, and keeps what the
//! run leaves.
//!
//! It distrusts the guest and bounds what comes back for it. How bytes get
//! from one to the other is not known here.

use std::os::fd::RawFd;

use forge_protocol::abi::CallCode;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{Call, HostEvent, HostSession, Load, SessionError, Settled};
use forge_protocol::limits::{MESSAGE_OVERHEAD_BYTES, RunLimits};
use forge_protocol::run::{Artifact, CallRecord, CallSettled, Log};
use forge_protocol::service::{Event as RunEventMessage, RunEvent};
use forge_protocol::worker::{
    Fate, Job, Prepare, PreparedJob, Report, Timing, VmFailure, VmFailureKind,
};

use super::broker_link::BrokerLink;
use super::verdict::Verdict;
use crate::clock::now_ns;
use crate::link::send_once;
use crate::machine::Stop;

/// What a run leaves.
#[derive(Debug, Default)]
pub struct Record {
    /// Its output.
    pub output: Vec<u8>,
    /// Its artifacts.
    pub artifacts: Vec<Artifact>,
    /// Its log.
    pub logs: Vec<Log>,
    /// Its calls: settled ones first, in the order in which they settled.
    pub calls: Vec<CallRecord>,
}

impl Record {
    /// The report of a run that left this.
    pub(crate) fn into_report(self, fate: Fate, vm_exits: u64, timing: Timing) -> Report {
        let Self { output, artifacts, logs, calls } = self;
        Report { fate, output, artifacts, logs, calls, vm_exits, timing }
    }
}

/// Broker link of one guest, and what its run has left so far.
#[derive(Debug)]
pub(crate) struct Counterpart {
    broker: Option<BrokerLink>,
    response_bytes_max: usize,
    untaken_bytes_max: usize,
    stop: Stop,
    record: Record,
    in_flight: Vec<CallRecord>,
    /// Where to tell what happens as it happens.
    told: Option<RawFd>,
}

impl Counterpart {
    /// That of a guest without a run, whose waits end when `stop` is raised.
    pub(crate) fn new(stop: Stop) -> Self {
        Self {
            broker: None,
            response_bytes_max: 0,
            // Before it has a program it is sent a greeting.
            untaken_bytes_max: MESSAGE_OVERHEAD_BYTES as usize,
            stop,
            record: Record::default(),
            in_flight: Vec::new(),
            told: None,
        }
    }

    /// Forgets the run, and not the program's limits.
    pub(crate) fn forget_run(&mut self) {
        let Self { response_bytes_max, untaken_bytes_max, .. } = *self;
        *self = Self { response_bytes_max, untaken_bytes_max, ..Self::new(self.stop.clone()) };
    }

    /// How many bytes may wait at most for the guest to take them.
    pub(crate) fn untaken_bytes_max(&self) -> usize {
        self.untaken_bytes_max
    }

    fn go_by(&mut self, limits: &RunLimits) {
        self.response_bytes_max = limits.response_bytes as usize;
        self.untaken_bytes_max = untaken_bytes_max(limits);
    }

    /// Has the next run tell what happens, as it happens, on this socket.
    pub(crate) fn tell(&mut self, socket: RawFd) {
        self.told = Some(socket);
    }

    /// What the run left.
    pub(crate) fn take_record(&mut self, session: &mut HostSession) -> Record {
        let mut record = std::mem::take(&mut self.record);
        record.logs.extend(session.take_unfinished());
        record.calls.append(&mut self.in_flight);
        record
    }

    /// Whether calls are under way.
    pub(crate) fn has_calls(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Puts a program before a guest that stands ready, to be loaded ahead of
    /// its runs.
    ///
    /// # Errors
    /// If the guest is not ready: our bug.
    pub(crate) fn prepare(
        &mut self,
        session: &mut HostSession,
        order: &Prepare,
    ) -> Result<(), VmFailure> {
        let load = Load { announce: true, ..order.load.clone() };
        session.load(&load, &order.program).map_err(misused)?;
        self.go_by(&load.limits);
        Ok(())
    }

    /// Puts a run before a guest that stands ready.
    ///
    /// # Errors
    /// If the guest is not ready or the job is past its own limits: our bug.
    pub(crate) fn begin(
        &mut self,
        session: &mut HostSession,
        job: &Job,
        broker: Option<BrokerLink>,
    ) -> Result<(), VmFailure> {
        session.load(&job.load, &job.program).map_err(misused)?;
        session.start(&job.start, &job.input).map_err(misused)?;
        self.go_by(&job.load.limits);
        self.broker = broker;
        Ok(())
    }

    /// Puts a run before a guest that has the program already.
    ///
    /// # Errors
    /// If it has none or the input is past its limits: our bug.
    pub(crate) fn begin_prepared(
        &mut self,
        session: &mut HostSession,
        job: &PreparedJob,
        broker: Option<BrokerLink>,
    ) -> Result<(), VmFailure> {
        session.start(&job.start, &job.input).map_err(misused)?;
        self.broker = broker;
        Ok(())
    }

    /// Works off what the session has of the guest.
    ///
    /// # Errors
    /// [`Verdict`], which may be the run's ordinary end.
    pub(crate) fn take_in(&mut self, session: &mut HostSession) -> Result<(), Verdict> {
        while let Some(event) = session.poll_event() {
            match event {
                HostEvent::Call(call) => self.call(session, &call)?,
                HostEvent::Output(bytes) => {
                    self.happened(|| RunEvent::Output(bytes.clone()))?;
                    self.record.output.extend_from_slice(&bytes);
                }
                HostEvent::Log(log) => {
                    self.happened(|| RunEvent::Log(log.clone()))?;
                    self.record.logs.push(log);
                }
                HostEvent::Artifact(artifact) => self.record.artifacts.push(artifact),
                HostEvent::Ended(ended) => return Err(Verdict::Ended(ended)),
            }
        }
        Ok(())
    }

    /// Waits until the broker settles something, no longer than the deadline.
    ///
    /// # Errors
    /// [`Verdict`].
    pub(crate) fn await_settled(&mut self, session: &mut HostSession) -> Result<(), Verdict> {
        let Some(broker) = &mut self.broker else {
            return Err(Verdict::Internal("a call is in flight without a broker".into()));
        };
        let settled = broker.receive(&self.stop)?;
        self.settle(session, settled)
    }

    /// Tells it, as far as anybody wants to know.
    fn happened(&self, what: impl FnOnce() -> RunEvent) -> Result<(), Verdict> {
        let Some(socket) = self.told else { return Ok(()) };
        let mut bytes = Vec::new();
        // The supervisor knows the client's number.
        let event = RunEventMessage { number: 0, what: what() };
        // What the guest sent was within these bounds.
        frame::try_write_message(Kind::Event, &event, &mut bytes)
            .map_err(|error| Verdict::Internal(error.to_string()))?;
        let mut unsent = &bytes[..];
        while !unsent.is_empty() {
            match send_once(socket, unsent) {
                Ok(sent) => unsent = &unsent[sent..],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    // The time of who is not heard goes on all the same. A frame
                    // that is begun is ended: behind it comes the report.
                    let is_begun = unsent.len() < bytes.len();
                    if !is_begun && self.stop.raised() {
                        return Err(Verdict::Stopped);
                    }
                }
                Err(error) => return Err(Verdict::Internal(format!("nobody listens: {error}"))),
            }
        }
        Ok(())
    }

    fn call(&mut self, session: &mut HostSession, call: &Call) -> Result<(), Verdict> {
        let (id, tool) = (call.id, call.tool.clone());
        self.in_flight.push(CallRecord { id, tool, begun_ns: now_ns(), settled: None });
        self.happened(|| RunEvent::Called { call: call.id, tool: call.tool.clone() })?;
        match &mut self.broker {
            Some(broker) => Ok(broker.call(call, &self.stop)?),
            None => {
                let denied = Settled {
                    id: call.id,
                    code: Some(CallCode::Denied),
                    duration_ns: 0,
                    body: Vec::new(),
                    redacted: false,
                };
                self.settle(session, denied)
            }
        }
    }

    fn settle(&mut self, session: &mut HostSession, mut settled: Settled) -> Result<(), Verdict> {
        let Some(at) = self.in_flight.iter().position(|call| call.id == settled.id) else {
            return Err(Verdict::BrokerLost("it settled a call that is not in flight".into()));
        };
        if settled.body.len() > self.response_bytes_max {
            settled.code = Some(CallCode::ResponseTooLarge);
            settled.body.clear();
        }
        let mut record = self.in_flight.remove(at);
        record.settled = Some(CallSettled {
            code: settled.code,
            duration_ns: settled.duration_ns,
            redacted: settled.redacted,
        });
        self.record.calls.push(record);
        let Settled { id: call, code, duration_ns, .. } = settled;
        self.happened(|| RunEvent::Settled { call, code, duration_ns })?;
        Ok(session.settle(&settled)?)
    }
}

/// What may wait at most for a guest that keeps to its limits: a run's order, and
/// the answers to the calls that it may have in flight, to which it counts those
/// that it has not taken.
fn untaken_bytes_max(limits: &RunLimits) -> usize {
    let answer = u64::from(limits.response_bytes) + u64::from(MESSAGE_OVERHEAD_BYTES);
    let answers = u64::from(limits.calls_in_flight).saturating_mul(answer);
    // Messages around them: the host's greeting, Load and Start, and headers.
    let around = u64::from(Kind::Start.payload_bytes_max() + MESSAGE_OVERHEAD_BYTES);
    let order = u64::from(limits.program_bytes) + u64::from(limits.input_bytes) + around;
    usize::try_from(answers.saturating_add(order)).unwrap_or(usize::MAX)
}

fn misused(error: SessionError) -> VmFailure {
    VmFailure::new(VmFailureKind::Internal, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use forge_protocol::RunId;
    use forge_protocol::ending::Ending;
    use forge_protocol::guest::{Ended, GuestEvent, GuestSession, Start};
    use forge_protocol::limits::GRANTED_TOOLS_MAX;
    use forge_protocol::name::ToolName;

    use super::*;
    use crate::link::{Link, Patience};
    use crate::machine::{Watchdog, deadline_in, ram_bytes};

    const ANSWER_BYTES: usize = 100;

    fn load() -> Load {
        let limits = RunLimits {
            program_bytes: 7,
            input_bytes: 2,
            response_bytes: ANSWER_BYTES as u32,
            calls_in_flight: 4,
            ..RunLimits::default()
        };
        Load { limits, announce: false }
    }

    fn start() -> Start {
        Start { run_id: RunId([0; 16]), seed: [0; 32], start_unix_ns: 0, granted: Vec::new() }
    }

    /// A guest in a run, its host's side, and the broker's end of the run's link.
    struct Desk {
        guest: GuestSession,
        session: HostSession,
        counterpart: Counterpart,
        broker: Option<Link>,
        _watchdog: Watchdog,
    }

    /// One that has greeted.
    fn greeted() -> Desk {
        let watchdog = Watchdog::new().unwrap();
        let counterpart = Counterpart::new(watchdog.stop().clone());
        let (guest, session) = (GuestSession::new(), HostSession::new());
        let mut desk = Desk { guest, session, counterpart, broker: None, _watchdog: watchdog };
        desk.pass_on();
        assert!(desk.session.is_ready());
        desk
    }

    impl Desk {
        fn running(is_brokered: bool) -> Self {
            let mut desk = greeted();
            let (ours, theirs) = UnixStream::pair().unwrap();
            let broker = is_brokered.then(|| BrokerLink::new(theirs));
            desk.broker = is_brokered.then(|| Link::new(ours));
            let (program, input) = (b"program".to_vec(), b"{}".to_vec());
            let deadline = deadline_in(std::time::Duration::from_secs(60));
            let (load, start) = (load(), start());
            let job = Job { load, start, program, input, deadline, brokered: is_brokered };
            desk.counterpart.begin(&mut desk.session, &job, broker).unwrap();
            desk.pass_on();
            let events = std::iter::from_fn(|| desk.guest.poll_event()).count();
            assert_eq!(events, 2, "a program and a run");
            desk
        }

        /// Moves all bytes both ways.
        fn pass_on(&mut self) {
            let of_guest = std::mem::take(self.guest.transmit());
            self.session.receive(&of_guest).unwrap();
            let of_host = std::mem::take(self.session.transmit());
            self.guest.receive(&of_host).unwrap();
        }

        /// The guest calls.
        fn call(&mut self) -> u32 {
            let tool = ToolName::parse("a.b").unwrap();
            let id = self.guest.call(&tool, b"{}", true).unwrap();
            self.pass_on();
            self.counterpart.take_in(&mut self.session).unwrap();
            id
        }

        /// The broker settles this call, and the guest hears of it.
        fn settle(&mut self, id: u32, body: &[u8]) -> Result<Settled, Verdict> {
            let body = body.to_vec();
            let settled = Settled { id, code: None, duration_ns: 5, body, redacted: true };
            let mut bytes = Vec::new();
            frame::write_message(Kind::Settled, &settled, &mut bytes);
            self.broker.as_mut().unwrap().send(&bytes, Patience::default()).unwrap();
            self.counterpart.await_settled(&mut self.session)?;
            Ok(self.heard())
        }

        fn heard(&mut self) -> Settled {
            self.pass_on();
            match self.guest.poll_event() {
                Some(GuestEvent::Settled(settled)) => settled,
                other => panic!("{other:?}"),
            }
        }

        fn record(&mut self) -> Record {
            self.counterpart.take_record(&mut self.session)
        }
    }

    #[test]
    fn an_answer_past_the_runs_limit_comes_to_the_guest_as_that_and_without_its_body() {
        let mut desk = Desk::running(true);
        for (bytes, code, left) in [
            (ANSWER_BYTES, None, ANSWER_BYTES),
            (ANSWER_BYTES + 1, Some(CallCode::ResponseTooLarge), 0),
        ] {
            let id = desk.call();
            let settled = desk.settle(id, &vec![b'1'; bytes]).unwrap();
            assert_eq!((settled.code, settled.body.len()), (code, left));
        }
        let codes: Vec<_> =
            desk.record().calls.iter().map(|call| call.settled.as_ref().unwrap().code).collect();
        assert_eq!(codes, [None, Some(CallCode::ResponseTooLarge)]);
    }

    #[test]
    fn a_broker_settles_calls_that_are_in_flight_each_once_and_in_any_order() {
        for wrong in [2, 7] {
            let mut desk = Desk::running(true);
            for id in 0..3 {
                assert_eq!(desk.call(), id);
            }
            for id in [2, 0] {
                assert_eq!(desk.settle(id, b"1").unwrap().id, id);
            }
            assert!(desk.counterpart.has_calls());
            let lost = desk.settle(wrong, b"1");
            assert!(matches!(lost, Err(Verdict::BrokerLost(_))), "{wrong}: {lost:?}");
            let calls = desk.record().calls;
            let told: Vec<_> = calls.iter().map(|call| (call.id, call.settled.is_some())).collect();
            assert_eq!(told, [(2, true), (0, true), (1, false)]);
            assert!(!desk.counterpart.has_calls());
        }
    }

    #[test]
    fn a_call_of_a_run_without_a_broker_is_denied() {
        let mut desk = Desk::running(false);
        let id = desk.call();
        let settled = desk.heard();
        assert_eq!((settled.id, settled.code), (id, Some(CallCode::Denied)));
        assert!(!desk.counterpart.has_calls());
        assert_eq!(desk.record().calls.len(), 1);
    }

    #[test]
    fn all_that_a_run_leaves_is_kept_and_forgotten_with_it() {
        let mut desk = Desk::running(true);
        desk.guest.output(b"one").unwrap();
        desk.guest.output(b" two").unwrap();
        desk.guest.artifact("a", "text/plain", b"content").unwrap();
        desk.guest.log(2, "said").unwrap();
        desk.guest.unfinished(2, "not said to the e").unwrap();
        desk.call();
        let Record { output, artifacts, logs, calls } = desk.record();
        assert_eq!((output.as_slice(), artifacts.len(), calls.len()), (&b"one two"[..], 1, 1));
        let texts: Vec<_> = logs.iter().map(|log| log.text.as_str()).collect();
        assert_eq!(texts, ["said", "not said to the e"]);

        let limits = (desk.counterpart.response_bytes_max, desk.counterpart.untaken_bytes_max);
        desk.guest.output(b"three").unwrap();
        desk.call();
        desk.counterpart.tell(0);
        desk.counterpart.forget_run();
        let forgotten = &desk.counterpart;
        assert!(forgotten.told.is_none() && forgotten.broker.is_none() && !forgotten.has_calls());
        let kept = (forgotten.response_bytes_max, forgotten.untaken_bytes_max);
        assert_eq!(kept, limits, "they are the program's");
        let Record { output, artifacts, logs, calls } = desk.record();
        assert!(output.is_empty() && artifacts.is_empty() && logs.is_empty() && calls.is_empty());
    }

    #[test]
    fn a_runs_end_is_told_after_all_that_came_before_it() {
        let mut desk = Desk::running(true);
        desk.guest.output(b"all").unwrap();
        let ended = Ended {
            ending: Ending::Returned(0),
            fuel_used: 1,
            memory_peak_bytes: 1,
            logs_dropped: 0,
            load_ticks: 1,
            run_ticks: 1,
        };
        desk.guest.ended(&ended).unwrap();
        desk.pass_on();
        let verdict = desk.counterpart.take_in(&mut desk.session);
        assert!(matches!(verdict, Err(Verdict::Ended(_))), "{verdict:?}");
        assert_eq!(desk.record().output, b"all");
    }

    #[test]
    fn a_program_that_is_prepared_is_announced_and_its_limits_are_gone_by() {
        let mut desk = greeted();
        let order = Prepare { load: load(), program: b"program".to_vec() };
        desk.counterpart.prepare(&mut desk.session, &order).unwrap();
        desk.pass_on();
        let Some(GuestEvent::Load(order)) = desk.guest.poll_event() else { panic!("no program") };
        assert!(order.load.announce);
        assert_eq!(desk.counterpart.response_bytes_max, ANSWER_BYTES);
        assert_eq!(desk.counterpart.untaken_bytes_max(), untaken_bytes_max(&load().limits));
    }

    #[test]
    fn the_largest_order_and_its_answers_may_wait_for_a_guest_and_no_further_answer() {
        let answer = 10 << 20;
        let limits = RunLimits { response_bytes: answer, calls_in_flight: 0, ..load().limits };
        let mut session = greeted().session;
        let load = Load { limits: limits.clone(), announce: false };
        session.load(&load, b"program").unwrap();
        let longest = ToolName::parse(&format!("{}.{}", "s".repeat(64), "t".repeat(128))).unwrap();
        let granted = vec![longest; GRANTED_TOOLS_MAX];
        session.start(&Start { granted, ..start() }, b"{}").unwrap();
        let order = session.transmit().len();
        for calls_in_flight in 0..3 {
            let most = untaken_bytes_max(&RunLimits { calls_in_flight, ..limits.clone() });
            let answers = (calls_in_flight * answer) as usize;
            assert!(most >= order + answers, "{calls_in_flight}: {most}");
            assert!(most < order + answers + answer as usize, "{calls_in_flight}: {most}");
        }
    }

    #[test]
    fn what_waits_for_a_guest_is_no_more_than_its_ram_has_room_for() {
        let most = RunLimits::operator_maxima();
        let many_small = RunLimits { response_bytes: 0, ..most.clone() };
        let few = RunLimits { calls_in_flight: 0, ..most.clone() };
        for limits in [RunLimits::default(), most, many_small, few] {
            assert!(untaken_bytes_max(&limits) <= ram_bytes(&limits), "{limits:?}");
        }
    }
}
