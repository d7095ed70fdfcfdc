//! Which system calls the two kinds of process may make, and why each.
//!
//! These tables are what the filters are compiled from, what `docs/jail.md`
//! shows, and what the test that no rule is redundant goes through. What is
//! in neither ends the process that calls it.
//!
//! A worker is forked from the zygote and adds its own filter to the
//! zygote's, so the zygote's table is also what a worker may do while it
//! makes its VM. Filters only ever take away.

use kvm_bindings as kvm;

use super::slot;
use crate::machine::pagemap;

/// The kind of process that a system-call filter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The process that forks workers, and workers until they are set up.
    Zygote,
    /// A worker that serves runs.
    Worker,
    /// A worker of the tier `process`, which has no VM.
    Process,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 3] = [Self::Zygote, Self::Worker, Self::Process];

    /// The rules of this role's filter.
    #[must_use]
    pub fn rules(self) -> &'static [Rule] {
        match self {
            Self::Zygote => ZYGOTE,
            Self::Worker => WORKER,
            Self::Process => PROCESS,
        }
    }

    /// Those that this kernel can hold a process to, and that are of use with it. A rule
    /// about something sealed is none where nothing can be; and what reads the page map
    /// sees more in it than a scan does, such as which pages others have as well.
    #[must_use]
    pub fn enforceable(self) -> Vec<Rule> {
        let (seals, scans) = (slot::is_supported(), pagemap::can_scan());
        let kept = |rule: &&Rule| match rule.when {
            When::Sealed(..) => seals,
            _ => rule.number != libc::SYS_pread64 || !scans,
        };
        self.rules().iter().filter(kept).copied().collect()
    }
}

/// One call that is allowed.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The call's number.
    pub number: libc::c_long,
    /// Its name, and that of the request where only one is allowed.
    pub name: &'static str,
    /// Which arguments it may have.
    pub when: When,
    /// What it is needed for.
    pub reason: &'static str,
    /// It is needed on other hosts, in other builds, or at moments that no
    /// test can bring about.
    pub elsewhere: bool,
}

impl Rule {
    const fn elsewhere(self) -> Self {
        Self { elsewhere: true, ..self }
    }
}

/// A condition on arguments. The kernel takes all that are looked at here as
/// 32 bits, or has nothing of interest in the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Allowed whatever the arguments are.
    Always,
    /// The argument of this index is this.
    Is(u8, u32),
    /// The argument of this index has none of these bits.
    Without(u8, u32),
    /// The same of two arguments, both.
    WithoutEither((u8, u32), (u8, u32)),
    /// The argument of this index is this, and the next is the address of what is
    /// sealed ([`slot::address`]), all 64 bits of it.
    Sealed(u8, u32),
}

/// `_IO` and its kin (`asm-generic/ioctl.h`).
const fn io(kind: u8, number: u8) -> u32 {
    (kind as u32) << 8 | number as u32
}
const fn ior<T>(kind: u8, number: u8) -> u32 {
    2 << 30 | (size_of::<T>() as u32) << 16 | io(kind, number)
}
const fn iow<T>(kind: u8, number: u8) -> u32 {
    1 << 30 | (size_of::<T>() as u32) << 16 | io(kind, number)
}
const fn iowr<T>(kind: u8, number: u8) -> u32 {
    3 << 30 | (size_of::<T>() as u32) << 16 | io(kind, number)
}

/// The KVM ioctls' letter.
const K: u8 = 0xAE;
/// `KVM_SET_USER_MEMORY_REGION`.
pub(super) const SET_SLOT: u32 = iow::<kvm::kvm_userspace_memory_region>(K, 0x46);
/// `PAGEMAP_SCAN` with its `struct pm_scan_arg` of twelve words
/// (`linux/fs.h`).
pub(crate) const PAGEMAP_SCAN: u32 = iowr::<[u64; 12]>(b'f', 16);
/// What makes a mapping executable.
const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
/// What takes a mapping from the host's reserve of huge pages, which is for others and which
/// no limit of a worker's counts.
const FROM_THE_RESERVE: u32 = libc::MAP_HUGETLB as u32;
/// What makes a mapping of nothing one of a file of the kernel's, which keeps its pages when
/// all but one of them are unmapped: no limit of a worker's counts them then.
const SHARED: u32 = libc::MAP_SHARED as u32;
const _: () = assert!(libc::MAP_SHARED_VALIDATE as u32 & SHARED != 0);
/// The clock that [`crate::clock`] and std read. Others are of other processes, by their pid.
const MONOTONIC: u32 = libc::CLOCK_MONOTONIC as u32;
/// Locks and condition variables of one process. Other operations of futex(2) are a path
/// of the kernel's that nobody here has a use for.
const WAIT: u32 = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u32;
const WAIT_UNTIL: u32 = (libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG) as u32;
const WAKE: u32 = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u32;
/// Urgent bytes on a unix socket: nobody here sends any, and what the kernel
/// does for them is a path of its own.
const OUT_OF_BAND: u32 = libc::MSG_OOB as u32;
/// What makes of a fork something else: a thread, or new namespaces.
const NOT_A_FORK: u32 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_PARENT
    | libc::CLONE_PTRACE
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u32;
/// What makes of opening a file more than reading it.
const NOT_READING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u32;

const fn always(number: libc::c_long, name: &'static str, reason: &'static str) -> Rule {
    Rule { number, name, when: When::Always, reason, elsewhere: false }
}
const fn is(
    number: libc::c_long,
    name: &'static str,
    argument: u8,
    value: u32,
    reason: &'static str,
) -> Rule {
    Rule { number, name, when: When::Is(argument, value), reason, elsewhere: false }
}
const fn without(
    number: libc::c_long,
    name: &'static str,
    argument: u8,
    bits: u32,
    reason: &'static str,
) -> Rule {
    Rule { number, name, when: When::Without(argument, bits), reason, elsewhere: false }
}
/// Memory that is not executable, and a mapping without these flags.
const fn mmap(name: &'static str, flags: u32, reason: &'static str) -> Rule {
    let when = When::WithoutEither((2, EXECUTABLE), (3, flags));
    Rule { number: libc::SYS_mmap, name, when, reason, elsewhere: false }
}
/// Memory of the process's own.
const fn own_memory() -> Rule {
    let name = "mmap, private, not executable, no huge page";
    mmap(name, SHARED | FROM_THE_RESERVE, "the allocator's large blocks")
}
/// Reading the one clock that is allowed.
const fn monotonic() -> Rule {
    let name = "clock_gettime, CLOCK_MONOTONIC";
    is(libc::SYS_clock_gettime, name, 0, MONOTONIC, "time, where the vDSO has no fast clock")
}
const fn ioctl(name: &'static str, request: u32, reason: &'static str) -> Rule {
    is(libc::SYS_ioctl, name, 1, request, reason)
}

/// What a worker that serves runs may call. Of one call's rules the first is
/// tried first.
pub const WORKER: &[Rule] = &[
    ioctl("ioctl KVM_RUN", io(K, 0x80), "runs the guest"),
    ioctl(
        "ioctl KVM_GET_REGS",
        ior::<kvm::kvm_regs>(K, 0x81),
        "a crash record; a snapshot; proof of a reset",
    ),
    ioctl(
        "ioctl KVM_SET_REGS",
        iow::<kvm::kvm_regs>(K, 0x82),
        "resets a guest, without KVM_CAP_SYNC_REGS",
    )
    .elsewhere(),
    ioctl(
        "ioctl KVM_GET_SREGS",
        ior::<kvm::kvm_sregs>(K, 0x83),
        "a crash record; a snapshot; proof of a reset",
    ),
    ioctl(
        "ioctl KVM_SET_SREGS",
        iow::<kvm::kvm_sregs>(K, 0x84),
        "resets a guest, without KVM_CAP_SYNC_REGS",
    )
    .elsewhere(),
    ioctl("ioctl KVM_GET_XSAVE", ior::<kvm::kvm_xsave>(K, 0xA4), "a snapshot; proof of a reset"),
    ioctl("ioctl KVM_SET_XSAVE", iow::<kvm::kvm_xsave>(K, 0xA5), "resets a guest"),
    ioctl("ioctl KVM_GET_XCRS", ior::<kvm::kvm_xcrs>(K, 0xA6), "a snapshot"),
    ioctl("ioctl KVM_GET_MSRS", iowr::<kvm::kvm_msrs>(K, 0x88), "a snapshot"),
    ioctl("ioctl KVM_GET_DEBUGREGS", ior::<kvm::kvm_debugregs>(K, 0xA1), "a snapshot"),
    ioctl("ioctl KVM_GET_VCPU_EVENTS", ior::<kvm::kvm_vcpu_events>(K, 0x9F), "a snapshot"),
    ioctl(
        "ioctl KVM_SET_VCPU_EVENTS",
        iow::<kvm::kvm_vcpu_events>(K, 0xA0),
        "resets a guest, without KVM_CAP_SYNC_REGS",
    )
    .elsewhere(),
    Rule {
        number: libc::SYS_ioctl,
        name: "ioctl KVM_SET_USER_MEMORY_REGION, what is sealed",
        when: When::Sealed(1, SET_SLOT),
        reason: "a guest asks for the rest of its RAM, where the kernel can seal memory",
        elsewhere: false,
    },
    ioctl("ioctl PAGEMAP_SCAN", PAGEMAP_SCAN, "finds the pages a run wrote, to reset them"),
    always(libc::SYS_pread64, "pread64", "the page map, where the kernel cannot scan it")
        .elsewhere(),
    without(
        libc::SYS_recvmsg,
        "recvmsg, not out of band",
        2,
        OUT_OF_BAND,
        "a run and its connection, from the supervisor",
    ),
    without(
        libc::SYS_recvfrom,
        "recvfrom, not out of band",
        3,
        OUT_OF_BAND,
        "std's reading of a socket",
    ),
    without(
        libc::SYS_sendto,
        "sendto, not out of band",
        3,
        OUT_OF_BAND,
        "reports, and calls to the broker; unlike sendmsg it passes no descriptor",
    ),
    always(libc::SYS_write, "write", "a panic's message").elsewhere(),
    always(libc::SYS_poll, "poll", "waiting for the broker or the supervisor"),
    always(libc::SYS_timer_settime, "timer_settime", "arms and disarms the deadline"),
    always(libc::SYS_rt_sigreturn, "rt_sigreturn", "the end of the deadline's handler"),
    own_memory(),
    always(libc::SYS_munmap, "munmap", "the allocator gives blocks back"),
    always(libc::SYS_mremap, "mremap", "the allocator grows blocks; it adds no right").elsewhere(),
    always(libc::SYS_brk, "brk", "the allocator's small blocks"),
    monotonic().elsewhere(),
    always(libc::SYS_restart_syscall, "restart_syscall", "a wait goes on after a stop signal")
        .elsewhere(),
    is(libc::SYS_futex, "futex WAIT", 1, WAIT, "a lock that a signal handler finds taken")
        .elsewhere(),
    is(libc::SYS_futex, "futex WAIT_BITSET", 1, WAIT_UNTIL, "the same, of std's").elsewhere(),
    is(libc::SYS_futex, "futex WAKE", 1, WAKE, "gives such a lock back").elsewhere(),
    always(libc::SYS_close, "close", "a run's connection, when the run is over"),
    is(
        libc::SYS_fcntl,
        "fcntl F_GETFD",
        1,
        libc::F_GETFD as u32,
        "std's check of what it closes, in builds with debug assertions",
    )
    .elsewhere(),
    always(libc::SYS_exit_group, "exit_group", "the end, which nobody sees who has hung up")
        .elsewhere(),
];

/// What a worker of the tier `process` may call while the library runs a
/// program: no request to any device, and no descriptor made but the one that
/// comes with a run.
pub const PROCESS: &[Rule] = &[
    without(
        libc::SYS_recvmsg,
        "recvmsg, not out of band",
        2,
        OUT_OF_BAND,
        "a run and its connection, from the supervisor",
    ),
    without(
        libc::SYS_recvfrom,
        "recvfrom, not out of band",
        3,
        OUT_OF_BAND,
        "answers from the broker",
    ),
    without(
        libc::SYS_sendto,
        "sendto, not out of band",
        3,
        OUT_OF_BAND,
        "the report, and calls to the broker; unlike sendmsg it passes no descriptor",
    ),
    always(libc::SYS_poll, "poll", "waiting for the broker"),
    always(libc::SYS_write, "write", "a panic's message, to the null device").elsewhere(),
    always(libc::SYS_timer_settime, "timer_settime", "arms and disarms the deadline"),
    always(libc::SYS_rt_sigreturn, "rt_sigreturn", "the end of the deadline's handler"),
    own_memory(),
    always(libc::SYS_munmap, "munmap", "the allocator gives blocks back"),
    always(libc::SYS_mremap, "mremap", "the allocator grows blocks; it adds no right"),
    always(libc::SYS_brk, "brk", "the allocator's small blocks"),
    monotonic().elsewhere(),
    always(libc::SYS_restart_syscall, "restart_syscall", "a wait goes on after a stop signal")
        .elsewhere(),
    is(libc::SYS_futex, "futex WAIT", 1, WAIT, "a lock that a signal handler finds taken")
        .elsewhere(),
    is(libc::SYS_futex, "futex WAIT_BITSET", 1, WAIT_UNTIL, "the same, of std's").elsewhere(),
    is(libc::SYS_futex, "futex WAKE", 1, WAKE, "gives such a lock back").elsewhere(),
    always(libc::SYS_exit_group, "exit_group", "the end, which nobody sees who has hung up")
        .elsewhere(),
];

/// What the zygote, and a worker that makes its VM, may call.
///
/// Its ioctls are not told apart by request: every one would be looked at
/// twice in a worker, once for each filter, and a worker's own table is the
/// one that counts.
pub const ZYGOTE: &[Rule] = &[
    always(libc::SYS_ioctl, "ioctl", "making a VM; the worker's own filter tells requests apart"),
    always(libc::SYS_recvmsg, "recvmsg", "requests and their descriptors"),
    always(libc::SYS_sendmsg, "sendmsg", "answers with a worker's process descriptor"),
    always(libc::SYS_recvfrom, "recvfrom", "std's reading of a socket"),
    always(libc::SYS_sendto, "sendto", "other answers"),
    always(libc::SYS_write, "write", "a panic's message").elsewhere(),
    always(libc::SYS_poll, "poll", "waiting for requests and for ends"),
    without(libc::SYS_clone, "clone, as fork", 0, NOT_A_FORK, "makes workers, never threads"),
    always(libc::SYS_gettid, "gettid", "the thread that a timer's signal is for"),
    always(libc::SYS_timer_create, "timer_create", "a worker's deadline"),
    always(libc::SYS_timer_settime, "timer_settime", "arms and disarms the deadline"),
    always(libc::SYS_rt_sigaction, "rt_sigaction", "a worker's handlers"),
    always(libc::SYS_rt_sigreturn, "rt_sigreturn", "the end of a handler"),
    always(libc::SYS_rt_sigprocmask, "rt_sigprocmask", "the C library's way to end a process")
        .elsewhere(),
    always(libc::SYS_sigaltstack, "sigaltstack", "std's guard of the stack, at the end"),
    mmap("mmap, not executable, no huge page", FROM_THE_RESERVE, "memory, a guest's too"),
    always(libc::SYS_munmap, "munmap", "gives memory back"),
    is(
        libc::SYS_mprotect,
        "mprotect, to read alone",
        2,
        libc::PROT_READ as u32,
        "a worker's last slot; the guest's code, where its file has no large page; it adds no \
         right to write or execute",
    ),
    always(libc::SYS_mseal, "mseal", "a worker's last slot; it takes rights away"),
    always(libc::SYS_mremap, "mremap", "the allocator grows blocks").elsewhere(),
    always(libc::SYS_brk, "brk", "the allocator's small blocks"),
    always(libc::SYS_madvise, "madvise", "guest memory: large pages, not in a dump"),
    without(
        libc::SYS_openat,
        "openat, to read",
        2,
        NOT_READING,
        "a worker's own pagemap, below the procfs that nothing else can reach",
    ),
    always(libc::SYS_close, "close", "descriptors handed on"),
    always(libc::SYS_close_range, "close_range", "a worker drops what is not its own"),
    always(libc::SYS_fcntl, "fcntl", "close-on-exec, and std's check of descriptors"),
    always(libc::SYS_dup2, "dup2", "places descriptors"),
    always(libc::SYS_memfd_create, "memfd_create", "the base snapshot"),
    always(libc::SYS_ftruncate, "ftruncate", "the base snapshot"),
    always(libc::SYS_pwrite64, "pwrite64", "the base snapshot"),
    always(libc::SYS_pread64, "pread64", "the page map, where the kernel cannot scan it")
        .elsewhere(),
    always(libc::SYS_timer_delete, "timer_delete", "the deadline of the first boot"),
    monotonic().elsewhere(),
    always(libc::SYS_prctl, "prctl", "a worker's name, and that it is not dumped"),
    always(libc::SYS_prlimit64, "prlimit64", "a worker's limits, below the zygote's"),
    is(
        libc::SYS_seccomp,
        "seccomp, a filter",
        0,
        libc::SECCOMP_SET_MODE_FILTER,
        "a worker's own filter",
    ),
    always(libc::SYS_landlock_restrict_self, "landlock_restrict_self", "a worker's own domain"),
    always(libc::SYS_futex, "futex", "locks that a handler finds taken").elsewhere(),
    always(libc::SYS_restart_syscall, "restart_syscall", "a wait goes on after a stop signal")
        .elsewhere(),
    always(libc::SYS_exit_group, "exit_group", "the end"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_reason_and_stands_alone() {
        for role in Role::ALL {
            let rules = role.rules();
            for (at, rule) in rules.iter().enumerate() {
                assert!(!rule.reason.is_empty(), "{}", rule.name);
                for other in &rules[at + 1..] {
                    if other.number == rule.number {
                        let value = |when| match when {
                            When::Is(at, value) | When::Sealed(at, value) => Some((at, value)),
                            _ => None,
                        };
                        let values = [rule, other].map(|rule| value(rule.when));
                        assert!(
                            values[0].is_some() && values[1].is_some() && values[0] != values[1],
                            "{} and {}: one makes the other superfluous",
                            rule.name,
                            other.name
                        );
                    }
                }
            }
        }
    }

    /// With `FORGE_WRITE_DOCS` set it writes them instead.
    #[test]
    fn the_tables_are_in_the_documentation_as_they_are_here() {
        // Not by way of this crate's folder: the rig of the second KVM has the
        // documentation and no sources.
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let path = root.join("docs/jail.md");
        let mut page = std::fs::read_to_string(&path).unwrap();
        for role in Role::ALL {
            let mut table = String::from("| call | needed for |\n|---|---|\n");
            for rule in role.rules() {
                let mark = if rule.elsewhere { " †" } else { "" };
                table.push_str(&format!("| `{}` | {}{mark} |\n", rule.name, rule.reason));
            }
            let name = format!("{role:?}").to_lowercase();
            let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end {name} -->"));
            let from = page.find(&begin).unwrap() + begin.len();
            let to = page.find(&end).unwrap();
            if std::env::var_os("FORGE_WRITE_DOCS").is_some() {
                page.replace_range(from..to, &table);
                std::fs::write(&path, &page).unwrap();
            } else {
                assert_eq!(&page[from..to], table, "set FORGE_WRITE_DOCS and run this again");
            }
        }
    }

    #[test]
    fn requests_have_the_kernels_numbers() {
        let request =
            |name: &str| WORKER.iter().find(|rule| rule.name == name).map(|rule| rule.when);
        // From a C program that prints the macros.
        for (name, number) in [
            ("ioctl KVM_RUN", 0xAE80),
            ("ioctl KVM_GET_REGS", 0x8090_AE81),
            ("ioctl KVM_SET_SREGS", 0x4138_AE84),
            ("ioctl KVM_GET_MSRS", 0xC008_AE88),
            ("ioctl PAGEMAP_SCAN", 0xC060_6610),
        ] {
            assert_eq!(request(name), Some(When::Is(1, number)), "{name}");
        }
        assert_eq!(SET_SLOT, 0x4020_AE46);
    }
}
