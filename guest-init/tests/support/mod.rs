//! A host for the guest library, in memory: the protocol's own host session
//! on the other end of a [`Stream`], with tools that a test scripts.
//!
//! Everything runs on one thread. When the guest waits and the host has
//! nothing for it, one pending call settles, picked by [`Run::order`]; if none
//! is pending, the link is lost, so that no test hangs.

#![allow(dead_code)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forge_guest_init::{LinkLost, ServeError, Stream};
use forge_protocol::RunId;
use forge_protocol::abi::{CallCode, Forge, Wasi};
use forge_protocol::ending::Ending;
use forge_protocol::guest::{Call, Ended, HostEvent, HostSession, Load, Settled, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, Log};
use forge_protocol::signature::{SignerKey, TrustKeys};

/// The key that test programs are signed with.
pub fn signer() -> SignerKey {
    SignerKey::from_secret(&[7; 32])
}

/// Trusts [`signer`] alone.
pub fn trust() -> TrustKeys {
    TrustKeys::new([signer().trust_key()]).unwrap()
}

/// The `forge` and WASI imports, all of them, each named `$` and its name;
/// and one page of memory.
pub fn imports_and_memory() -> String {
    let mut text = String::new();
    let forge = Forge::ALL.iter().map(|f| ("forge", f.name(), f.signature()));
    let wasi = Wasi::ALL.iter().map(|f| ("wasi_snapshot_preview1", f.name(), f.signature()));
    for (module, name, signature) in forge.chain(wasi) {
        let signature = signature.to_string();
        let ty = signature.strip_prefix("(func").unwrap();
        text.push_str(&format!("(import \"{module}\" \"{name}\" (func ${name}{ty})\n"));
    }
    text.push_str("(memory (export \"memory\") 1)\n");
    text
}

/// A module with every import, one page of memory, and `body` as the body of
/// `forge_run`, which must leave an `i32`.
pub fn program(tools: &[&str], data: &str, body: &str) -> String {
    let mut text = String::from("(module\n");
    for tool in tools {
        text.push_str(&format!(
            "(import \"tool\" \"{tool}\" (func ${tool} (param i32 i32) (result i32)))\n"
        ));
    }
    text.push_str(&imports_and_memory());
    text.push_str(data);
    text.push_str(&format!("\n(func (export \"forge_run\") (result i32)\n{body}))"));
    text
}

/// What a tool answers.
#[derive(Clone, Debug)]
pub struct Reply {
    pub code: Option<CallCode>,
    pub duration_ns: u64,
    pub body: Vec<u8>,
}

/// An answer with a body.
pub fn reply(body: &str) -> Reply {
    Reply { code: None, duration_ns: 1_000, body: body.into() }
}

/// Which pending call settles next.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

/// A run to be carried out.
pub struct Run {
    /// The module as it is sent, signed or not.
    pub program: Vec<u8>,
    pub input: Vec<u8>,
    pub limits: RunLimits,
    pub granted: Vec<&'static str>,
    pub seed: [u8; 32],
    pub start_unix_ns: u64,
    pub tools: Box<dyn FnMut(&Call) -> Reply>,
    pub order: Order,
    /// Whether the guest is to say that the program is loaded before the run
    /// is sent.
    pub announce: bool,
    /// How often the program may go on before the link is lost, as at a deadline.
    pub slices: u32,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    pub served: Result<(), ServeError>,
    /// Missing if the link was lost first.
    pub ended: Option<Ended>,
    pub output: Vec<u8>,
    pub logs: Vec<Log>,
    /// The log record that was not finished when the host looked last: see
    /// [`HostSession::take_unfinished`].
    pub unfinished: Option<Log>,
    pub artifacts: Vec<Artifact>,
    pub calls: Vec<Call>,
    /// How often the guest sent.
    pub sends: usize,
    /// How often it waited.
    pub receives: usize,
    /// How often it had sent when each call arrived.
    pub sends_at_call: Vec<usize>,
}

impl Report {
    /// How the program ended.
    pub fn ending(&self) -> &Ending {
        assert_eq!(self.served, Ok(()));
        &self.ended().ending
    }

    pub fn ended(&self) -> &Ended {
        self.ended.as_ref().expect("the run has an end")
    }

    pub fn output_text(&self) -> &str {
        std::str::from_utf8(&self.output).unwrap()
    }

    /// The output as little-endian `i32`s.
    pub fn output_i32s(&self) -> Vec<i32> {
        self.output.chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

impl Run {
    /// A run of a module in the text format, signed.
    pub fn of(text: &str) -> Self {
        let wasm = wat::parse_str(text).unwrap_or_else(|error| panic!("{error}"));
        Self::of_bytes(&wasm)
    }

    /// A run of a module, signed.
    pub fn of_bytes(wasm: &[u8]) -> Self {
        Self::as_is(signer().sign(wasm).unwrap())
    }

    /// A run of whatever `program` is.
    pub fn as_is(program: Vec<u8>) -> Self {
        Self {
            program,
            input: Vec::new(),
            limits: RunLimits::default(),
            granted: vec!["a.b"],
            seed: [5; 32],
            start_unix_ns: 1_000_000,
            tools: Box::new(|_| reply("{}")),
            order: Order::OldestFirst,
            announce: false,
            slices: u32::MAX,
        }
    }

    /// Loses the link after so many slices of fuel.
    pub fn cut_after(mut self, slices: u32) -> Self {
        self.slices = slices;
        self
    }

    /// Prepares the program before the run is sent.
    pub fn announced(mut self) -> Self {
        self.announce = true;
        self
    }

    pub fn limits(mut self, change: impl FnOnce(&mut RunLimits)) -> Self {
        change(&mut self.limits);
        self
    }

    pub fn tools(mut self, tools: impl FnMut(&Call) -> Reply + 'static) -> Self {
        self.tools = Box::new(tools);
        self
    }

    pub fn input(mut self, input: &str) -> Self {
        self.input = input.into();
        self
    }

    /// Carries it out.
    pub fn go(self) -> Report {
        let host = Rc::new(RefCell::new(TestHost {
            session: HostSession::new(),
            run: self,
            loaded: false,
            started: false,
            pending: Vec::new(),
            report: Report {
                served: Ok(()),
                ended: None,
                output: Vec::new(),
                logs: Vec::new(),
                unfinished: None,
                artifacts: Vec::new(),
                calls: Vec::new(),
                sends: 0,
                receives: 0,
                sends_at_call: Vec::new(),
            },
        }));
        let served = forge_guest_init::serve(Shared(host.clone()), &trust(), ticks);
        let host = Rc::into_inner(host).expect("the guest let go of its stream").into_inner();
        let TestHost { mut session, report, .. } = host;
        Report { served, unfinished: session.take_unfinished(), ..report }
    }
}

/// Counts up by one with each look.
fn ticks() -> u64 {
    thread_local!(static TICKS: Cell<u64> = const { Cell::new(0) });
    TICKS.with(|ticks| {
        ticks.set(ticks.get() + 1);
        ticks.get()
    })
}

struct TestHost {
    session: HostSession,
    run: Run,
    loaded: bool,
    started: bool,
    pending: Vec<Settled>,
    report: Report,
}

impl TestHost {
    fn handle(&mut self, event: HostEvent) {
        match event {
            HostEvent::Call(call) => {
                self.report.sends_at_call.push(self.report.sends);
                let Reply { code, duration_ns, body } = (self.run.tools)(&call);
                self.pending.push(Settled {
                    id: call.id,
                    code,
                    duration_ns,
                    body,
                    redacted: false,
                });
                self.report.calls.push(call);
            }
            HostEvent::Output(bytes) => self.report.output.extend(bytes),
            HostEvent::Log(log) => self.report.logs.push(log),
            HostEvent::Artifact(artifact) => self.report.artifacts.push(artifact),
            HostEvent::Ended(ended) => self.report.ended = Some(ended),
        }
    }
}

struct Shared(Rc<RefCell<TestHost>>);

impl Stream for Shared {
    fn may_go_on(&mut self) -> Result<(), LinkLost> {
        let host = &mut *self.0.borrow_mut();
        // It is asked while a program is loaded, too.
        if host.started {
            host.run.slices = host.run.slices.checked_sub(1).ok_or(LinkLost)?;
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkLost> {
        let host = &mut *self.0.borrow_mut();
        host.report.sends += 1;
        host.session.receive(bytes).expect("the guest keeps to the protocol");
        while let Some(event) = host.session.poll_event() {
            host.handle(event);
        }
        Ok(())
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), LinkLost> {
        let host = &mut *self.0.borrow_mut();
        host.report.receives += 1;
        if host.session.is_ready() && !host.loaded {
            host.loaded = true;
            let load = Load { limits: host.run.limits.clone(), announce: host.run.announce };
            host.session.load(&load, &host.run.program).unwrap();
        }
        if host.loaded && !host.started && (!host.run.announce || host.session.is_loaded()) {
            host.started = true;
            let start = Start {
                run_id: RunId([1; 16]),
                seed: host.run.seed,
                start_unix_ns: host.run.start_unix_ns,
                granted: host.run.granted.iter().map(|name| name.parse().unwrap()).collect(),
            };
            host.session.start(&start, &host.run.input).unwrap();
        } else if !host.pending.is_empty() {
            let position = match host.run.order {
                Order::OldestFirst => 0,
                Order::NewestFirst => host.pending.len() - 1,
            };
            let settled = host.pending.remove(position);
            host.session.settle(&settled).unwrap();
        }
        let bytes = std::mem::take(host.session.transmit());
        if bytes.is_empty() {
            return Err(LinkLost);
        }
        // In uneven pieces, as a ring buffer hands them on.
        let (first, rest) = bytes.split_at(bytes.len() / 3);
        take(first);
        take(rest);
        Ok(())
    }
}

/// A tool's name.
pub fn tool(name: &str) -> ToolName {
    name.parse().unwrap()
}
