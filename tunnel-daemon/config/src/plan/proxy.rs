//! The plan of `adit proxy`: listeners for clients, and the servers that reach their targets.

use std::num::NonZeroU32;
use std::ops::Deref;
use std::time::Duration;

use super::admin_socket::AdminSocketPlan;
use super::agent::AgentTls;
use super::data_path::DataPathPlan;
use super::frontends::{ClientsPlan, FrontendPlan};
use super::names::{CustomerProxies, DirectPlan, NamesPlan};
use super::parts::{
    ForwardProxy, IsolationPlan, LogPlan, ShutdownPlan, check_distinct, check_files,
};
use crate::address::{BindAddress, ServerAddress};
use crate::error::{ConfigError, bail};
use crate::limits;
use crate::tls_policy::TlsPolicy;

/// The settings of a proxy, not yet checked.
#[derive(Clone, PartialEq, Debug)]
pub struct ProxySettings {
    /// Name of this process, for `adit status`.
    pub id: String,
    /// Frontends, at least one.
    pub clients: ClientsPlan,
    /// Servers with an `http-connect` frontend, at least one.
    pub servers: Vec<ServerAddress>,
    /// How they are verified, and what they are shown.
    pub server_tls: AgentTls,
    /// HTTP proxy towards servers.
    pub forward_proxy: ForwardProxy,
    /// How names become addresses.
    pub names: NamesPlan,
    /// Connections past the servers.
    pub direct: DirectPlan,
    /// Proxies behind the tunnel.
    pub customer: CustomerProxies,
    /// TLS versions and cipher suites, towards clients and servers.
    pub tls: TlsPolicy,
    /// Time for a dial, over all servers.
    pub dial_timeout: Duration,
    /// Dials without an answer at once, at most.
    pub pending_dials_max: NonZeroU32,
    /// Connections to servers that wait for the next dial, at most.
    pub spare_connections: u32,
    /// Health and metrics listener; `None`: off.
    pub health: Option<BindAddress>,
    /// Unix socket for `adit status` and `adit top`.
    pub admin_socket: AdminSocketPlan,
    /// No lanes: there are no agents.
    pub data_path: DataPathPlan,
    /// Failures name the server and the target, as those of HyperShift's sidecars.
    pub quotes_servers: bool,
    /// Byte budgets.
    pub isolation: IsolationPlan,
    /// Shutdown by signals.
    pub shutdown: ShutdownPlan,
    /// Logs.
    pub log: LogPlan,
    /// Access events per second on average; 0: no limit.
    pub access_log_limit: u32,
}

/// A checked [`ProxySettings`]; read-only.
#[derive(Clone, PartialEq, Debug)]
pub struct ProxyPlan(ProxySettings);

impl Deref for ProxyPlan {
    type Target = ProxySettings;

    fn deref(&self) -> &ProxySettings {
        &self.0
    }
}

impl ProxySettings {
    /// Makes the plan.
    ///
    /// # Errors
    /// Settings that contradict each other, a missing file, or a dialect of servers.
    pub fn check(self) -> Result<ProxyPlan, ConfigError> {
        let is_foreign = |frontend: &&FrontendPlan| !frontend.dialect.is_for_anyone();
        if let Some(frontend) = self.clients.frontends.iter().find(is_foreign) {
            bail!(
                "adit proxy has no {} frontends: give socks5=... or http-proxy=..., which takes CONNECT, too",
                frontend.dialect.name()
            );
        }
        if self.clients.frontends.is_empty() {
            bail!("no frontend: give at least one, such as --frontend socks5=tcp:127.0.0.1:1080");
        }
        self.clients.check(&self.admin_socket)?;
        if self.servers.len() > limits::SERVER_ADDRESSES_MAX {
            let (count, max) = (self.servers.len(), limits::SERVER_ADDRESSES_MAX);
            bail!("{count} servers in --proxy-server-host are too many: at most {max}");
        }
        if self.dial_timeout.is_zero() {
            bail!("--dial-timeout must be greater than 0");
        }
        self.isolation.check()?;
        self.names.check()?;
        let identity = self.server_tls.identity.as_ref();
        let [ca_cert, cert, key] = if self.quotes_servers {
            ["--ca-cert-path", "--tls-cert-path", "--tls-key-path"]
        } else {
            ["--ca-cert", "--client-cert", "--client-key"]
        };
        check_files([
            (ca_cert, Some(&self.server_tls.ca_cert)),
            (cert, identity.map(|identity| &identity.cert)),
            (key, identity.map(|identity| &identity.key)),
            ("--proxy-ca-cert", self.forward_proxy.ca_cert.as_ref()),
        ])?;
        let health = self.health.iter().map(|bind| ("--health-port", bind));
        check_distinct(self.clients.binds().chain(health))?;
        Ok(ProxyPlan(self))
    }
}
