//! What a server counts once a second.

use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::Registry;
use adit_core::session::ProcessBudget;

use crate::budgets::publish;
use adit_server::router::Router;
use adit_telemetry::{AditMetrics, DialCounts};

/// Gauges that are sums of others' counts, brought up to date once a second.
pub(super) async fn update(metrics: AditMetrics, budget: Arc<ProcessBudget>, router: Arc<Router>) {
    const EVERY: Duration = Duration::from_secs(1);
    /// Turns between looks after idle lanes.
    const LANES_EVERY: u64 = 30;
    /// Links whose lanes are glanced at in one go: some microseconds each, and a server may have ten thousand of them.
    const LINKS_PER_GO: usize = 64;
    let mut counted = DialCounts::default();
    for turn in 1_u64.. {
        let links = router.links().into_iter();
        for (at, lanes) in links.filter_map(|link| link.lanes).enumerate() {
            if at > 0 && at.is_multiple_of(LINKS_PER_GO) {
                tokio::task::yield_now().await;
            }
            lanes.poll_idle().await;
            if turn.is_multiple_of(LANES_EVERY) {
                lanes.ping_idle().await;
            }
        }
        let silent = router.with_registry(Registry::silent_links);
        metrics.set_links_silent(silent);
        publish(&metrics, &budget);
        let now = router.dial_counts();
        metrics.dials(&counted, &now);
        counted = now;
        tokio::time::sleep(EVERY).await;
    }
}
