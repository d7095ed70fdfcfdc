//! Doors of a service that speak other protocols than its own.
//!
//! Each is a client of the service and no more: it holds no key that opens
//! anything, starts no program and sees no credential. It distrusts whoever
//! knocks, and what programs and tools leave. Deliberately absent is any way
//! to the service but `forge-client`.
//!
//! | module | what it speaks |
//! |---|---|
//! | [`http`] | HTTP/1.1 with JSON, server-sent events and WebSockets |
//! | [`mcp`] | the Model Context Protocol, over stdio and streamable HTTP |
//!
//! [`web`] holds what both need of HTTP.

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

#[cfg(feature = "http")]
pub mod http;
#[cfg(any(feature = "http", feature = "mcp"))]
mod integer;
#[cfg(feature = "web")]
mod locks;
#[cfg(feature = "mcp")]
pub mod mcp;
#[cfg(all(test, any(feature = "http", feature = "mcp")))]
mod mock;
#[cfg(any(feature = "http", feature = "mcp"))]
mod object;
#[cfg(feature = "web")]
pub mod web;
