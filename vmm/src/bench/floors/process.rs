//! Processes that a floor is measured with, or in.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use super::{Case, said};

/// Forks a child that runs `work` and ends, without running destructors.
pub(super) fn fork_child(work: impl FnOnce()) -> io::Result<libc::pid_t> {
    // SAFETY: the child does nothing but what `work` does, and `_exit`. `work`
    // takes no lock but the allocator's, which glibc keeps whole in a fork.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // Whoever ends the bench ends it too: the thread that forks is there
            // as long as the bench is.
            // SAFETY: an option that takes numbers alone.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            work();
            // SAFETY: ends this process.
            unsafe { libc::_exit(0) }
        }
        child => Ok(child),
    }
}

pub(super) fn wait_for(child: libc::pid_t) {
    // SAFETY: waits for a child of ours; the status is not asked for.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

/// A process beside the bench that measures what forks. If the bench
/// did itself, each would leave its memory to be copied on the next write, and
/// whatever is measured next in this process would pay for that.
pub(super) struct Beside {
    socket: UnixStream,
    child: libc::pid_t,
}

impl Beside {
    /// Forks it. It does `measure` whenever it is asked to.
    pub(super) fn fork(mut measure: impl FnMut() -> Result<u64, String>) -> Result<Self, String> {
        let (socket, mut theirs) = UnixStream::pair().map_err(said)?;
        let child = fork_child(move || {
            let mut asked = [0];
            while theirs.read_exact(&mut asked).is_ok() {
                let answer = measure().unwrap_or(u64::MAX);
                if theirs.write_all(&answer.to_ne_bytes()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child: child.map_err(said)?, socket })
    }

    /// Asks the child to measure.
    pub(super) fn ask(&mut self) -> Result<(), String> {
        self.socket.write_all(&[0]).map_err(said)
    }

    /// Waits for what the child measured.
    pub(super) fn answer(&mut self) -> Result<u64, String> {
        let mut answer = [0; 8];
        self.socket.read_exact(&mut answer).map_err(said)?;
        match u64::from_ne_bytes(answer) {
            u64::MAX => Err("a forked process could not be measured".into()),
            answer => Ok(answer),
        }
    }
}

impl Case for Beside {
    fn sample(&mut self) -> Result<u64, String> {
        self.ask()?;
        self.answer()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        wait_for(self.child);
    }
}
