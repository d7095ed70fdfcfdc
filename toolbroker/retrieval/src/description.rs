//! What is read of a tool's description, and how much of it.

use serde_json::Value;

use crate::embedding::{Table, Vector};
use crate::lexical::{self, Counts};
use crate::text;

/// Bytes of a name, a server or a category that count.
const NAME_BYTES_MAX: usize = 256;
/// Bytes of a description that count.
const DESCRIPTION_BYTES_MAX: usize = 4096;
/// Parameters that count.
const PARAMETERS_MAX: usize = 64;
/// Bytes of one parameter's description that count.
const PARAMETER_BYTES_MAX: usize = 256;

/// A tool as its server describes it. All of it is untrusted text.
#[derive(Clone, Copy, Debug)]
pub struct Description<'a> {
    /// The tool's own name.
    pub name: &'a str,
    /// Its server's name; empty if there is none.
    pub server: &'a str,
    /// What kind of tool it is, if somebody says so; empty otherwise.
    pub category: &'a str,
    /// What it is for.
    pub description: &'a str,
    /// The JSON Schema of its arguments. The names and descriptions of its
    /// `properties` count; whatever else it is, it does no harm.
    pub input_schema: &'a Value,
}

/// The parts that count, cut to what counts.
pub(crate) struct Read<'a> {
    name: &'a str,
    server: &'a str,
    category: &'a str,
    description: &'a str,
    /// The first sentence of that.
    lead: &'a str,
    parameters: String,
    parameter_descriptions: String,
}

impl<'a> Read<'a> {
    pub(crate) fn new(tool: &Description<'a>) -> Self {
        let mut parameters = String::new();
        let mut parameter_descriptions = String::new();
        let properties = tool.input_schema.get("properties").and_then(Value::as_object);
        for (name, schema) in properties.into_iter().flatten().take(PARAMETERS_MAX) {
            parameters.push_str(text::cut(name, NAME_BYTES_MAX));
            parameters.push(' ');
            let description = schema.get("description").and_then(Value::as_str).unwrap_or_default();
            parameter_descriptions.push_str(text::cut(description, PARAMETER_BYTES_MAX));
            parameter_descriptions.push(' ');
        }
        let description = text::cut(tool.description, DESCRIPTION_BYTES_MAX);
        Self {
            name: text::cut(tool.name, NAME_BYTES_MAX),
            server: text::cut(tool.server, NAME_BYTES_MAX),
            category: text::cut(tool.category, NAME_BYTES_MAX),
            description,
            lead: text::sentences(description, 2).first().copied().unwrap_or_default(),
            parameters,
            parameter_descriptions,
        }
    }

    /// All that is said.
    fn parts(&self) -> [&str; 6] {
        [
            self.name,
            self.server,
            self.category,
            self.description,
            &self.parameters,
            &self.parameter_descriptions,
        ]
    }

    /// The parts in the order of the lexical fields.
    fn fields(&self) -> [&str; lexical::FIELDS] {
        let [name, server, category, description, parameters, more] = self.parts();
        [name, server, category, description, parameters, more, self.lead]
    }

    pub(crate) fn counts(&self) -> Counts {
        let mut counts = Counts::new();
        for (field, text) in self.fields().into_iter().enumerate() {
            lexical::count(text, field, &mut counts);
        }
        counts
    }

    /// Halfway between all that is said and what matters of it.
    pub(crate) fn vector(&self, table: &Table) -> Vector {
        let all = self.parts().map(|text| (text, 1.0));
        let gist = [
            (self.name, 1.0),
            (self.description, 1.0),
            (self.parameters.as_str(), 0.3),
            (self.category, 0.3),
        ];
        table.embed(&all).between(&table.embed(&gist))
    }
}
