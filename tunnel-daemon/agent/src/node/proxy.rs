//! From an accepted connection to a tunnel: which server and lane to use, for how long to try, and how to report a failure.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::{OpenRequest, Origin, RefusalCode};
use adit_core::session::TunnelKind;
use bytes::Bytes;
use rand::seq::SliceRandom as _;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{CONNECTIONS_MAX, Wanted};
use crate::lanes::{Borrowed, LaneKeeper, Opened};
use crate::servers::ServerLanes;
use adit_host::descriptors::{Descriptors, Use};
use adit_net::accounts::{Accounts, Labels};
use adit_telemetry::labels::{
    AccountRole, ClientDialect, DialReason, DialStage, Label as _, NodeRefusal, Path,
};
use adit_telemetry::{AditMetrics, CountedTunnel, FailedDial, TunnelFacts, TunnelSide};
use adit_tunnel::{Endpoint, LaneOwner as _, close_gracefully, copy_bidirectional, reset_on_close};

/// How long a connection waits for a lane, over all attempts.
const HELD_MAX: Duration = Duration::from_secs(5);
/// Time for one server to answer: 5 s for its own dial, and the round trip.
const ANSWERED_WITHIN: Duration = Duration::from_secs(8);
/// How long one server may have no lane to lend before another one is tried.
const LENT_WITHIN: Duration = Duration::from_secs(1);
/// Attempts for one connection: each before the last met a lane that was lost or used by the server, or a server that leaves.
const ATTEMPTS_MAX: u32 = 8;
/// Attempts that prefer servers of this agent's zone: servers of a zone that goes away lose several connections' lanes.
const NEAR_ATTEMPTS_MAX: u32 = 3;
/// Limit on connections of all listeners that have no tunnel yet.
const OPENING_MAX: usize = 1024;

/// Carries connections of this node to servers. One per agent.
pub struct NodeProxy {
    lanes: ServerLanes,
    metrics: AditMetrics,
    descriptors: Arc<Descriptors>,
    accounts: Accounts,
    /// The id of this agent, for the labels of accounting.
    agent: AgentId,
    opening: Semaphore,
    /// Slots for connections of all listeners.
    pub(super) connections: Semaphore,
    /// The absence of servers with lanes was logged.
    told: AtomicBool,
}

impl NodeProxy {
    /// A proxy over these servers' lanes.
    #[must_use]
    pub fn new(
        lanes: ServerLanes,
        metrics: AditMetrics,
        descriptors: Arc<Descriptors>,
        accounts: Accounts,
        agent: AgentId,
    ) -> Arc<Self> {
        Arc::new(Self {
            lanes,
            metrics,
            descriptors,
            accounts,
            agent,
            opening: Semaphore::new(OPENING_MAX),
            connections: Semaphore::new(CONNECTIONS_MAX),
            told: AtomicBool::new(false),
        })
    }

    /// A short status for probes, if connections can be served now.
    ///
    /// # Errors
    /// Why connections cannot be served.
    pub fn state(&self) -> Result<&'static str, &'static str> {
        let now = self.lanes.now();
        if now.links == 0 {
            Err("no server is connected")
        } else if now.keepers.is_empty() {
            Err("no connected server takes lanes: it is not Adit, or has --lanes-per-link=0")
        } else {
            Ok("a server takes lanes")
        }
    }

    /// Serves one connection. A cancelled call resets it: its client takes it for a connection to the destination from the
    /// start.
    pub(super) async fn serve(&self, mut socket: TcpStream, peer: SocketAddr, wanted: &Wanted) {
        reset_on_close(&socket);
        let waiting = self.metrics.node_waiting.guard();
        let opened = self.open(&socket, peer, wanted).await;
        let destination = &*wanted.destination;
        let (mut endpoint, server) = match opened {
            Ok(opened) => opened,
            Err(why) => return self.refuse(&socket, peer, destination, why),
        };
        let open = self.metrics.node_tunnel();
        let closed = CountedTunnel::opened_by_agent(&self.metrics);
        drop(waiting);
        let labels = Labels {
            role: AccountRole::Client,
            agent: self.agent.as_str(),
            destination_class: destination,
        };
        self.accounts.accepted(&socket, &labels);
        let entry = self.metrics.open_tunnels().enter_node(&TunnelFacts {
            side: TunnelSide::Client(ClientDialect::Node),
            peer: server.as_str(),
            principal: None,
            link: 0,
            destination,
            path: Path::Lane,
        });
        endpoint.report_to(entry.live());
        let outcome = copy_bidirectional(&mut socket, &mut endpoint, Bytes::new()).await;
        let reason = outcome.reason_at_client();
        // Bytes from the socket go to the destination.
        let (to_target, to_client) = (outcome.from_socket, outcome.to_socket);
        closed.ended(reason);
        let reason = reason.as_str();
        tracing::debug!(%peer, destination, to_target, to_client, reason, "node tunnel over");
        let closing = outcome.closing();
        drop((endpoint, entry, open));
        if let Some(closing) = closing {
            // A tunnel cut off by the destination must not look like an orderly close.
            close_gracefully(&mut socket, closing).await;
        }
    }

    /// Resets a connection.
    pub(super) fn refuse(
        &self,
        socket: &TcpStream,
        peer: SocketAddr,
        destination: &str,
        why: NodeRefusal,
    ) {
        reset_on_close(socket);
        self.metrics.node_refusals.count(why);
        if let Some((reason, stage)) = DialReason::of_refusal(why) {
            self.metrics.dial_failed(&FailedDial {
                destination,
                reason,
                stage,
                error: why.words(),
                agent: Some(self.agent.as_str()),
                principal: None,
                // Without a lane no server was asked.
                path: (stage != DialStage::Route && stage != DialStage::Send).then_some(Path::Lane),
            });
        }
        let reason = why.as_str();
        if why == NodeRefusal::NoLanes && !self.told.swap(true, Relaxed) {
            tracing::warn!(
                destination,
                "connections to the control plane are reset: no connected server takes lanes, because it is not Adit, \
                 has --lanes-per-link=0, or asks this agent for neither a certificate nor a token"
            );
        }
        tracing::debug!(%peer, destination, reason, "connection to the control plane reset");
    }

    async fn open(
        &self,
        socket: &TcpStream,
        peer: SocketAddr,
        wanted: &Wanted,
    ) -> Result<(Endpoint, ServerId), NodeRefusal> {
        let opening = self.opening.try_acquire();
        let _opening = opening.map_err(|_full| NodeRefusal::Limit)?;
        if !self.descriptors.has_room(Use::Tunnel) {
            return Err(NodeRefusal::Descriptors);
        }
        // The client of a captured connection does not know this socket's local address.
        let called = wanted.called.or_else(|| socket.local_addr().ok());
        let request = OpenRequest {
            protocol: "tcp".to_owned(),
            address: (*wanted.destination).to_owned(),
            raw: false,
            origin: called.map(|destination| Origin {
                source: peer,
                destination,
            }),
            forward: None,
        };
        tokio::select! {
            biased;
            // Boxed: the tunnel that follows may live for days.
            opened = Box::pin(self.open_somewhere(&request)) => opened,
            // Reacts to a reset, but not to a half-close, which is allowed at any time.
            _error = socket.ready(Interest::ERROR) => Err(NodeRefusal::GivenUp),
        }
    }

    async fn open_somewhere(
        &self,
        request: &OpenRequest,
    ) -> Result<(Endpoint, ServerId), NodeRefusal> {
        let mut left = HELD_MAX;
        let mut failure = NodeRefusal::LaneLost;
        for attempt in 0..ATTEMPTS_MAX {
            let since = Instant::now();
            let (keeper, borrowed) = self.borrow(left, attempt < NEAR_ATTEMPTS_MAX).await?;
            left = left.saturating_sub(since.elapsed());
            let promise = keeper.budget().promise(TunnelKind::Socket);
            let promise = promise.ok_or(NodeRefusal::Memory)?;
            let opening = tokio::time::timeout(ANSWERED_WITHIN, borrowed.open(request));
            match opening.await {
                Err(_elapsed) => return Err(NodeRefusal::TimedOut),
                Ok(Opened::Open(mut endpoint)) => {
                    endpoint.keep(promise);
                    return Ok((endpoint, keeper.server().clone()));
                }
                // A tunnel of the server was opened first and has the lane.
                Ok(Opened::Refused(RefusalCode::Busy, _) | Opened::NotSeen | Opened::Lost) => {
                    failure = NodeRefusal::LaneLost;
                }
                Ok(Opened::Refused(RefusalCode::Leaving, _)) => {
                    keeper.leaves();
                    failure = NodeRefusal::Leaving;
                }
                Ok(Opened::Refused(code, _)) => return Err(refusal(code)),
            }
        }
        Err(failure)
    }

    /// Borrows a lane of some server, within `left`; of one in this agent's zone if `near_first`.
    async fn borrow(
        &self,
        left: Duration,
        near_first: bool,
    ) -> Result<(LaneKeeper, Borrowed), NodeRefusal> {
        let mut why = NodeRefusal::NoServer;
        let lent = tokio::time::timeout(left, async {
            loop {
                let mut changed = self.lanes.changes();
                let now = self.lanes.now();
                let mut keepers = now.keepers;
                if now.links > 0 && keepers.is_empty() {
                    return Err(NodeRefusal::NoLanes);
                }
                self.told.store(false, Relaxed);
                keepers.retain(|keeper| !keeper.is_leaving());
                keepers.shuffle(&mut rand::rng());
                // A stable sort keeps the random order within the groups. The key is cached because `has_idle` changes.
                keepers.sort_by_cached_key(|keeper| {
                    (near_first && !keeper.is_near(), !keeper.has_idle())
                });
                let Some(keeper) = keepers.first() else {
                    why = if now.links > 0 {
                        NodeRefusal::Leaving
                    } else {
                        NodeRefusal::NoServer
                    };
                    changed.next().await;
                    continue;
                };
                why = NodeRefusal::NoLane;
                tokio::select! {
                    biased;
                    lent = keeper.borrow() => {
                        if let Some(borrowed) = lent {
                            return Ok((keeper.clone(), borrowed));
                        }
                        // The link has just ended; the change follows soon.
                        changed.next().await;
                    }
                    () = tokio::time::sleep(LENT_WITHIN), if keepers.len() > 1 => keeper.lacks(),
                    // Another server may have a lane now, or this server has gone.
                    _ = changed.next() => (),
                }
            }
        });
        lent.await.unwrap_or(Err(why))
    }
}

fn refusal(code: RefusalCode) -> NodeRefusal {
    match code {
        RefusalCode::Denied => NodeRefusal::NotAllowed,
        RefusalCode::Refused => NodeRefusal::Refused,
        RefusalCode::Unreachable => NodeRefusal::Unreachable,
        RefusalCode::TimedOut => NodeRefusal::TimedOut,
        RefusalCode::NotFound => NodeRefusal::NotFound,
        RefusalCode::Limit => NodeRefusal::Limit,
        RefusalCode::Leaving => NodeRefusal::Leaving,
        RefusalCode::Failed | RefusalCode::Busy | RefusalCode::NotHere => NodeRefusal::Failed,
    }
}
