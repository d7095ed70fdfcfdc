//! How good a ranking is, by what should have been found.

/// The mean quality of several rankings.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quality {
    /// How many rankings.
    pub rankings: usize,
    /// The part of the relevant tools that is the first hit.
    pub recall_at_1: f64,
    /// The part of the relevant tools that is among the first five.
    pub recall_at_5: f64,
    /// How often all relevant tools are among the first five.
    pub all_at_5: f64,
    /// Normalised discounted cumulative gain of the first ten, each relevant
    /// tool worth the same.
    pub ndcg_at_10: f64,
}

impl Quality {
    /// Takes one ranking into the mean: the places of what was found, the best
    /// first, beside those of what should have been. If nothing should, the
    /// ranking says nothing and is left out.
    pub fn take(&mut self, places: &[usize], relevant: &[usize]) {
        if relevant.is_empty() {
            return;
        }
        let all = relevant.len() as f64;
        let among = |first: usize| {
            places.iter().take(first).filter(|place| relevant.contains(place)).count()
        };
        let discount = |rank: usize| 1.0 / (rank as f64 + 2.0).log2();
        let gain: f64 = places
            .iter()
            .take(10)
            .enumerate()
            .filter(|(_, place)| relevant.contains(place))
            .map(|(rank, _)| discount(rank))
            .sum();
        let ideal: f64 = (0..relevant.len().min(10)).map(discount).sum();
        self.rankings += 1;
        let part = 1.0 / self.rankings as f64;
        let mean = |mean: &mut f64, value: f64| *mean += (value - *mean) * part;
        mean(&mut self.recall_at_1, among(1) as f64 / all);
        mean(&mut self.recall_at_5, among(5) as f64 / all);
        mean(&mut self.all_at_5, f64::from(among(5) == relevant.len()));
        mean(&mut self.ndcg_at_10, gain / ideal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(places: &[usize], relevant: &[usize]) -> Quality {
        let mut quality = Quality::default();
        quality.take(places, relevant);
        quality
    }

    #[test]
    fn a_perfect_ranking_is_perfect_and_none_is_nothing() {
        let perfect = of(&[4, 2, 9], &[2, 4]);
        assert_eq!((perfect.recall_at_5, perfect.all_at_5, perfect.ndcg_at_10), (1.0, 1.0, 1.0));
        assert_eq!(perfect.recall_at_1, 0.5);
        let none = of(&[], &[1]);
        assert_eq!((none.recall_at_5, none.all_at_5, none.ndcg_at_10), (0.0, 0.0, 0.0));
    }

    #[test]
    fn what_comes_late_counts_less() {
        let second = of(&[7, 1], &[1]);
        assert_eq!((second.recall_at_1, second.recall_at_5), (0.0, 1.0));
        assert!((second.ndcg_at_10 - 1.0 / 3f64.log2()).abs() < 1e-12);
        assert_eq!(of(&[0, 0, 0, 0, 0, 1], &[1]).recall_at_5, 0.0);
    }

    #[test]
    fn means_are_over_rankings_that_have_an_answer() {
        let mut quality = of(&[1], &[1]);
        quality.take(&[2], &[1]);
        quality.take(&[2], &[]);
        assert_eq!((quality.rankings, quality.recall_at_1), (2, 0.5));
    }
}
