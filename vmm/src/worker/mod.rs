//! The process around one VM: boots it, hands it a run, carries its calls to
//! the broker, and reports what became of it.
//!
//! It distrusts the guest. It trusts its supervisor, and never sees a
//! credential: tool calls go out on a connection that the supervisor opened
//! at the broker, and responses come back on it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`board`] | what the guest is wired to: device, session, broker |
//! | [`broker_link`] | the run's connection to the broker |
//! | [`process`] | the worker as a process of its own |

pub mod board;
pub mod broker_link;
pub mod process;

use std::time::{Duration, Instant};

use forge_protocol::guest::Ended;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Report, Timing, VmFailure, VmFailureKind};

pub use board::Board;
pub use broker_link::BrokerLink;

use crate::machine::vcpu::panicked;
use crate::machine::{
    self, Death, Exit, Hypervisor, Image, Machine, MachineError, StopReason, Watchdog,
};
use board::Verdict;

/// How long a guest may take to its greeting. It takes about a millisecond;
/// this is for hosts that emulate everything.
const BOOT_TIME_MAX: Duration = Duration::from_secs(30);

/// A guest that stands at "waiting for a program", and what it is wired to.
#[derive(Debug)]
pub struct Guest {
    machine: Machine,
    board: Board,
    timing: Timing,
}

impl From<MachineError> for VmFailure {
    fn from(error: MachineError) -> Self {
        let kind = match error {
            MachineError::Image(_) => VmFailureKind::Internal,
            MachineError::Kvm { .. }
            | MachineError::Hypervisor(_)
            | MachineError::Memory { .. } => VmFailureKind::Unavailable,
        };
        Self { kind, message: error.to_string() }
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
        let vm_ns = elapsed_ns(started);
        let board = Board::new(machine.memory().clone(), watchdog.stop().clone());
        let timing = Timing { vm_ns, ..Timing::default() };
        let mut guest = Self { machine, board, timing };

        let booting = Instant::now();
        let armed = watchdog.arm(booting + BOOT_TIME_MAX);
        let exit = guest.machine.run(&mut guest.board, watchdog.stop());
        drop(armed);
        guest.timing.boot_ns = elapsed_ns(booting);
        match (exit, guest.board.take_verdict()) {
            (Exit::Bus, Some(Verdict::Ready)) => Ok(guest),
            (exit, verdict) => match guest.fate(exit, verdict) {
                Fate::Vm(failure) => Err(failure),
                Fate::Deadline => Err(VmFailure {
                    kind: VmFailureKind::Stopped,
                    message: format!("the guest did not boot within {BOOT_TIME_MAX:?}"),
                }),
                Fate::Ended(_) => Err(VmFailure {
                    kind: VmFailureKind::Misbehaved,
                    message: "the guest ended a run that it was not given".into(),
                }),
            },
        }
    }

    /// Carries out one run. The guest is of no use afterwards.
    pub fn run(&mut self, job: &Job, broker: Option<BrokerLink>, watchdog: &Watchdog) -> Report {
        let started = Instant::now();
        let exits_before = self.machine.exits();
        let armed = watchdog.arm(started + Duration::from_nanos(job.deadline_ns));
        let fate = match self.board.begin(job, broker) {
            Ok(()) => {
                let exit = self.machine.run(&mut self.board, watchdog.stop());
                let verdict = self.board.take_verdict();
                self.fate(exit, verdict)
            }
            Err(failure) => Fate::Vm(failure),
        };
        drop(armed);
        let (load_ns, run_ns) = split(elapsed_ns(started), &fate);
        let timing = Timing { load_ns, run_ns, ..self.timing };
        let record = self.board.take_record();
        Report {
            fate,
            output: record.output,
            artifacts: record.artifacts,
            logs: record.logs,
            calls: record.calls,
            vm_exits: self.machine.exits() - exits_before,
            timing,
        }
    }

    /// The guest's memory, for tests that look for what must not be there.
    #[must_use]
    pub fn memory(&self) -> &vm_memory::GuestMemoryMmap {
        self.machine.memory()
    }

    fn fate(&self, exit: Exit, verdict: Option<Verdict>) -> Fate {
        let failed = |kind, message: String| Fate::Vm(VmFailure { kind, message });
        match exit {
            Exit::Stopped(StopReason::Deadline) => Fate::Deadline,
            Exit::Stopped(StopReason::Cancelled) => {
                failed(VmFailureKind::Stopped, "the run was cancelled".into())
            }
            Exit::Died(death) => failed(death_kind(&death), death.to_string()),
            Exit::Bus => match verdict {
                Some(Verdict::Ended(ended)) => Fate::Ended(ended),
                Some(Verdict::Panicked { message_bytes }) => {
                    let death = panicked(self.machine.memory(), message_bytes);
                    failed(VmFailureKind::Crash, death.to_string())
                }
                Some(Verdict::Stopped) => Fate::Deadline,
                Some(Verdict::Misbehaved(how)) => failed(VmFailureKind::Misbehaved, how),
                Some(Verdict::BrokerLost(how)) => failed(VmFailureKind::BrokerLost, how),
                Some(Verdict::Internal(how)) => failed(VmFailureKind::Internal, how),
                Some(Verdict::Ready) | None => {
                    failed(VmFailureKind::Internal, "the machine stopped without a reason".into())
                }
            },
        }
    }
}

fn death_kind(death: &Death) -> VmFailureKind {
    match death {
        Death::Trap { .. } | Death::Panic { .. } | Death::Shutdown => VmFailureKind::Crash,
        Death::InternalError { .. } | Death::FailEntry { .. } | Death::Unexpected { .. } => {
            VmFailureKind::Stopped
        }
        Death::Host { .. } => VmFailureKind::Unavailable,
    }
}

fn elapsed_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Divides the time that the host measured by the ticks that the guest
/// claims.
fn split(total_ns: u64, fate: &Fate) -> (u64, u64) {
    let Fate::Ended(Ended { load_ticks, run_ticks, .. }) = fate else { return (0, total_ns) };
    let ticks = u128::from(*load_ticks) + u128::from(*run_ticks);
    if ticks == 0 {
        return (0, total_ns);
    }
    let load_ns = (u128::from(total_ns) * u128::from(*load_ticks) / ticks) as u64;
    (load_ns, total_ns - load_ns)
}

/// Makes a VM for this job alone, runs it, and reports.
#[must_use]
pub fn serve(job: &Job, broker: Option<BrokerLink>) -> Report {
    match try_serve(job, broker) {
        Ok(report) => report,
        Err(failure) => Report {
            fate: Fate::Vm(failure),
            output: Vec::new(),
            artifacts: Vec::new(),
            logs: Vec::new(),
            calls: Vec::new(),
            vm_exits: 0,
            timing: Timing::default(),
        },
    }
}

fn try_serve(job: &Job, broker: Option<BrokerLink>) -> Result<Report, VmFailure> {
    let started = Instant::now();
    let internal = |message: String| VmFailure { kind: VmFailureKind::Internal, message };
    let trust = crate::keys::trust_from_bytes(&job.trust)
        .map_err(|error| internal(format!("a trust key of the job: {error}")))?;
    let hypervisor = Hypervisor::open()?;
    let image = Image::built_in()?;
    let watchdog = Watchdog::new().map_err(|error| VmFailure {
        kind: VmFailureKind::Unavailable,
        message: format!("no watchdog: {error}"),
    })?;
    let ram_bytes = machine::ram_bytes(&job.load.limits);
    let mut guest = Guest::boot(&hypervisor, &image, &trust, ram_bytes, &watchdog)?;
    // The clock has been running since the supervisor sent the job.
    let deadline_ns = job.deadline_ns.saturating_sub(elapsed_ns(started));
    let job = Job { deadline_ns, ..job.clone() };
    Ok(guest.run(&job, broker, &watchdog))
}
