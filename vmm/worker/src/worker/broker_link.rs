//! The run's connection to the broker: calls out, answers in. Every wait
//! ends when the run is stopped, so none outlasts its deadline.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;

use forge_protocol::codec;
use forge_protocol::frame::{self, Assembler, Kind};
use forge_protocol::guest::{Call, Settled};

use crate::link::send_now;
use crate::machine::Stop;

/// Why the link is of no further use.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The run was stopped while it waited.
    #[error("stopped")]
    Stopped,
    /// The connection is gone.
    #[error("the connection to the toolbroker is gone: {0}")]
    Lost(io::Error),
    /// What came is not what a broker sends.
    #[error("the toolbroker broke the protocol: {0}")]
    Protocol(String),
}

/// The connection.
#[derive(Debug)]
pub struct BrokerLink {
    socket: UnixStream,
    assembler: Assembler,
    settled: VecDeque<Settled>,
    out: Vec<u8>,
}

impl BrokerLink {
    /// Takes over a connection that is open at the broker for this run.
    #[must_use]
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, assembler: Assembler::default(), settled: VecDeque::new(), out: Vec::new() }
    }

    /// Sends a call.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(super) fn call(&mut self, call: &Call, stop: &Stop) -> Result<(), LinkError> {
        self.out.clear();
        frame::write_message(Kind::Call, call, &mut self.out);
        let mut sent = 0;
        while sent < self.out.len() {
            match send_now(self.socket.as_raw_fd(), &self.out[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(self.socket.as_raw_fd(), libc::POLLOUT, stop)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LinkError::Lost(error)),
            }
        }
        Ok(())
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// [`LinkError`].
    pub(super) fn receive(&mut self, stop: &Stop) -> Result<Settled, LinkError> {
        loop {
            if let Some(settled) = self.settled.pop_front() {
                return Ok(settled);
            }
            wait(self.socket.as_raw_fd(), libc::POLLIN, stop)?;
            self.fill()?;
        }
    }

    /// Takes in what the socket has, without waiting.
    fn fill(&mut self) -> Result<(), LinkError> {
        let mut buffer = [0u8; 4 * 1024];
        loop {
            let mut input: &[u8] = match receive(self.socket.as_raw_fd(), &mut buffer) {
                Ok(0) => return Err(LinkError::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => &buffer[..bytes],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(LinkError::Lost(error)),
            };
            let whole = input.len() < buffer.len();
            while !input.is_empty() {
                let awaits = |kind: Kind| (kind == Kind::Settled).then(|| kind.payload_bytes_max());
                let frame = self.assembler.next(&mut input, awaits);
                if let Some(frame) = frame.map_err(|e| LinkError::Protocol(e.to_string()))? {
                    let settled = codec::decode(&frame.payload)
                        .map_err(|e| LinkError::Protocol(e.to_string()))?;
                    self.settled.push_back(settled);
                }
            }
            if whole {
                return Ok(());
            }
        }
    }
}

/// What there is to receive, without waiting for more.
fn receive(socket: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the slice is writable for its whole length.
    let received =
        unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Waits for one of these events, or a stop.
fn wait(descriptor: RawFd, events: i16, stop: &Stop) -> Result<(), LinkError> {
    loop {
        if stop.raised() {
            return Err(LinkError::Stopped);
        }
        let mut polled = libc::pollfd { fd: descriptor, events, revents: 0 };
        // SAFETY: one valid pollfd. There is no time-out: the stop interrupts
        // it, again and again.
        if unsafe { libc::poll(&raw mut polled, 1, -1) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(LinkError::Lost(error));
        }
    }
}
