//! How much memory this process may use: its cgroup's limit, else the machine's.

use std::fs;
use std::path::{Path, PathBuf};

/// Assumed where nothing can be read, bytes.
const FALLBACK_BYTES: u64 = 4 << 30;
/// Where cgroup2 may be mounted: plain and hybrid hosts.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// The smallest `memory.max` from this process's cgroup2 up to the root, else `MemTotal`, bytes.
#[must_use]
pub(super) fn limit() -> u64 {
    let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = cgroup
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/");
    let limits = MOUNTS
        .iter()
        .filter_map(|mount| tightest(Path::new(mount), path));
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_total(&text));
    limits.chain(machine).min().unwrap_or(FALLBACK_BYTES)
}

fn tightest(mount: &Path, cgroup: &str) -> Option<u64> {
    let mut dir = PathBuf::from(mount);
    dir.push(cgroup.trim_start_matches('/'));
    let ancestors = dir.ancestors().take_while(|dir| dir.starts_with(mount));
    ancestors
        .filter_map(|dir| {
            fs::read_to_string(dir.join("memory.max"))
                .ok()?
                .trim()
                .parse()
                .ok()
        })
        .min()
}

fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_memory_is_read_in_bytes() {
        assert_eq!(
            mem_total("MemTotal:       24576000 kB\nMemFree: 1 kB\n"),
            Some(24_576_000 * 1024)
        );
        assert_eq!(mem_total("nonsense"), None);
    }

    #[test]
    fn the_tightest_limit_on_the_way_to_the_root_counts() {
        let mount = tempfile::tempdir().unwrap();
        let leaf = mount.path().join("a/b");
        fs::create_dir_all(&leaf).unwrap();
        fs::write(leaf.join("memory.max"), "max\n").unwrap();
        fs::write(mount.path().join("a/memory.max"), "1000\n").unwrap();
        assert_eq!(tightest(mount.path(), "/a/b"), Some(1000));
        assert_eq!(tightest(mount.path(), "/"), None);
    }
}
