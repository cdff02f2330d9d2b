//! Guards that lower a gauge or record a lifetime on every code path, cancellation included.

use prometheus::IntGauge;

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
