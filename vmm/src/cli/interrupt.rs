//! Signals that end this command, while it has a run that can be cancelled.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use forge_vmm::cancel::Cancel;
use forge_vmm::trace::now_ns;

use super::CliError;

/// What ends a command from outside.
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// A signal that comes this soon after the first, in nanoseconds, is the same word
/// once more: `timeout` tells the command and then its group.
const SAME_NS: u64 = 200_000_000;

/// Raised by the first signal, and there for as long as the process is: a handler
/// may run at any time.
static CANCEL: OnceLock<Cancel> = OnceLock::new();
/// When that came, by [`now_ns`]; 0 before.
static CAME: AtomicU64 = AtomicU64::new(0);

/// While this lives, the first signal that would end this command cancels its run,
/// so that the broker hears of it and the report says what was called. Another
/// ends the command at once. What was ignored (`nohup`) stays so. After one came it
/// stays as it is to the end of the process: the same word once more may come when
/// the run is over, and must not keep the report from being told.
pub(super) struct Interruptible {
    cancel: &'static Cancel,
    /// What was done with these before.
    before: Vec<(libc::c_int, libc::sigaction)>,
}

impl Interruptible {
    /// From now on.
    ///
    /// # Errors
    /// If there is no descriptor for it.
    pub(super) fn new() -> Result<Self, CliError> {
        let cancel = Cancel::new().map_err(CliError::Host)?;
        let mut this = Self { cancel: CANCEL.get_or_init(|| cancel), before: Vec::new() };
        for signal in SIGNALS {
            // SAFETY: all zero is a valid sigaction, with an empty mask.
            let (mut action, mut before): (libc::sigaction, libc::sigaction) =
                unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
            action.sa_sigaction = heard as extern "C" fn(_) as usize;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: asks; both actions are whole.
            unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut before) };
            if before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            // SAFETY: the action is whole, and its handler keeps to what handlers
            // may do.
            unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
            this.before.push((signal, before));
        }
        Ok(this)
    }

    /// What the first signal raises.
    pub(super) fn cancel(&self) -> &Cancel {
        self.cancel
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        if CAME.load(Ordering::Acquire) != 0 {
            return;
        }
        for (signal, before) in &self.before {
            // SAFETY: the action is the one that was there.
            unsafe { libc::sigaction(*signal, before, std::ptr::null_mut()) };
        }
    }
}

/// The handler: it loads, stores and makes system calls that handlers may make, and
/// leaves `errno` as it was.
extern "C" fn heard(signal: libc::c_int) {
    // SAFETY: this thread's own errno.
    let errno = unsafe { *libc::__errno_location() };
    let now = now_ns();
    match CAME.compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            if let Some(cancel) = CANCEL.get() {
                cancel.raise();
            }
        }
        Err(first) if now.saturating_sub(first) < SAME_NS => {}
        // SAFETY: both may be called here; the signal is delivered on return.
        Err(_) => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}
