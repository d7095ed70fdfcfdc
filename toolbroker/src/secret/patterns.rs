//! Credentials that nobody told the broker of, known by their shape.
//!
//! Each pattern begins with what its issuer put there so that it can be told
//! from everything else, and has the issuer's length. A shape that innocent
//! text has too (40 characters of base64, 32 digits of hex) is none. All of
//! them are one automaton without backtracking, so that the time is linear in
//! the text. Deliberately absent are passwords, which look like nothing.

use std::ops::Range;
use std::sync::LazyLock;

use regex::bytes::{Regex, RegexBuilder, RegexSet, RegexSetBuilder};

/// What is looked for, and by what name. A group called `s` is what is
/// removed; without one, all of it.
const PATTERNS: [(&str, &str); 24] = [
    ("an AWS access key", r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
    ("a GitHub token", r"\bgh[pousr]_[A-Za-z0-9]{36,}\b"),
    ("a GitHub token", r"\bgithub_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}\b"),
    ("a GitLab token", r"\bgl(?:pat|dt|rt|ptt|soat)-[A-Za-z0-9_-]{20,}\b"),
    ("a Slack token", r"\bxox[abeoprs]-(?:[0-9]{6,20}-){1,3}[A-Za-z0-9]{16,}\b"),
    ("a Slack token", r"\bxapp-[0-9]-[A-Z0-9]{6,20}-[0-9]{6,20}-[a-f0-9]{32,}\b"),
    ("a Stripe key", r"\b[rs]k_(?:live|test)_[0-9A-Za-z]{16,}\b"),
    ("an Anthropic key", r"\bsk-ant-[a-z0-9]{3,8}-[A-Za-z0-9_-]{40,}\b"),
    (
        "an OpenAI key",
        r"\bsk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{16,}T3BlbkFJ[A-Za-z0-9_-]{16,}\b",
    ),
    ("a Google key", r"\bAIza[0-9A-Za-z_-]{35}\b"),
    ("a Google token", r"\bya29\.[0-9A-Za-z_-]{30,}"),
    ("a Google secret", r"\bGOCSPX-[0-9A-Za-z_-]{28}\b"),
    ("an npm token", r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("a PyPI token", r"\bpypi-AgE[A-Za-z0-9_-]{60,}"),
    ("a Hugging Face token", r"\bhf_[A-Za-z]{34}\b"),
    ("a SendGrid key", r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}\b"),
    ("a DigitalOcean token", r"\bdo[opr]_v1_[a-f0-9]{64}\b"),
    ("a Shopify token", r"\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}\b"),
    ("an age identity", r"\bAGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}\b"),
    ("a JWT", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"),
    ("a bearer token", r"(?i)\bbearer[ \t]+(?P<s>[A-Za-z0-9_.~+/-]*[0-9][A-Za-z0-9_.~+/-]{15,}=*)"),
    (
        "an authorization header",
        r#"(?i)\bauthorization["']?[ \t]{0,4}[:=][ \t]{0,4}["']?(?:basic|token|bearer)[ \t]+(?P<s>[A-Za-z0-9_.~+/-]{8,}=*)"#,
    ),
    (
        "a password in a URL",
        r#"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@"'<>]{1,}:(?P<s>[^\s/@"'<>]{3,})@[A-Za-z0-9\[]"#,
    ),
    (PEM, r"-----BEGIN (?:[A-Z0-9]{2,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"),
];

/// Its end is looked for apart: a private key has no length.
const PEM: &str = "a private key";
const PEM_END: &[u8] = b"-----END ";
const DASHES: &[u8] = b"-----";
/// Bounds the automaton, not the text.
const AUTOMATON_BYTES_MAX: usize = 4 * 1024 * 1024;

struct Patterns {
    any: RegexSet,
    each: Vec<Regex>,
}

static PATTERNS_BUILT: LazyLock<Option<Patterns>> = LazyLock::new(build);

/// Builds the automatons, so that no call has to wait for them.
pub(super) fn prepare() {
    LazyLock::force(&PATTERNS_BUILT);
}

/// Where credentials seem to be.
pub(super) fn find(text: &[u8]) -> Vec<Range<usize>> {
    let Some(patterns) = &*PATTERNS_BUILT else { return Vec::new() };
    let mut found = Vec::new();
    for number in &patterns.any.matches(text) {
        let mut last_pem = 0;
        for captures in patterns.each[number].captures_iter(text) {
            let Some(whole) = captures.name("s").or_else(|| captures.get(0)) else { continue };
            let mut end = whole.end();
            if PATTERNS[number].0 == PEM {
                // One that begins in another ends with it. Looked for anew, the
                // end of many would take their number times the text.
                if whole.start() < last_pem {
                    continue;
                }
                end = end_of_pem(text, end);
                last_pem = end;
            }
            found.push(whole.start()..end);
        }
    }
    found
}

/// After its last dashes, or at the end of a text that was cut.
fn end_of_pem(text: &[u8], start: usize) -> usize {
    let find = |from: usize, what: &[u8]| {
        let rest = text.get(from..)?;
        Some(from + rest.windows(what.len()).position(|window| window == what)? + what.len())
    };
    find(start, PEM_END).and_then(|end| find(end, DASHES)).unwrap_or(text.len())
}

fn build() -> Option<Patterns> {
    let patterns = PATTERNS.map(|(_, pattern)| pattern);
    let any = RegexSetBuilder::new(patterns).unicode(false).size_limit(AUTOMATON_BYTES_MAX).build();
    let each = patterns
        .iter()
        .map(|pattern| {
            RegexBuilder::new(pattern).unicode(false).size_limit(AUTOMATON_BYTES_MAX).build()
        })
        .collect::<Result<_, _>>();
    match (any, each) {
        (Ok(any), Ok(each)) => Some(Patterns { any, each }),
        (Err(error), _) | (_, Err(error)) => {
            // Shown never: the test below compiles every one of them.
            tracing::error!(%error, "bug: the patterns of credentials do not compile");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(text: &str) -> Vec<String> {
        let bytes = text.as_bytes();
        find(bytes).into_iter().map(|it| String::from_utf8_lossy(&bytes[it]).into_owned()).collect()
    }

    /// Made here, so that no scanner takes this file for a leak.
    fn samples() -> Vec<String> {
        let x = |length: usize| "a1B2c3D4e5F6g7H8".repeat(80)[..length].to_owned();
        let hex = |length: usize| "0123456789abcdef".repeat(20)[..length].to_owned();
        let letters = |length: usize| "abcdefghijklmnopqrstuvwxyz".repeat(4)[..length].to_owned();
        vec![
            format!("AKI{}", "AIOSFODNN7EXAMPLE"),
            format!("ghp_{}", x(36)),
            format!("github_pat_{}_{}", x(22), x(59)),
            format!("glpat-{}", x(20)),
            format!("xoxb-123456789012-123456789012-{}", x(24)),
            format!("xapp-1-A0123456789-123456789012-{}", hex(64)),
            format!("sk_live_{}", x(24)),
            format!("sk-ant-api03-{}", x(93)),
            format!("sk-proj-{}T3BlbkFJ{}", x(20), x(20)),
            format!("AIza{}", x(35)),
            format!("ya29.{}", x(60)),
            format!("GOCSPX-{}", x(28)),
            format!("npm_{}", x(36)),
            format!("pypi-AgE{}", x(70)),
            format!("hf_{}", letters(34)),
            format!("SG.{}.{}", x(22), x(43)),
            format!("dop_v1_{}", hex(64)),
            format!("shpat_{}", hex(32)),
            format!("AGE-SECRET-KEY-1{}", "QPZRY9X8GF2TVDW0".repeat(4)[..58].to_owned()),
            format!("eyJ{}.eyJ{}.{}", x(20), x(40), x(43)),
        ]
    }

    #[test]
    fn every_pattern_finds_its_own_wherever_it_stands() {
        for sample in samples() {
            for text in [sample.clone(), format!("x={sample};"), format!("(\"{sample}\")\n")] {
                assert_eq!(removed(&text), std::slice::from_ref(&sample), "{text}");
            }
        }
    }

    #[test]
    fn headers_urls_and_keys_lose_what_is_secret_in_them() {
        let token = "abcdef0123456789abcdef";
        assert_eq!(removed(&format!("Bearer {token}")), [token]);
        assert!(
            removed(&format!("Authorization: Basic {token}==")).contains(&format!("{token}=="))
        );
        let url = format!("postgres://app:{token}@db.example.org/x");
        assert_eq!(removed(&url), [token]);
        let begin = format!("-----BEGIN {} KEY-----", "EC PRIVATE");
        let key = format!("{begin}\nMHcCAQ\n-----END EC PRIVATE KEY-----");
        assert_eq!(removed(&format!("x {key} y")), std::slice::from_ref(&key));
        assert_eq!(removed(&format!("x {begin}\nMHc")), [format!("{begin}\nMHc")], "cut off");
    }

    #[test]
    fn keys_that_begin_and_never_end_are_one() {
        let begin = format!("-----BEGIN {} KEY-----\n", "PRIVATE");
        let end = format!("-----END {} KEY-----", "PRIVATE");
        let many = begin.repeat(40_000);
        assert_eq!(find(many.as_bytes()), std::slice::from_ref(&(0..many.len())));
        let (first, second) = (format!("{many}{end}"), format!("{begin}{end}"));
        let two = format!("{first} and {second}");
        assert_eq!(removed(&two), [first, second]);
    }

    #[test]
    fn all_patterns_compile_within_their_bound() {
        assert!(build().is_some());
    }

    #[test]
    fn innocent_text_is_left_alone() {
        let base64 = {
            use base64::Engine as _;
            // A picture's worth of every byte, in an order that repeats late.
            let bytes: Vec<u8> =
                (0..300_000u32).map(|it| (it.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            base64::engine::general_purpose::STANDARD.encode(bytes)
        };
        let texts = [
            "d41d8cd98f00b204e9800998ecf8427e".to_owned(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855".into(),
            "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg==".into(),
            "3f2504e0-4f89-11d3-9a0c-0305e82c3301".into(),
            "01ARZ3NDEKTSV4RRFFQ69G5FAV".into(),
            "9fceb02d0ae598e95dc970b74767f19372d61af8".into(),
            "https://user@example.org:8080/a:b@c?x=1".into(),
            "http://[::1]:8080/ and 12:30@noon".into(),
            "https://example.org/sk-ideas-for-a-long-and-winding-road-trip-in-the-summer".into(),
            "the bearer of this letter is entitled to a long-and-winding-description".into(),
            "authorization: required".into(),
            "task-management-system-with-many-features-and-options".into(),
            "npm_config_cache npm_package_name hf_hub_download_and_a_long_name_for_it".into(),
            "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----".into(),
            "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----".into(),
            "eyJhbGciOiJIUzI1NiJ9 is the start of something".into(),
            "AKIA is four letters, and so is ASIA".into(),
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk".into(),
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl".into(),
            base64,
        ];
        for text in texts {
            assert_eq!(removed(&text), Vec::<String>::new(), "{}", crate::cut(&text, 100));
        }
    }
}
