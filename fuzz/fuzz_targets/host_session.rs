//! Fuzzes what a guest may send its host, in each of its states.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::host_session::check(data);
});
