//! Words: BM25F over stems, with one weight for each part of a description.
//!
//! What a term gives a tool does not depend on the query, so it is computed
//! once and kept twice: by term, to find tools, and by tool, to rate those
//! that were found otherwise. Saturation (`K1`) bounds what repeating a word
//! can gain: however often it stands there, less than `K1 + 1` times its idf.

use std::collections::{BTreeMap, HashMap};

use crate::embedding::TABLE;
use crate::text;

const K1: f32 = 1.2;
const B: f32 = 0.75;

/// Terms of a query that count; those that say most are kept.
const QUERY_TERMS_MAX: usize = 48;

/// The parts of a description, by place in [`Counts`].
pub(crate) const FIELDS: usize = 7;
/// What a word is worth in each: name, server, category, description,
/// parameter names, parameter descriptions, and the description's first sentence, which
/// has counted already and is what [`Lexical::alike`] goes by.
const FIELD_WEIGHTS: [f32; FIELDS] = [2.0, 1.0, 1.0, 1.0, 0.5, 0.3, 0.0];
/// The place of the first sentence.
const LEAD: usize = 6;

/// How often each term stands in each part of one tool's description.
pub(crate) type Counts = BTreeMap<String, [u16; FIELDS]>;

/// Counts the terms of one part.
pub(crate) fn count(text: &str, field: usize, counts: &mut Counts) {
    text::words(text, |word| {
        if !text::is_stop_word(word) {
            let count = &mut counts.entry(text::stem(word)).or_default()[field];
            *count = count.saturating_add(1);
        }
    });
}

/// The terms of a request, by number, with their weights.
pub(crate) type Terms = Vec<(u32, f32)>;

/// A term in a tool, or a tool that has a term, and what it gives.
#[derive(Clone, Copy)]
struct Gives {
    id: u32,
    score: f32,
}

/// All terms of all tools.
pub(crate) struct Lexical {
    terms: HashMap<String, u32>,
    by_term: Rows,
    by_tool: Rows,
    /// How rare each term is.
    idf: Vec<f32>,
    /// The terms of each tool's first sentence, in order.
    leads: Vec<Box<[u32]>>,
}

/// Rows of different lengths, one after the other.
struct Rows {
    ends: Vec<u32>,
    all: Vec<Gives>,
}

impl Rows {
    fn row(&self, at: u32) -> &[Gives] {
        let at = at as usize;
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        &self.all[start..self.ends[at] as usize]
    }
}

/// How rare a term is that so many of all tools have.
fn idf(with: u32, all: usize) -> f32 {
    let (with, all) = (with as f32, all as f32);
    (1.0 + (all - with + 0.5) / (with + 0.5)).ln()
}

impl Lexical {
    pub(crate) fn new(tools: &[Counts]) -> Self {
        let lengths = |counts: &Counts| {
            let mut lengths = [0.0f32; FIELDS];
            for count in counts.values() {
                lengths.iter_mut().zip(count).for_each(|(sum, n)| *sum += f32::from(*n));
            }
            lengths
        };
        let mut mean = [0.0f64; FIELDS];
        for counts in tools {
            mean.iter_mut().zip(lengths(counts)).for_each(|(sum, n)| *sum += f64::from(n));
        }
        let mean = mean.map(|sum| (sum / tools.len().max(1) as f64) as f32);

        let mut tools_with: BTreeMap<&str, u32> = BTreeMap::new();
        for term in tools.iter().flat_map(Counts::keys) {
            *tools_with.entry(term).or_default() += 1;
        }
        let terms: HashMap<String, u32> =
            tools_with.keys().zip(0..).map(|(term, id)| ((*term).to_owned(), id)).collect();
        let idf: Vec<f32> = tools_with.values().map(|with| idf(*with, tools.len())).collect();

        let mut by_tool = Rows { ends: Vec::new(), all: Vec::new() };
        for counts in tools {
            let lengths = lengths(counts);
            for (term, count) in counts {
                let mut tf = 0.0;
                for field in 0..FIELDS {
                    if count[field] > 0 {
                        let length = 1.0 - B + B * lengths[field] / mean[field];
                        tf += FIELD_WEIGHTS[field] * f32::from(count[field]) / length;
                    }
                }
                let id = terms[term];
                let score = idf[id as usize] * tf * (K1 + 1.0) / (tf + K1);
                by_tool.all.push(Gives { id, score });
            }
            by_tool.ends.push(by_tool.all.len() as u32);
        }

        let lead = |counts: &Counts| {
            let terms = counts.iter().filter(|(_, count)| count[LEAD] > 0).map(|(it, _)| terms[it]);
            terms.collect()
        };
        let leads = tools.iter().map(lead).collect();

        let mut starts = Vec::with_capacity(idf.len());
        let mut ends = Vec::with_capacity(idf.len());
        let mut end = 0;
        for with in tools_with.values() {
            starts.push(end as usize);
            end += with;
            ends.push(end);
        }
        let mut all = vec![Gives { id: 0, score: 0.0 }; end as usize];
        for tool in 0..tools.len() as u32 {
            for Gives { id: term, score } in by_tool.row(tool) {
                let next = &mut starts[*term as usize];
                all[*next] = Gives { id: tool, score: *score };
                *next += 1;
            }
        }
        Self { terms, by_term: Rows { ends, all }, by_tool, idf, leads }
    }

    /// The terms of a request that any tool has, by number.
    pub(crate) fn terms(&self, request: &str) -> Terms {
        let mut found: BTreeMap<u32, (f32, f32)> = BTreeMap::new();
        text::words(request, |word| {
            if text::is_stop_word(word) {
                return;
            }
            if let Some(id) = self.terms.get(&text::stem(word)) {
                let (count, weight) = found.entry(*id).or_insert((0.0, 0.0));
                if *count == 0.0 {
                    *weight = TABLE.weight(word).sqrt();
                }
                *count += 1.0;
            }
        });
        // `GitHub`, `on-call` and `log in` are `github`, `oncall` and `login` where a tool has
        // these.
        let mut before = String::new();
        text::words(request, |word| {
            if before.len() > 1 && word.len() > 1 {
                before.push_str(word);
                if let Some(id) = self.terms.get(&text::stem(&before)) {
                    found.entry(*id).or_insert_with(|| (1.0, TABLE.weight(&before).sqrt()));
                }
            }
            word.clone_into(&mut before);
        });
        let mut terms: Terms =
            found.into_iter().map(|(id, (n, weight))| (id, (1.0 + n.ln()) * weight)).collect();
        if terms.len() > QUERY_TERMS_MAX {
            // The rarest say most; a stable sort keeps the order of numbers.
            terms.sort_by_key(|(id, _)| self.by_term.row(*id).len());
            terms.truncate(QUERY_TERMS_MAX);
            terms.sort_by_key(|(id, _)| *id);
        }
        terms
    }

    /// How many words of a request no tool has.
    pub(crate) fn unknown(&self, request: &str) -> usize {
        let mut unknown = 0;
        text::words(request, |word| {
            let is_new = !text::is_stop_word(word) && !self.terms.contains_key(&text::stem(word));
            unknown += usize::from(is_new);
        });
        unknown
    }

    /// In how many tools a term is.
    pub(crate) fn tools_with(&self, term: u32) -> usize {
        self.by_term.row(term).len()
    }

    /// Adds what a term gives to each tool that has it. Tools that had nothing
    /// before are appended to `touched`.
    pub(crate) fn add(&self, (id, weight): (u32, f32), scores: &mut [f32], touched: &mut Vec<u32>) {
        for Gives { id: tool, score: gives } in self.by_term.row(id) {
            let score = &mut scores[*tool as usize];
            if *score == 0.0 {
                touched.push(*tool);
            }
            // Never back to zero, however little it is.
            *score += (weight * gives).max(f32::MIN_POSITIVE);
        }
    }

    /// How nearly a request says what the first sentence of a tool's description does: of
    /// the terms of both, by how rare they are, what part they share, squared. All of it is
    /// 1, and what a long request and a sentence have in common by the way is next to
    /// nothing.
    pub(crate) fn alike(&self, tool: u32, terms: &[(u32, f32)], unknown: usize) -> f32 {
        let lead = &self.leads[tool as usize];
        let rarity = |id: &u32| self.idf[*id as usize];
        let known: f32 = terms.iter().map(|(id, _)| rarity(id)).sum();
        let asked = known + unknown as f32 * idf(0, self.leads.len());
        let (mut shared, mut own) = (0.0, 0.0);
        for id in lead {
            match terms.binary_search_by_key(id, |(term, _)| *term) {
                Ok(_) => shared += rarity(id),
                Err(_) => own += rarity(id),
            }
        }
        if shared > 0.0 { (shared / (asked + own)).powi(2) } else { 0.0 }
    }

    /// What a request's terms give one tool.
    pub(crate) fn rate(&self, tool: u32, terms: &[(u32, f32)]) -> f32 {
        let row = self.by_tool.row(tool);
        terms
            .iter()
            .filter_map(|(id, weight)| {
                let at = row.binary_search_by_key(id, |gives| gives.id).ok()?;
                Some((weight * row[at].score).max(f32::MIN_POSITIVE))
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lexical(descriptions: &[&str]) -> Lexical {
        let counts = |description: &&str| {
            let mut counts = Counts::new();
            count(description, 3, &mut counts);
            counts
        };
        Lexical::new(&descriptions.iter().map(counts).collect::<Vec<_>>())
    }

    #[test]
    fn by_term_and_by_tool_say_the_same() {
        let lexical = lexical(&["send an email", "send a fax, send it twice", "read email"]);
        let terms = lexical.terms("sending emails");
        let (mut scores, mut touched) = ([0.0; 3], Vec::new());
        terms.iter().for_each(|term| lexical.add(*term, &mut scores, &mut touched));
        touched.sort_unstable();
        assert_eq!(touched, [0, 1, 2]);
        for tool in 0..3 {
            assert!((scores[tool as usize] - lexical.rate(tool, &terms)).abs() < 1e-6);
        }
        assert!(scores[0] > scores[1] && scores[0] > scores[2], "{scores:?}");
    }

    #[test]
    fn a_word_that_a_tool_has_as_one_is_found_by_its_parts() {
        let lexical = lexical(&["github issue", "git hub", "log of a call", "oncall", "login"]);
        for (request, tool) in [("GitHub", 0), ("Git hub", 0), ("on-call", 3), ("log in", 4)] {
            let terms = lexical.terms(request);
            assert!(lexical.rate(tool, &terms) > 0.0, "{request}");
        }
        // And by themselves as before.
        assert!(lexical.rate(1, &lexical.terms("GitHub")) > 0.0);
        assert_eq!(lexical.terms("issue github"), lexical.terms("github issue"));
    }

    #[test]
    fn repeating_a_word_gains_less_than_its_saturation() {
        let once = "refund a payment";
        let stuffed = "refund ".repeat(2000);
        let lexical = lexical(&[once, &stuffed, "weather", "stocks", "flights", "hotels"]);
        let terms = lexical.terms("refund");
        let (honest, stuffed) = (lexical.rate(0, &terms), lexical.rate(1, &terms));
        assert!(stuffed < honest * (K1 + 1.0), "{honest} {stuffed}");
    }

    #[test]
    fn a_request_without_end_has_only_so_many_terms() {
        let words: Vec<String> =
            (0..500).map(|n| format!("w{}x", "q".repeat(n % 30 + 1))).collect();
        let all = (0..200).map(|n| format!("zz{n}")).collect::<Vec<_>>().join(" ");
        let lexical = lexical(&[&words.join(" "), &all]);
        assert!(lexical.terms(&format!("{} {all}", words.join(" "))).len() <= QUERY_TERMS_MAX);
    }
}
