//! The flags of upstream's `proxy-server` and their defaults.

use super::options::options;
use super::shared::SharedOptions;
use crate::limits;
use crate::plan::Dialect;

options! {
    ServerOptions with shared: SharedOptions.flags {
        server_cert: Text("server-cert", "certificate of the frontend on TCP");
        server_key: Text("server-key", "key of --server-cert");
        server_ca_cert: Text("server-ca-cert", "CA of client certificates on the frontend; required on TCP");
        cluster_cert: Text("cluster-cert", "certificate of the agent listener");
        cluster_key: Text("cluster-key", "key of --cluster-cert");
        cluster_ca_cert: Text("cluster-ca-cert", "CA of agents' client certificates");
        mode: Text("mode", "what the frontend speaks: grpc or http-connect") = Dialect::Grpc.name();
        uds_name: Text("uds-name", "unix socket of the frontend, in place of TCP");
        delete_existing_uds_file: Bool("delete-existing-uds-file", "remove a stale socket file before listening") = true;
        server_port: Int("server-port", "TCP port of the frontend; 0 with --uds-name") = limits::FRONTEND_PORT;
        server_bind_address: Text("server-bind-address", "address of the frontend; empty is all");
        agent_port: Int("agent-port", "port of the agent listener") = limits::AGENT_PORT;
        agent_bind_address: Text("agent-bind-address", "address of the agent listener; empty is all");
        health_port: Int("health-port", "port of health checks and metrics") = limits::SERVER_HEALTH_PORT;
        health_bind_address: Text("health-bind-address", "address of health checks; empty is all");
        admin_port: Int("admin-port", "port of admin requests and metrics") = limits::SERVER_ADMIN_PORT;
        keepalive_time: Duration("keepalive-time", "idle time before an agent connection is pinged") = limits::KEEPALIVE_TIME;
        frontend_keepalive_time: Duration("frontend-keepalive-time", "idle time before a client connection is pinged") = limits::KEEPALIVE_TIME;
        server_id: Text("server-id", "unique id of this server (also PROXY_SERVER_ID)");
        server_count: Int("server-count", "number of servers agents should connect to") = 1;
        agent_namespace: Text("agent-namespace", "token authentication: namespace of agents; the three flags come together");
        agent_service_account: Text("agent-service-account", "token authentication: account of agents");
        authentication_audience: Text("authentication-audience", "token authentication: audience of their tokens");
        kubeconfig_qps: Float("kubeconfig-qps", "requests a second to the Kubernetes API; 0 is no limit");
        kubeconfig_burst: Int("kubeconfig-burst", "requests at once to the Kubernetes API, with --kubeconfig-qps");
        proxy_strategies: Text("proxy-strategies", "how an agent is chosen, in order: default, destHost, defaultRoute, destCIDR") = "default";
        cipher_suites: List("cipher-suites", "TLS 1.2 cipher suites; empty is the default list");
        tls_min_version: Text("tls-min-version", "VersionTLS12 (default) or VersionTLS13; lower ones are raised");
        xfr_channel_size: Int("xfr-channel-size", "packets per receive queue") = limits::SERVER_XFR_CHANNEL_SIZE;
        enable_lease_controller: Bool("enable-lease-controller", "publish a lease, by which agents and other servers know of this server");
        lease_label: Text("lease-label", "labels of leases, k=v,k=v") = limits::LEASE_LABEL;
        graceful_shutdown_timeout: Duration("graceful-shutdown-timeout", "time tunnels may take to finish at shutdown; 0 is none");
        backend_dial_timeout: Duration("backend-dial-timeout", "time for an agent to answer a dial; 0 is no limit");
        warn_on_channel_limit: Bool("warn-on-channel-limit", "without effect", deprecated "it is always on; this flag will be removed in a future release") = true;
        // Adit's flag, not upstream's: upstream lets any agent register when nothing is configured.
        insecure_allow_unauthenticated_agents: Bool("insecure-allow-unauthenticated-agents", "let anyone register as an agent");
        // Adit's flags, which upstream does not have.
        agent_grants: Repeated("agent-grant", "who may claim what, such as cn=node-*,id={*}; repeatable; default: agents claim what they like");
        zone: Text("zone", "zone of this server: among agents that fit equally, dials go to those with this zone= in agent-identifiers");
        agent_crl: Text("agent-crl", "file of certificate revocation lists (PEM) of the CAs in cluster-ca-cert; read again when it changes");
        agent_deny: Text("agent-deny", "file of agents to refuse, one KEY=VALUE a line: id, cn, dns, uri, serviceaccount, node, pod; read again when it changes");
        lanes: Int("lanes-per-link", "data connections one Adit agent may have for its tunnels; 0 is none") = limits::LANES_PER_LINK;
    }
}

impl ServerOptions {
    /// `server_id` is the default: from the environment, or random.
    pub(super) fn new(server_id: String) -> Self {
        Self {
            server_id,
            ..Self::default()
        }
    }
}
