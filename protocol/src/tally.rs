//! What a run leaves, counted against its limits.
//!
//! A worker counts what its guest sends, and the supervisor what that worker says
//! that it was: a worker may have become its guest's. Both count here, so that
//! neither lets through what the other would not.

use crate::limits::{
    ARTIFACT_NAME_BYTES_MAX, LOG_RECORD_OVERHEAD_BYTES, OverLimit, RunLimits, within,
};
use crate::run::{Artifact, Log};

/// What one run has left so far. Each method counts one thing more.
///
/// # Errors
/// Of each method: [`OverLimit`], the first limit that is passed by it.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    output_bytes: u64,
    log_bytes: u64,
    artifacts: u64,
    calls: u64,
    settled: u64,
}

impl Tally {
    /// Counts a piece of output. One of no bytes is counted by nothing: whoever takes
    /// pieces refuses it.
    pub fn output(&mut self, bytes: &[u8], limits: &RunLimits) -> Result<(), OverLimit> {
        self.output_bytes += bytes.len() as u64;
        within("output_bytes", self.output_bytes, limits.output_bytes.into())
    }

    /// Counts a log record.
    pub fn log(&mut self, log: &Log, limits: &RunLimits) -> Result<(), OverLimit> {
        log.check()?;
        // Empty records would else be free for the guest, not for us.
        self.log_bytes += log.text.len() as u64 + u64::from(LOG_RECORD_OVERHEAD_BYTES);
        within("log_bytes", self.log_bytes, limits.log_bytes.into())
    }

    /// Counts an artifact.
    pub fn artifact(&mut self, artifact: &Artifact, limits: &RunLimits) -> Result<(), OverLimit> {
        let Artifact { name, media_type, content } = artifact;
        self.artifacts += 1;
        within("artifacts", self.artifacts, limits.artifacts.into())?;
        within("artifact_bytes", content.len() as u64, limits.artifact_bytes.into())?;
        let longest = name.len().max(media_type.len()) as u64;
        within("artifact_name_bytes", longest, ARTIFACT_NAME_BYTES_MAX.into())
    }

    /// Counts a tool call.
    pub fn call(&mut self, limits: &RunLimits) -> Result<(), OverLimit> {
        self.calls += 1;
        within("calls", self.calls, limits.calls.into())
    }

    /// That a call settled. None can that was not counted as one before.
    pub fn settled(&mut self) -> Result<(), OverLimit> {
        self.settled += 1;
        within("settled calls", self.settled, self.calls)
    }
}
