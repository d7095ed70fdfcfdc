//! What has to be done with a program before it runs, on the host.

use std::time::Instant;

use forge_guest_init::engine;
use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;
use wasmi::{Engine, Extern, Func, Instance, Module, Store};

use super::{Case, said};
use crate::bench::program::{self, Program};

/// The benched program, for who checks its signature by tables of its key, as
/// services and the guests of a base do.
pub(super) struct Signed {
    program: Vec<u8>,
    trust: TrustKeys,
}

impl Signed {
    pub(super) fn new() -> Result<Self, String> {
        let Program { signed, trust, .. } = Program::new()?;
        Ok(Self { program: signed, trust: trust.with_tables() })
    }

    pub(super) fn verify(&self) -> Result<(), String> {
        self.trust.verify(&self.program).map(drop).map_err(said)
    }
}

struct VerifyFloor(Program);

pub(super) fn verify() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(VerifyFloor(Program::new()?)))
}

impl Case for VerifyFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.0.trust.verify(&self.0.signed).map_err(said)?;
        Ok(started.elapsed().as_nanos() as u64)
    }
}

/// The benched program, for wasmi alone.
pub(super) struct Parsed {
    module: Vec<u8>,
    limits: RunLimits,
}

impl Parsed {
    pub(super) fn new() -> Result<Self, String> {
        // Or glibc gives memory back after each time, and the next one pays for
        // page faults that a guest does not have.
        // SAFETY: has no preconditions.
        unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, 256 << 20) };
        Ok(Self { module: program::module().map_err(said)?, limits: RunLimits::default() })
    }

    /// Parses, compiles and instantiates it.
    pub(super) fn instantiate(&self) -> Result<(Store<()>, Instance), String> {
        let engine = Engine::new(&engine::config(&self.limits));
        let module = Module::new(&engine, &self.module).map_err(said)?;
        let mut store = Store::new(&engine, ());
        let imports: Vec<Extern> = module
            .imports()
            .filter_map(|import| import.ty().func().cloned())
            .map(|ty| Func::new(&mut store, ty, |_, _, _| Ok(())).into())
            .collect();
        let instance = Instance::new(&mut store, &module, &imports).map_err(said)?;
        Ok((store, instance))
    }
}

pub(super) fn parse() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(Parsed::new()?))
}

impl Case for Parsed {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        let (store, instance) = self.instantiate()?;
        let ns = started.elapsed().as_nanos() as u64;
        match instance.get_func(&store, "forge_run") {
            Some(_) => Ok(ns),
            None => Err("the instance has no forge_run".into()),
        }
    }
}
