//! Places for connections, and who gives way when all are taken.
//!
//! Whoever reaches a door can open connections and say nothing. So one is a stranger
//! until a request on it has shown a token, and where no place is left, the stranger who
//! has been here for longest makes room. Each token holder keeps up to an eighth of all places
//! safe from others. Connections beyond that make room first, as long as strangers hold less
//! than an eighth. One more finds no place only where all places are kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::locks::lock;
use hyper::http::Extensions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// How long a stranger's place may take to come free: as long as its task takes to end.
const LEAVING_TIME_MAX: Duration = Duration::from_secs(1);

/// Which part of all places one holder of tokens can have for good: one in so many.
const SHARE: usize = 8;

/// How many connections there are.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// Connections that are open now.
    pub(crate) open: AtomicU64,
    /// That there was no room for, or no more.
    pub(crate) refused: AtomicU64,
}

/// All the places of a door.
#[derive(Debug)]
pub(super) struct Places {
    connections: Arc<Connections>,
    free: Arc<Semaphore>,
    guests: Arc<Mutex<Guests>>,
}

/// Who has a connection.
#[derive(Debug, Default)]
struct Guests {
    /// How many have come, which numbers them.
    count: u64,
    /// Those who have shown no token, the oldest first.
    strangers: BTreeMap<u64, oneshot::Sender<()>>,
    /// Those beyond their holder's share.
    surplus: BTreeMap<u64, oneshot::Sender<()>>,
    /// How many stay of each holder that has any.
    staying: HashMap<String, usize>,
    /// How many connections of one holder may stay.
    of_one_max: usize,
}

impl Guests {
    /// Has one give way, if anybody is to. Strangers, who can be as many as they like,
    /// take no more from a holder than its own share.
    fn give_way(&mut self) -> Option<()> {
        let strangers_first = self.strangers.len() >= self.of_one_max;
        loop {
            let (_, one) = match strangers_first {
                true => self.strangers.pop_first().or_else(|| self.surplus.pop_first()),
                false => self.surplus.pop_first().or_else(|| self.strangers.pop_first()),
            }?;
            // Or it is about to leave by itself.
            if one.send(()).is_ok() {
                return Some(());
            }
        }
    }

    /// Whether it gives way to nobody from now on.
    fn keep(&mut self, number: u64) -> bool {
        self.strangers.remove(&number).or_else(|| self.surplus.remove(&number)).is_some()
    }
}

/// One connection that is open: a place among all. Requests have it in their
/// extensions, so that what a connection becomes keeps it.
#[derive(Debug)]
pub(crate) struct Standing {
    connections: Arc<Connections>,
    guests: Arc<Mutex<Guests>>,
    number: u64,
    /// Whose it is, once it stays.
    holder: OnceLock<String>,
    /// Bytes that its client has sent.
    pub(super) heard: Arc<AtomicU64>,
    _place: OwnedSemaphorePermit,
}

/// Tells a connection that it gives way.
pub(super) struct GivesWay(oneshot::Receiver<()>);

impl Places {
    pub(super) fn new(count: usize, connections: Arc<Connections>) -> Self {
        let of_one_max = (count / SHARE).max(1);
        let guests = Guests { of_one_max, ..Guests::default() };
        let free = Arc::new(Semaphore::new(count));
        Self { connections, free, guests: Arc::new(Mutex::new(guests)) }
    }

    /// A place for one more, and whether another gave way to it; [`None`] where there is
    /// no stranger who could.
    pub(super) async fn take(&self) -> Option<(Standing, GivesWay, bool)> {
        let free = Arc::clone(&self.free);
        let (place, is_anothers) = match Arc::clone(&free).try_acquire_owned() {
            Ok(place) => (place, false),
            Err(_) => {
                self.connections.refused.fetch_add(1, Ordering::Relaxed);
                lock(&self.guests).give_way()?;
                let place = tokio::time::timeout(LEAVING_TIME_MAX, free.acquire_owned()).await;
                (place.ok()?.ok()?, true)
            }
        };
        self.connections.open.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        let number = {
            let mut guests = lock(&self.guests);
            guests.count += 1;
            let number = guests.count;
            guests.strangers.insert(number, tell);
            number
        };
        let standing = Standing {
            connections: Arc::clone(&self.connections),
            guests: Arc::clone(&self.guests),
            number,
            holder: OnceLock::new(),
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
    /// Has it stay: a request on it has shown that it is this holder's, who has not more
    /// than its share.
    fn stay(&self, holder: &str) {
        if self.holder.get().is_some() {
            return;
        }
        let mut guests = lock(&self.guests);
        let own = guests.staying.get(holder).copied().unwrap_or(0);
        if own >= guests.of_one_max {
            if let Some(tell) = guests.strangers.remove(&self.number) {
                guests.surplus.insert(self.number, tell);
            }
        // One that was told to give way does so.
        } else if guests.keep(self.number) {
            guests.staying.insert(holder.to_owned(), own + 1);
            let _ = self.holder.set(holder.to_owned());
        }
    }

    /// Has it stay as what it has become, which is bounded by itself and gives way to
    /// nobody.
    pub(crate) fn outlast(&self) {
        lock(&self.guests).keep(self.number);
    }

    /// How many bytes have come, of whatever is not whole yet, too.
    pub(crate) fn heard_bytes(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        {
            let mut guests = lock(&self.guests);
            guests.keep(self.number);
            if let Some(holder) = self.holder.take()
                && let Some(own) = guests.staying.get_mut(&holder)
            {
                *own -= 1;
                if *own == 0 {
                    guests.staying.remove(&holder);
                }
            }
        }
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

/// Has the connection stay of a request that has these: it is this holder's.
pub(crate) fn stay(of_request: &Extensions, holder: &str) {
    if let Some(standing) = of_request.get::<Arc<Standing>>() {
        standing.stay(holder);
    }
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
        here[0].0.stay("a");
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
        newcomer.stay("b");
        here[1].0.stay("c");
        assert!(places.take().await.is_none(), "all that are here are known");
        for (_, gives_way) in here {
            let told = tokio::time::timeout(Duration::from_millis(20), gives_way.told()).await;
            assert!(told.is_err(), "one that is known was told to give way");
        }
        assert_eq!(connections.refused.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn of_one_holder_an_eighth_of_the_places_stays_and_what_is_left_is_the_next_ones() {
        let places = Arc::new(Places::new(16, Arc::default()));
        let mut here = Vec::new();
        for _ in 0..16 {
            let (standing, gives_way, _) = places.take().await.unwrap();
            // Each request of a connection says whose it is.
            standing.stay("a");
            standing.stay("a");
            here.push((standing, gives_way));
        }
        let (third, gives_way) = here.remove(2);
        let newcomer = tokio::spawn({
            let places = Arc::clone(&places);
            async move { places.take().await }
        });
        gives_way.told().await;
        // It goes, also if it says something more until it does.
        third.stay("b");
        drop(third);
        let (newcomer, ..) = newcomer.await.unwrap().unwrap();
        newcomer.stay("b");

        // Who outlasts its connection gives way to nobody, and takes no share.
        here[12].0.outlast();
        assert!(!lock(&places.guests).keep(here[12].0.number));
        // With one of the first gone another stays, once it asks again.
        drop(here.remove(0));
        here[3].0.stay("a");
        here[4].0.stay("a");
        let staying = lock(&places.guests).staying.clone();
        assert_eq!(staying, HashMap::from([("a".to_owned(), 2), ("b".to_owned(), 1)]));
        drop((here, newcomer));
        let guests = lock(&places.guests);
        assert!(guests.staying.is_empty() && guests.surplus.is_empty());
    }

    #[tokio::test]
    async fn however_many_strangers_come_a_holder_loses_no_more_than_a_share_to_them() {
        let places = Places::new(16, Arc::default());
        let gone = Arc::<AtomicU64>::default();
        for _ in 0..15 {
            let (standing, gives_way, _) = places.take().await.unwrap();
            standing.stay("a");
            let gone = Arc::clone(&gone);
            tokio::spawn(async move {
                gives_way.told().await;
                gone.fetch_add(1, Ordering::Relaxed);
                drop(standing);
            });
        }
        for _ in 0..100 {
            let (standing, gives_way, _) = places.take().await.unwrap();
            tokio::spawn(async move {
                gives_way.told().await;
                drop(standing);
            });
        }
        assert_eq!(gone.load(Ordering::Relaxed), 1, "strangers have two places");
    }

    #[tokio::test]
    async fn who_has_left_is_counted_as_open_no_more() {
        let connections = Arc::<Connections>::default();
        let places = Places::new(2, Arc::clone(&connections));
        let open = || connections.open.load(Ordering::Relaxed);
        let (first, _, _) = places.take().await.unwrap();
        let (second, _, _) = places.take().await.unwrap();
        assert_eq!(open(), 2);
        drop(first);
        assert_eq!(open(), 1);
        drop(second);
        assert_eq!(open(), 0);
        assert!(lock(&places.guests).strangers.is_empty());
    }
}
