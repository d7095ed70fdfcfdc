//! Frames, and the descriptors that ride with them, on a unix stream socket.
//!
//! The peer is distrusted: a header is checked, and held against what this
//! side awaits, before its payload is allocated; a descriptor comes in
//! close-on-exec, so that no tool server inherits it, and one that nobody
//! awaits ends the link. A read takes no byte beyond the frame it reads, so
//! that a descriptor belongs to exactly one frame. Deliberately absent is any
//! meaning of a frame.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;

use forge_protocol::codec::{self, BorrowDecode, CodecError};
use forge_protocol::frame::{FrameError, HEADER_BYTES, Header, Kind};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// How a link ends before its time. Each of these closes it.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The socket failed.
    #[error("the link failed: {0}")]
    Io(#[from] io::Error),
    /// The peer sent no frame, or one out of turn.
    #[error("the peer broke the protocol: {0}")]
    Frame(#[from] FrameError),
    /// The peer sent a frame whose payload does not decode.
    #[error("the peer broke the protocol: in a {kind:?} frame {error}")]
    Payload {
        /// The frame's kind.
        kind: Kind,
        /// What is wrong with it.
        error: CodecError,
    },
    /// The peer closed in the middle of a frame.
    #[error("the peer closed the link in the middle of a frame")]
    CutOff,
    /// The peer passed a descriptor where none belongs, or several.
    #[error("the peer passed descriptors where none belong")]
    Descriptors,
}

/// One frame with what rode along.
#[derive(Debug)]
pub struct Received {
    /// What the payload is.
    pub kind: Kind,
    /// The payload.
    pub payload: Vec<u8>,
    /// The descriptor that came with the frame's first byte.
    pub descriptor: Option<OwnedFd>,
}

impl Received {
    /// Decodes the payload as the message of its kind.
    ///
    /// # Errors
    /// [`LinkError::Payload`].
    pub fn message<T: for<'a> BorrowDecode<'a, ()>>(&self) -> Result<T, LinkError> {
        codec::decode(&self.payload).map_err(|error| LinkError::Payload { kind: self.kind, error })
    }
}

/// Makes a descriptor that the kernel says is a unix stream socket ready for
/// this process's event loop.
///
/// # Errors
/// If it is none, or the kernel refuses.
pub fn stream_of(descriptor: OwnedFd) -> io::Result<UnixStream> {
    let kind = rustix::net::sockopt::socket_type(&descriptor)?;
    let domain = rustix::net::sockopt::socket_domain(&descriptor)?;
    if kind != rustix::net::SocketType::STREAM || domain != rustix::net::AddressFamily::UNIX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a unix stream socket"));
    }
    let stream = StdStream::from(descriptor);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// The receiving side of a link.
#[derive(Debug)]
pub struct Receiver(OwnedReadHalf);

/// The sending side of a link.
#[derive(Debug)]
pub struct Sender(OwnedWriteHalf);

/// Both sides of a link.
#[must_use]
pub fn split(stream: UnixStream) -> (Receiver, Sender) {
    let (receiver, sender) = stream.into_split();
    (Receiver(receiver), Sender(sender))
}

impl Receiver {
    /// The next frame, or `None` if the peer closed between two frames.
    ///
    /// `awaits` says, per kind, the payload bound at this moment, or `None`
    /// for a kind that is out of turn. `descriptor` says whether one may ride
    /// along. Not to be called again after it was dropped half-way.
    ///
    /// # Errors
    /// [`LinkError`]; the link is of no further use.
    pub async fn receive(
        &mut self,
        descriptor: bool,
        awaits: impl FnOnce(Kind) -> Option<u32>,
    ) -> Result<Option<Received>, LinkError> {
        let mut header = [0; HEADER_BYTES];
        let mut riders = Vec::new();
        let mut filled = 0;
        while filled < HEADER_BYTES {
            let got = self.read(&mut header[filled..], &mut riders).await?;
            if got == 0 {
                return if filled == 0 { Ok(None) } else { Err(LinkError::CutOff) };
            }
            filled += got;
            if !riders.is_empty() && !descriptor {
                return Err(LinkError::Descriptors);
            }
        }
        let Header { kind, payload_bytes } = Header::from_bytes(header)?;
        let limit = awaits(kind).ok_or(FrameError::Unexpected { kind })?;
        if payload_bytes > limit {
            return Err(FrameError::Oversized { kind, got: payload_bytes, limit }.into());
        }
        let mut payload = vec![0; payload_bytes as usize];
        let mut filled = 0;
        let before = riders.len();
        while filled < payload.len() {
            let got = self.read(&mut payload[filled..], &mut riders).await?;
            if got == 0 {
                return Err(LinkError::CutOff);
            }
            filled += got;
        }
        if riders.len() > before || riders.len() > 1 {
            return Err(LinkError::Descriptors);
        }
        Ok(Some(Received { kind, payload, descriptor: riders.pop() }))
    }

    async fn read(&self, buffer: &mut [u8], riders: &mut Vec<OwnedFd>) -> Result<usize, LinkError> {
        let stream: &UnixStream = self.0.as_ref();
        let (bytes, flags) = stream
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let received = rustix::net::recvmsg(
                    stream.as_fd(),
                    &mut [IoSliceMut::new(buffer)],
                    &mut control,
                    RecvFlags::CMSG_CLOEXEC,
                )?;
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                        riders.extend(descriptors);
                    }
                }
                Ok((received.bytes, received.flags))
            })
            .await?;
        if flags.contains(ReturnFlags::CTRUNC) {
            return Err(LinkError::Descriptors);
        }
        Ok(bytes)
    }
}

impl Sender {
    /// Sends whole frames, as written by [`forge_protocol::frame`].
    ///
    /// # Errors
    /// [`LinkError::Io`].
    pub async fn send(&mut self, frames: &[u8]) -> Result<(), LinkError> {
        Ok(self.0.write_all(frames).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::frame;

    fn pair() -> (UnixStream, Receiver) {
        let (near, far) = UnixStream::pair().unwrap();
        (near, split(far).0)
    }

    fn any(kind: Kind) -> Option<u32> {
        Some(kind.payload_bytes_max())
    }

    #[tokio::test]
    async fn frames_arrive_whole_and_the_end_is_seen() {
        let (mut near, mut far) = pair();
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, b"alpha", &mut bytes);
        frame::write_raw(Kind::Input, b"", &mut bytes);
        near.write_all(&bytes).await.unwrap();
        drop(near);
        let first = far.receive(false, any).await.unwrap().unwrap();
        assert_eq!((first.kind, first.payload.as_slice()), (Kind::Output, b"alpha".as_slice()));
        assert_eq!(far.receive(false, any).await.unwrap().unwrap().kind, Kind::Input);
        assert!(far.receive(false, any).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn frames_out_of_turn_oversized_or_cut_off_end_the_link() {
        let (mut near, mut far) = pair();
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, b"alpha", &mut bytes);
        near.write_all(&bytes).await.unwrap();
        let refused = far.receive(false, |_| None).await.unwrap_err();
        assert!(matches!(refused, LinkError::Frame(FrameError::Unexpected { .. })), "{refused}");

        let (mut near, mut far) = pair();
        near.write_all(&bytes).await.unwrap();
        let refused = far.receive(false, |_| Some(4)).await.unwrap_err();
        assert!(matches!(refused, LinkError::Frame(FrameError::Oversized { .. })), "{refused}");

        let (mut near, mut far) = pair();
        near.write_all(&bytes[..10]).await.unwrap();
        drop(near);
        assert!(matches!(far.receive(false, any).await, Err(LinkError::CutOff)));
    }

    #[tokio::test]
    async fn only_unix_streams_become_links() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(stream_of(file.into()).is_err());
        let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        assert!(stream_of(datagram.into()).is_err());
        let (stream, _other) = StdStream::pair().unwrap();
        stream_of(stream.into()).unwrap();
    }
}
