//! Tool servers: an entry of `mcpServers`, and a table `[servers.<name>]`.
//!
//! A server is a program (`command`), an MCP server over HTTP (`url`) or an
//! HTTP interface with an OpenAPI document (`openapi`).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forge_protocol::name::{RESERVED_SERVERS, is_server_name};
use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

use super::certificates::ca_file;
use super::credentials::credential;
use super::node::Node;
use super::{ConfigError, Lookup, Problem, egress, strangers};
use crate::endpoint::{ClientAuth, Endpoint, OAuthConfig, Resource, is_own_header, is_safe_url};
use crate::openapi::Plan;
use crate::secret::{Secret, is_short, names_credential, parts_of_credential, parts_of_header};
use crate::stranger::{Jail, Program};
use crate::upstream::{ServerConfig, Source};

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

/// One entry of `mcpServers`; `None` if it is switched off.
pub(super) fn mcp_server(
    name: &str,
    entry: &Node<'_>,
    lookup: Lookup<'_>,
) -> Result<Option<ServerConfig>, ConfigError> {
    const KNOWN: [&str; 8] =
        ["command", "args", "env", "cwd", "url", "headers", "type", "disabled"];
    entry.object()?;
    if let Some(disabled) = entry.field("disabled")
        && disabled.bool()?
    {
        return Ok(None);
    }
    check_server_name(name, entry)?;
    for other in ["serverUrl", "httpUrl"] {
        if let Some(other) = entry.field(other) {
            return Err(other.wrong(Problem::OtherName { name: "url" }));
        }
    }
    let is_http = match entry.field("type") {
        None => entry.field("url").is_some(),
        Some(kind) => match kind.text()? {
            "stdio" => false,
            "http" | "streamable-http" | "streamableHttp" => true,
            _ => return Err(kind.wrong(Problem::Transport)),
        },
    };
    entry.only_and(&KNOWN, &TOLERATED_FIELDS)?;
    let foreign: &[&str] =
        if is_http { &["command", "args", "env", "cwd"] } else { &["url", "headers"] };
    if let Some(other) = foreign.iter().find_map(|key| entry.field(key)) {
        return Err(other.wrong(Problem::Mixed));
    }
    // A variable's value is as secret in an argument or a path.
    let found = RefCell::new(Vec::new());
    let looked_up = |variable: &str| {
        let value = lookup(variable)?;
        if is_guessed_secret(variable, &value) {
            found.borrow_mut().push(value.clone());
        }
        Some(value)
    };
    let expanded =
        |node: &Node<'_>| expand(node.text()?, &looked_up).map_err(|problem| node.wrong(problem));
    let mut server = match is_http {
        true => mcp_http(entry, expanded)?,
        false => mcp_stdio(entry, expanded)?,
    };
    for value in found.take() {
        if !server.scrub.iter().any(|known| known.expose() == value) {
            server.scrub.push(entry.secret(value)?);
        }
    }
    Ok(Some(server))
}

/// An entry of `mcpServers` with a program.
fn mcp_stdio(
    entry: &Node<'_>,
    expanded: impl Fn(&Node<'_>) -> Result<String, ConfigError>,
) -> Result<ServerConfig, ConfigError> {
    let mut scrub = Vec::new();
    let mut server = Program {
        command: command(&entry.needed("command")?, &expanded)?,
        args: Vec::new(),
        cwd: None,
        env: BTreeMap::new(),
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
            let guessed = is_guessed_secret(variable, &value);
            if value.is_empty() {
                // No secret, and no value to hold: leave the variable out.
                continue;
            }
            let value = node.secret(value)?;
            if guessed {
                scrub.push(value.clone());
            }
            server.env.insert(variable.to_owned(), value);
        }
    }
    Ok(ServerConfig { source: Source::Stdio(server), scrub })
}

/// An entry of `mcpServers` with an address.
fn mcp_http(
    entry: &Node<'_>,
    expanded: impl Fn(&Node<'_>) -> Result<String, ConfigError>,
) -> Result<ServerConfig, ConfigError> {
    let at = entry.needed("url")?;
    let url = url(&at, &expanded(&at)?, false)?;
    let mut scrub = Vec::new();
    // Where everything is one string, keys stand in addresses too.
    for (key, value) in url.query_pairs() {
        if is_guessed_secret(&key, &value) {
            scrub.push(at.secret(value.into_owned())?);
        }
    }
    let mut headers = Vec::new();
    if let Some(listed) = entry.field("headers") {
        for (name, node) in listed.children()? {
            let value = expanded(&node)?;
            if names_credential(name) {
                for part in parts_of_header(&value) {
                    scrub.push(node.secret(part.to_owned())?);
                }
            }
            headers.push(header(&node, name, node.secret(value)?, &headers)?);
        }
    }
    let endpoint = Endpoint { url, headers, query: Vec::new(), oauth: None, roots: Vec::new() };
    Ok(ServerConfig { source: Source::Http(endpoint), scrub })
}

/// One table `[servers.<name>]`.
pub(super) fn forge_server(
    name: &str,
    entry: &Node<'_>,
    lookup: Lookup<'_>,
) -> Result<ServerConfig, ConfigError> {
    const COMMAND: [&str; 9] =
        ["command", "args", "env", "credentials", "cwd", "read", "write", "network", "limits"];
    const URL: [&str; 6] = ["url", "headers", "credentials", "oauth", "ca_file", "allow_http"];
    const OPENAPI: [&str; 8] = [
        "openapi",
        "base_url",
        "include",
        "headers",
        "credentials",
        "oauth",
        "ca_file",
        "allow_http",
    ];
    check_server_name(name, entry)?;
    let kinds: [&[&str]; 3] = [&COMMAND, &URL, &OPENAPI];
    let mut given = kinds.into_iter().filter(|kind| entry.field(kind[0]).is_some());
    let known = match (given.next(), given.next()) {
        (Some(known), None) => known,
        (_, Some(second)) => return Err(entry.wrong_at(second[0], Problem::OneKind)),
        (None, None) => {
            // A word misspelt is told before a word missing. Some are of two kinds.
            let mut all = Vec::new();
            for field in kinds.concat() {
                if !all.contains(&field) {
                    all.push(field);
                }
            }
            entry.only(&all)?;
            return Err(entry.wrong(Problem::OneKind));
        }
    };
    entry.only(known)?;
    let mut scrub = Vec::new();
    match known[0] {
        "command" => {}
        "url" => {
            let endpoint = endpoint(entry, "url", lookup, &mut scrub)?;
            return Ok(ServerConfig { source: Source::Http(endpoint), scrub });
        }
        _ => {
            let endpoint = endpoint(entry, "base_url", lookup, &mut scrub)?;
            let source = Source::OpenApi(openapi(name, entry, endpoint)?);
            return Ok(ServerConfig { source, scrub });
        }
    }
    let as_written = |node: &Node<'_>| node.text().map(str::to_owned);
    let mut server = Program {
        command: command(&entry.needed("command")?, as_written)?,
        args: Vec::new(),
        cwd: None,
        env: BTreeMap::new(),
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
            server.env.insert(variable.to_owned(), node.secret(as_written(&node)?)?);
        }
    }
    if let Some(credentials) = entry.field("credentials") {
        for (variable, node) in credentials.children()? {
            check_variable(variable, &node)?;
            let value = credential(&node, &[], lookup)?;
            scrub.push(value.clone());
            if server.env.insert(variable.to_owned(), value).is_some() {
                return Err(node.wrong(Problem::SetTwice));
            }
        }
    }
    Ok(ServerConfig { source: Source::Stdio(server), scrub })
}

/// The address under `key`, `headers`, `credentials`, `oauth`, `ca_file` and `allow_http`.
fn endpoint(
    entry: &Node<'_>,
    key: &str,
    lookup: Lookup<'_>,
    scrub: &mut Vec<Secret>,
) -> Result<Endpoint, ConfigError> {
    let allow_http = entry.field("allow_http").map_or(Ok(false), |node| node.bool())?;
    let at = entry.needed(key)?;
    let url = url(&at, at.text()?, allow_http)?;
    let mut headers = Vec::new();
    if let Some(listed) = entry.field("headers") {
        for (name, node) in listed.children()? {
            let value = if node.is_text() {
                node.secret(node.text()?.to_owned())?
            } else {
                let bare = credential(&node, &["prefix"], lookup)?;
                for part in parts_of_credential(name, bare.expose()) {
                    scrub.push(node.secret(part.to_owned())?);
                }
                scrub.push(bare.clone());
                let prefix = node.field("prefix").map_or(Ok(""), |prefix| prefix.text())?;
                node.secret(format!("{prefix}{}", bare.expose()))?
            };
            headers.push(header(&node, name, value, &headers)?);
        }
    }
    let oauth = entry.field("oauth").map(|node| oauth(&node, lookup, scrub)).transpose()?;
    if oauth.is_some() && headers.iter().any(|(name, _)| name == "authorization") {
        return Err(entry.wrong_at("oauth", Problem::TwoTokens));
    }
    let query = in_the_query(entry, &url, lookup, scrub)?;
    Ok(Endpoint { url, headers, query, oauth, roots: ca_file(entry)? })
}

/// `credentials` of a server over HTTP: each goes into the query, under its name here.
/// Which of two values a server takes is not known: the address has none of its own.
fn in_the_query(
    entry: &Node<'_>,
    url: &Url,
    lookup: Lookup<'_>,
    scrub: &mut Vec<Secret>,
) -> Result<Vec<(String, Secret)>, ConfigError> {
    let mut query = Vec::new();
    if let Some(credentials) = entry.field("credentials") {
        for (name, node) in credentials.children()? {
            if name.is_empty() {
                return Err(node.wrong(Problem::Text));
            }
            if url.query_pairs().any(|(own, _)| own == name) {
                return Err(node.wrong(Problem::QueryTwice));
            }
            let value = credential(&node, &[], lookup)?;
            scrub.push(value.clone());
            query.push((name.to_owned(), value));
        }
    }
    Ok(query)
}

/// An address of a host over HTTP, whatever else it has.
pub(super) fn http_url(node: &Node<'_>, text: &str) -> Result<Url, ConfigError> {
    let url = Url::parse(text).map_err(|_| node.wrong(Problem::Url))?;
    let is_http = matches!(url.scheme(), "http" | "https");
    if !is_http || !url.has_host() || url.fragment().is_some() {
        return Err(node.wrong(Problem::Url));
    }
    Ok(url)
}

fn url(node: &Node<'_>, text: &str, allow_http: bool) -> Result<Url, ConfigError> {
    let url = http_url(node, text)?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(node.wrong(Problem::UserInfo));
    }
    if !is_safe_url(&url) && !allow_http {
        return Err(node.wrong(Problem::PlainHttp));
    }
    Ok(url)
}

/// A header, beside these `others`.
fn header(
    node: &Node<'_>,
    name: &str,
    value: Secret,
    others: &[(HeaderName, Secret)],
) -> Result<(HeaderName, Secret), ConfigError> {
    let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| node.wrong(Problem::Header))?;
    if is_own_header(name.as_str()) {
        return Err(node.wrong(Problem::OwnHeader));
    }
    HeaderValue::from_str(value.expose()).map_err(|_| node.wrong(Problem::HeaderValue))?;
    // Small letters or not, one would be sent in the place of the other.
    if others.iter().any(|(other, _)| *other == name) {
        return Err(node.unfit(egress::TWICE));
    }
    Ok((name, value))
}

fn oauth(
    node: &Node<'_>,
    lookup: Lookup<'_>,
    scrub: &mut Vec<Secret>,
) -> Result<OAuthConfig, ConfigError> {
    node.only(&[
        "client_id",
        "client_secret",
        "client_auth",
        "scopes",
        "audience",
        "resource",
        "token_url",
        "issuer",
    ])?;
    let client_secret = credential(&node.needed("client_secret")?, &[], lookup)?;
    scrub.push(client_secret.clone());
    let mut scopes = Vec::new();
    if let Some(listed) = node.field("scopes") {
        for scope in listed.items()? {
            scopes.push(scope.text()?.to_owned());
        }
    }
    let address = |key: &str| match node.field(key) {
        Some(at) => url(&at, at.text()?, false).map(Some),
        None => Ok(None),
    };
    let (token_url, issuer) = (address("token_url")?, address("issuer")?);
    if token_url.is_some() && issuer.is_some() {
        return Err(node.wrong_at("issuer", Problem::TwoIssuers));
    }
    let client_id = node.needed("client_id")?.text()?.to_owned();
    let audience = node.field("audience").map(|it| it.text().map(str::to_owned)).transpose()?;
    let resource = match node.field("resource") {
        None => Resource::Own,
        Some(said) => match said.bool() {
            Ok(true) => Resource::Own,
            Ok(false) => Resource::Untold,
            Err(_) => Resource::Named(said.text()?.to_owned()),
        },
    };
    let client_auth = match node.field("client_auth") {
        None => None,
        Some(said) => Some(match said.text()? {
            "basic" => ClientAuth::Basic,
            "post" => ClientAuth::Post,
            _ => return Err(said.unfit("known ways are \"basic\" and \"post\"")),
        }),
    };
    Ok(OAuthConfig {
        client_id,
        client_secret,
        scopes,
        audience,
        resource,
        client_auth,
        token_url,
        issuer,
    })
}

/// The operations of the document under `openapi`.
fn openapi(server: &str, entry: &Node<'_>, endpoint: Endpoint) -> Result<Plan, ConfigError> {
    let mut include = None;
    if let Some(listed) = entry.field("include") {
        let mut names = Vec::new();
        for name in listed.items()? {
            names.push(name.text()?.to_owned());
        }
        if names.is_empty() {
            return Err(listed.unfit("is empty: give at least one, or leave it out for all"));
        }
        include = Some(names);
    }
    let file = entry.needed("openapi")?;
    Plan::read(server, Path::new(file.text()?), include.as_deref(), endpoint)
        .map_err(|error| entry.wrong_at(error.field(), Problem::OpenApi(error)))
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

/// Whether a value in a file that knows no credentials is taken for one. A
/// short one is not, on the strength of its name alone.
fn is_guessed_secret(name: &str, value: &str) -> bool {
    !is_short(value) && names_credential(name)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_called_like_a_credential_is_taken_for_one_unless_it_is_too_short() {
        for (name, value, is_one) in [
            ("API_KEY", "hunter2-hunter2", true),
            ("api_key", "hunter2-hunter2", true),
            ("API_KEY", "hunter2", false),
            ("HOME", "hunter2-hunter2", false),
        ] {
            assert_eq!(is_guessed_secret(name, value), is_one, "{name} {value}");
        }
    }
}
