//! Tools as they are listed, searched and reviewed: what a principal may see, in the
//! definitions of now.

use std::sync::Arc;

use forge_protocol::broker::{BlockedTool, FoundTool, ListedTool, Reply, ReviewedTool, Standing};
use forge_protocol::limits::{
    FOUND_TOOLS_MAX, INTENT_BYTES_MAX, OverLimit, REASON_BYTES_MAX, TOOL_LIST_BYTES_MAX,
};
use forge_protocol::name::ToolName;

use super::{Broker, Refused};
use crate::beside;
use crate::definition::Tool;
use crate::review::ReviewError;
use crate::upstream::UpstreamError;

/// What the tools of one list may take, in bytes; the rest of its frame is for
/// counters and the unavailable.
const LIST_ROOM_BYTES: usize = TOOL_LIST_BYTES_MAX as usize - 1024 * 1024;

impl Broker {
    /// The tools that the principal may see, and the servers it may see tools
    /// of that cannot be asked.
    pub(super) async fn seen(
        &self,
        principal: &str,
    ) -> Result<(Vec<Arc<Tool>>, Unavailable), Refused> {
        let policy = self.policy();
        let seen = |server: &str| policy.sees_server(principal, server);
        let (mut listed, unavailable) = self.registry.list(seen).await;
        listed.retain(|tool| policy.visible(principal, tool.name()));
        self.see(&listed).await?;
        Ok((listed, unavailable))
    }

    pub(super) async fn list(&self, principal: &str) -> Result<Reply, Refused> {
        let (listed, unavailable) = self.seen(principal).await?;
        let mut unavailable = shown(unavailable);
        let (registry, reviews) = (Arc::clone(&self.registry), Arc::clone(&self.reviews));
        Ok(beside(move || {
            let tools = fitting(&listed, LIST_ROOM_BYTES, &mut unavailable, |tool| {
                let entry = ListedTool {
                    spec: tool.spec().clone(),
                    word: registry.word(tool),
                    standing: reviews.standing(tool),
                };
                (entry, listing_bytes(tool))
            });
            Reply::Tools { tools, unavailable }
        })
        .await)
    }

    /// All tools beside their approved definitions, for the operator. What
    /// was never seen stays so.
    pub(super) async fn review(&self) -> Result<Reply, Refused> {
        let (listed, unavailable) = self.registry.list(|_| true).await;
        self.reviews.would_pin(&[])?;
        let mut unavailable = shown(unavailable);
        let (registry, reviews) = (Arc::clone(&self.registry), Arc::clone(&self.reviews));
        Ok(beside(move || {
            let tools = fitting(&listed, LIST_ROOM_BYTES, &mut unavailable, |tool| {
                let entry = ReviewedTool {
                    name: tool.name().clone(),
                    definition_sha256: tool.sha256(),
                    standing: reviews.standing(tool),
                    word: registry.word(tool),
                    difference: reviews.difference(tool),
                };
                let texts = [tool.name().as_str(), &entry.difference];
                let bytes = entry_bytes(tool, texts);
                (entry, bytes)
            });
            Reply::Reviews { tools, unavailable }
        })
        .await)
    }

    pub(super) async fn approve(&self, pins: Vec<(ToolName, [u8; 32])>) -> Result<u32, Refused> {
        let tools = self.registry.find_all(pins.iter().map(|(name, _)| name.clone()), None).await?;
        for ((name, sha256), tool) in pins.iter().zip(&tools) {
            if tool.sha256() != *sha256 {
                return Err(Refused::ChangedMeanwhile { tool: name.clone() });
            }
        }
        let reviews = Arc::clone(&self.reviews);
        Ok(beside(move || reviews.approve(&tools)).await?)
    }

    /// The tools were seen by somebody, who goes by what they say from now
    /// on.
    pub(super) async fn see(&self, tools: &[Arc<Tool>]) -> Result<(), ReviewError> {
        let seen = match self.reviews.would_pin(tools) {
            Ok(true) => {
                let (reviews, tools) = (Arc::clone(&self.reviews), tools.to_vec());
                beside(move || reviews.see(&tools)).await
            }
            would => would.map(drop),
        };
        // No run with tools begins until whoever reads the log has mended it.
        seen.inspect_err(|error| tracing::error!(%error, "the reviews fail"))
    }

    /// That all of these may be granted and called in their present
    /// definitions.
    pub(super) async fn check_reviewed(&self, tools: &[Arc<Tool>]) -> Result<(), Refused> {
        self.see(tools).await?;
        Ok(self.reviews.check(tools)?)
    }

    /// That the principal may see all of these. Asked before any of them is
    /// looked for: whoever may not see a tool is not told whether it exists.
    pub(super) fn check_visible<'a>(
        &self,
        principal: &str,
        mut tools: impl Iterator<Item = &'a ToolName>,
    ) -> Result<(), Refused> {
        let policy = self.policy();
        tools.find(|tool| !policy.visible(principal, tool)).map_or(Ok(()), |tool| {
            let (principal, tool) = (principal.to_owned(), tool.clone());
            Err(Refused::Forbidden { principal, tool })
        })
    }

    pub(super) async fn search(
        &self,
        principal: &str,
        intent: String,
        k: u32,
    ) -> Result<Reply, Refused> {
        for (what, got, limit) in [
            ("intent_bytes", intent.len() as u64, INTENT_BYTES_MAX),
            ("k", k.into(), FOUND_TOOLS_MAX),
        ] {
            if got > limit.into() {
                return Err(Refused::OverLimit(OverLimit { what, got, limit: limit.into() }));
            }
        }
        if intent.trim().is_empty() {
            return Err(Refused::NoIntent);
        }
        if k == 0 {
            return Err(Refused::NoHits);
        }
        let (mut listed, unavailable) = self.seen(principal).await?;
        // What is blocked could not be granted.
        let mut blocked = Vec::new();
        listed.retain(|tool| {
            let standing = self.reviews.standing(tool);
            if standing != Standing::Approved && blocked.len() < FOUND_TOOLS_MAX as usize {
                blocked.push(BlockedTool { name: tool.name().clone(), standing });
            }
            standing == Standing::Approved
        });
        let retrieval = Arc::clone(&self.retrieval);
        // Tools that changed are indexed first, which takes its time.
        let found = beside(move || retrieval.search(&listed, &intent, k)).await;
        let tools = found
            .into_iter()
            .map(|found| FoundTool {
                spec: found.tool.spec().clone(),
                score_millionths: found.score_millionths,
            })
            .collect();
        Ok(Reply::Found { tools, blocked, unavailable: shown(unavailable) })
    }
}

/// Servers that cannot be asked, with the reasons.
type Unavailable = Vec<(String, UpstreamError)>;

/// The same with the reasons as they are sent.
fn shown(unavailable: Unavailable) -> Vec<(String, String)> {
    unavailable
        .into_iter()
        .map(|(server, error)| (server, crate::cut(&error.to_string(), REASON_BYTES_MAX)))
        .collect()
}

/// What is told of these tools, each with the bytes that it takes in a list, as far as
/// one list has room: a server whose tools do not fit is left out as a whole, and said
/// to be.
fn fitting<T>(
    listed: &[Arc<Tool>],
    mut room: usize,
    unavailable: &mut Vec<(String, String)>,
    entry: impl Fn(&Tool) -> (T, usize),
) -> Vec<T> {
    let mut tools = Vec::with_capacity(listed.len());
    for server in listed.chunk_by(|a, b| a.name().server() == b.name().server()) {
        let mut left = room;
        let entries = server.iter().map(|tool| {
            let (entry, bytes) = entry(tool);
            left = left.checked_sub(bytes)?;
            Some(entry)
        });
        match entries.collect::<Option<Vec<T>>>() {
            Some(entries) => {
                room = left;
                tools.extend(entries);
            }
            None => {
                let name = server[0].name().server().to_owned();
                unavailable.push((name, "its tools do not fit into one list".to_owned()));
            }
        }
    }
    tools
}

/// What a tool takes in a list, in bytes, and a little more.
fn listing_bytes(tool: &Tool) -> usize {
    let spec = tool.spec();
    let output_schema = spec.output_schema.as_deref().unwrap_or_default();
    entry_bytes(tool, [spec.name.as_str(), &spec.description, &spec.input_schema, output_schema])
}

/// What an entry with these texts takes, and with what is said of its tool.
fn entry_bytes<const N: usize>(tool: &Tool, texts: [&str; N]) -> usize {
    let advice = tool.advice().unwrap_or_default().len();
    texts.iter().map(|text| text.len() + 9).sum::<usize>() + advice + 64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::Listed;

    #[test]
    fn a_server_whose_tools_do_not_fit_is_named_and_those_behind_it_are_there() {
        let tool = |server: &str, name: &str| {
            let (name, input_schema) = (name.to_owned(), serde_json::Map::new());
            let listed = Listed { name, description: None, input_schema, output_schema: None };
            Arc::new(Tool::new(server, listed).unwrap())
        };
        let listed = [("a", "x"), ("b", "x"), ("b", "long"), ("c", "x"), ("d", "long")]
            .map(|(s, n)| tool(s, n));
        let mut unavailable = vec![("e".to_owned(), "it is gone".to_owned())];
        let told = fitting(&listed, 25, &mut unavailable, |tool| {
            (tool.name().to_string(), if tool.name().as_str().ends_with("long") { 20 } else { 10 })
        });
        assert_eq!(told, ["a.x", "c.x"]);
        let servers: Vec<_> = unavailable.iter().map(|(server, _)| server.as_str()).collect();
        assert_eq!(servers, ["e", "b", "d"]);
    }
}
