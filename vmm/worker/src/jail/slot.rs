//! The only slot of memory that a worker can still give its VM: its description
//! lies at one address, sealed.
//!
//! KVM keeps memory of the kernel's for each page of a slot, whether anything is
//! mapped there or not, and no limit of a process counts it. A filter sees where
//! a slot's description is and not what is in it, so a worker that could set any
//! slot could take all memory of the host. Here the page at that one address is
//! read-only, and what is sealed (mseal(2), since Linux 6.10) is not unmapped,
//! moved, mapped over or made writable again until the process ends.
//!
//! Where the kernel seals no memory, workers set no slot
//! ([`super::rules::When::Sealed`]).

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};

use forge_protocol::platform::PAGE_BYTES;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use super::rules::SET_SLOT;

const BYTES: usize = PAGE_BYTES as usize;

/// One page of the executable's own data: where a fork has it, and its page
/// tables are there already.
#[repr(C, align(4096))]
struct Page(UnsafeCell<MaybeUninit<[u8; BYTES]>>);

// SAFETY: whoever sets `TAKEN` alone writes to it.
unsafe impl Sync for Page {}

static PAGE: Page = Page(UnsafeCell::new(MaybeUninit::uninit()));
/// Whether this process has written to the page, or tried to.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Where the description lies, in this process and its forks.
#[must_use]
pub fn address() -> u64 {
    PAGE.0.get() as u64
}

/// A description that nothing changes any more.
#[derive(Debug)]
pub struct SealedSlot(NonNull<kvm_userspace_memory_region>);

/// Whether this kernel seals memory.
#[must_use]
pub fn is_supported() -> bool {
    seal(ptr::null_mut(), 0).is_ok()
}

fn seal(start: *mut libc::c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: takes rights to change mappings away, and changes none.
    match unsafe { libc::syscall(libc::SYS_mseal, start, bytes, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl SealedSlot {
    /// Writes a description down and seals it, for as long as this process
    /// lives. `None` if this kernel seals no memory.
    ///
    /// # Safety
    /// What it describes is memory of this process that the kernel and a guest may
    /// write, as long as the VM lives that it is given to; or nothing.
    ///
    /// # Errors
    /// What the kernel said: for one, that this process has one already.
    pub unsafe fn new(of: kvm_userspace_memory_region) -> io::Result<Option<Self>> {
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let page = PAGE.0.get();
        let slot = NonNull::new(page.cast::<kvm_userspace_memory_region>());
        let slot = slot.ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the page is large enough, aligned, still writable, and nobody
        // else's.
        unsafe { slot.write(of) };
        // SAFETY: nobody writes to the page any more.
        let sealed = match unsafe { libc::mprotect(page.cast(), BYTES, libc::PROT_READ) } {
            0 => seal(page.cast(), BYTES),
            _ => Err(io::Error::last_os_error()),
        };
        match sealed {
            Ok(()) => Ok(Some(Self(slot))),
            Err(error) if is_supported() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Gives it to a VM.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn give(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        let vm: RawFd = vm.as_raw_fd();
        // SAFETY: the kernel reads a whole description, which is mapped as long as
        // this process lives; what it describes was promised when it was written.
        match unsafe { libc::ioctl(vm, SET_SLOT.into(), self.0.as_ptr()) } {
            0 => Ok(()),
            _ => Err(kvm_ioctls::Error::last()),
        }
    }
}

// SAFETY: the page is read-only and stays where it is.
unsafe impl Send for SealedSlot {}
// SAFETY: the same.
unsafe impl Sync for SealedSlot {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_changes_what_is_sealed() {
        if !is_supported() {
            eprintln!("SKIPPED: this kernel seals no memory (mseal, Linux 6.10)");
            return;
        }
        let of = |memory_size| kvm_userspace_memory_region { memory_size, ..Default::default() };
        // SAFETY: it is given to no VM, here and below.
        let slot = unsafe { SealedSlot::new(of(1)) }.unwrap().unwrap();
        let (page, bytes) = (slot.0.as_ptr().cast::<libc::c_void>(), BYTES);
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let fixed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let refused = |changed: bool, by: &str| {
            let error = io::Error::last_os_error().raw_os_error();
            assert!(!changed && error == Some(libc::EPERM), "{by}: {error:?}");
        };
        // SAFETY: each is refused, or the page is nobody's any more and this ends.
        unsafe {
            refused(libc::mprotect(page, bytes, both) == 0, "mprotect");
            refused(libc::munmap(page, bytes) == 0, "munmap");
            refused(libc::madvise(page, bytes, libc::MADV_DONTNEED) == 0, "madvise");
            refused(libc::mmap(page, bytes, both, fixed, -1, 0) != libc::MAP_FAILED, "mmap");
            let to = page.wrapping_byte_add(bytes);
            let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let moved = libc::mremap(page, bytes, bytes, how, to);
            refused(moved != libc::MAP_FAILED, "mremap");
            assert_eq!(slot.0.as_ptr().read().memory_size, 1);
        }
        // SAFETY: the same.
        let again = unsafe { SealedSlot::new(of(2)) }.unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
    }
}
