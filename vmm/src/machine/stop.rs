//! Ending a run from outside: the deadline, or whoever cancels it.
//!
//! The thread that runs the vCPU is either inside KVM_RUN or waiting for the
//! host side (the broker). The first is left by a signal, the second by an
//! event descriptor that every such wait polls. A signal can arrive just
//! before KVM_RUN is entered and be lost, so the kick is repeated until the
//! thread has left.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

/// How often a vCPU thread is kicked until it has left.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// Why a run was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Its time is over.
    Deadline,
    /// Somebody no longer wants it.
    Cancelled,
}

/// The state both sides look at.
#[derive(Debug)]
struct Shared {
    reason: AtomicU8,
    raised: EventFd,
    watched: Mutex<Option<Watched>>,
    closing: AtomicBool,
    timer: Mutex<TimerFd>,
    timer_fd: RawFd,
}

/// A thread that runs a vCPU, and until when it may.
#[derive(Clone, Copy, Debug)]
struct Watched {
    thread: libc::pthread_t,
    deadline: Instant,
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Option<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request to stop, as the running side sees it.
#[derive(Clone, Debug)]
pub struct Stop(Arc<Shared>);

impl Stop {
    /// Why to stop, if it is time to.
    #[must_use]
    pub fn raised(&self) -> Option<StopReason> {
        match self.0.reason.load(Ordering::Acquire) {
            0 => None,
            1 => Some(StopReason::Deadline),
            _ => Some(StopReason::Cancelled),
        }
    }

    /// Becomes readable when stopping is asked for: every wait of the running
    /// side polls it.
    #[must_use]
    pub fn event(&self) -> RawFd {
        self.0.raised.as_raw_fd()
    }

    /// Stops the run. The first reason stays.
    pub fn raise(&self, reason: StopReason) {
        self.raise_for(&self.0.watched(), reason);
    }

    /// The same for whoever has looked at what is watched, so that it cannot
    /// be another run by now.
    fn raise_for(&self, watched: &Option<Watched>, reason: StopReason) {
        let value = match reason {
            StopReason::Deadline => 1,
            StopReason::Cancelled => 2,
        };
        let _ = self.0.reason.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
        // A full counter is readable as well.
        let _ = self.0.raised.write(1);
        if let Some(Watched { thread, .. }) = watched {
            // SAFETY: the thread is watched only while it runs a vCPU, and
            // ends being so under the lock that the caller holds.
            unsafe { libc::pthread_kill(*thread, kick_signal()) };
        }
        // Let the watchdog repeat the kick until the thread has left.
        let mut timer = self.0.timer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = timer.reset(KICK_INTERVAL, None);
    }
}

/// The signal that interrupts KVM_RUN. Its handler does nothing; what matters
/// is that KVM_RUN returns EINTR.
fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Watches the time of one vCPU thread.
#[derive(Debug)]
pub struct Watchdog {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the watching thread.
    ///
    /// # Errors
    /// If the host has no descriptor or thread left.
    pub fn new() -> io::Result<Self> {
        let handler: vmm_sys_util::signal::SignalHandler = nothing;
        vmm_sys_util::signal::register_signal_handler(kick_signal(), handler)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        let timer = TimerFd::new().map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        let timer_fd = timer.as_raw_fd();
        let stop = Stop(Arc::new(Shared {
            reason: AtomicU8::new(0),
            raised: EventFd::new(EFD_NONBLOCK)?,
            watched: Mutex::new(None),
            closing: AtomicBool::new(false),
            timer: Mutex::new(timer),
            timer_fd,
        }));
        let watched = stop.clone();
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .stack_size(64 * 1024)
            .spawn(move || watch(&watched))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// What the running side looks at.
    #[must_use]
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Arms the watchdog for the calling thread, which is about to run a
    /// vCPU, until the guard is dropped.
    #[must_use]
    pub fn arm(&self, deadline: Instant) -> Armed<'_> {
        let shared = &self.stop.0;
        // SAFETY: has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        let mut watched = shared.watched();
        shared.reason.store(0, Ordering::Release);
        let _ = shared.raised.read();
        *watched = Some(Watched { thread, deadline });
        drop(watched);
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let mut timer = shared.timer.lock().unwrap_or_else(PoisonError::into_inner);
        if timer.reset(left, Some(KICK_INTERVAL)).is_err() {
            // Without a clock there is no run.
            drop(timer);
            self.stop.raise(StopReason::Deadline);
        }
        Armed(self)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let shared = &self.stop.0;
        shared.closing.store(true, Ordering::Release);
        let mut timer = shared.timer.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = timer.reset(Duration::from_nanos(1), None);
        drop(timer);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// While it lives, the calling thread is watched.
#[derive(Debug)]
pub struct Armed<'a>(&'a Watchdog);

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        let shared = &self.0.stop.0;
        *shared.watched() = None;
        let _ = shared.timer.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn watch(stop: &Stop) {
    let shared = &stop.0;
    let mut expirations = [0u8; 8];
    loop {
        // SAFETY: reads eight bytes into a buffer of eight; the descriptor is
        // the timer's, which lives in `shared`. Not through `TimerFd::wait`,
        // which would hold the lock that arming takes.
        let read = unsafe {
            libc::read(shared.timer_fd, expirations.as_mut_ptr().cast(), expirations.len())
        };
        if shared.closing.load(Ordering::Acquire) {
            return;
        }
        if read < 0 {
            continue;
        }
        // An expiry may be left from an arming before this one.
        let watched = shared.watched();
        let over = watched.is_some_and(|watched| Instant::now() >= watched.deadline);
        if over || watched.is_some() && stop.raised().is_some() {
            stop.raise_for(&watched, StopReason::Deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_raises_the_stop_and_wakes_a_sleeping_thread() {
        let watchdog = Watchdog::new().unwrap();
        let armed = watchdog.arm(Instant::now() + Duration::from_millis(20));
        let stop = watchdog.stop().clone();
        let mut poll = libc::pollfd { fd: stop.event(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        while unsafe { libc::poll(&mut poll, 1, 10_000) } < 0 {}
        assert_eq!(stop.raised(), Some(StopReason::Deadline));
        drop(armed);
    }

    #[test]
    fn arming_again_starts_afresh() {
        let watchdog = Watchdog::new().unwrap();
        drop(watchdog.arm(Instant::now()));
        watchdog.stop().raise(StopReason::Cancelled);
        assert!(watchdog.stop().raised().is_some());
        let _armed = watchdog.arm(Instant::now() + Duration::from_secs(60));
        assert_eq!(watchdog.stop().raised(), None);
    }

    #[test]
    fn an_expiry_of_an_earlier_arming_stops_nothing() {
        let watchdog = Watchdog::new().unwrap();
        for _ in 0..200 {
            drop(watchdog.arm(Instant::now()));
            let _armed = watchdog.arm(Instant::now() + Duration::from_secs(60));
            std::thread::sleep(Duration::from_micros(300));
            assert_eq!(watchdog.stop().raised(), None);
        }
    }

    #[test]
    fn the_first_reason_stays() {
        let watchdog = Watchdog::new().unwrap();
        let _armed = watchdog.arm(Instant::now() + Duration::from_secs(60));
        watchdog.stop().raise(StopReason::Cancelled);
        watchdog.stop().raise(StopReason::Deadline);
        assert_eq!(watchdog.stop().raised(), Some(StopReason::Cancelled));
    }
}
