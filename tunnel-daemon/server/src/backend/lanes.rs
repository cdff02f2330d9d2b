//! Connections that become lanes: greets them, binds them to their link, and adds them to its pool.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::{UnboundOrigin, UnboundPlaces, UnboundSource};

use crate::backend::admission::AdmittedAddresses;
use crate::router::Router;
use adit_config::plan::LaneSecurity;
use adit_net::accounts::{Accounts, Labels};
use adit_net::socket;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{AccountRole, LaneRefusal};
use adit_tls::agent_identity::AgentIdentity;
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tunnel::lane::{BindError, Slot, greet_agent};
use adit_tunnel::{LanePlaces, LanePool, moment};

/// Binds new lanes to links.
pub(super) struct LaneListener {
    router: Arc<Router>,
    server: ServerId,
    security: LaneSecurity,
    metrics: AditMetrics,
    accounts: Accounts,
    admitted: AdmittedAddresses,
    unbound: Unbound,
}

impl LaneListener {
    pub(super) fn new(
        router: Arc<Router>,
        server: ServerId,
        security: LaneSecurity,
        metrics: AditMetrics,
        accounts: Accounts,
        admitted: AdmittedAddresses,
    ) -> Self {
        Self {
            router,
            server,
            security,
            metrics,
            accounts,
            admitted,
            unbound: Unbound::default(),
        }
    }

    /// Places for lanes of an agent whose link comes from `peer`.
    pub(super) fn places(&self, identity: &AgentIdentity, peer: PeerAddr) -> Arc<dyn LanePlaces> {
        let certificate = identity.certificate();
        let source = certificate.map_or(UnboundSource::Admitted, |certificate| {
            UnboundSource::Certificate(Arc::clone(certificate.holder()))
        });
        Arc::new(AgentPlaces {
            router: Arc::clone(&self.router),
            unbound: self.unbound.clone(),
            origin: UnboundOrigin {
                address: peer.counted_ip(),
                source,
            },
        })
    }

    /// Greets one connection; its lane moves to the pool of its link.
    pub(super) async fn serve(&self, stream: ByteStream) {
        if let Some(tcp) = stream.tcp() {
            socket::tune_lane(tcp);
        }
        let account = stream.tcp().and_then(|tcp| self.accounts.cookie(tcp));
        let peer = stream.peer();
        let holder: Option<Arc<str>> = stream.principal().map(|one| one.holder().into());
        let source = match &holder {
            Some(holder) => UnboundSource::Certificate(Arc::clone(holder)),
            None if self.admitted.has(peer) => UnboundSource::Admitted,
            None => UnboundSource::Stranger,
        };
        let address = peer.counted_ip();
        let Some(unbound) = self.unbound.enter(UnboundOrigin { address, source }) else {
            tracing::debug!(%peer, "lane refused: too many connections wait to be bound");
            return self.metrics.lanes_refused.count(LaneRefusal::Unbound);
        };
        let mut place: Option<(Arc<LanePool>, Slot)> = None;
        let bound = greet_agent(stream, &self.server, self.security, |link| {
            let found = self.router.lanes_of(link).ok_or(BindError::NoLink)?;
            if !found.identity().may_bind(holder.as_deref()) {
                return Err(BindError::NoLink);
            }
            // Before READY, so that the agent learns when there is no room.
            let slot = found.slot().ok_or(BindError::Full)?;
            let secret = found.secret().clone();
            place = Some((found, slot));
            Ok(secret)
        })
        .await;
        drop(unbound);
        match bound {
            Ok((link, lane)) => {
                if let Some(cookie) = account {
                    let agent = self.router.agent_of(link);
                    let labels = Labels {
                        role: AccountRole::Lane,
                        agent: agent.as_ref().map_or("", AgentId::as_str),
                        destination_class: "",
                    };
                    self.accounts.accepted_cookie(cookie, &labels);
                }
                if let Some((pool, slot)) = place {
                    pool.add(lane, slot);
                }
            }
            Err(error) => self.refused(peer, &error),
        }
    }

    fn refused(&self, peer: PeerAddr, error: &BindError) {
        let why = match error {
            BindError::NoLink => LaneRefusal::NoLink,
            BindError::Full => LaneRefusal::Full,
            BindError::Proof => LaneRefusal::Proof,
            _ => LaneRefusal::Handshake,
        };
        match why {
            // The agent lost its link a moment ago, or went away.
            LaneRefusal::NoLink | LaneRefusal::Full | LaneRefusal::Handshake => {
                tracing::debug!(%peer, %error, "no lane came of a connection");
            }
            // Strangers get this far.
            _ => tracing::debug!(%peer, %error, "lane refused"),
        }
        self.metrics.lanes_refused.count(why);
    }
}

/// Places for connections not bound yet.
#[derive(Clone, Default)]
struct Unbound(Arc<Mutex<UnboundPlaces>>);

/// One unbound connection; dropped when it is bound or closed.
struct UnboundPlace {
    unbound: Unbound,
    origin: UnboundOrigin,
}

impl Unbound {
    /// Takes a place; `None` at a limit.
    fn enter(&self, origin: UnboundOrigin) -> Option<UnboundPlace> {
        let unbound = self.clone();
        let entered = self.lock().enter(&origin, moment());
        entered.then_some(UnboundPlace { unbound, origin })
    }

    fn lock(&self) -> MutexGuard<'_, UnboundPlaces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnboundPlace {
    fn drop(&mut self) {
        self.unbound.lock().leave(&self.origin);
    }
}

/// Places for lanes that one agent is asked for.
struct AgentPlaces {
    router: Arc<Router>,
    unbound: Unbound,
    origin: UnboundOrigin,
}

impl LanePlaces for AgentPlaces {
    fn reserve(&self, lanes: usize) -> usize {
        // A server that goes away needs no lanes.
        if self.router.refuses_dials() {
            return 0;
        }
        let mut places = self.unbound.lock();
        places.reserve(&self.origin, lanes, moment())
    }
}
