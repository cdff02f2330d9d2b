//! The cgroup of `adit demo --redirect`: connections of the processes in it are captured.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::ebpf_flags;
use adit_host::cgroup;

/// A cgroup below this process's own, removed on drop.
pub(super) struct CapturedCgroup(PathBuf);

impl CapturedCgroup {
    /// Creates the cgroup.
    ///
    /// # Errors
    /// cgroup2 is not mounted or not writable, or this binary has no redirect.
    pub(super) fn make() -> anyhow::Result<Self> {
        ebpf_flags::check("--redirect")?;
        let own = cgroup::own().map_err(anyhow::Error::msg)?;
        let path = own.join(format!("adit-demo-{}", std::process::id()));
        fs::create_dir(&path)
            .with_context(|| format!("a cgroup for captured processes, {}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// File to which a process writes its id to be captured.
    pub(super) fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for CapturedCgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::debug!(%error, cgroup = %self.0.display(), "cannot remove the cgroup of captured processes");
        }
    }
}
