//! The virtual machine: memory, page tables, one vCPU, and the loop that
//! answers its exits.
//!
//! It trusts the guest image, which is built with it, and distrusts
//! everything the guest does once it runs. Deliberately absent: an interrupt
//! controller, timers, a console, firmware. What the machine looks like to
//! its guest is `forge_protocol::platform`.
//!
//! | module | what it holds |
//! |---|---|
//! | [`image`] | the guest's ELF, checked against the platform |
//! | `mapping` | host memory that guests can have large pages of |
//! | `memory` | guest memory, filled and handed to KVM |
//! | `paging` | the page tables |
//! | `cpu` | the vCPU's first state |
//! | [`vcpu`] | KVM_RUN, every exit reason, what a dead guest left |
//! | [`stop`] | ending a run from outside |
//! | [`snapshot`] | the base that machines start from, and reset |
//! | `state` | everything a vCPU remembers |
//! | [`pagemap`] | which pages a process has of its own |
//! | [`hypervisor`] | `/dev/kvm`, opened and checked once |

mod cpu;
pub mod hypervisor;
pub mod image;
mod mapping;
mod memory;
pub mod pagemap;
mod paging;
pub mod snapshot;
mod state;
pub mod stop;
pub mod vcpu;

pub use hypervisor::Hypervisor;
pub use image::Image;
pub use pagemap::PageMap;
pub use snapshot::{Base, Checkpoint};
pub use stop::{Stop, Watchdog, deadline_in};
pub use vcpu::{Bus, Death, Exit};

use std::ops::ControlFlow;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;

use forge_protocol::limits::RunLimits;

use crate::jail::SealedSlot;
use forge_protocol::platform::{BOOT_INFO, BootInfo, DATA};
use kvm_ioctls::VmFd;
use mapping::Code;
use snapshot::RESET_PAGES_MAX;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// Why a machine cannot be made. The host is at fault, or lacks something.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A KVM call failed.
    #[error("KVM: {call} failed: {source}")]
    Kvm {
        /// The call that failed.
        call: &'static str,
        /// What the kernel said.
        source: kvm_ioctls::Error,
    },
    /// KVM has no task for its own thread.
    #[error("{}", Death::NoTask)]
    NoTask,
    /// `/dev/kvm` cannot be used.
    #[error(transparent)]
    Hypervisor(#[from] hypervisor::HypervisorError),
    /// Guest memory could not be mapped.
    #[error("{bytes} bytes of guest memory cannot be mapped: {reason}")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// What the kernel said.
        reason: String,
    },
    /// What a machine's last slot is described by cannot be sealed.
    #[error("a VM's last slot of memory cannot be sealed: {0}")]
    Sealed(std::io::Error),
    /// The base that machines start from cannot be made or mapped.
    #[error("the base snapshot cannot be used: {0}")]
    Base(std::io::Error),
    /// The page map cannot be read, so nobody knows what a run changed.
    #[error("/proc/self/pagemap cannot be read: {0}")]
    PageMap(std::io::Error),
    /// A run changed more than a reset puts back.
    #[error("{pages} pages have changed, and a reset puts back at most {RESET_PAGES_MAX}")]
    TooChanged {
        /// How many pages have changed.
        pages: usize,
    },
    /// The guest image does not fit the platform: this build is broken.
    #[error("the guest image is unusable: {0}")]
    Image(&'static str),
}

/// How much RAM a guest gets for these limits, in bytes: never less than for the
/// default ones. Machines of that size stand ready, and a run that may use less
/// is given one of them as well.
#[must_use]
pub fn ram_bytes(limits: &RunLimits) -> usize {
    needed_bytes(limits).max(needed_bytes(&RunLimits::default()))
}

/// How much of it these limits take.
///
/// A module takes up to twenty-one times its size while it is compiled, which is
/// before it has a memory, and nearly all do with twelve times after that (the rest
/// may find less memory to grow into). The interpreter grows linear memory by copying
/// it to a place twice as large, so for a moment both are there; answers that no `wait`
/// has taken are held, one of each call in flight; the rest is buffers for one message
/// each way.
fn needed_bytes(limits: &RunLimits) -> usize {
    use forge_protocol::platform::{LARGE_PAGE_BYTES, RAM_START};
    let program = u64::from(limits.program_bytes);
    let run = (24 * program).max(14 * program + 3 * limits.memory_bytes);
    let messages = 2
        * (u64::from(limits.input_bytes)
            + u64::from(limits.request_bytes)
            + u64::from(limits.response_bytes)
            + u64::from(limits.output_bytes)
            + u64::from(limits.artifact_bytes));
    let held = (u64::from(limits.calls_in_flight) + 1) * u64::from(limits.response_bytes);
    let stack = 2 * u64::from(limits.stack_bytes);
    let heap = run + messages + held + stack + LARGE_PAGE_BYTES;
    let before = DATA - RAM_START;
    (before + heap).next_multiple_of(LARGE_PAGE_BYTES) as usize
}

/// One virtual machine.
#[derive(Debug)]
pub struct Machine {
    vcpu: vcpu::Vcpu,
    // Behind the vCPU, which goes first.
    vm: VmFd,
    // Last: the VM maps them.
    ram: GuestMemoryMmap,
    code: Arc<Code>,
    /// What it started from, if it did not boot.
    base: Option<Arc<Base>>,
    /// Whether KVM refuses its guest all MSRs.
    has_no_msrs: bool,
    /// Whether the VM has more than the RAM that it has from the start.
    has_all_ram: bool,
    /// Of the rest of RAM, if this process will be held to what is sealed.
    last_slot: Option<SealedSlot>,
}

impl Machine {
    /// Makes a machine with `ram_bytes` of RAM that stands before its first
    /// instruction.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn new(
        hypervisor: &Hypervisor,
        image: &Image,
        boot_archive: &[u8],
        ram_bytes: usize,
    ) -> Result<Self, MachineError> {
        let ram = memory::map(ram_bytes)?;
        let code = Arc::new(Code::map(&ram, image.code()?)?);
        image.load_data(&ram)?;
        memory::fill(&ram, boot_archive, ram_bytes)?;
        let vm = hypervisor.create_vm()?;
        memory::hand_over(&vm, &code, &ram)?;
        let vcpu = vcpu::Vcpu::create(&vm)?;
        vcpu.tell_cpuid(hypervisor.cpuid())?;
        cpu::set_up(vcpu.fd(), image.entry())?;
        let (has_no_msrs, has_all_ram) = (false, false);
        let (base, last_slot) = (None, None);
        Ok(Self { vcpu, vm, ram, code, base, has_no_msrs, has_all_ram, last_slot })
    }

    /// Makes ready for a filter under which this process sets no slot but the
    /// one of the rest of RAM ([`SealedSlot`]). Where the kernel seals nothing
    /// that filter allows none, and the machine has the rest at once.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn seal_slots(&mut self) -> Result<(), MachineError> {
        // Whatever the machine has already: the filter allows what lies there.
        let rest = memory::rest(&self.ram)?.unwrap_or(memory::NO_REST);
        // SAFETY: as of any slot of RAM, which stays mapped as long as the VM.
        self.last_slot = unsafe { SealedSlot::new(rest) }.map_err(MachineError::Sealed)?;
        if self.last_slot.is_none() && !self.has_all_ram {
            memory::hand_over_rest(&self.vm, &self.ram, None)?;
            self.has_all_ram = true;
        }
        Ok(())
    }

    fn ram_bytes(&self) -> usize {
        memory::bytes(&self.ram) as usize
    }

    /// The guest's RAM, for the device.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.ram
    }

    /// Runs the guest until `bus` breaks, `stop` is raised or the guest dies.
    /// A machine whose bus broke can be run again: it goes on behind the
    /// access that broke.
    pub fn run(&mut self, bus: &mut impl Bus, stop: &Stop) -> Exit {
        let Self { vcpu, vm, ram, has_all_ram: has_all, last_slot, .. } = self;
        let sealed = last_slot.as_ref();
        let mut bus = memory::OnRequest { bus, vm, ram, sealed, has_all, refused: None };
        match (vcpu.run(&mut bus, stop, ram), bus.refused) {
            (_, Some(error)) => Exit::Died(Death::NoMemory { reason: error.to_string() }),
            (exit, None) => exit,
        }
    }

    /// Has the kernel put this much memory from `DATA` on in place, so that the
    /// guest's first touch of it is cheaper: KVM then maps several pages at a
    /// time. It is no harm if the kernel will not.
    pub fn populate(&self, bytes: usize) {
        let (first, last) = (GuestAddress(DATA), GuestAddress(DATA + bytes as u64 - 1));
        if let (Ok(start), Ok(_)) =
            (self.ram.get_host_address(first), self.ram.get_host_address(last))
        {
            // SAFETY: advice about a range inside one mapping of ours.
            unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) };
        }
    }

    /// Asks a guest that has not left its greeting yet to touch this much
    /// memory from `DATA` on before it waits.
    ///
    /// # Errors
    /// [`MachineError::Image`]: its boot info is not there.
    pub fn ask_to_touch(&self, touch_bytes: u64) -> Result<(), MachineError> {
        let gone = |_| MachineError::Image("RAM is smaller than the image");
        let at = GuestAddress(BOOT_INFO);
        let mut bytes = [0; BootInfo::BYTES];
        self.ram.read_slice(&mut bytes, at).map_err(gone)?;
        let info = BootInfo::from_bytes(&bytes)
            .ok_or(MachineError::Image("its boot info is of another release"))?;
        let info = BootInfo { touch_bytes, ..info };
        self.ram.write_slice(&info.to_bytes(), at).map_err(gone)
    }

    /// The descriptors of VM and vCPU.
    #[must_use]
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.vm.as_raw_fd(), self.vcpu.fd().as_raw_fd()]
    }

    /// How often the guest has left for the host so far.
    #[must_use]
    pub fn exits(&self) -> u64 {
        self.vcpu.exits()
    }
}

/// What an access to the bus says about going on.
pub type Go = ControlFlow<()>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_may_use_less_fits_the_machines_that_stand_ready() {
        let usual = RunLimits::default();
        let less = [
            RunLimits { memory_bytes: 1 << 20, ..usual.clone() },
            RunLimits { calls_in_flight: 1, ..usual.clone() },
            RunLimits { response_bytes: 1, ..usual.clone() },
        ];
        for less in less {
            assert_eq!(ram_bytes(&less), ram_bytes(&usual), "{less:?}");
        }
        let more = RunLimits { calls_in_flight: 64, ..usual.clone() };
        assert!(ram_bytes(&more) > ram_bytes(&usual));
    }
}
