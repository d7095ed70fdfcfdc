//! Frames to a client: one whole one at a time, each in a bounded time.

use std::io;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use forge_protocol::codec::Encode;
use forge_protocol::ending::{Fault, RunEnd};
use forge_protocol::frame::{self, HEADER_BYTES, Kind};
use forge_protocol::limits::PART_BYTES_MAX;
use forge_protocol::run::Artifact;
use forge_protocol::service::{Finished, Left};
use parking_lot::MutexGuard;

use super::super::gate::Stay;
use super::{Connection, FRAME_TIME_MAX, breach};
use crate::link::send_once;
use crate::report::{OutputEncoding, RunReport};
use crate::supervisor::RunResult;

/// A client that takes nothing of what is sent to it for this long is cut
/// off.
pub(super) const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// What is sent at once, in bytes: a whole part of an artifact.
const SEND_BYTES: usize = PART_BYTES_MAX as usize + HEADER_BYTES + PART_BYTES;
/// What a part of an artifact has beside its content, at most, in bytes.
const PART_BYTES: usize = 24;
/// What most reports fit in, in bytes.
const REPORT_BYTES: usize = 2 * 1024;

impl Connection {
    /// Sends one frame, whole.
    ///
    /// # Errors
    /// What the kernel said; `TimedOut` for a client that does not take it.
    /// The connection is of no use then.
    pub(super) fn send<T: Encode>(&self, kind: Kind, message: &T) -> io::Result<()> {
        self.send_if(kind, message, || true)
    }

    /// The same, if that is still wanted when it is this frame's turn.
    pub(super) fn send_if<T: Encode>(
        &self,
        kind: Kind,
        message: &T,
        is_wanted: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame::try_write_message(kind, message, &mut bytes).map_err(breach)?;
        self.send_frame(&bytes, &mut { FRAME_TIME_MAX }, is_wanted, || ())
    }

    /// Sends it when it is its turn, within `time`, and takes that off it.
    /// `before_end` is done before the client has all of it.
    fn send_frame(
        &self,
        bytes: &[u8],
        time: &mut Duration,
        is_wanted: impl FnOnce() -> bool,
        before_end: impl FnOnce(),
    ) -> io::Result<()> {
        let writing = self.writing.lock();
        if !is_wanted() {
            return Ok(());
        }
        if time.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let until = Instant::now() + *time;
        self.send_until(bytes, until, before_end)?;
        *time = until.saturating_duration_since(Instant::now());
        // Who has more to send is not before those who wait already.
        MutexGuard::unlock_fair(writing);
        Ok(())
    }

    fn send_until(
        &self,
        bytes: &[u8],
        until: Instant,
        before_end: impl FnOnce(),
    ) -> io::Result<()> {
        let mut before_end = Some(before_end);
        let mut unsent = bytes;
        while !unsent.is_empty() {
            // The kernel's patience begins anew with each piece of what it sends.
            let part = &unsent[..unsent.len().min(SEND_BYTES)];
            if part.len() == unsent.len()
                && let Some(before_end) = before_end.take()
            {
                before_end();
            }
            let asked = Instant::now();
            match send_once(self.socket.as_raw_fd(), part) {
                // It was over within this piece: what fitted is told first.
                Ok(sent) if sent < part.len() && asked.elapsed() >= SEND_PATIENCE => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Ok(sent) => unsent = &unsent[sent..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
            if !unsent.is_empty() && Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Tells how a run ended. It stays where runs are counted until its client has as
    /// good as all of that, and no longer: who submits the next one on hearing it is
    /// within its bound.
    pub(super) fn finish(
        &self,
        number: u64,
        result: RunResult,
        stay: Option<Stay<'_>>,
    ) -> io::Result<()> {
        // The pool's upkeep comes after the answer.
        let RunResult { report, mut artifacts, upkeep: _upkeep, .. } = result;
        let bytes = finished(number, report, &mut artifacts, Kind::Finished.payload_bytes_max())?;
        let _untaken = self.owed.another();
        let mut time = FRAME_TIME_MAX;
        for (at, Artifact { content, .. }) in (0u32..).zip(artifacts) {
            for piece in content.chunks(PART_BYTES_MAX as usize) {
                // `Part` without a copy of the content.
                let mut part = Vec::with_capacity(HEADER_BYTES + PART_BYTES + piece.len());
                frame::write_message(Kind::Part, &(number, at, piece), &mut part);
                self.send_frame(&part, &mut time, || true, || ())?;
            }
        }
        self.send_frame(&bytes, &mut time, || true, || drop(stay))
    }
}

/// The frame that tells how a run ended, whose payload has at most so many bytes. A
/// report that would pass them is told as our failure, and nothing that was left: to
/// close the connection would end the runs of others, as a door has those of all its
/// clients on one.
fn finished(
    number: u64,
    report: RunReport,
    artifacts: &mut Vec<Artifact>,
    payload_bytes_max: u32,
) -> io::Result<Vec<u8>> {
    let written = |report: &RunReport, artifacts: &[Artifact]| -> io::Result<Option<Vec<u8>>> {
        let mut json = Vec::with_capacity(REPORT_BYTES);
        serde_json::to_writer(&mut json, report)?;
        let left = |Artifact { name, media_type, content }: &Artifact| Left {
            name: name.clone(),
            media_type: media_type.clone(),
            bytes: content.len() as u32,
        };
        let artifacts = artifacts.iter().map(left).collect();
        let mut bytes = Vec::new();
        let message = Finished { number, report: json, artifacts };
        let fits = frame::try_write_message(Kind::Finished, &message, &mut bytes).is_ok()
            && bytes.len() <= HEADER_BYTES + payload_bytes_max as usize;
        Ok(fits.then_some(bytes))
    };
    if let Some(bytes) = written(&report, artifacts)? {
        return Ok(bytes);
    }
    artifacts.clear();
    tracing::error!(run = report.run_id, "a run's result is larger than a message may be");
    let report = RunReport {
        end: RunEnd::Internal(Fault::Internal),
        reason: "the run's result is larger than a message may be, and left out".into(),
        output: String::new(),
        output_encoding: OutputEncoding::Utf8,
        artifacts: Vec::new(),
        log: Vec::new(),
        tool_calls: Vec::new(),
        ..report
    };
    written(&report, artifacts)?.ok_or_else(|| breach("no room for a run's end"))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Weak;

    use forge_protocol::codec;
    use forge_protocol::ending::TrapKind;
    use forge_protocol::frame::Assembler;
    use forge_protocol::worker::Tier;

    use super::super::super::peer::Peer;
    use super::*;
    use crate::link::{Link, Patience};

    #[test]
    fn a_result_that_is_too_large_to_be_told_ends_as_our_failure_under_its_number() {
        let told = |text_bytes: usize, content_bytes: usize| {
            let result = RunResult::unstarted(Tier::Vm, RunEnd::Trap(TrapKind::Other), "x");
            let RunResult { mut report, .. } = result;
            report.output = "a".repeat(text_bytes);
            let content = vec![1; content_bytes];
            let artifact = Artifact { name: "a".into(), media_type: "b".into(), content };
            let mut left = vec![artifact];
            let bytes = finished(7, report, &mut left, 4096).unwrap();
            let mut rest = &bytes[..];
            let whole = Assembler::default().next(&mut rest, |_| Some(4096)).unwrap().unwrap();
            let Finished { number, report, artifacts } = codec::decode(&whole.payload).unwrap();
            assert_eq!(left.len(), artifacts.len(), "what is sent is what is named");
            let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
            (number, report["status"].as_str().unwrap().to_owned(), artifacts.len())
        };
        assert_eq!(told(1, 1), (7, "trap".into(), 1));
        assert_eq!(told(4096, 1), (7, "internal".into(), 0));
        // What an artifact contains is not in it.
        assert_eq!(told(1, 4096), (7, "trap".into(), 1));
    }

    #[test]
    fn a_short_end_is_sent_while_a_long_one_is() {
        let (client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let mut heard = Link::new(client);
        let mut next = || {
            let frame = heard.receive(|_| true, Patience::default()).unwrap();
            match frame.kind {
                Kind::Finished => Some(codec::decode::<Finished>(&frame.payload).unwrap().number),
                _ => None,
            }
        };
        let ended = |artifacts| RunResult {
            artifacts,
            ..RunResult::unstarted(Tier::Vm, RunEnd::Trap(TrapKind::Other), "x")
        };
        let content = vec![7; 64 * PART_BYTES_MAX as usize];
        let long = Artifact { name: "a".into(), media_type: "b".into(), content };
        std::thread::scope(|scope| {
            scope.spawn(|| connection.finish(1, ended(vec![long]), None).unwrap());
            // The greeting, and that the long one has begun.
            assert_eq!((next(), next()), (None, None));
            scope.spawn(|| connection.finish(2, ended(Vec::new()), None).unwrap());
            // The long one stands still meanwhile: nothing of it is taken.
            while connection.owed.count() < 2 {
                std::thread::yield_now();
            }
            // And is taken slowly then: the short one counts a moment before it is in line.
            let slowly = std::iter::from_fn(|| {
                std::thread::sleep(Duration::from_millis(5));
                Some(next())
            });
            assert_eq!(slowly.flatten().take(2).collect::<Vec<_>>(), [2, 1]);
        });
    }

    #[test]
    fn an_end_has_one_time_for_all_its_parts() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let mut time = Duration::from_millis(1);
        let sends = std::iter::repeat_with(|| {
            std::thread::sleep(Duration::from_micros(10));
            connection.send_frame(b"x", &mut time, || true, || ())
        });
        let failed = sends.take(1 << 20).find_map(Result::err).expect("it takes for ever");
        assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_place_is_free_before_the_client_can_know_it_and_not_much_before() {
        let (client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        client.set_nonblocking(true).unwrap();
        let bytes = vec![7; 3 * SEND_BYTES];
        let (all, mut taken) = (bytes.len(), 0);
        std::thread::scope(|scope| {
            let (free, is_free) = std::sync::mpsc::channel();
            let (seen, go_on) = std::sync::mpsc::channel();
            scope.spawn(move || {
                let before_end = || {
                    free.send(()).unwrap();
                    go_on.recv().unwrap();
                };
                let mut time = FRAME_TIME_MAX;
                connection.send_frame(&bytes, &mut time, || true, before_end).unwrap();
            });
            let mut piece = vec![0; SEND_BYTES];
            let mut has_heard = false;
            loop {
                match (&client).read(&mut piece) {
                    Ok(read) => taken += read,
                    // Whatever was sent before is taken.
                    Err(_) if has_heard => break,
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                        has_heard = is_free.try_recv().is_ok();
                    }
                }
            }
            assert!((1..=SEND_BYTES).contains(&(all - taken)), "{taken} of {all}");
            seen.send(()).unwrap();
        });
    }

    #[test]
    fn a_client_that_takes_nothing_is_waited_for_once() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let report = vec![0; 2 << 20];
        let end = Finished { number: 0, report, artifacts: Vec::new() };
        let began = Instant::now();
        let sent = connection.send(Kind::Finished, &end);
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < SEND_PATIENCE * 3 / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn what_one_part_of_an_end_takes_is_taken_off_the_time_of_all() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let (all, mut left) = (FRAME_TIME_MAX, FRAME_TIME_MAX);
        connection.send_frame(b"x", &mut left, || true, || ()).unwrap();
        assert!(left < all);
    }

    #[test]
    fn a_frame_that_is_taken_piece_by_piece_is_sent_no_longer_than_its_time() {
        let (client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::copy(&mut &client, &mut std::io::sink()));
            let sent = connection.send_until(&vec![7; 3 * SEND_BYTES], Instant::now(), || ());
            assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
            connection.close();
        });
    }
}
