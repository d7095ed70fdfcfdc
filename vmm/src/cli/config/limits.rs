//! `[limits]` of `forge.toml`: the most that any run may ask for.

use std::ops::RangeInclusive;
use std::path::Path;

use forge_protocol::limits::RunLimits;
use serde::Deserialize;

use super::fault::Fault;
use super::read_config;
use crate::cli::CliError;

/// What a run has that asks for nothing must be there for it; and an hour is longer
/// than anybody waits for one answer.
const WALL_MS: RangeInclusive<u64> = 5_000..=3_600_000;

/// The table as it is written.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowLimits {
    /// Wall clock, in milliseconds.
    wall_ms: Option<u64>,
}

impl LowLimits {
    pub(super) fn faults(&self) -> Vec<Fault> {
        let (least, most) = WALL_MS.into_inner();
        let is_over = self.wall_ms.is_some_and(|wall_ms| !WALL_MS.contains(&wall_ms));
        let fault = Fault::at("limits.wall_ms", format!("must be {least} to {most}"));
        is_over.then_some(fault).into_iter().collect()
    }

    fn resolve(self) -> RunLimits {
        let usual = RunLimits::operator_maxima();
        RunLimits { wall_ms: self.wall_ms.unwrap_or(usual.wall_ms), ..usual }
    }
}

/// The most that a run may ask for by this configuration, or without one.
pub(crate) fn maxima(config: Option<&Path>) -> Result<RunLimits, CliError> {
    let Some(path) = config else { return Ok(LowLimits::default().resolve()) };
    let low = read_config(path)?.limits;
    match low.faults().into_iter().next() {
        Some(fault) => Err(fault.of(path)),
        None => Ok(low.resolve()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bound_is_below_what_a_run_has_that_asks_for_nothing() {
        let of = |wall_ms| LowLimits { wall_ms: Some(wall_ms) };
        for wall_ms in [*WALL_MS.start(), *WALL_MS.end()] {
            assert!(of(wall_ms).faults().is_empty());
            assert_eq!(RunLimits::default().within(&of(wall_ms).resolve()), Ok(()));
        }
        for wall_ms in [WALL_MS.start() - 1, WALL_MS.end() + 1] {
            assert_eq!(of(wall_ms).faults().len(), 1, "{wall_ms}");
        }
    }
}
