//! Starts a server's redirect: listeners, programs in the kernel, rules, and their state in log and metrics.
//!
//! A missing requirement never keeps the server from starting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use socket2::SockRef;

use super::check::lacks;
use super::netns::Namespaces;
use super::origin::{RedirectOrigin, RuleOrigin};
use super::rules::{Apply, Followed};
use super::table::{LISTENER, at_agents, own_rules, rules};
use super::watch::{log_active, maintain};
use crate::listeners::Listening;
use crate::listeners::address::socket_addr;
use crate::process::Process;
use crate::redirect_view::RedirectView;
use adit_config::address::BindAddress;
use adit_config::plan::{OnFailure, Program, RedirectPlan};
use adit_host::interfaces::local_addresses;
use adit_net::accounts::Accounts;
use adit_net::listen::{ListenAddr, Listener};
use adit_net::self_sockets::SocketExemptions;
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, unpin};
use adit_server::frontend::events::FrontendContext;

/// The redirect of a server, if it has one.
pub(crate) struct Captured {
    redirect: Option<Arc<Redirect>>,
    /// Action for calls to the agent port.
    at_agents: Action,
    listeners: Vec<SocketAddr>,
}

impl Captured {
    /// No redirect is requested, or this host does not allow it.
    pub(crate) fn none() -> Self {
        Self {
            redirect: None,
            at_agents: Action::Leave,
            listeners: Vec::new(),
        }
    }

    /// Listeners for captured connections of this process's own network namespace.
    pub(crate) fn listeners(&self) -> &[SocketAddr] {
        &self.listeners
    }

    /// Number of redirected calls, as the kernel counts them.
    pub(crate) fn redirected(&self) -> u64 {
        let calls = self
            .redirect
            .as_ref()
            .and_then(|redirect| redirect.calls().ok());
        let redirected = calls
            .into_iter()
            .flatten()
            .find(|(outcome, _)| *outcome == "redirected");
        redirected.map_or(0, |(_, count)| count)
    }

    /// Exempts calls to this server's own listeners, whose ports are known only once they listen. A process that calls `agents`
    /// may be an agent, that is, part of the tunnel.
    pub(crate) fn exempt(&self, agents: SocketAddr, others: impl IntoIterator<Item = SocketAddr>) {
        let Some(redirect) = &self.redirect else {
            return;
        };
        let here = local_addresses();
        let mut rules = own_rules([agents], self.at_agents, &here);
        rules.extend(own_rules(others, Action::Leave, &here));
        if let Err(error) = redirect.set_rules(&rules) {
            tracing::warn!(%error, "calls of captured processes to our own listeners may be redirected");
        }
    }

    /// Stops redirecting: new calls connect directly; open connections go on.
    pub(crate) fn detach(&self) {
        if let Some(redirect) = &self.redirect {
            redirect.detach();
        }
    }
}

/// `SO_MARK` of listeners and of the connections they accept; 0 is none.
pub(crate) type Mark = u32;
/// Bits by which kube-proxy and the kubelet mark packets to drop or masquerade.
const MARKS_OF_KUBERNETES: Mark = 0xC000;

/// A mark from a random number. Accepted connections keep it: their SYN-ACK already carried it, and clearing it would need
/// CAP_NET_ADMIN permanently.
fn own_mark(random: u32) -> Mark {
    (random & !MARKS_OF_KUBERNETES).max(1)
}

impl Listening<'_> {
    /// Attaches the redirect that a plan requests, which spares `agents`, the address for agents. A failure on this host is
    /// logged.
    ///
    /// # Errors
    /// The rule file is invalid; the error has its name and line.
    pub(crate) fn redirect(
        &self,
        plan: &RedirectPlan,
        agents: &BindAddress,
        context: &Arc<FrontendContext>,
    ) -> anyhow::Result<Captured> {
        let path = plan.file.as_deref();
        let with_file = Followed::merge(plan, path, Program::Server, RedirectPlan::with)?;
        let process = self.process;
        let view = &process.redirect;
        match self.capture(plan, agents, with_file, context) {
            Ok((programs, listeners)) => {
                let cgroup = plan.cgroup.display().to_string();
                maintain(
                    process,
                    &programs,
                    plan.on_failure,
                    &plan.cgroup,
                    &process.stop,
                );
                tracing::info!(cgroup, programs = programs.programs(), "redirect");
                Ok(Captured {
                    redirect: Some(programs),
                    at_agents: at_agents(plan),
                    listeners,
                })
            }
            Err(error) => {
                not_redirected(&error, view);
                Ok(Captured::none())
            }
        }
    }

    /// Listens on loopback first and tells the kernel afterwards: no call is sent to a port without a listener.
    fn capture(
        &self,
        plan: &RedirectPlan,
        agents: &BindAddress,
        (all, followed): (RedirectPlan, Option<Followed>),
        context: &Arc<FrontendContext>,
    ) -> anyhow::Result<(Arc<Redirect>, Vec<SocketAddr>)> {
        let Process {
            accounts,
            controls,
            own_sockets,
            redirect: view,
            services,
            stop,
            ..
        } = self.process;
        let redirect = Arc::new(Redirect::attach(OBJECT, &plan.cgroup)?);
        let mark = match plan.on_failure {
            OnFailure::Open => 0,
            // A process that takes the port of an ended server lacks this mark, and so receives no captured calls.
            OnFailure::Closed => own_mark(rand::random()),
        };
        let bound = listen(&redirect, mark, accounts)?;
        let listeners = bound.iter().filter_map(Listener::tcp_addr).collect();
        // Agents that connect over loopback are in this network namespace.
        if let Some(Listener::Tcp(here)) = bound.first() {
            redirect.at_home(here)?;
        }
        // Before there are rules: connections that this server dials are exempt.
        own_sockets.spared_by(&(Arc::clone(&redirect) as Arc<dyn SocketExemptions>));
        // Agents that connect at once are recognized; a port that the kernel chooses is exempted once known. These rules go
        // first, so that no call they exempt is captured.
        if agents.port != 0 {
            let at = [socket_addr(agents)?];
            redirect.set_rules(&own_rules(at, at_agents(plan), &local_addresses()))?;
        }
        let rules = rules(&all)?;
        redirect.replace_rules(&rules)?;
        // This server's rules are active, so a predecessor's pinned programs may go.
        match plan.on_failure {
            OnFailure::Open => unpin(&plan.cgroup)?,
            OnFailure::Closed => redirect.pin(&plan.cgroup)?,
        }
        log_active(&plan.cgroup, rules.len(), view);
        // Connections captured meanwhile wait in the backlog. This step is last: a failure above leaves nothing attached.
        let in_force = Arc::new(ArcSwap::from_pointee(all));
        let origins = Arc::new(RuleOrigin {
            maps: RedirectOrigin(Arc::clone(&redirect)),
            rules: Arc::clone(&in_force),
        });
        let serve = self.proxy(origins, context);
        for listener in bound {
            services.spawn_always("listener", serve(listener, stop.clone()));
        }
        if let Some(followed) = followed {
            view.file(followed.path());
            let (redirect, plan) = (Arc::clone(&redirect), plan.clone());
            let apply: Apply = Arc::new(move |file| {
                let all = plan.with(file).map_err(anyhow::Error::new)?;
                let rules = self::rules(&all)?;
                let set = redirect.replace_rules(&rules)?;
                in_force.store(Arc::new(all));
                Ok((rules.len(), set))
            });
            let following = followed.follow(
                apply,
                Arc::clone(view),
                controls.reread.clone(),
                stop.clone(),
            );
            services.spawn_always("redirect-file", following);
        }
        if let Some(netns) = &plan.netns {
            let parts = (Arc::clone(&redirect), mark, Arc::clone(view), serve);
            let started = Namespaces::start(netns, &plan.cgroup, parts, accounts, stop);
            if let Some((namespaces, helper)) = started {
                services.spawn_always("redirect-netns", namespaces.keep(helper));
            }
        }
        Ok((redirect, listeners))
    }
}

/// Logs why nothing is redirected.
pub(crate) fn not_redirected(error: &anyhow::Error, view: &RedirectView) {
    let why = format!("{error:#}");
    tracing::warn!(
        why,
        host = lacks(),
        "redirect is off: connections of captured processes go direct, or are denied by programs that an earlier start pinned; \
         `adit check` lists what is missing"
    );
    view.missing(&why);
}

/// Listeners on loopback that rules refer to by [`LISTENER`].
///
/// # Errors
/// Loopback cannot be listened on, or the kernel does not register the listeners.
pub(crate) fn listen(
    redirect: &Redirect,
    mark: Mark,
    accounts: &Accounts,
) -> anyhow::Result<Vec<Listener>> {
    let bind = |at: IpAddr| {
        let at = ListenAddr::Tcp((at, 0).into());
        Listener::bind_with(&at, |socket| accounts.listening(&socket))
    };
    let v4 = bind(Ipv4Addr::LOCALHOST.into()).context("the redirect's listener")?;
    // On hosts without IPv6, calls over IPv6 are not redirected.
    let v6 = bind(Ipv6Addr::LOCALHOST.into()).ok();
    let v6_at = v6.as_ref().and_then(Listener::tcp_addr);
    for listener in [Some(&v4), v6.as_ref()].into_iter().flatten() {
        if let (Listener::Tcp(socket), true) = (listener, mark != 0) {
            let marked = SockRef::from(socket).set_mark(mark);
            marked.context("marking the redirect's listener")?;
        }
    }
    if let Listener::Tcp(socket) = &v4 {
        redirect.set_marked_listener(LISTENER, socket, v4.tcp_addr(), v6_at, mark)?;
    }
    Ok([Some(v4), v6].into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_marks_avoid_kubernetes_bits_and_zero() {
        for random in [0, 0xC000, u32::MAX, 0x4001] {
            let mark = own_mark(random);
            assert!(mark != 0 && mark & 0xC000 == 0, "{mark:#x}");
        }
    }
}
