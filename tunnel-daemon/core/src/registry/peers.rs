//! Keys under which other servers can ask their agents.
//!
//! Hints: a key is kept as a hash, and the server that announced it decides. A stale hint, or two keys of one hash, cost a dial one
//! question, never a wrong target.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;

use ipnet::IpNet;

use super::agents::{Key, Registry, SILENT_KEYS_FOR};
use super::nets::{PrefixLength, PrefixLengths, length_of};
use super::pool::Pool;
use super::scope::Scope;
use super::strategy::Strategy;
use crate::ids::LinkId;
use crate::peer::PEERS_MAX;
use crate::session::Moment;

/// Most keys of one peer.
pub const PEER_KEYS_MAX: usize = 1 << 17;
/// Most keys of all peers together: about 40 MiB. When there are more, the peer that has most loses all of its own.
const ALL_KEYS_MAX: usize = 1 << 19;
/// Changes that a peer may send at once: all keys that it can have come, drain and go.
const CHANGES_AT_ONCE: u64 = 3 << 17;
/// Changes that a peer may send in a second, in the long run.
const CHANGES_PER_SECOND: u64 = 5_000;
/// Most keys whose owners are kept peer by peer: 16 MiB with all peers. Beyond, such a key stays without an owner, so its dials
/// are not hedged.
const MIXED_KEYS_MAX: usize = 1 << 14;

/// What a server says of one of its keys.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PeerKey {
    /// Hash of what the key's agents have proved; 0 if they differ, or if the key is no claim.
    pub owner: u64,
    /// No agent of the key is ready: all are draining or silent.
    pub draining: bool,
}

/// A peer announces more than this server takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PeerExcess {
    /// More keys than are kept.
    #[error(
        "the peer announces more keys than are kept: at most {PEER_KEYS_MAX} of one peer, and {ALL_KEYS_MAX} of all together"
    )]
    Keys,
    /// Too many changes in a short time.
    #[error(
        "the peer changes its keys too often: more than {CHANGES_PER_SECOND} a second for a long time"
    )]
    Changes,
}

/// The preference among peers of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum PeerStage {
    Ready,
    Draining,
    Silent,
}

#[derive(Debug)]
struct Peer {
    link: LinkId,
    keys: usize,
    is_complete: bool,
    /// It has lost its keys to others.
    is_displaced: bool,
    /// Changes that it may still send at once, as of a moment.
    changes_left: (u64, Moment),
}

/// Bit sets of peers, by slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    holders: u64,
    draining: u64,
    /// 0 if the peers say different owners, or if all of them say 0.
    owner: u64,
    strategy: Strategy,
    /// Of a network.
    length: Option<PrefixLength>,
}

/// The keys of all peers.
#[derive(Default, Debug)]
pub(super) struct Peers {
    slots: Vec<Option<Peer>>,
    entries: HashMap<u64, Entry>,
    /// What each peer says of the owner, by slot: of keys about which peers differ.
    mixed: HashMap<u64, Vec<(usize, u64)>>,
    hasher: RandomState,
    lengths: PrefixLengths,
    near: u64,
    silent: u64,
    /// The last peer that has lost its keys.
    displaced: Option<LinkId>,
}

impl Peers {
    fn slot(&self, link: LinkId) -> Option<usize> {
        let is_it = |peer: &Option<Peer>| peer.as_ref().is_some_and(|peer| peer.link == link);
        self.slots.iter().position(is_it)
    }

    fn bits(&self, links: &[LinkId]) -> u64 {
        let slots = links.iter().filter_map(|link| self.slot(*link));
        slots.fold(0, |bits, slot| bits | 1 << slot)
    }

    fn entry(&self, key: &Key) -> Option<&Entry> {
        if self.entries.is_empty() {
            return None;
        }
        self.entries.get(&self.hasher.hash_one(key))
    }

    /// Whether a peer has the key, other than those that have said of this key that they have not.
    pub(super) fn has(&self, key: &Key, not_here: &[(LinkId, Scope)]) -> bool {
        let entry = self.entry(key);
        entry.is_some_and(|entry| {
            let of_key = not_here.iter().filter(|(_, scope)| scope.0 == *key);
            let slots = of_key.filter_map(|(link, _)| self.slot(*link));
            let without = slots.fold(0, |bits, slot| bits | 1 << slot);
            entry.holders & !without != 0
        })
    }

    /// The longest network around `ip` that a peer has, as [`Self::has`].
    pub(super) fn longest_around(&self, ip: IpAddr, not_here: &[(LinkId, Scope)]) -> Option<IpNet> {
        let mut around = self.lengths.around(ip);
        around.find(|net| self.has(&Key::Net(*net), not_here))
    }

    /// Peers that answer and have a ready agent of the key.
    fn ready(&self, entry: &Entry) -> u64 {
        entry.holders & !entry.draining & !self.silent
    }

    /// Number of prefix lengths, and of keys with owners by peer.
    #[cfg(test)]
    pub(super) fn remains(&self) -> [usize; 2] {
        [self.lengths.len(), self.mixed.len()]
    }

    /// Bytes of the table of keys, with a byte of control for each of its places, of which an eighth stays free.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * 8 / 7 * (size_of::<(u64, Entry)>() + 1)
    }

    /// A peer of this stage that has the key: of this server's zone if there is one, chosen by `draw`.
    pub(super) fn pick(
        &self,
        key: &Key,
        stage: PeerStage,
        draw: u64,
        except: &[LinkId],
    ) -> Option<LinkId> {
        let entry = self.entry(key)?;
        let stage = match stage {
            PeerStage::Ready => !entry.draining & !self.silent,
            PeerStage::Draining => entry.draining & !self.silent,
            PeerStage::Silent => self.silent,
        };
        let bits = entry.holders & stage & !self.bits(except);
        let near = bits & self.near;
        let bits = if near == 0 { bits } else { near };
        let count = u64::from(bits.count_ones());
        let mut left = draw.checked_rem(count)?;
        let slot = (0..u64::BITS)
            .filter(|slot| bits & 1 << slot != 0)
            .find(|_| {
                let is_it = left == 0;
                left = left.saturating_sub(1);
                is_it
            })?;
        let peer = self.slots.get(slot as usize)?.as_ref()?;
        Some(peer.link)
    }

    fn set(&mut self, slot: usize, key: &Key, said: PeerKey) -> Result<(), PeerExcess> {
        let (hash, bit) = (self.hasher.hash_one(key), 1 << slot);
        let known = self.entries.get(&hash);
        let is_new = known.is_none_or(|entry| entry.holders & bit == 0);
        let needs_room = known.is_none() && self.entries.len() >= ALL_KEYS_MAX;
        let has_most = |peer: &Peer| is_new && peer.keys >= PEER_KEYS_MAX;
        if needs_room
            && !self
                .slots
                .get(slot)
                .is_some_and(|it| it.as_ref().is_some_and(has_most))
        {
            self.make_room();
        }
        let Some(peer) = self.slots.get_mut(slot).and_then(Option::as_mut) else {
            return Ok(());
        };
        if peer.is_displaced || has_most(peer) {
            return Err(PeerExcess::Keys);
        }
        let known = self.entries.get_mut(&hash);
        peer.keys += usize::from(is_new);
        let draining = if said.draining { bit } else { 0 };
        match known {
            Some(entry) => {
                let others = entry.holders & !bit;
                entry.holders |= bit;
                entry.draining = entry.draining & !bit | draining;
                self.set_owner(hash, slot, others, said.owner);
            }
            None => {
                let length = match key {
                    Key::Net(net) => Some(length_of(net)),
                    Key::Any | Key::DefaultRoute | Key::Host(_) => None,
                };
                let entry = Entry {
                    holders: bit,
                    draining,
                    owner: said.owner,
                    strategy: key.strategy(),
                    length,
                };
                self.entries.insert(hash, entry);
                if let Some(length) = length {
                    self.lengths.add(length);
                }
            }
        }
        Ok(())
    }

    /// A peer says who owns the agents of a key that is known; `others`: the other peers that have the key.
    fn set_owner(&mut self, hash: u64, slot: usize, others: u64, owner: u64) {
        let Some(entry) = self.entries.get_mut(&hash) else {
            return;
        };
        if let Some(owners) = self.mixed.get_mut(&hash) {
            owners.retain(|(other, _)| *other != slot);
            owners.push((slot, owner));
            if let Some(owner) = common(owners) {
                self.mixed.remove(&hash);
                entry.owner = owner;
            }
        } else if others == 0 || owner == entry.owner {
            entry.owner = owner;
        } else {
            let before = std::mem::take(&mut entry.owner);
            if self.mixed.len() < MIXED_KEYS_MAX {
                let others = (0..PEERS_MAX).filter(|other| others & 1 << other != 0);
                let owners = others.map(|other| (other, before)).chain([(slot, owner)]);
                self.mixed.insert(hash, owners.collect());
            }
        }
    }

    /// A peer no longer says who owns the agents of a key.
    fn unset_owner(&mut self, hash: u64, slot: usize) {
        let Some(owners) = self.mixed.get_mut(&hash) else {
            return;
        };
        owners.retain(|(other, _)| *other != slot);
        if let Some(owner) = common(owners) {
            self.mixed.remove(&hash);
            if let Some(entry) = self.entries.get_mut(&hash) {
                entry.owner = owner;
            }
        }
    }

    fn unset(&mut self, slot: usize, key: &Key) {
        let (hash, bit) = (self.hasher.hash_one(key), 1 << slot);
        let Some(entry) = self.entries.get_mut(&hash) else {
            return;
        };
        if entry.holders & bit == 0 {
            return;
        }
        entry.holders &= !bit;
        entry.draining &= !bit;
        let (is_over, length) = (entry.holders == 0, entry.length);
        if let Some(peer) = self.slots.get_mut(slot).and_then(Option::as_mut) {
            peer.keys -= 1;
        }
        self.unset_owner(hash, slot);
        if is_over {
            self.entries.remove(&hash);
            if let Some(length) = length {
                self.lengths.remove(length);
            }
        }
    }

    /// Takes the keys of the peer that has most.
    fn make_room(&mut self) {
        let with_keys = |(slot, peer): (usize, &Option<Peer>)| Some((peer.as_ref()?.keys, slot));
        let Some((_keys, largest)) = self.slots.iter().enumerate().filter_map(with_keys).max()
        else {
            return;
        };
        self.remove_keys(largest);
        if let Some(peer) = self.slots.get_mut(largest).and_then(Option::as_mut) {
            (peer.keys, peer.is_displaced) = (0, true);
            self.displaced = Some(peer.link);
        }
    }

    fn remove_keys(&mut self, slot: usize) {
        let bit: u64 = 1 << slot;
        let mixed: Vec<u64> = self.mixed.keys().copied().collect();
        for hash in mixed {
            self.unset_owner(hash, slot);
        }
        let mut over = Vec::new();
        self.entries.retain(|_, entry| {
            entry.holders &= !bit;
            entry.draining &= !bit;
            if entry.holders == 0 {
                over.extend(entry.length);
            }
            entry.holders != 0
        });
        self.entries.shrink_to_fit();
        for length in over {
            self.lengths.remove(length);
        }
    }

    fn remove(&mut self, slot: usize) {
        self.remove_keys(slot);
        for set in [&mut self.near, &mut self.silent] {
            *set &= !(1 << slot);
        }
        if let Some(place) = self.slots.get_mut(slot) {
            *place = None;
        }
    }
}

/// The owner that all peers say; 0 without peers. `None`: they differ.
fn common(owners: &[(usize, u64)]) -> Option<u64> {
    let mut owners = owners.iter().map(|(_, owner)| *owner);
    let first = owners.next().unwrap_or(0);
    owners.all(|other| other == first).then_some(first)
}

/// Sets or clears a bit.
fn put(set: &mut u64, slot: usize, is_in: bool) {
    let bit = 1 << slot;
    *set = if is_in { *set | bit } else { *set & !bit };
}

impl Registry {
    /// Adds a peer without keys. `near`: it is in the zone of this server. False if there are [`PEERS_MAX`] peers already.
    pub fn add_peer(&mut self, link: LinkId, near: bool) -> bool {
        let peers = &mut self.peers;
        let free = peers.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or(peers.slots.len());
        if slot >= PEERS_MAX {
            return false;
        }
        let peer = Peer {
            link,
            keys: 0,
            is_complete: false,
            is_displaced: false,
            changes_left: (CHANGES_AT_ONCE, Moment::default()),
        };
        match peers.slots.get_mut(slot) {
            Some(place) => *place = Some(peer),
            None => peers.slots.push(Some(peer)),
        }
        put(&mut peers.near, slot, near);
        true
    }

    /// Removes a peer with all its keys.
    pub fn remove_peer(&mut self, link: LinkId) {
        if let Some(slot) = self.peers.slot(link) {
            self.peers.remove(slot);
        }
    }

    /// The peer does not answer, or answers again.
    pub fn set_peer_silent(&mut self, link: LinkId, is_silent: bool) {
        if let Some(slot) = self.peers.slot(link) {
            put(&mut self.peers.silent, slot, is_silent);
        }
    }

    /// A peer has sent this many changes of its keys.
    ///
    /// # Errors
    /// These are too many, or others needed the room of its keys.
    pub fn count_peer_changes(
        &mut self,
        link: LinkId,
        changes: usize,
        now: Moment,
    ) -> Result<(), PeerExcess> {
        let slot = self.peers.slot(link);
        let Some(peer) = slot.and_then(|slot| self.peers.slots.get_mut(slot)?.as_mut()) else {
            return Ok(());
        };
        if peer.is_displaced {
            return Err(PeerExcess::Keys);
        }
        let (left, since) = peer.changes_left;
        let micros = u64::try_from(now.since(since).as_micros()).unwrap_or(u64::MAX);
        let earned = micros.saturating_mul(CHANGES_PER_SECOND) / 1_000_000;
        let left = left.saturating_add(earned).min(CHANGES_AT_ONCE);
        // A packet without changes costs something, too.
        let changes = u64::try_from(changes.max(1)).unwrap_or(u64::MAX);
        let left = left.checked_sub(changes).ok_or(PeerExcess::Changes)?;
        peer.changes_left = (left, now);
        Ok(())
    }

    /// A peer has announced a key, or that it has it no more (`None`).
    ///
    /// # Errors
    /// The peer has too many keys.
    pub fn set_peer_key(
        &mut self,
        link: LinkId,
        scope: &Scope,
        said: Option<PeerKey>,
    ) -> Result<(), PeerExcess> {
        let Some(slot) = self.peers.slot(link) else {
            return Ok(());
        };
        match said {
            Some(said) => self.peers.set(slot, &scope.0, said),
            None => {
                self.peers.unset(slot, &scope.0);
                Ok(())
            }
        }
    }

    /// The peer that has lost its keys since the last call, because others needed the room.
    pub fn take_displaced(&mut self) -> Option<LinkId> {
        self.peers.displaced.take()
    }

    /// A peer has announced all its keys.
    pub fn complete_peer(&mut self, link: LinkId) {
        let slot = self.peers.slot(link);
        if let Some(peer) = slot.and_then(|slot| self.peers.slots.get_mut(slot)?.as_mut()) {
            peer.is_complete = true;
        }
    }

    /// Number of peers that have announced all their keys.
    #[must_use]
    pub fn complete_peers(&self) -> usize {
        let peers = self.peers.slots.iter().flatten();
        peers.filter(|peer| peer.is_complete).count()
    }

    /// Number of keys of one peer.
    #[must_use]
    pub fn keys_of_peer(&self, link: LinkId) -> usize {
        let slot = self.peers.slot(link);
        let peer = slot.and_then(|slot| self.peers.slots.get(slot)?.as_ref());
        peer.map_or(0, |peer| peer.keys)
    }

    /// Number of distinct keys of all peers.
    #[must_use]
    pub fn peer_keys(&self) -> usize {
        self.peers.entries.len()
    }

    /// Whether a peer that answers has a ready agent by this strategy.
    #[must_use]
    pub fn a_peer_serves(&self, strategy: Strategy) -> bool {
        let mut entries = self.peers.entries.values();
        entries.any(|entry| entry.strategy == strategy && self.peers.ready(entry) != 0)
    }

    /// Number of peers that answer and have a ready agent under the key.
    #[must_use]
    pub fn ready_peers(&self, scope: &Scope) -> usize {
        let entry = self.peers.entry(&scope.0);
        entry.map_or(0, |entry| self.peers.ready(entry).count_ones() as usize)
    }

    /// What all agents of a key at peers have proved, as a hash; `None` if they differ, or none has the key.
    #[must_use]
    pub fn peer_owner(&self, scope: &Scope) -> Option<u64> {
        let entry = self.peers.entry(&scope.0)?;
        (entry.owner != 0).then_some(entry.owner)
    }

    /// Whether identifiers of a key are mere claims, so that all attempts of a dial stay with one owner.
    #[must_use]
    pub fn is_claim(&self, scope: &Scope) -> bool {
        scope.0 != Key::Any && !self.granted
    }

    /// Whether this server has an agent under the key, however silent.
    #[must_use]
    pub fn has_local(&self, scope: &Scope) -> bool {
        self.pool(&scope.0).is_some_and(|pool| !pool.is_empty())
    }

    /// What the agents of a key here have proved, each owner at least once.
    pub fn principals_of(&self, scope: &Scope) -> impl Iterator<Item = Option<&str>> {
        let links = self.pool(&scope.0).into_iter().flat_map(Pool::newest);
        links.filter_map(|link| Some(self.links.get(&link)?.principal.as_deref()))
    }

    /// The keys under which agents here can be asked, or could a moment ago, for peers, in no order.
    /// `hash` makes the hash of what an agent has proved.
    #[must_use]
    pub fn announced(
        &self,
        now: Moment,
        hash: impl Fn(Option<&str>) -> u64,
    ) -> Vec<(Scope, PeerKey)> {
        let mut keys: Vec<(Scope, PeerKey)> = self
            .pools()
            .filter_map(|(key, pool)| {
                if pool.is_empty() {
                    return None;
                }
                // Silent agents' keys, too: without them dials would go to the next key, which may be another machine's.
                let draining = !pool.has_ready();
                let scope = Scope(key);
                let owner = match scope.strategy() {
                    Strategy::Default => 0,
                    _ => self.owner_here(&scope, &hash),
                };
                Some((scope, PeerKey { owner, draining }))
            })
            .collect();
        let remembered = self.silent.iter().filter(|(key, since)| {
            let is_gone = self.pool(key).is_none_or(Pool::is_empty);
            is_gone && now.since(**since) < SILENT_KEYS_FOR
        });
        keys.extend(remembered.map(|(key, _)| {
            let said = PeerKey {
                owner: 0,
                draining: true,
            };
            (Scope(key.clone()), said)
        }));
        keys
    }

    fn owner_here(&self, scope: &Scope, hash: &impl Fn(Option<&str>) -> u64) -> u64 {
        let mut principals = self.principals_of(scope);
        let Some(first) = principals.next() else {
            return 0;
        };
        if principals.all(|other| other == first) {
            hash(first)
        } else {
            0
        }
    }
}
