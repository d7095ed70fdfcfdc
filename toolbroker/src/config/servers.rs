//! Tool servers: an entry of `mcpServers`, and a table `[servers.<name>]`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forge_protocol::name::{RESERVED_SERVERS, is_server_name};

use super::credentials::credential;
use super::node::Node;
use super::{ConfigError, Lookup, Problem, strangers};
use crate::secret::Secret;
use crate::stranger::Jail;

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
    /// Where it lives.
    pub jail: Jail,
}

/// One entry of `mcpServers`; `None` if it is switched off.
pub(super) fn mcp_server(
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
        // This form has no place to say what a server may see but its command
        // line.
        jail: Jail { named: true, ..Jail::default() },
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

/// One table `[servers.<name>]`.
pub(super) fn forge_server(
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
        if !KNOWN.contains(&key.as_str()) && !strangers::FIELDS.contains(&key.as_str()) {
            let known = [KNOWN.as_slice(), &strangers::FIELDS].concat().join(", ");
            return Err(entry.wrong_at(key, Problem::Unknown { known }));
        }
    }
    let as_written = |node: &Node<'_>| node.text().map(str::to_owned);
    let mut server = ServerConfig {
        command: command(&entry.needed("command")?, as_written)?,
        args: Vec::new(),
        cwd: None,
        env: BTreeMap::new(),
        scrub: Vec::new(),
        jail: strangers::jail(entry)?,
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
