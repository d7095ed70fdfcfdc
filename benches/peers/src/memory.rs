//! What the kernel says about this process's memory.

fn field(path: &str, name: &str) -> Result<f64, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| format!("{path} has no {name}"))
}

/// This process's memory, shared pages by their share, in KiB.
pub fn own_kib() -> Result<f64, String> {
    field("/proc/self/smaps_rollup", "Pss:")
}
