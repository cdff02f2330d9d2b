//! This host: its description for readers, the processors a run is confined to, and whether accounting works here.

use std::process::Command;

use anyhow::{Context as _, ensure};
use procfs::Current as _;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use super::peer::Cgroup;
use super::programs::Programs;
use crate::steps::first_line;
use crate::workspace::Workspace;

/// Commit, machine and kernel, for people.
pub(crate) fn machine(workspace: &Workspace) -> String {
    let commit = workspace.commit();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let processors = procfs::CpuInfo::current().ok();
    let processor = processors.and_then(|all| all.model_name(0).map(str::to_owned));
    let processor = processor.unwrap_or_else(|| "unnamed processor".to_owned());
    let kernel = first_line(Command::new("uname").arg("-sr")).unwrap_or_default();
    format!("commit {commit}, {cores} cores of {processor}, {kernel}")
}

/// Confines this thread, and processes it starts from here on, to a few processors until dropped. With one processor no request
/// waits for an idle one to wake up, which in a virtual machine takes the longest and varies over minutes. Rows of equal
/// programs then differ less, and small costs show.
pub(super) struct Confined {
    before: CpuSet,
}

impl Confined {
    /// Confines to the last `count` processors of this process: interrupts mostly go to the first.
    ///
    /// # Errors
    /// There are fewer processors, or the kernel refuses.
    pub(super) fn to(count: usize) -> anyhow::Result<Self> {
        let before =
            sched_getaffinity(None).context("asking for the processors of this process")?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|cpu| before.is_set(*cpu))
            .collect();
        ensure!(
            (1..=all.len()).contains(&count),
            "processors = {count}: this process may use {}; ask for 1 to so many",
            all.len()
        );
        let mut chosen = CpuSet::new();
        for cpu in all.iter().rev().take(count) {
            chosen.set(*cpu);
        }
        sched_setaffinity(None, &chosen).context("keeping to some processors")?;
        Ok(Self { before })
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        if let Err(error) = sched_setaffinity(None, &self.before) {
            eprintln!("perf: what follows keeps to the same processors: {error}");
        }
    }
}

/// Why the cost of accounting cannot be measured here, as this tree's release build reports it; `None` if it can.
///
/// # Errors
/// The build fails, or its report cannot be read.
pub(crate) fn why_not_accounted(workspace: &Workspace) -> anyhow::Result<Option<String>> {
    let adit = Programs::new(workspace, None)?.adit()?;
    // Only features that flags need are judged. An agent's other flags must be present, but need not be valid.
    let flags = "--proxy-server-host=127.0.0.1 --ca-cert=/dev/null --account=on";
    let mut check = Command::new(adit);
    check.args(["check", "--json", "agent"]);
    let out = check.args(flags.split(' ')).output()?;
    let refused = lacks_for_accounting(&out.stdout).context("reading adit check --json")?;
    Ok(refused.or_else(|| Cgroup::new().err().map(|why| format!("{why:#}"))))
}

fn lacks_for_accounting(checked: &[u8]) -> anyhow::Result<Option<String>> {
    let checked: Value = serde_json::from_slice(checked)?;
    let lines = checked["lines"].as_array().context("it has no lines")?;
    for needed in ["cgroup2", "ebpf"] {
        let line = lines.iter().find(|line| line["name"] == needed);
        let line = line.with_context(|| format!("it says nothing of {needed}"))?;
        ensure!(line["verdict"] != "info", "{needed} is not judged");
        if line["verdict"] != "ok" {
            let text = line["text"].as_str().unwrap_or_default();
            return Ok(Some(format!("{needed}: {text}")));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounting_is_measured_where_adit_check_reports_support() {
        let lacks = |cgroup2: &str, ebpf: &str| {
            let text = format!(
                r#"{{"lines":[{{"name":"cgroup2","verdict":"{cgroup2}","text":"a"}},
                {{"name":"ebpf","verdict":"{ebpf}","text":"no right"}}]}}"#
            );
            lacks_for_accounting(text.as_bytes())
        };
        assert_eq!(lacks("ok", "ok").unwrap(), None);
        assert_eq!(lacks("ok", "missing").unwrap().unwrap(), "ebpf: no right");
        // Words that are not there any more would skip the measurement for ever.
        assert!(lacks_for_accounting(br#"{"lines":[]}"#).is_err());
        assert!(lacks("info", "ok").is_err());
    }

    /// A test has a thread of its own, and processors belong to threads.
    #[test]
    fn programs_are_confined_to_processors_until_the_guard_is_dropped() {
        let allowed = || first_line(Command::new("nproc").env_remove("OMP_NUM_THREADS"));
        let before = allowed();
        let confined = Confined::to(1).unwrap();
        assert_eq!(allowed().as_deref(), Some("1"));
        drop(confined);
        assert_eq!(allowed(), before);
        assert!(Confined::to(0).is_err() && Confined::to(CpuSet::MAX_CPU + 1).is_err());
    }
}
