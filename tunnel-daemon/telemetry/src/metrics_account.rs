//! Families of kernel accounting, prefix `adit_ebpf_`, the same on server and agent.
//!
//! These counts stand beside the engines' counts, which stay authoritative. Label values come from agents and from the
//! configuration, so the caller bounds the number of series.

use std::sync::Arc;

use prometheus::{GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, Registry};

use crate::families::{BUCKETS_LIFE, Counters, Gauge, Registrar, families};
use crate::labels::{AccountLoss, AccountRole, Label as _};

/// Buckets of round-trip times, in seconds: one host, one rack, one region, one ocean, trouble.
const BUCKETS_RTT: &[f64] = &[
    0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
];
/// Labels of each connection.
const LABELS: &[&str] = &["tenant", "role", "agent", "destination_class"];
const LABELS_DIRECTED: &[&str] = &["tenant", "role", "agent", "destination_class", "direction"];
/// Value of the label `tenant`: there is one tenant.
pub const TENANT: &str = "default";

/// Handles of these families. Cheap to clone; clones share the series.
#[derive(Clone)]
pub struct AccountMetrics(Arc<AccountFamilies>);

families! {
    struct AccountFamilies(families) {
        /// 1 while kernel accounting is attached to the connections of this process, else 0
        attached: Gauge = families.gauge("account_attached"),
        /// Label sets in use, excluding label sets named other
        series: Gauge = families.gauge("account_series"),
        /// Ended connections that kernel accounting missed, by reason
        lost: Counters<AccountLoss> = families.counters_from_zero("account_lost_total", "reason"),
        /// Ended connections, counted by the kernel
        connections: IntCounterVec = families.counter_vec("connections_total", LABELS),
        /// Payload bytes of TCP connections, counted by the kernel; direction sent counts bytes acknowledged by the peer
        bytes: IntCounterVec = families.counter_vec("bytes_total", LABELS_DIRECTED),
        /// TCP segments, including retransmitted segments
        segments: IntCounterVec = families.counter_vec("segments_total", LABELS_DIRECTED),
        /// TCP segments retransmitted
        retransmits: IntCounterVec = families.counter_vec("retransmits_total", LABELS),
        /// Smoothed round-trip time of a connection at its end
        rtt: HistogramVec = families.histogram_vec("rtt_seconds", BUCKETS_RTT, LABELS),
        /// Mean smoothed round-trip time of open connections, updated every 5 s; absent if no open connection has a measurement
        open_rtt: GaugeVec = families.float_gauge_vec("open_rtt_seconds", LABELS),
        /// Time from the establishment of a connection to its end
        lifetime: HistogramVec = families.histogram_vec("lifetime_seconds", BUCKETS_LIFE, LABELS),
    }
}

/// Counts of one connection, or their increase.
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
    /// The increase since `earlier`; never negative.
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

/// The series of one label set.
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

/// The exported mean round-trip time of open connections of one label set. Dropping it removes the series, so at most one
/// exists at a time.
pub struct OpenRtt {
    gauge: prometheus::Gauge,
    family: GaugeVec,
    labels: [String; LABELS.len()],
}

impl AccountMetrics {
    pub(super) fn register(registry: &Registry) -> Self {
        let families = Registrar::new(registry, "adit_ebpf_");
        Self(Arc::new(AccountFamilies::declare(&families)))
    }

    /// Sets whether kernel accounting is attached.
    pub fn attached(&self, attached: bool) {
        self.0.attached.set(i64::from(attached));
    }

    /// Sets the number of label sets, without `other`.
    pub fn series_in_use(&self, sets: usize) {
        self.0.series.set(sets);
    }

    /// Updates the total of lost connection ends for this reason; totals only grow.
    pub fn lost(&self, why: AccountLoss, in_all: u64) {
        let counter = self.0.lost.of(why);
        counter.inc_by(in_all.saturating_sub(counter.get()));
    }

    /// The series of a label set, 0 from the start except [`AccountSeries::open_rtt`]. The caller bounds the number of sets.
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
    /// Adds the increase of one connection since its last check.
    pub fn grew(&self, by: &AccountCounts) {
        self.sent_bytes.inc_by(by.sent_bytes);
        self.received_bytes.inc_by(by.received_bytes);
        self.segments_out.inc_by(by.segments_out);
        self.segments_in.inc_by(by.segments_in);
        self.retransmits.inc_by(by.retransmits);
    }

    /// Counts the end of a connection. Times in seconds; no round-trip time if none was measured.
    pub fn ended(&self, rtt_seconds: Option<f64>, lifetime_seconds: f64) {
        self.connections.inc();
        if let Some(rtt) = rtt_seconds {
            self.rtt.observe(rtt);
        }
        self.lifetime.observe(lifetime_seconds);
    }

    /// Exports the mean round-trip time of open connections, in seconds, until the returned value is dropped.
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
    /// Sets the current mean, in seconds.
    pub fn set(&self, mean_seconds: f64) {
        self.gauge.set(mean_seconds);
    }
}

impl Drop for OpenRtt {
    /// The mean of no connections is not 0: the series is absent until there is a mean again.
    fn drop(&mut self) {
        let _gone = self.family.remove_label_values(&self.labels);
    }
}
