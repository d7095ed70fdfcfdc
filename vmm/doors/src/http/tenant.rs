//! What the door keeps for each principal: the ends of its runs, for a while,
//! and how much it may have under way here.
//!
//! All of it is bounded for each principal on its own, so none can fill what
//! another needs; and principals are the operator's to name. The one thing that
//! they share are the numbers of the door's connection to the service: there a
//! principal has as many as are left at most ([`Numbers`]).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forge_client::Canceller;
use forge_client::protocol::limits;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::events::Events;
use super::key::{self, Keyed};
use super::problem::Problem;
use super::runs::took_no_place;
use crate::locks::lock;

/// Requests of one principal that may be under way at the same time: a run
/// that is waited for and a stream of events are each one.
const REQUESTS_MAX: usize = 256;
/// Questions to the service among them. All principals share what the service
/// takes up at once, and wait for their turn.
const QUESTIONS_MAX: usize = 16;
/// WebSockets among them: each may have one message of a client's in memory,
/// whole or not.
const SOCKETS_MAX: usize = 32;
/// Bodies of one principal's requests that may be in memory at the same time,
/// together, in KiB.
const BODIES_KIB_MAX: usize = 64 * 1024;
/// Messages that wait for clients of its WebSockets, together, in KiB.
const UNSENT_KIB_MAX: usize = 64 * 1024;
/// Runs of one principal that nobody waits for and that are not over.
const RUNNING_MAX: usize = 256;
/// Ended runs that are kept for one principal.
const ENDED_MAX: usize = 256;
/// What their reports, artifacts and events may take together, in bytes. The
/// last to end is kept whatever it takes.
const ENDED_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long an ended run is kept.
pub(crate) const KEPT_TIME: Duration = Duration::from_secs(600);

/// Runs of all principals that can be with the service at a time. What it takes of
/// one connection beyond that is for questions.
const NUMBERS_MAX: usize = limits::NUMBERS_MAX - limits::QUESTIONS_MAX;

/// How many run numbers are free. A principal gets another only while it holds fewer than
/// are free. So one alone has at most half of all, and where several have runs that come and
/// go, each comes to have as many as stay free.
#[derive(Debug)]
struct Numbers(AtomicUsize);

impl Default for Numbers {
    fn default() -> Self {
        Self(AtomicUsize::new(NUMBERS_MAX))
    }
}

/// A run's number; given back when dropped.
#[derive(Debug)]
pub(crate) struct Number {
    left: Arc<Numbers>,
    held: Arc<AtomicUsize>,
}

impl Drop for Number {
    fn drop(&mut self) {
        self.held.fetch_sub(1, Ordering::Relaxed);
        self.left.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A run that can be asked for by its id.
#[derive(Debug)]
pub(crate) struct Kept {
    /// `run_id` of its report.
    pub(crate) id: String,
    pub(crate) canceller: Option<Canceller>,
    pub(crate) events: Events,
}

/// One principal at this door.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    requests: Arc<Semaphore>,
    questions: Arc<Semaphore>,
    sockets: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
    unsent: Arc<Semaphore>,
    running: Arc<Semaphore>,
    left: Arc<Numbers>,
    held: Arc<AtomicUsize>,
    runs: Mutex<Runs>,
}

#[derive(Debug, Default)]
struct Runs {
    by_id: HashMap<String, Arc<Kept>>,
    /// Of runs that were submitted with a key, and of submissions that are being admitted.
    by_key: HashMap<String, Submitted>,
    /// In the order in which they ended: when, which, how large.
    ended: VecDeque<(Instant, String, usize)>,
    ended_bytes: usize,
}

/// What was submitted under a key.
#[derive(Debug)]
struct Submitted {
    order_sha256: [u8; 32],
    /// The run that it is, once it has begun.
    run: Option<String>,
}

/// What is under a key.
#[derive(Debug)]
pub(crate) enum Under {
    /// Nothing yet: it is the claimant's.
    Nothing(Claim),
    /// The run that the key stands for.
    Run(Arc<Kept>),
}

/// A key whose run is to begin. Dropped before, it is free again.
#[derive(Debug)]
pub(crate) struct Claim {
    tenant: Arc<Tenant>,
    key: String,
    /// Whether the key is the run's by now.
    is_bound: bool,
}

impl Claim {
    /// Its run has begun.
    pub(crate) fn bind(mut self, kept: &Kept) {
        let mut runs = self.tenant.runs();
        // One that is forgotten already has its key free with it.
        if runs.by_id.contains_key(&kept.id)
            && let Some(submitted) = runs.by_key.get_mut(&self.key)
        {
            submitted.run = Some(kept.id.clone());
            drop(runs);
            self.is_bound = true;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_bound {
            self.tenant.runs().by_key.remove(&self.key);
        }
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

impl Tenant {
    fn new(name: String, left: Arc<Numbers>) -> Self {
        Self {
            name,
            left,
            held: Arc::default(),
            requests: Arc::new(Semaphore::new(REQUESTS_MAX)),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            sockets: Arc::new(Semaphore::new(SOCKETS_MAX)),
            bodies: Arc::new(Semaphore::new(BODIES_KIB_MAX)),
            unsent: Arc::new(Semaphore::new(UNSENT_KIB_MAX)),
            running: Arc::new(Semaphore::new(RUNNING_MAX)),
            runs: Mutex::default(),
        }
    }

    /// A place for one request.
    pub(crate) fn request(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.requests).try_acquire_owned().map_err(|_| {
            Problem::overloaded(format!("{REQUESTS_MAX} requests of this principal are under way"))
        })
    }

    /// A place for one question.
    pub(crate) fn question(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.questions).try_acquire_owned().map_err(|_| {
            Problem::overloaded(format!(
                "{QUESTIONS_MAX} questions of this principal are unanswered"
            ))
        })
    }

    /// A place for a WebSocket.
    pub(crate) fn socket(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.sockets).try_acquire_owned().map_err(|_| {
            Problem::overloaded(format!("{SOCKETS_MAX} WebSockets of this principal are open"))
        })
    }

    /// Room for a body of so many bytes.
    pub(crate) fn body(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
        self.body_kib(kib(bytes))
    }

    /// Room for a body that has turned out to have so many.
    pub(crate) fn grow_body(
        &self,
        room: &mut OwnedSemaphorePermit,
        bytes: usize,
    ) -> Result<(), Problem> {
        let has = u32::try_from(room.num_permits()).unwrap_or(u32::MAX);
        let more = kib(bytes).saturating_sub(has);
        if more > 0 {
            room.merge(self.body_kib(more)?);
        }
        Ok(())
    }

    fn body_kib(&self, kib: u32) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.bodies).try_acquire_many_owned(kib).map_err(|_| {
            Problem::overloaded(
                "the bodies of this principal's requests fill what there is for them",
            )
        })
    }

    /// Room for a message of so many bytes that waits for a client to take it.
    pub(crate) fn unsent(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.unsent).try_acquire_many_owned(kib(bytes)).ok()
    }

    /// The same for an event. Events leave half of all room to what has to be told.
    pub(crate) fn unsent_event(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let left = self.unsent.available_permits().checked_sub(kib(bytes) as usize)?;
        (left >= UNSENT_KIB_MAX / 2).then(|| self.unsent(bytes)).flatten()
    }

    /// A number for a run, to be held until the service has said that it is over.
    pub(crate) fn number(&self) -> Result<Number, Problem> {
        let held = self.held.load(Ordering::Relaxed);
        let take = |left: usize| if left > held { left.checked_sub(1) } else { None };
        let taken = self.left.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.map_err(|_| {
            Problem::overloaded(format!(
                "{held} runs of this principal are under way, as many as there is room left for"
            ))
        })?;
        self.held.fetch_add(1, Ordering::Relaxed);
        Ok(Number { left: Arc::clone(&self.left), held: Arc::clone(&self.held) })
    }

    /// A place for a run that nobody waits for, beside its number.
    pub(crate) fn run(&self) -> Result<OwnedSemaphorePermit, Problem> {
        Arc::clone(&self.running).try_acquire_owned().map_err(|_| {
            Problem::overloaded(format!("{RUNNING_MAX} runs of this principal are under way"))
        })
    }

    fn runs(&self) -> MutexGuard<'_, Runs> {
        lock(&self.runs)
    }

    /// Has a run found by its id from now on.
    pub(crate) fn keep(&self, kept: Arc<Kept>) {
        self.runs().by_id.insert(kept.id.clone(), kept);
    }

    /// A kept run is over: from now on its time counts.
    pub(crate) fn ended(&self, kept: &Kept, now: Instant) {
        let bytes = kept.events.bytes();
        let mut runs = self.runs();
        runs.ended_bytes += bytes;
        runs.ended.push_back((now, kept.id.clone(), bytes));
        runs.forget(now);
    }

    /// The run of this id, if it is this principal's and still kept.
    pub(crate) fn find(&self, id: &str) -> Result<Arc<Kept>, Problem> {
        let found = self.runs().by_id.get(id).cloned();
        found.ok_or_else(|| {
            let minutes = KEPT_TIME.as_secs() / 60;
            let mib = ENDED_BYTES_MAX >> 20;
            Problem::not_found(format!(
                "no run of this principal has this id, or it is not kept any more: it ended more \
                 than {minutes} minutes, {ENDED_MAX} runs, or {mib} MiB of reports and artifacts \
                 ago"
            ))
        })
    }

    /// What is under the key of a submission.
    ///
    /// # Errors
    /// It is another submission's, or it is not known yet whether its run begins.
    pub(crate) fn under(self: &Arc<Self>, keyed: Keyed) -> Result<Under, Problem> {
        let Keyed { key, order_sha256 } = keyed;
        let mut runs = self.runs();
        if let Some(submitted) = runs.by_key.get(&key) {
            let run = submitted.run.as_ref().and_then(|id| runs.by_id.get(id));
            match run {
                // One that had no room or no host after all leaves its key free.
                Some(run) if took_no_place(run).is_some() => {}
                _ if submitted.order_sha256 != order_sha256 => return Err(key::reused()),
                Some(run) => return Ok(Under::Run(Arc::clone(run))),
                None => return Err(key::in_progress()),
            }
        }
        runs.by_key.insert(key.clone(), Submitted { order_sha256, run: None });
        Ok(Under::Nothing(Claim { tenant: Arc::clone(self), key, is_bound: false }))
    }

    /// The runs that are kept, those that are not over first, then the last to end first;
    /// each with its key, if it has one.
    pub(crate) fn all(&self) -> Vec<(Arc<Kept>, Option<String>)> {
        let runs = self.runs();
        let ended = runs.ended.iter().rev().filter_map(|(_, id, _)| runs.by_id.get(id));
        // One that has just ended is among those yet: it is nowhere else.
        let noted: HashSet<&str> = runs.ended.iter().map(|(_, id, _)| id.as_str()).collect();
        let under_way = runs.by_id.values().filter(|kept| !noted.contains(kept.id.as_str()));
        let keys: HashMap<&str, &str> = runs
            .by_key
            .iter()
            .filter_map(|(key, submitted)| Some((submitted.run.as_deref()?, key.as_str())))
            .collect();
        let key = |kept: &Kept| keys.get(kept.id.as_str()).map(|key| (*key).to_owned());
        under_way.chain(ended).map(|kept| (Arc::clone(kept), key(kept))).collect()
    }

    /// Forgets what was kept for long enough; says whether nothing is left.
    fn sweep(&self, now: Instant) -> bool {
        let mut runs = self.runs();
        runs.forget(now);
        // A run whose client has left may still be with the service, and counts.
        runs.by_id.is_empty() && self.held.load(Ordering::Relaxed) == 0
    }
}

impl Runs {
    fn forget(&mut self, now: Instant) {
        while let Some((at, id, bytes)) = self.ended.front() {
            let too_many = self.ended.len() > ENDED_MAX
                || self.ended.len() > 1 && self.ended_bytes > ENDED_BYTES_MAX;
            if !too_many && now.saturating_duration_since(*at) < KEPT_TIME {
                return;
            }
            self.by_id.remove(id);
            self.by_key.retain(|_, submitted| submitted.run.as_ref() != Some(id));
            self.ended_bytes -= bytes;
            self.ended.pop_front();
        }
    }
}

/// All principals that came by.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    all: Mutex<HashMap<String, Arc<Tenant>>>,
    numbers: Arc<Numbers>,
}

impl Tenants {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Tenant>>> {
        lock(&self.all)
    }

    /// The one of this name.
    pub(crate) fn named(&self, name: String) -> Arc<Tenant> {
        let mut all = self.all();
        let tenant = all.entry(name).or_insert_with_key(|name| {
            Arc::new(Tenant::new(name.clone(), Arc::clone(&self.numbers)))
        });
        Arc::clone(tenant)
    }

    /// Forgets ended runs that were kept for long enough, and principals that
    /// have nothing here.
    pub(crate) fn sweep(&self, now: Instant) {
        // One that is in use stays, and its permits with it.
        self.all().retain(|_, tenant| !tenant.sweep(now) || Arc::strong_count(tenant) > 1);
    }
}

#[cfg(test)]
mod tests {
    use forge_client::protocol::service::Finish;

    use super::*;
    use crate::http::events::End;

    fn end(tenant: &Tenant, id: &str, bytes: usize, now: Instant) {
        let kept = Arc::new(Kept { id: id.into(), canceller: None, events: Events::default() });
        let report = format!(
            r#"{{"run_id":"{id}","status":"ok","kind":"","reason":"{}"}}"#,
            "x".repeat(bytes)
        );
        let finish = Finish { report: report.into_bytes(), artifacts: Vec::new() };
        tenant.keep(Arc::clone(&kept));
        kept.events.end(End::of(finish).unwrap());
        tenant.ended(&kept, now);
    }

    #[test]
    fn an_ended_run_is_kept_for_its_time_and_no_longer() {
        let (tenant, now) = (Tenant::new("a".into(), Arc::default()), Instant::now());
        end(&tenant, "1", 0, now);
        end(&tenant, "2", 0, now + Duration::from_secs(1));
        assert!(!tenant.sweep(now + KEPT_TIME - Duration::from_nanos(1)));
        assert!(tenant.find("1").is_ok());
        assert!(!tenant.sweep(now + KEPT_TIME));
        assert!(tenant.find("1").is_err() && tenant.find("2").is_ok());
        assert!(tenant.sweep(now + KEPT_TIME + Duration::from_secs(1)));
    }

    #[test]
    fn ended_runs_are_bounded_by_number_and_size_and_the_last_stays() {
        let (tenant, now) = (Tenant::new("a".into(), Arc::default()), Instant::now());
        for number in 0..=ENDED_MAX {
            end(&tenant, &number.to_string(), 0, now);
        }
        assert!(tenant.find("0").is_err() && tenant.find("1").is_ok());
        end(&tenant, "large", ENDED_BYTES_MAX + 1, now);
        assert!(tenant.find("large").is_ok());
        assert!(tenant.find("200").is_err());
        assert_eq!(tenant.runs().by_id.len(), 1);
        end(&tenant, "next", 0, now);
        assert!(tenant.find("large").is_err() && tenant.find("next").is_ok());
    }

    #[test]
    fn a_run_is_found_by_its_own_principal_alone() {
        let (tenants, now) = (Tenants::default(), Instant::now());
        end(&tenants.named("alice".into()), "1", 0, now);
        assert!(tenants.named("alice".into()).find("1").is_ok());
        assert!(tenants.named("bob".into()).find("1").is_err());
    }

    #[test]
    fn a_principal_has_no_more_runs_than_it_leaves_to_others() {
        let tenants = Tenants::default();
        let mut held = Vec::new();
        for others in 1..8 {
            let tenant = tenants.named(others.to_string());
            let mine: Vec<_> = std::iter::from_fn(|| tenant.number().ok()).collect();
            assert!(mine.len() >= NUMBERS_MAX >> others, "{others}: {}", mine.len());
            let next = tenants.named("next".into());
            assert!(next.number().is_ok());
            assert_eq!(tenant.number().unwrap_err().body().status(), 429);
            held.push(mine);
        }
        // No question is ever without one.
        assert!(
            held.iter().map(Vec::len).sum::<usize>() + limits::QUESTIONS_MAX <= limits::NUMBERS_MAX
        );
        drop(held);
        let all =
            std::iter::from_fn(|| tenants.named("1".into()).number().ok()).collect::<Vec<_>>();
        assert_eq!(all.len(), NUMBERS_MAX / 2);
    }

    #[test]
    fn a_principal_with_a_run_under_way_is_not_forgotten() {
        let tenants = Tenants::default();
        let number = tenants.named("a".into()).number().unwrap();
        tenants.sweep(Instant::now());
        assert_eq!(tenants.named("a".into()).held.load(Ordering::Relaxed), 1);
        drop(number);
        tenants.sweep(Instant::now());
        assert!(tenants.all().is_empty());
    }

    #[test]
    fn one_principals_requests_leave_room_for_anothers() {
        let tenants = Tenants::default();
        let (alice, bob) = (tenants.named("alice".into()), tenants.named("bob".into()));
        let held: Vec<_> = std::iter::from_fn(|| alice.request().ok()).collect();
        assert_eq!(held.len(), REQUESTS_MAX);
        assert_eq!(alice.request().unwrap_err().body().status(), 429);
        assert!(bob.request().is_ok());
        let body = alice.body(BODIES_KIB_MAX * 1024).unwrap();
        assert_eq!(alice.body(1).unwrap_err().body().status(), 429);
        assert!(bob.body(1).is_ok());
        // What waits for clients is beside that.
        let unsent = alice.unsent(UNSENT_KIB_MAX * 1024).unwrap();
        assert!(alice.unsent(1).is_none() && bob.unsent(1).is_some());
        drop(unsent);
        assert!(alice.unsent(1).is_some());
        // Events have the half of it.
        let events = alice.unsent_event(UNSENT_KIB_MAX / 2 * 1024).unwrap();
        assert!(alice.unsent_event(1).is_none() && alice.unsent(1).is_some());
        drop(events);
        drop((held, body));
        assert!(alice.request().is_ok() && alice.body(1).is_ok());
    }

    #[test]
    fn a_key_is_free_once_its_run_is_forgotten() {
        let (tenant, now) = (Tenants::default().named("a".into()), Instant::now());
        let keyed = |order: u8| Keyed { key: "k".into(), order_sha256: [order; 32] };
        let claims = |order| match tenant.under(keyed(order)) {
            Ok(Under::Nothing(claim)) => claim,
            other => panic!("{order}: {other:?}"),
        };
        let claim = claims(1);
        end(&tenant, "1", 0, now);
        claim.bind(&tenant.find("1").unwrap());
        assert_eq!(tenant.under(keyed(2)).unwrap_err().body().kind(), "key_reused");
        tenant.sweep(now + KEPT_TIME);
        // One that is forgotten before it is known to have begun.
        let claim = claims(2);
        end(&tenant, "2", 0, now);
        let kept = tenant.find("2").unwrap();
        tenant.sweep(now + KEPT_TIME);
        claim.bind(&kept);
        drop(claims(3));
    }

    #[test]
    fn what_is_forgotten_takes_no_room_from_what_ends_later() {
        let (tenant, now) = (Tenant::new("a".into(), Arc::default()), Instant::now());
        end(&tenant, "large", ENDED_BYTES_MAX + 1, now);
        for id in ["1", "2", "3"] {
            end(&tenant, id, 0, now);
        }
        assert!(tenant.find("large").is_err());
        assert!(["1", "2", "3"].iter().all(|id| tenant.find(id).is_ok()));
    }

    #[test]
    fn a_principal_whose_request_is_under_way_is_not_forgotten_with_its_bounds() {
        let (tenants, now) = (Tenants::default(), Instant::now());
        let tenant = tenants.named("a".into());
        tenants.sweep(now);
        assert!(Arc::ptr_eq(&tenant, &tenants.named("a".into())));
        drop(tenant);
        tenants.sweep(now);
        assert!(tenants.all().is_empty());
    }

    #[test]
    fn what_a_run_left_counts_as_kept_with_its_report() {
        let artifact = forge_client::protocol::run::Artifact {
            name: "a".into(),
            media_type: "b/c".into(),
            content: vec![1; 1000],
        };
        let report = br#"{"run_id":"1","status":"ok","kind":"","reason":""}"#.to_vec();
        let report_bytes = report.len();
        let events = Events::default();
        events.end(End::of(Finish { report, artifacts: vec![artifact] }).unwrap());
        assert_eq!(events.bytes(), report_bytes + 1000);
    }
}
