//! Metrics that a server updates once a second.

use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::Registry;

use adit_server::router::Router;
use adit_telemetry::{AditMetrics, DialCounts};

/// Updates gauges that are sums of other parts' counts, once a second.
pub(super) async fn update(metrics: AditMetrics, router: Arc<Router>) {
    const EVERY: Duration = Duration::from_secs(1);
    let mut counted = DialCounts::default();
    loop {
        let silent = router.with_registry(Registry::silent_links);
        metrics.links_silent.set(silent);
        let now = router.dial_counts();
        metrics.dials(&counted, &now);
        counted = now;
        tokio::time::sleep(EVERY).await;
    }
}
