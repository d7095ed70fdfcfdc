//! Everything that is wrong with a configuration, not only the first of it.
//!
//! The parsers stop at what they cannot use. Here it is noted and taken out of
//! the document, and they begin again, until nothing is wrong any more. What
//! only fails because something else was taken out is not told.
//!
//! Nothing is started: credentials that a command prints are taken for good.
//! Files are read, those of credentials too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use forge_document::shown;
use serde_json::Value;

use super::error::find_lines;
use super::node::Strict;
use super::{Config, ConfigError, Lookup, Problem, builtins, document_of, forge_config};
use super::{json_document, mcp_servers, read};

/// What is told at most. A file with more is the wrong file.
const FAULTS_MAX: usize = 256;
/// No variable has such a name: it stands for what a command would print.
const UNREAD: &str = "=";
/// Fits wherever a credential does: as text, as hex, as base64 and as a header.
const UNREAD_VALUE: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// All that [`Config::load`] would refuse, one after the other.
#[must_use]
pub fn faults(
    mcp_config: Option<&Path>,
    forge_config: Option<&Path>,
    lookup: Lookup<'_>,
) -> Vec<ConfigError> {
    let mut faults = sought(mcp_config, forge_config, lookup);
    find_lines(&mut faults, [mcp_config, forge_config]);
    faults
}

/// The same, without their lines.
fn sought(
    mcp_config: Option<&Path>,
    forge_config: Option<&Path>,
    lookup: Lookup<'_>,
) -> Vec<ConfigError> {
    let lookup =
        |name: &str| if name == UNREAD { Some(UNREAD_VALUE.to_owned()) } else { lookup(name) };
    let mut faults = Vec::new();
    let mut config = Config::default();
    if let Some(file) = forge_config {
        match read(file).and_then(|text| document_of(file, &text)) {
            Ok(mut document) => {
                leave_commands(&mut document);
                let parse = |document: &Value| self::forge_config(file, document, &lookup);
                config = sift(document, &mut faults, parse);
            }
            Err(error) => faults.push(error),
        }
    }
    let has_all_servers = faults.iter().all(|fault| !fault.is_below("servers"));
    if let Some(file) = mcp_config {
        match read(file).and_then(|text| json_document(file, &text)) {
            Ok(Strict(document)) => {
                let before = faults.len();
                let servers =
                    sift(document, &mut faults, |document| mcp_servers(file, document, &lookup));
                if let Err(twice) = config.join(file, servers) {
                    faults.push(twice);
                }
                if faults.len() > before {
                    return faults;
                }
            }
            Err(error) => {
                faults.push(error);
                return faults;
            }
        }
    }
    // A server that is wrong is there all the same.
    if let Some(file) = forge_config
        && has_all_servers
        && let Err(error) = builtins::check_servers(&config.builtins, file, &config.servers)
    {
        faults.push(error);
    }
    faults
}

impl ConfigError {
    /// Whether it is of something in this table.
    fn is_below(&self, table: &str) -> bool {
        match self {
            Self::Field { field, .. } => {
                field.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'))
            }
            // Who knows what it would have said.
            Self::Read { .. } | Self::Syntax { .. } => true,
            Self::Twice { .. } => false,
        }
    }
}

/// Has every credential that a command prints come from nowhere. Only there is
/// a `command` a list: a server's own is a text, and a list a fault.
fn leave_commands(document: &mut Value) {
    let tables = document.as_object_mut().into_iter().flatten();
    for (name, table) in tables {
        match table {
            Value::Object(servers) if matches!(&**name, "servers" | "mcpServers") => {
                let fields = servers.values_mut().filter_map(Value::as_object_mut);
                fields.flat_map(|it| it.values_mut()).for_each(leave_command);
            }
            other => leave_command(other),
        }
    }
}

fn leave_command(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_whole = |word: &Value| word.as_str().is_some_and(|word| !word.contains('\0'));
            let is_command = fields.get("command").and_then(Value::as_array).is_some_and(|words| {
                words.iter().all(is_whole) && words.first().is_some_and(|word| word != "")
            });
            if is_command && !fields.contains_key("from_env") {
                fields.remove("command");
                fields.insert("from_env".into(), UNREAD.into());
            }
            fields.values_mut().for_each(leave_command);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_command),
        _ => {}
    }
}

/// Parses, and takes out what is wrong, until the rest is good.
fn sift<T: Default>(
    mut document: Value,
    faults: &mut Vec<ConfigError>,
    parse: impl Fn(&Value) -> Result<T, ConfigError>,
) -> T {
    let mut taken = Taken::default();
    loop {
        let mut error = match parse(&document) {
            Ok(parsed) => return parsed,
            Err(error) => error,
        };
        let ConfigError::Field { field, problem, .. } = &mut error else {
            faults.push(error);
            return T::default();
        };
        let (way, rest) = find(&document, field);
        let written = taken.as_written(&way);
        let whole = join(&written, rest);
        let follows = taken.explains(&whole, problem);
        *field = if whole.is_empty() { field.clone() } else { whole };
        if !follows {
            faults.push(error);
        }
        if way.is_empty() || faults.len() >= FAULTS_MAX {
            return T::default();
        }
        taken.take(&mut document, &way, written);
    }
}

/// One step into a document.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Item(usize),
}

/// The way to a field as far as the document has it, and what is left: a field
/// that is missing. Keys may have dots, so the longest way is the right one.
fn find<'f>(value: &Value, field: &'f str) -> (Vec<Step>, &'f str) {
    let mut best = (Vec::new(), field);
    let mut consider = |key: &str, step: Step, child: &Value| {
        let Some(rest) = field.strip_prefix(key) else { return };
        let rest = match rest.strip_prefix('.') {
            Some(rest) => rest,
            None if rest.is_empty() => rest,
            None => return,
        };
        let (mut way, rest) = find(child, rest);
        if rest.len() < best.1.len() {
            way.insert(0, step);
            best = (way, rest);
        }
    };
    match value {
        Value::Object(fields) => {
            for (key, child) in fields {
                consider(&shown(key), Step::Key(key.clone()), child);
            }
        }
        Value::Array(items) => {
            for (position, child) in items.iter().enumerate() {
                consider(&position.to_string(), Step::Item(position), child);
            }
        }
        _ => {}
    }
    best
}

fn join(way: &str, rest: &str) -> String {
    if rest.is_empty() || way.is_empty() { format!("{way}{rest}") } else { format!("{way}.{rest}") }
}

/// What was taken out, as it was written.
#[derive(Default)]
struct Taken {
    fields: BTreeSet<String>,
    /// Items by their list, in order.
    items: BTreeMap<String, BTreeSet<usize>>,
}

impl Taken {
    /// The way in the document as it was written: items have moved up.
    fn as_written(&self, way: &[Step]) -> String {
        way.iter().fold(String::new(), |at, step| match step {
            Step::Key(key) => join(&at, &shown(key)),
            Step::Item(position) => {
                let gone = self.items.get(&at).into_iter().flatten();
                let place = gone.fold(*position, |place, gone| place + usize::from(*gone <= place));
                join(&at, &place.to_string())
            }
        })
    }

    /// Whether something is wrong only because something else was taken out.
    fn explains(&self, field: &str, problem: &Problem) -> bool {
        match problem {
            Problem::Missing => self.fields.contains(field),
            Problem::NoRole { .. } | Problem::NoRoles => {
                self.fields.iter().any(|gone| gone.starts_with("roles"))
            }
            // A table or a list of which something is gone.
            _ => {
                let below = format!("{field}.");
                self.fields.iter().any(|gone| gone.starts_with(&below))
            }
        }
    }

    fn take(&mut self, document: &mut Value, way: &[Step], written: String) {
        let Some((last, before)) = way.split_last() else { return };
        let parent = before.iter().try_fold(document, |value, step| match step {
            Step::Key(key) => value.get_mut(key),
            Step::Item(position) => value.get_mut(position),
        });
        match (parent, last) {
            (Some(Value::Object(fields)), Step::Key(key)) => {
                fields.shift_remove(key);
            }
            (Some(Value::Array(items)), Step::Item(position)) => {
                items.remove(*position);
                if let Some((list, place)) = written.rsplit_once('.')
                    && let Ok(place) = place.parse()
                {
                    self.items.entry(list.to_owned()).or_default().insert(place);
                }
            }
            _ => {}
        }
        self.fields.insert(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_in(text: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forge.toml");
        std::fs::write(&file, text).unwrap();
        let told =
            faults(None, Some(&file), &|name| (name == "SET").then(|| "a-credential".into()));
        let line = |fault: &ConfigError| fault.to_string().split_once(": ").unwrap().1.to_owned();
        told.iter().map(line).collect()
    }

    #[test]
    fn a_servers_command_that_is_a_list_is_told_as_that() {
        let told = faults_in("[servers.a]\ncommand = ['npx', '-y', 'x']\n");
        assert_eq!(told, ["servers.a.command: expected a string, found a list"]);
        let told =
            faults_in("[servers.a]\nurl = 'https://x.example/'\nheaders.A = { command = ['y'] }\n");
        assert!(told.is_empty(), "{told:?}");
    }

    #[test]
    fn every_fault_is_told_once_and_what_follows_from_one_is_not() {
        let told = faults_in(
            "[servers.a]\ncommand = 'x'\nargz = 1\nargs = [1, 'y', 2]\n\
             limits = { nofile = 1, processes = 0 }\n\
             [servers.b]\ncommand = 7\n\
             [tools.'a.b']\ncost = -1\neffect = 'hunter2'\n\
             [roles.r]\ntools = 'hunter2'\n[principals.p]\nroles = ['r']\nuuid = 1\n\
             [builtins.fs]\nroots = [{ name = 'A', path = '/' }]\n\
             [severs.c]\n",
        );
        let expected = [
            "severs: unknown field",
            "servers.a.argz: unknown field",
            "servers.a.limits.nofile: unknown field",
            "servers.a.limits.processes: expected a whole number above 0",
            "servers.a.args.0: expected a string",
            "servers.a.args.2: expected a string",
            "servers.b.command: expected a string",
            "tools.a.b.cost: expected a whole number",
            "tools.a.b.effect: must be one of",
            "roles.r.tools: expected a list",
            "principals.p.uuid: unknown field",
            "builtins.fs.roots.0.name: a name here is",
        ];
        for want in expected {
            let count = told.iter().filter(|fault| fault.starts_with(want)).count();
            assert_eq!(count, 1, "{want}\n→ {told:#?}");
        }
        assert_eq!(told.len(), expected.len(), "{told:#?}");
        assert!(!told.concat().contains("hunter2"), "{told:#?}");
    }

    #[test]
    fn no_command_is_started_and_a_missing_variable_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("started");
        let told = faults_in(&format!(
            "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\n\
             K = {{ command = ['/usr/bin/touch', '{mark}'] }}\nL = {{ from_env = 'NO' }}\n\
             M = {{ command = [] }}\nN = {{ from_env = 'SET' }}\n\
             [builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'\nencoding = 'hex'\n\
             secret = {{ command = ['/usr/bin/touch', '{mark}'] }}\n",
            mark = mark.display(),
        ));
        assert!(!mark.exists());
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].starts_with("servers.a.credentials.L: the environment variable NO"));
        assert!(told[1].starts_with("servers.a.credentials.M.command: must not be empty"));
    }

    #[test]
    fn a_file_that_is_none_is_one_fault_and_a_good_one_has_none() {
        assert_eq!(faults_in("[servers.a").len(), 1);
        assert_eq!(faults_in("[servers.a]\ncommand = 'x'"), [""; 0]);
        let absent = faults(None, Some(Path::new("/nowhere/forge.toml")), &|_| None);
        assert!(matches!(absent[..], [ConfigError::Read { .. }]));
    }

    #[test]
    fn a_server_that_is_wrong_is_there_for_those_who_name_it() {
        let named = "[builtins.resource]\nallow = [{ server = 'a', uri_prefix = 'x://y/' }]\n";
        assert_eq!(faults_in(&format!("{named}[servers.a]\ncomand = 'x'")).len(), 1);
        let told = faults_in(named);
        assert!(told[0].contains("no tool server of this name"), "{told:?}");
    }
}
