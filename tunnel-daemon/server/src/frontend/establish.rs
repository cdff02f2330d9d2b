//! A client whose connection is one tunnel: its dial, its answer, its bytes and its end. The dialect's frontend reads the
//! request.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use bytes::BytesMut;
use futures_util::FutureExt as _;
use tokio::io::AsyncWriteExt as _;

use crate::frontend::client_limits::Unanswered;
use crate::frontend::events::{ClientAccess, ClientTunnel, FrontendContext, NETWORK};
use crate::frontend::pending_dial;
use crate::router::OpenTunnel;
use adit_telemetry::GaugeGuard;
use adit_telemetry::labels::{ClientDialect, EndReason};
use adit_tls::blocks;
use adit_tls::stream::{Connection, PeerAddr};
use adit_tunnel::lane::RawLane;
use adit_tunnel::{
    Carrier, Endpoint, RawLaneRelay, close_gracefully, copy_bidirectional, reset_on_close,
};

/// Delay for a target that speaks first, so that its bytes do not share a read with the answer.
const ANSWER_ALONE: Duration = Duration::from_millis(25);

/// An open tunnel, from its answer to its end.
pub(super) type Copying = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection up to its open tunnel; `None`: it has none.
pub(super) type Establishing = Pin<Box<dyn Future<Output = Option<Copying>> + Send>>;

/// Runs one connection. `opening` is freed before the tunnel runs: it needs more memory than the tunnel, which may live for
/// days in the same task.
pub(super) async fn run(opening: Establishing) {
    if let Some(copying) = opening.await {
        copying.await;
    }
}

/// A client without a tunnel yet.
pub(super) struct NewClient<S> {
    pub(super) io: S,
    /// What the client has sent, without its request.
    pub(super) early: BytesMut,
    /// Bounds these bytes, together with those of all other clients.
    pub(super) unanswered: Unanswered,
    pub(super) admission: ClientAccess,
    context: Arc<FrontendContext>,
    dialect: ClientDialect,
    /// For logs.
    peer: PeerAddr,
}

impl<S: Connection + Send + 'static> NewClient<S> {
    pub(super) fn new(
        io: S,
        peer: PeerAddr,
        context: Arc<FrontendContext>,
        dialect: ClientDialect,
    ) -> Self {
        Self {
            admission: context.admit(io.principal()),
            io,
            early: BytesMut::new(),
            unanswered: Unanswered::new(&context.limits),
            context,
            dialect,
            peer,
        }
    }

    /// Logs why the client's request is not served, unless many such lines were logged just now.
    pub(super) fn refused(&self, why: &dyn std::fmt::Display) {
        self.context.refused(self.peer, self.dialect, why);
    }

    /// Dials `destination`, and buffers the client's bytes meanwhile. `rule`: the rule that matches the destination, for
    /// accounting; without one, the agent's identifier is used. `None`: the client has left.
    ///
    /// A cancelled call cancels the dial.
    pub(super) async fn dial(
        &mut self,
        destination: &str,
        rule: impl FnOnce() -> Option<String>,
    ) -> Option<Result<(ClientTunnel, Carrier), DialFailure>> {
        let context = &self.context;
        let mut tunnel = ClientTunnel::new(context, self.dialect);
        let asked = tunnel.dialing(destination, &self.admission);
        let raw_lane = self.io.is_plain() && context.has_room_for_raw_lane();
        let router = &context.router;
        let dialed = match self.admission.check(NETWORK, destination) {
            Ok(()) => {
                let dialing = context.dial(destination, true, raw_lane, &asked);
                let (early, unanswered) = (&mut self.early, &mut self.unanswered);
                pending_dial::outcome(Box::pin(dialing), &mut self.io, early, unanswered).await
            }
            Err(failure) => Some(Err(failure)),
        };
        let Some(dialed) = dialed else {
            tunnel.abandoned();
            return None;
        };
        let opened = match report(&mut tunnel, dialed) {
            Ok(opened) => opened,
            Err(failure) => return Some(Err(failure)),
        };
        context.account(&self.io, opened.agent.as_str(), || {
            rule().or_else(|| router.class_of(destination, opened.link))
        });
        tracing::debug!(client = %self.peer, target_address = destination, agent = %opened.agent, "tunnel open");
        Some(Ok((tunnel, opened.carrier)))
    }

    /// The client of a tunnel that [`Self::dial`] has opened. `None` as for [`OpenClient::new`].
    pub(super) fn open(self, (tunnel, carrier): (ClientTunnel, Carrier)) -> Option<OpenClient<S>> {
        OpenClient::new(self.io, self.early, tunnel, carrier)
    }
}

/// Reports the outcome of a dial.
pub(super) fn report(
    tunnel: &mut ClientTunnel,
    dialed: Result<OpenTunnel<Carrier>, DialFailure>,
) -> Result<OpenTunnel<Carrier>, DialFailure> {
    match &dialed {
        Ok(opened) => tunnel.opened(opened, opened.carrier.path()),
        Err(failure) => tunnel.failed(failure),
    }
    dialed
}

/// A client and its open tunnel, which is dropped before the client. Moved as a whole: a part borrowed by an earlier future
/// would take its space twice.
pub(super) struct OpenClient<S> {
    pub(super) carrier: Carrier,
    pub(super) client: Client<S>,
}

/// A client whose dial has succeeded.
pub(super) struct Client<S> {
    pub(super) io: S,
    /// What the client sent before the tunnel was open.
    pub(super) early: BytesMut,
    pub(super) tunnel: ClientTunnel,
    /// Gauge of open connections.
    pub(super) counted: Option<GaugeGuard>,
}

impl<S: Connection + Send + 'static> OpenClient<S> {
    /// `early`: what the client has sent already. `None`: the relay ends its tunnels, so this one on a raw lane is cut.
    pub(super) fn new(
        io: S,
        early: BytesMut,
        mut tunnel: ClientTunnel,
        mut carrier: Carrier,
    ) -> Option<Self> {
        // From here on only an orderly end undoes this. A tunnel cut off earlier, also by the end of this process, must not
        // look like a target that sent nothing.
        if let Some(socket) = io.tcp() {
            reset_on_close(socket);
        }
        match &mut carrier {
            Carrier::Endpoint(endpoint) => tunnel.watch(endpoint),
            Carrier::RawLane(_) => {
                if let Some(relay) = tunnel.relay()
                    && relay.stopped().now_or_never().is_some()
                {
                    tunnel.cut(EndReason::Shutdown);
                    return None;
                }
            }
        }
        let client = Client {
            io,
            early,
            tunnel,
            counted: None,
        };
        Some(Self { carrier, client })
    }

    /// Answers, and copies bytes until the tunnel or the client has ended. In a box of its own: neither end may send for long,
    /// and what came before needs more memory.
    pub(super) fn answer_and_copy(self, answer: &'static [u8]) -> Copying {
        Box::pin(run(Box::pin(self.answering(answer))))
    }

    /// Writes `answer` in full and alone: clients refuse tunnel bytes that arrive together with it, so bytes of a target that
    /// speaks first are delayed a little.
    #[expect(
        clippy::manual_async_fn,
        reason = "the future of an async function keeps its arguments twice"
    )]
    pub(super) fn answering(
        mut self,
        answer: &'static [u8],
    ) -> impl Future<Output = Option<Copying>> + Send + use<S> {
        async move {
            self.client.answer(answer).await?;
            let Self { carrier, client } = &mut self;
            client.answer_alone(carrier).await?;
            Some(self.copy())
        }
    }

    /// Copies bytes until the tunnel or the client has ended, and reports the end.
    pub(super) fn copy(self) -> Copying {
        let Self { carrier, client } = self;
        match carrier {
            Carrier::Endpoint(endpoint) => Box::pin(client.copy_bidirectional(endpoint)),
            Carrier::RawLane(raw_lane) => client.splice(raw_lane),
        }
    }
}

impl<S: Connection + Send + 'static> Client<S> {
    /// `None`: the client has left.
    pub(super) async fn answer(&mut self, answer: &[u8]) -> Option<()> {
        let answered = async {
            self.io.write_all(answer).await?;
            self.io.flush().await
        };
        if answered.await.is_err() {
            self.tunnel.answer_lost();
            self.tunnel.cut(EndReason::ClientGone);
            return None;
        }
        Some(())
    }

    /// Waits until the client has read the answer, or the target speaks, whose bytes then come a little later. `None`: the client
    /// has left, or this process ends.
    async fn answer_alone(&mut self, carrier: &mut Carrier) -> Option<()> {
        let Self {
            io, early, tunnel, ..
        } = self;
        if !early.is_empty() {
            return Some(());
        }
        let end = tokio::select! {
            biased;
            // The client sends, so it has read the answer. The copy meets an EOF again. It would take a reset for EOF, since the
            // kernel reports a reset once.
            read = blocks::append(io, early) => read.err().map(|_reset| EndReason::ClientGone),
            speaks = target_speaks(carrier, tunnel.relay()) => {
                if speaks {
                    tokio::time::sleep(ANSWER_ALONE).await;
                }
                (!speaks).then_some(EndReason::Shutdown)
            }
        };
        if let Some(end) = end {
            tunnel.cut(end);
            return None;
        }
        Some(())
    }

    /// Copies in this task. A cancelled call leaves `endpoint` and the client to their `Drop`, which resets the tunnel. Not an
    /// `async` function: its future would hold the arguments twice.
    pub(super) fn copy_bidirectional(
        self,
        endpoint: Endpoint,
    ) -> impl Future<Output = ()> + Send + use<S> {
        let (mut endpoint, mut client) = (Some(endpoint), self);
        async move {
            // Borrowed in this order, so that cancelling drops them in this order.
            let (open, client) = (&mut endpoint, &mut client);
            let Some(endpoint) = open else { return };
            let early = client.early.split().freeze();
            let outcome = copy_bidirectional(&mut client.io, endpoint, early).await;
            let reason = outcome.reason_at_client();
            let (from_client, to_client) = (outcome.from_socket, outcome.to_socket);
            client.tunnel.ended(from_client, to_client, reason);
            // Its memory is counted until here.
            *open = None;
            if let Some(closing) = outcome.closing() {
                // A tunnel cut off by the target must never look like an orderly close.
                close_gracefully(&mut client.io, closing).await;
            }
        }
    }

    /// Copies on relay threads. Dropping the future resets both sockets.
    fn splice(self, raw_lane: RawLane) -> Copying {
        let Self {
            io,
            early,
            mut tunnel,
            counted,
        } = self;
        // Without a relay no raw lane is requested; one that is dropped resets.
        let (Some(relay), Some(socket), Some(live)) =
            (tunnel.relay(), io.into_descriptor(), tunnel.live())
        else {
            tunnel.cut(EndReason::RelayFailed);
            return Box::pin(std::future::ready(()));
        };
        let running = relay.run(socket, early.freeze(), raw_lane, &live);
        Box::pin(running.map(move |outcome| {
            tracing::debug!(end = %outcome.end, "tunnel on a raw lane ended");
            tunnel.moved_by(outcome.engine, outcome.driver, outcome.driver_reason);
            let (from_client, to_client) = (outcome.from_socket, outcome.to_socket);
            tunnel.ended(from_client, to_client, outcome.end.reason);
            drop(counted);
        }))
    }
}

/// Waits until the target has sent bytes. False: the relay ends its tunnels, and this one on a raw lane has no other end yet.
async fn target_speaks(carrier: &mut Carrier, relay: Option<Arc<RawLaneRelay>>) -> bool {
    match (carrier, relay) {
        (Carrier::Endpoint(endpoint), _) => endpoint.readable().await,
        (Carrier::RawLane(raw_lane), Some(relay)) if raw_lane.received.is_empty() => {
            tokio::select! {
                biased;
                () = relay.stopped() => return false,
                // The relay meets a failure again.
                _ready = poll_fn(|cx| raw_lane.socket.poll_read_ready(cx)) => (),
            }
        }
        (Carrier::RawLane(_), _) => (),
    }
    true
}
