//! Waiting until what a sample left to be done is done: a worker that ends, a
//! pool that refills, a VM that is reset. Or the next case would be measured
//! beside it.

use std::time::{Duration, Instant};

use crate::worker::life;

/// How long at most: a process may have reasons of its own to run.
const TIME_MAX: Duration = Duration::from_millis(50);
/// From one look to the next. Who looks all the time has used up its turn when
/// the next sample comes.
const INTERVAL: Duration = Duration::from_millis(1);
/// Looks in a row that must find everybody asleep: work goes from process to
/// process, and one look may fall in between.
const LOOKS: u32 = 2;
/// A worker that rests sleeps, and its reset is still to come.
const _: () = assert!(life::REST.as_micros() < LOOKS as u128 * INTERVAL.as_micros());

/// Waits until every thread of this process and of all processes below it
/// sleeps.
pub(super) fn wait_for_quiet(process: i32) {
    let until = Instant::now() + TIME_MAX;
    let mut found = 0;
    while found < LOOKS && Instant::now() < until {
        std::thread::sleep(INTERVAL);
        found = if all_sleep(process) { found + 1 } else { 0 };
    }
}

/// Whether they do. Who is gone by now sleeps, and whoever looks would.
fn all_sleep(process: i32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return true };
    // SAFETY: has no preconditions.
    let this = unsafe { libc::gettid() };
    threads.flatten().all(|thread| {
        let read = |name| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let looks = thread.file_name().to_str().and_then(|it| it.parse().ok()) == Some(this);
        (looks || sleeps(&read("stat")))
            && read("children").split_ascii_whitespace().all(|child| {
                let child: Result<i32, _> = child.parse();
                child.is_ok_and(all_sleep)
            })
    })
}

/// What `/proc/PID/stat` says of a thread (proc_pid_stat(5)): its name, which
/// may hold anything, is in brackets, and its state comes next.
fn sleeps(stat: &str) -> bool {
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('S' | 'I') | None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt as _;

    #[test]
    fn a_thread_that_runs_waits_for_a_disk_or_is_ending_does_not_sleep() {
        for (stat, expected) in [
            ("12 (forge-worker) S 1 12", true),
            ("12 (a) R 1) S 1 12", true),
            ("12 (a) S 1) R 1 12", false),
            ("12 (forge-worker) D 1 12", false),
            ("12 (forge-worker) Z 1 12", false),
            ("", true),
        ] {
            assert_eq!(sleeps(stat), expected, "{stat}");
        }
    }

    #[test]
    fn a_process_that_computes_is_seen_below_one_that_sleeps() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "(while :; do :; done) & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let process = shell.id() as i32;
        let children = format!("/proc/{process}/task/{process}/children");
        let until = Instant::now() + Duration::from_secs(20);
        let mut seen = false;
        while !seen && Instant::now() < until {
            // The shell itself sleeps once it waits.
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
            let child = std::fs::read_to_string(&children).unwrap();
            seen = sleeps(&stat) && !child.is_empty() && !all_sleep(process);
        }
        // SAFETY: a plain system call; the group is the shell's and its
        // child's, and the shell has not been waited for.
        unsafe { libc::kill(-process, libc::SIGKILL) };
        shell.wait().unwrap();
        assert!(seen, "the loop is not seen");
        assert!(all_sleep(process), "who is gone sleeps");
    }
}
