//! The run link: calls in, answers out, in the order in which they settle. The worker
//! at its other end is trusted with nothing: a frame that it should not send ends it.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use forge_protocol::codec;
use forge_protocol::frame::{self, Frame, HEADER_BYTES, Kind};
use forge_protocol::guest::{Call, Misbehaviour, SessionError, Settled};
use forge_protocol::limits::{MESSAGE_OVERHEAD_BYTES, OverLimit};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::call::{Dispatcher, Run, Taken};
use crate::journal::Close;
use crate::link::{self, LinkError, PlainReceiver, PlainSender};

/// What a settled call's frame has beside its body, at most, in bytes.
const SETTLED_BYTES: usize = 32;

/// How long calls may take to be refused that wait when their run is cut off: one that is
/// being looked at ends first, and so does the journal's start.
const REFUSED_TIME_MAX: Duration = Duration::from_secs(1);

/// Serves one worker until it closes its link or the broker shuts down. Of one that breaks
/// the protocol nothing more is read; its run stays until its supervisor, too, has closed
/// the link, which so can hear of it.
pub(super) async fn serve_run(
    run: Arc<Run>,
    stream: UnixStream,
    dispatcher: Dispatcher,
    mut closing: watch::Receiver<bool>,
) {
    let (mut receiver, mut sender) = link::split_plain(stream);
    let mut calls = JoinSet::new();
    let ended = {
        let halves = (&mut receiver, &mut sender);
        let mut taking = pin!(take_calls(&run, halves, &dispatcher, &mut calls));
        let ended = tokio::select! {
            ended = taking.as_mut() => Some(ended),
            _ = closing.wait_for(|closing| *closing) => None,
        };
        match ended {
            Some(ended) => ended,
            // Of a run that went to its end, what it called is read to the last: its
            // supervisor has closed the link, or is about to.
            None if run.leaves_calls() => taking.await,
            None => Ok(()),
        }
    };
    match &ended {
        // Each call that it left ends with its tool's time or the run's.
        Ok(()) if run.leaves_calls() => {
            // Its end, for who waits for an answer.
            drop(sender);
            while calls.join_next().await.is_some() {}
        }
        ended => {
            if let Err(error) = ended {
                run.break_link(error.to_string());
            }
            drop(sender);
            run.cut_off();
            // What was not dispatched is refused, and that recorded before the end is.
            let _ = timeout(REFUSED_TIME_MAX, async { while calls.join_next().await.is_some() {} })
                .await;
            calls.shutdown().await;
        }
    }
    dispatcher.closed(&run, if ended.is_ok() { Close::Closed } else { Close::Dropped });
    let Err(error) = ended else {
        tracing::info!(run = %run.id(), "run link closed");
        return;
    };
    tracing::warn!(run = %run.id(), error = ?error.to_string(), "run link dropped");
    tokio::select! {
        () = receiver.left() => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

/// Why a run link is dropped.
#[derive(Debug, thiserror::Error)]
enum RunLinkError {
    #[error("{0}")]
    Link(#[from] LinkError),
    #[error("{0}")]
    Misbehaved(SessionError),
}

impl From<Misbehaviour> for RunLinkError {
    fn from(how: Misbehaviour) -> Self {
        Self::Misbehaved(SessionError::Peer(how))
    }
}

/// Takes calls and sends answers, in the order in which calls settle. All in
/// one task: a call that can be settled at once is answered before anything
/// else happens, without a word between threads.
async fn take_calls(
    run: &Arc<Run>,
    (receiver, sender): (&mut PlainReceiver, &mut PlainSender),
    dispatcher: &Dispatcher,
    calls: &mut JoinSet<Settled>,
) -> Result<(), RunLinkError> {
    let limits = run.limits();
    let call_bytes_max = limits.request_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES);
    let awaits = |kind: Kind| (kind == Kind::Call).then_some(call_bytes_max);
    let mut next_call = 0;
    // Until an answer finds nobody. What was called before is read all the same.
    let mut is_heard = true;
    loop {
        let unsent = if is_heard { sender.unsent() } else { 0 };
        let settled = tokio::select! {
            sent = sender.go_on(), if unsent > 0 => {
                if let Err(error) = sent {
                    unheard(&error);
                    is_heard = false;
                }
                continue;
            }
            Some(settled) = calls.join_next(), if !calls.is_empty() => match settled {
                Ok(settled) => settled,
                // Only a panic of ours ends a call without an answer.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            },
            received = receiver.receive(awaits) => {
                let received = match received {
                    // It closed with an answer under way.
                    Err(LinkError::Io(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                        unheard(&error.into());
                        return Ok(());
                    }
                    received => received?,
                };
                let Some(Frame { payload, .. }) = received else { return Ok(()) };
                let call: Call = codec::decode(&payload)
                    .map_err(|error| LinkError::Payload { kind: Kind::Call, error })?;
                if call.id != next_call {
                    let (got, expected) = (call.id, next_call);
                    return Err(Misbehaviour::CallOutOfOrder { got, expected }.into());
                }
                // Calls past the budget are answered, as many as can be under way when it
                // is spent; a guest of ours makes none.
                let calls_max = u64::from(limits.calls) + u64::from(limits.calls_in_flight);
                over("calls", u64::from(next_call) + 1, calls_max)?;
                next_call += 1;
                run.record_call(&call.tool);
                // A call is in flight until the worker can have its answer.
                let in_flight = (calls.len() + unsent + 1) as u64;
                over("calls_in_flight", in_flight, limits.calls_in_flight.into())?;
                match dispatcher.take(run, call) {
                    Taken::Settled(settled) => settled,
                    Taken::Pending(pending) => {
                        let dispatcher = dispatcher.clone();
                        calls.spawn(async move { dispatcher.carry_out(pending).await });
                        continue;
                    }
                }
            }
        };
        run.record_settled(&settled);
        if !is_heard {
            continue;
        }
        let mut frame = Vec::with_capacity(HEADER_BYTES + settled.body.len() + SETTLED_BYTES);
        frame::write_message(Kind::Settled, &settled, &mut frame);
        if let Err(error) = sender.send(frame) {
            unheard(&error);
            is_heard = false;
        }
    }
}

/// A worker that is gone while it is answered is no news: runs end like this
/// at their deadline.
fn unheard(error: &LinkError) {
    tracing::debug!(error = ?error.to_string(), "an answer found no run link");
}

fn over(what: &'static str, got: u64, limit: u64) -> Result<(), Misbehaviour> {
    if got > limit { Err(Misbehaviour::Over(OverLimit { what, got, limit })) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forge_protocol::RunId;
    use forge_protocol::broker::Callable;
    use forge_protocol::limits::RunLimits;
    use forge_protocol::name::ToolName;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::runtime::Handle;

    use super::*;
    use crate::config::Config;
    use crate::grant::tests::granting_nothing;
    use crate::journal::{Journal, Place};
    use crate::metrics::Metrics;
    use crate::registry::Registry;
    use crate::review::{Mode, Reviews};

    /// A broker's side, without servers, and what keeps its journal.
    fn dispatcher() -> (Dispatcher, tempfile::TempDir) {
        let (folder, home) = (tempfile::tempdir().unwrap(), Handle::current());
        let registry = Arc::new(Registry::new(Config::default(), &home));
        let reviews = Arc::new(Reviews::open(Mode::FirstUse, None).unwrap());
        let metrics = Arc::new(Metrics::default());
        let journal = Journal::new(Place::Folder(folder.path().into()), Arc::clone(&metrics));
        (Dispatcher::new(registry, reviews, journal, metrics, home), folder)
    }

    /// A run that may call nothing.
    fn run(limits: RunLimits) -> Arc<Run> {
        let id = RunId([0; 16]);
        Arc::new(Run::new(id, [0; 32], Callable::Any, granting_nothing(), limits))
    }

    /// The run's call of this number, which is denied.
    fn call(id: u32) -> Vec<u8> {
        let tool = ToolName::parse("a.b").unwrap();
        let call = Call { id, waits: false, tool, request: b"{}".to_vec() };
        let mut frames = Vec::new();
        frame::write_message(Kind::Call, &call, &mut frames);
        frames
    }

    #[tokio::test]
    async fn a_run_is_cut_off_by_the_end_of_its_link_unless_its_program_went_to_its_end() {
        let (dispatcher, _folder) = dispatcher();
        let closing = watch::Sender::new(false);
        for is_whole in [false, true] {
            let (worker, stream) = UnixStream::pair().unwrap();
            let run = run(RunLimits::default());
            if is_whole {
                run.leave_calls();
            }
            drop(worker);
            serve_run(Arc::clone(&run), stream, dispatcher.clone(), closing.subscribe()).await;
            assert_eq!(run.is_cut_off(), !is_whole);
        }
    }

    #[tokio::test]
    async fn a_frame_that_is_no_call_ends_its_link_whatever_is_in_it() {
        let (dispatcher, _folder) = dispatcher();
        let closing = watch::Sender::new(false);
        let (mut worker, stream) = UnixStream::pair().unwrap();
        let run = run(RunLimits::default());
        let mut frames = Vec::new();
        frame::write_raw(Kind::Output, &call(0)[HEADER_BYTES..], &mut frames);
        worker.write_all(&frames).await.unwrap();
        drop(worker);
        serve_run(Arc::clone(&run), stream, dispatcher, closing.subscribe()).await;
        assert!(run.broken().is_some_and(|broken| broken.reason.contains("out of turn")));
        assert!(run.calls_so_far().is_empty());
    }

    #[tokio::test]
    async fn what_a_whole_run_called_is_read_to_the_last_by_a_broker_that_shuts_down() {
        let (dispatcher, _folder) = dispatcher();
        let closing = watch::Sender::new(true);
        // What comes first of several that are there is by chance.
        for _ in 0..20 {
            let (mut worker, stream) = UnixStream::pair().unwrap();
            let run = run(RunLimits::default());
            run.leave_calls();
            for id in 0..3 {
                worker.write_all(&call(id)).await.unwrap();
            }
            drop(worker);
            serve_run(Arc::clone(&run), stream, dispatcher.clone(), closing.subscribe()).await;
            assert_eq!(run.calls_so_far().len(), 3);
        }
    }

    #[tokio::test]
    async fn a_call_whose_answer_its_worker_does_not_take_is_in_flight() {
        const CALLS: u32 = 5_000;
        let (dispatcher, _folder) = dispatcher();
        let closing = watch::Sender::new(false);
        let limits = RunLimits { calls: CALLS, calls_in_flight: 1, ..RunLimits::default() };
        for takes in [true, false] {
            let (mut worker, stream) = UnixStream::pair().unwrap();
            let run = run(limits.clone());
            let serves =
                serve_run(Arc::clone(&run), stream, dispatcher.clone(), closing.subscribe());
            let serves = tokio::spawn(serves);
            let asks = async {
                let mut answer = [0; 4096];
                for id in 0..CALLS {
                    worker.write_all(&call(id)).await.unwrap();
                    if takes {
                        assert!(worker.read(&mut answer).await.unwrap() > 0);
                    }
                }
            };
            let breaks = async {
                while run.broken().is_none() {
                    tokio::task::yield_now().await;
                }
            };
            let ended = async {
                tokio::select! {
                    () = asks => true,
                    () = breaks => false,
                }
            };
            let all = tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap();
            assert_eq!(all, takes);
            drop(worker);
            serves.await.unwrap();
            let reason = run.broken().map(|broken| broken.reason).unwrap_or_default();
            assert_eq!(reason.contains("calls_in_flight"), !takes, "{reason}");
            let calls = run.calls_so_far();
            let settled = calls.iter().filter(|call| call.settled.is_some()).count();
            assert_eq!(settled == CALLS as usize, takes, "{settled}");
        }
    }
}
