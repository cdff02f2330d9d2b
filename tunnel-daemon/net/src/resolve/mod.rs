//! Names to addresses: what a resolver must do, the system's resolver, and finding servers by name.

mod cache;
mod concurrency_limit;
mod dns;
mod files;
mod search;
mod servers;
mod system;
mod zones;

use std::net::IpAddr;
use std::pin::Pin;

pub use servers::{ServerAddress, interleave, servers_of_host, servers_of_service};
pub use system::SystemResolver;

/// A boxed answer, so that a resolver can be a trait object.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ResolveError>> + Send + 'a>>;

/// Looks names up. Calls have no deadline of their own: the caller bounds them and may drop them.
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of a name, never empty. Search domains apply unless the name ends with a dot.
    fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>>;

    /// The SRV records of a name (`_service._tcp.domain`), never empty, in no particular order.
    fn lookup_srv<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<SrvRecord>>;
}

/// Where a service is, by RFC 2782.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SrvRecord {
    /// Lower is asked first.
    pub priority: u16,
    /// Share of the load within a priority.
    pub weight: u16,
    /// Port of the service.
    pub port: u16,
    /// Absolute name of the host, with its final dot.
    pub target: String,
}

/// Why a name has no answer. `Display` gives the words that Go puts behind `lookup NAME: `.
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
    /// Of two failures for one name, the one that should not be hidden: "no such host" is final for who
    /// reads it, so it is told only when nothing else went wrong.
    fn or_worse(self, other: Self) -> Self {
        if self == Self::NotFound { other } else { self }
    }
}
