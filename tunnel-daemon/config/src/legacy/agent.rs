//! The flags of upstream's `proxy-agent`: defaults, validation in upstream's order and words, and the resulting plan.

use std::path::PathBuf;
use std::time::Duration;

use adit_core::ids::AgentId;

use super::gotype::GoDuration;
use super::options::options;
use super::shared::{
    SharedOptions, bind, check_channel_size, check_exists, check_pair, check_stat, file, port_of,
};
use crate::address::ServerAddress;
use crate::error::{ConfigError, bail};
use crate::flags::compat::AgentExtras;
use crate::plan::{
    AdminSocketPlan, AgentPlan, AgentSettings, AgentTls, CountPlan, Drain, ForwardProxy, Identity,
    IsolationPlan, ShutdownPlan, count_source,
};
use crate::{identifiers, limits};

options! {
    AgentOptions with shared: SharedOptions.flags {
        agent_cert: Text("agent-cert", "client certificate towards servers");
        agent_key: Text("agent-key", "key of --agent-cert");
        ca_cert: Text("ca-cert", "CA bundle for servers' certificates; required");
        proxy_server_host: Text("proxy-server-host", "server to connect to; a comma list for several, srv:NAME for SRV records") = "127.0.0.1";
        proxy_server_port: Int("proxy-server-port", "port of the server") = limits::AGENT_PORT;
        alpn_proto: List("alpn-proto", "further ALPN protocols, offered before h2");
        health_server_host: Text("health-server-host", "address of health checks; empty is all");
        health_server_port: Int("health-server-port", "port of health checks and metrics") = limits::AGENT_HEALTH_PORT;
        admin_server_port: Int("admin-server-port", "port of admin requests") = limits::AGENT_ADMIN_PORT;
        agent_id: Text("agent-id", "unique id of this agent (also PROXY_AGENT_ID)");
        agent_identifiers: Text("agent-identifiers", "what this agent reaches, URL-encoded: host=a&ipv4=1.2.3.4&cidr=10.0.0.0/8&default-route=true");
        sync_interval: Duration("sync-interval", "shortest delay between attempts to reach missing servers") = limits::SYNC_INTERVAL;
        sync_interval_cap: Duration("sync-interval-cap", "longest delay between attempts to reach missing servers") = limits::SYNC_INTERVAL_CAP;
        probe_interval: Duration("probe-interval", "wait between looks at the state of connections") = limits::PROBE_INTERVAL;
        keepalive_time: Duration("keepalive-time", "idle time before a server connection is pinged") = limits::KEEPALIVE_TIME;
        service_account_token_path: Text("service-account-token-path", "file with a bearer token for servers");
        warn_on_channel_limit: Bool("warn-on-channel-limit", "log when a queue is full");
        sync_forever: Bool("sync-forever", "go on looking for servers when all are connected");
        xfr_channel_size: Int("xfr-channel-size", "packets per queue") = limits::AGENT_XFR_CHANNEL_SIZE;
        count_server_leases: Bool("count-server-leases", "count servers by their leases");
        lease_label_selector: Selector("lease-label-selector", "selects the leases that count") = limits::LEASE_LABEL;
        server_count_source: Text("server-count-source", "what counts beside leases: default (nothing) or max (the count that servers report)") = "default";
        // Adit's flags, which upstream does not have.
        allow_targets: Repeated("allow-target", "a target that may be dialled: address, network or name, with a port if you like; repeatable; default: all but link-local and metadata addresses");
        lanes: Int("lanes", "data connections to each Adit server for its tunnels; 0 is none") = limits::LANES_PER_LINK;
    }
    alias "lease-label" of "lease-label-selector", deprecated "use --lease-label-selector instead";
}

impl AgentOptions {
    /// `agent_id` is the default: from the environment, or random.
    pub(super) fn new(agent_id: String) -> Self {
        Self {
            agent_id,
            ..Self::default()
        }
    }

    /// Checks the options and makes the plan.
    ///
    /// # Errors
    /// The first error, in upstream's order and words; then errors that upstream reports only later, and options that this
    /// version refuses.
    pub(super) fn plan(
        &self,
        proxy: ForwardProxy,
        extras: AgentExtras,
        warnings: &mut Vec<String>,
    ) -> Result<AgentPlan, ConfigError> {
        self.validate().map_err(|error| {
            ConfigError::new(format!("failed to validate agent options with {error}"))
        })?;
        if self.ca_cert.is_empty() {
            bail!("--ca-cert is required: it holds the CA of the servers' certificates");
        }
        let port = |what: &str, host: &str, port| bind(what, host, port).map(Some);
        let mut settings = AgentSettings {
            agent_id: AgentId::new(&self.agent_id),
            identifiers: self.agent_identifiers.clone(),
            servers: self.servers()?,
            tls: self.tls(),
            token_path: file(&self.service_account_token_path),
            forward_proxy: proxy,
            sync_interval: raised(
                "sync-interval",
                self.sync_interval,
                limits::INTERVAL_MIN,
                warnings,
            ),
            sync_interval_cap: raised(
                "sync-interval-cap",
                self.sync_interval_cap,
                limits::INTERVAL_MIN,
                warnings,
            ),
            sync_forever: self.sync_forever,
            leases: self
                .count_server_leases
                .then(|| {
                    CountPlan::of_flags(
                        &self.shared.lease_namespace,
                        &self.lease_label_selector,
                        &self.shared.kubeconfig,
                        &self.server_count_source,
                    )
                })
                .transpose()?,
            keepalive: raised(
                "keepalive-time",
                self.keepalive_time,
                limits::AGENT_KEEPALIVE_TIME_MIN,
                warnings,
            ),
            warn_on_channel_limit: self.warn_on_channel_limit,
            health: port(
                "health server",
                &self.health_server_host,
                self.health_server_port,
            )?,
            admin_socket: AdminSocketPlan::Off,
            admin: port(
                "admin server",
                &self.shared.admin_bind_address,
                self.admin_server_port,
            )?,
            target_proxy: None,
            allow_targets: Some(self.allow_targets.clone()).filter(|targets| !targets.is_empty()),
            target_listeners: Vec::new(),
            target_from: Vec::new(),
            redirect: None,
            data_path: self.shared.data_path("--lanes", self.lanes)?,
            dial_timeout: limits::TARGET_DIAL_TIMEOUT,
            isolation: IsolationPlan::default(),
            account: self.shared.account()?,
            shutdown: ShutdownPlan {
                drain: Drain::UntilSecondSignal,
                second_signal_exit_code: 0,
            },
            log: self.shared.klog.plan("proxy-agent", warnings),
            compat: true,
        };
        extras.put(&mut settings)?;
        settings.check()
    }

    fn validate(&self) -> Result<(), ConfigError> {
        check_pair("agent", &self.agent_cert, &self.agent_key)?;
        check_exists("agent CA cert", &self.ca_cert)?;
        for (name, port) in [
            ("proxy", self.proxy_server_port),
            ("health", self.health_server_port),
            ("admin", self.admin_server_port),
        ] {
            if port <= 0 {
                bail!("{name} server port {port} must be greater than 0");
            }
        }
        check_channel_size(self.xfr_channel_size)?;
        self.shared.check_profiling()?;
        if self.sync_interval > self.sync_interval_cap {
            let (interval, cap) = (self.sync_interval, self.sync_interval_cap);
            bail!("sync interval {interval} must be less than sync interval cap {cap}");
        }
        check_exists(
            "service account token path",
            &self.service_account_token_path,
        )?;
        identifiers::check(&self.agent_identifiers)?;
        let path = &self.shared.kubeconfig;
        check_stat(&format!("error checking KubeconfigPath {path:?}"), path)?;
        count_source(&self.server_count_source).map(|_source| ())
    }

    fn servers(&self) -> Result<Vec<ServerAddress>, ConfigError> {
        let port = port_of("proxy server", self.proxy_server_port)?;
        let parse = |host| ServerAddress::parse(host, port);
        let servers: Result<_, String> = self
            .proxy_server_host
            .split(',')
            .map(str::trim)
            .map(parse)
            .collect();
        servers.map_err(ConfigError::about("--proxy-server-host"))
    }

    fn tls(&self) -> AgentTls {
        let identity = file(&self.agent_cert)
            .zip(file(&self.agent_key))
            .map(|(cert, key)| Identity { cert, key });
        AgentTls {
            ca_cert: PathBuf::from(&self.ca_cert),
            identity,
            alpn: self.alpn_proto.clone(),
        }
    }
}

/// Upstream accepts any duration; values too small to work are raised, with a warning.
fn raised(flag: &str, time: GoDuration, min: Duration, warnings: &mut Vec<String>) -> Duration {
    if time.to_std() < min {
        warnings.push(format!(
            "--{flag}={time} is raised to {}",
            GoDuration::from(min)
        ));
    }
    time.to_std().max(min)
}
