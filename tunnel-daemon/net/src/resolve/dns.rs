//! The name servers of a resolv.conf, asked by the DNS library.
//!
//! The library asks one name server one question, with retries and TCP, and caches the answer. The rest is done here, since
//! the library
//! - reports the last failure of a search list: behind a failing name server that would be "no such host",
//! - waits for both families of a name, however late the second one is,
//! - asks name servers side by side, or stays with the first one where that fails or is silent.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::{Either, select};
use hickory_resolver::Resolver;
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::runtime::RuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use tokio::time::{Instant, timeout};

use super::cache::Found;
use super::files::ResolvConf;
use super::zones::{Zone, ZonedRuntime};
use super::{ResolveError, SrvRecord};
use crate::happy_eyeballs::Race;
use crate::self_sockets::OwnSockets;

/// Longest wait for one answer. Below half a dial's deadline, so that a lost datagram is asked for again.
pub(super) const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// What `options timeout:0` means; Go's value.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Longest time an answer is reused, whatever its TTL: services move, and the Go agent asks every time.
const REUSE_MAX: Duration = Duration::from_secs(10);
/// The same for "no such host": a caller may wait for the name to appear.
const NEGATIVE_REUSE_MAX: Duration = Duration::from_secs(1);
/// Answers that the DNS library keeps for each name server. An answer may have 64 KiB on the wire, and the owner of a zone
/// can make one for every name; [`super::cache`] keeps addresses of many more names.
const ANSWERS_MAX: u64 = 64;
/// Addresses of one name that are kept, half of each family if both have enough. A dial tries fewer.
pub(super) const ADDRESSES_MAX: usize = 64;
/// Once one family answered with addresses, the other gets this much longer: servers that drop AAAA
/// questions must not cost the whole deadline (RFC 8305, section 3, with room for a slow path).
const OTHER_FAMILY_GRACE: Duration = Duration::from_millis(250);

/// Clients of the name servers, which connect as `R` does.
pub(super) struct NameServers<R: RuntimeProvider = ZonedRuntime> {
    /// In the order of the file.
    clients: Vec<Resolver<R>>,
    /// `options rotate`.
    rotate: bool,
    /// Where the next question begins, with `options rotate`.
    next: AtomicUsize,
}

impl NameServers {
    /// `port`: of the name servers. `own_sockets`: lets TCP connections bypass a redirect of this process.
    ///
    /// # Errors
    /// A client cannot be set up.
    pub(super) fn new(
        conf: &ResolvConf,
        port: u16,
        own_sockets: &OwnSockets,
    ) -> Result<Self, ResolveError> {
        let mut opts = options();
        opts.timeout = conf.timeout.clamp(ATTEMPT_MIN, ATTEMPT_MAX);
        // The library does not count the first attempt.
        opts.attempts = conf.attempts.saturating_sub(1);
        opts.edns0 = conf.edns0;
        let client = |(address, zone): &(IpAddr, Option<Zone>)| {
            let mut server = if conf.use_vc {
                NameServerConfig::tcp(*address)
            } else {
                NameServerConfig::udp_and_tcp(*address)
            };
            for connection in &mut server.connections {
                connection.port = port;
            }
            let config = ResolverConfig::from_name_servers(vec![server]);
            let runtime = ZonedRuntime::new(zone.clone(), own_sockets.clone());
            let client = Resolver::builder_with_config(config, runtime).with_options(opts.clone());
            client.build()
        };
        let clients = conf.name_servers.iter().map(client);
        Ok(Self {
            clients: clients.collect::<Result<_, _>>().map_err(failure_of)?,
            rotate: conf.rotate,
            next: AtomicUsize::new(0),
        })
    }
}

/// What all clients have in common.
fn options() -> ResolverOpts {
    let mut opts = ResolverOpts::default();
    opts.use_hosts_file = ResolveHosts::Never;
    opts.positive_max_ttl = Some(REUSE_MAX);
    opts.negative_max_ttl = Some(NEGATIVE_REUSE_MAX);
    opts.cache_size = ANSWERS_MAX;
    opts
}

impl<R: RuntimeProvider> NameServers<R> {
    /// One name server, asked over TCP by connections of `runtime`; each attempt takes at most `attempt`.
    ///
    /// # Errors
    /// The client cannot be set up.
    pub(super) fn over_tcp(
        server: SocketAddr,
        runtime: R,
        attempt: Duration,
    ) -> Result<Self, ResolveError> {
        let mut opts = options();
        opts.timeout = attempt;
        // The connection may have been closed while it waited.
        opts.attempts = 1;
        let mut config = NameServerConfig::tcp(server.ip());
        for connection in &mut config.connections {
            connection.port = server.port();
        }
        let config = ResolverConfig::from_name_servers(vec![config]);
        let client = Resolver::builder_with_config(config, runtime).with_options(opts);
        Ok(Self {
            clients: vec![client.build().map_err(failure_of)?],
            rotate: false,
            next: AtomicUsize::new(0),
        })
    }

    /// Answers that the library keeps for each name server.
    #[cfg(test)]
    pub(super) fn answers_max(&self) -> Vec<u64> {
        let clients = self.clients.iter();
        clients.map(|client| client.options().cache_size).collect()
    }

    /// The addresses of the first of these names that has any.
    pub(super) async fn addresses(&self, names: &[Name]) -> Result<Found, ResolveError> {
        first_of(names, |name| self.both_families(name)).await
    }

    /// The SRV records of the first of these names that has any.
    pub(super) async fn services(&self, names: &[Name]) -> Result<Vec<SrvRecord>, ResolveError> {
        let records = first_of(names, |name| self.records(name, RecordType::SRV, srv_of));
        Ok(records.await?.0)
    }

    /// The addresses of a name, IPv6 first. One family is enough.
    async fn both_families(&self, name: &Name) -> Result<Found, ResolveError> {
        let v6 = pin!(self.records(name, RecordType::AAAA, ip_of));
        let v4 = pin!(self.records(name, RecordType::A, ip_of));
        let (first, other) = match select(v6, v4).await {
            Either::Left((v6, v4)) => (v6, v4),
            Either::Right((v4, v6)) => (v4, v6),
        };
        let other = if first.is_ok() {
            let other = timeout(OTHER_FAMILY_GRACE, other).await;
            other.unwrap_or(Err(ResolveError::TimedOut))
        } else {
            other.await
        };
        match (first, other) {
            (Ok((mut ips, until)), Ok((more, other_until))) => {
                ips.extend(more);
                Ok(Found {
                    ips: bounded(ips),
                    until: until.min(other_until),
                })
            }
            (Ok((ips, until)), Err(cause)) | (Err(cause), Ok((ips, until))) => {
                // A family that exists but did not answer is soon asked for again.
                let soon = Instant::now() + NEGATIVE_REUSE_MAX;
                let is_missing = cause == ResolveError::NotFound;
                Ok(Found {
                    ips: bounded(ips),
                    until: if is_missing { until } else { until.min(soon) },
                })
            }
            (Err(one), Err(other)) => Err(one.or_worse(other)),
        }
    }

    /// The records of one kind under a name, never empty, and until when they may be reused.
    async fn records<T>(
        &self,
        name: &Name,
        kind: RecordType,
        read: impl Fn(&Record) -> Option<T>,
    ) -> Result<(Vec<T>, Instant), ResolveError> {
        let answer = self.answer(name, kind).await?;
        let records: Vec<T> = answer.answers().iter().filter_map(read).collect();
        if records.is_empty() {
            return Err(ResolveError::NotFound);
        }
        let until = Instant::from_std(answer.valid_until());
        Ok((records, until.min(Instant::now() + REUSE_MAX)))
    }

    /// The first answer of a name server, "no such host" included. The next server is asked when one has failed, and when all
    /// so far have kept silent for 300 ms.
    async fn answer(&self, name: &Name, kind: RecordType) -> Result<Lookup, ResolveError> {
        let mut clients: Vec<_> = self.clients.iter().collect();
        if self.rotate && !clients.is_empty() {
            let next = self.next.fetch_add(1, Relaxed) % clients.len();
            clients.rotate_left(next);
        }
        let mut answers = Race::new(clients, |client| client.lookup(name.clone(), kind));
        let mut failure = None;
        while let Some((_client, answer)) = answers.next().await {
            match answer.map_err(failure_of) {
                Err(cause) if cause != ResolveError::NotFound => {
                    failure.get_or_insert(cause);
                }
                answer => return answer,
            }
        }
        Err(failure.unwrap_or(ResolveError::NotFound))
    }
}

/// What `ask` finds for the first of these names that has anything.
async fn first_of<'a, T, F>(
    names: &'a [Name],
    ask: impl Fn(&'a Name) -> F,
) -> Result<T, ResolveError>
where
    F: Future<Output = Result<T, ResolveError>>,
{
    let mut failure = ResolveError::NotFound;
    for name in names {
        match ask(name).await {
            Ok(found) => return Ok(found),
            Err(cause) => failure = failure.or_worse(cause),
        }
    }
    Err(failure)
}

/// IPv6 first, and at most [`ADDRESSES_MAX`]: half of each family if both have enough.
fn bounded(ips: Vec<IpAddr>) -> Vec<IpAddr> {
    let (mut ips, mut v4): (Vec<_>, Vec<_>) = ips.into_iter().partition(IpAddr::is_ipv6);
    ips.truncate(ADDRESSES_MAX - v4.len().min(ADDRESSES_MAX / 2));
    v4.truncate(ADDRESSES_MAX - ips.len());
    ips.append(&mut v4);
    ips.shrink_to_fit();
    ips
}

fn ip_of(record: &Record) -> Option<IpAddr> {
    record.data.ip_addr()
}

fn srv_of(record: &Record) -> Option<SrvRecord> {
    let RData::SRV(srv) = &record.data else {
        return None;
    };
    let target = srv.target.to_ascii();
    // A lone "." says that the service is not available (RFC 2782).
    (target != ".").then_some(SrvRecord {
        priority: srv.priority,
        weight: srv.weight,
        port: srv.port,
        target,
    })
}

fn failure_of(cause: NetError) -> ResolveError {
    match cause {
        NetError::Dns(DnsError::NoRecordsFound(_)) => ResolveError::NotFound,
        NetError::Dns(_) => ResolveError::Misbehaving,
        NetError::Timeout => ResolveError::TimedOut,
        NetError::Io(io) if io.kind() == io::ErrorKind::TimedOut => ResolveError::TimedOut,
        other => ResolveError::Failed(other.to_string()),
    }
}
