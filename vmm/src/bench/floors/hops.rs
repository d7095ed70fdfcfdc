//! From process to process and back.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::bare::ExitFloor;
use super::load::{Parsed, Signed};
use super::process::{fork_child, wait_for};
use super::{Case, said};
use crate::link::{Patience, wait};
use crate::machine::Hypervisor;

const PING_BYTES: usize = 64;

struct SocketFloor {
    socket: UnixStream,
    child: libc::pid_t,
}

pub(super) fn socket() -> Result<Box<dyn Case>, String> {
    let (socket, mut theirs) = UnixStream::pair().map_err(said)?;
    let child = fork_child(move || {
        let mut bytes = [0; PING_BYTES];
        while theirs.read_exact(&mut bytes).is_ok() && theirs.write_all(&bytes).is_ok() {}
    });
    Ok(Box::new(SocketFloor { child: child.map_err(said)?, socket }))
}

impl Case for SocketFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let mut bytes = [7; PING_BYTES];
        let started = Instant::now();
        self.socket.write_all(&bytes).map_err(said)?;
        self.socket.read_exact(&mut bytes).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

impl Drop for SocketFloor {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        wait_for(self.child);
    }
}

/// Processes in a row, the first of them ours: what is sent goes to the last,
/// a worker with a VM, and comes back after one exit. All wait as ours do.
struct Row {
    socket: UnixStream,
    children: Vec<libc::pid_t>,
}

/// Waits for so much, as [`crate::link`] does.
fn await_ping(socket: &mut UnixStream, bytes: &mut [u8; PING_BYTES]) -> io::Result<()> {
    wait(socket.as_raw_fd(), libc::POLLIN, Patience::default())?;
    socket.read_exact(bytes)
}

/// What a process of a row does with a ping that it got.
type Work = Box<dyn Fn() -> Result<(), String>>;

fn nothing() -> Work {
    Box::new(|| Ok(()))
}

impl Row {
    /// We and a worker, which does `work` before the exit.
    fn to_worker(work: Work) -> Result<Self, String> {
        // Where there is no KVM, here is where that can be said.
        Hypervisor::open().map_err(said)?;
        let (socket, mut ours) = UnixStream::pair().map_err(said)?;
        let child = fork_child(move || {
            if let Ok(mut guest) = ExitFloor::new() {
                let mut bytes = [0; PING_BYTES];
                while await_ping(&mut ours, &mut bytes).is_ok()
                    && work().is_ok()
                    && guest.run(1).is_ok()
                    && ours.write_all(&bytes).is_ok()
                {}
            }
            // Whoever waits for it has an end of it too.
            let _ = ours.shutdown(Shutdown::Both);
        });
        Ok(Self { children: vec![child.map_err(said)?], socket })
    }

    /// The same with one process more before the others, which does `work` and
    /// passes on.
    fn with_one_more(mut self, work: Work) -> Result<Self, String> {
        let (socket, mut before) = UnixStream::pair().map_err(said)?;
        let mut after = std::mem::replace(&mut self.socket, socket);
        let others = after.try_clone().map_err(said)?;
        let child = fork_child(move || {
            let mut bytes = [0; PING_BYTES];
            while await_ping(&mut before, &mut bytes).is_ok()
                && work().is_ok()
                && after.write_all(&bytes).is_ok()
                && await_ping(&mut after, &mut bytes).is_ok()
                && before.write_all(&bytes).is_ok()
            {}
            let _ = after.shutdown(Shutdown::Both);
            let _ = before.shutdown(Shutdown::Both);
        });
        let child = child.inspect_err(|_| {
            // They have this end as well, and are waited for.
            let _ = others.shutdown(Shutdown::Both);
        });
        self.children.push(child.map_err(said)?);
        Ok(self)
    }

    /// Passes a message there and back, and returns how long that took.
    fn pass(&mut self) -> Result<Duration, String> {
        let mut bytes = [7; PING_BYTES];
        let started = Instant::now();
        self.socket.write_all(&bytes).map_err(said)?;
        await_ping(&mut self.socket, &mut bytes).map_err(said)?;
        Ok(started.elapsed())
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        for child in &self.children {
            wait_for(*child);
        }
    }
}

/// The hops of a warm run with nothing in them: a client, a service, a worker.
struct HopsFloor(Row);

pub(super) fn hops() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(HopsFloor(Row::to_worker(nothing())?.with_one_more(nothing())?)))
}

/// The same with what a warm run does with its program, once in the service and
/// once in the worker, which also makes it ready.
pub(super) fn warm() -> Result<Box<dyn Case>, String> {
    let (ours, theirs, parsed) = (Signed::new()?, Signed::new()?, Parsed::new()?);
    let load = move || theirs.verify().and_then(|()| parsed.instantiate()).map(drop);
    let row = Row::to_worker(Box::new(load))?.with_one_more(Box::new(move || ours.verify()))?;
    Ok(Box::new(HopsFloor(row)))
}

impl Case for HopsFloor {
    fn sample(&mut self) -> Result<u64, String> {
        Ok(self.0.pass()?.as_nanos() as u64)
    }
}

/// What [`HopsFloor`] is more than the same without the service: what a door
/// costs behind which nothing is done, measured as doors are.
struct DoorFloor {
    bare: Row,
    through: Row,
    /// Whether that has the first turn, as doors have it.
    through_first: bool,
}

pub(super) fn door() -> Result<Box<dyn Case>, String> {
    let through = Row::to_worker(nothing())?.with_one_more(nothing())?;
    let bare = Row::to_worker(nothing())?;
    Ok(Box::new(DoorFloor { bare, through, through_first: false }))
}

impl Case for DoorFloor {
    fn sample(&mut self) -> Result<u64, String> {
        self.through_first = !self.through_first;
        let (bare, through) = if self.through_first {
            let through = self.through.pass()?;
            (self.bare.pass()?, through)
        } else {
            (self.bare.pass()?, self.through.pass()?)
        };
        Ok(through.saturating_sub(bare).as_nanos() as u64)
    }
}
