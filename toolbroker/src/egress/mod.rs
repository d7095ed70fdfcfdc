//! The way out: requests over HTTP that a tool makes for a program, and the
//! guard that each of them passes.
//!
//! ```text
//!  a URL, strictly read                    rule::admit
//!    → a rule allows scheme, host, port, method and path
//!    → the name is resolved, once          Resolver
//!    → every address is public, or in the rule's own ranges
//!    → connected to one of these addresses, and to nothing else
//!    → TLS and Host with the name          Client
//!    → a redirect?  from the top, at most REDIRECTS_MAX times
//!    → headers and body, within bounds, credentials removed
//! ```
//!
//! Distrusted are the program's URL and headers, what name servers say, and
//! everything that a server answers. A request is sent only to a
//! [`Destination`](rule::Destination), which only a rule makes, and a
//! connection is opened only to an address that was checked. Deliberately
//! absent: proxies and other settings from the environment, cookies, pools
//! of connections, compression, HTTP/2, and a second resolution.

pub mod address;
mod client;
mod resolve;
pub mod rule;

pub(crate) use self::client::says_length;
pub use self::client::{
    Client, FetchError, Fetched, Policy, REDIRECTS_MAX, Request, Response, Room, tls,
};
pub use self::resolve::{Resolver, Resolving, SystemResolver};
