//! `AgentService/Connect`: identifies the caller, authorizes it, and runs its link.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use adit_core::grant::Grants;
use adit_core::ids::AgentId;
use adit_core::registry::Silence;
use adit_core::session::ProcessBudget;
use adit_core::text::Excerpt;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::metadata::{
    AgentHello, Extensions, LaneGrant, PeerHello, PeerVersion, ServerHello,
};
use adit_kube::token::Token;
use futures_util::future::{Either, select};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backend::admission::{AgentAuthenticator, LargeCaller, Refused};
use crate::backend::announcements::{Announcements, Announcer};
use crate::backend::authorizer::{AgentAuthorizer, Rights};
use crate::backend::connection_links::{ConnectionLinks, without_links};
use crate::backend::lanes::LaneListener;
use crate::backend::link::{Claims, LinkSettings, run_link};
use crate::backend::link_places::{LinkPlaces, LinkQuota};
use crate::backend::node::AgentDoors;
use crate::router::{LinkHandle, LinkInfo, RegisteredLink, Router};
use adit_config::plan::LaneSecurity;
use adit_net::accounts::{Accounts, Labels};
use adit_net::grpc::{self, Code, Windows};
use adit_net::source_quota::Source;
use adit_net::tasks::{Admitted, Tasks};
use adit_telemetry::labels::{AccountRole, AgentRefusal, PeerDirection};
use adit_telemetry::{AditMetrics, ServerMetrics};
use adit_tls::agent_identity::{AgentIdentity, Certificate};
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tunnel::lane::LaneRoom;
use adit_tunnel::{LanePool, LaneWatch, LinkExit, LinkStreams, PoolSettings};

/// Path of the only method.
const METHOD: &str = "/AgentService/Connect";
/// Bytes in flight from one agent: enough for 1 Gbit/s over 100 ms.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// The part of these that a Go agent may use: its tunnels share the window without credit, so less waits in a paced link.
const STREAM_WINDOW_GO_BYTES: u32 = 2 << 20;
/// Bytes in the HTTP/2 layer, above which control packets would have to wait.
const SEND_BUFFER_BYTES: usize = 128 * 1024;
/// Streams one agent connection may open; agents open one.
const LINKS_PER_CONNECTION_MAX: u32 = 8;

/// To how many servers agents are told to connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AgentLinks {
    /// This server has just started and asks its peers: agents wait for the answer.
    Unknown,
    /// To all.
    ToAll,
    /// To this many: each server reaches the agents of all others.
    ToFew(i64),
}

/// Settings of the agent listener.
pub struct BackendSettings {
    /// What agents are told about this server.
    pub server: ServerHello,
    /// HTTP/2 ping interval.
    pub keepalive: Duration,
    /// Decides which callers may link.
    pub admission: AgentAuthenticator,
    /// Number of servers with leases; 0 without leases.
    pub leases: watch::Receiver<usize>,
    /// What agents are told of the number of servers.
    pub agent_links: watch::Receiver<AgentLinks>,
    /// Decides which agents may keep their links.
    pub authorizer: AgentAuthorizer,
    /// What an agent may claim; empty: any claim is accepted.
    pub grants: Grants,
    /// Limit on links of one owner under one agent id.
    pub links_per_agent_max: usize,
    /// Settings of every link.
    pub link: LinkSettings,
    /// Limit on lanes of one link; 0: no lanes.
    pub lanes_per_link_max: usize,
    /// Security of lanes after their greeting.
    pub lane_security: LaneSecurity,
    /// Slots for lanes in the whole process.
    pub lane_room: Arc<LaneRoom>,
    /// Checks stalled lanes and lanes without a link.
    pub lane_watch: Arc<LaneWatch>,
    /// Opens tunnels for agents; `None`: agents may open none.
    pub node: Option<Arc<dyn AgentDoors>>,
    /// The callers are servers, not agents.
    pub peers: Option<PeerBackend>,
    /// Kernel accounting.
    pub accounts: Accounts,
}

/// What makes a listener one for other servers.
pub struct PeerBackend {
    /// What this server says of itself.
    pub hello: PeerHello,
    /// What servers are told of this server's agents.
    pub announcements: Announcements,
    /// Counters.
    pub metrics: AditMetrics,
}

/// Serves agent connections.
pub struct Backend {
    router: Arc<Router>,
    settings: BackendSettings,
    budget: Arc<ProcessBudget>,
    metrics: ServerMetrics,
    tasks: Tasks,
    lanes: LaneListener,
    links: LinkQuota,
    /// Connections that carry links or may.
    open: Arc<AtomicUsize>,
}

impl Backend {
    /// A service on top of a router; links run on `tasks`.
    #[must_use]
    pub fn new(
        router: Arc<Router>,
        settings: BackendSettings,
        budget: Arc<ProcessBudget>,
        metrics: ServerMetrics,
        tasks: Tasks,
    ) -> Arc<Self> {
        let server = settings.server.server.clone();
        let security = settings.lane_security;
        let counters = metrics.adit().clone();
        let accounts = settings.accounts.clone();
        let admitted = settings.admission.addresses().clone();
        let lanes = LaneListener::new(
            Arc::clone(&router),
            server,
            security,
            counters,
            accounts,
            admitted,
        );
        Arc::new(Self {
            lanes,
            links: LinkQuota::default(),
            open: Arc::default(),
            router,
            settings,
            budget,
            metrics,
            tasks,
        })
    }

    /// Kernel accounting.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.settings.accounts
    }

    /// Open connections of agents, without those for lanes.
    #[must_use]
    pub fn open_connections(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.open)
    }

    /// Serves a connection that is to become a lane; completes when the lane is in its pool, or the connection is closed.
    pub async fn serve_lane(&self, stream: ByteStream) {
        self.lanes.serve(stream).await;
    }

    /// Serves one connection to its end. `certificate` was proved by its TLS session; `account` is the socket's cookie if the
    /// kernel accounts for it.
    ///
    /// GOAWAY is never sent while the connection runs: on GOAWAY, agents in the field drop all their tunnels. A cancelled call
    /// closes the connection; its links then end by themselves.
    pub fn serve(
        self: Arc<Self>,
        io: ByteStream,
        peer: PeerAddr,
        certificate: Option<Certificate>,
        account: Option<u64>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(self.serve_io(io, peer, certificate, account))
    }

    async fn serve_io<S>(
        self: Arc<Self>,
        io: S,
        peer: PeerAddr,
        certificate: Option<Certificate>,
        account: Option<u64>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let windows = Windows {
            frame_bytes: grpc::LINK_FRAME_BYTES,
            stream_bytes: STREAM_WINDOW_BYTES,
            send_buffer_bytes: SEND_BUFFER_BYTES,
        };
        let mut builder = grpc::server_builder(windows);
        builder.max_concurrent_streams(LINKS_PER_CONNECTION_MAX);
        let _open = OpenConnection::new(&self.open);
        let connection = match grpc::accept(&builder, io).await {
            Ok(connection) => connection,
            Err(error) => return tracing::debug!(%error, "agent connection is not HTTP/2"),
        };
        let never = CancellationToken::new();
        let links = ConnectionLinks::default();
        let every = self.settings.keepalive;
        let silence = |quiet| self.report_silence(&links, quiet);
        let served = connection.serve_watched(every, never, silence, |request, respond| {
            let who = Caller {
                peer,
                certificate: certificate.clone(),
                account,
                links: links.clone(),
            };
            self.call(request, respond, who)
        });
        let idle = without_links(&links);
        match select(pin!(served), pin!(idle)).await {
            Either::Left((Ok(()), _idle)) => (),
            Either::Left((Err(error), _idle)) => {
                tracing::debug!(%error, "agent connection ended");
            }
            Either::Right(((), _served)) => {
                tracing::debug!(%peer, "a connection without a link is closed");
            }
        }
    }

    /// Records how long the agent of these links has been silent; zero: it responds.
    fn report_silence(&self, links: &ConnectionLinks, quiet: Duration) {
        for link in links.all() {
            let Some((agent, silence)) = self.router.set_silence(link, quiet) else {
                continue;
            };
            let principal = self.router.principal_of(link);
            let principal = principal.as_deref();
            let link = link.0;
            if self.settings.peers.is_some() {
                match silence {
                    Silence::None => {
                        tracing::info!(server = %agent, principal, "a server that asks this one responds again");
                    }
                    Silence::Suspected => {
                        tracing::warn!(server = %agent, principal, "a server that asks this one is silent");
                    }
                    Silence::Dead => (),
                }
                continue;
            }
            match silence {
                Silence::None => tracing::info!(%agent, principal, link, "agent responds again"),
                Silence::Suspected => tracing::warn!(
                    %agent,
                    principal,
                    link,
                    "agent is silent: new dials go to other agents of the same key"
                ),
                Silence::Dead => tracing::warn!(
                    %agent,
                    principal,
                    link,
                    "agent is still silent: its link gets no dials until it responds"
                ),
            }
        }
    }

    fn answer(&self, link: &LinkHandle) -> ServerHello {
        let lane_grant = link.lanes.as_ref().map(|pool| LaneGrant {
            link: link.id,
            secret: pool.secret().reveal(),
            lanes_max: u32::try_from(pool.lanes_max()).unwrap_or(u32::MAX),
        });
        let extensions = Extensions {
            link: link.info.credit,
            lanes: lane_grant.is_some(),
        };
        let hello = self.settings.server.clone();
        let leases = i64::try_from(*self.settings.leases.borrow()).unwrap_or(i64::MAX);
        let servers = hello.server_count.max(leases);
        let few = match *self.settings.agent_links.borrow() {
            AgentLinks::Unknown | AgentLinks::ToAll => None,
            AgentLinks::ToFew(links) => Some(links),
        };
        ServerHello {
            extensions,
            lane_grant,
            peer: self.settings.peers.as_ref().map(|peers| PeerHello {
                agent_links: few,
                ..peers.hello.clone()
            }),
            server_count: few.map_or(servers, |few| servers.min(few)),
            // Sent only to peers that sent their own version.
            version: link
                .info
                .version
                .as_str()
                .map_or_else(PeerVersion::default, |_said| hello.version),
            ..hello
        }
    }

    /// A lane pool for a link whose agent supports lanes and has proved its identity.
    fn pool(
        &self,
        hello: &AgentHello,
        identity: &AgentIdentity,
        (source, peer): (&Source, PeerAddr),
        judged: u64,
    ) -> Option<Arc<LanePool>> {
        let extensions = hello.extensions;
        let lanes_max = self.settings.lanes_per_link_max;
        if !extensions.link || !extensions.lanes || lanes_max == 0 {
            return None;
        }
        let link = &self.settings.link;
        identity.owner()?;
        let node = self.settings.node.as_ref();
        let opens = node.and_then(|node| Arc::clone(node).of_agent(&hello.agent, identity, source));
        Some(LanePool::new(PoolSettings {
            identity: identity.clone(),
            rights: Some(Arc::new(Rights::new(
                self.settings.authorizer.clone(),
                hello.agent.clone(),
                identity.clone(),
                judged,
            ))),
            lanes_max,
            dials_max: link.dials_max,
            silence_max: link.isolation.half_closed_timeout,
            room: Arc::clone(&self.settings.lane_room),
            tasks: self.tasks.clone(),
            metrics: self.metrics.adit().clone(),
            watch: Arc::clone(&self.settings.lane_watch),
            budget: Arc::clone(&self.budget),
            opens,
            places: self.lanes.places(identity, peer),
        }))
    }

    fn call(
        self: &Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<MessageBuf>,
        who: Caller,
    ) -> Option<Admitted> {
        if !grpc::is_call(&request, METHOD, &mut respond) {
            return None;
        }
        let hello = match AgentHello::from_headers(header_values(request.headers())) {
            Ok(hello) => hello,
            Err(error) => {
                if self.settings.admission.may_log() {
                    tracing::warn!(%error, "agent refused");
                }
                self.metrics
                    .adit()
                    .agents_refused
                    .count(AgentRefusal::Metadata);
                grpc::refuse(&mut respond, Code::InvalidArgument, &error.to_string());
                return None;
            }
        };
        if !self.tasks.has_room() {
            tracing::warn!("agent refused: too many links");
            self.metrics
                .adit()
                .agents_refused
                .count(AgentRefusal::Process);
            grpc::refuse(
                &mut respond,
                Code::ResourceExhausted,
                "this server has too many links",
            );
            return None;
        }
        let certificate = who.certificate.as_ref();
        let admission = &self.settings.admission;
        let headers = request.headers();
        let token = admission
            .token(headers, certificate)
            .and_then(|token| match token {
                Some(token) => Ok(Some((token, admission.room(headers)?))),
                None => Ok(None),
            });
        let body = request.into_body();
        let backend = Arc::clone(self);
        let link = async move {
            // Boxed: the state of admission is freed once the link runs, which may be for days.
            let admitted = Box::pin(backend.admit(hello, token, body, respond, who)).await;
            if let Some(link) = admitted {
                link.await;
            }
        };
        self.tasks.admit("link", link).ok()
    }

    /// Answers a call; returns the link if the agent is admitted. Before the answer, other tasks cannot see the link.
    async fn admit(
        self: Arc<Self>,
        hello: AgentHello,
        token: Result<Option<(Token, Option<LargeCaller>)>, Refused>,
        mut body: RecvStream,
        mut respond: SendResponse<MessageBuf>,
        who: Caller,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let (agent, credit) = (hello.agent.clone(), hello.extensions.link);
        let shown = who
            .certificate
            .as_ref()
            .map(|certificate| Arc::clone(certificate.holder()));
        let identified = match token {
            Err(refused) => Err(refused),
            Ok(token) => {
                let (token, _room) = token.unzip();
                let admission = &self.settings.admission;
                let identify = pin!(async {
                    let identified = admission.identify(token, who.certificate, who.peer).await?;
                    // Two peers would wait for each other.
                    if self.settings.peers.is_none() {
                        let mut links = self.settings.agent_links.clone();
                        let _known = links.wait_for(|links| *links != AgentLinks::Unknown).await;
                    }
                    Ok(identified)
                });
                // Agents wait for the answer before they send packets. Any other caller could fill the stream's window
                // meanwhile.
                let speaks = poll_fn(|cx| match respond.poll_reset(cx) {
                    Poll::Ready(_gone) => Poll::Ready(None),
                    Poll::Pending => body.poll_data(cx).map(|data| data.and_then(Result::ok)),
                });
                match select(identify, speaks).await {
                    Either::Left((identified, _speaks)) => identified,
                    Either::Right((Some(_data), _identify)) => Err(Refused::new(
                        AgentRefusal::Metadata,
                        Code::InvalidArgument,
                        "the agent sent packets before the server answered its call".to_owned(),
                    )),
                    // The caller has left; returning cancels the review.
                    Either::Right((None, _identify)) => return None,
                }
            }
        };
        // Before the response headers: a refusal must be the whole answer.
        let entered = identified.and_then(|identity| self.enter(hello, identity, who.peer));
        let (entered, source, places) = match entered {
            Ok(entered) => entered,
            Err(Refused {
                reason,
                code,
                text,
                logged,
            }) => {
                if shown.is_some() || self.settings.admission.may_log() {
                    let agent = Excerpt(agent.as_str()).to_string();
                    let certificate = shown.as_deref().unwrap_or("none");
                    tracing::warn!(agent, peer = %who.peer, certificate, error = logged.as_deref().unwrap_or(&text), "agent refused");
                }
                self.metrics.adit().agents_refused.count(reason);
                grpc::refuse(&mut respond, code, &text);
                return None;
            }
        };
        let address = self.settings.admission.addresses().enter(who.peer);
        let counted = who.links.enter(entered.handle.id);
        if let Some(cookie) = who.account {
            let labels = Labels {
                role: AccountRole::Link,
                agent: entered.handle.info.agent.as_str(),
                destination_class: "",
            };
            self.accounts().accepted_cookie(cookie, &labels);
        }
        let mut response = grpc::accepted();
        for (name, value) in self.answer(&entered.handle).to_headers() {
            if let Ok(mut value) = HeaderValue::from_str(&value) {
                // One of the values is a secret.
                value.set_sensitive(true);
                response.headers_mut().insert(name, value);
            }
        }
        let send = respond.send_response(response, false).ok()?;
        let withhold = if credit {
            0
        } else {
            STREAM_WINDOW_BYTES - STREAM_WINDOW_GO_BYTES
        };
        let streams = LinkStreams {
            send,
            recv: body,
            withhold_bytes: withhold as usize,
        };
        let claims = if self.settings.grants.is_open() {
            Claims::Unverified
        } else {
            Claims::Granted
        };
        let peers = self.settings.peers.as_ref();
        let announcer = peers.map(|peers| {
            let agent = entered.handle.info.agent.as_str();
            let series = peers.metrics.peer(agent, PeerDirection::From);
            Announcer::new(&peers.announcements, series)
        });
        let link = run_link(
            Arc::clone(&self.router),
            entered,
            (claims, announcer),
            streams,
            self.settings.link,
            (Arc::clone(&self.budget), source.name()),
            self.metrics.clone(),
        );
        let links = who.links.clone();
        Some(async move {
            let over = link.await;
            drop((address, counted, places));
            if let LinkExit::Failed(_) = over {
                links.look_now();
            }
        })
    }

    /// Registers an agent whose claims are allowed.
    ///
    /// # Errors
    /// The claims are not allowed, or the agent has too many links.
    fn enter(
        &self,
        hello: AgentHello,
        identity: AgentIdentity,
        peer: PeerAddr,
    ) -> Result<(RegisteredLink, Source, LinkPlaces), Refused> {
        let owner = identity
            .owner()
            .map_or("an agent without certificate", AsRef::as_ref);
        let unproven = Arc::from("");
        let source = Source::new(identity.owner().unwrap_or(&unproven), peer);
        self.check_kind(&hello)?;
        let judged = self.settings.authorizer.changes();
        self.authorize(&hello.agent, &identity)?;
        self.settings
            .grants
            .check(&identity.holders(), &hello.agent, &hello.identifiers)
            .map_err(|error| {
                Refused::new(
                    AgentRefusal::NotGranted,
                    Code::PermissionDenied,
                    format!("{error} to {owner}"),
                )
            })?;
        let places = self.links.enter(&hello, &source)?;
        let pool = self.pool(&hello, &identity, (&source, peer), judged);
        let info = LinkInfo {
            dials: self.metrics.adit().dials_of(hello.agent.as_str()),
            agent: hello.agent,
            identifiers: hello.identifiers,
            identity,
            credit: hello.extensions.link,
            version: hello.version,
            address: peer,
        };
        let links_max = self.settings.links_per_agent_max;
        let entered = self
            .router
            .register(info, links_max, pool)
            .map_err(|error| {
                Refused::new(
                    AgentRefusal::LinksPerAgent,
                    Code::ResourceExhausted,
                    error.to_string(),
                )
            })?;
        // A check of all links after a change either sees this link, or has raised the count before.
        if self.settings.authorizer.changes() != judged {
            self.authorize(&entered.handle.info.agent, &entered.handle.info.identity)?;
        }
        if let (Some(lanes), Some(_)) = (&entered.handle.lanes, &self.settings.node) {
            // When the task is refused here, the link's task is, too.
            let serving = Arc::clone(lanes).serve_ready();
            let _full = self.tasks.spawn("readable-lanes", serving);
        }
        Ok((entered, source, places))
    }

    /// # Errors
    /// The caller is a server on the port for agents, an agent on the port for servers, or a server of another installation.
    fn check_kind(&self, hello: &AgentHello) -> Result<(), Refused> {
        let text = match (&self.settings.peers, &hello.peer) {
            (None, None) => return Ok(()),
            (None, Some(_)) => {
                "this is the port for agents; servers call the one of --peer-bind".to_owned()
            }
            (Some(_), None) => {
                "this is the port for servers; agents call the agent port".to_owned()
            }
            (Some(peers), Some(caller)) if peers.hello.group == caller.group => return Ok(()),
            (Some(peers), Some(caller)) => format!(
                "this server belongs to the installation {:?}, not {:?}: --peer-group must be the same",
                peers.hello.group, caller.group
            ),
        };
        Err(Refused::new(
            AgentRefusal::Metadata,
            Code::PermissionDenied,
            text,
        ))
    }

    /// # Errors
    /// The agent is denied.
    fn authorize(&self, agent: &AgentId, identity: &AgentIdentity) -> Result<(), Refused> {
        match self.settings.authorizer.denial(agent, identity) {
            None => Ok(()),
            Some(denial) => Err(Refused::new(
                denial.refusal(),
                Code::PermissionDenied,
                denial.text(),
            )),
        }
    }
}

/// Counts a connection of an agent until dropped.
struct OpenConnection(Arc<AtomicUsize>);

impl OpenConnection {
    fn new(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Relaxed);
        Self(Arc::clone(open))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The caller of a request.
struct Caller {
    peer: PeerAddr,
    /// Proved by its TLS session.
    certificate: Option<Certificate>,
    /// The connection's id in kernel accounting.
    account: Option<u64>,
    /// Links on this connection.
    links: ConnectionLinks,
}

fn header_values(headers: &HeaderMap) -> impl Iterator<Item = (&str, &[u8])> {
    headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
}
