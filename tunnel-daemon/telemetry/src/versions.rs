//! Links by the peer's release: shows which releases a fleet runs.

use std::sync::{Mutex, PoisonError};

use adit_core::wire::metadata::PeerVersion;
use prometheus::IntGaugeVec;

use crate::families::Registrar;
use crate::guard::GaugeGuard;

/// Limit on releases with their own series. Peers report the release, and could report a new one each time.
const VERSIONS_MAX: usize = 16;
/// The label of all releases beyond the limit.
const OTHER: &str = "other";
/// The label of peers that report no release, such as Go peers.
const UNKNOWN: &str = "unknown";

pub(super) struct LinksByVersion {
    links: IntGaugeVec,
    seen: Mutex<Vec<PeerVersion>>,
}

impl LinksByVersion {
    pub(super) fn new(families: &Registrar<'_>) -> Self {
        let help = "Open links, by Adit release of the peer; version is unknown for other peers, such as Go agents";
        Self {
            links: families.gauge_vec("links_by_version", help, &["version"]),
            seen: Mutex::default(),
        }
    }

    pub(super) fn link(&self, version: PeerVersion) -> GaugeGuard {
        let label = match version.as_str() {
            None => UNKNOWN,
            Some(_) if !self.has_series(version) => OTHER,
            Some(said) => said,
        };
        GaugeGuard::new(&self.links.with_label_values(&[label]))
    }

    fn has_series(&self, version: PeerVersion) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = !seen.contains(&version);
        if is_new && seen.len() < VERSIONS_MAX {
            seen.push(version);
            return true;
        }
        !is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hostile peer with a new release in each link must not create unlimited series.
    #[test]
    fn links_are_counted_by_release_with_a_bounded_number_of_releases() {
        let registry = prometheus::Registry::new();
        let links = LinksByVersion::new(&Registrar::new(&registry, "adit_"));
        let read = |label: &str| links.links.with_label_values(&[label]).get();
        let first = links.link(PeerVersion::parse("0.1.0"));
        let go = links.link(PeerVersion::default());
        assert_eq!((read("0.1.0"), read(UNKNOWN)), (1, 1));
        let named = |number: usize| links.link(PeerVersion::parse(&format!("9.{number}")));
        let all: Vec<GaugeGuard> = (0..100).map(named).collect();
        assert_eq!(
            read(OTHER),
            100 - (i64::try_from(VERSIONS_MAX).unwrap() - 1)
        );
        let again = links.link(PeerVersion::parse("0.1.0"));
        assert_eq!(read("0.1.0"), 2);
        drop((first, go, all, again));
        assert_eq!((read("0.1.0"), read(UNKNOWN), read(OTHER)), (0, 0, 0));
    }
}
