//! Integers as JSON Schema has them: `2.0` and `2e0` are one, and some models and
//! generators write them so.

use serde::de::{Deserialize, Deserializer, Error};
use serde_json::Number;

/// Up to here, every integer is a double of its own.
const EXACT_MAX: f64 = (1_u64 << 53) as f64;

/// The integer that a number is, if it is one from 0 on.
pub(crate) fn whole(number: &Number) -> Option<u64> {
    let double = number.as_f64().filter(|it| it.fract() == 0.0 && (0.0..=EXACT_MAX).contains(it));
    number.as_u64().or_else(|| double.map(|it| it as u64))
}

/// One in a member that may be left out or `null`.
///
/// # Errors
/// If it is no number, or none that the member can be.
pub(crate) fn optional<'de, D: Deserializer<'de>, T: TryFrom<u64>>(
    member: D,
) -> Result<Option<T>, D::Error> {
    Option::<Number>::deserialize(member)?.map(|number| of_type(&number)).transpose()
}

/// The same of one that has to be there.
///
/// # Errors
/// As [`optional`].
pub(crate) fn needed<'de, D: Deserializer<'de>, T: TryFrom<u64>>(member: D) -> Result<T, D::Error> {
    of_type(&Number::deserialize(member)?)
}

fn of_type<T: TryFrom<u64>, E: Error>(number: &Number) -> Result<T, E> {
    whole(number).and_then(|whole| T::try_from(whole).ok()).ok_or_else(|| {
        let most = u64::MAX >> (64 - 8 * size_of::<T>());
        E::custom(format!("{number} is no integer from 0 to {most}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_may_be_written_as_a_double_and_is_none_beyond_its_type() {
        let read = |text: &str| {
            let mut json = serde_json::Deserializer::from_str(text);
            optional::<_, u32>(&mut json).map_err(|error| error.to_string())
        };
        for (text, expected) in
            [("null", None), ("7", Some(7)), ("7.0", Some(7)), ("2e3", Some(2000)), ("0", Some(0))]
        {
            assert_eq!(read(text), Ok(expected), "{text}");
        }
        for text in ["7.5", "-1", "-1.0", "4294967296", "4294967296.0", "1e300"] {
            assert!(read(text).unwrap_err().contains("no integer from 0 to 4294967295"), "{text}");
        }
        assert!(read("\"7\"").is_err());
        assert_eq!(whole(&Number::from_f64(9_007_199_254_740_994.0).unwrap()), None);
    }
}
