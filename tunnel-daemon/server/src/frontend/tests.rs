//! What the tests of frontends share.

use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::frontend::events::FrontendContext;
use crate::router::{DialLimits, Router};
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::tasks::Tasks;
use adit_telemetry::{AccessLog, ServerMetrics};

impl FrontendContext {
    /// A server without agents, whose dials wait forever.
    pub(crate) fn for_tests() -> Arc<Self> {
        let limits = DialLimits {
            pending_max: 1,
            timeout: None,
            dead_after: Duration::from_secs(8),
        };
        let registry = Registry::new("default".parse().unwrap());
        let metrics = ServerMetrics::new(&["default"]);
        let suppressed = metrics.adit().access_events_suppressed.clone();
        Arc::new(Self {
            upstream: None,
            router: Router::new(registry, limits),
            metrics,
            access: Arc::new(AccessLog::new(1, suppressed)),
            relay: None,
            descriptors: Arc::new(Descriptors::unlimited()),
            accounts: Accounts::off(),
            limits: Arc::default(),
            users: None,
            tasks: Tasks::new(10_000),
            leaving: CancellationToken::new(),
        })
    }
}
