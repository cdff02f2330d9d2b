//! A limit on the memory that TCP takes for the sockets of some processes, gone with its test.
//!
//! Of version 1 of the memory controller, which counts TCP apart. Version 2 has one limit for all that a process uses, and
//! ends whoever is over it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A cgroup below this process's own, empty at first. Drop processes in it first.
pub(crate) struct TcpMemory(PathBuf);

impl TcpMemory {
    /// Sockets that processes make in it take that many bytes in all.
    ///
    /// # Errors
    /// What this host lacks.
    pub(crate) fn limited(bytes: u64) -> Result<Self, String> {
        let own = own_folder().ok_or("no memory controller of version 1 is mounted")?;
        let number = NEXT.fetch_add(1, Relaxed);
        let path = own.join(format!("adit-test-tcp-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let memory = Self(path);
        let limit = memory.0.join("memory.kmem.tcp.limit_in_bytes");
        fs::write(&limit, bytes.to_string())
            .map_err(|error| format!("{}: {error}", limit.display()))?;
        Ok(memory)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TcpMemory {
    fn drop(&mut self) {
        // A process that was killed leaves it a moment later.
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
}

/// Where this process is in the controller's hierarchy.
fn own_folder() -> Option<PathBuf> {
    let is_memory = |names: &str| names.split(',').any(|name| name == "memory");
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mount = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let place = words.next()?;
        (words.next()? == "cgroup" && is_memory(words.next()?)).then_some(place)
    })?;
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = cgroups.lines().find_map(|line| {
        let (_number, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        is_memory(controllers).then_some(path)
    })?;
    let folder = Path::new(mount).join(own.trim_start_matches('/'));
    folder.is_dir().then_some(folder)
}
