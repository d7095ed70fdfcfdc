//! Which tools of very many are worth a closer look.
//!
//! Up to [`FULL_SCAN_MAX`] tools: all of them. Beyond, those whose vectors'
//! signs differ least from the query's (a few integer operations for each
//! tool), and those that have much of the query's rarer words. Both are rated
//! exactly afterwards, so that what is missed is only what neither finds.

use crate::embedding::DIMENSIONS;
use crate::fuse::Weights;
use crate::{Index, Query, kernel};

/// Tools of which all are looked at.
pub(crate) const FULL_SCAN_MAX: usize = 4096;

/// Tools that are found by their vectors' signs.
const NEAR: usize = 1000;
/// Tools that are found by words, at most.
const SAYING: usize = 1000;
/// They have at least this much of what the best has.
const SAYING_PART: f32 = 0.6;
/// A term that one tool of so many has does not find any; it still counts for
/// those that are found.
const COMMON_ONE_IN: usize = 16;

/// A tool, and what it has in common with the whole intent.
#[derive(Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) tool: u32,
    pub(crate) score: f32,
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
        let common = if full { usize::MAX } else { tools / COMMON_ONE_IN };
        let (rare, common): (Vec<_>, Vec<_>) =
            query.terms.iter().partition(|(term, _)| index.lexical.tools_with(*term) <= common);
        for term in rare {
            index.lexical.add(term, &mut self.lexical, &mut self.touched);
        }

        self.places.clear();
        if full {
            self.places.extend(0..tools as u32);
        } else {
            self.by_words();
            self.by_signs(index, query);
            self.places.sort_unstable();
            self.places.dedup();
        }

        self.dots.clear();
        kernel::dots(&query.vector.values, &index.vectors.rows, &self.places, &mut self.dots);
        self.found.clear();
        self.found.extend(self.places.iter().zip(&self.dots).map(|(tool, dot)| {
            let words = self.lexical[*tool as usize] + index.lexical.rate(*tool, &common);
            let scale = index.vectors.scales[*tool as usize] * query.vector.scale;
            Candidate { tool: *tool, score: weights.fuse(*dot as f32 * scale, words) }
        }));
        for tool in self.touched.drain(..) {
            self.lexical[tool as usize] = 0.0;
        }
    }

    fn by_words(&mut self) {
        let lexical = &self.lexical;
        let most = self.touched.iter().map(|tool| lexical[*tool as usize]).fold(0.0, f32::max);
        let enough =
            self.touched.iter().filter(|tool| lexical[**tool as usize] >= most * SAYING_PART);
        self.places.extend(enough);
        if self.places.len() > SAYING {
            let by_score = |a: &u32, b: &u32| {
                lexical[*b as usize].total_cmp(&lexical[*a as usize]).then(a.cmp(b))
            };
            self.places.select_nth_unstable_by(SAYING, by_score);
            self.places.truncate(SAYING);
        }
    }

    fn by_signs(&mut self, index: &Index, query: &Query) {
        if query.vector.scale == 0.0 {
            return;
        }
        self.distances.clear();
        kernel::distances(&query.vector.signs(), &index.vectors.signs, &mut self.distances);
        let mut at_distance = [0usize; DIMENSIONS + 1];
        self.distances.iter().for_each(|distance| at_distance[usize::from(*distance)] += 1);
        let mut count = 0;
        let farthest = at_distance
            .iter()
            .position(|tools| {
                count += tools;
                count >= NEAR
            })
            .unwrap_or(DIMENSIONS);
        // Of those at the last distance, the earliest.
        let mut room = NEAR;
        let mut at_last = NEAR.saturating_sub(count - at_distance[farthest]);
        for (tool, distance) in (0..).zip(&self.distances) {
            let distance = usize::from(*distance);
            if distance > farthest || room == 0 || (distance == farthest && at_last == 0) {
                continue;
            }
            at_last -= usize::from(distance == farthest);
            room -= 1;
            self.places.push(tool);
        }
    }
}
