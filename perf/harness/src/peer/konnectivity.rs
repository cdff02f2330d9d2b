//! Server and agent with upstream's flags: upstream's programs, and Adit.

use std::path::PathBuf;

use adit_perf_plan::Dialect;
use anyhow::{bail, ensure};
use xtask_kit::net::{free_port, http_get};

use super::{NAMES, Peer, Route};
use crate::measurement::{AGENTS, METRICS};
use crate::process::{Place, Site};
use crate::programs::Programs;

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

/// A pair of server and agent.
#[derive(Clone, Debug)]
pub(crate) struct Konnectivity {
    name: String,
    version: String,
    /// Server and agent.
    programs: [PathBuf; 2],
    /// Their leading arguments.
    args: [Vec<String>; 2],
    dialects: &'static [Dialect],
    has_cgroups: bool,
    is_accounted: bool,
    has_tokens: bool,
}

impl Konnectivity {
    fn new(name: &str, version: String, programs: [PathBuf; 2], args: [Vec<String>; 2]) -> Self {
        Self {
            name: name.to_owned(),
            version,
            programs,
            args,
            dialects: &[
                Dialect::Grpc,
                Dialect::GrpcGo,
                Dialect::GrpcGoReused,
                Dialect::GrpcGoTls,
                Dialect::HttpConnect,
            ],
            has_cgroups: false,
            is_accounted: false,
            has_tokens: false,
        }
    }

    /// Upstream's programs.
    ///
    /// # Errors
    /// The programs cannot be built.
    pub(super) fn upstream(programs: &Programs) -> anyhow::Result<Self> {
        let version = "Konnectivity v0.36.0, built from its Go module".to_owned();
        let programs = [programs.upstream("server")?, programs.upstream("agent")?];
        Ok(Self::new("upstream", version, programs, Default::default()))
    }

    /// An `adit` binary; the report shows `version`.
    pub(crate) fn adit(name: &str, version: &str, binary: PathBuf) -> Self {
        let args = ["server", "agent"].map(|role| vec![role.to_owned(), "--compat".to_owned()]);
        Self::new(name, version.to_owned(), [binary.clone(), binary], args)
    }

    /// The server of one peer with the agent of another.
    pub(crate) fn fleet(name: &str, server: Self, agent: Self) -> Self {
        let version = format!("server: {}; agent: {}", server.version, agent.version);
        let ([program, _], [_, other]) = (server.programs, agent.programs);
        let ([args, _], [_, others]) = (server.args, agent.args);
        Self::new(name, version, [program, other], [args, others])
    }

    /// A variant of this peer, whose name it gets as a suffix.
    ///
    /// # Errors
    /// There is no such variant.
    pub(crate) fn variant(mut self, name: &str) -> anyhow::Result<Self> {
        let words = match name {
            "plaintext" => {
                // Tunnels of other clients are framed in any case.
                self.dialects = &[Dialect::HttpConnect];
                self.add_flag("--lane-security=plaintext");
                ", lanes in clear text"
            }
            "link" => {
                self.args[0].push("--lanes-per-link=0".to_owned());
                self.args[1].push("--lanes=0".to_owned());
                ", without lanes"
            }
            "account" => {
                self.is_accounted = true;
                self.add_flag("--account=on");
                ", accounted for in the kernel"
            }
            "tokens" => {
                self.has_tokens = true;
                ", agents with tokens"
            }
            // To show how far the rows of one peer differ.
            "again" => "",
            // Server and agent each have a cgroup, as systemd units and pods have it. Programs attached to one cgroup see no
            // traffic of the other, of targets and of the load.
            "cgroups" => {
                self.has_cgroups = true;
                ", in cgroups of their own"
            }
            _ => bail!("no such peer: there are {NAMES}"),
        };
        self.name = format!("{}-{name}", self.name);
        self.version.push_str(words);
        Ok(self)
    }

    fn add_flag(&mut self, flag: &str) {
        for args in &mut self.args {
            args.push(flag.to_owned());
        }
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
    fn start(&self, site: &Site, dialect: Dialect) -> anyhow::Result<Route> {
        let mut route = Route::to_far(site)?;
        route.dialect = dialect;
        let frontend = if dialect == Dialect::GrpcGoTls {
            let port = free_port()?;
            route.frontend = Some(format!("{}:{port}", site.near_host));
            vec![
                format!("--server-port={port}"),
                format!("--server-cert={}", site.at("server.pem")),
                format!("--server-key={}", site.at("server.key")),
                format!("--server-ca-cert={}", site.at("ca.pem")),
            ]
        } else {
            route.frontend = Some(site.at("s.sock"));
            let socket = format!("--uds-name={}", site.at("s.sock"));
            vec![socket, "--server-port=0".to_owned()]
        };
        let places = if self.has_cgroups {
            [
                Place::Cgroup(route.cgroup()?),
                Place::Cgroup(route.cgroup()?),
            ]
        } else {
            [site.near.clone(), site.far.clone()]
        };
        let [mut server, mut agent] = self.args.clone();
        server.extend([
            format!("--mode={}", dialect.protocol()),
            format!("--admin-port={}", free_port()?),
            "--v=0".to_owned(),
        ]);
        server.extend(frontend);
        agent.extend([
            format!("--admin-server-port={}", free_port()?),
            "--sync-interval=200ms".to_owned(),
            "--sync-interval-cap=1s".to_owned(),
            "--v=0".to_owned(),
        ]);
        if self.has_tokens {
            // Serves reviews; writes a `kubeconfig` for itself and a `token` to the folder.
            let (reviews, address) =
                site.serve(&places[0], &["reviews".to_owned(), site.at("")])?;
            route.running.push(reviews);
            route.targets.extend(address);
            server.extend(REVIEWING.map(str::to_owned));
            server.push(format!("--kubeconfig={}", site.at("kubeconfig")));
            agent.push(format!("--service-account-token-path={}", site.at("token")));
        }
        let programs = self.programs.each_ref().map(PathBuf::as_path);
        let [agents, health, agent_health] =
            route.start_pair(site, programs, &places, [server, agent])?;
        if matches!(site.near, Place::Host) {
            // The load's agents dial targets from the load's place, and this process reads the metrics.
            for (name, port) in [(AGENTS, agents), (METRICS, health)] {
                let address = format!("127.0.0.1:{port}");
                route.targets.insert(name.to_owned(), address);
            }
        }
        site.wait_until_ready(health)?;
        if self.is_accounted {
            site.wait_until_ready(agent_health)?;
            // Without accounting a program works as well, and would be measured as if accounting cost nothing.
            for port in [health, agent_health] {
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
