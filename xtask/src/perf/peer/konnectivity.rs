//! Server and agent with upstream's flags: upstream's programs, Adit, and a user's builds of either.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use super::{Dialects, Peer, Route, http_get};
use crate::perf::measurement::{AGENTS, METRICS};
use crate::perf::process::{Site, free_port};
use crate::perf::programs::Programs;
use crate::perf::scenario::{Binary, Dialect};

/// Metric of a program that has accounting attached.
const ACCOUNTED: &str = "adit_ebpf_account_attached 1";

/// Flags of a server that authenticates the load's agents by token. The default rate of reviews of both peers is low.
const REVIEWING: [&str; 5] = [
    "--agent-namespace=kube-system",
    "--agent-service-account=konnectivity-agent",
    "--authentication-audience=system:konnectivity-server",
    "--kubeconfig-qps=10000",
    "--kubeconfig-burst=10000",
];

/// A program and its leading arguments.
#[derive(Clone, Debug)]
struct Program {
    path: PathBuf,
    args: Vec<String>,
}

/// A pair of server and agent.
#[derive(Clone, Debug)]
pub(crate) struct Konnectivity {
    name: String,
    version: String,
    server: Program,
    agent: Program,
    dialects: Dialects,
    has_cgroups: bool,
    is_accounted: bool,
    has_tokens: bool,
}

impl Konnectivity {
    fn new(name: &str, version: String, server: Program, agent: Program) -> Self {
        Self {
            name: name.to_owned(),
            version,
            server,
            agent,
            dialects: Dialects::Asked,
            has_cgroups: false,
            is_accounted: false,
            has_tokens: false,
        }
    }

    /// Upstream's programs.
    ///
    /// # Errors
    /// The programs cannot be built.
    pub(crate) fn upstream(programs: &Programs) -> anyhow::Result<Self> {
        let program = |role| -> anyhow::Result<Program> {
            Ok(Program {
                path: programs.upstream(role)?,
                args: Vec::new(),
            })
        };
        let version = "Konnectivity v0.36.0, built from its Go module".to_owned();
        Ok(Self::new(
            "upstream",
            version,
            program("server")?,
            program("agent")?,
        ))
    }

    /// An `adit` binary; the report shows `version`.
    pub(crate) fn adit(version: &str, binary: PathBuf) -> Self {
        let program = |role: &str| Program {
            path: binary.clone(),
            args: vec![role.to_owned(), "--compat".to_owned()],
        };
        Self::new(
            "adit",
            version.to_owned(),
            program("server"),
            program("agent"),
        )
    }

    /// The server of one peer with the agent of another.
    pub(crate) fn fleet(name: &str, server: &Self, agent: &Self) -> Self {
        let version = format!("server: {}; agent: {}", server.version, agent.version);
        Self::new(name, version, server.server.clone(), agent.agent.clone())
    }

    /// The programs of a user's scenario.
    pub(crate) fn of_user(binary: &Binary) -> Self {
        let program = |path: &Path, args: &[String]| Program {
            path: path.to_owned(),
            args: args.to_vec(),
        };
        Self::new(
            &binary.name,
            "as given".to_owned(),
            program(&binary.server, &binary.server_args),
            program(&binary.agent, &binary.agent_args),
        )
    }

    /// This peer under another name.
    pub(crate) fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    fn variant(mut self, name: &str, version: &str) -> Self {
        self.name.push_str(name);
        self.version.push_str(version);
        self
    }

    fn with_flag(mut self, flag: &str) -> Self {
        self.server.args.push(flag.to_owned());
        self.agent.args.push(flag.to_owned());
        self
    }

    /// This peer with plaintext lanes, for trusted networks.
    pub(crate) fn plaintext(mut self) -> Self {
        // Tunnels of other clients are framed in any case.
        self.dialects = Dialects::Only(Dialect::HttpConnect);
        self.with_flag("--lane-security=plaintext")
            .variant("-plaintext", ", lanes in clear text")
    }

    /// This peer without lanes: all tunnels are on the link.
    pub(crate) fn without_lanes(mut self) -> Self {
        self.server.args.push("--lanes-per-link=0".to_owned());
        self.agent.args.push("--lanes=0".to_owned());
        self.variant("-link", ", without lanes")
    }

    /// This peer with accounting in the kernel.
    pub(crate) fn accounted(mut self) -> Self {
        self.is_accounted = true;
        self.with_flag("--account=on")
            .variant("-account", ", accounted for in the kernel")
    }

    /// This peer with agents that authenticate by token instead of certificate.
    pub(crate) fn with_tokens(mut self) -> Self {
        self.has_tokens = true;
        self.variant("-tokens", ", agents with tokens")
    }

    /// This peer once more, to show how far its own rows differ.
    pub(crate) fn again(self) -> Self {
        self.variant("-again", "")
    }

    /// This peer with server and agent each in a cgroup of its own, as systemd units and pods have it. Programs attached to one
    /// cgroup see no traffic of the other, of targets and of the load.
    pub(crate) fn in_cgroups(mut self) -> Self {
        self.has_cgroups = true;
        self.variant("-cgroups", ", in cgroups of their own")
    }

    /// Converts this pair to a peer.
    pub(crate) fn into_peer(self) -> Peer {
        Peer {
            name: self.name.clone(),
            version: self.version.clone(),
            dialects: self.dialects,
            // A process is started in a namespace or in a cgroup, not both.
            may_span: !self.has_cgroups,
            start: Box::new(move |site, dialect| self.start(site, dialect)),
        }
    }

    /// Starts server and agent with targets behind them, and waits until they are linked.
    ///
    /// # Errors
    /// A program cannot be started, or they do not link.
    pub(crate) fn start(&self, site: &Site, dialect: Dialect) -> anyhow::Result<Route> {
        let mut route = Route::to(site, site.far(), site.far_host(), site.near().clone())?;
        route.dialect = dialect;
        route.frontend = Some(site.path("s.sock"));
        let [agent_port, health_port, agent_health] = [free_port()?, free_port()?, free_port()?];
        if site.long_path().is_none() {
            // The load's agents dial targets from the load's place, and this process reads the metrics.
            for (name, port) in [(AGENTS, agent_port), (METRICS, health_port)] {
                route
                    .targets
                    .insert(name.to_owned(), format!("127.0.0.1:{port}"));
            }
        }
        let (near, far) = if self.has_cgroups {
            (route.cgroup()?, route.cgroup()?)
        } else {
            (site.near().clone(), site.far().clone())
        };
        let mut server = self.server.args.clone();
        server.extend([
            format!("--mode={}", dialect.protocol()),
            format!("--uds-name={}", site.at("s.sock")),
            "--server-port=0".to_owned(),
            format!("--agent-port={agent_port}"),
            format!("--health-port={health_port}"),
            format!("--admin-port={}", free_port()?),
            format!("--cluster-cert={}", site.at("server.pem")),
            format!("--cluster-key={}", site.at("server.key")),
            "--v=0".to_owned(),
        ]);
        let mut agent = self.agent.args.clone();
        agent.extend([
            format!("--proxy-server-host={}", site.near_host()),
            format!("--proxy-server-port={agent_port}"),
            format!("--ca-cert={}", site.at("ca.pem")),
            format!("--health-server-port={agent_health}"),
            format!("--admin-server-port={}", free_port()?),
            "--sync-interval=200ms".to_owned(),
            "--sync-interval-cap=1s".to_owned(),
            "--v=0".to_owned(),
        ]);
        if self.has_tokens {
            // Serves reviews; writes a `kubeconfig` for itself and a `token` to the folder.
            let (reviews, address) = site.serve(&near, &["reviews".to_owned(), site.at("")])?;
            route.running.push(reviews);
            route.targets.extend(address);
            server.extend(REVIEWING.map(str::to_owned));
            server.push(format!("--kubeconfig={}", site.at("kubeconfig")));
            agent.push(format!("--service-account-token-path={}", site.at("token")));
        } else {
            server.push(format!("--cluster-ca-cert={}", site.at("ca.pem")));
            agent.push(format!("--agent-cert={}", site.at("agent.pem")));
            agent.push(format!("--agent-key={}", site.at("agent.key")));
        }
        route.start(site, "server", &near, &self.server.path, &server)?;
        route.start(site, "agent", &far, &self.agent.path, &agent)?;
        site.wait_until_ready(health_port)?;
        if self.is_accounted {
            site.wait_until_ready(agent_health)?;
            // Without accounting a program works as well, and would be measured as if accounting cost nothing.
            for port in [health_port, agent_health] {
                let metrics = http_get(&format!("127.0.0.1:{port}"), "/metrics")?;
                ensure!(
                    metrics.lines().any(|line| line == ACCOUNTED),
                    "the kernel accounts for nothing here: there is no line {ACCOUNTED}; `adit check` says why"
                );
            }
        }
        Ok(route)
    }
}
