//! The functions a program may import, over wasmi's `Caller`.
//!
//! Each pointer and length comes from the program. They are taken as unsigned,
//! added without wrapping and held against the memory's present size before a
//! byte is touched; what does not fit traps as `bad_pointer`, also where the
//! function would have copied less. Nothing here calls into the program or
//! allocates in its memory.
//!
//! Copies cost fuel, so that no loop over a host function works for free:
//! [`COPY_BYTES_PER_FUEL`] bytes a unit, as wasmi charges for `memory.copy`;
//! random numbers, which are hashed, [`RANDOM_FUEL_PER_BYTE`].

mod forge;
mod tool;
mod wasi;

use alloc::format;
use core::ops::Range;

use forge_protocol::abi::Import;
use forge_protocol::ending::TrapKind;
use wasmi::{AsContextMut, Caller, Error, Func, TrapCode};

use crate::host::Host;
use crate::link::Stream;
use crate::trap::Stop;

/// How many bytes a host function copies for one unit of fuel.
pub(crate) const COPY_BYTES_PER_FUEL: u64 = 64;
/// What one random byte costs.
pub(crate) const RANDOM_FUEL_PER_BYTE: u64 = 8;

/// The function behind an admitted import.
pub(crate) fn function<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    import: &Import,
) -> Func {
    match import {
        Import::Tool(name) => tool::function(store, name.clone()),
        Import::Forge(function) => forge::function(store, *function),
        Import::Wasi(function) => wasi::function(store, *function),
    }
}

/// The program's memory and the host's state, at once.
fn parts<'a, S: Stream>(
    caller: &'a mut Caller<'_, Host<S>>,
) -> Result<(&'a mut [u8], &'a mut Host<S>), Error> {
    match caller.data().memory {
        Some(memory) => Ok(memory.data_and_store_mut(caller)),
        // Imports are called after instantiation, and it set the memory.
        None => Err(stop(Stop::misuse("the program has no memory"))),
    }
}

/// A stretch of memory the program named, checked against the memory's size.
fn range(memory: &[u8], pointer: i32, length: i32) -> Result<Range<usize>, Error> {
    // The ABI's pointers and lengths are unsigned.
    let (start, length) = (pointer as u32 as usize, length as u32 as usize);
    match start.checked_add(length) {
        Some(end) if end <= memory.len() => Ok(start..end),
        _ => Err(stop(Stop::Trap {
            kind: TrapKind::BadPointer,
            detail: format!(
                "{length} bytes at {start:#x} are not within the {} bytes of memory",
                memory.len(),
            ),
        })),
    }
}

/// Takes fuel for copying `bytes` bytes.
fn charge_copy<S>(caller: &mut Caller<'_, Host<S>>, bytes: u64) -> Result<(), Error> {
    charge(caller, bytes / COPY_BYTES_PER_FUEL)
}

/// Takes fuel, first what wasmi holds, then from the reserve; or ends the
/// program with none left.
fn charge<S>(caller: &mut Caller<'_, Host<S>>, fuel: u64) -> Result<(), Error> {
    let held = caller.get_fuel()?;
    let missing = fuel.saturating_sub(held);
    let reserve = &mut caller.data_mut().fuel_reserve;
    match reserve.checked_sub(missing) {
        Some(left) => {
            *reserve = left;
            caller.set_fuel(held.saturating_sub(fuel))
        }
        None => {
            *reserve = 0;
            caller.set_fuel(0)?;
            Err(TrapCode::OutOfFuel.into())
        }
    }
}

fn stop(stop: Stop) -> Error {
    Error::host(stop)
}

/// Copies from `source` at `offset` to the program, as much as there is and
/// fits; gives the number of bytes.
fn copy_out(target: &mut [u8], source: &[u8], offset: i32) -> i32 {
    let rest = source.get(offset as u32 as usize..).unwrap_or_default();
    let count = rest.len().min(target.len());
    target[..count].copy_from_slice(&rest[..count]);
    // What is held has less than 2^31 bytes.
    count as i32
}

/// Fills a stretch of memory from the seeded generator.
fn random<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    pointer: i32,
    length: i32,
) -> Result<(), Error> {
    let (memory, _) = parts(caller)?;
    let target = range(memory, pointer, length)?;
    charge(caller, (target.len() as u64).saturating_mul(RANDOM_FUEL_PER_BYTE))?;
    let (memory, host) = parts(caller)?;
    host.random.fill(&mut memory[target]);
    Ok(())
}
