//! The system calls that this process and every tool server it starts do
//! without: a seccomp filter, inherited by each child and lifted by none.
//!
//! Tool servers are programs that others wrote, in any language, so the
//! filter names what is refused and lets the rest pass; and it refuses with
//! `EPERM` rather than kill, since a runtime that tries `io_uring` and falls
//! back is an honest program. What stands in [`REFUSED`] is either a way into
//! other processes and the kernel, or a right over the whole host, and
//! neither a broker nor a tool needs one.
//!
//! # No KVM
//! A filter sees numbers and no paths, so it cannot keep `/dev/kvm` from
//! being opened. It refuses every `ioctl` of KVM's type instead, and with
//! those alone anything can be done with the device: an open `/dev/kvm` is of
//! no use here. A broker that runs as a user of its own (`[broker] user`)
//! cannot even open it, since that user has no group but its own.
//!
//! # Two filters
//! The broker's own lets a launcher ([`crate::stranger`]) build a tool
//! server's surroundings: [`LAUNCHING`] passes, which is of use to nobody
//! without a capability. The launcher then puts the server's on, below which
//! nothing of that is left, nor a way to make a file that runs as its owner:
//! in a folder that the server was given, its files belong to the broker's
//! user.
//!
//! # What is left, and why
//! - `unshare`, `clone` with new namespaces and `chroot` pass: browsers that
//!   tool servers drive build their own sandbox of them, and without it they
//!   run with none. What makes such namespaces dangerous is refused in them
//!   too: mounts, netfilter, raw packets, BPF. `setns`, which enters the
//!   namespaces of others, is refused.
//! - `personality`, `seccomp` and `landlock_*` pass: they only take away, or
//!   harm the caller alone.
//! - Set-user-ID programs start and gain nothing (`no_new_privs`), so a tool
//!   server cannot use `sudo`.
//! - Calls in the 32-bit form of x86 end the caller: numbers mean something
//!   else there. A tool server that is a 32-bit program does not run.
//!
//! Deliberately absent is a list of what is allowed: see above.

use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Whom a filter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The broker and its launchers.
    Broker,
    /// A tool server.
    Server {
        /// Whether it may reach a network, and through a socket in a folder a program
        /// outside: a namespace keeps neither name nor peer of such a socket from it.
        network: bool,
    },
}

/// System calls refused whatever their arguments, and why.
pub const REFUSED: [(&str, &[libc::c_long]); 10] = [
    (
        "another process's memory, registers or descriptors: the broker's credentials above all",
        &[
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_process_madvise,
            libc::SYS_pidfd_getfd,
            libc::SYS_kcmp,
        ],
    ),
    (
        "code in the kernel",
        &[
            libc::SYS_kexec_load,
            libc::SYS_kexec_file_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_bpf,
        ],
    ),
    (
        "what happens in the kernel and in other processes, seen from outside",
        &[libc::SYS_perf_event_open, libc::SYS_syslog, libc::SYS_lookup_dcookie],
    ),
    (
        "a page fault held open, which turns races in the kernel into exploits",
        &[libc::SYS_userfaultfd],
    ),
    (
        "system calls that no filter sees; runtimes fall back to epoll",
        &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    ),
    (
        "the kernel's keyrings, which are shared by all processes of a user",
        &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl],
    ),
    ("the namespaces of others", &[libc::SYS_setns]),
    (
        "files by handle, past every folder's permissions",
        &[libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at],
    ),
    (
        "the host's clock",
        &[
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_clock_adjtime,
            libc::SYS_adjtimex,
        ],
    ),
    (
        "the host as a whole",
        &[
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_swapoff,
            libc::SYS_acct,
            libc::SYS_quotactl,
            libc::SYS_quotactl_fd,
            libc::SYS_setdomainname,
            libc::SYS_vhangup,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_iopl,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_ioperm,
        ],
    ),
];

/// Refused to tool servers besides: what a launcher builds their surroundings
/// with, the tree of mounts above all, in a namespace of one's own too.
pub const LAUNCHING: [libc::c_long; 11] = [
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_sethostname,
];

/// Calls by which a file gets its mode: the argument that has it, and the one
/// with flags that say whether it is read at all.
const MODES: &[(libc::c_long, u8, Option<u8>)] = &[
    (libc::SYS_fchmod, 1, None),
    (libc::SYS_fchmodat, 2, None),
    (libc::SYS_fchmodat2, 2, None),
    (libc::SYS_mknodat, 2, None),
    (libc::SYS_openat, 3, Some(2)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, 1, None),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, 1, None),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_creat, 1, None),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 2, Some(1)),
];

/// The type byte of KVM's `ioctl` requests.
const KVM_IOCTL_TYPE: u64 = 0xAE;
/// Where the type byte stands in a request.
const IOCTL_TYPE_MASK: u64 = 0xFF00;

/// `ioctl` requests refused, each with its reason: the mask, the value under
/// it.
const REFUSED_IOCTLS: [(&str, u64, u64); 3] = [
    ("the broker never has KVM", IOCTL_TYPE_MASK, KVM_IOCTL_TYPE << 8),
    ("words put into the operator's terminal as if they were typed", 0xFFFF_FFFF, libc::TIOCSTI),
    ("the same on a console, by its selection", 0xFFFF_FFFF, libc::TIOCLINUX),
];

/// What of a socket's type is the type: the rest are flags.
const SOCKET_TYPE_MASK: u64 = 0xF;

/// Address families refused.
const REFUSED_FAMILIES: [(&str, libc::c_int); 3] = [
    ("packets past the host's firewall", libc::AF_PACKET),
    ("the kernel's own ciphers, a long line of bugs", libc::AF_ALG),
    ("virtual machines and their host", libc::AF_VSOCK),
];

/// Builds the filter.
///
/// # Errors
/// If it cannot be built, which would be our bug.
pub fn program(whose: Whose) -> io::Result<BpfProgram> {
    let arch: TargetArch =
        std::env::consts::ARCH.try_into().map_err(|error| bug("architecture", error))?;
    let mut rules: std::collections::BTreeMap<i64, Vec<SeccompRule>> = REFUSED
        .iter()
        .flat_map(|(_, calls)| calls.iter())
        .map(|call| (*call, Vec::new()))
        .collect();
    let ioctls = REFUSED_IOCTLS
        .iter()
        .map(|(_, mask, value)| rule(&[(1, SeccompCmpOp::MaskedEq(*mask), *value)]));
    rules.insert(libc::SYS_ioctl, ioctls.collect::<io::Result<_>>()?);
    let mut sockets = REFUSED_FAMILIES
        .iter()
        .map(|(_, family)| rule(&[(0, SeccompCmpOp::Eq, *family as u64)]))
        .collect::<io::Result<Vec<_>>>()?;
    // The kernel's firewall: open to whoever has a user namespace.
    sockets.push(rule(&[
        (0, SeccompCmpOp::Eq, libc::AF_NETLINK as u64),
        (2, SeccompCmpOp::Eq, libc::NETLINK_NETFILTER as u64),
    ])?);
    if whose == (Whose::Server { network: false }) {
        sockets.push(rule(&[(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)])?);
        // One of a pair of datagram sockets can be sent to another name; those of streams,
        // which runtimes make for their children, are bound to each other.
        let datagrams = SeccompCmpOp::MaskedEq(SOCKET_TYPE_MASK);
        let pairs = rule(&[(1, datagrams, libc::SOCK_DGRAM as u64)])?;
        rules.insert(libc::SYS_socketpair, vec![pairs]);
    }
    rules.insert(libc::SYS_socket, sockets);
    if whose != Whose::Broker {
        rules.extend(LAUNCHING.map(|call| (call, Vec::new())));
        for (call, mode, flags) in MODES {
            rules.insert(*call, modes(*mode, *flags)?);
        }
    }

    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)
        .map_err(|error| bug("rules", error))?;
    let filter: BpfProgram = filter.try_into().map_err(|error| bug("program", error))?;
    let mut program: BpfProgram = without_x32();
    if whose != Whose::Broker {
        // Its mode is in memory, where no filter sees it. Who uses it falls
        // back where the kernel is too old to know it.
        program.extend(missing(libc::BPF_JEQ, libc::SYS_openat2 as u32));
    }
    program.extend(filter);
    Ok(program)
}

/// Rules for a mode that makes a file run as its owner or its group.
fn modes(mode: u8, flags: Option<u8>) -> io::Result<Vec<SeccompRule>> {
    let bits = [libc::S_ISUID, libc::S_ISGID].map(u64::from);
    let creating = [libc::O_CREAT, libc::O_TMPFILE].map(|flag| flag as u64);
    let mut rules = Vec::new();
    for bit in bits {
        let has_bit = (mode, SeccompCmpOp::MaskedEq(bit), bit);
        match flags {
            None => rules.push(rule(&[has_bit])?),
            Some(flags) => {
                for flag in creating {
                    let creates = (flags, SeccompCmpOp::MaskedEq(flag), flag);
                    rules.push(rule(&[creates, has_bit.clone()])?);
                }
            }
        }
    }
    Ok(rules)
}

/// Puts the filter on this thread and whatever it starts. Sets
/// `no_new_privs`.
///
/// # Errors
/// If the kernel refuses.
pub fn install(whose: Whose) -> io::Result<()> {
    seccompiler::apply_filter(&program(whose)?)
        .map_err(|error| io::Error::other(format!("the system call filter: {error}")))
}

fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> io::Result<SeccompRule> {
    let conditions = conditions
        .iter()
        .map(|(argument, operator, value)| {
            // All of them are C ints: the kernel looks at 32 bits, and so do
            // we, or the upper ones would be a way around.
            let length = SeccompCmpArgLen::Dword;
            SeccompCondition::new(*argument, length, operator.clone(), *value)
        })
        .collect::<Result<_, _>>()
        .map_err(|error| bug("condition", error))?;
    SeccompRule::new(conditions).map_err(|error| bug("rule", error))
}

/// Refuses the calls of the x32 form, `ENOSYS` as on a kernel without it: the
/// architecture is the same and every number another, so that no rule below
/// would meet them.
fn without_x32() -> Vec<sock_filter> {
    const X32_BIT: u32 = 0x4000_0000;
    // The number is the first word of the data.
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let mut program = vec![sock_filter { code: load, jt: 0, jf: 0, k: 0 }];
    program.extend(missing(libc::BPF_JGE, X32_BIT));
    program
}

/// `ENOSYS` where the number, which is loaded, compares like this.
fn missing(compare: u32, number: u32) -> [sock_filter; 2] {
    [
        sock_filter {
            code: (libc::BPF_JMP | compare | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: number,
        },
        sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        },
    ]
}

fn bug(what: &str, error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("bug: the system call filter's {what}: {error}"))
}
