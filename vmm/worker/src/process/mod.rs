//! The tier `process`: the guest's own program in a jailed process of the
//! host, with no virtual machine around it.
//!
//! It is for hosts without KVM, and only for who asks for it. What a program
//! can see is the same as in a VM, because the same library runs it, over the
//! same messages, under the same limits; what is weaker is what keeps a
//! program that has taken the library over: no second page table and no ring,
//! but the host's kernel behind the system calls of [`Role::Process`], and
//! this process's memory with the run's link to the broker in it.
//!
//! It distrusts the program. It trusts its supervisor, and, unlike a VM's
//! worker, the library: so it is deliberately without a second run. A process
//! carries out one and ends; nothing here can be put back.
//!
//! ```text
//!  supervisor ── Job, Report ──▶ this process
//!                                  guest-init ─▶ Wire ─▶ exchange ─▶ broker
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | `exchange` | the library's stream, and the host's side of it |
//!
//! [`Role::Process`]: crate::jail::Role::Process

mod exchange;

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use forge_protocol::frame::Kind;
use forge_protocol::limits::PANIC_MESSAGE_BYTES_MAX;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fork, Moments, Ready, Timing, VmFailure};

use crate::clock::now_ns;
use crate::jail::{Limits, WorkerJail};
use crate::machine::Watchdog;
use crate::worker::life::{self, say, take_socket};
use crate::worker::{elapsed_ns, unavailable};
use exchange::{Exchange, Served, Wire};

/// A worker's limits, as a VM's worker has them; how much address space it gets
/// is for [`Makings`] to say.
pub(crate) const LIMITS: Limits = Limits { open_files: 8, processes: 0, file_bytes: 0 };

/// What workers of this tier inherit.
#[derive(Debug)]
pub(crate) struct Makings {
    /// The zygote's address space before there was a worker, in bytes.
    address_space_bytes: u64,
}

impl Makings {
    /// To be called while `/proc` is still there.
    ///
    /// # Errors
    /// If it is not.
    pub(crate) fn new() -> io::Result<Self> {
        // In pages; the first field of proc_pid_statm(5).
        let statm = std::fs::read_to_string("/proc/self/statm")?;
        let pages = statm.split_ascii_whitespace().next().and_then(|it| it.parse::<u64>().ok());
        let pages = pages.ok_or(io::ErrorKind::InvalidData)?;
        // SAFETY: takes a number, and this one is known.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        Ok(Self { address_space_bytes: pages * u64::try_from(page).unwrap_or(4096) })
    }

    /// What a worker may map: what it has from the zygote, what a guest with
    /// these limits would have for RAM, and what any run may leave.
    fn address_space_bytes(&self, ram_bytes: u64) -> u64 {
        self.address_space_bytes.saturating_add(ram_bytes).saturating_add(life::left_bytes())
    }
}

/// The child's whole life, as [`life::end`] has it.
pub(crate) fn main(
    socket: OwnedFd,
    makings: &Makings,
    trust: &TrustKeys,
    jail: &WorkerJail,
    order: Fork,
) -> ! {
    life::end(|| live(socket, makings, trust, jail, order))
}

fn live(
    socket: OwnedFd,
    makings: &Makings,
    trust: &TrustKeys,
    jail: &WorkerJail,
    order: Fork,
) -> io::Result<()> {
    let began = Instant::now();
    let forked = now_ns();
    let mut link = take_socket(socket)?;
    let watchdog = match enter(makings, jail, order) {
        Ok(watchdog) => watchdog,
        Err(failure) => return say(&mut link, Kind::Ready, &Ready::Err(failure)),
    };
    let jailed = now_ns();
    let at = Moments { forked, made: jailed, jailed, ..Moments::default() };
    let timing = Timing { vm_ns: elapsed_ns(began), at, ..Timing::default() };
    let (wire, exchange) = Wire::new(Exchange::new(link, watchdog, timing));
    // Its links go with the process, whose filter forbids closing them.
    let exchange = ManuallyDrop::new(exchange);
    // What a panic prints goes to the null device.
    let served = catch_unwind(AssertUnwindSafe(|| forge_guest_init::serve(wire, trust, now_ns)));
    let served = match served {
        Ok(Ok(())) => Served::ToTheEnd,
        Ok(Err(error)) => Served::Broken(error.to_string()),
        Err(panic) => Served::Broken(format!("guest panic: {}", said(&*panic))),
    };
    let mut exchange = exchange.borrow_mut();
    exchange.end(served)
}

/// What a panic said, as far as a guest could say it. A worker's last words are bounded,
/// and what breaks that bound is taken for another's.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a word");
    &text[..text.floor_char_boundary(PANIC_MESSAGE_BYTES_MAX)]
}

/// Gives up everything but the socket. The watchdog's timer goes with the
/// process, whose filter forbids giving it up.
fn enter(
    makings: &Makings,
    jail: &WorkerJail,
    order: Fork,
) -> Result<&'static Watchdog, VmFailure> {
    let watchdog = Watchdog::new().map_err(|error| unavailable("no timer", &error))?;
    let bound = makings.address_space_bytes(order.ram_bytes);
    jail.enter(&mut [], bound).map_err(|error| unavailable("no jail", &error))?;
    Ok(Box::leak(Box::new(watchdog)))
}

#[cfg(test)]
mod tests {
    use forge_protocol::limits::RunLimits;
    use forge_protocol::worker::{Fate, VmFailure, VmFailureKind};

    use super::*;

    #[test]
    fn however_much_a_panic_says_the_worker_can_report_it() {
        let panic = std::panic::catch_unwind(|| panic!("{}", "ü".repeat(100_000))).unwrap_err();
        let message = format!("guest panic: {}", said(&*panic));
        assert!(message.starts_with("guest panic: üüü"));
        let crash = VmFailure::new(VmFailureKind::Crash, message);
        life::unserved(Fate::Vm(crash)).check(&RunLimits::default()).unwrap();
        let short = std::panic::catch_unwind(|| panic!("no")).unwrap_err();
        assert_eq!(said(&*short), "no");
    }
}
