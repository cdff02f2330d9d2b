//! All connections of one agent: finds servers, keeps one link to each, replaces lost links.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::ids::ServerId;
use adit_core::session::LinkFailure;
use adit_core::wire::metadata::AgentHello;
use adit_host::files::{Reader, STUCK_AFTER};
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Mutex as AsyncMutex, Notify, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

mod slots_per_server;

use self::slots_per_server::Slots;
use crate::connector::{Connected, ConnectorError, ServerConnector};
use crate::context::LinkContext;
use crate::lanes::{Cause, LaneKeeper, OpenError};
use crate::link::{AgentLink, ConnectError, Identity, Opened, Silence, open};
use crate::sync::{Attempt, CountOrigin, Progress, SearchRules, SearchView, SyncPolicy, SyncState};
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::{CountSource, LaneSecurity};
use adit_net::tasks::Tasks;
use adit_telemetry::Masked;
use adit_telemetry::guard::GaugeGuard;
use adit_telemetry::labels::{LinkDirection, LinkEnding, Segment};
use adit_tunnel::lane::{Lane, bind_to_server};
use adit_tunnel::{Command, LinkExit};

/// Longest token: it has to fit into the headers that a server takes.
const TOKEN_BYTES_MAX: u64 = 256 << 10;

/// Settings of the search for servers.
pub struct ServersSettings {
    /// Addresses of servers.
    pub addresses: Vec<ServerAddress>,
    /// Connects to them.
    pub connector: ServerConnector,
    /// Id, identifiers and extensions of this agent.
    pub hello: AgentHello,
    /// Bearer token file, re-read at every attempt so that rotation works.
    pub token_path: Option<PathBuf>,
    /// How often to try.
    pub policy: SyncPolicy,
    /// Which count of servers is used, once their leases are known.
    pub count_source: CountSource,
    /// HTTP/2 ping interval.
    pub keepalive: Duration,
    /// Limit on lanes to one server; 0: no lanes.
    pub lanes_max: usize,
    /// Security of lanes after their greeting.
    pub lane_security: LaneSecurity,
    /// Connections of this node need lanes: a server without lanes causes a warning.
    pub serves_node: bool,
}

/// Handle to the search and its links. Clones share them.
#[derive(Clone)]
pub struct Servers {
    shared: Arc<Shared>,
}

struct Shared {
    settings: ServersSettings,
    context: LinkContext,
    state: Mutex<SyncState>,
    links: Mutex<Vec<(u64, AgentLink)>>,
    links_changed: watch::Sender<()>,
    connected: Arc<AtomicUsize>,
    heard: Arc<AtomicUsize>,
    changed: Notify,
    /// Changes with the state of the search.
    searched: watch::Sender<()>,
    /// Limits concurrent opening of lanes, over all links.
    opening: Slots,
    /// Reads the token.
    token: AsyncMutex<Reader<io::Result<String>>>,
}

/// The lanes to all servers, for tunnels that this agent opens. Clones share them.
#[derive(Clone)]
pub struct ServerLanes(Arc<Shared>);

/// A snapshot of links and lanes.
pub struct LanesNow {
    /// Number of links, to servers with and without lanes.
    pub links: usize,
    /// Keepers of the links with lanes.
    pub keepers: Vec<LaneKeeper>,
}

/// Waits for changes of the links.
pub struct Changes(watch::Receiver<()>);

impl Changes {
    /// Waits until links have been added or removed since this was created, or since the last call.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            // The search is over, and the caller is about to end, too.
            std::future::pending::<()>().await;
        }
    }
}

impl ServerLanes {
    /// A snapshot.
    #[must_use]
    pub fn now(&self) -> LanesNow {
        let links = locked(&self.0.links);
        LanesNow {
            links: links.len(),
            keepers: links
                .iter()
                .filter_map(|(_, link)| link.lanes.clone())
                .collect(),
        }
    }

    /// Subscribes to changes from now on.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes(self.0.links_changed.subscribe())
    }
}

/// Why an attempt failed.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error(transparent)]
    ServerConnector(#[from] ConnectorError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot read the token {path}: {source}", path = path.display())]
    Token { path: PathBuf, source: io::Error },
    #[error("the file {path} holds no token: mount a projected service account token there", path = .0.display())]
    NoToken(PathBuf),
    #[error("no answer within {} s", limits::LINK_CONNECT_TIMEOUT.as_secs())]
    Elapsed,
}

/// The token that a file holds.
///
/// # Errors
/// The text is empty, or cannot be a token: a server would refuse it without naming the file.
fn token_in(path: &Path, text: String) -> Result<Masked<String>, AttemptError> {
    let text = Masked::new(text);
    let token = text.reveal().trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(AttemptError::NoToken(path.to_owned()));
    }
    Ok(text)
}

impl Servers {
    /// Starts the search on `tasks`.
    #[must_use]
    pub fn start(settings: ServersSettings, context: LinkContext, tasks: &Tasks) -> Self {
        let state = SyncState::new(settings.policy, settings.addresses.len());
        let state = Mutex::new(state.counting(settings.count_source));
        let token = Reader::of(settings.token_path.as_slice());
        let shared = Arc::new(Shared {
            settings,
            context,
            state,
            links: Mutex::new(Vec::new()),
            links_changed: watch::Sender::new(()),
            connected: Arc::default(),
            heard: Arc::default(),
            changed: Notify::new(),
            searched: watch::Sender::new(()),
            opening: Slots::default(),
            token: AsyncMutex::new(token),
        });
        shared.publish();
        let search = Arc::clone(&shared);
        tasks.spawn_always("server-search", async move { search.run().await });
        Self { shared }
    }

    /// The lanes to all servers.
    #[must_use]
    pub fn lanes(&self) -> ServerLanes {
        ServerLanes(Arc::clone(&self.shared))
    }

    /// Number of servers with a link, shared for readiness.
    #[must_use]
    pub fn connected(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.shared.connected)
    }

    /// Number of these servers that are not silent.
    #[must_use]
    pub fn heard(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.shared.heard)
    }

    /// Current links, in order of arrival.
    #[must_use]
    pub fn links(&self) -> Vec<AgentLink> {
        let links = locked(&self.shared.links);
        links.iter().map(|(_, link)| link.clone()).collect()
    }

    /// Whether all data that departed targets left on links has been sent to the servers.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let links = locked(&self.shared.links);
        links.iter().all(|(_, link)| link.dirty_list.is_settled())
    }

    /// Whether this agent has announced that it is going away.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        locked(&self.shared.state).is_draining()
    }

    /// How far the search is.
    #[must_use]
    pub fn search(&self) -> SearchView {
        locked(&self.shared.state).view()
    }

    /// These servers have a lease: the agent looks for those without a link.
    pub fn leased(&self, servers: BTreeSet<ServerId>) {
        let chance = rand::random::<f64>();
        locked(&self.shared.state).leased(servers, Instant::now(), chance);
        self.shared.publish();
        self.shared.changed.notify_one();
    }

    /// Waits for the first link, and returns its server.
    pub async fn first(&self) -> ServerId {
        let mut changes = self.shared.links_changed.subscribe();
        loop {
            if let Some((_, link)) = locked(&self.shared.links).first() {
                return link.server.clone();
            }
            // The sender lives as long as `self`.
            let _changed = changes.changed().await;
        }
    }

    /// Ends every link in order, so that servers learn of it; completes when the link tasks have the command.
    pub async fn leave(&self) {
        let links: Vec<_> = locked(&self.shared.links)
            .iter()
            .map(|(_, link)| link.commands.clone())
            .collect();
        let stop = |link: mpsc::Sender<Command>| async move {
            let _over = link.send(Command::Stop).await;
        };
        join_all(links.into_iter().map(stop)).await;
    }

    /// Announces to every server that this agent is going away, and stops the search.
    pub fn drain(&self) {
        // The lock on links is taken first and held: a link that is being opened checks for draining in `keep`, under this
        // lock.
        let links = locked(&self.shared.links);
        locked(&self.shared.state).drain();
        for (_, link) in links.iter() {
            announce_drain(link, &self.shared.context.tasks);
        }
        drop(links);
        self.shared.changed.notify_one();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the state is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a link leads to `server` and is not silent.
fn serves(links: &[(u64, AgentLink)], server: &ServerId) -> bool {
    let mut links = links.iter();
    links.any(|(_, link)| link.server == *server && !link.is_silent)
}

/// Warns that connections reach fewer servers than there should be.
fn warn_slow(view: &SearchView) {
    let count = view.known;
    match &view.origin {
        Some(CountOrigin::Server(server)) => tracing::warn!(
            %server, count,
            "connections reach fewer servers than this server announces: the agent tries rarely now; check --server-count \
             and the load balancer"
        ),
        Some(CountOrigin::Leases) | None => tracing::warn!(
            count,
            "connections reach fewer servers than have a lease: the agent tries rarely now; check the load balancer"
        ),
    }
}

/// A newer link has replaced this one, which stays as long as it has tunnels.
fn supersede(link: &AgentLink, tasks: &Tasks) {
    let commands = link.commands.clone();
    let telling = async move {
        let _over = commands.send(Command::Finish).await;
    };
    if tasks.spawn("supersede", telling).is_err() {
        tracing::debug!(server = %link.server, "a link that was replaced is kept");
    }
}

fn announce_drain(link: &AgentLink, tasks: &Tasks) {
    // Concurrent dial outcomes, as at a deadline, may fill the queue for a moment. A link that is over needs no announcement.
    if let Err(TrySendError::Full(drain)) = link.commands.try_send(Command::Drain) {
        let commands = link.commands.clone();
        let telling = async move {
            let _over = commands.send(drain).await;
        };
        if tasks.spawn("drain", telling).is_err() {
            tracing::warn!(server = %link.server, "all task slots are in use: cannot announce DRAIN to the server");
        }
    }
}

/// A held server, which is not tried again. Dropping this releases the server, however its link ended.
struct HeldServer {
    shared: Arc<Shared>,
    server: ServerId,
    serial: u64,
    lanes: Option<LaneKeeper>,
    _version: GaugeGuard,
}

impl HeldServer {
    /// Runs the link and logs how it ended.
    async fn until(self, running: impl Future<Output = LinkExit>, silence: Silence) {
        let watch = silence.watch(|is_silent| {
            self.shared
                .report_silence(&self.server, self.serial, is_silent);
        });
        let over = {
            let (mut running, mut watch) = (pin!(running), pin!(watch.fuse()));
            loop {
                tokio::select! {
                    over = &mut running => break over,
                    () = &mut watch => (),
                }
            }
        };
        let server = &self.server;
        if matches!(over, LinkExit::Finished) {
            tracing::info!(%server, "server left");
        } else if let LinkExit::RevokedByPeer(why) = &over {
            tracing::warn!(%server, why, "the server has ended this link");
        } else if matches!(over, LinkExit::Stopped) && self.shared.context.tasks.is_stopping() {
            tracing::info!(%server, "left the server");
        } else if let LinkExit::Failed(LinkFailure::ControlOverflow) = over {
            let reason = LinkEnding::ControlQueue;
            self.shared.context.metrics.adit().links_ended.count(reason);
            tracing::warn!(%server, %reason, "link ended: the server does not read, and packets for it use too much memory; check the server and the network");
        } else {
            tracing::info!(%server, reason = %over, "server connection ended");
        }
        let metrics = &self.shared.context.metrics;
        let (received, sent) = (Segment::ToAgent, Segment::FromAgent);
        let error = over.stream_error(received, sent, tonic::Code::Unavailable);
        if let Some((segment, code, kind)) = error {
            metrics.stream_error(segment, code, kind.map(Into::into));
        }
        metrics
            .server_connection_failures
            .count(LinkDirection::FromServer);
    }
}

impl Drop for HeldServer {
    fn drop(&mut self) {
        if let Some(lanes) = &self.lanes {
            lanes.close();
        }
        self.shared.forget(&self.server, self.serial);
    }
}

impl Shared {
    async fn run(self: Arc<Self>) {
        let (mut serial, shared) = (0_u64, &self);
        // At most one attempt per address, so that an address that does not answer delays no other.
        let mut attempts = FuturesUnordered::new();
        loop {
            let links = locked(&self.links).len() + attempts.len();
            let next = locked(&self.state).next_attempt_beside(links, Instant::now());
            let due = async {
                let Some((at, when)) = next else {
                    return std::future::pending().await;
                };
                sleep_until(when).await;
                at
            };
            tokio::select! {
                at = due => {
                    locked(&self.state).begin(at);
                    attempts.push(async move { (at, shared.attempt(at).await) });
                }
                Some((at, opened)) = attempts.next() => {
                    serial += 1;
                    self.attempted(at, opened, serial);
                }
                () = self.changed.notified() => (),
            }
        }
    }

    async fn attempt(&self, at: usize) -> Option<Opened> {
        let address = self.settings.addresses.get(at)?;
        let connecting = timeout(limits::LINK_CONNECT_TIMEOUT, self.connect(address));
        match connecting.await.unwrap_or(Err(AttemptError::Elapsed)) {
            Ok(opened) => Some(opened),
            Err(error) => {
                self.context
                    .metrics
                    .server_connection_failures
                    .count(LinkDirection::ToServer);
                tracing::warn!(server = %address, %error, "cannot connect to a server");
                None
            }
        }
    }

    /// Keeps an opened link, unless another attempt has led to the same server meanwhile.
    fn attempted(self: &Arc<Self>, at: usize, opened: Option<Opened>, serial: u64) {
        let mut state = locked(&self.state);
        let (outcome, opened) = match opened {
            None => (Attempt::Failed, None),
            Some(opened) => {
                let (server, count) = (opened.server.server.clone(), opened.server.server_count);
                if state.is_first_excess(count) {
                    tracing::warn!(
                        %server, count,
                        "this server announces more than 64 servers, to which an agent connects at most: check its --server-count"
                    );
                }
                if state.holds(&server) {
                    tracing::debug!(%server, "already connected to this server");
                    (Attempt::Duplicate { server, count }, None)
                } else {
                    (Attempt::New { server, count }, Some(opened))
                }
            }
        };
        // Before the link runs: the link may end at once, and its end must find the server held.
        let was_slow = state.view().progress == Progress::Slow;
        state.attempted(at, outcome, Instant::now(), rand::random::<f64>());
        let view = state.view();
        drop(state);
        if view.progress == Progress::Slow
            && !was_slow
            && self.settings.policy.rules == SearchRules::Native
        {
            warn_slow(&view);
        }
        if let Some(opened) = opened {
            self.keep(at, opened, serial);
        }
        self.publish();
    }

    fn keep(self: &Arc<Self>, at: usize, opened: Opened, serial: u64) {
        let server = opened.server.server.clone();
        let credit = opened.server.extensions.link;
        let (mut link, silence, running) = opened.start(&self.context, self.settings.lanes_max);
        if let Some(address) = self.settings.addresses.get(at) {
            link.address = address.to_string().into();
        }
        let lanes = link.lanes.clone();
        let version = self.context.metrics.adit().link_of_version(link.version);
        tracing::info!(
            %server, adit = credit, version = link.version.as_str().unwrap_or_default(), lanes = lanes.is_some(),
            "connected to a server"
        );
        if lanes.is_none() && self.settings.serves_node {
            tracing::warn!(
                %server,
                "this server takes no lanes, so no connection of this node goes through it: it is not Adit, has \
                 --lanes-per-link=0, or asks this agent for neither a certificate nor a token"
            );
        }
        let mut links = locked(&self.links);
        if locked(&self.state).is_draining() {
            announce_drain(&link, &self.context.tasks);
        }
        links.push((serial, link));
        drop(links);
        self.links_changed.send_replace(());
        let keeping = lanes.clone().map(|lanes| self.keep_lanes(at, lanes));
        let held = HeldServer {
            shared: Arc::clone(self),
            server: server.clone(),
            serial,
            lanes,
            _version: version,
        };
        let link = held.until(running, silence);
        if self.context.tasks.spawn("link", link).is_err() {
            tracing::error!(%server, "no room for another link: too many targets are open");
        } else if let Some(keeping) = keeping
            && self.context.tasks.spawn("lanes", keeping).is_err()
        {
            tracing::error!(%server, "no room for lanes: too many targets are open");
        }
    }

    /// Keeps lanes to the server behind this address until its link is over.
    fn keep_lanes(
        self: &Arc<Self>,
        at: usize,
        lanes: LaneKeeper,
    ) -> impl Future<Output = ()> + Send + 'static {
        let shared = Arc::clone(self);
        async move {
            let (shared, share) = (&*shared, &Slots::default());
            lanes
                .run(|cause| async move { Box::pin(shared.open_lane(at, share, cause)).await })
                .await;
        }
    }

    /// Connects a lane and binds it to this agent's link to the server that answers.
    async fn open_lane(
        &self,
        at: usize,
        share: &Slots,
        cause: Cause,
    ) -> Result<(LaneKeeper, Lane), OpenError> {
        let failed = |error: &dyn std::fmt::Display| OpenError(error.to_string());
        self.lane_turn().await;
        let addresses = &self.settings.addresses;
        let takes_lanes = |(_, link): &&(u64, AgentLink)| link.lanes.is_some();
        let servers = locked(&self.links).iter().filter(takes_lanes).count();
        // Addresses without a link yet count as servers that will need lanes.
        let servers = servers.max(addresses.len());
        let _turn = match cause {
            Cause::Missing => self.opening.take(share, servers).await,
            Cause::Asked => None,
        };
        if self.context.lane_room.is_closed() {
            return Err(OpenError(String::from("this agent drains")));
        }
        let Some(address) = addresses.get(at) else {
            return Err(OpenError(String::from("no such address")));
        };
        let connecting = timeout(
            limits::LINK_CONNECT_TIMEOUT,
            self.settings.connector.connect_lane(address),
        );
        let stream = connecting
            .await
            .map_err(|_elapsed| failed(&AttemptError::Elapsed))?
            .map_err(|error| failed(&error))?;
        let keeper_of = |server: &ServerId| {
            let links = locked(&self.links);
            let mut keepers = links.iter().filter_map(|(_, link)| link.lanes.clone());
            let keeper = keepers.find(|keeper| keeper.server() == server)?;
            Some((keeper.bind(), keeper))
        };
        bind_to_server(stream, self.settings.lane_security, keeper_of)
            .await
            .map_err(|error| failed(&error))
    }

    /// Waits until a lane may connect.
    async fn lane_turn(&self) {
        let mut searched = self.searched.subscribe();
        loop {
            searched.borrow_and_update();
            let turn = locked(&self.state).lane_turn(Instant::now());
            let Err(when) = turn else {
                return;
            };
            tokio::select! {
                // The sender lives as long as `self`.
                _changed = searched.changed() => (),
                () = sleep_until(when) => (),
            }
        }
    }

    /// Removes a link that has ended, or never ran.
    fn forget(&self, server: &ServerId, serial: u64) {
        let mut links = locked(&self.links);
        // By serial: a slow end must not remove its successor.
        links.retain(|(id, _)| *id != serial);
        if !serves(&links, server) {
            locked(&self.state).lost(server, Instant::now(), rand::random::<f64>());
        }
        if links.is_empty() && !locked(&self.state).is_draining() {
            tracing::warn!(%server, "the last server is gone: this agent serves no dials until it has a link again");
        }
        drop(links);
        self.links_changed.send_replace(());
        self.publish();
        self.changed.notify_one();
    }

    /// Records that the server of a link has fallen silent, or responds again.
    fn report_silence(&self, server: &ServerId, serial: u64, is_silent: bool) {
        let mut links = locked(&self.links);
        if let Some((_, link)) = links.iter_mut().find(|(id, _)| *id == serial) {
            link.is_silent = is_silent;
        }
        // Under the lock on links, as in `forget`.
        let mut state = locked(&self.state);
        if is_silent {
            tracing::warn!(%server, "server is silent: another connection to it is tried, after a pause if it was silent just before");
            if !serves(&links, server) {
                state.suspect(server, Instant::now(), rand::random::<f64>());
            }
        } else {
            tracing::info!(%server, "server responds again");
            state.regain(server);
            let newer = links
                .iter()
                .filter(|(id, link)| *id > serial && link.server == *server);
            if newer.count() > 0
                && let Some((_, link)) = links.iter().find(|(id, _)| *id == serial)
            {
                supersede(link, &self.context.tasks);
            }
        }
        drop(state);
        drop(links);
        self.publish();
        self.changed.notify_one();
    }

    /// Reads the token again for each link: Kubernetes renews it.
    async fn read_token(&self, path: &Path) -> Result<String, AttemptError> {
        let reading = path.to_owned();
        let read =
            move || io::read_to_string(adit_host::files::open(&reading)?.take(TOKEN_BYTES_MAX));
        let read = self.token.lock().await.read(STUCK_AFTER, read).await;
        let read = read.unwrap_or_else(|error| Err(io::Error::other(error)));
        read.map_err(|source| AttemptError::Token {
            path: path.to_owned(),
            source,
        })
    }

    async fn connect(&self, address: &ServerAddress) -> Result<Opened, AttemptError> {
        let token = match &self.settings.token_path {
            None => None,
            Some(path) => Some(token_in(path, self.read_token(path).await?)?),
        };
        let Connected { stream, authority } = self.settings.connector.connect(address).await?;
        // A duplicate descriptor: HTTP/2 takes ownership of the stream.
        let socket = stream
            .tcp()
            .and_then(|socket| socket.as_fd().try_clone_to_owned().ok());
        let identity = Identity {
            hello: self.settings.hello.clone(),
            token,
        };
        let keepalive = self.settings.keepalive;
        Ok(open(stream, &authority, &identity, keepalive, socket).await?)
    }

    fn publish(&self) {
        let links = locked(&self.links);
        let servers: BTreeSet<&ServerId> = links.iter().map(|(_, link)| &link.server).collect();
        let connected = servers.len();
        drop(servers);
        drop(links);
        let state = locked(&self.state);
        self.connected.store(connected, Relaxed);
        self.heard.store(state.held(), Relaxed);
        self.context.metrics.open_server_connections.set(connected);
        self.context
            .metrics
            .known_server_count
            .set(state.known_count());
        drop(state);
        self.searched.send_replace(());
    }
}

#[cfg(test)]
mod tests;
