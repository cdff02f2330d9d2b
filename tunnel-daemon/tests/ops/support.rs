//! Shared by these tests: the built binary, and a demo that runs beside it.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// Runs the binary with these arguments to its end.
pub(crate) fn adit(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    let output = command.args(args).stdin(Stdio::null()).output();
    output.expect("the binary runs")
}

/// Converts output to text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// A demo that drives tunnels until it is dropped.
pub(crate) struct Demo {
    child: Child,
    /// Not read any further, but kept open while the demo writes.
    _lines: BufReader<ChildStdout>,
    /// Folder of its sockets and certificates.
    pub(crate) dir: PathBuf,
    _outer: tempfile::TempDir,
}

impl Demo {
    /// Starts a demo, and waits until both agents are linked.
    pub(crate) fn start() -> Self {
        let outer = tempfile::Builder::new()
            .prefix("adit-")
            .tempdir()
            .expect("a temporary folder");
        let dir = outer.path().join("demo");
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        command.args(["demo", "--plain", "--dir"]).arg(&dir);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the demo starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut seen = String::new();
        while !seen.contains("adit top --admin-socket") {
            assert_ne!(
                lines.read_line(&mut seen).expect("a line"),
                0,
                "ended:\n{seen}"
            );
        }
        Self {
            child,
            _lines: lines,
            dir,
            _outer: outer,
        }
    }

    /// The path of a socket in its folder.
    pub(crate) fn socket(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // Both calls fail if the demo has ended already.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
