//! Scenarios, which define what a run measures: TOML files, from `perf/scenarios` or from users.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::long_path::Shape;

/// How the load reaches targets through a peer.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Dialect {
    /// gRPC by our own client.
    Grpc,
    /// gRPC by the Go client library, which kube-apiserver uses.
    GrpcGo,
    /// HTTP CONNECT.
    HttpConnect,
    /// A port that leads to each target, or the target itself.
    Tcp,
}

impl Dialect {
    /// Spelling in files, on command lines and in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::GrpcGo => "grpc-go",
            Self::HttpConnect => "http-connect",
            Self::Tcp => "tcp",
        }
    }

    /// Name for the load tool and for upstream's `--mode`, which do not distinguish gRPC clients.
    pub(crate) fn protocol(self) -> &'static str {
        match self {
            Self::Grpc | Self::GrpcGo => "grpc",
            Self::HttpConnect => "http-connect",
            Self::Tcp => "tcp",
        }
    }
}

/// A scenario. Unknown keys are refused, so that a misspelt key does not silently keep its default.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    /// Title of the report.
    pub(crate) title: String,
    /// Number of rounds; the report shows medians.
    pub(crate) rounds: usize,
    /// Peers by name, in the order of the columns.
    pub(crate) peers: Vec<String>,
    /// Dialects for peers that support several.
    #[serde(rename = "ways")]
    pub(crate) dialects: Vec<Dialect>,
    /// The plan of the load tool.
    pub(crate) load: LoadPlan,
    /// Number of processors that all measured processes share; all processors if unset.
    pub(crate) processors: Option<usize>,
    /// A long path between server and agent.
    pub(crate) path: Option<Shape>,
    /// The user's own programs, which take upstream's flags.
    #[serde(default)]
    pub(crate) binary: Vec<Binary>,
    /// The user's own paths that are already running.
    #[serde(default)]
    pub(crate) address: Vec<Address>,
}

/// The plan of `adit-load`, with the same fields.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoadPlan {
    /// Measurements by name.
    pub(crate) measurements: Vec<String>,
    /// Duration of each timed measurement.
    pub(crate) seconds: f64,
    streams: Option<Vec<usize>>,
    connections: Option<Vec<usize>>,
    burst_connections: Option<usize>,
    rates: Option<Vec<u32>>,
    rate_connections: Option<usize>,
    dialers: Option<Vec<usize>>,
    idle: Option<Vec<usize>>,
    agents: Option<Vec<usize>>,
    agents_seconds: Option<f64>,
    stalled_readers: Option<usize>,
    mixed_streams: Option<usize>,
    /// Not for scenarios: its result is no row of a table of peers.
    #[serde(skip_deserializing)]
    counted: Option<Counted>,
}

/// A fixed number of operations.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Counted {
    /// Name of the operation.
    pub(crate) operation: &'static str,
    /// Connections that share the echoes.
    pub(crate) connections: u64,
    /// Number of operations.
    pub(crate) times: u64,
}

/// The programs of a server and an agent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Binary {
    /// Name of its column.
    pub(crate) name: String,
    /// The server program.
    pub(crate) server: PathBuf,
    /// Its leading arguments, such as `["server", "--compat"]`.
    #[serde(default)]
    pub(crate) server_args: Vec<String>,
    /// The agent program.
    pub(crate) agent: PathBuf,
    /// Its leading arguments.
    #[serde(default)]
    pub(crate) agent_args: Vec<String>,
}

/// A running path: a frontend, or a port for each target.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Address {
    /// Name of its column.
    pub(crate) name: String,
    /// The dialect of the frontend, or `tcp`.
    #[serde(rename = "way")]
    pub(crate) dialect: Dialect,
    /// Unix socket of the frontend, unless the dialect is `tcp`.
    pub(crate) frontend: Option<PathBuf>,
    /// Addresses of `echo`, `source` and `sink` to dial; if unset, this run's own targets are dialled.
    pub(crate) targets: Option<BTreeMap<String, String>>,
    /// The `control` address of these targets.
    pub(crate) control: Option<String>,
    /// Processes whose memory and CPU time count, by role.
    #[serde(default)]
    pub(crate) processes: BTreeMap<String, u32>,
}

/// All measurements, in the order in which they run.
const MEASUREMENTS: [&str; 10] = [
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
];

impl Scenario {
    /// Reads and checks a scenario file.
    ///
    /// # Errors
    /// The file is missing, does not parse as a scenario, or requests something unknown.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let scenario: Self = toml::from_str(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Checks constraints that the types do not express.
    ///
    /// # Errors
    /// The first invalid value, and the valid ones.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rounds > 0, "rounds: at least 1");
        ensure!(self.processors != Some(0), "processors: at least 1");
        ensure!(!self.dialects.is_empty(), "ways: name at least one");
        ensure!(
            !self.dialects.contains(&Dialect::Tcp),
            "ways: tcp is what peers without a dialect use; name grpc, grpc-go or http-connect"
        );
        ensure!(
            (0.05..=600.0).contains(&self.load.seconds),
            "load.seconds: between 0.05 and 600"
        );
        for name in &self.load.measurements {
            ensure!(
                MEASUREMENTS.contains(&name.as_str()),
                "load.measurements: there is no {name:?}; there are {}",
                MEASUREMENTS.join(", ")
            );
        }
        if let Some(path) = &self.path {
            path.check()?;
        }
        for address in &self.address {
            let name = &address.name;
            ensure!(
                address.frontend.is_some() == (address.dialect != Dialect::Tcp),
                "address {name}: a frontend for every dialect but tcp, and for that none"
            );
            ensure!(
                address.targets.is_some() || address.dialect != Dialect::Tcp,
                "address {name}: with tcp, targets says which port leads to which target"
            );
            ensure!(
                address.targets.is_some() == address.control.is_some(),
                "address {name}: targets and control belong together"
            );
        }
        Ok(())
    }
}

impl LoadPlan {
    /// A plan that only counts: one operation, a fixed number of times.
    pub(crate) fn counting(counted: Counted) -> Self {
        Self {
            measurements: vec!["counted".to_owned()],
            seconds: 1.0,
            counted: Some(counted),
            ..Self::default()
        }
    }

    /// The plan for the load tool, which has defaults for missing fields.
    ///
    /// # Errors
    /// A plan always serializes.
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        let mut plan = serde_json::to_value(self)?;
        if let Some(fields) = plan.as_object_mut() {
            fields.retain(|_name, value| !value.is_null());
        }
        Ok(plan.to_string())
    }

    /// The largest requested number of idle tunnels.
    pub(crate) fn idle_most(&self) -> Option<usize> {
        let is_asked = self.measurements.iter().any(|name| name == "idle");
        let counts = self.idle.as_ref().filter(|_counts| is_asked)?;
        counts.iter().copied().max()
    }

    /// A plan per measurement, in order, so that a failed measurement affects no other.
    pub(crate) fn parts(&self) -> Vec<(&'static str, Self)> {
        MEASUREMENTS
            .into_iter()
            .filter(|name| self.measurements.iter().any(|wanted| wanted == name))
            .map(|name| {
                let mut plan = self.clone();
                plan.measurements = vec![name.to_owned()];
                (name, plan)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "title = 't'\nrounds = 1\npeers = ['adit']\nways = ['grpc']\n\
                         [load]\nmeasurements = ['bulk', 'idle']\nseconds = 0.5\n";

    #[test]
    fn every_scenario_of_the_repository_is_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../perf/scenarios");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let read = Scenario::read(&path);
            assert!(read.is_ok(), "{:#}", read.unwrap_err());
            count += 1;
        }
        assert!(count >= 3, "{count} scenarios");
    }

    #[test]
    fn each_measurement_gets_a_plan_of_its_own_in_order() {
        let text = format!("{SMALL}idle = [500, 2000, 1000]\n");
        let parts = Scenario::parse(&text).unwrap().load.parts();
        let told: Vec<_> = parts
            .iter()
            .map(|(name, plan)| (*name, plan.idle_most()))
            .collect();
        assert_eq!(told, [("idle", Some(2000)), ("bulk", None)]);
        assert_eq!(
            parts[1].1.to_json().unwrap(),
            r#"{"idle":[500,2000,1000],"measurements":["bulk"],"seconds":0.5}"#
        );
    }

    #[test]
    fn the_readme_example_is_a_valid_scenario() {
        let page = include_str!("../../../perf/README.md");
        let (_before, example) = page.split_once("```toml\n").expect("an example");
        let (example, _after) = example.split_once("```").expect("its end");
        let parsed = Scenario::parse(example).expect("it is right");
        let binaries = parsed.binary.iter().map(|binary| binary.name.as_str());
        let addresses = parsed.address.iter().map(|address| address.name.as_str());
        let named: Vec<&str> = binaries.chain(addresses).collect();
        assert_eq!(named, ["last-month", "ours"]);
        assert!(parsed.path.is_some());
    }

    #[test]
    fn invalid_scenarios_are_refused() {
        for (wrong, says) in [
            (SMALL.replace("rounds = 1", "rounds = 0"), "rounds"),
            (format!("processors = 0\n{SMALL}"), "processors"),
            (SMALL.replace("'bulk'", "'bulks'"), "bulks"),
            (SMALL.replace("'grpc'", "'tcp'"), "tcp"),
            (SMALL.replace("seconds", "second"), "second"),
            (
                format!("{SMALL}[[address]]\nname = 'a'\nway = 'tcp'\n"),
                "targets",
            ),
            (
                format!("{SMALL}[[address]]\nname = 'a'\nway = 'grpc'\n"),
                "frontend",
            ),
            (
                format!("{SMALL}[path]\ndelay_ms = 50\nmbit_s = 100\nloss_percent = 51\n"),
                "loss_percent",
            ),
        ] {
            let error = format!("{:#}", Scenario::parse(&wrong).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
    }
}
