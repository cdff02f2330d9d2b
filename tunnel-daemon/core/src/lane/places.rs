//! Connections at the agent port that are no lanes yet: how many may wait to be bound, and for how many a server may ask.
//!
//! A server that asks an agent for lanes reserves their places first. Pure: the clock is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Growth;
use crate::session::Moment;

/// Limit on connections not bound yet, in all: as many as handshakes.
const ALL_MAX: usize = 256;
/// Limit for one address: an agent opens four at a time, and several agents may share an address.
const ADDRESS_MAX: usize = 64;
/// Limit for one certificate: half, so that others always get in. It may come from many addresses, as when all nodes share one.
const CERTIFICATE_MAX: usize = 128;
/// Limit for strangers, which have no certificate and come from addresses without a link: half, too.
const STRANGERS_MAX: usize = 128;
/// Reserved places are at most one part in this many of each limit: agents that no server has asked find the others.
const RESERVED_PART: usize = 2;
/// A request reserves one part in this many of what may still be reserved, so that several agents of one source get some.
const REQUEST_PART: usize = 4;
/// A reserved place is kept for this long: an agent opens lanes as soon as it is asked.
const KEPT: Duration = Duration::from_secs(5);

/// Where a connection comes from, as far as known before it is bound.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum UnboundSource {
    /// A client certificate, by the name of its holder.
    Certificate(Arc<str>),
    /// No certificate, from an address that a link comes from.
    Admitted,
    /// No certificate, from any other address.
    Stranger,
}

impl UnboundSource {
    /// Limit on unbound connections of this source, over all addresses.
    fn max(&self) -> usize {
        match self {
            Self::Certificate(_) => CERTIFICATE_MAX,
            Self::Admitted => ALL_MAX,
            Self::Stranger => STRANGERS_MAX,
        }
    }
}

/// The two things that are known of a connection that is not bound.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct UnboundOrigin {
    /// `None` for a unix socket.
    pub address: Option<IpAddr>,
    /// Who it is.
    pub source: UnboundSource,
}

/// Places reserved for one origin.
#[derive(Debug)]
struct Reserved {
    places: usize,
    until: Moment,
}

/// Places for unbound connections. Reserved ones count as taken.
#[derive(Debug, Default)]
pub struct UnboundPlaces {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
    by_source: HashMap<UnboundSource, usize>,
    reserved: HashMap<UnboundOrigin, Reserved>,
}

impl UnboundPlaces {
    /// A connection takes a place, a reserved one if there is one; false at a limit. Each place that was taken has to be
    /// [given back](Self::leave).
    pub fn enter(&mut self, origin: &UnboundOrigin, now: Moment) -> bool {
        self.expire(now);
        if let Some(reserved) = self.reserved.get_mut(origin) {
            reserved.places -= 1;
            if reserved.places == 0 {
                self.reserved.remove(origin);
            }
            return true;
        }
        let has_room = self.free(origin) > 0;
        if has_room {
            self.take(origin, 1);
        }
        has_room
    }

    /// A connection gives its place back.
    pub fn leave(&mut self, origin: &UnboundOrigin) {
        self.give_back(origin, 1);
    }

    /// Reserves places for up to `wanted` connections of an agent; returns how many.
    pub fn reserve(&mut self, origin: &UnboundOrigin, wanted: usize, now: Moment) -> usize {
        self.expire(now);
        let may_be_reserved = self.may_be_reserved(origin).min(self.free(origin));
        let places = wanted
            .min(may_be_reserved.div_ceil(REQUEST_PART))
            .min(Growth::GRANT_MAX);
        if places > 0 {
            self.take(origin, places);
            let reserved = self.reserved.entry(origin.clone()).or_insert(Reserved {
                places: 0,
                until: now,
            });
            reserved.places += places;
            reserved.until = now.after(KEPT);
        }
        places
    }

    /// Places that are neither taken nor reserved.
    fn free(&self, origin: &UnboundOrigin) -> usize {
        let of_source = count(&self.by_source, &origin.source);
        let mut free = ALL_MAX.saturating_sub(self.all);
        free = free.min(origin.source.max().saturating_sub(of_source));
        if let Some(address) = &origin.address {
            free = free.min(ADDRESS_MAX.saturating_sub(count(&self.by_address, address)));
        }
        free
    }

    /// Places that may be reserved beside those that are.
    fn may_be_reserved(&self, origin: &UnboundOrigin) -> usize {
        let (mut all, mut of_source, mut of_address) = (0, 0, 0);
        for (other, Reserved { places, .. }) in &self.reserved {
            all += places;
            if other.source == origin.source {
                of_source += places;
            }
            if other.address == origin.address {
                of_address += places;
            }
        }
        let left = |max: usize, reserved| (max / RESERVED_PART).saturating_sub(reserved);
        left(ALL_MAX, all)
            .min(left(origin.source.max(), of_source))
            .min(match origin.address {
                Some(_) => left(ADDRESS_MAX, of_address),
                None => usize::MAX,
            })
    }

    fn take(&mut self, origin: &UnboundOrigin, places: usize) {
        self.all += places;
        *self.by_source.entry(origin.source.clone()).or_default() += places;
        if let Some(address) = origin.address {
            *self.by_address.entry(address).or_default() += places;
        }
    }

    fn give_back(&mut self, origin: &UnboundOrigin, places: usize) {
        self.all = self.all.saturating_sub(places);
        count_down(&mut self.by_source, &origin.source, places);
        if let Some(address) = &origin.address {
            count_down(&mut self.by_address, address, places);
        }
    }

    /// Gives back places whose agent has not come.
    fn expire(&mut self, now: Moment) {
        let over = self
            .reserved
            .extract_if(|_origin, reserved| reserved.until < now);
        let over: Vec<_> = over.collect();
        for (origin, Reserved { places, .. }) in over {
            self.give_back(&origin, places);
        }
    }
}

fn count<K: Eq + Hash>(counts: &HashMap<K, usize>, kind: &K) -> usize {
    counts.get(kind).copied().unwrap_or(0)
}

/// Counts down; removes a kind without connections.
fn count_down<K: Eq + Hash>(counts: &mut HashMap<K, usize>, kind: &K, places: usize) {
    if let Some(count) = counts.get_mut(kind) {
        *count = count.saturating_sub(places);
        if *count == 0 {
            counts.remove(kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment(Duration::ZERO);

    fn from(last: usize, source: UnboundSource) -> UnboundOrigin {
        let last = u8::try_from(last).unwrap();
        UnboundOrigin {
            address: Some([10, 0, 0, last].into()),
            source,
        }
    }

    fn named(name: &str) -> UnboundSource {
        UnboundSource::Certificate(name.into())
    }

    /// How many connections of these origins get places, and the origins that do.
    fn enter(
        places: &mut UnboundPlaces,
        origins: impl Iterator<Item = UnboundOrigin>,
    ) -> Vec<UnboundOrigin> {
        origins.filter(|origin| places.enter(origin, NOW)).collect()
    }

    fn assert_empty(places: &UnboundPlaces) {
        assert!(places.by_address.is_empty() && places.by_source.is_empty());
        assert!(places.all == 0 && places.reserved.is_empty());
    }

    /// Limit (peers): Connections at the agent port that are no lanes yet | 256 in total, 128 per certificate, 64 per
    /// address
    #[test]
    fn unbound_connections_are_capped_in_all_and_per_source() {
        let mut places = UnboundPlaces::default();
        let mut entered = Vec::new();
        for source in 1..=4 {
            let origin = from(source, named(&source.to_string()));
            let many = std::iter::repeat_n(origin.clone(), 2 * ADDRESS_MAX);
            let got = enter(&mut places, many);
            assert_eq!(got.len(), ADDRESS_MAX);
            entered.extend(got);
        }
        assert_eq!(entered.len(), ALL_MAX);
        let unix = UnboundOrigin {
            address: None,
            source: UnboundSource::Stranger,
        };
        assert!(!places.enter(&from(9, UnboundSource::Admitted), NOW) && !places.enter(&unix, NOW));
        places.leave(&entered.pop().unwrap());
        assert!(places.enter(&unix, NOW));
        entered.push(unix);
        for origin in &entered {
            places.leave(origin);
        }
        assert_empty(&places);
    }

    /// Limit (peers): Connections at the agent port that are no lanes yet
    #[test]
    fn a_certificate_gets_half_of_the_unbound_connections() {
        let mut places = UnboundPlaces::default();
        let all = (0..200).map(|last| from(last, named("shared")));
        let mut entered = enter(&mut places, all);
        assert_eq!(entered.len(), CERTIFICATE_MAX);
        let others = [1, 200].into_iter().flat_map(|last| {
            [
                from(last, named("other")),
                from(last, UnboundSource::Stranger),
            ]
        });
        entered.extend(enter(&mut places, others));
        assert_eq!(entered.len(), CERTIFICATE_MAX + 4);
        places.leave(&entered.remove(0));
        assert!(places.enter(&from(200, named("shared")), NOW));
        places.leave(&from(200, named("shared")));
        for origin in &entered {
            places.leave(origin);
        }
        assert_empty(&places);
    }

    /// Agents with tokens have no certificate that could identify them.
    #[test]
    fn half_of_the_places_are_kept_for_addresses_with_a_link() {
        let mut places = UnboundPlaces::default();
        let all = |source: UnboundSource| (0..ALL_MAX).map(move |last| from(last, source.clone()));
        let strangers = enter(&mut places, all(UnboundSource::Stranger));
        assert_eq!(strangers.len(), STRANGERS_MAX);
        let admitted = enter(&mut places, all(UnboundSource::Admitted));
        assert_eq!(admitted.len(), ALL_MAX - STRANGERS_MAX);
    }

    /// Limit (peers): Lanes that servers ask for at once | half of the places for connections that are no lanes yet, of each
    /// address and certificate; 32 from one agent
    #[test]
    fn eight_agents_of_one_address_or_certificate_leave_places_to_others() {
        let one_address = |agent: usize| from(1, named(&agent.to_string()));
        let one_certificate = |agent: usize| from(agent, named("shared"));
        let one_of_both = |_agent: usize| from(1, named("shared"));
        let origins: [&dyn Fn(usize) -> UnboundOrigin; 3] =
            [&one_address, &one_certificate, &one_of_both];
        for origin in origins {
            let mut places = UnboundPlaces::default();
            for agent in 0..8 {
                let asked = places.reserve(&origin(agent), 1000, NOW);
                assert!(asked > 0, "each gets some");
            }
            // Repeating it does not help.
            for _again in 0..100 {
                (0..8).for_each(|agent| {
                    places.reserve(&origin(agent), 1000, NOW);
                });
            }
            let reserved: usize = places.reserved.values().map(|one| one.places).sum();
            assert!(reserved <= CERTIFICATE_MAX / RESERVED_PART, "{reserved}");
            // Beside these each of them opens four lanes without being asked.
            for agent in 0..8 {
                for _lane in 0..Growth::AT_ONCE {
                    assert!(places.enter(&origin(agent), NOW));
                }
            }
            assert!(places.all <= ALL_MAX / 2);
            let other = from(99, named("another"));
            assert_eq!(places.reserve(&other, 1000, NOW), 8);
            assert_eq!(
                enter(&mut places, std::iter::repeat_n(other, 100)).len(),
                64
            );
        }
    }

    #[test]
    fn a_reserved_place_is_taken_once_and_given_back_when_nobody_comes() {
        let (mut places, origin) = (UnboundPlaces::default(), from(1, named("a")));
        assert_eq!(places.reserve(&origin, 3, NOW), 3);
        assert_eq!(places.all, 3);
        assert!(places.enter(&origin, NOW));
        assert_eq!((places.all, places.reserved[&origin].places), (3, 2));
        let later = NOW.after(KEPT).after(Duration::from_nanos(1));
        assert!(places.enter(&origin, later));
        assert_eq!(places.all, 2, "none is reserved any more");
        places.leave(&origin);
        places.leave(&origin);
        assert_empty(&places);
    }

    #[test]
    fn no_place_is_reserved_where_none_is_free() {
        let (mut places, origin) = (UnboundPlaces::default(), from(1, named("a")));
        let entered = enter(&mut places, std::iter::repeat_n(origin.clone(), 100));
        assert_eq!(entered.len(), ADDRESS_MAX);
        assert_eq!(places.reserve(&origin, 3, NOW), 0);
        places.leave(&origin);
        assert_eq!(places.reserve(&origin, 3, NOW), 1);
    }
}
