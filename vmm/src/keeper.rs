//! A broker that is there again after it was lost.
//!
//! A [`Keeper`] has one broker at a time. A thread of its own watches the
//! control link, and starts another when that breaks. Runs that the lost one
//! had opened end with it, because nobody knows what their calls did. Whoever
//! wants something of it meanwhile waits shortly, or is told when to come
//! again.
//!
//! A broker that is lost again soon is started later each time, and so is one
//! that refuses its configuration: whoever mends that has nothing else to do.
//! Deliberately absent is giving up, since runs that call nothing go on. So is
//! ending a broker that is there and says nothing: what it has in flight would be
//! lost, and it may be its disk or a debugger that keeps it. That is said, and how
//! an operator ends it.
//! Grants that live as long as their broker end with it.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forge_log::Seldom;
use vmm_sys_util::eventfd::EventFd;

use crate::broker::{Broker, BrokerError, BrokerOptions};
use crate::link::Patience;
use crate::locks::lock;

/// How long after a loss another broker is started, at least and at most.
const DELAY_MIN: Duration = Duration::from_millis(20);
const DELAY_MAX: Duration = Duration::from_secs(10);
/// A broker that lived this many times its restart delay counts as healthy, and resets the
/// delay.
const STEADY_DELAYS: u32 = 50;
/// How long somebody waits for a broker that is about to be there.
const ABSENCE_PATIENCE: Duration = Duration::from_secs(1);
/// How often they look whether they are still to wait.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a journal that took no records may take to say whether it does now.
const JOURNAL_TIME_MAX: Duration = Duration::from_millis(200);

/// How the broker stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerStanding {
    /// Its process, if it is there.
    pub pid: Option<u32>,
    /// How many were started after one was lost.
    pub restarts: u64,
    /// Whether its journal takes records: without, no run's calls are carried out.
    pub records: bool,
    /// Why it is not there, or what is wrong with one that is.
    pub reason: Option<String>,
}

/// One broker at a time.
#[derive(Debug)]
pub struct Keeper {
    shared: Arc<Shared>,
    /// Has the thread end.
    stop: Arc<EventFd>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Told when there is a broker again, or will be none.
    changed: Condvar,
    /// The process of a broker that gave no answer where it had to, until one is
    /// given; 0 for none.
    silent: AtomicU32,
}

#[derive(Debug)]
struct State {
    broker: Result<Arc<Broker>, Away>,
    /// Lost ones that may not have ended: they follow what they dispatched.
    leaving: Vec<Arc<Broker>>,
    restarts: u64,
    ended: bool,
}

/// There is none now.
#[derive(Clone, Debug)]
struct Away {
    reason: String,
    /// When one is started next, after this many could not be.
    next: Instant,
    failures: u32,
}

impl Away {
    fn lost(reason: &str) -> Self {
        Self { reason: reason.to_owned(), next: Instant::now() + DELAY_MIN, failures: 0 }
    }
}

impl Keeper {
    /// Has this broker, and whichever is started after it.
    ///
    /// # Errors
    /// If the host has no thread or descriptor left.
    pub fn of(broker: Broker) -> io::Result<Self> {
        let stop = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let (options, link) = (broker.options().clone(), broker.link()?);
        let broker = Ok(Arc::new(broker));
        let state = State { broker, leaving: Vec::new(), restarts: 0, ended: false };
        let (state, changed, silent) = (Mutex::new(state), Condvar::new(), AtomicU32::new(0));
        let shared = Arc::new(Shared { state, changed, silent });
        {
            let (shared, stop) = (Arc::clone(&shared), Arc::clone(&stop));
            let thread = std::thread::Builder::new().name("keeper".into());
            thread.spawn(move || shared.keep(link, &options, &stop))?;
        }
        Ok(Self { shared, stop })
    }

    /// The broker's state. If its journal last took no records that had to be on the disk,
    /// this asks again whether it takes them now, since no run may come to find out.
    #[must_use]
    pub fn standing(&self) -> BrokerStanding {
        let (broker, restarts) = {
            let state = self.shared.state();
            let broker = state.broker.as_ref().map(Arc::clone);
            (broker.map_err(|away| away.reason.clone()), state.restarts)
        };
        let broker = match broker {
            Ok(broker) => broker,
            Err(reason) => {
                return BrokerStanding {
                    pid: None,
                    restarts,
                    records: false,
                    reason: Some(reason),
                };
            }
        };
        let again = Patience::until(Instant::now() + JOURNAL_TIME_MAX);
        let unrecorded = broker.unrecorded().and_then(|_| {
            let _ = broker.sync_for(again);
            broker.unrecorded()
        });
        let (pid, records) = (broker.id(), unrecorded.is_none());
        let reason = self.shared.silence_of(pid).or(unrecorded);
        BrokerStanding { pid: Some(pid), restarts, records, reason }
    }

    /// Asks the broker, and gives back who answered. A broker that is lost over
    /// it is asked no more. Its successor is asked, once, only if this one has
    /// not seen the request: what cost one broker its life is not given to
    /// the next.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn with<T>(
        &self,
        patience: Patience<'_>,
        ask: impl Fn(&Broker) -> Result<T, BrokerError>,
    ) -> Result<(T, Arc<Broker>), BrokerError> {
        match self.with_one(patience, &ask) {
            Err(BrokerError::Unsent(_)) => self.with_one(patience, &ask),
            answer => answer,
        }
    }

    /// Asks whichever broker there is; one that is lost over it is put away.
    fn with_one<T>(
        &self,
        patience: Patience<'_>,
        ask: impl Fn(&Broker) -> Result<T, BrokerError>,
    ) -> Result<(T, Arc<Broker>), BrokerError> {
        let broker = self.shared.broker(patience)?;
        let answer = ask(&broker);
        self.shared.heard(broker.id(), answer.as_ref().err());
        match answer {
            Ok(answer) => Ok((answer, broker)),
            Err(error) => {
                if error.ends_the_link() {
                    broker.close();
                    self.shared.lost(Some(&broker), &error.to_string());
                }
                Err(error)
            }
        }
    }
}

impl Keeper {
    /// Has the broker end, and waits until it and those that were lost before have:
    /// they follow what they dispatched. No longer than this, and no longer than somebody
    /// `waits`. Whether they have.
    pub fn end_within(&self, time: Duration, waits: impl Fn() -> bool) -> bool {
        let until = Instant::now() + time;
        let mut brokers: Vec<_> = self.end().into_iter().collect();
        brokers.iter().for_each(|broker| broker.close());
        brokers.append(&mut self.shared.state().leaving);
        loop {
            brokers.retain(|broker| !broker.has_ended());
            if brokers.is_empty() || Instant::now() >= until || !waits() {
                return brokers.is_empty();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// None is started any more: the last that was there.
    fn end(&self) -> Option<Arc<Broker>> {
        let broker = {
            let mut state = self.shared.state();
            state.ended = true;
            std::mem::replace(&mut state.broker, Err(Away::lost("it has ended")))
        };
        self.shared.changed.notify_all();
        // Its thread is not waited for: it may be starting a broker, which
        // ends as soon as its link does.
        let _ = self.stop.write(1);
        broker.ok()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Which tells it to end.
        drop(self.end());
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // What it guards is whole between any two statements.
        lock(&self.state)
    }

    /// The broker. One that is about to be there is waited for.
    fn broker(&self, patience: Patience<'_>) -> Result<Arc<Broker>, BrokerError> {
        let until = Instant::now() + ABSENCE_PATIENCE;
        let mut state = self.state();
        loop {
            if patience.is_cancelled() {
                return Err(BrokerError::Cancelled);
            }
            if patience.is_over() {
                return Err(BrokerError::OutOfTime { asked: false });
            }
            let away = match &state.broker {
                Ok(broker) => return Ok(Arc::clone(broker)),
                Err(away) => away,
            };
            let now = Instant::now();
            // One that could not be started may not be at the next time.
            if away.failures > 0 || state.ended || now >= until {
                let left = away.next.saturating_duration_since(now).max(DELAY_MIN);
                return Err(BrokerError::Away {
                    reason: away.reason.clone(),
                    retry_after_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
                });
            }
            let waited = self.changed.wait_timeout(state, LOOK_EVERY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes note of whether the broker answers. Of one that is lost, or that somebody
    /// asked who had less time than an answer may take, nothing is known.
    fn heard(&self, pid: u32, error: Option<&BrokerError>) {
        let answered = matches!(error, None | Some(BrokerError::Refused { .. }));
        if error.is_some_and(BrokerError::is_silence)
            && self.silent.swap(pid, Ordering::Relaxed) != pid
        {
            tracing::error!("the toolbroker gives no answer: {}", what_to_do(pid));
        } else if answered && self.silent.load(Ordering::Relaxed) == pid {
            self.silent.store(0, Ordering::Relaxed);
            tracing::warn!(pid, "the toolbroker answers again");
        }
    }

    fn silence_of(&self, pid: u32) -> Option<String> {
        let is_silent = self.silent.load(Ordering::Relaxed) == pid;
        is_silent.then(|| format!("it gave no answer when it was asked last: {}", what_to_do(pid)))
    }

    /// This broker is lost, if it is the one that is there still; `None` is
    /// whichever is there.
    fn lost(&self, which: Option<&Arc<Broker>>, reason: &str) {
        let mut state = self.state();
        let is_it = |it: &Arc<Broker>| which.is_none_or(|which| Arc::ptr_eq(it, which));
        if state.broker.as_ref().is_ok_and(is_it)
            && let Ok(lost) = std::mem::replace(&mut state.broker, Err(Away::lost(reason)))
        {
            state.leaving.push(lost);
        }
    }

    /// The thread: waits for a loss, and makes it good.
    fn keep(&self, mut link: UnixStream, options: &BrokerOptions, stop: &EventFd) {
        let mut delay = Duration::ZERO;
        let failures = Seldom::failing();
        loop {
            let since = Instant::now();
            if wait(stop, Some(&link), None) {
                return;
            }
            let gone = self.state().broker.as_ref().ok().cloned();
            self.lost(None, "the toolbroker was lost and is being started again");
            // One that was put away before has been told of.
            let (pid, how) = gone.map(|it| (it.id(), it.how_it_ended())).unzip();
            tracing::error!(pid, how, "the toolbroker is lost, and will be started again");
            if since.elapsed() >= delay * STEADY_DELAYS {
                delay = Duration::ZERO;
            }
            link = loop {
                delay = (2 * delay).clamp(DELAY_MIN, DELAY_MAX);
                self.next_at(Instant::now() + delay);
                if wait(stop, None, Some(delay)) {
                    return;
                }
                let started = Broker::start(options)
                    .and_then(|it| it.link().map(|link| (it, link)).map_err(BrokerError::Start));
                match started {
                    Ok((broker, link)) => {
                        failures.end();
                        self.is_back(broker);
                        break link;
                    }
                    Err(error) => {
                        if failures.is_due_for(&error.to_string()) {
                            tracing::error!(%error, "the toolbroker is not there again");
                        }
                        self.failed(&error);
                    }
                }
            };
        }
    }

    fn is_back(&self, broker: Broker) {
        let mut state = self.state();
        if state.ended {
            return;
        }
        tracing::warn!(pid = broker.id(), "the toolbroker is there again");
        state.broker = Ok(Arc::new(broker));
        state.restarts += 1;
        state.leaving.retain(|it| !it.has_ended());
        drop(state);
        self.changed.notify_all();
    }

    fn next_at(&self, at: Instant) {
        if let Err(away) = &mut self.state().broker {
            away.next = at;
        }
    }

    fn failed(&self, error: &BrokerError) {
        if let Err(away) = &mut self.state().broker {
            away.reason = match error {
                // Whoever reads this reads another's standard error.
                BrokerError::Configuration => REFUSES.into(),
                other => other.to_string(),
            };
            away.failures += 1;
        }
        // Nobody waits for it any longer.
        self.changed.notify_all();
    }
}

/// Of a broker that refuses its configuration: its standard error is the service's.
const REFUSES: &str = "the toolbroker refuses its configuration: it said why on the standard error \
     of the service (under systemd, `journalctl -u` its unit), and so does `forge-vmm config check`";

/// What an operator does about a broker that is there and says nothing.
fn what_to_do(pid: u32) -> String {
    format!(
        "`kill -CONT {pid}` if it was stopped; `kill -KILL {pid}` has another started, and what \
         its calls in flight did stays unknown"
    )
}

/// Waits until this link is broken, or the time is over; `true` if it is to
/// stop.
fn wait(stop: &EventFd, link: Option<&UnixStream>, time: Option<Duration>) -> bool {
    let mut polled = [
        libc::pollfd { fd: stop.as_raw_fd(), events: libc::POLLIN, revents: 0 },
        // A hang-up is told unasked; what there is to read is others' to read.
        libc::pollfd { fd: link.map_or(-1, |link| link.as_raw_fd()), events: 0, revents: 0 },
    ];
    let until = time.map(|time| Instant::now() + time);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let ms = left.map_or(-1, |left| i32::try_from(left.as_millis()).unwrap_or(i32::MAX));
        // SAFETY: two valid pollfds.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), 2, ms) };
        match ready {
            0 => return false,
            1.. => return polled[0].revents != 0,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            // It cannot watch: better no successor than a hundred.
            _ => return true,
        }
    }
}
