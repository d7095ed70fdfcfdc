//! Brokers that fail in a way that the real one does not: a test binary that
//! is started as a broker is one of them. Nothing of the keeper's is replaced,
//! and none of them carries anything out.

use std::fs;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use forge_protocol::broker::{
    Answer, Ask, Authority, BrokenLink, GrantClaims, GrantedTool, OpenRun, RefusalKind, Reply,
    Request,
};
use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::run::CallRecord;
use forge_vmm::broker::BrokerOptions;
use forge_vmm::link::{Link, Patience};

/// An answer at length, in bytes.
pub const LENGTH: usize = 900 * 1024;

/// What one of them does with its first request.
#[derive(Clone, Copy, PartialEq)]
pub enum Life {
    /// Answers it, and all that follow.
    Answers,
    /// The same with more than a socket takes, and reads on once that is taken.
    AnswersAtLength,
    /// Opens runs as they want it, and can keep nothing on a disk.
    KeepsNothing,
    /// Opens runs as they want it, and says of each that its worker broke its link after
    /// one call.
    FindsLinksBroken,
    /// Ends.
    Dies,
    /// Says what no broker says.
    TalksNonsense,
    /// It hears none: its socket takes nothing.
    IsDeaf,
    /// Reads none.
    Sleeps,
}

impl Life {
    const ALL: [(Self, &'static str); 8] = [
        (Self::Answers, "answers"),
        (Self::AnswersAtLength, "at-length"),
        (Self::KeepsNothing, "keeps-nothing"),
        (Self::FindsLinksBroken, "finds-links-broken"),
        (Self::Dies, "dies"),
        (Self::TalksNonsense, "nonsense"),
        (Self::IsDeaf, "deaf"),
        (Self::Sleeps, "sleeps"),
    ];

    fn of(word: &str) -> Self {
        Self::ALL.into_iter().find(|(_, its)| *its == word).unwrap().0
    }

    fn word(self) -> &'static str {
        Self::ALL.into_iter().find(|(it, _)| *it == self).unwrap().1
    }
}

/// Brokers that come one after another, in a file that goes with this.
pub struct Brokers(PathBuf);

impl Brokers {
    /// One for each of these lives.
    pub fn with(name: &str, lives: &[Life]) -> Self {
        let file = format!("forge-{name}-{}", std::process::id());
        let brokers = Self(std::env::temp_dir().join(file));
        let words: Vec<_> = lives.iter().map(|life| life.word()).collect();
        fs::write(&brokers.0, words.join("\n")).unwrap();
        fs::write(log(&brokers.0), "").unwrap();
        brokers
    }

    /// How to start the next.
    pub fn options(&self) -> BrokerOptions {
        BrokerOptions {
            executable: Some(std::env::current_exe().unwrap()),
            config: Some(self.0.clone()),
            ..BrokerOptions::default()
        }
    }

    /// How many requests they have looked at, all together.
    pub fn asked(&self) -> usize {
        fs::read_to_string(log(&self.0)).unwrap().matches("asked").count()
    }
}

impl Drop for Brokers {
    fn drop(&mut self) {
        let _ = fs::remove_file(log(&self.0));
        let _ = fs::remove_file(&self.0);
    }
}

fn log(lives: &Path) -> PathBuf {
    lives.with_extension("log")
}

/// Is a broker, if this process was started as one. To be called first.
pub fn be_one() {
    let arguments: Vec<_> = std::env::args().collect();
    if arguments.iter().any(|it| it == "--control-fd") {
        let at = arguments.iter().position(|it| it == "--config").unwrap();
        live(Path::new(&arguments[at + 1]));
        std::process::exit(0);
    }
}

fn live(lives: &Path) {
    let say = |word: &str| {
        let mut log = fs::OpenOptions::new().append(true).open(log(lives)).unwrap();
        writeln!(log, "{word}").unwrap();
    };
    let before = fs::read_to_string(log(lives)).unwrap().matches("born").count();
    let words = fs::read_to_string(lives).unwrap();
    let life = Life::of(words.lines().nth(before).unwrap_or_default());
    say("born");
    // SAFETY: the control link is descriptor 0, and nothing else here has it.
    let mut link = Link::new(UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) }));
    link.receive(|kind| kind == Kind::Hello, Patience::default()).unwrap();
    if life == Life::IsDeaf {
        link.socket().shutdown(Shutdown::Read).unwrap();
    }
    let mut bytes = Vec::new();
    frame::write_message(Kind::Hello, &Hello::ours(Role::Broker), &mut bytes);
    link.send(&bytes, Patience::default()).unwrap();
    if matches!(life, Life::IsDeaf | Life::Sleeps) {
        return until_left(&link);
    }
    // Those of the runs that it opened.
    let mut links = Vec::new();
    while let Ok(request) = link.receive(|kind| kind == Kind::Request, Patience::default()) {
        say("asked");
        let Ask { id, request } = codec::decode(&request.payload).unwrap();
        links.extend(link.take_passed());
        let mut bytes = Vec::new();
        match life {
            Life::Answers => {
                let reply = Reply::Metrics("here".into());
                frame::write_message(Kind::Reply, &Answer { id, reply }, &mut bytes);
            }
            Life::AnswersAtLength => {
                let reply = Reply::Metrics("x".repeat(LENGTH));
                frame::write_message(Kind::Reply, &Answer { id, reply }, &mut bytes);
            }
            Life::KeepsNothing | Life::FindsLinksBroken => {
                let reply = match (life, request) {
                    (_, Request::OpenRun(run)) => opened(run),
                    (Life::FindsLinksBroken, Request::EndRun { .. }) => broken(),
                    (Life::FindsLinksBroken, Request::Sync) => Reply::Synced,
                    _ => {
                        let (kind, message) = (RefusalKind::Journal, "the disk is full".into());
                        Reply::Refused { kind, message }
                    }
                };
                frame::write_message(Kind::Reply, &Answer { id, reply }, &mut bytes);
            }
            Life::TalksNonsense => frame::write_raw(Kind::Output, b"what?", &mut bytes),
            Life::Dies | Life::IsDeaf | Life::Sleeps => return,
        }
        link.send(&bytes, Patience::default()).unwrap();
    }
}

fn broken() -> Reply {
    let tool = "test.echo".parse().unwrap();
    let call = CallRecord { id: 0, tool, begun_ns: 0, settled: None };
    let broken = BrokenLink { reason: "call 5 where 1 is next".into(), calls: vec![call] };
    Reply::RunEnded { broken: Some(broken) }
}

fn opened(run: OpenRun) -> Reply {
    let OpenRun { principal, authority: Authority::Tools(tools), .. } = run else {
        panic!("a grant, to a broker without keys");
    };
    let granted = |name| GrantedTool { name, definition_sha256: [0; 32], constraints: Vec::new() };
    Reply::Opened(GrantClaims {
        principal,
        tools: tools.into_iter().map(granted).collect(),
        expires_unix_s: u64::MAX,
        calls_max: None,
        cost_max: None,
        session: None,
    })
}

/// Waits until the other side has closed.
fn until_left(link: &Link) {
    let mut polled = libc::pollfd { fd: link.socket().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one valid pollfd.
    while unsafe { libc::poll(&raw mut polled, 1, -1) } < 1 {}
}
