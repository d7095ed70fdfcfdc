//! `forge-vmm bench retrieval`: how well and how fast tools are found, over
//! sets of tools and of queries whose answers are known.
//!
//! A set is a folder with two files of one JSON object a line:
//!
//! ```text
//! tools.jsonl    {"name", "description", "inputSchema", "server"?, "category"?}
//! queries.jsonl  {"id", "query", "relevant": [names]}
//! ```
//!
//! Each set has rows of quality for the search that ships, for words alone and
//! for meaning alone, and counts what an agent would pay for the tools it is
//! shown: the five that are found, and all of them. Latency is of searches for
//! five tools among 500, 10,000 and 100,000: the sets' own as far as they go,
//! and beyond that tools put together from the name of one, the description of
//! another and the parameters of a third.
//!
//! The weights of the search were chosen by the first halves of two public
//! sets; [`is_first_half`] says of a query which half it is in, by its id, and
//! the rows of quality say both. The entries `retrieval.<set>.held_out.…` are
//! the other half by itself, each with the standard error of its mean: how far
//! off it may be, had other queries been asked.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

use forge_retrieval::quality::Quality;
use forge_retrieval::{Description, Index, Method};
use serde::Deserialize;
use serde_json::Value;

use super::disturbance::Counters;
use super::{Outcome, Progress, Results, host_info, stats};

/// Tools that latency is measured among.
const SIZES: [usize; 3] = [500, 10_000, 100_000];
/// Tools an agent is shown.
const SHOWN: usize = 5;
/// Queries that latency is measured with, at most.
const TIMED_MAX: usize = 3000;
/// A file larger than this is a wrong file.
const FILE_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Bytes of JSON that make one token of a language model, about: the rule of
/// thumb that the makers of such models give for English.
const BYTES_PER_TOKEN: f64 = 4.0;

/// A tool, as it stands in `tools.jsonl`.
#[derive(Clone, Debug, Deserialize)]
struct ToolLine {
    name: String,
    #[serde(default)]
    server: String,
    #[serde(default)]
    category: String,
    #[serde(default)]
    description: String,
    #[serde(default, rename = "inputSchema")]
    input_schema: Value,
}

impl ToolLine {
    fn description(&self) -> Description<'_> {
        Description {
            name: &self.name,
            server: &self.server,
            category: &self.category,
            description: &self.description,
            input_schema: &self.input_schema,
        }
    }

    /// What it costs to show it to a model, in tokens.
    fn tokens(&self) -> f64 {
        let shown = serde_json::json!({
            "name": self.name,
            "description": self.description,
            "inputSchema": self.input_schema,
        });
        shown.to_string().len() as f64 / BYTES_PER_TOKEN
    }
}

/// A query, as it stands in `queries.jsonl`.
#[derive(Debug, Deserialize)]
struct QueryLine {
    id: String,
    query: String,
    relevant: Vec<String>,
}

/// A set of tools and of queries over them.
#[derive(Debug)]
pub struct Set {
    name: String,
    tools: Vec<ToolLine>,
    queries: Vec<Query>,
}

#[derive(Debug)]
struct Query {
    text: String,
    first_half: bool,
    /// Places of the tools that should be found.
    relevant: Vec<usize>,
}

/// Whether a query is one of those that weights may be chosen by: a bit of
/// the FNV-1a hash of its id.
#[must_use]
pub fn is_first_half(id: &str) -> bool {
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash >> 40) & 1 == 0
}

/// Reads every set in a folder, by name.
///
/// # Errors
/// What is missing or does not fit, with its file and line.
pub fn read(folder: &Path) -> Result<Vec<Set>, String> {
    let listed = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut sets = Vec::new();
    for entry in listed {
        let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        if path.join("tools.jsonl").is_file() {
            sets.push(read_set(&path)?);
        }
    }
    sets.sort_by(|a, b| a.name.cmp(&b.name));
    if sets.is_empty() {
        return Err(format!(
            "{}: there is no <set>/tools.jsonl in this folder, so there is nothing to search",
            folder.display()
        ));
    }
    Ok(sets)
}

fn read_set(folder: &Path) -> Result<Set, String> {
    let tools: Vec<ToolLine> = read_lines(&folder.join("tools.jsonl"))?;
    let path = folder.join("queries.jsonl");
    let lines: Vec<QueryLine> = read_lines(&path)?;
    let mut places = HashMap::new();
    for (place, tool) in tools.iter().enumerate() {
        if places.insert(tool.name.as_str(), place).is_some() {
            let tools = folder.join("tools.jsonl");
            return Err(format!("{}: the tool {:?} is there twice", tools.display(), tool.name));
        }
    }
    let queries = lines
        .into_iter()
        .map(|QueryLine { id, query, relevant }| {
            let relevant = relevant
                .iter()
                .map(|name| places.get(name.as_str()).copied().ok_or(name))
                .collect::<Result<Vec<usize>, _>>()
                .map_err(|name| {
                    format!("{}: query {id:?}: there is no tool {name:?}", path.display())
                })?;
            Ok(Query { text: query, first_half: is_first_half(&id), relevant })
        })
        .collect::<Result<Vec<Query>, String>>()?;
    if queries.is_empty() {
        return Err(format!("{}: there is no query in it", path.display()));
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Set { name, tools, queries })
}

fn read_lines<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<Vec<T>, String> {
    let at = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let bytes = fs::metadata(path).map_err(|error| at(&error))?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(at(&format!("{bytes} bytes are too many, the limit is {FILE_BYTES_MAX}")));
    }
    let text = fs::read_to_string(path).map_err(|error| at(&error))?;
    (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            serde_json::from_str(line)
                .map_err(|error| format!("{}:{number}: {error}", path.display()))
        })
        .collect()
}

/// Measures all sets. `progress` hears of every step.
#[must_use]
pub fn run(sets: &[Set], mut progress: impl FnMut(Progress)) -> Results {
    let before = Counters::now();
    let mut results = Vec::new();
    let of = sets.len() + SIZES.len();
    for (done, set) in sets.iter().enumerate() {
        progress(Progress { what: "quality", done, of });
        quality(set, &mut results);
    }
    for (done, size) in SIZES.into_iter().enumerate() {
        progress(Progress { what: "latency", done: sets.len() + done, of });
        latency(sets, size, &mut results);
    }
    Results {
        host: host_info(),
        commit: env!("FORGE_COMMIT").into(),
        profile: env!("FORGE_PROFILE").into(),
        disturbed: Counters::now().since(&before),
        cpu_latency_us: None,
        results,
        failed: Vec::new(),
    }
}

fn quality(set: &Set, results: &mut Vec<Outcome>) {
    let index = Index::new(set.tools.iter().map(ToolLine::description));
    let tokens: Vec<f64> = set.tools.iter().map(ToolLine::tokens).collect();
    for (method, row) in
        [(Method::Fused, ""), (Method::Lexical, "lexical."), (Method::Embedding, "embedding.")]
    {
        let mut rated = Vec::new();
        let mut shown = 0.0;
        for query in &set.queries {
            let hits = index.search_by(method, &query.text, 10);
            let places: Vec<usize> = hits.iter().map(|hit| hit.place).collect();
            let mut quality = Quality::default();
            quality.take(&places, &query.relevant);
            // A query without an answer rates nothing.
            if quality.rankings > 0 {
                rated.push((query.first_half, quality));
            }
            shown += places.iter().take(SHOWN).map(|place| tokens[*place]).sum::<f64>();
        }
        for (name, of) in FIGURES {
            let values = |half: Option<bool>| -> Vec<f64> {
                let of_half = rated.iter().filter(|(first, _)| half.is_none_or(|h| h == *first));
                of_half.map(|(_, quality)| of(quality)).collect()
            };
            let [all, first, held_out] = [None, Some(true), Some(false)].map(values);
            let note =
                format!("first half {:.3}, held-out half {:.3}", mean(&first), mean(&held_out));
            let entry = format!("retrieval.{}.{row}{name}", set.name);
            results.push(figure(entry, "part", all.len(), mean(&all), Some(note)));
            let note = format!("standard error {:.3}", standard_error(&held_out));
            let entry = format!("retrieval.{}.{row}held_out.{name}", set.name);
            results.push(figure(entry, "part", held_out.len(), mean(&held_out), Some(note)));
        }
        let name = format!("retrieval.{}.{row}tokens_shown", set.name);
        let mean = shown / set.queries.len() as f64;
        results.push(figure(name, "tokens", set.queries.len(), mean, None));
    }
    // All tools, whatever is asked: everything is found, and paid for.
    let row = |name: &str| format!("retrieval.{}.everything.{name}", set.name);
    results.push(figure(row("all_relevant"), "part", set.queries.len(), 1.0, None));
    let note = format!("{} tools; a token is counted as 4 bytes of JSON", set.tools.len());
    let all: f64 = tokens.iter().sum();
    results.push(figure(row("tokens_shown"), "tokens", 1, all, Some(note)));
}

/// One figure of a ranking.
type Figure = fn(&Quality) -> f64;

/// What is said of a ranking, by the names of the entries.
const FIGURES: [(&str, Figure); 4] = [
    ("recall_at_1", |quality| quality.recall_at_1),
    ("recall_at_5", |quality| quality.recall_at_5),
    ("all_relevant_at_5", |quality| quality.all_at_5),
    ("ndcg_at_10", |quality| quality.ndcg_at_10),
];

/// The mean; 0 of nothing.
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The standard error of the mean of these; 0 where there are no two.
fn standard_error(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64 / values.len() as f64).sqrt()
}

fn figure(name: String, unit: &str, n: usize, value: f64, note: Option<String>) -> Outcome {
    Outcome { n, note, ..outcome(name, unit, vec![value]) }
}

fn outcome(name: String, unit: &str, samples: Vec<f64>) -> Outcome {
    let sorted = stats::sorted(&samples);
    Outcome {
        name,
        unit: unit.into(),
        n: samples.len(),
        p50: stats::percentile(&sorted, 50),
        p90: stats::percentile(&sorted, 90),
        p99: stats::p99(&sorted),
        max: stats::percentile(&sorted, 100),
        ratio: None,
        ratio_of: None,
        interval: None,
        ratio_interval: None,
        note: None,
        samples,
    }
}

fn latency(sets: &[Set], size: usize, results: &mut Vec<Outcome>) {
    let tools = many(sets, size);
    let started = Instant::now();
    let index = Index::new(tools.iter().map(ToolLine::description));
    let built = started.elapsed();
    let all = || sets.iter().flat_map(|set| &set.queries);
    // Evenly from all, if there are too many.
    let step = all().count().div_ceil(TIMED_MAX);
    for (method, row) in [(Method::Fused, "query"), (Method::Lexical, "lexical.query")] {
        let timed = || -> Vec<f64> {
            let once = |query: &Query| {
                let started = Instant::now();
                std::hint::black_box(index.search_by(method, &query.text, SHOWN));
                started.elapsed().as_nanos() as f64 / 1000.0
            };
            all().step_by(step).map(once).collect()
        };
        // Once to warm up, and once that counts.
        let _ = timed();
        let samples = timed();
        let note = format!("among {size} tools, indexed in {:.2} s", built.as_secs_f64());
        let outcome = outcome(format!("retrieval.{row}_{size}"), "us", samples);
        results.push(Outcome { note: Some(note), ..outcome });
    }
}

/// So many tools: those of the sets, and then mixtures of them.
fn many(sets: &[Set], size: usize) -> Vec<ToolLine> {
    let all: Vec<&ToolLine> = sets.iter().flat_map(|set| &set.tools).collect();
    let mut state = 1u64;
    let mut any = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all[(state >> 33) as usize % all.len()]
    };
    let mut tools: Vec<ToolLine> = all.iter().take(size).map(|tool| (*tool).clone()).collect();
    while tools.len() < size {
        let (named, described, called) = (any(), any(), any());
        tools.push(ToolLine {
            name: named.name.clone(),
            server: named.server.clone(),
            category: described.category.clone(),
            description: described.description.clone(),
            input_schema: called.input_schema.clone(),
        });
    }
    tools
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &str = r#"{"name": "refund", "description": "Pays money back", "inputSchema": {}}
{"name": "rain", "server": "sky", "description": "Weather forecast", "inputSchema": {}}
"#;
    const QUERIES: &str = r#"{"id": "1", "query": "will it rain tomorrow", "relevant": ["rain"]}
{"id": "2", "query": "give the money back", "relevant": ["refund"]}
"#;

    /// A folder that is gone after its test.
    struct Folder(std::path::PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn folder(name: &str, files: &[(&str, &str)]) -> Folder {
        let name = format!("forge-bench-retrieval-{name}-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        fs::create_dir_all(folder.0.join("small")).unwrap();
        for (file, text) in files {
            fs::write(folder.0.join("small").join(file), text).unwrap();
        }
        folder
    }

    fn set(name: &str, tools: &str, queries: &str) -> Result<Vec<Set>, String> {
        read(&folder(name, &[("tools.jsonl", tools), ("queries.jsonl", queries)]).0)
    }

    #[test]
    fn a_set_is_read_and_rated_for_every_method_beside_everything() {
        let sets = set("rated", TOOLS, QUERIES).unwrap();
        let mut results = Vec::new();
        quality(&sets[0], &mut results);
        let value = |name: &str| results.iter().find(|r| r.name == name).unwrap().p50;
        assert_eq!(value("retrieval.small.recall_at_1"), 1.0);
        assert_eq!(value("retrieval.small.lexical.recall_at_5"), 1.0);
        assert_eq!(value("retrieval.small.everything.all_relevant"), 1.0);
        // Both tools are shown either way.
        let tokens = value("retrieval.small.everything.tokens_shown");
        assert!(tokens > 10.0 && value("retrieval.small.tokens_shown") <= tokens);
    }

    #[test]
    fn the_held_out_half_has_entries_of_its_own_with_their_standard_error() {
        // Of the first eight ids, those of the held-out half ask for what is not there.
        let lines: Vec<String> = (0..8)
            .map(|id| {
                let wanted = if is_first_half(&id.to_string()) { "rain" } else { "refund" };
                format!(r#"{{"id": "{id}", "query": "weather", "relevant": ["{wanted}"]}}"#)
            })
            .collect();
        let held_out = (0..8).filter(|id| !is_first_half(&id.to_string())).count();
        assert!((2..8).contains(&held_out), "{held_out} of 8");
        let sets = set("halves", TOOLS, &lines.join("\n")).unwrap();
        let mut results = Vec::new();
        quality(&sets[0], &mut results);
        let entry = |name: &str| results.iter().find(|r| r.name == name).unwrap();
        let alone = entry("retrieval.small.held_out.recall_at_1");
        assert_eq!((alone.p50, alone.n), (0.0, held_out));
        assert_eq!(alone.note.as_deref(), Some("standard error 0.000"));
        let all = entry("retrieval.small.recall_at_1");
        assert_eq!((all.p50, all.n), (1.0 - held_out as f64 / 8.0, 8));
        assert_eq!(all.note.as_deref(), Some("first half 1.000, held-out half 0.000"));
    }

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        assert!((standard_error(&[0.0, 1.0, 0.0, 1.0]) - (1.0f64 / 12.0).sqrt()).abs() < 1e-12);
        assert_eq!((standard_error(&[1.0]), standard_error(&[])), (0.0, 0.0));
    }

    #[test]
    fn what_does_not_fit_is_named_with_its_file_and_line() {
        let missing = QUERIES.replace("[\"rain\"]", "[\"snow\"]");
        let doubled = format!("{TOOLS}{TOOLS}");
        for (tools, queries, why) in [
            (TOOLS, missing.as_str(), "no tool \"snow\""),
            (TOOLS, "{\"id\": 1}\n", "queries.jsonl:1: "),
            (TOOLS, "", "no query"),
            (doubled.as_str(), QUERIES, "twice"),
        ] {
            let error = set("wrong", tools, queries).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let empty = folder("empty", &[]);
        assert!(read(&empty.0).unwrap_err().contains("tools.jsonl"));
    }

    #[test]
    fn as_many_tools_as_are_asked_for_are_made_the_same_every_time() {
        let sets = set("many", TOOLS, QUERIES).unwrap();
        let names = |size| many(&sets, size).into_iter().map(|t| t.name).collect::<Vec<_>>();
        assert_eq!(names(1), ["refund"]);
        assert_eq!(names(100).len(), 100);
        assert_eq!(names(100), names(100));
    }
}
