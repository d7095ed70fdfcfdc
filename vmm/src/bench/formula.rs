//! What a case's ratio is to: floors with factors, as data, so that the table
//! and the JSON say what was divided by what.

use std::fmt;

/// A sum of floors, in microseconds, or how often a second that sum fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Formula {
    rate: bool,
    terms: &'static [(f64, &'static str)],
}

impl Formula {
    /// Floors, each so many times, in microseconds.
    #[must_use]
    pub const fn sum(terms: &'static [(f64, &'static str)]) -> Self {
        Self { rate: false, terms }
    }

    /// How often that sum fits into a second: 10^6 over it.
    #[must_use]
    pub const fn rate(terms: &'static [(f64, &'static str)]) -> Self {
        Self { rate: true, terms }
    }

    /// The floors and how many times each counts.
    #[must_use]
    pub const fn terms(&self) -> &'static [(f64, &'static str)] {
        self.terms
    }

    /// Whether it names this floor.
    #[must_use]
    pub fn needs(&self, floor: &str) -> bool {
        self.terms.iter().any(|(_, name)| *name == floor)
    }

    /// What it comes to, given each floor in microseconds; `None` if one is
    /// missing.
    #[must_use]
    pub fn value(&self, floor_us: impl Fn(&str) -> Option<f64>) -> Option<f64> {
        let mut sum_us = 0.0;
        for (factor, floor) in self.terms {
            sum_us += factor * floor_us(floor)?;
        }
        Some(if self.rate { 1e6 / sum_us } else { sum_us })
    }
}

impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rate {
            f.write_str("1e6 / (")?;
        }
        for (at, (factor, floor)) in self.terms.iter().enumerate() {
            if at > 0 {
                f.write_str(" + ")?;
            }
            if *factor != 1.0 {
                write!(f, "{factor} ")?;
            }
            f.write_str(floor)?;
        }
        if self.rate {
            f.write_str(")")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_without_one_of_its_floors_has_no_value() {
        let formula = Formula::sum(&[(1.0, "a"), (1.0, "b")]);
        assert_eq!(formula.value(|name| (name == "a").then_some(1.0)), None);
        assert_eq!(formula.value(|_| Some(1.5)), Some(3.0));
    }
}
