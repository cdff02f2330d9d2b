//! Waiting for work of another task or of the kernel.

use std::time::{Duration, Instant};

/// Longer than any step of these tests takes, also under emulation.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Waits until `done` holds.
///
/// # Panics
/// If it does not hold within two minutes. `what` names the condition, `state` describes the progress.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool, state: impl Fn() -> String) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "no {what}: {}", state());
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
