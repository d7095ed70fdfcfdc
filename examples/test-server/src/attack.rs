//! What a hostile tool server tries: the broker's memory, a neighbour's
//! environment and files, and to outlive whoever started it.
//!
//! Each attempt tells whether it got what it was after and never what that
//! was, so that nothing that removes credentials from answers can hide a
//! success. `--attack KIND TARGET NEEDLE` makes the same attempts without a
//! broker: a test that shows a failure in a place of the broker's making shows
//! the success outside it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long what is left behind stays, if nobody ends it: longer than any test
/// waits for its end, or a test could not tell that nobody ended it.
const OUTLIVES_AT_MOST: Duration = Duration::from_secs(300);
/// What is read of another process's memory at once, in bytes.
const CHUNK: usize = 1 << 20;

/// Whether the attempt succeeded, or why not.
pub(crate) fn attempt(kind: &str, target: &str, needle: &str) -> io::Result<bool> {
    let pid = || target.parse::<i32>().map_err(io::Error::other);
    let has = |bytes: &[u8]| contains(bytes, needle.as_bytes());
    match kind {
        "environment" => Ok(has(&std::fs::read(format!("/proc/{target}/environ"))?)),
        "memory" => memory(pid()?, needle, &|pid, start, chunk| {
            File::open(format!("/proc/{pid}/mem"))?.read_at(chunk, start)
        }),
        "process_vm_readv" => memory(pid()?, needle, &process_vm_readv),
        "ptrace" => trace(pid()?),
        "file" => Ok(has(&std::fs::read(target)?)),
        "write" => std::fs::write(target, needle).map(|()| true),
        "neighbours" => Ok(neighbours(needle)),
        "connect" => std::net::TcpStream::connect(target).map(|_| true),
        "socket" => UnixStream::connect(target).map(|_| true),
        "datagram" => UnixDatagram::pair()?.0.send_to(b"x", target).map(|_| true),
        "signal" => check(unsafe_kill(pid()?)),
        "outlive" => outlive(Path::new(target)),
        other => Err(io::Error::other(format!("no attack {other:?}"))),
    }
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    !needle.is_empty() && bytes.windows(needle.len()).any(|window| window == needle)
}

/// A way to read a process's memory: its number, from where, into what.
type Read<'a> = &'a dyn Fn(i32, u64, &mut [u8]) -> io::Result<usize>;

/// Reads all memory that a process can write to, whichever way.
fn memory(pid: i32, needle: &str, read: Read<'_>) -> io::Result<bool> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut chunk = vec![0; CHUNK];
    let mut refused = None;
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let Some((start, end)) = line.split(' ').next().and_then(|range| {
            let (start, end) = range.split_once('-')?;
            Some((hex(start)?, hex(end)?))
        }) else {
            continue;
        };
        let mut at = start;
        while at < end {
            let most = chunk.len().min((end - at) as usize);
            match read(pid, at, &mut chunk[..most]) {
                Ok(0) => break,
                Ok(got) if contains(&chunk[..got], needle.as_bytes()) => return Ok(true),
                Ok(got) => at += got as u64,
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
    }
    refused.map_or(Ok(false), Err)
}

fn process_vm_readv(pid: i32, start: u64, chunk: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: chunk.len() };
    let remote = libc::iovec { iov_base: start as *mut _, iov_len: chunk.len() };
    // SAFETY: the local range is a slice of ours; the remote one is another
    // process's, and only read.
    let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

fn trace(pid: i32) -> io::Result<bool> {
    let null = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: takes no memory; the tracee goes on when this process detaches
    // or ends.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, null, null) };
    check(seized as libc::c_int)
}

fn unsafe_kill(pid: i32) -> libc::c_int {
    // SAFETY: takes numbers; signal 0 only asks whether one may be sent.
    unsafe { libc::kill(pid, 0) }
}

fn check(outcome: libc::c_int) -> io::Result<bool> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(true) }
}

/// Whether any process that can be seen, but this one, has the needle in its
/// environment or its command line.
fn neighbours(needle: &str) -> bool {
    let own = std::process::id().to_string();
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.flatten().filter(|entry| entry.file_name() != *own).any(|entry| {
        ["environ", "cmdline"].iter().any(|file| {
            std::fs::read(entry.path().join(file))
                .is_ok_and(|bytes| contains(&bytes, needle.as_bytes()))
        })
    })
}

/// Leaves a process behind in a session of its own, which makes `marker`
/// longer for as long as it lives.
fn outlive(marker: &Path) -> io::Result<bool> {
    // SAFETY: takes nothing. The child's other threads are not there, and it
    // takes no lock: it forks again and then uses one file.
    match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {}
        _ => return Ok(true),
    }
    // SAFETY: takes nothing.
    unsafe {
        libc::setsid();
        if libc::fork() != 0 {
            libc::_exit(0);
        }
        for stream in 0..3 {
            libc::close(stream);
        }
    }
    let until = Instant::now() + OUTLIVES_AT_MOST;
    while Instant::now() < until {
        use std::io::Write as _;
        if let Ok(mut file) = File::options().append(true).open(marker) {
            let _ = file.write_all(b".");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    // SAFETY: ends the process, without what others registered.
    unsafe { libc::_exit(0) }
}
