//! Cgroups as folders of the cgroup2 file system: the cgroup of this process, and mounts that show only a part of the tree.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::mounts::{self, Mount};

/// Inode of the root cgroup, in every kernel.
const ROOT: u64 = 1;
const CGROUP2: &str = "cgroup2";

/// Description of a cgroup for which [`is_part_of_host`] holds.
pub const PART_OF_HOST: &str =
    "only a part of the host: the mounted cgroup2 is not the root of the cgroup hierarchy";
/// Remedy for [`PART_OF_HOST`].
pub const WHOLE_HOST: &str = "run it in the host's cgroup namespace, or mount the host's /sys/fs/cgroup into its \
     container and name that";

/// Whether the mount of cgroup2 at `path` shows only a part of the tree as its root, as in a container with its own cgroup
/// namespace. False for folders further down, and where the path or the mounts cannot be read.
#[must_use]
pub fn is_part_of_host(path: &Path) -> bool {
    // Of the path as given: a path into another process's tree (/proc/PID/root) has no other name.
    let inode = fs::metadata(path).map(|folder| folder.ino());
    let mounts = mounts::of_kind(CGROUP2);
    match (inode, path.canonicalize(), mounts) {
        (Ok(inode), Ok(at), Ok(mounts)) => is_part(&mounts, &at, inode),
        _ => false,
    }
}

/// Compares inodes, since mountinfo names roots as our own cgroup namespace sees them: its part is `/`, and the host's
/// whole tree is `/..`.
fn is_part(mounts: &[Mount], at: &Path, inode: u64) -> bool {
    inode != ROOT && mounts.iter().any(|mount| mount.point == at)
}

/// Where cgroup2 is mounted. Hosts with both versions mount it beside version 1.
///
/// # Errors
/// cgroup2 is not mounted; the text says what to do.
pub fn cgroup2_mount() -> Result<PathBuf, String> {
    let first = mounts::of_kind(CGROUP2)?.into_iter().next();
    first.map(|mount| mount.point).ok_or_else(|| {
        "cgroup2 is mounted nowhere: `mount -t cgroup2 none /sys/fs/cgroup`".to_owned()
    })
}

/// The folder of our own cgroup; on hosts with both versions, of version 2.
///
/// # Errors
/// There is no such cgroup, or it is not below a mount; the text says what to do.
pub fn own() -> Result<PathBuf, String> {
    let path = "/proc/self/cgroup";
    let cgroups = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    own_of(&mounts::of_kind(CGROUP2)?, &cgroups)
}

/// Paths in `cgroups` have no escapes.
fn own_of(mounts: &[Mount], cgroups: &str) -> Result<PathBuf, String> {
    // Version 2 has hierarchy number 0 and names no controllers.
    let path = cgroups
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .ok_or_else(|| {
            "/proc/self/cgroup names no cgroup of version 2: mount cgroup2".to_owned()
        })?;
    let mut elsewhere = None;
    for Mount { root, point, .. } in mounts {
        match Path::new(path).strip_prefix(root) {
            Ok(below) => return Ok(point.join(below)),
            Err(_outside) => elsewhere = Some(point),
        }
    }
    Err(match elsewhere {
        Some(point) => format!(
            "our cgroup {path} is not below what is mounted at {}: mount the cgroup2 file system of our own cgroup \
             namespace there",
            point.display()
        ),
        None => "cgroup2 is mounted nowhere: `mount -t cgroup2 none /sys/fs/cgroup`".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "33 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
         32 31 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw\n";

    fn own_of(mounts: &str, cgroups: &str) -> Result<PathBuf, String> {
        super::own_of(&mounts::among(mounts.as_bytes(), CGROUP2), cgroups)
    }

    #[test]
    fn own_cgroup_is_found_below_the_cgroup2_mount() {
        let cgroups = "5:cpu:/x\n0::/system.slice/adit.service\n";
        assert_eq!(
            own_of(HYBRID, cgroups),
            Ok(PathBuf::from(
                "/sys/fs/cgroup/unified/system.slice/adit.service"
            ))
        );
        // Only a part of the tree is mounted, as in some containers.
        let part = "32 31 0:27 /pods/a /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            own_of(part, "0::/pods/a/adit\n"),
            Ok(PathBuf::from("/sys/fs/cgroup/adit"))
        );
        assert_eq!(
            own_of(HYBRID, "0::/\n"),
            Ok(PathBuf::from("/sys/fs/cgroup/unified/"))
        );
        // The kernel escapes characters in mountinfo, but not in `/proc/self/cgroup`.
        let escaped =
            "32 31 0:27 /my\\040pods/a\\134x2d1 /my\\040cgroups rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            own_of(escaped, "0::/my pods/a\\x2d1/b c\n"),
            Ok(PathBuf::from("/my cgroups/b c"))
        );
    }

    /// Limit (redirect): A cgroup namespace that shows a part of the host as its root | logged as a part
    #[test]
    fn a_partial_cgroup_mount_is_recognized() {
        // The view of a container with its own cgroup namespace.
        let container = "58 48 0:38 /.. /host/cgroup rw - cgroup2 cgroup2 rw\n\
             65 44 0:38 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let bound = "32 31 0:27 /pods/a /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let escaped = "32 31 0:27 /pods/a /my\\040cgroups rw - cgroup2 cgroup2 rw\n";
        for (mounts, at, inode, is_so) in [
            (HYBRID, "/sys/fs/cgroup/unified", 1, false),
            // The partial tree is called `/`, and the host's tree is not: only the inode distinguishes them.
            (container, "/sys/fs/cgroup", 11_539, true),
            (container, "/host/cgroup", 1, false),
            (bound, "/sys/fs/cgroup", 11_539, true),
            // A path that names a child cgroup is not taken for the whole host.
            (HYBRID, "/sys/fs/cgroup/unified/a.slice", 11_539, false),
            (container, "/host/cgroup/a.slice", 11_539, false),
            // cgroup v1, which is refused elsewhere.
            (HYBRID, "/sys/fs/cgroup/cpu", 11_539, false),
            (escaped, "/my cgroups", 11_539, true),
        ] {
            let mounted = mounts::among(mounts.as_bytes(), CGROUP2);
            let found = is_part(&mounted, Path::new(at), inode);
            assert_eq!(found, is_so, "{at} with inode {inode} in\n{mounts}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_part_of_host(dir.path()));
        assert!(!is_part_of_host(&dir.path().join("none")));
    }

    #[test]
    fn cgroup_lookup_errors_name_the_cause() {
        let error = own_of(HYBRID, "5:cpu:/x\n").unwrap_err();
        assert!(error.contains("version 2"), "{error}");
        let error = own_of("", "0::/a\n").unwrap_err();
        assert!(error.contains("mounted nowhere"), "{error}");
        let part = "32 31 0:27 /pods/a /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let error = own_of(part, "0::/../b\n").unwrap_err();
        assert!(
            error.contains("/../b") && error.contains("/sys/fs/cgroup"),
            "{error}"
        );
    }
}
