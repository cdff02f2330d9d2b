//! The HTTP-CONNECT dialect: one request, one tunnel, then bytes.
//!
//! The request head parser and every response text are the core's. This module owns the order: the client
//! is watched while the dial runs, the 200 is written whole before any tunnel byte, and bytes the client had
//! sent behind its request go first.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use adit_core::connect::{self, Connect, Progress, Rejection, RequestHead};
use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use bytes::{Buf as _, BytesMut};
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use crate::frontend::client::Client;
use crate::frontend::client_limits::Unanswered;
use crate::frontend::events::{ClientTunnel, FrontendContext, time_is_up};
use crate::frontend::pending_dial;
use crate::router::{AskedAgents, Hub, OpenTunnel};
use adit_config::limits::UNANSWERED_BYTES_FREE;
use adit_config::plan::ConnectPlan;
use adit_telemetry::labels::{ClientDialect, EndReason};
use adit_tls::blocks;
use adit_tls::stream::{Connection, PeerAddr};
use adit_tunnel::lane::Pipe;
use adit_tunnel::{Carrier, Closing, Endpoint, reset_on_close};

/// A target that speaks first waits this long, so that its bytes do not share a read with the 200.
const ANSWER_ALONE: Duration = Duration::from_millis(25);

/// What tunnels of this dialect are at their target.
const NETWORK: &str = "tcp";

/// Serves one connection to its end. `client` is named in logs; one that has not asked for anything is not waited for once this
/// process is `leaving`.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub fn serve<S>(
    io: S,
    hub: Arc<Hub>,
    context: FrontendContext,
    plan: ConnectPlan,
    client: PeerAddr,
    leaving: CancellationToken,
) -> impl Future<Output = ()> + Send + use<S>
where
    S: Connection + Send + 'static,
{
    // Boxed, one after the other: what opens a tunnel is larger than the tunnel, which may live for days in the same task.
    let opening = Box::pin(async move {
        let opened = open(io, &hub, &context, plan, client, &leaving).await;
        opened.map(|(client, carrier)| tunnel(client, carrier))
    });
    async move {
        if let Some(tunnel) = opening.await {
            tunnel.await;
        }
    }
}

fn tunnel<S: Connection + Send + 'static>(
    client: Client<S>,
    carrier: Carrier,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    // From here on only whoever ends it in order takes this back: cut off before that, or with this process, it must not look
    // like a target that said nothing.
    if let Some(socket) = client.io.tcp() {
        reset_on_close(socket);
    }
    match carrier {
        Carrier::Endpoint(endpoint) => Box::pin(serve_tunnel(client, endpoint)),
        Carrier::Pipe(pipe) => Box::pin(splice(client, pipe)),
    }
}

/// From the answer to the end, by this task. Not an `async` function: that would keep what it is called with twice.
fn serve_tunnel<S: Connection>(
    mut client: Client<S>,
    endpoint: Endpoint,
) -> impl Future<Output = ()> + use<S> {
    let mut endpoint = Some(endpoint);
    async move {
        // In this order they are dropped, if it comes to that.
        let (endpoint, client) = (&mut endpoint, &mut client);
        if let Some(closing) = relay(client, endpoint).await {
            client.close(closing).await;
        }
    }
}

/// From the request to the tunnel. `None`: refused, or gone.
async fn open<S>(
    mut io: S,
    hub: &Arc<Hub>,
    context: &FrontendContext,
    plan: ConnectPlan,
    client: PeerAddr,
    leaving: &CancellationToken,
) -> Option<(Client<S>, Carrier)>
where
    S: Connection,
{
    let admission = context.admit(io.principal());
    let connection = context.metrics.http_connection();
    let mut early = BytesMut::new();
    let mut unanswered = Unanswered::new(&context.limits);
    let head = tokio::time::timeout(
        admission.at_most(plan.head_timeout),
        read_head(&mut io, &mut early, &mut unanswered, plan),
    );
    // Gone, broken, or too slow: there is nobody to answer.
    let request = tokio::select! {
        biased;
        head = head => head.ok()?.ok()??,
        () = time_is_up(leaving) => return None,
    };
    let mut tunnel = ClientTunnel::new(context, ClientDialect::HttpConnect);
    let asked = tunnel.dialing(&request.authority);
    let relays = context.relay.as_ref();
    let pipe = io.is_plain() && relays.is_some_and(|relay| relay.has_room());
    let dialed = match admission.check(NETWORK, &request.authority) {
        Ok(()) => {
            let bytes = (&mut early, &mut unanswered);
            dial(&mut io, bytes, hub, &request, pipe, &asked).await
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
            refuse(&mut io, &failure).await;
            None
        }
        Some(Ok(open)) => {
            tunnel.opened(&open, open.carrier.path());
            context.account(&io, open.agent.as_str(), || {
                hub.class_of(&request.authority, open.link)
            });
            tracing::debug!(%client, target_address = request.authority, agent = %open.agent, "tunnel open");
            let client = Client {
                io,
                early,
                tunnel,
                relay: context.relay.clone(),
                open: Some(connection),
            };
            Some((client, open.carrier))
        }
    }
}

/// `None`: answered or gone.
async fn read_head<S>(
    io: &mut S,
    early: &mut BytesMut,
    unanswered: &mut Unanswered,
    plan: ConnectPlan,
) -> std::io::Result<Option<Connect>>
where
    S: Connection,
{
    let mut parser = RequestHead::new(usize::try_from(plan.head_bytes_max).unwrap_or(usize::MAX));
    loop {
        let progress = match unanswered.append(io, early).await? {
            Some(0) => return Ok(None),
            Some(_read) => parser.parse(early),
            // Long heads of all clients together have no more room; short ones are still read.
            None => Progress::Rejected(Rejection::TooLarge),
        };
        match progress {
            Progress::NeedMore => (),
            Progress::Connect(request) => {
                early.advance(request.consumed);
                if request.consumed > UNANSWERED_BYTES_FREE {
                    // The rest would keep the memory of the head.
                    *early = BytesMut::from(&early[..]);
                }
                unanswered.count(early.capacity());
                return Ok(Some(request));
            }
            Progress::Rejected(rejection) => {
                io.write_all(&rejection.response()).await?;
                io.shutdown().await?;
                return Ok(None);
            }
        }
    }
}

/// `None`: the client is gone, which calls the dial off.
async fn dial<S>(
    io: &mut S,
    (early, unanswered): (&mut BytesMut, &mut Unanswered),
    hub: &Arc<Hub>,
    request: &Connect,
    pipe: bool,
    asked: &AskedAgents,
) -> Option<Result<OpenTunnel<Carrier>, DialFailure>>
where
    S: Connection,
{
    let dial = DialId(rand::random::<i64>() & i64::MAX);
    // Boxed: a dial's state is larger than a tunnel's, which may live for days in the same task.
    let dialing = Box::pin(hub.dial_for(dial, NETWORK, &request.authority, pipe, asked));
    pending_dial::outcome(dialing, io, early, unanswered).await
}

async fn refuse<S: Connection>(io: &mut S, failure: &DialFailure) {
    if let Some(response) = connect::failure_response(failure) {
        // A client that has gone needs no answer.
        let _sent = io.write_all(&response).await;
    }
    let _closed = io.shutdown().await;
}

/// When a client went whose dial had become a tunnel.
enum Gone {
    /// It could not be told.
    BeforeAnswer,
    /// It has said nothing.
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

/// Tells the client that its tunnel is open. Whole and alone: clients refuse tunnel bytes that arrive together with the
/// answer, so a target that speaks first waits a moment.
///
/// # Errors
/// The client is gone.
async fn answer<S: Connection>(
    io: &mut S,
    early: &mut BytesMut,
    target_speaks: impl Future<Output = ()>,
) -> Result<(), Gone> {
    let answered = async {
        io.write_all(connect::ESTABLISHED).await?;
        io.flush().await
    };
    answered.await.map_err(|_error| Gone::BeforeAnswer)?;
    if early.is_empty() {
        tokio::select! {
            biased;
            // The client speaks, so it has read the answer; an end is found again by whoever moves the bytes. A reset is not:
            // the kernel tells of it once, and to them it would look like an end.
            read = blocks::append(io, early) => {
                read.map_err(|_error| Gone::BehindAnswer)?;
            }
            () = target_speaks => tokio::time::sleep(ANSWER_ALONE).await,
        }
    }
    Ok(())
}

/// From the answer to the end, by relay threads. A cancelled call resets both sockets.
async fn splice<S: Connection>(mut client: Client<S>, pipe: Pipe) {
    let target_speaks = async {
        if pipe.received.is_empty() {
            // A failure is found again by the relay.
            let _ready = pipe.socket.readable().await;
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
    // Wherever this ends early, the pipe is dropped, which resets it.
    let answered = tokio::select! {
        biased;
        () = stopped => return tunnel.cut(EndReason::Shutdown),
        answered = answer(io, early, target_speaks) => answered,
    };
    if let Err(gone) = answered {
        return gone.tell(tunnel);
    }
    client.splice(pipe).await;
}

/// Moves bytes until the tunnel ends, and says how the connection is to be closed, or until the client has gone.
async fn relay<S: Connection>(
    client: &mut Client<S>,
    carrier: &mut Option<Endpoint>,
) -> Option<Closing> {
    let Client {
        io, early, tunnel, ..
    } = client;
    let endpoint = carrier.as_mut()?;
    tunnel.watch(endpoint);
    if let Err(gone) = Box::pin(answer(io, early, endpoint.readable())).await {
        gone.tell(tunnel);
        return None;
    }
    client.copy_bidirectional(carrier).await
}

#[cfg(test)]
mod tests;
