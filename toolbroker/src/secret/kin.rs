//! Other values that are as secret as a credential: its parts, and what a server makes
//! of it once it has it, and tells as its own.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::{SECRET_BYTES_MIN, Secret, is_short};

/// What the name of something has that is a credential.
const CREDENTIAL_NAME_PARTS: [&str; 9] =
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL", "AUTH", "COOKIE", "DSN"];
/// What a setting is called that is a credential, without what parts words, where a value
/// is a list of settings. Others beside it say where and how, and are none.
const CREDENTIAL_SETTINGS: [&str; 17] = [
    "PASSWORD",
    "PASSWD",
    "PWD",
    "PASS",
    "SSLPASSWORD",
    "SECRET",
    "CLIENTSECRET",
    "TOKEN",
    "ACCESSTOKEN",
    "AUTHTOKEN",
    "KEY",
    "APIKEY",
    "ACCESSKEY",
    "ACCOUNTKEY",
    "SECRETKEY",
    "SECRETACCESSKEY",
    "SHAREDACCESSKEY",
];
/// What an `Authorization` header's value begins with.
const SCHEMES: [&str; 6] = ["Bearer", "Basic", "Digest", "Token", "ApiKey", "Key"];

/// The other values of one credential.
pub(super) fn kin(secret: &Secret) -> Vec<Secret> {
    let value = secret.expose();
    let mut all: Vec<String> = as_forms(value).into_iter().collect();
    all.extend(of_basic(value).into_iter().chain(in_other_cases(value)).chain(parts(value)));
    let misread: Vec<String> =
        all.iter().map(String::as_str).chain([value]).flat_map(misread).collect();
    all.extend(misread);
    all.retain(|it| !is_short(it) && it != value);
    all.into_iter().filter_map(|it| Secret::new(it).ok()).collect()
}

/// Whether a variable, a header or a member is called like a credential.
pub(crate) fn names_credential(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    CREDENTIAL_NAME_PARTS.iter().any(|part| name.contains(part))
}

/// What is secret of a header's value: all of it but the scheme, and each part,
/// since a server that tells it may tell one cookie alone.
pub(crate) fn parts_of_header(value: &str) -> Vec<&str> {
    let bare = without_scheme(value);
    let mut parts = vec![bare.unwrap_or(value).trim()];
    // A name and a key, as some have them behind a scheme.
    parts.extend(bare.and_then(|it| it.trim().split_once(':')).map(|(_, key)| key));
    for part in bare.unwrap_or(value).split([' ', ';', ',']) {
        // A cookie's name is none.
        let value = part.split_once('=').map_or(part, |(_, value)| value);
        parts.extend([part, value.trim_matches('"')]);
    }
    parts.retain(|part| !is_short(part));
    parts.sort_unstable();
    parts.dedup();
    parts
}

/// The same of a value that is a credential for sure, and may have any characters: its
/// parts where it is cookies, and what stands behind a scheme.
pub(crate) fn parts_of_credential<'v>(header: &str, value: &'v str) -> Vec<&'v str> {
    if header.eq_ignore_ascii_case("cookie") {
        return parts_of_header(value);
    }
    let Some(bare) = without_scheme(value).map(str::trim) else { return Vec::new() };
    let key = bare.split_once(':').map(|(_, key)| key);
    [bare].into_iter().chain(key).filter(|part| !is_short(part)).collect()
}

/// What stands behind a scheme, if one is there.
fn without_scheme(value: &str) -> Option<&str> {
    let is_scheme = |word: &str| SCHEMES.iter().any(|scheme| word.eq_ignore_ascii_case(scheme));
    value.split_once(' ').filter(|(word, _)| is_scheme(word)).map(|(_, bare)| bare)
}

/// What is secret of any value by itself: what stands behind a scheme, the password of
/// an address, and what has a credential's name in a list of settings, as databases are
/// told how to be reached.
fn parts(value: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    parts.extend(without_scheme(value).map(|bare| bare.trim().to_owned()));
    if let Some((_, rest)) = value.split_once("://")
        && let Some((user, _)) = rest.rsplit_once('@')
        && let Some((_, password)) = user.split_once(':')
    {
        parts.push(password.to_owned());
    }
    for (name, value) in value.split([' ', ';', ',', '&', '?']).filter_map(|it| it.split_once('='))
    {
        let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        if CREDENTIAL_SETTINGS.contains(&&*name.to_ascii_uppercase()) {
            parts.push(value.trim_matches(['"', '\'']).to_owned());
        }
    }
    parts
}

/// A value with letters beyond ASCII as those spell it who take its bytes for those of
/// another encoding: HTTP's libraries read headers as Latin-1.
fn misread(value: &str) -> Vec<String> {
    if value.is_ascii() {
        return Vec::new();
    }
    let in_octal = |byte: u8| match byte {
        0x80.. => format!("\\{byte:03o}"),
        _ => char::from(byte).into(),
    };
    let mut all: Vec<String> = vec![
        value.bytes().map(char::from).collect(),
        value.bytes().map(windows_1252).collect(),
        value.bytes().map(in_octal).collect(),
    ];
    // What is left of it has to be told from innocent text.
    if value.bytes().filter(u8::is_ascii_graphic).count() >= SECRET_BYTES_MIN {
        // As Latin-1 read as UTF-8, and as what cannot be written in ASCII.
        for mark in [char::REPLACEMENT_CHARACTER, '?'] {
            all.push(value.chars().map(|it| if it.is_ascii() { it } else { mark }).collect());
        }
    }
    all
}

/// The character of a byte in the encoding of many editors and pages.
fn windows_1252(byte: u8) -> char {
    const FROM_80: [char; 32] = [
        '€', '\u{81}', '‚', 'ƒ', '„', '…', '†', '‡', 'ˆ', '‰', 'Š', '‹', 'Œ', '\u{8d}', 'Ž',
        '\u{8f}', '\u{90}', '‘', '’', '“', '”', '•', '–', '—', '˜', '™', 'š', '›', 'œ', '\u{9d}',
        'ž', 'Ÿ',
    ];
    match byte {
        0x80..0xa0 => FROM_80[usize::from(byte - 0x80)],
        other => other.into(),
    }
}

/// As forms and most queries spell a blank.
fn as_forms(value: &str) -> Option<String> {
    value.contains(' ').then(|| value.replace(' ', "+"))
}

/// What a server reads behind `Basic` (RFC 7617): name and password together, and the
/// password, which is what is told of one that is wrong.
fn of_basic(value: &str) -> Vec<String> {
    let encoded = match value.split_once(' ') {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("basic") => rest.trim(),
        _ => value,
    };
    let Ok(pair) = STANDARD.decode(encoded).map(Zeroizing::new) else { return Vec::new() };
    let Ok(pair) = std::str::from_utf8(&pair) else { return Vec::new() };
    match pair.split_once(':') {
        Some((_, password)) if !pair.contains(char::is_control) => {
            vec![pair.to_owned(), password.to_owned()]
        }
        _ => Vec::new(),
    }
}

/// A UUID, or bytes in hex, which whoever keeps them as numbers tells in another case,
/// and without dashes.
fn in_other_cases(value: &str) -> Vec<String> {
    let digits: String = value.chars().filter(|it| *it != '-').collect();
    let is_uuid = digits.len() == 32 && value.len() == 36;
    if digits.len() < 16
        || digits.len() != value.len() && !is_uuid
        || !digits.bytes().all(|it| it.is_ascii_hexdigit())
    {
        return Vec::new();
    }
    [value, &digits].iter().flat_map(|it| [it.to_lowercase(), it.to_uppercase()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kin_of(value: &str) -> Vec<String> {
        let kin = kin(&Secret::new(value.to_owned()).unwrap());
        kin.iter().map(|it| it.expose().to_owned()).collect()
    }

    #[test]
    fn what_stands_behind_basic_is_secret_in_its_parts() {
        let pair = "svc-account:Corr3ct-Horse/Battery";
        let password = "Corr3ct-Horse/Battery";
        let encoded = STANDARD.encode(pair);
        assert_eq!(kin_of(&encoded), [pair, password]);
        assert_eq!(kin_of(&format!("basic {encoded}"))[1..], [pair, password, &encoded]);
        // Too short to be told from innocent text, and no pair.
        assert_eq!(kin_of(&STANDARD.encode("somebody:short")), ["somebody:short"]);
        for other in ["no pair at all", "bytes:\u{1}\u{2}"] {
            assert_eq!(kin_of(&STANDARD.encode(other)), Vec::<String>::new());
        }
    }

    #[test]
    fn what_is_secret_in_a_value_is_secret_by_itself() {
        for (value, part) in [
            ("Bearer abcSECRET-12345", "abcSECRET-12345"),
            ("postgres://app:PASS%21word@db.internal/orders", "PASS%21word"),
            ("redis://:pass/word@1@cache:6379", "pass/word@1"),
            ("Server=db;User Id=sa;Password=Corr3ct-Horse;Encrypt=true", "Corr3ct-Horse"),
            ("host=db user=app pwd='Corr3ct-Horse'", "Corr3ct-Horse"),
            (r#"host=db user=app pwd="Corr3ct-Horse""#, "Corr3ct-Horse"),
            ("cache:6379,password=Corr3ct-Horse,ssl=True", "Corr3ct-Horse"),
            ("https://hooks.example/in?token=Corr3ct-Horse", "Corr3ct-Horse"),
            ("https://hooks.example/in?a=b&api_key=Corr3ct-Horse&c=d", "Corr3ct-Horse"),
            ("DefaultEndpointsProtocol=https;AccountKey=abc+/12345==", "abc+/12345=="),
        ] {
            assert!(kin_of(value).iter().any(|it| it == part), "{value}");
        }
        for innocent in [
            "correct horse battery telephone",
            "https://db.internal/a?b=c@d",
            "DSN=inventory;UID=application",
            "SharedAccessKeyName=RootManageSharedAccessKey;Endpoint=sb://one",
            "mongodb://db/?authMechanism=SCRAM-SHA-256",
            "Keyspace=production",
        ] {
            let kin = kin_of(innocent);
            assert!(kin.iter().all(|it| it.len() == innocent.len()), "{kin:?}");
        }
        let of = |header: &str, value| parts_of_credential(header, value).join(" ");
        for header in ["Cookie", "cookie", "COOKIE"] {
            let parts = of(header, "session=8f3a99bc12; theme=dark");
            assert!(parts.starts_with("8f3a99bc12 "), "{parts}");
        }
        assert!(parts_of_header(r#"session="8f3a99bc12"; theme=dark"#).contains(&"8f3a99bc12"));
        assert!(parts_of_header("one=8f3a99bc12,two=9a4b00cd23").contains(&"8f3a99bc12"));
        assert_eq!(of("Authorization", "ApiKey reader:abc-12345"), "reader:abc-12345 abc-12345");
        assert_eq!(of("X-Api-Key", "correct horse battery telephone"), "");
        assert_eq!(parts_of_header("ApiKey reader:abc-12345"), ["abc-12345", "reader:abc-12345"]);
    }

    #[test]
    fn a_value_beyond_ascii_is_as_secret_misread() {
        let kin = kin_of("Schlüssel-Straße");
        for other in [
            "SchlÃ¼ssel-StraÃ\u{9f}e",
            "SchlÃ¼ssel-StraÃŸe",
            "Schl\u{fffd}ssel-Stra\u{fffd}e",
            "Schl?ssel-Stra?e",
            r"Schl\303\274ssel-Stra\303\237e",
        ] {
            assert!(kin.iter().any(|it| it == other), "{other}: {kin:?}");
        }
        let parts = kin_of("Bearer Schlüssel-Straße");
        assert!(parts.iter().any(|it| it == "SchlÃ¼ssel-StraÃŸe"), "{parts:?}");
    }

    #[test]
    fn a_number_is_as_secret_in_another_case() {
        let uuid = "3F2504E0-4F89-41D3-9A0C-0305E82C3301";
        assert_eq!(
            kin_of(uuid),
            [
                "3f2504e0-4f89-41d3-9a0c-0305e82c3301",
                "3f2504e04f8941d39a0c0305e82c3301",
                "3F2504E04F8941D39A0C0305E82C3301",
            ]
        );
        assert_eq!(kin_of("00112233445566aa"), ["00112233445566AA"; 2]);
        for other in ["00aabbcc", "00112233-445566aa", "token-of-somebody-else"] {
            assert_eq!(kin_of(other), Vec::<String>::new(), "{other}");
        }
    }

    #[test]
    fn what_is_called_like_a_credential_is_one_in_small_letters_too() {
        for name in ["API_KEY", "api_key", "Authorization", "x-auth-token", "sentryDsn"] {
            assert!(names_credential(name), "{name}");
        }
        for name in ["PATH", "home", "Accept", "lang"] {
            assert!(!names_credential(name), "{name}");
        }
    }

    #[test]
    fn a_value_without_enough_ascii_is_not_looked_for_as_question_marks() {
        let kin = kin_of("пароль-пароль");
        assert!(kin.iter().all(|it| !it.contains(['?', '\u{fffd}'])), "{kin:?}");
    }
}
