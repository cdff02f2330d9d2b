//! The keys that this server announces to servers that are linked to it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use adit_core::registry::{PEER_KEYS_MAX, PeerKey, Scope};
use adit_core::wire::packet::{KeyChange, Keys};
use tokio::time::{Instant, sleep, timeout};

use crate::owner::owner_hash;
use crate::router::Router;
use adit_telemetry::{GaugeGuard, PeerSeries};
use adit_tunnel::clock::moment;

/// Changes of this time go together.
const COALESCED: Duration = Duration::from_millis(20);
/// How often keys are looked at without a change.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Share of the time that may go into announcements: one part in this many.
const TIME_SHARE: u32 = 10;
/// Bytes of one packet, about.
const PACKET_BYTES: usize = 12 * 1024;
/// Bytes of one change without its key, at most.
const CHANGE_BYTES: usize = 24;

/// All keys, in order.
type Snapshot = Arc<[(Scope, PeerKey)]>;

/// The keys of this server's agents, as peers are told. Clones share them.
#[derive(Clone)]
pub struct Announcements(Arc<Mutex<Snapshot>>);

impl Default for Announcements {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Arc::from([]))))
    }
}

impl Announcements {
    /// Follows the agents of `agents`, and wakes the links of `peers` whenever a key changes.
    pub async fn follow(self, agents: Arc<Router>, peers: Arc<Router>) {
        loop {
            let changed = agents.changed();
            let since = Instant::now();
            let mut keys =
                agents.with_registry(|registry| registry.announced(moment(), owner_hash));
            // Not under the lock.
            keys.sort_unstable();
            keys.truncate(PEER_KEYS_MAX);
            if agents.refuses_dials() {
                for (_, said) in &mut keys {
                    said.draining = true;
                }
            }
            if *keys != **self.lock() {
                *self.lock() = keys.into();
                for link in peers.links() {
                    Waker::from(link.dirty_list).wake();
                }
            }
            let took = since.elapsed();
            // Keys that are remembered go without a change.
            let _due = timeout(LOOK_EVERY, changed).await;
            sleep(COALESCED.max(took * TIME_SHARE)).await;
        }
    }

    /// Number of keys.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one peer has been told, and what it still has to be told.
pub(super) struct Announcer {
    all: Announcements,
    /// What the peer knows once the changes under way have been sent.
    told: Snapshot,
    /// The keys before these changes, and how far in both lists the peer is.
    under_way: Option<UnderWay>,
    has_told: bool,
    /// Counts the link.
    _link: GaugeGuard,
    _series: Arc<PeerSeries>,
}

struct UnderWay {
    before: Snapshot,
    at_before: usize,
    at_told: usize,
}

impl Announcer {
    pub(super) fn new(all: &Announcements, series: Arc<PeerSeries>) -> Self {
        Self {
            _link: GaugeGuard::new(&series.links),
            _series: series,
            all: all.clone(),
            told: Arc::from([]),
            under_way: None,
            has_told: false,
        }
    }

    /// Whether the peer has to be told something.
    pub(super) fn has_news(&self) -> bool {
        self.under_way.is_some() || !self.has_told || !Arc::ptr_eq(&self.told, &*self.all.lock())
    }

    /// The next changes.
    pub(super) fn next_packet(&mut self) -> Option<Keys> {
        if !self.has_news() {
            return None;
        }
        let mut under_way = self.under_way.take().unwrap_or_else(|| {
            let now = Arc::clone(&*self.all.lock());
            UnderWay {
                before: std::mem::replace(&mut self.told, now),
                at_before: 0,
                at_told: 0,
            }
        });
        let (mut changes, mut bytes) = (Vec::new(), 0);
        while bytes < PACKET_BYTES {
            let Some(change) = under_way.next(&self.told) else {
                self.has_told = true;
                let complete = true;
                return Some(Keys { changes, complete });
            };
            if let Some(change) = change {
                bytes += CHANGE_BYTES + change.key.len();
                changes.push(change);
            }
        }
        self.under_way = Some(under_way);
        let complete = false;
        Some(Keys { changes, complete })
    }
}

impl UnderWay {
    /// The next step through both lists, which may be no change; `None` at the end.
    fn next(&mut self, now: &Snapshot) -> Option<Option<KeyChange>> {
        let (before, told) = (self.before.get(self.at_before), now.get(self.at_told));
        let (is_before, is_now) = match (before, told) {
            (None, None) => return None,
            (Some((before, _)), Some((now, _))) => (before <= now, now <= before),
            (before, now) => (before.is_some(), now.is_some()),
        };
        self.at_before += usize::from(is_before);
        self.at_told += usize::from(is_now);
        let (before, told) = (before.filter(|_| is_before), told.filter(|_| is_now));
        Some(match (before, told) {
            (Some(before), Some(now)) if before == now => None,
            (_, Some((scope, said))) => Some(change(scope, Some(*said))),
            (Some((scope, _)), None) => Some(change(scope, None)),
            (None, None) => None,
        })
    }
}

fn change(scope: &Scope, said: Option<PeerKey>) -> KeyChange {
    KeyChange {
        gone: said.is_none(),
        strategy: scope.strategy_number().into(),
        key: scope.key(),
        owner: said.map_or(0, |said| said.owner),
        draining: said.is_some_and(|said| said.draining),
    }
}

/// The changes of a packet, without those of strategies or keys that this server does not know.
pub fn changes(keys: &Keys) -> impl Iterator<Item = (Scope, Option<PeerKey>)> {
    keys.changes.iter().filter_map(|change| {
        let scope = Scope::numbered(change.strategy, &change.key)?;
        let said = PeerKey {
            owner: change.owner,
            draining: change.draining,
        };
        Some((scope, (!change.gone).then_some(said)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use adit_core::registry::Strategy;
    use adit_telemetry::ServerMetrics;
    use adit_telemetry::labels::PeerDirection;

    use super::*;

    fn set(all: &Announcements, hosts: impl Iterator<Item = (u32, bool)>) {
        let mut keys: Vec<_> = hosts
            .map(|(host, draining)| {
                let scope = Scope::named(Strategy::DestHost, &format!("node-{host}"));
                (scope.unwrap(), PeerKey { owner: 1, draining })
            })
            .collect();
        keys.sort_unstable();
        *all.lock() = keys.into();
    }

    fn hear(announcer: &mut Announcer, heard: &mut BTreeMap<Scope, PeerKey>) -> usize {
        let mut packets = 0;
        while let Some(keys) = announcer.next_packet() {
            packets += 1;
            let bytes: usize = keys
                .changes
                .iter()
                .map(|it| it.key.len() + CHANGE_BYTES)
                .sum();
            assert!(bytes < PACKET_BYTES + 1024, "{bytes}");
            for (scope, said) in changes(&keys) {
                match said {
                    Some(said) => heard.insert(scope, said),
                    None => heard.remove(&scope),
                };
            }
        }
        packets
    }

    /// Changes that come while others are on their way are merged, and a key that came and went is not sent at all.
    #[test]
    fn a_peer_hears_what_changed_and_knows_all_keys_afterwards() {
        let all = Announcements::default();
        let metrics = ServerMetrics::new(&["default"]);
        let series = metrics.adit().peer("other", PeerDirection::From);
        let (mut announcer, mut heard) = (Announcer::new(&all, series), BTreeMap::new());
        assert!(announcer.has_news(), "that there are none");
        assert_eq!(hear(&mut announcer, &mut heard), 1);
        assert!(!announcer.has_news());
        set(&all, (0..5000).map(|host| (host, false)));
        assert!(hear(&mut announcer, &mut heard) > 10, "packets are small");
        assert_eq!(heard.len(), 5000);
        set(&all, (1000..6000).map(|host| (host, host % 2 == 0)));
        let first = announcer.next_packet().unwrap();
        assert!(!first.complete);
        for (scope, said) in changes(&first) {
            said.map(|said| heard.insert(scope.clone(), said))
                .unwrap_or_else(|| heard.remove(&scope));
        }
        set(&all, (2000..3000).map(|host| (host, false)));
        hear(&mut announcer, &mut heard);
        let expected: BTreeMap<_, _> = all.lock().iter().cloned().collect();
        assert_eq!(heard, expected);
        assert!(announcer.next_packet().is_none());
    }
}
