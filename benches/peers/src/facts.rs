//! What each figure includes and what it leaves out. A figure without this is
//! a comparison of different things.

use serde::Serialize;

/// What is done for one figure, or how it was done.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Facts {
    /// The program runs behind KVM.
    pub vm: bool,
    /// The figure includes checking the program's signature.
    pub signature_checked: bool,
    /// The figure includes a real WebAssembly program being run.
    pub runs_wasm: bool,
    /// The process around it is confined, beside the VM or the sandbox.
    pub process_jailed: bool,
    /// Tests prove that nothing of one run reaches the next. A VM made for the
    /// run has nothing to reset.
    pub reset_proven: bool,
    /// Credentials of tools are in another process.
    pub credentials_outside: bool,
}

impl Facts {
    pub const HEADINGS: [&str; 6] =
        ["VM ", "signature", "runs wasm", "jailed", "clean state", "credentials outside"];

    pub fn cells(&self) -> [Option<bool>; 6] {
        [
            Some(self.vm),
            Some(self.signature_checked),
            Some(self.runs_wasm),
            Some(self.process_jailed),
            Some(self.reset_proven),
            Some(self.credentials_outside),
        ]
    }
}

/// Hyperlight with the guest of this folder. Its own guests can run wasm; the
/// one here answers a constant. Its process is the caller's.
const HYPERLIGHT: Facts = Facts {
    vm: true,
    signature_checked: false,
    runs_wasm: false,
    process_jailed: false,
    reset_proven: false,
    credentials_outside: false,
};

const WASMTIME: Facts = Facts { vm: false, runs_wasm: true, ..HYPERLIGHT };

/// A VM for one run, in the bench's own process.
const BOOT: Facts = Facts {
    vm: true,
    signature_checked: true,
    runs_wasm: true,
    process_jailed: false,
    reset_proven: true,
    credentials_outside: true,
};

/// A VM in a worker of its own.
const SERVED: Facts = Facts { process_jailed: true, ..BOOT };

/// By the name of the case; nothing for floors, and for what nobody has
/// judged yet.
pub fn of(name: &str) -> Option<Facts> {
    match name {
        "boot" => Some(BOOT),
        "reset" => Some(Facts { signature_checked: false, runs_wasm: false, ..BOOT }),
        "warm_prepared" | "warm_reset_prepared" | "throughput_reset_prepared" => {
            // Before the run; its digest and signer are looked up in the run.
            Some(Facts { signature_checked: false, ..SERVED })
        }
        // What a run has besides its calls is taken out of it.
        "toolcall_null" => Some(Facts { signature_checked: false, ..SERVED }),
        "cold" | "warm" | "warm_reset" | "throughput_reset" | "throughput_fresh" | "density" => {
            Some(SERVED)
        }
        // A new VM, or one whose memory and registers were put back by
        // Hyperlight's own tested restore.
        "hyperlight_cold"
        | "hyperlight_from_snapshot"
        | "hyperlight_restore"
        | "hyperlight_restore_call" => Some(Facts { reset_proven: true, ..HYPERLIGHT }),
        "hyperlight_call" | "hyperlight_call_host" | "hyperlight_memory" => Some(HYPERLIGHT),
        // A new store has a new memory.
        "wasmtime_compile" | "wasmtime_instantiate" => {
            Some(Facts { reset_proven: true, ..WASMTIME })
        }
        _ => None,
    }
}
