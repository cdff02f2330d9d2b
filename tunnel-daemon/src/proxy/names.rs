//! How a proxy's names become addresses: by a watch of the other cluster's Services, by its DNS through the tunnel, by this host,
//! or not at all, which leaves them to the agent.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::servers::{Servers, Through};
use adit_config::plan::{DNS_PORT, GuestDns, NamesPlan, Resolver};
use adit_kube::services::Services;
use adit_net::resolve::{
    Connect, DnsConnection, Resolve, ResolveError, SystemResolver, TunnelledResolver,
};
use adit_server::router::AskedAgents;

/// Time for the first list of Services, which a proxy may start before.
const LIST_WITHIN: Duration = Duration::from_secs(5);
/// Time for an answer of the guest cluster's DNS, with the connections it takes.
const ANSWER_WITHIN: Duration = Duration::from_secs(12);
/// While the guest cluster's DNS gives no answers, one name asks it again so often.
const PROBE_EVERY: Duration = Duration::from_secs(30);
/// Addresses of one name that are dialled at most.
const DIALLED_MAX: usize = 4;

/// What is to be dialled for a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// The name: the agent resolves it.
    Name,
    /// One of these, in this order, through the tunnel.
    Addresses(Vec<IpAddr>),
    /// One of these, past the tunnel: it is out of order, and this host has found them.
    Past(Vec<IpAddr>),
}

/// See the module.
pub(super) struct Names {
    plan: NamesPlan,
    services: Services,
    guest: TunnelledResolver,
    here: Arc<SystemResolver>,
    /// Until then dials wait for the first list of Services.
    start_ends: Instant,
    /// When the guest cluster's DNS is to be asked again; `None` while it answers.
    unhealthy: Mutex<Option<Instant>>,
}

impl Names {
    pub(super) fn new(
        plan: &NamesPlan,
        services: Services,
        servers: &Arc<Servers>,
        here: Arc<SystemResolver>,
    ) -> Self {
        Self {
            plan: plan.clone(),
            services,
            guest: TunnelledResolver::new(Arc::new(ByTunnel(Arc::clone(servers)))),
            here,
            start_ends: Instant::now() + LIST_WITHIN,
            unhealthy: Mutex::default(),
        }
    }

    /// What to dial for `host`, a name or an address.
    ///
    /// # Errors
    /// The name does not exist, or nobody says.
    pub(super) async fn find(&self, host: &str) -> Result<Found, DialFailure> {
        if host.parse::<IpAddr>().is_ok() {
            return Ok(Found::Name);
        }
        let name = host.trim_end_matches('.').to_ascii_lowercase();
        let resolver = self.resolver_of(&name);
        if resolver != Resolver::Guest {
            return self.by(resolver, &name).await;
        }
        let of_service = self.service(&name).await;
        if !of_service.is_empty() {
            return Ok(Found::Addresses(self.few(of_service)));
        }
        if is_special(&name) {
            // Nobody asks name servers for these (RFC 6761, RFC 7686).
            return self.by(self.plan.unresolved, &name).await;
        }
        let Some(dns) = &self.plan.guest_dns else {
            return self.by(self.plan.unresolved, &name).await;
        };
        if !self.may_ask() {
            return self.past(&name).await;
        }
        let Some(server) = self.server(dns).await else {
            // No sign of trouble with the tunnel: whoever may change Services must not lead dials past it.
            return if self.plan.falls_back {
                self.by(Resolver::Here, &name).await
            } else {
                Err(unanswered(&name, &"its Service is not known"))
            };
        };
        let asked = self.guest.lookup_ip(server, &name);
        let answered = tokio::time::timeout(ANSWER_WITHIN, asked).await;
        match answered.unwrap_or(Err(ResolveError::TimedOut)) {
            Ok(ips) => {
                self.is_healthy();
                Ok(Found::Addresses(self.few(ips)))
            }
            // Its last word, and no sign of trouble: what only this host knows stays unknown to clients of the guest cluster.
            Err(ResolveError::NotFound) => {
                self.is_healthy();
                Err(no_such_host(&name))
            }
            Err(failure) if self.plan.falls_back => {
                let found = self.here.lookup_ip(&name).await;
                let ips = found.map_err(|_unknown| no_such_host(&name))?;
                self.is_silent(&name, &failure);
                Ok(Found::Past(self.few(ips)))
            }
            Err(failure) => Err(unanswered(&name, &failure)),
        }
    }

    /// While the guest cluster's DNS gives no answers: by what this host knows.
    async fn past(&self, name: &str) -> Result<Found, DialFailure> {
        let found = self.here.lookup_ip(name).await;
        let ips = found.map_err(|_unknown| {
            // In the words of HyperShift's sidecars.
            DialFailure::Target(format!("konnectivity unavailable, cannot resolve {name}"))
        })?;
        Ok(Found::Past(self.few(ips)))
    }

    fn resolver_of(&self, name: &str) -> Resolver {
        let ends = |suffix: &str| {
            let rest = name.strip_suffix(suffix);
            rest.is_some_and(|rest| rest.is_empty() || suffix.is_empty() || rest.ends_with('.'))
        };
        let matching = self.plan.suffixes.iter().filter(|(suffix, _)| ends(suffix));
        let longest = matching.max_by_key(|(suffix, _)| suffix.len());
        longest.map_or(self.plan.resolver, |(_, resolver)| *resolver)
    }

    async fn by(&self, resolver: Resolver, name: &str) -> Result<Found, DialFailure> {
        if resolver != Resolver::Here {
            return Ok(Found::Name);
        }
        let found = self.here.lookup_ip(name).await;
        found
            .map(|ips| Found::Addresses(self.few(ips)))
            .map_err(|failure| DialFailure::Target(format!("lookup {name}: {failure}")))
    }

    /// The addresses of the Service that a name of two labels or more begins with: its name, then its namespace.
    async fn service(&self, name: &str) -> Vec<IpAddr> {
        let mut labels = name.split('.');
        let (Some(service), Some(namespace)) = (labels.next(), labels.next()) else {
            return Vec::new();
        };
        if self.plan.services.is_none() {
            return Vec::new();
        }
        self.listed().await;
        self.services.addresses(namespace, service)
    }

    /// Where the guest cluster's DNS is; `None` while its Service is not known.
    async fn server(&self, dns: &GuestDns) -> Option<SocketAddr> {
        match dns {
            GuestDns::Address(address) => Some(*address),
            GuestDns::Service(namespace, service) => {
                self.listed().await;
                let addresses = self.services.addresses(namespace, service);
                let first = self.ordered(addresses).into_iter().next();
                first.map(|ip| SocketAddr::new(ip, DNS_PORT))
            }
        }
    }

    /// Waits for the first list of Services, for a while after the start.
    async fn listed(&self) {
        let left = self.start_ends.saturating_duration_since(Instant::now());
        let _unknown = self.services.listed(left).await;
    }

    /// The addresses that a dial tries.
    fn few(&self, ips: Vec<IpAddr>) -> Vec<IpAddr> {
        let mut ips = self.ordered(ips);
        ips.truncate(DIALLED_MAX);
        ips
    }

    fn ordered(&self, mut ips: Vec<IpAddr>) -> Vec<IpAddr> {
        if self.plan.prefer_ipv4 {
            ips.sort_by_key(IpAddr::is_ipv6);
        }
        ips
    }

    /// Whether the guest cluster's DNS is to be asked: it answers, or it is time to try it again.
    fn may_ask(&self) -> bool {
        let mut health = self.health();
        match &mut *health {
            None => true,
            Some(again) if Instant::now() >= *again => {
                *again = Instant::now() + PROBE_EVERY;
                true
            }
            Some(_) => false,
        }
    }

    fn is_healthy(&self) {
        if self.health().take().is_some() {
            tracing::info!(
                "the DNS of the guest cluster answers again: dials go through the tunnel"
            );
        }
    }

    fn is_silent(&self, name: &str, failure: &ResolveError) {
        let mut health = self.health();
        if health.is_none() {
            tracing::warn!(name, error = %failure, "the DNS of the guest cluster gives no answer, and this host does: for now dials go past the tunnel");
        }
        health.get_or_insert_with(|| Instant::now() + PROBE_EVERY);
    }

    fn health(&self) -> MutexGuard<'_, Option<Instant>> {
        // Nothing panics while the lock is held.
        self.unhealthy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that are this host's, the agent's, or nobody's: libraries answer them by themselves.
fn is_special(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "localhost" | "invalid" | "onion")
}

fn unanswered(name: &str, why: &dyn std::fmt::Display) -> DialFailure {
    DialFailure::Target(format!(
        "lookup {name} by the DNS of the guest cluster: {why}"
    ))
}

/// In the words of an agent.
fn no_such_host(name: &str) -> DialFailure {
    DialFailure::Target(format!("lookup {name}: {}", ResolveError::NotFound))
}

/// Connections to the guest cluster's name server, through the tunnel.
struct ByTunnel(Arc<Servers>);

impl Connect for ByTunnel {
    fn connect(
        &self,
        server: SocketAddr,
        limit: Duration,
    ) -> BoxFuture<'static, io::Result<Box<dyn DnsConnection>>> {
        let servers = Arc::clone(&self.0);
        let until = Instant::now() + limit;
        async move {
            let opened = servers
                .stream(&server.to_string(), until, &AskedAgents::default())
                .await;
            let Through { stream, early, .. } =
                opened.map_err(|failure| io::Error::other(failure.to_string()))?;
            if !early.is_empty() {
                return Err(io::Error::other("the name server spoke first"));
            }
            Ok(Box::new(stream) as Box<dyn DnsConnection>)
        }
        .boxed()
    }
}
