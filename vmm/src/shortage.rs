//! What a host lacks for a moment: tasks, memory, an executable that is just being
//! written.
//!
//! Whoever starts once and is to stay, as a service and its broker are, waits for it a
//! little. Runs do not. Nothing that is lacking for good is waited for: that is told at
//! once.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

/// How long it is waited for at most. Longer is no moment, and told.
pub(crate) const TIME_MAX: Duration = Duration::from_secs(5);
/// How long until it is looked again.
const PAUSE: Duration = Duration::from_millis(50);

/// Whether this is such an error of what starts a process.
#[must_use]
pub fn is_one(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        // EAGAIN: `pids.max`, RLIMIT_NPROC, or no number of a process is free.
        ErrorKind::WouldBlock
            | ErrorKind::OutOfMemory
            // Another thread that starts a process has a copy of what wrote it.
            | ErrorKind::ExecutableFileBusy
            | ErrorKind::Interrupted
    )
}

/// Starts something, again and again while it is a shortage that keeps it and there is
/// time.
///
/// # Errors
/// What it said last.
pub fn outlast<T>(start: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    outlast_until(Instant::now() + TIME_MAX, is_one, start)
}

/// The same, of what tells a shortage in its own way.
pub(crate) fn outlast_until<T, E>(
    until: Instant,
    is_shortage: impl Fn(&E) -> bool,
    mut start: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    loop {
        match start() {
            Err(error) if is_shortage(&error) && Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(errno: [i32; 3]) -> (usize, io::Result<()>) {
        let mut errors = errno.into_iter();
        let outcome =
            outlast(|| errors.next().map_or(Ok(()), |e| Err(io::Error::from_raw_os_error(e))));
        (errno.len() - errors.len(), outcome)
    }

    #[test]
    fn what_passes_is_outlasted_and_what_does_not_is_told_at_once() {
        let (tried, outcome) = starts([libc::EAGAIN, libc::ENOMEM, libc::ETXTBSY]);
        assert!(tried == 3 && outcome.is_ok(), "{tried} {outcome:?}");
        for lasting in [libc::EPERM, libc::ENOSPC, libc::ENOENT, libc::EINVAL] {
            let (tried, outcome) = starts([lasting, libc::EAGAIN, libc::EAGAIN]);
            assert_eq!((tried, outcome.unwrap_err().raw_os_error()), (1, Some(lasting)));
        }
    }

    #[test]
    fn a_shortage_that_lasts_is_told() {
        let mut tried = 0;
        let lasts = || {
            tried += 1;
            Err::<(), _>(io::Error::from_raw_os_error(libc::EAGAIN))
        };
        let outcome = outlast_until(Instant::now() + 2 * PAUSE, is_one, lasts);
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        assert!(tried > 1);
    }
}
