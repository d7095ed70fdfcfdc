//! Module `wasi_snapshot_preview1`: what a program compiled for WASI preview 1
//! needs to start, to speak, to sleep and to end.
//!
//! Descriptor 0 is the run's input, 1 its output, 2 its log by lines; there is
//! no other, no file and no socket. Functions that ask for one exist because
//! libraries link them into programs that never call them: they refuse, and look
//! at no pointer. Error numbers and layouts are those of the
//! preview 1 witx definitions. Pointers of the others are held to the same rule as
//! everywhere: a bad one traps, it is no `EFAULT`.

mod poll;

use core::ops::Range;

use forge_protocol::abi::{Value, Wasi};
use wasmi::{AsContextMut, Caller, Error, Func, FuncType, Val, ValType};

use super::{COPY_BYTES_PER_FUEL, charge, parts, random, range, stop};
use crate::host::Host;
use crate::link::Stream;

const SUCCESS: i32 = 0;
const EBADF: i32 = 8;
const EINVAL: i32 = 28;
const ENOTDIR: i32 = 54;
const ENOTSOCK: i32 = 57;
const ENOTSUP: i32 = 58;
const ESPIPE: i32 = 70;
const ENOTCAPABLE: i32 = 76;

const STDIN: i32 = 0;
const STDOUT: i32 = 1;
const STDERR: i32 = 2;

const CLOCK_REALTIME: i32 = 0;
const CLOCK_MONOTONIC: i32 = 1;
/// What virtual time is counted in.
const CLOCK_STEP_NS: u64 = 1;

/// An `iovec`: pointer and length, 32 bits each.
const IOVEC_BYTES: usize = 8;
/// An `fdstat`.
const FDSTAT_BYTES: usize = 24;
/// A `filestat`, and where its type stands.
const FILESTAT_BYTES: usize = 64;
const FILESTAT_TYPE: usize = 16;
const FILETYPE_CHARACTER_DEVICE: u8 = 2;
const RIGHT_FD_READ: u64 = 1 << 1;
const RIGHT_FD_WRITE: u64 = 1 << 6;

/// The import of one function.
pub(super) fn function<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    function: Wasi,
) -> Func {
    match function {
        // With no argument and no variable there is nothing to write.
        Wasi::ArgsGet | Wasi::EnvironGet => {
            Func::wrap(store, |_: Caller<'_, Host<S>>, _: i32, _: i32| SUCCESS)
        }
        Wasi::ArgsSizesGet | Wasi::EnvironSizesGet => Func::wrap(store, sizes_get::<S>),
        Wasi::ClockTimeGet => Func::wrap(store, clock_time_get::<S>),
        Wasi::ClockResGet => Func::wrap(store, clock_res_get::<S>),
        Wasi::RandomGet => Func::wrap(
            store,
            |mut caller: Caller<'_, Host<S>>, pointer: i32, length: i32| -> Result<i32, Error> {
                random(&mut caller, pointer, length)?;
                Ok(SUCCESS)
            },
        ),
        Wasi::FdWrite => Func::wrap(store, fd_write::<S>),
        Wasi::FdRead => Func::wrap(store, fd_read::<S>),
        Wasi::FdFdstatGet => Func::wrap(store, fd_fdstat_get::<S>),
        Wasi::FdFilestatGet => Func::wrap(store, fd_filestat_get::<S>),
        Wasi::FdClose => Func::wrap(store, |mut caller: Caller<'_, Host<S>>, fd: i32| {
            if !is_open(&caller, fd) {
                return EBADF;
            }
            // An open one is 0, 1 or 2.
            caller.data_mut().closed[fd as usize] = true;
            SUCCESS
        }),
        // Nothing here blocks, what is written is appended, and written at once,
        // whatever is asked for.
        Wasi::FdFdstatSetFlags | Wasi::FdSync | Wasi::FdDatasync => {
            of_open(store, function, SUCCESS)
        }
        Wasi::FdSeek
        | Wasi::FdTell
        | Wasi::FdPread
        | Wasi::FdPwrite
        | Wasi::FdAdvise
        | Wasi::FdAllocate => of_open(store, function, ESPIPE),
        Wasi::FdFilestatSetSize | Wasi::FdFilestatSetTimes => of_open(store, function, EINVAL),
        Wasi::FdFdstatSetRights | Wasi::FdRenumber => of_open(store, function, ENOTSUP),
        Wasi::FdReaddir => of_open(store, function, ENOTDIR),
        Wasi::SockAccept | Wasi::SockRecv | Wasi::SockSend | Wasi::SockShutdown => {
            of_open(store, function, ENOTSOCK)
        }
        // No descriptor is a folder that was opened before the start.
        Wasi::FdPrestatGet | Wasi::FdPrestatDirName => of_open(store, function, EBADF),
        // There is no folder that anything is in, whatever the descriptor.
        Wasi::PathOpen
        | Wasi::PathCreateDirectory
        | Wasi::PathFilestatGet
        | Wasi::PathFilestatSetTimes
        | Wasi::PathLink
        | Wasi::PathReadlink
        | Wasi::PathRemoveDirectory
        | Wasi::PathRename
        | Wasi::PathSymlink
        | Wasi::PathUnlinkFile => answering(store, function, |_, _| ENOTCAPABLE),
        Wasi::ProcRaise => answering(store, function, |_, _| ENOTSUP),
        Wasi::PollOneoff => Func::wrap(store, poll::oneoff::<S>),
        Wasi::SchedYield => Func::wrap(store, |_: Caller<'_, Host<S>>| SUCCESS),
        Wasi::ProcExit => {
            Func::wrap(store, |_: Caller<'_, Host<S>>, code: i32| -> Result<(), Error> {
                Err(Error::i32_exit(code))
            })
        }
    }
}

/// A function whose answer goes by its first argument, whatever else it is given.
fn answering<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    function: Wasi,
    answer: impl Fn(&Caller<'_, Host<S>>, i32) -> i32 + Send + Sync + 'static,
) -> Func {
    let value = |value: &Value| match value {
        Value::I32 => ValType::I32,
        Value::I64 => ValType::I64,
    };
    let signature = function.signature();
    let ty = FuncType::new(signature.params.iter().map(value), signature.result.iter().map(value));
    Func::new(store, ty, move |caller, params, results| {
        if let (Some(Val::I32(first)), [result]) = (params.first(), results) {
            *result = Val::I32(answer(&caller, *first));
        }
        Ok(())
    })
}

/// A function of a descriptor, whose answer is the same for each that is open.
fn of_open<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    function: Wasi,
    answer: i32,
) -> Func {
    answering(store, function, move |caller, fd| if is_open(caller, fd) { answer } else { EBADF })
}

/// Writes `bytes` where the program said.
fn write<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    pointer: i32,
    bytes: &[u8],
) -> Result<(), Error> {
    let (memory, _) = parts(caller)?;
    let target = range(memory, pointer, bytes.len() as i32)?;
    memory[target].copy_from_slice(bytes);
    Ok(())
}

fn sizes_get<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    count: i32,
    bytes: i32,
) -> Result<i32, Error> {
    write(&mut caller, count, &0u32.to_le_bytes())?;
    write(&mut caller, bytes, &0u32.to_le_bytes())?;
    Ok(SUCCESS)
}

fn clock_time_get<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    clock: i32,
    _precision: i64,
    target: i32,
) -> Result<i32, Error> {
    match clock {
        CLOCK_REALTIME | CLOCK_MONOTONIC => {
            let now = caller.data().clock.now_ns();
            write(&mut caller, target, &now.to_le_bytes())?;
            Ok(SUCCESS)
        }
        _ => Ok(EINVAL),
    }
}

fn clock_res_get<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    clock: i32,
    target: i32,
) -> Result<i32, Error> {
    match clock {
        CLOCK_REALTIME | CLOCK_MONOTONIC => {
            write(&mut caller, target, &CLOCK_STEP_NS.to_le_bytes())?;
            Ok(SUCCESS)
        }
        _ => Ok(EINVAL),
    }
}

/// Whether this is one of the three descriptors and the program has not closed it.
fn is_open<S>(caller: &Caller<'_, Host<S>>, fd: i32) -> bool {
    let closed = usize::try_from(fd).ok().and_then(|fd| caller.data().closed.get(fd));
    closed.is_some_and(|closed| !closed)
}

fn fd_fdstat_get<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    fd: i32,
    target: i32,
) -> Result<i32, Error> {
    if !is_open(&caller, fd) {
        return Ok(EBADF);
    }
    let rights = if fd == STDIN { RIGHT_FD_READ } else { RIGHT_FD_WRITE };
    // filetype u8, padding, flags u16, padding, rights u64, inherited u64.
    let mut fdstat = [0; FDSTAT_BYTES];
    fdstat[0] = FILETYPE_CHARACTER_DEVICE;
    fdstat[8..16].copy_from_slice(&rights.to_le_bytes());
    write(&mut caller, target, &fdstat)?;
    Ok(SUCCESS)
}

fn fd_filestat_get<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    fd: i32,
    target: i32,
) -> Result<i32, Error> {
    if !is_open(&caller, fd) {
        return Ok(EBADF);
    }
    // A device has no size, and these no times.
    let mut filestat = [0; FILESTAT_BYTES];
    filestat[FILESTAT_TYPE] = FILETYPE_CHARACTER_DEVICE;
    write(&mut caller, target, &filestat)?;
    Ok(SUCCESS)
}

/// Checks an `iovec` array and each stretch of memory it names, charges for
/// walking it, and says how many bytes they have. To copy them costs more.
fn check_iovecs<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    iovecs: i32,
    count: i32,
) -> Result<u64, Error> {
    let (memory, _) = parts(caller)?;
    let array = array(memory, iovecs, count, IOVEC_BYTES)?;
    charge(caller, u64::from(count as u32))?;
    let (memory, _) = parts(caller)?;
    let mut total = 0u64;
    for iovec in memory[array].chunks_exact(IOVEC_BYTES) {
        let (pointer, length) = iovec_at(iovec);
        total += range(memory, pointer, length)?.len() as u64;
    }
    Ok(total)
}

/// The pointer and length in eight bytes of an `iovec` array.
fn iovec_at(bytes: &[u8]) -> (i32, i32) {
    (i32::from_le_bytes(field(bytes, 0)), i32::from_le_bytes(field(bytes, 4)))
}

/// An array of so many entries, checked as every stretch of memory is.
fn array(memory: &[u8], pointer: i32, count: i32, each: usize) -> Result<Range<usize>, Error> {
    let bytes = u64::from(count as u32) * each as u64;
    // More than 2^32 bytes are past the end of any memory.
    range(memory, pointer, u32::try_from(bytes).unwrap_or(u32::MAX) as i32)
}

/// The bytes of a field of one entry.
fn field<const N: usize>(entry: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&entry[at..at + N]);
    field
}

fn fd_write<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    fd: i32,
    iovecs: i32,
    count: i32,
    written: i32,
) -> Result<i32, Error> {
    if fd == STDIN || !is_open(&caller, fd) {
        return Ok(EBADF);
    }
    let total = check_iovecs(&mut caller, iovecs, count)?;
    charge(&mut caller, total / COPY_BYTES_PER_FUEL)?;
    // More than a `size` can tell is an invalid array, not a short write.
    let Ok(total) = u32::try_from(total) else { return Ok(EINVAL) };
    if fd == STDERR {
        // Any byte may end a line, and each line is a record.
        charge(&mut caller, total.into())?;
    }
    let (memory, host) = parts(&mut caller)?;
    let memory = &*memory;
    let array = array(memory, iovecs, count, IOVEC_BYTES)?;
    for iovec in memory[array].chunks_exact(IOVEC_BYTES) {
        let (pointer, length) = iovec_at(iovec);
        let bytes = &memory[range(memory, pointer, length)?];
        if fd == STDOUT { host.output(bytes) } else { host.stderr(bytes) }.map_err(stop)?;
    }
    write(&mut caller, written, &total.to_le_bytes())?;
    Ok(SUCCESS)
}

fn fd_read<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    fd: i32,
    iovecs: i32,
    count: i32,
    read: i32,
) -> Result<i32, Error> {
    if fd != STDIN || !is_open(&caller, fd) {
        return Ok(EBADF);
    }
    let total = check_iovecs(&mut caller, iovecs, count)?;
    let host = caller.data();
    let given = total.min((host.input.len() - host.input_given) as u64);
    charge(&mut caller, given / COPY_BYTES_PER_FUEL)?;
    let (memory, host) = parts(&mut caller)?;
    let array = array(memory, iovecs, count, IOVEC_BYTES)?;
    let given_before = host.input_given;
    for at in array.step_by(IOVEC_BYTES) {
        // Read anew each time: a stretch may overlap the array itself.
        let (pointer, length) = iovec_at(&memory[at..at + IOVEC_BYTES]);
        let target = range(memory, pointer, length)?;
        let rest = &host.input[host.input_given..];
        if rest.is_empty() {
            break;
        }
        let count = rest.len().min(target.len());
        memory[target][..count].copy_from_slice(&rest[..count]);
        host.input_given += count;
    }
    let given = (host.input_given - given_before) as u32;
    write(&mut caller, read, &given.to_le_bytes())?;
    Ok(SUCCESS)
}
