//! Whether this host permits what the tests need.

use std::io::Write as _;
use std::net::TcpListener;

use adit_redirect::caps::HostCaps;

/// Whether the host has the required privileges. Otherwise prints that the test is skipped. As root in CI it panics instead,
/// because nothing else would show that the test never runs.
///
/// # Panics
/// As root in CI.
pub(crate) fn ready(test: &str) -> bool {
    let caps = HostCaps::probe();
    let missing: Vec<String> = [
        ("capabilities", &caps.capabilities),
        ("bpf", &caps.bpf),
        ("cgroup2", &caps.cgroup2),
    ]
    .into_iter()
    .filter(|(_, capability)| !capability.is_ready())
    .map(|(name, capability)| format!("{name}: {}", capability.reason()))
    .collect();
    if missing.is_empty() {
        return true;
    }
    skip(test, &missing.join("; "));
    false
}

/// As [`ready`], and whether this host has IPv6. A host without it is no failure.
pub(crate) fn ready_v6(test: &str) -> bool {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        say(test, &format!("no IPv6 here: {error}"));
        return false;
    }
    ready(test)
}

/// Prints to the real standard error, because the harness captures the output of tests.
pub(crate) fn say(test: &str, why: &str) {
    writeln!(std::io::stderr(), "SKIPPED {test}: {why}").ok();
}

/// Prints that a test is skipped here.
///
/// # Panics
/// As root in CI.
pub(crate) fn skip(test: &str, why: &str) {
    let ci = std::env::var_os("CI")
        .is_some_and(|value| !value.is_empty() && value != "false" && value != "0");
    let root = rustix::process::geteuid().is_root();
    assert!(!(ci && root), "{test} must run in CI, but: {why}");
    say(test, why);
}
