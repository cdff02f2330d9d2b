//! `adit agent`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::ids::AgentId;
use ipnet::IpNet;

use super::redirect::NamespaceFlags;
use super::values::{AdminFlags, OperationFlags, PortSetting, bind_if_on, clients, port_setting};
use crate::address::ServerAddress;
use crate::error::ConfigError;
use crate::limits;
use crate::plan::{
    AccountPlan, AgentPlan, AgentSettings, AgentTls, CapturedService, CountPlan, DataPathPlan,
    ForwardProxy, HttpProxy, Identity, IsolationPlan, NodeRedirectPlan, Program, TargetListener,
};
use crate::process_id::id;
use crate::units::{duration, ip, number, port};

const EXAMPLES: &str = "\
Examples:
  adit agent --proxy-server-host konnectivity.example --ca-cert ca.crt --agent-cert agent.crt --agent-key agent.key

  Two servers, a token in place of a certificate, only the networks of nodes and Services as targets:
    adit agent --proxy-server-host a.example,b.example:9443 --ca-cert ca.crt \\
      --token-path /var/run/secrets/tokens/konnectivity \\
      --allow-target 10.0.0.0/16 --allow-target 10.96.0.0/12

SIGTERM and SIGINT end it in order, SIGHUP has files read again at once, SIGUSR1 switches debug logging
on for 15 minutes or off.

With --compat, or called as proxy-agent, it takes the flags of upstream's proxy-agent instead.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct AgentFlags {
    #[command(flatten)]
    servers: ServerFlags,
    /// Lanes to each server, at most: data connections that carry one tunnel at a time, between Adit processes only; 0 is
    /// none
    #[arg(long, value_name = "N", default_value_t = limits::LANES_PER_LINK, value_parser = number(0..=u32::MAX), help_heading = "Data path")]
    lanes: u32,
    #[command(flatten)]
    data_path: DataPathPlan,
    #[command(flatten)]
    account: AccountPlan,
    /// Unique id of this agent [default: PROXY_AGENT_ID, else random]
    #[arg(long, value_name = "ID", help_heading = "Identity")]
    agent_id: Option<String>,
    /// What this agent reaches, URL-encoded: host=a&ipv4=1.2.3.4&cidr=10.0.0.0/8&default-route=true; zone=b is the agent's
    /// zone
    #[arg(
        long,
        value_name = "QUERY",
        default_value_t,
        hide_default_value = true,
        help_heading = "Identity"
    )]
    agent_identifiers: String,
    /// Target this agent may dial, CIDR or HOST, with :PORT or without; link-local and metadata addresses only if named;
    /// or all, or none; repeatable [default: all]
    #[arg(long = "allow-target", value_name = "TARGET", help_heading = "Targets")]
    allow_targets: Vec<String>,
    /// HTTP proxy through which targets are reached, http:// or https://; names only if --allow-target has them as names; hosts
    /// of NO_PROXY are dialled directly
    #[arg(long, value_name = "URL", help_heading = "Targets")]
    target_proxy: Option<String>,
    /// Time for a target to accept, with the lookup of its name and all its addresses
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration, help_heading = "Targets")]
    dial_timeout: Duration,
    #[command(flatten)]
    node: NodeFlags,
    #[command(flatten)]
    isolation: IsolationPlan,
    /// Warn, once for each tunnel, when the queue towards its target is full
    #[arg(long, help_heading = "Isolation")]
    warn_on_channel_limit: bool,
    /// Address of health checks and metrics; empty is all
    #[arg(
        long,
        value_name = "HOST",
        default_value_t,
        hide_default_value = true,
        help_heading = "Operation"
    )]
    health_server_host: String,
    /// Port of health checks and metrics, or off
    #[arg(long, value_name = "PORT", default_value = "8093", value_parser = port_setting, help_heading = "Operation")]
    health_server_port: PortSetting,
    /// Port of admin requests, or off
    #[arg(long, value_name = "PORT", default_value = "8094", value_parser = port_setting, help_heading = "Operation")]
    admin_server_port: PortSetting,
    #[command(flatten)]
    admin: AdminFlags,
    #[command(flatten)]
    operation: OperationFlags,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Servers")]
struct ServerFlags {
    /// Server to connect to: HOST, HOST:PORT or srv:NAME (targets and ports from SRV records, looked up at each connect); comma
    /// list, repeatable, at most 64
    #[arg(
        long = "proxy-server-host",
        value_name = "HOST",
        value_delimiter = ',',
        required = true
    )]
    proxy_server_hosts: Vec<String>,
    /// Port of servers given without one
    #[arg(long, value_name = "PORT", default_value_t = 8091, value_parser = port)]
    proxy_server_port: u16,
    /// CA bundle of the servers' certificates
    #[arg(long, value_name = "FILE")]
    ca_cert: PathBuf,
    /// HTTP proxy towards servers, http:// or https://, with NAME:PASSWORD@ where it asks for them; hosts of NO_PROXY are reached
    /// directly [default: HTTPS_PROXY]
    #[arg(long, value_name = "URL")]
    https_proxy: Option<String>,
    /// CA bundle of an https:// proxy towards servers [default: the system's]
    #[arg(long, value_name = "FILE")]
    proxy_ca_cert: Option<PathBuf>,
    /// Client certificate
    #[arg(long, value_name = "FILE", requires = "agent_key")]
    agent_cert: Option<PathBuf>,
    /// Key of --agent-cert
    #[arg(long, value_name = "FILE", requires = "agent_cert")]
    agent_key: Option<PathBuf>,
    /// File with a service account token, read again for each connection
    #[arg(
        long,
        visible_alias = "service-account-token-path",
        value_name = "FILE"
    )]
    token_path: Option<PathBuf>,
    /// Further ALPN protocols, offered before h2; comma list, repeatable
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    alpn_proto: Vec<String>,
    /// Shortest delay between attempts to reach missing servers
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    sync_interval: Duration,
    /// Longest delay between attempts to reach missing servers
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    sync_interval_cap: Duration,
    /// Go on connecting after all servers are connected, in case there are more
    #[arg(long)]
    sync_forever: bool,
    /// Count servers by their leases, and connect to each server that holds one
    #[arg(long)]
    count_server_leases: bool,
    /// Namespace of leases
    #[arg(long, value_name = "NAMESPACE", default_value = limits::LEASE_NAMESPACE)]
    lease_namespace: String,
    /// Label selector of the leases that count
    #[arg(long, visible_alias = "lease-label-selector", value_name = "SELECTOR", default_value = limits::LEASE_LABEL)]
    lease_label: String,
    /// What else counts servers: default (leases alone), or max (the count that servers report, if that is larger)
    #[arg(long, value_name = "SOURCE", default_value = "default")]
    server_count_source: String,
    /// Access to the Kubernetes API, which keeps leases [default: that of this pod]
    #[arg(long, value_name = "FILE", default_value_t, hide_default_value = true)]
    kubeconfig: String,
    /// Ping a server connection this often, busy or not; at least 30s, since Go servers end a connection that pings more often
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
    keepalive_time: Duration,
}

#[derive(clap::Args, Debug)]
#[command(
    next_help_heading = "Node to control plane",
    group = clap::ArgGroup::new("captures").args(["redirect_apiserver", "redirect_file"]).multiple(true)
)]
pub(super) struct NodeFlags {
    /// Listen on LOCAL_PORT for connections to DEST_HOST:DEST_PORT in the control plane, which the server dials and has to
    /// allow; port 0 lets the kernel choose, and the log says which; repeatable, at most 64
    #[arg(long = "target", value_name = "LOCAL_PORT:DEST_HOST:DEST_PORT")]
    target_listeners: Vec<String>,
    /// Address of the listeners of --target; an IPv6 address with or without brackets
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    bind_address: String,
    /// Network, such as that of this node's pods, whose connections the listeners of --target take besides those of this host;
    /// others get no answer; repeatable, at most 16 [default: all]
    #[arg(long, value_name = "CIDR", requires = "target_listeners", value_parser = clients)]
    pub(super) target_from: Vec<IpNet>,
    /// Send connections of a cgroup's processes to this address of a Service to DEST_HOST:DEST_PORT in the control plane, which
    /// the server dials and has to allow; IPv6 in brackets; needs eBPF; repeatable, at most 64
    #[arg(
        long,
        value_name = "SERVICE_IP:PORT=DEST_HOST:DEST_PORT",
        requires = "redirect_cgroup"
    )]
    redirect_apiserver: Vec<String>,
    /// File of further redirects, read again whenever it changes: one `redirect-apiserver
    /// SERVICE_IP:PORT=DEST_HOST:DEST_PORT` a line
    #[arg(long, value_name = "FILE", requires = "redirect_cgroup")]
    redirect_file: Option<PathBuf>,
    /// The cgroup whose processes, and those of cgroups below it, are redirected: a folder of the cgroup2 file system, its root for
    /// the whole node
    #[arg(long, value_name = "PATH", requires = "captures")]
    redirect_cgroup: Option<PathBuf>,
    #[command(flatten)]
    namespaces: NamespaceFlags,
    /// Address of this node, to which connections from network namespaces without a listener of the agent are redirected;
    /// without the flag they go direct; one of each family; repeatable
    #[arg(long, value_name = "IP", requires = "redirect_cgroup", value_parser = ip)]
    redirect_node_address: Vec<IpAddr>,
}

impl AgentFlags {
    /// Checks the flags and makes the plan.
    pub(super) fn plan(
        self,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<AgentPlan, ConfigError> {
        let servers = self.servers;
        let agent_id = self.agent_id.unwrap_or_else(|| id(env, "PROXY_AGENT_ID"));
        AgentSettings {
            agent_id: AgentId::new(&agent_id),
            identifiers: self.agent_identifiers,
            servers: servers.addresses()?,
            leases: servers.leases()?,
            tls: AgentTls {
                ca_cert: servers.ca_cert,
                identity: (servers.agent_cert.zip(servers.agent_key))
                    .map(|(cert, key)| Identity { cert, key }),
                alpn: servers.alpn_proto,
            },
            token_path: servers.token_path,
            forward_proxy: ForwardProxy::from_env(env)
                .overridden(servers.https_proxy, servers.proxy_ca_cert)?,
            sync_interval: servers.sync_interval,
            sync_interval_cap: servers.sync_interval_cap,
            sync_forever: servers.sync_forever,
            keepalive: servers.keepalive_time,
            warn_on_channel_limit: self.warn_on_channel_limit,
            health: bind_if_on(
                "--health-server-host",
                &self.health_server_host,
                self.health_server_port,
            )?,
            admin: self.admin.bind(self.admin_server_port)?,
            admin_socket: self.operation.admin_socket(Program::Agent, env),
            target_proxy: target_proxy(self.target_proxy.as_deref())?,
            allow_targets: Some(self.allow_targets).filter(|targets| !targets.is_empty()),
            target_listeners: self.node.target_listeners()?,
            target_from: self.node.target_from.clone(),
            redirect: self.node.redirect()?,
            data_path: DataPathPlan {
                lanes_max: self.lanes,
                ..self.data_path
            },
            account: self.account,
            dial_timeout: self.dial_timeout,
            isolation: self.isolation,
            shutdown: self.operation.shutdown(0),
            log: self.operation.log(),
            compat: false,
        }
        .check()
    }
}

/// The proxy of `--target-proxy`.
pub(super) fn target_proxy(url: Option<&str>) -> Result<Option<HttpProxy>, ConfigError> {
    url.map(HttpProxy::parse)
        .transpose()
        .map_err(|why| ConfigError::new(format!("--target-proxy {why}")))
}

impl ServerFlags {
    fn addresses(&self) -> Result<Vec<ServerAddress>, ConfigError> {
        let parse = |host: &String| ServerAddress::parse(host, self.proxy_server_port);
        let servers: Result<_, String> = self.proxy_server_hosts.iter().map(parse).collect();
        servers.map_err(ConfigError::about("--proxy-server-host"))
    }

    fn leases(&self) -> Result<Option<CountPlan>, ConfigError> {
        let (namespace, label) = (&self.lease_namespace, &self.lease_label);
        let source = &self.server_count_source;
        self.count_server_leases
            .then(|| CountPlan::of_flags(namespace, label, &self.kubeconfig, source))
            .transpose()
    }
}

impl NodeFlags {
    pub(super) fn target_listeners(&self) -> Result<Vec<TargetListener>, ConfigError> {
        let parse = |text: &String| TargetListener::parse(text, &self.bind_address);
        self.target_listeners.iter().map(parse).collect()
    }

    pub(super) fn redirect(self) -> Result<Option<NodeRedirectPlan>, ConfigError> {
        let parse = |text: &String| CapturedService::parse(text);
        let services = self
            .redirect_apiserver
            .iter()
            .map(parse)
            .collect::<Result<_, _>>()?;
        Ok(self.redirect_cgroup.map(|cgroup| NodeRedirectPlan {
            services,
            cgroup,
            file: self.redirect_file,
            netns: self.namespaces.plan(),
            node_addresses: self.redirect_node_address,
        }))
    }
}
