//! Why a run was refused or ended, in the words of the command line that it came from.

use forge_protocol::ending::{Denial, Ending, LimitKind, RejectKind, RunEnd, UNGRANTED, WALL_MS};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::signature::{CORE_HEADER, SignedParts};
use forge_protocol::text::visible;
use forge_vmm::admission::Shape;

use super::limits;
use crate::cli::args::RunArgs;

/// The options of `run` by the names that what they bound has where something is over it.
/// Any fuel may be asked for.
const LIMITS: [(&str, &str); 3] =
    [("memory_bytes", "--memory"), (WALL_MS, "--timeout"), ("input_bytes", "--input")];

/// Why a run was refused, with the option or the file of this command line that it
/// is about: who refused knows neither.
pub(super) fn in_words_of(
    args: &RunArgs,
    program: &[u8],
    end: Option<RunEnd>,
    reason: String,
) -> String {
    let option = |name: &str| LIMITS.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
    let Some(end) = end else { return reason };
    let subject = match (end, &args.grant) {
        (RunEnd::Rejected(RejectKind::TooLarge), _) if reason.starts_with(BR_TABLE) => {
            return by_its_authors_bytes(args, program).unwrap_or(reason);
        }
        (RunEnd::Rejected(RejectKind::TooLarge), _) => match reason.split_once(" is ") {
            Some((name, value)) => {
                let value = value.split(',').next().and_then(|value| value.parse().ok());
                let RunLimits { memory_bytes, program_bytes, .. } = RunLimits::operator_maxima();
                let most = match name {
                    "initial memory" => Some(memory_bytes),
                    "program_bytes" => Some(program_bytes.into()),
                    _ => None,
                };
                if let Some(most) = most.filter(|most| value > Some(*most)) {
                    // No option helps.
                    return format!("{reason}, and no run may have more than {most}");
                }
                match (args.limit.iter().any(|(said, n)| said == name && Some(*n) == value), value)
                {
                    (true, _) => Some("--limit".to_owned()),
                    (false, Some(value)) if name == "program_bytes" => {
                        let program = args.program.display();
                        return format!(
                            "{program}: {reason}: `--limit {name}={value}` lets it, and without \
                             what is there for debuggers it is smaller"
                        );
                    }
                    (false, Some(value)) if name == "initial memory" => {
                        return format!("{reason}: `--memory {value}` lets it");
                    }
                    (false, _) => option(name),
                }
            }
            None => None,
        },
        (RunEnd::Deadline, _) => Some("--timeout".to_owned()),
        (RunEnd::Limit(kind), _) => Some(
            match kind {
                LimitKind::Fuel => "--fuel",
                LimitKind::Memory => "--memory",
                LimitKind::Output => "--limit output_bytes",
                LimitKind::Artifacts => "--limit",
            }
            .to_owned(),
        ),
        (RunEnd::Rejected(RejectKind::Signature), _) => Some(args.program.display().to_string()),
        (RunEnd::Rejected(RejectKind::Invalid), _) => {
            return by_its_authors_bytes(args, program).unwrap_or(reason);
        }
        (RunEnd::Denied(Denial::Grant), Some(file)) => Some(file.display().to_string()),
        (RunEnd::Rejected(RejectKind::Import), None)
            if args.intent.is_none() && reason.contains(UNGRANTED) =>
        {
            let wanted = Shape::read(program).map(|shape| ungranted(&shape, &args.allow));
            return match wanted.as_deref() {
                Ok([]) | Err(_) => reason,
                Ok(wanted) => format!("{reason}: {}", cure(wanted)),
            };
        }
        _ => None,
    };
    match subject {
        Some(subject) => format!("{subject}: {reason}"),
        None => reason,
    }
}

/// Why a program is invalid, by the bytes that its author has: a guest counts the
/// signature that this command gave it, and what it had to spell otherwise.
fn by_its_authors_bytes(args: &RunArgs, program: &[u8]) -> Option<String> {
    let module = match args.sign_with {
        Some(_) => [&CORE_HEADER, SignedParts::scan(program).ok()?.covered()].concat(),
        None => program.to_vec(),
    };
    match forge_guest_init::check(&limits(args).ok()?, &module) {
        Err(Ending::Rejected { kind: RejectKind::Invalid | RejectKind::TooLarge, detail }) => {
            Some(visible(&detail))
        }
        _ => None,
    }
}

/// How a reason begins that has a place in the module, though its kind is of sizes.
const BR_TABLE: &str = "the br_table at byte";

/// The tools that a program imports and nobody allowed it, each once.
fn ungranted(shape: &Shape, allow: &[ToolName]) -> Vec<ToolName> {
    let mut wanted: Vec<ToolName> = Vec::new();
    for tool in shape.tools().filter(|tool| !allow.contains(tool)) {
        if !wanted.contains(tool) {
            wanted.push(tool.clone());
        }
    }
    wanted
}

/// So many options are written out.
const CURES_SHOWN: usize = 16;

/// What grants these tools.
pub(in crate::cli) fn cure(tools: &[ToolName]) -> String {
    let allow = |tool: &ToolName| Some(format!("--allow {}", tool.shell_word()?));
    let options: Option<Vec<_>> = tools.iter().take(CURES_SHOWN).map(allow).collect();
    let options = options.map_or_else(|| "--allow NAME".into(), |options| options.join(" "));
    format!("`{options}` {}", if tools.len() == 1 { "grants it" } else { "grants them" })
}
