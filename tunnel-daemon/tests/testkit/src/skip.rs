//! Skips tests that this host cannot run.

use std::fmt::Display;
use std::io::Write as _;
use std::net::TcpListener;
use std::process::Command;

/// Reports what is skipped, and why, past the test harness, which captures the output of tests that pass.
pub fn skip(what: &str, why: impl Display) {
    say(&format!("SKIPPED {what}: {why}"));
}

pub(crate) fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").ok();
}

/// Whether a program is installed. Without it `test` is reported as skipped, and fails where `CI` is set.
pub fn has_program(program: &str, test: &str) -> bool {
    let found = finds_program(program, test);
    assert!(
        found || std::env::var_os("CI").is_none(),
        "CI has {program}"
    );
    found
}

/// As [`has_program`], for a program that CI does not install in every run.
pub fn finds_program(program: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        skip(test, format_args!("no {program}"));
    }
    found
}

/// Whether this host has IPv6. Without IPv6 `test` is reported as skipped.
pub fn has_v6(test: &str) -> bool {
    let bound = TcpListener::bind("[::1]:0");
    if let Err(error) = &bound {
        skip(test, format_args!("no IPv6 here: {error}"));
    }
    bound.is_ok()
}

/// As [`skip`], where a missing privilege may be the cause. In CI root has every privilege, and a skip there would hide that a
/// test never runs.
///
/// # Panics
/// As root where `CI` is set.
pub fn skip_unprivileged(what: &str, why: impl Display) {
    let ci = std::env::var_os("CI")
        .is_some_and(|value| !value.is_empty() && value != "false" && value != "0");
    let must = ci && rustix::process::geteuid().is_root();
    assert!(!must, "{what} must run as root in CI, but: {why}");
    skip(what, why);
}
