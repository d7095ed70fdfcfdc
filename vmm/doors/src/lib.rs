//! Doors of a forge-vmm service that speak other protocols than its own.
//!
//! A door is a client of the service like any other: it turns what its own
//! clients say into runs and questions on the service's link, and has no way
//! around it. It distrusts its clients, and decides who they are before
//! anything reaches the service. Deliberately absent are grants and admission,
//! which are the broker's and the supervisor's.

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

#[cfg(feature = "mcp")]
pub mod mcp;
