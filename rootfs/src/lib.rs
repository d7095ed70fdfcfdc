//! The guest image and the boot archive.
//!
//! `build.rs` builds the guest; this crate carries its bytes and its digest
//! to `vmm`, and makes the boot archive that the guest finds beside it. It
//! distrusts nobody: everything here comes from the build or the operator.
//! Deliberately absent: anything secret. Trust keys are public.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

use forge_protocol::platform::archive;
use forge_protocol::signature::TrustKeys;

/// The guest: an ELF executable for `forge_protocol::platform`'s machine.
pub static GUEST_ELF: &[u8] = include_bytes!(env!("FORGE_GUEST_ELF"));

/// SHA-256 of [`GUEST_ELF`], in hex: which guest a result came from.
pub const GUEST_SHA256: &str = env!("FORGE_GUEST_SHA256");

/// Makes the boot archive: the operator's trust keys, in the order given, and
/// whether the guest makes tables of them, as was done here. Language runtimes
/// will join them.
#[must_use]
pub fn boot_archive(trust: &TrustKeys) -> Vec<u8> {
    let mut builder = archive::Builder::default();
    for (index, key) in trust.as_slice().iter().enumerate() {
        builder.add(&format!("{}{index}", archive::TRUST_PREFIX), &key.to_bytes());
    }
    if trust.have_tables() {
        builder.add(archive::TABLES, &[]);
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::signature::TrustKey;

    /// The base point of the curve, which is a sound public key.
    const KEY: [u8; 32] = {
        let mut key = [0x66; 32];
        key[0] = 0x58;
        key
    };

    #[test]
    fn the_guest_is_an_elf_executable() {
        assert!(GUEST_ELF.starts_with(b"\x7fELF"));
    }

    #[test]
    fn no_path_of_the_build_machine_is_in_the_guest() {
        let has = |text: &str| GUEST_ELF.windows(text.len()).any(|it| it == text.as_bytes());
        let room = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let workspace = room.parent().unwrap().to_str().unwrap();
        assert!(!has(workspace) && !has("/.cargo/"));
        if let Ok(home) = std::env::var("CARGO_HOME") {
            assert!(!has(&home));
        }
        // There are paths in it, under names that no machine has.
        assert!(has("/cargo/"));
    }

    #[test]
    fn the_boot_archive_holds_the_trust_keys() {
        let trust = TrustKeys::new([TrustKey::from_bytes(&KEY).unwrap()]).unwrap();
        let bytes = boot_archive(&trust);
        let entries: Vec<_> = archive::entries(&bytes).collect();
        assert_eq!(entries, [("trust/0", &KEY[..])]);
        let bytes = boot_archive(&trust.with_tables());
        let entries: Vec<_> = archive::entries(&bytes).collect();
        assert_eq!(entries, [("trust/0", &KEY[..]), ("tables", &[])]);
    }
}
