//! From an accepted connection to a tunnel: which server, which lane, how long, and what is said when there is none.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use adit_core::ids::{AgentId, ServerId};
use adit_core::lane::{OpenRequest, Origin, RefusalCode};
use bytes::Bytes;
use rand::seq::SliceRandom as _;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{CONNECTIONS_MAX, Wanted};
use crate::lanes::{Borrowed, LaneKeeper, Opened};
use crate::servers::ServerLanes;
use adit_net::accounts::{Accounts, Labels};
use adit_net::descriptors::{Descriptors, Use};
use adit_telemetry::labels::{
    AccountRole, ClientDialect, DialReason, DialStage, Label as _, NodeRefusal, Path,
};
use adit_telemetry::{AditMetrics, CountedTunnel, FailedDial, TunnelFacts, TunnelSide};
use adit_tunnel::{Endpoint, close_gracefully, copy_bidirectional, reset_on_close};

/// How long a connection is held for want of a lane, over all attempts.
const HELD_MAX: Duration = Duration::from_secs(5);
/// How long one server may take to answer: its own dial of 5 s, and the way.
const ANSWERED_WITHIN: Duration = Duration::from_secs(8);
/// A server that has no lane to lend for so long gives way to another, if there is one.
const LENT_WITHIN: Duration = Duration::from_secs(1);
/// Attempts for one connection: each but the last found a lane that was lost, taken by the server, or of one that leaves.
const ATTEMPTS_MAX: u32 = 8;
/// Connections without a tunnel yet, of all listeners.
const OPENING_MAX: usize = 1024;

/// Takes connections to servers. One per agent.
pub struct NodeProxy {
    lanes: ServerLanes,
    metrics: AditMetrics,
    descriptors: Arc<Descriptors>,
    accounts: Accounts,
    /// Our own, for the labels of accounting.
    agent: AgentId,
    opening: Semaphore,
    /// Connections of all listeners.
    pub(super) connections: Semaphore,
    /// It was said that no server takes lanes.
    told: AtomicBool,
}

impl NodeProxy {
    /// Over the lanes of these servers.
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

    /// A word on whether connections can be served now, for probes.
    ///
    /// # Errors
    /// Why they cannot.
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

    /// A cancelled call resets the connection, which its client takes for one to its destination from the first moment.
    pub(super) async fn serve(&self, mut socket: TcpStream, peer: SocketAddr, wanted: &Wanted) {
        reset_on_close(&socket);
        let waiting = self.metrics.node_waiting();
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
            link: 0,
            destination,
            path: Path::Lane,
        });
        endpoint.tell(entry.live());
        let outcome = copy_bidirectional(&mut socket, &mut endpoint, Bytes::new()).await;
        let reason = outcome.reason_at_client();
        // To the destination is from the socket here.
        let (to_target, to_client) = (outcome.from_socket, outcome.to_socket);
        closed.ended(reason);
        let reason = reason.as_str();
        tracing::debug!(%peer, destination, to_target, to_client, reason, "node tunnel over");
        let closing = outcome.closing();
        drop((endpoint, entry, open));
        if let Some(closing) = closing {
            // A destination that broke off must not look like one that closed.
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
        self.metrics.node_refused(why);
        if let Some((reason, stage)) = DialReason::of_refusal(why) {
            self.metrics.dial_failed(&FailedDial {
                destination,
                reason,
                stage,
                error: why.words(),
                agent: Some(self.agent.as_str()),
                // Without a lane the request was sent to no server.
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
        // Of a captured connection our own address is none that its client knows.
        let called = wanted.called.or_else(|| socket.local_addr().ok());
        let request = OpenRequest {
            protocol: "tcp".to_owned(),
            address: (*wanted.destination).to_owned(),
            raw: false,
            origin: called.map(|destination| Origin {
                source: peer,
                destination,
            }),
        };
        tokio::select! {
            biased;
            // Boxed: the tunnel that follows may live for days.
            opened = Box::pin(self.open_somewhere(&request)) => opened,
            // A reset, but no half-close: that may come as early as it likes.
            _error = socket.ready(Interest::ERROR) => Err(NodeRefusal::GivenUp),
        }
    }

    async fn open_somewhere(
        &self,
        request: &OpenRequest,
    ) -> Result<(Endpoint, ServerId), NodeRefusal> {
        let mut left = HELD_MAX;
        let mut failure = NodeRefusal::LaneLost;
        for _attempt in 0..ATTEMPTS_MAX {
            let since = Instant::now();
            let (keeper, borrowed) = self.borrow(left).await?;
            left = left.saturating_sub(since.elapsed());
            let opening = tokio::time::timeout(ANSWERED_WITHIN, borrowed.open(request));
            match opening.await {
                Err(_elapsed) => return Err(NodeRefusal::TimedOut),
                Ok(Opened::Open(endpoint)) => return Ok((endpoint, keeper.server().clone())),
                // Crossed by a tunnel of the server's, which has the lane now.
                Ok(Opened::Refused(RefusalCode::Busy)) | Ok(Opened::Lost) => {
                    failure = NodeRefusal::LaneLost;
                }
                Ok(Opened::Refused(RefusalCode::Leaving)) => {
                    keeper.leaves();
                    failure = NodeRefusal::Leaving;
                }
                Ok(Opened::Refused(code)) => return Err(refusal(code)),
            }
        }
        Err(failure)
    }

    /// A lane of some server, within `left`.
    async fn borrow(&self, left: Duration) -> Result<(LaneKeeper, Borrowed), NodeRefusal> {
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
                // Stable: among those that have a lane, or have none, the draw stands. Asked once each, since that changes.
                keepers.sort_by_cached_key(|keeper| !keeper.has_idle());
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
                        // Its link has just gone, which is soon known.
                        changed.next().await;
                    }
                    () = tokio::time::sleep(LENT_WITHIN), if keepers.len() > 1 => (),
                    // Another server may have a lane, or this one may go away.
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
        RefusalCode::Failed | RefusalCode::Busy => NodeRefusal::Failed,
    }
}
