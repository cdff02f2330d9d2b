//! Families of what the kernel counts of our connections, prefix `adit_ebpf_`, the same on server and agent.
//!
//! Numbers of their own, beside those of the engines, which stay authoritative. Label values come from agents and from
//! the configuration, so whoever asks for series bounds how many there are.

use std::sync::Arc;

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry,
};

use crate::families::{BUCKETS_LIFE, Counters, Registrar};
use crate::labels::{AccountLoss, AccountRole, Label as _};

/// Buckets of round-trip times, in seconds: one host, one rack, one region, one ocean, trouble.
const BUCKETS_RTT: &[f64] = &[
    0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
];
/// Of each connection.
const LABELS: &[&str] = &["tenant", "role", "agent", "destination_class"];
const LABELS_DIRECTED: &[&str] = &["tenant", "role", "agent", "destination_class", "direction"];
/// Whose tunnels and connections these are: one tenant, until there are more.
pub const TENANT: &str = "default";

/// Handles of these families. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct AccountMetrics(Arc<Inner>);

struct Inner {
    attached: IntGauge,
    series: IntGauge,
    lost: Counters<AccountLoss>,
    connections: IntCounterVec,
    bytes: IntCounterVec,
    segments: IntCounterVec,
    retransmits: IntCounterVec,
    rtt: HistogramVec,
    open_rtt: GaugeVec,
    lifetime: HistogramVec,
}

/// Numbers of one connection, or what they grew by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountCounts {
    /// Payload bytes that the peer acknowledged.
    pub sent_bytes: u64,
    /// Payload bytes received.
    pub received_bytes: u64,
    /// Segments sent.
    pub segments_out: u64,
    /// Segments received.
    pub segments_in: u64,
    /// Segments sent again.
    pub retransmits: u64,
}

impl AccountCounts {
    /// What was added since; never negative.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes.saturating_sub(earlier.sent_bytes),
            received_bytes: self.received_bytes.saturating_sub(earlier.received_bytes),
            segments_out: self.segments_out.saturating_sub(earlier.segments_out),
            segments_in: self.segments_in.saturating_sub(earlier.segments_in),
            retransmits: self.retransmits.saturating_sub(earlier.retransmits),
        }
    }
}

/// The series of one set of labels.
#[derive(Clone)]
pub struct AccountSeries {
    connections: IntCounter,
    sent_bytes: IntCounter,
    received_bytes: IntCounter,
    segments_out: IntCounter,
    segments_in: IntCounter,
    retransmits: IntCounter,
    rtt: Histogram,
    open_rtts: GaugeVec,
    lifetime: Histogram,
    labels: [String; LABELS.len()],
}

/// The exported mean of the round-trip times of open connections, of one set of labels. The series goes with it, so there is
/// at most one of it at a time.
pub struct OpenRtt {
    gauge: Gauge,
    family: GaugeVec,
    labels: [String; LABELS.len()],
}

impl AccountMetrics {
    pub(super) fn register(registry: &Registry) -> Self {
        let families = Registrar::new(registry, "adit_ebpf_");
        Self(Arc::new(Inner {
            attached: families.gauge(
                "account_attached",
                "1 while the kernel accounts for connections of this process",
            ),
            series: families.gauge(
                "account_series",
                "Label sets in use, without those called other",
            ),
            lost: families.counters_from_zero(
                "account_lost_total",
                "Connections whose end was not accounted for, by reason",
                "reason",
            ),
            connections: families.counter_vec(
                "connections_total",
                "Connections that ended, as the kernel counts them",
                LABELS,
            ),
            bytes: families.counter_vec(
                "bytes_total",
                "Payload bytes of TCP connections, as the kernel counts them; sent means acknowledged by the peer",
                LABELS_DIRECTED,
            ),
            segments: families.counter_vec(
                "segments_total",
                "TCP segments, those sent again included",
                LABELS_DIRECTED,
            ),
            retransmits: families.counter_vec(
                "retransmits_total",
                "TCP segments sent again",
                LABELS,
            ),
            rtt: families.histogram_vec(
                "rtt_seconds",
                "Smoothed round-trip time of a connection at its end",
                BUCKETS_RTT,
                LABELS,
            ),
            open_rtt: families.float_gauge_vec(
                "open_rtt_seconds",
                "Mean of the smoothed round-trip times of open connections, updated every 5 s; absent where none was measured",
                LABELS,
            ),
            lifetime: families.histogram_vec(
                "lifetime_seconds",
                "Time from the establishment of a connection to its end",
                BUCKETS_LIFE,
                LABELS,
            ),
        }))
    }

    /// Whether the kernel counts.
    pub fn attached(&self, attached: bool) {
        self.0.attached.set(i64::from(attached));
    }

    /// How many sets of labels there are, without those called other.
    pub fn series_in_use(&self, sets: usize) {
        self.0.series.set(i64::try_from(sets).unwrap_or(i64::MAX));
    }

    /// Ends that were lost in all, by reason: a number that only grows.
    pub fn lost(&self, why: AccountLoss, in_all: u64) {
        let counter = self.0.lost.of(why);
        counter.inc_by(in_all.saturating_sub(counter.get()));
    }

    /// The series of a set of labels, 0 from here on, but for [`AccountSeries::open_rtt`]. The caller bounds how many there are.
    #[must_use]
    pub fn series(&self, role: AccountRole, agent: &str, class: &str) -> AccountSeries {
        let labels = [TENANT, role.as_str(), agent, class];
        let directed = |family: &IntCounterVec, direction| {
            let [tenant, role, agent, class] = labels;
            family.with_label_values(&[tenant, role, agent, class, direction])
        };
        AccountSeries {
            connections: self.0.connections.with_label_values(&labels),
            sent_bytes: directed(&self.0.bytes, "sent"),
            received_bytes: directed(&self.0.bytes, "received"),
            segments_out: directed(&self.0.segments, "sent"),
            segments_in: directed(&self.0.segments, "received"),
            retransmits: self.0.retransmits.with_label_values(&labels),
            rtt: self.0.rtt.with_label_values(&labels),
            open_rtts: self.0.open_rtt.clone(),
            lifetime: self.0.lifetime.with_label_values(&labels),
            labels: labels.map(str::to_owned),
        }
    }
}

impl AccountSeries {
    /// A connection moved so much since it was last looked at.
    pub fn grew(&self, by: &AccountCounts) {
        self.sent_bytes.inc_by(by.sent_bytes);
        self.received_bytes.inc_by(by.received_bytes);
        self.segments_out.inc_by(by.segments_out);
        self.segments_in.inc_by(by.segments_in);
        self.retransmits.inc_by(by.retransmits);
    }

    /// A connection ended. Times in seconds; no round-trip time if none was measured.
    pub fn ended(&self, rtt_seconds: Option<f64>, lifetime_seconds: f64) {
        self.connections.inc();
        if let Some(rtt) = rtt_seconds {
            self.rtt.observe(rtt);
        }
        self.lifetime.observe(lifetime_seconds);
    }

    /// Exports the mean round-trip time of connections that are open, in seconds, for as long as what is returned lives.
    #[must_use]
    pub fn open_rtt(&self, mean_seconds: f64) -> OpenRtt {
        let gauge = self.open_rtts.with_label_values(&self.labels);
        gauge.set(mean_seconds);
        OpenRtt {
            gauge,
            family: self.open_rtts.clone(),
            labels: self.labels.clone(),
        }
    }
}

impl OpenRtt {
    /// The mean now, in seconds.
    pub fn set(&self, mean_seconds: f64) {
        self.gauge.set(mean_seconds);
    }
}

impl Drop for OpenRtt {
    /// A mean of nothing is not 0: the series is absent until there is one again.
    fn drop(&mut self) {
        let _gone = self.family.remove_label_values(&self.labels);
    }
}
