//! Captures connections of this node's processes to Service addresses of the control plane (KEP-2025).
//!
//! A missing requirement never keeps the agent from starting: connections then go directly to the Service.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use ipnet::IpNet;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::capture::{listen, not_redirected};
use super::netns::Namespaces;
use super::origin::RedirectOrigin;
use super::rules::{Apply, Followed};
use super::table::LISTENER;
use super::watch::{log_active, maintain};
use crate::node::NodeServe;
use crate::process::Process;
use adit_agent::node::{DestinationSource, Wanted};
use adit_config::plan::{NodeRedirectPlan, OnFailure, Program};
use adit_net::accounts::Accounts;
use adit_net::listen::{ListenAddr, Listener};
use adit_net::original_dst::{OriginError, OriginSource as _};
use adit_net::self_sockets::SocketExemptions;
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};
use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{NodeRefusal, RedirectRefusal};

/// The redirect of an agent, if it has one.
pub(crate) struct NodeRedirect(Option<Arc<Redirect>>);

impl NodeRedirect {
    /// No redirect is requested.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Attaches programs to the plan's cgroup. A missing requirement is logged.
    ///
    /// # Errors
    /// The rule file is invalid; the error has its name and line.
    pub(crate) fn start(
        plan: &NodeRedirectPlan,
        process: &Process,
        proxy: &NodeServe,
        stop: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let path = plan.file.as_deref();
        let merged = Followed::merge(plan, path, Program::Agent, NodeRedirectPlan::with)?;
        let (all, followed) = merged;
        match attach(plan, &all, followed, process, proxy, stop) {
            Ok(redirect) => Ok(Self(Some(redirect))),
            Err(error) => {
                not_redirected(&error, &process.redirect);
                Ok(Self::none())
            }
        }
    }

    /// Stops redirecting: new calls connect directly; open connections go on.
    pub(crate) fn detach(&self) {
        if let Some(redirect) = &self.0 {
            redirect.detach();
        }
    }
}

/// Listens first and tells the kernel afterwards: no call is sent to a port without a listener.
fn attach(
    plan: &NodeRedirectPlan,
    all: &NodeRedirectPlan,
    followed: Option<Followed>,
    process: &Process,
    proxy: &NodeServe,
    stop: &CancellationToken,
) -> anyhow::Result<Arc<Redirect>> {
    let Process {
        metrics,
        accounts,
        own_sockets,
        services,
        controls,
        redirect: view,
        ..
    } = process;
    let redirect = Arc::new(Redirect::attach(OBJECT, &plan.cgroup)?);
    let bound = listen(&redirect, 0, accounts)?;
    let at_node = listen_at_node(&redirect, plan, accounts)?;
    // Before there are rules: the agent already connects to its servers.
    own_sockets.spared_by(&(Arc::clone(&redirect) as Arc<dyn SocketExemptions>));
    let rules = rules(all);
    redirect.replace_rules(&rules)?;
    log_active(&plan.cgroup, rules.len(), view);
    let cgroup = plan.cgroup.display().to_string();
    tracing::info!(
        cgroup,
        services = rules.len(),
        "redirect to the control plane"
    );
    let destinations = Arc::new(ArcSwap::from_pointee(Destinations::of(all)));
    let source = |at_node| -> Arc<dyn DestinationSource> {
        Arc::new(Services {
            redirect: Arc::clone(&redirect),
            at_node,
            destinations: Arc::clone(&destinations),
            metrics: metrics.clone(),
        })
    };
    let serve = proxy(source(false));
    let serve_at_node = proxy(source(true));
    for (serve, listeners) in [(&serve, bound), (&serve_at_node, at_node)] {
        for listener in listeners {
            services.spawn_always("node-listener", serve(listener, stop.clone()));
        }
    }
    if let Some(followed) = followed {
        view.file(followed.path());
        let apply = apply(plan, &redirect, destinations);
        let (view, reread) = (Arc::clone(view), controls.reread.clone());
        let following = followed.follow(apply, view, reread, stop.clone());
        services.spawn_always("redirect-file", following);
    }
    if let Some(netns) = &plan.netns {
        let parts = (Arc::clone(&redirect), 0, Arc::clone(view), serve);
        if let Some((namespaces, helper)) =
            Namespaces::start(netns, &plan.cgroup, parts, accounts, stop)
        {
            services.spawn_always("redirect-netns", namespaces.keep(helper));
        }
    }
    maintain(process, &redirect, OnFailure::Open, &plan.cgroup, stop);
    Ok(redirect)
}

/// Listeners at the node's addresses, for callers in namespaces without a listener.
fn listen_at_node(
    redirect: &Redirect,
    plan: &NodeRedirectPlan,
    accounts: &Accounts,
) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for ip in &plan.node_addresses {
        let at = ListenAddr::Tcp((*ip, 0).into());
        let listener = Listener::bind_with(&at, |socket| accounts.listening(&socket))
            .with_context(|| format!("--redirect-node-address {ip}"))?;
        listeners.push(listener);
    }
    let at = |v6: bool| {
        let mut addresses = listeners.iter().filter_map(Listener::tcp_addr);
        addresses.find(|address| address.is_ipv6() == v6)
    };
    if !listeners.is_empty() {
        redirect.set_node_listener(LISTENER, at(false), at(true))?;
    }
    Ok(listeners)
}

fn rules(plan: &NodeRedirectPlan) -> Vec<RedirectRule> {
    let services = plan.services.iter();
    services
        .map(|service| rule(service.address, Action::Redirect(LISTENER)))
        .collect()
}

fn apply(
    plan: &NodeRedirectPlan,
    redirect: &Arc<Redirect>,
    destinations: Arc<ArcSwap<Destinations>>,
) -> Apply {
    let (plan, redirect) = (plan.clone(), Arc::clone(redirect));
    Arc::new(move |file| {
        let all = plan.with(file).map_err(anyhow::Error::new)?;
        let rules = rules(&all);
        // Publish destinations before the rules, so that connections captured by the new rules find theirs.
        let before = destinations.load_full();
        destinations.store(Arc::new(Destinations {
            now: Destinations::of(&all).now,
            before: before.now.clone(),
        }));
        match redirect.replace_rules(&rules) {
            Ok(set) => Ok((rules.len(), set)),
            Err(error) => {
                destinations.store(before);
                Err(error.into())
            }
        }
    })
}

/// Destinations by Service address.
struct Destinations {
    now: HashMap<SocketAddr, Arc<str>>,
    /// Destinations of the previous rules: connections that those captured may arrive a moment later.
    before: HashMap<SocketAddr, Arc<str>>,
}

impl Destinations {
    fn of(plan: &NodeRedirectPlan) -> Self {
        let services = plan.services.iter();
        Self {
            now: services
                .map(|service| (service.address, service.destination.as_str().into()))
                .collect(),
            before: HashMap::new(),
        }
    }

    fn of_service(&self, address: SocketAddr) -> Option<Arc<str>> {
        let found = self.now.get(&address);
        found.or_else(|| self.before.get(&address)).cloned()
    }
}

fn rule(address: SocketAddr, action: Action) -> RedirectRule {
    RedirectRule {
        network: IpNet::from(address.ip()),
        port: Some(address.port()),
        action,
    }
}

/// Finds the destinations of captured connections.
struct Services {
    redirect: Arc<Redirect>,
    /// Connections arrive at the node's address.
    at_node: bool,
    destinations: Arc<ArcSwap<Destinations>>,
    metrics: AditMetrics,
}

impl Services {
    fn origin(&self, accepted: &TcpStream, peer: SocketAddr) -> Result<SocketAddr, OriginError> {
        if self.at_node {
            let found = self.redirect.origin_at_node(peer)?;
            return found.ok_or(OriginError::Unknown);
        }
        RedirectOrigin(Arc::clone(&self.redirect)).origin(accepted, peer)
    }
}

impl DestinationSource for Services {
    fn destination(&self, accepted: &TcpStream, peer: SocketAddr) -> Result<Wanted, NodeRefusal> {
        let found = match self.origin(accepted, peer) {
            Ok(service) => {
                let destination = self.destinations.load().of_service(service);
                destination.map(|destination| Wanted {
                    destination,
                    called: Some(service),
                })
            }
            Err(error) => {
                tracing::debug!(%peer, %error, "connection refused");
                self.metrics.redirect().refused.count(match error {
                    OriginError::Unknown => RedirectRefusal::UnknownOrigin,
                    OriginError::OwnAddress(_) => RedirectRefusal::OwnAddress,
                    OriginError::Kernel(_) => RedirectRefusal::Kernel,
                });
                None
            }
        };
        found.ok_or(NodeRefusal::NoDestination)
    }
}
