//! `cargo xtask perf --syscalls`: system calls of server and agent for an echo, for a dial and for a MiB, counted by strace.
//!
//! strace is attached to stacks that are up and have done everything before. Each operation is done a few times and many
//! times, and the difference is that of the many beyond the few: neither idling nor the start and end of a run is in it.
//! A third run counts calls on eventfds alone, which tells wake-ups from other reads and writes.

mod summary;
mod tracer;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use self::summary::{Calls, Each, Group, each, grouped};
use self::tracer::{Tracer, Watched};
use super::machine::Machine;
use super::peer::{Konnectivity, Peer as _, Route};
use super::process::Site;
use super::programs::Programs;
use super::scenario::{Counted, LoadPlan, Way};
use super::turn::{Tools, load};
use crate::workspace::Workspace;

/// A server and an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pair {
    /// Ours, with lanes by TLS.
    Lanes,
    /// Ours, with lanes in clear text.
    Clear,
    /// Ours, without lanes.
    Link,
    /// Upstream's.
    Upstream,
}

/// What is counted: a pair in a dialect.
struct Stack {
    pair: Pair,
    way: Way,
    words: &'static str,
}

/// All of them, in the order of the table.
const STACKS: [Stack; 7] = [
    Stack {
        pair: Pair::Lanes,
        way: Way::HttpConnect,
        words: "CONNECT, TLS lanes",
    },
    Stack {
        pair: Pair::Clear,
        way: Way::HttpConnect,
        words: "CONNECT, lanes in clear text",
    },
    Stack {
        pair: Pair::Link,
        way: Way::HttpConnect,
        words: "CONNECT, link alone",
    },
    Stack {
        pair: Pair::Lanes,
        way: Way::Grpc,
        words: "gRPC, a client of our own, TLS lanes",
    },
    Stack {
        pair: Pair::Lanes,
        way: Way::GrpcGo,
        words: "gRPC, the Go client library, TLS lanes",
    },
    Stack {
        pair: Pair::Upstream,
        way: Way::HttpConnect,
        words: "CONNECT, upstream",
    },
    Stack {
        pair: Pair::Upstream,
        way: Way::GrpcGo,
        words: "gRPC, the Go client library, upstream",
    },
];

/// What is done a few times and many times.
struct Operation {
    name: &'static str,
    words: &'static str,
    connections: u64,
    few: u64,
    more: u64,
}

/// All of them, in the order of the table. A slow machine makes 20,000 calls a second under strace, and these are less
/// than 100,000 for each run of a stack's.
const OPERATIONS: [Operation; 5] = [
    Operation {
        name: "echo",
        words: "one echo, 1 connection",
        connections: 1,
        few: 200,
        more: 2_000,
    },
    Operation {
        name: "echo",
        words: "one echo, 16 connections",
        connections: 16,
        few: 320,
        more: 4_000,
    },
    Operation {
        name: "dial",
        words: "dial, echo, close",
        connections: 1,
        few: 20,
        more: 300,
    },
    Operation {
        name: "down",
        words: "1 MiB down",
        connections: 1,
        few: 16,
        more: 256,
    },
    Operation {
        name: "up",
        words: "1 MiB up",
        connections: 1,
        few: 16,
        more: 256,
    },
];

/// How often everything is done before anything is counted: lanes double until each of 16 connections finds one.
const WARM_UPS: usize = 3;

/// Calls of one process for one operation.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    operation: &'static str,
    process: String,
    all: f64,
    groups: BTreeMap<&'static str, f64>,
    calls: Each,
    /// Those of them on eventfds.
    eventfds: Each,
}

/// What became of a stack.
enum Outcome {
    Counted(Vec<Row>),
    /// It cannot be had here, or is upstream's and failed: a row, and no error of ours.
    Missing(String),
    Failed(String),
}

/// The programs, each found or built once.
struct Found {
    ours: anyhow::Result<Konnectivity>,
    upstream: anyhow::Result<Konnectivity>,
    go_load: anyhow::Result<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// There is no strace, or a stack of ours could not be counted; the table is written in spite of that.
pub(super) fn run(workspace: &Workspace, adit: Option<PathBuf>) -> anyhow::Result<()> {
    // First: nobody waits for builds to learn that it is missing.
    let strace = tracer::version()?;
    let programs = &Programs::new(workspace, adit)?;
    let found = Found {
        ours: programs
            .adit()
            .map(|binary| Konnectivity::adit(programs.adit_version(), binary)),
        upstream: Konnectivity::upstream(programs),
        go_load: programs.go_load(),
    };
    let begin = Instant::now();
    let mut outcomes = Vec::new();
    for (at, stack) in STACKS.iter().enumerate() {
        eprintln!(
            "perf: counting {} ({at} of {} done, {} s)",
            stack.words,
            STACKS.len(),
            begin.elapsed().as_secs()
        );
        outcomes.push((stack.words, found.outcome(programs, stack)));
    }
    let machine = Machine::here(programs.workspace());
    let heading = format!(
        "System calls of one operation, `cargo xtask perf --syscalls`; {machine}; {strace}; ours: {}; {} s in all. An \
         eventfd's reads and writes are wake-ups, as futexes are; descriptors are those made, told, registered for events \
         and closed.\n",
        programs.adit_version(),
        begin.elapsed().as_secs()
    );
    let table = report(&heading, &outcomes);
    fs::write(programs.out.join("syscalls.md"), &table)?;
    let json = for_machines(&machine, &strace, &outcomes)?;
    fs::write(
        programs.out.join("syscalls.json"),
        serde_json::to_string_pretty(&json)?,
    )?;
    print!("{table}");
    eprintln!(
        "written to {}: syscalls.md and syscalls.json",
        programs.out.display()
    );
    let failed = failed(&outcomes);
    ensure!(failed.is_empty(), "not counted: {}", failed.join(", "));
    Ok(())
}

impl Found {
    fn outcome(&self, programs: &Programs, stack: &Stack) -> Outcome {
        let missing = |error: &anyhow::Error| Outcome::Missing(format!("{error:#}"));
        let pair = match (stack.pair, &self.ours, &self.upstream) {
            (Pair::Upstream, _, Err(error)) => return missing(error),
            (Pair::Upstream, _, Ok(upstream)) => upstream.clone(),
            // This tree has to build.
            (_, Err(error), _) => return Outcome::Failed(format!("{error:#}")),
            (Pair::Lanes, Ok(ours), _) => ours.clone(),
            (Pair::Clear, Ok(ours), _) => ours.clone().in_clear(),
            (Pair::Link, Ok(ours), _) => ours.clone().without_lanes(),
        };
        let go_load = match (stack.way, &self.go_load) {
            (Way::GrpcGo, Err(error)) => return missing(error),
            (_, go_load) => go_load.as_ref().ok(),
        };
        let tools = Tools {
            load: programs.load(),
            go_load: go_load.map(PathBuf::as_path),
        };
        match rows(tools, &pair, stack) {
            Ok(rows) => Outcome::Counted(rows),
            Err(error) => {
                let why = format!("{error:#}");
                eprintln!("perf: {} failed: {why}", stack.words);
                match stack.pair {
                    Pair::Upstream => Outcome::Missing(format!("it failed: {why}")),
                    Pair::Lanes | Pair::Clear | Pair::Link => Outcome::Failed(why),
                }
            }
        }
    }
}

/// Counts every operation of a stack, which is started for it.
fn rows(tools: Tools<'_>, pair: &Konnectivity, stack: &Stack) -> anyhow::Result<Vec<Row>> {
    let site = Site::new(tools.load)?;
    let route = pair.start(&site, stack.way)?;
    for operation in OPERATIONS.iter().cycle().take(WARM_UPS * OPERATIONS.len()) {
        let plan = operation.plan(operation.few);
        load(tools, &site, &route, &plan)
            .with_context(|| format!("{}, untraced", operation.words))?;
    }
    let mut rows = Vec::new();
    for operation in &OPERATIONS {
        let counted = count(tools, &site, &route, stack.words, operation);
        rows.extend(counted.with_context(|| operation.words)?);
    }
    Ok(rows)
}

/// Counts one operation: a row for each process.
fn count(
    tools: Tools<'_>,
    site: &Site,
    route: &Route,
    what: &'static str,
    operation: &Operation,
) -> anyhow::Result<Vec<Row>> {
    let of = |times, watched| traced(tools, site, route, &operation.plan(times), watched);
    let all = operation.few + operation.more;
    let few = of(operation.few, Watched::All)?;
    let many = of(all, Watched::All)?;
    let bells = of(all, Watched::Eventfds)?;
    let processes = few.into_iter().zip(many).zip(bells);
    let rows = processes.map(|(((process, few), (_, many)), (_, bells))| {
        let calls = each(&few, &many, operation.more);
        let eventfds = each(&Calls::new(), &bells, all);
        let groups = grouped(&calls, &eventfds);
        Row {
            what,
            operation: operation.words,
            process,
            all: calls.values().sum(),
            groups: by_name(groups),
            calls,
            eventfds,
        }
    });
    Ok(rows.collect())
}

/// Role and calls of each process while the load runs.
fn traced(
    tools: Tools<'_>,
    site: &Site,
    route: &Route,
    plan: &LoadPlan,
    watched: Watched,
) -> anyhow::Result<Vec<(String, Calls)>> {
    let mut tracers = Vec::new();
    for (role, process) in &route.processes {
        let tracer = Tracer::attach(site, role, *process, watched)?;
        tracers.push((role.clone(), tracer));
    }
    load(tools, site, route, plan)?;
    let mut counted = Vec::new();
    for (role, tracer) in tracers {
        counted.push((role, tracer.detach()?));
    }
    Ok(counted)
}

/// Counts of groups, by their names.
fn by_name(groups: [f64; Group::ALL.len()]) -> BTreeMap<&'static str, f64> {
    Group::ALL
        .map(Group::name)
        .into_iter()
        .zip(groups)
        .collect()
}

impl Operation {
    fn plan(&self, times: u64) -> LoadPlan {
        LoadPlan::counting(Counted {
            operation: self.name,
            connections: self.connections,
            times,
        })
    }
}

/// The table.
fn report(heading: &str, outcomes: &[(&'static str, Outcome)]) -> String {
    let groups: Vec<&str> = Group::ALL.map(Group::name).to_vec();
    let mut text = format!(
        "{heading}\n| clients, pair | what | process | calls | {} |\n| --- | --- | --- | ---: |{}\n",
        groups.join(" | "),
        " ---: |".repeat(groups.len())
    );
    for (words, outcome) in outcomes {
        let rows = match outcome {
            Outcome::Counted(rows) => rows,
            Outcome::Missing(why) => {
                writeln!(text, "| {words} | missing: {} |", one_line(why)).ok();
                continue;
            }
            Outcome::Failed(why) => {
                writeln!(text, "| {words} | failed: {} |", one_line(why)).ok();
                continue;
            }
        };
        for row in rows {
            let cells = groups.iter().map(|name| shown(row.groups.get(name)));
            let cells: Vec<String> = std::iter::once(shown(Some(&row.all)))
                .chain(cells)
                .collect();
            let Row {
                what,
                operation,
                process,
                ..
            } = row;
            let cells = cells.join(" | ");
            writeln!(text, "| {what} | {operation} | {process} | {cells} |").ok();
        }
    }
    text
}

/// A count in the table: what is below a twentieth is none.
fn shown(count: Option<&f64>) -> String {
    match count.copied().unwrap_or_default() {
        none if none < 0.05 => "-".to_owned(),
        small if small < 9.95 => format!("{small:.1}"),
        large => format!("{large:.0}"),
    }
}

/// For a cell.
fn one_line(text: &str) -> String {
    text.replace('\n', " ").replace('|', "/")
}

/// The same with every call by name.
fn for_machines(
    machine: &Machine,
    strace: &str,
    outcomes: &[(&'static str, Outcome)],
) -> anyhow::Result<serde_json::Value> {
    let mut rows: Vec<&Row> = Vec::new();
    let mut without = BTreeMap::new();
    for (words, outcome) in outcomes {
        match outcome {
            Outcome::Counted(counted) => rows.extend(counted),
            Outcome::Missing(why) | Outcome::Failed(why) => {
                without.insert(*words, why);
            }
        }
    }
    Ok(serde_json::json!({
        "machine": serde_json::to_value(machine)?,
        "strace": strace,
        "rows": rows,
        "not_counted": without,
    }))
}

/// Stacks of ours that could not be counted.
fn failed(outcomes: &[(&'static str, Outcome)]) -> Vec<&'static str> {
    let failed = outcomes
        .iter()
        .filter(|(_, outcome)| matches!(outcome, Outcome::Failed(_)));
    failed.map(|(words, _)| *words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> Vec<(&'static str, Outcome)> {
        let calls = Each::from([("recvfrom".to_owned(), 2.04), ("mmap".to_owned(), 0.01)]);
        let groups = grouped(&calls, &Each::new());
        let row = Row {
            what: "CONNECT",
            operation: "one echo",
            process: "server".to_owned(),
            all: 12.3,
            groups: by_name(groups),
            calls,
            eventfds: Each::new(),
        };
        vec![
            ("CONNECT", Outcome::Counted(vec![row])),
            ("Go", Outcome::Missing("no Go".to_owned())),
            ("link", Outcome::Failed("a | b\nc".to_owned())),
        ]
    }

    #[test]
    fn table_has_a_row_for_each_process_and_says_what_is_missing() {
        let table = report("heading\n", &outcomes());
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "heading");
        assert_eq!(
            lines[2],
            "| clients, pair | what | process | calls | reads | writes | waits | wake-ups | descriptors | splices | yields | \
             other |"
        );
        assert_eq!(
            lines[4],
            "| CONNECT | one echo | server | 12 | 2.0 | - | - | - | - | - | - | - |"
        );
        assert_eq!(lines[5], "| Go | missing: no Go |");
        assert_eq!(lines[6], "| link | failed: a / b c |");
        let columns = |line: &str| line.matches('|').count();
        assert_eq!(columns(lines[2]), columns(lines[3]));
        assert_eq!(columns(lines[2]), columns(lines[4]));
    }

    #[test]
    fn what_is_missing_fails_nothing_and_what_failed_does() {
        assert_eq!(failed(&outcomes()), ["link"]);
    }

    #[test]
    fn echoes_can_be_shared_by_their_connections() {
        for operation in &OPERATIONS {
            let Operation {
                words,
                connections,
                few,
                more,
                ..
            } = operation;
            assert_eq!(few % connections, 0, "{words}");
            assert_eq!(more % connections, 0, "{words}");
        }
    }
}
