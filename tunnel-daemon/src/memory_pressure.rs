//! Shrinks tunnels' buffers, and finally refuses dials, while this process has nearly used up the memory of its cgroup.
//! Version 2 counts socket buffers there, and no budget sees all of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::session::{MemoryPressure, ProcessBudget};

use adit_host::memory;
use adit_tunnel::RawLaneRelay;

/// Interval between two reads: thousands of tunnels need longer to fill their sockets.
const EVERY: Duration = Duration::from_millis(100);
/// Percent of the memory at which the level begins, and percent below which it ends.
const HIGH: [u64; 2] = [60, 50];
const CRITICAL: [u64; 2] = [80, 75];
/// Least time between two lines of the log.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Usage of this process's memory cgroup.
#[derive(Debug)]
struct CgroupMemory {
    limit_bytes: u64,
    usage: PathBuf,
    stat: PathBuf,
}

impl CgroupMemory {
    /// `None` without a limit, or if the cgroup does not report its usage.
    fn here() -> Option<Self> {
        let (limit_bytes, folder) = memory::of_cgroup()?;
        Self::of(&folder, limit_bytes)
    }

    fn of(folder: &Path, limit_bytes: u64) -> Option<Self> {
        // File names of version 2 and version 1.
        let usage = ["memory.current", "memory.usage_in_bytes"]
            .map(|file| folder.join(file))
            .into_iter()
            .find(|file| file.exists())?;
        Some(Self {
            limit_bytes,
            usage,
            stat: folder.join("memory.stat"),
        })
    }

    /// Bytes that the kernel cannot reclaim. `stat` costs the kernel more than `usage`, so it is read at high usage only.
    fn used_bytes(&self) -> Option<u64> {
        let usage: u64 = fs::read_to_string(&self.usage).ok()?.trim().parse().ok()?;
        if hundredths(usage, self.limit_bytes) < HIGH[1] {
            return Some(usage);
        }
        let stat = fs::read_to_string(&self.stat).ok()?;
        Some(usage.saturating_sub(reclaimable_bytes(&stat)))
    }
}

/// Bytes that the kernel reclaims before it runs out, from the text of `memory.stat`.
fn reclaimable_bytes(stat: &str) -> u64 {
    let number = |wanted: &str| {
        let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
        let line = lines.find(|(name, _bytes)| *name == wanted);
        line.and_then(|(_name, bytes)| bytes.parse::<u64>().ok())
    };
    // Pages of files, except those of memory file systems. In version 1 these names exclude descendant cgroups.
    let [files, of_memory] = [["total_cache", "file"], ["total_shmem", "shmem"]]
        .map(|names| names.into_iter().find_map(number).unwrap_or(0));
    let slab = number("slab_reclaimable").unwrap_or(0);
    files.saturating_sub(of_memory).saturating_add(slab)
}

fn hundredths(used: u64, of: u64) -> u64 {
    used.saturating_mul(100) / of.max(1)
}

/// The pressure at `used` percent, given the pressure `before`.
fn pressure(used: u64, before: MemoryPressure) -> MemoryPressure {
    let is_in = |[from, until]: [u64; 2], level| used >= if before >= level { until } else { from };
    if is_in(CRITICAL, MemoryPressure::Critical) {
        MemoryPressure::Critical
    } else if is_in(HIGH, MemoryPressure::High) {
        MemoryPressure::High
    } else {
        MemoryPressure::None
    }
}

/// Reports the pressure to `budget` and `relay` until dropped.
pub(super) async fn watch(budget: Arc<ProcessBudget>, relay: Option<Arc<RawLaneRelay>>) {
    watch_cgroup(CgroupMemory::here(), budget, relay).await;
}

async fn watch_cgroup(
    memory: Option<CgroupMemory>,
    budget: Arc<ProcessBudget>,
    relay: Option<Arc<RawLaneRelay>>,
) {
    if memory.is_none() && relay.is_none() {
        // Nothing to watch; a service that ends would count as failed.
        return std::future::pending().await;
    }
    let (mut now, mut told) = (MemoryPressure::None, MemoryPressure::None);
    let mut told_at: Option<Instant> = None;
    let mut every = tokio::time::interval(EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let limit_bytes = memory.as_ref().map(|memory| memory.limit_bytes);
        let used_bytes = memory.as_ref().and_then(CgroupMemory::used_bytes);
        now = match (used_bytes, limit_bytes) {
            (Some(used), Some(limit)) => pressure(hundredths(used, limit), now),
            // A cgroup that stops reporting must not refuse dials forever.
            _ => MemoryPressure::None,
        };
        budget.set_pressure(now);
        if let Some(relay) = &relay {
            relay.fit_buffers();
        }
        if now != told && told_at.is_none_or(|at| at.elapsed() >= TOLD_EVERY) {
            (told, told_at) = (now, Some(Instant::now()));
            log(now, used_bytes, limit_bytes);
        }
    }
}

fn log(pressure: MemoryPressure, used_bytes: Option<u64>, limit_bytes: Option<u64>) {
    match pressure {
        MemoryPressure::None => {
            tracing::info!(used_bytes, limit_bytes, "memory is no longer short");
        }
        MemoryPressure::High => tracing::info!(
            used_bytes,
            limit_bytes,
            "memory is short: tunnels have small buffers"
        ),
        MemoryPressure::Critical => tracing::warn!(
            used_bytes,
            limit_bytes,
            "memory is nearly used up: dials are refused; raise the memory limit, or run more replicas"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_rises_at_once_and_falls_with_hysteresis() {
        use MemoryPressure::{Critical, High, None};
        let mut now = None;
        for (used, expected) in [
            (0, None),
            (59, None),
            (60, High),
            (50, High),
            (49, None),
            (79, High),
            (80, Critical),
            (75, Critical),
            (74, High),
            (99, Critical),
            (10, None),
        ] {
            now = pressure(used, now);
            assert_eq!(now, expected, "at {used}");
        }
        assert_eq!(hundredths(1, 0), 100);
        assert_eq!(hundredths(u64::MAX, 1), u64::MAX);
    }

    /// Limit (memory): Memory of the cgroup, without pages of files
    #[tokio::test(start_paused = true)]
    async fn budget_follows_the_use_of_the_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        assert!(CgroupMemory::of(folder.path(), 100).is_none());
        let usage = folder.path().join("memory.current");
        let says = |bytes: u64| fs::write(&usage, format!("{bytes}\n")).unwrap();
        says(0);
        fs::write(folder.path().join("memory.stat"), "file 20\nshmem 10\n").unwrap();
        let cgroup = CgroupMemory::of(folder.path(), 100);
        assert!(cgroup.is_some());
        let budget = Arc::new(ProcessBudget::new(1 << 20));
        let watching = watch_cgroup(cgroup, Arc::clone(&budget), None);
        let changing = async {
            // The kernel can reclaim ten of these bytes.
            for (used, [is_half_full, is_full]) in [
                (69, [false, false]),
                (70, [true, false]),
                (90, [true, true]),
                (60, [true, false]),
                (59, [false, false]),
                (99, [true, true]),
            ] {
                says(used);
                tokio::time::sleep(2 * EVERY).await;
                let seen = [budget.is_half_full(), budget.is_full()];
                assert_eq!(seen, [is_half_full, is_full], "at {used}");
            }
            fs::remove_file(&usage).unwrap();
            tokio::time::sleep(2 * EVERY).await;
            assert!(!budget.is_half_full(), "a cgroup that tells no more");
        };
        tokio::select! {
            () = watching => panic!("it watches until dropped"),
            () = changing => (),
        }
    }

    #[test]
    fn reclaimable_memory_does_not_count() {
        let version_2 = "anon 5\nfile 1000\nshmem 300\nslab_reclaimable 20\nslab 50\n";
        assert_eq!(reclaimable_bytes(version_2), 720);
        let version_1 = "cache 7\nshmem 1\ntotal_cache 1000\ntotal_shmem 300\n";
        assert_eq!(reclaimable_bytes(version_1), 700);
        assert_eq!(reclaimable_bytes("nonsense"), 0);
    }
}
