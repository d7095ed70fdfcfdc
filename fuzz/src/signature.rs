//! A module that claims to be signed, read by [`SignedParts::scan`] and
//! [`TrustKeys::verify`].
//!
//! The one trusted key signs [`MODULES`] and, within one check, the input
//! itself; so whatever else verifies is a forgery.

use std::sync::LazyLock;

use forge_protocol::signature::{CORE_HEADER, SignatureError, SignedParts, SignerKey, TrustKeys};

use super::{Outcome, Seed, accepted, refused};

/// What the trusted key signed for the corpus.
const MODULES: [&[u8]; 3] = [
    b"\0asm\x01\0\0\0",
    // One custom section.
    b"\0asm\x01\0\0\0\0\x04\x01xyz",
    // `forge_run` that returns 0, and a memory.
    b"\0asm\x01\0\0\0\x01\x05\x01\x60\0\x01\x7f\x03\x02\x01\0\x05\x03\x01\0\x01\
      \x07\x16\x02\x09forge_run\0\0\x06memory\x02\0\x0a\x06\x01\x04\0\x41\0\x0b",
];

/// A signature section of ours: id, length, content.
const SECTION_BYTES: usize = 2 + 117;
const SIGNATURE_BYTES: usize = 64;

/// Sections that a signature of the whole module stands beside nowhere.
const SECOND_SIGNATURE: &[u8] = b"\0\x0a\x09signature";
const DELIMITER: &[u8] = b"\0\x14\x13signature_delimiter";

fn signer() -> SignerKey {
    SignerKey::from_secret(&[7; 32])
}

fn trust() -> TrustKeys {
    TrustKeys::new([signer().trust_key()]).expect("one key")
}

/// The same key, with tables.
static WITH_TABLES: LazyLock<TrustKeys> = LazyLock::new(|| trust().with_tables());

/// A signed module's signature, and what it covers.
fn taken_apart(signed: &[u8]) -> (&[u8], &[u8]) {
    let covered_at = CORE_HEADER.len() + SECTION_BYTES;
    (&signed[covered_at - SIGNATURE_BYTES..covered_at], &signed[covered_at..])
}

/// Nothing verifies but what was signed, with the signature it was given; and
/// whatever has a sound structure can be signed, and not be changed then. Keys
/// with tables say the same of it.
pub fn check(data: &[u8]) -> Outcome {
    let signer = signer();
    let trust = trust();
    let verified = trust.verify(data);
    let said = [&trust, &*WITH_TABLES]
        .map(|keys| keys.verify(data).map(|proof| (proof.sha256(), proof.signer())));
    assert_eq!(said[0], said[1], "tables say another thing");
    if let Ok(parts) = SignedParts::scan(data) {
        assert!(data.ends_with(parts.covered()), "covered is not the rest of the module");
        for section in [SECOND_SIGNATURE, DELIMITER] {
            let partial = SignedParts::scan(&[data, section].concat()).err();
            let offset = data.len();
            let refused = partial == Some(SignatureError::Partial { offset })
                || matches!(partial, Some(SignatureError::TooMany { .. }));
            assert!(refused, "a partial signature counts");
        }
    }
    if let Ok(proof) = &verified {
        assert_eq!(proof.bytes(), data);
        assert_eq!(proof.signer(), signer.trust_key());
        let covered = SignedParts::scan(data).expect("it verified").covered();
        let genuine = MODULES.iter().any(|module| {
            let signed = signer.sign(module).expect("a sound module");
            let (signature, signed_bytes) = taken_apart(&signed);
            covered == signed_bytes
                && data.windows(SIGNATURE_BYTES).any(|window| window == signature)
        });
        assert!(genuine, "a forgery verifies");
    }
    if let Ok(signed) = signer.sign(data) {
        let proof = trust.verify(&signed).expect("what we sign verifies");
        assert!(WITH_TABLES.verify(&signed).is_ok(), "what we sign verifies, by tables");
        assert_eq!(signer.sign(&signed).as_ref(), Ok(&signed), "signing twice is signing once");
        assert!(data.ends_with(taken_apart(&signed).1), "signing changed the module");
        // The input chooses the bit.
        let [low, high, ..] = proof.sha256();
        let bit = usize::from(u16::from_le_bytes([low, high])) % (signed.len() * 8);
        let mut flipped = signed.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(trust.verify(&flipped).is_err(), "bit {bit} can be flipped");
        assert!(WITH_TABLES.verify(&flipped).is_err(), "bit {bit} can be flipped, by tables");
        assert!(trust.verify(&signed[..signed.len() - 1]).is_err(), "the end can be cut off");
    } else {
        assert_ne!(verified.err(), Some(SignatureError::HashMismatch), "sound, and not signable");
    }
    Outcome::of(verified.is_ok())
}

/// Signed modules, and each way of being none.
pub fn seeds() -> Vec<Seed> {
    let signer = signer();
    let signed = |module: &[u8]| signer.sign(module).expect("a sound module");
    let [empty, custom, program] = MODULES;
    let stranger = SignerKey::from_secret(&[8; 32]).sign(custom).expect("a sound module");
    let mut changed = signed(program);
    let last = changed.len() - 1;
    changed[last - 2] ^= 1;
    let second = [&signed(custom)[..], SECOND_SIGNATURE].concat();
    let delimiter = [&signed(custom)[..], DELIMITER].concat();
    // A key id is not signed: it may be anything. It makes the section, the
    // set and the signature longer.
    let mut key_id = signed(custom);
    for length_at in [9, 24, 59] {
        key_id[length_at] += 3;
    }
    key_id.splice(60..61, *b"\x03key");
    vec![
        accepted("empty", signed(empty)),
        accepted("custom-section", signed(custom)),
        accepted("program", signed(program)),
        refused("unsigned", program.to_vec()),
        refused("stranger", stranger),
        refused("changed", changed),
        refused("second-signature", second),
        refused("delimiter", delimiter),
        accepted("key-id", key_id),
    ]
}
