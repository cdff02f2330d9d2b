//! The name servers of a resolv.conf, asked by the DNS library.
//!
//! Candidates of a search list are walked here, so that both families of a name come from the same domain and a failing name
//! server is not reported as "no such host". So are the name servers, of which the library asks two side by side and takes the
//! first answer: the second one need not know what the first one does.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use hickory_resolver::Resolver;
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use tokio::time::{Instant, timeout};

use super::answers::Found;
use super::files::ResolvConf;
use super::zones::{Zone, Zoned};
use super::{ResolveError, SrvRecord};
use crate::happy_eyeballs::Race;
use crate::self_sockets::OwnSockets;

/// Longest wait for one answer. Below half a dial's deadline, so that a lost datagram is asked for again.
pub(super) const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// What `options timeout:0` means; Go's value.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Longest time an answer is reused, whatever its TTL: services move, and the Go agent asks every time.
const REUSE_MAX: Duration = Duration::from_secs(10);
/// The same for "no such host": someone is waiting for the name to appear.
const NEGATIVE_REUSE_MAX: Duration = Duration::from_secs(1);
/// Answers that the DNS library keeps for each name server. An answer may have 64 KiB on the wire, and whoever serves a zone can make
/// as many as there are names; [`super::answers`] keeps addresses of many more names.
const ANSWERS_MAX: u64 = 64;
/// Addresses of one name that are kept, half of them for each family that has as many. A dial tries fewer.
pub(super) const ADDRESSES_MAX: usize = 64;
/// Once one family answered with addresses, the other gets this much longer: servers that drop AAAA
/// questions must not cost the whole deadline (RFC 8305, section 3, with room for a slow path).
const OTHER_FAMILY_GRACE: Duration = Duration::from_millis(250);

/// Clients of the name servers.
pub(super) struct NameServers {
    /// In their order.
    clients: Vec<Resolver<Zoned>>,
    /// Where the next lookup begins, with `options rotate`.
    first: Option<AtomicUsize>,
}

impl NameServers {
    /// `port`: where they listen. `own_sockets`: over TCP, past a redirect of this process.
    ///
    /// # Errors
    /// A client cannot be set up.
    pub(super) fn new(
        conf: &ResolvConf,
        port: u16,
        own_sockets: &OwnSockets,
    ) -> Result<Self, ResolveError> {
        let mut opts = ResolverOpts::default();
        opts.use_hosts_file = ResolveHosts::Never;
        opts.timeout = conf.timeout.clamp(ATTEMPT_MIN, ATTEMPT_MAX);
        // The library counts those behind the first one.
        opts.attempts = conf.attempts.saturating_sub(1);
        opts.edns0 = conf.edns0;
        opts.positive_max_ttl = Some(REUSE_MAX);
        opts.negative_max_ttl = Some(NEGATIVE_REUSE_MAX);
        opts.cache_size = ANSWERS_MAX;
        let client = |(address, zone): &(IpAddr, Option<Zone>)| {
            let mut server = if conf.use_vc {
                NameServerConfig::tcp(*address)
            } else {
                NameServerConfig::udp_and_tcp(*address)
            };
            for connection in &mut server.connections {
                connection.port = port;
            }
            Resolver::builder_with_config(
                ResolverConfig::from_name_servers(vec![server]),
                Zoned::new(zone.clone(), own_sockets.clone()),
            )
            .with_options(opts.clone())
            .build()
            .map_err(|cause| ResolveError::Failed(cause.to_string()))
        };
        Ok(Self {
            clients: conf
                .name_servers
                .iter()
                .map(client)
                .collect::<Result<_, _>>()?,
            first: conf.rotate.then(AtomicUsize::default),
        })
    }

    /// Answers that the library keeps for each name server.
    #[cfg(test)]
    pub(super) fn answers_max(&self) -> Vec<u64> {
        let clients = self.clients.iter();
        clients.map(|client| client.options().cache_size).collect()
    }

    /// The addresses of the first of these absolute names that has any.
    pub(super) async fn first_of(&self, names: &[String]) -> Result<Found, ResolveError> {
        let mut failure = ResolveError::NotFound;
        for name in names {
            match self.both_families(name).await {
                Ok(found) => return Ok(found),
                Err(cause) => failure = failure.or_worse(cause),
            }
        }
        Err(failure)
    }

    /// The addresses of an absolute name, IPv6 first. One family is enough.
    async fn both_families(&self, name: &str) -> Result<Found, ResolveError> {
        let v6 = self.records(name, RecordType::AAAA, ip_of);
        let v4 = self.records(name, RecordType::A, ip_of);
        tokio::pin!(v6, v4);
        let (v6, v4) = tokio::select! {
            v6 = &mut v6 => {
                let v4 = if v6.is_ok() { or_give_up(v4).await } else { v4.await };
                (v6, v4)
            }
            v4 = &mut v4 => {
                let v6 = if v4.is_ok() { or_give_up(v6).await } else { v6.await };
                (v6, v4)
            }
        };
        match (v6, v4) {
            (Ok((v6, until)), Ok((v4, other_until))) => {
                let ips = some_of(v6, v4);
                let until = until.min(other_until);
                Ok(Found { ips, until })
            }
            (Ok((ips, until)), Err(cause)) | (Err(cause), Ok((ips, until))) => {
                let ips = some_of(ips, Vec::new());
                // A family that exists but was not heard of is soon asked for again.
                let soon = Instant::now() + NEGATIVE_REUSE_MAX;
                let until = match cause {
                    ResolveError::NotFound => until,
                    _ => until.min(soon),
                };
                Ok(Found { ips, until })
            }
            (Err(one), Err(other)) => Err(one.or_worse(other)),
        }
    }

    /// The records of one kind under an absolute name, never empty, and until when they may be reused.
    pub(super) async fn records<T>(
        &self,
        name: &str,
        kind: RecordType,
        read: impl Fn(&Record) -> Option<T>,
    ) -> Result<(Vec<T>, Instant), ResolveError> {
        let name = Name::from_ascii(name).map_err(|_no_dns_name| ResolveError::NotFound)?;
        let lookup = self.known(&name, kind).await?;
        let records: Vec<T> = lookup.answers().iter().filter_map(read).collect();
        if records.is_empty() {
            Err(ResolveError::NotFound)
        } else {
            let until = Instant::from_std(lookup.valid_until());
            Ok((records, until.min(Instant::now() + REUSE_MAX)))
        }
    }

    /// What the first name server says that says anything. The next one is asked when one has failed, and when all so far have
    /// kept silent for 300 ms.
    async fn known(&self, name: &Name, kind: RecordType) -> Result<Lookup, ResolveError> {
        let attempt = |server| self.said_by(server, name, kind);
        let mut order: Vec<usize> = (0..self.clients.len()).collect();
        if let (Some(first), false) = (&self.first, order.is_empty()) {
            let first = first.fetch_add(1, Relaxed) % order.len();
            order.rotate_left(first);
        }
        let mut servers = Race::new(order, attempt);
        let mut failure = None;
        while let Some((_server, said)) = servers.next().await {
            match said {
                Err(cause) if cause != ResolveError::NotFound => {
                    failure.get_or_insert(cause);
                }
                known => return known,
            }
        }
        Err(failure.unwrap_or(ResolveError::NotFound))
    }

    async fn said_by(
        &self,
        server: usize,
        name: &Name,
        kind: RecordType,
    ) -> Result<Lookup, ResolveError> {
        let dns = self.clients.get(server).ok_or(ResolveError::NotFound)?;
        let said = dns.lookup(name.clone(), kind).await;
        said.map_err(|cause| failure_of(&cause))
    }
}

/// At most [`ADDRESSES_MAX`] addresses of a name, in their order.
fn some_of(mut one: Vec<IpAddr>, mut other: Vec<IpAddr>) -> Vec<IpAddr> {
    one.truncate(ADDRESSES_MAX - other.len().min(ADDRESSES_MAX / 2));
    other.truncate(ADDRESSES_MAX - one.len());
    one.append(&mut other);
    one.shrink_to_fit();
    one
}

async fn or_give_up<T>(
    other: impl Future<Output = Result<T, ResolveError>>,
) -> Result<T, ResolveError> {
    timeout(OTHER_FAMILY_GRACE, other)
        .await
        .unwrap_or(Err(ResolveError::TimedOut))
}

fn ip_of(record: &Record) -> Option<IpAddr> {
    record.data.ip_addr()
}

pub(super) fn srv_of(record: &Record) -> Option<SrvRecord> {
    let RData::SRV(srv) = &record.data else {
        return None;
    };
    let target = srv.target.to_ascii();
    // A lone "." says that the service is decidedly not available here (RFC 2782).
    (target != ".").then_some(SrvRecord {
        priority: srv.priority,
        weight: srv.weight,
        port: srv.port,
        target,
    })
}

fn failure_of(cause: &NetError) -> ResolveError {
    match cause {
        NetError::Dns(DnsError::NoRecordsFound(_)) => ResolveError::NotFound,
        NetError::Dns(_) => ResolveError::Misbehaving,
        NetError::Timeout => ResolveError::TimedOut,
        NetError::Io(io) if io.kind() == io::ErrorKind::TimedOut => ResolveError::TimedOut,
        other => ResolveError::Failed(other.to_string()),
    }
}
