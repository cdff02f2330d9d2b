//! Connections that become lanes: greets them, binds them to their link, and adds them to its pool.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::ids::{AgentId, ServerId};

use crate::backend::admission::AdmittedAddresses;
use crate::router::Router;
use adit_config::plan::LaneSecurity;
use adit_net::accounts::{Accounts, Labels};
use adit_net::socket;
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{AccountRole, LaneRefusal};
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tunnel::LanePool;
use adit_tunnel::lane::{BindError, Slot, greet_agent};

/// Limit on connections not bound yet, in all: as many as handshakes.
const UNBOUND_MAX: usize = 256;
/// Limit for one address: an agent opens four at a time, and several agents may share an address.
const UNBOUND_PER_SOURCE_MAX: usize = 64;
/// Limit for one certificate: half, so that others always get in. It may come from many addresses, as when all nodes share one.
const UNBOUND_PER_CERTIFICATE_MAX: usize = 128;
/// Limit for strangers, which have no certificate and come from addresses without a link: half, too.
const UNBOUND_STRANGERS_MAX: usize = 128;

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

    /// Greets one connection; its lane moves to the pool of its link.
    pub(super) async fn serve(&self, stream: ByteStream) {
        if let Some(tcp) = stream.tcp() {
            socket::tune_lane(tcp);
        }
        let account = stream.tcp().and_then(|tcp| self.accounts.cookie(tcp));
        let peer = stream.peer();
        let holder: Option<Arc<str>> = stream.principal().map(|one| one.holder().into());
        let source = match &holder {
            Some(holder) => Source::Certificate(Arc::clone(holder)),
            None if self.admitted.has(peer) => Source::Admitted,
            None => Source::Stranger,
        };
        let Some(unbound) = self.unbound.enter(peer, source) else {
            tracing::debug!(%peer, "lane refused: too many connections wait to be bound");
            return self.metrics.lane_refused(LaneRefusal::Unbound);
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
        self.metrics.lane_refused(why);
    }
}

/// Counts connections not bound yet.
#[derive(Clone, Default)]
struct Unbound(Arc<Mutex<Sources>>);

#[derive(Default)]
struct Sources {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
    by_source: HashMap<Source, usize>,
}

/// Where a connection comes from, as far as known before it is bound.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Source {
    /// A client certificate.
    Certificate(Arc<str>),
    /// No certificate, from an address that a link comes from.
    Admitted,
    /// No certificate, from any other address.
    Stranger,
}

impl Source {
    /// Limit on unbound connections of this source, over all addresses.
    fn max(&self) -> usize {
        match self {
            Self::Certificate(_) => UNBOUND_PER_CERTIFICATE_MAX,
            Self::Admitted => UNBOUND_MAX,
            Self::Stranger => UNBOUND_STRANGERS_MAX,
        }
    }
}

/// Counts one more of `kind`; false at `max`.
fn count_up<K: Eq + Hash>(counts: &mut HashMap<K, usize>, kind: K, max: usize) -> bool {
    let count = counts.entry(kind).or_default();
    let room = *count < max;
    *count += usize::from(room);
    room
}

/// Counts one less; removes a kind without connections.
fn count_down<K: Eq + Hash>(counts: &mut HashMap<K, usize>, kind: &K) {
    if let Some(count) = counts.get_mut(kind) {
        *count -= 1;
        if *count == 0 {
            counts.remove(kind);
        }
    }
}

/// One unbound connection; dropped when it is bound or closed.
struct Entry {
    unbound: Unbound,
    address: Option<IpAddr>,
    source: Source,
}

impl Unbound {
    /// Counts a connection; `None` at a limit.
    fn enter(&self, peer: PeerAddr, source: Source) -> Option<Entry> {
        let address = match peer {
            PeerAddr::Tcp(address) => Some(address.ip().to_canonical()),
            PeerAddr::Unix => None,
        };
        let mut sources = self.lock();
        if sources.all >= UNBOUND_MAX {
            return None;
        }
        if let Some(address) = address
            && !count_up(&mut sources.by_address, address, UNBOUND_PER_SOURCE_MAX)
        {
            return None;
        }
        if !count_up(&mut sources.by_source, source.clone(), source.max()) {
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
            source,
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
        count_down(&mut sources.by_source, &self.source);
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

    fn named(name: &str) -> Source {
        Source::Certificate(name.into())
    }

    fn assert_empty(unbound: &Unbound) {
        let sources = unbound.lock();
        assert!(sources.by_address.is_empty() && sources.by_source.is_empty());
        assert_eq!(sources.all, 0);
    }

    /// Limit (peers): Connections at the agent port that are no lanes yet | 256 in total, 128 per certificate, 64 per
    /// address
    #[test]
    fn unbound_connections_are_capped_in_all_and_per_source() {
        let unbound = Unbound::default();
        let mut entries: Vec<Entry> = Vec::new();
        for source in 1..=4 {
            let name = named(&source.to_string());
            let enter = |_| unbound.enter(at(source), name.clone()).unwrap();
            entries.extend((0..UNBOUND_PER_SOURCE_MAX).map(enter));
            assert!(unbound.enter(at(source), name.clone()).is_none());
        }
        assert_eq!(entries.len(), UNBOUND_MAX);
        assert!(
            unbound.enter(at(9), Source::Admitted).is_none()
                && unbound.enter(PeerAddr::Unix, Source::Stranger).is_none()
        );
        entries.pop();
        assert!(unbound.enter(at(9), Source::Stranger).is_some());
        entries.clear();
        assert_empty(&unbound);
    }

    /// Limit (peers): Connections at the agent port that are no lanes yet
    #[test]
    fn a_certificate_gets_half_of_the_unbound_connections() {
        let unbound = Unbound::default();
        let (shared, other) = (named("shared"), named("other"));
        let addresses = (0..UNBOUND_PER_CERTIFICATE_MAX).map(|n| at(u8::try_from(n).unwrap()));
        let mut entries: Vec<Entry> = addresses
            .map(|address| unbound.enter(address, shared.clone()).unwrap())
            .collect();
        assert!(unbound.enter(at(200), shared.clone()).is_none());
        assert!(
            !unbound
                .lock()
                .by_address
                .contains_key(&[10, 0, 0, 200].into())
        );
        for address in [1, 200] {
            entries.extend(unbound.enter(at(address), other.clone()));
            entries.extend(unbound.enter(at(address), Source::Stranger));
        }
        assert_eq!(entries.len(), UNBOUND_PER_CERTIFICATE_MAX + 4);
        entries.remove(0);
        assert!(unbound.enter(at(200), shared.clone()).is_some());
        entries.clear();
        assert_empty(&unbound);
    }

    /// Agents with tokens have no certificate that could identify them.
    #[test]
    fn half_of_the_slots_are_kept_for_addresses_with_a_link() {
        let unbound = Unbound::default();
        let enter = |last: usize, source| unbound.enter(at(u8::try_from(last).unwrap()), source);
        let strangers: Vec<Entry> = (0..UNBOUND_MAX)
            .filter_map(|n| enter(n, Source::Stranger))
            .collect();
        assert_eq!(strangers.len(), UNBOUND_STRANGERS_MAX);
        let admitted: Vec<Entry> = (0..UNBOUND_MAX)
            .filter_map(|n| enter(n, Source::Admitted))
            .collect();
        assert_eq!(admitted.len(), UNBOUND_MAX - UNBOUND_STRANGERS_MAX);
        drop((strangers, admitted));
        assert_empty(&unbound);
    }
}
