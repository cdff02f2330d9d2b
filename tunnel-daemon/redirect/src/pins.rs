//! Programs that outlive the process: their links are pinned in the file system of bpf(2), one folder for each cgroup.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, PinnedLink};

use crate::command;
use adit_host::mounts;

/// Prefix of folder names; the inode of the cgroup follows.
const PREFIX: &str = "adit-redirect-";

/// Where bpffs is mounted.
///
/// # Errors
/// bpffs is not mounted; the text says what to do.
pub fn bpffs_mount() -> Result<PathBuf, String> {
    let first = mounts::of_kind("bpf")?.into_iter().next();
    first
        .map(|mount| mount.point)
        .ok_or_else(|| "bpffs is mounted nowhere: `mount -t bpf bpf /sys/fs/bpf`".to_owned())
}

/// The folder for the pins of a cgroup, named after its inode, which is the kernel's number of it.
///
/// # Errors
/// No bpffs, or no such cgroup.
pub fn folder(cgroup: &Path) -> Result<PathBuf, String> {
    let inode = fs::metadata(cgroup)
        .map_err(|error| format!("{}: {error}", cgroup.display()))?
        .ino();
    Ok(bpffs_mount()?.join(format!("{PREFIX}{inode}")))
}

/// Makes the folder, empty: old pins in it are removed, which detaches their programs.
///
/// # Errors
/// The error of the file system.
pub fn emptied(folder: &Path) -> io::Result<()> {
    removed(folder)?;
    fs::create_dir(folder)
}

/// The folder for new pins, until it replaces the folder in use.
#[must_use]
pub fn beside(folder: &Path) -> PathBuf {
    // Names in bpffs must not have a dot.
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push("-new");
    folder.with_file_name(name)
}

/// Removes `folder` with its pins, and renames `fresh` to it.
///
/// # Errors
/// The error of the file system.
pub fn replaced(folder: &Path, fresh: &Path) -> io::Result<()> {
    removed(folder)?;
    fs::rename(fresh, folder)
}

/// Removes a folder of new pins that will not be used.
pub fn given_up(fresh: &Path) {
    if let Err(error) = removed(fresh) {
        let folder = fresh.display();
        tracing::warn!(%folder, %error, "cannot remove pinned eBPF programs: they deny connections of captured processes until the folder is removed");
    }
}

/// Removes all pins of a cgroup's folder, if there are any.
///
/// # Errors
/// The error of the file system.
pub fn cleared(folder: &Path) -> io::Result<()> {
    removed(&beside(folder))?;
    removed(folder)
}

/// The readable entries of a folder.
fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Removes the pins for cgroups that are gone. No later call would ask for their folders, which would hold programs and
/// maps until the host restarts. Unreadable folders stay.
pub fn sweep() {
    let Ok(mount) = bpffs_mount() else { return };
    for entry in entries(&mount) {
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

/// Whether a folder has pins, and none of their programs is attached any more: the cgroup was removed.
#[must_use]
pub fn is_over(folder: &Path) -> bool {
    let mut pinned = entries(folder)
        .map(|pin| is_detached(&pin.path()))
        .peekable();
    pinned.peek().is_some() && pinned.all(|is_detached| is_detached)
}

fn is_detached(pin: &Path) -> bool {
    let link = PinnedLink::from_pin(pin).map(FdLink::from);
    // Open until its text is read.
    let Ok(link) = link else { return false };
    let Ok(info) = link.info() else { return false };
    entries(Path::new("/proc/self/fdinfo"))
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|text| is_of_no_cgroup(&text, info.id()))
}

/// Whether a descriptor's text in `/proc` is that of this link, and the link is on no cgroup.
fn is_of_no_cgroup(text: &str, link: u32) -> bool {
    let number = |name: &str| {
        let text = text.lines().find_map(|line| line.strip_prefix(name));
        text.and_then(|number| number.trim().parse::<u64>().ok())
    };
    number("link_id:") == Some(link.into()) && number("cgroup_id:") == Some(0)
}

/// Removes a folder and detaches the programs of its pins. Without an explicit detach, the kernel detaches a program some
/// time after its link's pin is gone. Until then calls that a successor would let through would be denied.
fn removed(folder: &Path) -> io::Result<()> {
    for pin in entries(folder) {
        // A pin that is no link, or is on no cgroup any more, is only removed.
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
    fn a_bpf_link_without_its_cgroup_is_recognised() {
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
    fn a_folder_without_pins_is_not_detached() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_over(dir.path()));
        assert!(!is_over(&dir.path().join("none")));
        // A file that is no link.
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(!is_over(dir.path()));
    }
}
