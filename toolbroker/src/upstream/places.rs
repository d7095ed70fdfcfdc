//! Places for calls to one server, so many for each principal: none keeps the others
//! from it with calls that the server takes its time for, or with requests that wait
//! to be written.

use std::sync::Arc;

use super::Place;
use super::lines::WAITING_BYTES_MAX;
use super::streamable::REQUESTS_MAX;
use crate::turns::Turns;

/// Places of one principal: half of the calls that may be under way.
const EACH: usize = REQUESTS_MAX / 2;
/// A request takes one more place for each so many of its bytes, so that all of one
/// principal's have half of what may wait for a process.
const BYTES: usize = WAITING_BYTES_MAX / 2 / EACH;

/// The places at one server.
#[derive(Debug)]
pub(super) struct Places(Turns);

impl Default for Places {
    fn default() -> Self {
        Self(Turns::new(EACH))
    }
}

impl Places {
    /// Waits for a place of this principal, for a request of so many bytes.
    pub(super) async fn place(&self, of: &Arc<str>, bytes: usize) -> Option<Place> {
        let takes = (1 + bytes / BYTES).min(EACH);
        self.0.of(of).acquire_many_owned(u32::try_from(takes).ok()?).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use forge_protocol::limits::REQUEST_BYTES_MAX;

    use super::*;

    async fn are_there(of: &str, bytes: usize) -> usize {
        let (places, of): (_, Arc<str>) = (Places::default(), of.into());
        let mut held = Vec::new();
        let wait = std::time::Duration::ZERO;
        while let Ok(Some(place)) = tokio::time::timeout(wait, places.place(&of, bytes)).await {
            held.push(place);
        }
        let other = "somebody else".into();
        let free = tokio::time::timeout(wait, places.place(&other, bytes)).await;
        assert!(free.is_ok(), "another principal has places of its own");
        held.len()
    }

    #[tokio::test]
    async fn large_requests_take_more_places_and_none_is_too_large() {
        assert_eq!(are_there("alice", 0).await, EACH);
        let largest = REQUEST_BYTES_MAX as usize;
        let of_the_largest = are_there("alice", largest).await;
        assert!(of_the_largest * largest <= WAITING_BYTES_MAX / 2);
        assert!(of_the_largest >= 16, "{of_the_largest}");
        assert_eq!(are_there("alice", usize::MAX).await, 1);
    }
}
