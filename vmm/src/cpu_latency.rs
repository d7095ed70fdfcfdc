//! How fast idle CPUs resume: a request to the kernel's power management (PM
//! QoS, `Documentation/power/pm_qos_interface.rst`).
//!
//! A run passes through four processes, and each hop may go to a CPU that
//! sleeps. To wake one takes as long as some hops do by themselves: tens of
//! microseconds where the CPU is a VM's and has to be brought back by its host,
//! and as much for deep sleep on bare metal. Whoever holds a request keeps all
//! CPUs of the host from sleeping deeper than it says, so it is held no longer
//! than it is of use.
//!
//! Deliberately absent: settings that outlive this process. The kernel drops
//! the request with its descriptor.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

const DEVICE: &str = "/dev/cpu_dma_latency";
const CPUIDLE: &str = "sys/devices/system/cpu/cpuidle";
/// The first state of a CPU that stops it; the one before it polls.
const SHALLOWEST: &str = "sys/devices/system/cpu/cpu0/cpuidle/state1/latency";
/// What the kernel takes for no request (`PM_QOS_CPU_LATENCY_DEFAULT_VALUE`).
const ANY_US: i32 = 2_000_000_000;

/// Why idle CPUs cannot be asked for anything.
#[derive(Debug, thiserror::Error)]
pub enum CpuLatencyError {
    /// The kernel chooses nothing that could be bounded.
    #[error("this host's kernel has no choice of idle states (no cpuidle driver)")]
    NoChoice,
    /// The device does not open.
    #[error("{DEVICE} does not open: {0}")]
    Device(#[from] io::Error),
}

/// The right to ask. With it nothing is asked yet.
#[derive(Debug)]
pub struct CpuLatency {
    device: File,
    bound_us: i32,
}

impl CpuLatency {
    /// Opens the kernel's device, which is root's unless somebody gave it away.
    ///
    /// # Errors
    /// [`CpuLatencyError`]; runs are right without, and slower.
    pub fn open() -> Result<Self, CpuLatencyError> {
        let bound_us = bound_us(Path::new("/")).ok_or(CpuLatencyError::NoChoice)?;
        let latency = Self { device: File::options().write(true).open(DEVICE)?, bound_us };
        // Opening it asked for something already: for nothing.
        latency.withdraw();
        Ok(latency)
    }

    /// What is asked for, in microseconds from the wake-up of an idle CPU to
    /// its next instruction.
    #[must_use]
    pub const fn bound_us(&self) -> i32 {
        self.bound_us
    }

    /// Has all CPUs that are idle, or become it, be ready within the bound.
    /// Those that sleep are woken for it.
    pub fn ask(&self) {
        self.write(self.bound_us);
    }

    /// Takes back what [`Self::ask`] asked for.
    pub fn withdraw(&self) {
        self.write(ANY_US);
    }

    /// The same of a file instead of the device, which gathers what is asked.
    #[cfg(test)]
    pub(crate) const fn over(device: File, bound_us: i32) -> Self {
        Self { device, bound_us }
    }

    fn write(&self, us: i32) {
        // The kernel takes any number. Without, CPUs sleep as they did.
        if let Err(error) = (&self.device).write_all(&us.to_ne_bytes()) {
            tracing::debug!(%error, "idle CPUs cannot be asked to be ready");
        }
    }
}

/// What is worth asking for on the host below this root, in microseconds.
///
/// On bare metal it is the first state that stops a CPU at all: it resumes at
/// once, and takes little power. In a VM that has `haltpoll` to stop is to
/// leave the VM, and the bound is 0, for which an idle CPU polls.
#[must_use]
pub(crate) fn bound_us(root: &Path) -> Option<i32> {
    let read = |path: &str| Some(fs::read_to_string(root.join(path)).ok()?.trim().to_owned());
    match read(&format!("{CPUIDLE}/current_driver"))?.as_str() {
        "" | "none" => None,
        "haltpoll" => Some(0),
        _ => read(SHALLOWEST)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound_of(name: &str, driver: &str, state1_us: Option<&str>) -> Option<i32> {
        let root = std::env::temp_dir().join(format!("cpuidle-{}-{name}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&format!("{CPUIDLE}/current_driver"), driver);
        if let Some(us) = state1_us {
            write(SHALLOWEST, us);
        }
        let bound = bound_us(&root);
        fs::remove_dir_all(root).unwrap();
        bound
    }

    #[test]
    fn bare_metal_may_stop_its_cpus_and_a_vm_polls() {
        assert_eq!(bound_of("metal", "intel_idle\n", Some("2\n")), Some(2));
        assert_eq!(bound_of("vm", "haltpoll\n", Some("1\n")), Some(0));
    }

    #[test]
    fn where_the_kernel_has_no_choice_nothing_is_asked() {
        assert_eq!(bound_of("none", "none\n", None), None);
        assert_eq!(bound_of("one", "acpi_idle\n", None), None);
        assert_eq!(bound_us(Path::new("/nowhere")), None);
    }
}
