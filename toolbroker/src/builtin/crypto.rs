//! `crypto.hash`: arithmetic that a program should not have to bring along.
//! What needs a key is in [`keys`](super::keys).

use rmcp::model::JsonObject;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256, Sha512};

use super::{Failure, Plan, Work, bytes_of, text};
use crate::definition::Effect;

/// `crypto.hash`.
pub(super) fn hash() -> Plan {
    Plan {
        server: "crypto",
        name: "hash",
        description: "Hashes a text (its UTF-8 bytes) or bytes given in base64. Answers with the \
                      digest in lower-case hex."
            .to_owned(),
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
        work: Work::in_place(|_, arguments| hash_of(arguments)),
    }
}

fn hash_of(arguments: &JsonObject) -> Result<Value, Failure> {
    let input = bytes_of(arguments)?;
    let hex = match text(arguments, "algorithm") {
        Some("sha256") => crate::hex(&Sha256::digest(input)),
        Some("sha512") => crate::hex(&Sha512::digest(input)),
        _ => return Err(Failure::bad_request("algorithm is sha256 or sha512")),
    };
    Ok(json!({ "hex": hex }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(arguments: Value) -> Result<Value, String> {
        let Value::Object(arguments) = arguments else { unreachable!("tests pass objects") };
        super::hash_of(&arguments).map_err(|failure| failure.message)
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
