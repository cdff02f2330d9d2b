//! Server and agent that take upstream's flags: upstream's own, ours, and a user's builds of either.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use super::captured::{Cgroup, ask, cgroups};
use super::{Peer, Place, Route};
use crate::perf::process::{Inside, Site, free_port};
use crate::perf::programs::Programs;
use crate::perf::scenario::{Binary, Way};
use crate::perf::turn::{AGENTS, METRICS};

/// Among the metrics of whoever accounts.
const ACCOUNTED: &str = "adit_ebpf_account_attached 1";

/// What a server is told that lets agents in by the tokens of the load. Both peers would ask few reviews a second by default.
const REVIEWING: [&str; 5] = [
    "--agent-namespace=kube-system",
    "--agent-service-account=konnectivity-agent",
    "--authentication-audience=system:konnectivity-server",
    "--kubeconfig-qps=10000",
    "--kubeconfig-burst=10000",
];

/// A program and its leading arguments.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    path: PathBuf,
    args: Vec<String>,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Konnectivity {
    name: String,
    version: String,
    server: Program,
    agent: Program,
    /// The only dialect worth measuring.
    only: Option<Way>,
    /// Where cgroups are made, if server and agent have one each.
    cgroups: Option<PathBuf>,
    /// Whether it is nothing without accounting.
    is_accounted: bool,
    /// Whether agents prove themselves by tokens, and not by certificates.
    has_tokens: bool,
}

impl Program {
    fn alone(path: PathBuf) -> Self {
        Self {
            path,
            args: Vec::new(),
        }
    }
}

impl Konnectivity {
    /// Upstream's programs.
    ///
    /// # Errors
    /// They could not be built.
    pub(crate) fn upstream(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            name: "upstream".to_owned(),
            version: "Konnectivity v0.36.0, built from its Go module".to_owned(),
            server: Program::alone(programs.upstream("server")?),
            agent: Program::alone(programs.upstream("agent")?),
            only: None,
            cgroups: None,
            is_accounted: false,
            has_tokens: false,
        })
    }

    /// A binary of ours; `version` is what the report says of it.
    pub(crate) fn adit(version: &str, binary: PathBuf) -> Self {
        let role = |role: &str| Program {
            path: binary.clone(),
            args: vec![role.to_owned(), "--compat".to_owned()],
        };
        Self {
            name: "adit".to_owned(),
            version: version.to_owned(),
            server: role("server"),
            agent: role("agent"),
            only: None,
            cgroups: None,
            is_accounted: false,
            has_tokens: false,
        }
    }

    /// The server of one binary of ours with the agent of another.
    pub(crate) fn mixed(version: &str, server: PathBuf, agent: PathBuf) -> Self {
        Self {
            agent: Self::adit(version, agent).agent,
            ..Self::adit(version, server)
        }
    }

    /// The server of one and the agent of the other, which speak the wire protocol that both know.
    pub(crate) fn fleet(name: &str, server: &Self, agent: &Self) -> Self {
        Self {
            name: name.to_owned(),
            version: format!("server: {}; agent: {}", server.version, agent.version),
            server: server.server.clone(),
            agent: agent.agent.clone(),
            only: None,
            cgroups: None,
            is_accounted: false,
            has_tokens: false,
        }
    }

    /// The same with lanes in clear text, for a network that is trusted.
    pub(crate) fn in_clear(mut self) -> Self {
        for program in [&mut self.server, &mut self.agent] {
            program.args.push("--lane-security=plaintext".to_owned());
        }
        // Tunnels of other clients keep their frames.
        self.only = Some(Way::HttpConnect);
        self.name.push_str("-plaintext");
        self.version.push_str(", lanes in clear text");
        self
    }

    /// The same with everything on the link.
    pub(crate) fn without_lanes(mut self) -> Self {
        self.server.args.push("--lanes-per-link=0".to_owned());
        self.agent.args.push("--lanes=0".to_owned());
        self.name.push_str("-link");
        self.version.push_str(", without lanes");
        self
    }

    /// The same, accounted for in the kernel.
    pub(crate) fn accounted(mut self) -> Self {
        for program in [&mut self.server, &mut self.agent] {
            program.args.push("--account=on".to_owned());
        }
        self.is_accounted = true;
        self.name.push_str("-account");
        self.version.push_str(", accounted for in the kernel");
        self
    }

    /// The same with agents that prove themselves by tokens.
    pub(crate) fn with_tokens(mut self) -> Self {
        self.has_tokens = true;
        self.name.push_str("-tokens");
        self.version.push_str(", agents with tokens");
        self
    }

    /// The same once more: how far its own rows lie apart.
    pub(crate) fn again(mut self) -> Self {
        self.name.push_str("-again");
        self
    }

    /// The same with server and agent each in a cgroup of its own, as units and pods have it: what is attached to one's hears
    /// nothing of the other, of targets and of the load.
    ///
    /// # Errors
    /// There is no cgroup2.
    pub(crate) fn in_cgroups(mut self) -> anyhow::Result<Self> {
        self.cgroups = Some(cgroups()?);
        self.name.push_str("-cgroups");
        self.version.push_str(", in cgroups of their own");
        Ok(self)
    }

    /// What a user's scenario describes.
    pub(crate) fn of_user(binary: &Binary) -> Self {
        let program = |path: &Path, args: &[String]| Program {
            path: path.to_owned(),
            args: args.to_vec(),
        };
        Self {
            name: binary.name.clone(),
            version: "as given".to_owned(),
            server: program(&binary.server, &binary.server_args),
            agent: program(&binary.agent, &binary.agent_args),
            only: None,
            cgroups: None,
            is_accounted: false,
            has_tokens: false,
        }
    }
}

/// Asks a server or an agent whether the kernel accounts for it. Where it does not, it works all the same, and would be measured
/// as if accounting were free.
///
/// # Errors
/// It does not.
fn ensure_accounted(health: u16) -> anyhow::Result<()> {
    let metrics = ask(health, "/metrics")?;
    ensure!(
        metrics.lines().any(|line| line == ACCOUNTED),
        "the kernel accounts for nothing here: there is no line {ACCOUNTED}; `adit check` says why"
    );
    Ok(())
}

impl Peer for Konnectivity {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> String {
        self.version.clone()
    }

    fn ways(&self, asked: &[Way]) -> Vec<Way> {
        let worth = |way: &Way| self.only.is_none_or(|only| only == *way);
        asked.iter().copied().filter(worth).collect()
    }

    fn spans(&self) -> bool {
        // A process is put into a namespace or into a cgroup.
        self.cgroups.is_none()
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let (target, mut targets) = site.targets(site.far(), site.far_host())?;
        let [agent_port, health_port, admin_port] = [free_port()?, free_port()?, free_port()?];
        let agent_health = free_port()?;
        if site.long_path().is_none() {
            // Agents of the load dial targets from where the load is, and metrics are read from here.
            targets.insert(AGENTS.to_owned(), format!("127.0.0.1:{agent_port}"));
            targets.insert(METRICS.to_owned(), format!("127.0.0.1:{health_port}"));
        }
        let own = match &self.cgroups {
            Some(below) => Some([Cgroup::new(below)?, Cgroup::new(below)?]),
            None => None,
        };
        let [near, far] = match &own {
            Some(own) => own.each_ref().map(|cgroup| Inside::Cgroup(cgroup.path())),
            None => [site.near(), site.far()],
        };
        let start = |name: &str, inside, program: &Program, flags: &[String]| {
            let args = [program.args.as_slice(), flags].concat();
            site.spawn(name, inside, &program.path, &args)
        };
        let reviews = if self.has_tokens {
            let (reviews, addresses) = site.reviews(near)?;
            targets.extend(addresses);
            Some(reviews)
        } else {
            None
        };
        let mut server_flags = vec![
            format!("--mode={}", way.dialect()),
            format!("--uds-name={}", site.at("s.sock")),
            "--server-port=0".to_owned(),
            format!("--agent-port={agent_port}"),
            format!("--health-port={health_port}"),
            format!("--admin-port={admin_port}"),
            format!("--cluster-cert={}", site.at("server.pem")),
            format!("--cluster-key={}", site.at("server.key")),
            "--v=0".to_owned(),
        ];
        let mut agent_flags = vec![
            format!("--proxy-server-host={}", site.near_host()),
            format!("--proxy-server-port={agent_port}"),
            format!("--ca-cert={}", site.at("ca.pem")),
            format!("--health-server-port={agent_health}"),
            format!("--admin-server-port={}", free_port()?),
            "--sync-interval=200ms".to_owned(),
            "--sync-interval-cap=1s".to_owned(),
            "--v=0".to_owned(),
        ];
        if self.has_tokens {
            server_flags.extend(REVIEWING.map(str::to_owned));
            server_flags.push(format!("--kubeconfig={}", site.at("kubeconfig")));
            let token = site.at("token");
            agent_flags.push(format!("--service-account-token-path={token}"));
        } else {
            server_flags.push(format!("--cluster-ca-cert={}", site.at("ca.pem")));
            agent_flags.push(format!("--agent-cert={}", site.at("agent.pem")));
            agent_flags.push(format!("--agent-key={}", site.at("agent.key")));
        }
        let server = start("server", near, &self.server, &server_flags)?;
        let agent = start("agent", far, &self.agent, &agent_flags)?;
        site.wait_until_ready(health_port)?;
        if self.is_accounted {
            site.wait_until_ready(agent_health)?;
            for port in [health_port, agent_health] {
                ensure_accounted(port)?;
            }
        }
        Ok(Route {
            way,
            frontend: Some(site.path("s.sock")),
            targets,
            processes: vec![
                ("server".to_owned(), server.id()),
                ("agent".to_owned(), agent.id()),
            ],
            place: match own {
                Some(own) => Place::Outside { _cgroups: own },
                None => site.load_namespace().into(),
            },
            running: [agent, server, target].into_iter().chain(reviews).collect(),
        })
    }
}
