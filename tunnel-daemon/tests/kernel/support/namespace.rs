//! Network namespaces of a test's own, and the helper that opens listeners in them.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use adit_config::NetnsHelperOptions;
use adit_redirect::namespaces;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::role::{CGROUP, ROLE};

/// The role of the helper.
pub(super) const HELPER: &str = "netns-helper";

/// A network namespace; it goes with the process that holds it, and with those in it.
pub(crate) struct Namespace(Child);

impl Namespace {
    /// With loopback up.
    pub(crate) fn new() -> Result<Self, String> {
        Self::after("ip link set lo up")
    }

    /// With nothing up.
    pub(crate) fn bare() -> Result<Self, String> {
        Self::after("true")
    }

    fn after(setup: &str) -> Result<Self, String> {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c"])
            .arg(format!("{setup} && echo up && exec sleep 600"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("running unshare: {error}"))?;
        let mut up = [0; 3];
        let mut output = holder.stdout.take().expect("piped");
        if output.read_exact(&mut up).is_ok() {
            return Ok(Self(holder));
        }
        let mut why = String::new();
        let mut errors = holder.stderr.take().expect("piped");
        let _read = errors.read_to_string(&mut why);
        let _ended = holder.wait();
        Err(why.trim().to_owned())
    }

    /// Its file.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }

    /// Runs a program in it.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg(program);
        command
    }

    /// Runs words in it.
    pub(crate) fn run(&self, words: &str) {
        let mut words = words.split_whitespace();
        let mut command = self.command(Path::new(words.next().expect("a program")));
        let output = command.args(words).output().expect("nsenter runs");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {why}");
    }

    /// Does something in it; what this starts is there, too.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let file = File::open(self.path()).expect("its holder runs");
        // A thread of its own, which need not find back.
        let done = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(file.as_fd(), network).expect("root may");
                work()
            });
            thread.join()
        });
        match done {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// A cable to another one, with these addresses at its ends.
    pub(crate) fn connect(&self, other: &Self, here: &str, there: &str) {
        self.connect_by("cable", other, here, there);
    }

    /// As [`Namespace::connect`], by a cable of that name.
    pub(crate) fn connect_by(&self, cable: &str, other: &Self, here: &str, there: &str) {
        let holder = other.0.id();
        self.run(&format!(
            "ip link add {cable} type veth peer name {cable} netns {holder}"
        ));
        for (namespace, address) in [(self, here), (other, there)] {
            // An IPv6 address is of use at once: nobody else can have it.
            let at_once = if address.contains(':') { " nodad" } else { "" };
            namespace.run(&format!("ip address add {address} dev {cable}{at_once}"));
            namespace.run(&format!("ip link set {cable} up"));
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ended_before = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// This program is not `adit`: its helper is this test once more.
pub(crate) fn helped_by_ourselves() {
    namespaces::start_by(helper);
}

/// Starts the helper, once its arguments are added.
pub(crate) fn helper() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "support::role::play", "--nocapture"])
        .env(ROLE, HELPER)
        .env_remove(CGROUP);
    command
}

/// The helper's process.
pub(super) fn play_helper() {
    // What the harness took for more names of tests.
    let mut told = std::env::args()
        .skip_while(|arg| arg != "--nocapture")
        .skip(1);
    let mark = told.next().expect("a mark").parse().expect("a number");
    let cgroup = told.next().filter(|path| !path.is_empty());
    let options = NetnsHelperOptions {
        mark,
        cgroup: cgroup.map(PathBuf::from),
        paths: told.map(PathBuf::from).collect(),
    };
    namespaces::helper::run(&options).expect("the daemon can be answered");
}
