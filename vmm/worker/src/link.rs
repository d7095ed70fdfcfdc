//! Frames over unix sockets between our own processes: with a deadline, with
//! a descriptor that rides along, and without a signal when the peer is gone.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forge_protocol::frame::{Assembler, Frame, Kind};

use crate::cancel::Cancel;

/// What one receive call takes in at most, in bytes. Pages that no message
/// reaches are never touched.
const RECEIVE_BYTES: usize = 64 * 1024;

/// How long to wait for the other side, and for whose sake.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience<'a> {
    /// Until then; for ever, if nothing is said.
    pub until: Option<Instant>,
    /// Until this is raised.
    pub cancel: Option<&'a Cancel>,
}

impl Patience<'_> {
    /// Patience that ends at `until` and cannot be cancelled.
    #[must_use]
    pub fn until(until: Instant) -> Self {
        Self { until: Some(until), cancel: None }
    }

    /// The same, over at `latest` if it were not before.
    #[must_use]
    pub fn no_later_than(self, latest: Instant) -> Self {
        Self { until: Some(self.until.map_or(latest, |until| until.min(latest))), ..self }
    }

    /// Whether its time is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Whether nobody wants it any more.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(Cancel::is_raised)
    }
}

/// Why a descriptor was not passed, or what goes with it not all sent. Nothing makes an
/// `io::Error` of it, lest the first be taken for a link that broke.
#[derive(Debug)]
pub enum Unpassed {
    /// All processes of this user together have more descriptors under way than this
    /// one may have open. Nothing was sent, and the link is as good as before.
    TooManyUnderWay,
    /// The link is of no further use, or patience was over: as with [`Link::send`].
    Link(io::Error),
}

impl fmt::Display for Unpassed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyUnderWay => {
                let error = io::Error::from_raw_os_error(libc::ETOOMANYREFS);
                write!(f, "too many descriptors of this user are under way: {error}")
            }
            Self::Link(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Unpassed {}

/// How often it is tried to pass a descriptor while too many are under way, and how
/// long it is waited in between, in milliseconds.
const PASSES_MAX: u32 = 100;
const PASS_AGAIN_AFTER_MS: libc::c_int = 1;

/// Patience with descriptors that are under way. Those of a service that is no root are
/// under way to workers that begin, to its zygote and to its broker, and soon arrive.
/// Where they do not, that is no reason to end any of these.
#[derive(Debug)]
pub struct Arrivals {
    left: u32,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self { left: PASSES_MAX - 1 }
    }
}

impl Arrivals {
    /// Waits a moment, after which it is worth while to try again.
    ///
    /// # Errors
    /// [`Unpassed`]: it was tried often enough, or patience is over.
    pub fn wait(&mut self, patience: Patience<'_>) -> Result<(), Unpassed> {
        self.left = self.left.checked_sub(1).ok_or(Unpassed::TooManyUnderWay)?;
        if patience.is_over() {
            return Err(Unpassed::Link(io::ErrorKind::TimedOut.into()));
        }
        // SAFETY: waits for no descriptor, but for the time.
        unsafe { libc::poll(std::ptr::null_mut(), 0, PASS_AGAIN_AFTER_MS) };
        if patience.is_cancelled() {
            return Err(Unpassed::Link(io::ErrorKind::ConnectionAborted.into()));
        }
        Ok(())
    }
}

/// One end of a socket on which whole frames travel.
#[derive(Debug)]
pub struct Link {
    socket: UnixStream,
    assembler: Assembler,
    /// Received, and not yet looked at.
    buffer: Vec<u8>,
    at: usize,
    /// The descriptor that came last and was not taken.
    passed: Option<OwnedFd>,
}

impl Link {
    /// A link over a connected socket.
    #[must_use]
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, assembler: Assembler::default(), buffer: Vec::new(), at: 0, passed: None }
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends bytes, all of them.
    ///
    /// # Errors
    /// What the kernel said; `TimedOut` if the peer takes nothing until then.
    pub fn send(&mut self, mut bytes: &[u8], patience: Patience<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            match send_now(self.socket.as_raw_fd(), bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.send_on(error, patience)?,
            }
        }
        Ok(())
    }

    /// The same with a descriptor, which rides along with the first byte. What is
    /// still in `passed` afterwards, the peer was not given.
    ///
    /// # Errors
    /// [`Unpassed`].
    pub fn pass(
        &mut self,
        mut bytes: &[u8],
        passed: &mut Option<BorrowedFd<'_>>,
        patience: Patience<'_>,
    ) -> Result<(), Unpassed> {
        let mut arrivals = Arrivals::default();
        while let Some(descriptor) = *passed {
            match pass_now(self.socket.as_raw_fd(), bytes, descriptor) {
                Ok(sent) => {
                    bytes = &bytes[sent..];
                    *passed = None;
                }
                Err(Unpassed::TooManyUnderWay) => arrivals.wait(patience)?,
                Err(Unpassed::Link(error)) => {
                    self.send_on(error, patience).map_err(Unpassed::Link)?;
                }
            }
        }
        self.send(bytes, patience).map_err(Unpassed::Link)
    }

    /// Waits after a send call that took nothing, where it may take something later.
    fn send_on(&self, error: io::Error, patience: Patience<'_>) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::WouldBlock => wait(self.socket.as_raw_fd(), libc::POLLOUT, patience),
            io::ErrorKind::Interrupted => Ok(()),
            _ => Err(error),
        }
    }

    /// Receives the next frame, which must be of a kind that is awaited.
    ///
    /// # Errors
    /// What the kernel said; `TimedOut`, `UnexpectedEof` if the peer is gone,
    /// `ConnectionAborted` if nobody wants it any more, `InvalidData` for what
    /// is no awaited frame.
    pub fn receive(
        &mut self,
        awaits: impl Fn(Kind) -> bool,
        patience: Patience<'_>,
    ) -> io::Result<Frame> {
        self.receive_within(|kind| awaits(kind).then(|| kind.payload_bytes_max()), patience)
    }

    /// The same, of a payload that is bounded further: `None` for a kind that is not
    /// awaited, and in bytes.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_within(
        &mut self,
        bound: impl Fn(Kind) -> Option<u32>,
        patience: Patience<'_>,
    ) -> io::Result<Frame> {
        loop {
            if let Some(frame) = self.next(&bound)? {
                return Ok(frame);
            }
            wait(self.socket.as_raw_fd(), libc::POLLIN, patience)?;
            match self.fill() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether anything is there to be received, be it the peer's end.
    #[must_use]
    pub fn has_something(&self) -> bool {
        let mut polled =
            libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd; it does not wait.
        let found = unsafe { libc::poll(&raw mut polled, 1, 0) };
        self.at < self.buffer.len() || found > 0
    }

    /// The descriptor that came with what was received.
    pub fn take_passed(&mut self) -> Option<OwnedFd> {
        self.passed.take()
    }

    fn next(&mut self, bound: &impl Fn(Kind) -> Option<u32>) -> io::Result<Option<Frame>> {
        while self.at < self.buffer.len() {
            let mut input = &self.buffer[self.at..];
            let frame = self.assembler.next(&mut input, bound);
            self.at = self.buffer.len() - input.len();
            match frame {
                Ok(None) => {}
                Ok(frame) => return Ok(frame),
                Err(error) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string()));
                }
            }
        }
        Ok(None)
    }

    /// Has the room that the next receive call takes in to.
    pub(crate) fn make_room(&mut self) {
        self.buffer.clear();
        self.buffer.reserve(RECEIVE_BYTES);
        self.at = 0;
    }

    fn fill(&mut self) -> io::Result<()> {
        self.make_room();
        match receive_once(self.socket.as_raw_fd(), &mut self.buffer)? {
            (0, _) => Err(io::ErrorKind::UnexpectedEof.into()),
            (_, None) => Ok(()),
            (_, passed) => {
                self.passed = passed;
                Ok(())
            }
        }
    }
}

/// A control message that carries one descriptor, in bytes.
// SAFETY: computes a size.
const ONE_DESCRIPTOR: usize = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as usize;

/// Room for it, aligned as `cmsghdr` is.
#[repr(C)]
union ControlRoom {
    bytes: [u8; 32],
    _align: libc::cmsghdr,
}

const _: () = assert!(ONE_DESCRIPTOR <= size_of::<ControlRoom>());

/// One `sendto`, which waits as the socket does.
///
/// # Errors
/// What the kernel said.
pub fn send_once(socket: RawFd, bytes: &[u8]) -> io::Result<usize> {
    send_plain(socket, bytes, 0)
}

/// One `sendto`, which does not wait whatever the socket does.
///
/// # Errors
/// What the kernel said.
pub fn send_now(socket: RawFd, bytes: &[u8]) -> io::Result<usize> {
    send_plain(socket, bytes, libc::MSG_DONTWAIT)
}

/// The same with a descriptor: a `sendmsg`, which no worker's filter allows.
///
/// # Errors
/// [`Unpassed`]; nothing was sent.
pub fn pass_now(socket: RawFd, bytes: &[u8], passed: BorrowedFd<'_>) -> Result<usize, Unpassed> {
    send_with(socket, bytes, passed).map_err(|error| match error.raw_os_error() {
        Some(libc::ETOOMANYREFS) => Unpassed::TooManyUnderWay,
        _ => Unpassed::Link(error),
    })
}

fn send_plain(socket: RawFd, bytes: &[u8], flags: libc::c_int) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | flags;
    // SAFETY: the slice is readable for its whole length.
    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

fn send_with(socket: RawFd, bytes: &[u8], passed: BorrowedFd<'_>) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = ControlRoom { bytes: [0; 32] };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // SAFETY: the room is large enough for one descriptor (asserted above),
    // so there is a first header, and it is aligned.
    unsafe {
        message.msg_controllen = ONE_DESCRIPTOR;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = ONE_DESCRIPTOR;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(passed.as_raw_fd());
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message names memory that is valid for the call.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// One `recvmsg` into the buffer's free capacity: how many bytes came, and
/// the descriptor that rode along.
///
/// # Errors
/// What the kernel said.
pub(crate) fn receive_once(
    socket: RawFd,
    buffer: &mut Vec<u8>,
) -> io::Result<(usize, Option<OwnedFd>)> {
    let room = buffer.spare_capacity_mut();
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut control = ControlRoom { bytes: [0; 32] };
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // No more, so that a peer cannot fill our table with descriptors.
    message.msg_controllen = ONE_DESCRIPTOR;
    // SAFETY: the message names memory that is valid for writes.
    let received = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let bytes = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel wrote so many bytes behind the buffer's last.
    unsafe { buffer.set_len(buffer.len() + bytes) };
    // SAFETY: the kernel filled the control room as the message says; a
    // descriptor in it is new and ours. There is room for one alone, so the
    // kernel passes no second.
    let passed = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
        {
            let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            Some(OwnedFd::from_raw_fd(fd))
        } else {
            None
        }
    };
    Ok((bytes, passed))
}

/// Waits until the socket can be read or written.
///
/// Every wait for something to read goes through here, also where a receive
/// call could wait by itself: who sleeps in that is woken as well when the peer
/// takes what was sent before, as there is room to write again. That was every
/// second wake of a run.
///
/// # Errors
/// What the kernel said; `TimedOut`, or `ConnectionAborted` if nobody wants it
/// any more.
pub fn wait(socket: RawFd, events: i16, patience: Patience<'_>) -> io::Result<()> {
    loop {
        // Rounded up, so that the last wait is not a busy one.
        let ms = match patience.until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
            Some(left) => left.as_millis().saturating_add(1).min(i32::MAX as u128) as i32,
            None => -1,
        };
        // A negative descriptor is not looked at.
        let cancel = patience.cancel.map_or(-1, Cancel::as_raw_fd);
        let mut polled = [
            libc::pollfd { fd: socket, events, revents: 0 },
            libc::pollfd { fd: cancel, events: libc::POLLIN, revents: 0 },
        ];
        // SAFETY: two valid pollfds.
        if unsafe { libc::poll(polled.as_mut_ptr(), 2, ms) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
            continue;
        }
        if polled[0].revents != 0 {
            return Ok(());
        }
        if let Some(cancel) = patience.cancel
            && polled[1].revents != 0
        {
            if cancel.is_raised() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            cancel.calm();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::frame;
    use std::os::fd::AsFd as _;

    fn pair() -> (Link, Link) {
        let (a, b) = UnixStream::pair().unwrap();
        (Link::new(a), Link::new(b))
    }

    fn output(text: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, text, &mut bytes);
        bytes
    }

    #[test]
    fn frames_arrive_whole_however_they_were_cut_and_joined() {
        let (mut a, mut b) = pair();
        let mut bytes = output(b"one");
        bytes.extend(output(&[7; 100_000]));
        let sender = std::thread::spawn(move || {
            for piece in bytes.chunks(3000) {
                a.send(piece, Patience::default()).unwrap();
            }
        });
        let until = Patience::until(Instant::now() + Duration::from_secs(30));
        assert_eq!(b.receive(|_| true, until).unwrap().payload, b"one");
        assert_eq!(b.receive(|_| true, until).unwrap().payload, [7; 100_000]);
        sender.join().unwrap();
        assert_eq!(b.receive(|_| true, until).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_descriptor_rides_along() {
        let (mut a, mut b) = pair();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut passed = Some(theirs.as_fd());
        a.pass(&output(b"x"), &mut passed, Patience::default()).unwrap();
        assert!(passed.is_none());
        drop(theirs);
        b.receive(|_| true, Patience::default()).unwrap();
        let mut passed = UnixStream::from(b.take_passed().unwrap());
        io::Write::write_all(&mut passed, b"through").unwrap();
        let mut got = [0; 7];
        io::Read::read_exact(&mut ours, &mut got).unwrap();
        assert_eq!(&got, b"through");
    }

    #[test]
    fn descriptors_under_way_are_waited_for_as_long_as_patience_lasts() {
        let tried = |patience| {
            let mut arrivals = Arrivals::default();
            let mut tried = 1;
            loop {
                match arrivals.wait(patience) {
                    Ok(()) => tried += 1,
                    Err(Unpassed::TooManyUnderWay) => return (tried, None),
                    Err(Unpassed::Link(error)) => return (tried, Some(error.kind())),
                }
            }
        };
        assert_eq!(tried(Patience::default()), (PASSES_MAX, None));
        let over = Patience::until(Instant::now());
        assert_eq!(tried(over), (1, Some(io::ErrorKind::TimedOut)));
        let cancel = Cancel::new().unwrap();
        cancel.raise();
        let unwanted = Patience { until: None, cancel: Some(&cancel) };
        assert_eq!(tried(unwanted), (1, Some(io::ErrorKind::ConnectionAborted)));
    }

    #[test]
    fn what_is_not_awaited_is_refused_and_silence_ends() {
        let (mut a, mut b) = pair();
        a.send(&output(b"x"), Patience::default()).unwrap();
        let refused = b.receive(|kind| kind == Kind::Report, Patience::default()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        let (_a, mut b) = pair();
        let until = Patience::until(Instant::now() + Duration::from_millis(5));
        assert_eq!(b.receive(|_| true, until).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_peer_that_takes_nothing_holds_nobody_up() {
        let more_than_a_socket_holds = vec![7; 4 << 20];
        let (mut a, _b) = pair();
        let until = Patience::until(Instant::now() + Duration::from_millis(20));
        let error = a.send(&more_than_a_socket_holds, until).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let (mut a, _b) = pair();
        let cancel = Cancel::new().unwrap();
        cancel.raise();
        let patience = Patience { until: None, cancel: Some(&cancel) };
        let error = a.send(&more_than_a_socket_holds, patience).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    }

    /// How often this thread gave its CPU up to wait.
    fn waits(thread: i32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.unwrap().trim().parse().unwrap()
    }

    fn sleeps(thread: i32) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('S')
    }

    #[test]
    fn who_waits_sleeps_on_when_the_other_side_takes_what_was_sent() {
        let (mut a, mut b) = pair();
        a.send(&output(b"order"), Patience::default()).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            // SAFETY: has no preconditions.
            tell.send(unsafe { libc::gettid() }).unwrap();
            a.receive(|_| true, Patience::default()).unwrap().payload
        });
        let thread = told.recv().unwrap();
        let pause = || std::thread::sleep(Duration::from_millis(20));
        // Twice, as it may sleep for another reason before.
        for _ in 0..2 {
            pause();
            while !sleeps(thread) {
                pause();
            }
        }
        let before = waits(thread);
        assert_eq!(b.receive(|_| true, Patience::default()).unwrap().payload, b"order");
        pause();
        assert_eq!(waits(thread), before, "it woke, and nothing was there");
        b.send(&output(b"answer"), Patience::default()).unwrap();
        assert_eq!(waiting.join().unwrap(), b"answer");
    }

    #[test]
    fn a_wait_ends_when_it_is_cancelled_and_a_nudge_does_not_end_it() {
        let (mut a, mut b) = pair();
        let cancel = Cancel::new().unwrap();
        let patience = Patience { until: None, cancel: Some(&cancel) };
        cancel.nudge();
        a.send(&output(b"x"), Patience::default()).unwrap();
        assert_eq!(b.receive(|_| true, patience).unwrap().payload, b"x");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                cancel.raise();
            });
            let error = b.receive(|_| true, patience).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        });
    }
}
