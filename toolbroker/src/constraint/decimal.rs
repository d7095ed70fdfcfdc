//! Decimal numbers, compared exactly.
//!
//! JSON writes numbers in decimal, and most decimals have no binary form: a
//! comparison over floats says that 0.1 + 0.2 is over 0.3. So a number is
//! compared as it is written, digit by digit. What cannot be held exactly is
//! refused and not rounded. That begins where arguments are read: values of JSON
//! are held as integers of 64 bits or doubles here, as in most servers, and a
//! number that would become another by that is refused whatever is granted.
//! Deliberately absent is arithmetic.

use std::cmp::Ordering;

/// Significant digits held: what a `u128` holds whatever the digits are.
const DIGITS_MAX: usize = 38;
/// The largest power of ten, either way. JSON numbers beyond those of a
/// 64-bit float are refused long before.
const EXPONENT_MAX: i32 = 1_000;

/// A decimal number: `±mantissa × 10^exponent`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decimal {
    negative: bool,
    /// Ends in no zero, unless it is zero.
    mantissa: u128,
    exponent: i32,
}

impl Decimal {
    /// Reads a number as JSON writes it. `None` if it is no JSON number, or
    /// has more digits than are held.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (number, power) = match rest.split_once(['e', 'E']) {
            Some((number, power)) => (number, Some(power)),
            None => (rest, None),
        };
        let (whole, fraction) = match number.split_once('.') {
            Some((whole, fraction)) => (whole, Some(fraction)),
            None => (number, None),
        };
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || (whole.len() > 1 && whole.starts_with('0')) {
            return None;
        }
        if fraction.is_some_and(|fraction| !digits(fraction)) {
            return None;
        }
        let fraction = fraction.unwrap_or_default();
        let power: i32 = match power {
            None => 0,
            Some(power) => {
                let unsigned = power.strip_prefix(['+', '-']).unwrap_or(power);
                if !digits(unsigned) {
                    return None;
                }
                power.parse().ok()?
            }
        };

        let all = [whole, fraction].concat();
        let significant = all.trim_start_matches('0').trim_end_matches('0');
        if significant.is_empty() {
            return Some(Self { negative: false, mantissa: 0, exponent: 0 });
        }
        if significant.len() > DIGITS_MAX {
            return None;
        }
        let zeros_behind = all.len() - all.trim_end_matches('0').len();
        let shift = i32::try_from(zeros_behind).ok()? - i32::try_from(fraction.len()).ok()?;
        let exponent = power.checked_add(shift)?;
        if exponent.abs() > EXPONENT_MAX {
            return None;
        }
        Some(Self { negative, mantissa: significant.parse().ok()?, exponent })
    }

    /// How many digits the mantissa has.
    fn digits(self) -> i32 {
        // 1 to 39 always fits.
        self.mantissa.checked_ilog10().map_or(0, |log| log as i32 + 1)
    }

    fn compare_size(self, other: Self) -> Ordering {
        if self.mantissa == 0 || other.mantissa == 0 {
            return self.mantissa.cmp(&other.mantissa);
        }
        // Where the first digit stands decides; where it is the same, the
        // shorter mantissa gets zeros until both are as long, at most 38
        // digits.
        let (digits, others) = (self.digits(), other.digits());
        (digits + self.exponent).cmp(&(others + other.exponent)).then_with(|| {
            let longest = digits.max(others);
            let widened = |it: Self, digits: i32| {
                it.mantissa * 10_u128.pow((longest - digits).unsigned_abs())
            };
            widened(self, digits).cmp(&widened(other, others))
        })
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.negative, other.negative) {
            (false, false) => self.compare_size(*other),
            (true, true) => other.compare_size(*self),
            (false, true) => Ordering::Greater,
            (true, false) => Ordering::Less,
        }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Decimal {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Decimal {}

/// Shorter numbers without an exponent are doubles of at most 15 digits, which
/// all come back as they were written.
const SHORT_BYTES: usize = 15;

/// The first byte of a number in these arguments, a text of JSON, that reaches a tool as
/// another than its program has.
pub(crate) fn first_changed(arguments: &[u8]) -> Option<usize> {
    first(arguments, |number| is_held(number) || names_double(number))
}

/// The first byte of a number in this text of JSON that is held as another than is
/// written there.
pub(super) fn first_inexact(json: &[u8]) -> Option<usize> {
    first(json, is_held)
}

fn first(json: &[u8], is_held: impl Fn(&str) -> bool) -> Option<usize> {
    let (mut at, mut in_string) = (0, false);
    while let Some(byte) = json.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'-' | b'0'..=b'9' if !in_string => {
                let number = json[at..].iter().take_while(|byte| {
                    matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')
                });
                let bytes = &json[at..at + number.count()];
                if !std::str::from_utf8(bytes).is_ok_and(&is_held) {
                    return Some(at);
                }
                at += bytes.len();
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Whether a number of JSON is an integer of 64 bits, or as some double is
/// written: with the fewest digits that name it, or, where it has a point or an
/// exponent, rounded to as many as there are.
fn is_held(text: &str) -> bool {
    if text.len() <= SHORT_BYTES && !text.contains(['e', 'E']) {
        return true;
    }
    if text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok() {
        return true;
    }
    let (Some(written), Ok(double)) = (Decimal::parse(text), text.parse::<f64>()) else {
        return false;
    };
    let is_written = |shown: String| Decimal::parse(&shown) == Some(written);
    let behind_first = written.digits().unsigned_abs().saturating_sub(1) as usize;
    double.is_finite()
        && (is_written(format!("{double:e}"))
            || text.contains(['.', 'e', 'E']) && is_written(format!("{double:.behind_first$e}")))
}

/// Digits that name each double, and so many some languages write although fewer would
/// do, or another last one (AssemblyScript, of a quarter of all doubles).
const DOUBLE_DIGITS: u32 = 17;
/// From here on doubles are further apart than integers.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// Whether a number of JSON, with a point or an exponent, has no more digits than name a
/// double. Its program has that double, and so has the tool.
fn names_double(text: &str) -> bool {
    let has_exponent = text.contains(['e', 'E']);
    let (Some(written), Ok(double)) = (Decimal::parse(text), text.parse::<f64>()) else {
        return false;
    };
    (has_exponent || text.contains('.') && double.abs() < WHOLE_MAX)
        && written.digits().unsigned_abs() <= DOUBLE_DIGITS
        && double.is_normal()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Decimal {
        Decimal::parse(text).unwrap()
    }

    #[test]
    fn numbers_are_ordered_as_they_are_written() {
        let ascending = [
            "-1e999",
            "-18446744073709551616",
            "-2",
            "-1.5",
            "-0.1",
            "-1e-999",
            "0",
            "1e-999",
            "0.1",
            "0.10000000000000000001",
            "0.3",
            "0.30000000000000004",
            "1",
            "9007199254740992",
            "9007199254740993",
            "18446744073709551615",
            "18446744073709551616",
            "99999999999999999999999999999999999999",
            "1e38",
            "1e999",
        ];
        for (i, a) in ascending.iter().enumerate() {
            for (j, b) in ascending.iter().enumerate() {
                assert_eq!(number(a).cmp(&number(b)), i.cmp(&j), "{a} and {b}");
            }
        }
    }

    #[test]
    fn numbers_that_would_become_others_are_found_and_no_others() {
        for held in [
            "0",
            "-0",
            "-0.0",
            "7",
            "1e2",
            "1E+2",
            "0.1",
            "-19.99",
            "1e308",
            "5e-324",
            "18446744073709551615",
            "-9223372036854775808",
            "9007199254740993",
            // As languages write a double: the fewest digits, or so many.
            "2.08223050489476864E17",
            "4.9E-324",
            "1234567890123.449951",
            "0.10000000000000000555",
            "100000000000000000.000",
            "0.30000000000000004",
            "0.30000000000000007",
            "0.30000000000000001",
            "1.1677701180048833e+41",
            "0.10000000000000001",
            "1.7976931348623157e308",
            "3.1415926535897931",
            "1e23",
            "123456789012345680000",
            "0.000000000000000000000000001",
        ] {
            assert_eq!(first_changed(held.as_bytes()), None, "{held}");
            let value: serde_json::Value = serde_json::from_str(held).unwrap();
            // What is held is sent on, and is the same number still.
            let sent: f64 = value.to_string().parse().unwrap();
            assert_eq!(sent.to_bits() << 1, held.parse::<f64>().unwrap().to_bits() << 1, "{held}");
        }
        for changed in [
            "18446744073709551616",
            "-9223372036854775809",
            "12345678901234567890123",
            "4.99999999999999999999999",
            "0.300000000000000012",
            "9007199254740992.7",
            "1.2345678901234567e-320",
            "9007199254740993.0",
            "1e-400",
            "123456789.123456789123",
        ] {
            assert_eq!(first_changed(changed.as_bytes()), Some(0), "{changed}");
            let within = format!(r#"{{"a\\":"1e-400 \" 1e-400","b":[1,{changed}]}}"#);
            let at = within.rfind(changed);
            assert_eq!(first_changed(within.as_bytes()), at, "{within}");
        }
        // What an operator writes is not taken for another, nor for a program's.
        for inexact in ["0.30000000000000007", "0.30000000000000001", "9.845756703740103"] {
            assert_eq!(first_inexact(inexact.as_bytes()), Some(0), "{inexact}");
        }
    }

    #[test]
    fn a_number_is_the_same_however_it_is_written() {
        for (a, b) in [
            ("1", "1.0"),
            ("1", "10e-1"),
            ("1500", "1.5E+3"),
            ("0", "-0"),
            ("0.000", "0e7"),
            ("100e-2", "1.00"),
        ] {
            assert_eq!(number(a), number(b), "{a} and {b}");
        }
    }

    #[test]
    fn what_is_no_number_or_not_held_exactly_is_refused() {
        for text in [
            "",
            "-",
            "+1",
            "01",
            "1.",
            ".5",
            "1e",
            "1e+",
            "1.5.2",
            "0x1",
            "NaN",
            "1 ",
            " 1",
            "١",
            "1e99999999999",
            "1e1001",
            "1e-1001",
            "1e--1",
            "1e+-1",
        ] {
            assert!(Decimal::parse(text).is_none(), "{text:?}");
        }
        assert!(["1e1000", "1e-1000"].iter().all(|text| Decimal::parse(text).is_some()));
        assert!(Decimal::parse(&"9".repeat(39)).is_none());
        assert!(Decimal::parse(&format!("{}{}", "9".repeat(38), "0".repeat(100))).is_some());
    }
}
