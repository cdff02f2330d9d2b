//! Tests that do not run on this host.

use std::fmt::Display;
use std::io::Write as _;
use std::net::TcpListener;

/// Says what is not run, and why, past the harness: it keeps what a test prints that passes.
pub(crate) fn skip(what: &str, why: impl Display) {
    writeln!(std::io::stderr(), "SKIPPED {what}: {why}").ok();
}

/// Whether this host has IPv6; without, `test` is skipped loudly.
pub(crate) fn has_v6(test: &str) -> bool {
    let bound = TcpListener::bind("[::1]:0");
    if let Err(error) = &bound {
        skip(test, format_args!("no IPv6 here: {error}"));
    }
    bound.is_ok()
}

/// As [`skip`], where what is missing may be a privilege. Root has them all in CI, and nothing else would tell that a test never
/// runs there.
///
/// # Panics
/// As root where `CI` is set.
pub(crate) fn skip_unprivileged(what: &str, why: impl Display) {
    let must = std::env::var_os("CI").is_some() && rustix::process::geteuid().is_root();
    assert!(!must, "{what} must run as root in CI, but: {why}");
    skip(what, why);
}
