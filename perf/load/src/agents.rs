//! Agents in this process: those of the daemon, as many as are wanted, each with a link, and lanes where the server takes
//! some. They share what one program has once: a dialler, certificates, room for lanes.
//!
//! The server sees what it would see of as many programs. One that knows no lanes sees Konnectivity agents.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use adit_agent::connector::{RecentServers, ServerConnector};
use adit_agent::link::LinkContext;
use adit_agent::servers::{Servers, ServersSettings};
use adit_agent::sync::SyncPolicy;
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::CountSource;
use adit_config::plan::{ForwardProxy, LaneSecurity};
use adit_config::tls_policy::TlsPolicy;
use adit_core::destination::DestinationList;
use adit_core::ids::AgentId;
use adit_core::session::{Isolation, ProcessBudget};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerVersion};
use adit_net::accounts::Accounts;
use adit_net::descriptors::Descriptors;
use adit_net::dial::Dialer;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_telemetry::AgentMetrics;
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::tls::{Alpn, ClientTls};
use adit_tunnel::LaneWatch;
use adit_tunnel::lane::LaneRoom;
use anyhow::{Context as _, bail};

use crate::reviews;

/// Links, lanes and targets at once: above any limit of descriptors.
const TASKS_MAX: usize = 200_000;
/// Of groups that have nothing but a task or two that run for good, which do not count.
const ADMITTED_MAX: usize = 1;
/// Agents that connect at the same time; a handshake takes a server about a millisecond.
const CONNECTING: usize = 32;
/// For those to be connected.
const LINKED_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks whether they are.
const PAUSE: Duration = Duration::from_millis(5);
/// Pauses between attempts to connect, shortest and longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// Where agents connect, and how they prove who they are.
#[derive(Clone, Debug)]
pub(crate) struct AgentPort {
    /// The server's port for agents.
    pub(crate) address: SocketAddr,
    /// The folder that `certs` wrote.
    pub(crate) certs: PathBuf,
    /// By a token each, in place of the certificate.
    pub(crate) tokens: bool,
}

/// See the module. Dropping it leaves them running until the runtime ends; [`Agents::stop`] does not.
pub(crate) struct Agents {
    server: ServerAddress,
    tls: Arc<ReloadableClientTls>,
    /// Where tokens are written, if they have some.
    tokens: Option<PathBuf>,
    lanes: bool,
    resolver: Arc<dyn Resolve>,
    context: LinkContext,
    /// What runs once for all of them.
    services: Tasks,
    members: Vec<Member>,
}

/// One agent.
struct Member {
    /// Servers it is connected to.
    connected: Arc<AtomicUsize>,
    /// Its search for servers, which is idle once it has found the one there is.
    search: Tasks,
}

impl Agents {
    /// None yet. `lanes`: they have some where the server takes them.
    ///
    /// # Errors
    /// The certificates are not there.
    pub(crate) fn new(port: &AgentPort, lanes: bool) -> anyhow::Result<Self> {
        let resolver: Arc<dyn Resolve> = Arc::new(SystemResolver::new()?);
        let tls = Reloadable::load(ClientTls {
            ca: port.certs.join("ca.pem"),
            identity: (!port.tokens)
                .then(|| (port.certs.join("agent.pem"), port.certs.join("agent.key"))),
            policy: TlsPolicy::default(),
            alpn: Alpn::grpc::<&str>(&[]),
        })?;
        let descriptors = Arc::new(Descriptors::of_process());
        let context = LinkContext {
            // All of them have one.
            agent: AgentId::new("agents"),
            dialer: Arc::new(Dialer::new(
                Arc::clone(&resolver),
                DestinationList::open(),
                limits::TARGET_DIAL_TIMEOUT,
            )),
            isolation: Isolation::default(),
            budget: Arc::new(ProcessBudget::new(limits::AGENT_BUDGET_BYTES)),
            warn_on_channel_limit: false,
            metrics: AgentMetrics::new(),
            tasks: Tasks::new(TASKS_MAX),
            dials: Arc::default(),
            // The descriptors say how many there may be.
            lane_room: Arc::new(LaneRoom::new(usize::MAX, descriptors)),
            lane_watch: Arc::new(LaneWatch::default()),
            relay: None,
        };
        let services = Tasks::new(ADMITTED_MAX);
        let watch = Arc::clone(&context.lane_watch);
        services.spawn_always("lane-watch", async move { watch.run().await });
        Ok(Self {
            server: ServerAddress::Host {
                host: port.address.ip().to_string(),
                port: port.address.port(),
            },
            tls,
            tokens: port.tokens.then(|| port.certs.clone()),
            lanes,
            resolver,
            context,
            services,
            members: Vec::new(),
        })
    }

    /// Connects agents until there are `count`.
    ///
    /// # Errors
    /// One of them is not connected in time.
    pub(crate) async fn grow(&mut self, count: usize) -> anyhow::Result<()> {
        while self.members.len() < count {
            let from = self.members.len();
            for number in from..count.min(from + CONNECTING) {
                let member = self.start(number)?;
                self.members.push(member);
            }
            self.linked(from).await?;
        }
        Ok(())
    }

    /// Ends all of them.
    pub(crate) async fn stop(self) {
        for member in &self.members {
            let _cut = member.search.drain(Duration::ZERO).await;
        }
        let _cut = self.context.tasks.drain(Duration::ZERO).await;
        let _cut = self.services.drain(Duration::ZERO).await;
    }

    fn start(&self, number: usize) -> anyhow::Result<Member> {
        let agent = AgentId::new(&format!("load-{number}"));
        let token_path = match &self.tokens {
            Some(folder) => Some(reviews::write_token(folder, number)?),
            None => None,
        };
        let settings = ServersSettings {
            addresses: vec![self.server.clone()],
            connector: ServerConnector {
                resolver: Arc::clone(&self.resolver),
                tls: Arc::clone(&self.tls),
                proxy: ForwardProxy::default(),
                accounts: Accounts::off(),
                own_sockets: OwnSockets::off(),
                agent: agent.clone(),
                recent_servers: RecentServers::default(),
            },
            hello: AgentHello {
                agent,
                identifiers: Identifiers::default(),
                extensions: Extensions {
                    link: true,
                    lanes: self.lanes,
                },
                version: PeerVersion::own(),
            },
            token_path,
            count_source: CountSource::default(),
            policy: SyncPolicy {
                interval: RETRY.0,
                interval_cap: RETRY.1,
                forever: false,
            },
            keepalive: limits::KEEPALIVE_TIME,
            lanes_max: usize::try_from(limits::LANES_PER_LINK).context("lanes fit")?,
            lane_security: LaneSecurity::Tls,
            serves_node: false,
        };
        let search = Tasks::new(ADMITTED_MAX);
        let servers = Servers::start(settings, self.context.clone(), &search);
        Ok(Member {
            connected: servers.connected(),
            search,
        })
    }

    /// Waits until those from `from` on are connected.
    async fn linked(&self, from: usize) -> anyhow::Result<()> {
        let end = Instant::now() + LINKED_WITHIN;
        for (number, member) in self.members.iter().enumerate().skip(from) {
            while member.connected.load(Ordering::Relaxed) == 0 {
                if Instant::now() > end {
                    bail!(
                        "agent {number} has no link after {} s",
                        LINKED_WITHIN.as_secs()
                    );
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }
}
