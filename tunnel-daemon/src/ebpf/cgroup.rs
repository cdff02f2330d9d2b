//! Cgroups as folders of the cgroup2 file system: the one this process is in, and those that look like all of them.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Inode of the cgroup that all others are below, in every kernel.
const ROOT: u64 = 1;

/// What a cgroup is for which [`is_part_of_host`] holds.
pub const PART_OF_HOST: &str =
    "a part of the host only: what is mounted there is not the root of all cgroups";
/// What to do about it.
pub const WHOLE_HOST: &str = "run it in the host's cgroup namespace, or mount the host's /sys/fs/cgroup into its \
     container and name that";

/// Whether cgroup2 is mounted at that path, but only a part of its tree, which looks like all of it: as in a container with a
/// cgroup namespace of its own. A folder further down is no more than it seems to be. False, too, where nothing tells.
#[must_use]
pub fn is_part_of_host(path: &Path) -> bool {
    // Of the path as given: what leads into another process's tree (/proc/PID/root) has no other name.
    let inode = fs::metadata(path).map(|folder| folder.ino());
    let mounts = fs::read_to_string("/proc/self/mountinfo");
    match (inode, path.canonicalize(), mounts) {
        (Ok(inode), Ok(at), Ok(mounts)) => is_part(&mounts, &at, inode),
        _ => false,
    }
}

/// By the inode. The root that mountinfo names is seen from our own namespace: its part is `/` there, and the host's whole tree,
/// where that is mounted, too, is `/..`.
fn is_part(mounts: &str, at: &Path, inode: u64) -> bool {
    let mut mounted = mounts.lines().filter_map(cgroup2_mount);
    inode != ROOT && mounted.any(|(_, mount)| Path::new(mount) == at)
}

/// The folder of our own cgroup. On hosts with both versions of cgroups that is the one of version 2.
///
/// # Errors
/// There is none, or it is not below what is mounted here; the text says what to do.
pub fn own() -> Result<PathBuf, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    own_of(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?)
}

fn own_of(mounts: &str, cgroups: &str) -> Result<PathBuf, String> {
    // Version 2 has hierarchy number 0 and names no controllers.
    let path = cgroups
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .ok_or_else(|| {
            "/proc/self/cgroup names no cgroup of version 2: mount cgroup2".to_owned()
        })?;
    let mut elsewhere = None;
    for (root, mount) in mounts.lines().filter_map(cgroup2_mount) {
        match Path::new(path).strip_prefix(root) {
            Ok(below) => return Ok(Path::new(mount).join(below)),
            Err(_outside) => elsewhere = Some(mount),
        }
    }
    Err(match elsewhere {
        Some(mount) => format!(
            "our cgroup {path} is not below what is mounted at {mount}: mount the cgroup2 file system of our own \
             cgroup namespace there"
        ),
        None => "cgroup2 is mounted nowhere: `mount -t cgroup2 none /sys/fs/cgroup`".to_owned(),
    })
}

/// Root and mount point of a line of mountinfo that is a cgroup2 mount.
fn cgroup2_mount(line: &str) -> Option<(&str, &str)> {
    let (head, tail) = line.split_once(" - ")?;
    if tail.split(' ').next()? != "cgroup2" {
        return None;
    }
    // Fields: id, parent, device, root, mount point.
    let mut fields = head.split(' ').skip(3);
    Some((fields.next()?, fields.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "33 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
         32 31 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw\n";

    #[test]
    fn our_folder_is_below_the_mount_of_version_2() {
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
    }

    #[test]
    fn a_mount_of_less_than_all_cgroups_is_a_part_of_the_host() {
        // As a container with a cgroup namespace of its own sees them.
        let container = "58 48 0:38 /.. /host/cgroup rw - cgroup2 cgroup2 rw\n\
             65 44 0:38 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let bound = "32 31 0:27 /pods/a /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        for (mounts, at, inode, is_so) in [
            (HYBRID, "/sys/fs/cgroup/unified", 1, false),
            // The part is called `/`, the host's tree is not: only the inode tells them apart.
            (container, "/sys/fs/cgroup", 11_539, true),
            (container, "/host/cgroup", 1, false),
            (bound, "/sys/fs/cgroup", 11_539, true),
            // Whoever names these means no more than them.
            (HYBRID, "/sys/fs/cgroup/unified/a.slice", 11_539, false),
            (container, "/host/cgroup/a.slice", 11_539, false),
            // Of version 1, which is refused elsewhere.
            (HYBRID, "/sys/fs/cgroup/cpu", 11_539, false),
        ] {
            let found = is_part(mounts, Path::new(at), inode);
            assert_eq!(found, is_so, "{at} with inode {inode} in\n{mounts}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_part_of_host(dir.path()));
        assert!(!is_part_of_host(&dir.path().join("none")));
    }

    #[test]
    fn what_is_missing_is_named() {
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
