//! Programs that outlive the process, by links that are pinned in the file system of bpf(2): one folder for each cgroup.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, PinnedLink};

use crate::command;
use adit_net::mounts;

/// What names of folders begin with; the inode of their cgroup follows.
const PREFIX: &str = "adit-redirect-";

/// Where bpffs is mounted.
///
/// # Errors
/// It is mounted nowhere; the text says what to do.
pub fn bpffs_mount() -> Result<PathBuf, String> {
    let first = mounts::of_kind("bpf")?.into_iter().next();
    first
        .map(|mount| mount.point)
        .ok_or_else(|| "bpffs is mounted nowhere: `mount -t bpf bpf /sys/fs/bpf`".to_owned())
}

/// The folder of what is pinned for a cgroup: named after its inode, which is what the kernel calls it.
///
/// # Errors
/// No bpffs, or no such cgroup.
pub fn folder(cgroup: &Path) -> Result<PathBuf, String> {
    let inode = fs::metadata(cgroup)
        .map_err(|error| format!("{}: {error}", cgroup.display()))?
        .ino();
    Ok(bpffs_mount()?.join(format!("{PREFIX}{inode}")))
}

/// Makes the folder, empty: what was pinned there is let go, and detached with that.
///
/// # Errors
/// What the file system says.
pub fn emptied(folder: &Path) -> io::Result<()> {
    removed(folder)?;
    fs::create_dir(folder)
}

/// The folder of what is being pinned, until it takes the place of the other.
#[must_use]
pub fn beside(folder: &Path) -> PathBuf {
    // Names there may not have a dot.
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push("-new");
    folder.with_file_name(name)
}

/// Lets go of what is pinned in `folder`, and has `fresh` take its place.
///
/// # Errors
/// What the file system says.
pub fn replaced(folder: &Path, fresh: &Path) -> io::Result<()> {
    removed(folder)?;
    fs::rename(fresh, folder)
}

/// Lets go of what was to take a place and does not.
pub fn given_up(fresh: &Path) {
    if let Err(error) = removed(fresh) {
        let folder = fresh.display();
        tracing::warn!(%folder, %error, "what is pinned there denies calls until the folder is removed");
    }
}

/// Lets go of all that is pinned there, if anything is.
///
/// # Errors
/// What the file system says.
pub fn cleared(folder: &Path) -> io::Result<()> {
    removed(&beside(folder))?;
    removed(folder)
}

/// Lets go of all that is pinned for cgroups that were removed, whose folders nobody would ask for again: it would hold programs
/// and maps until the host restarts. What cannot be looked at stays.
pub fn sweep() {
    let Ok(mount) = bpffs_mount() else { return };
    for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
        let is_ours = entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(PREFIX.as_bytes());
        let folder = entry.path();
        if is_ours
            && is_over(&folder)
            && let Err(error) = removed(&folder)
        {
            let folder = folder.display();
            tracing::debug!(%folder, %error, "what is pinned for a cgroup that is gone stays");
        }
    }
}

/// Whether something is pinned in a folder, and nothing of it is attached any more: its cgroup was removed.
#[must_use]
pub fn is_over(folder: &Path) -> bool {
    let mut pinned = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|pin| is_detached(&pin.path()))
        .peekable();
    pinned.peek().is_some() && pinned.all(|is_detached| is_detached)
}

fn is_detached(pin: &Path) -> bool {
    let link = PinnedLink::from_pin(pin).map(FdLink::from);
    // Open until its text was read.
    let Ok(link) = link else { return false };
    let Ok(info) = link.info() else { return false };
    fs::read_dir("/proc/self/fdinfo")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|text| is_of_no_cgroup(&text, info.id()))
}

/// Whether a descriptor, by its text in `/proc`, is that of this link, and the link is on no cgroup.
fn is_of_no_cgroup(text: &str, link: u32) -> bool {
    let number = |name: &str| {
        let text = text.lines().find_map(|line| line.strip_prefix(name));
        text.and_then(|number| number.trim().parse::<u64>().ok())
    };
    number("link_id:") == Some(link.into()) && number("cgroup_id:") == Some(0)
}

/// Programs are off their cgroups when this returns: without being told to detach, the kernel does it some time after a link's pin
/// is gone, and calls that a successor would let through would be denied until then.
fn removed(folder: &Path) -> io::Result<()> {
    for pin in fs::read_dir(folder).into_iter().flatten().flatten() {
        // What is no link, or on no cgroup any more, is only removed.
        let _detached = command::detach_pinned(&pin.path());
    }
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_whose_cgroup_is_gone_is_told_from_others() {
        let text = |link: u32, cgroup: u64| {
            format!(
                "pos:\t0\nflags:\t02000000\nlink_type:\tcgroup\nlink_id:\t{link}\ncgroup_id:\t{cgroup}\nattach_type:\t10\n"
            )
        };
        assert!(is_of_no_cgroup(&text(7, 0), 7));
        assert!(!is_of_no_cgroup(&text(7, 4711), 7));
        assert!(!is_of_no_cgroup(&text(8, 0), 7));
        // Another kind of link, or no link.
        assert!(!is_of_no_cgroup("link_id:\t7\n", 7));
        assert!(!is_of_no_cgroup("pos:\t0\n", 0));
    }

    #[test]
    fn a_folder_without_pins_is_not_over() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_over(dir.path()));
        assert!(!is_over(&dir.path().join("none")));
        // No link.
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(!is_over(dir.path()));
    }
}
