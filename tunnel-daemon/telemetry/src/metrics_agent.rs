//! The agent's families, with the names, labels, buckets and zero series of upstream's agent.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;

use crate::exposition::{Scrape, register_process};
use crate::families::{BUCKETS_AGENT_LATENCY, Counters, Gauge, LazyHistogram, Registrar, families};
use crate::labels::{EndpointDialFailure, LinkDirection, Segment};
use crate::metrics_adit::{AditMetrics, Side};
use crate::metrics_lease::AgentLeaseMetrics;
use crate::packets::{PacketCounter, PacketKind, StreamFamilies};

const PREFIX: &str = "konnectivity_network_proxy_agent_";

/// All series of one agent process. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct AgentMetrics(Arc<AgentSeries>);

struct AgentSeries {
    registry: Registry,
    adit: AditMetrics,
    leases: Arc<AgentLeaseMetrics>,
    streams: StreamFamilies,
    families: AgentFamilies,
}

families! {
    /// Families with series that callers count in.
    pub struct AgentFamilies(families) {
        /// Latency of dial to the remote endpoint in seconds
        dial_duration: LazyHistogram = families.lazy_histogram("dial_duration_seconds", BUCKETS_AGENT_LATENCY),
        /// Count of failures to send to or receive from the proxy server, labeled by the direction (from_server or to_server). Deprecated: use
        /// stream_errors_total.
        server_connection_failures: Counters<LinkDirection> = families.counters("server_connection_failure_count", "direction"),
        // Upstream's suite compares this text and that of open_endpoint_connections byte for byte.
        /// Number of failures dialing the remote endpoint, by reason (example: timeout).
        endpoint_dial_failures: Counters<EndpointDialFailure> = families.counters("endpoint_dial_failure_total", "reason"),
        /// Current number of open server connections.
        open_server_connections: Gauge = families.gauge("open_server_connections"),
        /// Current number of servers agent is trying to connect to.
        known_server_count: Gauge = families.gauge("known_server_count"),
        /// Current number of open endpoint connections.
        open_endpoint_connections: Gauge = families.gauge("open_endpoint_connections"),
    }
}

impl Deref for AgentMetrics {
    type Target = AgentFamilies;

    fn deref(&self) -> &AgentFamilies {
        &self.0.families
    }
}

impl AgentMetrics {
    /// A set with its own registry and every family.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        register_process(&registry);
        let adit = AditMetrics::register(&registry, Side::Agent);
        let families = Registrar::new(&registry, PREFIX);
        Self(Arc::new(AgentSeries {
            adit,
            leases: Arc::new(AgentLeaseMetrics::declare(
                &families,
                &Registrar::new(&registry, "adit_"),
            )),
            streams: StreamFamilies::register(&families),
            families: AgentFamilies::declare(&families),
            registry,
        }))
    }

    /// The source of `/metrics`.
    #[must_use]
    pub fn scrape(&self) -> Scrape {
        Scrape::publishing(self.0.registry.clone(), &self.0.adit)
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

    /// A target was connected, after this time.
    pub fn dial_succeeded(&self, elapsed: Duration) {
        self.dial_duration.observe(elapsed);
        self.0.adit.dial_succeeded(elapsed);
    }

    /// Number of open target sockets.
    #[must_use]
    pub fn open_endpoint_connections(&self) -> i64 {
        self.open_endpoint_connections.get()
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
