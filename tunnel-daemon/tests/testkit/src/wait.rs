//! Waiting for a condition or a future, with a limit and a name.

use std::time::{Duration, Instant};

/// Limit for any single step of a test, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks of a condition.
const POLL: Duration = Duration::from_millis(10);

/// Awaits `work`. After the limit the test fails and names what did not happen.
#[track_caller]
pub fn within<T>(what: &str, work: impl Future<Output = T>) -> impl Future<Output = T> {
    within_for(LIMIT, what, work)
}

/// As [`within`] with another limit.
#[track_caller]
pub fn within_for<T>(
    limit: Duration,
    what: &str,
    work: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        match tokio::time::timeout(limit, work).await {
            Ok(value) => value,
            Err(_elapsed) => panic!("not within {limit:?}: {what} ({caller})"),
        }
    }
}

/// Checks the condition until it holds.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    until_for(LIMIT, what, condition)
}

/// As [`until`] with another limit.
#[track_caller]
pub fn until_for(
    limit: Duration,
    what: &str,
    mut condition: impl FnMut() -> bool,
) -> impl Future<Output = ()> {
    within_for(limit, what, async move {
        while !condition() {
            tokio::time::sleep(POLL).await;
        }
    })
}

/// As [`until`], for a condition that takes a call to another process.
#[track_caller]
pub fn eventually(
    what: &str,
    mut condition: impl AsyncFnMut() -> bool,
) -> impl Future<Output = ()> {
    within(what, async move {
        while !condition().await {
            tokio::time::sleep(2 * POLL).await;
        }
    })
}

/// Checks a number until it has not changed for a second, which means that its source is blocked. A check may take a good part
/// of a second, as one of the table of all sockets of a host does.
#[track_caller]
pub fn until_still(what: &str, mut number: impl FnMut() -> u64) -> impl Future<Output = ()> {
    within(what, stands_still(async move || number()))
}

/// As [`until_still`], for a number from an asynchronous call, and without a limit.
pub async fn stands_still(mut number: impl AsyncFnMut() -> u64) {
    const STILL: Duration = Duration::from_secs(1);
    const LOOKS: u32 = 5;
    let (mut last, mut looks, mut since) = (number().await, 0, Instant::now());
    while looks < LOOKS || since.elapsed() < STILL {
        tokio::time::sleep(POLL).await;
        let now = number().await;
        if now == last {
            looks += 1;
        } else {
            (last, looks, since) = (now, 0, Instant::now());
        }
    }
}
