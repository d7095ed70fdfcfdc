//! `[builtins]`: the built-in tools that need to be told something. A table
//! that is not there leaves its tools out. `[builtins.http]` is in
//! [`egress`](super::egress).

use forge_protocol::hex::unhex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::VerifyingKey;
use ring::hmac;

use super::credentials::credential;
use super::node::{ITEMS_MAX, Node};
use super::{ConfigError, Lookup, Problem, egress};
use crate::builtin::BuiltinsConfig;
use crate::builtin::fs::Root;
use crate::builtin::keys::{Key, Material};
use crate::builtin::resource::{Source, Sources, is_canonical};
use crate::builtin::stash::Terms;
use crate::upstream::ServerConfig;

/// A name that stands in a tool's definition, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// A key with fewer bytes can be guessed.
const HMAC_KEY_BYTES_MIN: usize = 16;
/// The largest of all that a run could have as a response.
pub(super) const CONTENT_BYTES: RangeInclusive<u64> = 1..=16 * 1024 * 1024;
const CONTENT_BYTES_DEFAULT: u64 = 1024 * 1024;

/// That every server that `[builtins]` names is there. It may stand in another file,
/// so this comes after both are read.
pub(super) fn check_servers(
    config: &BuiltinsConfig,
    file: &Path,
    servers: &BTreeMap<String, ServerConfig>,
) -> Result<(), ConfigError> {
    let sources = config.resource.iter().flat_map(|sources| &sources.allow);
    for (position, source) in sources.enumerate() {
        if !servers.contains_key(&source.server) {
            let field = format!("builtins.resource.allow.{position}.server");
            let problem = Problem::Value("no tool server of this name is configured".into());
            return Err(ConfigError::of(file, field, problem));
        }
    }
    Ok(())
}

/// `[builtins]`.
pub(super) fn parse(table: &Node<'_>, lookup: Lookup<'_>) -> Result<BuiltinsConfig, ConfigError> {
    table.only(&["http", "fs", "crypto", "stash", "resource"])?;
    let mut config = BuiltinsConfig::default();
    if let Some(table) = table.field("http") {
        config.http = Some(egress::parse(&table, lookup)?);
    }
    if let Some(table) = table.field("fs") {
        config.fs = roots(&table)?;
    }
    if let Some(table) = table.field("crypto") {
        table.only(&["keys"])?;
        let keys = table.needed("keys")?;
        for (name, entry) in keys.children()? {
            check_name(name, &entry)?;
            config.keys.insert(name.to_owned(), key(&entry, lookup)?);
        }
        if config.keys.len() > ITEMS_MAX {
            return Err(keys.too_many());
        }
    }
    if let Some(table) = table.field("stash") {
        config.stash = Some(stash(&table)?);
    }
    if let Some(table) = table.field("resource") {
        config.resource = Some(resource(&table)?);
    }
    Ok(config)
}

fn bytes(table: &Node<'_>, key: &str) -> Result<usize, ConfigError> {
    table.number_in(key, CONTENT_BYTES, CONTENT_BYTES_DEFAULT).map(|bytes| bytes as usize)
}

/// A name that programs use, and that stands in definitions.
fn check_name(name: &str, node: &Node<'_>) -> Result<(), ConfigError> {
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte)
        });
    if is_name {
        return Ok(());
    }
    Err(node.unfit(format!("a name here is [a-z0-9_-], 1 to {NAME_BYTES_MAX} of it: rename it")))
}

fn roots(table: &Node<'_>) -> Result<Vec<Root>, ConfigError> {
    table.only(&["roots"])?;
    let mut names = BTreeSet::new();
    let mut roots = Vec::new();
    for entry in table.needed("roots")?.some_items()? {
        entry.only(&["name", "path", "write", "patterns", "file_bytes_max"])?;
        let name_node = entry.needed("name")?;
        let name = name_node.text()?;
        check_name(name, &name_node)?;
        if !names.insert(name) {
            return Err(name_node.unfit("another root has this name: rename one"));
        }
        let path_node = entry.needed("path")?;
        let path = Path::new(path_node.text()?);
        if !path.is_absolute() {
            return Err(path_node.unfit("is relative: give it from / on"));
        }
        let is_writable = match entry.field("write") {
            Some(write) => write.bool()?,
            None => false,
        };
        let patterns = match entry.field("patterns") {
            Some(patterns) => patterns
                .some_items()?
                .iter()
                .map(|pattern| pattern.text().map(str::to_owned))
                .collect::<Result<_, _>>()?,
            None => vec!["**".to_owned()],
        };
        let file_bytes_max = bytes(&entry, "file_bytes_max")?;
        let root = Root::open(name.to_owned(), path, is_writable, patterns, file_bytes_max)
            .map_err(|error| {
                use crate::builtin::fs::RootError;
                let key = match &error {
                    RootError::Pattern(_) => "patterns",
                    RootError::Open(_) | RootError::Kernel => "path",
                };
                entry.wrong_at(key, Problem::Value(error.to_string()))
            })?;
        roots.push(root);
    }
    Ok(roots)
}

fn key(entry: &Node<'_>, lookup: Lookup<'_>) -> Result<Key, ConfigError> {
    let algorithm = entry.needed("algorithm")?;
    let mut files = Vec::new();
    let (material, may_sign) = match algorithm.text()? {
        "ed25519" => {
            entry.only(&["algorithm", "public_key", "uses", "principals"])?;
            (Material::Ed25519(public_key(&entry.needed("public_key")?)?), false)
        }
        name @ ("hmac-sha256" | "hmac-sha512") => {
            entry.only(&["algorithm", "secret", "encoding", "uses", "principals"])?;
            let algorithm =
                if name == "hmac-sha256" { hmac::HMAC_SHA256 } else { hmac::HMAC_SHA512 };
            let (bytes, from) = hmac_key(entry, lookup)?;
            files = from;
            (Material::Hmac(hmac::Key::new(algorithm, &bytes)), true)
        }
        _ => return Err(algorithm.unfit("must be hmac-sha256, hmac-sha512 or ed25519")),
    };
    let (mut signs, mut verifies) = (false, true);
    if let Some(uses) = entry.field("uses") {
        verifies = false;
        for used in uses.some_items()? {
            match used.text()? {
                "sign" if may_sign => signs = true,
                "sign" => return Err(used.unfit("a public key only verifies")),
                "verify" => verifies = true,
                _ => return Err(used.unfit("must be sign or verify")),
            }
        }
    }
    let principals = match entry.field("principals") {
        Some(principals) => Some(principals_of(&principals)?),
        None => None,
    };
    Ok(Key { material, signs, verifies, principals, files })
}

fn public_key(node: &Node<'_>) -> Result<VerifyingKey, ConfigError> {
    let bytes = STANDARD.decode(node.text()?).ok().and_then(|bytes| bytes.try_into().ok());
    let key = bytes.and_then(|bytes: [u8; 32]| VerifyingKey::from_bytes(&bytes).ok());
    match key {
        // With a key of small order, anybody could sign anything.
        Some(key) if key.is_weak() => Err(node.unfit("is a weak key: anybody can sign for it")),
        Some(key) => Ok(key),
        None => Err(node.unfit("must be the 32 bytes of an Ed25519 public key, in base64")),
    }
}

/// A key, and the files that it came from.
fn hmac_key(entry: &Node<'_>, lookup: Lookup<'_>) -> Result<(Vec<u8>, Vec<PathBuf>), ConfigError> {
    let node = entry.needed("secret")?;
    let secret = credential(&node, &[], lookup)?;
    let text = secret.expose();
    let bytes = match entry.field("encoding") {
        None => Some(text.as_bytes().to_vec()),
        Some(encoding) => match encoding.text()? {
            "text" => Some(text.as_bytes().to_vec()),
            "hex" => unhex(text),
            "base64" => STANDARD.decode(text).ok(),
            _ => return Err(encoding.unfit("must be text, hex or base64")),
        },
    };
    let bytes = bytes.ok_or_else(|| node.unfit("its value is not in the `encoding` given"))?;
    if bytes.len() < HMAC_KEY_BYTES_MIN {
        let why = format!("its value has fewer than {HMAC_KEY_BYTES_MIN} bytes: make a longer key");
        return Err(node.unfit(why));
    }
    Ok((bytes, secret.files().to_vec()))
}

fn principals_of(node: &Node<'_>) -> Result<BTreeSet<String>, ConfigError> {
    node.some_items()?.iter().map(|item| item.text().map(str::to_owned)).collect()
}

fn stash(table: &Node<'_>) -> Result<Terms, ConfigError> {
    table.only(&["ttl_s", "entries_max", "bytes_max", "total_bytes_max", "groups"])?;
    let mut groups = BTreeMap::new();
    if let Some(listed) = table.field("groups") {
        for (name, members) in listed.children()? {
            check_name(name, &members)?;
            groups.insert(name.to_owned(), principals_of(&members)?);
        }
        if groups.len() > ITEMS_MAX {
            return Err(listed.too_many());
        }
    }
    let mib = 1024 * 1024;
    let terms = Terms {
        lifetime: Duration::from_secs(table.number_in("ttl_s", 1..=30 * 24 * 3600, 3600)?),
        entries_max: table.number_in("entries_max", 1..=100_000, 256)? as usize,
        bytes_max: table.number_in("bytes_max", 1024..=64 * mib, mib)? as usize,
        total_bytes_max: table.number_in("total_bytes_max", 1024..=1024 * mib, 64 * mib)? as usize,
        groups,
    };
    if terms.bytes_max > terms.total_bytes_max {
        let why = "is less than bytes_max, so that no stash could be as large as that";
        return Err(table.wrong_at("total_bytes_max", Problem::Value(why.into())));
    }
    Ok(terms)
}

fn resource(table: &Node<'_>) -> Result<Sources, ConfigError> {
    table.only(&["allow", "bytes_max"])?;
    let mut allow = Vec::new();
    for entry in table.needed("allow")?.some_items()? {
        entry.only(&["server", "uri_prefix"])?;
        let server = entry.needed("server")?.text()?.to_owned();
        let prefix = entry.needed("uri_prefix")?;
        let uri_prefix = prefix.text()?.to_owned();
        if !is_canonical(&uri_prefix) {
            let why = "must begin as a URI does, scheme and all, with no dot segments";
            return Err(prefix.unfit(why));
        }
        allow.push(Source { server, uri_prefix });
    }
    Ok(Sources { allow, bytes_max: bytes(table, "bytes_max")? })
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use std::path::Path;

    fn environment(name: &str) -> Option<String> {
        match name {
            "KEY" => Some("a key of 18 bytes.".into()),
            "SHORT" => Some("hunter2-short".into()),
            _ => None,
        }
    }

    fn load(text: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("forge.toml");
        std::fs::write(&file, text).unwrap();
        Config::load(None, Some(&file), &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_left_out_has_the_safe_default() {
        let config = load(
            "[builtins.stash]\n\
             [builtins.fs]\nroots = [{ name = 'tmp', path = '/' }]\n\
             [builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'\nsecret = { from_env = 'KEY' }",
        )
        .unwrap()
        .builtins;
        assert!(config.http.is_none() && config.resource.is_none());
        let key = &config.keys["k"];
        assert!(key.verifies && !key.signs, "nothing is signed unless the operator says so");
        assert!(format!("{:?}", config.fs[0]).contains("is_writable: false"));
        assert!(config.stash.unwrap().groups.is_empty());
        assert!(!format!("{key:?}").contains("18 bytes"));
    }

    #[test]
    fn every_refusal_names_the_field_and_never_a_value() {
        let cases = [
            ("[builtins.htp]", "builtins.htp: unknown field"),
            ("[builtins.fs]", "builtins.fs.roots: this field is missing"),
            ("[builtins.fs]\nroots = []", "builtins.fs.roots: is empty"),
            ("[builtins.fs]\nroots = [{ name = 'a' }]", "builtins.fs.roots.0.path"),
            ("[builtins.fs]\nroots = [{ name = 'A', path = '/' }]", "roots.0.name"),
            ("[builtins.fs]\nroots = [{ name = 'a', path = 'hunter2' }]", "roots.0.path: is rel"),
            ("[builtins.fs]\nroots = [{ name = 'a', path = '/hunter2' }]", "roots.0.path: cannot"),
            ("[builtins.fs]\nroots = [{ name = 'a', path = '/proc' }]", "roots.0.path: is on a"),
            ("[builtins.fs]\nroots = [{ name = 'a', path = '/', rite = true }]", "roots.0.rite"),
            (
                "[builtins.fs]\nroots = [{ name = 'a', path = '/', patterns = ['a[hunter2'] }]",
                "roots.0.patterns: pattern 0",
            ),
            (
                "[builtins.fs]\nroots = [{ name = 'a', path = '/', file_bytes_max = -1 }]",
                "roots.0.file_bytes_max: expected a whole number",
            ),
            (
                "[builtins.fs]\nroots = [{ name = 'a', path = '/' }, { name = 'a', path = '/' }]",
                "roots.1.name: another root",
            ),
            ("[builtins.crypto.keys.k]\nalgorithm = 'hunter2'", "keys.k.algorithm: must be"),
            ("[builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'", "keys.k.secret: this field"),
            (
                "[builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'\nsecret = 'hunter2'",
                "keys.k.secret: expected a table",
            ),
            (
                "[builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'\n\
                 secret = { from_env = 'SHORT' }",
                "keys.k.secret: its value has fewer than 16 bytes",
            ),
            (
                "[builtins.crypto.keys.k]\nalgorithm = 'hmac-sha256'\nencoding = 'hex'\n\
                 secret = { from_env = 'KEY' }",
                "keys.k.secret: its value is not in the `encoding`",
            ),
            (
                "[builtins.crypto.keys.k]\nalgorithm = 'ed25519'\npublic_key = 'hunter2'",
                "keys.k.public_key: must be the 32 bytes",
            ),
            (
                // The point of order 1.
                "[builtins.crypto.keys.k]\nalgorithm = 'ed25519'\n\
                 public_key = 'AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA='",
                "keys.k.public_key: is a weak key",
            ),
            (
                "[builtins.crypto.keys.k]\nalgorithm = 'ed25519'\nuses = ['sign']\n\
                 public_key = 'PUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw='",
                "keys.k.uses.0: a public key only verifies",
            ),
            ("[builtins.stash]\nttl_s = 0", "builtins.stash.ttl_s: must be from 1"),
            ("[builtins.stash]\nttl = 5", "builtins.stash.ttl: unknown field"),
            ("[builtins.stash]\ntotal_bytes_max = 2048", "builtins.stash.total_bytes_max"),
            ("[builtins.stash.groups]\nteam = 'hunter2'", "builtins.stash.groups.team: expected"),
            ("[builtins.stash.groups]\nTeam = ['a']", "builtins.stash.groups.Team"),
            (
                "[builtins.resource]\nallow = [{ server = 'a', uri_prefix = 'hunter2' }]",
                "builtins.resource.allow.0.uri_prefix",
            ),
            (
                "[builtins.resource]\nallow = [{ server = 'a', uri_prefix = 'a://x/' }]",
                "builtins.resource.allow.0.server: no tool server",
            ),
        ];
        for (text, expected) in cases {
            let refused = match load(text) {
                Ok(_) => panic!("accepted: {text}"),
                Err(refused) => refused,
            };
            assert!(refused.contains(expected), "{text}\n→ {refused}");
            assert!(!refused.contains("hunter2"), "{text}\n→ {refused}");
        }
    }

    #[test]
    fn a_server_of_the_other_file_can_be_a_source() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("mcp.json");
        let toml = folder.path().join("forge.toml");
        std::fs::write(&json, r#"{"mcpServers": {"docs": {"command": "x"}}}"#).unwrap();
        let text = "[builtins.resource]\nallow = [{ server = 'docs', uri_prefix = 'a://x/' }]";
        std::fs::write(&toml, text).unwrap();
        let load = |json: Option<&Path>| Config::load(json, Some(&toml), &environment);
        assert!(load(Some(&json)).is_ok());
        assert!(load(None).is_err());
    }
}
