//! Processes with a memory limit of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use super::process::{Process, program};

/// A memory cgroup of either version at the root of its hierarchy, removed when dropped.
pub(crate) struct MemoryCgroup {
    path: PathBuf,
    usage: &'static str,
}

impl MemoryCgroup {
    pub(crate) fn new(name: &str, bytes: u64) -> Result<Self, String> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Relaxed);
        let name = format!("adit-test-{name}-{}-{number}", std::process::id());
        let (root, limit, usage) = [
            (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.max_usage_in_bytes",
            ),
            ("/sys/fs/cgroup", "memory.max", "memory.peak"),
        ]
        .into_iter()
        .find(|(root, _, _)| {
            Path::new(root).join("memory.limit_in_bytes").exists()
                || Path::new(root).join("cgroup.controllers").exists()
        })
        .ok_or("no memory cgroups are mounted")?;
        if limit == "memory.max" {
            // Fails if the controller is enabled already or belongs to others. Writing the limit below shows whether it is
            // available.
            let _on = fs::write(Path::new(root).join("cgroup.subtree_control"), "+memory");
        }
        let path = Path::new(root).join(name);
        let cgroup = Self { path, usage };
        // Removes the cgroup of a killed process with the same id.
        let _none = fs::remove_dir(&cgroup.path);
        fs::create_dir(&cgroup.path).map_err(|error| format!("no cgroup can be made: {error}"))?;
        fs::write(cgroup.path.join(limit), bytes.to_string())
            .map_err(|error| format!("no limit can be set: {error}"))?;
        Ok(cgroup)
    }

    /// Starts the program in this cgroup. `args[0]`, its name, is not used.
    pub(crate) fn start(&self, name: &str, args: &[String], dir: &Path) -> Process {
        let program = program();
        let procs = self.path.join("cgroup.procs");
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(procs)
            .arg(program)
            .args(args.get(1..).unwrap_or_default());
        Process::start_command(name, command, dir)
    }

    pub(crate) fn is_version_2(&self) -> bool {
        self.path.join("memory.max").exists()
    }

    pub(crate) fn most_bytes(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.usage)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // The last process may still be exiting.
        for _try in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
