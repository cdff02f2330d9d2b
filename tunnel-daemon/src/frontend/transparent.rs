//! Clients that know nothing of a proxy: where they wanted to go is known from elsewhere, the rest is bytes.
//!
//! A client believes it is connected to its target, so there is nothing to answer: a dial that fails resets the connection,
//! and what the client says meanwhile waits.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use bytes::BytesMut;
use socket2::SockRef;

use super::carry::Client;
use super::events::{ClientTunnel, FrontendContext};
use crate::hub::{Carrier, Hub, Leg, OpenTunnel};
use crate::net::blocks;
use crate::net::origin::{OriginError, OriginSource};
use crate::net::stream::{ByteStream, PeerAddr};
use crate::telemetry::labels::{ClientDialect, RedirectRefusal};

/// Bytes a client may send before its tunnel is open; then it waits.
const EARLY_BYTES_MAX: usize = 64 * 1024;

/// Serves one connection to its end.
///
/// A cancelled call cancels the dial or resets the tunnel.
pub fn serve(
    io: ByteStream,
    hub: Arc<Hub>,
    context: FrontendContext,
    origins: Arc<impl OriginSource>,
) -> impl Future<Output = ()> + Send {
    // Boxed, one after the other, as in the CONNECT dialect.
    let opening = Box::pin(async move {
        let opened = open(io, &hub, &context, &*origins).await;
        opened.map(|(client, carrier)| tunnel(client, carrier))
    });
    async move {
        if let Some(tunnel) = opening.await {
            tunnel.await;
        }
    }
}

fn tunnel(
    client: Client<ByteStream>,
    carrier: Carrier,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    match carrier {
        Carrier::Leg(leg) => Box::pin(carry(client, leg)),
        Carrier::Pipe(pipe) => Box::pin(client.splice(pipe)),
    }
}

/// Moves the bytes by this task. Not an `async` function: that would keep what it is called with twice.
fn carry(mut client: Client<ByteStream>, mut leg: Leg) -> impl Future<Output = ()> {
    client.tunnel.watch(&mut leg);
    let mut leg = Some(leg);
    async move {
        // In this order they are dropped, if it comes to that.
        let (leg, client) = (&mut leg, &mut client);
        if let Some(closing) = client.pump(leg).await {
            client.close(closing).await;
        }
    }
}

/// From the connection to the tunnel. `None`: refused, or gone.
async fn open(
    mut io: ByteStream,
    hub: &Arc<Hub>,
    context: &FrontendContext,
    origins: &dyn OriginSource,
) -> Option<(Client<ByteStream>, Carrier)> {
    let (Some(socket), PeerAddr::Tcp(client)) = (io.tcp(), io.peer()) else {
        return None; // Listeners of this dialect are TCP.
    };
    let wanted = match origins.origin(socket, client) {
        Ok(wanted) => wanted,
        Err(error) => {
            tracing::debug!(%client, %error, "connection refused");
            let metrics = context.metrics.adit();
            metrics.redirect().refused(match error {
                OriginError::Unknown => RedirectRefusal::UnknownOrigin,
                OriginError::OwnAddress(_) => RedirectRefusal::OwnAddress,
                OriginError::Kernel(_) => RedirectRefusal::Kernel,
            });
            reset(&io);
            return None;
        }
    };
    let destination = wanted.to_string();
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
        None => {
            tunnel.abandoned();
            None
        }
        Some(Err(failure)) => {
            tunnel.failed(&failure);
            reset(&io);
            None
        }
        Some(Ok(open)) => {
            tunnel.opened(&open, open.carrier.path());
            context.account(&io, open.agent.as_str(), || {
                let rule = origins.rule(wanted);
                rule.or_else(|| hub.class_of(&destination, open.link))
            });
            tracing::debug!(%client, target_address = destination, agent = %open.agent, "tunnel open");
            let client = Client {
                io,
                early,
                tunnel,
                relay: context.relay.clone(),
                open: None,
            };
            Some((client, open.carrier))
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
