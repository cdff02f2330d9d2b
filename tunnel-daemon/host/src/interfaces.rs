//! Addresses of this host and their interfaces, in its network namespace, as the kernel lists them now.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A route to fewer bits than a network of an interface has: a VPN's way to everything.
const NETWORK_BITS_MIN: u8 = 8;

/// All addresses, loopback included; empty where /proc is not mounted.
#[must_use]
pub fn local_addresses() -> Vec<IpAddr> {
    let [v4, v6] = lists();
    let mut all: Vec<IpAddr> = in_trie(&v4).into_iter().map(IpAddr::from).collect();
    all.extend(in_list(&v6).into_iter().map(IpAddr::from));
    all
}

/// The networks of all interfaces: hosts that are reached without a router, this one included; empty where /proc is not mounted.
#[must_use]
pub fn local_networks() -> Vec<IpNet> {
    let [v4, v6] = lists();
    let mut all: Vec<IpNet> = networks_in_trie(&v4).into_iter().map(IpNet::from).collect();
    all.extend(networks_in_list(&v6).into_iter().map(IpNet::from));
    all
}

/// The kernel's lists of both families.
fn lists() -> [String; 2] {
    ["/proc/net/fib_trie", "/proc/net/if_inet6"]
        .map(|file| fs::read_to_string(file).unwrap_or_default())
}

/// The index of an interface, by its name; `None` for an interface without an IPv6 address.
#[must_use]
pub fn index_of(name: &str) -> Option<u32> {
    index_in_list(&fs::read_to_string("/proc/net/if_inet6").ok()?, name)
}

/// The host of an address: the address if it is IPv4, else its /64 network, since a host can use every address of its /64.
#[must_use]
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// A leaf `|-- ADDRESS`, then its routes `/BITS SCOPE TYPE`. The trie appears once for each table.
fn routes_in_trie(text: &str) -> impl Iterator<Item = (Ipv4Net, &str)> {
    let mut leaf = None;
    text.lines().filter_map(move |line| {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse().ok();
            return None;
        }
        let (bits, kind) = line.strip_prefix('/')?.split_once(' ')?;
        Some((Ipv4Net::new(leaf?, bits.parse().ok()?).ok()?, kind))
    })
}

/// A local address has a route to itself.
fn in_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    for (route, kind) in routes_in_trie(text) {
        let address = route.addr();
        if kind == "host LOCAL" && route.prefix_len() == 32 && !found.contains(&address) {
            found.push(address);
        }
    }
    found
}

fn networks_in_trie(text: &str) -> Vec<Ipv4Net> {
    routes_in_trie(text)
        .filter(|(_, kind)| matches!(*kind, "host LOCAL" | "link UNICAST"))
        .map(|(network, _)| network)
        .filter(|network| network.prefix_len() >= NETWORK_BITS_MIN)
        .collect()
}

/// 32 hexadecimal digits at the start of each line.
fn in_list(text: &str) -> Vec<Ipv6Addr> {
    let networks = networks_in_list(text).into_iter();
    networks.map(|network| network.addr()).collect()
}

/// The third word is the number of the network's bits, hexadecimal.
fn networks_in_list(text: &str) -> Vec<Ipv6Net> {
    let network = |line: &str| {
        let mut words = line.split_whitespace();
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        let bits = u8::from_str_radix(words.nth(1)?, 16).ok()?;
        Ipv6Net::new(address.into(), bits).ok()
    };
    text.lines().filter_map(network).collect()
}

/// Index and name are the second and the last word of each line; numbers are hexadecimal.
fn index_in_list(text: &str, name: &str) -> Option<u32> {
    let line = text
        .lines()
        .find(|line| line.split_whitespace().next_back() == Some(name))?;
    u32::from_str_radix(line.split_whitespace().nth(1)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_routes_of_fib_trie_are_addresses() {
        let trie = "Local:\n  +-- 0.0.0.0/0 2 0 2\n     |-- 127.0.0.0\n        /8 host LOCAL\n        |-- 127.0.0.1\n           /32 host LOCAL\n\
            \x20    |-- 192.0.2.0\n        /24 link UNICAST\n     |-- 192.0.2.7\n        /32 host LOCAL\n        |-- 192.0.2.255\n           /32 link BROADCAST\n";
        let twice = format!("{trie}{trie}");
        assert_eq!(
            in_trie(&twice),
            [[127, 0, 0, 1], [192, 0, 2, 7]].map(Ipv4Addr::from)
        );
        let networks = networks_in_trie(trie);
        let contains = |address: [u8; 4]| {
            let mut networks = networks.iter();
            networks.any(|network| network.contains(&Ipv4Addr::from(address)))
        };
        for own in [[127, 9, 9, 9], [192, 0, 2, 7], [192, 0, 2, 200]] {
            assert!(contains(own), "{own:?}: {networks:?}");
        }
        assert!(!contains([192, 0, 3, 1]), "{networks:?}");
        let of_a_vpn = "Main:\n  |-- 0.0.0.0\n     /1 link UNICAST\n     /0 universe UNICAST\n";
        assert!(networks_in_trie(of_a_vpn).is_empty());
    }

    #[test]
    fn the_list_of_ipv6_addresses_is_read() {
        let list = "00000000000000000000000000000001 01 80 10 80       lo\n";
        assert_eq!(in_list(list), [Ipv6Addr::LOCALHOST]);
        let list = "20010db8000000010000000000000007 02 40 00 80 eth0\n";
        let [network] = networks_in_list(list)[..] else {
            panic!("one network");
        };
        assert_eq!(network.trunc(), "2001:db8:0:1::/64".parse().unwrap());
    }

    #[test]
    fn interface_index_is_read_from_the_address_list() {
        let list = "00000000000000000000000000000001 01 80 10 80       lo\n\
            fe800000000000000000000000000001 1f 40 20 80 eth0.7\n";
        assert_eq!(index_in_list(list, "lo"), Some(1));
        assert_eq!(index_in_list(list, "eth0.7"), Some(31));
        assert_eq!(index_in_list(list, "eth0"), None);
    }

    #[test]
    fn loopback_is_among_the_addresses_of_this_host() {
        assert!(local_addresses().contains(&IpAddr::from([127, 0, 0, 1])));
    }
}
