//! A quota of places for trusted sources, so that one source cannot take all places.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_host::interfaces;
use adit_tls::stream::PeerAddr;

/// The host of a connection, see [`interfaces::host_of`]. `None`: a unix socket.
#[must_use]
pub fn host_of(peer: PeerAddr) -> Option<IpAddr> {
    peer.ip().map(interfaces::host_of)
}

/// A trusted source: the holder of a certificate, or the pod or node of a token, on one host. Agents that share a
/// certificate on different hosts are different sources.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Source {
    owner: Arc<str>,
    host: Option<IpAddr>,
    /// The balancer that has named the host. Its own address counts as well: a forged one gains nothing.
    balancer: Option<IpAddr>,
}

impl Source {
    /// Name to compare and to log.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        match self.host {
            Some(host) => format!("{}@{host}", self.owner).into(),
            None => Arc::clone(&self.owner),
        }
    }

    /// What its places are counted for.
    fn counted(&self) -> impl Iterator<Item = Self> {
        let balancer = self.balancer.map(|balancer| Self {
            owner: Arc::clone(&self.owner),
            host: Some(balancer),
            balancer: None,
        });
        let own = Self {
            balancer: None,
            ..self.clone()
        };
        std::iter::once(own).chain(balancer)
    }

    /// The source of an owner, see `AgentIdentity::owner`.
    #[must_use]
    pub fn new(owner: &Arc<str>, peer: PeerAddr) -> Self {
        Self {
            owner: Arc::clone(owner),
            host: host_of(peer),
            balancer: peer.balancer().map(interfaces::host_of),
        }
    }
}

/// Places for all sources. The last quarter is refused to a source that would hold more than half.
#[derive(Debug)]
pub struct SourceQuota {
    most: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    of: HashMap<Source, usize>,
}

/// Places that one source holds until this is dropped.
#[derive(Debug)]
pub struct SourcePlaces {
    quota: Arc<SourceQuota>,
    source: Source,
    count: usize,
}

impl SourceQuota {
    /// For `most` places.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            held: Mutex::default(),
        })
    }

    /// Places for all sources.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Takes `count` places; `None`: not so many are free for this source.
    #[must_use]
    pub fn take(self: &Arc<Self>, source: &Source, count: usize) -> Option<SourcePlaces> {
        let mut held = self.locked();
        let all = held.all + count;
        let of = |counted: &Source| held.of.get(counted).copied().unwrap_or(0) + count;
        let own = source.counted().map(|counted| of(&counted)).max();
        let is_of_many = own > Some(self.most / 2) && all > self.most - self.most / 4;
        if all > self.most || is_of_many {
            return None;
        }
        held.all = all;
        for counted in source.counted() {
            *held.of.entry(counted).or_default() += count;
        }
        Some(SourcePlaces {
            quota: Arc::clone(self),
            source: source.clone(),
            count,
        })
    }

    fn locked(&self) -> MutexGuard<'_, Held> {
        // Nothing panics while it is held.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SourcePlaces {
    fn drop(&mut self) {
        let mut held = self.quota.locked();
        held.all -= self.count;
        for counted in self.source.counted() {
            if let Some(own) = held.of.get_mut(&counted) {
                *own -= self.count;
                if *own == 0 {
                    held.of.remove(&counted);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(owner: &str, host: &str) -> Source {
        let address = format!("{host}:1").parse().expect("an address");
        Source::new(&owner.into(), PeerAddr::Tcp(address))
    }

    #[test]
    fn the_last_quarter_is_kept_for_sources_that_hold_less_than_half() {
        let quota = SourceQuota::new(8);
        let [one, other] = ["10.0.0.1", "10.0.0.2"].map(|host| source("shared", host));
        let many: Vec<_> = std::iter::from_fn(|| quota.take(&one, 1)).collect();
        assert_eq!(many.len(), 6, "a lone source has three quarters");
        let few: Vec<_> = std::iter::from_fn(|| quota.take(&other, 1)).collect();
        assert_eq!((few.len(), quota.locked().all), (2, 8));
        drop(many);
        let all = quota.take(&one, 4).expect("half is for anyone");
        assert!(quota.take(&one, 1).is_none(), "the rest is for others");
        drop((all, few));
        assert_eq!(quota.locked().all, 0);
        assert!(
            quota.locked().of.is_empty(),
            "sources without places are forgotten"
        );
        assert!(quota.take(&one, 9).is_none());
    }

    #[test]
    fn hosts_that_a_balancer_names_are_counted_for_the_balancer_too() {
        let quota = SourceQuota::new(8);
        let named = |last: u8| {
            let (client, by) = (([192, 0, 2, last], 1).into(), ([10, 0, 0, 9], 1).into());
            Source::new(&"shared".into(), PeerAddr::Forwarded { client, by })
        };
        let all: Vec<_> = (0..8)
            .filter_map(|last| quota.take(&named(last), 1))
            .collect();
        assert_eq!(all.len(), 6, "as many as one source");
        drop(all);
        assert!(quota.locked().of.is_empty());
    }

    #[test]
    fn a_source_is_an_owner_on_a_host() {
        assert_ne!(source("a", "10.0.0.1"), source("b", "10.0.0.1"));
        assert_eq!(
            source("a", "[2001:db8::1]"),
            source("a", "[2001:db8::ffff:2]")
        );
        assert_ne!(
            source("a", "[2001:db8::1]"),
            source("a", "[2001:db8:0:1::1]")
        );
        assert_eq!(host_of(PeerAddr::Unix), None);
    }
}
