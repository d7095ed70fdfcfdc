//! Frames, and the descriptors that ride with them, on a unix stream socket.
//!
//! The peer is distrusted: a header is checked, and held against what this
//! side awaits, before its payload is allocated; a descriptor comes in
//! close-on-exec, so that no tool server inherits it, and one that nobody
//! awaits ends the link. Deliberately absent is any meaning of a frame.
//!
//! | link | reads | writes |
//! |---|---|---|
//! | [`split`]: control | no byte beyond the frame, so that a descriptor belongs to exactly one | waits for room |
//! | [`split_plain`]: run | ahead, since no descriptor may come: one system call takes a whole small frame | at once what there is room for, and keeps the rest |

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;

use forge_protocol::codec::{self, BorrowDecode, CodecError};
use forge_protocol::frame::{Frame, FrameError, HEADER_BYTES, Header, Incoming, Kind};
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
    /// What came with the frame's first byte.
    pub rider: Rider,
}

/// A descriptor that rides with a frame.
#[derive(Debug, Default)]
pub enum Rider {
    /// None was sent.
    #[default]
    None,
    /// This one.
    Came(OwnedFd),
    /// One was sent, and this process had no descriptor left to take it with: the
    /// kernel closed it.
    Dropped,
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

/// The receiving side of a link on which descriptors may ride.
#[derive(Debug)]
pub struct Receiver {
    half: OwnedReadHalf,
    header: [u8; HEADER_BYTES],
    header_bytes: usize,
    /// The frame whose payload is still coming, and how much of it is there.
    open: Option<(Received, usize)>,
    riders: Riders,
}

/// What came along with the bytes that were read.
#[derive(Debug, Default)]
struct Riders {
    came: Vec<OwnedFd>,
    is_dropped: bool,
}

impl Riders {
    /// The one of a frame.
    fn take(&mut self) -> Rider {
        match (self.came.pop(), std::mem::take(&mut self.is_dropped)) {
            (Some(descriptor), _) => Rider::Came(descriptor),
            (None, true) => Rider::Dropped,
            (None, false) => Rider::None,
        }
    }
}

/// The sending side of a link, which waits for room.
#[derive(Debug)]
pub struct Sender(OwnedWriteHalf);

/// Both sides of a link on which descriptors may ride.
#[must_use]
pub fn split(stream: UnixStream) -> (Receiver, Sender) {
    let (half, sender) = stream.into_split();
    let (header, header_bytes) = ([0; HEADER_BYTES], 0);
    let receiver = Receiver { half, header, header_bytes, open: None, riders: Riders::default() };
    (receiver, Sender(sender))
}

impl Receiver {
    /// The next frame, or `None` if the peer closed between two frames.
    ///
    /// `awaits` says, per kind, the payload bound at this moment, or `None`
    /// for a kind that is out of turn. `descriptor` says whether one may ride
    /// along. The future may be dropped half-way: the next one goes on.
    ///
    /// # Errors
    /// [`LinkError`]; the link is of no further use.
    pub async fn receive(
        &mut self,
        descriptor: bool,
        awaits: impl FnOnce(Kind) -> Option<u32>,
    ) -> Result<Option<Received>, LinkError> {
        let stream: &UnixStream = self.half.as_ref();
        if self.open.is_none() {
            while self.header_bytes < HEADER_BYTES {
                let missing = &mut self.header[self.header_bytes..];
                let got = read(stream, missing, &mut self.riders).await?;
                if got == 0 {
                    return if self.header_bytes == 0 { Ok(None) } else { Err(LinkError::CutOff) };
                }
                self.header_bytes += got;
                if self.riders.came.len() > usize::from(descriptor) {
                    return Err(LinkError::Descriptors);
                }
            }
            let Header { kind, payload_bytes } = Header::from_bytes(self.header)?;
            let limit = awaits(kind).ok_or(FrameError::Unexpected { kind })?;
            if payload_bytes > limit {
                return Err(FrameError::Oversized { kind, got: payload_bytes, limit }.into());
            }
            self.header_bytes = 0;
            let (payload, rider) = (vec![0; payload_bytes as usize], self.riders.take());
            self.open = Some((Received { kind, payload, rider }, 0));
        }
        if let Some((frame, filled)) = &mut self.open {
            while *filled < frame.payload.len() {
                let got = read(stream, &mut frame.payload[*filled..], &mut self.riders).await?;
                if got == 0 {
                    return Err(LinkError::CutOff);
                }
                *filled += got;
                if !self.riders.came.is_empty() {
                    return Err(LinkError::Descriptors);
                }
            }
        }
        Ok(self.open.take().map(|(frame, _)| frame))
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

/// Waits for bytes and takes them; any descriptor that came goes to `riders`.
async fn read(
    stream: &UnixStream,
    buffer: &mut [u8],
    riders: &mut Riders,
) -> Result<usize, LinkError> {
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
                    riders.came.extend(descriptors);
                }
            }
            Ok((received.bytes, received.flags))
        })
        .await?;
    if flags.contains(ReturnFlags::CTRUNC) {
        if !riders.came.is_empty() {
            return Err(LinkError::Descriptors);
        }
        // With none at all there was no room in our own table: whoever needs the
        // descriptor says so, and the link goes on.
        riders.is_dropped = true;
    }
    Ok(bytes)
}

/// What is read ahead at once on a plain link, in bytes.
const AHEAD_BYTES: usize = 16 * 1024;

/// The receiving side of a link on which no descriptor may ride.
#[derive(Debug)]
pub struct PlainReceiver {
    half: OwnedReadHalf,
    incoming: Incoming,
}

/// The sending side of a link, which never waits: what there is no room for
/// is kept.
#[derive(Debug)]
pub struct PlainSender {
    half: OwnedWriteHalf,
    unsent: VecDeque<Vec<u8>>,
    /// How much of the first of them is sent.
    sent_bytes: usize,
}

/// Both sides of a link on which no descriptor may ride.
#[must_use]
pub fn split_plain(stream: UnixStream) -> (PlainReceiver, PlainSender) {
    let (receiving, sending) = stream.into_split();
    let receiver = PlainReceiver { half: receiving, incoming: Incoming::new(AHEAD_BYTES) };
    (receiver, PlainSender { half: sending, unsent: VecDeque::new(), sent_bytes: 0 })
}

impl PlainReceiver {
    /// The next frame, or `None` if the peer closed between two frames.
    /// `awaits` is that of [`Receiver::receive`]. The future may be dropped
    /// half-way: the next one goes on.
    ///
    /// # Errors
    /// [`LinkError`]; the link is of no further use.
    pub async fn receive(
        &mut self,
        awaits: impl Fn(Kind) -> Option<u32>,
    ) -> Result<Option<Frame>, LinkError> {
        loop {
            if let Some(frame) = self.incoming.next(&awaits)? {
                return Ok(Some(frame));
            }
            let mut riders = Riders::default();
            let got = read(self.half.as_ref(), self.incoming.room(), &mut riders).await?;
            if !riders.came.is_empty() {
                return Err(LinkError::Descriptors);
            }
            if got == 0 {
                let whole = self.incoming.is_between_frames();
                return if whole { Ok(None) } else { Err(LinkError::CutOff) };
            }
            self.incoming.filled(got);
        }
    }
}

impl PlainReceiver {
    /// Waits until the peer has closed its side. What it sends until then is not read, and
    /// so is bounded by what the socket takes.
    pub async fn left(&self) {
        let stream: &UnixStream = self.half.as_ref();
        while let Ok(ready) = stream.ready(Interest::READABLE).await {
            if ready.is_read_closed() {
                return;
            }
            // Until something else happens.
            let seen = || Err::<(), _>(io::Error::from(io::ErrorKind::WouldBlock));
            let _ = stream.try_io(Interest::READABLE, seen);
        }
    }
}

impl PlainSender {
    /// Sends a frame as far as there is room, behind those that still wait.
    ///
    /// # Errors
    /// [`LinkError::Io`].
    pub fn send(&mut self, frame: Vec<u8>) -> Result<(), LinkError> {
        self.unsent.push_back(frame);
        if self.unsent.len() == 1 { self.send_some() } else { Ok(()) }
    }

    /// Frames that are not wholly sent.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.unsent.len()
    }

    /// Waits for room and sends what fits. Waits for ever if nothing is
    /// unsent. The future may be dropped half-way.
    ///
    /// # Errors
    /// [`LinkError::Io`].
    pub async fn go_on(&mut self) -> Result<(), LinkError> {
        if self.unsent.is_empty() {
            std::future::pending::<()>().await;
        }
        self.half.writable().await?;
        self.send_some()
    }

    fn send_some(&mut self) -> Result<(), LinkError> {
        while let Some(frame) = self.unsent.front() {
            match self.half.try_write(&frame[self.sent_bytes..]) {
                Ok(bytes) => self.sent_bytes += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if self.sent_bytes == frame.len() {
                self.unsent.pop_front();
                self.sent_bytes = 0;
            }
        }
        Ok(())
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
    async fn a_frame_that_comes_in_pieces_survives_a_wait_that_is_given_up() {
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, &[7; 40], &mut bytes);
        let (mut near, mut far) = pair();
        let (mut plain_near, plain_far) = UnixStream::pair().unwrap();
        let (mut plain_far, _) = split_plain(plain_far);
        for piece in bytes.chunks(5) {
            near.write_all(piece).await.unwrap();
            plain_near.write_all(piece).await.unwrap();
            if piece.len() == 5 {
                let soon = std::time::Duration::from_millis(1);
                let given_up = tokio::time::timeout(soon, far.receive(false, any)).await;
                assert!(given_up.is_err());
                let given_up = tokio::time::timeout(soon, plain_far.receive(any)).await;
                assert!(given_up.is_err());
            }
        }
        assert_eq!(far.receive(false, any).await.unwrap().unwrap().payload, [7; 40]);
        assert_eq!(plain_far.receive(any).await.unwrap().unwrap().payload, [7; 40]);
    }

    #[tokio::test]
    async fn a_plain_link_keeps_what_there_is_no_room_for() {
        let (near, far) = UnixStream::pair().unwrap();
        let (mut far, _) = split_plain(far);
        let (_, mut near) = split_plain(near);
        let mut frame = Vec::new();
        frame::write_raw(Kind::Output, &[7; 100_000], &mut frame);
        for _ in 0..20 {
            near.send(frame.clone()).unwrap();
        }
        assert!(near.unsent() > 5, "{} unsent", near.unsent());
        for _ in 0..20 {
            let frame = loop {
                tokio::select! {
                    frame = far.receive(any) => break frame,
                    gone_on = near.go_on() => gone_on.unwrap(),
                }
            };
            assert_eq!(frame.unwrap().unwrap().payload.len(), 100_000);
        }
        assert_eq!(near.unsent(), 0);
    }

    #[tokio::test]
    async fn a_descriptor_on_a_plain_link_ends_it() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let (near, far) = UnixStream::pair().unwrap();
        let (mut far, _) = split_plain(far);
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, b"alpha", &mut bytes);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let riders = [near.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&riders)));
        let bytes = [io::IoSlice::new(&bytes)];
        sendmsg(near.as_fd(), &bytes, &mut control, SendFlags::empty()).unwrap();
        assert!(matches!(far.receive(any).await, Err(LinkError::Descriptors)));
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

    #[tokio::test]
    async fn whoever_leaves_is_heard_whatever_is_unread() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let (receiver, sender) = split_plain(far);
        near.write_all(&[0xFF; 40]).await.unwrap();
        let soon = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, receiver.left()).await.is_err());
        near.write_all(&[0xFF; 40]).await.unwrap();
        assert!(tokio::time::timeout(soon, receiver.left()).await.is_err());
        // The other direction's end is another matter.
        drop(sender);
        let (reads, mut writes) = near.into_split();
        assert!(tokio::time::timeout(soon, receiver.left()).await.is_err());
        writes.shutdown().await.unwrap();
        tokio::time::timeout(std::time::Duration::from_secs(30), receiver.left()).await.unwrap();
        drop(reads);
    }
}
