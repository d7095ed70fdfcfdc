//! What clients ask, and the answers.

use std::collections::HashMap;
use std::sync::Mutex;

use forge_protocol::broker::{RefusalKind, Reply as BrokerReply, Request};
use forge_protocol::service::{Question, Reply};

use super::peer::Peer;
use super::{Service, lock};
use crate::broker::BrokerError;
use crate::cancel::Cancel;
use crate::link::Patience;

/// Questions of one principal that may wait for tool servers at the same time,
/// over all its connections. What the broker answers by itself is not counted.
const OF_ONE_MAX: usize = 16;
/// The same of all principals. Each holds a thread, for as long as a tool
/// server takes that has to start first.
const OF_ALL_MAX: usize = 256;

/// Whose questions wait for tool servers, perhaps.
#[derive(Debug, Default)]
pub(super) struct Questions(Mutex<HashMap<String, usize>>);

/// One of them. Dropped when it is answered.
struct Place<'a> {
    questions: &'a Questions,
    principal: &'a str,
}

impl Questions {
    /// A place for a principal's question, if there is one.
    fn enter<'a>(&'a self, principal: &'a str) -> Option<Place<'a>> {
        let mut asked = lock(&self.0);
        let of_one = asked.get(principal).copied().unwrap_or(0);
        if of_one >= OF_ONE_MAX || asked.values().sum::<usize>() >= OF_ALL_MAX {
            return None;
        }
        asked.insert(principal.to_owned(), of_one + 1);
        Some(Place { questions: self, principal })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut asked = lock(&self.questions.0);
        match asked.get_mut(self.principal) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(asked.remove(self.principal)),
        }
    }
}

fn refused(error: BrokerError) -> Reply {
    match error {
        BrokerError::Refused { kind, message } => Reply::Refused { kind, message },
        away @ BrokerError::Away { .. } => {
            Reply::Refused { kind: RefusalKind::Overloaded, message: away.to_string() }
        }
        BrokerError::Cancelled => Reply::Refused {
            kind: RefusalKind::Overloaded,
            message: "the question was cancelled, or the service ends".to_owned(),
        },
        other => Reply::Refused { kind: RefusalKind::Internal, message: other.to_string() },
    }
}

fn forbidden(message: &str) -> Reply {
    Reply::Refused { kind: RefusalKind::Forbidden, message: message.to_owned() }
}

/// Whose question it is, where that matters.
fn asker(question: &Question) -> Option<&str> {
    match question {
        Question::SearchTools { principal, .. } | Question::ListTools { principal } => {
            Some(principal)
        }
        Question::IssueGrant(request) => Some(&request.principal),
        // Whoever has a grant may look at it and narrow it.
        Question::AttenuateGrant(_)
        | Question::InspectGrant { .. }
        | Question::Status
        | Question::Metrics
        | Question::Drain => None,
    }
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
        if let Some(asker) = asker(&question)
            && !peer.speaks_for(asker)
        {
            return forbidden(
                "this client may not speak for the principal that it names: forge.toml, \
                 [principals.<name>] uids, or cids over vsock",
            );
        }
        let whose = asker(&question).map(str::to_owned);
        let place = whose.as_deref().map(|whose| self.questions.enter(whose));
        if matches!(place, Some(None)) {
            return Reply::Refused {
                kind: RefusalKind::Overloaded,
                message: "too many questions are unanswered, of this principal or of all: wait \
                          for one"
                    .to_owned(),
            };
        }
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
            Question::Metrics => return self.metrics(),
            Question::Drain => {
                self.drain();
                return Reply::Draining;
            }
        };
        match self.supervisor.ask(&request, Patience { until: None, cancel: Some(cancel) }) {
            Ok(BrokerReply::Found { tools, unavailable }) => Reply::Found { tools, unavailable },
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

    #[test]
    fn one_principals_questions_are_bounded_and_leave_places_for_others() {
        let questions = Questions::default();
        let mut of_one: Vec<_> = (0..OF_ONE_MAX).map(|_| questions.enter("a").unwrap()).collect();
        assert!(questions.enter("a").is_none());
        assert!(questions.enter("b").is_some());
        of_one.pop();
        drop(questions.enter("a").expect("one was answered"));
        let names: Vec<String> = (0..OF_ALL_MAX).map(|it| it.to_string()).collect();
        let others: Vec<_> = names.iter().map_while(|name| questions.enter(name)).collect();
        assert_eq!(of_one.len() + others.len(), OF_ALL_MAX);
        drop((of_one, others));
        assert!(lock(&questions.0).is_empty(), "who asks nothing takes no room");
    }
}
