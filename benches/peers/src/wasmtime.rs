//! Bare wasmtime in this process. It is no VM: the program shares the address
//! space, the kernel and the rights of its host.

use std::time::Instant;

use forge_vmm::bench::program;
use forge_vmm::bench::{Case, Entry, Measure};
use wasmtime::{Caller, Engine, Linker, Module, Store};

use crate::said;

pub const ENTRIES: &[Entry] = &[
    entry("wasmtime_compile", "compile the module, instantiate, run", compile),
    entry("wasmtime_instantiate", "module compiled before: store, instantiate, run", instantiate),
];

type Make = fn() -> Result<Box<dyn Case>, String>;

const fn entry(name: &'static str, about: &'static str, make: Make) -> Entry {
    Entry { name, group: "peers", about, ratio_of: None, measure: Measure::Sampled(make) }
}

/// What the benched program's three imports work on.
#[derive(Default)]
struct Run {
    input: Vec<u8>,
    output: Vec<u8>,
}

struct Bare {
    engine: Engine,
    linker: Linker<Run>,
    bytes: Vec<u8>,
    compiled: Option<Module>,
    round: u64,
}

fn bare(compiled: bool) -> Result<Box<dyn Case>, String> {
    let engine = Engine::default();
    let bytes = program::module().map_err(said)?;
    let module = Module::new(&engine, &bytes).map_err(said)?;
    let mut linker = Linker::new(&engine);
    let memory = |caller: &mut Caller<'_, Run>| {
        let memory = caller.get_export("memory").and_then(|export| export.into_memory());
        memory.ok_or_else(|| wasmtime::Error::msg("the program has no memory"))
    };
    linker
        .func_wrap("forge", "input_len", |caller: Caller<'_, Run>| caller.data().input.len() as i32)
        .map_err(said)?;
    linker
        .func_wrap(
            "forge",
            "input_read",
            move |mut caller: Caller<'_, Run>, to: i32, from: i32, bytes: i32| {
                let memory = memory(&mut caller)?;
                let (memory, run) = memory.data_and_store_mut(&mut caller);
                let (to, from, bytes) = (to as usize, from as usize, bytes as usize);
                let source = run.input.get(from..from + bytes);
                let target = memory.get_mut(to..to + bytes);
                match source.zip(target) {
                    Some((source, target)) => target.copy_from_slice(source),
                    None => return Err(wasmtime::Error::msg("out of bounds")),
                }
                Ok(bytes as i32)
            },
        )
        .map_err(said)?;
    linker
        .func_wrap("forge", "output", move |mut caller: Caller<'_, Run>, at: i32, bytes: i32| {
            let memory = memory(&mut caller)?;
            let (memory, run) = memory.data_and_store_mut(&mut caller);
            let bytes = memory.get(at as usize..at as usize + bytes as usize);
            run.output.extend(bytes.ok_or_else(|| wasmtime::Error::msg("out of bounds"))?);
            Ok(0)
        })
        .map_err(said)?;
    let compiled = compiled.then_some(module);
    Ok(Box::new(Bare { engine, linker, bytes, compiled, round: 0 }))
}

fn compile() -> Result<Box<dyn Case>, String> {
    bare(false)
}

fn instantiate() -> Result<Box<dyn Case>, String> {
    bare(true)
}

impl Case for Bare {
    fn sample(&mut self) -> Result<u64, String> {
        self.round += 1;
        let input = format!("{{\"round\":{}}}", self.round).into_bytes();
        let expected = program::answer(&input);
        let started = Instant::now();
        let module = match &self.compiled {
            Some(module) => module.clone(),
            None => Module::new(&self.engine, &self.bytes).map_err(said)?,
        };
        let mut store = Store::new(&self.engine, Run { input, output: Vec::new() });
        let instance = self.linker.instantiate(&mut store, &module).map_err(said)?;
        let run = instance.get_typed_func::<(), i32>(&mut store, "forge_run").map_err(said)?;
        let code = run.call(&mut store, ()).map_err(said)?;
        let output = std::mem::take(&mut store.data_mut().output);
        drop(store);
        let ns = started.elapsed().as_nanos() as u64;
        match code == 0 && output == expected.as_bytes() {
            true => Ok(ns),
            false => Err(format!("the program returned {code} and a wrong answer")),
        }
    }
}
