//! The plan of peers: other servers of the installation, whose agents this server reaches, too.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::parts::{TlsFiles, check_files, check_header_text};
use crate::address::{BindAddress, is_host_name};
use crate::error::{ConfigError, bail};
use crate::limits;

/// Other servers of the installation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeersPlan {
    /// Listener for peers; `None`: this server asks peers, and peers cannot ask it.
    pub bind: Option<BindAddress>,
    /// Certificate and key of this server among peers, and the CA of peers (`client_ca` is always there).
    pub tls: TlsFiles,
    /// Revocation lists of the CA of peers.
    pub crl: Option<PathBuf>,
    /// Where peers are.
    pub peers: Vec<PeerAddress>,
    /// Peers are dialled only inside these networks; those of literal addresses are included.
    pub networks: Vec<IpNet>,
    /// Name of the installation: peers of another one are refused.
    pub group: String,
    /// Number of servers that agents should be linked to while all peers are live.
    pub agent_links: NonZeroU32,
}

/// One `--peer` entry.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum PeerAddress {
    /// One server.
    Literal(SocketAddr),
    /// `dns:NAME:PORT`: each address of the name is a server.
    Dns {
        /// The name.
        name: String,
        /// TCP port.
        port: u16,
    },
}

impl PeerAddress {
    /// Reads `IP:PORT`, `[V6]:PORT` or `dns:NAME:PORT`.
    ///
    /// # Errors
    /// A sentence that names the text and the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let form = "write IP:PORT, [V6]:PORT or dns:NAME:PORT";
        let Some(rest) = text.strip_prefix("dns:") else {
            let address: SocketAddr = text
                .parse()
                .map_err(|_no_address| format!("{text:?} is no address of a server: {form}"))?;
            return literal(address).map_err(|why| format!("{text:?} {why}"));
        };
        let (name, port) = rest
            .rsplit_once(':')
            .ok_or_else(|| format!("{text:?} has no port: {form}"))?;
        if name.parse::<IpAddr>().is_ok() || name.starts_with('[') {
            return Err(format!(
                "{text:?} has an address instead of a name: leave dns: out"
            ));
        }
        if !is_host_name(name) {
            return Err(format!("{name:?} in {text:?} is no host name: {form}"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self::Dns {
                name: name.to_owned(),
                port,
            }),
            _ => Err(format!("{port:?} in {text:?} is not a port (1 to 65535)")),
        }
    }

    /// The network of a literal address, which is that address alone.
    fn network(&self) -> Option<IpNet> {
        match self {
            Self::Literal(address) => Some(address.ip().into()),
            Self::Dns { .. } => None,
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Literal(address) => address.fmt(f),
            Self::Dns { name, port } => write!(f, "dns:{name}:{port}"),
        }
    }
}

/// The peer at this address; an IPv4 address in IPv6 spelling is kept as IPv4.
fn literal(address: SocketAddr) -> Result<PeerAddress, &'static str> {
    let ip = address.ip().to_canonical();
    if address.port() == 0 {
        return Err("has port 0: write the --peer-bind port of that server");
    }
    if ip.is_unspecified() || ip.is_multicast() {
        return Err("is the address of no single server: write one that a server listens on");
    }
    if special(&ip.into()).is_some_and(|kind| kind == LINK_LOCAL) {
        return Err("is link-local: write an address that all servers of the installation reach");
    }
    Ok(PeerAddress::Literal(if ip == address.ip() {
        address
    } else {
        SocketAddr::new(ip, address.port())
    }))
}

/// What this host alone is.
const LOOPBACK: &str = "loopback";
/// What differs by interface, and where clouds have their metadata services.
const LINK_LOCAL: &str = "link-local";

/// The kind of addresses that no other server has, if any is inside the network. Linux takes a connection to an unspecified
/// address for one to itself. IPv6 networks that contain all of IPv4 contain its loopback addresses.
fn special(network: &IpNet) -> Option<&'static str> {
    const SPECIAL: [(&str, &str); 7] = [
        ("0.0.0.0/8", LOOPBACK),
        ("127.0.0.0/8", LOOPBACK),
        ("::/128", LOOPBACK),
        ("::1/128", LOOPBACK),
        ("::ffff:0:0/96", LOOPBACK),
        ("169.254.0.0/16", LINK_LOCAL),
        ("fe80::/10", LINK_LOCAL),
    ];
    let overlaps = |other: &IpNet| network.contains(other) || other.contains(network);
    let mut special = SPECIAL.iter().filter_map(|(text, kind)| {
        let other: IpNet = text.parse().expect("a network, as written above");
        overlaps(&other).then_some(*kind)
    });
    special.next()
}

/// Refuses a network in which discovery may not name peers.
///
/// # Errors
/// Why, and what to write; the network is named by the caller.
pub(crate) fn check_network(network: &IpNet) -> Result<(), String> {
    if network.prefix_len() == 0 {
        return Err(
            "would let discovery name any host: name the networks of the servers".to_owned(),
        );
    }
    special(network).map_or(Ok(()), |kind| {
        Err(format!(
            "has {kind} addresses, where no other server is: name the networks of the servers"
        ))
    })
}

/// The networks, and those of literal addresses.
pub(crate) fn networks_of(mut networks: Vec<IpNet>, peers: &[PeerAddress]) -> Vec<IpNet> {
    for network in peers.iter().filter_map(PeerAddress::network) {
        if !networks.iter().any(|known| known.contains(&network)) {
            networks.push(network);
        }
    }
    networks
}

impl PeersPlan {
    /// Checks the plan alone.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.bind.is_none() && self.peers.is_empty() {
            bail!(
                "no peers: give --peer for the servers to ask, --peer-bind to be asked, or \
                 leave all --peer flags out"
            );
        }
        let (count, max) = (self.peers.len(), limits::PEERS_MAX);
        if count > max {
            bail!(
                "{count} values of --peer are too many: at most {max}; name several servers by dns:NAME:PORT"
            );
        }
        if self.tls.client_ca.is_none() {
            // A listener without it would ask for no certificate.
            bail!("peers prove who they are by certificates: give --peer-ca-cert");
        }
        self.check_group()?;
        self.tls
            .check_files(["--peer-cert", "--peer-key", "--peer-ca-cert"])?;
        check_files([("--peer-crl", self.crl.as_ref())])
    }

    fn check_group(&self) -> Result<(), ConfigError> {
        let (group, max) = (self.group.as_str(), limits::PEER_GROUP_BYTES_MAX);
        if group.is_empty() || group.len() > max {
            bail!(
                "--peer-group has {} bytes: give the installation a name of 1 to {max}",
                group.len()
            );
        }
        check_header_text("--peer-group", group)?;
        // HTTP trims a header's value.
        if group.trim() != group {
            bail!("--peer-group {group:?} begins or ends with a space: leave it out");
        }
        Ok(())
    }

    /// Refuses a CA file that another flag names, too: agents or clients could connect as peers. The same key in two files is
    /// refused where certificates are loaded.
    pub(super) fn check_authority<'a>(
        &self,
        others: impl IntoIterator<Item = (&'static str, Option<&'a PathBuf>)>,
    ) -> Result<(), ConfigError> {
        let Some(own) = &self.tls.client_ca else {
            return Ok(());
        };
        let mut others = others.into_iter();
        let shared = others.find(|(_flag, path)| *path == Some(own));
        shared.map_or(Ok(()), |(flag, _path)| Err(shared_authority(flag, own)))
    }
}

/// The refusal of a server whose peers have the CA of another flag.
#[must_use]
pub fn shared_authority(flag: &str, path: &Path) -> ConfigError {
    ConfigError::new(format!(
        "--peer-ca-cert and {flag} are one authority, {}: its other certificates would be valid for peers; give peers an \
         authority of their own, such as peers-ca of adit pki init",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_peers_are_read_and_shown_in_one_spelling() {
        for (text, shown) in [
            ("10.0.0.1:8096", "10.0.0.1:8096"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("[::1]:8096", "[::1]:8096"),
            ("[fd00::1]:8096", "[fd00::1]:8096"),
            ("[::ffff:10.0.0.1]:8096", "10.0.0.1:8096"),
            (
                "dns:adit-peers.kube-system.svc:8096",
                "dns:adit-peers.kube-system.svc:8096",
            ),
        ] {
            let peer = PeerAddress::parse(text).unwrap();
            assert_eq!(peer.to_string(), shown);
            assert_eq!(PeerAddress::parse(shown), Ok(peer));
        }
    }

    #[test]
    fn a_wrong_address_of_a_peer_is_named_with_what_to_write() {
        for (text, told) in [
            ("", "write IP:PORT"),
            ("10.0.0.1", "write IP:PORT"),
            ("::1:8096", "write IP:PORT"),
            ("server.example:8096", "or dns:NAME:PORT"),
            ("10.0.0.1:0", "has port 0"),
            ("0.0.0.0:8096", "no single server"),
            ("[::]:8096", "no single server"),
            ("[ff02::1]:8096", "no single server"),
            ("169.254.169.254:80", "is link-local"),
            ("[::ffff:169.254.0.1]:80", "is link-local"),
            ("[fe80::1]:8096", "is link-local"),
            ("dns:server.example", "has no port"),
            ("dns::8096", "is no host name"),
            ("dns:a b:8096", "is no host name"),
            ("dns:a:0", "is not a port"),
            ("dns:a:65536", "is not a port"),
            ("dns:10.0.0.1:8096", "leave dns: out"),
            ("dns:[::1]:8096", "leave dns: out"),
            ("dns:::1:8096", "leave dns: out"),
        ] {
            let error = PeerAddress::parse(text).unwrap_err();
            assert!(error.contains(told), "{text:?}: {error}");
        }
    }

    /// Also wider networks, in which such addresses are.
    #[test]
    fn networks_of_peers_have_no_loopback_and_no_link_local_address() {
        let check = |text: &str| check_network(&text.parse().unwrap());
        for text in [
            "10.0.0.0/8",
            "192.0.0.0/3",
            "fd00::/8",
            "2000::/3",
            "192.0.2.1/32",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        for (text, told) in [
            ("0.0.0.0/0", "any host"),
            ("::/0", "any host"),
            ("127.0.0.0/8", "loopback"),
            ("127.1.2.3/32", "loopback"),
            ("0.0.0.0/1", "loopback"),
            ("0.0.0.0/32", "loopback"),
            ("::1/128", "loopback"),
            ("::/64", "loopback"),
            ("::ffff:0:0/95", "loopback"),
            ("169.254.0.0/16", "link-local"),
            ("169.254.169.254/32", "link-local"),
            ("168.0.0.0/5", "link-local"),
            ("fe80::/64", "link-local"),
            ("fe00::/8", "link-local"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn a_plan_without_a_ca_of_peers_is_refused() {
        let plan = PeersPlan {
            bind: Some(BindAddress::new("", 0).unwrap()),
            tls: TlsFiles {
                cert: "/no/cert".into(),
                key: "/no/key".into(),
                client_ca: None,
            },
            crl: None,
            peers: Vec::new(),
            networks: Vec::new(),
            group: limits::PEER_GROUP.to_owned(),
            agent_links: limits::PEER_AGENT_LINKS,
        };
        let error = plan.check().unwrap_err();
        assert!(error.message().contains("give --peer-ca-cert"), "{error}");
    }

    #[test]
    fn a_literal_address_is_a_network_of_its_own_unless_one_contains_it() {
        let peers = [
            "10.0.0.1:1",
            "127.0.0.1:1",
            "127.0.0.1:2",
            "[::1]:1",
            "dns:a:1",
        ];
        let peers = peers.map(|text| PeerAddress::parse(text).unwrap());
        let networks = networks_of(vec!["10.0.0.0/8".parse().unwrap()], &peers);
        let networks = networks.iter().map(ToString::to_string);
        let networks: Vec<String> = networks.collect();
        assert_eq!(networks, ["10.0.0.0/8", "127.0.0.1/32", "::1/128"]);
    }
}
