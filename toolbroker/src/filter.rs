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

/// System calls refused whatever their arguments, and why.
pub const REFUSED: [(&str, &[libc::c_long]); 11] = [
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
    (
        "the tree of mounts, in a namespace of one's own too",
        &[
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
        ],
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
            libc::SYS_sethostname,
            libc::SYS_setdomainname,
            libc::SYS_vhangup,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_iopl,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_ioperm,
        ],
    ),
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
pub fn program() -> io::Result<BpfProgram> {
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
    rules.insert(libc::SYS_socket, sockets);

    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)
        .map_err(|error| bug("rules", error))?;
    let filter: BpfProgram = filter.try_into().map_err(|error| bug("program", error))?;
    Ok(without_x32().into_iter().chain(filter).collect())
}

/// Puts the filter on this thread and whatever it starts. Sets
/// `no_new_privs`.
///
/// # Errors
/// If the kernel refuses.
pub fn install() -> io::Result<()> {
    seccompiler::apply_filter(&program()?)
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
fn without_x32() -> [sock_filter; 3] {
    const X32_BIT: u32 = 0x4000_0000;
    let code = |code: u32| code as u16;
    [
        // The number is the first word of the data.
        sock_filter { code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), jt: 0, jf: 0, k: 0 },
        sock_filter {
            code: code(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K),
            jt: 0,
            jf: 1,
            k: X32_BIT,
        },
        sock_filter {
            code: code(libc::BPF_RET | libc::BPF_K),
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        },
    ]
}

fn bug(what: &str, error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("bug: the system call filter's {what}: {error}"))
}
