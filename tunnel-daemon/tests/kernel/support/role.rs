//! Processes of a test: this binary again, in another role.
//!
//! The test harness runs the single test `play`, which does nothing unless an environment variable names a role. Lines with
//! the mark come from the role; all other lines come from the harness.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::{cgroup, client, namespace, world};

pub(super) const ROLE: &str = "ADIT_KERNEL_TEST_ROLE";
pub(super) const CGROUP: &str = "ADIT_KERNEL_TEST_CGROUP";
const MARK: &str = "@@ ";

/// A running role; dropping it kills it.
pub(crate) struct Role {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Role {
    /// Starts `role`, in a cgroup if one is given. The role reads its arguments as the first line.
    pub(crate) fn start(role: &str, cgroup: Option<&Path>, arguments: &str) -> Self {
        let program = std::env::current_exe().expect("this test");
        Self::start_by(Command::new(program), role, cgroup, arguments)
    }

    /// As [`Role::start`], by a command that runs the given program and arguments.
    pub(crate) fn start_by(
        mut command: Command,
        role: &str,
        cgroup: Option<&Path>,
        arguments: &str,
    ) -> Self {
        command
            .args(["--exact", "support::role::play", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            command.env(CGROUP, cgroup);
        }
        let mut child = command.spawn().expect("the test runs itself");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut role = Self {
            child,
            input,
            output,
        };
        role.say(arguments);
        role
    }

    /// Sends it a line.
    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("the role lives");
    }

    /// Returns the next line that it tells.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.output.read_line(&mut line).expect("a pipe");
            assert!(read > 0, "the role ended before it answered");
            // While a test runs, the harness prints no line break, so the mark may follow its text.
            if let Some((_, told)) = line.split_once(MARK) {
                return told.trim_end().to_owned();
            }
        }
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills it by SIGKILL, and reaps it.
    pub(crate) fn kill(&mut self) {
        let _ended_before = self.child.kill();
        let _reaped_before = self.child.wait();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Tells the test a line.
pub(crate) fn tell(line: &str) {
    println!("{MARK}{line}");
}

/// The next line from the test; `None` after the test has closed the pipe.
pub(crate) fn told() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).expect("a pipe");
    (read > 0).then(|| line.trim_end().to_owned())
}

#[test]
fn play() {
    let Ok(role) = std::env::var(ROLE) else {
        return; // Run as a test: there is no role to play.
    };
    if role == namespace::HELPER {
        return namespace::play_helper(); // Its standard input is a socket.
    }
    if let Ok(path) = std::env::var(CGROUP) {
        cgroup::enter(Path::new(&path));
    }
    let arguments = told().expect("a line of arguments");
    match role.as_str() {
        "client" => client::play(),
        "server" => world::play_server(&arguments),
        "agent" => world::play_agent(&arguments),
        "packet-filter" => crate::cases::packet_filter::play(&arguments),
        "tproxy" => crate::cases::packet_filter::play_tproxy(),
        "captured-sockets" => crate::cases::captured_sockets::play(&arguments),
        "exempt" => crate::cases::exempt::play(&arguments),
        other => panic!("no role {other:?}"),
    }
}
