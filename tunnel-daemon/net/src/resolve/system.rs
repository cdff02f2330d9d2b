//! The resolver of this host: `/etc/hosts`, `localhost`, then DNS by `/etc/resolv.conf`. Both files are read again when they
//! changed.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_host::files::{ReadError, Reader};
use arc_swap::ArcSwap;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use super::cache::AddressCache;
use super::dns::NameServers;
use super::files::{HostsFile, Problems, ResolvConf, host_key, read_hosts};
use super::search::{absolute_names, is_localhost};
use super::yielding_slots::YieldingSlots;
use super::{Answer, LOOPBACK, Resolve, ResolveError, SrvRecord};
use crate::self_sockets::OwnSockets;
use adit_tls::reread::Reread;

/// Lookups under way at once, those of one name counted as one; further ones wait. A burst of dials must not become a burst at
/// the cluster's DNS, nor take all descriptors.
const LOOKUPS_MAX: usize = 128;
/// Shortest time between two checks of the files; Go's value.
const RECHECK: Duration = Duration::from_secs(5);

/// How long the lookup that checks the files waits for them. If they take longer, lookups go on with the last contents.
const PATIENCE: Duration = Duration::from_secs(1);

/// Resolves as the system is configured to.
pub struct SystemResolver {
    config: Arc<Config>,
    cache: AddressCache,
    limit: Arc<YieldingSlots>,
}

/// The files and their last contents.
struct Config {
    files: Files,
    active: ArcSwap<ActiveConfig>,
    next_check: Mutex<Instant>,
    reread: Reread,
    /// Count of rereads asked for at the last check.
    asks: AtomicU64,
    last: Mutex<Reading>,
    /// Reads the files, unless they are unchanged.
    reader: AsyncMutex<Reader<Option<Reading>>>,
}

/// Where the configuration comes from, and how name servers are asked.
#[derive(Clone)]
struct Files {
    resolv_conf: PathBuf,
    hosts: PathBuf,
    /// Port of the name servers; resolv.conf cannot say, so it is 53 outside tests.
    dns_port: u16,
    /// Lets TCP connections to name servers bypass a redirect of this process.
    own_sockets: OwnSockets,
}

/// Modification time in seconds and nanoseconds, bytes and inode of each file that is there.
type Stamps = [Option<(i64, i64, u64, u64)>; 2];

/// Both files, read.
struct Reading {
    /// From before the files were read: the next check sees a change during the reading. `None`: a file could not be read.
    stamps: Option<Stamps>,
    conf: ResolvConf,
    /// `None`: the file exists and cannot be read, or its contents moved to [`ActiveConfig`].
    hosts: Option<HostsFile>,
    problems: [Problems; 2],
    /// Why `conf` cannot be used.
    fault: Option<ResolveError>,
}

/// The configuration in use.
struct ActiveConfig {
    /// Increases with every change.
    generation: u64,
    conf: ResolvConf,
    hosts: Arc<HostsFile>,
    search: Vec<String>,
    dns: NameServers,
}

impl SystemResolver {
    /// Reads the system's files, with Go's defaults where they are missing (name server 127.0.0.1).
    ///
    /// # Errors
    /// When the DNS client cannot be set up at all.
    pub fn new() -> Result<Self, ResolveError> {
        Self::past_redirect(OwnSockets::off(), Reread::default())
    }

    /// As [`Self::new`], with connections to name servers that bypass a redirect of this process. The files are checked at most
    /// every 5 s, and before the next lookup after a request of `reread`.
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn past_redirect(own_sockets: OwnSockets, reread: Reread) -> Result<Self, ResolveError> {
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
        Ok(Self::with_config(config))
    }

    fn with_config(config: Arc<Config>) -> Self {
        Self {
            config,
            cache: AddressCache::default(),
            limit: Arc::new(YieldingSlots::new(LOOKUPS_MAX)),
        }
    }

    /// Another resolver of the same files, with its own cache and slots: its lookups do not wait behind the lookups of this
    /// one.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self::with_config(Arc::clone(&self.config))
    }

    async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        let config = self.config.current().await;
        let fixed = config.fixed_addresses(name);
        if !fixed.is_empty() {
            return Ok(fixed);
        }
        let name = name.to_ascii_lowercase();
        let names = absolute_names(&name, &config.search, config.conf.ndots);
        if names.is_empty() {
            return Err(ResolveError::NotFound);
        }
        let (limit, asked) = (Arc::clone(&self.limit), Arc::clone(&config));
        let ask = || async move { limit.run(asked.dns.addresses(&names)).await };
        self.cache.get_or_ask(config.generation, &name, ask).await
    }

    async fn services(&self, name: &str) -> Result<Vec<SrvRecord>, ResolveError> {
        let config = self.config.current().await;
        let names = absolute_names(name, &config.search, config.conf.ndots);
        self.limit.run(config.dns.services(&names)).await
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
    /// Reads the files. An unusable item is logged, and its default applies.
    fn new(files: Files, reread: Reread) -> Result<Self, ResolveError> {
        let mut reading = Reading::of(&files);
        reading.warn(None);
        let mut conf = reading.conf.clone();
        if let Some(cause) = &reading.fault {
            tracing::warn!(%cause, "no usable name server: asking 127.0.0.1");
            conf.name_servers.push((Ipv4Addr::LOCALHOST.into(), None));
        }
        let hosts = Arc::new(reading.hosts.take().unwrap_or_default());
        let active = ActiveConfig::new(conf, hosts, &files, 0)?;
        let reader = AsyncMutex::new(Reader::of(&[&files.resolv_conf, &files.hosts]));
        Ok(Self {
            files,
            active: ArcSwap::from_pointee(active),
            next_check: Mutex::new(Instant::now() + RECHECK),
            asks: AtomicU64::new(reread.asks()),
            reread,
            last: Mutex::new(reading),
            reader,
        })
    }

    /// The configuration, read again if the files changed. One caller in five seconds waits for the check of the files.
    async fn current(&self) -> Arc<ActiveConfig> {
        if self.is_check_due() {
            self.check().await;
        }
        self.active.load_full()
    }

    /// Reads the files again if they changed. An unusable file is logged once, and its last contents stay in use.
    async fn check(&self) {
        // Another lookup waits for the files.
        let Ok(mut reader) = self.reader.try_lock() else {
            return;
        };
        let (files, known) = (self.files.clone(), self.last().stamps);
        let check = move || (known != Some(files.stamps())).then(|| Reading::of(&files));
        let patience = if reader.is_pending() {
            Duration::ZERO
        } else {
            PATIENCE
        };
        match reader.read(patience, check).await {
            Ok(Some(reading)) => self.apply(reading),
            // The next check is 5 s away.
            Ok(None) | Err(ReadError::Pending { .. }) => (),
            Err(error @ ReadError::Lost) => {
                tracing::warn!(%error, "cannot check the resolver configuration");
            }
        }
    }

    fn apply(&self, mut reading: Reading) {
        let mut last = self.last();
        reading.warn(Some(&last));
        let old = self.active.load();
        let conf = match reading.fault {
            None => &reading.conf,
            Some(_) => &old.conf,
        };
        let hosts = reading.hosts.take();
        let hosts = hosts.map_or_else(|| Arc::clone(&old.hosts), Arc::new);
        let is_changed = *conf != old.conf || hosts != old.hosts;
        if is_changed {
            match ActiveConfig::new(conf.clone(), hosts, &self.files, old.generation + 1) {
                Ok(active) => self.active.store(Arc::new(active)),
                Err(cause) => (reading.fault, reading.stamps) = (Some(cause), None),
            }
        }
        match &reading.fault {
            Some(cause) if last.fault.as_ref() != Some(cause) => {
                tracing::warn!(%cause, "changed resolver configuration is unusable: keeping the old one");
            }
            None if is_changed || last.fault.is_some() => {
                tracing::info!("resolver configuration changed and was read again");
            }
            _ => (),
        }
        *last = reading;
    }

    fn last(&self) -> MutexGuard<'_, Reading> {
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

impl Files {
    fn stamps(&self) -> Stamps {
        [&self.resolv_conf, &self.hosts].map(|path| {
            let file = fs::metadata(path).ok()?;
            Some((file.mtime(), file.mtime_nsec(), file.len(), file.ino()))
        })
    }
}

impl Reading {
    /// Reads both files. Blocks.
    fn of(files: &Files) -> Self {
        let mut stamps = Some(files.stamps());
        let mut of_hosts = Problems::of(&files.hosts);
        let hosts = match read_hosts(&files.hosts, &mut of_hosts) {
            // Minimal images have no hosts file.
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
            problems: [of_hosts, of_conf],
            fault: fault.map(|cause| ResolveError::Failed(format!("{file}: {cause}"))),
        }
    }

    /// Warns of items that are ignored, unless the last reading had them.
    fn warn(&self, last: Option<&Self>) {
        for (index, problems) in self.problems.iter().enumerate() {
            problems.warn(last.and_then(|last| last.problems.get(index)));
        }
    }
}

impl ActiveConfig {
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

    /// Addresses without DNS: of the hosts file, IPv6 first, and of `localhost`.
    fn fixed_addresses(&self, name: &str) -> Vec<IpAddr> {
        let listed = self.hosts.get(&host_key(name));
        let mut ips = listed.cloned().unwrap_or_default();
        ips.sort_by_key(IpAddr::is_ipv4);
        if ips.is_empty() && is_localhost(name) {
            ips.extend(LOOPBACK);
        }
        ips
    }
}

#[cfg(test)]
mod tests;
