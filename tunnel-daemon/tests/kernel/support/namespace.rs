//! Network namespaces of a test, and the helper that opens listeners in them.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use adit_config::NetnsHelperOptions;
use adit_redirect::namespaces;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::role::{CGROUP, ROLE};

/// Role name of the helper.
pub(super) const HELPER: &str = "netns-helper";

/// A network namespace. It lives as long as its holder process or a process in it.
pub(crate) struct Namespace(Child);

impl Namespace {
    /// Creates one with loopback up.
    pub(crate) fn new() -> Result<Self, String> {
        Self::after("ip link set lo up")
    }

    /// Creates one with all interfaces down.
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

    /// Path of the namespace file.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }

    /// A command that runs a program in it.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg(program);
        command
    }

    /// Runs a command line in it.
    pub(crate) fn run(&self, words: &str) {
        let mut words = words.split_whitespace();
        let mut command = self.command(Path::new(words.next().expect("a program")));
        let output = command.args(words).output().expect("nsenter runs");
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {why}");
    }

    /// Runs `work` in it. Processes that `work` starts are in it, too.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let file = File::open(self.path()).expect("its holder runs");
        // A thread of its own, so that switching back is not needed.
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

    /// Connects it to another namespace by a veth pair with these addresses.
    pub(crate) fn connect(&self, other: &Self, here: &str, there: &str) {
        self.connect_by("cable", other, here, there);
    }

    /// As [`Namespace::connect`], with interfaces of this name.
    pub(crate) fn connect_by(&self, cable: &str, other: &Self, here: &str, there: &str) {
        let holder = other.0.id();
        self.run(&format!(
            "ip link add {cable} type veth peer name {cable} netns {holder}"
        ));
        for (namespace, address) in [(self, here), (other, there)] {
            // No duplicate address detection, so the IPv6 address is usable at once.
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

/// The helper is this test binary, because the test is not `adit`.
pub(crate) fn helped_by_ourselves() {
    namespaces::start_by(helper);
}

/// A command for the helper, to which arguments are added.
pub(crate) fn helper() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "support::role::play", "--nocapture"])
        .env(ROLE, HELPER)
        .env_remove(CGROUP);
    command
}

/// Main function of the helper process.
pub(super) fn play_helper() {
    // The harness takes these arguments for further test names.
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
