//! Waiting for a condition, with a limit and a name.

use std::thread;
use std::time::{Duration, Instant};

/// How often a condition is looked at again.
const POLL: Duration = Duration::from_millis(20);

/// Looks at the condition until it yields something; `None` once the limit has passed.
pub(crate) fn poll<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(POLL);
    }
}

/// As [`poll`], and fails the test naming what did not happen.
pub(crate) fn until<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> T {
    poll(limit, condition).unwrap_or_else(|| panic!("not within {limit:?}: {what}"))
}

/// Shorthand for whole seconds.
pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Whether tests run at the lengths of the night.
pub(crate) fn is_nightly() -> bool {
    std::env::var_os("ADIT_NIGHTLY").is_some()
}
