//! Agents of the daemon in this process, any number of them. Each has a link, and lanes if the server takes lanes. They share a
//! dialler, certificates and the budget of lanes.
//!
//! To the server they look like that many programs. A server without lanes sees Konnectivity agents.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use adit_agent::connector::{ForwardProxies, RecentServers, ServerConnector};
use adit_agent::context::LinkContext;
use adit_agent::servers::{Servers, ServersSettings};
use adit_agent::sync::{SearchRules, SyncPolicy};
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::CountSource;
use adit_config::plan::LaneSecurity;
use adit_config::tls_policy::TlsPolicy;
use adit_core::destination::DestinationList;
use adit_core::ids::AgentId;
use adit_core::session::{Isolation, ProcessBudget};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerVersion};
use adit_host::descriptors::Descriptors;
use adit_net::accounts::Accounts;
use adit_net::dial::Dialer;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_net::self_sockets::OwnSockets;
use adit_net::tasks::Tasks;
use adit_telemetry::AgentMetrics;
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::tls::{Alpn, ClientTls};
use adit_tunnel::LaneWatch;
use adit_tunnel::lane::LaneRoom;
use anyhow::{Context as _, ensure};

use crate::reviews;

/// Concurrent links, lanes and targets: above any limit of descriptors.
const TASKS_MAX: usize = 200_000;
/// Limit of task groups that hold only permanent tasks, which the limit does not count.
const ADMITTED_MAX: usize = 1;
/// Agents that connect concurrently; a handshake takes a server about a millisecond.
const CONNECTING: usize = 32;
/// Time for these agents to connect.
const LINKED_WITHIN: Duration = Duration::from_secs(20);
/// Interval between two checks whether they are connected.
const PAUSE: Duration = Duration::from_millis(5);
/// Pauses between attempts to connect, shortest and longest.
const RETRY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// Address of a server's agent port, and credentials of the agents.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AgentPort {
    /// Where agents connect to the server, for the measurement of that name.
    #[arg(long = "agents", requires = "certs")]
    address: Option<SocketAddr>,
    /// Folder with the pair of an agent and its CA, as `certs` writes it.
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,
    /// Agents prove themselves by a token each, for `reviews`, and not by their certificate.
    #[arg(long, requires = "address")]
    tokens: bool,
}

/// Running agents. Dropping this leaves them running until the runtime ends; [`Agents::stop`] ends them.
pub(crate) struct Agents {
    server: ServerAddress,
    tls: Arc<ReloadableClientTls>,
    /// Folder for tokens, if agents use them.
    tokens: Option<PathBuf>,
    lanes: bool,
    resolver: Arc<dyn Resolve>,
    context: LinkContext,
    /// Tasks that serve all agents.
    services: Tasks,
    members: Vec<Member>,
}

/// One agent.
struct Member {
    /// Number of servers it is connected to.
    connected: Arc<AtomicUsize>,
    /// Its search for servers, idle once it has found the only server.
    search: Tasks,
}

impl Agents {
    /// Creates the context, without agents. `lanes`: agents open lanes if the server takes them.
    ///
    /// # Errors
    /// Address or certificates are missing, or a certificate cannot be loaded.
    pub(crate) fn new(port: &AgentPort, lanes: bool) -> anyhow::Result<Self> {
        let address = port.address;
        let address = address.context("say with --agents where agents connect")?;
        let certs = port.certs.as_deref();
        let certs = certs.context("say with --certs where the certificates are")?;
        let resolver: Arc<dyn Resolve> = Arc::new(SystemResolver::new()?);
        let tls = Reloadable::load(ClientTls {
            crl: None,
            ca: certs.join("ca.pem"),
            identity: (!port.tokens).then(|| (certs.join("agent.pem"), certs.join("agent.key"))),
            policy: TlsPolicy::default(),
            alpn: Alpn::grpc::<&str>(&[]),
        })?;
        let descriptors = Arc::new(Descriptors::of_process());
        let open = Arc::new(DestinationList::open());
        let context = LinkContext {
            // All agents share this context.
            agent: AgentId::new("agents"),
            dialer: Arc::new(Dialer::accounted(
                Arc::clone(&resolver),
                Arc::<DestinationList>::clone(&open),
                open,
                limits::TARGET_DIAL_TIMEOUT,
                Accounts::off(),
                OwnSockets::off(),
                "",
            )),
            isolation: Isolation::default(),
            budget: Arc::new(ProcessBudget::new(limits::AGENT_BUDGET_BYTES)),
            warn_on_channel_limit: false,
            metrics: AgentMetrics::new(),
            tasks: Tasks::new(TASKS_MAX),
            dials: Arc::default(),
            // The limit of descriptors bounds the lanes.
            lane_room: Arc::new(LaneRoom::new(usize::MAX, descriptors)),
            lane_watch: Arc::new(LaneWatch::default()),
            relay: None,
            asker: None,
        };
        let services = Tasks::new(ADMITTED_MAX);
        let watch = Arc::clone(&context.lane_watch);
        services.spawn_always("lane-watch", async move { watch.run().await });
        Ok(Self {
            server: ServerAddress::Host {
                host: address.ip().to_string(),
                port: address.port(),
            },
            tls,
            tokens: port.tokens.then(|| certs.to_owned()),
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
    /// An agent does not connect in time.
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

    /// Stops all agents.
    pub(crate) async fn stop(self) {
        for member in &self.members {
            let _cut = member.search.drain(Duration::ZERO).await;
        }
        let _cut = self.context.tasks.drain(Duration::ZERO).await;
        let _cut = self.services.drain(Duration::ZERO).await;
    }

    fn start(&self, number: usize) -> anyhow::Result<Member> {
        let agent = AgentId::new(&format!("load-{number}"));
        let write = |folder| reviews::write_token(folder, number);
        let token_path = self.tokens.as_deref().map(write).transpose()?;
        let settings = ServersSettings {
            addresses: vec![self.server.clone()],
            connector: ServerConnector {
                resolver: Arc::clone(&self.resolver),
                tls: Arc::clone(&self.tls),
                proxies: ForwardProxies::none(),
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
                peer: None,
                zone: None,
            },
            token_path,
            count_source: CountSource::default(),
            policy: SyncPolicy {
                interval: RETRY.0,
                interval_cap: RETRY.1,
                forever: false,
                rules: SearchRules::Native,
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

    /// Waits until the agents from number `from` on are connected.
    async fn linked(&self, from: usize) -> anyhow::Result<()> {
        let (end, seconds) = (Instant::now() + LINKED_WITHIN, LINKED_WITHIN.as_secs());
        for (number, member) in self.members.iter().enumerate().skip(from) {
            while member.connected.load(Ordering::Relaxed) == 0 {
                let is_late = Instant::now() > end;
                ensure!(!is_late, "agent {number} has no link after {seconds} s");
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(())
    }
}
