//! Fuzzes a stream of frames, cut anywhere.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::frame::check(data);
});
