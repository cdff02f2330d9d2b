//! Clients that know nothing of a proxy: where they wanted to go is known from elsewhere, the rest is bytes.
//!
//! A client believes it is connected to its target, so there is nothing to answer: a dial that fails resets the connection,
//! and what the client says meanwhile waits.

use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use bytes::BytesMut;
use socket2::SockRef;
use tokio::io::AsyncWriteExt as _;

use super::events::{ClientTunnel, FrontendContext};
use crate::config::limits;
use crate::hub::{Carrier, Hub, Leg, OpenTunnel, PipeRelay, PumpEnd, pump};
use crate::lane::Pipe;
use crate::net::blocks;
use crate::net::origin::{OriginError, OriginSource};
use crate::net::stream::{ByteStream, Connection as _, PeerAddr};
use crate::telemetry::labels::{ClientDialect, RedirectRefusal};

/// Bytes a client may send before its tunnel is open; then it waits.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Serves one connection to its end.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub async fn serve(
    mut io: ByteStream,
    hub: &Arc<Hub>,
    context: &FrontendContext,
    origins: &dyn OriginSource,
) {
    let (Some(socket), PeerAddr::Tcp(client)) = (io.tcp(), io.peer()) else {
        return; // Listeners of this dialect are TCP.
    };
    let destination = match origins.origin(socket, client) {
        Ok(destination) => destination.to_string(),
        Err(error) => {
            tracing::debug!(%client, %error, "connection refused");
            let metrics = context.metrics.adit();
            metrics.redirect().refused(match error {
                OriginError::Unknown => RedirectRefusal::UnknownOrigin,
                OriginError::OwnAddress(_) => RedirectRefusal::OwnAddress,
                OriginError::Kernel(_) => RedirectRefusal::Kernel,
            });
            return reset(&io);
        }
    };
    let admission = context.admit();
    let mut tunnel = ClientTunnel::new(context, ClientDialect::Transparent);
    tunnel.dialing(&destination);
    let mut early = BytesMut::new();
    let relays = context.relay.as_ref();
    let pipe = relays.is_some_and(|relay| relay.has_room());
    let dialed = match admission.check() {
        Ok(()) => dial(&mut io, &mut early, hub, &destination, pipe).await,
        Err(failure) => Some(Err(failure)),
    };
    match dialed {
        None => tunnel.abandoned(),
        Some(Err(failure)) => {
            tunnel.failed(&failure);
            reset(&io);
        }
        Some(Ok(open)) => {
            tunnel.opened(&open, open.carrier.path());
            context.account(&io, open.agent.as_str());
            tracing::debug!(%client, target_address = destination, agent = %open.agent, "tunnel open");
            match (open.carrier, &context.relay) {
                (Carrier::Leg(leg), _) => relay(&mut io, early, leg, tunnel).await,
                (Carrier::Pipe(pipe), Some(relay)) => {
                    // Boxed: other tunnels need not keep room for it.
                    Box::pin(splice(io, early, pipe, relay, tunnel)).await;
                }
                // Not asked for.
                (Carrier::Pipe(_), None) => tunnel.ended(0, 0, "relay_failed"),
            }
        }
    }
}

/// `None`: the client broke off while the dial ran. One that merely has nothing more to say waits for its answer.
async fn dial(
    io: &mut ByteStream,
    early: &mut BytesMut,
    hub: &Arc<Hub>,
    destination: &str,
    pipe: bool,
) -> Option<Result<OpenTunnel<Carrier>, DialFailure>> {
    let dial = DialId(rand::random::<i64>() & i64::MAX);
    // Boxed: a dial's state is larger than a tunnel's, which may live for days in the same task.
    let mut dialing = Box::pin(hub.dial_for(dial, "tcp", destination, pipe));
    let mut speaks = true;
    loop {
        let room = speaks && early.len() < EARLY_BYTES_MAX;
        tokio::select! {
            biased;
            outcome = &mut dialing => return Some(outcome),
            read = blocks::append(io, early), if room => match read {
                // Read again by whoever moves the bytes.
                Ok(0) => speaks = false,
                Ok(_) => (),
                Err(_) => return None,
            },
        }
    }
}

/// Has the connection end as one that its target refuses, as far as that is still possible.
fn reset(io: &ByteStream) {
    if let Some(socket) = io.tcp()
        && let Err(error) = SockRef::from(socket).set_linger(Some(Duration::ZERO))
    {
        tracing::debug!(%error, "cannot reset a connection");
    }
}

/// Hands both sockets over to relay threads. A cancelled call resets them.
async fn splice(
    io: ByteStream,
    early: BytesMut,
    pipe: Pipe,
    relay: &PipeRelay,
    mut tunnel: ClientTunnel,
) {
    let (Some(socket), Some(live)) = (io.into_descriptor(), tunnel.live()) else {
        return tunnel.ended(0, 0, "relay_failed");
    };
    let outcome = relay.run(socket, early.freeze(), pipe, &live).await;
    tracing::debug!(end = ?outcome.end, "relayed tunnel over");
    tunnel.moved_by(outcome.engine, outcome.driver);
    let (from_client, to_client) = (outcome.from_socket, outcome.to_socket);
    tunnel.ended(from_client, to_client, outcome.end.reason());
}

async fn relay(io: &mut ByteStream, early: BytesMut, mut leg: Leg, mut tunnel: ClientTunnel) {
    tunnel.watch(&mut leg);
    let outcome = pump(io, &mut leg, early.freeze()).await;
    let reason = match &outcome.end {
        PumpEnd::Tunnel(end) => {
            // A target that broke off must not look like one that closed.
            if !end.is_in_order() {
                reset(io);
            }
            end.reason()
        }
        PumpEnd::ReadFailed(_) | PumpEnd::WriteFailed(_) => "client_gone",
    };
    tunnel.ended(outcome.from_socket, outcome.to_socket, reason);
    // What it held is accounted for until it goes.
    drop(leg);
    // Not behind a reset: the end it would send first looks like that of a whole answer.
    if matches!(&outcome.end, PumpEnd::Tunnel(end) if end.is_in_order()) {
        let _closed = tokio::time::timeout(limits::LINGER_TIMEOUT, io.shutdown()).await;
    }
}
