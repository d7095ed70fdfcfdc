//! What clients ask, and the answers.

use forge_protocol::broker::{RefusalKind, Reply as BrokerReply, Request};
use forge_protocol::service::{Question, Reply};

use super::Service;
use super::peer::Peer;
use crate::broker::BrokerError;

fn refused(error: BrokerError) -> Reply {
    match error {
        BrokerError::Refused { kind, message } => Reply::Refused { kind, message },
        away @ BrokerError::Away { .. } => {
            Reply::Refused { kind: RefusalKind::Overloaded, message: away.to_string() }
        }
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
    /// Answers a question. May take as long as the broker does.
    pub(super) fn answer(&self, question: Question, peer: &Peer) -> Reply {
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
        match self.supervisor.ask(&request) {
            Ok(BrokerReply::Found { tools, unavailable }) => Reply::Found { tools, unavailable },
            Ok(BrokerReply::Tools { tools, unavailable }) => Reply::Tools { tools, unavailable },
            Ok(BrokerReply::Grant(token)) => Reply::Grant(token),
            Ok(BrokerReply::Claims(claims)) => Reply::Claims(claims),
            Ok(other) => refused(BrokerError::Protocol(format!("{other:?} does not answer this"))),
            Err(error) => refused(error),
        }
    }
}
