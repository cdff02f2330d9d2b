//! Servers that know each other: the listener for peers, what they are told, and the links to them.

mod agent_links;

use std::collections::HashSet;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use adit_agent::context::{Dialing, LinkContext, TargetDialer};
use adit_core::ids::{AgentId, ServerId};
use adit_core::registry::{Registry, Strategies};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerHello, PeerVersion};
use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::Instant;

use self::agent_links::{AnnouncedCount, REPLACED_WITHIN};
use crate::budgets::isolation;
use crate::descriptors;
use crate::listeners::Listening;
use crate::process::Process;
use crate::server::tenant::Tenant;
use crate::status::model::PeerStatus;
use adit_config::plan::{FrontendListen, LaneSecurity, PeersPlan, ServerPlan, shared_authority};
use adit_config::tls_policy::TlsPolicy;
use adit_host::files;
use adit_net::dial::DialError;
use adit_net::resolve::SystemResolver;
use adit_net::tasks::Tasks;
use adit_peer::{PeerSettings, PeerState, Peers};
use adit_server::backend::{
    AgentAuthenticator, AgentAuthorizer, AgentLinks, Announcements, Backend, BackendSettings,
    Forwarding, PeerBackend,
};
use adit_server::frontend::events::FrontendContext;
use adit_server::router::{DialLimits, LinkHandle, Router};
use adit_telemetry::labels::{Label as _, PeerAddressState, PeerDial, PeerDirection};
use adit_telemetry::{AditMetrics, AgentMetrics, PeerSeries, ServerMetrics};
use adit_tls::pki::share_a_key;
use adit_tls::reload::{Reload, Reloadable, ReloadableClientTls};
use adit_tls::tls::{Alpn, AlpnRule, ClientTls};

/// The log's name for the files of peers.
pub(super) const PEER_FILES: &str = "peers";
/// A server that has started this long ago waits for no peer.
const STARTING: Duration = Duration::from_secs(10);
/// Longest file of authorities that is compared; its load refuses a longer one.
const CA_BYTES_MAX: u64 = 16 << 20;
/// Links of one peer under its id: a restarted server may be here before its old link has ended.
const LINKS_PER_PEER_MAX: usize = 4;

/// The peers of a running server.
pub(super) struct Peering {
    /// Address for peers.
    pub(super) address: Option<SocketAddr>,
    /// Connections of servers that ask this one.
    connections: Arc<AtomicUsize>,
    /// Links of servers that ask this one. No dial finds them.
    askers: Arc<Router>,
    metrics: AditMetrics,
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
    fn dial<'a>(&'a self, protocol: &'a str, _address: &'a str) -> Dialing<'a> {
        let why = DialError::UnknownNetwork(protocol.to_owned());
        Box::pin(std::future::ready(Err(why)))
    }
}

impl Parts<'_> {
    /// Starts the listener for peers and the links to them, as far as the plan has them.
    ///
    /// # Errors
    /// A certificate or address cannot be used.
    pub(super) fn start(
        &self,
        peers: &PeersPlan,
        agent_links: watch::Sender<AgentLinks>,
        listening: &mut Listening<'_>,
    ) -> anyhow::Result<(Peering, AgentAuthorizer)> {
        refuse_shared_authority(self.plan, peers)?;
        let hello = PeerHello {
            group: peers.group.clone(),
            incarnation: rand::random(),
            agent_links: None,
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
        let mut authorizer = AgentAuthorizer::default();
        let (mut address, mut connections) = (None, Arc::default());
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
            let forwarding = Forwarding::new(Arc::clone(self.clients), process.metrics.clone());
            let mut settings = self.backend(&hello, announcements, forwarding, authorizer.clone());
            settings.agent_links = agent_links.subscribe();
            let backend = Backend::new(
                Arc::clone(&askers),
                settings,
                Arc::clone(&process.budget),
                // Peers are no agents: nothing scrapes these.
                ServerMetrics::new(&["default"]),
                self.links.clone(),
            );
            connections = backend.open_connections();
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
            router.expect_peers(Instant::now() + STARTING);
            Some(self.ask(peers, hello, listening)?)
        };
        let count = AnnouncedCount {
            configured: self.agents.server.server_count,
            leases: self.agents.leases.clone(),
            links: i64::from(peers.agent_links.get()),
            asking: Box::new({
                let askers = Arc::clone(&askers);
                move || {
                    let links = askers.links();
                    let ids = links.iter().map(|link| link.info.agent.as_str());
                    ids.collect::<HashSet<&str>>().len()
                }
            }),
            left: Box::new({
                let asked = asked.clone();
                move || {
                    asked
                        .as_ref()
                        .map_or(0, |asked| asked.left_within(REPLACED_WITHIN))
                }
            }),
            told: agent_links,
        };
        services.spawn_always("peer-count", count.follow(Arc::clone(router)));
        if let Some(asked) = &asked {
            let counting = count_addresses(asked.clone(), process.metrics.clone());
            services.spawn_always("peer-addresses", counting);
        }
        let peering = Peering {
            address,
            connections,
            askers,
            metrics: process.metrics.clone(),
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
            agent_links: watch::channel(AgentLinks::ToAll).1,
            authorizer,
            grants: adit_core::grant::Grants::default(),
            links_per_agent_max: LINKS_PER_PEER_MAX,
            link: agents.link,
            lanes_per_link_max: adit_peer::LANES_MAX.min(self.process.lane_room.lanes_max()),
            // Peers' networks are not this server's to trust.
            lane_security: LaneSecurity::Tls,
            lane_room: Arc::clone(&self.process.lane_room),
            lane_watch: Arc::clone(&self.process.lane_watch),
            node: Some(Arc::new(forwarding)),
            peers: Some(PeerBackend {
                hello: hello.clone(),
                announcements,
                metrics: self.process.metrics.clone(),
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
        let tls = asker_tls(peers, &self.plan.tls).context("links to peers")?;
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
            metrics: process.metrics.clone(),
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

/// What this server shows to the peers that it asks, and verifies them by.
///
/// # Errors
/// A file cannot be used.
pub(super) fn asker_tls(
    peers: &PeersPlan,
    policy: &TlsPolicy,
) -> anyhow::Result<Arc<ReloadableClientTls>> {
    let ca = peers.tls.client_ca.clone();
    let tls = ClientTls {
        ca: ca.context("--peer-ca-cert is missing")?,
        crl: peers.crl.clone(),
        identity: Some((peers.tls.cert.clone(), peers.tls.key.clone())),
        policy: policy.clone(),
        alpn: peer_alpn(),
    };
    Ok(Reloadable::load(tls)?)
}

/// # Errors
/// The authority of peers has a key of that of agents or clients: their certificates would make peers.
fn refuse_shared_authority(plan: &ServerPlan, peers: &PeersPlan) -> anyhow::Result<()> {
    let Some(own) = &peers.tls.client_ca else {
        return Ok(());
    };
    let read = |path: &Path| {
        let mut bytes = Vec::new();
        let read =
            files::open(path).and_then(|file| file.take(CA_BYTES_MAX).read_to_end(&mut bytes));
        read.with_context(|| format!("read {}", path.display()))?;
        anyhow::Ok(bytes)
    };
    let of_peers = read(own)?;
    let frontends = plan.clients.frontends.iter();
    let of_clients = frontends.filter_map(|frontend| match &frontend.listen {
        FrontendListen::Tcp { tls, .. } => tls.as_ref()?.client_ca.as_ref(),
        FrontendListen::Unix { .. } => None,
    });
    let of_clients = of_clients.map(|path| ("--server-ca-cert", path));
    let of_agents = plan
        .agents
        .port
        .iter()
        .filter_map(|port| port.tls.client_ca.as_ref());
    let of_agents = of_agents.map(|path| ("--cluster-ca-cert", path));
    for (flag, path) in of_agents.chain(of_clients) {
        if share_a_key(&of_peers, &read(path)?) {
            return Err(shared_authority(flag, path).into());
        }
    }
    Ok(())
}

/// Peers speak their own protocol and nothing else, so that no agent or client is taken for one.
pub(super) fn peer_alpn() -> Alpn {
    Alpn {
        protocols: vec![adit_core::peer::ALPN.into()],
        rule: AlpnRule::Required,
        records: None,
    }
}

/// The peers of a server, for `adit status`.
pub(crate) struct PeerTable {
    peers: Option<Peers>,
    askers: Arc<Router>,
    metrics: AditMetrics,
}

impl PeerTable {
    /// One row for each address that is called, and for each link of a server that asks this one.
    pub(crate) fn rows(&self) -> Vec<PeerStatus> {
        let all = self.peers.as_ref().map(Peers::all).unwrap_or_default();
        let to = all.into_iter().map(|peer| {
            let address = peer.address.to_string();
            match peer.state {
                PeerState::Linked(handle) => {
                    let state = if handle.is_silent() {
                        "silent"
                    } else {
                        "linked"
                    };
                    PeerStatus {
                        age_seconds: handle.since.elapsed().as_secs(),
                        ..row(
                            PeerDirection::To,
                            address,
                            state,
                            Some((&handle.server, handle.series())),
                        )
                    }
                }
                PeerState::Connecting => row(PeerDirection::To, address, "connecting", None),
                PeerState::Own => row(PeerDirection::To, address, "own", None),
                PeerState::Duplicate => row(PeerDirection::To, address, "duplicate", None),
                PeerState::Failed(why) => PeerStatus {
                    reason: Some(why.to_string()),
                    ..row(PeerDirection::To, address, "failed", None)
                },
            }
        });
        let from = self.askers.links().into_iter().map(|link| {
            let server = ServerId::new(link.info.agent.as_str());
            let series = self.metrics.peer(server.as_str(), PeerDirection::From);
            let state = if link.is_silent() { "silent" } else { "linked" };
            PeerStatus {
                age_seconds: link.since.elapsed().as_secs(),
                ..row(
                    PeerDirection::From,
                    link.info.address.to_string(),
                    state,
                    Some((&server, &series)),
                )
            }
        });
        to.chain(from).collect()
    }
}

/// Counts the addresses of peers by their states.
async fn count_addresses(peers: Peers, metrics: AditMetrics) {
    const EVERY: Duration = Duration::from_secs(1);
    loop {
        let all = peers.all();
        for state in PeerAddressState::ALL {
            let count = all
                .iter()
                .filter(|peer| address_state(&peer.state) == *state);
            metrics.peer_addresses().of(*state).set(count.count());
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn address_state(state: &PeerState) -> PeerAddressState {
    match state {
        PeerState::Linked(_) | PeerState::Duplicate => PeerAddressState::Linked,
        PeerState::Connecting | PeerState::Failed(_) => PeerAddressState::Failed,
        PeerState::Own => PeerAddressState::Own,
    }
}

fn row(
    direction: PeerDirection,
    address: String,
    state: &str,
    linked: Option<(&ServerId, &Arc<PeerSeries>)>,
) -> PeerStatus {
    let mut row = PeerStatus {
        direction: direction.as_str().to_owned(),
        address,
        state: state.to_owned(),
        ..PeerStatus::default()
    };
    if let Some((server, series)) = linked {
        let count = |gauge: i64| u64::try_from(gauge).unwrap_or(0);
        row.server = Some(server.as_str().to_owned());
        row.keys = count(series.keys.get());
        row.tunnels = count(series.tunnels.get());
        row.opened = series.dials(PeerDial::Opened);
        row.not_here = series.dials(PeerDial::NotHere);
        row.failed = series.dials(PeerDial::Failed);
    }
    row
}

impl Peering {
    /// What `adit status` shows of them.
    pub(super) fn table(&self) -> PeerTable {
        PeerTable {
            peers: self.peers.clone(),
            askers: Arc::clone(&self.askers),
            metrics: self.metrics.clone(),
        }
    }

    /// Whether a server that asks this one is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.connections.load(Relaxed) > 0
    }

    /// Ends the links of servers that ask this one.
    pub(super) fn end(&self) -> Vec<impl Future<Output = ()> + Send + use<>> {
        self.askers.announce_shutdown();
        let links = self.askers.links();
        links.iter().filter_map(LinkHandle::end).collect()
    }
}
