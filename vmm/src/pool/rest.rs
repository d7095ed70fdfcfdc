//! What a worker uses of the CPU while it waits for a run: nothing, but for its reset.
//! One that was taken over may go on when it has reported.

use std::fs;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

/// Many times what a reset takes with its proof.
const TIME_MAX: Duration = Duration::from_secs(1);

/// A wait for a run.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// What the worker had used when it was looked at first.
    before: Option<Duration>,
}

impl Rest {
    /// Whether this process has used more since it was looked at first than one that
    /// waits does.
    pub(super) fn is_broken(&mut self, process: &OwnedFd) -> bool {
        let Some(used) = cpu_time(process) else { return false };
        used.saturating_sub(*self.before.get_or_insert(used)) > TIME_MAX
    }
}

/// What a process has used of the CPU. `None` if it has ended, or where there is no
/// procfs.
fn cpu_time(process: &OwnedFd) -> Option<Duration> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    let pid = pid.trim().parse().ok().filter(|pid: &libc::pid_t| *pid > 0)?;
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: two plain system calls, each with a valid place for what it says.
    let known = unsafe {
        libc::clock_getcpuclockid(pid, &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    known.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
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
        assert!(!rest.is_broken(&busy));
    }
}
