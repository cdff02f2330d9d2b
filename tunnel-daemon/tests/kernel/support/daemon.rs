//! The real program as a process, as root or with only the given capabilities.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use adit_testkit::process::{Process, built};
use adit_testkit::scrape::{lanes_opened, sample};
use rustix::process::Signal;
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities,
    configure_capability_in_ambient_set, set_capabilities, set_capabilities_secure_bits,
};

use super::confined::{self, Profile, Rights};
use super::world::get;

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
pub(crate) struct Daemon(pub(crate) Process);

impl Daemon {
    /// Starts it, and waits until it is up. `args[0]` is the program name.
    pub(crate) fn start(user: User, name: &str, args: &[String], dir: &Path) -> Self {
        let ambient = |further| {
            let command = with_ambient(args, further);
            Process::start_command(name, command, dir)
        };
        let daemon = Self(match user {
            User::Root => Process::start(name, args, dir),
            User::Ambient => ambient(CapabilitySet::empty()),
            User::AmbientWith(further) => ambient(further),
            User::Confined(further) => {
                let rights = Rights {
                    profile: Profile::of(&args[1]).with(further),
                    deadly: true,
                    user: None,
                    threads: None,
                };
                confined::start(name, &rights, args, dir)
            }
        });
        daemon.until_up();
        daemon
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn until_up(&self) {
        self.until("it has started", |daemon| {
            let log = daemon.log();
            STARTED.iter().any(|line| log.contains(line))
        });
    }

    pub(crate) fn log(&self) -> String {
        self.0.log()
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
        sample(&self.get("/metrics"), series).unwrap_or(0.0)
    }

    /// Number of lanes opened since the start.
    pub(crate) fn lanes_opened(&self) -> f64 {
        lanes_opened(&self.get("/metrics"))
    }

    /// Waits until `done` holds.
    pub(crate) fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(!self.0.has_ended(), "ended before {what}");
            assert!(
                Instant::now() < deadline,
                "not in time: {what}\n{}",
                self.log()
            );
            std::thread::yield_now();
        }
    }

    /// Contents of `/proc/PID/task/TID/status`, by thread name.
    pub(crate) fn threads(&self) -> Vec<(String, String)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).expect("it runs");
        tasks
            .flatten()
            // Threads of the blocking pool come and go.
            .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
            .map(|status| (field(&status, "Name").to_owned(), status))
            .collect()
    }

    /// Sends SIGTERM, and waits for the end.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.0.signal(Signal::TERM);
        self.0.wait(PATIENCE)
    }
}

/// A field of a `/proc/PID/status` text.
pub(crate) fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap_or_else(|| panic!("no {name}")).trim()
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
    let program = File::open(built()).expect("the program is there");
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
