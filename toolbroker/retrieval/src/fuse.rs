//! The closer look: words and meaning as one score, sentences by themselves,
//! and each step of an intent with a tool of its own.
//!
//! The score is a plain weighted sum. Of the ways that were tried (reciprocal
//! ranks, standard scores), it is the best and the simplest, because it keeps
//! how sure each side is. Its weight belongs to the scale of the table.

use crate::candidates::Candidate;
use crate::weights::Weights;
use crate::{Hit, Index, Query, Step, kernel};

/// Candidates whose sentences are looked at.
const CLOSER: usize = 100;
/// Candidates that are ordered so that they cover the sentences.
const COVERING: usize = 30;
/// Who has so much of a sentence, in the scale of scores, does what it says.
const MEANT: f32 = 0.7;
/// Nor is any other meant where the next best has so much less, as a part of the best.
const APART: f32 = 0.15;

/// A candidate with what it has of each sentence.
struct Closer {
    tool: u32,
    score: f32,
    sentences: Vec<f32>,
}

/// The best `hits` of the candidates. Their order is changed.
pub(crate) fn rank(
    index: &Index,
    candidates: &mut [Candidate],
    whole: &Query,
    steps: &[Step],
    weights: Weights,
    hits: usize,
) -> Vec<Hit> {
    let kept = CLOSER.max(hits).min(candidates.len());
    if kept < candidates.len() {
        candidates.select_nth_unstable_by(kept, Candidate::order);
    }
    let candidates = &mut candidates[..kept];
    let alike = |tool, query: &Query| {
        weights.alike * index.lexical.alike(tool, &query.terms, query.unknown)
    };
    for candidate in candidates.iter_mut().filter(|it| it.score > 0.0) {
        candidate.score += alike(candidate.tool, whole);
    }
    candidates.sort_unstable_by(Candidate::order);
    let hit = |tool: u32, score| Hit { place: tool as usize, score };
    // Nothing in common with the intent: no hit.
    let fits = |candidate: &&Candidate| candidate.score > 0.0;
    let candidates = candidates.iter().filter(fits);
    if steps.is_empty() || (weights.sentence == 0.0 && weights.coverage == 0.0) {
        return candidates.take(hits).map(|c| hit(c.tool, c.score)).collect();
    }

    let mut closer: Vec<Closer> = candidates
        .map(|Candidate { tool, score }| {
            let row = &index.vectors.rows[*tool as usize];
            let scale = index.vectors.scales[*tool as usize];
            let has = |sentence: &Query| {
                let cosine = kernel::dot(&sentence.vector.values, row) as f32;
                let words = index.lexical.rate(*tool, &sentence.terms);
                weights.fuse(cosine * sentence.vector.scale * scale, words) + alike(*tool, sentence)
            };
            let sentences: Vec<f32> = steps.iter().map(|step| has(&step.query)).collect();
            let most = sentences.iter().copied().fold(0.0, f32::max);
            Closer { tool: *tool, score: score + weights.sentence * most, sentences }
        })
        .collect();
    closer.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.tool.cmp(&b.tool)));
    let first = reserve(&mut closer, steps, hits);
    cover(&mut closer, first, weights.coverage, hits);
    closer.iter().take(hits).map(|c| hit(c.tool, c.score)).collect()
}

/// Puts those first that a step of the intent is clearly for, in the order of their scores,
/// and says how many they are. A line of a list is a step, and so is a sentence that one tool
/// has most of or more of than any other; others may say what it is all for.
fn reserve(closer: &mut [Closer], steps: &[Step], hits: usize) -> usize {
    let mut best_of: Vec<(f32, usize)> = Vec::with_capacity(steps.len());
    for (at, step) in steps.iter().enumerate() {
        let (mut best, mut place, mut next) = (0.0, None, 0.0f32);
        for (other, candidate) in closer.iter().enumerate() {
            let has = candidate.sentences[at];
            if has > best {
                (next, best, place) = (best, has, Some(other));
            } else {
                next = next.max(has);
            }
        }
        let is_clear = step.is_line || best >= MEANT || best - next >= APART * best;
        best_of.extend(place.filter(|_| is_clear).map(|place| (best, place)));
    }
    // Where there is not room for all, for those that are surest.
    best_of.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut places: Vec<usize> = Vec::with_capacity(best_of.len());
    for (_, place) in best_of {
        if places.len() < hits && !places.contains(&place) {
            places.push(place);
        }
    }
    places.sort_unstable();
    for (to, from) in places.iter().enumerate() {
        closer[to..=*from].rotate_right(1);
    }
    places.len()
}

/// Orders the first so that, behind the `reserved`, each of `hits` in turn is the one with
/// the best score and gain together: what it has of the sentences beyond what those before
/// it have.
fn cover(closer: &mut [Closer], reserved: usize, weight: f32, hits: usize) {
    let covering = closer.len().min(COVERING);
    let closer = &mut closer[..covering.max(reserved)];
    let Some(first) = closer.first() else { return };
    let mut covered = vec![0.0f32; first.sentences.len()];
    for at in 0..closer.len().min(hits) {
        let worth = |candidate: &Closer| {
            let gain: f32 = candidate
                .sentences
                .iter()
                .zip(&covered)
                .map(|(has, covered)| (has - covered).max(0.0))
                .sum();
            candidate.score + weight * gain / covered.len() as f32
        };
        // The first of equals, which has the better score.
        let mut best = at;
        for other in at + 1..closer.len() {
            if at >= reserved && worth(&closer[other]) > worth(&closer[best]) {
                best = other;
            }
        }
        closer[at..=best].rotate_right(1);
        for (covered, has) in covered.iter_mut().zip(&closer[at].sentences) {
            *covered = covered.max(*has);
        }
    }
}
