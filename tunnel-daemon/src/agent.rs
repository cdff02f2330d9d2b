//! The agent: starts links to servers and probes, drains and stops.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
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

use crate::budgets::isolation;
use crate::controls::Controls;
use crate::descriptors;
use crate::node::NodeSide;
use crate::probes::{NO_SERVER, Readiness, SERVERS_SILENT};
use crate::process::{Probes, Process, ProcessPlan};
use crate::status::AgentSource;
use adit_agent::connector::{ForwardProxies, RecentServers, ServerConnector};
use adit_agent::context::{Dials, LinkContext, TargetDialer};
use adit_agent::proxy_tunnels::ProxyTunnels;
use adit_agent::servers::{Servers, ServersSettings};
use adit_agent::sync::{SearchRules, SyncPolicy};
use adit_agent::target_proxy::ProxiedTargets;
use adit_config::limits;
use adit_config::plan::{AgentPlan, AgentTls, CountPlan, CountSource};
use adit_config::tls_policy::TlsPolicy;
use adit_host::wait::wait_until;
use adit_net::dial::Dialer;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_net::tasks::Tasks;
use adit_telemetry::AgentMetrics;
use adit_telemetry::metrics_lease::AgentLeaseMetrics;
use adit_tls::reload::{Reload, Reloadable, ReloadableClientTls};
use adit_tls::tls::{Alpn, ClientTls, TlsError};

/// Concurrent targets, dials and connections: far above any descriptor limit.
const TASKS_MAX: usize = 200_000;
/// A running agent.
pub struct RunningAgent {
    /// Address for probes and scrapes.
    pub health: Option<SocketAddr>,
    /// Addresses for connections to the control plane, in the order of the plan.
    pub target_listeners: Vec<SocketAddr>,
    pub metrics: AgentMetrics,
    pub(super) probes: Probes,
    process: Process,
    node: Arc<NodeSide>,
    servers: Servers,
    targets: Tasks,
    dials: Arc<Dials>,
    /// Cancelled once this agent was told to end; it serves tunnels and new dials until it does.
    draining: CancellationToken,
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
    let common = ProcessPlan::of_agent(plan);
    let metrics = AgentMetrics::new();
    let process = Process::start(&common, metrics.adit(), controls).await?;
    let (targets, services) = (Tasks::new(TASKS_MAX), &process.services);
    let own_sockets = &process.own_sockets;
    let resolver = Arc::new(SystemResolver::past_redirect(
        own_sockets.clone(),
        process.controls.reread.clone(),
    )?);
    // Queries for targets' names that no name server answers must not delay the resolution of server names.
    let server_resolver = Arc::new(resolver.sibling());
    let allowed = match &plan.allow_targets {
        None => DestinationList::open(),
        Some(entries) => DestinationList::allow_targets(entries)?,
    };
    let tls = agent_tls(plan)?;
    let api = match &plan.leases {
        // The words of upstream's error message.
        Some(leases) => Some(
            Api::open(leases.api.clone())
                .await
                .context("failed to load kubernetes client config")?,
        ),
        None => None,
    };
    let watched = vec![("server connection", Arc::clone(&tls) as Arc<dyn Reload>)];
    let certificates = process.watch_files(watched, api.as_ref(), Vec::new());
    let dialer = target_dialer(plan, &process, resolver, &Arc::new(allowed))?;
    let context = LinkContext {
        agent: plan.agent_id.clone(),
        dialer,
        isolation: isolation(&process.isolation),
        budget: Arc::clone(&process.budget),
        warn_on_channel_limit: plan.warn_on_channel_limit,
        metrics: metrics.clone(),
        tasks: targets.clone(),
        dials: Arc::default(),
        lane_room: Arc::clone(&process.lane_room),
        lane_watch: Arc::clone(&process.lane_watch),
        relay: process.relay.relay.clone(),
        asker: None,
    };
    let dials = Arc::clone(&context.dials);
    let room = Arc::clone(&process.lane_room);
    let counted = Arc::clone(&process.descriptors);
    let giving_up = counted.run(descriptors::DRAINED_AFTER, move |lanes| room.give_up(lanes));
    services.spawn_always("descriptors", giving_up);
    let settings = ServersSettings {
        addresses: plan.servers.clone(),
        connector: ServerConnector {
            resolver: server_resolver,
            tls,
            proxies: ForwardProxies::new(
                &plan.forward_proxy,
                &TlsPolicy::default(),
                &process.budget,
                own_sockets,
            ),
            accounts: process.accounts.clone(),
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
            peer: None,
            zone: None,
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
        lane_security: process.relay.data_path.lane_security,
        serves_node: plan.redirect.is_some() || !plan.target_listeners.is_empty(),
    };
    let servers = Servers::start(settings, context, services);
    if let (Some(leases), Some(api)) = (&plan.leases, api) {
        watch_leases(leases, api, &metrics, &servers, services);
    }
    let node = Arc::new(NodeSide::start(plan, &servers, &process)?);
    let source = AgentSource {
        common: process.common(&common, certificates),
        servers: servers.clone(),
    };
    let (connected, heard, compat) = (servers.connected(), servers.heard(), plan.compat);
    let [relay_line, account_line] = process.lines();
    let (on, of, side) = (
        Arc::clone(&connected),
        Arc::clone(&heard),
        Arc::clone(&node),
    );
    let detail = Arc::new(move || {
        let silent = silence(&on, &of);
        format!("{silent}{relay_line}{account_line}{}", side.detail())
    });
    let draining = CancellationToken::new();
    let drains = draining.clone();
    let serving = move || {
        if connected.load(Relaxed) == 0 {
            Readiness::NotReady(NO_SERVER.into())
        } else if heard.load(Relaxed) == 0 && !compat {
            Readiness::NotReady(SERVERS_SILENT.into())
        } else if drains.is_cancelled() && !compat {
            Readiness::Draining
        } else {
            Readiness::Ready
        }
    };
    let scrape = metrics.scrape();
    let probes = process.answer_probes(&common, scrape, Arc::new(source), detail, serving)?;
    Ok(RunningAgent {
        health: probes.health(),
        target_listeners: node.addresses.clone(),
        metrics,
        probes,
        process,
        node,
        servers,
        targets,
        dials,
        draining,
    })
}

/// Opens connections to targets: directly, or through their proxy.
fn target_dialer(
    plan: &AgentPlan,
    process: &Process,
    resolver: Arc<dyn Resolve>,
    allowed: &Arc<DestinationList>,
) -> Result<Arc<dyn TargetDialer>, TlsError> {
    let dialer = |permitted: &Arc<DestinationList>| {
        Dialer::accounted(
            Arc::clone(&resolver),
            Arc::<DestinationList>::clone(permitted),
            Arc::clone(allowed),
            plan.dial_timeout,
            process.accounts.clone(),
            process.own_sockets.clone(),
            plan.agent_id.as_str(),
        )
    };
    Ok(match &plan.target_proxy {
        None => Arc::new(dialer(allowed)),
        Some(proxy) => Arc::new(ProxiedTargets {
            direct: dialer(allowed),
            to_proxy: dialer(&Arc::new(DestinationList::open())),
            allowed: Arc::clone(allowed),
            tunnels: ProxyTunnels::new(
                "ADIT_TARGET_PROXY",
                proxy.is_tls,
                (&TlsPolicy::default(), plan.forward_proxy.ca_cert.as_deref()),
                (&process.budget, &process.own_sockets),
            )?,
            proxy: proxy.clone(),
            no_proxy: plan.forward_proxy.no_proxy.clone().unwrap_or_default(),
            timeout: plan.dial_timeout,
        }),
    })
}

/// What an agent uses towards servers.
pub(crate) fn agent_tls(plan: &AgentPlan) -> Result<Arc<ReloadableClientTls>, TlsError> {
    let alpn = Alpn::grpc(&plan.tls.alpn);
    client_tls(&plan.tls, TlsPolicy::default(), alpn)
}

/// TLS towards servers.
pub(crate) fn client_tls(
    files: &AgentTls,
    policy: TlsPolicy,
    alpn: Alpn,
) -> Result<Arc<ReloadableClientTls>, TlsError> {
    let identity = files.identity.as_ref();
    Reloadable::load(ClientTls {
        crl: None,
        ca: files.ca_cert.clone(),
        identity: identity.map(|pair| (pair.cert.clone(), pair.key.clone())),
        policy,
        alpn,
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

/// The line of the verbose probe about silent servers, if there are any.
fn silence(connected: &AtomicUsize, heard: &AtomicUsize) -> String {
    match connected.load(Relaxed).saturating_sub(heard.load(Relaxed)) {
        0 => String::new(),
        silent => format!("[-]servers {silent} silent: other connections to them are tried\n"),
    }
}

impl RunningAgent {
    /// Waits until this agent is linked to a server, and returns the first server's id.
    pub async fn first_server(&self) -> ServerId {
        self.servers.first().await
    }

    /// Announces that this agent goes away; tunnels and new dials still proceed.
    pub fn drain(&self) {
        self.draining.cancel();
        self.process.services.services_may_end();
        self.process.lane_room.close();
        self.node.close();
        self.servers.drain();
    }

    /// Waits, at most for `grace`, until no connection to a target or of this node is open and no dial has come for
    /// [`limits::DRAIN_QUIET`]: servers may have sent dials before they received DRAIN.
    pub async fn idle(&self, grace: Duration) {
        let (mut quiet_since, mut asked) = (Instant::now(), self.dials.begun());
        wait_until(grace, || {
            let asked_now = self.dials.begun();
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
            || self.process.lane_watch.draining() > 0
            || !self.servers.is_settled()
            || self.metrics.adit().node_connections() > 0
            || self.node.connections.running() > 0
    }

    /// Cuts the remaining tunnels and stops all tasks.
    pub async fn stop(self) {
        self.process.ending.cancel();
        let tunnels = self.metrics.adit().open_tunnels().all().len();
        self.process.services.services_may_end();
        // Before tunnels and lanes end: their keepers would replace each of them.
        self.process.lane_room.close();
        self.process.stop.cancel();
        self.node.close();
        self.process.stop_relay();
        let services = self.process.services.drain(Duration::ZERO).await;
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
