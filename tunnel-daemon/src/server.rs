//! The server: router, listeners, probes, and the order in which they stop.

mod gauges;
pub(super) mod idle_lanes;
mod readiness;
pub(super) mod tenant;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use adit_core::registry::{Registry, Scope, Strategy};
use adit_core::wire::metadata::{Extensions, PeerVersion, ServerHello};
use futures_util::future::{join, join_all};
use tokio::sync::{oneshot, watch};

use self::tenant::Tenant;
use crate::budgets::isolation;
use crate::certificates::AGENT_LISTENER;
use crate::controls::Controls;
use crate::descriptors;
use crate::ebpf::Captured;
use crate::kubernetes::{admission, kubernetes_api, publish_lease};
use crate::listeners::Listening;
use crate::node;
use crate::peers::{self, PEER_FILES, Peering};
use crate::process::{Probes, Process, ProcessPlan};
use crate::status::model::Role;
use crate::status::{Announced, ServerSource};
use adit_config::limits;
use adit_config::plan::ServerPlan;
use adit_host::wait::wait_until;
use adit_net::tasks::Tasks;
use adit_peer::{PeerState, Peers};
use adit_server::backend::{
    AgentAuthenticator, AgentAuthorizer, AgentLinks, Backend, BackendSettings, LinkSettings,
};
use adit_server::router::{LinkHandle, Router};
use adit_telemetry::{AditMetrics, ServerMetrics};
use adit_tunnel::LanePool;

/// Peers hear within this time that a server leaves, also busy ones.
const PEERS_HEAR_WITHIN: Duration = Duration::from_secs(2);
/// Concurrent client connections and streams: far above any descriptor limit.
const CLIENT_TASKS_MAX: usize = 400_000;
/// The address of an agent port that is not there.
pub const NO_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
/// Concurrent agent connections and links.
const AGENT_TASKS_MAX: usize = 100_000;

/// A running server.
pub struct RunningServer {
    /// Address for agents; [`NO_PORT`] with `--no-agents`.
    pub agents: SocketAddr,
    /// Address for other servers.
    pub peers: Option<SocketAddr>,
    /// Addresses for TCP clients, in the order of the plan.
    pub frontends: Vec<SocketAddr>,
    /// Address to which the packet filter's rules lead connections.
    pub transparent: Option<SocketAddr>,
    /// Address for probes and scrapes.
    pub health: Option<SocketAddr>,
    /// Address of the admin port.
    pub admin: Option<SocketAddr>,
    pub metrics: ServerMetrics,
    router: Arc<Router>,
    captured: Captured,
    process: Process,
    peering: Option<Peering>,
    clients: Tasks,
    links: Tasks,
    agent_connections: Arc<AtomicUsize>,
    /// Ends when this server's lease is withdrawn.
    withdrawn: Mutex<Option<oneshot::Receiver<()>>>,
    probes: Probes,
}

/// Starts a server on the current runtime.
///
/// # Errors
/// The failure of a listener, certificate or the admin thread, with its name.
pub async fn start(plan: &ServerPlan) -> anyhow::Result<RunningServer> {
    start_with(plan, &Controls::default()).await
}

/// Like [`start`], for a process that takes requests through `controls`.
///
/// # Errors
/// Like [`start`].
pub async fn start_with(plan: &ServerPlan, controls: &Controls) -> anyhow::Result<RunningServer> {
    let common = ProcessPlan::of_server(plan);
    let metrics = Tenant::metrics(plan);
    let process = Process::start(&common, metrics.adit(), controls).await?;
    let tenant = Tenant::new(plan, &process, metrics)?;
    let (clients, links) = (Tasks::new(CLIENT_TASKS_MAX), Tasks::new(AGENT_TASKS_MAX));
    let (adit, services) = (&process.metrics, &process.services);
    let router = Arc::clone(&tenant.router);
    let mut listening = Listening::new(&process, &plan.tls, plan.compat);
    warn_insecure_config(plan, adit);
    let api = kubernetes_api(plan).await?;
    let admission = admission(plan, api.as_ref(), &tenant.metrics);
    let mut settings = backend_settings(plan, &process, admission)?;
    let (leased, leases) = watch::channel(0);
    settings.leases = leases;
    let asks = plan
        .peers
        .as_ref()
        .is_some_and(|peers| !peers.peers.is_empty());
    let (agent_links, told) = watch::channel(match asks {
        true => AgentLinks::Unknown,
        false => AgentLinks::ToAll,
    });
    settings.agent_links = told;
    let announced = Some(Announced {
        configured: settings.server.server_count,
        leases: settings.leases.clone(),
        agent_links: plan
            .peers
            .as_ref()
            .map(|peers| peers.agent_links.get().into()),
        accepts_agents: plan.agents.port.is_some(),
    });
    let mut authorizers = Vec::new();
    let mut agent_port = None;
    if let Some(port) = &plan.agents.port {
        let tls = listening.agent_tls(&plan.agents, port)?;
        let authorizer = tenant.authorizer(plan, &tls, &links, &process)?;
        settings.authorizer = authorizer.clone();
        authorizers.push((AGENT_LISTENER, authorizer));
        agent_port = Some((port, tls));
    }
    settings.node = node::proxy(&plan.destinations, &tenant, &process, &clients)?;
    descriptors::close_idle_lanes(services, &process.descriptors, &router);
    let context = tenant.frontends(plan, &process, &clients)?;
    let parts = peers::Parts {
        plan,
        process: &process,
        tenant: &tenant,
        clients: &context,
        links: &links,
        agents: &settings,
    };
    let peers = plan.peers.as_ref();
    let peering = peers.map(|peers| parts.start(peers, agent_links, &mut listening));
    let peering = peering.transpose()?.map(|(peering, authorizer)| {
        authorizers.push((PEER_FILES, authorizer));
        peering
    });
    let backend = Backend::new(
        Arc::clone(&router),
        settings,
        Arc::clone(&process.budget),
        tenant.metrics.clone(),
        links.clone(),
    );
    // Before agents can connect: the redirect recognizes agents among the captured processes.
    let (captured, transparent) = listening.transparent(plan, &context)?;
    let agent_connections = backend.open_connections();
    let agents = match agent_port {
        Some((port, tls)) => listening.agents(&plan.agents, port, tls, backend, &links)?,
        None => NO_PORT,
    };
    let frontends = listening.frontends(&plan.clients, &context)?;
    let certificates = process.watch_files(listening.watched, api.as_ref(), authorizers);
    let gauges = gauges::update(adit.clone(), Arc::clone(&router));
    services.spawn_always("gauges", gauges);
    services.spawn_always("idle-lanes", idle_lanes::keep(Arc::clone(&router)));
    services.spawn_always("strategies", readiness::log_changes(Arc::clone(&router)));

    let [relay_line, account_line] = process.lines();
    let (of_links, redirect) = (Arc::clone(&router), Arc::clone(&process.redirect));
    let detail = Arc::new(move || {
        let links = readiness::lines(&of_links);
        format!("{links}{relay_line}{}{account_line}", redirect.detail())
    });
    let source = ServerSource {
        common: process.common(&common, certificates),
        role: Role::Server,
        router: Arc::clone(&router),
        metrics: adit.clone(),
        announced,
        peers: peering.as_ref().map(Peering::table),
    };
    let (asked, compat) = (Arc::clone(&router), plan.compat);
    let serving = move || asked.with_registry(|registry| readiness::of_agents(registry, compat));
    let scrape = tenant.metrics.scrape();
    let probes = process.answer_probes(&common, scrape, Arc::new(source), detail, serving)?;
    let others = [probes.health(), probes.admin(), transparent];
    let others = others
        .into_iter()
        .flatten()
        .chain(frontends.iter().copied());
    let others: Vec<SocketAddr> = others.collect();
    let all = others.iter().chain(captured.listeners()).copied();
    let of_peers = peering.as_ref().and_then(|peering| peering.address);
    tenant
        .own
        .set(all.chain([agents]).chain(of_peers).collect());
    captured.exempt(agents, others);
    // After all listeners: a lease tells agents to connect.
    let withdrawn = publish_lease(plan, api, &tenant.metrics, services, leased, &process.stop);
    Ok(RunningServer {
        agents,
        peers: of_peers,
        frontends,
        transparent,
        health: probes.health(),
        admin: probes.admin(),
        metrics: tenant.metrics,
        router,
        captured,
        process,
        peering,
        clients,
        links,
        agent_connections,
        withdrawn: Mutex::new(Some(withdrawn)),
        probes,
    })
}

/// Warns about flags that let any peer do what only some should.
fn warn_insecure_config(plan: &ServerPlan, metrics: &AditMetrics) {
    if plan.agents.insecure_unauthenticated {
        tracing::warn!(
            "agents are not authenticated: anyone who reaches the agent port can register as an agent"
        );
        metrics.insecure_flag("insecure-allow-unauthenticated-agents");
    }
    if plan.clients.in_clear().next().is_some() {
        tracing::warn!("a TCP frontend serves anyone who reaches it, in clear text");
        metrics.insecure_flag("insecure-plaintext-frontend");
    }
    if plan.agents.port.is_none() {
        // No agent claims anything here.
    } else if plan.peers.is_some() && plan.agents.grants.is_open() {
        tracing::warn!(
            "agents claim their ids and identifiers themselves, and each claim is believed by all peers: --agent-grant says what an \
             agent may claim"
        );
    } else if plan.agents.grants.is_open() {
        tracing::info!(
            "agents claim their ids and identifiers themselves; --agent-grant says what an agent may claim"
        );
    }
}

fn backend_settings(
    plan: &ServerPlan,
    process: &Process,
    admission: AgentAuthenticator,
) -> anyhow::Result<BackendSettings> {
    let server = ServerHello {
        server: plan.server_id.clone(),
        server_count: plan.server_count,
        extensions: Extensions::default(),
        version: PeerVersion::own(),
        zone: plan.agents.zone.clone(),
        lane_grant: None,
        peer: None,
    };
    let link = LinkSettings {
        isolation: isolation(&process.isolation),
        dials_max: usize::try_from(plan.dial.pending_per_agent_max.get())?,
        dial_timeout: plan.dial.timeout,
    };
    Ok(BackendSettings {
        server,
        keepalive: plan.agents.keepalive,
        admission,
        authorizer: AgentAuthorizer::default(),
        leases: watch::channel(0).1,
        agent_links: watch::channel(AgentLinks::ToAll).1,
        grants: plan.agents.grants.clone(),
        links_per_agent_max: usize::try_from(plan.agents.links_per_agent_max.get())?,
        link,
        // Without room for lanes, none are offered.
        lanes_per_link_max: usize::try_from(plan.agents.data_path.lanes_max)?
            .min(process.lane_room.lanes_max()),
        lane_security: process.relay.data_path.lane_security,
        lane_room: Arc::clone(&process.lane_room),
        lane_watch: Arc::clone(&process.lane_watch),
        node: None,
        peers: None,
        accounts: process.accounts.clone(),
    })
}

impl RunningServer {
    /// Where the admin socket is.
    pub(super) fn admin_socket(&self) -> Option<&Path> {
        self.probes.socket()
    }

    /// Number of current links.
    #[must_use]
    pub fn links(&self) -> usize {
        self.router.links().len()
    }

    /// Number of other servers whose agents this one can ask: they have announced all their keys.
    #[must_use]
    pub fn linked_peers(&self) -> usize {
        self.router.with_registry(Registry::complete_peers)
    }

    /// Number of keys under which peers can be asked.
    #[must_use]
    pub fn reachable_keys(&self) -> usize {
        self.router.with_registry(Registry::peer_keys)
    }

    /// Number of peers under whose keys dials for any destination find an agent that is ready.
    #[must_use]
    pub fn holders_of_any(&self) -> usize {
        let any = Scope::named(Strategy::Default, "");
        let ready = |registry: &Registry| any.map_or(0, |any| registry.ready_peers(&any));
        self.router.with_registry(ready)
    }

    /// Number of peers that do not answer.
    #[must_use]
    pub fn silent_peers(&self) -> usize {
        let peers = self.router.peers();
        peers.iter().filter(|peer| peer.is_silent()).count()
    }

    /// Why addresses of peers have no link now.
    #[must_use]
    pub fn peer_failures(&self) -> Vec<String> {
        let peers = self
            .peering
            .as_ref()
            .and_then(|peering| peering.peers.as_ref());
        let all = peers.map(Peers::all).unwrap_or_default();
        let failures = all.into_iter().filter_map(|peer| match peer.state {
            PeerState::Connecting | PeerState::Linked(_) | PeerState::Duplicate => None,
            PeerState::Own => Some("this server".to_owned()),
            PeerState::Failed(why) => Some(why.to_string()),
        });
        failures.collect()
    }

    /// The lane pools of links that may have lanes.
    #[must_use]
    pub fn lanes(&self) -> Vec<Arc<LanePool>> {
        let links = self.router.links();
        links.into_iter().filter_map(|link| link.lanes).collect()
    }

    /// Number of calls of captured processes that the kernel has redirected.
    #[must_use]
    pub fn redirected(&self) -> u64 {
        self.captured.redirected()
    }

    /// Addresses to which the redirect sends captured connections; empty without a redirect.
    #[must_use]
    pub fn redirect_listeners(&self) -> &[SocketAddr] {
        self.captured.listeners()
    }

    /// Stops gracefully: calls [`Self::leave`], then tells the remaining clients and cuts their tunnels.
    pub async fn stop(self, grace: Option<Duration>) {
        self.leave(grace).await;
        self.cut(limits::SHUTDOWN_FLUSH).await;
    }

    /// Reports "not ready" and refuses new connections and dials; tunnels may finish within `grace` (`None`: no limit). After a
    /// cancelled call, [`Self::cut`] ends the remaining tunnels.
    pub async fn leave(&self, grace: Option<Duration>) {
        self.process.ending.cancel();
        self.process.services.services_may_end();
        // Detach first: new connections then bypass this server before it refuses them.
        self.captured.detach();
        self.router.refuse_dials();
        self.process.stop.cancel();
        let limit = grace.unwrap_or(Duration::MAX / 4);
        let (clients, lanes) = (&self.clients, &self.process.lane_watch);
        let since = Instant::now();
        // A dial on its way from a peer that has not heard of it is refused, and goes on elsewhere; it would be lost with its lane.
        let peers_know = || {
            let has_peers = self.peering.as_ref().is_some_and(Peering::is_connected);
            !has_peers || since.elapsed() >= PEERS_HEAR_WITHIN
        };
        wait_until(limit.min(Duration::from_secs(u64::from(u32::MAX))), || {
            // Clients that are gone may have left bytes that their targets still have to receive.
            clients.running() == 0
                && lanes.draining() == 0
                && self.router.is_settled()
                && peers_know()
        })
        .await;
        let withdrawn = self
            .withdrawn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(withdrawn) = withdrawn {
            // The withdrawal began when `stop` was cancelled, and has a time limit of its own.
            let _done = withdrawn.await;
        }
    }

    /// Tells agents that this server goes away, and waits up to `limit` until they have closed their connections.
    async fn end_links(&self, limit: Duration) {
        let links = self.router.links();
        let ends = links.iter().filter_map(LinkHandle::end);
        let told = join_all(ends);
        let peers = self.peering.iter().flat_map(Peering::end);
        let told = join(told, join_all(peers));
        let _busy = tokio::time::timeout(limit, told).await;
        wait_until(limit, || {
            let peers = self.peering.as_ref();
            self.agent_connections.load(Relaxed) == 0 && !peers.is_some_and(Peering::is_connected)
        })
        .await;
    }

    /// Ends the remaining tunnels: clients are told within `flush`, after which their connections are reset.
    pub async fn cut(&self, flush: Duration) {
        let tunnels = self.metrics.adit().open_tunnels().all().len();
        self.router.announce_shutdown();
        self.process.lane_watch.shut_down();
        self.process.stop_relay();
        self.end_links(flush).await;
        // Links first: their tunnels end, and clients get their CLOSE_RSP before the connections go.
        let left = self.links.drain(Duration::ZERO).await;
        let _cut = self.clients.drain(flush).await;
        let services = self.process.services.drain(Duration::ZERO).await;
        tracing::info!(
            tunnels,
            links = left.cut_off,
            services = services.cut_off,
            "stopped"
        );
    }
}
