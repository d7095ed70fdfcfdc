//! The tools that fit an intent, among those that the one who asks may see
//! (which is [`crate::policy`]'s to say).
//!
//! Descriptions and intents are strangers' text. What is found is a proposal:
//! nothing here grants anything. An index is built from exactly the tools that
//! a principal may see, so that nothing of the others shows, not even in a
//! score; principals who may see the same share it, and it is built again only
//! when those tools or their definitions changed.

use std::sync::{Arc, Mutex};

use forge_retrieval::{Description, Index};
use serde_json::Value;

use crate::definition::Tool;
use crate::locks::lock;

/// Indexes that are kept: one for each set of tools that somebody may see.
const INDEXES_MAX: usize = 8;

/// Searches, and the indexes they go by.
#[derive(Debug, Default)]
pub struct Retrieval {
    /// The one used last comes first.
    indexes: Mutex<Vec<Arc<Indexed>>>,
}

/// An index and what it was built from.
#[derive(Debug)]
struct Indexed {
    definitions: Vec<[u8; 32]>,
    index: Index,
}

/// A tool that fits.
#[derive(Clone, Debug)]
pub struct Found {
    /// The tool.
    pub tool: Arc<Tool>,
    /// How well, see [`forge_protocol::broker::FoundTool`].
    pub score_millionths: u32,
}

impl Retrieval {
    /// The at most `k` of `tools` that fit `intent` best, in the order of
    /// [`Index::search`]. Takes
    /// a while if the tools are not those of a search before: some tens of
    /// microseconds for each.
    #[must_use]
    pub fn search(&self, tools: &[Arc<Tool>], intent: &str, k: u32) -> Vec<Found> {
        let indexed = self.indexed(tools);
        let hits = indexed.index.search(intent, k as usize);
        tracing::debug!(tools = tools.len(), hits = hits.len(), "searched tools");
        hits.into_iter()
            .map(|hit| Found {
                tool: Arc::clone(&tools[hit.place]),
                score_millionths: (hit.score * 1e6) as u32,
            })
            .collect()
    }

    fn indexed(&self, tools: &[Arc<Tool>]) -> Arc<Indexed> {
        let definitions: Vec<[u8; 32]> = tools.iter().map(|tool| tool.sha256()).collect();
        if let Some(known) = self.known(&definitions) {
            return known;
        }
        // Built without the lock, so that others can search meanwhile. Two who
        // need the same at once build it twice, and the second is dropped.
        let schemas: Vec<Value> = tools
            .iter()
            .map(|tool| serde_json::from_str(&tool.spec().input_schema).unwrap_or_default())
            .collect();
        let index = Index::new(tools.iter().zip(&schemas).map(|(tool, schema)| {
            let name = tool.name();
            Description {
                name: name.tool(),
                server: name.server(),
                category: "",
                description: &tool.spec().description,
                input_schema: schema,
            }
        }));
        tracing::info!(tools = tools.len(), "tools indexed");
        let built = Arc::new(Indexed { definitions, index });
        let mut indexes = self.lock();
        if let Some(meanwhile) = take_first(&mut indexes, &built.definitions) {
            return meanwhile;
        }
        indexes.insert(0, Arc::clone(&built));
        indexes.truncate(INDEXES_MAX);
        built
    }

    fn known(&self, definitions: &[[u8; 32]]) -> Option<Arc<Indexed>> {
        take_first(&mut self.lock(), definitions)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Indexed>>> {
        lock(&self.indexes)
    }
}

/// Finds an index and moves it to the front.
fn take_first(indexes: &mut [Arc<Indexed>], definitions: &[[u8; 32]]) -> Option<Arc<Indexed>> {
    let at = indexes.iter().position(|indexed| indexed.definitions == definitions)?;
    indexes[..=at].rotate_right(1);
    Some(Arc::clone(&indexes[0]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::definition::Listed;

    fn tool(name: &str, description: &str) -> Arc<Tool> {
        let schema = json!({"type": "object", "properties": {}});
        let Value::Object(input_schema) = schema else { unreachable!() };
        let listed = Listed {
            name: name.into(),
            description: Some(description.into()),
            input_schema,
            output_schema: None,
        };
        Arc::new(Tool::new("desk", listed).unwrap())
    }

    fn names(found: &[Found]) -> Vec<&str> {
        found.iter().map(|found| found.tool.name().tool()).collect()
    }

    #[test]
    fn the_tool_that_fits_is_found_and_scores_fall() {
        let retrieval = Retrieval::default();
        let tools = [tool("refund", "Pays money back to a customer"), tool("rain", "Weather")];
        let found = retrieval.search(&tools, "give the buyer their money back", 2);
        assert_eq!(names(&found)[0], "refund");
        assert!(found.windows(2).all(|two| two[0].score_millionths >= two[1].score_millionths));
    }

    #[test]
    fn an_index_is_built_once_and_again_when_a_definition_changes() {
        let retrieval = Retrieval::default();
        let first = [tool("a", "Sends a fax"), tool("b", "Waters the plants")];
        let index = |tools: &[Arc<Tool>]| retrieval.indexed(tools);
        assert!(Arc::ptr_eq(&index(&first), &index(&first)));
        let changed = [tool("a", "Waters the plants"), tool("b", "Sends a fax")];
        assert!(!Arc::ptr_eq(&index(&first), &index(&changed)));
        assert_eq!(names(&retrieval.search(&changed, "fax this page", 1)), ["b"]);
        assert_eq!(names(&retrieval.search(&first, "fax this page", 1)), ["a"]);
    }

    #[test]
    fn only_so_many_indexes_are_kept_and_the_last_used_stay() {
        let retrieval = Retrieval::default();
        let sets: Vec<_> = (0..20).map(|n| [tool(&format!("t{n}"), "does something")]).collect();
        let first = retrieval.indexed(&sets[0]);
        for set in &sets {
            let _ = retrieval.indexed(set);
            let again = retrieval.indexed(&sets[0]);
            assert!(Arc::ptr_eq(&first, &again));
        }
        assert_eq!(retrieval.lock().len(), INDEXES_MAX);
    }
}
