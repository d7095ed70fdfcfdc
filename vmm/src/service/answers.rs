//! What clients ask, and the answers.

use std::collections::HashMap;
use std::mem::discriminant;
use std::sync::Mutex;

use forge_protocol::broker::{RefusalKind, Reply as BrokerReply, Request};
use forge_protocol::service::{Question, Reply};

use super::peer::{Peer, Who};
use super::{Service, not_theirs};
use crate::broker::BrokerError;
use crate::cancel::Cancel;
use crate::link::Patience;
use crate::locks::lock;

/// Questions of one principal that may wait for tool servers at the same time,
/// over all its connections.
const OF_ONE_MAX: usize = 16;
/// Questions of one user or machine that the broker answers by itself. It may
/// be one that says nothing.
const OF_ONE_PEER_MAX: usize = 64;
/// The same of all principals, and as many again of all users and machines: those
/// who look at grants keep nobody's search out. Each holds a thread, for as long
/// as a tool server takes that has to start first.
const OF_ALL_MAX: usize = 256;

/// Whose questions are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Asker {
    /// Tool servers may have to start for its questions.
    Principal(String),
    /// Whoever has a grant may look at it and narrow it.
    Peer(Who),
}

impl Asker {
    /// Who asks this, unless no question of theirs waits for the broker.
    fn of(question: &Question, peer: &Peer) -> Option<Self> {
        match question {
            Question::SearchTools { principal, .. } | Question::ListTools { principal } => {
                Some(Self::Principal(principal.clone()))
            }
            Question::IssueGrant(request) => Some(Self::Principal(request.principal.clone())),
            // The operator does not keep itself out.
            Question::AttenuateGrant(_) | Question::InspectGrant { .. } => {
                peer.who().map(Self::Peer)
            }
            Question::Status | Question::Metrics | Question::Drain => None,
        }
    }

    fn questions_max(&self) -> usize {
        match self {
            Self::Principal(_) => OF_ONE_MAX,
            Self::Peer(_) => OF_ONE_PEER_MAX,
        }
    }
}

/// Whose questions wait for the broker.
#[derive(Debug, Default)]
pub(super) struct Questions(Mutex<HashMap<Asker, usize>>);

/// One of them. Dropped when it is answered.
struct Place<'a> {
    questions: &'a Questions,
    asker: Asker,
}

impl Questions {
    /// A place for a question, if there is one.
    fn enter(&self, asker: Asker) -> Option<Place<'_>> {
        let mut asked = lock(&self.0);
        let of_one = asked.get(&asker).copied().unwrap_or(0);
        let kind = discriminant(&asker);
        let of_its_kind = asked.iter().filter(|(other, _)| discriminant(*other) == kind);
        let of_all: usize = of_its_kind.map(|(_, count)| count).sum();
        if of_one >= asker.questions_max() || of_all >= OF_ALL_MAX {
            return None;
        }
        asked.insert(asker.clone(), of_one + 1);
        Some(Place { questions: self, asker })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut asked = lock(&self.questions.0);
        match asked.get_mut(&self.asker) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(asked.remove(&self.asker)),
        }
    }
}

fn refused(error: BrokerError) -> Reply {
    match error {
        BrokerError::Refused { kind, message } => Reply::Refused { kind, message },
        away @ BrokerError::Away { .. } => {
            Reply::Refused { kind: RefusalKind::Away, message: away.to_string() }
        }
        BrokerError::Cancelled => Reply::Refused {
            kind: RefusalKind::Away,
            message: "the question was cancelled, or the service ends".to_owned(),
        },
        other => Reply::Refused { kind: RefusalKind::Internal, message: other.to_string() },
    }
}

fn forbidden(message: &str) -> Reply {
    Reply::Refused { kind: RefusalKind::Forbidden, message: message.to_owned() }
}

impl Service {
    /// Answers a question. May take as long as the broker does, unless it is
    /// cancelled. The start of a tool server that it waited for goes on then:
    /// others may wait for the same.
    pub(super) fn answer(&self, question: Question, peer: &Peer, cancel: &Cancel) -> Reply {
        if !peer.speaks() {
            return forbidden(
                "this client speaks for no principal: forge.toml, [principals.<name>] uids, or \
                 cids over vsock",
            );
        }
        let asker = Asker::of(&question, peer);
        if let Some(Asker::Principal(name)) = &asker
            && !peer.speaks_for(name)
        {
            return forbidden(&not_theirs(name));
        }
        let place = asker.map(|asker| self.questions.enter(asker));
        if matches!(place, Some(None)) {
            return Reply::Refused {
                kind: RefusalKind::Overloaded,
                message: "too many questions are unanswered, of this client's or of all: wait \
                          for one"
                    .to_owned(),
            };
        }
        let patience = Patience { until: None, cancel: Some(cancel) };
        let request = match question {
            Question::SearchTools { principal, intent, k } => {
                Request::SearchTools { principal, intent, k }
            }
            Question::ListTools { principal } => Request::ListTools { principal },
            Question::IssueGrant(request) => Request::IssueGrant(request),
            Question::AttenuateGrant(narrowing) => Request::AttenuateGrant(narrowing),
            Question::InspectGrant { token } => Request::InspectGrant { token },
            Question::Status => return Reply::Status(self.status(peer.is_operator()).to_string()),
            Question::Metrics | Question::Drain if !peer.is_operator() => {
                return forbidden(
                    "only the operator may ask this: the service's own user, or root",
                );
            }
            Question::Metrics => return self.metrics(patience),
            Question::Drain => {
                self.drain();
                return Reply::Draining;
            }
        };
        match self.supervisor.ask(&request, patience) {
            Ok(BrokerReply::Found { tools, blocked, unavailable }) => {
                Reply::Found { tools, blocked, unavailable }
            }
            Ok(BrokerReply::Tools { tools, unavailable }) => Reply::Tools { tools, unavailable },
            Ok(BrokerReply::Grant(token)) => Reply::Grant(token),
            Ok(BrokerReply::Claims(claims)) => Reply::Claims(claims),
            Ok(other) => refused(BrokerError::Protocol(format!("{other:?} does not answer this"))),
            Err(error) => refused(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal(name: usize) -> Asker {
        Asker::Principal(name.to_string())
    }

    fn user(uid: usize) -> Asker {
        Asker::Peer(Who::User(uid as u32))
    }

    #[test]
    fn what_one_asks_is_bounded_and_leaves_places_for_others() {
        for of_kind in [principal, user] {
            let (one, questions) = (of_kind(0), Questions::default());
            let most = one.questions_max();
            let mut of_one: Vec<_> =
                (0..most).map(|_| questions.enter(one.clone()).unwrap()).collect();
            assert!(questions.enter(one.clone()).is_none());
            assert!(questions.enter(principal(1)).is_some());
            assert!(questions.enter(user(1)).is_some());
            of_one.pop();
            drop(questions.enter(one).expect("one was answered"));
            let others: Vec<_> =
                (1..=OF_ALL_MAX).map_while(|it| questions.enter(of_kind(it))).collect();
            assert_eq!(of_one.len() + others.len(), OF_ALL_MAX);
            drop((of_one, others));
            assert!(lock(&questions.0).is_empty(), "who asks nothing takes no room");
        }
    }

    #[test]
    fn neither_looks_at_grants_nor_searches_of_many_keep_the_other_out() {
        type OfKind = fn(usize) -> Asker;
        for (of_kind, other) in [(principal as OfKind, user as OfKind), (user, principal)] {
            let questions = Questions::default();
            let all: Vec<_> =
                (0..OF_ALL_MAX).map(|it| questions.enter(of_kind(it / 16)).unwrap()).collect();
            assert!(questions.enter(of_kind(OF_ALL_MAX)).is_none());
            assert!(questions.enter(other(0)).is_some());
            drop(all);
        }
    }

    #[test]
    fn a_question_of_which_a_grant_is_all_that_counts_is_counted_with_its_client() {
        let question = Question::InspectGrant { token: Vec::new() };
        let who = Who::Machine(3);
        let speaker = Peer::Speaker { who, principals: Vec::new() };
        assert_eq!(Asker::of(&question, &speaker), Some(Asker::Peer(who)));
        assert_eq!(Asker::of(&question, &Peer::Operator), None);
        assert_eq!(Asker::of(&Question::Status, &speaker), None);
    }

    #[test]
    fn whoever_asks_for_a_principals_tools_or_grants_asks_as_that_principal() {
        use forge_protocol::broker::GrantRequest;
        let principal = || "alice".to_owned();
        let request = GrantRequest {
            principal: principal(),
            tools: Vec::new(),
            constraints: Vec::new(),
            valid_s: 1,
            calls_max: None,
            cost_max: None,
            session: None,
        };
        let peer = Peer::Speaker { who: Who::User(7), principals: vec![principal()] };
        for question in [
            Question::SearchTools { principal: principal(), intent: "pay".into(), k: 1 },
            Question::ListTools { principal: principal() },
            Question::IssueGrant(request),
        ] {
            for peer in [&peer, &Peer::Operator] {
                assert_eq!(Asker::of(&question, peer), Some(Asker::Principal(principal())));
            }
        }
    }
}
