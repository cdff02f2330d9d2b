//! Targets behind an HTTP proxy. Addresses are judged as if they were dialled. A name is resolved by the proxy, so its address is not
//! known here: it must be on the list by name.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use adit_config::plan::HttpProxy;
use adit_core::destination::DestinationList;
use adit_core::target::{Host, Target};
use adit_kube::no_proxy::is_excepted;
use adit_net::dial::{DialError, Dialer, Network};
use adit_tls::stream::Socket;
use tokio::time::{Instant, timeout_at};

use crate::context::{Dialing, TargetDialer};
use crate::proxy_tunnels::ProxyTunnels;

/// Dials targets through a proxy.
pub struct ProxiedTargets {
    /// Targets that the list permits; for those that need no proxy.
    pub direct: Dialer,
    /// The proxy, which is no target.
    pub to_proxy: Dialer,
    /// Targets that are permitted.
    pub allowed: Arc<DestinationList>,
    /// The proxy.
    pub proxy: HttpProxy,
    /// How it is spoken to.
    pub tunnels: ProxyTunnels,
    /// Hosts that need none, as `NO_PROXY` names them.
    pub no_proxy: String,
    /// Time for a dial.
    pub timeout: Duration,
}

impl TargetDialer for ProxiedTargets {
    fn dial<'a>(&'a self, protocol: &'a str, address: &'a str) -> Dialing<'a> {
        Box::pin(self.dial_target(protocol, address))
    }
}

impl ProxiedTargets {
    async fn dial_target(&self, protocol: &str, address: &str) -> Result<Socket, DialError> {
        let network: Network = protocol.parse()?;
        let target = Target::parse(address).map_err(|flaw| DialError::Address { network, flaw })?;
        let port = target.port;
        let (name, authority) = match &target.host {
            // Empty: this host. A zone is one of this host's.
            Host::Name(name) if name.is_empty() => return self.directly(protocol, address).await,
            // This host as well: a proxy would take it for its own.
            Host::Ip(ip) if ip.is_unspecified() => return self.directly(protocol, address).await,
            Host::Ip(_) if target.zone.is_some() => return self.directly(protocol, address).await,
            Host::Ip(ip) => (ip.to_string(), SocketAddr::new(*ip, port).to_string()),
            Host::Name(name) => (name.clone(), format!("{name}:{port}")),
        };
        if is_excepted(&name, port, &self.no_proxy) {
            return self.directly(protocol, address).await;
        }
        match target.host {
            Host::Ip(ip) if !network.takes(ip) => {
                return Err(DialError::NoSuitable {
                    network,
                    host: name,
                });
            }
            Host::Ip(ip) => {
                let addr = SocketAddr::new(ip, port);
                let denied = |denied| DialError::Denied {
                    network,
                    addr,
                    denied,
                };
                self.allowed.check(addr, None).map_err(denied)?;
            }
            Host::Name(_) => {
                let denied = |denied| DialError::NameDenied { network, denied };
                self.allowed.check_named(&name, port).map_err(denied)?;
            }
        }
        let deadline = Instant::now() + self.timeout;
        let through = async {
            let tcp = self.to_proxy.dial("tcp", &self.proxy.authority()).await?;
            let failed = |addr: SocketAddr, why: String| DialError::Connect {
                network,
                addr,
                cause: io::Error::other(why),
            };
            let addr = tcp.peer_addr();
            let addr = addr.unwrap_or_else(|_gone| SocketAddr::from(([0; 4], self.proxy.port)));
            let opening = self.tunnels.open(tcp, &self.proxy, &authority, true);
            match timeout_at(deadline, opening).await {
                Ok(opened) => opened.map_err(|why| failed(addr, format!("{authority}: {why}"))),
                Err(_elapsed) => Err(DialError::Timeout { network, addr }),
            }
        };
        through.await
    }

    async fn directly(&self, protocol: &str, address: &str) -> Result<Socket, DialError> {
        Ok(Socket::Tcp(self.direct.dial(protocol, address).await?))
    }
}
