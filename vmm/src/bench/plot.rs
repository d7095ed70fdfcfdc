//! The distributions of all sampled entries in one SVG: a row each, on one
//! logarithmic axis of time.
//!
//! A writer of its own, because the picture is rectangles, lines and text.

use std::fmt::Write as _;

use super::{Outcome, Results};

const WIDTH: f64 = 1080.0;
const NAMES_WIDTH: f64 = 190.0;
const FIGURES_WIDTH: f64 = 250.0;
const HEAD: f64 = 96.0;
const FOOT: f64 = 64.0;
const ROW: f64 = 46.0;
/// How much of its row the highest bar takes.
const BAR_MAX: f64 = 32.0;
/// Width of a bar.
const BAR: f64 = 4.0;

/// Colours for light and for dark surroundings. Floors are grey, ours is not.
const STYLE: &str = "
  text { font-family: system-ui, 'Helvetica Neue', Arial, sans-serif; font-size: 13px; fill: #1c2024; }
  .title { font-size: 18px; font-weight: 600; }
  .quiet { fill: #60646c; }
  .figures { font-size: 12px; fill: #60646c; font-variant-numeric: tabular-nums; }
  .strong { font-weight: 600; fill: #1c2024; }
  .ground { fill: #ffffff; }
  .grid { stroke: #d9dce1; stroke-width: 1; }
  .fine { stroke: #eef0f3; stroke-width: 1; }
  .floor { fill: #9aa1ab; }
  .case { fill: #3b76d6; }
  .p50 { stroke: #1c2024; stroke-width: 2; }
  .p99 { stroke: #d2501f; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text, .strong { fill: #edeef0; }
    .quiet, .figures { fill: #a9b0ba; }
    .ground { fill: #14171a; }
    .grid { stroke: #363c43; }
    .fine { stroke: #22272c; }
    .floor { fill: #737b86; }
    .case { fill: #6ba1f5; }
    .p50 { stroke: #edeef0; }
    .p99 { stroke: #ff8a5c; }
  }
";

/// A logarithmic axis of microseconds.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    /// Over all samples, in whole decades' halves, so that it does not begin
    /// inside a bar.
    fn over(outcomes: &[&Outcome]) -> Option<Self> {
        let all = || outcomes.iter().flat_map(|outcome| &outcome.samples).filter(|us| **us > 0.0);
        let low = all().copied().reduce(f64::min)?;
        let high = all().copied().reduce(f64::max)?;
        let (low, high) = ((low.log10() * 2.0).floor() / 2.0, (high.log10() * 2.0).ceil() / 2.0);
        Some(Self { low, high: high.max(low + 0.5) })
    }

    fn x(&self, us: f64) -> f64 {
        let width = WIDTH - NAMES_WIDTH - FIGURES_WIDTH;
        let part = (us.log10() - self.low) / (self.high - self.low);
        NAMES_WIDTH + width * part.clamp(0.0, 1.0)
    }

    /// One, two and five of every decade, and whether it is a one.
    fn marks(&self) -> impl Iterator<Item = (f64, bool)> {
        let decades = self.low.floor() as i32..=self.high.ceil() as i32;
        let (low, high) = (self.low - 1e-9, self.high + 1e-9);
        decades
            .flat_map(|decade| {
                [1.0, 2.0, 5.0].map(|digit| (digit * 10f64.powi(decade), digit == 1.0))
            })
            .filter(move |(us, _)| (low..=high).contains(&us.log10()))
    }
}

/// The picture, or `None` if nothing was sampled.
#[must_use]
pub fn latency(results: &Results) -> Option<String> {
    let rows: Vec<&Outcome> =
        results.results.iter().filter(|outcome| outcome.unit == "us" && outcome.n > 0).collect();
    let axis = Axis::over(&rows)?;
    let bottom = HEAD + ROW * rows.len() as f64;
    let height = bottom + FOOT;
    let mut svg = String::new();
    // Writing to a string has no way to fail, here and below.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Latency distributions\">\n\
         <style>{STYLE}</style>\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n"
    );
    let fewest = rows.iter().map(|row| row.n).min().unwrap_or(0);
    text(&mut svg, "title", "start", 20.0, 32.0, "forge-vmm bench: how long each takes");
    text(&mut svg, "quiet", "start", 20.0, 54.0, &results.host.to_string());
    let under = format!(
        "commit {} ({}); n = {fewest} each, in turn; disturbed {:.1} %",
        results.commit,
        results.profile,
        results.disturbed * 100.0
    );
    text(&mut svg, "quiet", "start", 20.0, 74.0, &under);

    for (us, whole) in axis.marks() {
        let (x, class) = (axis.x(us), if whole { "grid" } else { "fine" });
        line(&mut svg, class, (x, HEAD - 8.0), (x, bottom));
        if whole {
            text(&mut svg, "quiet", "middle", x, bottom + 20.0, &time(us));
        }
    }
    for (at, outcome) in rows.iter().enumerate() {
        row(&mut svg, &axis, outcome, HEAD + ROW * (at + 1) as f64 - 6.0);
    }
    legend(&mut svg, bottom + 46.0);
    svg.push_str("</svg>\n");
    Some(svg)
}

/// One entry, standing on `base`.
fn row(svg: &mut String, axis: &Axis, outcome: &Outcome, base: f64) {
    let class = if outcome.name.starts_with("floor_") { "floor" } else { "case" };
    text(svg, "strong", "end", NAMES_WIDTH - 14.0, base - 6.0, &outcome.name);
    let mut bars = vec![0u32; ((WIDTH - NAMES_WIDTH - FIGURES_WIDTH) / BAR) as usize + 1];
    for us in &outcome.samples {
        let at = ((axis.x(*us) - NAMES_WIDTH) / BAR) as usize;
        if let Some(bar) = bars.get_mut(at) {
            *bar += 1;
        }
    }
    let most = bars.iter().copied().max().unwrap_or(1).max(1);
    let _ = write!(svg, "<path class=\"{class}\" d=\"");
    for (at, count) in bars.iter().enumerate().filter(|(_, count)| **count > 0) {
        // The root keeps single samples visible beside a high bar.
        let height = (BAR_MAX * (f64::from(*count) / f64::from(most)).sqrt()).max(2.0);
        let x = NAMES_WIDTH + BAR * at as f64;
        let _ = write!(svg, "M{x:.1} {base:.1}v{:.1}h{BAR:.1}v{height:.1}z", -height);
    }
    svg.push_str("\"/>\n");
    line(svg, "grid", (NAMES_WIDTH, base), (WIDTH - FIGURES_WIDTH, base));
    let p99 = outcome.p99;
    for (class, us) in [("p50", Some(outcome.p50)), ("p99", p99)] {
        let Some(us) = us else { continue };
        let x = axis.x(us);
        line(svg, class, (x, base + 3.0), (x, base - BAR_MAX - 2.0));
    }
    let left = WIDTH - FIGURES_WIDTH + 18.0;
    let tail = outcome.tail().map(|tail| format!("×{tail:.1}")).unwrap_or_default();
    let figures = [
        (left, "strong", time(outcome.p50)),
        (left + 78.0, "figures", p99.map(time).unwrap_or_default()),
        (left + 156.0, "figures", tail),
    ];
    for (x, class, what) in figures {
        text(svg, class, "start", x, base - 6.0, &what);
    }
}

fn legend(svg: &mut String, y: f64) {
    let mut x = NAMES_WIDTH;
    for (class, what) in [("case", "ours"), ("floor", "floor of this host")] {
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"12\" height=\"12\"/>",
            y - 11.0
        );
        text(svg, "quiet", "start", x + 18.0, y, what);
        x += 30.0 + 8.0 * what.len() as f64;
    }
    for (class, what) in [("p50", "p50"), ("p99", "p99")] {
        line(svg, class, (x + 6.0, y + 1.0), (x + 6.0, y - 12.0));
        text(svg, "quiet", "start", x + 14.0, y, what);
        x += 58.0;
    }
    let note = "heights: square root of the samples in each bar";
    text(svg, "quiet", "start", x + 8.0, y, note);
    let left = WIDTH - FIGURES_WIDTH + 18.0;
    for (x, what) in [(left, "p50"), (left + 78.0, "p99"), (left + 156.0, "p99/p50")] {
        text(svg, "quiet", "start", x, HEAD - 8.0, what);
    }
}

fn line(svg: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
    );
}

fn text(svg: &mut String, class: &str, anchor: &str, x: f64, y: f64, what: &str) {
    let _ =
        write!(svg, "<text class=\"{class}\" text-anchor=\"{anchor}\" x=\"{x:.1}\" y=\"{y:.1}\">");
    for c in what.chars() {
        match c {
            '<' => svg.push_str("&lt;"),
            '>' => svg.push_str("&gt;"),
            '&' => svg.push_str("&amp;"),
            c if c.is_control() => svg.push(' '),
            c => svg.push(c),
        }
    }
    svg.push_str("</text>\n");
}

/// Microseconds, for a reader: three digits and a unit.
#[must_use]
pub fn time(us: f64) -> String {
    let (value, unit) = match us {
        us if us < 1.0 => (us * 1e3, "ns"),
        us if us < 1e3 => (us, "µs"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    let digits = match value {
        value if value.fract() == 0.0 || value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::bench::{Case, Entry, HostInfo, Measure, run, stats};

    struct Steps(u64);

    impl Case for Steps {
        fn sample(&mut self) -> Result<u64, String> {
            self.0 += 1_000;
            Ok(self.0)
        }
    }

    fn results() -> Results {
        let entry = |name| Entry {
            name,
            group: "test",
            about: "",
            ratio_of: None,
            measure: Measure::Sampled(|| Ok(Box::new(Steps(0)))),
        };
        run(&[entry("floor_a"), entry("b")], 100, |_| ControlFlow::Continue(())).unwrap()
    }

    #[test]
    fn every_sampled_entry_has_a_row_with_its_median() {
        let svg = latency(&results()).unwrap();
        for expected in [">floor_a<", ">b<", "class=\"floor\" d=\"M", "class=\"case\" d=\"M"] {
            assert!(svg.contains(expected), "{expected}");
        }
        // Five are thrown away, so the samples are 6 to 105 us.
        assert_eq!(svg.matches(">55 µs<").count(), 2);
    }

    #[test]
    fn a_host_cannot_write_markup_into_the_picture() {
        let mut results = results();
        results.host = HostInfo { cpu: "<script>&\u{7}".into(), ..results.host };
        let svg = latency(&results).unwrap();
        assert!(svg.contains("&lt;script&gt;&amp; "));
        assert!(!svg.contains("<script>"));
    }

    #[test]
    fn a_case_whose_median_is_nothing_has_no_tail() {
        let mut results = results();
        results.results[0].p50 = 0.0;
        assert_eq!(results.results[0].tail(), None);
        let svg = latency(&results).unwrap();
        assert_eq!(svg.matches(">×").count(), 1, "the other's alone");
        assert!(!svg.contains("inf") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn fewer_than_a_hundred_samples_have_no_p99() {
        let mut results = results();
        results.results[0].p99 = stats::p99(&[1.0; 99]);
        assert_eq!((results.results[0].p99, results.results[0].tail()), (None, None));
        assert_eq!(stats::p99(&[1.0; 100]), Some(1.0));
        let svg = latency(&results).unwrap();
        // One of the other's, and one of the legend.
        assert_eq!(svg.matches("<line class=\"p99\"").count(), 2, "{svg}");
    }

    #[test]
    fn nothing_sampled_is_no_picture() {
        let results = Results { results: Vec::new(), ..results() };
        assert!(latency(&results).is_none());
    }

    #[test]
    fn times_have_three_digits_and_a_unit() {
        let times = [0.25, 7.0, 7.25, 42.42, 420.4, 2_610.0, 3e6].map(time);
        assert_eq!(times, ["250 ns", "7 µs", "7.25 µs", "42.4 µs", "420 µs", "2.61 ms", "3 s"]);
    }
}
