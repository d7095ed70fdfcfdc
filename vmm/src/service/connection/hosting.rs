//! Tools that a client hosts for its run: calls go to it, and its answers back.

use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::service::{Callback, CallbackSettled};

use super::sending::SEND_PATIENCE;
use super::{Connection, breach, decode};
use crate::link::{Link, Patience};

impl Connection {
    /// Has a thread pass on the calls of tools that the client hosts for a
    /// run, until the run is over.
    pub(super) fn host(&self, number: u64, calls: UnixStream) {
        let host = Arc::new(calls);
        self.live.set_host(number, Arc::clone(&host));
        let connection = self.itself.clone();
        let calls = Arc::clone(&host);
        let passes_on = host.set_write_timeout(Some(SEND_PATIENCE)).and_then(|()| {
            let link = Link::new(calls.try_clone()?);
            let thread = std::thread::Builder::new().name("host".into());
            thread.spawn(move || pass_on(&connection, number, &calls, link))
        });
        if let Err(error) = passes_on {
            tracing::error!(%error, "a client's own tools cannot be called");
            // The run's calls of these tools fail.
            let _ = host.shutdown(Shutdown::Both);
        }
    }

    /// Passes one call on, unless its run has ended: the run's end is the last
    /// that its client hears of the number, which then may be another's.
    fn pass_on(&self, number: u64, host: &Arc<UnixStream>, call: &Frame) -> io::Result<()> {
        let callback: Callback = decode(call)?;
        self.send_if(Kind::Callback, &Callback { number, ..callback }, || {
            self.live.is_hosted_by(number, host)
        })
    }

    /// Hands the client's answer to whoever waits for it.
    ///
    /// # Errors
    /// It is too large for a frame.
    pub(super) fn settle(&self, settled: CallbackSettled) -> io::Result<()> {
        // Without one, its run has ended meanwhile.
        let Some(host) = self.live.host(settled.number) else { return Ok(()) };
        let settled = CallbackSettled { number: 0, ..settled };
        let mut bytes = Vec::new();
        frame::try_write_message(Kind::CallbackSettled, &settled, &mut bytes).map_err(breach)?;
        // The broker reads as long as the run is open. What is there of an
        // answer that it did not take is the beginning of no other.
        if let Err(error) = (&*host).write_all(&bytes) {
            tracing::debug!(%error, "nobody waits for a client's answer");
            let _ = host.shutdown(Shutdown::Both);
        }
        Ok(())
    }
}

/// Passes the broker's calls on to the client.
fn pass_on(connection: &Weak<Connection>, number: u64, host: &Arc<UnixStream>, mut calls: Link) {
    while let Ok(call) = calls.receive(|kind| kind == Kind::Callback, Patience::default()) {
        let Some(connection) = connection.upgrade() else { return };
        if let Err(error) = connection.pass_on(number, host, &call) {
            tracing::debug!(%error, "a client takes no calls");
            connection.close();
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use forge_protocol::name::ToolName;
    use forge_protocol::service::Cancel;

    use super::super::super::peer::Peer;
    use super::*;

    #[test]
    fn a_call_that_waits_behind_its_runs_end_is_passed_to_nobody() {
        let (client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let mut heard = Link::new(client);
        heard.receive(|kind| kind == Kind::Hello, Patience::default()).unwrap();
        let call = |n| {
            let (tool, arguments) = (ToolName::parse("app.twice").unwrap(), b"{}".to_vec());
            Callback { number: 0, callback: n, tool, arguments }
        };
        let hosts = || {
            let (mut broker, calls) = UnixStream::pair().unwrap();
            connection.host(1, calls);
            let mut bytes = Vec::new();
            frame::write_message(Kind::Callback, &call(7), &mut bytes);
            broker.write_all(&bytes).unwrap();
            broker
        };
        let passes_on = || Arc::strong_count(&connection) > 1;
        let leaves = |cancel| connection.live.leave_run(1, cancel);
        let first = connection.live.enter_run(1).unwrap().unwrap();
        let _broker = hosts();
        let frame = heard.receive(|kind| kind == Kind::Callback, Patience::default()).unwrap();
        assert_eq!(decode::<Callback>(&frame).unwrap(), Callback { number: 1, ..call(7) });
        leaves(first);
        while passes_on() {
            std::thread::yield_now();
        }

        // The second call is on its way when its run ends, and the number is
        // another run's before its turn has come.
        let second = connection.live.enter_run(1).unwrap().unwrap();
        let writing = connection.writing.lock();
        let _broker = hosts();
        while !passes_on() {
            std::thread::yield_now();
        }
        leaves(second);
        let _third = connection.live.enter_run(1).unwrap().unwrap();
        drop(writing);
        while passes_on() {
            std::thread::yield_now();
        }
        connection.send(Kind::Cancel, &Cancel { number: 0 }).unwrap();
        let frame = heard.receive(|_| true, Patience::default()).unwrap();
        assert_eq!(frame.kind, Kind::Cancel, "the call came after its run's end");
    }
}
