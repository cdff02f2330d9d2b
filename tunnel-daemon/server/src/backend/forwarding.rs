//! Tunnels that peers open for their clients: each is dialled through an agent of this server, or not at all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::peer::Forward;
use adit_core::session::{Promise, TunnelKind};
use tokio::sync::Semaphore;

use crate::backend::node::AgentDoors;
use crate::frontend::events::FrontendContext;
use crate::owner::owner_hash;
use crate::router::{AskedAgents, NotForwarded, Router};
use adit_net::source_quota::Source;
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

/// Places for dials that have no answer yet, and for tunnels.
struct Places {
    pending: Arc<Semaphore>,
    tunnels: Arc<Semaphore>,
}

impl Places {
    fn new(pending: usize, tunnels: usize) -> Self {
        let [pending, tunnels] = [pending, tunnels]
            .map(|places| Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS))));
        Self { pending, tunnels }
    }
}

/// Opens tunnels for peers.
pub struct Forwarding {
    /// Of all peers: half of the dials that this server takes, and of its memory. Its own clients have the rest.
    of_all: Places,
    /// Of each peer over all of its links, while it has one.
    of_each: Mutex<HashMap<ServerId, Weak<Places>>>,
    tunnels_max: usize,
    /// The agents of this server.
    router: Arc<Router>,
    /// This server's own rules for clients, which hold for forwarded dials, too. Their tasks run the tunnels.
    clients: Arc<FrontendContext>,
    metrics: AditMetrics,
}

impl Forwarding {
    /// Forwards to the agents that these clients dial through.
    #[must_use]
    pub fn new(clients: Arc<FrontendContext>, metrics: AditMetrics) -> Self {
        let router = Arc::clone(&clients.router);
        let tunnels_max = router.budget().tunnels_in_half(PROMISED_BYTES);
        let tunnels_max = tunnels_max.unwrap_or(Semaphore::MAX_PERMITS);
        Self {
            of_all: Places::new(router.limits().pending_max / 2, tunnels_max),
            of_each: Mutex::default(),
            tunnels_max,
            router,
            clients,
            metrics,
        }
    }

    /// The places of one peer: half of those of all peers, so that others have the rest.
    fn places_of(&self, peer: &ServerId) -> Arc<Places> {
        let mut of_each = self.of_each.lock().unwrap_or_else(PoisonError::into_inner);
        of_each.retain(|_, places| places.strong_count() > 0);
        if let Some(places) = of_each.get(peer).and_then(Weak::upgrade) {
            return places;
        }
        let places = Arc::new(Places::new(PENDING_MAX, self.tunnels_max.div_ceil(2)));
        of_each.insert(peer.clone(), Arc::downgrade(&places));
        places
    }
}

impl AgentDoors for Forwarding {
    fn of_agent(
        self: Arc<Self>,
        agent: &AgentId,
        identity: &AgentIdentity,
        _source: &Source,
    ) -> Option<Arc<dyn AgentOpens>> {
        let peer = ServerId::new(agent.as_str());
        Some(Arc::new(PeerDoor {
            certificate: identity.certificate()?.clone(),
            places: self.places_of(&peer),
            series: self.metrics.peer(agent.as_str(), PeerDirection::From),
            forwarding: self,
            peer,
        }))
    }
}

/// The door for one peer's link.
struct PeerDoor {
    certificate: Certificate,
    forwarding: Arc<Forwarding>,
    peer: ServerId,
    /// Of the peer.
    places: Arc<Places>,
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
        let [of_peer, of_all] = [&*self.places, &self.forwarding.of_all];
        let pending = Arc::clone(&of_peer.pending).try_acquire_owned();
        let pending_of_all = Arc::clone(&of_all.pending).try_acquire_owned();
        let (Ok(pending), Ok(pending_of_all)) = (pending, pending_of_all) else {
            self.series.dial(PeerDial::Refused);
            return open.refuse(RefusalCode::Limit, "too many forwarded dials are pending");
        };
        let tunnel = Arc::clone(&of_peer.tunnels).try_acquire_owned();
        let of_all = Arc::clone(&of_all.tunnels).try_acquire_owned();
        let (Some(promise), Ok(tunnel), Ok(of_all)) = (open.promise(), tunnel, of_all) else {
            self.series.dial(PeerDial::Refused);
            return open.refuse(RefusalCode::Limit, "this server is short of memory");
        };
        let certificate = self.certificate.clone();
        let (series, places) = (Arc::clone(&self.series), Arc::clone(&self.places));
        let mut record =
            ForwardedRecord::new(&self.forwarding, &self.peer, &forward, open.request());
        let serving = async move {
            // The peer's places, too: its next link finds those that its tunnels still hold.
            let _places = (tunnel, of_all, places);
            // Boxed: a dial's state is large, and the tunnel that follows may live for days.
            let dialing = Box::pin(record.dial(open, forward, (&certificate, promise), &series));
            let joined = dialing.await;
            if let Some(joined) = joined {
                drop((pending, pending_of_all));
                record.ended(joined.await);
            }
        };
        // A refused task drops the OPEN, which answers it.
        let tasks = &self.forwarding.clients.tasks;
        let _full = tasks.spawn("forwarded-tunnel", serving);
    }
}

/// A forwarded dial and its tunnel, until their access event is written.
struct ForwardedRecord {
    forwarding: Arc<Forwarding>,
    peer: ServerId,
    /// What the peer says of its client.
    client: String,
    protocol: String,
    destination: String,
    since: Instant,
    asked: AskedAgents,
    open: Option<OpenForwarded>,
}

/// An open tunnel.
struct OpenForwarded {
    agent: AgentId,
    principal: Option<Arc<str>>,
    path: Path,
    dial: Duration,
    since: Instant,
}

impl ForwardedRecord {
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
                self.open = Some(OpenForwarded {
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

impl Drop for ForwardedRecord {
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

#[cfg(test)]
mod tests {
    use adit_core::registry::Registry;
    use adit_core::session::{MemoryBounds, ProcessBudget};
    use adit_telemetry::ServerMetrics;

    use super::*;
    use crate::router::DialLimits;

    /// Limit (memory): Tunnels that one other server forwards, over all of its links | half of those of all
    #[tokio::test]
    async fn a_peer_has_half_of_the_tunnels_of_all_peers_over_all_its_links() {
        let bounds = MemoryBounds {
            room_bytes: 2 * 10 * PROMISED_BYTES,
            growth_bytes: 1 << 20,
            counts_tcp: false,
        };
        let budget = ProcessBudget::new(1 << 20).with_bounds(Some(bounds));
        let limits = DialLimits {
            pending_max: 64,
            timeout: None,
            dead_after: Duration::from_secs(8),
        };
        let registry = Registry::new("default".parse().unwrap());
        let mut clients = FrontendContext::for_tests();
        Arc::get_mut(&mut clients).unwrap().router =
            Router::within(registry, limits, Arc::new(budget));
        let metrics = ServerMetrics::new(&["default"]).adit().clone();
        let forwarding = Forwarding::new(clients, metrics);
        let free = |places: &Places| {
            [&places.pending, &places.tunnels].map(|places| places.available_permits())
        };
        assert_eq!(free(&forwarding.of_all), [32, 10]);
        let [one, other] = ["one", "other"].map(ServerId::new);
        let first = forwarding.places_of(&one);
        assert_eq!(free(&first), [PENDING_MAX, 5]);
        let held = Arc::clone(&first.tunnels).try_acquire_owned().unwrap();
        let second = forwarding.places_of(&one);
        assert_eq!(
            free(&second),
            [PENDING_MAX, 4],
            "another link of the same peer"
        );
        assert_eq!(free(&forwarding.places_of(&other)), [PENDING_MAX, 5]);
        drop((first, second, held));
        assert_eq!(free(&forwarding.places_of(&one)), [PENDING_MAX, 5]);
        assert_eq!(forwarding.of_each.lock().unwrap().len(), 1);
    }
}
