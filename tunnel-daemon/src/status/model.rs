//! The answers of the admin socket: JSON, with a version that changes when a field changes its meaning or goes away. Fields
//! may be added; who reads ignores those it does not know.

use serde::{Deserialize, Serialize};

use adit_telemetry::debug::LogView;

/// The version of these answers.
pub const API: u32 = 1;

/// `GET /v1/status`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// [`API`].
    pub api: u32,
    /// What runs.
    pub role: Role,
    /// Its version.
    pub version: String,
    /// Its id, as told to peers.
    pub id: String,
    /// Its process.
    pub pid: u32,
    /// Since it started.
    pub uptime_seconds: f64,
    /// Whether it can do its work.
    pub readiness: Readiness,
    /// Open tunnels.
    pub tunnels: TunnelCounts,
    /// Dials without an answer yet; only on a server.
    pub pending_dials: Option<u64>,
    /// Links now, in order of arrival; at most [`super::answer::LINKS_MAX`].
    pub links: Vec<LinkStatus>,
    /// How many there are.
    pub links_total: u64,
    /// Lanes of all links.
    pub lanes: LaneStatus,
    /// What moves the bytes of tunnels without frames.
    pub relay: RelayStatus,
    /// What this process needs of the host and its kernel, and whether they allowed it when the process began.
    pub capabilities: Vec<Capability>,
    /// Capabilities that at least one thread of the process has or could take, now; `None`: there is no `/proc`.
    #[serde(default)]
    pub privileges: Option<Vec<String>>,
    /// File descriptors of the process.
    pub descriptors: Descriptors,
    /// Payload bytes held for readers that pause.
    pub memory: Memory,
    /// What the redirect is; `None` without one.
    #[serde(default)]
    pub redirect: Option<RedirectStatus>,
    /// Accounting in the kernel.
    #[serde(default)]
    pub account: AccountStatus,
    /// What is logged.
    #[serde(default)]
    pub log: LogStatus,
}

/// `POST /v1/log`: as it is afterwards.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Log {
    /// [`API`].
    pub api: u32,
    /// What runs.
    pub role: Role,
    /// Its id.
    pub id: String,
    /// What is logged.
    pub log: LogStatus,
}

/// What a process logs.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct LogStatus {
    /// The least severe level, or directives as in `ADIT_LOG`.
    pub level: String,
    /// Until debug logging that was switched on goes off; `None`: it was not.
    pub debug_seconds_left: Option<u64>,
}

impl LogStatus {
    /// Of a process's own log.
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
    /// The number of its program, or why it is not there.
    pub reason: Option<String>,
}

/// The redirect by eBPF.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectStatus {
    /// `active`, or `missing`: nothing is redirected.
    pub state: String,
    /// What is missing.
    pub reason: Option<String>,
    /// Whose processes are captured.
    pub cgroup: String,
    /// It is mounted as if it were all of the host, and is not.
    #[serde(default)]
    pub part_of_host: bool,
    /// Programs of others at its hooks, as they were when it began.
    #[serde(default)]
    pub others: Option<RedirectOthers>,
    /// Rules in force, exclusions and what is always left alone included.
    pub rules: u64,
    /// The how many-th set of rules that is.
    pub set: u64,
    /// The file of rules, if there is one.
    pub file: Option<RedirectFile>,
    /// Other network namespaces, if they are asked for.
    pub namespaces: Option<RedirectNamespaces>,
}

/// Programs of others that run when captured processes connect.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectOthers {
    /// How many are known of.
    pub count: u64,
    /// The first of them: hook, number, name where that is known, and when it runs.
    pub programs: Vec<String>,
    /// What of them is not known, and why.
    pub unknown: Option<String>,
}

impl RedirectOthers {
    /// In a few words; `None` where there are none.
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

/// The file of a redirect's rules.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectFile {
    /// As given.
    pub path: String,
    /// Why what it holds now is not in force.
    pub error: Option<String>,
}

/// Captured network namespaces besides our own.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RedirectNamespaces {
    /// `running`, `missing` or `ended`.
    pub helper: String,
    /// Why it does not run.
    pub reason: Option<String>,
    /// Paths of those with a listener, as they were found.
    pub captured: Vec<String>,
    /// Those without one, and why.
    pub failed: Vec<String>,
    /// Those beyond the limit.
    pub over_limit: u64,
    /// Captured processes whose namespace cannot be read.
    pub unreadable_processes: u64,
    /// There are more captured processes than are looked at: namespaces of the others are not captured.
    #[serde(default)]
    pub look_cut: bool,
}

/// Server or agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A server.
    Server,
    /// An agent.
    Agent,
}

impl Role {
    /// As in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Agent => "agent",
        }
    }
}

/// As the health port says it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Readiness {
    /// Whether it is.
    pub ready: bool,
    /// It was told to end, and serves until then.
    #[serde(default)]
    pub draining: bool,
    /// Why not.
    pub reason: Option<String>,
}

/// Sums over the open tunnels.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct TunnelCounts {
    /// All.
    pub open: u64,
    /// Those on links.
    pub link: u64,
    /// Those on lanes.
    pub lane: u64,
    /// Those on lanes without frames.
    pub raw_lane: u64,
    /// Of these, those that the kernel's TLS encrypts.
    #[serde(default)]
    pub ktls_lane: u64,
    /// Payload bytes that open tunnels have moved from client to target.
    pub bytes_to_target: u64,
    /// And from target to client.
    pub bytes_to_client: u64,
}

/// `GET /v1/links`, and on a server what `POST /v1/unlink` and `POST /v1/drain` were done to.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Links {
    /// [`API`].
    pub api: u32,
    /// What runs.
    pub role: Role,
    /// Its id, as told to peers.
    pub id: String,
    /// Those that were asked for, in order of arrival; at most [`super::answer::LINKS_LISTED_MAX`].
    pub links: Vec<LinkStatus>,
    /// How many there are of these.
    pub links_total: u64,
}

/// One link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Its number, as logs of a server have it; `None` on an agent.
    #[serde(default)]
    pub link: Option<u64>,
    /// The agent's id on a server, the server's on an agent.
    pub peer: String,
    /// Where the connection comes from, or on an agent the address it was opened to.
    pub address: String,
    /// Who the agent has proved to be, by certificate or token; only on a server.
    pub principal: Option<String>,
    /// What the agent claims to be good for, as identifiers are written (`host=a&ipv4=10.0.0.1`); only on a server.
    #[serde(default)]
    pub identifiers: Option<String>,
    /// `adit`, or `go` for a peer without our extensions.
    pub dialect: String,
    /// The release of Adit that the peer says it is; Go peers say none.
    #[serde(default)]
    pub version: Option<String>,
    /// For how long it has been there.
    pub age_seconds: u64,
    /// `serving`, `draining`, `retired` or `shadowed`; an agent's are `serving` until it drains.
    pub condition: String,
    /// Open tunnels of this peer, those on lanes included.
    pub tunnels: u64,
    /// Payload bytes that the link holds for readers that pause.
    pub held_bytes: u64,
    /// What it may hold.
    pub budget_bytes: u64,
    /// Its lanes, if it may have some.
    pub lanes: Option<LinkLanes>,
}

/// Lanes of one link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkLanes {
    /// Without a tunnel.
    pub idle: u64,
    /// With one.
    pub busy: u64,
    /// Idle ones that the agent means to have; only on an agent.
    pub wanted: Option<u64>,
    /// Most of them.
    pub limit: u64,
}

/// Lanes of a process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneStatus {
    /// Without a tunnel.
    pub idle: u64,
    /// With one.
    pub busy: u64,
    /// Most of one link, as configured; 0 is none.
    pub limit_per_link: u64,
    /// Most of the process: descriptors decide.
    pub limit: u64,
    /// `tls`, `ktls` or `plaintext`.
    pub security: String,
}

/// What moves the bytes of tunnels without frames.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RelayStatus {
    /// `io_uring` or `epoll`.
    pub engine: String,
    /// Why this one.
    pub reason: String,
    /// Whether it runs: it does where lanes may be in clear text.
    pub used: bool,
    /// Tunnels it has now.
    #[serde(default)]
    pub tunnels: u64,
    /// Places of its threads in use; one outlives its tunnel until the kernel has let go of both sockets.
    #[serde(default)]
    pub slots: u64,
    /// Pipes of the kernel that hold or move bytes; those kept for later are not counted.
    #[serde(default)]
    pub pipes: u64,
    /// Memory of the buffers in use.
    #[serde(default)]
    pub buffer_bytes: u64,
}

/// How something stands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Told, not judged: nothing at hand needs it.
    Info,
    /// As it should be.
    Ok,
    /// It works, with less than there could be, or will not for long.
    Degraded,
    /// It is not there, or does not work.
    Missing,
}

impl Verdict {
    /// As in JSON.
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

/// One thing that host or configuration allow, or do not.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Capability {
    /// Short name.
    pub name: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What was found and what that means.
    pub text: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

/// File descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Descriptors {
    /// In use, or more.
    pub in_use: u64,
    /// Most of them; `None`: no limit.
    pub limit: Option<u64>,
}

/// Payload bytes in queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Memory {
    /// Held now.
    pub held_bytes: u64,
    /// What may be held.
    pub budget_bytes: u64,
}

/// `GET /v1/tunnels`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Tunnels {
    /// [`API`].
    pub api: u32,
    /// Who answers.
    pub role: Role,
    /// Its id.
    pub id: String,
    /// Its process: after a restart the numbers of tunnels begin again.
    pub pid: u32,
    /// Open tunnels; those beyond the limit of the question are not listed.
    pub open: u64,
    /// The first of them, in the order that was asked for.
    pub tunnels: Vec<TunnelStatus>,
}

/// One open tunnel.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TunnelStatus {
    /// Names it in this process; never used again.
    pub id: u64,
    /// The dialect of the client; only on a server.
    pub client: Option<String>,
    /// Whose it is; empty if a process of an earlier version answers.
    #[serde(default)]
    pub tenant: String,
    /// The agent's id on a server, the server's on an agent.
    pub peer: String,
    /// host:port as the client asked for it, at most 256 bytes of it. Text of a stranger.
    pub destination: String,
    /// `link`, `lane`, `raw-lane` or `ktls-lane`.
    pub path: String,
    /// `copy` or `splice`.
    pub engine: String,
    /// `task`, `epoll` or `io_uring`.
    pub driver: String,
    /// Since it opened.
    pub age_seconds: f64,
    /// Payload bytes from client to target so far.
    pub bytes_to_target: u64,
    /// Payload bytes from target to client so far.
    pub bytes_to_client: u64,
    /// Round-trip time between server and agent, of the tunnel's own lane; unknown on links, and until the tunnel has moved
    /// since somebody asked.
    pub rtt_micros: Option<u64>,
    /// Segments of that lane sent again by this end, in the life of the lane.
    pub retransmits: Option<u64>,
}
