//! Where a credential comes from: the table that stands for its value.

use std::path::Path;

use super::node::Node;
use super::{ConfigError, Lookup, Problem};
use crate::secret::{Secret, SecretError, is_short};

/// `{ from_env = "NAME" }`, `{ file = "path" }`, `{ age = "path", identity =
/// "path" }` or `{ command = ["program", "argument"] }`, and fields `beside`
/// it that are the caller's.
///
/// # Errors
/// [`ConfigError`], naming the field and where the value should be, and never
/// the value.
pub(super) fn credential(
    node: &Node<'_>,
    beside: &[&str],
    lookup: Lookup<'_>,
) -> Result<Secret, ConfigError> {
    const KNOWN: [&str; 5] = ["from_env", "file", "age", "identity", "command"];
    node.only(&[&KNOWN, beside].concat())?;
    let of = |key| node.field(key);
    let secret = match (of("from_env"), of("file"), of("age"), of("identity"), of("command")) {
        (Some(variable), None, None, None, None) => Secret::from_env(variable.text()?, lookup),
        (None, Some(file), None, None, None) => Secret::from_file(Path::new(file.text()?)),
        (None, None, Some(file), identity, None) => {
            let identity = match identity {
                Some(identity) => identity.text()?,
                None => return Err(node.wrong_at("identity", Problem::Missing)),
            };
            Secret::from_age(Path::new(file.text()?), Path::new(identity))
        }
        (None, None, None, None, Some(command)) => {
            let words = command.items()?;
            let words = words.iter().map(Node::text).collect::<Result<Vec<_>, _>>()?;
            if words.first().is_none_or(|program| program.is_empty())
                || words.iter().any(|word| word.contains('\0'))
            {
                return Err(command.wrong(Problem::Text));
            }
            Secret::from_command(&words)
        }
        _ => return Err(node.wrong(Problem::Source)),
    };
    let secret = secret.map_err(|error| node.wrong(Problem::Secret(error)))?;
    if is_short(secret.expose()) {
        return Err(node.wrong(Problem::Secret(SecretError::Short)));
    }
    Ok(secret)
}
