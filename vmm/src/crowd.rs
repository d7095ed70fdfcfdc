//! For tests: a process of its own, whose user has too many descriptors under way.
//!
//! The kernel counts those of all processes of a user, and holds them against what the
//! one that passes another may have open. Root is held to nothing.

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;

use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// Tells the process that it is the one for the test.
const IS_ALONE: &str = "FORGE_TEST_ALONE";
/// What such a process may have open, and more than that, in one message.
const OPEN_MAX: libc::rlim_t = 64;
const UNDER_WAY: usize = 200;

/// Whether this is the process for this test, which goes on in it as a user whom nobody
/// else is. Any other process starts that and waits until it has passed.
pub(crate) fn alone(test: &str, user: libc::uid_t) -> bool {
    if std::env::var_os(IS_ALONE).is_some() {
        become_user(user);
        return true;
    }
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: it takes root to be another user, and ours has other processes");
        return false;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(IS_ALONE, "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // None of that name passes as well.
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
    false
}

fn become_user(user: libc::uid_t) {
    let limit = libc::rlimit { rlim_cur: OPEN_MAX, rlim_max: OPEN_MAX };
    // SAFETY: lowers a limit of this process, and changes the user of this thread alone:
    // the test's, and those that it starts. The C library's call would have all change.
    let failed = unsafe {
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0
            || libc::syscall(libc::SYS_setresuid, user, user, user) != 0
    };
    assert!(!failed, "{}", std::io::Error::last_os_error());
}

/// Too many descriptors under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Crowd {
    _from: UnixStream,
    _to: UnixStream,
}

impl Crowd {
    pub(crate) fn new() -> Self {
        let (from, to) = UnixStream::pair().unwrap();
        let null = File::open("/dev/null").unwrap();
        let passed: [RawFd; UNDER_WAY] = [null.as_raw_fd(); UNDER_WAY];
        assert_eq!(from.send_with_fds(&[&[0u8][..]], &passed).unwrap(), 1);
        Self { _from: from, _to: to }
    }
}
