//! The flags of upstream's `proxy-agent` (compat 9): defaults, validation in upstream's order and words,
//! and the plan they mean.

use std::path::{Path, PathBuf};
use std::time::Duration;

use adit_core::ids::AgentId;

use super::account::AccountOptions;
use super::data_path::DataPathOptions;
use super::gotype::GoDuration;
use super::klog::KlogOptions;
use super::pflag::{Flag, Slot};
use super::server_check::{check_channel_size, check_exists, check_pair, fail};
use super::server_plan::bind;
use crate::address::ServerAddress;
use crate::error::ConfigError;
use crate::plan::{
    AgentPlan, AgentSettings, AgentTls, CountPlan, Drain, ForwardProxy, Identity, IsolationPlan,
    KeepAlive, Profiling, ShutdownPlan, count_source,
};
use crate::{files, identifiers, limits};

/// As typed, before anything is checked.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct AgentOptions {
    pub(super) agent_cert: String,
    pub(super) agent_key: String,
    pub(super) ca_cert: String,
    pub(super) proxy_server_host: String,
    pub(super) proxy_server_port: i64,
    pub(super) alpn_proto: Vec<String>,
    pub(super) health_server_host: String,
    pub(super) health_server_port: i64,
    pub(super) admin_bind_address: String,
    pub(super) admin_server_port: i64,
    pub(super) enable_profiling: bool,
    pub(super) enable_contention_profiling: bool,
    pub(super) agent_id: String,
    pub(super) agent_identifiers: String,
    pub(super) sync_interval: GoDuration,
    pub(super) sync_interval_cap: GoDuration,
    pub(super) probe_interval: GoDuration,
    pub(super) keepalive_time: GoDuration,
    pub(super) service_account_token_path: String,
    pub(super) warn_on_channel_limit: bool,
    pub(super) sync_forever: bool,
    pub(super) xfr_channel_size: i64,
    pub(super) count_server_leases: bool,
    pub(super) lease_namespace: String,
    pub(super) lease_label_selector: String,
    pub(super) server_count_source: String,
    pub(super) kubeconfig: String,
    pub(super) kube_api_content_type: String,
    /// Ours, not upstream's.
    pub(super) allow_targets: Vec<String>,
    pub(super) data_path: DataPathOptions,
    pub(super) account: AccountOptions,
    pub(super) klog: KlogOptions,
}

impl AgentOptions {
    /// Upstream's defaults; `agent_id` is the environment's or a random one.
    pub(super) fn new(agent_id: String) -> Self {
        Self {
            agent_cert: String::new(),
            agent_key: String::new(),
            ca_cert: String::new(),
            proxy_server_host: "127.0.0.1".to_owned(),
            proxy_server_port: i64::from(limits::AGENT_PORT),
            alpn_proto: Vec::new(),
            health_server_host: String::new(),
            health_server_port: i64::from(limits::AGENT_HEALTH_PORT),
            admin_bind_address: "127.0.0.1".to_owned(),
            admin_server_port: i64::from(limits::AGENT_ADMIN_PORT),
            enable_profiling: false,
            enable_contention_profiling: false,
            agent_id,
            agent_identifiers: String::new(),
            sync_interval: GoDuration::from_std(limits::SYNC_INTERVAL),
            sync_interval_cap: GoDuration::from_std(limits::SYNC_INTERVAL_CAP),
            probe_interval: GoDuration::from_std(limits::PROBE_INTERVAL),
            keepalive_time: GoDuration::from_std(limits::KEEPALIVE_TIME),
            service_account_token_path: String::new(),
            warn_on_channel_limit: false,
            sync_forever: false,
            xfr_channel_size: i64::from(limits::AGENT_XFR_CHANNEL_SIZE),
            count_server_leases: false,
            lease_namespace: limits::LEASE_NAMESPACE.to_owned(),
            lease_label_selector: limits::LEASE_LABEL.to_owned(),
            server_count_source: "default".to_owned(),
            kubeconfig: String::new(),
            kube_api_content_type: "application/vnd.kubernetes.protobuf".to_owned(),
            allow_targets: Vec::new(),
            data_path: DataPathOptions::default(),
            account: AccountOptions::default(),
            klog: KlogOptions::default(),
        }
    }

    /// Every flag, bound to its field. A table: one row a flag, whatever its width.
    #[rustfmt::skip]
    pub(super) fn flags(&mut self) -> Vec<Flag<'_>> {
        let text = |name, slot, help| Flag::new(name, Slot::Text(slot), help);
        let bool = |name, slot, help| Flag::new(name, Slot::Bool(slot), help);
        let int = |name, slot, help| Flag::new(name, Slot::Int(slot), help);
        let duration = |name, slot, help| Flag::new(name, Slot::Duration(slot), help);
        let mut flags = vec![
            text("agent-cert", &mut self.agent_cert, "client certificate towards servers"),
            text("agent-key", &mut self.agent_key, "key of --agent-cert"),
            text("ca-cert", &mut self.ca_cert, "CA bundle for servers' certificates; required"),
            text("proxy-server-host", &mut self.proxy_server_host, "server to connect to; a comma list for several, srv:NAME for SRV records"),
            int("proxy-server-port", &mut self.proxy_server_port, "port of the server"),
            Flag::new("alpn-proto", Slot::List(&mut self.alpn_proto), "further ALPN protocols, offered before h2"),
            text("health-server-host", &mut self.health_server_host, "address of health checks; empty is all"),
            int("health-server-port", &mut self.health_server_port, "port of health checks and metrics"),
            text("admin-bind-address", &mut self.admin_bind_address, "address of admin requests; empty is all"),
            int("admin-server-port", &mut self.admin_server_port, "port of admin requests"),
            bool("enable-profiling", &mut self.enable_profiling, "accepted; Go profiles do not exist here"),
            bool("enable-contention-profiling", &mut self.enable_contention_profiling, "accepted; needs --enable-profiling"),
            text("agent-id", &mut self.agent_id, "unique id of this agent (also PROXY_AGENT_ID)"),
            text("agent-identifiers", &mut self.agent_identifiers, "what this agent reaches, URL-encoded: host=a&ipv4=1.2.3.4&cidr=10.0.0.0/8&default-route=true"),
            duration("sync-interval", &mut self.sync_interval, "first wait between looks for missing servers"),
            duration("sync-interval-cap", &mut self.sync_interval_cap, "longest wait between looks for missing servers"),
            duration("probe-interval", &mut self.probe_interval, "wait between looks at the state of connections"),
            duration("keepalive-time", &mut self.keepalive_time, "idle time before a server connection is pinged"),
            text("service-account-token-path", &mut self.service_account_token_path, "file with a bearer token for servers"),
            bool("warn-on-channel-limit", &mut self.warn_on_channel_limit, "log when a queue is full"),
            bool("sync-forever", &mut self.sync_forever, "go on looking for servers when all are connected"),
            int("xfr-channel-size", &mut self.xfr_channel_size, "packets per queue"),
            bool("count-server-leases", &mut self.count_server_leases, "count servers by their leases"),
            text("lease-namespace", &mut self.lease_namespace, "namespace of leases"),
            Flag::new("lease-label-selector", Slot::Selector(&mut self.lease_label_selector), "selects the leases that count"),
            Flag::new("lease-label", Slot::AliasOf("lease-label-selector"), "").deprecated("use --lease-label-selector instead"),
            text("server-count-source", &mut self.server_count_source, "what counts beside leases: default (nothing) or max (the count that servers report)"),
            text("kubeconfig", &mut self.kubeconfig, "access to the Kubernetes API; empty is that of this pod"),
            text("kube-api-content-type", &mut self.kube_api_content_type, "accepted; requests are JSON"),
            Flag::new("allow-target", Slot::Repeated(&mut self.allow_targets), "a target that may be dialled: address, network or name, with a port if you like; repeatable; default: all but link-local and metadata addresses"),
        ];
        let lanes = "data connections to each Adit server for its tunnels; 0 is none";
        flags.extend(self.data_path.flags("lanes", lanes));
        flags.extend(self.account.flags());
        flags.extend(self.klog.flags());
        flags
    }

    /// Checks and maps.
    ///
    /// # Errors
    /// The first offence, in upstream's order and words; then what upstream would only find later, and
    /// what this version refuses.
    pub(super) fn plan(
        &self,
        proxy: ForwardProxy,
        warnings: &mut Vec<String>,
    ) -> Result<AgentPlan, ConfigError> {
        self.validate().map_err(|error| {
            ConfigError::new(format!("failed to validate agent options with {error}"))
        })?;
        if self.ca_cert.is_empty() {
            return fail("--ca-cert is required: it holds the CA of the servers' certificates");
        }
        let port = |what: &str, host: &str, port| bind(what, host, port).map(Some);
        AgentSettings {
            agent_id: AgentId::new(&self.agent_id),
            identifiers: self.agent_identifiers.clone(),
            servers: self.servers()?,
            tls: self.tls(),
            token_path: path(&self.service_account_token_path),
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
                        &self.lease_namespace,
                        &self.lease_label_selector,
                        &self.kubeconfig,
                        &self.server_count_source,
                    )
                })
                .transpose()?,
            keepalive: KeepAlive::every(raised(
                "keepalive-time",
                self.keepalive_time,
                limits::AGENT_KEEPALIVE_TIME_MIN,
                warnings,
            )),
            warn_on_channel_limit: self.warn_on_channel_limit,
            health: port(
                "health server",
                &self.health_server_host,
                self.health_server_port,
            )?,
            admin_socket: None,
            admin: port(
                "admin server",
                &self.admin_bind_address,
                self.admin_server_port,
            )?,
            profiling: Profiling {
                enabled: self.enable_profiling,
                contention: self.enable_contention_profiling,
            },
            allow_targets: Some(self.allow_targets.clone()).filter(|targets| !targets.is_empty()),
            target_listeners: Vec::new(),
            redirect: None,
            data_path: self.data_path.plan("--lanes")?,
            dial_timeout: limits::TARGET_DIAL_TIMEOUT,
            isolation: IsolationPlan::default(),
            account: self.account.plan()?,
            shutdown: ShutdownPlan {
                drain: Drain::UntilSecondSignal,
                second_signal_exit_code: 0,
            },
            log: self.klog.plan("proxy-agent", warnings),
            compat: true,
        }
        .check()
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
                return fail(format!("{name} server port {port} must be greater than 0"));
            }
        }
        check_channel_size(self.xfr_channel_size)?;
        if self.enable_contention_profiling && !self.enable_profiling {
            return fail(
                "if --enable-contention-profiling is set, --enable-profiling must also be set",
            );
        }
        if self.sync_interval > self.sync_interval_cap {
            let (interval, cap) = (self.sync_interval, self.sync_interval_cap);
            return fail(format!(
                "sync interval {interval} must be less than sync interval cap {cap}"
            ));
        }
        check_exists(
            "service account token path",
            &self.service_account_token_path,
        )?;
        identifiers::check(&self.agent_identifiers)
            .map_err(|error| ConfigError::new(format!("agent address is invalid: {error}")))?;
        if !self.kubeconfig.is_empty() && files::is_missing(Path::new(&self.kubeconfig)) {
            let path = &self.kubeconfig;
            return fail(format!(
                "error checking KubeconfigPath {path:?}, got stat {path}: no such file or directory"
            ));
        }
        count_source(&self.server_count_source).map(|_source| ())
    }

    fn servers(&self) -> Result<Vec<ServerAddress>, ConfigError> {
        let port = self.proxy_server_port;
        let port = u16::try_from(port).map_err(|_too_large| {
            ConfigError::new(format!("proxy server port {port} must be less than 65536"))
        })?;
        let parse = |host| ServerAddress::parse(host, port);
        let servers: Result<_, String> = self
            .proxy_server_host
            .split(',')
            .map(str::trim)
            .map(parse)
            .collect();
        servers.map_err(|why| ConfigError::new(format!("--proxy-server-host: {why}")))
    }

    fn tls(&self) -> AgentTls {
        let identity = path(&self.agent_cert)
            .zip(path(&self.agent_key))
            .map(|(cert, key)| Identity { cert, key });
        AgentTls {
            ca_cert: PathBuf::from(&self.ca_cert),
            identity,
            alpn: self.alpn_proto.clone(),
        }
    }
}

fn path(text: &str) -> Option<PathBuf> {
    Some(text)
        .filter(|text| !text.is_empty())
        .map(PathBuf::from)
}

/// Upstream takes any duration; what cannot work is raised, with a warning.
fn raised(flag: &str, time: GoDuration, min: Duration, warnings: &mut Vec<String>) -> Duration {
    if time.to_std() < min {
        warnings.push(format!(
            "--{flag}={time} is raised to {}",
            GoDuration::from_std(min)
        ));
    }
    time.to_std().max(min)
}
