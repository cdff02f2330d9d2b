//! `adit proxy`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use adit_kube::access::Source;
use uuid::Uuid;

use super::clients::{ClientFlags, LoopbackClients, TlsFlags};
use super::values::{
    FrontendSpec, OperationFlags, PortSetting, bind_if_on, frontend, port_setting,
};
use crate::address::ServerAddress;
use crate::error::ConfigError;
use crate::limits;
use crate::plan::{
    AgentTls, CustomerProxies, DataPathPlan, DirectPlan, ForwardProxy, GuestDns, Identity,
    IsolationPlan, NamesPlan, Program, ProxyPlan, ProxySettings, Resolver,
};
use crate::units::{bytes, duration, number, port};

const PENDING_DIALS: NonZeroU32 = NonZeroU32::new(limits::PROXY_PENDING_DIALS).expect("not zero");

const EXAMPLES: &str = "\
Examples:
  SOCKS5 and HTTP for the program beside it, through two servers with an http-connect frontend:
    adit proxy --frontend socks5=tcp:127.0.0.1:1080 --frontend http-proxy=tcp:127.0.0.1:3128 \\
      --proxy-server-host a.example,b.example --ca-cert ca.crt --client-cert client.crt --client-key client.key

SIGTERM and SIGINT end it in order, SIGHUP has files read again at once, SIGUSR1 switches debug logging
on for 15 minutes or off.";

#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ProxyFlags {
    /// Listener for clients, DIALECT=unix:PATH or DIALECT=tcp:HOST:PORT; DIALECT is http-proxy or socks5; repeatable, at most 64
    #[arg(long = "frontend", value_name = "FRONTEND", value_parser = frontend, required = true, help_heading = "Frontends")]
    frontends: Vec<FrontendSpec>,
    #[command(flatten)]
    clients: ClientFlags,
    #[command(flatten)]
    servers: ServerFlags,
    #[command(flatten)]
    names: NameFlags,
    #[command(flatten)]
    tls: TlsFlags,
    /// Time for a dial, over all servers
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration, help_heading = "Dials")]
    dial_timeout: Duration,
    /// Dials without an answer at once, at most
    #[arg(long, value_name = "N", default_value_t = PENDING_DIALS, value_parser = number(NonZeroU32::MIN..=NonZeroU32::MAX), help_heading = "Dials")]
    pending_dials: NonZeroU32,
    #[command(flatten)]
    isolation: IsolationFlags,
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
    #[arg(long, value_name = "PORT", default_value = "8096", value_parser = port_setting, help_heading = "Operation")]
    health_port: PortSetting,
    #[command(flatten)]
    operation: OperationFlags,
    /// Access log lines a second, one for each tunnel, with bursts of twice as many; 0 is no limit
    #[arg(long, value_name = "N", default_value_t = limits::ACCESS_LOG_LIMIT, value_parser = number(0..=u32::MAX), help_heading = "Operation")]
    access_log_limit: u32,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Servers")]
struct ServerFlags {
    /// Server with an http-connect frontend: HOST, HOST:PORT or srv:NAME; one that fails is tried after the others for a while;
    /// comma list, repeatable, at most 64
    #[arg(
        long = "proxy-server-host",
        value_name = "HOST",
        value_delimiter = ',',
        required = true
    )]
    proxy_server_hosts: Vec<String>,
    /// Port of servers given without one
    #[arg(long, value_name = "PORT", default_value_t = 8090, value_parser = port)]
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
    #[arg(long, value_name = "FILE", requires = "client_key")]
    client_cert: Option<PathBuf>,
    /// Key of --client-cert
    #[arg(long, value_name = "FILE", requires = "client_cert")]
    client_key: Option<PathBuf>,
    /// Connections to servers kept ready for the next dials, one more for each dial that found none, at most this many; 0 is none
    #[arg(long, value_name = "N", default_value_t = limits::SPARE_CONNECTIONS, value_parser = number(0_u32..=64))]
    spare_connections: u32,
}

/// Those of [`IsolationPlan`] that do not concern links.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Isolation")]
struct IsolationFlags {
    /// Memory that all tunnels of the process may hold, at least 4MiB [default: a quarter of the smallest memory limit of its
    /// cgroups, else of the machine's memory; at least 64MiB, at most half]
    #[arg(long, value_name = "SIZE", value_parser = process_budget)]
    process_budget: Option<u64>,
    /// Reset a half-closed tunnel after this time without a byte; raise it for clients that close their side and wait long
    /// for the answer
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    half_closed_timeout: Duration,
}

fn process_budget(text: &str) -> Result<u64, String> {
    let budget = bytes(text)?;
    match budget < limits::TUNNEL_SHARE_BYTES {
        true => Err("write at least 4MiB".to_owned()),
        false => Ok(budget),
    }
}

impl IsolationFlags {
    fn plan(self) -> IsolationPlan {
        let process = self.process_budget.unwrap_or(u64::MAX);
        IsolationPlan {
            agent_budget_bytes: limits::AGENT_BUDGET_BYTES.min(process),
            process_budget_bytes: self.process_budget,
            half_closed_timeout: self.half_closed_timeout,
            ..IsolationPlan::default()
        }
    }
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Names")]
struct NameFlags {
    /// Who resolves names that end so, SUFFIX=WHERE: agent, which resolves all other names, too; tunnel (the cluster at the other end: its
    /// Services, then its DNS) or here (this host); the longest suffix counts; repeatable
    #[arg(long = "resolve", value_name = "SUFFIX=WHERE", value_parser = NamesPlan::suffix)]
    suffixes: Vec<(String, Resolver)>,
    /// Access to the API of the cluster at the other end, whose Services are watched
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// DNS of the cluster at the other end, asked over TCP through the tunnel: an address, with :PORT if it
    /// is not 53, or NAMESPACE/NAME of its Service
    #[arg(long, value_name = "DNS", value_parser = GuestDns::parse)]
    guest_dns: Option<GuestDns>,
    /// Try the IPv4 addresses of a name first
    #[arg(long)]
    prefer_ipv4: bool,
}

impl NameFlags {
    fn plan(self) -> NamesPlan {
        NamesPlan {
            suffixes: self.suffixes,
            resolver: Resolver::Agent,
            services: self.kubeconfig.map(Source::Kubeconfig),
            guest_dns: self.guest_dns,
            unresolved: Resolver::Agent,
            falls_back: false,
            prefer_ipv4: self.prefer_ipv4,
        }
    }
}

impl ProxyFlags {
    /// Checks the flags and makes the plan.
    pub(super) fn plan(
        self,
        env: &dyn Fn(&str) -> Option<String>,
        warnings: &mut Vec<String>,
    ) -> Result<ProxyPlan, ConfigError> {
        let servers = self.servers;
        let address = |host: &String| ServerAddress::parse(host, servers.proxy_server_port);
        let addresses: Result<_, String> = servers.proxy_server_hosts.iter().map(address).collect();
        ProxySettings {
            id: Uuid::new_v4().to_string(),
            clients: self.clients.plan(
                &self.frontends,
                LoopbackClients::Understood,
                Duration::MAX,
                warnings,
            )?,
            servers: addresses.map_err(ConfigError::about("--proxy-server-host"))?,
            server_tls: AgentTls {
                ca_cert: servers.ca_cert,
                identity: (servers.client_cert.zip(servers.client_key))
                    .map(|(cert, key)| Identity { cert, key }),
                alpn: Vec::new(),
            },
            forward_proxy: ForwardProxy::from_env(env)
                .overridden(servers.https_proxy, servers.proxy_ca_cert)?,
            names: self.names.plan(),
            direct: DirectPlan::default(),
            customer: CustomerProxies::default(),
            tls: self.tls.policy(warnings)?,
            dial_timeout: self.dial_timeout,
            pending_dials_max: self.pending_dials,
            spare_connections: servers.spare_connections,
            health: bind_if_on(
                "--health-bind-address",
                &self.health_bind_address,
                self.health_port,
            )?,
            admin_socket: self.operation.admin_socket(Program::Proxy, env),
            quotes_servers: false,
            data_path: DataPathPlan::NONE,
            isolation: self.isolation.plan(),
            shutdown: self.operation.shutdown(1),
            log: self.operation.log(),
            access_log_limit: self.access_log_limit,
        }
        .check()
    }
}
