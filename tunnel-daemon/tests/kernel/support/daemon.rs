//! The real program as a process, as root or with only the given capabilities.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities,
    configure_capability_in_ambient_set, set_capabilities, set_capabilities_secure_bits,
};

use super::confined::{self, Profile, Rights};
use super::world::{get, lanes_opened};

/// Longer than any step of these tests takes, also under emulation.
const PATIENCE: Duration = Duration::from_secs(120);
/// Log lines that name the listeners.
const STARTED: [&str; 2] = ["server is up", "agent started"];
/// Arguments of the program that the launcher starts, separated by tabs.
const TASK: &str = "ADIT_KERNEL_TEST_LAUNCH";
/// Capabilities in addition to those for loading programs, as a number.
const FURTHER: &str = "ADIT_KERNEL_TEST_CAPABILITIES";

/// The user and rights of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// The user of the tests.
    Root,
    /// An unprivileged user with the ambient capabilities for loading programs.
    Ambient,
    /// As [`User::Ambient`], with these additional capabilities.
    AmbientWith(CapabilitySet),
    /// The user of the tests, under the program's profile of `deploy/seccomp` plus these system calls. Any other call kills
    /// the process.
    Confined(&'static [&'static str]),
}

impl User {
    /// Whether the process runs as the unprivileged user.
    pub(crate) fn is_ambient(self) -> bool {
        matches!(self, Self::Ambient | Self::AmbientWith(_))
    }
}

/// A running `adit`; dropping it kills it.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts it with its log at `dir/name`, and waits until it is up. `args[0]` is the program name.
    pub(crate) fn start(user: User, name: &str, args: &[String], dir: &Path) -> Self {
        let daemon = match user {
            User::Root => Self::start_command(name, as_it_is(args), dir),
            User::Ambient => {
                let command = with_ambient(args, CapabilitySet::empty());
                Self::start_command(name, command, dir)
            }
            User::AmbientWith(further) => {
                Self::start_command(name, with_ambient(args, further), dir)
            }
            User::Confined(further) => {
                let rights = Rights {
                    profile: Profile::of(&args[1]).with(further),
                    deadly: true,
                    user: None,
                    threads: None,
                };
                confined::start(name, &rights, args, dir)
            }
        };
        daemon.until_up();
        daemon
    }

    /// Starts a prepared command with its log at `dir/name`.
    pub(crate) fn start_command(name: &str, mut command: Command, dir: &Path) -> Self {
        let log = dir.join(name);
        let file = File::create(&log).expect("the log file opens");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file);
        let child = command.spawn().expect("the program starts");
        Self { child, log }
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn until_up(&self) {
        self.until("it has started", |daemon| {
            let log = daemon.log();
            STARTED.iter().any(|line| log.contains(line))
        });
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// An address in the log line that reports the start.
    pub(crate) fn address(&self, field: &str) -> SocketAddr {
        let log = self.log();
        let started = STARTED.iter().find(|line| log.contains(*line));
        self.address_of(started.expect("it has started"), field)
    }

    /// An address in the first log line that contains `said`.
    pub(crate) fn address_of(&self, said: &str, field: &str) -> SocketAddr {
        let log = self.log();
        let line = log.lines().find(|line| line.contains(said));
        let (_, rest) = line
            .and_then(|line| line.split_once(&format!("{field}=")))
            .unwrap_or_else(|| panic!("no {field}: {log}"));
        let rest = rest.trim_start_matches("Some(");
        let end = rest.find([' ', ')']).unwrap_or(rest.len());
        rest[..end].parse().expect("an address")
    }

    /// Answer of its health port.
    pub(crate) fn get(&self, path: &str) -> String {
        get(self.address("health"), path)
    }

    /// A sample of its metrics; 0 if the series is missing.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let text = self.get("/metrics");
        let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
        let mut found = lines.filter(|(name, _)| *name == series);
        found
            .next()
            .map_or(0.0, |(_, value)| value.parse().expect("a number"))
    }

    /// Number of lanes opened since the start.
    pub(crate) fn lanes_opened(&self) -> f64 {
        lanes_opened(&self.get("/metrics"))
    }

    /// Waits until `done` holds.
    pub(crate) fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(!self.has_ended(), "ended before {what}");
            assert!(
                Instant::now() < deadline,
                "not in time: {what}\n{}",
                self.log()
            );
            std::thread::yield_now();
        }
    }

    /// Leaves the exit status for a later wait. `/proc` would not do: a zombie may be the first thread of a process that
    /// calls `exec`.
    fn has_ended(&self) -> bool {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        let id = WaitId::Pid(Pid::from_raw(raw).expect("positive"));
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(id, options).expect("a child").is_some()
    }

    /// Contents of `/proc/PID/task/TID/status`, by thread name.
    pub(crate) fn threads(&self) -> Vec<(String, String)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs");
        tasks
            .flatten()
            // Threads of the blocking pool come and go.
            .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
            .map(|status| (field(&status, "Name").to_owned(), status))
            .collect()
    }

    /// Sends SIGTERM, and waits for the end.
    pub(crate) fn end(mut self) -> ExitStatus {
        let raw = i32::try_from(self.child.id()).expect("process ids fit");
        kill_process(Pid::from_raw(raw).expect("positive"), Signal::TERM).expect("it runs");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end\n{}", self.log());
            std::thread::yield_now();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ended_before = self.child.kill();
        let ended = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- {}: {ended:?}\n{}", self.log.display(), self.log());
        }
    }
}

/// A field of a `/proc/PID/status` text.
pub(crate) fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("no {name}")).trim()
}

/// The program that cargo built. In a machine without cargo, the installed program.
fn program() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_adit"));
    if built.exists() {
        return built;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&path).map(|folder| folder.join("adit"));
    found
        .find(|file| file.exists())
        .expect("adit is built, or installed")
}

fn as_it_is(args: &[String]) -> Command {
    let (called, rest) = args.split_first().expect("a name");
    let mut command = Command::new(program());
    command.arg0(called).args(rest);
    command
}

fn with_ambient(args: &[String], further: CapabilitySet) -> Command {
    let launcher = std::env::current_exe().expect("it");
    let mut command = Command::new(launcher);
    command
        .args(["--exact", "support::daemon::launcher_becomes_the_program"])
        .arg("--nocapture")
        .env(TASK, args.join("\t"))
        .env(FURTHER, further.bits().to_string());
    command
}

/// Capabilities for loading programs on this kernel.
pub(crate) fn to_load() -> CapabilitySet {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let least = CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
    if version < (6, 8) {
        return least | CapabilitySet::PERFMON;
    }
    least
}

#[test]
fn launcher_becomes_the_program() {
    let Ok(task) = std::env::var(TASK) else {
        return; // Run as a test: there is nothing to start.
    };
    let args: Vec<&str> = task.split('\t').collect();
    let further = std::env::var(FURTHER).expect("beside the task");
    let further = further.parse().expect("a number");
    let ambient = to_load() | CapabilitySet::from_bits_retain(further);
    // Opened here, because the other user may lack access to its folder.
    let program = File::open(program()).expect("the program is there");
    rustix::io::fcntl_setfd(&program, rustix::io::FdFlags::empty()).expect("an open file");
    // Changing the user would clear the capabilities.
    set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP).expect("root may");
    let held = capabilities(None).expect("of this thread");
    let sets = CapabilitySets {
        inheritable: ambient,
        ..held
    };
    set_capabilities(None, sets).expect("root may");
    for one in ambient.iter() {
        configure_capability_in_ambient_set(one, true).expect("permitted and inheritable");
    }
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command
        .arg0(args[0])
        .args(&args[1..])
        .env_clear()
        .current_dir("/")
        .uid(confined::NOBODY)
        .gid(confined::NOBODY);
    panic!("becoming the program: {}", command.exec());
}
