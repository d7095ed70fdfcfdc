//! Names of parameters as the most careless server reads them.

use crate::constraint;
use crate::secret::Secret;
use crate::uri::percent_decoded;

/// A name as the most careless server reads it, which constraints go by as well: neither
/// letters' case counts, nor what parts words.
pub(super) fn folded(name: &str) -> String {
    constraint::folded(name).collect()
}

/// A header's name as CGI and its heirs read it: neither case nor which of `-` and `_`
/// it is counts.
pub(super) fn folded_header(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

/// Whether a name in the query, folded, is one that the operator sets, or a part of
/// one.
pub(super) fn is_set(query: &[(String, Secret)], name: &str) -> bool {
    query.iter().any(|(it, _)| is_one_of(&[folded(it)], name))
}

/// Whether a name in the query is one of these, or a part of one. All are folded.
pub(super) fn is_one_of(names: &[String], name: &str) -> bool {
    let head = |name: &str| name.split('[').next().unwrap_or_default().to_owned();
    names.iter().any(|it| head(it) == head(name))
}

/// The folded names in a query; parts end at `&` and, for some servers, `;`. `None` if a
/// part has no name.
pub(super) fn names_of(query: &str) -> Option<Vec<String>> {
    let name = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default().replace('+', " ");
        let name = folded(&String::from_utf8_lossy(&percent_decoded(name.as_bytes())));
        (!name.is_empty()).then_some(name)
    };
    query.split(['&', ';']).map(name).collect()
}
