//! The target of a dial: host and port.
//!
//! Two parsers of the same text (`DIAL_REQ.address`). The server only needs the host to choose an agent and must pass
//! every address on, so [`Host::of_address`] never fails. The dialling end needs host and port, so [`Target::parse`] is
//! strict and fails with the texts of Go's dialler.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::text::Excerpt;

/// A destination host in canonical form, so that equal hosts compare equal.
///
/// Addresses compare by value (`::1` is `0:0:0:0:0:0:0:1`) and IPv4-mapped IPv6 is IPv4; names are ASCII
/// lower case. Compared with upstream, which compares text, this only widens matches.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Host {
    /// A literal address, never IPv4-mapped.
    Ip(IpAddr),
    /// Any other text, in ASCII lower case. Not checked to be a valid DNS name.
    Name(String),
}

impl Host {
    /// Parses a host without port and brackets. Every text is a host: an address or else a name.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        text.parse::<IpAddr>().map_or_else(
            |_not_an_address| Self::Name(text.to_ascii_lowercase()),
            |ip| Self::Ip(ip.to_canonical()),
        )
    }

    /// The canonical host of a dial address; see [`host_part`].
    #[must_use]
    pub fn of_address(address: &str) -> Self {
        Self::parse(host_part(address))
    }

    /// The host as strategies and grants compare it: without the final dot of an absolute name, so that `example.org.` is
    /// `example.org`. DNS lookups need the dot, which disables search domains.
    #[must_use]
    pub fn without_final_dot(mut self) -> Self {
        if let Self::Name(name) = &mut self
            && name.len() > 1
            && name.ends_with('.')
        {
            name.pop();
        }
        self
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => Excerpt(name).fmt(f),
        }
    }
}

/// The host in a dial address, without port and brackets. Never fails: a text without port is all host.
///
/// Upstream's rules, except that `[::1]` (no port) is parsed correctly. Brackets enclose the host. Otherwise the host
/// ends at a single `:`; several `:` mean a bare IPv6 address. Blanks are kept.
#[must_use]
pub fn host_part(address: &str) -> &str {
    if let Some((_, inside)) = address.split_once('[') {
        return inside.split_once(']').map_or(inside, |(host, _)| host);
    }
    match address.split_once(':') {
        Some((host, rest)) if !rest.contains(':') => host,
        _ => address,
    }
}

/// A parsed dial address: a host and a port.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Target {
    /// Canonical host; an empty name is the dialling machine, as in Go.
    pub host: Host,
    /// Zone of an IPv6 address: interface name or number, as `eth0` of `fe80::1%eth0`. Not checked.
    pub zone: Option<String>,
    /// Port. 0 is accepted here, as in Go; the kernel refuses to connect to it.
    pub port: u16,
}

impl Target {
    /// Parses `host:port`, `[v6]:port`, `[v6%zone]:port`. As in Go, an empty host is the local machine and an empty port is 0.
    ///
    /// # Errors
    /// The texts of Go's `net.SplitHostPort` and port parser, which operators know.
    pub fn parse(address: &str) -> Result<Self, TargetError> {
        let (host, port) = split_host_port(address).map_err(|flaw| TargetError::Address {
            address: Excerpt(address).to_string(),
            flaw,
        })?;
        let port = parse_port(port)?;
        if let Some((ip, zone)) = split_zone(host) {
            return Ok(Self {
                host: Host::Ip(IpAddr::V6(ip).to_canonical()),
                // IPv4 has no zones, and Go drops the zone of an IPv4-mapped address.
                zone: ip.to_ipv4_mapped().is_none().then(|| zone.to_owned()),
                port,
            });
        }
        Ok(Self {
            host: Host::parse(host),
            zone: None,
            port,
        })
    }
}

/// Octets of a name in text form (RFC 1035, section 2.3.4), without a final dot, and of one of its labels.
const NAME_LEN_MAX: usize = 253;
const LABEL_LEN_MAX: usize = 63;

/// Whether a name that a client sends is a host name: labels of letters, digits, hyphens and underscores, with or without a final
/// dot. No other name can be mistaken for one with a port, a path or a user.
#[must_use]
pub fn is_host_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let mut octets = label.bytes();
        let is_fit = octets.all(|octet| octet.is_ascii_alphanumeric() || b"-_".contains(&octet));
        is_fit && (1..=LABEL_LEN_MAX).contains(&label.len())
    };
    let relative = name.strip_suffix('.').unwrap_or(name);
    relative.len() <= NAME_LEN_MAX && relative.split('.').all(is_label)
}

/// Splits an IPv6 address from its zone (RFC 4007); `None` if the zone is empty.
fn split_zone(host: &str) -> Option<(Ipv6Addr, &str)> {
    let (ip, zone) = host.split_once('%')?;
    (!zone.is_empty()).then_some((ip.parse().ok()?, zone))
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, &self.zone) {
            (Host::Ip(ip), Some(zone)) => write!(f, "[{ip}%{}]:{}", Excerpt(zone), self.port),
            (Host::Ip(ip), None) => SocketAddr::new(*ip, self.port).fmt(f),
            (Host::Name(name), _) => write!(f, "{}:{}", Excerpt(name), self.port),
        }
    }
}

/// Why a text is not a dial address. `Display` is Go's text after `dial tcp: `.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TargetError {
    /// The text cannot be split into host and port.
    #[error("address {address}: {flaw}")]
    Address {
        /// Excerpt of the text.
        address: String,
        /// Why the text cannot be split.
        flaw: AddressFlaw,
    },
    /// A number outside 0 to 65535.
    #[error("address {0}: invalid port")]
    PortRange(String),
    /// Not a number. Service names are not looked up.
    #[error("lookup tcp/{0}: unknown port")]
    PortName(String),
}

/// Why a text is not `host:port`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressFlaw {
    /// No `:` where the port should follow.
    #[error("missing port in address")]
    MissingPort,
    /// Too many `:`; usually an IPv6 address without brackets.
    #[error("too many colons in address")]
    TooManyColons,
    /// `[` without its `]`.
    #[error("missing ']' in address")]
    MissingBracket,
    /// A `[` that is not the first character.
    #[error("unexpected '[' in address")]
    UnexpectedOpening,
    /// A second `]`, or one without `[`.
    #[error("unexpected ']' in address")]
    UnexpectedClosing,
}

/// Splits as Go's `net.SplitHostPort` does, with the same errors.
fn split_host_port(address: &str) -> Result<(&str, &str), AddressFlaw> {
    let (before_port, port) = address.rsplit_once(':').ok_or(AddressFlaw::MissingPort)?;
    let host = if let Some(inside) = address.strip_prefix('[') {
        let (host, after) = inside.split_once(']').ok_or(AddressFlaw::MissingBracket)?;
        match after.strip_prefix(':') {
            Some(rest) if rest.contains(':') => return Err(AddressFlaw::TooManyColons),
            Some(_port) => host,
            None => return Err(AddressFlaw::MissingPort),
        }
    } else if before_port.contains(':') {
        return Err(AddressFlaw::TooManyColons);
    } else {
        before_port
    };
    if host.contains('[') || port.contains('[') {
        return Err(AddressFlaw::UnexpectedOpening);
    }
    if host.contains(']') || port.contains(']') {
        return Err(AddressFlaw::UnexpectedClosing);
    }
    Ok((host, port))
}

fn parse_port(text: &str) -> Result<u16, TargetError> {
    if text.is_empty() {
        return Ok(0);
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TargetError::PortName(Excerpt(text).to_string()));
    }
    text.parse()
        .map_err(|_out_of_range| TargetError::PortRange(Excerpt(text).to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Upstream (choice): The host part of an address is found with and without a port, for IPv6, too.
    #[test]
    fn host_part_follows_upstream_and_reads_bracketed_v6_without_port() {
        let full = "fd70:6e61:7465:7761:7265:0000:0000:0001";
        for (address, host) in [
            ("localhost:8080", "localhost"),
            ("localhost", "localhost"),
            ("192.168.0.1:8080", "192.168.0.1"),
            ("192.168.0.1", "192.168.0.1"),
            ("::", "::"),
            ("::1", "::1"),
            (full, full),
            ("[::1]:8080", "::1"),
            ("[::1]", "::1"),
            ("[::]", "::"),
            ("[fd70::1]:443", "fd70::1"),
            (" localhost:8080", " localhost"),
            (" localhost", " localhost"),
            ("[::1", "::1"),
            ("", ""),
            (":80", ""),
            ("[", ""),
        ] {
            assert_eq!(host_part(address), host, "address {address:?}");
        }
    }

    #[test]
    fn hosts_compare_by_value_not_by_spelling() {
        for (a, b) in [
            ("::1", "0:0:0:0:0:0:0:1"),
            ("FD00::A", "fd00:0::a"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("Node1.Example", "node1.example"),
        ] {
            assert_eq!(Host::parse(a), Host::parse(b));
        }
        assert_ne!(Host::parse(" localhost"), Host::parse("localhost"));
        assert_ne!(
            Host::parse("010.0.0.1"),
            Host::parse("10.0.0.1"),
            "octal look-alikes are names"
        );
    }

    #[test]
    fn one_final_dot_of_a_name_is_dropped_for_comparison() {
        let undotted = |text| Host::parse(text).without_final_dot();
        assert_eq!(undotted("Web.Example."), Host::parse("web.example"));
        assert_eq!(undotted("web.example"), Host::parse("web.example"));
        assert_ne!(undotted("web.example.."), Host::parse("web.example"));
        for same in [".", "", "10.0.0.1", "::1"] {
            assert_eq!(undotted(same), Host::parse(same));
        }
        let target = Target::parse("web.example.:443").unwrap();
        assert_eq!(target.to_string(), "web.example.:443", "it is looked up");
    }

    #[test]
    fn targets_without_host_and_port_fail_with_go_error_texts() {
        let target = Target::parse("[::FFFF:1.2.3.4]:443").unwrap();
        assert_eq!(target.to_string(), "1.2.3.4:443");
        assert_eq!(Target::parse("[::1]:0080").unwrap().to_string(), "[::1]:80");
        assert_eq!(
            Target::parse("Web.Example:1").unwrap().to_string(),
            "web.example:1"
        );
        assert_eq!(Target::parse("h:").unwrap().port, 0);
        for (address, text) in [
            ("x", "address x: missing port in address"),
            ("", "address : missing port in address"),
            ("::1", "address ::1: too many colons in address"),
            ("a:b:1", "address a:b:1: too many colons in address"),
            ("[::1]", "address [::1]: missing port in address"),
            ("[::1]x:1", "address [::1]x:1: missing port in address"),
            ("[::1]:1:2", "address [::1]:1:2: too many colons in address"),
            ("[::1:80", "address [::1:80: missing ']' in address"),
            ("a[b:80", "address a[b:80: unexpected '[' in address"),
            ("a]b:80", "address a]b:80: unexpected ']' in address"),
            ("h:65536", "address 65536: invalid port"),
            (
                "h:99999999999999999999",
                "address 99999999999999999999: invalid port",
            ),
            ("h:http", "lookup tcp/http: unknown port"),
            ("h:-1", "lookup tcp/-1: unknown port"),
        ] {
            assert_eq!(Target::parse(address).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn an_ipv6_address_may_have_a_zone() {
        let target = Target::parse("[fe80::1%eth0.7]:80").unwrap();
        assert_eq!(target.host, Host::parse("fe80::1"));
        assert_eq!(target.zone.as_deref(), Some("eth0.7"));
        assert_eq!(target.to_string(), "[fe80::1%eth0.7]:80");
        let mapped = Target::parse("[::ffff:1.2.3.4%1]:80").unwrap();
        assert_eq!(mapped.to_string(), "1.2.3.4:80");
        for name in ["1.2.3.4%eth0", "fe80::1%", "%eth0", "host%1"] {
            let target = Target::parse(&format!("[{name}]:80")).unwrap();
            assert_eq!(target.host, Host::Name(name.to_owned()));
            assert_eq!(target.zone, None);
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_a_parser(address in "\\PC*|[\\[\\]:a1.%\\n]{0,12}") {
            let _ = Target::parse(&address);
            prop_assert!(address.contains(host_part(&address)));
        }

        #[test]
        fn a_target_round_trips_as_text(ip: IpAddr, port: u16) {
            let target = Target { host: Host::Ip(ip.to_canonical()), zone: None, port };
            prop_assert_eq!(Target::parse(&target.to_string()).unwrap(), target.clone());
            prop_assert_eq!(Host::of_address(&target.to_string()), target.host);
        }
    }
}
