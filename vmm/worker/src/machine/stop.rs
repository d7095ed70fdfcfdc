//! Ending a run at its deadline.
//!
//! The thread that runs the vCPU is either inside KVM_RUN or waiting for the
//! host side (the broker). A signal interrupts both: the thread's own timer
//! sends it at the deadline. The signal's handler also sets KVM's
//! `immediate_exit`, so that one that arrives just before KVM_RUN is not lost;
//! for the other waits the timer repeats it until the thread has stopped.
//!
//! There is no watching thread: a worker has one thread, and its jail allows
//! no second. Deliberately absent: stopping it from another. A run that nobody
//! wants any more is ended with its process.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, compiler_fence};
use std::time::Duration;

use forge_protocol::worker::Deadline;

use crate::clock::now_ns;

/// How often a thread is interrupted until it has stopped.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// The deadline of what may take this long from now.
#[must_use]
pub fn deadline_in(time: Duration) -> Deadline {
    let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Deadline { monotonic_ns: now_ns().saturating_add(ns) }
}

/// A time of the monotonic clock before any process's start.
const LONG_PAST_NS: u64 = 1;

thread_local! {
    // What the handler touches. Both are constant-initialised and have no
    // destructor, so that reaching them allocates nothing.
    /// This thread was interrupted and has not looked why.
    static KICKED: AtomicBool = const { AtomicBool::new(false) };
    /// `immediate_exit` of the vCPU that this thread runs, or null.
    static IMMEDIATE_EXIT: AtomicPtr<u8> = const { AtomicPtr::new(std::ptr::null_mut()) };
}

/// The signal that interrupts.
fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

extern "C" fn kicked(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    KICKED.with(|kicked| kicked.store(true, Ordering::Relaxed));
    let flag = IMMEDIATE_EXIT.with(|flag| flag.load(Ordering::Relaxed));
    if !flag.is_null() {
        // SAFETY: not null only while `Interruptible` lives, and with it the
        // kvm_run page that this byte is in.
        unsafe { flag.write_volatile(1) };
    }
}

/// While it lives, a kick of this thread leaves KVM_RUN.
pub(super) struct Interruptible<'a> {
    vcpu: PhantomData<&'a ()>,
    here: PhantomData<*const ()>,
}

impl Interruptible<'_> {
    /// For a vCPU's `immediate_exit`.
    ///
    /// # Safety
    /// The byte stays where it is for the lifetime of what is returned.
    pub(super) unsafe fn new(immediate_exit: *mut u8) -> Self {
        IMMEDIATE_EXIT.with(|flag| flag.store(immediate_exit, Ordering::Relaxed));
        compiler_fence(Ordering::SeqCst);
        Self { vcpu: PhantomData, here: PhantomData }
    }
}

impl Drop for Interruptible<'_> {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.with(|flag| flag.store(std::ptr::null_mut(), Ordering::Relaxed));
        compiler_fence(Ordering::SeqCst);
    }
}

/// A POSIX timer that signals the thread that made it.
#[derive(Debug)]
struct Timer(libc::timer_t);

impl Timer {
    fn new() -> io::Result<Self> {
        // SAFETY: all-zero is a valid sigevent.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = kick_signal();
        // SAFETY: has no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = std::ptr::null_mut();
        // SAFETY: both point to values of their types.
        let made =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(timer))
    }

    /// Fires at this time of the monotonic clock, or at once if that is past,
    /// then again and again; never, if it is zero.
    fn set(&self, first_ns: u64) {
        let spec = |time: Duration| libc::timespec {
            tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        let times = libc::itimerspec {
            it_interval: spec(KICK_INTERVAL),
            it_value: spec(Duration::from_nanos(first_ns)),
        };
        let flags = libc::TIMER_ABSTIME;
        // SAFETY: the timer is ours, the times are valid. It cannot fail.
        unsafe { libc::timer_settime(self.0, flags, &raw const times, std::ptr::null_mut()) };
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// What a watchdog and its stops look at.
#[derive(Debug)]
struct Watched {
    over: Cell<bool>,
    /// Of the monotonic clock.
    deadline_ns: Cell<u64>,
}

/// Whether to stop, for the thread that is watched: no other hears of it.
#[derive(Clone, Debug)]
pub struct Stop(Rc<Watched>);

impl Stop {
    /// Whether the time is over.
    #[must_use]
    pub fn raised(&self) -> bool {
        let kicked = KICKED.with(|kicked| {
            // Not a swap: this is asked at every exit.
            kicked.load(Ordering::Relaxed) && kicked.swap(false, Ordering::Relaxed)
        });
        if kicked && now_ns() >= self.0.deadline_ns.get() {
            self.0.over.set(true);
        }
        self.0.over.get()
    }
}

/// Watches the time of the thread that made it, which runs the vCPU.
#[derive(Debug)]
pub struct Watchdog {
    stop: Stop,
    timer: Timer,
    /// How often it was armed.
    armed: Cell<u64>,
}

impl Watchdog {
    /// Makes the timer.
    ///
    /// # Errors
    /// If the host has no timer left.
    pub fn new() -> io::Result<Self> {
        vmm_sys_util::signal::register_signal_handler(kick_signal(), kicked)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        let watched = Watched { over: Cell::new(false), deadline_ns: Cell::new(u64::MAX) };
        Ok(Self { stop: Stop(Rc::new(watched)), timer: Timer::new()?, armed: Cell::new(0) })
    }

    /// What the running side looks at.
    #[must_use]
    pub fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Watches this thread, which is about to run a vCPU, until the guard is
    /// dropped, or until it is armed again. What was raised before is forgotten.
    #[must_use]
    pub fn arm(&self, deadline: Deadline) -> Armed<'_> {
        let watched = &self.stop.0;
        let at_ns = deadline.monotonic_ns.max(LONG_PAST_NS);
        watched.deadline_ns.set(at_ns);
        watched.over.set(false);
        self.timer.set(at_ns);
        self.armed.set(self.armed.get() + 1);
        Armed { watchdog: self, time: self.armed.get() }
    }
}

/// While it lives, the thread is watched.
#[derive(Debug)]
pub struct Armed<'a> {
    watchdog: &'a Watchdog,
    /// Which arming this guard belongs to: dropped after a later one, it disarms nothing.
    time: u64,
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        if self.watchdog.armed.get() == self.time {
            self.watchdog.timer.set(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn sleep_until_kicked() {
        let before = Instant::now();
        // SAFETY: no descriptors; interrupted by the signal.
        unsafe { libc::poll(std::ptr::null_mut(), 0, 10_000) };
        assert!(before.elapsed() < Duration::from_secs(10), "nothing interrupted it");
    }

    #[test]
    fn the_deadline_raises_the_stop_and_wakes_a_sleeping_thread() {
        let watchdog = Watchdog::new().unwrap();
        let armed = watchdog.arm(deadline_in(Duration::from_millis(20)));
        assert!(!watchdog.stop().raised());
        sleep_until_kicked();
        assert!(watchdog.stop().raised());
        drop(armed);
    }

    #[test]
    fn arming_again_starts_afresh() {
        let watchdog = Watchdog::new().unwrap();
        let armed = watchdog.arm(deadline_in(Duration::ZERO));
        sleep_until_kicked();
        assert!(watchdog.stop().raised());
        drop(armed);
        assert!(watchdog.stop().raised(), "until it is armed again");
        let _armed = watchdog.arm(deadline_in(Duration::from_secs(60)));
        assert!(!watchdog.stop().raised());
    }

    #[test]
    fn an_expiry_of_an_earlier_arming_stops_nothing() {
        let watchdog = Watchdog::new().unwrap();
        for _ in 0..200 {
            drop(watchdog.arm(deadline_in(Duration::ZERO)));
            let _armed = watchdog.arm(deadline_in(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_micros(300));
            assert!(!watchdog.stop().raised());
        }
    }

    #[test]
    fn a_deadline_that_has_long_passed_raises_the_stop_at_once() {
        let watchdog = Watchdog::new().unwrap();
        let _armed = watchdog.arm(Deadline { monotonic_ns: 0 });
        sleep_until_kicked();
        assert!(watchdog.stop().raised());
    }
}
