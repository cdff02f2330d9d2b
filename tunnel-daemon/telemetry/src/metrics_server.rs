//! The server's families, with the names, labels, buckets and zero series of upstream's server.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::{IntGaugeVec, Registry};

use crate::exposition::{Scrape, register_process};
use crate::families::{
    BUCKETS_LIFE, BUCKETS_SERVER_LATENCY, Counters, Gauge, Gauges, LazyGauge, LazyHistogram,
    Registrar, families,
};
use crate::guard::GaugeGuard;
use crate::labels::{DialFailureReason, Segment, ServiceMethod};
use crate::metrics_adit::{AditMetrics, Side};
use crate::metrics_lease::ServerLeaseMetrics;
use crate::metrics_review::ReviewMetrics;
use crate::packets::{PacketCounter, PacketKind, StreamFamilies};

const PREFIX: &str = "konnectivity_network_proxy_server_";

/// All series of one server process. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct ServerMetrics(Arc<ServerSeries>);

struct ServerSeries {
    registry: Registry,
    adit: AditMetrics,
    leases: Arc<ServerLeaseMetrics>,
    reviews: Arc<ReviewMetrics>,
    streams: StreamFamilies,
    families: ServerFamilies,
}

families! {
    /// Families with series that callers count in.
    pub struct ServerFamilies(families) {
        /// Latency of dial to the remote endpoint in seconds
        dial_duration: LazyHistogram = families.lazy_histogram("dial_duration_seconds", BUCKETS_SERVER_LATENCY),
        /// Latency of write to the frontend in seconds
        frontend_write: LazyHistogram = families.lazy_histogram("frontend_write_duration_seconds", BUCKETS_SERVER_LATENCY),
        /// Life of established end-to-end connections in seconds
        connection_duration: LazyHistogram = families.lazy_histogram("connection_duration_seconds", BUCKETS_LIFE),
        /// Number of current grpc connections, partitioned by service method.
        grpc_connections: Gauges<ServiceMethod> = families.gauges("grpc_connections", "service_method"),
        /// Number of current HTTP CONNECT connections
        http_connections: Gauge = families.gauge("http_connections"),
        /// Number of konnectivity agent connected to the proxy server. Deprecated: use ready_backends.
        ready_backend_connections: Gauge = families.gauge("ready_backend_connections"),
        /// Number of konnectivity agents connected to the proxy server, by proxy strategy
        ready_backends: IntGaugeVec = families.gauge_vec("ready_backends", &["proxy_strategy"]),
        /// Current number of pending backend dial requests
        pending_backend_dials: LazyGauge = families.lazy_gauge("pending_backend_dials"),
        /// Current number of established end-to-end connections (post-dial).
        established_connections: LazyGauge = families.lazy_gauge("established_connections"),
        /// Number of current connections blocked by a full receive channel, partitioned by service method.
        full_receive_channels: Gauges<ServiceMethod> = families.gauges("full_receive_channels", "service_method"),
        /// Number of dial failures observed. Multiple failures can occur for a single dial request.
        dial_failures: Counters<DialFailureReason> = families.counters("dial_failure_count", "reason"),
    }
}

impl Deref for ServerMetrics {
    type Target = ServerFamilies;

    fn deref(&self) -> &ServerFamilies {
        &self.0.families
    }
}

impl ServerMetrics {
    /// A set with its own registry and every family. `strategies` are the configured ones by upstream name (`default`,
    /// `destHost`, ...): each shows `ready_backends` 0 from the start.
    #[must_use]
    pub fn new(strategies: &[&'static str]) -> Self {
        let registry = Registry::new();
        register_process(&registry);
        let adit = AditMetrics::register(&registry, Side::Server);
        let families = Registrar::new(&registry, PREFIX);
        let ours = Registrar::new(&registry, "adit_");
        let metrics = Self(Arc::new(ServerSeries {
            adit,
            leases: Arc::new(ServerLeaseMetrics::declare(&families, &ours)),
            reviews: Arc::new(ReviewMetrics::declare(&ours)),
            streams: StreamFamilies::register(&families),
            families: ServerFamilies::declare(&families),
            registry,
        }));
        for strategy in strategies {
            metrics.set_ready_backends(strategy, 0);
        }
        metrics
    }

    /// The source of `/metrics`.
    #[must_use]
    pub fn scrape(&self) -> Scrape {
        Scrape::publishing(self.0.registry.clone(), &self.0.adit)
    }

    /// Adit's own families, which upstream does not have.
    #[must_use]
    pub fn adit(&self) -> &AditMetrics {
        &self.0.adit
    }

    /// Series of leases.
    #[must_use]
    pub fn leases(&self) -> &Arc<ServerLeaseMetrics> {
        &self.0.leases
    }

    /// Series of token reviews.
    #[must_use]
    pub fn reviews(&self) -> &Arc<ReviewMetrics> {
        &self.0.reviews
    }

    /// Packet counter of one segment, kept by a stream.
    #[must_use]
    pub fn packets(&self, segment: Segment) -> PacketCounter {
        self.0.streams.counter(segment)
    }

    /// A stream failed; `kind` is the packet concerned, if any. A clean end of stream is no error.
    pub fn stream_error(&self, segment: Segment, code: tonic::Code, kind: Option<PacketKind>) {
        self.0.streams.error(segment, code, kind);
    }

    /// A dial succeeded: time from the accepted `DIAL_REQ` to the forwarded `DIAL_RSP`.
    pub fn dial_succeeded(&self, elapsed: Duration) {
        self.dial_duration.observe(elapsed);
        self.0.adit.dial_succeeded(elapsed);
    }

    /// A tunnel is established.
    pub fn open_tunnel(&self) -> OpenTunnel {
        let established = self.established_connections.used().guard();
        OpenTunnel::new(established, self.connection_duration.clone())
    }

    /// Sets the number of keys in one strategy's list: agent ids, or distinct identifiers for `destHost`.
    pub fn set_ready_backends(&self, strategy: &'static str, count: usize) {
        let ready = self.ready_backends.with_label_values(&[strategy]);
        ready.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

impl std::fmt::Debug for ServerMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerMetrics")
    }
}

/// An established tunnel: counted until dropped, when its duration is recorded.
#[must_use = "the tunnel counts as ended as soon as the guard is dropped"]
#[derive(Debug)]
pub struct OpenTunnel {
    _established: GaugeGuard,
    life: LazyHistogram,
    opened: Instant,
}

impl OpenTunnel {
    pub(super) fn new(established: GaugeGuard, life: LazyHistogram) -> Self {
        Self {
            _established: established,
            life,
            opened: Instant::now(),
        }
    }

    /// How long the tunnel has been open.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.opened.elapsed()
    }
}

impl Drop for OpenTunnel {
    fn drop(&mut self) {
        self.life.observe(self.opened.elapsed());
    }
}
