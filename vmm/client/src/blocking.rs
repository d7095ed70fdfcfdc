//! A client that waits for each run.

use std::io::{self, Read as _, Write as _};
use std::iter;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forge_protocol::frame::{Frame, Incoming, Kind};
use forge_protocol::parts::Contents;
use forge_protocol::service::{
    Answered, Cancel, Event, Finish, Finished, Order, Part, Query, Question, Reply, RunEvent,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::ClientError;
use crate::wire::{self, GREETING_TIME_MAX};

/// A connection to a service, for one run or question at a time.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    incoming: Incoming,
    /// The number of the next run or question.
    next: u64,
    /// A greeting is waited for by the read, which has a time-out for it.
    is_greeted: bool,
}

impl Client {
    /// Connects to the service that listens at this path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::over(reach(path, GREETING_TIME_MAX)?)
    }

    /// Connects to the service at this port of the machine with this CID
    /// (vsock(7)): 2 is the host, as seen from its virtual machines.
    ///
    /// # Errors
    /// [`ClientError`].
    #[cfg(feature = "vsock")]
    pub fn connect_vsock(cid: u32, port: u32) -> Result<Self, ClientError> {
        Self::over(crate::connect_vsock(cid, port)?)
    }

    /// Says hello over a connection that is there already.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn over(socket: UnixStream) -> Result<Self, ClientError> {
        socket.set_read_timeout(Some(GREETING_TIME_MAX))?;
        let mut client = Self { socket, incoming: wire::incoming(), next: 0, is_greeted: false };
        client.socket.write_all(&wire::hello())?;
        wire::greeted(&client.receive(wire::may_greet)?)?;
        client.socket.set_read_timeout(None)?;
        client.is_greeted = true;
        Ok(client)
    }

    /// Submits a run and waits for its end. A run that ends badly is no error:
    /// its report says how.
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone.
    pub fn run(&mut self, order: &Order) -> Result<Finish, ClientError> {
        self.run_with(order, |_| ())
    }

    /// The same; hears of events where the order asks for them.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with(
        &mut self,
        order: &Order,
        on_event: impl FnMut(RunEvent),
    ) -> Result<Finish, ClientError> {
        self.run_until(order, None, on_event)
    }

    /// The same; cancels the run once there is something to read at `cancelled`, which
    /// this does not read, and waits for its end as before.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_until(
        &mut self,
        order: &Order,
        cancelled: Option<BorrowedFd<'_>>,
        on_event: impl FnMut(RunEvent),
    ) -> Result<Finish, ClientError> {
        let number = self.number();
        // `Submit` without a copy of the program.
        self.socket.write_all(&wire::bounded(Kind::Submit, &(number, order))?)?;
        self.followed(number, cancelled, on_event).map_err(|error| match error {
            ClientError::Connection(error) => ClientError::Lost(error),
            other => other,
        })
    }

    /// A run that is submitted, to its end.
    fn followed(
        &mut self,
        number: u64,
        mut cancelled: Option<BorrowedFd<'_>>,
        mut on_event: impl FnMut(RunEvent),
    ) -> Result<Finish, ClientError> {
        let mut contents = Contents::default();
        loop {
            if let Some(cancel) = cancelled
                && is_readable(cancel)?
            {
                cancelled = None;
                // A service that has gone says so to whoever reads what it left.
                let _ = self.socket.write_all(&wire::bounded(Kind::Cancel, &Cancel { number })?);
            }
            let Some(frame) = self.receive_or(wire::may_come, cancelled)? else { continue };
            match frame.kind {
                Kind::Event => {
                    let Event { what, .. } = wire::decode(&frame)?;
                    on_event(what);
                }
                Kind::Part => match wire::decode::<Part>(&frame)? {
                    part if part.number == number => {
                        contents.take(part).map_err(wire::misplaced)?;
                    }
                    _ => return Err(out_of_turn(&frame)),
                },
                Kind::Finished => {
                    return match wire::decode::<Finished>(&frame)? {
                        end if end.number == number => {
                            contents.finish(end).map_err(wire::misplaced)
                        }
                        _ => Err(out_of_turn(&frame)),
                    };
                }
                _ => return Err(out_of_turn(&frame)),
            }
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// [`ClientError`]; a refusal is one.
    pub fn ask(&mut self, question: Question) -> Result<Reply, ClientError> {
        let number = self.number();
        self.socket.write_all(&wire::bounded(Kind::Query, &Query { number, question })?)?;
        let frame = self.receive(wire::may_come)?;
        if frame.kind != Kind::Answered {
            return Err(out_of_turn(&frame));
        }
        match wire::decode(&frame)? {
            Answered { number: of, .. } if of != number => Err(out_of_turn(&frame)),
            Answered { reply: Reply::Refused { kind, message }, .. } => {
                Err(ClientError::Refused { kind, message })
            }
            Answered { reply, .. } => Ok(reply),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn receive(&mut self, awaits: impl Fn(Kind) -> Option<u32>) -> Result<Frame, ClientError> {
        loop {
            if let Some(frame) = self.receive_or(&awaits, None)? {
                return Ok(frame);
            }
        }
    }

    /// The next frame; `None` if there is something to read at `other` first.
    fn receive_or(
        &mut self,
        awaits: impl Fn(Kind) -> Option<u32>,
        other: Option<BorrowedFd<'_>>,
    ) -> Result<Option<Frame>, ClientError> {
        loop {
            if let Some(frame) = wire::next(&mut self.incoming, &awaits)? {
                return Ok(Some(frame));
            }
            if self.is_greeted && !wait_readable(&self.socket, other)? {
                return Ok(None);
            }
            match self.socket.read(self.incoming.room()) {
                Ok(bytes) => wire::filled(&mut self.incoming, bytes)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A connection to the socket at this path. Where as many wait there as may, this
/// waits for a place, for as long as `patience`.
///
/// # Errors
/// What the kernel said; `WouldBlock` if there was no place.
pub fn reach(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let at = SocketAddrUnix::new(path)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // Of a connect it is the time-out too (socket(7)).
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    while let Err(error) = connect(&socket, &at) {
        if error != Errno::INTR {
            return Err(error.into());
        }
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

/// Waits until there is something to read, or `false` if there is at `other` first. Who
/// waits in a read is woken as well when the service takes the order, and then sleeps
/// again.
fn wait_readable(socket: &UnixStream, other: Option<BorrowedFd<'_>>) -> io::Result<bool> {
    let socket = PollFd::new(socket, PollFlags::IN);
    let mut waits: Vec<PollFd<'_>> = iter::once(socket)
        .chain(other.map(|other| PollFd::from_borrowed_fd(other, PollFlags::IN)))
        .collect();
    loop {
        match poll(&mut waits, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(waits.first().is_some_and(|it| !it.revents().is_empty())),
        }
    }
}

fn is_readable(other: BorrowedFd<'_>) -> io::Result<bool> {
    loop {
        let polled = PollFd::from_borrowed_fd(other, PollFlags::IN);
        match poll(&mut [polled], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Err(Errno::INTR) => {}
            polled => return polled.map(|ready| ready > 0).map_err(io::Error::from),
        }
    }
}

fn out_of_turn(frame: &Frame) -> ClientError {
    ClientError::Protocol(format!("a {:?} frame is out of turn", frame.kind))
}
