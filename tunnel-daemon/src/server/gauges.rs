//! Metrics that a server updates once a second.

use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::Registry;
use adit_core::session::ProcessBudget;

use crate::budgets::publish;
use adit_server::router::Router;
use adit_telemetry::{AditMetrics, DialCounts};

/// Updates gauges that are sums of other parts' counts, once a second.
pub(super) async fn update(metrics: AditMetrics, budget: Arc<ProcessBudget>, router: Arc<Router>) {
    const EVERY: Duration = Duration::from_secs(1);
    let mut counted = DialCounts::default();
    loop {
        let silent = router.with_registry(Registry::silent_links);
        metrics.set_links_silent(silent);
        publish(&metrics, &budget);
        let now = router.dial_counts();
        metrics.dials(&counted, &now);
        counted = now;
        tokio::time::sleep(EVERY).await;
    }
}
