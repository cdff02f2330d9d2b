//! Scenarios, which define what a run measures: TOML files, from `perf/scenarios` or from users.

use std::path::Path;

use adit_perf_plan::{Dialect, Plan, Shape};
use anyhow::{Context as _, ensure};
use serde::Deserialize;

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
    /// The plan of the load tools.
    pub(crate) load: Plan,
    /// Number of processors that all measured processes share; all processors if unset.
    pub(crate) processors: Option<usize>,
    /// A long path between server and agent.
    pub(crate) path: Option<Shape>,
}

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
            "ways: tcp is what peers without a dialect use; name grpc, grpc-go, grpc-go-reused, grpc-go-tls, http-connect or socks5"
        );
        self.load.check()?;
        self.path.as_ref().map_or(Ok(()), Shape::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "title = 't'\nrounds = 1\npeers = ['adit']\nways = ['grpc']\n\
                         [load]\nmeasurements = ['bulk', 'idle']\nseconds = 0.5\n";

    #[test]
    fn every_scenario_of_the_repository_is_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
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
        let plan = &parts[1].1;
        assert_eq!(
            (&plan.measurements[..], plan.seconds),
            (&["bulk".to_owned()][..], 0.5)
        );
        assert_eq!(plan.idle, [500, 2000, 1000]);
    }

    #[test]
    fn the_readme_example_is_a_valid_scenario() {
        let page = include_str!("../../README.md");
        let (_before, example) = page.split_once("```toml\n").expect("an example");
        let (example, _after) = example.split_once("```").expect("its end");
        let parsed = Scenario::parse(example).expect("it is right");
        assert_eq!(parsed.peers, ["direct", "upstream", "adit"]);
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
            (SMALL.replace("'bulk'", "'counted'"), "counted"),
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
