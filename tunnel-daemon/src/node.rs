//! Traffic from nodes to the control plane: what a server dials for agents, and an agent's listeners for its node.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;

use adit_core::destination::DestinationList;
use anyhow::Context as _;
use ipnet::IpNet;
use tokio_util::sync::CancellationToken;

use crate::descriptors;
use crate::ebpf::NodeRedirect;
use crate::listeners::address::listen_addr;
use crate::listeners::{Counted, Serve};
use crate::process::Process;
use crate::redirect_view::RedirectView;
use crate::server::tenant::Tenant;
use adit_agent::node::{DestinationSource, Fixed, NodeListener, NodeProxy as AgentDoor, TASKS_MAX};
use adit_agent::servers::Servers;
use adit_config::plan::{AgentPlan, DestinationsPlan, TargetListener};
use adit_net::accept::accept_loop;
use adit_net::accounts::Accounts;
use adit_net::dial::Dialer;
use adit_net::listen::Listener;
use adit_net::resolve::SystemResolver;
use adit_net::source_filter;
use adit_net::tasks::Tasks;
use adit_server::backend::{
    AgentDoors, DESTINATION_DIAL_TIMEOUT, Destinations, NodeProxy, NodeSettings,
};
use adit_telemetry::labels::Listener as ListenerLabel;

/// The proxy through which agents reach allowed destinations; `None` without a list of them.
///
/// # Errors
/// An entry of the list, or the system's resolver configuration, is invalid.
pub(super) fn proxy(
    plan: &DestinationsPlan,
    tenant: &Tenant,
    process: &Process,
    tasks: &Tasks,
) -> anyhow::Result<Option<Arc<dyn AgentDoors>>> {
    if plan.allowed.is_empty() {
        return Ok(None);
    }
    tracing::info!(
        destinations = plan.allowed.join(" "),
        proxy_header = plan.proxy_header,
        "agents may open tunnels to these destinations"
    );
    let allowed = Arc::new(DestinationList::allowed_destinations(&plan.allowed)?);
    let permit = Arc::new(Destinations {
        allowed: Arc::clone(&allowed),
        own: Arc::clone(&tenant.own),
    });
    let resolver = Arc::new(SystemResolver::past_redirect(
        process.own_sockets.clone(),
        process.controls.reread.clone(),
    )?);
    let dialer = Dialer::accounted(
        resolver,
        permit,
        allowed,
        DESTINATION_DIAL_TIMEOUT,
        process.accounts.clone(),
        process.own_sockets.clone(),
        // Empty: each agent has a prefix of its own, with its id.
        "",
    );
    Ok(Some(NodeProxy::new(NodeSettings {
        dialer,
        proxy_header: plan.proxy_header,
        access: Arc::clone(&tenant.access),
        metrics: process.metrics.clone(),
        tasks: tasks.clone(),
        descriptors: Arc::clone(&process.descriptors),
        tunnels_max: descriptors::lanes_max(),
        leaving: process.stop.clone(),
    })))
}

/// Builds the accept loop of a listener from the source of its connections' destinations.
pub(crate) type NodeServe = Arc<dyn Fn(Arc<dyn DestinationSource>) -> Serve + Send + Sync>;

/// The listeners of an agent for its node.
pub(super) struct NodeSide {
    proxy: Arc<AgentDoor>,
    /// Their addresses, in the order of the plan.
    pub(super) addresses: Vec<SocketAddr>,
    /// Open connections of these listeners.
    pub(super) connections: Tasks,
    redirect: NodeRedirect,
    view: Arc<RedirectView>,
    stop: CancellationToken,
}

impl NodeSide {
    /// Opens the listeners; no server needs to be linked yet.
    ///
    /// # Errors
    /// An address that cannot be listened on; the error names it.
    pub(super) fn start(
        plan: &AgentPlan,
        servers: &Servers,
        process: &Process,
    ) -> anyhow::Result<Self> {
        let (accounts, services) = (&process.accounts, &process.services);
        let proxy = AgentDoor::new(
            servers.lanes(),
            process.metrics.clone(),
            Arc::clone(&process.descriptors),
            accounts.clone(),
            plan.agent_id.clone(),
        );
        let mut side = Self {
            proxy,
            addresses: Vec::new(),
            connections: Tasks::new(TASKS_MAX),
            redirect: NodeRedirect::none(),
            view: Arc::clone(&process.redirect),
            stop: CancellationToken::new(),
        };
        let events = Counted::new(process, ListenerLabel::Node);
        let (lanes, tasks) = (Arc::clone(&side.proxy), side.connections.clone());
        let proxy: NodeServe = Arc::new(move |source| {
            let node = NodeListener::new(&lanes, source);
            let (tasks, events) = (tasks.clone(), Arc::clone(&events));
            Arc::new(move |listener, stop| {
                let node = node.clone();
                let serve = move |stream| node.clone().serve(stream);
                let (tasks, events) = (tasks.clone(), Arc::clone(&events));
                Box::pin(async move {
                    drop(accept_loop(listener, None, tasks, events, stop, serve).await);
                })
            })
        });
        let serve = |side: &Self, listener: Listener, source: Arc<dyn DestinationSource>| {
            let serving = proxy(source)(listener, side.stop.clone());
            services.spawn_always("node-listener", serving);
        };
        if let Some(plan) = &plan.redirect {
            side.redirect = NodeRedirect::start(plan, process, &proxy, &side.stop)?;
        }
        for target in &plan.target_listeners {
            let listener = listen(target, &plan.target_from, accounts)
                .with_context(|| format!("--target to {}", target.destination))?;
            let address = listener.tcp_addr().context("a listener has no address")?;
            tracing::info!(%address, destination = target.destination, "listening for the control plane");
            if !address.ip().is_loopback() && plan.target_from.is_empty() {
                tracing::warn!(
                    %address,
                    destination = target.destination,
                    "--target listens on an address that is not loopback: every host that can reach the address can reach the \
                     destination in the control plane; name the pods' networks by --target-from"
                );
            }
            side.addresses.push(address);
            let source = Arc::new(Fixed(target.destination.as_str().into()));
            serve(&side, listener, source);
        }
        Ok(side)
    }

    /// Stops accepting connections; open connections go on.
    pub(super) fn close(&self) {
        self.redirect.detach();
        self.stop.cancel();
    }

    /// Lines for `/readyz?verbose`.
    pub(super) fn detail(&self) -> String {
        let redirect = self.view.detail();
        if self.addresses.is_empty() && redirect.is_empty() {
            return String::new();
        }
        match self.proxy.state() {
            Ok(word) => format!("{redirect}[+]node-to-control-plane {word}\n"),
            Err(why) => format!("{redirect}[-]node-to-control-plane {why}\n"),
        }
    }
}

/// Listens for the sources alone, from the first connection on.
fn listen(
    target: &TargetListener,
    sources: &[IpNet],
    accounts: &Accounts,
) -> anyhow::Result<Listener> {
    let filtered = Cell::new(Ok(()));
    let listener = Listener::bind_with(&listen_addr(&target.bind)?, |socket| {
        accounts.listening(&socket);
        if !sources.is_empty() {
            filtered.set(source_filter::attach(&socket, sources));
        }
    })?;
    filtered.into_inner().context(
        "the kernel refuses the filter of --target-from: leave the flag out, and have a packet filter drop other sources",
    )?;
    Ok(listener)
}
