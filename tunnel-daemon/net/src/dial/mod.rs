//! Dialling a target: network, address, resolution, allow-list, connect, all under one deadline.
//!
//! A client's request arrives as two texts of `DIAL_REQ`. A failure leaves as a text that a Go dialler would have written,
//! because clients and servers match on its words.

mod connect;
mod error;

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

use adit_core::destination::{Denied, DestinationList, canonical_ip};
use adit_core::target::{Host, Target};
use adit_core::text::Excerpt;
use tokio::time::{Instant, timeout_at};

pub use connect::{Connect, TcpConnect};
pub use error::{AttemptError, DialError, Network};

use crate::accounts::Accounts;
use crate::happy_eyeballs::Race;
use crate::resolve::{LOOPBACK, Resolve, ResolveError, interleave};
use crate::self_sockets::OwnSockets;
use adit_host::interfaces;

/// Addresses tried for one name. With 300 ms between starts, at most 17 silent addresses are tried in 5 s. Addresses that
/// refuse at once make room for others.
const ADDRESSES_MAX: usize = 32;

/// Which addresses may be dialled.
pub trait Permit: Send + Sync + 'static {
    /// Whether a name may be looked up at all: at least one address that it could have may be dialled.
    ///
    /// # Errors
    /// Why no address may be dialled.
    fn check_lookup(&self, name: &str, port: u16) -> Result<(), Denied>;

    /// Checks an address just before the connect; `name` is the name that was looked up, if any.
    ///
    /// # Errors
    /// Why the address may not be dialled.
    fn check(&self, addr: SocketAddr, name: Option<&str>) -> Result<(), Denied>;
}

impl Permit for DestinationList {
    fn check_lookup(&self, name: &str, port: u16) -> Result<(), Denied> {
        Self::check_lookup(self, name, port)
    }

    fn check(&self, addr: SocketAddr, name: Option<&str>) -> Result<(), Denied> {
        Self::check(self, addr, name)
    }
}

/// Dials targets for tunnels. Cheap to clone; all dials share the resolver and the list.
#[derive(Clone)]
pub struct Dialer<C = TcpConnect> {
    resolver: Arc<dyn Resolve>,
    allowed: Arc<dyn Permit>,
    timeout: Duration,
    connect: C,
}

impl Dialer {
    /// A dialler of real sockets. `timeout` bounds a whole dial, resolution and every address included. The kernel accounts for
    /// the sockets under `agent`, which is empty if unknown. Entries of `classes` are the destination classes. A redirect of
    /// this process leaves the sockets alone.
    #[must_use]
    pub fn accounted(
        resolver: Arc<dyn Resolve>,
        allowed: Arc<dyn Permit>,
        classes: Arc<DestinationList>,
        timeout: Duration,
        accounts: Accounts,
        own_sockets: OwnSockets,
        agent: &str,
    ) -> Self {
        let connect = TcpConnect {
            accounts,
            own_sockets,
            agent: agent.into(),
            allowed: classes,
        };
        Self::with_connect(resolver, allowed, timeout, connect)
    }

    /// The same dialler, with sockets accounted for under `agent`.
    #[must_use]
    pub fn of(&self, agent: &str) -> Self {
        let mut dialer = self.clone();
        dialer.connect.agent = agent.into();
        dialer
    }
}

impl<C: Connect> Dialer<C> {
    /// A dialler with its own way to connect, for tests without a network.
    #[must_use]
    pub fn with_connect(
        resolver: Arc<dyn Resolve>,
        allowed: Arc<dyn Permit>,
        timeout: Duration,
        connect: C,
    ) -> Self {
        Self {
            resolver,
            allowed,
            timeout,
            connect,
        }
    }

    /// Connects to `address` (`host:port`) over `protocol` (`tcp`, `tcp4` or `tcp6`).
    ///
    /// All addresses of a name are tried, IPv6 and IPv4 in turn, a new one every 300 ms or as soon as one
    /// fails; the first connection wins. Each address is checked against the allow-list just before.
    /// A dropped call leaves no socket and no task behind.
    ///
    /// # Errors
    /// [`DialError`], whose text goes into `DIAL_RSP`.
    pub async fn dial(&self, protocol: &str, address: &str) -> Result<C::Stream, DialError> {
        let deadline = Instant::now() + self.timeout;
        let network: Network = protocol.parse()?;
        let target = Target::parse(address).map_err(|flaw| DialError::Address { network, flaw })?;
        let addrs = self.addresses(network, &target, deadline).await?;
        let Some(&first) = addrs.first() else {
            return Err(DialError::NoSuitable {
                network,
                host: target.host.to_string(),
            });
        };
        let name = match &target.host {
            Host::Name(name) if !name.is_empty() => Some(name.as_str()),
            Host::Name(_) | Host::Ip(_) => None,
        };
        let mut race = Race::new(addrs.clone(), |addr| self.attempt(addr, name));
        // In the order they came.
        let mut failures = Vec::new();
        let racing = async {
            while let Some((addr, result)) = race.next().await {
                match result {
                    Ok(connected) => return Some(connected),
                    Err(failure) => failures.push((addr, failure)),
                }
            }
            None
        };
        match timeout_at(deadline, racing).await {
            Ok(Some(stream)) => Ok(stream),
            Ok(None) => Err(error::most_telling(network, first, failures)),
            Err(_elapsed) => {
                // Addresses that have failed are not what timed out.
                let has_failed =
                    |addr: SocketAddr| failures.iter().any(|(failed, _why)| *failed == addr);
                let mut silent = addrs.into_iter().filter(|addr| !has_failed(*addr));
                let addr = silent.next().unwrap_or(first);
                Err(DialError::Timeout { network, addr })
            }
        }
    }

    async fn attempt(
        &self,
        addr: SocketAddr,
        name: Option<&str>,
    ) -> Result<C::Stream, AttemptError> {
        self.allowed
            .check(addr, name)
            .map_err(AttemptError::Denied)?;
        self.connect
            .connect(addr, name)
            .await
            .map_err(AttemptError::Failed)
    }

    /// The addresses to try, in order, canonical and of the families that the network takes.
    async fn addresses(
        &self,
        network: Network,
        target: &Target,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, DialError> {
        let ips = match &target.host {
            Host::Ip(ip) => vec![*ip],
            // Go dials this machine when the host is empty.
            Host::Name(name) if name.is_empty() => LOOPBACK.to_vec(),
            Host::Name(name) => {
                self.allowed
                    .check_lookup(name, target.port)
                    .map_err(|denied| DialError::NameDenied { network, denied })?;
                let failed = |cause| DialError::Lookup {
                    network,
                    host: Excerpt(name).to_string(),
                    cause,
                };
                timeout_at(deadline, self.resolver.lookup_ip(name))
                    .await
                    .unwrap_or(Err(ResolveError::TimedOut))
                    .map_err(failed)?
            }
        };
        let mut ips: Vec<IpAddr> = ips.into_iter().map(canonical_ip).collect();
        ips.retain(|ip| network.takes(*ip));
        let scope = target.zone.as_deref().map_or(0, scope_of);
        let ips = interleave(ips).into_iter().take(ADDRESSES_MAX);
        let addrs = ips.map(|ip| match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, target.port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, target.port, 0, scope).into(),
        });
        Ok(addrs.collect())
    }
}

/// The interface index of a zone. As in Go, a zone that is no interface name may be a number. Any other zone counts as
/// none, and the kernel then refuses to connect.
fn scope_of(zone: &str) -> u32 {
    let number = || zone.parse().unwrap_or_default();
    interfaces::index_of(zone).unwrap_or_else(number)
}

#[cfg(test)]
mod tests;
