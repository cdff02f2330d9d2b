//! A test's own cgroup, which is removed with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use adit_host::cgroup::cgroup2_mount;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A cgroup below the mount. Processes in it must end before it is dropped.
pub struct Cgroup(PathBuf);

impl Cgroup {
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        let mount = cgroup2_mount().expect("checked before");
        let name = format!(
            "adit-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Relaxed)
        );
        let path = mount.join(name);
        // Left behind by a killed process with the same id.
        let _none = fs::remove_dir(&path);
        fs::create_dir(&path).expect("root makes cgroups");
        Self(path)
    }

    /// A child cgroup. Drop it before its parent.
    pub fn below(&self) -> Self {
        let path = self.0.join("below");
        fs::create_dir(&path).expect("root makes cgroups");
        Self(path)
    }

    /// The flag of a server or agent that captures the cgroup's processes.
    pub fn flag(&self) -> String {
        format!("--redirect-cgroup={}", self.path().display())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A killed process leaves the cgroup with a delay.
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
}

/// Moves the calling process. Sockets that it creates afterwards belong to the cgroup.
pub fn enter(path: &Path) {
    fs::write(path.join("cgroup.procs"), "0").expect("the cgroup takes processes");
}
