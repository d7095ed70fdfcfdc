//! The link to the toolbroker: messages.
//!
//! A supervisor holds one control link. After both sides said `Hello` it sends
//! each [`Request`] in an [`Ask`] and gets its [`Reply`] in an [`Answer`] of
//! the same number. Several may be asked at once, and answers come as they
//! are ready. With [`Request::OpenRun`] it passes the broker one end of a
//! fresh socket pair; the other end is the run link. A run is known by that
//! connection alone, never by a number that came over it.
//!
//! On the run link the worker sends [`Call`](crate::guest::Call) frames and
//! gets [`Settled`](crate::guest::Settled) frames back, in the order in which
//! the calls settle. Closing it ends the run: nothing new is dispatched, and
//! what was dispatched is still finished and recorded.

use alloc::string::String;
use alloc::vec::Vec;

use crate::codec::by_hand::{DecodeError, Decoder, impl_borrow_decode, list};
use crate::codec::{Decode, Encode};
use crate::limits::{GRANTED_TOOLS_MAX, RunLimits};
use crate::name::ToolName;
use crate::run::{CallRecord, RunId};

/// Requests that may be unanswered on one control link at the same time; the
/// broker takes up the next when one of them is answered. A supervisor never
/// has so many: what it may have under way is bounded by its runs and by its
/// clients' questions, and the end of one run must not wait for the tool
/// servers of others to start.
pub const REQUESTS_IN_FLIGHT_MAX: usize = 8192;
/// Tools in a list that comes from outside. One of more is no message; one of fewer, but
/// more than a run may have, is refused in words.
const LISTED_MAX: usize = 16 * GRANTED_TOOLS_MAX;

/// A request with its number: the payload of a `Request` frame.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Ask {
    /// The supervisor's own choice; the answer carries it back.
    pub id: u64,
    /// What is asked.
    pub request: Request,
}

/// A reply with the number of its request: the payload of a `Reply` frame.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Answer {
    /// The request's number.
    pub id: u64,
    /// What is answered.
    pub reply: Reply,
}

/// What a supervisor asks of the broker.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Request {
    /// All tools that the principal may see → [`Reply::Tools`].
    ListTools {
        /// The principal that asks.
        principal: String,
    },
    /// Issues a grant → [`Reply::Grant`].
    IssueGrant(GrantRequest),
    /// Verifies a grant and says what is in it → [`Reply::Claims`].
    InspectGrant {
        /// The grant's token.
        token: Vec<u8>,
    },
    /// Opens a run → [`Reply::Opened`]. One socket rides along with this
    /// message's first byte.
    OpenRun(OpenRun),
    /// Narrows a grant, for which neither key nor state is needed →
    /// [`Reply::Grant`].
    AttenuateGrant(Narrowing),
    /// All tools, each beside the definition that was approved →
    /// [`Reply::Reviews`]. Approves nothing.
    ReviewTools,
    /// Approves definitions → [`Reply::Approved`]. Each by its digest: what
    /// is approved is what was looked at, whatever the server says by now.
    ApproveTools {
        /// The tools, each with the digest of the definition to approve.
        tools: Vec<(ToolName, [u8; 32])>,
    },
    /// Puts on the disk whatever is journalled by now → [`Reply::Synced`].
    Sync,
    /// What the broker counts → [`Reply::Metrics`].
    Metrics,
    /// The tools, among those that the principal may see, that fit an intent
    /// best → [`Reply::Found`].
    SearchTools {
        /// The principal that asks.
        principal: String,
        /// What is to be done, in words: at most
        /// [`INTENT_BYTES_MAX`](crate::limits::INTENT_BYTES_MAX) bytes.
        intent: String,
        /// How many tools, 1 to
        /// [`FOUND_TOOLS_MAX`](crate::limits::FOUND_TOOLS_MAX).
        k: u32,
    },
    /// Nobody wants a run any more → [`Reply::Cancelled`]. What it has
    /// dispatched is no longer waited for, and its tools are told so where
    /// they can be. Only while its run link is open, or was broken: what a run had called
    /// whose link was closed is not known, and it is refused.
    CancelRun {
        /// The run that nobody wants any more.
        run_id: RunId,
    },
    /// A caller hosts tools for one run → [`Reply::Hosting`]. One socket rides
    /// along with this message's first byte: on it the broker sends
    /// [`Callback`](crate::service::Callback)s and gets
    /// [`CallbackSettled`](crate::service::CallbackSettled)s. Closing it takes
    /// the tools back.
    Host(HostedTools),
    /// Opens a run that may call the tools of this caller too →
    /// [`Reply::Opened`], with these among the claims. The run link rides
    /// along as with [`Self::OpenRun`].
    OpenHostedRun {
        /// What the run is opened with.
        run: OpenRun,
        /// Which caller's tools: what [`Reply::Hosting`] said, good once.
        host: u64,
    },
    /// Nobody waits any more for the answer to an earlier request that
    /// [can be withdrawn](Self::can_be_withdrawn) → [`Reply::Withdrawn`]. To
    /// that one comes no answer, unless it was there already. Any other goes on.
    Withdraw {
        /// The number under which it was asked.
        question: u64,
    },
    /// Other roles hold from now on than its configuration had →
    /// [`Reply::RolesLoaded`]. Runs that are open go on under what they were granted.
    LoadRoles {
        /// The configuration's name, for errors.
        file: String,
        /// Its tables `roles` and `principals`, of these the `roles`, as a JSON object.
        tables: String,
    },
    /// A run that may have called has reported → [`Reply::RunEnded`], once what it did is
    /// on the disk, as far as that was read of its link: before that its result does not
    /// leave. Only while its run link is open.
    EndRun {
        /// The run that has reported.
        run_id: RunId,
        /// Whether its program went to its end. What it called and did not wait for is
        /// carried out then, and dropped where nothing was dispatched yet otherwise.
        is_whole: bool,
    },
}

impl Request {
    /// Whether it may take as long as tool servers do, and nothing is lost with
    /// it before it is answered.
    #[must_use]
    pub fn can_be_withdrawn(&self) -> bool {
        matches!(
            self,
            Self::ListTools { .. }
                | Self::SearchTools { .. }
                | Self::IssueGrant(_)
                | Self::OpenRun(_)
                | Self::OpenHostedRun { .. }
        )
    }
}

/// What a grant is to say.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GrantRequest {
    /// The principal that the grant is for.
    pub principal: String,
    /// The tools it allows.
    pub tools: Vec<ToolName>,
    /// What it asks of their arguments, each as `<tool>:<constraint>`.
    pub constraints: Vec<String>,
    /// How long it is good for, in seconds.
    pub valid_s: u64,
    /// The most calls of one run, if fewer than the run's own limit.
    pub calls_max: Option<u32>,
    /// The most that one run's calls may cost together, in budget units.
    pub cost_max: Option<u32>,
    /// The one session it is good in.
    pub session: Option<String>,
}

/// How a grant is to be narrowed. What is not given stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Narrowing {
    /// The token of the grant to be narrowed.
    pub token: Vec<u8>,
    /// The only tools of the grant to be left, unless there are none: then
    /// all.
    pub tools: Vec<ToolName>,
    /// Further constraints, each as `<tool>:<constraint>`.
    pub constraints: Vec<String>,
    /// How long it is still good for, in seconds from now.
    pub valid_s: Option<u64>,
    /// The most calls of one run.
    pub calls_max: Option<u32>,
    /// The most that one run's calls may cost together, in budget units.
    pub cost_max: Option<u32>,
    /// The one session it is good in.
    pub session: Option<String>,
}

/// A run to be opened.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct OpenRun {
    /// The run.
    pub run_id: RunId,
    /// Whose run it is.
    pub principal: String,
    /// The caller's session that it belongs to.
    pub session: Option<String>,
    /// The signed hash of its program.
    pub program_sha256: [u8; 32],
    /// What it may call.
    pub authority: Authority,
    /// What its program can call: of the tools of a grant the others are asked after at
    /// no server.
    pub callable: Callable,
    /// What it may use.
    pub limits: RunLimits,
}

/// Which tools a program can call.
#[derive(Clone, Debug, PartialEq, Eq, Encode)]
pub enum Callable {
    /// Any: it calls them by names that it has or makes.
    Any,
    /// These, which it imports.
    These(Vec<ToolName>),
}

impl Callable {
    /// Of a program that imports these and calls none by its name. More than there can be
    /// in a grant are as good as any: the run is refused over them.
    #[must_use]
    pub fn of_imports(mut tools: Vec<ToolName>) -> Self {
        tools.sort_unstable();
        tools.dedup();
        if tools.len() > LISTED_MAX { Self::Any } else { Self::These(tools) }
    }

    /// Whether it can call this one.
    #[must_use]
    pub fn includes(&self, tool: &ToolName) -> bool {
        match self {
            Self::Any => true,
            Self::These(tools) => tools.contains(tool),
        }
    }
}

impl<Context> Decode<Context> for Callable {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        match u32::decode(decoder)? {
            0 => Ok(Self::Any),
            1 => list(decoder, LISTED_MAX).map(Self::These),
            _ => Err(DecodeError::Other("neither any tools nor these")),
        }
    }
}

impl_borrow_decode!(Callable);

/// Where a run's right to call tools comes from.
#[derive(Clone, Debug, PartialEq, Eq, Encode)]
pub enum Authority {
    /// A grant token.
    Grant(Vec<u8>),
    /// The operator names the tools on the command line: the broker holds the
    /// run to them, in their present definitions, as to a grant.
    Tools(Vec<ToolName>),
}

impl<Context> Decode<Context> for Authority {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        match u32::decode(decoder)? {
            0 => Vec::decode(decoder).map(Self::Grant),
            1 => list(decoder, LISTED_MAX).map(Self::Tools),
            _ => Err(DecodeError::Other("neither a grant nor tools")),
        }
    }
}

impl_borrow_decode!(Authority);

/// What the broker answers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// The answer to [`Request::ListTools`].
    Tools {
        /// The tools, by name.
        tools: Vec<ListedTool>,
        /// Servers that could not be asked, each with the reason.
        unavailable: Vec<(String, String)>,
    },
    /// To [`Request::IssueGrant`]: the token.
    Grant(Vec<u8>),
    /// The answer to [`Request::InspectGrant`].
    Claims(GrantClaims),
    /// The answer to [`Request::OpenRun`].
    Opened(GrantClaims),
    /// The request was refused.
    Refused {
        /// The kind of refusal, for programs.
        kind: RefusalKind,
        /// What happened, where, and what to do.
        message: String,
    },
    /// The answer to [`Request::ReviewTools`].
    Reviews {
        /// The tools, by name.
        tools: Vec<ReviewedTool>,
        /// Servers that could not be asked, each with the reason.
        unavailable: Vec<(String, String)>,
    },
    /// To [`Request::ApproveTools`]: how many definitions were approved that
    /// were not before.
    Approved {
        /// How many definitions were approved.
        tools: u32,
    },
    /// To [`Request::Sync`]: it is on the disk.
    Synced,
    /// To [`Request::Metrics`]: in Prometheus' text exposition format.
    Metrics(String),
    /// The answer to [`Request::SearchTools`].
    Found {
        /// The tools, in the order in which they should be taken.
        tools: Vec<FoundTool>,
        /// Tools that no search finds, whatever the intent, until the operator has
        /// approved their definitions: by name, the first
        /// [`FOUND_TOOLS_MAX`](crate::limits::FOUND_TOOLS_MAX) of them.
        blocked: Vec<BlockedTool>,
        /// Servers that could not be asked, each with the reason: their tools
        /// could not be found.
        unavailable: Vec<(String, String)>,
    },
    /// The answer to [`Request::CancelRun`].
    Cancelled {
        /// The calls that it had made by then, in the order of calling. One that
        /// had not settled was in flight: whoever carries it out is told, and
        /// what it did stays unknown.
        calls: Vec<CallRecord>,
    },
    /// The answer to [`Request::Host`].
    Hosting {
        /// The number to pass to [`Request::OpenHostedRun`].
        host: u64,
    },
    /// The answer to [`Request::Withdraw`].
    Withdrawn,
    /// The answer to [`Request::LoadRoles`].
    RolesLoaded,
    /// The answer to [`Request::EndRun`].
    RunEnded {
        /// What its worker sent that none of ours does: nothing that it says is to be
        /// relied on, and nothing more is known to be on the disk.
        broken: Option<BrokenLink>,
    },
}

/// A run link over which came what no worker of ours sends.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct BrokenLink {
    /// What came, for a reader.
    pub reason: String,
    /// The calls until then, as in [`Reply::Cancelled`].
    pub calls: Vec<CallRecord>,
}

/// Tools of the caller's own process.
#[derive(Clone, Debug, PartialEq, Eq, Encode)]
pub struct HostedTools {
    /// The server part of their names: `[a-z0-9_-]+`, none that is reserved,
    /// and none of a configured server.
    pub server: String,
    /// The tools.
    pub tools: Vec<HostedTool>,
}

impl<Context> Decode<Context> for HostedTools {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(Self { server: String::decode(decoder)?, tools: list(decoder, LISTED_MAX)? })
    }
}

impl_borrow_decode!(HostedTools);

/// A tool that a caller hosts for one run.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HostedTool {
    /// Its name, without the server part.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The JSON Schema of its arguments, as JSON text.
    pub input_schema: String,
    /// The JSON Schema of its result, if it declares one.
    pub output_schema: Option<String>,
}

/// A tool in a list.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ListedTool {
    /// What its server says it is.
    pub spec: ToolSpec,
    /// What the operator says it is.
    pub word: ToolWord,
    /// Whether it may be granted and called.
    pub standing: Standing,
}

/// What the operator says of a tool, and what the server would have us
/// believe.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ToolWord {
    /// What a call may do to the world.
    pub effect: Effect,
    /// What a call costs, in budget units.
    pub cost: u32,
    /// The server's own annotations, JSON: advice, shown and never believed.
    pub advice: Option<String>,
}

/// What a call may do to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Effect {
    /// Nothing, and it looks at nothing either: the same arguments always
    /// have the same answer.
    None,
    /// It looks at something that may change.
    Read,
    /// It changes something.
    Write,
}

impl Effect {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Where a tool's present definition stands. One that is not approved can be
/// neither granted nor called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Standing {
    /// It is the approved one.
    Approved,
    /// No definition of this tool was approved yet.
    New,
    /// It is another than the approved one.
    Changed,
}

impl Standing {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Approved => "approved",
            Self::New => "new",
            Self::Changed => "changed",
        }
    }
}

/// A tool beside the definition that was approved.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReviewedTool {
    /// Its name.
    pub name: ToolName,
    /// The digest of its present definition.
    pub definition_sha256: [u8; 32],
    /// Whether the present definition is approved.
    pub standing: Standing,
    /// What the operator says of it.
    pub word: ToolWord,
    /// What differs from the approved definition, line by line as in a diff;
    /// all of it for a new tool, nothing for an approved one. Untrusted text.
    pub difference: String,
}

/// A tool that fits an intent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FoundTool {
    /// The tool.
    pub spec: ToolSpec,
    /// How well it fits, in millionths. Scores of one answer can be compared
    /// with each other, and with nothing else.
    pub score_millionths: u32,
}

/// A tool that is neither found nor granted.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct BlockedTool {
    /// The tool.
    pub name: ToolName,
    /// How its definition stands.
    pub standing: Standing,
}

/// One tool, as its server describes it: untrusted text.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ToolSpec {
    /// Its name.
    pub name: ToolName,
    /// What it is for.
    pub description: String,
    /// The JSON Schema of its arguments, as JSON text.
    pub input_schema: String,
    /// The JSON Schema of its structured result, if it declares one.
    pub output_schema: Option<String>,
    /// SHA-256 of the definition: what a grant pins.
    pub definition_sha256: [u8; 32],
}

/// A tool that a grant allows.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GrantedTool {
    /// Its name.
    pub name: ToolName,
    /// The definition the grant was given for.
    pub definition_sha256: [u8; 32],
    /// What it asks of the arguments of every call, as it is written:
    /// `/quantity<=5`. All of them must hold.
    pub constraints: Vec<String>,
}

/// What a verified grant says.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GrantClaims {
    /// The principal that the grant is for.
    pub principal: String,
    /// The tools it allows.
    pub tools: Vec<GrantedTool>,
    /// When it ends, in seconds since the Unix epoch.
    pub expires_unix_s: u64,
    /// The most calls of one run.
    pub calls_max: Option<u32>,
    /// The most that one run's calls may cost together, in budget units.
    pub cost_max: Option<u32>,
    /// The one session it is good in.
    pub session: Option<String>,
}

/// Why the broker refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RefusalKind {
    /// A tool that is named does not exist.
    NoSuchTool,
    /// The grant is not good: forged, expired, another principal's, or a
    /// definition changed since.
    BadGrant,
    /// The request does not fit where it was sent.
    BadRequest,
    /// The broker itself failed.
    Internal,
    /// The principal's roles do not reach the tool.
    Forbidden,
    /// The tool's definition is not approved.
    NotReviewed,
    /// The journal cannot be written.
    Journal,
    /// There is no room for it now: ask again later.
    Overloaded,
    /// The broker is not there now, the service ends, or the question was cancelled.
    Away,
    /// The time of the run was nearly over before all of its servers were up.
    OutOfTime,
    /// The server of a tool that is named cannot be asked now, so that it is not known
    /// whether there is such a tool.
    ServerAway,
}
