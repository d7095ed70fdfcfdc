//! One program and its run: verified, compiled, instantiated; then started,
//! and followed to its end.
//!
//! Nothing of a run is here before the program is instantiated, so that a
//! prepared program can be kept for any run. What depends on the run is set
//! by its start: identity, time, seed, input, and which of the program's tools
//! are granted.

use alloc::vec::Vec;

use forge_protocol::ending::{Ending, RejectKind, TrapKind};
use forge_protocol::guest::{Ended, LoadOrder, RunOrder};
use forge_protocol::limits::{MEMORY_BYTES_MAX, RunLimits};
use forge_protocol::signature::{TrustKeys, VerifiedProgram};
use wasmi::{Engine, Error, Extern, Func, Instance, Module, ResumableCall, Store, TrapCode, Val};

use crate::abi;
use crate::admission::{self, Admitted, Entry};
use crate::engine;
use crate::host::Host;
use crate::link::{Link, ServeError, Stream};
use crate::respelled;
use crate::shape::{self, ShapeError};
use crate::trap::{self, Stop, rejected};
use crate::untranslatable;

/// See [`crate::serve`].
pub(crate) fn serve<S: Stream + 'static>(
    stream: S,
    trust: &TrustKeys,
    ticks: fn() -> u64,
) -> Result<(), ServeError> {
    learn_the_cpu();
    let mut link = Link::new(stream);
    let LoadOrder { load, program } = link.receive_program()?;
    let arrived = ticks();
    let limits = load.limits;
    limits.within(&absolute_maxima()).map_err(ServeError::Order)?;
    let fuel = limits.fuel;
    let prepared = prepare(&limits, program, trust);
    link.may_go_on()?;
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(ending) => return link.ended(&refused(ending, ticks().saturating_sub(arrived))),
    };
    let mut store = Store::new(&prepared.engine, Host::new(link, limits));
    store.limiter(|host| &mut host.caps);
    let instance = match prepared.instantiate(&mut store, fuel) {
        Ok(instance) => instance,
        Err(error) => {
            let load_ticks = ticks().saturating_sub(arrived);
            return end(store, Err(error), fuel, load_ticks, 0);
        }
    };
    store.data_mut().link.loaded()?;
    let load_ticks = ticks().saturating_sub(arrived);

    // However long it takes for a run to come is nobody's loading time.
    let RunOrder { start, input } = store.data_mut().link.receive_run()?;
    let came = ticks();
    store.data_mut().link.may_go_on()?;
    if let Err(ending) = prepared.admitted.granted(&start.granted) {
        let load_ticks = load_ticks.saturating_add(ticks().saturating_sub(came));
        return store.data_mut().link.ended(&refused(ending, load_ticks));
    }
    store.data_mut().begin(&start, input);
    let started = ticks();
    let outcome = prepared.call(&mut store, instance);
    let run_ticks = ticks().saturating_sub(started);
    let load_ticks = load_ticks.saturating_add(started.saturating_sub(came));
    end(store, outcome, fuel, load_ticks, run_ticks)
}

/// Has both hash functions ask what this CPU can do, which each does when it is
/// used first, and keeps. The question leaves the guest, three times, and takes
/// 14 us where KVM runs in software. Asked before the greeting, it is asked once
/// for all guests that start from one base.
fn learn_the_cpu() {
    use sha2::{Digest as _, Sha256, Sha512};
    core::hint::black_box((Sha256::digest([]), Sha512::digest([])));
}

/// The end of a program that was refused.
fn refused(ending: Ending, load_ticks: u64) -> Ended {
    Ended { ending, fuel_used: 0, memory_peak_bytes: 0, logs_dropped: 0, load_ticks, run_ticks: 0 }
}

/// Tells how a program ended that had a store.
fn end<S: Stream + 'static>(
    mut store: Store<Host<S>>,
    outcome: Result<i32, Error>,
    fuel: u64,
    load_ticks: u64,
    run_ticks: u64,
) -> Result<(), ServeError> {
    let ending = match outcome {
        Ok(code) => Ending::Returned(code),
        Err(error) => trap::ending(error, &store.data().limits)?,
    };
    // Linear memory never shrinks: where it ended is its peak.
    let memory_peak_bytes = store.data().memory.map_or(0, |memory| memory.data_size(&store) as u64);
    let fuel_left = fuel_left(&store).unwrap_or(0);
    let host = store.data_mut();
    // Only the link can fail here, as nothing is called any more.
    if let Err(stop) = host.finish() {
        trap::ending(Error::host(stop), &host.limits)?;
    }
    host.link.ended(&Ended {
        ending,
        fuel_used: fuel.saturating_sub(fuel_left),
        memory_peak_bytes,
        logs_dropped: host.logs_dropped(),
        load_ticks,
        run_ticks,
    })
}

/// What frames and counters were built for, whatever an operator configured.
/// The interpreter's call stack is no part of `stack_bytes` and grows with
/// `recursion` alone, so that is not free to choose either.
fn absolute_maxima() -> RunLimits {
    RunLimits { memory_bytes: MEMORY_BYTES_MAX, wall_ms: u64::MAX, ..RunLimits::operator_maxima() }
}

/// A program that may run, if its tools are granted.
struct Prepared {
    engine: Engine,
    module: Module,
    admitted: Admitted,
}

/// A program of so many bytes is kept while it is compiled in another spelling, so that
/// what is wrong with it is told by the bytes that its author has.
const KEPT_BYTES_MAX: usize = 512 * 1024;

/// Verifies, bounds, compiles and admits a program, in this order. The engine has
/// its own form of it then, and its bytes are gone: a large program's heap is
/// better used by its run.
fn prepare(limits: &RunLimits, program: Vec<u8>, trust: &TrustKeys) -> Result<Prepared, Ending> {
    let verified = trust
        .verify(&program)
        .map_err(|why| rejected(RejectKind::Signature, alloc::format!("{why}")))?;
    match bounded(&verified)? {
        None => compile(limits, &program),
        Some(respelled) => {
            let kept = (program.len() <= KEPT_BYTES_MAX).then_some(program);
            let by_its_own = |ending| match kept {
                Some(program) => compile(limits, &program).err().unwrap_or(ending),
                None => ending,
            };
            compile(limits, &respelled).map_err(by_its_own)
        }
    }
}

/// Takes a [`VerifiedProgram`] and nothing else, so that no byte of a program
/// nobody trusted signed reaches a WebAssembly parser.
fn bounded(program: &VerifiedProgram<'_>) -> Result<Option<Vec<u8>>, Ending> {
    bounded_trusted(program.bytes())
}

/// See [`crate::check`].
pub(crate) fn check(limits: &RunLimits, module: &[u8]) -> Result<(), Ending> {
    let Some(respelled) = bounded_trusted(module)? else {
        return compile(limits, module).map(drop);
    };
    // What is wrong is told by the bytes that its author has.
    let anew = |ending| compile(limits, module).err().unwrap_or(ending);
    compile(limits, &respelled).map(drop).map_err(anew)
}

/// Holds bytes that the caller trusts to the bounds; gives them back if they have
/// to be [`respelled`](mod@respelled).
fn bounded_trusted(module: &[u8]) -> Result<Option<Vec<u8>>, Ending> {
    let refused = |error: ShapeError| match error {
        ShapeError::Over { .. } => rejected(RejectKind::TooLarge, error.told(module)),
        ShapeError::Malformed(_) => {
            rejected(RejectKind::Invalid, trap::told(alloc::format!("{error}"), module))
        }
    };
    shape::check(module).map_err(refused)?;
    if let Some(at) = untranslatable::find(module) {
        let why = "carries several values over others to labels of one height, which the \
                   interpreter gets wrong; drop the others before it";
        return Err(rejected(
            RejectKind::TooLarge,
            alloc::format!("the br_table at byte {at} of the module {why}"),
        ));
    }
    respelled::respelled(module).map_err(refused)
}

/// Compiles and admits bytes that are bounded.
fn compile(limits: &RunLimits, module: &[u8]) -> Result<Prepared, Ending> {
    let engine = Engine::new(&engine::config(limits));
    let module =
        Module::new(&engine, module).map_err(|error| trap::not_compiled(&error, module))?;
    let admitted = admission::admit(&module)?;
    Ok(Prepared { engine, module, admitted })
}

impl Prepared {
    /// Links the admitted imports, each to its function, and instantiates.
    /// Nothing of the program runs here: a start section has been refused.
    fn instantiate<S: Stream + 'static>(
        &self,
        store: &mut Store<Host<S>>,
        fuel: u64,
    ) -> Result<Instance, Error> {
        store.set_fuel(fuel)?;
        let imports: Vec<Extern> = self
            .admitted
            .imports
            .iter()
            .map(|import| Extern::Func(abi::function(&mut *store, import)))
            .collect();
        store.data_mut().link.instantiating(true);
        let instance = Instance::new(&mut *store, &self.module, &imports);
        store.data_mut().link.instantiating(false);
        // Nothing of the program runs here.
        let instance = instance.map_err(|error| match error.as_trap_code() {
            Some(TrapCode::MemoryOutOfBounds) => Error::host(Stop::Trap {
                kind: TrapKind::MemoryOutOfBounds,
                detail: "a data segment does not fit linear memory".into(),
            }),
            _ => error,
        })?;
        store.data_mut().memory = instance.get_memory(&*store, admission::MEMORY);
        Ok(instance)
    }

    fn call<S: Stream + 'static>(
        &self,
        store: &mut Store<Host<S>>,
        instance: Instance,
    ) -> Result<i32, Error> {
        let function = |store: &Store<Host<S>>, name| {
            // Admission has seen the export and its type.
            instance.get_func(store, name).ok_or_else(|| Error::new("an export is gone"))
        };
        let mut code = [Val::I32(0)];
        match self.admitted.entry {
            Entry::Forge { initialize } => {
                if initialize {
                    let initialize = function(store, admission::INITIALIZE)?;
                    call_in_slices(store, initialize, &mut [])?;
                }
                let run = function(store, admission::FORGE_RUN)?;
                call_in_slices(store, run, &mut code)?;
            }
            Entry::Wasi => {
                let start = function(store, admission::WASI_START)?;
                call_in_slices(store, start, &mut [])?;
            }
        }
        let [code] = code;
        code.i32().ok_or_else(|| Error::new("an export changed its type"))
    }
}

/// Calls a function without parameters, a slice of fuel at a time; why, see
/// [`engine`].
fn call_in_slices<S: Stream + 'static>(
    store: &mut Store<Host<S>>,
    function: Func,
    results: &mut [Val],
) -> Result<(), Error> {
    let called = slices(store, function, results);
    // A `table.grow` that the run could not have paid for in any slice.
    match store.data().caps.unpaid {
        Some(required) if fuel_left(store)? < required => Err(TrapCode::OutOfFuel.into()),
        _ => called,
    }
}

fn slices<S: Stream + 'static>(
    store: &mut Store<Host<S>>,
    function: Func,
    results: &mut [Val],
) -> Result<(), Error> {
    give_fuel(store, 0)?;
    let mut call = function.call_resumable(&mut *store, &[], results)?;
    loop {
        call = match call {
            ResumableCall::Finished => return Ok(()),
            ResumableCall::HostTrap(trap) => return Err(trap.into_host_error()),
            ResumableCall::OutOfFuel(paused) => {
                store.data_mut().may_go_on().map_err(Error::host)?;
                give_fuel(store, paused.required_fuel())?;
                paused.resume(&mut *store, results)?
            }
        };
    }
}

/// Gives wasmi a slice of what fuel the run has left, and at least `required`.
fn give_fuel<S>(store: &mut Store<Host<S>>, required: u64) -> Result<(), Error> {
    let left = fuel_left(store)?;
    if left < required {
        return Err(TrapCode::OutOfFuel.into());
    }
    let slice = engine::SLICE_FUEL.max(required).min(left);
    store.data_mut().fuel_reserve = left - slice;
    store.set_fuel(slice)
}

/// All the fuel that the run has left.
fn fuel_left<S>(store: &Store<Host<S>>) -> Result<u64, Error> {
    // Together they are never more than the run's limit.
    Ok(store.get_fuel()?.saturating_add(store.data().fuel_reserve))
}
