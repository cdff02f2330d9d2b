//! Name lookup: the resolver trait, the system's resolver, and servers by name.

mod cache;
mod dns;
mod files;
mod search;
mod servers;
mod system;
mod tunnelled;
mod yielding_slots;
mod zones;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::Pin;

pub use servers::{ServerAddress, interleave, servers_of_host, servers_of_service};
pub use system::SystemResolver;
pub use tunnelled::{Connect, DnsConnection, TunnelledResolver};

/// This machine, in the order to try.
pub(crate) const LOOPBACK: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V4(Ipv4Addr::LOCALHOST),
];

/// A boxed future, so that a resolver can be a trait object.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ResolveError>> + Send + 'a>>;

/// Looks names up. Calls have no deadline of their own: the caller sets one and may drop the call.
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of a name, never empty. Search domains apply unless the name ends with a dot.
    fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>>;

    /// The SRV records of a name (`_service._tcp.domain`), never empty, in no particular order.
    fn lookup_srv<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<SrvRecord>>;
}

/// An SRV record (RFC 2782).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SrvRecord {
    /// Servers of a lower number are tried first.
    pub priority: u16,
    /// Share of the load within a priority.
    pub weight: u16,
    /// Port of the service.
    pub port: u16,
    /// Absolute name of the host, with its final dot.
    pub target: String,
}

/// Why a lookup failed. `Display` is what Go prints after `lookup NAME: `.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ResolveError {
    /// The name does not exist, has no such record, or is no DNS name at all.
    #[error("no such host")]
    NotFound,
    /// No name server answered in time.
    #[error("i/o timeout")]
    TimedOut,
    /// A name server answered, but with a failure.
    #[error("server misbehaving")]
    Misbehaving,
    /// The lookup could not be made; the text says why.
    #[error("{0}")]
    Failed(String),
}

impl ResolveError {
    /// Of two failures for one name the one to report: "no such host" sounds final, so it is reported only without another
    /// failure.
    fn or_worse(self, other: Self) -> Self {
        if self == Self::NotFound { other } else { self }
    }
}
