//! Flags of peers: other servers of the installation.

use std::num::NonZeroU32;
use std::path::PathBuf;

use ipnet::IpNet;

use super::values::peer_network;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::limits;
use crate::plan::{PeerAddress, PeersPlan, TlsFiles, networks_of};
use crate::units::number;

/// Other servers of the installation. None has a default value of clap's: what is given decides whether there are peers.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Peers")]
pub(super) struct PeerFlags {
    /// Listener for peers, HOST:PORT (:PORT for all addresses); without it this server asks peers, and peers cannot ask it
    #[arg(long, value_name = "HOST:PORT", value_parser = BindAddress::parse)]
    peer_bind: Option<BindAddress>,
    /// Certificate of this server among peers, which it shows as server and as client; required with any other --peer flag
    #[arg(long, value_name = "FILE")]
    peer_cert: Option<PathBuf>,
    /// Key of --peer-cert
    #[arg(long, value_name = "FILE")]
    peer_key: Option<PathBuf>,
    /// CA of peers, at both ends; it must be another one than --cluster-ca-cert and --server-ca-cert
    #[arg(long, value_name = "FILE")]
    peer_ca_cert: Option<PathBuf>,
    /// Certificate revocation lists (PEM) of the CAs in --peer-ca-cert: peers with a revoked certificate are refused, and their
    /// links end; read again whenever the file changes
    #[arg(long, value_name = "FILE")]
    peer_crl: Option<PathBuf>,
    /// Another server of the installation, whose agents this server reaches, too: IP:PORT (IPv6 in brackets), or dns:NAME:PORT for
    /// all addresses of a name; repeatable, at most 64
    #[arg(long = "peer", value_name = "ADDR", value_parser = PeerAddress::parse)]
    peers: Vec<PeerAddress>,
    /// Network of peers: addresses of dns:NAME:PORT are dialled only inside such a network, which must have no loopback or
    /// link-local address; repeatable, at most 64
    #[arg(long = "peer-network", value_name = "CIDR", value_parser = peer_network)]
    peer_networks: Vec<IpNet>,
    /// Name of the installation, at most 64 bytes: servers with another one are refused as peers [default: default]
    #[arg(long, value_name = "NAME")]
    peer_group: Option<String>,
    /// Number of servers that agents should connect to while all peers are connected, at most 64 [default: 2]
    #[arg(long, value_name = "N", value_parser = number(NonZeroU32::MIN..=limits::PEER_AGENT_LINKS_MAX))]
    peer_agent_links: Option<NonZeroU32>,
}

impl PeerFlags {
    /// The plan; `None`: no flag is given. [`crate::plan::ServerSettings::check`] checks the rest.
    pub(super) fn plan(self) -> Result<Option<PeersPlan>, ConfigError> {
        let Some(given) = self.first() else {
            return Ok(None);
        };
        let (Some(cert), Some(key), Some(ca)) = (self.peer_cert, self.peer_key, self.peer_ca_cert)
        else {
            bail!(
                "{given} needs the certificates of peers: give --peer-cert, --peer-key and --peer-ca-cert, or leave all \
                 --peer flags out"
            );
        };
        let (count, max) = (self.peer_networks.len(), limits::PEER_NETWORKS_MAX);
        if count > max {
            bail!("{count} values of --peer-network are too many: at most {max}; join networks");
        }
        let mut named = self.peers.iter();
        if let Some(name) = named.find(|peer| matches!(peer, PeerAddress::Dns { .. }))
            && self.peer_networks.is_empty()
        {
            bail!(
                "--peer {name}: answers of DNS would choose where this server connects; give --peer-network, \
                 the networks of the servers"
            );
        }
        Ok(Some(PeersPlan {
            bind: self.peer_bind,
            tls: TlsFiles {
                cert,
                key,
                client_ca: Some(ca),
            },
            crl: self.peer_crl,
            networks: networks_of(self.peer_networks, &self.peers),
            peers: self.peers,
            group: self
                .peer_group
                .unwrap_or_else(|| limits::PEER_GROUP.to_owned()),
            agent_links: self.peer_agent_links.unwrap_or(limits::PEER_AGENT_LINKS),
        }))
    }

    /// The first flag that is given.
    fn first(&self) -> Option<&'static str> {
        let Self {
            peer_bind,
            peer_cert,
            peer_key,
            peer_ca_cert,
            peer_crl,
            peers,
            peer_networks,
            peer_group,
            peer_agent_links,
        } = self;
        let flags = [
            ("--peer-bind", peer_bind.is_some()),
            ("--peer", !peers.is_empty()),
            ("--peer-network", !peer_networks.is_empty()),
            ("--peer-crl", peer_crl.is_some()),
            ("--peer-group", peer_group.is_some()),
            ("--peer-agent-links", peer_agent_links.is_some()),
            ("--peer-cert", peer_cert.is_some()),
            ("--peer-key", peer_key.is_some()),
            ("--peer-ca-cert", peer_ca_cert.is_some()),
        ];
        let mut given = flags.iter().filter(|(_flag, is_given)| *is_given);
        given.next().map(|(flag, _given)| *flag)
    }
}
