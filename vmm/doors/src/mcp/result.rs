//! What both tools answer with, and a number as models write it.

use std::fmt::Display;

use rmcp::model::{CallToolResult, ContentBlock};
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serialize};

/// A result without content of its own.
pub(super) fn failed(why: &dyn Display) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(why.to_string())])
}

/// An object as structured content, and as text for clients that read no
/// other: itself, unless there is a better one.
pub(super) fn structured(
    content: &impl Serialize,
    text: Option<String>,
    is_error: bool,
) -> CallToolResult {
    let content = match serde_json::to_value(content) {
        Ok(content) => content,
        Err(error) => return failed(&error),
    };
    let text = text.unwrap_or_else(|| content.to_string());
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    result.structured_content = Some(content);
    result.is_error = Some(is_error);
    result
}

/// An integer as JSON Schema has it: `2.0` is one, and some models write it so.
pub(super) fn integer<'de, D: Deserializer<'de>, T: TryFrom<u64>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    /// Up to here, every integer is a double of its own.
    const EXACT_MAX: f64 = (1_u64 << 53) as f64;
    let Some(number) = Option::<serde_json::Number>::deserialize(from)? else { return Ok(None) };
    let double = number.as_f64().filter(|it| it.fract() == 0.0 && (0.0..=EXACT_MAX).contains(it));
    let whole = number.as_u64().or_else(|| double.map(|it| it as u64));
    let given = whole.and_then(|whole| T::try_from(whole).ok());
    given
        .map(Some)
        .ok_or_else(|| D::Error::custom(format!("{number} is no integer that may be here")))
}
