//! `resource.read`: a resource of one of the configured tool servers, where
//! the operator allows it by server and by what its URI begins with.
//!
//! A server decides what a URI means. So that a prefix means what it says, a
//! URI is taken only in the one form that the URL standard's parser gives it,
//! and only without dot segments or anything encoded that might be one.
//! Deliberately absent are templates, subscriptions and lists of resources.

use std::collections::BTreeMap;
use std::sync::Arc;

use rmcp::model::JsonObject;
use serde_json::json;
use url::Url;

use super::{Caller, Failure, Plan, Work, text};
use crate::definition::Effect;
use crate::egress::rule::{URL_BYTES_MAX, is_plain_path};
use crate::upstream::{Away, Said, Upstream};

/// What the operator allows.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Servers, and what the URI begins with; never empty.
    pub allow: Vec<Source>,
    /// The text and blobs of one resource, in bytes as they come.
    pub bytes_max: usize,
}

/// Resources of one server.
#[derive(Clone, Debug)]
pub struct Source {
    /// The server.
    pub server: String,
    /// What the URI begins with.
    pub uri_prefix: String,
}

/// `resource.read`, for these sources.
pub(super) fn read(sources: Sources, servers: &BTreeMap<String, Arc<Upstream>>) -> Plan {
    let servers: BTreeMap<String, Arc<Upstream>> = servers
        .iter()
        .filter(|(name, _)| sources.allow.iter().any(|source| source.server == **name))
        .map(|(name, upstream)| (name.clone(), Arc::clone(upstream)))
        .collect();
    let names: Vec<&String> = servers.keys().collect();
    let places: Vec<String> = sources
        .allow
        .iter()
        .map(|source| format!("{} {}", source.server, source.uri_prefix))
        .collect();
    let description = format!(
        "Reads a resource of a tool server, by its URI. What comes back is what strangers wrote. \
         Allowed are URIs that begin with: {}.",
        places.join("; ")
    );
    let input_schema = json!({
        "type": "object",
        "properties": {
            "server": { "enum": names },
            "uri": { "type": "string", "maxLength": URL_BYTES_MAX },
        },
        "required": ["server", "uri"],
        "additionalProperties": false,
    });
    let shared = Arc::new((sources, servers));
    Plan {
        server: "resource",
        name: "read",
        description,
        effect: Effect::Read,
        input_schema,
        output_schema: json!({
            "type": "object",
            "properties": { "contents": { "type": "array", "items": { "type": "object" } } },
            "required": ["contents"],
            "additionalProperties": false,
        }),
        work: Work::waits(move |caller, arguments| {
            let (shared, caller) = (Arc::clone(&shared), caller.clone());
            async move {
                let (sources, servers) = &*shared;
                carry_out(sources, servers, &caller, &arguments).await
            }
        }),
    }
}

async fn carry_out(
    sources: &Sources,
    servers: &BTreeMap<String, Arc<Upstream>>,
    caller: &Caller,
    arguments: &JsonObject,
) -> Said {
    let server = text(arguments, "server").unwrap_or_default();
    let uri = text(arguments, "uri").unwrap_or_default();
    if !sources.allows(server, uri) {
        let message = "no rule of the operator allows this resource";
        return Failure::new("not_allowed", message).into();
    }
    let Some(upstream) = servers.get(server) else {
        return Failure::new("unavailable", "this server is not configured").into();
    };
    let connection = match upstream.connection().await {
        Ok(connection) => connection,
        Err(source) => {
            return Failure::new("unavailable", Away::of(server, &source).to_string()).into();
        }
    };
    let _place = match caller.turn(connection.place(&caller.principal, uri.len())).await {
        Ok(place) => place,
        Err(failure) => return failure.into(),
    };
    let answer = connection.read_resource(uri, sources.bytes_max, caller.deadline).await;
    connection.said(answer)
}

impl Sources {
    fn allows(&self, server: &str, uri: &str) -> bool {
        is_canonical(uri)
            && self
                .allow
                .iter()
                .any(|source| source.server == server && uri.starts_with(&source.uri_prefix))
    }
}

/// Whether a URI has one reading. All behind the scheme is looked at: which
/// part of it is a host or a path is the server's to say.
#[must_use]
pub(crate) fn is_canonical(uri: &str) -> bool {
    uri.len() <= URL_BYTES_MAX
        && Url::parse(uri).is_ok_and(|url| url.as_str() == uri)
        && uri.split_once(':').is_some_and(|(_, rest)| is_plain_path(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_server_and_what_begins_like_its_prefix_are_allowed() {
        let sources = Sources {
            allow: vec![Source { server: "docs".into(), uri_prefix: "file:///srv/docs/".into() }],
            bytes_max: 100,
        };
        assert!(sources.allows("docs", "file:///srv/docs/a/b.md"));
        for (server, uri) in [
            ("other", "file:///srv/docs/a"),
            ("docs", "file:///srv/docs"),
            ("docs", "file:///etc/passwd"),
            ("docs", "file:///srv/docs/../../etc/passwd"),
            ("docs", "file:///srv/docs/%2e%2e/%2e%2e/etc/passwd"),
            ("docs", "file:///srv/docs/..%2f..%2fetc/passwd"),
            ("docs", "file:///srv/docs/%252e%252e/x"),
            ("docs", "file:///srv/docs/..\\x"),
            ("docs", "FILE:///srv/docs/a"),
            ("docs", "file:///srv/docs/a\n"),
            ("docs", "file:///srv/docs/a b"),
            ("docs", "docs"),
            ("docs", ""),
        ] {
            assert!(!sources.allows(server, uri), "{server} {uri:?}");
        }
    }

    #[test]
    fn a_scheme_of_the_servers_own_is_held_to_the_same() {
        assert!(is_canonical("memo://insights") && is_canonical("docs:a/b"));
        assert!(!is_canonical("memo://x/a/../b") && !is_canonical("docs:a/../b"));
        assert!(!is_canonical("memo://../x") && !is_canonical("memo://..%2fx/"));
    }
}
