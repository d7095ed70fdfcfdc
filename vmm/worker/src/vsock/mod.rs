//! A virtio socket device (virtio 1.2, 5.10) on the MMIO transport (4.2).
//!
//! A primer. A virtio socket carries *packets*: a 44-byte header and a
//! payload, guest to host in the transmit queue, host to guest in the receive
//! queue. A *connection* is a pair of ports on two context ids; it opens by
//! REQUEST and RESPONSE, carries bytes by RW, and ends by SHUTDOWN or RST.
//! Each side tells the other how large its buffer is and how much of what it
//! got it has consumed (*credit*); a sender keeps within that.
//!
//! The device serves a driver that polls: it never interrupts, and it works
//! inside the exits that the driver makes. A kick of the transmit queue is
//! answered within it where an answer is there. A driver of ours finds the
//! device set up, as firmware hands over what it has used ([`Device::handed_over`]);
//! any other may reset it and negotiate.
//!
//! It distrusts the guest: every ring, descriptor and header is checked,
//! headers are copied once and decided on as copied, credit is enforced
//! against the guest, and what breaks the rules marks the device as needing a
//! reset. Deliberately absent: interrupts, EVENT_IDX, indirect descriptors,
//! and any knowledge of what the streams carry.
//!
//! | module | what it holds |
//! |---|---|
//! | [`connection`] | one connection: state and credit, no memory, no queues |
//! | [`muxer`] | all connections, which packets go where |
//! | [`device`] | registers and queues |
//! | `reach` | what of the guest's memory the device reaches |

pub mod connection;
pub mod device;
pub mod muxer;
mod reach;

pub use device::Device;
pub use muxer::{ConnectionId, Event, Muxer};
