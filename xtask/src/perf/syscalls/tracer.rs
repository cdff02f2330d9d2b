//! strace on a running process: it counts from the moment it is attached until it is told to stop.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::summary::{Calls, calls};
use crate::perf::process::{Inside, Running, Site};

const STRACE: &str = "strace";
/// How long strace may take to have all threads, and to let go of them.
const LIMIT: Duration = Duration::from_secs(20);
/// How often that is looked at.
const POLL: Duration = Duration::from_millis(5);
/// What strace ends by once it was told to, and has let go of the process.
const INTERRUPT: i32 = 2;
/// What an eventfd is called in /proc.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// Which calls are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watched {
    /// All.
    All,
    /// Those on eventfds, by which threads wake each other.
    Eventfds,
}

/// The version of strace.
///
/// # Errors
/// There is none, in words that say what to install.
pub(super) fn version() -> anyhow::Result<String> {
    let output = Command::new(STRACE).arg("--version").output();
    let output =
        output.context("strace does not run here: install the package `strace` of this system")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next().unwrap_or_default();
    ensure!(
        output.status.success() && !first.is_empty(),
        "`strace --version` ended with {}: install the package `strace` of this system",
        output.status
    );
    Ok(first.replace(" -- ", " "))
}

/// See the module. Dropped, it lets go of the process and counts nothing.
pub(super) struct Tracer<'a> {
    site: &'a Site,
    role: &'a str,
    strace: Running,
}

impl<'a> Tracer<'a> {
    /// Attaches it, and waits until every thread of the process is counted.
    ///
    /// # Errors
    /// The process is gone, or strace may not look at it.
    pub(super) fn attach(
        site: &'a Site,
        role: &'a str,
        process: u32,
        watched: Watched,
    ) -> anyhow::Result<Self> {
        let only: &[&str] = match watched {
            Watched::All => &[],
            Watched::Eventfds => &["-P", EVENTFD],
        };
        let mut args: Vec<String> = vec!["-c".to_owned(), "-f".to_owned()];
        args.extend(only.iter().map(|word| (*word).to_owned()));
        args.extend(["-o".to_owned(), summary(site, role)]);
        args.extend(["-p".to_owned(), process.to_string()]);
        let name = format!("strace-{role}");
        let strace = site.spawn(&name, Inside::Host, Path::new(STRACE), &args)?;
        let mut tracer = Self { site, role, strace };
        let end = Instant::now() + LIMIT;
        while !is_traced(process, tracer.strace.id())? {
            if let Some(status) = tracer.strace.ended()? {
                bail!(
                    "strace ended with {status} at the {role}: it needs root, or kernel.yama.ptrace_scope = 0, and no \
                     other tracer there{}",
                    site.logs()
                );
            }
            ensure!(
                Instant::now() < end,
                "strace did not have all threads of the {role} within {} s{}",
                LIMIT.as_secs(),
                site.logs()
            );
            std::thread::sleep(POLL);
        }
        Ok(tracer)
    }

    /// Lets go of the process and returns what it called meanwhile.
    ///
    /// # Errors
    /// strace has failed, or has written something else than a summary.
    pub(super) fn detach(mut self) -> anyhow::Result<Calls> {
        let mut interrupt = Command::new("kill");
        interrupt.args(["-INT", &self.strace.id().to_string()]);
        let sent = interrupt.status().context("starting kill")?;
        let Self { site, role, .. } = self;
        ensure!(
            sent.success(),
            "strace of the {role} is gone{}",
            site.logs()
        );
        let ended = self.strace.ends_within(LIMIT)?;
        ensure!(
            ended.is_some_and(|status| status.signal() == Some(INTERRUPT)),
            "strace of the {role} did not stop as it was told to{}",
            site.logs()
        );
        let text = fs::read_to_string(summary(site, role)).context("what strace wrote")?;
        calls(&text).with_context(|| format!("the calls of the {role}"))
    }
}

/// Where the summary goes.
fn summary(site: &Site, role: &str) -> String {
    site.at(&format!("strace-{role}.txt"))
}

/// Whether all threads of a process have this tracer.
///
/// # Errors
/// The process is gone.
fn is_traced(process: u32, tracer: u32) -> anyhow::Result<bool> {
    let threads = fs::read_dir(format!("/proc/{process}/task"))
        .with_context(|| format!("process {process} is gone"))?;
    for thread in threads {
        // A thread that has ended since needs no tracer.
        let Ok(status) = fs::read_to_string(thread?.path().join("status")) else {
            continue;
        };
        if tracer_of(&status) != Some(tracer) && !is_of_kernel(&status) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the kernel made the thread for a ring: nobody may trace it, and it makes no calls.
fn is_of_kernel(status: &str) -> bool {
    status.starts_with("Name:\tiou-")
}

/// The line `TracerPid:`, 0 for none.
fn tracer_of(status: &str) -> Option<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracer_is_read_from_the_status_of_a_thread() {
        let status = "Name:\tadit\nPid:\t41\nPPid:\t7\nTracerPid:\t42\nUid:\t0\t0\t0\t0\n";
        assert_eq!(tracer_of(status), Some(42));
        assert_eq!(tracer_of("Name:\tadit\n"), None);
        assert!(!is_of_kernel(status) && is_of_kernel("Name:\tiou-wrk-41\n"));
    }

    #[test]
    fn own_process_has_no_such_tracer_and_a_gone_one_is_an_error() {
        let own = std::process::id();
        assert!(!is_traced(own, own).unwrap(), "nobody traces itself");
        let error = is_traced(u32::MAX, own).unwrap_err().to_string();
        assert!(error.contains("is gone"), "{error}");
    }
}
