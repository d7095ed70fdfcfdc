//! The control link and the run links: one supervisor in front, its runs
//! beside it.
//!
//! ```text
//!  supervisor ══ control link ══▶ Broker ◀── run link ══ worker
//!               Ask / Answer        │         Call / Settled
//!               by number           ▼
//!                               Dispatcher ──▶ tool servers
//! ```
//!
//! The supervisor is trusted to say whose run it opens; a worker is trusted
//! with nothing: its run is the one its connection was opened for, and a
//! frame it should not send ends the link. Deliberately absent is a socket to
//! listen on: [`Broker::serve`] takes any stream, and today there is one.
//!
//! | module | what it holds |
//! |---|---|
//! | `listing` | tools as they are listed, searched and reviewed |
//! | `grants` | what may be granted |
//! | `run_link` | calls in, answers out |
//! | `refused` | why a request is refused |

mod grants;
mod listing;
mod refused;
mod run_link;

use std::collections::HashMap;
use std::future::poll_fn;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use forge_protocol::RunId;
use forge_protocol::broker::{
    Answer, Ask, Authority, Callable, GrantClaims, OpenRun, REQUESTS_IN_FLIGHT_MAX, RefusalKind,
    Reply, Request,
};
use forge_protocol::frame::{self, Kind};
use forge_protocol::handshake::{HandshakeError, Hello, Refusal, Role};
use forge_protocol::limits::{
    CALLS_IN_FLIGHT_MAX, CALLS_MAX, OverLimit, REASON_BYTES_MAX, RunLimits,
};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use self::grants::{narrowed, with_hosted};
use self::refused::Refused;
use self::run_link::serve_run;
use crate::beside;
use crate::call::{Dispatcher, Run};
use crate::config::{self, Config};
use crate::grant::{self, Grant, GrantError, Issuer, Terms};
use crate::hosting::{Hosting, HostingError};
use crate::journal::{Journal, Place};
use crate::link::{self, LinkError, Receiver, Rider, Sender};
use crate::locks::lock;
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::registry::Registry;
use crate::retrieval::Retrieval;
use crate::review::Reviews;
use crate::telemetry::Spans;
use crate::upstream::hosted::Hosted;
use crate::verified::Verified;

/// How long a grant is good that is issued for one run alone, beyond the
/// run's own wall clock: servers may have to start first.
const RUN_GRANT_SLACK_S: u64 = 120;
/// How much of a run's time is left, at most, when its servers are waited for no longer.
const OPEN_SLACK_MAX: Duration = Duration::from_millis(200);

/// Why serving a supervisor ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The link failed, or the supervisor broke the protocol.
    #[error("the control link: {0}")]
    Link(#[from] LinkError),
    /// The two sides do not fit together.
    #[error("the control link: {0}")]
    Handshake(#[from] HandshakeError),
}

/// The socket that rode with a request which needs one.
fn rode(rider: Rider, missing: Refused) -> Result<UnixStream, Refused> {
    match rider {
        Rider::Came(descriptor) => link::stream_of(descriptor).map_err(Refused::BadLink),
        Rider::None => Err(missing),
        Rider::Dropped => {
            tracing::warn!(
                "no descriptor left for a link that came with a request: raise the limit on open \
                 files"
            );
            Err(Refused::NoDescriptorLeft)
        }
    }
}

/// The toolbroker, without the process around it.
#[derive(Debug)]
pub struct Broker {
    registry: Arc<Registry>,
    retrieval: Arc<Retrieval>,
    grants: Verified,
    policy: RwLock<Arc<Policy>>,
    reviews: Arc<Reviews>,
    dispatcher: Dispatcher,
    runs: TaskTracker,
    hosting: Arc<Hosting>,
    /// Those whose link is open.
    open: Mutex<HashMap<RunId, Weak<Run>>>,
    /// `true` once nothing new is dispatched.
    closing: watch::Sender<bool>,
}

impl Broker {
    /// A broker over the servers of `config`, none of them started, and the
    /// definitions of their tools that were approved. Links are
    /// served on the event loop that the broker's methods are called on, and
    /// should have it for themselves; servers are talked with on the event
    /// loop `home`.
    #[must_use]
    pub fn new(
        config: Config,
        issuer: Issuer,
        reviews: Reviews,
        journal: Place,
        home: &Handle,
    ) -> Self {
        let policy = RwLock::new(Arc::new(config.policy.clone()));
        let reviews = Arc::new(reviews);
        let metrics = Arc::new(Metrics::default());
        let spans = config.collector.clone().and_then(|collector| {
            let started = Spans::start(collector, Arc::clone(&metrics), home);
            started.inspect_err(|error| tracing::error!(%error, "no spans are sent")).ok()
        });
        let registry = Arc::new(Registry::new(config, home));
        let journal = Journal::new(journal, Arc::clone(&metrics));
        let (of, by) = (Arc::clone(&registry), Arc::clone(&reviews));
        let dispatcher = Dispatcher::new(of, by, journal, metrics, home.clone()).telling(spans);
        let closing = watch::Sender::new(false);
        let (grants, runs) = (Verified::new(issuer), TaskTracker::new());
        let retrieval = Arc::default();
        let (open, hosting) = (Mutex::default(), Arc::default());
        Self {
            registry,
            retrieval,
            grants,
            policy,
            reviews,
            dispatcher,
            runs,
            hosting,
            open,
            closing,
        }
    }

    /// Serves one supervisor until it closes its link.
    ///
    /// # Errors
    /// [`ServeError`]: the link is closed, and the runs opened over it go on.
    pub async fn serve(self: &Arc<Self>, stream: UnixStream) -> Result<(), ServeError> {
        let (mut receiver, mut sender) = link::split(stream);
        if !greet(&mut receiver, &mut sender).await? {
            return Ok(());
        }
        let requests =
            |kind: Kind| (kind == Kind::Request).then_some(Kind::Request.payload_bytes_max());
        // What takes its time, so that nothing behind it has to wait.
        let mut answering = JoinSet::new();
        // Those of them that can be withdrawn.
        let mut questions = HashMap::new();
        loop {
            let answer: Framed = tokio::select! {
                Some(answered) = answering.join_next(), if !answering.is_empty() => match answered {
                    Ok(answer) => answer,
                    Err(error) if error.is_cancelled() => continue,
                    // Only a panic of ours ends a request without an answer.
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                },
                received = receiver.receive(true, requests),
                    if answering.len() < REQUESTS_IN_FLIGHT_MAX =>
                {
                    let Some(received) = received? else { return Ok(()) };
                    let ask: Ask = received.message()?;
                    let Ask { id, ref request } = ask;
                    let can_be_withdrawn = request.can_be_withdrawn();
                    if let Request::Withdraw { question } = request
                        && let Some(asked) = questions.remove(question)
                    {
                        AbortHandle::abort(&asked);
                    }
                    let answer = Arc::clone(self).answer(ask, received.rider);
                    let mut answer = Box::pin(answer);
                    // Most requests need nobody else and are answered here.
                    let first = poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx))).await;
                    match first {
                        Poll::Ready(answer) => answer,
                        Poll::Pending => {
                            let asked = answering.spawn(answer);
                            if can_be_withdrawn {
                                questions.insert(id, asked);
                            }
                            continue;
                        }
                    }
                }
            };
            questions.remove(&answer.id);
            sender.send(&answer.frames).await?;
        }
    }

    /// Ends everything: dispatches nothing new, waits for what is dispatched,
    /// closes the journal, stops the servers. Bounded by the deadlines of the runs.
    pub async fn shut_down(&self) {
        self.closing.send_replace(true);
        self.runs.close();
        self.runs.wait().await;
        self.dispatcher.drain().await;
        self.dispatcher.journal().close();
        // Neither has to wait for the other.
        let told = async {
            if let Some(spans) = self.dispatcher.spans() {
                spans.close().await;
            }
        };
        tokio::join!(told, self.registry.stop());
    }

    async fn answer(self: Arc<Self>, ask: Ask, rider: Rider) -> Framed {
        let Ask { id, request } = ask;
        let reply = self.reply(request, rider).await.unwrap_or_else(|refused| {
            let message = crate::cut(&refused.to_string(), REASON_BYTES_MAX);
            tracing::info!(kind = ?refused.kind(), why = ?message, "request refused");
            Reply::Refused { kind: refused.kind(), message }
        });
        let answer = Answer { id, reply };
        let frames = match &answer.reply {
            // Some MiB perhaps, while all runs' calls are taken in this thread.
            Reply::Tools { .. } | Reply::Reviews { .. } => beside(move || framed(&answer)).await,
            _ => framed(&answer),
        };
        Framed { id, frames }
    }

    async fn reply(self: &Arc<Self>, request: Request, rider: Rider) -> Result<Reply, Refused> {
        match request {
            Request::ListTools { principal } => {
                tracing::debug!(?principal, "list tools");
                self.list(&principal).await
            }
            Request::IssueGrant(request) => self.issue(request).await.map(Reply::Grant),
            Request::InspectGrant { token } => {
                Ok(Reply::Claims(self.verify(token).await?.claims().clone()))
            }
            Request::AttenuateGrant(narrowing) => {
                Ok(Reply::Grant(beside(move || narrowed(narrowing)).await?))
            }
            Request::ReviewTools => self.review().await,
            Request::ApproveTools { tools } => {
                Ok(Reply::Approved { tools: self.approve(tools).await? })
            }
            Request::OpenRun(request) => {
                let stream = rode(rider, Refused::NoRunLink)?;
                self.open(request, stream, None).await.map(Reply::Opened)
            }
            Request::Host(tools) => {
                let stream = rode(rider, Refused::NoHostLink)?;
                if self.registry.has_server(&tools.server) {
                    let server = crate::cut(&tools.server, 128);
                    return Err(HostingError::Configured { server }.into());
                }
                let hosting = Arc::clone(&self.hosting);
                let host = beside(move || hosting.host(tools, stream)).await?;
                Ok(Reply::Hosting { host })
            }
            Request::OpenHostedRun { run, host } => {
                let stream = rode(rider, Refused::NoRunLink)?;
                let hosted = self.hosting.claim(host)?;
                self.open(run, stream, Some(hosted)).await.map(Reply::Opened)
            }
            Request::Sync => {
                self.dispatcher.journal().sync().await?;
                Ok(Reply::Synced)
            }
            Request::Metrics => Ok(Reply::Metrics(self.dispatcher.metrics().text())),
            Request::SearchTools { principal, intent, k } => {
                self.search(&principal, intent, k).await
            }
            Request::EndRun { run_id, is_whole } => {
                let run = self.open_runs().get(&run_id).and_then(Weak::upgrade);
                match &run {
                    Some(run) if is_whole => run.leave_calls(),
                    Some(run) => run.cut_off(),
                    None => {}
                }
                let synced = self.dispatcher.journal().sync().await;
                // What came over its link meanwhile counts, too.
                if let Some(broken) = run.and_then(|run| run.broken()) {
                    return Ok(Reply::RunEnded { broken: Some(broken) });
                }
                synced?;
                Ok(Reply::RunEnded { broken: None })
            }
            Request::CancelRun { run_id } => {
                let run = self.open_runs().get(&run_id).and_then(Weak::upgrade);
                // Of a run whose link was closed we no longer know the calls, and must
                // not answer that there were none.
                let run = run.ok_or(Refused::NotOpen)?;
                tracing::info!(run = %run_id, "run cancelled");
                // What settles from here on is settled by that.
                let calls = run.calls_so_far();
                run.cancel();
                Ok(Reply::Cancelled { calls })
            }
            Request::LoadRoles { file, tables } => {
                let policy = Arc::new(config::roles(Path::new(&file), &tables)?);
                *self.policy.write().unwrap_or_else(PoisonError::into_inner) = policy;
                tracing::info!("roles were read again");
                Ok(Reply::RolesLoaded)
            }
            // By whoever reads the link.
            Request::Withdraw { .. } => Ok(Reply::Withdrawn),
        }
    }

    /// Who may see what, by now.
    fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn open_runs(&self) -> MutexGuard<'_, HashMap<RunId, Weak<Run>>> {
        lock(&self.open)
    }

    /// What a token allows now. A token that is not known is verified beside
    /// everything else.
    async fn verify(self: &Arc<Self>, token: Vec<u8>) -> Result<Arc<Grant>, GrantError> {
        if let Some(known) = self.grants.known(&token, SystemTime::now()) {
            return known;
        }
        let this = Arc::clone(self);
        beside(move || this.grants.verify(&token, SystemTime::now())).await
    }

    /// That what was granted is there still for a program that can call these: visible to
    /// the principal, defined as it was, and reviewed.
    async fn check_current(
        &self,
        principal: &str,
        claims: &GrantClaims,
        callable: &Callable,
        until: Option<Instant>,
    ) -> Result<(), Refused> {
        // What a role lost since the grant was issued is lost to the grant too.
        self.check_visible(principal, claims.tools.iter().map(|tool| &tool.name))?;
        // A search grants some that the program has no use for.
        let needed = claims.tools.iter().filter(|tool| callable.includes(&tool.name));
        let needed: Vec<_> = needed.collect();
        let names = needed.iter().map(|tool| tool.name.clone());
        let current = self.registry.find_all(names, until).await;
        let current = current.map_err(|error| error.told_to(principal, &self.policy()))?;
        for (granted, current) in needed.into_iter().zip(&current) {
            if granted.definition_sha256 != current.sha256() {
                return Err(Refused::DefinitionChanged { tool: granted.name.clone() });
            }
        }
        self.check_reviewed(&current).await
    }

    async fn open(
        self: &Arc<Self>,
        request: OpenRun,
        stream: UnixStream,
        hosted: Option<Hosted>,
    ) -> Result<GrantClaims, Refused> {
        // Its servers may take their time to be up, and that is the run's, by which its
        // supervisor ends it.
        let asked = Instant::now();
        let OpenRun { run_id, principal, session, program_sha256, authority, callable, limits } =
            request;
        for (what, got, limit) in [
            ("calls", limits.calls, CALLS_MAX),
            ("calls_in_flight", limits.calls_in_flight, CALLS_IN_FLIGHT_MAX),
        ] {
            if got > limit {
                let (got, limit) = (got.into(), limit.into());
                return Err(Refused::OverLimit(OverLimit { what, got, limit }));
            }
        }
        let until = servers_until(&limits);
        let grant = match authority {
            Authority::Grant(token) => {
                let grant = self.verify(token).await?;
                grant::check_presenter(grant.claims(), &principal, session.as_deref())?;
                self.check_current(&principal, grant.claims(), &callable, until).await?;
                grant
            }
            Authority::Tools(names) => {
                let tools = self.pin(&principal, names, until).await?;
                let valid_s = (limits.wall_ms / 1000).saturating_add(RUN_GRANT_SLACK_S);
                let (principal, calls_max, cost_max) = (principal.clone(), None, None);
                let session = session.clone();
                let terms = Terms { principal, tools, valid_s, calls_max, cost_max, session };
                Arc::new(Grant::new(terms.claims(SystemTime::now())?)?)
            }
        };
        if *self.closing.borrow() {
            return Err(Refused::Closing);
        }
        let grant = match &hosted {
            Some(hosted) => Arc::new(with_hosted(&grant, hosted)?),
            None => grant,
        };
        let claims = grant.claims().clone();
        let run = Run::new(run_id, program_sha256, callable, grant, limits)
            .asked_for_at(asked)
            .in_session(session.as_deref());
        let run = Arc::new(match hosted {
            Some(hosted) => run.hosting(hosted),
            None => run,
        });
        self.dispatcher.metrics().run_opened();
        tracing::info!(run = %run_id, ?principal, tools = claims.tools.len(), "run opened");
        let dispatcher = self.dispatcher.clone();
        let closing = self.closing.subscribe();
        let opened = Arc::downgrade(&run);
        self.open_runs().insert(run_id, Weak::clone(&opened));
        let this = Arc::clone(self);
        self.runs.spawn(async move {
            serve_run(run, stream, dispatcher, closing).await;
            // It may have been opened again meanwhile, over another link.
            let mut open = this.open_runs();
            if open.get(&run_id).is_some_and(|it| it.ptr_eq(&opened)) {
                open.remove(&run_id);
            }
        });
        Ok(claims)
    }
}

/// Until when a run that is to be opened can wait for its servers. A little less than it
/// has, by which its supervisor counts: whoever answers first can say which server it was.
fn servers_until(limits: &RunLimits) -> Option<Instant> {
    let wall = Duration::from_millis(limits.wall_ms);
    Instant::now().checked_add(wall - (wall / 10).min(OPEN_SLACK_MAX))
}

/// An answer to this question, as it is sent.
struct Framed {
    id: u64,
    frames: Vec<u8>,
}

/// An answer as it is sent. What does not fit into a frame is refused: others
/// have a say in how large it is.
fn framed(answer: &Answer) -> Vec<u8> {
    let mut frames = Vec::new();
    if let Err(error) = frame::try_write_message(Kind::Reply, answer, &mut frames) {
        tracing::error!(%error, "an answer is too large to be sent");
        let message = format!("the answer is too large to be sent: {error}");
        let reply = Reply::Refused { kind: RefusalKind::Internal, message };
        frame::write_message(Kind::Reply, &Answer { id: answer.id, reply }, &mut frames);
    }
    frames
}

/// Both sides say who they are. `false` if the supervisor left at once.
async fn greet(receiver: &mut Receiver, sender: &mut Sender) -> Result<bool, ServeError> {
    let ours = Hello::ours(Role::Broker);
    let mut frames = Vec::new();
    frame::write_message(Kind::Hello, &ours, &mut frames);
    sender.send(&frames).await?;
    let hello = |kind: Kind| (kind == Kind::Hello).then_some(Kind::Hello.payload_bytes_max());
    let Some(received) = receiver.receive(false, hello).await? else { return Ok(false) };
    if let Err(error) = ours.agree(received.message()?, Role::Supervisor) {
        if matches!(error, HandshakeError::VersionMismatch { .. }) {
            frames.clear();
            frame::write_message(Kind::Refuse, &Refusal(ours), &mut frames);
            sender.send(&frames).await?;
        }
        return Err(error.into());
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use forge_protocol::codec;
    use forge_protocol::frame::HEADER_BYTES;

    use super::*;

    #[test]
    fn an_answer_that_fits_into_no_frame_is_refused_and_no_panic() {
        let limit = Kind::Reply.payload_bytes_max() as usize;
        let answer = Answer { id: 7, reply: Reply::Metrics("x".repeat(limit)) };
        let frames = framed(&answer);
        let Answer { id, reply } = codec::decode(&frames[HEADER_BYTES..]).unwrap();
        let refused = matches!(reply, Reply::Refused { kind: RefusalKind::Internal, .. });
        assert!(id == 7 && refused, "{reply:?}");
        let answer = Answer { id: 7, reply: Reply::Metrics("x".repeat(limit / 2)) };
        let sent: Answer = codec::decode(&framed(&answer)[HEADER_BYTES..]).unwrap();
        assert_eq!(sent, answer);
    }
}
