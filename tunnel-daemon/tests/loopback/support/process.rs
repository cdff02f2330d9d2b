//! The real binary as a child process, with its ports read from its log.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::wait::{until_blocking, within};
use super::world::sample;

/// Time for a process to start on a busy machine.
const START: Duration = Duration::from_secs(20);
/// Environment variable with the program to start, for tests that want a faster build than cargo's.
const PROGRAM: &str = "ADIT_PROGRAM";

/// A running `adit`; dropping it kills it.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts the binary; `args[0]` is the name that it is called by. The log goes to a file in `dir`.
    pub(crate) fn start(name: &str, args: &[String], dir: &Path) -> Self {
        Self::start_program(name, &program(), args, dir)
    }

    /// As [`Process::start`], with another path to the binary.
    pub(crate) fn start_program(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let (called, rest) = args.split_first().expect("a name");
        let mut command = Command::new(program);
        command.arg0(called).args(rest);
        Self::start_command(name, command, dir)
    }

    /// Starts a prepared command.
    pub(crate) fn start_command(name: &str, mut command: Command, dir: &Path) -> Self {
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log).expect("the log file opens");
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("the binary starts");
        Self { child, log }
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// A field of `/proc/PID/status`.
    pub(crate) fn status_field(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let field = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        field.expect("a field").trim().to_owned()
    }

    /// As [`Process::start`], with a limit on descriptors.
    pub(crate) fn start_limited(name: &str, descriptors: u32, args: &[String], dir: &Path) -> Self {
        let limited = format!("ulimit -n {descriptors}; exec \"$@\"");
        let program = program().display().to_string();
        let mut words = ["sh", "-c", &limited, "sh", &program]
            .map(str::to_owned)
            .to_vec();
        words.extend_from_slice(args.get(1..).unwrap_or_default());
        Self::start_program(name, Path::new("/bin/sh"), &words, dir)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// An address from the process's JSON log, once a line has this field.
    pub(crate) fn address(&self, field: &str) -> SocketAddr {
        until_blocking(&format!("{field} in {}", self.log.display()), START, || {
            let log = self.log();
            let lines = log
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.filter_map(|line| find(&line, field)).next()
        })
    }

    /// As [`Self::address`], for a process that logs text.
    pub(crate) fn listener(&self, field: &str) -> SocketAddr {
        let field = format!(" {field}=");
        until_blocking(&format!("{field} in {}", self.log.display()), START, || {
            let log = self.log();
            let mut values = log.lines().filter_map(|line| line.split_once(&field));
            values.find_map(|(_, rest)| rest.split([' ', '"']).next()?.parse().ok())
        })
    }

    /// The exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        kill_process(Pid::from_raw(raw).expect("positive"), signal).expect("it runs");
    }

    /// Sends SIGKILL, and reaps the process.
    pub(crate) fn kill(&mut self) {
        let _ended_before = self.child.kill();
        let _reaped_before = self.child.wait();
    }

    /// Waits until the process exits by itself.
    pub(crate) fn end(&mut self, limit: Duration) -> ExitStatus {
        let name = self.log.display().to_string();
        until_blocking(&format!("the end of {name}"), limit, || {
            self.child.try_wait().expect("a child")
        })
    }

    /// Resident memory in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("a resident size") * 1024
    }

    /// Number of kernel pipes that the process has open.
    pub(crate) fn pipes(&self) -> usize {
        let dir = format!("/proc/{}/fd", self.child.id());
        let names = fs::read_dir(dir).expect("it runs").flatten();
        let links = names.filter_map(|name| fs::read_link(name.path()).ok());
        let pipes = links.filter(|link| link.to_string_lossy().starts_with("pipe:"));
        // Both ends of a pipe have the same name.
        pipes.collect::<HashSet<PathBuf>>().len()
    }

    /// Bytes in the queues of its TCP sockets, in both directions, as the kernel counts them.
    pub(crate) fn tcp_queue_bytes(&self) -> u64 {
        let dir = format!("/proc/{}/fd", self.child.id());
        let names = fs::read_dir(dir).expect("it runs").flatten();
        let sockets: HashSet<String> = names
            .filter_map(|name| fs::read_link(name.path()).ok())
            .filter_map(|link| {
                let inode = link.to_str()?.strip_prefix("socket:[")?;
                Some(inode.strip_suffix(']')?.to_owned())
            })
            .collect();
        let table = fs::read_to_string(format!("/proc/{}/net/tcp", self.child.id()));
        let queues = |line: &str| {
            let mut fields = line.split_whitespace();
            let (queues, inode) = (fields.nth(4)?, fields.nth(4)?);
            let (sending, receiving) = queues.split_once(':')?;
            let bytes = |hex| u64::from_str_radix(hex, 16).ok();
            let both = bytes(sending)? + bytes(receiving)?;
            sockets.contains(inode).then(|| (inode.to_owned(), both))
        };
        let table = table.expect("it runs");
        // If the table changes during the read, it may contain a socket more than once.
        let each: HashMap<String, u64> = table.lines().filter_map(queues).collect();
        each.values().sum()
    }

    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .expect("it runs")
            .count()
    }
}

pub(crate) fn program() -> PathBuf {
    named_program().unwrap_or_else(|| env!("CARGO_BIN_EXE_adit").into())
}

/// The program that [`PROGRAM`] names, instead of the one that cargo built.
pub(crate) fn named_program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).map(PathBuf::from)
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let from = lines.len().saturating_sub(30);
            eprintln!("--- {}\n{}", self.log.display(), lines[from..].join("\n"));
        }
    }
}

/// An address in a field at any depth: the value itself, or the first TCP address of a list of `--frontend` values.
fn find(value: &Value, field: &str) -> Option<SocketAddr> {
    let object = value.as_object()?;
    let text = object.get(field).and_then(Value::as_str);
    let address = |part: &str| {
        let tcp = part.split_once("=tcp:").map_or(part, |(_, tcp)| tcp);
        tcp.parse().ok()
    };
    text.and_then(|text| text.split(',').find_map(address))
        .or_else(|| object.values().find_map(|inner| find(inner, field)))
}

/// The metrics of a health port.
pub(crate) async fn scrape(health: SocketAddr) -> String {
    ask(health, "/metrics").await
}

/// A health port's response, head included.
pub(crate) async fn ask(health: SocketAddr, path: &str) -> String {
    within(path, async {
        let mut stream = TcpStream::connect(health).await?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>(text)
    })
    .await
    .expect("the health port answers")
}

/// Number of bound lanes.
async fn lanes(health: SocketAddr) -> f64 {
    let text = scrape(health).await;
    let of = |state: &str| {
        let lanes = sample(&text, &format!("adit_lanes{{state=\"{state}\"}}"));
        lanes.expect("a gauge of lanes")
    };
    of("idle") + of("busy")
}

/// Descriptors of a process that are not lanes. Lanes are pooled, and may open or close meanwhile.
pub(crate) async fn descriptors_without_lanes(process: &Process, health: SocketAddr) -> f64 {
    let lanes = lanes(health).await;
    let all = u32::try_from(process.descriptors()).expect("a few");
    f64::from(all) - lanes
}

/// Descriptors of a process that are neither lanes nor pipes, which a relay pools, too. Waits until the number is stable, so
/// that no lane opens or closes meanwhile.
pub(crate) async fn settled_fds(process: &Process, health: SocketAddr) -> f64 {
    const LOOKS: u32 = 10;
    within("descriptors settle", async {
        let (mut last, mut looks) = (own_descriptors(process, health).await, 0);
        while looks < LOOKS {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = own_descriptors(process, health).await;
            looks = if now == last { looks + 1 } else { 0 };
            last = now;
        }
        last
    })
    .await
}

/// Waits until a process holds not a single descriptor more than before, lanes and pipes aside.
pub(crate) async fn not_one_descriptor_left(process: &Process, health: SocketAddr, before: f64) {
    within("not one descriptor is left", async {
        while own_descriptors(process, health).await > before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// Descriptors of a process that are neither lanes nor pipes.
async fn own_descriptors(process: &Process, health: SocketAddr) -> f64 {
    let pipes = u32::try_from(process.pipes()).expect("a few");
    // A pipe has two ends.
    descriptors_without_lanes(process, health).await - 2.0 * f64::from(pipes)
}

/// Waits until a process holds no more descriptors than `before`, except lanes and a small slack.
pub(crate) async fn no_descriptor_left(process: &Process, health: SocketAddr, before: f64) {
    /// For lanes that open or close at this moment, and for the scrape's own connection.
    const SLACK: f64 = 5.0;
    within("no descriptor is left", async {
        while descriptors_without_lanes(process, health).await > before + SLACK {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

/// Waits until a series of a process has this value.
pub(crate) async fn metric(health: SocketAddr, series: &str, value: f64) {
    within(&format!("{series} = {value}"), async {
        while sample(&scrape(health).await, series) != Some(value) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

/// The sum of all series of a family that has labels.
pub(crate) fn sum(text: &str, family: &str) -> f64 {
    let of_it = |line: &&str| {
        let labels = line.strip_prefix(family);
        labels.is_some_and(|labels| labels.starts_with('{'))
    };
    text.lines()
        .filter(of_it)
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}

/// Waits until the series of a family have this sum.
pub(crate) async fn sum_is(health: SocketAddr, family: &str, value: f64) {
    const LOOKS: u32 = 600;
    let mut last = 0.0;
    for _look in 0..LOOKS {
        last = sum(&scrape(health).await, family);
        if last == value {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{family} is {last}, not {value}");
}

/// The value of a series of a process, which must exist.
pub(crate) async fn value(health: SocketAddr, series: &str) -> f64 {
    let text = scrape(health).await;
    sample(&text, series).unwrap_or_else(|| panic!("no series {series}"))
}

/// Waits until a series of a process has at least this value.
pub(crate) async fn at_least(health: SocketAddr, series: &str, least: f64) {
    within(&format!("{series} >= {least}"), async {
        while value(health, series).await < least {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}
