//! Fuzzes the archive a guest is booted with.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::boot_archive::check(data);
});
