//! The part of a scenario that the load tool gets: the measurements and their amounts.

use std::time::Duration;

use serde::Deserialize;

/// A measurement by name, in order of execution: a burst is cold only on a fresh path, and memory is measured before others,
/// which leave buffers behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Measurement {
    /// Dials all at once and then echo, on a fresh path and again.
    Burst,
    /// Memory of idle tunnels.
    Idle,
    /// Memory and CPU time of a server with many agents.
    Agents,
    /// Agents per second that a server accepts.
    Links,
    /// Closed-loop round trips: the next request follows the answer.
    Echo,
    /// Open-loop round trips, at a fixed rate.
    Paced,
    /// Dial, one round trip, close.
    Dials,
    /// Downloads and uploads.
    Bulk,
    /// Echo beside bulk downloads.
    Mixed,
    /// Echo beside stalled readers.
    Isolation,
    /// A fixed number of operations.
    Counted,
}

/// An operation of [`Measurement::Counted`].
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
    /// Connections that share the echoes evenly; other operations use one.
    pub(crate) connections: u64,
    /// Number of operations.
    pub(crate) times: u64,
}

/// All measurements, in order.
const ALL: [Measurement; 11] = [
    Measurement::Burst,
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

/// The plan. Unknown fields are refused: with a misspelt field the run would measure something else.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Plan {
    /// Selected measurements; they always run in the order of the enum.
    pub(crate) measurements: Vec<Measurement>,
    /// Duration of each timed measurement.
    pub(crate) seconds: f64,
    /// Numbers of streams of bulk transfers.
    pub(crate) streams: Vec<usize>,
    /// Numbers of connections of closed-loop echo.
    pub(crate) connections: Vec<usize>,
    /// Connections that a burst opens at once.
    pub(crate) burst_connections: usize,
    /// Rates of open-loop echo, per second.
    pub(crate) rates: Vec<u32>,
    /// Connections that share such a rate.
    pub(crate) rate_connections: usize,
    /// Numbers of workers that dial.
    pub(crate) dialers: Vec<usize>,
    /// Numbers of idle tunnels.
    pub(crate) idle: Vec<usize>,
    /// Numbers of agents.
    pub(crate) agents: Vec<usize>,
    /// Period of the CPU measurement with idle agents: CPU time counts in steps of 10 ms, and idle lanes are pinged every 30 s.
    pub(crate) agents_seconds: f64,
    /// Number of readers that never read.
    pub(crate) stalled_readers: usize,
    /// Number of bulk downloads beside echo.
    pub(crate) mixed_streams: usize,
    /// Operations of [`Measurement::Counted`].
    pub(crate) counted: Option<Counted>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            // Not every path has an agent port, and counted operations need an external tool that counts their cost.
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
            burst_connections: 16,
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
    /// The selected measurements, in the order of the enum.
    pub(crate) fn in_order(&self) -> Vec<Measurement> {
        ALL.into_iter()
            .filter(|one| self.measurements.contains(one))
            .collect()
    }

    /// Duration of a timed measurement.
    pub(crate) fn lasting(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.clamp(0.01, 600.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_run_in_a_fixed_order() {
        let plan: Plan = serde_json::from_str(r#"{"measurements": ["bulk", "idle"]}"#).unwrap();
        assert_eq!(plan.in_order(), [Measurement::Idle, Measurement::Bulk]);
    }

    #[test]
    fn misspelt_field_is_refused() {
        let error = serde_json::from_str::<Plan>(r#"{"stream": [1]}"#).unwrap_err();
        assert!(error.to_string().contains("stream"), "{error}");
    }
}
