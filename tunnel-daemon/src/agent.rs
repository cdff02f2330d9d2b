//! The agent: starts links to servers and probes, drains and stops.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use adit_core::destination::DestinationList;
use adit_core::ids::ServerId;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerVersion};
use adit_kube::access::Api;
use adit_kube::leases;
use anyhow::Context as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::account;
use crate::admin::{AdminLimits, AdminListener, AdminSocket, AdminThread};
use crate::budgets::{isolation, isolation_here, keep_published, lanes_max, process_budget};
use crate::certificates::{CertificateEvents, watch_kubeconfig};
use crate::check::Needs;
use crate::controls::Controls;
use crate::descriptors;
use crate::ebpf_flags;
use crate::listeners::spelling::AgentListeners;
use crate::listeners::{Watched, serve_probes};
use crate::memory_pressure;
use crate::node::{NodeSide, NodeSideParts};
use crate::probes::{
    Detail, HttpService, NO_SERVER, Readiness, SERVERS_SILENT, SHUTTING_DOWN, readiness_channel,
};
use crate::redirect_view::RedirectView;
use crate::relay;
use crate::start_files;
use crate::status::{self, AgentSource};
use adit_agent::connector::{RecentServers, ServerConnector};
use adit_agent::context::LinkContext;
use adit_agent::servers::{Servers, ServersSettings};
use adit_agent::sync::{SearchRules, SyncPolicy};
use adit_agent::targets::Dials;
use adit_config::limits;
use adit_config::plan::{AgentPlan, CountPlan, CountSource};
use adit_config::tls_policy::TlsPolicy;
use adit_host::descriptors::Descriptors;
use adit_host::wait::wait_until;
use adit_net::dial::Dialer;
use adit_net::resolve::SystemResolver;
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_telemetry::AgentMetrics;
use adit_telemetry::metrics_lease::AgentLeaseMetrics;
use adit_tls::reload::{self, Reload, Reloadable};
use adit_tls::tls::{Alpn, ClientTls};
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LaneWatch, RawLaneRelay};

/// Concurrent targets, dials and connections: far above any descriptor limit.
const TASKS_MAX: usize = 200_000;
/// Tasks of services: the search for servers, watchers and the like.
const SERVICE_TASKS_MAX: usize = 128;

/// Stages of an agent's life, as readiness reports them.
const SERVING: u8 = 0;
/// Told to end; serves tunnels and new dials until it does.
const DRAINING: u8 = 1;
/// Ending: remaining tunnels are cut.
const STOPPING: u8 = 2;

/// A running agent.
pub struct RunningAgent {
    /// Address for probes and scrapes.
    pub health: Option<SocketAddr>,
    /// Addresses for connections to the control plane, in the order of the plan.
    pub target_listeners: Vec<SocketAddr>,
    /// All listeners, as flags spell them.
    pub(super) listeners: AgentListeners,
    pub metrics: AgentMetrics,
    node: Arc<NodeSide>,
    servers: Servers,
    targets: Tasks,
    dials: Arc<Dials>,
    lane_watch: Arc<LaneWatch>,
    lane_room: Arc<LaneRoom>,
    services: Tasks,
    relay: Option<Arc<RawLaneRelay>>,
    stage: Arc<AtomicU8>,
    stop: CancellationToken,
    _admin: Admin,
}

/// Starts an agent on the current runtime.
///
/// # Errors
/// The failure of a certificate, a destination entry or the admin thread, with its name.
pub async fn start(plan: &AgentPlan) -> anyhow::Result<RunningAgent> {
    start_with(plan, &Controls::default()).await
}

/// Like [`start`], for a process that takes requests through `controls`.
///
/// # Errors
/// Like [`start`].
pub async fn start_with(plan: &AgentPlan, controls: &Controls) -> anyhow::Result<RunningAgent> {
    ebpf_flags::check_agent(plan)?;
    start_files::wait_for(start_files::of_agent(plan)).await;
    let started = Instant::now();
    let metrics = AgentMetrics::new();
    let (targets, services) = (Tasks::new(TASKS_MAX), Tasks::new(SERVICE_TASKS_MAX));
    let stop = CancellationToken::new();
    let own_sockets = match plan.redirect {
        Some(_) => OwnSockets::on(),
        None => OwnSockets::off(),
    };
    let reread = &controls.reread;
    let resolver = Arc::new(SystemResolver::past_redirect(
        own_sockets.clone(),
        reread.clone(),
    )?);
    // Queries for targets' names that no name server answers must not delay the resolution of server names.
    let server_resolver = Arc::new(resolver.sibling());
    let allowed = match &plan.allow_targets {
        None => DestinationList::open(),
        Some(entries) => DestinationList::allow_targets(entries)?,
    };
    let tls = Reloadable::load(ClientTls {
        ca: plan.tls.ca_cert.clone(),
        identity: plan
            .tls
            .identity
            .as_ref()
            .map(|identity| (identity.cert.clone(), identity.key.clone())),
        policy: TlsPolicy::default(),
        alpn: Alpn::grpc(&plan.tls.alpn),
    })?;
    let watched: Watched = vec![("server connection", Arc::clone(&tls) as Arc<dyn Reload>)];
    let events = Arc::new(CertificateEvents::new(metrics.adit().clone(), None));
    let certificates = Arc::clone(events.table());
    services.spawn_always(
        "tls-files",
        reload::watch(
            watched,
            reload::POLL_PERIOD,
            Arc::<CertificateEvents>::clone(&events),
            reread.clone(),
            stop.clone(),
        ),
    );

    let api = match &plan.leases {
        // The words of upstream's error message.
        Some(leases) => Some(
            Api::open(leases.api.clone())
                .await
                .context("failed to load kubernetes client config")?,
        ),
        None => None,
    };
    if let Some(api) = &api {
        let watching = watch_kubeconfig(Arc::clone(api), events, reread.clone(), stop.clone());
        services.spawn_always("kubeconfig", watching);
    }
    let lane_room = Arc::new(LaneRoom::new(
        descriptors::lanes_max().min(lanes_max()),
        Arc::new(Descriptors::of_process()),
    ));
    let (accounts, accounting) = account::start(plan.account, metrics.adit(), &services);
    let here = isolation_here(&plan.isolation);
    let budget = process_budget(&here);
    let started_relay = relay::start(
        &plan.data_path,
        lane_room.lanes_max(),
        plan.isolation.half_closed_timeout,
        &budget,
        metrics.adit(),
        &services,
    )?;
    let (data_path, relay) = (started_relay.data_path, started_relay.relay);
    let allowed = Arc::new(allowed);
    let context = LinkContext {
        agent: plan.agent_id.clone(),
        dialer: Arc::new(Dialer::accounted(
            resolver,
            Arc::<DestinationList>::clone(&allowed),
            allowed,
            plan.dial_timeout,
            accounts.clone(),
            own_sockets.clone(),
            plan.agent_id.as_str(),
        )),
        isolation: isolation(&here),
        budget,
        warn_on_channel_limit: plan.warn_on_channel_limit,
        metrics: metrics.clone(),
        tasks: targets.clone(),
        dials: Arc::default(),
        lane_room,
        lane_watch: Arc::default(),
        relay: relay.clone(),
    };
    let memory = keep_published(metrics.adit().clone(), Arc::clone(&context.budget));
    services.spawn_always("memory-gauges", memory);
    let pressure = memory_pressure::watch(Arc::clone(&context.budget), relay.clone());
    services.spawn_always("memory", pressure);
    let (dials, lane_watch) = (Arc::clone(&context.dials), Arc::clone(&context.lane_watch));
    let watch = Arc::clone(&lane_watch);
    services.spawn_always("lane-watch", async move { watch.run().await });
    let room = Arc::clone(&context.lane_room);
    let lane_room = Arc::clone(&room);
    let counted = Arc::clone(room.descriptors());
    let giving_up = counted.run(descriptors::DRAINED_AFTER, move |lanes| room.give_up(lanes));
    services.spawn_always("descriptors", giving_up);
    let settings = ServersSettings {
        addresses: plan.servers.clone(),
        connector: ServerConnector {
            resolver: server_resolver,
            tls,
            proxy: plan.forward_proxy.clone(),
            accounts: accounts.clone(),
            own_sockets: own_sockets.clone(),
            agent: plan.agent_id.clone(),
            recent_servers: RecentServers::default(),
        },
        hello: AgentHello {
            agent: plan.agent_id.clone(),
            identifiers: Identifiers::parse_flag(&plan.identifiers)?,
            extensions: Extensions {
                link: true,
                lanes: plan.data_path.lanes_max > 0,
            },
            version: PeerVersion::own(),
        },
        token_path: plan.token_path.clone(),
        policy: SyncPolicy {
            interval: plan.sync_interval,
            interval_cap: plan.sync_interval_cap,
            forever: plan.sync_forever,
            rules: if plan.compat {
                SearchRules::Upstream
            } else {
                SearchRules::Native
            },
        },
        count_source: plan
            .leases
            .as_ref()
            .map_or_else(CountSource::default, |leases| leases.source),
        keepalive: plan.keepalive,
        lanes_max: usize::try_from(plan.data_path.lanes_max)?,
        lane_security: data_path.lane_security,
        serves_node: plan.redirect.is_some() || !plan.target_listeners.is_empty(),
    };
    let descriptors = Arc::clone(context.lane_room.descriptors());
    let redirect = Arc::new(RedirectView::new(metrics.adit()));
    let account_line = account::line(&accounting);
    let common = status::Common {
        id: plan.agent_id.as_str().to_owned(),
        started,
        tunnels: Arc::clone(metrics.adit().open_tunnels()),
        budget: Arc::clone(&context.budget),
        link_budget_bytes: here.agent_budget_bytes,
        descriptors: Arc::clone(&descriptors),
        data_path,
        lanes_max: context.lane_room.lanes_max(),
        engine: started_relay.engine.clone(),
        relay: relay.as_deref().map(RawLaneRelay::handle),
        host: status::Common::host(plan.admin_socket.is_on(), Needs::of_agent(plan)),
        redirect: Arc::clone(&redirect),
        account: accounting,
        debug: controls.debug.clone(),
        certificates,
    };
    let servers = Servers::start(settings, context, &services);
    if let (Some(leases), Some(api)) = (&plan.leases, api) {
        watch_leases(leases, api, &metrics, &servers, &services);
    }
    let parts = NodeSideParts {
        servers: &servers,
        metrics: metrics.adit(),
        descriptors: &descriptors,
        accounts: &accounts,
        own_sockets: &own_sockets,
        reread,
        services: &services,
        view: &redirect,
    };
    let node = NodeSide::start(plan, parts)?;
    let node = Arc::new(node);
    let source = AgentSource {
        common,
        servers: servers.clone(),
    };
    let (engine, side) = (started_relay.detail + &account_line, Arc::clone(&node));
    let detail = Arc::new(move || format!("{engine}{}", side.detail()));
    let stage = Arc::new(AtomicU8::new(SERVING));
    let ([health, admin_port], admin) =
        probes(plan, &metrics, &servers, &services, &stage, detail, source)?;
    let listeners = AgentListeners::of(
        plan,
        &node.addresses,
        [health, admin_port],
        admin.2.as_ref().map(AdminSocket::path),
    );
    Ok(RunningAgent {
        health,
        listeners,
        target_listeners: node.addresses.clone(),
        metrics,
        node,
        servers,
        targets,
        dials,
        lane_watch,
        lane_room,
        services,
        relay,
        stage,
        stop,
        _admin: admin,
    })
}

/// Tells the search for servers which servers have leases. A silent API server delays nothing.
fn watch_leases(
    plan: &CountPlan,
    api: Arc<Api>,
    metrics: &AgentMetrics,
    servers: &Servers,
    services: &Tasks,
) {
    let (sender, mut leased) = watch::channel(None);
    let events = Arc::<AgentLeaseMetrics>::clone(metrics.leases());
    let watching = leases::watch::run(api, plan.scope.clone(), events, sender);
    services.spawn_always("lease-watch", watching);
    let servers = servers.clone();
    services.spawn_always("leases", async move {
        while leased.changed().await.is_ok() {
            let now = leased.borrow_and_update().clone();
            if let Some(ids) = now {
                servers.leased(ids.iter().map(|id| ServerId::new(id)).collect());
            }
        }
    });
}

/// Adds a line about silent servers to the lines of the verbose probe.
fn with_silence(detail: Detail, connected: Arc<AtomicUsize>, heard: Arc<AtomicUsize>) -> Detail {
    Arc::new(move || {
        let silent = connected.load(Relaxed).saturating_sub(heard.load(Relaxed));
        let silence = match silent {
            0 => String::new(),
            servers => {
                format!("[-]servers {servers} silent: other connections to them are tried\n")
            }
        };
        silence + &detail()
    })
}

type Admin = (AdminThread, Vec<AdminListener>, Option<AdminSocket>);

fn probes(
    plan: &AgentPlan,
    metrics: &AgentMetrics,
    servers: &Servers,
    services: &Tasks,
    stage: &Arc<AtomicU8>,
    detail: Detail,
    source: AgentSource,
) -> anyhow::Result<([Option<SocketAddr>; 2], Admin)> {
    let (adit, limits) = (metrics.adit().clone(), AdminLimits::default());
    let thread = AdminThread::start(limits, adit, services.clone())?;
    let (asker, questions) = readiness_channel();
    let (connected, heard, compat) = (servers.connected(), servers.heard(), plan.compat);
    let detail = with_silence(detail, Arc::clone(&connected), Arc::clone(&heard));
    let (watched, stage) = (services.clone(), Arc::clone(stage));
    services.spawn_always("readiness", async move {
        questions
            .answer(move || {
                let stage = stage.load(Relaxed);
                if stage == STOPPING {
                    Readiness::NotReady(SHUTTING_DOWN.into())
                } else if let Some(ended) = Readiness::without(&watched.ended_services()) {
                    ended
                } else if connected.load(Relaxed) == 0 {
                    Readiness::NotReady(NO_SERVER.into())
                } else if heard.load(Relaxed) == 0 && !compat {
                    Readiness::NotReady(SERVERS_SILENT.into())
                } else if stage == DRAINING && !compat {
                    Readiness::Draining
                } else {
                    Readiness::Ready
                }
            })
            .await;
    });
    let answers = status::service(Arc::new(source), asker.clone());
    let socket = thread.serve_socket(&plan.admin_socket, answers)?;
    let mut listeners = Vec::new();
    let mut health = None;
    if let Some(bind) = &plan.health {
        let service = HttpService::agent_health(Arc::new(asker), metrics.scrape(), detail);
        let listener = serve_probes(&thread, "health", bind, service, plan.compat)?;
        health = listener.as_ref().map(AdminListener::local_addr);
        listeners.extend(listener);
    }
    let mut admin = None;
    if let (Some(bind), Some(health)) = (&plan.admin, health) {
        let service = HttpService::agent_admin(health.port());
        let listener = serve_probes(&thread, "admin", bind, service, plan.compat)?;
        admin = listener.as_ref().map(AdminListener::local_addr);
        listeners.extend(listener);
    }
    Ok(([health, admin], (thread, listeners, socket)))
}

impl RunningAgent {
    /// Waits until this agent is linked to a server, and returns the first server's id.
    pub async fn first_server(&self) -> ServerId {
        self.servers.first().await
    }

    /// Announces that this agent goes away; tunnels and new dials still proceed.
    pub fn drain(&self) {
        self.stage.store(DRAINING, Relaxed);
        self.services.services_may_end();
        self.lane_room.close();
        self.node.close();
        self.servers.drain();
    }

    /// Waits, at most for `grace`, until no connection to a target or of this node is open and no dial has come for
    /// [`limits::DRAIN_QUIET`]: servers may have sent dials before they received DRAIN.
    pub async fn idle(&self, grace: Duration) {
        let (mut quiet_since, mut asked) = (Instant::now(), self.dials.asked());
        wait_until(grace, || {
            let asked_now = self.dials.asked();
            if self.is_busy() || asked_now != asked {
                (quiet_since, asked) = (Instant::now(), asked_now);
            }
            quiet_since.elapsed() >= limits::DRAIN_QUIET
        })
        .await;
    }

    fn is_busy(&self) -> bool {
        self.dials.under_way() > 0
            || self.metrics.open_endpoint_connections() > 0
            || self.lane_watch.draining() > 0
            || !self.servers.is_settled()
            || self.metrics.adit().node_connections() > 0
            || self.node.connections.running() > 0
    }

    /// Cuts the remaining tunnels and stops all tasks.
    pub async fn stop(self) {
        self.stage.store(STOPPING, Relaxed);
        let tunnels = self.metrics.adit().open_tunnels().all().len();
        self.services.services_may_end();
        // Before tunnels and lanes end: their keepers would replace each of them.
        self.lane_room.close();
        self.stop.cancel();
        self.node.close();
        if let Some(relay) = &self.relay {
            relay.shut_down();
        }
        let services = self.services.drain(Duration::ZERO).await;
        let _cut = self.node.connections.drain(Duration::ZERO).await;
        let left = async {
            // Time for the last packets of tunnels.
            tokio::time::sleep(limits::SHUTDOWN_FLUSH / 2).await;
            self.servers.leave().await;
        };
        let draining = self.targets.drain(limits::SHUTDOWN_FLUSH);
        let (_targets, ()) = tokio::join!(draining, left);
        tracing::info!(tunnels, services = services.cut_off, "stopped");
    }
}
