//! Programs that outlive the process, by links that are pinned in the file system of bpf(2): one folder for each cgroup.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Where bpffs is mounted.
///
/// # Errors
/// It is mounted nowhere; the text says what to do.
pub fn bpffs_mount() -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| format!("/proc/self/mountinfo: {error}"))?;
    super::caps::mount_of(&mounts, "bpf")
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
    Ok(bpffs_mount()?.join(format!("adit-redirect-{inode}")))
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

/// Lets go of all that is pinned there, if anything is.
///
/// # Errors
/// What the file system says.
pub fn cleared(folder: &Path) -> io::Result<()> {
    removed(&beside(folder))?;
    removed(folder)
}

fn removed(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
