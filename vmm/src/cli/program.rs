//! `keygen`, `sign`, `inspect` and `check`: programs before they run.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use forge_protocol::abi::{Forge, Import};
use forge_protocol::broker::{GrantClaims, RefusalKind};
use forge_protocol::ending::{Ending, RejectKind};
use forge_protocol::hex::hex;
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::signature::{SignatureError, SignedParts, SignerKey};
use forge_protocol::text::visible;
use forge_vmm::admission::{self, Shape, Violation, is_text, shown};
use forge_vmm::broker::BrokerError;
use forge_vmm::keys;
use serde::Serialize;

use super::args::{CheckArgs, InspectArgs, KeygenArgs, SignArgs};
use super::replace::{Readers, put};
use super::{CliError, Exit, config, grant, out, print_json, read_file, run};

/// Makes a key pair.
pub(crate) fn keygen(args: &KeygenArgs) -> Result<ExitCode, CliError> {
    let (private, public) = keys::generate(&args.out)?;
    let mut out = out();
    writeln!(out, "{}  sign with it; keep it secret", private.display())?;
    writeln!(out, "{}  give it to whoever runs your programs", public.display())?;
    Ok(Exit::Ok.into())
}

/// Signs a program.
pub(crate) fn sign(args: &SignArgs) -> Result<ExitCode, CliError> {
    let signer = keys::read_signer(&args.key)?;
    let signed = sign_file(&signer, &args.input)?;
    let is = format_args!("{} bytes, signed by {}", signed.len(), signer.trust_key());
    put(&args.output, &signed, Readers::AsBefore, is)?;
    Ok(Exit::Ok.into())
}

/// Reads a program, assembles it if it is text, and signs it.
pub(crate) fn sign_file(signer: &SignerKey, path: &Path) -> Result<Vec<u8>, CliError> {
    let module = read_program(path)?;
    signer.sign(&module).map_err(|error| {
        let why = admission::unverified(&module, error);
        CliError::Program(format!("{}: {why}", path.display()))
    })
}

#[derive(Serialize)]
struct Inspection {
    size_bytes: usize,
    program_sha256: Option<String>,
    signer: Option<String>,
    signature: String,
    tools: Vec<String>,
    imports: Vec<InspectedImport>,
    exports: Vec<InspectedExport>,
    memory: Option<InspectedMemory>,
    functions: u32,
    /// Where it stops being a module, and how, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    malformed: Option<String>,
}

#[derive(Serialize)]
struct InspectedImport {
    module: String,
    name: String,
    #[serde(rename = "type")]
    signature: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Serialize)]
struct InspectedExport {
    name: String,
    kind: &'static str,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
}

#[derive(Serialize)]
struct InspectedMemory {
    initial_bytes: u64,
    maximum_bytes: Option<u64>,
}

/// Shows what a program asks for.
pub(crate) fn inspect(args: &InspectArgs) -> Result<ExitCode, CliError> {
    let trust = keys::read_trust(&args.trust)?;
    let bytes = read_program(&args.program)?;
    let verified = trust.verify(&bytes);
    let signature = match &verified {
        Ok(_) => "good".to_owned(),
        Err(SignatureError::Untrusted) if args.trust.is_empty() => {
            "present; give --trust to see whose".to_owned()
        }
        Err(error) => admission::unverified(&bytes, *error),
    };
    if matches!(verified, Err(SignatureError::NotCoreModule)) {
        // There is nothing to look into.
        return Err(CliError::Program(format!("{}: {signature}", args.program.display())));
    }
    let shape = Shape::read(&bytes).map_err(|violation| CliError::Program(violation.message))?;
    let inspection = Inspection {
        size_bytes: bytes.len(),
        program_sha256: SignedParts::scan(&bytes).ok().map(|parts| hex(&parts.sha256())),
        signer: verified.as_ref().ok().map(|verified| verified.signer().to_string()),
        signature,
        tools: shape.tools().map(ToolName::to_string).collect(),
        imports: shape
            .imports
            .iter()
            .map(|import| InspectedImport {
                module: import.module.clone(),
                name: import.name.clone(),
                signature: import.signature(),
                problem: import.recognised.as_ref().err().cloned(),
            })
            .collect(),
        exports: shape
            .exports
            .iter()
            .map(|export| InspectedExport {
                name: export.name.clone(),
                kind: export.kind,
                signature: export.signature(),
            })
            .collect(),
        memory: shape
            .memory
            .map(|(initial_bytes, maximum_bytes)| InspectedMemory { initial_bytes, maximum_bytes }),
        functions: shape.functions,
        malformed: admission::malformed(&bytes),
    };
    if args.json {
        print_json(&inspection)?;
    } else {
        print_inspection(&inspection, &shape)?;
    }
    Ok(Exit::Ok.into())
}

fn print_inspection(inspection: &Inspection, shape: &Shape) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "size        {} bytes, {} functions", inspection.size_bytes, shape.functions)?;
    writeln!(out, "signature   {}", inspection.signature)?;
    if let Some(malformed) = &inspection.malformed {
        writeln!(out, "malformed   {malformed}")?;
    }
    if let Some(signer) = &inspection.signer {
        writeln!(out, "signer      {signer}")?;
    }
    if let Some(sha256) = &inspection.program_sha256 {
        writeln!(out, "sha256      {sha256}")?;
    }
    match &inspection.memory {
        Some(InspectedMemory { initial_bytes, maximum_bytes: Some(maximum) }) => {
            writeln!(out, "memory      {initial_bytes} to {maximum} bytes")?;
        }
        Some(memory) => writeln!(out, "memory      {} bytes and up", memory.initial_bytes)?,
        None => writeln!(out, "memory      none")?,
    }
    let by_name = [Forge::Call, Forge::CallAsync].map(|it| Ok(Import::Forge(it)));
    writeln!(
        out,
        "may call    {}",
        match shape.tools().collect::<BTreeSet<_>>().len() {
            _ if shape.imports.iter().any(|import| by_name.contains(&import.recognised)) => {
                "any tool that is granted, by its name".to_owned()
            }
            0 => "no tool".to_owned(),
            count => format!("{count} tool{}", if count == 1 { "" } else { "s" }),
        }
    )?;
    let mut told = BTreeSet::new();
    for import in &shape.imports {
        let (module, name) = (shown(&import.module), shown(&import.name));
        match &import.recognised {
            // One that is imported twice is one tool.
            Ok(Import::Tool(tool)) if !told.insert(tool) => {}
            Ok(Import::Tool(tool)) => writeln!(out, "  tool      {}", shown(tool.as_str()))?,
            Ok(Import::Forge(_) | Import::Wasi(_)) => writeln!(out, "  {module:<9} {name}")?,
            Err(why) => writeln!(out, "  REFUSED   {module}.{name}: {why}")?,
        }
    }
    for export in &inspection.exports {
        let signature = export.signature.as_deref().unwrap_or_default();
        writeln!(out, "export      {} {} {signature}", export.kind, shown(&export.name))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Checked {
    ok: bool,
    violations: Vec<CheckedViolation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    needs: Option<Needs>,
}

/// The limits that a run of the program has to ask for, by the names they have where
/// it asks.
#[derive(Serialize)]
struct Needs {
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program_bytes: Option<usize>,
}

#[derive(Serialize)]
struct CheckedViolation {
    kind: &'static str,
    message: String,
}

/// The kind of what is wrong with a grant, as in a report.
const GRANT: &str = "grant";

/// Why a good grant is of no use to this principal in this session.
fn misfits(
    claims: &GrantClaims,
    principal: &str,
    session: Option<&str>,
) -> impl Iterator<Item = String> {
    let owner = &claims.principal;
    let anothers = (owner != principal)
        .then(|| format!("it is {owner:?}'s, and {principal:?} would present it"));
    let bound = claims.session.as_deref().filter(|bound| session != Some(*bound));
    let elsewhere =
        bound.map(|bound| format!("it is good in the session {bound:?} alone (--session)"));
    anothers.into_iter().chain(elsewhere)
}

/// Says everything in a program and its grant that would keep it from running.
pub(crate) fn check(args: CheckArgs) -> Result<ExitCode, CliError> {
    config::check_named(&args.broker)?;
    let mut paths = args.trust.clone();
    paths.extend(config::trust_keys(args.broker.config.as_deref())?);
    let trust = keys::read_trust(&paths)?;
    let bytes = match read_program(&args.program) {
        Err(CliError::Program(message)) if args.json => {
            let violation = CheckedViolation { kind: RejectKind::Invalid.as_str(), message };
            print_json(&Checked { ok: false, violations: vec![violation], needs: None })?;
            return Ok(Exit::Rejected.into());
        }
        read => read?,
    };
    let usual = RunLimits::default();
    // What a run may ask for keeps no program from running.
    let RunLimits { memory_bytes, program_bytes, .. } = RunLimits::operator_maxima();
    let limits = RunLimits { memory_bytes, program_bytes, ..usual };
    let is_large = bytes.len() > usual.program_bytes as usize;
    let mut needs = Needs { memory_bytes: None, program_bytes: is_large.then_some(bytes.len()) };
    let mut violations = Vec::new();
    let mut add = |kind, message| violations.push(CheckedViolation { kind, message });

    let verified = trust.verify(&bytes);
    match &verified {
        Ok(_) => {}
        Err(SignatureError::Untrusted) if trust.as_slice().is_empty() => {
            add("signature", "no key is trusted, so no program can run: --trust signer.pub".into());
        }
        Err(error) => add("signature", admission::unverified(&bytes, *error)),
    }
    if bytes.len() > limits.program_bytes as usize {
        let limit = limits.program_bytes;
        add("too_large", format!("the program has {} bytes, the limit is {limit}", bytes.len()));
    }
    let granted = match &args.grant {
        None => Some(args.allow),
        Some(file) => match grant::claims(&args.broker, file) {
            Ok(claims) => {
                misfits(&claims, &args.asker.principal, args.session.as_deref())
                    .for_each(|misfit| add(GRANT, format!("{}: {misfit}", file.display())));
                Some(claims.tools.into_iter().map(|tool| tool.name).collect())
            }
            Err(CliError::Broker(BrokerError::Refused {
                kind: RefusalKind::BadGrant,
                message,
            })) => {
                add(GRANT, message);
                None
            }
            Err(error) => return Err(error),
        },
    };
    // What is no module is not looked into.
    let is_module = !matches!(verified, Err(SignatureError::NotCoreModule));
    if is_module && let Ok(shape) = Shape::read(&bytes) {
        // What a grant that is not good was for is not known.
        let granted = granted.unwrap_or_else(|| shape.tools().cloned().collect());
        for Violation { kind, mut message, ungranted } in shape.violations(&granted, &limits) {
            if let Some(tool) = ungranted
                && args.grant.is_none()
            {
                message = format!("{message}: {}", run::reason::cure(&[tool]));
            }
            if kind == RejectKind::TooLarge && shape.memory.is_some_and(|(it, _)| it > memory_bytes)
            {
                message.push_str(", and no run may have more");
            }
            add(kind.as_str(), message);
        }
        let initial_bytes = shape.memory.map(|(initial_bytes, _)| initial_bytes);
        needs.memory_bytes =
            initial_bytes.filter(|it| (usual.memory_bytes + 1..=memory_bytes).contains(it));
    }
    // Nor is a program over the size limit, which no guest gets. The guest reports one
    // violation at a time, so it is left out if one of that kind is listed already.
    if is_module
        && bytes.len() <= limits.program_bytes as usize
        && let Err(Ending::Rejected { kind, detail }) = forge_guest_init::check(&limits, &bytes)
        && violations.iter().all(|said| said.kind != kind.as_str())
    {
        violations.push(CheckedViolation { kind: kind.as_str(), message: visible(&detail) });
    }
    let flags = [
        needs.memory_bytes.map(|bytes| format!("--memory {bytes}")),
        needs.program_bytes.map(|bytes| format!("--limit program_bytes={bytes}")),
    ];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    let needs = (!flags.is_empty()).then_some(needs);
    let checked = Checked { ok: violations.is_empty(), violations, needs };
    if args.json {
        print_json(&checked)?;
    } else {
        let mut out = out();
        for violation in &checked.violations {
            writeln!(out, "{}: {}", violation.kind, violation.message)?;
        }
        let needs = flags.join(" ");
        let why = "it needs more than the default limit";
        match (checked.ok, flags.is_empty()) {
            (true, true) => writeln!(out, "ok: nothing keeps this program from running")?,
            (true, false) => {
                writeln!(out, "ok: nothing keeps this program from running with {needs}: {why}")?;
            }
            (false, true) => {}
            (false, false) => writeln!(out, "beside that its run takes {needs}: {why}")?,
        }
    }
    Ok(if checked.ok { Exit::Ok } else { Exit::Rejected }.into())
}

/// Reads a program; text is assembled, so that it can be looked at unsigned.
fn read_program(path: &Path) -> Result<Vec<u8>, CliError> {
    let bytes = read_file(path)?;
    // The mark that some editors begin a file with is no part of it.
    let text = bytes.strip_prefix(config::BYTE_ORDER_MARK).unwrap_or(&bytes);
    // What is called so and does not begin so is told what is wrong with it as text.
    if !is_text(text) && path.extension().is_none_or(|extension| extension != "wat") {
        return Ok(bytes);
    }
    wat::parse_bytes(text).map(|module| module.into_owned()).map_err(|mut error| {
        error.set_path(path);
        CliError::Program(error.to_string())
    })
}
