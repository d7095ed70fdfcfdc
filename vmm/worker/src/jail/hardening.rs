//! What of the jail is on, and what is weaker on this host than it could be.
//!
//! Filled in by whoever set the jail up, from what the kernel answered then.
//! Nothing here is guessed from a version number.

use std::fmt;

use serde::Serialize;

use super::cgroup::Controller;
use super::landlock::ABI_WANTED;

/// The protections that are in force around workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Hardening {
    /// A virtual machine within all of this.
    pub vm: bool,
    /// User, pid, network, mount, ipc and uts namespaces of its own.
    pub namespaces: bool,
    /// The host's user that workers are, if it is not the supervisor's.
    pub identity: Option<u32>,
    /// An empty root in place of the host's file tree.
    pub empty_root: bool,
    /// A procfs of its own, by which a worker finds the pages a run wrote.
    pub procfs: bool,
    /// The version of Landlock that is enforced. Absent: none.
    pub landlock_abi: Option<i32>,
    /// System-call filters.
    pub seccomp: bool,
    /// The controllers of cgroup v2 that bound a worker.
    pub cgroup: Vec<Controller>,
}

impl Hardening {
    /// What is weaker than it could be.
    #[must_use]
    pub fn weaknesses(&self) -> Vec<Weakness> {
        let mut found = Vec::new();
        if !self.vm {
            found.push(Weakness::NoVm);
        }
        if !self.namespaces {
            found.push(Weakness::NoNamespaces);
        }
        if self.identity.is_none() {
            found.push(Weakness::SupervisorsUser);
        }
        if !self.empty_root {
            found.push(Weakness::HostsTree);
        }
        match self.landlock_abi {
            None => found.push(Weakness::NoLandlock),
            Some(abi) if abi < ABI_WANTED => found.push(Weakness::OldLandlock { abi }),
            Some(_) => {}
        }
        if !self.seccomp {
            found.push(Weakness::NoSeccomp);
        }
        for controller in Controller::ALL {
            if !self.cgroup.contains(&controller) {
                found.push(Weakness::NoController { controller });
            }
        }
        // Without a VM there is nothing to reset.
        if self.vm && !self.procfs {
            found.push(Weakness::NoProcfs);
        }
        found
    }
}

/// One thing that is weaker. Its text says what that costs and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "weakness", rename_all = "snake_case")]
pub enum Weakness {
    /// There is no virtual machine: the tier is `process`.
    NoVm,
    /// Workers share the supervisor's namespaces.
    NoNamespaces,
    /// Workers are the supervisor's user to the host.
    SupervisorsUser,
    /// The host's file tree is in sight.
    HostsTree,
    /// The kernel has no Landlock.
    NoLandlock,
    /// The kernel's Landlock lacks scopes.
    OldLandlock {
        /// The version of Landlock that the kernel has.
        abi: i32,
    },
    /// No system-call filter is on.
    NoSeccomp,
    /// A resource is not bounded for the group.
    NoController {
        /// The controller that would.
        controller: Controller,
    },
    /// There is no procfs to find written pages by.
    NoProcfs,
}

impl Weakness {
    /// Its word in a run's report, which stays as it is.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::NoVm => "no_vm",
            Self::NoNamespaces => "no_namespaces",
            Self::SupervisorsUser => "supervisors_user",
            Self::HostsTree => "hosts_tree",
            Self::NoLandlock => "no_landlock",
            Self::OldLandlock { .. } => "old_landlock",
            Self::NoSeccomp => "no_seccomp",
            Self::NoController { controller: Controller::Memory } => "memory_not_grouped",
            Self::NoController { controller: Controller::Cpu } => "cpu_not_grouped",
            Self::NoController { controller: Controller::Pids } => "processes_not_grouped",
            Self::NoProcfs => "no_procfs",
        }
    }
}

impl fmt::Display for Weakness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoVm => f.write_str(
                "programs run in processes of this host: a flaw in the interpreter is enough to \
                 stand before the host's kernel, with the system calls of docs/jail.md; use \
                 isolation `vm`",
            ),
            Self::NoNamespaces => f.write_str(
                "workers share the host's processes, network and mounts: allow user namespaces",
            ),
            Self::SupervisorsUser => f.write_str(
                "to the host, workers are the user who started forge-vmm, with that user's \
                 groups: start it as root, and they belong to nobody",
            ),
            Self::HostsTree => f.write_str(
                "the host's file tree is in workers' sight, behind Landlock and the filter: \
                 allow user namespaces",
            ),
            Self::NoLandlock => f.write_str(
                "no Landlock: use a kernel with CONFIG_SECURITY_LANDLOCK and landlock in its \
                 lsm= list",
            ),
            Self::OldLandlock { abi } => write!(
                f,
                "Landlock of version {abi} cannot keep workers from signalling each other: use \
                 Linux 6.12 or later",
            ),
            Self::NoSeccomp => {
                f.write_str("no system-call filter: use a kernel with CONFIG_SECCOMP_FILTER")
            }
            Self::NoController { controller } => write!(
                f,
                "no limit by cgroup v2's controller {controller}: {}; configure one, and start \
                 forge-vmm in a delegated group (systemd-run --scope --property=Delegate=yes)",
                match controller {
                    Controller::Memory => "memory is bounded by each worker's address space alone",
                    Controller::Cpu => "CPU time is bounded by deadlines and fuel alone",
                    Controller::Pids =>
                        "processes are bounded by the filter and RLIMIT_NPROC alone",
                }
            ),
            Self::NoProcfs => f.write_str(
                "no procfs of its own, because a container hides part of /proc: a worker is \
                 made anew instead of being reset",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Hardening {
        Hardening {
            vm: true,
            namespaces: true,
            identity: Some(1),
            empty_root: true,
            procfs: true,
            landlock_abi: Some(ABI_WANTED),
            seccomp: true,
            cgroup: Controller::ALL.to_vec(),
        }
    }

    #[test]
    fn what_is_all_on_is_not_weak() {
        assert_eq!(everything().weaknesses(), []);
    }

    #[test]
    fn whatever_is_off_is_said() {
        let off = Hardening { vm: true, ..Hardening::default() }.weaknesses();
        assert_eq!(off.len(), 9, "{off:?}");
        let mut words: Vec<_> = off.iter().map(|weakness| weakness.word()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 9, "{words:?}");
        let no_vm = Hardening { vm: false, procfs: false, ..everything() };
        assert_eq!(no_vm.weaknesses(), [Weakness::NoVm], "and nothing about resets");
        let old = Hardening { landlock_abi: Some(ABI_WANTED - 1), ..everything() };
        assert_eq!(old.weaknesses(), [Weakness::OldLandlock { abi: ABI_WANTED - 1 }]);
        let cpu = Hardening { cgroup: vec![Controller::Memory, Controller::Pids], ..everything() };
        assert_eq!(cpu.weaknesses(), [Weakness::NoController { controller: Controller::Cpu }]);
    }
}
