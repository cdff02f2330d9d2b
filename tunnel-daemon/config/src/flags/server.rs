//! `adit server`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::grant::{ClientRules, Grants};
use adit_core::ids::ServerId;
use adit_kube::reviewer::Rate;

use super::account::AccountFlags;
use super::redirect::TransparentFlags;
use super::values::{
    DataPathFlags, FrontendSpec, IsolationFlags, OperationFlags, Place, PortSetting, bind, bytes,
    duration, frontend, port_setting,
};
use crate::address::BindAddress;
use crate::command::id;
use crate::error::ConfigError;
use crate::limits;
use crate::plan::{
    AgentListenerPlan, AgentProof, ConnectPlan, DestinationsPlan, DialPlan, FrontendListen,
    FrontendPlan, KeepAlive, PublishPlan, ServerPlan, ServerSettings, TlsFiles, TokenPlan,
};
use crate::tls_policy::TlsPolicy;

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
    /// Where clients come in, DIALECT=unix:PATH or DIALECT=tcp:HOST:PORT (tcp::PORT for all addresses); DIALECT is grpc or
    /// http-connect; repeatable, at most 64; at least one, or --redirect, --redirect-file or --transparent-bind-address
    #[arg(long = "frontend", value_name = "FRONTEND", value_parser = frontend, help_heading = "Frontends")]
    frontends: Vec<FrontendSpec>,
    /// Certificate of TCP frontends
    #[arg(
        long,
        value_name = "FILE",
        requires = "server_key",
        help_heading = "Frontends"
    )]
    server_cert: Option<PathBuf>,
    /// Key of --server-cert
    #[arg(
        long,
        value_name = "FILE",
        requires = "server_cert",
        help_heading = "Frontends"
    )]
    server_key: Option<PathBuf>,
    /// CA of client certificates on TCP frontends, which are required
    #[arg(
        long,
        value_name = "FILE",
        requires = "server_cert",
        help_heading = "Frontends"
    )]
    server_ca_cert: Option<PathBuf>,
    /// TCP frontends in clear text, for anyone who can connect
    #[arg(long, conflicts_with = "server_cert", help_heading = "Frontends")]
    insecure_plaintext_frontend: bool,
    /// A target that clients may ask for: address, network, name, *.SUFFIX or *, with a port if you like; with cn=, dns= or uri=
    /// before it only for clients whose certificate has these names, such as cn=prometheus,10.0.0.0/8:9100; repeatable
    /// [default: every target]
    #[arg(
        long = "client-allow-target",
        value_name = "RULE",
        help_heading = "Frontends"
    )]
    client_allow_targets: Vec<String>,
    /// Remove a stale socket file before listening
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, default_missing_value = "true",
          action = clap::ArgAction::Set, help_heading = "Frontends")]
    delete_existing_uds_file: bool,
    /// Ping a gRPC client connection this often, busy or not; it is given up when nothing comes for 20s
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration, help_heading = "Frontends")]
    frontend_keepalive_time: Duration,
    /// Close an http-connect client that has not sent its request head after this long
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "Frontends")]
    connect_head_timeout: Duration,
    /// Refuse longer request heads of http-connect clients, with status 431; from 1KiB to 16MiB
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = bytes, help_heading = "Frontends")]
    connect_head_size: u64,

    #[command(flatten)]
    transparent: TransparentFlags,

    /// Certificate of the agent listener
    #[arg(long, value_name = "FILE", help_heading = "Agents")]
    cluster_cert: PathBuf,
    /// Key of --cluster-cert
    #[arg(long, value_name = "FILE", help_heading = "Agents")]
    cluster_key: PathBuf,
    /// CA of agents' client certificates, which are required, unless a token will do
    #[arg(long, value_name = "FILE", help_heading = "Agents")]
    cluster_ca_cert: Option<PathBuf>,
    /// Let agents in by a service account token: namespace of the account
    #[arg(
        long,
        value_name = "NAMESPACE",
        default_value = "",
        hide_default_value = true,
        help_heading = "Agents"
    )]
    agent_namespace: String,
    /// Name of the account
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true,
        help_heading = "Agents"
    )]
    agent_service_account: String,
    /// Audience of the token, such as system:konnectivity-server
    #[arg(
        long,
        value_name = "AUDIENCE",
        default_value = "",
        hide_default_value = true,
        help_heading = "Agents"
    )]
    authentication_audience: String,
    /// What agents prove where tokens and --cluster-ca-cert are configured: either one, or both
    #[arg(
        long,
        value_enum,
        value_name = "PROOF",
        default_value = "either",
        help_heading = "Agents"
    )]
    agent_proof: AgentProof,
    /// Access to the Kubernetes API, which reviews tokens and keeps leases [default: that of this pod]
    #[arg(
        long,
        value_name = "FILE",
        default_value = "",
        hide_default_value = true,
        help_heading = "Agents"
    )]
    kubeconfig: String,
    /// Let anyone register as an agent; without it, a CA or tokens the server refuses to start
    #[arg(long, conflicts_with = "cluster_ca_cert", help_heading = "Agents")]
    insecure_allow_unauthenticated_agents: bool,
    /// Who may claim what: cn=, dns=, uri= of a certificate or serviceaccount=, node= of a token, then id=, host=, ipv4=,
    /// ipv6=, cidr=, default-route=true, zone=; such as cn=node-*,id={*}; repeatable [default: agents claim what they like]
    #[arg(long = "agent-grant", value_name = "GRANT", help_heading = "Agents")]
    agent_grants: Vec<String>,
    /// Zone of this server: among agents that fit equally, dials go to those with this zone= in --agent-identifiers
    #[arg(
        long,
        value_name = "ZONE",
        value_parser = clap::builder::NonEmptyStringValueParser::new(),
        help_heading = "Agents"
    )]
    zone: Option<String>,
    /// Certificate revocation lists (PEM) of the CAs in --cluster-ca-cert: agents with a revoked certificate are refused, and their
    /// links end; read again whenever the file changes
    #[arg(
        long,
        value_name = "FILE",
        requires = "cluster_ca_cert",
        help_heading = "Agents"
    )]
    agent_crl: Option<PathBuf>,
    /// Refuse these agents, and end their links: id=, cn=, dns=, uri=, serviceaccount=, node= or pod= of one a line; read again
    /// whenever the file changes
    #[arg(long, value_name = "FILE", help_heading = "Agents")]
    agent_deny: Option<PathBuf>,
    /// Links one certificate, or one token's node, may hold under one agent id; more are refused
    #[arg(long, value_name = "N", default_value = "64", help_heading = "Agents")]
    links_per_agent: NonZeroU32,
    /// Lanes one link may have: data connections of their own for tunnels, between Adit ends only; 0 is none
    #[arg(long, value_name = "N", default_value_t = limits::LANES_PER_LINK, help_heading = "Data path")]
    lanes_per_link: u32,
    #[command(flatten)]
    data_path: DataPathFlags,
    /// Address of the agent listener; empty is all
    #[arg(
        long,
        value_name = "HOST",
        default_value = "",
        hide_default_value = true,
        help_heading = "Agents"
    )]
    agent_bind_address: String,
    /// Port of the agent listener; 0 lets the kernel choose
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 8091,
        help_heading = "Agents"
    )]
    agent_port: u16,
    /// An agent's connection ends after this time and 20s of silence; a quiet one is pinged after 3s in any case
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration, help_heading = "Agents")]
    keepalive_time: Duration,
    /// Name of this server, unique among those an agent reaches [default: PROXY_SERVER_ID, else random]
    #[arg(long, value_name = "ID", help_heading = "Agents")]
    server_id: Option<String>,
    /// Number of servers agents should connect to; with leases, agents are told the number of leases if that is larger
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Agents")]
    server_count: i64,
    /// Publish a lease, by which agents and other servers know that this server is there, and delete expired ones
    #[arg(long, help_heading = "Agents")]
    enable_lease_controller: bool,
    /// Namespace of leases
    #[arg(
        long,
        value_name = "NAMESPACE",
        default_value = limits::LEASE_NAMESPACE,
        help_heading = "Agents"
    )]
    lease_namespace: String,
    /// Labels of leases, K=V,K=V
    #[arg(
        long,
        value_name = "LABELS",
        default_value = limits::LEASE_LABEL,
        help_heading = "Agents"
    )]
    lease_label: String,

    /// Lowest TLS version: VersionTLS12 or VersionTLS13
    #[arg(
        long,
        value_name = "VERSION",
        default_value = "VersionTLS12",
        help_heading = "TLS"
    )]
    tls_min_version: String,
    /// TLS 1.2 cipher suites, comma list of Go names; repeatable [default: all that are safe]
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        help_heading = "TLS"
    )]
    cipher_suites: Vec<String>,

    /// How an agent is chosen, in order: default, destHost, defaultRoute, destCIDR
    #[arg(
        long,
        value_name = "NAMES",
        default_value = "default",
        help_heading = "Dials"
    )]
    proxy_strategies: String,
    /// Time for a dial, from request to answer; 0 is no limit. A request that could not even be sent in this time retires its
    /// link: no dials until the agent reads again
    #[arg(long, value_name = "TIME", default_value = "25s", value_parser = duration, help_heading = "Dials")]
    dial_timeout: Duration,
    /// Dials an agent may owe an answer to on one link
    #[arg(long, value_name = "N", default_value = "1024", help_heading = "Dials")]
    pending_dials_per_agent: NonZeroU32,
    /// Dials in flight over all agents
    #[arg(
        long,
        value_name = "N",
        default_value = "16384",
        help_heading = "Dials"
    )]
    pending_dials: NonZeroU32,
    /// Silence of an agent after which its links get no dials, at least 5s; 20s or more for an agent in Go. Its tunnels live on
    #[arg(long, value_name = "TIME", default_value = "8s", value_parser = duration, help_heading = "Dials")]
    link_dead_after: Duration,

    /// Destination this server dials for agents: CIDR:PORT, ADDRESS:PORT, [V6]:PORT or NAME:PORT; needs agents that prove who they are, and lanes;
    /// repeatable
    /// [default: agents may open nothing]
    #[arg(
        long = "allowed-destination",
        value_name = "DEST",
        help_heading = "Node to control plane"
    )]
    allowed_destinations: Vec<String>,
    /// Begin each connection to such a destination with a PROXY protocol header, version 2, that names its source and agent
    #[arg(long, help_heading = "Node to control plane")]
    destination_proxy_header: bool,

    #[command(flatten)]
    account: AccountFlags,
    #[command(flatten)]
    isolation: IsolationFlags,

    /// Address of health checks and metrics; empty is all
    #[arg(
        long,
        value_name = "HOST",
        default_value = "",
        hide_default_value = true,
        help_heading = "Operation"
    )]
    health_bind_address: String,
    /// Port of health checks and metrics, or off
    #[arg(long, value_name = "PORT", default_value = "8092", value_parser = port_setting, help_heading = "Operation")]
    health_port: PortSetting,
    /// Address of admin requests
    #[arg(
        long,
        value_name = "HOST",
        default_value = "127.0.0.1",
        help_heading = "Operation"
    )]
    admin_bind_address: String,
    /// Port of admin requests, or off
    #[arg(long, value_name = "PORT", default_value = "8095", value_parser = port_setting, help_heading = "Operation")]
    admin_port: PortSetting,
    /// Lines of the access log a second, one for each tunnel; twice as many at once. 0 is no limit
    #[arg(long, value_name = "N", default_value_t = limits::ACCESS_LOG_LIMIT, help_heading = "Operation")]
    access_log_limit: u32,
    #[command(flatten)]
    operation: OperationFlags,
}

impl ServerFlags {
    /// Checks and maps.
    pub(super) fn plan(
        self,
        env: &dyn Fn(&str) -> Option<String>,
        warnings: &mut Vec<String>,
    ) -> Result<ServerPlan, ConfigError> {
        if self.frontend_keepalive_time.is_zero() || self.keepalive_time.is_zero() {
            return Err(ConfigError::new(
                "--keepalive-time and --frontend-keepalive-time must be greater than 0",
            ));
        }
        let server_id = self
            .server_id
            .clone()
            .unwrap_or_else(|| id(env, "PROXY_SERVER_ID"));
        ServerSettings {
            server_id: ServerId::new(&server_id),
            server_count: self.server_count,
            leases: self
                .enable_lease_controller
                .then(|| {
                    PublishPlan::of_flags(
                        &self.lease_namespace,
                        &self.lease_label,
                        &self.kubeconfig,
                        &server_id,
                    )
                })
                .transpose()?,
            frontends: self.frontends(warnings)?,
            client_rules: ClientRules::parse(&self.client_allow_targets)
                .map_err(|error| ConfigError::new(format!("--client-allow-target {error}")))?,
            transparent: self.transparent.plan(),
            frontend_keepalive: KeepAlive::every(self.frontend_keepalive_time),
            connect: ConnectPlan {
                head_timeout: self.connect_head_timeout,
                head_bytes_max: self.connect_head_size,
            },
            tls: TlsPolicy::parse(&self.tls_min_version, &self.cipher_suites, warnings)?,
            health: self
                .health_port
                .bind("--health-bind-address", &self.health_bind_address)?,
            admin: self
                .admin_port
                .bind("--admin-bind-address", &self.admin_bind_address)?,
            admin_socket: self.operation.admin_socket(),
            profiling: OperationFlags::profiling(),
            strategies: self
                .proxy_strategies
                .parse()
                .map_err(|error| ConfigError::new(format!("--proxy-strategies: {error}")))?,
            destinations: DestinationsPlan {
                allowed: self.allowed_destinations,
                proxy_header: self.destination_proxy_header,
            },
            dial: DialPlan {
                timeout: Some(self.dial_timeout).filter(|timeout| !timeout.is_zero()),
                pending_per_agent_max: self.pending_dials_per_agent,
                pending_max: self.pending_dials,
                link_dead_after: self.link_dead_after,
            },
            isolation: self.isolation.plan(),
            account: self.account.plan(),
            shutdown: self.operation.shutdown(1),
            log: self.operation.log(),
            access_log_limit: self.access_log_limit,
            compat: false,
            agents: AgentListenerPlan {
                bind: bind(
                    "--agent-bind-address",
                    &self.agent_bind_address,
                    self.agent_port,
                )?,
                tls: TlsFiles {
                    cert: self.cluster_cert,
                    key: self.cluster_key,
                    client_ca: self.cluster_ca_cert,
                },
                tokens: TokenPlan::of_flags(
                    &self.agent_namespace,
                    &self.agent_service_account,
                    &self.authentication_audience,
                    &self.kubeconfig,
                    Rate::default(),
                    self.agent_proof,
                )?,
                insecure_unauthenticated: self.insecure_allow_unauthenticated_agents,
                keepalive: KeepAlive::every(self.keepalive_time),
                grants: Grants::parse(&self.agent_grants)
                    .map_err(|error| ConfigError::new(format!("--agent-grant {error}")))?,
                zone: self.zone.map(String::into_boxed_str),
                crl: self.agent_crl,
                deny: self.agent_deny,
                links_per_agent_max: self.links_per_agent,
                data_path: self.data_path.plan(self.lanes_per_link),
            },
        }
        .check()
    }

    fn frontends(&self, warnings: &mut Vec<String>) -> Result<Vec<FrontendPlan>, ConfigError> {
        let plan = |spec: &FrontendSpec| {
            let listen = match &spec.place {
                Place::Unix(path) => FrontendListen::Unix {
                    path: path.clone(),
                    delete_existing: self.delete_existing_uds_file,
                    mode: limits::UNIX_SOCKET_MODE,
                },
                Place::Tcp(bind) => self.tcp(bind, warnings)?,
            };
            Ok(FrontendPlan {
                dialect: spec.dialect,
                listen,
            })
        };
        let plans = self
            .frontends
            .iter()
            .map(plan)
            .collect::<Result<Vec<_>, ConfigError>>()?;
        if self.server_cert.is_some()
            && !self
                .frontends
                .iter()
                .any(|spec| matches!(spec.place, Place::Tcp(_)))
        {
            warnings.push(
                "--server-cert, --server-key, --server-ca-cert are unused: no frontend is on TCP"
                    .to_owned(),
            );
        }
        Ok(plans)
    }

    fn tcp(
        &self,
        bind: &BindAddress,
        warnings: &mut Vec<String>,
    ) -> Result<FrontendListen, ConfigError> {
        let bind = bind.clone();
        if self.insecure_plaintext_frontend {
            if !bind.is_loopback() {
                warnings.push(format!(
                    "the frontend on {bind} serves anyone who can connect, in clear text"
                ));
            }
            return Ok(FrontendListen::Tcp { bind, tls: None });
        }
        match (&self.server_cert, &self.server_key, &self.server_ca_cert) {
            (Some(cert), Some(key), Some(ca)) => {
                let tls = TlsFiles {
                    cert: cert.clone(),
                    key: key.clone(),
                    client_ca: Some(ca.clone()),
                };
                Ok(FrontendListen::Tcp {
                    bind,
                    tls: Some(tls),
                })
            }
            _ => Err(ConfigError::new(format!(
                "the frontend on {bind} needs client certificates: give --server-cert, --server-key and \
                 --server-ca-cert, or --insecure-plaintext-frontend to serve anyone in clear text"
            ))),
        }
    }
}
