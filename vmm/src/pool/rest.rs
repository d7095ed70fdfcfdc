//! What a worker uses of the CPU while it waits for a run: nothing, but for its reset.
//! One that was taken over may go on when it has reported.

use std::fs;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

/// Many times what a reset takes with its proof.
const TIME_MAX: Duration = Duration::from_secs(1);
/// What one wait may take without being counted: what a reset does.
const TIME_OF_ONE: Duration = Duration::from_millis(20);

/// The waits of one worker for its runs.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// Of the process, once it was found. It goes by its pid: of one that has ended, it may
    /// be another's, and whoever goes by it ends a worker that is gone.
    clock: Option<libc::clockid_t>,
    /// What the worker had used when its wait began, or was looked at first.
    before: Option<Duration>,
    /// What it used in waits that are over, beyond what they may take.
    owed: Duration,
}

impl Rest {
    /// It waits from now on.
    pub(super) fn begin(&mut self, process: &OwnedFd) {
        self.before = self.used(process);
    }

    /// It is given something to do. Where that comes often, a look each second would see
    /// the last of its waits alone.
    pub(super) fn end(&mut self, process: &OwnedFd) {
        if let Some(before) = self.before.take()
            && let Some(used) = self.used(process)
        {
            self.owed += used.saturating_sub(before).saturating_sub(TIME_OF_ONE);
        }
    }

    /// Whether this process has used more in its waits than one that waits does.
    pub(super) fn is_broken(&mut self, process: &OwnedFd) -> bool {
        self.owed + self.since(process) > TIME_MAX
    }

    /// What it has used in this wait, as far as that is known.
    fn since(&mut self, process: &OwnedFd) -> Duration {
        let Some(used) = self.used(process) else { return Duration::ZERO };
        used.saturating_sub(*self.before.get_or_insert(used))
    }

    /// What a process has used of the CPU. `None` if it has ended, or where there is no
    /// procfs.
    fn used(&mut self, process: &OwnedFd) -> Option<Duration> {
        let clock = match self.clock {
            Some(clock) => clock,
            None => *self.clock.insert(clock_of(process)?),
        };
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a plain system call, with a valid place for what it says.
        let known = unsafe { libc::clock_gettime(clock, &mut time) == 0 };
        known.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }
}

/// The clock of a process, which goes by its pid.
fn clock_of(process: &OwnedFd) -> Option<libc::clockid_t> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    let pid = pid.trim().parse().ok().filter(|pid: &libc::pid_t| *pid > 0)?;
    let mut clock = 0;
    // SAFETY: a plain system call, with a valid place for what it says.
    (unsafe { libc::clock_getcpuclockid(pid, &mut clock) } == 0).then_some(clock)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::Instant;

    use super::*;
    use crate::pool::zygote::tests::pidfd_of;

    #[test]
    fn a_process_that_computes_while_it_should_wait_is_found_and_one_that_waits_is_not() {
        let mut computes = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut waits = Command::new("sleep").arg("600").spawn().unwrap();
        let [busy, idle] = [&computes, &waits].map(|child: &Child| pidfd_of(child));
        let [mut rest, mut of_idle] = [Rest::default(), Rest::default()];
        let until = Instant::now() + Duration::from_secs(60);
        let mut found = rest.is_broken(&busy);
        assert!(!found, "nothing is known of it yet");
        while !found && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
            found = rest.is_broken(&busy);
            assert!(!of_idle.is_broken(&idle));
        }
        for child in [&mut computes, &mut waits] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(found);
        // It has ended.
        assert!(!Rest::default().is_broken(&busy));
    }

    struct Ends(Child);

    impl Drop for Ends {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_computes_in_short_waits_is_found_by_what_they_add_up_to() {
        let sh = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let computes = Ends(sh);
        let process = pidfd_of(&computes.0);
        let (mut rest, mut clock) = (Rest::default(), Rest::default());
        let until = Instant::now() + Duration::from_secs(60);
        // Until it has used so much more, however long it is kept from its CPU.
        let mut uses = |time| {
            let from = clock.used(&process).unwrap();
            while clock.used(&process).unwrap() - from < time {
                assert!(Instant::now() < until, "it computes nothing");
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let mut waits = 0;
        while !rest.is_broken(&process) {
            rest.begin(&process);
            uses(Duration::from_millis(100));
            rest.end(&process);
            waits += 1;
        }
        // What it does with a run is not counted.
        let (owed, before) = (rest.owed, rest.used(&process).unwrap());
        let of_the_run = Duration::from_millis(50);
        uses(of_the_run);
        rest.begin(&process);
        rest.end(&process);
        assert!(waits > 1 && rest.owed - owed < of_the_run, "{waits} {:?}", rest.owed - owed);
        assert!(rest.used(&process).unwrap() - before >= of_the_run);
    }
}
