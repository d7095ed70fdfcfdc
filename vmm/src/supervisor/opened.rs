//! A run at its broker: how it ends there, and what becomes of it when its worker is
//! lost.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::broker::BrokenLink;
use forge_protocol::run::CallRecord;
use forge_protocol::worker::VmFailure;

use crate::broker::{Broker, BrokerError};
use crate::link::Patience;
use crate::pool::worker::misbehaved;

/// How much longer than its deadline a run may wait for what its calls did to be
/// on the disk.
pub(super) const SYNC_GRACE: Duration = Duration::from_secs(10);

/// A run's connection at the broker that opened it. What the run did is that
/// one's to know, whichever is there by then.
pub(super) struct Opened {
    pub(super) run_id: RunId,
    pub(super) broker: Arc<Broker>,
    pub(super) link: UnixStream,
    /// Whether anything may be called over the link.
    pub(super) grants_any: bool,
}

/// What is known, at a run's end, of what its calls did.
pub(super) enum Settled {
    /// All: it is on the disk, or nobody was to wait until it is.
    Known,
    /// It may not be on the disk, and a result is not told before it is.
    Unsynced(BrokerError),
    /// Not even what it called.
    Untold(BrokerError),
}

impl Opened {
    /// Ends a run that has a result, of a program that went to its end if it `is_whole`,
    /// and says if that is not to be relied on.
    ///
    /// # Errors
    /// What its calls did may not be on the disk.
    pub(super) fn settle(
        &self,
        is_whole: bool,
        patience: Patience<'_>,
    ) -> Result<Option<BrokenLink>, BrokerError> {
        // That nothing was called, only its worker says. Whoever wants the run no
        // more has heard of no result yet.
        if !self.grants_any {
            self.shut();
            return Ok(None);
        }
        let ended = self.broker.end_run(self.run_id, is_whole, patience);
        if matches!(ended, Err(BrokerError::Cancelled)) {
            // What it has called goes on for nobody: its tools are told, if they can be.
            let _ = self.broker.cancel_run(self.run_id);
        }
        self.shut();
        ended
    }

    /// Ends a run without a result, or with one that is not relied on, at the broker,
    /// which tells its calls.
    pub(super) fn settle_cancelled(
        &self,
        told: Result<Vec<CallRecord>, BrokerError>,
        calls: &mut Vec<CallRecord>,
    ) -> Settled {
        let untold = match told {
            Ok(told) => {
                *calls = told;
                None
            }
            Err(error) => {
                tracing::warn!(%error, "the calls of a run that ended go on");
                Some(error)
            }
        };
        // It has no result that could be held back, and is waited for all the same.
        let patience = Patience::until(Instant::now() + SYNC_GRACE);
        let synced = match calls.is_empty() {
            true => Ok(()),
            false => self.broker.sync_for(patience),
        };
        self.shut();
        if let Err(error) = synced {
            tracing::warn!(%error, "what a run's calls did may not be on the disk");
        }
        untold.map_or(Settled::Known, Settled::Untold)
    }

    /// The run is over, whoever still has this end of its link: a worker that was taken
    /// over has. What was called before is read yet.
    fn shut(&self) {
        let _ = self.link.shutdown(Shutdown::Write);
    }
}

/// What becomes of a run whose worker was lost with its link to the broker, and seems
/// not to have begun it.
#[derive(Debug)]
pub(super) enum AfterLoss {
    /// Another worker may have it, over a link of its own.
    Again,
    /// It ends, with these calls.
    Over { failure: VmFailure, calls: Result<Vec<CallRecord>, BrokerError> },
}

/// Cancels it at the broker, which so tells what it called until then.
pub(super) fn after_loss(
    failure: &VmFailure,
    cancel: impl Fn() -> Result<Vec<CallRecord>, BrokerError>,
) -> AfterLoss {
    // Asked twice if the first answer is empty: a call that was accepted while it was being
    // prepared is in the second, and none is accepted after that. If the broker does not know
    // the run, it refuses; calls may have been made all the same.
    let calls = cancel().and_then(|calls| if calls.is_empty() { cancel() } else { Ok(calls) });
    let failure = match &calls {
        Ok(calls) if calls.is_empty() => return AfterLoss::Again,
        Ok(_) => misbehaved(format_args!(
            "that a run had not begun which has called: {}",
            failure.message
        )),
        Err(_) => failure.clone(),
    };
    AfterLoss::Over { failure, calls }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io;

    use forge_protocol::broker::RefusalKind;
    use forge_protocol::name::ToolName;
    use forge_protocol::worker::VmFailureKind;

    use super::*;

    #[test]
    fn a_run_that_called_or_may_have_is_given_to_no_second_worker() {
        let lost = VmFailure::new(VmFailureKind::NotReset, "page 7 differs");
        let call =
            CallRecord { id: 0, tool: ToolName::parse("a.b").unwrap(), begun_ns: 0, settled: None };
        let told = |answers: [Result<Vec<CallRecord>, BrokerError>; 2]| {
            let answers = RefCell::new(answers.into_iter());
            after_loss(&lost, || answers.borrow_mut().next().unwrap())
        };
        let none = || Ok(Vec::new());
        assert!(matches!(told([none(), none()]), AfterLoss::Again));
        // Also one that was taken while it was asked.
        for answers in [[Ok(vec![call.clone()]), none()], [none(), Ok(vec![call.clone()])]] {
            let AfterLoss::Over { failure, calls } = told(answers) else { panic!("again") };
            assert_eq!(
                (failure.kind, calls.unwrap()),
                (VmFailureKind::Misbehaved, vec![call.clone()])
            );
        }
        let gone = || Err(BrokerError::Lost(io::ErrorKind::UnexpectedEof.into()));
        let unknown = || {
            let (kind, message) = (RefusalKind::BadRequest, "no such run".into());
            Err(BrokerError::Refused { kind, message })
        };
        for answers in
            [[gone(), none()], [none(), gone()], [unknown(), none()], [none(), unknown()]]
        {
            let AfterLoss::Over { failure, calls } = told(answers) else { panic!("again") };
            assert!(failure == lost && calls.is_err());
        }
    }
}
