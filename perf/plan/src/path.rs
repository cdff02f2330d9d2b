//! A long path between server and agent.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// Properties of the path.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Delay in milliseconds, each way.
    pub delay_ms: u64,
    /// Rate in megabits a second, each way.
    pub mbit_s: u32,
    /// Percentage of lost packets, each way.
    #[serde(default)]
    pub loss_percent: f64,
    /// Milliseconds that packets may queue before the bottleneck.
    #[serde(default = "queue_ms")]
    pub queue_ms: u64,
    /// Congestion control of both ends; the kernel's default if unset.
    pub congestion: Option<String>,
}

fn queue_ms() -> u64 {
    100
}

impl Shape {
    /// Checks constraints that the types do not express.
    ///
    /// # Errors
    /// The first invalid value, and the valid ones.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.mbit_s > 0, "path.mbit_s: at least 1");
        ensure!(self.delay_ms <= 10_000, "path.delay_ms: at most 10000");
        ensure!(self.queue_ms <= 10_000, "path.queue_ms: at most 10000");
        ensure!(
            (0.0..=50.0).contains(&self.loss_percent),
            "path.loss_percent: between 0 and 50"
        );
        Ok(())
    }
}
