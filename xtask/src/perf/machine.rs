//! What a reader needs to trust the numbers: commit, machine, kernel.

use std::fs;

use crate::workspace::Workspace;

/// See the module.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Machine {
    commit: String,
    cores: usize,
    processor: String,
    kernel: String,
}

impl Machine {
    /// This one.
    pub(crate) fn here(workspace: &Workspace) -> Self {
        let uname = workspace.command("uname").arg("-sr").output();
        let kernel = uname.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
        let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = processors
            .lines()
            .find_map(|line| line.strip_prefix("model name"))
            .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned());
        Self {
            commit: workspace.commit(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            processor: processor.unwrap_or_else(|| "unnamed processor".to_owned()),
            kernel: kernel.unwrap_or_default(),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            commit,
            cores,
            processor,
            kernel,
        } = self;
        write!(f, "commit {commit}, {cores} cores of {processor}, {kernel}")
    }
}
