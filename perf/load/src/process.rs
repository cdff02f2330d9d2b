//! Statistics of processes and the kernel, read from `/proc`.

use std::str::FromStr;

use anyhow::{Context as _, bail};
use procfs::{Current as _, ProcResult};

/// A measured process.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    /// `server`, `agent`, or the peer's name for it.
    pub(crate) role: String,
    id: u32,
}

impl FromStr for Process {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((role, id)) = text.split_once('=') else {
            bail!("{text:?}: write ROLE=PID");
        };
        let id = id
            .parse()
            .with_context(|| format!("{text:?}: PID is no number"))?;
        Ok(Self {
            role: role.to_owned(),
            id,
        })
    }
}

impl Process {
    /// Resident memory, KiB.
    ///
    /// # Errors
    /// The process has ended, which makes the measurement worthless.
    pub(crate) fn resident_kib(&self) -> anyhow::Result<f64> {
        let kib = self.read(procfs::process::Process::status)?.vmrss;
        let kib = kib.with_context(|| format!("{}: no VmRSS", self.role))?;
        Ok(kib as f64)
    }

    /// User and system time so far, seconds.
    ///
    /// # Errors
    /// The process has ended.
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let stat = self.read(procfs::process::Process::stat)?;
        Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
    }

    fn read<T>(
        &self,
        what: impl Fn(&procfs::process::Process) -> ProcResult<T>,
    ) -> anyhow::Result<T> {
        let gone = || format!("the process of {} is gone", self.role);
        let id = i32::try_from(self.id).with_context(gone)?;
        let process = procfs::process::Process::new(id).with_context(gone)?;
        what(&process).with_context(gone)
    }
}

/// User and system time of all processes together, seconds.
///
/// # Errors
/// A process has ended.
pub(crate) fn cpu_seconds(processes: &[Process]) -> anyhow::Result<f64> {
    processes.iter().map(Process::cpu_seconds).sum()
}

/// Unreclaimable slab memory of the kernel for the whole machine, KiB: sockets, files and all other structures.
///
/// # Errors
/// `/proc` is not readable.
pub(crate) fn kernel_kib() -> anyhow::Result<f64> {
    let memory = procfs::Meminfo::current().context("reading /proc/meminfo")?;
    let bytes = memory.s_unreclaim.context("odd /proc/meminfo")?;
    Ok(bytes as f64 / 1024.0)
}

#[cfg(test)]
mod tests {
    use procfs::FromRead as _;

    use super::*;

    #[test]
    fn ticks_are_read_after_a_name_with_blanks_and_parentheses() {
        let rest = " 0".repeat(35);
        let text = format!("12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 250 50{rest}");
        let stat = procfs::process::Stat::from_read(text.as_bytes()).unwrap();
        assert_eq!(stat.utime + stat.stime, 300);
    }

    #[test]
    fn own_process_has_memory_and_a_missing_pid_is_an_error() {
        let own: Process = format!("load={}", std::process::id()).parse().unwrap();
        assert!(own.resident_kib().unwrap() > 100.0);
        assert!(own.cpu_seconds().unwrap() >= 0.0);
        let gone: Process = "agent=4294967295".parse().unwrap();
        assert!(
            gone.cpu_seconds()
                .unwrap_err()
                .to_string()
                .contains("agent")
        );
    }

    #[test]
    fn process_without_a_pid_is_refused() {
        assert!("agent".parse::<Process>().is_err());
        assert!("agent=x".parse::<Process>().is_err());
    }
}
