//! What this host can do, what it lacks, what that costs and how to fix it.
//!
//! Everything is read from files below a root, so that tests can show it
//! other hosts; the proof is not read but made: a guest is booted.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fork, Reuse, Tier, VmFailure, ZygoteSetup};
use serde::Serialize;

use crate::broker::Broker;
use crate::cpu_latency;
use crate::jail::{Hardening, Weakness};
use crate::link::Patience;
use crate::machine::{self, Hypervisor, Image, Watchdog};
use crate::pool::zygote::Zygote;
use crate::worker::Guest;

/// How long a worker may take to stand ready.
const READY_TIME_MAX: Duration = Duration::from_secs(30);

/// The oldest kernel that CI runs VMs on.
const TESTED_KERNEL: (u32, u32) = (6, 1);
/// The first kernel with `CLOSE_RANGE_CLOEXEC`, without which nothing is started.
const OLDEST_KERNEL: (u32, u32) = (5, 11);

/// How a thing stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// As it should be.
    Ok,
    /// It works; it would be safer or faster otherwise.
    Advice,
    /// It is not there.
    Missing,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of what was looked at.
    pub name: &'static str,
    /// How good what was found is.
    pub standing: Standing,
    /// What was found.
    pub found: String,
    /// What its being so costs. Empty where it is as it should be.
    pub cost: &'static str,
    /// What to do about it. Empty where it is as it should be.
    pub fix: &'static str,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, standing: Standing::Ok, found: found.into(), cost: "", fix: "" }
    }

    fn or(self, standing: Standing, cost: &'static str, fix: &'static str) -> Self {
        Self { standing, cost, fix, ..self }
    }
}

/// Whether a guest boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// Whether the guest booted.
    pub booted: bool,
    /// Time to make the VM and boot it, in microseconds.
    pub boot_us: Option<u64>,
    /// Why the guest did not boot.
    pub reason: Option<String>,
}

/// Whether a worker of the tier `process` comes to stand ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessProof {
    /// Whether the worker came to stand ready.
    pub stood: bool,
    /// Time to fork the worker and jail it in, in microseconds.
    pub ready_us: Option<u64>,
    /// Why the worker did not come to stand ready.
    pub reason: Option<String>,
}

/// The jail around workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Jail {
    /// What is on, as a zygote found that was started for this.
    pub on: Option<Hardening>,
    /// What is weaker here than it could be.
    pub weaknesses: Vec<Weak>,
    /// Why there is none.
    pub reason: Option<String>,
}

/// One thing that is weaker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Weak {
    /// Its word in a run's report.
    pub word: &'static str,
    /// What that costs, and what to do.
    pub text: String,
}

/// Everything about this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Probe {
    /// What was looked at.
    pub findings: Vec<Finding>,
    /// The guest image's digest.
    pub guest_sha256: &'static str,
    /// Whether `vm` isolation works.
    pub vm: Proof,
    /// Whether `process` isolation does.
    pub process: ProcessProof,
    /// What a worker would be in.
    pub jail: Jail,
}

impl Probe {
    /// Looks at this host, boots a guest on it, and starts a zygote.
    #[must_use]
    pub fn run() -> Self {
        let vm = prove();
        let tier = if vm.booted { Tier::Vm } else { Tier::Process };
        let mut findings = findings(Path::new("/"), landlock_abi());
        findings.push(toolbroker(Broker::executable().ok().as_deref()));
        Self {
            findings,
            guest_sha256: forge_rootfs::GUEST_SHA256,
            vm,
            process: prove_process(),
            jail: jail(tier),
        }
    }
}

/// That of a tier. Without limits by cgroup v2, which only the operator knows.
fn jail(tier: Tier) -> Jail {
    match Zygote::start(&ZygoteSetup { tier, trust: Vec::new() }, None) {
        Err(failure) => Jail { on: None, weaknesses: Vec::new(), reason: Some(failure.message) },
        Ok(zygote) => {
            let on = zygote.hardening().clone();
            let weak = |it: &Weakness| Weak { word: it.word(), text: it.to_string() };
            let weaknesses = on.weaknesses().iter().map(weak).collect();
            Jail { on: Some(on), weaknesses, reason: None }
        }
    }
}

/// A worker of this tier that stands ready, as each run has one, and after how long.
fn stand(tier: Tier) -> Result<u64, String> {
    let setup = ZygoteSetup { tier, trust: Vec::new() };
    let mut zygote = Zygote::start(&setup, None).map_err(|it| it.message)?;
    let started = Instant::now();
    let ram_bytes = machine::ram_bytes(&RunLimits::default()) as u64;
    let order = Fork { ram_bytes, touch_bytes: 0, reuse: Reuse::Fresh };
    let forked = zygote.fork(order, Patience::default()).map_err(|error| error.to_string())?;
    let mut worker = forked.map_err(|unmade| VmFailure::from(unmade).message)?;
    let patience = Patience::until(started + READY_TIME_MAX);
    worker.await_ready(patience).map_err(|failure| failure.message)?;
    Ok(started.elapsed().as_micros() as u64)
}

fn prove_process() -> ProcessProof {
    match stand(Tier::Process) {
        Ok(us) => ProcessProof { stood: true, ready_us: Some(us), reason: None },
        Err(reason) => ProcessProof { stood: false, ready_us: None, reason: Some(reason) },
    }
}

fn prove() -> Proof {
    let failed = |reason: String| Proof { booted: false, boot_us: None, reason: Some(reason) };
    let boot = || -> Result<u64, String> {
        let hypervisor = Hypervisor::open().map_err(|error| error.to_string())?;
        let image = Image::built_in().map_err(|error| error.to_string())?;
        let watchdog = Watchdog::new().map_err(|error| error.to_string())?;
        let ram_bytes = machine::ram_bytes(&RunLimits::default());
        let started = Instant::now();
        Guest::boot(&hypervisor, image, &TrustKeys::default(), ram_bytes, &watchdog)
            .map_err(|failure| failure.message)?;
        let took = started.elapsed().as_micros() as u64;
        // And what no run does without: a VM that starts from a base, in a worker.
        stand(Tier::Vm)?;
        Ok(took)
    };
    match boot() {
        Ok(us) => Proof { booted: true, boot_us: Some(us), reason: None },
        Err(reason) => failed(reason),
    }
}

fn findings(root: &Path, landlock: Option<u32>) -> Vec<Finding> {
    let host = Host { root };
    vec![
        host.kernel(),
        host.kvm(),
        host.cpu(),
        host.huge_pages(),
        host.cgroup_v2(),
        host.seccomp(),
        landlock_finding(landlock),
        host.vhost_vsock(),
        host.smt(),
        host.ksm(),
        host.idle_cpus(),
        host.nested(),
    ]
}

/// Whether the toolbroker is where it is looked for.
fn toolbroker(executable: Option<&Path>) -> Finding {
    let found =
        Finding::ok("toolbroker", executable.map_or_else(|| "forge-toolbroker".into(), shown));
    match executable {
        Some(file) if file.is_file() => found,
        _ => Finding { found: format!("{} is not there", found.found), ..found }.or(
            Standing::Missing,
            "programs run, and can call no tool; no service starts",
            "put forge-toolbroker, which is built and packaged with forge-vmm, beside it",
        ),
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The two numbers that a kernel's release begins with.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|byte: char| !byte.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

/// The files of one host.
struct Host<'a> {
    root: &'a Path,
}

impl Host<'_> {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The choice in brackets of a sysfs file such as `a [b] c`.
    fn chosen(&self, path: &str) -> Option<String> {
        let text = self.read(path)?;
        let (_, rest) = text.split_once('[')?;
        Some(rest.split_once(']')?.0.to_owned())
    }

    fn kernel(&self) -> Finding {
        let release = self.read("/proc/sys/kernel/osrelease").unwrap_or_default();
        let found = Finding::ok("kernel", format!("Linux {release}"));
        match version(&release) {
            Some(version) if version >= TESTED_KERNEL => found,
            Some(version) if version < OLDEST_KERNEL => found.or(
                Standing::Missing,
                "no worker starts: close_range cannot mark descriptors there",
                "Linux 6.1 or newer",
            ),
            _ => found.or(
                Standing::Advice,
                "nothing is tested on kernels before Linux 6.1",
                "Linux 6.1 or newer",
            ),
        }
    }

    fn kvm(&self) -> Finding {
        let flavour = ["kvm_intel", "kvm_amd", "kvm_pvm"]
            .into_iter()
            .find(|module| self.path("/sys/module").join(module).is_dir());
        let device = self.path("/dev/kvm");
        let opened = fs::File::options().read(true).write(true).open(&device);
        let what = match flavour {
            Some("kvm_intel") => "kvm_intel: hardware virtualisation (VT-x)",
            Some("kvm_amd") => "kvm_amd: hardware virtualisation (AMD-V)",
            Some(_) => "kvm_pvm: software virtualisation, shadow paging, ring 0 emulated",
            None => "no KVM module",
        };
        let denied = opened
            .as_ref()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
        let found = match &opened {
            Err(error) if device.exists() => {
                Finding::ok("kvm", format!("{what}, but /dev/kvm cannot be opened: {error}"))
            }
            _ => Finding::ok("kvm", what),
        };
        match (opened.is_ok(), flavour) {
            (true, Some("kvm_pvm")) => found.or(
                Standing::Advice,
                "a VM exit costs some 25 us here, and 1 to 2 us on hardware",
                "for speed, run on bare metal or with hardware nested virtualisation",
            ),
            (true, Some(_)) => found,
            (true, None) => Finding::ok("kvm", "/dev/kvm of an unknown flavour"),
            (false, _) if denied => found.or(
                Standing::Missing,
                "no program can run in a VM",
                "let this user open /dev/kvm: usermod -aG kvm USER, and log in again; where \
                 `ls -l /dev/kvm` shows another group or mode, chgrp kvm and chmod 660 first",
            ),
            (false, _) => found.or(
                Standing::Missing,
                "no program can run in a VM",
                "enable VT-x or AMD-V in the firmware and load kvm_intel or kvm_amd",
            ),
        }
    }

    fn cpu(&self) -> Finding {
        let info = self.read("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            info.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        let cores = info.lines().filter(|line| line.starts_with("processor")).count();
        let model = field("model name").unwrap_or_else(|| "unknown".into());
        let flags = field("flags").unwrap_or_default();
        let has = |flag: &str| flags.split(' ').any(|f| f == flag);
        let found = Finding::ok("cpu", format!("{model}, {cores} threads"));
        if has("sha_ni") {
            found
        } else {
            found.or(
                Standing::Advice,
                "hashing a program takes 5 us a KiB instead of 1",
                "a CPU with SHA extensions (Intel since Ice Lake, AMD since Zen)",
            )
        }
    }

    fn huge_pages(&self) -> Finding {
        let mode = self.chosen("/sys/kernel/mm/transparent_hugepage/enabled");
        let shmem = self.chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let text = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "absent".into());
        let found = Finding::ok(
            "huge_pages",
            format!("transparent: {}, shared memory: {}", text(&mode), text(&shmem)),
        );
        match mode.as_deref() {
            Some("always" | "madvise") => found,
            _ => found.or(
                Standing::Advice,
                "a guest's first touch of each 4 KiB page is a fault of its own",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            ),
        }
    }

    fn cgroup_v2(&self) -> Finding {
        let needed = ["cpu", "memory", "pids"];
        let Some(controllers) = self.read("/sys/fs/cgroup/cgroup.controllers") else {
            return Finding::ok("cgroup_v2", "not mounted at /sys/fs/cgroup").or(
                Standing::Missing,
                "a VM's memory, CPU time and processes are bounded by its own limits alone",
                "boot with systemd.unified_cgroup_hierarchy=1",
            );
        };
        let missing: Vec<&str> = needed
            .into_iter()
            .filter(|name| !controllers.split_whitespace().any(|found| found == *name))
            .collect();
        if missing.is_empty() {
            Finding::ok("cgroup_v2", controllers)
        } else {
            Finding::ok("cgroup_v2", format!("without {}", missing.join(", "))).or(
                Standing::Missing,
                "what these controllers bound is bounded by a VM's own limits alone",
                "enable them in the parent's cgroup.subtree_control",
            )
        }
    }

    fn seccomp(&self) -> Finding {
        match self.read("/proc/sys/kernel/seccomp/actions_avail") {
            Some(actions) if actions.split(' ').any(|action| action == "trap") => {
                Finding::ok("seccomp", "filters are available")
            }
            _ => Finding::ok("seccomp", "no filters").or(
                Standing::Missing,
                "a worker that is taken over can make any system call",
                "a kernel with CONFIG_SECCOMP_FILTER",
            ),
        }
    }

    fn vhost_vsock(&self) -> Finding {
        if self.path("/dev/vhost-vsock").exists() {
            Finding::ok("vhost_vsock", "present")
        } else {
            Finding::ok("vhost_vsock", "absent").or(
                Standing::Advice,
                "nothing between host and guest: that device is our own; other VMs on this host \
                 cannot be reached by AF_VSOCK",
                "modprobe vhost_vsock, if callers sit in other VMs",
            )
        }
    }

    fn smt(&self) -> Finding {
        let control = self.read("/sys/devices/system/cpu/smt/control");
        let found = Finding::ok("smt", control.clone().unwrap_or_else(|| "unknown".into()));
        match control.as_deref() {
            Some("on") => found.or(
                Standing::Advice,
                "two tenants' VMs may share a core and what leaks between its threads",
                "echo off > /sys/devices/system/cpu/smt/control, where tenants distrust each other",
            ),
            _ => found,
        }
    }

    fn ksm(&self) -> Finding {
        let run = self.read("/sys/kernel/mm/ksm/run");
        match run.as_deref() {
            Some("1") => Finding::ok("ksm", "merging pages").or(
                Standing::Advice,
                "the time of a write tells one VM what pages another has",
                "echo 2 > /sys/kernel/mm/ksm/run",
            ),
            _ => Finding::ok("ksm", "off"),
        }
    }

    fn idle_cpus(&self) -> Finding {
        const COST: &str = "where a run's next step finds a CPU asleep, waking it takes tens of \
                            microseconds; a warm run has four such steps";
        const DEVICE: &str = "/dev/cpu_dma_latency";
        let Some(bound_us) = cpu_latency::bound_us(self.root) else {
            let found = Finding::ok("idle_cpus", "sleep as they like: no cpuidle driver");
            let info = self.read("/proc/cpuinfo").unwrap_or_default();
            return if info.contains(" hypervisor") {
                found.or(
                    Standing::Advice,
                    COST,
                    "modprobe cpuidle_haltpoll, if this is a KVM guest",
                )
            } else {
                found
            };
        };
        match File::options().write(true).open(self.path(DEVICE)) {
            Ok(_) => Finding::ok(
                "idle_cpus",
                format!("can be held ready within {bound_us} us while runs come"),
            ),
            Err(error) => Finding::ok(
                "idle_cpus",
                format!("sleep as they like: {DEVICE}: {error}"),
            )
            .or(
                Standing::Advice,
                COST,
                "let the service's user write /dev/cpu_dma_latency, by a udev rule for instance",
            ),
        }
    }

    fn nested(&self) -> Finding {
        let on = ["kvm_intel", "kvm_amd"].into_iter().any(|module| {
            let file = format!("/sys/module/{module}/parameters/nested");
            matches!(self.read(&file).as_deref(), Some("1" | "Y"))
        });
        if on {
            Finding::ok("nested", "on").or(
                Standing::Advice,
                "nested virtualisation is host kernel code that a guest could reach; ours are not \
                 shown VMX or SVM",
                "options kvm_intel nested=0 (kvm_amd nested=0), if no other VM needs it",
            )
        } else {
            Finding::ok("nested", "off")
        }
    }
}

fn landlock_finding(abi: Option<u32>) -> Finding {
    match abi {
        Some(abi) => Finding::ok("landlock", format!("ABI {abi}")),
        None => Finding::ok("landlock", "absent").or(
            Standing::Missing,
            "a worker's reach into the file system is bounded by namespaces alone",
            "a kernel with CONFIG_SECURITY_LANDLOCK, and landlock in its lsm= list",
        ),
    }
}

/// The kernel's Landlock ABI version, if it has Landlock.
fn landlock_abi() -> Option<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: asks for the version, with no attribute and no effect.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("probe-{}-{name}", std::process::id()));
            for (path, content) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        fn standing(&self, name: &str) -> Standing {
            let all = findings(&self.0, Some(5));
            all.iter().find(|finding| finding.name == name).unwrap().standing
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_host_without_anything_is_told_so_with_a_fix_for_each() {
        let tree = Tree::new("bare", &[]);
        let all = findings(&tree.0, None);
        for name in ["kvm", "cgroup_v2", "seccomp", "landlock"] {
            let finding = all.iter().find(|finding| finding.name == name).unwrap();
            assert_eq!(finding.standing, Standing::Missing, "{name}");
            assert!(!finding.cost.is_empty() && !finding.fix.is_empty(), "{name}");
        }
    }

    #[test]
    fn a_toolbroker_that_is_not_there_is_told_with_the_place_where_it_is_looked_for() {
        let tree = Tree::new("broker", &[("forge-toolbroker", "")]);
        let file = tree.0.join("forge-toolbroker");
        assert_eq!(toolbroker(Some(&file)).standing, Standing::Ok);
        let absent = toolbroker(Some(&tree.0.join("absent")));
        assert_eq!(absent.standing, Standing::Missing);
        assert!(absent.found.ends_with("absent is not there"), "{}", absent.found);
        assert!(!absent.cost.is_empty() && !absent.fix.is_empty());
    }

    #[test]
    fn a_hardened_bare_metal_host_needs_no_advice() {
        let tree = Tree::new(
            "hardened",
            &[
                ("proc/sys/kernel/osrelease", "6.1.0-57-amd64\n"),
                ("dev/kvm", ""),
                ("dev/vhost-vsock", ""),
                ("sys/module/kvm_amd/parameters/nested", "0\n"),
                ("proc/cpuinfo", "processor : 0\nmodel name : X\nflags : fpu sha_ni\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
                ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n"),
                ("proc/sys/kernel/seccomp/actions_avail", "kill_process trap errno\n"),
                ("sys/devices/system/cpu/smt/control", "off\n"),
                ("sys/kernel/mm/ksm/run", "0\n"),
                ("sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n"),
                ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2\n"),
                ("dev/cpu_dma_latency", ""),
            ],
        );
        let all = findings(&tree.0, Some(5));
        let not_ok: Vec<_> = all.iter().filter(|f| f.standing != Standing::Ok).collect();
        assert!(not_ok.is_empty(), "{not_ok:#?}");
    }

    #[test]
    fn a_kernel_is_held_against_the_oldest_that_works_and_the_oldest_that_is_tested() {
        for (release, standing) in [
            ("5.10.0-30-amd64", Standing::Missing),
            ("5.11.0", Standing::Advice),
            ("5.19-rc1", Standing::Advice),
            ("unheard-of", Standing::Advice),
            ("6.1", Standing::Ok),
            ("10.0.1", Standing::Ok),
        ] {
            let tree = Tree::new(release, &[("proc/sys/kernel/osrelease", release)]);
            assert_eq!(tree.standing("kernel"), standing, "{release}");
        }
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_missing_and_told_why() {
        // Nobody opens a folder to write.
        let files = [("dev/kvm/a", ""), ("sys/module/kvm_amd/parameters/nested", "0")];
        let tree = Tree::new("closed", &files);
        assert_eq!(tree.standing("kvm"), Standing::Missing);
        let all = findings(&tree.0, Some(5));
        let kvm = all.iter().find(|finding| finding.name == "kvm").unwrap();
        assert!(kvm.found.contains("Is a directory"), "{}", kvm.found);
    }

    #[test]
    fn what_weakens_a_host_is_advised_on() {
        let tree = Tree::new(
            "weak",
            &[
                ("dev/kvm", ""),
                ("sys/module/kvm_intel/parameters/nested", "Y\n"),
                ("sys/devices/system/cpu/smt/control", "on\n"),
                ("sys/kernel/mm/ksm/run", "1\n"),
                ("sys/fs/cgroup/cgroup.controllers", "cpu\n"),
                ("sys/devices/system/cpu/cpuidle/current_driver", "haltpoll\n"),
            ],
        );
        for name in ["smt", "ksm", "nested", "idle_cpus"] {
            assert_eq!(tree.standing(name), Standing::Advice, "{name}");
        }
        assert_eq!(tree.standing("cgroup_v2"), Standing::Missing);
        assert_eq!(tree.standing("kvm"), Standing::Ok);
    }
}
