//! Which hosts are reached without a proxy, as Go decides.

use std::net::IpAddr;

/// Whether `NO_PROXY` names the server, by the rules of Go's `httpproxy`: `*`, networks, and addresses or domains with or
/// without a port. A domain covers itself and its subdomains, with a leading dot or `*.` only the subdomains. Loopback is
/// never proxied.
#[must_use]
pub fn is_excepted(host: &str, port: u16, list: &str) -> bool {
    let ip = host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    let host = host.to_ascii_lowercase();
    let names = |entry: &str| {
        if entry == "*" {
            return true;
        }
        if let Ok(network) = entry.parse::<ipnet::IpNet>() {
            return ip.is_some_and(|ip| network.contains(&ip));
        }
        let (name, only) = split_port(entry);
        if name.is_empty() || only.is_some_and(|only| only != port.to_string()) {
            return false;
        }
        if let Ok(address) = name.parse::<IpAddr>() {
            return ip == Some(address.to_canonical());
        }
        let below = name.strip_prefix('*').unwrap_or(name);
        match below.strip_prefix('.') {
            Some(_) => host.ends_with(below),
            None => host == name || host.ends_with(&format!(".{name}")),
        }
    };
    list.to_ascii_lowercase()
        .split(',')
        .map(str::trim)
        .any(|entry| !entry.is_empty() && names(entry))
}

/// Splits as Go does: brackets around IPv6 only together with a port; an empty port is any.
fn split_port(entry: &str) -> (&str, Option<&str>) {
    let split = match entry.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once("]:"),
        None => entry
            .split_once(':')
            .filter(|(_, port)| !port.contains(':')),
    };
    match split {
        Some((name, port)) => (name, Some(port).filter(|port| !port.is_empty())),
        None => (entry, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test table of Go's `httpproxy`, and examples of its documentation.
    ///
    /// Upstream (configuration): `NO_PROXY` follows the rules of Go.
    #[test]
    fn no_proxy_matches_as_in_go() {
        const LIST: &str = "foobar.com, .barbaz.net, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, 10.0.0.0/30, \
            2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, 2002:db8:a::45/64, *.wild.example, Upper.Example";
        for (host, expected) in [
            ("localhost", true),
            ("127.0.0.1", true),
            ("127.0.0.2", true),
            ("::1", true),
            ("::2", false),
            ("192.168.1.1", true),
            ("192.168.1.2", false),
            ("192.168.1.3", true),
            ("192.168.1.4", false),
            ("10.0.0.2", true),
            ("10.0.0.4", false),
            ("2001:db8::52:0:1", true),
            ("2001:db8::52:0:2", false),
            ("2001:db8::52:0:3", true),
            ("2002:db8:a::123", true),
            ("fe80::424b:c8be:1643:a1b6", false),
            ("barbaz.net", false),
            ("www.barbaz.net", true),
            ("foobar.com", true),
            ("www.foobar.com", true),
            ("foofoobar.com", false),
            ("baz.com", false),
            ("localhost.net", false),
            ("local.localhost", false),
            ("barbarbaz.net", false),
            ("wwwbarbaz.net", false),
            ("a.wild.example", true),
            ("wild.example", false),
            ("upper.example", true),
            ("UPPER.example", true),
        ] {
            assert_eq!(is_excepted(host, 80, LIST), expected, "{host}");
        }
        for (host, list, expected) in [
            ("a.example", "", false),
            ("a.example", " , ,", false),
            ("a.example", "x, *", true),
            ("a.example", ":80", false),
            ("a.example", "a.example:", true),
            ("a.example", "a.example:80", true),
            ("a.example", "a.example:8080", false),
            ("1.2.3.4", "::ffff:1.2.3.4", true),
            // Go converts the names of hosts to Punycode, and compares with the list as it is written.
            ("xn--bcher-kva.example", "xn--bcher-kva.example", true),
            ("xn--bcher-kva.example", "b\u{fc}cher.example", false),
        ] {
            assert_eq!(is_excepted(host, 80, list), expected, "{host} {list}");
        }
    }
}
