//! A server's list of tools: read page by page, and which of them can be offered.
//!
//! What the library cannot read of a list it hands over as it came, and it is read here,
//! tool by tool: one that is none costs no other. What is left out is said, with the
//! reason.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{CustomResult, JsonObject, ListToolsResult};
use serde::Deserialize as _;

use super::received;
use super::scrubs::Scrubs;
use crate::definition::{CompiledRoom, DefinitionError, Listed, TOOLS_MAX, Tool};

/// A list that was given no time to live is good for so long, and one that was
/// read before and could not be read again.
pub(super) const LIST_LIFE: Duration = Duration::from_secs(60);
/// A list is good for at least this long, whatever time it was given.
const LIST_LIFE_MIN: Duration = Duration::from_secs(10);
/// The longest life of a list that is reckoned with.
const LIST_LIFE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Pages its list may have.
const PAGES_MAX: usize = 200;
/// Bytes of JSON that its list may have, all pages together.
const LIST_BYTES_MAX: usize = 32 * 1024 * 1024;
/// What is compiled of its tools may take so much, in bytes: 256 of the largest
/// patterns, or 65,000 as most are.
const COMPILED_ROOM_BYTES: usize = 256 * 1024 * 1024;

/// What is said of a tool that is left out, its name or the reason, has at most so many
/// bytes.
const SHOWN_BYTES_MAX: usize = 256;
/// Why a tool is left out that is called as a task alone (MCP's `execution.taskSupport`).
const TASK_ALONE: &str = "it answers with a task alone, which is not supported";

/// A tool that is not offered, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub(super) tool: String,
    pub(super) why: String,
}

/// What a list comes to.
pub(super) struct Offer {
    /// Those of its tools that can be offered, by name.
    pub(super) tools: Vec<Arc<Tool>>,
    pub(super) left_out: Vec<LeftOut>,
    /// How long it is good for.
    pub(super) life: Duration,
}

/// A list, as far as it was read.
#[derive(Default)]
pub(super) struct Listing {
    tools: Vec<rmcp::model::Tool>,
    left_out: Vec<LeftOut>,
    pages: usize,
    /// What they take.
    bytes: usize,
    life_ms: Option<u64>,
}

impl Listing {
    /// Takes another page over. Where the next begins, if there is one.
    ///
    /// # Errors
    /// Which bound the list has passed.
    pub(super) fn add(&mut self, page: ListToolsResult) -> Result<Option<String>, String> {
        let bytes = page.tools.iter().map(bytes_of).sum();
        self.take(page, bytes)
    }

    /// The same, tool by tool. [`None`] if it is no list.
    pub(super) fn add_each(
        &mut self,
        page: CustomResult,
        scrubs: &Scrubs,
    ) -> Option<Result<Option<String>, String>> {
        let mut page = received::unread(page);
        let tools = std::mem::take(page.get_mut("tools")?.as_array_mut()?);
        let mut list = ListToolsResult::deserialize(page).ok()?;
        let mut bytes = 0;
        for tool in tools {
            bytes += bytes_of(&tool);
            let why = match rmcp::model::Tool::deserialize(&tool) {
                Ok(_) if received::is_a_task(&tool) => TASK_ALONE.to_owned(),
                Ok(tool) => {
                    list.tools.push(tool);
                    continue;
                }
                Err(error) if tool["inputSchema"].is_object() => scrubs.text(&error.to_string()),
                Err(_) => "its inputSchema is no object".to_owned(),
            };
            let name = scrubs.text(tool["name"].as_str().unwrap_or_default());
            self.leave_out(&name, &why);
        }
        Some(self.take(list, bytes))
    }

    fn take(&mut self, page: ListToolsResult, bytes: usize) -> Result<Option<String>, String> {
        self.bytes += bytes;
        if self.bytes > LIST_BYTES_MAX {
            let limit = LIST_BYTES_MAX / (1024 * 1024);
            return Err(format!("its list of tools has more than {limit} MiB"));
        }
        self.tools.extend(page.tools);
        if self.tools.len() + self.left_out.len() > TOOLS_MAX {
            return Err(format!("it lists more than {TOOLS_MAX} tools"));
        }
        self.life_ms = page.ttl_ms.or(self.life_ms);
        // Some servers say so that there is no other page.
        let next = page.next_cursor.filter(|cursor| !cursor.is_empty());
        self.pages += 1;
        if next.is_some() && self.pages == PAGES_MAX {
            return Err(format!("its list of tools has more than {PAGES_MAX} pages"));
        }
        Ok(next)
    }

    fn leave_out(&mut self, tool: &str, why: &str) {
        let (tool, why) = (crate::cut(tool, SHOWN_BYTES_MAX), crate::cut(why, SHOWN_BYTES_MAX));
        self.left_out.push(LeftOut { tool, why });
    }

    /// What of it can be offered.
    pub(super) fn offer(mut self, server: &str, scrubs: &Scrubs) -> Offer {
        let life = life(self.life_ms);
        let mut room = CompiledRoom::new(COMPILED_ROOM_BYTES);
        let mut tools: Vec<Arc<Tool>> = Vec::with_capacity(self.tools.len());
        for tool in std::mem::take(&mut self.tools) {
            let name = tool.name.to_string();
            // Names are in grants, records and logs: no scrubbed one stands
            // for the tool.
            let shown = scrubs.text(&name);
            if shown != name {
                self.leave_out(&shown, "a credential's name");
                continue;
            }
            match usable(&mut room, server, scrubs, tool) {
                Ok(tool) if tools.iter().any(|other| other.name() == tool.name()) => {
                    self.leave_out(&name, "it is listed twice");
                }
                Ok(tool) => tools.push(Arc::new(tool)),
                Err(error) => self.leave_out(&name, &error.to_string()),
            }
        }
        tools.sort_by(|a, b| a.name().cmp(b.name()));
        Offer { tools, left_out: self.left_out, life }
    }
}

/// A tool as it is offered, if it can be.
fn usable(
    room: &mut CompiledRoom,
    server: &str,
    scrubs: &Scrubs,
    tool: rmcp::model::Tool,
) -> Result<Tool, DefinitionError> {
    let clean = |schema: Arc<JsonObject>| -> JsonObject {
        let clean = |(key, value)| (key, scrubs.json(value));
        Arc::unwrap_or_clone(schema).into_iter().map(clean).collect()
    };
    // Some tools have nothing else to say what they are for.
    let hinted = tool.annotations.as_ref().and_then(|it| it.title.clone());
    let title = tool.title.filter(|it| !it.trim().is_empty()).or(hinted);
    let description = tool.description.map(Cow::into_owned).filter(|it| !it.trim().is_empty());
    let description = description.or(title).map(|text| scrubs.text(&text));
    // A title is a text like the description, and no review would have seen it.
    let advice = tool.annotations.and_then(|mut advice| {
        advice.title = None;
        serde_json::to_string(&advice).ok()
    });
    let listed = Listed {
        name: tool.name.into_owned(),
        description,
        input_schema: clean(tool.input_schema),
        output_schema: tool.output_schema.map(clean),
    };
    Ok(Tool::within(room, server, listed)?.with_advice(advice.as_deref()))
}

/// How long a list is good for that was given this time to live.
fn life(given_ms: Option<u64>) -> Duration {
    given_ms.map_or(LIST_LIFE, |ms| Duration::from_millis(ms).clamp(LIST_LIFE_MIN, LIST_LIFE_MAX))
}

/// What a tool takes in a list, in bytes, or nearly.
fn bytes_of(tool: &impl serde::Serialize) -> usize {
    let mut count = Count(0);
    // Writing what was read a moment ago does not fail.
    let _ = serde_json::to_writer(&mut count, tool);
    count.0
}

/// Counts bytes and keeps none.
struct Count(usize);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::ServerResult;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_list_is_good_for_the_time_it_was_given_and_never_for_ever() {
        assert_eq!(life(None), LIST_LIFE);
        assert_eq!(life(Some(30_000)), Duration::from_secs(30));
        assert_eq!(life(Some(0)), LIST_LIFE_MIN);
        assert_eq!(life(Some(u64::MAX)), LIST_LIFE_MAX);
    }

    /// What a list of one page comes to, as it passes the library.
    fn offer(page: Value) -> Offer {
        let mut listing = Listing::default();
        match received::tests::through(&page) {
            ServerResult::ListToolsResult(page) => assert_eq!(listing.add(page), Ok(None)),
            ServerResult::CustomResult(page) => {
                assert_eq!(listing.add_each(page, &Scrubs::new(Vec::new())), Some(Ok(None)));
            }
            other => panic!("{other:?}"),
        }
        listing.offer("s", &Scrubs::new(Vec::new()))
    }

    #[test]
    fn a_tool_that_is_called_as_a_task_alone_is_left_out() {
        let tool = |name: &str, support: Value| {
            json!({"name": name, "inputSchema": {"type": "object"},
                "execution": {"taskSupport": support}})
        };
        let some = json!({"tools": [tool("a", "required".into()), tool("b", "optional".into()),
            tool("c", Value::Null)]});
        let offer = offer(some);
        let names: Vec<_> = offer.tools.iter().map(|it| it.name().tool()).collect();
        assert_eq!(names, ["b", "c"]);
        assert_eq!(offer.left_out, [LeftOut { tool: "a".into(), why: TASK_ALONE.into() }]);
    }

    #[test]
    fn a_tool_that_has_only_a_title_is_described_by_it() {
        let tools = json!([
            {"name": "a", "title": "Weather", "inputSchema": {}},
            {"name": "b", "annotations": {"title": "Books a room"}, "inputSchema": {}},
            {"name": "c", "title": "Fax", "description": "Sends a fax.", "inputSchema": {}},
            {"name": "d", "title": "Other", "description": " ", "inputSchema": {}},
            {"name": "e", "inputSchema": {}},
        ]);
        let offer = offer(json!({ "tools": tools }));
        let said: Vec<_> = offer.tools.iter().map(|it| it.spec().description.as_str()).collect();
        assert_eq!(said, ["Weather", "Books a room", "Sends a fax.", "Other", ""]);
    }
}
