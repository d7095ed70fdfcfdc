//! The routines that compilers call by name. There is no C library here.
//!
//! Small copies are a few overlapping loads and stores; large ones use the
//! string instructions, which are fast on every CPU this runs on.

use core::arch::asm;

use crate::{allocator, heap};

/// From here on the string instructions win.
const STRING_BYTES_MIN: usize = 256;

/// # Safety
/// As C's `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(dst: *mut u8, src: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller's contract; each branch touches `count` bytes only.
    unsafe {
        if count >= STRING_BYTES_MIN {
            forward(dst, src, count);
        } else {
            small(dst, src, count);
        }
    }
    dst
}

/// # Safety
/// As C's `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(dst: *mut u8, src: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller's contract. Copying forward is right unless `dst`
    // lies inside the source, behind its start.
    unsafe {
        if (dst as usize).wrapping_sub(src as usize) >= count {
            return memcpy(dst, src, count);
        }
        // Backwards, 16 bytes at a time; each load comes before the store
        // that may overwrite its source.
        let mut left = count;
        while left >= 16 {
            left -= 16;
            let chunk = src.add(left).cast::<u128>().read_unaligned();
            dst.add(left).cast::<u128>().write_unaligned(chunk);
        }
        while left > 0 {
            left -= 1;
            // Volatile, so that this loop is not compiled into a memmove.
            dst.add(left).write_volatile(src.add(left).read_volatile());
        }
    }
    dst
}

/// # Safety
/// As C's `memset`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(dst: *mut u8, byte: i32, mut count: usize) -> *mut u8 {
    let byte = byte as u8;
    if byte == 0 && count >= heap::LARGE_BYTES_MIN {
        count = allocator::to_be_zeroed(dst as usize, count);
    }
    // SAFETY: the caller's contract; each branch writes `count` bytes only.
    unsafe {
        if count >= STRING_BYTES_MIN {
            asm!(
                "rep stosb",
                inout("rcx") count => _,
                inout("rdi") dst => _,
                in("al") byte,
                options(nostack, preserves_flags),
            );
            return dst;
        }
        let pattern = u128::from_ne_bytes([byte; 16]);
        if count >= 16 {
            let mut at = 0;
            while at + 16 <= count {
                dst.add(at).cast::<u128>().write_unaligned(pattern);
                at += 16;
            }
            dst.add(count - 16).cast::<u128>().write_unaligned(pattern);
        } else {
            for at in 0..count {
                // Volatile, so that this loop is not compiled into a memset.
                dst.add(at).write_volatile(byte);
            }
        }
    }
    dst
}

/// # Safety
/// As C's `memcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    let mut at = 0;
    // SAFETY: the caller's contract; reads stay below `count`.
    unsafe {
        while at + 8 <= count {
            let a = left.add(at).cast::<u64>().read_unaligned();
            let b = right.add(at).cast::<u64>().read_unaligned();
            if a != b {
                return if a.swap_bytes() < b.swap_bytes() { -1 } else { 1 };
            }
            at += 8;
        }
        while at < count {
            let (a, b) = (left.add(at).read_volatile(), right.add(at).read_volatile());
            if a != b {
                return i32::from(a) - i32::from(b);
            }
            at += 1;
        }
    }
    0
}

/// # Safety
/// As `memcmp`, for equality.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, count: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(left, right, count) }
}

/// # Safety
/// As C's `strlen`.
#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: *const u8) -> usize {
    let mut length = 0;
    // SAFETY: the caller promises a terminating zero.
    while unsafe { text.add(length).read_volatile() } != 0 {
        length += 1;
    }
    length
}

/// Copies with the string instruction.
///
/// # Safety
/// As `memcpy`.
unsafe fn forward(dst: *mut u8, src: *const u8, count: usize) {
    // SAFETY: the caller's contract; the direction flag is clear by the ABI.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") count => _,
            inout("rdi") dst => _,
            inout("rsi") src => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies by overlapping pieces.
///
/// # Safety
/// As `memcpy`; `memmove` calls it too, only where copying forward is right.
unsafe fn small(dst: *mut u8, src: *const u8, count: usize) {
    macro_rules! ends {
        ($type:ty) => {{
            const BYTES: usize = size_of::<$type>();
            let head = src.cast::<$type>().read_unaligned();
            let tail = src.add(count - BYTES).cast::<$type>().read_unaligned();
            dst.cast::<$type>().write_unaligned(head);
            dst.add(count - BYTES).cast::<$type>().write_unaligned(tail);
        }};
    }
    // SAFETY: every access is within `count` bytes of its pointer.
    unsafe {
        match count {
            0 => {}
            1 => dst.write(src.read()),
            2..=3 => ends!(u16),
            4..=7 => ends!(u32),
            8..=15 => ends!(u64),
            16..=32 => ends!(u128),
            _ => {
                let tail = src.add(count - 16).cast::<u128>().read_unaligned();
                let mut at = 0;
                while at + 16 < count {
                    let chunk = src.add(at).cast::<u128>().read_unaligned();
                    dst.add(at).cast::<u128>().write_unaligned(chunk);
                    at += 16;
                }
                dst.add(count - 16).cast::<u128>().write_unaligned(tail);
            }
        }
    }
}
