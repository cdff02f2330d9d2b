//! What a server and an agent start alike: budgets, accounting, the relay, watchers of files, and the ports for probes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use adit_core::session::ProcessBudget;
use adit_kube::access::Api;
use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::account;
use crate::admin::{AdminLimits, AdminListener, AdminSocket, AdminThread};
use crate::budgets::{self, isolation_here, keep_published, process_budget};
use crate::certificates::{CertificateEvents, CertificateTable, watch_kubeconfig};
use crate::check::Needs;
use crate::controls::Controls;
use crate::descriptors;
use crate::ebpf_flags;
use crate::listeners::address::socket_addr;
use crate::memory_pressure;
use crate::probes::{
    Detail, HttpService, Readiness, ReadinessStyle, SHUTTING_DOWN, readiness_channel,
};
use crate::redirect_view::RedirectView;
use crate::relay;
use crate::start_files;
use crate::status::answer::Source;
use crate::status::model::{AccountStatus, Capability};
use crate::status::{self, Common};
use adit_config::address::BindAddress;
use adit_config::plan::{
    AccountPlan, AdminSocketPlan, AgentPlan, DataPathPlan, IsolationPlan, ProxyPlan, ServerPlan,
};
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_server::backend::AgentAuthorizer;
use adit_telemetry::{AditMetrics, Scrape};
use adit_tls::reload::{self, Reload};
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LaneWatch, RawLaneRelay};

/// Tasks of services: listeners, watchers and the like.
const SERVICE_TASKS_MAX: usize = 128;

/// The parts that a server's and an agent's plan have in common.
pub(super) struct ProcessPlan<'a> {
    id: &'a str,
    account: AccountPlan,
    isolation: &'a IsolationPlan,
    data_path: &'a DataPathPlan,
    admin_socket: &'a AdminSocketPlan,
    health: Option<&'a BindAddress>,
    admin: Option<&'a BindAddress>,
    compat: bool,
    redirects: bool,
    style: ReadinessStyle,
    needs: Needs,
    /// The first flag that needs eBPF.
    ebpf_flag: Option<&'static str>,
    /// Files that the start reads.
    files: Vec<PathBuf>,
}

impl<'a> ProcessPlan<'a> {
    pub(super) fn of_server(plan: &'a ServerPlan) -> Self {
        Self {
            id: plan.server_id.as_str(),
            account: plan.account,
            isolation: &plan.isolation,
            data_path: &plan.agents.data_path,
            admin_socket: &plan.admin_socket,
            health: plan.health.as_ref(),
            admin: plan.admin.as_ref(),
            compat: plan.compat,
            redirects: plan.transparent.redirect.is_some(),
            style: ReadinessStyle::Server,
            needs: Needs::of_server(plan),
            ebpf_flag: ebpf_flags::of_server(plan),
            files: start_files::of_server(plan),
        }
    }

    pub(super) fn of_proxy(plan: &'a ProxyPlan) -> Self {
        Self {
            id: &plan.id,
            account: AccountPlan::default(),
            isolation: &plan.isolation,
            data_path: &plan.data_path,
            admin_socket: &plan.admin_socket,
            health: plan.health.as_ref(),
            admin: None,
            compat: false,
            redirects: false,
            style: ReadinessStyle::Server,
            needs: Needs::default(),
            ebpf_flag: None,
            files: start_files::of_proxy(plan),
        }
    }

    pub(super) fn of_agent(plan: &'a AgentPlan) -> Self {
        Self {
            id: plan.agent_id.as_str(),
            account: plan.account,
            isolation: &plan.isolation,
            data_path: &plan.data_path,
            admin_socket: &plan.admin_socket,
            health: plan.health.as_ref(),
            admin: plan.admin.as_ref(),
            compat: plan.compat,
            redirects: plan.redirect.is_some(),
            style: ReadinessStyle::Agent,
            needs: Needs::of_agent(plan),
            ebpf_flag: ebpf_flags::of_agent(plan),
            files: start_files::of_agent(plan),
        }
    }
}

/// The running parts that server and agent have in common.
pub(super) struct Process {
    started: Instant,
    pub(super) controls: Controls,
    pub(super) metrics: AditMetrics,
    pub(super) services: Tasks,
    /// Cancelled when this process ends: it accepts and dials nothing more.
    pub(super) stop: CancellationToken,
    /// Cancelled before anything else ends, for readiness.
    pub(super) ending: CancellationToken,
    pub(super) descriptors: Arc<Descriptors>,
    /// Budgets of a tunnel and a link, within the memory of this process.
    pub(super) isolation: IsolationPlan,
    pub(super) budget: Arc<ProcessBudget>,
    pub(super) accounts: Accounts,
    account: AccountStatus,
    pub(super) own_sockets: OwnSockets,
    pub(super) lane_room: Arc<LaneRoom>,
    pub(super) lane_watch: Arc<LaneWatch>,
    pub(super) relay: relay::Started,
    pub(super) redirect: Arc<RedirectView>,
    host: Vec<Capability>,
}

impl Process {
    /// Starts these parts on the current runtime.
    ///
    /// # Errors
    /// A flag needs eBPF in a build without it, or the relay does not start.
    pub(super) async fn start(
        plan: &ProcessPlan<'_>,
        metrics: &AditMetrics,
        controls: &Controls,
    ) -> anyhow::Result<Self> {
        plan.ebpf_flag.map_or(Ok(()), ebpf_flags::check)?;
        start_files::wait_for(&plan.files).await;
        // Before a redirect is attached, which may capture the connection of a probe.
        let host = Common::host(plan.admin_socket.is_on(), plan.needs);
        let (started, services) = (Instant::now(), Tasks::new(SERVICE_TASKS_MAX));
        let (accounts, account) = account::start(plan.account, metrics, &services);
        let descriptors = Arc::new(Descriptors::of_process());
        let lanes_max = descriptors::lanes_max().min(budgets::lanes_max());
        let isolation = isolation_here(plan.isolation);
        let budget = process_budget(&isolation);
        let half_closed = isolation.half_closed_timeout;
        let data_path = plan.data_path;
        let relay = relay::start(
            data_path,
            lanes_max,
            half_closed,
            &budget,
            metrics,
            &services,
        )?;
        let publishing = keep_published(metrics.clone(), Arc::clone(&budget));
        services.spawn_always("memory-gauges", publishing);
        let pressure = memory_pressure::watch(Arc::clone(&budget), relay.relay.clone());
        services.spawn_always("memory", pressure);
        let lane_watch = Arc::<LaneWatch>::default();
        let watch = Arc::clone(&lane_watch);
        services.spawn_always("lane-watch", async move { watch.run().await });
        Ok(Self {
            started,
            controls: controls.clone(),
            metrics: metrics.clone(),
            services,
            stop: CancellationToken::new(),
            ending: CancellationToken::new(),
            lane_room: Arc::new(LaneRoom::new(lanes_max, Arc::clone(&descriptors))),
            descriptors,
            isolation,
            budget,
            accounts,
            account,
            own_sockets: if plan.redirects {
                OwnSockets::on()
            } else {
                OwnSockets::off()
            },
            lane_watch,
            relay,
            redirect: Arc::new(RedirectView::new(metrics)),
            host,
        })
    }

    /// Loads TLS files again when they change, and reports when certificates expire. `authorizers`: check agents and
    /// peers again when the files of this name are new.
    pub(super) fn watch_files(
        &self,
        watched: Vec<(&'static str, Arc<dyn Reload>)>,
        api: Option<&Arc<Api>>,
        authorizers: Vec<(&'static str, AgentAuthorizer)>,
    ) -> Arc<CertificateTable> {
        let events = Arc::new(CertificateEvents::new(self.metrics.clone(), authorizers));
        let table = Arc::clone(events.table());
        let (reread, stop) = (&self.controls.reread, &self.stop);
        if let Some(api) = api {
            let (api, events) = (Arc::clone(api), Arc::clone(&events));
            let watching = watch_kubeconfig(api, events, reread.clone(), stop.clone());
            self.services.spawn_always("kubeconfig", watching);
        }
        let (reread, stop) = (reread.clone(), stop.clone());
        let watching = reload::watch(watched, reload::POLL_PERIOD, events, reread, stop);
        self.services.spawn_always("tls-files", watching);
        table
    }

    /// The common part of what the admin socket shows.
    pub(super) fn common(
        &self,
        plan: &ProcessPlan<'_>,
        certificates: Arc<CertificateTable>,
    ) -> Common {
        Common {
            id: plan.id.to_owned(),
            started: self.started,
            tunnels: Arc::clone(self.metrics.open_tunnels()),
            budget: Arc::clone(&self.budget),
            link_budget_bytes: self.isolation.agent_budget_bytes,
            descriptors: Arc::clone(&self.descriptors),
            data_path: self.relay.data_path,
            lanes_max: self.lane_room.lanes_max(),
            engine: self.relay.engine.clone(),
            relay: self.relay.relay.as_deref().map(RawLaneRelay::handle),
            host: self.host.clone(),
            redirect: Arc::clone(&self.redirect),
            account: self.account.clone(),
            debug: self.controls.debug.clone(),
            certificates,
        }
    }

    /// Lines of `/readyz?verbose` about the relay and about accounting.
    pub(super) fn lines(&self) -> [String; 2] {
        [self.relay.detail.clone(), account::line(&self.account)]
    }

    /// Starts the admin thread and its listeners. `serving`: readiness until this process ends.
    ///
    /// # Errors
    /// The thread does not start, or a listener cannot be opened.
    pub(super) fn answer_probes(
        &self,
        plan: &ProcessPlan<'_>,
        scrape: Scrape,
        source: Arc<dyn Source>,
        detail: Detail,
        mut serving: impl FnMut() -> Readiness + Send + 'static,
    ) -> anyhow::Result<Probes> {
        let (asker, questions) = readiness_channel();
        let (ending, watched) = (self.ending.clone(), self.services.clone());
        let answering = questions.answer(move || {
            if ending.is_cancelled() {
                return Readiness::NotReady(SHUTTING_DOWN.into());
            }
            Readiness::without(&watched.ended_services()).unwrap_or_else(&mut serving)
        });
        self.services.spawn_always("readiness", answering);
        let (metrics, services) = (self.metrics.clone(), self.services.clone());
        let thread = AdminThread::start(AdminLimits::default(), metrics, services)?;
        let answers = status::service(source, asker.clone());
        let socket = thread.serve_socket(plan.admin_socket, answers)?;
        let listen = |name, bind: Option<&BindAddress>, service| match bind {
            Some(bind) => serve_probes(&thread, name, bind, service, plan.compat),
            None => Ok(None),
        };
        let asker = Arc::new(asker);
        let service = HttpService::health(plan.style, asker, scrape.clone(), detail);
        let health = listen("health", plan.health, service)?;
        let admin = match (plan.style, &health) {
            (ReadinessStyle::Server, _) => Some(HttpService::server_admin(scrape)),
            (ReadinessStyle::Agent, Some(health)) => {
                Some(HttpService::agent_admin(health.local_addr().port()))
            }
            (ReadinessStyle::Agent, None) => None,
        };
        let admin = admin.map(|service| listen("admin", plan.admin, service));
        let admin = admin.transpose()?.flatten();
        Ok(Probes {
            _thread: thread,
            health,
            admin,
            socket,
        })
    }

    /// Ends the relay's tunnels.
    pub(super) fn stop_relay(&self) {
        if let Some(relay) = &self.relay.relay {
            relay.shut_down();
        }
    }
}

/// The admin thread and its listeners; dropping this closes them.
pub(super) struct Probes {
    _thread: AdminThread,
    health: Option<AdminListener>,
    admin: Option<AdminListener>,
    socket: Option<AdminSocket>,
}

impl Probes {
    /// Address for probes and scrapes.
    pub(super) fn health(&self) -> Option<SocketAddr> {
        self.health.as_ref().map(AdminListener::local_addr)
    }

    /// Address of the admin port.
    pub(super) fn admin(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(AdminListener::local_addr)
    }

    /// Where the admin socket is.
    pub(super) fn socket(&self) -> Option<&Path> {
        self.socket.as_ref().map(AdminSocket::path)
    }
}

/// Listens for probes and scrapes; messages use `name`: `health`, `admin`. In `compat` mode a failure is logged and `None`
/// returned, as upstream's programs go on without the listener.
///
/// # Errors
/// The address cannot be listened on, or its host name has no address.
fn serve_probes(
    thread: &AdminThread,
    name: &'static str,
    bind: &BindAddress,
    service: HttpService,
    compat: bool,
) -> anyhow::Result<Option<AdminListener>> {
    let served = socket_addr(bind)
        .with_context(|| format!("{name} port"))
        .and_then(|address| Ok(thread.serve(name, address, service)?));
    match served {
        Err(error) if compat => {
            let error = format!("{error:#}");
            tracing::error!(error, "listener failed; going on without it");
            Ok(None)
        }
        served => served.map(Some),
    }
}
