//! Waiting for a named condition, with a time limit.

use std::thread;
use std::time::{Duration, Instant};

/// Interval between checks of a condition.
const POLL: Duration = Duration::from_millis(10);

/// Checks the condition until it yields a value; `None` after the limit.
pub fn poll<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
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

/// As [`poll`], and fails the test after the limit.
#[track_caller]
pub fn until<T>(what: &str, limit: Duration, condition: impl FnMut() -> Option<T>) -> T {
    poll(limit, condition).unwrap_or_else(|| panic!("not within {limit:?}: {what}"))
}

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Whether tests run at their nightly length.
pub fn is_nightly() -> bool {
    std::env::var_os("ADIT_NIGHTLY").is_some()
}
