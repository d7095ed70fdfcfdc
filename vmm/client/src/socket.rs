//! The connection under tokio.
//!
//! A unix socket has room to write again whenever its peer takes something, and
//! tokio's own type wakes for that: after each order, in the middle of the
//! service's receive call, only to find that it does not write. This one is
//! watched for what there is to read alone, and for room only while a write
//! waits for it.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A stream socket. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Socket(Arc<AsyncFd<UnixStream>>);

impl Socket {
    pub(crate) fn new(socket: tokio::net::UnixStream) -> io::Result<Self> {
        Ok(Self(Arc::new(watched(socket.into_std()?, Interest::READABLE)?)))
    }

    /// Reads what there is, at most as much as there is room for: 0 bytes at
    /// the end. Dropped before, nothing is taken.
    pub(crate) async fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            if let Ok(read) = ready.try_io(|socket| socket.get_ref().read(room)) {
                // All that there was: another read would only say so.
                if read.as_ref().is_ok_and(|bytes| (1..room.len()).contains(bytes)) {
                    ready.clear_ready();
                }
                return read;
            }
        }
    }

    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.0.get_ref().write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => self.room().await?,
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Waits until something can be written, by a descriptor of its own.
    async fn room(&self) -> io::Result<()> {
        let socket = self.0.get_ref().try_clone()?;
        watched(socket, Interest::WRITABLE)?.writable().await.map(drop)
    }

    /// Says that nothing more is written.
    pub(crate) fn finish(&self) {
        // It fails where the other side is gone.
        let _ = self.0.get_ref().shutdown(Shutdown::Write);
    }
}

#[expect(
    deprecated,
    reason = "what replaces it is unsafe, for types that may change their descriptor \
              while it is watched; a UnixStream cannot"
)]
fn watched(socket: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    AsyncFd::with_interest(socket, interest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_does_not_fit_is_written_when_there_is_room_and_read_in_pieces() {
        let (near, far) = tokio::net::UnixStream::pair().unwrap();
        let (near, far) = (Socket::new(near).unwrap(), Socket::new(far).unwrap());
        let sent: Vec<u8> = (0..4_000_000_u32).map(|it| it as u8).collect();
        let bytes = sent.clone();
        let writing = tokio::spawn(async move {
            near.write_all(&bytes).await.unwrap();
            near.finish();
            near
        });
        let (mut got, mut room) = (Vec::new(), [0; 5000]);
        loop {
            match far.read(&mut room).await.unwrap() {
                0 => break,
                bytes => got.extend_from_slice(&room[..bytes]),
            }
        }
        assert!(got == sent);
        drop(writing.await.unwrap());
    }
}
