//! What happened in a run, kept so far as there is room, for whoever follows
//! it; and how it ended.
//!
//! Each event has a number, from 1, without gaps. A follower says the last it
//! has and gets the next ones. Where those are no longer kept, it is told how
//! many it missed. The end comes last and is always kept.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::locks::lock;
use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::service::{Finish, RunEvent};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::watch;

/// Events of one run that are kept.
const EVENTS_MAX: usize = 4096;
/// What they may take together, in bytes.
const EVENTS_BYTES_MAX: usize = 1024 * 1024;

/// How a run ended.
#[derive(Debug)]
pub(crate) struct End {
    /// The report, JSON on one line.
    pub(crate) report: Bytes,
    pub(crate) head: Head,
    pub(crate) artifacts: Vec<Artifact>,
}

/// Something that a run left. Its content is its own: whoever takes that keeps
/// nothing else of the run.
#[derive(Debug)]
pub(crate) struct Artifact {
    pub(crate) file_name: String,
    pub(crate) media_type: String,
    pub(crate) content: Bytes,
}

/// What the door reads of a report.
#[derive(Debug, Deserialize)]
pub(crate) struct Head {
    pub(crate) run_id: String,
    pub(crate) status: String,
    pub(crate) kind: String,
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) retry_after_ms: Option<u64>,
    #[serde(default)]
    pub(crate) tool_calls: Vec<serde::de::IgnoredAny>,
}

impl End {
    /// `None` if that is no report.
    pub(crate) fn of(finish: Finish) -> Option<Self> {
        let head = serde_json::from_slice(&finish.report).ok()?;
        let artifacts = finish.artifacts.into_iter().map(|artifact| Artifact {
            file_name: artifact.file_name(),
            media_type: artifact.media_type,
            content: artifact.content.into(),
        });
        Some(Self { report: finish.report.into(), head, artifacts: artifacts.collect() })
    }

    /// The report, to be put into another object.
    pub(crate) fn raw_report(&self) -> Box<RawValue> {
        serde_json::from_slice(&self.report).unwrap_or_else(|_| RawValue::NULL.to_owned())
    }
}

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) struct Happened {
    pub(crate) name: &'static str,
    /// JSON on one line.
    pub(crate) data: String,
}

/// What the service says happened, in JSON.
pub(crate) fn happened(event: &RunEvent) -> Happened {
    let (name, data) = match event {
        RunEvent::Admitted { run_id } => ("admitted", json!({ "run_id": run_id.to_string() })),
        RunEvent::Log(log) => ("log", json!({ "level": log.level, "text": log.text })),
        RunEvent::Output(bytes) => {
            let (encoding, text) = match std::str::from_utf8(bytes) {
                Ok(text) => ("utf8", Cow::from(text)),
                Err(_) => ("base64", Cow::from(STANDARD.encode(bytes))),
            };
            ("output", json!({ "output": text, "output_encoding": encoding }))
        }
        RunEvent::Called { call, tool } => ("called", json!({ "id": call, "tool": tool.as_str() })),
        RunEvent::Settled { call, code, duration_ns } => {
            let status = code.map_or("ok", forge_protocol::abi::CallCode::as_str);
            let duration_us = duration_ns / 1000;
            ("settled", json!({ "id": call, "status": status, "duration_us": duration_us }))
        }
    };
    Happened { name, data: data.to_string() }
}

/// The events of one run.
#[derive(Debug, Default)]
pub(crate) struct Events {
    kept: Mutex<Buffer>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Buffer {
    /// How many were forgotten: the first that is kept has the next number.
    forgotten: u64,
    events: VecDeque<Happened>,
    bytes: usize,
    end: Option<Ended>,
}

/// How it ended, or that this will not be known.
#[derive(Clone, Debug)]
pub(crate) enum Ended {
    Reported(Arc<End>),
    /// The service went away with the run.
    Lost,
}

/// What a follower gets next.
#[derive(Debug)]
pub(crate) enum Next {
    /// Events, the first with this number; so many before it are forgotten.
    Events { missed: u64, first: u64, events: Vec<Happened> },
    /// The end, with its number.
    End(u64, Ended),
    /// Nothing has happened since: wait for it.
    Wait,
}

impl Events {
    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        lock(&self.kept)
    }

    pub(crate) fn push(&self, event: Happened) {
        self.buffer().push(event);
        self.changed.send_replace(());
    }

    pub(crate) fn end(&self, end: End) {
        self.end_as(Ended::Reported(Arc::new(end)));
    }

    pub(crate) fn lose(&self) {
        self.end_as(Ended::Lost);
    }

    fn end_as(&self, end: Ended) {
        self.buffer().end = Some(end);
        self.changed.send_replace(());
    }

    /// How it ended, if it did.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.buffer().end.clone()
    }

    /// Told of every change from now on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// What comes after the event of this number.
    pub(crate) fn after(&self, last: u64) -> Next {
        self.buffer().after(last)
    }

    /// What this takes, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let buffer = self.buffer();
        let end = match &buffer.end {
            Some(Ended::Reported(end)) => {
                let artifacts = end.artifacts.iter();
                end.report.len() + artifacts.map(|it| it.content.len()).sum::<usize>()
            }
            Some(Ended::Lost) | None => 0,
        };
        buffer.bytes + end
    }
}

impl Buffer {
    fn push(&mut self, event: Happened) {
        self.bytes += event.data.len();
        self.events.push_back(event);
        while self.events.len() > EVENTS_MAX || self.bytes > EVENTS_BYTES_MAX {
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= oldest.data.len();
            self.forgotten += 1;
        }
    }

    fn after(&self, last: u64) -> Next {
        let newest = self.forgotten + self.events.len() as u64;
        if last >= newest
            && let Some(end) = &self.end
        {
            return Next::End(newest + 1, end.clone());
        }
        let begin = last.max(self.forgotten);
        let missed = begin - last.min(begin);
        let skipped = usize::try_from(begin - self.forgotten).unwrap_or(usize::MAX);
        let events: Vec<_> = self.events.iter().skip(skipped).cloned().collect();
        if events.is_empty() && missed == 0 {
            return Next::Wait;
        }
        Next::Events { missed, first: begin + 1, events }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str) -> Happened {
        Happened { name: "log", data: text.into() }
    }

    fn numbers(next: Next) -> (u64, u64, usize) {
        match next {
            Next::Events { missed, first, events } => (missed, first, events.len()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_follower_gets_what_comes_after_the_last_it_has() {
        let events = Events::default();
        assert!(matches!(events.after(0), Next::Wait));
        for text in ["a", "b", "c"] {
            events.push(log(text));
        }
        assert_eq!(numbers(events.after(0)), (0, 1, 3));
        assert_eq!(numbers(events.after(2)), (0, 3, 1));
        assert!(matches!(events.after(3), Next::Wait));
        // A number that never was.
        assert!(matches!(events.after(u64::MAX), Next::Wait));
        events.lose();
        assert_eq!(numbers(events.after(2)), (0, 3, 1));
        for last in [3, 4, u64::MAX] {
            assert!(matches!(events.after(last), Next::End(4, Ended::Lost)));
        }
    }

    #[test]
    fn forgotten_events_are_counted_by_number_and_by_size() {
        let events = Events::default();
        for _ in 0..EVENTS_MAX + 5 {
            events.push(log(""));
        }
        assert_eq!(numbers(events.after(0)), (5, 6, EVENTS_MAX));
        assert_eq!(numbers(events.after(2)), (3, 6, EVENTS_MAX));
        assert_eq!(numbers(events.after(6)), (0, 7, EVENTS_MAX - 1));

        events.push(log(&"x".repeat(EVENTS_BYTES_MAX - 1)));
        events.push(log("yy"));
        assert_eq!(numbers(events.after(0)).2, 1);
        events.push(log(&"x".repeat(EVENTS_BYTES_MAX + 1)));
        // Nothing is left, and a follower hears that.
        let newest = EVENTS_MAX as u64 + 8;
        assert_eq!(numbers(events.after(0)), (newest, newest + 1, 0));
        assert!(matches!(events.after(newest), Next::Wait));
        events.lose();
        assert_eq!(numbers(events.after(0)), (newest, newest + 1, 0));
    }

    #[test]
    fn output_that_is_no_text_is_base64() {
        let data = |bytes: &[u8]| happened(&RunEvent::Output(bytes.into())).data;
        assert_eq!(data("ü\n".as_bytes()), r#"{"output":"ü\n","output_encoding":"utf8"}"#);
        assert_eq!(data(&[0xff, 0]), r#"{"output":"/wA=","output_encoding":"base64"}"#);
    }
}
