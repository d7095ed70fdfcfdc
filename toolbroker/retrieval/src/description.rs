//! What is read of a tool's description, and how much of it.

use serde_json::{Map, Value};

use crate::embedding::{Table, Vector};
use crate::lexical::{self, Counts};
use crate::text;

/// Bytes of a name, a server or a category that count.
const NAME_BYTES_MAX: usize = 256;
/// Bytes of a description that count.
const DESCRIPTION_BYTES_MAX: usize = 4096;
/// Parameters that count.
const PARAMETERS_MAX: usize = 64;
/// So far from a parameter its members may be: a list of what one of several refers to.
const STEPS_MAX: usize = 4;
/// Bytes of one parameter's description that count.
const PARAMETER_BYTES_MAX: usize = 256;

/// Values of one parameter that count.
const VALUES_MAX: usize = 32;

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
    /// The JSON Schema of its arguments. The names, descriptions and listed values of its
    /// `properties` count, and of their own; whatever else it is, it does no harm.
    pub input_schema: &'a Value,
}

/// The parameters of a tool, and then the members of those that are objects or lists of
/// them: a request's whole body may be one parameter.
fn parameters_of(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    fn of(schema: &Value) -> Option<&Map<String, Value>> {
        schema.get("properties")?.as_object()
    }
    let own = of(schema).into_iter().flatten();
    let members = of(schema).into_iter().flatten().filter_map(move |(_, parameter)| {
        let mut inner = parameter;
        for _ in 0..STEPS_MAX {
            if of(inner).is_some() {
                break;
            }
            inner = step_into(inner, schema)?;
        }
        of(inner)
    });
    own.chain(members.flatten())
}

/// What a schema is of that says it elsewhere: by a reference in the same document, of each
/// item, or of one of several.
fn step_into<'a>(schema: &'a Value, document: &'a Value) -> Option<&'a Value> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        return document.pointer(reference.strip_prefix('#')?);
    }
    let one_of = ["anyOf", "oneOf", "allOf"].iter().find_map(|word| {
        let several = schema.get(word)?.as_array()?;
        several.iter().find(|it| it.get("type").is_none_or(|kind| kind != "null"))
    });
    one_of.or_else(|| schema.get("items"))
}

/// The words that a parameter may have: what an `action` may be says what its tool does.
fn values_of(schema: &Value) -> impl Iterator<Item = &str> {
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    listed.chain(schema.get("const")).filter_map(Value::as_str)
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
        for (name, schema) in parameters_of(tool.input_schema).take(PARAMETERS_MAX) {
            parameters.push_str(text::cut(name, NAME_BYTES_MAX));
            parameters.push(' ');
            let description = schema.get("description").and_then(Value::as_str).unwrap_or_default();
            parameter_descriptions.push_str(text::cut(description, PARAMETER_BYTES_MAX));
            parameter_descriptions.push(' ');
            for value in values_of(schema).take(VALUES_MAX) {
                parameter_descriptions.push_str(text::cut(value, NAME_BYTES_MAX));
                parameter_descriptions.push(' ');
            }
        }
        let description = text::cut(tool.description, DESCRIPTION_BYTES_MAX);
        Self {
            name: text::cut(tool.name, NAME_BYTES_MAX),
            server: text::cut(tool.server, NAME_BYTES_MAX),
            category: text::cut(tool.category, NAME_BYTES_MAX),
            description,
            lead: text::sentences(description, 2).first().map_or("", |first| first.text),
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

    /// The parts that are written for a reader, and not for a program.
    pub(crate) fn prose(&self) -> [&str; 3] {
        [self.name, self.server, self.description]
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
