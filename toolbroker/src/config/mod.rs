//! Configuration: the `mcpServers` JSON that users already have, and the
//! project's own `forge.toml`, read and checked into [`Config`].
//!
//! A configuration file is written by the operator, and still checked as if
//! it were not: unknown fields, wrong types, doubled keys and bad names are
//! errors, and an error names the file and the field but never a value, since
//! any value may be a credential in the wrong place. Relative paths are
//! relative to the working directory, but `sign_with`, which counts from the file.

mod builtins;
mod certificates;
mod check;
mod credentials;
mod egress;
mod error;
mod node;
mod policy;
mod servers;
mod strangers;
mod telemetry;
mod tools;

pub use self::check::faults;
pub use self::error::{ConfigError, Problem};
pub use self::tools::{COST_DEFAULT, Word};

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::slice;

use forge_protocol::name::ToolName;
use serde_json::Value;
use url::Url;

use self::error::find_lines;
use self::node::{Node, Strict, syntax_of};
use self::servers::{forge_server, mcp_server};
use crate::builtin::BuiltinsConfig;
use crate::policy::Policy;
use crate::review::Mode;
use crate::secret::Secret;
use crate::stranger::Program;
use crate::upstream::{ServerConfig, Source};

/// The tables of `forge.toml` that belong to the broker.
pub const BROKER_TABLES: [&str; 7] =
    ["servers", "builtins", "tools", "review", "roles", "principals", "telemetry"];

/// The tables of `forge.toml` that belong to the supervisor, which reads the
/// same file: ignored here, and unknown to neither.
pub const SUPERVISOR_TABLES: [&str; 8] =
    ["vm", "trust", "pool", "limits", "service", "broker", "http", "mcp"];

/// A configuration file larger than this is a wrong file.
const CONFIG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Everything the broker goes by.
#[derive(Debug, Default)]
pub struct Config {
    /// The tool servers, by name.
    pub servers: BTreeMap<String, ServerConfig>,
    /// What the operator says of tools.
    pub words: BTreeMap<ToolName, Word>,
    /// Which tools each principal may see.
    pub policy: Policy,
    /// What becomes of a tool that was never reviewed.
    pub review: Mode,
    /// The built-in tools that need configuration.
    pub builtins: BuiltinsConfig,
    /// The users that tool servers run as, where root starts them; usual
    /// ones if not given.
    pub server_uids: Option<Range<u32>>,
    /// Where spans are posted to, if anywhere.
    pub collector: Option<Url>,
    /// Keys that the supervisor signs principals' programs with: files that no tool
    /// server is to see.
    pub signing_keys: Vec<PathBuf>,
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
        Self::parse(mcp_config, forge_config, lookup).map_err(|mut error| {
            find_lines(slice::from_mut(&mut error), [mcp_config, forge_config]);
            error
        })
    }

    fn parse(
        mcp_config: Option<&Path>,
        forge_config: Option<&Path>,
        lookup: Lookup<'_>,
    ) -> Result<Self, ConfigError> {
        // Only `forge.toml` has more than servers to say.
        let mut config = match forge_config {
            Some(file) => parse_forge_toml(file, &read(file)?, lookup)?,
            None => Self::default(),
        };
        if let Some(file) = mcp_config {
            config.join(file, parse_mcp_json(file, &read(file)?, lookup)?)?;
        }
        if let Some(file) = forge_config {
            builtins::check_servers(&config.builtins, file, &config.servers)?;
        }
        Ok(config)
    }

    /// The files that credentials came from.
    #[must_use]
    pub fn credential_files(&self) -> Vec<PathBuf> {
        let of_servers = self.servers.values().flat_map(|server| &server.scrub);
        let mut files: Vec<PathBuf> = of_servers.flat_map(Secret::files).cloned().collect();
        files.extend(self.builtins.credential_files());
        files
    }

    /// The tool servers that are programs, by name.
    pub fn programs(&mut self) -> Vec<(&String, &mut Program)> {
        let servers = self.servers.iter_mut();
        let programs = servers.filter_map(|(name, server)| match &mut server.source {
            Source::Stdio(program) => Some((name, program)),
            Source::Http(_) | Source::OpenApi(_) => None,
        });
        programs.collect()
    }

    fn join(
        &mut self,
        file: &Path,
        servers: BTreeMap<String, ServerConfig>,
    ) -> Result<(), ConfigError> {
        for (name, server) in servers {
            if self.servers.contains_key(&name) {
                return Err(ConfigError::Twice { file: file.to_owned(), line: None, server: name });
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
    let Strict(document) = json_document(file, text)?;
    mcp_servers(file, &document, lookup)
}

fn json_document(file: &Path, text: &str) -> Result<Strict, ConfigError> {
    // Some editors begin a file with a mark of its encoding.
    serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|error| ConfigError::Syntax {
        file: file.to_owned(),
        line: error.line().try_into().unwrap_or(u32::MAX),
        what: syntax_of(&error),
    })
}

fn mcp_servers(
    file: &Path,
    document: &Value,
    lookup: Lookup<'_>,
) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
    // The file may belong to another program, which keeps more in it.
    let document = Node::root(file, document);
    let mut servers = BTreeMap::new();
    let listed = document.object()?.get("mcpServers");
    let listed = document.child("mcpServers", listed).ok_or_else(|| match document.object() {
        // Of VS Code.
        Ok(it) if it.contains_key("servers") => {
            document.wrong_at("servers", Problem::OtherName { name: "mcpServers" })
        }
        _ => document.wrong_at("mcpServers", Problem::Missing),
    })?;
    for (name, entry) in listed.children()? {
        if let Some(server) = mcp_server(name, &entry, lookup)? {
            servers.insert(name.to_owned(), server);
        }
    }
    Ok(servers)
}

fn parse_forge_toml(file: &Path, text: &str, lookup: Lookup<'_>) -> Result<Config, ConfigError> {
    forge_config(file, &document_of(file, text)?, lookup)
}

/// Who may see what, by the tables `roles` and `principals` of a `forge.toml` as JSON.
///
/// # Errors
/// [`ConfigError`]: one of the two is wrong.
pub(crate) fn roles(file: &Path, tables: &str) -> Result<Policy, ConfigError> {
    let Strict(document) = json_document(file, tables)?;
    policy::policy(&Node::root(file, &document))
}

fn document_of(file: &Path, text: &str) -> Result<Value, ConfigError> {
    let table = forge_document::tables(text).map_err(|error| ConfigError::Syntax {
        file: file.to_owned(),
        line: error.line,
        what: error.problem.to_owned(),
    })?;
    serde_json::to_value(table).map_err(|_| ConfigError::Syntax {
        file: file.to_owned(),
        line: 1,
        what: "a number is not finite".into(),
    })
}

fn forge_config(file: &Path, document: &Value, lookup: Lookup<'_>) -> Result<Config, ConfigError> {
    let document = Node::root(file, document);
    document.only(&[BROKER_TABLES.as_slice(), &SUPERVISOR_TABLES].concat())?;
    let mut config =
        Config { server_uids: strangers::server_uids(&document)?, ..Config::default() };
    if let Some(listed) = document.field("servers") {
        for (name, entry) in listed.children()? {
            config.servers.insert(name.to_owned(), forge_server(name, &entry, lookup)?);
        }
    }
    if let Some(table) = document.field("tools") {
        config.words = tools::words(&table)?;
    }
    if let Some(table) = document.field("review") {
        config.review = tools::review(&table)?;
    }
    config.policy = policy::policy(&document)?;
    config.signing_keys = policy::signing_keys(file, &document)?;
    if let Some(table) = document.field("builtins") {
        config.builtins = builtins::parse(&table, lookup)?;
    }
    if let Some(table) = document.field("telemetry") {
        config.collector = Some(telemetry::collector(&table)?);
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::Secret;

    fn environment(name: &str) -> Option<String> {
        match name {
            "GH_TOKEN" => Some("gh-hunter2-token".into()),
            "EMPTY" => Some(String::new()),
            "SHORT" => Some("hunter2".into()),
            "HOME" => Some("/home/x".into()),
            _ => None,
        }
    }

    fn mcp(text: &str) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
        parse_mcp_json(Path::new("mcp.json"), text, &environment)
    }

    fn forge(text: &str) -> Result<BTreeMap<String, ServerConfig>, ConfigError> {
        parse_forge_toml(Path::new("forge.toml"), text, &environment).map(|config| config.servers)
    }

    fn stdio(server: &ServerConfig) -> &Program {
        match &server.source {
            Source::Stdio(config) => config,
            other => panic!("{other:?}"),
        }
    }

    fn http(server: &ServerConfig) -> &crate::endpoint::Endpoint {
        match &server.source {
            Source::Http(endpoint) => endpoint,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_server_over_http_is_read_from_both_forms() {
        let servers = mcp(r#"{"mcpServers": {
                "a": {"type": "streamable-http", "url": "https://a.example/mcp?key=${GH_TOKEN}",
                      "headers": {"Authorization": "Bearer ${GH_TOKEN}", "X-Team": "blue"}},
                "b": {"url": "http://127.0.0.1:7/mcp"}
            }}"#)
        .unwrap();
        let a = http(&servers["a"]);
        assert_eq!(a.url.host_str(), Some("a.example"));
        assert_eq!(a.headers[0].1.expose(), "Bearer gh-hunter2-token");
        let scrubbed: Vec<&str> = servers["a"].scrub.iter().map(Secret::expose).collect();
        assert_eq!(scrubbed, ["gh-hunter2-token", "gh-hunter2-token"]);
        let servers = forge(
            r#"
            [servers.a]
            url = "http://10.0.0.7/mcp"
            allow_http = true
            headers.X-Team = "blue"
            headers.Authorization = { from_env = "GH_TOKEN", prefix = "Bearer " }
            [servers.b]
            url = "https://b.example/mcp"
            oauth = { client_id = "me", client_secret = { from_env = "GH_TOKEN" }, scopes = ["a"], issuer = "https://id.example" }
            "#,
        )
        .unwrap();
        let header = |name: &str| {
            let found = http(&servers["a"]).headers.iter().find(|(it, _)| it == name);
            found.unwrap().1.expose()
        };
        assert_eq!(header("authorization"), "Bearer gh-hunter2-token");
        assert_eq!(header("x-team"), "blue");
        assert_eq!(servers["a"].scrub[0].expose(), "gh-hunter2-token");
        let oauth = http(&servers["b"]).oauth.as_ref().unwrap();
        assert_eq!(oauth.client_secret.expose(), "gh-hunter2-token");
        assert_eq!(oauth.issuer.as_ref().unwrap().as_str(), "https://id.example/");
        assert_eq!(servers["b"].scrub.len(), 1);
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
        assert_eq!(stdio(&servers["files"]).command, PathBuf::from("npx"));
        assert_eq!(stdio(&servers["files"]).args, ["-y", "files", "/home/x/docs"]);
        let github = stdio(&servers["github"]);
        assert!(github.command.is_absolute() && github.command.ends_with("bin/gh"));
        assert_eq!(github.cwd.as_deref(), Some(Path::new("/tmp")));
        assert_eq!(github.env["GITHUB_TOKEN"].expose(), "gh-hunter2-token");
        assert_eq!(github.env["LOG"].expose(), "warn");
        assert_eq!(github.env["E"].expose(), "full");
        assert_eq!(servers["github"].scrub.len(), 1);
    }

    #[test]
    fn what_is_secret_is_taken_out_wherever_an_mcp_json_puts_it() {
        let servers = mcp(r#"{"mcpServers": {
                "a": {"url": "https://a.example/mcp", "headers": {
                      "Cookie": "session-id=S3CRETVALUE; theme=dark-as-night",
                      "X-Api-Key": "correct horse battery staple"}},
                "b": {"url": "https://b.example/${GH_TOKEN}/mcp"},
                "c": {"command": "x", "args": ["--api-key=${GH_TOKEN}", "${HOME}"]}
            }}"#)
        .unwrap();
        let scrubbed = |server: &str| -> Vec<String> {
            servers[server].scrub.iter().map(|it| it.expose().to_owned()).collect()
        };
        let a = scrubbed("a");
        for secret in ["S3CRETVALUE", "dark-as-night", "correct horse battery staple"] {
            assert!(a.iter().any(|it| it == secret), "{secret}: {a:?}");
        }
        assert!(!a.iter().any(|it| it == "session-id"), "{a:?}");
        assert_eq!(scrubbed("b"), ["gh-hunter2-token"]);
        assert_eq!(scrubbed("c"), ["gh-hunter2-token"]);
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
        let shop = stdio(&servers["shop"]);
        assert_eq!(shop.args, ["--fast", "${HOME}"], "forge.toml expands nothing");
        assert_eq!(shop.env["SHOP_TOKEN"].expose(), "gh-hunter2-token");
        assert_eq!(shop.env["LOG"].expose(), "warn");
        assert_eq!(servers["shop"].scrub.len(), 1, "only the credential is scrubbed");
    }

    #[test]
    fn the_examples_of_the_guide_are_read() {
        let guide = include_str!("../../../docs/tool-sources.md");
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "hunter2-hunter2").unwrap();
        std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let document = folder.path().join("parts.json");
        let operations = serde_json::json!({"openapi": "3.1.0", "paths": {"/parts/{id}": {
            "parameters": [{"name": "id", "in": "path", "schema": {}}],
            "get": {"operationId": "getPart"}, "put": {}}}});
        std::fs::write(&document, operations.to_string()).unwrap();
        let lookup = |_: &str| Some("a-credential".to_owned());
        let mut read = Vec::new();
        for (language, rest) in
            guide.split("```").skip(1).step_by(2).filter_map(|it| it.split_once('\n'))
        {
            let text = rest
                .replace("/etc/forge/crm-secret", secret.to_str().unwrap())
                .replace("parts.json", document.to_str().unwrap());
            let servers = match language {
                "toml" => parse_forge_toml(Path::new("forge.toml"), &text, &lookup)
                    .map(|config| config.servers),
                "json" => parse_mcp_json(Path::new("mcp.json"), &text, &lookup),
                other => panic!("an example in {other:?}"),
            };
            read.extend(servers.unwrap().into_keys());
        }
        assert_eq!(read, ["inventory", "wiki", "wiki", "crm", "parts"]);
    }

    #[test]
    fn every_refusal_names_the_field_and_never_a_value() {
        type Parse = fn(&str) -> Result<BTreeMap<String, ServerConfig>, ConfigError>;
        let cases: &[(Parse, &str, &str)] = &[
            (mcp, r#"{"mcpServers": {"a": {"command": "hunter2", "foo": 1}}}"#, "mcpServers.a.foo"),
            (mcp, r#"{"mcpServers": {"a": {"args": ["hunter2"]}}}"#, "mcpServers.a.command"),
            (forge, "[servers.a]\nargs = ['hunter2']", "exactly one of"),
            (mcp, r#"{"mcpServers": {"a": {"command": ["hunter2"]}}}"#, "mcpServers.a.command"),
            (mcp, r#"{"mcpServers": {"A b": {"command": "hunter2"}}}"#, "mcpServers.A b"),
            (mcp, r#"{"mcpServers": {"fs": {"command": "hunter2"}}}"#, "reserved"),
            (mcp, r#"{"mcpServers": {"a": {"url": "http://hunter2"}}}"#, "a.url: plain http"),
            (mcp, r#"{"mcpServers": {"a": {"url": "https://u:hunter2@x"}}}"#, "a.url: a user"),
            (mcp, r#"{"mcpServers": {"a": {"url": "hunter2"}}}"#, "a.url: expected"),
            (mcp, r#"{"mcpServers": {"a": {"url": "https://x", "command": "hunter2"}}}"#, "both"),
            (mcp, r#"{"mcpServers": {"a": {"type": "http", "command": "hunter2"}}}"#, "both"),
            (mcp, r#"{"mcpServers": {"a": {"httpUrl": "https://hunter2"}}}"#, "`url`"),
            (mcp, r#"{"mcpServers": {"a": {"type": "sse", "url": "https://hunter2"}}}"#, "a.type"),
            (
                mcp,
                r#"{"mcpServers": {"a": {"url": "https://x", "headers": {"X": "a\nhunter2"}}}}"#,
                "headers.X: the value has a line break",
            ),
            (
                mcp,
                r#"{"mcpServers": {"a": {"url": "https://x", "headers": {"Host": "hunter2"}}}}"#,
                "headers.Host: this header is set by the broker",
            ),
            (forge, "[servers.a]\nurl = 'http://169.254.169.254/hunter2'", "allow_http"),
            (forge, "[servers.a]\nurl = 'file:///hunter2'", "servers.a.url"),
            (forge, "[servers.a]\nurl = 'https://x'\nopenapi = 'hunter2'", "exactly one of"),
            (forge, "[servers.a]\nurl = 'https://x'\nargs = ['hunter2']", "a.args: unknown"),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\nheaders.K = {from_env = 'GH_TOKEN', p = 'hunter2'}",
                "headers.K.p: unknown",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\nheaders.Authorization = 'hunter2'\n\
                 oauth = {client_id = 'x', client_secret = {from_env = 'GH_TOKEN'}}",
                "servers.a.oauth: the header Authorization",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x/?a=1&K%65y=hunter2'\n\
                 credentials.Key = {from_env = 'GH_TOKEN'}",
                "servers.a.credentials.Key: the address has this parameter in its query already",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\noauth = {client_id = 'hunter2'}",
                "servers.a.oauth.client_secret: this field is missing",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\noauth = {client_id = 'x', \
                 client_secret = {from_env = 'GH_TOKEN'}, token_url = 'http://hunter2'}",
                "oauth.token_url: plain http",
            ),
            (forge, "[servers.a]\nopenapi = 'hunter2.json'", "servers.a.base_url"),
            (mcp, r#"{"mcpServers": {"a": {"command": "x", "env": {"K": 7}}}}"#, "env.K"),
            (mcp, r#"{"mcpServers": {"a": {"command": "x", "args": ["${NO}"]}}}"#, "args.0: ${NO}"),
            (mcp, r#"{"mcpServers": {"a": {"command": "${hunter2"}}}"#, "mcpServers.a.command"),
            (
                mcp,
                r#"{"mcpServers": {"a": {"command": "x"}, "a": {"command": "hunter2"}}}"#,
                "twice",
            ),
            (mcp, r#"{"servers": {}}"#, "mcpServers"),
            (mcp, "{\"mcpServers\": {\"a\": hunter2}}", "mcp.json:1: this is not JSON"),
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
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {from_env = 'SHORT'}",
                "servers.a.credentials.K: the value has fewer than 8 bytes",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\n\
                 headers.Authorization = {from_env = 'SHORT', prefix = 'Bearer '}",
                "servers.a.headers.Authorization: the value has fewer than 8 bytes",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\noauth = {client_id = 'x', \
                 client_secret = {from_env = 'SHORT'}}",
                "servers.a.oauth.client_secret: the value has fewer than 8 bytes",
            ),
            (
                forge,
                "[servers.a]\nurl = 'https://x'\nca_file = '/hunter2'",
                "servers.a.ca_file: cannot be read as a file of certificates",
            ),
            (forge, "[servers.a]\ncommand = 'x'\nca_file = 'x'", "servers.a.ca_file: unknown"),
            (forge, "[telemetry]\notlp = 'hunter2'", "telemetry.otlp: expected an http://"),
            (forge, "[tools.'a.b']\ncost = -1", "tools.a.b.cost"),
            (forge, "[tools.'a.b']\ncost = 'hunter2'", "tools.a.b.cost: expected a whole number"),
            (forge, "[tools.'a.b']\neffect = 'hunter2'", "none, read, write"),
            (forge, "[tools.'a.b']\nefect = 'read'", "tools.a.b.efect"),
            (forge, "[tools.'crypto.hash']\neffect = 'write'", "tools.crypto.hash.effect"),
            (forge, "[tools.ab]\ncost = 1", "tools.ab: this is no tool's name"),
            (forge, "[review]\nmode = 'hunter2'", "review.mode: must be one of"),
            (forge, "[review]\nmod = 'required'", "review.mod: unknown"),
            (forge, "[roles.a]\ntools = ['hunter2']", "roles.a.tools.0"),
            (forge, "[roles.a]\ntool = []", "roles.a.tool"),
            (forge, "[roles.a]", "roles.a.tools"),
            (
                forge,
                "[principals.p]\nroles = ['hunter2']",
                "principals.p.roles.0: there are no roles",
            ),
            (
                forge,
                "[roles.clerk]\ntools = ['*']\n[principals.p]\nroles = ['hunter2']",
                "principals.p.roles.0: no role has this name; known are clerk: add",
            ),
            (forge, "[servers.a]\ncommand = 'x'\n\nK = hunter2", "forge.toml:4: this is not TOML"),
            (forge, "[servers.a]\ncommand = 'x'\ncommand = 'hunter2'", "forge.toml:3:"),
            (forge, "[servers.a]\ncommand = \"a\\u0000hunter2\"", "servers.a.command"),
            (forge, "[servers.a]\ncommand = 'x'\nread = 'hunter2'", "servers.a.read"),
            (forge, "[servers.a]\ncommand = 'x'\nwrite = ['/']", "write.0: a server cannot"),
            (forge, "[servers.a]\ncommand = 'x'\nnetwork = 'hunter2'", "servers.a.network"),
            (forge, "[servers.a]\ncommand = 'x'\nlimits.nofile = 7", "limits.nofile"),
            (forge, "[servers.a]\ncommand = 'x'\nlimits.open_files = 0", "whole number above 0"),
            (forge, "[servers.a]\ncommand = 'x'\nlimits.open_files = -1", "limits.open_files"),
            (forge, "[broker]\nserver_uids = 'hunter2'", "broker.server_uids"),
            (forge, "[broker]\nserver_uids = '0-7'", "broker.server_uids"),
            (forge, "[broker]\nserver_uids = '9-7'", "broker.server_uids"),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {age = 'hunter2'}",
                "credentials.K.identity",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\nK = {command = []}",
                "credentials.K.command",
            ),
            (
                forge,
                "[servers.a]\ncommand = 'x'\n[servers.a.credentials]\n\
                 K = {file = 'hunter2', from_env = 'GH_TOKEN'}",
                "exactly one source",
            ),
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
    fn roles_reviews_and_the_operators_word_on_tools_are_read() {
        let config = parse_forge_toml(
            Path::new("forge.toml"),
            r#"
            [tools."shop.find"]
            effect = "read"
            cost = 3
            [tools."crypto.hash"]
            cost = 0
            [review]
            mode = "required"
            [roles.clerk]
            tools = ["shop.*", "crypto.hash"]
            [principals.alice]
            roles = ["clerk"]
            [principals."bob@example.com"]
            roles = []
            "#,
            &environment,
        )
        .unwrap();
        let name = |text| ToolName::parse(text).unwrap();
        let word = config.words[&name("shop.find")];
        assert_eq!(word, Word { effect: Some(crate::definition::Effect::Read), cost: Some(3) });
        assert_eq!(config.words[&name("crypto.hash")].cost, Some(0));
        assert_eq!(config.review, Mode::Required);
        assert!(config.policy.visible("alice", &name("shop.buy")));
        for (principal, tool) in
            [("alice", "crypto.hmac"), ("bob@example.com", "shop.buy"), ("eve", "shop.buy")]
        {
            assert!(!config.policy.visible(principal, &name(tool)), "{principal} {tool}");
        }
    }

    #[test]
    fn principals_that_are_named_for_the_service_alone_bound_no_tool() {
        let parse = |text: &str| parse_forge_toml(Path::new("forge.toml"), text, &environment);
        let named = "[principals.ci]\nuids = [1001]\ncids = [3]\ntoken_sha256 = []\nruns_max = 2\n";
        let open = parse(named).unwrap().policy;
        assert!(open.visible("anybody", &ToolName::parse("shop.buy").unwrap()));
        // Where one has roles, all have.
        for text in
            [format!("{named}[principals.a]\nroles = []"), format!("{named}[roles.r]\ntools = []")]
        {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains("principals.ci.roles"), "{error}");
        }
        let error = parse("[principals.ci]\nuid = 1").unwrap_err().to_string();
        assert!(error.contains("principals.ci.uid"), "{error}");
    }

    #[test]
    fn a_servers_place_is_read_and_the_range_of_users() {
        let text = "[broker]\nuser = 'x'\nserver_uids = '200000-200009'\n[servers.a]\n\
                    command = 'x'\nread = ['/a']\nwrite = ['b']\nnetwork = false\n\
                    limits = { memory_mib = 7 }";
        let config = parse_forge_toml(Path::new("forge.toml"), text, &environment).unwrap();
        assert_eq!(config.server_uids, Some(200_000..200_010));
        let jail_of = |server: &ServerConfig| match &server.source {
            Source::Stdio(stdio) => stdio.jail.clone(),
            other => panic!("{other:?}"),
        };
        let jail = jail_of(&config.servers["a"]);
        assert_eq!(jail.read, [Path::new("/a")]);
        assert!(jail.write[0].is_absolute() && jail.write[0].ends_with("b"));
        assert!(!jail.network && !jail.named);
        assert_eq!(jail.limits.memory_mib, Some(7));
        let plain = forge("[servers.a]\ncommand = 'x'").unwrap();
        assert_eq!(jail_of(&plain["a"]), Default::default());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_file_and_line() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("mcp.json");
        let toml = folder.path().join("forge.toml");
        let told = |json_text: &str, toml_text: &str| {
            std::fs::write(&json, json_text).unwrap();
            std::fs::write(&toml, toml_text).unwrap();
            let refused = Config::load(Some(&json), Some(&toml), &environment).unwrap_err();
            refused.to_string().replace(&format!("{}/", folder.path().display()), "")
        };
        let good = r#"{"mcpServers": {}}"#;
        let wrong = told(good, "[servers.a]\ncommand = 'x'\nargz = 1");
        assert!(wrong.starts_with("forge.toml:3: servers.a.argz: unknown field"), "{wrong}");
        let missing = told(good, "\n[servers.a]\nopenapi = 'x'");
        assert!(missing.starts_with("forge.toml:2: servers.a.base_url: "), "{missing}");
        let wrong = told("{\"mcpServers\": {\n\"a\": {\n\"command\": 7}}}", "");
        assert!(wrong.starts_with("mcp.json:3: mcpServers.a.command: expected"), "{wrong}");
        let marked = "\u{feff}[servers.a]\ncommand = 7";
        let wrong = told("\u{feff}{\"mcpServers\": {}}", marked);
        assert!(wrong.starts_with("forge.toml:2: servers.a.command: "), "{wrong}");
        let wrong = told("\u{feff}{\n\"mcpServers\": {\"a\": {\"command\": 7}}}", "");
        assert!(wrong.starts_with("mcp.json:2: mcpServers.a.command: "), "{wrong}");
        let none = told("{}", "");
        assert!(none.starts_with("mcp.json: mcpServers: this field is missing"), "{none}");
        let other = told("{\n\"servers\": {\"a\": {\"command\": \"x\"}}}", "");
        assert!(other.starts_with("mcp.json:2: servers: call this field `mcpServers`"), "{other}");
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
        assert!(refused.to_string().contains("mcp.json:1: servers.a"), "{refused}");
        assert_eq!(Config::load(Some(&json), None, &environment).unwrap().servers.len(), 1);
    }
}
