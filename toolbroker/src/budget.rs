//! What one run may still spend: calls, and what they cost.
//!
//! Calls of one run may be in flight together, so both counts are one atomic
//! word: a call takes from both or from neither. Deliberately absent are
//! budgets over several runs and over time.

use std::sync::atomic::{AtomicU64, Ordering};

/// The budget of one run.
#[derive(Debug)]
pub struct Budget {
    calls_max: u32,
    cost_max: u32,
    /// Calls in the upper half, their cost in the lower.
    spent: AtomicU64,
}

/// A budget that has nothing left for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Spent {
    /// All calls were made.
    #[error("the budget of {limit} calls is spent")]
    Calls {
        /// How many.
        limit: u32,
    },
    /// The call costs more than what is left.
    #[error("the call costs {cost}, and {left} of the budget of {limit} is left")]
    Cost {
        /// The call's cost, in budget units.
        cost: u32,
        /// What is left of the budget.
        left: u32,
        /// The budget.
        limit: u32,
    },
}

impl Budget {
    /// A budget with nothing spent.
    #[must_use]
    pub fn new(calls_max: u32, cost_max: Option<u32>) -> Self {
        Self { calls_max, cost_max: cost_max.unwrap_or(u32::MAX), spent: AtomicU64::new(0) }
    }

    /// Takes one call of this cost.
    ///
    /// # Errors
    /// [`Spent`], and nothing is taken.
    pub fn spend(&self, cost: u32) -> Result<(), Spent> {
        let (calls_max, cost_max) = (self.calls_max, self.cost_max);
        let after = |spent: u64| {
            let (calls, costs) = ((spent >> 32) as u32, spent as u32);
            if calls >= calls_max {
                return Err(Spent::Calls { limit: calls_max });
            }
            match costs.checked_add(cost).filter(|costs| *costs <= cost_max) {
                Some(costs) => Ok(u64::from(calls + 1) << 32 | u64::from(costs)),
                None => {
                    let left = cost_max.saturating_sub(costs);
                    Err(Spent::Cost { cost, left, limit: cost_max })
                }
            }
        };
        let mut spent = self.spent.load(Ordering::Acquire);
        loop {
            let next = after(spent)?;
            let swapped =
                self.spent.compare_exchange_weak(spent, next, Ordering::AcqRel, Ordering::Acquire);
            match swapped {
                Ok(_) => return Ok(()),
                Err(now) => spent = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_by_calls_or_by_cost_whichever_comes_first() {
        let budget = Budget::new(3, Some(10));
        budget.spend(4).unwrap();
        budget.spend(6).unwrap();
        assert_eq!(budget.spend(1), Err(Spent::Cost { cost: 1, left: 0, limit: 10 }));
        budget.spend(0).unwrap();
        assert_eq!(budget.spend(0), Err(Spent::Calls { limit: 3 }));
    }

    #[test]
    fn a_refused_call_takes_nothing() {
        let budget = Budget::new(2, Some(10));
        assert!(budget.spend(11).is_err());
        assert!(budget.spend(u32::MAX).is_err());
        budget.spend(10).unwrap();
        assert!(budget.spend(u32::MAX).is_err(), "what is spent and this go around");
        budget.spend(0).unwrap();
    }

    #[test]
    fn calls_that_spend_together_spend_no_more_than_there_is() {
        let budget = Budget::new(u32::MAX, Some(1_000));
        let taken: u32 = std::thread::scope(|scope| {
            let spend = || (0..1_000).filter(|_| budget.spend(1).is_ok()).count() as u32;
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(spend)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(taken, 1_000);
    }
}
