//! Other values that are as secret as a credential: what a server makes of it once it
//! has it, and tells as its own.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::{Secret, is_short};

/// The other values of one credential.
pub(super) fn kin(secret: &Secret) -> Vec<Secret> {
    let value = secret.expose();
    let all = as_forms(value).into_iter().chain(of_basic(value)).chain(in_other_cases(value));
    all.filter(|it| !is_short(it) && it != value).filter_map(|it| Secret::new(it).ok()).collect()
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
        assert_eq!(kin_of(&format!("basic {encoded}"))[1..], [pair, password]);
        // Too short to be told from innocent text, and no pair.
        assert_eq!(kin_of(&STANDARD.encode("somebody:short")), ["somebody:short"]);
        for other in ["no pair at all", "bytes:\u{1}\u{2}"] {
            assert_eq!(kin_of(&STANDARD.encode(other)), Vec::<String>::new());
        }
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
}
