//! The plan of a server: frontends, the agent listener, routing, limits.

use std::num::NonZeroU32;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::destination::DestinationList;
use adit_core::grant::Grants;
use adit_core::ids::ServerId;
use adit_core::registry::Strategies;
use adit_core::wire::metadata::ZONE_LEN_MAX;
use ipnet::IpNet;

use super::account::AccountPlan;
use super::admin_socket::AdminSocketPlan;
use super::data_path::{DataPathPlan, LaneSecurity};
use super::frontends::{ClientsPlan, FrontendListen};
use super::leases::PublishPlan;
use super::node::DestinationsPlan;
use super::parts::{ConnectPlan, DialPlan, IsolationPlan, LogPlan, ShutdownPlan, TlsFiles};
use super::peers::PeersPlan;
use super::tokens::{AgentProof, TokenPlan};
use super::transparent::TransparentPlan;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::tls_policy::TlsPolicy;

/// Where agents connect.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentPort {
    /// Address to listen on.
    pub bind: BindAddress,
    /// Without `client_ca` no certificate is requested; with `tokens` none is required.
    pub tls: TlsFiles,
}

/// The listener for agents, and what holds for them.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentListenerPlan {
    /// `None`: the server has no agents of its own, and asks peers for theirs.
    pub port: Option<AgentPort>,
    /// Agents may authenticate with service account tokens.
    pub tokens: Option<TokenPlan>,
    /// Any TLS client may register as an agent: causes a warning and a metric.
    pub insecure_unauthenticated: bool,
    /// Time between HTTP/2 pings.
    pub keepalive: Duration,
    /// What an agent may claim; by default any id and identifiers, as upstream.
    pub grants: Grants,
    /// Zone of this server: among agents that match equally, dials go to those of the same zone.
    pub zone: Option<Box<str>>,
    /// Networks of balancers, whose connections begin with a PROXY header.
    pub balancers: Vec<IpNet>,
    /// Revocation lists of agents' certificates.
    pub crl: Option<PathBuf>,
    /// File of agents that are refused, whatever they prove.
    pub deny: Option<PathBuf>,
    /// Limit on links of one owner under one agent id.
    pub links_per_agent_max: NonZeroU32,
    /// Lanes and relay.
    pub data_path: DataPathPlan,
}

/// The settings of a server, not yet checked.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerSettings {
    /// Returned to agents as `serverid`.
    pub server_id: ServerId,
    /// Returned to agents as `servercount`; any number, as upstream. With leases, the larger of it and the number of leases.
    pub server_count: i64,
    /// Frontends; at least one, unless the transparent frontend is used.
    pub clients: ClientsPlan,
    /// Captured clients, which know of no proxy.
    pub transparent: TransparentPlan,
    /// The agent listener.
    pub agents: AgentListenerPlan,
    /// Other servers of the installation; `None`: this server reaches its own agents only.
    pub peers: Option<PeersPlan>,
    /// TLS versions and cipher suites of all TLS listeners.
    pub tls: TlsPolicy,
    /// Health and metrics listener; `None`: off.
    pub health: Option<BindAddress>,
    /// Admin and metrics listener; `None`: off.
    pub admin: Option<BindAddress>,
    /// Unix socket for `adit status` and `adit top`.
    pub admin_socket: AdminSocketPlan,
    /// This server publishes a lease.
    pub leases: Option<PublishPlan>,
    /// How an agent is chosen, in order.
    pub strategies: Strategies,
    /// Destinations dialled for agents.
    pub destinations: DestinationsPlan,
    /// Limits on dials.
    pub dial: DialPlan,
    /// Byte budgets.
    pub isolation: IsolationPlan,
    /// Kernel accounting.
    pub account: AccountPlan,
    /// Shutdown by signals.
    pub shutdown: ShutdownPlan,
    /// Logs.
    pub log: LogPlan,
    /// Access events per second on average; 0: no limit.
    pub access_log_limit: u32,
    /// Agents whose dials have series of their own.
    pub metrics_agents: usize,
    /// Behave as the upstream program does where the two differ.
    pub compat: bool,
}

/// A checked [`ServerSettings`]; read-only.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerPlan(ServerSettings);

impl Deref for ServerPlan {
    type Target = ServerSettings;

    fn deref(&self) -> &ServerSettings {
        &self.0
    }
}

impl ServerPlan {
    /// Changes limits that have no flag: tests use shorter times.
    #[must_use]
    pub fn adjusted(mut self, adjust: impl FnOnce(&mut IsolationPlan, &mut ConnectPlan)) -> Self {
        adjust(&mut self.0.isolation, &mut self.0.clients.connect);
        self
    }
}

impl ServerSettings {
    /// Makes the plan.
    ///
    /// # Errors
    /// Settings that contradict each other, a missing file, or agents without authentication.
    pub fn check(self) -> Result<ServerPlan, ConfigError> {
        super::parts::check_header_text("--server-id", self.server_id.as_str())?;
        if let Some(zone) = &self.agents.zone {
            super::parts::check_header_text("--zone", zone)?;
            if zone.len() > ZONE_LEN_MAX {
                bail!("--zone has {} bytes: at most {ZONE_LEN_MAX}", zone.len());
            }
        }
        self.check_frontends()?;
        self.check_agent_listener()?;
        self.check_peers()?;
        self.check_destinations()?;
        self.check_ports()?;
        self.dial.check()?;
        self.isolation.check()?;
        Ok(ServerPlan(self))
    }

    fn check_frontends(&self) -> Result<(), ConfigError> {
        self.transparent.check()?;
        if self.clients.frontends.is_empty() && !self.transparent.is_used() {
            bail!(
                "no frontend: give at least one, such as --frontend grpc=unix:/run/adit/kas.sock"
            );
        }
        self.clients.check(&self.admin_socket)
    }

    fn check_agent_listener(&self) -> Result<(), ConfigError> {
        let agents = &self.agents;
        let Some(port) = &agents.port else {
            return self.check_no_agents();
        };
        port.tls
            .check_files(["--cluster-cert", "--cluster-key", "--cluster-ca-cert"])?;
        let has_ca = port.tls.client_ca.is_some();
        if !agents.grants.is_open() && !has_ca && agents.tokens.is_none() {
            // A security flag is never accepted without effect.
            bail!(
                "--agent-grant goes by certificates and tokens: give --cluster-ca-cert or --agent-service-account, or leave \
                 --agent-grant out"
            );
        }
        if let Some(tokens) = &agents.tokens {
            if tokens.proof == AgentProof::Both && !has_ca {
                bail!(
                    "--agent-proof=both asks agents for certificates, too: give --cluster-ca-cert"
                );
            }
            if agents.insecure_unauthenticated {
                bail!(
                    "--agent-service-account and --insecure-allow-unauthenticated-agents contradict each other: drop one"
                );
            }
            if agents.data_path.lane_security == LaneSecurity::Plaintext {
                bail!(
                    "--lane-security=plaintext and --agent-service-account exclude each other: agents with tokens are \
                     expected on untrusted networks; drop one flag"
                );
            }
        }
        match (
            has_ca || agents.tokens.is_some(),
            agents.insecure_unauthenticated,
        ) {
            (false, false) => Err(ConfigError::new(
                "refusing to start without agent authentication: give --cluster-ca-cert to require client certificates \
                 of agents, --agent-namespace, --agent-service-account and --authentication-audience to review their \
                 tokens, or --insecure-allow-unauthenticated-agents to let anyone register as an agent",
            )),
            (true, true) => Err(ConfigError::new(
                "--cluster-ca-cert and --insecure-allow-unauthenticated-agents contradict each other: drop one",
            )),
            (true, false) | (false, true) => Ok(()),
        }
    }

    /// A server without agents of its own.
    fn check_no_agents(&self) -> Result<(), ConfigError> {
        let asks = |peers: &PeersPlan| !peers.peers.is_empty();
        if !self.peers.as_ref().is_some_and(asks) {
            bail!("--no-agents needs --peer: without agents and peers every dial fails");
        }
        if self.leases.is_some() {
            bail!(
                "--no-agents and --enable-lease-controller contradict each other: a lease tells agents to connect; drop one"
            );
        }
        if !self.destinations.allowed.is_empty() {
            bail!("--allowed-destination is about agents, and --no-agents allows none: drop one");
        }
        if self.transparent.redirect.is_some() {
            bail!("--redirect needs the agent port, and --no-agents opens none: drop one");
        }
        Ok(())
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        let Some(peers) = &self.peers else {
            return Ok(());
        };
        peers.check()?;
        let clients = self.clients.frontends.iter();
        let clients = clients.filter_map(|frontend| match &frontend.listen {
            FrontendListen::Tcp { tls, .. } => tls.as_ref(),
            FrontendListen::Unix { .. } => None,
        });
        let clients = clients.map(|tls| ("--server-ca-cert", tls.client_ca.as_ref()));
        let agents = self.agents.port.iter();
        let agents = agents.map(|port| ("--cluster-ca-cert", port.tls.client_ca.as_ref()));
        peers.check_authority(agents.chain(clients))
    }

    fn check_destinations(&self) -> Result<(), ConfigError> {
        if self.destinations.allowed.is_empty() {
            return if self.destinations.proxy_header {
                Err(ConfigError::new(
                    "--destination-proxy-header has no effect without --allowed-destination: give one, or drop it",
                ))
            } else {
                Ok(())
            };
        }
        DestinationList::allowed_destinations(&self.destinations.allowed)
            .map_err(ConfigError::about("--allowed-destination"))?;
        if self.agents.insecure_unauthenticated {
            bail!(
                "--allowed-destination and --insecure-allow-unauthenticated-agents exclude each other: the destinations \
                 that an agent may reach depend on its authenticated identity; drop one flag"
            );
        }
        if self.agents.data_path.lanes_max == 0 {
            bail!(
                "--allowed-destination needs lanes, and --lanes-per-link=0 allows none: drop one"
            );
        }
        Ok(())
    }

    /// Checks for two listeners of this process on one address: the bind error would name no flags.
    fn check_ports(&self) -> Result<(), ConfigError> {
        let transparent = self.transparent.bind.iter();
        let transparent = transparent.map(|bind| ("--transparent-bind-address", bind));
        let peers = self.peers.iter().filter_map(|peers| peers.bind.as_ref());
        let peers = peers.map(|bind| ("--peer-bind", bind));
        let agents = self.agents.port.iter();
        let agents = agents.map(|port| ("--agent-port", &port.bind));
        let health = self.health.iter().map(|bind| ("--health-port", bind));
        let admin = self.admin.iter().map(|bind| ("--admin-port", bind));
        let all = self
            .clients
            .binds()
            .chain(agents)
            .chain(peers)
            .chain(transparent)
            .chain(health)
            .chain(admin);
        super::parts::check_distinct(all)
    }
}
