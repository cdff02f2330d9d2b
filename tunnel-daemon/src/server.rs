//! The server: router, listeners, probes, and the order in which they stop.

mod gauges;
mod idle_lanes;
mod readiness;
mod tenant;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use adit_core::wire::metadata::{Extensions, PeerVersion, ServerHello};
use futures_util::future::join_all;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use self::tenant::Tenant;
use crate::account;
use crate::admin::{AdminLimits, AdminListener, AdminSocket, AdminThread};
use crate::budgets::{self, isolation};
use crate::certificates::{CertificateEvents, watch_kubeconfig};
use crate::check::Needs;
use crate::controls::Controls;
use crate::descriptors;
use crate::ebpf::Captured;
use crate::ebpf_flags;
use crate::kubernetes::{admission, kubernetes_api, publish_lease};
use crate::listeners::spelling::ServerListeners;
use crate::listeners::{Listening, serve_probes};
use crate::memory_pressure;
use crate::node::{self, NodeParts};
use crate::probes::{Detail, HttpService, ReadinessAsker};
use crate::redirect_view::RedirectView;
use crate::relay;
use crate::start_files;
use crate::status::{self, ServerSource};
use adit_config::limits;
use adit_config::plan::{FrontendListen, IsolationPlan, ServerPlan};
use adit_host::descriptors::Descriptors;
use adit_host::wait::wait_until;
use adit_net::accounts::Accounts;
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_server::backend::{
    AgentAuthenticator, AgentAuthorizer, Backend, BackendSettings, LinkSettings,
};
use adit_server::router::{LinkHandle, Router};
use adit_telemetry::{AditMetrics, ServerMetrics};
use adit_tls::reload;
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LanePool, LaneWatch, RawLaneRelay};

/// Concurrent client connections and streams: far above any descriptor limit.
const CLIENT_TASKS_MAX: usize = 400_000;
/// Concurrent agent connections and links.
const AGENT_TASKS_MAX: usize = 100_000;
/// Tasks of services: listeners, watchers and the like.
const SERVICE_TASKS_MAX: usize = 64;

/// A running server.
pub struct RunningServer {
    /// Address for agents.
    pub agents: SocketAddr,
    /// Addresses for TCP clients, in the order of the plan.
    pub frontends: Vec<SocketAddr>,
    /// Address to which the packet filter's rules lead connections.
    pub transparent: Option<SocketAddr>,
    /// Address for probes and scrapes.
    pub health: Option<SocketAddr>,
    /// Address of the admin port.
    pub admin: Option<SocketAddr>,
    /// All listeners, as flags spell them.
    pub(super) listeners: ServerListeners,
    pub metrics: ServerMetrics,
    router: Arc<Router>,
    lane_watch: Arc<LaneWatch>,
    relay: Option<Arc<RawLaneRelay>>,
    captured: Captured,
    tasks: ServerTasks,
    stop: CancellationToken,
    stopping: Arc<AtomicBool>,
    agent_connections: Arc<AtomicUsize>,
    /// Ends when this server's lease is withdrawn.
    withdrawn: Mutex<Option<oneshot::Receiver<()>>>,
    probes: Probes,
}

struct ServerTasks {
    clients: Tasks,
    links: Tasks,
    services: Tasks,
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
    ebpf_flags::check_server(plan)?;
    start_files::wait_for(start_files::of_server(plan)).await;
    let tenant = Tenant::new(plan)?;
    let tasks = ServerTasks {
        clients: Tasks::new(CLIENT_TASKS_MAX),
        links: Tasks::new(AGENT_TASKS_MAX),
        services: Tasks::new(SERVICE_TASKS_MAX),
    };
    // Before a redirect is attached, which may capture the connection of a probe.
    let host = status::Common::host(plan.admin_socket.is_on(), Needs::of_server(plan));
    let descriptors = Arc::new(Descriptors::of_process());
    let started = Instant::now();
    let stop = CancellationToken::new();
    let adit = tenant.adit().clone();
    let (accounts, accounting) = account::start(plan.account, &adit, &tasks.services);
    let own_sockets = match plan.transparent.redirect {
        Some(_) => OwnSockets::on(),
        None => OwnSockets::off(),
    };
    let mut listening = Listening {
        plan,
        services: &tasks.services,
        reread: &controls.reread,
        stop: &stop,
        metrics: &adit,
        descriptors: &descriptors,
        accounts: &accounts,
        own_sockets: &own_sockets,
        inherited: &controls.inherited,
        watched: Vec::new(),
    };
    warn_insecure_config(plan, &adit);
    let api = kubernetes_api(plan).await?;
    let admission = admission(plan, api.as_ref(), &tenant.metrics);
    let mut settings =
        backend_settings(plan, &tenant.isolation, &descriptors, &accounts, admission)?;
    let (leased, leases) = watch::channel(0);
    settings.leases = leases;
    let agent_tls = listening.agent_tls()?;
    let (links, services) = (&tasks.links, &tasks.services);
    let authorizer = tenant.authorizer(plan, &agent_tls, (links, services), controls, &stop)?;
    settings.authorizer = authorizer.clone();
    settings.node = node::proxy(
        &plan.destinations,
        &tenant.own,
        NodeParts {
            access: Arc::clone(&tenant.access),
            metrics: adit.clone(),
            accounts: accounts.clone(),
            own_sockets: own_sockets.clone(),
            reread: controls.reread.clone(),
            tasks: tasks.clients.clone(),
            descriptors: Arc::clone(&descriptors),
            leaving: stop.clone(),
        },
    )?;
    let started_relay = relay::start(
        &plan.agents.data_path,
        settings.lane_room.lanes_max(),
        plan.isolation.half_closed_timeout,
        &tenant.budget,
        &adit,
        services,
    )?;
    settings.lane_security = started_relay.data_path.lane_security;
    let relay = started_relay.relay;
    let lanes_max = settings.lane_room.lanes_max();
    let lane_watch = Arc::clone(&settings.lane_watch);
    let watch = Arc::clone(&lane_watch);
    services.spawn_always("lane-watch", async move { watch.run().await });
    let pressure = memory_pressure::watch(Arc::clone(&tenant.budget), relay.clone());
    services.spawn_always("memory", pressure);
    descriptors::spare(services, &descriptors, &tenant.router);
    let backend = Backend::new(
        Arc::clone(&tenant.router),
        settings,
        Arc::clone(&tenant.budget),
        tenant.metrics.clone(),
        links.clone(),
    );
    let context = tenant.frontends(relay.as_ref(), &descriptors, &accounts);
    let router = Arc::clone(&tenant.router);
    // Before agents can connect: the redirect recognizes agents among the captured processes.
    let view = Arc::new(RedirectView::new(&adit));
    let (captured, transparent) =
        listening.transparent(&view, &router, &context, &tasks.clients)?;
    let agent_connections = backend.open_connections();
    let agents = listening.agents(agent_tls, backend, &tasks.links)?;
    let each = plan.frontends.iter();
    let each = each.map(|frontend| listening.frontend(frontend, &router, &context, &tasks.clients));
    let each = each.collect::<Result<Vec<_>, _>>()?;
    let frontends: Vec<SocketAddr> = each.iter().copied().flatten().collect();
    let watched = std::mem::take(&mut listening.watched);
    drop(listening);
    let events = Arc::new(CertificateEvents::new(adit.clone(), Some(authorizer)));
    let certificates = Arc::clone(events.table());
    let reread = controls.reread.clone();
    if let Some(api) = &api {
        let (api, events) = (Arc::clone(api), Arc::clone(&events));
        let watching = watch_kubeconfig(api, events, reread.clone(), stop.clone());
        services.spawn_always("kubeconfig", watching);
    }
    let watching = reload::watch(watched, reload::POLL_PERIOD, events, reread, stop.clone());
    services.spawn_always("tls-files", watching);
    let gauges = gauges::update(
        adit.clone(),
        Arc::clone(&tenant.budget),
        Arc::clone(&router),
    );
    services.spawn_always("gauges", gauges);
    services.spawn_always("idle-lanes", idle_lanes::keep(Arc::clone(&router)));

    let stopping = Arc::new(AtomicBool::new(false));
    let asker = readiness::answer(&router, &stopping, &tasks.services, plan.compat);
    services.spawn_always("strategies", readiness::log_changes(Arc::clone(&router)));
    let relaying = started_relay.detail;
    let account_line = account::line(&accounting);
    let (of_links, redirect) = (Arc::clone(&router), Arc::clone(&view));
    let detail = Arc::new(move || {
        let links = readiness::lines(&of_links);
        format!("{links}{relaying}{}{account_line}", redirect.detail())
    });
    let source = ServerSource {
        common: status::Common {
            id: plan.server_id.as_str().to_owned(),
            started,
            tunnels: Arc::clone(adit.open_tunnels()),
            budget: tenant.budget,
            link_budget_bytes: tenant.isolation.agent_budget_bytes,
            descriptors,
            data_path: started_relay.data_path,
            lanes_max,
            engine: started_relay.engine.clone(),
            relay: relay.as_deref().map(RawLaneRelay::handle),
            host,
            redirect: view,
            account: accounting,
            debug: controls.debug.clone(),
            certificates,
        },
        router: Arc::clone(&router),
        metrics: adit.clone(),
    };
    let probes = Probes::start(plan, &tenant.metrics, services, asker, detail, source)?;
    let (health, admin) = (probes.address("health"), probes.address("admin"));
    let listeners = ServerListeners::of(
        plan,
        &each,
        transparent,
        [health, admin],
        probes.socket_path(),
    );
    let others = [health, admin, transparent].into_iter().flatten();
    let others: Vec<SocketAddr> = others.chain(frontends.iter().copied()).collect();
    let all = others.iter().chain(captured.listeners()).copied();
    tenant.own.set(all.chain([agents]).collect());
    captured.spare(agents, others);
    // After all listeners: a lease tells agents to connect.
    let withdrawn = publish_lease(plan, api, &tenant.metrics, services, leased, &stop);
    Ok(RunningServer {
        agents,
        frontends,
        transparent,
        health,
        admin,
        listeners,
        metrics: tenant.metrics,
        router,
        lane_watch,
        relay,
        captured,
        tasks,
        stop,
        stopping,
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
    if plan
        .frontends
        .iter()
        .any(|frontend| matches!(frontend.listen, FrontendListen::Tcp { tls: None, .. }))
    {
        tracing::warn!("a TCP frontend serves anyone who reaches it, in clear text");
        metrics.insecure_flag("insecure-plaintext-frontend");
    }
    if plan.agents.grants.is_open() {
        tracing::info!(
            "agents claim their ids and identifiers themselves; --agent-grant says what an agent may claim"
        );
    }
}

fn backend_settings(
    plan: &ServerPlan,
    here: &IsolationPlan,
    descriptors: &Arc<Descriptors>,
    accounts: &Accounts,
    admission: AgentAuthenticator,
) -> anyhow::Result<BackendSettings> {
    let server = ServerHello {
        server: plan.server_id.clone(),
        server_count: plan.server_count,
        extensions: Extensions::default(),
        version: PeerVersion::own(),
        lane_grant: None,
    };
    let link = LinkSettings {
        isolation: isolation(here),
        dials_max: usize::try_from(plan.dial.pending_per_agent_max.get())?,
        dial_timeout: plan.dial.timeout,
    };
    let lane_room = LaneRoom::new(
        descriptors::lanes_max().min(budgets::lanes_max()),
        Arc::clone(descriptors),
    );
    Ok(BackendSettings {
        server,
        keepalive: plan.agents.keepalive,
        admission,
        authorizer: AgentAuthorizer::default(),
        leases: watch::channel(0).1,
        grants: plan.agents.grants.clone(),
        links_per_agent_max: usize::try_from(plan.agents.links_per_agent_max.get())?,
        link,
        // Without room for lanes, none are offered.
        lanes_per_link_max: usize::try_from(plan.agents.data_path.lanes_max)?
            .min(lane_room.lanes_max()),
        lane_security: plan.agents.data_path.lane_security,
        lane_room: Arc::new(lane_room),
        lane_watch: Arc::default(),
        node: None,
        accounts: accounts.clone(),
    })
}

/// The admin thread and its listeners; dropping this closes them.
struct Probes {
    _thread: AdminThread,
    socket: Option<AdminSocket>,
    listeners: Vec<(&'static str, AdminListener)>,
}

impl Probes {
    fn start(
        plan: &ServerPlan,
        metrics: &ServerMetrics,
        services: &Tasks,
        asker: ReadinessAsker,
        detail: Detail,
        source: ServerSource,
    ) -> anyhow::Result<Self> {
        let thread = AdminThread::start(
            AdminLimits::default(),
            metrics.adit().clone(),
            services.clone(),
        )?;
        let answers = status::service(Arc::new(source), asker.clone());
        let socket = thread.serve_socket(&plan.admin_socket, answers)?;
        let mut listeners = Vec::new();
        let scrape = metrics.scrape();
        let health = HttpService::server_health(Arc::new(asker), scrape.clone(), detail);
        let admin = HttpService::server_admin(scrape);
        for (name, bind, service) in [
            ("health", &plan.health, health),
            ("admin", &plan.admin, admin),
        ] {
            let Some(bind) = bind else { continue };
            let listener = serve_probes(&thread, name, bind, service, plan.compat)?;
            listeners.extend(listener.map(|listener| (name, listener)));
        }
        Ok(Self {
            _thread: thread,
            socket,
            listeners,
        })
    }

    /// Where the admin socket is.
    fn socket_path(&self) -> Option<&Path> {
        self.socket.as_ref().map(AdminSocket::path)
    }

    fn address(&self, name: &str) -> Option<SocketAddr> {
        self.listeners
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, listener)| listener.local_addr())
    }
}

impl RunningServer {
    /// Number of current links.
    #[must_use]
    pub fn links(&self) -> usize {
        self.router.links().len()
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
        drop(self.probes);
    }

    /// Reports "not ready" and refuses new connections and dials; tunnels may finish within `grace` (`None`: no limit). After a
    /// cancelled call, [`Self::cut`] ends the remaining tunnels.
    pub async fn leave(&self, grace: Option<Duration>) {
        self.stopping.store(true, Relaxed);
        self.tasks.services.services_may_end();
        // Detach first: new connections then bypass this server before it refuses them.
        self.captured.detach();
        self.router.refuse_dials();
        self.stop.cancel();
        let limit = grace.unwrap_or(Duration::MAX / 4);
        let (clients, lanes) = (&self.tasks.clients, &self.lane_watch);
        wait_until(limit.min(Duration::from_secs(u64::from(u32::MAX))), || {
            // Clients that are gone may have left bytes that their targets still have to receive.
            clients.running() == 0 && lanes.draining() == 0 && self.router.is_settled()
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
        let _busy = tokio::time::timeout(limit, told).await;
        wait_until(limit, || self.agent_connections.load(Relaxed) == 0).await;
    }

    /// Ends the remaining tunnels: clients are told within `flush`, after which their connections are reset.
    pub async fn cut(&self, flush: Duration) {
        let tunnels = self.metrics.adit().open_tunnels().all().len();
        self.router.announce_shutdown();
        self.lane_watch.shut_down();
        if let Some(relay) = &self.relay {
            relay.shut_down();
        }
        self.end_links(flush).await;
        // Links first: their tunnels end, and clients get their CLOSE_RSP before the connections go.
        let left = self.tasks.links.drain(Duration::ZERO).await;
        let _cut = self.tasks.clients.drain(flush).await;
        let services = self.tasks.services.drain(Duration::ZERO).await;
        tracing::info!(
            tunnels,
            links = left.cut_off,
            services = services.cut_off,
            "stopped"
        );
    }
}
