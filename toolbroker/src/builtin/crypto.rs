//! `crypto`: arithmetic that a program should not have to bring along.
//! Deliberately absent is whatever needs a key: who may use which key is the
//! operator's to say, and there is no place yet to say it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::JsonObject;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256, Sha512};

use super::Plan;
use crate::definition::Effect;

/// `crypto.hash`.
pub(super) fn hash() -> Plan {
    Plan {
        server: "crypto",
        name: "hash",
        description: "Hashes a text (its UTF-8 bytes) or bytes given in base64. Answers with the \
                      digest in lower-case hex.",
        effect: Effect::None,
        input_schema: json!({
            "type": "object",
            "properties": {
                "algorithm": { "enum": ["sha256", "sha512"] },
                "text": { "type": "string", "description": "Text to hash, as UTF-8." },
                "base64": {
                    "type": "string",
                    "contentEncoding": "base64",
                    "description": "Bytes to hash, in base64 with its padding (RFC 4648, 4).",
                },
            },
            "required": ["algorithm"],
            "oneOf": [{ "required": ["text"] }, { "required": ["base64"] }],
            "additionalProperties": false,
        }),
        output_schema: json!({
            "type": "object",
            "properties": { "hex": { "type": "string", "pattern": "^[0-9a-f]+$" } },
            "required": ["hex"],
            "additionalProperties": false,
        }),
        carry_out: carry_out_hash,
    }
}

fn carry_out_hash(arguments: &JsonObject) -> Result<Value, String> {
    let text = |name| arguments.get(name).and_then(Value::as_str);
    let decoded;
    let input = match (text("text"), text("base64")) {
        (Some(text), None) => text.as_bytes(),
        (None, Some(encoded)) => {
            decoded = STANDARD.decode(encoded).map_err(|error| format!("base64: {error}"))?;
            &decoded
        }
        _ => return Err("give either text or base64".to_owned()),
    };
    let hex = match text("algorithm") {
        Some("sha256") => crate::hex(&Sha256::digest(input)),
        Some("sha512") => crate::hex(&Sha512::digest(input)),
        _ => return Err("algorithm is sha256 or sha512".to_owned()),
    };
    Ok(json!({ "hex": hex }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(arguments: Value) -> Result<Value, String> {
        let Value::Object(arguments) = arguments else { unreachable!("tests pass objects") };
        carry_out_hash(&arguments)
    }

    #[test]
    fn digests_are_those_of_fips_180() {
        let of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let text = hash_of(json!({"algorithm": "sha256", "text": "abc"})).unwrap();
        assert_eq!(text, json!({ "hex": of_abc }));
        let bytes = hash_of(json!({"algorithm": "sha256", "base64": "YWJj"})).unwrap();
        assert_eq!(bytes, json!({ "hex": of_abc }));
        let long = hash_of(json!({"algorithm": "sha512", "text": "abc"})).unwrap();
        assert!(long["hex"].as_str().unwrap().starts_with("ddaf35a193617abacc417349ae204131"));
        assert_eq!(long["hex"].as_str().unwrap().len(), 128);
    }

    #[test]
    fn what_is_no_base64_is_told() {
        for encoded in ["YWJ", "YWJj!", "YW Jj"] {
            let why = hash_of(json!({"algorithm": "sha256", "base64": encoded})).unwrap_err();
            assert!(why.contains("base64"), "{why}");
        }
    }
}
