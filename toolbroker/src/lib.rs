//! The toolbroker: the only process that holds credentials. It launches tool
//! servers, issues grants, holds every call of every run against its grant,
//! and gives back results.
//!
//! This room distrusts workers (a run is known by its connection alone), tool
//! servers (their descriptions, results and deaths) and configuration files.
//! Deliberately absent are KVM, guest memory and programs: nothing here ever
//! sees one.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | `mcp.json` and `forge.toml`, read and checked |
//! | [`secret`] | credential values, and their removal from whatever leaves |
//! | [`definition`] | one tool as its server describes it: digest and schema |
//! | `schema` | a stranger's schema: read as meant, weighed, and what does not fit it |
//! | [`builtin`] | tools of the broker's own |
//! | [`egress`] | requests over HTTP that tools make, and the guard before them |
//! | [`endpoint`] | where a server over HTTP is, and what may be sent to it |
//! | [`upstream`] | the servers that tools come from: start, list, call, restart, stop |
//! | [`hosting`] | callers that host tools for one run each |
//! | [`openapi`] | an OpenAPI document: each operation a tool |
//! | [`registry`] | all tools, of servers and built in |
//! | [`retrieval`] | the tools that fit an intent, among those one may see |
//! | [`policy`] | which tools a principal may see |
//! | [`review`] | which definition of each tool was approved |
//! | [`constraint`] | what a grant asks of a call's arguments |
//! | [`grant`] | the signed right to call certain tools, and how its holder narrows it |
//! | [`verified`] | grants that were verified before |
//! | [`budget`] | what one run may still spend |
//! | [`call`] | the chain that every tool call passes |
//! | [`journal`] | what was called and what became of it, on the disk |
//! | [`metrics`] | what is counted |
//! | [`telemetry`] | spans of runs and calls, for a collector |
//! | [`link`] | frames and descriptors on a unix socket |
//! | [`broker`] | the control link and the run links |
//! | [`filter`] | the system calls that this process and its servers do without |
//! | [`process`] | what this process does to itself before anything else |
//! | [`state`] | where the broker keeps what outlives it |
//! | `difference` | two definitions beside each other |
//! | `turns` | a turn for what takes much memory |
//! | `uri` | what is a URI reference |
//! | [`stranger`] | the place of a tool server: its user, namespaces, files, limits |

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod broker;
pub mod budget;
pub mod builtin;
pub mod call;
pub mod config;
pub mod constraint;
pub mod definition;
mod difference;
pub mod egress;
pub mod endpoint;
pub mod filter;
pub mod grant;
pub mod hosting;
pub mod journal;
pub mod link;
mod locks;
pub mod metrics;
pub mod openapi;
pub mod policy;
#[allow(unsafe_code)]
pub mod process;
pub mod registry;
pub mod retrieval;
pub mod review;
mod schema;
pub mod secret;
pub mod state;
pub mod stranger;
pub mod telemetry;
mod turns;
pub mod upstream;
mod uri;
pub mod verified;

pub(crate) use forge_protocol::hex::hex;

/// Cuts `text` to at most `bytes_max` bytes, at a character boundary, and
/// shows that it did.
pub(crate) fn cut(text: &str, bytes_max: usize) -> String {
    const MARK: &str = "…";
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let kept = &text[..text.floor_char_boundary(bytes_max.saturating_sub(MARK.len()))];
    let mut cut = kept.to_owned();
    if cut.len() + MARK.len() <= bytes_max {
        cut.push_str(MARK);
    }
    cut
}

/// Does long work in a thread that nobody else waits for.
pub(crate) async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // Only a panic of ours ends it without an outcome.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
