//! The server's families, with the names, labels, buckets and zero series of upstream's server.

use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntGauge, IntGaugeVec, Registry};

use crate::exposition::{Scrape, register_process};
use crate::families::{
    BUCKETS_LIFE, BUCKETS_SERVER_LATENCY, Counters, Gauges, LazyGauge, LazyHistogram, Registrar,
};
use crate::guard::{GaugeGuard, OpenTunnel};
use crate::labels::{DialFailureReason, Segment, ServiceMethod};
use crate::metrics_adit::{AditMetrics, Side};
use crate::metrics_lease::ServerLeaseMetrics;
use crate::metrics_review::ReviewMetrics;
use crate::packets::{PacketCounter, PacketKind, StreamFamilies};

const PREFIX: &str = "konnectivity_network_proxy_server_";

/// All series of one server process. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct ServerMetrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    adit: AditMetrics,
    leases: Arc<ServerLeaseMetrics>,
    reviews: Arc<ReviewMetrics>,
    streams: StreamFamilies,
    dial_duration: LazyHistogram,
    frontend_write: LazyHistogram,
    connection_duration: LazyHistogram,
    grpc_connections: Gauges<ServiceMethod>,
    http_connections: IntGauge,
    ready_backend_connections: IntGauge,
    ready_backends: IntGaugeVec,
    pending_backend_dials: LazyGauge,
    established_connections: LazyGauge,
    full_receive_channels: Gauges<ServiceMethod>,
    dial_failures: Counters<DialFailureReason>,
}

impl ServerMetrics {
    /// A set with its own registry and every family. `strategies` are the configured ones by upstream name (`default`,
    /// `destHost`, ...): each shows `ready_backends` 0 from the start.
    #[must_use]
    pub fn new(strategies: &[&'static str]) -> Self {
        let registry = Registry::new();
        register_process(&registry);
        let adit = AditMetrics::register(&registry, Side::Server);
        let inner = Inner::register(&Registrar::new(&registry, PREFIX), adit, registry.clone());
        let metrics = Self(Arc::new(inner));
        for strategy in strategies {
            metrics.set_ready_backends(strategy, 0);
        }
        metrics
    }

    /// The source of `/metrics`.
    #[must_use]
    pub fn scrape(&self) -> Scrape {
        Scrape::with_tunnels(self.0.registry.clone(), self.0.adit.open_tunnels())
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

    /// A dial failed. One dial may fail for several reasons.
    pub fn dial_failure(&self, reason: impl Into<DialFailureReason>) {
        self.0.dial_failures.of(reason.into()).inc();
    }

    /// A dial succeeded: time from the accepted `DIAL_REQ` to the forwarded `DIAL_RSP`.
    pub fn dial_succeeded(&self, elapsed: Duration) {
        self.0.dial_duration.observe(elapsed);
        self.0.adit.dial_succeeded(elapsed);
    }

    /// How long one write to a client waited; zero when the client took it at once.
    pub fn frontend_write(&self, waited: Duration) {
        self.0.frontend_write.observe(waited);
    }

    /// A dial waits for its answer.
    pub fn pending_dial(&self) -> GaugeGuard {
        GaugeGuard::new(self.0.pending_backend_dials.used())
    }

    /// A tunnel is established.
    pub fn open_tunnel(&self) -> OpenTunnel {
        OpenTunnel::new(
            self.0.established_connections.used(),
            self.0.connection_duration.clone(),
        )
    }

    /// A gRPC call is open.
    pub fn grpc_connection(&self, method: ServiceMethod) -> GaugeGuard {
        GaugeGuard::new(self.0.grpc_connections.of(method))
    }

    /// An HTTP CONNECT handler is open.
    pub fn http_connection(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.http_connections)
    }

    /// A reader of `method` is blocked by a full queue.
    pub fn full_receive_channel(&self, method: ServiceMethod) -> GaugeGuard {
        GaugeGuard::new(self.0.full_receive_channels.of(method))
    }

    /// Sets the number of keys in one strategy's list: agent ids, or distinct identifiers for `destHost`.
    pub fn set_ready_backends(&self, strategy: &'static str, count: usize) {
        self.0
            .ready_backends
            .with_label_values(&[strategy])
            .set(clamped(count));
    }

    /// Sets the deprecated total: keys of the list that changed last.
    pub fn set_ready_backend_connections(&self, count: usize) {
        self.0.ready_backend_connections.set(clamped(count));
    }
}

impl Inner {
    fn register(families: &Registrar<'_>, adit: AditMetrics, registry: Registry) -> Self {
        let ours = Registrar::new(&registry, "adit_");
        let leases = Arc::new(ServerLeaseMetrics::register(families, &ours));
        let reviews = Arc::new(ReviewMetrics::register(&ours));
        Self {
            registry,
            adit,
            leases,
            reviews,
            streams: StreamFamilies::register(families),
            dial_duration: families.lazy_histogram(
                "dial_duration_seconds",
                "Latency of dial to the remote endpoint in seconds",
                BUCKETS_SERVER_LATENCY,
            ),
            frontend_write: families.lazy_histogram(
                "frontend_write_duration_seconds",
                "Latency of write to the frontend in seconds",
                BUCKETS_SERVER_LATENCY,
            ),
            connection_duration: families.lazy_histogram(
                "connection_duration_seconds",
                "Life of established end-to-end connections in seconds",
                BUCKETS_LIFE,
            ),
            grpc_connections: families.gauges(
                "grpc_connections",
                "Number of current grpc connections, partitioned by service method.",
                "service_method",
            ),
            http_connections: families.gauge("http_connections", "Number of current HTTP CONNECT connections"),
            ready_backend_connections: families.gauge(
                "ready_backend_connections",
                "Number of konnectivity agent connected to the proxy server. Deprecated: use ready_backends.",
            ),
            ready_backends: families.gauge_vec(
                "ready_backends",
                "Number of konnectivity agents connected to the proxy server, by proxy strategy",
                &["proxy_strategy"],
            ),
            pending_backend_dials: families
                .lazy_gauge("pending_backend_dials", "Current number of pending backend dial requests"),
            established_connections: families.lazy_gauge(
                "established_connections",
                "Current number of established end-to-end connections (post-dial).",
            ),
            full_receive_channels: families.gauges(
                "full_receive_channels",
                "Number of current connections blocked by a full receive channel, partitioned by service method.",
                "service_method",
            ),
            dial_failures: families.counters(
                "dial_failure_count",
                "Number of dial failures observed. Multiple failures can occur for a single dial request.",
                "reason",
            ),
        }
    }
}

/// A count as a gauge value.
pub(super) fn clamped(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl std::fmt::Debug for ServerMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerMetrics")
    }
}
