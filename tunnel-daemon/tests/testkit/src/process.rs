//! Programs as child processes that end with their test, and whose logs are shown when it fails.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process, setrlimit,
    waitid,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::blocking;
use super::scrape::sample;
pub use super::scrape::sum;
use super::wait::{eventually, until, within};

/// Time for a process to start on a busy machine.
const START: Duration = Duration::from_secs(20);
/// Environment variable with the program to start, for tests that want a faster build than cargo's.
const PROGRAM: &str = "ADIT_PROGRAM";

/// Log lines shown for each process of a failed test.
const LOG_LINES_SHOWN: usize = 40;

/// A child process that is killed when dropped.
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both fail if the child has already ended.
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// Raises this process's limit on descriptors as the programs raise theirs, and returns it; `None` for no limit.
pub fn raise_descriptor_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).expect("up to the hard limit");
    limit.maximum
}

/// A running program; dropping it kills it.
pub struct Process {
    child: Child,
    log: PathBuf,
    stdin: Option<ChildStdin>,
    events: Arc<Events>,
}

/// JSON objects that a program wrote to stdout, in order.
#[derive(Default)]
struct Events {
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
struct Seen {
    lines: Vec<Value>,
    ended: bool,
}

impl Process {
    /// Starts the binary; `args[0]` is the name that it is called by. The log goes to a file in `dir`.
    pub fn start(name: &str, args: &[String], dir: &Path) -> Self {
        Self::start_program(name, &program(), args, dir)
    }

    /// As [`Process::start`], with another path to the binary.
    pub fn start_program(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let (called, rest) = args.split_first().expect("a name");
        let mut command = Command::new(program);
        command.arg0(called).args(rest);
        Self::start_command(name, command, dir)
    }

    /// Starts a prepared command.
    pub fn start_command(name: &str, mut command: Command, dir: &Path) -> Self {
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log).expect("the log file opens");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Self::spawn(command.stderr(file), log)
    }

    /// Starts a program; its stdout and stderr go to a log file in the directory, which a restart continues.
    pub fn service(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let (log, file) = continued(name, dir);
        let copy = file.try_clone().expect("the log file can be shared");
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(copy);
        Self::spawn(command.stderr(file), log)
    }

    /// As [`Process::service`], for a program that reports JSON objects on stdout.
    pub fn reporter(name: &str, program: &Path, args: &[String], dir: &Path) -> Self {
        let (log, file) = continued(name, dir);
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        Self::spawn(command.stderr(file), log)
    }

    fn spawn(command: &mut Command, log: PathBuf) -> Self {
        let started = command.spawn();
        let mut child = started.unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
        let events = Arc::new(Events::default());
        if let Some(stdout) = child.stdout.take() {
            let events = Arc::clone(&events);
            thread::spawn(move || events.collect(BufReader::new(stdout)));
        }
        let stdin = child.stdin.take();
        Self {
            child,
            log,
            stdin,
            events,
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// A field of `/proc/PID/status`.
    pub fn status_field(&self, name: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("it runs");
        let field = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        field.expect("a field").trim().to_owned()
    }

    /// As [`Process::start`], with a limit on descriptors.
    pub fn start_limited(name: &str, descriptors: u32, args: &[String], dir: &Path) -> Self {
        let limited = format!("ulimit -n {descriptors}; exec \"$@\"");
        let program = program().display().to_string();
        let mut words = ["sh", "-c", &limited, "sh", &program]
            .map(str::to_owned)
            .to_vec();
        words.extend_from_slice(args.get(1..).unwrap_or_default());
        Self::start_program(name, Path::new("/bin/sh"), &words, dir)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the log contains this.
    pub async fn logs(&self, text: &str) {
        until(text, || self.log().contains(text)).await;
    }

    /// An address from the process's JSON log, once a line has this field.
    pub fn address(&self, field: &str) -> SocketAddr {
        blocking::until(&format!("{field} in {}", self.log.display()), START, || {
            json_lines(&self.log()).find_map(|line| find(&line, field))
        })
    }

    /// As [`Self::address`], for a process that logs text.
    pub fn listener(&self, field: &str) -> SocketAddr {
        let field = format!(" {field}=");
        blocking::until(&format!("{field} in {}", self.log.display()), START, || {
            let log = self.log();
            let mut values = log.lines().filter_map(|line| line.split_once(&field));
            values.find_map(|(_, rest)| rest.split([' ', '"']).next()?.parse().ok())
        })
    }

    /// The exit status, if the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child")
    }

    /// Whether it has ended; leaves the exit status for a later wait. `/proc` would not do: a zombie may be the first thread of a
    /// process that calls `exec`.
    pub fn has_ended(&self) -> bool {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        let id = WaitId::Pid(Pid::from_raw(raw).expect("positive"));
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(id, options).expect("a child").is_some()
    }

    pub fn signal(&self, signal: Signal) {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        kill_process(Pid::from_raw(raw).expect("positive"), signal).expect("it runs");
    }

    /// Sends SIGKILL, and reaps the process.
    pub fn kill(&mut self) {
        let _ended_before = self.child.kill();
        let _reaped_before = self.child.wait();
    }

    /// Waits until the process exits by itself.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let name = self.log.display().to_string();
        blocking::until(&format!("the end of {name}"), limit, || self.ended())
    }

    pub fn is_running(&mut self) -> bool {
        self.ended().is_none()
    }

    /// Writes a line to its stdin.
    pub fn line(&mut self, text: &str) {
        let stdin = self.stdin.as_mut().expect("stdin is still open");
        writeln!(stdin, "{text}")
            .unwrap_or_else(|error| panic!("writing to {}: {error}", self.log.display()));
    }

    /// All events so far.
    pub fn events(&self) -> Vec<Value> {
        self.events.seen().lines.clone()
    }

    /// Waits for the first event, from the beginning on, for which `fits` holds.
    pub fn event(&self, what: &str, limit: Duration, fits: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + limit;
        let mut seen = self.events.seen();
        loop {
            if let Some(found) = seen.lines.iter().find(|line| fits(line)) {
                return found.clone();
            }
            let left = end.saturating_duration_since(Instant::now());
            if seen.ended || left.is_zero() {
                // Releases the lock first, because the failure report reads the events, too.
                let lines = seen.lines.clone();
                drop(seen);
                let log = self.log.display();
                panic!("{log}: no event {what} within {limit:?}: {lines:?}");
            }
            let waited = self.events.changed.wait_timeout(seen, left);
            seen = waited.expect("no reader of events panics").0;
        }
    }

    /// As [`Process::event`], selected by the field `event`.
    pub fn named_event(&self, name: &str, limit: Duration) -> Value {
        self.event(name, limit, |line| line["event"] == name)
    }

    /// The last event; waits until the program has closed its stdout.
    pub fn last_event(&self) -> Option<Value> {
        let mut seen = self.events.seen();
        while !seen.ended {
            let waited = self.events.changed.wait(seen);
            seen = waited.expect("no reader of events panics");
        }
        seen.lines.last().cloned()
    }

    /// Resident memory in bytes.
    pub fn resident_bytes(&self) -> u64 {
        let resident = self.status_field("VmRSS");
        let kib = resident.split_whitespace().next();
        let kib: Option<u64> = kib.and_then(|kib| kib.parse().ok());
        kib.expect("a resident size") * 1024
    }

    /// Number of kernel pipes that the process has open.
    pub fn pipes(&self) -> usize {
        let pipes = self.open_files();
        let pipes = pipes.filter(|link| link.to_string_lossy().starts_with("pipe:"));
        // Both ends of a pipe have the same name.
        pipes.collect::<HashSet<PathBuf>>().len()
    }

    fn open_files(&self) -> impl Iterator<Item = PathBuf> {
        let dir = format!("/proc/{}/fd", self.child.id());
        let names = fs::read_dir(dir).expect("it runs").flatten();
        names.filter_map(|name| fs::read_link(name.path()).ok())
    }

    /// Bytes in the queues of its TCP sockets, in both directions, as the kernel counts them.
    pub fn tcp_queue_bytes(&self) -> u64 {
        let sockets: HashSet<String> = self
            .open_files()
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

    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .expect("it runs")
            .count()
    }
}

pub fn program() -> PathBuf {
    named_program().unwrap_or_else(built)
}

/// The program that the environment names, instead of the one that cargo built.
pub fn named_program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).map(PathBuf::from)
}

/// The program that cargo built beside the test, or an installed one.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let beside = test.ancestors().nth(2).map(|folder| folder.join("adit"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("adit"));
    let found = beside
        .into_iter()
        .chain(installed)
        .find(|file| file.exists());
    found.expect("adit is built, or installed")
}

/// A log file to which processes of the same name append.
fn continued(name: &str, dir: &Path) -> (PathBuf, File) {
    let log = dir.join(format!("{name}.log"));
    let file = File::options().create(true).append(true).open(&log);
    (log, file.expect("the log file opens"))
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let from = lines.len().saturating_sub(LOG_LINES_SHOWN);
            eprintln!("--- {}\n{}", self.log.display(), lines[from..].join("\n"));
            for event in self.events() {
                eprintln!("    event {event}");
            }
        }
    }
}

impl Events {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no reader of events panics")
    }

    fn collect(&self, reader: impl BufRead) {
        for line in reader.lines().map_while(Result::ok) {
            if let Ok(value) = serde_json::from_str(&line) {
                self.seen().lines.push(value);
                self.changed.notify_all();
            }
        }
        self.seen().ended = true;
        self.changed.notify_all();
    }
}

/// The lines of a log that are JSON.
pub fn json_lines(log: &str) -> impl Iterator<Item = Value> {
    log.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
}

/// The access events of a log.
pub fn access_events(log: &str) -> Vec<Value> {
    let lines = json_lines(log);
    lines
        .filter(|line| line["target"] == "adit::access")
        .collect()
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
pub async fn scrape(health: SocketAddr) -> String {
    ask(health, "/metrics").await
}

/// A health port's response, head included.
pub async fn ask(health: SocketAddr, path: &str) -> String {
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
pub async fn descriptors_without_lanes(process: &Process, health: SocketAddr) -> f64 {
    let lanes = lanes(health).await;
    let all = u32::try_from(process.descriptors()).expect("a few");
    f64::from(all) - lanes
}

/// Descriptors of a process that are neither lanes nor pipes, which a relay pools, too. Waits until the number is stable, so
/// that no lane opens or closes meanwhile.
pub async fn settled_fds(process: &Process, health: SocketAddr) -> f64 {
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
pub async fn not_one_descriptor_left(process: &Process, health: SocketAddr, before: f64) {
    eventually("not one descriptor is left", async || {
        own_descriptors(process, health).await <= before
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
pub async fn no_descriptor_left(process: &Process, health: SocketAddr, before: f64) {
    /// For lanes that open or close at this moment, and for the scrape's own connection.
    const SLACK: f64 = 5.0;
    eventually("no descriptor is left", async || {
        descriptors_without_lanes(process, health).await <= before + SLACK
    })
    .await;
}

/// Waits until a series of a process has this value.
pub async fn metric(health: SocketAddr, series: &str, value: f64) {
    eventually(&format!("{series} = {value}"), async || {
        sample(&scrape(health).await, series) == Some(value)
    })
    .await;
}

/// Waits until the series of a family have this sum.
pub async fn sum_is(health: SocketAddr, family: &str, value: f64) {
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
pub async fn value(health: SocketAddr, series: &str) -> f64 {
    super::scrape::value(&scrape(health).await, series)
}

/// Waits until a series of a process has at least this value.
pub async fn at_least(health: SocketAddr, series: &str, least: f64) {
    eventually(&format!("{series} >= {least}"), async || {
        value(health, series).await >= least
    })
    .await;
}
