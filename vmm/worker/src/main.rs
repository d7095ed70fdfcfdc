//! The zygote and, forked from it, its workers. The supervisor starts it
//! (`forge_vmm::pool`); it has no arguments and is of no use to anybody else.

use std::process::ExitCode;

use forge_worker::worker::heap::Heap;

#[global_allocator]
static HEAP: Heap = Heap;

fn main() -> ExitCode {
    match forge_worker::zygote::main() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
