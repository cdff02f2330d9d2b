//! The cgroup this process is in, as a folder of the cgroup2 file system.

use std::fs;
use std::path::{Path, PathBuf};

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
