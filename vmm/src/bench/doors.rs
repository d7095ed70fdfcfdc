//! What each door costs over the bare warm run: the same run in a supervisor
//! of this process and through the door of a service, one after the other, and
//! the difference.
//!
//! The client's part is in it as far as every client has it: a request is
//! written and its answer read on a connection that is kept. That the request
//! is encoded, and the answer understood, is not, but for `door_vsock`, whose client
//! does both. Which of the two comes first changes with each sample: the second finds
//! in the caches what the first left there.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forge_client::blocking::Client;
use forge_protocol::service::Order;
use serde_json::{Value, json};

use super::cases::{RESET, quiet};
use super::fixture::{self, PRINCIPAL, Served};
use super::program::{self, Program};
use super::quiet::wait_for_quiet;
use super::{Case, Entry, Formula, Measure, said};
use crate::supervisor::Supervisor;

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "door_none",
        group: "doors",
        about: "the bare warm run, without any door: a pooled VM that was reset, in this process",
        ratio_of: None,
        measure: Measure::Sampled(none),
    },
    Entry {
        name: "door_vsock",
        group: "doors",
        about: "the same through the service's own protocol, over its unix socket: what is more",
        ratio_of: Some(Formula::sum(&[(2.0, "floor_socket")])),
        measure: Measure::Sampled(vsock),
    },
    Entry {
        name: "door_http",
        group: "doors",
        about: "the same through POST /v1/runs, over loopback: what is more",
        ratio_of: Some(Formula::sum(&[(2.0, "floor_socket")])),
        measure: Measure::Sampled(http),
    },
    Entry {
        name: "door_mcp",
        group: "doors",
        about: "the same through run_program of forge-vmm mcp, over pipes: what is more",
        ratio_of: Some(Formula::sum(&[(2.0, "floor_socket")])),
        measure: Measure::Sampled(mcp),
    },
];

/// How long an answer may take.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);
/// The most of an answer's head, in bytes.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// A way to a service.
trait Door {
    /// Carries a run out: how long that took, and its report.
    fn run(&mut self, order: &Order) -> Result<(Duration, Value), String>;
}

struct Over<D> {
    bare: Supervisor,
    program: Program,
    /// `None` measures the bare run itself.
    door: Option<D>,
    served: Option<Served>,
    /// Whether the door has the first turn.
    door_first: bool,
}

fn none() -> Result<Box<dyn Case>, String> {
    make::<Vsock>(|_| Ok(None), "")
}

fn vsock() -> Result<Box<dyn Case>, String> {
    make(|served| Ok(Some(Vsock(served.client().map_err(said)?))), "")
}

fn http() -> Result<Box<dyn Case>, String> {
    let config = format!("[http]\nlisten = '127.0.0.1:0'\nprincipal = '{PRINCIPAL}'\n");
    make(
        |served| {
            let place = served.http().ok_or("the service opens no HTTP door")?;
            let socket = TcpStream::connect(place.trim_start_matches("http://")).map_err(said)?;
            socket.set_nodelay(true).map_err(said)?;
            socket.set_read_timeout(Some(ANSWER_TIME_MAX)).map_err(said)?;
            Ok(Some(Http { host: place.trim_start_matches("http://").to_owned(), socket }))
        },
        &config,
    )
}

fn mcp() -> Result<Box<dyn Case>, String> {
    make(|served| Mcp::start(served).map(Some), "")
}

fn make<D: Door + 'static>(
    open: impl Fn(&mut Served) -> Result<Option<D>, String>,
    config: &str,
) -> Result<Box<dyn Case>, String> {
    let program = Program::new()?;
    let bare = fixture::supervisor(&program, RESET, None)?;
    let mut served = Served::start_with(&program, RESET, config)?;
    let door = open(&mut served)?;
    let served = door.is_some().then_some(served);
    Ok(Box::new(Over { bare, program, door, served, door_first: false }))
}

impl<D: Door> Over<D> {
    fn without(&mut self) -> Result<Duration, String> {
        let order = fixture::submission(&mut self.program, false);
        let started = Instant::now();
        // What follows it a service does after its answer.
        let result = self.bare.run(&order);
        let took = started.elapsed();
        let report = &result.report;
        check(&order, &json!({ "status": report.end.status().as_str(), "output": report.output }))?;
        drop(result);
        quiet(&self.bare);
        Ok(took)
    }

    fn through(&mut self) -> Result<Option<Duration>, String> {
        let (Some(door), Some(served)) = (&mut self.door, &self.served) else { return Ok(None) };
        let order = fixture::submission(&mut self.program, false);
        let (took, report) = door.run(&order)?;
        check(&order, &report)?;
        wait_for_quiet(served.process());
        Ok(Some(took))
    }
}

impl<D: Door> Case for Over<D> {
    fn sample(&mut self) -> Result<u64, String> {
        self.door_first = !self.door_first;
        let (without, through) = if self.door_first {
            let through = self.through()?;
            (self.without()?, through)
        } else {
            (self.without()?, self.through()?)
        };
        let more = through.map_or(without, |through| through.saturating_sub(without));
        Ok(more.as_nanos() as u64)
    }
}

fn check(order: &Order, report: &Value) -> Result<(), String> {
    let expected = program::answer(&order.input);
    if report["status"] == "ok" && report["output"] == expected.as_str() {
        return Ok(());
    }
    Err(format!("the benched run did not answer {expected:?}: {report}"))
}

/// The service's own protocol, spoken by the client library.
struct Vsock(Client);

impl Door for Vsock {
    fn run(&mut self, order: &Order) -> Result<(Duration, Value), String> {
        let started = Instant::now();
        let finish = self.0.run(order).map_err(said)?;
        let took = started.elapsed();
        Ok((took, serde_json::from_slice(&finish.report).map_err(said)?))
    }
}

/// HTTP/1.1 on one connection.
struct Http {
    host: String,
    socket: TcpStream,
}

impl Door for Http {
    fn run(&mut self, order: &Order) -> Result<(Duration, Value), String> {
        let input: Value = serde_json::from_slice(&order.input).map_err(said)?;
        let body = json!({ "program": STANDARD.encode(&order.program), "input": input });
        let body = body.to_string();
        let request = format!(
            "POST /v1/runs HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        let started = Instant::now();
        self.socket.write_all(request.as_bytes()).map_err(said)?;
        let answer = self.answer()?;
        let took = started.elapsed();
        Ok((took, serde_json::from_slice(&answer).map_err(said)?))
    }
}

impl Http {
    /// The body of the next answer.
    fn answer(&mut self) -> Result<Vec<u8>, String> {
        let mut got = Vec::new();
        let mut piece = [0; 8192];
        loop {
            if let Some(end) = got.windows(4).position(|it| it == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&got[..end]).to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
                let length: usize = length
                    .and_then(|it| it.trim().parse().ok())
                    .ok_or_else(|| format!("an answer without a length: {head}"))?;
                if got.len() >= end + 4 + length {
                    return Ok(got[end + 4..end + 4 + length].to_vec());
                }
            } else if got.len() > HEAD_BYTES_MAX {
                return Err("an answer has no end of its head".into());
            }
            match self.socket.read(&mut piece).map_err(said)? {
                0 => return Err("the door hung up".into()),
                bytes => got.extend_from_slice(&piece[..bytes]),
            }
        }
    }
}

/// JSON-RPC over the pipes of a process.
struct Mcp {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    next: u64,
}

impl Mcp {
    fn start(served: &Served) -> Result<Self, String> {
        let mut child = Command::new(fixture::executable())
            .args(["mcp", "--principal", PRINCIPAL, "--service"])
            .arg(served.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(said)?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a process has no pipes".into());
        };
        let mut mcp = Self { child, to, from: BufReader::new(from), next: 0 };
        let client = json!({ "name": "bench", "version": "0" });
        let hello =
            json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client });
        let line = mcp.line("initialize", &hello);
        mcp.ask(&line)?;
        let greeted = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
        mcp.to.write_all(format!("{greeted}\n").as_bytes()).map_err(said)?;
        Ok(mcp)
    }

    fn line(&mut self, method: &str, params: &Value) -> String {
        self.next += 1;
        let request =
            json!({ "jsonrpc": "2.0", "id": self.next, "method": method, "params": params });
        format!("{request}\n")
    }

    fn ask(&mut self, line: &str) -> Result<String, String> {
        self.to.write_all(line.as_bytes()).map_err(said)?;
        let mut answer = String::new();
        match self.from.read_line(&mut answer).map_err(said)? {
            0 => Err("the door has ended".into()),
            _ => Ok(answer),
        }
    }
}

impl Door for Mcp {
    fn run(&mut self, order: &Order) -> Result<(Duration, Value), String> {
        let input: Value = serde_json::from_slice(&order.input).map_err(said)?;
        let program = STANDARD.encode(&order.program);
        let arguments = json!({ "program": program, "language": "wasm", "input": input });
        let line =
            self.line("tools/call", &json!({ "name": "run_program", "arguments": arguments }));
        let started = Instant::now();
        let answer = self.ask(&line)?;
        let took = started.elapsed();
        let mut answer: Value = serde_json::from_str(&answer).map_err(said)?;
        match answer["result"]["structuredContent"].take() {
            Value::Null => Err(format!("the door answers {answer}")),
            report => Ok((took, report)),
        }
    }
}

impl Drop for Mcp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
