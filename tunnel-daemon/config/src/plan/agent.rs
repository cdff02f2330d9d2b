//! The plan of an agent: its servers, targets and limits.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use adit_core::destination::DestinationList;
use adit_core::ids::AgentId;
use ipnet::IpNet;

use super::account::AccountPlan;
use super::admin_socket::AdminSocketPlan;
use super::data_path::{DataPathPlan, LaneSecurity};
use super::http_proxy::HttpProxy;
use super::leases::CountPlan;
use super::node::{NodeRedirectPlan, TargetListener, check_targets};
use super::parts::{
    ForwardProxy, Identity, IsolationPlan, LogPlan, ShutdownPlan, check_distinct, check_files,
    check_header_text,
};
use crate::address::{BindAddress, ServerAddress};
use crate::error::{ConfigError, bail};
use crate::{identifiers, limits};

/// How an agent authenticates to servers, and verifies them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AgentTls {
    /// CA bundle for the server's certificate.
    pub ca_cert: PathBuf,
    /// Client certificate.
    pub identity: Option<Identity>,
    /// Extra ALPN protocols, offered before `h2`.
    pub alpn: Vec<String>,
}

/// The settings of an agent, not yet checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AgentSettings {
    /// Sent to servers as `agentid`.
    pub agent_id: AgentId,
    /// Sent to servers as `agentidentifiers`: URL query encoding, ASCII, may be empty.
    pub identifiers: String,
    /// Addresses of servers, at least one.
    pub servers: Vec<ServerAddress>,
    /// TLS towards servers.
    pub tls: AgentTls,
    /// File with a bearer token, read again at each connect.
    pub token_path: Option<PathBuf>,
    /// HTTP proxy towards servers.
    pub forward_proxy: ForwardProxy,
    /// First pause between sync rounds, and the pause once all servers are connected.
    pub sync_interval: Duration,
    /// Longest pause between sync rounds.
    pub sync_interval_cap: Duration,
    /// Continue to open trial connections when all servers are connected.
    pub sync_forever: bool,
    /// Count servers by their leases.
    pub leases: Option<CountPlan>,
    /// Time between HTTP/2 pings on a link.
    pub keepalive: Duration,
    /// Log when a queue is full.
    pub warn_on_channel_limit: bool,
    /// Health and metrics listener; `None`: off.
    pub health: Option<BindAddress>,
    /// Admin listener; `None`: off.
    pub admin: Option<BindAddress>,
    /// Unix socket for `adit status` and `adit top`.
    pub admin_socket: AdminSocketPlan,
    /// The HTTP proxy through which targets are reached.
    pub target_proxy: Option<HttpProxy>,
    /// `--allow-target` entries as typed; `None`: every target, as upstream.
    pub allow_targets: Option<Vec<String>>,
    /// Listeners for connections to the control plane.
    pub target_listeners: Vec<TargetListener>,
    /// Networks that these listeners serve besides this host; empty: all.
    pub target_from: Vec<IpNet>,
    /// Redirect of connections of this node's processes to Services.
    pub redirect: Option<NodeRedirectPlan>,
    /// Lanes and relay.
    pub data_path: DataPathPlan,
    /// Kernel accounting.
    pub account: AccountPlan,
    /// Time for a target to accept, over all addresses.
    pub dial_timeout: Duration,
    /// Byte budgets.
    pub isolation: IsolationPlan,
    /// Shutdown by signals.
    pub shutdown: ShutdownPlan,
    /// Logs.
    pub log: LogPlan,
    /// Behave as the upstream program does where the two differ.
    pub compat: bool,
}

/// A checked [`AgentSettings`]; read-only.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AgentPlan(AgentSettings);

impl Deref for AgentPlan {
    type Target = AgentSettings;

    fn deref(&self) -> &AgentSettings {
        &self.0
    }
}

impl AgentSettings {
    /// Makes the plan.
    ///
    /// # Errors
    /// Settings that contradict each other, a missing file, or text that cannot be sent in a header.
    pub fn check(self) -> Result<AgentPlan, ConfigError> {
        if self.servers.is_empty() {
            bail!("no server: give --proxy-server-host");
        }
        if self.servers.len() > limits::SERVER_ADDRESSES_MAX {
            let (count, max) = (self.servers.len(), limits::SERVER_ADDRESSES_MAX);
            bail!("{count} servers in --proxy-server-host are too many: at most {max}");
        }
        check_header_text("--agent-id", self.agent_id.as_str())?;
        identifiers::check(&self.identifiers)?;
        for protocol in &self.tls.alpn {
            if protocol.is_empty() || protocol.len() > 255 {
                bail!("--alpn-proto {protocol:?}: a protocol name has 1 to 255 bytes");
            }
        }
        if let Some(targets) = &self.allow_targets {
            DestinationList::allow_targets(targets)
                .map_err(ConfigError::about("--allow-target"))?;
        }
        self.check_times()?;
        self.isolation.check()?;
        if self.data_path.lane_security == LaneSecurity::Plaintext && self.token_path.is_some() {
            bail!(
                "--lane-security=plaintext and --service-account-token-path exclude each other: agents with tokens are \
                 expected on untrusted networks; drop one flag"
            );
        }
        let identity = self.tls.identity.as_ref();
        let proxy_ca = if self.compat {
            "ROOT_CA_CERT or proxy-ca-cert"
        } else {
            "--proxy-ca-cert"
        };
        check_files([
            ("--ca-cert", Some(&self.tls.ca_cert)),
            (proxy_ca, self.forward_proxy.ca_cert.as_ref()),
            ("--agent-cert", identity.map(|identity| &identity.cert)),
            ("--agent-key", identity.map(|identity| &identity.key)),
            ("--service-account-token-path", self.token_path.as_ref()),
        ])?;
        self.admin_socket.check()?;
        let has_proof = identity.is_some() || self.token_path.is_some();
        check_targets(
            (&self.target_listeners, &self.target_from),
            self.redirect.as_ref(),
            self.data_path.lanes_max,
            has_proof,
        )?;
        let health = self.health.iter();
        let health = health.map(|bind| ("--health-server-port", bind));
        let admin = self.admin.iter();
        let admin = admin.map(|bind| ("--admin-server-port", bind));
        let targets = self.target_listeners.iter();
        let targets = targets.map(|listener| ("--target", &listener.bind));
        check_distinct(health.chain(admin).chain(targets))?;
        Ok(AgentPlan(self))
    }

    fn check_times(&self) -> Result<(), ConfigError> {
        if self.sync_interval > self.sync_interval_cap {
            bail!(
                "sync interval {:?} must be less than sync interval cap {:?}",
                self.sync_interval,
                self.sync_interval_cap
            );
        }
        if self.sync_interval < limits::INTERVAL_MIN {
            bail!(
                "--sync-interval {:?} is below {:?}",
                self.sync_interval,
                limits::INTERVAL_MIN
            );
        }
        if self.keepalive < limits::AGENT_KEEPALIVE_TIME_MIN {
            bail!(
                "--keepalive-time {:?} is below {:?}: servers end connections that ping more often",
                self.keepalive,
                limits::AGENT_KEEPALIVE_TIME_MIN
            );
        }
        if self.dial_timeout.is_zero() {
            bail!("--dial-timeout must be greater than 0");
        }
        Ok(())
    }
}
