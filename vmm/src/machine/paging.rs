//! Page tables from the image's segments: what is not named is not mapped.
//!
//! The first stretches are mapped by 4 KiB pages, each as its segment's flags
//! say; the heap above by 2 MiB pages, writable and not executable. Nothing is
//! both writable and executable (Intel SDM volume 3, 5.5: long mode).

use forge_protocol::platform::{
    ARCHIVE, BOOT_INFO, CONTROL_MMIO, CRASH, DESCRIPTORS, HEAP, LARGE_PAGE_BYTES, PAGE_BYTES,
    PAGE_TABLES, SMALL_PAGE_TABLES, TRAP_STACK, VSOCK_MMIO,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Image, MachineError};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

const ENTRIES: usize = 512;
type Table = [u64; ENTRIES];

/// The tables, as they lie from `PAGE_TABLES` on.
pub(super) struct PageTables {
    tables: Vec<Table>,
}

const PDPT: usize = 1;
const PD: usize = 2;
const FIRST_PT: usize = 3;

fn table_address(index: usize) -> u64 {
    PAGE_TABLES + index as u64 * PAGE_BYTES
}

/// Accessed and dirty are set beforehand: the CPU then never writes the
/// tables, so they stay as they are from run to run.
const LEAF: u64 = PRESENT | ACCESSED | DIRTY;
/// Upper levels allow everything; the leaves decide.
const INNER: u64 = PRESENT | WRITABLE | USER | ACCESSED;

/// Builds the tables of one guest.
pub(super) fn build(image: &Image, archive_bytes: u64, ram_end: u64) -> PageTables {
    let mut tables = vec![[0; ENTRIES]; FIRST_PT + SMALL_PAGE_TABLES as usize];
    tables[0][0] = table_address(PDPT) | INNER;
    tables[PDPT][0] = table_address(PD) | INNER;
    for (index, entry) in tables[PD][..SMALL_PAGE_TABLES as usize].iter_mut().enumerate() {
        *entry = table_address(FIRST_PT + index) | INNER;
    }
    let mut built = PageTables { tables };

    let user_data = USER | WRITABLE | NO_EXECUTE;
    let user_read = USER | NO_EXECUTE;
    let supervisor_data = WRITABLE | NO_EXECUTE;
    let archive_end = ARCHIVE + archive_bytes.next_multiple_of(PAGE_BYTES);
    // The CPU reads the descriptors and writes the trap stack; the tables
    // themselves need no mapping at all.
    for (start, end, flags) in [
        (VSOCK_MMIO, VSOCK_MMIO + PAGE_BYTES, user_data),
        (CONTROL_MMIO, CONTROL_MMIO + PAGE_BYTES, user_data),
        (DESCRIPTORS, DESCRIPTORS + PAGE_BYTES, supervisor_data),
        (TRAP_STACK, TRAP_STACK + PAGE_BYTES, supervisor_data),
        (BOOT_INFO, BOOT_INFO + PAGE_BYTES, user_read),
        (CRASH, CRASH + PAGE_BYTES, user_data),
        (ARCHIVE, archive_end, user_read),
    ] {
        built.map_small(start, end, flags);
    }
    for segment in image.segments() {
        let flags = if segment.supervisor { 0 } else { USER }
            | if segment.writable { WRITABLE } else { 0 }
            | if segment.executable { 0 } else { NO_EXECUTE };
        built.map_small(segment.start, segment.end, flags);
    }
    built.map_large(HEAP, ram_end, user_data);
    built
}

impl PageTables {
    fn map_small(&mut self, start: u64, end: u64, flags: u64) {
        for page in (start..end).step_by(PAGE_BYTES as usize) {
            let index = (page / PAGE_BYTES) as usize;
            self.tables[FIRST_PT + index / ENTRIES][index % ENTRIES] = page | flags | LEAF;
        }
    }

    /// One directory maps a GiB; a larger RAM gets further ones.
    fn map_large(&mut self, start: u64, end: u64, flags: u64) {
        for page in (start..end).step_by(LARGE_PAGE_BYTES as usize) {
            let index = (page / LARGE_PAGE_BYTES) as usize;
            let directory = index / ENTRIES;
            let table = if directory == 0 {
                PD
            } else {
                let table = FIRST_PT + SMALL_PAGE_TABLES as usize + directory - 1;
                if self.tables.len() <= table {
                    self.tables.resize(table + 1, [0; ENTRIES]);
                }
                self.tables[PDPT][directory] = table_address(table) | INNER;
                table
            };
            self.tables[table][index % ENTRIES] = page | flags | LEAF | LARGE;
        }
    }

    /// Writes them to guest memory.
    pub(super) fn write(&self, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
        // They end where the descriptors start.
        let room = ((DESCRIPTORS - PAGE_TABLES) / PAGE_BYTES) as usize;
        if self.tables.len() > room {
            return Err(MachineError::Image("RAM is larger than its page tables can map"));
        }
        for (index, table) in self.tables.iter().enumerate() {
            let mut bytes = [0u8; PAGE_BYTES as usize];
            for (entry, place) in table.iter().zip(bytes.chunks_exact_mut(8)) {
                place.copy_from_slice(&entry.to_le_bytes());
            }
            memory
                .write_slice(&bytes, GuestAddress(table_address(index)))
                .map_err(|_| MachineError::Image("RAM is smaller than its page tables"))?;
        }
        Ok(())
    }

    #[cfg(test)]
    fn leaf(&self, address: u64) -> u64 {
        let large = self.tables[PD][(address / LARGE_PAGE_BYTES) as usize];
        if address >= HEAP {
            return large;
        }
        let index = (address / PAGE_BYTES) as usize;
        self.tables[FIRST_PT + index / ENTRIES][index % ENTRIES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::platform::{IMAGE, RAM_START};

    fn tables() -> (PageTables, Image) {
        let image = Image::built_in().unwrap();
        let tables = build(&image, 5000, RAM_START + (32 << 20));
        (tables, image)
    }

    #[test]
    fn nothing_is_writable_and_executable() {
        let (built, _) = tables();
        for table in &built.tables[FIRST_PT..] {
            for entry in table.iter().filter(|entry| **entry & PRESENT != 0) {
                assert!(entry & WRITABLE == 0 || entry & NO_EXECUTE != 0, "{entry:#x}");
            }
        }
        assert!(
            built.leaf(HEAP) & (LARGE | NO_EXECUTE | WRITABLE) == LARGE | NO_EXECUTE | WRITABLE
        );
    }

    #[test]
    fn null_the_tables_and_the_stack_guard_are_not_mapped() {
        let (built, image) = tables();
        assert_eq!(built.leaf(0), 0);
        assert_eq!(built.leaf(PAGE_TABLES), 0, "the guest cannot reach its own tables");
        let stack = image.segments().last().unwrap();
        assert_eq!(built.leaf(stack.start - PAGE_BYTES), 0);
        assert_eq!(built.leaf(stack.end), 0);
    }

    #[test]
    fn ring_3_reaches_neither_stub_nor_descriptors_nor_trap_stack() {
        let (built, _) = tables();
        for address in [IMAGE, DESCRIPTORS, TRAP_STACK] {
            let leaf = built.leaf(address);
            assert!(leaf & PRESENT != 0 && leaf & USER == 0, "{address:#x}: {leaf:#x}");
        }
    }

    #[test]
    fn the_archive_is_read_only_and_ends_where_it_ends() {
        let (built, _) = tables();
        assert_eq!(built.leaf(ARCHIVE + PAGE_BYTES) & (USER | WRITABLE), USER);
        assert_eq!(built.leaf(ARCHIVE + 2 * PAGE_BYTES), 0);
    }
}
