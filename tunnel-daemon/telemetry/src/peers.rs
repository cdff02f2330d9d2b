//! Series of links between servers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::families::{BUCKETS_DIAL, Gauges, Registrar, families};
use crate::labels::{Label as _, PeerAddressState, PeerDial, PeerDirection};

/// Peers with series of their own, in each direction.
const LABELLED_MAX: usize = 64;
/// In the order of [`PeerDial::ALL`].
const RESULTS: [PeerDial; 4] = [
    PeerDial::Opened,
    PeerDial::NotHere,
    PeerDial::Failed,
    PeerDial::Refused,
];
/// The label of all others.
const OTHER: &str = "other";

families! {
    /// Families of links between servers; absent without peers.
    struct PeerFamilies(families) {
        /// Addresses of servers that this one asks (--peer), by state
        addresses: Gauges<PeerAddressState> = families.gauges("peer_addresses", "state"),
        /// Links between this server and others, by server and direction: to, which this server asks, and from, which ask this one
        links: IntGaugeVec = families.gauge_vec("peer_links", &["server", "direction"]),
        /// Keys under which a server that this one asks has agents
        keys: IntGaugeVec = families.gauge_vec("peer_keys", &["server"]),
        /// Dials forwarded between servers, by server, direction and result
        dials: IntCounterVec = families.counter_vec("peer_dials_total", &["server", "direction", "result"]),
        /// Time until a server that this one asks has answered a forwarded dial
        dial_time: HistogramVec = families.histogram_vec("peer_dial_seconds", BUCKETS_DIAL, &["server"]),
        /// Open tunnels between servers, by server and direction
        tunnels: IntGaugeVec = families.gauge_vec("peer_tunnels", &["server", "direction"]),
        /// Payload bytes of tunnels between servers that have ended, both ways, by server and direction
        bytes: IntCounterVec = families.counter_vec("peer_bytes_total", &["server", "direction"]),
        /// Keys announced by a server whose agents have proved something else than the agents here under the same key, or several things
        conflicts: IntCounterVec = families.counter_vec("peer_key_conflicts_total", &["server"]),
    }
}

type LivePeers = HashMap<(Arc<str>, PeerDirection), Weak<PeerSeries>>;

/// The series of all peers.
pub(super) struct PeerMetrics {
    families: PeerFamilies,
    live: Mutex<LivePeers>,
}

/// The series of one peer in one direction; they end with the last user.
pub struct PeerSeries {
    name: Arc<str>,
    direction: PeerDirection,
    owner: Weak<PeerMetrics>,
    /// Open links.
    pub links: IntGauge,
    /// Keys that it has announced.
    pub keys: IntGauge,
    /// Keys of other owners than here.
    pub conflicts: IntCounter,
    /// Open tunnels.
    pub tunnels: IntGauge,
    /// Payload bytes of ended tunnels.
    pub bytes: IntCounter,
    dials: [IntCounter; RESULTS.len()],
    dial_time: Histogram,
}

impl PeerMetrics {
    pub(super) fn register(families: &Registrar<'_>) -> Arc<Self> {
        #[cfg(test)]
        crate::tests::declared::values::<PeerDial>("adit_peer_dials_total");
        Arc::new(Self {
            families: PeerFamilies::declare(families),
            live: Mutex::default(),
        })
    }

    pub(super) fn addresses(&self) -> &Gauges<PeerAddressState> {
        &self.families.addresses
    }

    pub(super) fn of(self: &Arc<Self>, server: &str, direction: PeerDirection) -> Arc<PeerSeries> {
        let mut live = self.lock();
        let of_direction = live.keys().filter(|(_, its)| *its == direction).count();
        let name: Arc<str> = Arc::from(server);
        let key = (Arc::clone(&name), direction);
        let name = if live.contains_key(&key) || of_direction < LABELLED_MAX {
            name
        } else {
            Arc::from(OTHER)
        };
        let key = (Arc::clone(&name), direction);
        if let Some(known) = live.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        let series = Arc::new(self.series(name, direction));
        live.insert(key, Arc::downgrade(&series));
        series
    }

    fn series(self: &Arc<Self>, name: Arc<str>, direction: PeerDirection) -> PeerSeries {
        let families = &self.families;
        let labels = [&*name, direction.as_str()];
        let dials = RESULTS.map(|result| {
            families
                .dials
                .with_label_values(&[labels[0], labels[1], result.as_str()])
        });
        let (keys, dial_time, conflicts) = match direction {
            PeerDirection::To => (
                families.keys.with_label_values(&labels[..1]),
                families.dial_time.with_label_values(&labels[..1]),
                families.conflicts.with_label_values(&labels[..1]),
            ),
            // Not shown: only the server that asks has them.
            PeerDirection::From => unshown(),
        };
        PeerSeries {
            links: families.links.with_label_values(&labels),
            tunnels: families.tunnels.with_label_values(&labels),
            bytes: families.bytes.with_label_values(&labels),
            keys,
            conflicts,
            dials,
            dial_time,
            owner: Arc::downgrade(self),
            name,
            direction,
        }
    }

    fn lock(&self) -> MutexGuard<'_, LivePeers> {
        // Nothing panics while this is held.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unshown() -> (IntGauge, Histogram, IntCounter) {
    let opts = prometheus::HistogramOpts::new("unshown", "unshown");
    (
        IntGauge::new("unshown", "unshown").expect("a valid name"),
        Histogram::with_opts(opts).expect("a valid name"),
        IntCounter::new("unshown", "unshown").expect("a valid name"),
    )
}

impl PeerSeries {
    /// A dial had this result.
    pub fn dial(&self, result: PeerDial) {
        if let Some(count) = self.dials.get(result.index()) {
            count.inc();
        }
    }

    /// Dials with this result so far.
    #[must_use]
    pub fn dials(&self, result: PeerDial) -> u64 {
        self.dials.get(result.index()).map_or(0, IntCounter::get)
    }

    /// The peer has answered a dial after this time.
    pub fn answered(&self, after: Duration) {
        self.dial_time.observe(after.as_secs_f64());
    }
}

impl Drop for PeerSeries {
    fn drop(&mut self) {
        let Some(owner) = self.owner.upgrade() else {
            return;
        };
        let mut live = owner.lock();
        let key = (Arc::clone(&self.name), self.direction);
        // Another one may have taken its place meanwhile.
        if live.get(&key).is_some_and(|known| known.strong_count() > 0) {
            return;
        }
        live.remove(&key);
        let families = &owner.families;
        let labels = [&*self.name, self.direction.as_str()];
        // Errors mean that a series does not exist.
        families.links.remove_label_values(&labels).ok();
        families.tunnels.remove_label_values(&labels).ok();
        families.bytes.remove_label_values(&labels).ok();
        for result in RESULTS {
            let labels = [labels[0], labels[1], result.as_str()];
            families.dials.remove_label_values(&labels).ok();
        }
        if self.direction == PeerDirection::To {
            families.keys.remove_label_values(&labels[..1]).ok();
            families.dial_time.remove_label_values(&labels[..1]).ok();
            families.conflicts.remove_label_values(&labels[..1]).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ServerMetrics;

    fn shown(metrics: &ServerMetrics) -> usize {
        let text = metrics.scrape().text();
        text.lines()
            .filter(|line| line.starts_with("adit_peer_links{"))
            .count()
    }

    /// Limit (operations): Peers with metrics of their own | 64 in each direction; all others count as `other`
    #[test]
    fn at_most_64_peers_have_series_and_only_while_they_are_there() {
        let metrics = ServerMetrics::new(&["default"]);
        assert!(!metrics.scrape().text().contains("adit_peer_"));
        let of = |number: usize| {
            metrics
                .adit()
                .peer(&format!("s{number}"), PeerDirection::To)
        };
        let mut all: Vec<_> = (0..100).map(of).collect();
        for series in &all {
            series.links.inc();
            series.dial(PeerDial::NotHere);
        }
        assert_eq!(shown(&metrics), 65);
        let text = metrics.scrape().text();
        assert!(
            text.contains("adit_peer_links{direction=\"to\",server=\"other\"} 36"),
            "{text}"
        );
        all.drain(..50);
        assert_eq!(shown(&metrics), 15);
        let again = of(1);
        assert_eq!(again.dials(PeerDial::NotHere), 0);
        assert_eq!(shown(&metrics), 16);
        drop((all, again));
        assert!(!metrics.scrape().text().contains("adit_peer_"));
    }
}
