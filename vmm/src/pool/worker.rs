//! One worker, as the supervisor sees it.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::limits::RunLimits;
use forge_protocol::service::{Event, RunEvent};
use forge_protocol::tally::Tally;
use forge_protocol::worker::{Job, Prepare, PreparedJob, Ready, Report, VmFailure, VmFailureKind};

use super::rest::Rest;
use crate::link::{Link, Patience, Unpassed};

/// How long the last word of a worker that is gone may take. It is there
/// already, or nowhere.
const LAST_WORD_TIME_MAX: Duration = Duration::from_secs(1);
/// What a client's number of a run takes in an event beyond a worker's, which knows
/// none, in bytes.
const NUMBER_BYTES: u32 = 16;

/// A worker process and the socket to it. Dropped, it is killed: whatever it
/// still does, it does for nobody.
#[derive(Debug)]
pub struct Worker {
    link: Link,
    process: Arc<OwnedFd>,
    /// It has said that its VM stands ready.
    ready: bool,
    runs: u64,
    /// It was given a program to load.
    is_prepared: bool,
    /// It was given its run's link to the broker.
    has_link: bool,
    /// It is to tell of the run that it is given next.
    is_to_tell: bool,
    /// Of the program that it was given last.
    limits: RunLimits,
    /// Since it was given something.
    rest: Rest,
}

/// Who hears what happens in a run.
pub type Tell<'a> = &'a (dyn Fn(RunEvent) + Sync);

/// What a worker is to carry out.
#[derive(Clone, Copy, Debug)]
pub enum Run<'a> {
    /// A program and its run.
    Whole(&'a Job),
    /// A run of the program that it was prepared with.
    Prepared(&'a PreparedJob),
}

/// A run that its worker was not given.
#[derive(Debug)]
pub enum Unbegun {
    /// Why it cannot be given one; the worker is of no use then.
    Lost(VmFailure),
    /// The run's link could not be passed, as all too many descriptors are under way.
    /// The worker was sent nothing, and waits for another run.
    Crowded(VmFailure),
}

impl From<Unbegun> for VmFailure {
    fn from(unbegun: Unbegun) -> Self {
        let (Unbegun::Lost(failure) | Unbegun::Crowded(failure)) = unbegun;
        failure
    }
}

/// A worker that gave no report.
#[derive(Debug)]
pub enum Lost {
    /// It was lost before the job began.
    Before(VmFailure),
    /// It seems so, and it was given the run's link to the broker. A program that it
    /// served before may have it say so, and may have called: the broker knows.
    Handed(VmFailure),
    /// It was lost during the run.
    During(VmFailure),
}

pub(super) fn lost(error: &io::Error) -> VmFailure {
    let gone = |message: &str| VmFailure::new(VmFailureKind::WorkerLost, message);
    match error.kind() {
        io::ErrorKind::ConnectionAborted => {
            let what = "the run was cancelled, or whoever asked for it left";
            VmFailure::new(VmFailureKind::Cancelled, what)
        }
        io::ErrorKind::TimedOut => gone("the worker said nothing in time"),
        // Its parent is the zygote, and how it ended is told to nobody.
        io::ErrorKind::UnexpectedEof => gone(
            "the worker ended without a report, as one that is killed does: where memory is \
             short the kernel kills it, and says so in its log",
        ),
        _ => gone(&format!("the worker was lost: {error}")),
    }
}

/// What a worker whose VM stands ready says before it ends. (That it stands
/// ready it says once, by the same kind.)
fn is_last_word(kind: Kind) -> bool {
    matches!(kind, Kind::Ready | Kind::Forbidden)
}

/// Why a worker ends, by its last frame.
fn last_word(frame: &Frame) -> VmFailure {
    if frame.kind == Kind::Forbidden {
        let call = frame.payload.as_slice().try_into().map_or(-1, i32::from_le_bytes);
        let mut message = format!("the worker made system call {call}, which its jail forbids");
        if libc::c_long::from(call) == libc::SYS_rt_sigprocmask {
            message += ", and abort(3) makes where there is no memory left";
        }
        return VmFailure::new(VmFailureKind::WorkerBroke, message);
    }
    match decode::<Ready>(&frame.payload) {
        Ok(Err(failure)) | Err(failure) => failure,
        Ok(Ok(_)) => {
            VmFailure::new(VmFailureKind::Misbehaved, "the worker says again that it stands ready")
        }
    }
}

impl Worker {
    pub(super) fn new(socket: UnixStream, process: OwnedFd) -> Self {
        let (link, limits) = (Link::new(socket), RunLimits::default());
        let (ready, is_prepared, has_link, is_to_tell) = (false, false, false, false);
        let (process, rest) = (Arc::new(process), Rest::default());
        Self { link, process, ready, runs: 0, is_prepared, has_link, is_to_tell, limits, rest }
    }

    /// How many jobs it has carried out.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Whether it has said that its VM stands ready.
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Its process descriptor.
    #[must_use]
    pub fn process(&self) -> &Arc<OwnedFd> {
        &self.process
    }

    /// Waits until its VM stands ready.
    ///
    /// # Errors
    /// Why it does not; the worker is of no use then.
    pub fn await_ready(&mut self, patience: Patience<'_>) -> Result<(), VmFailure> {
        if self.ready {
            return Ok(());
        }
        let bound = |kind| is_last_word(kind).then(|| kind.payload_bytes_max());
        let frame = self.receive(bound, patience).map_err(|error| lost(&error))?;
        if frame.kind == Kind::Forbidden {
            return Err(last_word(&frame));
        }
        decode::<Ready>(&frame.payload)??;
        self.ready = true;
        Ok(())
    }

    /// Has it load a program ahead of its runs.
    ///
    /// # Errors
    /// Why it did not; the worker is of no use then.
    pub fn prepare(&mut self, order: &Prepare, patience: Patience<'_>) -> Result<(), VmFailure> {
        self.await_ready(patience)?;
        self.rest.end(&self.process);
        self.limits = order.load.limits.clone();
        let mut bytes = Vec::with_capacity(order.program.len() + 1024);
        frame::write_message(Kind::Prepare, order, &mut bytes);
        let sent = self.link.send(&bytes, patience);
        sent.map_err(|error| self.unsent(&error))?;
        self.is_prepared = true;
        self.ready = false;
        self.await_ready(patience)
    }

    /// Hands over a run and waits for its report.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no use then.
    pub fn carry_out(
        &mut self,
        run: Run<'_>,
        broker: Option<&UnixStream>,
        patience: Patience<'_>,
    ) -> Result<Report, Lost> {
        self.begin(run, broker, patience).map_err(|unbegun| self.not_begun(unbegun.into()))?;
        self.finish(patience)
    }

    /// Hands over a run. The worker need not stand ready yet: it takes the run
    /// when it does.
    ///
    /// # Errors
    /// [`Unbegun`].
    pub fn begin(
        &mut self,
        run: Run<'_>,
        broker: Option<&UnixStream>,
        patience: Patience<'_>,
    ) -> Result<(), Unbegun> {
        self.rest.end(&self.process);
        let mut bytes = Vec::new();
        // Sent with the run, so that one that is not given it was not told to tell of
        // the next.
        if std::mem::take(&mut self.is_to_tell) {
            frame::write_raw(Kind::Tell, &[], &mut bytes);
        }
        match run {
            Run::Whole(job) => {
                self.limits = job.load.limits.clone();
                bytes.reserve(job.program.len() + job.input.len() + 1024);
                frame::write_message(Kind::Job, job, &mut bytes);
            }
            Run::Prepared(job) => frame::write_message(Kind::PreparedJob, job, &mut bytes),
        }
        let mut passed = broker.map(|socket| socket.as_fd());
        let sent = self.link.pass(&bytes, &mut passed, patience);
        self.has_link = broker.is_some() && passed.is_none();
        sent.map_err(|error| match error {
            Unpassed::TooManyUnderWay => Unbegun::Crowded(VmFailure::new(
                VmFailureKind::Unavailable,
                format!("the run's link was not passed to its worker: {error}"),
            )),
            Unpassed::Link(error) => Unbegun::Lost(self.unsent(&error)),
        })
    }

    /// Whether a program has been in it, which may have taken it over.
    fn has_served(&self) -> bool {
        self.is_prepared || self.runs > 0
    }

    /// The loss to report when its run had not begun.
    pub(super) fn not_begun(&self, failure: VmFailure) -> Lost {
        if self.has_served() && self.has_link {
            Lost::Handed(failure)
        } else {
            Lost::Before(failure)
        }
    }

    /// Has it tell of the run that it is given next what happens as it happens.
    pub fn ask_to_tell(&mut self) {
        self.is_to_tell = true;
    }

    /// Why sending it an order failed.
    fn unsent(&mut self, error: &io::Error) -> VmFailure {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.why_it_ended(error),
            _ => lost(error),
        }
    }

    /// Whether it has something to say, which one that stands ready has not: it
    /// has ended, or is about to.
    #[must_use]
    pub fn speaks(&self) -> bool {
        self.ready && self.link.has_something()
    }

    /// It has nothing to do until it is given another run.
    pub(super) fn rests(&mut self) {
        self.rest.begin(&self.process);
    }

    /// Whether it computes, and was given nothing to: somebody has taken it over.
    pub(super) fn is_restless(&mut self) -> bool {
        self.rest.is_broken(&self.process)
    }

    /// Why one that speaks unasked is of no further use. What it says is there,
    /// whole, unless somebody has taken it over.
    #[must_use]
    pub fn last_word(mut self, until: Instant) -> VmFailure {
        let said = self.receive_last_word(Patience::until(until));
        match said.unwrap_or_else(|error| lost(&error)) {
            // It served no run, after which a reset could fail.
            VmFailure { kind: VmFailureKind::NotReset | VmFailureKind::TooChanged, .. }
                if self.runs == 0 =>
            {
                VmFailure::new(
                    VmFailureKind::Misbehaved,
                    "the worker reported a failed reset, but had served no run",
                )
            }
            failure => failure,
        }
    }

    fn receive_last_word(&mut self, patience: Patience<'_>) -> io::Result<VmFailure> {
        let bound = |kind| is_last_word(kind).then(|| kind.payload_bytes_max());
        self.receive(bound, patience).map(|frame| last_word(&frame))
    }

    /// What it says next. Nothing that it could pass is wanted: kept here, its own end
    /// of the link would hide that it is gone.
    fn receive(
        &mut self,
        bound: impl Fn(Kind) -> Option<u32>,
        patience: Patience<'_>,
    ) -> io::Result<Frame> {
        let frame = self.link.receive_within(bound, patience);
        if self.link.take_passed().is_some() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the worker passed a descriptor",
            ));
        }
        frame
    }

    /// Why nobody is there any more: it may have said so before it ended.
    fn why_it_ended(&mut self, error: &io::Error) -> VmFailure {
        let patience = Patience::until(Instant::now() + LAST_WORD_TIME_MAX);
        if let Err(failure) = self.await_ready(patience) {
            return failure;
        }
        self.receive_last_word(patience).unwrap_or_else(|_| lost(error))
    }

    /// Waits for the report of the run that it was given.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no use then.
    pub fn finish(&mut self, patience: Patience<'_>) -> Result<Report, Lost> {
        self.finish_telling(patience, None)
    }

    /// The same, and passes on what happens meanwhile, if it was asked to
    /// tell.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn finish_telling(
        &mut self,
        patience: Patience<'_>,
        tell: Option<Tell<'_>>,
    ) -> Result<Report, Lost> {
        self.await_ready(patience).map_err(Lost::Before)?;
        let mut patience = patience;
        let mut told = Tally::default();
        let mut has_told = false;
        // Told to nobody any more.
        let mut is_late = false;
        let said = loop {
            let frame = self.next_word(has_told, tell.is_some(), patience)?;
            let Some(tell) = tell.filter(|_| frame.kind == Kind::Event) else { break frame };
            has_told = true;
            let Event { what, .. } = decode(&frame.payload).map_err(Lost::During)?;
            count(&mut told, &what, &self.limits).map_err(Lost::During)?;
            if !is_late {
                tell(what);
            }
            // The wait above ends when the run is cancelled, but a worker that tells without
            // a pause is never waited for. So it is checked here as well.
            if patience.is_cancelled() {
                let cancelled = io::Error::from(io::ErrorKind::ConnectionAborted);
                return Err(Lost::During(lost(&cancelled)));
            }
            if patience.is_over() {
                // A worker that tells without end does so as long as others.
                if is_late {
                    let over = io::Error::from(io::ErrorKind::TimedOut);
                    return Err(Lost::During(lost(&over)));
                }
                // Whoever is told may have taken that time, and not the worker,
                // whose report is there.
                is_late = true;
                patience.until = Some(Instant::now() + LAST_WORD_TIME_MAX);
            }
        };
        self.runs += 1;
        let report: Report = decode(&said.payload).map_err(Lost::During)?;
        report.check(&self.limits).map_err(|over| Lost::During(misbehaved(over)))?;
        Ok(report)
    }

    /// Its report, or an event of one that tells. Whatever else it says is its last word.
    fn next_word(
        &mut self,
        has_told: bool,
        tells: bool,
        patience: Patience<'_>,
    ) -> Result<Frame, Lost> {
        let report_bytes_max = Report::payload_bytes_max(&self.limits);
        // Until it says otherwise it may be putting its VM back after the run before,
        // and fail.
        let may_be_put_back = !has_told && self.runs > 0;
        let bound = |kind: Kind| match kind {
            Kind::Report => Some(report_bytes_max),
            Kind::Forbidden => Some(kind.payload_bytes_max()),
            Kind::Ready => may_be_put_back.then(|| kind.payload_bytes_max()),
            Kind::Event => tells.then(|| kind.payload_bytes_max() - NUMBER_BYTES),
            _ => None,
        };
        let frame = self.receive(bound, patience).map_err(|error| match error.kind() {
            // So says the kernel of a peer that had not read everything.
            io::ErrorKind::ConnectionReset if !has_told => self.not_begun(lost(&error)),
            // A service that ends at once cancels its runs, and ends their workers.
            _ if patience.is_cancelled() => {
                Lost::During(lost(&io::ErrorKind::ConnectionAborted.into()))
            }
            _ => Lost::During(lost(&error)),
        })?;
        match frame.kind {
            Kind::Forbidden => Err(Lost::During(last_word(&frame))),
            Kind::Ready => Err(match decode::<Ready>(&frame.payload) {
                Ok(Err(failure)) => self.not_begun(failure),
                _ => Lost::During(last_word(&frame)),
            }),
            _ => Ok(frame),
        }
    }
}

/// One that was taken over, or has a bug.
pub(crate) fn misbehaved(how: impl std::fmt::Display) -> VmFailure {
    let message = format!("the worker says what none of ours would: {how}");
    VmFailure::new(VmFailureKind::Misbehaved, message)
}

/// Holds what a worker tells of a run to what its guest is held to, as the report is.
fn count(told: &mut Tally, what: &RunEvent, limits: &RunLimits) -> Result<(), VmFailure> {
    match what {
        RunEvent::Admitted { .. } => return Err(misbehaved("it says that it admitted a run")),
        // No bound would count it.
        RunEvent::Output(bytes) if bytes.is_empty() => {
            return Err(misbehaved("a piece of output without a byte"));
        }
        RunEvent::Output(_)
        | RunEvent::Log(_)
        | RunEvent::Called { .. }
        | RunEvent::Settled { .. } => {}
    }
    what.count(told, limits).map_err(misbehaved)
}

fn decode<T: for<'a> codec::BorrowDecode<'a, ()>>(payload: &[u8]) -> Result<T, VmFailure> {
    codec::decode(payload).map_err(misbehaved)
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = crate::jail::kill(&self.process);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::BorrowedFd;

    use forge_protocol::run::{Artifact, CallRecord, Log};
    use forge_protocol::worker::{Deadline, Fate, Timing};

    use super::*;
    use crate::cancel::Cancel;
    use crate::crowd::{self, Crowd};

    fn job() -> PreparedJob {
        let start = forge_protocol::guest::Start {
            run_id: forge_protocol::RunId([1; 16]),
            seed: [2; 32],
            start_unix_ns: 3,
            granted: Vec::new(),
        };
        let deadline = Deadline { monotonic_ns: 4 };
        PreparedJob { start, input: b"{}".to_vec(), deadline, brokered: false }
    }

    /// A worker that said that its VM stands ready, and its other end.
    fn unused() -> (Worker, UnixStream) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        say(&mut theirs, &Ready::Ok(Timing::default()));
        let mut worker = Worker::new(ours, File::open("/dev/null").unwrap().into());
        worker.await_ready(Patience::default()).unwrap();
        (worker, theirs)
    }

    /// One that has carried out a run, after which its VM is put back.
    pub(in super::super) fn standing() -> (Worker, UnixStream) {
        let (mut worker, theirs) = unused();
        worker.runs = 1;
        (worker, theirs)
    }

    pub(in super::super) fn say(socket: &mut UnixStream, ready: &Ready) {
        let mut bytes = Vec::new();
        frame::write_message(Kind::Ready, ready, &mut bytes);
        socket.write_all(&bytes).unwrap();
    }

    pub(in super::super) fn not_reset() -> Ready {
        Err(VmFailure::new(VmFailureKind::NotReset, "page 7 differs"))
    }

    /// How the next run is lost.
    fn lost_by(mut worker: Worker) -> (bool, VmFailureKind) {
        match worker.carry_out(Run::Prepared(&job()), None, Patience::default()) {
            Err(Lost::Before(failure)) => (true, failure.kind),
            Err(Lost::During(failure)) => (false, failure.kind),
            Err(lost @ Lost::Handed(_)) => panic!("it has no link: {lost:?}"),
            Ok(report) => panic!("it was carried out: {report:?}"),
        }
    }

    #[test]
    fn a_run_finds_out_why_its_worker_could_not_be_put_back_and_has_not_begun() {
        // Before the run was handed over, and after.
        let (worker, mut theirs) = standing();
        say(&mut theirs, &not_reset());
        drop(theirs);
        assert_eq!(lost_by(worker), (true, VmFailureKind::NotReset));
        let (worker, mut theirs) = standing();
        say(&mut theirs, &not_reset());
        assert_eq!(lost_by(worker), (true, VmFailureKind::NotReset));
    }

    #[test]
    fn a_worker_that_served_no_run_has_no_reset_to_tell_of() {
        for kind in [VmFailureKind::NotReset, VmFailureKind::TooChanged] {
            let tells = |(worker, mut theirs): (Worker, UnixStream)| {
                say(&mut theirs, &Err(VmFailure::new(kind, "page 7")));
                worker.last_word(Instant::now() + LAST_WORD_TIME_MAX).kind
            };
            assert_eq!([tells(standing()), tells(unused())], [kind, VmFailureKind::Misbehaved]);
        }
    }

    #[test]
    fn a_worker_that_ended_without_a_word_was_lost_before_the_run() {
        let (worker, theirs) = standing();
        drop(theirs);
        assert_eq!(lost_by(worker), (true, VmFailureKind::WorkerLost));
    }

    #[test]
    fn a_worker_that_its_filter_ended_between_two_runs_has_said_by_which_call() {
        let (mut worker, mut theirs) = standing();
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Forbidden, &41i32.to_le_bytes(), &mut bytes);
        theirs.write_all(&bytes).unwrap();
        drop(theirs);
        let begun = worker.begin(Run::Prepared(&job()), None, Patience::default());
        let Err(Unbegun::Lost(failure)) = begun else { panic!("{begun:?}") };
        assert_eq!(failure.kind, VmFailureKind::WorkerBroke);
        assert!(failure.message.contains("system call 41"), "{failure:?}");
    }

    #[test]
    fn a_worker_that_ended_with_its_order_unread_was_lost_before_the_run() {
        for (mut worker, theirs) in [standing(), unused()] {
            worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
            drop(theirs);
            let lost = worker.finish(Patience::default()).unwrap_err();
            assert!(matches!(lost, Lost::Before(_)), "{lost:?}");
        }
        // Had it read that, it may have carried out anything.
        let (mut worker, mut theirs) = standing();
        worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
        theirs.set_nonblocking(true).unwrap();
        while theirs.read(&mut [0; 4096]).is_ok() {}
        drop(theirs);
        let lost = worker.finish(Patience::default()).unwrap_err();
        assert!(matches!(lost, Lost::During(_)), "{lost:?}");
    }

    #[test]
    fn a_worker_that_has_the_runs_link_may_have_called_whatever_it_says_of_it() {
        let (link, _broker) = UnixStream::pair().unwrap();
        let lost = |(mut worker, mut theirs): (Worker, UnixStream), is_gone, reads| {
            if is_gone {
                drop(theirs);
                return worker.carry_out(Run::Prepared(&job()), Some(&link), Patience::default());
            }
            worker.begin(Run::Prepared(&job()), Some(&link), Patience::default()).unwrap();
            if reads {
                assert_eq!(theirs.read(&mut [0]).unwrap(), 1);
            }
            if reads || worker.runs == 0 {
                drop(theirs);
            } else {
                say(&mut theirs, &not_reset());
            }
            worker.finish(Patience::default())
        };
        let (is_gone, reads) = (true, true);
        for reads in [false, reads] {
            let handed = lost(standing(), false, reads);
            assert!(matches!(handed, Err(Lost::Handed(_))), "{handed:?}");
            // No program was in it that could have called.
            let before = lost(unused(), false, reads);
            assert!(matches!(before, Err(Lost::Before(_))), "{before:?}");
        }
        // It was never given the link.
        let before = lost(standing(), is_gone, false);
        assert!(matches!(before, Err(Lost::Before(_))), "{before:?}");
        // One that has loaded a program has had it in it.
        let (mut worker, mut theirs) = unused();
        say(&mut theirs, &Ready::Ok(Timing::default()));
        let load = forge_protocol::guest::Load { limits: RunLimits::default(), announce: true };
        let program = Prepare { load, program: vec![1] };
        worker.prepare(&program, Patience::default()).unwrap();
        let handed = lost((worker, theirs), false, reads);
        assert!(matches!(handed, Err(Lost::Handed(_))), "{handed:?}");
    }

    #[test]
    fn a_worker_that_cannot_be_passed_its_runs_link_stands_as_it_stood() {
        let test =
            "pool::worker::tests::a_worker_that_cannot_be_passed_its_runs_link_stands_as_it_stood";
        if !crowd::alone(test, 54_327) {
            return;
        }
        let (mut worker, theirs) = standing();
        let (link, _broker) = UnixStream::pair().unwrap();
        let crowd = Crowd::new();
        worker.ask_to_tell();
        match worker.begin(Run::Prepared(&job()), Some(&link), Patience::default()) {
            Err(Unbegun::Crowded(failure)) => assert_eq!(failure.kind, VmFailureKind::Unavailable),
            other => panic!("{other:?}"),
        }
        drop(crowd);
        // And it was not told to tell of another's run.
        worker.begin(Run::Prepared(&job()), Some(&link), Patience::default()).unwrap();
        let mut theirs = Link::new(theirs);
        let frame = theirs.receive(|_| true, Patience::default()).unwrap();
        assert_eq!(frame.kind, Kind::PreparedJob);
        assert!(theirs.take_passed().is_some());
    }

    #[test]
    fn a_worker_hears_what_it_is_to_tell_of_before_the_run_and_its_link_with_it() {
        let (mut worker, theirs) = standing();
        let (link, _broker) = UnixStream::pair().unwrap();
        worker.ask_to_tell();
        worker.begin(Run::Prepared(&job()), Some(&link), Patience::default()).unwrap();
        worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
        let mut theirs = Link::new(theirs);
        let mut hears = || theirs.receive(|_| true, Patience::default()).unwrap().kind;
        assert_eq!([hears(), hears(), hears()], [Kind::Tell, Kind::PreparedJob, Kind::PreparedJob]);
        assert!(theirs.take_passed().is_some());
    }

    fn report() -> Report {
        Report {
            fate: Fate::Deadline,
            output: b"so far".to_vec(),
            artifacts: Vec::new(),
            logs: Vec::new(),
            calls: Vec::new(),
            vm_exits: 1,
            timing: Timing::default(),
        }
    }

    /// What is made of this that a worker says of a run.
    fn made_of(bytes: &[u8], passed: Option<BorrowedFd<'_>>) -> Result<Report, Lost> {
        made_under(&RunLimits::default(), bytes, passed)
    }

    /// The same of a run with these limits.
    fn made_under(
        limits: &RunLimits,
        bytes: &[u8],
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<Report, Lost> {
        let (mut worker, theirs) = unused();
        worker.limits = limits.clone();
        std::thread::scope(|scope| {
            let sends = scope.spawn(|| {
                let mut link = Link::new(theirs);
                // It is not heard to the end where it says too much.
                let _ = link.pass(bytes, &mut { passed }, Patience::default());
            });
            let made = worker.finish_telling(Patience::default(), Some(&|_| ()));
            drop(worker);
            sends.join().unwrap();
            made
        })
    }

    #[test]
    fn a_report_that_passes_the_limits_of_its_run_is_none() {
        let limits = RunLimits::default();
        let whole = vec![1; limits.output_bytes as usize];
        let said = |report: &Report| {
            let mut bytes = Vec::new();
            frame::write_message(Kind::Report, report, &mut bytes);
            made_of(&bytes, None)
        };
        assert_eq!(said(&Report { output: whole.clone(), ..report() }).unwrap().output, whole);
        let longer = [&whole[..], &[1]].concat();
        let log = Log { level: 0, text: "a".repeat(limits.log_bytes as usize) };
        let artifact = Artifact {
            name: "a".into(),
            media_type: "b".into(),
            content: vec![1; limits.artifact_bytes as usize + 1],
        };
        let call = CallRecord { id: 1, tool: "a.b".parse().unwrap(), begun_ns: 0, settled: None };
        let calls = vec![call; limits.calls as usize + 1];
        for too_much in [
            Report { output: longer, ..report() },
            Report { logs: vec![log], ..report() },
            Report { artifacts: vec![artifact], ..report() },
            Report { calls, ..report() },
        ] {
            let lost = said(&too_much).unwrap_err();
            assert!(matches!(lost, Lost::During(_)), "{lost:?}");
        }
        // One that is longer than any of this run's is refused by its header, before any
        // of it is kept.
        let payload_bytes = Report::payload_bytes_max(&limits) + 1;
        let header = frame::Header { kind: Kind::Report, payload_bytes }.to_bytes();
        match made_of(&header, None) {
            Err(Lost::During(failure)) => {
                assert!(failure.message.contains("the limit is"), "{failure:?}");
            }
            other => panic!("{other:?}"),
        }
    }

    /// What a worker sends that tells this of a run, and then reports.
    fn telling(events: impl IntoIterator<Item = RunEvent>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for what in events {
            frame::write_message(Kind::Event, &Event { number: 0, what }, &mut bytes);
        }
        frame::write_message(Kind::Report, &report(), &mut bytes);
        bytes
    }

    #[test]
    fn what_is_told_of_a_run_is_held_to_its_limits_as_its_report_is() {
        let limits = RunLimits { output_bytes: 8, log_bytes: 40, calls: 2, ..RunLimits::default() };
        let output = || RunEvent::Output(vec![1; 4]);
        let log = || RunEvent::Log(Log { level: 0, text: "1234".into() });
        let called = || RunEvent::Called { call: 0, tool: "a.b".parse().unwrap() };
        let settled = || RunEvent::Settled { call: 0, code: None, duration_ns: 1 };
        let made = |events: Vec<RunEvent>| made_under(&limits, &telling(events), None);
        let whole =
            vec![output(), log(), called(), called(), settled(), output(), log(), settled()];
        assert_eq!(made(whole).unwrap(), report());
        for too_much in [
            vec![output(), output(), output()],
            vec![log(), log(), log()],
            vec![called(), called(), called()],
            vec![called(), settled(), settled()],
            // Either would have no end.
            vec![RunEvent::Output(Vec::new())],
            vec![RunEvent::Admitted { run_id: forge_protocol::RunId([1; 16]) }],
        ] {
            match made(too_much.clone()) {
                Err(Lost::During(failure)) => {
                    assert_eq!(failure.kind, VmFailureKind::Misbehaved, "{too_much:?}");
                }
                other => panic!("{too_much:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_worker_that_tells_without_a_pause_can_be_cancelled() {
        let cancel = crate::cancel::Cancel::new().unwrap();
        let (mut worker, mut theirs) = unused();
        let logs = (0..9).map(|_| RunEvent::Log(Log { level: 0, text: "on".into() }));
        theirs.write_all(&telling(logs)).unwrap();
        let told = std::sync::atomic::AtomicU32::new(0);
        let tell = |_| {
            told.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            cancel.raise();
        };
        let patience = Patience { until: None, cancel: Some(&cancel) };
        match worker.finish_telling(patience, Some(&tell)) {
            Err(Lost::During(failure)) => assert_eq!(failure.kind, VmFailureKind::Cancelled),
            other => panic!("{other:?}"),
        }
        assert_eq!(told.into_inner(), 1);
    }

    #[test]
    fn an_event_that_no_client_could_be_sent_is_none() {
        // Which no run may write.
        let limits = RunLimits { output_bytes: u32::MAX, ..RunLimits::default() };
        let said = |length: usize| {
            made_under(&limits, &telling([RunEvent::Output(vec![1; length])]), None)
        };
        let most = Kind::Event.payload_bytes_max() as usize - NUMBER_BYTES as usize;
        let around = 16;
        assert!(said(most - around).is_ok());
        let fits = |number| {
            let what = RunEvent::Output(vec![1; most - around]);
            let event = Event { number, what };
            frame::try_write_message(Kind::Event, &event, &mut Vec::new()).is_ok()
        };
        assert!(fits(u64::MAX));
        let lost = said(most).unwrap_err();
        assert!(matches!(lost, Lost::During(_)), "{lost:?}");
    }

    #[test]
    fn a_worker_that_passes_a_descriptor_is_heard_no_more() {
        let mut bytes = Vec::new();
        frame::write_message(Kind::Report, &report(), &mut bytes);
        assert_eq!(made_of(&bytes, None).unwrap(), report());
        let null = File::open("/dev/null").unwrap();
        let lost = made_of(&bytes, Some(null.as_fd())).unwrap_err();
        assert!(matches!(lost, Lost::During(_)), "{lost:?}");
    }

    #[test]
    fn a_report_that_is_there_counts_however_long_whoever_is_told_takes() {
        let report = report();
        let (mut worker, mut theirs) = unused();
        let mut bytes = Vec::new();
        for _ in 0..3 {
            let what = RunEvent::Output(b"so far".to_vec());
            frame::write_message(Kind::Event, &Event { number: 0, what }, &mut bytes);
        }
        frame::write_message(Kind::Report, &report, &mut bytes);
        theirs.write_all(&bytes).unwrap();
        // Not over before the first of it is received, on a busy host either.
        let time = Duration::from_millis(500);
        let told = std::sync::atomic::AtomicU32::new(0);
        let tell = |_| {
            told.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            std::thread::sleep(2 * time);
        };
        let patience = Patience::until(Instant::now() + time);
        assert_eq!(worker.finish_telling(patience, Some(&tell)).unwrap(), report);
        assert_eq!(told.into_inner(), 1, "nobody is told what is late");
    }

    #[test]
    fn a_run_that_was_cancelled_is_not_told_as_lost_with_its_worker() {
        let cancel = Cancel::new().unwrap();
        let patience = Patience { until: None, cancel: Some(&cancel) };
        let kind = |mut worker: Worker| match worker.finish(patience) {
            Err(Lost::During(failure)) => failure.kind,
            other => panic!("{other:?}"),
        };
        let (worker, theirs) = unused();
        drop(theirs);
        assert_eq!(kind(worker), VmFailureKind::WorkerLost);
        cancel.raise();
        let (worker, theirs) = unused();
        drop(theirs);
        assert_eq!(kind(worker), VmFailureKind::Cancelled);
    }

    #[test]
    fn a_run_that_began_is_not_taken_back_by_its_worker() {
        // A worker that served none has no reset that could fail.
        let (worker, mut theirs) = unused();
        say(&mut theirs, &not_reset());
        assert_eq!(lost_by(worker), (false, VmFailureKind::WorkerLost));
        // Nor has one that told of the run.
        let (mut worker, mut theirs) = standing();
        let what = RunEvent::Output(b"so far".to_vec());
        let mut bytes = Vec::new();
        frame::write_message(Kind::Event, &Event { number: 0, what }, &mut bytes);
        theirs.write_all(&bytes).unwrap();
        say(&mut theirs, &not_reset());
        let lost = worker.finish_telling(Patience::default(), Some(&|_| ())).unwrap_err();
        assert!(matches!(lost, Lost::During(_)), "{lost:?}");
        // And it stands ready once.
        let (worker, mut theirs) = standing();
        say(&mut theirs, &Ready::Ok(Timing::default()));
        assert_eq!(lost_by(worker), (false, VmFailureKind::Misbehaved));
    }

    #[test]
    fn a_worker_that_has_carried_out_a_program_may_have_called_in_the_next_run() {
        let (mut worker, mut theirs) = unused();
        worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
        theirs.write_all(&telling([])).unwrap();
        worker.finish(Patience::default()).unwrap();
        let (link, _broker) = UnixStream::pair().unwrap();
        worker.begin(Run::Prepared(&job()), Some(&link), Patience::default()).unwrap();
        say(&mut theirs, &not_reset());
        let lost = worker.finish(Patience::default()).unwrap_err();
        assert!(matches!(lost, Lost::Handed(_)), "{lost:?}");
    }

    #[test]
    fn a_run_that_was_told_of_has_begun_though_its_worker_left_something_unread() {
        let (mut worker, mut theirs) = standing();
        worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
        let what = RunEvent::Output(b"so far".to_vec());
        let mut bytes = Vec::new();
        frame::write_message(Kind::Event, &Event { number: 0, what }, &mut bytes);
        theirs.write_all(&bytes).unwrap();
        drop(theirs);
        let lost = worker.finish_telling(Patience::default(), Some(&|_| ())).unwrap_err();
        assert!(matches!(lost, Lost::During(_)), "{lost:?}");
    }

    #[test]
    fn a_report_is_held_to_the_limits_of_the_program_that_its_worker_has_whole_or_prepared() {
        let limits = RunLimits { output_bytes: 4, ..RunLimits::default() };
        let load = forge_protocol::guest::Load { limits, announce: true };
        let PreparedJob { start, input, deadline, brokered } = job();
        let (order, program) = (load.clone(), vec![1]);
        let whole = Job { load, start, program: program.clone(), input, deadline, brokered };
        let order = Prepare { load: order, program };
        for is_prepared in [false, true] {
            let (mut worker, mut theirs) = unused();
            if is_prepared {
                say(&mut theirs, &Ready::Ok(Timing::default()));
                worker.prepare(&order, Patience::default()).unwrap();
            }
            theirs.write_all(&telling([])).unwrap();
            let prepared = job();
            let run = if is_prepared { Run::Prepared(&prepared) } else { Run::Whole(&whole) };
            match worker.carry_out(run, None, Patience::default()) {
                Err(Lost::During(failure)) => {
                    assert_eq!(failure.kind, VmFailureKind::Misbehaved, "{is_prepared}");
                }
                other => panic!("{is_prepared}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_worker_that_never_stood_ready_was_lost_before_the_run_and_has_said_why() {
        let refuses = || {
            let failure = VmFailure::new(VmFailureKind::Unavailable, "no VM here");
            let mut bytes = Vec::new();
            frame::write_message(Kind::Ready, &Ready::Err(failure), &mut bytes);
            bytes
        };
        let breaks = || {
            let mut bytes = Vec::new();
            frame::write_raw(Kind::Forbidden, &41i32.to_le_bytes(), &mut bytes);
            bytes
        };
        for (said, kind) in
            [(refuses(), VmFailureKind::Unavailable), (breaks(), VmFailureKind::WorkerBroke)]
        {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut worker = Worker::new(ours, File::open("/dev/null").unwrap().into());
            worker.begin(Run::Prepared(&job()), None, Patience::default()).unwrap();
            theirs.write_all(&said).unwrap();
            match worker.finish(Patience::default()) {
                Err(Lost::Before(failure)) => assert_eq!(failure.kind, kind),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_worker_that_is_dropped_is_killed_whatever_it_is_at() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut child = std::process::Command::new("sleep").arg("20").spawn().unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        drop(Worker::new(ours, crate::pool::zygote::tests::pidfd_of(&child)));
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}
