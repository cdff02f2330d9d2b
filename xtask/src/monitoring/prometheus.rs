//! A Prometheus of our own, asked by its HTTP API.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::fleet::Job;
use super::queries::Query;
use crate::stack::Process;
use xtask_kit::net::{free_port, http_get};

/// Between two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(200);

/// It runs until dropped.
pub(super) struct Prometheus {
    address: String,
    _process: Process,
}

impl Prometheus {
    /// Starts one that scrapes `jobs` every second and evaluates `rules`.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(folder: &Path, rules: &Path, jobs: &[Job]) -> anyhow::Result<Self> {
        let mut config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n",
            rules.display()
        );
        for job in jobs {
            let targets = job.targets.join(", ");
            config += &format!(
                "- job_name: {}\n  static_configs: [{{targets: [{targets}], labels: {{cluster: one}}}}]\n",
                job.name
            );
        }
        let file = folder.join("prometheus.yaml");
        fs::write(&file, config)?;
        let address = format!("127.0.0.1:{}", free_port()?);
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=warn");
        Ok(Self {
            address,
            _process: Process::start("prometheus", &mut command, None)?,
        })
    }

    /// The alerts that it evaluates, as soon as each was evaluated.
    ///
    /// # Errors
    /// It does not answer in time, or one of them cannot be evaluated.
    pub(super) fn rules(&self, until: Instant) -> anyhow::Result<Vec<Query>> {
        loop {
            match self.evaluated() {
                Ok(Some(rules)) => return Ok(rules),
                Ok(None) if Instant::now() > until => {
                    bail!("Prometheus did not evaluate all alerts in time")
                }
                Err(error) if Instant::now() > until => return Err(error),
                Ok(None) | Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    /// The alerts, if each was evaluated.
    fn evaluated(&self) -> anyhow::Result<Option<Vec<Query>>> {
        let mut queries = Vec::new();
        let data = self.ask("/api/v1/rules")?;
        let groups = data["groups"].as_array().context("groups of rules")?;
        for rule in groups
            .iter()
            .filter_map(|group| group["rules"].as_array())
            .flatten()
        {
            let name = rule["name"].as_str().unwrap_or_default();
            match rule["health"].as_str() {
                Some("ok") => queries.push(Query {
                    place: format!("alert {name}"),
                    expression: rule["query"].as_str().unwrap_or_default().to_owned(),
                    must_match: false,
                }),
                Some("err") => bail!("alert {name}: {}", rule["lastError"]),
                Some(_) | None => return Ok(None),
            }
        }
        Ok((!queries.is_empty()).then_some(queries))
    }

    /// How many series a query finds.
    ///
    /// # Errors
    /// Prometheus does not answer, or refuses the query.
    pub(super) fn count(&self, expression: &str) -> anyhow::Result<usize> {
        let data = self.ask(&format!("/api/v1/query?query={}", encoded(expression)))?;
        let result = data["result"].as_array();
        Ok(result.context("a result that is a list of series")?.len())
    }

    /// Names of alerts that fire.
    ///
    /// # Errors
    /// Prometheus does not answer.
    pub(super) fn firing(&self) -> anyhow::Result<Vec<String>> {
        let data = self.ask("/api/v1/alerts")?;
        let alerts = data["alerts"].as_array().context("a list of alerts")?;
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        Ok(firing.map(|alert| alert["labels"].to_string()).collect())
    }

    /// The data of an answer.
    fn ask(&self, path: &str) -> anyhow::Result<Value> {
        let text = http_get(&self.address, path)?;
        let (_head, body) = text
            .split_once("\r\n\r\n")
            .context("an answer with a body")?;
        let mut answer: Value = serde_json::from_str(body).context("an answer in JSON")?;
        ensure!(
            answer["status"] == "success",
            "Prometheus: {}",
            answer["error"]
        );
        Ok(answer["data"].take())
    }
}

/// As a value of a URL's query.
fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            encoded.push(char::from(byte));
        } else {
            encoded += &format!("%{byte:02X}");
        }
    }
    encoded
}
