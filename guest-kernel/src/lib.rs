//! The unikernel under a guest: entry, traps, heap, the vsock driver and the
//! crash record.
//!
//! It runs in ring 3 and distrusts the program above it; of the host it
//! trusts what it must, and panics where the host breaks the virtio rules.
//! Deliberately absent: interrupts, ring-0 Rust, threads, a file system, and
//! every device but the one socket.
//!
//! | module | what it holds |
//! |---|---|
//! | [`entry`] | the first instructions, and what they hand to `main` |
//! | `trap` | ring 0: a few integer instructions per exception |
//! | `memory` | the four routines compilers call by name |
//! | [`allocator`] | the global allocator: the one `heap` |
//! | `heap` | memory divided so that few pages are touched |
//! | `mmio` | device registers |
//! | `queue` | one split virtqueue, polled |
//! | [`vsock`] | the virtio socket driver and its one stream |
//! | `crash` | how a panic leaves the VM |

#![no_std]

extern crate alloc;

pub mod allocator;
pub mod entry;
pub mod vsock;

#[cfg(feature = "guest")]
mod crash;
mod heap;
mod memory;
mod mmio;
mod queue;
mod trap;

/// The CPU's time-stamp counter: a monotonic count of ticks of unknown length.
#[must_use]
pub fn ticks() -> u64 {
    // SAFETY: the instruction reads a counter; CR4.TSD is clear.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Ends the VM: the guest has nothing more to say.
pub fn exit() -> ! {
    loop {
        mmio::Control::exit();
    }
}
