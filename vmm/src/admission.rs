//! Admission: what is checked of a program before any machine sees a byte.
//!
//! First its signature, by a scanner that looks at nothing but section
//! boundaries. Only then a WebAssembly parser: which imports it declares, so
//! which capabilities it asks for, and whether the grant has them. The guest
//! checks all of it again, and validates and compiles; nothing here is relied
//! on inside it.

use crate::locks::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use forge_guest_init::shape::{self, ShapeError};
use forge_protocol::abi::{Forge, Import, Signature, Value};
use forge_protocol::broker::Callable;
use forge_protocol::ending::{RejectKind, UNGRANTED};
use forge_protocol::limits::{OverLimit, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::signature::{SignatureError, TrustKey, TrustKeys};
use forge_protocol::text::visible;
use sha2::{Digest as _, Sha256};
use wasmparser::{ExternalKind, FuncType, Parser, Payload, TypeRef, ValType};

/// A page of linear memory, in bytes.
const WASM_PAGE_BYTES: u64 = 65_536;
/// How much of a name that a module gave is shown.
const NAME_CHARS_MAX: usize = 100;

/// One thing that is wrong with a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which check it failed.
    pub kind: RejectKind,
    /// What was found, and what to do.
    pub message: String,
    /// The tool that it imports and is not granted, if that is it.
    pub ungranted: Option<ToolName>,
}

impl Violation {
    fn new(kind: RejectKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), ungranted: None }
    }
}

/// An import, as the module declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportFound {
    /// The module part of its name.
    pub module: String,
    /// Its own name.
    pub name: String,
    /// Its type, if it is a function.
    pub ty: Option<Arc<FuncType>>,
    /// What it is in the ABI, or why it is nothing.
    pub recognised: Result<Import, String>,
}

impl ImportFound {
    /// Its type, in the text format.
    #[must_use]
    pub fn signature(&self) -> String {
        self.ty.as_deref().map_or("(not a function)".into(), type_text)
    }
}

/// An export, as the module declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportFound {
    /// Its name.
    pub name: String,
    /// `func`, `memory`, `table` or `global`.
    pub kind: &'static str,
    /// A function's type.
    pub ty: Option<Arc<FuncType>>,
}

impl ExportFound {
    /// A function's type, in the text format.
    #[must_use]
    pub fn signature(&self) -> Option<String> {
        self.ty.as_deref().map(type_text)
    }
}

/// What a module declares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Its imports, in order.
    pub imports: Vec<ImportFound>,
    /// Its exports, in order.
    pub exports: Vec<ExportFound>,
    /// Its memory: initial and maximal size in bytes.
    pub memory: Option<(u64, Option<u64>)>,
    /// Functions it defines.
    pub functions: u32,
    /// Whether it has a start section.
    pub has_start: bool,
}

impl Shape {
    /// Reads what a module declares.
    ///
    /// # Errors
    /// A violation: of kind `Invalid` if it does not parse so far, `TooLarge` if it
    /// declares more than a guest takes.
    pub fn read(module: &[u8]) -> Result<Self, Violation> {
        read_shape(module).map_err(|error| match error {
            ShapeError::Malformed(error) => {
                Violation::new(RejectKind::Invalid, format!("the module is invalid: {error}"))
            }
            ShapeError::Over { .. } => Violation::new(RejectKind::TooLarge, error.to_string()),
        })
    }

    /// The tools it imports.
    pub fn tools(&self) -> impl Iterator<Item = &ToolName> {
        self.imports.iter().filter_map(|import| match &import.recognised {
            Ok(Import::Tool(name)) => Some(name),
            _ => None,
        })
    }

    /// The tools it can call, as far as its imports say.
    #[must_use]
    pub fn callable(&self) -> Callable {
        let by_name = |import: &ImportFound| {
            matches!(import.recognised, Ok(Import::Forge(Forge::Call | Forge::CallAsync)))
        };
        match self.imports.iter().any(by_name) {
            true => Callable::Any,
            false => Callable::of_imports(self.tools().cloned().collect()),
        }
    }

    /// Everything that the declarations alone say is wrong, with a grant of
    /// these tools under these limits.
    #[must_use]
    pub fn violations(&self, granted: &[ToolName], limits: &RunLimits) -> Vec<Violation> {
        let mut found = Vec::new();
        for import in &self.imports {
            let (why, ungranted) = match &import.recognised {
                Err(why) => (why.as_str(), None),
                Ok(Import::Tool(tool)) if !granted.contains(tool) => (UNGRANTED, Some(tool)),
                Ok(_) => continue,
            };
            let (module, name) = (shown(&import.module), shown(&import.name));
            let hint = match (&*import.module, &*import.name) {
                ("env", "abort") => {
                    " (AssemblyScript: asc --use abort= leaves it out; to have errors logged, see \
                     examples/programs/lib/forge.ts)"
                        .into()
                }
                ("env", "seed") => " (AssemblyScript's Math.random: take forge.random)".into(),
                (parted, _) if let Some(server) = parted.strip_prefix("tool.") => format!(
                    " (the module of every tool is `tool`: import \"tool\" \"{}.{name}\")",
                    shown(server)
                ),
                _ => String::new(),
            };
            let message = format!("import {module}.{name}: {why}{hint}");
            let ungranted = ungranted.cloned();
            found.push(Violation { kind: RejectKind::Import, message, ungranted });
        }
        let mut add = |kind, message| found.push(Violation { kind, message, ungranted: None });
        if self.has_start {
            let message = "the module has a start section; export _initialize instead \
                           (AssemblyScript: asc --exportStart _initialize)"
                .into();
            add(RejectKind::StartSection, message);
        }
        let export = |name: &str| self.exports.iter().find(|export| export.name == name);
        if export("memory").is_none_or(|export| export.kind != "memory") {
            add(RejectKind::Export, "the module exports no memory named `memory`".into());
        }
        let entries = [
            ("forge_run", Signature { params: &[], result: Some(Value::I32) }),
            ("_start", Signature { params: &[], result: None }),
        ];
        let mut exported = entries
            .iter()
            .filter_map(|(name, expected)| export(name).map(|found| (*name, found, expected)));
        let fits = |found: &ExportFound, expected| {
            found.ty.as_deref().is_some_and(|ty| has_type(ty, expected))
        };
        // The first that is there is the one that is called.
        match exported.next() {
            Some((_, found, expected)) if fits(found, expected) => {}
            Some((name, found, expected)) => {
                let is = found.signature().unwrap_or_else(|| found.kind.into());
                let message = format!("the export `{name}` is {is}, the ABI has {expected}");
                add(RejectKind::Export, message);
            }
            None => {
                let message = "the module exports neither `forge_run` (func (result i32)) nor \
                               WASI's `_start` (func)";
                add(RejectKind::Export, message.into());
            }
        }
        if let Some((initial_bytes, _)) = self.memory
            && initial_bytes > limits.memory_bytes
        {
            let over = OverLimit {
                what: "initial memory",
                got: initial_bytes,
                limit: limits.memory_bytes,
            };
            add(RejectKind::TooLarge, over.to_string());
        }
        found
    }
}

/// What is wrong with the sections of a module, and at which byte; what functions do is
/// not looked at.
#[must_use]
pub fn malformed(module: &[u8]) -> Option<String> {
    Parser::new(0).parse_all(module).find_map(|payload| Some(payload.err()?.to_string()))
}

/// A program that passed admission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Of all its bytes, the signature included.
    pub digest: [u8; 32],
    /// The hash that was signed.
    pub sha256: [u8; 32],
    /// Who signed it.
    pub signer: TrustKey,
    /// What it declares.
    pub shape: Shape,
}

/// Admission by a set of keys. It remembers the programs it admitted last: a
/// signature that was good for these very bytes and one of these keys is good
/// for them again.
#[derive(Debug)]
pub struct Admission {
    trust: TrustKeys,
    /// The most recently used first.
    known: Mutex<VecDeque<Arc<Admitted>>>,
}

/// Programs that are remembered, and how large they may be, in bytes. What one
/// declares is mostly smaller than it, and at its bounds some MiB.
pub(crate) const KNOWN_MAX: usize = 64;
const KNOWN_BYTES_MAX: usize = 64 * 1024;

impl Admission {
    /// Admits what these keys sign.
    #[must_use]
    pub fn new(trust: TrustKeys) -> Self {
        Self { trust, known: Mutex::default() }
    }

    /// Whose signatures count.
    #[must_use]
    pub fn trust(&self) -> &TrustKeys {
        &self.trust
    }

    /// The same as [`admit`], faster for a program that came before.
    ///
    /// # Errors
    /// As [`admit`].
    pub fn admit(&self, program: &[u8], limits: &RunLimits) -> Result<Arc<Admitted>, Violation> {
        if program.len() > KNOWN_BYTES_MAX {
            return admit(program, &self.trust, limits).map(Arc::new);
        }
        within(program, limits)?;
        let digest: [u8; 32] = Sha256::digest(program).into();
        let mut known = lock(&self.known);
        if let Some(at) = known.iter().position(|admitted| admitted.digest == digest)
            && let Some(admitted) = known.remove(at)
        {
            known.push_front(Arc::clone(&admitted));
            return Ok(admitted);
        }
        drop(known);
        let admitted = Arc::new(admitted(program, digest, &self.trust)?);
        let mut known = lock(&self.known);
        known.truncate(KNOWN_MAX - 1);
        known.push_front(Arc::clone(&admitted));
        Ok(admitted)
    }
}

/// The part of admission that needs no grant: sizes, signature, declarations.
///
/// # Errors
/// The first violation. Nothing but section boundaries is parsed before the
/// signature is good.
pub fn admit(program: &[u8], trust: &TrustKeys, limits: &RunLimits) -> Result<Admitted, Violation> {
    within(program, limits)?;
    admitted(program, Sha256::digest(program).into(), trust)
}

/// The same for one that is not too large, and with its digest.
fn admitted(program: &[u8], digest: [u8; 32], trust: &TrustKeys) -> Result<Admitted, Violation> {
    let verified = trust
        .verify(program)
        .map_err(|error| Violation::new(RejectKind::Signature, unverified(program, error)))?;
    Ok(Admitted {
        digest,
        sha256: verified.sha256(),
        signer: verified.signer(),
        shape: Shape::read(verified.bytes())?,
    })
}

/// Why a program is not verified, with what to do where that is known.
#[must_use]
pub fn unverified(program: &[u8], error: SignatureError) -> String {
    const SIGN: &str = "`forge-vmm sign --key signer.pem";
    match error {
        SignatureError::NotCoreModule if is_text(program) => format!(
            "this is WebAssembly text, and what runs is a signed module: {SIGN} program.wat -o \
             program.wasm` assembles a .wat and signs it"
        ),
        SignatureError::Unsigned => format!("{error}: {SIGN} IN.wasm -o OUT.wasm` signs it"),
        _ => error.to_string(),
    }
}

/// Whether these bytes begin as WebAssembly text does: with a parenthesis or a
/// comment.
#[must_use]
pub fn is_text(program: &[u8]) -> bool {
    let program = program.trim_ascii_start();
    program.starts_with(b"(") || program.starts_with(b";;")
}

fn within(program: &[u8], limits: &RunLimits) -> Result<(), Violation> {
    if program.len() <= limits.program_bytes as usize {
        return Ok(());
    }
    let over = OverLimit {
        what: "program_bytes",
        got: program.len() as u64,
        limit: limits.program_bytes.into(),
    };
    Err(Violation::new(RejectKind::TooLarge, over.to_string()))
}

/// Declarations are bounded here as in the guest: three bytes of a module are an
/// export, and what is made of one takes a hundred times as much.
fn read_shape(module: &[u8]) -> Result<Shape, ShapeError> {
    let mut shape = Shape::default();
    let mut types: Vec<Option<Arc<FuncType>>> = Vec::new();
    let mut functions: Vec<u32> = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::TypeSection(section) => {
                shape::within("types", section.count(), shape::TYPES_MAX)?;
                for group in section {
                    for sub in group?.types() {
                        types.push(match &sub.composite_type.inner {
                            wasmparser::CompositeInnerType::Func(func) => {
                                Some(Arc::new(func.clone()))
                            }
                            _ => None,
                        });
                    }
                }
            }
            Payload::ImportSection(section) => {
                shape::within("imports", section.count(), shape::IMPORTS_MAX)?;
                for import in section {
                    let import = import?;
                    let ty = match import.ty {
                        TypeRef::Func(index) => {
                            functions.push(index);
                            types.get(index as usize).cloned().flatten()
                        }
                        _ => None,
                    };
                    shape.imports.push(ImportFound {
                        module: import.module.into(),
                        name: import.name.into(),
                        recognised: recognise(import.module, import.name, ty.as_deref()),
                        ty,
                    });
                }
            }
            Payload::FunctionSection(section) => {
                shape::within("functions", section.count(), shape::FUNCTIONS_MAX)?;
                shape.functions = section.count();
                for index in section {
                    functions.push(index?);
                }
            }
            Payload::MemorySection(section) => {
                for memory in section {
                    let memory = memory?;
                    let bytes = |pages: u64| pages.saturating_mul(WASM_PAGE_BYTES);
                    shape.memory = Some((bytes(memory.initial), memory.maximum.map(bytes)));
                }
            }
            Payload::ExportSection(section) => {
                shape::within("exports", section.count(), shape::EXPORTS_MAX)?;
                for export in section {
                    let export = export?;
                    let function = |index: u32| {
                        let ty = *functions.get(index as usize)?;
                        types.get(ty as usize)?.clone()
                    };
                    shape.exports.push(ExportFound {
                        name: export.name.into(),
                        kind: match export.kind {
                            ExternalKind::Func => "func",
                            ExternalKind::Table => "table",
                            ExternalKind::Memory => "memory",
                            ExternalKind::Global => "global",
                            ExternalKind::Tag => "tag",
                        },
                        ty: match export.kind {
                            ExternalKind::Func => function(export.index),
                            _ => None,
                        },
                    });
                }
            }
            Payload::StartSection { .. } => shape.has_start = true,
            // Code and data are the guest's to look at.
            Payload::CodeSectionStart { .. } => break,
            _ => {}
        }
    }
    Ok(shape)
}

fn recognise(module: &str, name: &str, ty: Option<&FuncType>) -> Result<Import, String> {
    let import = Import::recognise(module, name).map_err(|why| why.to_string())?;
    let expected = import.signature();
    match ty {
        Some(found) if has_type(found, &expected) => Ok(import),
        Some(found) => Err(format!("is {}, the ABI has {expected}", type_text(found))),
        None => Err(format!("is no function, the ABI has {expected}")),
    }
}

fn has_type(found: &FuncType, expected: &Signature) -> bool {
    let value = |value: &Value| match value {
        Value::I32 => ValType::I32,
        Value::I64 => ValType::I64,
    };
    found.params().iter().copied().eq(expected.params.iter().map(value))
        && found.results().iter().copied().eq(expected.result.iter().map(value))
}

/// A function type in the text format, of a long list the beginning.
fn type_text(ty: &FuncType) -> String {
    let mut text = String::from("(func");
    for (part, values) in [("param", ty.params()), ("result", ty.results())] {
        if !values.is_empty() {
            text.push_str(&format!(" ({part}"));
            for value in values.iter().take(TYPE_VALUES_SHOWN) {
                text.push_str(&format!(" {value}"));
            }
            text.push_str(if values.len() > TYPE_VALUES_SHOWN { " …)" } else { ")" });
        }
    }
    text.push(')');
    text
}

/// Parameters, or results, of a type that are shown.
const TYPE_VALUES_SHOWN: usize = 16;

/// A name that a module gave, made safe to print, and cut.
#[must_use]
pub fn shown(name: &str) -> String {
    match name.char_indices().nth(NAME_CHARS_MAX) {
        None => visible(name),
        Some((end, _)) => format!("{}…", visible(&name[..end])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::signature::SignerKey;

    const GOOD: &str = r#"(module
        (import "tool" "inventory.find" (func (param i32 i32) (result i32)))
        (import "forge" "output" (func (param i32 i32) (result i32)))
        (memory (export "memory") 1 4)
        (func (export "forge_run") (result i32) i32.const 0))"#;

    fn shape(text: &str) -> Shape {
        Shape::read(&wat::parse_str(text).unwrap()).unwrap()
    }

    fn tool(name: &str) -> ToolName {
        ToolName::parse(name).unwrap()
    }

    fn messages(text: &str, granted: &[ToolName]) -> Vec<String> {
        let found = shape(text).violations(granted, &RunLimits::default());
        found.into_iter().map(|violation| violation.message).collect()
    }

    #[test]
    fn a_program_whose_imports_are_granted_has_no_violations() {
        assert_eq!(messages(GOOD, &[tool("inventory.find")]), Vec::<String>::new());
        assert_eq!(shape(GOOD).memory, Some((65_536, Some(4 * 65_536))));
        assert_eq!(shape(GOOD).tools().collect::<Vec<_>>(), [&tool("inventory.find")]);
    }

    #[test]
    fn an_import_that_is_not_granted_is_named() {
        let found = messages(GOOD, &[tool("inventory.other")]);
        assert_eq!(found, ["import tool.inventory.find: the grant does not name this tool"]);
    }

    #[test]
    fn every_violation_is_found_not_only_the_first() {
        let found = messages(
            r#"(module
                (import "env" "abort" (func))
                (import "wasi_snapshot_preview1" "sock_open" (func))
                (import "forge" "log" (func (param i32)))
                (func $f) (start $f))"#,
            &[],
        );
        assert_eq!(found.len(), 6, "{found:#?}");
        assert!(found[2].contains("is (func (param i32)), the ABI has"), "{}", found[2]);
    }

    #[test]
    fn what_a_guest_would_call_is_held_to_its_type_whatever_else_is_exported() {
        let found = |exports: &str| {
            messages(&format!("(module (memory (export \"memory\") 1) {exports})"), &[])
        };
        let start = "(func (export \"_start\"))";
        let run = |result: &str| {
            format!("(func (export \"forge_run\") (result {result}) ({result}.const 0))")
        };
        assert_eq!(found(&format!("{start}{}", run("i32"))), Vec::<String>::new());
        assert_eq!(found(start), Vec::<String>::new());
        let wrong = found(&format!("{start}{}", run("i64")));
        assert!(wrong.len() == 1 && wrong[0].contains("`forge_run` is"), "{wrong:?}");
        let wrong = found(&format!("{}(func (export \"_start\") (param i32))", run("i32")));
        assert_eq!(wrong, Vec::<String>::new(), "nobody calls it");
    }

    #[test]
    fn a_module_that_declares_more_than_a_guest_takes_is_refused_while_it_is_read() {
        let exports = |count: u32| {
            let names = (0..count).map(|at| format!("(export \"{at}\" (func 0))"));
            let wide = " externref".repeat(128);
            format!("(module (func (param{wide})) {})", names.collect::<String>())
        };
        let read = |text: &str| Shape::read(&wat::parse_str(text).unwrap());
        let refused = read(&exports(shape::EXPORTS_MAX + 1)).unwrap_err();
        assert_eq!(refused.kind, RejectKind::TooLarge);
        assert!(refused.message.contains("exports"), "{}", refused.message);
        // And what is made of one is small however it is typed.
        let found = read(&exports(shape::EXPORTS_MAX)).unwrap().exports;
        let bytes = |it: &ExportFound| it.signature().map_or(0, |text| text.len());
        assert!(found.iter().map(bytes).max() < Some(256));
        for (what, text) in [
            ("imports", "(import \"a\" \"b\" (func))".repeat(1_001)),
            ("types", "(type (func (param i64)))".repeat(10_001)),
            ("functions", "(func)".repeat(20_001)),
        ] {
            let refused = read(&format!("(module {text})")).unwrap_err();
            assert!(refused.message.contains(what), "{}", refused.message);
        }
    }

    #[test]
    fn an_unsigned_program_is_refused_before_it_is_parsed() {
        let key = SignerKey::from_secret(&[1; 32]);
        let trust = TrustKeys::new([key.trust_key()]).unwrap();
        // Sound section boundaries, and nonsense inside them.
        let mut nonsense = b"\0asm\x01\0\0\0".to_vec();
        nonsense.extend_from_slice(&[1, 3, 0xff, 0xff, 0xff]);
        let limits = RunLimits::default();
        let refused = admit(&nonsense, &trust, &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::Signature);
        let signed = key.sign(&nonsense).unwrap();
        let refused = admit(&signed, &trust, &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::Invalid);
    }

    #[test]
    fn what_is_text_or_unsigned_is_told_how_to_become_a_signed_module() {
        let key = SignerKey::from_secret(&[1; 32]);
        let trust = TrustKeys::new([key.trust_key()]).unwrap();
        let said = |program: &[u8]| {
            let refused = admit(program, &trust, &RunLimits::default()).unwrap_err();
            assert_eq!(refused.kind, RejectKind::Signature);
            refused.message
        };
        for text in ["(module)", "\n ;; says nothing\n(module)", "(; nor this ;) (module)"] {
            let said = said(text.as_bytes());
            assert!(said.contains("WebAssembly text"), "{said}");
            assert!(said.contains("forge-vmm sign --key signer.pem program.wat -o"), "{said}");
        }
        let unsigned = said(&wat::parse_str(GOOD).unwrap());
        assert!(unsigned.contains("not signed: `forge-vmm sign --key"), "{unsigned}");
        for other in [&b"\x7fELF(module)"[..], b"", b"\0asm\x0d\0\x01\0"] {
            assert!(!said(other).contains("text"), "{other:?}");
        }
    }

    #[test]
    fn a_program_over_the_limit_is_refused_by_its_size() {
        let limits = RunLimits { program_bytes: 7, ..RunLimits::default() };
        let refused = admit(&[0; 8], &TrustKeys::default(), &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::TooLarge);
    }

    #[test]
    fn admission_remembers_a_program_and_answers_as_the_first_time() {
        let key = SignerKey::from_secret(&[1; 32]);
        let admission = Admission::new(TrustKeys::new([key.trust_key()]).unwrap());
        let limits = RunLimits::default();
        let program = key.sign(&wat::parse_str(GOOD).unwrap()).unwrap();
        let first = admission.admit(&program, &limits).unwrap();
        let again = admission.admit(&program, &limits).unwrap();
        assert!(Arc::ptr_eq(&first, &again), "it was looked at again");
        assert_eq!(*again, admit(&program, &admission.trust, &limits).unwrap());
    }

    #[test]
    fn admission_that_remembers_is_not_fooled() {
        let key = SignerKey::from_secret(&[1; 32]);
        let trusting = |key: &SignerKey| TrustKeys::new([key.trust_key()]).unwrap();
        let admission = Admission::new(trusting(&key));
        let limits = RunLimits::default();
        let program = key.sign(&wat::parse_str(GOOD).unwrap()).unwrap();
        admission.admit(&program, &limits).unwrap();
        // Another byte anywhere: in the header, in the signature, in the code.
        for at in 0..program.len() {
            let mut flipped = program.clone();
            flipped[at] ^= 1;
            admission.admit(&flipped, &limits).unwrap_err();
        }
        // The same code by somebody else, and the same bytes for who trusts
        // somebody else.
        let other = SignerKey::from_secret(&[2; 32]);
        let by_other = other.sign(&wat::parse_str(GOOD).unwrap()).unwrap();
        let refused = admission.admit(&by_other, &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::Signature);
        let refused = Admission::new(trusting(&other)).admit(&program, &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::Signature);
        // A run that may be given less.
        let program_bytes = program.len() as u32 - 1;
        let refused = admission
            .admit(&program, &RunLimits { program_bytes, ..RunLimits::default() })
            .unwrap_err();
        assert_eq!(refused.kind, RejectKind::TooLarge);
        // And what was refused is not remembered as good.
        let refused = admission.admit(&by_other, &limits).unwrap_err();
        assert_eq!(refused.kind, RejectKind::Signature);
        admission.admit(&program, &limits).unwrap();
    }

    #[test]
    fn admission_remembers_so_many_programs_and_no_large_ones() {
        let key = SignerKey::from_secret(&[1; 32]);
        let admission = Admission::new(TrustKeys::new([key.trust_key()]).unwrap());
        let limits = RunLimits::default();
        let program = |number: usize, padding: usize| {
            let text = format!(
                "(module (memory (export \"memory\") 1) (data (i32.const 0) \"{}\")
                    (func (export \"forge_run\") (result i32) i32.const {number}))",
                "x".repeat(padding)
            );
            key.sign(&wat::parse_str(text).unwrap()).unwrap()
        };
        let large = program(0, KNOWN_BYTES_MAX);
        let first = admission.admit(&large, &limits).unwrap();
        assert!(!Arc::ptr_eq(&first, &admission.admit(&large, &limits).unwrap()));
        assert_eq!(admission.known.lock().unwrap().len(), 0);

        let used = admission.admit(&program(0, 0), &limits).unwrap();
        let unused = admission.admit(&program(1, 0), &limits).unwrap();
        for number in 2..=KNOWN_MAX {
            admission.admit(&program(number, 0), &limits).unwrap();
            assert!(Arc::ptr_eq(&used, &admission.admit(&program(0, 0), &limits).unwrap()));
        }
        assert_eq!(admission.known.lock().unwrap().len(), KNOWN_MAX);
        // The one used longest ago went.
        assert!(!Arc::ptr_eq(&unused, &admission.admit(&program(1, 0), &limits).unwrap()));
    }

    #[test]
    fn names_cannot_forge_the_terminal() {
        assert_eq!(shown("a\x1b[2Jb"), "a\\u{1b}[2Jb");
        for mover in ['\u{61c}', '\u{200f}', '\u{2028}', '\u{2029}', '\u{202e}', '\u{2066}'] {
            assert_eq!(shown(&format!("a{mover}b")), format!("a{}b", mover.escape_unicode()));
        }
        assert_eq!(shown(&"x".repeat(200)).chars().count(), NAME_CHARS_MAX + 1);
    }

    #[test]
    fn nothing_is_said_that_is_not_seen() {
        for unseen in ['\u{ad}', '\u{200b}', '\u{2062}', '\u{3164}', '\u{feff}', '\u{e0049}'] {
            assert_eq!(shown(&format!("a{unseen}b")), format!("a{}b", unseen.escape_unicode()));
            assert_eq!(shown(&format!("é{unseen}b")), format!("é{}b", unseen.escape_unicode()));
        }
        // What these are there for, and no more of them.
        for written in
            ["⚠\u{fe0f} deletes", "❤\u{fe0f}\u{200d}🔥", "👩\u{200d}💻", "می\u{200c}خواهم"]
        {
            assert_eq!(shown(written), written);
        }
        assert_eq!(shown("⚠\u{fe0f}\u{fe0f}a\u{fe0f}"), "⚠\u{fe0f}\\u{fe0f}a\\u{fe0f}");
    }

    #[test]
    fn what_begins_with_as_much_memory_as_it_may_have_is_admitted_and_with_more_is_not() {
        let limits = RunLimits { memory_bytes: 65_536, ..RunLimits::default() };
        let found = |pages: u32| {
            let text = format!(
                "(module (memory (export \"memory\") {pages})
                    (func (export \"forge_run\") (result i32) i32.const 0))"
            );
            shape(&text).violations(&[], &limits)
        };
        assert_eq!(found(1), []);
        let [over] = &found(2)[..] else { panic!("{:?}", found(2)) };
        assert_eq!(over.kind, RejectKind::TooLarge);
    }

    #[test]
    fn what_is_exported_as_memory_is_one() {
        let found = messages(
            r#"(module (memory 1) (func (export "memory"))
                (func (export "forge_run") (result i32) i32.const 0))"#,
            &[],
        );
        assert_eq!(found, ["the module exports no memory named `memory`"]);
    }

    #[test]
    fn a_program_that_calls_by_name_at_once_or_later_may_call_any_tool() {
        let callable = |text: &str| shape(text).callable();
        let imports = Callable::of_imports(vec![tool("inventory.find")]);
        assert_eq!(callable(GOOD), imports);
        for call in [Forge::Call, Forge::CallAsync] {
            let (name, signature) = (call.name(), call.signature());
            let wasm = |value: &Value| match value {
                Value::I32 => " i32",
                Value::I64 => " i64",
            };
            let params: String = signature.params.iter().map(wasm).collect();
            let result = signature.result.as_ref().map_or("", wasm);
            let import =
                format!("(import \"forge\" \"{name}\" (func (param{params}) (result{result})))");
            let text = GOOD.replacen("(module", &format!("(module {import}"), 1);
            assert_eq!(callable(&text), Callable::Any, "{name}");
        }
    }
}
