//! What a client has under way, by its numbers.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use forge_protocol::limits::{NUMBERS_MAX, QUESTIONS_MAX};
use forge_protocol::service::Question;

use super::breach;
use crate::cancel::Cancel;
use crate::locks::lock;

/// Cancel handles that are kept for what comes next.
const SPARE_MAX: usize = 4;

/// The runs and questions of one client.
#[derive(Debug, Default)]
pub(super) struct Live {
    doings: Mutex<Doings>,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Doings {
    numbers: HashMap<u64, Doing>,
    /// Those that may wait for somebody.
    questions: usize,
    spare: Vec<Arc<Cancel>>,
}

#[derive(Debug)]
enum Doing {
    Run {
        cancel: Arc<Cancel>,
        /// Where answers go of the tools that the client hosts for it.
        host: Option<Arc<UnixStream>>,
    },
    Question {
        cancel: Arc<Cancel>,
        is_counted: bool,
    },
}

/// Why a question is not taken up.
#[derive(Clone, Copy, Debug)]
pub(super) enum NoPlace {
    /// As many as there may be are unanswered.
    TooMany,
    /// The service has no descriptor for it.
    NoDescriptor,
}

impl Live {
    /// Takes a number for a run; `None` if there is no descriptor for it: the
    /// others of this connection go on.
    ///
    /// # Errors
    /// The number is in use, or one too many.
    pub(super) fn enter_run(&self, number: u64) -> io::Result<Option<Arc<Cancel>>> {
        let mut doings = lock(&self.doings);
        doings.check(number)?;
        let Ok(cancel) = doings.cancel() else { return Ok(None) };
        self.enter(&mut doings, number, Doing::Run { cancel: Arc::clone(&cancel), host: None });
        Ok(Some(cancel))
    }

    /// Takes a number for a question, if there is a place for it. How the service
    /// stands is answered at once, whoever waits for the broker, and is none of
    /// those that there may be.
    ///
    /// # Errors
    /// As [`Live::enter_run`].
    pub(super) fn enter_question(
        &self,
        number: u64,
        question: &Question,
    ) -> io::Result<Result<Arc<Cancel>, NoPlace>> {
        let mut doings = lock(&self.doings);
        doings.check(number)?;
        let is_counted = !matches!(question, Question::Status);
        if is_counted && doings.questions >= QUESTIONS_MAX {
            return Ok(Err(NoPlace::TooMany));
        }
        // The runs of this connection go on.
        let Ok(cancel) = doings.cancel() else { return Ok(Err(NoPlace::NoDescriptor)) };
        doings.questions += usize::from(is_counted);
        let doing = Doing::Question { cancel: Arc::clone(&cancel), is_counted };
        self.enter(&mut doings, number, doing);
        Ok(Ok(cancel))
    }

    fn enter(&self, doings: &mut Doings, number: u64, doing: Doing) {
        // Whoever closes looks at what is under way after it has said so.
        if self.closed.load(Ordering::SeqCst) {
            doing.cancel().raise();
        }
        doings.numbers.insert(number, doing);
    }

    /// A run is over. Its number is free then.
    pub(super) fn leave_run(&self, number: u64, cancel: Arc<Cancel>) {
        let mut doings = lock(&self.doings);
        if let Some(Doing::Run { host: Some(host), .. }) = doings.numbers.remove(&number) {
            let _ = host.shutdown(Shutdown::Both);
        }
        doings.spare(cancel);
    }

    /// The same of a question.
    pub(super) fn leave_question(&self, number: u64, cancel: Arc<Cancel>) {
        let mut doings = lock(&self.doings);
        if let Some(Doing::Question { is_counted: true, .. }) = doings.numbers.remove(&number) {
            doings.questions -= 1;
        }
        doings.spare(cancel);
    }

    /// Cancels what has this number. If it is not there, it has ended meanwhile.
    pub(super) fn cancel(&self, number: u64) {
        if let Some(doing) = lock(&self.doings).numbers.get(&number) {
            doing.cancel().raise();
        }
    }

    /// Cancels everything.
    pub(super) fn cancel_all(&self) {
        for doing in lock(&self.doings).numbers.values() {
            doing.cancel().raise();
        }
    }

    /// What enters from now on is cancelled. Whether somebody has said so before.
    pub(super) fn close(&self) -> bool {
        self.closed.swap(true, Ordering::SeqCst)
    }

    /// Has the answers of the client's own tools for this run go there.
    pub(super) fn set_host(&self, number: u64, link: Arc<UnixStream>) {
        if let Some(Doing::Run { host, .. }) = lock(&self.doings).numbers.get_mut(&number) {
            *host = Some(link);
        }
    }

    /// Where they go; `None` if the run has ended meanwhile.
    pub(super) fn host(&self, number: u64) -> Option<Arc<UnixStream>> {
        match lock(&self.doings).numbers.get(&number)? {
            Doing::Run { host, .. } => host.clone(),
            Doing::Question { .. } => None,
        }
    }

    /// Whether the run of this number is there, and this is its link.
    pub(super) fn is_hosted_by(&self, number: u64, link: &Arc<UnixStream>) -> bool {
        self.host(number).is_some_and(|host| Arc::ptr_eq(&host, link))
    }
}

impl Doing {
    fn cancel(&self) -> &Cancel {
        match self {
            Self::Run { cancel, .. } | Self::Question { cancel, .. } => cancel,
        }
    }
}

impl Doings {
    /// A cancel handle: one that is left of another, or a new one.
    fn cancel(&mut self) -> io::Result<Arc<Cancel>> {
        match self.spare.pop() {
            Some(cancel) => Ok(cancel),
            None => Cancel::new().map(Arc::new),
        }
    }

    fn check(&self, number: u64) -> io::Result<()> {
        if self.numbers.contains_key(&number) {
            return Err(breach(format!("number {number} is in use")));
        }
        if self.numbers.len() >= NUMBERS_MAX {
            return Err(breach(format!("more than {NUMBERS_MAX} runs and questions at once")));
        }
        Ok(())
    }

    /// Keeps the handle of what is over for something else. Its number is gone,
    /// so nobody raises it any more.
    fn spare(&mut self, cancel: Arc<Cancel>) {
        cancel.calm();
        if !cancel.is_raised() && self.spare.len() < SPARE_MAX {
            self.spare.push(cancel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_the_service_stands_may_be_asked_beside_as_many_questions_as_there_may_be() {
        let live = Live::default();
        let enter = |number, question| live.enter_question(number, &question).unwrap();
        let most = QUESTIONS_MAX as u64;
        let asked: Vec<_> = (0..most).map(|it| enter(it, Question::Metrics).unwrap()).collect();
        assert!(matches!(enter(most, Question::Metrics), Err(NoPlace::TooMany)));
        let standing = enter(most, Question::Status).unwrap();
        let leave = |number, cancel| live.leave_question(number, cancel);
        leave(most, standing);
        assert!(enter(most, Question::Metrics).is_err(), "it had no place to give back");
        (0..).zip(asked).for_each(|(number, cancel)| leave(number, cancel));
        assert!(enter(0, Question::Metrics).is_ok());
    }

    #[test]
    fn a_run_does_not_begin_cancelled_or_nudged_by_what_was_done_to_another() {
        let live = Live::default();
        let enter = |number| live.enter_run(number).unwrap().unwrap();
        let is_woken = |cancel: &Cancel| {
            let fd = std::os::fd::AsRawFd::as_raw_fd(cancel);
            let mut polled = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid pollfd.
            unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
        };
        let cancelled = enter(1);
        live.cancel(1);
        assert!(cancelled.is_raised());
        live.leave_run(1, cancelled);
        let nudged = enter(1);
        assert!(!nudged.is_raised());
        nudged.nudge();
        live.leave_run(1, nudged);
        let next = enter(1);
        assert!(!next.is_raised() && !is_woken(&next));
        // What had the number before is not there to be cancelled.
        live.leave_run(1, next);
        live.cancel(1);
        assert!(!enter(1).is_raised());
    }

    #[test]
    fn what_is_under_way_as_a_client_leaves_is_cancelled_and_so_is_what_it_had_sent_yet() {
        let live = Live::default();
        let run = live.enter_run(1).unwrap().unwrap();
        let question = live.enter_question(2, &Question::Metrics).unwrap().unwrap();
        live.cancel_all();
        assert!(run.is_raised() && question.is_raised());
        assert!(!live.close());
        assert!(live.enter_run(3).unwrap().unwrap().is_raised());
        assert!(live.enter_question(4, &Question::Status).unwrap().unwrap().is_raised());
        assert!(live.close(), "it was said before");
    }

    #[test]
    fn the_link_to_a_clients_own_tools_ends_with_its_run() {
        let live = Live::default();
        let cancel = live.enter_run(1).unwrap().unwrap();
        let (host, mut broker) = UnixStream::pair().unwrap();
        let host = Arc::new(host);
        live.set_host(1, Arc::clone(&host));
        assert!(live.is_hosted_by(1, &host));
        live.leave_run(1, cancel);
        assert!(live.host(1).is_none());
        broker.set_nonblocking(true).unwrap();
        assert_eq!(io::Read::read(&mut broker, &mut [0]).unwrap(), 0, "it is open");
    }

    #[test]
    fn a_client_has_so_many_numbers_and_each_once() {
        // Each has a descriptor, as in a service.
        crate::jail::privileges::raise_descriptors().unwrap();
        let live = Live::default();
        let enter = |number| live.enter_question(number, &Question::Status);
        let kind = |number| enter(number).unwrap_err().kind();
        let most = NUMBERS_MAX as u64;
        for number in 0..most - 1 {
            enter(number).unwrap().unwrap();
        }
        assert_eq!(kind(0), io::ErrorKind::InvalidData);
        let last = enter(most).unwrap().unwrap();
        assert_eq!(kind(most + 1), io::ErrorKind::InvalidData);
        live.leave_question(most, last);
        assert!(enter(most + 1).unwrap().is_ok());
    }
}
