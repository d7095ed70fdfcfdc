//! What of a guest's memory the device reaches.
//!
//! Descriptors are the guest's words, and the device writes for whoever writes them.
//! What ring 3 may not write, page tables and descriptor tables above all, is therefore
//! not there for the device either: it would be a way into ring 0.

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};

/// Guest memory from an address on.
#[derive(Clone, Debug)]
pub(super) struct Reach {
    pub(super) memory: GuestMemoryMmap,
    pub(super) from: GuestAddress,
}

impl GuestMemoryBackend for Reach {
    type R = GuestRegionMmap;

    /// Every access asks for the region that it begins in, and goes up from there.
    fn find_region(&self, address: GuestAddress) -> Option<&GuestRegionMmap> {
        self.memory.find_region(address).filter(|_| address >= self.from)
    }

    fn iter(&self) -> impl Iterator<Item = &GuestRegionMmap> {
        self.memory.iter()
    }
}
