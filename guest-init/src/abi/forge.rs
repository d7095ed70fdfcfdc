//! Module `forge`: the environment's own functions.

use forge_protocol::abi::{CallCode, Forge};
use forge_protocol::limits::{LOG_RECORD_BYTES_MAX, TOOL_NAME_BYTES_MAX};
use forge_protocol::name::ToolName;
use wasmi::{AsContextMut, Caller, Error, Func};

use super::{charge_copy, copy_out, parts, random, range, stop, tool};
use crate::host::Host;
use crate::link::Stream;

/// The import of one function. Its type is that of [`Forge::signature`]; a
/// unit test holds each to it.
pub(super) fn function<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    function: Forge,
) -> Func {
    match function {
        Forge::RespRead => Func::wrap(store, resp_read::<S>),
        Forge::RespLen => Func::wrap(store, |caller: Caller<'_, Host<S>>| -> i32 {
            // What is held has less than 2^31 bytes; so has the input.
            caller.data().held.len() as i32
        }),
        Forge::InputLen => Func::wrap(store, |caller: Caller<'_, Host<S>>| -> i32 {
            caller.data().input.len() as i32
        }),
        Forge::InputRead => Func::wrap(store, input_read::<S>),
        Forge::Output => Func::wrap(store, output::<S>),
        Forge::Artifact => Func::wrap(store, artifact::<S>),
        Forge::Log => Func::wrap(store, log::<S>),
        Forge::NowNs => Func::wrap(store, |caller: Caller<'_, Host<S>>| -> i64 {
            i64::try_from(caller.data().clock.now_ns()).unwrap_or(i64::MAX)
        }),
        Forge::Random => Func::wrap(
            store,
            |mut caller: Caller<'_, Host<S>>, pointer: i32, length: i32| -> Result<(), Error> {
                random(&mut caller, pointer, length)
            },
        ),
        Forge::Call => Func::wrap(store, call::<S>),
        Forge::CallAsync => Func::wrap(store, call_async::<S>),
        Forge::Wait => Func::wrap(
            store,
            |mut caller: Caller<'_, Host<S>>, handle: i32| -> Result<i32, Error> {
                caller.data_mut().wait(handle).map_err(stop)
            },
        ),
        Forge::WaitAny => {
            Func::wrap(store, |mut caller: Caller<'_, Host<S>>| -> Result<i32, Error> {
                caller.data_mut().wait_any().map_err(stop)
            })
        }
    }
}

fn resp_read<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    target: i32,
    offset: i32,
    length: i32,
) -> Result<i32, Error> {
    let (memory, host) = parts(&mut caller)?;
    let target = range(memory, target, length)?;
    let count = copy_out(&mut memory[target], &host.held, offset);
    // Charged after the copy, which is bounded by what is held.
    charge_copy(&mut caller, count as u64)?;
    Ok(count)
}

fn input_read<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    target: i32,
    offset: i32,
    length: i32,
) -> Result<i32, Error> {
    let (memory, host) = parts(&mut caller)?;
    let target = range(memory, target, length)?;
    let count = copy_out(&mut memory[target], &host.input, offset);
    charge_copy(&mut caller, count as u64)?;
    Ok(count)
}

fn output<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    pointer: i32,
    length: i32,
) -> Result<i32, Error> {
    let (memory, host) = parts(&mut caller)?;
    let bytes = range(memory, pointer, length)?;
    let count = bytes.len();
    host.output(&memory[bytes]).map_err(stop)?;
    charge_copy(&mut caller, count as u64)?;
    Ok(0)
}

fn artifact<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    name: i32,
    name_length: i32,
    media_type: i32,
    media_type_length: i32,
    content: i32,
    content_length: i32,
) -> Result<i32, Error> {
    let (memory, host) = parts(&mut caller)?;
    let name = range(memory, name, name_length)?;
    let media_type = range(memory, media_type, media_type_length)?;
    let content = range(memory, content, content_length)?;
    let count = content.len();
    host.artifact(&memory[name], &memory[media_type], &memory[content]).map_err(stop)?;
    charge_copy(&mut caller, count as u64)?;
    Ok(0)
}

fn log<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    level: i32,
    pointer: i32,
    length: i32,
) -> Result<(), Error> {
    let (memory, host) = parts(&mut caller)?;
    let text = range(memory, pointer, length)?;
    let count = text.len().min(LOG_RECORD_BYTES_MAX as usize);
    host.log(level, &memory[text]).map_err(stop)?;
    charge_copy(&mut caller, count as u64)
}

fn call<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    name: i32,
    name_length: i32,
    request: i32,
    request_length: i32,
) -> Result<i32, Error> {
    check_range(&mut caller, request, request_length)?;
    match tool_name(&mut caller, name, name_length)? {
        Some(name) => tool::call(&mut caller, &name, request, request_length),
        None => Ok(caller.data_mut().refuse(CallCode::NoSuchTool)),
    }
}

fn call_async<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    name: i32,
    name_length: i32,
    request: i32,
    request_length: i32,
) -> Result<i32, Error> {
    check_range(&mut caller, request, request_length)?;
    match tool_name(&mut caller, name, name_length)? {
        Some(name) => tool::call_async(&mut caller, &name, request, request_length),
        None => Ok(CallCode::NoSuchTool as i32),
    }
}

/// Whether there is such a stretch, for who may have no use for it.
fn check_range<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    pointer: i32,
    length: i32,
) -> Result<(), Error> {
    let (memory, _) = parts(caller)?;
    range(memory, pointer, length).map(drop)
}

/// Reads a tool's name. One that is well-formed may still not be granted:
/// that is the broker's to answer, and to record.
fn tool_name<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    pointer: i32,
    length: i32,
) -> Result<Option<ToolName>, Error> {
    let (memory, _) = parts(caller)?;
    let name = &memory[range(memory, pointer, length)?];
    if name.len() > TOOL_NAME_BYTES_MAX {
        return Ok(None);
    }
    Ok(core::str::from_utf8(name).ok().and_then(|name| ToolName::parse(name).ok()))
}
