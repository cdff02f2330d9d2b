//! Tunnels that peers open for their clients: each is dialled through an agent of this server, or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::peer::Forward;
use adit_core::session::{ProcessBudget, Promise, TunnelKind};
use tokio::sync::Semaphore;

use crate::backend::node::AgentDoors;
use crate::frontend::events::FrontendContext;
use crate::owner::owner_hash;
use crate::router::{AskedAgents, NotForwarded, Router};
use adit_net::source_quota::Source;
use adit_net::tasks::Tasks;
use adit_telemetry::labels::{
    ClientDialect, DialFailureReason, DialReason, Driver, DriverReason, EndClass, EndReason,
    Engine, Label as _, Offence, OpenedBy, Path, PeerDial, PeerDirection,
};
use adit_telemetry::{AccessOutcome, AditMetrics, PeerSeries, TunnelFlow, TunnelRecord};
use adit_tls::agent_identity::{AgentIdentity, Certificate};
use adit_tunnel::{AgentOpen, AgentOpens, BridgeOutcome, Carrier, bridge};

/// Dials of one peer that have no answer yet.
const PENDING_MAX: usize = 1024;

/// Bytes that a forwarded tunnel is promised: it has a socket at both ends.
const PROMISED_BYTES: u64 = 2 * TunnelKind::Socket.promised_bytes();

/// Most tunnels of all peers: half of the memory is for this server's own clients.
#[must_use]
pub fn tunnels_of_peers(budget: &ProcessBudget) -> usize {
    let tunnels = budget.tunnels_in_half(PROMISED_BYTES);
    tunnels.map_or(Semaphore::MAX_PERMITS, |it| it.min(Semaphore::MAX_PERMITS))
}

/// Opens tunnels for peers.
pub struct Forwarding {
    /// Dials of all peers that have no answer yet: half of what this server takes, so that its own clients have the rest.
    pub pending: Arc<Semaphore>,
    /// Tunnels of all peers: what half of the memory can be promised to.
    pub tunnels: Arc<Semaphore>,
    /// Their number.
    pub tunnels_max: usize,
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
        let share = self.tunnels_max.div_ceil(2);
        Some(Arc::new(PeerDoor {
            certificate,
            forwarding: self,
            peer: ServerId::new(agent.as_str()),
            pending: Arc::new(Semaphore::new(PENDING_MAX)),
            tunnels: Arc::new(Semaphore::new(share)),
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
    /// Its tunnels: half of those of all peers, so that others have the rest.
    tunnels: Arc<Semaphore>,
    series: Arc<PeerSeries>,
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
        let of_peer = Arc::clone(&self.tunnels).try_acquire_owned();
        let of_peers = Arc::clone(&self.forwarding.tunnels).try_acquire_owned();
        let (Some(promise), Ok(of_peer), Ok(of_peers)) = (open.promise(), of_peer, of_peers) else {
            self.series.dial(PeerDial::Refused);
            return open.refuse(RefusalCode::Limit, "this server is short of memory");
        };
        let certificate = self.certificate.clone();
        let series = Arc::clone(&self.series);
        let mut record = Record::new(&self.forwarding, &self.peer, &forward, open.request());
        let serving = async move {
            let _places = (of_peer, of_peers);
            // Boxed: a dial's state is large, and the tunnel that follows may live for days.
            let dialing = Box::pin(record.dial(open, forward, (&certificate, promise), &series));
            let joined = dialing.await;
            if let Some(joined) = joined {
                drop((permit, of_all));
                record.ended(joined.await);
            }
        };
        // A refused task drops the OPEN, which answers it.
        let _full = self.forwarding.tasks.spawn("forwarded-tunnel", serving);
    }
}

/// A forwarded dial and its tunnel, until their access event is written.
struct Record {
    forwarding: Arc<Forwarding>,
    peer: ServerId,
    /// What the peer says of its client.
    client: String,
    protocol: String,
    destination: String,
    since: Instant,
    asked: AskedAgents,
    open: Option<Open>,
}

/// An open tunnel.
struct Open {
    agent: AgentId,
    principal: Option<Arc<str>>,
    path: Path,
    dial: Duration,
    since: Instant,
}

impl Record {
    fn new(
        forwarding: &Arc<Forwarding>,
        peer: &ServerId,
        forward: &Forward,
        request: &OpenRequest,
    ) -> Self {
        Self {
            forwarding: Arc::clone(forwarding),
            peer: peer.clone(),
            client: forward.client.clone(),
            protocol: request.protocol.clone(),
            destination: request.address.clone(),
            since: Instant::now(),
            asked: AskedAgents::default(),
            open: None,
        }
    }

    /// Dials and answers; returns the tunnel.
    async fn dial(
        &mut self,
        mut open: AgentOpen,
        forward: Forward,
        (certificate, promise): (&Certificate, Promise),
        series: &Arc<PeerSeries>,
    ) -> Option<impl Future<Output = BridgeOutcome> + use<>> {
        let forwarding = Arc::clone(&self.forwarding);
        let (protocol, address) = (&*self.protocol, &*self.destination);
        // What the peer says of its client is a claim.
        let allowed = forwarding
            .clients
            .admit_peer(certificate.principal())
            .check(protocol, address);
        let dialing = forwarding.router.dial_forwarded(
            (protocol, address),
            &forward,
            &owner_hash,
            &self.asked,
        );
        let dialed = match allowed {
            Ok(()) => open.until(Box::pin(dialing)).await,
            Err(failure) => Some(Err(NotForwarded::Failed(failure))),
        };
        match dialed {
            None => {
                self.write(
                    AccessOutcome::Cancelled,
                    EndClass::ClientGone,
                    DialFailureReason::FrontendClose.as_str(),
                );
                None
            }
            Some(Err(why)) => {
                series.dial(match why {
                    NotForwarded::NotHere => PeerDial::NotHere,
                    NotForwarded::Busy | NotForwarded::Leaving => PeerDial::Refused,
                    NotForwarded::Failed(_) => PeerDial::Failed,
                });
                let (code, text) = refusal(&why);
                open.refuse(code, &text);
                // Otherwise nobody was asked, and the peer goes on.
                if let NotForwarded::Failed(failure) = &why {
                    let (reason, stage) = DialReason::of_failure(failure);
                    self.write(
                        AccessOutcome::Failed(reason, stage),
                        EndClass::Other,
                        DialFailureReason::from(failure).as_str(),
                    );
                }
                None
            }
            Some(Ok(opened)) => {
                let path = opened.carrier.path();
                let Carrier::Endpoint(to_agent) = opened.carrier else {
                    // Not requested, so never returned.
                    return None;
                };
                let mut to_peer = open.accept()?.of_peer(Arc::clone(series));
                to_peer.keep(promise);
                series.dial(PeerDial::Opened);
                self.open = Some(Open {
                    agent: opened.agent,
                    principal: opened.principal,
                    path,
                    dial: self.since.elapsed(),
                    since: Instant::now(),
                });
                Some(bridge(to_peer, to_agent))
            }
        }
    }

    /// The tunnel is over.
    fn ended(&mut self, outcome: BridgeOutcome) {
        let reason = EndReason::from(&outcome.end);
        let reason = if outcome.by_first {
            reason.at_target()
        } else {
            reason
        };
        self.over(outcome.moved, reason);
    }

    fn over(&mut self, (bytes_to_target, bytes_to_client): (u64, u64), reason: EndReason) {
        if let Some(open) = &self.open {
            let flow = TunnelFlow {
                bytes_to_target,
                bytes_to_client,
                life: open.since.elapsed(),
                engine: Engine::Copy,
                driver: Driver::Task,
                driver_reason: DriverReason::Framed,
            };
            self.write(AccessOutcome::Tunnel(flow), reason.end(), reason.as_str());
        }
        self.open = None;
    }

    fn write(&self, outcome: AccessOutcome, end: EndClass, detail: &'static str) {
        let decisive = self.asked.decisive();
        let of_open = self
            .open
            .as_ref()
            .map(|open| (&open.agent, &open.principal, open.path));
        let of_failed = decisive
            .as_ref()
            .map(|it| (&it.agent, &it.principal, it.path));
        let asked = of_open.or(of_failed);
        let dial = self
            .open
            .as_ref()
            .map_or_else(|| self.since.elapsed(), |open| open.dial);
        self.forwarding.clients.access.record(&TunnelRecord {
            client_dialect: ClientDialect::Peer,
            agent: asked
                .map(|(agent, _, _)| agent.as_str())
                .unwrap_or_default(),
            agents_asked: None,
            destination: &self.destination,
            dial,
            outcome,
            end,
            detail: Some(detail),
            path: asked.map(|(_, _, path)| path),
            opened_by: OpenedBy::Peer,
            principal: asked.and_then(|(_, principal, _)| principal.as_deref()),
            asked_by: Some((self.peer.as_str(), &self.client)),
        });
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.over((0, 0), EndReason::of_drop());
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
