//! Guards: a gauge goes back down, and a life is measured, on every path out, cancelled ones included.

use std::time::{Duration, Instant};

use prometheus::IntGauge;

use crate::families::LazyHistogram;
use crate::labels::{EndReason, OpenedBy, Path};
use crate::metrics_adit::AditMetrics;

/// Holds a gauge one higher for as long as it lives.
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

/// Holds a gauge `amount` higher: bytes held in a queue, say.
#[must_use = "the amount is given back as soon as the guard is dropped"]
#[derive(Debug)]
pub struct AmountGuard {
    gauge: IntGauge,
    amount: i64,
}

impl AmountGuard {
    /// Nothing held yet.
    pub fn new(gauge: &IntGauge) -> Self {
        Self {
            gauge: gauge.clone(),
            amount: 0,
        }
    }

    /// Holds `amount` from now on, whatever it was before.
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

/// An open tunnel. Its end is counted once, also when its task is cut off, which a panic and the end of the process do.
#[must_use = "the tunnel counts as ended as soon as this is dropped"]
pub struct CountedTunnel {
    metrics: AditMetrics,
    opened_by: OpenedBy,
    reason: Option<EndReason>,
}

impl CountedTunnel {
    /// Its target has accepted.
    pub fn opened(metrics: &AditMetrics, path: Path) -> Self {
        metrics.tunnel_opened(path);
        Self {
            metrics: metrics.clone(),
            opened_by: OpenedBy::Client,
            reason: None,
        }
    }

    /// A tunnel that an agent asked for is open.
    pub fn opened_by_agent(metrics: &AditMetrics) -> Self {
        Self {
            metrics: metrics.clone(),
            opened_by: OpenedBy::Agent,
            reason: None,
        }
    }

    /// It ended.
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

/// One established tunnel: counted while it lives, its duration observed when it ends.
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
