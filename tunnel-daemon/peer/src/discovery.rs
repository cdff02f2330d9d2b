//! Where peers are: fixed addresses, and names that are looked up again and again.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use adit_config::plan::PeerAddress;
use adit_core::peer::PEERS_MAX;
use adit_net::resolve::{Answer, Resolve, ResolveError, SrvRecord};
use ipnet::IpNet;
use tokio::time::Instant;

/// How long an address is kept that successful lookups no longer name.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Most addresses: a name may have any number, and peers come and go.
pub(crate) const ADDRESSES_MAX: usize = 4 * PEERS_MAX;

/// An address to call, and the name that its certificate must have.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct PeerTarget {
    pub(crate) address: SocketAddr,
    pub(crate) name: String,
}

/// The addresses known so far.
#[derive(Debug)]
pub(crate) struct Known {
    /// When a lookup last named it; `None`: it is configured.
    targets: BTreeMap<PeerTarget, Option<Instant>>,
    networks: Vec<IpNet>,
}

impl Known {
    pub(crate) fn new(peers: &[PeerAddress], networks: &[IpNet]) -> Self {
        let literal = peers.iter().filter_map(|peer| match peer {
            PeerAddress::Literal(address) => Some(*address),
            PeerAddress::Dns { .. } => None,
        });
        let targets = literal.map(|address| {
            let name = address.ip().to_string();
            (PeerTarget { address, name }, None)
        });
        Self {
            targets: targets.collect(),
            networks: networks.to_vec(),
        }
    }

    /// A lookup has succeeded. Returns the addresses outside of the permitted networks, which are not called.
    pub(crate) fn found(
        &mut self,
        name: &str,
        port: u16,
        addresses: &[IpAddr],
        now: Instant,
    ) -> Vec<IpAddr> {
        let mut outside = Vec::new();
        for ip in addresses.iter().map(IpAddr::to_canonical) {
            if !is_inside(&self.networks, ip) {
                outside.push(ip);
                continue;
            }
            let target = PeerTarget {
                address: SocketAddr::new(ip, port),
                name: name.to_owned(),
            };
            let is_new = !self.targets.contains_key(&target);
            if is_new && self.targets.len() >= ADDRESSES_MAX {
                continue;
            }
            let seen = self.targets.entry(target).or_insert(Some(now));
            if seen.is_some() {
                *seen = Some(now);
            }
        }
        // A failed lookup removes nobody, a successful one those that it has not named for long.
        self.targets.retain(|target, seen| {
            let is_of_name = target.name == name && target.address.port() == port;
            !is_of_name || seen.is_none_or(|seen| now.duration_since(seen) < KEPT_FOR)
        });
        outside
    }

    /// The addresses to call.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &PeerTarget> {
        self.targets.keys()
    }
}

/// Whether an address that discovery names may be called: it is inside one of the networks of `--peer-network`.
#[must_use]
pub fn is_inside(networks: &[IpNet], ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    networks.iter().any(|network| network.contains(&ip))
}

/// Resolves any name to one address: a connector then calls it, and expects a certificate of the name.
pub struct Fixed(pub IpAddr);

impl Resolve for Fixed {
    fn lookup_ip<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<IpAddr>> {
        Box::pin(std::future::ready(Ok(vec![self.0])))
    }

    fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
        Box::pin(std::future::ready(Err(ResolveError::NotFound)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(known: &Known) -> Vec<String> {
        known.targets().map(|it| it.address.to_string()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_adds_at_once_and_removes_after_a_minute() {
        let peers = [PeerAddress::Literal("192.0.2.1:8096".parse().unwrap())];
        let networks = ["10.0.0.0/8".parse().unwrap()];
        let mut known = Known::new(&peers, &networks);
        let [a, b, outside] =
            ["10.0.0.1", "10.0.0.2", "198.51.100.1"].map(|ip| ip.parse().unwrap());
        let refused = known.found("peers", 8096, &[a, b, outside], Instant::now());
        assert_eq!(refused, [outside]);
        let all = ["10.0.0.1:8096", "10.0.0.2:8096", "192.0.2.1:8096"];
        assert_eq!(shown(&known), all);
        tokio::time::advance(KEPT_FOR / 2).await;
        known.found("peers", 8096, &[b], Instant::now());
        assert_eq!(shown(&known), all, "the lookup may have been incomplete");
        tokio::time::advance(KEPT_FOR / 2).await;
        known.found("others", 8096, &[], Instant::now());
        assert_eq!(shown(&known), all, "another name says nothing of it");
        known.found("peers", 8096, &[b], Instant::now());
        assert_eq!(shown(&known), ["10.0.0.2:8096", "192.0.2.1:8096"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_with_many_addresses_gets_a_bounded_number() {
        let mut known = Known::new(&[], &["10.0.0.0/8".parse().unwrap()]);
        let many: Vec<IpAddr> = (0..10_000_u32)
            .map(|host| IpAddr::from((0x0a00_0000 + host).to_be_bytes()))
            .collect();
        known.found("peers", 1, &many, Instant::now());
        assert_eq!(known.targets().count(), ADDRESSES_MAX);
    }
}
