//! The redirect of a server put together: listeners, programs in the kernel, rules, state in log and metrics.
//!
//! Nothing that is missing here keeps the server from starting.

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
use super::watch::{look_after, say_active, say_neighbours};
use crate::listeners::{Listening, socket_addr};
use crate::redirect_view::RedirectView;
use adit_config::plan::{OnFailure, RedirectPlan, RuleFileOf};
use adit_net::accounts::Accounts;
use adit_net::interfaces::local_addresses;
use adit_net::listen::{ListenAddr, Listener};
use adit_net::self_sockets::SocketExemptions;
use adit_net::tasks::Tasks;
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, unpin};
use adit_server::frontend::events::FrontendContext;
use adit_server::router::Router;

/// The redirect of a server, if it has one.
pub(crate) struct Captured {
    redirect: Option<Arc<Redirect>>,
    /// What becomes of calls to the agent port.
    at_agents: Action,
    listeners: Vec<SocketAddr>,
}

impl Captured {
    /// None was asked for, or this host does not allow it.
    pub(crate) fn none() -> Self {
        Self {
            redirect: None,
            at_agents: Action::Leave,
            listeners: Vec::new(),
        }
    }

    /// Where captured connections of our own network namespace go.
    pub(crate) fn listeners(&self) -> &[SocketAddr] {
        &self.listeners
    }

    /// Calls that were redirected so far, as the kernel counts them.
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

    /// Leaves calls to our own listeners alone; they are known only once they listen. Whoever calls `agents` may be part of
    /// the tunnel.
    pub(crate) fn spare(&self, agents: SocketAddr, others: impl IntoIterator<Item = SocketAddr>) {
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

    /// Calls go where they go from now on; connections that are open go on.
    pub(crate) fn detach(&self) {
        if let Some(redirect) = &self.redirect {
            redirect.detach();
        }
    }
}

/// `SO_MARK` of listeners, and of what they accept; 0 is none.
pub(crate) type Mark = u32;
/// Bits by which kube-proxy and the kubelet tell packets to be dropped or masqueraded.
const MARKS_OF_KUBERNETES: Mark = 0xC000;

/// A mark from a random number. It stays on accepted connections: the answer to their SYN has borne it already, and taking it
/// off would take CAP_NET_ADMIN for good.
fn own_mark(random: u32) -> Mark {
    (random & !MARKS_OF_KUBERNETES).max(1)
}

impl Listening<'_> {
    /// Attaches what a plan asks for. Whatever this host lacks is a line in the log.
    ///
    /// # Errors
    /// The file of rules, by name and line.
    pub(crate) fn redirect(
        &self,
        plan: &RedirectPlan,
        view: &Arc<RedirectView>,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<Captured> {
        let file = Rules::load(plan)?;
        let capturing = Capturing { plan, view, file };
        match self.capture(capturing, router, context, clients) {
            Ok((programs, listeners)) => {
                let cgroup = plan.cgroup.display().to_string();
                say_neighbours(&programs, &plan.cgroup, view);
                tracing::info!(cgroup, programs = programs.programs(), "redirect");
                let looked_after = look_after(
                    Arc::clone(&programs),
                    plan.on_failure,
                    plan.cgroup.clone(),
                    self.metrics.clone(),
                    Arc::clone(view),
                    self.stop.clone(),
                );
                self.services.spawn_always("redirect", looked_after);
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

    /// Listens on loopback, then tells the kernel: a call is never sent to a port that nobody listens on.
    fn capture(
        &self,
        capturing: Capturing<'_>,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<(Arc<Redirect>, Vec<SocketAddr>)> {
        let Capturing { plan, view, file } = capturing;
        let redirect = Arc::new(Redirect::attach(OBJECT, &plan.cgroup)?);
        let mark = match plan.on_failure {
            OnFailure::Open => 0,
            // Whoever takes the port of a server that has ended is not it.
            OnFailure::Closed => own_mark(rand::random()),
        };
        let bound = listen(&redirect, mark, self.accounts)?;
        let listeners = bound.iter().filter_map(Listener::tcp_addr).collect();
        // Agents that come by loopback are those of this network namespace.
        if let Some(Listener::Tcp(here)) = bound.first() {
            redirect.at_home(here)?;
        }
        // Before there are rules: what this server dials is left alone.
        self.own_sockets
            .spared_by(&(Arc::clone(&redirect) as Arc<dyn SocketExemptions>));
        // An agent that connects at once is known; a port that the kernel chooses is spared once it is chosen. First, so that
        // nothing is captured that these would have left alone.
        let agents = &self.plan.agents.bind;
        if agents.port != 0 {
            let at = [socket_addr(agents)?];
            redirect.set_rules(&own_rules(at, at_agents(plan), &local_addresses()))?;
        }
        let rules = rules(&file.plan)?;
        redirect.replace_rules(&rules)?;
        // Now that ours are in force, those of a predecessor may go.
        match plan.on_failure {
            OnFailure::Open => unpin(&plan.cgroup)?,
            OnFailure::Closed => redirect.pin(&plan.cgroup)?,
        }
        say_active(&plan.cgroup, rules.len(), view);
        // Whoever was captured meanwhile waits in the backlog. Last: what fails above leaves nothing attached.
        let in_force = Arc::new(ArcSwap::from_pointee(file.plan));
        let origins = Arc::new(RuleOrigin {
            maps: RedirectOrigin(Arc::clone(&redirect)),
            rules: Arc::clone(&in_force),
        });
        let serve = self.proxy(origins, router, context, clients);
        for listener in bound {
            let serving = serve(listener, self.stop.clone());
            self.services.spawn_always("listener", serving);
        }
        if let Some(followed) = file.followed {
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
                self.reread.clone(),
                self.stop.clone(),
            );
            self.services.spawn_always("redirect-file", following);
        }
        if let Some(netns) = &plan.netns {
            let parts = (Arc::clone(&redirect), mark, Arc::clone(view), serve);
            let started = Namespaces::start(netns, &plan.cgroup, parts, self.accounts, self.stop);
            if let Some((namespaces, helper)) = started {
                self.services
                    .spawn_always("redirect-netns", namespaces.keep(helper));
            }
        }
        Ok((redirect, listeners))
    }
}

/// What is to be captured.
struct Capturing<'a> {
    plan: &'a RedirectPlan,
    view: &'a Arc<RedirectView>,
    file: Rules,
}

/// The plan's rules with those of its file, if it has one.
struct Rules {
    plan: RedirectPlan,
    followed: Option<Followed>,
}

impl Rules {
    /// # Errors
    /// The file, by name and line.
    fn load(plan: &RedirectPlan) -> anyhow::Result<Self> {
        let Some(path) = &plan.file else {
            let plan = plan.clone();
            return Ok(Self {
                plan,
                followed: None,
            });
        };
        let (followed, file) = Followed::load(path, RuleFileOf::Server)?;
        let plan = plan
            .with(file)
            .with_context(|| format!("--redirect-file {}", path.display()))?;
        let followed = Some(followed);
        Ok(Self { plan, followed })
    }
}

/// Says why nothing is redirected.
pub(crate) fn not_redirected(error: &anyhow::Error, view: &RedirectView) {
    let why = format!("{error:#}");
    tracing::warn!(
        why,
        host = lacks(),
        "nothing is redirected: connections go where they go"
    );
    view.missing(&why);
}

/// Listeners on loopback that rules lead to by [`LISTENER`].
///
/// # Errors
/// There is no loopback, or the kernel takes no note of them.
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
    // Hosts may be without IPv6; calls over it are left alone then.
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
    fn marks_have_no_meaning_to_kubernetes_and_are_never_none() {
        for random in [0, 0xC000, u32::MAX, 0x4001] {
            let mark = own_mark(random);
            assert!(mark != 0 && mark & 0xC000 == 0, "{mark:#x}");
        }
    }
}
