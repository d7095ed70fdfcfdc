//! The supervisor.

#![cfg_attr(test, allow(clippy::unwrap_used))]
pub mod keys;
pub mod machine;
pub mod vsock;
pub mod worker;
