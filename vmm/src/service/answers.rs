//! What clients ask, and the answers.

use forge_protocol::broker::{RefusalKind, Reply as BrokerReply, Request};
use forge_protocol::service::{Question, Reply};

use super::Service;
use crate::broker::BrokerError;

fn refused(error: BrokerError) -> Reply {
    match error {
        BrokerError::Refused { kind, message } => Reply::Refused { kind, message },
        other => Reply::Refused { kind: RefusalKind::Internal, message: other.to_string() },
    }
}

impl Service {
    /// Answers a question. May take as long as the broker does.
    pub(super) fn answer(&self, question: Question) -> Reply {
        let request = match question {
            Question::SearchTools { principal, intent, k } => {
                Request::SearchTools { principal, intent, k }
            }
            Question::ListTools { principal } => Request::ListTools { principal },
            Question::IssueGrant(request) => Request::IssueGrant(request),
            Question::AttenuateGrant(narrowing) => Request::AttenuateGrant(narrowing),
            Question::InspectGrant { token } => Request::InspectGrant { token },
            Question::Status => return Reply::Status(self.status().to_string()),
            Question::Metrics => return self.metrics(),
            Question::Drain => return self.drain(),
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
