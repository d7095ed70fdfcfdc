//! What doors that speak HTTP/1.1 share: connections with their bounds, what a request
//! must be, bodies that hold a place, bearer tokens, and whether there is a service
//! behind. What is asked and answered is each door's own.

pub(crate) mod guard;
mod held;
pub(crate) mod listen;
pub(crate) mod places;
mod ready;
mod sent;
pub(crate) mod token;

use tokio::sync::watch;

pub(crate) use held::Held;
pub use listen::Listener;
pub(crate) use ready::Readiness;
#[cfg(feature = "mcp")]
pub(crate) use sent::Sent;
pub use token::{NoTokenHash, TokenHash};

/// Waits until it is set, or will never be.
pub(crate) async fn is_set(flag: &mut watch::Receiver<bool>) {
    let _ = flag.wait_for(|set| *set).await;
}
