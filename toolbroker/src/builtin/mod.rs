//! Tools of the broker's own. They stand in the registry beside the tools of
//! configured servers and are called through the same chain: identity from
//! the connection, grant, size, pinned definition, schema, budget, time.
//! They need no configuration.
//!
//! | tool | effect | what it does |
//! |---|---|---|
//! | `crypto.hash` | none | SHA-256 or SHA-512 of a text or of bytes |
//!
//! A built-in belongs to a server whose name is reserved
//! ([`RESERVED_SERVERS`](forge_protocol::name::RESERVED_SERVERS)), so that no
//! configuration can put another tool in its place. Distrusted are its
//! arguments, schema or no schema. Deliberately absent are credentials, IO
//! and a clock: what is here has the effect `none`, answers the same to the
//! same arguments, and its outcome is never unknown.

mod crypto;

use std::sync::Arc;

use forge_protocol::name::ToolName;
use rmcp::model::JsonObject;
use serde_json::{Value, json};

use crate::definition::{Effect, Listed, Tool};
use crate::upstream::CallEnd;

/// One built-in tool.
#[derive(Clone, Debug)]
pub struct Builtin {
    tool: Arc<Tool>,
    effect: Effect,
    carry_out: CarryOut,
}

/// Carries a built-in out, in the calling thread: the response, or what to
/// tell the program. The arguments fit the tool's schema.
type CarryOut = fn(&JsonObject) -> Result<Value, String>;

/// A built-in as its module writes it down.
struct Plan {
    server: &'static str,
    name: &'static str,
    description: &'static str,
    effect: Effect,
    input_schema: Value,
    output_schema: Value,
    carry_out: CarryOut,
}

impl Builtin {
    /// Its definition.
    #[must_use]
    pub fn tool(&self) -> &Arc<Tool> {
        &self.tool
    }

    /// What it does to the world.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// Carries it out with arguments that fit its schema.
    #[must_use]
    pub fn carry_out(&self, arguments: &JsonObject) -> CallEnd {
        match (self.carry_out)(arguments) {
            Ok(response) => CallEnd::Answered(response),
            Err(why) => CallEnd::Failed(json!({ "error": why })),
        }
    }
}

/// All built-ins, by name.
#[derive(Debug)]
pub struct Builtins(Vec<Builtin>);

impl Builtins {
    /// Compiles their definitions.
    #[must_use]
    pub fn new() -> Self {
        let mut all: Vec<Builtin> = plans().into_iter().filter_map(compiled).collect();
        all.sort_by(|a, b| a.tool.name().cmp(b.tool.name()));
        Self(all)
    }

    /// The built-in of this name.
    #[must_use]
    pub fn get(&self, name: &ToolName) -> Option<&Builtin> {
        let found = self.0.binary_search_by(|builtin| builtin.tool.name().cmp(name)).ok()?;
        self.0.get(found)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Builtin> {
        self.0.iter()
    }
}

impl Default for Builtins {
    fn default() -> Self {
        Self::new()
    }
}

fn plans() -> Vec<Plan> {
    vec![crypto::hash()]
}

fn compiled(plan: Plan) -> Option<Builtin> {
    let (Value::Object(input_schema), Value::Object(output_schema)) =
        (plan.input_schema, plan.output_schema)
    else {
        tracing::error!(tool = plan.name, "bug: a built-in's schema is no object");
        return None;
    };
    let listed = Listed {
        name: plan.name.to_owned(),
        description: Some(plan.description.to_owned()),
        input_schema,
        output_schema: Some(output_schema),
    };
    match Tool::new(plan.server, listed) {
        Ok(tool) => {
            Some(Builtin { tool: Arc::new(tool), effect: plan.effect, carry_out: plan.carry_out })
        }
        Err(error) => {
            tracing::error!(tool = plan.name, %error, "bug: a built-in's definition");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::name::RESERVED_SERVERS;

    #[test]
    fn every_built_in_compiles_and_has_a_reserved_server() {
        let builtins = Builtins::new();
        assert_eq!(builtins.iter().count(), plans().len());
        for builtin in builtins.iter() {
            let name = builtin.tool().name();
            assert!(RESERVED_SERVERS.contains(&name.server()), "{name}");
            assert_eq!(builtins.get(name).unwrap().tool().name(), name);
            assert_eq!(builtin.effect(), Effect::None);
        }
    }
}
