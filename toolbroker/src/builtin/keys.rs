//! `crypto.hmac` and `crypto.verify`: the operator's keys, used by name.
//!
//! A program names a key and never has it. The operator says of each key what
//! it is good for and, if not everybody who is granted the tool, for whom: a
//! key that programs verify with is not one that they sign with. Compared is
//! in constant time. Deliberately absent are keys that a program brings, and
//! signing with Ed25519: what signs in somebody's name is no tool's business
//! yet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::{Signature, VerifyingKey};
use forge_protocol::hex::unhex;
use ring::hmac;
use rmcp::model::JsonObject;
use serde_json::{Value, json};

use super::{Caller, Failure, Plan, Work, bytes_of, text, with_bytes};
use crate::definition::Effect;

/// One key, and what it may be used for.
pub struct Key {
    /// The key itself.
    pub material: Material,
    /// Whether programs may sign with it.
    pub signs: bool,
    /// Whether programs may verify with it.
    pub verifies: bool,
    /// Whose programs; everybody's who is granted the tool if `None`.
    pub principals: Option<BTreeSet<String>>,
    /// The files that it came from, which are nobody else's to read.
    pub files: Vec<PathBuf>,
}

/// A key by its algorithm.
pub enum Material {
    /// HMAC (RFC 2104) with SHA-256 or SHA-512, as the key says.
    Hmac(hmac::Key),
    /// The public half of an Ed25519 key (RFC 8032).
    Ed25519(VerifyingKey),
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

type Keys = Arc<BTreeMap<String, Key>>;

/// `crypto.hmac` and `crypto.verify`, each if there is a key for it.
pub(super) fn plans(keys: BTreeMap<String, Key>) -> Vec<Plan> {
    let keys: Keys = Arc::new(keys);
    let named = |useful: fn(&Key) -> bool| -> Vec<String> {
        keys.iter().filter(|(_, key)| useful(key)).map(|(name, _)| name.clone()).collect()
    };
    let signing = named(|key| key.signs);
    let verifying = named(|key| key.verifies);
    let mut plans = Vec::new();
    if !signing.is_empty() {
        plans.push(hmac_plan(Arc::clone(&keys), &signing));
    }
    if !verifying.is_empty() {
        plans.push(verify_plan(keys, &verifying));
    }
    plans
}

fn hmac_plan(keys: Keys, names: &[String]) -> Plan {
    let mut properties = JsonObject::new();
    properties.insert("key".into(), json!({ "enum": names, "description": "The key's name." }));
    Plan {
        server: "crypto",
        name: "hmac",
        description: "Computes the HMAC of a text or of bytes with a key that the operator \
                      keeps. Answers with the code in lower-case hex."
            .to_owned(),
        effect: Effect::None,
        input_schema: with_bytes("What to sign", properties, &["key"]),
        output_schema: json!({
            "type": "object",
            "properties": { "hex": { "type": "string", "pattern": "^[0-9a-f]+$" } },
            "required": ["hex"],
            "additionalProperties": false,
        }),
        work: Work::in_place(move |caller, arguments| sign(&keys, caller, arguments)),
    }
}

fn verify_plan(keys: Keys, names: &[String]) -> Plan {
    let mut properties = JsonObject::new();
    properties.insert("key".into(), json!({ "enum": names, "description": "The key's name." }));
    properties.insert(
        "signature".into(),
        json!({ "type": "string", "maxLength": 256, "description": "The signature or HMAC." }),
    );
    properties.insert(
        "encoding".into(),
        json!({ "enum": ["hex", "base64"], "description": "How the signature is written." }),
    );
    Plan {
        server: "crypto",
        name: "verify",
        description: "Checks an HMAC or an Ed25519 signature with a key that the operator keeps. \
                      Answers whether it is valid."
            .to_owned(),
        effect: Effect::None,
        input_schema: with_bytes("What was signed", properties, &["key", "signature", "encoding"]),
        output_schema: json!({
            "type": "object",
            "properties": { "valid": { "type": "boolean" } },
            "required": ["valid"],
            "additionalProperties": false,
        }),
        work: Work::in_place(move |caller, arguments| verify(&keys, caller, arguments)),
    }
}

/// A key that this caller may use. Which of the two reasons it is that it may
/// not is nobody's business but the operator's.
fn usable<'a>(
    keys: &'a Keys,
    caller: &Caller,
    arguments: &JsonObject,
    useful: fn(&Key) -> bool,
) -> Result<&'a Key, Failure> {
    let name = text(arguments, "key").unwrap_or_default();
    let allowed = |key: &&Key| {
        useful(key)
            && key.principals.as_ref().is_none_or(|all| all.contains(caller.principal.as_ref()))
    };
    keys.get(name).filter(allowed).ok_or_else(|| {
        tracing::info!(key = ?name, principal = ?caller.principal, "key refused");
        Failure::new("not_allowed", "this key is not for this program to use like this")
    })
}

fn sign(keys: &Keys, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
    let key = usable(keys, caller, arguments, |key| key.signs)?;
    let message = bytes_of(arguments)?;
    match &key.material {
        Material::Hmac(key) => Ok(json!({ "hex": crate::hex(hmac::sign(key, &message).as_ref()) })),
        Material::Ed25519(_) => Err(Failure::bad_request("a public key signs nothing")),
    }
}

fn verify(keys: &Keys, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
    let key = usable(keys, caller, arguments, |key| key.verifies)?;
    let message = bytes_of(arguments)?;
    let written = text(arguments, "signature").unwrap_or_default();
    let signature = match text(arguments, "encoding") {
        Some("hex") => unhex(written),
        _ => STANDARD.decode(written).ok(),
    };
    let signature = signature.ok_or_else(|| {
        Failure::bad_request("the signature is not in the encoding that is given")
    })?;
    let valid = match &key.material {
        // Compares in constant time.
        Material::Hmac(key) => hmac::verify(key, &message, &signature).is_ok(),
        // Strict: a key of small order would make any message valid.
        Material::Ed25519(key) => Signature::from_slice(&signature)
            .is_ok_and(|signature| key.verify_strict(&message, &signature).is_ok()),
    };
    Ok(json!({ "valid": valid }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::RunId;

    fn caller(principal: &str) -> Caller {
        Caller {
            principal: principal.into(),
            run: RunId([0; 16]),
            session: None,
            deadline: tokio::time::Instant::now(),
            grant: crate::grant::tests::granting_nothing(),
        }
    }

    fn arguments(value: Value) -> JsonObject {
        value.as_object().unwrap().clone()
    }

    fn keys() -> Keys {
        // RFC 4231, test case 2, and RFC 8032, 7.1, test 2.
        let hmac = hmac::Key::new(hmac::HMAC_SHA256, b"Jefe");
        let public = unhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
        let public = VerifyingKey::from_bytes(&public.unwrap().try_into().unwrap()).unwrap();
        let principals = Some(BTreeSet::from(["alice".to_owned()]));
        let key = |material, signs, verifies, principals| Key {
            material,
            signs,
            verifies,
            principals,
            files: Vec::new(),
        };
        Arc::new(BTreeMap::from([
            ("both".to_owned(), key(Material::Hmac(hmac.clone()), true, true, None)),
            ("checks".to_owned(), key(Material::Hmac(hmac.clone()), false, true, None)),
            ("hers".to_owned(), key(Material::Hmac(hmac), true, true, principals)),
            ("public".to_owned(), key(Material::Ed25519(public), false, true, None)),
        ]))
    }

    const CODE: &str = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
    const MESSAGE: &str = "what do ya want for nothing?";

    #[test]
    fn an_hmac_is_that_of_rfc_4231_and_verifies() {
        let asked = arguments(json!({ "key": "both", "text": MESSAGE }));
        assert_eq!(sign(&keys(), &caller("bob"), &asked).unwrap(), json!({ "hex": CODE }));
        for (signature, valid) in
            [(CODE.to_owned(), true), (CODE.to_uppercase(), true), (CODE.replace('5', "6"), false)]
        {
            let asked = arguments(json!({
                "key": "checks", "text": MESSAGE, "signature": signature, "encoding": "hex",
            }));
            let said = verify(&keys(), &caller("bob"), &asked).unwrap();
            assert_eq!(said, json!({ "valid": valid }), "{signature}");
        }
    }

    #[test]
    fn a_shortened_hmac_is_not_valid() {
        for signature in ["", &CODE[..2], &CODE[..32]] {
            let asked = arguments(json!({
                "key": "both", "text": MESSAGE, "signature": signature, "encoding": "hex",
            }));
            let said = verify(&keys(), &caller("bob"), &asked).unwrap();
            assert_eq!(said, json!({ "valid": false }));
        }
    }

    #[test]
    fn an_ed25519_signature_is_that_of_rfc_8032_and_no_other() {
        let good = "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da\
                    085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00";
        let bad = good.replacen('9', "8", 1);
        for (signature, message, valid) in
            [(good, "72", true), (good, "73", false), (&bad, "72", false), ("00", "72", false)]
        {
            let message = STANDARD.encode(unhex(message).unwrap());
            let asked = arguments(json!({
                "key": "public", "base64": message, "signature": signature, "encoding": "hex",
            }));
            let said = verify(&keys(), &caller("bob"), &asked).unwrap();
            assert_eq!(said, json!({ "valid": valid }), "{signature}");
        }
    }

    #[test]
    fn a_key_serves_whom_and_what_it_is_for_and_nothing_else() {
        for (who, key, allowed) in [
            ("alice", "hers", true),
            ("bob", "hers", false),
            ("Alice", "hers", false),
            ("bob", "checks", false),
            ("bob", "public", false),
            ("bob", "none", false),
        ] {
            let asked = arguments(json!({ "key": key, "text": "x" }));
            let said = sign(&keys(), &caller(who), &asked);
            assert_eq!(said.is_ok(), allowed, "{who} {key}");
            if let Err(failure) = said {
                assert_eq!(failure.code, "not_allowed");
            }
        }
    }

    #[test]
    fn what_is_no_signature_in_its_encoding_is_told() {
        for (signature, encoding) in [("0", "hex"), ("zz", "hex"), ("!", "base64")] {
            let asked = arguments(json!({
                "key": "both", "text": "x", "signature": signature, "encoding": encoding,
            }));
            assert_eq!(verify(&keys(), &caller("a"), &asked).unwrap_err().code, "bad_request");
        }
    }
}
