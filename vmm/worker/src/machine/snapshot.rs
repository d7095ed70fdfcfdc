//! The base: a machine's memory and vCPU at one moment, from which any number
//! of machines start; and reset, which brings a machine back to a checkpoint
//! of its own.
//!
//! The beginning of RAM, where a booted guest has written, is a sealed file
//! in memory that every machine maps privately: pages are shared until one
//! writes them. The rest of RAM is zero, but for a few pages that are kept
//! beside the file.
//!
//! What a run changed is what the host's page tables say the machine has of
//! its own. That set only grows, as a page that is put back stays; a run that
//! makes it grow past [`RESET_PAGES_MAX`] costs the machine its life.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use forge_protocol::platform::{DATA, LARGE_PAGE_BYTES, PAGE_BYTES, RAM_START};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, MmapRegion,
};

use super::mapping::Code;
use super::pagemap::PageMap;
use super::state::{CpuState, deny_msrs};
use super::{Hypervisor, Machine, MachineError, mapping, memory, vcpu};
use crate::sealed;

/// How much of RAM the file holds: the system pages, and the large page that
/// stack, data and the first of the heap are in.
pub const BASE_FILE_BYTES: usize = (DATA + LARGE_PAGE_BYTES - RAM_START) as usize;
const PAGE: usize = PAGE_BYTES as usize;

/// The most pages a machine may have of its own and still be reset. Putting
/// them all back takes longer than making a new machine.
pub const RESET_PAGES_MAX: usize = 1024;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// A page by its offset in RAM.
type Page = (usize, Box<[u8; PAGE]>);

/// A machine's state, from which others start.
#[derive(Debug)]
pub struct Base {
    file: File,
    /// The file's content. It is sealed, so nothing can ever write it.
    view: MmapRegion,
    /// Pages behind the file that are not zero, in order.
    beyond: Vec<Page>,
    cpu: CpuState,
    code: Arc<Code>,
    ram_bytes: usize,
    /// From `DATA` to the end of what its guest wrote of the file.
    written_bytes: usize,
    /// Its machine had all of RAM, and its guest does not ask again.
    has_all_ram: bool,
    /// Memory for the first machine that starts in this process or in a fork
    /// of it: mapped, and not touched.
    ready: Mutex<Option<Ready>>,
}

/// Memory of a machine that is not there yet.
#[derive(Debug)]
struct Ready {
    ram: GuestMemoryMmap,
    code: Arc<Code>,
}

/// Where a machine can be put back to.
#[derive(Debug)]
pub struct Checkpoint {
    cpu: CpuState,
    /// Pages that differ from the base, in order.
    pages: Vec<Page>,
}

/// What a reset put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetDone {
    /// How many pages were put back.
    pub pages: usize,
}

impl Base {
    /// Takes a machine's state. The machine is of no further use.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn capture(
        mut machine: Machine,
        hypervisor: &Hypervisor,
        pages: &PageMap,
    ) -> Result<Self, MachineError> {
        machine.vcpu.settle()?;
        let cpu = CpuState::read(machine.vcpu.fd(), hypervisor)?;
        let file = sealed::file(c"forge-base", BASE_FILE_BYTES).map_err(MachineError::Base)?;
        let (mut beyond, mut written_bytes) = (Vec::new(), 0);
        for offset in machine.private_pages(pages)?.into_iter().flat_map(|r| r.step_by(PAGE)) {
            let page = machine.page(offset)?;
            if *page == ZEROS {
                continue;
            }
            if offset < BASE_FILE_BYTES {
                file.write_all_at(&page[..], offset as u64).map_err(MachineError::Base)?;
                written_bytes = (offset + PAGE).saturating_sub((DATA - RAM_START) as usize);
            } else {
                beyond.push((offset, page));
            }
        }
        sealed::seal(&file).map_err(MachineError::Base)?;
        let view = FileOffset::new(file.try_clone().map_err(MachineError::Base)?, 0);
        let view = MmapRegion::build(
            Some(view),
            BASE_FILE_BYTES,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
        )
        .map_err(|error| MachineError::Base(io::Error::other(error)))?;
        let (ram_bytes, has_all_ram) = (machine.ram_bytes(), machine.has_all_ram);
        let mut base = Self {
            file,
            view,
            beyond,
            cpu,
            code: machine.code,
            ram_bytes,
            written_bytes,
            has_all_ram,
            ready: Mutex::new(None),
        };
        base.get_ready()?;
        Ok(base)
    }

    /// Maps the memory of the first machine ahead of it. In a process that
    /// forks one for each machine that is every machine's.
    fn get_ready(&mut self) -> Result<(), MachineError> {
        let ram = self.map_ram()?;
        let code = Code::map(&ram, self.code.file())?;
        // Where there is no room below it, each machine maps its own.
        if code.is_below(&ram) {
            self.ready = Mutex::new(Some(Ready { ram, code: Arc::new(code) }));
        }
        Ok(())
    }

    /// Whether forks of this process find the memory of the first machine.
    /// What a fork has counts towards its limits, and takes time to copy.
    pub fn set_inherited(&self, inherited: bool) {
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Ready { code, .. }) = &*ready {
            code.set_inherited(self.ram_bytes, inherited);
        }
    }

    /// RAM as the base has it, but for the pages beyond the file.
    fn map_ram(&self) -> Result<GuestMemoryMmap, MachineError> {
        let ram = mapping::map(RAM_START, self.ram_bytes)
            .and_then(|ram| {
                mapping::overlay(&ram, RAM_START, &self.file, BASE_FILE_BYTES).map(|()| ram)
            })
            .map_err(MachineError::Base)?;
        mapping::small_pages(&ram);
        Ok(ram)
    }

    /// How much RAM its machines have, in bytes.
    #[must_use]
    pub fn ram_bytes(&self) -> usize {
        self.ram_bytes
    }

    /// How much memory from `DATA` on lies before what the base's guest has not
    /// written, in bytes.
    #[must_use]
    pub fn written_bytes(&self) -> usize {
        self.written_bytes
    }

    /// How many pages machines have in common, and how many each needs a copy
    /// of.
    #[must_use]
    pub fn pages(&self) -> (usize, usize) {
        let shared = self.window().chunks_exact(PAGE).filter(|page| **page != ZEROS).count();
        (shared, self.beyond.len())
    }

    fn window(&self) -> &[u8] {
        // SAFETY: the mapping is readable for this length as long as `view`
        // lives, and the file is sealed: there is no writer, here or elsewhere.
        unsafe { std::slice::from_raw_parts(self.view.as_ptr(), BASE_FILE_BYTES) }
    }

    /// What the page at this offset is in the base.
    fn page(&self, offset: usize) -> &[u8] {
        if let Some(page) = self.window().get(offset..offset + PAGE) {
            return page;
        }
        find(&self.beyond, offset).unwrap_or(&ZEROS)
    }
}

fn find(pages: &[Page], offset: usize) -> Option<&[u8]> {
    let index = pages.binary_search_by_key(&offset, |(at, _)| *at).ok()?;
    Some(&pages[index].1[..])
}

impl Machine {
    /// Makes a machine that stands where the base was taken.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn from_base(hypervisor: &Hypervisor, base: &Arc<Base>) -> Result<Self, MachineError> {
        let ready = base.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Ready { ram, code } = match ready {
            Some(ready) => ready,
            None => Ready { ram: base.map_ram()?, code: Arc::clone(&base.code) },
        };
        for (offset, page) in &base.beyond {
            write_page(&ram, *offset, &page[..])?;
        }
        let vm = hypervisor.create_vm()?;
        memory::hand_over(&vm, &code, &ram)?;
        if base.has_all_ram {
            memory::hand_over_rest(&vm, &ram, None)?;
        }
        let mut vcpu = vcpu::Vcpu::create(&vm)?;
        vcpu.tell_cpuid(hypervisor.base_cpuid())?;
        base.cpu.write(vcpu.fd_mut())?;
        // KVM starts a kernel thread for a VM at its first KVM_RUN, in the
        // caller's name: now, while the caller may still have threads.
        vcpu.settle()?;
        let (base, has_all_ram) = (Some(Arc::clone(base)), base.has_all_ram);
        Ok(Self { vcpu, vm, ram, code, base, has_no_msrs: false, has_all_ram, last_slot: None })
    }

    /// Marks where the machine stands now, to be put back to it. Its guest has
    /// no MSRs from here on.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn checkpoint(&mut self, pages: &PageMap) -> Result<Checkpoint, MachineError> {
        if !self.has_no_msrs {
            deny_msrs(&self.vm)?;
            self.has_no_msrs = true;
        }
        self.vcpu.settle()?;
        let base = self.base.as_ref().ok_or(MachineError::Image("it did not start from a base"))?;
        let cpu = base.cpu.read_again(self.vcpu.fd())?;
        let mut kept = Vec::new();
        for offset in self.private_pages(pages)?.into_iter().flat_map(|r| r.step_by(PAGE)) {
            let page = self.page(offset)?;
            if page[..] != *self.base_page(offset) {
                kept.push((offset, page));
            }
        }
        Ok(Checkpoint { cpu, pages: kept })
    }

    /// Puts back everything that has changed since the checkpoint.
    ///
    /// # Errors
    /// [`MachineError`]; the machine is of no further use.
    pub fn reset(&mut self, to: &Checkpoint, pages: &PageMap) -> Result<ResetDone, MachineError> {
        self.vcpu.settle()?;
        let changed = self.private_pages(pages)?;
        let count = changed.iter().map(|range| range.len() / PAGE).sum();
        if count > RESET_PAGES_MAX {
            return Err(MachineError::TooChanged { pages: count });
        }
        for offset in changed.into_iter().flat_map(|range| range.step_by(PAGE)) {
            let page = find(&to.pages, offset).unwrap_or_else(|| self.base_page(offset));
            write_page(&self.ram, offset, page)?;
        }
        to.cpu.write(self.vcpu.fd_mut())?;
        Ok(ResetDone { pages: count })
    }

    /// What is not as it was at the checkpoint: all of memory and of the vCPU
    /// is compared. Pages that were never touched have no content to compare.
    ///
    /// # Errors
    /// [`MachineError`] if it cannot be looked at.
    pub fn differences(
        &mut self,
        from: &Checkpoint,
        pages: &PageMap,
    ) -> Result<Vec<String>, MachineError> {
        self.vcpu.settle()?;
        let mut found = from.cpu.differences(self.vcpu.fd())?;
        let behind = self.private_pages(pages)?.into_iter().flat_map(|range| range.step_by(PAGE));
        let kept = from.pages.iter().map(|(offset, _)| *offset);
        // Of the window every page, whatever the page tables say.
        let all = (0..BASE_FILE_BYTES).step_by(PAGE).chain(behind).chain(kept);
        for offset in all {
            let was = find(&from.pages, offset).unwrap_or_else(|| self.base_page(offset));
            let page = self.page(offset)?;
            if page[..] == *was {
                continue;
            }
            if let Some(at) = page.iter().zip(was).position(|(now, was)| now != was) {
                let address = RAM_START + (offset + at) as u64;
                let (now, was) = (page[at], was[at]);
                found.push(format!("memory at {address:#x}: {now:#04x}, not {was:#04x}"));
            }
        }
        Ok(found)
    }

    fn base_page(&self, offset: usize) -> &[u8] {
        self.base.as_ref().map_or(&ZEROS, |base| base.page(offset))
    }

    /// Pages that this process has of its own, as ranges of offsets in RAM.
    fn private_pages(&self, pages: &PageMap) -> Result<Vec<Range<usize>>, MachineError> {
        let start = self.ram.get_host_address(GuestAddress(RAM_START));
        let start = start.map_err(|error| MachineError::Base(io::Error::other(error)))? as usize;
        let found =
            pages.private_pages(start..start + self.ram_bytes()).map_err(MachineError::PageMap)?;
        Ok(found.into_iter().map(|range| range.start - start..range.end - start).collect())
    }

    fn page(&self, offset: usize) -> Result<Box<[u8; PAGE]>, MachineError> {
        let mut page = Box::new([0u8; PAGE]);
        self.ram
            .read_slice(&mut page[..], GuestAddress(RAM_START + offset as u64))
            .map_err(|error| MachineError::Base(io::Error::other(error)))?;
        Ok(page)
    }
}

fn write_page(ram: &GuestMemoryMmap, offset: usize, page: &[u8]) -> Result<(), MachineError> {
    ram.write_slice(page, GuestAddress(RAM_START + offset as u64))
        .map_err(|error| MachineError::Base(io::Error::other(error)))
}
