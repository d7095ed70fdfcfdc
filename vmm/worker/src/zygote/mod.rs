//! The zygote: the process that workers are forked from.
//!
//! It has entered the jail, taken `/dev/kvm`, loaded the guest's code and
//! booted a guest once; a worker inherits all of that, makes a VM of its own
//! from the base, and gives up the rest. In the tier `process` there is nothing
//! but the jail to inherit ([`crate::process`]). The zygote itself never sees a
//! program. It has one thread, so that a fork is whole, and it is the first
//! process of its pid namespace: when it ends, so does every worker.
//!
//! | module | what it holds |
//! |---|---|
//! | `text` | its own code and constants, in pages that a fork need not find again |

mod text;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use forge_protocol::codec;
use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::platform::PAGE_BYTES;
use forge_protocol::signature::{KeyError, TrustKey, TrustKeys};
use forge_protocol::worker::{
    Fork, Jailed, Tier, VmFailure, VmFailureKind, ZygoteReady, ZygoteSetup, Zygoted,
};

use crate::jail::seccomp::FilterError;
use crate::jail::{Filter, Limits, Role, WorkerJail, landlock, privileges, seccomp, tree};
use crate::link::{Link, Patience};
use crate::machine::{
    Hypervisor, Image, PageMap, Watchdog, hypervisor::Placeholder, snapshot::BASE_FILE_BYTES,
};
use crate::process;
use crate::worker::life::say;
use crate::worker::{Guest, GuestBase, heap, life, unavailable};

/// Bases kept at a time: each is some hundred KiB. A run that needs a size of
/// RAM that has none waits a few milliseconds longer.
const BASES_MAX: usize = 8;

/// The turn that a worker asks the scheduler for (`sched_runtime` of
/// sched_setattr(2), for SCHED_OTHER since Linux 6.12), in nanoseconds. It is
/// shorter than the usual one, so that whom a worker wakes with its report
/// lets it come to rest and does not take its CPU in the middle of its send.
/// Its share of the CPU is the same.
const TURN_NS: u64 = 500_000;

/// What workers inherit.
struct Zygote {
    trust: TrustKeys,
    jail: WorkerJail,
    makings: Makings,
}

/// What workers are made from.
enum Makings {
    Vm(Box<VmMakings>),
    Process(process::Makings),
}

/// What VMs are made from.
struct VmMakings {
    /// So that no worker's VM is the host's first or last.
    _placeholder: Placeholder,
    hypervisor: Hypervisor,
    image: &'static Image,
    pages: PageMap,
    procfs: io::Result<OwnedFd>,
    /// The most recently used first.
    bases: VecDeque<GuestBase>,
}

/// The descriptor that the supervisor leaves `/dev/kvm` at, for VMs.
pub const KVM_DESCRIPTOR: RawFd = 3;

/// The zygote's limits. It has a descriptor for each base beside its few, and
/// writes nothing but bases.
pub const LIMITS: Limits =
    Limits { open_files: 64, processes: 1 << 16, file_bytes: BASE_FILE_BYTES as u64 };

/// The filters of a zygote and its workers.
#[derive(Clone, Debug)]
pub struct Filters {
    /// The filter of the zygote.
    pub zygote: Filter,
    /// What a worker adds to it that has a VM.
    pub worker: Filter,
    /// What a worker adds to it that has none.
    pub process: Filter,
}

impl Filters {
    /// Those of the tables.
    ///
    /// # Errors
    /// If our own tables are wrong.
    pub fn compile() -> Result<Self, FilterError> {
        Ok(Self {
            zygote: Filter::compile(Role::Zygote)?,
            worker: Filter::compile(Role::Worker)?,
            process: Filter::compile(Role::Process)?,
        })
    }
}

/// The zygote's whole life; descriptor 0 is its supervisor's socket. Returns
/// when the supervisor is gone.
///
/// # Errors
/// If the supervisor cannot be understood.
pub fn main() -> io::Result<()> {
    serve(Filters::compile().map_err(io::Error::other)?)
}

/// The same with other filters, for the test that each of their rules is
/// needed.
///
/// # Errors
/// As [`main`].
pub fn serve(filters: Filters) -> io::Result<()> {
    // SAFETY: the supervisor put a socket there, and nothing else uses it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let mut link = Link::new(socket);
    // For whoever lists processes.
    // SAFETY: a C string of at most 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"forge-zygote".as_ptr()) };
    ask_for_short_turns();
    keep_pages_apart();
    // Children are not waited for: their process descriptors are with the
    // supervisor, which sees them end.
    // SAFETY: changes what becomes of ended children, of whom there are none.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };

    let setup = match receive(&mut link, Kind::ZygoteSetup)? {
        Some(frame) => decode::<ZygoteSetup>(&frame)?,
        None => return Ok(()),
    };
    let (mut zygote, jailed) = match Zygote::new(&setup, filters) {
        Ok(ready) => ready,
        Err(failure) => return say(&mut link, Kind::ZygoteReady, &ZygoteReady::Err(failure)),
    };
    say(&mut link, Kind::ZygoteReady, &ZygoteReady::Ok(jailed))?;
    // Written once: what the zygote writes after a fork it shares with the worker
    // until then, and each page of it is a fault and a copy, while the worker
    // waits for its turn on this CPU.
    let mut forked = Vec::new();
    frame::write_message(Kind::Zygoted, &Zygoted::Ok(()), &mut forked);
    while let Some(frame) = receive(&mut link, Kind::Fork)? {
        let order: Fork = decode(&frame)?;
        let Some(socket) = link.take_passed() else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a worker without a socket"));
        };
        let told = zygote.fork(order, socket).and_then(|process| {
            // It goes with the few bytes of its frame, or none of them do.
            link.pass(&forked, &mut Some(process.as_fd()), Patience::default())
                .map_err(|error| unavailable("the descriptor of a worker was not passed", &error))
        });
        if let Err(failure) = told {
            say(&mut link, Kind::Zygoted, &Zygoted::Err(failure))?;
        }
    }
    Ok(())
}

/// Asks the scheduler for turns of [`TURN_NS`], for this process and its
/// workers, who inherit it. A kernel that does not know it ignores it.
fn ask_for_short_turns() {
    let bytes = size_of::<libc::sched_attr>() as u32;
    // SAFETY: all-zero is a valid sched_attr.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most so many bytes of what it is given.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, bytes, 0) };
    // To other classes the field means something else.
    if got != 0 || attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_runtime = TURN_NS;
    // SAFETY: reads the same. What the kernel refuses stays as it was.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Has the kernel merge no page of this process and its workers, who inherit it,
/// with another (KSM). A service manager may have asked for that (`MemoryKSM=`);
/// but a page that a run left full of zeros would then be the shared page of zeros,
/// which a reset does not take for one that was written, and what it held before
/// would not be put back.
fn keep_pages_apart() {
    // SAFETY: takes numbers alone. A kernel without it (before 6.4, or without KSM)
    // refuses, and merges nothing that nobody named.
    unsafe {
        libc::prctl(
            libc::PR_SET_MEMORY_MERGE,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
        )
    };
}

fn receive(link: &mut Link, kind: Kind) -> io::Result<Option<Frame>> {
    match link.receive(|got| got == kind, Patience::default()) {
        Ok(frame) => Ok(Some(frame)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn decode<T: for<'a> codec::BorrowDecode<'a, ()>>(frame: &Frame) -> io::Result<T> {
    codec::decode(&frame.payload)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

fn trust_keys(keys: &[[u8; 32]]) -> Result<TrustKeys, KeyError> {
    let keys: Result<Vec<_>, _> = keys.iter().map(TrustKey::from_bytes).collect();
    TrustKeys::new(keys?)
}

fn jailed(error: &dyn std::error::Error) -> VmFailure {
    VmFailure::new(VmFailureKind::Unavailable, error.to_string())
}

/// What a zygote in its jail has.
struct Inside {
    /// A procfs that only who holds it can reach.
    procfs: io::Result<OwnedFd>,
    /// What each worker puts on.
    jail: WorkerJail,
    found: Jailed,
}

/// Enters the jail; from here on every worker is born in it.
fn jail_in(tier: Tier, filters: Filters) -> Result<Inside, VmFailure> {
    let procfs = tree::enter().map_err(|error| jailed(&error))?.procfs;
    let (limits, filter, procfs) = match tier {
        Tier::Vm => (&life::LIMITS, filters.worker, procfs),
        // A process that serves one run has nothing to find in it.
        Tier::Process => {
            (&process::LIMITS, filters.process, Err(io::Error::from(io::ErrorKind::Unsupported)))
        }
    };
    privileges::drop_all().map_err(|error| jailed(&error))?;
    LIMITS.apply().map_err(|error| jailed(&error))?;
    let jail = WorkerJail::prepare(limits, filter);
    let jail = jail.map_err(|error| jailed(&error))?;
    let enforced = landlock::restrict(procfs.as_ref().ok().map(|fd| fd.as_fd()));
    let landlock_abi = enforced.map_err(|error| jailed(&error))?.abi();
    seccomp::report_forbidden(life::tell_forbidden).map_err(|error| jailed(&error))?;
    filters.zygote.install().map_err(|error| jailed(&error))?;
    let found = Jailed { procfs: procfs.is_ok(), landlock_abi };
    Ok(Inside { procfs, jail, found })
}

impl Zygote {
    fn new(setup: &ZygoteSetup, filters: Filters) -> Result<(Self, Jailed), VmFailure> {
        let trust = trust_keys(&setup.trust).map_err(|error| {
            VmFailure::new(VmFailureKind::Internal, format!("a trust key: {error}"))
        })?;
        // A worker without a VM checks by these; a guest that becomes a base makes
        // its own.
        let trust = trust.with_tables();
        // Before the jail takes /proc away, which this and the makings below read.
        text::move_to_large_pages();
        let mut makings = match setup.tier {
            Tier::Vm => Makings::Vm(Box::new(VmMakings::new()?)),
            Tier::Process => {
                let makings = process::Makings::new();
                Makings::Process(makings.map_err(|error| unavailable("/proc", &error))?)
            }
        };
        let Inside { procfs, jail, found } = jail_in(setup.tier, filters)?;
        if let Makings::Vm(vm) = &mut makings {
            vm.procfs = procfs;
        }
        Ok((Self { trust, jail, makings }, found))
    }

    /// Forks a worker; gives back its process descriptor.
    fn fork(&mut self, order: Fork, socket: OwnedFd) -> Result<OwnedFd, VmFailure> {
        let Self { trust, jail, makings } = self;
        match makings {
            Makings::Vm(vm) => vm.fork(trust, jail, order, socket),
            Makings::Process(process) => match forked()? {
                Some(child) => Ok(child),
                None => process::main(socket, process, trust, jail, order),
            },
        }
    }
}

impl VmMakings {
    /// What can only be made before the zygote enters its jail.
    fn new() -> Result<Self, VmFailure> {
        // SAFETY: the supervisor put it there, and nothing else uses it.
        let hypervisor = Hypervisor::over(unsafe { OwnedFd::from_raw_fd(KVM_DESCRIPTOR) })?;
        let _placeholder = hypervisor.placeholder()?;
        let image = Image::built_in()?;
        // Now, as it takes longer than a boot.
        image.load()?;
        let pages = PageMap::open().map_err(|error| unavailable("the page map", &error))?;
        // It comes with the jail.
        let procfs = Err(io::ErrorKind::NotFound.into());
        Ok(Self { _placeholder, hypervisor, image, pages, procfs, bases: VecDeque::new() })
    }

    /// Has the base with this much RAM lie first, made if there is none yet.
    fn place_base(&mut self, trust: &TrustKeys, ram_bytes: usize) -> Result<(), VmFailure> {
        let found = self.bases.iter().position(|base| base.ram_bytes() == ram_bytes);
        if found == Some(0) {
            return Ok(());
        }
        // First of all what can fail: the base at the front stays as it is then.
        let base = match found.and_then(|index| self.bases.remove(index)) {
            Some(base) => base,
            None => self.make_base(trust, ram_bytes)?,
        };
        // A worker has the memory of its own base and of no other.
        if let Some(other) = self.bases.front() {
            other.set_inherited(false);
        }
        base.set_inherited(true);
        self.bases.truncate(BASES_MAX - 1);
        self.bases.push_front(base);
        Ok(())
    }

    fn make_base(&self, trust: &TrustKeys, ram_bytes: usize) -> Result<GuestBase, VmFailure> {
        let watchdog = Watchdog::new().map_err(|error| unavailable("no timer", &error))?;
        Guest::boot(&self.hypervisor, self.image, trust, ram_bytes, &watchdog)?
            .into_base(&self.hypervisor, &self.pages)
    }

    fn fork(
        &mut self,
        trust: &TrustKeys,
        jail: &WorkerJail,
        order: Fork,
        socket: OwnedFd,
    ) -> Result<OwnedFd, VmFailure> {
        let ram_bytes = usize::try_from(order.ram_bytes).unwrap_or(usize::MAX);
        self.place_base(trust, ram_bytes)?;
        let inherited = life::Inherited {
            hypervisor: &self.hypervisor,
            base: &self.bases[0],
            procfs: self.procfs.as_ref().map(|fd| fd.as_fd()),
            jail,
            order,
        };
        match forked()? {
            Some(child) => Ok(child),
            None => life::main(socket, &inherited),
        }
    }
}

/// [`fork`], with its failure as a worker's.
fn forked() -> Result<Option<OwnedFd>, VmFailure> {
    fork().map_err(|error| unavailable("no worker can be forked", &error))
}

/// Forks this process, which has one thread, so that the child is as whole as
/// the parent. `None` in the child; in the parent a descriptor of the child, by
/// which it can be ended and awaited without ever meaning another process.
///
/// Not by the C library's `fork`: what that does for threads and their locks
/// writes to ten pages that parent and child share until then, and each is a
/// fault and a copy. What is left undone: the library's own note of the
/// thread's id stays the parent's. Nothing here reads it (`gettid` asks the
/// kernel), and there is no second thread for which a lock would note it.
fn fork() -> io::Result<Option<OwnedFd>> {
    let mut descriptor: RawFd = -1;
    let flags = libc::CLONE_PIDFD | libc::SIGCHLD;
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: without CLONE_VM the child has a copy of everything, its stack
    // too; the kernel writes the descriptor's number and nothing else.
    match unsafe { libc::syscall(libc::SYS_clone, flags, none, &raw mut descriptor, none, 0) } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            reach_down();
            heap::open();
            Ok(None)
        }
        // SAFETY: new and ours.
        _ => Ok(Some(unsafe { OwnedFd::from_raw_fd(descriptor) })),
    }
}

/// How far a worker's stack reaches beyond that of the zygote where it forks,
/// in bytes.
const STACK_BYTES: usize = 6 * PAGE_BYTES as usize;

/// Makes the next pages of the stack this process's own, at once and not fault
/// by fault.
fn reach_down() {
    let here = 0u8;
    let page = (&raw const here).addr() & !(PAGE_BYTES as usize - 1);
    let start = (&raw const here).with_addr(page - STACK_BYTES).cast_mut();
    // The page that this is in, too.
    let bytes = STACK_BYTES + PAGE_BYTES as usize;
    // SAFETY: advice about pages of this thread's stack. The kernel does not take
    // it for some that the zygote never reached; they come one by one.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) };
}
