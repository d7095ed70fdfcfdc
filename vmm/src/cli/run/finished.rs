//! What a run that is over leaves to whoever started it: its report, its output and
//! its artifacts, and how the command ends.

use std::io::{self, Write as _};
use std::process::ExitCode;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_protocol::broker::FoundTool;
use forge_protocol::ending::{RunEnd, Status};
use forge_protocol::run::Artifact;
use forge_protocol::text::visible;
use forge_vmm::report::RunReport;
use serde_json::Value;

use super::{artifacts, found, reason};
use crate::cli::args::RunArgs;
use crate::cli::{CliError, Exit, complain, out, print_json};

/// So many failed calls of a run are shown one by one.
const CALLS_SHOWN: usize = 8;
/// What the levels of log records are called.
const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// A run that is over, whoever carried it out.
pub(super) struct Finished {
    /// Its report, as JSON: what a later service says beside what is known here is
    /// printed all the same.
    report: Value,
    status: Status,
    artifacts: Vec<Artifact>,
}

impl Finished {
    /// One of this process.
    ///
    /// # Errors
    /// If the report cannot be written as JSON.
    pub(super) fn here(report: &RunReport, artifacts: Vec<Artifact>) -> Result<Self, CliError> {
        let status = report.end.status();
        let report = serde_json::to_value(report).map_err(|error| CliError::Host(error.into()))?;
        Ok(Self { report, status, artifacts })
    }

    /// One of a service, by the report that it sent.
    ///
    /// # Errors
    /// If that is none.
    pub(super) fn read(report: &[u8], artifacts: Vec<Artifact>) -> serde_json::Result<Self> {
        let report: Value = serde_json::from_slice(report)?;
        let status = Status::named(text(&report["status"]))
            .ok_or_else(|| serde::de::Error::custom("it has no status that is known here"))?;
        Ok(Self { report, status, artifacts })
    }

    /// Prints it, writes what is to be kept, and says how the command ends. `program` is
    /// what was run, `retrieved` what was found for its intent, `traced` what became of its
    /// trace.
    ///
    /// # Errors
    /// If what was found cannot be written as JSON.
    pub(super) fn show(
        mut self,
        args: &RunArgs,
        program: &[u8],
        retrieved: &[FoundTool],
        traced: Result<(), CliError>,
    ) -> Result<ExitCode, CliError> {
        if !retrieved.is_empty() {
            let retrieved = serde_json::to_value(found::reported(retrieved));
            self.report["retrieved"] = retrieved.map_err(|error| CliError::Host(error.into()))?;
        }
        let end = RunEnd::of_kind(text(&self.report["kind"]));
        let why = text(&self.report["reason"]).to_owned();
        let why = reason::in_words_of(args, program, end, why);
        self.report["reason"] = why.into();
        let folder = args.artifacts.as_deref();
        let kept = artifacts::keep(folder, args.json, &self.artifacts, |at, path| {
            if let Some(Value::Object(entry)) = self.report["artifacts"].get_mut(at) {
                entry.insert("path".into(), path.into());
            }
        });
        let printed = if args.json { print_json(&self.report) } else { self.print() };
        Ok(ended(self.status, [printed, traced, kept]))
    }

    /// The output to standard output; what the program logged, and how it ended,
    /// if badly, to standard error.
    fn print(&self) -> Result<(), CliError> {
        let mut out = out();
        let written = out.write_all(&self.output()).and_then(|()| out.flush());
        for log in list(&self.report["log"]) {
            let level = log["level"].as_u64().and_then(|level| usize::try_from(level).ok());
            let level = level.and_then(|level| LEVELS.get(level)).unwrap_or(&"log");
            let _ = writeln!(io::stderr(), "[{level}] {}", visible(text(&log["text"])));
        }
        match self.report["log_dropped"].as_u64() {
            None | Some(0) => {}
            Some(n) => complain(&format!("the run's log was full: {n} more records were dropped")),
        }
        if self.status != Status::Ok {
            // A program need not say which of its calls came to nothing.
            let mut failed =
                list(&self.report["tool_calls"]).filter(|call| text(&call["status"]) != "ok");
            for call in failed.by_ref().take(CALLS_SHOWN) {
                let (tool, status) = (text(&call["tool"]), text(&call["status"]));
                complain(&format!("call of {}: {status}", visible(tool)));
            }
            match failed.count() {
                0 => {}
                more => complain(&format!("{more} more calls failed: --json has all")),
            }
            complain(&format!("{}: {}", self.status.as_str(), text(&self.report["reason"])));
        }
        Ok(written?)
    }

    fn output(&self) -> Vec<u8> {
        let output = text(&self.report["output"]);
        match text(&self.report["output_encoding"]) {
            "base64" => STANDARD.decode(output).unwrap_or_default(),
            _ => output.into(),
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// How the command ends after a run: as the run did, unless that went well and
/// something of what it left could not be written.
pub(super) fn ended(
    status: Status,
    written: impl IntoIterator<Item = Result<(), CliError>>,
) -> ExitCode {
    let mut code = ExitCode::from(status.exit_code());
    for error in written.into_iter().filter_map(Result::err) {
        complain(&error);
        if status == Status::Ok {
            code = Exit::Failed.into();
        }
    }
    code
}
