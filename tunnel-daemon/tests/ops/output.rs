//! Output to a closed pipe, for any command.

use std::process::{Command, Stdio};

use crate::support::text;

#[test]
fn closed_standard_output_is_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
    command
        .arg("check")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("a child");
    assert_eq!(text(&output.stderr), "");
    assert!(matches!(output.status.code(), Some(0..=2)), "{output:?}");
}

/// A pipe without a reader.
fn unread() -> std::io::PipeWriter {
    let (_gone, writer) = std::io::pipe().expect("a pipe");
    writer
}

#[test]
fn unread_help_and_errors_keep_their_exit_codes() {
    for args in [&["--version"][..], &["--help"], &["server", "--help"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        let output = command.args(args).stdout(unread()).output();
        let output = output.expect("the binary runs");
        assert_eq!(text(&output.stderr), "", "{args:?}");
        assert_eq!(output.status.code(), Some(0), "{args:?}");
    }
    for (args, code) in [
        (&["server", "--nonsense"][..], 2),
        (&["status", "--admin-socket=/nonexistent/s"], 1),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_adit"));
        let status = command.args(args).stderr(unread()).status();
        let status = status.expect("the binary runs");
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}
