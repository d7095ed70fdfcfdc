//! Places for connections, and who gives way when all are taken.
//!
//! Whoever reaches a door can open connections and say nothing. So one is a stranger
//! until a request on it has shown a token, and where no place is left, the stranger who
//! has been here for longest makes room. Only among those who are known does one more
//! find none.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// How long a stranger's place may take to come free: as long as its task takes to end.
const LEAVING_TIME_MAX: Duration = Duration::from_secs(1);

/// How many connections there are.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// Open now.
    pub(crate) open: AtomicU64,
    /// That there was no room for, or no more.
    pub(crate) refused: AtomicU64,
}

/// All the places of a door.
#[derive(Debug)]
pub(super) struct Places {
    connections: Arc<Connections>,
    free: Arc<Semaphore>,
    strangers: Arc<Mutex<Strangers>>,
}

/// Those who have shown no token, the oldest first.
#[derive(Debug, Default)]
struct Strangers {
    /// How many have come, which numbers them.
    count: u64,
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// One connection that is open: a place among all. Requests have it in their
/// extensions, so that what a connection becomes keeps it.
#[derive(Debug)]
pub(crate) struct Standing {
    connections: Arc<Connections>,
    strangers: Arc<Mutex<Strangers>>,
    number: u64,
    /// Bytes that its client has sent.
    pub(super) heard: Arc<AtomicU64>,
    _place: OwnedSemaphorePermit,
}

/// Tells a connection that it gives way.
pub(super) struct GivesWay(oneshot::Receiver<()>);

impl Places {
    pub(super) fn new(count: usize, connections: Arc<Connections>) -> Self {
        let (free, strangers) = (Arc::new(Semaphore::new(count)), Default::default());
        Self { connections, free, strangers }
    }

    /// A place for one more, and whether another gave way to it; [`None`] where there is
    /// no stranger who could.
    pub(super) async fn take(&self) -> Option<(Standing, GivesWay, bool)> {
        let free = Arc::clone(&self.free);
        let (place, is_anothers) = match Arc::clone(&free).try_acquire_owned() {
            Ok(place) => (place, false),
            Err(_) => {
                self.connections.refused.fetch_add(1, Ordering::Relaxed);
                let (_, stranger) = lock(&self.strangers).waiting.pop_first()?;
                // One that ends by itself leaves its place as well.
                let _ = stranger.send(());
                let place = tokio::time::timeout(LEAVING_TIME_MAX, free.acquire_owned()).await;
                (place.ok()?.ok()?, true)
            }
        };
        self.connections.open.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        let number = {
            let mut strangers = lock(&self.strangers);
            strangers.count += 1;
            let number = strangers.count;
            strangers.waiting.insert(number, tell);
            number
        };
        let standing = Standing {
            connections: Arc::clone(&self.connections),
            strangers: Arc::clone(&self.strangers),
            number,
            heard: Arc::default(),
            _place: place,
        };
        Some((standing, GivesWay(told), is_anothers))
    }

    /// Waits until so many places are free, all of them.
    pub(super) async fn are_free(&self, count: usize) {
        let _ = self.free.acquire_many(u32::try_from(count).unwrap_or(u32::MAX)).await;
    }
}

impl Standing {
    /// Has it stay: a request on it has shown whose it is.
    fn stay(&self) {
        lock(&self.strangers).waiting.remove(&self.number);
    }

    /// How many bytes have come, of whatever is not whole yet, too.
    pub(crate) fn heard_bytes(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.stay();
        self.connections.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl GivesWay {
    /// Is there when it has to; never for one that is known.
    pub(super) async fn told(self) {
        if self.0.await.is_err() {
            std::future::pending().await
        }
    }
}

/// Has the connection stay of a request that has these: it is known whose it is.
pub(crate) fn stay(of_request: &Extensions) {
    if let Some(standing) = of_request.get::<Arc<Standing>>() {
        standing.stay();
    }
}

/// What it guards is whole between any two statements.
fn lock(strangers: &Mutex<Strangers>) -> MutexGuard<'_, Strangers> {
    strangers.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_stranger_gives_way_and_nobody_who_is_known() {
        let connections = Arc::<Connections>::default();
        let places = Arc::new(Places::new(3, Arc::clone(&connections)));
        let mut here = Vec::new();
        for _ in 0..3 {
            let (standing, gives_way, is_anothers) = places.take().await.unwrap();
            assert!(!is_anothers);
            here.push((standing, gives_way));
        }
        here[0].0.stay();
        let (stranger, gives_way) = here.remove(1);
        let newcomer = tokio::spawn({
            let places = Arc::clone(&places);
            async move { places.take().await }
        });
        gives_way.told().await;
        assert!(!newcomer.is_finished(), "the place is not free yet");
        drop(stranger);
        let (newcomer, _, is_anothers) = newcomer.await.unwrap().unwrap();
        assert!(is_anothers);
        newcomer.stay();
        here[1].0.stay();
        assert!(places.take().await.is_none(), "all that are here are known");
        for (_, gives_way) in here {
            let told = tokio::time::timeout(Duration::from_millis(20), gives_way.told()).await;
            assert!(told.is_err(), "one that is known was told to give way");
        }
        assert_eq!(connections.refused.load(Ordering::Relaxed), 2);
    }
}
