//! The transparent frontend put together: listeners, programs in the kernel, rules, state in log and metrics.
//!
//! Nothing that is missing here keeps the server from starting.

pub(crate) mod netns;
pub(crate) mod node;
pub(crate) mod origin;
pub(crate) mod rules;
pub(crate) mod table;
pub(crate) mod view;
pub(crate) mod watch;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use socket2::SockRef;

use crate::listeners::{Counted, HandshakeLog, Listening, listen_addr, socket_addr};
use crate::redirect::netns::{Namespaces, Serve};
use crate::redirect::origin::{RedirectOrigin, RuleOrigin};
use crate::redirect::rules::{Apply, Followed};
use crate::redirect::table::{LISTENER, at_agents, own_rules, rules};
use crate::redirect::view::RedirectView;
use crate::redirect::watch::{look_after, say_active, say_neighbours};
use adit_config::address::BindAddress;
use adit_config::plan::{OnFailure, RedirectPlan, RuleFileOf};
use adit_net::accept::accept_loop;
use adit_net::accounts::Accounts;
use adit_net::interfaces::local_addresses;
use adit_net::listen::{ListenAddr, Listener};
use adit_net::original_dst::{OriginSource, PacketFilterOrigin, accept_any_address};
use adit_net::self_sockets::SocketExemptions;
use adit_net::tasks::Tasks;
use adit_redirect::caps::HostCaps;
use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, unpin};
use adit_server::frontend::events::FrontendContext;
use adit_server::frontend::transparent;
use adit_server::router::Router;
use adit_telemetry::labels::Listener as ListenerLabel;
use adit_tls::stream::ByteStream;

/// The redirect of a server, if it has one.
pub(crate) struct Captured {
    redirect: Option<Arc<Redirect>>,
    /// What becomes of calls to the agent port.
    at_agents: Action,
    listeners: Vec<SocketAddr>,
    view: Arc<RedirectView>,
}

impl Captured {
    /// None, or none yet.
    fn none(view: &Arc<RedirectView>) -> Self {
        Self {
            redirect: None,
            at_agents: Action::Leave,
            listeners: Vec::new(),
            view: Arc::clone(view),
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

    /// What it is now.
    pub(crate) fn view(&self) -> &Arc<RedirectView> {
        &self.view
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
    /// Opens what the plan's transparent part asks for; the address of the packet filter's listener, if there is one.
    ///
    /// # Errors
    /// That listener's address. Whatever the redirect by eBPF lacks is a line in the log.
    pub(crate) fn transparent(
        &self,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<(Captured, Option<SocketAddr>)> {
        let plan = &self.plan.transparent;
        let view = Arc::new(RedirectView::new(self.metrics));
        let open = |bind| self.packet_filter(bind, &view, router, context, clients);
        let bound = plan.bind.as_ref().map(open).transpose()?;
        let Some(redirect) = &plan.redirect else {
            return Ok((Captured::none(&view), bound));
        };
        let file = Rules::load(redirect)?;
        let capturing = Capturing {
            plan: redirect,
            view: &view,
            file,
        };
        match self.capture(capturing, router, context, clients) {
            Ok((programs, listeners)) => {
                let cgroup = redirect.cgroup.display().to_string();
                say_neighbours(&programs, &redirect.cgroup, &view);
                tracing::info!(cgroup, programs = programs.programs(), "redirect");
                let looked_after = look_after(
                    Arc::clone(&programs),
                    redirect.on_failure,
                    redirect.cgroup.clone(),
                    self.metrics.clone(),
                    Arc::clone(&view),
                    self.stop.clone(),
                );
                self.services.spawn_always("redirect", looked_after);
                let captured = Captured {
                    redirect: Some(programs),
                    at_agents: at_agents(redirect),
                    listeners,
                    view,
                };
                Ok((captured, bound))
            }
            Err(error) => {
                not_redirected(&error, &view);
                Ok((Captured::none(&view), bound))
            }
        }
    }

    /// Listens for what a packet filter's rules lead here; where that is.
    ///
    /// # Errors
    /// The address.
    fn packet_filter(
        &self,
        bind: &BindAddress,
        view: &RedirectView,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> anyhow::Result<SocketAddr> {
        let listener = self
            .bind(&listen_addr(bind)?)
            .context("transparent frontend")?;
        let at = listener
            .tcp_addr()
            .context("the transparent listener has no address")?;
        let mut no_tproxy = None;
        if let Listener::Tcp(socket) = &listener
            && let Err(error) = accept_any_address(socket, at.is_ipv6())
        {
            tracing::info!(%error, "TPROXY rules cannot lead to the transparent listener, which needs CAP_NET_ADMIN; REDIRECT rules can");
            no_tproxy = Some(error);
        }
        tracing::info!(address = %at, "transparent frontend");
        view.transparent(at, no_tproxy.as_ref());
        let origins = Arc::new(PacketFilterOrigin { listener: at });
        let serve = self.proxy(origins, router, context, clients);
        self.services
            .spawn_always("listener", serve(listener, self.stop.clone()));
        Ok(at)
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

    /// What serves a transparent listener.
    fn proxy(
        &self,
        origins: Arc<impl OriginSource>,
        router: &Arc<Router>,
        context: &FrontendContext,
        clients: &Tasks,
    ) -> Serve {
        let (router, context, clients) = (Arc::clone(router), context.clone(), clients.clone());
        let events = Arc::new(Counted {
            metrics: self.metrics.clone(),
            listener: ListenerLabel::Frontend,
            descriptors: Arc::clone(self.descriptors),
            handshakes: HandshakeLog::default(),
        });
        Arc::new(move |listener, stop| {
            let (router, context) = (Arc::clone(&router), context.clone());
            let origins = Arc::clone(&origins);
            let serve = move |stream: ByteStream| {
                let (router, context) = (Arc::clone(&router), context.clone());
                let origins = Arc::clone(&origins);
                transparent::serve(stream, router, context, origins)
            };
            let (clients, events) = (clients.clone(), Arc::clone(&events));
            Box::pin(async move {
                // The listener closes when the loop gives it back.
                drop(accept_loop(listener, None, clients, events, stop, serve).await);
            })
        })
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
        host = missing(&HostCaps::probe()),
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

/// Everything this host lacks, in one line.
pub(crate) fn missing(caps: &HostCaps) -> String {
    let missing: Vec<String> = caps
        .rows()
        .into_iter()
        .filter(|(_, capability)| !capability.is_ready())
        .map(|(name, capability)| format!("{name}: {}", capability.reason()))
        .collect();
    if missing.is_empty() {
        return "lacks nothing that is known to be needed".to_owned();
    }
    missing.join("; ")
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
