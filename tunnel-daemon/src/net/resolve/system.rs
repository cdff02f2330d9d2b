//! The resolver of this host: `/etc/hosts`, `localhost`, then DNS by `/etc/resolv.conf`.
//!
//! The search list is walked here and not by the DNS library, so that `/etc/hosts` is asked before the
//! search domains, both families of a name come from the same domain, and a failing name server is not
//! reported as "no such host". So are the name servers, which the library asks side by side, taking the
//! first answer: the second one need not know what the first one does; and zones of their addresses, which the
//! library drops. Both files are read again when they changed.

use std::fs::{self, Metadata};
use std::io;
use std::iter::repeat;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use hickory_resolver::{Hosts, Resolver, system_conf};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout};

use super::answers::{Answers, Found};
use super::search::{absolute_names, is_localhost};
use super::turns::Turns;
use super::zones::{self, Zone, Zoned};
use super::{Answer, Resolve, ResolveError, SrvRecord};
use crate::ebpf::exempt::OwnSockets;
use crate::net::race::Race;

/// Lookups under way at once, those of one name counted as one; more wait. A burst of dials must not become a burst at the
/// cluster's DNS, nor take all descriptors.
const LOOKUPS_MAX: usize = 128;
/// How often the files are looked at, at most; Go's value.
const RECHECK: Duration = Duration::from_secs(5);
/// Longest wait for one answer. Below half a dial's deadline, so that a lost datagram is asked for again.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// What `options timeout:0` means; Go's value.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Longest time an answer is reused, whatever its TTL: services move, and the Go agent asks every time.
const REUSE_MAX: Duration = Duration::from_secs(10);
/// The same for "no such host": someone is waiting for the name to appear.
const NEGATIVE_REUSE_MAX: Duration = Duration::from_secs(1);
/// Answers that the DNS library keeps for each name server. An answer may have 64 KiB on the wire, and whoever serves a zone can make
/// as many as there are names; [`Answers`] keeps addresses of many more names.
const ANSWERS_MAX: u64 = 64;
/// Addresses of one name that are kept, half of them for each family that has as many. A dial tries fewer.
const ADDRESSES_MAX: usize = 64;
/// Once one family answered with addresses, the other gets this much longer: servers that drop AAAA
/// questions must not cost the whole deadline (RFC 8305, section 3, with room for a slow path).
const OTHER_FAMILY_GRACE: Duration = Duration::from_millis(250);

/// Resolves as the system is configured to. Those who share one share answers and turns to ask: what must not wait behind the
/// names of others has one of its own.
pub struct SystemResolver {
    files: Files,
    state: ArcSwap<State>,
    next_check: Mutex<Instant>,
    /// Of the files as they are now, if they cannot be used.
    fault: Mutex<Option<Fault>>,
    turns: Arc<Turns>,
}

/// Where the configuration comes from, and how name servers are asked.
#[derive(Clone)]
struct Files {
    resolv_conf: PathBuf,
    hosts: PathBuf,
    /// Port of the name servers; resolv.conf cannot say, so it is 53 outside tests.
    dns_port: u16,
    /// Over TCP, past a redirect of this process.
    own_sockets: OwnSockets,
}

/// Why files cannot be used.
struct Fault {
    cause: ResolveError,
    /// Of files that were read and say nothing of use: they need not be read again before they change.
    stamps: Option<Stamps>,
}

type Stamps = [Option<Stamp>; 2];

/// The configuration as last read.
struct State {
    stamps: Stamps,
    hosts: Hosts,
    search: Vec<String>,
    ndots: usize,
    /// One for each name server, in their order.
    dns: Vec<Resolver<Zoned>>,
    /// Of names as they were asked for, so that the search list is not walked again.
    answers: Answers,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl From<Metadata> for Stamp {
    fn from(meta: Metadata) -> Self {
        Self {
            modified: meta.modified().ok(),
            bytes: meta.len(),
            inode: meta.ino(),
        }
    }
}

impl SystemResolver {
    /// Reads the system's files, with Go's defaults where they are missing (name server 127.0.0.1).
    ///
    /// # Errors
    /// When the DNS client cannot be set up at all.
    pub fn new() -> Result<Self, ResolveError> {
        Self::spared(OwnSockets::off())
    }

    /// As [`Self::new`], for a process whose redirect leaves its questions alone.
    ///
    /// # Errors
    /// As there.
    pub fn spared(own_sockets: OwnSockets) -> Result<Self, ResolveError> {
        Self::from_files(Files {
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            hosts: PathBuf::from("/etc/hosts"),
            dns_port: 53,
            own_sockets,
        })
    }

    fn from_files(files: Files) -> Result<Self, ResolveError> {
        let stamps = files.stamps();
        let state = State::read(&files).or_else(|Fault { cause, .. }| {
            tracing::warn!(%cause, file = %files.resolv_conf.display(), "no usable resolver configuration: asking 127.0.0.1");
            let local = NameServerConfig::udp_and_tcp(IpAddr::V4(Ipv4Addr::LOCALHOST));
            let config = ResolverConfig::from_name_servers(vec![local]);
            State::build(&files, stamps, config, Vec::new(), ResolverOpts::default())
        })?;
        Ok(Self {
            files,
            state: ArcSwap::from_pointee(state),
            next_check: Mutex::new(Instant::now() + RECHECK),
            fault: Mutex::default(),
            turns: Arc::new(Turns::new(LOOKUPS_MAX)),
        })
    }

    /// The configuration, read again when the files changed since. One caller in five seconds pays for
    /// the look at the files; a file that became unusable leaves the old configuration in place, which is said
    /// once.
    async fn current(&self) -> Arc<State> {
        if self.is_check_due() {
            let (files, used) = (self.files.clone(), self.state.load().stamps);
            let useless = self.fault().as_ref().and_then(|fault| fault.stamps);
            let look = move || {
                let stamps = files.stamps();
                let is_known = stamps == used || Some(stamps) == useless;
                (stamps, (!is_known).then(|| State::read(&files)))
            };
            match spawn_blocking(look).await {
                Ok((_, Some(Ok(state)))) => {
                    tracing::info!("resolver configuration changed and was read again");
                    self.state.store(Arc::new(state));
                    *self.fault() = None;
                }
                Ok((_, Some(Err(fault)))) => self.note(fault),
                Ok((stamps, None)) if stamps == used => *self.fault() = None,
                Ok((_, None)) | Err(_) => (),
            }
        }
        self.state.load_full()
    }

    /// Says what is wrong with the files, unless it was so at the last look.
    fn note(&self, fault: Fault) {
        let (mut last, cause) = (self.fault(), &fault.cause);
        if last.as_ref().is_none_or(|last| last.cause != *cause) {
            tracing::warn!(%cause, "changed resolver configuration is unusable: keeping the old one");
        }
        *last = Some(fault);
    }

    fn fault(&self) -> MutexGuard<'_, Option<Fault>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_check_due(&self) -> bool {
        let mut next = self
            .next_check
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = now >= *next;
        if due {
            *next = now + RECHECK;
        }
        due
    }

    async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        let state = self.current().await;
        let fixed = state.fixed_addresses(name);
        if !fixed.is_empty() {
            return Ok(fixed);
        }
        let name = name.to_ascii_lowercase();
        let candidates = absolute_names(&name, &state.search, state.ndots);
        if candidates.is_empty() {
            return Err(ResolveError::NotFound);
        }
        let (turns, asked) = (Arc::clone(&self.turns), Arc::clone(&state));
        let ask = || async move { turns.run(asked.first_of(&candidates)).await };
        state.answers.of(&name, ask).await
    }

    async fn services(&self, name: &str) -> Result<Vec<SrvRecord>, ResolveError> {
        let state = self.current().await;
        let ask = async {
            let mut failure = ResolveError::NotFound;
            for candidate in absolute_names(name, &state.search, state.ndots) {
                match state.records(&candidate, RecordType::SRV, srv_of).await {
                    Ok((records, _until)) => return Ok(records),
                    Err(cause) => failure = failure.or_worse(cause),
                }
            }
            Err(failure)
        };
        self.turns.run(ask).await
    }
}

impl Resolve for SystemResolver {
    fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>> {
        Box::pin(self.addresses(name))
    }

    fn lookup_srv<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
        Box::pin(self.services(name))
    }
}

impl Files {
    fn stamps(&self) -> Stamps {
        [&self.resolv_conf, &self.hosts].map(|path| fs::metadata(path).ok().map(Stamp::from))
    }
}

impl State {
    /// Reads both files. Blocks.
    fn read(files: &Files) -> Result<Self, Fault> {
        // A change while they are read is seen at the next look.
        let before = files.stamps();
        let failed = |cause: &dyn std::fmt::Display, stamps| Fault {
            cause: ResolveError::Failed(format!("{}: {cause}", files.resolv_conf.display())),
            stamps,
        };
        let text = fs::read(&files.resolv_conf).map_err(|cause| failed(&cause, None))?;
        let (text, zones) = zones::cut(&text);
        let (config, opts) =
            system_conf::parse_resolv_conf(text).map_err(|cause| failed(&cause, Some(before)))?;
        Self::build(files, before, config, zones, opts).map_err(|cause| failed(&cause, None))
    }

    /// `stamps` from before the files were read; `zones` of the name servers, in their order.
    fn build(
        files: &Files,
        stamps: Stamps,
        config: ResolverConfig,
        zones: Vec<Option<Zone>>,
        mut opts: ResolverOpts,
    ) -> Result<Self, ResolveError> {
        let (domain, mut search, mut name_servers) = config.into_parts();
        if search.is_empty() {
            search.extend(domain);
        }
        for connection in name_servers
            .iter_mut()
            .flat_map(|server| &mut server.connections)
        {
            connection.port = files.dns_port;
        }
        let ndots = opts.ndots;
        opts.use_hosts_file = ResolveHosts::Never;
        opts.timeout = opts.timeout.clamp(ATTEMPT_MIN, ATTEMPT_MAX);
        opts.positive_max_ttl = Some(REUSE_MAX);
        opts.negative_max_ttl = Some(NEGATIVE_REUSE_MAX);
        opts.cache_size = ANSWERS_MAX;
        let client = |(server, zone): (NameServerConfig, Option<Zone>)| {
            Resolver::builder_with_config(
                ResolverConfig::from_name_servers(vec![server]),
                Zoned::new(zone, files.own_sockets.clone()),
            )
            .with_options(opts.clone())
            .build()
            .map_err(|cause| ResolveError::Failed(cause.to_string()))
        };
        let dns = name_servers
            .into_iter()
            .zip(zones.into_iter().chain(repeat(None)))
            .map(client)
            .collect::<Result<Vec<_>, _>>()?;
        let mut hosts = Hosts::default();
        let read =
            fs::read(&files.hosts).and_then(|text| hosts.read_hosts_conf(io::Cursor::new(text)));
        if let Err(cause) = read {
            tracing::debug!(%cause, file = %files.hosts.display(), "no hosts file");
        }
        let search = search.iter().map(Name::to_ascii).collect();
        Ok(Self {
            stamps,
            hosts,
            search,
            ndots,
            dns,
            answers: Answers::default(),
        })
    }

    /// What needs no DNS: the hosts file, and `localhost`.
    fn fixed_addresses(&self, name: &str) -> Vec<IpAddr> {
        let mut ips = Vec::new();
        if let Ok(parsed) = Name::from_ascii(name.to_ascii_lowercase()) {
            for kind in [RecordType::AAAA, RecordType::A] {
                let found = self
                    .hosts
                    .lookup_static_host(&Query::query(parsed.clone(), kind));
                ips.extend(
                    found
                        .iter()
                        .flat_map(|lookup| lookup.answers())
                        .filter_map(ip_of),
                );
            }
        }
        if ips.is_empty() && is_localhost(name) {
            ips = vec![
                IpAddr::V6(Ipv6Addr::LOCALHOST),
                IpAddr::V4(Ipv4Addr::LOCALHOST),
            ];
        }
        ips
    }

    /// The addresses of the first of these absolute names that has any.
    async fn first_of(&self, names: &[String]) -> Result<Found, ResolveError> {
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
    async fn records<T>(
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
        let mut servers = Race::new((0..self.dns.len()).collect(), attempt);
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
        let dns = self.dns.get(server).ok_or(ResolveError::NotFound)?;
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

fn srv_of(record: &Record) -> Option<SrvRecord> {
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

#[cfg(test)]
mod tests;
