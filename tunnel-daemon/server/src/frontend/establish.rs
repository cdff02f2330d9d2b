//! From a client's request to its tunnel and the tunnel's end: shared by the frontends in which a connection is one tunnel.

use std::pin::Pin;
use std::sync::Arc;

use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use bytes::BytesMut;

use crate::frontend::client_limits::Unanswered;
use crate::frontend::events::{ClientAccess, ClientTunnel, FrontendContext};
use crate::frontend::pending_dial;
use crate::router::Router;
use adit_telemetry::GaugeGuard;
use adit_telemetry::labels::{ClientDialect, EndReason};
use adit_tls::stream::{Connection, PeerAddr};
use adit_tunnel::lane::RawLane;
use adit_tunnel::{
    Carrier, Closing, Endpoint, RawLaneRelay, close_gracefully, copy_bidirectional, reset_on_close,
};

/// The target network of these dialects.
const NETWORK: &str = "tcp";

/// A dialect in which a connection is one tunnel. [`serve`] is common to all of them, from admission to the close.
pub(super) trait Frontend: Send + 'static {
    /// The dialect's label in metrics and access events.
    const DIALECT: ClientDialect;

    /// Counts the connection until it is closed.
    fn count(&self, _context: &FrontendContext) -> Option<GaugeGuard> {
        None
    }

    /// Host and port of the requested target, read from the client or from another source. `None`: the client was refused and
    /// answered, or has left.
    fn request<S: Connection + Send>(
        &mut self,
        io: &mut S,
        early: &mut Early,
        admission: &ClientAccess,
    ) -> impl Future<Output = Option<String>> + Send;

    /// The rule that matches this target, for accounting; without one, the agent's identifier is used.
    fn rule(&self) -> Option<String> {
        None
    }

    /// Answers a failed dial, and closes the connection.
    fn refuse<S: Connection + Send>(
        io: &mut S,
        failure: &DialFailure,
    ) -> impl Future<Output = ()> + Send;

    /// Tells the client that its tunnel is open. `target_speaks` completes when the target has sent bytes.
    ///
    /// # Errors
    /// The client has left.
    fn answer<S: Connection + Send>(
        io: &mut S,
        early: &mut BytesMut,
        target_speaks: impl Future<Output = ()> + Send,
    ) -> impl Future<Output = Result<(), Gone>> + Send;
}

/// What a client has sent before its tunnel is open.
pub(super) struct Early {
    /// The bytes.
    pub(super) bytes: BytesMut,
    /// Bounds these bytes, together with those of all other clients.
    pub(super) unanswered: Unanswered,
}

/// When a client left whose dial had succeeded.
pub(super) enum Gone {
    /// Before the answer could be sent.
    BeforeAnswer,
    /// After the answer, without sending a byte.
    BehindAnswer,
}

impl Gone {
    fn tell(self, tunnel: &mut ClientTunnel) {
        if matches!(self, Self::BeforeAnswer) {
            tunnel.answer_lost();
        }
        tunnel.cut(EndReason::ClientGone);
    }
}

/// Serves one connection to its end. `client` is its address for logs.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub(super) fn serve<F, S>(
    frontend: F,
    io: S,
    router: Arc<Router>,
    context: FrontendContext,
    client: PeerAddr,
) -> impl Future<Output = ()> + Send + use<F, S>
where
    F: Frontend,
    S: Connection + Send + 'static,
{
    // Boxed and separate: opening a tunnel needs more memory than the tunnel, which may live for days in the same task.
    let opening = Box::pin(async move {
        let opened = establish(frontend, io, &router, &context, client).await;
        opened.map(|(client, carrier)| tunnel::<F, S>(client, carrier))
    });
    async move {
        if let Some(tunnel) = opening.await {
            tunnel.await;
        }
    }
}

/// From the connection to the open tunnel. `None`: the client was refused, or has left.
async fn establish<F: Frontend, S: Connection + Send>(
    mut frontend: F,
    mut io: S,
    router: &Arc<Router>,
    context: &FrontendContext,
    client: PeerAddr,
) -> Option<(Client<S>, Carrier)> {
    let admission = context.admit(io.principal());
    let open = frontend.count(context);
    let mut early = Early {
        bytes: BytesMut::new(),
        unanswered: Unanswered::new(&context.limits),
    };
    let destination = frontend.request(&mut io, &mut early, &admission).await?;
    let mut tunnel = ClientTunnel::new(context, F::DIALECT);
    let asked = tunnel.dialing(&destination);
    let relays = context.relay.as_ref();
    let raw_lane = io.is_plain() && relays.is_some_and(|relay| relay.has_room());
    let dialed = match admission.check(NETWORK, &destination) {
        Ok(()) => {
            let dial = DialId(rand::random::<i64>() & i64::MAX);
            // Boxed: a dial's state is larger than a tunnel's, which may live for days in the same task.
            let dialing = Box::pin(router.dial_for(dial, NETWORK, &destination, raw_lane, &asked));
            let Early { bytes, unanswered } = &mut early;
            pending_dial::outcome(dialing, &mut io, bytes, unanswered).await
        }
        Err(failure) => Some(Err(failure)),
    };
    match dialed {
        None => {
            tunnel.abandoned();
            None
        }
        Some(Err(failure)) => {
            tunnel.failed(&failure);
            F::refuse(&mut io, &failure).await;
            None
        }
        Some(Ok(opened)) => {
            tunnel.opened(&opened, opened.carrier.path());
            context.account(&io, opened.agent.as_str(), || {
                frontend
                    .rule()
                    .or_else(|| router.class_of(&destination, opened.link))
            });
            tracing::debug!(%client, target_address = destination, agent = %opened.agent, "tunnel open");
            let client = Client {
                io,
                early: early.bytes,
                tunnel,
                relay: context.relay.clone(),
                open,
            };
            Some((client, opened.carrier))
        }
    }
}

fn tunnel<F: Frontend, S: Connection + Send + 'static>(
    client: Client<S>,
    carrier: Carrier,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    // From here on only an orderly end undoes this. A tunnel cut off earlier, also by the end of this process, must not look
    // like a target that sent nothing.
    if let Some(socket) = client.io.tcp() {
        reset_on_close(socket);
    }
    match carrier {
        Carrier::Endpoint(endpoint) => Box::pin(serve_tunnel::<F, S>(client, endpoint)),
        Carrier::RawLane(raw_lane) => Box::pin(splice::<F, S>(client, raw_lane)),
    }
}

/// From the answer to the end, in this task. Not an `async` function: its future would hold the arguments twice.
pub(super) fn serve_tunnel<F: Frontend, S: Connection + Send>(
    mut client: Client<S>,
    endpoint: Endpoint,
) -> impl Future<Output = ()> + use<F, S> {
    let mut endpoint = Some(endpoint);
    async move {
        // Borrowed in this order, so that cancelling drops them in this order.
        let (endpoint, client) = (&mut endpoint, &mut client);
        if !Box::pin(answered::<F, S>(client, endpoint)).await {
            return;
        }
        if let Some(closing) = client.copy_bidirectional(endpoint).await {
            client.close(closing).await;
        }
    }
}

/// Tells the client that its tunnel is open; false if it has left. Boxed by the caller, to free its state before the first
/// byte.
async fn answered<F: Frontend, S: Connection + Send>(
    client: &mut Client<S>,
    endpoint: &mut Option<Endpoint>,
) -> bool {
    let Client {
        io, early, tunnel, ..
    } = client;
    let Some(endpoint) = endpoint else {
        return false;
    };
    tunnel.watch(endpoint);
    match F::answer(io, early, endpoint.readable()).await {
        Ok(()) => true,
        Err(gone) => {
            gone.tell(tunnel);
            false
        }
    }
}

/// From the answer to the end, on relay threads. A cancelled call resets both sockets.
async fn splice<F: Frontend, S: Connection + Send>(mut client: Client<S>, raw_lane: RawLane) {
    let target_speaks = async {
        if raw_lane.received.is_empty() {
            // The relay meets a failure again.
            let _ready = raw_lane.socket.readable().await;
        }
    };
    let relay = client.relay.clone();
    let stopped = async {
        match &relay {
            Some(relay) => relay.stopped().await,
            None => std::future::pending().await,
        }
    };
    let Client {
        io, early, tunnel, ..
    } = &mut client;
    // Every early return drops the raw lane, which resets it.
    let answered = tokio::select! {
        biased;
        () = stopped => return tunnel.cut(EndReason::Shutdown),
        answered = F::answer(io, early, target_speaks) => answered,
    };
    if let Err(gone) = answered {
        return gone.tell(tunnel);
    }
    client.splice(raw_lane).await;
}

/// A client whose dial has succeeded. Moved as a whole: a part borrowed by an earlier future would take its space twice.
pub(super) struct Client<S> {
    pub(super) io: S,
    /// What the client sent before the tunnel was open.
    pub(super) early: BytesMut,
    pub(super) tunnel: ClientTunnel,
    /// For a tunnel on a raw lane.
    pub(super) relay: Option<Arc<RawLaneRelay>>,
    /// Gauge of open connections.
    pub(super) open: Option<GaugeGuard>,
}

impl<S: Connection> Client<S> {
    /// Moves bytes until the tunnel or the client has ended, and reports the end. Returns how to close the connection, or
    /// `None` if it has failed. Takes `endpoint`, whose memory is counted until it is dropped. A cancelled call leaves both to
    /// their `Drop`, which resets the tunnel.
    pub(super) async fn copy_bidirectional(
        &mut self,
        endpoint: &mut Option<Endpoint>,
    ) -> Option<Closing> {
        let Self {
            io, early, tunnel, ..
        } = self;
        let outcome = copy_bidirectional(io, endpoint.as_mut()?, early.split().freeze()).await;
        let reason = outcome.reason_at_client();
        tunnel.ended(outcome.from_socket, outcome.to_socket, reason);
        *endpoint = None;
        outcome.closing()
    }

    /// Closes the connection up to dropping it. A tunnel cut off by the target must never look like an orderly close.
    pub(super) async fn close(&mut self, closing: Closing) {
        close_gracefully(&mut self.io, closing).await;
    }

    /// Hands both sockets to relay threads until the tunnel's end. A cancelled call resets them.
    pub(super) async fn splice(self, raw_lane: RawLane) {
        let Self {
            io,
            early,
            mut tunnel,
            relay,
            open: _open,
        } = self;
        // Without a relay no raw lane is requested; one that is dropped resets.
        let (Some(relay), Some(socket), Some(live)) = (relay, io.into_descriptor(), tunnel.live())
        else {
            return tunnel.cut(EndReason::RelayFailed);
        };
        let outcome = relay.run(socket, early.freeze(), raw_lane, &live).await;
        tracing::debug!(end = %outcome.end, "tunnel on a raw lane ended");
        tunnel.moved_by(outcome.engine, outcome.driver, outcome.driver_reason);
        let (from_client, to_client) = (outcome.from_socket, outcome.to_socket);
        tunnel.ended(from_client, to_client, outcome.end.reason());
    }
}
