//! While runs come, idle CPUs are asked to be ready at once.
//!
//! The first run after a pause makes the request, which lasts until no run has come for
//! [`HOLD`]. Most runs are over within that time; one that waits for its tools does not
//! prolong it. Only the service's event loop is woken to take it back, by a timer.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use vmm_sys_util::timerfd::TimerFd;

use crate::cpu_latency::CpuLatency;
use crate::locks::lock;

/// How long the request lasts after the last run came.
const HOLD: Duration = Duration::from_millis(20);

/// Asks for CPUs that are ready, while runs come.
#[derive(Debug)]
pub(super) struct Awake {
    latency: CpuLatency,
    state: Mutex<State>,
    /// When it is to be looked at again. What it says when nothing is asked
    /// for has no effect.
    timer_fd: RawFd,
}

#[derive(Debug)]
struct State {
    timer: TimerFd,
    /// When the last run came, while it is asked for.
    came: Option<Instant>,
}

impl Awake {
    /// Nobody asks yet.
    ///
    /// # Errors
    /// If there is no timer.
    pub(super) fn new(latency: CpuLatency) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        let timer_fd = timer.as_raw_fd();
        Ok(Self { latency, timer_fd, state: Mutex::new(State { timer, came: None }) })
    }

    /// What the event loop watches, for [`Self::look`].
    pub(super) fn timer_fd(&self) -> RawFd {
        self.timer_fd
    }

    /// Notes that a run comes: CPUs are to be ready from now on.
    pub(super) fn run_came(&self) {
        let mut state = lock(&self.state);
        if state.came.replace(Instant::now()).is_none() {
            self.latency.ask();
            self.look_in(&mut state, HOLD);
        }
    }

    /// The timer has expired: takes back what was asked for, or waits on if
    /// runs came meanwhile.
    pub(super) fn look(&self) {
        let mut state = lock(&self.state);
        // Otherwise it says so again at once.
        let _ = state.timer.wait();
        let Some(came) = state.came else { return };
        match HOLD.checked_sub(came.elapsed()) {
            Some(left) if !left.is_zero() => self.look_in(&mut state, left),
            _ => self.take_back(&mut state),
        }
    }

    fn look_in(&self, state: &mut State, time: Duration) {
        if let Err(error) = state.timer.reset(time, None) {
            // Nobody would take it back.
            tracing::debug!(%error, "no timer");
            self.take_back(state);
        }
    }

    fn take_back(&self, state: &mut State) {
        state.came = None;
        self.latency.withdraw();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Seek as _};
    use std::os::fd::FromRawFd as _;

    use super::*;

    /// What was asked for, in order: 0 for ready CPUs, more for any.
    fn asked(file: &mut File) -> Vec<i32> {
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        bytes.chunks_exact(4).map(|us| i32::from_ne_bytes(us.try_into().unwrap())).collect()
    }

    fn file() -> File {
        // SAFETY: a name and a flag; what comes back is new and nobody else's.
        unsafe { File::from_raw_fd(libc::memfd_create(c"asked".as_ptr(), libc::MFD_CLOEXEC)) }
    }

    #[test]
    fn runs_that_come_one_after_another_ask_once_and_it_is_taken_back_after_the_last() {
        let mut file = file();
        let awake = Awake::new(CpuLatency::over(file.try_clone().unwrap(), 0)).unwrap();
        awake.run_came();
        awake.run_came();
        assert_eq!(asked(&mut file), [0]);
        // The timer of the first expires; the second came later.
        std::thread::sleep(HOLD / 2);
        awake.run_came();
        awake.look();
        assert_eq!(asked(&mut file), [0], "a run came meanwhile");
        awake.look();
        let asked_for = asked(&mut file);
        assert!(matches!(asked_for[..], [0, any] if any > 1_000_000), "{asked_for:?}");
        awake.run_came();
        assert_eq!(asked(&mut file).len(), 3, "the next run asks again");
    }
}
