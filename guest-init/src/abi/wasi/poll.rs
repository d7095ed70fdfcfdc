//! `poll_oneoff`: waits for input, for room or for a time.
//!
//! Input and output are always there, so what waits is the clock alone, and that
//! is virtual: it moves to the earliest of the times that are waited for, and no
//! real time passes. A program that sleeps between two attempts sees that it slept.

use wasmi::{Caller, Error};

use super::{
    CLOCK_MONOTONIC, CLOCK_REALTIME, EBADF, EINVAL, STDERR, STDIN, STDOUT, SUCCESS, array, field,
    is_open, write,
};
use crate::abi::{charge, parts, range};
use crate::host::Host;
use crate::link::Stream;

/// A `subscription`: user data at 0, what is waited for at 8 and by 16.
const SUBSCRIPTION_BYTES: usize = 48;
/// An `event`: user data at 0, error at 8, what was waited for at 10, bytes that
/// are there at 16, flags at 24.
const EVENT_BYTES: usize = 32;

const EVENT_CLOCK: u8 = 0;
const EVENT_FD_READ: u8 = 1;
const EVENT_FD_WRITE: u8 = 2;

/// The time is one on the clock, and not one from now.
const ABSTIME: u16 = 1;
/// A flag of an event: nothing more comes to read.
const HANGUP: u16 = 1;
/// What is said of room for output: a page. How much there is in truth, the
/// limits say.
const ROOM_BYTES: u64 = 4096;

/// One thing that is waited for.
struct Subscription {
    userdata: [u8; 8],
    tag: u8,
    what: What,
}

enum What {
    /// A time on the virtual clock.
    Time(u64),
    /// A clock that is none.
    NoClock,
    Input(i32),
    Room(i32),
}

impl Subscription {
    /// Reads one, with times from now as times on the clock. None if there is no
    /// name for what it waits for.
    fn read(bytes: &[u8], now: u64) -> Option<Self> {
        let (tag, number) = (bytes[8], i32::from_le_bytes(field(bytes, 16)));
        let what = match (tag, number) {
            (EVENT_CLOCK, CLOCK_REALTIME | CLOCK_MONOTONIC) => {
                let time = u64::from_le_bytes(field(bytes, 24));
                let is_absolute = u16::from_le_bytes(field(bytes, 40)) & ABSTIME != 0;
                What::Time(if is_absolute { time } else { now.saturating_add(time) })
            }
            (EVENT_CLOCK, _) => What::NoClock,
            (EVENT_FD_READ, fd) => What::Input(fd),
            (EVENT_FD_WRITE, fd) => What::Room(fd),
            _ => return None,
        };
        Some(Self { userdata: field(bytes, 0), tag, what })
    }

    /// What has come of it by `now`.
    fn event(&self, now: u64, open: [bool; 3], input: usize) -> Option<Event> {
        let [stdin, stdout, stderr] = open;
        Some(match self.what {
            What::Time(time) if time > now => return None,
            What::Time(_) => Event::DUE,
            What::NoClock => Event { error: EINVAL, ..Event::DUE },
            What::Input(STDIN) if stdin => {
                let flags = if input == 0 { HANGUP } else { 0 };
                Event { bytes: input as u64, flags, ..Event::DUE }
            }
            What::Room(STDOUT) if stdout => Event { bytes: ROOM_BYTES, ..Event::DUE },
            What::Room(STDERR) if stderr => Event { bytes: ROOM_BYTES, ..Event::DUE },
            What::Input(_) | What::Room(_) => Event { error: EBADF, ..Event::DUE },
        })
    }
}

/// What has come of a subscription.
struct Event {
    error: i32,
    bytes: u64,
    flags: u16,
}

impl Event {
    const DUE: Self = Self { error: SUCCESS, bytes: 0, flags: 0 };

    fn write(&self, of: &Subscription, target: &mut [u8]) {
        target.fill(0);
        target[..8].copy_from_slice(&of.userdata);
        // The numbers of WASI's errors have two digits.
        target[8..10].copy_from_slice(&(self.error as u16).to_le_bytes());
        target[10] = of.tag;
        target[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        target[24..26].copy_from_slice(&self.flags.to_le_bytes());
    }
}

pub(super) fn oneoff<S: Stream>(
    mut caller: Caller<'_, Host<S>>,
    subscriptions: i32,
    events: i32,
    count: i32,
    told: i32,
) -> Result<i32, Error> {
    if count == 0 {
        return Ok(EINVAL);
    }
    let (memory, _) = parts(&mut caller)?;
    let waited = array(memory, subscriptions, count, SUBSCRIPTION_BYTES)?;
    let target = array(memory, events, count, EVENT_BYTES)?;
    range(memory, told, 4)?;
    // Each is looked at twice.
    charge(&mut caller, 2 * u64::from(count as u32))?;

    let open = [STDIN, STDOUT, STDERR].map(|fd| is_open(&caller, fd));
    let (memory, host) = parts(&mut caller)?;
    let input = host.input.len() - host.input_given;
    let begun = host.clock.now_ns();
    // What nothing has come of yet is a time. The first ends the wait, unless
    // something is there that need not be waited for.
    let mut first = Some(u64::MAX);
    for bytes in memory[waited.clone()].chunks_exact(SUBSCRIPTION_BYTES) {
        let Some(subscription) = Subscription::read(bytes, begun) else { return Ok(EINVAL) };
        first = match (subscription.event(begun, open, input), subscription.what) {
            (None, What::Time(time)) => first.map(|first| first.min(time)),
            _ => None,
        };
    }
    if let Some(first) = first {
        host.clock.sleep_until(first);
    }

    let now = host.clock.now_ns();
    let mut written = 0u32;
    let mut targets = target.step_by(EVENT_BYTES);
    for at in waited.step_by(SUBSCRIPTION_BYTES) {
        // Read anew: an event may have been written over it.
        let subscription = Subscription::read(&memory[at..at + SUBSCRIPTION_BYTES], begun);
        let event = subscription.as_ref().and_then(|it| it.event(now, open, input));
        if let (Some(subscription), Some(event)) = (subscription, event)
            && let Some(target) = targets.next()
        {
            event.write(&subscription, &mut memory[target..target + EVENT_BYTES]);
            written += 1;
        }
    }
    write(&mut caller, told, &written.to_le_bytes())?;
    Ok(SUCCESS)
}
