//! A toolbroker that is lost: what is asked again, and of whom.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/frail_broker.rs"]
mod frail_broker;
#[path = "support/processes.rs"]
mod processes;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use forge_vmm::broker::{Broker, BrokerError};
use forge_vmm::keeper::Keeper;
use frail_broker::{Brokers, Life};
use processes::wait_for;

fn main() -> ExitCode {
    frail_broker::be_one();
    support::main(
        claims![],
        claims![
            a_request_that_cost_a_broker_its_life_is_not_given_to_the_next,
            a_broker_that_talks_nonsense_is_replaced_and_its_successor_not_asked,
            a_request_that_no_broker_has_seen_is_given_to_the_next,
        ],
    )
}

fn keeper(brokers: &Brokers) -> Keeper {
    Keeper::of(Broker::start(&brokers.options()).unwrap()).unwrap()
}

/// Asks, again as long as there is no broker: on a slow host the next takes
/// longer than anybody waits.
fn ask(keeper: &Keeper) -> Result<(String, Arc<Broker>), BrokerError> {
    loop {
        match keeper.with(None, Broker::metrics) {
            Err(BrokerError::Away { .. }) => std::thread::sleep(Duration::from_millis(5)),
            answer => return answer,
        }
    }
}

/// The request is answered with an error by the first, and by nobody else; the
/// second serves.
fn is_not_asked_again(brokers: &Brokers) -> BrokerError {
    let keeper = keeper(brokers);
    let error = ask(&keeper).unwrap_err();
    wait_for("a successor", || keeper.standing().pid.filter(|_| keeper.standing().restarts == 1));
    assert_eq!(brokers.asked(), 1, "{error}");
    assert_eq!(ask(&keeper).unwrap().0, "here");
    assert_eq!((brokers.asked(), keeper.standing().restarts), (2, 1));
    error
}

fn a_request_that_cost_a_broker_its_life_is_not_given_to_the_next() {
    let brokers = Brokers::with("dies", &[Life::Dies, Life::Answers]);
    let error = is_not_asked_again(&brokers);
    assert!(matches!(error, BrokerError::Lost(_)), "{error}");
}

fn a_broker_that_talks_nonsense_is_replaced_and_its_successor_not_asked() {
    let brokers = Brokers::with("nonsense", &[Life::TalksNonsense, Life::Answers]);
    let error = is_not_asked_again(&brokers);
    assert!(matches!(error, BrokerError::Protocol(_)), "{error}");
}

fn a_request_that_no_broker_has_seen_is_given_to_the_next() {
    let brokers = Brokers::with("deaf", &[Life::IsDeaf, Life::Answers]);
    let keeper = keeper(&brokers);
    assert_eq!(ask(&keeper).unwrap().0, "here");
    assert_eq!((brokers.asked(), keeper.standing().restarts), (1, 1));
}
