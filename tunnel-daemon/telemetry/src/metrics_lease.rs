//! Series of leases, with the names of upstream's server and agent.

use std::time::Duration;

use adit_kube::leases::LeaseEvents;
use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use crate::families::{BUCKETS_AGENT_LATENCY, BUCKETS_DEFAULT, Registrar, families};

/// Values of the label `reason`: those of the Kubernetes API, and of requests without an answer. Any other is counted as
/// [`OTHER`], since a hostile API server could create any number of series.
const REASONS: &[&str] = &[
    "",
    "AlreadyExists",
    "BadRequest",
    "Conflict",
    "Expired",
    "Forbidden",
    "Gone",
    "InternalError",
    "Invalid",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "RequestEntityTooLarge",
    "ServerTimeout",
    "ServiceUnavailable",
    "StoreReadError",
    "Timeout",
    "TooManyRequests",
    "Unauthorized",
    "Unknown",
    "Unreachable",
    "UnsupportedMediaType",
];
/// Every other reason.
const OTHER: &str = "other";

families! {
    /// Metrics of a server, which lists leases and deletes expired ones.
    pub struct ServerLeaseMetrics(families, ours) {
        /// Number of expired leases deleted
        culled: IntCounter = families.counter("culled_leases_count"),
        /// Count of lease deletions, by HTTP status code and reason
        deletes: IntCounterVec = families.counter_vec("lease_delete_total", &["http_status_code", "reason"]),
        /// Latency of lease deletions in seconds, by HTTP status code
        delete_seconds: HistogramVec = families.histogram_vec("lease_delete_latency_seconds", BUCKETS_DEFAULT, &["http_status_code"]),
        /// Count of lease lists, by HTTP status code and reason
        lists: IntCounterVec = families.counter_vec("lease_list_total", &["http_status_code", "reason"]),
        /// Latency of lease lists in seconds, by HTTP status code
        list_seconds: HistogramVec = families.histogram_vec("lease_list_latency_seconds", BUCKETS_DEFAULT, &["http_status_code"]),
        /// Leases of servers that could not be read and were skipped, counted at each list and watch event
        skipped: IntCounter = ours.counter("leases_skipped_total"),
    }
}

families! {
    /// Metrics of an agent, which lists and watches leases.
    pub struct AgentLeaseMetrics(families, ours) {
        /// Count of server lease list calls made by the agent to the k8s apiserver, labeled by HTTP response code and reason
        lists: IntCounterVec = families.counter_vec("lease_lists_total", &["http_response_code", "reason"]),
        /// Count of server lease watch calls made by the agent to the k8s apiserver, labeled by HTTP response code and reason
        watches: IntCounterVec = families.counter_vec("lease_watches_total", &["http_response_code", "reason"]),
        /// Latency of server lease listing in seconds
        list_seconds: HistogramVec = families.histogram_vec("lease_list_latency_seconds", BUCKETS_AGENT_LATENCY, &["http_response_code"]),
        /// Leases of servers that could not be read and were skipped, counted at each list and watch event
        skipped: IntCounter = ours.counter("leases_skipped_total"),
    }
}

impl LeaseEvents for ServerLeaseMetrics {
    fn listed(&self, status: u16, reason: &str, time: Duration) {
        count(&self.lists, &self.list_seconds, status, reason, time);
    }

    fn watched(&self, _status: u16, _reason: &str) {
        // Servers watch no leases.
    }

    fn skipped(&self) {
        self.skipped.inc();
    }

    fn deleted(&self, status: u16, reason: &str, time: Duration) {
        if status == 200 {
            self.culled.inc();
        }
        count(&self.deletes, &self.delete_seconds, status, reason, time);
    }
}

impl LeaseEvents for AgentLeaseMetrics {
    fn listed(&self, status: u16, reason: &str, time: Duration) {
        count(&self.lists, &self.list_seconds, status, reason, time);
    }

    fn watched(&self, status: u16, reason: &str) {
        self.watches
            .with_label_values(&[status.to_string().as_str(), known(reason)])
            .inc();
    }

    fn skipped(&self) {
        self.skipped.inc();
    }

    fn deleted(&self, _status: u16, _reason: &str, _time: Duration) {
        // Agents delete no leases.
    }
}

/// The label value for a reason.
fn known(reason: &str) -> &'static str {
    let mut reasons = REASONS.iter().copied();
    reasons.find(|known| *known == reason).unwrap_or(OTHER)
}

/// Counts one request by its answer, and records its duration.
fn count(
    requests: &IntCounterVec,
    seconds: &HistogramVec,
    status: u16,
    reason: &str,
    time: Duration,
) {
    let status = status.to_string();
    requests
        .with_label_values(&[status.as_str(), known(reason)])
        .inc();
    seconds
        .with_label_values(&[&status])
        .observe(time.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentMetrics, ServerMetrics};

    /// Limit (operations): Values of the label `reason` of lease metrics | 22 known ones, then `other`
    #[test]
    fn unknown_reasons_share_other() {
        assert!(REASONS.iter().all(|reason| known(reason) == *reason));
        let (agent, server) = (AgentMetrics::new(), ServerMetrics::new(&["default"]));
        for number in 0..100 {
            let reason = format!("made up {number}");
            agent.leases().listed(403, &reason, Duration::ZERO);
            agent.leases().watched(403, &reason);
            server.leases().deleted(403, &reason, Duration::ZERO);
        }
        for text in [agent.scrape().text(), server.scrape().text()] {
            let shared = text
                .lines()
                .filter(|line| line.contains("reason=\"other\""));
            assert!(
                shared.clone().count() > 0 && !text.contains("made up"),
                "{text}"
            );
        }
    }
}
