//! `adit proxy`: listeners for clients beside this process, whose tunnels go through servers elsewhere.

mod customer;
mod direct;
mod names;
mod routes;
mod servers;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use adit_core::registry::{Registry, Strategies};

use self::customer::Customer;
use self::direct::Direct;
use self::names::Names;
use self::routes::Routes;
use self::servers::Servers;
use crate::agent::client_tls;
use crate::controls::Controls;
use crate::listeners::Listening;
use crate::probes::Readiness;
use crate::process::{Probes, Process, ProcessPlan};
use crate::server::tenant::followed_users;
use crate::status::ServerSource;
use crate::status::model::Role;
use adit_agent::connector::{ForwardProxies, RecentServers, ServerConnector};
use adit_config::limits;
use adit_config::plan::ProxyPlan;
use adit_core::ids::AgentId;
use adit_host::wait::wait_until;
use adit_kube::services::Services;
use adit_net::resolve::SystemResolver;
use adit_net::tasks::Tasks;
use adit_server::frontend::client_limits::ClientLimits;
use adit_server::frontend::events::{FrontendContext, Upstream};
use adit_server::router::{DialLimits, Router};
use adit_telemetry::{AccessLog, ServerMetrics};
use adit_tls::reload::Reload;
use adit_tls::tls::Alpn;

/// Concurrent client connections: far above any descriptor limit.
const CLIENT_TASKS_MAX: usize = 400_000;

/// A running proxy.
pub struct RunningProxy {
    /// Addresses for TCP clients, in the order of the plan.
    pub frontends: Vec<SocketAddr>,
    /// Address for probes and scrapes.
    pub health: Option<SocketAddr>,
    pub metrics: ServerMetrics,
    router: Arc<Router>,
    process: Process,
    clients: Tasks,
    probes: Probes,
}

/// Starts a proxy on the current runtime.
///
/// # Errors
/// The failure of a listener, certificate or the admin thread, with its name.
pub async fn start(plan: &ProxyPlan) -> anyhow::Result<RunningProxy> {
    start_with(plan, &Controls::default()).await
}

/// Like [`start`], for a process that takes requests through `controls`.
///
/// # Errors
/// Like [`start`].
pub async fn start_with(plan: &ProxyPlan, controls: &Controls) -> anyhow::Result<RunningProxy> {
    let common = ProcessPlan::of_proxy(plan);
    let metrics = ServerMetrics::new(&["default"]);
    let process = Process::start(&common, metrics.adit(), controls).await?;
    let clients = Tasks::new(CLIENT_TASKS_MAX);
    let pending_max = usize::try_from(plan.pending_dials_max.get())?;
    let limits = DialLimits {
        pending_max,
        timeout: Some(plan.dial_timeout),
        dead_after: limits::LINK_DEAD_AFTER,
    };
    let router = Router::within(
        Registry::new(Strategies::default()),
        limits,
        Arc::clone(&process.budget),
    );
    let tls = client_tls(&plan.server_tls, plan.tls.clone(), Alpn::http11())?;
    let mut listening = Listening::new(&process, &plan.tls, false);
    let watched = Arc::clone(&tls) as Arc<dyn Reload>;
    listening.watched.push(("server connection", watched));
    let resolver = Arc::new(SystemResolver::past_redirect(
        process.own_sockets.clone(),
        process.controls.reread.clone(),
    )?);
    let connector = ServerConnector {
        // Names of targets that nobody answers must not delay those of servers.
        resolver: Arc::new(resolver.sibling()),
        tls,
        proxies: ForwardProxies::new(
            &plan.forward_proxy,
            &plan.tls,
            &process.budget,
            &process.own_sockets,
        ),
        accounts: process.accounts.clone(),
        own_sockets: process.own_sockets.clone(),
        agent: AgentId::new(&plan.id),
        recent_servers: RecentServers::default(),
    };
    let servers = Servers::new(plan, connector, &process);
    let services = Services::default();
    if let Some(source) = plan.names.services.clone() {
        let following = services.clone().follow(source);
        process.services.spawn_always("services", following);
    }
    let names = Names::new(&plan.names, services, &servers, Arc::clone(&resolver));
    let (own_sockets, others) = (process.own_sockets.clone(), plan.customer.hosts());
    let direct = Direct::new(&plan.direct, others, resolver, own_sockets)?;
    let customer = Customer::new(&plan.customer, &plan.tls)?;
    let routes = Routes::new(
        plan,
        &process,
        Arc::clone(&router),
        Arc::clone(&servers),
        (names, direct, customer),
    );
    let suppressed = metrics.adit().access_events_suppressed.clone();
    let context = Arc::new(FrontendContext {
        router: Arc::clone(&router),
        upstream: Some(Arc::new(routes) as Arc<dyn Upstream>),
        metrics: metrics.clone(),
        access: Arc::new(AccessLog::new(plan.access_log_limit, suppressed)),
        relay: None,
        descriptors: Arc::clone(&process.descriptors),
        accounts: process.accounts.clone(),
        limits: Arc::new(ClientLimits::new(plan.clients.rules.clone())),
        users: followed_users(&plan.clients, &process)?,
        tasks: clients.clone(),
        leaving: process.stop.clone(),
    });
    if !plan.clients.only_loopback && plan.clients.in_clear().any(|bind| !bind.is_loopback()) {
        tracing::warn!("a TCP frontend serves anyone who reaches it, in clear text");
        metrics.adit().insecure_flag("insecure-plaintext-frontend");
    }
    let frontends = listening.frontends(&plan.clients, &context)?;
    let certificates = process.watch_files(listening.watched, None, Vec::new());
    let source = ServerSource {
        common: process.common(&common, certificates),
        role: Role::Proxy,
        router: Arc::clone(&router),
        metrics: metrics.adit().clone(),
        announced: None,
        peers: None,
    };
    let (asked, told) = (Arc::clone(&servers), servers);
    let serving = move || match asked.any_may_answer() {
        true => Readiness::Ready,
        false => Readiness::NotReady(NO_SERVER_ANSWERS.into()),
    };
    let detail = Arc::new(move || told.lines());
    let scrape = metrics.scrape();
    let probes = process.answer_probes(&common, scrape, Arc::new(source), detail, serving)?;
    Ok(RunningProxy {
        frontends,
        health: probes.health(),
        metrics,
        router,
        process,
        clients,
        probes,
    })
}

/// Reason of a proxy all of whose servers have failed just now.
const NO_SERVER_ANSWERS: &str = "no server answers";

impl RunningProxy {
    /// Where the admin socket is.
    pub(super) fn admin_socket(&self) -> Option<&Path> {
        self.probes.socket()
    }

    /// Stops gracefully: calls [`Self::leave`], then cuts the remaining tunnels.
    pub async fn stop(self, grace: Option<Duration>) {
        self.leave(grace).await;
        self.cut(limits::SHUTDOWN_FLUSH).await;
    }

    /// Reports "not ready" and refuses new connections and dials; tunnels may finish within `grace` (`None`: no limit).
    pub async fn leave(&self, grace: Option<Duration>) {
        self.process.ending.cancel();
        self.process.services.services_may_end();
        self.router.refuse_dials();
        self.process.stop.cancel();
        let limit = grace.unwrap_or(Duration::MAX / 4);
        let clients = &self.clients;
        wait_until(limit.min(Duration::from_secs(u64::from(u32::MAX))), || {
            clients.running() == 0
        })
        .await;
    }

    /// Ends the remaining tunnels: clients have `flush` to take their last bytes, then their connections are reset.
    pub async fn cut(&self, flush: Duration) {
        let tunnels = self.metrics.adit().open_tunnels().all().len();
        self.process.lane_watch.shut_down();
        let _cut = self.clients.drain(flush).await;
        let services = self.process.services.drain(Duration::ZERO).await;
        tracing::info!(tunnels, services = services.cut_off, "stopped");
    }
}
