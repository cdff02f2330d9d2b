//! Addresses of this host, in its network namespace, as the kernel lists them now.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// All of them, loopback included; empty where /proc is not mounted.
#[must_use]
pub fn local_addresses() -> Vec<IpAddr> {
    let v4 = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let v6 = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let mut all: Vec<IpAddr> = in_trie(&v4).into_iter().map(IpAddr::from).collect();
    all.extend(in_list(&v6).into_iter().map(IpAddr::from));
    all
}

/// A leaf `|-- ADDRESS`, then its routes; a local address has one that says so. The trie is there once for each table.
fn in_trie(text: &str) -> Vec<Ipv4Addr> {
    let mut found = Vec::new();
    let mut leaf = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            leaf = address.parse().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(leaf.filter(|address| !found.contains(address)));
        }
    }
    found
}

/// 32 hexadecimal digits at the start of each line.
fn in_list(text: &str) -> Vec<Ipv6Addr> {
    text.lines()
        .filter_map(|line| u128::from_str_radix(line.split(' ').next()?, 16).ok())
        .map(Ipv6Addr::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_routes_of_the_trie_are_addresses_and_others_are_not() {
        let trie = "Local:\n  +-- 0.0.0.0/0 2 0 2\n     |-- 127.0.0.0\n        /8 host LOCAL\n        |-- 127.0.0.1\n           /32 host LOCAL\n\
            \x20    |-- 192.0.2.0\n        /24 link UNICAST\n     |-- 192.0.2.7\n        /32 host LOCAL\n        |-- 192.0.2.255\n           /32 link BROADCAST\n";
        let twice = format!("{trie}{trie}");
        assert_eq!(
            in_trie(&twice),
            [[127, 0, 0, 1], [192, 0, 2, 7]].map(Ipv4Addr::from)
        );
    }

    #[test]
    fn the_list_of_ipv6_addresses_is_read() {
        let list = "00000000000000000000000000000001 01 80 10 80       lo\n";
        assert_eq!(in_list(list), [Ipv6Addr::LOCALHOST]);
    }

    #[test]
    fn loopback_is_among_those_of_this_host() {
        assert!(local_addresses().contains(&IpAddr::from([127, 0, 0, 1])));
    }
}
