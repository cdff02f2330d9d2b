//! Node proxy at the server: tunnels from nodes to the control plane, which agents open on their lanes. A list says which
//! destinations may be dialled; the log says which agent asked.

mod quota;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use adit_core::destination::{Denied, DestinationList, Why};
use adit_core::ids::AgentId;
use adit_core::lane::{OpenRequest, RefusalCode};
use adit_core::proxy_header::header_v2;
use adit_core::session::Promise;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use self::quota::{Quota, Quotas};
use adit_config::limits;
use adit_host::descriptors::{Descriptors, Use};
use adit_net::dial::{DialError, Dialer, Permit};
use adit_net::resolve::ResolveError;
use adit_net::self_listeners::OwnListeners;
use adit_net::source_quota::{Source, SourcePlaces};
use adit_net::tasks::Tasks;
use adit_telemetry::labels::{
    ClientDialect, DialReason, DialStage, Driver, DriverReason, EndClass, EndReason, Engine,
    Label as _, NodeRefusal, Offence, OpenedBy, Path,
};
use adit_telemetry::{
    AccessLog, AccessOutcome, AditMetrics, CountedTunnel, FailedDial, GaugeGuard, LiveTunnel,
    TunnelEntry, TunnelFacts, TunnelFlow, TunnelRecord, TunnelSide,
};
use adit_tls::agent_identity::AgentIdentity;
use adit_tunnel::{AgentOpen, AgentOpens, Endpoint, serve_target};

/// Time for a destination to accept, over all addresses, and to take the PROXY header.
pub const DESTINATION_DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// What a server needs to dial for agents.
pub struct NodeSettings {
    /// Dials allowed destinations only: see [`Destinations`]. Each agent has a copy with its id.
    pub dialer: Dialer,
    /// Whether connections begin with a PROXY header that names their agent.
    pub proxy_header: bool,
    /// Gets one event per tunnel.
    pub access: Arc<AccessLog>,
    /// Counters.
    pub metrics: AditMetrics,
    /// Runs the tunnels.
    pub tasks: Tasks,
    /// Descriptors, shared with clients.
    pub descriptors: Arc<Descriptors>,
    /// Limit on tunnels of all agents, shared by trust source.
    pub tunnels_max: usize,
    /// Once cancelled, no more tunnels are opened.
    pub leaving: CancellationToken,
}

/// The list of allowed destinations, and the server's own listeners, which are never allowed.
pub struct Destinations {
    /// The configured list.
    pub allowed: Arc<DestinationList>,
    /// The listeners of this process.
    pub own: Arc<OwnListeners>,
}

impl Permit for Destinations {
    fn check_lookup(&self, name: &str, port: u16) -> Result<(), Denied> {
        self.allowed.check_lookup(name, port)
    }

    fn check(&self, addr: SocketAddr, name: Option<&str>) -> Result<(), Denied> {
        self.allowed.check(addr, name)?;
        if self.own.has(addr) {
            return Err(Denied {
                flag: None,
                ip: Some(addr.ip()),
                port: addr.port(),
                name: name.map(str::to_owned),
                why: Why::OwnListener,
            });
        }
        Ok(())
    }
}

/// Opens tunnels for agents.
pub struct NodeProxy {
    settings: NodeSettings,
    agents: Quotas,
}

/// The node proxy for the agent of one link.
struct AgentDoor {
    proxy: Arc<NodeProxy>,
    dialer: Arc<Dialer>,
    agent: AgentId,
    principal: Arc<str>,
    source: Source,
    quota: Arc<Quota>,
}

impl NodeProxy {
    /// A proxy for all links of a server.
    #[must_use]
    pub fn new(settings: NodeSettings) -> Arc<Self> {
        Arc::new(Self {
            agents: Quotas::new(settings.tunnels_max),
            settings,
        })
    }
}

/// Decides on the tunnels that peers of a listener open: agents, or other servers.
pub trait AgentDoors: Send + Sync {
    /// The door for a link of this agent; `None` without a proven identity.
    fn of_agent(
        self: Arc<Self>,
        agent: &AgentId,
        identity: &AgentIdentity,
        source: &Source,
    ) -> Option<Arc<dyn AgentOpens>>;
}

impl AgentDoors for NodeProxy {
    fn of_agent(
        self: Arc<Self>,
        agent: &AgentId,
        identity: &AgentIdentity,
        source: &Source,
    ) -> Option<Arc<dyn AgentOpens>> {
        let principal = identity.owner()?;
        Some(Arc::new(AgentDoor {
            dialer: Arc::new(self.settings.dialer.of(agent.as_str())),
            agent: agent.clone(),
            principal: Arc::clone(principal),
            source: source.clone(),
            quota: self.agents.of(agent, principal),
            proxy: self,
        }))
    }
}

impl AgentOpens for AgentDoor {
    fn open(&self, open: AgentOpen) {
        let settings = &self.proxy.settings;
        if open.request().forward.is_some() {
            self.refused(NodeRefusal::Failed);
            self.proxy.settings.metrics.offences.count(Offence::Forward);
            return open.refuse(RefusalCode::Denied, "only servers forward dials");
        }
        if open.request().raw {
            self.refused(NodeRefusal::Failed);
            let text = "tunnels from node to control plane cannot use raw lanes";
            return open.refuse(RefusalCode::Denied, text);
        }
        let admitted = self.admit(open.request()).and_then(|place| {
            let promise = open.promise().ok_or(NodeRefusal::Memory)?;
            Ok((place, promise))
        });
        let (place, promise) = match admitted {
            Ok(admitted) => admitted,
            Err(refusal) => {
                self.refused(refusal);
                return open.refuse(code(refusal), text(refusal));
            }
        };
        let asked = NodeTunnel {
            proxy: Arc::clone(&self.proxy),
            dialer: Arc::clone(&self.dialer),
            agent: self.agent.clone(),
            principal: Arc::clone(&self.principal),
            source: self.source.clone(),
            quota: Arc::clone(&self.quota),
        };
        let serving = async move {
            asked.serve(open, promise).await;
            drop(place);
        };
        if settings.tasks.spawn("node-tunnel", serving).is_err() {
            // The dropped `open` has refused the tunnel.
            self.refused(NodeRefusal::Limit);
        }
    }
}

impl AgentDoor {
    fn refused(&self, why: NodeRefusal) {
        self.proxy.settings.metrics.node_refusals.count(why);
    }

    fn admit(&self, asked: &OpenRequest) -> Result<SourcePlaces, NodeRefusal> {
        let settings = &self.proxy.settings;
        if settings.leaving.is_cancelled() {
            return Err(NodeRefusal::Leaving);
        }
        if !self.quota.may_open(Instant::now()) {
            return Err(NodeRefusal::Limit);
        }
        if !settings.descriptors.has_room(Use::Tunnel) {
            return Err(NodeRefusal::Descriptors);
        }
        if asked.protocol.len() + asked.address.len() > limits::DIAL_BYTES_MAX {
            // Dial data waits beside its tunnel, and a port may have as many leading zeros as fit into a frame.
            return Err(NodeRefusal::NotAllowed);
        }
        self.quota.tunnel(&self.source).ok_or(NodeRefusal::Limit)
    }
}

/// One tunnel requested by an agent.
struct NodeTunnel {
    proxy: Arc<NodeProxy>,
    dialer: Arc<Dialer>,
    agent: AgentId,
    principal: Arc<str>,
    source: Source,
    quota: Arc<Quota>,
}

impl NodeTunnel {
    async fn serve(self, mut open: AgentOpen, promise: Promise) {
        let request = open.request().clone();
        let mut record = Record {
            asked: &self,
            destination: &request.address,
            started: Instant::now(),
            waiting: Some(self.proxy.settings.metrics.node_waiting.guard()),
            open: None,
        };
        let dialed = match self.quota.dial(&self.source) {
            None => Some(Err(NodeRefusal::Limit.into())),
            // Boxed: a dial's state is large, and the tunnel that follows may live for days.
            Some(_room) => open.until(Box::pin(self.dial_or_leave(&request))).await,
        };
        match dialed {
            None => record.refused(&NodeRefusal::GivenUp.into()),
            Some(Err(refused)) => {
                record.refused(&refused);
                open.refuse(code(refused.why), text(refused.why));
            }
            Some(Ok(socket)) => match open.accept() {
                None => record.refused(&NodeRefusal::GivenUp.into()),
                Some(mut endpoint) => {
                    endpoint.keep(promise);
                    endpoint.report_to(record.opened());
                    relay(socket, endpoint, &request.address, record).await;
                }
            },
        }
    }

    /// Gives up the dial when this server leaves, so that the agent has time to ask another server.
    async fn dial_or_leave(&self, request: &OpenRequest) -> Result<TcpStream, Refused> {
        let leaving = &self.proxy.settings.leaving;
        let dialed = leaving.run_until_cancelled(self.dial(request)).await;
        dialed.unwrap_or_else(|| Err(NodeRefusal::Leaving.into()))
    }

    async fn dial(&self, request: &OpenRequest) -> Result<TcpStream, Refused> {
        let settings = &self.proxy.settings;
        settings.descriptors.opened();
        let dialed = self.dialer.dial(&request.protocol, &request.address).await;
        let mut socket = dialed.map_err(|error| Refused {
            why: refusal(&error),
            // For the log only: the answer must not reveal this network to the agent.
            error: Some((error.reason(), error.to_string())),
        })?;
        if settings.proxy_header {
            let origin = request.origin.map(|o| (o.source, o.destination));
            let header = header_v2(origin, self.agent.as_str());
            let written =
                tokio::time::timeout(DESTINATION_DIAL_TIMEOUT, socket.write_all(&header)).await;
            written
                .map_err(|_elapsed| Refused::from(NodeRefusal::TimedOut))?
                .map_err(|_reset| Refused::from(NodeRefusal::Refused))?;
        }
        Ok(socket)
    }
}

/// Why a tunnel was refused.
struct Refused {
    why: NodeRefusal,
    /// How the dial failed.
    error: Option<((DialReason, DialStage), String)>,
}

impl From<NodeRefusal> for Refused {
    fn from(why: NodeRefusal) -> Self {
        Self { why, error: None }
    }
}

async fn relay(socket: TcpStream, endpoint: Endpoint, address: &str, mut record: Record<'_>) {
    let tunnel = serve_target(socket, endpoint, address, (), move |outcome| {
        let reason = outcome.reason_at_target();
        record.ended(Some((outcome.to_socket, outcome.from_socket)), reason);
    });
    tunnel.await;
}

/// Counts a tunnel and writes its access event, on every path.
struct Record<'a> {
    asked: &'a NodeTunnel,
    destination: &'a str,
    started: Instant,
    waiting: Option<GaugeGuard>,
    open: Option<OpenNode>,
}

/// An open tunnel.
struct OpenNode {
    entry: TunnelEntry,
    counted: CountedTunnel,
    dial: Duration,
    _gauge: GaugeGuard,
}

impl Record<'_> {
    /// The open tunnel's counters, for the task that moves its bytes.
    fn opened(&mut self) -> Arc<LiveTunnel> {
        self.waiting = None;
        let metrics = &self.asked.proxy.settings.metrics;
        let facts = TunnelFacts {
            side: TunnelSide::Target,
            peer: self.asked.agent.as_str(),
            principal: Some(&self.asked.principal),
            link: 0,
            destination: self.destination,
            path: Path::Lane,
        };
        let open = OpenNode {
            entry: metrics.open_tunnels().enter_node(&facts),
            counted: CountedTunnel::opened_by_agent(metrics),
            dial: self.started.elapsed(),
            _gauge: metrics.node_tunnel(),
        };
        let live = open.entry.live();
        self.open = Some(open);
        live
    }

    fn refused(&mut self, refused: &Refused) {
        self.waiting = None;
        let why = refused.why;
        let metrics = &self.asked.proxy.settings.metrics;
        metrics.node_refusals.count(why);
        let (known, error) = match &refused.error {
            Some((known, error)) => (Some(*known), &**error),
            None => (DialReason::of_refusal(why), why.words()),
        };
        if let Some((reason, stage)) = known {
            metrics.dial_failed(&FailedDial {
                destination: self.destination,
                reason,
                stage,
                error,
                agent: Some(self.asked.agent.as_str()),
                principal: Some(&self.asked.principal),
                path: Some(Path::Lane),
            });
        }
        let dial = self.started.elapsed();
        let outcome = known.map_or(AccessOutcome::Cancelled, |(reason, stage)| {
            AccessOutcome::Failed(reason, stage)
        });
        self.write(outcome, dial, EndClass::Other, why.as_str());
    }

    /// The tunnel ended. `moved`: payload bytes to the target and to the client; `None`: those in the table of open tunnels.
    fn ended(&mut self, moved: Option<(u64, u64)>, reason: EndReason) {
        let Some(open) = self.open.take() else {
            return;
        };
        let moved = moved.unwrap_or_else(|| open.entry.live().bytes());
        open.counted.ended(reason);
        let flow = TunnelFlow {
            bytes_to_target: moved.0,
            bytes_to_client: moved.1,
            life: self.started.elapsed().saturating_sub(open.dial),
            engine: Engine::Copy,
            driver: Driver::Task,
            driver_reason: DriverReason::Framed,
        };
        self.write(
            AccessOutcome::Tunnel(flow),
            open.dial,
            reason.end(),
            reason.as_str(),
        );
    }

    fn write(&self, outcome: AccessOutcome, dial: Duration, end: EndClass, detail: &'static str) {
        self.asked.proxy.settings.access.record(&TunnelRecord {
            client_dialect: ClientDialect::Node,
            agent: self.asked.agent.as_str(),
            agents_asked: None,
            destination: self.destination,
            dial,
            outcome,
            end,
            detail: Some(detail),
            path: Some(Path::Lane),
            opened_by: OpenedBy::Agent,
            principal: Some(&self.asked.principal),
            asked_by: None,
        });
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        self.ended(None, EndReason::of_drop());
    }
}

fn refusal(error: &DialError) -> NodeRefusal {
    match error {
        error if error.is_denied() => NodeRefusal::NotAllowed,
        error if error.is_timeout() => NodeRefusal::TimedOut,
        DialError::Lookup {
            cause: ResolveError::NotFound,
            ..
        }
        | DialError::NoSuitable { .. } => NodeRefusal::NotFound,
        DialError::Connect { cause, .. } => match cause.kind() {
            io::ErrorKind::ConnectionRefused => NodeRefusal::Refused,
            io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::AddrNotAvailable => NodeRefusal::Unreachable,
            _ => NodeRefusal::Failed,
        },
        _ => NodeRefusal::Failed,
    }
}

/// The code sent to the agent.
fn code(refusal: NodeRefusal) -> RefusalCode {
    match refusal {
        NodeRefusal::NotAllowed => RefusalCode::Denied,
        NodeRefusal::NotFound => RefusalCode::NotFound,
        NodeRefusal::Refused => RefusalCode::Refused,
        NodeRefusal::Unreachable => RefusalCode::Unreachable,
        NodeRefusal::TimedOut => RefusalCode::TimedOut,
        NodeRefusal::Limit | NodeRefusal::Descriptors | NodeRefusal::Memory => RefusalCode::Limit,
        NodeRefusal::Leaving => RefusalCode::Leaving,
        _ => RefusalCode::Failed,
    }
}

/// A text for packet captures; it contains no addresses.
fn text(refusal: NodeRefusal) -> &'static str {
    match refusal {
        NodeRefusal::NotAllowed => "not an allowed destination",
        other => other.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_name_no_address() {
        for refusal in NodeRefusal::ALL.iter().copied() {
            assert!(!text(refusal).contains(['.', ':', '/']), "{refusal}");
            let told = code(refusal);
            assert_ne!(told, RefusalCode::Busy, "that is the state machine's");
        }
    }
}
