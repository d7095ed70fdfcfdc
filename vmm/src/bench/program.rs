//! The benched program: CRC-32 of its input, as eight hex digits.
//!
//! It is over 1 KB (the table is in it), signed, gets another input each run,
//! and its output is checked: a bench that measures a failing run would be
//! the fastest of all.

use std::fmt::Write as _;

use forge_protocol::RunId;
use forge_protocol::ending::Ending;
use forge_protocol::guest::{Ended, Load, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::signature::{KeyError, SignerKey, TrustKeys};
use forge_protocol::worker::{Fate, Job, Report};

/// The reflected polynomial of CRC-32.
const POLYNOMIAL: u32 = 0xedb8_8320;

fn table() -> [u32; 256] {
    std::array::from_fn(|byte| {
        (0..8).fold(byte as u32, |crc, _| (crc >> 1) ^ (POLYNOMIAL * (crc & 1)))
    })
}

/// CRC-32, as the program computes it.
fn crc32(bytes: &[u8]) -> u32 {
    let table = table();
    !bytes
        .iter()
        .fold(!0u32, |crc, byte| (crc >> 8) ^ table[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

fn source() -> String {
    let mut data = String::new();
    for entry in table() {
        for byte in entry.to_le_bytes() {
            // Writing to a string has no way to fail.
            let _ = write!(data, "\\{byte:02x}");
        }
    }
    format!(
        r#"(module
            (import "forge" "input_len" (func $input_len (result i32)))
            (import "forge" "input_read" (func $input_read (param i32 i32 i32) (result i32)))
            (import "forge" "output" (func $output (param i32 i32) (result i32)))
            (memory (export "memory") 1)
            (data (i32.const 0) "{data}")
            (func (export "forge_run") (result i32)
                (local $crc i32) (local $at i32) (local $end i32)
                (local.set $at (i32.const 4096))
                (local.set $end (i32.add (local.get $at)
                    (call $input_read (local.get $at) (i32.const 0) (call $input_len))))
                (local.set $crc (i32.const -1))
                (block $done (loop $next
                    (br_if $done (i32.eq (local.get $at) (local.get $end)))
                    (local.set $crc (i32.xor
                        (i32.shr_u (local.get $crc) (i32.const 8))
                        (i32.load (i32.shl
                            (i32.and (i32.const 0xff)
                                (i32.xor (local.get $crc) (i32.load8_u (local.get $at))))
                            (i32.const 2)))))
                    (local.set $at (i32.add (local.get $at) (i32.const 1)))
                    (br $next)))
                (local.set $crc (i32.xor (local.get $crc) (i32.const -1)))
                (local.set $at (i32.const 2048))
                (loop $digit
                    (i32.store8 (local.get $at) (i32.add
                        (local.tee $end (i32.shr_u (local.get $crc) (i32.const 28)))
                        (select (i32.const 48) (i32.const 87)
                            (i32.lt_u (local.get $end) (i32.const 10)))))
                    (local.set $crc (i32.shl (local.get $crc) (i32.const 4)))
                    (br_if $digit (i32.ne (i32.const 2056)
                        (local.tee $at (i32.add (local.get $at) (i32.const 1))))))
                (call $output (i32.const 2048) (i32.const 8))))"#
    )
}

/// The program, signed, and who trusts it.
pub struct Program {
    /// The signed module.
    pub signed: Vec<u8>,
    /// The key it is trusted by.
    pub trust: TrustKeys,
    round: u64,
}

impl Program {
    /// Assembles and signs it with a key made for the bench.
    ///
    /// # Errors
    /// What failed, for a reader.
    pub fn new() -> Result<Self, String> {
        let module = wat::parse_str(source()).map_err(|error| error.to_string())?;
        let secret = crate::keys::random().map_err(|error| error.to_string())?;
        let signer = SignerKey::from_secret(&secret);
        let signed = signer.sign(&module).map_err(|error| error.to_string())?;
        let trust =
            TrustKeys::new([signer.trust_key()]).map_err(|error: KeyError| error.to_string())?;
        Ok(Self { signed, trust, round: 0 })
    }

    /// The next run: another input each time.
    pub fn next_job(&mut self) -> Job {
        self.round += 1;
        let limits = RunLimits::default();
        Job {
            deadline_ns: limits.wall_ms * 1_000_000,
            load: Load { limits, announce: false },
            start: Start {
                run_id: RunId([0; 16]),
                seed: [0; 32],
                start_unix_ns: 0,
                granted: Vec::new(),
            },
            program: self.signed.clone(),
            input: format!("{{\"round\":{}}}", self.round).into_bytes(),
            brokered: false,
        }
    }

    /// Checks that a report is the right answer to a job.
    ///
    /// # Errors
    /// What it is instead.
    pub fn check(job: &Job, report: &Report) -> Result<(), String> {
        let Fate::Ended(Ended { ending: Ending::Returned(0), .. }) = &report.fate else {
            return Err(format!("the benched run failed: {:?}", report.fate));
        };
        let expected = format!("{:08x}", crc32(&job.input));
        if report.output != expected.as_bytes() {
            return Err(format!(
                "the benched run answered {:?}, not {expected:?}",
                String::from_utf8_lossy(&report.output)
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_computes_the_check_value_of_crc32() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn the_program_is_signed_and_over_a_kilobyte() {
        let program = Program::new().unwrap();
        assert!(program.signed.len() > 1024);
        program.trust.verify(&program.signed).unwrap();
    }
}
