//! A program on its way in: signature, admission, and the interpreter's parse.

use std::hint::black_box;

use forge_guest_init::{engine, shape};
use forge_protocol::limits::RunLimits;
use forge_vmm::admission::{self, Shape};
use forge_vmm::bench::program::{self, Program};
use wasmi::{Engine, Extern, Func, Instance, Module, Store};

use crate::{Entry, Path, said, step};

pub(crate) const ENTRIES: &[Entry] = &[
    Entry { name: "program/verify", make: verify },
    Entry { name: "program/admit", make: admit },
    Entry { name: "program/read its shape", make: read_shape },
    Entry { name: "program/bound its shape", make: bound_shape },
    Entry { name: "program/parse and instantiate", make: parse },
];

fn verify() -> Result<Box<dyn Path>, String> {
    let program = Program::new()?;
    Ok(step(move || program.trust.verify(black_box(&program.signed)).map(|_| ()).map_err(said)))
}

fn admit() -> Result<Box<dyn Path>, String> {
    let program = Program::new()?;
    let limits = RunLimits::default();
    Ok(step(move || {
        admission::admit(black_box(&program.signed), &program.trust, &limits)
            .map(|_| ())
            .map_err(|violation| violation.message)
    }))
}

/// What admission reads on the host.
fn read_shape() -> Result<Box<dyn Path>, String> {
    let module = program::module().map_err(said)?;
    Ok(step(move || {
        Shape::read(black_box(&module)).map(drop).map_err(|violation| violation.message)
    }))
}

/// What the guest counts before wasmi sees the module.
fn bound_shape() -> Result<Box<dyn Path>, String> {
    let module = program::module().map_err(said)?;
    Ok(step(move || {
        shape::check(black_box(&module)).map(|_| ()).map_err(|error| format!("{error:?}"))
    }))
}

/// What the guest has wasmi do.
fn parse() -> Result<Box<dyn Path>, String> {
    let module = program::module().map_err(said)?;
    let limits = RunLimits::default();
    Ok(step(move || {
        let engine = Engine::new(&engine::config(&limits));
        let module = Module::new(&engine, black_box(&module)).map_err(said)?;
        let mut store = Store::new(&engine, ());
        let imports: Vec<Extern> = module
            .imports()
            .filter_map(|import| import.ty().func().cloned())
            .map(|ty| Func::new(&mut store, ty, |_, _, _| Ok(())).into())
            .collect();
        black_box(Instance::new(&mut store, &module, &imports).map_err(said)?);
        Ok(())
    }))
}
