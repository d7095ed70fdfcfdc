//! Decimal numbers, compared exactly.
//!
//! JSON writes numbers in decimal, and most decimals have no binary form: a
//! comparison over floats says that 0.1 + 0.2 is over 0.3. So a number is
//! compared as it is written, digit by digit. What cannot be held exactly is
//! refused and not rounded. Deliberately absent is arithmetic.

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
        assert!(Decimal::parse(&"9".repeat(39)).is_none());
        assert!(Decimal::parse(&format!("{}{}", "9".repeat(38), "0".repeat(100))).is_some());
    }
}
