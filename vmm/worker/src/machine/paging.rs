//! Page tables: what is not named is not mapped (Intel SDM volume 3, 5.5: long
//! mode).
//!
//! Code is one large page, readable and executable; what the guest writes is
//! large pages, writable and not executable; the devices and the few pages
//! between have small pages of their own.

use forge_protocol::platform::{
    ARCHIVE, BOOT_INFO, CODE, CONTROL_MMIO, CRASH, DATA, DESCRIPTORS, LARGE_PAGE_BYTES, PAGE_BYTES,
    PAGE_TABLES, PAGE_TABLES_MAX, RAM_START, STACK, TRAP_STACK, VSOCK_MMIO,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::MachineError;

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
/// The page table of the first stretch, which holds the devices.
const PT_DEVICES: usize = 3;
/// The page table of the stretch before [`DATA`].
const PT_SYSTEM: usize = 4;
/// Directories of a RAM that is larger than a GiB.
const PD_MORE: usize = 5;

fn table_address(index: usize) -> u64 {
    PAGE_TABLES + index as u64 * PAGE_BYTES
}

/// Accessed and dirty are set beforehand: the CPU then never writes the
/// tables, so they stay as they are from run to run.
const LEAF: u64 = PRESENT | ACCESSED | DIRTY;
/// Upper levels allow everything; the leaves decide.
const INNER: u64 = PRESENT | WRITABLE | USER | ACCESSED;

fn large_index(address: u64) -> usize {
    (address / LARGE_PAGE_BYTES) as usize
}

/// Builds the tables of one guest.
pub(super) fn build(archive_bytes: u64, ram_end: u64) -> PageTables {
    let mut built = PageTables { tables: vec![[0; ENTRIES]; PD_MORE] };
    built.tables[0][0] = table_address(PDPT) | INNER;
    built.tables[PDPT][0] = table_address(PD) | INNER;
    built.tables[PD][0] = table_address(PT_DEVICES) | INNER;
    built.tables[PD][large_index(RAM_START)] = table_address(PT_SYSTEM) | INNER;

    let user_data = USER | WRITABLE | NO_EXECUTE;
    let user_read = USER | NO_EXECUTE;
    let supervisor_data = WRITABLE | NO_EXECUTE;
    let archive_end = ARCHIVE + archive_bytes.next_multiple_of(PAGE_BYTES);
    // The CPU reads the descriptors and writes the trap stack; the tables
    // themselves need no mapping at all.
    for (table, start, end, flags) in [
        (PT_DEVICES, VSOCK_MMIO, VSOCK_MMIO + PAGE_BYTES, user_data),
        (PT_DEVICES, CONTROL_MMIO, CONTROL_MMIO + PAGE_BYTES, user_data),
        (PT_SYSTEM, DESCRIPTORS, DESCRIPTORS + PAGE_BYTES, supervisor_data),
        (PT_SYSTEM, TRAP_STACK, TRAP_STACK + PAGE_BYTES, supervisor_data),
        (PT_SYSTEM, BOOT_INFO, BOOT_INFO + PAGE_BYTES, user_read),
        (PT_SYSTEM, CRASH, CRASH + PAGE_BYTES, user_data),
        (PT_SYSTEM, ARCHIVE, archive_end, user_read),
        (PT_SYSTEM, STACK, DATA, user_data),
    ] {
        for page in (start..end).step_by(PAGE_BYTES as usize) {
            let index = (page / PAGE_BYTES) as usize % ENTRIES;
            built.tables[table][index] = page | flags | LEAF;
        }
    }
    built.map_large(CODE, CODE + LARGE_PAGE_BYTES, USER);
    built.map_large(DATA, ram_end, user_data);
    built
}

impl PageTables {
    /// One directory maps a GiB; a larger RAM gets further ones.
    fn map_large(&mut self, start: u64, end: u64, flags: u64) {
        for page in (start..end).step_by(LARGE_PAGE_BYTES as usize) {
            let directory = large_index(page) / ENTRIES;
            let table = match directory {
                0 => PD,
                further => PD_MORE + further - 1,
            };
            if self.tables.len() <= table {
                self.tables.resize(table + 1, [0; ENTRIES]);
                self.tables[PDPT][directory] = table_address(table) | INNER;
            }
            self.tables[table][large_index(page) % ENTRIES] = page | flags | LEAF | LARGE;
        }
    }

    /// Writes them to guest memory.
    pub(super) fn write(&self, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
        if self.tables.len() > PAGE_TABLES_MAX as usize {
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

    /// What maps an address, or 0.
    #[cfg(test)]
    fn leaf(&self, address: u64) -> u64 {
        let entry = self.tables[PD][large_index(address)];
        if entry & LARGE != 0 || entry == 0 {
            return entry;
        }
        let table = ((entry & 0x000f_ffff_ffff_f000) - PAGE_TABLES) / PAGE_BYTES;
        self.tables[table as usize][(address / PAGE_BYTES) as usize % ENTRIES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> PageTables {
        build(5000, RAM_START + (32 << 20))
    }

    #[test]
    fn nothing_is_writable_and_executable() {
        let built = tables();
        let (large, small) = (&built.tables[PD], &built.tables[PT_DEVICES..]);
        let leaves = large.iter().filter(|entry| **entry & LARGE != 0);
        for entry in leaves.chain(small.iter().flatten()).filter(|entry| **entry & PRESENT != 0) {
            assert!(entry & WRITABLE == 0 || entry & NO_EXECUTE != 0, "{entry:#x}");
        }
        assert_eq!(built.leaf(CODE) & (WRITABLE | NO_EXECUTE), 0);
        for address in [STACK, DATA - PAGE_BYTES, DATA] {
            let flags = built.leaf(address) & (WRITABLE | USER | NO_EXECUTE);
            assert_eq!(flags, WRITABLE | USER | NO_EXECUTE, "{address:#x}");
        }
    }

    #[test]
    fn null_the_tables_the_stack_guard_and_what_is_past_ram_are_not_mapped() {
        let built = tables();
        let past = RAM_START + (32 << 20);
        for address in [0, PAGE_TABLES, STACK - PAGE_BYTES, past] {
            assert_eq!(built.leaf(address), 0, "{address:#x}");
        }
    }

    #[test]
    fn ring_3_reaches_neither_descriptors_nor_trap_stack() {
        let built = tables();
        for address in [DESCRIPTORS, TRAP_STACK] {
            let leaf = built.leaf(address);
            assert!(leaf & PRESENT != 0 && leaf & USER == 0, "{address:#x}: {leaf:#x}");
        }
    }

    #[test]
    fn the_archive_is_read_only_and_ends_where_it_ends() {
        let built = tables();
        assert_eq!(built.leaf(ARCHIVE + PAGE_BYTES) & (USER | WRITABLE), USER);
        assert_eq!(built.leaf(ARCHIVE + 2 * PAGE_BYTES), 0);
    }

    #[test]
    fn a_ram_beyond_a_gibibyte_gets_further_directories() {
        let built = build(0, RAM_START + (3 << 30));
        assert_eq!(built.tables.len(), PD_MORE + 3);
        let last = &built.tables[PD_MORE + 2];
        assert_eq!(last[1] & LARGE, LARGE, "the last large page is mapped");
        assert_eq!(last[2], 0);
    }
}
