//! A stranger's JSON Schema: read as whoever wrote it meant it, weighed before anything
//! is compiled or held against it, and what does not fit it told in words.
//!
//! | file | what it holds |
//! |---|---|
//! | `read` | what libraries write that no draft has, as they mean it |
//! | `pattern_read` | patterns as JavaScript reads them |
//! | `cost` | what it may cost to hold a value against a schema |
//! | `pattern_cost` | what its patterns may take once they are compiled |
//! | `violation` | how a value does not fit |

pub(crate) mod cost;
pub(crate) mod pattern_cost;
pub(crate) mod pattern_read;
pub(crate) mod read;
pub(crate) mod violation;
