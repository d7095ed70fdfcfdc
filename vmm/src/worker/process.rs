//! The worker as a process of its own: one job in, one report out.
//!
//! It is this same executable, started with an empty environment and three
//! descriptors: 0 is the socket to its supervisor, 1 the run's connection to
//! the broker, 2 the log. When the supervisor dies, so does it.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use forge_protocol::codec;
use forge_protocol::frame::{self, Frame, HEADER_BYTES, Header, Kind};
use forge_protocol::worker::{Job, Report};

use super::BrokerLink;

/// The hidden command that makes this executable a worker.
pub const COMMAND: &str = "worker";

/// A worker, from the supervisor's side.
#[derive(Debug)]
pub struct WorkerProcess {
    child: Child,
    socket: UnixStream,
}

impl WorkerProcess {
    /// Starts a worker with its run's connection to the broker, if it has one.
    /// `executable` is `forge-vmm`.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(executable: &Path, broker: Option<UnixStream>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let broker = match broker {
            Some(socket) => Stdio::from(OwnedFd::from(socket)),
            None => Stdio::null(),
        };
        let child = Command::new(executable)
            .arg0("forge-vmm-worker")
            .arg(COMMAND)
            .arg(std::process::id().to_string())
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(broker)
            .stderr(Stdio::inherit())
            .spawn()?;
        Ok(Self { child, socket: ours })
    }

    /// The worker's process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Hands over the job and waits for the report, at most `patience`.
    ///
    /// # Errors
    /// `TimedOut` if the worker says nothing in time, `InvalidData` if what it
    /// says is no report, `UnexpectedEof` if it died.
    pub fn carry_out(&mut self, job: &Job, patience: std::time::Duration) -> io::Result<Report> {
        let mut bytes = Vec::with_capacity(job.program.len() + job.input.len() + 4096);
        frame::write_message(Kind::Job, job, &mut bytes);
        let until = std::time::Instant::now() + patience;
        self.socket.set_write_timeout(Some(patience))?;
        self.socket.write_all(&bytes)?;
        let frame = read_frame(&mut self.socket, Kind::Report, Some(until))?;
        codec::decode(&frame.payload)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // It serves one run. Whatever it still does, it does for nobody.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads one frame of one kind.
fn read_frame(
    socket: &mut UnixStream,
    kind: Kind,
    until: Option<std::time::Instant>,
) -> io::Result<Frame> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut read = |buffer: &mut [u8]| -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            if let Some(until) = until {
                let left = until.saturating_duration_since(std::time::Instant::now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                socket.set_read_timeout(Some(left))?;
            }
            match socket.read(&mut buffer[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    let mut header = [0u8; HEADER_BYTES];
    read(&mut header)?;
    let header = Header::from_bytes(header).map_err(|error| invalid(error.to_string()))?;
    if header.kind != kind {
        return Err(invalid(format!("a {:?} frame where {kind:?} was awaited", header.kind)));
    }
    let mut payload = vec![0u8; header.payload_bytes as usize];
    read(&mut payload)?;
    Ok(Frame { kind, payload })
}

/// The worker's whole life. Called by `main` for [`COMMAND`] with the
/// supervisor's process id, before anything else touched the standard
/// descriptors.
///
/// # Errors
/// If the job cannot be read or the report not be written: the supervisor is
/// gone.
pub fn main(supervisor_id: u32) -> io::Result<()> {
    die_with(supervisor_id)?;
    close_what_others_left()?;
    // SAFETY: descriptors 0 and 1 are what `WorkerProcess::start` put there;
    // this process has used neither, and from here on they belong to these.
    let (mut supervisor, broker) = unsafe { (UnixStream::from_raw_fd(0), OwnedFd::from_raw_fd(1)) };
    let frame = read_frame(&mut supervisor, Kind::Job, None)?;
    let job: Job = codec::decode(&frame.payload)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
    let link = match job.brokered {
        true => Some(BrokerLink::new(UnixStream::from(broker))?),
        false => None,
    };
    let report = super::serve(&job, link);
    let mut bytes = Vec::new();
    frame::write_message(Kind::Report, &report, &mut bytes);
    supervisor.write_all(&bytes)
}

/// Closes every descriptor but the three: whoever started the supervisor may
/// have left it some, and they are not the worker's.
fn close_what_others_left() -> io::Result<()> {
    // SAFETY: nothing in this process has opened a descriptor yet.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn die_with(supervisor_id: u32) -> io::Result<()> {
    // SAFETY: a plain system call without pointers.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // It may have died before we asked.
    if std::os::unix::process::parent_id() != supervisor_id {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    Ok(())
}
