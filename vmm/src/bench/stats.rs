//! Percentiles, and how sure a median is.
//!
//! Samples of one bench are no independent draws: a host is slower for a while
//! and then is not. So the spread of a median is taken from the medians of
//! consecutive blocks, which such a while moves as a whole, and not from the
//! spread of single samples, which would promise far too much.

/// Lower and upper end of an interval.
pub type Interval = [f64; 2];

/// Blocks that a series is cut into.
pub const BLOCKS: usize = 10;

/// The same values, least first.
#[must_use]
pub fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// The 99th percentile of sorted samples, where they are enough for one: 100.
#[must_use]
pub fn p99(sorted: &[f64]) -> Option<f64> {
    (sorted.len() >= 100).then(|| percentile(sorted, 99))
}

/// The nearest-rank percentile of sorted values: one that was measured. `NaN`
/// if there is none.
#[must_use]
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// The median.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    percentile(&sorted(values), 50)
}

/// The medians of consecutive blocks: [`BLOCKS`] of them, or the values
/// themselves where they are fewer.
#[must_use]
pub fn blocks(values: &[f64]) -> Vec<f64> {
    let count = BLOCKS.min(values.len());
    let bound = |at: usize| at * values.len() / count;
    (0..count).map(|at| median(&values[bound(at)..bound(at + 1)])).collect()
}

/// Where the median of all most likely is, from the medians of the blocks:
/// between the second least and the second greatest of ten (97.9 % if the
/// blocks were independent), between the least and the greatest of fewer than
/// eight. `None` of fewer than three, which say nothing about each other.
#[must_use]
pub fn interval(blocks: &[f64]) -> Option<Interval> {
    let sorted = sorted(blocks);
    let cut = usize::from(sorted.len() >= 8);
    match sorted.get(cut..sorted.len() - cut)? {
        [low, _, .., high] => Some([*low, *high]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 90)), (100.0, 180.0));
        assert_eq!((percentile(&values, 99), percentile(&values, 100)), (198.0, 200.0));
        assert!(percentile(&[], 50).is_nan());
    }

    #[test]
    fn blocks_follow_the_order_of_measuring() {
        let values: Vec<f64> = (0..20).map(|at| f64::from(at / 2)).collect();
        assert_eq!(blocks(&values), (0..10).map(f64::from).collect::<Vec<_>>());
        assert_eq!(blocks(&[3.0, 1.0]), [3.0, 1.0]);
        assert!(blocks(&[]).is_empty());
        // Every value is in one block, also where they do not divide evenly.
        assert_eq!(blocks(&[1.0; 37]), [1.0; 10]);
    }

    #[test]
    fn one_block_that_stands_out_does_not_widen_the_interval() {
        let mut values: Vec<f64> = (1..=10).map(f64::from).collect();
        values[9] = 1e9;
        assert_eq!(interval(&values), Some([2.0, 9.0]));
        assert_eq!(interval(&[2.0, 1.0, 3.0]), Some([1.0, 3.0]));
        assert_eq!(interval(&[2.0, 1.0]), None);
        assert_eq!(interval(&[]), None);
    }
}
