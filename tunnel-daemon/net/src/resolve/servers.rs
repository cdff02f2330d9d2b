//! Finding servers by name: addresses (A, AAAA) of a host, or SRV records of a service.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use super::{Resolve, ResolveError, SrvRecord};

/// Addresses taken from one name. A control plane has far fewer servers.
const SERVERS_MAX: usize = 64;

/// One place to connect to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerAddress {
    /// The name to verify in the certificate and to send as SNI: the host as given, or the SRV target
    /// without its final dot.
    pub host: String,
    /// Address and port.
    pub addr: SocketAddr,
    /// Priority of the SRV record, 0 for a host. Servers of a greater number are for when none of a smaller one is
    /// reachable (RFC 2782).
    pub priority: u16,
}

/// The addresses behind `host`, in the order to try them; never empty. A literal address stands for itself. The families of
/// a name alternate, IPv6 first. Within a family the order is random, so that agents spread over servers that DNS lists in
/// a fixed order. `draw(n)` returns a random number below `n`, n > 0.
///
/// # Errors
/// The failure of the lookup.
pub async fn servers_of_host(
    resolver: &dyn Resolve,
    host: &str,
    port: u16,
    draw: impl FnMut(u64) -> u64,
) -> Result<Vec<ServerAddress>, ResolveError> {
    let literal = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .unwrap_or(host);
    if let Ok(ip) = literal.parse() {
        return Ok(addresses(literal, &[ip], (port, 0), draw));
    }
    let ips = resolver.lookup_ip(host).await?;
    let mut found = addresses(host, &ips, (port, 0), draw);
    found.truncate(SERVERS_MAX);
    Ok(found)
}

/// The addresses behind the SRV records of a service (`_konnectivity._tcp.example.org`), in the order to try them; never
/// empty. Ports are those of the records. Lower priorities come first; within a priority the order is random by weight. The
/// addresses of one record are ordered as those of a host. `draw(n)` returns a random number below `n`, n > 0.
///
/// # Errors
/// The failure of the lookup. Targets that do not resolve are left out, unless none does.
pub async fn servers_of_service(
    resolver: &dyn Resolve,
    service: &str,
    mut draw: impl FnMut(u64) -> u64,
) -> Result<Vec<ServerAddress>, ResolveError> {
    let mut found = Vec::new();
    let mut failure = ResolveError::NotFound;
    for record in in_order(resolver.lookup_srv(service).await?, &mut draw) {
        match resolver.lookup_ip(&record.target).await {
            Ok(ips) => {
                let of_record = (record.port, record.priority);
                found.extend(addresses(&record.target, &ips, of_record, &mut draw));
            }
            Err(cause) => failure = failure.or_worse(cause),
        }
        if found.len() >= SERVERS_MAX {
            found.truncate(SERVERS_MAX);
            break;
        }
    }
    if found.is_empty() {
        Err(failure)
    } else {
        Ok(found)
    }
}

fn addresses(
    host: &str,
    ips: &[IpAddr],
    (port, priority): (u16, u16),
    draw: impl FnMut(u64) -> u64,
) -> Vec<ServerAddress> {
    let host = host.strip_suffix('.').unwrap_or(host);
    let mut ips: Vec<IpAddr> = ips.iter().map(IpAddr::to_canonical).collect();
    shuffle(&mut ips, draw);
    let server = |ip| ServerAddress {
        host: host.to_owned(),
        addr: SocketAddr::new(ip, port),
        priority,
    };
    interleave(ips).into_iter().map(server).collect()
}

/// RFC 2782: by priority, then one record repeatedly, drawn with a chance in proportion to its weight. Records without any
/// weight have the same chance, so that agents spread.
fn in_order(mut records: Vec<SrvRecord>, mut draw: impl FnMut(u64) -> u64) -> Vec<SrvRecord> {
    records.truncate(SERVERS_MAX);
    // Weight 0 goes first within a priority, where it is taken only when the draw is 0.
    records.sort_by_key(|record| (record.priority, record.weight));
    let mut ordered = Vec::with_capacity(records.len());
    while let Some(first) = records.first() {
        let priority = first.priority;
        let equals = records
            .iter()
            .take_while(|record| record.priority == priority);
        let weights: Vec<u64> = equals.map(|record| u64::from(record.weight)).collect();
        let all: u64 = weights.iter().sum();
        let at = if all == 0 {
            usize::try_from(draw(weights.len() as u64)).unwrap_or(0)
        } else {
            let drawn = draw(all + 1);
            let mut sum = 0;
            let reached = |weight: &u64| {
                sum += weight;
                sum >= drawn
            };
            weights.iter().position(reached).unwrap_or(0)
        };
        ordered.push(records.remove(at));
    }
    ordered
}

/// Alternates the families, IPv6 first (RFC 8305); within a family the order stays. Duplicates are dropped.
#[must_use]
pub fn interleave(ips: Vec<IpAddr>) -> Vec<IpAddr> {
    let (v6, v4): (Vec<_>, Vec<_>) = ips.into_iter().partition(IpAddr::is_ipv6);
    let alternating = (0..v6.len().max(v4.len())).flat_map(|at| [v6.get(at), v4.get(at)]);
    let mut seen = HashSet::new();
    alternating
        .flatten()
        .copied()
        .filter(|ip| seen.insert(*ip))
        .collect()
}

/// Every order has the same chance (Fisher and Yates). `draw(n)` returns a random number below `n`, n > 0.
fn shuffle<T>(items: &mut [T], mut draw: impl FnMut(u64) -> u64) {
    for last in (1..items.len()).rev() {
        let drawn = usize::try_from(draw(last as u64 + 1)).unwrap_or(last);
        items.swap(last, drawn.min(last));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Answer;
    use super::*;

    /// `node1.` to `node9.` have the address 10.0.0.N; `_p._tcp.x` lists some of them. `all` has six addresses.
    struct Book(Vec<SrvRecord>);

    const ALL: [&str; 6] = [
        "10.0.0.1", "10.0.0.2", "10.0.0.3", "fd::1", "fd::2", "fd::3",
    ];

    impl Resolve for Book {
        fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>> {
            let digit = name
                .trim_end_matches('.')
                .strip_prefix("node")
                .and_then(|d| d.parse().ok());
            let one = digit.map(|d: u8| vec![IpAddr::from([10, 0, 0, d])]);
            let all = || -> Vec<IpAddr> { ALL.map(|ip| ip.parse().unwrap()).to_vec() };
            let ips = one.or_else(|| (name.trim_end_matches('.') == "all").then(all));
            Box::pin(async move { ips.ok_or(ResolveError::NotFound) })
        }

        fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
            Box::pin(async { Ok(self.0.clone()) })
        }
    }

    fn srv(priority: u16, weight: u16, target: &str) -> SrvRecord {
        SrvRecord {
            priority,
            weight,
            port: 8091,
            target: target.to_owned(),
        }
    }

    async fn found(book: &Book, host: &str, drawn: u64) -> Result<Vec<String>, ResolveError> {
        let servers = if host.starts_with('_') {
            servers_of_service(book, host, |below| drawn.min(below - 1)).await?
        } else {
            servers_of_host(book, host, 8132, |below| drawn.min(below - 1)).await?
        };
        let shown = servers
            .into_iter()
            .map(|s| format!("{} {}", s.host, s.addr));
        Ok(shown.collect())
    }

    #[tokio::test]
    async fn literals_and_hosts_keep_the_given_port() {
        let book = Book(vec![]);
        for (host, server) in [
            ("10.1.1.1", "10.1.1.1 10.1.1.1:8132"),
            ("[fd00::1]", "fd00::1 [fd00::1]:8132"),
            ("node3", "node3 10.0.0.3:8132"),
        ] {
            assert_eq!(found(&book, host, 0).await.unwrap(), [server]);
        }
        assert_eq!(found(&book, "other", 0).await, Err(ResolveError::NotFound));
    }

    #[tokio::test]
    async fn a_service_gives_ports_priorities_and_weights() {
        let book = Book(vec![
            srv(2, 0, "node9."),
            srv(1, 10, "node1."),
            srv(1, 30, "node2."),
            srv(1, 0, "gone."),
        ]);
        let [a, b, c] = [1, 2, 9].map(|node| format!("node{node} 10.0.0.{node}:8091"));
        let [least, most] = [[&a, &b, &c], [&b, &a, &c]];
        for (drawn, order) in [(1, least), (u64::MAX, most)] {
            let found = found(&book, "_p._tcp.x", drawn).await.unwrap();
            assert!(found.iter().eq(order), "{found:?}");
        }
        let gone = Book(vec![srv(1, 1, "gone.")]);
        let found = found(&gone, "_p._tcp.x", 0).await;
        assert_eq!(found, Err(ResolveError::NotFound));
    }

    /// Drawing `u64::MAX` keeps the resolver's order; drawing 0 changes it.
    #[tokio::test]
    async fn addresses_of_a_name_are_drawn_within_a_family_and_families_take_turns() {
        let hosts = |list: Vec<String>, port: u16| -> Vec<String> {
            let addrs = list.iter().map(|line| line.rsplit_once(' ').unwrap().1);
            addrs
                .map(|addr| addr.strip_suffix(&format!(":{port}")).unwrap().to_owned())
                .collect()
        };
        let book = Book(vec![srv(1, 0, "all."), srv(2, 0, "node9.")]);
        let given = [
            "[fd::1]", "10.0.0.1", "[fd::2]", "10.0.0.2", "[fd::3]", "10.0.0.3",
        ];
        let drawn = [
            "[fd::1]", "10.0.0.2", "[fd::2]", "10.0.0.3", "[fd::3]", "10.0.0.1",
        ];
        let plain = found(&book, "all", u64::MAX).await.unwrap();
        assert_eq!(hosts(plain, 8132), given);
        let turned = found(&book, "all", 0).await.unwrap();
        assert_eq!(hosts(turned, 8132), drawn);
        let service = hosts(found(&book, "_p._tcp.x", 0).await.unwrap(), 8091);
        assert_eq!(service[..6], drawn);
        let why = "of a lower rank: never moved up";
        assert_eq!(service[6..], ["10.0.0.9"], "{why}");
    }

    #[test]
    fn weights_are_shares() {
        let first_of = |drawn| {
            let records = vec![srv(1, 1, "a"), srv(1, 3, "b")];
            in_order(records, |_| drawn)[0].target.clone()
        };
        assert_eq!([0, 1, 2, 3, 4].map(first_of).join(""), "aabbb");
    }

    #[test]
    fn records_without_weights_are_drawn_evenly() {
        let first_of = |drawn| {
            let records = vec![srv(1, 0, "a"), srv(1, 0, "b"), srv(1, 0, "c")];
            in_order(records, |below| drawn % below)[0].target.clone()
        };
        assert_eq!([0, 1, 2].map(first_of).join(""), "abc");
    }

    #[test]
    fn families_take_turns_from_ipv6_on_and_keep_the_resolvers_order() {
        let parse = |list: &str| -> Vec<IpAddr> {
            list.split_whitespace()
                .map(|ip| ip.parse().unwrap())
                .collect()
        };
        for (resolved, order) in [
            (
                "1.1.1.1 2.2.2.2 ::a 3.3.3.3 ::b",
                "::a 1.1.1.1 ::b 2.2.2.2 3.3.3.3",
            ),
            ("1.1.1.1 1.1.1.1 2.2.2.2", "1.1.1.1 2.2.2.2"),
            ("::a ::b", "::a ::b"),
            ("", ""),
        ] {
            assert_eq!(interleave(parse(resolved)), parse(order));
        }
    }

    /// All 24 sequences of draws; each must give a different order.
    #[test]
    fn each_order_of_a_shuffle_has_the_same_chance() {
        let mut orders = HashSet::new();
        for ways in 0..24 {
            let (mut left, mut items) = (ways, [1, 2, 3, 4]);
            shuffle(&mut items, |below| {
                let drawn = left % below;
                left /= below;
                drawn
            });
            orders.insert(items);
        }
        assert_eq!(orders.len(), 24);
        shuffle(&mut [(); 0], |_| unreachable!("nothing to draw"));
        shuffle(&mut [()], |_| unreachable!("nothing to draw"));
    }
}
