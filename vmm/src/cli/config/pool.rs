//! `[pool]` of `forge.toml`: the VMs that stand ready. What the command line
//! says comes first.

use std::path::Path;

use forge_protocol::worker::Reuse;
use serde::Deserialize;

use super::fault::Fault;
use super::read_config;
use crate::cli::CliError;
use crate::cli::args::{PoolArgs, ReuseArg};

/// VMs that stand ready at all times, where nobody says how many.
const READY: usize = 2;
/// At most, when more are needed.
const READY_MAX: usize = 16;
/// Beyond this it is a mistake: each takes a process and memory.
const READY_BOUND: usize = 4096;
/// One reset of so many is compared with the first state.
const PROVE_ONE_IN: u32 = 1000;

/// The table as it is written.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LowPool {
    /// VMs that stand ready at all times.
    ready: Option<usize>,
    /// VMs that stand ready at most.
    ready_max: Option<usize>,
    /// What becomes of a VM after its run.
    reuse: Option<ReuseArg>,
    /// With `reset`: one of so many is proven.
    prove_one_in: Option<u32>,
}

/// The VMs that stand ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) ready_min: usize,
    pub(crate) ready_max: usize,
    pub(crate) reuse: Reuse,
}

/// What a command line and a configuration say of the pool.
pub(crate) fn pool(args: &PoolArgs, config: Option<&Path>) -> Result<Pool, CliError> {
    for (flag, value) in [("--ready", args.ready), ("--ready-max", args.ready_max)] {
        if value.is_some_and(|value| value > READY_BOUND) {
            return Err(CliError::Usage(format!("{flag}: at most {READY_BOUND}")));
        }
    }
    let Some(path) = config else { return Ok(LowPool::default().resolve(args)) };
    let low = read_config(path)?.pool;
    match low.faults().into_iter().next() {
        Some(fault) => Err(fault.of(path)),
        None => Ok(low.resolve(args)),
    }
}

impl LowPool {
    /// Whether VMs are put back.
    pub(super) fn resets(&self) -> bool {
        self.reuse == Some(ReuseArg::Reset)
    }

    pub(super) fn faults(&self) -> Vec<Fault> {
        [("pool.ready", self.ready), ("pool.ready_max", self.ready_max)]
            .into_iter()
            .filter(|(_, value)| value.is_some_and(|value| value > READY_BOUND))
            .map(|(field, _)| Fault::at(field, format!("must be at most {READY_BOUND}")))
            .collect()
    }

    fn resolve(self, args: &PoolArgs) -> Pool {
        let ready_min = args.ready.or(self.ready).unwrap_or(READY);
        let ready_max = args.ready_max.or(self.ready_max).unwrap_or(READY_MAX).max(ready_min);
        let reuse = match args.reuse.or(self.reuse).unwrap_or(ReuseArg::Fresh) {
            ReuseArg::Fresh => Reuse::Fresh,
            ReuseArg::Reset => Reuse::Reset {
                prove_one_in: args.prove_one_in.or(self.prove_one_in).unwrap_or(PROVE_ONE_IN),
            },
        };
        Pool { ready_min, ready_max, reuse }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_comes_before_the_file_and_the_file_before_the_usual() {
        let low = LowPool { ready: Some(5), ready_max: Some(3), ..LowPool::default() };
        let none = PoolArgs::default();
        assert_eq!(
            LowPool::default().resolve(&none),
            Pool { ready_min: 2, ready_max: 16, reuse: Reuse::Fresh }
        );
        let pool = low.resolve(&none);
        assert_eq!((pool.ready_min, pool.ready_max), (5, 5));
        let said = PoolArgs { ready: Some(1), reuse: Some(ReuseArg::Reset), ..none };
        let pool = low.resolve(&said);
        assert_eq!((pool.ready_min, pool.ready_max), (1, 3));
        assert_eq!(pool.reuse, Reuse::Reset { prove_one_in: 1000 });
        let huge = LowPool { ready: Some(5000), ..low };
        assert_eq!(huge.faults().len(), 1);
    }
}
