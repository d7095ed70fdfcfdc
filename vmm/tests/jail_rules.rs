//! That no rule of the system-call filters is redundant: the real zygote and
//! its workers carry out every kind of run, each time with one rule taken out
//! of one filter, and each time something is then forbidden.
//!
//! Rules for other kernels, other builds and moments that no test can bring
//! about are marked so in the table, and left out.
//!
//! This executable plays the zygote; the supervisor's part is played by hand,
//! so that every word of a zygote and a worker is seen, the last one too.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::ending::Ending;
use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::worker::{
    Fate, Fork, Job, Prepare, PreparedJob, Ready, Report, Reuse, Tier, ZygoteReady, ZygoteSetup,
    Zygoted,
};
use forge_vmm::jail::{Filter, Place, Role, Spawned, spawn};
use forge_vmm::link::{Link, Patience};
use forge_vmm::machine::{self, deadline_in};
use forge_vmm::worker::zygote::{Filters, KVM_DESCRIPTOR, serve};
use support::{forge_module, job, signed, signer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, index] = &words[..]
        && let Some(role) = Role::ALL.into_iter().find(|it| role == &format!("{it:?}"))
    {
        let mut filters = Filters::compile().unwrap();
        if let Ok(index) = index.parse() {
            let without = Filter::compile_without(role, index).unwrap();
            match role {
                Role::Zygote => filters.zygote = without,
                Role::Worker => filters.worker = without,
                Role::Process => filters.process = without,
            }
        }
        return match serve(filters) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    support::main(claims![no_seccomp_rule_is_redundant], claims![])
}

/// What was said that was not to be.
type Trouble = String;

struct Peer(Link);

impl Peer {
    fn say<T: codec::Encode>(
        &mut self,
        kind: Kind,
        message: &T,
        passed: Option<OwnedFd>,
    ) -> Result<(), Trouble> {
        let mut bytes = Vec::new();
        frame::write_message(kind, message, &mut bytes);
        let sent = self.0.send(&bytes, passed.as_ref().map(|it| it.as_fd()), patience());
        sent.map_err(|error| self.last_word(&error.to_string()))
    }

    fn hear<T: for<'a> codec::BorrowDecode<'a, ()>>(&mut self, kind: Kind) -> Result<T, Trouble> {
        let frame = self.next(kind).map_err(|error| error.to_string())?;
        match frame.kind {
            Kind::Forbidden => Err(forbidden(&frame)),
            _ => codec::decode(&frame.payload).map_err(|error| error.to_string()),
        }
    }

    fn next(&mut self, kind: Kind) -> std::io::Result<Frame> {
        self.0.receive(|got| got == kind || got == Kind::Forbidden, patience())
    }

    fn last_word(&mut self, otherwise: &str) -> Trouble {
        self.next(Kind::Forbidden).map_or(otherwise.into(), |frame| forbidden(&frame))
    }

    /// Hangs up, and hears whether the peer leaves in peace.
    fn leave(mut self) -> Result<(), Trouble> {
        self.0.socket().shutdown(std::net::Shutdown::Write).unwrap();
        match self.next(Kind::Forbidden) {
            Ok(frame) => Err(forbidden(&frame)),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn forbidden(frame: &Frame) -> Trouble {
    format!("call {} is forbidden", i32::from_le_bytes(frame.payload[..].try_into().unwrap()))
}

fn patience() -> Patience<'static> {
    Patience::until(Instant::now() + Duration::from_secs(60))
}

struct Zygote {
    process: Spawned,
    peer: Peer,
}

impl Zygote {
    fn start(role: Role, tier: Tier, without: &str) -> Result<Self, Trouble> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null =
            || OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
        let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
        let descriptors =
            vec![(theirs.into(), 0), (null(), 1), (null(), 2), (kvm.into(), KVM_DESCRIPTOR)];
        let role = format!("{role:?}");
        let words = ["forge-rules-zygote", &role, without].map(OsStr::new);
        let executable = std::env::current_exe().unwrap();
        let process = spawn(&executable, &words, descriptors, Place::best()).unwrap();
        let mut zygote = Self { process, peer: Peer(Link::new(ours)) };
        let setup = ZygoteSetup { tier, trust: vec![signer().trust_key().to_bytes()] };
        zygote.peer.say(Kind::ZygoteSetup, &setup, None)?;
        zygote.peer.hear::<ZygoteReady>(Kind::ZygoteReady)?.map_err(|it| it.message)?;
        Ok(zygote)
    }

    fn fork(&mut self, touch_bytes: u32, reuse: Reuse) -> Result<(Peer, OwnedFd), Trouble> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ram_bytes = machine::ram_bytes(&RunLimits::default()) as u64;
        let order = Fork { ram_bytes, touch_bytes, reuse };
        self.peer.say(Kind::Fork, &order, Some(theirs.into()))?;
        self.peer.hear::<Zygoted>(Kind::Zygoted)?.map_err(|it| it.message)?;
        let process = self.peer.0.take_passed().ok_or("no process descriptor")?;
        let mut worker = Peer(Link::new(ours));
        worker.hear::<Ready>(Kind::Ready)?.map_err(|it| it.message)?;
        Ok((worker, process))
    }

    fn leave(self) -> Result<(), Trouble> {
        self.peer.leave()?;
        match self.process.wait().unwrap() {
            status if status.success() => Ok(()),
            status => Err(format!("the zygote ended with {status}")),
        }
    }
}

/// All that is ever asked of a zygote and its workers.
fn everything(role: Role, without: &str) -> Result<(), Trouble> {
    // The zygote's table is both tiers', and VMs ask for more of it.
    let tier = if role == Role::Process { Tier::Process } else { Tier::Vm };
    let mut zygote = Zygote::start(role, tier, without)?;
    let done = match tier {
        Tier::Vm => work(&mut zygote),
        Tier::Process => work_without_vms(&mut zygote),
    };
    if done.is_err() {
        let _ = zygote.process.kill();
        let _ = zygote.process.wait();
        return done;
    }
    zygote.leave()
}

fn work(zygote: &mut Zygote) -> Result<(), Trouble> {
    // A VM for one run.
    for body in [HELLO, GROWING] {
        let (mut worker, _process) = zygote.fork(46 * 4096, Reuse::Fresh)?;
        run(&mut worker, &plain(body), Some(returned))?;
        worker.leave()?;
    }
    // One that is reset, and every reset proven.
    let (mut worker, process) = zygote.fork(0, Reuse::Reset { prove_one_in: 1 })?;
    // It resets itself before the next run, also while it is
    // left alone for longer than it rests.
    for body in [HELLO, MUCH, HELLO] {
        run(&mut worker, &plain(body), Some(returned))?;
        std::thread::sleep(Duration::from_millis(50));
    }
    run(&mut worker, &Job { deadline: deadline_in(SOON), ..plain(ENDLESS) }, Some(deadline))?;
    for (answer, time, expected) in
        [(true, LATER, returned as fn(&Fate) -> bool), (false, SOON, deadline)]
    {
        call(&mut worker, &process, answer, time, expected)?;
    }
    // Loaded ahead of its runs.
    let Job { load, start, program, input, deadline, .. } = plain(HELLO);
    worker.say(Kind::Prepare, &Prepare { load, program }, None)?;
    worker.hear::<Ready>(Kind::Ready)?.map_err(|it| it.message)?;
    for _ in 0..2 {
        let (start, input) = (start.clone(), input.clone());
        let job = PreparedJob { start, input, deadline, brokered: false };
        worker.say(Kind::PreparedJob, &job, None)?;
        report(&mut worker, returned)?;
    }
    worker.leave()?;
    // One whose supervisor loses interest, in the middle of a run.
    let (mut worker, process) = zygote.fork(0, Reuse::Fresh)?;
    worker.say(Kind::Job, &plain(ENDLESS), None)?;
    signal(&process, libc::SIGKILL);
    drop(worker);
    Ok(())
}

/// The same of workers without a VM: each for one run.
fn work_without_vms(zygote: &mut Zygote) -> Result<(), Trouble> {
    for body in [HELLO, MUCH, GROWING] {
        let (mut worker, _process) = zygote.fork(0, Reuse::Fresh)?;
        run(&mut worker, &plain(body), Some(returned))?;
        worker.leave()?;
    }
    let (mut worker, _process) = zygote.fork(0, Reuse::Fresh)?;
    run(&mut worker, &Job { deadline: deadline_in(SOON), ..plain(ENDLESS) }, Some(deadline))?;
    worker.leave()?;
    for (answer, time, expected) in
        [(true, LATER, returned as fn(&Fate) -> bool), (false, SOON, deadline)]
    {
        let (mut worker, process) = zygote.fork(0, Reuse::Fresh)?;
        call(&mut worker, &process, answer, time, expected)?;
        worker.leave()?;
    }
    // Loaded ahead of its run.
    let (mut worker, _process) = zygote.fork(0, Reuse::Fresh)?;
    let Job { load, start, program, input, deadline, .. } = plain(HELLO);
    worker.say(Kind::Prepare, &Prepare { load, program }, None)?;
    worker.hear::<Ready>(Kind::Ready)?.map(drop).map_err(|it| it.message)?;
    worker.say(
        Kind::PreparedJob,
        &PreparedJob { start, input, deadline, brokered: false },
        None,
    )?;
    report(&mut worker, returned)?;
    worker.leave()
}

const HELLO: &str = "(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)";
const ENDLESS: &str = "(loop (br 0)) (unreachable)";
/// A large output, memory, a log record and an artifact.
const MUCH: &str = r#"
    (drop (memory.grow (i32.const 20)))
    (memory.fill (i32.const 65536) (i32.const 120) (i32.const 1000000))
    (drop (call $output (i32.const 65536) (i32.const 1000000)))
    (call $log (i32.const 2) (i32.const 0) (i32.const 5))
    (i32.const 0)"#;
/// Memory that grows when it is large already, which the allocator of a process
/// moves by its pages, and for which a guest asks for the rest of its RAM.
const GROWING: &str = "(drop (memory.grow (i32.const 20))) (drop (memory.grow (i32.const 200)))
    (i32.const 0)";
const MEMORY: &str = r#"(memory (export "memory") 1) (data (i32.const 0) "hello")"#;

fn plain(body: &str) -> Job {
    let limits = RunLimits { fuel: u64::MAX, ..RunLimits::default() };
    job(signed(&forge_module(MEMORY, body)), limits)
}

fn returned(fate: &Fate) -> bool {
    matches!(fate, Fate::Ended(ended) if ended.ending == Ending::Returned(0))
}

fn deadline(fate: &Fate) -> bool {
    matches!(fate, Fate::Deadline)
}

fn run(worker: &mut Peer, job: &Job, expected: Option<fn(&Fate) -> bool>) -> Result<(), Trouble> {
    worker.say(Kind::Job, job, None)?;
    expected.map_or(Ok(()), |expected| report(worker, expected))
}

fn report(worker: &mut Peer, expected: fn(&Fate) -> bool) -> Result<(), Trouble> {
    let report = worker.hear::<Report>(Kind::Report)?;
    if expected(&report.fate) { Ok(()) } else { Err(format!("{:?}", report.fate)) }
}

/// A run's time that is soon over, and one that is not.
const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(60);

/// A run with a tool call. The worker is stopped and goes on while it waits.
fn call(
    worker: &mut Peer,
    process: &OwnedFd,
    answer: bool,
    time: Duration,
    expected: fn(&Fate) -> bool,
) -> Result<(), Trouble> {
    let module = forge_module(
        &format!(r#"(import "tool" "a.b" (func $tool (param i32 i32) (result i32))) {MEMORY}"#),
        "(drop (call $tool (i32.const 0) (i32.const 0))) (i32.const 0)",
    );
    let mut job = job(signed(&module), RunLimits::default());
    job.start.granted = vec![ToolName::parse("a.b").unwrap()];
    job.brokered = true;
    let mut time = time;
    let (mut broker, call) = loop {
        job.deadline = deadline_in(time);
        let (ours, theirs) = UnixStream::pair().unwrap();
        worker.say(Kind::Job, &job, Some(theirs.into()))?;
        let mut broker = Peer(Link::new(ours));
        if let Ok(call) = broker.hear::<Call>(Kind::Call) {
            break (broker, call);
        }
        // Where all is emulated its time may be over before: the run before it
        // is put back first, and that is proven.
        report(worker, deadline)?;
        time *= 4;
    };
    for sign in [libc::SIGSTOP, libc::SIGCONT] {
        signal(process, sign);
        std::thread::sleep(Duration::from_millis(2));
    }
    if answer {
        let settled = Settled {
            id: call.id,
            code: None,
            duration_ns: 1,
            body: b"{}".to_vec(),
            redacted: false,
        };
        broker.say(Kind::Settled, &settled, None)?;
    }
    report(worker, expected)
}

fn signal(process: &OwnedFd, signal: i32) {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a descriptor of a process that this test has made.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, info, 0) };
}

fn no_seccomp_rule_is_redundant() {
    for role in Role::ALL {
        assert_eq!(everything(role, "none"), Ok(()), "with all rules");
    }
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if cpu.contains("QEMU TCG") {
        eprintln!("SKIPPED: an emulated CPU takes minutes to go through all rules");
        return;
    }
    let all: Vec<(Role, usize)> = Role::ALL
        .into_iter()
        .flat_map(|role| (0..role.rules().len()).map(move |index| (role, index)))
        .filter(|(role, index)| !role.rules()[*index].elsewhere)
        .filter(|(role, index)| {
            let name = role.rules()[*index].name;
            role.enforceable().iter().any(|rule| rule.name == name)
        })
        .collect();
    let next = AtomicUsize::new(0);
    let take = || {
        let mut redundant = Vec::new();
        while let Some(&(role, index)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let rule = role.rules()[index];
            let outcome = everything(role, &index.to_string());
            if outcome.is_ok() {
                redundant.push(format!("{role:?}: {}", rule.name));
            }
        }
        redundant
    };
    let redundant: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(redundant.is_empty(), "nothing needs {redundant:#?}");
}
