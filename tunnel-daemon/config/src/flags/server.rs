//! `adit server`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::grant::Grants;
use adit_core::ids::ServerId;
use adit_kube::reviewer::Rate;
use ipnet::IpNet;

use super::clients::{ClientFlags, LoopbackClients, TlsFlags};
use super::peers::PeerFlags;
use super::redirect::TransparentFlags;
use super::values::{
    AdminFlags, FrontendSpec, OperationFlags, PortSetting, balancers, bind, bind_if_on, frontend,
    port_setting,
};
use crate::error::{ConfigError, bail};
use crate::limits;
use crate::plan::{
    AccountPlan, AgentListenerPlan, AgentPort, AgentProof, DataPathPlan, DestinationsPlan,
    DialPlan, IsolationPlan, Program, PublishPlan, ServerPlan, ServerSettings, TlsFiles, TokenPlan,
};
use crate::process_id::id;
use crate::units::{duration, listener_port, number};

const EXAMPLES: &str = "\
Examples:
  A unix socket for kube-apiserver (gRPC), agents with client certificates:
    adit server --frontend grpc=unix:/run/adit/kas.sock \\
      --cluster-cert tls.crt --cluster-key tls.key --cluster-ca-cert agents-ca.crt

  HTTP CONNECT over mutual TLS beside it:
    adit server --frontend grpc=unix:/run/adit/kas.sock --frontend http-connect=tcp:0.0.0.0:8131 \\
      --server-cert fe.crt --server-key fe.key --server-ca-cert clients-ca.crt \\
      --cluster-cert tls.crt --cluster-key tls.key --cluster-ca-cert agents-ca.crt

SIGTERM and SIGINT end it in order, SIGHUP has files read again at once, SIGUSR1 switches debug logging
on for 15 minutes or off.

With --compat, or called as proxy-server, it takes the flags of upstream's proxy-server instead.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ServerFlags {
    #[command(flatten)]
    frontends: FrontendFlags,
    #[command(flatten)]
    transparent: TransparentFlags,
    #[command(flatten)]
    agents: AgentFlags,
    #[command(flatten)]
    peers: PeerFlags,
    /// Lanes per link, at most: data connections that carry one tunnel at a time, between Adit processes only; 0 is none
    #[arg(long, value_name = "N", default_value_t = limits::LANES_PER_LINK, value_parser = number(0..=u32::MAX), help_heading = "Data path")]
    lanes_per_link: u32,
    #[command(flatten)]
    data_path: DataPathPlan,
    #[command(flatten)]
    tls: TlsFlags,
    /// How an agent is chosen, in order: default, destHost, defaultRoute, destCIDR
    #[arg(
        long,
        value_name = "NAMES",
        default_value = "default",
        help_heading = "Dials"
    )]
    proxy_strategies: String,
    #[command(flatten)]
    dial: DialPlan,
    #[command(flatten)]
    destinations: DestinationsPlan,
    #[command(flatten)]
    account: AccountPlan,
    #[command(flatten)]
    isolation: IsolationPlan,
    /// Address of health checks and metrics; empty is all
    #[arg(
        long,
        value_name = "HOST",
        default_value_t,
        hide_default_value = true,
        help_heading = "Operation"
    )]
    health_bind_address: String,
    /// Port of health checks and metrics, or off
    #[arg(long, value_name = "PORT", default_value = "8092", value_parser = port_setting, help_heading = "Operation")]
    health_port: PortSetting,
    /// Port of admin requests, or off
    #[arg(long, value_name = "PORT", default_value = "8095", value_parser = port_setting, help_heading = "Operation")]
    admin_port: PortSetting,
    #[command(flatten)]
    admin: AdminFlags,
    #[command(flatten)]
    operation: OperationFlags,
    /// Access log lines a second, one for each tunnel, with bursts of twice as many; 0 is no limit
    #[arg(long, value_name = "N", default_value_t = limits::ACCESS_LOG_LIMIT, value_parser = number(0..=u32::MAX), help_heading = "Operation")]
    access_log_limit: u32,
    /// Agents, the first N, whose dials adit_agent_dials_total counts under their ids; all others count as other
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number(0..=limits::METRICS_AGENTS_MAX), help_heading = "Operation")]
    metrics_agents: u16,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Frontends")]
struct FrontendFlags {
    /// Listener for clients, DIALECT=unix:PATH or DIALECT=tcp:HOST:PORT (tcp::PORT for all addresses); DIALECT is grpc,
    /// http-connect, http-proxy or socks5; repeatable, at most 64; required without --redirect, --redirect-file and
    /// --transparent-bind-address
    #[arg(long = "frontend", value_name = "FRONTEND", value_parser = frontend)]
    frontends: Vec<FrontendSpec>,
    #[command(flatten)]
    clients: ClientFlags,
    /// Ping a gRPC client connection this often, busy or not; it is given up when nothing comes for 20s
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    frontend_keepalive_time: Duration,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Agents")]
struct AgentFlags {
    /// Certificate of the agent listener
    #[arg(long, value_name = "FILE", required_unless_present = "no_agents")]
    cluster_cert: Option<PathBuf>,
    /// Key of --cluster-cert
    #[arg(long, value_name = "FILE", required_unless_present = "no_agents")]
    cluster_key: Option<PathBuf>,
    /// Open no agent port: this server reaches agents through its peers alone
    #[arg(long, requires = "peers", conflicts_with_all = ["cluster_cert", "cluster_key", "cluster_ca_cert", "insecure_allow_unauthenticated_agents"])]
    no_agents: bool,
    /// CA of agents' client certificates, which are required, unless a token will do
    #[arg(long, value_name = "FILE")]
    cluster_ca_cert: Option<PathBuf>,
    /// Let agents in by a service account token: namespace of the account
    #[arg(
        long,
        value_name = "NAMESPACE",
        default_value_t,
        hide_default_value = true
    )]
    agent_namespace: String,
    /// Name of the account
    #[arg(long, value_name = "NAME", default_value_t, hide_default_value = true)]
    agent_service_account: String,
    /// Audience of the token, such as system:konnectivity-server
    #[arg(
        long,
        value_name = "AUDIENCE",
        default_value_t,
        hide_default_value = true
    )]
    authentication_audience: String,
    /// What agents prove where tokens and --cluster-ca-cert are configured: either one, or both
    #[arg(long, value_enum, value_name = "PROOF", default_value = "either")]
    agent_proof: AgentProof,
    /// Access to the Kubernetes API, which reviews tokens and keeps leases [default: that of this pod]
    #[arg(long, value_name = "FILE", default_value_t, hide_default_value = true)]
    kubeconfig: String,
    /// Let anyone register as an agent; without it, a CA or tokens the server refuses to start
    #[arg(long, conflicts_with = "cluster_ca_cert")]
    insecure_allow_unauthenticated_agents: bool,
    /// What agents may claim: cn=, dns=, uri= of a certificate or serviceaccount=, node= of a token, then id=, host=, ipv4=,
    /// ipv6=, cidr=, default-route=true, zone=; such as cn=node-*,id={*}; or all, whatever they like, or none; repeatable [default: all]
    #[arg(long = "agent-grant", value_name = "GRANT")]
    agent_grants: Vec<String>,
    /// Zone of this server: among agents that fit equally, dials go to those with this zone= in --agent-identifiers
    #[arg(long, value_name = "ZONE", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    zone: Option<String>,
    /// Certificate revocation lists (PEM) of the CAs in --cluster-ca-cert: agents with a revoked certificate are refused, and their
    /// links end; read again whenever the file changes
    #[arg(long, value_name = "FILE", requires = "cluster_ca_cert")]
    agent_crl: Option<PathBuf>,
    /// Refuse these agents, and end their links: id=, cn=, dns=, uri=, serviceaccount=, node= or pod= of one a line; read again
    /// whenever the file changes
    #[arg(long, value_name = "FILE")]
    agent_deny: Option<PathBuf>,
    /// Links one certificate, or one token's node, may hold under one agent id; more are refused
    #[arg(long, value_name = "N", default_value = "64", value_parser = number(NonZeroU32::MIN..=NonZeroU32::MAX))]
    links_per_agent: NonZeroU32,
    /// Address of the agent listener; empty is all
    #[arg(long, value_name = "HOST", default_value_t, hide_default_value = true)]
    agent_bind_address: String,
    /// Port of the agent listener; 0 lets the kernel choose
    #[arg(long, value_name = "PORT", default_value_t = 8091, value_parser = listener_port)]
    agent_port: u16,
    /// Network of balancers before the agent port: their connections must begin with a PROXY header, whose address logs and status
    /// show; repeatable
    #[arg(long, value_name = "CIDR", value_parser = balancers)]
    proxy_protocol_from: Vec<IpNet>,
    /// An agent's connection ends after this time and 20s of silence; a quiet one is pinged after 3s in any case
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    keepalive_time: Duration,
    /// Name of this server, unique among those an agent reaches [default: PROXY_SERVER_ID, else random]
    #[arg(long, value_name = "ID")]
    server_id: Option<String>,
    /// Number of servers agents should connect to; with leases, agents are told the number of leases if that is larger
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(0..=i64::from(u32::MAX)))]
    server_count: i64,
    /// Publish a lease, by which agents and other servers count this server, and delete expired leases
    #[arg(long)]
    enable_lease_controller: bool,
    /// Namespace of leases
    #[arg(long, value_name = "NAMESPACE", default_value = limits::LEASE_NAMESPACE)]
    lease_namespace: String,
    /// Labels of leases, K=V,K=V
    #[arg(long, value_name = "LABELS", default_value = limits::LEASE_LABEL)]
    lease_label: String,
}

impl ServerFlags {
    /// Checks the flags and makes the plan.
    pub(super) fn plan(
        self,
        env: &dyn Fn(&str) -> Option<String>,
        warnings: &mut Vec<String>,
    ) -> Result<ServerPlan, ConfigError> {
        let (frontends, agents) = (self.frontends, self.agents);
        if frontends.frontend_keepalive_time.is_zero() || agents.keepalive_time.is_zero() {
            bail!("--keepalive-time and --frontend-keepalive-time must be greater than 0");
        }
        let given = agents.server_id.clone();
        let server_id = given.unwrap_or_else(|| id(env, "PROXY_SERVER_ID"));
        ServerSettings {
            server_id: ServerId::new(&server_id),
            server_count: agents.server_count,
            leases: agents.leases(&server_id)?,
            clients: frontends.clients.plan(
                &frontends.frontends,
                LoopbackClients::Named,
                frontends.frontend_keepalive_time,
                warnings,
            )?,
            transparent: self.transparent.plan(),
            peers: self.peers.plan()?,
            tls: self.tls.policy(warnings)?,
            health: bind_if_on(
                "--health-bind-address",
                &self.health_bind_address,
                self.health_port,
            )?,
            admin: self.admin.bind(self.admin_port)?,
            admin_socket: self.operation.admin_socket(Program::Server, env),
            strategies: self
                .proxy_strategies
                .parse()
                .map_err(ConfigError::about("--proxy-strategies"))?,
            destinations: self.destinations.spelled_out(),
            dial: self.dial,
            isolation: self.isolation,
            account: self.account,
            shutdown: self.operation.shutdown(1),
            log: self.operation.log(),
            access_log_limit: self.access_log_limit,
            metrics_agents: self.metrics_agents.into(),
            compat: false,
            agents: agents.plan(DataPathPlan {
                lanes_max: self.lanes_per_link,
                ..self.data_path
            })?,
        }
        .check()
    }
}

impl AgentFlags {
    fn leases(&self, server_id: &str) -> Result<Option<PublishPlan>, ConfigError> {
        let (namespace, label) = (&self.lease_namespace, &self.lease_label);
        self.enable_lease_controller
            .then(|| PublishPlan::of_flags(namespace, label, &self.kubeconfig, server_id))
            .transpose()
    }

    fn plan(self, data_path: DataPathPlan) -> Result<AgentListenerPlan, ConfigError> {
        let port = match (self.cluster_cert, self.cluster_key) {
            (Some(cert), Some(key)) if !self.no_agents => Some(AgentPort {
                bind: bind(
                    "--agent-bind-address",
                    &self.agent_bind_address,
                    self.agent_port,
                )?,
                tls: TlsFiles {
                    cert,
                    key,
                    client_ca: self.cluster_ca_cert,
                },
            }),
            _ => None,
        };
        Ok(AgentListenerPlan {
            balancers: self.proxy_protocol_from,
            port,
            tokens: TokenPlan::of_flags(
                &self.agent_namespace,
                &self.agent_service_account,
                &self.authentication_audience,
                &self.kubeconfig,
                Rate::default(),
                self.agent_proof,
            )?,
            insecure_unauthenticated: self.insecure_allow_unauthenticated_agents,
            keepalive: self.keepalive_time,
            grants: Grants::parse(&self.agent_grants)
                .map_err(|error| ConfigError::new(format!("--agent-grant {error}")))?,
            zone: self.zone.map(String::into_boxed_str),
            crl: self.agent_crl,
            deny: self.agent_deny,
            links_per_agent_max: self.links_per_agent,
            data_path,
        })
    }
}
