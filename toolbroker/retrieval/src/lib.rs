//! Retrieval: from what somebody wants to the few tools that fit it.
//!
//! An [`Index`] is built from tool descriptions, and [`Index::search`] gives
//! the best tools for an intent by words (BM25F over stems) and by meaning
//! (static vectors), fused. It distrusts descriptions and intents alike: both
//! are strangers' text, every size has a bound, and neither can make a search
//! fail. Deliberately absent are IO, clocks, randomness and any network: the
//! same index and intent give the same answer on every machine. Absent too is
//! any say in what may be called: a hit is a proposal, a grant is what counts.
//!
//! | module | what it holds |
//! |---|---|
//! | `text` | words, stop words, stems, sentences |
//! | `spelling` | slips of the pen in an intent |
//! | `lexical` | BM25F: terms by tool, tools by term |
//! | `embedding` | the table of word vectors, and texts as vectors |
//! | `kernel` | the two inner loops, compiled for what the CPU has |
//! | `candidates` | which tools of very many are worth a closer look |
//! | `weights` | what words and meaning are worth beside each other |
//! | `fuse` | the closer look: scores, sentences, coverage |
//! | [`quality`] | how good a ranking is, by what should have been found |

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod candidates;
mod description;
mod embedding;
mod fuse;
mod kernel;
mod lexical;
pub mod quality;
mod spelling;
mod text;
mod weights;

use std::sync::{Mutex, PoisonError};

use candidates::Scratch;
pub use description::Description;
use embedding::{DIMENSIONS, Quantised, Signs, TABLE};
use lexical::{Counts, Lexical, Terms};
use spelling::Spelling;
use weights::Weights;

/// What is read of an intent, in bytes; what follows does not count.
pub const INTENT_BYTES_MAX: usize = 4096;

/// The most hits of one search.
pub const HITS_MAX: usize = 100;

/// Sentences of an intent that are looked at by themselves.
const SENTENCES_MAX: usize = 32;

/// A tool that fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// Its place among the descriptions that the index was built from.
    pub place: usize,
    /// How well it fits. Scores of one search can be compared; those of
    /// different searches cannot. Hits are in the order in which they should
    /// be taken, which for an intent of several steps is not the order of
    /// scores: each step is to have its tool.
    pub score: f32,
}

/// By what tools are searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// By words and meaning: what everybody should use.
    #[default]
    Fused,
    /// By words alone, for comparison.
    Lexical,
    /// By meaning alone, for comparison.
    Embedding,
}

/// Tools, ready to be searched.
pub struct Index {
    lexical: Lexical,
    spelling: Spelling,
    vectors: Vectors,
    /// Room for searches, so that one at a time allocates next to nothing.
    scratch: Mutex<Vec<Scratch>>,
}

/// The vectors of all tools, each kind by itself.
struct Vectors {
    rows: Vec<[i8; DIMENSIONS]>,
    scales: Vec<f32>,
    signs: Vec<Signs>,
}

/// An intent, or a sentence of it, as it is compared with tools.
struct Query {
    terms: Terms,
    /// Words that no tool has.
    unknown: usize,
    vector: Quantised,
}

/// A sentence of an intent of several.
struct Step {
    query: Query,
    /// Whether it has a line to itself ([`text::Sentence`]).
    is_line: bool,
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("tools", &self.len()).finish_non_exhaustive()
    }
}

impl Index {
    /// An index of these tools. Takes about 30 µs for each; at most
    /// `u32::MAX` of them are taken up.
    pub fn new<'a>(tools: impl IntoIterator<Item = Description<'a>>) -> Self {
        let mut counts: Vec<Counts> = Vec::new();
        let mut spelling = Spelling::default();
        let mut vectors = Vectors { rows: Vec::new(), scales: Vec::new(), signs: Vec::new() };
        for tool in tools.into_iter().take(u32::MAX as usize) {
            let read = description::Read::new(&tool);
            counts.push(read.counts());
            spelling.take(&read.prose());
            let vector = read.vector(&TABLE).quantised();
            vectors.signs.push(vector.signs());
            vectors.rows.push(vector.values);
            vectors.scales.push(vector.scale);
        }
        Self { lexical: Lexical::new(&counts), spelling, vectors, scratch: Mutex::default() }
    }

    /// How many tools there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.vectors.rows.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.vectors.rows.is_empty()
    }

    /// The at most `hits` tools that fit an intent best, the best first, or of an intent of
    /// several steps the best of each step before all others; never more than
    /// [`HITS_MAX`]. Of tools that fit equally the earlier comes
    /// first. There are fewer only where there are fewer tools, or where an
    /// intent has nothing in common with the rest.
    #[must_use]
    pub fn search(&self, intent: &str, hits: usize) -> Vec<Hit> {
        self.search_by(Method::Fused, intent, hits)
    }

    /// The same by a method of choice.
    #[must_use]
    pub fn search_by(&self, method: Method, intent: &str, hits: usize) -> Vec<Hit> {
        self.search_in(candidates::FULL_SCAN_MAX, method, intent, hits)
    }

    /// The same, where all of up to `full_scan_max` tools are looked at.
    fn search_in(
        &self,
        full_scan_max: usize,
        method: Method,
        intent: &str,
        hits: usize,
    ) -> Vec<Hit> {
        let hits = hits.min(HITS_MAX);
        if hits == 0 || self.is_empty() {
            return Vec::new();
        }
        let weights = Weights::of(method);
        let intent = &text::by_kind(text::cut(intent, INTENT_BYTES_MAX));
        let intent = &text::with_sending(intent);
        let is_known = |word: &str| self.lexical.unknown(word) == 0;
        let intent = &self.spelling.corrected(intent, &TABLE, is_known);
        let whole = self.query(intent);
        let step = |sentence: &text::Sentence<'_>| Step {
            query: self.query(sentence.text),
            is_line: sentence.is_line,
        };
        let steps = match text::steps(intent, SENTENCES_MAX) {
            // The only one is the whole.
            several if several.len() > 1 => several.iter().map(step).collect(),
            _ => Vec::new(),
        };
        let mut scratch = self.free().pop().unwrap_or_default();
        scratch.find(self, &whole, weights, full_scan_max);
        let found = fuse::rank(self, &mut scratch.found, &whole, &steps, weights, hits);
        self.free().push(scratch);
        found
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<Scratch>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn query(&self, text: &str) -> Query {
        let (terms, unknown) = (self.lexical.terms(text), self.lexical.unknown(text));
        Query { terms, unknown, vector: TABLE.embed(&[(text, 1.0)]).quantised() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const TOOLS: &str = include_str!("../../../examples/retrieval/surface/tools.jsonl");
    const QUERIES: &str = include_str!("../../../examples/retrieval/surface/queries.jsonl");

    fn lines(text: &str) -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// So many tools of random words from the example surface.
    fn random(count: usize) -> Index {
        let mut all = Vec::new();
        text::words(TOOLS, |word| all.push(word.to_owned()));
        all.sort_unstable();
        all.dedup();
        let mut state = 1u64;
        let mut some = |count: usize| {
            let mut text = String::new();
            for _ in 0..count {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push_str(&all[(state >> 33) as usize % all.len()]);
                text.push(' ');
            }
            text
        };
        let texts: Vec<(String, String)> = (0..count).map(|_| (some(2), some(10))).collect();
        let schema = json!({});
        Index::new(texts.iter().map(|(name, description)| Description {
            name,
            server: "",
            category: "",
            description,
            input_schema: &schema,
        }))
    }

    #[test]
    fn what_a_parameter_may_be_counts() {
        let schema = |kinds: &[&str]| json!({"properties": {"kind": {"enum": kinds}}});
        let (host, other) =
            (schema(&["restart_vm", "create_backup", "rotate_keys"]), schema(&["open", "closed"]));
        let index = Index::new([("act", &other), ("act", &host), ("act", &other)].map(
            |(name, input_schema)| Description {
                name,
                server: "",
                category: "",
                description: "Does it.",
                input_schema,
            },
        ));
        assert_eq!(index.search("create a backup", 1)[0].place, 1);
    }

    #[test]
    fn an_intent_in_a_descriptions_own_words_finds_it_however_much_more_is_said_there() {
        let long = "To create a new Droplet, send a POST request with the attributes set that \
            the account needs. A Droplet will be created using the provided information. The \
            response body will contain an object with the standard attributes, and will return \
            the networks object when the machine becomes active. Create multiple machines by \
            a list of names; any user data, volumes, keys, backups, monitoring and tags apply to \
            each of them. Request headers, rate limits, regions, sizes and images are told \
            elsewhere."
            .repeat(3);
        let create = format!("Create a New Droplet\n\n{long}\n\nPOST /v2/droplets");
        let others = [
            ("droplets_get", "Retrieve an existing droplet"),
            ("droplets_destroy", "Delete an existing droplet"),
            ("droplets_list", "List all droplets"),
            ("dropletActions_post", "Initiate a droplet action"),
            ("droplets_list_kernels", "List all available kernels for a droplet"),
            ("droplets_list_snapshots", "List snapshots for a droplet"),
            ("droplets_list_backups", "List backups for a droplet"),
            ("autoscalepools_create", "Create a new autoscale pool for droplets"),
        ];
        let schema = json!({});
        let described = |(name, description)| Description {
            name,
            server: "ocean",
            category: "",
            description,
            input_schema: &schema,
        };
        let all = others.into_iter().chain([("droplets_create", create.as_str())]);
        let index = Index::new(all.map(described));
        for (intent, place) in
            [("Create a new droplet", others.len()), ("Delete an existing droplet", 1)]
        {
            assert_eq!(index.search(intent, 1)[0].place, place, "{intent}");
        }
    }

    #[test]
    fn a_search_among_candidates_finds_what_a_search_among_all_does() {
        let index = random(5_000);
        let (mut same, mut all) = (0, 0);
        for query in lines(QUERIES) {
            let intent = query["query"].as_str().unwrap();
            let few = index.search_in(0, Method::Fused, intent, 5);
            let every = index.search_in(usize::MAX, Method::Fused, intent, 5);
            // Of tools that say the same, either will do.
            let found = |hit: &&Hit| few.iter().any(|few| (few.score - hit.score).abs() < 1e-4);
            same += every.iter().filter(found).count();
            all += every.len();
        }
        assert!(all >= 190, "{all}");
        assert!(same * 100 >= all * 99, "{same} of {all}");
    }

    /// The example surface, and those of its queries that find their one tool first.
    fn surface() -> (Vec<Value>, Index, Vec<(String, usize)>) {
        let tools = lines(TOOLS);
        let index = Index::new(tools.iter().map(|tool| Description {
            name: tool["name"].as_str().unwrap(),
            server: tool["server"].as_str().unwrap_or_default(),
            category: "",
            description: tool["description"].as_str().unwrap(),
            input_schema: &tool["inputSchema"],
        }));
        let mut sure = Vec::new();
        for query in lines(QUERIES) {
            let (text, relevant) = (query["query"].as_str().unwrap(), query["relevant"].clone());
            let first = index.search(text, 1)[0].place;
            let is_sure = relevant == json!([tools[first]["name"]]);
            let is_new = sure.iter().all(|(_, place)| *place != first);
            if is_sure && is_new && text::sentences(text, 2).len() == 1 {
                sure.push((text.trim_end_matches(['.', '?']).to_owned(), first));
            }
        }
        (tools, index, sure)
    }

    #[test]
    fn each_step_of_an_intent_has_its_tool_among_those_that_are_found() {
        let (_, index, sure) = surface();
        assert!(sure.len() >= 15, "{}", sure.len());
        let found = |size: usize, write: &dyn Fn(&[&str]) -> String| {
            let mut found = 0;
            for at in 0..sure.len() {
                // Far from each other, so that few are of one server.
                let steps: Vec<_> = (0..size).map(|n| &sure[(at + 5 * n) % sure.len()]).collect();
                let texts: Vec<&str> = steps.iter().map(|(text, _)| text.as_str()).collect();
                let hits = index.search(&write(&texts), 5);
                found += steps.iter().filter(|it| hits.iter().any(|hit| hit.place == it.1)).count();
            }
            (100 * found).div_ceil(size * sure.len())
        };
        let list = |texts: &[&str]| {
            let lines = texts.iter().enumerate();
            lines.map(|(at, text)| format!("{}. {text}\n", at + 1)).collect::<String>()
        };
        let (of_list, of_sentences, joined) = (
            found(4, &list),
            found(4, &|texts| texts.join(". ")),
            found(2, &|texts| texts.join(", then ")),
        );
        assert!(
            of_list >= 99 && of_sentences >= 96 && joined >= 99,
            "{of_list} {of_sentences} {joined}"
        );
    }

    #[test]
    fn members_of_a_parameter_count_wherever_its_schema_says_them() {
        let field = json!({"properties": {"auto_delete": {
            "description": "Delete head branches automatically after a merge."}}});
        for parameter in [
            field.clone(),
            json!({"type": "array", "items": field}),
            json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Patch"}]}),
        ] {
            let schema = json!({"properties": {"body": parameter}, "$defs": {"Patch": field}});
            let endless = json!({"properties": {"body": {"$ref": "#/properties/body"}}});
            let none = json!({});
            let described = |(name, input_schema)| Description {
                name,
                server: "",
                category: "",
                description: "Changes a repository.",
                input_schema,
            };
            let tools = [("a", &none), ("b", &endless), ("update", &schema)];
            let index = Index::new(tools.into_iter().map(described));
            let hits = index.search("delete head branches after a merge", 1);
            assert_eq!(hits[0].place, 2, "{parameter}");
        }
    }
}
