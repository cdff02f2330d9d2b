//! Connections of agents that want to be lanes: greeted, bound to their link, given to its pool.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::ids::{AgentId, ServerId};

use crate::config::plan::LaneSecurity;
use crate::ebpf::account::{Accounts, Labels};
use crate::hub::{Hub, LanePool};
use crate::lane::{BindError, Slot, greet_agent};
use crate::net::socket;
use crate::net::stream::{ByteStream, PeerAddr};
use crate::telemetry::AditMetrics;
use crate::telemetry::labels::{AccountRole, LaneRefusal};

/// Connections that are not bound yet, in all: as many as handshakes.
const UNBOUND_MAX: usize = 256;
/// Of one address: an agent opens four at a time, and several may share an address.
const UNBOUND_PER_SOURCE_MAX: usize = 64;
/// Of one certificate, which may come from many addresses, as when all nodes share one: half, so that it keeps nobody out.
const UNBOUND_PER_PRINCIPAL_MAX: usize = 128;

/// Binds lanes.
pub(super) struct LaneListener {
    hub: Arc<Hub>,
    server: ServerId,
    security: LaneSecurity,
    metrics: AditMetrics,
    accounts: Accounts,
    unbound: Unbound,
}

impl LaneListener {
    pub(super) fn new(
        hub: Arc<Hub>,
        server: ServerId,
        security: LaneSecurity,
        metrics: AditMetrics,
        accounts: Accounts,
    ) -> Self {
        Self {
            hub,
            server,
            security,
            metrics,
            accounts,
            unbound: Unbound::default(),
        }
    }

    /// Greets one connection; its lane lives on in the pool of its link.
    pub(super) async fn serve(&self, stream: ByteStream) {
        if let Some(tcp) = stream.tcp() {
            socket::tune_lane(tcp);
        }
        let account = stream.tcp().and_then(|tcp| self.accounts.cookie(tcp));
        let peer = stream.peer();
        // Without a certificate there is nobody whose link it could be.
        let principal: Option<Arc<str>> = stream.principal().map(|one| one.holder().into());
        let Some(unbound) = self.unbound.enter(peer, principal.as_ref()) else {
            tracing::debug!(%peer, "lane refused: too many connections wait to be bound");
            return self.metrics.lane_refused(LaneRefusal::Unbound);
        };
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
            Ok((link, lane)) => {
                if let Some(cookie) = account {
                    let agent = self.hub.agent_of(link);
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
    /// Those without a certificate together.
    by_principal: HashMap<Option<Arc<str>>, usize>,
}

/// One more of that kind, unless there are `max`.
fn count_up<K: Eq + Hash>(counts: &mut HashMap<K, usize>, kind: K, max: usize) -> bool {
    let count = counts.entry(kind).or_default();
    let room = *count < max;
    *count += usize::from(room);
    room
}

/// One less; a kind without any is forgotten.
fn count_down<K: Eq + Hash>(counts: &mut HashMap<K, usize>, kind: &K) {
    if let Some(count) = counts.get_mut(kind) {
        *count -= 1;
        if *count == 0 {
            counts.remove(kind);
        }
    }
}

/// One of them; gone when it is bound or closed.
struct Entry {
    unbound: Unbound,
    address: Option<IpAddr>,
    principal: Option<Arc<str>>,
}

impl Unbound {
    /// `None` when there are too many.
    fn enter(&self, peer: PeerAddr, principal: Option<&Arc<str>>) -> Option<Entry> {
        let address = match peer {
            PeerAddr::Tcp(address) => Some(address.ip().to_canonical()),
            PeerAddr::Unix => None,
        };
        let principal = principal.cloned();
        let mut sources = self.lock();
        if sources.all >= UNBOUND_MAX {
            return None;
        }
        if let Some(address) = address
            && !count_up(&mut sources.by_address, address, UNBOUND_PER_SOURCE_MAX)
        {
            return None;
        }
        let max = UNBOUND_PER_PRINCIPAL_MAX;
        if !count_up(&mut sources.by_principal, principal.clone(), max) {
            if let Some(address) = address {
                count_down(&mut sources.by_address, &address);
            }
            return None;
        }
        sources.all += 1;
        drop(sources);
        let unbound = self.clone();
        Some(Entry {
            unbound,
            address,
            principal,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Sources> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut sources = self.unbound.lock();
        sources.all -= 1;
        count_down(&mut sources.by_principal, &self.principal);
        if let Some(address) = self.address {
            count_down(&mut sources.by_address, &address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> PeerAddr {
        PeerAddr::Tcp(([10, 0, 0, last], 1000).into())
    }

    fn named(name: &str) -> Arc<str> {
        name.into()
    }

    fn assert_empty(unbound: &Unbound) {
        let sources = unbound.lock();
        assert!(sources.by_address.is_empty() && sources.by_principal.is_empty());
        assert_eq!(sources.all, 0);
    }

    #[test]
    fn unbound_connections_are_capped_in_all_and_per_source() {
        let unbound = Unbound::default();
        let mut entries: Vec<Entry> = Vec::new();
        for source in 1..=4 {
            let name = named(&source.to_string());
            let enter = |_| unbound.enter(at(source), Some(&name)).unwrap();
            entries.extend((0..UNBOUND_PER_SOURCE_MAX).map(enter));
            assert!(unbound.enter(at(source), Some(&name)).is_none());
        }
        assert_eq!(entries.len(), UNBOUND_MAX);
        assert!(
            unbound.enter(at(9), None).is_none() && unbound.enter(PeerAddr::Unix, None).is_none()
        );
        entries.pop();
        assert!(unbound.enter(at(9), None).is_some());
        entries.clear();
        assert_empty(&unbound);
    }

    #[test]
    fn one_certificate_from_many_addresses_has_half_of_them() {
        let unbound = Unbound::default();
        let (shared, other) = (named("shared"), named("other"));
        let addresses = (0..UNBOUND_PER_PRINCIPAL_MAX).map(|n| at(u8::try_from(n).unwrap()));
        let mut entries: Vec<Entry> = addresses
            .map(|address| unbound.enter(address, Some(&shared)).unwrap())
            .collect();
        assert!(unbound.enter(at(200), Some(&shared)).is_none());
        assert!(
            !unbound
                .lock()
                .by_address
                .contains_key(&[10, 0, 0, 200].into())
        );
        for address in [1, 200] {
            entries.extend(unbound.enter(at(address), Some(&other)));
            entries.extend(unbound.enter(at(address), None));
        }
        assert_eq!(entries.len(), UNBOUND_PER_PRINCIPAL_MAX + 4);
        entries.remove(0);
        assert!(unbound.enter(at(200), Some(&shared)).is_some());
        entries.clear();
        assert_empty(&unbound);
    }
}
