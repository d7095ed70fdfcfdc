//! A program as a model writes it, made into a signed module.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::limits::PROGRAM_BYTES_MAX;
use forge_protocol::signature::{SignatureError, SignedParts, SignerKey};
use serde::Deserialize;

use super::one_line;

/// What is said of a program that does not assemble: of one line, in characters, and
/// in lines.
const LINE_CHARS_MAX: usize = 200;
const LINES_MAX: usize = 10;

/// What a program is written in. Languages that are compiled or interpreted
/// have their place here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Language {
    /// WebAssembly text.
    #[default]
    Wat,
    /// A WebAssembly module, as base64.
    Wasm,
}

/// Why a program was not submitted.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgramError {
    #[error("the program does not assemble: {0}")]
    Text(String),
    #[error("`program` is no base64 ({0}); text goes with \"language\": \"wat\"")]
    Base64(base64::DecodeError),
    #[error("the program has {0} bytes, the limit is {PROGRAM_BYTES_MAX}")]
    TooLarge(usize),
    #[error("the program is no module that can be signed: {0}")]
    Module(SignatureError),
    #[error(
        "the program is unsigned, and this principal has no key here to sign it with: sign it with \
         `forge-vmm sign` and send it with \"language\": \"wasm\", or have the operator give the \
         principal a `sign_with`"
    )]
    Unsigned,
}

/// The module of a program's text.
///
/// # Errors
/// [`ProgramError`]. Assembling takes its time: not on a thread that serves.
pub(super) fn module(text: &str, language: Language) -> Result<Vec<u8>, ProgramError> {
    let module = match language {
        // A binary module would pass `parse_str` as well, but is no text.
        Language::Wat => {
            wat::parse_str(text).map_err(|error| ProgramError::Text(cut(&error.to_string())))?
        }
        Language::Wasm => {
            let text: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
            STANDARD.decode(text).map_err(ProgramError::Base64)?
        }
    };
    if module.len() > PROGRAM_BYTES_MAX as usize {
        return Err(ProgramError::TooLarge(module.len()));
    }
    Ok(module)
}

/// What the assembler says, and where. It repeats the program's line as well, which may
/// be all of the program: of that, what is around the place that it points at.
fn cut(said: &str) -> String {
    // A line of the program, or the mark under it, is behind a bar.
    let barred = |line: &str| {
        let bar = line.find("| ")?;
        let is_number = |c: char| c == ' ' || c.is_ascii_digit();
        line[..bar].chars().all(is_number).then_some(bar + 2)
    };
    let marks = said.lines().filter_map(|line| Some(&line[barred(line)?..]));
    let mark = marks.filter_map(|rest| rest.strip_suffix('^')).next_back();
    let skipped = mark.map_or(0, |it| it.len()).saturating_sub(LINE_CHARS_MAX / 2);
    let line = |line: &str| match barred(line) {
        Some(begin) => {
            let rest: String = line[begin..].chars().skip(skipped).collect();
            format!("{}{}", &line[..begin], one_line(&rest, LINE_CHARS_MAX))
        }
        // The place is at its end.
        None if line.chars().count() > 2 * LINE_CHARS_MAX => {
            let end = line.char_indices().rev().nth(LINE_CHARS_MAX).map_or(0, |(at, _)| at);
            let end = one_line(&line[end..], LINE_CHARS_MAX + 1);
            format!("{}{end}", one_line(line, LINE_CHARS_MAX))
        }
        None => one_line(line, 2 * LINE_CHARS_MAX),
    };
    let mut lines: Vec<String> = said.lines().map(line).collect();
    if lines.len() > LINES_MAX {
        lines.drain(LINES_MAX / 2..lines.len() - LINES_MAX / 2);
    }
    lines.join("\n")
}

/// A module that carries a signature stays as it is, whoever signed it:
/// admission knows whom it trusts. Another gets the principal's. With it comes how many
/// bytes the signature put before all that its author wrote.
///
/// # Errors
/// [`ProgramError`].
pub(super) fn signed(
    module: Vec<u8>,
    signer: Option<&SignerKey>,
) -> Result<(Vec<u8>, usize), ProgramError> {
    match (SignedParts::scan(&module), signer) {
        (Ok(_), _) => Ok((module, 0)),
        (Err(SignatureError::Unsigned), Some(signer)) => {
            let signed = signer.sign(&module).map_err(ProgramError::Module)?;
            let before = signed.len() - module.len();
            Ok((signed, before))
        }
        (Err(SignatureError::Unsigned), None) => Err(ProgramError::Unsigned),
        (Err(error), _) => Err(ProgramError::Module(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forge_protocol::signature::TrustKeys;

    const TEXT: &str = "(module (memory (export \"memory\") 1))";

    fn key(byte: u8) -> SignerKey {
        SignerKey::from_secret(&[byte; 32])
    }

    #[test]
    fn text_and_base64_give_the_same_module() {
        let module_of_text = module(TEXT, Language::Wat).unwrap();
        let text = STANDARD.encode(&module_of_text);
        let (first, second) = text.split_at(10);
        let broken = format!("{first}\n {second}\n");
        assert_eq!(module(&broken, Language::Wasm).unwrap(), module_of_text);
        let error = module(TEXT, Language::Wasm).unwrap_err().to_string();
        assert!(error.contains("wat"), "{error}");
        let error = module("(module (func", Language::Wat).unwrap_err().to_string();
        assert!(error.contains("does not assemble"), "{error}");
    }

    #[test]
    fn a_long_line_is_not_repeated_whole() {
        let told = |text: &str| module(text, Language::Wat).unwrap_err().to_string();
        let long = "a".repeat(1_000_000);
        let padding = " ".repeat(300);
        let begin = told(&format!("(module {padding}(memory oops) (data \"{long}\"))"));
        assert!(begin.len() < 1000 && begin.contains(":1:317\n"), "{begin}");
        // The mark is under it still.
        let lines: Vec<_> = begin.lines().collect();
        let at = lines.last().and_then(|line| line.find('^')).unwrap();
        assert!(lines[lines.len() - 2][at..].starts_with("oops"), "{begin}");
        let end = told(&format!("(module (func call ${long}))"));
        assert!(end.len() < 2000 && end.contains("unknown func"), "{end}");
        let end = told(&format!("(module (data \"{long}\") oops)"));
        assert!(end.len() < 1000 && end.contains(":1:10000"), "{end}");
    }

    #[test]
    fn an_unsigned_program_gets_the_principals_signature_or_is_refused() {
        let unsigned = module(TEXT, Language::Wat).unwrap();
        let trust = TrustKeys::new([key(1).trust_key()]).unwrap();
        let (ours, before) = signed(unsigned.clone(), Some(&key(1))).unwrap();
        assert_eq!(ours.len() - before, unsigned.len());
        assert_eq!(trust.verify(&ours).unwrap().signer(), key(1).trust_key());
        assert!(matches!(signed(unsigned, None), Err(ProgramError::Unsigned)));
    }

    #[test]
    fn a_signature_is_never_replaced() {
        let theirs = key(2).sign(&module(TEXT, Language::Wat).unwrap()).unwrap();
        assert_eq!(signed(theirs.clone(), Some(&key(1))).unwrap(), (theirs.clone(), 0));
        assert_eq!(signed(theirs.clone(), None).unwrap(), (theirs.clone(), 0));
        // One that is broken is not made good either.
        let mut broken = theirs;
        broken.extend_from_slice(b"\x00\x0a\x09signature");
        assert!(matches!(signed(broken, Some(&key(1))), Err(ProgramError::Module(_))));
    }

    #[test]
    fn deep_or_senseless_text_is_an_error() {
        for text in ["(".repeat(1_000_000), "\0".into(), "(module (func i32.const))".into()] {
            assert!(module(&text, Language::Wat).is_err());
        }
    }
}
