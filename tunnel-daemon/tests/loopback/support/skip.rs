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
