//! A bpffs for pins.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::Command;

use adit_redirect::pins::bpffs_mount;

use super::privilege::{ready, skip};

/// The host's bpffs, or a bpffs of the tests. Every program that finds it mounted pins there, and tests run in several
/// processes. So the last user unmounts it.
pub(crate) struct Bpffs {
    /// Lock that all users of the tests' bpffs share.
    uses: Option<File>,
}

/// Mount point of the tests' bpffs.
fn folder() -> PathBuf {
    env::temp_dir().join("adit-tests-bpffs")
}

/// A lock file that all test processes share. The kernel releases the locks of a killed process.
fn lock(name: &str) -> File {
    let path = folder().with_extension(name);
    let made = File::create(&path).or_else(|_not_ours| File::open(&path));
    made.expect("a file for a lock")
}

/// Lets one process at a time mount or unmount.
fn turn() -> File {
    let turn = lock("turn");
    turn.lock().expect("files can be locked");
    turn
}

impl Bpffs {
    /// As [`Bpffs::somewhere`], on a host that permits the test. Otherwise prints that the test is skipped.
    pub(crate) fn ready(test: &str) -> Option<Self> {
        if !ready(test) {
            return None;
        }
        let mounted = Self::somewhere();
        mounted.map_err(|why| skip(test, why)).ok()
    }

    pub(crate) fn somewhere() -> Result<Self, String> {
        let _turn = turn();
        match bpffs_mount() {
            Ok(path) if path == folder() => (),
            Ok(_the_hosts) => return Ok(Self { uses: None }),
            Err(_none) => mount()?,
        }
        let uses = lock("uses");
        uses.lock_shared().expect("files can be locked");
        Ok(Self { uses: Some(uses) })
    }
}

fn mount() -> Result<(), String> {
    fs::create_dir_all(folder()).expect("a directory");
    let mount = Command::new("mount")
        .args(["-t", "bpf", "bpf"])
        .arg(folder())
        .output();
    match mount {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("mount: {error}")),
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let Some(uses) = &self.uses else { return };
        let _turn = turn();
        let _ours = uses.unlock();
        if uses.try_lock().is_ok() {
            // Unmounting removes the pins.
            let _unmounted = Command::new("umount").arg(folder()).status();
            let _removed = fs::remove_dir(folder());
        }
    }
}

/// Whether unprivileged users may create folders there. The kernel's default permits it, systemd's mount does not.
pub(crate) fn open_to_all() -> Result<(), String> {
    let path = bpffs_mount()?;
    let meta = fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    if meta.mode() & 0o003 == 0o003 {
        return Ok(());
    }
    Err(format!("{} is closed to other users", path.display()))
}
