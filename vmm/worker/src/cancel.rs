//! Ending what somebody waits for, from another thread.
//!
//! A run's waits are of two kinds: on a descriptor (its worker), and for its
//! turn. Both look at the run's [`Cancel`], an event descriptor, so one handle
//! ends either, and a run that nobody cancels pays for it with a place in a
//! `poll` that is made anyway.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// Whether a run is still wanted.
#[derive(Debug)]
pub struct Cancel {
    event: EventFd,
    raised: AtomicBool,
}

impl Cancel {
    /// One that nobody raised.
    ///
    /// # Errors
    /// If this process may open no further descriptor.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self { event, raised: AtomicBool::new(false) })
    }

    /// The run is wanted no more. It stays so.
    pub fn raise(&self) {
        if !self.raised.swap(true, Ordering::AcqRel) {
            self.nudge();
        }
    }

    /// Whether it was raised.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Has whoever waits look again, for another reason.
    pub fn nudge(&self) {
        // It can only fail if the counter is full: then it is readable.
        let _ = self.event.write(1);
    }

    /// Waits are waits again after a nudge, unless it was raised.
    pub fn calm(&self) {
        let _ = self.event.read();
        // Whoever raised it meanwhile may have written before the read.
        if self.is_raised() {
            self.nudge();
        }
    }
}

impl AsFd for Cancel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open for as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

impl AsRawFd for Cancel {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(cancel: &Cancel) -> bool {
        let mut polled = libc::pollfd { fd: cancel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
    }

    #[test]
    fn what_was_raised_stays_raised_and_a_nudge_passes() {
        let cancel = Cancel::new().unwrap();
        cancel.nudge();
        assert!(is_readable(&cancel) && !cancel.is_raised());
        cancel.calm();
        assert!(!is_readable(&cancel));
        cancel.raise();
        cancel.calm();
        assert!(is_readable(&cancel) && cancel.is_raised());
    }
}
