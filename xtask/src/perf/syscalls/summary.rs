//! What `strace -c` writes, and the groups of calls that the report has.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail, ensure};

/// Calls by name.
pub(super) type Calls = BTreeMap<String, u64>;

/// Calls of one operation, by name.
pub(super) type Each = BTreeMap<String, f64>;

/// What calls are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    /// Bytes taken from a socket.
    Reads,
    /// Bytes given to one.
    Writes,
    /// Waiting for events, or for time to pass.
    Waits,
    /// Waking another thread and being woken by one. Those by eventfd are reads and writes to strace's summary.
    WakeUps,
    /// Descriptors: made, told, registered for events, closed.
    Descriptors,
    /// Bytes moved inside the kernel.
    Splices,
    /// Giving up the processor.
    Yields,
    /// Memory, signals, clocks and whatever else there is.
    Other,
}

impl Group {
    /// All, in the order of the columns.
    pub(super) const ALL: [Self; 8] = [
        Self::Reads,
        Self::Writes,
        Self::Waits,
        Self::WakeUps,
        Self::Descriptors,
        Self::Splices,
        Self::Yields,
        Self::Other,
    ];

    /// Heading of the column.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Reads => "reads",
            Self::Writes => "writes",
            Self::Waits => "waits",
            Self::WakeUps => "wake-ups",
            Self::Descriptors => "descriptors",
            Self::Splices => "splices",
            Self::Yields => "yields",
            Self::Other => "other",
        }
    }

    /// That of a call.
    pub(super) fn of(call: &str) -> Self {
        match call {
            "read" | "readv" | "pread64" | "preadv" | "preadv2" | "recv" | "recvfrom"
            | "recvmsg" | "recvmmsg" => Self::Reads,
            "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2" | "send" | "sendto"
            | "sendmsg" | "sendmmsg" | "sendfile" => Self::Writes,
            "epoll_wait" | "epoll_pwait" | "epoll_pwait2" | "io_uring_enter" | "poll" | "ppoll"
            | "select" | "pselect6" | "nanosleep" | "clock_nanosleep" | "restart_syscall" => {
                Self::Waits
            }
            "futex" | "futex_wait" | "futex_wake" | "futex_waitv" => Self::WakeUps,
            "accept" | "accept4" | "socket" | "socketpair" | "bind" | "listen" | "connect"
            | "shutdown" | "close" | "close_range" | "dup" | "dup2" | "dup3" | "fcntl"
            | "ioctl" | "getsockopt" | "setsockopt" | "getsockname" | "getpeername"
            | "epoll_create" | "epoll_create1" | "epoll_ctl" | "eventfd2" | "pipe" | "pipe2"
            | "openat" | "io_uring_register" | "io_uring_setup" => Self::Descriptors,
            "splice" | "tee" | "vmsplice" => Self::Splices,
            "sched_yield" => Self::Yields,
            _ => Self::Other,
        }
    }
}

/// Calls by name in what `strace -c` writes. It writes nothing for a process that made none.
///
/// # Errors
/// It is not such a table, or its sum is another one than that of its rows.
pub(super) fn calls(text: &str) -> anyhow::Result<Calls> {
    let mut calls = Calls::new();
    let mut total = None;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    for line in lines.filter(|line| !is_frame(line)) {
        let odd = || format!("strace wrote the line `{line}`");
        ensure!(total.is_none(), "{} behind its sum", odd());
        let words: Vec<&str> = line.split_whitespace().collect();
        // % time, seconds, usecs/call, calls, errors where there were any, syscall.
        let (count, name) = match words.as_slice() {
            [_, _, _, count, name] | [_, _, _, count, _, name] => (count, *name),
            _ => bail!(odd()),
        };
        let count = count.parse::<u64>().with_context(odd)?;
        if name == "total" {
            total = Some(count);
        } else {
            *calls.entry(name.to_owned()).or_default() += count;
        }
    }
    let sum: u64 = calls.values().sum();
    ensure!(
        total.unwrap_or(0) == sum,
        "strace's summary has {sum} calls in its rows, and {total:?} in all"
    );
    Ok(calls)
}

/// The heading, and the lines above and below the rows.
fn is_frame(line: &str) -> bool {
    line.starts_with("% time") || line.chars().all(|c| c == '-' || c == ' ')
}

/// Calls of one operation, of counts of a run with few of them and of one with `more` of them beyond those: neither the
/// start nor the end of a run is in it.
pub(super) fn each(few: &Calls, many: &Calls, more: u64) -> Each {
    let of_name = |(name, count): (&String, &u64)| {
        let beyond = count.saturating_sub(few.get(name).copied().unwrap_or(0));
        (name.clone(), beyond as f64 / more as f64)
    };
    many.iter().map(of_name).collect()
}

/// Calls of one operation by group, in the order of [`Group::ALL`]; `bells` are those of them on eventfds.
pub(super) fn grouped(each: &Each, bells: &Each) -> [f64; Group::ALL.len()] {
    let sum = |calls: &Each, group: Group| -> f64 {
        let those = calls.iter().filter(|(name, _)| Group::of(name) == group);
        those.map(|(_, count)| count).sum()
    };
    Group::ALL.map(|group| {
        let all = sum(each, group);
        match group {
            // Counted in another run: not exactly as often.
            Group::Reads | Group::Writes => (all - sum(bells, group)).max(0.0),
            Group::WakeUps => all + sum(bells, Group::Reads) + sum(bells, Group::Writes),
            _ => all,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 48.10    0.031400           7      4400       200 recvfrom
 30.00    0.020000           4      4400           writev
 12.50    0.008000           3      2300           epoll_wait
  6.00    0.004000           9       440        11 futex
  2.00    0.001300           6       220           write
  1.00    0.000700           7       100           accept4
  0.30    0.000200           2       100           epoll_ctl
  0.10    0.000100           5        20           splice
  0.00    0.000000           0        10           sched_yield
  0.00    0.000000           0         5           madvise
------ ----------- ----------- --------- --------- ----------------
100.00    0.065700           5     11995       211 total
";

    #[test]
    fn calls_are_read_with_and_without_errors() {
        let calls = calls(WRITTEN).unwrap();
        assert_eq!(calls.len(), 10);
        assert_eq!(calls["recvfrom"], 4_400);
        assert_eq!(calls["writev"], 4_400);
        assert_eq!(calls["futex"], 440);
        assert_eq!(calls["sched_yield"], 10);
    }

    #[test]
    fn process_that_made_no_call_is_no_error() {
        assert_eq!(calls("").unwrap(), Calls::new());
    }

    #[test]
    fn what_is_no_summary_is_refused() {
        let cut = WRITTEN.split("100.00").next().unwrap();
        for (text, why) in [
            (cut, "in all"),
            (&WRITTEN.replace("11995", "11996"), "11995 calls"),
            (&format!("{WRITTEN}{WRITTEN}"), "behind its sum"),
            (&WRITTEN.replace("11995", "many"), "many"),
            ("strace: attach: Operation not permitted\n", "not permitted"),
            ("one two three four five six seven\n", "seven"),
            ("recvfrom(9, ...) = 64\n", "recvfrom"),
        ] {
            let error = format!("{:#}", calls(text).unwrap_err());
            assert!(error.contains(why), "{error}, of {text:?}");
        }
    }

    #[test]
    fn start_and_end_of_a_run_are_not_in_what_one_operation_takes() {
        let of = |calls: &[(&str, u64)]| -> Calls {
            let named = calls
                .iter()
                .map(|(name, count)| ((*name).to_owned(), *count));
            named.collect()
        };
        let few = of(&[("connect", 3), ("recvfrom", 450), ("mmap", 2)]);
        let many = of(&[
            ("connect", 3),
            ("recvfrom", 4_450),
            ("writev", 1_000),
            ("mmap", 1),
        ]);
        let each = each(&few, &many, 2_000);
        assert_eq!(each["connect"], 0.0);
        assert_eq!(each["recvfrom"], 2.0);
        assert_eq!(each["writev"], 0.5);
        assert_eq!(each["mmap"], 0.0, "never less than none");
    }

    #[test]
    fn every_call_is_in_one_group() {
        let all = each(&Calls::new(), &calls(WRITTEN).unwrap(), 100);
        let groups = grouped(&all, &Each::new());
        let expected = [44.0, 46.2, 23.0, 4.4, 2.0, 0.2, 0.1, 0.05];
        for ((group, found), expected) in Group::ALL.iter().zip(groups).zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{group:?} {found}");
        }
    }

    #[test]
    fn writes_that_ring_an_eventfd_are_wake_ups() {
        let all = each(&Calls::new(), &calls(WRITTEN).unwrap(), 100);
        let bells = Each::from([("write".to_owned(), 2.0), ("read".to_owned(), 0.5)]);
        let [reads, writes, _, wake_ups, ..] = grouped(&all, &bells);
        assert!((reads - 43.5).abs() < 1e-9, "{reads}");
        assert!((writes - 44.2).abs() < 1e-9, "{writes}");
        assert!((wake_ups - 6.9).abs() < 1e-9, "{wake_ups}");
    }

    #[test]
    fn no_group_falls_below_nothing() {
        let bells = Each::from([("write".to_owned(), 2.0)]);
        assert!(
            grouped(&Each::new(), &bells)
                .iter()
                .all(|count| *count >= 0.0)
        );
    }
}
