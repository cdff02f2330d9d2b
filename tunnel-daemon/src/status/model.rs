//! The answers of the admin socket: JSON, with a version that changes when a field is removed or changes its meaning. Fields
//! may be added; readers ignore unknown fields.

use serde::{Deserialize, Serialize};

use adit_telemetry::debug::LogView;

/// Version of these answers.
pub const API: u32 = 1;

/// `GET /v1/status`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// [`API`].
    pub api: u32,
    /// Server or agent.
    pub role: Role,
    /// The process's version.
    pub version: String,
    /// The process's id, as told to peers.
    pub id: String,
    /// Process id.
    pub pid: u32,
    /// Time since the start.
    pub uptime_seconds: f64,
    /// Whether the process can serve.
    pub readiness: Readiness,
    /// Whether dials find an agent, by strategy; empty on an agent.
    #[serde(default)]
    pub strategies: Vec<StrategyStatus>,
    /// Open tunnels.
    pub tunnels: TunnelCounts,
    /// Dials not answered yet; only on a server.
    pub pending_dials: Option<u64>,
    /// Current links in order of arrival; at most [`super::answer::LINKS_MAX`].
    pub links: Vec<LinkStatus>,
    /// Number of all current links.
    pub links_total: u64,
    /// The search for servers; only on an agent.
    pub search: Option<SearchStatus>,
    /// How many servers agents are to connect to; only of a server.
    #[serde(default)]
    pub server_count: Option<ServerCount>,
    /// Servers that this one asks, and those that ask this one; only of a server.
    #[serde(default)]
    pub peers: Vec<PeerStatus>,
    /// Lanes of all links.
    pub lanes: LaneStatus,
    /// What moves the bytes of raw lanes.
    pub relay: RelayStatus,
    /// Host and kernel features that this process needs, and whether they were available at its start.
    pub capabilities: Vec<Capability>,
    /// Capabilities that at least one thread of the process has or can take now; `None`: `/proc` is not mounted.
    pub privileges: Option<Vec<String>>,
    /// File descriptors of the process.
    pub descriptors: Descriptors,
    /// Payload bytes queued for readers that pause.
    pub memory: Memory,
    /// State of the redirect; `None` without one.
    pub redirect: Option<RedirectStatus>,
    /// Accounting in the kernel.
    #[serde(default)]
    pub account: AccountStatus,
    /// State of the log.
    #[serde(default)]
    pub log: LogStatus,
    /// Certificates in use, those that expire first at the front.
    #[serde(default)]
    pub certificates: Vec<CertificateStatus>,
}

/// Another server.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct PeerStatus {
    /// `to`: this server asks it; `from`: it asks this one.
    pub direction: String,
    /// Its id; `None`: not known yet.
    pub server: Option<String>,
    /// The address that is called, or that calls.
    pub address: String,
    /// `linked`, `silent`, `connecting`, `failed`, `own`, or `duplicate` (linked by another address).
    pub state: String,
    /// Why there is no link.
    pub reason: Option<String>,
    /// Keys under which it has agents.
    pub keys: u64,
    /// Open tunnels.
    pub tunnels: u64,
    /// Dials that it answered with a tunnel, for which it had no agent, and that failed.
    pub opened: u64,
    /// Dials for whose key it had no agent.
    pub not_here: u64,
    /// Dials that failed.
    pub failed: u64,
    /// Age of the link.
    pub age_seconds: u64,
}

/// A file with certificates in use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CertificateStatus {
    /// Its path.
    pub file: String,
    /// `certificate` or `ca`.
    pub kind: String,
    /// Expiry in seconds since 1970; of a chain the earliest, of a file of CAs the latest.
    pub expires: u64,
    /// Whole days left; `None`: it has expired.
    pub days_left: Option<u64>,
}

/// How the dials of an agent ended since the first of its present links.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct DialStatus {
    /// Answered within a second; a refusal of the target is an answer.
    pub answered: u64,
    /// Answered later, or given up unanswered after a second.
    pub slow: u64,
    /// Failed otherwise.
    pub failed: u64,
}

/// An agent of a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The agent's id.
    pub agent: String,
    /// The identity that the agent has proved by certificate or token.
    pub principal: Option<String>,
    /// Its dials.
    pub dials: DialStatus,
}

/// An agent's search for servers.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct SearchStatus {
    /// Servers with a link that is not silent.
    pub linked: u64,
    /// Number of servers, as far as known.
    pub known: u64,
    /// `met`, `searching`, `slow` (counts as met, and tries rarely) or `draining`.
    pub state: String,
    /// Where the known number comes from, and why the search is slow; `None`: there is nothing to explain.
    pub reason: Option<String>,
}

/// How many servers agents are to connect to, as a server knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ServerCount {
    /// The number that agents are told.
    pub announced: u64,
    /// Servers with a lease; `None`: the server sees no leases.
    pub leases: Option<u64>,
    /// The number that agents are told at most while all servers are peers; `None` without peers.
    #[serde(default)]
    pub agent_links: Option<u64>,
    /// The server has no port for agents.
    #[serde(default)]
    pub no_agents: bool,
}

/// `POST /v1/log`: the state of the log after the change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Log {
    /// [`API`].
    pub api: u32,
    /// Server or agent.
    pub role: Role,
    /// The process's id.
    pub id: String,
    /// State of the log.
    pub log: LogStatus,
}

/// State of a process's log.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct LogStatus {
    /// The least severe level that is logged, or directives as in `ADIT_LOG`.
    pub level: String,
    /// Seconds until debug logging ends; `None`: it was not switched on.
    pub debug_seconds_left: Option<u64>,
}

impl LogStatus {
    /// State of a log, from its view.
    pub(crate) fn of(view: &LogView) -> Self {
        Self {
            level: view.level.clone(),
            debug_seconds_left: view.debug_left.map(|left| left.as_secs()),
        }
    }
}

/// Accounting by eBPF.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct AccountStatus {
    /// `off`, `on` or `unavailable`.
    pub state: String,
    /// The id of the eBPF program, or why there is none.
    pub reason: Option<String>,
}

/// The redirect by eBPF.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectStatus {
    /// `active`, or `missing`: nothing is redirected.
    pub state: String,
    /// Why nothing is redirected.
    pub reason: Option<String>,
    /// The cgroup whose processes are captured.
    pub cgroup: String,
    /// The cgroup mount looks like the host's root, but shows only a part of the host.
    #[serde(default)]
    pub part_of_host: bool,
    /// Programs of other owners at the same hooks, as found at the start.
    pub others: Option<RedirectOthers>,
    /// Active rules, exclusions and built-in exceptions included.
    pub rules: u64,
    /// Generation of the active rule set; increases with every reload.
    pub set: u64,
    /// The rule file, if there is one.
    pub file: Option<RedirectFile>,
    /// Other network namespaces, if their capture is requested.
    pub namespaces: Option<RedirectNamespaces>,
}

/// Programs of other owners that run when captured processes connect.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectOthers {
    /// Number of known programs.
    pub count: u64,
    /// The first of them: hook, id, name if known, and their place relative to this redirect's programs.
    pub programs: Vec<String>,
    /// What could not be found out about such programs, and why.
    pub unknown: Option<String>,
}

impl RedirectOthers {
    /// A short text; `None` if there are no such programs.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        match (self.count, &self.unknown) {
            (0, None) => None,
            (0, Some(why)) => Some(format!("other programs at its hooks: unknown, {why}")),
            (count, None) => Some(format!("other programs at its hooks: {count}")),
            (count, Some(why)) => Some(format!("other programs at its hooks: {count} ({why})")),
        }
    }
}

/// The rule file of a redirect.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectFile {
    /// The path as given.
    pub path: String,
    /// Why the file's present content is not in force.
    pub error: Option<String>,
}

/// Captured network namespaces besides this process's own.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectNamespaces {
    /// `running`, `missing` or `ended`.
    pub helper: String,
    /// Why the helper does not run.
    pub reason: Option<String>,
    /// Paths of namespaces with a listener, as they were found.
    pub captured: Vec<String>,
    /// Namespaces without a listener, and why.
    pub failed: Vec<String>,
    /// Number of namespaces beyond the limit.
    pub over_limit: u64,
    /// Captured processes whose namespace cannot be read.
    pub unreadable_processes: u64,
    /// There are more captured processes than are examined: namespaces of the others are not captured.
    #[serde(default)]
    pub look_cut: bool,
}

/// Kind of process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Server,
    Agent,
    Proxy,
}

impl Role {
    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Agent => "agent",
            Self::Proxy => "proxy",
        }
    }
}

/// Readiness as the health port reports it.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Readiness {
    /// Whether the process is ready.
    pub ready: bool,
    /// The process was told to end, and serves until it does.
    #[serde(default)]
    pub draining: bool,
    /// Why the process is not ready.
    pub reason: Option<String>,
}

/// A strategy of `--proxy-strategies`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StrategyStatus {
    /// The strategy.
    pub name: String,
    /// `ready`: dials find an agent that responds; `silent`: no agent of the strategy responds; `no agent`.
    pub state: String,
}

/// Counts and sums over the open tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct TunnelCounts {
    /// All open tunnels.
    pub open: u64,
    /// Tunnels on links.
    pub link: u64,
    /// Tunnels on lanes, in frames.
    pub lane: u64,
    /// Tunnels on raw lanes.
    pub raw_lane: u64,
    /// Tunnels on raw lanes that kernel TLS encrypts; also in `raw_lane`.
    #[serde(default)]
    pub ktls_lane: u64,
    /// Payload bytes that open tunnels have moved from client to target.
    pub bytes_to_target: u64,
    /// Payload bytes that open tunnels have moved from target to client.
    pub bytes_to_client: u64,
}

/// `GET /v1/links`; on a server also the links that `POST /v1/unlink` and `POST /v1/drain` changed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Links {
    /// [`API`].
    pub api: u32,
    /// Server or agent.
    pub role: Role,
    /// The process's id, as told to peers.
    pub id: String,
    /// The requested links in order of arrival; at most [`super::answer::LINKS_MAX`].
    pub links: Vec<LinkStatus>,
    /// Number of all requested links.
    pub links_total: u64,
}

/// One link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The link's number, as in a server's log; `None` on an agent.
    pub link: Option<u64>,
    /// The agent's id on a server, the server's on an agent.
    pub peer: String,
    /// On a server the address the connection comes from, on an agent the address it was opened to.
    pub address: String,
    /// The identity that the agent has proved by certificate or token; only on a server.
    pub principal: Option<String>,
    /// The identifiers that the agent claims, as they are written (`host=a&ipv4=10.0.0.1`); only on a server.
    pub identifiers: Option<String>,
    /// `adit`, or `go` for a peer without Adit's extensions.
    pub dialect: String,
    /// The peer's Adit release; `None` for Go peers.
    pub version: Option<String>,
    /// Age of the link.
    pub age_seconds: u64,
    /// `serving`, `draining`, `retired` or `shadowed`; on an agent `serving` until it drains.
    pub condition: String,
    /// Open tunnels of this peer, including tunnels on lanes.
    pub tunnels: u64,
    /// Payload bytes that the link has queued for readers that pause.
    pub held_bytes: u64,
    /// Most bytes that the link may queue.
    pub budget_bytes: u64,
    /// The link's lanes, if it may have lanes.
    pub lanes: Option<LinkLanes>,
    /// The agent's dials over all of its links; only on a server.
    pub dials: Option<DialStatus>,
}

/// Lanes of one link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkLanes {
    /// Lanes without a tunnel.
    pub idle: u64,
    /// Lanes with a tunnel.
    pub busy: u64,
    /// Number of idle lanes that the agent aims for; only on an agent.
    pub wanted: Option<u64>,
    /// Most lanes that the link may have.
    pub limit: u64,
}

/// Lanes of a process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneStatus {
    /// Lanes without a tunnel.
    pub idle: u64,
    /// Lanes with a tunnel.
    pub busy: u64,
    /// Most lanes of one link, as configured; 0 for none.
    pub limit_per_link: u64,
    /// Most lanes of the process, from its limit of descriptors.
    pub limit: u64,
    /// `tls`, `ktls` or `plaintext`.
    pub security: String,
}

/// The relay that moves the bytes of raw lanes.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RelayStatus {
    /// `io_uring` or `epoll`.
    pub engine: String,
    /// Why this engine was chosen.
    pub reason: String,
    /// Whether the relay runs: it does where raw lanes are possible, in clear text or on kernel TLS.
    pub used: bool,
    /// Tunnels that the relay moves now.
    #[serde(default)]
    pub tunnels: u64,
    /// Slots of the relay's threads in use; a slot outlives its tunnel until the kernel has released both sockets.
    #[serde(default)]
    pub slots: u64,
    /// Kernel pipes that hold or move bytes; pooled pipes are not counted.
    #[serde(default)]
    pub pipes: u64,
    /// Memory of the buffers in use.
    #[serde(default)]
    pub buffer_bytes: u64,
}

/// State of a capability.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Reported, not judged: no flag needs it.
    Info,
    /// Available.
    Ok,
    /// Works, but below what is possible, or only for a limited time.
    Degraded,
    /// Missing or broken.
    Missing,
}

impl Verdict {
    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Missing => "missing",
        }
    }
}

/// A feature that the host or the configuration allows or lacks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Capability {
    /// Short name.
    pub name: String,
    /// Its state.
    pub verdict: Verdict,
    /// The finding, and what follows from it.
    pub text: String,
    /// The remedy.
    pub remedy: Option<String>,
}

/// File descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Descriptors {
    /// Descriptors in use, or an upper bound.
    pub in_use: u64,
    /// Limit of descriptors; `None`: unlimited.
    pub limit: Option<u64>,
}

/// Payload bytes in queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes queued now.
    pub held_bytes: u64,
    /// Most bytes that may be queued.
    pub budget_bytes: u64,
}

/// `GET /v1/tunnels`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tunnels {
    /// [`API`].
    pub api: u32,
    /// Server or agent.
    pub role: Role,
    /// The process's id.
    pub id: String,
    /// Process id: after a restart the ids of tunnels start again.
    pub pid: u32,
    /// Number of open tunnels, including those beyond the query's limit.
    pub open: u64,
    /// The first tunnels in the requested order.
    pub tunnels: Vec<TunnelStatus>,
    /// The agents with most failed and slow dials, at most [`super::answer::WORST_AGENTS_MAX`]; only on a server.
    #[serde(default)]
    pub worst_agents: Vec<AgentStatus>,
    /// Certificates in use, those that expire first at the front.
    #[serde(default)]
    pub certificates: Vec<CertificateStatus>,
}

/// One open tunnel.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TunnelStatus {
    /// Identifies the tunnel in this process; never reused.
    pub id: u64,
    /// The dialect of the client; only on a server.
    pub client: Option<String>,
    /// The tenant of the tunnel; empty if a process of an earlier version answers.
    #[serde(default)]
    pub tenant: String,
    /// The agent's id on a server, the server's on an agent.
    pub peer: String,
    /// The identity that the agent has proved by certificate or token; only on a server.
    pub principal: Option<String>,
    /// host:port as the client requested it, cut after 256 bytes. Untrusted text.
    pub destination: String,
    /// `link`, `lane`, `raw-lane` or `ktls-lane`.
    pub path: String,
    /// `copy` or `splice`.
    pub engine: String,
    /// `task`, `epoll` or `io_uring`.
    pub driver: String,
    /// Age of the tunnel.
    pub age_seconds: f64,
    /// Payload bytes from client to target so far.
    pub bytes_to_target: u64,
    /// Payload bytes from target to client so far.
    pub bytes_to_client: u64,
    /// Round-trip time between server and agent on the tunnel's own lane. `None` on links, and until the tunnel has moved bytes
    /// after the first query.
    pub rtt_micros: Option<u64>,
    /// Segments of that lane that this end has retransmitted in the life of the lane.
    pub retransmits: Option<u64>,
}
