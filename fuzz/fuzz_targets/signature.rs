//! Fuzzes a module that claims to be signed.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::signature::check(data);
});
