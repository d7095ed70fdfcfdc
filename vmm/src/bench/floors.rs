//! What no design can go below on this host.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forge_guest_init::engine;
use forge_protocol::limits::RunLimits;
use forge_protocol::platform::CONTROL_MMIO;
use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};
use wasmi::{Engine, Extern, Func, Instance, Module, Store};

use super::fixture::Folder;
use super::program::{self, Program};
use super::{Case, Entry, Measure};
use crate::jail::{WorkerJail, landlock};
use crate::link::{Patience, wait};
use crate::machine::{
    self, Bus, Exit, Hypervisor, Image, Machine, PageMap, Watchdog, deadline_in, vcpu::Go,
};
use crate::worker::zygote::Filters;
use crate::worker::{process, zygote};

pub(super) const ENTRIES: &[Entry] = &[
    floor("floor_kvm", "bare KVM: create a VM, one slot, one vCPU, one exit", kvm),
    floor("floor_kvm_destroy", "bare KVM: destroy that VM", kvm_destroy),
    floor("floor_exit", "one bare VM exit by MMIO, and back", exit),
    floor(
        "floor_reset",
        "a bare vCPU put back: KVM_RUN that returns at once, one MSR, x87 and SSE; and a scan for \
         changed pages",
        reset,
    ),
    floor("floor_socket", "64 bytes to another process over a unix socket, and back", socket),
    floor("floor_fsync", "append a page to a file where the journal is, and sync it", fsync),
    floor("floor_fork", "fork a process that ends at once, and wait for it", fork),
    floor("floor_jail", "what a forked worker puts on for itself of the jail", jail),
    Entry {
        group: "cold",
        ..floor(
            "floor_forked",
            "fork a process that makes a bare VM of a guest's size, has one exit, puts on the jail \
             and says so",
            forked,
        )
    },
    Entry {
        group: "warm",
        ..floor(
            "floor_hops",
            "64 bytes from process to process to a third, one bare VM exit there, and back the \
             same way",
            hops,
        )
    },
    floor("floor_verify", "check the program's signature on the host", verify),
    floor(
        "floor_parse",
        "parse, compile and instantiate the program with wasmi alone, on the host",
        parse,
    ),
];

const fn floor(name: &'static str, about: &'static str, make: Make) -> Entry {
    Entry { name, group: "floors", about, ratio_of: None, measure: Measure::Sampled(make) }
}

type Make = fn() -> Result<Box<dyn Case>, String>;

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A VM that halts at its first instruction.
struct Bare {
    vcpu: VcpuFd,
    vm: VmFd,
    memory: GuestMemoryMmap,
}

/// The page that holds the reset vector (Intel SDM volume 3, 11.1.4).
const RESET_PAGE: u64 = 0xffff_f000;
const RESET_VECTOR: u64 = 0xffff_fff0;
const SLOT_BYTES: usize = 4 << 20;
/// Pages that a guest writes on its way, about, and has before it begins.
const GUEST_PAGES: u64 = 20;

/// With one slot of so many bytes, the last pages of which are there already.
fn bare(kvm: &Kvm, slot_bytes: usize, pages: u64) -> Result<Bare, String> {
    let vm = kvm.create_vm().map_err(said)?;
    let start = RESET_PAGE + 4096 - slot_bytes as u64;
    let memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(start), slot_bytes)]).map_err(said)?;
    for page in 0..pages {
        memory.write_slice(&[0], GuestAddress(RESET_PAGE - 4096 * page)).map_err(said)?;
    }
    memory.write_slice(&[0xf4], GuestAddress(RESET_VECTOR)).map_err(said)?;
    for region in memory.iter() {
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping is kept beside the VM, and accessed through
        // vm-memory alone.
        unsafe { vm.set_user_memory_region(region) }.map_err(said)?;
    }
    let mut vcpu = vm.create_vcpu(0).map_err(said)?;
    match vcpu.run().map_err(said)? {
        VcpuExit::Hlt => Ok(Bare { vcpu, vm, memory }),
        other => Err(format!("a bare VM left with {other:?}")),
    }
}

struct KvmFloor {
    kvm: Kvm,
    destroy: bool,
}

fn kvm() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(KvmFloor { kvm: Kvm::new().map_err(said)?, destroy: false }))
}

fn kvm_destroy() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(KvmFloor { kvm: Kvm::new().map_err(said)?, destroy: true }))
}

impl Case for KvmFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let making = Instant::now();
        let bare = bare(&self.kvm, SLOT_BYTES, 0)?;
        let made = making.elapsed();
        let destroying = Instant::now();
        drop(bare);
        let destroyed = destroying.elapsed();
        Ok(if self.destroy { destroyed } else { made }.as_nanos() as u64)
    }
}

/// Exits in one sample of [`exit`].
const EXITS: u32 = 50;

struct ExitFloor {
    machine: Machine,
    watchdog: Watchdog,
}

/// Counts down, then breaks.
struct Countdown(u32);

impl Bus for Countdown {
    fn read(&mut self, _: u64, _: &mut [u8]) -> Go {
        Go::Break(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Go {
        self.0 -= 1;
        if self.0 == 0 { Go::Break(()) } else { Go::Continue(()) }
    }
}

fn exit() -> Result<Box<dyn Case>, String> {
    ExitFloor::new().map(|floor| Box::new(floor) as Box<dyn Case>)
}

impl ExitFloor {
    fn new() -> Result<Self, String> {
        let [a, b, c, d] = (CONTROL_MMIO as u32).to_le_bytes();
        // mov [CONTROL_MMIO], eax; jmp back
        let code = [0x89, 0x04, 0x25, a, b, c, d, 0xeb, 0xf7];
        let image = Image::with_entry_code(&code).map_err(said)?;
        let hypervisor = Hypervisor::open().map_err(said)?;
        let machine = Machine::new(&hypervisor, &image, &[], 16 << 20).map_err(said)?;
        Ok(Self { machine, watchdog: Watchdog::new().map_err(said)? })
    }

    /// So many exits.
    fn run(&mut self, exits: u32) -> Result<(), String> {
        let _armed = self.watchdog.arm(deadline_in(Duration::from_secs(10)));
        match self.machine.run(&mut Countdown(exits), self.watchdog.stop()) {
            Exit::Bus => Ok(()),
            other => Err(format!("the guest that only exits left with {other:?}")),
        }
    }
}

impl Case for ExitFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.run(EXITS)?;
        Ok(started.elapsed().as_nanos() as u64 / u64::from(EXITS))
    }
}

/// An MSR that every vCPU has: KERNEL_GS_BASE.
const AN_MSR: u32 = 0xc000_0102;

/// What no reset does without, on a VM in which nothing has changed.
struct ResetFloor {
    bare: Bare,
    fpu: kvm_fpu,
    msrs: Msrs,
    pages: PageMap,
    memory: Range<usize>,
}

fn reset() -> Result<Box<dyn Case>, String> {
    let bare = bare(&Kvm::new().map_err(said)?, SLOT_BYTES, 0)?;
    let fpu = bare.vcpu.get_fpu().map_err(said)?;
    let entry = kvm_msr_entry { index: AN_MSR, ..Default::default() };
    let msrs = Msrs::from_entries(&[entry]).map_err(said)?;
    let region = bare.memory.iter().next().ok_or("a bare VM has no memory")?;
    let start = region.as_ptr() as usize;
    let memory = start..start + SLOT_BYTES;
    Ok(Box::new(ResetFloor { fpu, msrs, pages: PageMap::open().map_err(said)?, memory, bare }))
}

impl Case for ResetFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let vcpu = &mut self.bare.vcpu;
        let started = Instant::now();
        vcpu.set_kvm_immediate_exit(1);
        let interrupted = vcpu.run().is_err_and(|error| error.errno() == libc::EINTR);
        vcpu.set_kvm_immediate_exit(0);
        let set = vcpu.set_msrs(&self.msrs).map_err(said)?;
        vcpu.set_fpu(&self.fpu).map_err(said)?;
        let changed = self.pages.private_pages(self.memory.clone()).map_err(said)?;
        let ns = started.elapsed().as_nanos() as u64;
        // The page with its one instruction.
        match (interrupted, set, changed.len()) {
            (true, 1, 1) => Ok(ns),
            found => Err(format!("a bare vCPU cannot be put back: {found:?}")),
        }
    }
}

const PING_BYTES: usize = 64;

struct SocketFloor {
    socket: UnixStream,
    child: libc::pid_t,
}

/// Forks a child that runs `work` and ends, without running destructors.
fn fork_child(work: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: the child does nothing but what `work` does, and `_exit`. `work`
    // takes no lock but the allocator's, which glibc keeps whole in a fork.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // Whoever ends the bench ends it too: the thread that forks is there
            // as long as the bench is.
            // SAFETY: an option that takes numbers alone.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            work();
            // SAFETY: ends this process.
            unsafe { libc::_exit(0) }
        }
        child => Ok(child),
    }
}

fn wait_for(child: libc::pid_t) {
    // SAFETY: waits for a child of ours; the status is not asked for.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

fn socket() -> Result<Box<dyn Case>, String> {
    let (socket, mut theirs) = UnixStream::pair().map_err(said)?;
    let child = fork_child(move || {
        let mut bytes = [0; PING_BYTES];
        while theirs.read_exact(&mut bytes).is_ok() && theirs.write_all(&bytes).is_ok() {}
    });
    Ok(Box::new(SocketFloor { child: child.map_err(said)?, socket }))
}

impl Case for SocketFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let mut bytes = [7; PING_BYTES];
        let started = Instant::now();
        self.socket.write_all(&bytes).map_err(said)?;
        self.socket.read_exact(&mut bytes).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

impl Drop for SocketFloor {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        wait_for(self.child);
    }
}

/// The hops of a warm run with nothing in them: a client, a service and a
/// worker in a process each, which wait as ours do, and one exit.
struct HopsFloor {
    socket: UnixStream,
    children: [libc::pid_t; 2],
}

/// Waits for so much, as [`crate::link`] does.
fn await_ping(socket: &mut UnixStream, bytes: &mut [u8; PING_BYTES]) -> io::Result<()> {
    wait(socket.as_raw_fd(), libc::POLLIN, Patience::default())?;
    socket.read_exact(bytes)
}

fn hops() -> Result<Box<dyn Case>, String> {
    let (socket, mut client) = UnixStream::pair().map_err(said)?;
    let (mut worker, mut supervisor) = UnixStream::pair().map_err(said)?;
    let works = fork_child(move || {
        if let Ok(mut guest) = ExitFloor::new() {
            let mut bytes = [0; PING_BYTES];
            while await_ping(&mut supervisor, &mut bytes).is_ok()
                && guest.run(1).is_ok()
                && supervisor.write_all(&bytes).is_ok()
            {}
        }
        // Whoever waits for it has an end of it too.
        let _ = supervisor.shutdown(std::net::Shutdown::Both);
    });
    let works = works.map_err(said)?;
    let serves = fork_child(move || {
        let mut bytes = [0; PING_BYTES];
        while await_ping(&mut client, &mut bytes).is_ok()
            && worker.write_all(&bytes).is_ok()
            && await_ping(&mut worker, &mut bytes).is_ok()
            && client.write_all(&bytes).is_ok()
        {}
        let _ = worker.shutdown(std::net::Shutdown::Both);
        let _ = client.shutdown(std::net::Shutdown::Both);
    });
    Ok(Box::new(HopsFloor { children: [works, serves.map_err(said)?], socket }))
}

impl Case for HopsFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let mut bytes = [7; PING_BYTES];
        let started = Instant::now();
        self.socket.write_all(&bytes).map_err(said)?;
        await_ping(&mut self.socket, &mut bytes).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

impl Drop for HopsFloor {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        for child in self.children {
            wait_for(child);
        }
    }
}

/// What one commit appends to a write-ahead log of SQLite at least: a page
/// and its head (<https://www.sqlite.org/fileformat2.html>, 4.1).
const FRAME_BYTES: usize = 24 + 4096;

struct FsyncFloor {
    file: File,
    _folder: Folder,
}

fn fsync() -> Result<Box<dyn Case>, String> {
    let folder = Folder::new()?;
    let file = File::create(folder.path().join("log")).map_err(said)?;
    Ok(Box::new(FsyncFloor { file, _folder: folder }))
}

impl Case for FsyncFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.file.write_all(&[7; FRAME_BYTES]).map_err(said)?;
        self.file.sync_data().map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

/// A process beside the bench that takes the samples which fork. If the bench
/// did itself, each would leave its memory to be copied on the next write, and
/// whatever is measured next in this process would pay for that.
struct Beside {
    socket: UnixStream,
    child: libc::pid_t,
}

impl Beside {
    /// Forks it. It takes a sample by `measure` whenever it is asked to.
    fn fork(mut measure: impl FnMut() -> Result<u64, String>) -> Result<Box<dyn Case>, String> {
        let (socket, mut theirs) = UnixStream::pair().map_err(said)?;
        let child = fork_child(move || {
            let mut asked = [0];
            while theirs.read_exact(&mut asked).is_ok() {
                let ns = measure().unwrap_or(u64::MAX);
                if theirs.write_all(&ns.to_ne_bytes()).is_err() {
                    return;
                }
            }
        });
        Ok(Box::new(Self { child: child.map_err(said)?, socket }))
    }
}

impl Case for Beside {
    fn sample(&mut self) -> Result<u64, String> {
        let mut answer = [0; 8];
        self.socket.write_all(&[0]).map_err(said)?;
        self.socket.read_exact(&mut answer).map_err(said)?;
        match u64::from_ne_bytes(answer) {
            u64::MAX => Err("a forked process could not be measured".into()),
            ns => Ok(ns),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        wait_for(self.child);
    }
}

fn fork() -> Result<Box<dyn Case>, String> {
    Beside::fork(|| {
        let started = Instant::now();
        wait_for(fork_child(|| {}).map_err(said)?);
        Ok(started.elapsed().as_nanos() as u64)
    })
}

/// In a child for each sample, because nobody takes a jail off. It puts on
/// first, outside the measured time, what a worker has from its zygote.
struct JailFloor {
    filters: Filters,
}

fn jail() -> Result<Box<dyn Case>, String> {
    let floor = JailFloor { filters: Filters::compile().map_err(said)? };
    Beside::fork(move || floor.sample())
}

impl JailFloor {
    fn in_child(&self, tell: &UnixStream) -> Result<Duration, String> {
        // SAFETY: an option that takes numbers alone.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        zygote::LIMITS.apply().map_err(said)?;
        let worker = self.filters.worker.clone();
        let jail = WorkerJail::prepare(&process::LIMITS, worker).map_err(said)?;
        landlock::restrict(None).map_err(said)?;
        self.filters.zygote.install().map_err(said)?;
        let started = Instant::now();
        jail.enter(&mut [tell.as_raw_fd()]).map_err(said)?;
        Ok(started.elapsed())
    }

    fn sample(&self) -> Result<u64, String> {
        let (mut told, mut tell) = UnixStream::pair().map_err(said)?;
        let child = fork_child(|| {
            let took = self.in_child(&tell).map_or(u64::MAX, |took| took.as_nanos() as u64);
            let _ = tell.write_all(&took.to_ne_bytes());
        });
        let child = child.map_err(said)?;
        drop(tell);
        let mut took = [0; 8];
        let read = told.read_exact(&mut took);
        wait_for(child);
        match (read, u64::from_ne_bytes(took)) {
            (Ok(()), ns) if ns != u64::MAX => Ok(ns),
            _ => Err("a child could not enter the jail".into()),
        }
    }
}

/// All of a bare worker's path at once, which is more than the sum of its
/// floors: a process that has just been forked faults its memory in, its VM is
/// the first that it makes, and it has to be heard.
#[derive(Default)]
struct ForkedFloor(Option<(Kvm, WorkerJail)>);

fn forked() -> Result<Box<dyn Case>, String> {
    let mut floor = ForkedFloor::default();
    Beside::fork(move || floor.sample())
}

impl ForkedFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let (kvm, jail) = match &mut self.0 {
            Some(made) => &*made,
            none => {
                let filter = Filters::compile().map_err(said)?.worker;
                let jail = WorkerJail::prepare(&process::LIMITS, filter).map_err(said)?;
                &*none.insert((Kvm::new().map_err(said)?, jail))
            }
        };
        let (mut told, mut tell) = UnixStream::pair().map_err(said)?;
        let started = Instant::now();
        let child = fork_child(|| {
            // SAFETY: an option that takes numbers alone.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let slot_bytes = machine::ram_bytes(&RunLimits::default());
            let Ok(bare) = bare(kvm, slot_bytes, GUEST_PAGES) else { return };
            let mut keep = [tell.as_raw_fd(), bare.vm.as_raw_fd(), bare.vcpu.as_raw_fd()];
            if jail.enter(&mut keep).is_ok() {
                let _ = tell.write_all(&[1]);
            }
        });
        let child = child.map_err(said)?;
        drop(tell);
        let read = told.read_exact(&mut [0]);
        let ns = started.elapsed().as_nanos() as u64;
        wait_for(child);
        read.map_err(|_| "a forked process could not make a jailed VM")?;
        Ok(ns)
    }
}

struct VerifyFloor(Program);

fn verify() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(VerifyFloor(Program::new()?)))
}

impl Case for VerifyFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.0.trust.verify(&self.0.signed).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

struct ParseFloor {
    module: Vec<u8>,
    limits: RunLimits,
}

fn parse() -> Result<Box<dyn Case>, String> {
    // Or glibc gives memory back after each sample, and the next one pays for
    // page faults that a guest does not have.
    // SAFETY: has no preconditions.
    unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20) };
    let module = program::module().map_err(said)?;
    Ok(Box::new(ParseFloor { module, limits: RunLimits::default() }))
}

impl Case for ParseFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        let engine = Engine::new(&engine::config(&self.limits));
        let module = Module::new(&engine, &self.module).map_err(said)?;
        let mut store = Store::new(&engine, ());
        let imports: Vec<Extern> = module
            .imports()
            .filter_map(|import| import.ty().func().cloned())
            .map(|ty| Func::new(&mut store, ty, |_, _, _| Ok(())).into())
            .collect();
        let instance = Instance::new(&mut store, &module, &imports).map_err(said)?;
        let ns = started.elapsed().as_nanos() as u64;
        match instance.get_func(&store, "forge_run") {
            Some(_) => Ok(ns),
            None => Err("the instance has no forge_run".into()),
        }
    }
}
