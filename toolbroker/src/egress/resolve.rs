//! Names to addresses.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;

/// A resolution under way.
pub type Resolving<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// Says which addresses a name has. It is asked once for each connection, and
/// believed in nothing: every address is checked by whoever asks.
pub trait Resolver: fmt::Debug + Send + Sync {
    /// The addresses of `host`, a name in the form of DNS.
    fn resolve<'a>(&'a self, host: &'a str) -> Resolving<'a>;
}

/// The host's own resolver, with its `hosts` file and name servers.
#[derive(Debug)]
pub struct SystemResolver;

impl Resolver for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str) -> Resolving<'a> {
        Box::pin(async move {
            // The port belongs to the interface and is not used.
            let addresses = tokio::net::lookup_host((host, 0)).await?;
            Ok(addresses.map(|address| address.ip()).collect())
        })
    }
}
