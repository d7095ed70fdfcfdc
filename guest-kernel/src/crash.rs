//! How a panic leaves the VM: its message into the crash page, then one
//! register write that ends everything.

use core::fmt::Write;

use forge_protocol::limits::PANIC_MESSAGE_BYTES_MAX;
use forge_protocol::platform::CRASH;

use crate::mmio::Control;

/// Text into the crash page, cut at its bound.
struct CrashPage {
    used: usize,
}

impl Write for CrashPage {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for byte in text.bytes().take(PANIC_MESSAGE_BYTES_MAX - self.used) {
            // SAFETY: the page is mapped writable and nothing else uses it;
            // `used` stays under the bound, which is under a page.
            unsafe { ((CRASH as usize + self.used) as *mut u8).write_volatile(byte) };
            self.used += 1;
        }
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let mut page = CrashPage { used: 0 };
    // The page takes anything, so this cannot fail.
    let _ = write!(page, "{info}");
    loop {
        Control::panic(page.used as u32);
    }
}
