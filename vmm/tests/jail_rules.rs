//! That no rule of the system-call filters is redundant: the real zygote and
//! its workers carry out every kind of run, each time with one rule taken out
//! of one filter, and each time something is then forbidden.
//!
//! Rules for other kernels, other builds and moments that no test can bring
//! about are marked so in the table, and left out.
//!
//! This executable plays the zygote; the supervisor's part is played by hand,
//! so that every word of a zygote and a worker is seen, the last one too. And
//! what a zygote answers when the kernel has it pass on no descriptor.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
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
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{
    Fate, Fork, Job, Prepare, PreparedJob, Ready, Report, Reuse, Tier, ZygoteReady, ZygoteSetup,
    Zygoted,
};
use forge_vmm::jail::{Filter, Identity, Namespaces, Place, Role, Spawned, spawn};
use forge_vmm::link::{Link, Patience};
use forge_vmm::machine::{self, deadline_in};
use forge_vmm::pool::{Pool, PoolOptions};
use forge_vmm::zygote::{Filters, KVM_DESCRIPTOR, serve};
use support::{eventually, forge_module, job, signed, signer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let plays: &[(&str, fn())] = &[("crowd", crowd), ("crowded_supervisor", crowded_supervisor)];
    if let Some((_, play)) = plays.iter().find(|(name, _)| words == [*name]) {
        play();
        return ExitCode::SUCCESS;
    }
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
    support::main(
        claims![
            no_seccomp_rule_is_redundant,
            a_zygote_outlasts_its_user_having_too_many_descriptors_under_way,
            a_zygote_outlasts_its_supervisor_having_too_many_descriptors_under_way,
        ],
        claims![],
    )
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
        let mut passed = passed.as_ref().map(|it| it.as_fd());
        let sent = self.0.pass(&bytes, &mut passed, patience());
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
    fn start(place: Place, role: Role, tier: Tier, without: &str) -> Result<Self, Trouble> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null =
            || OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
        let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
        let descriptors =
            vec![(theirs.into(), 0), (null(), 1), (null(), 2), (kvm.into(), KVM_DESCRIPTOR)];
        let role = format!("{role:?}");
        let words = ["forge-rules-zygote", &role, without].map(OsStr::new);
        let executable = std::env::current_exe().unwrap();
        let process = spawn(&executable, &words, descriptors, place).unwrap();
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
    let mut zygote = Zygote::start(Place::best(), role, tier, without)?;
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

/// Users whom nobody else is.
const CROWDED: u32 = 54_324;
const CROWDED_SUPERVISOR: u32 = 54_325;
/// More than a zygote's limit of open descriptors, which is the kernel's for
/// those of its user that are under way, and what goes in one message.
const UNDER_WAY: usize = 200;

fn a_zygote_outlasts_its_user_having_too_many_descriptors_under_way() {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: it takes root to be another user, and ours has other processes");
        return;
    }
    let identity = Identity::Id(CROWDED);
    let place = Place { namespaces: Namespaces::New, identity };
    let mut zygote = Zygote::start(place, Role::Process, Tier::Process, "none").unwrap();
    let (crowd, ours, mut said) = play("crowd", CROWDED);
    let mut word = [0; 5];
    said.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"there");
    let refused = zygote.fork(0, Reuse::Fresh).map(drop).unwrap_err();
    assert!(refused.contains("Too many references"), "{refused}");
    drop(ours);
    assert!(crowd.wait().unwrap().success());
    eventually("it makes workers again", || zygote.fork(0, Reuse::Fresh).is_ok());
    zygote.leave().unwrap();
}

fn a_zygote_outlasts_its_supervisor_having_too_many_descriptors_under_way() {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: it takes root to be another user, and ours has other processes");
        return;
    }
    let (supervisor, _ours, mut output) = play("crowded_supervisor", CROWDED_SUPERVISOR);
    let mut said = String::new();
    output.read_to_string(&mut said).unwrap();
    assert!(supervisor.wait().unwrap().success(), "{said}");
}

/// Starts this executable as another user, for a part of its own: the process,
/// and the far ends of its standard input and output.
fn play(part: &str, user: u32) -> (Spawned, PipeWriter, PipeReader) {
    let (input, ours) = std::io::pipe().unwrap();
    let (said, output) = std::io::pipe().unwrap();
    let descriptors =
        vec![(input.into(), 0), (output.try_clone().unwrap().into(), 1), (output.into(), 2)];
    let words = ["forge-rules-part", part].map(OsStr::new);
    let place = Place { namespaces: Namespaces::Shared, identity: Identity::Id(user) };
    let executable = std::env::current_exe().unwrap();
    (spawn(&executable, &words, descriptors, place).unwrap(), ours, said)
}

/// Asks for workers while it has too many descriptors under way, and then again.
fn crowded_supervisor() {
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let options = PoolOptions { tier: Tier::Process, ..PoolOptions::default() };
    let pool = Pool::new(&trust, options).unwrap();
    pool.make(false).unwrap();
    let zygote = pool.zygote();
    let limit = libc::rlimit { rlim_cur: UNDER_WAY as u64 / 2, rlim_max: UNDER_WAY as u64 / 2 };
    // SAFETY: reads a limit, and lowers that of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let (one, other) = UnixStream::pair().unwrap();
    send_many(&one);
    let refused = pool.make(false).unwrap_err();
    assert!(refused.message.contains("Too many references"), "{refused:?}");
    drop((one, other));
    eventually("it is given workers again", || pool.make(false).is_ok());
    assert_eq!(pool.zygote(), zygote);
}

/// Has many descriptors under way until nobody wants them any more.
fn crowd() {
    let (one, _other) = UnixStream::pair().unwrap();
    send_many(&one);
    std::io::stdout().write_all(b"there").unwrap();
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

/// Sends many descriptors in one message.
fn send_many(socket: &UnixStream) {
    let null = File::open("/dev/null").unwrap();
    let passed = [null.as_raw_fd(); UNDER_WAY];
    let byte = [0u8];
    let mut part = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // Of words, and so aligned as a header is.
    let mut control = [0u64; UNDER_WAY];
    // SAFETY: all-zero is a valid msghdr; the room is larger than a header and
    // so many descriptors, and what the message names outlives the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_LEN(size_of_val(&passed) as u32) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = message.msg_controllen;
        libc::CMSG_DATA(header).cast::<[RawFd; UNDER_WAY]>().write_unaligned(passed);
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
    }
}
