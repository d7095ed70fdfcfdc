//! Names to addresses.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use crate::locks::lock;
use tokio::sync::watch;

/// A resolution under way.
pub type Resolving<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// Says which addresses a name has. It is asked once for each connection, and
/// believed in nothing: every address is checked by whoever asks.
pub trait Resolver: fmt::Debug + Send + Sync {
    /// The addresses of `host`, a name in the form of DNS.
    fn resolve<'a>(&'a self, host: &'a str) -> Resolving<'a>;
}

/// The host's own resolver, with its `hosts` file and name servers.
///
/// It has one thread for each name at most, however many ask for it. A lookup
/// ends when libc says so, whoever has given it up, and its thread is one of
/// those that files and checks of calls need as well: runs that ask a dead name
/// server and go must not leave a thread each.
#[derive(Clone, Debug, Default)]
pub struct SystemResolver {
    under_way: Arc<Mutex<HashMap<String, Lookup>>>,
}

/// What becomes of a lookup, for all who wait for it.
type Lookup = watch::Receiver<Option<Result<Vec<IpAddr>, io::ErrorKind>>>;

impl SystemResolver {
    /// The one that all of this process share: a name has one thread at most
    /// whichever client asks for it.
    #[must_use]
    pub fn shared() -> Self {
        static SHARED: LazyLock<SystemResolver> = LazyLock::new(SystemResolver::default);
        SHARED.clone()
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<String, Lookup>> {
        lock(&self.under_way)
    }

    /// The lookup of this name that is under way, or one that begins now.
    fn look_up(
        &self,
        host: &str,
        find: impl FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send + 'static,
    ) -> Lookup {
        let mut under_way = self.under_way();
        // One that ended without an outcome, with its event loop, is none.
        if let Some(lookup) = under_way.get(host)
            && lookup.has_changed().is_ok()
        {
            return lookup.clone();
        }
        let (found, lookup) = watch::channel(None);
        under_way.insert(host.to_owned(), lookup.clone());
        let (resolver, host) = (self.clone(), host.to_owned());
        tokio::task::spawn_blocking(move || {
            let addresses = find(&host);
            // Whoever asks from now on has another: names may change.
            resolver.under_way().remove(&host);
            found.send_replace(Some(addresses.map_err(|error| error.kind())));
        });
        lookup
    }
}

/// Asks libc.
fn find(host: &str) -> io::Result<Vec<IpAddr>> {
    // The port belongs to the interface and is not used.
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

async fn outcome(mut lookup: Lookup) -> io::Result<Vec<IpAddr>> {
    let found = lookup.wait_for(Option::is_some).await.map_err(io::Error::other)?;
    match &*found {
        Some(Ok(addresses)) => Ok(addresses.clone()),
        Some(Err(kind)) => Err((*kind).into()),
        None => Err(io::ErrorKind::Other.into()),
    }
}

impl Resolver for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str) -> Resolving<'a> {
        Box::pin(outcome(self.look_up(host, find)))
    }
}

/// For clients whose place is configured: they connect to whatever the name
/// has, and reqwest sets the port.
impl reqwest::dns::Resolve for SystemResolver {
    fn resolve(&self, name: reqwest::dns::Name) -> reqwest::dns::Resolving {
        let lookup = self.look_up(name.as_str(), find);
        Box::pin(async move {
            let addresses = outcome(lookup).await?.into_iter();
            let addresses = addresses.map(|address| SocketAddr::new(address, 0));
            Ok(Box::new(addresses) as reqwest::dns::Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_name_whose_server_says_nothing_has_one_thread_however_many_give_it_up() {
        let resolver = SystemResolver::default();
        let (begins, begun) = mpsc::channel();
        let (answer, answers) = mpsc::channel::<()>();
        let answers = Arc::new(Mutex::new(answers));
        let dead = || {
            let (begins, answers) = (begins.clone(), Arc::clone(&answers));
            resolver.look_up("dead.example", move |_| {
                begins.send(()).unwrap();
                answers.lock().unwrap().recv().unwrap();
                Ok(vec![[192, 0, 2, 1].into()])
            })
        };
        for _ in 0..50 {
            let given_up = tokio::time::timeout(Duration::from_millis(1), outcome(dead())).await;
            assert!(given_up.is_err());
        }
        // Other names have their own.
        let local = Resolver::resolve(&resolver, "::1").await.unwrap();
        assert_eq!(local, [IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])]);
        let last = dead();
        answer.send(()).unwrap();
        assert_eq!(outcome(last).await.unwrap(), [IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(begun.try_iter().count(), 1);
        // What is over is no answer for whoever asks later.
        answer.send(()).unwrap();
        outcome(dead()).await.unwrap();
        assert_eq!(begun.try_iter().count(), 1);
        assert!(resolver.under_way().is_empty());
    }

    #[tokio::test]
    async fn a_client_of_a_server_waits_for_the_lookup_that_is_under_way() {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (answer, answers) = mpsc::channel::<()>();
        // No name server knows the name.
        let _under_way = SystemResolver::shared().look_up("slow.invalid", move |_| {
            answers.recv().unwrap();
            Ok(vec![[127, 0, 0, 1].into()])
        });
        let client = crate::upstream::http::plain_client(Default::default(), &[]).unwrap();
        let mut asked = Box::pin(client.get(format!("http://slow.invalid:{port}/")).send());
        let early = tokio::time::timeout(Duration::from_millis(300), &mut asked).await;
        assert!(early.is_err(), "{early:?}");
        answer.send(()).unwrap();
        tokio::select! {
            connected = listener.accept() => assert!(connected.is_ok()),
            ended = asked => panic!("{ended:?}"),
        }
    }

    #[tokio::test]
    async fn a_lookup_without_an_outcome_keeps_nobody_from_the_next() {
        let resolver = SystemResolver::default();
        let broken = resolver.look_up("name", |_| panic!("no outcome"));
        assert!(outcome(broken).await.is_err());
        let next = resolver.look_up("name", |_| Ok(Vec::new()));
        assert!(outcome(next).await.is_ok());
    }
}
