//! Tunnels that peers open for their clients: each is dialled through an agent of this server, or not at all.

use std::sync::Arc;

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::RefusalCode;
use adit_core::peer::Forward;
use adit_core::session::Promise;
use tokio::sync::Semaphore;

use crate::backend::node::AgentDoors;
use crate::frontend::events::FrontendContext;
use crate::owner::owner_hash;
use crate::router::{AskedAgents, NotForwarded, Router};
use adit_net::source_quota::Source;
use adit_net::tasks::Tasks;
use adit_telemetry::labels::{Offence, PeerDial, PeerDirection};
use adit_telemetry::{AditMetrics, GaugeGuard, PeerSeries};
use adit_tls::agent_identity::{AgentIdentity, Certificate};
use adit_tunnel::{AgentOpen, AgentOpens, BridgeOutcome, Carrier, bridge};

/// Dials of one peer that have no answer yet.
const PENDING_MAX: usize = 1024;

/// Opens tunnels for peers.
pub struct Forwarding {
    /// Dials of all peers that have no answer yet: half of what this server takes, so that its own clients have the rest.
    pub pending: Arc<Semaphore>,
    /// The agents of this server.
    pub router: Arc<Router>,
    /// This server's own rules for clients, which hold for forwarded dials, too.
    pub clients: Arc<FrontendContext>,
    /// Runs the tunnels.
    pub tasks: Tasks,
    /// Counters.
    pub metrics: AditMetrics,
}

impl AgentDoors for Forwarding {
    fn of_agent(
        self: Arc<Self>,
        agent: &AgentId,
        identity: &AgentIdentity,
        _source: &Source,
    ) -> Option<Arc<dyn AgentOpens>> {
        let certificate = identity.certificate()?.clone();
        let series = self.metrics.peer(agent.as_str(), PeerDirection::From);
        Some(Arc::new(PeerDoor {
            certificate,
            forwarding: self,
            peer: ServerId::new(agent.as_str()),
            pending: Arc::new(Semaphore::new(PENDING_MAX)),
            _link: GaugeGuard::new(&series.links),
            series,
        }))
    }
}

/// The door for one peer's link.
struct PeerDoor {
    certificate: Certificate,
    forwarding: Arc<Forwarding>,
    peer: ServerId,
    pending: Arc<Semaphore>,
    series: Arc<PeerSeries>,
    _link: GaugeGuard,
}

impl PeerDoor {
    fn offence(&self, open: AgentOpen, text: &str) {
        self.series.dial(PeerDial::Refused);
        self.forwarding.metrics.offences.count(Offence::Forward);
        tracing::debug!(peer = %self.peer, text, "a peer's OPEN is refused");
        open.refuse(RefusalCode::Denied, text);
    }
}

impl AgentOpens for PeerDoor {
    fn open(&self, open: AgentOpen) {
        let request = open.request();
        if request.raw {
            return self.offence(open, "a forwarded tunnel cannot use a raw lane");
        }
        let Some(context) = &request.forward else {
            return self.offence(open, "between servers each OPEN forwards a dial");
        };
        let forward = match Forward::decode(context) {
            Ok(forward) => forward,
            Err(error) => return self.offence(open, &error.to_string()),
        };
        let pending = Arc::clone(&self.pending).try_acquire_owned();
        let of_all = Arc::clone(&self.forwarding.pending).try_acquire_owned();
        let (Ok(permit), Ok(of_all)) = (pending, of_all) else {
            self.series.dial(PeerDial::Refused);
            return open.refuse(RefusalCode::Limit, "too many forwarded dials are pending");
        };
        let Some(promise) = open.promise() else {
            self.series.dial(PeerDial::Refused);
            return open.refuse(RefusalCode::Limit, "this server is short of memory");
        };
        let certificate = self.certificate.clone();
        let (forwarding, peer) = (Arc::clone(&self.forwarding), self.peer.clone());
        let series = Arc::clone(&self.series);
        let serving = async move {
            let peers = (&peer, &series);
            // Boxed: a dial's state is large, and the tunnel that follows may live for days.
            let dialing = Box::pin(forwarding.dial(open, forward, (&certificate, promise), peers));
            if let Some(joined) = dialing.await {
                drop((permit, of_all));
                let BridgeOutcome { moved, end, .. } = joined.await;
                let (to_target, to_client) = moved;
                tracing::debug!(%peer, to_target, to_client, end = end.reason(), "forwarded tunnel over");
            }
        };
        // A refused task drops the OPEN, which answers it.
        let _full = self.forwarding.tasks.spawn("forwarded-tunnel", serving);
    }
}

impl Forwarding {
    /// Dials and answers; returns the tunnel.
    async fn dial(
        &self,
        mut open: AgentOpen,
        forward: Forward,
        (certificate, promise): (&Certificate, Promise),
        (peer, series): (&ServerId, &Arc<PeerSeries>),
    ) -> Option<impl Future<Output = BridgeOutcome> + use<>> {
        let request = open.request();
        let (protocol, address) = (request.protocol.clone(), request.address.clone());
        let asked = AskedAgents::default();
        // What the peer says of its client is a claim.
        let allowed = self
            .clients
            .admit_peer(certificate.principal())
            .check(&protocol, &address);
        let dialing =
            self.router
                .dial_forwarded((&protocol, &address), &forward, &owner_hash, &asked);
        let dialed = match allowed {
            Ok(()) => open.until(Box::pin(dialing)).await,
            Err(failure) => Some(Err(NotForwarded::Failed(failure))),
        };
        let (dial, client) = (forward.dial.0, &*forward.client);
        match dialed {
            // The peer has withdrawn the dial.
            None => None,
            Some(Err(why)) => {
                tracing::debug!(%peer, dial, client, target_address = address, %why, "a forwarded dial failed");
                series.dial(match why {
                    NotForwarded::NotHere => PeerDial::NotHere,
                    NotForwarded::Busy | NotForwarded::Leaving => PeerDial::Refused,
                    NotForwarded::Failed(_) => PeerDial::Failed,
                });
                let (code, text) = refusal(&why);
                open.refuse(code, &text);
                None
            }
            Some(Ok(opened)) => {
                let Carrier::Endpoint(to_agent) = opened.carrier else {
                    // Not requested, so never returned.
                    return None;
                };
                let agent = opened.agent;
                tracing::debug!(%peer, dial, client, target_address = address, %agent, "forwarded tunnel open");
                let mut to_peer = open.accept()?.of_peer(Arc::clone(series));
                to_peer.keep(promise);
                series.dial(PeerDial::Opened);
                Some(bridge(to_peer, to_agent))
            }
        }
    }
}

/// The answer to a peer. [`failure`] reads it.
fn refusal(why: &NotForwarded) -> (RefusalCode, String) {
    match why {
        NotForwarded::NotHere => (RefusalCode::NotHere, String::new()),
        NotForwarded::Busy => (RefusalCode::Busy, String::new()),
        NotForwarded::Leaving => (RefusalCode::Leaving, String::new()),
        NotForwarded::Failed(failure) => {
            let code = match failure {
                DialFailure::TimedOut | DialFailure::SendTimedOut => RefusalCode::TimedOut,
                DialFailure::TooManyPending { .. }
                | DialFailure::NoMemory
                | DialFailure::NoDescriptors
                | DialFailure::LinkBusy => RefusalCode::Limit,
                DialFailure::Denied(_) => RefusalCode::Denied,
                DialFailure::ShuttingDown => RefusalCode::Leaving,
                DialFailure::LinkLost | DialFailure::Closed => RefusalCode::Unreachable,
                _ => RefusalCode::Failed,
            };
            (code, failure.to_string())
        }
    }
}

/// What a peer's refusal means for the dial; `None`: nobody can have been asked.
#[must_use]
pub fn failure(code: RefusalCode, text: String) -> Option<DialFailure> {
    Some(match code {
        RefusalCode::Busy | RefusalCode::NotHere | RefusalCode::Leaving => return None,
        RefusalCode::TimedOut => DialFailure::TimedOut,
        RefusalCode::Limit => DialFailure::TooManyPending { per_agent: true },
        // The agent's link ended.
        RefusalCode::Unreachable => DialFailure::LinkLost,
        RefusalCode::Failed
        | RefusalCode::Denied
        | RefusalCode::Refused
        | RefusalCode::NotFound => DialFailure::Target(text),
    })
}
