//! Everything on few processors: with one, no question waits for an idle processor to wake, which in a virtual machine takes longer
//! than all else and differs from minute to minute. So rows of equal programs lie closer together, and small costs show.

use anyhow::{Context as _, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// This thread, and every process it starts from here on, keeps to a few processors, until it is dropped.
pub(super) struct Confined {
    before: CpuSet,
}

impl Confined {
    /// To the last `count` of those it may use: interrupts mostly go to the first.
    ///
    /// # Errors
    /// There are fewer, or the kernel refuses.
    pub(super) fn to(count: usize) -> anyhow::Result<Self> {
        let before =
            sched_getaffinity(None).context("asking for the processors of this process")?;
        let chosen = last(count, &before)?;
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

fn last(count: usize, of: &CpuSet) -> anyhow::Result<CpuSet> {
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| of.is_set(*cpu)).collect();
    ensure!(
        (1..=all.len()).contains(&count),
        "processors = {count}: this process may use {}; ask for 1 to so many",
        all.len()
    );
    let mut chosen = CpuSet::new();
    for cpu in all.iter().rev().take(count) {
        chosen.set(*cpu);
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.set(*cpu);
        }
        set
    }

    #[test]
    fn the_last_of_those_that_are_allowed_are_chosen() {
        let allowed = set(&[0, 2, 5]);
        assert_eq!(last(1, &allowed).unwrap(), set(&[5]));
        assert_eq!(last(2, &allowed).unwrap(), set(&[2, 5]));
        assert_eq!(last(3, &allowed).unwrap(), allowed);
        for count in [0, 4] {
            let error = last(count, &allowed).unwrap_err().to_string();
            assert!(error.contains("may use 3"), "{error}");
        }
    }

    /// A test has a thread of its own, and processors belong to threads.
    #[test]
    fn programs_started_meanwhile_keep_to_so_many_and_later_ones_to_none() {
        let allowed = || {
            let mut cat = std::process::Command::new("cat");
            let out = cat.arg("/proc/self/status").output().unwrap();
            let text = String::from_utf8(out.stdout).unwrap();
            let line = text
                .lines()
                .find(|line| line.starts_with("Cpus_allowed_list:"));
            line.unwrap().split_whitespace().last().unwrap().to_owned()
        };
        let before = allowed();
        let confined = Confined::to(1).unwrap();
        assert!(allowed().parse::<usize>().is_ok(), "{}", allowed());
        drop(confined);
        assert_eq!(allowed(), before);
    }
}
