//! The resolver of this host: `/etc/hosts`, `localhost`, then DNS by `/etc/resolv.conf`. Both files are read again when they
//! changed.

use std::fs::{self, Metadata};
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use hickory_resolver::proto::rr::RecordType;
use tokio::time::Instant;

use super::answers::Answers;
use super::dns::{NameServers, srv_of};
use super::files::{HostsFile, Problems, ResolvConf, host_key, read_hosts};
use super::search::{absolute_names, is_localhost};
use super::turns::Turns;
use super::{Answer, Resolve, ResolveError, SrvRecord};
use crate::self_sockets::OwnSockets;
use adit_tls::blocking;
use adit_tls::reread::Reread;

/// Lookups under way at once, those of one name counted as one; more wait. A burst of dials must not become a burst at the
/// cluster's DNS, nor take all descriptors.
const LOOKUPS_MAX: usize = 128;
/// How often the files are looked at, at most; Go's value.
const RECHECK: Duration = Duration::from_secs(5);

/// Resolves as the system is configured to.
pub struct SystemResolver {
    config: Arc<Config>,
    answers: Answers,
    turns: Arc<Turns>,
}

/// The files and what they said last.
struct Config {
    files: Files,
    state: ArcSwap<State>,
    next_check: Mutex<Instant>,
    reread: Reread,
    /// How often that was asked when the files were looked at last.
    asks: AtomicU64,
    last: Mutex<Last>,
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

/// Of the last reading.
#[derive(Default)]
struct Last {
    /// The files need not be read again before they change. `None`: one could not be read.
    stamps: Option<Stamps>,
    /// Why resolv.conf cannot be used.
    fault: Option<ResolveError>,
    problems: Vec<Problems>,
}

type Stamps = [Option<Stamp>; 2];

/// Both files, read.
struct Reading {
    /// From before they were read: a change meanwhile is seen at the next look.
    stamps: Option<Stamps>,
    conf: ResolvConf,
    /// `None`: the file is there and cannot be read.
    hosts: Option<HostsFile>,
    problems: Vec<Problems>,
    /// Why `conf` has no name server.
    fault: Option<ResolveError>,
}

/// The configuration in use.
struct State {
    /// Greater than those before.
    generation: u64,
    conf: ResolvConf,
    hosts: Arc<HostsFile>,
    search: Vec<String>,
    dns: NameServers,
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
        Self::spared(OwnSockets::off(), Reread::default())
    }

    /// As [`Self::new`], for a process whose redirect leaves its questions alone. The files are looked at again 5 s after the last
    /// look, and before the next lookup when `reread` is asked.
    ///
    /// # Errors
    /// As there.
    pub fn spared(own_sockets: OwnSockets, reread: Reread) -> Result<Self, ResolveError> {
        let files = Files {
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            hosts: PathBuf::from("/etc/hosts"),
            dns_port: 53,
            own_sockets,
        };
        Self::from_files(files, reread)
    }

    fn from_files(files: Files, reread: Reread) -> Result<Self, ResolveError> {
        let config = Arc::new(Config::new(files, reread)?);
        Ok(Self::of(config))
    }

    fn of(config: Arc<Config>) -> Self {
        Self {
            config,
            answers: Answers::default(),
            turns: Arc::new(Turns::new(LOOKUPS_MAX)),
        }
    }

    /// Another one of the same files, with answers and turns to ask of its own: its names do not wait behind those of this one.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self::of(Arc::clone(&self.config))
    }

    async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        let state = self.config.current().await;
        let fixed = state.fixed_addresses(name);
        if !fixed.is_empty() {
            return Ok(fixed);
        }
        let name = name.to_ascii_lowercase();
        let candidates = absolute_names(&name, &state.search, state.conf.ndots);
        if candidates.is_empty() {
            return Err(ResolveError::NotFound);
        }
        let (turns, asked) = (Arc::clone(&self.turns), Arc::clone(&state));
        let ask = || async move { turns.run(asked.dns.first_of(&candidates)).await };
        self.answers.of(state.generation, &name, ask).await
    }

    async fn services(&self, name: &str) -> Result<Vec<SrvRecord>, ResolveError> {
        let state = self.config.current().await;
        let ask = async {
            let mut failure = ResolveError::NotFound;
            for candidate in absolute_names(name, &state.search, state.conf.ndots) {
                let records = state.dns.records(&candidate, RecordType::SRV, srv_of);
                match records.await {
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

impl Config {
    /// Reads the files. What cannot be used of them is logged, and the defaults are taken for it.
    fn new(files: Files, reread: Reread) -> Result<Self, ResolveError> {
        let mut reading = Reading::of(&files);
        let mut last = Last::default();
        last.take(&mut reading);
        if let Some(cause) = &last.fault {
            tracing::warn!(%cause, "no usable name server: asking 127.0.0.1");
            let local = Ipv4Addr::LOCALHOST.into();
            reading.conf.name_servers.push((local, None));
        }
        let hosts = Arc::new(reading.hosts.unwrap_or_default());
        let state = State::new(reading.conf, hosts, &files, 0)?;
        Ok(Self {
            files,
            state: ArcSwap::from_pointee(state),
            next_check: Mutex::new(Instant::now() + RECHECK),
            asks: AtomicU64::new(reread.asks()),
            reread,
            last: Mutex::new(last),
        })
    }

    /// The configuration, read again when the files changed since. One caller in five seconds pays for the look at the files.
    async fn current(&self) -> Arc<State> {
        if self.is_check_due() {
            self.look().await;
        }
        self.state.load_full()
    }

    /// Reads the files again if they changed. One that became unusable leaves in place what it said before, which is logged once.
    async fn look(&self) {
        let (files, known) = (self.files.clone(), self.last().stamps);
        let look = move || (known != Some(files.stamps())).then(|| Reading::of(&files));
        match blocking::run(look).await {
            Ok(Some(reading)) => self.take(reading),
            Ok(None) => (),
            // The old configuration stays in use; the next look is 5 s away.
            Err(error) => tracing::warn!(%error, "cannot look at the resolver configuration"),
        }
    }

    fn take(&self, mut reading: Reading) {
        let mut last = self.last();
        let fault_before = last.fault.clone();
        last.take(&mut reading);
        let old = self.state.load();
        let conf = match last.fault {
            None => reading.conf,
            Some(_) => old.conf.clone(),
        };
        let hosts = reading
            .hosts
            .map_or_else(|| Arc::clone(&old.hosts), Arc::new);
        let is_changed = conf != old.conf || hosts != old.hosts;
        if is_changed {
            match State::new(conf, hosts, &self.files, old.generation + 1) {
                Ok(state) => self.state.store(Arc::new(state)),
                Err(cause) => (last.fault, last.stamps) = (Some(cause), None),
            }
        }
        match &last.fault {
            Some(cause) if fault_before.as_ref() != Some(cause) => {
                tracing::warn!(%cause, "changed resolver configuration is unusable: keeping the old one");
            }
            None if is_changed || fault_before.is_some() => {
                tracing::info!("resolver configuration changed and was read again");
            }
            _ => (),
        }
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_check_due(&self) -> bool {
        let mut next = self
            .next_check
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let asks = self.reread.asks();
        let due = self.asks.swap(asks, Relaxed) != asks || now >= *next;
        if due {
            *next = now + RECHECK;
        }
        due
    }
}

impl Last {
    /// Takes all but the contents of the files, and warns of items that are ignored, unless the last reading had them.
    fn take(&mut self, reading: &mut Reading) {
        self.stamps = reading.stamps;
        self.fault = reading.fault.take();
        let before = mem::replace(&mut self.problems, mem::take(&mut reading.problems));
        for (index, problems) in self.problems.iter().enumerate() {
            problems.warn(before.get(index));
        }
    }
}

impl Files {
    fn stamps(&self) -> Stamps {
        [&self.resolv_conf, &self.hosts].map(|path| fs::metadata(path).ok().map(Stamp::from))
    }
}

impl Reading {
    /// Reads both files. Blocks.
    fn of(files: &Files) -> Self {
        let mut stamps = Some(files.stamps());
        let mut of_hosts = Problems::of(&files.hosts);
        let hosts = match read_hosts(&files.hosts, &mut of_hosts) {
            // Images without anything else have none.
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Some(HostsFile::default()),
            Err(cause) => {
                of_hosts.add(0, b"", format!("the file cannot be read: {cause}"));
                stamps = None;
                None
            }
            Ok(hosts) => Some(hosts),
        };
        let mut of_conf = Problems::of(&files.resolv_conf);
        let (conf, fault) = match ResolvConf::read(&files.resolv_conf, &mut of_conf) {
            Ok(conf) if conf.name_servers.is_empty() => (conf, Some("no name server".to_owned())),
            Ok(conf) => (conf, None),
            Err(cause) => {
                stamps = None;
                (ResolvConf::default(), Some(cause.to_string()))
            }
        };
        let file = files.resolv_conf.display();
        Self {
            stamps,
            conf,
            hosts,
            problems: vec![of_hosts, of_conf],
            fault: fault.map(|cause| ResolveError::Failed(format!("{file}: {cause}"))),
        }
    }
}

impl State {
    fn new(
        conf: ResolvConf,
        hosts: Arc<HostsFile>,
        files: &Files,
        generation: u64,
    ) -> Result<Self, ResolveError> {
        let host = rustix::system::uname();
        let host = host.nodename().to_str().unwrap_or_default();
        Ok(Self {
            generation,
            search: conf.search(host),
            dns: NameServers::new(&conf, files.dns_port, &files.own_sockets)?,
            conf,
            hosts,
        })
    }

    /// What needs no DNS: the hosts file, IPv6 first, and `localhost`.
    fn fixed_addresses(&self, name: &str) -> Vec<IpAddr> {
        let listed = self.hosts.get(&host_key(name));
        let mut ips = listed.cloned().unwrap_or_default();
        ips.sort_by_key(IpAddr::is_ipv4);
        if ips.is_empty() && is_localhost(name) {
            ips = vec![
                IpAddr::V6(Ipv6Addr::LOCALHOST),
                IpAddr::V4(Ipv4Addr::LOCALHOST),
            ];
        }
        ips
    }
}

#[cfg(test)]
mod tests;
