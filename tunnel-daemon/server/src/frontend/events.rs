//! What frontends report of a client's tunnel: gauges, counters and the access event.

use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use adit_core::grant::ClientTargets;
use adit_core::ids::DialId;
use adit_core::wire::packet::{PacketType, Violation};
use adit_proxy::http::Parent;
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::frontend::client_limits::ClientLimits;
use crate::frontend::users::FrontendUsers;
use crate::router::{AskedAgents, OpenTunnel, Router};
use adit_config::limits;
use adit_host::descriptors::{Descriptors, Use};
use adit_net::accounts::{Accounts, Labels};
use adit_net::tasks::Tasks;
use adit_telemetry::labels::{
    AccountRole, ClientDialect, DialCap, DialFailureReason, DialReason, Driver, DriverReason,
    EndClass, EndReason, Engine, Label as _, OpenedBy, Path, Segment, ServiceMethod,
};
use adit_telemetry::{
    AccessLog, AccessOutcome, FailedDial, GaugeGuard, LiveTunnel, OpenTunnel as OpenGuard,
    PacketCounter, ServerMetrics, TunnelEntry, TunnelFacts, TunnelFlow, TunnelRecord, TunnelSide,
    cut,
};
use adit_tls::principal::Principal;
use adit_tls::stream::{Connection, PeerAddr};
use adit_tunnel::{Carrier, Endpoint, EndpointWatch, RawLaneRelay};

/// The target network of all dialects but gRPC.
pub(super) const NETWORK: &str = "tcp";

/// Shared by all frontends of a server.
pub struct FrontendContext {
    /// Dials the clients' targets, and has the budget.
    pub router: Arc<Router>,
    /// Dials them in place of the router, in a process without agents.
    pub upstream: Option<Arc<dyn Upstream>>,
    /// Counters and gauges.
    pub metrics: ServerMetrics,
    /// Gets one event per tunnel.
    pub access: Arc<AccessLog>,
    /// Relays tunnels between plaintext sockets and raw lanes; `None` without lanes.
    pub relay: Option<Arc<RawLaneRelay>>,
    /// Descriptors, shared by clients and all other uses.
    pub descriptors: Arc<Descriptors>,
    /// Kernel accounting.
    pub accounts: Accounts,
    /// Limits shared by all clients.
    pub limits: Arc<ClientLimits>,
    /// Users of proxy frontends in clear text; `None`: nobody is asked.
    pub users: Option<FrontendUsers>,
    /// Admits clients' connections and streams.
    pub tasks: Tasks,
    /// Cancelled when this process leaves.
    pub leaving: CancellationToken,
}

/// Opens tunnels through other servers.
pub trait Upstream: Send + Sync {
    /// Opens a tunnel to `target`, an authority; the servers that are asked are noted in `asked`. `alone`: the client's
    /// connection becomes this tunnel; else it carries requests, to [`Self::parent`] if there is one. A dropped call closes the
    /// connection that it uses.
    fn open<'a>(
        self: Arc<Self>,
        target: &'a str,
        alone: bool,
        asked: &'a AskedAgents,
    ) -> BoxFuture<'a, Result<OpenTunnel<Carrier>, DialFailure>>;

    /// The proxy to which HTTP requests for `target` go, if any.
    fn parent(&self, target: &str) -> Option<Parent>;
}

/// Whether the client of a new connection is served, and with which targets. A pointer, since each connection holds one.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ClientAccess(Option<Arc<Admitted>>);

/// What is special about the client of a connection.
#[derive(PartialEq, Eq, Debug)]
struct Admitted {
    restriction: Option<Restriction>,
    /// What its certificate names, for another server's logs.
    name: Option<Arc<str>>,
}

/// A restriction on the client of a connection.
#[derive(PartialEq, Eq, Debug)]
enum Restriction {
    /// No dials: descriptors are short.
    NoDescriptors,
    /// Dials to these targets only.
    Targets(Arc<ClientTargets>),
}

impl FrontendContext {
    /// Call it once per connection, so that a client is not refused halfway. `client`: its identity by certificate.
    #[must_use]
    pub fn admit(&self, client: Option<&Principal>) -> ClientAccess {
        let targets = self.limits.targets_of(client);
        self.access(targets, client.map(|client| client.holder().into()))
    }

    fn access(&self, targets: Option<Arc<ClientTargets>>, name: Option<Arc<str>>) -> ClientAccess {
        let restriction = if self.descriptors.has_room(Use::Tunnel) {
            targets.map(Restriction::Targets)
        } else {
            Some(Restriction::NoDescriptors)
        };
        let is_special = restriction.is_some() || name.is_some();
        ClientAccess(is_special.then(|| Arc::new(Admitted { restriction, name })))
    }

    /// As [`Self::admit`], for dials that another server with this certificate forwards.
    #[must_use]
    pub fn admit_peer(&self, peer: &Principal) -> ClientAccess {
        self.access(self.limits.targets_of_peer(peer), None)
    }

    /// Assigns the connection to an agent, and to the rule or identifier that matched its destination, if any.
    pub fn account<S: Connection>(
        &self,
        io: &S,
        agent: &str,
        class: impl FnOnce() -> Option<String>,
    ) {
        if !self.accounts.is_on() {
            return;
        }
        if let Some(tcp) = io.tcp() {
            let labels = Labels {
                role: AccountRole::Client,
                agent,
                destination_class: &class().unwrap_or_default(),
            };
            self.accounts.accepted(tcp, &labels);
        }
    }

    /// Opens a tunnel to `target`, an authority; see [`Upstream::open`] for `alone`. `raw_lane`: its client supports one.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn dial(
        &self,
        target: &str,
        alone: bool,
        raw_lane: bool,
        asked: &AskedAgents,
    ) -> Result<OpenTunnel<Carrier>, DialFailure> {
        match &self.upstream {
            Some(upstream) => Arc::clone(upstream).open(target, alone, asked).await,
            None => {
                let dial = DialId(rand::random::<i64>() & i64::MAX);
                let dialing = self.router.dial_for(dial, NETWORK, target, raw_lane, asked);
                dialing.await
            }
        }
    }

    /// Logs why a client's request is not served, unless many such lines were logged just now.
    pub(super) fn refused(&self, client: PeerAddr, dialect: ClientDialect, why: &dyn Display) {
        if self.limits.may_log_refusal() {
            tracing::warn!(%client, client_dialect = dialect.as_str(), cause = %why, "request refused");
        }
    }

    /// Whether a further tunnel may take a raw lane.
    pub(super) fn has_room_for_raw_lane(&self) -> bool {
        self.relay.as_ref().is_some_and(|relay| relay.has_room())
    }

    /// Accounts for a connection under no agent or class: its tunnels may use any.
    pub fn account_shared<S: Connection>(&self, io: &S) {
        if let Some(tcp) = io.tcp() {
            let labels = Labels {
                role: AccountRole::GrpcClient,
                agent: "",
                destination_class: "",
            };
            self.accounts.accepted(tcp, &labels);
        }
    }
}

/// Completes when this process leaves and clients have had time to send a request and be refused.
pub(super) async fn time_is_up(leaving: &CancellationToken) {
    leaving.cancelled().await;
    tokio::time::sleep(limits::REFUSAL_TIMEOUT).await;
}

impl ClientAccess {
    /// A refused client gets little time for any step.
    #[must_use]
    pub fn at_most(&self, time: Duration) -> Duration {
        if self.is_welcome() {
            time
        } else {
            time.min(limits::REFUSAL_TIMEOUT)
        }
    }

    /// Runs `work`, with a short timeout for a client that is refused: then it may yield `None`. `work` is pinned by the caller
    /// and the timeout boxed, or each tunnel would reserve space for both.
    pub async fn within<T>(&self, work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        if self.is_welcome() {
            return Some(work.await);
        }
        Box::pin(tokio::time::timeout(limits::REFUSAL_TIMEOUT, work))
            .await
            .ok()
    }

    /// Whether the client may dial `address` on `network`.
    ///
    /// # Errors
    /// The client's dials are all refused, or this one is.
    pub fn check(&self, network: &str, address: &str) -> Result<(), DialFailure> {
        match self.restriction() {
            None => Ok(()),
            Some(Restriction::Targets(targets)) => targets
                .check(network, address)
                .map_err(|denied| DialFailure::Denied(Box::new(denied))),
            Some(Restriction::NoDescriptors) => Err(DialFailure::NoDescriptors),
        }
    }

    fn is_welcome(&self) -> bool {
        !matches!(self.restriction(), Some(Restriction::NoDescriptors))
    }

    fn restriction(&self) -> Option<&Restriction> {
        self.0.as_ref()?.restriction.as_ref()
    }

    /// What the client's certificate names.
    fn name(&self) -> Option<Arc<str>> {
        self.0.as_ref()?.name.clone()
    }
}

/// One client's tunnel from dial to end. A dial or tunnel that is dropped counts as cut by the end of this process or by a
/// panic: nothing else drops the tasks that hold one.
pub struct ClientTunnel {
    context: Arc<FrontendContext>,
    dialect: ClientDialect,
    destination: String,
    agent: String,
    asked: AskedAgents,
    dial_started: Instant,
    pending: Option<GaugeGuard>,
    open: Option<OpenGuard>,
    entry: Option<TunnelEntry>,
    dial: Duration,
    path: Option<Path>,
    engine: Engine,
    driver: Driver,
    driver_reason: DriverReason,
    over: bool,
    /// Its client drops it, too, and not only the end of this process.
    dropped_by_client: bool,
}

impl ClientTunnel {
    /// A tunnel before its dial.
    #[must_use]
    pub fn new(context: &Arc<FrontendContext>, dialect: ClientDialect) -> Self {
        Self {
            context: Arc::clone(context),
            dialect,
            destination: String::new(),
            agent: String::new(),
            asked: AskedAgents::default(),
            dial_started: Instant::now(),
            pending: None,
            open: None,
            entry: None,
            dial: Duration::ZERO,
            path: None,
            engine: Engine::Copy,
            driver: Driver::Task,
            driver_reason: DriverReason::Framed,
            over: true,
            dropped_by_client: false,
        }
    }

    /// Dropping it means that its client has left, unless this process ends.
    pub(super) fn dropped_by_client(&mut self) {
        self.dropped_by_client = true;
    }

    /// A dial of this client starts. The dial records the agents it asks in the returned list.
    pub fn dialing(&mut self, address: &str, client: &ClientAccess) -> AskedAgents {
        if let Some(name) = client.name() {
            self.asked.set_client(name);
        }
        cut(address).clone_into(&mut self.destination);
        self.dial_started = Instant::now();
        self.pending = Some(self.context.metrics.pending_backend_dials.used().guard());
        self.over = false;
        self.asked.clone()
    }

    /// The dial became a tunnel on `path`.
    pub fn opened<C>(&mut self, tunnel: &OpenTunnel<C>, path: Path) {
        self.dial = self.dial_started.elapsed();
        self.context.metrics.dial_succeeded(self.dial);
        self.pending = None;
        self.open = Some(self.context.metrics.open_tunnel());
        self.context.metrics.adit().tunnels_opened.count(path);
        tunnel.agent.as_str().clone_into(&mut self.agent);
        self.path = Some(path);
        let table = self.context.metrics.adit().open_tunnels();
        self.entry = Some(table.enter(&TunnelFacts {
            side: TunnelSide::Client(self.dialect),
            peer: &self.agent,
            principal: tunnel.principal.as_ref(),
            link: tunnel.link.0,
            destination: &self.destination,
            path,
        }));
    }

    /// The address as the client wrote it, cut to what is shown.
    pub(super) fn destination(&self) -> &str {
        &self.destination
    }

    /// The relay of tunnels on raw lanes.
    pub(super) fn relay(&self) -> Option<Arc<RawLaneRelay>> {
        self.context.relay.clone()
    }

    /// The open tunnel's counters, for the task that moves its bytes.
    #[must_use]
    pub fn live(&self) -> Option<Arc<LiveTunnel>> {
        self.entry.as_ref().map(TunnelEntry::live)
    }

    /// Reports the endpoint's bytes and measures writes to the client.
    pub fn watch(&self, endpoint: &mut Endpoint) {
        if let Some(live) = self.live() {
            endpoint.report_to(live);
        }
        endpoint.watch(EndpointWatch::Client(self.context.metrics.clone()));
    }

    /// The dial succeeded, but the client could not be told.
    pub fn answer_lost(&self) {
        self.context
            .metrics
            .dial_failures
            .count(DialFailureReason::SendRsp);
    }

    /// The dial failed.
    pub fn failed(&mut self, failure: &DialFailure) {
        self.dial = self.dial_started.elapsed();
        self.pending = None;
        self.context.metrics.dial_failures.count(failure);
        let adit = self.context.metrics.adit();
        let (reason, stage) = DialReason::of_failure(failure);
        let outcome = AccessOutcome::Failed(reason, stage);
        let decisive = self.asked.decisive();
        self.path = decisive.as_ref().map(|decisive| decisive.path);
        adit.dial_failed(&FailedDial {
            destination: &self.destination,
            reason,
            stage,
            error: &failure.to_string(),
            agent: decisive.as_ref().map(|decisive| decisive.agent.as_str()),
            principal: decisive
                .as_ref()
                .and_then(|decisive| decisive.principal.as_deref()),
            path: self.path,
        });
        match failure {
            DialFailure::TooManyPending { per_agent: true } => {
                adit.dials_refused.count(DialCap::PerAgent)
            }
            DialFailure::TooManyPending { per_agent: false } => {
                adit.dials_refused.count(DialCap::Process)
            }
            DialFailure::ShuttingDown => adit.dials_refused.count(DialCap::Shutdown),
            DialFailure::NoMemory => adit.dials_refused.count(DialCap::Memory),
            DialFailure::NoDescriptors => adit.dials_refused.count(DialCap::Descriptors),
            _ => (),
        }
        self.write(
            outcome,
            EndClass::Other,
            DialFailureReason::from(failure).as_str(),
        );
    }

    /// The client left while its dial was pending.
    pub fn abandoned(&mut self) {
        let detail = DialFailureReason::FrontendClose.as_str();
        self.called_off(EndClass::ClientGone, detail);
    }

    /// The dial is cancelled. Upstream's metric has one reason for that.
    fn called_off(&mut self, end: EndClass, detail: &'static str) {
        self.dial = self.dial_started.elapsed();
        self.pending = None;
        self.context
            .metrics
            .dial_failures
            .count(DialFailureReason::FrontendClose);
        self.write(AccessOutcome::Cancelled, end, detail);
    }

    /// What moved the tunnel's bytes, and why.
    pub fn moved_by(&mut self, engine: Engine, driver: Driver, reason: DriverReason) {
        (self.engine, self.driver, self.driver_reason) = (engine, driver, reason);
    }

    /// Why the tunnel ended, on its path.
    pub(super) fn reason(&self, reason: EndReason) -> EndReason {
        match self.path {
            Some(Path::Peer) => reason.of_peer(),
            _ => reason,
        }
    }

    /// The tunnel is over.
    pub fn ended(&mut self, from_client: u64, to_client: u64, reason: EndReason) {
        let reason = self.reason(reason);
        let end = reason.end();
        self.context.metrics.adit().tunnels_closed.count(end);
        let life = self.open.take().map(|open| open.age()).unwrap_or_default();
        let flow = TunnelFlow {
            bytes_to_target: from_client,
            bytes_to_client: to_client,
            life,
            engine: self.engine,
            driver: self.driver,
            driver_reason: self.driver_reason,
        };
        self.write(AccessOutcome::Tunnel(flow), end, reason.as_str());
    }

    /// The tunnel is over, and only the table of open tunnels has its byte counts.
    pub fn cut(&mut self, reason: EndReason) {
        let moved = self.entry.as_ref().map(|entry| entry.live().bytes());
        let (from_client, to_client) = moved.unwrap_or_default();
        self.ended(from_client, to_client, reason);
    }

    fn write(&mut self, outcome: AccessOutcome, end: EndClass, detail: &'static str) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let live = self.entry.take().map(|entry| entry.live());
        let asked = match self.asked.len() {
            0 => None,
            1 if !self.agent.is_empty() => None,
            _ => Some(self.asked.names()),
        };
        self.context.access.record(&TunnelRecord {
            client_dialect: self.dialect,
            agent: &self.agent,
            agents_asked: asked.as_deref(),
            destination: &self.destination,
            dial: self.dial,
            outcome,
            end,
            detail: Some(detail),
            path: self.path,
            opened_by: OpenedBy::Client,
            principal: live.as_ref().and_then(|live| live.principal()),
            asked_by: None,
        });
    }
}

impl Drop for ClientTunnel {
    fn drop(&mut self) {
        let reason = match EndReason::of_drop() {
            EndReason::Shutdown
                if self.dropped_by_client && !self.context.leaving.is_cancelled() =>
            {
                EndReason::ClientGone
            }
            reason => reason,
        };
        if self.open.is_some() {
            self.cut(reason);
        } else if !self.over {
            self.called_off(reason.end(), reason.as_str());
        }
    }
}

/// Events of a gRPC client's stream: its tunnel, and its packets.
pub struct GrpcEvents {
    pub(super) tunnel: ClientTunnel,
    from_client: PacketCounter,
    to_client: PacketCounter,
    held_up: Option<GaugeGuard>,
}

impl GrpcEvents {
    /// Events of one `Proxy` stream.
    #[must_use]
    pub fn new(context: &Arc<FrontendContext>) -> Self {
        Self {
            tunnel: ClientTunnel::new(context, ClientDialect::Grpc),
            from_client: context.metrics.packets(Segment::FromClient),
            to_client: context.metrics.packets(Segment::ToClient),
            held_up: None,
        }
    }
}

impl GrpcEvents {
    /// A packet came from the client, in full.
    pub(super) fn packet_in(&mut self, kind: Result<PacketType, i32>) {
        match kind {
            Ok(kind) => self.from_client.count(kind),
            Err(number) => self.from_client.count(number),
        }
    }

    /// A packet was sent to the client.
    pub(super) fn packet_out(&mut self, kind: PacketType) {
        self.to_client.count(kind);
        if kind != PacketType::Data {
            // Buffered, so the write does not wait. The endpoint measures payload writes.
            self.metrics().frontend_write.observe(Duration::ZERO);
        }
    }

    /// The client's packets are not read, since the tunnel takes no more.
    pub(super) fn held_up(&mut self) {
        let metrics = &self.tunnel.context.metrics;
        self.held_up.get_or_insert_with(|| {
            metrics
                .full_receive_channels
                .of(ServiceMethod::Proxy)
                .guard()
        });
    }

    /// The client's packets are read again.
    pub(super) fn not_held_up(&mut self) {
        self.held_up = None;
    }

    /// Reading the stream failed.
    pub(super) fn read_failed(&self, code: tonic::Code) {
        self.metrics().stream_error(Segment::FromClient, code, None);
    }

    /// Writing the stream failed.
    pub(super) fn write_failed(&self, code: tonic::Code) {
        self.metrics().stream_error(Segment::ToClient, code, None);
    }

    /// The client broke the protocol.
    pub(super) fn offence(&self, violation: Violation) {
        self.metrics().adit().offences.count(violation);
    }

    /// The dial has an outcome; for a tunnel, the agent that carries it.
    pub(super) fn dialed(&mut self, outcome: Result<&OpenTunnel, &DialFailure>) {
        match outcome {
            Ok(open) => self.tunnel.opened(open, open.carrier.path()),
            Err(failure) => self.tunnel.failed(failure),
        }
    }

    fn metrics(&self) -> &ServerMetrics {
        &self.tunnel.context.metrics
    }
}
