//! Servers that know each other: the listener for peers, what they are told, and the links to them.

use std::net::SocketAddr;
use std::sync::Arc;

use adit_agent::context::{Dialing, LinkContext, TargetDialer};
use adit_core::ids::AgentId;
use adit_core::registry::{Registry, Strategies};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerHello, PeerVersion};
use anyhow::Context as _;

use crate::budgets::isolation;
use crate::descriptors;
use crate::listeners::Listening;
use crate::process::Process;
use crate::server::tenant::Tenant;
use adit_config::plan::{LaneSecurity, PeersPlan, ServerPlan};
use adit_net::dial::DialError;
use adit_net::resolve::SystemResolver;
use adit_net::tasks::Tasks;
use adit_peer::{PeerSettings, Peers};
use adit_server::backend::{
    AgentAuthenticator, AgentAuthorizer, Announcements, Backend, BackendSettings, Forwarding,
    ForwardingCounts, PeerBackend,
};
use adit_server::frontend::events::FrontendContext;
use adit_server::router::{DialLimits, LinkHandle, Router};
use adit_telemetry::{AgentMetrics, ServerMetrics};
use adit_tls::reload::{Reload, Reloadable};
use adit_tls::tls::{Alpn, AlpnRule, ClientTls};

/// The log's name for the files of peers.
pub(super) const PEER_FILES: &str = "peers";
/// Links of one peer under its id: a restarted server may be here before its old link has ended.
const LINKS_PER_PEER_MAX: usize = 4;
/// Lanes of one peer.
const LANES_PER_PEER_MAX: usize = 1024;

/// The peers of a running server.
pub(super) struct Peering {
    /// Address for peers.
    pub(super) address: Option<SocketAddr>,
    /// Links of servers that ask this one. No dial finds them.
    askers: Arc<Router>,
    pub(super) counts: Arc<ForwardingCounts>,
    /// Servers that this one asks.
    pub(super) peers: Option<Peers>,
}

/// What the listener for peers and the links to them are made of.
pub(super) struct Parts<'a> {
    pub(super) plan: &'a ServerPlan,
    pub(super) process: &'a Process,
    pub(super) tenant: &'a Tenant,
    pub(super) clients: &'a Arc<FrontendContext>,
    /// Runs the links.
    pub(super) links: &'a Tasks,
    /// Settings of the listener for agents, for what both have in common.
    pub(super) agents: &'a BackendSettings,
}

/// Dials nothing: a server asks, and is not asked by the servers that it asks.
struct NoTargets;

impl TargetDialer for NoTargets {
    fn dial<'a>(&'a self, _protocol: &'a str, address: &'a str) -> Dialing<'a> {
        let why = DialError::UnknownNetwork(address.to_owned());
        Box::pin(std::future::ready(Err(why)))
    }
}

impl Parts<'_> {
    /// Starts what the plan says of peers; `None` without peers.
    ///
    /// # Errors
    /// A certificate or address cannot be used.
    pub(super) fn start(
        &self,
        peers: &PeersPlan,
        listening: &mut Listening<'_>,
    ) -> anyhow::Result<(Peering, AgentAuthorizer)> {
        let hello = PeerHello {
            group: peers.group.clone(),
            incarnation: rand::random(),
        };
        let router = &self.tenant.router;
        let askers = Router::within(
            Registry::new(Strategies::default()),
            DialLimits {
                pending_max: 0,
                ..router.limits()
            },
            Arc::clone(router.budget()),
        );
        let (process, services) = (self.process, &self.process.services);
        let counts = Arc::<ForwardingCounts>::default();
        let mut authorizer = AgentAuthorizer::default();
        let mut address = None;
        if let Some(bind) = &peers.bind {
            let tls = listening.peer_tls(PEER_FILES, peers)?;
            authorizer = AgentAuthorizer::load(None, Arc::clone(&tls))?;
            let following = authorizer.clone().follow(
                Arc::clone(&askers),
                self.links.clone(),
                process.metrics.clone(),
                process.controls.reread.clone(),
                process.stop.clone(),
            );
            services.spawn_always("peer-authorizer", following);
            let announcements = Announcements::default();
            let announcing = announcements
                .clone()
                .follow(Arc::clone(router), Arc::clone(&askers));
            services.spawn_always("peer-keys", announcing);
            let forwarding = Forwarding {
                router: Arc::clone(router),
                clients: Arc::clone(self.clients),
                tasks: self.clients.tasks.clone(),
                counts: Arc::clone(&counts),
            };
            let settings = self.backend(&hello, announcements, forwarding, authorizer.clone());
            let backend = Backend::new(
                Arc::clone(&askers),
                settings,
                Arc::clone(&process.budget),
                // Peers are no agents: nothing scrapes these.
                ServerMetrics::new(&["default"]),
                self.links.clone(),
            );
            address = Some(
                listening
                    .peers(bind, tls, backend, self.links)
                    .context("peer port")?,
            );
            services.spawn_always(
                "peer-lanes",
                crate::server::idle_lanes::keep(Arc::clone(&askers)),
            );
            descriptors::close_idle_lanes(services, &process.descriptors, &askers);
        }
        let asked = if peers.peers.is_empty() {
            None
        } else {
            Some(self.ask(peers, hello, listening)?)
        };
        let peering = Peering {
            address,
            askers,
            counts,
            peers: asked,
        };
        Ok((peering, authorizer))
    }

    fn backend(
        &self,
        hello: &PeerHello,
        announcements: Announcements,
        forwarding: Forwarding,
        authorizer: AgentAuthorizer,
    ) -> BackendSettings {
        let agents = self.agents;
        BackendSettings {
            server: agents.server.clone(),
            keepalive: agents.keepalive,
            admission: AgentAuthenticator::new(None),
            leases: agents.leases.clone(),
            authorizer,
            grants: adit_core::grant::Grants::default(),
            links_per_agent_max: LINKS_PER_PEER_MAX,
            link: agents.link,
            lanes_per_link_max: LANES_PER_PEER_MAX.min(self.process.lane_room.lanes_max()),
            // Peers' networks are not this server's to trust.
            lane_security: LaneSecurity::Tls,
            lane_room: Arc::clone(&self.process.lane_room),
            lane_watch: Arc::clone(&self.process.lane_watch),
            node: Some(Arc::new(forwarding)),
            peers: Some(PeerBackend {
                hello: hello.clone(),
                announcements,
            }),
            accounts: self.process.accounts.clone(),
        }
    }

    /// Starts the links to peers.
    fn ask(
        &self,
        peers: &PeersPlan,
        hello: PeerHello,
        listening: &mut Listening<'_>,
    ) -> anyhow::Result<Peers> {
        let process = self.process;
        let ca = peers.tls.client_ca.clone();
        let ca = ca.context("--peer-ca-cert is missing")?;
        let tls = Reloadable::load(ClientTls {
            ca,
            identity: Some((peers.tls.cert.clone(), peers.tls.key.clone())),
            policy: self.plan.tls.clone(),
            alpn: peer_alpn(),
        })
        .context("links to peers")?;
        listening
            .watched
            .push(("links to peers", Arc::clone(&tls) as Arc<dyn Reload>));
        let resolver = SystemResolver::past_redirect(
            process.own_sockets.clone(),
            process.controls.reread.clone(),
        )?;
        let id = AgentId::new(self.plan.server_id.as_str());
        let settings = PeerSettings {
            peers: peers.peers.clone(),
            networks: peers.networks.clone(),
            group: peers.group.clone(),
            hello: AgentHello {
                agent: id.clone(),
                identifiers: Identifiers::default(),
                extensions: Extensions {
                    link: true,
                    lanes: true,
                },
                version: PeerVersion::own(),
                peer: Some(hello),
                zone: self.plan.agents.zone.clone(),
            },
            resolver: Arc::new(resolver),
            tls,
            keepalive: self.plan.agents.keepalive,
            accounts: process.accounts.clone(),
            own_sockets: process.own_sockets.clone(),
            stop: process.ending.clone(),
        };
        let context = LinkContext {
            agent: id,
            dialer: Arc::new(NoTargets),
            isolation: isolation(&process.isolation),
            budget: Arc::clone(&process.budget),
            warn_on_channel_limit: false,
            // Peers are no servers of an agent: nothing scrapes these.
            metrics: AgentMetrics::new(),
            tasks: self.links.clone(),
            dials: Arc::default(),
            lane_room: Arc::clone(&process.lane_room),
            lane_watch: Arc::clone(&process.lane_watch),
            relay: None,
            asker: None,
        };
        Ok(Peers::start(
            settings,
            context,
            Arc::clone(&self.tenant.router),
        ))
    }
}

/// Peers speak their own protocol and nothing else, so that no agent or client is taken for one.
pub(super) fn peer_alpn() -> Alpn {
    Alpn {
        protocols: vec![adit_core::peer::ALPN.into()],
        rule: AlpnRule::Required,
        records: None,
    }
}

impl Peering {
    /// Ends the links of servers that ask this one.
    pub(super) fn end(&self) -> Vec<impl Future<Output = ()> + Send + use<>> {
        self.askers.announce_shutdown();
        let links = self.askers.links();
        links.iter().filter_map(LinkHandle::end).collect()
    }
}
