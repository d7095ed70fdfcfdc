//! Standard error as a log that nobody is kept waiting by.
//!
//! A pipe holds 64 KiB. Where nobody reads it, because whoever started a service never
//! meant to, or a shipper of logs stands still, each thread with a line to write would
//! stand still too, and with it runs and their deadlines. So a line that finds no room
//! waits a moment for it, is dropped, and is counted where there is room again.
//!
//! Distrusted is whoever reads. Files and terminals are written to as ever: they wait for
//! a disk or a person. Deliberately absent is a queue: what is between us and a reader
//! has one. What to say seldom is [`Seldom`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod seldom;

pub use seldom::Seldom;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fstat};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// How long a line waits for room.
const WAIT_MAX: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long none waits once one has waited for nothing.
const IMPATIENT_TIME: Duration = Duration::from_secs(10);
/// What a pipe that has room takes at once (pipe(7), `PIPE_BUF`).
const PIPE_BUF: usize = 4096;

/// The first word of a filter for the log (`warn,forge_vmm=debug`) that stands alone and is
/// no level: who writes `warning` means one, and not a part of that name, whose lines
/// alone would be left.
#[must_use]
pub fn no_level(filter: &str) -> Option<&str> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_level = |word: &str| {
        LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level))
            || word.parse::<u8>().is_ok_and(|it| usize::from(it) < LEVELS.len())
    };
    let words = || filter.split(',').map(str::trim).filter(|word| !word.is_empty());
    // With a level beside it, a word alone is a part's name.
    if words().any(is_level) {
        return None;
    }
    words().find(|word| !word.contains(['=', '[', ':', '_']) && !word.starts_with("forge"))
}

/// Where lines of the log go. Each is one write to `&Log`.
#[derive(Debug)]
pub struct Log(Mutex<State>);

#[derive(Debug)]
enum Way {
    /// A pipe, opened anew: what we were given is open for others too, and whether it
    /// blocks is not for us to say.
    Pipe(OwnedFd),
    /// One that is not ours to open: another user's.
    OthersPipe(OwnedFd),
    /// A socket.
    Socket(OwnedFd),
    /// What waits for no reader.
    Plain(Option<OwnedFd>),
}

#[derive(Debug)]
struct State {
    way: Way,
    /// Lines that were dropped since one was written.
    dropped: u64,
    /// Whether the last line was written in part.
    is_torn: bool,
    /// When one last waited for nothing.
    waited: Option<Instant>,
}

/// Standard error.
#[must_use]
pub fn stderr() -> &'static Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    LOG.get_or_init(|| Log::to(io::stderr().as_fd()))
}

impl Log {
    /// A log to what is open there.
    #[must_use]
    pub fn to(target: BorrowedFd<'_>) -> Self {
        let kind = fstat(target).map(|stat| FileType::from_raw_mode(stat.st_mode));
        let own = target.try_clone_to_owned();
        let way = match (kind, own) {
            (Ok(FileType::Fifo), Ok(own)) => {
                let path = format!("/proc/self/fd/{}", target.as_raw_fd());
                let flags = OFlags::NONBLOCK.bits().cast_signed();
                let anew = OpenOptions::new().write(true).custom_flags(flags).open(path);
                anew.map_or(Way::OthersPipe(own), |anew| Way::Pipe(anew.into()))
            }
            (Ok(FileType::Socket), Ok(own)) => Way::Socket(own),
            (_, own) => Way::Plain(own.ok()),
        };
        Self::by(way)
    }

    fn by(way: Way) -> Self {
        Self(Mutex::new(State { way, dropped: 0, is_torn: false, waited: None }))
    }

    /// Leaves what it is written to, if somebody may wait for its end: a pipe, or a socket
    /// that has no name, as those are that Node starts processes with. What comes from now
    /// on is read by nobody. Whether it did.
    pub fn leave(&self) -> bool {
        let mut state = self.state();
        let is_awaited = match &state.way {
            Way::Pipe(_) | Way::OthersPipe(_) => true,
            Way::Socket(socket) => is_unnamed(socket),
            Way::Plain(_) => false,
        };
        if is_awaited && let Ok(null) = File::options().write(true).open("/dev/null") {
            state.way = Way::Plain(Some(null.into()));
            return true;
        }
        false
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn line(&mut self, line: &[u8]) {
        if self.dropped > 0 {
            let end = if self.is_torn { "\n" } else { "" };
            let told = format!(
                "{end}{} log lines were dropped because the log was not read in time\n",
                self.dropped
            );
            if !self.is_put(told.as_bytes()) {
                self.dropped += 1;
                return;
            }
            (self.dropped, self.is_torn, self.waited) = (0, false, None);
        }
        if !self.is_put(line) {
            self.dropped += 1;
        }
    }

    /// Whether all of it is written.
    fn is_put(&mut self, line: &[u8]) -> bool {
        let mut rest = line;
        while !rest.is_empty() {
            match self.put(rest) {
                Ok(written) => rest = &rest[written.min(rest.len())..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.has_room_soon() => {}
                Err(_) => {
                    self.is_torn |= rest.len() < line.len();
                    return false;
                }
            }
        }
        true
    }

    /// Writes some, and waits for nobody.
    fn put(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        match &self.way {
            Way::Pipe(pipe) => rustix::io::write(pipe, bytes),
            Way::OthersPipe(pipe) => {
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                match has_room(pipe, &now) {
                    true => rustix::io::write(pipe, &bytes[..bytes.len().min(PIPE_BUF)]),
                    false => Err(Errno::AGAIN),
                }
            }
            Way::Socket(socket) => send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            Way::Plain(Some(target)) => rustix::io::write(target, bytes),
            Way::Plain(None) => Err(Errno::BADF),
        }
    }

    /// Whether there is room within a moment, unless there was none lately.
    fn has_room_soon(&mut self) -> bool {
        let (Way::Pipe(target) | Way::OthersPipe(target) | Way::Socket(target)) = &self.way else {
            return false;
        };
        if self.waited.is_some_and(|waited| waited.elapsed() < IMPATIENT_TIME) {
            return false;
        }
        let has_room = has_room(target, &WAIT_MAX);
        self.waited = (!has_room).then(Instant::now);
        has_room
    }
}

impl Write for &Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.state().line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn is_unnamed(socket: &OwnedFd) -> bool {
    let peer = socket.try_clone().and_then(|socket| UnixStream::from(socket).peer_addr());
    peer.is_ok_and(|peer| peer.is_unnamed())
}

fn has_room(target: &OwnedFd, within: &Timespec) -> bool {
    let mut asked = [PollFd::new(target, PollFlags::OUT)];
    poll(&mut asked, Some(within)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_word_that_is_meant_for_a_level_and_is_none_is_found() {
        for good in [
            "",
            "warn",
            "WARN,",
            "3",
            "info,forge_vmm=debug",
            "warn,hyper",
            "forge_worker",
            "a::b",
            "x[y]",
        ] {
            assert_eq!(super::no_level(good), None, "{good}");
        }
        for (bad, word) in
            [("warning", "warning"), ("forge_vmm=debug, verbose", "verbose"), ("6", "6")]
        {
            assert_eq!(super::no_level(bad), Some(word), "{bad}");
        }
    }

    use std::io::Read as _;

    use super::*;

    const LINE: &[u8] = b"0123456789 0123456789 0123456789 0123456789 0123456789 0123456789\n";
    /// More than any pipe or socket holds.
    const LINES: usize = 40_000;

    /// Writes more than anybody reads, then reads; the lines after that, and how often a
    /// last one was tried.
    fn read_late(log: &Log, mut reader: impl io::Read + Send + 'static) -> (Vec<String>, usize) {
        for _ in 0..LINES {
            (&*log).write_all(LINE).unwrap();
        }
        let (heard, hears) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(got @ 1..) = reader.read(&mut buffer) {
                if heard.send(buffer[..got].to_vec()).is_err() {
                    return;
                }
            }
        });
        let (mut said, mut tries) = (Vec::new(), 0);
        while !said.ends_with(b"the last\n") {
            match hears.recv_timeout(Duration::from_millis(200)) {
                Ok(more) => said.extend(more),
                // All that was there is read, or whoever reads had no turn.
                Err(_) => {
                    (&*log).write_all(b"the last\n").unwrap();
                    tries += 1;
                }
            }
        }
        (String::from_utf8(said).unwrap().lines().map(str::to_owned).collect(), tries)
    }

    /// What was read is whole but where it says how much is missing, and goes on.
    fn check((lines, tries): &(Vec<String>, usize)) {
        let told = lines.iter().filter_map(|line| {
            line.strip_suffix(" log lines were dropped because the log was not read in time")
        });
        let missing: usize = told.map(|count| count.parse::<usize>().unwrap()).sum();
        let whole = lines.iter().filter(|line| line.as_bytes() == &LINE[..LINE.len() - 1]).count();
        assert!(missing > 0 && (LINES..LINES + tries).contains(&(whole + missing)), "{missing}");
        assert!(whole > 100, "{whole}");
        assert_eq!(lines.last().unwrap(), "the last");
    }

    #[test]
    fn a_pipe_that_nobody_reads_keeps_no_line_waiting_and_says_later_how_many_are_missing() {
        let (reader, writer) = io::pipe().unwrap();
        let log = Log::to(writer.as_fd());
        assert!(matches!(log.state().way, Way::Pipe(_)));
        check(&read_late(&log, reader));
    }

    #[test]
    fn another_users_pipe_and_a_socket_keep_no_line_waiting() {
        let (reader, writer) = io::pipe().unwrap();
        let log = Log::by(Way::OthersPipe(writer.into()));
        check(&read_late(&log, reader));
        let (reader, writer) = UnixStream::pair().unwrap();
        let log = Log::to(writer.as_fd());
        assert!(matches!(log.state().way, Way::Socket(_)));
        check(&read_late(&log, reader));
    }

    #[test]
    fn a_file_is_written_at_its_end_and_a_closed_pipe_ends_nobody() {
        let path = std::env::temp_dir().join(format!("forge-log-{}", std::process::id()));
        let file = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        (&file).write_all(b"before\n").unwrap();
        (&Log::to(file.as_fd())).write_all(b"after\n").unwrap();
        let mut said = String::new();
        std::fs::File::open(&path).unwrap().read_to_string(&mut said).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(said, "before\nafter\n");
        let (reader, writer) = io::pipe().unwrap();
        let log = Log::to(writer.as_fd());
        drop(reader);
        (&log).write_all(LINE).unwrap();
    }

    #[test]
    fn who_waits_for_the_end_of_a_log_that_was_left_is_not_kept() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let (mut socket, other) = UnixStream::pair().unwrap();
        let logs = [Log::to(writer.as_fd()), Log::to(other.as_fd())];
        drop((writer, other));
        for log in &logs {
            writeln!(&mut &*log, "before").unwrap();
            assert!(log.leave());
            writeln!(&mut &*log, "after").unwrap();
        }
        let mut read = [String::new(), String::new()];
        reader.read_to_string(&mut read[0]).unwrap();
        socket.read_to_string(&mut read[1]).unwrap();
        assert_eq!(read, ["before\n", "before\n"]);
        assert!(!Log::to(File::open("/dev/null").unwrap().as_fd()).leave());
    }
}
