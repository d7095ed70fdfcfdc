//! Fuzzes what a host may send a guest, in each of its states.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::guest_session::check(data);
});
