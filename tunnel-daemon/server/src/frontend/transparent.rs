//! Clients that know nothing of a proxy: where they wanted to go is known from elsewhere, the rest is bytes.
//!
//! A client believes it is connected to its target, so there is nothing to answer: a dial that fails resets the connection,
//! and what the client says meanwhile waits.

use std::pin::Pin;
use std::sync::Arc;

use adit_core::failure::DialFailure;
use adit_core::ids::DialId;
use bytes::BytesMut;

use crate::frontend::client::Client;
use crate::frontend::client_limits::Unanswered;
use crate::frontend::events::{ClientTunnel, FrontendContext};
use crate::frontend::pending_dial;
use crate::router::{AskedAgents, Hub, OpenTunnel};
use adit_net::original_dst::{OriginError, OriginSource};
use adit_telemetry::labels::{ClientDialect, RedirectRefusal};
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tunnel::{Carrier, Endpoint, reset_on_close};

/// What tunnels of this dialect are at their target.
const NETWORK: &str = "tcp";

/// Serves one connection to its end.
///
/// A cancelled call cancels the dial or resets the tunnel; either way the connection is reset, and so it is by the kernel for a
/// process that is killed.
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
        Carrier::Endpoint(endpoint) => Box::pin(serve_tunnel(client, endpoint)),
        Carrier::Pipe(pipe) => Box::pin(client.splice(pipe)),
    }
}

/// Moves the bytes by this task. Not an `async` function: that would keep what it is called with twice.
fn serve_tunnel(
    mut client: Client<ByteStream>,
    mut endpoint: Endpoint,
) -> impl Future<Output = ()> {
    client.tunnel.watch(&mut endpoint);
    let mut endpoint = Some(endpoint);
    async move {
        // In this order they are dropped, if it comes to that.
        let (endpoint, client) = (&mut endpoint, &mut client);
        if let Some(closing) = client.copy_bidirectional(endpoint).await {
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
    // From the first moment its client takes what ends it for its target. Only whoever ends it in order takes this back.
    reset_on_close(socket);
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
            return None;
        }
    };
    let destination = wanted.to_string();
    let admission = context.admit(None);
    let mut tunnel = ClientTunnel::new(context, ClientDialect::Transparent);
    let asked = tunnel.dialing(&destination);
    let mut early = BytesMut::new();
    let relays = context.relay.as_ref();
    let pipe = relays.is_some_and(|relay| relay.has_room());
    let dialed = match admission.check(NETWORK, &destination) {
        Ok(()) => {
            let bytes = (&mut early, Unanswered::new(&context.limits));
            dial(&mut io, bytes, hub, &destination, pipe, &asked).await
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

/// `None`: the client is gone, which calls the dial off.
async fn dial(
    io: &mut ByteStream,
    (early, mut unanswered): (&mut BytesMut, Unanswered),
    hub: &Arc<Hub>,
    destination: &str,
    pipe: bool,
    asked: &AskedAgents,
) -> Option<Result<OpenTunnel<Carrier>, DialFailure>> {
    let dial = DialId(rand::random::<i64>() & i64::MAX);
    // Boxed: a dial's state is larger than a tunnel's, which may live for days in the same task.
    let dialing = Box::pin(hub.dial_for(dial, NETWORK, destination, pipe, asked));
    pending_dial::outcome(dialing, io, early, &mut unanswered).await
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _};
    use std::net::{Shutdown, SocketAddr};
    use std::time::{Duration, Instant};

    use adit_core::ids::AgentId;
    use adit_core::registry::Registry;
    use adit_core::wire::identifiers::Identifiers;
    use adit_relay::unacknowledged_bytes;
    use socket2::SockRef;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::router::{DialLimits, Entered, LinkInfo};
    use adit_net::accounts::Accounts;
    use adit_net::descriptors::Descriptors;
    use adit_telemetry::{AccessLog, ServerMetrics};
    use adit_tls::agent_identity::AgentIdentity;

    /// Where all connections wanted to go.
    struct To(SocketAddr);

    impl OriginSource for To {
        fn origin(&self, _: &TcpStream, _: SocketAddr) -> Result<SocketAddr, OriginError> {
            Ok(self.0)
        }
    }

    /// A captured client whose dial waits for a link that never answers.
    struct Waiting {
        client: std::net::TcpStream,
        hub: Arc<Hub>,
        serving: Pin<Box<dyn Future<Output = ()> + Send>>,
        _link: Entered,
    }

    async fn waiting() -> Waiting {
        let limits = DialLimits {
            pending_max: 1,
            timeout: None,
            dead_after: Duration::from_secs(8),
        };
        let hub = Hub::new(Registry::new("default".parse().unwrap()), limits);
        let agent = LinkInfo {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            identity: AgentIdentity::Unverified,
            credit: true,
            version: adit_core::wire::metadata::PeerVersion::default(),
            address: PeerAddr::Unix,
        };
        let link = hub.enter(agent, 1, None).unwrap();
        let metrics = ServerMetrics::new(&["default"]);
        let suppressed = metrics.adit().access_events_suppressed();
        let context = FrontendContext {
            metrics,
            access: Arc::new(AccessLog::new(1, suppressed)),
            relay: None,
            descriptors: Arc::new(Descriptors::unlimited()),
            accounts: Accounts::off(),
            limits: Arc::default(),
        };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let (accepted, peer) = listener.accept().await.unwrap();
        let origins = Arc::new(To(([192, 0, 2, 1], 443).into()));
        let stream = ByteStream::Tcp(accepted, peer);
        let serving = serve(stream, Arc::clone(&hub), context, origins);
        let mut waiting = Waiting {
            client,
            hub,
            serving: Box::pin(serving),
            _link: link,
        };
        assert!(futures_util::poll!(&mut waiting.serving).is_pending());
        assert_eq!(waiting.hub.pending_dials(), 1);
        waiting
    }

    #[tokio::test]
    async fn the_dial_of_a_half_closed_client_goes_on_until_it_breaks_off() {
        let mut waiting = waiting().await;
        waiting.client.shutdown(Shutdown::Write).unwrap();
        let start = Instant::now();
        // An end counts as a byte.
        while unacknowledged_bytes(&waiting.client).unwrap() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "never delivered");
            tokio::task::yield_now().await;
        }
        for _turn in 0..3 {
            // The runtime hears of it, and the frontend reads it.
            tokio::task::yield_now().await;
            assert!(futures_util::poll!(&mut waiting.serving).is_pending());
        }
        assert_eq!(waiting.hub.pending_dials(), 1);
        let breaks_off = SockRef::from(&waiting.client).set_linger(Some(Duration::ZERO));
        breaks_off.unwrap();
        drop(waiting.client);
        let over = tokio::time::timeout(Duration::from_secs(30), waiting.serving).await;
        over.expect("the dial is called off");
        assert_eq!(waiting.hub.pending_dials(), 0);
    }

    /// As when a server leaves whose grace is over: no target has closed that nobody has reached yet.
    #[tokio::test]
    async fn a_client_whose_dial_is_cut_off_is_reset() {
        let mut waiting = waiting().await;
        drop(waiting.serving);
        let read = waiting.client.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::ConnectionReset));
    }
}
