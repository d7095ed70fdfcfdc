//! The signed right to call certain tools: a Biscuit token.
//!
//! # What is in it
//! The authority block, signed with the broker's root key, holds facts:
//!
//! ```text
//! principal("alice");
//! tool("inventory.find_parts", hex:…);         one for each tool, with its digest
//! constraint("shop.order", "/quantity<=5");    what is asked of arguments
//! expires(2026-11-21T12:00:00Z);
//! calls_max(20);                               if the grant has budgets
//! cost_max(100);
//! session("s-17");                             if it is bound to a session
//! check if time($now), expires($end), $now < $end;
//! ```
//!
//! Whoever holds a token may append blocks, offline (see
//! [`attenuation`]). The tools are the authority block's alone, each
//! asked for once: what is left after all checks is the granted set. Budgets,
//! end, session and constraints are read over all blocks, and each further
//! fact can only make them narrower.
//!
//! Constraints are texts to the token, read into [`Constraints`] when it is
//! verified and held against each call outside Datalog, whose integers have
//! 64 bits and whose limits are not those of one call.
//!
//! Distrusted is every byte of a token, later blocks above all; what bounds
//! their cost is said in `shape`. Deliberately
//! absent is revocation.
//!
//! | module | what it holds |
//! |---|---|
//! | `terms` | what a grant is to say |
//! | `issuer` | the root key, what it signs and verifies |
//! | `chain` | a token's blocks, evaluated together |
//! | `granted` | what is left: tools, constraints, the presenter |
//! | [`attenuation`] | how a holder appends a block |
//! | `shape` | what appended blocks may hold |
//! | `error` | why not |

pub mod attenuation;
mod chain;
mod error;
mod granted;
mod issuer;
mod shape;
mod terms;
/// That a token can say what time it is: it has no dates before 1970, and a host whose
/// clock is there has lost it.
fn check_clock(now: std::time::SystemTime) -> Result<(), GrantError> {
    if now < std::time::SystemTime::UNIX_EPOCH {
        return Err(GrantError::Issue("the host's clock is before 1970: set it".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;

pub use chain::Chain;
pub use error::GrantError;
pub use granted::{Grant, check_presenter};
pub use issuer::{Issuer, RootKeyError};
pub use terms::Terms;
