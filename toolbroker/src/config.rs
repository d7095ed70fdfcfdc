//! Configuration: the `mcpServers` JSON that users already have, and the
//! project's own `forge.toml`, read and checked into [`Config`].
//!
//! A configuration file is written by the operator, and still checked as if
//! it were not: unknown fields, wrong types, doubled keys and bad names are
//! errors, and an error names the file and the field but never a value, since
//! any value may be a credential in the wrong place. Relative paths are
//! relative to the working directory. Deliberately absent are servers over
//! HTTP.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forge_protocol::name::{RESERVED_SERVERS, is_server_name};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::secret::{Secret, SecretError};

/// The tables of `forge.toml` that belong to the broker.
pub const BROKER_TABLES: [&str; 1] = ["servers"];

/// The tables of `forge.toml` that belong to the supervisor, which reads the
/// same file: ignored here, and unknown to neither.
pub const SUPERVISOR_TABLES: [&str; 6] = ["vm", "limits", "trust", "pool", "service", "broker"];

/// Fields of an `mcpServers` entry that other programs use and that change
/// nothing here.
const TOLERATED_FIELDS: [&str; 9] = [
    "timeout",
    "autoApprove",
    "alwaysAllow",
    "description",
    "icon",
    "dev",
    "gallery",
    "version",
    "note",
];

/// Parts of an environment variable's name that say its value is a credential.
const CREDENTIAL_NAME_PARTS: [&str; 9] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL", "AUTH", "COOKIE", "DSN"];

/// A value shorter than this is not scrubbed on the strength of its name
/// alone: too much else would match it.
const GUESSED_SECRET_BYTES_MIN: usize = 8;

/// A configuration file larger than this is a wrong file.
const CONFIG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Everything the broker goes by.
#[derive(Debug, Default)]
pub struct Config {
    /// The tool servers, by name.
    pub servers: BTreeMap<String, ServerConfig>,
}

/// How one tool server is started.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The program: a name to be looked up in `PATH`, or a path.
    pub command: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Where it runs; the broker's own working directory if not given.
    pub cwd: Option<PathBuf>,
    /// Environment variables beside the basic ones. All are held as secrets,
    /// since an `mcp.json` keeps credentials among them.
    pub env: BTreeMap<String, Secret>,
    /// Values to be removed from whatever this server says.
    pub scrub: Vec<Secret>,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is no JSON or TOML.
    #[error("{}, line {line}: {what}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong, without the line's text.
        what: String,
    },
    /// One field is wrong.
    #[error("{}: {field}: {problem}", file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The field, as a path with dots.
        field: String,
        /// What is wrong with it.
        problem: Problem,
    },
    /// Two files configure the same server.
    #[error(
        "{}: servers.{server}: another file configures a server of this name too: rename one",
        file.display()
    )]
    Twice {
        /// The second file.
        file: PathBuf,
        /// The server.
        server: String,
    },
}

/// What is wrong with one field.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// No such field.
    #[error("unknown field; known here are {known}")]
    Unknown {
        /// The known fields.
        known: String,
    },
    /// The field is needed.
    #[error("this field is missing")]
    Missing,
    /// The value has another type.
    #[error("expected {expected}, found {found}")]
    Type {
        /// What should be there.
        expected: &'static str,
        /// The type of what is there.
        found: &'static str,
    },
    /// The table's name cannot be a server's.
    #[error("a server name must be [a-z0-9_-]+: rename it")]
    ServerName,
    /// The name is one of the broker's own servers.
    #[error("this name is reserved for a built-in server: rename it")]
    Reserved,
    /// A server that is reached otherwise than over stdio.
    #[error("not yet supported: stdio only. Give a `command` that speaks MCP on stdin and stdout")]
    NotStdio,
    /// The name of an environment variable is none.
    #[error("an environment variable's name is not empty and has no `=` and no NUL")]
    VariableName,
    /// A variable is used that is not set.
    #[error("${{{variable}}} is not set: set it, or give a default as ${{{variable}:-…}}")]
    Unset {
        /// The variable.
        variable: String,
    },
    /// `${` without an end, or with a name that is none.
    #[error("`${{` begins no variable here; write ${{NAME}} or ${{NAME:-default}}")]
    Expansion,
    /// Text that a command line cannot carry.
    #[error("must not be empty or hold a NUL byte")]
    Text,
    /// A variable is set both plainly and as a credential.
    #[error("is set under `env` and under `credentials`: keep one")]
    SetTwice,
    /// A credential needs one source.
    #[error("give exactly one source: {{ from_env = \"NAME\" }} or {{ file = \"path\" }}")]
    Source,
    /// The credential cannot be had.
    #[error("{0}")]
    Secret(SecretError),
}

/// Looks a variable up in the broker's environment.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Config {
    /// Reads and checks the files that are given.
    ///
    /// # Errors
    /// [`ConfigError`], for the first thing that is wrong.
    pub fn load(
        mcp_config: Option<&Path>,
        forge_config: Option<&Path>,
        lookup: Lookup<'_>,
    ) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Some(file) = mcp_config {
            config.join(file, parse_mcp_json(file, &read(file)?, lookup)?)?;
        }
        if let Some(file) = forge_config {
            config.join(file, parse_forge_toml(file, &read(file)?, lookup)?)?;
        }
        Ok(config)
    }

    fn join(
        &mut self,
        file: &Path,
        servers: BTreeMap<String, ServerConfig>,
    ) -> Result<(), ConfigError> {
        for (name, server) in servers {
            if self.servers.contains_key(&name) {
                return Err(ConfigError::Twice { file: file.to_owned(), server: name });
            }
            self.servers.insert(name, server);
        }
        Ok(())
    }
}

fn read(file: &Path) -> Result<String, ConfigError> {
    use std::io::Read as _;
    let unreadable = |source| ConfigError::Read { file: file.to_owned(), source };
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|opened| opened.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(unreadable)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(unreadable(std::io::Error::other(format!(
            "it has more than {CONFIG_BYTES_MAX} bytes"
        ))));
    }
    Ok(text)
}

fn parse_mcp_json(
    file: &Path,
    text: &str,
    lookup: Lookup<'_>,
) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
    let Strict(document) = serde_json::from_str(text).map_err(|error| ConfigError::Syntax {
        file: file.to_owned(),
        line: error.line(),
        what: syntax_of(&error),
    })?;
    // The file may belong to another program, which keeps more in it.
    let document = Node { file, at: String::new(), value: &document };
    let mut servers = BTreeMap::new();
    let listed = document.object()?.get("mcpServers");
    let listed = document.child("mcpServers", listed).ok_or_else(|| ConfigError::Field {
        file: file.to_owned(),
        field: "mcpServers".into(),
        problem: Problem::Missing,
    })?;
    for (name, entry) in listed.children()? {
        if let Some(server) = mcp_server(name, &entry, lookup)? {
            servers.insert(name.to_owned(), server);
        }
    }
    Ok(servers)
}

/// One entry of `mcpServers`; `None` if it is switched off.
fn mcp_server(
    name: &str,
    entry: &Node<'_>,
    lookup: Lookup<'_>,
) -> Result<Option<ServerConfig>, ConfigError> {
    const KNOWN: [&str; 6] = ["command", "args", "env", "cwd", "type", "disabled"];
    let fields = entry.object()?;
    if let Some(disabled) = entry.field("disabled")
        && disabled.bool()?
    {
        return Ok(None);
    }
    check_server_name(name, entry)?;
    for remote in ["url", "serverUrl", "httpUrl"] {
        if let Some(remote) = entry.field(remote) {
            return Err(remote.wrong(Problem::NotStdio));
        }
    }
    if let Some(kind) = entry.field("type")
        && kind.text()? != "stdio"
    {
        return Err(kind.wrong(Problem::NotStdio));
    }
    for key in fields.keys() {
        if !KNOWN.contains(&key.as_str()) && !TOLERATED_FIELDS.contains(&key.as_str()) {
            let known = KNOWN.join(", ");
            return Err(entry.wrong_at(key, Problem::Unknown { known }));
        }
    }
    let expanded =
        |node: &Node<'_>| expand(node.text()?, lookup).map_err(|problem| node.wrong(problem));

    let mut server = ServerConfig {
        command: command(&entry.needed("command")?, expanded)?,
        args: Vec::new(),
        cwd: None,
        env: BTreeMap::new(),
        scrub: Vec::new(),
    };
    if let Some(args) = entry.field("args") {
        for arg in args.items()? {
            server.args.push(plain(&arg, expanded(&arg)?)?);
        }
    }
    if let Some(cwd) = entry.field("cwd") {
        server.cwd = Some(plain(&cwd, expanded(&cwd)?)?.into());
    }
    if let Some(env) = entry.field("env") {
        for (variable, node) in env.children()? {
            check_variable(variable, &node)?;
            let value = expanded(&node)?;
            let guessed = value.len() >= GUESSED_SECRET_BYTES_MIN && names_credential(variable);
            if value.is_empty() {
                // No secret, and no value to hold: leave the variable out.
                continue;
            }
            let value = Secret::new(value).map_err(|error| node.wrong(Problem::Secret(error)))?;
            if guessed {
                server.scrub.push(value.clone());
            }
            server.env.insert(variable.to_owned(), value);
        }
    }
    Ok(Some(server))
}

fn parse_forge_toml(
    file: &Path,
    text: &str,
    lookup: Lookup<'_>,
) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
    let table: toml::Table = toml::from_str(text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start);
        let line = text.as_bytes()[..start.min(text.len())].iter().filter(|b| **b == b'\n').count();
        // The error's own text quotes the line, and with it any value there.
        let what = "this is not TOML here".to_owned();
        ConfigError::Syntax { file: file.to_owned(), line: line + 1, what }
    })?;
    let document = serde_json::to_value(table).map_err(|_| ConfigError::Syntax {
        file: file.to_owned(),
        line: 1,
        what: "a number is not finite".into(),
    })?;
    let document = Node { file, at: String::new(), value: &document };
    for key in document.object()?.keys() {
        if !BROKER_TABLES.contains(&key.as_str()) && !SUPERVISOR_TABLES.contains(&key.as_str()) {
            let known = [BROKER_TABLES.as_slice(), &SUPERVISOR_TABLES].concat().join(", ");
            return Err(document.wrong_at(key, Problem::Unknown { known }));
        }
    }
    let mut servers = BTreeMap::new();
    if let Some(listed) = document.field("servers") {
        for (name, entry) in listed.children()? {
            servers.insert(name.to_owned(), forge_server(name, &entry, lookup)?);
        }
    }
    Ok(servers)
}

/// One table `[servers.<name>]`.
fn forge_server(
    name: &str,
    entry: &Node<'_>,
    lookup: Lookup<'_>,
) -> Result<ServerConfig, ConfigError> {
    const KNOWN: [&str; 5] = ["command", "args", "env", "credentials", "cwd"];
    check_server_name(name, entry)?;
    for key in entry.object()?.keys() {
        if key == "url" {
            return Err(entry.wrong_at(key, Problem::NotStdio));
        }
        if !KNOWN.contains(&key.as_str()) {
            return Err(entry.wrong_at(key, Problem::Unknown { known: KNOWN.join(", ") }));
        }
    }
    let as_written = |node: &Node<'_>| node.text().map(str::to_owned);
    let mut server = ServerConfig {
        command: command(&entry.needed("command")?, as_written)?,
        args: Vec::new(),
        cwd: None,
        env: BTreeMap::new(),
        scrub: Vec::new(),
    };
    if let Some(args) = entry.field("args") {
        for arg in args.items()? {
            server.args.push(plain(&arg, as_written(&arg)?)?);
        }
    }
    if let Some(cwd) = entry.field("cwd") {
        server.cwd = Some(plain(&cwd, as_written(&cwd)?)?.into());
    }
    if let Some(env) = entry.field("env") {
        for (variable, node) in env.children()? {
            check_variable(variable, &node)?;
            let value = Secret::new(as_written(&node)?)
                .map_err(|error| node.wrong(Problem::Secret(error)))?;
            server.env.insert(variable.to_owned(), value);
        }
    }
    if let Some(credentials) = entry.field("credentials") {
        for (variable, node) in credentials.children()? {
            check_variable(variable, &node)?;
            let value = credential(&node, lookup)?;
            server.scrub.push(value.clone());
            if server.env.insert(variable.to_owned(), value).is_some() {
                return Err(node.wrong(Problem::SetTwice));
            }
        }
    }
    Ok(server)
}

/// `{ from_env = "NAME" }` or `{ file = "path" }`.
fn credential(node: &Node<'_>, lookup: Lookup<'_>) -> Result<Secret, ConfigError> {
    const KNOWN: [&str; 2] = ["from_env", "file"];
    for key in node.object()?.keys() {
        if !KNOWN.contains(&key.as_str()) {
            return Err(node.wrong_at(key, Problem::Unknown { known: KNOWN.join(", ") }));
        }
    }
    let secret = match (node.field("from_env"), node.field("file")) {
        (Some(variable), None) => Secret::from_env(variable.text()?, lookup),
        (None, Some(file)) => Secret::from_file(Path::new(file.text()?)),
        _ => return Err(node.wrong(Problem::Source)),
    };
    secret.map_err(|error| node.wrong(Problem::Secret(error)))
}

fn check_server_name(name: &str, entry: &Node<'_>) -> Result<(), ConfigError> {
    if RESERVED_SERVERS.contains(&name) {
        return Err(entry.wrong(Problem::Reserved));
    }
    if !is_server_name(name) {
        return Err(entry.wrong(Problem::ServerName));
    }
    Ok(())
}

fn check_variable(variable: &str, node: &Node<'_>) -> Result<(), ConfigError> {
    if variable.is_empty() || variable.contains(['=', '\0']) {
        return Err(node.wrong(Problem::VariableName));
    }
    Ok(())
}

fn names_credential(variable: &str) -> bool {
    let variable = variable.to_ascii_uppercase();
    CREDENTIAL_NAME_PARTS.iter().any(|part| variable.contains(part))
}

/// The program to start. A path is made absolute, so that the server's own
/// working directory does not change what it means.
fn command(
    node: &Node<'_>,
    text: impl Fn(&Node<'_>) -> Result<String, ConfigError>,
) -> Result<PathBuf, ConfigError> {
    let command = plain(node, text(node)?)?;
    if command.is_empty() {
        return Err(node.wrong(Problem::Text));
    }
    if !command.contains('/') {
        return Ok(command.into());
    }
    std::path::absolute(&command).map_err(|_| node.wrong(Problem::Text))
}

/// Text that a command line can carry.
fn plain(node: &Node<'_>, text: String) -> Result<String, ConfigError> {
    if text.contains('\0') { Err(node.wrong(Problem::Text)) } else { Ok(text) }
}

/// Replaces `${NAME}` and `${NAME:-default}`; the default also stands in for
/// an empty value. Any other `$` is itself.
fn expand(text: &str, lookup: Lookup<'_>) -> Result<String, Problem> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        out.push_str(&rest[..start]);
        let inner = &rest[start + 2..];
        let end = inner.find('}').ok_or(Problem::Expansion)?;
        let (name, default) = match inner[..end].split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (&inner[..end], None),
        };
        let is_name = !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !is_name {
            return Err(Problem::Expansion);
        }
        match (lookup(name), default) {
            (Some(value), None) => out.push_str(&value),
            (Some(value), Some(_)) if !value.is_empty() => out.push_str(&value),
            (_, Some(default)) => out.push_str(default),
            (None, None) => return Err(Problem::Unset { variable: name.to_owned() }),
        }
        rest = &inner[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// A value and the way to it, so that every error can say where it is.
struct Node<'a> {
    file: &'a Path,
    at: String,
    value: &'a Value,
}

impl<'a> Node<'a> {
    fn wrong(&self, problem: Problem) -> ConfigError {
        let field = if self.at.is_empty() { "the file".to_owned() } else { self.at.clone() };
        ConfigError::Field { file: self.file.to_owned(), field, problem }
    }

    fn wrong_at(&self, key: &str, problem: Problem) -> ConfigError {
        let field = self.path_to(key);
        ConfigError::Field { file: self.file.to_owned(), field, problem }
    }

    fn path_to(&self, key: &str) -> String {
        // A key is the file's text: it may hold anything.
        let key = crate::cut(&key.escape_debug().to_string(), 128);
        if self.at.is_empty() { key } else { format!("{}.{key}", self.at) }
    }

    fn child(&self, key: &str, value: Option<&'a Value>) -> Option<Node<'a>> {
        value.map(|value| Node { file: self.file, at: self.path_to(key), value })
    }

    fn field(&self, key: &str) -> Option<Node<'a>> {
        self.child(key, self.value.get(key))
    }

    fn needed(&self, key: &str) -> Result<Node<'a>, ConfigError> {
        self.field(key).ok_or_else(|| self.wrong_at(key, Problem::Missing))
    }

    fn of_type<T>(&self, expected: &'static str, got: Option<T>) -> Result<T, ConfigError> {
        got.ok_or_else(|| {
            let found = match self.value {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::String(_) => "a string",
                Value::Array(_) => "a list",
                Value::Object(_) => "a table",
            };
            self.wrong(Problem::Type { expected, found })
        })
    }

    fn object(&self) -> Result<&'a Map<String, Value>, ConfigError> {
        self.of_type("a table", self.value.as_object())
    }

    fn text(&self) -> Result<&'a str, ConfigError> {
        self.of_type("a string", self.value.as_str())
    }

    fn bool(&self) -> Result<bool, ConfigError> {
        self.of_type("a boolean", self.value.as_bool())
    }

    fn items(&self) -> Result<Vec<Node<'a>>, ConfigError> {
        let items = self.of_type("a list", self.value.as_array())?;
        Ok(items
            .iter()
            .enumerate()
            .map(|(position, value)| Node {
                file: self.file,
                at: self.path_to(&position.to_string()),
                value,
            })
            .collect())
    }

    fn children(&self) -> Result<Vec<(&'a str, Node<'a>)>, ConfigError> {
        let object = self.object()?;
        Ok(object
            .iter()
            .map(|(key, value)| {
                (key.as_str(), Node { file: self.file, at: self.path_to(key), value })
            })
            .collect())
    }
}

/// What serde_json has to say about syntax, without quoting the text.
fn syntax_of(error: &serde_json::Error) -> String {
    match error.classify() {
        serde_json::error::Category::Eof => "the JSON ends too early".into(),
        // `Strict` makes no other data errors than a doubled key.
        serde_json::error::Category::Data => "a key stands twice in one object".into(),
        _ => format!("this is not JSON at column {}", error.column()),
    }
}

/// JSON in which no object has a key twice: with doubled keys, two readers
/// of one file see two configurations.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Value;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("JSON without doubled keys")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(Strict(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(Value::Array(list))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
                let mut object = Map::new();
                while let Some((key, Strict(value))) = members.next_entry::<String, Strict>()? {
                    if object.insert(key, value).is_some() {
                        return Err(serde::de::Error::custom("doubled key"));
                    }
                }
                Ok(Value::Object(object))
            }
        }
        deserializer.deserialize_any(Reader).map(Strict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(name: &str) -> Option<String> {
        match name {
            "GH_TOKEN" => Some("gh-hunter2-token".into()),
            "EMPTY" => Some(String::new()),
            "HOME" => Some("/home/x".into()),
            _ => None,
        }
    }

    fn mcp(text: &str) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
        parse_mcp_json(Path::new("mcp.json"), text, &environment)
    }

    fn forge(text: &str) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
        parse_forge_toml(Path::new("forge.toml"), text, &environment)
    }

    #[test]
    fn an_mcp_json_as_users_have_it_is_read() {
        let servers = mcp(r#"{"globalShortcut": "x", "mcpServers": {
                "files": {"command": "npx", "args": ["-y", "files", "${HOME}/docs"],
                          "type": "stdio", "timeout": 60, "autoApprove": ["read"]},
                "github": {"command": "./bin/gh", "cwd": "/tmp",
                           "env": {"GITHUB_TOKEN": "${GH_TOKEN}", "LOG": "${LEVEL:-warn}",
                                   "E": "${EMPTY:-full}"}},
                "off": {"command": "x", "disabled": true, "whatever": 1}
            }}"#)
        .unwrap();
        assert_eq!(servers.len(), 2);
        assert_eq!(servers["files"].command, PathBuf::from("npx"));
        assert_eq!(servers["files"].args, ["-y", "files", "/home/x/docs"]);
        let github = &servers["github"];
        assert!(github.command.is_absolute() && github.command.ends_with("bin/gh"));
        assert_eq!(github.cwd.as_deref(), Some(Path::new("/tmp")));
        assert_eq!(github.env["GITHUB_TOKEN"].expose(), "gh-hunter2-token");
        assert_eq!(github.env["LOG"].expose(), "warn");
        assert_eq!(github.env["E"].expose(), "full");
        assert_eq!(github.scrub.len(), 1);
    }

    #[test]
    fn a_forge_toml_is_read_and_the_supervisors_tables_are_left_alone() {
        let servers = forge(
            r#"
            [vm]
            anything = 1
            [servers.shop]
            command = "shop-server"
            args = ["--fast", "${HOME}"]
            [servers.shop.env]
            LOG = "warn"
            [servers.shop.credentials]
            SHOP_TOKEN = { from_env = "GH_TOKEN" }
            "#,
        )
        .unwrap();
        let shop = &servers["shop"];
        assert_eq!(shop.args, ["--fast", "${HOME}"], "forge.toml expands nothing");
        assert_eq!(shop.env["SHOP_TOKEN"].expose(), "gh-hunter2-token");
        assert_eq!(shop.env["LOG"].expose(), "warn");
        assert_eq!(shop.scrub.len(), 1, "only the credential is scrubbed");
    }

    #[test]
    fn every_refusal_names_the_field_and_never_a_value() {
        type Parse = fn(&str) -> Result<BTreeMap<String, ServerConfig>, ConfigError>;
        let cases: &[(Parse, &str, &str)] = &[
            (mcp, r#"{"mcpServers": {"a": {"command": "hunter2", "foo": 1}}}"#, "mcpServers.a.foo"),
            (mcp, r#"{"mcpServers": {"a": {"args": ["hunter2"]}}}"#, "mcpServers.a.command"),
            (mcp, r#"{"mcpServers": {"a": {"command": ["hunter2"]}}}"#, "mcpServers.a.command"),
            (mcp, r#"{"mcpServers": {"A b": {"command": "hunter2"}}}"#, "mcpServers.A b"),
            (mcp, r#"{"mcpServers": {"fs": {"command": "hunter2"}}}"#, "reserved"),
            (mcp, r#"{"mcpServers": {"a": {"url": "http://hunter2"}}}"#, "stdio only"),
            (mcp, r#"{"mcpServers": {"a": {"type": "sse", "command": "x"}}}"#, "stdio only"),
            (mcp, r#"{"mcpServers": {"a": {"command": "x", "env": {"K": 7}}}}"#, "env.K"),
            (mcp, r#"{"mcpServers": {"a": {"command": "x", "args": ["${NO}"]}}}"#, "args.0: ${NO}"),
            (mcp, r#"{"mcpServers": {"a": {"command": "${hunter2"}}}"#, "mcpServers.a.command"),
            (
                mcp,
                r#"{"mcpServers": {"a": {"command": "x"}, "a": {"command": "hunter2"}}}"#,
                "twice",
            ),
            (mcp, r#"{"servers": {}}"#, "mcpServers"),
            (mcp, "{\"mcpServers\": {\"a\": hunter2}}", "line 1"),
            (forge, "[severs.a]\ncommand = 'hunter2'", "severs: unknown field"),
            (forge, "[servers.a]\ncommand = 'hunter2'\nargz = []", "servers.a.argz"),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = 'hunter2'",
                "credentials.K",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {value = 'hunter2'}",
                "credentials.K.value",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {}",
                "exactly one source",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {from_env = 'NO'}",
                "credentials.K: the environment variable NO is not set",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.env]\nK = 'hunter2'\n\
                 [servers.a.credentials]\nK = {from_env = 'GH_TOKEN'}",
                "credentials.K",
            ),
            (forge, "[servers.a]\ncommand = 'x'\n\nK = hunter2", "line 4"),
            (forge, "[servers.a]\ncommand = 'x'\ncommand = 'hunter2'", "line 3"),
            (forge, "[servers.a]\ncommand = \"a\\u0000hunter2\"", "servers.a.command"),
        ];
        for (parse, text, expected) in cases {
            let refused = match parse(text) {
                Ok(_) => panic!("accepted: {text}"),
                Err(refused) => refused.to_string(),
            };
            assert!(refused.contains(expected), "{text}\n→ {refused}");
            assert!(!refused.contains("hunter2"), "{text}\n→ {refused}");
        }
    }

    #[test]
    fn a_name_configured_in_both_files_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("mcp.json");
        let toml = folder.path().join("forge.toml");
        std::fs::write(&json, r#"{"mcpServers": {"a": {"command": "x"}}}"#).unwrap();
        std::fs::write(&toml, "[servers.a]\ncommand = 'x'").unwrap();
        let refused = Config::load(Some(&json), Some(&toml), &environment).unwrap_err();
        assert!(matches!(refused, ConfigError::Twice { .. }), "{refused}");
        assert_eq!(Config::load(Some(&json), None, &environment).unwrap().servers.len(), 1);
    }
}
