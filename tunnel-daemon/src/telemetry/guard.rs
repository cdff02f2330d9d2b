//! Guards: a gauge goes back down, and a life is measured, on every path out, cancelled ones included.

use std::time::{Duration, Instant};

use prometheus::IntGauge;

use super::families::LazyHistogram;

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
