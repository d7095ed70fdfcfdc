//! What the operator says of tools: a table `[tools."<server>.<tool>"]`.

use std::collections::BTreeMap;

use forge_protocol::name::ToolName;

use super::node::Node;
use super::{ConfigError, Problem};
use crate::definition::Effect;

/// The effects that a configuration gives, by tool.
pub(super) fn effects(listed: &Node<'_>) -> Result<BTreeMap<ToolName, Effect>, ConfigError> {
    const KNOWN: [&str; 1] = ["effect"];
    let mut effects = BTreeMap::new();
    for (name, entry) in listed.children()? {
        let name = ToolName::parse(name).map_err(|why| entry.wrong(Problem::ToolName(why)))?;
        for key in entry.object()?.keys() {
            if !KNOWN.contains(&key.as_str()) {
                return Err(entry.wrong_at(key, Problem::Unknown { known: KNOWN.join(", ") }));
            }
        }
        let effect = entry.needed("effect")?;
        let known = [Effect::None, Effect::Read, Effect::Write];
        match known.into_iter().find(|it| effect.text().is_ok_and(|text| text == it.as_str())) {
            Some(effect) => drop(effects.insert(name, effect)),
            None => return Err(effect.wrong(Problem::Effect)),
        }
    }
    Ok(effects)
}
