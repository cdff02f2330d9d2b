//! A place for pins.

use std::process::Command;

use adit::ebpf::pins::bpffs_mount;
use tempfile::TempDir;

/// The host's bpffs, or one of the test's own that goes with it.
pub(crate) struct Bpffs(Option<TempDir>);

impl Bpffs {
    pub(crate) fn somewhere() -> Result<Self, String> {
        if bpffs_mount().is_ok() {
            return Ok(Self(None));
        }
        let dir = TempDir::new().expect("a directory");
        let mount = Command::new("mount")
            .args(["-t", "bpf", "bpf"])
            .arg(dir.path())
            .output();
        match mount {
            Ok(output) if output.status.success() => Ok(Self(Some(dir))),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("mount: {error}")),
        }
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        if let Some(dir) = &self.0 {
            // What is pinned in it goes with it.
            let _unmounted = Command::new("umount").arg(dir.path()).status();
        }
    }
}
