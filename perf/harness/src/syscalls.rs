//! `cargo xtask perf --syscalls`: system calls of server and agent per echo, per dial and per MiB, counted by strace.
//!
//! strace attaches to warmed-up stacks. Each operation runs a few times and then many times; the difference of the two runs
//! leaves out idling, start and end of a run. A third run counts calls on eventfds only, which separates wake-ups from other
//! reads and writes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use adit_perf_plan::{Counted, Dialect, Operation, Plan};
use anyhow::{Context as _, bail, ensure};
use procfs::process::Process;
use rustix::process::Signal;

use super::host::machine;
use super::markdown::one_line;
use super::measurement::load;
use super::peer::{self, Peer, Route};
use super::process::{Place, Site};
use super::programs::Programs;
use crate::steps::{Running, first_line};
use crate::workspace::Workspace;

/// The counted stacks in the order of the table: a peer in a dialect, and its description.
const STACKS: [(&str, Dialect, &str); 7] = {
    use Dialect::{Grpc, GrpcGo, HttpConnect};
    [
        ("adit", HttpConnect, "CONNECT, TLS lanes"),
        (
            "adit-plaintext",
            HttpConnect,
            "CONNECT, lanes in clear text",
        ),
        ("adit-link", HttpConnect, "CONNECT, link alone"),
        ("adit", Grpc, "gRPC, a client of our own, TLS lanes"),
        ("adit", GrpcGo, "gRPC, the Go client library, TLS lanes"),
        ("upstream", HttpConnect, "CONNECT, upstream"),
        ("upstream", GrpcGo, "gRPC, the Go client library, upstream"),
    ]
};

/// A counted operation: itself, words, connections, the few times, and how many more times.
struct Count(Operation, &'static str, usize, usize, usize);

/// Operations in the order of the table. Under strace a slow machine makes 20,000 calls a second; each run of a stack makes
/// fewer than 100,000.
const COUNTS: [Count; 5] = [
    Count(Operation::Echo, "one echo, 1 connection", 1, 200, 2_000),
    Count(Operation::Echo, "one echo, 16 connections", 16, 320, 4_000),
    Count(Operation::Dial, "dial, echo, close", 1, 20, 300),
    Count(Operation::Down, "1 MiB down", 1, 16, 256),
    Count(Operation::Up, "1 MiB up", 1, 16, 256),
];

/// Rounds of all operations before the first count: the number of lanes doubles until each of 16 connections finds one.
const WARM_UPS: usize = 3;
/// Time limit for strace to attach to all threads, and to detach.
const STRACE_LIMIT: Duration = Duration::from_secs(20);
/// Name of an eventfd in /proc.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// Columns of the report, and their calls. `other` has all remaining calls: memory, signals, clocks and the like.
const GROUPS: [(&str, &str); 8] = [
    (
        READS,
        "read readv pread64 preadv preadv2 recv recvfrom recvmsg recvmmsg",
    ),
    (
        WRITES,
        "write writev pwrite64 pwritev pwritev2 send sendto sendmsg sendmmsg sendfile",
    ),
    (
        "waits",
        "epoll_wait epoll_pwait epoll_pwait2 io_uring_enter poll ppoll select pselect6 nanosleep clock_nanosleep restart_syscall",
    ),
    (WAKE_UPS, "futex futex_wait futex_wake futex_waitv"),
    (
        "descriptors",
        "accept accept4 socket socketpair bind listen connect shutdown close close_range dup dup2 dup3 fcntl ioctl getsockopt \
         setsockopt getsockname getpeername epoll_create epoll_create1 epoll_ctl eventfd2 pipe pipe2 openat io_uring_register \
         io_uring_setup",
    ),
    ("splices", "splice tee vmsplice"),
    ("yields", "sched_yield"),
    (OTHER, ""),
];
const READS: &str = "reads";
const WRITES: &str = "writes";
const WAKE_UPS: &str = "wake-ups";
const OTHER: &str = "other";

/// Numbers of calls by name, of a run or of one operation.
type Calls = BTreeMap<String, f64>;

/// Calls of one process for one operation.
#[derive(Debug)]
struct Row {
    operation: &'static str,
    process: String,
    /// All calls, and those of each group.
    all: f64,
    groups: BTreeMap<&'static str, f64>,
}

/// Rows of a stack, or why it was not counted.
type Outcome = Result<Vec<Row>, String>;

/// Runs the command.
///
/// # Errors
/// strace is missing, or an Adit stack could not be counted; the table is written nevertheless.
pub(super) fn run(workspace: &Workspace, adit: Option<PathBuf>) -> anyhow::Result<()> {
    // First, so that a missing strace shows before the builds.
    let strace = first_line(Command::new("strace").arg("--version"))
        .context("strace does not run here: install the package `strace` of this system")?
        .replace(" -- ", " ");
    let programs = Programs::new(workspace, adit)?;
    let go_load = programs.build_go_load();
    let begin = Instant::now();
    let (mut outcomes, mut failed) = (Vec::new(), Vec::new());
    for (at, (name, dialect, words)) in STACKS.into_iter().enumerate() {
        eprintln!(
            "perf: counting {words} ({at} of {} done, {} s)",
            STACKS.len(),
            begin.elapsed().as_secs()
        );
        let outcome = match &go_load {
            Err(why) if dialect == Dialect::GrpcGo => Err(format!("missing: {why:#}")),
            Ok(_) | Err(_) => peer::find(name, &programs)
                .and_then(|peer| rows(&programs, &peer, dialect))
                .map_err(|why| {
                    // Failures of upstream's programs are tolerated: they may also be missing.
                    let is_ours = name.starts_with("adit");
                    failed.extend(is_ours.then_some(words));
                    format!("{}: {why:#}", if is_ours { "failed" } else { "missing" })
                }),
        };
        outcomes.push((words, outcome));
    }
    let machine = machine(workspace);
    let heading = format!(
        "System calls of one operation, `cargo xtask perf --syscalls`; {machine}; {strace}; ours: {}; {} s in all. An \
         eventfd's reads and writes are wake-ups, as futexes are; descriptors are those made, told, registered for events \
         and closed.\n",
        programs.adit_version(),
        begin.elapsed().as_secs()
    );
    let table = report(&heading, &outcomes);
    fs::write(programs.out.join("syscalls.md"), &table)?;
    print!("{table}");
    eprintln!("written to {}: syscalls.md", programs.out.display());
    ensure!(failed.is_empty(), "not counted: {}", failed.join(", "));
    Ok(())
}

/// Starts a stack and counts every operation: one row per process.
fn rows(programs: &Programs, peer: &Peer, dialect: Dialect) -> anyhow::Result<Vec<Row>> {
    let site = Site::new(programs, None)?;
    let route = (peer.start)(&site, dialect)?;
    for count in COUNTS.iter().cycle().take(WARM_UPS * COUNTS.len()) {
        load(&site, &route, &count.plan(count.3))
            .with_context(|| format!("{}, untraced", count.1))?;
    }
    let mut rows = Vec::new();
    for count in &COUNTS {
        let Count(_, words, _, few, more) = count;
        let of = |times, only| traced(&site, &route, &count.plan(times), only).context(*words);
        let (few_calls, many) = (of(*few, None)?, of(few + more, None)?);
        let eventfds = of(few + more, Some(EVENTFD))?;
        let processes = few_calls.into_iter().zip(many).zip(eventfds);
        rows.extend(
            processes.map(|(((process, few_calls), (_, many)), (_, eventfds))| {
                let calls = each(&few_calls, &many, *more);
                let eventfds = each(&Calls::new(), &eventfds, few + more);
                Row {
                    operation: words,
                    process,
                    all: calls.values().sum(),
                    groups: grouped(&calls, &eventfds),
                }
            }),
        );
    }
    Ok(rows)
}

/// Role and calls of each process while the load runs; only calls on `only`, if set.
fn traced(
    site: &Site,
    route: &Route,
    plan: &Plan,
    only: Option<&str>,
) -> anyhow::Result<Vec<(String, Calls)>> {
    let attached: Vec<Tracer<'_>> = route
        .processes
        .iter()
        .map(|(role, process)| Tracer::attach(site, role, *process, only))
        .collect::<Result<_, _>>()?;
    load(site, route, plan)?;
    attached.into_iter().map(Tracer::detach).collect()
}

impl Count {
    fn plan(&self, times: usize) -> Plan {
        Plan::counting(Counted {
            operation: self.0,
            connections: self.2,
            times,
        })
    }
}

/// strace on a running process. Dropping it detaches and discards the counts.
struct Tracer<'a> {
    site: &'a Site,
    role: &'a str,
    strace: Running,
}

impl<'a> Tracer<'a> {
    /// Attaches strace, and waits until it traces every thread of the process.
    ///
    /// # Errors
    /// The process has ended, or strace is not permitted to trace it.
    fn attach(
        site: &'a Site,
        role: &'a str,
        process: u32,
        only: Option<&str>,
    ) -> anyhow::Result<Self> {
        let mut args: Vec<String> = vec!["-c".to_owned(), "-f".to_owned()];
        args.extend(only.map(|file| format!("--trace-path={file}")));
        args.extend(["-o".to_owned(), summary(site, role)]);
        args.extend(["-p".to_owned(), process.to_string()]);
        let name = format!("strace-{role}");
        let mut strace = site.spawn(&name, &Place::Host, Path::new("strace"), &args)?;
        let end = Instant::now() + STRACE_LIMIT;
        while !is_traced(process, strace.id())? {
            if let Some(status) = strace.ends_within(Duration::from_millis(5))? {
                bail!(
                    "strace ended with {status} at the {role}: it needs root, or kernel.yama.ptrace_scope = 0, and no \
                     other tracer there{}",
                    site.logs()
                );
            }
            ensure!(
                Instant::now() < end,
                "strace did not have all threads of the {role} within {} s{}",
                STRACE_LIMIT.as_secs(),
                site.logs()
            );
        }
        Ok(Self { site, role, strace })
    }

    /// Detaches, and returns the role and the calls of the process meanwhile.
    ///
    /// # Errors
    /// strace fails, or writes something other than a summary.
    fn detach(mut self) -> anyhow::Result<(String, Calls)> {
        let Self { site, role, .. } = self;
        let stopped = self.strace.signal(Signal::INT);
        stopped.with_context(|| format!("strace of the {role} is gone"))?;
        let ended = self.strace.ends_within(STRACE_LIMIT)?;
        // After detaching, strace ends by the signal.
        ensure!(
            ended.is_some_and(|status| status.signal() == Some(Signal::INT.as_raw())),
            "strace of the {role} did not stop as it was told to{}",
            site.logs()
        );
        let text = fs::read_to_string(summary(site, role)).context("what strace wrote")?;
        let calls = calls(&text).with_context(|| format!("the calls of the {role}"))?;
        Ok((role.to_owned(), calls))
    }
}

/// Path of strace's summary.
fn summary(site: &Site, role: &str) -> String {
    site.at(&format!("strace-{role}.txt"))
}

/// Whether this tracer traces all threads of a process.
///
/// # Errors
/// The process has ended.
fn is_traced(process: u32, tracer: u32) -> anyhow::Result<bool> {
    let (process, tracer) = (i32::try_from(process)?, i32::try_from(tracer)?);
    let gone = || format!("process {process} is gone");
    let threads = Process::new(process).and_then(|process| process.tasks());
    // A thread that has ended meanwhile needs no tracer.
    let mut threads = threads
        .with_context(gone)?
        .flatten()
        .flat_map(|thread| thread.status());
    Ok(threads.all(|thread| {
        // The kernel's threads for a ring cannot be traced, and make no calls.
        thread.tracerpid == tracer || thread.name.starts_with("iou-")
    }))
}

/// Calls by name from the output of `strace -c`, which is empty for a process without calls.
///
/// # Errors
/// The text is not such a table, or its total differs from the sum of its rows.
fn calls(text: &str) -> anyhow::Result<Calls> {
    let (mut calls, mut total) = (Calls::new(), 0.0);
    let is_frame =
        |line: &str| line.starts_with("% time") || line.chars().all(|c| c == '-' || c == ' ');
    for line in text.lines().filter(|line| !is_frame(line)) {
        let odd = || format!("strace wrote the line `{line}`");
        let words: Vec<&str> = line.split_whitespace().collect();
        // Columns: % time, seconds, usecs/call, calls, errors if there were any, syscall.
        let ([_, _, _, count, name] | [_, _, _, count, _, name]) = words.as_slice() else {
            bail!(odd());
        };
        let count = f64::from(count.parse::<u32>().with_context(odd)?);
        match *name {
            "total" => total += count,
            name => *calls.entry(name.to_owned()).or_default() += count,
        }
    }
    let sum: f64 = calls.values().sum();
    ensure!(
        total == sum,
        "strace's summary has {sum} calls in its rows, and {total} in all"
    );
    Ok(calls)
}

/// Calls of one operation, from a run with few operations and a run with `more` operations in addition: leaves out the start
/// and end of a run.
fn each(few: &Calls, many: &Calls, more: usize) -> Calls {
    let of_name = |(name, count): (&String, &f64)| {
        let beyond = (count - few.get(name).copied().unwrap_or(0.0)).max(0.0);
        (name.clone(), beyond / more as f64)
    };
    many.iter().map(of_name).collect()
}

/// Calls of one operation by group; `eventfds` are the calls among them on eventfds.
fn grouped(calls: &Calls, eventfds: &Calls) -> BTreeMap<&'static str, f64> {
    let group_of = |name: &str| {
        let has = |calls: &str| calls.split(' ').any(|call| call == name);
        let found = GROUPS.iter().find(|(_, calls)| has(calls));
        found.map_or(OTHER, |(group, _)| *group)
    };
    let mut groups: BTreeMap<_, f64> = GROUPS.map(|(group, _)| (group, 0.0)).into();
    for (name, count) in calls {
        *groups.entry(group_of(name)).or_default() += count;
    }
    for (name, count) in eventfds {
        let group = group_of(name);
        if [READS, WRITES].contains(&group) {
            // The counts come from different runs, so they may differ slightly.
            let reads_or_writes = groups.entry(group).or_default();
            *reads_or_writes = (*reads_or_writes - count).max(0.0);
            *groups.entry(WAKE_UPS).or_default() += count;
        }
    }
    groups
}

/// The table of all stacks.
fn report(heading: &str, outcomes: &[(&'static str, Outcome)]) -> String {
    let names = GROUPS.map(|(name, _)| name).join(" | ");
    let mut text = format!(
        "{heading}\n| clients, pair | what | process | calls | {names} |\n| --- | --- | --- | ---: |{}\n",
        " ---: |".repeat(GROUPS.len())
    );
    for (words, outcome) in outcomes {
        let rows = match outcome {
            Ok(rows) => rows,
            Err(why) => {
                writeln!(text, "| {words} | {} |", one_line(why)).ok();
                continue;
            }
        };
        for row in rows {
            let (operation, process) = (row.operation, &row.process);
            let all = shown(row.all);
            write!(text, "| {words} | {operation} | {process} | {all} |").ok();
            for (name, _) in GROUPS {
                let count = row.groups.get(name).copied().unwrap_or_default();
                write!(text, " {} |", shown(count)).ok();
            }
            text.push('\n');
        }
    }
    text
}

/// A count in the table; below a twentieth it shows as none.
fn shown(count: f64) -> String {
    match count {
        none if none < 0.05 => "-".to_owned(),
        small if small < 9.95 => format!("{small:.1}"),
        large => format!("{large:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 48.10    0.031400           7      4400       200 recvfrom
  6.00    0.004000           9       440        11 futex
  2.00    0.001300           6       220           write
  0.00    0.000000           0         5           madvise
------ ----------- ----------- --------- --------- ----------------
100.00    0.065700           5      5065       211 total
";

    #[test]
    fn calls_of_one_operation_are_grouped_and_eventfds_are_wake_ups() {
        let all = each(&Calls::new(), &calls(WRITTEN).unwrap(), 100);
        let eventfds = Calls::from([("write".to_owned(), 2.0), ("read".to_owned(), 0.5)]);
        let groups = grouped(&all, &eventfds);
        for (group, expected) in [
            (READS, 43.5),
            (WRITES, 0.2),
            (WAKE_UPS, 6.9),
            (OTHER, 0.05),
            ("yields", 0.0),
        ] {
            assert!(
                (groups[group] - expected).abs() < 1e-9,
                "{group} {groups:?}"
            );
        }
    }

    #[test]
    fn an_invalid_summary_is_refused_and_an_empty_one_has_no_calls() {
        assert_eq!(calls("").unwrap(), Calls::new());
        let cut = WRITTEN.split("100.00").next().unwrap();
        for (text, why) in [
            (cut, "in all"),
            (&WRITTEN.replace("5065", "many"), "many"),
            ("strace: attach: Operation not permitted\n", "not permitted"),
        ] {
            let error = format!("{:#}", calls(text).unwrap_err());
            assert!(error.contains(why), "{error}, of {text:?}");
        }
    }

    #[test]
    fn syscalls_per_operation_exclude_start_and_end_of_a_run() {
        let of = |calls: &[(&str, f64)]| -> Calls {
            let named = calls.iter().map(|(name, count)| ((*name).into(), *count));
            named.collect()
        };
        let few = of(&[("recvfrom", 450.0), ("mmap", 2.0)]);
        let many = of(&[("recvfrom", 4_450.0), ("writev", 1_000.0), ("mmap", 1.0)]);
        let each = each(&few, &many, 2_000);
        assert_eq!(
            each,
            of(&[("recvfrom", 2.0), ("writev", 0.5), ("mmap", 0.0)])
        );
    }

    #[test]
    fn own_process_is_not_traced_and_a_missing_one_is_an_error() {
        let own = std::process::id();
        assert!(!is_traced(own, own).unwrap(), "nobody traces itself");
        let error = is_traced(4_194_305, own).unwrap_err().to_string();
        assert!(error.contains("is gone"), "{error}");
    }

    #[test]
    fn table_has_a_row_for_each_process_and_failure() {
        let calls = Calls::from([("recvfrom".to_owned(), 2.04)]);
        let row = Row {
            operation: "one echo",
            process: "server".to_owned(),
            all: 12.3,
            groups: grouped(&calls, &Calls::new()),
        };
        let outcomes = [
            ("CONNECT", Ok(vec![row])),
            ("link", Err("failed: a | b\nc".to_owned())),
        ];
        let table = report("heading\n", &outcomes);
        let row = "| CONNECT | one echo | server | 12 | 2.0 | - | - | - | - | - | - | - |\n";
        assert!(
            table.ends_with(&format!("{row}| link | failed: a   b c |\n")),
            "{table}"
        );
    }
}
