//! The benched programs, signed. Each gets another input each run, and its
//! output is checked: a bench that measures a failing run would be the fastest
//! of all.
//!
//! The usual one is CRC-32 of its input, as eight hex digits, and over 1 KB
//! (the table is in it). [`Program::compute`] is the one that takes long: a
//! loop of calls, memory accesses and arithmetic.

use std::fmt::Write as _;
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::ending::Ending;
use forge_protocol::guest::{Ended, Load, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::signature::{KeyError, SignerKey, TrustKeys};
use forge_protocol::worker::{Fate, Job, Report};

use crate::machine::deadline_in;

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

/// The parts that both programs share: the imports, and a `$tell` that puts
/// eight hex digits out and gives what `output` gives.
const COMMON: &str = r#"
    (import "forge" "input_len" (func $input_len (result i32)))
    (import "forge" "input_read" (func $input_read (param i32 i32 i32) (result i32)))
    (import "forge" "output" (func $output (param i32 i32) (result i32)))"#;

const TELL: &str = r#"
    (func $tell (param $word i32) (param $to i32) (result i32)
        (local $at i32) (local $digit i32)
        (local.set $at (local.get $to))
        (loop $next
            (i32.store8 (local.get $at) (i32.add
                (local.tee $digit (i32.shr_u (local.get $word) (i32.const 28)))
                (select (i32.const 48) (i32.const 87)
                    (i32.lt_u (local.get $digit) (i32.const 10)))))
            (local.set $word (i32.shl (local.get $word) (i32.const 4)))
            (br_if $next (i32.ne (i32.add (local.get $to) (i32.const 8))
                (local.tee $at (i32.add (local.get $at) (i32.const 1))))))
        (call $output (local.get $to) (i32.const 8)))"#;

/// What the usual program answers to an input.
#[must_use]
pub fn answer(input: &[u8]) -> String {
    format!("{:08x}", crc32(input))
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
        r#"(module {COMMON}
            (memory (export "memory") 1)
            (data (i32.const 0) "{data}")
            {TELL}
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
                (call $tell (i32.xor (local.get $crc) (i32.const -1)) (i32.const 2048))))"#
    )
}

/// The usual program's module, unsigned.
///
/// # Errors
/// If it does not assemble, which is our bug.
pub fn module() -> Result<Vec<u8>, wat::Error> {
    wat::parse_str(source())
}

/// How often [`Program::compute`] goes round its loop.
const COMPUTE_ROUNDS: u32 = 2_000_000;

/// The page that [`Program::compute`] works on, in words: small enough that
/// neither side waits for memory.
const COMPUTE_WORDS: u32 = 16_384;

fn compute_source(rounds: u32) -> String {
    let mask = COMPUTE_WORDS * 4 - 4;
    format!(
        r#"(module {COMMON}
            (memory (export "memory") 2)
            {TELL}
            (func $mix (param $hash i32) (param $word i32) (result i32)
                (i32.add (i32.const 0xe6546b64) (i32.mul (i32.const 5)
                    (i32.rotl (i32.xor (local.get $hash)
                        (i32.mul (local.get $word) (i32.const 0xcc9e2d51))) (i32.const 13)))))
            (func (export "forge_run") (result i32)
                (local $hash i32) (local $at i32) (local $end i32) (local $round i32)
                (local.set $at (i32.const 65536))
                (local.set $end (i32.add (local.get $at)
                    (call $input_read (local.get $at) (i32.const 0) (call $input_len))))
                (block $done (loop $next
                    (br_if $done (i32.eq (local.get $at) (local.get $end)))
                    (local.set $hash
                        (call $mix (local.get $hash) (i32.load8_u (local.get $at))))
                    (local.set $at (i32.add (local.get $at) (i32.const 1)))
                    (br $next)))
                (loop $next
                    (local.set $at (i32.and (local.get $hash) (i32.const {mask})))
                    (local.set $hash (call $mix (local.get $hash)
                        (i32.add (local.get $round) (i32.load (local.get $at)))))
                    (i32.store (local.get $at) (local.get $hash))
                    (br_if $next (i32.ne (i32.const {rounds})
                        (local.tee $round (i32.add (local.get $round) (i32.const 1))))))
                (call $tell (local.get $hash) (i32.const 65536))))"#
    )
}

/// What [`Program::compute`] answers to an input.
#[must_use]
pub fn computed(input: &[u8]) -> String {
    computed_in(input, COMPUTE_ROUNDS)
}

/// What [`Program::compute_for`] answers to an input.
#[must_use]
pub fn computed_in(input: &[u8], rounds: u32) -> String {
    let mix = |hash: u32, word: u32| {
        let mixed = hash ^ word.wrapping_mul(0xcc9e_2d51);
        mixed.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
    };
    let mut memory = vec![0u32; COMPUTE_WORDS as usize];
    let mut hash = input.iter().fold(0, |hash, byte| mix(hash, u32::from(*byte)));
    for round in 0..rounds {
        let word = &mut memory[(hash / 4 % COMPUTE_WORDS) as usize];
        hash = mix(hash, round.wrapping_add(*word));
        *word = hash;
    }
    format!("{hash:08x}")
}

/// What the bench signs with: the same key each time, because how long a
/// verification takes depends on it. Nobody else trusts it.
const SECRET: [u8; 32] = *b"the key of forge-vmm bench, only";

/// A program, signed, and who trusts it.
pub struct Program {
    /// The signed module.
    pub signed: Vec<u8>,
    /// The key it is trusted by.
    pub trust: TrustKeys,
    /// The same module under other names, signed.
    others: Vec<Vec<u8>>,
    round: u64,
}

impl Program {
    /// Assembles the usual one and signs it with the bench's key.
    ///
    /// # Errors
    /// What failed, for a reader.
    pub fn new() -> Result<Self, String> {
        Self::signed(&module().map_err(|error| error.to_string())?)
    }

    /// The usual one under so many names, one after the other: to whoever remembers
    /// fewer programs, each is one that never came before.
    ///
    /// # Errors
    /// As for [`Program::new`].
    pub fn under_names(count: u8) -> Result<Self, String> {
        let module = module().map_err(|error| error.to_string())?;
        let mut program = Self::signed(&module)?;
        // A custom section `n` with a number.
        let named = (1..count).map(|name| [&module[..], &[0, 3, 1, b'n', name]].concat());
        let signer = SignerKey::from_secret(&SECRET);
        let others: Result<_, _> = named.map(|module| signer.sign(&module)).collect();
        program.others = others.map_err(|error| error.to_string())?;
        Ok(program)
    }

    /// The one that computes for some tens of milliseconds; it answers
    /// [`computed`].
    ///
    /// # Errors
    /// As for [`Program::new`].
    pub fn compute() -> Result<Self, String> {
        Self::compute_for(COMPUTE_ROUNDS)
    }

    /// The same for so many rounds of its loop, of which a million takes some
    /// tens of milliseconds; it answers [`computed_in`].
    ///
    /// # Errors
    /// As for [`Program::new`].
    pub fn compute_for(rounds: u32) -> Result<Self, String> {
        Self::of(&compute_source(rounds))
    }

    /// One of this text (WebAssembly text format).
    ///
    /// # Errors
    /// As for [`Program::new`].
    pub fn of(source: &str) -> Result<Self, String> {
        Self::signed(&wat::parse_str(source).map_err(|error| error.to_string())?)
    }

    fn signed(module: &[u8]) -> Result<Self, String> {
        let signer = SignerKey::from_secret(&SECRET);
        let signed = signer.sign(module).map_err(|error| error.to_string())?;
        let trust =
            TrustKeys::new([signer.trust_key()]).map_err(|error: KeyError| error.to_string())?;
        Ok(Self { signed, trust, others: Vec::new(), round: 0 })
    }

    /// The next run: another input each time.
    pub fn next_job(&mut self) -> Job {
        self.round += 1;
        let name = self.round as usize % (self.others.len() + 1);
        let program = name.checked_sub(1).map_or(&self.signed, |other| &self.others[other]);
        let limits = RunLimits::default();
        Job {
            deadline: deadline_in(Duration::from_millis(limits.wall_ms)),
            load: Load { limits, announce: false },
            start: Start {
                run_id: RunId([0; 16]),
                seed: [0; 32],
                start_unix_ns: 0,
                granted: Vec::new(),
            },
            program: program.clone(),
            input: format!("{{\"round\":{}}}", self.round).into_bytes(),
            brokered: false,
        }
    }

    /// Checks that a report is the usual program's right answer to a job.
    ///
    /// # Errors
    /// What it is instead.
    pub fn check(job: &Job, report: &Report) -> Result<(), String> {
        check_answer(&report.fate, &report.output, &answer(&job.input))
    }
}

/// Checks that a run returned 0 and answered what it should.
///
/// # Errors
/// What it did instead.
pub fn check_answer(fate: &Fate, output: &[u8], expected: &str) -> Result<(), String> {
    let Fate::Ended(Ended { ending: Ending::Returned(0), .. }) = fate else {
        return Err(format!("the benched run failed: {fate:?}"));
    };
    if output != expected.as_bytes() {
        return Err(format!(
            "the benched run answered {:?}, not {expected:?}",
            String::from_utf8_lossy(output)
        ));
    }
    Ok(())
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

    #[test]
    fn under_names_each_is_another_program_that_is_trusted() {
        let mut program = Program::under_names(128).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..128 {
            let job = program.next_job();
            program.trust.verify(&job.program).unwrap();
            assert!(seen.insert(job.program));
        }
        assert!(seen.contains(&program.next_job().program));
    }
}
