//! Tests that do not run on this host.

use std::fmt::Display;
use std::io::Write as _;

/// Says what is not run, and why, past the harness: it keeps what a test prints that passes.
pub(crate) fn skip(what: &str, why: impl Display) {
    writeln!(std::io::stderr(), "SKIPPED {what}: {why}").ok();
}
