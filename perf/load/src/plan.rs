//! What to measure and how much of it: the part of a scenario that the load tool is told.

use std::time::Duration;

use serde::Deserialize;

/// A measurement by name, in the order they run: memory is weighed first, since later ones leave buffers behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Measurement {
    /// Memory of tunnels that carry nothing.
    Idle,
    /// Memory and CPU time of a server that has many agents.
    Agents,
    /// How many agents a second a server lets in.
    Links,
    /// Round trips, each connection asking again once it has its answer.
    Echo,
    /// Round trips at a fixed rate, whatever the answers do.
    Paced,
    /// Dial, one round trip, close.
    Dials,
    /// Downloads and uploads.
    Bulk,
    /// Echo beside bulk downloads.
    Mixed,
    /// Echo beside readers that never read.
    Isolation,
    /// A fixed number of operations.
    Counted,
}

/// An operation that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operation {
    /// A round trip, over all connections together.
    Echo,
    /// Dial, one round trip, close.
    Dial,
    /// A MiB downloaded with one stream.
    Down,
    /// A MiB uploaded with one stream.
    Up,
}

/// What [`Measurement::Counted`] does.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counted {
    /// The operation.
    pub(crate) operation: Operation,
    /// Connections that share the echoes, each as many; the others take one.
    pub(crate) connections: u64,
    /// How often.
    pub(crate) times: u64,
}

/// All of them, in order.
const ALL: [Measurement; 10] = [
    Measurement::Idle,
    Measurement::Agents,
    Measurement::Links,
    Measurement::Echo,
    Measurement::Paced,
    Measurement::Dials,
    Measurement::Bulk,
    Measurement::Mixed,
    Measurement::Isolation,
    Measurement::Counted,
];

/// See the module. Unknown fields are refused: a misspelt one would measure something else than was asked for.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Plan {
    /// Which ones; the order is always that of the enum.
    pub(crate) measurements: Vec<Measurement>,
    /// Length of each timed measurement.
    pub(crate) seconds: f64,
    /// Streams of bulk transfers.
    pub(crate) streams: Vec<usize>,
    /// Connections of closed-loop echo.
    pub(crate) connections: Vec<usize>,
    /// Echoes for each second of open-loop echo.
    pub(crate) rates: Vec<u32>,
    /// Connections that share such a rate.
    pub(crate) rate_connections: usize,
    /// Workers that dial.
    pub(crate) dialers: Vec<usize>,
    /// Idle tunnels to weigh.
    pub(crate) idle: Vec<usize>,
    /// Agents to weigh.
    pub(crate) agents: Vec<usize>,
    /// Length of the look at how busy a server with them is: CPU time is counted in steps of 10 ms, and idle lanes are looked
    /// after every 30 s.
    pub(crate) agents_seconds: f64,
    /// Readers that never read.
    pub(crate) stalled_readers: usize,
    /// Bulk downloads beside which echo is measured.
    pub(crate) mixed_streams: usize,
    /// What is done a fixed number of times.
    pub(crate) counted: Option<Counted>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            // Not every path has a port for agents, and counts are for who counts beside us.
            measurements: ALL
                .into_iter()
                .filter(|one| {
                    use Measurement::{Agents, Counted, Links};
                    !matches!(one, Agents | Links | Counted)
                })
                .collect(),
            seconds: 1.0,
            streams: vec![1, 8, 64],
            connections: vec![1, 16, 128],
            rates: vec![500, 2000],
            rate_connections: 16,
            dialers: vec![1, 8],
            idle: vec![2000],
            agents: vec![1000],
            agents_seconds: 30.0,
            stalled_readers: 4,
            mixed_streams: 8,
            counted: None,
        }
    }
}

impl Plan {
    /// The measurements asked for, in the order of the enum.
    pub(crate) fn in_order(&self) -> Vec<Measurement> {
        ALL.into_iter()
            .filter(|one| self.measurements.contains(one))
            .collect()
    }

    /// Length of a timed measurement.
    pub(crate) fn lasting(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.clamp(0.01, 600.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_run_in_one_order_whatever_was_typed() {
        let plan: Plan = serde_json::from_str(r#"{"measurements": ["bulk", "idle"]}"#).unwrap();
        assert_eq!(plan.in_order(), [Measurement::Idle, Measurement::Bulk]);
    }

    #[test]
    fn misspelt_field_is_refused() {
        let error = serde_json::from_str::<Plan>(r#"{"stream": [1]}"#).unwrap_err();
        assert!(error.to_string().contains("stream"), "{error}");
    }
}
