//! Tool imports, and what they share with calls by name.

use forge_protocol::name::ToolName;
use wasmi::{AsContextMut, Caller, Error, Func};

use super::{charge_copy, parts, range, stop};
use crate::host::Host;
use crate::link::Stream;

/// The import of one granted tool.
pub(super) fn function<S: Stream + 'static>(
    store: impl AsContextMut<Data = Host<S>>,
    name: ToolName,
) -> Func {
    Func::wrap(
        store,
        move |mut caller: Caller<'_, Host<S>>, pointer: i32, length: i32| -> Result<i32, Error> {
            call(&mut caller, &name, pointer, length)
        },
    )
}

/// Calls `tool` with the request at `pointer` and waits for it.
pub(super) fn call<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    tool: &ToolName,
    pointer: i32,
    length: i32,
) -> Result<i32, Error> {
    charge_request(caller, pointer, length)?;
    let (memory, host) = parts(caller)?;
    let request = range(memory, pointer, length)?;
    host.call(tool, &memory[request]).map_err(stop)
}

/// Starts a call of `tool` with the request at `pointer`.
pub(super) fn call_async<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    tool: &ToolName,
    pointer: i32,
    length: i32,
) -> Result<i32, Error> {
    charge_request(caller, pointer, length)?;
    let (memory, host) = parts(caller)?;
    let request = range(memory, pointer, length)?;
    host.call_async(tool, &memory[request]).map_err(stop)
}

/// A request that is over the limit is not copied, and costs what one at the
/// limit does.
fn charge_request<S: Stream>(
    caller: &mut Caller<'_, Host<S>>,
    pointer: i32,
    length: i32,
) -> Result<(), Error> {
    let (memory, host) = parts(caller)?;
    let request = range(memory, pointer, length)?;
    let bytes = request.len().min(host.limits.request_bytes as usize);
    charge_copy(caller, bytes as u64)
}
