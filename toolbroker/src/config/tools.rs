//! What the operator says of tools: the tables `[tools."<name>"]` and
//! `[review]`.

use std::collections::BTreeMap;

use forge_protocol::name::{RESERVED_SERVERS, ToolName};

use super::node::Node;
use super::{ConfigError, Problem};
use crate::definition::Effect;
use crate::review::Mode;

/// What a call costs unless the operator says otherwise, in budget units.
pub const COST_DEFAULT: u32 = 1;

/// What the operator says of one tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// What it does to the world; `write` where this is not said.
    pub effect: Option<Effect>,
    /// What a call costs, in budget units; [`COST_DEFAULT`] where this is not
    /// said.
    pub cost: Option<u32>,
}

/// The table `tools`.
pub(super) fn words(table: &Node<'_>) -> Result<BTreeMap<ToolName, Word>, ConfigError> {
    let mut words = BTreeMap::new();
    for (name, entry) in table.children()? {
        let name = ToolName::parse(name).map_err(|why| entry.wrong(Problem::ToolName(why)))?;
        entry.only(&["effect", "cost"])?;
        let mut word = Word::default();
        if let Some(node) = entry.field("cost") {
            word.cost = Some(node.whole()?);
        }
        if let Some(node) = entry.field("effect") {
            if RESERVED_SERVERS.contains(&name.server()) {
                return Err(node.wrong(Problem::BuiltInEffect));
            }
            word.effect = Some(match node.text()? {
                "none" => Effect::None,
                "read" => Effect::Read,
                "write" => Effect::Write,
                _ => return Err(node.wrong(Problem::OneOf("none, read, write"))),
            });
        }
        words.insert(name, word);
    }
    Ok(words)
}

/// The table `review`.
pub(super) fn review(table: &Node<'_>) -> Result<Mode, ConfigError> {
    table.only(&["mode"])?;
    let Some(mode) = table.field("mode") else { return Ok(Mode::default()) };
    match mode.text()? {
        "first_use" => Ok(Mode::FirstUse),
        "required" => Ok(Mode::Required),
        _ => Err(mode.wrong(Problem::OneOf("first_use, required"))),
    }
}
