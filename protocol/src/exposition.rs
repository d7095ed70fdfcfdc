//! Figures as Prometheus reads them: its text exposition format 0.0.4, which is what
//! [`Reply::Metrics`](crate::broker::Reply::Metrics) carries.
//!
//! Names and helps are the caller's own, and written as they are. The value of a label
//! may be anything. Deliberately absent are registries: whoever counts keeps its counts.

use alloc::string::String;
use core::fmt::{Display, Write as _};

/// What is told, one family of figures after the other.
#[derive(Debug, Default)]
pub struct Exposition(String);

/// Figures of one name that differ by their labels.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Exposition {
    /// One that goes on behind what another told.
    #[must_use]
    pub fn behind(text: String) -> Self {
        Self(text)
    }

    /// A count that only grows.
    pub fn counter<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family(name, help, "counter")
    }

    /// A figure that goes up and down.
    pub fn gauge<'a>(&'a mut self, name: &'a str, help: &str) -> Family<'a> {
        self.family(name, help, "gauge")
    }

    /// How `count` times are spread that are `sum_s` seconds together. `buckets` are upper
    /// bounds in seconds, in order, each with how many times are within it.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        buckets: impl IntoIterator<Item = (f64, u64)>,
        (count, sum_s): (u64, f64),
    ) {
        let Family { text, .. } = self.family(name, help, "histogram");
        // Writing to a string has no way to fail, here and below.
        for (bound_s, within) in buckets {
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound_s}\"}} {within}");
        }
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum {sum_s}\n{name}_count {count}");
    }

    /// The finished exposition.
    #[must_use]
    pub fn into_text(self) -> String {
        self.0
    }

    fn family<'a>(&'a mut self, name: &'a str, help: &str, kind: &str) -> Family<'a> {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: &mut self.0, name }
    }
}

impl Family<'_> {
    /// The one figure of it.
    pub fn is(self, value: impl Display) {
        let _ = writeln!(self.text, "{} {value}", self.name);
    }

    /// The figure with these labels.
    pub fn of(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(self.name);
        for (position, (label, of)) in labels.iter().enumerate() {
            self.text.push(if position == 0 { '{' } else { ',' });
            self.text.push_str(label);
            self.text.push_str("=\"");
            for character in of.chars() {
                match character {
                    '\\' => self.text.push_str("\\\\"),
                    '"' => self.text.push_str("\\\""),
                    '\n' => self.text.push_str("\\n"),
                    other => self.text.push(other),
                }
            }
            self.text.push('"');
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_told_by_family_with_their_labels() {
        let mut told = Exposition::behind("before 1\n".into());
        told.gauge("open", "Open now.").is(-3);
        let mut calls = told.counter("calls_total", "Calls.");
        calls.of(&[("server", "shop"), ("end", "ok")], 2_u64);
        calls.of(&[], 1);
        let expected = "before 1\n\
            # HELP open Open now.\n# TYPE open gauge\nopen -3\n\
            # HELP calls_total Calls.\n# TYPE calls_total counter\n\
            calls_total{server=\"shop\",end=\"ok\"} 2\ncalls_total 1\n";
        assert_eq!(told.into_text(), expected);
    }

    #[test]
    fn a_label_keeps_its_line_whatever_it_holds() {
        let mut told = Exposition::default();
        told.counter("x", "X.").of(&[("a", "\"} 9\nx{a=\"\\é")], 1);
        let expected = "# HELP x X.\n# TYPE x counter\nx{a=\"\\\"} 9\\nx{a=\\\"\\\\é\"} 1\n";
        assert_eq!(told.into_text(), expected);
    }

    #[test]
    fn a_histogram_ends_with_all_its_times() {
        let mut told = Exposition::default();
        told.histogram("t", "T.", [(0.000_005, 1), (2.5, 3)], (4, 3609.0064));
        let expected = "# HELP t T.\n# TYPE t histogram\n\
            t_bucket{le=\"0.000005\"} 1\nt_bucket{le=\"2.5\"} 3\nt_bucket{le=\"+Inf\"} 4\n\
            t_sum 3609.0064\nt_count 4\n";
        assert_eq!(told.into_text(), expected);
    }
}
