//! KVM_RUN, every exit reason, and what a dead guest left behind.

use forge_protocol::limits::PANIC_MESSAGE_BYTES_MAX;
use forge_protocol::platform::{CRASH, TrapFrame};
use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub use super::Go;
use super::stop::Interruptible;
use super::{MachineError, Stop};

/// Who answers the guest's device accesses. Neither may panic, whatever the
/// guest does.
pub trait Bus {
    /// The guest reads `data.len()` bytes at a physical address without RAM.
    fn read(&mut self, address: u64, data: &mut [u8]) -> Go;
    /// The guest writes there.
    fn write(&mut self, address: u64, data: &[u8]) -> Go;
}

/// Why [`Machine::run`](super::Machine::run) came back.
#[derive(Debug, PartialEq, Eq)]
pub enum Exit {
    /// The bus said so; it knows why.
    Bus,
    /// Its time is over.
    Stopped,
    /// The guest is dead.
    Died(Death),
}

/// How a guest died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Death {
    /// An exception reached the trap stub.
    Trap {
        /// What the CPU and the stub left.
        frame: TrapFrame,
    },
    /// The guest kernel or guest-init panicked.
    Panic {
        /// Its message: untrusted text.
        message: String,
    },
    /// A fault while a fault was delivered: the guest destroyed what traps
    /// need.
    Shutdown,
    /// KVM could not go on.
    InternalError {
        /// What KVM says of it.
        detail: String,
    },
    /// The CPU refused the state.
    FailEntry {
        /// The hardware's reason code.
        reason: u64,
    },
    /// An exit that no guest of ours makes.
    Unexpected {
        /// Its name and details.
        what: String,
    },
    /// It asked for the rest of its RAM, and the host has none.
    NoMemory {
        /// What the kernel said.
        reason: String,
    },
    /// KVM gets no task, which a VM needs for its first KVM_RUN.
    NoTask,
    /// KVM_RUN itself failed.
    Host {
        /// The error number.
        errno: i32,
    },
}

/// The names of the exceptions (Intel SDM volume 3, table 7-1).
const EXCEPTIONS: [&str; 22] = [
    "divide error",
    "debug exception",
    "non-maskable interrupt",
    "breakpoint",
    "overflow",
    "bound range exceeded",
    "invalid opcode",
    "device not available",
    "double fault",
    "coprocessor segment overrun",
    "invalid task state segment",
    "segment not present",
    "stack fault",
    "general protection fault",
    "page fault",
    "reserved exception",
    "x87 floating-point error",
    "alignment check",
    "machine check",
    "SIMD floating-point exception",
    "virtualization exception",
    "control protection exception",
];

impl std::fmt::Display for Death {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Trap { frame } => {
                let name = EXCEPTIONS.get(frame.vector as usize).unwrap_or(&"unknown exception");
                write!(
                    f,
                    "guest crash: {name} (vector {}, error code {:#x}) at rip {:#x} in ring {}, \
                     cr2 {:#x}, rsp {:#x}, rax {:#x}, rflags {:#x}",
                    frame.vector,
                    frame.error_code,
                    frame.rip,
                    frame.cs & 3,
                    frame.cr2,
                    frame.rsp,
                    frame.rax,
                    frame.rflags,
                )
            }
            Self::Panic { message } => write!(f, "guest panic: {message}"),
            Self::Shutdown => write!(f, "guest crash: triple fault"),
            Self::InternalError { detail } => write!(f, "KVM internal error: {detail}"),
            Self::FailEntry { reason } => {
                write!(f, "the CPU refused to enter the guest, reason {reason:#x}")
            }
            Self::Unexpected { what } => write!(f, "unexpected VM exit: {what}"),
            Self::NoMemory { reason } => {
                write!(f, "the host gives the guest no more memory: {reason}")
            }
            Self::NoTask => write!(
                f,
                "the host gives KVM no task for another VM: raise pids.max of the cgroup \
                 (TasksMax of a unit) or the user's limit on processes (RLIMIT_NPROC)"
            ),
            Self::Host { errno } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "KVM_RUN failed: {error}")
            }
        }
    }
}

/// How often KVM is asked anew for the first KVM_RUN of a VM, with [`PAUSE_MS`]
/// between: together a quarter of a second.
const REFUSALS_MAX: u32 = 50;
const PAUSE_MS: i32 = 5;

/// Waits a little, by a call that a zygote's filter allows.
fn pause() {
    // SAFETY: no descriptors, so nothing is read or written.
    unsafe { libc::poll(std::ptr::null_mut(), 0, PAUSE_MS) };
}

/// A vCPU and its count of exits.
#[derive(Debug)]
pub(super) struct Vcpu {
    fd: VcpuFd,
    exits: u64,
}

impl Vcpu {
    /// A VM's one vCPU. It has no CPUID yet: the instruction finds zeros.
    pub(super) fn create(vm: &VmFd) -> Result<Self, MachineError> {
        let fd = vm
            .create_vcpu(0)
            .map_err(|source| MachineError::Kvm { call: "KVM_CREATE_VCPU", source })?;
        Ok(Self { fd, exits: 0 })
    }

    /// Gives it this CPUID. Before its state: kernels hold that against it.
    pub(super) fn tell_cpuid(&self, cpuid: &CpuId) -> Result<(), MachineError> {
        self.fd
            .set_cpuid2(cpuid)
            .map_err(|source| MachineError::Kvm { call: "KVM_SET_CPUID2", source })
    }

    pub(super) fn fd(&self) -> &VcpuFd {
        &self.fd
    }

    pub(super) fn fd_mut(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// Finishes the access by which the guest left last, so that its state is
    /// whole. KVM does so at the start of the next KVM_RUN, which
    /// `immediate_exit` makes end before the guest's next instruction.
    pub(super) fn settle(&mut self) -> Result<(), MachineError> {
        let mut refused = 0;
        loop {
            self.fd.set_kvm_immediate_exit(1);
            let ran = self.fd.run().map(|exit| format!("{exit:?}"));
            self.fd.set_kvm_immediate_exit(0);
            let failed = |source| MachineError::Kvm { call: "KVM_RUN to settle", source };
            match ran {
                Err(error) if error.errno() == libc::EINTR => return Ok(()),
                // Of a new VM. There is no task for KVM's own thread; another may end.
                Err(error) if error.errno() == libc::EAGAIN => {
                    if refused == REFUSALS_MAX {
                        return Err(MachineError::NoTask);
                    }
                    refused += 1;
                    pause();
                }
                Err(source) => return Err(failed(source)),
                Ok(exit) => {
                    tracing::warn!(exit, "a settled guest left again");
                    return Err(failed(kvm_ioctls::Error::new(libc::EBUSY)));
                }
            }
        }
    }

    pub(super) fn exits(&self) -> u64 {
        self.exits
    }

    pub(super) fn run(
        &mut self,
        bus: &mut impl Bus,
        stop: &Stop,
        memory: &GuestMemoryMmap,
    ) -> Exit {
        let immediate_exit = &raw mut self.fd.get_kvm_run().immediate_exit;
        // SAFETY: the page is mapped as long as `self.fd` lives, which outlives
        // this function.
        let _interruptible = unsafe { Interruptible::new(immediate_exit) };
        let mut refused = 0;
        loop {
            if stop.raised() {
                return Exit::Stopped;
            }
            let exit = match self.fd.run() {
                Ok(exit) => exit,
                // There is no task for KVM's own thread. Another may end.
                Err(error) if error.errno() == libc::EAGAIN && self.exits == 0 => {
                    if refused == REFUSALS_MAX {
                        return Exit::Died(Death::NoTask);
                    }
                    refused += 1;
                    pause();
                    // Of a run that has less time than all these tries it was
                    // not its program that took it.
                    if stop.raised() {
                        return Exit::Died(Death::NoTask);
                    }
                    continue;
                }
                // EINTR: kicked, so perhaps the stop is raised. EAGAIN: the
                // vCPU was not runnable yet.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    self.fd.set_kvm_immediate_exit(0);
                    continue;
                }
                Err(error) => return Exit::Died(Death::Host { errno: error.errno() }),
            };
            self.exits += 1;
            let death = match exit {
                VcpuExit::MmioRead(address, data) => {
                    if bus.read(address, data).is_break() {
                        return Exit::Bus;
                    }
                    continue;
                }
                VcpuExit::MmioWrite(address, data) => {
                    if bus.write(address, data).is_break() {
                        return Exit::Bus;
                    }
                    continue;
                }
                // Only ring 0 can halt, and ring 0 is the trap stub.
                VcpuExit::Hlt => trapped(memory),
                VcpuExit::Shutdown => Death::Shutdown,
                VcpuExit::InternalError => self.internal_error(),
                VcpuExit::FailEntry(reason, _cpu) => Death::FailEntry { reason },
                VcpuExit::Intr => continue,
                other => Death::Unexpected { what: format!("{other:?}") },
            };
            return Exit::Died(death);
        }
    }

    fn internal_error(&mut self) -> Death {
        // SAFETY: the exit reason is KVM_EXIT_INTERNAL_ERROR, for which the
        // kernel filled this member of the union.
        let internal = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal };
        let words = internal.data.get(..internal.ndata as usize).unwrap_or(&internal.data);
        Death::InternalError { detail: format!("suberror {}, data {words:x?}", internal.suberror) }
    }
}

/// Reads the frame that the trap stub completed.
fn trapped(memory: &GuestMemoryMmap) -> Death {
    let mut bytes = [0u8; TrapFrame::BYTES];
    match memory.read_slice(&mut bytes, GuestAddress(TrapFrame::ADDRESS)) {
        Ok(()) => Death::Trap { frame: TrapFrame::from_bytes(&bytes) },
        Err(error) => Death::Unexpected { what: format!("halt without a trap frame: {error}") },
    }
}

/// Reads a panic message that the guest says has this many bytes.
#[must_use]
pub fn panicked(memory: &GuestMemoryMmap, message_bytes: u32) -> Death {
    let mut bytes = vec![0u8; (message_bytes as usize).min(PANIC_MESSAGE_BYTES_MAX)];
    let message = match memory.read_slice(&mut bytes, GuestAddress(CRASH)) {
        Ok(()) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::from("(the message cannot be read)"),
    };
    Death::Panic { message }
}
