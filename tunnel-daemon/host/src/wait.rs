//! Polling for conditions that send no notification.

use std::time::Duration;

/// Polls `done` until it holds or `limit` has passed.
pub async fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) {
    const LOOK_EVERY: Duration = Duration::from_millis(50);
    let deadline = tokio::time::Instant::now() + limit;
    while !done() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
