//! The agent's families, with the names, labels, buckets and zero series of upstream's agent.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntGauge, Registry};

use crate::exposition::{Scrape, register_process};
use crate::families::{BUCKETS_AGENT_LATENCY, Counters, LazyHistogram, Registrar};
use crate::guard::GaugeGuard;
use crate::labels::{EndpointDialFailure, LinkDirection, Segment};
use crate::metrics_adit::{AditMetrics, Side};
use crate::metrics_lease::AgentLeaseMetrics;
use crate::metrics_server::clamped;
use crate::packets::{PacketCounter, PacketKind, StreamFamilies};

const PREFIX: &str = "konnectivity_network_proxy_agent_";

/// All series of one agent process. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct AgentMetrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    adit: AditMetrics,
    leases: Arc<AgentLeaseMetrics>,
    streams: StreamFamilies,
    dial_duration: LazyHistogram,
    server_connection_failures: Counters<LinkDirection>,
    endpoint_dial_failures: Counters<EndpointDialFailure>,
    open_server_connections: IntGauge,
    known_server_count: IntGauge,
    open_endpoint_connections: IntGauge,
}

impl AgentMetrics {
    /// A set with its own registry and every family.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        register_process(&registry);
        let adit = AditMetrics::register(&registry, Side::Agent);
        let families = Registrar::new(&registry, PREFIX);
        Self(Arc::new(Inner {
            adit,
            leases: Arc::new(AgentLeaseMetrics::register(&families, &Registrar::new(&registry, "adit_"))),
            streams: StreamFamilies::register(&families),
            dial_duration: families.lazy_histogram(
                "dial_duration_seconds",
                "Latency of dial to the remote endpoint in seconds",
                BUCKETS_AGENT_LATENCY,
            ),
            server_connection_failures: families.counters(
                "server_connection_failure_count",
                "Count of failures to send to or receive from the proxy server, labeled by the direction \
                 (from_server or to_server). Deprecated: use stream_errors_total.",
                "direction",
            ),
            // Upstream's suite compares this text and that of open_endpoint_connections byte for byte.
            endpoint_dial_failures: families.counters(
                "endpoint_dial_failure_total",
                "Number of failures dialing the remote endpoint, by reason (example: timeout).",
                "reason",
            ),
            open_server_connections: families
                .gauge("open_server_connections", "Current number of open server connections."),
            known_server_count: families
                .gauge("known_server_count", "Current number of servers agent is trying to connect to."),
            open_endpoint_connections: families
                .gauge("open_endpoint_connections", "Current number of open endpoint connections."),
            registry,
        }))
    }

    /// The source of `/metrics`.
    #[must_use]
    pub fn scrape(&self) -> Scrape {
        Scrape::with_tunnels(self.0.registry.clone(), self.0.adit.open_tunnels())
    }

    /// Series of server leases.
    #[must_use]
    pub fn leases(&self) -> &Arc<AgentLeaseMetrics> {
        &self.0.leases
    }

    /// Adit's own families, which upstream does not have.
    #[must_use]
    pub fn adit(&self) -> &AditMetrics {
        &self.0.adit
    }

    /// Packet counter of one segment (`FromAgent` sent, `ToAgent` received), kept by a link.
    #[must_use]
    pub fn packets(&self, segment: Segment) -> PacketCounter {
        self.0.streams.counter(segment)
    }

    /// The link's stream failed; `kind` is the packet concerned, if any. A clean end is no error.
    pub fn stream_error(&self, segment: Segment, code: tonic::Code, kind: Option<PacketKind>) {
        self.0.streams.error(segment, code, kind);
    }

    /// A send to or receive from a server failed (deprecated family, kept for dashboards).
    pub fn server_connection_failure(&self, direction: LinkDirection) {
        self.0.server_connection_failures.of(direction).inc();
    }

    /// A target was connected, after this time.
    pub fn dial_succeeded(&self, elapsed: Duration) {
        self.0.dial_duration.observe(elapsed);
        self.0.adit.dial_succeeded(elapsed);
    }

    /// A dial to a target failed.
    pub fn dial_failure(&self, reason: EndpointDialFailure) {
        self.0.endpoint_dial_failures.of(reason).inc();
    }

    /// Sets the number of distinct servers that this agent is connected to.
    pub fn set_open_server_connections(&self, count: usize) {
        self.0.open_server_connections.set(clamped(count));
    }

    /// Sets the number of servers that this agent knows of.
    pub fn set_known_server_count(&self, count: usize) {
        self.0.known_server_count.set(clamped(count));
    }

    /// Number of open target sockets.
    #[must_use]
    pub fn open_endpoint_connections(&self) -> i64 {
        self.0.open_endpoint_connections.get()
    }

    /// One more open target socket until the guard is dropped.
    pub fn open_endpoint_connection(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.open_endpoint_connections)
    }
}

impl Default for AgentMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for AgentMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AgentMetrics")
    }
}
