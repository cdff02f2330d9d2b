//! State shared by the clients and agents of one tenant.

use std::sync::Arc;

use adit_core::registry::{Registry, Strategy};

use crate::process::Process;
use adit_config::plan::{ClientsPlan, ServerPlan};
use adit_net::self_listeners::OwnListeners;
use adit_net::tasks::Tasks;
use adit_server::backend::AgentAuthorizer;
use adit_server::frontend::client_limits::ClientLimits;
use adit_server::frontend::events::FrontendContext;
use adit_server::frontend::users::FrontendUsers;
use adit_server::router::{DialLimits, Router};
use adit_telemetry::{AccessLog, ServerMetrics};
use adit_tls::reload::ReloadableServerTls;

/// Router, rules and counts of one set of agents and their clients. A server has one tenant.
pub(crate) struct Tenant {
    pub(super) metrics: ServerMetrics,
    /// Registry of links, and the caps of dials.
    pub(crate) router: Arc<Router>,
    pub(crate) access: Arc<AccessLog>,
    /// Limits of clients and the destinations they may reach.
    clients: Arc<ClientLimits>,
    /// This server's listeners, to which agents may not connect.
    pub(crate) own: Arc<OwnListeners>,
}

impl Tenant {
    /// Counters of a plan's tenant.
    pub(super) fn metrics(plan: &ServerPlan) -> ServerMetrics {
        let strategies: Vec<&'static str> = plan.strategies.iter().map(Strategy::name).collect();
        let metrics = ServerMetrics::new(&strategies);
        metrics.adit().set_agents_labelled(plan.metrics_agents);
        metrics
    }

    /// The tenant of a plan, without agents.
    ///
    /// # Errors
    /// A limit exceeds `usize`.
    pub(super) fn new(
        plan: &ServerPlan,
        process: &Process,
        metrics: ServerMetrics,
    ) -> anyhow::Result<Self> {
        let limits = DialLimits {
            pending_max: usize::try_from(plan.dial.pending_max.get())?,
            timeout: plan.dial.timeout,
            dead_after: plan.dial.link_dead_after,
        };
        let registry = Registry::new(plan.strategies.clone());
        let registry = registry.with_granted_identifiers(!plan.agents.grants.is_open());
        let registry = registry.with_zone(plan.agents.zone.clone());
        let suppressed = metrics.adit().access_events_suppressed.clone();
        Ok(Self {
            router: Router::within(registry, limits, Arc::clone(&process.budget)),
            access: Arc::new(AccessLog::new(plan.access_log_limit, suppressed)),
            clients: Arc::new(ClientLimits::new(plan.clients.rules.clone())),
            own: Arc::default(),
            metrics,
        })
    }

    /// The authorizer of agents; it rechecks them whenever the deny list changes.
    ///
    /// # Errors
    /// The deny list cannot be read.
    pub(super) fn authorizer(
        &self,
        plan: &ServerPlan,
        tls: &Arc<ReloadableServerTls>,
        links: &Tasks,
        process: &Process,
    ) -> anyhow::Result<AgentAuthorizer> {
        let authorizer = AgentAuthorizer::load(plan.agents.deny.as_deref(), Arc::clone(tls))?;
        let following = authorizer.clone().follow(
            Arc::clone(&self.router),
            links.clone(),
            process.metrics.clone(),
            process.controls.reread.clone(),
            process.stop.clone(),
        );
        process.services.spawn_always("agent-authorizer", following);
        Ok(authorizer)
    }

    /// State that this tenant's frontends share.
    ///
    /// # Errors
    /// The list of users cannot be used.
    pub(super) fn frontends(
        &self,
        plan: &ServerPlan,
        process: &Process,
        clients: &Tasks,
    ) -> anyhow::Result<Arc<FrontendContext>> {
        let users = followed_users(&plan.clients, process)?;
        Ok(Arc::new(FrontendContext {
            router: Arc::clone(&self.router),
            upstream: None,
            metrics: self.metrics.clone(),
            access: Arc::clone(&self.access),
            relay: process.relay.relay.clone(),
            descriptors: Arc::clone(&process.descriptors),
            accounts: process.accounts.clone(),
            limits: Arc::clone(&self.clients),
            users,
            tasks: clients.clone(),
            leaving: process.stop.clone(),
        }))
    }
}

/// The users of a plan's frontends, from a file that is followed from now on.
///
/// # Errors
/// The list cannot be used.
pub(crate) fn followed_users(
    plan: &ClientsPlan,
    process: &Process,
) -> anyhow::Result<Option<FrontendUsers>> {
    let users = plan.users.as_deref().map(FrontendUsers::load).transpose()?;
    if let Some(users) = users.clone() {
        let following = users.follow(process.metrics.clone(), process.controls.reread.clone());
        process.services.spawn_always("frontend-users", following);
    }
    Ok(users)
}
