//! Fuzzes what a guest may do to its one device.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forge_fuzz::vsock_device::check(data);
});
