//! The place of a tool server: `read`, `write`, `network` and `limits` of
//! `[servers.<name>]`, and `server_uids` of `[broker]`.

use std::ops::Range;
use std::path::PathBuf;

use super::node::Node;
use super::{ConfigError, Problem};
use crate::stranger::{Jail, Limits};

/// `read`, `write`, `network` and `limits` of a server that is a program.
pub(super) fn jail(entry: &Node<'_>) -> Result<Jail, ConfigError> {
    let mut jail = Jail::default();
    for (key, paths) in [("read", &mut jail.read), ("write", &mut jail.write)] {
        let Some(listed) = entry.field(key) else { continue };
        for path in listed.items()? {
            paths.push(absolute(&path)?);
        }
    }
    if let Some(network) = entry.field("network") {
        jail.network = network.bool()?;
    }
    if let Some(limits) = entry.field("limits") {
        jail.limits = self::limits(&limits)?;
    }
    Ok(jail)
}

fn absolute(node: &Node<'_>) -> Result<PathBuf, ConfigError> {
    let text = node.text()?;
    if text.is_empty() || text.contains('\0') {
        return Err(node.wrong(Problem::Text));
    }
    let path = std::path::absolute(text).map_err(|_| node.wrong(Problem::Text))?;
    if path.parent().is_none() {
        return Err(node.wrong(Problem::WholeHost));
    }
    Ok(path)
}

fn limits(node: &Node<'_>) -> Result<Limits, ConfigError> {
    let mut limits = Limits::default();
    node.only(&["memory_mib", "open_files", "processes", "file_mib"])?;
    let mut memory_mib = 0;
    for (key, place) in [
        ("memory_mib", &mut memory_mib),
        ("open_files", &mut limits.open_files),
        ("processes", &mut limits.processes),
        ("file_mib", &mut limits.file_mib),
    ] {
        let Some(value) = node.field(key) else { continue };
        *place = value.number()?;
        if *place == 0 {
            return Err(value.wrong(Problem::Positive));
        }
    }
    limits.memory_mib = (memory_mib > 0).then_some(memory_mib);
    Ok(limits)
}

/// `server_uids` of `[broker]`, whose other fields are the supervisor's.
pub(super) fn server_uids(document: &Node<'_>) -> Result<Option<Range<u32>>, ConfigError> {
    let Some(node) = document.field("broker").and_then(|broker| broker.field("server_uids")) else {
        return Ok(None);
    };
    let range = node.text()?.split_once('-').and_then(|(first, last)| {
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // Root is no stranger, and the last number of all means nobody.
        (0 < first && first <= last && last < u32::MAX - 1).then(|| first..last + 1)
    });
    range.map(Some).ok_or_else(|| node.wrong(Problem::Uids))
}
