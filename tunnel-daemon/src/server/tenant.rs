//! State shared by the clients and agents of one tenant.

use std::sync::Arc;

use adit_core::registry::{Registry, Strategy};
use adit_core::session::ProcessBudget;
use tokio_util::sync::CancellationToken;

use crate::budgets::{isolation_here, process_budget};
use crate::controls::Controls;
use adit_config::plan::{IsolationPlan, ServerPlan};
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::self_listeners::OwnListeners;
use adit_net::tasks::Tasks;
use adit_server::backend::AgentAuthorizer;
use adit_server::frontend::client_limits::ClientLimits;
use adit_server::frontend::events::FrontendContext;
use adit_server::router::{DialLimits, Router};
use adit_telemetry::{AccessLog, AditMetrics, ServerMetrics};
use adit_tls::reload::ReloadableServerTls;
use adit_tunnel::RawLaneRelay;

/// Router, budgets, rules and counts of one set of agents and their clients. A server has one tenant.
pub(super) struct Tenant {
    pub(super) metrics: ServerMetrics,
    /// Registry of links, and the caps of dials.
    pub(super) router: Arc<Router>,
    /// Budgets of a tunnel, a link and the process.
    pub(super) isolation: IsolationPlan,
    pub(super) budget: Arc<ProcessBudget>,
    pub(super) access: Arc<AccessLog>,
    /// Limits of clients and the destinations they may reach.
    clients: Arc<ClientLimits>,
    /// This server's listeners, to which agents may not connect.
    pub(super) own: Arc<OwnListeners>,
}

impl Tenant {
    /// The tenant of a plan, without agents.
    ///
    /// # Errors
    /// A limit exceeds `usize`.
    pub(super) fn new(plan: &ServerPlan) -> anyhow::Result<Self> {
        let isolation = isolation_here(&plan.isolation);
        let budget = process_budget(&isolation);
        let limits = DialLimits {
            pending_max: usize::try_from(plan.dial.pending_max.get())?,
            timeout: plan.dial.timeout,
            dead_after: plan.dial.link_dead_after,
        };
        let registry = Registry::new(plan.strategies.clone());
        let registry = registry.with_granted_identifiers(!plan.agents.grants.is_open());
        let registry = registry.with_zone(plan.agents.zone.clone());
        let strategies: Vec<&'static str> = plan.strategies.iter().map(Strategy::name).collect();
        let metrics = ServerMetrics::new(&strategies);
        metrics.adit().set_agents_labelled(plan.metrics_agents);
        let suppressed = metrics.adit().access_events_suppressed();
        Ok(Self {
            router: Router::within(registry, limits, Arc::clone(&budget)),
            isolation,
            budget,
            access: Arc::new(AccessLog::new(plan.access_log_limit, suppressed)),
            clients: Arc::new(ClientLimits::new(plan.client_rules.clone())),
            own: Arc::default(),
            metrics,
        })
    }

    pub(super) fn adit(&self) -> &AditMetrics {
        self.metrics.adit()
    }

    /// The authorizer of agents; it rechecks them whenever the deny list changes.
    ///
    /// # Errors
    /// The deny list cannot be read.
    pub(super) fn authorizer(
        &self,
        plan: &ServerPlan,
        tls: &Arc<ReloadableServerTls>,
        (links, services): (&Tasks, &Tasks),
        controls: &Controls,
        stop: &CancellationToken,
    ) -> anyhow::Result<AgentAuthorizer> {
        let authorizer = AgentAuthorizer::load(plan.agents.deny.as_deref(), Arc::clone(tls))?;
        let following = authorizer.clone().follow(
            plan.agents.deny.clone(),
            Arc::clone(&self.router),
            links.clone(),
            self.adit().clone(),
            controls.reread.clone(),
            stop.clone(),
        );
        services.spawn_always("agent-authorizer", following);
        Ok(authorizer)
    }

    /// State that this tenant's frontends share.
    pub(super) fn frontends(
        &self,
        relay: Option<&Arc<RawLaneRelay>>,
        descriptors: &Arc<Descriptors>,
        accounts: &Accounts,
    ) -> FrontendContext {
        FrontendContext {
            metrics: self.metrics.clone(),
            access: Arc::clone(&self.access),
            relay: relay.cloned(),
            descriptors: Arc::clone(descriptors),
            accounts: accounts.clone(),
            limits: Arc::clone(&self.clients),
        }
    }
}
