//! What it may cost to hold a value against a schema, known before it is done.
//!
//! A schema is a stranger's, and so is a result. References let a small
//! schema stand for a huge one (`a` asks twice for `b`, which asks twice for
//! `c`, …) and for one that is thousands of levels deep. The validator follows
//! them all, on the stack, without a bound of its own. So a schema is weighed
//! when it is compiled, references included, and refused if it is beyond any
//! use; and each value is held against the product before it is validated.
//!
//! All of it are upper bounds, rough on the safe side: a reference that could
//! mean several places counts as all of them. Deliberately absent is any
//! meaning of keywords but those that refer.

use std::collections::HashMap;

use serde_json::Value;

use crate::uri::percent_decoded;

/// Weight, times values of the instance, that is worth validating: some
/// seconds on a thread that nobody waits for.
const WORK_MAX: u64 = 100_000_000;
/// The same for a thread that others wait for: some milliseconds.
const WORK_IN_PLACE_MAX: u64 = 1_000_000;
/// What naming the places of violations may cost, which the validator does
/// without remembering what it has seen.
const NAMING_WORK_MAX: u64 = 1_000_000;
/// The weight of one schema, all its references in place.
const WEIGHT_MAX: u64 = 200_000;
/// Places that one schema's references lead to.
const TARGETS_MAX: usize = 1_024;
/// Schemas with an identifier of their own within one schema.
const RESOURCES_MAX: usize = 32;
/// Levels of one schema, all its references in place and each cycle once.
const DEPTH_MAX: u64 = 1_000;
/// Levels of the schemas of one cycle.
const CYCLE_DEPTH_MAX: u64 = 256;
/// Levels that fit onto the stack of any thread.
const LEVELS_IN_PLACE: u64 = 256;
/// What one level takes on the stack, at most, in bytes.
const LEVEL_BYTES: u64 = 4 * 1024;
/// What a pattern weighs: it may step back often.
const PATTERN_WEIGHT: u64 = 1_000;
/// What a schema weighs that is not in this one: those that the validator
/// knows are the drafts' own.
const FOREIGN_WEIGHT: u64 = 5_000;
/// What it keeps for one value, or [`TEXT_BYTES`] of a text, that an instance is
/// compared with.
const DATA_BYTES: usize = 160;
/// What the validator keeps for one value of a schema beside its place, in bytes.
const PLACE_BYTES: usize = 512;
/// Bytes of a text that weigh as much as one more value.
const TEXT_BYTES: usize = 64;

/// The bounds of one schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Values of the schema that one value of an instance may be held
    /// against.
    weight: u64,
    /// Levels, each cycle passed once.
    depth: u64,
    /// Levels of the deepest cycle, and how often it refers to itself.
    cycle: Option<(u64, u64)>,
}

/// How large an instance is.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    values: u64,
    depth: u64,
}

/// How a value is to be validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The stack it needs, in bytes, if more than any thread has.
    pub(crate) stack_bytes: Option<usize>,
    /// Whether violations may be named by their places.
    pub(crate) names_places: bool,
}

impl Cost {
    /// Weighs a schema.
    ///
    /// # Errors
    /// Why it is beyond any use.
    pub(crate) fn of(schema: &Value) -> Result<Self, String> {
        Graph::of(schema)?.cost()
    }

    /// How to hold `instance` against the schema; `None` if that would be
    /// too much work.
    pub(crate) fn plan(&self, instance: &Value) -> Option<Plan> {
        let size = Size::of(instance);
        let work = self.weight.saturating_mul(size.values);
        if work > WORK_MAX {
            return None;
        }
        let (levels, naming) = match self.cycle {
            None => (self.depth, work),
            Some((depth, returns)) => {
                let times = returns.max(1).saturating_pow(u32::try_from(size.depth).unwrap_or(128));
                (self.depth + depth.saturating_mul(size.depth), work.saturating_mul(times))
            }
        };
        let stack_bytes = (levels > LEVELS_IN_PLACE)
            .then(|| usize::try_from(levels.saturating_mul(LEVEL_BYTES)).unwrap_or(usize::MAX));
        Some(Plan { stack_bytes, names_places: naming <= NAMING_WORK_MAX })
    }

    /// Whether a value of so many bytes of JSON is so little work that others
    /// can wait for it.
    pub(crate) fn is_small(&self, bytes: usize) -> bool {
        // No value takes less than two bytes.
        self.is_small_of((bytes / 2 + 1) as u64)
    }

    /// The same of this value.
    pub(crate) fn is_small_for(&self, instance: &Value) -> bool {
        self.is_small_of(Size::of(instance).values)
    }

    fn is_small_of(&self, values: u64) -> bool {
        self.cycle.is_none() && self.weight.saturating_mul(values) <= WORK_IN_PLACE_MAX
    }
}

/// What the validator of a schema takes at most, in bytes, without its patterns.
/// Each value of the schema that says something about an instance keeps its whole
/// place, as a pointer; 1.5 times that and 260 bytes were measured for each, with
/// jsonschema 0.60.
pub(crate) fn compiled_places_bytes_max(schema: &Value) -> usize {
    fn add(value: &Value, place_bytes: usize, sum: &mut usize) {
        *sum = sum.saturating_add(2 * place_bytes + PLACE_BYTES);
        match value {
            // An index has few digits.
            Value::Array(items) => items.iter().for_each(|it| add(it, place_bytes + 6, sum)),
            Value::Object(members) => members.iter().for_each(|(key, it)| match it {
                // Data, of which no part has a place. (A list is no schema, so that
                // this is not a property of that name.)
                Value::Array(_) if matches!(key.as_str(), "enum" | "required" | "examples") => {
                    *sum = sum.saturating_add(DATA_BYTES * Size::of(it).values as usize);
                }
                it => add(it, place_bytes + key.len() + 1, sum),
            }),
            _ => {}
        }
    }
    let mut sum = 0;
    add(schema, 0, &mut sum);
    sum
}

/// How many values a value holds, long texts counted as several.
pub(crate) fn values_of(value: &Value) -> u64 {
    Size::of(value).values
}

impl Size {
    fn of(value: &Value) -> Self {
        let mut size = Self { values: 1, depth: 1 };
        let mut add = |inner: &Value| {
            let inner = Self::of(inner);
            size.values += inner.values;
            size.depth = size.depth.max(inner.depth + 1);
        };
        match value {
            Value::Array(items) => items.iter().for_each(add),
            Value::Object(members) => members.values().for_each(&mut add),
            Value::String(text) => size.values += (text.len() / TEXT_BYTES) as u64,
            _ => {}
        }
        if let Value::Object(members) = value {
            size.values +=
                members.keys().map(|key| 1 + (key.len() / TEXT_BYTES) as u64).sum::<u64>();
        }
        size
    }
}

/// What a schema's references lead to.
struct Graph<'a> {
    nodes: Vec<Node>,
    /// Places by their address.
    known: HashMap<*const Value, usize>,
    /// Schemas with an identifier of their own, the whole one first.
    resources: Vec<&'a Value>,
    anchors: HashMap<&'a str, Vec<&'a Value>>,
}

#[derive(Default)]
struct Node {
    weight: u64,
    levels: u64,
    /// Which nodes it refers to, each as often as it does.
    edges: Vec<usize>,
}

impl<'a> Graph<'a> {
    fn of(schema: &'a Value) -> Result<Self, String> {
        let mut graph = Self {
            nodes: Vec::new(),
            known: HashMap::new(),
            resources: vec![schema],
            anchors: HashMap::new(),
        };
        let drafts = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let identifier = if drafts.contains("draft-04") { "id" } else { "$id" };
        graph.find_names(schema, identifier, true);
        if graph.resources.len() > RESOURCES_MAX {
            return Err(format!("it has more than {RESOURCES_MAX} schemas with an $id"));
        }
        graph.known.insert(std::ptr::from_ref(schema), 0);
        graph.nodes.push(Node::default());
        let mut waiting = vec![(0, schema)];
        while let Some((number, place)) = waiting.pop() {
            let mut node = Node::default();
            let mut references = Vec::new();
            look(place, 1, &mut node, &mut references);
            for reference in references {
                let targets = graph.targets(reference);
                if targets.is_empty() {
                    node.weight += FOREIGN_WEIGHT;
                }
                for target in targets {
                    let next = graph.nodes.len();
                    let target_number =
                        *graph.known.entry(std::ptr::from_ref(target)).or_insert(next);
                    if target_number == next {
                        if next > TARGETS_MAX {
                            return Err(format!(
                                "its references lead to more than {TARGETS_MAX} places"
                            ));
                        }
                        graph.nodes.push(Node::default());
                        waiting.push((next, target));
                    }
                    node.edges.push(target_number);
                }
            }
            graph.nodes[number] = node;
        }
        Ok(graph)
    }

    fn find_names(&mut self, value: &'a Value, identifier: &str, is_root: bool) {
        match value {
            Value::Array(items) => {
                items.iter().for_each(|item| self.find_names(item, identifier, false));
            }
            Value::Object(members) => {
                for (key, member) in members {
                    let identifies = key == identifier;
                    if let Some(name) = member.as_str()
                        && (identifies || matches!(key.as_str(), "$anchor" | "$dynamicAnchor"))
                    {
                        let name = name.strip_prefix('#').unwrap_or(name);
                        self.anchors.entry(name).or_default().push(value);
                        if identifies && !is_root {
                            self.resources.push(value);
                        }
                    }
                    self.find_names(member, identifier, false);
                }
            }
            _ => {}
        }
    }

    /// All places that a reference may mean.
    fn targets(&self, reference: &str) -> Vec<&'a Value> {
        let (base, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let mut found: Vec<&'a Value> = match fragment {
            "" if base.is_empty() => self.resources.clone(),
            "" => self.anchors.get(base).cloned().unwrap_or_default(),
            pointer if pointer.starts_with('/') => {
                // A pointer in a URI's fragment (RFC 6901, 6).
                let pointer = percent_decoded(pointer.as_bytes());
                let pointer = String::from_utf8_lossy(&pointer);
                self.resources.iter().filter_map(|it| it.pointer(&pointer)).collect()
            }
            name => self.anchors.get(name).cloned().unwrap_or_default(),
        };
        // A name relative to another one, or an anchor that is no such thing.
        if found.is_empty() && self.resources.len() > 1 {
            found = self.resources.clone();
        }
        found
    }

    /// The bounds, from the places that refer to nothing upwards.
    fn cost(&self) -> Result<Cost, String> {
        let mut all = vec![Cost { weight: 0, depth: 0, cycle: None }; self.nodes.len()];
        for members in self.components() {
            let is_member = |number: &usize| members.contains(number);
            let (mut weight, mut depth, mut own_depth, mut returns) = (0_u64, 0_u64, 0_u64, 0_u64);
            let mut cycle: Option<(u64, u64)> = None;
            for number in &members {
                let node = &self.nodes[*number];
                weight = weight.saturating_add(node.weight);
                own_depth = own_depth.saturating_add(node.levels);
                for edge in &node.edges {
                    if is_member(edge) {
                        returns += 1;
                        continue;
                    }
                    let other = all[*edge];
                    weight = weight.saturating_add(other.weight);
                    depth = depth.max(other.depth);
                    cycle = deeper(cycle, other.cycle);
                }
            }
            if weight > WEIGHT_MAX {
                return Err(format!(
                    "with its references and patterns it is larger than any use ({weight}, of {WEIGHT_MAX})"
                ));
            }
            depth = depth.saturating_add(own_depth);
            if depth > DEPTH_MAX {
                return Err(format!("its references make it more than {DEPTH_MAX} levels deep"));
            }
            if returns > 0 {
                if own_depth > CYCLE_DEPTH_MAX {
                    return Err(format!(
                        "it refers to itself over more than {CYCLE_DEPTH_MAX} levels"
                    ));
                }
                cycle = deeper(cycle, Some((own_depth, returns)));
            }
            for number in &members {
                all[*number] = Cost { weight, depth, cycle };
            }
        }
        Ok(all[0])
    }

    /// Sets of nodes that lead to each other, each after all that it leads to
    /// (Tarjan's).
    fn components(&self) -> Vec<Vec<usize>> {
        struct Search<'g> {
            nodes: &'g [Node],
            index: Vec<Option<usize>>,
            low: Vec<usize>,
            stack: Vec<usize>,
            on_stack: Vec<bool>,
            next: usize,
            found: Vec<Vec<usize>>,
        }
        impl Search<'_> {
            fn visit(&mut self, number: usize) {
                self.index[number] = Some(self.next);
                self.low[number] = self.next;
                self.next += 1;
                self.stack.push(number);
                self.on_stack[number] = true;
                // No deeper than TARGETS_MAX.
                for edge in &self.nodes[number].edges {
                    match self.index[*edge] {
                        None => {
                            self.visit(*edge);
                            self.low[number] = self.low[number].min(self.low[*edge]);
                        }
                        Some(index) if self.on_stack[*edge] => {
                            self.low[number] = self.low[number].min(index);
                        }
                        Some(_) => {}
                    }
                }
                if self.index[number] == Some(self.low[number]) {
                    let mut members = Vec::new();
                    while let Some(member) = self.stack.pop() {
                        self.on_stack[member] = false;
                        members.push(member);
                        if member == number {
                            break;
                        }
                    }
                    self.found.push(members);
                }
            }
        }
        let count = self.nodes.len();
        let mut search = Search {
            nodes: &self.nodes,
            index: vec![None; count],
            low: vec![0; count],
            stack: Vec::new(),
            on_stack: vec![false; count],
            next: 0,
            found: Vec::new(),
        };
        search.visit(0);
        search.found
    }
}

fn deeper(one: Option<(u64, u64)>, other: Option<(u64, u64)>) -> Option<(u64, u64)> {
    match (one, other) {
        (Some((depth, returns)), Some((other_depth, other_returns))) => {
            // One value is passed down through both at most once; from there on
            // the way leads through one of them.
            Some((depth.max(other_depth), returns.max(other_returns)))
        }
        (one, other) => one.or(other),
    }
}

/// Weighs one place and what is in it, and finds its references.
fn look<'a>(value: &'a Value, level: u64, node: &mut Node, references: &mut Vec<&'a str>) {
    node.weight += 1;
    node.levels = node.levels.max(level);
    match value {
        Value::Array(items) => {
            items.iter().for_each(|item| look(item, level, node, references));
        }
        Value::Object(members) => {
            for (key, member) in members {
                match (key.as_str(), member.as_str()) {
                    ("$ref" | "$dynamicRef" | "$recursiveRef", Some(reference)) => {
                        references.push(reference);
                    }
                    ("pattern" | "format", _) => node.weight += PATTERN_WEIGHT,
                    ("patternProperties", _) => {
                        let patterns = member.as_object().map_or(1, serde_json::Map::len);
                        node.weight += PATTERN_WEIGHT * patterns as u64;
                    }
                    _ => {}
                }
                look(member, level + 1, node, references);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Each of `names` asks twice for the next, at the same value.
    fn doubling(levels: usize, last: Value) -> Value {
        let mut places = serde_json::Map::new();
        for level in 0..levels {
            let next = json!({ "$ref": format!("#/$defs/a{}", level + 1) });
            places.insert(format!("a{level}"), json!({ "allOf": [next, next] }));
        }
        places.insert(format!("a{levels}"), last);
        json!({ "$defs": places, "properties": { "x": { "$ref": "#/$defs/a0" } } })
    }

    #[test]
    fn what_references_make_of_a_schema_is_weighed() {
        let plain = json!({"type": "object", "properties": {"x": {"type": "string"}}});
        assert_eq!(Cost::of(&plain), Ok(Cost { weight: 5, depth: 4, cycle: None }));
        let twice = Cost::of(&doubling(1, json!({"type": "string"}))).unwrap();
        let thrice = Cost::of(&doubling(2, json!({"type": "string"}))).unwrap();
        assert!(twice.weight < thrice.weight && twice.depth < thrice.depth);
        assert!(Cost::of(&doubling(30, json!({}))).is_err(), "a thousand millions of them");
    }

    #[test]
    fn a_cycle_counts_once_and_again_for_each_level_of_the_instance() {
        let tree = json!({"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}});
        let cost = Cost::of(&tree).unwrap();
        assert_eq!(cost.cycle, Some((4, 2)));
        let mut deep = json!({});
        for _ in 0..60 {
            deep = json!({ "left": deep });
        }
        assert_eq!(cost.plan(&json!({})).unwrap().stack_bytes, None);
        let plan = cost.plan(&deep).unwrap();
        assert!(!plan.names_places && plan.stack_bytes.is_none());
        assert!(!cost.is_small(2));
    }

    #[test]
    fn a_reference_is_followed_wherever_it_may_lead() {
        // Twice that is more than what is said of a reference that leads nowhere.
        let heavy: Vec<Value> = (0..10_000).map(|number| json!({ "const": number })).collect();
        for (reference, more) in [
            ("#/$defs/a%7E1b~1c", json!({"a/b/c": {"anyOf": heavy}})),
            ("#there", json!({"b": {"$anchor": "there", "anyOf": heavy}})),
            ("#there", json!({"b": {"$dynamicAnchor": "there", "anyOf": heavy}})),
            ("other", json!({"b": {"$id": "other", "anyOf": heavy}})),
            ("other#/$defs/c", json!({"b": {"$id": "other", "$defs": {"c": {"anyOf": heavy}}}})),
            ("http://x/other", json!({"b": {"$id": "/other", "anyOf": heavy}})),
        ] {
            let schema = json!({"$defs": more, "items": {"$ref": reference}});
            let cost = Cost::of(&schema).unwrap();
            assert!(cost.weight > 40_000, "{reference}: {cost:?}");
        }
        let standard = json!({"items": {"$ref": "https://json-schema.org/draft/2020-12/schema"}});
        assert!(Cost::of(&standard).unwrap().weight >= FOREIGN_WEIGHT);
    }

    #[test]
    fn depth_cycles_places_and_names_are_bounded() {
        let chain = |count: usize, end: Value| {
            let mut places = serde_json::Map::new();
            for at in 0..count {
                let next = json!({ "$ref": format!("#/$defs/a{}", at + 1) });
                places.insert(format!("a{at}"), json!({ "not": next }));
            }
            places.insert(format!("a{count}"), end);
            json!({ "$defs": places, "$ref": "#/$defs/a0" })
        };
        assert!(Cost::of(&chain(100, json!({}))).is_ok());
        assert!(Cost::of(&chain(900, json!({}))).unwrap_err().contains("levels"));
        assert!(Cost::of(&chain(5_000, json!({}))).unwrap_err().contains("places"));
        let cycle = chain(200, json!({ "$ref": "#/$defs/a0" }));
        assert!(Cost::of(&cycle).unwrap_err().contains("refers to itself"));
        let names: Vec<Value> = (0..50).map(|at| json!({ "$id": format!("n{at}") })).collect();
        assert!(Cost::of(&json!({ "anyOf": names })).unwrap_err().contains("$id"));
        // Data that happens to have such members is none of that.
        let data: Vec<Value> = (0..50).map(|at| json!({ "id": format!("n{at}") })).collect();
        assert!(Cost::of(&json!({ "enum": data })).is_ok());
    }

    #[test]
    fn an_instance_too_large_for_its_schema_is_not_validated() {
        let all: Vec<Value> = (0..10_000).map(|number| json!({ "minimum": -number })).collect();
        let cost = Cost::of(&json!({ "items": { "allOf": all } })).unwrap();
        let many: Vec<u32> = (0..10_000).collect();
        assert_eq!(cost.plan(&json!(many)), None);
        assert!(cost.plan(&json!([1, 2, 3])).is_some());
        assert!(!cost.is_small(4_000));
    }
}
