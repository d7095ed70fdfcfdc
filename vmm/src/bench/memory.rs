//! How much memory the machine could still give, told so that what ran before
//! does not move it.

use std::time::{Duration, Instant};

/// From one look to the next while memory is given back.
const INTERVAL: Duration = Duration::from_millis(100);
/// What others move between two looks, in KiB.
const STILL_KIB: f64 = 1024.0;
/// How long it may go on: others have reasons of their own.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Waits until what ended before has given its memory back: the kernel frees
/// much of a VM later than the VM. What came back in the middle of a measurement
/// would count against what is taken there.
///
/// # Errors
/// As [`available_kib`].
pub fn wait_until_given_back() -> Result<(), String> {
    let until = Instant::now() + TIME_MAX;
    let mut available = available_kib()?;
    let mut still = 0;
    while still < 2 && Instant::now() < until {
        std::thread::sleep(INTERVAL);
        let now = available_kib()?;
        still = if (now - available).abs() < STILL_KIB { still + 1 } else { 0 };
        available = now;
    }
    Ok(())
}

/// What is available, in KiB: the kernel's own MemAvailable and the free pages
/// that each CPU keeps on lists of its own.
///
/// MemAvailable does not count those lists, and since Linux 6.7 they grow to
/// an eighth of the memory: what was just freed lies in them for minutes, and
/// who takes it from there lowers MemAvailable by nothing. With them, a page
/// is available until somebody has it.
///
/// # Errors
/// If `/proc/meminfo` or `/proc/zoneinfo` do not say it.
pub fn available_kib() -> Result<f64, String> {
    let meminfo = read("/proc/meminfo")?;
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"))
        .and_then(|figure| figure.parse::<f64>().ok())
        .ok_or("/proc/meminfo does not say what is available")?;
    let listed = pages_on_cpu_lists(&read("/proc/zoneinfo")?)
        .ok_or("/proc/zoneinfo does not say what the CPUs keep")?;
    // SAFETY: asks for a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(available + listed as f64 * page_bytes as f64 / 1024.0)
}

/// Free pages on the lists of all CPUs of all zones; none if there is no such
/// list in the text.
fn pages_on_cpu_lists(zoneinfo: &str) -> Option<u64> {
    zoneinfo
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("count:"))
        .map(|count| count.trim().parse::<u64>().ok())
        .try_fold((0, false), |(pages, _), count| Some((pages + count?, true)))
        .and_then(|(pages, any)| any.then_some(pages))
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_of_all_cpus_of_all_zones_are_added() {
        let two = "Node 0, zone   Normal\n  pages free     4735828\n      nr_free_pages 7\n  \
                   pagesets\n    cpu: 0\n              count:    1119\n              \
                   high:     1444\n    cpu: 1\n              count:    1266\n\
                   Node 0, zone  Movable\n    cpu: 0\n              count:    3\n";
        assert_eq!(pages_on_cpu_lists(two), Some(2388));
        assert_eq!(pages_on_cpu_lists("Node 0, zone   Normal\n  pages free  12\n"), None);
        assert_eq!(pages_on_cpu_lists("  count: many\n"), None);
    }

    #[test]
    fn what_this_machine_says_is_understood() {
        assert!(available_kib().unwrap() > 0.0);
    }
}
