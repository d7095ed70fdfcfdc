//! A table of rules as a program for the kernel's packet filter (classic BPF;
//! seccomp(2), `linux/filter.h`).
//!
//! Each worker installs one, and waits while the kernel checks it, translates
//! it, and runs it once for every number of a system call, to note which are
//! allowed whatever their arguments. So a program is as short as it can be, and
//! finds a call's number by halving.
//!
//! Deliberately absent: every answer but two. What is in the table is allowed
//! and all else is trapped, but for calls by another architecture's entry,
//! which end the process.

use super::rules::{Rule, When};
use super::slot;

/// Where a call's number, its architecture and its arguments are
/// (`struct seccomp_data`, `linux/seccomp.h`), in bytes.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
const ARGUMENT_BYTES: u32 = 8;
/// `AUDIT_ARCH_X86_64` (`linux/audit.h`). Numbers of the x32 entry have it too,
/// and a bit that no table's number has.
const X86_64: u32 = 0xC000_003E;

/// How one instruction ends, counted from the next.
#[derive(Clone, Copy)]
enum To {
    Allow,
    Trap,
    /// Goes on, past so many.
    On(usize),
}

/// One instruction whose ends are still named.
#[derive(Clone, Copy)]
enum Step {
    /// Loads the low half of an argument.
    Load(u8),
    /// Loads the high half of an argument.
    LoadHigh(u8),
    /// Compares by this jump.
    Test { jump: u32, with: u32, yes: To, no: To },
}

/// The program of a table. `None` if the table is too long for one: a jump
/// reaches 255 instructions.
pub(super) fn compile(rules: &[Rule]) -> Option<Vec<libc::sock_filter>> {
    let mut calls: Vec<(u32, Vec<When>)> = Vec::new();
    let mut sorted = rules.to_vec();
    // Stable: of one call's rules the first is tried first.
    sorted.sort_by_key(|rule| rule.number);
    for rule in &sorted {
        let number = u32::try_from(rule.number).ok()?;
        match calls.last_mut() {
            Some((last, whens)) if *last == number => whens.push(rule.when),
            _ => calls.push((number, vec![rule.when])),
        }
    }
    let steps = search(&calls);
    let trap = steps.len();
    let jump = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| jump(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let answer = |what| jump(libc::BPF_RET | libc::BPF_K, what, 0, 0);
    // A look at the architecture, and the number for the search.
    let mut program = vec![
        load(ARCHITECTURE),
        jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, X86_64, 1, 0),
        answer(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    for (at, step) in steps.into_iter().enumerate() {
        let reach = |to: To| {
            u8::try_from(match to {
                To::On(past) => past,
                To::Trap => trap - at - 1,
                To::Allow => trap - at,
            })
        };
        program.push(match step {
            Step::Load(argument) => load(ARGUMENTS + ARGUMENT_BYTES * u32::from(argument)),
            Step::LoadHigh(argument) => {
                load(ARGUMENTS + ARGUMENT_BYTES * u32::from(argument) + ARGUMENT_BYTES / 2)
            }
            Step::Test { jump: code, with, yes, no } => {
                let code = libc::BPF_JMP | code | libc::BPF_K;
                jump(code, with, reach(yes).ok()?, reach(no).ok()?)
            }
        });
    }
    program.push(answer(libc::SECCOMP_RET_TRAP));
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    Some(program)
}

/// Finds the number among these calls, which are in the order of their numbers.
/// It ends allowed or trapped, and goes on behind itself only if there is none.
fn search(calls: &[(u32, Vec<When>)]) -> Vec<Step> {
    let (below, above) = calls.split_at(calls.len() / 2);
    match (below, above) {
        (_, []) => Vec::new(),
        ([], [(number, whens), ..]) => only(*number, whens),
        (below, [(first, _), ..]) => {
            let below = search(below);
            let (yes, no) = (To::On(below.len()), To::On(0));
            let mut steps = vec![Step::Test { jump: libc::BPF_JGE, with: *first, yes, no }];
            steps.extend(below);
            steps.extend(search(above));
            steps
        }
    }
}

/// One call: this number, and one of these conditions.
fn only(number: u32, whens: &[When]) -> Vec<Step> {
    let is_number = |yes| Step::Test { jump: libc::BPF_JEQ, with: number, yes, no: To::Trap };
    if whens.contains(&When::Always) {
        return vec![is_number(To::Allow)];
    }
    let mut steps = vec![is_number(To::On(0))];
    let mut loaded = None;
    for (at, when) in whens.iter().enumerate() {
        let is_last = at + 1 == whens.len();
        let otherwise = if is_last { To::Trap } else { To::On(0) };
        let mut behind = Vec::new();
        let (argument, test) = match *when {
            When::Always => continue,
            When::Is(argument, with) => {
                (argument, Step::Test { jump: libc::BPF_JEQ, with, yes: To::Allow, no: otherwise })
            }
            When::Without(argument, with) => {
                (argument, Step::Test { jump: libc::BPF_JSET, with, yes: otherwise, no: To::Allow })
            }
            When::WithoutEither(first, (second, with)) => {
                let rest = [
                    Step::Load(second),
                    Step::Test { jump: libc::BPF_JSET, with, yes: otherwise, no: To::Allow },
                ];
                let yes = if is_last { To::Trap } else { To::On(rest.len()) };
                behind.extend(rest);
                let (argument, with) = first;
                (argument, Step::Test { jump: libc::BPF_JSET, with, yes, no: To::On(0) })
            }
            When::Sealed(argument, with) => {
                let address = slot::address();
                let is = |half: u64, yes| {
                    let with = half as u32;
                    Step::Test { jump: libc::BPF_JEQ, with, yes, no: To::Trap }
                };
                // No other rule is about the same value: elsewhere it is refused.
                behind = vec![
                    Step::LoadHigh(argument + 1),
                    is(address >> 32, To::On(0)),
                    Step::Load(argument + 1),
                    is(address, To::Allow),
                ];
                let no = if is_last { To::Trap } else { To::On(behind.len()) };
                (argument, Step::Test { jump: libc::BPF_JEQ, with, yes: To::On(0), no })
            }
        };
        if loaded.replace(argument) != Some(argument) {
            steps.push(Step::Load(argument));
        }
        steps.push(test);
        if matches!(when, When::WithoutEither(..)) {
            // The next rule is reached with either of the two.
            loaded = None;
        }
        steps.extend(behind);
    }
    steps
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch,
    };

    use super::*;
    use crate::jail::Role;

    /// What somebody else's compiler makes of the same table.
    fn theirs(rules: &[Rule]) -> Vec<libc::sock_filter> {
        let mut chains: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for rule in rules {
            let chain = chains.entry(rule.number).or_default();
            let (low, whole) = (SeccompCmpArgLen::Dword, SeccompCmpArgLen::Qword);
            let is = SeccompCmpOp::Eq;
            let conditions = match rule.when {
                When::Always => continue,
                When::Is(argument, value) => vec![(argument, low, is, value.into())],
                When::Without(argument, bits) => {
                    vec![(argument, low, SeccompCmpOp::MaskedEq(bits.into()), 0)]
                }
                When::WithoutEither(first, second) => {
                    let without = |(argument, bits): (u8, u32)| {
                        (argument, low.clone(), SeccompCmpOp::MaskedEq(bits.into()), 0)
                    };
                    vec![without(first), without(second)]
                }
                When::Sealed(argument, value) => {
                    let address = slot::address();
                    vec![
                        (argument, low, is.clone(), value.into()),
                        (argument + 1, whole, is, address),
                    ]
                }
            };
            let conditions = conditions.into_iter().map(|(argument, length, operator, value)| {
                SeccompCondition::new(argument, length, operator, value).unwrap()
            });
            chain.push(SeccompRule::new(conditions.collect()).unwrap());
        }
        let (no, yes) = (SeccompAction::Trap, SeccompAction::Allow);
        let filter = SeccompFilter::new(chains, no, yes, TargetArch::x86_64).unwrap();
        let program = BpfProgram::try_from(filter).unwrap();
        let ours = |it: &seccompiler::sock_filter| libc::sock_filter {
            code: it.code,
            jt: it.jt,
            jf: it.jf,
            k: it.k,
        };
        program.iter().map(ours).collect()
    }

    /// Runs a program as the kernel does.
    fn answer(program: &[libc::sock_filter], architecture: u32, call: u32, args: [u64; 6]) -> u32 {
        let mut data = [call, architecture, 0, 0].map(u32::to_le_bytes).concat();
        data.extend(args.iter().flat_map(|arg| arg.to_le_bytes()));
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let libc::sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let code = u32::from(code);
            let on = |yes: bool| usize::from(if yes { jt } else { jf });
            match (code & 0x07, code & 0xf0) {
                (libc::BPF_LD, _) => {
                    let word = &data[k as usize..k as usize + 4];
                    accumulator = u32::from_le_bytes(word.try_into().unwrap());
                }
                (libc::BPF_ALU, libc::BPF_AND) => accumulator &= k,
                (libc::BPF_JMP, libc::BPF_JA) => at += k as usize,
                (libc::BPF_JMP, libc::BPF_JEQ) => at += on(accumulator == k),
                (libc::BPF_JMP, libc::BPF_JGE) => at += on(accumulator >= k),
                (libc::BPF_JMP, libc::BPF_JGT) => at += on(accumulator > k),
                (libc::BPF_JMP, libc::BPF_JSET) => at += on(accumulator & k != 0),
                (libc::BPF_RET, _) => return k,
                other => panic!("no instruction of a filter: {other:?}"),
            }
        }
    }

    /// Arguments beside and at each value that a table looks for.
    fn arguments(rules: &[Rule]) -> Vec<[u64; 6]> {
        let mut values = vec![0u64, 1, u64::from(u32::MAX), u64::MAX, 1 << 32];
        let mut pairs = Vec::new();
        for rule in rules {
            if let When::Sealed(argument, value) = rule.when {
                let address = slot::address();
                let halves = [address, address ^ 1, address ^ 1 << 32, address & 0xffff_ffff, 0];
                for (value, address) in
                    halves.into_iter().flat_map(|half| [(value, half), (value ^ 1, half)])
                {
                    let mut pair = [0; 6];
                    pair[usize::from(argument)] = value.into();
                    pair[usize::from(argument) + 1] = address;
                    pairs.push(pair);
                }
            }
            if let When::WithoutEither((first, bits), (second, others)) = rule.when {
                for (these, those) in [(0, 0), (bits, 0), (0, others), (bits, others)] {
                    let mut pair = [0; 6];
                    pair[usize::from(first)] = these.into();
                    pair[usize::from(second)] = those.into();
                    pairs.push(pair);
                }
            }
            if let When::Is(_, value) | When::Without(_, value) = rule.when {
                let value = u64::from(value);
                values.extend([value, value + 1, value.wrapping_sub(1), value | 1 << 40, !value]);
                values.extend((0..32).map(|bit| value & 1 << bit));
            }
        }
        values.sort_unstable();
        values.dedup();
        values.into_iter().map(|value| [value; 6]).chain(pairs).collect()
    }

    #[test]
    fn rules_behind_one_of_two_arguments_look_at_their_own() {
        let rule = |when| Rule { number: 9, name: "x", when, reason: "y", elsewhere: false };
        for whens in [
            [When::WithoutEither((2, 4), (3, 8)), When::Is(3, 8)],
            [When::WithoutEither((2, 4), (3, 8)), When::Is(2, 4)],
            [When::Sealed(1, 5), When::Is(2, 7)],
            [When::Sealed(1, 5), When::Is(1, 7)],
        ] {
            let rules = whens.map(rule);
            let (ours, theirs) = (compile(&rules).unwrap(), theirs(&rules));
            for values in 0..5u64.pow(3) {
                let of = |at: u32| [0, 4, 5, 7, 8][(values / 5u64.pow(at) % 5) as usize];
                let args = [0, of(0), of(1), of(2), 0, 0];
                // What has a sealed rule's value is refused with another address, whatever
                // comes behind.
                if matches!(whens[0], When::Sealed(..)) && args[1] == 5 {
                    continue;
                }
                let got = answer(&ours, X86_64, 9, args);
                assert_eq!(got, answer(&theirs, X86_64, 9, args), "{whens:?} {args:?}");
            }
        }
    }

    #[test]
    fn every_call_is_answered_as_another_compiler_of_the_same_table_has_it() {
        let numbers = || (0..600u32).chain([0x4000_0000, 0x4000_0010, u32::MAX]);
        for role in Role::ALL {
            let rules = role.rules();
            let (ours, theirs) = (compile(rules).unwrap(), theirs(rules));
            assert!(ours.len() < theirs.len(), "{role:?}: {} and {}", ours.len(), theirs.len());
            let mut allowed = 0;
            for args in arguments(rules) {
                for number in numbers() {
                    let got = answer(&ours, X86_64, number, args);
                    assert_eq!(
                        got,
                        answer(&theirs, X86_64, number, args),
                        "{role:?} {number} {args:x?}"
                    );
                    allowed += u32::from(got == libc::SECCOMP_RET_ALLOW);
                }
            }
            assert!(allowed > 0);
            // i386.
            assert_eq!(answer(&ours, 0x4000_0003, 1, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
        }
    }

    #[test]
    fn a_table_of_nothing_traps_everything_and_one_too_long_is_none() {
        let empty = compile(&[]).unwrap();
        assert_eq!(answer(&empty, X86_64, 0, [0; 6]), libc::SECCOMP_RET_TRAP);
        let rule = |number| Rule { number, ..Role::Worker.rules()[0] };
        assert!(compile(&(0..300).map(rule).collect::<Vec<_>>()).is_none());
    }
}
