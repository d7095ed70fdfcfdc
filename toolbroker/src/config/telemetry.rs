//! `[telemetry]`: where spans are sent.

use reqwest::Url;

use super::ConfigError;
use super::node::Node;
use super::servers::http_url;

/// Where a collector takes spans, below its address.
const TRACES: &str = "v1/traces";

/// The address that spans are posted to, from the collector's own under
/// `otlp`. Plain HTTP may go to any host: spans hold no credential, and a
/// collector that wants one is not supported.
pub(super) fn collector(table: &Node<'_>) -> Result<Url, ConfigError> {
    table.only(&["otlp"])?;
    let node = table.needed("otlp")?;
    let mut url = http_url(&node, node.text()?)?;
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        return Err(node.unfit(
            "must have no user, no password and no query: what a collector elsewhere asks for is \
             added by one beside the broker",
        ));
    }
    let base = url.path().trim_end_matches('/').to_owned();
    if base.ends_with(TRACES) {
        return Err(node.unfit("give the collector's address without /v1/traces"));
    }
    url.set_path(&format!("{base}/{TRACES}"));
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    fn read(table: &serde_json::Value) -> Result<String, String> {
        let read = collector(&Node::root(Path::new("forge.toml"), table));
        read.map(|url| url.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn spans_go_below_the_collectors_address() {
        for (given, posted) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://otel-collector:4318/", "http://otel-collector:4318/v1/traces"),
            ("https://x.example/otlp/", "https://x.example/otlp/v1/traces"),
        ] {
            assert_eq!(read(&json!({ "otlp": given })).unwrap(), posted);
        }
    }

    #[test]
    fn an_address_that_is_none_or_holds_a_credential_is_refused_without_it() {
        for (table, expected) in [
            (json!({}), "otlp: this field is missing"),
            (json!({ "otlp": 7 }), "otlp: expected a string"),
            (json!({ "otlp": "hunter2" }), "otlp: expected an http:// or https:// address"),
            (json!({ "otlp": "ftp://hunter2" }), "otlp: expected an http:// or https:// address"),
            (json!({ "otlp": "http://u:hunter2@x" }), "otlp: must have no user"),
            (json!({ "otlp": "http://x/?key=hunter2" }), "otlp: must have no user"),
            (json!({ "otlp": "http://x/hunter2/v1/traces" }), "without /v1/traces"),
            (json!({ "otlp": "http://x", "hunter": "hunter2" }), "hunter: unknown"),
        ] {
            let refused = read(&table).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }
}
