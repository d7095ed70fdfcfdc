//! A stream of frames, cut anywhere, read by the [`Assembler`].
//!
//! ```text
//! input = awaited kinds (u64 LE, a bit each)  cuts  stream
//! ```

use forge_protocol::frame::{self, Assembler, Frame, FrameError, HEADER_BYTES, Kind};

use super::{Outcome, Seed, accepted, cuts, pieces, refused};

/// No frame larger than this is awaited: the bound is the receiver's choice,
/// and a large one only makes the fuzzer slow.
const PAYLOAD_BYTES_MAX: u32 = 1 << 16;

const _: () = assert!(Kind::ALL.len() <= u64::BITS as usize, "each kind has its bit");

/// What one reading of a stream gave.
#[derive(Debug, PartialEq, Eq)]
struct Reading {
    frames: Vec<Frame>,
    error: Option<FrameError>,
    read_bytes: usize,
    between_frames: bool,
}

/// The cut of the stream changes nothing, whatever is read was awaited and is
/// in the stream as it was sent, and a frame is refused by its header alone.
pub fn check(mut data: &[u8]) -> Outcome {
    let awaited = u64::from_le_bytes(core::array::from_fn(|_| super::choice(&mut data)));
    let lengths = cuts(&mut data);
    let reading = read(pieces(data, lengths), awaited);
    assert_eq!(reading, read(pieces(data, &[]), awaited), "the cut changed what was read");

    let mut sent = Vec::new();
    for frame in &reading.frames {
        let limit = bound(awaited, frame.kind).expect("a frame that was not awaited");
        assert!(frame.payload.len() <= limit as usize, "a frame past its bound");
        frame::write_raw(frame.kind, &frame.payload, &mut sent);
    }
    assert!(data.starts_with(&sent), "the frames are not what was sent");
    match reading.error {
        Some(_) => assert_eq!(reading.read_bytes, sent.len() + HEADER_BYTES),
        None => {
            assert_eq!(reading.read_bytes, data.len(), "bytes were left unread");
            assert_eq!(reading.between_frames, sent.len() == data.len());
        }
    }
    Outcome::of(reading.between_frames && reading.error.is_none() && !reading.frames.is_empty())
}

fn bound(awaited: u64, kind: Kind) -> Option<u32> {
    let bit = Kind::ALL.iter().position(|other| *other == kind)?;
    (awaited >> bit & 1 == 1).then(|| kind.payload_bytes_max().min(PAYLOAD_BYTES_MAX))
}

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>, awaited: u64) -> Reading {
    let mut assembler = Assembler::default();
    let mut reading =
        Reading { frames: Vec::new(), error: None, read_bytes: 0, between_frames: false };
    'stream: for piece in pieces {
        let mut rest = piece;
        loop {
            let next = assembler.next(&mut rest, |kind| bound(awaited, kind));
            match next {
                Ok(Some(frame)) => reading.frames.push(frame),
                Ok(None) => {
                    assert!(rest.is_empty(), "no frame, and bytes are left");
                    break;
                }
                Err(error) => {
                    reading.error = Some(error);
                    reading.read_bytes += piece.len() - rest.len();
                    break 'stream;
                }
            }
        }
        reading.read_bytes += piece.len();
    }
    reading.between_frames = assembler.is_between_frames();
    reading
}

/// A short stream, whole, cut and broken.
pub fn seeds() -> Vec<Seed> {
    let mut stream = Vec::new();
    frame::write_raw(Kind::Output, b"alpha", &mut stream);
    frame::write_raw(Kind::Input, b"", &mut stream);
    frame::write_raw(Kind::Program, &[7; 300], &mut stream);
    let input = |awaited: u64, cuts: &[u8], stream: &[u8]| {
        [&awaited.to_le_bytes(), &[cuts.len() as u8][..], cuts, stream].concat()
    };
    vec![
        accepted("whole", input(!0, &[], &stream)),
        accepted("byte-by-byte", input(!0, &[1], &stream)),
        accepted("cut-in-headers", input(!0, &[3, 9, 2, 40], &stream)),
        refused("truncated", input(!0, &[], &stream[..stream.len() - 1])),
        refused("out-of-turn", input(0, &[], &stream)),
    ]
}
