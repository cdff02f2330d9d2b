//! Our server and agent with flags of their own, for what upstream's flags cannot ask for.

use std::path::PathBuf;

use crate::perf::process::{Running, Site, free_port};
use crate::perf::programs::Programs;

/// The binary that `adit` measures.
pub(super) struct Pair {
    version: String,
    binary: PathBuf,
}

/// Both, connected to each other.
pub(super) struct Linked {
    pub(super) server: Running,
    pub(super) agent: Running,
    /// Port of the server's health checks.
    pub(super) server_health: u16,
    /// Port of the agent's.
    pub(super) agent_health: u16,
}

impl Pair {
    /// # Errors
    /// It could not be built.
    pub(super) fn find(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            binary: programs.adit()?,
            version: programs.adit_version().to_owned(),
        })
    }

    /// What the report says of it.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Starts both, with these flags behind those that every pair has, and waits until they are linked.
    ///
    /// # Errors
    /// One cannot be started, or they do not find each other; the error has the logs.
    pub(super) fn start(
        &self,
        site: &Site,
        of_server: &[String],
        of_agent: &[String],
    ) -> anyhow::Result<Linked> {
        let [agents, server_health, agent_health] = [free_port()?, free_port()?, free_port()?];
        let mut server = vec![
            "server".to_owned(),
            format!("--cluster-cert={}", site.at("server.pem")),
            format!("--cluster-key={}", site.at("server.key")),
            format!("--cluster-ca-cert={}", site.at("ca.pem")),
            format!("--agent-port={agents}"),
            format!("--health-port={server_health}"),
            "--admin-port=off".to_owned(),
        ];
        server.extend_from_slice(of_server);
        let server = site.spawn("server", site.near(), &self.binary, &server)?;
        let mut agent = vec![
            "agent".to_owned(),
            format!("--proxy-server-host={}:{agents}", site.near_host()),
            format!("--ca-cert={}", site.at("ca.pem")),
            format!("--agent-cert={}", site.at("agent.pem")),
            format!("--agent-key={}", site.at("agent.key")),
            format!("--health-server-port={agent_health}"),
            "--admin-server-port=off".to_owned(),
        ];
        agent.extend_from_slice(of_agent);
        let agent = site.spawn("agent", site.far(), &self.binary, &agent)?;
        site.wait_until_ready(server_health)?;
        // An agent links while it still starts, and says that it is ready when it has.
        site.wait_until_ready(agent_health)?;
        Ok(Linked {
            server,
            agent,
            server_health,
            agent_health,
        })
    }
}
