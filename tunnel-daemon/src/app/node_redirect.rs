//! Connections of this node's processes to Service addresses of the control plane, taken from under them (KEP-2025).
//!
//! Nothing that is missing here keeps the agent from starting: connections go where they go then.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use ipnet::IpNet;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::redirect::{LISTENER, RedirectOrigin, join, listen, look_after, missing};
use crate::agent::node::Wants;
use crate::config::plan::NodeRedirectPlan;
use crate::ebpf::account::Accounts;
use crate::ebpf::caps::HostCaps;
use crate::ebpf::object::OBJECT;
use crate::ebpf::redirect::{Action, Redirect, RedirectRule};
use crate::net::listen::Listener;
use crate::net::origin::{OriginError, OriginSource as _};
use crate::net::tasks::Tasks;
use crate::telemetry::AditMetrics;
use crate::telemetry::labels::{NodeRefusal, RedirectRefusal, RedirectState};

/// The redirect of an agent, if it has one.
pub(super) struct NodeRedirect {
    redirect: Option<Arc<Redirect>>,
    detail: String,
}

/// Listeners, and where their connections want to go.
pub(super) type Doors = (Vec<Listener>, Arc<dyn Wants>);

impl NodeRedirect {
    /// None was asked for.
    pub(super) fn none() -> Self {
        Self {
            redirect: None,
            detail: String::new(),
        }
    }

    /// Attaches programs to the plan's cgroup. Whatever is missing is a line in the log.
    pub(super) fn start(
        plan: &NodeRedirectPlan,
        metrics: &AditMetrics,
        accounts: &Accounts,
        services: &Tasks,
        stop: &CancellationToken,
    ) -> (Self, Option<Doors>) {
        let (cgroup, count) = (plan.cgroup.display().to_string(), plan.services.len());
        match attach(plan, metrics, accounts) {
            Ok((redirect, doors)) => {
                metrics.redirect().set_state(RedirectState::Active);
                metrics.redirect().set_rules(count);
                tracing::info!(cgroup, services = count, "redirect to the control plane");
                let looked_after = look_after(
                    Arc::clone(&redirect),
                    plan.cgroup.clone(),
                    metrics.clone(),
                    stop.clone(),
                );
                services.spawn_always("redirect", looked_after);
                let detail = format!("[+]redirect active: {count} addresses on {cgroup}\n");
                let redirect = Some(redirect);
                (Self { redirect, detail }, Some(doors))
            }
            Err(error) => {
                metrics.redirect().set_state(RedirectState::Missing);
                let why = format!("{error:#}");
                tracing::warn!(
                    why,
                    host = missing(&HostCaps::probe()),
                    "nothing is redirected: connections go where they go"
                );
                let detail = format!("[-]redirect missing: {}\n", why.replace('\n', " "));
                let redirect = None;
                (Self { redirect, detail }, None)
            }
        }
    }

    /// A line for `/readyz?verbose`, if there is anything to say.
    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    /// Calls go where they go from now on; connections that are open go on.
    pub(super) fn detach(&self) {
        if let Some(redirect) = &self.redirect {
            redirect.detach();
        }
    }
}

/// Listens on loopback, then tells the kernel: a call is never sent to a port that nobody listens on.
fn attach(
    plan: &NodeRedirectPlan,
    metrics: &AditMetrics,
    accounts: &Accounts,
) -> anyhow::Result<(Arc<Redirect>, Doors)> {
    let redirect = Arc::new(Redirect::attach(OBJECT, &plan.cgroup)?);
    let listeners = listen(&redirect, 0, accounts)?;
    join(&redirect).context("exempting this process")?;
    let rules: Vec<RedirectRule> = plan
        .services
        .iter()
        .map(|service| rule(service.address, Action::Redirect(LISTENER)))
        .collect();
    redirect.set_rules(&rules)?;
    let destinations = plan
        .services
        .iter()
        .map(|service| (service.address, service.destination.as_str().into()))
        .collect();
    let wants = Arc::new(Services {
        origins: RedirectOrigin(Arc::clone(&redirect)),
        destinations,
        metrics: metrics.clone(),
    });
    Ok((redirect, (listeners, wants)))
}

fn rule(address: SocketAddr, action: Action) -> RedirectRule {
    RedirectRule {
        network: IpNet::from(address.ip()),
        port: Some(address.port()),
        action,
    }
}

/// Where captured connections want to go.
struct Services {
    origins: RedirectOrigin,
    destinations: HashMap<SocketAddr, Arc<str>>,
    metrics: AditMetrics,
}

impl Wants for Services {
    fn destination(&self, accepted: &TcpStream, peer: SocketAddr) -> Result<Arc<str>, NodeRefusal> {
        let found = match self.origins.origin(accepted, peer) {
            Ok(origin) => self.destinations.get(&origin).cloned(),
            Err(error) => {
                tracing::debug!(%peer, %error, "connection refused");
                self.metrics.redirect().refused(match error {
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
