//! The link between a client and the service: messages.
//!
//! After both sides said `Hello` the client submits runs and asks questions,
//! any number at once. Each carries a number of the client's own choice, which
//! comes back with whatever is said of it; a number is free again when its
//! [`Finished`] or [`Answered`] came. Closing the connection cancels its runs.
//!
//! ```text
//!   client                                service
//!   Submit 7 ────────────────────────────▶
//!            ◀─────────────────── Event 7        as asked for, any number
//!            ◀──────────────── Callback 7        a tool that the client hosts
//!   CallbackSettled 7 ───────────────────▶
//!   Cancel 7 ────────────────────────────▶       perhaps
//!            ◀──────────────────── Part 7        of its artifacts, any number
//!            ◀──────────────── Finished 7        always, exactly once
//!
//!   Query 8 ─────────────────────────────▶
//!            ◀──────────────── Answered 8
//! ```

use alloc::string::String;
use alloc::vec::Vec;

use crate::abi::CallCode;
use crate::broker::{
    Authority, BlockedTool, FoundTool, GrantClaims, GrantRequest, HostedTools, ListedTool,
    Narrowing, RefusalKind,
};
use crate::codec::{Decode, Encode};
use crate::limits::{OverLimit, RunLimits};
use crate::name::ToolName;
use crate::run::{Artifact, Log, RunId};
use crate::tally::Tally;

/// A run and the number that the client knows it by.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Submit {
    /// The client's number of the run.
    pub number: u64,
    /// What is to be run.
    pub order: Order,
}

/// A run, as a client asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Order {
    /// The signed program.
    pub program: Vec<u8>,
    /// Its input, JSON.
    pub input: Vec<u8>,
    /// Whose run it is. A client that may speak for one principal alone can
    /// name no other.
    pub principal: String,
    /// The caller's session that it belongs to.
    pub session: Option<String>,
    /// What it may call, beside what the client hosts.
    pub authority: Authority,
    /// What it may use.
    pub limits: RunLimits,
    /// Whether VMs are to be kept that have this program loaded already.
    pub prepare: bool,
    /// Whether [`Event`]s are to be sent.
    pub events: bool,
    /// Tools that the client carries out itself. The run may call them.
    pub hosted: Option<HostedTools>,
}

/// Something happened in a run.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Event {
    /// The client's number of the run.
    pub number: u64,
    /// What happened.
    pub what: RunEvent,
}

/// What can happen in a run.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RunEvent {
    /// It was admitted and has a name.
    Admitted {
        /// Its name in reports, logs and the journal.
        run_id: RunId,
    },
    /// The program logged.
    Log(Log),
    /// The program wrote a piece of its output.
    Output(Vec<u8>),
    /// The program called a tool.
    Called {
        /// The call's number in the run.
        call: u32,
        /// Which tool.
        tool: ToolName,
    },
    /// A call settled.
    Settled {
        /// The call's number in the run.
        call: u32,
        /// `None`: the tool answered.
        code: Option<CallCode>,
        /// How long it took, in nanoseconds.
        duration_ns: u64,
    },
}

impl RunEvent {
    /// Counts it, told by a worker while its run goes on, among what the run has left.
    ///
    /// # Errors
    /// [`OverLimit`]: the first limit that is passed by it.
    pub fn count(&self, tally: &mut Tally, limits: &RunLimits) -> Result<(), OverLimit> {
        match self {
            Self::Admitted { .. } => Ok(()),
            Self::Log(log) => tally.log(log, limits),
            Self::Output(bytes) => tally.output(bytes, limits),
            Self::Called { .. } => tally.call(limits),
            Self::Settled { .. } => tally.settled(),
        }
    }
}

/// A part of what an artifact contains. All parts of a run come before its [`Finished`]
/// in the order of its artifacts, each one's from its beginning; an empty one has none.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Part {
    /// The client's number of the run.
    pub number: u64,
    /// Which artifact of the run's, from 0.
    pub artifact: u32,
    /// What follows of its content, [`crate::limits::PART_BYTES_MAX`] at most.
    pub content: Vec<u8>,
}

/// A run's end.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Finished {
    /// The client's number of the run.
    pub number: u64,
    /// The report, JSON: the object that `run --json` prints.
    pub report: Vec<u8>,
    /// The artifacts whose parts came before, in the order of the report's list.
    pub artifacts: Vec<Left>,
}

/// An artifact that a run left, without its content.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Left {
    /// Its name, untrusted: see [`Artifact::name`].
    pub name: String,
    /// Its media type.
    pub media_type: String,
    /// How long its content is, in bytes.
    pub bytes: u32,
}

/// What became of a run, put together of its [`Part`]s and [`Finished`] by
/// [`crate::parts::Contents`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// The report, JSON: the object that `run --json` prints.
    pub report: Vec<u8>,
    /// The artifacts, in the order of the report's list.
    pub artifacts: Vec<Artifact>,
}

/// Nobody wants a run any more. Its `Finished` comes all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Cancel {
    /// The client's number of the run.
    pub number: u64,
}

/// A call of a tool that the client hosts.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Callback {
    /// The client's number of the run.
    pub number: u64,
    /// Which callback of that run; for the answer.
    pub callback: u32,
    /// Which tool.
    pub tool: ToolName,
    /// Arguments that fit its schema, a JSON object.
    pub arguments: Vec<u8>,
}

/// The answer to one.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CallbackSettled {
    /// The client's number of the run.
    pub number: u64,
    /// The number of the callback that is answered.
    pub callback: u32,
    /// The result, JSON; or the tool's own error, a JSON object with `name`
    /// and `message`.
    pub result: Result<Vec<u8>, Vec<u8>>,
}

/// A question and its number.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Query {
    /// The client's number of the question.
    pub number: u64,
    /// What is asked.
    pub question: Question,
}

/// What a client may ask.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Question {
    /// The tools that fit an intent best → [`Reply::Found`].
    SearchTools {
        /// The principal that asks.
        principal: String,
        /// What is to be done, in words.
        intent: String,
        /// How many tools are wanted at most.
        k: u32,
    },
    /// All tools that the principal may see → [`Reply::Tools`].
    ListTools {
        /// The principal that asks.
        principal: String,
    },
    /// Issues a grant → [`Reply::Grant`].
    IssueGrant(GrantRequest),
    /// Narrows one → [`Reply::Grant`].
    AttenuateGrant(Narrowing),
    /// Verifies a grant and says what is in it → [`Reply::Claims`].
    InspectGrant {
        /// The grant's token.
        token: Vec<u8>,
    },
    /// How the service stands → [`Reply::Status`].
    Status,
    /// What supervisor and broker count → [`Reply::Metrics`].
    Metrics,
    /// Takes no more runs, and ends when those it has are finished →
    /// [`Reply::Draining`]. The operator's alone.
    Drain,
}

/// An answer and the number of its question.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Answered {
    /// The client's number of the question.
    pub number: u64,
    /// What is answered.
    pub reply: Reply,
}

/// What the service answers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// The answer to [`Question::SearchTools`].
    Found {
        /// The tools, in the order in which they should be taken.
        tools: Vec<FoundTool>,
        /// Tools that no search finds, whatever the intent, until the operator has
        /// approved their definitions: by name, the first 64.
        blocked: Vec<BlockedTool>,
        /// Servers that could not be asked, each with the reason.
        unavailable: Vec<(String, String)>,
    },
    /// The answer to [`Question::ListTools`].
    Tools {
        /// The tools, by name.
        tools: Vec<ListedTool>,
        /// Servers that could not be asked, each with the reason.
        unavailable: Vec<(String, String)>,
    },
    /// A grant token.
    Grant(Vec<u8>),
    /// The answer to [`Question::InspectGrant`].
    Claims(GrantClaims),
    /// To [`Question::Status`]: JSON, as `forge-vmm status --json` prints it.
    Status(String),
    /// To [`Question::Metrics`]: Prometheus' text exposition format.
    Metrics(String),
    /// The answer to [`Question::Drain`].
    Draining,
    /// The question was refused.
    Refused {
        /// The kind of refusal, for programs.
        kind: RefusalKind,
        /// What happened, and what to do.
        message: String,
    },
}
