//! The merged state of servers and agents: what `--fleet --json` prints.

use serde::Serialize;

use super::super::model::{CertificateStatus, DialStatus, Role};

/// Answers of many processes, merged.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Fleet {
    /// [`super::super::model::API`].
    pub(super) api: u32,
    pub(super) verdict: Verdict,
    /// The largest number of servers that a server announces or an agent looks for.
    pub(super) expected_servers: Option<u64>,
    /// The largest number of leases that a server sees.
    pub(super) leases: Option<u64>,
    /// By id.
    pub(super) servers: Vec<FleetServer>,
    /// By id.
    pub(super) agents: Vec<FleetAgent>,
    /// Links between servers, by asker.
    pub(super) peers: Vec<FleetPeer>,
    pub(super) missing: Vec<MissingLink>,
    /// Certificates that have expired or soon will.
    pub(super) certificates: Vec<FleetCertificate>,
    /// Each leaves the verdict open, unless a link is missing.
    pub(super) problems: Vec<Remark>,
    pub(super) notes: Vec<Remark>,
}

/// Does every server reach every agent?
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// Yes.
    Linked,
    /// No.
    Missing,
    /// No link is known to be missing, but an answer is.
    Unknown,
}

/// A server that has answered, or that an agent has named.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct FleetServer {
    pub(super) id: String,
    /// The file or pod of its answer; `None`: it has not answered.
    pub(super) source: Option<String>,
    pub(super) version: Option<String>,
    pub(super) uptime_seconds: Option<f64>,
    pub(super) ready: Option<bool>,
    pub(super) draining: bool,
    /// Agents with a usable link.
    pub(super) agents: u64,
    /// Agents that it reaches through other servers only.
    pub(super) through_peers: u64,
    /// The number of servers that it announces.
    pub(super) announced: Option<u64>,
    /// Whether it has a port for agents; `None`: only its peers name it.
    pub(super) accepts_agents: Option<bool>,
}

impl FleetServer {
    /// Whether agents should have links to it, as far as known.
    pub(super) fn wants_agents(&self) -> bool {
        self.accepts_agents == Some(true) && !self.draining
    }
}

/// A link between two servers, or one that should be there.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(super) struct FleetPeer {
    /// The server that asks.
    pub(super) asker: String,
    /// The server that is asked; `None`: the server at the address is not known.
    pub(super) holder: Option<String>,
    /// The address that is called, or that calls; `None`: neither end calls the other.
    pub(super) address: Option<String>,
    /// As in the answer, or `missing`.
    pub(super) state: String,
    pub(super) reason: Option<String>,
    /// Keys that the asker knows; `None`: it has not answered.
    pub(super) keys: Option<u64>,
    pub(super) tunnels: u64,
}

impl FleetPeer {
    /// Whether there is a link.
    pub(super) fn is_linked(&self) -> bool {
        matches!(&*self.state, "linked" | "silent")
    }
}

/// An agent that has answered, or that a server has a link of.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct FleetAgent {
    pub(super) id: String,
    /// The file or pod of its answer; `None`: it has not answered.
    pub(super) source: Option<String>,
    /// What it has proved; several values: different proofs at different servers, or another agent with its id.
    pub(super) principals: Vec<String>,
    /// `go` for Konnectivity's.
    pub(super) version: Option<String>,
    /// Over all servers.
    pub(super) dials: DialStatus,
    /// One for each server, in their order.
    pub(super) links: Vec<AgentLink>,
    /// Links that it has fewer than it should, though servers reach it through peers.
    pub(super) lacking: u64,
}

impl FleetAgent {
    /// Whether a link is missing, or may be.
    pub(super) fn is_incomplete(&self) -> bool {
        let mut links = self.links.iter();
        self.lacking > 0
            || links.any(|link| link.state.is_missing() || link.state == LinkState::Unknown)
    }
}

/// The best link of an agent to a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct AgentLink {
    pub(super) server: String,
    pub(super) state: LinkState,
    /// With [`LinkState::Peer`]: the servers that it asks for the agent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) via: Vec<String>,
}

/// A link that is not there, or that gets no dials.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct MissingLink {
    pub(super) agent: String,
    pub(super) server: String,
    pub(super) state: LinkState,
}

/// State of a link, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LinkState {
    Serving,
    Draining,
    /// Nothing came for some seconds.
    Silent,
    /// None, but the server reaches the agent through a peer.
    Peer,
    /// The server is draining, so the agent need not reach it.
    ServerDraining,
    /// Neither end has said.
    Unknown,
    Leaving,
    Retired,
    Dead,
    /// Another certificate or token holds the agent's id.
    Shadowed,
    /// The agent lists a link, and the server does not.
    AgentOnly,
    Missing,
}

impl LinkState {
    /// The state that `condition` of an answer means. A later release may have other conditions.
    pub(super) fn of(condition: &str) -> Self {
        match condition {
            "serving" => Self::Serving,
            "draining" => Self::Draining,
            "silent" => Self::Silent,
            "leaving" => Self::Leaving,
            "retired" => Self::Retired,
            "dead" => Self::Dead,
            "shadowed" => Self::Shadowed,
            _ => Self::Unknown,
        }
    }

    /// Whether dials get no use of it.
    pub(super) fn is_missing(self) -> bool {
        self > Self::Unknown
    }

    /// Whether dials use it.
    pub(super) fn is_usable(self) -> bool {
        self <= Self::Silent
    }
}

/// A certificate that has expired or soon will.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct FleetCertificate {
    pub(super) role: Role,
    pub(super) id: String,
    #[serde(flatten)]
    pub(super) certificate: CertificateStatus,
}

/// Something about an answer, or instead of one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Remark {
    /// The file or pod.
    pub(super) source: String,
    pub(super) text: String,
}

impl Remark {
    pub(super) fn new(source: String, text: String) -> Self {
        Self { source, text }
    }
}
