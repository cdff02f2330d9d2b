//! Pools by network, with longest-prefix lookup.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use ipnet::IpNet;

use super::pool::Pool;
use crate::ids::{AgentId, LinkId};

/// Removes a link from the pool under `key`, and the pool if it is then empty; true if the pool was removed.
pub(super) fn remove_from<K: Eq + Hash>(
    pools: &mut HashMap<K, Pool>,
    key: &K,
    agent: &AgentId,
    link: LinkId,
) -> bool {
    let Some(pool) = pools.get_mut(key) else {
        return false;
    };
    pool.remove(agent, link);
    pool.is_empty() && pools.remove(key).is_some()
}

/// Numbers of networks by prefix length: a lookup masks the address once per length that is in use.
#[derive(Default, Debug)]
pub(super) struct PrefixLengths {
    v4: BTreeMap<u8, usize>,
    v6: BTreeMap<u8, usize>,
}

/// The prefix length of a network, and whether it is of IPv6.
pub(super) type PrefixLength = (bool, u8);

/// The prefix length of a network.
pub(super) fn length_of(net: &IpNet) -> PrefixLength {
    (matches!(net, IpNet::V6(_)), net.prefix_len())
}

impl PrefixLengths {
    fn of(&mut self, is_v6: bool) -> &mut BTreeMap<u8, usize> {
        if is_v6 { &mut self.v6 } else { &mut self.v4 }
    }

    pub(super) fn add(&mut self, (is_v6, length): PrefixLength) {
        *self.of(is_v6).entry(length).or_default() += 1;
    }

    pub(super) fn remove(&mut self, (is_v6, length): PrefixLength) {
        let lengths = self.of(is_v6);
        match lengths.get_mut(&length) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                lengths.remove(&length);
            }
        }
    }

    /// The networks around `ip` of these lengths, the longest first.
    pub(super) fn around(&self, ip: IpAddr) -> impl Iterator<Item = IpNet> {
        let lengths = if ip.is_ipv4() { &self.v4 } else { &self.v6 };
        let lengths = lengths.keys().rev();
        lengths.filter_map(move |length| Some(IpNet::new(ip, *length).ok()?.trunc()))
    }

    /// Number of lengths in use.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }
}

/// Pools by network.
#[derive(Default, Debug)]
pub(super) struct Nets {
    pub(super) pools: HashMap<IpNet, Pool>,
    lengths: PrefixLengths,
}

impl Nets {
    pub(super) fn entry(&mut self, net: IpNet) -> &mut Pool {
        if !self.pools.contains_key(&net) {
            self.lengths.add(length_of(&net));
        }
        self.pools.entry(net).or_default()
    }

    pub(super) fn remove(&mut self, net: IpNet, agent: &AgentId, link: LinkId) {
        if remove_from(&mut self.pools, &net, agent, link) {
            self.lengths.remove(length_of(&net));
        }
    }

    /// The longest network with a pool that contains `ip`.
    pub(super) fn longest_around(&self, ip: IpAddr) -> Option<IpNet> {
        let mut around = self.lengths.around(ip);
        around.find(|net| self.pools.contains_key(net))
    }
}
