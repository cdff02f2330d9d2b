//! The demo's colours: on a terminal unless disabled, and never on a pipe.

use std::io::Read as _;
use std::process::{ChildStdout, Command, Stdio};

use crate::support::process::KillOnDrop;
use crate::support::skip::has_program;

/// Runs the demo until dropped.
struct Demo {
    // Killing script(1) also ends the demo on its terminal.
    _child: KillOnDrop,
    out: ChildStdout,
    _outer: tempfile::TempDir,
}

/// Where the demo writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    Terminal,
    Pipe,
}

impl Demo {
    fn start(on: On, flags: &str, env: &[(&str, &str)]) -> Self {
        let outer = tempfile::Builder::new()
            .prefix("adit-")
            .tempdir()
            .expect("a temporary folder");
        let dir = outer.path().join("demo");
        let program = env!("CARGO_BIN_EXE_adit");
        let line = format!("exec {program} demo {flags} --dir {}", dir.display());
        let mut command = match on {
            On::Terminal => {
                let mut script = Command::new("script");
                script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
                script
            }
            On::Pipe => {
                let mut shell = Command::new("sh");
                shell.args(["-c", &line]);
                shell
            }
        };
        command.env_remove("NO_COLOR").env("TERM", "xterm");
        command.envs(env.iter().copied());
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let out = child.stdout.take().expect("piped");
        Self {
            _child: KillOnDrop(child),
            out,
            _outer: outer,
        }
    }

    /// The demo's output up to its first command.
    fn introduction(&mut self) -> String {
        let (mut seen, mut some) = (Vec::new(), [0; 256]);
        loop {
            let count = self.out.read(&mut some).expect("it writes");
            let text = String::from_utf8_lossy(&seen).into_owned();
            assert!(count > 0, "ended: {text:?}");
            seen.extend_from_slice(&some[..count]);
            let text = String::from_utf8_lossy(&seen).into_owned();
            // The command after the first comment is complete.
            if text
                .split_once("# a page")
                .is_some_and(|(_, rest)| rest.lines().count() > 2)
            {
                return text;
            }
        }
    }
}

/// script(1) makes a terminal.
fn has_script() -> bool {
    has_program("script", "colours of the demo")
}

#[test]
fn a_terminal_gets_colours() {
    if has_script() {
        let shown = Demo::start(On::Terminal, "", &[]).introduction();
        assert!(shown.contains("\x1b[1mAdit demo"), "{shown:?}");
        assert!(shown.contains("\x1b[2m# a page"), "{shown:?}");
    }
}

#[test]
fn a_terminal_with_colours_disabled_gets_none() {
    if !has_script() {
        return;
    }
    for (flags, env) in [
        ("--plain", &[][..]),
        ("", &[("NO_COLOR", "1")]),
        ("", &[("TERM", "dumb")]),
    ] {
        let shown = Demo::start(On::Terminal, flags, env).introduction();
        assert!(shown.contains("Adit demo"), "{shown:?}");
        assert!(!shown.contains('\x1b'), "{flags} {env:?}: {shown:?}");
    }
}

#[test]
fn a_pipe_gets_no_colours() {
    let shown = Demo::start(On::Pipe, "", &[]).introduction();
    assert!(shown.contains("Adit demo"), "{shown:?}");
    assert!(!shown.contains('\x1b'), "{shown:?}");
}
