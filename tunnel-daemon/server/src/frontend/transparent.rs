//! Captured clients, which know of no proxy: their destination comes from another source, and all bytes are payload.
//!
//! A client believes it is connected to its target, so no answer is sent: a failed dial resets the connection, and the client's
//! bytes wait until the tunnel is open.

use std::sync::Arc;

use crate::frontend::establish::{self, NewClient};
use crate::frontend::events::FrontendContext;
use adit_net::original_dst::{OriginError, OriginSource};
use adit_telemetry::labels::{ClientDialect, RedirectRefusal};
use adit_tls::stream::{ByteStream, PeerAddr};
use adit_tunnel::reset_on_close;

/// Serves one connection to its end.
///
/// A cancelled call cancels the dial or resets the tunnel. Either way the connection is reset; the kernel does the same for a
/// process that is killed.
pub fn serve(
    io: ByteStream,
    context: Arc<FrontendContext>,
    origins: Arc<dyn OriginSource>,
) -> impl Future<Output = ()> + Send + use<> {
    establish::run(Box::pin(async move {
        let peer = io.peer();
        let (Some(socket), PeerAddr::Tcp(client)) = (io.tcp(), peer) else {
            return None; // Listeners of this dialect are TCP.
        };
        // The client takes any close for its target's, so a close resets from the start. Only an orderly end undoes this.
        reset_on_close(socket);
        let destination = match origins.origin(socket, client) {
            Ok(destination) => destination,
            Err(error) => {
                tracing::debug!(%client, %error, "connection refused");
                let redirect = context.metrics.adit().redirect();
                redirect.refused.count(match error {
                    OriginError::Unknown => RedirectRefusal::UnknownOrigin,
                    OriginError::OwnAddress(_) => RedirectRefusal::OwnAddress,
                    OriginError::Kernel(_) => RedirectRefusal::Kernel,
                });
                return None;
            }
        };
        let mut client = NewClient::new(io, peer, context, ClientDialect::Transparent);
        let rule = || origins.rule(destination);
        // The client is connected from the start: a failed dial resets the connection, and an open tunnel needs no answer.
        let opened = client.dial(&destination.to_string(), rule).await?.ok()?;
        Some(client.open(opened)?.copy())
    }))
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _};
    use std::net::{Shutdown, SocketAddr};
    use std::time::{Duration, Instant};

    use adit_core::ids::AgentId;
    use adit_core::wire::identifiers::Identifiers;
    use adit_relay::unacknowledged_bytes;
    use socket2::SockRef;
    use tokio::net::{TcpListener, TcpStream};

    use std::pin::Pin;

    use super::*;
    use crate::router::{LinkInfo, RegisteredLink, Router};
    use adit_tls::agent_identity::AgentIdentity;
    use adit_tls::stream::Socket;

    /// The original destination of all connections.
    struct To(SocketAddr);

    impl OriginSource for To {
        fn origin(&self, _: &TcpStream, _: SocketAddr) -> Result<SocketAddr, OriginError> {
            Ok(self.0)
        }
    }

    /// A captured client whose dial waits for a link that never answers.
    struct Waiting {
        client: std::net::TcpStream,
        router: Arc<Router>,
        serving: Pin<Box<dyn Future<Output = ()> + Send>>,
        _link: RegisteredLink,
    }

    async fn waiting() -> Waiting {
        let context = FrontendContext::for_tests();
        let router = Arc::clone(&context.router);
        let agent = LinkInfo {
            agent: AgentId::new("a"),
            identifiers: Identifiers::default(),
            identity: AgentIdentity::Unverified,
            credit: true,
            version: adit_core::wire::metadata::PeerVersion::default(),
            address: PeerAddr::Unix,
            dials: Arc::default(),
        };
        let link = router.register(agent, 1, None).unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let (accepted, peer) = listener.accept().await.unwrap();
        let origins = Arc::new(To(([192, 0, 2, 1], 443).into()));
        let stream = ByteStream::Plain(Socket::Tcp(accepted), PeerAddr::Tcp(peer));
        let serving = serve(stream, context, origins);
        let mut waiting = Waiting {
            client,
            router,
            serving: Box::pin(serving),
            _link: link,
        };
        assert!(futures_util::poll!(&mut waiting.serving).is_pending());
        assert_eq!(waiting.router.pending_dials(), 1);
        waiting
    }

    #[tokio::test]
    async fn the_dial_of_a_half_closed_client_continues_until_a_reset() {
        let mut waiting = waiting().await;
        waiting.client.shutdown(Shutdown::Write).unwrap();
        let start = Instant::now();
        // FIN counts as one byte.
        while unacknowledged_bytes(&waiting.client).unwrap() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "never delivered");
            tokio::task::yield_now().await;
        }
        for _turn in 0..3 {
            // Lets the runtime report the FIN, and lets the frontend read it.
            tokio::task::yield_now().await;
            assert!(futures_util::poll!(&mut waiting.serving).is_pending());
        }
        assert_eq!(waiting.router.pending_dials(), 1);
        let breaks_off = SockRef::from(&waiting.client).set_linger(Some(Duration::ZERO));
        breaks_off.unwrap();
        drop(waiting.client);
        let over = tokio::time::timeout(Duration::from_secs(30), waiting.serving).await;
        over.expect("the dial is called off");
        assert_eq!(waiting.router.pending_dials(), 0);
    }

    /// As when a server shuts down after its grace period. A FIN would look like a target that closed, but no target was
    /// reached.
    #[tokio::test]
    async fn a_client_whose_dial_is_cut_off_is_reset() {
        let mut waiting = waiting().await;
        drop(waiting.serving);
        let read = waiting.client.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(read, Err(ErrorKind::ConnectionReset));
    }
}
