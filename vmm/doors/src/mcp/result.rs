//! What both tools answer with, and a number as models write it.

use std::fmt::Display;

use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;
use serde_json::Number;

use crate::integer;

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

/// An integer of at least so much. What is less, or none, is told by its `name`.
pub(super) fn integer(
    name: &str,
    number: Option<Number>,
    least: u64,
) -> Result<Option<u64>, String> {
    let Some(number) = number else { return Ok(None) };
    match integer::whole(&number).filter(|whole| *whole >= least) {
        Some(whole) => Ok(Some(whole)),
        None => {
            Err(format!("`{name}` is {number}: send an integer from {least} on, or leave it out"))
        }
    }
}
