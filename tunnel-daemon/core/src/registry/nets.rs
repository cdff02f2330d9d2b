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

/// Pools by network. A lookup masks the address once per prefix length that is in use.
#[derive(Default, Debug)]
pub(super) struct Nets {
    pub(super) pools: HashMap<IpNet, Pool>,
    /// Number of networks by prefix length.
    v4_lengths: BTreeMap<u8, usize>,
    v6_lengths: BTreeMap<u8, usize>,
}

impl Nets {
    fn lengths(&mut self, net: IpNet) -> &mut BTreeMap<u8, usize> {
        match net {
            IpNet::V4(_) => &mut self.v4_lengths,
            IpNet::V6(_) => &mut self.v6_lengths,
        }
    }

    pub(super) fn entry(&mut self, net: IpNet) -> &mut Pool {
        if !self.pools.contains_key(&net) {
            *self.lengths(net).entry(net.prefix_len()).or_default() += 1;
        }
        self.pools.entry(net).or_default()
    }

    pub(super) fn remove(&mut self, net: IpNet, agent: &AgentId, link: LinkId) {
        if !remove_from(&mut self.pools, &net, agent, link) {
            return;
        }
        let lengths = self.lengths(net);
        match lengths.get_mut(&net.prefix_len()) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                lengths.remove(&net.prefix_len());
            }
        }
    }

    /// The longest network with a pool that contains `ip`.
    pub(super) fn longest_around(&self, ip: IpAddr) -> Option<IpNet> {
        let lengths = if ip.is_ipv4() {
            &self.v4_lengths
        } else {
            &self.v6_lengths
        };
        lengths
            .keys()
            .rev()
            .filter_map(|length| Some(IpNet::new(ip, *length).ok()?.trunc()))
            .find(|net| self.pools.contains_key(net))
    }
}
