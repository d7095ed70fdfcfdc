//! The tools that a run was granted by its intent.

use forge_protocol::broker::{Authority, BlockedTool, FoundTool};
use forge_protocol::limits::FOUND_TOOLS_MAX;
use forge_protocol::text::visible;
use forge_vmm::report::RetrievedReport;

use crate::cli::args::RunArgs;
use crate::cli::complain;
use crate::cli::config::{self, Found};

/// Says what was found and is granted, and what could not be searched. Nobody named
/// these tools, so whoever starts the run learns here which they are.
pub(super) fn told(args: &RunArgs, found: Found) -> Vec<FoundTool> {
    let Found { tools, blocked, unavailable } = found;
    if tools.is_empty() && unavailable.is_empty() {
        complain(&config::nothing_found(&args.asker.principal));
    }
    for (server, reason) in &unavailable {
        complain(&format!("server {server} was not searched: {}", visible(reason)));
    }
    if let Some(blocked) = not_searched(&blocked) {
        complain(&blocked);
    }
    // The report has them.
    if !tools.is_empty() && !args.json {
        let names: Vec<_> = tools.iter().map(|tool| visible(tool.spec.name.as_str())).collect();
        complain(&format!("granted by --intent: {}", names.join(", ")));
    }
    tools
}

/// So many blocked tools are named.
const BLOCKED_SHOWN: usize = 8;

/// What no search finds: tools whose definitions nobody approved.
pub(crate) fn not_searched(blocked: &[BlockedTool]) -> Option<String> {
    let shown = blocked.iter().take(BLOCKED_SHOWN);
    let names: Vec<_> = shown
        .map(|BlockedTool { name, standing }| {
            format!("{} ({})", visible(name.as_str()), standing.as_str())
        })
        .collect();
    if names.is_empty() {
        return None;
    }
    let more = match blocked.len() - names.len() {
        0 => String::new(),
        // There may be others that were not told.
        more if blocked.len() >= FOUND_TOOLS_MAX as usize => format!(" and at least {more} more"),
        more => format!(" and {more} more"),
    };
    let names = names.join(", ");
    Some(format!(
        "blocked and therefore not searched: {names}{more}; review them with `forge-vmm tools \
         review`"
    ))
}

/// What a run may call that was started with an intent: these tools and no other.
pub(super) fn granted(found: &[FoundTool]) -> Authority {
    Authority::Tools(found.iter().map(|tool| tool.spec.name.clone()).collect())
}

/// As they are reported.
pub(super) fn reported(found: &[FoundTool]) -> Vec<RetrievedReport> {
    let report = |FoundTool { spec, score_millionths }: &FoundTool| RetrievedReport {
        tool: spec.name.to_string(),
        score_millionths: *score_millionths,
    };
    found.iter().map(report).collect()
}
