//! The header around every message.
//!
//! ```text
//!  0        4      5       6         8
//!  | length | kind | flags | reserved | payload …
//!    u32 LE   u8     u8=0     u16=0     length bytes
//! ```
//!
//! The header is checked before a byte of the payload is allocated: its kind
//! must be one that the receiver awaits at that moment, and its length within
//! that kind's bound.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use crate::codec::{self, Encode};
use crate::limits::{
    ARTIFACT_BYTES_MAX, ARTIFACT_NAME_BYTES_MAX, ARTIFACTS_MAX, CALLS_MAX, CONSTRAINTS_BYTES_MAX,
    GRANT_BYTES_MAX, GRANTED_TOOLS_MAX, HOSTED_TOOLS_BYTES_MAX, INPUT_BYTES_MAX, LOG_BYTES_MAX,
    LOG_RECORD_BYTES_MAX, MESSAGE_OVERHEAD_BYTES, OUTPUT_BYTES_MAX, PART_BYTES_MAX,
    PROGRAM_BYTES_MAX, REQUEST_BYTES_MAX, RESPONSE_BYTES_MAX, TOOL_LIST_BYTES_MAX,
    TOOL_NAME_BYTES_MAX,
};

/// The size of a [`Header`] on the wire.
pub const HEADER_BYTES: usize = 8;

/// One list of kinds, so that none is an enum's alone and unknown on the wire.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $byte:literal,)*) => {
        /// What a frame carries. The number is its byte on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $($(#[$doc])* $name = $byte,)*
        }

        impl Kind {
            /// Every kind, for tables and tests.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The kind with this byte.
            #[must_use]
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($byte => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// [`crate::handshake::Hello`], first from both sides, but not on a run's link.
    Hello = 0x01,
    /// [`crate::handshake::Refusal`]: no common version; the link ends.
    Refuse = 0x02,

    /// [`crate::guest::Start`], host to guest.
    Start = 0x10,
    /// The signed program, raw, host to guest.
    Program = 0x11,
    /// The run's input, raw, host to guest.
    Input = 0x12,
    /// [`crate::guest::Load`], host to guest.
    Load = 0x13,
    /// The program is loaded; empty, guest to host.
    Loaded = 0x14,

    /// [`crate::guest::Call`], guest to worker and worker to broker.
    Call = 0x20,
    /// [`crate::guest::Settled`], the answer to a call.
    Settled = 0x21,

    /// A piece of the run's output, raw.
    Output = 0x30,
    /// [`crate::run::Log`].
    Log = 0x31,
    /// [`crate::run::Artifact`].
    Artifact = 0x32,
    /// [`crate::guest::Ended`], the guest's last frame.
    Ended = 0x33,
    /// [`crate::run::Log`], as far as it is written: takes the place of the one before,
    /// and without text there is none.
    Unfinished = 0x34,

    /// [`crate::broker::Request`].
    Request = 0x40,
    /// [`crate::broker::Reply`].
    Reply = 0x41,

    /// [`crate::worker::Job`].
    Job = 0x50,
    /// [`crate::worker::Report`].
    Report = 0x51,
    /// [`crate::worker::Ready`].
    Ready = 0x52,
    /// [`crate::worker::Prepare`].
    Prepare = 0x53,
    /// [`crate::worker::ZygoteSetup`].
    ZygoteSetup = 0x54,
    /// [`crate::worker::Fork`].
    Fork = 0x55,
    /// [`crate::worker::Zygoted`].
    Zygoted = 0x56,
    /// A worker made a system call that its filter forbids: the call's
    /// number, a little-endian `i32`. Its last word.
    Forbidden = 0x57,
    /// [`crate::worker::PreparedJob`].
    PreparedJob = 0x58,
    /// [`crate::worker::ZygoteReady`].
    ZygoteReady = 0x59,
    /// The run that comes next tells what happens as it happens, in
    /// [`Self::Event`]s; empty.
    Tell = 0x5a,

    /// [`crate::service::Submit`].
    Submit = 0x60,
    /// [`crate::service::Finished`].
    Finished = 0x61,
    /// [`crate::service::Event`].
    Event = 0x62,
    /// [`crate::service::Cancel`].
    Cancel = 0x63,
    /// [`crate::service::Query`].
    Query = 0x64,
    /// [`crate::service::Answered`].
    Answered = 0x65,
    /// [`crate::service::Callback`].
    Callback = 0x66,
    /// [`crate::service::CallbackSettled`].
    CallbackSettled = 0x67,
    /// [`crate::service::Part`].
    Part = 0x68,
}

impl Kind {
    /// The largest payload a frame of this kind may have, in bytes.
    #[must_use]
    pub const fn payload_bytes_max(self) -> u32 {
        match self {
            Self::Hello | Self::Refuse | Self::Load => 256,
            Self::Loaded | Self::Tell => 0,
            Self::Start => {
                (GRANTED_TOOLS_MAX * (TOOL_NAME_BYTES_MAX + 4)) as u32 + MESSAGE_OVERHEAD_BYTES
            }
            Self::Program => PROGRAM_BYTES_MAX,
            Self::Input => INPUT_BYTES_MAX,
            Self::Call => REQUEST_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Settled => RESPONSE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Output => OUTPUT_BYTES_MAX,
            Self::Log | Self::Unfinished => LOG_RECORD_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Artifact => ARTIFACT_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Ended => 2 * MESSAGE_OVERHEAD_BYTES,
            // A grant, tools of it, and constraints on their arguments; or
            // definitions of tools that a caller hosts.
            Self::Request => {
                GRANT_BYTES_MAX
                    + Self::Start.payload_bytes_max()
                    + CONSTRAINTS_BYTES_MAX
                    + HOSTED_TOOLS_BYTES_MAX
            }
            Self::Reply => TOOL_LIST_BYTES_MAX,
            Self::Job => {
                PROGRAM_BYTES_MAX
                    + INPUT_BYTES_MAX
                    + Self::Load.payload_bytes_max()
                    + Self::Start.payload_bytes_max()
            }
            Self::Prepare | Self::PreparedJob => Self::Job.payload_bytes_max(),
            Self::Submit => {
                Self::Job.payload_bytes_max() + GRANT_BYTES_MAX + HOSTED_TOOLS_BYTES_MAX
            }
            // The report as JSON, where a byte of text may be six (`\u0001`), and the
            // names of artifacts, there and beside it.
            Self::Finished => {
                6 * (OUTPUT_BYTES_MAX + LOG_BYTES_MAX * 2)
                    + CALLS_MAX * 1024
                    + ARTIFACTS_MAX * 16 * ARTIFACT_NAME_BYTES_MAX
                    + MESSAGE_OVERHEAD_BYTES
            }
            Self::Part => PART_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Report => {
                OUTPUT_BYTES_MAX
                    + ARTIFACTS_MAX * (ARTIFACT_BYTES_MAX + 1024)
                    + LOG_BYTES_MAX * 2
                    + CALLS_MAX * 512
            }
            Self::ZygoteSetup => 64 * 1024,
            Self::Fork => 256,
            Self::Event => OUTPUT_BYTES_MAX + MESSAGE_OVERHEAD_BYTES,
            Self::Cancel => 16,
            Self::Query => Self::Request.payload_bytes_max(),
            Self::Answered => Self::Reply.payload_bytes_max(),
            Self::Callback => Self::Call.payload_bytes_max(),
            Self::CallbackSettled => Self::Settled.payload_bytes_max(),
            Self::Forbidden => 4,
            Self::Ready | Self::Zygoted | Self::ZygoteReady => 2 * MESSAGE_OVERHEAD_BYTES,
        }
    }
}

/// A frame's header, read and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the payload is.
    pub kind: Kind,
    /// How long it is, in bytes.
    pub payload_bytes: u32,
}

impl Header {
    /// The header as it goes on the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [a, b, c, d] = self.payload_bytes.to_le_bytes();
        [a, b, c, d, self.kind as u8, 0, 0, 0]
    }

    /// Reads a header, and holds its length against its kind's bound.
    ///
    /// # Errors
    /// [`FrameError`]: an unknown kind, reserved bits set, or too long.
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [a, b, c, d, kind, flags, reserved_low, reserved_high] = bytes;
        if flags != 0 || reserved_low != 0 || reserved_high != 0 {
            return Err(FrameError::ReservedBits);
        }
        let kind = Kind::from_byte(kind).ok_or(FrameError::UnknownKind { byte: kind })?;
        let payload_bytes = u32::from_le_bytes([a, b, c, d]);
        let limit = kind.payload_bytes_max();
        if payload_bytes > limit {
            return Err(FrameError::Oversized { kind, got: payload_bytes, limit });
        }
        Ok(Self { kind, payload_bytes })
    }
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// No kind has this byte.
    UnknownKind {
        /// The byte that stands for no kind.
        byte: u8,
    },
    /// Flags or reserved bytes are not zero.
    ReservedBits,
    /// The payload is announced larger than this kind may be.
    Oversized {
        /// The frame's kind.
        kind: Kind,
        /// The announced length.
        got: u32,
        /// The bound.
        limit: u32,
    },
    /// A kind that the receiver does not await now.
    Unexpected {
        /// The frame's kind.
        kind: Kind,
    },
}

impl core::fmt::Display for FrameError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::UnknownKind { byte } => write!(f, "no frame has kind {byte:#04x}"),
            Self::ReservedBits => write!(f, "reserved header bits are set"),
            Self::Oversized { kind, got, limit } => {
                write!(f, "a {kind:?} frame announces {got} bytes, the limit is {limit}")
            }
            Self::Unexpected { kind } => write!(f, "a {kind:?} frame is out of turn"),
        }
    }
}

impl core::error::Error for FrameError {}

/// One whole frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What the payload is.
    pub kind: Kind,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Puts frames together from a byte stream that comes in any pieces.
#[derive(Clone, Debug)]
pub struct Assembler(Stage);

/// Where the stream stands.
#[derive(Clone, Debug)]
enum Stage {
    /// So many bytes of a header are there.
    Header([u8; HEADER_BYTES], usize),
    /// So many bytes of a payload are missing.
    Payload(Frame, usize),
}

impl Default for Assembler {
    fn default() -> Self {
        Self::new()
    }
}

impl Assembler {
    /// Of a stream that stands between two frames.
    #[must_use]
    pub const fn new() -> Self {
        Self(Stage::Header([0; HEADER_BYTES], 0))
    }

    /// Takes bytes from the front of `input` until a frame is whole or
    /// `input` is empty. Call again with the rest until it returns `None`.
    ///
    /// `awaits` says, per kind, the payload bound at this moment, or `None`
    /// for a kind that is out of turn; it is asked before any allocation.
    ///
    /// # Errors
    /// [`FrameError`]; the stream cannot be used further.
    pub fn next(
        &mut self,
        input: &mut &[u8],
        awaits: impl FnOnce(Kind) -> Option<u32>,
    ) -> Result<Option<Frame>, FrameError> {
        if let Stage::Header(header, there) = &mut self.0 {
            let (taken, rest) = input.split_at(input.len().min(HEADER_BYTES - *there));
            header[*there..][..taken.len()].copy_from_slice(taken);
            *there += taken.len();
            *input = rest;
            if *there < HEADER_BYTES {
                return Ok(None);
            }
            let Header { kind, payload_bytes } = Header::from_bytes(*header)?;
            let limit = awaits(kind).ok_or(FrameError::Unexpected { kind })?;
            if payload_bytes > limit {
                return Err(FrameError::Oversized { kind, got: payload_bytes, limit });
            }
            let bytes = payload_bytes as usize;
            self.0 = Stage::Payload(Frame { kind, payload: Vec::with_capacity(bytes) }, bytes);
        }
        if let Stage::Payload(frame, missing) = &mut self.0 {
            let (taken, rest) = input.split_at(input.len().min(*missing));
            frame.payload.extend_from_slice(taken);
            *missing -= taken.len();
            *input = rest;
            if *missing > 0 {
                return Ok(None);
            }
        }
        match core::mem::take(self).0 {
            Stage::Payload(frame, _) => Ok(Some(frame)),
            Stage::Header(..) => Ok(None),
        }
    }

    /// Whether the stream stands between two frames, so that its end here
    /// cuts nothing off.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        matches!(self.0, Stage::Header(_, 0))
    }
}

/// What was read ahead of a stream and is no frame yet. It reads nothing itself: whoever
/// has the stream waits for it in its own way.
#[derive(Debug)]
pub struct Incoming {
    assembler: Assembler,
    /// Nothing until it is read to, and after [`Self::give_room_back`].
    room: Vec<u8>,
    room_bytes: usize,
    unread: Range<usize>,
}

impl Incoming {
    /// Of a stream that is read so many bytes at a time, more than none.
    #[must_use]
    pub const fn new(room_bytes: usize) -> Self {
        Self { assembler: Assembler::new(), room: Vec::new(), room_bytes, unread: 0..0 }
    }

    /// The next frame, if it is there to its end; `None` took in all that was read.
    /// `awaits` is that of [`Assembler::next`].
    ///
    /// # Errors
    /// [`FrameError`]; the stream cannot be used further.
    pub fn next(
        &mut self,
        awaits: impl Fn(Kind) -> Option<u32>,
    ) -> Result<Option<Frame>, FrameError> {
        while !self.unread.is_empty() {
            let mut input = &self.room[self.unread.clone()];
            let frame = self.assembler.next(&mut input, &awaits);
            self.unread.start = self.unread.end - input.len();
            if let Some(frame) = frame? {
                return Ok(Some(frame));
            }
        }
        Ok(None)
    }

    /// Where to read to, once [`Self::next`] has none; [`Self::filled`] says how much
    /// came.
    pub fn room(&mut self) -> &mut [u8] {
        debug_assert!(self.unread.is_empty(), "what is read and not taken would be lost");
        if self.room.is_empty() {
            self.room = vec![0; self.room_bytes];
        }
        &mut self.room
    }

    /// So many bytes were read to the front of [`Self::room`].
    ///
    /// # Panics
    /// With more than there is room for.
    pub fn filled(&mut self, bytes: usize) {
        assert!(bytes <= self.room.len(), "{bytes} bytes are more than there is room for");
        self.unread = 0..bytes;
    }

    /// Whether [`Self::next`] has nothing to look at.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unread.is_empty()
    }

    /// Whether the stream stands between two frames, as far as it was looked at.
    #[must_use]
    pub fn is_between_frames(&self) -> bool {
        self.assembler.is_between_frames()
    }

    /// Keeps no room while nothing comes. What is not taken yet stays.
    pub fn give_room_back(&mut self) {
        if self.unread.is_empty() {
            self.room = Vec::new();
        }
    }
}

/// Appends a frame whose payload is `message`, encoded.
///
/// # Panics
/// If the encoded message passes its kind's bound: the caller checks the
/// sizes of what it puts into a message, so that would be our bug.
pub fn write_message<T: Encode>(kind: Kind, message: &T, out: &mut Vec<u8>) {
    let written = try_write_message(kind, message, out);
    assert!(written.is_ok(), "{written:?}");
}

/// What most messages fit in, or all of one but a program or an output: room
/// for it is made at once and not by doubling.
const USUAL_BYTES: usize = 512;

/// The same for a message whose size a stranger chose.
///
/// # Errors
/// [`FrameError::Oversized`]; nothing is appended.
pub fn try_write_message<T: Encode>(
    kind: Kind,
    message: &T,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    let start = out.len();
    out.reserve(USUAL_BYTES);
    out.extend_from_slice(&[0; HEADER_BYTES]);
    codec::encode_into(message, out);
    let payload_bytes = out.len() - start - HEADER_BYTES;
    let limit = kind.payload_bytes_max();
    if payload_bytes > limit as usize {
        out.truncate(start);
        let got = u32::try_from(payload_bytes).unwrap_or(u32::MAX);
        return Err(FrameError::Oversized { kind, got, limit });
    }
    let header = Header { kind, payload_bytes: payload_bytes as u32 };
    out[start..start + HEADER_BYTES].copy_from_slice(&header.to_bytes());
    Ok(())
}

/// Appends a frame whose payload is `payload` as it is.
///
/// # Panics
/// As [`write_message`].
pub fn write_raw(kind: Kind, payload: &[u8], out: &mut Vec<u8>) {
    assert!(
        payload.len() <= kind.payload_bytes_max() as usize,
        "a {kind:?} frame of {} bytes passes its bound",
        payload.len(),
    );
    out.extend_from_slice(&Header { kind, payload_bytes: payload.len() as u32 }.to_bytes());
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(kind: Kind) -> Option<u32> {
        Some(kind.payload_bytes_max())
    }

    #[test]
    fn frames_survive_any_cutting_of_the_stream() {
        let mut stream = Vec::new();
        write_raw(Kind::Output, b"alpha", &mut stream);
        write_raw(Kind::Input, b"", &mut stream);
        write_raw(Kind::Program, &[7; 300], &mut stream);
        for piece_bytes in 1..stream.len() {
            let mut assembler = Assembler::default();
            let mut got = Vec::new();
            for piece in stream.chunks(piece_bytes) {
                let mut piece = piece;
                loop {
                    match assembler.next(&mut piece, any).unwrap() {
                        Some(frame) => got.push((frame.kind, frame.payload.len())),
                        None if piece.is_empty() => break,
                        None => {}
                    }
                }
            }
            assert_eq!(got, [(Kind::Output, 5), (Kind::Input, 0), (Kind::Program, 300)]);
            assert!(assembler.is_between_frames());
        }
    }

    #[test]
    fn a_stream_stands_between_frames_where_nothing_of_one_is_there() {
        let mut stream = Vec::new();
        write_raw(Kind::Output, b"al", &mut stream);
        let mut assembler = Assembler::default();
        for (at, byte) in stream.iter().enumerate() {
            assert_eq!(assembler.is_between_frames(), at == 0, "{at}");
            let whole = assembler.next(&mut &[*byte][..], any).unwrap();
            assert_eq!(whole.is_some(), at + 1 == stream.len());
        }
        assert!(assembler.is_between_frames());
    }

    #[test]
    fn what_is_read_ahead_is_taken_frame_by_frame() {
        let mut stream = Vec::new();
        write_raw(Kind::Output, b"alpha", &mut stream);
        write_raw(Kind::Input, b"", &mut stream);
        write_raw(Kind::Program, &[7; 300], &mut stream);
        for room_bytes in 1..stream.len() {
            let mut incoming = Incoming::new(room_bytes);
            let mut rest = stream.as_slice();
            let mut got = Vec::new();
            while !rest.is_empty() {
                let room = incoming.room();
                let bytes = room.len().min(rest.len());
                room[..bytes].copy_from_slice(&rest[..bytes]);
                rest = &rest[bytes..];
                incoming.filled(bytes);
                while let Some(frame) = incoming.next(any).unwrap() {
                    // Not while a second one waits.
                    incoming.give_room_back();
                    got.push((frame.kind, frame.payload.len()));
                }
                assert!(incoming.is_empty());
            }
            assert_eq!(got, [(Kind::Output, 5), (Kind::Input, 0), (Kind::Program, 300)]);
            assert!(incoming.is_between_frames());
        }
    }

    #[test]
    fn an_oversized_frame_is_refused_by_its_header_alone() {
        let limit = Kind::Log.payload_bytes_max();
        let header = Header { kind: Kind::Log, payload_bytes: limit + 1 }.to_bytes();
        let mut input: &[u8] = &header;
        let refused = Assembler::default().next(&mut input, any).unwrap_err();
        assert_eq!(refused, FrameError::Oversized { kind: Kind::Log, got: limit + 1, limit });
    }

    #[test]
    fn a_message_that_passes_its_bound_is_not_written() {
        let mut out = alloc::vec![7];
        let text = "x".repeat(Kind::Ended.payload_bytes_max() as usize);
        let refused = try_write_message(Kind::Ended, &text, &mut out).unwrap_err();
        assert!(matches!(refused, FrameError::Oversized { kind: Kind::Ended, .. }));
        assert_eq!(out, [7]);
        // Its length is in front of it.
        let most = &text[..text.len() - 3];
        try_write_message(Kind::Ended, &most, &mut out).unwrap();
        assert_eq!(out.len(), 1 + HEADER_BYTES + Kind::Ended.payload_bytes_max() as usize);
        out.truncate(1);
        try_write_message(Kind::Ended, &"x", &mut out).unwrap();
        assert_eq!(out.len(), 1 + HEADER_BYTES + 2);
    }

    #[test]
    fn a_frame_out_of_turn_is_refused_by_its_header_alone() {
        let header = Header { kind: Kind::Ended, payload_bytes: 4 }.to_bytes();
        let mut input: &[u8] = &header;
        let refused = Assembler::default().next(&mut input, |_| None).unwrap_err();
        assert_eq!(refused, FrameError::Unexpected { kind: Kind::Ended });
    }

    #[test]
    fn unknown_kinds_and_reserved_bits_are_refused() {
        assert_eq!(
            Header::from_bytes([0, 0, 0, 0, 0xEE, 0, 0, 0]),
            Err(FrameError::UnknownKind { byte: 0xEE })
        );
        for position in 5..8 {
            let mut bytes = Header { kind: Kind::Log, payload_bytes: 1 }.to_bytes();
            bytes[position] = 1;
            assert_eq!(Header::from_bytes(bytes), Err(FrameError::ReservedBits));
        }
    }

    #[test]
    fn every_kind_has_its_own_byte() {
        let bytes: Vec<u8> = Kind::ALL.iter().map(|kind| *kind as u8).collect();
        assert!(bytes.is_sorted_by(|one, next| one < next), "{bytes:x?}");
        let known: Vec<u8> =
            (0..=u8::MAX).filter(|byte| Kind::from_byte(*byte).is_some()).collect();
        assert_eq!(known, bytes);
        for kind in Kind::ALL {
            assert_eq!(Kind::from_byte(*kind as u8), Some(*kind));
        }
    }

    #[test]
    fn a_frame_over_what_is_awaited_is_refused_by_its_header_alone() {
        let header = Header { kind: Kind::Output, payload_bytes: 9 }.to_bytes();
        let mut input: &[u8] = &header;
        let refused = Assembler::default().next(&mut input, |_| Some(8)).unwrap_err();
        assert_eq!(refused, FrameError::Oversized { kind: Kind::Output, got: 9, limit: 8 });
        // And whatever is awaited, over what its kind may have.
        for kind in Kind::ALL {
            let payload_bytes = kind.payload_bytes_max() + 1;
            let header = Header { kind: *kind, payload_bytes }.to_bytes();
            assert!(Header::from_bytes(header).is_err(), "{kind:?}");
        }
    }
}
