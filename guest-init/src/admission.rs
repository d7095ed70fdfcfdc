//! What a compiled module asks for against what it may have: its imports and
//! exports against the ABI when it is loaded, its tools against the grant when
//! its run comes.
//!
//! Admission on the host has checked the same before any machine saw the
//! program; these are the checks that linking and calling it rely on. What the
//! host grants is taken as given; what the module names is untrusted text and
//! is quoted and cut before it goes into a message.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write as _;

use forge_protocol::abi::{Import, Signature, TOOL_MODULE, Value};
use forge_protocol::ending::{Ending, RejectKind, UNGRANTED};
use forge_protocol::name::ToolName;
use wasmi::{ExternType, FuncType, ImportType, Module, ValType};

use crate::trap::rejected;

/// How many violations a rejection spells out.
const SPELLED_OUT_MAX: usize = 8;
/// How much of a name the module gave is quoted, in characters.
const QUOTED_CHARS_MAX: usize = 100;

/// The export that is the program's linear memory.
pub(crate) const MEMORY: &str = "memory";
/// The export a forge program starts at.
pub(crate) const FORGE_RUN: &str = "forge_run";
/// The export called before [`FORGE_RUN`], if it is there.
pub(crate) const INITIALIZE: &str = "_initialize";
/// The export a WASI command starts at.
pub(crate) const WASI_START: &str = "_start";

/// Where a program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// [`FORGE_RUN`], after [`INITIALIZE`] if that is exported.
    Forge {
        /// Whether [`INITIALIZE`] is exported.
        initialize: bool,
    },
    /// [`WASI_START`].
    Wasi,
}

/// A module that may be linked: each of its imports is a function of the ABI,
/// of the right type. It may run once [`Admitted::granted`] has said so.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// In the module's order.
    pub(crate) imports: Vec<Import>,
    pub(crate) entry: Entry,
}

impl Admitted {
    /// Checks that each tool among the imports is granted.
    ///
    /// # Errors
    /// [`Ending::Rejected`], naming every one that is not up to a bound.
    pub(crate) fn granted(&self, granted: &[ToolName]) -> Result<(), Ending> {
        let granted: BTreeSet<&ToolName> = granted.iter().collect();
        let mut violations = Violations::default();
        for import in &self.imports {
            if let Import::Tool(name) = import
                && !granted.contains(name)
            {
                violations.add(format_args!(
                    "{}.{}: {UNGRANTED}",
                    quoted(TOOL_MODULE),
                    quoted(name.as_str()),
                ));
            }
        }
        violations.into_result(RejectKind::Import)
    }
}

/// Checks `module` against the ABI.
///
/// # Errors
/// [`Ending::Rejected`], naming every violation up to a bound.
pub(crate) fn admit(module: &Module) -> Result<Admitted, Ending> {
    let mut violations = Violations::default();
    let mut imports = Vec::new();
    for import in module.imports() {
        match import_of(&import) {
            Ok(import) => imports.push(import),
            Err(why) => violations.add(format_args!(
                "{}.{}: {why}",
                quoted(import.module()),
                quoted(import.name()),
            )),
        }
    }
    violations.into_result(RejectKind::Import)?;
    Ok(Admitted { imports, entry: entry_of(module)? })
}

fn import_of(import: &ImportType<'_>) -> Result<Import, String> {
    let recognised =
        Import::recognise(import.module(), import.name()).map_err(|why| format!("{why}"))?;
    let expected = recognised.signature();
    match import.ty() {
        ExternType::Func(found) if has_type(found, &expected) => {}
        ExternType::Func(found) => {
            return Err(format!("is {}, the ABI has {expected}", type_text(found)));
        }
        _ => return Err(format!("is no function, the ABI has {expected}")),
    }
    Ok(recognised)
}

fn entry_of(module: &Module) -> Result<Entry, Ending> {
    let mut violations = Violations::default();
    match module.get_export(MEMORY) {
        Some(ExternType::Memory(_)) => {}
        Some(_) => violations.add(format_args!("the export `{MEMORY}` is no linear memory")),
        None => violations.add(format_args!("there is no exported `{MEMORY}`")),
    }
    let mut is_function = |name: &str, expected: Signature| match module.get_export(name) {
        None => false,
        Some(ExternType::Func(found)) if has_type(&found, &expected) => true,
        Some(ExternType::Func(found)) => {
            violations.add(format_args!(
                "the export `{name}` is {}, the ABI has {expected}",
                type_text(&found),
            ));
            true
        }
        Some(_) => {
            violations.add(format_args!("the export `{name}` is no function"));
            true
        }
    };
    let nothing = Signature { params: &[], result: None };
    let entry = if is_function(FORGE_RUN, Signature { params: &[], result: Some(Value::I32) }) {
        Some(Entry::Forge { initialize: is_function(INITIALIZE, nothing) })
    } else if is_function(WASI_START, nothing) {
        Some(Entry::Wasi)
    } else {
        violations
            .add(format_args!("neither `{FORGE_RUN}` nor `{WASI_START}` is exported to start at"));
        None
    };
    violations.into_result(RejectKind::Export)?;
    // Without an entry there was a violation.
    entry.ok_or_else(|| rejected(RejectKind::Export, "there is nothing to start at"))
}

fn has_type(found: &FuncType, expected: &Signature) -> bool {
    let same = |found: &[ValType], expected: &[Value]| {
        found.len() == expected.len()
            && found
                .iter()
                .zip(expected)
                .all(|pair| matches!(pair, (ValType::I32, Value::I32) | (ValType::I64, Value::I64)))
    };
    same(found.params(), expected.params) && same(found.results(), expected.result.as_slice())
}

/// A function type in the text format.
fn type_text(ty: &FuncType) -> String {
    let mut text = String::from("(func");
    for (part, values) in [("param", ty.params()), ("result", ty.results())] {
        if !values.is_empty() {
            let _ = write!(text, " ({part}");
            for value in values {
                text.push_str(match value {
                    ValType::I32 => " i32",
                    ValType::I64 => " i64",
                    ValType::F32 => " f32",
                    ValType::F64 => " f64",
                    ValType::V128 => " v128",
                    ValType::FuncRef => " funcref",
                    ValType::ExternRef => " externref",
                });
            }
            text.push(')');
        }
    }
    text.push(')');
    text
}

/// A name from the module, quoted, escaped and cut.
fn quoted(name: &str) -> String {
    match name.char_indices().nth(QUOTED_CHARS_MAX) {
        None => format!("{name:?}"),
        Some((end, _)) => format!("{:?}…", &name[..end]),
    }
}

/// Collects what is wrong, so that an author sees all of it at once.
#[derive(Default)]
struct Violations {
    text: String,
    count: usize,
}

impl Violations {
    fn add(&mut self, what: core::fmt::Arguments<'_>) {
        self.count += 1;
        if self.count <= SPELLED_OUT_MAX {
            if !self.text.is_empty() {
                self.text.push_str("; ");
            }
            // Writing to a string has no way to fail.
            let _ = self.text.write_fmt(what);
        }
    }

    fn into_result(mut self, kind: RejectKind) -> Result<(), Ending> {
        if self.count == 0 {
            return Ok(());
        }
        if self.count > SPELLED_OUT_MAX {
            let _ = write!(self.text, "; and {} more", self.count - SPELLED_OUT_MAX);
        }
        Err(rejected(kind, self.text))
    }
}
