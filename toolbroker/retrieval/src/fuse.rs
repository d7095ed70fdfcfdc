//! The closer look: words and meaning as one score, sentences by themselves,
//! and each step of an intent with a tool of its own.
//!
//! The score is a plain weighted sum. Of the ways that were tried (reciprocal
//! ranks, standard scores), it is the best and the simplest, because it keeps
//! how sure each side is. Its weight belongs to the scale of the table.

use crate::candidates::Candidate;
use crate::weights::Weights;
use crate::{Hit, Index, Query, kernel};

/// Candidates whose sentences are looked at.
const CLOSER: usize = 100;
/// Candidates that are ordered so that each sentence has its tool.
const COVERING: usize = 30;

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
    sentences: &[Query],
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
    if sentences.is_empty() || (weights.sentence == 0.0 && weights.coverage == 0.0) {
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
            let sentences: Vec<f32> = sentences.iter().map(has).collect();
            let most = sentences.iter().copied().fold(0.0, f32::max);
            Closer { tool: *tool, score: score + weights.sentence * most, sentences }
        })
        .collect();
    closer.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.tool.cmp(&b.tool)));
    cover(&mut closer, weights.coverage, hits);
    closer.iter().take(hits).map(|c| hit(c.tool, c.score)).collect()
}

/// Orders the first so that each of `hits` in turn is the one with the best
/// score and gain together: what it has of the sentences beyond what those
/// before it have.
fn cover(closer: &mut [Closer], weight: f32, hits: usize) {
    let covering = closer.len().min(COVERING);
    let closer = &mut closer[..covering];
    let Some(first) = closer.first() else { return };
    let mut covered = vec![0.0f32; first.sentences.len()];
    for at in 0..covering.min(hits) {
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
        for other in at + 1..covering {
            if worth(&closer[other]) > worth(&closer[best]) {
                best = other;
            }
        }
        closer[at..=best].rotate_right(1);
        for (covered, has) in covered.iter_mut().zip(&closer[at].sentences) {
            *covered = covered.max(*has);
        }
    }
}
