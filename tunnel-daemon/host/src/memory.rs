//! Memory limit of this process: the tightest limit of its memory cgroups (version 1 or 2), else the machine's memory.

use std::fs;
use std::path::{Path, PathBuf};

use crate::mounts::{self, Mount};

/// Assumed memory if no limit can be read, bytes.
const FALLBACK_BYTES: u64 = 4 << 30;

/// A memory limit and its source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryLimit {
    /// The limit.
    pub bytes: u64,
    /// The file that holds the limit; `None`: the limit is assumed.
    pub file: Option<PathBuf>,
}

/// The memory limit of this process, bytes.
#[must_use]
pub fn limit() -> u64 {
    found().bytes
}

/// The memory limit of this process and its source.
#[must_use]
pub fn found() -> MemoryLimit {
    let of_cgroups = limits_of_cgroups()
        .into_iter()
        .map(|(limit, _folder)| limit);
    let machine = machine_bytes().map(|bytes| (bytes, PathBuf::from("/proc/meminfo")));
    // The machine's limit goes first: a cgroup without a limit shows a larger number, or the same.
    let all = machine.into_iter().chain(of_cgroups);
    match all.min_by_key(|(bytes, _file)| *bytes) {
        Some((bytes, file)) => MemoryLimit {
            bytes,
            file: Some(file),
        },
        None => MemoryLimit {
            bytes: FALLBACK_BYTES,
            file: None,
        },
    }
}

/// The tightest limit of a memory cgroup, bytes, and the folder of this process's own cgroup, which counts its usage.
/// `None` without a limit.
#[must_use]
pub fn of_cgroup() -> Option<(u64, PathBuf)> {
    let limits = limits_of_cgroups().into_iter();
    let ((bytes, _file), folder) = limits.min_by_key(|((bytes, _file), _folder)| *bytes)?;
    // Version 1 shows a huge number where there is no limit.
    (bytes < machine_bytes().unwrap_or(u64::MAX)).then_some((bytes, folder))
}

/// Whether that limit covers the buffers of TCP sockets: in version 2 it does, in version 1 they have a limit of their own.
#[must_use]
pub fn counts_tcp() -> bool {
    of_cgroup().is_some_and(|(_bytes, folder)| folder.join("memory.current").exists())
}

/// The tightest limit of each hierarchy of cgroups, with its file and the folder of this process's own cgroup.
fn limits_of_cgroups() -> Vec<((u64, PathBuf), PathBuf)> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let [unified, controllers] =
        ["cgroup2", "cgroup"].map(|kind| mounts::of_kind(kind).unwrap_or_default());
    let unified = unified.iter().filter_map(|mount| {
        let cgroup = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
        Some((
            tightest(mount, cgroup, "memory.max")?,
            folder(mount, cgroup),
        ))
    });
    let version_1 = controllers
        .iter()
        .filter(|mount| names(&mount.options, "memory"))
        .filter_map(|mount| {
            let cgroup = version_1_path(&cgroups)?;
            let limit = tightest(mount, cgroup, "memory.limit_in_bytes")?;
            Some((limit, folder(mount, cgroup)))
        });
    unified.chain(version_1).collect()
}

fn machine_bytes() -> Option<u64> {
    mem_total(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Whether a comma-separated list contains this name.
fn names(list: &str, name: &str) -> bool {
    list.split(',').any(|one| one == name)
}

/// The memory cgroup of version 1 in the text of `/proc/PID/cgroup`: `4:memory:/a/b`.
fn version_1_path(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        let (_hierarchy, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        names(controllers, "memory").then_some(path)
    })
}

/// The folder of a cgroup. In a container the mount is its cgroup, whatever path the kernel names.
fn folder(mount: &Mount, cgroup: &str) -> PathBuf {
    let below = Path::new(cgroup).strip_prefix(&mount.root);
    match below {
        Ok(below) => mount.point.join(below),
        Err(_elsewhere) => mount.point.clone(),
    }
}

/// The smallest number in files of this name, from a cgroup up to the root of the mount.
fn tightest(mount: &Mount, cgroup: &str, file: &str) -> Option<(u64, PathBuf)> {
    let folder = folder(mount, cgroup);
    let ancestors = folder
        .ancestors()
        .take_while(|folder| folder.starts_with(&mount.point));
    ancestors
        .filter_map(|folder| {
            let file = folder.join(file);
            let bytes = fs::read_to_string(&file).ok()?.trim().parse().ok()?;
            Some((bytes, file))
        })
        .min_by_key(|(bytes, _file)| *bytes)
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

    /// Limit (memory): Bytes held by the process (`--process-budget`)
    #[test]
    fn the_lowest_memory_limit_up_to_the_root_counts() {
        let folder = tempfile::tempdir().unwrap();
        let mount = |root: &str| Mount {
            root: root.into(),
            point: folder.path().to_owned(),
            options: String::new(),
        };
        let leaf = folder.path().join("a/b");
        fs::create_dir_all(&leaf).unwrap();
        fs::write(leaf.join("memory.max"), "max\n").unwrap();
        let middle = folder.path().join("a/memory.max");
        fs::write(&middle, "1000\n").unwrap();
        let limit = |root, cgroup| tightest(&mount(root), cgroup, "memory.max");
        assert_eq!(limit("/", "/a/b"), Some((1000, middle)));
        assert_eq!(limit("/", "/"), None);
        // As in a container: a part of the host's tree is mounted, or the path is that of the host.
        let own = folder.path().join("memory.max");
        fs::write(&own, "2000\n").unwrap();
        assert_eq!(limit("/pods/1", "/pods/1"), Some((2000, own.clone())));
        assert_eq!(limit("/pods/1", "/elsewhere"), Some((2000, own)));
    }

    #[test]
    fn the_memory_cgroup_of_version_1_is_found_among_others() {
        let text = "8:pids:/p\n4:cpu,memory:/docker/a:b\n2:memoryless:/x\n0::/unified\n";
        assert_eq!(version_1_path(text), Some("/docker/a:b"));
        assert_eq!(version_1_path("0::/x\n"), None);
        assert!(names("rw,memory", "memory") && !names("rw,memory_recursiveprot", "memory"));
    }
}
