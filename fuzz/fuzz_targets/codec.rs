//! Fuzzes the payload of any message.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::codec::check(data);
});
