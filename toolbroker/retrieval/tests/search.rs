//! What a search promises, over the example surface of 50 tools and over text
//! that means harm.

#![allow(missing_docs, clippy::unwrap_used)]

use forge_retrieval::quality::Quality;
use forge_retrieval::{Description, HITS_MAX, INTENT_BYTES_MAX, Index, Method};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Tool {
    name: String,
    #[serde(default)]
    server: String,
    #[serde(default)]
    description: String,
    #[serde(default, rename = "inputSchema")]
    input_schema: Value,
}

#[derive(Deserialize)]
struct Query {
    query: String,
    relevant: Vec<String>,
}

fn lines<T: for<'a> Deserialize<'a>>(text: &str) -> Vec<T> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn surface() -> (Vec<Tool>, Vec<Query>) {
    (
        lines(include_str!("../../../examples/retrieval/surface/tools.jsonl")),
        lines(include_str!("../../../examples/retrieval/surface/queries.jsonl")),
    )
}

fn index(tools: &[Tool]) -> Index {
    Index::new(tools.iter().map(|tool| Description {
        name: &tool.name,
        server: &tool.server,
        category: "",
        description: &tool.description,
        input_schema: &tool.input_schema,
    }))
}

fn tool(name: &str, description: &str) -> Tool {
    Tool {
        name: name.into(),
        server: "desk".into(),
        description: description.into(),
        input_schema: json!({}),
    }
}

fn places(index: &Index, intent: &str, k: usize) -> Vec<usize> {
    index.search(intent, k).iter().map(|hit| hit.place).collect()
}

fn quality(method: Method) -> Quality {
    let (tools, queries) = surface();
    let index = index(&tools);
    let mut quality = Quality::default();
    for query in &queries {
        let place = |name: &String| tools.iter().position(|tool| tool.name == *name).unwrap();
        let relevant: Vec<usize> = query.relevant.iter().map(place).collect();
        let hits = index.search_by(method, &query.query, 10);
        quality.take(&hits.iter().map(|hit| hit.place).collect::<Vec<_>>(), &relevant);
    }
    quality
}

#[test]
fn words_and_meaning_together_find_more_than_either_alone() {
    let [fused, lexical, embedding] =
        [Method::Fused, Method::Lexical, Method::Embedding].map(quality);
    assert!(fused.recall_at_5 >= RECALL_MIN, "{fused:?}");
    assert!(fused.recall_at_5 > lexical.recall_at_5, "{fused:?} {lexical:?}");
    assert!(fused.ndcg_at_10 > embedding.ndcg_at_10, "{fused:?} {embedding:?}");
}

/// What was reached when this was written, less one query of the 40.
const RECALL_MIN: f64 = 0.75;

#[test]
fn a_search_gives_the_same_again_and_from_an_index_made_again() {
    let (tools, queries) = surface();
    let (first, second) = (index(&tools), index(&tools));
    for query in &queries {
        let hits = first.search(&query.query, 10);
        assert_eq!(hits, first.search(&query.query, 10));
        assert_eq!(hits, second.search(&query.query, 10));
    }
}

#[test]
fn searches_at_the_same_time_do_not_disturb_each_other() {
    let (tools, queries) = surface();
    let index = index(&tools);
    let alone: Vec<_> = queries.iter().map(|query| index.search(&query.query, 5)).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (query, alone) in queries.iter().zip(&alone) {
                    assert_eq!(index.search(&query.query, 5), *alone);
                }
            });
        }
    });
}

#[test]
fn an_index_of_nothing_finds_nothing() {
    let index = index(&[]);
    assert!(index.is_empty());
    assert!(index.search("anything", 5).is_empty());
}

#[test]
fn never_more_hits_than_asked_for_nor_than_the_most_and_none_twice() {
    let tools: Vec<Tool> = (0..300).map(|n| tool(&format!("t{n}"), "sends a message")).collect();
    let index = index(&tools);
    for (k, expected) in [(0, 0), (1, 1), (7, 7), (100, 100), (usize::MAX, HITS_MAX)] {
        let mut places = places(&index, "send a message. Send another", k);
        assert_eq!(places.len(), expected);
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), expected);
    }
}

#[test]
fn of_equal_tools_the_earlier_comes_first() {
    let tools: Vec<Tool> = (0..20).map(|_| tool("send", "sends a message")).collect();
    assert_eq!(places(&index(&tools), "send a message", 5), [0, 1, 2, 3, 4]);
}

#[test]
fn an_intent_that_says_nothing_finds_nothing() {
    let index = index(&surface().0);
    for intent in ["", " \n", "?!", "\0\u{1b}\u{202e}", "…", "日本語"] {
        assert!(index.search(intent, 5).is_empty(), "{intent:?}");
    }
}

#[test]
fn what_an_intent_says_beyond_its_bound_does_not_count() {
    let index = index(&surface().0);
    let mut long = "x ".repeat(INTENT_BYTES_MAX / 2);
    let before = places(&index, &long, 5);
    long.push_str("send an email to a customer");
    assert_eq!(places(&index, &long, 5), before);
    // A bound in the middle of a character is no trap.
    let odd = format!("a{}", "é".repeat(INTENT_BYTES_MAX));
    let _ = index.search(&odd, 5);
}

#[test]
fn hostile_descriptions_neither_fail_nor_change_what_others_are_found_for() {
    let (mut tools, _) = surface();
    let intent = "Acme wants its money back because of the late delivery.";
    let refund = tools.iter().position(|tool| tool.name == "billing.refund_payment").unwrap();
    assert!(places(&index(&tools), intent, 5).contains(&refund));
    tools.push(tool("", ""));
    tools.push(tool("control", "\0\u{1}\u{7f}\u{fffd}\u{202e}\u{feff}"));
    tools.push(tool("huge", &"lorem ipsum ".repeat(100_000)));
    tools.push(tool(&"n".repeat(100_000), &"\u{1f600}".repeat(10_000)));
    let mut odd = tool("odd", "schemas that are none");
    odd.input_schema = json!({"properties": [1, {"a": null}]});
    tools.push(odd);
    let mut wide = tool("wide", "very many parameters");
    let names = (0..10_000).map(|n| (format!("p{n}"), json!({"description": 7})));
    wide.input_schema = json!({ "properties": names.collect::<serde_json::Map<_, _>>() });
    tools.push(wide);
    assert!(places(&index(&tools), intent, 5).contains(&refund));
}

#[test]
fn a_tool_that_repeats_every_word_does_not_push_the_right_one_out() {
    let (mut tools, queries) = surface();
    let honest = tools.len();
    let words: Vec<&str> =
        tools.iter().flat_map(|tool| tool.description.split_whitespace()).collect();
    let stuffed = words.join(" ").repeat(3);
    tools.push(tool("best_tool", &stuffed));
    let index = index(&tools);
    let first = queries.iter().filter(|query| places(&index, &query.query, 1) == [honest]);
    assert!(first.count() <= queries.len() / 20);
}

#[test]
fn each_step_of_an_intent_has_its_tool() {
    let (tools, _) = surface();
    let found = places(
        &index(&tools),
        "Check whether order 7 was delivered. If it was, send Lin an email.",
        5,
    );
    let names: Vec<&str> = found.iter().map(|place| tools[*place].name.as_str()).collect();
    for server in ["shipping.", "mail."] {
        assert!(names.iter().any(|name| name.starts_with(server)), "{server} {names:?}");
    }
}

#[test]
fn steps_that_one_sentence_joins_have_their_tools() {
    let (tools, _) = surface();
    let index = index(&tools);
    let (mut all, mut has) = (0, 0);
    for (intent, steps) in include_str!("steps.txt").lines().filter_map(|it| it.split_once(" => "))
    {
        let found = places(&index, intent, 5);
        for step in steps.split(' ') {
            let mut good = step.split('|');
            all += 1;
            has += usize::from(good.any(|name| found.iter().any(|at| tools[*at].name == name)));
        }
    }
    assert!(all > 70 && has * 10 >= all * 9, "{has} of {all}");
}

/// A query with one slip in one of its longer words, another one each time.
fn with_a_slip(query: &str, at: usize) -> String {
    let mut words: Vec<String> = query.split(' ').map(str::to_owned).collect();
    let fits = |word: &String| word.len() > 4 && word.bytes().all(|it| it.is_ascii_lowercase());
    let long: Vec<usize> = (0..words.len()).filter(|it| fits(&words[*it])).collect();
    if let Some(of) = long.get(at % long.len().max(1)) {
        let mut letters: Vec<char> = words[*of].chars().collect();
        let place = 1 + at % (letters.len() - 2);
        match at % 3 {
            0 => letters.swap(place, place + 1),
            1 => drop(letters.remove(place)),
            _ => letters.insert(place, letters[place]),
        }
        words[*of] = letters.into_iter().collect();
    }
    words.join(" ")
}

#[test]
fn an_intent_with_a_slip_finds_nearly_what_it_finds_without() {
    let (tools, queries) = surface();
    let index = index(&tools);
    let (mut same, mut all) = (0, 0);
    for (at, query) in queries.iter().enumerate() {
        let right = places(&index, &query.query, 5);
        for slip in at..at + 12 {
            let found = places(&index, &with_a_slip(&query.query, slip), 5);
            same += right.iter().filter(|place| found.contains(place)).count();
            all += right.len();
        }
    }
    assert!(same * 100 >= all * SAME_MIN, "{same} of {all}");
}

/// In percent.
const SAME_MIN: usize = 85;

#[test]
fn a_tool_is_found_by_its_server_however_that_is_written() {
    let (mut tools, _) = surface();
    let first = tools.len();
    for server in ["pagerduty", "zendesk"] {
        tools.push(Tool { server: server.into(), ..tool("list", "Lists what is open") });
    }
    let index = index(&tools);
    for intent in ["what is open in PagerDuty", "what is open in Pager Duty", "open in pagerdtuy"] {
        assert_eq!(places(&index, intent, 1), [first], "{intent}");
    }
}
