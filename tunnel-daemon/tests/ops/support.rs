//! What these tests stand on: the built binary, and a demo that runs beside it.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

/// Runs the binary with these arguments to its end.
pub(crate) fn adit(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    let output = command.args(args).stdin(Stdio::null()).output();
    output.expect("the binary runs")
}

/// What it printed.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// A demo that drives tunnels until dropped.
pub(crate) struct Demo {
    child: Child,
    /// Read no further; open as long as the demo writes.
    _lines: BufReader<ChildStdout>,
    /// Where its sockets and certificates are.
    pub(crate) dir: PathBuf,
    _outer: tempfile::TempDir,
}

impl Demo {
    /// Starts one; both agents are linked when this returns.
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
        // Both fail when it has ended already.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
