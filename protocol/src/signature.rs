//! Who wrote a program: the WebAssembly tool-conventions' module signatures.
//!
//! A signed module is the 8-byte core header, then one custom section named
//! `signature`, then the module's own sections. The signature covers a
//! SHA-256 of everything after its section, so of the whole module; partial
//! signatures, delimited by `signature_delimiter` sections, are refused.
//!
//! ```text
//! section   = 0x00 len(payload) len(name) "signature" data
//! data      = version=1 content=1 hash=1 count { len set }
//! set       = count { hash[32] } count { len signature }
//! signature = len(key id) key id  alg=1  len(64) bytes[64]
//! signed    = "wasmsig" 1 1 1 hash
//! ```
//!
//! Lengths and counts are LEB128. What runs on untrusted bytes before
//! the check (`verify_strict` of ed25519-dalek, or what says the same faster,
//! `comb`) is [`SignedParts::scan`] alone: bounded, without allocation,
//! and blind to everything but section boundaries. Only
//! [`TrustKeys::verify`] makes a [`VerifiedProgram`], and the interpreter
//! takes nothing else.
//!
//! A signature says who wrote a program. Only a grant binds a run, and stops
//! replays.

mod comb;

use alloc::vec::Vec;

use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};

use comb::Combs;

use crate::limits::{SECTIONS_MAX, SIGNATURES_MAX, TRUST_KEYS_MAX};

/// The core module header: `\0asm`, version 1. A component has another.
pub const CORE_HEADER: [u8; 8] = *b"\0asm\x01\0\0\0";

const SECTION_NAME: &[u8] = b"signature";
const DELIMITER_NAME: &[u8] = b"signature_delimiter";
const DOMAIN: &[u8; 7] = b"wasmsig";
const SPECIFICATION_VERSION: u8 = 1;
const CONTENT_MODULE: u8 = 1;
const HASH_SHA256: u8 = 1;
const ALGORITHM_ED25519: u8 = 1;

/// Why a program is not verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignatureError {
    /// It does not begin with the core module header.
    NotCoreModule,
    /// Its first section is no signature.
    Unsigned,
    /// The section structure is broken at this offset.
    Malformed {
        /// Bytes from the start of the module.
        offset: usize,
    },
    /// It has more sections or signatures than are looked at.
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many of them are looked at.
        limit: usize,
    },
    /// It has a second signature section, or delimiters of a partial one.
    Partial {
        /// Bytes from the start of the module.
        offset: usize,
    },
    /// The signature is of a version, content, hash or algorithm other than
    /// version 1, module, SHA-256 and Ed25519.
    Unsupported,
    /// No signed hash is this module's: a bit of it changed after signing.
    HashMismatch,
    /// The module is intact, and none of its signatures is by a trusted key.
    Untrusted,
}

impl core::fmt::Display for SignatureError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NotCoreModule => {
                write!(
                    f,
                    "this is no core WebAssembly module (components are not supported: build for wasm32-wasip1 \
                 or wasm32-unknown-unknown)"
                )
            }
            Self::Unsigned => write!(f, "the program is not signed"),
            Self::Malformed { offset } => {
                write!(f, "the module's sections are malformed, or cut off, at byte {offset}")
            }
            Self::TooMany { what, limit } => {
                write!(f, "the module has more {what} than the {limit} that are looked at")
            }
            Self::Partial { offset } => write!(
                f,
                "the module has a second signature or a delimiter at byte {offset}; \
                 one signature must cover the whole module"
            ),
            Self::Unsupported => {
                write!(f, "the signature is not Ed25519 over SHA-256 of a module, version 1")
            }
            Self::HashMismatch => {
                write!(f, "the program is not what was signed: its bytes changed since")
            }
            Self::Untrusted => write!(f, "no trusted key signed the program"),
        }
    }
}

impl core::error::Error for SignatureError {}

/// A public key that programs are trusted by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TrustKey(VerifyingKey);

/// Why 32 bytes are no trust key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// They are no point of the curve.
    NotAKey,
    /// The key is of small order: a signature by it would verify for any
    /// message.
    SmallOrder,
    /// More keys than [`TRUST_KEYS_MAX`].
    TooMany,
    /// The PEM text is not what it should be: an SPKI public key, or a PKCS#8
    /// v1 private key.
    Pem,
}

impl core::fmt::Display for KeyError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NotAKey => write!(f, "the bytes are no Ed25519 public key"),
            Self::SmallOrder => write!(
                f,
                "the key is of small order: anyone could sign for it, so it cannot be trusted"
            ),
            Self::TooMany => write!(f, "more than {TRUST_KEYS_MAX} trust keys"),
            Self::Pem => write!(
                f,
                "not an Ed25519 key in PEM: public keys are SPKI (BEGIN PUBLIC KEY), \
                 private keys PKCS#8 (BEGIN PRIVATE KEY)"
            ),
        }
    }
}

impl core::error::Error for KeyError {}

impl TrustKey {
    /// Takes the 32 bytes of a public key.
    ///
    /// # Errors
    /// [`KeyError::NotAKey`] or [`KeyError::SmallOrder`].
    pub fn from_bytes(bytes: &[u8; 32]) -> Result<Self, KeyError> {
        let key = VerifyingKey::from_bytes(bytes).map_err(|_| KeyError::NotAKey)?;
        if key.is_weak() {
            return Err(KeyError::SmallOrder);
        }
        Ok(Self(key))
    }

    /// The key's 32 bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// Reads a public key from SPKI PEM.
    ///
    /// # Errors
    /// [`KeyError`].
    #[cfg(feature = "keys")]
    pub fn from_pem(pem: &str) -> Result<Self, KeyError> {
        use ed25519_dalek::pkcs8::DecodePublicKey as _;
        let pem = strict_pem(pem).ok_or(KeyError::Pem)?;
        let key = VerifyingKey::from_public_key_pem(&pem).map_err(|_| KeyError::Pem)?;
        Self::from_bytes(&key.to_bytes())
    }

    /// Writes the key as SPKI PEM.
    #[cfg(feature = "keys")]
    #[must_use]
    pub fn to_pem(self) -> alloc::string::String {
        use ed25519_dalek::pkcs8::{EncodePublicKey as _, spki::der::pem::LineEnding};
        // Encoding a 32-byte key into memory has no way to fail.
        self.0.to_public_key_pem(LineEnding::LF).unwrap_or_default()
    }
}

impl core::fmt::Display for TrustKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        crate::hex::Hex(&self.0.to_bytes()).fmt(f)
    }
}

impl core::fmt::Debug for TrustKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "TrustKey({self})")
    }
}

/// The keys programs are trusted by, decoded once.
#[derive(Clone, Debug, Default)]
pub struct TrustKeys {
    keys: Vec<TrustKey>,
    /// What checks against the first of them are faster by.
    combs: Option<Combs>,
}

/// How many keys [`TrustKeys::with_tables`] makes tables of: 5 KB each, which
/// lie in each guest before what its run uses. Keys beyond are checked against
/// as if there were none.
const KEYS_WITH_TABLES_MAX: usize = 4;

/// A program whose signature was checked.
///
/// Holding one proves that a key in the [`TrustKeys`] that made it signed
/// exactly these bytes. It does not prove that they are valid WebAssembly, or
/// that anything was granted.
#[derive(Clone, Copy, Debug)]
pub struct VerifiedProgram<'a> {
    bytes: &'a [u8],
    sha256: [u8; 32],
    signer: TrustKey,
}

impl<'a> VerifiedProgram<'a> {
    /// The whole module, signature section included.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The hash that was signed: of everything after the signature section.
    #[must_use]
    pub fn sha256(&self) -> [u8; 32] {
        self.sha256
    }

    /// Who signed it.
    #[must_use]
    pub fn signer(&self) -> TrustKey {
        self.signer
    }
}

impl TrustKeys {
    /// Collects keys; doubles are kept once.
    ///
    /// # Errors
    /// [`KeyError::TooMany`].
    pub fn new(keys: impl IntoIterator<Item = TrustKey>) -> Result<Self, KeyError> {
        let mut trusted = Vec::new();
        for key in keys {
            if trusted.contains(&key) {
                continue;
            }
            if trusted.len() == TRUST_KEYS_MAX {
                return Err(KeyError::TooMany);
            }
            trusted.push(key);
        }
        Ok(Self { keys: trusted, combs: None })
    }

    /// The same keys, with tables of the first few: [`Self::verify`] finds the
    /// same and takes about half the time. To make them takes as long as some
    /// checks (40 us a key, and 40), so they are for who makes many, or has others
    /// make them.
    #[must_use]
    pub fn with_tables(self) -> Self {
        let first = self.keys.iter().take(KEYS_WITH_TABLES_MAX);
        let combs = Some(Combs::of(first.map(|TrustKey(key)| *key)));
        Self { combs, ..self }
    }

    /// The trusted keys.
    #[must_use]
    pub fn as_slice(&self) -> &[TrustKey] {
        &self.keys
    }

    /// Whether [`Self::with_tables`] made them.
    #[must_use]
    pub fn have_tables(&self) -> bool {
        self.combs.is_some()
    }

    /// Checks that a trusted key signed the whole of `module`.
    ///
    /// At most [`SIGNATURES_MAX`] times [`TRUST_KEYS_MAX`] verifications.
    ///
    /// # Errors
    /// [`SignatureError`]; nothing but section boundaries has been parsed.
    pub fn verify<'a>(&self, module: &'a [u8]) -> Result<VerifiedProgram<'a>, SignatureError> {
        let parts = SignedParts::scan(module)?;
        let sha256 = parts.sha256();
        // The whole section must be sound, not only as far as the first
        // signature that is good.
        let mut candidates = [None; SIGNATURES_MAX];
        let mut sets = Sets::open(parts.data)?;
        for slot in &mut candidates {
            *slot = sets.next()?;
        }
        sets.finish()?;
        let mut intact = false;
        let mut message = [0u8; 42];
        for (hash, signature) in candidates.into_iter().flatten() {
            if *hash != sha256 {
                continue;
            }
            intact = true;
            message[..7].copy_from_slice(DOMAIN);
            message[7..10].copy_from_slice(&[SPECIFICATION_VERSION, CONTENT_MODULE, HASH_SHA256]);
            message[10..].copy_from_slice(hash);
            let signature = Signature::from_bytes(signature);
            if let Some(signer) = self.signer(&message, &signature) {
                return Ok(VerifiedProgram { bytes: module, sha256, signer });
            }
        }
        Err(if intact { SignatureError::Untrusted } else { SignatureError::HashMismatch })
    }

    /// The first key that the signature is by.
    fn signer(&self, message: &[u8], signature: &Signature) -> Option<TrustKey> {
        let is_by = |TrustKey(key): &TrustKey| {
            let by_table = self.combs.as_ref();
            by_table
                .and_then(|combs| combs.verify(key, message, signature))
                .unwrap_or_else(|| key.verify_strict(message, signature).is_ok())
        };
        self.keys.iter().find(|key| is_by(key)).copied()
    }
}

/// A module taken apart at its section boundaries, no further.
#[derive(Clone, Copy, Debug)]
pub struct SignedParts<'a> {
    /// The content of the signature section.
    data: Reader<'a>,
    /// Everything after the signature section: what the signature covers.
    covered: &'a [u8],
}

impl<'a> SignedParts<'a> {
    /// Finds the signature section and checks the structure around it.
    ///
    /// # Errors
    /// [`SignatureError`].
    pub fn scan(module: &'a [u8]) -> Result<Self, SignatureError> {
        let Some(sections) = module.strip_prefix(&CORE_HEADER) else {
            return Err(SignatureError::NotCoreModule);
        };
        let mut reader = Reader { bytes: sections, offset: CORE_HEADER.len() };
        let Some(data) = reader.section()?.and_then(|first| first.custom_named(SECTION_NAME))
        else {
            return Err(SignatureError::Unsigned);
        };
        let covered = reader.bytes;
        for _ in 0..SECTIONS_MAX {
            let offset = reader.offset;
            let Some(section) = reader.section()? else {
                return Ok(Self { data, covered });
            };
            if section.custom_named(SECTION_NAME).is_some()
                || section.custom_named(DELIMITER_NAME).is_some()
            {
                return Err(SignatureError::Partial { offset });
            }
        }
        Err(SignatureError::TooMany { what: "sections", limit: SECTIONS_MAX })
    }

    /// The bytes the signature covers.
    #[must_use]
    pub fn covered(&self) -> &'a [u8] {
        self.covered
    }

    /// The hash a signature would sign: of everything after its section.
    /// It says nothing about who signed, or whether anybody did.
    #[must_use]
    pub fn sha256(&self) -> [u8; 32] {
        Sha256::digest(self.covered).into()
    }
}

/// A signed hash and a signature over it.
type Candidate<'a> = (&'a [u8; 32], &'a [u8; 64]);

/// Walks the hash sets of a signature section: every pair of a signed hash and
/// an Ed25519 signature over it alone. A set of several hashes signs parts of
/// a module, which we do not accept.
#[derive(Default)]
struct Sets<'a> {
    reader: Reader<'a>,
    sets_left: u32,
    set: Reader<'a>,
    hash: Option<&'a [u8; 32]>,
    signatures_left: u32,
}

impl<'a> Sets<'a> {
    fn open(mut reader: Reader<'a>) -> Result<Self, SignatureError> {
        if reader.array::<3>()? != &[SPECIFICATION_VERSION, CONTENT_MODULE, HASH_SHA256] {
            return Err(SignatureError::Unsupported);
        }
        let sets_left = reader.leb_u32()?;
        Ok(Self { reader, sets_left, ..Self::default() })
    }

    fn next(&mut self) -> Result<Option<Candidate<'a>>, SignatureError> {
        loop {
            if self.signatures_left > 0 {
                self.signatures_left -= 1;
                let mut signature = self.set.slice()?;
                let _key_id = signature.slice()?;
                let [algorithm] = signature.array::<1>()?;
                if *algorithm != ALGORITHM_ED25519 {
                    return Err(SignatureError::Unsupported);
                }
                let mut bytes = signature.slice()?;
                let value = bytes.array::<64>()?;
                bytes.end()?;
                signature.end()?;
                return match self.hash {
                    Some(hash) => Ok(Some((hash, value))),
                    None => Err(SignatureError::Unsupported),
                };
            }
            self.set.end()?;
            if self.sets_left == 0 {
                self.reader.end()?;
                return Ok(None);
            }
            self.sets_left -= 1;
            let mut set = self.reader.slice()?;
            let hashes = set.leb_u32()?;
            self.hash = None;
            for position in 0..hashes {
                let hash = set.array::<32>()?;
                self.hash = if position == 0 { Some(hash) } else { None };
            }
            self.signatures_left = set.leb_u32()?;
            self.set = set;
        }
    }

    /// Nothing may be left.
    fn finish(&mut self) -> Result<(), SignatureError> {
        match self.next()? {
            None => Ok(()),
            Some(_) => Err(SignatureError::TooMany { what: "signatures", limit: SIGNATURES_MAX }),
        }
    }
}

/// A cursor over untrusted bytes that knows where it is in the module.
#[derive(Clone, Copy, Debug, Default)]
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

/// One section: its id and content.
struct Section<'a> {
    id: u8,
    content: Reader<'a>,
}

impl<'a> Section<'a> {
    /// The content after the name, if this is a custom section so named.
    fn custom_named(&self, name: &[u8]) -> Option<Reader<'a>> {
        let mut content = self.content;
        (self.id == 0 && content.slice().ok()?.bytes == name).then_some(content)
    }
}

impl<'a> Reader<'a> {
    fn malformed<T>(&self) -> Result<T, SignatureError> {
        Err(SignatureError::Malformed { offset: self.offset })
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], SignatureError> {
        match self.bytes.split_at_checked(count) {
            Some((taken, rest)) => {
                self.bytes = rest;
                self.offset += count;
                Ok(taken)
            }
            None => self.malformed(),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], SignatureError> {
        match self.bytes.first_chunk::<N>() {
            Some(array) => {
                self.take(N)?;
                Ok(array)
            }
            None => self.malformed(),
        }
    }

    fn leb_u32(&mut self) -> Result<u32, SignatureError> {
        let mut value = 0u32;
        for shift in [0, 7, 14, 21, 28] {
            let [byte] = *self.array::<1>()?;
            if shift == 28 && byte > 0x0f {
                break;
            }
            value |= u32::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        self.malformed()
    }

    /// A length and that many bytes.
    fn slice(&mut self) -> Result<Reader<'a>, SignatureError> {
        let count = self.leb_u32()? as usize;
        let offset = self.offset;
        Ok(Reader { bytes: self.take(count)?, offset })
    }

    fn section(&mut self) -> Result<Option<Section<'a>>, SignatureError> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        let [id] = *self.array::<1>()?;
        Ok(Some(Section { id, content: self.slice()? }))
    }

    fn end(&self) -> Result<(), SignatureError> {
        if self.bytes.is_empty() { Ok(()) } else { self.malformed() }
    }
}

/// The first PEM text in another, as strictly as RFC 7468 has it generated, and the
/// library wants it: in lines of 64 characters, with nothing around it or between. Its
/// lax form, which other tools take, has blanks and blank lines anywhere.
#[cfg(feature = "keys")]
fn strict_pem(text: &str) -> Option<alloc::string::String> {
    const BEGIN: &str = "-----BEGIN ";
    const END: &str = "-----END ";
    const LINE: usize = 64;
    let mut lines =
        text.split(['\n', '\r']).map(str::trim).skip_while(|line| !line.starts_with(BEGIN));
    let mut strict = alloc::string::String::from(lines.next()?);
    let mut written = 0;
    for line in lines {
        if line.starts_with(END) {
            strict.extend(["\n", line, "\n"]);
            return Some(strict);
        }
        for character in line.chars().filter(|it| !it.is_ascii_whitespace()) {
            if written % LINE == 0 {
                strict.push('\n');
            }
            strict.push(character);
            written += 1;
        }
    }
    None
}

/// The key a developer signs with.
#[cfg(feature = "keys")]
pub struct SignerKey(ed25519_dalek::SigningKey);

#[cfg(feature = "keys")]
impl SignerKey {
    /// Makes the key of a 32-byte secret, which must come from a
    /// cryptographic source.
    #[must_use]
    pub fn from_secret(secret: &[u8; 32]) -> Self {
        Self(ed25519_dalek::SigningKey::from_bytes(secret))
    }

    /// Reads a private key from PKCS#8 v1 PEM.
    ///
    /// # Errors
    /// [`KeyError::Pem`].
    pub fn from_pem(pem: &str) -> Result<Self, KeyError> {
        use ed25519_dalek::pkcs8::DecodePrivateKey as _;
        let pem = strict_pem(pem).ok_or(KeyError::Pem)?;
        ed25519_dalek::SigningKey::from_pkcs8_pem(&pem).map(Self).map_err(|_| KeyError::Pem)
    }

    /// Writes the key as PKCS#8 v1 PEM, which carries no public key: other
    /// tools refuse version 2.
    #[must_use]
    pub fn to_pem(&self) -> alloc::string::String {
        use ed25519_dalek::pkcs8::{
            EncodePrivateKey as _, KeypairBytes, spki::der::pem::LineEnding,
        };
        let v1 = KeypairBytes { secret_key: self.0.to_bytes(), public_key: None };
        // Encoding a 32-byte key into memory has no way to fail.
        v1.to_pkcs8_pem(LineEnding::LF).map(|pem| pem.as_str().into()).unwrap_or_default()
    }

    /// The key others trust it by.
    #[must_use]
    pub fn trust_key(&self) -> TrustKey {
        TrustKey(self.0.verifying_key())
    }

    /// Signs a whole module. A signature it already carries is replaced.
    ///
    /// # Errors
    /// [`SignatureError`] if `module` has no sound section structure.
    pub fn sign(&self, module: &[u8]) -> Result<Vec<u8>, SignatureError> {
        use ed25519_dalek::Signer as _;
        let Some(mut sections) = module.strip_prefix(&CORE_HEADER) else {
            return Err(SignatureError::NotCoreModule);
        };
        let mut reader = Reader { bytes: sections, offset: CORE_HEADER.len() };
        if reader.section()?.is_some_and(|first| first.custom_named(SECTION_NAME).is_some()) {
            sections = reader.bytes;
        }
        let hash: [u8; 32] = Sha256::digest(sections).into();

        let mut message = DOMAIN.to_vec();
        message.extend_from_slice(&[SPECIFICATION_VERSION, CONTENT_MODULE, HASH_SHA256]);
        message.extend_from_slice(&hash);
        let signature = self.0.sign(&message).to_bytes();

        // Every length below is under 128, so one LEB byte each.
        let mut one = alloc::vec![0, ALGORITHM_ED25519, signature.len() as u8];
        one.extend_from_slice(&signature);
        let mut set = alloc::vec![1];
        set.extend_from_slice(&hash);
        set.extend_from_slice(&[1, one.len() as u8]);
        set.extend_from_slice(&one);
        let mut content = alloc::vec![SECTION_NAME.len() as u8];
        content.extend_from_slice(SECTION_NAME);
        content.extend_from_slice(&[SPECIFICATION_VERSION, CONTENT_MODULE, HASH_SHA256]);
        content.extend_from_slice(&[1, set.len() as u8]);
        content.extend_from_slice(&set);

        let mut signed = CORE_HEADER.to_vec();
        // The content has 117 bytes, still one LEB byte.
        signed.extend_from_slice(&[0, content.len() as u8]);
        signed.extend_from_slice(&content);
        let before = signed.len();
        signed.extend_from_slice(sections);
        // What is wrong is said of the module as it came.
        let as_it_came = |offset: usize| offset - before + (module.len() - sections.len());
        match SignedParts::scan(&signed) {
            Ok(_) => Ok(signed),
            Err(SignatureError::Malformed { offset }) if offset >= before => {
                Err(SignatureError::Malformed { offset: as_it_came(offset) })
            }
            Err(SignatureError::Partial { offset }) if offset >= before => {
                Err(SignatureError::Partial { offset: as_it_came(offset) })
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(feature = "keys")]
impl core::fmt::Debug for SignerKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "SignerKey(public {})", self.trust_key())
    }
}

#[cfg(all(test, feature = "keys"))]
mod tests {
    use super::*;
    use alloc::string::{String, ToString};
    use alloc::vec;

    /// Header and one custom section "x" with two bytes.
    const MODULE: &[u8] = b"\0asm\x01\0\0\0\0\x04\x01xyz";

    fn signer() -> SignerKey {
        SignerKey::from_secret(&[7; 32])
    }

    fn trust() -> TrustKeys {
        TrustKeys::new([signer().trust_key()]).unwrap()
    }

    #[test]
    fn a_signed_module_verifies_and_names_its_signer() {
        let signed = signer().sign(MODULE).unwrap();
        let proof = trust().verify(&signed).unwrap();
        assert_eq!(proof.signer(), signer().trust_key());
        assert_eq!(proof.sha256(), <[u8; 32]>::from(Sha256::digest(&MODULE[8..])));
        assert_eq!(proof.bytes(), signed);
    }

    #[test]
    fn what_cannot_be_signed_is_said_by_its_place_in_the_module_as_it_came() {
        // A second section that is cut off, with and without a signature before it.
        let cut = [MODULE, &[1, 9, 0]].concat();
        let offset = match signer().sign(&cut) {
            Err(SignatureError::Malformed { offset }) => offset,
            other => panic!("{other:?}"),
        };
        assert!((MODULE.len()..=cut.len()).contains(&offset), "{offset}");
        let signed = [&signer().sign(MODULE).unwrap()[..], &[1, 9, 0]].concat();
        let refused = SignerKey::from_secret(&[9; 32]).sign(&signed);
        let offset = offset + signed.len() - cut.len();
        assert_eq!(refused, Err(SignatureError::Malformed { offset }));
        // A delimiter behind it.
        let mut delimited = MODULE.to_vec();
        delimited.extend_from_slice(&[0, 20, 19]);
        delimited.extend_from_slice(DELIMITER_NAME);
        let delimited = match signer().sign(&delimited) {
            Err(SignatureError::Partial { offset }) => offset,
            other => panic!("{other:?}"),
        };
        assert_eq!(delimited, MODULE.len());
    }

    #[test]
    fn signing_again_replaces_the_signature() {
        let signed = signer().sign(MODULE).unwrap();
        let other = SignerKey::from_secret(&[9; 32]);
        let twice = other.sign(&signed).unwrap();
        assert_eq!(twice.len(), signed.len());
        assert_eq!(trust().verify(&twice).unwrap_err(), SignatureError::Untrusted);
    }

    #[test]
    fn no_bit_of_a_signed_module_can_flip() {
        let signed = signer().sign(MODULE).unwrap();
        for position in 0..signed.len() * 8 {
            let mut flipped = signed.clone();
            flipped[position / 8] ^= 1 << (position % 8);
            assert!(trust().verify(&flipped).is_err(), "bit {position}");
        }
    }

    #[test]
    fn a_truncated_module_is_refused_at_every_length() {
        let signed = signer().sign(MODULE).unwrap();
        for length in 0..signed.len() {
            assert!(trust().verify(&signed[..length]).is_err(), "length {length}");
        }
    }

    #[test]
    fn unsigned_untrusted_and_components_are_told_apart() {
        assert_eq!(trust().verify(MODULE).unwrap_err(), SignatureError::Unsigned);
        assert_eq!(
            trust().verify(b"\0asm\x0d\0\x01\0").unwrap_err(),
            SignatureError::NotCoreModule
        );
        let stranger = SignerKey::from_secret(&[8; 32]).sign(MODULE).unwrap();
        assert_eq!(trust().verify(&stranger).unwrap_err(), SignatureError::Untrusted);
    }

    #[test]
    fn keys_with_tables_and_keys_beyond_find_the_same_signer() {
        let signers: Vec<_> = (1..=KEYS_WITH_TABLES_MAX as u8 + 2)
            .map(|n| SignerKey::from_secret(&[n; 32]))
            .collect();
        let trust = TrustKeys::new(signers.iter().map(SignerKey::trust_key)).unwrap();
        let tables = trust.clone().with_tables();
        assert!(!trust.have_tables() && tables.have_tables());
        assert_eq!(tables.as_slice(), trust.as_slice());
        let told = alloc::format!("{:?}", tables.combs);
        assert_eq!(told, alloc::format!("Some(Combs of {KEYS_WITH_TABLES_MAX} keys)"));
        for signer in signers {
            let signed = signer.sign(MODULE).unwrap();
            for keys in [&trust, &tables] {
                assert_eq!(keys.verify(&signed).unwrap().signer(), signer.trust_key());
            }
        }
        let stranger = SignerKey::from_secret(&[77; 32]).sign(MODULE).unwrap();
        assert_eq!(tables.verify(&stranger).unwrap_err(), SignatureError::Untrusted);
    }

    #[test]
    fn a_signature_that_is_not_first_does_not_count() {
        let signed = signer().sign(MODULE).unwrap();
        let mut moved = MODULE.to_vec();
        moved.extend_from_slice(&signed[8..signed.len() - 6]);
        assert_eq!(trust().verify(&moved).unwrap_err(), SignatureError::Unsigned);
    }

    #[test]
    fn delimiters_and_second_signatures_are_refused() {
        for name in [DELIMITER_NAME, SECTION_NAME] {
            let mut module = MODULE.to_vec();
            let offset = module.len();
            module.extend_from_slice(&[0, name.len() as u8 + 1, name.len() as u8]);
            module.extend_from_slice(name);
            let refused = signer().sign(&module).unwrap_err();
            assert!(matches!(refused, SignatureError::Partial { .. }), "{refused} {offset}");
        }
    }

    #[test]
    fn small_order_keys_are_refused_as_trust_keys() {
        let mut identity = [0u8; 32];
        identity[0] = 1;
        assert_eq!(TrustKey::from_bytes(&identity).unwrap_err(), KeyError::SmallOrder);
        assert_eq!(TrustKey::from_bytes(&[0; 32]).unwrap_err(), KeyError::SmallOrder);
    }

    #[test]
    fn a_section_bomb_is_stopped() {
        let mut module = signer().sign(MODULE).unwrap();
        module.extend(vec![[0u8, 1, 0]; SECTIONS_MAX].concat());
        assert!(matches!(trust().verify(&module), Err(SignatureError::TooMany { .. })));
    }

    #[test]
    fn keys_survive_pem() {
        let key = signer();
        assert_eq!(SignerKey::from_pem(&key.to_pem()).unwrap().trust_key(), key.trust_key());
        assert_eq!(TrustKey::from_pem(&key.trust_key().to_pem()).unwrap(), key.trust_key());
        assert!(key.to_pem().starts_with("-----BEGIN PRIVATE KEY-----"));
        for nonsense in ["nonsense", "", "-----BEGIN PUBLIC KEY-----\nMCow"] {
            assert_eq!(TrustKey::from_pem(nonsense).unwrap_err(), KeyError::Pem);
        }
        assert!(!alloc::format!("{key:?}").contains(&key.to_pem()[30..60].to_string()));
    }

    #[test]
    fn white_space_around_and_in_pem_makes_no_other_key() {
        let key = signer();
        let (private, public) = (key.to_pem(), key.trust_key().to_pem());
        let of_20 = |pem: &str| {
            let body: Vec<char> = pem.lines().nth(1).unwrap().chars().collect();
            let lines: Vec<String> = body.chunks(20).map(|it| it.iter().collect()).collect();
            pem.replace(pem.lines().nth(1).unwrap(), &lines.join("\n"))
        };
        let ways: [&dyn Fn(&str) -> String; 6] = [
            &|pem| alloc::format!("{pem}\n\n"),
            &|pem| alloc::format!("subject: me\n\n{pem}and more\n"),
            &|pem| pem.replace('\n', "  \n"),
            &|pem| pem.replace('\n', "\r\n\r\n"),
            &|pem| pem.replace('\n', "\r"),
            &of_20,
        ];
        for (number, way) in ways.iter().enumerate() {
            let read = SignerKey::from_pem(&way(&private));
            assert_eq!(read.unwrap().trust_key(), key.trust_key(), "{number}");
            assert_eq!(TrustKey::from_pem(&way(&public)).unwrap(), key.trust_key(), "{number}");
        }
        let other = public.replace('A', "=");
        assert_eq!(TrustKey::from_pem(&other).unwrap_err(), KeyError::Pem);
    }

    fn leb(mut number: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            let byte = (number & 0x7f) as u8;
            number >>= 7;
            if number == 0 {
                bytes.push(byte);
                return bytes;
            }
            bytes.push(byte | 0x80);
        }
    }

    fn with_length(bytes: &[u8]) -> Vec<u8> {
        [leb(bytes.len()), bytes.to_vec()].concat()
    }

    /// A module with a section of these hashes and so many signatures, and more bytes at
    /// the ends of what nests in it.
    fn with_section(hashes: &[[u8; 32]], signatures: usize, ends: [&[u8]; 4]) -> Vec<u8> {
        let signed = signer().sign(MODULE).unwrap();
        let value = &signed[63..127];
        let one = [vec![0, 1], with_length(&[value, ends[0]].concat()), ends[1].to_vec()].concat();
        let mut set = leb(hashes.len());
        hashes.iter().for_each(|hash| set.extend_from_slice(hash));
        set.extend(leb(signatures));
        (0..signatures).for_each(|_| set.extend(with_length(&one)));
        set.extend_from_slice(ends[2]);
        let name = with_length(b"signature");
        let content = [name, vec![1, 1, 1, 1], with_length(&set), ends[3].to_vec()].concat();
        [&CORE_HEADER[..], &[0], &with_length(&content), &MODULE[8..]].concat()
    }

    #[test]
    fn nothing_rides_unsigned_in_a_section_of_signatures() {
        let hash: [u8; 32] = Sha256::digest(&MODULE[8..]).into();
        let none: [&[u8]; 4] = [&[]; 4];
        assert_eq!(with_section(&[hash], 1, none), signer().sign(MODULE).unwrap());
        trust().verify(&with_section(&[hash], SIGNATURES_MAX, none)).unwrap();
        assert!(trust().verify(&with_section(&[hash], SIGNATURES_MAX + 1, none)).is_err());
        for at in 0..4 {
            let mut ends = none;
            ends[at] = b"x";
            assert!(trust().verify(&with_section(&[hash], 1, ends)).is_err(), "{at}");
        }
        // Of several hashes the last is not the one that counts.
        assert!(trust().verify(&with_section(&[[9; 32], hash], 1, none)).is_err());
    }

    #[test]
    fn a_length_of_more_than_32_bits_is_none() {
        let long = [0, 0x84, 0x80, 0x80, 0x80, 0x10, 1, b'x', b'y', b'z'];
        assert!(signer().sign(&[&CORE_HEADER[..], &long].concat()).is_err());
    }

    #[test]
    fn no_more_keys_are_trusted_than_there_is_room_for() {
        let keys = |count: u8| {
            TrustKeys::new((1..=count).map(|it| SignerKey::from_secret(&[it; 32]).trust_key()))
        };
        assert!(keys(TRUST_KEYS_MAX as u8).is_ok() && keys(TRUST_KEYS_MAX as u8 + 1).is_err());
    }

    /// Whose commitment is the identity, for which `s = k a` satisfies the equation: such a
    /// signature is good by RFC 8032 and not by the strict rule, which all verifiers share.
    #[test]
    fn a_signature_with_a_commitment_of_small_order_is_nobodys() {
        use curve25519_dalek::edwards::EdwardsPoint;
        use curve25519_dalek::{Scalar, traits::Identity as _};
        let secret = Scalar::from(77u64);
        let public = EdwardsPoint::mul_base(&secret).compress();
        let hash: [u8; 32] = Sha256::digest(&MODULE[8..]).into();
        let message = [&DOMAIN[..], &[1, 1, 1], &hash].concat();
        let commitment = EdwardsPoint::identity().compress();
        let challenge = sha2::Sha512::new()
            .chain_update(commitment.as_bytes())
            .chain_update(public.as_bytes())
            .chain_update(&message)
            .finalize();
        let answer = Scalar::from_bytes_mod_order_wide(&challenge.into()) * secret;
        let mut signed = signer().sign(MODULE).unwrap();
        signed[63..95].copy_from_slice(commitment.as_bytes());
        signed[95..127].copy_from_slice(answer.as_bytes());
        let trust = TrustKeys::new([TrustKey::from_bytes(public.as_bytes()).unwrap()]).unwrap();
        assert_eq!(trust.verify(&signed).unwrap_err(), SignatureError::Untrusted);
        assert_eq!(trust.with_tables().verify(&signed).unwrap_err(), SignatureError::Untrusted);
    }
}
