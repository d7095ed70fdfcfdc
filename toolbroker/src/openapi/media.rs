//! Media types, and which of several to use.

use serde_json::{Map, Value};

/// A media type without its parameters, in small letters.
pub(super) fn essence(kind: &str) -> String {
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Whether a media type is JSON.
pub(super) fn is_json(kind: &str) -> bool {
    let essence = essence(kind);
    essence == "application/json" || essence.ends_with("+json")
}

/// What an answer says that it is, as far as it matters how it is handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// JSON.
    Json,
    /// Text, in whatever encoding.
    Text,
    /// Anything else, or nothing.
    Other,
}

impl Kind {
    /// What the value of a `Content-Type` says.
    pub(crate) fn of(kind: &str) -> Self {
        let (essence, parameters) = (essence(kind), kind.split(';').skip(1));
        let mut parameters = parameters.filter_map(|it| it.split_once('='));
        // Some say so of what is no text.
        let is_encoding = |(name, value): (&str, &str)| {
            name.trim().eq_ignore_ascii_case("charset")
                && !value.trim().eq_ignore_ascii_case("binary")
        };
        let is_text = essence.starts_with("text/")
            || essence == "application/xml"
            || essence.ends_with("+xml")
            || parameters.any(is_encoding);
        match () {
            () if is_json(kind) => Self::Json,
            () if is_text => Self::Text,
            () => Self::Other,
        }
    }
}

/// What is taken if anything is, or anything of applications.
pub(super) fn any_of(content: &Map<String, Value>) -> Option<&Value> {
    let any = content.iter().find(|(kind, _)| matches!(&*essence(kind), "*/*" | "application/*"));
    any.map(|(_, media)| media)
}

/// The JSON media type to use: plain JSON first, then other `+json`, then JSON Patch (its
/// value has another shape), then a range.
pub(super) fn json_of(content: &Map<String, Value>) -> Option<(&str, &Value)> {
    let rank = |kind: &str| match essence(kind).as_str() {
        "application/json" => 0,
        "application/json-patch+json" => 2,
        other if other.contains('*') => 3,
        _ => 1,
    };
    let json = content.iter().filter(|(kind, _)| is_json(kind));
    json.min_by_key(|(kind, _)| rank(kind)).map(|(kind, media)| (kind.as_str(), media))
}
