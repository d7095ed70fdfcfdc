//! The process around one VM: boots it, hands it a run, carries its calls to
//! the broker, and reports what became of it.
//!
//! It distrusts the guest. It trusts its supervisor, and never sees a
//! credential: tool calls go out on a connection that the supervisor opened
//! at the broker, and responses come back on it.
//!
//! | module | what it holds |
//! |---|---|
//! | `board` | what the guest is wired to: device, session, broker |
//! | `counterpart` | the host's side of the session, whatever the guest is in |
//! | `verdict` | why the host's side serves a guest no further |
//! | `broker_link` | the run's connection to the broker |
//! | [`heap`] | what both allocate from |
//! | [`life`] | a worker's life |

mod board;
mod broker_link;
pub(crate) mod counterpart;
pub mod heap;
pub mod life;
mod verdict;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::guest::Ended;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{
    Deadline, Fate, Job, Moments, Prepare, PreparedJob, Report, Timing, VmFailure, VmFailureKind,
};

pub use board::{Board, Wiring};
pub use broker_link::BrokerLink;
pub(crate) use life::failed;
pub use life::unserved;
pub use verdict::Verdict;
use vm_memory::GuestMemoryMmap;

use crate::clock::now_ns;
use crate::machine::vcpu::panicked;
use crate::machine::{
    self, Base, Checkpoint, Death, Exit, Hypervisor, Image, Machine, MachineError, PageMap,
    Watchdog, deadline_in, snapshot::ResetDone,
};

/// What a small run touches of its memory, from the start of the stack on.
const RUN_BYTES: usize = 20 * 4096;
/// What of that lies behind what a guest has written when it waits. Where that ends
/// moves with the tables of trust keys.
const RUN_BYTES_BEYOND: usize = 7 * 4096;
/// How long a guest may take to its greeting. It takes about a millisecond;
/// this is for hosts that emulate everything.
pub(crate) const BOOT_TIME_MAX: Duration = Duration::from_secs(30);

/// The state of a guest that stands at "waiting for a program", from which
/// any number of guests start. No seed, time, identity or program has entered
/// it; the keys that programs are trusted by have.
#[derive(Debug)]
pub struct GuestBase {
    machine: Arc<Base>,
    wiring: Wiring,
}

/// Where a guest can be put back to.
#[derive(Debug)]
pub struct Standing {
    machine: Checkpoint,
    wiring: Wiring,
}

/// A guest that stands at "waiting for a program", and what it is wired to.
#[derive(Debug)]
pub struct Guest {
    machine: Machine,
    board: Board,
    timing: Timing,
}

impl GuestBase {
    /// Whether forks of this process find the memory of their first guest
    /// mapped.
    pub(crate) fn set_inherited(&self, inherited: bool) {
        self.machine.set_inherited(inherited);
    }

    /// How much RAM its guests have, in bytes.
    #[must_use]
    pub fn ram_bytes(&self) -> usize {
        self.machine.ram_bytes()
    }
}

/// What there is for who has no KVM, and what it costs.
const WITHOUT_KVM: &str = "`--isolation process`, or isolation = \"process\" in [vm] of \
                           forge.toml, needs no KVM and is weaker: a flaw in the interpreter \
                           is then enough to stand before this host's kernel";

impl From<MachineError> for VmFailure {
    fn from(error: MachineError) -> Self {
        let message = match &error {
            MachineError::Hypervisor(error) => format!("{error}. {WITHOUT_KVM}"),
            error => error.to_string(),
        };
        let kind = match error {
            MachineError::Image(_) => VmFailureKind::Internal,
            MachineError::Kvm { .. }
            | MachineError::NoTask
            | MachineError::Hypervisor(_)
            | MachineError::Memory { .. }
            | MachineError::Sealed(_)
            | MachineError::Base(_)
            | MachineError::PageMap(_) => VmFailureKind::Unavailable,
            MachineError::TooChanged { .. } => VmFailureKind::TooChanged,
        };
        Self { kind, message }
    }
}

impl Guest {
    /// Makes a VM and boots it to the moment where it waits for a program.
    /// Nothing of any run has entered it by then.
    ///
    /// # Errors
    /// [`VmFailure`]: the host cannot, or the guest died on its way.
    pub fn boot(
        hypervisor: &Hypervisor,
        image: &Image,
        trust: &TrustKeys,
        ram_bytes: usize,
        watchdog: &Watchdog,
    ) -> Result<Self, VmFailure> {
        let started = Instant::now();
        let archive = forge_rootfs::boot_archive(trust);
        let machine = Machine::new(hypervisor, image, &archive, ram_bytes)?;
        machine.populate(RUN_BYTES);
        let vm_ns = elapsed_ns(started);
        let mut guest = Self::boot_in(machine, watchdog)?;
        guest.timing.vm_ns = vm_ns;
        Ok(guest)
    }

    /// Boots a machine that was made for it, for tests that look at what a guest
    /// touches by itself.
    ///
    /// # Errors
    /// As [`Self::boot`].
    pub fn boot_in(machine: Machine, watchdog: &Watchdog) -> Result<Self, VmFailure> {
        let board = Board::new(machine.memory().clone(), watchdog.stop().clone());
        let mut guest = Self { machine, board, timing: Timing::default() };
        let booting = Instant::now();
        let armed = watchdog.arm(deadline_in(BOOT_TIME_MAX));
        let exit = guest.machine.run(&mut guest.board, watchdog.stop());
        drop(armed);
        guest.timing.boot_ns = elapsed_ns(booting);
        guest.stands(exit).map(|()| guest)
    }

    /// Whether the guest left to wait for a program.
    fn stands(&mut self, exit: Exit) -> Result<(), VmFailure> {
        match (exit, self.board.take_verdict()) {
            (Exit::Bus, Some(Verdict::Ready)) => Ok(()),
            (exit, verdict) => Err(not_ready(self.fate(exit, verdict))),
        }
    }

    /// Makes this guest, which has just booted, the base of others.
    ///
    /// # Errors
    /// [`VmFailure`].
    pub fn into_base(
        self,
        hypervisor: &Hypervisor,
        pages: &PageMap,
    ) -> Result<GuestBase, VmFailure> {
        let Self { machine, board, .. } = self;
        let wiring = board.wiring().fork(GuestMemoryMmap::new());
        drop(board);
        Ok(GuestBase { machine: Arc::new(Base::capture(machine, hypervisor, pages)?), wiring })
    }

    /// A guest that stands where the base was taken.
    ///
    /// # Errors
    /// [`VmFailure`]: the host cannot.
    pub fn from_base(
        hypervisor: &Hypervisor,
        base: &GuestBase,
        watchdog: &Watchdog,
    ) -> Result<Self, VmFailure> {
        let started = Instant::now();
        let machine = Machine::from_base(hypervisor, &base.machine)?;
        machine.populate(base.machine.written_bytes() + RUN_BYTES_BEYOND);
        let wiring = base.wiring.fork(machine.memory().clone());
        let board = Board::of(wiring, watchdog.stop().clone());
        let timing = Timing { vm_ns: elapsed_ns(started), ..Timing::default() };
        Ok(Self { machine, board, timing })
    }

    /// Lets the guest run on until it waits again: it touches so much of the
    /// memory that a run will need, so that the run need not.
    ///
    /// # Errors
    /// [`VmFailure`]: the guest died.
    pub fn warm_up(&mut self, touch_bytes: u64, watchdog: &Watchdog) -> Result<(), VmFailure> {
        let started = Instant::now();
        self.machine.populate(touch_bytes as usize);
        self.machine.ask_to_touch(touch_bytes)?;
        let armed = watchdog.arm(deadline_in(BOOT_TIME_MAX));
        let exit = self.machine.run(&mut self.board, watchdog.stop());
        drop(armed);
        self.timing.boot_ns = elapsed_ns(started);
        self.stands(exit)
    }

    /// Makes ready for a worker's filter.
    ///
    /// # Errors
    /// [`VmFailure`]: the host cannot.
    pub fn seal_slots(&mut self) -> Result<(), VmFailure> {
        Ok(self.machine.seal_slots()?)
    }

    /// Marks where the guest stands, to be put back to it.
    ///
    /// # Errors
    /// [`VmFailure`].
    pub fn mark(&mut self, pages: &PageMap) -> Result<Standing, VmFailure> {
        let machine = self.machine.checkpoint(pages)?;
        let wiring = self.board.wiring().fork(self.machine.memory().clone());
        Ok(Standing { machine, wiring })
    }

    /// Puts back everything that has changed since.
    ///
    /// # Errors
    /// [`VmFailure`]; the guest is of no further use.
    pub fn reset(&mut self, to: &Standing, pages: &PageMap) -> Result<ResetDone, VmFailure> {
        let done = self.machine.reset(&to.machine, pages)?;
        self.board.reset(to.wiring.fork(self.machine.memory().clone()));
        Ok(done)
    }

    /// Compares the whole guest with where it was marked.
    ///
    /// # Errors
    /// [`VmFailure`], with what differs.
    pub fn prove_reset(&mut self, to: &Standing, pages: &PageMap) -> Result<(), VmFailure> {
        let found = self.machine.differences(&to.machine, pages)?;
        if found.is_empty() {
            return Ok(());
        }
        Err(VmFailure::new(VmFailureKind::NotReset, left_behind(&found)))
    }

    /// Has the guest verify, parse and instantiate a program, and wait for a
    /// run of it. Nothing of a run has entered it by then.
    ///
    /// # Errors
    /// [`VmFailure`]: the guest refused the program, or died. It is of no
    /// further use.
    pub fn prepare(&mut self, program: &Prepare, watchdog: &Watchdog) -> Result<(), VmFailure> {
        let started = Instant::now();
        let armed = watchdog.arm(deadline_in(BOOT_TIME_MAX));
        self.board.prepare(program)?;
        let exit = self.machine.run(&mut self.board, watchdog.stop());
        drop(armed);
        self.timing.boot_ns += elapsed_ns(started);
        self.stands(exit)
    }

    /// Has the next run tell what happens, as it happens, on this socket.
    pub fn tell(&mut self, socket: RawFd) {
        self.board.tell(socket);
    }

    /// Carries out one run. The guest is of no use afterwards, unless it is
    /// reset.
    pub fn run(&mut self, job: &Job, broker: Option<BrokerLink>, watchdog: &Watchdog) -> Report {
        self.conduct(job.deadline, watchdog, |board| board.begin(job, broker))
    }

    /// The same for a guest that has been prepared.
    pub fn run_prepared(
        &mut self,
        job: &PreparedJob,
        broker: Option<BrokerLink>,
        watchdog: &Watchdog,
    ) -> Report {
        self.conduct(job.deadline, watchdog, |board| board.begin_prepared(job, broker))
    }

    fn conduct(
        &mut self,
        deadline: Deadline,
        watchdog: &Watchdog,
        begin: impl FnOnce(&mut Board) -> Result<(), VmFailure>,
    ) -> Report {
        let started = Instant::now();
        let exits_before = self.machine.exits();
        let armed = watchdog.arm(deadline);
        let prepared = begin(&mut self.board);
        let begun = now_ns();
        let fate = match prepared {
            Ok(()) => {
                let exit = self.machine.run(&mut self.board, watchdog.stop());
                let verdict = self.board.take_verdict();
                self.fate(exit, verdict)
            }
            Err(failure) => Fate::Vm(failure),
        };
        drop(armed);
        let (load_ns, run_ns) = split(elapsed_ns(started), &fate);
        let at = Moments { begun, ended: now_ns(), ..self.timing.at };
        let timing = Timing { load_ns, run_ns, at, ..self.timing };
        let vm_exits = self.machine.exits() - exits_before;
        self.board.take_record().into_report(fate, vm_exits, timing)
    }

    /// Where the time went that it took to make the guest.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Notes when something happened, for the report.
    pub fn note(&mut self, moment: impl FnOnce(&mut Moments)) {
        moment(&mut self.timing.at);
    }

    /// The descriptors of its VM and its vCPU.
    #[must_use]
    pub fn descriptors(&self) -> [RawFd; 2] {
        self.machine.descriptors()
    }

    /// The guest's memory, for tests that look for what must not be there.
    #[must_use]
    pub fn memory(&self) -> &vm_memory::GuestMemoryMmap {
        self.machine.memory()
    }

    fn fate(&self, exit: Exit, verdict: Option<Verdict>) -> Fate {
        let failed = |kind, message: String| Fate::Vm(VmFailure::new(kind, message));
        match exit {
            Exit::Stopped => Fate::Deadline,
            Exit::Died(death) => failed(death_kind(&death), death.to_string()),
            Exit::Bus => match verdict {
                Some(Verdict::Panicked { message_bytes }) => {
                    let death = panicked(self.machine.memory(), message_bytes);
                    failed(VmFailureKind::Crash, death.to_string())
                }
                Some(verdict) => verdict.into(),
                None => failed(
                    VmFailureKind::Internal,
                    "the machine stopped without a reason".to_owned(),
                ),
            },
        }
    }
}

/// Differences that are told one by one. They may be as many as there are
/// pages, and a worker's word is bounded.
const DIFFERENCES_TOLD: usize = 8;
/// The longest text of one, in bytes.
const DIFFERENCE_BYTES_MAX: usize = 256;

/// What a reset left, as its proof found.
fn left_behind(found: &[String]) -> String {
    let mut message = String::from("a reset left differences");
    let mut before = ": ";
    for difference in found.iter().take(DIFFERENCES_TOLD) {
        message.push_str(before);
        message.push_str(&difference[..difference.floor_char_boundary(DIFFERENCE_BYTES_MAX)]);
        before = "; ";
    }
    if found.len() > DIFFERENCES_TOLD {
        message.push_str(&format!("; and {} more", found.len() - DIFFERENCES_TOLD));
    }
    message
}

/// Why a guest that was to stand ready does not.
pub(crate) fn not_ready(fate: Fate) -> VmFailure {
    match fate {
        Fate::Vm(failure) => failure,
        Fate::Deadline => VmFailure::new(
            VmFailureKind::Stopped,
            format!("the guest did not boot within {BOOT_TIME_MAX:?}"),
        ),
        Fate::Ended(_) => {
            VmFailure::new(VmFailureKind::Misbehaved, "the guest ended a run that it was not given")
        }
    }
}

/// What this host did not give, and what it said.
pub(crate) fn unavailable(what: &str, error: &dyn std::error::Error) -> VmFailure {
    VmFailure::new(VmFailureKind::Unavailable, format!("{what}: {error}"))
}

fn death_kind(death: &Death) -> VmFailureKind {
    match death {
        Death::Trap { .. } | Death::Panic { .. } | Death::Shutdown => VmFailureKind::Crash,
        Death::InternalError { .. } | Death::FailEntry { .. } | Death::Unexpected { .. } => {
            VmFailureKind::Stopped
        }
        // It wrote where the host's mapping forbids it: code.
        Death::Host { errno: libc::EFAULT } => VmFailureKind::Stopped,
        Death::Host { .. } | Death::NoMemory { .. } | Death::NoTask => VmFailureKind::Unavailable,
    }
}

pub(crate) fn elapsed_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Divides the time that the host measured by the ticks that the guest
/// claims.
pub(crate) fn split(total_ns: u64, fate: &Fate) -> (u64, u64) {
    let Fate::Ended(Ended { load_ticks, run_ticks, .. }) = fate else { return (0, total_ns) };
    let ticks = u128::from(*load_ticks) + u128::from(*run_ticks);
    if ticks == 0 {
        return (0, total_ns);
    }
    let load_ns = (u128::from(total_ns) * u128::from(*load_ticks) / ticks) as u64;
    (load_ns, total_ns - load_ns)
}

/// Boots a VM for this job alone, in this process, runs it, and reports.
#[must_use]
pub fn serve(job: &Job, trust: &TrustKeys, broker: Option<BrokerLink>) -> Report {
    serve_and_keep(job, trust, broker).map_or_else(failed, |(report, _)| report)
}

/// The same, and gives back the guest, which has not been destroyed yet.
///
/// # Errors
/// [`VmFailure`]: there was no VM.
pub fn serve_and_keep(
    job: &Job,
    trust: &TrustKeys,
    broker: Option<BrokerLink>,
) -> Result<(Report, Guest), VmFailure> {
    let hypervisor = Hypervisor::open()?;
    let image = Image::built_in()?;
    let watchdog = Watchdog::new().map_err(|error| unavailable("no timer", &error))?;
    let ram_bytes = machine::ram_bytes(&job.load.limits);
    let mut guest = Guest::boot(&hypervisor, image, trust, ram_bytes, &watchdog)?;
    let report = guest.run(job, broker, &watchdog);
    Ok((report, guest))
}

#[cfg(test)]
mod tests {
    use forge_protocol::frame::{self, Kind};
    use forge_protocol::worker::Ready;

    use super::*;

    #[test]
    fn however_much_a_reset_left_the_worker_can_say_so() {
        let found: Vec<String> =
            (0..1024).map(|page| format!("page {page} {}", "ü".repeat(200))).collect();
        let failure =
            |found: &[String]| VmFailure::new(VmFailureKind::NotReset, left_behind(found));
        frame::write_message(Kind::Ready, &Ready::Err(failure(&found)), &mut Vec::new());
        assert!(failure(&found).message.ends_with("; and 1016 more"));
        let two = ["page 3".to_owned(), "rip".to_owned()];
        assert_eq!(failure(&two).message, "a reset left differences: page 3; rip");
    }
}
