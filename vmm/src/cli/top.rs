//! `forge-vmm top`: how a service stands, once a second, in a terminal; one
//! frame where nobody watches.
//!
//! It says what `status --json` says, and `status` without it prints one frame.
//! Nothing of the terminal is changed, so there is nothing to put back whenever
//! it is ended.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forge_protocol::text::visible;
use serde_json::Value;

use super::args::TopArgs;
use super::status::{connect, standing};
use super::{CliError, Exit};

/// How often it looks.
const EVERY: Duration = Duration::from_secs(1);

/// Shows a service until it is gone, or once.
pub(crate) fn top(args: &TopArgs) -> Result<ExitCode, CliError> {
    let mut client = connect(&args.service)?;
    let is_watched = io::stdout().is_terminal();
    let mut before = None;
    loop {
        let asked = Instant::now();
        let status = standing(&mut client, &args.service)?;
        let ended = ended(&status);
        let rate = before.map(|(then, ended_then): (Instant, u64)| {
            let seconds = asked.duration_since(then).as_secs_f64();
            ended.saturating_sub(ended_then) as f64 / seconds
        });
        before = Some((asked, ended));
        let frame = frame(&args.service, &status, rate);
        let mut out = io::stdout().lock();
        if !is_watched {
            out.write_all(frame.as_bytes())?;
            return Ok(Exit::Ok.into());
        }
        // To the top; each line over the old one, and nothing below.
        write!(out, "\x1b[H{}\x1b[J", frame.replace('\n', "\x1b[K\n"))?;
        out.flush()?;
        drop(out);
        std::thread::sleep(EVERY.saturating_sub(asked.elapsed()));
    }
}

/// Runs that ended, however they did.
fn ended(status: &Value) -> u64 {
    let ended = status["runs"]["ended"].as_object().into_iter().flatten();
    ended.filter_map(|(_, runs)| runs.as_u64()).sum()
}

fn number(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".into(), |number| number.to_string())
}

fn word(value: &Value) -> String {
    visible(value.as_str().unwrap_or("-"))
}

fn duration(us: &Value) -> String {
    match us.as_u64() {
        None => "-".into(),
        Some(us) if us < 10_000 => format!("{us} us"),
        Some(us) if us < 10_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        Some(us) => format!("{:.1} s", us as f64 / 1e6),
    }
}

/// The toolbroker: which it is, or why it is not there.
fn broker(broker: &Value) -> String {
    if broker.is_null() {
        return "none".into();
    }
    let process = match broker["pid"].as_u64() {
        Some(pid) => format!("process {pid}"),
        None => "away".into(),
    };
    let reason = broker["reason"].as_str().map(|why| format!(": {}", visible(why)));
    let (restarts, reason) = (number(&broker["restarts"]), reason.unwrap_or_default());
    format!("{process}, restarts {restarts}{reason}")
}

/// A service's status for a person, with how many runs ended in each second.
pub(super) fn frame(service: &Path, status: &Value, rate: Option<f64>) -> String {
    let (runs, bounds, pool) = (&status["runs"], &status["bounds"], &status["pool"]);
    let up = Duration::from_secs(status["uptime_s"].as_u64().unwrap_or(0));
    let mut text = format!(
        "forge-vmm {} {} at {}, process {}, up {}\n\n",
        word(&status["version"]),
        word(&status["state"]),
        visible(&service.display().to_string()),
        number(&status["pid"]),
        humantime::format_duration(up),
    );
    let rate = rate.map_or_else(String::new, |rate| format!(", {rate:.1} a second"));
    let _ = writeln!(
        text,
        "runs     {} of {} running, {} of {} waiting{rate}",
        number(&runs["running"]),
        number(&bounds["runs_max"]),
        number(&runs["waiting"]),
        number(&bounds["queue_max"]),
    );
    let ended = runs["ended"].as_object().into_iter().flatten();
    let ended: Vec<_> =
        ended.map(|(how, runs)| format!("{} {}", number(runs), visible(how))).collect();
    let ended = if ended.is_empty() { "none yet".into() } else { ended.join(", ") };
    let _ = writeln!(text, "ended    {ended}");
    let _ = writeln!(
        text,
        "pool     {} VMs ready, {} more reserved for a principal; target {}, maximum {}",
        number(&pool["standing"]),
        number(&pool["owned"]),
        number(&pool["target"]),
        number(&pool["ready_max"]),
    );
    let _ = writeln!(
        text,
        "clients  connections {}, threads {}",
        number(&status["connections"]),
        number(&status["threads"]),
    );
    let _ = writeln!(text, "broker   {}", broker(&status["broker"]));
    let _ = writeln!(text, "programs isolation {}", word(&status["isolation"]));
    for weakness in pool["weaknesses"].as_array().into_iter().flatten() {
        let _ = writeln!(text, "weaker   {}", word(weakness));
    }
    if let Some(silent) = pool["silent_s"].as_u64() {
        let silent = humantime::format_duration(Duration::from_secs(silent));
        let _ = writeln!(text, "zygote   has said nothing for {silent}: no VM is made");
    }
    if pool["resets_disproven"].as_u64().is_some_and(|resets| resets > 0) {
        let _ = writeln!(text, "resets   {} left something", number(&pool["resets_disproven"]));
    }
    let _ = writeln!(text, "\n{:<16}{:>10}{:>12}{:>12}", "a run takes", "runs", "p50", "p99");
    for (name, key) in [("in a minute", "last_minute"), ("since the start", "since_start")] {
        let of = &status["latency"][key];
        let (p50, p99) = (duration(&of["p50_us"]), duration(&of["p99_us"]));
        let _ = writeln!(text, "{name:<16}{:>10}{p50:>12}{p99:>12}", number(&of["runs"]));
    }
    let principals = status["principals"].as_array();
    if let Some(principals) = principals.filter(|principals| !principals.is_empty()) {
        let _ = writeln!(
            text,
            "\n{:<32}{:>10}{:>10}{:>10}",
            "principal", "running", "here", "may have"
        );
        for of in principals {
            let (running, here) = (number(&of["running"]), number(&of["here"]));
            let name = word(&of["name"]);
            let _ =
                writeln!(text, "{name:<32}{running:>10}{here:>10}{:>10}", number(&of["runs_max"]));
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_frame_has_runs_pool_latencies_and_principals_and_no_strangers_bytes() {
        let status = json!({
            "version": "0.1.0", "state": "serving", "pid": 7, "uptime_s": 61, "connections": 2,
            "threads": 3, "runs": { "running": 1, "waiting": 4, "ended": { "ok": 5, "refused": 6 } },
            "bounds": { "runs_max": 8, "queue_max": 9 },
            "isolation": "vm",
            "broker": { "pid": null, "restarts": 2, "reason": "gone\u{1b}[2J" },
            "pool": {
                "standing": 2, "owned": 1, "target": 3, "ready_max": 16,
                "weaknesses": ["cpu_not_grouped"], "resets_disproven": 0,
                "silent_s": 9,
            },
            "latency": {
                "last_minute": { "runs": 0 },
                "since_start": { "runs": 5, "p50_us": 950, "p99_us": 12_500 },
            },
            "principals": [{ "name": "a\u{1b}[2J", "running": 1, "here": 5, "runs_max": 12 }],
        });
        assert_eq!(ended(&status), 11);
        let text = frame(Path::new("/run/s"), &status, Some(2.0));
        for part in [
            "serving at /run/s, process 7, up 1m 1s",
            "1 of 8 running, 4 of 9 waiting, 2.0 a second",
            "5 ok, 6 refused",
            "2 VMs ready, 1 more reserved for a principal; target 3, maximum 16",
            "since the start          5      950 us     12.5 ms",
            "in a minute              0           -           -",
            "broker   away, restarts 2: gone",
            "programs isolation vm\nweaker   cpu_not_grouped\n",
            "zygote   has said nothing for 9s: no VM is made\n\n",
            "1         5        12",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
