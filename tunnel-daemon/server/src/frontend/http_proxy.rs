//! The HTTP proxy dialect: requests with a whole URL, each to its target, and CONNECT. `adit-proxy` speaks HTTP; this module opens
//! the tunnels and carries their bytes.

use std::sync::Arc;

use adit_core::failure::DialFailure;
use adit_core::session::{Promise, TunnelKind};
use adit_proxy::http::{After, Connector, Proxy, Refusal, Served};
use bytes::BytesMut;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use crate::frontend::establish::{self, Client, NETWORK, dial_id, report};
use crate::frontend::events::{ClientAccess, ClientTunnel, FrontendContext};
use crate::frontend::pipe::{PipeEnd, pipe};
use crate::frontend::users::FrontendUsers;
use crate::router::OpenTunnel;
use adit_telemetry::labels::{ClientDialect, EndReason};
use adit_tls::stream::{Connection, PeerAddr};
use adit_tunnel::{Carrier, Closing, close_gracefully};

/// Bytes between a tunnel and the HTTP connection to its target, each way, if memory is plentiful or not.
const PIPE_BYTES: usize = 64 * 1024;
const SMALL_PIPE_BYTES: usize = 8 * 1024;

/// Serves one connection to its end. `peer` is its address for logs; with `users` it has to be one of them. Once this process leaves, no further request is read.
///
/// A cancelled call cancels dials and resets tunnels.
pub fn serve<S>(
    io: S,
    peer: PeerAddr,
    context: Arc<FrontendContext>,
    proxy: Arc<Proxy>,
    users: Option<FrontendUsers>,
) -> impl Future<Output = ()> + Send + use<S>
where
    S: Connection + Send + 'static,
{
    establish::run(async move {
        context.account_grpc(&io);
        let connector = Clients {
            access: context.admit(io.principal()),
            may_take_raw_lane: io.is_plain(),
            peer,
            users,
            context: Arc::clone(&context),
        };
        let (io, early, after) = match adit_proxy::http::serve(io, proxy, connector).await {
            Served::Became(io, early, after) => (io, early, after),
            Served::Closed | Served::Lost(After::Upgraded(_)) => return None,
            Served::Broken(mut io) => {
                close_gracefully(&mut io, Closing::CutOff).await;
                return None;
            }
            Served::Lost(After::Tunnel(mut opened)) => {
                opened.tunnel.answer_lost();
                opened.tunnel.cut(EndReason::ClientGone);
                return None;
            }
        };
        match after {
            After::Tunnel(Opened { tunnel, open, .. }) => {
                let class = || context.router.class_of(tunnel.destination(), open.link);
                context.account(&io, open.agent.as_str(), class);
                let (mut client, carrier) =
                    Client::new(io, BytesMut::from(early), tunnel, open.carrier);
                client.unless_stopping(&carrier)?;
                Some(client.copy(carrier))
            }
            After::Upgraded(upgrade) => {
                let (mut io, mut target) = (io, TokioIo::new(upgrade.await.ok()?));
                target.write_all(&early).await.ok()?;
                // The task of the target's connection reports its bytes and its end.
                let _ended = tokio::io::copy_bidirectional(&mut io, &mut target).await;
                None
            }
        }
    })
}

/// Opens tunnels for one client.
struct Clients {
    context: Arc<FrontendContext>,
    access: ClientAccess,
    may_take_raw_lane: bool,
    /// For logs.
    peer: PeerAddr,
    users: Option<FrontendUsers>,
}

/// An open tunnel, and how it came about.
struct Opened {
    tunnel: ClientTunnel,
    open: OpenTunnel<Carrier>,
    /// Memory for the HTTP on both sides of a tunnel that carries requests.
    promise: Option<Promise>,
}

impl Connector for Clients {
    type Tunnel = Opened;
    type Stream = PipeEnd;

    fn authenticate(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(users) = &self.users else {
            return Ok(());
        };
        let shown = headers.get(PROXY_AUTHORIZATION);
        if users.permit_basic(shown) {
            return Ok(());
        }
        // Clients ask once without, to learn that they have to.
        if shown.is_some() {
            let dialect = ClientDialect::HttpProxy;
            self.context
                .refused(self.peer, dialect, &"wrong user or password");
        }
        Err(Refusal::unauthenticated())
    }

    fn permits(&self, target: &str) -> bool {
        self.access.check(NETWORK, target).is_ok()
    }

    async fn open(&self, target: &str, alone: bool) -> Result<Opened, Refusal> {
        let context = &self.context;
        let mut tunnel = ClientTunnel::new(context, ClientDialect::HttpProxy);
        let asked = tunnel.dialing(target);
        let raw_lane = alone && self.may_take_raw_lane && context.has_room_for_raw_lane();
        let promise = (!alone).then(|| context.router.budget().promise(TunnelKind::Socket));
        let dialed = match self.access.check(NETWORK, target) {
            Ok(()) if matches!(promise, Some(None)) => Err(DialFailure::NoMemory),
            Ok(()) => {
                let dialing = context
                    .router
                    .dial_for(dial_id(), NETWORK, target, raw_lane, &asked);
                dialing.await
            }
            Err(failure) => Err(failure),
        };
        let open = report(&mut tunnel, dialed).map_err(|failure| Refusal::from(&failure))?;
        tracing::debug!(client = %self.peer, target_address = target, agent = %open.agent, "tunnel open");
        let promise = promise.flatten();
        Ok(Opened {
            tunnel,
            open,
            promise,
        })
    }

    fn stream(&self, opened: Opened) -> PipeEnd {
        let Opened {
            tunnel,
            open,
            promise,
        } = opened;
        let bytes = if self.context.router.budget().starts_small() {
            SMALL_PIPE_BYTES
        } else {
            PIPE_BYTES
        };
        let (near, far) = pipe(bytes, promise);
        let (client, carrier) = Client::new(far, BytesMut::new(), tunnel, open.carrier);
        self.spawn(client.copy(carrier));
        near
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(overloaded) = self.context.tasks.spawn("http-proxy", work) {
            tracing::warn!(client = %self.peer, %overloaded, "a request is dropped");
        }
    }
}
