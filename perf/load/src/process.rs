//! Statistics of processes and the kernel, read from `/proc`.

use std::fs;
use std::str::FromStr;

use anyhow::{Context as _, bail};

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
        let status = self.read("status")?;
        field_kib(&status, "VmRSS:").with_context(|| format!("{}: no VmRSS", self.role))
    }

    /// User and system time so far, seconds.
    ///
    /// # Errors
    /// The process has ended.
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let stat = self.read("stat")?;
        let ticks = ticks_of_process(&stat).with_context(|| format!("{}: odd stat", self.role))?;
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    fn read(&self, file: &str) -> anyhow::Result<String> {
        fs::read_to_string(format!("/proc/{}/{file}", self.id))
            .with_context(|| format!("the process of {} is gone", self.role))
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
    let memory = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    field_kib(&memory, "SUnreclaim:").context("odd /proc/meminfo")
}

/// Parses a line `NAME:   123 kB`.
fn field_kib(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Fields 14 and 15 of `/proc/PID/stat`, counted after the name, which may contain blanks and brackets.
fn ticks_of_process(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some(ticks()? + ticks()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read_after_a_name_with_blanks_and_parentheses() {
        let stat = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0";
        assert_eq!(ticks_of_process(stat), Some(300.0));
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
