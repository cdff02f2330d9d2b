//! Guards that lower a gauge or record a lifetime on every code path, cancellation included.

use std::time::{Duration, Instant};

use prometheus::IntGauge;

use crate::families::LazyHistogram;
use crate::labels::{EndReason, OpenedBy, Path};
use crate::metrics_adit::AditMetrics;

/// Raises a gauge by one until dropped.
#[must_use = "the gauge goes back down as soon as the guard is dropped"]
#[derive(Debug)]
pub struct GaugeGuard(IntGauge);

impl GaugeGuard {
    /// Counts one more in `gauge` until dropped.
    pub fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Raises a gauge by `amount`, such as bytes held in a queue, until dropped.
#[must_use = "the amount is given back as soon as the guard is dropped"]
#[derive(Debug)]
pub struct AmountGuard {
    gauge: IntGauge,
    amount: i64,
}

impl AmountGuard {
    /// A guard that holds nothing yet.
    pub fn new(gauge: &IntGauge) -> Self {
        Self {
            gauge: gauge.clone(),
            amount: 0,
        }
    }

    /// Replaces the amount held.
    pub fn set(&mut self, amount: usize) {
        let amount = i64::try_from(amount).unwrap_or(i64::MAX);
        self.gauge.add(amount.saturating_sub(self.amount));
        self.amount = amount;
    }
}

impl Drop for AmountGuard {
    fn drop(&mut self) {
        self.gauge.sub(self.amount);
    }
}

/// Counts an open tunnel. Its end is counted once, also when its task is dropped by a panic or at the end of the process.
#[must_use = "the tunnel counts as ended as soon as this is dropped"]
pub struct CountedTunnel {
    metrics: AditMetrics,
    opened_by: OpenedBy,
    reason: Option<EndReason>,
}

impl CountedTunnel {
    /// A tunnel opened for a client; its target has accepted.
    pub fn opened(metrics: &AditMetrics, path: Path) -> Self {
        metrics.tunnel_opened(path);
        Self {
            metrics: metrics.clone(),
            opened_by: OpenedBy::Client,
            reason: None,
        }
    }

    /// A tunnel opened for an agent.
    pub fn opened_by_agent(metrics: &AditMetrics) -> Self {
        Self {
            metrics: metrics.clone(),
            opened_by: OpenedBy::Agent,
            reason: None,
        }
    }

    /// Records why the tunnel ended.
    pub fn ended(mut self, reason: EndReason) {
        self.reason = Some(reason);
    }
}

impl Drop for CountedTunnel {
    fn drop(&mut self) {
        let reason = self.reason.unwrap_or_else(EndReason::of_drop);
        match self.opened_by {
            OpenedBy::Client => self.metrics.tunnel_closed(reason.end()),
            OpenedBy::Agent => self.metrics.node_tunnel_closed(reason.end()),
        }
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
    pub(super) fn new(established: &IntGauge, life: LazyHistogram) -> Self {
        Self {
            _established: GaugeGuard::new(established),
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
