//! What a service goes by, checked: how much it takes, and who may speak for
//! whom.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// What a run needs of the host beside its own memory, at most, in bytes: its
/// worker, and what its output and artifacts take on their way.
const RUN_OVERHEAD_BYTES: u64 = 32 << 20;
/// Runs at once for each core: most of them wait for tools.
const RUNS_PER_CORE: usize = 8;
/// Runs at once on the largest host.
const RUNS_MAX: usize = 512;
/// The most that any configuration may ask for, of runs and of waiting ones.
pub const BOUND_MAX: usize = 4096;

/// Bounds on the runs that are carried out and that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Runs that may be carried out at the same time.
    pub runs_max: usize,
    /// Runs that may wait for their turn.
    pub queue_max: usize,
    /// How long a run may wait for its turn.
    pub queue_wait: Duration,
    /// Of one principal, running and waiting together. Of those at once it has as
    /// large a part as this is of all ([`Self::places`]).
    pub principal_runs_max: usize,
}

impl Bounds {
    /// By this host's cores and memory, of which runs of `memory_bytes` may
    /// have one half; what is given is taken as it is.
    #[must_use]
    pub fn of_host(
        memory_bytes: u64,
        runs_max: Option<usize>,
        queue_max: Option<usize>,
        principal_runs_max: Option<usize>,
        queue_wait: Duration,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: both take a number and cannot fail in a way that matters.
        let (pages, page) =
            unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
        let host_bytes = u64::try_from(pages).unwrap_or(0) * u64::try_from(page).unwrap_or(0);
        let by_memory = host_bytes / 2 / (memory_bytes + RUN_OVERHEAD_BYTES);
        let by_memory = usize::try_from(by_memory).unwrap_or(RUNS_MAX);
        let usual = (RUNS_PER_CORE * cores).min(by_memory).clamp(1, RUNS_MAX);
        let runs_max = runs_max.unwrap_or(usual);
        let queue_max = queue_max.unwrap_or(4 * runs_max).min(BOUND_MAX);
        // One principal leaves a quarter to others.
        let all = runs_max + queue_max;
        let principal_runs_max = principal_runs_max.unwrap_or_else(|| (all - all / 4).max(1));
        Self { runs_max, queue_max, queue_wait, principal_runs_max }
    }

    /// How many runs of a principal may run at once that may have so many here, or as
    /// many as others: of [`Self::runs_max`] the part that these are of all, at least one.
    #[must_use]
    pub fn places(&self, runs_max: Option<usize>) -> usize {
        let of_all = runs_max.unwrap_or(self.principal_runs_max);
        let all = (self.runs_max + self.queue_max).max(1);
        (self.runs_max * of_all.min(all) / all).max(1)
    }
}

/// What a service goes by. All of it can be loaded again.
#[derive(Clone, Debug)]
pub struct ServiceOptions {
    /// Bounds on the runs that are carried out and that wait.
    pub bounds: Bounds,
    /// How long runs may still take when the service is to end.
    pub drain: Duration,
    /// That idle CPUs are asked to be ready while runs come
    /// ([`crate::cpu_latency`]), where the host allows that.
    pub pm_qos: bool,
    /// Those that are known by name.
    pub principals: Principals,
}

impl ServiceOptions {
    /// What is good where nothing is said, for runs of this much memory.
    #[must_use]
    pub fn usual(memory_bytes: u64) -> Self {
        Self {
            bounds: Bounds::of_host(memory_bytes, None, None, None, Duration::from_secs(1)),
            drain: Duration::from_secs(30),
            pm_qos: true,
            principals: Principals::default(),
        }
    }
}

/// Principals by name: who may speak for them, and what they may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principals(pub BTreeMap<String, Principal>);

/// Who may speak for a principal, and what it may have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Principal {
    /// Users of this host that may speak for it over the service's socket.
    pub uids: Vec<u32>,
    /// Machines that may speak for it over AF_VSOCK, and for nobody else.
    pub cids: Vec<u32>,
    /// SHA-256 digests of the bearer tokens that speak for it over HTTP.
    pub token_sha256: Vec<[u8; 32]>,
    /// Its runs, running and waiting together, if not as many as of others.
    pub runs_max: Option<usize>,
    /// The key that a door signs its programs with, if it has none itself.
    pub sign_with: Option<PathBuf>,
}

impl Principals {
    /// That every token and every CID speaks for one alone.
    ///
    /// # Errors
    /// Which two share one.
    pub fn check(&self) -> Result<(), String> {
        let mut owners: BTreeMap<&[u8; 32], &str> = BTreeMap::new();
        let mut machines: BTreeMap<u32, &str> = BTreeMap::new();
        for (name, principal) in &self.0 {
            for cid in &principal.cids {
                match machines.insert(*cid, name) {
                    Some(other) if other != name => {
                        return Err(format!("{other} and {name} have the same CID"));
                    }
                    _ => {}
                }
            }
            for token in &principal.token_sha256 {
                match owners.insert(token, name) {
                    Some(other) if other != name => {
                        return Err(format!("{other} and {name} have the same token"));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The principals that this user may speak for.
    #[must_use]
    pub fn of_uid(&self, uid: u32) -> Vec<String> {
        let speaks = |principal: &Principal| principal.uids.contains(&uid);
        self.0.iter().filter(|(_, it)| speaks(it)).map(|(name, _)| name.clone()).collect()
    }

    /// The principal that the machine with this CID speaks for.
    #[must_use]
    pub fn of_cid(&self, cid: u32) -> Option<&str> {
        let speaks = |principal: &Principal| principal.cids.contains(&cid);
        self.0.iter().find(|(_, it)| speaks(it)).map(|(name, _)| name.as_str())
    }

    /// The principal that this token speaks for, by its digest.
    #[must_use]
    pub fn of_token(&self, sha256: &[u8; 32]) -> Option<&str> {
        let speaks = |principal: &Principal| principal.token_sha256.contains(sha256);
        self.0.iter().find(|(_, it)| speaks(it)).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_bounds_what_nobody_says_and_leaves_room_for_a_second_principal() {
        let usual = Bounds::of_host(64 << 20, None, None, None, Duration::ZERO);
        assert!(usual.runs_max >= 1 && usual.queue_max >= usual.runs_max, "{usual:?}");
        assert!(usual.principal_runs_max < usual.runs_max + usual.queue_max, "{usual:?}");
        assert!(usual.places(None) < usual.runs_max || usual.runs_max == 1, "{usual:?}");
        assert_eq!(usual.places(Some(usize::MAX)), usual.runs_max);
        let huge = Bounds::of_host(u64::MAX / 2, None, None, None, Duration::ZERO);
        assert_eq!(huge.runs_max, 1, "no memory for a second");
        let said = Bounds::of_host(64 << 20, Some(3), Some(0), Some(2), Duration::ZERO);
        assert_eq!((said.runs_max, said.queue_max, said.principal_runs_max), (3, 0, 2));
    }

    #[test]
    fn whoever_may_have_a_run_has_a_place_for_it_however_many_may_wait() {
        let bounds = Bounds::of_host(64 << 20, Some(1), Some(100), Some(2), Duration::ZERO);
        assert_eq!((bounds.places(None), bounds.places(Some(1))), (1, 1));
    }

    #[test]
    fn a_token_and_a_machine_speak_for_one_principal_alone() {
        let with = |cids: &[u32], tokens: &[u8]| Principal {
            cids: cids.to_vec(),
            token_sha256: tokens.iter().map(|it| [*it; 32]).collect(),
            ..Principal::default()
        };
        let check = |a, b| Principals(BTreeMap::from([("a".into(), a), ("b".into(), b)])).check();
        assert_eq!(check(with(&[3, 4], &[1, 2]), with(&[5], &[3])), Ok(()));
        assert!(check(with(&[3, 4], &[]), with(&[5, 4], &[])).unwrap_err().contains("same CID"));
        assert!(check(with(&[], &[1, 2]), with(&[], &[2])).unwrap_err().contains("same token"));
    }
}
