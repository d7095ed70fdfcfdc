//! Which tools of very many are worth a closer look.
//!
//! Up to [`FULL_SCAN_MAX`] tools: all of them. Beyond, those with the best
//! estimates, which cost a few integer operations for each tool: in how many
//! signs its vector differs from the query's, and what the query's rarer words
//! give it. Candidates are rated exactly afterwards.

use crate::embedding::DIMENSIONS;
use crate::weights::Weights;
use crate::{Index, Query, kernel};

/// Tools of which all are looked at.
pub(crate) const FULL_SCAN_MAX: usize = 4096;

/// Tools that are looked at beyond that.
const CANDIDATES: usize = 1500;
/// Of which so many are looked at for the common terms too.
const CLOSE: usize = 300;
/// Estimates are told apart to this part of 1; the last bucket has all above.
const BUCKETS_PER_ONE: f32 = 512.0;
const BUCKETS: usize = 4096;
/// Tools that are gone through for the rarest terms of a query, together. The
/// terms beyond find none; they still count for those that are found.
const GONE_THROUGH_MAX: usize = 32_768;

/// A tool, and what it has in common with the whole intent.
#[derive(Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) tool: u32,
    pub(crate) score: f32,
}

impl Candidate {
    /// The better first; of equals, the earlier.
    pub(crate) fn order(&self, other: &Self) -> std::cmp::Ordering {
        other.score.total_cmp(&self.score).then(self.tool.cmp(&other.tool))
    }
}

/// Room for one search.
#[derive(Default)]
pub(crate) struct Scratch {
    /// What words give, by tool; all zero between searches.
    lexical: Vec<f32>,
    /// The tools that words give anything.
    touched: Vec<u32>,
    places: Vec<u32>,
    dots: Vec<i32>,
    distances: Vec<u16>,
    buckets: Vec<u16>,
    /// What was found, in no order.
    pub(crate) found: Vec<Candidate>,
}

impl Scratch {
    /// Finds candidates, each with its score for the whole intent.
    pub(crate) fn find(
        &mut self,
        index: &Index,
        query: &Query,
        weights: Weights,
        full_scan_max: usize,
    ) {
        let tools = index.len();
        let full = tools <= full_scan_max;
        self.lexical.resize(tools, 0.0);
        let mut common = query.terms.clone();
        common.sort_by_key(|(term, _)| index.lexical.tools_with(*term));
        let mut through = 0;
        let rare = common.iter().take_while(|(term, _)| {
            through += index.lexical.tools_with(*term);
            full || through <= GONE_THROUGH_MAX
        });
        let rare = rare.count();
        for term in common.drain(..rare) {
            index.lexical.add(term, &mut self.lexical, &mut self.touched);
        }

        self.places.clear();
        if full {
            self.places.extend(0..tools as u32);
        } else {
            self.by_estimate(index, query, weights);
        }

        self.dots.clear();
        kernel::dots(&query.vector.values, &index.vectors.rows, &self.places, &mut self.dots);
        self.found.clear();
        self.found.extend(self.places.iter().zip(&self.dots).map(|(tool, dot)| {
            let words = self.lexical[*tool as usize];
            let scale = index.vectors.scales[*tool as usize] * query.vector.scale;
            Candidate { tool: *tool, score: weights.fuse(*dot as f32 * scale, words) }
        }));
        if !full && self.found.len() > CLOSE {
            self.found.select_nth_unstable_by(CLOSE, |a, b| a.order(b));
            self.found.truncate(CLOSE);
        }
        for candidate in &mut self.found {
            candidate.score += weights.fuse(0.0, index.lexical.rate(candidate.tool, &common));
        }
        for tool in self.touched.drain(..) {
            self.lexical[tool as usize] = 0.0;
        }
    }

    /// The tools with the best estimates: what the signs say of the cosine,
    /// and what the rarer words give.
    fn by_estimate(&mut self, index: &Index, query: &Query, weights: Weights) {
        self.distances.clear();
        kernel::distances(&query.vector.signs(), &index.vectors.signs, &mut self.distances);
        let known = if query.vector.scale == 0.0 { 0.0 } else { 1.0 };
        let bucket_of = |estimate: f32| estimate * BUCKETS_PER_ONE;
        let by_distance: [f32; DIMENSIONS + 1] = std::array::from_fn(|distance| {
            bucket_of(1.0 + weights.fuse(known * cosine_of(distance), 0.0))
        });
        let by_word = bucket_of(weights.fuse(0.0, 1.0));
        let mut in_bucket = [0usize; BUCKETS];
        self.buckets.clear();
        self.buckets.extend(self.distances.iter().zip(&self.lexical).map(|(distance, words)| {
            let bucket = by_distance[usize::from(*distance)] + by_word * words;
            // At most a few hundred, so nothing is cut off but by the last.
            let bucket = (bucket as i32 as usize).min(BUCKETS - 1);
            in_bucket[bucket] += 1;
            bucket as u16
        }));
        let mut count = 0;
        let last = (0..BUCKETS).rev().find(|bucket| {
            count += in_bucket[*bucket];
            count >= CANDIDATES
        });
        // Of those in the last bucket, the earliest.
        let last = last.unwrap_or(0);
        let mut in_last = CANDIDATES.saturating_sub(count - in_bucket[last]);
        for (tool, bucket) in (0..).zip(&self.buckets) {
            let bucket = usize::from(*bucket);
            if bucket > last {
                self.places.push(tool);
            } else if bucket == last && in_last > 0 {
                in_last -= 1;
                self.places.push(tool);
            }
        }
    }
}

/// About the cosine of two vectors that differ in so many signs: the cosine of
/// that part of half a turn, as a polynomial, so that it is the same everywhere.
fn cosine_of(distance: usize) -> f32 {
    let x = 1.0 - 2.0 * distance as f32 / DIMENSIONS as f32;
    x * (1.5706 - x * x * (0.6433 - 0.0727 * x * x))
}
