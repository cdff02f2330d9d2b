//! Waiting for what another task or the kernel does.

use std::time::{Duration, Instant};

/// Far beyond what anything here takes, also under emulation.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Waits until `done` holds.
///
/// # Panics
/// If it does not within two minutes; `what` says what was waited for, `state` how far it came.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool, state: impl Fn() -> String) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "no {what}: {}", state());
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
