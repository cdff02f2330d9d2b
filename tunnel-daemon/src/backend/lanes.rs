//! Connections of agents that want to be lanes: greeted, bound to their link, given to its pool.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::ids::ServerId;

use super::service::holder;
use crate::config::plan::LaneSecurity;
use crate::hub::{Hub, LanePool};
use crate::lane::{BindError, Slot, greet_agent};
use crate::net::socket;
use crate::net::stream::{ByteStream, PeerAddr};
use crate::telemetry::AditMetrics;
use crate::telemetry::labels::LaneRefusal;

/// Connections that are not bound yet, in all: as many as handshakes.
const UNBOUND_MAX: usize = 256;
/// Of one address: an agent opens four at a time, and several may share an address.
const UNBOUND_PER_SOURCE_MAX: usize = 64;

/// Binds lanes.
pub(super) struct LaneListener {
    hub: Arc<Hub>,
    server: ServerId,
    security: LaneSecurity,
    metrics: AditMetrics,
    unbound: Unbound,
}

impl LaneListener {
    pub(super) fn new(
        hub: Arc<Hub>,
        server: ServerId,
        security: LaneSecurity,
        metrics: AditMetrics,
    ) -> Self {
        Self {
            hub,
            server,
            security,
            metrics,
            unbound: Unbound::default(),
        }
    }

    /// Greets one connection; its lane lives on in the pool of its link.
    pub(super) async fn serve(&self, stream: ByteStream) {
        if let Some(tcp) = stream.tcp() {
            socket::tune_lane(tcp);
        }
        let peer = stream.peer();
        let Some(unbound) = self.unbound.enter(peer) else {
            tracing::debug!(%peer, "lane refused: too many connections wait to be bound");
            return self.metrics.lane_refused(LaneRefusal::Unbound);
        };
        // Without a certificate there is nobody whose link it could be.
        let principal = stream.principal().map(|principal| holder(principal));
        let mut place: Option<(Arc<LanePool>, Slot)> = None;
        let bound = greet_agent(stream, &self.server, self.security, |link| {
            let found = self.hub.lanes_of(link).ok_or(BindError::NoLink)?;
            if Some(found.principal()) != principal.as_deref() {
                return Err(BindError::NoLink);
            }
            // Before the lane is told that it is bound, so that its agent knows when there is no room.
            let slot = found.slot().ok_or(BindError::Full)?;
            let secret = found.secret().clone();
            place = Some((found, slot));
            Ok(secret)
        })
        .await;
        drop(unbound);
        match bound {
            Ok((_link, lane)) => {
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
            // An agent that lost its link a moment ago, or went away.
            LaneRefusal::NoLink | LaneRefusal::Full | LaneRefusal::Handshake => {
                tracing::debug!(%peer, %error, "no lane came of a connection");
            }
            _ => tracing::warn!(%peer, %error, "lane refused"),
        }
        self.metrics.lane_refused(why);
    }
}

/// Counts connections that are not bound yet.
#[derive(Clone, Default)]
struct Unbound(Arc<Mutex<Sources>>);

#[derive(Default)]
struct Sources {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One of them; gone when it is bound or closed.
struct Entry {
    unbound: Unbound,
    address: Option<IpAddr>,
}

impl Unbound {
    /// `None` when there are too many.
    fn enter(&self, peer: PeerAddr) -> Option<Entry> {
        let address = match peer {
            PeerAddr::Tcp(address) => Some(address.ip().to_canonical()),
            PeerAddr::Unix => None,
        };
        let mut sources = self.lock();
        let here = address.and_then(|address| sources.by_address.get(&address));
        if sources.all >= UNBOUND_MAX || here.is_some_and(|here| *here >= UNBOUND_PER_SOURCE_MAX) {
            return None;
        }
        sources.all += 1;
        if let Some(address) = address {
            *sources.by_address.entry(address).or_default() += 1;
        }
        drop(sources);
        let unbound = self.clone();
        Some(Entry { unbound, address })
    }

    fn lock(&self) -> MutexGuard<'_, Sources> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut sources = self.unbound.lock();
        sources.all -= 1;
        if let Some(address) = self.address
            && let Some(here) = sources.by_address.get_mut(&address)
        {
            *here -= 1;
            if *here == 0 {
                sources.by_address.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> PeerAddr {
        PeerAddr::Tcp(([10, 0, 0, last], 1000).into())
    }

    #[test]
    fn unbound_connections_are_capped_in_all_and_per_source() {
        let unbound = Unbound::default();
        let mut entries: Vec<Entry> = Vec::new();
        for source in 1..=4 {
            entries.extend((0..UNBOUND_PER_SOURCE_MAX).map(|_| unbound.enter(at(source)).unwrap()));
            assert!(unbound.enter(at(source)).is_none());
        }
        assert_eq!(entries.len(), UNBOUND_MAX);
        assert!(unbound.enter(at(9)).is_none() && unbound.enter(PeerAddr::Unix).is_none());
        entries.pop();
        assert!(unbound.enter(at(9)).is_some());
        entries.clear();
        assert!(unbound.lock().by_address.is_empty());
        assert_eq!(unbound.lock().all, 0);
    }
}
