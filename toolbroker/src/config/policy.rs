//! Who may see what: the tables `[roles.<name>]` and `[principals.<name>]`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::node::Node;
use super::{ConfigError, Problem};
use crate::policy::{Pattern, Policy};

/// What is said of a principal; all but its roles is the supervisor's to read.
const PRINCIPAL: [&str; 6] = ["roles", "uids", "cids", "token_sha256", "runs_max", "sign_with"];

/// Both tables; where nobody has a role, everything is everybody's.
pub(super) fn policy(document: &Node<'_>) -> Result<Policy, ConfigError> {
    let (roles, principals) = (document.field("roles"), document.field("principals"));
    if roles.is_none() && principals.is_none() {
        return Ok(Policy::open());
    }
    let mut tools_of = BTreeMap::new();
    for (name, role) in children(roles.as_ref())? {
        role.only(&["tools"])?;
        let mut patterns = Vec::new();
        for item in role.needed("tools")?.items()? {
            let pattern = Pattern::parse(item.text()?);
            patterns.push(pattern.map_err(|why| item.wrong(Problem::ToolPattern(why)))?);
        }
        tools_of.insert(name, patterns);
    }
    let named = children(principals.as_ref())?;
    let has_roles = named.iter().any(|(_, principal)| principal.field("roles").is_some());
    if roles.is_none() && !has_roles {
        for (_, principal) in &named {
            principal.only(&PRINCIPAL)?;
        }
        return Ok(Policy::open());
    }
    let mut patterns_of = BTreeMap::new();
    for (name, principal) in named {
        // The service's own to read: who speaks for it, and what it may have.
        principal.only(&PRINCIPAL)?;
        let mut patterns = Vec::new();
        for item in principal.needed("roles")?.items()? {
            let role = tools_of.get(item.text()?).ok_or_else(|| {
                if tools_of.is_empty() {
                    return item.wrong(Problem::NoRoles);
                }
                let known = tools_of.keys().copied().collect::<Vec<_>>().join(", ");
                item.wrong(Problem::NoRole { known: crate::cut(&known, 512) })
            })?;
            patterns.extend(role.iter().cloned());
        }
        patterns_of.insert(name.to_owned(), patterns);
    }
    Ok(Policy::of(patterns_of))
}

/// The keys that the supervisor signs a principal's programs with, relative to this
/// file. Whatever else is wrong with one is the supervisor's to tell.
pub(super) fn signing_keys(file: &Path, document: &Node<'_>) -> Result<Vec<PathBuf>, ConfigError> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let named = children(document.field("principals").as_ref())?;
    let keys = named.iter().filter_map(|(_, principal)| principal.field("sign_with"));
    Ok(keys.filter_map(|key| key.text().ok().map(|text| folder.join(text))).collect())
}

fn children<'a>(table: Option<&Node<'a>>) -> Result<Vec<(&'a str, Node<'a>)>, ConfigError> {
    table.map_or(Ok(Vec::new()), Node::children)
}
