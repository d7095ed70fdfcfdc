//! Assembles the guest that Hyperlight is measured with, once for each number
//! of host calls.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use flatbuffers::FlatBufferBuilder;
use hyperlight_common::flatbuffer_wrappers::function_call::{FunctionCall, FunctionCallType};
use hyperlight_common::flatbuffer_wrappers::function_types::{
    FunctionCallResult, ReturnType, ReturnValue,
};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=guest.S");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let result = FunctionCallResult::new(Ok(ReturnValue::Int(42)));
    fs::write(out.join("result.bin"), result.encode(&mut FlatBufferBuilder::new()))?;
    let call = FunctionCall::new("Null".into(), None, FunctionCallType::Host, ReturnType::Int);
    fs::write(out.join("call.bin"), call.encode(&mut FlatBufferBuilder::new()))?;
    for calls in [0, 1] {
        let status = Command::new("cc")
            .args(["-nostdlib", "-static-pie", "-Wl,--build-id=none"])
            .arg(format!("-Wa,--defsym,CALLS={calls},-I,{}", out.display()))
            .arg("-o")
            .arg(out.join(format!("guest-{calls}")))
            .arg("guest.S")
            .status()
            .map_err(|error| format!("cc: {error}; a C compiler is needed"))?;
        if !status.success() {
            return Err("the guest did not assemble".into());
        }
    }
    Ok(())
}
