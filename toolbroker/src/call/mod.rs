//! The chain that every tool call passes.
//!
//! ```text
//!  the connection says which run          Identified
//!    → the grant allows the tool                        denied
//!    → the request is of a size           Granted       request too large
//!    → the tool is there                                no such tool
//!    → its definition is the granted one                denied
//!    → and approved still                 Pinned        denied
//!    → there is a place at its server                   deadline passed
//!    → if it is large, a turn to read it                deadline passed
//!    → the arguments fit its schema                     bad request
//!    → the arguments fit the grant                      denied
//!    → they can be sent to the tool                     bad request
//!    · (data-flow labels)
//!    → there is time                                    deadline passed
//!    · (budgets over time, approvals)
//!    → the budget is not spent            Checked       budget spent
//!    → the journal has the intent         Intended      not recorded
//!  ═══ dispatched: it may have happened from here on ═══
//!    → with its credential, until its
//!      deadline                           Dispatched    outcome unknown
//!    → the tool did not fail                            tool failed
//!    → the result fits its output schema  Fitting       bad response
//!    → credentials are taken out
//!    → the response is of a size          Redacted      response too large
//!    → the journal has the outcome
//!    → the response
//! ```
//!
//! The steps are types in [`chain`](self), each made from the one before, so
//! the order cannot be written otherwise. Each stands as early as it can and
//! as late as it must: size before parsing, since what is too large is not
//! worth parsing; the budget behind all that can refuse but the journal, so
//! that a refused call costs none; the journal behind that, so that what it
//! calls an intent is one.
//!
//! A call that is refused above the line costs its server not one byte, and
//! is journalled. One that reached the journal is followed to its end and
//! recorded, whether anybody still waits or not. A built-in tool passes the
//! same chain; one without effect is carried out in place, with nothing to
//! wait for ([`Dispatcher::take`]).
//!
//! Distrusted are the worker (whatever it sends is within its run or nothing)
//! and the server. Deliberately absent is any second try: a call whose
//! outcome is unknown stays so.

mod chain;
mod failure;
mod run;

pub use self::failure::CallFailure;
pub use self::run::Run;

use std::sync::Arc;

use forge_protocol::guest::{Call, Settled};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout_at;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use self::chain::{Books, Checked, Granted, Identified, Refused, unheard};
use crate::beside;
use crate::builtin::Work;
use crate::definition::Effect;
use crate::journal::{Close, Event, Journal, Record};
use crate::metrics::Metrics;
use crate::registry::{Carrier, Found, Registry};
use crate::review::Reviews;
use crate::telemetry::{RunSpan, Span, Spans};
use crate::turns::Turns;
use crate::upstream::Place;

/// Large requests and results that are read, held against their schemas and cleared of
/// credentials at the same time. Each takes many times its size meanwhile, and none
/// waits for anything but a processor, or a request for the journal: more at once would
/// end no sooner.
const LARGE_MAX: usize = 8;
/// The same of one principal, so that none keeps the others waiting.
const PRINCIPAL_LARGE_MAX: usize = 2;

/// Carries calls out.
#[derive(Clone, Debug)]
pub struct Dispatcher {
    registry: Arc<Registry>,
    reviews: Arc<Reviews>,
    books: Books,
    /// Where servers are talked with.
    home: Handle,
    large: Arc<Large>,
    /// Everything from the intent on, to be waited for at the end.
    dispatched: TaskTracker,
}

/// A call that was taken.
#[derive(Debug)]
pub enum Taken {
    /// Nobody needed to be asked or waited for.
    Settled(Settled),
    /// For [`Dispatcher::carry_out`].
    Pending(Pending),
}

/// A call that somebody has to be waited for.
#[derive(Debug)]
pub struct Pending(Stage);

#[derive(Debug)]
enum Stage {
    Granted(Box<Granted>),
    Refused(Refused),
}

impl Dispatcher {
    /// A dispatcher to the servers of `registry`, which are talked with on
    /// the event loop `home`, of tools that `reviews` approves of.
    #[must_use]
    pub fn new(
        registry: Arc<Registry>,
        reviews: Arc<Reviews>,
        journal: Journal,
        metrics: Arc<Metrics>,
        home: Handle,
    ) -> Self {
        let books = Books { journal, metrics, spans: None };
        let large = Arc::new(Large::default());
        Self { registry, reviews, books, home, large, dispatched: TaskTracker::new() }
    }

    /// The same, which tells a collector of its runs and calls.
    #[must_use]
    pub fn telling(mut self, spans: Option<Spans>) -> Self {
        self.books.spans = spans;
        self
    }

    /// Where runs and calls are told.
    #[must_use]
    pub fn spans(&self) -> Option<&Spans> {
        self.books.spans.as_ref()
    }

    /// The journal that calls are recorded in.
    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.books.journal
    }

    /// What is counted.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.books.metrics
    }

    /// Waits until every dispatched call is recorded. None may be started
    /// after that.
    pub async fn drain(&self) {
        self.dispatched.close();
        self.dispatched.wait().await;
    }

    /// Records that a run's link is closed, if it made a call, and forgets
    /// what was kept for it alone.
    pub fn closed(&self, run: &Run, how: Close) {
        run.close();
        self.books.metrics.run_closed();
        if run.has_called() {
            self.registry.forget_run(run.caller());
            let closed = Record::now(run.id(), Arc::clone(run.principal()), Event::Closed { how });
            if let Some(spans) = &self.books.spans {
                let (run, ended_unix_ns, took) =
                    (run.id(), closed.at_us.saturating_mul(1_000), run.age());
                spans.tell(Span::Run(RunSpan { run, ended_unix_ns, took, how }));
            }
            self.books.journal.append(closed);
        }
    }

    /// Takes a call of a run, and settles it if nobody needs to be asked or
    /// waited for: one that the first checks refuse, and one of a built-in
    /// tool that has no effect and a small request.
    #[must_use]
    pub fn take(&self, run: &Arc<Run>, call: Call) -> Taken {
        // Until the journal is known to work, everybody waits for it.
        let ready = self.books.journal.is_ready();
        let granted = match Identified::new(run, call, &self.books).granted() {
            Ok(granted) => granted,
            Err(refused) if ready => {
                return Taken::Settled(refused.recorded_at_once(&self.books));
            }
            Err(refused) => return Taken::Pending(Pending(Stage::Refused(refused))),
        };
        let builtin = self.registry.builtin(granted.tool());
        let at_once = builtin.and_then(|builtin| match builtin.work() {
            Work::InPlace(work) if builtin.effect() == Effect::None => Some((builtin, work)),
            _ => None,
        });
        match at_once {
            Some((builtin, work)) if ready && granted.is_small(builtin.tool()) => {
                let cost = self.registry.cost(granted.tool());
                let checked = granted
                    .pinned(Arc::clone(builtin.tool()), Effect::None, cost, &self.reviews)
                    .and_then(|pinned| pinned.checked(None));
                Taken::Settled(match checked {
                    Ok(checked) => checked
                        .intended_at_once(&self.books)
                        .carried_out(work)
                        .fitting(&self.books)
                        .redacted(None)
                        .recorded(&self.books),
                    Err(refused) => refused.recorded_at_once(&self.books),
                })
            }
            _ => Taken::Pending(Pending(Stage::Granted(Box::new(granted)))),
        }
    }

    /// Carries one call out and says how it settled. If its run is cut off before the
    /// call passed every check, it is refused, and recorded as that; after that, the call
    /// goes on unheard.
    pub async fn carry_out(&self, Pending(stage): Pending) -> Settled {
        let granted = match stage {
            Stage::Granted(granted) => *granted,
            Stage::Refused(refused) => return refused.recorded(&self.books).await,
        };
        let (run, call, began) = (Arc::clone(granted.run()), granted.call(), granted.began());
        let span = tracing::info_span!("call", run = %run.id(), call, tool = ?granted.tool());
        let ready = self.check(granted).instrument(span.clone()).await;
        let Ready { checked, carrier, turn, place } = match ready {
            Ok(ready) => ready,
            Err(refused) => return refused.recorded(&self.books).await,
        };
        let effect = checked.effect();
        let (deliver, delivered) = oneshot::channel();
        let (books, registry) = (self.books.clone(), Arc::clone(&self.registry));
        let (large, of) = (Arc::clone(&self.large), Arc::clone(&run));
        let called = async move {
            let settled = match checked.intended(&books).await {
                Ok(intended) => match carrier.in_place() {
                    // Long work for a thread that nobody else waits for.
                    Some(work) => {
                        let carried = move || {
                            let _turn = turn;
                            let carried = intended.carried_out(&work);
                            // What it kept for its run was forgotten before.
                            if of.is_closed() {
                                registry.forget_run(of.caller());
                            }
                            carried.fitting(&books).redacted(None).recorded(&books)
                        };
                        beside(carried).await
                    }
                    None => {
                        // What is read is written now, and gone from here.
                        drop(turn);
                        let mut dispatched = intended.dispatched(&carrier).await;
                        drop(place);
                        let turn = match dispatched.is_small() {
                            true => None,
                            false => dispatched.turn(async |of| large.turn(of).await).await,
                        };
                        let ended = move || {
                            dispatched
                                .fitting(&books)
                                .redacted(Some(&registry.scrubber()))
                                .recorded(&books)
                        };
                        match turn {
                            // Long work for a thread that nobody else waits for.
                            Some(_turn) => beside(ended).await,
                            None => ended(),
                        }
                    }
                },
                Err(refused) => refused.recorded(&books).await,
            };
            // Nobody waits any more if the deadline came first.
            let _ = deliver.send(settled);
        };
        self.dispatched.spawn_on(called.instrument(span), &self.home);
        let delivered = tokio::select! {
            biased;
            delivered = timeout_at(run.deadline(), delivered) => delivered.ok(),
            () = run.is_ended_early() => None,
        };
        let failure = match delivered {
            Some(Ok(settled)) => return settled,
            Some(Err(_)) => CallFailure::Lost,
            // What has no effect is as good as not done.
            None if effect == Effect::None => CallFailure::DeadlinePassed,
            None => CallFailure::DeadlineAfterDispatch,
        };
        unheard(&run, call, began, &failure)
    }

    /// The steps from the grant to the journal.
    async fn check(&self, granted: Granted) -> Result<Ready, Refused> {
        let run = granted.run();
        let found = self.registry.find(granted.tool(), run.hosted());
        let Found { tool, carrier, effect, cost } = match run.in_time(found).await {
            Some(Ok(found)) => found,
            Some(Err(error)) => {
                let failure = CallFailure::NoSuchTool(error.told_to_a_program());
                return Err(granted.refused(failure));
            }
            None => return Err(granted.refused(CallFailure::DeadlinePassed)),
        };
        let small = granted.is_small(&tool);
        let pinned = granted.pinned(tool, effect, cost, &self.reviews)?;
        let (pinned, place) = pinned.placed(&carrier).await?;
        if small {
            let checked = pinned.checked(Some(&carrier))?;
            return Ok(Ready { checked, carrier, turn: None, place });
        }
        let (pinned, turn) = pinned.turn(async |of| self.large.turn(of).await).await?;
        // Long work for a thread that nobody else waits for. It has its turn also when this
        // is dropped meanwhile.
        let check = move || Ok((pinned.checked(Some(&carrier))?, carrier, turn));
        let (checked, carrier, turn) = beside(check).await?;
        Ok(Ready { checked, carrier, turn: Some(turn), place })
    }
}

/// A call that may be made, and what it holds.
struct Ready {
    checked: Checked,
    carrier: Carrier,
    /// If its request is large.
    turn: Option<Turn>,
    place: Option<Place>,
}

/// A turn to read a large request or to look through a large result, until it is dropped.
#[derive(Debug)]
struct Turn {
    _own: Option<OwnedSemaphorePermit>,
    _any: Option<OwnedSemaphorePermit>,
}

/// Where such turns are waited for.
#[derive(Debug)]
struct Large {
    of_each: Turns,
    of_all: Arc<Semaphore>,
}

impl Default for Large {
    fn default() -> Self {
        Self {
            of_each: Turns::new(PRINCIPAL_LARGE_MAX),
            of_all: Arc::new(Semaphore::new(LARGE_MAX)),
        }
    }
}

impl Large {
    /// Waits for the principal's own turn first: while it waits for that, it
    /// is before nobody.
    async fn turn(&self, principal: &Arc<str>) -> Turn {
        // Turns are never closed.
        let own = self.of_each.of(principal).acquire_owned().await;
        let any = Arc::clone(&self.of_all).acquire_owned().await;
        Turn { _own: own.ok(), _any: any.ok() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::grant::Grant;
    use crate::grant::tests::claims_of_nothing;
    use crate::journal::Place;
    use crate::review::Mode;
    use forge_protocol::RunId;
    use forge_protocol::abi::CallCode;
    use forge_protocol::broker::{Callable, GrantClaims, GrantedTool};
    use forge_protocol::limits::RunLimits;
    use forge_protocol::name::ToolName;
    use std::path::Path;
    use std::time::Duration;

    #[tokio::test]
    async fn a_principal_whose_turns_are_all_taken_holds_up_no_other() {
        let turns = Large::default();
        let name = |name: &str| Arc::<str>::from(name);
        let now = async |of: &str| {
            // A turn that is there is there at the first look.
            tokio::time::timeout(Duration::ZERO, turns.turn(&name(of))).await.ok()
        };
        let mut taken: Vec<Turn> = Vec::new();
        let alice = name("alice");
        let mut waits: Vec<_> = (0..20).map(|_| Box::pin(turns.turn(&alice))).collect();
        for wait in &mut waits {
            taken.extend(tokio::time::timeout(Duration::ZERO, wait).await.ok());
        }
        assert_eq!(taken.len(), PRINCIPAL_LARGE_MAX);
        for of in ["bob", "bob", "carol", "carol", "dave", "dave"] {
            taken.push(now(of).await.expect(of));
        }
        assert_eq!(taken.len(), LARGE_MAX);
        assert!(now("erin").await.is_none());
        drop(taken);
        assert!(now("erin").await.is_some());
    }

    /// Nothing was reviewed.
    fn reviews() -> Arc<Reviews> {
        Arc::new(Reviews::open(Mode::FirstUse, None).unwrap())
    }

    /// With a stash, and its journal in this folder.
    fn keeping(folder: &Path) -> Dispatcher {
        let (file, home) = (folder.join("forge.toml"), Handle::current());
        std::fs::write(&file, "[builtins.stash]\n").unwrap();
        let config = Config::load(None, Some(&file), &|_| None).unwrap();
        let registry = Arc::new(Registry::new(config, &home));
        let metrics = Arc::new(Metrics::default());
        let journal = Journal::new(Place::Folder(folder.into()), Arc::clone(&metrics));
        Dispatcher::new(registry, reviews(), journal, metrics, home)
    }

    /// A run that may call these of the built-in tools.
    fn run_of(dispatcher: &Dispatcher, names: &[ToolName]) -> Arc<Run> {
        let granted = |name: &ToolName| GrantedTool {
            name: name.clone(),
            definition_sha256: dispatcher.registry.builtin(name).unwrap().tool().sha256(),
            constraints: Vec::new(),
        };
        let tools = names.iter().map(granted).collect();
        let grant = Arc::new(Grant::new(GrantClaims { tools, ..claims_of_nothing() }).unwrap());
        Arc::new(Run::new(RunId([1; 16]), [0; 32], Callable::Any, grant, RunLimits::default()))
    }

    #[tokio::test]
    async fn a_call_that_waits_when_its_run_is_cut_off_is_refused_and_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let dispatcher = keeping(folder.path());
        let tool = ToolName::parse("stash.put").unwrap();
        let run = run_of(&dispatcher, std::slice::from_ref(&tool));
        let mut taken = Vec::new();
        for _ in 0..PRINCIPAL_LARGE_MAX {
            taken.push(dispatcher.large.turn(run.principal()).await);
        }
        let request = format!(r#"{{"key":"k","value":"{}"}}"#, "v".repeat(64 * 1024)).into_bytes();
        let call = Call { id: 0, waits: true, tool, request };
        let Taken::Pending(pending) = dispatcher.take(&run, call) else { panic!("it has a turn") };
        let cut_off = async {
            tokio::task::yield_now().await;
            run.cut_off();
        };
        let (settled, ()) = tokio::join!(dispatcher.carry_out(pending), cut_off);
        assert_eq!(settled.code, Some(CallCode::DeadlinePassed));
        dispatcher.journal().close();
        let (calls, left_out) = crate::journal::read::calls(folder.path(), None, 9).unwrap();
        assert!(left_out.is_empty(), "{left_out:?}");
        let states: Vec<_> = calls.iter().map(|it| (it.call, it.state)).collect();
        assert_eq!(states, [(0, crate::journal::read::CallState::Refused)]);
    }

    #[tokio::test]
    async fn what_a_run_keeps_for_itself_after_its_end_is_forgotten_as_well() {
        let folder = tempfile::tempdir().unwrap();
        let dispatcher = keeping(folder.path());
        let names = ["stash.put", "stash.get"].map(|name| ToolName::parse(name).unwrap());
        let run = || run_of(&dispatcher, &names);
        let call = |run: &Arc<Run>, tool: usize, request: &str| {
            let request = request.as_bytes().to_vec();
            dispatcher.take(run, Call { id: 0, waits: true, tool: names[tool].clone(), request })
        };
        let is_kept = async || {
            let got = match call(&run(), 1, r#"{"key":"k"}"#) {
                Taken::Settled(settled) => settled,
                Taken::Pending(pending) => dispatcher.carry_out(pending).await,
            };
            String::from_utf8(got.body).unwrap().contains(r#""found":true"#)
        };
        let put = r#"{"key":"k","value":1}"#;

        let open = run();
        let Taken::Pending(pending) = call(&open, 0, put) else { panic!("it waited for nobody") };
        assert_eq!(dispatcher.carry_out(pending).await.code, None);
        assert!(is_kept().await);
        dispatcher.closed(&open, Close::Closed);
        assert!(!is_kept().await);

        let late = run();
        let Taken::Pending(pending) = call(&late, 0, put) else { panic!("it waited for nobody") };
        // One step: it is dispatched, and this thread, which begins it, has not.
        tokio::select! {
            biased;
            _ = dispatcher.carry_out(pending) => panic!("it is settled"),
            () = std::future::ready(()) => {}
        }
        assert!(!dispatcher.dispatched.is_empty());
        dispatcher.closed(&late, Close::Dropped);
        dispatcher.drain().await;
        assert!(!is_kept().await);
    }

    #[test]
    fn a_built_in_whose_definition_is_not_the_granted_one_is_denied() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let registry = Arc::new(Registry::new(Config::default(), runtime.handle()));
        let name = ToolName::parse("crypto.hash").unwrap();
        let present = registry.builtin(&name).unwrap().tool().sha256();
        let metrics = Arc::new(Metrics::default());
        let journal = Journal::new(Place::Folder(folder.path().into()), Arc::clone(&metrics));
        let home = runtime.handle().clone();
        let dispatcher = Dispatcher::new(registry, reviews(), journal, metrics, home);
        let ask = |definition_sha256| {
            let claims = GrantClaims {
                tools: vec![GrantedTool {
                    name: name.clone(),
                    definition_sha256,
                    constraints: vec!["/text^=a".to_owned()],
                }],
                calls_max: Some(1),
                ..claims_of_nothing()
            };
            let grant = Arc::new(Grant::new(claims).unwrap());
            let (id, limits) = (RunId([0; 16]), RunLimits::default());
            let run = Run::new(id, [0; 32], Callable::Any, grant, limits);
            let request = br#"{"algorithm": "sha256", "text": "abc"}"#.to_vec();
            dispatcher
                .take(&Arc::new(run), Call { id: 0, waits: true, tool: name.clone(), request })
        };
        // The first call of all waits for the journal, the others for nobody.
        let Taken::Pending(first) = ask(present) else { panic!("it waited for nobody") };
        assert_eq!(runtime.block_on(dispatcher.carry_out(first)).code, None);
        for (definition_sha256, code) in [(present, None), ([1; 32], Some(CallCode::Denied))] {
            let Taken::Settled(settled) = ask(definition_sha256) else { panic!("it waited") };
            assert_eq!(settled.code, code);
        }
    }
}
