//! The flags of upstream's `proxy-server` (compat 8) and their defaults.

use super::account::AccountOptions;
use super::data_path::DataPathOptions;
use super::gotype::GoDuration;
use super::klog::KlogOptions;
use super::pflag::{Flag, Slot};
use crate::limits;
use crate::plan::Dialect;

/// As typed, before anything is checked.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ServerOptions {
    pub(super) server_cert: String,
    pub(super) server_key: String,
    pub(super) server_ca_cert: String,
    pub(super) cluster_cert: String,
    pub(super) cluster_key: String,
    pub(super) cluster_ca_cert: String,
    pub(super) mode: String,
    pub(super) uds_name: String,
    pub(super) delete_existing_uds_file: bool,
    pub(super) server_port: i64,
    pub(super) server_bind_address: String,
    pub(super) agent_port: i64,
    pub(super) agent_bind_address: String,
    pub(super) health_port: i64,
    pub(super) health_bind_address: String,
    pub(super) admin_port: i64,
    pub(super) admin_bind_address: String,
    pub(super) keepalive_time: GoDuration,
    pub(super) frontend_keepalive_time: GoDuration,
    pub(super) enable_profiling: bool,
    pub(super) enable_contention_profiling: bool,
    pub(super) server_id: String,
    pub(super) server_count: i64,
    pub(super) agent_namespace: String,
    pub(super) agent_service_account: String,
    pub(super) authentication_audience: String,
    pub(super) kubeconfig: String,
    pub(super) kubeconfig_qps: f32,
    pub(super) kubeconfig_burst: i64,
    pub(super) kube_api_content_type: String,
    pub(super) proxy_strategies: String,
    pub(super) cipher_suites: Vec<String>,
    pub(super) tls_min_version: String,
    pub(super) xfr_channel_size: i64,
    pub(super) enable_lease_controller: bool,
    pub(super) lease_namespace: String,
    pub(super) lease_label: String,
    pub(super) graceful_shutdown_timeout: GoDuration,
    pub(super) backend_dial_timeout: GoDuration,
    pub(super) warn_on_channel_limit: bool,
    /// Ours, not upstream's: upstream lets anyone register when nothing is configured.
    pub(super) insecure_allow_unauthenticated_agents: bool,
    /// Ours, not upstream's.
    pub(super) agent_grants: Vec<String>,
    pub(super) zone: String,
    /// Ours, not upstream's.
    pub(super) agent_crl: String,
    pub(super) agent_deny: String,
    /// Ours, not upstream's.
    pub(super) data_path: DataPathOptions,
    pub(super) account: AccountOptions,
    pub(super) klog: KlogOptions,
}

impl ServerOptions {
    /// Upstream's defaults; `server_id` is the environment's or a random one.
    pub(super) fn new(server_id: String) -> Self {
        Self {
            server_cert: String::new(),
            server_key: String::new(),
            server_ca_cert: String::new(),
            cluster_cert: String::new(),
            cluster_key: String::new(),
            cluster_ca_cert: String::new(),
            mode: Dialect::Grpc.name().to_owned(),
            uds_name: String::new(),
            delete_existing_uds_file: true,
            server_port: i64::from(limits::FRONTEND_PORT),
            server_bind_address: String::new(),
            agent_port: i64::from(limits::AGENT_PORT),
            agent_bind_address: String::new(),
            health_port: i64::from(limits::SERVER_HEALTH_PORT),
            health_bind_address: String::new(),
            admin_port: i64::from(limits::SERVER_ADMIN_PORT),
            admin_bind_address: "127.0.0.1".to_owned(),
            keepalive_time: GoDuration::from_std(limits::KEEPALIVE_TIME),
            frontend_keepalive_time: GoDuration::from_std(limits::KEEPALIVE_TIME),
            enable_profiling: false,
            enable_contention_profiling: false,
            server_id,
            server_count: 1,
            agent_namespace: String::new(),
            agent_service_account: String::new(),
            authentication_audience: String::new(),
            kubeconfig: String::new(),
            kubeconfig_qps: 0.0,
            kubeconfig_burst: 0,
            kube_api_content_type: "application/vnd.kubernetes.protobuf".to_owned(),
            proxy_strategies: "default".to_owned(),
            cipher_suites: Vec::new(),
            tls_min_version: String::new(),
            xfr_channel_size: i64::from(limits::SERVER_XFR_CHANNEL_SIZE),
            enable_lease_controller: false,
            lease_namespace: limits::LEASE_NAMESPACE.to_owned(),
            lease_label: limits::LEASE_LABEL.to_owned(),
            graceful_shutdown_timeout: GoDuration(0),
            backend_dial_timeout: GoDuration(0),
            warn_on_channel_limit: true,
            insecure_allow_unauthenticated_agents: false,
            agent_grants: Vec::new(),
            zone: String::new(),
            agent_crl: String::new(),
            agent_deny: String::new(),
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
            text("server-cert", &mut self.server_cert, "certificate of the frontend on TCP"),
            text("server-key", &mut self.server_key, "key of --server-cert"),
            text("server-ca-cert", &mut self.server_ca_cert, "CA of client certificates on the frontend; required on TCP"),
            text("cluster-cert", &mut self.cluster_cert, "certificate of the agent listener"),
            text("cluster-key", &mut self.cluster_key, "key of --cluster-cert"),
            text("cluster-ca-cert", &mut self.cluster_ca_cert, "CA of agents' client certificates"),
            text("mode", &mut self.mode, "what the frontend speaks: grpc or http-connect"),
            text("uds-name", &mut self.uds_name, "unix socket of the frontend, in place of TCP"),
            bool("delete-existing-uds-file", &mut self.delete_existing_uds_file, "remove a stale socket file before listening"),
            int("server-port", &mut self.server_port, "TCP port of the frontend; 0 with --uds-name"),
            text("server-bind-address", &mut self.server_bind_address, "address of the frontend; empty is all"),
            int("agent-port", &mut self.agent_port, "port of the agent listener"),
            text("agent-bind-address", &mut self.agent_bind_address, "address of the agent listener; empty is all"),
            int("health-port", &mut self.health_port, "port of health checks and metrics"),
            text("health-bind-address", &mut self.health_bind_address, "address of health checks; empty is all"),
            int("admin-port", &mut self.admin_port, "port of admin requests and metrics"),
            text("admin-bind-address", &mut self.admin_bind_address, "address of admin requests; empty is all"),
            duration("keepalive-time", &mut self.keepalive_time, "idle time before an agent connection is pinged"),
            duration("frontend-keepalive-time", &mut self.frontend_keepalive_time, "idle time before a client connection is pinged"),
            bool("enable-profiling", &mut self.enable_profiling, "accepted; Go profiles do not exist here"),
            bool("enable-contention-profiling", &mut self.enable_contention_profiling, "accepted; needs --enable-profiling"),
            text("server-id", &mut self.server_id, "unique id of this server (also PROXY_SERVER_ID)"),
            int("server-count", &mut self.server_count, "number of servers agents should connect to"),
            text("agent-namespace", &mut self.agent_namespace, "token authentication: namespace of agents; the three flags come together"),
            text("agent-service-account", &mut self.agent_service_account, "token authentication: account of agents"),
            text("authentication-audience", &mut self.authentication_audience, "token authentication: audience of their tokens"),
            text("kubeconfig", &mut self.kubeconfig, "access to the Kubernetes API; empty is that of this pod"),
            Flag::new("kubeconfig-qps", Slot::Float(&mut self.kubeconfig_qps), "requests a second to the Kubernetes API; 0 is no limit"),
            int("kubeconfig-burst", &mut self.kubeconfig_burst, "requests at once to the Kubernetes API, with --kubeconfig-qps"),
            text("kube-api-content-type", &mut self.kube_api_content_type, "accepted; requests are JSON"),
            text("proxy-strategies", &mut self.proxy_strategies, "how an agent is chosen, in order: default, destHost, defaultRoute, destCIDR"),
            Flag::new("cipher-suites", Slot::List(&mut self.cipher_suites), "TLS 1.2 cipher suites; empty is the default list"),
            text("tls-min-version", &mut self.tls_min_version, "VersionTLS12 (default) or VersionTLS13; lower ones are raised"),
            int("xfr-channel-size", &mut self.xfr_channel_size, "packets per receive queue"),
            bool("enable-lease-controller", &mut self.enable_lease_controller, "publish a lease, by which agents and other servers know of this server"),
            text("lease-namespace", &mut self.lease_namespace, "namespace of leases"),
            text("lease-label", &mut self.lease_label, "labels of leases, k=v,k=v"),
            duration("graceful-shutdown-timeout", &mut self.graceful_shutdown_timeout, "time tunnels may take to finish at shutdown; 0 is none"),
            duration("backend-dial-timeout", &mut self.backend_dial_timeout, "time for an agent to answer a dial; 0 is no limit"),
            bool("insecure-allow-unauthenticated-agents", &mut self.insecure_allow_unauthenticated_agents, "let anyone register as an agent"),
            Flag::new("agent-grant", Slot::Repeated(&mut self.agent_grants), "who may claim what, such as cn=node-*,id={*}; repeatable; default: agents claim what they like"),
            text("zone", &mut self.zone, "zone of this server: among agents that fit equally, dials go to those with this zone= in agent-identifiers"),
            text("agent-crl", &mut self.agent_crl, "file of certificate revocation lists (PEM) of the CAs in cluster-ca-cert; read again when it changes"),
            text("agent-deny", &mut self.agent_deny, "file of agents to refuse, one KEY=VALUE a line: id, cn, dns, uri, serviceaccount, node, pod; read again when it changes"),
            bool("warn-on-channel-limit", &mut self.warn_on_channel_limit, "without effect").deprecated("it is always on; this flag will be removed in a future release"),
        ];
        let lanes = "data connections one Adit agent may have for its tunnels; 0 is none";
        flags.extend(self.data_path.flags("lanes-per-link", lanes));
        flags.extend(self.account.flags());
        flags.extend(self.klog.flags());
        flags
    }
}
