//! The measurements of a run and their amounts: the part of a scenario that the load tools get.

use std::time::Duration;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// How the load reaches targets through a peer.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// gRPC by our own client.
    Grpc,
    /// gRPC by the Go client library, which kube-apiserver uses.
    GrpcGo,
    /// The same over one connection, with the tunnel that this library can use again from v0.37.0 on.
    GrpcGoReused,
    /// The Go client library over TCP with mutual TLS: a new connection for each dial, as OCM's cluster-proxy has it.
    GrpcGoTls,
    /// HTTP CONNECT.
    HttpConnect,
    /// SOCKS5.
    Socks5,
    /// A port that leads to each target, or the target itself.
    Tcp,
}

impl Dialect {
    /// Spelling in files, on command lines and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::GrpcGo => "grpc-go",
            Self::GrpcGoReused => "grpc-go-reused",
            Self::GrpcGoTls => "grpc-go-tls",
            Self::HttpConnect => "http-connect",
            Self::Socks5 => "socks5",
            Self::Tcp => "tcp",
        }
    }

    /// Name for the load tools and for upstream's `--mode`, which do not distinguish gRPC clients.
    pub fn protocol(self) -> &'static str {
        match self {
            Self::GrpcGo | Self::GrpcGoReused | Self::GrpcGoTls => Self::Grpc.name(),
            other => other.name(),
        }
    }

    /// Whether the load tool in Go speaks it.
    pub fn is_go(self) -> bool {
        matches!(self, Self::GrpcGo | Self::GrpcGoReused | Self::GrpcGoTls)
    }
}

/// An operation of the measurement `counted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A round trip, over all connections together.
    Echo,
    /// Dial, one round trip, close.
    Dial,
    /// A MiB downloaded with one stream.
    Down,
    /// A MiB uploaded with one stream.
    Up,
}

/// What the measurement `counted` does.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counted {
    /// The operation.
    pub operation: Operation,
    /// Connections that share the echoes evenly; other operations use one.
    pub connections: usize,
    /// Number of operations.
    pub times: usize,
}

/// All measurements, in the order in which they run: a burst is cold only on a fresh path, and memory is measured before others,
/// which leave buffers behind.
pub const MEASUREMENTS: [&str; 11] = [
    "burst",
    "idle",
    "agents",
    "links",
    "echo",
    "paced",
    "dials",
    "bulk",
    "mixed",
    "isolation",
    COUNTED,
];
/// A fixed number of operations. Not for scenarios: its result is no row of a table of peers.
const COUNTED: &str = "counted";

/// The plan. Unknown fields are refused: with a misspelt field the run would measure something else.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Selected measurements; they always run in the order of [`MEASUREMENTS`].
    pub measurements: Vec<String>,
    /// Duration of each timed measurement.
    pub seconds: f64,
    /// Numbers of streams of bulk transfers.
    pub streams: Vec<usize>,
    /// Numbers of connections of closed-loop echo.
    pub connections: Vec<usize>,
    /// Connections that a burst opens at once.
    pub burst_connections: usize,
    /// Rates of open-loop echo, per second.
    pub rates: Vec<u32>,
    /// Connections that share such a rate.
    pub rate_connections: usize,
    /// Numbers of workers that dial.
    pub dialers: Vec<usize>,
    /// Numbers of idle tunnels.
    pub idle: Vec<usize>,
    /// Numbers of agents.
    pub agents: Vec<usize>,
    /// Period of the CPU measurement with idle agents: CPU time counts in steps of 10 ms, and idle lanes are pinged every 30 s.
    pub agents_seconds: f64,
    /// Number of readers that never read.
    pub stalled_readers: usize,
    /// Number of bulk downloads beside echo.
    pub mixed_streams: usize,
    /// Mbit/s of all downloads together beside a second echo, 0 for none: at one rate no peer's echo waits for more bytes than
    /// another's.
    pub limited_mbit_s: u64,
    /// What `counted` does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
}

impl Default for Plan {
    fn default() -> Self {
        // Not every path has an agent port, and counted operations need an external tool that counts their cost.
        let asked = |name: &&str| !["agents", "links", COUNTED].contains(name);
        let names = MEASUREMENTS.into_iter().filter(asked);
        Self {
            measurements: names.map(str::to_owned).collect(),
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
            limited_mbit_s: 1000,
            counted: None,
        }
    }
}

impl Plan {
    /// A plan that only counts: one operation, a fixed number of times.
    pub fn counting(counted: Counted) -> Self {
        Self {
            measurements: vec![COUNTED.to_owned()],
            counted: Some(counted),
            ..Self::default()
        }
    }

    /// Checks constraints of a scenario that the types do not express.
    ///
    /// # Errors
    /// The first invalid value, and the valid ones.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (0.05..=600.0).contains(&self.seconds),
            "load.seconds: between 0.05 and 600"
        );
        let known: Vec<&str> = MEASUREMENTS
            .into_iter()
            .filter(|name| *name != COUNTED)
            .collect();
        for name in &self.measurements {
            ensure!(
                known.contains(&name.as_str()),
                "load.measurements: there is no {name:?}; there are {}",
                known.join(", ")
            );
        }
        Ok(())
    }

    /// The selected measurements, in order.
    pub fn in_order(&self) -> Vec<&'static str> {
        let is_selected = |name: &&str| self.measurements.iter().any(|one| one == name);
        MEASUREMENTS.into_iter().filter(is_selected).collect()
    }

    /// Duration of a timed measurement.
    pub fn lasting(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.clamp(0.01, 600.0))
    }

    /// The largest requested number of idle tunnels.
    pub fn idle_most(&self) -> Option<usize> {
        let is_selected = self.in_order().contains(&"idle");
        self.idle.iter().copied().max().filter(|_most| is_selected)
    }

    /// A plan per measurement, in order, so that a failed measurement affects no other.
    pub fn parts(&self) -> Vec<(&'static str, Self)> {
        let part = |name: &'static str| {
            let mut plan = self.clone();
            plan.measurements = vec![name.to_owned()];
            (name, plan)
        };
        self.in_order().into_iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_run_in_a_fixed_order() {
        let plan: Plan = serde_json::from_str(r#"{"measurements": ["bulk", "idle"]}"#).unwrap();
        assert_eq!(plan.in_order(), ["idle", "bulk"]);
    }

    #[test]
    fn misspelt_field_is_refused() {
        let error = serde_json::from_str::<Plan>(r#"{"stream": [1]}"#).unwrap_err();
        assert!(error.to_string().contains("stream"), "{error}");
    }
}
