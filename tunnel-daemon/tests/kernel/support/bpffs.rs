//! A place for pins.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use adit::ebpf::pins::bpffs_mount;
use tempfile::TempDir;

/// The tests' own, for as long as one of them has use for it: whoever finds it mounted pins there, whose ever it is.
static OURS: Mutex<Option<Ours>> = Mutex::new(None);

struct Ours {
    dir: TempDir,
    users: usize,
}

/// The host's bpffs, or one of the tests' own that goes with the last of these.
pub(crate) struct Bpffs;

impl Bpffs {
    pub(crate) fn somewhere() -> Result<Self, String> {
        let mut ours = ours();
        if let Some(ours) = ours.as_mut() {
            ours.users += 1;
            return Ok(Self);
        }
        if bpffs_mount().is_ok() {
            return Ok(Self);
        }
        let dir = TempDir::new().expect("a directory");
        let mount = Command::new("mount")
            .args(["-t", "bpf", "bpf"])
            .arg(dir.path())
            .output();
        match mount {
            Ok(output) if output.status.success() => {
                *ours = Some(Ours { dir, users: 1 });
                Ok(Self)
            }
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("mount: {error}")),
        }
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let mut ours = ours();
        // None: the host's, which was there before any of these.
        if let Some(mounted) = ours.as_mut() {
            mounted.users -= 1;
            if mounted.users == 0 {
                // What is pinned in it goes with it.
                let _unmounted = Command::new("umount").arg(mounted.dir.path()).status();
                *ours = None;
            }
        }
    }
}

fn ours() -> MutexGuard<'static, Option<Ours>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether users that own nothing may make folders there. The kernel's default is yes, and systemd's no.
pub(crate) fn open_to_all() -> Result<(), String> {
    let path = bpffs_mount()?;
    let meta = fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    if meta.mode() & 0o003 == 0o003 {
        return Ok(());
    }
    Err(format!("{} is closed to other users", path.display()))
}
