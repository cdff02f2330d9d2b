//! Addresses to listen on, from those of flags.

use std::net::SocketAddr;

use anyhow::Context as _;

use adit_config::address::{BindAddress, BindHost};
use adit_net::listen::ListenAddr;

/// Resolves a flag's address to an address to listen on.
///
/// # Errors
/// A host name has no address.
pub(crate) fn listen_addr(bind: &BindAddress) -> anyhow::Result<ListenAddr> {
    Ok(match &bind.host {
        BindHost::Any => ListenAddr::AnyTcp(bind.port),
        BindHost::Ip(ip) => ListenAddr::Tcp(SocketAddr::new(*ip, bind.port)),
        BindHost::Name(name) => {
            let mut found = std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), bind.port))
                .with_context(|| format!("cannot resolve {name}"))?;
            ListenAddr::Tcp(
                found
                    .next()
                    .with_context(|| format!("{name} has no address"))?,
            )
        }
    })
}

/// Like [`listen_addr`], for listeners that take a socket address; any interface means both families.
///
/// # Errors
/// A host name has no address.
pub(crate) fn socket_addr(bind: &BindAddress) -> anyhow::Result<SocketAddr> {
    Ok(match listen_addr(bind)? {
        ListenAddr::Tcp(address) => address,
        ListenAddr::AnyTcp(port) => SocketAddr::from((any_address(), port)),
        ListenAddr::Unix(..) => anyhow::bail!("{bind} is no TCP address"),
    })
}

fn any_address() -> std::net::IpAddr {
    let v6 = std::net::Ipv6Addr::UNSPECIFIED;
    // Hosts without IPv6 refuse this socket; such hosts listen on IPv4 only.
    if std::net::TcpListener::bind((v6, 0)).is_ok() {
        v6.into()
    } else {
        std::net::Ipv4Addr::UNSPECIFIED.into()
    }
}
